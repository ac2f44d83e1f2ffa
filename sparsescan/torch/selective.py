"""Selective scans for PyTorch: the operator ``sparsescan::selective_scan``, and its gradients."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import InputError, InputTypeError, short
from ..execution import selective
from ..execution.selective import Inputs
from .calls.arrays import array_of, check_tensors, here, tensor_of
from .calls.direct import is_direct, is_mapped, is_transformed
from .calls.once import gradients_of, over_maps

_NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")
_OPTIONAL = _NAMES[5:]


@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: Literal[False] = False,
    initial_state: Tensor | None = None,
) -> Tensor: ...


@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    initial_state: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    initial_state: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the outputs of a selective state space model, as Mamba has it.

    With ``δ = softplus(delta + delta_bias)``, or ``delta + delta_bias``, it is, for each channel,

    ``h_t = exp(δ_t A) h_{t-1} + δ_t B_t u_t``, ``y_t = C_t·h_t + D u_t``, ``out_t = y_t silu(z_t)``

    from ``h_0`` on, zeros by default (Gu and Dao, 2023, arXiv 2312.00752, Algorithm 2, with
    ``exp(δ A)`` of equation 4 for states and ``δ B`` for inputs, as in its code). Arguments and
    results are those of ``selective_scan_fn`` of mamba-ssm, which has no initial states, for
    tensors in host memory. States are computed where they are used, forward and backward. Only the
    state before every 32nd step is kept, or less often if a channel has more than 32 states, so
    memory is that of a few tensors of the size of `u`. It is one operator, registered with
    ``torch.library``, so that ``torch.compile`` keeps a graph whole. Results have the same bits for
    any number of threads.

    Gradients of gradients, forward mode and the transforms of ``torch.func`` are computed by
    PyTorch's own operations, step by step: right, but slow.

    Parameters
    ----------
    u, delta : Tensor, shape (batch, channels, length)
        The inputs, and the sizes of steps.
    A : Tensor, shape (channels, states)
        The rates, real.
    B, C : Tensor
        How inputs enter the states, and how these are read: of shape (batch, states, length) the
        same for all channels, of shape (batch, groups, states, length) for those of a group, whose
        number divides that of channels, or of shape (channels, states) constant in time.
    D : Tensor, shape (channels,), optional
        The factor by which inputs are added to the outputs.
    z : Tensor, shape (batch, channels, length), optional
        The gate.
    delta_bias : Tensor, shape (channels,), optional
        The bias that is added to `delta`.
    delta_softplus : bool, default False
        Whether softplus is applied to that sum.
    return_last_state : bool, default False
        Whether to return the last states, too, which are differentiable as well.
    initial_state : Tensor, shape (batch, channels, states), optional
        The states ``h_0``, such as those that another call has returned as last ones; zeros by
        default.

    Returns
    -------
    out : Tensor, shape (batch, channels, length)
        The outputs. All tensors have one dtype, float32 or float64.
    last_state : Tensor, shape (batch, channels, states)
        The states after the last step, if asked for.

    Raises
    ------
    InputError
        If a shape is wrong.
    InputTypeError
        If a type is not supported, such as a complex `A`, or dtypes differ.
    DeviceError
        If a tensor is not in host memory.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.torch import selective_scan
    >>> u = torch.ones(1, 1, 4)
    >>> delta = torch.tensor([[[1.0, 1.0, 0.0, 1.0]]], requires_grad=True)
    >>> A, B = torch.tensor([[-0.6931472]]), torch.ones(1, 1, 4)  # a step of size 1 halves states
    >>> out = selective_scan(u, delta, A, B, C=B)
    >>> out.flatten().tolist()
    [1.0, 1.5, 1.5, 1.75]
    >>> out[..., -1].sum().backward()
    >>> [round(each, 3) for each in delta.grad.flatten().tolist()]
    [0.25, 0.327, -0.02, 0.48]
    """
    given = u, delta, A, B, C, D, z, delta_bias, initial_state
    _check(*given)
    for name, value in (
        ("delta_softplus", delta_softplus),
        ("return_last_state", return_last_state),
    ):
        if not isinstance(value, bool):
            raise InputTypeError(f"{name} is {short(value)}; expected True or False")
    if is_transformed():
        out, last_state = _by_steps(*given, softplus=delta_softplus)
    else:
        keeps = torch.is_grad_enabled() and any(
            each is not None and each.requires_grad for each in given
        )
        if is_direct(*given):
            out, last_state = _Scan.apply(*given, delta_softplus, keeps)
        else:
            out, last_state, _ = _selective_scan(*given, delta_softplus, keeps)
    return (out, last_state) if return_last_state else out


def _check(*given: Any) -> None:
    """Raise an error unless the kernels can take what is given."""
    check_tensors(
        dict(zip(_NAMES, given, strict=True)),
        _OPTIONAL,
        of_complex=": for complex rates use sparsescan.torch.affine_scan",
        of_devices=": on a CUDA device use selective_scan_fn of mamba-ssm",
    )
    shapes: Any = [None if each is None else each.shape for each in given]
    selective.check_shapes(*shapes)


# -- The operators ---------------------------------------------------------------------------------

_GIVEN = (
    "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
    "Tensor? delta_bias, Tensor? initial_state, bool delta_softplus"
)
_library = torch.library.Library("sparsescan", "FRAGMENT")
_library.define(f"selective_scan({_GIVEN}, bool keeps) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"selective_scan_backward(Tensor? grads, Tensor? grads_last, Tensor kept, {_GIVEN}, "
    "bool[] needs) -> Tensor[]"
)
_selective_scan = torch.ops.sparsescan.selective_scan.default
_selective_scan_backward = torch.ops.sparsescan.selective_scan_backward.default


def _inputs(tensors: Any, softplus: bool) -> Inputs:
    u, delta, a, b, c, skip, z, bias, start = map(array_of, tensors)
    return Inputs(u, delta, a, b, c, skip, z, bias, start, softplus)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *given, softplus, keeps = arguments
    with here(given[0]):
        out, last_state, kept = selective.selective_scan(_inputs(given, softplus), keeps=keeps)
    return tensor_of(out), tensor_of(last_state), tensor_of(kept)


def _checked_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Do so for callers of the operator, who may pass anything."""
    _check(*arguments[: len(_NAMES)])
    return _forward(*arguments)


def _backward(*arguments: Any) -> list[Tensor]:
    """Return the gradients in all tensors; those that are not needed are empty."""
    grads, grads_last, kept, *given, softplus, needs = arguments
    with here(kept):
        states, above, above_last = map(array_of, (kept, grads, grads_last))
        inputs = _inputs(given, softplus)
        found = selective.selective_scan_vjp(inputs, states, above, above_last, tuple(needs))
    return [kept.new_empty(0) if each is None else tensor_of(each) for each in found]


def _checked_backward(*arguments: Any) -> list[Tensor]:
    """Do so for callers of the operator, who may pass anything."""
    grads, grads_last, kept, u, _, A, *_ = arguments
    _check(*arguments[3 : 3 + len(_NAMES)])
    (batch, channels, length), states = u.shape, A.shape[1]
    segments = selective.segments_of(length, states)
    shapes = {
        "grads": (grads, (batch, channels, length)),
        "grads_last": (grads_last, (batch, channels, states)),
        "kept": (kept, (batch, segments, states, channels)),
    }
    for name, (each, shape) in shapes.items():
        if each is not None and (each.shape != shape or each.dtype != u.dtype):
            raise InputError(
                f"{name} has shape {tuple(each.shape)} and dtype {each.dtype}; expected {shape} "
                f"and {u.dtype}"
            )
    return _backward(*arguments)


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    u, _, A, *_, keeps = arguments
    batch, channels, length = u.shape
    states = A.shape[1]
    segments = selective.segments_of(length, states) if keeps else 0
    kept = u.new_empty((batch, segments, states, channels))
    return u.new_empty(u.shape), u.new_empty((batch, channels, states)), kept


def _fake_backward(grads: Any, grads_last: Any, kept: Tensor, *arguments: Any) -> list[Tensor]:
    *given, _, needs = arguments
    return [
        kept.new_empty(each.shape if need else 0) for each, need in zip(given, needs, strict=True)
    ]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *given, ctx.softplus, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*given, output[2])


def _differentiate(ctx: Any, grads: Any, grads_last: Any, *_: Any) -> tuple[Tensor | None, ...]:
    *given, kept = ctx.saved_tensors
    needs, above = ctx.needs_input_grad[: len(_NAMES)], (grads, grads_last)
    found: Any = [None] * len(_NAMES)
    if any(each is not None for each in above):
        if any(map(is_mapped, above)):
            found = over_maps(_mapped(ctx.softplus), [*above, *given])
        elif torch.is_grad_enabled() or is_transformed():
            found = _gradients_by_steps(ctx.softplus, above, given)
        else:
            call = _checked_backward if is_direct(*above, *given) else _selective_scan_backward
            found = call(*above, kept, *given, ctx.softplus, list(needs))
    own = (each if need else None for each, need in zip(found, needs, strict=True))
    return (*own, None, None)


class _Scan(torch.autograd.Function):
    """The operator with its gradients, for calls that nothing else wants to see."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *given, ctx.softplus, _ = arguments
        out, last_state, kept = _forward(*arguments)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given, kept)
        return out, last_state

    backward = staticmethod(_differentiate)


# -- By PyTorch's own operations -------------------------------------------------------------------


def _by_steps(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    *,
    softplus: bool,
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the last states, step by step."""
    if delta_bias is not None:
        delta = delta + delta_bias[:, None]
    if softplus:
        delta = functional.softplus(delta)
    pushed = delta * u
    state = u.new_zeros((*u.shape[:2], A.shape[1]))
    if initial_state is not None:
        state = state + initial_state
    channels, outputs = u.shape[1], []
    for t in range(u.shape[2]):
        b, c = (_at_step(each, t, channels) for each in (B, C))
        state = torch.exp(delta[..., t, None] * A) * state + pushed[..., t, None] * b
        outputs.append((state * c).sum(-1))
    out = torch.stack(outputs, -1) if outputs else torch.zeros_like(u)
    if D is not None:
        out = out + D[:, None] * u
    return out if z is None else out * (z * torch.sigmoid(z)), state


def _at_step(factor: Tensor, t: int, channels: int) -> Tensor:
    """Return `B` or `C` at a step, whose shape is such that it goes with those of states."""
    if factor.dim() == 2:
        return factor
    if factor.dim() == 3:
        return factor[:, None, :, t]
    return factor[..., t].repeat_interleave(channels // factor.shape[1], 1)


def _gradients_by_steps(softplus: bool, above: Any, given: Any) -> list[Tensor | None]:
    """Return the gradients in all tensors, with graphs of their own."""
    there = [each for each in given if each is not None]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        rest = iter(tensors)
        every: Any = [None if each is None else next(rest) for each in given]
        return _by_steps(*every, softplus=softplus)

    found = iter(gradients_of(run, there, above))
    return [None if each is None else next(found) for each in given]


def _mapped(softplus: bool) -> Any:
    """Return a call of tensors that gives their gradients; zeros stand for those of None."""

    def call(grads: Any, grads_last: Any, *given: Any) -> list[Tensor]:
        found = _gradients_by_steps(softplus, (grads, grads_last), given)
        return [given[0].new_zeros(0) if each is None else each for each in found]

    return call


_library.impl("selective_scan", _checked_forward, "CPU")
_library.impl("selective_scan_backward", _checked_backward, "CPU")
torch.library.register_fake("sparsescan::selective_scan", _fake_forward, lib=_library)
torch.library.register_fake("sparsescan::selective_scan_backward", _fake_backward, lib=_library)
torch.library.register_autograd(
    "sparsescan::selective_scan", _differentiate, setup_context=_save, lib=_library
)
