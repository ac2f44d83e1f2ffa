"""The scaling study: what the model says of many ranks, and a run of it on two."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsescan import Pattern
from sparsescan.parallel import Network
from sparsescan.plan.costs.cpu import load_cpu, save_cpu

from . import scaling, scaling_model
from .experiment import Options, run
from .runs import draw
from .scaling_model import ALONE, CHAINS, INFINIBAND, curves, logarithm, predict

QUICK = Options(quick=True, device="cpu")
positive = st.floats(1, 1e5)


# -- By the model ---------------------------------------------------------------------------------


def test_more_ranks_than_steps_take_logarithmically_longer():
    """Θ(log p) of the paper's section 3.6, up to 4,096 ranks."""
    n, ranks = 64, [64, 256, 1024, 4096]
    (curve,) = curves("dense", [n] * 4, ranks, [INFINIBAND])
    added = np.diff(curve["products"])
    np.testing.assert_allclose(added, added.mean(), rtol=0.1)
    fit = logarithm(ranks, curve["products"])
    assert fit["off"] < 0.01
    assert fit["b"] == pytest.approx(added.mean() / 2, rel=0.05)
    # Combining by vectors, each further rank adds a message.
    messages = 1e-9 * INFINIBAND.latency * (4096 - 1024)
    assert curve["vectors"][3] - curve["vectors"][2] >= messages
    assert curve["products"][3] < curve["vectors"][3] / 5


@given(st.integers(2, 4), st.integers(1, 24), st.builds(Network, st.just(""), *[positive] * 4))
@settings(max_examples=5, deadline=None)
def test_each_doubling_of_ranks_adds_a_round(k: int, size: int, network: Network):
    n = 2**k
    patterns = [Pattern.dense((size, size))] * n
    # The first of n ranks makes a gradient instead of a product; the first of more has no part.
    forecasts = [predict(patterns, n * more, [network])[0]["products"] for more in (2, 4, 8)]
    message = 8 * (4 + size + -(-(size + 1) // 2) + size * size)  # header, c, exponents, values
    # An agreement before and one after, of 8 and 2 words; a round of the scan, with two calls.
    calls = 3 * network.latency + network.inverse_bandwidth * 80
    calls += network.exchange * message + 2 * network.call
    for before, after in pairwise(forecasts):
        assert after.nanoseconds - before.nanoseconds == pytest.approx(calls, rel=1e-6)


@pytest.mark.parametrize("name", ["dense", "diagonal"])
def test_memory_of_a_rank_falls_as_ranks_are_added(name: str):
    """Θ(max(n/p, 1)) of section 3.6: so many bytes for each step of a rank, and some."""
    n, ranks = 64 + int(np.random.default_rng().integers(64)), [1, 2, 4, 16]
    (curve,) = curves(name, [n] * 6, [*ranks, n, 2 * n], [INFINIBAND])
    *held, least, same = curve["vectors_bytes"]
    assert least == same
    assert curve["products_bytes"][-1] == curve["products_bytes"][-2]
    pattern = CHAINS[name].pattern
    for p, nbytes in zip(ranks, held, strict=True):
        of_a_step = (nbytes - least) / (-(-n // p) - 1)
        needed = 8 * (pattern.nnz + pattern.shape[0])
        assert needed <= of_a_step <= 2 * needed


@given(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.integers(3, 12))
def test_a_logarithm_is_found(a: float, b: float, count: int):
    ranks = 2 ** np.arange(count)
    seconds = 1e6 + a + b * np.log2(ranks)
    fit = logarithm(ranks.tolist(), seconds.tolist())
    assert fit["a"] == pytest.approx(1e6 + a, rel=1e-9)
    assert fit["b"] == pytest.approx(b, abs=1e-6)
    assert fit["off"] < 1e-9
    seconds[-1] *= 2
    assert logarithm(ranks.tolist(), seconds.tolist())["off"] > 0.01


# -- A run ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(bool(scaling.missing()), reason=str(scaling.missing()))
@pytest.mark.usefixtures("sleeping_ranks")
def test_a_run_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    constants = save_cpu(load_cpu(), tmp_path / "machine.json").read_bytes()
    monkeypatch.setattr(scaling, "_machine", lambda: constants)
    monkeypatch.setattr(scaling, "cores", lambda: 1)
    monkeypatch.setattr(scaling, "RANKS", (1, 2))
    monkeypatch.setattr(scaling, "_QUICK_MEMORY_RANKS", (1, 2))
    monkeypatch.setattr(scaling, "_QUICK_ROUNDS", (3, 1e-3))
    monkeypatch.setattr(scaling, "_QUICK_CHAINS", tuple(CHAINS))
    monkeypatch.setattr(scaling, "_QUICK_MEMORY", (64, 1024, 24))
    few = {"strong": [["dense", 64]], "few": 4, "each": 4, "stride": 1, "most": 64}
    monkeypatch.setattr(scaling, "_QUICK_MODEL", few)
    path = run(scaling.EXPERIMENT, QUICK, tmp_path / "results")
    results = json.loads(path.read_text())
    assert results["done"]
    pieces = results["pieces"]

    for ranks in (1, 2):
        piece = pieces[f"times, P={ranks}"]
        assert (piece["ranks"], piece["oversubscribed"]) == (ranks, ranks > 1)
        scans = {(scan["chain"], scan["n"]): scan for scan in piece["scans"]}
        assert {name for name, _ in scans} == set(CHAINS)
        for name, chain in CHAINS.items():
            assert (name, chain.n) in scans
            assert chain.each is None or (name, chain.each * ranks) in scans
        for (name, _), scan in scans.items():
            ways = {ALONE, *CHAINS[name].schedules}
            assert scan["samples_seconds"].keys() == scan["predicted_seconds"].keys() == ways
            for way, samples in scan["samples_seconds"].items():
                assert len(samples) == 3
                assert min(samples) > 0
                assert scan["median_seconds"][way] == median(samples)
            assert scan["difference"] < 1e-8
    (groups,) = [s for s in pieces["times, P=2"]["scans"] if s["chain"] == "groups"]
    assert groups["grid"][:2] == [1, 2]

    alone, shared = pieces["memory, P=1"], pieces["memory, P=2"]
    assert alone["chain_bytes"] == 1024 * 64 * 64 * 8 > alone["limit_bytes"]
    (refused,) = alone["runs"]
    assert refused["refused"].startswith("MemoryError: rank 0: Unable to allocate 32.0 MiB")
    assert [each["schedule"] for each in shared["runs"]] == ["vectors", "products"]
    assert not any(each["refused"] for each in shared["runs"])
    for piece in (alone, shared):
        for each in piece["runs"]:
            least = piece["chain_bytes"] / piece["ranks"]
            for peak, said in zip(each["peak_bytes"], each["predicted_bytes"], strict=True):
                assert 0.9 * least < peak < said + (2 << 20)

    # The other network is this machine's, with so few samples.
    *_, infiniband = pieces["model"]["beyond"]
    assert infiniband["fit"]["off"] < 0.05
    assert len(draw(scaling.EXPERIMENT, results, tmp_path)) == 5
    rows = scaling.EXPERIMENT.rows(results)
    assert [row.theirs for row in rows] == [
        scan["median_seconds"][ALONE]
        for scan in pieces["times, P=2"]["scans"]
        if scan["n"] == CHAINS[scan["chain"]].n
    ]
    half = results | {"pieces": {key: pieces[key] for key in ("times, P=1", "memory, P=1")}}
    assert len(scaling.EXPERIMENT.drawings(half)) == 3


def test_what_cannot_be_run_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scaling, "_mpiexec", lambda: None)
    with pytest.raises(SystemExit, match="scaling needs mpi4py and mpiexec: pip install"):
        run(scaling.EXPERIMENT, QUICK, tmp_path)
    monkeypatch.setattr(
        "bench.machine.describe_gpu", lambda: {"device": {"gpu": "a"}, "versions": {}}
    )
    with pytest.raises(SystemExit, match="scaling is of the CPU"):
        run(scaling.EXPERIMENT, Options(quick=True, device="cuda"), tmp_path)
    assert scaling.EXPERIMENT.drawings({"pieces": {}}) == []
    assert scaling.EXPERIMENT.rows({"pieces": {}}) == []


def test_ranks_that_fail_say_why(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"ended with 1:\n(.|\n)*KeyError: 'most'"):
        scaling._call(
            [sys.executable, "-m", "bench.scaling_model", str(tmp_path / "x"), "{}"],
            tmp_path,
        )


def test_the_chains_are_what_they_are_called():
    bands = {"dense": 20, "stencil": 3, "diagonal": 1, "groups": 20}
    for name, chain in scaling_model.CHAINS.items():
        assert np.diff(chain.pattern.indptr).max() == bands[name]
