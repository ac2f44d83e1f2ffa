"""The frame of the experiments, with a made-up one: what is measured, kept and measured again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from . import __main__, experiment, machine, readme, report
from .experiment import Experiment, Options, Piece, run

QUICK, FULL = Options(True, "cpu"), Options(False, "cpu")


class CutOffError(Exception):
    """Stands for whatever cuts a run off."""


class Fake:
    """An experiment that notes what it measures; a measurement of `bad` is cut off."""

    def __init__(self, name: str = "made") -> None:
        self.measured: list[str] = []
        self.options: list[Options] = []
        self.bad: str | None = None
        self.experiment = Experiment(
            name, "Made up", self.pieces, lambda options: {"rounds": 3}, lambda r: [], lambda r: []
        )

    def pieces(self, options: Options) -> Iterable[Piece]:
        self.options.append(options)
        for key in ("T=10", "T=30", "T=100"):
            yield Piece(key, lambda key=key: self.measure(key))

    def measure(self, key: str) -> dict[str, Any]:
        if key == self.bad:
            raise CutOffError
        self.measured.append(key)
        return {"seconds": len(self.measured), "missing": {"jax": "not installed"}}


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all CPUs, at a commit that does not change."""
    monkeypatch.setattr(machine, "pin", lambda: None)
    at("0123456789abcdef", monkeypatch)


def at(commit: str, monkeypatch: pytest.MonkeyPatch, dirty: bool = False) -> None:
    monkeypatch.setattr(machine, "commit", lambda: (commit, dirty))


def cut_off(fake: Fake, options: Options, folder: Path, bad: str = "T=100") -> Path:
    """Run until that piece; the file."""
    fake.bad = bad
    with pytest.raises(CutOffError):
        run(fake.experiment, options, folder)
    fake.bad = None
    return max(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)


def keys(path: Path) -> list[str]:
    return list(json.loads(path.read_text())["pieces"])


def test_a_file_has_all_pieces_and_where_they_come_from(tmp_path: Path):
    fake = Fake()
    path = run(fake.experiment, FULL, tmp_path)
    results = json.loads(path.read_text())
    assert list(results["pieces"]) == fake.measured == ["T=10", "T=30", "T=100"]
    assert results["pieces"]["T=30"] == {"seconds": 2, "missing": {"jax": "not installed"}}
    assert results["done"] is True
    assert (results["experiment"], results["title"], results["quick"]) == ("made", "Made up", False)
    assert results["about"] == {"rounds": 3}
    assert (results["commit"], results["dirty"]) == ("0123456789abcdef", False)
    assert results["versions"]["numpy"]
    assert results["device"]["cpu"]
    assert path.name.startswith("made-")
    assert path.name.endswith(f"-{results['date'][:10]}-01234567.json")
    assert list(tmp_path.iterdir()) == [path]


def test_pieces_are_saved_one_by_one(tmp_path: Path):
    seen: list[list[str]] = []
    fake = Fake()

    def measure(key: str) -> dict[str, Any]:
        seen.append([key for path in tmp_path.glob("*.json") for key in keys(path)])
        return {}

    fake.measure = measure  # type: ignore[method-assign]
    run(fake.experiment, FULL, tmp_path)
    assert seen == [[], ["T=10"], ["T=10", "T=30"]]


def test_a_run_that_was_cut_off_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    fake = Fake()
    path = cut_off(fake, FULL, tmp_path)
    half = json.loads(path.read_text())
    assert list(half["pieces"]) == ["T=10", "T=30"]
    assert half["done"] is False
    again = Fake()
    assert run(again.experiment, FULL, tmp_path) == path
    assert again.measured == ["T=100"]
    whole = json.loads(path.read_text())
    assert list(whole["pieces"]) == ["T=10", "T=30", "T=100"]
    assert {key: whole["pieces"][key] for key in half["pieces"]} == half["pieces"]
    assert whole["done"] is True
    assert f"going on with {path.name}, which has 2 pieces" in capsys.readouterr().err


def test_a_run_goes_on_after_midnight(tmp_path: Path):
    path = cut_off(Fake(), FULL, tmp_path)
    day = json.loads(path.read_text())["date"][:10]
    yesterday = path.rename(path.with_name(path.name.replace(day, "1999-12-31")))
    again = Fake()
    assert run(again.experiment, FULL, tmp_path) == yesterday
    assert again.measured == ["T=100"]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_results_in_the_repository_do_not_keep_a_run_from_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=me", "-c", "user.email=me@here")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True)

    monkeypatch.undo()
    monkeypatch.setattr(machine, "pin", lambda: None)
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    (tmp_path / "code.py").touch()
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    results = tmp_path / "bench" / "results"
    path = cut_off(Fake(), FULL, results)
    again = Fake()
    assert run(again.experiment, FULL, results) == path
    assert again.measured == ["T=100"]
    assert json.loads(path.read_text())["dirty"] is False
    (tmp_path / "code.py").write_text("pass")
    assert machine.commit()[1]


def test_what_is_done_is_measured_anew(tmp_path: Path):
    run(Fake().experiment, FULL, tmp_path)
    again = Fake()
    run(again.experiment, FULL, tmp_path)
    assert again.measured == ["T=10", "T=30", "T=100"]


@pytest.mark.parametrize(
    "then",
    [
        pytest.param({"commit": "fedcba9876543210"}, id="another commit"),
        pytest.param({"dirty": True}, id="files that differ from the commit"),
        pytest.param({"options": QUICK}, id="other sizes"),
        pytest.param({"options": Options(False, "cpu", Path("elsewhere"))}, id="other data"),
        pytest.param({"name": "other"}, id="another experiment"),
        pytest.param({"cpu": "Made-up CPU 2"}, id="another device"),
    ],
)
def test_nothing_is_kept_of_a_run_of(
    then: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    about = machine.describe()
    monkeypatch.setattr(machine, "describe", lambda: about)
    about["device"]["cpu"] = "Made-up CPU"
    cut_off(Fake(), FULL, tmp_path)
    at(then.get("commit", "0123456789abcdef"), monkeypatch, then.get("dirty", False))
    about["device"]["cpu"] = then.get("cpu", "Made-up CPU")
    other = Fake(then.get("name", "made"))
    path = run(other.experiment, then.get("options", FULL), tmp_path)
    assert other.measured == ["T=10", "T=30", "T=100"]
    assert keys(path) == other.measured


def test_a_part_is_measured_and_the_rest_later(tmp_path: Path):
    some, rest, none = Fake(), Fake(), Fake()
    path = run(some.experiment, Options(False, "cpu", only="T=10"), tmp_path)
    assert some.measured == ["T=10"]  # and not T=100
    assert json.loads(path.read_text())["done"] is False
    assert run(rest.experiment, FULL, tmp_path) == path
    assert rest.measured == ["T=30", "T=100"]
    assert json.loads(path.read_text())["done"] is True
    with pytest.raises(SystemExit, match="made has no piece with 'T=2' in its key"):
        run(none.experiment, Options(False, "cpu", only="T=2"), tmp_path)
    assert none.measured == []


def test_quick_results_have_a_file_of_their_own(tmp_path: Path):
    full, quick = (run(Fake().experiment, options, tmp_path) for options in (FULL, QUICK))
    assert full != quick
    assert quick.name.startswith("made-quick-")
    assert json.loads(quick.read_text())["quick"] is True
    assert json.loads(full.read_text())["quick"] is False


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Return an experiment that has a name on the command line."""
    fake, module = Fake(), types.ModuleType("bench.made")
    module.EXPERIMENT = fake.experiment  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bench.made", module)
    monkeypatch.setattr(__main__, "NAMES", ("made",))
    return fake


def test_the_command_line(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert __main__.main(["made", "--output", str(tmp_path)]) == 0
    quick = ["made", "--quick", "--data", "audio", "--output", str(tmp_path)]
    assert __main__.main(quick) == 0
    assert fake.options == [FULL, Options(True, "cpu", Path("audio"))]
    printed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(printed) == sorted(tmp_path.glob("*.json"))
    assert len(printed) == 2


def test_an_experiment_on_a_gpu_is_named_after_it(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gpu = {"device": {"gpu": "Made-up GPU 1"}, "versions": {"cupy-cuda13x": "0"}}
    monkeypatch.setattr(machine, "describe_gpu", lambda: gpu)
    __main__.main(["made", "--device", "cuda", "--output", str(tmp_path)])
    (path,) = tmp_path.glob("made-made-up-gpu-1-*.json")
    results = json.loads(path.read_text())
    assert results["device"]["gpu"] == "Made-up GPU 1"
    assert results["versions"]["cupy-cuda13x"] == "0"
    assert fake.options == [Options(False, "cuda")]


@pytest.mark.parametrize("arguments", [[], ["rnm"], ["made", "--device", "tpu"]])
def test_what_there_is_not_is_refused(
    arguments: list[str], fake: Fake, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stop:
        __main__.main(arguments)
    assert stop.value.code == 2
    assert "usage: python -m bench" in capsys.readouterr().err
    assert not fake.measured


def test_the_report_is_made_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    paths_given: list[tuple[Path, Path]] = []
    monkeypatch.setattr(report, "write", lambda *paths: paths_given.append(paths) or paths[1])
    monkeypatch.setattr(readme, "update_tables", lambda *paths: paths_given.append(paths))
    assert __main__.main(["report"]) == 0
    assert capsys.readouterr().out == "report.html\n"
    assert paths_given == [(experiment.RESULTS, Path("report.html"))]
    __main__.main(["report", "--results", "r", "--output", "page.html", "--readme"])
    root = Path(__file__).parent.parent
    assert paths_given[1:] == [
        (Path("r"), Path("page.html")),
        (root / "README.md", Path("r")),
        (root / "docs" / "for-me.md", Path("r")),
    ]
