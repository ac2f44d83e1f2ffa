"""Training steps of recurrent networks as recordings, which compiled code runs without Python."""

from __future__ import annotations

import hashlib
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..execution.recording import Recording
from ..graph.expressions import topological
from ..graph.operations import Node, symbol
from .arguments import DEFAULTS, Options
from .compiled import source_of
from .definition import declared
from .host_sizes import Extent
from .packing import Direction, Product
from .passes import Passes, RecurrentLike
from .program import CellProgram
from .step import check_limit, segments


class RecordedStep(NamedTuple):
    """A training step for inputs of one shape.

    Arrays of a replay of `forward` are the memory, the inputs, initial states, lengths and resets
    if there are any, all parameters, and the results ``output`` and ``last``. Those of `backward`
    are the memory as `forward` has left it, memory for itself, gradients in ``output`` and
    ``last``, and the results: gradients in parameters, in initial states (``state``) and inputs
    (``input``).

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
    has_resets: bool = False,
    has_reset_states: bool = False,
    has_backward: bool = True,
    keeps_samples: bool = False,
    needs_input_grad: bool = True,
    options: Options = DEFAULTS,
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
    has_resets : bool, default False
        Whether states begin anew in the middle, where an array of bools says so.
    has_reset_states : bool, default False
        Whether these states are beside the initial ones: see
        :func:`~sparsescan.recurrent.memory.beside`.
    has_backward : bool, default True
        Whether a backward pass will come. Without one less memory is taken.
    keeps_samples : bool, default False
        Whether its results are, in place of gradients in parameters, what these are sums of: for
        each direction the gradients in slots, ``products``, and what they are multiplied by,
        ``states``, ``arguments`` and, above the first layer, ``input``, of all steps and samples;
        and the gradients in ``rows`` of parameters, of all samples. See :class:`Parameters`.
    needs_input_grad : bool, default True
        Whether its results are gradients in inputs, too.
    options : Options
        Which states are outputs, and how many bytes the memory may have; gates that do not fit are
        computed again by the backward pass.

    Raises
    ------
    MemoryLimitError
        If the memory is larger all the same.
    """
    for segment in segments(steps):
        kept = segment if has_backward else 0
        extent = Extent(steps, batch, kept, keeps_samples, has_resets, options)
        passes = Passes(network, extent, dtype, lengths=lengths, has_reset_states=has_reset_states)
        if options.memory_limit is None or passes.nbytes <= options.memory_limit:
            break
    check_limit(options.memory_limit, passes.nbytes, steps, batch)
    backward, back_nbytes = None, 0
    if has_backward:
        backward, back_nbytes = passes.backward(needs_input_grad=needs_input_grad)
    return RecordedStep(passes.forward, backward, passes.nbytes, back_nbytes)


class ProductGroup(NamedTuple):
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
    groups : list of ProductGroup
        Matrices of gradients, which are sums of outer products over steps and samples.
    slots, rows : int
        How many numbers ``products`` has for a step and sample, and ``rows`` for a sample.
    orders : dict of str to ndarray of int, shape (numbers, terms)
        For each number of a parameter, the places whose numbers are added up: in all matrices by
        rows, then in the sums of ``products``, then in those of ``rows``; or behind these for 0.
    """

    shapes: dict[str, tuple[int, ...]]
    groups: list[ProductGroup]
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
        first = each.slot * units + each.first
        by_slots.setdefault((first, each.forward.rows), []).append(each)
    groups, size = [], 0
    places: dict[int, NDArray[np.int64]] = {}
    for (first, height), products in by_slots.items():
        factors = tuple(_factor_of(one, each) for each in products)
        width = sum(end - begin for _, begin, end in factors)
        groups.append(ProductGroup(first, first + height, factors))
        column = size
        for each in products:
            rows, cols = each.places.shape
            places[id(each)] = column + np.arange(rows)[:, None] * width + np.arange(cols)
            column += cols
        size += height * width
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
    begin = place * one.units + each.first
    return name, begin, begin + each.places.shape[1]


_texts: WeakKeyDictionary[CellProgram, str] = WeakKeyDictionary()


def program_text(cls: type, program: CellProgram) -> str:
    """Return a text that programs of cells share if they compute the same from the same parameters.

    `cls` is the class of the cells.
    """
    text = _texts.get(program)
    if text is None:
        read: dict[Node, int] = {symbol("state", k): k for k in range(program.states)}
        read |= {each: -1 - k for k, each in enumerate(program.arguments)}
        slots = [
            (
                [(*term[:3], read.get(term.argument)) for term in slot.terms],
                *(slot.vectors, slot.stage),
            )
            for slot in program.slots
        ]
        rows = [(row.operation, row.details) for row in program.rows]
        parameters = [
            (name, type(each).__name__, each.blocks, getattr(each, "biased", ()))
            for name, each in declared(cls).items()
        ]
        # Derivatives of derivatives follow from the step as it was traced.
        order = topological(program.traced)
        places = {each: k for k, each in enumerate(order)}
        traced = [
            (each.operation, each.details, [places[argument] for argument in each.arguments])
            for each in order
        ]
        about = repr((program.states, slots, rows, parameters, program.partial, traced))
        about += source_of(program, "")
        text = _texts[program] = hashlib.sha256(about.encode()).hexdigest()
    return text
