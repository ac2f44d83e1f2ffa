"""Updates of recurrent PPO: contenders agree, and what was measured can be shown."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparsescan.torch

from . import peers, ppo, step
from .experiment import Options, Results, run
from .ppo import AT_STARTS, OURS, PEER, WINDOWS, Case

QUICK = Options(True, "cpu")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "PAUSE", 0)


# -- How sequences are processed ------------------------------------------------------------------


def loop(features: Any, states: Any, starts: Any, net: Any) -> tuple[Any, Any]:
    """Return what sb3-contrib's loop over steps does."""
    count = states[0].shape[1]
    xs = features.reshape(count, -1, net.input_size).swapaxes(0, 1)
    outputs = []
    for x, start in zip(xs, starts.reshape(count, -1).T, strict=True):
        kept = (1 - start).view(1, count, 1)
        output, states = net(x[None], tuple(kept * state for state in states))
        outputs.append(output)
    return torch.cat(outputs).transpose(0, 1).flatten(0, 1), states


def both(kind: str) -> tuple[Any, Any]:
    """Return a network of PyTorch's, and a converted one."""
    torch.manual_seed(0)
    theirs = nn.LSTM(3, 5) if kind == "LSTM" else ppo._AsLSTM(3, 5)
    ours = copy.deepcopy(theirs)
    sparsescan.torch.convert(ours.gru if kind == "GRU" else ours)
    return ours, theirs


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("process", [ppo.with_resets, ppo.at_starts])
def test_one_call_computes_what_the_loop_does(kind: str, process: Any) -> None:
    ours, theirs = both(kind)
    if process is ppo.at_starts:
        ours = theirs
    features, states = torch.randn(4 * 9, 3), tuple(torch.randn(2, 1, 4, 5))
    starts = torch.zeros(4, 9)
    starts[1:3, 0] = 1
    if process is ppo.with_resets:
        starts[0, 4] = starts[1, 7] = starts[3, 8] = 1
    found = process(features, states, starts.flatten(), ours)
    expected = loop(features, states, starts.flatten(), theirs)
    torch.testing.assert_close(found[0], expected[0])
    if kind == "LSTM":  # the second state of the other stays as it is
        torch.testing.assert_close(tuple(found[1]), tuple(expected[1]))


def test_starts_inside_a_sequence_need_resets() -> None:
    net, starts = nn.LSTM(3, 5), torch.tensor([1.0, 0, 1])
    states = torch.zeros(1, 1, 5), torch.zeros(1, 1, 5)
    with pytest.raises(AssertionError, match="an episode starts inside a sequence"):
        ppo.at_starts(torch.randn(3, 3), states, starts, net)


# -- Updates --------------------------------------------------------------------------------------


@pytest.fixture
def _installed() -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("stable_baselines3")
    pytest.importorskip("sb3_contrib")


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_all_updates_have_the_same_gradients(kind: str) -> None:
    piece = ppo.measure(Case(kind, 5, 64, 2), quick=True)
    assert piece["missing"] == {}
    assert set(piece["samples"]) == {OURS, WINDOWS, PEER, AT_STARTS}
    networks = [name for name in piece["differences"] if "weight_hh_l0" in name]
    assert len(networks) == 2 * 3
    cut, whole = piece["sequences"][PEER], piece["sequences"][WINDOWS]
    assert piece["sequences"][OURS] == piece["sequences"][AT_STARTS] == cut
    assert cut[0] > whole[0] >= 8
    assert whole[1] == 64


@pytest.mark.usefixtures("_installed")
def test_wrong_gradients_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(features: Any, states: Any, starts: Any, net: Any) -> Any:
        return right(features, states, torch.zeros_like(starts), net)

    right = ppo.with_resets
    monkeypatch.setattr(ppo, "with_resets", without)
    with pytest.raises(AssertionError, match="the relative difference is"):
        ppo.measure(Case("LSTM", 5, 64, 2), quick=True)


def test_a_run_without_sb3_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def require(module: str, hint: str) -> Any:
        raise peers.MissingPeerError(f"No module named '{module}': {hint}")

    monkeypatch.setattr(peers, "require", require)
    results = json.loads(run(ppo.EXPERIMENT, QUICK, tmp_path).read_text())
    (piece,) = results["pieces"].values()
    assert set(piece["missing"]) == {OURS, WINDOWS, PEER, AT_STARTS}
    assert piece["samples"] == {}
    said = ppo.summary(results)
    assert said.startswith("sb3-contrib: No module named 'gymnasium': pip install")
    assert ppo.EXPERIMENT.tables(results) == ppo.EXPERIMENT.rows(results) == []
    assert ppo.EXPERIMENT.drawings(results) == []


def test_what_is_missed_is_said() -> None:
    samples = {OURS: [1e-3] * 3, WINDOWS: [5e-4] * 3, PEER: [2e-3] * 3, AT_STARTS: [1e-3] * 3}
    piece = {
        "samples": samples,
        "variants": dict.fromkeys(samples, "1 threads"),
        "wanted": {PEER: 3},
        "sequences": {name: [20, 96] for name in samples},
    }
    results: Results = {"pieces": {case.name: piece for case in ppo.CASES}}
    (table,) = ppo.EXPERIMENT.tables(results)
    assert len(table.rows) == 4 * len(ppo.CASES)
    assert table.rows[2][1:] == [
        "sb3-contrib",
        "20 × 96",
        "1 threads",
        "2.00",
        "2.00",
        "3",
        "missed",
    ]
    assert [row.theirs for row in ppo.EXPERIMENT.rows(results)][:2] == [2e-3, 1e-3]
    assert len(ppo.EXPERIMENT.drawings(results)) == 1
    with pytest.raises(SystemExit, match="ppo is of the CPU"):
        list(ppo.EXPERIMENT.pieces(Options(True, "cuda")))
    keys = [piece.key for piece in ppo.EXPERIMENT.pieces(Options(False, "cpu"))]
    assert keys == [case.name for case in ppo.CASES]
