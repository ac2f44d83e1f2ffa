"""Training steps that calls of a framework share; only one call at a time uses each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..arrays.arrays import load_cupy
from ..errors import DeviceError
from .cell import Cell
from .definition import read_options
from .program import CellProgram
from .step import TrainingStep

Step = TypeVar("Step")


class StepPool(Generic[Step]):
    """Training steps of one network.

    Parameters
    ----------
    make : callable
        Returns a new step.
    """

    def __init__(self, make: Callable[[], Step]) -> None:
        self._make = make
        self._free: list[Step] = []

    @property
    def free(self) -> int:
        """How many steps are free."""
        return len(self._free)

    def take(self) -> Step:
        """Return a free step, or a new one."""
        try:
            return self._free.pop()
        except IndexError:
            return self._make()

    def give_back(self, step: Step) -> None:
        """Free a step for other calls."""
        self._free.append(step)

    def clear(self) -> None:
        """Drop the free steps."""
        self._free.clear()


def run_forward(
    pool: StepPool[TrainingStep],
    x: ArrayLike,
    state: ArrayLike | None,
    lengths: ArrayLike | None,
    params: Mapping[str, NDArray[Any]],
    resets: ArrayLike | None = None,
    reset_states: ArrayLike | None = None,
) -> tuple[TrainingStep, NDArray[Any], NDArray[Any]]:
    """Run a step forward with these parameters; return the step and its results."""
    step = pool.take()
    return step, *step._forward(params, x, state, lengths, resets, reset_states)


def runs_on_gpu(cell: type[Cell] | CellProgram, units: int, dtype: DTypeLike) -> bool:
    """Return whether a GPU can run a class of cells with its defaults, or a program, of a size."""
    try:
        load_cupy()
    except DeviceError:
        return False
    from .device import fits

    program = cell if isinstance(cell, CellProgram) else cell.program_of(read_options(cell, {}))
    return fits(program, units, dtype)
