"""Recursive filters for JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import InputError
from ..ops import filters
from .ffi.calls import NUMBERS, as_arrays, check_platform, together
from .ffi.programs import replay
from .ffi.rules import MappedAxis, Rules, operator


def lfilter(b: Any, a: Any, x: Any, axis: int = -1, zi: Any = None) -> Any:
    """Filter along an axis by a recursive (IIR) filter, whose coefficients may change at each step.

        a_0[t] y[t] = Σ_k b_k[t] x[t-k] - Σ_{k>0} a_k[t] y[t-k]

    As :func:`sparsescan.torch.lfilter`, for arrays of JAX, under ``jax.jit``, ``jax.vmap``, by
    which samples become more samples, and all derivatives, of any order: ``jax.grad``, ``jvp``,
    ``jacfwd``, ``jacrev``, ``hessian``. It takes the place of a ``jax.lax.scan`` over the steps.

    Parameters
    ----------
    b, a : array_like, shape (taps,), (T, taps) or (…, T, taps), or number
        The coefficients ``b_0, b_1, …`` and ``a_0, a_1, …``: constant, or those of each of the `T`
        steps of `x`, or of each sample, too. Axes before the last two broadcast against those of
        `x` without `axis`; a time axis of length 1 stands for coefficients that do not change. A
        number is ``b_0`` or ``a_0`` alone.
    x : array_like
        The samples, of any shape. There are zeros before their first step.
    axis : int, default -1
        The axis of time.
    zi : array_like, optional
        Initial conditions: of the shape of `x`, but with ``max(len(a), len(b)) - 1`` numbers along
        `axis`, the delays of the transposed direct form II, as ``scipy.signal.lfilter_zi`` and
        ``lfiltic`` make them. Axes of length 1 broadcast. They are what steps before the first one
        add to the first results; where coefficients change, too.

    Returns
    -------
    y : jax.Array
        The filtered samples, of the shape of `x` and the dtype that JAX promotes those of all that
        is given to. If coefficients have more axes, so has `y`; `axis` then counts from the last
        one.
    zf : jax.Array
        The final delays, if `zi` is given: `zi` of the samples that follow. Where coefficients
        change, those of the last step count for what the steps add to later results.

    Raises
    ------
    InputError
        If a shape or the axis is wrong, or a constant ``a_0`` is 0 that is known when the call is
        traced.
    InputTypeError
        If a type is not supported. Real and complex numbers are.
    DeviceError
        If JAX computes elsewhere than on the CPU.

    Notes
    -----
    This is the direct form I, equation (6.28) of Oppenheim and Schafer, "Discrete-Time Signal
    Processing", 2010, with coefficients of the step whose result they give. First gradients are one
    more filter by the same kernels, from the last step to the first, and so are directional ones.
    The bits do not depend on the number of threads. Subnormal numbers count as 0.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from sparsescan.jax import lfilter
    >>> def last(decay):
    ...     return lfilter(jnp.ones(1), jnp.stack([1.0, -decay]), jnp.ones(4))[-1]
    >>> value, grad = jax.jit(jax.value_and_grad(last))(0.5)
    >>> float(value), float(grad)
    (1.875, 2.75)
    """
    check_platform()
    b, a, x, zi = _as_arrays(b=b, a=a, x=x, zi=zi)
    start = None if zi is None else zi.shape
    axis, batch = filters.read_lfilter(b.shape, a.shape, x.shape, axis, start)
    b, a = (_shared(each if each.ndim > 1 else each[None], 2, batch) for each in (b, a))
    _check_first("a", a)
    samples = _folded(x, axis, batch)
    if zi is None:
        return _unfolded(_filter(b, a, samples), axis, batch)
    y, final = _with_delays(b, a, samples, _folded(zi, axis, batch))
    return _unfolded(y, axis, batch), _unfolded(final, axis, batch)


def sosfilt(sos: Any, x: Any, axis: int = -1, zi: Any = None) -> Any:
    """Filter along an axis by a cascade of sections of order two, whose coefficients may change.

    Each section is what :func:`lfilter` does, of what the section before it has made:

        a_0[t] y[t] = b_0[t] x[t] + b_1[t] x[t-1] + b_2[t] x[t-2] - a_1[t] y[t-1] - a_2[t] y[t-2]

    As :func:`sparsescan.torch.sosfilt`, for arrays of JAX, and as differentiable as
    :func:`lfilter`. ``a_0`` need not be 1.

    Parameters
    ----------
    sos : array_like, shape (sections, 6), (T, sections, 6) or (…, T, sections, 6)
        The coefficients ``b_0, b_1, b_2, a_0, a_1, a_2`` of each section: constant, or those of
        each of the `T` steps of `x`, or of each sample, too, as those of :func:`lfilter`.
    x : array_like
        The samples, of any shape.
    axis : int, default -1
        The axis of time.
    zi : array_like, optional
        Initial conditions: of shape ``(sections, …)``, then that of `x`, but with 2 numbers along
        `axis`, as ``scipy.signal.sosfilt_zi`` makes them.

    Returns
    -------
    y : jax.Array
        The filtered samples, of the shape of `x`, as :func:`lfilter` returns them.
    zf : jax.Array
        The final delays, if `zi` is given, of its shape.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`lfilter`.

    Notes
    -----
    A cascade of sections is section 6.3.2 of Oppenheim and Schafer, "Discrete-Time Signal
    Processing", 2010.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from sparsescan.jax import sosfilt
    >>> smooth = jnp.array([[0.5, 0.5, 0.0, 1.0, 0.0, 0.0]] * 2)
    >>> x = jnp.array([1.0, 0.0, 0.0, 0.0])
    >>> sosfilt(smooth, x).tolist()
    [0.25, 0.5, 0.25, 0.0]
    >>> jax.grad(lambda sos: sosfilt(sos, x).sum())(smooth)[0].tolist()
    [1.0, 1.0, 1.0, -1.0, -1.0, -0.75]
    """
    check_platform()
    sos, x, zi = _as_arrays(sos=sos, x=x, zi=zi)
    start = None if zi is None else zi.shape
    axis, batch = filters.read_sosfilt(sos.shape, x.shape, axis, start)
    own = _shared(sos if sos.ndim > 2 else sos[None], 3, batch)
    samples = _folded(x, axis, batch)
    finals = []
    for k in range(own.shape[2]):
        b, a = own[:, :, k, :3], own[:, :, k, 3:]
        _check_first(f"sos[..., {k}, 3:]", a)
        if zi is None:
            samples = _filter(b, a, samples)
        else:
            samples, final = _with_delays(b, a, samples, _folded(zi[k], axis, batch))
            finals.append(_unfolded(final, axis, batch))
    y = _unfolded(samples, axis, batch)
    return y if zi is None else (y, jnp.stack(finals))


# -- Shapes ----------------------------------------------------------------------------------------


def _as_arrays(**given: Any) -> list[Any]:
    """Return arrays of one precision, of which coefficients that are real stay real."""
    names = [name for name in ("b", "a", "sos") if name in given]
    numbers = {name: float(given[name]) for name in names if type(given[name]) is int}
    arrays = dict(zip(given, as_arrays(NUMBERS, **given | numbers), strict=True))
    if not any(jnp.iscomplexobj(given[name]) for name in names):
        arrays |= {name: arrays[name].real for name in names}
    return [jnp.atleast_1d(each) if name in names else each for name, each in arrays.items()]


def _check_first(name: str, a: Any) -> None:
    """Raise an error if the constant ``a_0`` is 0, as far as that is known."""
    is_known = not isinstance(a, jax.core.Tracer)
    if is_known and a.shape[1] == 1 and not bool(a[..., 0].all()):
        raise InputError(f"{name}[0] is 0; expected another number, by which all are divided")


def _folded(x: Any, axis: int, batch: tuple[int, ...]) -> Any:
    """Return samples end to end, ``(N, T)``."""
    moved = jnp.moveaxis(x, axis, -1)
    steps = moved.shape[-1]
    return jnp.broadcast_to(moved, (*batch, steps)).reshape(math.prod(batch), steps)


def _shared(each: Any, own: int, batch: tuple[int, ...]) -> Any:
    """Return coefficients of every sample, or one for all; the last `own` axes are theirs."""
    lead, rest = each.shape[:-own], each.shape[-own:]
    if not filters.is_per_sample(lead):
        return each.reshape(1, *rest)
    return jnp.broadcast_to(each, (*batch, *rest)).reshape(math.prod(batch), *rest)


def _unfolded(samples: Any, axis: int, batch: tuple[int, ...]) -> Any:
    return jnp.moveaxis(samples.reshape(*batch, samples.shape[-1]), -1, axis)


def _with_delays(b: Any, a: Any, x: Any, zi: Any) -> tuple[Any, Any]:
    """Return filtered samples, and the delays behind the last of them.

    The delays of the transposed direct form II are what earlier steps will add to later results.
    """
    size, steps = zi.shape[1], x.shape[1]
    if not steps:
        return x, zi
    y = _filter(b, a, x, a[:, :size, 0] * zi[:, :steps])
    final = _earlier(zi, steps)
    # Coefficients of the last step count for those that follow.
    b, a = b[:, -1], a[:, -1]
    ahead = jnp.arange(size)
    # Row j is of the step that is so many before the last, and column i of i steps behind it.
    k = size + ahead - ahead[:, None]
    for factors, given, sign in ((b, x, 1), (a, y, -1)):
        padded = jnp.pad(factors / a[:, :1], ((0, 0), (0, size + 1 - factors.shape[-1])))
        table = padded[:, jnp.minimum(k, size)] * (sign * (k <= size)).astype(padded.dtype)
        last = jnp.pad(given, ((0, 0), (size, 0)))[:, steps:]
        final = final + jnp.matmul(last[:, None], table, precision="highest")[:, 0]
    return y, final


# -- The operator ----------------------------------------------------------------------------------
# Its arguments are coefficients (1 or N, 1 or T, taps), samples (N, T), and terms of leading steps.


def _filter(b: Any, a: Any, x: Any, start: Any = None) -> Any:
    """Return filtered samples, as :func:`sparsescan.ops.filters.filter_samples` does."""
    start = x[:, :0] if start is None else start
    if jnp.iscomplexobj(x) and not jnp.iscomplexobj(a):
        # Its parts are more samples.
        b, a = (each if len(each) == 1 else jnp.tile(each, (2, 1, 1)) for each in (b, a))
        parts = [jnp.concatenate([each.real, each.imag]) for each in (x, start)]
        return jax.lax.complex(*jnp.split(_filter(b, a, *parts), 2))
    return _operator(None, *together((b, a, x, start)))[0]


def _forward(form: None, given: Sequence[Any], keeps: bool) -> list[Any]:
    b, a, x, start = given
    if x.size == 0:
        return [x]
    about = b.shape, a.shape, x.shape, start.shape[1], x.dtype.name
    return replay(filters.record_filter, about, [*_factors(b, a), x, start])


def _gradients(
    form: None, needs: tuple[bool, ...], y: Any, above: Sequence[Any], given: Sequence[Any]
) -> list[Any]:
    b, a, x, start = given
    needed = [each for each, need in zip(given, needs, strict=True) if need]
    if x.size == 0:
        return [jnp.zeros_like(each) for each in needed]
    if jnp.iscomplexobj(x):
        every = zip(_again(form, y, above, given), needs, strict=True)
        return [each for each, need in every if need]
    about = b.shape, a.shape, x.shape, start.shape[1], needs, x.dtype.name
    found = replay(filters.record_filter_vjp, about, [*above, *_factors(b, a), x, y])
    return [
        each.sum(0, keepdims=True) if len(each) > len(to) else each
        for each, to in zip(found, needed, strict=True)
    ]


def _factors(b: Any, a: Any) -> tuple[Any, Any]:
    return filters.factors_of(b, a, max(b.shape[2], a.shape[2]) - 1, jnp)


def _slope(form: None, y: Any, given: Sequence[Any], slopes: Sequence[Any]) -> list[Any]:
    """Return the filter by `a` alone of what enters it, since all else is linear."""
    (b, a, x, _), (in_b, in_a, in_x, in_start) = given, slopes
    added = _sums(in_b, x) + _sums(b, in_x) - _sums(in_a, y) + _fitted(in_start, x.shape[1])
    return [_filter(jnp.ones_like(a, shape=(1, 1, 1)), a, added)]


def _again(form: None, y: Any, above: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    b, a, x, start = given
    columns = [a[..., k] for k in range(a.shape[-1])]
    if a.shape[1] > 1:
        columns = [_earlier(each, k) for k, each in enumerate(columns)]
    back = jnp.stack(columns, -1)[:, ::-1]
    one = jnp.ones_like(a, shape=(1, 1, 1))
    g = _filter(one, back, above[0][:, ::-1])[:, ::-1]
    in_b = jnp.stack([g * _later(x, k) for k in range(b.shape[-1])], -1)
    in_a = jnp.stack([-g * _later(y, k) for k in range(a.shape[-1])], -1)
    in_x = sum(_earlier(b[..., k] * g, k) for k in range(b.shape[-1]))
    return [_added(in_b, b), _added(in_a, a), in_x, _fitted(g, start.shape[1])]


def _later(x: Any, k: int) -> Any:
    """Return samples `k` steps later, with zeros before them."""
    return jnp.pad(x, ((0, 0), (k, 0)))[:, : x.shape[1]]


def _earlier(x: Any, k: int) -> Any:
    """Return samples `k` steps earlier, with zeros behind them."""
    return jnp.pad(x, ((0, 0), (0, k)))[:, k:]


def _sums(factors: Any, x: Any) -> Any:
    """Return ``Σ_k c_k[t] x[t-k]``."""
    return sum(factors[..., k] * _later(x, k) for k in range(factors.shape[-1]))


def _fitted(start: Any, steps: int) -> Any:
    """Return leading steps with zeros behind them, or as many of them as there are."""
    return jnp.pad(start, ((0, 0), (0, max(0, steps - start.shape[1]))))[:, :steps]


def _added(grads: Any, coefficients: Any) -> Any:
    """Return gradients summed over samples and steps that share coefficients."""
    shared = tuple(k for k in (0, 1) if coefficients.shape[k] == 1)
    return grads.sum(shared, keepdims=True)


def _axes(shapes: Sequence[tuple[int, ...]]) -> list[MappedAxis]:
    samples = shapes[2][0]
    return [
        MappedAxis(0, samples, is_shared=k < 2 and each[0] == 1) for k, each in enumerate(shapes)
    ]


_operator = operator(
    "filter",
    Rules(
        forward=_forward,
        gradients=_gradients,
        slope=_slope,
        again=_again,
        shapes=lambda form, given: [given[2].shape],
        axes=_axes,
        out_axes=(0,),
        results=1,
        kept=0,
    ),
)
