"""Launches of `sparsescan` as compiled PTX, on the memory of the stand-in for CuPy.

With ``SPARSESCAN_BUILD_KERNELS=FOLDER`` the machine code of each kernel that is launched is written
there, for a GPU of compute capability 9.0 that is to run the same.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import fake_cupy
import pytest

import sparsescan.kernels
from sparsescan.arrays import cuda as _door
from sparsescan.kernels.cuda import device as _device

from .runner import Traffic, compile_kernel, lower_kernel

BUILD = "SPARSESCAN_BUILD_KERNELS"

# Bytes of memory from which on races are not looked for, as that takes eight times as much again.
_RACES = 1 << 26
# What makes Numba's device the current one, beside kernels; it is imported before all is replaced.
_WITH_LAUNCHES = "sparsescan.execution.cuda.workspace", "sparsescan.recurrent.device"


def launch(kernel: Any, blocks: int, threads: int, *arguments: Any) -> None:
    """Run all blocks of a kernel."""
    memory = fake_cupy.state.memory()
    races = sum(size for _, size in memory) <= _RACES
    program = compile_kernel(kernel, len(arguments))
    if folder := os.environ.get(BUILD):
        _build(kernel, len(arguments), Path(folder))
    program.launch(blocks, threads, arguments, memory, races=races)


@cache
def _build(kernel: Any, count: int, folder: Path) -> None:
    """Write the machine code of a kernel, made of the very IR that runs here."""
    from sparsescan.kernels.cuda.machine_code import read, save

    folder.mkdir(parents=True, exist_ok=True)
    if read(kernel, count, (9, 0), folder) is None:
        text = lower_kernel(kernel, count).ptx("9.0a")
        code = _door.assemble(_door.with_threads(text, kernel))
        save(kernel, count, (9, 0), folder, code)


def _launch(kernel: Any, blocks: int, threads: int, stream: int, *arguments: Any) -> None:
    """Run a kernel where `sparsescan` would start it."""
    if blocks > 0:
        launch(kernel, int(blocks), int(threads), *arguments)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch so until the test ends; there is no device that Numba could make the current one."""
    for module in pkgutil.walk_packages(sparsescan.kernels.__path__, "sparsescan.kernels."):
        if "cuda" in module.name:
            importlib.import_module(module.name)
    for name in _WITH_LAUNCHES:
        importlib.import_module(name)
    replaced = {"launch": (_device.launch, _launch), "current": (_door.current, _no_device)}
    for module in list(sys.modules.values()):
        for attribute, (before, after) in replaced.items():
            if vars(module).get(attribute) is before:
                monkeypatch.setattr(module, attribute, after)


def count(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int, Traffic]]:
    """Count what launches do until the test ends; return kernel, blocks, threads and traffic."""
    counted: list[tuple[str, int, int, Traffic]] = []

    def counting(kernel: Any, blocks: int, threads: int, *arguments: Any) -> None:
        program = compile_kernel(kernel, len(arguments))
        memory = fake_cupy.state.memory()
        did = program.launch(blocks, threads, arguments, memory, races=False, traffic=True)
        counted.append((program.name, blocks, threads, did))

    monkeypatch.setattr(sys.modules[__name__], "launch", counting)
    install(monkeypatch)
    fake_cupy.install(monkeypatch)
    return counted


def _no_device(device: int) -> Any:
    fake_cupy.note("Numba's context")
    return nullcontext()
