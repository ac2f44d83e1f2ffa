"""Count what CUDA kernels move and do, and compare it with what must move.

Kernels run as compiled PTX on the CPU, with the runner and the stand-in for CuPy of the tests: that
takes no GPU, and tells nothing of time. Chains are shorter than those of a GPU where the runner
would take minutes; what a step moves does not depend on how many there are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import sparsescan
from sparsescan import ImplicitChain, ImplicitPattern, Pattern, Schedule
from sparsescan.execution.cuda.chunks import H100, ChunkForm, chunk_count
from sparsescan.recurrent import LSTMCell

from . import workloads
from .contests import csr_bytes
from .drawing import BLUE, ORANGE, numbers, panels, rows_of_bars
from .experiment import Drawing, Experiment, Options, Piece, Results, Table, cpu_only
from .gpu_races import HIDDEN, one_level

__all__ = ["EXPERIMENT"]

_SUPPORT = Path(__file__).parent.parent / "tests" / "support"
_SECTOR = 32
# The long recurrence, cut into as many chunks as on an H100.
_LONG, _BATCH = 30_000, 16
# Bytes that must move, by the name of a kernel.
Floors = dict[str, int]


@dataclass(frozen=True)
class Chain:
    """A chain to count: what it is on a GPU, what is run here, and by which call."""

    name: str
    run: str
    call: Callable[[Any], Floors]  # with the stand-in for CuPy


# -- The chains -----------------------------------------------------------------------------------


def _pair(side: int, channels: tuple[int, int, int], cupy: Any) -> Floors:
    """Check two pruned convolutions that are on the device, and multiply them."""
    from cupyx.scipy.sparse import csr_matrix

    pair = [workloads.with_indices(x, np.int32) for x in workloads.conv_pair(side, channels)]
    for matrix in pair:
        parts = tuple(map(cupy.asarray, (matrix.data, matrix.indices, matrix.indptr)))
        sparsescan.plan([csr_matrix(parts, shape=matrix.shape)], schedule="linear", device="cuda")
    product, _ = one_level(SimpleNamespace(put=cupy.asarray, device="cuda"), pair, (1,))
    product()
    second, first = pair
    return {
        "check_indices": sum(x.indices.nbytes + x.indptr.nbytes for x in pair),
        "level": sum(map(csr_bytes, (second, first, first @ second))),
    }


def _linear(steps: int, side: int, cupy: Any) -> Floors:
    """Sweep over steps that share the pattern of a 5-point stencil."""
    grad, chain = workloads.stencil(steps, side, np.float32)
    sparsescan.exclusive_scan(grad, chain, schedule="linear", device="cuda")
    pattern = chain.indices.nbytes + chain.indptr.nbytes
    # One of them makes all gradients: which, depends on how large steps are.
    needed = pattern + chain.data[:-1].nbytes + steps * grad.nbytes
    return {"sweep_steps": needed, "vectors": needed}


def _chunked(chunks: int, chunk: int, cupy: Any) -> Floors:
    """Scan dense steps of a recurrence in three phases; the last step is not applied."""
    grad, jacobians = workloads.tanh_rnn(chunks * chunk + 1, _BATCH, HIDDEN)
    tree = Schedule.chunked(len(jacobians), chunks)
    sparsescan.exclusive_scan(grad, jacobians, schedule=tree, device="cuda")
    step, last = jacobians[0].nbytes, chunks - 1
    # Columns of a product, that of local gradients among them, and an exponent for each but that.
    products = last * (step + 2 * grad.nbytes)
    return {
        "multiply": last * chunk * step + products,
        "carry": products + chunks * grad.nbytes,
        "sweep": (chunks * chunk - last) * (step + grad.nbytes) + chunks * grad.nbytes,
    }


def _implicit(chunks: int, chunk: int, cupy: Any) -> Floors:
    """Scan the same steps, given by their slopes and the weights that all share, in one launch."""
    parts = workloads.tanh_rnn_slopes(chunks * chunk, _BATCH, HIDDEN)
    grad, slopes, weights = (array.astype(np.float32) for array in parts)
    pattern = ImplicitPattern(
        [Pattern.diagonal(HIDDEN), Pattern.dense((HIDDEN, HIDDEN))], shared=[1]
    )
    tree = Schedule.chunked(len(slopes), chunks)
    chain = ImplicitChain([slopes, weights.ravel()], pattern)
    sparsescan.exclusive_scan(grad, chain, schedule=tree, device="cuda")
    # Slopes of all but the last step, and all gradients.
    applied = slopes[:-1].nbytes
    return {"chained": weights.nbytes + 2 * applied + grad.nbytes}


def _lstm(chunks: int, chunk: int, cupy: Any) -> Floors:
    """Scan the implicit steps of an LSTM, of which each has two unknowns for a unit."""
    rng, steps = np.random.default_rng(0), chunks * chunk + 1
    cell = LSTMCell(12, HIDDEN, rng=0)
    x = rng.standard_normal((steps, _BATCH, 12), np.float32)
    chain = cell.linearize(x, cell.unroll(x)[:-1]).implicit()
    grad = rng.standard_normal((_BATCH, cell.state_size), np.float32)
    tree = Schedule.chunked(steps, chunks)
    sparsescan.exclusive_scan(grad, chain, schedule=tree, device="cuda")
    slopes, _ = chain.values
    # Weights that may be other than zero: in each block, and once more to see whether others are.
    weights, whole = cell.weight_hh.nbytes + 4 * HIDDEN, chain.values[1].nbytes
    step, last = slopes[0].nbytes, chunks - 1
    products = last * (cell.state_size + 2) * grad.nbytes
    return {
        "multiply": weights + last * chunk * step + products,
        "carry": products + chunks * grad.nbytes,
        "sweep": whole + (chunks * chunk - last) * (step + grad.nbytes) + chunks * grad.nbytes,
    }


def _chunks(terms: int) -> tuple[int, int]:
    """Return the chunks of the long recurrence, and the steps of each, if so given."""
    count = chunk_count(_LONG, _BATCH, ChunkForm(HIDDEN, HIDDEN, terms), H100)
    return count, -(-_LONG // count)


def _chains(quick: bool) -> list[Chain]:
    """Return the chains at full size, or as small as kernels can be told apart on."""
    side, channels = (6, (4, 8, 16)) if quick else (16, (64, 128, 256))
    short, long = (5, 3) if quick else (200, 5)
    chunks, chunk = (3, 4) if quick else (4, _chunks(0)[1])
    few = chunk if quick else _chunks(1)[1]
    # The runner keeps as many accesses of a block as a few more steps of an LSTM have.
    pairs = chunk if quick else 40
    wide = 32 if quick else 256
    pair = "→".join(map(str, channels))
    return [
        Chain(
            "Product of the conv pair 64→128→256 at 16×16, 97% pruned",
            f"{pair} at {side}×{side}",
            partial(_pair, side, channels),
        ),
        Chain(
            "Linear sweep of 1,000 steps of 256 unknowns",
            f"{short:,} steps of 256 unknowns",
            partial(_linear, short, 16),
        ),
        Chain(
            "Linear sweep of 100 steps of 65,536 unknowns",
            f"{long:,} steps of {wide**2:,} unknowns",
            partial(_linear, long, wide),
        ),
        Chain(
            f"Chunked scan of {_LONG:,} dense steps, B={_BATCH}, H={HIDDEN}",
            f"{chunks * chunk:,} steps in {chunks} chunks",
            partial(_chunked, chunks, chunk),
        ),
        Chain(
            f"Chunked scan of {_LONG:,} implicit steps, B={_BATCH}, H={HIDDEN}",
            f"{chunks * few:,} steps in {chunks} chunks",
            partial(_implicit, chunks, few),
        ),
        Chain(
            f"Chunked scan of {_LONG:,} implicit steps of an LSTM, B={_BATCH}, H={HIDDEN}",
            f"{chunks * pairs:,} steps in {chunks} chunks",
            partial(_lstm, chunks, pairs),
        ),
    ]


# -- Counting -------------------------------------------------------------------------------------


def count(chain: Chain) -> Results:
    """Run a chain once, as a plan's first run, and count what each kernel does.

    Returns
    -------
    dict
        ``run``, the size; and ``kernels``: of each, in all its ``launches``, the ``blocks``, the
        ``instructions`` of all threads, the ``barriers`` that blocks and that warps wait at, the
        bytes that threads ask for, ``global`` and ``shared``; the ``requests`` of warps to global
        memory and the ``sectors`` of 32 bytes that these take; how many of these are different
        ones ``in blocks``, those of each block counted, and ``once``, in a whole launch; the
        ``turns`` that banks of shared memory take, of which so many are for ``conflicts``; and the
        ``floor``, the bytes that must move, or None where no floor is known.
    """
    sys.path.insert(0, str(_SUPPORT))
    try:
        import fake_cupy
        import pytest
        from ptx import stand_in
    finally:
        sys.path.remove(str(_SUPPORT))
    with pytest.MonkeyPatch.context() as patch:
        counted = stand_in.count(patch)
        floors = chain.call(fake_cupy.cupy)
    kernels: dict[str, Results] = {}
    for name, blocks, threads, done in counted:
        waits = {op: times for op, times in done.instructions.items() if op.startswith("bar.")}
        warps = sum(times for op, times in waits.items() if op.startswith("bar.warp"))
        kept = kernels.setdefault(name, {})
        for key, value in {
            "launches": 1,
            "blocks": blocks,
            "instructions": sum(done.instructions.values()),
            "block barriers": (sum(waits.values()) - warps) // threads,
            "warp barriers": warps // 32,
            "global": done.bytes["global"],
            "requests": done.together.requests,
            "sectors": done.together.sectors,
            "in blocks": done.together.of_blocks,
            "once": done.together.once,
            "shared": done.bytes["shared"],
            "turns": done.together.turns,
            "conflicts": done.together.conflicts,
        }.items():
            kept[key] = kept.get(key, 0) + value
    for name, kept in kernels.items():
        kept["floor"] = floors.get(name)
    return {"run": chain.run, "kernels": kernels}


# -- The experiment -------------------------------------------------------------------------------


def _pieces(options: Options) -> Iterable[Piece]:
    cpu_only("traffic", options, ", where kernels run as PTX")
    for chain in _chains(options.quick):
        yield Piece(chain.name, partial(count, chain))


def _about(options: Options) -> Results:
    return {
        "run": "the first run of a plan, float32, int32 indices; kernels compiled for 9.0, "
        "run on the CPU",
        "moved": "sectors of 32 bytes that warps ask for, as if no cache kept any",
        "in blocks": "as if the first cache kept what a block has asked for, and shared none of it",
        "once": "as if the second cache kept what the blocks of a launch have asked for",
        "floor": "each operand read and each result written once, a shared pattern once",
        "long chains": f"chunks as long as those of {_LONG:,} steps on {H100.number} "
        "multiprocessors; of an LSTM 40 steps each",
    }


def _tables(results: Results) -> list[Table]:
    heads = ["launches", "instructions", "barriers", "warps' barriers"]
    heads += ["floor, kB", "asked for, kB", "moved, kB", "moved / floor"]
    heads += ["in blocks / floor", "once / floor"]
    heads += ["shared, kB", "bank conflicts, % of turns"]
    rows = [
        [f"{chain}; run: {piece['run']}", name, *_cells(kept)]
        for chain, piece in results["pieces"].items()
        for name, kept in piece["kernels"].items()
    ]
    return [Table(["chain", "kernel", *heads], rows, heads)]


def _cells(kept: Results) -> list[str]:
    floor, moved = kept["floor"], _SECTOR * kept["sectors"]
    counts = [_SECTOR * kept.get(key, 0) for key in ("sectors", "in blocks", "once")]
    return [
        *(f"{kept[key]:,}" for key in ("launches", "instructions")),
        *(f"{kept[key]:,}" for key in ("block barriers", "warp barriers")),
        f"{floor / 1e3:,.1f}" if floor else "",
        f"{kept['global'] / 1e3:,.1f}",
        f"{moved / 1e3:,.1f}",
        *(f"{moved / floor:.2f}" if floor and moved else "" for moved in counts),
        f"{kept['shared'] / 1e3:,.1f}",
        f"{100 * kept['conflicts'] / kept['turns']:.1f}" if kept["turns"] else "",
    ]


def _drawings(results: Results) -> list[Drawing]:
    shown = [
        (f"{name}, {piece['run']}", kept)
        for piece in results["pieces"].values()
        for name, kept in piece["kernels"].items()
        if kept["floor"]
    ]
    if not shown:
        return []
    figure, ((axes,),) = panels(1, 1, 8, 0.8 + 0.4 * len(shown))
    for k, (_, kept) in enumerate(shown):
        axes.plot(kept["global"] / kept["floor"], k, "o", color=ORANGE, label="asked for" * (k < 1))
        moved = _SECTOR * kept["sectors"] / kept["floor"]
        axes.plot(moved, k, "o", color=BLUE, label="moved" * (k < 1))
    axes.axvline(1, color="black", ls="--", lw=1)
    axes.set(xscale="log", xlabel="times the floor", yticks=range(len(shown)))
    axes.set_yticklabels([name for name, _ in shown])
    axes.invert_yaxis()
    numbers(axes.xaxis)
    rows_of_bars(axes)
    axes.legend(frameon=False)
    caption = (
        "Bytes of global memory that the threads of each kernel ask for, and those of the sectors "
        "that its warps need for them, over the bytes that must move (dashed), in the order of the "
        "table. No cache is counted: what several blocks read counts for each."
    )
    return [Drawing("Memory traffic of CUDA kernels over its floor", caption, figure)]


EXPERIMENT = Experiment(
    name="traffic",
    title="Traffic of CUDA kernels, counted",
    pieces=_pieces,
    about=_about,
    drawings=_drawings,
    rows=lambda results: [],
    tables=_tables,
)
