"""Scan: parts of the chain of layers on workers, their gradients by a scan over the Jacobians."""

from __future__ import annotations

from ...errors import InputError
from ...formatting import quantity
from ...parallel.grid import Grid, check_grid
from ...symbolic.schedule import check_count
from ..graph import Graph
from ..machine import Machine
from ..recurrent import Trainable, as_graph, graph_of
from ..strategy import Job, Prediction, Strategy, Training
from .costs import NAME, Division, most_parts
from .train import ScanTraining

__all__ = ["Scan"]


class Scan(Strategy):
    """The parts of a chain on workers, and the scan over its Jacobians; exact.

    The forward pass goes from part to part; then all workers write the Jacobians of their parts at
    once, the scan gives every part its gradients, and all compute those of their parameters at
    once. With fewer parts than workers, groups of workers share the samples.

    Parameters
    ----------
    grid : tuple of int, optional
        Parts of the chain, and groups of samples; by default the grid that is predicted to take
        least, with at least two parts where there are two workers: one is batch parallelism.
    schedule : {"vectors", "products"}, optional
        How parts are combined, see :func:`sparsescan.parallel.plan`; by default the way that is
        predicted to take less.

    Notes
    -----
    BPPSA (Wang, Bai and Pekhimenko, MLSys 2020): with `n` layers and `p` workers
    ``Θ(n/p + log p)`` steps by products (equation 6), and ``Θ(max(n/p, 1))`` Jacobians a worker
    (section 3.6). A prediction takes products of Jacobians to be dense, and exclusive scans of MPI
    to be logarithmic, unless it was seen how they are made. A part is swept by one call, however
    many steps it has.
    """

    name = NAME

    def __init__(self, grid: tuple[int, int] | None = None, schedule: str | None = None) -> None:
        self.grid = None if grid is None else Grid(*grid)
        if schedule not in (None, "vectors", "products"):
            raise InputError(f"schedule is {schedule!r}; expected 'vectors' or 'products'")
        self.schedule = schedule

    def predict(
        self, network: Graph | Trainable, machine: Machine, workers: int, batch: int
    ) -> Prediction:
        """Predict a step by the best grid; if none fits, by the one that needs least memory."""
        return self._best(as_graph(network), machine, workers, batch)[2]

    def _best(
        self, network: Graph, machine: Machine, workers: int, batch: int
    ) -> tuple[Grid, str, Prediction]:
        workers, batch = check_count("workers", workers, 1), check_count("batch", batch, 1)
        most, machine = most_parts(network), machine.among(workers)
        ways: list[tuple[Grid, str, Prediction]] = []
        chains = [n for n in range(min(workers, 2), workers + 1) if workers % n == 0]
        grids = [Grid(n, workers // n) for n in chains]
        for grid in grids if self.grid is None else [check_grid(self.grid, workers)]:
            if grid.chain > most or grid.batch > batch:
                continue
            division = Division(network, machine, grid, batch)
            for schedule in ("vectors", "products"):
                wanted = self.schedule in (None, schedule)
                if wanted and (schedule == "vectors" or grid.chain > 1):
                    ways.append((grid, schedule, division.prediction(schedule)))
        if not ways:
            raise InputError(
                f"workers is {workers}: {network.name} can be cut into {quantity(most, 'part')} at "
                f"most, and {quantity(batch, 'sample')} into {quantity(batch, 'group')}"
            )
        fitting = [one for one in ways if one[2].memory <= machine.memory]
        if not fitting:
            return min(ways, key=lambda one: one[2].memory)
        return min(fitting, key=lambda one: one[2].total)

    def _train(self, job: Job) -> Training:
        graph, workers = graph_of(job.network), job.communicator.size
        grid, schedule, _ = self._best(graph, job.machine, workers, job.batch)
        return ScanTraining(job, grid, schedule)
