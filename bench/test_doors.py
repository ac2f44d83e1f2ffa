"""The contest of the front doors: contenders agree, and what was measured can be shown."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparsescan import AffineGrads

from . import doors, step
from .experiment import Options, Results

JAX_IS_THERE = pytest.importorskip("jax", reason="jax is not installed")


@pytest.fixture(scope="module", autouse=True)
def _no_pauses() -> Iterator[None]:
    """Nobody looks at the times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "PAUSE", 0)
        yield


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


def test_networks_in_jax_have_gradients_of_either_loss() -> None:
    for case in step.Case("GRU", 2, 3, 2, 9, 1.0, 1.0).both():
        race = case.race()
        (jitted,), (ours,) = doors.Jitted(case).ours(race).values(), race.ours().values()
        _, (params, x, state) = jitted()
        expected = ours()
        for name, grad in {"input": x, "state": state, **params}.items():
            np.testing.assert_allclose(grad, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [{}, doors._BOTH])
def test_losses_are_of_all_outputs_or_of_the_last_one(
    kind: str, packed: bool, options: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = doors.Module(kind, 4, 1, options, packed=packed, steps=20, batch=3)
    trained, given = doors._trained, []

    class Seen(nn.Identity):
        def forward(self, output: torch.Tensor) -> torch.Tensor:
            given.append(output.detach().numpy())
            return output

    def recorded(module: nn.Module, head: nn.Module, loss: Any) -> dict[str, step.Call]:
        loss(module, Seen())
        return trained(module, head, loss)

    monkeypatch.setattr(doors, "_trained", recorded)
    shapes = []
    for case in every.both():
        given.clear()
        piece = case.measure(True)
        # Neither network has been trained yet.
        ours, theirs, *_ = given
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        shapes.append(ours.shape)
        modes = {doors.PYTORCH, *([doors.FLUSHING] if case.last_only else [])}
        assert set(piece["samples"]) == {doors.OURS, *modes}
        assert piece["wanted"] == dict.fromkeys(modes, 1)
    width = 8 if options else 4
    assert shapes == [(2 + 11 + 20, width) if packed else (20, 3, width), (3, width)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_impulses_decay_past_all_normal_numbers(dtype: str) -> None:
    a, b, impulse = doors.Impulse(5000, 8, dtype).arrays()
    assert a.dtype == b.dtype == impulse.dtype == dtype
    assert (impulse[0] == b[0]).all()
    assert not impulse[1:].any()
    state, tiny = abs(impulse[0]), np.finfo(dtype).tiny
    sizes = [state := state * abs(step) for step in a[1:]]
    assert (sizes[999] > tiny).all()
    assert (sizes[1999] < tiny).all()


RECURRENCE = doors.Recurrence(
    9, 3, 2, True, dict.fromkeys(("jax.lax.scan", doors.ASSOCIATIVE), 1.0)
)


@pytest.fixture(scope="module")
def results() -> Results:
    cases = (
        *doors.Module("LSTM", 4, 1, doors._BOTH, packed=True, steps=20, batch=3).both(),
        RECURRENCE,
        doors.Jitted(step.Case("GRU", 2, 3, 2, 9, 1.0, 1.0)),
        doors.Impulse(20, 3, "float64"),
    )
    pieces = {case.name: case.measure(True) for case in cases}
    pieces[RECURRENCE.name]["wanted"][doors.DOUBLING] = 1.0
    return {"pieces": pieces | {"overhead of a call": doors.measure_overhead(50)}}


def test_what_was_measured_is_shown(results: Results) -> None:
    rows = doors._rows(results)
    assert rows[1].peer in (doors.PYTORCH, doors.FLUSHING)
    assert [row.peer for row in rows[:1] + rows[2:]] == [
        doors.PYTORCH,
        doors.JAX,
        doors.NUMPY,
        doors.ASSOCIATIVE,
        doors.DOUBLING,
        doors.JAX,
        doors.NUMPY,
        doors.OFFSETS,
    ]
    (table,) = doors.EXPERIMENT.tables(results)
    assert [row[0] for row in table.rows] == [list(results["pieces"])[1]]
    assert all(row.theirs > 0 and row.ours > 0 for row in rows)
    (drawing,) = doors._drawings(results)
    (axes,) = drawing.figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == list(results["pieces"])[:5]
    overhead = results["pieces"]["overhead of a call"]
    for seconds in (overhead["seconds"], overhead["seconds_with_gradients"]):
        assert all(seconds[name] > 0 for name in ("training step", "module", "operator"))
    both = overhead["seconds_with_gradients"]
    assert both["training step, then empty function"] > both["training step"]


def test_pieces_have_names_of_their_own() -> None:
    for quick in (False, True):
        names = [piece.key for piece in doors._pieces(Options(quick, "cpu"))]
        assert len(names) == len(set(names))
