"""Cells as autograd sees them: the step of a class, called on tensors of PyTorch.

Nothing of the tracing is used. The functions of a class, and what they call in their modules, are
made again with stand-ins for what :mod:`sparsescan.recurrent` has; these compute in float64.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sparsescan.graph import functions
from sparsescan.recurrent import definition

# Small arrays; and its threads would wait for each other wherever something else runs.
torch.set_num_threads(1)

Array = Any


class Value:
    """A tensor, with the operators of a step, whose comparisons are numbers."""

    # The least distance from a point where a function or a derivative jumps, of all so far.
    nearest = math.inf
    # How many units a vector has, which a number does not tell.
    units = 1

    def __init__(self, tensor: Any) -> None:
        self.tensor = torch.as_tensor(tensor, dtype=torch.float64)

    def __add__(self, other: Any) -> Value:
        return Value(self.tensor + tensor_of(other))

    def __sub__(self, other: Any) -> Value:
        return Value(self.tensor - tensor_of(other))

    def __rsub__(self, other: Any) -> Value:
        return Value(tensor_of(other) - self.tensor)

    def __mul__(self, other: Any) -> Value:
        return Value(self.tensor * tensor_of(other))

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: Any) -> Value:
        return Value(self.tensor / tensor_of(other))

    def __rtruediv__(self, other: Any) -> Value:
        return Value(tensor_of(other) / self.tensor)

    def __pow__(self, exponent: float) -> Value:
        return Value(self.tensor**exponent)

    def __neg__(self) -> Value:
        return Value(-self.tensor)

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return _FUNCTIONS["absolute"](self)

    def sum(self, heads: int = 1) -> Value:
        return _FUNCTIONS["sum"](self, heads=heads)

    def mean(self, heads: int = 1) -> Value:
        return _FUNCTIONS["mean"](self, heads=heads)

    def max(self, heads: int = 1) -> Value:
        return _FUNCTIONS["max"](self, heads=heads)

    def __array_function__(self, function: Any, _: Any, given: Any, options: Any) -> Any:
        if function is np.split:
            return [*map(Value, tensor_of(given[0]).chunk(given[1], -1))]
        if function is np.concatenate:
            return Value(_joined([*map(tensor_of, given[0])]))
        return _FUNCTIONS[function.__name__](*given, **options)

    def __lt__(self, other: Any) -> Value:
        _note(self, other)
        return Value(self.tensor < tensor_of(other))

    def __le__(self, other: Any) -> Value:
        _note(self, other)
        return Value(self.tensor <= tensor_of(other))

    def __gt__(self, other: Any) -> Value:
        return Value(other) < self if not isinstance(other, Value) else other < self

    def __ge__(self, other: Any) -> Value:
        return Value(other) <= self if not isinstance(other, Value) else other <= self


def tensor_of(given: Any) -> torch.Tensor:
    """Return the tensor of a value, or of a number."""
    return given.tensor if isinstance(given, Value) else torch.tensor(given, dtype=torch.float64)


def _joined(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return vectors one after the other, of which some may be the same for all samples."""
    units = torch.zeros(Value.units, dtype=torch.float64)
    lead = torch.broadcast_shapes(*(each.shape[:-1] for each in vectors))
    whole = [each if each.ndim and each.shape[-1] > 1 else each + units for each in vectors]
    return torch.cat([each.expand(*lead, each.shape[-1]) for each in whole], -1)


def _note(a: Any, *jumps: Any) -> None:
    """Note how near a value is to where something jumps."""
    for each in jumps:
        distance = (tensor_of(a) - tensor_of(each)).detach().abs()
        Value.nearest = min([Value.nearest, *distance.flatten().tolist()])


def _smooth(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Value]:
    return lambda a: Value(function(tensor_of(a)))


def _jumping(function: Callable[..., torch.Tensor], *jumps: float) -> Callable[..., Value]:
    def call(a: Any, *about: float) -> Value:
        _note(a, *jumps)
        return Value(function(tensor_of(a), *about))

    return call


def _binary(function: Callable[..., torch.Tensor]) -> Callable[[Any, Any], Value]:
    def call(a: Any, b: Any) -> Value:
        _note(a, b)
        return Value(function(tensor_of(a), tensor_of(b)))

    return call


def _arctan2(a: Any, b: Any) -> Value:
    _note(a, 0)
    return Value(torch.atan2(tensor_of(a), tensor_of(b)))


def _leaky_relu(a: Any, slope: float = 0.01) -> Value:
    _note(a, 0)
    return Value(torch.nn.functional.leaky_relu(tensor_of(a), slope))


def _elu(a: Any, alpha: float = 1.0) -> Value:
    _note(a, 0)
    return Value(torch.nn.functional.elu(tensor_of(a), alpha))


def _hardtanh(a: Any, low: float = -1.0, high: float = 1.0) -> Value:
    _note(a, low, high)
    return Value(torch.nn.functional.hardtanh(tensor_of(a), low, high))


def _where(condition: Any, a: Any, b: Any) -> Value:
    chosen = tensor_of(condition) != 0
    return Value(torch.where(chosen, tensor_of(a), tensor_of(b)))


def _surrogate(forward: Callable[..., Any], derivative: Callable[..., Any]) -> Callable[..., Value]:
    def call(a: Any) -> Value:
        given = tensor_of(a)
        value, slope = tensor_of(forward(a)).detach(), tensor_of(derivative(a)).detach()
        return Value(value + slope * (given - given.detach()))

    return call


def _over_units(function: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    """Return a function of the units of each head, which are a last axis."""

    def call(a: Any, *others: Any, heads: int = 1, **options: float) -> Value:
        given = [*map(tensor_of, (a, *others))]
        units = max([Value.units, *(each.shape[-1] for each in given if each.ndim)])
        tensors = torch.broadcast_tensors(*given, torch.zeros(units))
        result = function(*(each.unflatten(-1, (heads, -1)) for each in tensors[:-1]), **options)
        return Value(result.expand(*result.shape[:-1], units // heads).flatten(-2))

    return call


def _amax(a: torch.Tensor) -> torch.Tensor:
    """Return the largest, and note how near another one is that is not as large."""
    largest = a.amax(-1, keepdim=True)
    _note(0, Value((largest - a).where(largest != a, math.inf)))
    return largest


def _layer_norm(a: Any, weight: Any = 1, bias: Any = 0, *, eps: float = 1e-5) -> torch.Tensor:
    return torch.nn.functional.layer_norm(a, a.shape[-1:], eps=eps) * weight + bias


def _rms_norm(a: Any, weight: Any = 1, *, eps: float = 1e-5) -> torch.Tensor:
    return torch.nn.functional.rms_norm(a, a.shape[-1:], eps=eps) * weight


_SMOOTH = "tanh", "sigmoid", "exp", "expm1", "log", "log1p", "sqrt", "sin", "cos"
_FUNCTIONS: dict[str, Callable[..., Value]] = {
    **{name: _smooth(getattr(torch, name)) for name in _SMOOTH},
    "silu": _smooth(torch.nn.functional.silu),
    "softplus": _smooth(lambda a: torch.logaddexp(a, torch.zeros_like(a))),
    "softsign": _smooth(torch.nn.functional.softsign),
    "identity": _smooth(lambda a: a),
    "stop_gradient": _smooth(torch.Tensor.detach),
    "absolute": _jumping(torch.abs, 0),
    "relu": _jumping(torch.relu, 0),
    "hardsigmoid": _jumping(lambda a: torch.clamp(a / 6 + 0.5, 0, 1), -3, 3),
    "minimum": _binary(torch.minimum),
    "maximum": _binary(torch.maximum),
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "hardtanh": _hardtanh,
    "where": _where,
    "arctan2": _arctan2,
    "sum": _over_units(lambda a: a.sum(-1, keepdim=True)),
    "mean": _over_units(lambda a: a.mean(-1, keepdim=True)),
    "max": _over_units(_amax),
    "norm": _over_units(lambda a: torch.linalg.vector_norm(a, dim=-1, keepdim=True)),
    "softmax": _over_units(lambda a: a.softmax(-1)),
    "logsumexp": _over_units(lambda a: a.logsumexp(-1, keepdim=True)),
    "layer_norm": _over_units(_layer_norm),
    "rms_norm": _over_units(_rms_norm),
}
_STAND_INS: dict[Any, Any] = {
    getattr(functions, name): function
    for name, function in _FUNCTIONS.items()
    if hasattr(functions, name)
} | {functions.surrogate: _surrogate}


def _made_again(given: Any, memo: dict[Any, Any]) -> Any:
    """Return a function whose calls of :mod:`sparsescan.recurrent` are calls of stand-ins."""
    if isinstance(given, functions.Surrogate):
        return _surrogate(*(_made_again(each, memo) for each in given))
    if not isinstance(given, types.FunctionType):
        return given
    if given in _STAND_INS:
        return _STAND_INS[given]
    if given in memo:
        return memo[given]
    inner: dict[str, Any] = {}
    made = memo[given] = types.FunctionType(
        given.__code__,
        inner,
        given.__name__,
        given.__defaults__,
        given.__closure__
        and tuple(
            types.CellType(_made_again(each.cell_contents, memo)) for each in given.__closure__
        ),
    )
    made.__kwdefaults__ = given.__kwdefaults__
    inner.update(given.__globals__)
    inner.update({name: _made_again(each, memo) for name, each in given.__globals__.items()})
    return made


class _Chosen(str):
    """A name of what was chosen, which is called where it is that of a function."""

    def __call__(self, *vectors: Any) -> Value:
        return _FUNCTIONS[self](*vectors)


class _Self:
    """What a step gets for its cell."""

    def __init__(self, cls: type, options: Mapping[str, Any], tensors: dict[str, Any]) -> None:
        self._cls, self._options, self._tensors = cls, options, tensors
        self._memo: dict[Any, Any] = {}
        self.t = 0

    @property
    def __class__(self) -> type:
        return self._cls

    def __getattr__(self, name: str) -> Any:
        found = inspect.getattr_static(self._cls, name)
        if isinstance(found, (definition.Input, definition.Hidden)):
            heads = getattr(found, "_sizes", {}).get("heads", 1)
            if isinstance(heads, definition.Constant):
                heads = self._options.get(heads.name, heads.default)
            return _Matrix(self._tensors, name, found, heads)
        if isinstance(found, definition.Given):
            further = self._tensors[name][self.t]
            has_none = isinstance(found, (definition.Mask, definition.StepNumber))
            return Value(further.detach() if has_none else further)
        if isinstance(found, definition.Scalar):
            return Value(self._tensors[name])
        if isinstance(found, definition.Vector):
            # A bias that a cell was made without is 0.
            tensor = self._tensors.get(name)
            if not found.gates:
                return Value(0 if tensor is None else tensor)
            blocks = [0] * len(found.gates) if tensor is None else tensor.chunk(len(found.gates))
            whole = Value(0 if tensor is None else tensor)
            vars(whole).update(zip(found.gates, map(Value, blocks), strict=True))
            return whole
        if isinstance(found, definition.Constant):
            return self._options.get(name, found.default)
        if isinstance(found, definition.Choice):
            return _Chosen(self._options.get(name, found.default))
        if isinstance(found, staticmethod):
            return _made_again(found.__func__, self._memo)
        if isinstance(found, property):
            return _made_again(found.fget, self._memo)(self)
        if isinstance(found, types.FunctionType):
            return types.MethodType(_made_again(found, self._memo), self)
        return _made_again(found, self._memo)


class _Matrix:
    """A matrix of a step: it, or each of its gates, is called with a vector."""

    def __init__(self, tensors: dict[str, Any], name: str, declared: Any, heads: int) -> None:
        gates = declared.gates or ("",)
        blocks = tensors[name].chunk(len(gates))
        if heads > 1:
            blocks = [torch.block_diag(*each.chunk(heads)) for each in blocks]
        elif isinstance(declared, definition.Hidden):
            ends = [(Value.units - each.shape[1], Value.units - len(each)) for each in blocks]
            pad = torch.nn.functional.pad
            blocks = [pad(each, (0, a, 0, b)) for each, (a, b) in zip(blocks, ends, strict=True)]
        bias = tensors.get(definition.bias_name(name)) if declared.biased else None
        blocks_of_bias = () if bias is None else bias.chunk(len(declared.biased))
        biases = dict(zip(declared.biased, blocks_of_bias, strict=False))
        self._products = {
            gate: _product(block, biases.get(k))
            for k, (gate, block) in enumerate(zip(gates, blocks, strict=True))
        }
        if len(gates) == 1:
            self._products["T"] = _product(blocks[0].T, None)

    def __getattr__(self, gate: str) -> Any:
        return self._products[gate]

    def __call__(self, vector: Any) -> Value:
        products = [each for gate, each in self._products.items() if gate != "T"]
        return Value(_joined([each(vector).tensor for each in products]))


def _product(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[Any], Value]:
    def call(vector: Any) -> Value:
        given = tensor_of(vector)
        given = given if given.ndim else given.expand(weight.shape[1])
        return Value(torch.nn.functional.linear(given, weight, bias))

    return call


class Runs(NamedTuple):
    """What a cell computes over a sequence, and the gradients of a loss.

    Attributes
    ----------
    outputs : list of ndarray
        All states after each step, ``(T, batch, hidden_size)`` each.
    input_grad : ndarray
        Gradient of the inputs.
    state_grads : list of ndarray
        Gradients of the states before the first step.
    param_grads : dict of str to ndarray
        Gradients of the parameters.
    nearest : float
        The least distance from a point where a function or a derivative jumps.
    """

    outputs: list[Array]
    input_grad: Array
    state_grads: list[Array]
    param_grads: dict[str, Array]
    nearest: float


class Reference:
    """A class of cells, with its options.

    Parameters
    ----------
    cls : type
        The class.
    options : mapping, optional
        Options that a cell is made with.
    """

    def __init__(self, cls: type, options: Mapping[str, Any] | None = None) -> None:
        self.cls, self.options = cls, dict(options or {})

    def run(
        self,
        params: Mapping[str, Array],
        x: Array,
        states: Sequence[Array],
        cotangents: Sequence[Array],
        masks: Mapping[str, Array] | None = None,
        lengths: Array = None,
    ) -> Runs:
        """Run the step over a sequence, and differentiate by autograd.

        Parameters
        ----------
        params : mapping of str to ndarray
            Parameters by name.
        x : ndarray, shape (T, batch, input_size)
            The inputs, with further inputs behind them.
        states : sequence of ndarray
            The states before the first step, ``(batch, hidden_size)`` each.
        cotangents : sequence of ndarray
            Gradients of the loss in what each state is after each step, without those of later
            steps: ``(T, batch, hidden_size)`` each.
        masks : mapping of str to ndarray, optional
            Which weights are not pruned, by the name of a matrix.
        lengths : ndarray of int, shape (batch,), optional
            How many steps each sample has; its states stay as they are after these.
        """
        leaves = {name: torch.tensor(each, requires_grad=True) for name, each in params.items()}
        tensors = leaves | {
            name: leaves[name] * torch.tensor(mask) for name, mask in (masks or {}).items()
        }
        given = torch.tensor(x, requires_grad=True)
        begin = [torch.tensor(each, requires_grad=True) for each in states]
        Value.nearest = math.inf
        outputs = self.unroll(tensors, given, begin, lengths)
        pairs = zip(outputs, cotangents, strict=True)
        loss = sum((each * torch.tensor(cotangent)).sum() for each, cotangent in pairs)
        grads = grads_of(loss, [given, *begin, *leaves.values()])
        return Runs(
            [each.detach().numpy() for each in outputs],
            grads[0],
            grads[1 : 1 + len(states)],
            dict(zip(leaves, grads[1 + len(states) :], strict=True)),
            Value.nearest,
        )

    def unroll(
        self, tensors: Mapping[str, Any], x: Any, states: Sequence[Any], lengths: Array = None
    ) -> list[Any]:
        """Return all states after each step, tensors of tensors; arguments are as for `run`.

        Further inputs, of all steps, are behind the inputs, or among the tensors by their names.
        """
        names, units = list(definition.further_of(self.cls)), states[0].shape[-1]
        if names and names[0] not in tensors:
            size = x.shape[-1] - len(names) * units
            further = dict(zip(names, x[..., size:].split(units, -1), strict=True))
            tensors, x = {**tensors, **further}, x[..., :size]
        cell = _Self(self.cls, self.options, dict(tensors))
        Value.units = states[0].shape[-1]
        now = [Value(each) for each in states]
        every: list[list[Any]] = [[] for _ in states]
        for t, each in enumerate(x):
            cell.t = t
            returned = cell.step(Value(each), *now)
            new = returned if isinstance(returned, tuple) else (returned,)
            after = [tensor_of(one).expand(states[0].shape) for one in new]
            if lengths is not None:
                is_there = torch.tensor(t < lengths)[:, None]
                pairs = zip(after, now, strict=True)
                after = [torch.where(is_there, one, old.tensor) for one, old in pairs]
            now = [Value(one) for one in after]
            for k, one in enumerate(after):
                every[k].append(one)
        return [torch.stack(each) for each in every]


def grads_of(loss: Any, sources: Sequence[Any]) -> list[Array]:
    """Return the gradients of a loss in some tensors, zeros where it does not depend on them."""
    grads = [torch.zeros_like(each) for each in sources]
    if loss.requires_grad:
        found = torch.autograd.grad(loss, sources, allow_unused=True)
        grads = [zero if g is None else g for zero, g in zip(grads, found, strict=True)]
    return [each.numpy() for each in grads]


def unroll_layers(
    layers: Sequence[Sequence[tuple[Reference, Mapping[str, Any]]]],
    x: Any,
    states: Sequence[Sequence[Any]],
    lengths: Array,
) -> tuple[Any, list[Any]]:
    """Return the outputs of a network, and the last states of each cell, as PyTorch orders them.

    Layers have a cell, with its tensors by name, for each direction; `states` are those of each
    cell before its first step.
    """
    steps, batch = x.shape[:2]
    t = torch.arange(steps)[:, None]
    to = torch.tensor(lengths)
    # In the order of the direction that begins with the last step of a sample.
    turned = torch.where(t < to, to - 1 - t, t)
    samples = torch.arange(batch)
    firsts, lasts = iter(states), []
    for cells in layers:
        outputs = []
        for back, (reference, tensors) in enumerate(cells):
            given = x[turned, samples] if back else x
            every = reference.unroll(tensors, given, next(firsts), lengths)
            lasts.append(torch.cat([each[-1] for each in every], -1))
            output = torch.where((t < to)[..., None], every[0], torch.zeros(()).double())
            outputs.append(output[turned, samples] if back else output)
        x = torch.cat(outputs, -1)
    return x, lasts
