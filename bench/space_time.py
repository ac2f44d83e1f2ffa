"""The space-time diagram of a pipeline with stale weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparsescan.strategies.pipeline.schedule import Placement

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw"]

# Colours that everybody can tell apart (Okabe and Ito, 2008).
_FORWARD, _BACKWARD = "#56b4e9", "#e69f00"


def draw(placement: Placement, minibatches: int) -> Figure:
    """Draw the space-time diagram, below that of training without a pipeline.

    Parameters
    ----------
    placement : Placement
        The registers.
    minibatches : int
        Number of minibatches that are fed.

    Returns
    -------
    matplotlib.figure.Figure
        Figures 2 and 4 of the paper, for any placement. Numbers are minibatches; beside them stand
        the updates that the weights of a forward stage miss, and those between the forward and the
        backward pass.
    """
    from matplotlib.figure import Figure

    rows = len(placement.names)
    cycles = minibatches + rows - 1
    size = max(7.5, 0.62 * cycles + 2), 1.4 + 0.8 * rows
    figure = Figure(figsize=size, layout="constrained")
    apart, together = figure.subplots(2, 1, sharex=True)
    _draw(apart, placement, cycles, {t: t // rows for t in range(0, cycles, rows)}, alone=True)
    apart.set_title("One minibatch at a time", fontsize="medium")
    _draw(together, placement, cycles, {t: t for t in range(minibatches)}, alone=False)
    together.set_title(
        f"{placement.stages} stages in a pipeline: −, the updates that weights miss; +, those "
        "since the forward pass",
        fontsize="medium",
    )
    together.set_xlabel("cycle")
    return figure


def _draw(
    axes: Any, placement: Placement, cycles: int, fed: dict[int, int], *, alone: bool
) -> None:
    """Draw one diagram; `fed` has the minibatch that is fed in each cycle."""
    registers = len(placement.registers)
    for k, name in enumerate(placement.names):
        passes = [kind in name for kind in ("FS", "BKS")]
        share = 1 / sum(passes)
        for start, minibatch in fed.items():
            if start + k >= cycles:
                continue
            # A minibatch misses no more updates than there have been.
            behind = 0 if alone else min(placement.degrees[min(k, 2 * registers - k)], minibatch)
            for backward in (False, True):
                if not passes[backward]:
                    continue
                left = start + k + (1 - share) * backward
                color = _BACKWARD if backward else _FORWARD
                axes.barh(k, share, left=left, height=0.86, color=color, edgecolor="white")
                label = f"{minibatch}" + f"$_{{{'+' if backward else '−'}{behind}}}$" * (behind > 0)
                centre = {"ha": "center", "va": "center", "fontsize": "small"}
                axes.text(left + share / 2, k, label, **centre)
    axes.set_yticks(range(len(placement.names)), placement.names)
    axes.set_xticks([t + 0.5 for t in range(cycles)], [str(t) for t in range(cycles)])
    axes.set(xlim=(0, cycles), ylim=(len(placement.names) - 0.4, -0.6))
    axes.tick_params(length=0, labelsize="small")
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
