"""The log-likelihood of series, for NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arrays.arrays import for_kernels, is_on_device, read_array
from ..errors import Allocating, DeviceError, InputError
from ..execution.calls import Calls
from ..ops import kalman as ops
from ..ops.operation import is_empty

Array = NDArray[Any]


class LikelihoodGrads(NamedTuple):
    """Gradients in the arguments of :func:`log_likelihood`, of their shapes.

    Attributes
    ----------
    observations, transition, observation, transition_covariance, observation_covariance : ndarray
        The gradients; those in missing observations are 0, and those in covariances symmetric.
    initial_covariance : ndarray
        That in the covariance of the first states.
    initial_mean, transition_offset, observation_offset : ndarray or None
        The gradients; None in what was not given.
    """

    observations: Array
    transition: Array
    observation: Array
    transition_covariance: Array
    observation_covariance: Array
    initial_covariance: Array
    initial_mean: Array | None
    transition_offset: Array | None
    observation_offset: Array | None


def log_likelihood(
    observations: ArrayLike,
    *,
    transition: ArrayLike,
    observation: ArrayLike,
    transition_covariance: ArrayLike,
    observation_covariance: ArrayLike,
    initial_covariance: ArrayLike,
    initial_mean: ArrayLike | None = None,
    transition_offset: ArrayLike | None = None,
    observation_offset: ArrayLike | None = None,
) -> Any:
    """Return the log-likelihood of series of a linear Gaussian state space.

    The model is

    ``y_t = H_t x_t + d_t + v_t``, ``x_{t+1} = F_t x_t + c_t + w_t``, ``v_t ~ N(0, R_t)``,
    ``w_t ~ N(0, Q_t)``, ``x_0 ~ N(m_0, P_0)``

    and all are independent. A Kalman filter computes it, whose update of covariances is Joseph's,
    from the Cholesky factor of the innovations' covariance; in float64, and results have the dtype
    of what is given. If all steps share their matrices, nothing is missing and the covariance no
    longer changes, up to rounding, a step takes the gain of the step before.

    Any of `transition`, both covariances and so on may be that of all steps and series; have a
    leading axis of steps; or two, of steps and series, either of which may be 1.

    Parameters
    ----------
    observations : array_like, shape (steps, observed) or (steps, series, observed)
        The series ``y``. NaN is missing, entry by entry.
    transition : array_like, shape (..., states, states)
        The matrices ``F``. The last of `steps` is not read.
    observation : array_like, shape (..., observed, states)
        The matrices ``H``.
    transition_covariance, observation_covariance : array_like
        The covariances ``Q`` and ``R``, of shape (..., states, states) and (..., observed,
        observed). The symmetric part of a covariance counts.
    initial_covariance : array_like, shape (states, states) or (series, states, states)
        The covariance ``P_0`` of the first states, before the first observation.
    initial_mean : array_like, shape (states,) or (series, states), optional
        Their mean ``m_0``; zeros by default.
    transition_offset, observation_offset : array_like, optional
        The offsets ``c`` and ``d``, of shape (..., states) and (..., observed); zeros by default.

    Returns
    -------
    float or ndarray, shape (series,)
        The log-likelihood of all that is there, of each series. It is NaN where a covariance of
        innovations is not positive definite.

    Raises
    ------
    InputError
        If a shape is wrong.
    InputTypeError
        If a type or a dtype is not supported.
    DeviceError
        If an array is not in host memory.

    See Also
    --------
    log_likelihood_vjp : The gradients in all that enters.

    Examples
    --------
    A level that moves as much as its observations vary, of which one is missing.

    >>> import numpy as np
    >>> from sparsescan.statespace import log_likelihood
    >>> one = np.ones((1, 1))
    >>> y = np.array([[1.0], [np.nan], [2.0]])
    >>> log_likelihood(
    ...     y,
    ...     transition=one,
    ...     observation=one,
    ...     transition_covariance=one,
    ...     observation_covariance=one,
    ...     initial_covariance=one,
    ... ).round(4)
    np.float64(-3.3823)
    """
    given, has_series = read_all(
        {
            "observations": observations,
            "transition": transition,
            "observation": observation,
            "transition_covariance": transition_covariance,
            "observation_covariance": observation_covariance,
            "initial_covariance": initial_covariance,
            "initial_mean": initial_mean,
            "transition_offset": transition_offset,
            "observation_offset": observation_offset,
        }
    )
    with Allocating("the log-likelihoods"):
        if is_empty([None if each is None else each.shape for each in given]):
            found = np.zeros(given[0].shape[1], given[0].dtype)
        else:
            (found,) = ops.forward(Calls(), (), given, False)
    return found if has_series else found[0]


def log_likelihood_vjp(
    observations: ArrayLike, *, grads: ArrayLike = 1.0, **model: Any
) -> LikelihoodGrads:
    """Return the gradients in all arguments of :func:`log_likelihood`.

    A backward pass in closed form computes them. The forward pass keeps means and covariances
    before each segment of steps, from which the backward pass computes the filter again.

    Parameters
    ----------
    observations, **model
        As :func:`log_likelihood` was given.
    grads : array_like, shape () or (series,), default 1
        The gradients of a loss in the log-likelihoods.

    Returns
    -------
    LikelihoodGrads
        The gradients, by the names of the arguments.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`log_likelihood`.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.statespace import log_likelihood_vjp
    >>> one = np.ones((1, 1))
    >>> grads = log_likelihood_vjp(
    ...     np.array([[2.0]]),
    ...     transition=one,
    ...     observation=one,
    ...     transition_covariance=one,
    ...     observation_covariance=one,
    ...     initial_covariance=one,
    ... )
    >>> grads.observations, grads.initial_covariance
    (array([[-1.]]), array([[0.25]]))
    """
    named = ops.named_model("log_likelihood_vjp", observations, model)
    given, has_series = read_all(named)
    above = read_grads(grads, given[0].shape[1], has_series, given[0].dtype)
    with Allocating("the gradients"):
        calls = Calls()
        if is_empty([None if each is None else each.shape for each in given]):
            found = [np.zeros_like(each) for each in given if each is not None]
        else:
            kept = ops.forward(calls, (), given, True)[1]
            needs = [each is not None for each in given]
            found = ops.backward(calls, (), kept, [above], given, needs, False)
        rest = iter(found)
        grads_of: dict[str, Any] = {
            name: None if each is None else next(rest).reshape(np.shape(each))
            for name, each in named.items()
        }
    return LikelihoodGrads(**grads_of)


def read_all(named: dict[str, Any]) -> tuple[list[Any], bool]:
    """Return arguments as contiguous arrays of one dtype, checked, and whether there are series."""
    arrays = {
        name: None if each is None and name in ops.OPTIONAL else read_in_host_memory(name, each)
        for name, each in named.items()
    }
    given, has_series = ops.whole(arrays)
    dtype = np.result_type(*[each.dtype for each in given if each is not None])
    with Allocating("copies of arrays"):
        given = [None if each is None else for_kernels(each, dtype) for each in given]
    return given, has_series


def read_in_host_memory(name: str, value: Any) -> Array:
    """Return an array of real numbers that kernels of the host can read."""
    array: Array = read_array(name, value)
    if is_on_device(array):
        raise DeviceError(f"{name} is on a CUDA device; expected an array in host memory")
    return array


def read_grads(grads: Any, series: int, has_series: bool, dtype: Any) -> Array:
    """Return the gradient of a loss in the log-likelihood of each series."""
    above = read_array("grads", np.asarray(grads, float) if np.isscalar(grads) else grads)
    if above.shape not in ((), (series,) if has_series else ()):
        expected = f"() or ({series},)" if has_series else "()"
        raise InputError(f"grads has shape {above.shape}; expected {expected}")
    with Allocating("the gradients"):
        return np.array(np.broadcast_to(above, (series,)), dtype)
