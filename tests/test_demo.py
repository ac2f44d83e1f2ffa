"""The demo learns, each way alike, with the gradients that autograd has."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparsescan import InputError
from sparsescan.examples import demo, heat, photo

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

PNG = b"\x89PNG\r\n\x1a\n"


def some_rows(steps: int = 30, batch: int = 5) -> photo.Rows:
    rng = np.random.default_rng(1)
    shapes = (steps, batch, photo.INPUTS), (steps, batch, photo.COLOURS)
    return photo.Rows(*(rng.standard_normal(shape).astype(np.float32) for shape in shapes))


def states_in_float64(cell: str, params: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the states of a cell by its equations, one step after the other."""
    h, states = x.new_zeros(x.shape[1], params["weight"].shape[1]), []
    for each in x:
        i = each @ params["weight_ih_l0"].T + params["bias_ih_l0"]
        weight, bias = params["weight_hh_l0"], params["bias_hh_l0"]
        if cell == "GRU":
            (r, z, n), (r_h, z_h, n_h) = i.chunk(3, 1), (h @ weight.T + bias).chunk(3, 1)
            z = torch.sigmoid(z + z_h)
            n = torch.tanh(n + torch.sigmoid(r + r_h) * n_h)
            h = z * h + (1 - z) * n
        else:
            (f, n), (w_f, w_n), (b_f, b_n) = i.chunk(2, 1), weight.chunk(2), bias.chunk(2)
            f = torch.sigmoid(f + h @ w_f.T + b_f)
            n = torch.tanh(n + (f * h) @ w_n.T + b_n)
            h = (1 - f) * h + f * n
        states.append(h)
    return torch.stack(states)


@pytest.mark.parametrize("cell", ["MGU", "GRU"])
@pytest.mark.parametrize("way", ["sparsescan", "NumPy"])
def test_gradients_are_those_of_autograd(cell: str, way: str) -> None:
    params, rows = photo.initial_params(cell, 7, seed=2), some_rows()
    ours: Any
    ours = photo.BySparsescan(cell, params) if way == "sparsescan" else photo.LOOPS[cell](params)
    above = np.random.default_rng(3).standard_normal((30, 5, 7)).astype(np.float32)
    states = ours.forward(rows.inputs)
    grads = ours.backward(above)
    exact = {name: torch.from_numpy(p).double().requires_grad_() for name, p in params.items()}
    expected = states_in_float64(cell, exact, torch.from_numpy(rows.inputs).double())
    expected.backward(torch.from_numpy(above).double())
    eps = np.finfo(np.float32).eps
    np.testing.assert_allclose(states, expected.detach(), atol=100 * eps)
    assert set(grads) == {name for name in params if name.endswith("_l0")}
    for name, grad in grads.items():
        right = exact[name].grad.numpy()
        np.testing.assert_allclose(grad, right, atol=300 * eps * np.abs(right).max())


@pytest.mark.parametrize("cell", ["MGU", "GRU"])
def test_all_ways_end_at_the_same_parameters(cell: str) -> None:
    params, rows = photo.initial_params(cell, 7, seed=2), some_rows()
    ways: list[Any] = [photo.BySparsescan(cell, params), photo.ByPyTorch(cell, params)]
    ways.append(photo.LOOPS[cell](params))
    losses = [[way.step(rows, 0.01) for _ in range(20)] for way in ways]
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-5)
    assert losses[0][-1] < losses[0][0]
    for name, param in ways[0].params.items():
        assert not np.array_equal(param, params[name])
        for way in ways[1:]:
            np.testing.assert_allclose(np.array(way.params[name].tolist()), param, atol=1e-3)


def test_gradients_along_the_rod_are_those_of_its_loss() -> None:
    rod = heat.make_rod(6, 5, seed=1)
    forward = [torch.from_numpy(matrix.toarray().T) for matrix in rod.matrices]
    states = [torch.rand(5, dtype=torch.float64, requires_grad=True)]
    for matrix in forward[1:]:
        states.append(matrix @ states[-1])
        states[-1].retain_grad()
    # Heat is neither lost nor gained, and flows from the warmer cell to the colder.
    temperatures = torch.stack(states).detach()
    np.testing.assert_allclose(temperatures.sum(1), temperatures[0].sum(), rtol=1e-14)
    assert (temperatures.var(1).diff() < 0).all()
    (torch.stack(states) * torch.from_numpy(rod.terms)).sum().backward()
    expected = np.stack([state.grad.numpy() for state in states])
    np.testing.assert_allclose(heat.scipy_loop(rod.matrices, rod.terms), expected, rtol=1e-12)


def test_rows_for_testing_are_not_for_training() -> None:
    train, test = photo.load_rows(seed=0)
    assert train.inputs.shape == (639, 702, 6)
    assert test.changes.shape == (639, photo.TEST_ROWS, 3)
    # An input at the next step is the pixel before, and the change to it.
    scale = (train.inputs[1, 0, :3] - train.inputs[0, 0, :3]) / train.changes[0, 0]
    for rows in (train, test):
        steps = np.diff(rows.inputs[:, :, :3], axis=0)
        np.testing.assert_allclose(rows.changes[:-1] * np.nanmean(scale), steps, atol=1e-5)
    known = {row.tobytes() for row in train.inputs.transpose(1, 0, 2)}
    assert not any(row.tobytes() in known for row in test.inputs.transpose(1, 0, 2))


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[demo.Figures, Path]:
    output = tmp_path_factory.mktemp("demo") / "curves"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "SECONDS", 0.0)
        return demo.run(hidden=6, batches=8, batch=4, output=output), output


def test_a_short_run_learns_and_measures(short_run: tuple[demo.Figures, Path]) -> None:
    figures, _ = short_run
    theirs = [contest.theirs.name for contest in figures.contests]
    assert theirs == ["PyTorch's loop", "torch.nn.GRU", "SciPy's loop", "SciPy's loop"]
    for contest in figures.cells:
        for way in (contest.ours, contest.theirs):
            assert len(way.losses) == len(way.times) == demo.FEWEST
        assert 0 <= contest.difference < 1e-5
    for contest in figures.contests:
        assert min(contest.ours.times + contest.theirs.times) > 0
    assert max(figures.chain.difference, figures.short.difference) < 1e-12


def test_a_short_run_draws(short_run: tuple[demo.Figures, Path]) -> None:
    _, output = short_run
    assert output.read_bytes().startswith(PNG)
    assert output.stat().st_size > 10_000


def test_what_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    output = tmp_path / "b.png"
    figures = demo.run(hidden=3, batches=3, batch=2, output=str(output), seed=3)
    out, err = capsys.readouterr()
    assert str(figures) in out
    assert [contest.theirs.name for contest in figures.cells] == ["NumPy's loop"] * 2
    assert str(output) in out
    assert "3/3" in err
    assert max(map(len, out.replace(str(output), "").splitlines())) <= 80
    fast, slow, page = out.splitlines()[-3:]
    assert fast.startswith("How many times as fast: ")
    assert slow.startswith("Gains nothing: ")
    assert page.startswith("Next page: docs/start.md")


def test_it_says_what_was_faster_and_what_was_not() -> None:
    def contest(name: str, ours: float, theirs: float) -> demo.Contest:
        ways = demo.Way("sparsescan", [ours], [0.5]), demo.Way("NumPy loop", [theirs], [0.5])
        return demo.Contest("", name, "a step", *ways, 0.0)

    cells = [contest("MGU", 0.004, 0.2), contest("GRU", 0.004, 0.002)]
    figures = demo.Figures(cells, contest("long", 1, 4.25), contest("short", 1, 0.05), 1.0)
    text = demo._report(figures, [0.5, 0.6], 10, 500, 16, "x.png")
    assert "How many times as fast: MGU 50; long 4.2.\n" in text
    assert "Gains nothing: GRU 0.5; short 0.05; more in docs/for-me.md.\n" in text
    assert demo._in_words(cells[0]) == "50 times as fast as NumPy loop"


@pytest.mark.parametrize("slow", ["ours", "theirs"])
def test_either_way_may_do_fewer_steps(monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    class Network:
        def __init__(self, name: str) -> None:
            self.seconds = 0.03 if name == slow else 0.001

        def step(self, rows: photo.Rows, rate: float) -> float:
            time.sleep(self.seconds)
            return 0.5

    monkeypatch.setattr(demo, "SECONDS", 0.1)
    monkeypatch.setattr(photo, "ByPyTorch", lambda cell, params: Network("theirs"))
    ours: Any = Network("ours")
    contest = demo._train("GRU", ours, {}, some_rows(), [np.arange(2)] * 9)
    fewer, more = (
        (contest.theirs, contest.ours) if slow == "theirs" else (contest.ours, contest.theirs)
    )
    assert demo.FEWEST <= len(fewer.losses) < len(more.losses) == 9
    assert contest.difference == 0
    assert (contest.ratio > 1) == (slow == "theirs")


@pytest.mark.slow
def test_equal_seeds_give_equal_training(tmp_path: Path) -> None:
    losses = []
    for seed in (1, 1, 2):
        figures = demo.run(hidden=3, batches=4, batch=4, seed=seed, output=tmp_path / "c")
        losses.append([contest.ours.losses for contest in figures.cells])
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_a_batch_has_rows_enough(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="batch is 703; expected at most 702, all rows"):
        demo.run(batch=703, output=tmp_path / "d.png")
