"""The report and the README's tables, from made-up results of every kind."""

from __future__ import annotations

import base64
import json
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from . import doors, files, grid, page, pictures, plots, readme, report, sections, step
from .contests import OURS
from .experiment import Drawing, Experiment, Results, Row
from .gpu_races import CUDNN, VALUES
from .gpu_table import wanted
from .test_gpu import rnn_races

VOID = {"meta", "img"}


class Page(HTMLParser):
    """A page as it is read: every element is closed, in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.sections: dict[str, str] = {"": ""}  # the texts, by their titles
        self.tables: dict[str, list[list[str]]] = {}  # rows of all tables of a section
        self.elements: list[tuple[str, dict[str, str]]] = []
        self._open: list[str] = []
        self._title = ""
        self.feed(path.read_text())
        self.close()
        assert not self._open
        self.images = [attributes for name, attributes in self.elements if name == "img"]

    def handle_starttag(self, name: str, attributes: Any) -> None:
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self._open.append(name)
        if name == "h2":
            self._title = ""
        if name == "tr":
            self.tables.setdefault(self._title, []).append([])
        if name in ("td", "th"):
            self.tables[self._title][-1].append("")

    def handle_endtag(self, name: str) -> None:
        assert self._open.pop() == name

    def handle_data(self, text: str) -> None:
        if "h2" in self._open:
            self._title += text
            self.sections.setdefault(self._title, "")
        elif "style" not in self._open:
            self.sections[self._title] += text
        if {"td", "th"} & set(self._open):
            self.tables[self._title][-1][-1] += text

    def row(self, section: str, *starts: str) -> list[str]:
        """Return the only row that begins with these cells."""
        (row,) = [row for row in self.tables[section] if tuple(row[: len(starts)]) == starts]
        return row

    def after(self, section: str, name: str) -> list[list[str]]:
        """Return the cells behind the one with this name, in every row that has it."""
        rows = self.tables[section]
        return [row[row.index(name) + 1 :] for row in rows if name in row]


def number(text: str) -> float:
    return float(text.strip("×≥≤ ").replace(",", ""))


def close(text: str, value: float, digits: int = 3) -> bool:
    """Whether a number is shown as it is, but for rounding."""
    return abs(number(text) - value) <= 0.5001 * 10 ** (1 - digits) * abs(value)


# -- Made-up results ------------------------------------------------------------------------------

CPU = {"cpu": "Made-up CPU", "cores": 8, "cores used": 2}
GPU = {"gpu": "Made-up GPU 1", "cpu": "Made-up CPU"}
LATER = "2030-06-01T00:00:00+00:00"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def save(folder: Path, name: str, results: Results, **come_from: Any) -> None:
    """Write results as a run would, where nothing else is said on a clean commit."""
    head = {
        "commit": "0123456789abcdef",
        "dirty": False,
        "date": "2030-01-02T03:04:05+00:00",
        "command": "python -m bench",
        "device": CPU,
        "versions": {"python": "3.99.1", "jax": None},
    }
    (folder / f"{name}.json").write_text(json.dumps(head | results | come_from))


def show(folder: Path) -> Page:
    return Page(report.write(folder, folder / "page.html"))


def contest(rng: np.random.Generator, name: str, *peers: str, missing: str = "") -> Results:
    """Return a line as the engine's comparison writes it; peers are asked to be twice as slow."""
    scale = 10 ** rng.uniform(-5, 2)
    samples = {
        contender: (scale * rng.uniform(0.1, 50) * rng.uniform(1, 1.2, (3, 5))).tolist()
        for contender in (OURS, *peers)
    }
    medians = {key: median(np.ravel(turns).tolist()) for key, turns in samples.items()}
    floor = medians[OURS] * rng.uniform(0.1, 0.9)
    ratios: Results = {
        peer: {
            "required": 2,
            "measured": medians[peer] / medians[OURS],
            "of_minima": 1.0,
            "skipped": None,
        }
        for peer in peers
    }
    if missing:
        ratios[missing] = {
            "required": 1,
            "measured": None,
            "of_minima": None,
            "skipped": f"no {missing} here",
        }
    return {
        "name": name,
        "work": f"the work of {name}",
        "median_seconds": medians,
        "ratios": ratios,
        "floor": {"seconds": floor},
        "multiple_of_floor": medians[OURS] / floor,
        "rounds_that_count": [True, False, True],
        "samples_seconds": samples,
    }


def startup(seconds: float) -> Results:
    return {
        "name": "import",
        "work": "the import",
        "limit_seconds": 0.3,
        "median_seconds": seconds,
        "samples_seconds": [seconds],
    }


def chain(rng: np.random.Generator, auto: float, linear: float, chunked: float) -> Results:
    medians = {"auto": auto, "Schedule.linear(9)": linear, "Schedule.chunked(9, 2)": chunked}
    return {
        "auto is": "Schedule.linear(9)",
        "predicted_seconds": dict.fromkeys(medians, 1e-3) | {"Schedule.chunked(9, 2)": 2e-3},
        "median_seconds": medians,
        "samples_seconds": {
            name: (taken * rng.uniform(0.9, 1.1, 9)).tolist() for name, taken in medians.items()
        },
    }


def races(rng: np.random.Generator) -> list[Results]:
    """Made-up races on a GPU, with samples."""
    results = rnn_races()
    for race in results:
        race["samples_seconds"] = {
            mode: {
                name: (taken * rng.uniform(0.7, 1.4, (3, 5))).tolist() for name, taken in of.items()
            }
            for mode, of in race["median_seconds"].items()
        }
    return results


def rows_of(results: Results) -> list[Row]:
    return [
        Row(f"backward, {key}", "autograd", piece["theirs"], piece["ours"], piece.get("paper"))
        for key, piece in results["pieces"].items()
    ]


def drawings_of(results: Results) -> list[Drawing]:
    figure = Figure(figsize=(3, 2))
    figure.subplots().plot([piece["ours"] for piece in results["pieces"].values()])
    return [Drawing("Made-up times", 'What is "seen" at T < 30', figure)]


def experiment(rng: np.random.Generator, *keys: str) -> Results:
    """Return a whole one; every piece takes times of its own."""
    pieces = {
        key: {"theirs": 10 ** rng.uniform(-4, 2), "ours": 10 ** rng.uniform(-4, 2)} for key in keys
    }
    about = {"H": 20, "rate": 1e-5, "sizes": [1, 2]}
    fields = {"experiment": "made", "title": "Made up", "quick": False, "about": about}
    return fields | {"pieces": pieces, "done": True}


@pytest.fixture(autouse=True, scope="module")
def only_experiment() -> Iterator[None]:
    """Let there be one experiment only."""
    module = types.ModuleType("bench.made")
    module.EXPERIMENT = Experiment(  # type: ignore[attr-defined]
        "made", "Made up", lambda options: [], lambda options: {}, drawings_of, rows_of
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "bench.made", module)
        for reader in (files, report):
            patch.setattr(reader, "NAMES", ("made",))
        yield


# -- The page -------------------------------------------------------------------------------------


def test_without_any_file_the_page_says_what_has_not_been_run(tmp_path: Path):
    shown = show(tmp_path)
    measured = [
        "Made up",
        "The engine",
        "Schedules",
        "Memory",
        "Code in LLVM's language",
        "On a GPU",
    ]
    assert list(shown.sections) == ["", "Overview", "Unproven", *measured]
    assert shown.tables["Overview"][1:] == [[title, "not run yet"] for title in measured]
    commands = ["bench made", *(f"bench.{name}" for name in ("compare", "grid", "memory"))]
    commands = [f"-m {name}" for name in (*commands, "bench.intrinsics")]
    for title, command in zip(measured, [*commands, "bench/gpu.sh"], strict=True):
        assert shown.sections[title].startswith("Not run yet: ")
        assert command in shown.sections[title]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with results of all kinds."""
    folder, rng = tmp_path_factory.mktemp("everything"), np.random.default_rng()
    save(folder, "made", experiment(rng, "T=10", "T=30"))
    line = contest(rng, "a", "SciPy @", missing="MKL")
    save(folder, "cpu", {"engine": [line], "startup": [startup(0.1)]})
    save(folder, "grid", {"chains": {"a chain": chain(rng, 1, 1, 2)}, "pairs_in_order": [1, 1]})
    case = {"limit_bytes": 1, "workspace_bytes": 1, "taken_bytes": 1, "within_limit": True}
    case |= {"chain": "a chain", "schedule": "Schedule.linear(9)", "threads": 2}
    save(folder, "memory", {"cases": [case]})
    sums = {"name": "sums", "median_seconds": {"loops": 3e-6, "intrinsic": 2e-6}, "ratio": 1.5}
    save(folder, "intrinsics", {"intrinsics": [sums]})
    run = {"races": races(rng), "wanted": wanted(rnn_races()), "parts": {}}
    save(folder, "gpu", run, device=GPU)
    return folder


@pytest.fixture(scope="module")
def whole(everything: Path) -> Page:
    return show(everything)


def test_the_page_needs_nothing_else(whole: Page, everything: Path):
    assert len(whole.images) == 4
    for name, attributes in whole.elements:
        for key, value in attributes.items():
            if key == "href" and name == "a":
                assert value.startswith(("#", "https://arxiv.org/"))
            else:
                assert "//" not in value or (name, key) == ("img", "src"), (name, key)
    for image in whole.images:
        assert image["alt"]
        kind, _, data = image["src"].partition(";base64,")
        picture = base64.b64decode(data, validate=True)
        assert kind == "data:image/svg+xml"
        # Letters are paths, and what is referred to is inside.
        assert b"<text" not in picture
        assert b"<image" not in picture
        assert {link[:1] for link in re.findall(rb'href="([^"]*)"', picture)} <= {b"#"}
    text = (everything / "page.html").read_text()
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    for what in ("default-src 'none'", "prefers-color-scheme: dark", "width=device-width"):
        assert what in text


@pytest.mark.usefixtures("whole")
def test_the_same_files_give_the_same_page(everything: Path):
    first = (everything / "page.html").read_bytes()
    assert report.write(everything, everything / "page.html").read_bytes() == first


def test_every_link_on_the_page_leads_somewhere(whole: Page):
    anchors = {attributes.get("id") for _, attributes in whole.elements}
    links = [a["href"] for name, a in whole.elements if name == "a" and a["href"][0] == "#"]
    assert len(links) == len(whole.sections) - 1
    assert {link[1:] for link in links} <= anchors


def test_everything_says_where_it_comes_from(whole: Page):
    said = {"Made up": "made", "The engine": "cpu", "Schedules": "grid", "Memory": "memory"}
    for title, name in said.items():
        line = f"Made-up CPU, 2 cores · 2030-01-02 · commit 01234567 · {name}.json"
        assert line in whole.sections[title]
    assert "Made-up GPU 1 · 2030-01-02 · commit 01234567 · gpu.json" in whole.sections["On a GPU"]
    assert "python 3.99.1; without jax" in whole.sections["Files"]


def test_what_vectors_gain(whole: Page):
    assert whole.tables["Code in LLVM's language"][1] == ["sums", "3.00", "2.00", "1.50×"]


def test_what_a_file_says_is_text(tmp_path: Path, rng: np.random.Generator):
    line = contest(rng, "<script>alert(1)</script>", "a & b")
    save(tmp_path, "cpu", {"engine": [line], "startup": []}, commit='"><script>')
    shown = show(tmp_path)
    assert "script" not in [name for name, _ in shown.elements]
    assert "the work of <script>alert(1)</script>" in shown.sections["The engine"]
    assert "a & b" in [row[0] for row in shown.tables["The engine"]]


# -- Which file is shown --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worse", "mark"),
    [
        ({"date": "2029-12-31T00:00:00+00:00"}, ""),
        ({"dirty": True}, "uncommitted changes"),
        ({"quick": True}, "quick"),
        ({"done": False}, "unfinished"),
    ],
)
def test_the_newest_of_the_clean_and_complete_runs_is_shown(
    worse: Results, mark: str, tmp_path: Path, rng: np.random.Generator
):
    good, bad = (experiment(rng, "T=10") for _ in range(2))
    save(tmp_path, "a", bad, **({"date": LATER} | worse))
    alone = show(tmp_path)
    assert mark in alone.sections["Made up"]
    assert alone.row("Overview", "Made up")[1] == (mark or "complete")
    assert close(alone.after("Made up", "autograd")[0][1], 1e3 * bad["pieces"]["T=10"]["theirs"])
    save(tmp_path, "b", good)
    both = show(tmp_path)
    assert close(both.after("Made up", "autograd")[0][1], 1e3 * good["pieces"]["T=10"]["theirs"])
    assert both.row("Overview", "Made up")[1] == "complete"
    assert both.row("Files", "a.json")[1] == "superseded" + (f"; {mark}" if mark else "")
    assert both.row("Files", "b.json")[1] == "shown"


def test_every_device_has_its_own(tmp_path: Path, rng: np.random.Generator):
    devices = CPU, CPU | {"family, model, stepping": ["26", "2", "1"]}, GPU
    runs = [experiment(rng, "T=10") for _ in devices]
    for k, (results, device) in enumerate(zip(runs, devices, strict=True)):
        save(tmp_path, "abc"[k], results, device=device)
    shown = show(tmp_path)
    for row, results in zip(shown.after("Made up", "autograd"), runs, strict=True):
        assert close(row[1], 1e3 * results["pieces"]["T=10"]["theirs"])
    places = [row[1] for row in shown.after("Overview", "Made up")]
    newer = "Made-up CPU, family 26, model 2, 2 cores"
    assert places == ["Made-up CPU, 2 cores", newer, "Made-up GPU 1"]


def test_lines_of_the_engine_are_the_newest_of_each(tmp_path: Path, rng: np.random.Generator):
    old = [contest(rng, "a", "them"), contest(rng, "b", "them")]
    new, changed = [contest(rng, "b", "them")], [contest(rng, "a", "them")]
    save(tmp_path, "old", {"engine": old, "startup": []}, commit="1" * 40)
    save(tmp_path, "new", {"engine": new, "startup": []}, date=LATER, commit="2" * 40)
    save(tmp_path, "dirty", {"engine": changed, "startup": []}, date=LATER, dirty=True)
    page = show(tmp_path)
    rows = iter(page.tables["The engine"])
    shown = {row[0]: next(rows)[-2] for row in rows if row[0].startswith("the work of")}
    assert list(shown) == [f"the work of a · commit {'1' * 8}", f"the work of b · commit {'2' * 8}"]
    for text, line in zip(shown.values(), (old[0], new[0]), strict=True):
        assert close(text, 1e3 * line["median_seconds"]["them"])
    assert page.row("Files", "dirty.json")[1] == "superseded; uncommitted changes"


def test_a_grid_of_some_chains_does_not_replace_one_of_all(
    tmp_path: Path, rng: np.random.Generator
):
    of = {"pairs_in_order": [0, 0]}
    save(tmp_path, "all", of | {"chains": {name: chain(rng, 1, 1, 1) for name in "xy"}})
    command = "python -m bench.grid --only x"
    part = of | {"chains": {"x": chain(rng, 1, 1, 1)}}
    save(tmp_path, "part", part, date=LATER, command=command)
    shown = show(tmp_path)
    assert shown.sections["Schedules"].count("2 chains") == 1
    assert shown.row("Files", "part.json")[1] == "superseded; a part"


def test_what_is_no_result_is_named(tmp_path: Path):
    (tmp_path / "torn.json").write_text('{"commit": "01')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "bare.json").write_text('{"engine": [], "commit": ""}')
    save(tmp_path, "other", {"what": 1})
    save(tmp_path, "gone", {"experiment": "gone"})
    said = {name: why for name, _, why in show(tmp_path).tables["Files"][1:]}
    assert said.pop("torn.json").startswith("not a JSON object")
    assert said.pop("list.json").startswith("not a JSON object")
    assert said == {
        "bare.json": "without dirty, date, command, device, versions",
        "other.json": "of no known kind",
        "gone.json": "of no known kind",
    }


# -- Experiments ----------------------------------------------------------------------------------


def test_rows_pictures_and_what_holds_for_all(tmp_path: Path, rng: np.random.Generator):
    results = experiment(rng, "T=10", "T=30", "T=100")
    pieces = results["pieces"]
    pieces["T=30"]["paper"] = 2.75
    save(tmp_path, "made", results)
    shown = show(tmp_path)
    assert shown.images[0]["alt"] == "Made-up times"
    assert 'Made-up times. What is "seen" at T < 30' in shown.sections["Made up"]
    assert "H20rate1e-05sizes1, 2" in shown.sections["Made up"]
    rows = shown.after("Made up", "autograd")
    for (ratio, paper, theirs, ours), piece in zip(rows, pieces.values(), strict=True):
        assert close(theirs, 1e3 * piece["theirs"])
        assert close(ours, 1e3 * piece["ours"])
        assert close(ratio, piece["theirs"] / piece["ours"])
        assert paper == ("2.75×" if "paper" in piece else "")
    works = [row[0] for row in shown.tables["Made up"] if len(row) == 1]
    assert works == ["backward, T=10", "backward, T=30", "backward, T=100"]
    assert shown.tables["Beside the paper"][1:] == [
        ["backward, T=30"],
        ["autograd", *rows[1], "Made-up CPU"],
    ]


def test_without_published_numbers_there_is_no_column_for_them(
    tmp_path: Path, rng: np.random.Generator
):
    save(tmp_path, "made", experiment(rng, "T=10"))
    shown = show(tmp_path)
    assert "Beside the paper" not in shown.sections
    assert shown.tables["Made up"][0] == ["against", "ratio", "theirs, ms", "ours, ms"]


def test_missing_peers_are_named_with_the_reason(tmp_path: Path, rng: np.random.Generator):
    results = experiment(rng, "T=10", "T=30")
    for piece in results["pieces"].values():
        piece["missing"] = {"jax": "not installed"}
    results["pieces"]["T=30"]["missing"]["MKL"] = "too large"
    save(tmp_path, "made", results)
    said = show(tmp_path).sections["Made up"]
    assert "Missing:jax: not installed (T=10; T=30)MKL: too large (T=30)" in said


@pytest.mark.parametrize("why", ["ModuleNotFoundError", "KeyError: 'theirs'"])
def test_what_cannot_be_shown_is_said(
    why: str,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    results = experiment(rng, "T=10")
    results["pieces"]["T=10"]["missing"] = {"jax": "not installed"}
    if why == "ModuleNotFoundError":
        monkeypatch.setitem(sys.modules, "bench.made", None)
    else:
        del results["pieces"]["T=10"]["theirs"]
    save(tmp_path, "made", results)
    said = show(tmp_path).sections["Made up"]
    assert f"made.json cannot be shown: {why}" in said
    assert "jax: not installed" in said
    assert f"made.json cannot be shown: {why}" in capsys.readouterr().err


def test_what_no_gpu_has_shown_is_listed(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
):
    said = show(tmp_path).sections["Unproven"]
    for figure in ("16 times", "108 times", "2.75 times", "13.4 times", "2.36 times", "cuSPARSE"):
        assert figure in said

    monkeypatch.setattr(report, "_ON_A_GPU", {"made": ("Made up: a thousand times as fast.",)})
    results = experiment(rng, "T=10")
    save(tmp_path, "cpu", results)
    save(tmp_path, "gpu", results, done=False, device=GPU)
    assert "a thousand times as fast" in show(tmp_path).sections["Unproven"]
    save(tmp_path, "gpu", results, device=GPU)
    assert "Unproven" not in show(tmp_path).sections


# -- The engine, schedules, memory, GPUs ----------------------------------------------------------


def test_the_engine_beside_its_peers(tmp_path: Path, rng: np.random.Generator):
    line = contest(rng, "a", "slow", "fast", missing="MKL")
    medians = line["median_seconds"]
    for peer, times in (("slow", 3), ("fast", 1.5)):
        medians[peer] = times * medians[OURS]
        line["ratios"][peer]["measured"] = times
    line["ratios"]["fast"]["required"] = 1.75
    save(tmp_path, "cpu", {"engine": [line], "startup": [startup(0.0412)]})
    shown = show(tmp_path)
    for peer in ("slow", "fast"):
        _, ratio, asked, missed, theirs, ours = shown.row("The engine", peer)
        assert close(theirs, 1e3 * medians[peer])
        assert close(ours, 1e3 * medians[OURS])
        assert close(ratio, medians[peer] / medians[OURS])
        assert (asked, missed) == {"slow": ("2×", ""), "fast": ("1.75×", "missed")}[peer]
    _, ratio, _, _, theirs, _ = shown.row("The engine", "the floor")
    assert close(theirs, 1e3 * line["floor"]["seconds"])
    assert close(ratio, 1 / line["multiple_of_floor"])
    assert "MKL: no MKL here (the work of a)" in shown.sections["The engine"]
    assert shown.row("The engine", "the import")[1:3] == ["41.2", "300"]


def shares(result: Any) -> list[str]:
    """Return the ratios of a chain's linear and best schedules, as they are written."""
    relative = grid.ratios(result["samples_seconds"])
    return [f"{relative[key]:#.3g}×" for key in ("auto/linear", "auto/best")]


def test_schedules(tmp_path: Path, rng: np.random.Generator):
    chains = {
        "linear is best": chain(rng, 1.02e-3, 1e-3, 2e-3),
        "chunked is best": chain(rng, 2e-3, 2.5e-3, 1.25e-3),
        "as good": chain(rng, 1e-3, 1e-3, 1.1e-3),
    }
    ordered = [grid.ranked(result) for result in chains.values()]
    right, pairs = map(sum, zip(*ordered, strict=True))
    save(tmp_path, "grid", {"chains": chains, "pairs_in_order": [right, pairs]})
    shown = show(tmp_path)
    assert "predictions rank 1 as the medians do: 50.0%" in shown.sections["Schedules"]
    assert shown.row("Schedules", "linear is best")[1:] == [
        *("1.00", "1.02", "1.00", *shares(chains["linear is best"])),
        *("linear(9)", "linear(9)", "1 of 1"),
    ]
    assert shown.row("Schedules", "chunked is best")[1:] == [
        *("2.50", "2.00", "1.25", *shares(chains["chunked is best"])),
        *("linear(9)", "chunked(9,\xa02)", "0 of 1"),
    ]
    assert shown.row("Schedules", "as good")[-1] == "0 of 0"


def test_dots_of_schedules_are_at_the_ratios(rng: np.random.Generator):
    chains = {f"chain {k}": chain(rng, *rng.uniform(1, 1.2, 3)) for k in range(4)}
    chains["slow"] = chain(rng, 1, 50, 1)
    best, linear = pictures.schedules(chains).axes
    for axes, which in ((best, "auto/best"), (linear, "auto/linear")):
        dots = [line.get_xydata()[0] for line in axes.lines if line.get_marker() == "o"]
        for k, ((x, y), result) in enumerate(zip(dots, chains.values(), strict=True)):
            assert (x, y) == (grid.ratios(result["samples_seconds"])[which], k)
        limits = [line.get_xdata()[0] for line in axes.lines if line.get_marker() != "o"]
        assert limits == [1, 1.05, 1.1]
    assert (best.get_xscale(), linear.get_xscale()) == ("linear", "log")


def test_dots_of_the_engine_are_at_the_ratios_of_medians(rng: np.random.Generator):
    lines = [contest(rng, "a", "SciPy @", "MKL", missing="jax"), contest(rng, "b", "SciPy @")]
    (axes,) = pictures.engine(lines).axes
    dots = [x for line in axes.lines if line.get_marker() == "o" for x in line.get_xdata()]
    ratios = [r["measured"] for line in lines for r in line["ratios"].values() if r["measured"]]
    np.testing.assert_allclose(dots, ratios)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["SciPy @", "MKL", "SciPy @"]
    # Quartiles are of the rounds that count.
    counted = np.ravel([lines[0]["samples_seconds"]["SciPy @"][k] for k in (0, 2)])
    expected = np.quantile(counted, [0.25, 0.75]) / lines[0]["median_seconds"][OURS]
    bars = [s for c in axes.collections for s in c.get_segments() if s[0][1] == s[1][1]]
    np.testing.assert_allclose(bars[0][:, 0], expected)


def test_spread_on_a_gpu_is_of_the_samples(rng: np.random.Generator):
    results = races(rng)
    along = plots.sweep(results, "T")
    along[0]["samples_seconds"]["call, warm"].pop(CUDNN)  # the first has no PyTorch
    (times, _), (ratios, _) = np.reshape(plots.figure(results).axes, (2, 2))
    sizes = [race["about"]["T"] for race in along]
    for axes, known in ((times, sizes), (ratios, sizes[1:])):
        drawn = {bars.get_label(): bars for bars in axes.containers}
        assert drawn[OURS].lines[0].get_xdata().tolist() == known
    last = along[-1]["samples_seconds"]["call, warm"]
    theirs, ours = (
        np.quantile(np.ravel(last[name]), (0.25, 0.5, 0.75)) for name in (CUDNN, VALUES)
    )
    for axes, expected in ((times, 1e3 * ours), (ratios, theirs / ours[::-1])):
        bars = next(bars for bars in axes.containers if bars.get_label() == VALUES)
        (_, low), (_, high) = bars.lines[2][0].get_segments()[-1]
        np.testing.assert_allclose([low, bars.lines[0].get_ydata()[-1], high], expected)


def test_a_sweep_of_one_size_is_not_drawn(rng: np.random.Generator):
    (times, ratios) = plots.figure(races(rng)[:2]).axes
    assert ratios.get_xlabel() == "sequence length T"
    assert times.get_title() == "T steps, B=16"


def test_memory(tmp_path: Path):
    case = {"chain": "a chain", "schedule": "Schedule.linear(9)", "threads": 2}
    case |= {"limit_bytes": 8 << 20, "workspace_bytes": 7 << 19, "within_limit": False}
    save(tmp_path, "memory", {"cases": [case | {"taken_bytes": 9 << 20}]})
    row = show(tmp_path).row("Memory", "a chain")
    assert row[1:] == ["linear(9)", "2", "8.00", "3.50", "9.00", "over the limit"]


def test_a_run_on_a_gpu(tmp_path: Path, rng: np.random.Generator):
    results = races(rng)
    results[0]["skipped"] = {"jax": "computes on the CPU"}
    parts = {
        "memcheck": {"ok": False, "summary": "MISSING: no compute-sanitizer"},
        "tests/gpu/cuda_scan.py": {
            "ok": False,
            "summary": "1 failed",
            "failed": ["test_a: because"],
        },
        "jax": {"ok": True, "summary": "none", "missing": {"jax T=10": "not installed"}},
        "sparse": {"ok": False, "summary": "0 of 1", "failed": {"level n=3": "ValueError: no"}},
    }
    save(tmp_path, "gpu", {"races": results, "wanted": wanted(results), "parts": parts}, device=GPU)
    shown = show(tmp_path)
    said = shown.sections["On a GPU"]
    state = "memcheck failed, tests/gpu/cuda_scan.py failed, sparse failed"
    assert shown.row("Overview", "On a GPU")[1] == state
    assert "jax T=10: not installed (jax)" in said
    assert f"jax: computes on the CPU ({results[0]['name']})" in said
    assert "tests/gpu/cuda_scan.py: test_a: because" in said
    assert "sparse: level n=3: ValueError: no" in said
    for line in wanted(results):
        rows = shown.tables["On a GPU"]
        _, met, measured, asked = rows[rows.index([line["what"]]) + 1]
        assert close(measured, line["measured"])
        assert number(asked) == line.get("at least", line.get("at most"))
        assert (met == "met") == line["met"]
    rows = iter(shown.tables["On a GPU"])
    for race in sorted(results, key=sections._of_sizes):
        assert next(row for row in rows if row == [race["work"]])
        for ratio in race["ratios"]:
            names, clock, warm, theirs, ours = next(rows)
            more = " · ours with values" if ratio["ours"] == VALUES else ""
            assert [names, clock] == [ratio["theirs"] + more, "call"]
            medians = race["median_seconds"]["call, warm"]
            assert close(theirs, 1e3 * medians[ratio["theirs"]])
            assert close(ours, 1e3 * medians[ratio["ours"]])
            assert close(warm, ratio["measured"]["warm"])
        floor = next(rows)
        assert close(floor[3], 1e3 * race["floors"]["the work"]["seconds"])


def test_calls_of_a_run_on_a_gpu_are_beside_each_other_and_no_rehearsal_is(
    tmp_path: Path, rng: np.random.Generator
):
    left = {"ok": False, "state": "left", "summary": "not run"}
    cases = [{"name": "levels", "ok": True}, {"name": "chained", "ok": False, "why": "wrong"}]
    first = {
        "families": {"ok": False, "summary": "1 failed", "seconds": 12.5, "cases": cases},
        "rnn": left,
        "pair": {"ok": True, "state": "running", "summary": "1 of 1 races"},
    }
    racecheck = {"ok": False, "informs": True, "summary": "RACECHECK SUMMARY: 1 hazard"}
    results = {"races": [], "wanted": []}
    for name, parts in (("first", first), ("second", {"racecheck": racecheck})):
        asked = {"asked": {"seconds": 150, "parts": [name]}, "rehearsal": False}
        save(tmp_path, name, results | asked | {"parts": parts}, device=GPU)
    shown = show(tmp_path)
    assert ["families", "failed", "1 failed", "12.5"] in shown.tables["On a GPU"]
    assert shown.row("On a GPU", "rnn") == ["rnn", "not run", "not run", ""]
    assert shown.row("On a GPU", "racecheck")[1] == "noted"
    assert ["chained", "failed", "wrong"] in shown.tables["On a GPU"]
    assert shown.sections["On a GPU"].count("Parts of the run") == 1
    states = [row[0] for row in shown.after("Overview", "On a GPU")]
    first_said = "families failed, rnn not run, pair cut off · --only first"
    assert states == [first_said, "complete · --only second"]
    rehearsed = {"parts": {"jax": left}, "rehearsal": True}
    save(tmp_path, "rehearsal", results | rehearsed, device={"gpu": "stand-in", "cpu": "a CPU"})
    assert "stand-in" not in show(tmp_path).sections["On a GPU"]
    assert "stand-in" not in show(tmp_path).sections["Overview"]


def test_what_is_asked_goes_by_all_calls_of_a_run(tmp_path: Path, rng: np.random.Generator):
    results = races(rng)
    for name, some in (("first", results[:2]), ("second", results[2:])):
        asked = {"asked": {"seconds": 150, "parts": [name]}, "wanted": wanted(some)}
        save(tmp_path, name, asked | {"parts": {}, "races": some}, device=GPU)
    shown = show(tmp_path)
    rows = shown.tables["On a GPU"]
    for line in wanted(results):
        assert rows.count([line["what"]]) == 1
    assert rows.count([results[0]["work"]]) == 1
    assert "On Made-up GPU 1, commit" not in shown.sections["On a GPU"]
    # Of another commit they are another run.
    other = {"asked": {"seconds": 150, "parts": ["rnn"]}, "wanted": [], "parts": {}}
    save(tmp_path, "other", other | {"races": results[:1]}, device=GPU, commit="f" * 40)
    shown = show(tmp_path)
    for commit in ("01234567", "ffffffff"):
        assert f"On Made-up GPU 1, commit {commit}" in shown.sections["On a GPU"]


def test_the_floor_is_beside_what_there_is_of_ours(tmp_path: Path, rng: np.random.Generator):
    race = races(rng)[0] | {"ratios": []}
    race["median_seconds"] = {"host, warm": {VALUES: 4e-3}}
    race["samples_seconds"]["call, warm"] = {}
    race["floors"] = {"the work": {"seconds": 1e-3, "multiple": {}}}
    race |= {"name": "rnn parameters", "about": {"T": 1000, "B": 16}}
    save(tmp_path, "gpu", {"races": [race], "parts": {}, "wanted": []}, device=GPU)
    row = show(tmp_path).row("On a GPU", "the floor · ours with values")
    assert row[1:] == ["host", "0.250×", "1.00", "4.00"]


@pytest.mark.parametrize(
    ("calls", "more", "open_"),
    [
        ([["first"]], {}, True),
        ([["first"], ["second"]], {}, False),
        ([["first", "second"]], {}, False),
        ([["first"], ["second"]], {"commit": "f" * 40}, True),
        ([["first"], ["second"]], {"dirty": True}, True),
    ],
)
def test_a_part_of_a_run_on_a_gpu_proves_no_claim(
    calls: list[list[str]], more: Results, open_: bool, tmp_path: Path
):
    for k, parts in enumerate(calls):
        asked = {"asked": {"seconds": 150, "parts": parts}, "races": [], "parts": {}}
        save(tmp_path, str(k), asked, device=GPU, **(more if k else {}))
    said = show(tmp_path).sections["Unproven"]
    assert ("cuBLAS" in said) == open_
    assert "several devices" in said


# -- Numbers --------------------------------------------------------------------------------------


@given(st.floats(1e-9, 1e12), st.integers(1, 6))
def test_significant_digits(x: float, digits: int):
    text = page.significant(x, digits)
    shown = float(text.replace(",", ""))
    assert abs(shown - x) <= 0.5000001 * 10 ** (1 - digits) * x
    whole, _, decimals = text.partition(".")
    assert re.fullmatch(r"\d{1,3}(,\d{3})*", whole)
    if decimals:
        assert len((whole + decimals).replace(",", "").lstrip("0")) == digits


def test_a_round_number_keeps_its_digits():
    texts = [page.significant(x) for x in (0.94, 9.999, 999.6, 79_691, 0)]
    assert texts == ["0.940", "10.0", "1,000", "79,700", "0"]


@given(st.lists(st.floats(1e-6, 1e9) | st.none(), min_size=1))
def test_decimal_points_are_below_each_other(numbers: list[float | None]):
    cells = ["" if x is None else page.significant(x) + "×" for x in [1.0, *numbers]]
    table = page.table(["what", "x"], [["a", cell] for cell in cells], ["x"])
    numbers_shown = re.findall(r'<td class="number">(.*?)</td>', table)
    assert [cell.partition("<")[0] for cell in numbers_shown] == cells
    after = set()
    for cell in filter(None, numbers_shown):
        text, _, pad = cell.partition("×")
        point, decimals = text.partition(".")[1:]
        after.add(len(point + decimals + "".join(re.findall(r'data-pad="(.*?)"', pad))))
    assert len(after) <= 1


def test_rows_of_the_same_work_stand_below_it_and_empty_columns_are_left_out():
    rows = [["a", "x", "", "1"], ["a", "y", "", "2"], ["b", "x", "", "3"]]
    heads = ["work", "against", "of no use", "ms"]
    table = page.table(heads, rows, ["ms"], grouped=True)
    texts = [re.sub("<.*?>", " ", row).split() for row in re.findall("<tr[ >].*?</tr>", table)]
    assert texts == [["against", "ms"], ["a"], ["x", "1"], ["y", "2"], ["b"], ["x", "3"]]
    assert page.table(heads, []) == ""


def test_a_picture_of_very_many_points_is_one_of_pixels(monkeypatch: pytest.MonkeyPatch):
    (drawing,) = drawings_of({"pieces": {"T=10": {"ours": 1}}})
    assert "data:image/svg+xml;base64," in page.figure(drawing)
    monkeypatch.setattr(page, "_LARGE", 1000)
    assert "data:image/png;base64," in page.figure(drawing)


# -- Tables of the README and the site ------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    return tmp_path / "README.md"


@pytest.fixture
def folder(copy: Path) -> Path:
    return copy.parent / "results"


Tables = dict[str, readme.Table]


@pytest.fixture
def unpatched_tables(_two_tables: Tables) -> Tables:
    return _two_tables


@pytest.fixture(autouse=True)
def _two_tables(monkeypatch: pytest.MonkeyPatch) -> Tables:
    """Have tables of made-up experiments, and of the schedules one line; return the real ones."""
    patched = {
        "first": readme.Table(
            ("you have", "use"),
            (
                readme.Line(("A", "a"), "made", "backward, T=10", "autograd"),
                readme.Line(("B", "b"), "grid", "made chain, by auto", "Schedule.linear(3)"),
                readme.Line(("C", "c"), "made", "backward, T=30", "autograd"),
            ),
        ),
        "second one": readme.Table(
            ("work",), (readme.Line(("D",), "made", "backward, T=30", "autograd"),)
        ),
    }
    whole = readme.TABLES
    monkeypatch.setattr(readme, "TABLES", patched)
    monkeypatch.setattr(readme, "NAMES", ("made",))
    return whole


def cells_of(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def schedules(linear: float, auto: float) -> Results:
    medians = {"auto": auto, "Schedule.linear(3)": linear}
    return {"chains": {"made chain": {"median_seconds": medians}}}


def test_tables_replace_what_is_between_their_markers_and_nothing_else(
    folder: Path, copy: Path, rng: np.random.Generator
):
    results = experiment(rng, "T=10", "T=30")
    linear, auto = 10 ** rng.uniform(-4, 2, 2)
    save(folder, "made", results)
    save(folder, "grid", schedules(linear, auto), date="2030-02-03T00:00:00+00:00")
    before, after = "# Title \n\n| work | 1 |\n\n", "\nMore <!-- of it -->\n\n\n<!-- end -->\n"
    between = "\n<!-- table: second one -->\n"
    copy.write_text(
        f"{before}<!-- table: first -->\nold\n\nthings<!-- end -->{between}<!-- end -->{after}"
    )
    readme.update_tables(copy, folder)
    text = copy.read_text()
    assert text.startswith(before + "<!-- table: first -->\n")
    assert text.endswith("\n<!-- end -->" + after)
    first, second = text.removeprefix(before).split(between)
    heads, rule, *rows = cells_of(first)
    assert heads == ["you have", "ratio", "use", "against", "theirs, ms", "ours, ms"]
    assert set(rule) == {"---"}
    seconds = [(piece["theirs"], piece["ours"]) for piece in results["pieces"].values()]
    seconds.insert(1, (linear, auto))
    assert [[row[0], *row[2:4]] for row in rows] == [
        ["A", "a", "autograd"],
        ["B", "b", "Schedule.linear(3)"],
        ["C", "c", "autograd"],
    ]
    for row, (theirs, ours) in zip(rows, seconds, strict=True):
        assert close(row[1], theirs / ours, 2)
        assert row[1].endswith("×")
        assert close(row[4], 1e3 * theirs)
        assert close(row[5], 1e3 * ours)
    *_, row = cells_of(second)
    assert [row[0], row[2]] == ["D", "autograd"]
    said = " ".join(first.split())
    assert "[lines 1, 3](results/made.json), Made-up CPU, 2 cores, 2030-01-02;" in said
    assert "[line 2](results/grid.json), Made-up CPU, 2 cores, 2030-02-03." in said
    for link in re.findall(r"\]\((.*?)\)", text):
        assert (copy.parent / link).is_file()
    readme.update_tables(copy, folder)
    assert copy.read_text() == text


@pytest.mark.parametrize("late", ["old machine", "new machine"])
def test_a_line_that_several_machines_have_is_that_of_the_latest_run(
    late: str, folder: Path, copy: Path, rng: np.random.Generator
):
    for cpu in ("old machine", "new machine"):
        date = f"2030-01-0{1 + (cpu == late)}T00:00:00+00:00"
        save(folder, cpu, experiment(rng, "T=30"), date=date, device={"cpu": cpu})
    copy.write_text("<!-- table: second one -->\n<!-- end -->\n")
    readme.update_tables(copy, folder)
    assert f"({folder.name}/{late}.json), {late}, 2030-01-02." in copy.read_text()


@pytest.mark.parametrize("bad", [{"dirty": True}, {"quick": True}, {"done": False}])
def test_tables_show_clean_and_complete_results_only(
    bad: Results, folder: Path, copy: Path, rng: np.random.Generator
):
    save(folder, "made", experiment(rng, "T=30"), **bad)
    copy.write_text("<!-- table: second one -->\n<!-- end -->\n")
    with pytest.raises(
        ValueError, match=r"no complete results .* 'backward, T=30' beside 'autograd'"
    ):
        readme.update_tables(copy, folder)
    assert copy.read_text() == "<!-- table: second one -->\n<!-- end -->\n"


def test_a_loss_at_the_last_step_has_a_line_as_soon_as_it_is_measured(
    folder: Path, copy: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
):
    every = readme.Line(("GRU *", "a"), "made", "backward, T=30", readme.PYTORCH)
    table = readme.Table(("you have", "use"), (every, every.at_last()))
    monkeypatch.setattr(readme, "TABLES", {"first": table})
    for peer in (readme.PYTORCH, readme.FLUSHING):
        monkeypatch.setattr(
            sys.modules["bench.made"],
            "EXPERIMENT",
            replace(
                report.load("made"),
                rows=lambda results, peer=peer: [
                    replace(row, peer=peer if row.work.endswith("last step") else readme.PYTORCH)
                    for row in rows_of(results)
                ],
            ),
        )
        save(folder, "made", experiment(rng, "T=30"))
        copy.write_text("<!-- table: first -->\n<!-- end -->\n")
        readme.update_tables(copy, folder)
        _, _, *rows = cells_of(copy.read_text())
        assert [row[0] for row in rows] == ["GRU *"]
        assert "[line 1](" in copy.read_text()

        results = experiment(rng, "T=30", "T=30, loss at the last step")
        save(folder, "made", results)
        readme.update_tables(copy, folder)
        _, _, *rows = cells_of(copy.read_text())
        assert [(row[0], row[2], row[3]) for row in rows] == [
            ("GRU *", "a", readme.PYTORCH),
            ("GRU, loss at the last step *", "a", peer),
        ]
        for row, piece in zip(rows, results["pieces"].values(), strict=True):
            assert close(row[1], piece["theirs"] / piece["ours"], 2)
        assert "[lines 1–2](" in copy.read_text()


def test_the_tables_have_both_losses_of_the_same_networks(unpatched_tables: Tables):
    for name, table in unpatched_tables.items():
        pairs = [
            (table.lines[k - 1], line) for k, line in enumerate(table.lines) if line.is_optional
        ]
        assert len(pairs) == 4, name
        assert all(every.at_last() == last for every, last in pairs)
    works = {line.work for table in unpatched_tables.values() for line in table.lines}
    measured = {f"Front door: {case.name}" for case in doors.MODULES}
    measured |= {f"Training step: {case.name}" for case in step.CASES}
    assert {work for work in works if work.endswith("last step")} <= measured


def test_markers_that_are_wrong_are_refused(folder: Path, copy: Path):
    copy.write_text("<!-- table: third -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="table: third -->: expected one of first, second one"):
        readme.update_tables(copy, folder)
    copy.write_text("<!-- table: first -->\n")
    with pytest.raises(ValueError, match="no table between"):
        readme.update_tables(copy, folder)


def test_each_section_is_a_page_of_the_site(tmp_path: Path, rng: np.random.Generator):
    results, pages = tmp_path / "results", tmp_path / "pages"
    results.mkdir()
    save(results, "made", experiment(rng, "T=10"))
    written = report.write_pages(results, pages)
    assert sorted(pages.iterdir()) == sorted(written)
    titles = [path.read_text().splitlines()[0] for path in written]
    assert {"# Overview", "# Made up", "# Files"} <= set(titles)
    text = (pages / "made-up.md").read_text()
    assert "made.json" in text
    (pages / "gone.md").touch()
    before = {path: path.stat().st_mtime_ns for path in written}
    assert report.write_pages(results, pages) == written
    assert {path: path.stat().st_mtime_ns for path in sorted(pages.iterdir())} == before
