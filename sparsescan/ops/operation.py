"""Operations: kernels for both passes, and formulas for all other derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..execution.calls import Calls
from ..execution.recording import Recorder, Space
from ..execution.recurrence import Recorded
from ..execution.threads import thread_count

Array = NDArray[Any]
Shape = tuple[int, ...]
# The shapes of all inputs; None for an input that was not given.
Shapes = Sequence[Shape | None]

# How many ranges of series there are, and work that is worth another thread.
_RANGES, _GRAIN = 8, 1 << 14


class MappedAxis(NamedTuple):
    """The axis of an input along which ``vmap`` concatenates the inputs of all maps.

    Attributes
    ----------
    place : int
        Which axis it is.
    size : int
        Its length for one map that has its own input.
    is_shared : bool
        Whether length 1 may serve all maps.
    """

    place: int
    size: int
    is_shared: bool = False


class Functions(Protocol):
    """The functions of an array library that formulas use.

    Functions of the array API standard have its names; axes are positional.
    """

    concat: Callable[..., Any]
    stack: Callable[..., Any]
    flip: Callable[..., Any]
    moveaxis: Callable[..., Any]
    broadcast_to: Callable[..., Any]
    matmul: Callable[..., Any]
    exp: Callable[..., Any]
    log: Callable[..., Any]
    isnan: Callable[..., Any]
    where: Callable[..., Any]
    amax: Callable[..., Any]
    detach: Callable[..., Any]
    linalg: Any
    sigmoid: Callable[..., Any]

    def filled(self, like: Any, shape: Shape, value: float) -> Any:
        """Return an array of one repeated number, with the dtype and device of another array."""

    def eye(self, like: Any, size: int) -> Any:
        """Return the identity matrix, of the dtype of another array."""

    def contiguous(self, x: Any) -> Any:
        """Return a contiguous array, in libraries that have strides."""

    def constant(self, array: Array) -> Any:
        """Return a NumPy array as an array of the library."""

    def is_complex(self, x: Any) -> bool:
        """Return whether an array has complex numbers."""

    def complex(self, real: Any, imag: Any) -> Any:
        """Return complex numbers from their parts."""

    def adjoint(self, x: Any) -> Any:
        """Return the conjugate if gradients are ``∂L/∂Re + i ∂L/∂Im``, else the array itself."""

    def repeat(self, x: Any, count: int, axis: int) -> Any:
        """Return an array in which each entry along an axis is repeated."""

    def take(self, x: Any, places: Array, axis: int) -> Any:
        """Return the entries at places along an axis."""

    def add_at(self, x: Any, places: Array, values: Any) -> Any:
        """Return an array with values added at places along the last axis."""

    def softplus(self, x: Any) -> Any:
        """Return ``log(1 + exp(x))``."""

    def loop(self, step: Callable[..., Any], begin: Any, rows: Sequence[Any]) -> tuple[Any, Any]:
        """Return the last state and the stacked outputs of ``state, out = step(state, *rows[t])``.

        A row of None stays None at each step.
        """

    def run(self, operation: Operation, form: Any, *given: Any) -> Sequence[Any]:
        """Return the results of an operation, differentiably."""

    def pull(self, function: Callable[..., Any], given: Any, above: Any) -> Sequence[Any]:
        """Return the gradients in all arguments of a function, from those in its results."""


@dataclass(frozen=True, eq=False)
class Operation:
    """A function of arrays with kernels for both passes.

    A form is hashable and describes the inputs, apart from shapes and dtype. `given` are the
    inputs; optional ones may be None. `xp` are the functions of a library.

    Attributes
    ----------
    name : str
        The name, which identifies programs in every process.
    inputs : tuple of str
        The names of the inputs; a question mark ends the name of an optional one.
    encode, decode : callable
        ``encode(form)`` returns a list of integers and a list of tables; ``decode`` returns the
        form.
    shapes : callable
        ``shapes(form, shapes)`` returns the shapes of the results, then of what is kept.
    forward : callable
        ``forward(calls, form, given, keeps)`` writes the results and, if `keeps`, what is kept,
        into memory that it takes from `calls`, in this order.
    backward : callable or None
        ``backward(calls, form, kept, above, given, needs, conjugated=…)`` writes the gradients that
        are needed, from the gradients `above` in the results. By default `plain` is differentiated.
    plain : callable
        ``plain(xp, form, *given)`` returns the results by differentiable functions.
    slope : callable or None
        ``slope(xp, form, kept, given, slopes)`` returns the directional derivative of the results,
        by differentiable functions; slopes of None are zeros. By default `plain` is differentiated.
    again : callable or None
        ``again(xp, form, kept, above, given)`` returns all gradients by differentiable functions;
        the caller sums them over axes that inputs share. By default `plain` is differentiated.
    axes : callable
        ``axes(shapes)`` returns the :class:`MappedAxis` of each input.
    out_axes : tuple of int
        The axis of maps of each result and of what is kept.
    results : int
        How many results there are.
    kept : int
        Which of the returned arrays `backward` gets as `kept`; the number of results if it follows
        them.
    reads : tuple of int
        The inputs that gradients read.
    has_complex : bool
        Whether `backward` takes complex numbers; if not, `again` does.
    check : callable or None
        ``check(form, shapes)`` raises unless kernels accept inputs of these shapes.
    check_values : callable or None
        ``check_values(form, given)`` raises unless kernels accept these numbers.
    on_device : tuple of callable or None
        Both passes for arrays of CuPy: ``forward(form, given)``, and ``backward(form, kept, above,
        given, needs)``.
    """

    name: str
    inputs: tuple[str, ...]
    encode: Callable[[Any], tuple[list[int], list[Array]]]
    decode: Callable[[Sequence[int], Sequence[Array]], Any]
    shapes: Callable[[Any, Shapes], list[Shape]]
    forward: Callable[..., list[Array]]
    backward: Callable[..., list[Array]] | None
    plain: Callable[..., Sequence[Any]]
    axes: Callable[[Shapes], list[MappedAxis]]
    out_axes: tuple[int, ...]
    reads: tuple[int, ...]
    slope: Callable[..., Sequence[Any]] | None = None
    again: Callable[..., Sequence[Any]] | None = None
    results: int = 1
    kept: int = 0
    has_complex: bool = False
    check: Callable[[Any, Shapes], None] | None = None
    check_values: Callable[[Any, Sequence[Array | None]], None] | None = None
    on_device: tuple[Callable[..., list[Any]], Callable[..., list[Any]]] | None = None

    @property
    def key(self) -> str:
        """Return a key for the operation, the same in every process."""
        return self.name


def memory(calls: Calls, shape: Shape, dtype: DTypeLike) -> Array:
    """Return uninitialised memory of a shape."""
    count = math.prod(shape)
    return calls.room(count, dtype)[:count].reshape(shape)


def ranges_of(series: int) -> list[tuple[int, int]]:
    """Return ranges of series: as many for any number of threads, so that sums are the same."""
    count = min(series, _RANGES)
    return list(pairwise([series * k // count for k in range(count + 1)]))


def share_out(calls: Calls, work: int, tasks: Sequence[Callable[[], None]]) -> None:
    """Call functions that launch kernels, on several threads if there is enough work."""
    if len(tasks) > 1 and thread_count() > 1 and work >= _GRAIN:
        calls.together(tasks)
        return
    for task in tasks:
        task()


def is_empty(shapes: Shapes) -> bool:
    """Return whether any input is empty: no kernel runs then."""
    return any(shape is not None and 0 in shape for shape in shapes)


def again(
    operation: Operation, xp: Functions, form: Any, kept: Any, above: Any, given: Any
) -> list[Any]:
    """Return all gradients by differentiable functions; None for inputs that are None."""
    if operation.again is not None:
        found = operation.again(xp, form, kept, above, given)
        pairs = zip(found, given, strict=True)
        return [None if like is None else summed(each, like.shape) for each, like in pairs]
    places = [k for k, each in enumerate(given) if each is not None]

    def results(*arrays: Any) -> Sequence[Any]:
        whole = list(given)
        for k, each in zip(places, arrays, strict=True):
            whole[k] = each
        return operation.plain(xp, form, *whole)

    grads: list[Any] = [None] * len(given)
    pulled = xp.pull(results, [given[k] for k in places], above)
    for k, each in zip(places, pulled, strict=True):
        grads[k] = each
    return grads


def summed(grads: Any, shape: Shape) -> Any:
    """Return gradients summed over the axes along which an input is shared."""
    pairs = zip(grads.shape, shape, strict=True)
    axes = tuple(k for k, (own, shared) in enumerate(pairs) if own != shared)
    return grads.sum(axes, keepdims=True) if axes else grads


# -- Recordings ------------------------------------------------------------------------------------


def record(
    operation: Operation, form: Any, shapes: Shapes, dtype: DTypeLike, keeps: bool
) -> Recorded:
    """Record the forward pass for inputs of some shapes.

    A replay takes these arrays: the memory, the inputs that are given, the results, what is kept.
    """
    recorder, nbytes, given = _recorder(shapes, dtype)
    operation.forward(recorder, form, given, keeps)
    return Recorded(recorder.recording(), nbytes())


def record_gradients(
    operation: Operation,
    form: Any,
    shapes: Shapes,
    dtype: DTypeLike,
    needs: tuple[bool, ...],
    conjugated: bool,
) -> Recorded:
    """Record the backward pass for inputs of some shapes.

    A replay takes these arrays: the memory, what is kept, the gradients in results, the given
    inputs that it reads, and the gradients that are needed.
    """
    assert operation.backward is not None
    results = operation.shapes(form, shapes)
    read = [shape if k in operation.reads else None for k, shape in enumerate(shapes)]
    about = results[operation.kept], *results[: operation.results], *read
    recorder, nbytes, (kept, *others) = _recorder(about, dtype)
    above, given = others[: operation.results], others[operation.results :]
    given = [
        _stand_in(shape, dtype) if array is None and shape is not None else array
        for array, shape in zip(given, shapes, strict=True)
    ]
    operation.backward(recorder, form, kept, above, given, needs, conjugated=conjugated)
    return Recorded(recorder.recording(), nbytes())


def _recorder(
    shapes: Shapes, dtype: DTypeLike
) -> tuple[Recorder, Callable[[], int], list[Array | None]]:
    """Return a recorder, a function for the size of its memory, and placeholders for arrays."""
    space = Space(0)
    recorder = Recorder(space, 1 + sum(shape is not None for shape in shapes))
    arrays: list[Array | None] = []
    number = 0
    for shape in shapes:
        number += shape is not None
        arrays.append(None if shape is None else recorder.array(number, shape, dtype))
    return recorder, lambda: space.nbytes, arrays


def _stand_in(shape: Shape, dtype: DTypeLike) -> Array:
    """Return a placeholder array; only its shape is read."""
    return np.broadcast_to(np.zeros((), dtype), shape)


# -- Maps ------------------------------------------------------------------------------------------


def folded(xp: Functions, count: int, array: Any, dim: int | None, axis: MappedAxis) -> Any:
    """Return the inputs of all maps concatenated along an axis.

    Parameters
    ----------
    xp : Functions
        The functions of a library.
    count : int
        How many maps there are.
    array : array or None
        The input, with an axis of maps `dim`; if that is None, all maps share the input.
    axis : MappedAxis
        The axis along which to concatenate.
    """
    if array is None or (dim is None and axis.is_shared):
        return array
    front = array[None] if dim is None else xp.moveaxis(array, dim, 0)
    shape = [count, *front.shape[1:]]
    shape[1 + axis.place] = axis.size
    whole = xp.moveaxis(xp.broadcast_to(front, tuple(shape)), 0, axis.place)
    lead, rest = whole.shape[: axis.place], whole.shape[axis.place + 2 :]
    return whole.reshape(*lead, count * axis.size, *rest)


def parted(xp: Functions, count: int, array: Any, axis: int) -> Any:
    """Return a result with the maps split off one of its axes, as a new first axis."""
    lead, rest = array.shape[:axis], array.shape[axis + 1 :]
    return xp.moveaxis(array.reshape(*lead, count, array.shape[axis] // count, *rest), axis, 0)
