"""Scans over many machines by MPI: the same calls, with a communicator as first argument.

Every rank holds its part of the chain, and gets the gradients of its part. With this in
``many.py``::

    import numpy as np
    from mpi4py import MPI
    from sparsescan import parallel

    comm = MPI.COMM_WORLD
    rng = np.random.default_rng(comm.rank)
    mine = rng.standard_normal((250, 20, 20)) / 5  # its part of 1,000 steps
    grad = np.ones(20) if comm.rank == 0 else None  # at the end of the chain
    grads = parallel.exclusive_scan(comm, grad, mine)  # (250, 20), those of this rank

    plan = parallel.plan(comm, mine)  # once: who combines what, and what it will take
    grads = plan.exclusive_scan(grad, mine)  # every iteration
    if comm.rank == 0:
        print(plan)

``mpiexec -n 4 python -m mpi4py many.py`` runs it on four ranks; Open MPI, which lies beside Python
as ``.venv/bin/mpiexec``, needs ``--map-by :OVERSUBSCRIBE`` where there are fewer cores, and
``--allow-run-as-root`` of root. ``-m mpi4py`` ends all of them if one ends with an exception of its
own. If a step is too large for one rank, several ranks share its rows: see :class:`Grid`.
"""

from ..checks import former_names
from .api import exclusive_scan, inclusive_scan, plan
from .forecast import predict
from .grid import Grid
from .network import Network

__all__ = ["Grid", "Network", "exclusive_scan", "inclusive_scan", "plan", "predict"]

__getattr__ = former_names(
    __name__,
    {
        "Communicator": ("parallel.communicator:Communicator", ""),
        "Forecast": ("parallel.forecast:Forecast", ""),
        "ParallelPlan": ("parallel.plan:ParallelPlan", ""),
        "RankError": ("errors:RankError", ""),
        "Traffic": ("parallel.communicator:Traffic", ""),
        "best_grid": ("parallel.forecast:best_grid", "predict(patterns, ranks).grid"),
        "load_network": ("parallel.network:Network.load", "Network.load(path)"),
        "measure": ("parallel.network:Network.measure", "Network.measure(comm)"),
        "save_network": ("parallel.network:Network.save", "network.save(path)"),
    },
)
