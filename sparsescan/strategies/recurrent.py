"""Networks that are trained: layers one after the other, or a cell over a sequence."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, InputTypeError
from ..jacobians import Linear, Operator, Sequential
from ..recurrent.cells import Cell
from ..symbolic.schedule import check_count
from .architectures import CELLS, HIDDEN, Builder, build, from_sequential
from .graph import Graph

Array = NDArray[Any]


class Step(Operator):
    """Step `t` of a cell as a layer: from the state before it to the one behind.

    Its parameters are those of the cell, which all steps share and none copies. A cell may be some
    units of one, which read the whole state.
    """

    # A step reads its own inputs, which are not cut as the states are.
    _samples_apart = False

    def __init__(self, cell: Any, t: int) -> None:
        self.cell, self.t = cell, t
        self._set_shapes((cell.state_size,), None)
        self._set_output((cell.state_size if isinstance(cell, Cell) else cell.units,))
        self._x: Any = None

    def read(self, x: Array) -> None:
        """Take the inputs of this step from sequences, ``(samples, steps, input_size)``.

        Their samples are those whose states ``forward``, ``values`` and ``param_grads`` get next.
        """
        self._x = x[:, self.t]

    @property
    def params(self) -> Any:
        """The parameters of the cell, not copied."""
        return self.cell.params

    def _core_nnz(self) -> int:
        return int(self.cell.nnz)

    def _core_pattern(self) -> Any:
        return self.cell.pattern

    def _forward(self, xp: Any, x: Any) -> Any:
        return self.cell.forward(self._x, x)

    def _fill(self, xp: Any, x: Any, y: Any, out: Any) -> None:
        self.cell.values(self._x, x, out=out)

    def _param_grads(self, xp: Any, x: Any, grad_y: Any) -> Any:
        return self.cell.param_grads(self._x, x, grad_y)


class Recurrent:
    """A recurrent cell over a sequence, and a linear layer that reads its last state.

    Parameters
    ----------
    cell : Cell
        The cell, the same in all steps.
    readout : Linear
        Linear layer from the last state to the classes.
    steps : int
        Length of a sequence; a sample has the shape ``(steps, cell.input_size)``.

    Attributes
    ----------
    ops : tuple of Operator
        One for each step, and the readout: the layers of :meth:`graph` behind the input, which
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
        """Return the network of which ``build(name)`` is the graph: ``"rnn:T"`` or ``"gru:T"``."""
        kind, _, steps = name.partition(":")
        if kind not in CELLS:
            raise InputError(f"network is {name!r}; expected rnn:T or gru:T")
        build(name)  # which refuses other numbers of steps
        generator, (cell, features, classes) = np.random.default_rng(rng), CELLS[kind]
        first = cell(features, HIDDEN, rng=generator)
        return cls(first, Linear(HIDDEN, classes, rng=generator), int(steps))

    def graph(self, name: str = "recurrent") -> Graph:
        """Return the graph, as :func:`.build` makes it."""
        cell, builder = self.cell, Builder(name, (self.cell.state_size,))
        builder.cells(cell, self.steps)
        builder.extend([self.readout])
        return builder.graph()


#: A network that strategies train.
Trainable = Sequential | Recurrent


def graph_of(network: Trainable, name: str = "network") -> Graph:
    """Return the graph of a network that is trained.

    Raises
    ------
    InputError, InputTypeError
        If two layers share parameters, or there is no such network.
    """
    if isinstance(network, Recurrent):
        return network.graph(name)
    if not isinstance(network, Sequential):
        raise InputTypeError(
            f"network is a {_named(network)}; expected a sparsescan.jacobians.Sequential or a "
            "Recurrent"
        )
    owned = [(op, params) for op in network.layers if (params := [*op.params.values()])]
    for (op, mine), (other, theirs) in itertools.combinations(owned, 2):
        if any(np.may_share_memory(*pair) for pair in itertools.product(mine, theirs)):
            raise InputError(
                f"network has layers that share memory for parameters, {op!r} and {other!r}; "
                "expected layers with parameters of their own"
            )
    return from_sequential(network, name)


def _named(network: object) -> str:
    """Return the whole name of its type: there are several of the name Sequential."""
    kind = type(network)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def as_graph(network: Graph | Trainable) -> Graph:
    """Return a graph itself, or that of a network that is trained."""
    if isinstance(network, Graph):
        return network
    if not isinstance(network, (Sequential, Recurrent)):
        raise InputTypeError(
            f"network is a {_named(network)}; expected a Graph, such as build('lenet5') or, of a "
            "module of PyTorch, sparsescan.strategies.pytorch.from_torch(module, input_shape); a "
            "sparsescan.jacobians.Sequential or a Recurrent"
        )
    return graph_of(network)


def operators(network: Trainable, graph: Graph) -> list[Operator | None]:
    """Return the operator of every layer of :func:`graph_of`'s graph; None for input and sums.

    All steps of a recurrent network have the same cell.
    """
    ops = iter(network.ops if isinstance(network, Recurrent) else network.layers)
    return [None if layer.kind in ("input", "add") else next(ops) for layer in graph.layers]
