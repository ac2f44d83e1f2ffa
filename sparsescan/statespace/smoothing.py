"""Means and covariances of states, given observations, for NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Allocating
from ..execution.calls import Calls
from ..ops import kalman as ops
from ..ops.kalman import Filtered, Smoothed
from ..ops.operation import Operation, is_empty
from .likelihood import read_all


def kalman_filter(observations: ArrayLike, **model: Any) -> Filtered:
    """Return the means and covariances of states, given the observations so far.

    A missing observation leaves the mean and the covariance as they were predicted. So rows of NaN
    at the end are forecasts: of states, and by ``H m + d`` and ``H P Hᵀ + R`` of observations.

    Parameters
    ----------
    observations, **model
        As :func:`log_likelihood` takes them.

    Returns
    -------
    Filtered
        The log-likelihoods, and means and covariances of states, of the dtype of what is given:
        `log_likelihood` (series,), `means` and `predicted_means` (steps, series, states),
        `covariances` and `predicted_covariances` (steps, series, states, states). There is no axis
        of series if `observations` has none. Where the covariance of an innovation is not positive
        definite, a series is NaN from there on.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`log_likelihood`.

    See Also
    --------
    kalman_smoother : Those given all observations.

    Examples
    --------
    A level that moves as much as its observations vary, and a forecast.

    >>> import numpy as np
    >>> from sparsescan.statespace import kalman_filter
    >>> one = np.ones((1, 1))
    >>> found = kalman_filter(
    ...     np.array([[1.0], [2.0], [np.nan]]),
    ...     transition=one,
    ...     observation=one,
    ...     transition_covariance=one,
    ...     observation_covariance=one,
    ...     initial_covariance=one,
    ... )
    >>> found.means[:, 0]
    array([0.5, 1.4, 1.4])
    >>> found.covariances[:, 0, 0]
    array([0.5, 0.6, 1.6])
    """
    return Filtered(*_run(ops.FILTER, observations, model))


def kalman_smoother(observations: ArrayLike, **model: Any) -> Smoothed:
    """Return the means and covariances of states, given all observations.

    They come from the backward pass of the log-likelihood's gradients: with ``m`` and ``P`` after
    an observation, and ``q`` and ``A`` from those after it, they are ``m + P q`` and ``P - P A P``
    (de Jong, 1989, Journal of the American Statistical Association 84), without the inverse of a
    covariance of states. A smoothed covariance is a difference, whose error is rounding of the
    filtered one.

    Parameters
    ----------
    observations, **model
        As :func:`log_likelihood` takes them.

    Returns
    -------
    Smoothed
        The log-likelihoods, and means and covariances of states, of the dtype of what is given:
        `log_likelihood` (series,), `means` (steps, series, states), `covariances` (steps, series,
        states, states), and `cross_covariances` (steps - 1, series, states, states), of each state
        but the first, whose numbers are rows, with the one before. There is no axis of series if
        `observations` has none. A series is NaN where its log-likelihood is.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`log_likelihood`.

    See Also
    --------
    kalman_filter : Those given the observations so far.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.statespace import kalman_smoother
    >>> one = np.ones((1, 1))
    >>> found = kalman_smoother(
    ...     np.array([[1.0], [np.nan], [2.0]]),
    ...     transition=one,
    ...     observation=one,
    ...     transition_covariance=one,
    ...     observation_covariance=one,
    ...     initial_covariance=one,
    ... )
    >>> found.means[:, 0].round(3)
    array([0.714, 1.143, 1.571])
    """
    return Smoothed(*_run(ops.SMOOTHER, observations, model))


def _run(operation: Operation, observations: Any, model: dict[str, Any]) -> Any:
    named = ops.named_model(operation.name, observations, model)
    given, has_series = read_all(named)
    shapes = [None if each is None else each.shape for each in given]
    with Allocating("means and covariances"):
        if is_empty(shapes):
            found = [np.zeros(shape, given[0].dtype) for shape in operation.shapes((), shapes)]
        else:
            found = operation.forward(Calls(), (), given, False)
    return ops.with_axis(found, has_series)
