"""Races: contenders take turns, each in its fastest variant; what is shown of them.

A piece that is a race has ``samples`` in seconds by contender, and the ratios that are ``wanted``:
how many times as long as ours peers are meant to take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from . import drawing
from .drawing import BLUE, GREEN, ORANGE, PINK, SKY, YELLOW, Spread, legend, rows_of_bars
from .experiment import Drawing, Results, Row, Table
from .page import significant
from .peers import FLUSHING, PYTORCH, Variants, fastest_of_each
from .timing import PAUSE, Call, counting, fastest, take_turns, that_count

OURS, JAX = "sparsescan", "jax.lax.scan"
# How far float32 results may be apart, and norms of which the subnormal part would count.
BOUND = float(np.sqrt(np.finfo(np.float32).eps))
SMALLEST = float(np.finfo(np.float32).tiny / np.finfo(np.float32).eps)
_ROUNDS, _FEW_ROUNDS, _TURN = 7, 5, 0.2
_QUICK_ROUNDS, _QUICK_TURN = 2, 0.02
# How many calls tell which variant is fastest; and of calls that take more than a second.
_TRIALS, _FEW_TRIALS = 3, 1
_COLORS = {PYTORCH: BLUE, FLUSHING: SKY, JAX: GREEN, "jax.lax.associative_scan": YELLOW}
_OTHERS = BLUE, ORANGE, PINK, SKY, "grey", YELLOW, "black"


# -- Measuring ------------------------------------------------------------------------------------


def timed(
    makers: Mapping[str, Variants],
    wanted: dict[str, float],
    quick: bool,
    differences: Callable[[dict[str, Call]], dict[str, float]] | None = None,
    few: bool = False,
) -> Results:
    """Time contenders, who take turns, each in its fastest variant.

    A `few` calls and rounds have to do where a call takes seconds.

    Returns
    -------
    dict
        For each contender its ``samples`` in seconds and the ``variants`` that were fastest;
        ``missing`` peers, the ratios that are ``wanted``, ``cores_others_used`` in each round, and
        ``differences`` between the calls' results, if they are compared.
    """
    from sparsescan.torch.calibrate import keep_memory

    keep_memory()
    trials = _FEW_TRIALS if quick or few else _TRIALS
    calls, chosen = fastest_of_each(makers, partial(fastest, trials=trials))
    compared = {} if differences is None else {"differences": differences(calls)}
    rounds, turn = (_QUICK_ROUNDS, _QUICK_TURN) if quick else (_ROUNDS, _TURN)
    rounds = _FEW_ROUNDS if few and not quick else rounds
    samples, used = take_turns(calls, rounds, 0 if quick else PAUSE, turn)
    about = {"wanted": wanted, **compared, "cores_others_used": used}
    return {"samples": samples, **chosen, **about}


def apart(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], bound: float = BOUND
) -> dict[str, float]:
    """Return how far arrays are apart by the 2-norm, relative to theirs.

    Raises
    ------
    AssertionError
        If rounding does not explain a difference.
    """
    found = {}
    for name, right in theirs.items():
        right = np.asarray(right, np.float64)
        own = np.asarray(ours[name], np.float64).reshape(right.shape)
        size = max(float(np.linalg.norm(right)), SMALLEST)
        found[name] = float(np.linalg.norm(own - right)) / size
        if not found[name] < bound:
            raise AssertionError(f"{name}: the relative difference is {found[name]:.1e}")
    return found


def apart_from_ours(
    results: Mapping[str, Mapping[str, Any]], bound: float = BOUND
) -> dict[str, float]:
    """Return how far arrays of ours are from those of each other contender, if ours is there."""
    return {
        f"{what}, {who}": each
        for who, theirs in results.items()
        if who != OURS and OURS in results
        for what, each in apart(results[OURS], theirs, bound).items()
    }


# -- What is shown --------------------------------------------------------------------------------


def races(results: Results) -> Results:
    """Return the pieces in which we and others took turns."""
    return {
        key: piece for key, piece in results["pieces"].items() if OURS in piece.get("samples", ())
    }


def of_line(line: Results, wanted: Mapping[str, float | None]) -> Results:
    """Return a line of the engine's comparison as a race, with the samples that count."""
    counted = that_count(line["cores_others_used"])
    turns = {name: counting(each, counted) for name, each in line["samples_seconds"].items()}
    samples = {name: np.concatenate(each).tolist() for name, each in turns.items()}
    return {"samples": samples, "wanted": {name: x for name, x in wanted.items() if x is not None}}


def quartiles(piece: Results, name: str, unit: float = 1) -> Spread:
    """Return the quartiles of a contender's samples, the median in the middle."""
    return drawing.quartiles(piece["samples"][name], unit)


def speedup(piece: Results, theirs: str, ours: str = OURS) -> Spread:
    """Return the ratio of medians, and between how low and how high it may be, by quartiles."""
    both = zip(quartiles(piece, theirs), quartiles(piece, ours)[::-1], strict=True)
    low, middle, high = (taken / own for taken, own in both)
    return low, middle, high


def row(
    work: str, piece: Results, theirs: str, ours: str = OURS, paper: float | None = None
) -> list[Row]:
    """Return the line of a table, if this peer is there."""
    if theirs not in piece["samples"]:
        return []
    medians = [quartiles(piece, name)[1] for name in (theirs, ours)]
    return [Row(work, theirs.removeprefix("training step, "), *medians, paper)]


def rows(title: str, results: Results, hidden: Collection[str] = ()) -> list[Row]:
    """Return a line of the table for each race, and each of the peers to show."""
    return [
        line
        for name, piece in races(results).items()
        for peer in peers_of(piece, hidden=hidden)
        for line in row(f"{title}: {name}", piece, peer)
    ]


def peers_of(piece: Results, ours: str = OURS, hidden: Collection[str] = ()) -> list[str]:
    """Return the peers that took part, but PyTorch only in the mode in which it was faster."""
    modes = [mode for mode in (PYTORCH, FLUSHING) if mode in piece["samples"]]
    slower = sorted(modes, key=lambda mode: quartiles(piece, mode)[1])[1:]
    left_out = {ours, *slower, *hidden}
    return [name for name in dict.fromkeys([*modes, *piece["samples"]]) if name not in left_out]


def in_both_modes(results: Results) -> list[Table]:
    """Return the table of PyTorch's times with subnormal numbers, and with zeros for them."""
    numbers = ["PyTorch, ms", "with set_flush_denormal, ms"]
    lines = [
        [name, *(significant(quartiles(piece, mode, 1e-3)[1]) for mode in (PYTORCH, FLUSHING))]
        for name, piece in races(results).items()
        if {PYTORCH, FLUSHING} <= set(piece["samples"])
    ]
    return [Table(["step", *numbers], lines, numbers)]


def drawings(title: str, results: Results) -> list[Drawing]:
    """Draw all races of an experiment."""
    return draw(title, races(results))


def draw(
    title: str, pieces: Results, more: str = "", ours: str = OURS, hidden: Collection[str] = ()
) -> list[Drawing]:
    """Draw how long peers take in multiples of our time; nothing without pieces."""
    shown = {name: peers_of(piece, ours, hidden) for name, piece in pieces.items()}
    if not any(shown.values()):
        return []
    colors = dict(_colors(peer for own in shown.values() for peer in own))
    height = 0.14 + 0.14 * max(map(len, shown.values()))
    figure, [[axes]] = drawing.panels(1, 1, 9, 0.9 + height * len(pieces))
    for y, (name, own) in enumerate(shown.items()):
        for k, peer in enumerate(own):
            low, middle, high = speedup(pieces[name], peer, ours)
            at, color = y + 0.4 / len(own) * (2 * k + 1 - len(own)), colors[peer]
            axes.plot([low, high], [at, at], color=color, lw=1.2)
            axes.plot(middle, at, "o", color=color, ms=6, label=peer)
            wanted = pieces[name].get("wanted", {}).get(peer, math.nan)
            axes.plot(wanted, at, "|", color=color, ms=12)
    axes.set_yticks(range(len(pieces)), list(pieces))
    axes.set(xscale="log", ylim=(len(pieces) - 0.4, -0.6), xlabel="time over ours")
    rows_of_bars(axes)
    legend(figure, [axes], min(4, len(colors)), loc="outside upper center")
    caption = "Points are ratios of medians, bars what the quartiles allow, and ticks what is "
    caption += f"aimed at. {more}"
    return [Drawing(title, f"{title}. {caption}".strip(), figure)]


def _colors(peers: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield a colour for each peer: its own, or the next one that no other has."""
    names = list(dict.fromkeys(peers))
    free = [color for color in _OTHERS if color not in [_COLORS.get(name) for name in names]]
    for name in names:
        yield name, _COLORS.get(name) or (free.pop(0) if free else "grey")
