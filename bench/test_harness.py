"""The harness: what is measured, kept and measured again, counted, drawn and put into tables."""

from __future__ import annotations

import ast
import itertools
import json
import re
import sys
import tempfile
import types
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from . import __main__, files, machine, page, races, readme, report, timing
from .experiment import RESULTS, Drawing, Experiment, Piece, Row, Table, as_text, run
from .peers import FLUSHING, PYTORCH

FOLDER = Path(__file__).parent
KEYS = ["T=1", "T=10", "T=100"]
# That are told apart with three digits.
MILLISECONDS = itertools.cycle(range(100, 1000))


class CutOffError(Exception):
    """Stands for whatever cuts a run off."""


class Made:
    """An experiment that notes what it measures, and is cut off after so many pieces."""

    def __init__(self, last: int | None = None, name: str = "made") -> None:
        self.measured: list[str] = []
        self.last = last
        self.experiment = Experiment(
            name, "Made up", self.pieces, lambda quick: {"rounds": 3}, drawings_of, rows_of
        )

    def pieces(self, quick: bool) -> Iterator[Piece]:
        for key in KEYS:
            yield Piece(key, lambda key=key: self.measure(key))

    def measure(self, key: str) -> dict[str, Any]:
        if len(self.measured) == self.last:
            raise CutOffError
        self.measured.append(key)
        ours, theirs = next(MILLISECONDS) / 1e3, next(MILLISECONDS) / 1e3
        return {"ours": ours, "theirs": theirs, "missing": {"jax": "<not> installed"}}


def rows_of(results: Any) -> list[Row]:
    return [
        Row(f"work {k}", "PyTorch", p["theirs"], p["ours"], 2.5)
        for k, p in results["pieces"].items()
    ]


def drawings_of(results: Any) -> list[Drawing]:
    samples = {
        key: {"samples": {"ours": [p["ours"]], "peer": [1.0]}}
        for key, p in results["pieces"].items()
    }
    return races.draw("Made-up times", samples, "Of T < 30.", "ours")


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a commit that does not change, with one experiment."""
    at(monkeypatch)
    module = types.ModuleType("bench.made")
    module.EXPERIMENT = Made().experiment  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bench.made", module)
    for reader in (__main__, files, report, readme):
        monkeypatch.setattr(reader, "NAMES", ("made",))


def at(monkeypatch: pytest.MonkeyPatch, commit: str = "0123456789abcdef") -> None:
    monkeypatch.setattr(machine, "commit", lambda: (commit, False))


# -- Runs -----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["", *KEYS])), max_size=4))
@settings(deadline=None, max_examples=20)
def test_a_run_goes_on_where_it_was_cut_off(calls: list[tuple[int, str]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, kept = Path(name), dict[str, Any]()
        for last, only in [*calls, (3, "")]:
            done, made = len(kept) == len(KEYS), Made(last)
            before = {} if done else dict(kept)
            chosen = [key for key in KEYS if key not in before and only in ("", key)]
            try:
                run(made.experiment, False, folder, only)
                assert made.measured == chosen
            except CutOffError:
                assert made.measured == chosen[:last]
            assert set(made.measured) <= set(chosen)
            paths = sorted(folder.glob("*.json"))
            assert len(paths) == bool(done or before or made.measured)
            if made.measured:
                results = json.loads(paths[0].read_text())
                kept = results["pieces"]
                assert {**before, **kept} == kept
                assert list(kept)[len(before) :] == made.measured
        assert results["done"]
        assert set(kept) == set(KEYS)
        assert (results["experiment"], results["commit"][:8]) == ("made", "01234567")


@pytest.mark.parametrize("other", ["commit", "quick", "name"])
def test_nothing_is_kept_of_another_run(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CutOffError):
        run(Made(2).experiment, False, tmp_path)
    made = Made(name="other" if other == "name" else "made")
    if other == "commit":
        at(monkeypatch, "fedcba9876543210")
    path = run(made.experiment, other == "quick", tmp_path)
    assert made.measured == KEYS
    assert ("quick" in path.name) == (other == "quick")
    with pytest.raises(SystemExit, match="has no piece with 'T=2' in its key"):
        run(made.experiment, False, tmp_path, "T=2")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["made", "--quick", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("made-quick-*.json")
    assert capsys.readouterr().out.splitlines()[-1] == str(path)
    output = tmp_path / "page.html"
    assert __main__.main(["report", "--results", str(tmp_path), "--output", str(output)]) == 0
    assert "Made-up times" in output.read_text()


# -- Rounds ---------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1), min_size=24, max_size=24), st.integers(1, 6), st.integers(1, 4))
def test_rounds_that_others_disturb_are_made_up_for(
    cores: list[float], rounds: int, patience: int
) -> None:
    """Others use these cores, in rounds of a second each."""
    clock, ran = [0.0], list[int]()

    def others() -> float:
        return sum(cores[: int(clock[0])])

    def take(used: list[float]) -> None:
        ran.append(len(used))
        clock[0] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "others", others)
        patch.setattr(timing.time, "perf_counter", lambda: clock[0])
        used = timing.take_rounds(take, rounds, patience)
    assert ran == [*range(len(used))]
    np.testing.assert_allclose(used, cores[: len(used)], atol=1e-9)
    calm = sum(timing.quiet(used))
    assert rounds <= len(used) <= rounds * patience
    assert calm == rounds or (calm < rounds and len(used) == rounds * patience)
    turns = [k if k % 3 else None for k in ran]
    counted = timing.counting(turns, timing.that_count(used))
    assert counted or not any(turn is not None for turn in turns)
    assert set(counted) <= {turn for turn in turns if turn is not None}


def test_contenders_take_turns() -> None:
    done: list[str] = []
    calls = {name: lambda name=name: done.append(name) for name in "ab"}
    samples, used = timing.take_turns(calls, 2, 0, 1e-9)
    assert done == ["a", "a", "b", "b"] * 2  # each warms up
    assert [len(taken) for taken in (*samples.values(), used)] == [2, 2, 2]


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=60), st.floats(0.1, 10))
def test_what_is_kept_has_the_quartiles(taken: list[float], loss: float) -> None:
    rounds = [taken, taken[:1]] * 5
    results = {
        "losses": {"ours": [loss]},
        "samples": {"ours": taken},
        "samples_seconds": {"ours": rounds, "peer": taken},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.json"
        machine.save(path, results)
        kept = json.loads(path.read_text())
    assert kept["losses"] == results["losses"]
    np.testing.assert_allclose(kept["samples_seconds"]["peer"], taken, rtol=1e-5)
    assert len(kept["samples_seconds"]["ours"]) == len(rounds)
    pairs = zip(kept["samples_seconds"]["ours"], rounds, strict=True)
    for brief, full in [(kept["samples"]["ours"], taken), *pairs]:
        assert len(brief) == min(len(full), 9)
        found, right = (np.quantile(each, (0, 0.25, 0.5, 0.75, 1)) for each in (brief, full))
        np.testing.assert_allclose(found, right, rtol=1e-5)


# -- Races ----------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from([PYTORCH, FLUSHING, "jax", "ours"]), st.floats(1e-6, 1e3)))
def test_rows_are_ratios_of_medians_to_pytorch_in_its_faster_mode(times: dict[str, float]) -> None:
    times.setdefault(races.OURS, 1.0)
    samples = {name: [taken, taken / 2, 3 * taken] for name, taken in times.items()}
    piece = {"samples": samples, "wanted": {}}
    shown = {row.peer: row.theirs / row.ours for row in races.rows("a", {"pieces": {"b": piece}})}
    slower = {PYTORCH, FLUSHING} <= times.keys() and max(
        (PYTORCH, FLUSHING), key=lambda mode: times[mode]
    )
    peers = times.keys() - {races.OURS}
    if slower and times[PYTORCH] != times[FLUSHING]:
        peers -= {slower}
        assert len(races.in_both_modes({"pieces": {"b": piece}})[0].rows) == 1
        assert shown.keys() == peers
    assert shown == {name: times[name] / times[races.OURS] for name in shown}
    assert len(races.draw("title", {"b": piece})) == bool(peers)


def test_wrong_results_stop_a_race() -> None:
    right = {"output": np.ones(3), "x": np.ones(2)}
    assert max(races.apart({**right, "x": right["x"] + 1e-6}, right).values()) < 1e-5
    with pytest.raises(AssertionError, match=r"x: the relative difference is 1\.0e-03"):
        races.apart({**right, "x": 1.001 * right["x"]}, right)
    with pytest.raises(AssertionError, match="nan"):
        races.apart({**right, "x": np.nan * right["x"]}, right)
    tiny = {"x": np.float32([1e-40])}  # of which nothing is left where such numbers are zeros
    assert races.apart({"x": np.float32([0])}, tiny)["x"] < 1e-5


# -- Numbers and tables ---------------------------------------------------------------------------


@given(st.floats(1e-9, 1e12), st.integers(1, 6))
def test_significant_digits(x: float, digits: int) -> None:
    text = page.significant(x, digits)
    assert abs(float(text.replace(",", "")) - x) <= 0.5000001 * 10 ** (1 - digits) * x
    whole, _, decimals = text.partition(".")
    assert re.fullmatch(r"\d{1,3}(,\d{3})*", whole)
    if decimals:
        assert len((whole + decimals).replace(",", "").lstrip("0")) == digits


@given(st.lists(st.floats(1e-6, 1e9) | st.none(), min_size=1))
def test_decimal_points_are_below_each_other(numbers: list[float | None]) -> None:
    cells = ["" if x is None else page.significant(x) + "×" for x in [1.0, *numbers]]
    table = page.table(["what", "x"], [["a", cell] for cell in cells], ["x"])
    shown = re.findall(r'<td class="number">(.*?)</td>', table)
    assert [cell.partition("<")[0] for cell in shown] == cells
    after = set()
    for cell in filter(None, shown):
        text, _, pad = cell.partition("×")
        point, decimals = text.partition(".")[1:]
        after.add(len(point + decimals + "".join(re.findall(r'data-pad="(.*?)"', pad))))
    assert len(after) <= 1


def test_rows_of_the_same_work_stand_below_it_and_empty_columns_are_left_out() -> None:
    rows = [["a", "x", "", "1"], ["a", "y", "", "2"], ["b", "x", "", "3"]]
    heads = ["work", "against", "of no use", "ms"]
    table = page.table(heads, rows, ["ms"], grouped=True)
    texts = [re.sub("<.*?>", " ", row).split() for row in re.findall("<tr[ >].*?</tr>", table)]
    assert texts == [["against", "ms"], ["a"], ["x", "1"], ["y", "2"], ["b"], ["x", "3"]]
    assert page.table(heads, []) == ""
    assert "<details>" not in page.table(heads, rows * 13)
    assert page.table(heads, rows * 14).startswith("<details><summary>All 42 lines</summary>")
    lines = as_text([Table(heads, rows, ["ms"])]).splitlines()
    assert [line.split() for line in lines[1:4]] == [["a", "x", "1"], ["y", "2"], ["b", "x", "3"]]


# -- The page -------------------------------------------------------------------------------------


class Page(HTMLParser):
    """A page as it is read: every element is closed, in order; nothing is loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str | None] = set()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, name: str, attributes: Any) -> None:
        given = dict(attributes)
        if name not in ("meta", "img"):
            self.open.append(name)
        assert name != "script"
        assert name != "img" or given["src"].startswith("data:image/")
        self.links += [given["href"]] if name == "a" else []
        self.anchors.add(given.get("id"))

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name


def save(folder: Path, name: str, **come_from: Any) -> dict[str, Any]:
    """Write results as a run would."""
    results = json.loads(run(Made().experiment, False, Path(tempfile.mkdtemp())).read_text())
    results |= {"device": {"cpu": "Made-up CPU", "cores used": 2}, "dirty": False} | come_from
    (folder / f"{name}.json").write_text(json.dumps(results))
    return results


LATER = "2130-06-01T00:00:00+00:00"


@pytest.mark.parametrize(
    ("worse", "mark"),
    [
        ({"date": "1999-12-31T00:00:00+00:00"}, ""),
        ({"date": LATER, "dirty": True}, "uncommitted changes"),
        ({"date": LATER, "quick": True}, "quick"),
        ({"date": LATER, "done": False}, "unfinished"),
    ],
)
def test_the_newest_of_the_clean_and_complete_runs_is_shown(
    worse: Any, mark: str, tmp_path: Path
) -> None:
    bad, good = save(tmp_path, "bad", **worse), save(tmp_path, "good")
    text = report.write(tmp_path, tmp_path / "page.html").read_text()
    read = Page(text)
    assert {link[1:] for link in read.links if link[0] == "#"} <= read.anchors
    assert {link for link in read.links if link[0] != "#"} == {report._PAPER}
    for results, is_shown in ((good, True), (bad, False)):
        for piece in results["pieces"].values():
            cell = f">{page.significant(1e3 * piece['theirs'])}<"
            assert (cell in text) == is_shown
    assert "jax: &lt;not&gt; installed" in text
    assert text.count("superseded") == 1
    assert mark in text
    before = (tmp_path / "page.html").read_bytes()
    assert report.write(tmp_path, tmp_path / "page.html").read_bytes() == before
    (tmp_path / "good.json").unlink()
    (tmp_path / "torn.json").write_text('{"commit": "01')
    (tmp_path / "bare.json").write_text('{"engine": [], "commit": ""}')
    text = report.write(tmp_path, tmp_path / "page.html").read_text()
    assert page.significant(1e3 * bad["pieces"]["T=1"]["theirs"]) in text
    assert "not a JSON object" in text
    assert "without dirty, date, command, device, versions" in text


def test_what_cannot_be_shown_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, "made", pieces={"T=1": {}})
    text = report.write(tmp_path, tmp_path / "page.html").read_text()
    assert "made.json cannot be shown: KeyError" in text
    assert "made.json cannot be shown" in capsys.readouterr().err


def test_a_claim_about_gpus_is_open_until_a_full_run(tmp_path: Path) -> None:
    parts = {"families": {"ok": True, "summary": "fine", "cases": [{"name": "a", "ok": True}]}}
    for name, asked, open_ in (("some", ["families"], True), ("all", [], False)):
        gpu = {"device": {"gpu": "Made-up GPU", "cpu": "a"}, "races": [], "parts": parts}
        about = {"experiment": None, "asked": {"parts": asked}, **gpu}
        save(tmp_path, name, **about)
        text = report.write(tmp_path, tmp_path / "page.html").read_text()
        assert ("cuBLAS" in text) == open_
        assert "several devices" in text


@pytest.mark.slow
def test_all_kept_results_can_be_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    kept, unread = files.read(RESULTS)
    pages = report.write_pages(RESULTS, tmp_path)
    assert not unread
    assert capsys.readouterr().err == ""
    assert len(pages) == len(files.NAMES) + 5
    shown = {file.path for file in files.newest(kept).values()}
    assert shown == {file.path for file in kept}


# -- Tables of the README and the site ------------------------------------------------------------


def test_tables_replace_what_is_between_their_markers_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"experiment": "made", "work": "work T=10"}
    table = {"heads": ["you have", "use"], "lines": [{"cells": ["A", "a"], **line}] * 2}
    monkeypatch.setattr(readme, "TABLES", {"first": table})
    (tmp_path / "results").mkdir()
    copy = tmp_path / "README.md"
    copy.write_text("# Title\n<!-- table: first -->\nold\n<!-- end -->\n\nMore\n")
    for bad in ({"dirty": True}, {"quick": True}, {"done": False}):
        save(tmp_path / "results", "made", **bad)
        with pytest.raises(ValueError, match=r"no complete results .* 'work T=10'"):
            readme.update_tables(copy, tmp_path / "results")
    results = [
        save(tmp_path / "results", name, date=date, device={"cpu": name})
        for name, date in (("new", LATER), ("old", "2130-01-01T00:00:00+00:00"))
    ]
    readme.update_tables(copy, tmp_path / "results")
    text = copy.read_text()
    assert text.startswith("# Title\n<!-- table: first -->\n| you have | ratio | use | against |")
    assert text.endswith("\n<!-- end -->\n\nMore\n")
    piece = results[0]["pieces"]["T=10"]
    cells = ["A", readme.ratio(piece["theirs"] / piece["ours"]), "a", "PyTorch"]
    assert text.count(f"| {' | '.join(cells)} |") == 2
    assert "every sample. [lines 1–2](results/new.json): new, 2130-06-01." in text
    readme.update_tables(copy, tmp_path / "results")
    assert copy.read_text() == text
    copy.write_text("<!-- table: third -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="table: third -->: expected one of first"):
        readme.update_tables(copy, tmp_path / "results")
    copy.write_text("<!-- table: first -->\n")
    with pytest.raises(ValueError, match="no table between"):
        readme.update_tables(copy, tmp_path / "results")


# -- Files of this folder -------------------------------------------------------------------------


def test_nothing_is_imported_in_a_circle() -> None:
    """Inside functions and for types neither."""

    def imported(path: Path) -> set[str]:
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                names |= {node.module} if node.module else {alias.name for alias in node.names}
        return names & {other.stem for other in FOLDER.glob("*.py")} - {"__main__"}

    left = {path.stem: imported(path) for path in FOLDER.glob("*.py")}
    for _ in range(len(left)):
        left = {name: needed & left.keys() for name, needed in left.items() if needed & left.keys()}
    assert not left, left
