"""The GPU benchmarks without a GPU: everything around the device, on stand-ins for it."""

from __future__ import annotations

import json
import operator
import subprocess
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsescan
from sparsescan.execution.workspace import Workspace

from . import gpu, gpu_cusparse, gpu_device, gpu_preflight, gpu_races, machine, plots
from .contests import OURS
from .fake_cusparse import FakeCusparse
from .gpu_chains import SCHEDULES, STEPS, WHOLES, random_chain, reference, repeat, sanitize
from .gpu_cusparse import NumericSpGEMM
from .gpu_measure import Race, Ratio, measure
from .gpu_races import CUDNN, CUDNN_GRAPH, JAX, LOOP, PARAMETERS, REUSE, SPGEMM, VALUES
from .gpu_table import table, wanted
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
    assert set(result["median_seconds"]["call, warm"]) == {OURS, VALUES, CUDNN}
    assert set(broken) == {CUDNN_GRAPH}
    # 29 Jacobians of 4 samples are read, 30 gradients are written.
    floor = result["floors"]["the work"]
    assert floor["bytes"] == 4 * (29 * 4 * 400 + 30 * 4 * 20)
    assert floor["flops"] == 2 * 29 * 4 * 400
    # Jacobian times matrix, and then times vector.
    assert result["floors"]["two passes"]["flops"] == 2 * 29 * 4 * 400 * 21
    assert [bool(ratio["measured"]) for ratio in result["ratios"]] == [True, True, False, False] * 2
    assert [ratio["clock"] for ratio in result["ratios"]] == ["call"] * 4 + ["device"] * 4
    assert "reserve space" in result["notes"][CUDNN]


def test_rnn_parameters():
    result = run_race(gpu_races.rnn_parameters(Host(), steps=30, batch=4))
    assert set(result["median_seconds"]["call, warm"]) == {PARAMETERS, CUDNN}


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_training_steps(kind: str):
    result = run_race(gpu_races.training_step(Host(), kind, 5, 20, 3))
    assert set(result["median_seconds"]["call, warm"]) == {OURS, CUDNN}
    assert [ratio["required"] for ratio in result["ratios"]] == [None, None]


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


def test_random_chains_are_right_and_repeat():
    report = repeat(Host(), chains=12, repetitions=2)
    assert report["failed"] == []
    assert report["entropy"] != repeat(Host(), chains=0)["entropy"]


def test_other_bits_are_seen():
    class Shaky(Host):
        def get(self, array: Any) -> Any:
            return np.nextafter(array, np.inf) if np.random.default_rng().random() < 0.5 else array

    report = repeat(Shaky(), chains=1, repetitions=20, entropy=3)
    assert [entry["why"] for entry in report["failed"]] == ["other bits"]
    assert "steps as" in report["failed"][0]["what"]


def test_wrong_values_are_seen():
    class Wrong(Host):
        def get(self, array: Any) -> Any:
            return array * 1.01 + 0.01

    report = repeat(Wrong(), chains=1, repetitions=2, entropy=3)
    assert [(entry["chain"], entry["why"]) for entry in report["failed"]] == [(0, "wrong")]


def test_every_family_is_sanitized():
    assert sanitize(Host()) == len(WHOLES) * len(SCHEDULES) * 2 + len(STEPS)


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def good(gpu: Any) -> Race:
        return made_up({OURS: 0, "them": 0})

    def bad(gpu: Any, size: int) -> Race:
        raise ValueError("no such kernel")

    def peerless(gpu: Any) -> Race:
        raise MissingPeerError("jax is not installed")

    races = [partial(bad, size=3), partial(good), partial(peerless), partial(good)]
    monkeypatch.setitem(gpu.RACES, "sparse", races)
    file = tmp_path / "sparse.json"
    gpu.part("sparse", file, Host(), GPU)
    report = json.loads(file.read_text())
    assert len(report["races"]) == 2
    assert report["failed"] == {"bad size=3": "ValueError: no such kernel"}
    assert report["missing"] == {"peerless": "jax is not installed"}
    assert not report["ok"]
    assert report["summary"] == "2 of 4 races; jax is not installed; ValueError: no such kernel"
    assert report["ceilings"] == {"bytes_per_second": 1e9, "flops_per_second": 1e10}
    assert "ValueError" in capsys.readouterr().err
    races.pop(0)
    gpu.part("sparse", file, Host(), GPU)
    assert json.loads(file.read_text())["ok"]


def test_the_part_of_repeated_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "repeat", partial(repeat, chains=2, repetitions=2))
    gpu.part("repeat", tmp_path / "repeat.json", Host(), GPU)
    report = json.loads((tmp_path / "repeat.json").read_text())
    assert report["ok"]
    assert report["summary"] == "2 of 2 random chains, 2 times each: 0 failed"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_tests_that_are_stopped_have_said_what_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
):
    test = tmp_path / "cuda_made_up.py"
    monkeypatch.setattr(gpu, "WORKERS", {"cuda_made_up": workers})
    test.write_text(
        "import os, pytest, time\n"
        "@pytest.mark.parametrize('x', ['a b', 'c'])\ndef test_a(x): pass\n"
        "def test_b(): assert os.environ['NVIDIA_TF32_OVERRIDE'] == '1', 'because'\n"
        "def test_c(): time.sleep(100)\n"
    )
    report = gpu.run_tests(test, tmp_path, 10)
    assert (report["ok"], report["passed"], report["failed"]) == (False, 2, ["test_b"])
    assert report["summary"].startswith("stopped after 10 s")


@pytest.fixture
def toolkits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder without toolkits yet, on a machine that has none, and no wheels."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "with nvcc" / "bin"))
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu, "_installed_toolkits", lambda: [tmp_path / "cuda"])
    return tmp_path


def add_nvvm(folder: Path) -> Path:
    (folder / "nvvm" / "libdevice").mkdir(parents=True)
    (folder / "nvvm" / "libdevice" / "libdevice.10.bc").touch()
    return folder


def test_numba_is_told_where_a_toolkit_with_nvvm_is(
    toolkits: Path, monkeypatch: pytest.MonkeyPatch
):
    assert gpu.find_toolkit() is None
    usual = add_nvvm(toolkits / "cuda")
    assert gpu.find_toolkit() == usual
    _, output = gpu._process(
        ["-c", "import os; print(os.environ['CUDA_HOME'])"], toolkits / "log", 60
    )
    assert output.split()[-1] == str(usual)
    compiler = toolkits / "with nvcc" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.touch(mode=0o755)
    assert gpu.find_toolkit() == usual  # the compiler's has no NVVM
    newer = add_nvvm(toolkits / "with nvcc")
    assert gpu.find_toolkit() == newer
    monkeypatch.setenv("CUDA_HOME", str(toolkits / "named"))
    assert gpu.find_toolkit() == newer
    named = add_nvvm(toolkits / "named")
    assert gpu.find_toolkit() == named


def test_nvvm_of_a_wheel_needs_no_toolkit(toolkits: Path, monkeypatch: pytest.MonkeyPatch):
    add_nvvm(toolkits / "cuda")
    wheels = types.SimpleNamespace(submodule_search_locations=[str(toolkits / "nvidia")])
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: wheels)
    assert gpu.find_toolkit() == toolkits / "cuda"  # NVRTC alone does not do
    add_nvvm(toolkits / "nvidia" / "cu13")
    assert gpu.find_toolkit() is None


@pytest.mark.slow
def test_tests_are_run_and_counted(tmp_path: Path):
    test = tmp_path / "cuda_made_up.py"
    good = "import os\ndef test_a(): assert 'NUMBA_ENABLE_CUDASIM' not in os.environ\n"
    test.write_text(good)
    report = gpu.run_tests(test, tmp_path, 60)
    assert (report["ok"], report["summary"]) == (True, "1 passed, 0 failed, 0 skipped")
    test.write_text(good + "def test_b(): assert 0, 'because'\n")
    report = gpu.run_tests(test, tmp_path, 60)
    assert (report["ok"], report["summary"]) == (False, "1 passed, 1 failed, 0 skipped")
    assert "because" in report["failed"][0]
    # A file of which nothing runs shows nothing.
    test.write_text("import pytest\n@pytest.mark.skip('no device')\ndef test_a(): pass\n")
    report = gpu.run_tests(test, tmp_path, 60)
    assert (report["ok"], report["summary"]) == (False, "0 passed, 0 failed, 1 skipped (no device)")
    test.write_text("import not_there\n")
    report = gpu.run_tests(test, tmp_path, 60)
    assert (report["ok"], report["summary"]) == (False, "0 passed, 1 failed, 0 skipped")


SANITIZER = """#!/bin/sh
echo "$@"
shift 6
{run}
echo "========= {summary}"
exit {code}
"""
SCANS = "34 scans and training steps, all right"
CLEAN = "ERROR SUMMARY: 0 errors"


@pytest.fixture
def sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run a stand-in for compute-sanitizer that says what it is told to say."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def run(summary: str = CLEAN, code: int = 0, said: str = SCANS) -> Any:
        program = tmp_path / "compute-sanitizer"
        program.write_text(SANITIZER.format(summary=summary, code=code, run=f"echo '{said}'"))
        program.chmod(0o755)
        return gpu.run_sanitizer("memcheck", tmp_path, 20)

    return run


def test_a_clean_sanitizer_passes(sanitizer: Any, tmp_path: Path):
    report = sanitizer()
    assert report["ok"]
    assert report["summary"] == f"{CLEAN}; {SCANS}"
    assert report["program"] == str(tmp_path / "compute-sanitizer")
    log = (tmp_path / "memcheck.log").read_text()
    assert "--tool memcheck --error-exitcode 77" in log
    assert "-m bench.gpu sanitize" in log


@pytest.mark.parametrize(
    "said",
    [
        {"summary": "ERROR SUMMARY: 10 errors", "code": 77},
        {"summary": "ERROR SUMMARY: 10 errors"},
        {"summary": "RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)"},
        {"summary": "Device not supported"},
        {"code": 1},
        {"said": "Traceback"},
    ],
)
def test_an_unclean_sanitizer_fails(sanitizer: Any, said: dict[str, Any]):
    assert not sanitizer(**said)["ok"]


def test_a_missing_sanitizer_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "find_sanitizer", lambda: None)
    report = gpu.run_sanitizer("racecheck", tmp_path, 20)
    assert not report["ok"]
    assert report["summary"].startswith("MISSING: no compute-sanitizer on PATH, in CUDA_HOME")


def test_a_sanitizer_is_found_in_a_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "compute-sanitizer"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert gpu.find_sanitizer() == str(program)


def test_a_part_that_takes_too_long_is_stopped(tmp_path: Path):
    code, output = gpu._process(
        ["-c", "import time; print('begun', flush=True); time.sleep(60)"], tmp_path / "log", 1
    )
    assert code is None
    assert "begun" in output


def test_what_a_stopped_part_has_found_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stopped(arguments: Any, log: Path, seconds: float) -> Any:
        Path(arguments[-1]).write_text('{"ok": true, "summary": "1 of 9 races", "races": [1]}')
        return None, "$ python\nrnn steps=10\n"

    monkeypatch.setattr(gpu, "_process", stopped)
    report = gpu.run_part("rnn", tmp_path, 7)
    summary = "1 of 9 races; stopped after 7 s: rnn steps=10"
    assert report == {"ok": False, "summary": summary, "races": [1]}


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
    assert "with values, at the best T, 30000" in best["what"]
    assert floor["measured"] == pytest.approx(65e-5 / 1.92e-4)
    assert (floor["at most"], floor["met"]) == (4, True)


def test_a_ratio_that_is_too_small_is_missed():
    result = run_race(made_up({OURS: 1e-3, "them": 0}, ratios=(Ratio("them", required=2),)))
    (line,) = wanted([result])
    assert (line["at least"], line["met"]) == (2, False)
    assert any(row.strip().startswith("MISSED") for row in table([result]))


def test_the_table_has_a_row_for_every_size():
    rows = [line.split() for line in table(rnn_races())]
    sizes = [row[:2] for row in rows if len(row) == 14 and row[0].isdigit()]
    assert sizes[:3] == [["10", "16"], ["30", "16"], ["100", "16"]]
    assert len(sizes) == len(gpu_races.STEPS) + len(gpu_races.BATCHES) + 1
    (row,) = [row for row in rows if row[:2] == ["30000", "16"]]
    assert row[2] == "300.000"
    assert row[6] == f"{0.3 / 65e-5:.1f}×"


def test_plots_are_drawn_again_from_a_file(tmp_path: Path):
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"races": rnn_races()}))
    assert plots.main([str(file)]) == 0
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def stand_ins(monkeypatch: pytest.MonkeyPatch, *, draw: bool = False, **parts: Any) -> None:
    """Let checks and parts say what they are told to say."""
    if not draw:
        monkeypatch.setattr(plots, "draw", lambda races, path: None)

    def job(what: str, seconds: float) -> Any:
        report = parts.get(what, {"ok": True, "summary": "fine"})
        if isinstance(report, Exception):
            raise report
        return dict(report)

    monkeypatch.setattr(
        gpu,
        "_checks",
        lambda scratch: {what: partial(job, what) for what in ("memcheck", "repeat")},
    )
    monkeypatch.setattr(gpu, "run_part", lambda what, scratch, seconds: job(what, seconds))


RNN = {"ok": True, "summary": "all", "gpu": GPU}


def test_a_run_writes_a_file_a_plot_and_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COMMIT", "89abcdef0123")
    jax = {"ok": True, "summary": "none", "missing": {JAX: "jax computes on 'cpu' here"}}
    stand_ins(monkeypatch, draw=True, rnn=RNN | {"races": rnn_races()}, jax=jax)
    assert gpu.main(["run", str(tmp_path / "new")]) == 0
    files = {path.suffix: path for path in (tmp_path / "new").iterdir()}
    assert set(files) == {".json", ".png", ".log"}
    assert files[".json"].name.endswith("-89abcdef.json")
    written = json.loads(files[".json"].read_text())
    assert written["device"]["gpu"] == "Made-up GPU 1"
    assert (written["commit"], written["dirty"]) == ("89abcdef0123", False)
    assert len(written["races"]) == 15
    assert set(written["parts"]) == {"preflight", "memcheck", "repeat", *gpu.LIMITS}
    assert [line["met"] for line in written["wanted"]] == [True] * 2
    said = capsys.readouterr().out
    assert "OPEN    not measured  jax.lax.associative_scan: jax computes on 'cpu' here" in said
    assert said.rstrip().endswith("nothing failed")


@pytest.mark.parametrize(
    "bad",
    [
        {"memcheck": {"ok": False, "summary": "MISSING: no compute-sanitizer"}},
        {"repeat": {"ok": False, "summary": "200 random chains: 1 failed"}},
        {"sparse": RuntimeError("it fell over")},
    ],
)
def test_a_part_that_fails_is_said_at_the_end(
    bad: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    stand_ins(monkeypatch, rnn=RNN | {"races": rnn_races()}, **bad)
    assert gpu.run(tmp_path) == 1
    (name,) = bad
    said = capsys.readouterr().out.rstrip()
    assert said.endswith(f"FAILED: {name}")
    assert "launches                         ok" in said


def test_a_run_without_a_device_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    nothing = {"ok": False, "summary": "nothing done; exit status 1"}
    stand_ins(monkeypatch, preflight=nothing)
    assert gpu.run(tmp_path) == 1
    (file,) = tmp_path.glob("gpu-unknown-*.json")
    written = json.loads(file.read_text())
    assert (written["races"], list(written["parts"])) == ([], ["preflight"])
    assert "FAILED" in capsys.readouterr().out


def test_no_part_starts_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    stand_ins(monkeypatch)
    monkeypatch.setattr(gpu, "CHECKS", 0)
    monkeypatch.setattr(gpu, "LIMITS", dict.fromkeys(gpu.LIMITS, 0))
    assert gpu.run(tmp_path) == 1
    assert capsys.readouterr().out.count("no time left") == 2 * (2 + len(gpu.LIMITS))


def test_all_limits_fit_into_the_total():
    assert gpu.PREFLIGHT + gpu.CHECKS + sum(gpu.LIMITS.values()) <= gpu.TOTAL <= 540
    assert list(gpu.LIMITS) == list(gpu.RACES)


def test_the_checks_are_those_of_the_cuda_part(tmp_path: Path):
    checks = gpu._checks(tmp_path)
    assert {"tests/gpu/cuda_scan.py", "tests/jacobians/test_device.py"} <= set(checks)
    assert {"memcheck", "racecheck", "repeat"} <= set(checks)
    # It takes longest, so it starts first, by several processes.
    assert next(iter(checks)) == "tests/gpu/cuda_chunks.py"
    assert {test.split("/")[-1] for test in checks} >= {f"{name}.py" for name in gpu.WORKERS}


@pytest.mark.parametrize(
    ("given", "expected"),
    [("abc", ("abc", False)), ("abc-dirty", ("abc", True))],
)
def test_a_copy_without_git_is_told_its_commit(
    given: str, expected: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COMMIT", given)
    assert gpu._commit() == expected


def test_the_script_is_sound(tmp_path: Path):
    script = Path(gpu.__file__).with_suffix(".sh")
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    usage = subprocess.run([script], capture_output=True, text=True, check=False)
    assert usage.returncode == 2
    assert "OUTDIR" in usage.stderr
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$PYTHONPATH" "$@"\n')
    fake.chmod(0o755)
    done = subprocess.run(
        [script, "out"],
        cwd=tmp_path,
        env={"PYTHON": str(fake), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    root = script.parent.parent
    assert done.stdout.split() == [str(root), "-m", "bench.gpu", "run", str(tmp_path / "out")]
