"""Recursive filters for PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.filters import FILTER, filter_along, filter_sections
from .binder import FUNCTIONS, bind
from .calls.arrays import NUMBERS, check_tensors

bind(FILTER)


def lfilter(
    b: Tensor | complex, a: Tensor | complex, x: Tensor, axis: int = -1, zi: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Filter along an axis by a recursive (IIR) filter, whose coefficients may change at each step.

        a_0[t] y[t] = Σ_k b_k[t] x[t-k] - Σ_{k>0} a_k[t] y[t-k]

    This is ``scipy.signal.lfilter`` for PyTorch tensors. It is differentiable any number of times
    in all tensors, in both modes, and under the transforms of ``torch.func``. It is one operator,
    registered with ``torch.library``, so ``torch.compile`` does not break the graph.

    Parameters
    ----------
    b, a : Tensor, shape (taps,), (T, taps) or (…, T, taps), or number
        The coefficients ``b_0, b_1, …`` and ``a_0, a_1, …``: constant, or for each of the `T` steps
        of `x`, or for each sample and step. Axes before the last two broadcast against those of `x`
        without `axis`. A time axis of length 1 means that coefficients do not change. A number is a
        filter with ``b_0`` or ``a_0`` only.
    x : Tensor
        The samples, of any shape. Before the first step they count as zeros.
    axis : int, default -1
        The axis of time.
    zi : Tensor, optional
        Initial conditions in the shape of `x`, but with ``max(len(a), len(b)) - 1`` numbers along
        `axis`: the delays of the transposed direct form II, which ``scipy.signal.lfilter_zi`` and
        ``lfiltic`` return. Axes of length 1 broadcast. They are the terms that earlier steps add to
        the first results, also if coefficients change.

    Returns
    -------
    y : Tensor
        The filtered samples, in the shape of `x`. If coefficients have more axes, so has `y`, and
        `axis` counts from the last axis. The dtype is the one to which PyTorch promotes all
        tensors, as in SciPy: float64 for float64 coefficients and float32 samples. PyTorch's rules
        for scalars hold for numbers and tensors without axes.
    zf : Tensor
        The final delays, if `zi` is given: the `zi` for the samples that follow. If coefficients
        change, later terms use the coefficients of the last step.

    Raises
    ------
    InputError
        If a shape or the axis is wrong, or a constant ``a_0`` is 0.
    InputTypeError
        If a type is not supported. Real and complex numbers are supported.
    DeviceError
        If a tensor is not in host memory.

    See Also
    --------
    sosfilt : A cascade of filters of order two. It rounds less than one filter of high order.
    affine_scan : Linear recurrences of vectors.

    Notes
    -----
    This is the direct form I, equation (6.28) of Oppenheim and Schafer, "Discrete-Time Signal
    Processing", 2010. Each result uses the coefficients of its own step. Other forms give the same
    results only if coefficients are constant. Let ``l[t]`` be the gradients in ``y[t]``. The
    backward pass is a recursive filter from the last step to the first,

        a_0[t] λ[t] = l[t] - Σ_{k>0} a_k[t+k] λ[t+k]

    and gradients are products: ``λ[t] x[t-k]`` in ``b_k[t]``, ``-λ[t] y[t-k]`` in ``a_k[t]``, and
    ``Σ_k b_k[t+k] λ[t+k]`` in ``x[t]``. They are summed where steps or samples share coefficients.
    For complex numbers all factors except ``λ`` are conjugated. Complex samples with real
    coefficients are filtered as two real samples. The bits do not depend on the number of threads.
    Subnormal numbers count as 0.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.torch import lfilter
    >>> decay = torch.tensor(0.5, requires_grad=True)
    >>> x = torch.ones(4)
    >>> y = lfilter(torch.ones(1), torch.stack([torch.ones(()), -decay]), x)
    >>> y.tolist()
    [1.0, 1.5, 1.75, 1.875]
    >>> y[-1].backward()
    >>> decay.grad.item()
    2.75
    """
    b, a, x, zi = _as_tensors(b=b, a=a, x=x, zi=zi)
    filtered: Tensor | tuple[Tensor, Tensor] = filter_along(FUNCTIONS, b, a, x, axis, zi)
    return filtered


def sosfilt(
    sos: Tensor, x: Tensor, axis: int = -1, zi: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Filter along an axis by a cascade of sections of order two, whose coefficients may change.

    Each section filters the output of the section before it, as :func:`lfilter` does:

        a_0[t] y[t] = b_0[t] x[t] + b_1[t] x[t-1] + b_2[t] x[t-2] - a_1[t] y[t-1] - a_2[t] y[t-2]

    This is ``scipy.signal.sosfilt`` for PyTorch tensors, with the derivatives of :func:`lfilter`.
    ``a_0`` need not be 1.

    Parameters
    ----------
    sos : Tensor, shape (sections, 6), (T, sections, 6) or (…, T, sections, 6)
        The coefficients ``b_0, b_1, b_2, a_0, a_1, a_2`` of each section: constant, or for each of
        the `T` steps of `x`, or for each sample and step, as for :func:`lfilter`.
    x : Tensor
        The samples, of any shape.
    axis : int, default -1
        The axis of time.
    zi : Tensor, optional
        Initial conditions, which ``scipy.signal.sosfilt_zi`` returns: shape ``(sections, …)``,
        where the rest is the shape of `x`, but with 2 numbers along `axis`.

    Returns
    -------
    y : Tensor
        The filtered samples, in the shape of `x`, as :func:`lfilter` returns them.
    zf : Tensor
        The final delays, if `zi` is given, in its shape.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`lfilter`.

    See Also
    --------
    lfilter : One filter of any order.

    Notes
    -----
    A cascade of sections is section 6.3.2 of Oppenheim and Schafer, "Discrete-Time Signal
    Processing", 2010.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.torch import sosfilt
    >>> smooth = torch.tensor([[0.5, 0.5, 0.0, 1.0, 0.0, 0.0]] * 2, requires_grad=True)
    >>> y = sosfilt(smooth, torch.tensor([1.0, 0.0, 0.0, 0.0]))
    >>> y.tolist()
    [0.25, 0.5, 0.25, 0.0]
    >>> y.sum().backward()
    >>> smooth.grad[0].tolist()
    [1.0, 1.0, 1.0, -1.0, -1.0, -0.75]
    """
    sos, x, zi = _as_tensors(sos=sos, x=x, zi=zi)
    filtered: Tensor | tuple[Tensor, Tensor] = filter_sections(FUNCTIONS, sos, x, axis, zi)
    return filtered


def _as_tensors(**given: Any) -> list[Any]:
    """Return tensors of one precision; real coefficients stay real."""
    tensors = {
        name: torch.tensor(each) if name in "ba" and _is_number(each) else each
        for name, each in given.items()
    }
    numbers = [name for name, each in given.items() if each is not tensors[name]]
    check_tensors(
        {name: each for name, each in tensors.items() if name not in numbers},
        ("zi",),
        dtypes=NUMBERS,
        are_mixed=True,
        of_devices=": filters run nowhere else",
    )
    there = [each for each in tensors.values() if each is not None]
    if len({each.dtype for each in there}) == 1:
        # The common case; the rest takes as long as a short filter.
        return [
            each if name not in "ba" or each.dim() else each[None] for name, each in tensors.items()
        ]
    there.sort(key=lambda each: each.dim() == 0)
    like = there[0].new_empty(0)
    for each in there[1:]:
        if each.dtype != like.dtype:  # a sum has the promoted dtype
            like = like + each.new_empty(0 if each.dim() else ())
    are_real = not any(tensors[name].is_complex() for name in ("b", "a", "sos") if name in tensors)
    coefficients = like.real.dtype if are_real and like.is_complex() else like.dtype
    return [
        each
        if each is None
        else each.to(like.dtype)
        if name in ("x", "zi")
        else torch.atleast_1d(each).to(coefficients)
        for name, each in tensors.items()
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | complex) and not isinstance(value, bool)
