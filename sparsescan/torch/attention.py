"""Linear attention for PyTorch."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from ..ops import attention as ops
from .binder import FUNCTIONS, bind
from .calls.arrays import check_tensors

bind(ops.LINEAR_ATTENTION)


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    bonus: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_last_state: Literal[False] = False,
) -> Tensor: ...


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    bonus: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    bonus: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the outputs of linear attention, whose states are matrices, with decay and delta rule.

    For each sample and head it computes

    ``S_t = diag(w_t) S_{t-1} + b_t (a_tᵀ S_{t-1}) + k_t v_tᵀ``, ``o_t = S_tᵀ q_t``

    from ``S_0`` on, where ``w`` is `decay`. With a `bonus` ``u``, outputs read the old states,
    ``o_t = S_{t-1}ᵀ q_t + ((q_t ∘ u)·k_t) v_t``, as in RWKV-6. RetNet, gated linear attention,
    DeltaNet, gated DeltaNet, RWKV-6 and RWKV-7, Mamba-2 and the mLSTM are special cases:
    :doc:`each in a few lines </how/attention>`.

    Arguments have the layout of flash-linear-attention; tensors are in host memory. Decay is a
    factor, not a logarithm, and `q` is not scaled (Katharopoulos et al., 2020, arXiv 2006.16236,
    equations 16 to 20, without their normalizer; with `a` and `b` the generalized delta rule of
    Peng et al., 2025, arXiv 2503.14456).

    States stay in the first-level cache. Only the state before every 64th step is kept (with keys
    of more than 64 numbers more often, up to every 16th), so the call takes the memory of a few
    inputs. It is one operator, registered with ``torch.library``, so ``torch.compile`` does not
    break the graph. Threads divide the heads of all samples; results have the same bits for any
    number of threads. PyTorch's own operations compute gradients of gradients, forward mode and the
    transforms of ``torch.func``, step by step: correct, but slow.

    Parameters
    ----------
    q, k : Tensor, shape (batch, length, heads, keys)
        The queries that read the states, and the keys under which values are written.
    v : Tensor, shape (batch, length, heads, values)
        The values.
    decay : Tensor, shape (batch, length, heads) or (batch, length, heads, keys), optional
        The factor of a state, or of each of its rows; a row belongs to a key. An axis of length 1
        means that all samples, steps or heads share the factor. By default nothing decays.
    a, b : Tensor, shape (batch, length, heads, keys), optional
        The vectors of the delta rule: it reads ``a_tᵀ S_{t-1}`` from the old state, and adds the
        result under the key ``b_t``. If `k` has length 1, ``a = k`` and ``b = -β k`` with values
        ``β v`` replace the value under `k`.
    bonus : Tensor, shape (heads, keys), optional
        The weight of a step's own value in its output, for each key.
    initial_state : Tensor, shape (batch, heads, keys, values), optional
        The states ``S_0``, such as the last states of another call; zeros by default.
    return_last_state : bool, default False
        Whether to return the last states too. They are differentiable.

    Returns
    -------
    out : Tensor, shape (batch, length, heads, values)
        The outputs. All tensors have one dtype, float32 or float64.
    last_state : Tensor, shape (batch, heads, keys, values)
        The states after the last step, if asked for.

    Raises
    ------
    InputError
        If a shape is wrong, or if only one of `a` and `b` is given.
    InputTypeError
        If a type is not supported, or dtypes differ.
    DeviceError
        If a tensor is not in host memory.

    Examples
    --------
    A value is written under each of two keys, then one is replaced; the last query reads both.

    >>> import torch
    >>> from sparsescan.torch import linear_attention
    >>> k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])[None, :, None]
    >>> v = torch.tensor([1.0, 2.0, 5.0])[None, :, None, None].requires_grad_()
    >>> q = torch.ones(1, 3, 1, 2)
    >>> linear_attention(q, k, v).flatten().tolist()
    [1.0, 3.0, 8.0]
    >>> out = linear_attention(q, k, v, a=k, b=-k)
    >>> out.flatten().tolist()
    [1.0, 3.0, 7.0]
    >>> out[:, -1].sum().backward()
    >>> v.grad.flatten().tolist()
    [0.0, 1.0, 1.0]
    """
    given = q, k, v, decay, a, b, bonus, initial_state
    check_tensors(
        dict(zip(ops.NAMES, given, strict=True)),
        ops.NAMES[3:],
        of_devices=": on a CUDA device use flash-linear-attention",
    )
    found: Tensor | tuple[Tensor, Tensor] = ops.attend(FUNCTIONS, given, return_last_state)
    return found
