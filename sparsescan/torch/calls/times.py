"""Predict which kernel is faster for a call of a recurrent module: ours or PyTorch's.

A table has the times of both, through their modules, by the kind of cell, units, samples and steps,
with and without gradients. Logarithms are interpolated between its entries. Beyond the last number
of steps, the time per step is constant. For our kernels the number of samples is rounded up to what
they compute. ``sparsescan calibrate`` measures the table. The built-in table is of another
processor and not exact, so our kernel replaces PyTorch's only if it is predicted to be faster by a
margin.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ...plan.costs.constants import file_to_write, machine_file
from ...recurrent.packing import computed_samples
from .shapes import Shape

KINDS = {"RNN_TANH": "RNN", "RNN_RELU": "RNN", "GRU": "GRU", "LSTM": "LSTM"}
INPUTS = 32  # the length of inputs in the measurements
MARGIN = 1.1  # our kernel runs if PyTorch's takes this many times as long


class Seconds(NamedTuple):
    """A model of the seconds of a call on one thread, without a table: a sum over its parts.

    Attributes
    ----------
    call : float
        Seconds per call.
    operation : float
        Seconds per elementwise operation or product of a step.
    weight, kept, product : float
        Seconds per weight, per kept weight, and per multiply-add.
    """

    call: float = 0.0
    operation: float = 0.0
    weight: float = 0.0
    kept: float = 0.0
    product: float = 0.0

    def of(
        self, *, operations: int = 0, weights: int = 0, kept: int = 0, products: int = 0
    ) -> float:
        """Return the seconds of a call with these counts of parts."""
        counts = 1, operations, weights, kept, products
        return sum(each * count for each, count in zip(self, counts, strict=True))


class Key(NamedTuple):
    """The shape and the options for which a call is prepared.

    Attributes
    ----------
    mode, input_size, hidden_size, num_layers, has_bias, bidirectional
        The kind and the sizes of the network, in the operators' terms.
    is_batch_first : bool
        Whether the axis of samples comes before that of steps.
    dtype : dtype
        Dtype of all tensors.
    x : tuple of int
        The shape of the input.
    has_state, has_backward : bool
        Whether the call passes initial states, and whether a backward pass may follow.
    threads : int
        The number of PyTorch's threads.
    """

    mode: str
    input_size: int
    hidden_size: int
    num_layers: int
    has_bias: bool
    bidirectional: bool
    is_batch_first: bool
    dtype: torch.dtype
    x: tuple[int, ...]
    has_state: bool
    has_backward: bool
    threads: int

    @property
    def shape(self) -> Shape:
        """The kind and the sizes of the network."""
        return Shape(*self[:6])

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of steps and samples."""
        if len(self.x) == 2:
            return self.x[0], 1
        batch, steps = self.x[:2] if self.is_batch_first else self.x[1::-1]
        return steps, batch


class TimeTable(NamedTuple):
    """Times of calls, in seconds.

    Attributes
    ----------
    name : str
        The processor, and the version of PyTorch.
    hidden, batch, steps : list of int
        Numbers of units, samples and steps.
    times : dict of str to dict
        Keys such as ``"GRU, training, 1 thread"``. For each contender, a list by units of lists by
        samples of times by steps. Long times are left out at the end.
    """

    name: str
    hidden: list[int]
    batch: list[int]
    steps: list[int]
    times: dict[str, dict[str, list[list[list[float]]]]]


class CallPrediction(NamedTuple):
    """The predicted seconds of a call with our kernels, and with PyTorch's.

    Both are None if unknown.
    """

    ours: float | None
    theirs: float | None

    @property
    def is_theirs(self) -> bool:
        """Whether PyTorch's kernel runs, since ours is not faster by the margin."""
        if self.ours is None or self.theirs is None:
            return False
        return MARGIN * self.ours > self.theirs


def table_file() -> Path | None:
    """Return the file of this machine's table; None if the user has no folder for it."""
    path = machine_file()
    return None if path is None else path.with_name("recurrent.json")


def save_table(table: TimeTable, path: Path | None = None) -> Path:
    """Write a table to a file; the path."""
    path = file_to_write(path or table_file())
    path.write_text(json.dumps(table._asdict()) + "\n", encoding="utf-8")
    return path


def read_table() -> TimeTable:
    """Return the table that was measured here, or the built-in one."""
    path = table_file()
    try:
        about = None if path is None else path.stat()
    except OSError:
        about = None
    if about is not None:
        table = _read(path, about.st_mtime_ns)
        if table is not None:
            return table
    return _built_in()


@lru_cache(maxsize=1)
def _built_in() -> TimeTable:
    return TimeTable(
        **json.loads(Path(__file__).with_name("times.json").read_text(encoding="utf-8"))
    )


@lru_cache(maxsize=1)
def _read(path: Path, _: int) -> TimeTable | None:
    """Return the table in a file; None if the file has no valid table."""
    try:
        table = TimeTable(**json.loads(path.read_text(encoding="utf-8")))
        _time(table, f"GRU, training, {_threads(1)}", "ours", (16, 1, 1))
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
    return table


def name_of(kind: str, has_backward: bool, threads: int) -> str:
    """Return the name of a part of the table."""
    return f"{kind}, {'training' if has_backward else 'inference'}, {_threads(threads)}"


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else "all threads"


def predict(key: Key, table: TimeTable | None = None) -> CallPrediction:
    """Return the predicted times of a call; None if the table does not cover it."""
    table = read_table() if table is None else table
    kind = KINDS.get(key.mode)
    if kind is None:
        return CallPrediction(None, None)
    part = name_of(kind, key.has_backward, key.threads)
    if part not in table.times:
        part = name_of(kind, key.has_backward, 1)
    steps, batch = key.sizes
    units, directions = key.hidden_size, 1 + key.bidirectional
    program, dtype = key.shape.program, np.dtype(str(key.dtype)[6:])
    computed = computed_samples(program, units, dtype, batch)
    found = []
    for contender, samples in (("ours", computed), ("theirs", batch)):
        shortest = _time(table, part, contender, (table.hidden[0], 1, 1))
        one = _time(table, part, contender, (units, samples, steps)) - shortest
        wide = one
        if contender == "theirs":
            # PyTorch multiplies the inputs of all steps at once, as fast as the largest matrices.
            largest = table.times[part][contender][-1][-1]
            sizes = table.hidden[-1], table.batch[-1], table.steps[len(largest) - 1]
            share = _products(units, samples, steps) / _products(*sizes)
            wide = min(one, largest[-1] * share)
        total = shortest
        for layer in range(key.num_layers):
            inputs = directions * units if layer else key.input_size
            more = one + wide * (inputs - INPUTS) / (INPUTS + units)
            total += directions * max(more, 0.0)
            if layer or directions > 1:
                # Each layer has some work apart from its steps.
                total += shortest * directions * _LAYER[contender]
        found.append(total)
    return CallPrediction(*found)


def _products(units: int, samples: int, steps: int) -> int:
    """Return how many products a call has with each gate's weights."""
    return units * (INPUTS + units) * samples * steps


# The time of an additional layer, as a share of the shortest call.
_LAYER = {"ours": 0.1, "theirs": 0.5}


def _time(table: TimeTable, part: str, contender: str, sizes: Sequence[int]) -> float:
    """Return a time, interpolated."""
    own = table.times[part][contender]
    units, batch, steps = sizes

    def of_batch(row: list[list[float]]) -> float:
        return _between(table.batch, batch, [_of_steps(table.steps, each, steps) for each in row])

    return _between(table.hidden, units, list(map(of_batch, own)))


def _of_steps(known: list[int], times: list[float], steps: int) -> float:
    """Return the time of some steps; beyond the table the time per step is constant."""
    known = known[: len(times)]
    if steps > known[-1]:
        if len(known) == 1:
            return times[0] * steps / known[0]
        each = max(times[-1] - times[-2], 0.0) / (known[-1] - known[-2])
        return times[-1] + each * (steps - known[-1])
    return _between(known, steps, times)


def _between(known: list[int], size: int, times: list[float]) -> float:
    """Interpolate between two times on logarithmic scales; outside, return the nearest."""
    if size <= known[0] or len(known) == 1:
        return times[0]
    if size >= known[-1]:
        return times[-1]
    right = bisect_right(known, size)
    low, high = known[right - 1], known[right]
    share = math.log(size / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(times[right - 1]) + share * math.log(times[right]))
