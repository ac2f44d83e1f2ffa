"""The parts of a stream: recurrent networks, and layers behind them as cells without a past."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays.arrays import Mirrored, host_array
from ..errors import InputError, InputTypeError, short
from ..graph import functions
from ..graph.operations import Node
from .definition import Input, Mask, Vector, begins_of, shapes_of, sizes_of, trace
from .further import of_network
from .initial import initial_states
from .short import short_of
from .step import OneCell

Array = NDArray[Any]
# Returns a parameter of a layer by its name; None if it has none.
Read = Callable[[Any, str], Any]


class Part(NamedTuple):
    """A part of a stream.

    Attributes
    ----------
    network
        What kernels run.
    further : list of float
        The further inputs of its cells, which are the same in all steps.
    sizes : list of int
        How many numbers each state has, and an output; none if nothing of a step is kept.
    outputs : int
        How many numbers an output has.
    params : callable
        Returns what kernels read, cell by cell.
    initial : callable
        Returns what states begin with, ``(layers, 1, state_size)``.
    """

    network: Any
    further: list[float]
    sizes: list[int]
    outputs: int
    params: Callable[[], list[Array]]
    initial: Callable[[], Array]


def recurrent_part(network: Any, read: Callable[[str], Any]) -> Part:
    """Return the part of a network of cells, whose parameters are read by their names.

    Raises
    ------
    InputError
        If it has two directions, or its steps read more than inputs.
    """
    if len(network.cells[0]) > 1:
        raise InputError(
            f"network is {short(network)}, of two directions; expected one: the other one begins "
            "with the last step"
        )
    further = []
    for each in of_network(network):
        if not isinstance(each.declared, Mask):
            raise InputError(
                f"network is {short(network)}, whose steps read {each.name}; expected steps that "
                "read inputs, states and masks alone"
            )
        further.append(float(each.declared.values(each.p)[1]))
    one, whole = network.cells[0][0], short_of(network)
    inner = network if whole is None else whole.network
    states, sizes = one.program.states, sizes_of(type(one), one.options, one.hidden_size)
    names = [
        [network.name_of(name, layer, 0) for name in cell.shapes]
        for layer, (cell,) in enumerate(network.cells)
    ]

    def params() -> list[Array]:
        found = {name: host_array(name, read(name)) for own in names for name in own}
        if whole is not None:
            found = whole.params(np, found)
        return [found[name] for own in names for name in own]

    def initial() -> Array:
        begins, count = begins_of(type(one), states), len(network.cells)
        if not begins:
            return np.zeros((count, 1, states * one.hidden_size))
        of_cells = [
            {name: read(own) for name, own in zip(cell.shapes, row, strict=True)}
            for (cell,), row in zip(network.cells, names, strict=True)
        ]
        found: Array = initial_states(np, begins, states, of_cells, (1, one.hidden_size))
        return found

    return Part(inner, further, sizes, sizes[0], params, initial)


# -- Layers behind networks -----------------------------------------------------------------------

# Returns a parameter as a vector of a graph; a number if a layer has none.
_Param = Callable[[str, float], Any]
# Layers without an effect in inference, and functions, by the names of PyTorch's classes and ours.
IGNORED = ("Dropout", "AlphaDropout", "Identity")
FUNCTIONS: dict[str, Callable[[Any, Node, _Param], Any]] = {
    "ELU": lambda m, a, p: functions.elu(a, m.alpha),
    "Hardsigmoid": lambda m, a, p: functions.hardsigmoid(a),
    "Hardtanh": lambda m, a, p: functions.hardtanh(a, m.min_val, m.max_val),
    "LeakyReLU": lambda m, a, p: functions.leaky_relu(a, m.negative_slope),
    "LogSoftmax": lambda m, a, p: a - functions.logsumexp(a),
    "ReLU": lambda m, a, p: functions.relu(a),
    "SiLU": lambda m, a, p: functions.silu(a),
    "Sigmoid": lambda m, a, p: functions.sigmoid(a),
    "Softmax": lambda m, a, p: functions.softmax(a),
    "Softplus": lambda m, a, p: functions.where(
        m.beta * a > m.threshold, a, functions.softplus(m.beta * a) / m.beta
    ),
    "Softsign": lambda m, a, p: functions.softsign(a),
    "Tanh": lambda m, a, p: functions.tanh(a),
    "LayerNorm": lambda m, a, p: functions.layer_norm(a, p("weight", 1), p("bias", 0), eps=m.eps),
}
_ROOMS = "torch.nn.", "sparsescan."


def title_of(layer: Any) -> str:
    """Return the name of the class of PyTorch or ours that a layer is of; empty if of none."""
    known = {"Linear", *IGNORED, *FUNCTIONS}
    kinds = [kind.__name__ for kind in type(layer).__mro__ if kind.__module__.startswith(_ROOMS)]
    return next((name for name in kinds if name in known), "")


def check_function(layer: Any, units: int) -> None:
    """Raise unless a function can be computed of so many numbers in the last axis."""
    title, axis = title_of(layer), getattr(layer, "dim", -1)
    if title in ("Softmax", "LogSoftmax") and axis != -1:
        raise InputError(f"dim of {title} is {short(axis)}; expected -1, the axis of outputs")
    if getattr(layer, "normalized_shape", (units,)) != (units,):
        raise InputError(f"{short(layer)} is behind {units} outputs; expected {(units,)}")


def read_own(layer: Any, name: str) -> Any:
    """Return a parameter of a layer or a network of ours."""
    is_kept = name == "weight" and hasattr(layer, "kept_weight")
    return layer.kept_weight(np) if is_kept else getattr(layer, name)


def layer_parts(layers: Iterable[Any], width: int, read: Read) -> list[Part]:
    """Return the parts of dense layers and functions behind so many outputs.

    A dense layer and the functions that follow it are one part.
    """
    parts, group, outputs = list[Part](), list[Any](), width

    def end() -> None:
        if group:
            parts.append(_part_of(tuple(group), width, outputs, read))
            group.clear()

    for layer in layers:
        title = title_of(layer)
        if title == "Linear":
            rows, cols = read(layer, "weight").shape
            if outputs not in (0, cols):
                raise InputError(f"{short(layer)} is behind {outputs} outputs; expected {cols}")
            end()
            width, outputs = cols, rows
        elif title in FUNCTIONS:
            if not outputs:
                raise InputError(f"{short(layer)} is behind no outputs; expected a layer before it")
            check_function(layer, outputs)
        elif title in IGNORED:
            continue
        else:
            raise InputTypeError(
                f"a layer is {short(layer)}; expected Linear, "
                f"{', '.join(sorted([*FUNCTIONS, *IGNORED]))}"
            )
        if not group:
            width = width if title == "Linear" else outputs
        group.append(layer)
    end()
    return parts


class _LayerCell:
    """A cell whose new state is a function of its input, with parameters of nobody's."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        self.input_size, self.hidden_size, self.state_size = inputs, outputs, outputs
        self.masks: dict[str, Mirrored | None] = dict.fromkeys(["product"])
        self.program = trace(type(self), {}, bias)
        self.shapes = shapes_of(type(self), inputs, outputs, bias)
        self.params: dict[str, Any] = {}

    def step(self, x: Any, past: Any) -> Any:
        """Return the function of the input: defined by each class."""
        raise NotImplementedError


def _part_of(layers: Sequence[Any], width: int, outputs: int, read: Read) -> Part:
    """Return the part of a dense layer and functions, or of functions alone."""
    is_dense = title_of(layers[0]) == "Linear"
    has_bias = is_dense and read(layers[0], "bias") is not None
    found: dict[str, Any] = {"product" if is_dense else "ones": Input() if is_dense else Vector()}
    # Of each parameter the layer that has it, and its name there.
    sources = {"product": (layers[0], "weight"), "product_bias": (layers[0], "bias")}
    for k, layer in enumerate(layers):
        if title_of(layer) == "LayerNorm":
            for name in ("weight", "bias"):
                if read(layer, name) is not None:
                    found[f"{name}_{k}"] = Vector()
                    sources[f"{name}_{k}"] = layer, name

    def step(self: Any, x: Any, past: Any) -> Any:
        # Exactly the input, of which sums over units are no sums over inputs.
        a = self.product(x) if is_dense else x * self.ones
        for k, layer in enumerate(layers):
            param = partial(_param, self, found, k)
            a = a if is_dense and k == 0 else FUNCTIONS[title_of(layer)](layer, a, param)
        return a

    kind: Any = type("LayerCell", (_LayerCell,), {**found, "step": step})
    cell = kind(width, outputs, has_bias)

    def params() -> list[Array]:
        return [
            np.ones(width, np.float32) if name == "ones" else host_array(name, read(*sources[name]))
            for name in cell.shapes
        ]

    def initial() -> Array:
        return np.zeros((1, 1, outputs))

    return Part(OneCell(cell), [], [], outputs, params, initial)


def _param(cell: Any, declared: dict[str, Any], k: int, name: str, default: float) -> Any:
    """Return a parameter of the `k`-th layer of a part; a number if it has none."""
    own = f"{name}_{k}"
    return getattr(cell, own) if own in declared else default
