"""Forward passes of networks one behind the other, by blocks of steps, with states inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..checks import check_has_shape
from ..execution.calls import aligned_empty
from ..execution.recording import BoundRecording, Recorder, Recording, Space
from .definition import Layers
from .host import StreamMemory
from .host_sizes import Extent
from .passes import directions_of, rows_of_lanes

Array = NDArray[Any]

# Steps of a recorded block at most, and bytes of its inputs, states and outputs.
_MOST, _BYTES = 256, 1 << 22


class StreamPasses:
    """The forward pass of networks, each of which reads the outputs of the one before.

    Weights are packed once, and states stay in memory. A block of steps is a few recordings of 1,
    2, 4, … steps, which run the same kernels: its bits are those of one step after the other.

    Parameters
    ----------
    networks : sequence of (Layers, list of float)
        The networks, of one direction, with the numbers that their further inputs are in all steps.
        Their parameters are not read.
    batch : int
        How many samples there are.
    dtype : dtype
        Of all arrays.

    Attributes
    ----------
    step, step_at : callable
        Reads the inputs of one step, and writes its outputs: two arrays, or their addresses.
    is_alone : bool
        Whether steps run on one thread.
    width : int
        How many numbers an output has.
    """

    def __init__(
        self, networks: Sequence[tuple[Layers, list[float]]], batch: int, dtype: DTypeLike
    ) -> None:
        self._batch, self._dtype = batch, np.dtype(dtype)
        cells = [[cell for (cell,) in net.cells] for net, _ in networks]
        self._widths = [networks[0][0].input_size, *(own[-1].hidden_size for own in cells)]
        self.width = self._widths[-1]
        self._shapes = [shape for own in cells for each in own for shape in each.shapes.values()]
        sizes = sum(each.input_size + each.state_size for own in cells for each in own)
        step = (sum(self._widths) + sizes) * batch * self._dtype.itemsize
        self._most = 1 << (max(1, min(_MOST, _BYTES // step)).bit_length() - 1)
        self._memories, self._between = list[StreamMemory](), list[Array]()
        begins, self._rooms = list[Recording](), list[Array]()
        for number, (net, further) in enumerate(networks):
            space = Space(number)
            recorder = Recorder(space, len(networks))
            directions = directions_of(net, dtype, rows_of_lanes(net, dtype, batch))
            extent = Extent(self._most, batch, 0, is_stream=True)
            self._memories.append(StreamMemory(net, directions, extent, recorder))
            self._memories[-1].begin(further)
            size = self._most * batch * self._widths[number + 1]
            self._between.append(recorder.room(size, dtype))
            begins.append(recorder.recording())
            self._rooms.append(aligned_empty((space.nbytes,), "u1"))
        for recording in begins:
            recording.run(self._rooms)
        self._packs = self._record_packs()
        self._reads, self._writes = self._record_states(True), self._record_states(False)
        self._in, self._out = (self._dtype.itemsize * batch * self._widths[k] for k in (0, -1))
        self._blocks: dict[int, BoundRecording] = {}
        one = self._block(1)
        self.step, self.step_at, self.is_alone = one.run, one.run_at, one.is_alone

    def _recorded(
        self, shapes: Sequence[tuple[int, ...]], note: Callable[..., None], effort: int = 0
    ) -> Recording:
        """Return what a function notes with a recorder, and arrays of some shapes."""
        first = len(self._memories)
        recorder = Recorder(Space(first), first + len(shapes), effort)
        arrays = [recorder.array(first + k, each, self._dtype) for k, each in enumerate(shapes)]
        note(recorder, arrays)
        return recorder.recording()

    def _record_packs(self) -> Recording:
        def note(calls: Recorder, params: list[Array]) -> None:
            left = iter(params)
            for memory in self._memories:
                memory.calls = calls
                memory.weights([[next(left) for _ in one.cell.shapes] for one in memory.directions])

        return self._recorded(self._shapes, note)

    def _record_states(self, are_read: bool) -> Recording:
        def note(calls: Recorder, states: list[Array]) -> None:
            for memory, own in zip(self._memories, states, strict=True):
                memory.calls = calls
                (memory.read_states if are_read else memory.write_states)(own)

        return self._recorded(self.state_shapes, note)

    def _block(self, steps: int) -> BoundRecording:
        """Return the recording of a block of steps."""
        found = self._blocks.get(steps)
        if found is None:
            shapes = [(steps, self._batch, self._widths[k]) for k in (0, -1)]

            def note(calls: Recorder, arrays: list[Array]) -> None:
                x, output = arrays
                for memory, between in zip(self._memories, self._between, strict=True):
                    shape = steps, self._batch, memory.widths[-1]
                    into = between[: math.prod(shape)].reshape(shape)
                    into = output if memory is self._memories[-1] else into
                    memory.advance(calls, x, into)
                    x = into

            recording = self._recorded(shapes, note, effort=1)
            found = self._blocks[steps] = BoundRecording(recording, self._rooms)
        return found

    @property
    def state_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the states of each network."""
        return [
            (len(each.directions), self._batch, each.directions[0].states * each.units)
            for each in self._memories
        ]

    def pack(self, params: Sequence[Array]) -> None:
        """Take over all parameters, network by network and layer by layer."""
        for param, shape in zip(params, self._shapes, strict=True):
            check_has_shape("a parameter", param, shape)
        self._packs.run([*self._rooms, *(np.ascontiguousarray(p, self._dtype) for p in params)])

    def states(self) -> list[Array]:
        """Return the states of each network, ``(layers, batch, state_size)``."""
        states = [np.empty(shape, self._dtype) for shape in self.state_shapes]
        self._writes.run([*self._rooms, *states])
        return states

    def set_states(self, states: Sequence[Array]) -> None:
        """Set the states of each network."""
        self._reads.run([*self._rooms, *(np.ascontiguousarray(s, self._dtype) for s in states)])

    def run_at(self, steps: int, x: int, y: int) -> None:
        """Read so many inputs at an address, and write the outputs to another one."""
        while steps:
            count = min(self._most, 1 << (steps.bit_length() - 1))
            self._block(count).run_at(x, y)
            x, y, steps = x + count * self._in, y + count * self._out, steps - count
