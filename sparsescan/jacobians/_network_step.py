"""NetworkStep: layers forward and backward, all samples at once, by kept weights only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arrays.arrays import check_memory
from ..errors import Allocating, InputError, InputTypeError, MemoryLimitError, short
from ..formatting import align, exact_bytes, format_bytes
from ..symbolic.schedule import check_count
from ._checks import Shape
from ._kernels.lanes import lanes
from ._kron import Separable
from ._operator import Operator
from ._places import Map
from ._sharing import LINE, quiet
from ._stages import (
    Add,
    Apply,
    Mix,
    Normalise,
    Pool,
    Samples,
    Stage,
    Task,
    Weigh,
    Work,
    call_all,
    host,
    in_lanes,
    put_grad,
    samples_of,
    write,
)
from .activations import ReLU
from .conv import Conv1d, Conv2d, ConvTranspose2d
from .linear import Linear
from .normalization import BatchNorm2d
from .pooling import MaxPool2d
from .reshape import Flatten

__all__ = ["NetworkGradients", "NetworkStep", "Part"]

Array = NDArray[Any]


class Part(NamedTuple):
    """A layer with its name; or the two branches of a residual block.

    Attributes
    ----------
    name : str
        Such as ``"2.0"``: the first layer in the third.
    op : Operator or None
        The layer; None for a block.
    branches : tuple of list of Part
        The layers of a block, and those of its shortcut.
    """

    name: str
    op: Any
    branches: tuple[list[Part], ...] = ()


class Network(Protocol):
    """What a training step takes of a :class:`Sequential`."""

    input_shape: Shape
    output_shape: Shape

    @property
    def parts(self) -> list[Part]: ...

    @property
    def layers(self) -> tuple[Operator, ...]: ...


class NetworkGradients(NamedTuple):
    """Gradients of a loss, as :meth:`NetworkStep.backward` returns them.

    Attributes
    ----------
    input : ndarray or None, shape of the input
        In the input; None if it was not asked for.
    params : dict of str to ndarray
        In each parameter, summed over samples, by names such as ``"0.weight"``.
    """

    input: Array | None
    params: dict[str, Array]


class NetworkStep:
    """Compute a network of layers and all of its gradients, again and again.

    A call of :meth:`forward` and one of :meth:`backward` are a whole training step but for the loss
    and the optimiser. Convolutions and linear layers use only the weights that are kept, in all
    three passes, and write no Jacobian. Memory is kept from one training step to the next, so one
    thread at a time may call them. Made by :meth:`Sequential.training_step`.

    Gradients are those of :meth:`Sequential.param_grads` and of a scan, up to rounding. Their bits
    do not depend on the number of threads.

    Parameters
    ----------
    network : Sequential
        The network. Its parameters are read by each :meth:`forward`, and those of layers other than
        convolutions and linear ones again by :meth:`backward`.
    memory_limit : int, optional
        Bytes to take, beside the caller's arrays; by default what the machine has.

    Attributes
    ----------
    nbytes : int
        Bytes that are kept for inputs of the last shape.

    Notes
    -----
    Samples are lanes, 16 of float32 at a time where the machine has AVX-512. Where that would leave
    many lanes empty, neighbouring pixels lie side by side in a vector. A network with a
    :class:`BatchNorm2d` in training is a network of whole batches, ``(N, C, H, W)``; then those
    ``N`` are the lanes.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.jacobians import Conv2d, Flatten, Linear, ReLU, Sequential
    >>> mask = np.random.default_rng(0).random((4, 1, 3, 3)) < 0.3
    >>> net = Sequential([
    ...     Conv2d(1, 4, 3, weight_mask=mask, input_shape=(1, 8, 8), rng=0),
    ...     ReLU(input_shape=(4, 6, 6)),
    ...     Flatten(input_shape=(4, 6, 6)),
    ...     Linear(144, 10, rng=0),
    ... ])
    >>> step = net.training_step()
    >>> x = np.random.default_rng(0).random((16, 1, 8, 8), np.float32)
    >>> y = step.forward(x)
    >>> grads = step.backward(y)  # of the loss (y²).sum() / 2
    >>> {name: grad.shape for name, grad in grads.params.items()}["0.weight"]
    (4, 1, 3, 3)
    """

    def __init__(self, network: Network, memory_limit: int | None = None) -> None:
        self.network = network
        self.memory_limit = (
            None if memory_limit is None else check_count("memory_limit", memory_limit, 0)
        )
        self._has_batch_axis = _holds_batch(network.layers)
        self._maps: list[Map] = []
        self._stages: list[Stage] = []
        self._first = self._map(network.input_shape)
        self._last = self._build(network.parts, self._first)
        self._samples: Samples | None = None
        self._ahead: list[_Group] = []
        self._back: list[_Group] = []
        self._is_forward = False
        self._lead: Shape = ()

    @property
    def nbytes(self) -> int:
        return 0 if self._samples is None else self._needed(self._samples)

    def __repr__(self) -> str:
        kept = ""
        if self._samples is not None:
            kept = f": {self._samples.batch} samples, {format_bytes(self.nbytes)}"
        return f"NetworkStep({self.network!r}){kept}"

    def __str__(self) -> str:
        rows = [["layer", "weights", "kept", ""]]
        for stage in self._stages:
            if isinstance(stage, Weigh):
                kept, whole = len(stage.kept_at), stage.op.kept_weights().size
                share = f"{kept / whole:.3g}" if whole else "-"
                rows.append([f"{stage.name} {type(stage.op).__name__}", f"{whole:,}", share, ""])
        return "\n".join([repr(self), *align(rows)])

    # -- Building ---------------------------------------------------------------------------------

    def _map(self, shape: Shape) -> Map:
        self._maps.append(Map(shape[1:] if self._has_batch_axis else shape))
        return self._maps[-1]

    def _build(self, parts: Sequence[Part], source: Map, *, is_branch: bool = False) -> Map:
        """Add the stages of some layers; return what the last one writes."""
        alone = False  # whether nothing else reads what the layer before has written
        flattened: Part | None = None  # a layer that was left out, since its places are the same
        for part in parts:
            op = part.op
            if op is None:
                if flattened is not None:
                    # Maps that are added have one shape.
                    result = self._map(flattened.op.output_shape)
                    self._stages.append(Apply(*flattened[:2], source, result))
                    source, flattened = result, None
                ends = [self._build(branch, source, is_branch=True) for branch in part.branches]
                ends += [source] * (2 - len(ends))
                result = self._map_like(ends[0])
                for end in ends:
                    # Nothing else reads the end of a branch but the sum.
                    if end is not source and not end.rectified:
                        end.join(result)
                self._stages.append(Add(part.name, (ends[0], ends[1]), result))
                source, alone = result, True
            elif isinstance(op, Flatten) and not is_branch and self._keeps_places(op):
                flattened = part
            elif isinstance(op, ReLU) and alone:
                source.rectified, alone = True, False
            else:
                kind: Any = Apply
                if isinstance(op, MaxPool2d):
                    kind = Pool
                elif isinstance(op, Separable):
                    kind = Mix
                elif isinstance(op, BatchNorm2d) and op.training == self._has_batch_axis:
                    kind = Normalise
                elif isinstance(op, (Conv1d, Conv2d, ConvTranspose2d, Linear)):
                    kind = Weigh
                result = self._map(op.output_shape)
                self._stages.append(kind(part.name, op, source, result))
                source, flattened = result, None
                alone = kind in (Weigh, Normalise, Mix)
        return source

    def _keeps_places(self, op: Flatten) -> bool:
        """Return whether what reads the result may read the source: features, or its images.

        Within a residual block it may not, since maps that are added have one shape.
        """
        features = len(op.output_shape) == 1 + self._has_batch_axis
        return features or op.output_shape[-2:] == op.input_shape[-2:]

    def _map_like(self, other: Map) -> Map:
        self._maps.append(Map(other.shape))
        return self._maps[-1]

    def _needed(self, samples: Samples) -> int:
        """Return bytes of activations, gradients and what stages keep."""
        copies = (1 + (each.twin is None) for each in self._maps)
        numbers = [
            each.size * samples.room
            for each, count in zip(self._maps, copies, strict=True)
            for _ in range(count)
        ]
        numbers += [stage.numbers(samples) for stage in self._stages]
        behind = lanes(samples.dtype) * samples.dtype.itemsize + LINE
        return sum(numbers) * samples.dtype.itemsize + len(numbers) * behind

    def _allocate(self, samples: Samples) -> None:
        needed = self._needed(samples)
        if self.memory_limit is not None and needed > self.memory_limit:
            raise MemoryLimitError(
                f"memory_limit is {exact_bytes(self.memory_limit)}; {samples.batch} samples need "
                f"{exact_bytes(needed)}"
            )
        check_memory(f"{samples.batch} samples", needed)
        for each in self._maps:
            each.room = samples.room
            each.x = samples.zeros(each.size * samples.room)
        # A twin is made before its other.
        for each in reversed(self._maps):
            each.grad = each.twin.grad if each.twin else samples.zeros(each.size * samples.room)
        for stage in self._stages:
            stage.bind(samples, samples.zeros(stage.numbers(samples)))
        self._ahead, self._back = _groups(self._stages), _groups(self._stages[::-1], back=True)
        self._samples = samples

    # -- Forward ----------------------------------------------------------------------------------

    @Allocating("a training step")
    @quiet
    def forward(self, x: ArrayLike) -> Array:
        """Compute the output of the last layer, and keep what backward needs.

        Parameters
        ----------
        x : array_like of float32 or float64, shape (batch, *input_shape) or input_shape
            The inputs.

        Returns
        -------
        ndarray, shape (batch, *output_shape) or output_shape
            The outputs, of the dtype to which `x` and all parameters promote.

        Raises
        ------
        InputError, InputTypeError
            If the shape or the dtype is wrong.
        DeviceError
            If an array, or a parameter, is on a GPU.
        MemoryLimitError
            If activations and gradients take more memory than `memory_limit`, or than there is.
        """
        self._is_forward = False
        x = host("x", x)
        shape = self.network.input_shape
        lead = x.shape[: x.ndim - len(shape)]
        if x.shape[len(lead) :] != shape or len(lead) > (not self._has_batch_axis):
            expected = (
                f"{shape}" if self._has_batch_axis else f"(batch, {str(shape)[1:]} or {shape}"
            )
            raise InputError(f"x has shape {x.shape}; expected {expected}")
        params = [
            host(name, param)
            for stage in self._stages
            for name, param in stage.named_params().items()
        ]
        dtype = np.result_type(x, *params)
        batch = len(x) if lead or self._has_batch_axis else 1
        if self._samples is None or (self._samples.batch, self._samples.dtype) != (batch, dtype):
            self._samples = None
            self._allocate(Samples.of(batch, dtype))
        samples = self._samples
        assert samples is not None
        self._lead = lead
        write(self._first, x, samples)
        reads = [stage.read_params() for stage in self._stages]
        for tasks in zip(*reads, strict=True):
            call_all(list(chain.from_iterable(tasks)))
        for group in self._ahead:
            group.forward()
        self._is_forward = True
        y = samples_of(self._last, self._last.x, samples)
        return y.reshape(*lead, *self.network.output_shape)

    # -- Backward ---------------------------------------------------------------------------------

    @Allocating("the gradients of a training step")
    @quiet
    def backward(
        self,
        grad_output: ArrayLike,
        *,
        needs_input_grad: bool = True,
        out: Mapping[str, Array] | None = None,
    ) -> NetworkGradients:
        """Return the gradients of the loss, once after each :meth:`forward`.

        Parameters
        ----------
        grad_output : array_like, shape of the output
            Gradient in the result of :meth:`forward`.
        needs_input_grad : bool, default True
            Whether gradients in the input are computed.
        out : dict of str to ndarray, optional
            The `params` of an earlier result of this object: gradients of kept weights are
            overwritten, and those of pruned ones, which are 0, left as they are. That spares
            clearing arrays that are mostly 0.

        Returns
        -------
        NetworkGradients
            Those in the input and in the parameters.

        Raises
        ------
        InputError, InputTypeError, DeviceError
            If a shape or a dtype is wrong, or an array on a GPU; or if there was no forward pass,
            or another backward pass, which has used what was kept.
        """
        samples = self._samples
        if samples is None or not self._is_forward:
            raise InputError("backward was called without a forward pass before it")
        grad = host("grad_output", grad_output)
        expected = (*self._lead, *self.network.output_shape)
        if grad.shape != expected:
            raise InputError(f"grad_output has shape {grad.shape}; expected {expected}")
        rooms = self._rooms(out, samples)
        self._is_forward = False
        last, wanted = self._last, self._wanted(needs_input_grad)
        for each in self._maps if samples.batch == 0 else ():
            each.grad[:] = 0
        put_grad(last, in_lanes(last, grad, samples), add=False)
        written = set[Map]()
        for stage in reversed(self._stages):
            adds: list[bool | None] = []
            for source in stage.sources:
                adds.append(source in written if source in wanted else None)
                written.add(source)
            stage.begin_backward(adds)
        for group in self._back:
            group.backward(wanted)
        params: dict[str, Array] = {}
        tasks: list[Task] = []
        for stage in self._stages:
            if stage.result in wanted:
                own, more = stage.param_grads(rooms.get(stage.name, {}))
                params |= {f"{stage.name}.{name}": grad for name, grad in own.items()}
                tasks += more
        call_all(tasks)
        below = None
        if needs_input_grad:
            below = samples_of(self._first, self._first.grad, samples)
            below = below.reshape(*self._lead, *self.network.input_shape)
        return NetworkGradients(below, params)

    def _wanted(self, needs_input_grad: bool) -> set[Map]:
        """Return the maps whose gradients are needed."""
        wanted = {self._first} if needs_input_grad else set[Map]()
        for stage in self._stages:
            if stage.params or not wanted.isdisjoint(stage.sources):
                wanted.add(stage.result)
        return wanted

    def _rooms(
        self, out: Mapping[str, Array] | None, samples: Samples
    ) -> dict[str, dict[str, Array]]:
        """Return where gradients of parameters are written, by stages."""
        if out is None:
            return {}
        if not isinstance(out, Mapping):
            raise InputTypeError(f"out is {short(out)}; expected the params of an earlier result")
        rooms: dict[str, dict[str, Array]] = {}
        for stage in self._stages:
            for name, param in stage.named_params().items():
                full = f"{stage.name}.{name}"
                room = out.get(full)
                if not (
                    type(room) is np.ndarray
                    and room.shape == param.shape
                    and room.dtype == samples.dtype
                    and room.flags.c_contiguous
                    and room.flags.writeable
                ):
                    raise InputError(
                        f"out[{full!r}] is {short(room)}; expected a contiguous array of shape "
                        f"{param.shape} and dtype {samples.dtype}, as in an earlier result"
                    )
                rooms.setdefault(stage.name, {})[name] = room.view()
        return rooms


class _Group(NamedTuple):
    """Stages of which each works on the channels that the one before has written.

    So a thread runs all of them for its channels, which are in its cache, before it waits for
    others.
    """

    stages: tuple[Stage, ...]
    parts: list[tuple[int, int]]

    def forward(self) -> None:
        """Run all forward passes, again if one of them was not settled."""
        for _ in range(1 + len(self.stages)):
            call_all([partial(self._forward, part) for part in self.parts])
            if all(stage.is_settled() for stage in self.stages):
                break

    def _forward(self, part: tuple[int, int]) -> None:
        for stage in self.stages:
            stage.forward(part)

    def backward(self, wanted: set[Map]) -> None:
        """Run all backward passes of what is wanted."""
        stages = [stage for stage in self.stages if stage.result in wanted]
        call_all([partial(self._backward, stages, part) for part in self.parts])

    @staticmethod
    def _backward(stages: list[Stage], part: tuple[int, int]) -> None:
        for stage in stages:
            stage.backward(part)


def _groups(stages: Sequence[Stage], *, back: bool = False) -> list[_Group]:
    """Return stages in the order in which they run, in groups."""
    groups: list[list[Stage]] = []
    works: list[Work] = []
    for stage in stages:
        work = stage.back if back else stage.ahead
        before = groups[-1] if groups else []
        if back:
            follows = any(stage.result in other.sources for other in before)
        else:
            follows = bool(before) and before[-1].result in stage.sources
        same = follows and before[0].by_channels and len(works[-1].ends) == len(work.ends)
        if same and stage.is_channelwise:
            before.append(stage)
            works[-1] = Work(works[-1].ends + work.ends)
            continue
        groups.append([stage])
        works.append(work)
    return [_Group(tuple(group), work.parts()) for group, work in zip(groups, works, strict=True)]


def _holds_batch(layers: Sequence[Operator]) -> bool:
    """Return whether the first axis of every layer is that of the samples of a batch."""
    if not any(isinstance(op, BatchNorm2d) and op.training for op in layers):
        return False
    first = {shape[:1] for op in layers for shape in (op.input_shape, op.output_shape)}
    return len(first) == 1 and all(len(op.output_shape) > 1 for op in layers)
