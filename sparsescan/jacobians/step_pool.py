"""Training steps that the calls of a framework share: each is used by one call at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import ArrayLike, NDArray

from ._recurrent_step import TrainingStep
from .rnn import Recurrent

__all__ = ["StepPool"]


class StepPool:
    """Training steps of one network.

    Parameters
    ----------
    make : callable
        It returns a network that nobody else has.
    """

    def __init__(self, make: Callable[[], Recurrent]) -> None:
        self._make = make
        self._free: list[TrainingStep] = []

    @property
    def free(self) -> int:
        """How many steps nobody uses."""
        return len(self._free)

    def give_back(self, step: TrainingStep) -> None:
        """Let another call use a step."""
        self._free.append(step)

    def forward(
        self,
        x: ArrayLike,
        state: ArrayLike | None,
        lengths: ArrayLike | None,
        params: Mapping[str, NDArray[Any]],
    ) -> tuple[TrainingStep, NDArray[Any], NDArray[Any]]:
        """Return a step that has run forward with these parameters, and what it has returned."""
        try:
            step = self._free.pop()
        except IndexError:
            step = self._make().training_step()
        for name, param in params.items():
            setattr(step.network, name, param)
        return step, *step.forward(x, state, lengths)
