"""Placement: the registers of a pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import InputError


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

    def __str__(self) -> str:
        where = ", ".join(map(str, self.registers))
        behind = f", registers after layer{'s' * (len(self.registers) > 1)} {where}"
        return f"{self.stages} stages" + behind * bool(where)

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
