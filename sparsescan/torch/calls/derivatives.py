"""Layers of recurrent cells under transforms: all derivatives, and axes of samples or models.

There are two functions, a layer's forward pass and its gradients. Transforms of ``torch.func``,
forward mode and double backward use them as follows:

- The directional derivative of a layer is a forward pass of the cell that
  :func:`~sparsescan.recurrent.tangent.tangent_of` makes. The derivative of its gradients is a
  backward pass of the same cell. So there are derivatives of any order.
- A new axis of inputs or states becomes samples. A new axis of parameters, or of per-sample
  gradients, becomes *members*: each has its own parameters or results, and threads share the
  members.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...execution.recording import Recording
from ...execution.threads import lent, share
from ...kernels.addresses import address_of
from ...locks import new_lock
from ...recurrent.arguments import Options
from ...recurrent.definition import shapes_of
from ...recurrent.host_sizes import Extent
from ...recurrent.passes import Passes
from ...recurrent.step_pool import StepPool
from ...recurrent.tangent import Tangent, TangentLayer, run_layers, tangent_of
from ..binder import FUNCTIONS
from .direct import takes_rules
from .once import Mappable, over_maps
from .plain import dropped, run_plain
from .recorded import Room, addresses_of, give_scratch, take_scratch
from .shapes import Shape, kind_of, network_of, register
from .team import ALONE, pytorchs_threads

_DTYPES = (torch.float32, torch.float64)
# The axes of samples of lengths, resets, inputs and initial states.
_SAMPLES = 1, 2, 2, 2


def run_differentiable(
    shape: Shape,
    x: Tensor,
    state: Tensor,
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    resets: Tensor | None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the last states of a network, with support for transforms.

    Layers run in kernels. PyTorch's own operations run them with other dtypes, on other devices,
    during traces, and in nested forward mode.

    Parameters
    ----------
    shape : Shape
        The kind and the sizes of the network.
    x : Tensor, shape (T, batch, inputs)
        The inputs.
    state : Tensor, shape (layers · directions, batch, state_size)
        The initial states; twice as many if each direction's is followed by the one that resets
        set.
    weights : sequence of Tensor
        The parameters of each direction of each layer.
    lengths : Tensor of int64 or None
        How many steps each sample has.
    resets : Tensor of bool or None
        Where states are reset.
    dropout : float
        Share of the outputs between layers that are dropped.
    """
    given = (x, state, *weights)
    if (
        takes_rules(*given, lengths, resets)
        and x.numel() > 0
        and all(each.is_cpu and each.dtype is x.dtype for each in given)
        and x.dtype in _DTYPES
        and not torch.is_autocast_enabled("cpu")
    ):
        return _run_layers(shape, x, state, weights, lengths, resets, dropout)
    kind = kind_of(shape.mode)
    names = list(shapes_of(kind.cell, 1, 1, shape.has_bias))
    rows = range(0, len(weights), len(names))
    cells = [dict(zip(names, weights[k : k + len(names)], strict=True)) for k in rows]
    about = shape.program, cells, shape.directions, x, state, lengths, dropout, resets
    return run_plain(kind.cell, *about, return_states=shape.options.return_states)


def _run_layers(
    shape: Shape,
    x: Tensor,
    state: Tensor,
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    resets: Tensor | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    marks = [None if each is None else each[None] for each in (lengths, resets)]

    def run(k: int, options: Options, numbers: list[Tensor]) -> tuple[Tensor, Tensor]:
        *own, x, begin = (each[None] for each in numbers)
        one = shape._replace(num_layers=1, options=options)
        one = one._replace(input_size=x.shape[-1] - one.further_size)
        output, last = _Layer.apply(one, *marks, x, begin, *own)
        return output[0], last[0]

    sizes = shape.num_layers, shape.directions, shape.hidden_size, shape.further
    between = partial(dropped, share=dropout, lengths=lengths) if dropout else None
    numbers = *weights, x, state
    output, last = run_layers(FUNCTIONS, run, sizes, shape.options, numbers, between)
    return output.unflatten(-1, shape.output_shape), last


class _OfLayer(Mappable):
    """A function of a shape and tensors; its derivatives in both modes read all tensors."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.shape, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)


class _Layer(_OfLayer):
    """A layer for members that have their own parameters.

    It takes lengths and resets, the inputs ``(members, T, batch, inputs)``, the initial states
    ``(members, directions, batch, state_size)`` and the parameters of each direction, all with a
    first axis of members. It returns the outputs and the last states.
    """

    @staticmethod
    def forward(shape: Shape, *tensors: Any) -> tuple[Tensor, ...]:
        return _passes_of(shape, tensors, has_backward=False).run(tensors)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Any:
        return None, None, None, *_Gradients.apply(ctx.shape, *above, *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, _: None, lengths: None, resets: None, *slopes: Tensor | None) -> Any:
        def forward(*each: Tensor | None) -> tuple[Tensor, Tensor]:
            return _Tangent.of(ctx.shape, ctx.saved_tensors, each).forward()

        return over_maps(forward, slopes)

    @staticmethod
    def vmap(info: Any, dims: Any, shape: Shape, *tensors: Any) -> Any:
        count, own = info.batch_size, dims[1:]
        if any(each is not None for each in own[4:]):
            results = _Layer.apply(shape, *_as_members(count, own, tensors))
            return _from_members(count, results)
        pairs = zip(tensors[:4], own, _SAMPLES, strict=False)
        folded = [_as_samples(count, *each) for each in pairs]
        output, last = _Layer.apply(shape, *folded, *tensors[4:])
        return (output.unflatten(2, (count, -1)), last.unflatten(2, (count, -1))), (2, 2)


class _Gradients(_OfLayer):
    """The gradients of :class:`_Layer` in all tensors, from those in its two results."""

    @staticmethod
    def forward(shape: Shape, *tensors: Any) -> tuple[Tensor, ...]:
        above, given = tensors[:2], tensors[2:]
        return _passes_of(shape, given, has_backward=True).run(given, above)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        above, tensors = ctx.saved_tensors[:2], ctx.saved_tensors[2:]
        tangent = _Tangent.of(ctx.shape, tensors, slopes)
        return None, *tangent.forward(), None, None, *tangent.gradients(*above)

    @staticmethod
    def jvp(ctx: Any, _: None, *slopes: Tensor | None) -> Any:
        above, tensors = ctx.saved_tensors[:2], ctx.saved_tensors[2:]

        def gradients(*each: Tensor | None) -> tuple[Tensor, ...]:
            results = _Tangent.of(ctx.shape, tensors, each[4:]).gradients(*above)
            if any(slope is not None for slope in each[:2]):
                more = _Gradients.apply(ctx.shape, *_filled(above, each[:2]), *tensors)
                results = tuple(a + b for a, b in zip(results, more, strict=True))
            return results

        return over_maps(gradients, slopes)

    @staticmethod
    def vmap(info: Any, dims: Any, shape: Shape, *tensors: Any) -> Any:
        count = info.batch_size
        results = _Gradients.apply(shape, *_as_members(count, dims[1:], tensors))
        return _from_members(count, results)


def _as_members(count: int, dims: Sequence[int | None], tensors: Sequence[Any]) -> list[Any]:
    """Return tensors with an axis of a transform joined into their axes of members."""
    folded = []
    for each, dim in zip(tensors, dims, strict=True):
        if each is not None:
            each = each.expand(count, *each.shape) if dim is None else each.movedim(dim, 0)
            each = each.flatten(0, 1)
        folded.append(each)
    return folded


def _from_members(count: int, results: Sequence[Tensor]) -> Any:
    """Return results with the axis of a transform in front, and the place of that axis."""
    return tuple(each.unflatten(0, (count, -1)) for each in results), (0,) * len(results)


def _as_samples(count: int, tensor: Tensor | None, dim: int | None, place: int) -> Any:
    """Return a tensor with an axis of a transform joined into its axis of samples."""
    if tensor is None:
        return None
    moved = tensor.expand(count, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return moved.movedim(0, place).flatten(place, place + 1)


def _filled(tensors: Sequence[Tensor], slopes: Sequence[Tensor | None]) -> list[Tensor]:
    """Return derivatives of tensors, zeros for those that are None."""
    pairs = zip(tensors, slopes, strict=True)
    return [torch.zeros_like(each) if slope is None else slope for each, slope in pairs]


# -- Derivatives -----------------------------------------------------------------------------------


class _Tangent(NamedTuple):
    """A layer that computes the derivative of another layer, with its arguments.

    Attributes
    ----------
    layer : TangentLayer
        What it computes.
    shape : Shape
        Its shape.
    tensors : list of Tensor or None
        Its lengths, resets, inputs, initial states and parameters.
    """

    layer: TangentLayer
    shape: Shape
    tensors: list[Any]

    @classmethod
    def of(cls, shape: Shape, tensors: Sequence[Any], given: Sequence[Tensor | None]) -> _Tangent:
        """Return the layer for the derivative in a direction, `given` for all tensors."""
        lengths, resets, x, state, *params = tensors
        x_slope, state_slope, *turns = _filled(tensors[2:], given)
        mode, tangent = _mode_of(shape.mode, shape.has_bias)
        about = shape.hidden_size, shape.directions, bool(shape.options.return_states)
        layer = TangentLayer(tangent, *about)
        slopes = *turns, x_slope, state_slope
        *whole, inputs, begin = layer.joined(FUNCTIONS, (*params, x, state), slopes)
        made = shape._replace(mode=mode, input_size=2 * shape.input_size, has_bias=True)
        return cls(layer, made, [lengths, resets, inputs, begin, *whole])

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the derivatives of the outputs and the last states."""
        return self.layer.results(*_Layer.apply(self.shape, *self.tensors))

    def gradients(self, in_output: Tensor, in_last: Tensor) -> tuple[Tensor, ...]:
        """Return the derivatives of the gradients, from those in outputs and last states."""
        above = self.layer.above(FUNCTIONS, in_output, in_last)
        x, state, *params = _Gradients.apply(self.shape, *above, *self.tensors)
        *found, in_x, in_state = self.layer.parted(FUNCTIONS, [*params, x, state])
        return in_x, in_state, *found


def _mode_of(mode: str, has_bias: bool) -> tuple[str, Tangent]:
    """Return the mode of the cells for derivatives of other cells, and the parameters' origin."""
    key = mode, has_bias
    if key not in _modes:
        kind = kind_of(mode)
        tangent = tangent_of(kind.cell, kind.options, has_bias)
        _modes[key] = register(tangent.cell, {}, True), tangent
    return _modes[key]


_modes: dict[tuple[str, bool], tuple[str, Tangent]] = {}


# -- Passes ----------------------------------------------------------------------------------------

_MOST = 64  # the most layers with kept recordings, the latest ones
_lock = new_lock()
_passes: OrderedDict[_Key, _MemberPasses] = OrderedDict()


class _MemberPasses:
    """The recorded passes of a layer for one shape of inputs, for any number of members."""

    def __init__(self, key: _Key) -> None:
        shape, (steps, batch, _), self._dtype, *marks, has_backward, _ = key
        has_lengths, has_resets, has_reset_states = marks
        network = network_of(shape)
        kept = max(1, steps) if has_backward else 0
        extent = Extent(steps, batch, kept, False, has_resets, shape.options)
        counts = np.int64 if has_lengths else None
        dtype = str(self._dtype)[6:]
        passes = Passes(network, extent, dtype, lengths=counts, has_reset_states=has_reset_states)
        self._forward = passes.forward
        self._backward: Recording | None = None
        self._back_nbytes = 0
        if has_backward:
            self._backward, self._back_nbytes = passes.backward()
        cells = [cell for layer in network.cells for cell in layer]
        self._names = [f"{name} {k}" for k, cell in enumerate(cells) for name in cell.shapes]
        self._rooms = StepPool(partial(Room, passes.nbytes))

    def run(self, tensors: Sequence[Any], above: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Return the results of all members, or the gradients if `above` is given."""
        lengths, resets, x, *others = tensors
        first, *rest = others
        flags = None if resets is None else resets.view(torch.uint8)
        given = [_rows(each) for each in (x, first, lengths, flags, *rest) if each is not None]
        grads = list(map(_rows, above))
        results, found = (self._results(each, len(x)) for each in (self._forward, self._backward))
        forward = [*given, *map(_Rows.of, results.values())]
        backward = [*grads, *map(_Rows.of, found.values())]

        def run_one(k: int) -> None:
            room = self._rooms.take()
            addresses = [each.address(k) for each in forward]
            self._forward.run_at([room.address, *addresses])
            if self._backward is not None:
                scratch = take_scratch(self._back_nbytes)
                addresses = [each.address(k) for each in backward]
                self._backward.run_at([room.address, address_of(scratch), *addresses])
                give_scratch(scratch)
            self._rooms.give_back(room)

        def run_alone(k: int) -> None:
            with lent(ALONE):
                run_one(k)

        with pytorchs_threads():
            if len(x) == 1:
                run_one(0)
            else:
                share(run_alone, len(x))
        if self._backward is None:
            return results["output"], results["last"]
        return found["input"], found["state"], *(found[name] for name in self._names)

    def _results(self, recording: Recording | None, members: int) -> dict[str, Tensor]:
        return {
            each.name: torch.empty((members, *each.shape), dtype=self._dtype, device="cpu")
            for each in ([] if recording is None else recording.results)
        }


class _Key(NamedTuple):
    """The key of a layer's recordings, which includes its shape and that of a member's inputs."""

    shape: Shape
    x: torch.Size
    dtype: torch.dtype
    has_lengths: bool
    has_resets: bool
    has_reset_states: bool
    has_backward: bool
    threads: int


class _Rows(NamedTuple):
    """The places of a tensor's members, each of which is contiguous."""

    tensor: Tensor
    begin: int
    step: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Rows:
        """Return the places of a tensor's members."""
        return cls(tensor, addresses_of([tensor[0]])[0], tensor.stride(0) * tensor.itemsize)

    def address(self, member: int) -> int:
        """Return the address of a member."""
        return self.begin + member * self.step


def _rows(tensor: Tensor) -> _Rows:
    """Return the places of the members of a tensor, or of a copy if they are not contiguous."""
    tensor = tensor.resolve_neg()
    return _Rows.of(tensor if tensor[0].is_contiguous() else tensor.contiguous())


def _passes_of(shape: Shape, tensors: Sequence[Any], *, has_backward: bool) -> _MemberPasses:
    lengths, resets, x, state, *_ = tensors
    marks = lengths is not None, resets is not None, state.shape[1] > shape.directions
    key = _Key(shape, x.shape[1:], x.dtype, *marks, has_backward, torch.get_num_threads())
    with _lock:
        found = _passes.get(key)
        if found is None:
            found = _passes[key] = _MemberPasses(key)
            while len(_passes) > _MOST:
                _passes.popitem(last=False)
        _passes.move_to_end(key)
        return found
