"""The page on papers says of our figures what the results say that it names."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from bench import pipeline
from bench.experiment import RESULTS, load
from bench.files import read
from bench.readme import ratio

PAGES = Path(__file__).parents[2] / "docs" / "papers"
NAMES = "bppsa", "integrated", "deepa", "stale-weights", "fastest"
TEXT = "".join((PAGES / f"{name}.md").read_text() for name in NAMES)
FILES = {file.path.name: file for file in read(RESULTS)[0]}
LINES = [
    [cell.strip() for cell in line[1:].split("|")]
    for line in TEXT.splitlines()
    if line.startswith("|")
]


def test_the_scan() -> None:
    first = TEXT[: TEXT.index("# Integrated model, batch and domain parallelism")]
    name = ""
    lines = re.findall(r"^\| .* \| ([\d,.]+)× \| (\S+×) \| (.*) \|$", first, re.MULTILINE)
    assert len(lines) == 9
    for published, ours, where in lines:
        name = name if where == "the same" else where.rpartition("/")[2].strip(")")
        rows = load(FILES[name].kind).rows(FILES[name].results)
        shown = {(row.paper, ratio(row.theirs / row.ours)) for row in rows}
        assert (float(published.replace(",", "")), ours) in shown


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    (name,) = set(re.findall(r"\(\.\./\.\./bench/results/(published-.*?\.json)\)", TEXT))
    pieces: dict[str, Any] = FILES[name].results["pieces"]
    return pieces


def check(begins: str, rows: list[list[float]], column: int = 1, after: int = 0) -> None:
    """Compare the lines from one on, or so many behind it, with values that are rounded there."""
    (at,) = (k for k, cells in enumerate(LINES) if cells[0].startswith(begins))
    for cells, values in zip(LINES[at + after :], rows, strict=False):
        shown = re.findall(r"[\d.]+(?=×|%|–\d)", " ".join(cells[column:]))
        assert len(shown) == len(values), cells
        for number, value in zip(shown, values, strict=True):
            unit = 10.0 ** -len(number.partition(".")[2])
            assert abs(float(number) - value) <= 0.5001 * unit, (cells, value)


def test_integrated_parallelism(published: dict[str, Any]) -> None:
    def gains(overlap: str, way: str) -> list[float]:
        """Return those of communication, and in all."""
        batch, other = (published["grids of AlexNet"][overlap][key] for key in ("batch", way))
        return [batch[key] / other[key] for key in ("communicating", "nanoseconds")]

    figure6, best = "Figure 6: 16 × 32, model in all layers", "the best grid"
    check("16 × 32, model in all layers", [[each] for each in gains("no overlap", figure6)], 2)
    check("model in linear layers, best", [[each] for each in gains("no overlap", best)], 2)
    check("the same, in all, with overlap", [gains("overlap", best)[1:]], 2)
    check("a plan per layer", [gains("no overlap", "per layer")], 2)


def test_times_over_the_batch_size(published: dict[str, Any]) -> None:
    shown = 1, 4, 16, 64
    predicted = published["time by batch size, predicted"]
    for name in ("LeNet-5", "ResNet-20", "AlexNet"):
        key = name.lower().replace("lenet-", "lenet")
        taken = predicted["nanoseconds of a sample"][f"{key}, built in"]
        places = [predicted["sizes"].index(size) for size in shown]
        check(f"{name}, built-in", [[taken[k] / min(taken) for k in places]])
        if name != "AlexNet":
            seconds = published[f"time by batch size, {key}, measured"]["seconds"]
            each = {int(size): min(taken) / int(size) for size, taken in seconds.items()}
            least = min(each.values())
            check(f"{name}, measured", [[each[size] / least for size in shown if size in each]])


def test_a_configuration_for_every_layer(published: dict[str, Any]) -> None:
    networks = "alexnet-owt", "vgg16", "inception-v3"
    sizes, nodes = (
        [published[f"{title}, {network}"]["images a second"] for network in networks]
        for title in ("16 GPUs", "P100 in nodes of four")
    )

    def faster(rates: Any) -> float:
        return float(rates["overlap"]["per layer"] / rates["no overlap"]["images"])

    usual = [each["512"] for each in sizes]
    hidden, plain = ([each[key] for each in usual] for key in ("overlap", "no overlap"))
    check("ours, with overlap", [[each["one weird trick"] / each["images"] for each in hidden]])
    check("per layer with overlap over images", [[faster(each) for each in usual]])
    gained = [
        100 * (with_["per layer"] / without["per layer"] - 1)
        for with_, without in zip(hidden, plain, strict=True)
    ]
    check("what overlap gains per layer", [gained], after=1)
    ends = [faster(each[size]) for each in sizes for size in ("2048", "128")]
    check("ours, 128 to 2,048", [ends])
    check("4 GPUs of one node", [[faster(each["4"]) for each in nodes]], after=1)
    check("16 GPUs on four nodes", [[faster(each["16"]) for each in nodes]], after=1)


def test_pipelines_with_stale_weights(published: dict[str, Any]) -> None:
    two, memory = published["two accelerators"]["p100"], published["memory of pipelines"]
    depths = "20", "56", "110", "224", "362"
    check("ResNet-20 on two workers", [[two[depth]["speedup"]] for depth in depths], 2)
    check("ResNet-362, pipelined for half", [[two["362"]["hybrid"]]], 2)
    stale, copies = (
        {name: 100 * each[key] for name, each in memory.items()} for key in ("stale", "stashing")
    )
    most = max(stale[f"resnet-{depth}"] for depth in depths[1:])
    check("more memory", [[most], [stale["resnet-20"]], [stale["lenet5"]]], 2)
    check("ResNet-20 with PipeDream", [[copies["resnet-20"]], [copies["lenet5"]]], 2)


def test_which_strategy_is_fastest() -> None:
    last = TEXT[TEXT.index("# Which of them is fastest, and where") :]
    (name,) = re.findall(r"\(\.\./\.\./bench/results/(strategies-.*?\.json)\)", last)
    cell = r"([\d.,]+|too large|–)"
    lines = re.findall(rf"^\| (.+?) \| (\d+) \| {cell}: (.+) \| {cell} \| {cell} \|$", last, re.M)
    assert len(lines) == 21
    slower: dict[str, list[float]] = {"images": [], "recurrent": []}
    for network, workers, fastest, names, *others in lines:
        key = network.lower().replace(", t = ", ":").replace(",", "")
        key = re.sub(r"(lenet|vgg)-", r"\1", key)
        every = FILES[name].results["pieces"][f"predicted, {key}"]["comparisons"]
        (compared,) = (each for each in every if each["workers"] == int(workers))
        known = {each["strategy"]: each for each in compared["predictions"]}
        least = min(each["total"] for each in known.values() if each["fits"])
        assert is_shown(fastest, least)
        assert all(
            is_shown(fastest, known[each]["total"]) for each in re.split(", (?!stale)", names)
        )
        for strategy, shown in zip(("batch", "scan"), others, strict=True):
            if shown == "–":
                assert strategy not in known
            elif shown == "too large":
                assert not known[strategy]["fits"]
            else:
                assert is_shown(shown, known[strategy]["total"])
        if known["scan"]["fits"]:
            kind = "recurrent" if ":" in key else "images"
            slower[kind].append(known["scan"]["total"] / least)
    assert "within 4% of the fastest" in last
    assert max(slower["recurrent"]) < 1.04
    assert "takes 1.1 to 21 times as long as the fastest" in last
    assert [float(f"{limit(slower['images']):.2g}") for limit in (min, max)] == [1.1, 21]


def test_what_is_said_of_the_fastest() -> None:
    last = TEXT[TEXT.index("# Which of them is fastest, and where") :]
    (name,) = re.findall(r"\(\.\./\.\./bench/results/(strategies-.*?\.json)\)", last)

    def totals(network: str) -> dict[int, dict[str, float]]:
        """Return the time of each strategy that fits, by the number of workers."""
        return {
            each["workers"]: {p["strategy"]: p["total"] for p in each["predictions"] if p["fits"]}
            for each in FILES[name].results["pieces"][f"predicted, {network}"]["comparisons"]
        }

    stale, gains = "pipeline, stale weights", {}
    for workers, known in totals("resnet-110").items():
        exact = min(time for strategy, time in known.items() if strategy != stale)
        assert workers > 64 or workers == 1 or exact == known["batch"]
        gains[workers] = exact / known.get(stale, math.inf) - 1
    first = [workers for workers, gain in gains.items() if gain > 0 and workers > 1]
    assert "the fastest of all on 2 to 32 workers, by 2 to 8%" in last
    assert first == [2, 4, 8, 16, 32]
    assert [round(100 * limit(gains[each] for each in first)) for limit in (min, max)] == [2, 8]
    lenet5 = totals("lenet5")
    assert "64 workers are little more than twice as fast as one" in last
    assert 2 < min(lenet5[1].values()) / min(lenet5[64].values()) < 2.5


def is_shown(milliseconds: str, nanoseconds: float) -> bool:
    """Return whether a page shows a time as it is, but for rounding to three digits."""
    return float(milliseconds.replace(",", "")) == pytest.approx(nanoseconds / 1e6, rel=0.005)


def test_accuracies_of_pipelines() -> None:
    part = TEXT[TEXT.index("Points of accuracy lost") : TEXT.index("**Age matters**")]
    (name,) = re.findall(r"\(\.\./\.\./bench/results/(pipeline-.*?\.json)\)", part)
    pieces = FILES[name].results["pieces"]
    plain, deep = pieces.pop(pipeline.PLAIN), pieces["ResNet-20, not pipelined, rate 0.01"]
    lost = [
        (pipeline._lost(piece, deep if key.startswith("ResNet") else plain), len(piece["runs"]))
        for key, piece in pieces.items()
        if "runs" in piece and "not pipelined" not in key
    ]
    shown = re.findall(r"\| (−?[\d.]+) ± ([\d.]+) \| (\d+) \|$", part, re.MULTILINE)
    assert len(shown) == len(lost) == 13
    for (mean, error, runs), (told, count) in zip(shown, lost, strict=True):
        assert int(runs) == count
        for cell, number in zip((mean.replace("−", "-"), error), told.split(" ± "), strict=True):
            decimals = len(cell.partition(".")[2])
            assert float(cell) == pytest.approx(float(number), abs=0.5 * 10**-decimals + 0.005)
