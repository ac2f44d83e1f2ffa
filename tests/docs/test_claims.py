"""Numbers on the pages of the site that no other test checks."""

from __future__ import annotations

import importlib
import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import sparsescan
from bench import density, readme
from bench.density import OURS, PYTORCH
from bench.experiment import NAMES, RESULTS, load
from bench.files import newest, read
from bench.page import anchor
from bench.readme import update_tables
from sparsescan.recurrent import RNNCell, catalogue

ROOT = Path(sparsescan.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"


def test_the_picture_has_the_steps_that_its_title_names() -> None:
    title = "Back-propagation takes 15 steps for 16 layers, the scan 7"
    pages = [DOCS.parent / "README.md", DOCS / "how" / "scan.md"]
    assert all(title in page.read_text() for page in pages)
    drawn = re.findall(r">[a-z -]+: (\d+) steps<", (DOCS / "scan.svg").read_text())
    schedules = (sparsescan.Schedule.linear(16), sparsescan.Schedule.blelloch(16))
    assert [int(steps) for steps in drawn] == [each.depth for each in schedules] == [15, 7]


@pytest.mark.parametrize("n", [10, 1_000, 100_000])
def test_a_scan_takes_about_two_levels_for_each_doubling(n: int) -> None:
    depth = sparsescan.Schedule.blelloch(n).depth
    assert abs(depth - 2 * math.log2(n)) <= 2


def test_implicit_steps_of_a_small_recurrent_network_take_a_twentieth() -> None:
    assert "RNN of 20 units that is a twentieth" in (DOCS / "how" / "steps.md").read_text()
    pattern = RNNCell(4, 20).implicit_pattern
    plan = sparsescan.plan([pattern] * 1000, batch=16, dtype="float32")
    implicit = plan.to_dict()["implicit"]
    assert implicit["explicit_bytes"] / implicit["bytes"] == pytest.approx(20, rel=0.01)


def test_one_worker_takes_nearly_twice_the_steps_and_a_handful_break_even() -> None:
    n = 1000
    plan = sparsescan.plan([sparsescan.Pattern.diagonal(8)] * n, schedule="blelloch")
    assert 1.9 * n < plan.predict(1).steps < 2 * n
    assert plan.predict(4).steps < n - 1


@pytest.mark.parametrize("page", ["README.md", "docs/for-me.md"])
def test_tables_are_those_of_the_results(page: str, tmp_path: Path) -> None:
    copy = tmp_path / page
    copy.parent.mkdir(exist_ok=True)
    copy.write_text((DOCS.parent / page).read_text())
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "results").symlink_to(RESULTS)
    update_tables(copy, tmp_path / "bench" / "results")
    assert copy.read_text() == (DOCS.parent / page).read_text()


def test_counts_of_other_packages_tests_are_those_of_the_run_that_is_linked() -> None:
    page = DOCS / "how" / "promises.md"
    text = page.read_text()
    link = re.search(r"\(([\w./-]+/suites-[\w-]+\.json)\)", text)
    assert link
    pieces = json.loads((page.parent / link[1]).read_text())["pieces"]
    counted = [
        [suite["version"], str(suite["run"]), *map(str, suite["outcomes"].values())]
        for piece in pieces.values()
        for suite in piece.values()
    ]
    table = text.partition("| tests of |")[2].partition("\n\n")[0].splitlines()[2:]
    shown = [[cell.strip() for cell in row.strip("|").split("|")[1:]] for row in table]
    assert shown == counted


# Those of the papers have tests of their own.
PAGES = [
    path
    for path in sorted(DOCS.rglob("*.md"))
    if not {"auto_gallery", "generated", "results", "papers"} & set(path.parts)
]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_no_ratio_is_typed(path: Path) -> None:
    text = re.sub(
        r"<!-- table: .*?<!-- end -->|^```.*?^```", "", path.read_text(), flags=re.S | re.M
    )
    assert not re.findall(r".*\d×(?!\d).*", text)


def test_ratios_that_pages_show_are_measured() -> None:
    asked = [each for path in PAGES for each in re.findall(r"\{ratio\}`(.*?)`", path.read_text())]
    assert len(asked) > 10
    measured = readme.rows(RESULTS)
    for each in asked:
        work, _, peer = (part.strip() for part in each.partition("|"))
        _, row = readme.row(measured, work, peer)
        assert row.work == work
    with pytest.raises(ValueError, match=r"no complete results .* 'nothing' beside 'PyTorch'"):
        readme.row(measured, "nothing")


def test_cells_of_torchrecurrent_take_as_long_as_a_page_says() -> None:
    times = r"(\d+) cells take (\d+) to (\d+) times as long"
    where = r" \(\[measured\]\(\.\./bench/results/(.*?)\)\)"
    said = re.findall(times + where, (DOCS / "for-me.md").read_text())
    every = readme.beside_others(readme.rows(RESULTS), "cells")
    found = [
        (file.path.name, row.theirs / row.ours)
        for file, row in every
        if "T=1,000, torchr" in row.work
    ]
    (name,) = {name for name, _ in found}
    ratios = [ratio for _, ratio in found]
    assert said == [(str(len(found)), f"{min(ratios):.0f}", f"{max(ratios):.0f}", name)]


def test_what_is_slower_is_found_among_all_points() -> None:
    measured = readme.rows(RESULTS)
    asked = re.findall(r"^```\{slower\} (\w+)$", (DOCS / "slower.md").read_text(), re.MULTILINE)
    # Schedules are ours, and the last column of Table 1 is no program.
    assert {
        name
        for name in measured
        if any(row.theirs < 0.95 * row.ours for _, row in readme.beside_others(measured, name))
    } <= {*asked, "grid", "table1"}
    # A map has more points than lines in its tables.
    assert len(readme.beside_others(measured, "map")) > 1000
    for name in asked:
        for _, row in readme.beside_others(measured, name):
            assert not row.peer.startswith("sparsescan")


def test_the_page_of_benchmarks_leads_to_every_one() -> None:
    page = (DOCS / "benchmarks" / "index.md").read_text()
    for name in NAMES:
        assert f"(results/{anchor(load(name).title)}.md)" in page


def test_the_picture_that_moves_is_of_the_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    draw_levels = importlib.import_module("draw_levels")
    svg = ElementTree.fromstring(draw_levels.svg())
    text = "".join(svg.itertext())
    assert "a loop: 15 steps" in text
    assert "a scan: 7 levels" in text
    assert "prefers-reduced-motion" in text
    nodes = [each for each in svg.iter() if each.tag.endswith("circle")]
    places = {(float(each.attrib["cx"]), float(each.attrib["cy"])) for each in nodes}
    # Without motion: the inputs, and one node for each operation of the tree.
    operations = sum(len(level.ops) for level in sparsescan.Schedule.blelloch(16).levels)
    assert len(nodes) == len(places) == 16 + operations


def test_every_figure_of_the_gallery_has_a_caption(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(DOCS)
    figures = importlib.import_module("gallery_figures").FIGURES
    scripts = {path.stem.removeprefix("plot_") for path in (DOCS / "gallery").glob("plot_*.py")}
    assert {name.rpartition("_")[0] for name in figures} == scripts
    for seen in figures.values():
        assert seen.caption.endswith(".")


def test_pruned_layers_gain_with_a_quarter_of_their_weights_and_with_half_they_do_not() -> None:
    assert "with at most a quarter of their weights left" in (DOCS.parent / "README.md").read_text()
    assert "at most a quarter of the weights is left" in (DOCS / "for-me.md").read_text()
    results = [file.results for file in newest(read(RESULTS)[0]).values() if file.kind == "density"]
    assert results
    for each in results:
        dense = []
        for layer in density.LAYERS:
            curves = density._curves(each, layer)
            pairs = zip(curves[OURS], curves[PYTORCH], strict=True)
            gains = {share: theirs / ours for (share, ours), (_, theirs) in pairs}
            assert min(gain for share, gain in gains.items() if share <= 0.25) > 1, layer.name
            assert gains[0.5] < 1, layer.name
            dense.append(gains[1])
        assert sum(gain < 1 for gain in dense) > len(dense) / 2


def test_all_experiments_are_listed() -> None:
    page = (DOCS / "benchmarks" / "index.md").read_text()
    (sentence,) = re.findall(r"Experiments are (.*?)\.", page, re.DOTALL)
    assert sorted(re.findall(r"`(\w+)`", sentence)) == sorted(NAMES)


def test_the_table_of_rooms_has_every_folder_and_file_of_the_root() -> None:
    text = (DOCS.parent / "CONTRIBUTING.md").read_text()
    table = text[text.index("| room |") : text.index("A change should keep these rules")]
    rooms = [name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in row.split(", ")]
    inside = {path.stem for path in ROOT.iterdir() if path.suffix in ("", ".py")}
    assert len(rooms) == len(set(rooms))
    assert {name.strip("`") for name in rooms} == inside - {"__init__", "__main__", "__pycache__"}


@pytest.mark.parametrize(
    ("room", "before"), [("graph", "These are the files of"), ("recurrent", "## How to add a cell")]
)
def test_a_table_of_files_has_every_one(room: str, before: str) -> None:
    text = (DOCS / "contributing.md").read_text()
    end = text.index(before)
    table = text[text.rindex("| file |", 0, end) : end]
    listed = [name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in row.split(", ")]
    inside = {path.name + "/" * path.is_dir() for path in (ROOT / room).iterdir()}
    assert sorted(listed) == sorted(
        f"`{name}`" for name in inside - {"__init__.py", "__pycache__/"}
    )


@pytest.mark.parametrize("page", ["README.md", "docs/own-cell.md"])
def test_pages_count_the_cells_of_the_catalogue(page: str) -> None:
    (count,) = re.findall(r"(\d+) cells", (DOCS.parent / page).read_text())
    assert int(count) == len(catalogue.__all__)
