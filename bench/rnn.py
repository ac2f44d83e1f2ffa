"""Section 4.1 of the paper: a tanh RNN that classifies bitstreams, end to end.

The backward pass over the sequence length T and the batch size B (Figure 8, Tables 4 and 5), and
the loss over wall-clock time (Figure 7), beside PyTorch's autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from . import drawing, recurrent
from .drawing import BLUE, GREEN, ORANGE, PINK, SKY, YELLOW, legend
from .experiment import Drawing, Experiment, Options, Piece, Results, Row
from .recurrent import (
    AUTOGRAD,
    CHAIN,
    HIDDEN,
    JAX_ASSOCIATIVE,
    JAX_SCAN,
    OURS,
    SCAN,
    STEP,
    STEP_OURS,
    VALUES,
    Batch,
    Model,
    measure,
    quartiles,
    speedup,
    train,
)

SAMPLES, CLASSES, RATE = 32_000, 10, 1e-5
STEPS, BATCH = 1000, 16  # what one of them is while the other varies
LENGTHS = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000)
BATCHES = (2, 4, 8, 16, 32, 64, 128, 256)
_QUICK_LENGTHS, _QUICK_BATCHES = (10, 100, 1000), (2, 16, 64)
_EPOCH, _QUICK_ITERATIONS = SAMPLES // BATCH, 60

# Seconds of an epoch on a V100 over T and over B, Tables 4 and 5: forward pass, baseline, BPPSA.
_Seconds = tuple[float, float, float]
_PAPER: dict[str, dict[int, _Seconds]] = {
    "T": {
        10: (1.57, 4.49, 4.24),
        30: (2.13, 5.5, 4.91),
        100: (3.82, 8.87, 6.64),
        300: (8.79, 18.49, 11.71),
        1000: (25.86, 53.33, 29.29),
        3000: (75.33, 157.11, 79.48),
        10_000: (250.28, 510.13, 265.02),
        30_000: (748.99, 1557.94, 764.31),
    },
    "B": {
        2: (200.65, 409.33, 227.13),
        4: (100.55, 209.67, 112.23),
        8: (51.29, 102.77, 56.37),
        16: (25.86, 53.33, 29.29),
        32: (13.62, 29.51, 15.0),
        64: (7.51, 14.77, 9.27),
        128: (3.87, 7.96, 5.49),
        256: (2.13, 4.02, 3.72),
    },
}
# The text's: at T=1,000, B=16 on an RTX 2070; at best on an RTX 2080 Ti and an RTX 2070.
_PAPER_BACKWARD, _PAPER_BEST_BACKWARD = 16, 108
_PAPER_OVERALL, _PAPER_BEST_OVERALL = 2.73, 2.75

_STYLES: dict[str, dict[str, Any]] = {
    AUTOGRAD: {"color": BLUE, "marker": "s"},
    CHAIN: {"color": SKY, "marker": "s"},
    OURS: {"color": ORANGE, "marker": "o"},
    VALUES: {"color": YELLOW, "marker": "o"},
    SCAN: {"color": PINK, "marker": "o"},
    JAX_SCAN: {"color": GREEN, "marker": "^"},
    JAX_ASSOCIATIVE: {"color": GREEN, "marker": "v", "mfc": "white"},
}


def bitstreams(
    samples: int, steps: int, seed: int = 0
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Bitstreams and their classes: each bit of class c is 1 with probability 0.05 + 0.1 c.

    Equation 8 of the paper. Bits have the shape ``(samples, steps)``, classes ``(samples,)``.
    """
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=samples)
    bits = np.empty((samples, steps), bool)
    for sample, label in zip(bits, labels, strict=True):
        sample[:] = rng.random(steps, np.float32) < 0.05 + 0.1 * label
    return bits, labels


def _batch(bits: NDArray[np.bool_], labels: NDArray[np.int64]) -> Batch:
    """Time first, as PyTorch has it."""
    x = np.ascontiguousarray(bits.T, np.float32)[:, :, None]
    return torch.from_numpy(x), torch.from_numpy(labels)


def _batches(iterations: int) -> list[Callable[[], Batch]]:
    """Batches of the whole data set in random order, again and again."""
    bits, labels = bitstreams(SAMPLES, STEPS)
    chosen = recurrent.in_random_order(np.random.default_rng(1), SAMPLES, BATCH, iterations)
    return [lambda some=some: _batch(bits[some], labels[some]) for some in chosen]


# -- Pieces ---------------------------------------------------------------------------------------


def _sizes(quick: bool) -> list[tuple[int, int]]:
    """(T, B): first the one that both sweeps have in common, then in the order of their work."""
    lengths, batches = (_QUICK_LENGTHS, _QUICK_BATCHES) if quick else (LENGTHS, BATCHES)
    every = {(steps, BATCH) for steps in lengths} | {(STEPS, batch) for batch in batches}
    return sorted(every, key=lambda size: (size != (STEPS, BATCH), size[0] * size[1], size))


def _key(steps: int, batch: int) -> str:
    return f"T={steps} B={batch}"


def _iterations(options: Options) -> int:
    return _QUICK_ITERATIONS if options.quick else _EPOCH


def _pieces(options: Options) -> Iterable[Piece]:
    model = Model("RNN", 1, CLASSES, RATE, options.device)

    def size(steps: int, batch: int) -> Results:
        jax = not options.quick or (steps, batch) == (STEPS, BATCH)
        data = _batch(*bitstreams(batch, steps))
        return measure(model, data, quick=options.quick, jax=jax)

    first, *others = [Piece(_key(*sizes), partial(size, *sizes)) for sizes in _sizes(options.quick)]
    training = Piece(
        "training", lambda: train(model, _batches(_iterations(options)), (STEPS, BATCH))
    )
    return [first, training, *others]


def _about(options: Options) -> dict[str, Any]:
    return recurrent.about("RNN", options) | {
        "data": f"{SAMPLES:,} bitstreams of {CLASSES} classes (equation 8)",
        "optimiser": f"Adam, learning rate {RATE:g}",
        "iterations of the training": _iterations(options),
    }


# -- Tables ---------------------------------------------------------------------------------------

_WORK = f"tanh RNN, {HIDDEN} units, float32"


def _rows(results: Results) -> list[Row]:
    pieces = _measured(results)
    rows = []
    base = pieces.get(_key(STEPS, BATCH))
    if base:
        where = f"T={STEPS:,}, B={BATCH}"
        for what, ours, peers in (
            (f"Backward pass of a {_WORK}, {where}", OURS, {AUTOGRAD: _PAPER_BACKWARD}),
            ("the same without the parameters", VALUES, {CHAIN: None}),
            (
                "the gradients of its states, Jacobians given",
                SCAN,
                {JAX_SCAN: None, JAX_ASSOCIATIVE: None},
            ),
            (f"Training step of a {_WORK}, {where}", STEP_OURS, {STEP: _PAPER_OVERALL}),
        ):
            rows += [recurrent.row(what, base, peer, ours, paper) for peer, paper in peers.items()]
    shortest = pieces.get(_key(min(LENGTHS), BATCH))
    if shortest:
        where = f"T={min(LENGTHS):,}, B={BATCH}"
        rows.append(recurrent.row(f"Backward pass of a {_WORK}, {where}", shortest, AUTOGRAD, OURS))
    rows += [
        _best(pieces, f"Backward pass of a {_WORK}", AUTOGRAD, OURS, _PAPER_BEST_BACKWARD),
        _best(pieces, f"Training step of a {_WORK}", STEP, STEP_OURS, _PAPER_BEST_OVERALL),
    ]
    return [row for row in rows if row]


def _best(pieces: Results, what: str, peer: str, ours: str, paper: float) -> Row | None:
    """Where we are ahead by most, of several sizes."""
    if len(pieces) < 2:
        return None
    piece = max(pieces.values(), key=lambda piece: speedup(piece, peer, ours)[1])
    return recurrent.row(
        f"{what}, at best: T={piece['steps']:,}, B={piece['batch']}", piece, peer, ours, paper
    )


def _measured(results: Results) -> Results:
    """Return the pieces of the sweeps."""
    return {key: piece for key, piece in results["pieces"].items() if "samples" in piece}


# -- Pictures -------------------------------------------------------------------------------------


def _drawings(results: Results) -> list[Drawing]:
    training, pieces = results["pieces"].get("training"), _measured(results)
    drawings = [_losses(training)] if training else []
    if pieces:
        drawings += [_times(pieces), _backward(pieces), _overall(pieces)]
    return drawings


def _losses(training: Results) -> Drawing:
    figure, [panels] = drawing.panels(1, 2, 10, 3.8)
    recurrent.plot_training(*panels, training)
    for axes, label in zip(panels, recurrent.TRAINING_LABELS, strict=True):
        axes.set_ylabel(label)
    legend(figure, panels)
    caption = (
        f"The RNN at T={training['steps']:,}, B={training['batch']}, trained by autograd and by "
        f"the scan from the same parameters on the same {len(training['losses'][OURS]):,} batches, "
        f"in turns: {recurrent.said_of_seconds(training)}. In the paper's Figure 7, of 80 epochs "
        f"of {_EPOCH:,} batches on an RTX 2070, it is {_PAPER_OVERALL}. Thick lines are means over "
        f"a tenth of the run. {recurrent.said_of_losses(training)}"
    )
    return Drawing("Loss over wall-clock time", caption, figure)


def _times(pieces: Results) -> Drawing:
    figure, panels = _sweeps("ms of a backward pass")
    for axes, along in zip(panels, "TB", strict=True):
        chosen = _along(pieces, along)
        for name, style in _STYLES.items():
            points = {
                size: quartiles(piece, name, 1e-3)
                for size, piece in chosen.items()
                if name in piece["samples"]
            }
            recurrent.plot_with_spread(axes, points, label=name, **style)
        for name in (OURS, SCAN):
            floor = [1e3 * piece["floors"][name] for piece in chosen.values()]
            axes.plot(list(chosen), floor, ls=":", color=_STYLES[name]["color"], lw=1.5)
    legend(figure, panels)
    caption = (
        "A backward pass over the sequence length (left) and over the fraction of the device that "
        f"a sample has (right): medians, and the quartiles as bars. “{OURS}” makes the Jacobians, "
        f"scans, and sums up the gradients of the parameters, where “{AUTOGRAD}” ends, too; what "
        "has no parameters ends with the gradients of the states. The scan of whole Jacobians is "
        "given them, as JAX is. Dotted are the floors of all of ours and of that scan: what must "
        "be moved and computed, at the rates that were measured on this device."
    )
    return Drawing("Time of the backward pass", caption, figure)


def _backward(pieces: Results) -> Drawing:
    figure, panels = _sweeps("time of autograd over ours")
    for axes, along in zip(panels, "TB", strict=True):
        chosen = _along(pieces, along)
        for theirs, ours, label in (
            (AUTOGRAD, OURS, "parameters too"),
            (CHAIN, VALUES, "no parameters"),
            (CHAIN, SCAN, "no parameters, whole Jacobians given"),
        ):
            points = {size: speedup(piece, theirs, ours) for size, piece in chosen.items()}
            recurrent.plot_with_spread(axes, points, label=label, **_STYLES[ours])
        published = {
            size: (baseline - forward) / (bppsa - forward)
            for size, (forward, baseline, bppsa) in _PAPER[along].items()
        }
        _plot_paper(axes, along, published, _PAPER_BACKWARD, _PAPER_BEST_BACKWARD)
    legend(figure, panels)
    caption = (
        "How many times as long autograd takes: medians, with bars from the quartiles of both. "
        "Dashed is the paper's on a V100: the seconds of its Tables 4 and 5 without those of the "
        f"forward pass. The star is its {_PAPER_BACKWARD}× on an RTX 2070, the dash-dotted line "
        f"its best, {_PAPER_BEST_BACKWARD}× on an RTX 2080 Ti (Figures 8b and 8e)."
    )
    return Drawing("Speedup of the backward pass", caption, figure)


def _overall(pieces: Results) -> Drawing:
    figure, panels = _sweeps("time with autograd over ours")
    for axes, along in zip(panels, "TB", strict=True):
        chosen = _along(pieces, along)
        points = {size: speedup(piece, STEP, STEP_OURS) for size, piece in chosen.items()}
        recurrent.plot_with_spread(axes, points, label="training step", **_STYLES[OURS])
        published = {size: baseline / bppsa for size, (_, baseline, bppsa) in _PAPER[along].items()}
        _plot_paper(axes, along, published, _PAPER_OVERALL, _PAPER_BEST_OVERALL)
    panels[0].set_yscale("linear")
    panels[0].set_ylim(0, None)
    legend(figure, panels)
    caption = (
        "A whole iteration: forward pass, loss, backward pass and Adam's step. Medians, with bars "
        "from the quartiles of both. Dashed is the paper's on a V100 (Tables 4 and 5); the star "
        f"is its {_PAPER_OVERALL}× and the dash-dotted line its best, {_PAPER_BEST_OVERALL}×, on "
        "an RTX 2070 (Figures 8c and 8f)."
    )
    return Drawing("Speedup of the whole training", caption, figure)


def _along(pieces: Results, along: str) -> dict[int, Results]:
    """Return the sizes of a sweep in their order."""
    size, other, fixed = ("steps", "batch", BATCH) if along == "T" else ("batch", "steps", STEPS)
    chosen = [piece for piece in pieces.values() if piece[other] == fixed]
    return {piece[size]: piece for piece in sorted(chosen, key=lambda piece: piece[size])}


def _sweeps(label: str) -> tuple[Any, Any]:
    """Return a figure with a panel over T and one over 1/B."""
    from matplotlib.ticker import NullLocator

    figure, [panels] = drawing.panels(1, 2, 11, 4.6, sharey=True)
    left, right = panels
    for axes, sizes in zip(panels, (LENGTHS, BATCHES), strict=True):
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(sizes)
        axes.xaxis.set_minor_locator(NullLocator())
        drawing.numbers(axes.yaxis)
        axes.grid(alpha=0.25)
    left.set(xlabel=f"sequence length T, B={BATCH}", ylabel=label)
    left.set_xticklabels([f"{size:,}" for size in LENGTHS])
    right.set(xlabel=f"fraction of the device per sample 1/B, T={STEPS:,}")
    right.set_xticklabels([f"1/{size}" for size in BATCHES])
    right.invert_xaxis()
    return figure, panels


def _plot_paper(
    axes: Any, along: str, published: Mapping[int, float], one: float, best: float
) -> None:
    style = {"color": "grey", "lw": 1.2}
    axes.plot(list(published), list(published.values()), ls="--", label="paper, V100", **style)
    middle = STEPS if along == "T" else BATCH
    axes.plot(middle, one, "*", ms=11, label="paper, RTX 2070", color="grey")
    axes.axhline(best, ls="-.", label="paper, best", **style)


EXPERIMENT = Experiment(
    name="rnn",
    title="RNN: bitstreams, end to end",
    pieces=_pieces,
    about=_about,
    drawings=_drawings,
    rows=_rows,
)
