"""The machine: which it is, the CPUs that count, and how fast it moves and computes at best."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .peers import THREADS, seconds

_LIBRARIES = (
    "numpy",
    "scipy",
    "numba",
    "llvmlite",
    "mkl",
    "sparse_dot_mkl",
    "librosa",
    "jax",
    "jaxlib",
    "torch",
)
_GPU_LIBRARIES = (
    "numba-cuda",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)
_ROOT = Path(__file__).parent.parent


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
    return {
        "device": {
            "cpu": info.get("model name", platform.processor()).strip(),
            "family, model, stepping": [
                info.get(key, "").strip() for key in ("cpu family", "model", "stepping")
            ],
            "cores": os.cpu_count(),
            "cores used": THREADS,
            "cache": info.get("cache size", "").strip(),
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version()}
        | {library: _version(library) for library in _LIBRARIES},
    }


def describe_gpu() -> dict[str, Any]:
    """The current CUDA device, its driver, and versions of the libraries for it."""
    import cupy

    runtime, device = cupy.cuda.runtime, cupy.cuda.Device()
    properties = runtime.getDeviceProperties(device.id)
    return {
        "device": {
            "gpu": properties["name"].decode(),
            "compute capability": device.compute_capability,
            "multiprocessors": properties["multiProcessorCount"],
            "memory bytes": properties["totalGlobalMem"],
            "L2 bytes": properties["l2CacheSize"],
            "driver": _nvidia_smi("driver_version"),
            "CUDA versions of driver and runtime": [
                runtime.driverGetVersion(),
                runtime.runtimeGetVersion(),
            ],
            "clocks, temperature, power": _nvidia_smi(
                "clocks.sm,clocks.mem,temperature.gpu,power.draw"
            ),
        },
        "versions": {library: _version(library) for library in _GPU_LIBRARIES},
    }


def commit() -> tuple[str, bool]:
    """The commit that is checked out, and whether files differ from it, but for results."""
    changes = _git("status", "--porcelain", "--", ".", ":(exclude)bench/results")
    return _git("rev-parse", "HEAD"), bool(changes)


def head(
    module: str, commit: tuple[str, bool], gpu: dict[str, Any] | None = None
) -> tuple[dict[str, Any], str]:
    """Where results come from, and the name of the device.

    That is what :func:`describe_gpu` said, if the run was on a GPU.
    """
    about = describe()
    device = about["device"]["cpu"]
    if gpu is not None:
        del about["device"]["cores used"]
        about = {key: about[key] | gpu[key] for key in about}
        device = gpu["device"]["gpu"]
    come_from = {
        "commit": commit[0],
        "dirty": commit[1],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
    }
    return come_from | about, device


def file_name(prefix: str, device: str, commit: tuple[str, bool]) -> str:
    """The name of a file of results."""
    device = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    now = datetime.now(timezone.utc)
    return f"{prefix}-{device}-{now:%Y-%m-%d}-{commit[0][:8]}{'-dirty' * commit[1]}.json"


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
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(prefix, device, commit)
    path.write_text(json.dumps(about | results, indent=1, ensure_ascii=False) + "\n")
    return path


def others() -> float:
    """CPU seconds that were not this process's, on all CPUs, since an arbitrary moment.

    Those of other processes, and those that the host of a virtual machine took; 0 where Linux does
    not say.
    """
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
    busy = user + nice + system + irq + softirq + steal
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


@cache
def bandwidth(size: int) -> float:
    """Bytes per second at which `size` bytes are read again and again, by one or two threads.

    What fits the caches is read from there, as it is in a benchmark that repeats its work.
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
    """What the driver's tool says of the first device, if there is such a tool."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
