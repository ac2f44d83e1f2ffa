"""On some ranks: what no agreement can help against. All of them have to end.

``mpiexec -n RANKS python -m mpi4py end_one_rank.py HOW``
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
from mpi4py import MPI

from sparsescan import parallel

WORLD = MPI.COMM_WORLD


def main(how: str) -> None:
    steps = np.ones((5, 3, 3))
    plan = parallel.plan(WORLD, steps, schedule="vectors" if how == "short" else "products")
    grad = np.ones(3) if WORLD.rank == 0 else None
    plan.exclusive_scan(grad, steps)
    if WORLD.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise ValueError("of the caller's own")
        # Another size of message than the ranks agreed on.
        (memory,) = plan._memory.values()
        if how == "short":
            send = plan._comm.send
            plan._comm.send = lambda data, rank: send(data[:-1], rank)
        if how == "long":
            memory.given.words = np.zeros(2 * len(memory.given.words), np.int64)
    for _ in range(3):
        plan.exclusive_scan(grad, steps)
        print("went on", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
