"""Draws of states and observations, for NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import Allocating, InputError, InputTypeError, short
from ..ops import kalman as ops
from ..ops.affine import affine_scan
from ..symbolic.pattern import Pattern
from .likelihood import read_all, read_in_host_memory

Array = NDArray[Any]


class Samples(NamedTuple):
    """What :func:`sample` returns; without an axis of series if no number of series was given.

    Attributes
    ----------
    states : ndarray, shape (steps, series, states)
        The states.
    observations : ndarray, shape (steps, series, observed)
        What is observed of them.
    """

    states: Array
    observations: Array


def sample(
    steps: int,
    series: int | None = None,
    *,
    rng: np.random.Generator | int | None = None,
    **model: Any,
) -> Samples:
    """Draw states and observations of a linear Gaussian state space.

        y_t = H_t x_t + d_t + v_t,    x_{t+1} = F_t x_t + c_t + w_t,    x_0 ~ N(m_0, P_0)

    Noise is drawn by a symmetric root of each covariance, so covariances may be singular. Only
    their symmetric part counts, as in :func:`log_likelihood`. The steps are an
    :func:`sparsescan.affine_scan`.

    Parameters
    ----------
    steps : int
        How many steps to draw.
    series : int, optional
        How many series to draw, which are independent; one, without an axis, by default.
    rng : numpy.random.Generator or int, optional
        Where random numbers come from, or a seed of a new generator. By default each call draws
        others.
    **model
        As :func:`log_likelihood` takes it.

    Returns
    -------
    Samples
        States and observations, of the dtype of the model.

    Raises
    ------
    InputError
        If a shape is wrong, a number of steps or series is negative, or a covariance has a negative
        eigenvalue or is not finite.
    InputTypeError, DeviceError
        If a type or a dtype is not supported, or an array is not in host memory.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.statespace import sample
    >>> one = np.ones((1, 1))
    >>> model = dict(transition=one, observation=one, transition_covariance=one)
    >>> model |= dict(observation_covariance=0 * one, initial_covariance=one)
    >>> states, observations = sample(100, 8, rng=0, **model)
    >>> observations.shape, np.array_equal(states, observations)
    ((100, 8, 1), True)
    """
    rng, shape = np.random.default_rng(rng), lead_of(steps, series)
    named = ops.named_model("sample", None, model)
    h = read_in_host_memory("observation", named["observation"])
    observed = h.shape[-2] if h.ndim > 1 else 1
    named["observations"] = np.broadcast_to(np.zeros((), h.dtype), (*shape, observed))
    (_, f, h, q, r, p, m, c, d), has_series = read_all(named)
    count, size = shape[-1] if has_series else 1, f.shape[-1]
    with Allocating("the samples"):
        x = np.zeros((steps, count, size), f.dtype)
        if steps > 0:
            x[0] = _noise(rng, "initial_covariance", p, (count, size))
            x[0] += 0 if m is None else m
        if steps > 1:
            b = _noise(rng, "transition_covariance", q[: steps - 1], (steps - 1, count, size))
            b += 0 if c is None else c[: steps - 1]
            lead = f.shape[0] if f.shape[0] == 1 else steps - 1, count
            f = np.broadcast_to(f[: lead[0]], (*lead, size, size)).reshape(*lead, size**2)
            x[1:] = affine_scan(f, b, x[0], pattern=Pattern.dense((size, size)))
        y = (h @ x[..., None])[..., 0]
        y += _noise(rng, "observation_covariance", r, y.shape)
        y += 0 if d is None else d
    return Samples(x, y) if has_series else Samples(x[:, 0], y[:, 0])


def lead_of(steps: Any, series: Any) -> tuple[int, ...]:
    """Return the axes of what is drawn: steps, and series if their number is given."""
    given = {"steps": steps} if series is None else {"steps": steps, "series": series}
    for name, value in given.items():
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
            raise InputTypeError(f"{name} is {short(value)}; expected a whole number")
        if value < 0:
            raise InputError(f"{name} is {value}; expected a number that is not negative")
    return tuple(map(int, given.values()))


def _noise(rng: np.random.Generator, name: str, covariance: Array, shape: tuple[int, ...]) -> Array:
    """Return draws of normal distributions of mean zero."""
    p = covariance.astype(np.float64)
    if not np.isfinite(p).all():
        raise InputError(f"{name} has numbers that are not finite")
    values, vectors = np.linalg.eigh((p + p.swapaxes(-1, -2)) / 2)
    rounding = 8 * p.shape[-1] * np.finfo(covariance.dtype).eps
    if (values < -rounding * np.abs(values).max(-1, keepdims=True)).any():
        raise InputError(f"{name} has an eigenvalue of {values.min():g}; expected none below 0")
    root = vectors * np.sqrt(np.maximum(values, 0))[..., None, :]
    drawn: Array = root @ rng.standard_normal(shape)[..., None]
    return drawn[..., 0].astype(covariance.dtype)
