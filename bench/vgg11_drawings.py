"""Pictures and table of the pruned VGG-11."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter, PercentFormatter

from . import drawing
from .drawing import BLUE, GREEN, ORANGE, SKY, YELLOW, legend, plain
from .experiment import Drawing, Results, Row
from .vgg11_timing import (
    CUSPARSE,
    MKL,
    OURS,
    PARAMETERS,
    REUSE,
    SCIPY,
    TORCH,
    TORCH_PARAMETERS,
    UP_SWEEP,
    VALUES,
)

# The paper's accuracies on CIFAR-10: trained, and pruned and trained again, 100 epochs each.
PAPER = {"trained": 0.901, "retrained": 0.889}

_STYLES: dict[str, dict[str, Any]] = {
    OURS: {"color": ORANGE, "marker": "o"},
    VALUES: {"color": ORANGE, "marker": "^"},
    PARAMETERS: {"color": ORANGE, "marker": "D"},
    UP_SWEEP: {"color": YELLOW, "marker": "o"},
    SCIPY: {"color": BLUE, "marker": "s"},
    MKL: {"color": SKY, "marker": "v"},
    CUSPARSE: {"color": BLUE, "marker": "X"},
    REUSE: {"color": SKY, "marker": "P"},
    TORCH: {"color": GREEN, "marker": "^"},
    TORCH_PARAMETERS: {"color": GREEN, "marker": "D"},
}
_FLOOR: dict[str, Any] = {"color": "black", "ls": ":", "lw": 1.5}
_CALL: dict[str, Any] = {"color": ORANGE, "ls": (0, (6, 4)), "lw": 0.8}
_PUBLISHED: dict[str, Any] = {"color": "grey", "ls": "--", "lw": 1.2}


def drawings(results: Results) -> list[Drawing]:
    """Return the pictures of those pieces that there are."""
    pieces, about = results["pieces"], results["about"]
    drawings = []
    if "training" in pieces:
        what = f"{_name(about)} trained on {about['images']}"
        drawings.append(_training(pieces["training"], what))
    if "flop" in pieces:
        drawings.append(_flop(pieces["flop"]))
    groups = {key: piece for key, piece in pieces.items() if key.startswith("steps: ")}
    if any(group["works"] for group in groups.values()):
        drawings.append(_steps(groups))
    whole = {key: piece for key, piece in pieces.items() if key.startswith("backward, ")}
    return drawings + ([_backward(whole)] if whole else [])


# -- Training -------------------------------------------------------------------------------------


def _training(piece: Results, what: str) -> Drawing:
    figure, [[axes]] = drawing.panels(1, 1, 8, 3.4)
    trained, retrained = (piece[part]["test accuracy"] for part in PAPER)
    pruned = len(trained)
    epochs = np.arange(1, pruned + len(retrained) + 1)
    axes.plot(epochs[:pruned], trained, "o-", color=BLUE, ms=4, label="all weights")
    axes.plot(epochs[pruned:], retrained, "s-", color=ORANGE, ms=4, label="after pruning")
    start, middle, end = 0.5, pruned + 0.5, epochs[-1] + 0.5
    axes.hlines(PAPER["trained"], start, middle, **_PUBLISHED, label="published (CIFAR-10)")
    axes.hlines(PAPER["retrained"], middle, end, **_PUBLISHED)
    axes.axvline(middle, color="black", lw=0.8)
    axes.set(xlabel="epoch", ylabel="test accuracy", ylim=(0, 1.02), xlim=(start, end))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    plain(axes)
    axes.legend(frameon=False, loc="lower right")
    kept = sum(piece["kept weights"]) / sum(piece["weights"])
    caption = (
        f"{what}: {trained[-1]:.1%} of the test images right with all weights, "
        f"{retrained[-1]:.1%} with the {kept:.1%} that pruning kept of the convolutions'. The "
        "dashed lines are the paper's, on CIFAR-10 and after 100 epochs each: "
        f"{PAPER['trained']:.1%} and {PAPER['retrained']:.1%}."
    )
    return Drawing("Accuracy before and after pruning", caption, figure)


# -- FLOP -----------------------------------------------------------------------------------------


def _flop(piece: Results) -> Drawing:
    """As in Figure 10, for some schedules."""
    names, backward = list(piece["steps"]), piece["back-propagation"]
    size = 4.4 * len(names), 4.9
    figure, [panels] = drawing.panels(1, len(names), *size, sharex=True, sharey=True)
    for axes, name in zip(panels, names, strict=True):
        steps = piece["steps"][name]
        _flop_panel(axes, steps, backward)
        critical = sum(step["flop"] for step in steps if step["critical"])
        total = sum(step["flop"] for step in steps)
        axes.set_title(
            f"{name}: {piece['schedules'][name].removeprefix('Schedule.')}\n"
            f"{_count(total)} FLOP, {_count(critical)} of them critical",
            fontsize="medium",
        )
    panels[0].set_ylabel("FLOP of a step, one image")
    legend(figure, panels, 3, markerscale=0.9)
    most = max(step["flop"] for step in backward)
    caption = (
        "FLOP of every step of the backward pass through the pruned convolutional part, by static "
        "analysis: the paper's Figure 10, whose schedule is the first (an up-sweep of two levels, "
        "a linear scan, a down-sweep: section 5.3). The full Blelloch scan and the planner's "
        "choice on this machine are beside it. FLOP are twice the multiply-adds; the green circles "
        "are back-propagation's gradient operators, which multiply by pruned weights as by any "
        f"others: {_count(most)} at most. Filled markers with black edges are on the critical "
        f"path. {_largest(piece)}"
    )
    return Drawing("FLOP of every step", caption, figure)


def _flop_panel(axes: Axes, steps: Sequence[Results], backward: Sequence[Results]) -> None:
    for vector, marker, color, what in (
        (True, "o", ORANGE, "matrix-vector"),
        (False, "s", BLUE, "matrix-matrix"),
    ):
        of_kind = [step for step in steps if (step["start"] == 0) == vector]
        plain_style = {"ms": 6, "mfc": "white", "mec": color, "mew": 1.1}
        critical_style = {"ms": 7, "mfc": color, "mec": "black", "mew": 0.7}
        for critical, style in ((False, plain_style), (True, critical_style)):
            chosen = [step for step in of_kind if step["critical"] == critical]
            label = what + ", critical" * critical
            _scatter(axes, chosen, label=label, marker=marker, color=color, **style)
    circles = {"marker": "o", "ms": 10, "color": GREEN, "mfc": "none", "mew": 1.3}
    _scatter(axes, backward, label="back-propagation, dense", **circles)
    full = [step for step in steps if step["estimated"]]
    label = "at most: a product counts as full"
    _scatter(axes, full, label=label, marker=7, ms=7, color="black")
    axes.set(xscale="log", yscale="log", xlabel="FLOP if nothing were sparse")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(EngFormatter(sep=""))
        axis.set_minor_formatter(NullFormatter())
    plain(axes, "both")


def _scatter(axes: Axes, steps: Sequence[Results], **style: Any) -> None:
    if steps:
        x, y = zip(*((step["dense_flop"], step["flop"]) for step in steps), strict=True)
        axes.plot(x, y, ls="", **style)


def _largest(piece: Results) -> str:
    """Name the largest product of every schedule."""
    said = []
    for name, steps in piece["steps"].items():
        products = [step for step in steps if step["start"] > 0]
        if products:
            most = max(products, key=lambda step: step["flop"])
            said.append(f"{_count(most['flop'])} ({name}, {most['label']})")
    return f"The largest products: {'; '.join(said)}." if said else ""


# -- Times ----------------------------------------------------------------------------------------


def _steps(groups: dict[str, Results]) -> Drawing:
    """Layers above; products, and vectors by products, below."""
    kinds = {
        "A vector by the Jacobian of a layer": ["steps: layers"],
        "A product of Jacobians": [key for key in groups if key.startswith("steps: up-sweep")],
        "A vector by a product": ["steps: by products"],
    }
    panels = {
        title: {
            label: work
            for key in keys
            if key in groups
            for label, work in groups[key]["works"].items()
        }
        for title, keys in kinds.items()
    }
    panels = {title: works for title, works in panels.items() if works}
    call = float(np.median([group["call_seconds"] for group in groups.values()]))
    figure, rows = drawing.panels(len(panels), 1, 12, 1 + 3.7 * len(panels))
    for [axes], (title, works) in zip(rows, panels.items(), strict=True):
        labels = list(works)
        _times(axes, list(works.values()))
        axes.set_xticks(range(len(labels)), labels, rotation=35, ha="right", rotation_mode="anchor")
        axes.set_xlim(-0.6, len(labels) - 0.4)
        axes.set_title(title, fontsize="medium", loc="left")
        axes.axhline(call, **_CALL)
    for label, style in (("the floor", _FLOOR), ("ours: a call that computes nothing", _CALL)):
        rows[0, 0].plot([], [], label=label, **style)
    legend(figure, rows.flat, order=_STYLES, loc="outside upper center")
    left_out = {
        label: why for group in groups.values() for label, why in group["not timed"].items()
    }
    caption = (
        "Measured time of the steps, one image, float32: ours by patterns that are known, the "
        "libraries with the structure of every product to find (all but the numeric stage of "
        "cuSPARSE), PyTorch's autograd of the dense layer. A bar is the middle half of the "
        "samples. The dotted ticks are the floor: the bytes that must be moved over the bandwidth, "
        "or the FLOP over their rate. Our steps are calls of a plan each, and the thin line is "
        "what a call costs that computes nothing; a scan pays that once. The libraries get "
        "products that SciPy made, which leaves out what is zero by chance, such as what a "
        "max-pool did not let through; ours have the pattern that all images share, and so has "
        "the floor."
    )
    if left_out:
        said = ", ".join(f"{label} ({why})" for label, why in left_out.items())
        caption += f" Too large to be timed: {said}."
    return Drawing("Time of every step", caption, figure)


def _times(axes: Axes, works: Sequence[Results]) -> None:
    """Medians and quartiles of all contenders, side by side for each work."""
    known = [c for c in _STYLES if any(c in work["median_seconds"] for work in works)]
    for x, work in enumerate(works):
        axes.hlines(work["floor_seconds"], x - 0.4, x + 0.4, **_FLOOR)
        for k, contender in enumerate(known):
            if contender not in work["median_seconds"]:
                continue
            at = x + 0.6 * ((k + 0.5) / len(known) - 0.5)
            style = _STYLES[contender]
            low, _, high = drawing.quartiles(work["samples_seconds"][contender])
            axes.vlines(at, low, high, color=style["color"], lw=4, alpha=0.3)
            axes.plot(at, work["median_seconds"][contender], ls="", ms=5, label=contender, **style)
    axes.set(yscale="log", ylabel="time")
    axes.yaxis.set_major_formatter(EngFormatter("s"))
    axes.tick_params(axis="x", length=0)
    plain(axes, "y")


def _backward(pieces: dict[str, Results]) -> Drawing:
    """Time of the whole backward pass, by the batch."""
    figure, [panels] = drawing.panels(1, len(pieces), 10, 3.8)
    works = {key: piece["works"]["backward"] for key, piece in pieces.items()}
    shown = [c for c in _STYLES if any(c in work["median_seconds"] for work in works.values())]
    for axes, (key, work) in zip(panels, works.items(), strict=True):
        for y, contender in enumerate(shown):
            if contender not in work["median_seconds"]:
                continue
            color, taken = _STYLES[contender]["color"], work["samples_seconds"][contender]
            axes.plot(taken, np.full(len(taken), y), "|", color=color, alpha=0.25, ms=12)
            axes.plot(work["median_seconds"][contender], y, ms=7, ls="", **_STYLES[contender])
        axes.axvline(work["floor_seconds"], **_FLOOR, label="the floor")
        axes.set_yticks(range(len(shown)), shown if axes is panels[0] else [""] * len(shown))
        axes.set(xscale="log", xlabel="time", title=key.removeprefix("backward, "))
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.xaxis.set_major_formatter(EngFormatter("s"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="x", which="both", alpha=0.2)
        axes.tick_params(axis="y", length=0)
        plain(axes)
    figure.legend(handles=panels[-1].lines[-1:], loc="outside lower right", frameon=False)
    caption = (
        "The whole backward pass of the convolutional part: the gradients of all activations but "
        "the images, where it is said with the values of the Jacobians or with the gradients of "
        "the parameters. Our plan is the planner's choice, and once the paper's. SciPy and "
        "cuSPARSE are loops over the same sparse Jacobians; PyTorch's autograd multiplies by "
        "pruned weights as by any others. Ticks are single samples; the dotted line is the floor "
        "of the gradients alone."
    )
    return Drawing("The whole backward pass", caption, figure)


def _name(about: Results) -> str:
    """Which network it is."""
    narrow = 64 // about["channels of the convolutions"][0]
    return "VGG-11" + f" ({narrow} times narrower)" * (narrow > 1)


def _count(number: float) -> str:
    return EngFormatter(sep="")(float(f"{number:.3g}"))


# -- Table ----------------------------------------------------------------------------------------


def rows(results: Results) -> list[Row]:
    """Return the backward pass, and the largest products that were timed."""
    table = []
    net = f"pruned {_name(results['about'])}"
    for key, piece in results["pieces"].items():
        works = piece.get("works", {})
        if key.startswith("backward, "):
            batch, work = key.removeprefix("backward, "), works["backward"]
            for what, ours, peers in (
                ("gradients, values known", OURS, (SCIPY, CUSPARSE)),
                ("gradients", VALUES, (TORCH,)),
                ("gradients and those of parameters", PARAMETERS, (TORCH_PARAMETERS,)),
            ):
                table += _rows(f"{net}, {batch}: {what}", work, ours, peers)
        elif key.startswith("steps: up-sweep") and works:
            label, work = max(works.items(), key=lambda item: item[1]["flop"])
            table += _rows(f"{net}, product {label}", work, OURS, (SCIPY, MKL, CUSPARSE, REUSE))
    return table


def _rows(what: str, work: Results, ours: str, peers: Sequence[str]) -> list[Row]:
    medians = work["median_seconds"]
    return [Row(what, peer, medians[peer], medians[ours]) for peer in peers if peer in medians]
