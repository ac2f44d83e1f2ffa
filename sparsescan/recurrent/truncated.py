"""The memory of a training step with truncated gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays.arrays import check_memory
from .definition import CellLike
from .memory import beside, has_reset_states
from .passes import RecordedMemory

Array = NDArray[Any]

# Samples of all windows that are computed at once, and numbers that are kept for them: more would
# not fill lanes or threads better.
_SAMPLES, _NUMBERS = 1024, 1 << 26


def windows_at_once(cells: Iterable[CellLike], windows: int, steps: int, batch: int) -> int:
    """Return how many of `count` windows of `steps` are computed at once if memory allows.

    Neither this number nor results depend on the number of threads.
    """
    numbers = steps * sum(
        one.input_size + (len(one.program.slots) + one.program.states) * one.hidden_size
        for one in cells
    )
    most = min(_SAMPLES, _NUMBERS // max(1, numbers)) // max(1, batch)
    return max(1, min(windows, most))


class TruncatedMemory:
    """The memory of a training step on the host, for inputs of one shape.

    The forward pass keeps the inputs and the states before each segment. The backward pass
    recomputes windows of two segments, each from the kept states before it. Gradients of losses in
    a window's second segment flow through both segments. Windows are independent, so they become
    samples of one batch, as many at once as memory allows.

    Parameters
    ----------
    make : callable
        Returns memory for a number of steps and samples, with the gates of a number of steps.
    steps, batch : int
        The shape of the inputs.
    truncate : int
        Steps of a segment; there are more than two segments.
    segments : sequence of int
        Numbers of steps of a window whose gates may be kept, the largest first.
    limit : int or None
        The limit of bytes.

    Attributes
    ----------
    steps, batch, widths, dtype, nbytes, device
        As for a :class:`~sparsescan.recurrent.memory.Memory`.
    """

    device: int | None = None

    def __init__(
        self,
        make: Callable[[int, int, int], RecordedMemory],
        steps: int,
        batch: int,
        truncate: int,
        segments: Sequence[int],
        limit: int | None,
    ) -> None:
        self.steps, self.batch, self._length = steps, batch, truncate
        self._count = -(-steps // truncate)
        self._forward = make(truncate, batch, 0)
        self.widths, self.dtype = self._forward.widths, self._forward.dtype
        one = self._forward.directions[0]
        self._state = len(self._forward.directions), batch, one.states * one.units
        windows, cells = self._count - 1, [each.cell for each in self._forward.directions]
        most = windows_at_once(cells, windows, 2 * truncate, batch)
        for segment in [segments[0]] * (most.bit_length() - 1) + list(segments):
            # All calls have one size; segments after the last have no steps.
            self._calls = -(-windows // most)
            self._size = -(-windows // self._calls)
            self._windows = make(2 * truncate, self._size * batch, segment)
            self.nbytes = self._bytes()
            if limit is None or self.nbytes <= limit:
                break
            most = max(1, most // 2)

    def _bytes(self) -> int:
        """Return the size, including the arrays that windows take and return."""
        inputs, outputs = self.widths[0], self.widths[-1]
        state, step = math.prod(self._state), self._length * self.batch
        ahead = (self._calls * self._size + 1) * (step * inputs + state)
        behind = self._size * (4 * step * (inputs + outputs) + 4 * state)
        own = self.dtype.itemsize * (ahead + behind)
        return own + self._forward.nbytes + self._windows.nbytes

    @property
    def keeps_gates(self) -> bool:
        """Whether the gates of all steps of a window are kept."""
        return self._windows.keeps_gates

    def fits(self, x: Array, has_resets: bool) -> bool:
        """Return whether this is the memory for inputs like `x`, with or without resets."""
        return len(x) == self.steps and self._forward.fits(x[: self._length], has_resets)

    def allocate(self) -> None:
        """Take the memory."""
        check_memory(f"{self.steps} steps of {self.batch} samples", self.nbytes)
        segments = self._calls * self._size + 1
        self._x = np.zeros((segments, self._length, self.batch, self.widths[0]), self.dtype)
        self._starts = np.zeros((segments, *self._state), self.dtype)

    def here(self) -> AbstractContextManager[None]:
        """Return a context for work on this memory."""
        return self._forward.here()

    def forward(
        self,
        params: list[list[Array]],
        x: Array,
        state: Array | None,
        lengths: NDArray[np.int64] | None,
        resets: NDArray[np.uint8] | None = None,
    ) -> tuple[Array, Array]:
        """Return outputs and last states."""
        self._params = [[param.copy() for param in own] for own in params]
        _steps_of(self._x)[: self.steps] = x
        self._lengths = np.full(self.batch, self.steps) if lengths is None else lengths
        self._resets = None
        if resets is not None:
            self._resets = np.zeros(self._x.shape[:-1], np.uint8)
            _steps_of(self._resets)[: self.steps] = resets
        output = np.empty((self.steps, self.batch, self.widths[-1]), self.dtype)
        last = np.zeros(self._state, self.dtype) if state is None else state
        self._reset_states = None
        if has_reset_states(last, self._state[0]):
            last, self._reset_states = last[::2], last[1::2].copy()
        for k in range(self._count):
            self._starts[k] = last
            part, last = self._forward.forward(
                *(self._params, self._x[k], self._begun(last)),
                self._lengths_from(range(k, k + 1), 1),
                None if self._resets is None else self._resets[k],
            )
            begin = k * self._length
            output[begin : begin + self._length] = part[: self.steps - begin]
        return output, last

    def backward(
        self, above: Array, carry: Array, needs_input_grad: bool
    ) -> tuple[Array | None, Array, list[dict[str, Array]]]:
        """Return gradients in the input, in the initial states, and in each direction's parameters.

        An empty array stands for zeros.
        """
        in_x = np.zeros_like(self._x) if needs_input_grad else None
        in_state = np.zeros(self._state, self.dtype)
        in_resets = np.zeros(self._state)
        totals: list[dict[str, Array]] = []
        for call in range(self._calls):
            windows = range(call * self._size, (call + 1) * self._size)
            in_last = self._carry_of(windows, carry)
            if above.size == 0 and not in_last.any() and totals:
                continue
            self._run(windows)
            about = self._above_of(windows, above), in_last, needs_input_grad
            in_windows, in_starts, in_params = self._windows.backward(*about)
            if in_x is not None and in_windows is not None:
                for part, grad in zip(_both(in_x, windows), self._parted(in_windows), strict=True):
                    part += grad.swapaxes(0, 1)
            if self._reset_states is not None:
                in_anew = in_starts[1::2].reshape(len(in_resets), self._size, *in_resets.shape[1:])
                in_starts, in_resets = in_starts[::2], in_resets + in_anew.sum(1)
            if call == 0:
                in_state[:] = in_starts[:, : self.batch]
                totals = [
                    {name: np.zeros(grad.shape) for name, grad in own.items()} for own in in_params
                ]
            for total, own in zip(totals, in_params, strict=True):
                for name, grad in own.items():
                    total[name] += grad
        params = [{name: total.astype(self.dtype) for name, total in own.items()} for own in totals]
        if self._reset_states is not None:
            in_state = beside(np, in_state, in_resets.astype(self.dtype))
        return None if in_x is None else _steps_of(in_x)[: self.steps], in_state, params

    # -- Windows ----------------------------------------------------------------------------------

    def _run(self, windows: range) -> None:
        """Run windows forward, from the states before them."""
        starts = self._starts[windows.start : windows.stop].swapaxes(0, 1)
        starts = starts.reshape(len(starts), self._size * self.batch, starts.shape[-1])
        self._windows.forward(
            *(self._params, self._in_windows(self._x, windows), self._begun(starts)),
            self._lengths_from(windows, 2),
            None if self._resets is None else self._in_windows(self._resets, windows),
        )

    def _begun(self, states: Array) -> Array:
        """Return the states before segments or windows, and the states that resets set, if any."""
        if self._reset_states is None:
            return states
        windows = states.shape[1] // max(1, self.batch)
        both: Array = beside(np, states, np.tile(self._reset_states, (1, windows, 1)))
        return both

    def _in_windows(self, array: Array, windows: range) -> Array:
        """Return the windows of an array of segments, as samples."""
        given = np.stack([part.swapaxes(0, 1) for part in _both(array, windows)])
        return given.reshape(2 * self._length, self._size * self.batch, *array.shape[3:])

    def _parted(self, array: Array) -> Array:
        """Return an array of windows as the arrays of both segments, step by step."""
        return array.reshape(2, self._length, self._size, self.batch, array.shape[-1])

    def _lengths_from(self, segments: range, count: int) -> NDArray[np.int64] | None:
        """Return the steps of samples in `count` segments from each of some on; None if all."""
        steps = count * self._length
        own = self._lengths - self._length * np.array(segments)[:, None]
        lengths: NDArray[np.int64] = np.clip(own, 0, steps).reshape(-1)
        return None if (lengths == steps).all() else lengths

    def _above_of(self, windows: range, above: Array) -> Array:
        """Return the gradients in the outputs of windows: in the second segment, and the first."""
        if above.size == 0:
            return above
        given = np.zeros((2 * self._length, self._size * self.batch, above.shape[-1]), self.dtype)
        first, second = self._parted(given)
        own = above[(windows.start + 1) * self._length : (windows.stop + 1) * self._length]
        for k in range(-(-len(own) // self._length)):
            part = own[k * self._length : (k + 1) * self._length]
            second[: len(part), k] = part
        if windows.start == 0:
            first[:, 0] = above[: self._length]
        return given

    def _carry_of(self, windows: range, carry: Array) -> Array:
        """Return the gradients in the last states, for windows with a sample's last step."""
        if carry.size == 0:
            return carry
        lasts = np.maximum(-(-self._lengths // self._length) - 2, 0)
        is_last = lasts == np.array(windows)[:, None]
        given = np.where(is_last[..., None], carry[:, None], np.zeros((), self.dtype))
        return given.reshape(len(carry), self._size * self.batch, carry.shape[-1])


def _steps_of(array: Array) -> Array:
    """Return an array of segments step by step."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _both(array: Array, windows: range) -> tuple[Array, Array]:
    """Return the first segments of windows, and the second ones."""
    return array[windows.start : windows.stop], array[windows.start + 1 : windows.stop + 1]
