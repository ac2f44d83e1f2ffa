"""The machine: which it is, the CPUs that count, how fast it moves and computes at best.

And what a run on it writes: JSON that says where it comes from.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .timing import THREADS, Call, Ceilings, seconds

_LIBRARIES = (
    *("numpy", "scipy", "numba", "llvmlite", "mkl", "sparse_dot_mkl", "jax", "jaxlib", "torch"),
    *("torchrecurrent", "snntorch", "xlstm", "onnxruntime", "stable-baselines3", "sb3-contrib"),
)
_GPU_LIBRARIES = ["numba-cuda"] + [
    name.format(cuda)
    for name in ("cupy-cuda{}x", "jax-cuda{}-plugin", "nvidia-cudnn-cu{}")
    for cuda in (12, 13)
]
_ROOT = Path(__file__).parent.parent
RESULTS = _ROOT / "bench" / "results"


def pin() -> None:
    """Keep this process, and the threads and processes it starts, on two CPUs.

    Every library asks for the CPUs it may use, when it is imported or first called.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])


def describe() -> dict[str, Any]:
    """CPU, memory, system and library versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    info = dict(line.replace("\t", "").split(":", 1) for line in lines if ":" in line)
    keys = "cpu family", "model", "stepping"
    return {
        "device": {
            "cpu": info.get("model name", platform.processor()).strip(),
            "family, model, stepping": [info.get(key, "").strip() for key in keys],
            "cores": os.cpu_count(),
            "cores used": THREADS,
            "cache": info.get("cache size", "").strip(),
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version()}
        | {library: _version(library) for library in _LIBRARIES},
    }


def describe_gpu() -> dict[str, Any]:
    """Return the current CUDA device, its driver, and versions of the libraries for it."""
    import cupy

    runtime, device = cupy.cuda.runtime, cupy.cuda.Device()
    properties = runtime.getDeviceProperties(device.id)
    cuda = [runtime.driverGetVersion(), runtime.runtimeGetVersion()]
    state = _nvidia_smi("clocks.sm,clocks.mem,temperature.gpu,power.draw")
    return {
        "device": {
            "gpu": properties["name"].decode(),
            "compute capability": device.compute_capability,
            "multiprocessors": properties["multiProcessorCount"],
            "memory bytes": properties["totalGlobalMem"],
            "L2 bytes": properties["l2CacheSize"],
            "driver": _nvidia_smi("driver_version"),
            "CUDA versions of driver and runtime": cuda,
            "clocks, temperature, power": state,
        },
        "versions": {library: _version(library) for library in _GPU_LIBRARIES},
    }


def commit() -> tuple[str, bool]:
    """Return the commit that is checked out, and whether files differ from it, but for results."""
    changes = _output("git", "status", "--porcelain", "--", ".", ":(exclude)bench/results")
    return _output("git", "rev-parse", "HEAD"), bool(changes)


def head(
    module: str, commit: tuple[str, bool], gpu: dict[str, Any] | None = None
) -> tuple[dict[str, Any], str]:
    """Where results come from, and the name of the device; `gpu` is from :func:`describe_gpu`."""
    about = describe()
    device = about["device"]["cpu"]
    if gpu is not None:
        del about["device"]["cores used"]
        about = {key: about[key] | gpu[key] for key in about}
        device = gpu["device"]["gpu"]
    come_from = {
        "commit": commit[0],
        "dirty": commit[1],
        "date": now(),
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
    }
    return come_from | about, device


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def file_name(prefix: str, device: str, commit: tuple[str, bool]) -> str:
    """Return the name of a file of results."""
    device = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return f"{prefix}-{device}-{now()[:10]}-{commit[0][:8]}{'-dirty' * commit[1]}.json"


def write(
    folder: Path,
    prefix: str,
    module: str,
    commit: tuple[str, bool],
    results: dict[str, Any],
    gpu: dict[str, Any] | None = None,
) -> Path:
    """Write what a run gave as JSON, with where it comes from; the path."""
    about, device = head(module, commit, gpu)
    path = folder / file_name(prefix, device, commit)
    save(path, about | results)
    return path


def save(path: Path, results: dict[str, Any]) -> None:
    """Replace a JSON file at once: a process that is stopped here leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(_text(brief(results)) + "\n")
    new.replace(path)


# Quantiles that are kept of samples, the quartiles among them, and digits of all numbers but those
# that are compared.
_QUANTILES, _DIGITS, _EXACT = 9, 6, ("losses", "curves")
_SAMPLES = "samples", "samples_seconds"


def brief(value: Any, name: str = "") -> Any:
    """Return results as they are kept: of many samples there are quantiles, the least one first."""
    if isinstance(value, dict):
        return {
            key: each if key in _EXACT else brief(each, name if name in _SAMPLES else key)
            for key, each in value.items()
        }
    if isinstance(value, list):
        are_numbers = all(isinstance(each, (int, float)) for each in value)
        if name == "samples" and are_numbers and len(value) > _QUANTILES:
            value = np.quantile(value, np.linspace(0, 1, _QUANTILES)).tolist()
        # Rounds are compared one by one: each round of `samples_seconds` stays, its calls do not.
        name = "samples" if name in _SAMPLES else name
        return [brief(each, name) for each in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _text(value: Any) -> str:
    """Return JSON of which each line has a number, a list of numbers or a name."""
    if isinstance(value, dict) and value:
        own = (f"{json.dumps(k, ensure_ascii=False)}: {_text(each)}" for k, each in value.items())
        return "{\n" + ",\n".join(own) + "\n}"
    if isinstance(value, list) and any(isinstance(each, (dict, list)) for each in value):
        return "[\n" + ",\n".join(map(_text, value)) + "\n]"
    return json.dumps(value, ensure_ascii=False)


class Cpu:
    """The CPU as a device, with the interface of :class:`bench.gpu_device.Cuda`."""

    xp = np
    device = None
    torch_name = "cpu"
    cache = 0

    put = get = staticmethod(np.asarray)

    def synchronize(self) -> None:
        pass

    free = synchronize

    def waits_inside(self, call: Call) -> bool:
        return False

    def samples(self, call: Call, times: int, clock: str, cold: bool) -> list[float]:
        return seconds(call, times)

    def ceilings(self, moved: int, dtype: Any = np.float32) -> Ceilings:
        """Return the rates of work that moves so many bytes."""
        return Ceilings(bandwidth(moved), flop_rate(np.dtype(dtype)))


@cache
def bandwidth(size: int) -> float:
    """Bytes per second at which `size` bytes are read again and again, by one or two threads.

    Bytes that fit the caches are read from there, as in a benchmark that repeats its work.
    """
    x = np.ones(max(size // 4, 1024), np.float32)
    return x.nbytes / min(min(_run(_sum, x, threads)) for threads in (1, THREADS))


@cache
def flop_rate(dtype: np.dtype[Any]) -> float:
    """FLOPs per second of two threads that only multiply and add, in registers."""
    steps, lanes = 1_000_000, _REGISTERS // dtype.itemsize
    start = np.linspace(0, 1, THREADS * lanes, dtype=dtype)
    return 2 * steps * start.size / min(_run(_multiply_adds(steps, lanes), start, THREADS))


def _run(kernel: Any, x: NDArray[Any], threads: int) -> list[float]:
    if threads == 1:
        return seconds(lambda: kernel(x), 15)
    parts = np.array_split(x, threads)
    with ThreadPoolExecutor(threads) as pool:
        return seconds(lambda: list(pool.map(kernel, parts)), 15)


# Bytes that all vector units work on at a time: eight registers of 64, or sixteen of 32.
_REGISTERS = 512


@njit(nogil=True, fastmath=True)
def _sum(x):  # type: ignore[no-untyped-def]
    total = x.dtype.type(0)
    for i in range(len(x)):
        total += x[i]
    return total


def _multiply_adds(steps: int, lanes: int) -> Any:
    @njit(nogil=True, fastmath={"contract"})
    def run(x):  # type: ignore[no-untyped-def]
        y = x.copy()
        scale, shift = x.dtype.type(0.999), x.dtype.type(0.001)
        for _ in range(steps):
            for i in range(lanes):
                y[i] = y[i] * scale + shift
        return y.sum()

    return run


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _nvidia_smi(query: str) -> str | None:
    """Ask the driver's tool about the first device, if there is such a tool."""
    return _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0") or None


def _output(*command: str) -> str:
    """Return the output of a program; "" if there is none, or if it hangs."""
    try:
        done = subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
