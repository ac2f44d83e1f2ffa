"""Recursive filters for PyTorch: the operator ``sparsescan::filter``, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ops import filters
from .calls.arrays import NUMBERS, array_of, check_tensors, here, tensor_of
from .calls.direct import is_direct, is_mapped, is_transformed, takes_rules
from .calls.once import Mappable, over_maps


def lfilter(
    b: Tensor | complex, a: Tensor | complex, x: Tensor, axis: int = -1, zi: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Filter along an axis by a recursive (IIR) filter, whose coefficients may change at each step.

        a_0[t] y[t] = Σ_k b_k[t] x[t-k] - Σ_{k>0} a_k[t] y[t-k]

    As ``scipy.signal.lfilter``, for tensors of PyTorch, and differentiable any number of times in
    all of them, in both modes, and under the transforms of ``torch.func``. It is one operator,
    registered with ``torch.library``, so that ``torch.compile`` keeps a graph whole.

    Parameters
    ----------
    b, a : Tensor, shape (taps,), (T, taps) or (…, T, taps), or number
        The coefficients ``b_0, b_1, …`` and ``a_0, a_1, …``: constant, or those of each of the `T`
        steps of `x`, or of each sample, too. Axes before the last two broadcast against those of
        `x` without `axis`; a time axis of length 1 stands for coefficients that do not change. A
        number is ``b_0`` or ``a_0`` alone.
    x : Tensor
        The samples, of any shape. There are zeros before their first step.
    axis : int, default -1
        The axis of time.
    zi : Tensor, optional
        Initial conditions: of the shape of `x`, but with ``max(len(a), len(b)) - 1`` numbers along
        `axis`, the delays of the transposed direct form II, as ``scipy.signal.lfilter_zi`` and
        ``lfiltic`` make them. Axes of length 1 broadcast. They are what steps before the first one
        add to the first results; where coefficients change, too.

    Returns
    -------
    y : Tensor
        The filtered samples, of the shape of `x`. If coefficients have more axes, so has `y`;
        `axis` then counts from the last one. The dtype is what PyTorch promotes those of all
        tensors to, as SciPy does: float64 for coefficients of float64 and samples of float32. A
        number, or a tensor without axes, counts as PyTorch counts numbers.
    zf : Tensor
        The final delays, if `zi` is given: `zi` of the samples that follow. Where coefficients
        change, those of the last step count for what the steps add to later results.

    Raises
    ------
    InputError
        If a shape or the axis is wrong, or a constant ``a_0`` is 0.
    InputTypeError
        If a type is not supported. Real and complex numbers are.
    DeviceError
        If a tensor is not in host memory.

    See Also
    --------
    sosfilt : A cascade of filters of order two, which rounds less than one of a high order.
    affine_scan : Linear recurrences of vectors.

    Notes
    -----
    This is the direct form I, equation (6.28) of Oppenheim and Schafer, "Discrete-Time Signal
    Processing", 2010, with the coefficients of the step whose result is computed. Other forms are
    equal while coefficients are constant; while they change, each has its own results. With
    gradients ``l[t]`` in ``y[t]``, one more recursive filter runs from the last step to the first,

        a_0[t] λ[t] = l[t] - Σ_{k>0} a_k[t+k] λ[t+k]

    and gradients are products: ``λ[t] x[t-k]`` in ``b_k[t]``, ``-λ[t] y[t-k]`` in ``a_k[t]``, and
    ``Σ_k b_k[t+k] λ[t+k]`` in ``x[t]``; sums of them, where steps or samples share coefficients;
    with conjugates of all but ``λ``, for complex numbers. Complex samples with real coefficients
    are two real ones each. The bits do not depend on the number of threads. Subnormal numbers count
    as 0.

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
    *coefficients, x, zi = _as_tensors(b=b, a=a, x=x, zi=zi)
    shapes = {name: each.shape for name, each in zip("bax", (*coefficients, x), strict=True)}
    axis, batch = filters.read_lfilter(**shapes, axis=axis, zi=None if zi is None else zi.shape)
    samples = _folded(x, axis, batch)
    b, a = (_shared(each if each.dim() > 1 else each[None], 2, batch) for each in coefficients)
    if zi is None:
        return _unfolded(_filter(b, a, samples, None), axis, batch)
    y, final = _with_delays(b, a, samples, _folded(zi, axis, batch))
    return _unfolded(y, axis, batch), _unfolded(final, axis, batch)


def sosfilt(
    sos: Tensor, x: Tensor, axis: int = -1, zi: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Filter along an axis by a cascade of sections of order two, whose coefficients may change.

    Each section filters the output of the section before it, as :func:`lfilter` does:

        a_0[t] y[t] = b_0[t] x[t] + b_1[t] x[t-1] + b_2[t] x[t-2] - a_1[t] y[t-1] - a_2[t] y[t-2]

    As ``scipy.signal.sosfilt``, for tensors of PyTorch, and as differentiable as :func:`lfilter`.
    ``a_0`` need not be 1.

    Parameters
    ----------
    sos : Tensor, shape (sections, 6), (T, sections, 6) or (…, T, sections, 6)
        The coefficients ``b_0, b_1, b_2, a_0, a_1, a_2`` of each section: constant, or those of
        each of the `T` steps of `x`, or of each sample, too, as those of :func:`lfilter`.
    x : Tensor
        The samples, of any shape.
    axis : int, default -1
        The axis of time.
    zi : Tensor, optional
        Initial conditions: of shape ``(sections, …)``, then that of `x`, but with 2 numbers along
        `axis`, as ``scipy.signal.sosfilt_zi`` makes them.

    Returns
    -------
    y : Tensor
        The filtered samples, of the shape of `x`, as :func:`lfilter` returns them.
    zf : Tensor
        The final delays, if `zi` is given, of its shape.

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
    start = None if zi is None else zi.shape
    axis, batch = filters.read_sosfilt(sos.shape, x.shape, axis, start)
    samples = _folded(x, axis, batch)
    own = sos if sos.dim() > 2 else sos[None]
    sections = [each.split(3, -1) for each in _shared(own, 3, batch).unbind(2)]
    if zi is None:
        for b, a in sections:
            samples = _filter(b, a, samples, None)
        return _unfolded(samples, axis, batch)
    finals = []
    for (b, a), each in zip(sections, zi, strict=True):
        samples, final = _with_delays(b, a, samples, _folded(each, axis, batch))
        finals.append(_unfolded(final, axis, batch))
    return _unfolded(samples, axis, batch), torch.stack(finals)


# -- Checks and shapes -----------------------------------------------------------------------------


def _as_tensors(**given: Any) -> list[Any]:
    """Return tensors of one precision, of which coefficients that are real stay real."""
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
    there.sort(key=lambda each: each.dim() == 0)
    like = there[0].new_empty(0)
    for each in there[1:]:
        if each.dtype != like.dtype:  # sums have the dtype that PyTorch promotes both to
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


def _folded(x: Tensor, axis: int, batch: tuple[int, ...]) -> Tensor:
    """Return samples end to end, ``(N, T)``."""
    moved = x.movedim(axis, -1)
    return moved.expand(*batch, -1).reshape(math.prod(batch), moved.shape[-1])


def _shared(each: Tensor, own: int, batch: tuple[int, ...]) -> Tensor:
    """Return coefficients of every sample, or one for all; the last `own` axes are theirs."""
    lead, rest = each.shape[:-own], each.shape[-own:]
    if not filters.is_per_sample(lead):
        return each.reshape(1, *rest)
    return each.expand(*batch, *rest).reshape(math.prod(batch), *rest)


def _unfolded(samples: Tensor, axis: int, batch: tuple[int, ...]) -> Tensor:
    return samples.reshape(*batch, samples.shape[-1]).movedim(-1, axis).contiguous()


def _with_delays(b: Tensor, a: Tensor, x: Tensor, zi: Tensor) -> tuple[Tensor, Tensor]:
    """Return filtered samples, and the delays behind the last of them.

    The delays of the transposed direct form II are what earlier steps will add to later results.
    """
    size, steps = zi.shape[1], x.shape[1]
    if not steps:
        return x, zi
    y = _filter(b, a, x, a[:, :size, 0] * zi[:, :steps])
    final = pad(zi, (0, min(size, steps)))[:, min(size, steps) :]
    # Coefficients of the last step count for those that follow.
    b, a = b[:, -1], a[:, -1]
    ahead = torch.arange(size)
    # Row j is of the step that is so many before the last, and column i of i steps behind it.
    k = size + ahead - ahead[:, None]
    reaches = k <= size
    for factors, given, sign in ((b, x, 1), (a, y, -1)):
        padded = pad(factors / a[:, :1], (0, size + 1 - factors.shape[-1]))
        chosen = padded.index_select(1, k.clamp(max=size).flatten())
        table = (chosen.unflatten(1, k.shape) * sign * reaches).to(given.dtype)
        last = pad(given, (size, 0))[:, steps:]
        final = final + torch.matmul(last[:, None], table)[:, 0]
    return y, final


# -- The operators ---------------------------------------------------------------------------------

_library = torch.library.Library("sparsescan", "FRAGMENT")
_library.define("filter(Tensor b, Tensor a, Tensor x, Tensor? start) -> Tensor")
_library.define(
    "filter_backward(Tensor grads, Tensor b, Tensor a, Tensor x, Tensor y, int starts, "
    "bool[] needs) -> Tensor[]"
)
_filter_op = torch.ops.sparsescan.filter.default
_filter_backward_op = torch.ops.sparsescan.filter_backward.default


def _filter(b: Tensor, a: Tensor, x: Tensor, start: Tensor | None) -> Tensor:
    """Return filtered samples, as :func:`sparsescan.ops.filters.filter_samples` does."""
    if x.is_complex() and not a.is_complex():
        # Its parts are more samples.
        b, a = (each if len(each) == 1 else each.repeat(2, 1, 1) for each in (b, a))
        parts: Any = [
            None if each is None else torch.cat([each.real, each.imag]) for each in (x, start)
        ]
        return torch.complex(*_filter(b, a, *parts).chunk(2))
    given = b, a, x, start
    if is_transformed():
        run: Callable[..., Tensor] = _TransformedFilter.apply if takes_rules(*given) else _by_steps
        return run(*given)
    if is_direct(*given):
        direct: Tensor = _Filter.apply(*given)
        return direct
    filtered: Tensor = _filter_op(*given)
    return filtered


def _forward(b: Tensor, a: Tensor, x: Tensor, start: Tensor | None) -> Tensor:
    with here(x):
        return tensor_of(filters.filter_samples(*map(array_of, (b, a, x, start))))


def _backward(
    grads: Tensor, b: Tensor, a: Tensor, x: Tensor, y: Tensor, starts: int, needs: list[bool]
) -> list[Tensor]:
    """Return the gradients that are needed, and nothing in place of others."""
    if x.is_complex():
        gradients = _again(starts, grads, b, a, x, y)
        return [
            each if need else x.new_empty(0) for each, need in zip(gradients, needs, strict=True)
        ]
    with here(x):
        given = array_of(b), array_of(a), array_of(x), array_of(y)
        found = filters.filter_samples_vjp(array_of(grads), *given, starts, needs)
        return [x.new_empty(0) if each is None else tensor_of(each) for each in found]


def _fake_forward(b: Tensor, a: Tensor, x: Tensor, start: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


def _fake_backward(
    grads: Tensor, b: Tensor, a: Tensor, x: Tensor, y: Tensor, starts: int, needs: list[bool]
) -> list[Tensor]:
    shapes = b.shape, a.shape, x.shape, (x.shape[0], starts)
    return [x.new_empty(shape if need else (0,)) for shape, need in zip(shapes, needs, strict=True)]


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    b, a, x, start = inputs
    ctx.starts = 0 if start is None else start.shape[1]
    ctx.save_for_backward(b, a, x, output)


def _differentiate(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
    b, a, x, y = ctx.saved_tensors
    needs, starts = list(ctx.needs_input_grad[:4]), ctx.starts
    if is_mapped(grads):
        gradients = over_maps(partial(_again, starts), [grads, b, a, x, y])
    elif torch.is_grad_enabled() or is_transformed():
        gradients = _again(starts, grads, b, a, x, y)
    else:
        call = _backward if is_direct(grads, b, a, x, y) else _filter_backward_op
        gradients = call(grads, b, a, x, y, starts, needs)
    return tuple(each if need else None for each, need in zip(gradients, needs, strict=True))


class _Filter(torch.autograd.Function):
    """The operator with its gradients, for calls that nothing else wants to see."""

    @staticmethod
    def forward(ctx: Any, b: Tensor, a: Tensor, x: Tensor, start: Tensor | None) -> Tensor:
        y = _forward(b, a, x, start)
        _save(ctx, (b, a, x, start), y)
        return y

    backward = staticmethod(_differentiate)


class _TransformedFilter(Mappable):
    """The filter for transforms of ``torch.func`` and forward mode: a map makes more samples."""

    @staticmethod
    def forward(b: Tensor, a: Tensor, x: Tensor, start: Tensor | None) -> Tensor:
        return _forward(b, a, x, start)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _save(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:3], output)

    backward = staticmethod(_differentiate)

    @staticmethod
    def jvp(
        ctx: Any,
        in_b: Tensor | None,
        in_a: Tensor | None,
        in_x: Tensor | None,
        in_start: Tensor | None,
    ) -> Tensor:
        """Return the filter by `a` alone of what enters it, since all else is linear."""
        b, a, x, y = ctx.saved_tensors
        added = torch.zeros_like(y)
        for factors, given, sign in ((in_b, x, 1), (b, in_x, 1), (in_a, y, -1)):
            if factors is not None and given is not None:
                added = added + sign * _sums(factors, given)
        if in_start is not None:
            added = added + _fitted(in_start, y.shape[1])
        return _filter(a.new_ones(1, 1, 1), a, added, None)

    @staticmethod
    def vmap(
        info: Any, dims: Any, b: Tensor, a: Tensor, x: Tensor, start: Tensor | None
    ) -> tuple[Tensor, int]:
        """Return the filtered samples of all maps, which are more samples."""
        count, samples = info.batch_size, x.shape[-2]
        if dims[2] is not None:
            samples = x.movedim(dims[2], 0).shape[1]

        def folded(each: Tensor, dim: int | None) -> Tensor:
            each = each[None] if dim is None else each.movedim(dim, 0)
            if dim is None and len(each[0]) == 1 != samples and each.dim() == 4:
                return each[0]
            return each.expand(count, samples, *each.shape[2:]).flatten(0, 1)

        given = [
            None if each is None else folded(each, dim)
            for each, dim in zip((b, a, x, start), dims, strict=True)
        ]
        return _TransformedFilter.apply(*given).unflatten(0, (count, samples)), 0


# -- By functions that have derivatives ------------------------------------------------------------


def _later(x: Tensor, k: int) -> Tensor:
    """Return samples `k` steps later, with zeros before them."""
    return pad(x, (min(k, x.shape[-1]), 0))[..., : x.shape[-1]]


def _earlier(x: Tensor, k: int) -> Tensor:
    """Return samples `k` steps earlier, with zeros behind them."""
    k = min(k, x.shape[-1])
    return pad(x[..., k:], (0, k))


def _sums(factors: Tensor, x: Tensor) -> Tensor:
    """Return ``Σ_k c_k[t] x[t-k]``."""
    each = factors.unbind(-1)
    total = each[0] * x
    for k in range(1, len(each)):
        total = total + each[k] * _later(x, k)
    return total


def _fitted(start: Tensor, steps: int) -> Tensor:
    """Return leading steps with zeros behind them, or as many of them as there are."""
    return pad(start, (0, steps - start.shape[-1]))


def _again(starts: int, grads: Tensor, b: Tensor, a: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
    """Return what the operator for backward does, by functions that have derivatives."""
    b, a, x, y = (each.conj() for each in (b, a, x, y))
    columns = a.unbind(-1)
    if a.shape[1] > 1:
        columns = tuple(_earlier(each, k) if k else each for k, each in enumerate(columns))
    back = torch.stack(columns, -1).flip(1)
    g = _filter(a.new_ones(1, 1, 1), back, grads.flip(-1), None).flip(-1)
    in_b = torch.stack([g * _later(x, k) for k in range(b.shape[-1])], -1)
    in_a = torch.stack([-g * _later(y, k) for k in range(a.shape[-1])], -1)
    in_x = torch.zeros_like(g)
    for k, each in enumerate(b.unbind(-1)):
        in_x = in_x + _earlier(each * g, k)
    return [in_b.sum_to_size(b.shape), in_a.sum_to_size(a.shape), in_x, _fitted(g, starts)]


def _by_steps(b: Tensor, a: Tensor, x: Tensor, start: Tensor | None) -> Tensor:
    """Return filtered samples step by step, by PyTorch's own operations."""
    steps, taps = x.shape[-1], a.shape[-1]
    sums = _sums(b, x)
    if start is not None:
        sums = sums + _fitted(start, steps)
    a = a.expand(-1, steps, -1)
    results: list[Tensor] = []
    for t in range(steps):
        total = sums[:, t]
        for k in range(1, min(taps, t + 1)):
            total = total - a[:, t, k] * results[t - k]
        results.append(total / a[:, t, 0])
    return torch.stack(results, -1) if results else x.clone()


_library.impl("filter", _forward, "CPU")
_library.impl("filter_backward", _backward, "CPU")
torch.library.register_fake("sparsescan::filter", _fake_forward, lib=_library)
torch.library.register_fake("sparsescan::filter_backward", _fake_backward, lib=_library)
torch.library.register_autograd(
    "sparsescan::filter", _differentiate, setup_context=_save, lib=_library
)
