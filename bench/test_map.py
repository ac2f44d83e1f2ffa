"""The map: contenders agree, points are left out by a rule, and what was measured can be shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import sparsescan.torch

from . import machine, map_drawings, recurrent, report
from . import map as sizes
from .experiment import Options, Results, run
from .map import AFFINE, JAX, MAP, OURS, STACKS, THEIRS, Group
from .map_races import (
    INFERENCE,
    KINDS,
    TRAINING,
    Affine,
    Contender,
    InJax,
    Point,
    Race,
    Recurrent,
    Stack,
    Way,
)

QUICK = Options(True, "cpu")


class CutOffError(Exception):
    """Stands for whatever cuts a run off."""


def both(point: Point) -> list[dict[str, Any]]:
    """Return what ours and the peer compute, each in its last way."""
    race = point.race()
    results = []
    for contender in (race.ours, race.theirs):
        *_, way = contender.ways.values()
        with way.within():
            way.clear()
            results.append(contender.read(way.call()))
    return results


@pytest.mark.parametrize("mode", [TRAINING, INFERENCE])
@pytest.mark.parametrize(
    "kind",
    [pytest.param(each, marks=() if each == "GRU" else pytest.mark.slow) for each in KINDS],
)
def test_modules_compute_what_peers_do(kind: str, mode: str) -> None:
    ours, theirs = both(Recurrent(kind, mode, 5, 3, 7))
    assert len(theirs) == (1 if mode == INFERENCE else 6)
    assert sizes._difference(ours, theirs) < 1e-5


@pytest.mark.parametrize("mode", [TRAINING, INFERENCE])
@pytest.mark.parametrize(
    "point",
    [
        Stack((20, 30, 10), 0.1, "", 4),
        Affine(True, 3, "", 2, 5),
        Affine(False, 3, "", 2, 5),
        pytest.param(InJax("LSTM", "", 5, 3, 7), marks=pytest.mark.slow),
    ],
)
def test_other_contenders_compute_the_same(point: Any, mode: str) -> None:
    if isinstance(point, InJax):
        pytest.importorskip("jax")
    ours, theirs = both(type(point)(**vars(point) | {"mode": mode}))
    assert sizes._difference(ours, theirs) < 1e-5


def test_gradients_are_none_before_a_call() -> None:
    contender = Recurrent("GRU", TRAINING, 5, 3, 7).race().ours
    way = next(iter(contender.ways.values()))
    first = contender.read(way.call())["x"].copy()
    contender.read(way.call())
    assert not np.allclose(contender.read(way.call())["x"], first)
    way.clear()
    np.testing.assert_array_equal(contender.read(way.call())["x"], first)


# -- Which points there are -----------------------------------------------------------------------


def test_the_whole_grid_is_there() -> None:
    every = list(sizes.groups(False))
    count = {
        part: sum(len(group.points) for group in every if group.part == part)
        for part in sizes.LIMITS
    }
    assert count == {MAP: 5 * 2 * 6 * 4 * 6, JAX: 3 * 2 * 27, STACKS: 18, AFFINE: 4 * 24}
    for quick in (True, False):
        keys = [piece.key for piece in sizes.EXPERIMENT.pieces(Options(quick, "cpu"))]
        assert len(keys) == len(set(keys))
    with pytest.raises(SystemExit, match="map is of the CPU"):
        list(sizes.EXPERIMENT.pieces(Options(True, "cuda")))


def test_work_is_that_of_the_rule() -> None:
    assert Recurrent("LSTM", INFERENCE, 16, 3, 7).work == 3 * 7 * 16 * (16 + 32) * 4
    assert Recurrent("GRU", TRAINING, 16, 3, 7).work == 3 * 3 * 7 * 16 * (16 + 32) * 3
    assert InJax("RNN", INFERENCE, 16, 3, 7).work == 3 * 7 * 16 * (16 + 32)
    large = Recurrent("GRU", TRAINING, 512, 256, 1000)
    piece = sizes.measure([large], large.work - 1, quick=True)
    assert piece["points"] == {}
    assert piece["left out"] == {"T=1000": large.work}


def test_the_rule_is_printed() -> None:
    every = [point for group in sizes.groups(False) for point in group.points]
    count = sum(point.work > sizes._MOST for point in every)
    assert 0 < count < 0.02 * len(every)
    said = sizes.EXPERIMENT.about(Options(False, "cpu"))["left out"]
    assert said.startswith(f"{count} of {len(every):,} points: calls of more than 100,000,000,000 ")
    results = {"quick": False, "pieces": {}, "about": {"left out": said}}
    assert said in sizes.summary(results)


# -- Measuring ------------------------------------------------------------------------------------


class Slow:
    """A point with made-up contenders: how long they take by the number of threads."""

    name, work = "T=1", 1

    def __init__(self, seconds: dict[str, tuple[float, float]]) -> None:
        self.seconds, self.now, self.calls = seconds, 0.0, list[str]()

    def race(self) -> Race:
        ours, theirs = (
            Contender(
                {f"{n} threads": self.way(f"{who} {n}", own) for n, own in enumerate(taken, 1)},
                lambda _: {"output": np.ones(2)},
            )
            for who, taken in self.seconds.items()
        )
        explained = SimpleNamespace(kernel="pytorch", predicted=1)
        return Race(ours, theirs, lambda: explained)

    def way(self, name: str, seconds: float) -> Way:
        def call() -> None:
            self.calls.append(name)
            self.now += seconds

        return Way(call, lambda: None, nullcontext)


@pytest.fixture
def _at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let others use no cores, and nothing wait."""
    monkeypatch.setattr(sizes, "_sleep", lambda: None)
    monkeypatch.setattr(machine, "others", lambda: 0.0)


@pytest.mark.usefixtures("_at_rest")
@pytest.mark.parametrize(("seconds", "rounds"), [(0.01, 5), (0.3, 2), (3.0, 1)])
def test_the_faster_variants_take_turns(
    seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = Slow({OURS: (2 * seconds, seconds), THEIRS: (seconds, 3 * seconds)})
    clock = SimpleNamespace(perf_counter=lambda: point.now)
    monkeypatch.setattr(sizes, "time", clock)
    monkeypatch.setattr(recurrent, "time", clock)
    piece = sizes.measure([point], 10, quick=False)
    one = piece["points"]["T=1"]
    assert one["variants"] == {OURS: "2 threads", THEIRS: "1 threads"}
    assert one["samples"] == {who: pytest.approx([seconds] * rounds) for who in (OURS, THEIRS)}
    assert (one["kernel"], one["predicted"]) == ("pytorch", 1.0)
    # Where a call takes seconds there is one of each way, and one more of ours, which may prepare.
    assert seconds < 1 or len(point.calls) == 3 + 2 + 2


@pytest.mark.usefixtures("_at_rest")
def test_very_long_calls_are_tried_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    point = Slow({OURS: (0.01, 0.02), THEIRS: (9.0, 3.0)})
    clock = SimpleNamespace(perf_counter=lambda: point.now)
    monkeypatch.setattr(sizes, "time", clock)
    monkeypatch.setattr(recurrent, "time", clock)
    likely = {OURS: "1 threads", THEIRS: "2 threads"}
    runner = sizes._runner(point.race(), likely, False)
    assert runner.about["variants"] == likely
    assert [call for call in point.calls if THEIRS in call] == [f"{THEIRS} 2"]
    assert runner.rounds == 1


def test_wrong_results_stop_the_run() -> None:
    right = {"output": np.ones(3), "x": np.ones(2)}
    with pytest.raises(AssertionError, match=r"x: the relative difference is 1\.0e-01"):
        sizes._difference({**right, "x": 1.1 * right["x"]}, right)


def test_disturbed_rounds_do_not_count() -> None:
    assert sizes.median_of([1.0, 9.0, None, 2.0], [True, False, True, True]) == 1.5
    assert sizes.median_of([None, 9.0], [True, False]) == 9.0


# -- The experiment -------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _few() -> Iterator[None]:
    """Measure a few groups in a quick run, of each part one or two."""
    every = list(sizes.groups(True))
    wanted = [
        next(group for group in every if group.name.startswith(name) and group.mode == mode)
        for name, mode in (
            *(("GRU", TRAINING), ("GRU", INFERENCE)),
            *(("stack", TRAINING), ("affine_scan, dense", INFERENCE)),
        )
    ]
    groups = sizes.groups
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "groups", lambda quick: wanted if quick else groups(quick))
        patch.setattr(sizes, "_QUICK_MOST", Recurrent("GRU", TRAINING, 16, 1, 64).work - 1)
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(sizes.EXPERIMENT, QUICK, tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def results(file: Path) -> Results:
    results: Results = json.loads(file.read_text())
    return results


def test_a_reduced_run_has_all_points(results: Results) -> None:
    pieces = results["pieces"]
    assert results["done"]
    assert list(pieces["GRU, inference, H=16, B=1"]["points"]) == ["T=1", "T=16", "T=64"]
    # Training is three times the work.
    assert list(pieces["GRU, training, H=16, B=1"]["points"]) == ["T=1", "T=16"]
    assert list(pieces["GRU, training, H=16, B=1"]["left out"]) == ["T=64"]
    for piece in pieces.values():
        rounds = len(piece["cores_others_used"])
        for point in piece["points"].values():
            for taken in point["samples"].values():
                assert len(taken) == rounds
                assert all(seconds > 0 for seconds in taken if seconds is not None)
            assert point["difference"] < 1e-5
    assert len(list(sizes.ratios(results))) == sum(len(p["points"]) for p in pieces.values())


def test_a_run_that_was_cut_off_goes_on(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[Point, ...]] = []
    groups = sizes.groups(True)

    def measure(points: tuple[Point, ...], most: int, *, quick: bool) -> Results:
        if len(measured) == 2:
            raise CutOffError
        measured.append(points)
        return results["pieces"][groups[len(measured) - 1].key]  # type: ignore[index]

    monkeypatch.setattr(machine, "commit", lambda: ("0123456789abcdef", False))
    monkeypatch.setattr(sizes, "measure", measure)
    with pytest.raises(CutOffError):
        run(sizes.EXPERIMENT, QUICK, tmp_path)
    (path,) = tmp_path.glob("*.json")
    assert len(json.loads(path.read_text())["pieces"]) == 2
    monkeypatch.setattr(sizes, "measure", lambda points, most, quick: measured.append(points) or {})
    assert run(sizes.EXPERIMENT, QUICK, tmp_path) == path
    assert measured == [group.points for group in groups]


def test_the_report_has_a_section(file: Path, results: Results, tmp_path: Path) -> None:
    page = report.write(file.parent, tmp_path / "report.html").read_text()
    section = page[page.index(f">{sizes.EXPERIMENT.title}</h2>") :]
    for text in ("the worst points", "All sizes beside PyTorch", "left out", "pruned stacks"):
        assert text in section
    assert "the worst points" in sizes.summary(results)


def made_up(ratios: dict[tuple[str, str], float], kernel: str | None = None) -> Results:
    """Return results of the first batch of the whole map where all ratios are of group and mode."""
    pieces: Results = {}
    for group in sizes.groups(False):
        if (ratio := ratios.get((group.name, group.mode))) is None:
            continue
        points: Results = {
            each.name: {"samples": {OURS: [1.0, 1.0], THEIRS: [ratio, ratio]}}
            | ({} if kernel is None else {"kernel": kernel, "predicted": 1.0})
            for each in group.points
            if each.work <= sizes._MOST
        }
        left_out = {each.name: each.work for each in group.points if each.name not in points}
        pieces[group.key] = {
            "points": points,
            "cores_others_used": [0.0, 0.0],
            "left out": left_out,
        }
    return {"quick": False, "pieces": pieces, "about": {"left out": "some"}}


RATIOS = {
    ("RNN", TRAINING): 3.0,
    ("GRU", INFERENCE): 0.94,
    ("LiGRU", TRAINING): 137.0,
    ("GRU in JAX", INFERENCE): 0.99,
}


def test_medians_and_what_is_too_slow() -> None:
    medians, worst = sizes.EXPERIMENT.tables(made_up(RATIOS))
    said = {(row[0], *row[1:3]): row[3:] for row in medians.rows}
    count = sum(len(p["points"]) for k, p in made_up(RATIOS)["pieces"].items() if k[:4] == "GRU,")
    assert said["beside PyTorch", "GRU", INFERENCE][:4] == [
        "0.94",
        "0.94",
        "0.94",
        f"{count} of {count}",
    ]
    assert said["beside PyTorch", "all", TRAINING][1:4:2] == ["3.00", f"0 of {143 + 140}"]
    assert said["beside jax.lax.scan", "all", INFERENCE][3] == "27 of 27"
    assert worst.rows[0][1:3] == ["GRU, inference, H=16, B=1, T=1", "0.94"]
    assert [row[2] for row in worst.rows] == ["0.94"] * count + ["0.99"] * 27
    assert {row[-1] for row in worst.rows} == {""}


@pytest.mark.parametrize("kernel", ["pytorch", "sparsescan", None])
def test_points_where_pytorch_ran_are_marked(kernel: str | None) -> None:
    results = made_up({("GRU", INFERENCE): 1.0}, kernel)
    assert all(each.is_pytorch == (kernel == "pytorch") for each in sizes.ratios(results))
    (drawn,) = sizes.EXPERIMENT.drawings(results)
    dots = sum(len(axes.lines) for axes in drawn.figure.axes)
    assert dots == (len(list(sizes.ratios(results))) if kernel == "pytorch" else 0)


def test_a_module_that_can_tell_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, bool]] = []

    def explain(module: torch.nn.Module, x: torch.Tensor) -> Any:
        asked.append((x.requires_grad, torch.is_inference_mode_enabled()))
        return SimpleNamespace(kernel="sparsescan", predicted=2)

    monkeypatch.delattr(sparsescan.torch, "explain", raising=False)
    assert Recurrent("GRU", TRAINING, 5, 3, 7).race().explained() is None
    monkeypatch.setattr(sparsescan.torch, "explain", explain, raising=False)
    for mode in (TRAINING, INFERENCE):
        assert Recurrent("GRU", mode, 5, 3, 7).race().explained().kernel == "sparsescan"
    assert asked == [(True, False), (False, True)]


# -- The picture ----------------------------------------------------------------------------------


def test_every_point_has_its_number() -> None:
    pytorch, jax = sizes.EXPERIMENT.drawings(made_up(RATIOS))
    assert pytorch.title == "All sizes beside PyTorch"
    assert [axes.get_title("left") for axes in pytorch.figure.axes[:3]] == ["RNN", "GRU", "LiGRU"]
    texts = [text.get_text() for axes in pytorch.figure.axes for text in axes.texts]
    assert (texts.count("3.0"), texts.count("0.94"), texts.count("137")) == (143, 143, 140)
    assert "Grey points" in pytorch.caption
    assert "Grey points" not in jax.caption
    assert "median 0.99×, 27 of 27 below 1" in jax.figure.axes[0].get_title("right")


def test_points_that_were_left_out_are_grey_and_slow_ones_are_framed() -> None:
    cells = [
        map_drawings.Cell("GRU", TRAINING, 16, 1, 4, 0.9),
        map_drawings.Cell("GRU", TRAINING, 16, 1, 16, 2.0),
        map_drawings.Cell("GRU", TRAINING, 16, 1, 64, None),
    ]
    axes = map_drawings.draw(cells, 0.95).axes[0]
    boxes = [(box.get_x(), box.get_facecolor()) for box in axes.patches if box.get_fill()]
    assert [x for x, _ in boxes] == [0, 1, 2]
    red, _, blue, _ = zip(*(color for _, color in boxes), strict=True)
    assert red[0] > blue[0]
    assert red[1] < blue[1]
    assert red[2] == blue[2]
    assert [round(box.get_x()) for box in axes.patches if not box.get_fill()] == [0]


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(0.058, "0.06"), (0.94, "0.94"), (0.996, "1.0"), (1.26, "1.3"), (9.97, "10"), (137.2, "137")],
)
def test_numbers_have_two_digits(ratio: float, text: str) -> None:
    assert map_drawings._number(ratio) == text


def test_keys_say_what_a_size_is() -> None:
    group = Group(AFFINE, "affine_scan, dense", TRAINING, 4, 16, ())
    assert group.key == "affine_scan, dense, training, N=4, B=16"
    assert Group(STACKS, "stack 4-5", TRAINING, 0, 0, ()).key == "stack 4-5, training"
