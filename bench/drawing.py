"""Parts of all pictures: colours, panels, plain axes, spreads and legends.

Matplotlib is imported when something is drawn, since measuring does not need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that everybody can tell apart (Okabe and Ito, 2008).
BLUE, SKY, GREEN, YELLOW = "#0072b2", "#56b4e9", "#009e73", "#e69f00"
ORANGE, PINK = "#d55e00", "#cc79a7"
Spread = tuple[float, float, float]  # the low end, the middle and the high end


def panels(rows: int, columns: int, width: float, height: float, **options: Any) -> Any:
    """Return a figure, and an array of its axes, ``(rows, columns)``; sizes are in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def panels_in_rows(
    count: int, columns: int, width: float, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure, and the axes of so many panels, of which rows have so many at most."""
    rows = -(-count // columns)
    figure, every = panels(rows, columns, width, 3.4 * rows + 0.6, **options)
    for axes in every.flat[count:]:
        axes.remove()
    return figure, list(every.flat[:count])


def plain(axes: Axes, grid: Any = None, sides: tuple[str, ...] = ("top", "right")) -> None:
    """Leave out these sides of the frame; a faint grid along "x", "y" or "both" lies behind."""
    axes.set_axisbelow(True)
    axes.spines[list(sides)].set_visible(False)
    if grid:
        axes.grid(axis=grid, alpha=0.25)


def rows_of_bars(axes: Axes) -> None:
    """Plain axes for rows that have names instead of ticks."""
    axes.tick_params(axis="y", length=0)
    plain(axes, "x", ("top", "right", "left"))


def decades(axis: Any, text: str, digits: tuple[int, ...] = (1, 2, 5)) -> None:
    """Write numbers at the ticks that begin with these digits, and nowhere else."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=digits))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text.format(value)))
    axis.set_minor_formatter(NullFormatter())


def quartiles(samples: ArrayLike, unit: float = 1) -> Spread:
    """Return the quartiles of samples in multiples of a unit, the median in the middle."""
    low, middle, high = np.quantile(samples, (0.25, 0.5, 0.75)) / unit
    return float(low), float(middle), float(high)


def plot_with_spread(axes: Axes, points: Mapping[Any, Spread], **style: Any) -> None:
    """Middles over their places, with bars from the low to the high ends."""
    if points:
        low, middle, high = np.array(list(points.values())).T
        bars = [middle - low, high - middle]
        axes.errorbar(list(points), middle, bars, **{"capsize": 2} | style)


def legend(
    figure: Figure,
    axes: Iterable[Axes],
    columns: int = 4,
    *,
    order: Iterable[str] = (),
    **options: Any,
) -> None:
    """One for all panels, each label once; labels of `order` come first, in this order."""
    handles: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    place = {"loc": "outside lower center", "frameon": False, "ncols": columns}
    labels = [label for label in dict.fromkeys([*order, *handles]) if label in handles]
    figure.legend([handles[label] for label in labels], labels, **place | options)
