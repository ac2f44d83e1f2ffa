"""Both passes of a network on the host, as recordings that compiled code runs without Python."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..arrays.arrays import device_of, for_kernels
from ..execution.calls import Calls, aligned_empty
from ..execution.recording import Recorder, Recording, Space
from ..execution.replay import Replay
from ..execution.threads import thread_count
from .definition import Layers, width_of
from .host import HostMemory
from .host_sizes import Extent, HostSizes
from .memory import has_reset_states
from .packing import Direction, is_sparse, sample_rows

Array = NDArray[Any]


class RecurrentLike(Layers, Protocol):
    """A :class:`Recurrent`, as far as a training step reads it."""

    state_size: int

    @property
    def params(self) -> dict[str, Array]:
        """The parameters by their names."""
        ...

    def name_of(self, parameter: str, layer: int, back: int) -> str:
        """Return the name of a parameter of a cell."""
        ...


class Passes:
    """The passes of a network for inputs of one shape: one forward, and backward those wanted.

    Parameters
    ----------
    network : Recurrent
        The network; its parameters are not read.
    extent : Extent
        What the memory is for. A backward pass computes gates that are not kept at once again.
    dtype : dtype
        Of all arrays.
    lengths : dtype, optional
        Of the lengths, if samples have different ones.
    has_reset_states : bool, default False
        Whether the states that resets set are beside the initial ones: see
        :func:`~sparsescan.recurrent.memory.beside`.
    has_state : bool, default True
        Whether initial states are given; otherwise they are zeros, and no array.
    states_apart : bool, default False
        Whether each state of a cell has arrays of its own, ``(layers · directions, batch,
        hidden_size)``, one after the other, and so have gradients: results ``last 0``, ``last 1``,
        …, and ``state 0``, ….
    directions : list of Direction, optional
        What :func:`directions_of` returns, if that is known.

    Attributes
    ----------
    forward : Recording
        The forward pass. Its arrays are the memory, the inputs, initial states, lengths and resets
        if there are any, all parameters, and the results ``output`` and ``last``.
    nbytes : int
        Bytes of its memory.
    """

    def __init__(
        self,
        network: RecurrentLike,
        extent: Extent,
        dtype: DTypeLike,
        *,
        lengths: DTypeLike | None = None,
        has_reset_states: bool = False,
        has_state: bool = True,
        states_apart: bool = False,
        directions: list[Direction] | None = None,
    ) -> None:
        kept, steps, batch, has_resets = Space(0), extent.steps, extent.batch, extent.has_resets
        shapes = [param.shape for param in network.params.values()]
        cell = network.cells[0][0]
        self._arrays = cell.program.states if states_apart else 1
        self._apart, states = states_apart, self._arrays if has_state else 0
        has_lengths = lengths is not None
        count = 2 + states + has_lengths + has_resets
        recorder = Recorder(kept, count + len(shapes))
        x = recorder.array(1, (steps, batch, width_of(network)), dtype)
        if directions is None:
            directions = directions_of(network, dtype, rows_of_lanes(network, dtype, batch))
        self._memory = memory = HostMemory(network, directions, extent, recorder)
        memory.allocate()
        self._state_shape = len(memory.directions), batch, network.state_size // self._arrays
        state = self._states(recorder, 2, dtype, has_state, 1 + has_reset_states)
        counts, flags = None, None
        if lengths is not None:
            counts = recorder.array(2 + states, (batch,), lengths)
        if has_resets:
            flags = recorder.array(2 + states + has_lengths, (steps, batch), np.uint8)
        params = [recorder.array(count + k, shape, dtype) for k, shape in enumerate(shapes)]
        each = len(params) // len(memory.directions)
        own = [params[k * each :][:each] for k in range(len(memory.directions))]
        memory.forward(own, x, state, counts, flags)
        self.forward, self.nbytes = recorder.recording(), kept.nbytes

    def _states(
        self, recorder: Recorder, first: int, dtype: DTypeLike, are_given: bool, times: int = 1
    ) -> Any:
        if not are_given:
            none = np.zeros(0, dtype)
            return [none] if self._apart else none
        rows, *shape = self._state_shape
        arrays = [
            recorder.array(first + k, (times * rows, *shape), dtype) for k in range(self._arrays)
        ]
        return arrays if self._apart else arrays[0]

    def backward(
        self, *, has_output: bool = True, has_state: bool = True, needs_input_grad: bool = True
    ) -> tuple[Recording, int]:
        """Return a backward pass, and the bytes of the memory that only it takes.

        Its arrays are the memory as `forward` has left it, memory for itself, gradients in outputs
        and last states if these are given, and not zeros, and the results: gradients in parameters,
        in initial states (``state``) and inputs (``input``).
        """
        memory, scratch = self._memory, Space(1)
        dtype = memory.dtype
        memory.calls = recorder = Recorder(scratch, 2 + has_output + has_state * self._arrays)
        above = np.zeros(0, dtype)
        if has_output:
            above = recorder.array(2, (memory.steps, memory.batch, memory.widths[-1]), dtype)
        carry = self._states(recorder, 2 + has_output, dtype, has_state)
        memory.backward_of(memory.packed, above, carry, needs_input_grad)
        return recorder.recording(), scratch.nbytes


def directions_of(network: Layers, dtype: DTypeLike, rows: int) -> list[Direction]:
    """Return all directions of all layers, with their weights packed.

    `rows` are those that :func:`rows_of_lanes` returns.
    """
    return [
        Direction(cell, layer, back, np.dtype(dtype), sample_rows=rows)
        for layer, cells in enumerate(network.cells, start=1)
        for back, cell in enumerate(cells)
    ]


def rows_of_lanes(network: Layers, dtype: DTypeLike, batch: int) -> int:
    """Return how many rows' samples are the lanes of a vector; 0 if lanes are units.

    Where weights are sparse they are samples in any case.
    """
    cells = [cell for layer in network.cells for cell in layer]
    masks = [mask for cell in cells for mask in cell.masks.values()]
    if any(mask is not None and is_sparse(mask.on(np)) for mask in masks):
        return 1
    return sample_rows(cells[0].program, cells[0].hidden_size, np.dtype(dtype), batch)


class _Kind(NamedTuple):
    """What the passes of a call are given: lengths, resets, and states that these set."""

    has_lengths: bool
    has_resets: bool
    has_reset_states: bool


class RecordedMemory:
    """The memory of a training step on the host, and its passes over that.

    They are recorded by the first call of each kind.

    Parameters
    ----------
    network : Recurrent
        The network; its parameters are not read.
    dtype : dtype
        Of all arrays.
    extent : Extent
        What the memory is for, with or without resets.
    directions : list of Direction
        What :func:`directions_of` returns.

    Attributes
    ----------
    directions, steps, batch, widths, dtype, nbytes, keeps_gates, device
        As those of a :class:`~sparsescan.recurrent.memory.Memory`.
    """

    device: int | None = None

    def __init__(
        self, network: RecurrentLike, dtype: DTypeLike, extent: Extent, directions: list[Direction]
    ) -> None:
        self._network, self._extent, self.directions = network, extent, directions
        sizes = HostSizes(network, directions, extent)
        self.steps, self.batch, self.dtype = extent.steps, extent.batch, np.dtype(dtype)
        self.widths, self.nbytes, self.keeps_gates = sizes.widths, sizes.nbytes, sizes.keeps_gates
        self._threads, self._calls = thread_count(), Calls()
        self._room = self._scratch = aligned_empty((0,), "u1")
        self._passes: dict[_Kind, tuple[Passes, Replay]] = {}
        self._backwards: dict[Any, tuple[Replay, int]] = {}

    def fits(self, x: Array, has_resets: bool) -> bool:
        """Return whether this is the memory for inputs like `x`, with or without resets."""
        wanted = *x.shape[:2], x.dtype, thread_count(), device_of(x)
        own = self.steps, self.batch, self.dtype, self._threads, None
        return own == wanted and self._extent.has_resets >= has_resets

    def here(self) -> AbstractContextManager[None]:
        """Return a context for work on this memory."""
        return nullcontext()

    def forward(
        self,
        params: list[list[Array]],
        x: Array,
        state: Array | None,
        lengths: NDArray[np.int64] | None,
        resets: NDArray[np.uint8] | None = None,
    ) -> tuple[Array, Array]:
        """Return outputs and last states; see :class:`~sparsescan.recurrent.memory.Memory`."""
        has_anew = has_reset_states(state, len(self.directions))
        self._kind = kind = _Kind(lengths is not None, resets is not None, has_anew)
        if kind not in self._passes:
            passes = Passes(
                self._network,
                self._extent._replace(has_resets=kind.has_resets),
                self.dtype,
                lengths=np.int64 if kind.has_lengths else None,
                has_reset_states=has_anew,
                directions=self.directions,
            )
            self._passes[kind] = passes, Replay(passes.forward, self._calls)
        passes, replay = self._passes[kind]
        self._room = _at_least(self._room, passes.nbytes)
        if state is None:
            one = self.directions[0]
            size = len(self.directions), self.batch, one.states * one.units
            state = np.zeros(size, self.dtype)
        given = [x, state, lengths, resets]
        flat = [for_kernels(param.reshape(-1), self.dtype) for own in params for param in own]
        there = [np.ascontiguousarray(each) for each in given if each is not None]
        results = replay.run([self._room, *there, *flat])
        return results["output"], results["last"]

    def backward(
        self, above: Array, carry: Array, needs_input_grad: bool
    ) -> tuple[Array | None, Array, list[dict[str, Array]]]:
        """Return gradients in the input, in the initial states, and in each direction's parameters.

        An empty array stands for zeros.
        """
        passes, _ = self._passes[self._kind]
        key = self._kind, above.size > 0, carry.size > 0, needs_input_grad
        if key not in self._backwards:
            recording, nbytes = passes.backward(
                has_output=key[1], has_state=key[2], needs_input_grad=needs_input_grad
            )
            self._backwards[key] = Replay(recording, self._calls), nbytes
        replay, nbytes = self._backwards[key]
        self._scratch = _at_least(self._scratch, nbytes)
        given = [each for each in (above, carry) if each.size]
        results = replay.run([self._room, self._scratch, *given])
        params = [
            {name: results[f"{name} {k}"] for name in one.cell.shapes}
            for k, one in enumerate(self.directions)
        ]
        return results.get("input"), results["state"], params


def _at_least(room: Array, nbytes: int) -> Array:
    """Return memory of so many bytes, of any content."""
    return room if len(room) >= nbytes else aligned_empty((nbytes,), "u1")
