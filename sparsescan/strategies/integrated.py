"""Integrated model, batch and domain parallelism (Gholami et al., SPAA 2018).

On a grid of ``P_r × P_c`` workers a layer is cut along samples, channels or rows. These cuts are
configurations of a layer, with the costs of all configurations.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import groupby

from ..checks import check_count
from ..errors import InputError
from .graph import MIXING, Graph
from .per_layer.configurations import MODES, Configuration, Configurations, Limits, on_grid
from .per_layer.predict import Divided, LayerCosts, NetworkCosts


class Integrated(Divided):
    """The best ``P_r × P_c`` grid; each layer is shared by batch, by model or by domain.

    A column of ``P_r`` workers shares ``B/P_c`` samples. By model, each worker has some output
    channels and ``1/P_r`` of the weights. By domain, it has some rows of the images and all
    weights. By batch, it has some of the samples. Between layers that are shared differently, the
    cost of equation 6 is added, which the paper's equation 9 leaves out.

    Parameters
    ----------
    grid : tuple of two ints, optional
        ``(P_r, P_c)``; by default the best.
    modes : collection of {"batch", "model", "domain"}
        The ways to share a layer to choose from.

    Raises
    ------
    InputError
        If an argument is wrong.

    Examples
    --------
    >>> from sparsescan.strategies import Machine
    >>> from sparsescan.strategies.graph import Graph, Layer
    >>> from sparsescan.strategies.integrated import Integrated
    >>> graph = Graph("wide", [
    ...     Layer("x", "input", (), (4096,)),
    ...     Layer("fc", "linear", (0,), (4096,), 4096**2, 4096**2, 4096**2),
    ... ])
    >>> Integrated().predict(graph, Machine(), 16, 64).how
    '16 × 1, model in fc'
    """

    name = "integrated"
    #: Whether a layer that can be shared in the first of the modes is.
    first = False

    def __init__(self, grid: tuple[int, int] | None = None, modes: Collection[str] = MODES) -> None:
        if not modes or not set(modes) <= set(MODES):
            raise InputError(f"modes is {modes!r}; expected some of {MODES}")
        if grid is not None:
            grid = check_count("grid[0]", grid[0], 1), check_count("grid[1]", grid[1], 1)
        self.grid, self.modes = grid, tuple(modes)

    def choose(
        self, graph: Graph, costs: LayerCosts, workers: int, batch: int, bounds: Sequence[Limits]
    ) -> list[Configuration]:
        """Return the best grid's configurations, or raise an `InputError` if there are none."""
        ways, reason = [], ""
        for rows, columns in self._grids(workers):
            if columns > batch:
                reason = f"a batch of {batch} cannot be shared by {columns} columns"
                continue
            way = on_grid(graph.layers, bounds, rows, columns, self.modes, self.first)
            empty = [k for k, choice in enumerate(way) if not choice]
            if empty:
                layer = graph.layers[empty[0]]
                reason = f"{layer.name} of shape {layer.shape} cannot be shared by {rows} rows"
                if columns > 1:
                    reason += f", with {batch} samples in {columns} columns"
                continue
            ways.append(way)
        if not ways:
            raise InputError(f"workers is {workers}: {reason}")
        # All grids have one table of what moves between configurations.
        every = sorted({one for way in ways for choice in way for one in choice})
        model = NetworkCosts(graph, costs, Configurations(workers, every), batch)
        return model.cheapest(model.numbered(ways))[0]

    def _grids(self, workers: int) -> list[tuple[int, int]]:
        if self.grid is None:
            return [(r, workers // r) for r in range(1, workers + 1) if workers % r == 0]
        if math.prod(self.grid) != workers:
            raise InputError(
                f"grid is {self.grid[0]} × {self.grid[1]}; expected {workers} workers in all"
            )
        return [self.grid]

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

    name, first = "domain", True

    def __init__(self) -> None:
        super().__init__(modes=("domain", "batch"))

    def _grids(self, workers: int) -> list[tuple[int, int]]:
        return [(workers, 1)]

    def choose(
        self, graph: Graph, costs: LayerCosts, workers: int, batch: int, bounds: Sequence[Limits]
    ) -> list[Configuration]:
        """Return the configurations, if there are images of so many rows."""
        chosen = super().choose(graph, costs, workers, batch, bounds)
        if workers > 1 and all(one[2] == 1 for one in chosen):
            raise InputError(f"workers is {workers}: no layer has images of so many rows")
        return chosen
