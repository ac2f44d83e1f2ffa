"""Scan: parts of the chain of layers on workers, their gradients by a scan over the Jacobians."""

from __future__ import annotations

from ...errors import InputError
from ...formatting import quantity
from ...parallel.grid import Grid, check_grid
from ..strategy import Job, Prediction, Strategy, Training, Work
from .costs import NAME, Division, most_parts
from .train import ScanTraining


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

    def _plan(self, work: Work) -> tuple[Prediction, tuple[Grid, str]]:
        """Return the best grid; if none fits, the one that needs least memory."""
        _, network, machine, workers, batch = work
        most, ways = most_parts(network), []
        chains = [n for n in range(min(workers, 2), workers + 1) if workers % n == 0]
        grids = [Grid(n, workers // n) for n in chains]
        for grid in grids if self.grid is None else [check_grid(self.grid, workers)]:
            if grid.chain > most or grid.batch > batch:
                continue
            division = Division(network, machine, grid, batch)
            for schedule in ("vectors", "products"):
                wanted = self.schedule in (None, schedule)
                if wanted and (schedule == "vectors" or grid.chain > 1):
                    ways.append((division.prediction(schedule), (grid, schedule)))
        if not ways:
            raise InputError(
                f"workers is {workers}: {network.name} can be cut into {quantity(most, 'part')} at "
                f"most, and {quantity(batch, 'sample')} into {quantity(batch, 'group')}"
            )
        fitting = [one for one in ways if one[0].memory <= machine.memory]
        if not fitting:
            return min(ways, key=lambda one: one[0].memory)
        return min(fitting, key=lambda one: one[0].total)

    def _train(self, job: Job, plan: tuple[Grid, str]) -> Training:
        return ScanTraining(job, *plan)
