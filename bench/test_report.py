"""The report and the README's tables, from made-up results of every kind."""

from __future__ import annotations

import base64
import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from . import grid, page, pictures, readme, report
from .contests import OURS
from .experiment import RESULTS, Drawing, Experiment, Results, Row
from .gpu_table import wanted
from .test_gpu import rnn_races

VOID = {"meta", "img", "link", "br", "hr"}


class Page(HTMLParser):
    """A page as it is read: every element is closed, in order.

    Attributes
    ----------
    sections : dict
        The text of each section, by its title.
    tables : dict
        The rows of all tables of each section: the texts of their cells.
    images : list of dict
        Attributes of the pictures.
    elements : list of tuple
        All elements with their attributes.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.sections: dict[str, str] = {"": ""}
        self.tables: dict[str, list[list[str]]] = {}
        self.images: list[dict[str, str]] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self._open: list[str] = []
        self._title = ""
        self.feed(path.read_text())
        self.close()
        assert not self._open

    def handle_starttag(self, name: str, attributes: Any) -> None:
        found = dict(attributes)
        self.elements.append((name, found))
        if name not in VOID:
            self._open.append(name)
        if name == "img":
            self.images.append(found)
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
        """The only row that begins with these cells."""
        (found,) = [row for row in self.tables[section] if tuple(row[: len(starts)]) == starts]
        return found

    def after(self, section: str, name: str) -> list[list[str]]:
        """What follows the cell with this name, in every row that has it."""
        rows = self.tables[section]
        return [row[row.index(name) + 1 :] for row in rows if name in row]


def number(text: str) -> float:
    return float(text.strip("×≥≤ ").replace(",", ""))


def close(text: str, value: float, digits: int = 3) -> bool:
    """Whether a number is shown as it is, but for rounding."""
    return abs(number(text) - value) <= 0.5001 * 10 ** (1 - digits) * abs(value)


# -- Made-up results ------------------------------------------------------------------------------

Save = Callable[..., Path]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


@pytest.fixture
def save(folder: Path) -> Save:
    """Writes results as a run would, where nothing else is said on a clean commit."""

    def save(name: str, results: Results, **come_from: Any) -> Path:
        head = {
            "commit": "0123456789abcdef",
            "dirty": False,
            "date": "2030-01-02T03:04:05+00:00",
            "command": "python -m bench",
            "device": {"cpu": "Made-up CPU", "cores": 8, "cores used": 2},
            "versions": {"python": "3.99.1", "jax": None},
        }
        path = folder / f"{name}.json"
        path.write_text(json.dumps(head | come_from | results))
        return path

    return save


@pytest.fixture
def show(folder: Path, tmp_path: Path) -> Callable[[], Page]:
    return lambda: Page(report.write(folder, tmp_path / "page.html"))


def contest(rng: np.random.Generator, name: str, *peers: str, missing: str = "") -> Results:
    """A line as the engine's comparison writes it; every peer is asked to be twice as slow."""
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


def rows_of(results: Results) -> list[Row]:
    return [
        Row(f"backward, {key}", "autograd", piece["theirs"], piece["ours"], piece.get("paper"))
        for key, piece in results["pieces"].items()
    ]


def drawings_of(results: Results) -> list[Drawing]:
    figure = Figure(figsize=(3, 2))
    figure.subplots().plot([piece["ours"] for piece in results["pieces"].values()])
    return [Drawing("Made-up times", 'What is "seen" at T < 30', figure)]


def pieces(rng: np.random.Generator, *keys: str) -> Results:
    return {
        key: {"theirs": 10 ** rng.uniform(-4, 2), "ours": 10 ** rng.uniform(-4, 2)} for key in keys
    }


def experiment(found: Results, **others: Any) -> Results:
    about = {"H": 20, "rate": 1e-5, "sizes": [1, 2], "graphed": True}
    fields = {"experiment": "made", "title": "Made up", "quick": False, "about": about}
    return fields | {"pieces": found, "done": True} | others


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The only experiment there is."""
    module = types.ModuleType("bench.made")
    module.EXPERIMENT = Experiment(  # type: ignore[attr-defined]
        "made", "Made up", lambda options: [], lambda options: {}, drawings_of, rows_of
    )
    monkeypatch.setitem(sys.modules, "bench.made", module)
    for reader in (report, readme):
        monkeypatch.setattr(reader, "NAMES", ("made",))
    return module


# -- The page -------------------------------------------------------------------------------------


def test_without_any_file_the_page_says_what_has_not_been_run(show: Callable[[], Page]):
    found = show()
    titles = ["", "Overview", "Made up", "The engine", "Schedules", "Memory", "On a GPU", "Files"]
    assert list(found.sections) == titles
    assert [row[-1] for row in found.tables["Overview"]] == ["state"] + ["not run yet"] * 5
    for title in titles[2:6]:
        assert "Not run yet: python -m bench" in found.sections[title]
    assert "No GPU has run this yet" in found.sections["On a GPU"]
    assert "No GPU has run this yet" in found.sections["Overview"]


@pytest.fixture
def everything(save: Save, rng: np.random.Generator) -> None:
    save("made", experiment(pieces(rng, "T=10", "T=30")))
    save(
        "cpu", {"engine": [contest(rng, "a", "SciPy @", missing="MKL")], "startup": [startup(0.1)]}
    )
    save("grid", {"chains": {"a chain": chain(rng, 1, 1, 2)}, "pairs_in_order": [1, 1]})
    case = {"limit_bytes": 1, "workspace_bytes": 1, "taken_bytes": 1, "within_limit": True}
    case |= {"chain": "a chain", "schedule": "Schedule.linear(9)", "threads": 2}
    save("memory", {"cases": [case]})
    gpu = {"gpu": "Made-up GPU 1", "cpu": "Made-up CPU"}
    found = {"races": rnn_races(), "wanted": wanted(rnn_races()), "parts": {}}
    save("gpu", found, device=gpu)
    curves = {"train": [2.0, 1.5, 1.0, 0.5], "test": [2.0, 1.0]}
    apart = {name: {"train": 0.0123, "test": 0.0045} for name in ("scan", "reversed")}
    losses = dict.fromkeys(("autograd", "scan", "reversed"), curves)
    old = {"images": "digits", "epochs": 2, "batch": 16, "losses": losses}
    save("lenet5-digits", old | {"largest_difference_from_autograd": apart})


@pytest.mark.usefixtures("everything")
def test_the_page_needs_nothing_else(show: Callable[[], Page], tmp_path: Path):
    found = show()
    assert len(found.images) == 5
    for name, attributes in found.elements:
        for key, value in attributes.items():
            if key == "href" and name == "a":
                assert value.startswith(("#", "https://arxiv.org/"))
            else:
                assert "//" not in value or (name, key) == ("img", "src"), (name, key)
    for image in found.images:
        assert image["alt"]
        kind, _, data = image["src"].partition(";base64,")
        picture = base64.b64decode(data, validate=True)
        if kind == "data:image/png":
            assert picture.startswith(b"\x89PNG")
            continue
        assert kind == "data:image/svg+xml"
        # Letters are paths, and what is referred to is inside.
        assert b"<text" not in picture
        assert b"<image" not in picture
        assert {link[:1] for link in re.findall(rb'href="([^"]*)"', picture)} <= {b"#"}
    text = (tmp_path / "page.html").read_text()
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in text
    for what in ("prefers-color-scheme: dark", "@media print", "width=device-width"):
        assert what in text


@pytest.mark.usefixtures("everything")
def test_the_same_files_give_the_same_page(folder: Path, tmp_path: Path):
    first, second = (report.write(folder, tmp_path / f"{k}.html").read_bytes() for k in (1, 2))
    assert first == second


@pytest.mark.usefixtures("everything")
def test_every_link_on_the_page_leads_somewhere(show: Callable[[], Page]):
    found = show()
    anchors = {attributes.get("id") for _, attributes in found.elements}
    links = [a["href"] for name, a in found.elements if name == "a" and a["href"][0] == "#"]
    assert len(links) == len(found.sections) - 1
    assert {link[1:] for link in links} <= anchors


@pytest.mark.usefixtures("everything")
def test_everything_says_where_it_comes_from(show: Callable[[], Page]):
    found = show()
    said = {"Made up": "made", "The engine": "cpu", "Schedules": "grid", "Memory": "memory"}
    for title, name in said.items():
        line = f"Made-up CPU, 2 cores · 2030-01-02 · commit 01234567 · {name}.json"
        assert line in found.sections[title]
    assert "Made-up GPU 1 · 2030-01-02 · commit 01234567 · gpu.json" in found.sections["On a GPU"]
    assert "No GPU has run this yet" not in found.sections["Overview"]
    assert "python 3.99.1; without jax" in found.sections["Files"]


def test_what_a_file_says_is_text(save: Save, show: Callable[[], Page], rng: np.random.Generator):
    line = contest(rng, "<script>alert(1)</script>", "a & b")
    save("cpu", {"engine": [line], "startup": []}, commit='"><script>')
    found = show()
    assert "script" not in [name for name, _ in found.elements]
    assert "the work of <script>alert(1)</script>" in found.sections["The engine"]
    assert "a & b" in [row[0] for row in found.tables["The engine"]]


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
    worse: Results, mark: str, save: Save, show: Callable[[], Page], rng: np.random.Generator
):
    good, bad = pieces(rng, "T=10"), pieces(rng, "T=10")
    later = {"date": "2030-06-01T00:00:00+00:00"}
    save("a", experiment(bad) | later | worse)
    alone = show()
    assert mark in alone.sections["Made up"]
    assert alone.row("Overview", "Made up")[-1] == (mark or "complete")
    assert close(alone.after("Made up", "autograd")[0][0], 1e3 * bad["T=10"]["theirs"])
    save("b", experiment(good))
    both = show()
    assert close(both.after("Made up", "autograd")[0][0], 1e3 * good["T=10"]["theirs"])
    assert both.row("Overview", "Made up")[-1] == "complete"
    assert both.row("Files", "a.json")[-1] == "superseded" + (f"; {mark}" if mark else "")
    assert both.row("Files", "b.json")[-1] == "shown"


def test_every_device_has_its_own(save: Save, show: Callable[[], Page], rng: np.random.Generator):
    cpu, gpu = pieces(rng, "T=10"), pieces(rng, "T=10")
    save("a", experiment(cpu))
    save("b", experiment(gpu), device={"gpu": "Made-up GPU 1", "cpu": "Made-up CPU"})
    found = show()
    for row, piece in zip(found.after("Made up", "autograd"), (cpu, gpu), strict=True):
        assert close(row[0], 1e3 * piece["T=10"]["theirs"])
    assert [row[1] for row in found.tables["Overview"] if row[0] == "Made up"] == [
        "Made-up CPU, 2 cores",
        "Made-up GPU 1",
    ]


def test_lines_of_the_engine_are_the_newest_of_each(
    save: Save, show: Callable[[], Page], rng: np.random.Generator
):
    old = [contest(rng, "a", "them"), contest(rng, "b", "them")]
    new, changed = [contest(rng, "b", "them")], [contest(rng, "a", "them")]
    save("old", {"engine": old, "startup": []}, commit="1" * 40)
    later = "2030-06-01T00:00:00+00:00"
    save("new", {"engine": new, "startup": []}, date=later, commit="2" * 40)
    save("dirty", {"engine": changed, "startup": []}, date=later, dirty=True)
    found = show()
    rows = iter(found.tables["The engine"])
    shown = {row[0]: next(rows)[1] for row in rows if row[0].startswith("the work of")}
    assert list(shown) == [f"the work of a · commit {'1' * 8}", f"the work of b · commit {'2' * 8}"]
    for text, line in zip(shown.values(), (old[0], new[0]), strict=True):
        assert close(text, 1e3 * line["median_seconds"]["them"])
    assert found.row("Files", "dirty.json")[-1] == "superseded; uncommitted changes"


def test_what_is_no_result_is_named(folder: Path, show: Callable[[], Page], save: Save):
    (folder / "torn.json").write_text('{"commit": "01')
    (folder / "list.json").write_text("[1]")
    (folder / "bare.json").write_text('{"engine": [], "commit": ""}')
    save("other", {"what": 1})
    found = show()
    assert found.row("Files", "torn.json")[1].startswith("not a JSON object")
    assert found.row("Files", "list.json")[1].startswith("not a JSON object")
    assert found.row("Files", "bare.json")[1] == "without dirty, date, command, device, versions"
    assert found.row("Files", "other.json")[1] == "of no known kind"
    assert [row[-1] for row in found.tables["Files"][1:]] == ["not shown"] * 4


# -- Experiments ----------------------------------------------------------------------------------


def test_rows_pictures_and_what_holds_for_all(
    save: Save, show: Callable[[], Page], rng: np.random.Generator
):
    found = pieces(rng, "T=10", "T=30", "T=100")
    found["T=30"]["paper"] = 2.75
    save("made", experiment(found))
    shown = show()
    assert shown.images[0]["alt"] == 'What is "seen" at T < 30'
    assert 'Made-up times. What is "seen" at T < 30' in shown.sections["Made up"]
    assert "H20rate1e-05sizes1, 2graphedyes" in shown.sections["Made up"]
    rows = shown.after("Made up", "autograd")
    for (theirs, ours, ratio, paper), piece in zip(rows, found.values(), strict=True):
        assert close(theirs, 1e3 * piece["theirs"])
        assert close(ours, 1e3 * piece["ours"])
        assert close(ratio, piece["theirs"] / piece["ours"])
        assert paper == ("2.75×" if "paper" in piece else "")
    works = [row[0] for row in shown.tables["Made up"]]
    assert works == ["work", "backward, T=10", "backward, T=30", "backward, T=100"]
    assert shown.tables["Beside the paper"][1:] == [
        ["backward, T=30", "autograd", *rows[1], "Made-up CPU"]
    ]


def test_without_published_numbers_there_is_no_column_for_them(
    save: Save, show: Callable[[], Page], rng: np.random.Generator
):
    save("made", experiment(pieces(rng, "T=10")))
    found = show()
    assert "Beside the paper" not in found.sections
    assert found.tables["Made up"][0] == ["work", "against", "theirs, ms", "ours, ms", "ratio"]


def test_missing_peers_are_named_with_the_reason(
    save: Save, show: Callable[[], Page], rng: np.random.Generator
):
    found = pieces(rng, "T=10", "T=30")
    for piece in found.values():
        piece["missing"] = {"jax": "not installed"}
    found["T=30"]["missing"]["MKL"] = "too large"
    save("made", experiment(found))
    said = show().sections["Made up"]
    assert "Missing:jax: not installedMKL: too large (T=30)" in said


def test_an_experiment_that_cannot_be_imported_is_said_to_be(
    save: Save,
    show: Callable[[], Page],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    found = pieces(rng, "T=10")
    found["T=10"]["missing"] = {"jax": "not installed"}
    save("made", experiment(found))
    monkeypatch.setitem(sys.modules, "bench.made", None)
    said = show().sections["Made up"]
    assert "bench.made cannot be imported: ModuleNotFoundError" in said
    assert "made.json" in said
    assert "jax: not installed" in said
    assert "bench.made cannot be imported" in capsys.readouterr().err


def test_results_that_an_experiment_cannot_show_are_said_to_be(
    save: Save,
    show: Callable[[], Page],
    made: types.ModuleType,
    capsys: pytest.CaptureFixture[str],
):
    save("made", experiment({"T=10": {"other": 1}}))
    said = show().sections["Made up"]
    assert "made.json cannot be shown in full: KeyError: 'theirs'" in said
    assert "cannot be shown in full" in capsys.readouterr().err


def test_an_experiment_that_there_is_no_more_is_listed(
    save: Save, show: Callable[[], Page], rng: np.random.Generator
):
    save("gone", experiment(pieces(rng, "T=10"), experiment="gone", title="Gone"))
    found = show()
    assert "There is no experiment 'gone'." in found.sections["Gone"]
    assert found.row("Files", "gone.json")[1] == "Gone"


def test_losses_of_the_old_form_are_drawn(show: Callable[[], Page], everything: None):
    said = show().sections["lenet5"]
    assert "Images: digits, 2 epochs in batches of 16" in said
    assert "at most 0.012 in training and 0.0045 on test images" in said


def test_what_no_gpu_has_shown_is_listed(
    save: Save,
    show: Callable[[], Page],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(report._ON_A_GPU, "made", "a thousand times as fast")
    assert "Unproven" in show().sections["Made up"]
    save("made", experiment(pieces(rng, "T=10")))
    said = "Unproven, as no GPU has run it in full: a thousand times as fast."
    assert said in show().sections["Made up"]
    gpu = {"gpu": "Made-up GPU 1", "cpu": "Made-up CPU"}
    save("gpu", experiment(pieces(rng, "T=10"), done=False), device=gpu)
    assert said in show().sections["Made up"]
    save("gpu", experiment(pieces(rng, "T=10")), device=gpu)
    assert "Unproven" not in show().sections["Made up"]


# -- The engine, schedules, memory, GPUs ----------------------------------------------------------


def test_the_engine_beside_its_peers(
    save: Save, show: Callable[[], Page], rng: np.random.Generator
):
    line = contest(rng, "a", "slow", "fast", missing="MKL")
    medians = line["median_seconds"]
    for peer, times in (("slow", 3), ("fast", 1.5)):
        medians[peer] = times * medians[OURS]
        line["ratios"][peer]["measured"] = times
    line["ratios"]["fast"]["required"] = 1.75
    save("cpu", {"engine": [line], "startup": [startup(0.0412)]})
    found = show()
    for peer in ("slow", "fast"):
        _, theirs, ours, ratio, asked, missed = found.row("The engine", peer)
        assert close(theirs, 1e3 * medians[peer])
        assert close(ours, 1e3 * medians[OURS])
        assert close(ratio, medians[peer] / medians[OURS])
        assert (asked, missed) == {"slow": ("2×", ""), "fast": ("1.75×", "missed")}[peer]
    _, theirs, _, ratio, *_ = found.row("The engine", "the floor")
    assert close(theirs, 1e3 * line["floor"]["seconds"])
    assert close(ratio, 1 / line["multiple_of_floor"])
    assert "MKL: no MKL here (the work of a)" in found.sections["The engine"]
    assert found.row("The engine", "the import")[1:3] == ["41.2", "300"]


def shares(result: Any) -> list[str]:
    """What is said of the linear and of the best schedule of a chain."""
    found = grid.ratios(result["samples_seconds"])
    return [f"{found[key]:#.3g}×" for key in ("auto/linear", "auto/best")]


def test_schedules(save: Save, show: Callable[[], Page], rng: np.random.Generator):
    chains = {
        "linear is best": chain(rng, 1.02e-3, 1e-3, 2e-3),
        "chunked is best": chain(rng, 2e-3, 2.5e-3, 1.25e-3),
        "as good": chain(rng, 1e-3, 1e-3, 1.1e-3),
    }
    ordered = [grid.ranked(result) for result in chains.values()]
    right, pairs = map(sum, zip(*ordered, strict=True))
    save("grid", {"chains": chains, "pairs_in_order": [right, pairs]})
    found = show()
    assert "predictions rank 1 as the medians do: 50.0%" in found.sections["Schedules"]
    assert found.row("Schedules", "linear is best")[1:] == [
        *("1.00", "1.02", "1.00", *shares(chains["linear is best"])),
        *("linear(9)", "linear(9)", "1 of 1"),
    ]
    assert found.row("Schedules", "chunked is best")[1:] == [
        *("2.50", "2.00", "1.25", *shares(chains["chunked is best"])),
        *("linear(9)", "chunked(9,\xa02)", "0 of 1"),
    ]
    assert found.row("Schedules", "as good")[-1] == "0 of 0"


def test_a_grid_of_some_chains_does_not_replace_one_of_all(
    save: Save, show: Callable[[], Page], rng: np.random.Generator
):
    of = {"pairs_in_order": [0, 0]}
    save("all", of | {"chains": {"x": chain(rng, 1, 1, 1), "y": chain(rng, 1, 1, 1)}})
    later = {"date": "2030-06-01T00:00:00+00:00", "command": "python -m bench.grid --only x"}
    save("part", of | {"chains": {"x": chain(rng, 1, 1, 1)}}, **later)
    found = show()
    assert "Every schedule on 2 chains." in found.sections["Schedules"]
    assert found.row("Files", "part.json")[-1] == "superseded; a part"


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


def test_memory(save: Save, show: Callable[[], Page]):
    case = {"chain": "a chain", "schedule": "Schedule.linear(9)", "threads": 2}
    case |= {"limit_bytes": 8 << 20, "workspace_bytes": 7 << 19, "within_limit": False}
    save("memory", {"cases": [case | {"taken_bytes": 9 << 20}]})
    row = show().row("Memory", "a chain")
    assert row[1:] == ["linear(9)", "2", "8.00", "3.50", "9.00", "over the limit"]


def test_a_run_on_a_gpu(save: Save, show: Callable[[], Page]):
    races = rnn_races()
    races[0]["skipped"] = {"jax": "computes on the CPU"}
    parts = {
        "memcheck": {"ok": False, "summary": "MISSING: no compute-sanitizer"},
        "tests/cuda_scan.py": {"ok": False, "summary": "1 failed", "failed": ["test_a: because"]},
        "jax": {"ok": True, "summary": "none", "missing": {"jax T=10": "not installed"}},
        "sparse": {"ok": False, "summary": "0 of 1", "failed": {"level n=3": "ValueError: no"}},
    }
    about = {"gpu": "Made-up GPU 1", "cpu": "Made-up CPU"}
    save("gpu", {"races": races, "wanted": wanted(races), "parts": parts}, device=about)
    found = show()
    said = found.sections["On a GPU"]
    state = "memcheck failed, tests/cuda_scan.py failed, sparse failed"
    assert found.row("Overview", "On a GPU")[-1] == state
    assert "jax T=10: not installed" in said
    assert f"jax: computes on the CPU ({races[0]['name']})" in said
    assert "tests/cuda_scan.py: test_a: because" in said
    assert "sparse: level n=3: ValueError: no" in said
    for line in wanted(races):
        _, _, measured, asked, met = found.row("On a GPU", line["what"])
        assert close(measured, line["measured"])
        assert number(asked) == line.get("at least", line.get("at most"))
        assert (met == "met") == line["met"]
    rows = iter(found.tables["On a GPU"])
    for race in races:
        assert next(row for row in rows if row == [race["work"]])
        for ratio in race["ratios"]:
            theirs, ours, clock, *times, warm, cold = next(rows)
            assert [theirs, ours, clock] == [ratio["theirs"], ratio["ours"], "call"]
            medians = race["median_seconds"]["call, warm"]
            assert close(times[0], 1e3 * medians[theirs])
            assert close(times[1], 1e3 * medians[ours])
            assert close(warm, ratio["measured"]["warm"])
            assert cold == ""
        floor = next(rows)
        assert close(floor[3], 1e3 * race["floors"]["the work"]["seconds"])


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
    cells = ["" if x is None else page.significant(x) + "×" for x in numbers]
    table = page.table(["what", "x"], [["a", cell] for cell in cells], ["x"])
    found = re.findall(r'<td class="number">(.*?)</td>', table)
    assert [cell.partition("<")[0] for cell in found] == cells
    after = set()
    for cell in filter(None, found):
        text, _, pad = cell.partition("×")
        point, decimals = text.partition(".")[1:]
        after.add(len(point + decimals + "".join(re.findall(r'data-pad="(.*?)"', pad))))
    assert len(after) <= 1


def test_rows_of_the_same_work_stand_below_it():
    rows = [["a", "x", "1"], ["a", "y", "2"], ["b", "x", "3"], ["b", "y", "4"]]
    heads = ["work", "against", "ms"]
    table = page.table(heads, rows, ["ms"], grouped=True)
    assert "work" not in table
    found = re.findall("<tr[ >].*?</tr>", table)
    texts = [re.sub("<.*?>", " ", row).split() for row in found]
    assert texts == [
        ["against", "ms"],
        ["a"],
        ["x", "1"],
        ["y", "2"],
        ["b"],
        ["x", "3"],
        ["y", "4"],
    ]
    assert "work" in page.table(heads, rows[1:3], ["ms"], grouped=True)


def test_a_picture_of_very_many_points_is_one_of_pixels(monkeypatch: pytest.MonkeyPatch):
    (drawing,) = drawings_of({"pieces": {"T=10": {"ours": 1}}})
    assert "data:image/svg+xml;base64," in page.figure(drawing)
    monkeypatch.setattr(page, "_LARGE", 1000)
    assert "data:image/png;base64," in page.figure(drawing)


# -- The README -----------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return tmp_path / "README.md"


@pytest.fixture(autouse=True)
def _two_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the README shows of the engine."""
    monkeypatch.setattr(readme, "_WORKS", {"a": "Work A", "b": "the same, B", "gone": "Gone"})


def cells_of(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_a_table_replaces_what_is_between_its_markers_and_nothing_else(
    save: Save, folder: Path, copy: Path, rng: np.random.Generator
):
    lines = [contest(rng, name, "SciPy @", "MKL", missing="jax") for name in ("a", "other", "b")]
    lines[2]["ratios"]["MKL"]["required"] = None
    save("cpu-1", {"engine": lines[:2], "startup": []})
    save("cpu-2", {"engine": lines[2:], "startup": []}, date="2030-02-03T00:00:00+00:00")
    before, after = "# Title \n\n| work | 1 |\n\n", "\nMore <!-- of it -->\n\n\n<!-- end -->\n"
    copy.write_text(f"{before}<!-- table: engine -->\nold\n\nthings<!-- end -->{after}")
    readme.update_readme(copy, folder)
    text = copy.read_text()
    start, end = "<!-- table: engine -->\n", "\n<!-- end -->"
    assert text.startswith(before + start)
    assert text.endswith(end + after)
    made = text[len(before + start) : -len(end + after)]
    table, sentence = made.split("\n\n")
    heads, rule, *rows = cells_of(table)
    assert heads == ["work", "against", "theirs, ms", "ours, ms", "ratio"]
    assert set(rule) == {"---"}
    shown = [("Work A", "SciPy `@`", 0), ("", "MKL", 0), ("the same, B", "SciPy `@`", 2)]
    for (work, peer, theirs, ours, ratio), (name, against, k) in zip(rows, shown, strict=True):
        assert (work, peer) == (name, against)
        medians = lines[k]["median_seconds"]
        taken = medians[against.replace("`", "")]
        assert close(theirs, 1e3 * taken)
        assert close(ours, 1e3 * medians[OURS])
        assert close(ratio, taken / medians[OURS], 2)
        assert ratio.endswith("×")
    said = " ".join(sentence.split())
    assert said.endswith(
        "On Made-up CPU, 2 cores, 2030-01-02: [lines 1 to 2](results/cpu-1.json). "
        "On Made-up CPU, 2 cores, 2030-02-03: [line 3](results/cpu-2.json)."
    )
    for link in re.findall(r"\]\((.*?)\)", said):
        assert (copy.parent / link).is_file()
    readme.update_readme(copy, folder)
    assert copy.read_text() == text


def test_tables_of_experiments(save: Save, folder: Path, copy: Path, rng: np.random.Generator):
    found = pieces(rng, "T=10", "T=30")
    found["T=30"]["paper"] = 13.4
    save("made", experiment(found))
    save("cpu", {"engine": [contest(rng, "a", "MKL")], "startup": []})
    copy.write_text(
        "<!-- table: made -->\n<!-- end -->\nand\n<!-- table: engine, made -->\n<!-- end -->\n"
    )
    readme.update_readme(copy, folder)
    first, second = copy.read_text().split("\nand\n")
    heads, _, *rows = cells_of(first)
    assert heads[-1] == "the paper's"
    assert [row[-1] for row in rows] == ["", "13.4×"]
    for row, piece in zip(rows, found.values(), strict=True):
        assert close(row[2], 1e3 * piece["theirs"])
        assert close(row[4], piece["theirs"] / piece["ours"], 2)
    assert [row[0] for row in list(cells_of(second))[2:]] == ["Work A", *(row[0] for row in rows)]


@pytest.mark.parametrize("bad", [{"dirty": True}, {"quick": True}, {"done": False}])
def test_the_readme_shows_clean_and_complete_results_only(
    bad: Results, save: Save, folder: Path, copy: Path, rng: np.random.Generator
):
    save("made", experiment(pieces(rng, "T=10")) | bad)
    copy.write_text("<!-- table: made -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="table: made -->: no complete results"):
        readme.update_readme(copy, folder)
    assert copy.read_text() == "<!-- table: made -->\n<!-- end -->\n"


def test_markers_that_are_wrong_are_refused(folder: Path, copy: Path):
    copy.write_text("<!-- table: engin -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="table: engin -->: expected engine, made"):
        readme.update_readme(copy, folder)
    copy.write_text("<!-- table: engine -->\n")
    with pytest.raises(ValueError, match="no table between"):
        readme.update_readme(copy, folder)


# -- What there is --------------------------------------------------------------------------------


def test_the_results_that_are_kept_can_be_shown(tmp_path: Path):
    found = Page(report.write(RESULTS, tmp_path / "page.html"))
    names = {row[0] for row in found.tables["Files"][1:]}
    assert names == {path.name for path in RESULTS.glob("*.json")}
    for path in RESULTS.glob("cpu-*.json"):
        for line in json.loads(path.read_text())["engine"]:
            assert line["work"] in found.sections["The engine"]
