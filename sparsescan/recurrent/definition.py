"""Declarations of a class of cells, and the tracing of its step.

A class calls its step once, on symbols, when the class is made, and again for new options.
"""

from __future__ import annotations

import inspect
import keyword
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from ..arrays.arrays import Mirrored
from ..checks import check_choice, check_count, check_flag
from ..errors import InputError, InputTypeError, short
from ..graph import functions
from ..graph.expressions import topological
from ..graph.functions import stop_gradient
from ..graph.known import Known, is_zero, known_of
from ..graph.operations import (
    NUMPYS,
    Node,
    Reduction,
    as_node,
    joined,
    linear_map,
    number,
    symbol,
)
from ..graph.tracing import Front, refuse, tracing
from ..parameters.parametrised import Parameter
from .program import INPUT, CellProgram, analyse

Shape = tuple[int, ...]
_MOST = 1 << 62  # more units than any cell has
# Elementwise functions of one vector that a Choice may name.
_FUNCTIONS: dict[str, Callable[..., Node]] = {
    name: function
    for name in functions.__all__
    for function in [getattr(functions, name)]
    for parameters in [inspect.signature(function).parameters]
    if "heads" not in parameters
    and sum(each.default is inspect.Parameter.empty for each in parameters.values()) == 1
}
# What a step calls in place of functions that used to be in :mod:`sparsescan.recurrent`.
FORMER_FUNCTIONS = {
    **{name: f"np.{name}" for name in (*NUMPYS, "where") if name in functions.__all__},
    "elu": "np.where(a <= 0, np.expm1(np.where(a <= 0, a, 0)), a)",
    "hardsigmoid": "np.clip(a / 6 + 0.5, 0, 1)",
    "hardtanh": "np.clip(a, -1, 1)",
    "identity": "the vector itself",
    "leaky_relu": "np.where(a <= 0, 0.01 * a, a)",
    "silu": "a * sigmoid(a)",
    "softsign": "a / (1 + abs(a))",
}
_FRONT = Front(
    modules=(__name__,),
    names={name: FORMER_FUNCTIONS.get(name, f"{name}(a)") for name in functions.__all__},
    subject="a step computes with vectors of one number a unit",
    functions="NumPy's functions of one number a unit, such as np.tanh(a), or sigmoid(a) and "
    "others of sparsescan.recurrent",
    elementwise="elementwise operations, or one matrix with several gates, np.split(self.W(a), n); "
    "a Hidden(cols=n) multiplies the first n units",
    matrix="a matrix that the class declares, such as W = Hidden(), and calls: self.W(a)",
    product="a product, a * b, or a matrix of the class, which is called",
    sums=(
        "np.sum(a), np.mean(a), np.max(a), np.linalg.norm(a), or softmax, logsumexp, layer_norm, "
        "rms_norm of sparsescan.recurrent; a matrix weighs all units for each, W = Hidden() and "
        "self.W(a)"
    ),
)


# Names of arguments of networks, in NumPy, PyTorch and JAX.
_ARGUMENTS = {
    *("x", "input", "state", "hx", "lengths", "resets", "reset_states", "rng", "key"),
    *("network", "params", "memory_limit", "truncate", "return_states"),
    *("num_layers", "batch_first", "dropout", "bidirectional", "masks", "device"),
}


def bias_name(matrix: str) -> str:
    """Return the name of the bias of a matrix: ``bias_ih`` of ``weight_ih``."""
    kind, _, rest = matrix.partition("_")
    return f"bias_{rest}" if kind == "weight" and rest else f"{matrix}_bias"


class CellLike(Protocol):
    """The parts of a cell that kernels for whole sequences need."""

    input_size: int
    hidden_size: int
    state_size: int
    masks: dict[str, Mirrored | None]

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the parameters."""

    @property
    def params(self) -> dict[str, Any]:
        """The parameters."""

    @property
    def program(self) -> CellProgram:
        """The operations of the step."""


class Layers(Protocol):
    """The layers of cells for which memory is allocated."""

    input_size: int

    @property
    def cells(self) -> tuple[tuple[CellLike, ...], ...]:
        """The cells of each direction of each layer."""
        ...


def width_of(network: Layers) -> int:
    """Return how many numbers a network reads in a step: the input, and all further inputs.

    After the input come the further inputs of each direction of each layer.
    """
    cells = [cell for layer in network.cells for cell in layer]
    own = (len(cell.program.further_grads) * cell.hidden_size for cell in cells)
    return network.input_size + sum(own)


def _finite(name: str, value: Any) -> float:
    """Return a number, or raise an error that names it."""
    try:
        if isinstance(value, numbers.Real) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    raise InputTypeError(f"{name} is {short(value)}; expected a finite number")


class _Declared(Parameter):
    """A parameter that a class of cells declares, in blocks of one number or row per unit.

    Parameters
    ----------
    *gates : str
        Names of the blocks. Without names there is one unnamed block.
    """

    def __init__(self, *gates: str) -> None:
        for gate in gates:
            is_name = isinstance(gate, str) and gate.isidentifier() and not keyword.iskeyword(gate)
            if not is_name or gate == "T" or gate.startswith("_"):
                raise InputError(
                    f"a gate is {short(gate)}; expected a name that does not begin with _, no "
                    "keyword of Python, and not 'T'"
                )
        if len(set(gates)) < len(gates):
            raise InputError(f"gates are {gates}; expected different names")
        self.gates = gates

    # The gates of a matrix that have a bias, and the initial value of a parameter.
    biased: tuple[int, ...] = ()
    initial: float | None = None

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return max(1, len(self.gates))

    def shape(self, inputs: int, units: int) -> Shape:
        """Return the shape, for so many inputs and units."""
        return (self.blocks * units,)

    def symbol(self) -> Any:
        """Return what stands for it in a step."""
        if not self.gates:
            return self.block(0)
        return _Vectors(self, {gate: self.block(k) for k, gate in enumerate(self.gates)})

    def block(self, which: int) -> Any:
        """Return the symbol of one block."""
        return symbol("vector", self.name, which)

    @property
    def name(self) -> str:
        """Its name in the class."""
        return self._name


class _Matrix(_Declared):
    """A matrix, and its bias.

    Parameters
    ----------
    *gates : str
        Names of the blocks of rows, one row per unit. Without names there is one block.
    bias : bool or sequence of str, default True
        Whether there is a bias, in cells that have biases; or for which gates.
    """

    def __init__(self, *gates: str, bias: bool | tuple[str, ...] = True) -> None:
        super().__init__(*gates)
        if isinstance(bias, bool):
            self.biased = tuple(range(self.blocks)) if bias else ()
            return
        if not isinstance(bias, (tuple, list)) or not all(each in gates for each in bias):
            raise InputError(f"bias is {short(bias)}; expected True, False or some of {gates}")
        self.biased = tuple(k for k, gate in enumerate(gates) if gate in bias)

    def __set_name__(self, owner: type, name: str) -> None:
        super().__set_name__(owner, name)
        # A clash with another declaration raises later, where errors are allowed.
        if self.biased and bias_name(name) not in vars(owner):
            bias = Parameter()
            setattr(owner, bias_name(name), bias)
            bias.__set_name__(owner, bias_name(name))

    def symbol(self) -> Any:
        """Return the symbol of the matrix in a step."""
        return _MatrixSymbol(self)

    def product(self, block: int, vector: Any, is_transposed: bool = False) -> Node:
        """Return a product with a vector."""
        raise NotImplementedError


class Input(_Matrix):
    """Declare a matrix ``(gates·hidden_size, input_size)`` that multiplies the input.

    Parameters
    ----------
    *gates : str
        Names of the blocks of rows: ``self.weight_ih.f(x)`` is ``W_f x + b_f``. Without names there
        is one block: ``self.weight_ih(x)``. With names that call returns all products, one after
        the other: ``f, n = np.split(self.weight_ih(x), 2)``.
    bias : bool or sequence of str, default True
        Whether there is a bias, in cells that have biases, or for which gates. The bias of
        ``weight_ih`` is ``bias_ih``.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.recurrent import Cell, Hidden, Input
    >>> class Elman(Cell):
    ...     weight_ih = Input()
    ...     weight_hh = Hidden()
    ...     def step(self, x, h):
    ...         return np.tanh(self.weight_ih(x) + self.weight_hh(h))
    >>> Elman(3, 4).weight_ih.shape
    (4, 3)
    """

    def shape(self, inputs: int, units: int) -> Shape:
        """Return the shape, for so many inputs and units."""
        return self.blocks * units, inputs

    def product(self, block: int, vector: Any, is_transposed: bool = False) -> Node:
        """Return a product with the input."""
        if vector is not INPUT:
            refuse(
                f"a product of {self.name}, an Input, with another vector than the input x",
                "a Hidden for it: Hidden(…) multiplies any vector of units",
            )
        return linear_map((self.name, block), INPUT)


class Hidden(_Matrix):
    """Declare a matrix ``(gates·hidden_size, hidden_size)`` that multiplies vectors of units.

    Such vectors are states and vectors that the step has computed: ``self.weight_hh.n(r * h)``. A
    matrix without gates has a transpose, ``self.weight_hh.T(h)``, without a bias.

    Parameters
    ----------
    *gates : str
        Names of the blocks of rows, as for :class:`Input`.
    bias : bool or sequence of str, default True
        As for :class:`Input`.
    heads : int or Constant, default 1
        The number of heads, which divide the units equally. Each head has its own matrix, so a gate
        is a block-diagonal matrix. Only the blocks are stored: the parameter has shape
        ``(gates·hidden_size, hidden_size/heads)``. Pass a :class:`Constant` of the class to let
        each cell choose its number of heads.
    rows, cols : int or Constant, default 0
        The number of rows and columns of a gate, at most the number of units; 0 means all units.
        The matrix multiplies the first `cols` units of a vector. Units of the product after the
        first `rows` are 0. With `rows` there is one head, and no bias.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.recurrent import Cell, Constant, Hidden, Input
    >>> class Heads(Cell):
    ...     heads = Constant(1)
    ...     weight_ih = Input()
    ...     weight_hh = Hidden(heads=heads)
    ...     def step(self, x, h):
    ...         return np.tanh(self.weight_ih(x) + self.weight_hh(h))
    >>> cell = Heads(3, 12, heads=4)
    >>> cell.weight_hh.shape, cell.nnz
    ((12, 3), 36)
    """

    def __init__(
        self,
        *gates: str,
        bias: bool | tuple[str, ...] = True,
        heads: int | Constant = 1,
        rows: int | Constant = 0,
        cols: int | Constant = 0,
    ) -> None:
        super().__init__(*gates, bias=bias)
        self._sizes = {"heads": heads, "rows": rows, "cols": cols}
        for name, size in self._sizes.items():
            if not isinstance(size, Constant):
                check_count(name, size, int(name == "heads"))
        if rows != 0 and self.biased:
            raise InputError(f"rows is {short(rows)} and bias {short(bias)}; expected bias=False")
        if heads != 1 and (rows, cols) != (0, 0):
            raise InputError(
                f"heads is {short(heads)}, rows {short(rows)} and cols {short(cols)}; expected "
                "heads, or rows and cols"
            )

    def sizes_of(self, options: Mapping[str, Any]) -> tuple[int, int, int]:
        """Return the numbers of heads, rows and columns of a gate, for a cell's options."""
        found = []
        for which, size in self._sizes.items():
            about = f"{which} of {self.name}", f"Hidden({which}=n)", int(which == "heads")
            found.append(_size(size, options, *about))
        heads, rows, cols = found
        return heads, rows, cols

    def shape(self, inputs: int, units: int) -> Shape:
        """Return the shape, for so many inputs and units, of a square matrix."""
        return self.blocks * units, units

    def product(self, block: int, vector: Any, is_transposed: bool = False) -> Node:
        """Return a product with a vector of units."""
        if not isinstance(vector, Node):
            refuse(f"a product of {self.name} with {short(vector)}", "a vector of units")
        if vector.operation == "joined":
            refuse(
                f"a product of {self.name} with {len(vector.arguments)} vectors of units",
                f"a product with each, self.{self.name}.a(…) + self.{self.name}.b(…)",
            )
        return linear_map((self.name, block), vector, is_transposed)


def _size(size: Any, options: Mapping[str, Any], what: str, example: str, least: int = 0) -> int:
    """Return a size, which may be one of the cell's options."""
    if not isinstance(size, Constant):
        return check_count(what, size, least)
    name = vars(size).get("_name", "")
    if name not in options:
        raise InputError(
            f"{what} is a Constant that the class does not declare; expected one of its own, such "
            f"as n = Constant(4) and {example}"
        )
    return check_count(name, options[name], least)


class State:
    """Declare that a state has fewer numbers than there are units.

    Its name is that of an argument of the step. In a class with ``h = State(size)``,
    ``step(self, x, h, c)`` reads an ``h`` with all units, of which all after the first `size` are
    0. The new ``h`` must be 0 there too: it is a product with a ``Hidden(rows=size)``, or is
    computed from one so that these units stay 0. Networks, modules and :meth:`~.Cell.training_step`
    take and return only the first `size` numbers, and the layer above reads only these. Other
    methods of a cell use all units.

    Parameters
    ----------
    size : int or Constant
        The number of numbers, at most the number of units; 0 means all units. Pass a
        :class:`Constant` of the class to let each cell choose its size.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.recurrent import Cell, Hidden, Input, State
    >>> class Narrow(Cell):
    ...     h = State(2)
    ...     weight_ih, weight_hh = Input(), Hidden(cols=2)
    ...     weight_hr = Hidden(rows=2, bias=False)
    ...     def step(self, x, h, c):
    ...         c = 0.9 * c + np.tanh(self.weight_ih(x) + self.weight_hh(h))
    ...         return self.weight_hr(c), c
    >>> output, state = Narrow(3, 20).training_step().forward(np.ones((7, 4, 3), np.float32))
    >>> output.shape, state.shape
    ((7, 4, 2), (1, 4, 22))
    """

    def __init__(self, size: int | Constant) -> None:
        self._size = size if isinstance(size, Constant) else check_count("size", size, 0)

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @property
    def name(self) -> str:
        """Its name in the class."""
        return self._name

    def size_of(self, options: Mapping[str, Any]) -> int:
        """Return the size of the state, for a cell's options; 0 means all units."""
        return _size(self._size, options, f"size of {self.name}", "State(n)")


class Vector(_Declared):
    """Declare parameters ``(gates·hidden_size,)``, one for each unit and gate.

    Parameters
    ----------
    *gates : str
        Names of the blocks: ``self.weight_ph.i * c``. Without names it is one vector.
    initial : float, optional
        The initial value of all numbers; by default they are drawn like weights.
    is_bias : bool, default False
        Whether it is a bias, like the biases of matrices: in a cell with ``bias=False`` it is 0 and
        no parameter. Use it for sums without a matrix, such as ``self.u * h + self.bias_hh``, or
        without a gate of a matrix.
    """

    def __init__(self, *gates: str, initial: float | None = None, is_bias: bool = False) -> None:
        super().__init__(*gates)
        self.initial = None if initial is None else _finite("initial", initial)
        self.is_bias = check_flag("is_bias", is_bias)

    def without(self) -> Any:
        """Return the symbol of a bias in a cell without biases."""
        zero = number(0)
        return _Vectors(self, dict.fromkeys(self.gates, zero)) if self.gates else zero


class Initial(Vector):
    """Declare initial states that are trained: parameters ``(states·hidden_size,)``.

    All samples of a sequence begin with them, unless the call passes another state. An episode
    within a sequence begins with them too, unless the call passes `reset_states` with its `resets`.
    Their gradient is the gradient in these states, summed over samples.

    Parameters
    ----------
    *states : str
        Names of states, which are names of the step's arguments: ``Initial("h", "c")``. Other
        states begin with zeros. Without names it is for a cell with one state.
    initial : float, default 0
        The initial value of all of them.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.recurrent import Cell, Hidden, Initial, Input
    >>> class Elman(Cell):
    ...     weight_ih = Input()
    ...     weight_hh = Hidden()
    ...     h0 = Initial()
    ...     def step(self, x, h):
    ...         return np.tanh(self.weight_ih(x) + self.weight_hh(h))
    >>> step = Elman(3, 4, rng=0).training_step()
    >>> output, _ = step.forward(np.ones((7, 2, 3), np.float32))
    >>> step.backward(output).params["h0"].shape
    (4,)
    """

    def __init__(self, *states: str, initial: float = 0.0) -> None:
        super().__init__(*states, initial=initial)


# The name of a vector of biases in the last release.
Bias = partial(Vector, is_bias=True)


class Scalar(_Declared):
    """Declare one number that is trained, for all units.

    Parameters
    ----------
    initial : float
        The initial value.
    """

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.initial = _finite("initial", initial)

    def shape(self, inputs: int, units: int) -> Shape:
        """Return the shape, for so many inputs and units."""
        return ()

    def block(self, which: int) -> Any:
        """Return the symbol of the number."""
        return symbol("scalar", self.name, 0)


class _Option:
    """An option of a cell, in addition to its sizes, that is fixed when the cell is made."""

    default: Any

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @property
    def name(self) -> str:
        """Its name in the class."""
        return self._name

    def __get__(self, cell: Any, owner: type | None = None) -> Any:
        return self if cell is None else vars(cell)["options"][self._name]

    def check(self, value: Any) -> Any:
        """Return a value, or raise an error that names the option."""
        raise NotImplementedError

    def symbol(self, value: Any) -> Any:
        """Return the symbol of a value in a step."""
        return value


class Constant(_Option):
    """Declare an option that is a number and is not trained.

    In a class ``LEM`` with ``dt = Constant(1.0)``, the cell ``LEM(3, 4, dt=0.1)`` has ``dt = 0.1``.

    Parameters
    ----------
    default : float
        The number, unless the cell gets another one.
    """

    def __init__(self, default: float) -> None:
        self.default = default

    def check(self, value: Any) -> Any:
        """Return a number, or raise an error that names the option."""
        _finite(self._name, value)
        return value


class Given:
    """Declare a further input of the step: one number for each unit, passed with each call.

    In a class with ``drive = Given()`` the step reads ``self.drive``, elementwise or by a
    :class:`Hidden`. A call of a cell takes it by name, ``drive=array``. A call of a network adds
    the layer, ``drive_l0=array``. The array has any shape that broadcasts to
    ``(T, batch, hidden_size)``: ``(T, batch, 1)`` is one number for each sample and step, and
    ``(batch, hidden_size)`` is the same in all steps. Calls return its gradient.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.recurrent import Cell, Given, Hidden, Input
    >>> class Driven(Cell):
    ...     weight_ih = Input()
    ...     weight_hh = Hidden()
    ...     drive = Given()
    ...     def step(self, x, h):
    ...         return h + self.drive * (np.tanh(self.weight_ih(x) + self.weight_hh(h)) - h)
    >>> step = Driven(3, 4, rng=0).training_step()
    >>> x = np.ones((7, 2, 3), np.float32)
    >>> output, _ = step.forward(x, drive=np.full((7, 2, 1), 0.5, np.float32))
    >>> step.backward(output).further["drive"].shape
    (7, 2, 1)
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @property
    def name(self) -> str:
        """Its name in the class."""
        return self._name

    def symbol_at(self, place: int) -> Node:
        """Return its symbol in a step, by its number."""
        return symbol("further", place)


class Mask(Given, _Option):
    """Declare a random mask, drawn for each unit and sample while a network trains.

    The mask is 0 with probability `p`, and otherwise ``1 / (1 - p)``, as in
    :class:`torch.nn.Dropout`; with ``scaled=False``, otherwise 1. In inference it is its
    expectation: 1, or ``1 - p`` with ``scaled=False``. It has no gradient. Its name is also an
    option: in a class with ``drop = Mask(0.5)``, the cell ``Elman(3, 4, drop=0.2)`` has another
    probability.

    A call draws the mask if it gets a source of random numbers (`rng`, or `key` in JAX). A PyTorch
    module draws it in training mode, from PyTorch's generator. If a call passes an array by the
    mask's name, as for :class:`Given`, that array is the mask.

    Parameters
    ----------
    p : float
        The probability of 0, unless the cell gets another one.
    per : {"step", "sequence"}, default "step"
        Whether to draw a new mask in each step, or one mask for all steps of a sample.
    scaled : bool, default True
        Whether to scale the mask so that its expectation is 1.

    Raises
    ------
    InputError, InputTypeError
        If `p` is not a number from 0 to 1, or an argument is wrong.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.recurrent import Cell, Hidden, Input, Mask
    >>> class Elman(Cell):
    ...     weight_ih = Input()
    ...     weight_hh = Hidden()
    ...     drop = Mask(0.25, per="sequence")  # Gal and Ghahramani, 2016
    ...     def step(self, x, h):
    ...         return np.tanh(self.weight_ih(x) + self.weight_hh(self.drop * h))
    >>> step = Elman(3, 4, rng=0).training_step()
    >>> output, _ = step.forward(np.ones((7, 2, 3), np.float32), rng=0)
    """

    def __init__(self, p: float, per: str = "step", *, scaled: bool = True) -> None:
        self.default = p
        self._name = "p"
        self.check(p)
        self.per = check_choice("per", per, "step", "sequence")
        self.scaled = check_flag("scaled", scaled)

    def check(self, value: Any) -> float:
        """Return a probability, or raise an error that names the option."""
        p = _finite(self._name, value)
        if not 0 <= p <= 1:
            raise InputError(f"{self._name} is {short(value)}; expected a number from 0 to 1")
        return p

    def symbol_at(self, place: int) -> Node:
        """Return what stands for it in a step, by its number; it has no gradient."""
        return stop_gradient(symbol("further", place))

    def values(self, p: float) -> tuple[float, float]:
        """Return the value of the mask where it is not 0, and its expectation."""
        return (1 / (1 - p) if p < 1 else 0.0, 1.0) if self.scaled else (1.0, 1 - p)


class StepNumber(Given):
    """Declare the number of the step, counted from 0, as a further input of the step.

    In a class with ``t = StepNumber()`` the step reads ``self.t``, a float that is equal in all
    units and samples. It is the place of the input in the sequence, in both directions. It has no
    gradient. A call may pass other numbers by this name, as for :class:`Given`, for example to
    continue an earlier call, or to count anew in each episode.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.recurrent import Cell, Hidden, Input, StepNumber
    >>> class Clocked(Cell):
    ...     weight_ih = Input()
    ...     weight_hh = Hidden()
    ...     t = StepNumber()
    ...     def step(self, x, h):
    ...         is_on = np.sin(2 * np.pi / 8 * self.t) >= 0
    ...         return np.where(is_on, np.tanh(self.weight_ih(x) + self.weight_hh(h)), h)
    >>> output, _ = Clocked(3, 4).training_step().forward(np.ones((16, 2, 3), np.float32))
    """

    def symbol_at(self, place: int) -> Node:
        """Return what stands for it in a step, by its number; it has no gradient."""
        return stop_gradient(symbol("further", place))


class Choice(_Option):
    """Declare an option that is one of several names: of elementwise functions, or any names.

    A step calls ``nonlinearity = Choice("tanh", "relu")``: ``self.nonlinearity(a)``. It compares
    names that are not functions: ``if self.reset == "zero"``.

    Parameters
    ----------
    *names : str
        The names; the first is the default. Either all are names of functions of one vector in
        :mod:`sparsescan.recurrent`, or none is.
    """

    def __init__(self, *names: str) -> None:
        if not names or not all(isinstance(name, str) for name in names):
            raise InputError(f"choices are {short(names)}; expected names")
        if not set(names).isdisjoint(_FUNCTIONS):
            for name in names:
                check_choice("a choice", name, *_FUNCTIONS)
        self.names, self.default = names, names[0]

    def check(self, value: Any) -> Any:
        """Return a name, or raise an error that names the option."""
        return check_choice(self._name, value, *self.names)

    def symbol(self, value: Any) -> Any:
        """Return the name; if it names a function, a step can call it."""
        return _Chosen(value)


class _Chosen(str):
    """The chosen name; calling it calls the function of that name."""

    __slots__ = ()

    def __call__(self, *vectors: Any) -> Node:
        if self not in _FUNCTIONS:
            refuse(f"a call of {str(self)!r}, which is no function", f"if … == {str(self)!r}")
        return _FUNCTIONS[self](*vectors)


# -- Symbols --------------------------------------------------------------------------------------


class _Blocks:
    """The symbol of a parameter with gates: each gate is an attribute."""

    def __init__(self, parameter: _Declared, blocks: dict[str, Any]) -> None:
        self._parameter, self._blocks = parameter, blocks

    def __repr__(self) -> str:
        return f"self.{self._parameter.name}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._blocks:
            gates = ", ".join(self._blocks) or "none"
            refuse(f"the gate {name!r} of {self._parameter.name}", f"one of its gates: {gates}")
        return self._blocks[name]


class _Vectors(_Blocks):
    """The symbol of vectors: with other vectors it is all gates, one after the other."""

    def __node__(self) -> Node:
        first, *_ = parts = [*self._blocks.values()]
        return first if first.is_one else joined(parts)  # a cell without biases has zeros


class _MatrixSymbol(_Blocks):
    """The symbol of a matrix. A step calls it, for all gates, or one gate, with a vector."""

    def __init__(self, matrix: _Matrix) -> None:
        super().__init__(matrix, {gate: _Product(matrix, k) for k, gate in enumerate(matrix.gates)})
        self._matrix = matrix
        if not matrix.gates:
            self._blocks["T"] = _Product(matrix, 0, is_transposed=True)

    def __call__(self, vector: Any) -> Node:
        matrix = self._matrix
        return joined([matrix.product(k, vector) for k in range(matrix.blocks)])

    def __matmul__(self, _: Any) -> NoReturn:
        refuse("@", f"a call, {self._call()}")

    def __rmatmul__(self, _: Any) -> NoReturn:
        has_transpose = isinstance(self._matrix, Hidden) and not self._matrix.gates
        other = f", or {self!r}.T(a) for its transpose" if has_transpose else ""
        refuse("@", f"a call, {self._call()}{other}")

    def _call(self) -> str:
        """Return the text of a call of the matrix, for errors."""
        return f"{self!r}{''.join(f'.{gate}' for gate in self._matrix.gates[:1])}(a)"


class _Product:
    """A gate of a matrix."""

    def __init__(self, matrix: _Matrix, block: int, is_transposed: bool = False) -> None:
        self._about = matrix, block, is_transposed

    def __repr__(self) -> str:
        matrix, block, is_transposed = self._about
        gate = "T" if is_transposed else matrix.gates[block]
        return f"self.{matrix.name}.{gate}"

    def __call__(self, vector: Any) -> Node:
        matrix, block, is_transposed = self._about
        return matrix.product(block, vector, is_transposed)

    def __matmul__(self, _: Any) -> NoReturn:
        refuse("@", f"a call, {self!r}(a)")

    def __rmatmul__(self, _: Any) -> NoReturn:
        # ``a @ W.T`` is ``W(a)``.
        matrix, _block, is_transposed = self._about
        refuse("@", f"a call, self.{matrix.name}(a)" if is_transposed else f"a call, {self!r}(a)")


class _Traced:
    """The `self` of a traced step: symbols of the parameters, and the options."""

    def __init__(self, cls: type, options: Mapping[str, Any], bias: bool) -> None:
        vars(self).update(_cls=cls, _options=options, _bias=bias)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the cell, so that a step may call super().step(x, h)."""
        return vars(self)["_cls"]

    def __repr__(self) -> str:
        return "self"

    def __getattr__(self, name: str) -> Any:
        cls, options = vars(self)["_cls"], vars(self)["_options"]
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        if caller is not None and caller.f_code is getattr(cls.step, "__code__", None):
            vars(self)["_frame"] = caller
        try:
            found = inspect.getattr_static(cls, name)
        except AttributeError:
            refuse(
                f"self.{name}, which {cls.__name__} does not declare",
                "Constant(…), Choice(…), Vector(…) or a matrix as an attribute of the class",
            )
        if _is_bias(found) and not vars(self)["_bias"]:
            return found.without()
        if isinstance(found, (Initial, State)):
            refuse(f"self.{name}, a declaration of states", "the state, an argument of the step")
        if isinstance(found, _Declared):
            return found.symbol()
        if isinstance(found, Given):
            return found.symbol_at(list(further_of(cls)).index(name))
        if isinstance(found, Parameter):
            refuse(f"self.{name}, a bias", "products, which add the biases of their matrices")
        if isinstance(found, _Option):
            return found.symbol(options[name])
        if isinstance(found, property) and found.fget is not None:
            return found.fget(self)
        if isinstance(found, (staticmethod, classmethod)):
            return found.__get__(None, cls)
        if callable(found) and hasattr(found, "__get__"):
            return found.__get__(self)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        refuse(f"an assignment to self.{name}", "a local variable, or another state")


# -- Tracing --------------------------------------------------------------------------------------


def _is_bias(each: object) -> bool:
    return isinstance(each, Vector) and each.is_bias


def declared(cls: type) -> dict[str, _Declared]:
    """Return the parameters that a class declares, those of its bases first."""
    return {name: each for name, each in _attributes(cls) if isinstance(each, _Declared)}


def partial_of(cls: type, options: Mapping[str, Any]) -> dict[str, tuple[int, int, int]]:
    """Return heads, rows and columns of matrices that are not plain square matrices."""
    found = {
        name: each.sizes_of(options)
        for name, each in declared(cls).items()
        if isinstance(each, Hidden)
    }
    return {name: sizes for name, sizes in found.items() if sizes != (1, 0, 0)}


def shapes_of(
    cls: type,
    inputs: int,
    units: int,
    bias: bool,
    partial: Mapping[str, tuple[int, int, int]] | None = None,
) -> dict[str, Shape]:
    """Return the shapes of the parameters of a cell by their names; biases come last.

    `partial` is the result of :func:`partial_of`.
    """
    parameters = declared(cls)
    shapes = {
        name: each.shape(inputs, units) for name, each in parameters.items() if not _is_bias(each)
    }
    for name, (heads, rows, cols) in (partial or {}).items():
        shapes[name] = parameters[name].blocks * (rows or units), cols or units // heads
    for name, each in parameters.items() if bias else ():
        if _is_bias(each):
            shapes[name] = each.shape(inputs, units)
        elif isinstance(each, _Matrix) and each.biased:
            shapes[bias_name(name)] = (len(each.biased) * units,)
    return shapes


def begins_of(cls: Any, count: int) -> dict[int, tuple[str, int]]:
    """Return the states of `count` that begin with parameters, with these names and blocks."""
    begins: dict[int, tuple[str, int]] = {}
    for name, each in declared(cls).items():
        if not isinstance(each, Initial):
            continue
        states = list(inspect.signature(cls.step).parameters)[2:]
        for block, state in enumerate(each.gates or states[:1]):
            if state not in states or len(states) != count or (not each.gates and count > 1):
                raise InputError(
                    f"{cls.__name__}.{name} is Initial({', '.join(map(repr, each.gates))}); "
                    f"expected names of states of the step, {', '.join(states)}"
                )
            if states.index(state) in begins:
                raise InputError(f"{cls.__name__} has two Initial for {state}; expected one")
            begins[states.index(state)] = name, block
    return begins


def states_of(cls: Any) -> dict[int, State]:
    """Return the states for which a class declares a size, by their places."""
    found = {name: each for name, each in _attributes(cls) if isinstance(each, State)}
    if not found:
        return {}
    states = list(inspect.signature(cls.step).parameters)[2:]
    if unknown := [name for name in found if name not in states]:
        raise InputError(
            f"{cls.__name__}.{unknown[0]} is a State; expected the name of an argument of the step "
            f"among: {', '.join(states)}"
        )
    if both := [states[k] for k in begins_of(cls, len(states)) if states[k] in found]:
        raise InputError(
            f"{cls.__name__}.{both[0]} is a State, and begins with a parameter; expected an "
            "Initial of states that have as many numbers as units"
        )
    return {states.index(name): each for name, each in found.items()}


def sizes_of(cls: Any, options: Mapping[str, Any], units: int) -> list[int]:
    """Return how many numbers each state of a cell has."""
    count, sizes = cls.program_of(dict(options)).states, states_of(cls)
    return [(sizes[k].size_of(options) if k in sizes else 0) or units for k in range(count)]


def _check_sizes(cls: Any, options: Mapping[str, Any], outputs: Sequence[Node]) -> None:
    """Raise unless new states are 0 after their declared sizes."""
    sizes = {k: each.size_of(options) or _MOST for k, each in states_of(cls).items()}
    if not sizes:
        return
    partial = partial_of(cls, options)
    ends = sorted({*sizes.values(), *(each or _MOST for own in partial.values() for each in own)})
    places = np.array(ends)  # all units between two of these behave alike

    def zeros(size: int) -> Known:
        return Known(places >= size, np.zeros(len(places)))

    known = {symbol("state", k): zeros(size) for k, size in sizes.items() if size < _MOST}
    for each in topological(outputs):
        if each.operation == "product" and each.details[0] in partial:
            name, _, is_transposed = each.details
            known[each] = zeros(partial[name][2 if is_transposed else 1] or _MOST)
    found = known_of(outputs, known, len(places))
    names = list(inspect.signature(cls.step).parameters)[2:]
    for k, size in sizes.items():
        if not is_zero(found[outputs[k]])[(places >= size) & (places < _MOST)].all():
            raise InputError(
                f"{cls.__name__}.{names[k]} is a State of {size} numbers, and the step "
                f"({_place(cls.step)}) may return others behind them; expected a product of a "
                f"Hidden(rows=…), or what stays 0 where that is"
            )


def initial_of(cls: type) -> dict[str, float]:
    """Return the initial values of parameters that are not drawn at random."""
    return {
        name: each.initial
        for name, each in declared(cls).items()
        if isinstance(each, (Vector, Scalar)) and each.initial is not None
    }


def further_of(cls: type) -> dict[str, Given]:
    """Return the further inputs that a class declares, those of its bases first."""
    return {name: each for name, each in _attributes(cls) if isinstance(each, Given)}


def matrices_of(cls: type) -> list[str]:
    """Return the names of the matrices that a class declares."""
    return [name for name, each in declared(cls).items() if isinstance(each, _Matrix)]


def read_options(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a class: the given values, and defaults for the others."""
    known = {name: each for name, each in _attributes(cls) if isinstance(each, _Option)}
    for name in given:
        if name not in known:
            expected = ", ".join(known) or "none"
            raise InputTypeError(
                f"{cls.__name__} has no argument {name!r}; expected options among: {expected}"
            )
    return {name: each.check(given.get(name, each.default)) for name, each in known.items()}


def _attributes(cls: type) -> Iterator[tuple[str, Any]]:
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        found |= {name: each for name, each in vars(base).items() if not name.startswith("__")}
    yield from found.items()


def _check_names(cls: type) -> None:
    """Raise unless each declaration has exactly one, unique name."""
    known = dict(_attributes(cls))
    # The most basic class with a step: its attributes are those of any cell.
    base = [each for each in cls.__mro__ if hasattr(each, "step")][-1]
    taken = {"options", "state_size", *dir(base), *inspect.signature(base).parameters}
    matrices = {name: each for name, each in known.items() if isinstance(each, _Matrix)}
    for name, each in known.items():
        if not isinstance(each, (_Declared, _Option, Given, State)):
            continue
        title = f"{cls.__name__}.{name}"
        if each.name != name:
            raise InputError(f"{title} is {each.name}, too; expected a declaration of its own")
        masked = name.removesuffix("_mask")
        if isinstance(each, Given):
            taken |= _ARGUMENTS
        if name in taken or (masked != name and masked in matrices):
            raise InputError(f"{title} has a name that cells use themselves; expected another one")
    for name, matrix in matrices.items():
        bias = bias_name(name)
        if matrix.biased and type(known[bias]) is not Parameter:
            raise InputError(
                f"{cls.__name__}.{bias} has the name of the bias of {name}; expected another one, "
                f"or bias=False for {name}"
            )


def _count_states(cls: Any, traced: Any) -> int:
    """Return the number of states of a class: the step's arguments after the input."""
    arguments = inspect.Parameter
    step = inspect.getattr_static(cls, "step")
    found = list(inspect.signature(step).parameters.values()) if inspect.isfunction(step) else []
    places = [each for each in found if each.kind is not arguments.VAR_POSITIONAL]
    is_positional = all(
        each.kind in (arguments.POSITIONAL_ONLY, arguments.POSITIONAL_OR_KEYWORD)
        and each.default is arguments.empty
        for each in places
    )
    if len(places) < 2 or not is_positional or len(found) < 3:
        raise InputTypeError(
            f"{cls.__name__}.step is {_place(step)}; expected a method step(self, x, h, …) of the "
            "input and at least one state, without defaults: what a cell is made with is a "
            "Constant, or a Choice"
        )
    if len(places) == len(found):
        return len(found) - 2
    count = getattr(traced, "states", None) if hasattr(cls, "states") else None
    if not isinstance(count, int) or count < max(1, len(places) - 2):
        raise InputTypeError(
            f"{cls.__name__}.states is {short(count)}; expected the number of states, at least 1, "
            f"since step takes any number of them ({_place(step)})"
        )
    return count


def _place(step: Any) -> str:
    """Return the place of a step's definition, or its repr."""
    code = getattr(step, "__code__", None)
    if code is None:
        return short(step)
    return f"{Path(code.co_filename).name}, line {code.co_firstlineno}"


def trace(cls: Any, options: Mapping[str, Any], bias: bool = True) -> CellProgram:
    """Call the step of a class of cells on symbols, and return its program."""
    _check_names(cls)
    step, traced = cls.step, _Traced(cls, options, bias)
    count = _count_states(cls, traced)
    begins_of(cls, count)
    states = [symbol("state", k) for k in range(count)]
    with tracing(_FRONT):
        returned, names = _with_names(step, traced, INPUT, *states)
    outputs = returned if isinstance(returned, (tuple, list)) else (returned,)
    if len(outputs) != count:
        raise InputTypeError(
            f"{cls.__name__}.step ({_place(step)}) returns {len(outputs)} states and takes "
            f"{count}; expected as many, in the same order"
        )
    for each in outputs:
        is_joined = isinstance(each, Node) and each.operation == "joined"
        if is_joined or not isinstance(each, (Node, numbers.Real)):
            raise InputTypeError(
                f"{cls.__name__}.step ({_place(step)}) returns {short(each)}; expected vectors of "
                "units, one for each state"
            )
    nodes = [as_node(each) for each in outputs]
    _check_sizes(cls, options, nodes)
    return analyse(nodes, names, partial_of(cls, options), len(further_of(cls)))


def check_uses(cls: Any) -> None:
    """Raise if the step never uses a declared parameter, whose gradient would be 0.

    A parameter that some other choice of options uses is allowed.
    """
    options = read_options(cls, {})
    unused = _unused(cls, cls.program_of(options))
    for name, each in _attributes(cls):
        for other in each.names if unused and isinstance(each, Choice) else ():
            also = _unused(cls, cls.program_of({**options, name: other}))
            unused = [one for one in unused if one in also]
    if unused:
        raise InputError(
            f"{cls.__name__}.step ({_place(cls.step)}) never uses {', '.join(unused)}: the "
            "gradient would always be 0; expected a step that uses all that the class declares "
            "(name = None takes back what a base class does; an initial state that is trained is "
            "an Initial)"
        )


def _unused(cls: Any, program: CellProgram) -> list[str]:
    """Return the declarations that a program does not use."""
    leaves = topological(program.traced)
    uses = {
        each.details if each.operation == "product" else (*each.details, False)
        for each in leaves
        if each.operation in ("product", "scalar", "vector")
        and not isinstance(each.details[0], Reduction)
    }
    read = {each.details[0] for each in leaves if each.operation == "further"}
    unused = [f"self.{name}" for k, name in enumerate(further_of(cls)) if k not in read]
    for name, each in declared(cls).items():
        if isinstance(each, Initial):
            continue
        used = [{(name, k, False), (name, k, True)} & uses for k in range(each.blocks)]
        if not any(used):
            unused.append(f"self.{name}")
            continue
        unused += [f"self.{name}.{each.gates[k]}" for k, some in enumerate(used) if not some]
        if any(used[k] == {(name, k, True)} for k in each.biased):
            unused.append(f"the bias of self.{name}.T (which bias=False leaves out)")
    return unused


def _with_names(step: Callable[..., Any], traced: Any, *given: Any) -> tuple[Any, dict[Node, str]]:
    """Return the results of a step, and its local names for vectors."""
    returned = step(traced, *given)
    # The frame keeps the step's local variables as long as we hold the frame.
    frame = vars(traced).pop("_frame", None)
    names: dict[Node, str] = {}
    for name, each in frame.f_locals.items() if frame is not None else ():
        if isinstance(each, Node):
            names.setdefault(each, name)
    return returned, names
