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
from fresh_python import run_python

from sparsescan import recurrent
from sparsescan.execution.cuda.chunks import H100, ChunkForm, chunk_count, in_one_launch
from sparsescan.recurrent.loops.cuda.layout import layout_of, samples_of
from sparsescan.recurrent.render.cuda import cuda_program

from . import gpu, gpu_chains, gpu_device, gpu_parts, gpu_processes, gpu_races, gpu_table
from .contests import OURS
from .experiment import as_text
from .gpu_measure import Race, Ratio, measure
from .gpu_processes import Job, run_sanitizer, run_tests, toolkit_variables
from .machine import Cpu
from .peers import MissingPeerError
from .timing import Ceilings

CEILINGS = Ceilings(1e9, 1e10)
GPU = {"device": {"gpu": "Made-up GPU 1"}, "versions": {"cupy-cuda13x": "0"}}
KINDS = "RNN", "GRU", "LSTM"
SMALL: dict[str, Any] = {"steps": 64, "batch": 2, "chunks": 4}


class Host(Cpu):
    """The CPU, with all that :class:`Cuda` offers."""

    cache = 10_000

    csr = staticmethod(lambda given: given)
    spgemm = spmv = staticmethod(operator.matmul)

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
        "contenders": {
            name: lambda name=name: {"the way": partial(call, name)} for name in seconds
        },
    }
    return Race(**given | fields)


# -- Races ----------------------------------------------------------------------------------------


def test_ratios_and_floors_are_those_of_medians():
    race = made_up({OURS: 1e-3, "them": 4e-3}, ratios=(Ratio("them", required=9),))
    result = run_race(race)
    (ratio,), medians = result["ratios"], result["median_seconds"]["call, warm"]
    assert ratio["measured"]["warm"] == medians["them"] / medians[OURS] > 2
    assert set(ratio["measured"]) == {"warm", "cold"}
    assert result["floors"]["the work"]["seconds"] == pytest.approx(4e-6)  # of moving
    (line,) = gpu_table.wanted([result])
    assert (line["at least"], line["met"]) == (9, False)
    assert "MISSED" in as_text(gpu_table.tables([result], {}))
    large = run_race(made_up({OURS: 0, "them": 0}, size=Host.cache + 1))
    assert set(large["median_seconds"]) == {"call, warm", "device, warm"}


def test_peers_that_are_missing_or_fail_are_named_and_wrong_ones_stop_a_race(
    capsys: pytest.CaptureFixture[str],
):
    tries = []

    def missing() -> Any:
        raise MissingPeerError("not installed")

    def failing() -> Any:
        tries.append(1)
        raise RuntimeError("out of memory")

    race = made_up({OURS: 0, "them": 0}, ratios=(Ratio("there", required=2), Ratio("bad")))
    race.contenders.update(there=missing, bad=failing)
    broken: dict[str, str] = {}
    for _ in range(2):  # it is not tried again
        result = run_race(race, broken)
        assert result["skipped"] == {"there": "not installed", "bad": "RuntimeError: out of memory"}
    assert len(tries) == 1
    assert "out of memory" in capsys.readouterr().err
    assert [line["met"] for line in gpu_table.wanted([result])] == [None]
    race.contenders[OURS] = lambda: {"": lambda: np.full(3, np.nan, np.float32)}
    with pytest.raises(AssertionError, match="sparsescan is wrong"):
        run_race(race)


RACES = {
    " ".join(map(str, (name, *small.keywords.values()))): small
    for name, some in gpu_races.RACES.items()
    for small in map(gpu_races.reduced, some)
}


@pytest.mark.parametrize("name", RACES)
def test_contenders_of_a_race_agree(name: str, capsys: pytest.CaptureFixture[str]):
    result = run_race(RACES[name](Host()))
    assert OURS in result["variants"]
    assert result["floors"]["the work"]["seconds"] > 0
    capsys.readouterr()  # why a CPU captures no CUDA graph
    assert gpu_table.tables([result], {})


# -- Chains ---------------------------------------------------------------------------------------


def test_chains_are_right_and_repeat():
    saved: list[str] = []

    def save(report: dict[str, Any]) -> None:
        saved.append(json.dumps(report))

    report = gpu_chains.repeat(Host(), chains=12, repetitions=2, save=save)
    assert (report["failed"], len(saved)) == ([], 12)
    report = gpu_chains.chained(Host(), 3, **SMALL, save=save)
    assert (report["failed"], report["blocks"], len(report["seconds"])) == ([], 8, 3)
    for cases in (gpu_chains.family_cases(Host()), gpu_chains.sanitizer_cases(Host())):
        report = gpu_chains.run_cases(cases, save)
        assert [case for case in report["cases"] if not case["ok"]] == []
        assert json.loads(saved[-1])["done"] == report["asked"] == len(cases)


def test_blocks_of_a_gpu_have_several_samples_in_cases_and_races():
    """They fold sums over lanes, with weights in registers and not."""
    samples = dict[tuple[bool, bool], int]()
    raced = [(kind, units, batch, 1) for units, _, batch in gpu_races.NETWORKS for kind in KINDS]
    checked = [(kind, units, gpu_chains.MANY[1], 2) for kind, units in gpu_chains.SHARED]
    for some in (raced, checked):
        for kind, units, batch, directions in some:
            code = cuda_program(getattr(recurrent, f"{kind}Cell")(1, 1).program)
            layout, dtype = layout_of(len(code.blocks), units, np.dtype(np.float32)), np.dtype("f4")
            count = samples_of(code, layout, dtype, batch, directions, H100.number)
            of = some is raced, layout.is_held
            samples[of] = max(samples.get(of, 1), count * (layout.lanes > 1))
    assert samples[True, True] > 1
    assert samples[False, True] > 1
    assert samples[False, False] > 1


def test_other_bits_and_wrong_values_are_seen():
    class Shaky(Host):
        def get(self, array: Any) -> Any:
            return np.nextafter(array, np.inf) if np.random.default_rng().random() < 0.5 else array

    class Wrong(Host):
        def get(self, array: Any) -> Any:
            return array * 1.01 + 0.01

    for device, why in ((Shaky(), "other bits"), (Wrong(), "wrong")):
        report = gpu_chains.repeat(device, chains=1, repetitions=20, entropy=3)
        assert [entry["why"] for entry in report["failed"]] == [why]
        again = gpu_chains.chained(device, 20, **SMALL)
        assert {entry["why"] for entry in again["failed"]} == {why}
    for make in (gpu_chains.family_cases, gpu_chains.sanitizer_cases):
        assert {case["why"] for case in gpu_chains.run_cases(make(Wrong()))["cases"]} == {"wrong"}


def test_the_long_chain_has_more_blocks_than_a_device_runs_at_once():
    report = gpu_chains.chained(Host(), 0)  # it is not run
    form = ChunkForm(20, 20, terms=1)
    assert report["blocks"] == chunk_count(30_000, 16, form, H100) * 16 >= 1200
    assert in_one_launch(form, np.dtype(np.float32), 30_000, 16, 400)


@pytest.mark.slow
def test_families_run_all_kernels():
    """As compiled, on the CPU."""
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    from .gpu_rehearsal import stand_in

    with stand_in() as device:
        cases = gpu_chains.run_cases(gpu_chains.family_cases(device))["cases"]
        assert all(case["ok"] for case in cases)
    assert {launch.kernel for launch in device.launches} - {"graph"} == {
        *("vectors", "level", "rescale", "sweep_steps", "check_indices"),
        *("multiply", "carry", "sweep", "repair", "chained", "run", "back_sequence"),
    }


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
        return lambda grid, block, arguments: calls.append(name)

    cupy: Any = types.ModuleType("cupy")
    for name in ("arange", "empty", "empty_like", "ones", "float32"):
        setattr(cupy, name, getattr(np, name))
    cupy.copyto = lambda to, source: calls.append("copy")
    cupy.RawModule = lambda code: types.SimpleNamespace(get_function=function)
    properties = {"l2CacheSize": 4096, "multiProcessorCount": 2}
    cupy.cuda = types.SimpleNamespace(
        Device=lambda: types.SimpleNamespace(id=0),
        Event=Event,
        get_elapsed_time=lambda first, last: last.at - first.at,
        runtime=types.SimpleNamespace(
            getDeviceProperties=lambda device: properties,
            deviceSynchronize=lambda: calls.append("wait for all"),
            memGetInfo=lambda: (1 << 20, 1 << 20),
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(gpu_device, "_WARM_UP", 0)
    return calls


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("clock", ["call", "device"])
def test_clocks(calls: list[str], clock: str, cold: bool):
    device = gpu_device.Cuda()
    samples = device.samples(lambda: calls.append("work"), 2, clock, cold)
    first = ["read"] * cold + ["wait" if clock == "device" else "wait for all"]
    timed = [*first, "event", "work", "event", "wait for all"]
    assert calls == [*["work", "wait for all"] * 2, *timed, *timed]
    assert samples == [2e-3, 2e-3]
    assert device.waits_inside(device.synchronize)
    assert not device.waits_inside(partial(calls.append, "work"))
    ceilings = device.ceilings()
    assert ceilings.bytes_per_second == pytest.approx(2 * (1 << 20) / 4 / 2e-3)
    # 64 blocks of 256 threads, 8 numbers each, 4096 steps of a multiplication and an addition.
    assert ceilings.flops_per_second == pytest.approx(64 * 256 * 8 * 4096 * 2 / 2e-3)


# -- Processes ------------------------------------------------------------------------------------


def test_a_part_that_takes_too_long_is_stopped(tmp_path: Path):
    printed: list[str] = []
    code = "import time; print('begun', flush=True); time.sleep(60)"
    ended = gpu_processes._process(["-c", code], "made-up", Job(tmp_path, 1.5, log=printed.append))
    assert (ended.code, ended.how) == (None, "stopped after 2 s: begun")
    assert "begun" in "".join(printed)


@pytest.mark.slow
def test_tests_are_run_and_counted(tmp_path: Path):
    test = tmp_path / "cuda_made_up.py"
    good = "import os\ndef test_a(): assert os.environ['NVIDIA_TF32_OVERRIDE'] == '0'\n"
    for text, summary in (
        (good, "1 passed, 0 failed, 0 skipped"),
        (good + "def test_b(): assert 0, 'because'\n", "1 passed, 1 failed, 0 skipped"),
        (
            "import pytest\n@pytest.mark.skip('no')\ndef test_a(): 0",
            "0 passed, 0 failed, 1 skipped",
        ),
        (good + "import time\ndef test_c(): time.sleep(100)\n", "stopped after 8 s"),
    ):
        test.write_text(text)
        with suppress(FileNotFoundError):
            (tmp_path / "cuda_made_up.xml").unlink()
        report = run_tests(test, Job(tmp_path, 8))
        assert (report["ok"], report["summary"][: len(summary)]) == (text == good, summary)
    assert (report["passed"], report["failed"]) == (1, [])


def test_numba_is_told_where_a_toolkit_with_nvvm_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def add_nvvm(folder: Path) -> dict[str, str | None]:
        (folder / "nvvm" / "libdevice").mkdir(parents=True)
        (folder / "nvvm" / "libdevice" / "libdevice.10.bc").touch()
        return dict.fromkeys(("CUDA_HOME", "CUDA_PATH"), str(folder))

    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    wheels = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(gpu_processes.importlib.util, "find_spec", lambda name: wheels)
    monkeypatch.setattr(gpu_processes, "_installed_toolkits", lambda: [tmp_path / "cuda"])
    assert toolkit_variables() == {}
    assert add_nvvm(tmp_path / "cuda") == toolkit_variables()
    monkeypatch.setenv("CUDA_PATH", "/there is none")
    assert toolkit_variables()["CUDA_PATH"] == str(tmp_path / "cuda")
    add_nvvm(tmp_path / "nvidia" / "cu13")  # a wheel needs no toolkit
    assert toolkit_variables() == dict.fromkeys(("CUDA_HOME", "CUDA_PATH"))


SANITIZER = """#!/bin/sh
for file; do :; done
{run}
echo "========= {summary}"
exit {code}
"""
SCANS = {"ok": True, "summary": "34 of 34 scans and training steps", "cases": ["a", "b"]}


@pytest.mark.parametrize(
    ("said", "ok"),
    [
        ({}, True),
        ({"summary": "ERROR SUMMARY: 10 errors", "code": 77}, False),
        ({"summary": "RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)"}, False),
        ({"summary": "Device not supported"}, False),
        ({"code": 1}, False),
        ({"cases": None}, False),
        ({"cases": SCANS | {"ok": False}}, False),
    ],
)
def test_a_sanitizer_is_believed_if_it_has_looked(
    said: dict[str, Any], ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    program, given = tmp_path / "compute-sanitizer", tmp_path / "given"
    cases = said.get("cases", SCANS)
    given.write_text(json.dumps(cases))
    about = {"summary": "ERROR SUMMARY: 0 errors", "code": 0, **said}
    program.write_text(SANITIZER.format(run=f'cp "{given}" "$file"' if cases else "", **about))
    program.chmod(0o755)
    assert run_sanitizer("memcheck", Job(tmp_path, 5))["ok"] == ok
    monkeypatch.setattr(gpu_processes, "find_sanitizer", lambda: None)
    assert "MISSING" in run_sanitizer("memcheck", Job(tmp_path, 5))["summary"]


# -- The run --------------------------------------------------------------------------------------


def test_a_run_writes_all_that_parts_say_and_nothing_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    seen: list[dict[str, Any]] = []
    answers: dict[str, dict[str, Any]] = {
        "rnn": {"ok": True, "gpu": GPU, "races": [run_race(gpu_races.rnn(Host(), 4, 16))]},
        "memcheck": {"ok": False, "summary": "MISSING: no compute-sanitizer"},
        "racecheck": {"ok": False, "summary": "1 hazard"},
    }

    def job_of(part: gpu.Part) -> Any:
        def job(job: Job) -> dict[str, Any]:
            job.tell({"summary": "half"})
            job.log(f"{part.name} runs\n")
            seen.append(written())
            if part.name == "level":
                raise RuntimeError("it fell over")
            return {"ok": True, "summary": "fine"} | answers.get(part.name, {})

        return job

    def written() -> Any:
        (file,) = tmp_path.glob("gpu-*.json")
        return json.loads(file.read_text())

    monkeypatch.setenv("COMMIT", "89abcdef0123-dirty")
    monkeypatch.setattr(gpu, "_job_of", job_of)
    assert gpu.run(tmp_path, gpu.TOTAL, []) == 1
    results = written()
    assert (results["device"]["gpu"], results["dirty"]) == ("Made-up GPU 1", True)
    assert len(results["races"]) == 1
    assert {part["state"] for part in results["parts"].values()} == {"done"}
    bad = {what for what, part in results["parts"].items() if not part["ok"]}
    assert bad == {"memcheck", "racecheck", "level"}
    assert {seen[0]["parts"][name]["state"] for name in ("environment", "rnn")} == {
        "running",
        "left",
    }
    assert "===== preflight\npreflight runs\n" in (tmp_path / "gpu.log").read_text()
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".log", ".png"}
    assert "FAILED: memcheck, level" in capsys.readouterr().out.splitlines()[-1]
    assert gpu.run(tmp_path / "late", gpu.END, ["preflight", "rnn"]) == 1
    assert capsys.readouterr().out.count("no time left") >= 2


def test_every_race_check_and_file_of_tests_is_a_part():
    names = {part.name for part in gpu.PARTS}
    assert names >= {"environment", *gpu_parts.NAMES} - {"sanitize"}
    (tests,) = [part for part in gpu.PARTS if part.name == "tests"]
    paths = [Path(part.name).stem for part in gpu._files_of(tests, False)]
    # It takes longest, so it starts first, by several processes.
    assert paths[0] == "cuda_chunks"
    assert {*gpu_processes.WORKERS, "cuda_scan", "test_device"} <= {*paths}


def test_no_part_takes_time_from_those_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its limit at least, and what those before have left over."""
    parts = gpu.Part("a", 4), gpu.Part("b", 1, "at once"), gpu.Part("c", 2, "at once")
    monkeypatch.setattr(gpu, "PARTS", (*parts, gpu.Part("d", 3)))
    limits = dict[str, float]()

    def job_of(part: gpu.Part) -> Any:
        def job(job: Job) -> dict[str, Any]:
            limits[part.name] = job.seconds
            return {"ok": True, "summary": ""}

        return job

    monkeypatch.setattr(gpu, "_job_of", job_of)
    gpu.run(tmp_path, 10 + gpu.END, [])
    assert limits == pytest.approx({"a": 5, "b": 7, "c": 7, "d": 10}, abs=0.9)
    gpu.run(tmp_path, 6 + gpu.END, [])
    assert limits == pytest.approx({"a": 4, "b": 3, "c": 3, "d": 6}, abs=0.9)


def test_all_parts_have_their_limits_in_one_call() -> None:
    assert sum(limit for limit, _ in gpu.groups_of(gpu.PARTS)) <= gpu.TOTAL - gpu.END
    assert gpu.TOTAL <= 570


LIGHT = """
    import sys
    for name in ("sparsescan", "numba.cuda", "cupy"):
        sys.modules[name] = None  # as if it could not be imported
    from pathlib import Path
    from bench import gpu
    gpu.run_here("environment", Path("found.json"), False)
    sys.exit(gpu.run(Path("out"), 9 + gpu.END, ["environment", "preflight"]) - 1)
"""


@pytest.mark.slow
def test_what_a_machine_has_is_told_where_nothing_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_python(LIGHT, tmp_path)
    assert json.loads((tmp_path / "found.json").read_text())["packages"]["numba"]
    (file,) = (tmp_path / "out").glob("gpu-*.json")
    assert json.loads(file.read_text())["parts"]["environment"]["ok"]


def test_the_script_is_sound(tmp_path: Path):
    script = Path(gpu.__file__).with_suffix(".sh")
    assert subprocess.run([script, "--rehearse"], capture_output=True, check=False).returncode == 2
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$PYTHONPATH" "$@"\n')
    fake.chmod(0o755)
    asked = ["--seconds", "150", "--only", "rnn"]
    env = {"PYTHON": str(fake), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([script, "out", *asked], cwd=tmp_path, env=env, stdout=subprocess.PIPE)
    said = [str(script.parent.parent), "-m", "bench.gpu", "run", str(tmp_path / "out"), *asked]
    assert done.stdout.decode().split() == said


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="numba-cuda is installed on Linux only")
@pytest.mark.parametrize("killed", [None, 15, 9])
def test_a_rehearsal(tmp_path: Path, killed: int | None):
    """Whole, or killed halfway."""
    pytest.importorskip("numba_cuda")
    script = Path(gpu.__file__).with_suffix(".sh")
    some = ["environment", "preflight", "families", "chained", "rnn", "pair"]
    # Kernels are compiled for the CPU here, and other tests run: parts may take longer.
    more = ["--seconds", "900", *(["--only", *some] if killed else [])]
    process = subprocess.Popen(
        [script, tmp_path, "--rehearse", *more],
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.DEVNULL,
    )
    deadline, parts = time.monotonic() + 900, dict[str, Any]()
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
        parts = {}
        for file in tmp_path.glob("gpu-*.json"):
            parts = json.loads(file.read_text())["parts"]
        if killed and "process" in parts.get("families", {}):
            process.send_signal(killed)
            break
    assert (process.wait(60) == 0) == (killed is None)
    (file,) = tmp_path.glob("gpu-*.json")
    results = json.loads(file.read_text())
    parts = results["parts"]
    if killed:
        states = {what: part["state"] for what, part in parts.items()}
        assert states["environment"] == states["preflight"] == "done"
        assert states["rnn"] == states["pair"] == "left"
        for part in parts.values() if killed == 9 else ():
            if part["state"] == "running":  # nobody was told: what runs is named in the file
                with suppress(ProcessLookupError, KeyError):
                    os.killpg(part["process"], 9)
        return
    assert {what: part["summary"] for what, part in parts.items() if not part["ok"]} == {}
    assert {part["state"] for part in parts.values()} == {"done"}
    assert {race["name"].split()[0] for race in results["races"]} >= {"rnn", "spgemm", "training"}
    assert parts["families"]["kernels"]["errors"] == []
