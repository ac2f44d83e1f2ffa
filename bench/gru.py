"""Section 4.2 of the paper: a GRU that tells instruments by their sound, end to end.

The parts of an iteration for the sets S, M and L (Figure 9, Table 6), and the loss over wall-clock
time (Figure 13), beside PyTorch's autograd. The audio is that of :mod:`bench.audio`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from . import audio, drawing, recurrent
from .drawing import BLUE, ORANGE, PINK, YELLOW, legend
from .experiment import Drawing, Experiment, Options, Piece, Results, Row
from .recurrent import (
    AUTOGRAD,
    CHAIN,
    FORWARD,
    GIVEN,
    HIDDEN,
    JAX_ASSOCIATIVE,
    JAX_SCAN,
    OURS,
    SCAN,
    STEP,
    STEP_OURS,
    Batch,
    Model,
    measure,
    quartiles,
    speedup,
    train,
)

RATE = 3e-4
BATCH = 16  # of the training
BATCHES = (16, 32, 64)
_QUICK_BATCHES = (16,)
_ITERATIONS, _QUICK_ITERATIONS = 300, 20
_QUICK_CLIPS = 8  # of each class

# Seconds of an epoch on a V100, Table 6: forward pass, baseline, forward pass with making the
# Jacobians, BPPSA.
_PAPER: dict[tuple[str, int], tuple[float, float, float, float]] = {
    ("S", 16): (1.66, 3.71, 2.1, 2.94),
    ("S", 32): (0.91, 1.9, 1.09, 1.48),
    ("S", 64): (0.52, 1.0, 0.62, 0.82),
    ("M", 16): (3.21, 6.19, 3.52, 4.2),
    ("M", 32): (1.73, 3.3, 1.83, 2.22),
    ("M", 64): (0.86, 1.82, 1.18, 1.2),
    ("L", 16): (5.78, 11.43, 6.06, 6.91),
    ("L", 32): (3.04, 6.09, 3.23, 3.57),
    ("L", 64): (1.64, 3.19, 2.13, 2.33),
}
# The text's, of an RTX 2070 or 2080 Ti: without making the Jacobians, and of a whole iteration.
_PAPER_BEST_BACKWARD, _PAPER_BEST_OVERALL = 13.4, 2.36

# Whose times are compared: for the backward pass, and for an iteration.
_SPEEDUPS: tuple[dict[tuple[str, str], tuple[str, str, str]], ...] = (
    {
        (AUTOGRAD, OURS): ("backward", ORANGE, "o"),
        (AUTOGRAD, GIVEN): ("backward, Jacobians given", YELLOW, "s"),
        (CHAIN, SCAN): ("no parameters, whole Jacobians given", PINK, "^"),
    },
    {(STEP, STEP_OURS): ("whole iteration", BLUE, "o")},
)
_PARTS = {
    "forward pass": "#bbbbbb",
    "making the Jacobians": YELLOW,
    "rest of the backward pass": ORANGE,
    "backward pass by autograd": BLUE,
    "linear map, loss, Adam": "#666666",
}


# -- Data -----------------------------------------------------------------------------------------


@cache
def _recordings(folder: Path | None, quick: bool) -> audio.Recordings:
    return audio.load(folder, _QUICK_CLIPS if quick else None)


@cache
def _features(folder: Path | None, quick: bool, name: str) -> NDArray[Any]:
    return audio.features(_recordings(folder, quick), audio.SETS[name])


def _batches(options: Options, name: str, batch: int, count: int) -> list[Callable[[], Batch]]:
    """Batches of a set in random order, again and again."""
    x = _features(options.data, options.quick, name)
    labels = _recordings(options.data, options.quick).labels
    chosen = recurrent.in_random_order(np.random.default_rng(0), len(x), batch, count)

    def make(some: NDArray[np.int64]) -> Batch:
        frames_first = np.ascontiguousarray(x[some].transpose(1, 0, 2))
        return torch.from_numpy(frames_first), torch.from_numpy(labels[some])

    return [partial(make, some) for some in chosen]


# -- Pieces ---------------------------------------------------------------------------------------


def _key(name: str, batch: int) -> str:
    return f"{name} B={batch}"


def _training(name: str) -> str:
    return f"training {name}"


def _model(options: Options, name: str) -> Model:
    classes = len(_recordings(options.data, options.quick).classes)
    return Model("GRU", audio.SETS[name].shape[1], classes, RATE, options.device)


def _iterations(options: Options) -> int:
    return _QUICK_ITERATIONS if options.quick else _ITERATIONS


def _pieces(options: Options) -> Iterable[Piece]:
    def size(name: str, batch: int) -> Results:
        (make,) = _batches(options, name, batch, 1)
        jax = not options.quick or name == "L"
        return measure(_model(options, name), make(), quick=options.quick, jax=jax)

    def training(name: str) -> Results:
        batches = _batches(options, name, BATCH, _iterations(options))
        return train(_model(options, name), batches, (audio.SETS[name].shape[0], BATCH))

    batches = _QUICK_BATCHES if options.quick else BATCHES
    sizes = [Piece(_key(*sizes), partial(size, *sizes)) for sizes in product(audio.SETS, batches)]
    return sizes + [Piece(_training(name), partial(training, name)) for name in audio.SETS]


def _about(options: Options) -> dict[str, Any]:
    recordings = _recordings(options.data, options.quick)
    shapes = {name: "{} × {}".format(*each.shape) for name, each in audio.SETS.items()}
    return recurrent.about("GRU", options) | {
        "audio": recordings.name,
        "classes": list(recordings.classes),
        "clips of 3 s": len(recordings.labels),
        "frames × coefficients": shapes,
        "optimiser": f"Adam, learning rate {RATE:g}",
        "iterations of each training": _iterations(options),
    }


# -- Tables ---------------------------------------------------------------------------------------


def _rows(results: Results) -> list[Row]:
    pieces = _measured(results)
    rows = []
    for (name, batch), piece in pieces.items():
        if batch != BATCH:
            continue
        where = f"GRU, {HIDDEN} units, float32, set {name}, T={piece['steps']:,}, B={batch}"
        rows.append(recurrent.row(f"Backward pass of a {where}", piece, AUTOGRAD, OURS))
        for peer in (JAX_SCAN, JAX_ASSOCIATIVE):
            what = "the gradients of its states, Jacobians given"
            rows.append(recurrent.row(what, piece, peer, SCAN))
        rows.append(recurrent.row(f"Training step of a {where}", piece, STEP, STEP_OURS))
    if len(pieces) > 1:
        for what, theirs, ours, paper in (
            ("Backward pass of the GRU, Jacobians given", AUTOGRAD, GIVEN, _PAPER_BEST_BACKWARD),
            ("Training step of the GRU", STEP, STEP_OURS, _PAPER_BEST_OVERALL),
        ):
            best = max(pieces, key=lambda key: speedup(pieces[key], theirs, ours)[1])
            said = f"{what}, at best: set {best[0]}, B={best[1]}"
            rows.append(recurrent.row(said, pieces[best], theirs, ours, paper))
    return [row for row in rows if row]


def _measured(results: Results) -> dict[tuple[str, int], Results]:
    """Return the pieces but the trainings, by set and batch, in that order."""
    every = {
        (name, batch): results["pieces"].get(_key(name, batch))
        for name, batch in product(audio.SETS, BATCHES)
    }
    return {key: piece for key, piece in every.items() if piece}


# -- Pictures -------------------------------------------------------------------------------------


def _drawings(results: Results) -> list[Drawing]:
    keys = {name: _training(name) for name in audio.SETS if _training(name) in results["pieces"]}
    trainings = {name: results["pieces"][key] for name, key in keys.items()}
    drawings = [_losses(trainings, results["about"]["audio"])] if trainings else []
    pieces = _measured(results)
    if pieces:
        drawings += [_parts(pieces), _speedups(pieces)]
    return drawings


def _losses(trainings: dict[str, Results], heard: str) -> Drawing:
    figure, panels = drawing.panels(2, len(trainings), 4 * len(trainings), 6)
    for column, (name, training) in zip(panels.T, trainings.items(), strict=True):
        recurrent.plot_training(*column, training)
        column[0].set_title(f"{name}: T={training['steps']:,}", fontsize="medium")
    for axes, label in zip(panels[:, 0], recurrent.TRAINING_LABELS, strict=True):
        axes.set_ylabel(label)
    legend(figure, panels.flat)
    said = " ".join(
        f"{name}: {recurrent.said_of_seconds(training)}. {recurrent.said_of_losses(training)}"
        for name, training in trainings.items()
    )
    caption = (
        f"The GRU at B={BATCH}, trained by autograd and by the scan from the same parameters on "
        f"the same batches, in turns, on {heard} (the paper's Figure 13, on IRMAS). Thick lines "
        f"are means over a tenth of the run. {said}"
    )
    return Drawing("Loss over wall-clock time", caption, figure)


def _parts(pieces: dict[tuple[str, int], Results]) -> Drawing:
    """Two bars for each size: autograd, and ours."""
    figure, [[axes]] = drawing.panels(1, 1, 10, 4.4)
    for k, (key, piece) in enumerate(pieces.items()):
        median = {name: quartiles(piece, name)[1] for name in piece["samples"]}
        whole = median[STEP]
        making = max(median[OURS] - median[GIVEN], 0)
        bars = (
            (whole, (median[FORWARD], 0, 0, median[AUTOGRAD])),
            (median[STEP_OURS], (median[FORWARD], making, median[OURS] - making, 0)),
        )
        for x, (step, parts) in zip((k - 0.2, k + 0.2), bars, strict=True):
            bottom, rest = 0.0, max(step - sum(parts), 0)
            for height, (label, color) in zip((*parts, rest), _PARTS.items(), strict=True):
                axes.bar(x, height / whole, 0.36, bottom, color=color, label=label)
                bottom += height / whole
        _, baseline, _, bppsa = _PAPER[key]
        axes.hlines(bppsa / baseline, k, k + 0.4, color="grey", ls="--", label="paper, V100")
    axes.set_xticks(range(len(pieces)), [f"{name}\nB={batch}" for name, batch in pieces])
    axes.set_ylabel("time over an iteration by autograd")
    drawing.plain(axes)
    legend(figure, [axes], 3)
    caption = (
        "An iteration by autograd (left bars) and by the scan (right bars), as multiples of the "
        "one by autograd. Medians of the parts on their own; what they leave of the whole is the "
        "rest, where it also shows that autograd's forward pass takes longer when it is recorded. "
        "Dashed is the whole of the paper's on a V100, from its Table 6 (Figure 9)."
    )
    return Drawing("Parts of an iteration", caption, figure)


def _speedups(pieces: dict[tuple[str, int], Results]) -> Drawing:
    figure, [panels] = drawing.panels(1, 2, 11, 4.6)
    grey: dict[str, Any] = {"color": "grey", "lw": 1.4}
    for axes, pairs, best in zip(
        panels, _SPEEDUPS, (_PAPER_BEST_BACKWARD, _PAPER_BEST_OVERALL), strict=True
    ):
        for j, ((theirs, ours), (label, color, marker)) in enumerate(pairs.items()):
            points = {
                k + 0.15 * (j - (len(pairs) - 1) / 2): speedup(piece, theirs, ours)
                for k, piece in enumerate(pieces.values())
            }
            style = {"ls": "", "label": label, "color": color, "marker": marker}
            recurrent.plot_with_spread(axes, points, **style)
        axes.axhline(best, ls="-.", label="paper, best", **grey)
        axes.set_xticks(range(len(pieces)), [f"{name}\nB={batch}" for name, batch in pieces])
        axes.grid(axis="y", alpha=0.25)
    for k, key in enumerate(pieces):
        forward, baseline, with_making, bppsa = _PAPER[key]
        ratios = (baseline - forward) / (bppsa - with_making), baseline / bppsa
        for axes, ratio in zip(panels, ratios, strict=True):
            # A difference of 0.02 s says nothing, as the seconds are rounded to 0.01 s.
            if axes is panels[1] or bppsa - with_making > 0.05:
                axes.hlines(ratio, k - 0.3, k + 0.3, ls="--", label="paper, V100", **grey)
    backward, whole = panels
    backward.set(yscale="log", ylabel="time of the backward pass by autograd over ours")
    drawing.decades(backward.yaxis, "{:g}")
    whole.set(ylim=(0, None), ylabel="time of an iteration with autograd over ours")
    legend(figure, panels, 3)
    caption = (
        "How many times as long autograd takes for the backward pass (left) and for a whole "
        "iteration (right), by sets and batch sizes: medians, with bars from the quartiles of "
        "both. Dashed is the paper's on a V100, from its Table 6; its backward pass is given the "
        "Jacobians, and is left out where the table's seconds are too few to tell (M, B=64). "
        f"Dash-dotted are its best, {_PAPER_BEST_BACKWARD}× and {_PAPER_BEST_OVERALL}×, on an RTX "
        "2070 or 2080 Ti (Figure 9)."
    )
    return Drawing("Speedups", caption, figure)


EXPERIMENT = Experiment(
    name="gru",
    title="GRU: instruments by their sound, end to end",
    pieces=_pieces,
    about=_about,
    drawings=_drawings,
    rows=_rows,
)
