"""The contest of the front doors: contenders agree, and what was measured can be shown."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from sparsescan import AffineGrads

from . import doors, step
from .experiment import Options, Results

JAX_IS_THERE = pytest.importorskip("jax", reason="jax is not installed")


@pytest.mark.parametrize(
    ("is_diagonal", "is_constant"), [(False, False), (True, False), (True, True)]
)
def test_recurrences_give_the_same_gradients(is_diagonal: bool, is_constant: bool) -> None:
    case = doors.Recurrence(9, 3, 2, is_diagonal, {}, is_constant)
    (ours,) = case.ours().values()
    _, result = ours()
    makers = [partial(case.jax, False)]
    if not is_constant:
        makers += [partial(case.jax, True), case.numpy]
    peers = [next(iter(make().values()))() for make in makers]
    peers = [peer if isinstance(peer, AffineGrads) else peer[1] for peer in peers]
    peers += [next(iter(case.doubling().values()))()] if is_diagonal and not is_constant else []
    for peer in peers:
        for one, other in zip(result, peer, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def results() -> Results:
    cases = (
        doors.Module("LSTM", 4, 1, doors._BOTH, packed=True, steps=20, batch=3),
        doors.Recurrence(9, 3, 2, True, dict.fromkeys(("jax.lax.scan", doors.ASSOCIATIVE), 1.0)),
        doors.Jitted(step.Case("GRU", 2, 3, 2, 9, 1.0, 1.0)),
    )
    pieces = {case.name: case.measure(True) for case in cases}
    pieces[cases[1].name]["wanted"][doors.DOUBLING] = 1.0
    return {"pieces": pieces | {"overhead of a call": doors.measure_overhead(50)}}


def test_what_was_measured_is_shown(results: Results) -> None:
    rows = doors._rows(results)
    assert [row.peer for row in rows] == [
        doors.PYTORCH,
        doors.JAX,
        doors.NUMPY,
        doors.ASSOCIATIVE,
        doors.DOUBLING,
        doors.JAX,
        doors.NUMPY,
    ]
    assert all(row.theirs > 0 and row.ours > 0 for row in rows)
    (drawing,) = doors._drawings(results)
    (axes,) = drawing.figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == list(results["pieces"])[:3]
    overhead = results["pieces"]["overhead of a call"]
    for seconds in (overhead["seconds"], overhead["seconds_with_gradients"]):
        assert 0 < seconds["training step"] < seconds["module"]
        assert seconds["operator"] > 0
    both = overhead["seconds_with_gradients"]
    assert both["training step, then empty function"] > both["training step"]


def test_pieces_have_names_of_their_own() -> None:
    for quick in (False, True):
        names = [piece.key for piece in doors._pieces(Options(quick, "cpu"))]
        assert len(names) == len(set(names))
