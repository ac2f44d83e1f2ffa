"""Linear recurrences on the host, ``y_t = A_t y_{t-1} + b_t``, and recordings of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays.addresses import kernel_address
from ..kernels.cpu import complex_recurrence as complex_kernels
from ..kernels.cpu import recurrence as kernels
from ..kernels.cpu.lanes import lanes
from ..kernels.cpu.recurrence import Stack, Steps
from ..kernels.cpu.tables import LANES
from ..symbolic.pattern import Pattern
from .calls import Calls
from .recording import Recording
from .threads import thread_count
from .workspace import KINDS

Array = NDArray[Any]
Shape = tuple[int, ...]

# Multiply-adds that are worth another thread.
_GRAIN = 1 << 17
# Bytes of the matrices of a step that are worth another thread. If each thread skips the smaller
# pieces of the others, two threads are no faster than one.
_PIECE = 1 << 15


class Matrices(NamedTuple):
    """The matrices of all steps, in the order in which they are applied.

    Attributes
    ----------
    pattern : Pattern
        The pattern of each.
    values : ndarray, shape (T, nnz) or (T, batch, nnz)
        Their values; the last axis is contiguous. The first is 1 if all steps share a matrix.
    transposed : bool
        Whether a step applies the transposed matrix.
    steps : int
        How many steps there are.
    conjugated : bool
        Whether a step applies the conjugate matrix.
    """

    pattern: Pattern
    values: Array
    transposed: bool
    steps: int
    conjugated: bool = False

    @property
    def size(self) -> int:
        """Length of a state."""
        return self.pattern.shape[0]

    @property
    def is_one(self) -> bool:
        """Whether there is one matrix, for more steps than one."""
        return len(self.values) == 1 != self.steps

    def adjoint(self, *, conjugated: bool) -> Matrices:
        """Return the matrices for gradients: transposed, from the last step to the first."""
        return self._replace(
            values=self.values[::-1],
            transposed=not self.transposed,
            conjugated=self.conjugated != conjugated,
        )

    def part(self, begin: int | None, end: int | None) -> Matrices:
        """Return some steps."""
        values = self.values if self.is_one else self.values[begin:end]
        return self._replace(values=values, steps=len(range(self.steps)[begin:end]))


# -- Sweeps ----------------------------------------------------------------------------------------


def write_states(
    calls: Calls, matrices: Matrices, offsets: Array | None, start: Array, out: Array
) -> None:
    """Write the states of all steps and samples, which threads share.

    Parameters
    ----------
    calls : Calls
        What launches the kernels.
    matrices : Matrices
        The matrices ``A_1, …, A_T``.
    offsets : ndarray, shape (T, size) or (T, batch, size), or None
        The terms ``b_1, …, b_T``.
    start : ndarray, shape (size,) or (batch, size)
        The state ``y_0``.
    out : ndarray, shape (T, size) or (T, batch, size)
        The states ``y_1, …, y_T``. The last axis of each of these is contiguous.
    """
    if out.size == 0:
        return
    samples = out.shape[1] if out.ndim == 3 else 1
    steps = _steps(matrices, offsets, start, out)
    work = matrices.steps * samples * matrices.pattern.nnz
    threads = max(1, min(thread_count(), work // _GRAIN))
    module: Any = kernels
    signs: tuple[Array, ...] = ()
    if out.dtype.kind == "c":
        module, signs = complex_kernels, (_signs(out.dtype, conjugated=matrices.conjugated),)
    if matrices.pattern.kind == "diagonal":
        steps, samples = _flattened(steps, samples)
        kernel = partial(calls.launch, module.sweep_columns, steps, *signs, samples)
        _share(calls, kernel, steps.size, threads, 16)
    elif signs:
        _share(calls, partial(calls.launch, module.sweep, steps, *signs), samples, threads, 1)
    elif matrices.values.ndim == 2 and samples > 1:

        def sweep_part(first: int, last: int) -> None:
            room = calls.borrow(2 * LANES * matrices.size, out.dtype)
            calls.launch(kernels.sweep_shared, steps, first, last, room)
            calls.give_back(room)

        _share(calls, sweep_part, samples, threads, LANES)
    else:
        own = matrices.values[0].nbytes
        threads = min(threads, own // _PIECE)
        _share(calls, partial(calls.launch, kernels.sweep, steps), samples, threads, 1)


def write_outer_products(
    calls: Calls,
    matrices: Matrices,
    grads: Array,
    states: Array,
    start: Array,
    out: Array,
    *,
    conjugated: bool,
) -> None:
    """Write the gradients in the matrices: the entries of outer products in the pattern.

    Parameters
    ----------
    calls : Calls
        What launches the kernels.
    matrices : Matrices
        The matrices ``A_1, …, A_T``.
    grads, states : ndarray, shape (T, size) or (T, batch, size)
        The gradients in the states, including all later steps, and the states.
    start : ndarray, shape (size,) or (batch, size)
        The state ``y_0``.
    out : ndarray, shape (T, nnz) or (T, batch, nnz)
        The result, in the form of the values, summed over samples and steps that share the
        matrices.
    conjugated : bool
        Whether products are with the conjugates of the states.
    """
    samples = grads.shape[1] if grads.ndim == 3 else 1
    if out.size == 0 or samples == 0:
        return
    steps = _steps(matrices, None, start, states)
    work = grads.size // max(matrices.size, 1) * matrices.pattern.nnz
    threads = max(1, min(thread_count(), work // _GRAIN))
    arguments: tuple[Any, ...] = steps, _stack(grads), _stack(out), samples
    module: Any = kernels
    if grads.dtype.kind == "c":
        module = complex_kernels
        arguments = steps, _signs(grads.dtype, conjugated=conjugated), *arguments[1:]
    if matrices.is_one:
        kernel = partial(calls.launch, module.outer_sums, *arguments)
        _share(calls, kernel, matrices.size, threads, 1)
    else:
        kernel = partial(calls.launch, module.outer_products, *arguments)
        _share(calls, kernel, matrices.steps, threads, 1)


def _signs(dtype: np.dtype[Any], *, conjugated: bool) -> Array:
    """Return the vector by which kernels multiply imaginary parts."""
    real = np.dtype(np.float32 if dtype.itemsize == 8 else np.float64)
    return np.full(lanes(real), -1 if conjugated else 1, real)


def _steps(matrices: Matrices, offsets: Array | None, start: Array, out: Array) -> Steps:
    """Return the arguments of the kernels."""
    pattern = matrices.pattern
    is_csr = pattern.kind == "general"
    # Read-only as a pattern's: no other kernels are compiled for it.
    none = np.empty(0, np.int32)
    none.flags.writeable = False
    values = _stack(matrices.values)
    return Steps(
        count=matrices.steps,
        size=matrices.size,
        nnz=pattern.nnz,
        kind=KINDS[pattern.kind],
        transposed=int(matrices.transposed),
        indptr=pattern.indptr if is_csr else none,
        indices=pattern.indices if is_csr else none,
        values=values._replace(step=0) if matrices.is_one else values,
        offsets=Stack(0, 0, 0) if offsets is None else _stack(offsets),
        states=_stack(out),
        start=_stack(start[None]),
        like=np.empty(0, out.dtype),
    )


def _stack(array: Array) -> Stack:
    step, *rest = array.strides[:-1]
    return Stack(kernel_address(array, array.ndim - 1), step, rest[0] if rest else 0)


def _flattened(steps: Steps, samples: int) -> tuple[Steps, int]:
    """Return the arrays with all samples joined into one, if they are contiguous."""
    row = steps.size * steps.like.itemsize
    stacks = [steps.values, steps.states, steps.start]
    stacks += [steps.offsets] if steps.offsets.at else []
    if samples == 1 or any(stack.sample != row for stack in stacks):
        return steps, samples
    size = steps.size * samples
    return steps._replace(size=size, nnz=size), 1


def _share(
    calls: Calls, call: Callable[[int, int], None], count: int, threads: int, least: int
) -> None:
    """Divide `count` items among threads, in ranges of multiples of `least`."""
    parts = max(1, min(threads, count // least))
    ends = [count * k // parts // least * least for k in range(parts)] + [count]
    calls.together([partial(call, ends[k], ends[k + 1]) for k in range(parts)])


# -- Recordings ------------------------------------------------------------------------------------


class Recorded(NamedTuple):
    """A recording, and the memory that it works in.

    Attributes
    ----------
    recording : Recording
        The kernel calls.
    nbytes : int
        Bytes of the memory, the first array of a replay.
    """

    recording: Recording
    nbytes: int
