"""NetworkStep: layers forward and backward, all samples at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...arrays.arrays import check_memory
from ...checks import check_count_or_none, check_flag, check_has_shape
from ...errors import Allocating, InputError, InputTypeError, MemoryLimitError, short
from ...execution.calls import LINE, aligned_zeros, call_all
from ...execution.sharing import quiet
from ...formatting import align, exact_bytes, format_bytes
from ...kernels.cpu.lanes import lanes
from ..activations import ReLU
from ..normalization import BatchNorm
from ..pooling import MaxPool2d
from ..reshape import Flatten
from ..shared.checks import Shape, on_host
from ..shared.kron import Separable
from ..shared.operator import Operator
from ..shared.stencil import Weighing
from .checkpoints import choose_segments, needed_bytes
from .places import Map
from .stages import (
    Add,
    Apply,
    ChannelWork,
    LayerStage,
    Normalise,
    Pool,
    Samples,
    Span,
    Task,
    in_lanes,
    put_grad,
    samples_of,
    write,
)
from .weighted import Mix, Multiply, Weigh, WeighAll, WeightStage

Array = NDArray[Any]


class NetworkGradients(NamedTuple):
    """Gradients of a loss, which :meth:`NetworkStep.backward` returns.

    Attributes
    ----------
    input : ndarray or None, shape of the input
        The gradient in the input; None if it was not asked for.
    params : dict of str to ndarray
        The gradient in each parameter, summed over samples, by names such as ``"0.weight"``.
    """

    input: Array | None
    params: dict[str, Array]


class NetworkStep:
    """Compute a network of layers and all its gradients, again and again.

    A call of :meth:`forward` and a call of :meth:`backward` are a whole training step, except for
    the loss and the optimiser. Convolutions and linear layers use only the kept weights, in all
    three passes, and write no Jacobian. Where it is faster they use all weights, with pruned ones
    as 0; ``print(step)`` says so. The object reuses its memory in the next training step, so only
    one thread at a time may call it. :meth:`.jacobians.Sequential.training_step` makes it.

    Gradients are those of :meth:`.jacobians.Sequential.param_grads` and of a scan, up to rounding.
    Their bits do not depend on the number of threads, except for large dense matrices, which BLAS
    multiplies.

    Parameters
    ----------
    network : Sequential
        The network. Each :meth:`forward` reads its parameters. :meth:`backward` reads them again,
        except those of convolutions and linear layers.
    memory_limit : int, optional
        The most bytes to take, without parameters, tables of them and the caller's arrays; by
        default what the machine has. If activations and gradients do not fit, some activations are
        not kept, and :meth:`backward` recomputes them, each at most once.

    Attributes
    ----------
    nbytes : int
        Bytes that are kept for inputs of the last shape.
    has_batch_axis : bool
        Whether the network works on whole batches, and each layer keeps the first axis.

    Notes
    -----
    Samples are the lanes of vectors, 16 float32 numbers at a time with AVX-512. If that would leave
    many lanes empty, a vector holds neighbouring pixels. A network with a :class:`.BatchNorm2d` in
    training mode works on whole batches, ``(N, C, H, W)``; then the ``N`` samples are the lanes.

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

    def __init__(self, network: Any, memory_limit: int | None = None) -> None:
        self.network = network
        self.memory_limit = check_count_or_none("memory_limit", memory_limit, 0)
        self.has_batch_axis = _holds_batch(network.layers)
        self._maps: list[Map] = []
        self._stages: list[LayerStage] = []
        self._first = self._map(network.input_shape)
        self._last = self._build(network.ops, self._first)
        self._samples: Samples | None = None
        self._segments: list[_Segment] = []
        self._nbytes = 0
        self._is_forward = False
        self._lead: Shape = ()

    @property
    def nbytes(self) -> int:
        return 0 if self._samples is None else self._nbytes

    def __repr__(self) -> str:
        kept = ""
        if self._samples is not None:
            kept = f": {self._samples.batch} samples, {format_bytes(self.nbytes)}"
            again = sum(len(segment.stages) for segment in self._segments[:-1])
            if again:
                kept += f", {again} of {len(self._stages)} layers computed twice"
        return f"NetworkStep({self.network!r}){kept}"

    def __str__(self) -> str:
        rows = [["layer", "weights", "kept", ""]]
        for stage in self._stages:
            if isinstance(stage, WeightStage):
                kept = stage.op.kept_weights()
                share = f"{kept.mean():.3g}" if kept.size else "-"
                layer = f"{stage.name} {type(stage.op).__name__}"
                rows.append([layer, f"{kept.size:,}", share, stage.reason])
        return "\n".join([repr(self), *align(rows)])

    # -- Building ---------------------------------------------------------------------------------

    def _map(self, shape: Shape) -> Map:
        self._maps.append(Map(shape[1:] if self.has_batch_axis else shape))
        return self._maps[-1]

    def _build(self, ops: Sequence[Any], source: Map, branch: str = "") -> Map:
        """Add the stages of some layers; return what the last one writes."""
        alone = False  # whether nothing else reads what the layer before has written
        flattened: Any = None  # what is left out, since its places are the same, and its name
        for k, op in enumerate(ops):
            name = f"{branch}{k}"
            if hasattr(op, "shortcut"):
                if flattened is not None:
                    # Maps that are added have one shape.
                    result = self._map(flattened[1].output_shape)
                    self._stages.append(Apply(*flattened, result, source))
                    source, flattened = result, None
                ends = [
                    self._build(op.ops, source, f"{name}."),
                    self._build(op.shortcut, source, f"{name}.shortcut."),
                ]
                self._maps.append(Map(ends[0].shape))
                result = self._maps[-1]
                for end in ends:
                    # Nothing else reads the end of a branch but the sum.
                    if end is not source and not end.rectified:
                        end.join(result)
                self._stages.append(Add(name, None, result, *ends))
                source, alone = result, True
            elif isinstance(op, Flatten) and not branch and self._keeps_places(op):
                flattened = name, op
            elif isinstance(op, ReLU) and alone:
                source.rectified, alone = True, False
            else:
                kind: Any = Apply
                if isinstance(op, MaxPool2d):
                    kind = Pool
                elif isinstance(op, Separable):
                    kind = Mix
                elif isinstance(op, BatchNorm) and op.training == self.has_batch_axis:
                    kind = Normalise
                elif isinstance(op, Weighing):
                    kind = next(each for each in (Multiply, WeighAll, Weigh) if each.pays(op))
                result = self._map(op.output_shape)
                self._stages.append(kind(name, op, result, source))
                source, flattened = result, None
                alone = kind not in (Apply, Pool)
        return source

    def _keeps_places(self, op: Flatten) -> bool:
        """Return whether what reads the result may read the source: features, or its images.

        Within a residual block it may not, since maps that are added have one shape.
        """
        features = len(op.output_shape) == 1 + self.has_batch_axis
        return features or op.output_shape[-2:] == op.input_shape[-2:]

    def _may_end(self) -> NDArray[np.bool_]:
        """Return whether all that is read behind each stage is its result."""
        written = {self._first: -1} | {each.result: k for k, each in enumerate(self._stages)}
        read = np.zeros(len(self._stages) + 1, np.int64)  # the last stage before which each is read
        for k, stage in enumerate(self._stages):
            for source in stage.sources:
                read[written[source] + 1] = k
        return np.maximum.accumulate(read)[:-1] <= np.arange(len(self._stages))

    def _allocate(self, samples: Samples) -> None:
        more, itemsize = lanes(samples.dtype), samples.dtype.itemsize

        def room(*counts: int) -> int:
            """Return bytes of arrays that each begin with a cache line, with lanes behind them."""
            return sum(-(-(count + more) * itemsize // LINE) * LINE for count in counts)

        def arrays(one: Map) -> tuple[int, ...]:
            return (one.size * samples.numbers,) * (2 if one.twin is None else 1)

        maps = np.array([room(*arrays(stage.result)) for stage in self._stages], np.int64)
        kept = np.array([room(stage.numbers(samples)) for stage in self._stages], np.int64)
        first = LINE + room(*arrays(self._first))
        limit = np.iinfo(np.int64).max if self.memory_limit is None else self.memory_limit
        ends = choose_segments(maps, kept, self._may_end(), limit - first)
        needed = first + needed_bytes(ends, maps, kept)
        if needed > limit:
            raise MemoryLimitError(
                f"memory_limit is {exact_bytes(limit)}; {samples.batch} samples need at least "
                f"{exact_bytes(needed)}"
            )
        check_memory(f"{samples.batch} samples", needed)
        whole = aligned_zeros((needed - LINE) // itemsize, samples.dtype)
        end = 0

        def take(count: int) -> Array:
            nonlocal end
            begin, end = end, end + room(count) // itemsize
            return whole[begin : begin + count + more]

        def place(one: Map) -> None:
            one.blocks, one.room = samples.blocks, samples.room
            one.x = take(arrays(one)[0])
            one.grad = take(arrays(one)[0]) if one.twin is None else one.twin.grad

        place(self._first)
        for stage_end in ends:
            place(self._stages[stage_end - 1].result)
        shared, self._segments = end, []
        for a, b in pairwise([0, *ends]):
            end, stages = shared, self._stages[a:b]
            # A twin is made before its other.
            for stage in stages[-2::-1]:
                place(stage.result)
            for stage in stages:
                stage.bind(samples, take(stage.numbers(samples)))
            self._segments.append(_Segment.of(stages, whole[shared:]))
        self._samples, self._nbytes = samples, needed

    # -- Forward ----------------------------------------------------------------------------------

    @Allocating("a training step")
    @quiet
    def forward(self, x: ArrayLike) -> Array:
        """Compute the output of the last layer, and keep what backward needs.

        Parameters
        ----------
        x : array_like of float32 or float64, shape ``(batch, *input_shape)`` or ``input_shape``
            The inputs.

        Returns
        -------
        ndarray, shape ``(batch, *output_shape)`` or ``output_shape``
            The outputs, of the dtype to which `x` and all parameters promote.

        Raises
        ------
        InputError, InputTypeError
            If the shape or the dtype is wrong.
        DeviceError
            If an array, or a parameter, is on a GPU.
        MemoryLimitError
            If activations and gradients take more memory than `memory_limit`, even with
            recomputation, or more than there is.
        """
        self._is_forward = False
        x = on_host("x", x)
        shape = self.network.input_shape
        lead = x.shape[: x.ndim - len(shape)]
        if x.shape[len(lead) :] != shape or len(lead) > (not self.has_batch_axis):
            expected = f"{shape}" if self.has_batch_axis else f"(batch, {str(shape)[1:]} or {shape}"
            raise InputError(f"x has shape {x.shape}; expected {expected}")
        params = [
            on_host(name, param)
            for stage in self._stages
            for name, param in stage.named_params().items()
        ]
        dtype = np.result_type(x, *params)
        batch = len(x) if lead or self.has_batch_axis else 1
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
        for segment in self._segments:
            segment.forward(is_only=len(self._segments) == 1)
        self._is_forward = True
        y = samples_of(self._last, self._last.x, samples)
        return y.reshape(*lead, *self.network.output_shape)

    def kept_weights(self, name: str) -> Array:
        """Return a copy of the kept weights of a layer that the last forward pass read.

        Parameters
        ----------
        name : str
            The name of a convolution or a linear layer.

        Returns
        -------
        ndarray, shape (kept,)
            The kept weights, in order.
        """
        (stage,) = (each for each in self._stages if each.name == name)
        assert isinstance(stage, WeightStage)
        return stage.kept_weights()

    def update_running_stats(self) -> None:
        """Update running statistics with the batch of the last forward pass, as PyTorch does.

        Call it between :meth:`forward` and :meth:`backward`. It updates each :class:`.BatchNorm2d`
        in training mode that has statistics, like :meth:`~.BatchNorm2d.update_running_stats`.

        Raises
        ------
        InputError
            If there was no forward pass, or a layer does not keep the axis of samples first.
        """
        if not self._is_forward:
            raise InputError("update_running_stats was called without a forward pass before it")
        if not self.has_batch_axis and any(map(_couples, self.network.layers)):
            raise InputError(
                "update_running_stats needs layers that all keep the axis of samples first; "
                f"their outputs are {[op.output_shape for op in self.network.layers]}"
            )
        for stage in self._stages:
            if isinstance(stage, Normalise):
                stage.update_running_stats()

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
        """Return the gradients of the loss; call it once after each :meth:`forward`.

        Parameters
        ----------
        grad_output : array_like, shape of the output
            Gradient in the result of :meth:`forward`.
        needs_input_grad : bool, default True
            Whether to compute the gradient in the input.
        out : dict of str to ndarray, optional
            The `params` of an earlier result of this object, to overwrite. Gradients of pruned
            weights stay 0. This saves clearing arrays that are mostly 0.

        Returns
        -------
        NetworkGradients
            The gradients in the input and in the parameters.

        Raises
        ------
        InputError, InputTypeError, DeviceError
            If a shape or a dtype is wrong, an array is on a GPU, or no forward pass came before:
            each backward pass uses up its forward pass.
        """
        needs_input_grad = check_flag("needs_input_grad", needs_input_grad)
        samples = self._samples
        if samples is None or not self._is_forward:
            raise InputError("backward was called without a forward pass before it")
        grad = on_host("grad_output", grad_output)
        expected = (*self._lead, *self.network.output_shape)
        check_has_shape("grad_output", grad, expected)
        rooms = self._rooms(out, samples)
        self._is_forward = False
        last, wanted = self._last, self._wanted(needs_input_grad)
        put_grad(last, in_lanes(last, grad, samples), add=False)
        written = set[Map]()
        for segment in reversed(self._segments):
            if segment is not self._segments[-1]:
                segment.forward(is_only=False)
            segment.backward(wanted, written, rooms)
        below = None
        if needs_input_grad:
            below = samples_of(self._first, self._first.grad, samples)
            below = below.reshape(*self._lead, *self.network.input_shape)
        return NetworkGradients(below, rooms)

    def _wanted(self, needs_input_grad: bool) -> set[Map]:
        """Return the maps whose gradients are needed."""
        wanted = {self._first} if needs_input_grad else set[Map]()
        for stage in self._stages:
            if stage.params or not wanted.isdisjoint(stage.sources):
                wanted.add(stage.result)
        return wanted

    def _rooms(self, out: Mapping[str, Array] | None, samples: Samples) -> dict[str, Array]:
        """Return where gradients of parameters are written: in `out`, or in zeros."""
        if not isinstance(out, Mapping | None):
            raise InputTypeError(f"out is {short(out)}; expected the params of an earlier result")
        rooms = {}
        for stage in self._stages:
            for name, param in stage.named_params().items():
                full = f"{stage.name}.{name}"
                room = np.zeros(param.shape, samples.dtype) if out is None else out.get(full)
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
                rooms[full] = room if out is None else room.view()
        return rooms


class _Group(NamedTuple):
    """Stages of which each works on the channels that the one before has written.

    So a thread runs all of them for its channels, which are in its cache, before it waits for
    others.
    """

    stages: tuple[LayerStage, ...]
    parts: list[Span]

    def forward(self) -> None:
        """Run all forward passes, again if one of them was not settled."""
        for _ in range(1 + len(self.stages)):
            self._run([stage.forward for stage in self.stages])
            if all(stage.is_settled() for stage in self.stages):
                break

    def backward(self, wanted: set[Map]) -> None:
        """Run all backward passes of what is wanted."""
        self._run([stage.backward for stage in self.stages if stage.result in wanted])

    def _run(self, passes: list[Callable[[Span], None]]) -> None:
        def run(part: Span) -> None:
            for each in passes:
                each(part)

        call_all([partial(run, part) for part in self.parts])


class _Segment(NamedTuple):
    """Stages whose results are kept until the next segment runs, but the last one, which stays.

    Attributes
    ----------
    stages : list of LayerStage
        In the order of the network.
    ahead, back : list of _Group
        How they run forward, and backward.
    shared : ndarray
        The memory of all results but the last.
    """

    stages: list[LayerStage]
    ahead: list[_Group]
    back: list[_Group]
    shared: Array

    @classmethod
    def of(cls, stages: list[LayerStage], shared: Array) -> _Segment:
        """Return stages that have been bound to their arrays."""
        return cls(stages, _groups(stages), _groups(stages[::-1], back=True), shared)

    def forward(self, *, is_only: bool) -> None:
        """Run all forward passes; others may have used the memory, unless there are none."""
        if not is_only:
            # Borders, and lanes behind the last sample, are 0.
            self.shared[:] = 0
        for group in self.ahead:
            group.forward()

    def backward(self, wanted: set[Map], written: set[Map], rooms: dict[str, Array]) -> None:
        """Run all backward passes of what is wanted; write gradients of parameters."""
        for stage in reversed(self.stages):
            adds: list[bool | None] = []
            for source in stage.sources:
                adds.append(source in written if source in wanted else None)
                written.add(source)
            stage.begin_backward(adds)
        for group in self.back:
            group.backward(wanted)
        tasks: list[Task] = []
        for stage in self.stages:
            if stage.result in wanted:
                tasks += stage.param_grads({k: rooms[f"{stage.name}.{k}"] for k in stage.params})
        call_all(tasks)


def _groups(stages: Sequence[LayerStage], *, back: bool = False) -> list[_Group]:
    """Return stages in the order in which they run, in groups."""
    groups: list[list[LayerStage]] = []
    works: list[ChannelWork] = []
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
            works[-1] = ChannelWork(works[-1].ends + work.ends)
            continue
        groups.append([stage])
        works.append(work)
    return [_Group(tuple(group), work.parts()) for group, work in zip(groups, works, strict=True)]


def _holds_batch(layers: Sequence[Operator]) -> bool:
    """Return whether the first axis of every layer is that of the samples of a batch."""
    if not any(map(_couples, layers)):
        return False
    first = {shape[:1] for op in layers for shape in (op.input_shape, op.output_shape)}
    return len(first) == 1 and all(len(op.output_shape) > 1 for op in layers)


def _couples(op: Operator) -> bool:
    """Return whether a layer normalises by the statistics of a batch."""
    return isinstance(op, BatchNorm) and op.training
