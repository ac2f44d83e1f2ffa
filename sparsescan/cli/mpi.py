"""The commands of the command line that run on all ranks of ``mpiexec``."""

from __future__ import annotations

import argparse
import functools
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import InputError, SparseScanError
from ..formatting import quantity

if TYPE_CHECKING:
    from ..parallel import Communicator

# Errors that end in one line on stderr.
_EXPECTED = (SparseScanError, ImportError, MemoryError, OSError)
# Seconds in which all ranks have to raise the error that one has raised, or are ended.
_PATIENCE = 30.0

_T = TypeVar("_T")
_Command = Callable[[argparse.Namespace], None]


def speaks(argv: Sequence[str]) -> bool:
    """Whether this process prints the errors that all ranks raise: rank 0 alone under MPI."""
    if "--mpi" not in argv:
        return True
    from ..parallel.communicator import load_mpi

    try:
        rank: int = load_mpi("MPI").COMM_WORLD.rank
    except ImportError:
        return True
    return rank == 0


# -- All ranks end together -----------------------------------------------------------------------


def _together(option: str) -> Callable[[Callable[[Any, argparse.Namespace], None]], _Command]:
    """Make a command of a function that all ranks call with their communicator.

    The command raises an expected error that all of them raise. Any other error ends all ranks at
    once, since the others would wait for the one that raises it.
    """

    def command_of(call: Callable[[Any, argparse.Namespace], None]) -> _Command:
        @functools.wraps(call)
        def command(arguments: argparse.Namespace) -> None:
            from ..parallel.communicator import load_mpi

            world = load_mpi(option).COMM_WORLD
            try:
                call(world, arguments)
            except BaseException as error:
                if isinstance(error, _EXPECTED) and _all_come(world):
                    raise
                sys.stderr.write(traceback.format_exc())
                sys.stderr.flush()
                world.Abort(1)
                raise

        return command

    return command_of


def _all_come(world: Any) -> bool:
    """Whether all ranks call this before long."""
    barrier, end = world.Ibarrier(), time.monotonic() + _PATIENCE
    while not barrier.Test():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _by_first(communicator: Communicator, path: Any, call: Callable[[], _T]) -> _T:
    """Read or write a file on rank 0, and return the result, or raise the error, on all ranks."""
    from ..parallel.scan_file import naming

    def on_first() -> _T | None:
        with naming(path):
            return call() if communicator.rank == 0 else None

    result: _T = communicator.broadcast(communicator.together(on_first), 0)
    return result


# -- Commands -------------------------------------------------------------------------------------


@_together("--mpi")
def scan(world: Any, arguments: argparse.Namespace) -> None:
    """Run ``scan --mpi``: each rank reads, holds and scans its part of the chain."""
    from ..parallel.scan_file import scan_file

    done = scan_file(
        world,
        arguments.file,
        arguments.output,
        inclusive=arguments.inclusive,
        schedule=arguments.schedule,
        device=arguments.device,
    )
    if world.rank == 0:
        ranks = quantity(world.size, "rank")
        print(
            f"{arguments.output}: {done.gradients} gradients of {done.dtype}, in "
            f"{done.seconds:.3g} s on {ranks}, by {done.schedule}"
        )


@_together("--mpi")
def calibrate(world: Any, arguments: argparse.Namespace) -> None:
    """Run ``calibrate --mpi``: measure the network between the ranks."""
    from ..parallel.communicator import Communicator
    from ..parallel.network import Network, network_file
    from ..plan.costs.constants import file_to_write

    communicator = Communicator.of(world)
    if communicator.size == 1:
        raise InputError("there is one rank; expected several: run it by mpiexec -n 4")
    _by_first(communicator, network_file(), lambda: file_to_write(network_file()))
    network = Network.measure(world)
    path = _by_first(communicator, network_file(), network.save)
    if communicator.rank == 0:
        print(f"a message {network.latency:.0f} ns and {network.inverse_bandwidth:.3g} ns a byte")
        print(f"kept in {path}")
