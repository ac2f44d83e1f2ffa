"""The GPU benchmarks without a GPU: everything around the device, on stand-ins for it."""

from __future__ import annotations

import json
import operator
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsescan
from sparsescan.execution.cuda.chunks import H100, ChunkForm, chunk_count, in_one_launch
from sparsescan.execution.workspace import Workspace
from sparsescan.kernels.cuda import chunks

from . import (
    files,
    gpu,
    gpu_chains,
    gpu_cusparse,
    gpu_device,
    gpu_parts,
    gpu_preflight,
    gpu_processes,
    gpu_races,
    machine,
    plots,
)
from .contests import OURS
from .fake_cusparse import FakeCusparse
from .gpu_chains import (
    IMPLICIT,
    SCHEDULES,
    STEPS,
    WHOLES,
    chained,
    families,
    random_chain,
    reference,
    repeat,
    sanitize,
)
from .gpu_cusparse import NumericSpGEMM
from .gpu_measure import Race, Ratio, measure
from .gpu_processes import Job, run_part, run_sanitizer, run_tests, toolkit_variables
from .gpu_races import (
    CUDNN,
    CUDNN_GRAPH,
    JAX,
    LOOP,
    PARAMETERS,
    REUSE,
    SLOPES,
    SPGEMM,
    TORCH_GRAPH,
    TORCH_LOOP,
    VALUES,
)
from .gpu_races import (
    IMPLICIT as IMPLICIT_STEPS,
)
from .gpu_table import notes, table, wanted
from .machine import Cpu
from .peers import MissingPeerError
from .timing import Ceilings

CEILINGS = Ceilings(1e9, 1e10)
GPU = {"device": {"gpu": "Made-up GPU 1"}, "versions": {"cupy-cuda13x": "0"}}


class Host(Cpu):
    """The CPU, with all that :class:`Cuda` offers."""

    on_gpu = True
    cache = 10_000

    csr = chain = staticmethod(lambda given: given)
    spgemm = spmv = staticmethod(operator.matmul)
    address = staticmethod(lambda array: array.ctypes.data)
    stream = staticmethod(lambda: 0)
    free = Cpu.synchronize
    waits_inside = staticmethod(lambda call: False)

    def ceilings(self, moved: int = 0, dtype: Any = None) -> Ceilings:
        return CEILINGS


def run_race(race: Race, broken: dict[str, str] | None = None) -> dict[str, Any]:
    result = measure(race, Host(), CEILINGS, {} if broken is None else broken, rounds=1)
    json.dumps(result)  # it can be written
    return result


def made_up(seconds: dict[str, float], **fields: Any) -> Race:
    """Return a race whose contenders are as slow as they are told to be, and right."""

    def call(name: str) -> Any:
        time.sleep(seconds[name])
        return np.ones(3, np.float32)

    given: dict[str, Any] = {
        "name": "a race",
        "work": "some work",
        "ratios": (Ratio("them"),),
        "size": 1000,
        "bytes": 4000,
        "flops": 10,
        "dtype": np.dtype(np.float32),
        "contenders": {
            name: lambda name=name: {"the way": partial(call, name)} for name in seconds
        },
    }
    return Race(**given | fields)


# -- Races ----------------------------------------------------------------------------------------


def test_a_ratio_is_theirs_over_ours_by_each_clock_warm_and_cold():
    result = run_race(made_up({OURS: 1e-3, "them": 4e-3}))
    assert set(result["median_seconds"]) == {
        "call, warm",
        "call, cold",
        "device, warm",
        "device, cold",
    }
    (ratio,) = result["ratios"]
    medians = result["median_seconds"]["call, warm"]
    assert ratio["measured"]["warm"] == medians["them"] / medians[OURS]
    assert ratio["measured"]["warm"] > 2
    assert set(ratio["measured"]) == {"warm", "cold"}


def test_what_a_cache_cannot_hold_has_no_cold_variant():
    result = run_race(made_up({OURS: 0, "them": 0}, size=Host.cache + 1))
    assert set(result["median_seconds"]) == {"call, warm", "device, warm"}


def test_the_floor_is_the_longer_of_moving_and_computing():
    result = run_race(made_up({OURS: 1e-3, "them": 0}, floors={"twice": (8000, 10**6)}))
    assert result["floors"]["the work"]["seconds"] == pytest.approx(4e-6)
    assert result["floors"]["twice"]["seconds"] == pytest.approx(1e-4)
    taken = result["median_seconds"]["device, warm"][OURS]
    multiple = result["floors"]["the work"]["multiple"]["device, warm"]
    assert multiple == {OURS: pytest.approx(taken / 4e-6)}


def test_a_missing_peer_is_said_to_be_missing():
    def missing() -> Any:
        raise MissingPeerError("not installed")

    race = made_up({OURS: 0, "them": 0}, ratios=(Ratio("them"), Ratio("others", required=2)))
    race.contenders["others"] = missing
    result = run_race(race)
    assert result["ratios"][1]["measured"] == {}
    assert result["ratios"][1]["skipped"] == result["skipped"]["others"] == "not installed"
    (line,) = wanted([result])
    assert line["met"] is None
    assert line["skipped"] == "not installed"


def test_a_peer_that_fails_is_not_tried_again(capsys: pytest.CaptureFixture[str]):
    tries = []

    def failing() -> Any:
        tries.append(1)
        raise RuntimeError("out of memory")

    race = made_up({OURS: 0, "them": 0}, ratios=(Ratio("others"),))
    race.contenders["others"] = failing
    broken: dict[str, str] = {}
    for _ in range(2):
        assert run_race(race, broken)["skipped"] == {"others": "RuntimeError: out of memory"}
    assert len(tries) == 1
    assert "out of memory" in capsys.readouterr().err


def test_a_peer_that_waits_inside_is_marked(monkeypatch: pytest.MonkeyPatch):
    race = made_up({OURS: 0, "them": 0}, notes={"them": "copies as much again"})
    waiting = race.contenders["them"]()["the way"].args
    monkeypatch.setattr(Host, "waits_inside", staticmethod(lambda call: call.args == waiting))
    result = run_race(race)
    assert result["waits_inside"] == ["them"]
    said = table([result])
    assert any(line.split()[:2] == ["them*", "call"] for line in said)
    assert "them copies as much again." in said
    longer = result | {"notes": {"them": "copies as much again; waits"}}
    assert notes([result, longer])[1:] == ["them copies as much again; waits."]
    assert any(line.startswith("* waits for the device inside") for line in said)


def test_a_wrong_result_stops_a_race():
    race = made_up({OURS: 0, "them": 0})
    race.contenders[OURS] = lambda: {"": lambda: np.full(3, np.nan, np.float32)}
    with pytest.raises(AssertionError, match="sparsescan is wrong"):
        run_race(race)


def test_rnn(capsys: pytest.CaptureFixture[str]):
    broken: dict[str, str] = {}
    result = run_race(gpu_races.rnn(Host(), steps=30, batch=4), broken)
    capsys.readouterr()  # why a CPU captures no CUDA graph
    ours = {OURS, VALUES, IMPLICIT_STEPS, SLOPES}
    assert set(result["median_seconds"]["call, warm"]) == {*ours, CUDNN}
    assert set(broken) == {CUDNN_GRAPH}
    # 29 Jacobians of 4 samples are read, 30 gradients are written.
    floor = result["floors"]["the work"]
    assert floor["bytes"] == 4 * (29 * 4 * 400 + 30 * 4 * 20)
    assert floor["flops"] == 2 * 29 * 4 * 400
    # Jacobian times matrix, and then times vector.
    assert result["floors"]["two passes"]["flops"] == 2 * 29 * 4 * 400 * 21
    # Slopes are read, gradients written.
    assert result["floors"]["implicit"]["bytes"] == 4 * 2 * 30 * 4 * 20
    measured = [True] * 4 + [False] * 4
    assert [bool(ratio["measured"]) for ratio in result["ratios"]] == measured * 2
    assert [ratio["clock"] for ratio in result["ratios"]] == ["call"] * 8 + ["device"] * 8
    assert "reserve space" in result["notes"][CUDNN]
    assert "persistent kernel" in result["notes"][CUDNN]


def test_rnn_parameters():
    result = run_race(gpu_races.rnn_parameters(Host(), steps=30, batch=4))
    assert set(result["median_seconds"]["call, warm"]) == {PARAMETERS, CUDNN}


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_training_steps(kind: str):
    result = run_race(gpu_races.training_step(Host(), kind, 5, 20, 3))
    assert set(result["median_seconds"]["call, warm"]) == {OURS, CUDNN}
    assert [ratio["required"] for ratio in result["ratios"]] == [None, None]


def test_affine_scan():
    broken: dict[str, str] = {}
    result = run_race(gpu_races.affine(Host(), steps=7, batch=3, units=4), broken)
    assert set(result["median_seconds"]["call, warm"]) == {OURS, TORCH_LOOP}
    assert set(broken) == {TORCH_GRAPH}
    assert result["floors"]["the work"]["bytes"] == 3 * 4 * 7 * 3 * 4


@pytest.mark.slow
def test_jax():
    pytest.importorskip("jax", reason="jax is not installed")
    result = run_race(gpu_races.jax_scan(Host(), steps=12, batch=2))
    assert set(result["median_seconds"]) == {"host, warm"}
    assert result["ratios"][0]["measured"]["warm"] > 0
    elsewhere = Host()
    elsewhere.jax_name = "gpu"
    with pytest.raises(MissingPeerError, match="jax computes on 'cpu' here"):
        gpu_races.jax_scan(elsewhere, steps=12, batch=2)


@pytest.mark.parametrize("make", [gpu_races.spgemm_pair, gpu_races.spgemm_level])
def test_spgemm(make: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_races, "load", FakeCusparse)
    result = run_race(make(Host(), reduced=True))
    assert set(result["median_seconds"]["call, warm"]) == {OURS, SPGEMM, REUSE}
    assert [ratio["clock"] for ratio in result["ratios"]] == ["call", "device", "device"]


def test_spgemm_without_cusparse(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_cusparse, "find_library", lambda name: None)
    result = run_race(gpu_races.spgemm_pair(Host(), reduced=True))
    assert "no libcusparse with SpGEMMreuse" in result["skipped"][REUSE]


@pytest.mark.parametrize(
    "make",
    [partial(gpu_races.stencil, steps=5, side=8), partial(gpu_races.convolutions, reduced=True)],
)
def test_linear(make: Any):
    result = run_race(make(Host()))
    assert set(result["median_seconds"]["call, warm"]) == {OURS, LOOP}


def test_the_peer_of_a_chain_with_one_pattern_reads_one_pattern_too():
    class Copying(Host):
        csr = staticmethod(lambda matrix: matrix.copy())

    seen = []
    gpu = Copying()
    gpu.spmv = lambda matrix, x: (seen.append(matrix), matrix @ x)[1]
    race = gpu_races.stencil(gpu, steps=4, side=8)
    race.contenders[LOOP]()["cusparse.spmv"]()
    assert len({matrix.data.ctypes.data for matrix in seen}) == 3
    assert len({matrix.indices.ctypes.data for matrix in seen}) == 1


def test_graph_replay_is_not_compared_where_there_is_none():
    result = run_race(gpu_races.launches(Host(), "auto", steps=6, batch=2))
    (ratio,) = result["ratios"]
    assert ratio["measured"] == {}
    assert "no graph of the scan was captured" in ratio["skipped"]
    assert [line["met"] for line in wanted([result])] == [None]
    assert any("no graph of the scan was captured" in row for row in table([result]))


def test_graph_replay_against_plain_launches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Workspace, "_may_capture", True, raising=False)
    monkeypatch.setattr(Workspace, "_graphs", [None, object()], raising=False)
    result = run_race(gpu_races.launches(Host(), "blelloch", steps=6, batch=2))
    assert result["ratios"][0]["measured"]["warm"] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="numba-cuda is installed on Linux only")
def test_a_capture_that_fails_is_said_in_the_result(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("numba_cuda")
    import fake_cupy
    import ptx.stand_in

    from sparsescan.kernels.cuda import device

    ptx.stand_in.install(monkeypatch)
    cupy = fake_cupy.install(monkeypatch)
    monkeypatch.setattr(device, "launch", lambda *arguments: None)
    grad, values = cupy.asarray(np.ones(3)), cupy.asarray(np.ones((4, 3, 3)))

    def contest() -> tuple[sparsescan.ScanPlan, Race]:
        plan, race = sparsescan.plan(values, schedule="linear"), made_up({OURS: 0, "them": 0})

        def scan() -> Any:
            plan.exclusive_scan(grad, values)
            return np.ones(3, np.float32)

        race.contenders[OURS] = lambda: {"plan": scan}
        return plan, race

    plan, race = contest()
    result = run_race(race)
    assert result["captures"] == {"captured": 1}
    assert result["notes"] == {}
    gpu_races.with_graph(plan, race.contenders[OURS]()["plan"])

    def refuse(self: Any, mode: Any = None) -> None:
        raise fake_cupy.CUDARuntimeError("cudaErrorStreamCaptureUnsupported")

    monkeypatch.setattr(fake_cupy.Stream, "begin_capture", refuse, raising=False)
    plan, race = contest()
    result, said = run_race(race), "CUDARuntimeError: cudaErrorStreamCaptureUnsupported"
    assert result["captures"] == {said: 1}
    assert any(f"no graph was captured: {said}" in line for line in table([result]))
    with pytest.raises(MissingPeerError, match=f"no graph of the scan was captured: {said}"):
        gpu_races.with_graph(plan, race.contenders[OURS]()["plan"])


# -- cuSPARSE by its C interface ------------------------------------------------------------------


def test_the_numeric_stage_of_cusparse(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng()
    a, b = (
        sp.random_array(shape, density=0.3, format="csr", dtype=np.float32, rng=rng)
        for shape in ((7, 5), (5, 9))
    )
    for matrix in (a, b):
        matrix.indices, matrix.indptr = (
            x.astype(np.int32) for x in (matrix.indices, matrix.indptr)
        )
    library = FakeCusparse()
    product = NumericSpGEMM(Host(), gpu_cusparse.typed(library), a, b)
    assert np.isnan(product.get().data).all()
    np.testing.assert_allclose(product().get().toarray(), (a @ b).toarray(), rtol=1e-6)
    b.data *= 2
    np.testing.assert_allclose(product().get().toarray(), (a @ b).toarray(), rtol=1e-6)
    assert len(library.alive) == 5
    del product
    assert library.alive == {}


def test_what_cusparse_refuses_is_an_error(capsys: pytest.CaptureFixture[str]):
    a = sp.eye_array(3, format="csr", dtype=np.float32)
    library = gpu_cusparse.typed(FakeCusparse())
    library.cusparseSpGEMMreuse_copy = lambda *arguments: 3
    with pytest.raises(RuntimeError, match="cusparseSpGEMMreuse_copy returned status 3"):
        NumericSpGEMM(Host(), library, a, a)


# -- Random chains --------------------------------------------------------------------------------

# Of the long chain in one launch.
SMALL: dict[str, Any] = {"steps": 64, "batch": 2, "chunks": 4}


def test_random_chains_are_right_and_repeat():
    report = repeat(Host(), chains=12, repetitions=2)
    assert report["failed"] == []
    assert report["entropy"] != repeat(Host(), chains=0)["entropy"]


def test_other_bits_are_seen():
    class Shaky(Host):
        def get(self, array: Any) -> Any:
            return np.nextafter(array, np.inf) if np.random.default_rng().random() < 0.5 else array

    report = repeat(Shaky(), chains=1, repetitions=20, entropy=3)
    again = chained(Shaky(), 20, **SMALL)
    assert {entry["why"] for entry in again["failed"]} == {"other bits"}
    assert [entry["why"] for entry in report["failed"]] == ["other bits"]
    assert "steps as" in report["failed"][0]["what"]


def test_wrong_values_are_seen():
    class Wrong(Host):
        def get(self, array: Any) -> Any:
            return array * 1.01 + 0.01

    report = repeat(Wrong(), chains=1, repetitions=2, entropy=3)
    assert [(entry["chain"], entry["why"]) for entry in report["failed"]] == [(0, "wrong")]
    assert chained(Wrong(), 2, **SMALL)["failed"] == [{"run": 0, "why": "wrong"}]
    assert [case["why"] for case in families(Wrong())["cases"]] == ["wrong"] * 13 + [None]
    with pytest.raises(AssertionError, match=r"implicit steps of RNN.* is wrong; implicit steps"):
        sanitize(Wrong())


def test_a_long_chain_is_right_and_repeats():
    saved: list[str] = []
    report = chained(Host(), 3, **SMALL, save=lambda report: saved.append(json.dumps(report)))
    assert report["failed"] == []
    assert (report["blocks"], report["asked"], len(report["seconds"])) == (8, 3, 3)
    assert [json.loads(each)["done"] for each in saved] == [0, 1, 2, 3]
    other = chained(Host(), 0, **SMALL)
    assert other["entropy"] != report["entropy"]


def test_the_long_chain_has_more_blocks_than_a_device_runs_at_once():
    """In one launch, as long as the chain is; but here it is not run."""
    report = chained(Host(), 0)
    assert report["blocks"] >= 1200
    form = ChunkForm(20, 20, terms=1)
    count = chunk_count(30_000, 16, form, H100)
    assert report["blocks"] == count * 16
    assert in_one_launch(form, np.dtype(np.float32), 30_000, 16, 400)


def test_a_case_of_every_family_is_right():
    saved: list[str] = []
    report = families(Host(), lambda report: saved.append(json.dumps(report)))
    assert [case for case in report["cases"] if not case["ok"]] == []
    assert report["done"] == report["asked"] == len(report["cases"]) == len(saved) // 2
    reports = [json.loads(each) for each in saved]
    assert [each["running"] for each in reports[::2]] == [case["name"] for case in report["cases"]]
    assert [each["done"] for each in reports[1::2]] == [*range(1, report["asked"] + 1)]


def test_a_family_that_fails_leaves_others_alone(capsys: pytest.CaptureFixture[str]):
    class Small(Host):
        def put(self, array: Any) -> Any:
            if array.ndim == 4 and array.shape[-1] == 160:
                raise MemoryError("out of memory")
            return array

    bad = [case for case in families(Small())["cases"] if not case["ok"]]
    assert [case["name"] for case in bad] == ["products of large dense steps"]
    assert bad[0]["why"] == "MemoryError: out of memory"
    assert "out of memory" in capsys.readouterr().err


def test_other_registers_than_assumed_are_seen(monkeypatch: pytest.MonkeyPatch):
    taken = {"dense": 154, "GRU": 190, "LSTM": 200}
    made = iter(taken.values())

    def kernels(size: int, nnz: int, dtype: Any, *, terms: int, states: int) -> Any:
        multiply = types.SimpleNamespace(get_regs_per_thread=partial(dict, signature=next(made)))
        tiles = chunks.tiles_of(size, dtype.itemsize, terms, states)
        return types.SimpleNamespace(multiply=multiply, tiles=tiles)

    class Made(Host):
        device = "cuda"
        xp = types.SimpleNamespace(cuda=types.SimpleNamespace(Device=lambda: device))

    device = types.SimpleNamespace(id=54321, attributes={"MultiProcessorCount": 132})
    monkeypatch.setattr(chunks, "chunk_kernels", kernels)
    why = gpu_chains._registers_fault(Made())
    assert why == "dense: 154 registers, not 128; LSTM: 200 registers, not 168"


def test_every_family_is_sanitized(capsys: pytest.CaptureFixture[str]):
    saved: list[dict[str, Any]] = []
    count = len(WHOLES) * len(SCHEDULES) * 2 + len(STEPS) + len(IMPLICIT)
    assert sanitize(Host(), saved.append) == count
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == count
    assert lines[0].startswith(f"1 of {count}: implicit steps of RNN: 64 steps as ImplicitChain")
    # The name of what runs is there before it does.
    assert [f"{k + 1} of {count}: {each['running']}" for k, each in enumerate(saved[::2])] == lines
    assert saved[-1]["done"] == count


@pytest.mark.slow
def test_families_run_all_kernels(monkeypatch: pytest.MonkeyPatch):
    """As compiled, on the CPU."""
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    import fake_cupy
    from ptx import stand_in

    stand_in.install(monkeypatch)
    cupy = fake_cupy.install(monkeypatch)
    launches = fake_cupy.watch(monkeypatch)

    class OnDevice(Host):
        device = "cuda"
        xp = cupy

        put = staticmethod(cupy.asarray)
        get = staticmethod(lambda array: cupy.asnumpy(cupy.asarray(array)))

        def csr(self, matrix: Any) -> Any:
            from cupyx.scipy.sparse import csr_matrix

            parts = tuple(map(cupy.asarray, (matrix.data, matrix.indices, matrix.indptr)))
            return csr_matrix(parts, shape=matrix.shape)

    assert [case for case in families(OnDevice())["cases"] if not case["ok"]] == []
    kernels = {launch.kernel for launch in launches} - {"graph"}
    assert kernels == {
        *("vectors", "level", "rescale", "sweep_steps", "check_indices"),
        *("multiply", "carry", "sweep", "repair", "chained", "run", "back_sequence"),
    }
    launches.clear()
    assert chained(OnDevice(), 2, **SMALL)["failed"] == []
    assert [each.kernel for each in launches if each.kernel != "graph"] == ["chained", "repair"] * 2
    few = chained(OnDevice(), 0, steps=96, batch=2, chunks=8)
    assert few["failed"] == [{"run": 0, "why": "three launches"}]


def test_the_bounds_of_positive_chains_are_tight():
    seeds = range(100)
    chains = [random_chain(np.random.default_rng(k), dtype=np.float32) for k in seeds]
    positive = [chain for chain in chains if (chain.grad > 0).all() and chain.grad.size > 5]
    assert len(positive) > 25
    for chain in positive:
        exact, bounds = reference(chain)
        for right, bound in zip(exact, bounds, strict=True):
            assert (bound <= 1e-2 * np.abs(right) + 1e-30).all()


# -- The device through CuPy ----------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return calls of a stand-in for CuPy, on whose device a clock ticks in milliseconds."""
    calls: list[str] = []

    class Event:
        def record(self) -> None:
            calls.append("event")
            self.at = len(calls)

        @property
        def done(self) -> bool:
            return "wait for all" in calls[self.at :]

    def function(name: str) -> Callable[..., None]:
        def launch(grid: Any, block: Any, arguments: Any) -> None:
            assert all(isinstance(argument, np.ndarray | np.generic) for argument in arguments)
            calls.append(name)

        return launch

    cupy: Any = types.ModuleType("cupy")
    vars(cupy).update(
        {name: getattr(np, name) for name in ("arange", "empty", "empty_like", "ones")}
    )
    cupy.copyto = lambda to, source: calls.append("copy")
    cupy.float32 = np.float32
    cupy.RawModule = lambda code: types.SimpleNamespace(get_function=function)
    properties = {
        "name": b"Made-up GPU 1",
        "l2CacheSize": 4096,
        "multiProcessorCount": 2,
        "totalGlobalMem": 1 << 20,
    }
    cupy.cuda = types.SimpleNamespace(
        Device=lambda: types.SimpleNamespace(id=0, compute_capability="90"),
        Event=Event,
        get_elapsed_time=lambda first, last: last.at - first.at,
        runtime=types.SimpleNamespace(
            getDeviceProperties=lambda device: properties,
            deviceSynchronize=lambda: calls.append("wait for all"),
            memGetInfo=lambda: (1 << 20, 1 << 20),
            driverGetVersion=lambda: 13000,
            runtimeGetVersion=lambda: 13000,
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(gpu_device, "_WARM_UP", 0)
    return calls


@pytest.mark.parametrize(
    ("clock", "cold", "expected"),
    [
        ("call", False, ["wait for all", "event", "work", "event", "wait for all"]),
        ("call", True, ["read", "wait for all", "event", "work", "event", "wait for all"]),
        ("device", False, ["wait", "event", "work", "event", "wait for all"]),
        ("device", True, ["read", "wait", "event", "work", "event", "wait for all"]),
        ("host", False, ["wait for all", "event", "work", "event", "wait for all"]),
    ],
)
def test_clocks(calls: list[str], clock: str, cold: bool, expected: list[str]):
    device = gpu_device.Cuda()
    samples = device.samples(lambda: calls.append("work"), 2, clock, cold)
    warm_up = ["work", "wait for all", "work", "wait for all"]
    assert calls == [*warm_up, *expected, *expected]
    if clock == "host":
        assert all(0 < sample < 1 for sample in samples)
    else:
        assert samples == [2e-3, 2e-3]  # from one event to the other


@pytest.mark.parametrize("inside", [False, True])
def test_a_call_that_waits_is_told_from_one_that_does_not(calls: list[str], inside: bool):
    device = gpu_device.Cuda()
    call = device.synchronize if inside else partial(calls.append, "work")
    assert device.waits_inside(call) == inside
    work = "wait for all" if inside else "work"
    assert calls == [work, "wait for all", "wait", "event", work, "wait for all"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="numba-cuda is installed on Linux only")
def test_what_runs_before_all_else(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("numba_cuda")
    import fake_cupy
    import ptx.stand_in

    ptx.stand_in.install(monkeypatch)
    fake_cupy.install(monkeypatch)
    # A launch while a stream captures would be an error if it was not put off.
    log = fake_cupy.watch(monkeypatch)
    assert gpu_preflight.preflight() == (
        "a kernel compiled, launched and captured; a product by cuBLAS"
    )
    assert [launch.kernel for launch in log] == ["check_indices"] * 3 + ["graph"]
    assert [launch.captured for launch in log] == [False, False, True, False]
    monkeypatch.setattr(fake_cupy.Graph, "launch", lambda self, stream: None)
    with pytest.raises(AssertionError, match="a graph of a kernel gives a wrong result"):
        gpu_preflight.preflight()


def test_ceilings(calls: list[str]):
    device = gpu_device.Cuda()
    copied = 2 * (1 << 20) // 4
    ceilings = device.ceilings()
    assert ceilings.bytes_per_second == pytest.approx(copied / 2e-3)
    # 64 blocks of 256 threads, 8 numbers each, 4096 steps of a multiplication and an addition.
    assert ceilings.flops_per_second == pytest.approx(64 * 256 * 8 * 4096 * 2 / 2e-3)


def test_the_description_of_a_gpu_names_the_file(
    calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine, "_nvidia_smi", lambda query: "600.1")
    about = machine.describe_gpu()
    path = machine.write(tmp_path, "gpu", "bench.gpu", ("0123456789", True), {"x": 1}, about)
    assert path.name.startswith("gpu-made-up-gpu-1-20")
    assert path.name.endswith("-01234567-dirty.json")
    written = json.loads(path.read_text())
    assert written["device"]["gpu"] == "Made-up GPU 1"
    assert written["device"]["driver"] == "600.1"
    assert "cores used" not in written["device"]
    assert {"numpy", "numba-cuda"} <= set(written["versions"])
    assert written["x"] == 1


# -- Parts ----------------------------------------------------------------------------------------


def test_a_race_that_fails_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def good(gpu: Any) -> Race:
        return made_up({OURS: 0, "them": 0})

    def bad(gpu: Any, size: int) -> Race:
        raise ValueError("no such kernel")

    def peerless(gpu: Any) -> Race:
        raise MissingPeerError("jax is not installed")

    races = [partial(bad, size=3), partial(good), partial(peerless), partial(good)]
    monkeypatch.setitem(gpu_parts.RACES, "level", races)
    saved: list[dict[str, Any]] = []
    gpu_parts.race("level", Host(), saved.append)
    assert len(saved) == 4  # after each of them
    report = saved[-1]
    assert len(report["races"]) == 2
    assert report["failed"] == {"bad size=3": "ValueError: no such kernel"}
    assert report["missing"] == {"peerless": "jax is not installed"}
    assert not report["ok"]
    assert report["summary"] == "2 of 4 races; jax is not installed; ValueError: no such kernel"
    assert report["ceilings"] == {"bytes_per_second": 1e9, "flops_per_second": 1e10}
    assert "ValueError" in capsys.readouterr().err
    races.pop(0)
    gpu_parts.race("level", Host(), saved.append)
    assert saved[-1]["ok"]


def test_the_part_of_repeated_runs():
    saved: list[dict[str, Any]] = []
    gpu_parts.CHECKS["repeat"](Host(), saved.append, True)
    assert [report["done"] for report in saved] == [1, 2]
    assert saved[-1]["ok"]
    assert saved[-1]["summary"] == "2 of 2 random chains, again and again: 0 failed"


def test_a_case_that_fails_is_counted():
    saved: list[dict[str, Any]] = []
    told = gpu_parts.counted(saved.append, "cases")
    told({"asked": 2, "done": 2, "cases": [{"ok": True}, {"ok": False}]})
    told({"asked": 2, "done": 1, "failed": []})
    assert [report["summary"] for report in saved] == [
        "2 of 2 cases: 1 failed",
        "1 of 2 cases: 0 failed",
    ]
    assert not any(report["ok"] for report in saved)


def test_the_environment_needs_no_library_for_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setenv("PATH", "/nowhere")
    report = gpu_parts.environment()
    assert report["ok"]
    assert report["packages"]["numpy"] == np.__version__
    assert report["nvidia-smi"].startswith("FileNotFoundError")
    json.dumps(report)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_tests_that_are_stopped_have_said_what_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
):
    test = tmp_path / "cuda_made_up.py"
    monkeypatch.setattr(gpu_processes, "WORKERS", {"cuda_made_up": workers})
    test.write_text(
        "import os, pytest, time\n"
        "@pytest.mark.parametrize('x', ['a b', 'c'])\ndef test_a(x): pass\n"
        "def test_b(): assert os.environ['NVIDIA_TF32_OVERRIDE'] == '1', 'because'\n"
        "def test_c(): time.sleep(100)\n"
    )
    report = run_tests(test, Job(tmp_path, 10))
    assert (report["ok"], report["passed"], report["failed"]) == (False, 2, ["test_b"])
    assert report["summary"].startswith("stopped after 10 s")


@pytest.fixture
def toolkits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder without toolkits yet, on a machine that has none, and no wheels."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "with nvcc" / "bin"))
    monkeypatch.setattr(gpu_processes.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu_processes, "_installed_toolkits", lambda: [tmp_path / "cuda"])
    return tmp_path


def add_nvvm(folder: Path) -> Path:
    (folder / "nvvm" / "libdevice").mkdir(parents=True)
    (folder / "nvvm" / "libdevice" / "libdevice.10.bc").touch()
    return folder


def both(toolkit: Path | None) -> dict[str, str | None]:
    """Return both variables for a toolkit."""
    return dict.fromkeys(("CUDA_HOME", "CUDA_PATH"), str(toolkit) if toolkit else None)


def test_numba_is_told_where_a_toolkit_with_nvvm_is(
    toolkits: Path, monkeypatch: pytest.MonkeyPatch
):
    assert toolkit_variables() == {}
    usual = add_nvvm(toolkits / "cuda")
    assert toolkit_variables() == both(usual)
    # Numba looks for one of its libraries where one of them says, and for the other by the other.
    monkeypatch.setenv("CUDA_PATH", "/there is none")
    said = "import os; print(os.environ['CUDA_HOME'], os.environ['CUDA_PATH'], sep=chr(10))"
    ended = gpu_processes._process(["-c", said], "made-up", Job(toolkits, 60))
    assert ended.output.splitlines()[-2:] == [str(usual)] * 2
    compiler = toolkits / "with nvcc" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.touch(mode=0o755)
    assert toolkit_variables() == both(usual)  # the compiler's has no NVVM
    newer = add_nvvm(toolkits / "with nvcc")
    assert toolkit_variables() == both(newer)
    monkeypatch.setenv("CUDA_HOME", str(toolkits / "named"))
    assert toolkit_variables() == both(newer)
    named = add_nvvm(toolkits / "named")
    assert toolkit_variables() == both(named)


def test_nvvm_of_a_wheel_needs_no_toolkit(toolkits: Path, monkeypatch: pytest.MonkeyPatch):
    usual = add_nvvm(toolkits / "cuda")
    wheels = types.SimpleNamespace(submodule_search_locations=[str(toolkits / "nvidia")])
    monkeypatch.setattr(gpu_processes.importlib.util, "find_spec", lambda name: wheels)
    assert toolkit_variables() == both(usual)  # NVRTC alone does not do
    add_nvvm(toolkits / "nvidia" / "cu13")
    assert toolkit_variables() == both(None)
    # One that is named stays only if it has what Numba looks for there.
    monkeypatch.setenv("CUDA_PATH", str(toolkits))
    monkeypatch.setenv("CUDA_HOME", str(usual))
    assert toolkit_variables() == {"CUDA_HOME": str(usual), "CUDA_PATH": None}


@pytest.mark.slow
def test_tests_are_run_and_counted(tmp_path: Path):
    test, job = tmp_path / "cuda_made_up.py", Job(tmp_path, 60)
    good = "import os\ndef test_a(): assert 'NUMBA_ENABLE_CUDASIM' not in os.environ\n"
    test.write_text(good)
    report = run_tests(test, job)
    assert (report["ok"], report["summary"]) == (True, "1 passed, 0 failed, 0 skipped")
    test.write_text(good + "def test_b(): assert 0, 'because'\n")
    report = run_tests(test, job)
    assert (report["ok"], report["summary"]) == (False, "1 passed, 1 failed, 0 skipped")
    assert "because" in report["failed"][0]
    # A file of which nothing runs shows nothing.
    test.write_text("import pytest\n@pytest.mark.skip('no device')\ndef test_a(): pass\n")
    report = run_tests(test, job)
    assert (report["ok"], report["summary"]) == (False, "0 passed, 0 failed, 1 skipped (no device)")
    test.write_text("import not_there\n")
    report = run_tests(test, job)
    assert (report["ok"], report["summary"]) == (False, "0 passed, 1 failed, 0 skipped")


SANITIZER = """#!/bin/sh
echo "$@"
for file; do :; done
{run}
echo "========= {summary}"
exit {code}
"""
SCANS = {"ok": True, "summary": "34 of 34 scans and training steps", "cases": ["a", "b"]}
CLEAN = "ERROR SUMMARY: 0 errors"


@pytest.fixture
def sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run a stand-in for compute-sanitizer that says what it is told to say."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def run(summary: str = CLEAN, code: int = 0, cases: Any = SCANS, more: str = "") -> Any:
        program, given = tmp_path / "compute-sanitizer", tmp_path / "given"
        given.write_text(json.dumps(cases))
        copy = f'cp "{given}" "$file"\n' if cases else ""
        program.write_text(SANITIZER.format(summary=summary, code=code, run=copy + more))
        program.chmod(0o755)
        return run_sanitizer("memcheck", Job(tmp_path, 5))

    return run


def test_a_clean_sanitizer_passes(sanitizer: Any, tmp_path: Path):
    report = sanitizer()
    assert report["ok"]
    assert report["summary"] == f"{CLEAN}; {SCANS['summary']}"
    assert report["program"] == str(tmp_path / "compute-sanitizer")
    log = (tmp_path / "memcheck.log").read_text()
    assert "--tool memcheck --error-exitcode 77" in log
    assert "-m bench.gpu part sanitize" in log


@pytest.mark.parametrize(
    "said",
    [
        {"summary": "ERROR SUMMARY: 10 errors", "code": 77},
        {"summary": "ERROR SUMMARY: 10 errors"},
        {"summary": "RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)"},
        {"summary": "Device not supported"},
        {"code": 1},
        {"cases": None},
        {"cases": SCANS | {"ok": False}},
    ],
)
def test_an_unclean_sanitizer_fails(sanitizer: Any, said: dict[str, Any]):
    assert not sanitizer(**said)["ok"]


def test_a_sanitizer_that_is_stopped_has_said_what_it_found(sanitizer: Any):
    report = sanitizer(more="echo '========= Invalid read'\nsleep 60")
    assert not report["ok"]
    assert report["cases"] == ["a", "b"]
    assert report["found"] == ["========= Invalid read"]
    assert "stopped after 5 s" in report["summary"]


def test_a_missing_sanitizer_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_processes, "find_sanitizer", lambda: None)
    report = run_sanitizer("racecheck", Job(tmp_path, 5))
    assert not report["ok"]
    assert report["summary"].startswith("MISSING: no compute-sanitizer on PATH, in CUDA_HOME")


def test_a_sanitizer_is_found_in_a_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "compute-sanitizer"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert gpu_processes.find_sanitizer() == str(program)


def test_a_part_that_takes_too_long_is_stopped(tmp_path: Path):
    printed: list[str] = []
    code = "import time; print('begun', flush=True); time.sleep(60)"
    ended = gpu_processes._process(["-c", code], "made-up", Job(tmp_path, 1.5, log=printed.append))
    assert ended.code is None
    assert ended.how == "stopped after 2 s: begun"
    assert "begun" in "".join(printed)


@pytest.mark.filterwarnings("ignore:subprocess .* is still running")
def test_a_part_that_cannot_be_killed_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As one that is stuck in the driver."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(gpu_processes.os, "killpg", lambda process, signal: None)
    monkeypatch.setattr(gpu_processes, "GRACE", 0.2)
    begin = time.monotonic()
    ended = gpu_processes._process(
        ["-c", "import time; time.sleep(30)"], "made-up", Job(tmp_path, 0.5, tell=told.update)
    )
    assert time.monotonic() - begin < 10
    assert ended.code is None
    assert told["stuck"]
    monkeypatch.undo()
    os.killpg(told["process"], 9)
    os.waitpid(told["process"], 0)


def test_what_a_part_has_found_is_told_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file, told = tmp_path / "rnn.json", list[dict[str, Any]]()

    def stopped(arguments: Any, name: str, job: Job, look: Any) -> Any:
        assert arguments == ["-m", "bench.gpu", "part", "rnn", str(file)]
        look()
        for done in (1, 2):
            file.write_text(json.dumps({"ok": True, "summary": f"{done} of 9 races"}))
            look()
            look()
        return gpu_processes._Ended(None, "", "stopped after 7 s: rnn steps=10")

    monkeypatch.setattr(gpu_processes, "_process", stopped)
    report = run_part("rnn", Job(tmp_path, 7, tell=told.append))
    assert [each["summary"] for each in told] == ["1 of 9 races", "2 of 9 races"]
    assert report == {"ok": False, "summary": "2 of 9 races; stopped after 7 s: rnn steps=10"}


# -- The run --------------------------------------------------------------------------------------


def rnn_races() -> list[dict[str, Any]]:
    """Made-up results of the sweeps: PyTorch takes 10 µs a step, we 50 µs and 0.02 µs a step."""
    races = []
    sizes = [(steps, 16) for steps in gpu_races.STEPS] + [(1000, b) for b in gpu_races.BATCHES]
    for steps, batch in sizes:
        theirs = {CUDNN: 1e-5 * steps, CUDNN_GRAPH: 5e-6 * steps}
        ours = {OURS: 5e-5 + 2e-8 * steps, VALUES: 1e-4 + 3e-8 * steps}
        medians = dict.fromkeys(("call, warm", "device, warm", "device, cold"), theirs | ours)
        floor = 6.4e-9 * steps * batch / 16
        multiple = {mode: {OURS: ours[OURS] / floor} for mode in medians}
        races.append(
            {
                "name": f"rnn T={steps} B={batch}",
                "work": f"backward of a tanh RNN, T={steps}, B={batch}",
                "about": {"T": steps, "B": batch},
                "median_seconds": medians,
                "samples_seconds": {
                    mode: {name: [[taken]] for name, taken in of.items()}
                    for mode, of in medians.items()
                },
                "floors": {"the work": {"seconds": floor, "multiple": multiple}},
                "ratios": [
                    {
                        "theirs": CUDNN,
                        "ours": name,
                        "clock": "call",
                        "required": None,
                        "measured": {"warm": theirs[CUDNN] / ours[name]},
                        "skipped": None,
                    }
                    for name in ours
                ],
            }
        )
    return races


def test_what_is_wanted_goes_by_the_best_length():
    best, floor = wanted(rnn_races())
    # With the making of the Jacobians, which is part of cuDNN's work.
    assert best["measured"] == pytest.approx(0.3 / 1e-3)
    assert (best["at least"], best["met"]) == (108, True)
    assert "with values, at the best T that was run, 30,000" in best["what"]
    assert floor["measured"] == pytest.approx(65e-5 / 1.92e-4)
    assert (floor["at most"], floor["met"]) == (4, True)


def test_a_ratio_that_is_too_small_is_missed():
    result = run_race(made_up({OURS: 1e-3, "them": 0}, ratios=(Ratio("them", required=2),)))
    (line,) = wanted([result])
    assert (line["at least"], line["met"]) == (2, False)
    assert any(row.strip().startswith("MISSED") for row in table([result]))


def test_the_table_has_a_row_for_every_size():
    rows = [line.split() for line in table(rnn_races())]
    sizes = [row[:2] for row in rows if len(row) == 17 and row[0].isdigit()]
    assert sizes[:3] == [["10", "16"], ["30", "16"], ["100", "16"]]
    assert len(sizes) == len(gpu_races.STEPS) + len(gpu_races.BATCHES) + 1
    (row,) = [row for row in rows if row[:2] == ["30000", "16"]]
    assert row[2] == "300.000"
    assert row[8] == f"{0.3 / 65e-5:.1f}×"


def test_plots_are_drawn_again_from_a_file(tmp_path: Path):
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"races": rnn_races()}))
    assert plots.main([str(file)]) == 0
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


Answer = dict[str, Any] | Exception


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """Return what parts say, in the place of which nothing runs; "fine" by default."""
    answers: dict[str, Answer] = {}

    def job_of(part: gpu.Part) -> Any:
        def job(job: Job) -> dict[str, Any]:
            answer = answers.get(part.name, {"ok": True, "summary": "fine"})
            if isinstance(answer, Exception):
                raise answer
            job.log(f"{part.name} runs\n")
            return dict(answer)

        return job

    monkeypatch.setattr(gpu, "_job_of", job_of)
    return answers


def written_to(folder: Path) -> Any:
    """Return what the only file of results in a folder says."""
    (file,) = folder.glob("gpu-*.json")
    return json.loads(file.read_text())


RNN = {"ok": True, "summary": "all", "gpu": GPU}


def test_a_run_writes_a_file_a_plot_and_a_log(
    answers: dict[str, Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("COMMIT", "89abcdef0123")
    answers["rnn"] = RNN | {"races": rnn_races()}
    answers["jax"] = {"ok": True, "summary": "no", "missing": {JAX: "jax computes on 'cpu' here"}}
    assert gpu.main(["run", str(tmp_path / "new")]) == 0
    files = {path.suffix: path for path in (tmp_path / "new").iterdir()}
    assert set(files) == {".json", ".png", ".log"}
    assert files[".json"].name.endswith("-89abcdef.json")
    written = json.loads(files[".json"].read_text())
    assert written["device"]["gpu"] == "Made-up GPU 1"
    assert (written["commit"], written["dirty"]) == ("89abcdef0123", False)
    assert len(written["races"]) == 15
    assert {part["state"] for part in written["parts"].values()} == {"done"}
    assert [line["met"] for line in written["wanted"]] == [True] * 2
    log = files[".log"].read_text()
    assert "===== preflight\npreflight runs\n" in log
    said = capsys.readouterr().out
    assert "OPEN    not measured  jax.lax.associative_scan: jax computes on 'cpu' here" in said
    assert said.rstrip().endswith("nothing failed")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("memcheck", {"ok": False, "summary": "MISSING: no compute-sanitizer"}),
        ("repeat", {"ok": False, "summary": "200 random chains: 1 failed"}),
        ("preflight", {"ok": False, "summary": "stopped after 90 s"}),
        ("level", RuntimeError("it fell over")),
    ],
)
def test_a_part_that_fails_is_said_at_the_end_and_ends_nothing(
    name: str,
    answer: Answer,
    answers: dict[str, Answer],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    answers[name] = answer
    assert gpu.run(tmp_path, 540, ["first", "second"]) == 1
    said = capsys.readouterr().out.rstrip()
    assert said.endswith(f"FAILED: {name}")
    assert "launches                         ok" in said
    parts = written_to(tmp_path)["parts"]
    assert [what for what, part in parts.items() if not part["ok"]] == [name]
    assert {part["state"] for part in parts.values()} == {"done"}


def test_a_hazard_is_noted_and_fails_nothing(
    answers: dict[str, Answer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    answers["racecheck"] = {"ok": False, "summary": "RACECHECK SUMMARY: 1 hazard"}
    assert gpu.run(tmp_path, 540, ["racecheck"]) == 0
    assert "racecheck                        noted" in capsys.readouterr().out


def test_what_is_known_is_in_the_file_while_a_part_runs(
    answers: dict[str, Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[dict[str, Any]] = []

    def job_of(part: gpu.Part) -> Any:
        def job(job: Job) -> dict[str, Any]:
            job.tell({"summary": "1 of 2 races", "races": rnn_races()[:1], "gpu": GPU})
            seen.append(written_to(tmp_path))
            return {"ok": True, "summary": "2 of 2 races"}

        return job

    monkeypatch.setattr(gpu, "_job_of", job_of)
    assert gpu.run(tmp_path, 150, ["rnn", "pair"]) == 0
    parts = seen[0]["parts"]
    assert [part["state"] for part in parts.values()] == ["running", "left"]
    assert parts["rnn"]["summary"] == "1 of 2 races"
    assert len(seen[0]["races"]) == 1
    assert seen[0]["device"]["gpu"] == "Made-up GPU 1"
    assert seen[0]["asked"] == {"seconds": 150, "parts": ["rnn", "pair"]}


def test_no_part_starts_when_the_time_is_up(
    answers: dict[str, Answer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert gpu.run(tmp_path, gpu.END, ["first"]) == 1
    parts = written_to(tmp_path)["parts"]
    assert {part["state"] for part in parts.values()} == {"left"}
    assert capsys.readouterr().out.count("no time left") == 2 * len(gpu.FIRST)


def test_a_limit_is_at_most_the_time_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given: dict[str, float] = {}

    def job_of(part: gpu.Part) -> Any:
        def job(job: Job) -> dict[str, Any]:
            given[part.name] = job.seconds
            return {"ok": True, "summary": "fine"}

        return job

    monkeypatch.setattr(gpu, "_job_of", job_of)
    gpu.run(tmp_path, 40 + gpu.END, ["first"])
    assert given["environment"] == 10
    assert 38 < given["preflight"] <= 40


def test_every_race_and_check_is_a_part():
    names = {part.name for part in gpu.PARTS}
    assert names >= {*gpu_races.RACES, *gpu_parts.CHECKS} - {"sanitize"}
    assert names >= {"environment", "tests", "memcheck", "racecheck"}
    assert gpu.PARTS[-1].name == "jax"
    assert next(part for part in gpu.PARTS if part.name == "preflight").seconds == 90


def test_the_tests_are_those_of_the_cuda_part():
    (tests,) = [part for part in gpu.PARTS if part.name == "tests"]
    names = [part.name for part in gpu._files_of(tests, False)]
    assert {"tests/gpu/cuda_scan.py", "tests/jacobians/test_device.py"} <= set(names)
    # It takes longest, so it starts first, by several processes.
    assert names[0] == "tests/gpu/cuda_chunks.py"
    assert {name.split("/")[-1] for name in names} >= {
        f"{name}.py" for name in gpu_processes.WORKERS
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [("abc", ("abc", False)), ("abc-dirty", ("abc", True))],
)
def test_a_copy_without_git_is_told_its_commit(
    given: str, expected: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COMMIT", given)
    assert gpu._commit() == expected


def test_calls_that_have_all_parts_together_are_known_to_the_report():
    assert tuple(gpu.CALLS) == files.GPU_CALLS


def test_the_script_is_sound(tmp_path: Path):
    script = Path(gpu.__file__).with_suffix(".sh")
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    for wrong in ([], ["--rehearse"]):
        usage = subprocess.run([script, *wrong], capture_output=True, text=True, check=False)
        assert usage.returncode == 2
        assert "OUTDIR" in usage.stderr
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$PYTHONPATH" "$@"\n')
    fake.chmod(0o755)
    done = subprocess.run(
        [script, "out", "--seconds", "150", "--only", "first"],
        cwd=tmp_path,
        env={"PYTHON": str(fake), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    root = script.parent.parent
    asked = ["--seconds", "150", "--only", "first"]
    out = str(tmp_path / "out")
    assert done.stdout.split() == [str(root), "-m", "bench.gpu", "run", out, *asked]


# -- A rehearsal ----------------------------------------------------------------------------------


def rehearsing(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    """Start a rehearsal of a run."""
    script = Path(gpu.__file__).with_suffix(".sh")
    return subprocess.Popen(
        [script, folder, "--rehearse", *more],
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.DEVNULL,
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="numba-cuda is installed on Linux only")
def test_a_rehearsal(tmp_path: Path):
    pytest.importorskip("numba_cuda")
    rehearsing(tmp_path).wait(300)
    results = written_to(tmp_path)
    assert results["rehearsal"]
    parts = results["parts"]
    bad = {what: part["summary"] for what, part in parts.items() if not part["ok"]}
    assert bad == {}
    assert {part["state"] for part in parts.values()} == {"done"}
    assert list(parts)[:2] == ["environment", "preflight"]
    assert {race["name"].split()[0] for race in results["races"]} >= {"rnn", "spgemm", "training"}
    assert parts["families"]["kernels"]["errors"] == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="numba-cuda is installed on Linux only")
@pytest.mark.parametrize("signal", [15, 9])
def test_a_rehearsal_that_is_killed_halfway(tmp_path: Path, signal: int):
    pytest.importorskip("numba_cuda")
    process = rehearsing(tmp_path, "--only", "first")
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
        done = [*tmp_path.glob("gpu-*.json")]
        parts = json.loads(done[0].read_text())["parts"] if done else {}
        if "process" in parts.get("families", {}):
            break
    process.send_signal(signal)
    assert process.wait(60) != 0
    results = written_to(tmp_path)
    states = {what: part["state"] for what, part in results["parts"].items()}
    assert states["environment"] == states["preflight"] == "done"
    assert states["rnn"] == states["pair"] == "left"
    assert "environment" in (tmp_path / "gpu.log").read_text()
    if signal == 9:
        # Nobody was told: what runs is named in the file.
        for part in results["parts"].values():
            if part["state"] == "running":
                with suppress(ProcessLookupError, KeyError):
                    os.killpg(part["process"], 9)
