"""Parts of a run on a GPU, each in a process of its own, with a file of what it has found."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from sparsescan.arrays.arrays import load_cupy
from sparsescan.arrays.cuda import current
from sparsescan.kernels.cuda import device, machine_code
from sparsescan.kernels.cuda.checks import check_kernel, is_safe

from . import machine
from .gpu_chains import chained, family_cases, repeat, run_cases, sanitizer_cases
from .gpu_measure import measure
from .gpu_races import RACES, reduced
from .peers import MissingPeerError

Report = dict[str, Any]
Save = Callable[[Report], None]


def run(name: str, file: Path, rehearsed: bool = False) -> None:
    """Run a part; whatever it has found is in the file, even if it is stopped."""
    if rehearsed:
        from .gpu_rehearsal import stand_in

        with stand_in() as gpu:
            _run(name, file, gpu, gpu.about, rehearsed)
        return
    from .gpu_device import Cuda

    if name == "sanitize":
        import cupy

        cupy.cuda.set_allocator(None)  # or an access past an array stays within the pool
    about = machine.describe_gpu()
    print(about, flush=True)
    _run(name, file, None if name == "preflight" else Cuda(), about, rehearsed)


def _run(name: str, file: Path, gpu: Any, about: Report, rehearsed: bool) -> None:
    def save(report: Report) -> None:
        origins = machine_code.origins()
        kernels = {**origins.counts, "errors": list(origins.errors)}
        machine.save(file, {"gpu": about, "kernels": kernels} | report)

    save({"ok": False, "summary": "nothing done"})
    if name == "preflight":
        save({"ok": True, "summary": preflight()})
    elif name in CHECKS:
        check, what, small = CHECKS[name]
        check(gpu, save=counted(save, what), **small if rehearsed else {})
    else:
        race(name, gpu, save, rehearsed)


# -- The smallest run ------------------------------------------------------------------------------


def preflight() -> str:
    """Run the smallest kernel by itself and in a graph, and multiply by cuBLAS; what was done.

    An exception says which step a machine cannot do.
    """
    cupy = load_cupy()
    indptr, indices = (cupy.asarray(np.array(a, np.int32)) for a in ([0, 1, 2], [0, 1]))
    if not is_safe(indptr, indices, 2) or is_safe(indptr, indices, 1):
        raise AssertionError("a kernel gives a wrong result")
    stream, fault = cupy.cuda.Stream(non_blocking=True), cupy.zeros(1, np.int32)
    cupy.cuda.runtime.deviceSynchronize()
    addresses = indptr.data.ptr, 2, indices.data.ptr, 2, 1, fault.data.ptr
    with current(cupy.cuda.Device().id), stream:
        stream.begin_capture()
        device.launch(check_kernel(indptr.dtype), 1, 32, stream.ptr, *addresses)
        graph = stream.end_capture()
        before = int(fault.get()[0])
        graph.launch(stream)
        if (before, int(fault.get()[0])) != (0, 1):
            raise AssertionError("a graph of a kernel gives a wrong result")
    ones = cupy.ones((2, 2), np.float32)
    if cupy.matmul(ones, ones).get().tolist() != [[2, 2], [2, 2]]:
        raise AssertionError("cuBLAS gives a wrong result")
    return "a kernel compiled, launched and captured; a product by cuBLAS"


# -- Checks ---------------------------------------------------------------------------------------


def counted(save: Save, what: str) -> Save:
    """Return what takes the report of some cases, and saves it with how many have failed."""

    def told(report: Report) -> None:
        bad = [*report.get("failed", ()), *(c for c in report.get("cases", ()) if not c["ok"])]
        done, asked = report["done"], report["asked"]
        summary = f"{done} of {asked} {what}: {len(bad)} failed"
        save(report | {"ok": done == asked and not bad, "summary": summary})

    return told


def _sanitize(gpu: Any, save: Save, most: int | None = None) -> None:
    run_cases(dict(islice(sanitizer_cases(gpu).items(), most)), save)


# What is done, what it counts, and options of a rehearsal.
CHECKS: dict[str, tuple[Callable[..., Any], str, dict[str, int]]] = {
    "families": (
        lambda gpu, save: run_cases(family_cases(gpu), save),
        "families of kernels",
        {},
    ),
    "chained": (
        chained,
        "runs of a chain in one launch",
        {"steps": 60, "batch": 2, "chunks": 4, "repetitions": 2},
    ),
    "repeat": (repeat, "random chains, again and again", {"chains": 2, "repetitions": 2}),
    "sanitize": (_sanitize, "scans and training steps", {"most": 2}),
}
NAMES = ("preflight", *CHECKS, *RACES)


# -- Races ----------------------------------------------------------------------------------------


def race(name: str, gpu: Any, save: Save, rehearsed: bool = False) -> None:
    """Run the races of a part, one after the other."""
    ceilings, broken = gpu.ceilings(), dict[str, str]()
    found: Report = {"ceilings": vars(ceilings), "races": [], "missing": {}, "failed": {}}
    races: list[partial[Any]] = RACES[name]
    if rehearsed:
        # Of small size most are the same.
        small = map(reduced, races)
        races = list({(make.func, *make.keywords.values()): make for make in small}.values())
    for make in races:
        sizes = [f"{key}={value}" for key, value in make.keywords.items()]
        what = " ".join([make.func.__name__, *sizes])
        print(what, flush=True)
        try:
            found["races"].append(measure(make(gpu), gpu, ceilings, broken))
        except MissingPeerError as missing:
            found["missing"][what] = str(missing)
        except Exception as error:
            traceback.print_exc()
            found["failed"][what] = f"{type(error).__name__}: {error}"[:500]
        gpu.free()
        done = len(found["races"]) + len(found["missing"])
        why = dict.fromkeys([*found["missing"].values(), *found["failed"].values()])
        summary = "; ".join([f"{len(found['races'])} of {len(races)} races", *why])
        save(found | {"ok": done == len(races), "summary": summary})
