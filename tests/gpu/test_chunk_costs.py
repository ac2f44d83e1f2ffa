"""Estimates that chunks are chosen by, beside compiled kernels: registers, turns of memory."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the test extra installs numba-cuda on Linux only"
)
pytest.importorskip("numba_cuda")

import ptx.stand_in  # noqa: E402
from ptx.runner import Traffic  # noqa: E402
from sampling import slow  # noqa: E402
from taken import taken_by  # noqa: E402

import sparsescan  # noqa: E402
from sparsescan import ImplicitChain, ImplicitPattern, Pattern, Schedule  # noqa: E402
from sparsescan.execution.cuda import chunks as chunk_forms  # noqa: E402
from sparsescan.execution.cuda.chunks import H100  # noqa: E402
from sparsescan.kernels.cuda.chunk_costs import (  # noqa: E402
    chained_turns,
    multiply_turns,
    registers_of,
    sweep_turns,
)
from sparsescan.kernels.cuda.chunks import chunk_kernels, teams_of  # noqa: E402
from sparsescan.recurrent import GRUCell, LSTMCell  # noqa: E402

F4, F8 = np.dtype(np.float32), np.dtype(np.float64)
BATCH, CHUNKS = 2, 3
# Steps of a kind: rows, terms and states.
FORMS = {"dense": (20, 0, 1), "RNN": (20, 1, 1), "GRU": (20, 4, 1), "LSTM": (40, 5, 2)}


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int, Traffic]]:
    """Return the kernel, blocks and threads of every launch, and what it did."""
    return ptx.stand_in.count(monkeypatch)


# -- Registers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (FORMS["dense"], F4),
        *slow(*((FORMS[kind], F4) for kind in ("RNN", "GRU", "LSTM"))),
        *slow(
            ((16, 0, 1), F4),
            ((32, 0, 1), F4),
            ((64, 0, 1), F4),
            ((64, 0, 1), F8),
            ((64, 1, 1), F4),
            ((64, 5, 2), F4),
        ),
        *slow((FORMS["dense"], F8), (FORMS["RNN"], F8), ((32, 0, 1), F8), ((28, 4, 1), F8)),
    ],
)
def test_as_many_blocks_fit_as_their_registers_say(form: tuple[int, int, int], dtype: Any) -> None:
    """By the compiler and assembler that are installed, for 9.0."""
    size, terms, states = form
    kernels = chunk_kernels(size, size * size, dtype, terms=terms, states=states)
    taken, tiles = taken_by(kernels.multiply, 8), kernels.tiles
    # What every block takes beside its own is counted there.
    assert taken.shared == tiles.shared + H100.reserved
    estimate = registers_of(size, dtype.itemsize, terms, states)
    print(f"{size} {terms} {states} {dtype}: {taken.registers} registers, estimated {estimate}")
    fit = [
        H100.at_once(tiles.threads, registers, tiles.shared)
        for registers in (estimate, taken.registers)
    ]
    assert fit[0] == fit[1]


# -- Turns of shared memory -----------------------------------------------------------------------


def scan(kind: str, chunk: int) -> None:
    """Scan steps of a kind in a few chunks, short ones, so that products stay in range."""
    rng, steps = np.random.default_rng(0), CHUNKS * chunk
    size, *_ = FORMS[kind]
    chain: Any
    if kind == "dense":
        chain = (rng.standard_normal((steps, BATCH, size, size)) / np.sqrt(size)).astype(F4)
    elif kind == "RNN":
        pattern = ImplicitPattern([Pattern.diagonal(size), Pattern.dense((size, size))], shared=[1])
        weights = np.linalg.qr(rng.standard_normal((size, size)))[0].ravel().astype(F4)
        slopes = rng.uniform(0.5, 1, (steps, BATCH, size)).astype(F4)
        chain = ImplicitChain([slopes, weights], pattern)
    else:
        cell: Any = {"GRU": GRUCell, "LSTM": LSTMCell}[kind](3, 20, rng=0)
        x = rng.standard_normal((steps, BATCH, 3), np.float32)
        chain = cell.linearize(x, cell.unroll(x)[:-1]).implicit()
    grad, tree = rng.standard_normal((BATCH, size)).astype(F4), Schedule.chunked(steps, CHUNKS)
    sparsescan.exclusive_scan(grad, chain, schedule=tree, device="cuda")


def turns_of_a_step(
    traffic: list[tuple[str, int, int, Traffic]], kind: str, chunks: tuple[int, int]
) -> dict[str, float]:
    """Return the turns of each kernel that longer chunks take, for each step of a sample."""
    for chunk in chunks:
        scan(kind, chunk)
    few, many = (
        {name: did.together.turns for name, _, _, did in half}
        for half in (traffic[: len(traffic) // 2], traffic[len(traffic) // 2 :])
    )
    # The last chunk has no product, but where one launch does all.
    more = (chunks[1] - chunks[0]) * BATCH
    made = {"multiply": CHUNKS - 1}
    return {name: (many[name] - few[name]) / (made.get(name, CHUNKS) * more) for name in many}


@pytest.mark.parametrize("kind", ["dense", *slow("RNN", "GRU", "LSTM")])
def test_turns_of_three_launches(
    traffic: list[tuple[str, int, int, Traffic]], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As estimated from where threads read and write, within 1%."""
    monkeypatch.setattr(chunk_forms, "in_one_launch", lambda *about, **more: False)
    size, terms, states = FORMS[kind]
    counted = turns_of_a_step(traffic, kind, (4, 9))
    form = size, 4, terms, states
    print(kind, counted, multiply_turns(*form), sweep_turns(*form))
    assert counted["multiply"] == pytest.approx(multiply_turns(*form), rel=0.01)
    assert counted["sweep"] == pytest.approx(sweep_turns(*form), rel=0.01)


def test_turns_of_one_launch(traffic: list[tuple[str, int, int, Traffic]]) -> None:
    """As estimated, within 3%; its last piece has no product."""
    size, *_ = FORMS["RNN"]
    counted = turns_of_a_step(traffic, "RNN", (64, 128))
    product, sweep = chained_turns(size, 4)
    print(counted, product, sweep)
    expected = product * (1 - 1 / (CHUNKS * teams_of(size, F4))) + sweep
    assert counted["chained"] == pytest.approx(expected, rel=0.03)
