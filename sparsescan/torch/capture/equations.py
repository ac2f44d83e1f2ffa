"""Equations of PyTorch: calls of its operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...capture.equations import Equation, NotCaptured, Value
from ...graph.operations import Node
from .operators import CUSTOM, OPENED

_DTYPES = {
    getattr(torch, name): np.dtype(name)
    for name in ("bool", "float32", "float64", "int32", "int64", "uint8", "int8", "int16")
}


class Kind(NamedTuple):
    """The shape and the dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def str_short(self) -> str:
        """Return both as a text."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def kind_of(tensor: Any) -> Kind:
    """Return the kind of a tensor."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise NotCaptured(f"a tensor of {tensor.dtype} on {tensor.device}, {tensor.layout}")
    return Kind(tuple(tensor.shape), dtype)


class Slot(NamedTuple):
    """The place of an input among arguments."""

    place: int


class Called(Equation):
    """A call of an operator of PyTorch.

    Attributes
    ----------
    call : callable
        The operator.
    arguments : tuple
        Its arguments and those by name, with a :class:`Slot` in place of inputs.
    """

    __slots__ = ("_opened", "arguments", "call", "where")

    def __init__(
        self,
        call: Callable[..., Any],
        arguments: tuple[Any, dict[str, Any]],
        name: str,
        inputs: Sequence[Value],
        kinds: Sequence[Kind],
        options: dict[str, Any] | None = None,
    ) -> None:
        self.call, self.arguments, self.where = call, arguments, ""
        self._opened: list[Value] | None = None
        super().__init__(name, inputs, options or {}, kinds)

    def line(self) -> str:
        """Return the line of the caller's text where the operator was called."""
        return self.where

    def compute(self, given: Sequence[Any]) -> list[Any]:
        """Return the results for some tensors."""
        args, kwargs = _filled(self.arguments, given)
        found = self.call(*args, **kwargs)
        return list(found) if isinstance(found, (tuple, list)) else [found]

    def folded(self, given: Sequence[Any]) -> float:
        """Return the result for some numbers."""
        return float(self.compute([torch.from_numpy(np.asarray(each)) for each in given])[0])

    def derived(self, name: str, inputs: Sequence[Value], **options: Any) -> Value:
        """Return the result of another operation, in place of this one."""
        return EquationMaker(self)(name, *inputs, **options)

    def again(self, inputs: Sequence[Value]) -> Value:
        """Return the result of the same operation of other arguments."""
        args, kwargs = _filled(self.arguments, [*map(_meta, inputs)])
        kinds = [_kind(self.call(*args, **kwargs))]
        made = Called(self.call, self.arguments, self.name, inputs, kinds, self.options)
        made.where = self.where
        return made.outputs[0]

    def opened(self) -> list[Value] | None:
        """Return results by other operations that compute the same, if there are any."""
        rule = OPENED.get(self.name)
        if rule is None:
            return None
        if self._opened is None:
            args, kwargs = _filled(self.arguments, self.inputs)
            found = rule(EquationMaker(self), *args, **kwargs)
            self._opened = list(found) if isinstance(found, (tuple, list)) else [found]
        return self._opened

    def custom(self) -> Callable[..., Node] | None:
        """Return a function with derivatives of its own, as an operation of one number a unit."""
        rule = CUSTOM.get(self.name)
        if rule is None:
            return None

        def call(*given: Node) -> Node:
            args, kwargs = _filled(self.arguments, given)
            found: Node = rule(*args, **kwargs)
            return found

        return call


def _filled(tree: Any, given: Sequence[Any]) -> Any:
    if isinstance(tree, Slot):
        return given[tree.place]
    if isinstance(tree, (tuple, list)):
        return type(tree)([_filled(each, given) for each in tree])
    if isinstance(tree, dict):
        return {name: _filled(each, given) for name, each in tree.items()}
    return tree


# -- Operations that others are read as, by their names and options in JAX ------------------------


class EquationMaker:
    """Makes equations in place of another one."""

    def __init__(self, reader: Called) -> None:
        self.reader = reader

    def __call__(self, name: str, *inputs: Value, **options: Any) -> Value:
        """Return the result of an operation."""
        if name == "slice" and "axis" in options:
            axis, shape = options["axis"], inputs[0].shape
            starts, ends = [0] * len(shape), list(shape)
            starts[axis], ends[axis] = options["start_index"], options["limit_index"]
            options = {"start_indices": starts, "limit_indices": ends, "strides": None}
        if name == "reshape":
            options.setdefault("dimensions", None)
        call = _CALLS[name]
        shapes = [*map(_meta, inputs)]
        about = tuple(Slot(k) for k in range(len(inputs)))
        made = Called(
            *(call, (about, options), name, inputs, [_kind(call(*shapes, **options))], options)
        )
        made.where = self.reader.where
        return made.outputs[0]

    def number(self, number: float, like: Value) -> Value:
        """Return a number."""
        return Value(Kind((), like.aval.dtype), constant=number)

    def spread(self, value: Value, shape: Sequence[int]) -> Value:
        """Return a value that is broadcast to a shape, behind new axes."""
        if value.shape == tuple(shape):
            return value
        axes = tuple(range(len(shape) - len(value.shape), len(shape)))
        return self("broadcast_in_dim", value, shape=tuple(shape), broadcast_dimensions=axes)

    def both(self, name: str, a: Value, b: Value) -> Value:
        """Return an operation of two values, which are broadcast."""
        shape = np.broadcast_shapes(a.shape, b.shape)
        return self(
            name, *(each if not each.shape else self.spread(each, shape) for each in (a, b))
        )

    def linear(self, x: Value, weight: Value, bias: Value | None = None) -> Value:
        """Return ``x @ weight.T + bias``."""
        numbers = ((len(x.shape) - 1,), (1,)), ((), ())
        product = self("dot_general", x, weight, dimension_numbers=numbers)
        return product if bias is None else self.both("add", product, bias)

    def cut(self, value: Value, axis: int, begin: int, end: int) -> Value:
        """Return a slice."""
        return self("slice", value, start_index=begin, limit_index=end, axis=axis)

    def parts(self, value: Value, sizes: Sequence[int], axis: int) -> list[Value]:
        """Return slices one after the other."""
        ends = np.cumsum(sizes).tolist()
        return [
            self.cut(value, axis, end - size, end) for size, end in zip(sizes, ends, strict=True)
        ]


def _meta(value: Value) -> Tensor:
    """Return a tensor without numbers."""
    return torch.empty(value.shape, dtype=torch_dtype(value.aval.dtype), device="meta")


def _kind(tensor: Tensor) -> Kind:
    return Kind(tuple(tensor.shape), _DTYPES[tensor.dtype])


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return a dtype of PyTorch for one of NumPy."""
    found: torch.dtype = getattr(torch, np.dtype(dtype).name)
    return found


def _dot(a: Tensor, b: Tensor, dimension_numbers: Any) -> Tensor:
    (in_a, in_b), _ = dimension_numbers
    product: Tensor = torch.tensordot(a, b, dims=(list(in_a), list(in_b)))
    return product


def _broadcast(x: Tensor, shape: Any, broadcast_dimensions: Any) -> Tensor:
    whole = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        whole[axis] = size
    return x.reshape(whole).expand(shape)


def _slice(x: Tensor, start_indices: Any, limit_indices: Any, strides: Any) -> Tensor:
    part: Tensor = x[tuple(map(slice, start_indices, limit_indices))]
    return part


_CALLS: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "exp": torch.exp,
    "log": torch.log,
    "tanh": torch.tanh,
    "logistic": torch.sigmoid,
    "rsqrt": torch.rsqrt,
    "square": torch.square,
    "aten.relu": torch.relu,
    "stop_gradient": torch.detach,
    "dot_general": _dot,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda x, new_sizes, dimensions: x.reshape(new_sizes),
    "transpose": lambda x, permutation: x.permute(permutation),
    "expand_dims": lambda x, dimensions: x.unsqueeze(*dimensions),
    "squeeze": lambda x, dimensions: x.squeeze(dimensions),
    "slice": _slice,
    "concatenate": lambda *given, dimension: torch.cat(given, dimension),
    "reduce_sum": lambda x, axes: x.sum(axes) if axes else x,
    "reduce_max": lambda x, axes: x.amax(axes),
}


# Makes equations that are in place of none.
MAKER = EquationMaker(Called(torch.reshape, ((), {}), "", [], []))
