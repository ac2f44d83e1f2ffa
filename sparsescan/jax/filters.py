"""Recursive filters for JAX."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..ops.filters import filter_along, filter_sections
from .binder import FUNCTIONS
from .ffi.calls import NUMBERS, as_arrays, check_platform


def lfilter(b: Any, a: Any, x: Any, axis: int = -1, zi: Any = None) -> Any:
    """Filter along an axis by a recursive (IIR) filter, whose coefficients may change at each step.

        a_0[t] y[t] = Σ_k b_k[t] x[t-k] - Σ_{k>0} a_k[t] y[t-k]

    This is :func:`sparsescan.torch.lfilter` for JAX arrays. It replaces a ``jax.lax.scan`` over the
    steps. It works under ``jax.jit``, under ``jax.vmap`` (a mapped axis becomes samples), and with
    all derivatives of any order: ``jax.grad``, ``jvp``, ``jacfwd``, ``jacrev``, ``hessian``.

    Parameters
    ----------
    b, a : array_like, shape (taps,), (T, taps) or (…, T, taps), or number
        The coefficients ``b_0, b_1, …`` and ``a_0, a_1, …``: constant, or for each of the `T` steps
        of `x`, or for each sample and step. Axes before the last two broadcast against those of `x`
        without `axis`. A time axis of length 1 means that coefficients do not change. A number is a
        filter with ``b_0`` or ``a_0`` only.
    x : array_like
        The samples, of any shape. Before the first step they count as zeros.
    axis : int, default -1
        The axis of time.
    zi : array_like, optional
        Initial conditions in the shape of `x`, but with ``max(len(a), len(b)) - 1`` numbers along
        `axis`: the delays of the transposed direct form II, which ``scipy.signal.lfilter_zi`` and
        ``lfiltic`` return. Axes of length 1 broadcast. They are the terms that earlier steps add to
        the first results, also if coefficients change.

    Returns
    -------
    y : jax.Array
        The filtered samples, in the shape of `x` and in the dtype to which JAX promotes all
        arguments. If coefficients have more axes, so has `y`, and `axis` counts from the last axis.
    zf : jax.Array
        The final delays, if `zi` is given: the `zi` for the samples that follow. If coefficients
        change, later terms use the coefficients of the last step.

    Raises
    ------
    InputError
        If a shape or the axis is wrong, or if tracing shows that a constant ``a_0`` is 0.
    InputTypeError
        If a type is not supported. Real and complex numbers are supported.
    DeviceError
        If JAX computes elsewhere than on the CPU.

    Notes
    -----
    This is the direct form I, equation (6.28) of Oppenheim and Schafer, "Discrete-Time Signal
    Processing", 2010. Each result uses the coefficients of its own step. First gradients are a
    filter by the same kernels, from the last step to the first; directional derivatives are a
    filter too. The bits do not depend on the number of threads. Subnormal numbers count as 0.

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
    return filter_along(FUNCTIONS, b, a, x, axis, zi)


def sosfilt(sos: Any, x: Any, axis: int = -1, zi: Any = None) -> Any:
    """Filter along an axis by a cascade of sections of order two, whose coefficients may change.

    Each section filters the output of the section before it, as :func:`lfilter` does:

        a_0[t] y[t] = b_0[t] x[t] + b_1[t] x[t-1] + b_2[t] x[t-2] - a_1[t] y[t-1] - a_2[t] y[t-2]

    This is :func:`sparsescan.torch.sosfilt` for JAX arrays, with the derivatives of
    :func:`lfilter`. ``a_0`` need not be 1.

    Parameters
    ----------
    sos : array_like, shape (sections, 6), (T, sections, 6) or (…, T, sections, 6)
        The coefficients ``b_0, b_1, b_2, a_0, a_1, a_2`` of each section: constant, or for each of
        the `T` steps of `x`, or for each sample and step, as for :func:`lfilter`.
    x : array_like
        The samples, of any shape.
    axis : int, default -1
        The axis of time.
    zi : array_like, optional
        Initial conditions, which ``scipy.signal.sosfilt_zi`` returns: shape ``(sections, …)``,
        where the rest is the shape of `x`, but with 2 numbers along `axis`.

    Returns
    -------
    y : jax.Array
        The filtered samples, in the shape of `x`, as :func:`lfilter` returns them.
    zf : jax.Array
        The final delays, if `zi` is given, in its shape.

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
    return filter_sections(FUNCTIONS, sos, x, axis, zi)


def _as_arrays(**given: Any) -> list[Any]:
    """Return arrays of one precision; real coefficients stay real."""
    names = [name for name in ("b", "a", "sos") if name in given]
    numbers = {name: float(given[name]) for name in names if type(given[name]) is int}
    arrays = dict(zip(given, as_arrays(NUMBERS, **given | numbers), strict=True))
    if not any(jnp.iscomplexobj(given[name]) for name in names):
        arrays |= {name: arrays[name].real for name in names}
    return [jnp.atleast_1d(each) if name in names else each for name, each in arrays.items()]
