"""Training steps of recurrent networks as recordings, which compiled code runs without Python."""

from __future__ import annotations

import hashlib
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..execution.recording import Recorder, Recording, Space
from .compiled import source_of
from .definition import declared
from .operations import Node, node
from .packing import Direction, Product
from .program import Program
from .step import RecurrentLike, memory_on_host

__all__ = ["Group", "Parameters", "RecordedStep", "parameters_of", "program_text", "record"]


class RecordedStep(NamedTuple):
    """A training step for inputs of one shape.

    Arrays of a replay of `forward` are the memory, the inputs, initial states, lengths if there are
    any, all parameters, and the results ``output`` and ``last``. Those of `backward` are the memory
    as `forward` has left it, memory for itself, gradients in ``output`` and ``last``, and the
    results: gradients in parameters, in initial states (``state``) and inputs (``input``).

    Attributes
    ----------
    backward : Recording or None
        None if only `forward` was asked for.
    nbytes, back_nbytes : int
        Bytes of the memory, and of that which only `backward` takes.
    """

    forward: Recording
    backward: Recording | None
    nbytes: int
    back_nbytes: int


def record(
    network: RecurrentLike,
    steps: int,
    batch: int,
    dtype: DTypeLike,
    *,
    lengths: DTypeLike | None,
    has_backward: bool = True,
    keeps_samples: bool = False,
) -> RecordedStep:
    """Record the training step of a network.

    Parameters
    ----------
    network : Recurrent
        The network; its parameters are not read.
    steps, batch : int
        The shape of the inputs, ``(steps, batch, input_size)``.
    dtype : dtype
        Of all arrays.
    lengths : dtype or None
        Of the lengths, if samples have different ones.
    has_backward : bool, default True
        Whether a backward pass will come. Without one less memory is taken.
    keeps_samples : bool, default False
        Whether its results are, in place of gradients in parameters, what these are sums of: for
        each direction the gradients in slots, ``products``, and what they are multiplied by,
        ``states``, ``arguments`` and, above the first layer, ``input``, of all steps and samples;
        and the gradients in ``rows`` of parameters, of all samples. See :class:`Parameters`.
    """
    kept, scratch = Space(0), Space(1)
    shapes = [param.shape for param in network.params.values()]
    count = 3 + (lengths is not None)
    recorder = Recorder(kept, count + len(shapes))
    x = recorder.array(1, (steps, batch, network.input_size), dtype)
    memory = memory_on_host(
        network, x, recorder, keeps_gates=has_backward, keeps_samples=keeps_samples
    )
    states = len(memory.directions), batch, network.state_size
    state = recorder.array(2, states, dtype)
    counts = None if lengths is None else recorder.array(3, (batch,), lengths)
    params = [recorder.array(count + k, shape, dtype) for k, shape in enumerate(shapes)]
    each = len(params) // len(memory.directions)
    memory.forward([params[k : k + each] for k in range(0, len(params), each)], x, state, counts)
    forward = recorder.recording()
    if not has_backward:
        return RecordedStep(forward, None, kept.nbytes, 0)

    memory.calls = recorder = Recorder(scratch, 4)
    above = recorder.array(2, (steps, batch, memory.widths[-1]), dtype)
    memory.backward(above, recorder.array(3, states, dtype), True)
    backward = recorder.recording()
    return RecordedStep(forward, backward, kept.nbytes, scratch.nbytes)


class Group(NamedTuple):
    """Products of some neighbouring slots with vectors, whose gradients are one matrix.

    Attributes
    ----------
    first, end : int
        The first of the columns of ``products``, and the one behind the last.
    factors : tuple of (str, int, int)
        What the columns of the matrix are of: for each vector the array (``input``, ``states`` or
        ``arguments``), and its columns there.
    """

    first: int
    end: int
    factors: tuple[tuple[str, int, int], ...]


class Parameters(NamedTuple):
    """The parameters of one direction of a layer, and what their gradients are sums of.

    Attributes
    ----------
    shapes : dict of str to tuple of int
        The parameters of the cell by their names, in their order.
    groups : list of Group
        Matrices of gradients, which are sums of outer products over steps and samples.
    slots, rows : int
        How many numbers ``products`` has for a step and sample, and ``rows`` for a sample.
    orders : dict of str to ndarray of int, shape (numbers, terms)
        For each number of a parameter, the places whose numbers are added up: in all matrices by
        rows, then in the sums of ``products``, then in those of ``rows``; or behind these for 0.
    """

    shapes: dict[str, tuple[int, ...]]
    groups: list[Group]
    slots: int
    rows: int
    orders: dict[str, NDArray[np.int64]]


def parameters_of(network: RecurrentLike, dtype: DTypeLike) -> list[Parameters]:
    """Return the parameters of each direction of each layer."""
    return [
        _parameters_of(Direction(cell, layer, back, np.dtype(dtype), sample_rows=0))
        for layer, cells in enumerate(network.cells, start=1)
        for back, cell in enumerate(cells)
    ]


def _parameters_of(one: Direction) -> Parameters:
    units = one.units
    by_slots: dict[tuple[int, int], list[Product]] = {}
    for each in one.runs:
        by_slots.setdefault((each.slot, each.slots), []).append(each)
    groups, size = [], 0
    places: dict[int, NDArray[np.int64]] = {}
    for (slot, slots), products in by_slots.items():
        factors = tuple(_factor_of(one, each) for each in products)
        width = sum(end - begin for _, begin, end in factors)
        groups.append(Group(slot * units, (slot + slots) * units, factors))
        column = size
        for each in products:
            rows, cols = each.places.shape
            places[id(each)] = column + np.arange(rows)[:, None] * width + np.arange(cols)
            column += cols
        size += slots * units * width
    slots, rows = one.products, one.rows * units
    every = one.places_in([places[id(each)] for each in one.runs], size, size + slots)
    none = size + slots + rows
    orders = {name: np.where(order < 0, none, order) for name, order in every.items()}
    return Parameters(one.cell.shapes, groups, slots, rows, orders)


def _factor_of(one: Direction, each: Product) -> tuple[str, int, int]:
    """Return which array a product multiplies, and its columns there."""
    if each.source == 0:
        return "input", 0, one.inputs
    if each.source < 0:
        name, place = "arguments", -1 - each.source
    else:
        name, place = "states", one.multiplied.tolist().index(each.source - 1)
    return name, place * one.units, (place + 1) * one.units


_texts: WeakKeyDictionary[Program, str] = WeakKeyDictionary()


def program_text(cls: type, program: Program) -> str:
    """Return a text that programs of cells share if they compute the same from the same parameters.

    `cls` is the class of the cells.
    """
    text = _texts.get(program)
    if text is None:
        read: dict[Node, int] = {node("state", about=(k,)): k for k in range(program.states)}
        read |= {each: -1 - k for k, each in enumerate(program.arguments)}
        slots = [
            (
                [(*term[:3], read.get(term.argument)) for term in slot.terms],
                *(slot.vectors, slot.stage),
            )
            for slot in program.slots
        ]
        rows = [(row.operation, row.about) for row in program.rows]
        parameters = [
            (name, type(each).__name__, each.blocks, getattr(each, "biased", ()))
            for name, each in declared(cls).items()
        ]
        about = repr((program.states, slots, rows, parameters, source_of(program, "")))
        text = _texts[program] = hashlib.sha256(about.encode()).hexdigest()
    return text
