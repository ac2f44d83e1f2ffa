"""Recurrent: a cell over a sequence, step by step as layers that share their parameters."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError, InputTypeError
from ...jacobians import GRUCell, Linear, Operator, RNNCell, Sequential
from ...jacobians.recurrent import Cell
from ...pattern import Pattern
from ...schedule import check_count
from .architectures import Builder, append, build, from_sequential
from .graph import Graph, Layer

__all__ = ["Network", "Recurrent", "Step", "graph_of", "operators"]

Array = NDArray[Any]

_CELLS: dict[str, tuple[type[Cell], int]] = {"rnn": (RNNCell, 1), "gru": (GRUCell, 3)}


class Step(Operator):
    """Step `t` of a cell as a layer: from the state before it to the one behind.

    Its parameters are those of the cell, which all steps share.

    Parameters
    ----------
    cell : Cell
        The cell, not copied.
    t : int
        Which step, from 0 on.
    """

    # They read their own inputs, which are not cut as the states are.
    _samples_apart = False

    def __init__(self, cell: Cell, t: int) -> None:
        self.cell, self.t = cell, t
        self._set_shapes((cell.state_size,), None)
        self._set_output((cell.state_size,))
        self._x: Any = None

    def read(self, x: Array) -> None:
        """Take the inputs of this step from sequences, ``(samples, steps, input_size)``.

        They are those of the samples whose states :meth:`forward`, :meth:`values` and
        :meth:`param_grads` are given next.
        """
        self._x = x[:, self.t]

    @property
    def params(self) -> dict[str, Any]:
        """Those of the cell, not copied."""
        return self.cell.params

    def _core_nnz(self) -> int:
        return self.cell.nnz

    def _core_pattern(self) -> Pattern:
        return self.cell.pattern

    def _forward(self, xp: Any, x: Any) -> Any:
        return self.cell.forward(self._x, x)

    def _fill(self, xp: Any, x: Any, y: Any, out: Any) -> None:
        self.cell.values(self._x, x, out=out)

    def _param_grads(self, xp: Any, x: Any, grad_y: Any) -> dict[str, Any]:
        return self.cell.param_grads(self._x, x, grad_y)


class Recurrent:
    """A recurrent cell over a sequence, and a linear layer that reads its last state.

    Parameters
    ----------
    cell : Cell
        The cell, the same in all steps.
    readout : Linear
        From the last state to the classes.
    steps : int
        Of a sequence; a sample has the shape ``(steps, cell.input_size)``.

    Attributes
    ----------
    ops : tuple of Operator
        A :class:`Step` each, and the readout: the layers of :meth:`graph` behind the input, which
        is the first state, zeros.
    """

    def __init__(self, cell: Cell, readout: Linear, steps: int) -> None:
        if not isinstance(cell, Cell):
            raise InputTypeError(f"cell is a {type(cell).__name__}; expected a recurrent cell")
        if not isinstance(readout, Linear):
            raise InputTypeError(f"readout is a {type(readout).__name__}; expected a Linear")
        if readout.input_shape != (cell.state_size,):
            raise InputError(
                f"readout has input_shape {readout.input_shape}; expected {(cell.state_size,)}"
            )
        self.cell, self.readout = cell, readout
        self.steps = check_count("steps", steps, 1)
        self.input_shape = (steps, cell.input_size)
        self.output_shape = readout.output_shape
        self.ops: tuple[Operator, ...] = (*(Step(cell, t) for t in range(steps)), readout)

    @classmethod
    def named(cls, name: str, rng: np.random.Generator | int | None = None) -> Recurrent:
        """What ``build(name)`` is the graph of, for ``"rnn:T"`` and ``"gru:T"``."""
        kind, _, steps = name.partition(":")
        if kind not in _CELLS:
            raise InputError(f"network is {name!r}; expected rnn:T or gru:T")
        layers = build(name).layers
        (hidden,), (classes,) = layers[1].shape, layers[-1].shape
        generator, gates = np.random.default_rng(rng), layers[1].weights // hidden
        cell, count = _CELLS[kind]
        # gates · hidden · (features + hidden + 2) parameters.
        features = gates // count - hidden - 2
        made = cell(features, hidden, rng=generator)
        return cls(made, Linear(hidden, classes, rng=generator), int(steps))

    def graph(self, name: str = "recurrent") -> Graph:
        """The graph, as :func:`~.architectures.build` makes it."""
        cell, made = self.cell, Builder(name, (self.cell.state_size,))
        weights = sum(param.size for param in cell.params.values())
        taps = cell.weight_ih.size + cell.weight_hh.size
        for t in range(self.steps):
            made.add(
                Layer(
                    f"cell{t + 1}",
                    "cell",
                    (t,),
                    (cell.state_size,),
                    0 if t else weights,
                    taps,
                    cell.nnz,
                    shares=1 if t else None,
                )
            )
        append(made, [self.readout], made.last)
        return made.graph()


#: What strategies train.
Network = Sequential | Recurrent


def graph_of(network: Network, name: str = "network") -> Graph:
    """The graph of a network that is trained.

    Raises
    ------
    InputError, InputTypeError
        If two layers share parameters, or there is no such network.
    """
    if isinstance(network, Recurrent):
        return network.graph(name)
    if not isinstance(network, Sequential):
        raise InputTypeError(
            f"network is a {type(network).__name__}; expected a Sequential or a Recurrent"
        )
    owned = [(op, params) for op in network.layers if (params := [*op.params.values()])]
    for (op, mine), (other, theirs) in itertools.combinations(owned, 2):
        if any(np.may_share_memory(*pair) for pair in itertools.product(mine, theirs)):
            raise InputError(
                f"network has layers that share memory for parameters, {op!r} and {other!r}; "
                "expected layers with parameters of their own"
            )
    return from_sequential(network, name)


def operators(network: Network, graph: Graph) -> list[Operator | None]:
    """For every layer of :func:`graph_of`'s graph its operator; None for the input, and for sums.

    Of a recurrent network, all steps have the same cell.
    """
    made = iter(network.ops if isinstance(network, Recurrent) else network.layers)
    return [None if layer.kind in ("input", "add") else next(made) for layer in graph.layers]
