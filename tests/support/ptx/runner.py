"""Compile kernels of Numba to PTX and to host code, and launch them on memory that is given."""

from __future__ import annotations

import gc
import random
import threading
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numba.cuda.dispatcher
import numpy as np
import pytest
from numba import cuda, int64, void
from numba.core.types import BaseFunction
from numba.cuda.core.postproc import PostProcessor, VariableLifetime
from numba.cuda.core.transforms import canonicalize_cfg
from numba.cuda.cudadrv import nvvm

from .kept import keep
from .machine import (
    CELL,
    FAULTS,
    GUARD,
    HEADS,
    HELPERS,
    PENDING_ROOM,
    Fault,
    Slot,
    Space,
    Wait,
    run_blocks,
)
from .parse import Kernel, parse
from .translate import Site, Translation, translate

# Jumps back that all threads of a launch may make.
PATIENCE = 1 << 40
# Releases by atomic operations, and accesses of a warp between barriers, that there is room for.
RELEASES, TRACE = 1 << 16, 1 << 22
CAPABILITY = "9.0"


class FaultError(Exception):
    """A launch that stopped: why, in which kernel, at which line of its PTX, and which thread."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Together:
    """How the threads of a warp use memory together, if that has been traced.

    The first access of a thread at some place of the program, since the last barrier, is made
    together with the first of the others, the second with the second, and so on.
    """

    # Accesses of warps to global memory, and sectors of 32 bytes that they take; to shared memory,
    # times that its banks are busy, and how many of them are because of conflicts.
    requests: int = 0
    sectors: int = 0
    # Sectors of global memory that each block uses, once for each: what is moved to a first cache
    # that keeps all of it. For each block those sectors, which a second cache would have once.
    of_blocks: int = 0
    used: list[Any] = field(default_factory=list, repr=False)
    shared_requests: int = 0
    turns: int = 0
    conflicts: int = 0

    @property
    def once(self) -> int:
        """Sectors of global memory that any block uses, once for all."""
        return len(np.unique(np.concatenate(self.used))) if self.used else 0

    def add(self, sites: list[Site], trace: Any) -> None:
        """Count the accesses of a block's trace: step, thread, site, address."""
        if not len(trace):
            return
        step, thread, site, address = trace.T
        # The how-manieth of its thread at its site, in this step.
        order = np.lexsort((site, thread, step))
        _, counts = _runs(step[order], thread[order], site[order])
        nth = np.empty(len(trace), np.int64)
        nth[order] = np.arange(len(trace)) - np.repeat(np.cumsum(counts) - counts, counts)
        request = np.lexsort((thread, nth, site, thread // 32, step))
        first, counts = _runs(*(x[request] for x in (step, thread // 32, site, nth)))
        number = np.empty(len(trace), np.int64)
        number[request] = np.repeat(np.arange(len(counts)), counts)
        shared = np.array([one.space == Space.SHARED for one in sites])
        width = np.array([one.width for one in sites])[site]
        far = ~shared[site]
        self.requests += int((~shared[site[request[first]]]).sum())
        self.shared_requests += int(shared[site[request[first]]].sum())
        self.sectors += len(np.unique(np.stack([number[far], address[far] // 32]), axis=1).T)
        # Each access is aligned, and no larger than a sector.
        self.used.append(np.unique(address[far] // 32))
        self.of_blocks += len(self.used[-1])
        near = np.flatnonzero(shared[site])
        # 16 bytes for each of 32 threads take four turns, of eight threads each.
        turn = number[near] * 4 + thread[near] % 32 // (32 // (width[near] // 4))
        words = np.repeat(address[near] // 4, width[near] // 4)
        words += _count_up(width[near] // 4)
        turn = np.repeat(turn, width[near] // 4)
        turn, words = np.unique(np.stack([turn, words]), axis=1)
        bank = np.lexsort((words % 32, turn))
        first, busy = _runs(turn[bank], words[bank] % 32)
        owner = turn[bank][first]
        starts, _ = _runs(owner)
        most = np.maximum.reduceat(busy, starts) if len(starts) else busy
        self.turns += int(most.sum())
        self.conflicts += int(most.sum()) - len(most)


def _runs(*columns: Any) -> tuple[Any, Any]:
    """Return where runs of equal rows begin, and how long they are."""
    size = len(columns[0])
    changed = np.zeros(size, bool)
    changed[:1] = True
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    first = np.flatnonzero(changed)
    return first, np.diff(np.append(first, size))


def _count_up(counts: Any) -> Any:
    """Return 0, 1, … for each count, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass
class Traffic:
    """The work of all threads of a launch.

    Instructions by opcode; barriers that threads waited at; bytes that threads asked for,
    ``"global"``, ``"shared"`` and ``"local"``; how warps got them.
    """

    instructions: dict[str, int]
    barriers: int
    bytes: dict[str, int]
    together: Together


class Program:
    """A kernel as host code."""

    def __init__(self, text: str, name: str, *, mutable: bool = False) -> None:
        self.text, self.name = text, name
        self.kernel: Kernel = parse(text)
        self._translation: Translation = translate(self.kernel, GUARD, mutable=mutable)
        self._code = _to_host(self._translation.ir)
        self._engine, self._function = _load(self._code)
        # Changes that a launch may make, if the program is a `mutable` one; how often each would
        # have made a difference in the latest launch, and how often threads jumped back in it.
        self.mutations = self._translation.mutations
        self.different, self.jumps = np.zeros(len(self.mutations), np.int64), 0

    def __getstate__(self) -> dict[str, Any]:
        translation = self._translation._replace(ir="")
        return {**vars(self), "_translation": translation, "_engine": None, "_function": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._engine, self._function = _load(self._code)

    def launch(
        self,
        blocks: int,
        threads: int,
        arguments: Iterable[int],
        allocations: Iterable[tuple[int, int]],
        *,
        races: bool = True,
        traffic: bool = False,
        seed: int | None = None,
        mutation: int = 0,
        patience: int = PATIENCE,
    ) -> Traffic:
        """Run all blocks, and return what they did; sectors and conflicts only with `traffic`.

        Parameters
        ----------
        blocks, threads : int
            Blocks, and threads of each.
        arguments : iterable of int
            Parameters of the kernel.
        allocations : iterable of (int, int)
            First address and bytes of all memory that threads may touch.
        races : bool
            Whether to look for races, which takes eight times as much memory again.
        traffic : bool
            Whether to count what the threads of a warp do together.
        seed : int, optional
            Of the order of threads and blocks.
        mutation : int
            The number of a mutation, from 1 on; 0 for none.
        patience : int
            Jumps back that all threads may make.
        """
        translation = self._translation
        arguments = np.array([int(argument) for argument in arguments], np.int64)
        if len(arguments) != len(self.kernel.parameters):
            raise TypeError(f"{self.name} takes {len(self.kernel.parameters)} arguments")
        if not 0 < threads <= 1024:
            raise ValueError(f"{threads} threads of a block")
        seed = random.SystemRandom().getrandbits(31) if seed is None else seed
        order = np.random.default_rng(seed).permutation(blocks)
        spans = sorted(_merged(allocations))
        starts = np.array([first for first, _ in spans], np.int64)
        stops = starts + np.array([size for _, size in spans], np.int64)
        words = ((stops + 3 - starts // 4 * 4) // 4) if races else np.zeros_like(starts)
        bases = np.cumsum(words) - words
        shadow = np.zeros((int(words.sum()) + 1, CELL), np.int64)
        cells = shadow.ctypes.data + bases * 8 * CELL
        shared = np.zeros(translation.shared_size // 8 + 1, np.int64)
        local = np.zeros(threads * translation.local_size // 8 + 1, np.int64)
        shared_cells = np.zeros((2 * len(shared) + 2, CELL), np.int64)
        counts = np.zeros(len(translation.opcodes), np.int64)
        sites = len(translation.sites)
        trace = np.zeros((TRACE if traffic else 1, 4), np.int64)
        frames = np.zeros((threads, translation.frame), np.int64)
        releases = np.zeros((RELEASES if races else 1, 5), np.int64)
        kept = {
            Slot.PARAMETERS: arguments,
            Slot.COUNTS: counts,
            Slot.SHARED: shared,
            Slot.LOCAL: local,
            Slot.SHARED_CELLS: shared_cells,
            Slot.STARTS: starts,
            Slot.STOPS: stops,
            Slot.CELLS: cells,
            Slot.RELEASES: releases,
            Slot.HEADS: np.zeros(HEADS, np.int64),
            Slot.ACQUIRED: np.zeros((blocks, 5), np.int64),
            Slot.PENDING: np.zeros(PENDING_ROOM * blocks, np.int64),
            Slot.LATEST: np.full(sites + 1, -1),
            Slot.DIFFERENT: self.different,
        }
        self.different[:] = 0
        m = np.zeros(Slot.WIDTH, np.int64)
        for slot, array in kept.items():
            m[slot] = array.ctypes.data
        m[: len(HELPERS)] = [helper.address for helper in HELPERS]
        m[Slot.THREADS], m[Slot.BLOCKS], m[Slot.PATIENCE] = threads, blocks, patience
        m[Slot.MUTANT] = mutation
        m[Slot.RANDOM] = 2 * seed + 1 << 20
        m[Slot.SHARED_SIZE], m[Slot.LOCAL_SIZE] = translation.shared_size, translation.local_size
        m[Slot.ALLOCATIONS] = len(starts)
        m[Slot.RACES], m[Slot.RELEASE_ROOM] = races, RELEASES
        m[Slot.TRACE], m[Slot.TRACE_ROOM] = (trace.ctypes.data if traffic else 0), TRACE
        waits = np.array(translation.waits, np.int64).reshape(-1, Wait.WIDTH)
        gaps = np.array(translation.gaps, np.int64)
        tables = frames, waits, shared, local, shared_cells, gaps, translation.garbage
        together = Together()
        # A trace has room for that of a block.
        for some in order[:, None] if traffic else [order]:
            run_blocks(m, self._function, some, *tables)
            self.jumps = patience - int(m[Slot.PATIENCE])
            if m[Slot.FAULT]:
                raise self._fault(m, seed)
            together.add(translation.sites, trace[: m[Slot.TRACED]])
            m[Slot.TRACED] = 0
        return self._traffic(counts, together)

    def _fault(self, m: Any, seed: int) -> FaultError:
        kind, site, other = int(m[Slot.FAULT]), int(m[Slot.SITE]), int(m[Slot.OTHER])
        waiting = kind in (Fault.LEFT, Fault.DIVERGENT)
        line = (
            self._translation.waits[site][Wait.LINE]
            if waiting
            else self._translation.sites[site].line
        )
        what = FAULTS[kind]
        if kind in (Fault.MISALIGNED, Fault.OUTSIDE):
            what += f", {int(m[Slot.ADDRESS]):#x}"
        elif kind in (Fault.RACE, Fault.RACE_OF_BLOCKS):
            block, thread = (other >> 20) - 1, other & 0xFFFFF
            what += f" at {int(m[Slot.ADDRESS]):#x}, with thread {thread} of block {block}"
        elif kind == Fault.OVERFLOW:
            first = self._translation.sites[other - 1].line
            what += f" in line {first}: {self.kernel.text[first - 1].strip()}"
        who = f"thread {int(m[Slot.THREAD])} of block {int(m[Slot.BLOCK])}"
        text = self.kernel.text[line - 1].strip()
        message = f"{self.name}, line {line}, {who}: {what}\n  {text}\n  (seed {seed})"
        return FaultError(FAULTS[kind], message)

    def _traffic(self, counts: Any, together: Together) -> Traffic:
        instructions: dict[str, int] = {}
        for count, opcodes in zip(counts.tolist(), self._translation.opcodes, strict=True):
            for opcode, times in opcodes.items():
                instructions[opcode] = instructions.get(opcode, 0) + count * times
        size = {"global": 0, "shared": 0, "local": 0}
        for opcode, times in instructions.items():
            parts = opcode.split(".")
            if parts[0] in ("ld", "st", "atom", "red") and "param" not in parts:
                width = int(parts[-1][1:]) // 8 * {"v2": 2, "v4": 4}.get(parts[-2], 1)
                (space,) = {"shared", "local"} & set(parts) or {"global"}
                size[space] += times * width
        barriers = sum(times for op, times in instructions.items() if op.startswith("bar."))
        return Traffic(instructions, barriers, size, together)


def _merged(allocations: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return allocations without those that lie inside of others."""
    merged: list[tuple[int, int]] = []
    for first, size in sorted(set(allocations)):
        if merged and first < sum(merged[-1]):
            start = merged[-1][0]
            merged[-1] = start, max(sum(merged[-1]), first + size) - start
        elif size:
            merged.append((first, size))
    return merged


llvm.initialize_native_target()
llvm.initialize_native_asmprinter()


def _machine() -> Any:
    """Return the host, for which nothing is optimised."""
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=0,
        jit=True,
    )


def _to_host(text: str) -> bytes:
    """Compile LLVM IR to an object file.

    Registers become values, and nothing is optimised beyond that: a kernel of 15,000 lines then
    takes 2 seconds, not 15, and runs most of its time in the helpers anyway.
    """
    module = llvm.parse_assembly(text)
    module.verify()
    machine = _machine()
    passes = llvm.create_new_function_pass_manager()
    passes.add_sroa_pass()
    options = llvm.create_pipeline_tuning_options()
    passes.run(module.get_function("kernel"), llvm.create_pass_builder(machine, options))
    return bytes(machine.emit_object(module))


def _load(code: bytes) -> tuple[Any, int]:
    """Return what keeps the code of an object file, and where the kernel begins."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine, engine.get_function_address("kernel")


_programs: dict[Any, Program] = {}
_compiling = threading.RLock()


class Lowered(NamedTuple):
    """LLVM IR that Numba makes of a function, for any device, and options of NVVM."""

    ir: list[str]
    options: dict[str, Any]

    def ptx(self, capability: str) -> str:
        """Return what NVVM makes of it for a compute capability, such as "9.0"."""
        arch = f"compute_{capability.replace('.', '')}"
        ptx: bytes = nvvm.compile_ir(self.ir, **self.options | {"arch": arch})
        return ptx.decode().strip("\0").strip()


def lower(function: Callable[..., Any], signature: Any) -> Lowered:
    """Return the LLVM IR that Numba makes of a Python function."""
    # Functions that a kernel calls are compiled for the current device, which there is none.
    device = types.SimpleNamespace(compute_capability=(9, 0))
    lowered: list[Lowered] = []

    def keep_ir(ir: list[str], **options: Any) -> bytes:
        lowered.append(Lowered(ir, options))
        return b""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba.cuda.dispatcher, "get_current_device", lambda: device)
        patch.setattr(nvvm, "compile_ir", keep_ir)
        patch.setattr(BaseFunction, "get_call_type", _remembering(BaseFunction.get_call_type))
        patch.setattr(PostProcessor, "run", _where_it_counts(PostProcessor.run))
        # Collections of garbage would go through all of Numba's objects, again and again. The one
        # behind each kernel leaves out what is kept of those before.
        gc.disable()
        try:
            cuda.compile(function, signature, cc=(9, 0), device=False, abi="numba", output="ptx")
        finally:
            gc.enable()
            gc.collect()
            gc.freeze()
    return lowered[0]


def _remembering(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """Return a search for the signature of a call that is made once for each types of arguments.

    Numba tries all templates of an operator for each of its uses, which is a fourth of its time.
    """
    known: dict[Any, tuple[Any, Any]] = {}

    def resolve_once(function: Any, context: Any, args: Any, kws: Any) -> Any:
        key = id(function), context, tuple(args), tuple(kws.items())
        if key not in known:
            # The function is kept, or another one could have its number.
            known[key] = function, resolve(function, context, args, kws)
        return known[key][1]

    return resolve_once


def _where_it_counts(run: Callable[..., None]) -> Callable[..., None]:
    """Return a search for the last uses of variables that is made only where it writes them down.

    Numba makes it nine times for each function, which is a sixth of its time, and reads it thrice.
    """

    def run_if_written(post: Any, emit_dels: bool = False, **options: Any) -> None:
        if emit_dels or post.func_ir.is_generator:
            run(post, emit_dels, **options)
            return
        post.func_ir.blocks = canonicalize_cfg(post.func_ir.blocks)
        post.func_ir.variable_lifetime = VariableLifetime(post.func_ir.blocks)
        post.func_ir.generator_info = None

    return run_if_written


def lower_kernel(kernel: Any, count: int) -> Lowered:
    """Return the LLVM IR of a kernel of `count` int64, made once, and kept on disk.

    Numba takes longer for it than NVVM and all that follows.
    """
    return keep(kernel, count, lambda: lower(kernel.py_func, void(*[int64] * count)))


def compile_kernel(kernel: Any, count: int, *, mutable: bool = False) -> Program:
    """Return a kernel of `count` int64 as host code, compiled once, and kept on disk."""
    key = kernel, count, mutable

    def make() -> Program:
        text = lower_kernel(kernel, count).ptx(CAPABILITY)
        return Program(text, kernel.py_func.__name__, mutable=mutable)

    with _compiling:
        if key not in _programs:
            _programs[key] = keep(kernel, key[1:], make)
        return _programs[key]
