"""Section 4.1 of the paper: a tanh RNN that classifies bitstreams.

The backward pass and the training step over the sequence length T and the batch size B (Figure 8,
Tables 4 and 5), beside PyTorch's autograd.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from . import recurrent
from .experiment import Drawing, Experiment, Piece, Results, Row
from .races import OURS, races, row
from .recurrent import AUTOGRAD, HIDDEN, JAX_ASSOCIATIVE, JAX_SCAN, SCAN, STEP, STEP_OURS, Model

_MODEL = Model("RNN", 1, 10, 1e-5)
STEPS, BATCH = 1000, 16  # what one of them is while the other varies
LENGTHS = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000)
BATCHES = (2, 4, 8, 16, 32, 64, 128, 256)
_QUICK_LENGTHS, _QUICK_BATCHES = (10, 100, 1000), (2, 16)

# Seconds of an epoch on a V100 over T and over B, Tables 4 and 5: forward pass, baseline, BPPSA.
_PAPER: dict[str, dict[int, tuple[float, float, float]]] = {
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
_BACKWARD, _BEST_BACKWARD = 16, 108
_OVERALL, _BEST_OVERALL = 2.73, 2.75


def bitstreams(steps: int, samples: int) -> tuple[Tensor, Tensor]:
    """Bits of class c are 1 with probability 0.05 + 0.1 c (equation 8), time first; and classes."""
    rng = np.random.default_rng(0)
    labels = rng.integers(_MODEL.classes, size=samples)
    bits = rng.random((steps, samples), np.float32) < 0.05 + 0.1 * labels
    return torch.from_numpy(bits[:, :, None].astype(np.float32)), torch.from_numpy(labels)


def _pieces(quick: bool) -> Iterable[Piece]:
    """Yield first the size that both sweeps have in common, then others in the order of work."""
    lengths, batches = (_QUICK_LENGTHS, _QUICK_BATCHES) if quick else (LENGTHS, BATCHES)
    every = {(steps, BATCH) for steps in lengths} | {(STEPS, batch) for batch in batches}
    for sizes in sorted(every, key=lambda size: (size != (STEPS, BATCH), size[0] * size[1], size)):
        run = partial(recurrent.measure, _MODEL, *bitstreams(*sizes), quick)
        yield Piece("T={} B={}".format(*sizes), run)


def _about(quick: bool) -> Results:
    return recurrent.about("RNN") | {
        "data": f"bitstreams of {_MODEL.classes} classes (equation 8)",
        "optimiser": f"Adam, learning rate {_MODEL.rate:g}",
    }


def _rows(results: Results) -> list[Row]:
    pieces = {f"T={p['steps']:,}, B={p['batch']}": p for p in races(results).values()}
    base = f"T={STEPS:,}, B={BATCH}"
    work = f"tanh RNN, {HIDDEN} units, float32"
    backward, step = f"Backward pass of a {work}", f"Training step of a {work}"
    states = "the gradients of its states, Jacobians given"
    rows = []
    if base in pieces:
        rows += row(f"{backward}, {base}", pieces[base], AUTOGRAD, OURS, _BACKWARD)
        for peer in (JAX_SCAN, JAX_ASSOCIATIVE):
            rows += row(states, pieces[base], peer, SCAN)
        rows += row(f"{step}, {base}", pieces[base], STEP, STEP_OURS, _OVERALL)
    shortest = f"T={min(LENGTHS)}, B={BATCH}"
    if shortest in pieces:
        rows += row(f"{backward}, {shortest}", pieces[shortest], AUTOGRAD, OURS)
    rows += recurrent.at_best(pieces, backward, AUTOGRAD, OURS, _BEST_BACKWARD)
    return rows + recurrent.at_best(pieces, step, STEP, STEP_OURS, _BEST_OVERALL)


def _drawings(results: Results) -> list[Drawing]:
    def published(key: str) -> tuple[float, float, float]:
        steps, batch = (int(part.partition("=")[2]) for part in key.split())
        return _PAPER["T"][steps] if batch == BATCH else _PAPER["B"][batch]

    def backward(key: str) -> float:
        forward, baseline, ours = published(key)
        return (baseline - forward) / (ours - forward)

    def step(key: str) -> float:
        _, baseline, ours = published(key)
        return baseline / ours

    said = "Here that is the paper's, on a V100 (Tables 4 and 5, Figure 8)."
    return [
        *recurrent.draw(results, "Backward pass", AUTOGRAD, OURS, backward, said),
        *recurrent.draw(results, "Training step", STEP, STEP_OURS, step, said),
    ]


EXPERIMENT = Experiment("rnn", "RNN: bitstreams, end to end", _pieces, _about, _drawings, _rows)
