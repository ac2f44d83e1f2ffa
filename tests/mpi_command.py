"""On some ranks: the command line, many times.

``mpiexec -n RANKS python -m mpi4py mpi_command.py FOLDER``, with a list of ``{"argv", "how"}`` in
``FOLDER/commands.json``. Exit codes, and peaks of memory, of all ranks go to ``FOLDER/ended.json``.
"""

from __future__ import annotations

import json
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

from mpi4py import MPI

from sparsescan.__main__ import main
from sparsescan.parallel import scan_file

WORLD = MPI.COMM_WORLD


def run(argv: list[str], how: str | None) -> tuple[int, int]:
    """Exit code of a command, and its peak of memory, if that is looked at."""
    if how == "small blocks":
        scan_file._BLOCK = 100
    if how == "peak":
        scan_file._BLOCK = 1 << 18
        main(argv)  # what is made once
        tracemalloc.start()
    if how == "bug" and WORLD.rank == 1:
        scan_file.plan = bug
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


def bug(*_: Any, **__: Any) -> Any:
    raise ValueError("a bug")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    ended = [
        WORLD.allgather(run(**each)) for each in json.loads((folder / "commands.json").read_text())
    ]
    if WORLD.rank == 0:
        (folder / "ended.json").write_text(json.dumps(ended))
