"""The memory and the kernels of a recurrent training step on a GPU, in CuPy's arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays.arrays import Constant, device_of, load_cupy
from ..arrays.cuda import current
from ..arrays.streams import place
from ..errors import InputError
from ..execution.chunk_counts import multiprocessors_of
from ..kernels.cuda import device as _device
from ..parameters.parametrised import masked
from .cell import Cell
from .loops.device_sequences import (
    Layout,
    layout_of,
    packing_order,
    samples_of,
    sequence_kernels,
)
from .memory import Memory

__all__ = ["DeviceDirection", "DeviceMemory"]

Array = Any  # cupy.ndarray
Shape = tuple[int, ...]
Span = tuple[int, int]


class _Weights(NamedTuple):
    """The parameters of a layer: as products take them, and as kernels read them.

    Attributes
    ----------
    w_in : list of ndarray, shape (gates · units, input_size)
        The weights of the input of each direction, 0 where they are pruned.
    w_hidden, w_back : ndarray
        The weights of the state of both directions, packed, and their transposes.
    bias : ndarray
        The bias of each product of both directions.
    """

    w_in: list[Array]
    w_hidden: Array
    w_back: Array
    bias: Array


class DeviceDirection:
    """One direction of one layer: a cell, and the order in which kernels read its weights."""

    def __init__(self, cell: Cell, layer: int, back: int, dtype: np.dtype[Any]) -> None:
        self.cell, self.layer, self.back, self.dtype = cell, layer, back, dtype
        self.kind = cell.kind
        self.layout: Layout = layout_of(self.kind, cell.hidden_size, dtype)
        if samples_of(self.kind, self.layout, dtype, 1, 1, 1) == 0:
            raise InputError(
                f"hidden_size is {cell.hidden_size}; in {dtype} the gradients in the gates of a "
                "sample do not fit the 48 KiB of shared memory that a block has on a GPU"
            )
        mask, shape = cell._masks["weight_hh"], cell._shapes["weight_hh"]
        kept = np.ones(shape, bool) if mask is None else mask.on(np)
        self._orders = [
            Constant(packing_order(self.kind, self.layout, kept, dtype, back))
            for back in (False, True)
        ]

    def weights(self, xp: Any, params: list[Array]) -> _Weights:
        """Return a copy of the parameters, as :class:`_Weights` of one direction."""
        w_in, w_hidden, *biases = (param.astype(self.dtype) for param in params)
        flat = xp.concatenate([w_hidden.reshape(-1), xp.zeros(1, self.dtype)])
        forward, back = (flat.take(order.on(xp)) for order in self._orders)
        w_in = masked(xp, w_in, self.cell._masks["weight_ih"])
        return _Weights([w_in], forward, back, self._bias(xp, biases))

    def _bias(self, xp: Any, biases: list[Array]) -> Array:
        """Return what is added to each product: of a GRU, ``v_n`` has its own."""
        cell, units = self.cell, self.cell.hidden_size
        if not biases:
            return xp.zeros((max(cell._hh) + 1) * units, self.dtype)
        of_x, of_h = biases
        if self.kind != "gru":
            return of_x + of_h
        both = 2 * units
        return xp.concatenate([of_x[:both] + of_h[:both], of_x[both:], of_h[both:]])


class DeviceMemory(Memory):
    """The memory for all samples, on the device of the input; see ``_Memory`` for the host.

    Work on it waits for that of the call before, on whatever stream that was.
    """

    def __init__(
        self,
        directions: list[DeviceDirection],
        input_size: int,
        steps: int,
        batch: int,
        segment: int,
    ) -> None:
        self._xp = load_cupy()
        self.directions = directions
        one = directions[0]
        self.steps, self.batch, self.segment, self.dtype = steps, batch, segment, one.dtype
        self.keeps_gates = segment >= steps
        self._parts, self._units = one.cell._parts, one.cell.hidden_size
        self.per_layer = sum(each.layer == 1 for each in directions)
        layers = len(directions) // self.per_layer
        self.widths = [input_size, *[self.per_layer * self._units] * layers]
        self._rows = len(one.cell._ih) * self._units
        samples = samples_of(
            *(one.kind, one.layout, self.dtype, batch, self.per_layer),
            multiprocessors_of(self._xp).number,
        )
        self._kernels = sequence_kernels(one.kind, one.layout, self.dtype, samples)
        self.device: int | None = self._xp.cuda.Device().id
        self._state_shape = len(directions), batch, self._parts * self._units
        self.nbytes = self.dtype.itemsize * sum(math.prod(shape) for _, shape in self._shapes())

    def fits(self, x: Array) -> bool:
        """Return whether this is the memory for inputs like `x`."""
        wanted = *x.shape[:2], x.dtype, device_of(x)
        return (self.steps, self.batch, self.dtype, self.device) == wanted

    def _shapes(self) -> list[tuple[str, Shape]]:
        """Return, for each array, what it holds, and its shape."""
        of_samples, segment = (self.steps, self.batch), (self.per_layer, self.segment, self.batch)
        shapes: list[tuple[str, Shape]] = [("inputs", (*of_samples, self.widths[0]))]
        for width in self.widths[1:]:
            slots = self.steps + 2, self.batch, width
            shapes += [("states", slots), ("cells", slots if self._parts == 2 else (0,))]
        # Where not all are kept, layers take turns.
        is_gru = self.directions[0].kind == "gru"
        for _ in self.widths[1:] if self.keeps_gates else [None]:
            shapes += [("gates", (*segment, self._rows))]
            shapes += [("last", (*segment, self._units) if is_gru else (0,))]
        shapes += [("grads", (*of_samples, self.widths[-1]))] * min(2, len(self.widths) - 2)
        ones = 1, min(self.segment, self.steps) * self.batch
        return [*shapes, ("carry", self._state_shape), ("ones", ones)]

    def allocate(self) -> None:
        """Take the memory, on the current stream."""
        arrays: dict[str, list[Array]] = {"grads": []}
        for name, shape in self._shapes():
            arrays.setdefault(name, []).append(self._xp.empty(shape, self.dtype))
        (self._inputs,), (self._carry,) = arrays["inputs"], arrays["carry"]
        self._states, self._cells = arrays["states"], arrays["cells"]
        self._gates, self._last, self._grads = arrays["gates"], arrays["last"], arrays["grads"]
        (self._ones,) = arrays["ones"]  # whose products with rows add them up
        self._ones.fill(1)
        self._firsts, self._lasts = self._state_places(last=False), self._state_places(last=True)
        self._home = self._latest = self._xp.cuda.get_current_stream()

    @contextmanager
    def here(self) -> Iterator[None]:
        """Let the block work on this memory, on the current stream of its device."""
        device: int = self._carry.data.device_id
        with place("the states", self._carry, None, None) as stream, current(device):
            others = [self._home]
            if self._latest != self._home:
                others.append(self._latest)
            others = [other for other in others if other != stream]
            for other in others:
                stream.wait_event(other.record())
            try:
                yield
            finally:
                # CuPy gives freed memory to others on the stream that it was made on: all of this
                # on the first, weights on that of the forward pass.
                for other in others:
                    other.wait_event(stream.record())
                self._latest = stream

    # -- Input and results ------------------------------------------------------------------------

    def weights(self, params: list[list[Array]]) -> list[_Weights]:
        """Return a copy of the parameters of each layer."""
        xp, width, packed_weights = self._xp, self.per_layer, []
        pairs = zip(self.directions, params, strict=True)
        each = [one.weights(xp, own) for one, own in pairs]
        for k in range(0, len(each), width):
            w_in, *packed = zip(*each[k : k + width], strict=True)
            joined = [parts[0] if width == 1 else xp.concatenate(parts) for parts in packed]
            packed_weights.append(_Weights([w for (w,) in w_in], *joined))
        return packed_weights

    def read(self, x: Array, state: Array | None, lengths: NDArray[np.int64] | None) -> None:
        """Take over inputs, initial states, by default zeros, and lengths, by default all steps."""
        xp = self._xp
        self._lengths, self._has = xp.full(self.batch, self.steps, np.int64), None
        if lengths is not None:
            self._lengths = xp.asarray(lengths)
            self._has = xp.arange(self.steps)[:, None, None] < self._lengths[:, None]
        # Shorter sequences are often filled up with NaN, and 0·NaN is not 0.
        self._inputs[...] = x if self._has is None else xp.where(self._has, x, self.dtype.type(0))
        for k, columns, where in self._firsts:
            where[...] = 0 if state is None else state[k, :, columns]

    def results(self, lengths: NDArray[np.int64] | None) -> tuple[Array, Array]:
        """Return outputs and last states."""
        xp, output = self._xp, self._states[-1][1:-1]
        if self._has is None:
            output = output.copy()
        else:
            output = xp.where(self._has, output, self.dtype.type(0))
        last = xp.empty(self._state_shape, self.dtype)
        for k, columns, where in self._lasts:
            last[k, :, columns] = where
        return output, last

    def every_state(self) -> Array:
        """Return the states of the only direction: before the first step, and after each."""
        parts = [self._states, self._cells][: self._parts]
        return self._xp.concatenate([slots[0][:-1] for slots in parts], axis=-1)

    def _state_places(self, last: bool) -> list[tuple[int, slice, Array]]:
        """Return, for each part of the first or last states, its direction, columns and slot."""
        units, places = self._units, []
        for k, one in enumerate(self.directions):
            first_slot, last_slot = (self.steps + 1, 1) if one.back else (0, self.steps)
            columns = slice(one.back * units, (one.back + 1) * units)
            for part, arrays in enumerate([self._states, self._cells][: self._parts]):
                where = arrays[one.layer - 1][last_slot if last else first_slot]
                own = slice(part * units, (part + 1) * units)
                places.append((k, own, where[:, columns]))
        return places

    def read_carry(self, carry: Array) -> None:
        """Take over the gradients in the last states."""
        self._carry[...] = carry

    def state_grad(self) -> Array:
        """Return the gradients in the initial states."""
        return self._carry.copy()

    def input_grad(self) -> Array:
        """Return a new array for the gradients in the input."""
        return self._xp.empty((self.steps, self.batch, self.widths[0]), self.dtype)

    def below(self, k: int) -> Array:
        """Return the array for the gradients in the input of the layer of a direction."""
        return self._grads[self.directions[k].layer % len(self._grads)]

    # -- Steps ------------------------------------------------------------------------------------

    def _spans(self) -> list[Span]:
        """Return the steps whose gates are computed at once."""
        steps = self.steps if self.batch else 0
        return [(at, min(at + self.segment, steps)) for at in range(0, steps, self.segment)]

    def _times(self, back: int, span: Span) -> slice:
        """Return some steps of a direction, given in its own order, in the order of time."""
        begin, end = (self.steps - span[1], self.steps - span[0]) if back else span
        return slice(begin, end)

    def _of_gates(self, arrays: list[Array], layer: int, back: int, span: Span) -> Array:
        """Return rows for all samples of some steps of one direction."""
        rows = arrays[layer % len(arrays)][back]
        times = self._times(back, span)
        times = times if self.keeps_gates else slice(0, times.stop - times.start)
        return rows[times].reshape(-1, rows.shape[-1])

    def _inputs_of(self, layer: int, times: slice) -> Array:
        """Return the inputs of a layer, a row for each step and sample."""
        rows = (self._states[layer - 1][1:-1] if layer else self._inputs)[times]
        return rows.reshape(-1, rows.shape[-1])

    def run(self, ks: range, weights: list[_Weights]) -> None:
        """Compute all states of the directions of a layer, and the gates of the last segment."""
        for span in self._spans():
            self._run(self.directions[ks.start].layer - 1, weights, span)

    def _run(self, layer: int, all_weights: list[_Weights], span: Span) -> None:
        """Compute some states of a layer, and their gates."""
        weights = all_weights[layer]
        for back, w_in in enumerate(weights.w_in):
            x = self._inputs_of(layer, self._times(back, span))
            self._xp.matmul(x, w_in.T, out=self._of_gates(self._gates, layer, back, span))
        before = weights.w_hidden, weights.bias, *self._kept(layer), self._lengths
        self._launch(self._kernels.run, before, span)

    def _kept(self, layer: int) -> tuple[Array, ...]:
        """Return gates, the last products of a GRU, states, and cell states of a layer."""
        which = layer % len(self._gates)
        return self._gates[which], self._last[which], self._states[layer], self._cells[layer]

    def _launch(self, kernel: Any, arrays: tuple[Array, ...], span: Span) -> None:
        counts = self.steps, self.batch, self.widths[-1], self.segment, *span
        _device.launch(
            *(kernel, self._kernels.blocks(self.batch, self.per_layer), self._kernels.threads),
            self._xp.cuda.get_current_stream().ptr,
            *(int(array.data.ptr) for array in arrays),
            *counts,
        )

    # -- Gradients --------------------------------------------------------------------------------

    def back(
        self, ks: range, weights: list[_Weights], above: Array, below: Array | None
    ) -> list[dict[str, Array]]:
        """Return the gradients in the parameters of each direction of a layer.

        `above` holds the gradients in its outputs, and `below` gets those in its inputs.
        """
        xp, layer = self._xp, self.directions[ks.start].layer - 1
        carry = self._carry[ks.start : ks.stop]
        sums: list[dict[str, Array]] = [{} for _ in ks]
        is_sum = self.per_layer > 1
        if below is not None and is_sum:
            below.fill(0)
        for span in reversed(self._spans()):
            if self.directions[0].cell._writes_gates and not self.keeps_gates:
                self._run(layer, weights, span)
            arrays = weights[layer].w_back, *self._kept(layer), self._lengths, above, carry
            self._launch(self._kernels.back, arrays, span)
            for back, w_in in enumerate(weights[layer].w_in):
                self._sum_up(layer, back, span, sums[back])
                if below is None:
                    continue
                grads = self._of_gates(self._gates, layer, back, span)
                rows = below[self._times(back, span)].reshape(-1, below.shape[-1])
                if is_sum:
                    rows += xp.matmul(grads, w_in)
                else:
                    xp.matmul(grads, w_in, out=rows)
        return [
            self._param_grads(self.directions[k].cell, each)
            for k, each in zip(ks, sums, strict=True)
        ]

    def _sum_up(self, layer: int, back: int, span: Span, sums: dict[str, Array]) -> None:
        """Add the gradients in the parameters of one direction over some steps."""
        xp, units, times = self._xp, self._units, self._times(back, span)
        grads = self._of_gates(self._gates, layer, back, span)
        begin = times.start + 2 * back
        before = self._states[layer][begin : begin + times.stop - times.start]
        h = before[..., back * units : (back + 1) * units].reshape(-1, units)
        ones = self._ones[:, : len(grads)]
        grads_of_span = {
            "weight_ih": xp.matmul(grads.T, self._inputs_of(layer, times)),
            "weight_hh": xp.matmul(grads.T, h),
            "bias_ih": xp.matmul(ones, grads)[0],
        }
        grads_of_span["bias_hh"] = grads_of_span["bias_ih"].copy()
        if self.directions[0].kind == "gru":
            last = self._of_gates(self._last, layer, back, span)
            grads_of_span["weight_hh"][2 * units :] = xp.matmul(last.T, h)
            grads_of_span["bias_hh"][2 * units :] = xp.matmul(ones, last)[0]
        for name, grad in grads_of_span.items():
            sums[name] = sums[name] + grad if name in sums else grad

    def _param_grads(self, cell: Cell, sums: dict[str, Array]) -> dict[str, Array]:
        """Return the gradients in the parameters by their names, 0 where a weight is pruned."""
        grads = {}
        for name, shape in cell._shapes.items():
            grad = sums[name] if sums else self._xp.zeros(shape, self.dtype)
            grads[name] = masked(self._xp, grad, cell._masks.get(name))
        return grads
