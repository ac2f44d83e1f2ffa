"""Hidden Markov models: log-likelihoods of series, posteriors of states, and most likely paths.

``initial[i]`` is the probability that a series begins in state ``i``, ``transition[i, j]`` that
state ``j`` follows state ``i``, and ``log_emissions[t, j]`` the log-likelihood of the observation
of step ``t`` in state ``j``. ``sparsescan.torch.hmm`` and ``sparsescan.jax.hmm`` have
:func:`log_likelihood`, whose gradients are the posteriors.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array, issparse

from ..arrays.arrays import for_kernels, host_array
from ..errors import Allocating, InputError, InputTypeError
from ..execution.calls import Calls
from ..kernels.cpu import hmm as kernels
from ..ops import hmm as ops
from ..ops.operation import ranges_of, share_out
from ..symbolic.pattern import Pattern
from .likelihood import read_grads, read_in_host_memory
from .sampling import lead_of

__all__ = [
    "HiddenMarkovGrads",
    "Path",
    "Posteriors",
    "log_likelihood",
    "log_likelihood_vjp",
    "posteriors",
    "sample",
    "viterbi",
]

Array = NDArray[Any]


class HiddenMarkovGrads(NamedTuple):
    """Gradients in the arguments of :func:`log_likelihood`, of their shapes.

    Attributes
    ----------
    log_emissions : ndarray
        The gradient, which is the posterior of each state at each step.
    initial : ndarray
        That in the probabilities of the first states.
    transition : ndarray or csr_array
        That in the probabilities of transitions; of a sparse matrix, in its entries.
    """

    log_emissions: Array
    initial: Array
    transition: Any


class Posteriors(NamedTuple):
    """What :func:`posteriors` returns; without an axis of series if none was given.

    Attributes
    ----------
    log_likelihood : ndarray, shape (series,)
        The log-likelihood of each series.
    states : ndarray, shape (steps, series, states)
        The probability of each state at each step, given all observations of a series; zeros after
        its end.
    transitions : ndarray, shape (series, states, states) or (series, nnz)
        How many transitions are expected in a series from each state to each; if `transition` is
        sparse, for each of its entries.
    """

    log_likelihood: Any
    states: Array
    transitions: Array


class Path(NamedTuple):
    """What :func:`viterbi` returns; without an axis of series if none was given.

    Attributes
    ----------
    states : ndarray of int64, shape (steps, series)
        The most likely states; -1 after the end of a series, and if no path is possible.
    log_likelihood : ndarray of float64, shape (series,)
        The log-likelihood of that path and the observations; -inf if no path is possible.
    """

    states: Array
    log_likelihood: Any


def log_likelihood(
    log_emissions: ArrayLike,
    *,
    initial: ArrayLike,
    transition: Any,
    pattern: Pattern | None = None,
    lengths: ArrayLike | None = None,
) -> Any:
    """Return the log-likelihood of series of a hidden Markov model.

    It is the logarithm of the sum over all paths ``i`` of

    ``initial[i_0] Π_t transition[i_t, i_t+1] Π_t exp(log_emissions[t, i_t])``

    by the forward recursion, in float64. A step takes a product of a matrix and a vector, and an
    exponential and a logarithm of each state (Rabiner, 1989, Proceedings of the IEEE 77, scales by
    sums). Where a sum may have lost terms to underflow it is computed again by logarithms, so none
    is lost. Probabilities need not sum to 1.

    Parameters
    ----------
    log_emissions : array_like, shape (steps, states) or (steps, series, states)
        The logarithms of densities or probabilities of observations; -inf is impossible, and 0 for
        all states is no observation.
    initial : array_like, shape (states,) or (series, states)
        The probabilities of first states.
    transition : array_like or CSR matrix
        The probabilities of transitions, from a row to a column: of shape (states, states), or with
        a leading axis of steps, or two, of steps and series, either of which may be 1. That of step
        ``t`` leads to step ``t + 1``; the last is not read. A CSR matrix of SciPy, or values of a
        `pattern`, of shape (..., nnz), take only time for their entries.
    pattern : Pattern, optional
        Where `transition` has its values; all others are 0.
    lengths : array_like of int, shape (series,), optional
        How many steps each series has; all by default.

    Returns
    -------
    float or ndarray, shape (series,)
        The log-likelihoods: -inf if no path is possible, and NaN if an emission is NaN or +inf.

    Raises
    ------
    InputError
        If a shape is wrong, a probability is negative, or a length is more than there is.
    InputTypeError
        If a type or a dtype is not supported.
    DeviceError
        If an array is not in host memory.

    See Also
    --------
    log_likelihood_vjp : The gradients.
    posteriors : The probabilities of states, given all observations.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.statespace import hmm
    >>> stay = np.array([[0.9, 0.1], [0.2, 0.8]])
    >>> emissions = np.log([[0.5, 0.1], [0.4, 0.3]])
    >>> hmm.log_likelihood(emissions, initial=np.array([0.5, 0.5]), transition=stay).round(4)
    np.float64(-2.176)
    """
    given, form, has_series = _read_all(log_emissions, initial, transition, pattern, lengths)
    with Allocating("the log-likelihoods"):
        found = _forward(given, form, False)[0]
    return found if has_series else found[0]


def log_likelihood_vjp(
    log_emissions: ArrayLike, *, grads: ArrayLike = 1.0, **model: Any
) -> HiddenMarkovGrads:
    """Return the gradients in the arguments of :func:`log_likelihood`.

    They come from the backward recursion. The gradient in an emission is the posterior of a state.
    A probability of 0 has a gradient, too, unless a `pattern` leaves it out. The gradients of a
    series without a possible path are 0.

    Parameters
    ----------
    log_emissions, **model
        As :func:`log_likelihood` was given.
    grads : array_like, shape () or (series,), default 1
        The gradients of a loss in the log-likelihoods.

    Returns
    -------
    HiddenMarkovGrads
        The gradients, by the names of the arguments.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`log_likelihood`.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.statespace import hmm
    >>> model = dict(initial=np.array([0.5, 0.5]), transition=np.array([[0.9, 0.1], [0.2, 0.8]]))
    >>> grads = hmm.log_likelihood_vjp(np.log([[0.5, 0.1], [0.4, 0.3]]), **model)
    >>> grads.log_emissions.round(3)
    array([[0.859, 0.141],
           [0.828, 0.172]])
    """
    arguments = _named(log_emissions, model)
    given, form, has_series = _read_all(*arguments)
    above = read_grads(grads, given[0].shape[1], has_series, given[0].dtype)
    with Allocating("the gradients"):
        _, kept = _forward(given, form, True)
        grads_of = _backward(given, form, kept, above)
        shapes = [np.shape(each) for each in arguments[:2]]
        first, second = (
            own.reshape(shape) for own, shape in zip(grads_of[:2], shapes, strict=True)
        )
        if issparse(transition := arguments[2]):
            indices = transition.indices.copy(), transition.indptr.copy()
            last = csr_array((grads_of[2].reshape(-1), *indices), shape=transition.shape)
        else:
            last = grads_of[2].reshape(np.shape(transition))
    return HiddenMarkovGrads(first, second, last)


def posteriors(log_emissions: ArrayLike, **model: Any) -> Posteriors:
    """Return the probabilities of states and expected numbers of transitions, given all steps.

    They are what an iteration of the Baum-Welch algorithm takes, by the forward-backward recursion.

    Parameters
    ----------
    log_emissions, **model
        As :func:`log_likelihood` takes them.

    Returns
    -------
    Posteriors
        Log-likelihoods, probabilities of states and expected transitions; zeros for a series
        without a possible path.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`log_likelihood`.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.statespace import hmm
    >>> model = dict(initial=np.array([0.5, 0.5]), transition=np.array([[0.9, 0.1], [0.2, 0.8]]))
    >>> found = hmm.posteriors(np.log([[0.5, 0.1], [0.4, 0.3]]), **model)
    >>> found.transitions.round(3)
    array([[0.793, 0.066],
           [0.035, 0.106]])
    """
    given, form, has_series = _read_all(*_named(log_emissions, model))
    e, initial, a, lengths = given
    with Allocating("the posteriors"):
        # Each series has transitions of its own, and so the gradients in them.
        a = np.ascontiguousarray(np.broadcast_to(a, (a.shape[0], e.shape[1], *a.shape[2:])))
        found, kept = _forward(given, form, True)
        each = [e, initial, a, lengths]
        states, _, of_a = _backward(each, form, kept, np.ones(e.shape[1], e.dtype))
        # What is impossible may have an infinite gradient.
        transitions = np.multiply(a, of_a, out=np.zeros_like(a), where=a > 0).sum(0)
    if has_series:
        return Posteriors(found, states, transitions)
    return Posteriors(found[0], states[:, 0], transitions[0])


def viterbi(log_emissions: ArrayLike, **model: Any) -> Path:
    """Return the most likely path of states of each series (Viterbi, 1967).

    Of paths that are equally likely it has the smallest last state, and so on back from there.

    Parameters
    ----------
    log_emissions, **model
        As :func:`log_likelihood` takes them.

    Returns
    -------
    Path
        The states, and their log-likelihood.

    Raises
    ------
    InputError
        As :func:`log_likelihood`, and if an emission is NaN or +inf.
    InputTypeError, DeviceError
        As :func:`log_likelihood`.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.statespace import hmm
    >>> model = dict(initial=np.array([0.5, 0.5]), transition=np.array([[0.9, 0.1], [0.2, 0.8]]))
    >>> hmm.viterbi(np.log([[0.9, 0.1], [0.1, 0.9], [0.1, 0.9]]), **model).states
    array([0, 1, 1])
    """
    given, form, has_series = _read_all(*_named(log_emissions, model))
    e, initial, a, lengths = given
    if not (e < np.inf).all():
        raise InputError("log_emissions has NaN or +inf; expected numbers below that")
    steps, series, states = e.shape
    with Allocating("the paths"), np.errstate(divide="ignore"):
        logs = [np.log(each, dtype=np.float64) for each in (initial, a)]
        chain = ops.read(form, [e, *logs, lengths])
        path, found = np.empty((steps, series), np.int64), np.empty(series)

        def call(ends: tuple[int, int]) -> None:
            scratch = np.empty(2 * states), np.empty(steps * states, np.int32)
            kernels.viterbi(chain, *ends, path.reshape(-1), found, *scratch)

        tasks = [partial(call, ends) for ends in ranges_of(series)]
        share_out(Calls(), ops.work_of(chain), tasks)
    return Path(path, found) if has_series else Path(path[:, 0], found[0])


def sample(
    steps: int,
    series: int | None = None,
    *,
    initial: ArrayLike,
    transition: Any,
    pattern: Pattern | None = None,
    rng: np.random.Generator | int | None = None,
) -> Array:
    """Draw states of a hidden Markov model; observations are drawn given them.

    Probabilities that do not sum to 1 are divided by their sum.

    Parameters
    ----------
    steps : int
        How many steps to draw.
    series : int, optional
        How many series to draw, which are independent; one, without an axis, by default.
    initial, transition, pattern
        As :func:`log_likelihood` takes them.
    rng : numpy.random.Generator or int, optional
        Where random numbers come from, or a seed of a new generator. By default each call draws
        others.

    Returns
    -------
    ndarray of int64, shape (steps, series)
        The states.

    Raises
    ------
    InputError
        As :func:`log_likelihood`, if a number of steps or series is negative, and if a series
        comes to a state from which no transition is possible.
    InputTypeError, DeviceError
        As :func:`log_likelihood`.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.statespace import hmm
    >>> turn = np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> states = hmm.sample(5, initial=np.array([1.0, 0.0]), transition=turn)
    >>> states
    array([0, 1, 0, 1, 0])
    >>> observations = np.random.default_rng(0).normal(np.array([-1.0, 1.0])[states])
    """
    rng, shape = np.random.default_rng(rng), lead_of(steps, series)
    first = read_in_host_memory("initial", initial)
    e = np.broadcast_to(np.zeros((), first.dtype), (*shape, first.shape[-1] if first.ndim else 0))
    (_, first, a, _), form, has_series = _read_all(e, initial, transition, pattern, None)
    count, states = shape[-1] if has_series else 1, first.shape[-1]
    own = np.arange(count)
    with Allocating("the states"):
        found = np.empty((steps, count), np.int64)
        uniform = rng.random((steps, count, 1))
        for t in range(steps):
            rows = np.broadcast_to(first, (count, states))
            if t > 0:
                step = np.broadcast_to(a[min(t, len(a)) - 1], (count, *a.shape[2:]))
                rows = _rows(form.pattern, step, own, found[t - 1], states)
            ends = np.cumsum(rows, -1, np.float64)
            if not ((ends[:, -1] > 0) & (ends[:, -1] < np.inf)).all():
                raise InputError(
                    f"probabilities of step {t} sum to {ends[:, -1].min():g} for a series; "
                    "expected a finite number above 0"
                )
            # No number reaches the last end, so no state of probability 0 is drawn.
            at = np.minimum(uniform[t] * ends[:, -1:], np.nextafter(ends[:, -1:], 0))
            found[t] = (ends <= at).sum(-1)
    return found if has_series else found[:, 0]


def _rows(pattern: Pattern | None, step: Array, own: Array, old: Array, states: int) -> Array:
    """Return the probabilities of the next states of series, given those before."""
    if pattern is None:
        return step[own, old]
    rows = np.zeros((len(old), states), step.dtype)
    for n, state in enumerate(old):
        begin, end = pattern.indptr[state : state + 2]
        rows[n, pattern.indices[begin:end]] = step[n, begin:end]
    return rows


def _named(log_emissions: Any, model: dict[str, Any]) -> tuple[Any, ...]:
    """Return all arguments in the order of :func:`_read_all`."""

    def named(initial: Any, transition: Any, pattern: Any = None, lengths: Any = None) -> Any:
        return log_emissions, initial, transition, pattern, lengths

    arguments: tuple[Any, ...] = named(**model)
    return arguments


def _read_all(
    log_emissions: Any, initial: Any, transition: Any, pattern: Any, lengths: Any
) -> tuple[list[Any], ops.Form, bool]:
    """Return arguments as contiguous arrays of one dtype, checked, and the form."""
    if issparse(transition):
        if pattern is not None:
            raise InputTypeError("transition is a sparse matrix; expected values of the pattern")
        pattern, transition = Pattern(transition), transition.data
    named = {"log_emissions": log_emissions, "initial": initial, "transition": transition}
    arrays: dict[str, Any] = {name: read_in_host_memory(name, each) for name, each in named.items()}
    arrays["lengths"] = None if lengths is None else host_array("lengths", lengths)
    if lengths is not None and arrays["lengths"].dtype.kind not in "iu":
        raise InputTypeError(f"lengths has dtype {arrays['lengths'].dtype}; expected whole numbers")
    given, has_series = ops.whole(arrays, pattern, lambda own, like: own)
    dtype = np.result_type(*[each.dtype for each in given[:3]])
    with Allocating("copies of arrays"):
        # Of lengths it is a copy, so that nobody can change what is checked.
        given = [*[for_kernels(each, dtype) for each in given[:3]], given[3]]
        given[3] = None if given[3] is None else np.array(given[3], dtype)
    form = ops.Form(pattern)
    ops.check_values(form, given)
    return given, form, has_series


def _forward(given: list[Any], form: ops.Form, keeps: bool) -> list[Array]:
    e = given[0]
    if e.size == 0:
        return [np.zeros(e.shape[1], e.dtype), np.zeros_like(e)][: 1 + keeps]
    return ops.forward(Calls(), form, given, keeps)


def _backward(given: list[Any], form: ops.Form, kept: Array, above: Array) -> list[Array]:
    if given[0].size == 0:
        return [np.zeros_like(each) for each in given[:3]]
    needs = [True, True, True, False]
    return ops.backward(Calls(), form, kept, [above], given, needs, False)
