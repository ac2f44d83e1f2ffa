"""The operator ``sparsescan::recurrent``: recurrent networks over whole sequences, for PyTorch."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...arrays.arrays import namespace
from ...errors import InputError
from ...locks import new_lock
from ...recurrent.memory import beside, has_reset_states
from ...recurrent.step import TrainingStep
from ...recurrent.step_pool import StepPool, run_forward, runs_on_gpu
from ..conversion.probe import asks_for_some, is_looked_at, probe
from .arrays import array_of, here, tensor_of
from .derivatives import run_differentiable
from .direct import constant, is_direct, is_mapped, is_transformed
from .once import Twice, gradients_of, over_maps
from .recorded import addresses_of
from .saved import HAS_FUSED, check_others, free_places, save, saved
from .shapes import Shape, kind_of, network_of

# How many networks keep training steps for the next call; the latest are kept.
_KEPT = 32


@constant
def _runs_on_gpu(mode: str, has_bias: bool, hidden_size: int, dtype: str) -> bool:
    return runs_on_gpu(kind_of(mode).program(has_bias), hidden_size, dtype)


def has_kernels(mode: str, hidden_size: int, x: Tensor, has_bias: bool = True) -> bool:
    """Return whether there are kernels for a network of this size, and a tensor like `x`."""
    if x.device.type != "cuda":
        return x.device.type == "cpu"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False  # a CUDA graph would keep addresses of memory that others use
    return _runs_on_gpu(mode, has_bias, hidden_size, str(x.dtype)[6:])


def _make(shape: Shape, kept: Sequence[NDArray[np.bool_] | None]) -> TrainingStep:
    return network_of(shape, kept).training_step(**shape.options._asdict())


class _Steps(StepPool[TrainingStep]):
    """Training steps of one network, and the names of its parameters in PyTorch's order."""

    def __init__(self, shape: Shape, kept: Sequence[NDArray[np.bool_] | None]) -> None:
        super().__init__(partial(_make, shape, kept))
        self._names, self._rows = shape.names(), shape.num_layers * shape.directions

    def run(
        self,
        x: Tensor,
        state: Tensor | None,
        lengths: Tensor | None,
        params: Sequence[Tensor],
        resets: Tensor | None,
    ) -> tuple[TrainingStep, Any, Any]:
        """Run a training step forward; return the step and its results."""
        counts = None if lengths is None else lengths.numpy()
        arrays = dict(zip(self._names, map(array_of, params), strict=True))
        begin, anew = array_of(state), None
        if has_reset_states(begin, self._rows):
            begin, anew = begin[::2], begin[1::2]
        return run_forward(self, array_of(x), begin, counts, arrays, array_of(resets), anew)


class _Waiting(NamedTuple):
    """A training step that waits for its backward pass, and a reference to its token."""

    steps: _Steps
    step: TrainingStep
    token: weakref.ref[Tensor]


_lock = new_lock()
_steps: OrderedDict[Any, _Steps] = OrderedDict()
_waiting: dict[int, _Waiting] = {}  # by the address of the token


def _steps_of(
    shape: Shape, x: Tensor, params: Sequence[Tensor], masks: Sequence[Tensor | None]
) -> _Steps:
    """Return the training steps of a network with the current contents of the masks."""
    kept = list(map(_kept, params, masks))
    bits = tuple(None if each is None else np.packbits(each).tobytes() for each in kept)
    key = shape, x.dtype, x.device, bits
    with _lock:
        steps = _steps.get(key)
        if steps is None:
            steps = _steps[key] = _Steps(shape, kept)
            if len(_steps) > _KEPT:
                _steps.popitem(last=False)
        _steps.move_to_end(key)
        return steps


def _kept(weight: Tensor, mask: Tensor | None) -> NDArray[np.bool_] | None:
    """Return which weights are kept; None without a mask, or if a pruned weight is not 0."""
    if mask is None:
        return None
    kept = mask.detach() != 0
    if bool((~kept).logical_and_(weight.detach()).any()):
        return None
    array: NDArray[np.bool_] = kept.cpu().numpy()
    return array


def _forget(address: int, _: Any) -> None:
    """Free a step whose graph is gone without a backward pass."""
    waiting = _waiting.pop(address, None)
    if waiting is not None:
        waiting.steps.give_back(waiting.step)


# -- The operators --------------------------------------------------------------------------------

_ABOUT = (
    "str mode, int hidden_size, int num_layers, bool has_bias, bool bidirectional, int[] options"
)
_COUNT = 6  # of these
_GIVEN = "Tensor x, Tensor? state, Tensor? lengths, Tensor[] params, Tensor?[] masks"
_library = torch.library.Library("sparsescan", "FRAGMENT")
for _name in ("recurrent", "recurrent_forward"):
    _library.define(
        f"{_name}({_GIVEN}, {_ABOUT}, bool keeps, *, Tensor? resets=None) -> (Tensor, Tensor, "
        "Tensor)"
    )
_library.define(
    f"recurrent_backward(Tensor? grad_output, Tensor? grad_state, Tensor token, {_GIVEN}, {_ABOUT},"
    " bool needs_input_grad, *, Tensor? resets=None) -> Tensor[]"
)
# Both return outputs, last states, and a token for what backward needs, if that is kept. They take
# a mask, or None, for each parameter, or no masks at all. After the initial state of each direction
# may come the state that resets set. Only the first operator has gradients.
_recurrent = torch.ops.sparsescan.recurrent.default
_recurrent_forward = torch.ops.sparsescan.recurrent_forward.default
_recurrent_backward = torch.ops.sparsescan.recurrent_backward.default


def run(
    x: Tensor,
    state: Tensor | None,
    lengths: Tensor | None,
    params: list[Tensor],
    masks: list[Tensor | None],
    *about: Any,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the operators' results, by the one that a graph needs, or directly."""
    operators: tuple[Callable[..., Any], ...] = _recurrent_forward, _recurrent
    without, with_graph = (_forward, _with_graph) if is_direct(x, *params) else operators
    call = with_graph if about[_COUNT] else without
    more = {} if resets is None else {"resets": resets}
    results: tuple[Tensor, Tensor, Tensor] = call(x, state, lengths, params, masks, *about, **more)
    return results


def _forward(
    x: Tensor,
    state: Tensor | None,
    lengths: Tensor | None,
    params: list[Tensor],
    masks: list[Tensor | None],
    *about: Any,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    steps = _steps_of(Shape.of(x, about[:_COUNT]), x, params, masks)
    with here(x):
        step, *arrays = steps.run(x, state, lengths, params, resets)
        output, last = map(tensor_of, arrays)
    token = x.new_zeros(1)
    if about[_COUNT]:
        (address,) = addresses_of([token])
        _waiting[address] = _Waiting(steps, step, weakref.ref(token, partial(_forget, address)))
    else:
        steps.give_back(step)
    return output, last, token


def _backward(
    grad_output: Tensor | None,
    grad_state: Tensor | None,
    token: Tensor,
    x: Tensor,
    state: Tensor | None,
    lengths: Tensor | None,
    params: list[Tensor],
    masks: list[Tensor | None],
    *about: Any,
    resets: Tensor | None = None,
) -> list[Tensor]:
    """Return the gradients in the initial states, in all parameters, and in the input."""
    (address,) = addresses_of([token])
    waiting = _waiting.pop(address, None)
    with here(x):
        if waiting is None:
            # Another backward pass has used it, or the token is another tensor.
            steps = _steps_of(Shape.of(x, about[:_COUNT]), x, params, masks)
            step, _, _ = steps.run(x, state, lengths, params, resets)
        else:
            steps, step, _ = waiting
        above = map(array_of, (grad_output, grad_state))
        grads = step.backward(*above, needs_input_grad=about[_COUNT])
        in_state = grads.state
        if grads.reset_states is not None:
            in_state = beside(namespace(in_state), in_state, grads.reset_states)
        arrays = [in_state, *grads.params.values()]
        if grads.input is not None:
            arrays.append(grads.input)
        tensors = [tensor_of(array) for array in arrays]
    steps.give_back(step)
    return tensors


def _fake_forward(
    x: Tensor, state: Any, lengths: Any, params: Any, masks: Any, *about: Any, resets: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    shape, (steps, batch, _) = Shape.of(x, about[:_COUNT]), x.shape
    output = x.new_empty((steps, batch, *shape.output_shape))
    last = x.new_empty((shape.num_layers * shape.directions, batch, shape.state_size))
    return output, last, x.new_empty(1)


def _fake_backward(
    grad_output: Any,
    grad_state: Any,
    token: Any,
    x: Tensor,
    state: Any,
    lengths: Any,
    params: list[Tensor],
    masks: Any,
    *about: Any,
    resets: Any = None,
) -> list[Tensor]:
    shape = Shape.of(x, about[:_COUNT])
    begin = shape.num_layers * shape.directions, x.shape[1], shape.state_size
    begin = begin if state is None else state.shape
    grads = [x.new_empty(begin), *(param.new_empty(param.shape) for param in params)]
    return [*grads, x.new_empty(x.shape)] if about[_COUNT] else grads


class _Recurrent(torch.autograd.Function):
    """The graph of the operator.

    It saves inputs as well as the token of the training step. So a second backward pass through the
    same graph is right too: it runs forward again.
    """

    @staticmethod
    def forward(ctx: Any, about: Any, counts: Any, x: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        given = _Recurrent.given(counts, tensors)
        is_plain = is_direct(x, *tensors)
        call = _forward if is_plain else _recurrent_forward
        output: tuple[Tensor, ...] = call(x, *given, *about, resets=tensors[-2])
        ctx.about, ctx.counts = about[:_COUNT], counts
        # In traces, sizes are not numbers.
        free = _Recurrent.free(ctx, x, tensors) if is_plain else []
        save(ctx, (output[2], x, *tensors), free)
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def free(ctx: Any, x: Tensor, tensors: Any) -> list[int]:
        """Return the places of saved tensors that may change before the first backward pass."""
        _, _, has_x, has_state, _, *has_grad = ctx.needs_input_grad
        state, lengths, *_ = tensors
        count, begin = ctx.counts, () if state is None else (has_state,)
        places = free_places(
            Shape.of(x, ctx.about),
            (has_x, *begin, *has_grad[:count]),
            len(begin),
            is_long=len(x) > 1,
            is_copied=not x.is_contiguous(),
            is_fused=HAS_FUSED and x.dtype is torch.float32 and lengths is None,
        )
        among = [1, *(2 for _ in begin), *range(4, 4 + count)]
        return [among[place] for place in places]

    @staticmethod
    def given(counts: Any, tensors: Any) -> tuple[Any, ...]:
        """Return initial states, lengths, parameters and masks."""
        state, lengths, *rest, _, _ = tensors
        return state, lengths, list(rest[:counts]), list(rest[counts:])

    @staticmethod
    def backward(ctx: Any, *above: Any) -> tuple[Any, ...]:
        token, x, *tensors = saved(ctx)
        given, needs = _Recurrent.given(ctx.counts, tensors), ctx.needs_input_grad[2]
        if _Recurrent.is_dense(ctx, given):
            # Without masks, and with a step that runs forward again.
            token, given = torch.zeros_like(token), (*given[:3], [])
        is_first = is_direct(token, *above[:2]) and addresses_of([token])[0] in _waiting
        if torch.is_grad_enabled() or not is_first:
            check_others(ctx)
        grads = gradients(ctx.about, needs, above[:2], token, (x, *given), tensors[-2])
        below = grads.pop() if needs else None
        state_grad = grads[0] if tensors[0] is not None else None
        rest = len(tensors) - 2 - ctx.counts
        return (None, None, below, state_grad, None, *grads[1:], *(None,) * rest)

    @staticmethod
    def is_dense(ctx: Any, given: tuple[Any, ...]) -> bool:
        """Return whether somebody may use the gradient in a pruned weight."""
        _, _, params, masks = given
        pruned = [
            param for param, mask in zip(params, masks, strict=bool(masks)) if mask is not None
        ]
        return any(map(is_looked_at, pruned)) or (
            bool(pruned) and asks_for_some(ctx, [param.grad_fn for param in pruned])
        )


def gradients(
    about: tuple[Any, ...],
    needs_input_grad: bool,
    above: tuple[Tensor | None, ...],
    token: Tensor,
    given: tuple[Any, ...],
    resets: Tensor | None = None,
) -> list[Tensor]:
    """Return the backward pass's gradients, with a graph if one is needed.

    `above` are the gradients in the two results; `given` are input, initial states, lengths,
    parameters and masks.
    """
    arguments = *above, token, *given, *about, needs_input_grad
    *first, params, masks = given
    own = [*above, resets, *first, *params]
    again = partial(_gradients, about, needs_input_grad)
    if any(map(is_mapped, above)):
        return list(over_maps(again, own))
    if is_transformed():
        return again(*own)
    if torch.is_grad_enabled():
        operator = partial(_recurrent_backward, resets=resets)
        return list(Twice.apply(operator, arguments, again, *own))
    call = _backward if is_direct(*own, *masks) else _recurrent_backward
    grads: list[Tensor] = call(*arguments, resets=resets)
    return grads


def _gradients(about: tuple[Any, ...], needs_input_grad: bool, *given: Any) -> list[Tensor]:
    """Return the backward pass's gradients, by functions that PyTorch can differentiate."""
    grad_output, grad_state, resets, x, state, lengths, *params = given
    shape = Shape.of(x, about)
    if shape.options.truncate is not None:
        raise InputError(
            f"truncate is {shape.options.truncate}, and gradients are differentiated again or "
            "mapped; expected None: truncated gradients are no derivatives of a function"
        )
    begin = state
    if begin is None:
        begin = x.new_zeros((shape.num_layers * shape.directions, x.shape[1], shape.state_size))

    def run(x: Tensor, begin: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
        return run_differentiable(shape, x, begin, params, lengths, resets)

    in_x, *grads = gradients_of(run, (x, begin, *params), (grad_output, grad_state))
    return [*grads, in_x] if needs_input_grad else grads


def _with_graph(
    x: Tensor,
    state: Any,
    lengths: Any,
    params: list[Tensor],
    masks: Any,
    *about: Any,
    resets: Any = None,
) -> Any:
    if not about[_COUNT]:
        with torch.no_grad():
            return _recurrent_forward(x, state, lengths, params, masks, *about, resets=resets)
    own = probe if is_direct(x, *params) else None
    return _Recurrent.apply(about, len(params), x, state, lengths, *params, *masks, resets, own)


for _name in ("recurrent", "recurrent_forward"):
    for _kind in ("CPU", "CUDA"):
        _library.impl(_name, _forward, _kind)
    torch.library.register_fake(f"sparsescan::{_name}", _fake_forward, lib=_library)
for _kind in ("CPU", "CUDA"):
    _library.impl("recurrent_backward", _backward, _kind)
torch.library.register_fake("sparsescan::recurrent_backward", _fake_backward, lib=_library)
_library.impl("recurrent", _with_graph, "Autograd")


# -- Their floating-point operations, for PyTorch's counters ---------------------------------------


@register_flop_formula(torch.ops.sparsescan.recurrent_forward, get_raw=True)
def _forward_flops(
    x: Tensor, state: Any, lengths: Any, params: list[Tensor], *_: Any, **__: Any
) -> int:
    """Return the floating-point operations of all matrix products, as PyTorch counts them."""
    return 2 * _count(x, lengths) * sum(each.numel() for each in params if each.dim() == 2)


@register_flop_formula(torch.ops.sparsescan.recurrent_backward, get_raw=True)
def _backward_flops(above: Any, carry: Any, token: Any, x: Tensor, *given: Any, **_: Any) -> int:
    """Return those of gradients in parameters, layers' inputs, and all but the first states."""
    _, lengths, params, _, *about = given
    shape, count, total = Shape.of(x, tuple(about[:_COUNT])), _count(x, lengths), 0
    first, batch = len(params) // shape.num_layers, x.shape[1]
    # A direction that runs backward starts with samples that have all steps.
    last = batch if lengths is None else int((lengths == len(x)).sum())
    for place, (name, each) in enumerate(zip(shape.names(), params, strict=True)):
        if each.dim() == 2:
            total += 2 * count * each.numel()
            if not name.startswith("weight_ih"):
                begun = last if name.endswith("_reverse") else batch
                total += 2 * (count - begun) * each.numel()
            elif place >= first or about[_COUNT]:
                total += 2 * count * each.numel()
    return total


def _count(x: Tensor, lengths: Tensor | None) -> int:
    """Return how many steps all samples have."""
    return x.shape[0] * x.shape[1] if lengths is None else int(lengths.sum())
