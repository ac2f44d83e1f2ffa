"""Pictures and table of the pruned VGG-11."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter, PercentFormatter

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

__all__ = ["PAPER", "drawings", "rows"]

# The paper's accuracies on CIFAR-10: trained, and pruned and trained again, 100 epochs each.
PAPER = {"trained": 0.901, "retrained": 0.889}

# Colours that everybody can tell apart (Okabe and Ito, 2008).
_STYLES: dict[str, dict[str, Any]] = {
    OURS: {"color": "#d55e00", "marker": "o"},
    VALUES: {"color": "#d55e00", "marker": "^"},
    PARAMETERS: {"color": "#d55e00", "marker": "D"},
    UP_SWEEP: {"color": "#e69f00", "marker": "o"},
    SCIPY: {"color": "#0072b2", "marker": "s"},
    MKL: {"color": "#56b4e9", "marker": "v"},
    CUSPARSE: {"color": "#0072b2", "marker": "X"},
    REUSE: {"color": "#56b4e9", "marker": "P"},
    TORCH: {"color": "#009e73", "marker": "^"},
    TORCH_PARAMETERS: {"color": "#009e73", "marker": "D"},
}
_FLOOR: dict[str, Any] = {"color": "black", "ls": ":", "lw": 1.5}
_CALL: dict[str, Any] = {"color": "#d55e00", "ls": (0, (6, 4)), "lw": 0.8}
_PUBLISHED: dict[str, Any] = {"color": "grey", "ls": "--", "lw": 1.2}


def drawings(results: Results) -> list[Drawing]:
    """All that the pieces there are allow to draw."""
    pieces, about = results["pieces"], results["about"]
    found = []
    if "training" in pieces:
        found.append(_training(pieces["training"], f"{_name(about)} trained on {about['images']}"))
    if "flop" in pieces:
        found.append(_flop(pieces["flop"]))
    groups = {key: piece for key, piece in pieces.items() if key.startswith("steps: ")}
    if any(group["works"] for group in groups.values()):
        found.append(_steps(groups))
    whole = {key: piece for key, piece in pieces.items() if key.startswith("backward, ")}
    if whole:
        found.append(_backward(whole))
    return found


# -- Training -------------------------------------------------------------------------------------


def _training(piece: Results, what: str) -> Drawing:
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots()
    trained, retrained = (piece[part]["test accuracy"] for part in PAPER)
    pruned = len(trained)
    epochs = np.arange(1, pruned + len(retrained) + 1)
    axes.plot(epochs[:pruned], trained, "o-", color="#0072b2", ms=4, label="all weights")
    axes.plot(epochs[pruned:], retrained, "s-", color="#d55e00", ms=4, label="after pruning")
    start, middle, end = 0.5, pruned + 0.5, epochs[-1] + 0.5
    axes.hlines(PAPER["trained"], start, middle, **_PUBLISHED, label="published (CIFAR-10)")
    axes.hlines(PAPER["retrained"], middle, end, **_PUBLISHED)
    axes.axvline(middle, color="black", lw=0.8)
    axes.set(xlabel="epoch", ylabel="test accuracy", ylim=(0, 1.02), xlim=(start, end))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    _plain(axes)
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
    names = list(piece["steps"])
    figure = Figure(figsize=(4.4 * len(names), 4.9), layout="constrained")
    panels = figure.subplots(1, len(names), sharex=True, sharey=True, squeeze=False)[0]
    backward = piece["back-propagation"]
    for axes, name in zip(panels, names, strict=True):
        steps = piece["steps"][name]
        for vector, marker, color, what in (
            (True, "o", "#d55e00", "matrix-vector"),
            (False, "s", "#0072b2", "matrix-matrix"),
        ):
            for critical in (False, True):
                _scatter(
                    axes,
                    [s for s in steps if (s["start"] == 0) == vector and s["critical"] == critical],
                    label=what + ", critical" * critical,
                    marker=marker,
                    ms=7 if critical else 6,
                    color=color,
                    mfc=color if critical else "white",
                    mec="black" if critical else color,
                    mew=0.7 if critical else 1.1,
                )
        _scatter(
            axes,
            backward,
            label="back-propagation, dense",
            marker="o",
            ms=10,
            color="#009e73",
            mfc="none",
            mew=1.3,
        )
        full = [step for step in steps if step["estimated"]]
        _scatter(
            axes, full, label="at most: a product counts as full", marker=7, ms=7, color="black"
        )
        critical = sum(step["flop"] for step in steps if step["critical"])
        total = sum(step["flop"] for step in steps)
        axes.set_title(
            f"{name}: {piece['schedules'][name].removeprefix('Schedule.')}\n"
            f"{_count(total)} FLOP, {_count(critical)} of them critical",
            fontsize="medium",
        )
        axes.set(xscale="log", yscale="log", xlabel="FLOP if nothing were sparse")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(EngFormatter(sep=""))
            axis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.25)
        _plain(axes)
    panels[0].set_ylabel("FLOP of a step, one image")
    entries = {line.get_label(): line for axes in panels for line in axes.lines}
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        markerscale=0.9,
    )
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


def _scatter(axes: Axes, steps: Sequence[Results], **style: Any) -> None:
    if steps:
        x, y = zip(*((step["dense_flop"], step["flop"]) for step in steps), strict=True)
        axes.plot(x, y, ls="", **style)


def _largest(piece: Results) -> str:
    """What the largest product of every schedule is."""
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
    figure = Figure(figsize=(12, 1 + 3.7 * len(panels)), layout="constrained")
    for axes, (title, works) in zip(
        figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels.items(), strict=True
    ):
        labels = list(works)
        _times(axes, list(works.values()))
        axes.set_xticks(range(len(labels)), labels, rotation=35, ha="right", rotation_mode="anchor")
        axes.set_xlim(-0.6, len(labels) - 0.4)
        axes.set_title(title, fontsize="medium", loc="left")
        axes.axhline(call, **_CALL)
    _legend(figure)
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
            low, high = np.quantile(work["samples_seconds"][contender], (0.25, 0.75))
            axes.vlines(at, low, high, color=style["color"], lw=4, alpha=0.3)
            axes.plot(at, work["median_seconds"][contender], ls="", ms=5, label=contender, **style)
    axes.set(yscale="log", ylabel="time")
    axes.yaxis.set_major_formatter(EngFormatter("s"))
    axes.grid(axis="y", alpha=0.25)
    axes.tick_params(axis="x", length=0)
    _plain(axes)


def _legend(figure: Figure) -> None:
    """Every contender once, the floor, and what a call costs."""
    lines = {str(line.get_label()): line for axes in figure.axes for line in axes.lines}
    entries = {name: lines[name] for name in _STYLES if name in lines}
    for label, style in (("the floor", _FLOOR), ("ours: a call that computes nothing", _CALL)):
        entries[label] = figure.axes[0].plot([], [], **style)[0]
    figure.legend(
        list(entries.values()), list(entries), loc="outside upper center", ncols=4, frameon=False
    )


def _backward(pieces: dict[str, Results]) -> Drawing:
    """Time of the whole backward pass, by the batch."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    panels = figure.subplots(1, len(pieces), squeeze=False)[0]
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
        _plain(axes)
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


def _plain(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _count(number: float) -> str:
    return EngFormatter(sep="")(float(f"{number:.3g}"))


# -- Table ----------------------------------------------------------------------------------------


def rows(results: Results) -> list[Row]:
    """The backward pass, and the largest products that were timed."""
    found = []
    net = f"pruned {_name(results['about'])}"
    for key, piece in results["pieces"].items():
        batch = key.removeprefix("backward, ")
        works = piece.get("works", {})
        if key.startswith("backward, "):
            medians = works["backward"]["median_seconds"]
            for what, ours, peers in (
                ("gradients, values known", OURS, (SCIPY, CUSPARSE)),
                ("gradients", VALUES, (TORCH,)),
                ("gradients and those of parameters", PARAMETERS, (TORCH_PARAMETERS,)),
            ):
                work = f"{net}, {batch}: {what}"
                found += [
                    Row(work, peer, medians[peer], medians[ours])
                    for peer in peers
                    if peer in medians
                ]
        elif key.startswith("steps: up-sweep") and works:
            label, work = max(works.items(), key=lambda item: item[1]["flop"])
            medians = work["median_seconds"]
            found += [
                Row(f"{net}, product {label}", peer, medians[peer], medians[OURS])
                for peer in (SCIPY, MKL, CUSPARSE, REUSE)
                if peer in medians
            ]
    return found
