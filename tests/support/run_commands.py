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

from mpi4py import MPI

import sparsescan
from sparsescan.cli import mpi as _mpi_commands
from sparsescan.cli.main import main
from sparsescan.parallel import network, scan_file

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
        for module, name in ((scan_file, "plan"), (network.Network, "measure")):
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


if __name__ == "__main__":
    # Measurements are short.
    network._OFTEN, network._SELDOM = 5, 2
    ended = [
        WORLD.allgather(run(**each)) for each in json.loads((FOLDER / "commands.json").read_text())
    ]
    if WORLD.rank == 0:
        (FOLDER / "ended.json").write_text(json.dumps(ended))
