"""The demo learns, each way alike, with the gradients that autograd has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparsescan import InputError
from sparsescan.examples import photo

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

PNG = b"\x89PNG\r\n\x1a\n"


def some_rows(steps: int = 30, batch: int = 5) -> photo.Rows:
    rng = np.random.default_rng(1)
    shapes = (steps, batch, photo.INPUTS), (steps, batch, photo.COLOURS)
    return photo.Rows(*(rng.standard_normal(shape).astype(np.float32) for shape in shapes))


@pytest.mark.parametrize("way", [photo.ByLoop, photo.BySparsescan])
def test_gradients_are_those_of_autograd(way: Any) -> None:
    params, rows = photo.initial_params(7, seed=2), some_rows()
    ours = way(params)
    above = np.random.default_rng(3).standard_normal((30, 5, 7)).astype(np.float32)
    states = ours.forward(rows.inputs)
    grads = ours.backward(above)
    gru = torch.nn.GRU(photo.INPUTS, 7).double()
    with torch.no_grad():
        for name, param in gru.named_parameters():
            param.copy_(torch.from_numpy(params[name]))
    expected = gru(torch.from_numpy(rows.inputs).double())[0]
    expected.backward(torch.from_numpy(above).double())
    eps = np.finfo(np.float32).eps
    np.testing.assert_allclose(states, expected.detach(), atol=100 * eps)
    for name, param in gru.named_parameters():
        exact = param.grad.numpy()
        np.testing.assert_allclose(grads[name], exact, atol=300 * eps * np.abs(exact).max())


def test_all_ways_end_at_the_same_parameters() -> None:
    params, rows = photo.initial_params(7, seed=2), some_rows()
    ways = photo.BySparsescan(params), photo.ByLoop(params), photo.ByPyTorch(params)
    losses = [[way.step(rows, 0.01)[0] for _ in range(20)] for way in ways]
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-5)
    assert losses[0][-1] < losses[0][0]
    for name, param in ways[0].params.items():
        np.testing.assert_allclose(ways[1].params[name], param, atol=1e-3)
        assert not np.array_equal(param, params[name])
    both = {**dict(ways[2]._gru.named_parameters()), **dict(ways[2]._linear.named_parameters())}
    for name, param in both.items():
        np.testing.assert_allclose(param.detach(), ways[0].params[name], atol=1e-3)


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
def short_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[photo.Figures, Path]:
    output = tmp_path_factory.mktemp("demo") / "curves"
    return photo.run(hidden=6, batches=12, batch=8, output=output), output


def test_a_short_run_learns_and_measures(short_run: tuple[photo.Figures, Path]) -> None:
    figures, _ = short_run
    assert list(figures.races) == ["sparsescan", "NumPy loop", "PyTorch"]
    for race in figures.races.values():
        assert len(race.losses) == len(race.times) == 12
        assert np.isfinite(race.times).all()
        assert np.min(race.times) > 0
    assert 0 < figures.difference < 1e-4
    assert 0.2 < figures.test_loss < 1.5
    assert figures.ratio("sparsescan") == 1


def test_a_short_run_draws(short_run: tuple[photo.Figures, Path]) -> None:
    _, output = short_run
    assert output.read_bytes().startswith(PNG)
    assert output.stat().st_size > 10_000


def test_what_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(photo.importlib.util, "find_spec", lambda name: None)
    output = tmp_path / "b.png"
    figures = photo.run(hidden=3, batches=3, batch=2, output=str(output), seed=3)
    out, err = capsys.readouterr()
    assert str(figures) in out
    assert list(figures.races) == ["sparsescan", "NumPy loop"]
    assert f"{figures.ratio('NumPy loop'):.1f} times as fast as the NumPy loop" in out
    assert str(output) in out
    assert "3/3" in err
    assert max(map(len, out.replace(str(output), "").splitlines())) <= 80


def test_it_says_where_nothing_is_gained() -> None:
    races = {
        "sparsescan": photo.Race([0.5], [[0.004, 0.004, 0.001]]),
        "NumPy loop": photo.Race([0.5], [[0.002, 0.002, 0.001]]),
    }
    text = photo._report(photo.Figures(races, 0.0, 0.5, 1.0), 10, 500, 16, "x.png")
    assert "sparsescan was slower than the NumPy loop, which took 0.56 of the" in text
    assert "Nothing is gained beside the loop" in text


@pytest.mark.slow
def test_equal_seeds_give_equal_training(tmp_path: Path) -> None:
    runs = [
        photo.run(hidden=3, batches=4, batch=4, seed=seed, output=tmp_path / "c").races
        for seed in (1, 1, 2)
    ]
    losses = [run["sparsescan"].losses for run in runs]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_a_batch_has_rows_enough(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="batch is 703; expected at most 702, all rows"):
        photo.run(batch=703, output=tmp_path / "d.png")
