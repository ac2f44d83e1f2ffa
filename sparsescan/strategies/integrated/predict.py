"""Integrated model, batch and domain parallelism (Gholami et al., SPAA 2018).

On a grid of ``P_r × P_c`` workers a layer is cut along samples, its channels or its rows: these are
configurations of a layer, and cost and run as all of them do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import groupby

import numpy as np

from ...errors import InputError
from ...symbolic.schedule import check_count
from ..graph import MIXING, Graph, Layer
from ..per_layer.configurations import Configuration, Configurations, Limits, allowed
from ..per_layer.costs import LayerCosts, NetworkCosts
from ..per_layer.predict import Divided

__all__ = ["BatchParallel", "DomainParallel", "Integrated", "ModelParallel"]

_MODES = "batch", "model", "domain"


class Integrated(Divided):
    """The best ``P_r × P_c`` grid, with every layer by batch, by model or by domain.

    A column of ``P_r`` workers shares ``B/P_c`` samples. In a layer by model each worker has some
    output channels, and ``1/P_r`` of the weights; by domain some rows of the images, and all
    weights; by batch some of the samples. Between layers that are shared differently equation 6 is
    paid, which the paper's equation 9 leaves out.

    Parameters
    ----------
    grid : tuple of two ints, optional
        ``(P_r, P_c)``; by default the best.
    modes : collection of {"batch", "model", "domain"}
        Ways to share a layer that may be chosen.

    Raises
    ------
    InputError
        If an argument is wrong.

    Examples
    --------
    >>> from sparsescan.strategies import Graph, Integrated, Layer, Machine
    >>> graph = Graph("wide", [
    ...     Layer("x", "input", (), (4096,)),
    ...     Layer("fc", "linear", (0,), (4096,), 4096**2, 4096**2, 4096**2),
    ... ])
    >>> Integrated().predict(graph, Machine(), 16, 64).how
    '16 × 1, model in fc'
    """

    name = "integrated"

    def __init__(
        self, grid: tuple[int, int] | None = None, modes: Collection[str] = _MODES
    ) -> None:
        if not modes or not set(modes) <= set(_MODES):
            raise InputError(f"modes is {modes!r}; expected some of {_MODES}")
        if grid is not None:
            grid = check_count("grid[0]", grid[0], 1), check_count("grid[1]", grid[1], 1)
        self.grid, self.modes = grid, tuple(modes)

    def choose(
        self, graph: Graph, costs: LayerCosts, workers: int, batch: int, bounds: Sequence[Limits]
    ) -> list[Configuration]:
        """Return the best grid's configurations, or raise an `InputError` if there are none."""
        grids: list[list[list[Configuration]]] = []
        reason = ""
        for rows, columns in self._grids(workers):
            if columns > batch:
                reason = f"a batch of {batch} cannot be shared by {columns} columns"
                continue
            ways = self._ways(rows, columns)
            choices = [
                [ways[mode] for mode in self._possible(layer, ways, most)]
                for layer, most in zip(graph.layers, bounds, strict=True)
            ]
            empty = [k for k, choice in enumerate(choices) if not choice]
            if empty:
                layer = graph.layers[empty[0]]
                reason = f"{layer.name} of shape {layer.shape} cannot be shared by {rows} rows"
                if columns > 1:
                    reason += f", with {batch} samples in {columns} columns"
                continue
            grids.append(choices)
        if not grids:
            raise InputError(f"workers is {workers}: {reason}")
        # All grids have one table of what moves between configurations.
        every = sorted({one for choices in grids for choice in choices for one in choice})
        model = NetworkCosts(graph, costs, Configurations(workers, every), batch)
        number = {one: k for k, one in enumerate(every)}
        ways_of = [
            [np.unique([number[one] for one in choice]) for choice in choices] for choices in grids
        ]
        return min(map(model.cheapest, ways_of), key=lambda way: way[1])[0]

    def _grids(self, workers: int) -> list[tuple[int, int]]:
        if self.grid is None:
            return [(r, workers // r) for r in range(1, workers + 1) if workers % r == 0]
        if math.prod(self.grid) != workers:
            raise InputError(
                f"grid is {self.grid[0]} × {self.grid[1]}; expected {workers} workers in all"
            )
        return [self.grid]

    def _ways(self, rows: int, columns: int) -> dict[str, Configuration]:
        """Return the configurations on a grid; with one row there is but batch parallelism."""
        ways: dict[str, Configuration] = {"input": (1, 1, 1, 1)}
        if rows > 1:
            every: dict[str, Configuration] = {
                "batch": (rows * columns, 1, 1, 1),
                "model": (columns, rows, 1, 1),
                "domain": (columns, 1, rows, 1),
            }
            ways |= {mode: one for mode, one in every.items() if mode in self.modes}
        return ways | {"first row": (columns, 1, 1, 1)}

    def _possible(self, layer: Layer, ways: dict[str, Configuration], most: Limits) -> list[str]:
        """Return the names of the ways in which a layer can be shared."""
        if layer.kind == "input":
            return ["input"]
        can = allowed(layer, most, np.array([*ways.values()]))
        # Other rows would have nothing to do.
        others = {"input", "first row"} if layer.kind in MIXING and len(ways) > 2 else {"input"}
        return [way for way, fits in zip(ways, can, strict=True) if fits and way not in others]

    def describe(self, graph: Graph, chosen: Sequence[Configuration]) -> str:
        """Describe the grid, and the layers with weights, in a few words."""
        pairs = [pair for pair in zip(graph.layers, chosen, strict=True) if pair[0].kind in MIXING]
        shared = [one for _, one in pairs if one[1] * one[2] > 1]
        rows, columns = (shared[0][1] * shared[0][2], shared[0][0]) if shared else (1, 0)
        columns = columns or max((one[0] for _, one in pairs), default=1)
        words = []
        for mode, group in groupby(pairs, lambda pair: _mode(pair[1])):
            names = [layer.name for layer, _ in group]
            ends = names[0] if len(names) == 1 else f"{names[0]}–{names[-1]}"
            words.append(f"{mode} in {ends}")
        return ", ".join([f"{rows} × {columns}", *words])


def _mode(one: Configuration) -> str:
    return "model" if one[1] > 1 else "domain" if one[2] > 1 else "batch"


class BatchParallel(Integrated):
    """Every worker has all weights and some of the samples: equation 4."""

    name = "batch"

    def __init__(self) -> None:
        super().__init__(modes=("batch",))

    def _grids(self, workers: int) -> list[tuple[int, int]]:
        return [(1, workers)]


class ModelParallel(Integrated):
    """Every worker has all samples and some of the output channels of every layer: equation 3."""

    name = "model"

    def __init__(self) -> None:
        super().__init__(modes=("model",))

    def _grids(self, workers: int) -> list[tuple[int, int]]:
        return [(workers, 1)]


class DomainParallel(Integrated):
    """Every worker has all weights and some rows of the images of all samples: equation 7.

    Layers without images, or with fewer rows than there are workers, are by batch.
    """

    name = "domain"

    def __init__(self) -> None:
        super().__init__(modes=("domain", "batch"))

    def _grids(self, workers: int) -> list[tuple[int, int]]:
        return [(workers, 1)]

    def _possible(self, layer: Layer, ways: dict[str, Configuration], most: Limits) -> list[str]:
        possible = super()._possible(layer, ways, most)
        return ["domain"] if "domain" in possible else possible

    def choose(
        self, graph: Graph, costs: LayerCosts, workers: int, batch: int, bounds: Sequence[Limits]
    ) -> list[Configuration]:
        """Return the configurations, if there are images of so many rows."""
        chosen = super().choose(graph, costs, workers, batch, bounds)
        if workers > 1 and all(one[2] == 1 for one in chosen):
            raise InputError(f"workers is {workers}: no layer has images of so many rows")
        return chosen
