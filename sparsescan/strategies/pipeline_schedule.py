"""Placement: the registers of a pipeline, and its space-time diagram."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..plan.drawing import check_packages

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Placement", "draw"]

# Colours that everybody can tell apart (Okabe and Ito, 2008).
_FORWARD, _BACKWARD = "#56b4e9", "#e69f00"


@dataclass(frozen=True)
class Placement:
    """A pipeline placement vector: after which layers there is a pair of pipeline registers.

    ``K`` pairs make ``K + 1`` forward stages, FS1 to FS(K+1), and as many backward stages, BKS1 to
    BKS(K+1), of which BKS1 has the layers of FS(K+1). Forward stage ``i`` has the layers from
    ``p_(i-1) + 1`` to ``p_i``.

    Attributes
    ----------
    layers : int
        Layers of the network, without its input.
    registers : tuple of int
        ``(p_1, …, p_K)``: numbers of layers, counted from 1, that increase.

    Raises
    ------
    InputError
        If there is no such layer, or none behind it.

    Notes
    -----
    Zhang and Abdelrahman (2021), section 4.1.

    Examples
    --------
    >>> placement = Placement(12, (3, 6))
    >>> placement.stages, placement.parts
    (6, (slice(0, 3, None), slice(3, 6, None), slice(6, 12, None)))
    >>> placement.degrees  # of staleness
    (4, 2, 0)
    >>> placement.stale([1] * 12)  # share of the weights
    0.5
    """

    layers: int
    registers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        bounds = (0, *self.registers, self.layers)
        if any(a >= b for a, b in itertools.pairwise(bounds)):
            raise InputError(
                f"registers is {self.registers}; expected numbers of layers that increase, from 1 "
                f"to {self.layers - 1}"
            )

    @property
    def stages(self) -> int:
        """Forward and backward stages: ``2 (K + 1)``."""
        return 2 * len(self.registers) + 2

    @property
    def names(self) -> list[str]:
        """Stages of each accelerator; the ``k``-th works on minibatch ``t - k`` in cycle ``t``."""
        last = len(self.registers) + 1
        forward = [f"FS{i}" for i in range(1, last)]
        return [*forward, f"FS{last}, BKS1", *(f"BKS{i}" for i in range(2, last + 1))]

    @property
    def parts(self) -> tuple[slice, ...]:
        """Layers of each forward stage, counted from 0."""
        bounds = (0, *self.registers, self.layers)
        return tuple(slice(a, b) for a, b in itertools.pairwise(bounds))

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degree of staleness of stage ``i``: its weights are ``2 (K - i + 1)`` cycles old."""
        return tuple(range(self.stages - 2, -1, -2))

    def stale(self, weights: Sequence[int]) -> float:
        """Return the share of weights that are stale: those before the last pair of registers.

        Parameters
        ----------
        weights : sequence of int
            Number of weights of each layer.
        """
        last = self.registers[-1] if self.registers else 0
        return sum(weights[:last]) / max(sum(weights), 1)


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

    Raises
    ------
    ImportError
        If matplotlib is missing: ``pip install 'sparsescan[plot]'``.
    """
    check_packages("a picture", "plot", {"matplotlib": "matplotlib"})
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
