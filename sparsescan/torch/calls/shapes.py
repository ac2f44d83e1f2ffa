"""Kinds of recurrent networks, and their names in PyTorch's operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...errors import InputError
from ...recurrent import Cell, GRUCell, LSTMCell, Recurrent, RNNCell
from ...recurrent.arguments import DEFAULTS, Options
from ...recurrent.definition import read_options, shapes_of
from ...recurrent.program import CellProgram
from ...recurrent.recorded import program_text
from ...recurrent.short import whole_class
from .direct import constant


class CellKind(NamedTuple):
    """A class of cells, with the options of its cells."""

    cell: type[Cell]
    options: dict[str, Any]

    def program(self, has_bias: bool) -> CellProgram:
        """Return the program of a step."""
        return self.cell.program_of(self.options, has_bias)


# PyTorch's modes come first. Other names contain a digest of the computation, so that a name in a
# compiled graph never changes its meaning.
_kinds: dict[str, CellKind] = {
    "RNN_TANH": CellKind(RNNCell, {"nonlinearity": "tanh"}),
    "RNN_RELU": CellKind(RNNCell, {"nonlinearity": "relu"}),
    "GRU": CellKind(GRUCell, {}),
    "LSTM": CellKind(LSTMCell, {}),
}


def register(cell: type[Cell], options: dict[str, Any], has_bias: bool) -> str:
    """Register a class of cells; return its mode, which is its name in the operators."""
    kind = CellKind(whole_class(cell), read_options(cell, options))
    mode = f"{cell.__name__}.{program_text(cell, kind.program(has_bias))[:32]}"
    _kinds.setdefault(mode, kind)
    return mode


def kind_of(mode: str) -> CellKind:
    """Return the kind that is registered by a name."""
    kind = _kinds.get(mode)
    if kind is None:
        raise InputError(
            f"{mode} is no mode of a recurrent network here; expected one of {sorted(_kinds)}: a "
            "graph of another process needs its modules, which register their cells"
        )
    return kind


class Shape(NamedTuple):
    """The kind and the sizes of a network.

    Attributes
    ----------
    mode : str
        PyTorch's mode, ``"GRU"``, ``"LSTM"``, ``"RNN_TANH"`` or ``"RNN_RELU"``, or a result of
        :func:`register`.
    has_bias, bidirectional : bool
        As in PyTorch.
    options : Options
        All other options. Outputs of all layers have an axis of directions.
    """

    mode: str
    input_size: int
    hidden_size: int
    num_layers: int
    has_bias: bool
    bidirectional: bool
    options: Options = DEFAULTS

    @classmethod
    def of(cls, x: Tensor, about: tuple[Any, ...]) -> Shape:
        """Return the shape of a network for an input with all columns, ``(T, batch, …)``."""
        mode, *sizes, numbers = about
        shape = cls(mode, 0, *sizes, Options.decode(numbers))  # type: ignore[call-arg]
        return shape._replace(input_size=x.shape[2] - shape.further_size)

    @property
    def further(self) -> int:
        """How many further inputs a cell has."""
        return len(self.program.further_grads)

    @property
    def further_size(self) -> int:
        """The number of columns of all cells' further inputs."""
        return self.num_layers * self.directions * self.further * self.hidden_size

    @property
    def directions(self) -> int:
        """How many directions a layer has."""
        return 1 + self.bidirectional

    @property
    def program(self) -> CellProgram:
        """The program of a step of its cells."""
        return kind_of(self.mode).program(self.has_bias)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of an output."""
        if self.options.return_states == "layers":
            return self.num_layers * self.directions, self.state_size
        own = self.state_size if self.options.return_states else self.hidden_size
        return (self.directions * own,)

    @property
    def state_size(self) -> int:
        """The length of a cell's state, which is ``[h, c]`` for an LSTM."""
        return self.hidden_size * self.program.states

    def names(self) -> tuple[str, ...]:
        """Return the names of the parameters, in the order of the operators."""
        shapes = shapes_of(kind_of(self.mode).cell, 1, 1, self.has_bias)
        return tuple(
            Recurrent.name_of(name, layer, back)
            for layer in range(self.num_layers)
            for back in range(self.directions)
            for name in shapes
        )


@constant
def names_of(mode: str, num_layers: int, has_bias: bool, bidirectional: bool) -> tuple[str, ...]:
    """Return the names of a network's parameters."""
    return Shape(mode, 1, 1, num_layers, has_bias, bidirectional).names()


def network_of(shape: Shape, kept: Sequence[NDArray[np.bool_] | None] = ()) -> Recurrent:
    """Return a network of a shape, with its own parameters and the given kept weights."""
    kind = kind_of(shape.mode)
    named = zip(shape.names(), kept, strict=bool(kept))
    return Recurrent(
        *(kind.cell, shape.input_size, shape.hidden_size, shape.num_layers, shape.has_bias),
        bidirectional=shape.bidirectional,
        masks={name: each for name, each in named if each is not None},
        rng=0,
        **kind.options,
    )
