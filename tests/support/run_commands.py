"""On some ranks: the command line, many times.

``mpiexec -n RANKS python -m mpi4py run_commands.py FOLDER``, with a list of ``{"argv", "how"}`` in
``FOLDER/commands.json``. Exit codes, and peaks of memory, of all ranks go to ``FOLDER/ended.json``,
and what is measured to ``FOLDER/cache``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import sparsescan
from sparsescan import parallel, strategies
from sparsescan.cli import mpi as _mpi_commands
from sparsescan.cli.main import main
from sparsescan.parallel import network, scan_file
from sparsescan.strategies import chain_run, compare

WORLD = MPI.COMM_WORLD
FOLDER = Path(sys.argv[1])


def run(argv: list[str], how: str | None) -> tuple[int, int]:
    """Exit code of a command, and its peak of memory, if that is looked at."""
    os.environ["XDG_CACHE_HOME"] = os.devnull if how == "no cache" else str(FOLDER / "cache")
    # Another folder on every rank but the first.
    os.chdir(FOLDER if WORLD.rank == 0 else "/")
    if how == "small blocks":
        scan_file._BLOCK = 100
    if how == "peak":
        scan_file._BLOCK = 1 << 18
        main(argv)  # what is made once
        tracemalloc.start()
    if how in ("bug", "alone") and WORLD.rank == 1:
        wrong = bug if how == "bug" else sparsescan.load_chain
        _mpi_commands._PATIENCE = 1
        for module, name in (
            (scan_file, "plan"),
            (parallel, "measure"),
            (strategies, "run"),
            (chain_run, "plan"),
        ):
            setattr(module, name, lambda *_, **__: wrong("nowhere.npz"))
    peak = 0
    start = time.monotonic()
    try:
        code = main(argv)
    except ValueError:
        # Nobody would end the others.
        time.sleep(1000)
    seconds = time.monotonic() - start
    assert seconds < 60, seconds
    if how == "peak":
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return code, peak


def bug(*_: object) -> None:
    raise ValueError("a bug")


# ---------------------------------------------------------------------------------------------
# Runs of a chain
# ---------------------------------------------------------------------------------------------

run_chain, measure = chain_run.run_chain, chain_run.measure_in_turns


def checked_run(comm: Any, path: str, batch: int, machine: Any) -> Any:
    """Run the scan of a file, and check that all ways give, and send, what they should."""

    def checked_measure(ways: Any, *arguments: Any) -> Any:
        for _, way in ways:
            check_way(way, path)
        return measure(ways, *arguments)

    chain_run.measure_in_turns = checked_measure
    result = run_chain(comm, path, batch, machine)
    chain_run.measure_in_turns = measure
    names = ["scan by vectors"]
    names += ["scan by products"] * (comm.size > 1)
    names += ["scan, samples only"] * (batch >= comm.size > 1)
    assert sorted(one.prediction.strategy for one in result.measured) == sorted(names)
    for one in result.measured:
        assert one.bytes == one.prediction.bytes, (path, one)
        assert min(one.nanoseconds, one.prediction.total) > 0
    assert "only its scan is run" in result.reasons["batch"]
    return result


def check_way(way: Any, path: str) -> None:
    """Check that this rank has its gradients of its samples, but for rounding."""
    grad, jacobians = sparsescan.load_chain(path)
    grid, n = way.plan.grid, len(jacobians)
    expected = list(sparsescan.exclusive_scan(grad, jacobians))
    period = len(getattr(jacobians, "patterns", [None]))
    if period > 1:
        # Arrays of them, which take turns.
        expected = [expected[k % period][k // period] for k in range(n)]
    result, expected = way.step(), expected[grid.steps(WORLD.rank, n)]
    some = grid.samples(WORLD.rank, len(grad)) if grad.ndim == 2 else slice(None)
    for one, other in zip(result, expected, strict=True):
        # Each step rounds sums of up to five positive products.
        bound = 2 * 6 * (n + 1) * np.finfo(one.dtype).eps
        np.testing.assert_allclose(one, other[some], rtol=bound, atol=0)


if __name__ == "__main__":
    # Measurements are short.
    compare._SECONDS, compare._LEAST = 0.0, 1
    network._OFTEN, network._SELDOM = 5, 2
    chain_run.measure_here = lambda comm: strategies.Machine()
    chain_run.run_chain = checked_run
    ended = [
        WORLD.allgather(run(**each)) for each in json.loads((FOLDER / "commands.json").read_text())
    ]
    if WORLD.rank == 0:
        (FOLDER / "ended.json").write_text(json.dumps(ended))
