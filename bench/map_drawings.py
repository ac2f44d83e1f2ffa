"""The picture of the map: a table of ratios for each network and mode, coloured by them."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from . import drawing
from .drawing import ORANGE

# Powers of two at which the colours end; blue is where ours is faster.
_ENDS = 3
_COLORS = "RdBu"
# Colours from which on numbers are white.
_DARK = 0.62
_COLUMN, _ROW = 0.4, 0.23  # inches


class Cell(NamedTuple):
    """A ratio and its place; the ratio is None where the point was left out."""

    network: str
    mode: str
    hidden: int
    batch: int
    steps: int
    ratio: float | None
    is_pytorch: bool = False


def caption(what: str, limit: float, cells: Sequence[Cell]) -> str:
    """Return what is seen, and what the marks are."""
    said = [
        f"{what} over ours, one number for each size: above one, on blue, ours is faster. Rows are "
        "units (H), columns steps (T), and the groups of columns samples (B).",
        f"Framed numbers are below {limit:g}.",
    ]
    if any(cell.is_pytorch for cell in cells):
        said.append("Where there is a dot, PyTorch's own kernel ran.")
    if any(cell.ratio is None for cell in cells):
        said.append("Points without a number take more work than the bound above.")
    return " ".join(said)


def draw(cells: Sequence[Cell], limit: float) -> Any:
    """Return a figure with a table for each network and mode, one below the other."""
    tables = list(dict.fromkeys((cell.network, cell.mode) for cell in cells))
    hidden = sorted({cell.hidden for cell in cells})
    columns = sorted({(cell.batch, cell.steps) for cell in cells})
    groups = list(dict.fromkeys(batch for batch, _ in columns))
    places = {column: k + groups.index(column[0]) for k, column in enumerate(columns)}
    across = len(places) + len(groups) - 1
    height = len(tables) * (_ROW * len(hidden) + 0.75)
    figure, every = drawing.panels(len(tables), 1, _COLUMN * across + 1.2, height)
    for axes, table in zip(every.flat, tables, strict=True):
        own = [cell for cell in cells if (cell.network, cell.mode) == table]
        powers = np.full((len(hidden), across), np.nan)
        for cell in own:
            at = hidden.index(cell.hidden), places[cell.batch, cell.steps]
            if cell.ratio is not None:
                powers[at] = log2(cell.ratio) / _ENDS
                _write(axes, at, cell, powers[at], limit)
        axes.imshow(powers, _COLORS, vmin=-1, vmax=1, aspect="auto")
        axes.set_xticks(list(places.values()), [f"{steps:,}" for _, steps in places])
        axes.set_yticks(range(len(hidden)), [f"H={units}" for units in hidden])
        axes.tick_params(length=0, labelsize=8.5)
        axes.spines[:].set_visible(False)
        ratios = [cell.ratio for cell in own if cell.ratio is not None]
        said = f"{table[0]}, {table[1]}"
        if ratios:
            below = sum(ratio < limit for ratio in ratios)
            said += f": median {number(median(ratios))}×, {below} of {len(ratios)} below {limit:g}"
        axes.set_title(said, loc="left", size=10)
    names = "; ".join(f"B={batch}" for batch in groups)
    every[-1, 0].set_xlabel(f"T, in groups of columns for {names}")
    return figure


def _write(axes: Any, at: tuple[int, int], cell: Cell, power: float, limit: float) -> None:
    """Write a number, and its marks."""
    from matplotlib.patches import Rectangle

    (y, x), ink = at, "white" if abs(power) > _DARK else "black"
    assert cell.ratio is not None
    axes.text(x, y, number(cell.ratio), ha="center", va="center", color=ink, size=8.5)
    if cell.is_pytorch:
        axes.plot(x, y + 0.36, ".", color=ink, ms=3)
    if cell.ratio < limit:
        box = (x - 0.45, y - 0.45), 0.9, 0.9
        axes.add_patch(Rectangle(*box, fill=False, ec=ORANGE, lw=1.6, zorder=3))


def number(ratio: float) -> str:
    """Return two digits, but no zeros in their place: ``0.94``, ``1.3``, ``12``, ``137``."""
    if ratio < 0.995:
        return f"{ratio:.2f}"
    return f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"
