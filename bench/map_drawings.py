"""The picture of the map: a table of ratios for each network, coloured by them."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from . import drawing
from .drawing import ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Cell", "caption", "draw"]

# Powers of two at which the colours end; blue is where ours is faster.
_ENDS = 3
_COLORS = "RdBu"
_FRACTIONS = {-1: "½", -2: "¼", -3: "⅛"}
_EMPTY = "#e4e4e4"
# Room between batches, and between the two modes, in cells.
_GAP, _MODE_GAP = 0.5, 0.8
# Colours from which on numbers are white.
_DARK = 0.62
_COLUMN, _ROW, _SIDE, _HEAD = 0.395, 0.215, 0.8, 0.85
_NARROWEST = 8.0  # titles need as much


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
        said.append("Grey points take more work than the bound above.")
    return " ".join(said)


def draw(cells: Sequence[Cell], limit: float) -> Any:
    """Return a figure with a table for each network, one below the other."""
    networks = list(dict.fromkeys(cell.network for cell in cells))
    modes = list(dict.fromkeys(cell.mode for cell in cells))
    hidden = sorted({cell.hidden for cell in cells})
    rows = len(modes) * len(hidden) + _MODE_GAP * (len(modes) - 1)
    height = len(networks) * (_ROW * rows + _HEAD) + 0.7
    batches, steps = (len({cell[k] for cell in cells}) for k in (3, 4))
    columns = batches * steps + _GAP * (batches - 1)
    width = max(_NARROWEST, _SIDE + _COLUMN * columns)
    figure, every = drawing.panels(len(networks), 1, width, height)
    figure.get_layout_engine().set(h_pad=0.09)
    for axes, network in zip(every.flat, networks, strict=True):
        own = [cell for cell in cells if cell.network == network]
        _network(axes, network, own, cells, limit)
    _key(figure, every, cells, limit)
    return figure


def _network(
    axes: Axes, network: str, own: Sequence[Cell], every: Sequence[Cell], limit: float
) -> None:
    """Draw the table of a network; its rows and columns are those of all networks."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    colors = colormaps[_COLORS]
    modes = list(dict.fromkeys(cell.mode for cell in every))
    hidden = sorted({cell.hidden for cell in every})
    batches = sorted({cell.batch for cell in every})
    steps = sorted({cell.steps for cell in every})
    tops = {mode: k * (len(hidden) + _MODE_GAP) for k, mode in enumerate(modes)}
    lefts = {batch: k * (len(steps) + _GAP) for k, batch in enumerate(batches)}
    for cell in own:
        x = lefts[cell.batch] + steps.index(cell.steps)
        y = tops[cell.mode] + hidden.index(cell.hidden)
        if cell.ratio is None:
            axes.add_patch(Rectangle((x, y), 1, 1, fc=_EMPTY, ec="white", lw=0.6))
            continue
        power = max(-_ENDS, min(_ENDS, log2(cell.ratio))) / _ENDS
        color = colors(0.5 + power / 2)
        axes.add_patch(Rectangle((x, y), 1, 1, fc=color, ec="white", lw=0.6))
        ink = "white" if abs(power) > _DARK else "black"
        middle = x + 0.5, y + (0.45 if cell.is_pytorch else 0.53)
        axes.text(*middle, _number(cell.ratio), ha="center", va="center", color=ink, size=8.5)
        if cell.is_pytorch:
            axes.plot(x + 0.5, y + 0.85, ".", color=ink, ms=3)
        if cell.ratio < limit:
            frame = Rectangle((x + 0.05, y + 0.05), 0.9, 0.9, fill=False, ec=ORANGE, lw=1.6)
            frame.set_zorder(3)
            axes.add_patch(frame)
    width = lefts[batches[-1]] + len(steps)
    height = tops[modes[-1]] + len(hidden)
    axes.set(xlim=(-0.02, width + 0.02), ylim=(height + 0.02, -0.02))
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=8.5, pad=2)
    places = [(lefts[b] + k + 0.5, t) for b in batches for k, t in enumerate(steps)]
    axes.set_xticks([x for x, _ in places], [f"{t:,}" for _, t in places])
    rows = [(tops[mode] + k + 0.5, h) for mode in modes for k, h in enumerate(hidden)]
    axes.set_yticks([y for y, _ in rows], [str(h) for _, h in rows])
    _heads(axes, lefts, tops, len(steps), len(hidden))
    said = "; ".join(_said(mode, own, limit) for mode in modes)
    axes.set_title(network, loc="left", weight="bold", size=11.5, pad=30)
    axes.set_title(said, loc="right", size=9, pad=30)


def _heads(
    axes: Axes, lefts: dict[int, float], tops: dict[str, float], columns: int, rows: int
) -> None:
    """Name batches above their columns, and modes beside their rows."""
    from matplotlib.transforms import ScaledTranslation, blended_transform_factory

    root = axes.get_figure(root=True)
    assert root is not None
    up = ScaledTranslation(0, 17 / 72, root.dpi_scale_trans)
    above = blended_transform_factory(axes.transData, axes.transAxes) + up
    for batch, left in lefts.items():
        text = f"B = {batch}, T ="
        axes.text(left + columns / 2, 1, text, transform=above, ha="center", va="bottom", size=8.5)
    corner = axes.transAxes + ScaledTranslation(-3 / 72, 3 / 72, root.dpi_scale_trans)
    axes.text(0, 1, "H", transform=corner, ha="right", va="bottom", size=8.5)
    aside = ScaledTranslation(-30 / 72, 0, root.dpi_scale_trans)
    beside = blended_transform_factory(axes.transAxes, axes.transData) + aside
    for mode, top in tops.items():
        style: dict[str, Any] = {
            "transform": beside,
            "ha": "right",
            "va": "center",
            "rotation": 90 if rows > 2 else 0,
            "size": 9,
        }
        axes.text(0, top + rows / 2, mode, **style)


def _said(mode: str, cells: Sequence[Cell], limit: float) -> str:
    own = [cell.ratio for cell in cells if cell.mode == mode and cell.ratio is not None]
    if not own:
        return f"{mode}: nothing"
    below = sum(ratio < limit for ratio in own)
    return f"{mode}: median {_number(median(own))}×, {below} of {len(own)} below {limit:g}"


def _number(ratio: float) -> str:
    """Return two digits, but no zeros in their place: ``0.94``, ``1.3``, ``12``, ``137``."""
    if ratio < 0.995:
        return f"{ratio:.2f}"
    return f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"


def _key(figure: Any, axes: Any, cells: Sequence[Cell], limit: float) -> None:
    """Say above all tables what colours and marks are."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    scale = ScalarMappable(Normalize(-_ENDS, _ENDS), _COLORS)
    inches = figure.get_size_inches()
    place = {"location": "top", "shrink": 4.5 / inches[0], "aspect": 28, "pad": 0.25 / inches[1]}
    bar = figure.colorbar(
        scale, ax=axes.ravel().tolist(), extend="both", fraction=0.16 / inches[1], **place
    )
    ticks = range(-_ENDS, _ENDS + 1)
    bar.set_ticks(list(ticks), labels=[f"{_FRACTIONS.get(k, 2**k)}×" for k in ticks])
    bar.outline.set_visible(False)
    said = [f"framed: below {limit:g}"]
    said += ["dot: PyTorch's own kernel ran"] * any(cell.is_pytorch for cell in cells)
    said += ["grey: left out"] * any(cell.ratio is None for cell in cells)
    bar.set_label("the peer's time over ours; " + ", ".join(said), size=9, labelpad=6)
    bar.ax.tick_params(labelsize=8.5, length=0)
