"""Selective scans for PyTorch."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from ..ops import selective as ops
from .binder import FUNCTIONS, bind
from .calls.arrays import check_tensors

bind(ops.SELECTIVE_SCAN)


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
    """Return the outputs of a selective state space model, such as Mamba.

    With ``δ = softplus(delta + delta_bias)`` or ``delta + delta_bias`` it computes, for each
    channel,

    ``h_t = exp(δ_t A) h_{t-1} + δ_t B_t u_t``, ``y_t = C_t·h_t + D u_t``, ``out_t = y_t silu(z_t)``

    from ``h_0`` on, zeros by default (Gu and Dao, 2023, arXiv 2312.00752, Algorithm 2, with
    ``exp(δ A)`` of equation 4 for states and ``δ B`` for inputs, as in the paper's code). Arguments
    and results are those of ``selective_scan_fn`` of mamba-ssm, plus initial states; tensors are in
    host memory. Both passes recompute states where they need them. Only the state before every 32nd
    step is kept, or less often if a channel has more than 32 states, so the call takes the memory
    of a few tensors of the size of `u`. It is one operator, registered with ``torch.library``, so
    ``torch.compile`` does not break the graph. Results have the same bits for any number of
    threads.

    PyTorch's own operations compute gradients of gradients, forward mode and the transforms of
    ``torch.func``, step by step: correct, but slow.

    Parameters
    ----------
    u, delta : Tensor, shape (batch, channels, length)
        The inputs, and the step sizes.
    A : Tensor, shape (channels, states)
        The rates, real.
    B, C : Tensor
        The vectors that write inputs into states, and that read states. Shape (batch, states,
        length): shared by all channels. Shape (batch, groups, states, length): shared by the
        channels of a group; the number of groups divides that of channels. Shape (channels,
        states): constant in time.
    D : Tensor, shape (channels,), optional
        The factor by which inputs are added to the outputs.
    z : Tensor, shape (batch, channels, length), optional
        The gate.
    delta_bias : Tensor, shape (channels,), optional
        The bias that is added to `delta`.
    delta_softplus : bool, default False
        Whether to apply softplus to that sum.
    return_last_state : bool, default False
        Whether to return the last states too. They are differentiable.
    initial_state : Tensor, shape (batch, channels, states), optional
        The states ``h_0``, such as the last states of another call; zeros by default.

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
    check_tensors(
        dict(zip(ops.NAMES, given, strict=True)),
        ops.NAMES[5:],
        of_complex=": for complex rates use sparsescan.torch.affine_scan",
        of_devices=": on a CUDA device use selective_scan_fn of mamba-ssm",
    )
    found: Tensor | tuple[Tensor, Tensor] = ops.selective_scan(
        FUNCTIONS, given, delta_softplus, return_last_state
    )
    return found
