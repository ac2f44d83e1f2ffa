"""One loop over a simulation's steps, and one over their adjoints, for a function that was read.

A stage solves ``M (α u + past) - added - κ f(u) = 0`` by Newton's method with dense factors, one
matrix for each sample. If that does not converge, or the function takes another branch, the loop
ends before the step, and its caller takes the step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..compile import njit
from .tapes import PLAIN, Tables, Values, differentiate, evaluate, holds, pull_back

# Kinds of methods.
RUNGE_KUTTA, BDF2, RESIDUAL = range(3)


class Method(NamedTuple):
    """The equations of a step.

    Attributes
    ----------
    kind : int
        The kind of equations.
    a, c : ndarray
        The tableau; for methods without one, that of one implicit stage.
    inner : ndarray of int64
        The place where each stage's state is kept in the step; -1 if it is not kept.
    mass : ndarray of uint64, shape (count, 3)
        For each entry of the mass: its row, its column and its place in the matrices.
    weights : ndarray
        Values of these entries.
    estimates : ndarray, shape (count, stages + 1)
        What the rates at the beginning of a step and in its stages are multiplied by to estimate
        its error.
    """

    kind: int
    a: NDArray[np.float64]
    c: NDArray[np.float64]
    inner: NDArray[np.int64]
    mass: NDArray[np.uint64]
    weights: NDArray[np.float64]
    estimates: NDArray[np.float64]


class Work(NamedTuple):
    """Work memory of steps.

    Attributes
    ----------
    matrices, factors : ndarray, shape (samples, size, size)
        Matrices, and their factors.
    pivots : ndarray of uint64, shape (samples, size)
        Row exchanges of the factorisations.
    vectors : ndarray, shape (9, n)
        Vectors of Newton's method.
    rates : ndarray, shape (stages + 1, n)
        Rates in stages, and at the beginning of a step; or the adjoints of those in stages, of one
        loss after the other.
    known : ndarray, shape (4,)
        Whether there are factors; the least iterations with them; the extra iterations so far; and
        how many factorisations were made.
    """

    matrices: NDArray[np.float64]
    factors: NDArray[np.float64]
    pivots: NDArray[np.uint64]
    vectors: NDArray[np.float64]
    rates: NDArray[np.float64]
    known: NDArray[np.float64]


class Trajectory(NamedTuple):
    """A run: ``states[k + 1]`` is the state before step `k`; ``states[0]`` equals ``states[1]``.

    Attributes
    ----------
    states, inner, times, dt, newton, params : ndarray
        The arrays of the run.
    """

    states: NDArray[np.float64]
    inner: NDArray[np.float64]
    times: NDArray[np.float64]
    dt: NDArray[np.float64]
    newton: NDArray[np.int64]
    params: NDArray[np.float64]


class Rules(NamedTuple):
    """When Newton's method ends, and when it takes new factors.

    Attributes
    ----------
    rtol, atol, margin, far : float
        Tolerances, the share of them for the remaining error, and the largest last correction.
    slow, own : float
        Rates of convergence above which factors are renewed.
    cost : float
        How many iterations take as long as a factorisation.
    most : int
        The most iterations.
    wide : float
        Transposed solutions are refined if a matrix has larger entries.
    """

    rtol: float
    atol: float
    margin: float
    far: float
    slow: float
    own: float
    cost: float
    most: int
    wide: float


class Pace(NamedTuple):
    """How long steps may be.

    Attributes
    ----------
    stop : float
        The time that the last step ends at.
    rtol, atol : float
        The error that a step may have, of each unknown.
    longest : float
        The greatest length of a step.
    ahead : float
        1, or -1 where time runs backward.
    order : float
        The power of a step's length by which the estimate of its error shrinks.
    growth : float
        How many times as long as the step before a step may be.
    next : ndarray, shape (1,)
        The length to try next.
    """

    stop: float
    rtol: float
    atol: float
    longest: float
    ahead: float
    order: float
    growth: float
    next: NDArray[np.float64]


class March(NamedTuple):
    """Everything that steps read and write.

    Attributes
    ----------
    tables, values : Tables, Values
        The tape of the user's function, and its numbers.
    method, work, rules, run : Method, Work, Rules, Trajectory
        The equations of a step, work memory, rules and the run.
    """

    tables: Tables
    values: Values
    method: Method
    work: Work
    rules: Rules
    run: Trajectory


class Adjoints(NamedTuple):
    """Gradients that a backward pass accumulates; the last axis is for losses.

    Attributes
    ----------
    old, older, params, dt, dt_before, time : ndarray
        The gradients in the last two states, the parameters, the lengths of the step and of the
        previous one, and the time.
    """

    old: NDArray[np.float64]
    older: NDArray[np.float64]
    params: NDArray[np.float64]
    dt: NDArray[np.float64]
    dt_before: NDArray[np.float64]
    time: NDArray[np.float64]


# -- Vectors ---------------------------------------------------------------------------------------


@njit(**PLAIN)
def _set(x: Any, y: Any) -> None:
    """Copy numbers of `y` to `x`."""
    for i in range(len(x)):
        x[i] = y[i]


@njit(**PLAIN)
def _fill(x: Any, value: float) -> None:
    """Set all numbers."""
    for i in range(len(x)):
        x[i] = value


@njit(**PLAIN)
def _add(x: Any, factor: float, y: Any) -> None:
    """Add a multiple of `y`."""
    for i in range(len(x)):
        x[i] += factor * y[i]


# -- Dense factors ---------------------------------------------------------------------------------


@njit(inline="always", **PLAIN)
def _eliminate(a: Any, pivots: Any, size: int) -> bool:
    """Factorise a matrix in place, ``P A = L U``; return whether it is regular.

    The diagonal of U is inverted.
    """
    for k in range(size):
        best, largest = k, abs(a[k, k])
        for i in range(k + 1, size):
            if abs(a[i, k]) > largest:
                best, largest = i, abs(a[i, k])
        pivots[k] = best
        if best != k:
            for j in range(size):
                a[k, j], a[best, j] = a[best, j], a[k, j]
        scale = 1.0 / a[k, k]
        if not (0.0 < largest < np.inf and abs(scale) < np.inf):
            return False
        a[k, k] = scale
        for i in range(k + 1, size):
            a[i, k] *= scale
            for j in range(k + 1, size):
                a[i, j] -= a[i, k] * a[k, j]
    return True


@njit(inline="always", **PLAIN)
def _substitute(a: Any, pivots: Any, y: Any, size: int) -> None:
    """Set ``y`` to ``A⁻¹ y``."""
    for k in range(size):
        y[k], y[pivots[k]] = y[pivots[k]], y[k]
    for i in range(1, size):
        for j in range(i):
            y[i] -= a[i, j] * y[j]
    for i in range(size - 1, -1, -1):
        for j in range(i + 1, size):
            y[i] -= a[i, j] * y[j]
        y[i] *= a[i, i]


@njit(inline="always", **PLAIN)
def _substitute_transposed(a: Any, pivots: Any, y: Any, size: int) -> None:
    """Set ``y`` to ``A⁻ᵀ y``."""
    for i in range(size):
        y[i] *= a[i, i]
        for j in range(i + 1, size):
            y[j] -= a[i, j] * y[i]
    for i in range(size - 1, 0, -1):
        for j in range(i):
            y[j] -= a[i, j] * y[i]
    for k in range(size - 1, -1, -1):
        y[k], y[pivots[k]] = y[pivots[k]], y[k]


@njit(**PLAIN)
def _factorise(work: Any) -> bool:
    """Factorise all matrices; return whether all are regular."""
    size, is_regular = work.pivots.shape[1], True
    _set(work.factors.reshape(-1), work.matrices.reshape(-1))
    for b in range(len(work.factors)):
        a, pivots = work.factors[b], work.pivots[b]
        # Loops with constant lengths take half the time.
        if size == 2:
            is_regular = is_regular and _eliminate(a, pivots, 2)
        elif size == 3:
            is_regular = is_regular and _eliminate(a, pivots, 3)
        else:
            is_regular = is_regular and _eliminate(a, pivots, size)
    work.known[3] += 1
    return is_regular


@njit(**PLAIN)
def _solve(work: Any, right: Any, x: Any) -> None:
    """Set ``x = A⁻¹ right``."""
    _set(x, right)
    size = work.pivots.shape[1]
    for b in range(len(work.factors)):
        a, pivots, y = work.factors[b], work.pivots[b], x[b * size : (b + 1) * size]
        if size == 3:
            _substitute(a, pivots, y, 3)
        else:
            _substitute(a, pivots, y, size)


@njit(**PLAIN)
def _solve_transposed(work: Any, right: Any, x: Any) -> None:
    """Set ``x = A⁻ᵀ right``."""
    _set(x, right)
    size = work.pivots.shape[1]
    for b in range(len(work.factors)):
        a, pivots, y = work.factors[b], work.pivots[b], x[b * size : (b + 1) * size]
        if size == 3:
            _substitute_transposed(a, pivots, y, 3)
        else:
            _substitute_transposed(a, pivots, y, size)


@njit(**PLAIN)
def _adjoint(work: Any, rules: Any, right: Any, x: Any, rest: Any) -> None:
    """Set ``x = A⁻ᵀ right``, refined if entries have very different sizes."""
    _solve_transposed(work, right, x)
    largest, matrices = 0.0, work.matrices.reshape(-1)
    for i in range(len(matrices)):
        largest = max(largest, abs(matrices[i]))
    if largest <= rules.wide:
        return
    size = work.pivots.shape[1]
    _set(rest, right)
    for b in range(len(work.factors)):
        for i in range(size):
            for j in range(size):
                rest[b * size + j] -= work.matrices[b, i, j] * x[b * size + i]
    more = work.vectors[8]
    _solve_transposed(work, rest, more)
    _add(x, 1.0, more)


# -- Steps -----------------------------------------------------------------------------------------


@njit(**PLAIN)
def _begin(tables: Any, values: Any, params: Any) -> None:
    """Compute the operations that depend only on parameters."""
    at, size = tables.leaves[4]
    for i in range(size):
        values.elements[at + i] = params[i]
    evaluate(tables, values, 0, tables.constant, True)


@njit(**PLAIN)
def _turn_to(tables: Any, values: Any, old: Any, dt: float) -> None:
    """Set the old state and the length of a step, if the function reads them."""
    at, size = tables.leaves[1]
    if size:
        for i in range(size):
            values.elements[at + i] = old[i]
        values.elements[tables.leaves[3, 0]] = dt


@njit(**PLAIN)
def _evaluate_at(tables: Any, values: Any, u: Any, time: float, slopes: bool) -> bool:
    """Evaluate the function at a state and a time; return whether its guards hold."""
    at = tables.leaves[0, 0]
    for i in range(len(u)):
        values.elements[at + i] = u[i]
    values.elements[tables.leaves[2, 0]] = time
    evaluate(tables, values, tables.constant, len(tables.operations), slopes)
    return holds(tables, values)


@njit(**PLAIN)
def _rate(tables: Any, values: Any, u: Any, time: float, rate: Any) -> bool:
    """Set a rate to what the function returns; return whether its guards hold."""
    if not _evaluate_at(tables, values, u, time, False):
        return False
    for i in range(len(u)):
        rate[i] = values.elements[tables.results[i]]
    return True


@njit(**PLAIN)
def _residual(tables: Any, values: Any, method: Any, stage: Any, vectors: Any, rest: Any) -> bool:
    """Set the residual at an evaluated state; return whether it is finite."""
    alpha, kappa, _ = stage
    at, u = tables.leaves[0, 0], values.elements
    past, added = vectors[6], vectors[7]
    for i in range(len(rest)):
        rest[i] = -added[i] - kappa * u[tables.results[i]]
    for e in range(len(method.mass)):
        column = method.mass[e, 1]
        rest[method.mass[e, 0]] += method.weights[e] * (alpha * u[at + column] + past[column])
    total = 0.0
    for i in range(len(rest)):
        total += rest[i] * rest[i]
    return total < np.inf


@njit(**PLAIN)
def _linearise(tables: Any, values: Any, method: Any, work: Any, stage: Any) -> bool:
    """Factorise ``α M - κ J`` at a state with known slopes; return whether it is regular."""
    alpha, kappa, _ = stage
    differentiate(tables, values)
    matrix = work.matrices.reshape(-1)
    _fill(matrix, 0.0)
    for e in range(len(method.mass)):
        matrix[method.mass[e, 2]] = alpha * method.weights[e]
    for e in range(len(tables.entries)):
        matrix[tables.entries[e, 1]] -= kappa * values.tangents[tables.entries[e, 0]]
    return _factorise(work)


@njit(**PLAIN)
def _is_lower(work: Any, rules: Any) -> bool:
    """Return whether a correction lowers the residual, each equation in its own scale."""
    state, rest, correction = work.vectors[0], work.vectors[1], work.vectors[2]
    new_rest = work.vectors[4]
    size = work.pivots.shape[1]
    before, after = 0.0, 0.0
    for b in range(len(work.matrices)):
        for i in range(size):
            row, scale = b * size + i, 0.0
            for j in range(size):
                at = b * size + j
                allowed = rules.atol + rules.rtol * (abs(state[at]) + abs(correction[at]))
                scale += abs(work.matrices[b, i, j]) * allowed
            one, other = abs(rest[row]) / scale, abs(new_rest[row]) / scale
            if not (one < np.inf and other < np.inf):
                return False
            before, after = max(before, one), max(after, other)
    return after < before


@njit(**PLAIN)
def _newton(of: Any, stage: Any) -> int:
    """Solve a stage from ``vectors[0]``, to there; return iterations.

    That is 0 without a solution, after `Solver.newton`, which goes on where this one ends; and -1
    where the function branches in another way.
    """
    tables, values, method, work, rules, _ = of
    vectors, known = work.vectors, work.known
    state, rest, correction, new = vectors[0], vectors[1], vectors[2], vectors[3]
    new_rest, sizes_before, sizes = vectors[4], vectors[5], vectors[8]
    time = stage[2]
    has_slopes = known[0] == 0.0
    if not _evaluate_at(tables, values, state, time, has_slopes):
        return -1
    if not _residual(tables, values, method, stage, vectors, rest):
        return 0
    is_own, before, has_before = False, np.inf, False
    for iteration in range(1, rules.most + 1):
        is_new = known[0] == 0.0
        if is_new:
            if not has_slopes and not _evaluate_at(tables, values, state, time, True):
                return -1
            known[1], known[2] = np.inf, 0.0
            if not _linearise(tables, values, method, work, stage):
                return 0
            known[0] = 1.0
            is_own, before, has_before = True, np.inf, False
        _solve(work, rest, correction)
        size, where = -1.0, 0
        for i in range(len(state)):
            new[i] = state[i] - correction[i]
            sizes[i] = one = abs(correction[i]) / (rules.atol + rules.rtol * abs(new[i]))
            if not one <= size:
                size, where = one, i
        if not size < np.inf:
            return 0
        one = sizes_before[where] if has_before else before
        rate = size / one if one != 0.0 else np.inf
        if size < rules.margin or (
            size < rules.far and 0 < rate < 1 and size * rate / (1 - rate) < rules.margin
        ):
            known[1] = min(known[1], iteration)
            known[2] += iteration - known[1]
            if known[2] > rules.cost:
                known[0] = 0.0
            _set(state, new)
            return iteration
        has_slopes = before < np.inf and size > (rules.own if is_own else rules.slow) * before
        if not _evaluate_at(tables, values, new, time, has_slopes):
            return -1
        is_worse = not _residual(tables, values, method, stage, vectors, new_rest)
        is_worse = is_worse or not size <= 2 * before
        if is_own and (is_worse or (is_new and size > 1)):
            is_worse = is_worse or not _is_lower(work, rules)
        if is_worse:
            if is_own:
                return 0
            known[0], has_slopes = 0.0, False
            continue
        if has_slopes:
            known[0] = 0.0
        _set(sizes_before, sizes)
        _set(state, new)
        _set(rest, new_rest)
        before, has_before = size, True
    return 0


@njit(**PLAIN)
def _coefficients(kind: int, ratio: float) -> tuple[float, float, float]:
    """Return ``α`` and the factors of the last two states; at step 0 there is only one."""
    if kind == BDF2 and ratio != 0.0:
        return (1 + 2 * ratio) / (1 + ratio), -(1 + ratio), ratio * ratio / (1 + ratio)
    if kind == RESIDUAL:
        return 0.0, 0.0, 0.0
    return 1.0, -1.0, 0.0


@njit(**PLAIN)
def _step(of: Any, k: int, has_rates: bool) -> int:
    """Take a step, and maybe set the rates in all stages; return 1, or what `_newton` does."""
    tables, values, method, work, _, run = of
    states, dt, a = run.states, run.dt[k], method.a
    old, older, stages = states[k + 1], states[k], len(a)
    vectors, rates = work.vectors, work.rates
    state, past, added = vectors[0], vectors[6], vectors[7]
    ratio = dt / run.dt[k - 1] if k else 0.0
    alpha, b, c = _coefficients(method.kind, ratio)
    kappa = -1.0 if method.kind == RESIDUAL else dt
    _turn_to(tables, values, old, dt)
    run.newton[k] = 0
    for s in range(stages):
        time = run.times[k] + method.c[s] * dt
        _fill(added, 0.0)
        for j in range(s):
            if a[s, j] != 0.0:
                _add(added, dt * a[s, j], rates[j])
        if a[s, s] != 0.0:
            for i in range(len(old)):
                past[i] = b * old[i] + c * older[i]
                state[i] = old[i] + method.c[s] * ratio * (old[i] - older[i])
            stage = alpha, kappa * a[s, s], time
            count = _newton(of, stage)
            if count == 0 and ratio != 0.0:
                work.known[0] = 0.0
                _set(state, old)
                count = _newton(of, stage)
            if count <= 0:
                return count
            run.newton[k] += count
        else:
            for i in range(len(old)):
                state[i] = old[i] + added[i]
        if method.inner[s] >= 0:
            _set(run.inner[k, method.inner[s]], state)
        is_read = has_rates
        for j in range(s + 1, stages):
            is_read = is_read or a[j, s] != 0.0
        if is_read and not _rate(tables, values, state, time, rates[s]):
            return -1
    _set(states[k + 2], state)
    return 1


@njit(cache=True, nogil=True, **PLAIN)
def take_steps(of: Any, begin: int, end: int) -> int:
    """Take steps; return the first one that was not solved, or `end`."""
    _begin(of.tables, of.values, of.run.params)
    for k in range(begin, end):
        if _step(of, k, False) <= 0:
            of.work.known[0] = 0.0
            return k
    return end


@njit(**PLAIN)
def _error(of: Any, k: int, pace: Any) -> float:
    """Return the largest estimate of a step's error, in tolerances; -1 where none can be made.

    After `RungeKutta.error` and `BackwardDifferences.error`.
    """
    tables, values, method, work, _, run = of
    old, new, dt = run.states[k + 1], run.states[k + 2], run.dt[k]
    rates, right, error = work.rates, work.vectors[6], work.vectors[7]
    stages = len(method.a)
    if method.estimates[:, 0].any() and not _rate(tables, values, old, run.times[k], rates[stages]):
        return -1.0
    is_implicit = work.pivots.shape[1] > 0
    if is_implicit and work.known[0] == 0.0:
        time = run.times[k] + dt
        alpha, _, _ = _coefficients(method.kind, dt / run.dt[k - 1] if k else 0.0)
        stage = alpha, dt * method.a[stages - 1, stages - 1], time
        if not _evaluate_at(tables, values, new, time, True):
            return -1.0
        work.known[1], work.known[2] = np.inf, 0.0
        if not _linearise(tables, values, method, work, stage):
            return -1.0
        work.known[0] = 1.0
    largest = 0.0
    for each in method.estimates:
        for i in range(len(right)):
            right[i] = dt * each[0] * rates[stages, i]
        for s in range(stages):
            _add(right, dt * each[s + 1], rates[s])
        _set(error, right)
        if is_implicit:
            _solve(work, right, error)
        for i in range(len(error)):
            one = abs(error[i]) / (pace.atol + pace.rtol * abs(new[i]))
            if not one <= largest:
                largest = one if abs(new[i]) < np.inf and one < np.inf else np.inf
    return largest


# The next length is this share of what the estimate allows, and no less than this of the last one.
SAFE, LEAST = 0.9, 0.2
# A step is given up below so many distances of floating-point numbers at its time, which it would
# hardly change, and below this share of the time to go, where its time is 0.
_DISTANCES, _TINY = 10.0, 1e-30


def length_of_step(time: float, stop: float, wished: float) -> tuple[float, float]:
    """Return how long a step is, and the length below which it is given up."""
    rest = abs(stop - time)
    least = max(_DISTANCES * abs(np.spacing(time)), _TINY * rest)
    length = min(max(wished, least), rest)
    # No rest that is shorter than half a step.
    return (rest / 2 if 0 < rest - length < 0.5 * length else length), least


_length_of_step = njit(length_of_step, **PLAIN)


@njit(cache=True, nogil=True, **PLAIN)
def take_steps_to(of: Any, k: int, end: int, pace: Any) -> int:
    """Take steps as long as their errors allow; return the first one that is left to take.

    That is `end`, the one from `pace.stop` on, or one where the function branches in another way or
    that would be given up. After `march_until`.
    """
    run, size = of.run, pace.next[0]
    _begin(of.tables, of.values, run.params)
    while k < end and run.times[k] != pace.stop:
        wished = min(size, pace.longest)
        length, least = _length_of_step(run.times[k], pace.stop, wished)
        run.dt[k] = pace.ahead * length
        solved = _step(of, k, True)
        if solved == 0:
            of.work.known[0] = 0.0
        off = np.inf if solved == 0 else (_error(of, k, pace) if solved == 1 else -1.0)
        if off < 0.0:
            of.work.known[0] = 0.0
            break
        if off > 1.0 and length <= least:
            break
        change = SAFE * off ** (-1.0 / pace.order) if off > 0.0 else np.inf
        size = length * min(max(change, LEAST), pace.growth)
        if off <= 1.0:
            is_last = length == abs(pace.stop - run.times[k])
            run.times[k + 1] = pace.stop if is_last else run.times[k] + run.dt[k]
            k += 1
    pace.next[0] = size
    return k


# -- Back ------------------------------------------------------------------------------------------


@njit(**PLAIN)
def _sweep(tables: Any, values: Any, above: Any) -> None:
    """Compute gradients of all elements from those of the function's results."""
    _fill(values.grads, 0.0)
    for i in range(len(above)):
        values.grads[tables.results[i]] += above[i]
    pull_back(tables, values)


@njit(**PLAIN)
def _weigh(method: Any, factor: float, x: Any, sums: Any) -> None:
    """Add ``factor Mᵀ x`` to sums."""
    for e in range(len(method.mass)):
        sums[method.mass[e, 1]] += factor * method.weights[e] * x[method.mass[e, 0]]


@njit(**PLAIN)
def _add_grads(
    tables: Any, values: Any, method: Any, grads: Any, dt: float, c: float, loss: int
) -> None:
    """Add the last sweep's gradients, except the state's; `dt` divides the rate."""
    g, leaves = values.grads, tables.leaves
    in_time = g[leaves[2, 0]]
    grads.time[loss] += in_time
    grads.dt[loss] += c * in_time
    for i in range(leaves[4, 1]):
        grads.params[i, loss] += g[leaves[4, 0] + i]
    if method.kind == RESIDUAL:
        grads.dt[loss] += g[leaves[3, 0]]
        for i in range(leaves[1, 1]):
            grads.old[i, loss] += g[leaves[1, 0] + i]


@njit(**PLAIN)
def _pull_step_back(of: Any, k: int, above: Any, grads: Any) -> bool:
    """Add gradients of everything a step has read; return whether its matrices are regular."""
    tables, values, method, work, rules, run = of
    states, dt, a = run.states, run.dt[k], method.a
    new, old, older = states[k + 2], states[k + 1], states[k]
    stages, losses = len(a), above.shape[1]
    vectors, found = work.vectors, work.rates
    through, own, rest = vectors[0], vectors[1], vectors[2]
    ratio = dt / run.dt[k - 1] if k else 0.0
    alpha, b, c = _coefficients(method.kind, ratio)
    kappa = -1.0 if method.kind == RESIDUAL else dt
    leaf = tables.leaves[0, 0]
    _turn_to(tables, values, old, dt)
    for s in range(stages - 1, -1, -1):
        state = new if s == stages - 1 else old
        if method.inner[s] >= 0:
            state = run.inner[k, method.inner[s]]
        is_read = a[s, s] != 0.0
        for j in range(s + 1, stages):
            is_read = is_read or a[j, s] != 0.0
        if is_read:
            time = run.times[k] + method.c[s] * dt
            if not _evaluate_at(tables, values, state, time, True):
                return False
            stage = alpha, kappa * a[s, s], time
            if a[s, s] != 0.0 and not _linearise(tables, values, method, work, stage):
                return False
        for loss in range(losses):
            adjoint = found[loss * stages + s]
            _fill(through, 0.0)
            has_later = False
            for j in range(s + 1, stages):
                if a[j, s] != 0.0:
                    _add(through, dt * a[j, s], found[loss * stages + j])
                    has_later = True
            for i in range(len(own)):
                own[i] = above[i, loss] if s == stages - 1 else 0.0
            if has_later and a[s, s] != 0.0:
                _sweep(tables, values, through)
                for i in range(len(own)):
                    own[i] += values.grads[leaf + i]
            if a[s, s] != 0.0:
                _adjoint(work, rules, own, adjoint, rest)
                _weigh(method, -b, adjoint, grads.old[:, loss])
                _weigh(method, -c, adjoint, grads.older[:, loss])
                _add(through, kappa * a[s, s], adjoint)
            if is_read:
                _sweep(tables, values, through)
                _add_grads(tables, values, method, grads, dt, method.c[s], loss)
                if method.kind != RESIDUAL:
                    for i in range(len(own)):
                        rate = values.elements[tables.results[i]]
                        grads.dt[loss] += rate * (through[i] / dt)
            if a[s, s] == 0.0:
                for i in range(len(own)):
                    adjoint[i] = own[i] + (values.grads[leaf + i] if has_later else 0.0)
                    grads.old[i, loss] += adjoint[i]
            elif method.kind == BDF2 and k:
                one = 1 + ratio
                _fill(rest, 0.0)
                _weigh(method, 1.0, adjoint, rest)
                in_ratio = 0.0
                for i in range(len(own)):
                    moved = new[i] / (one * one) - old[i]
                    moved += (ratio * ratio + 2 * ratio) / (one * one) * older[i]
                    in_ratio += moved * rest[i]
                grads.dt[loss] -= in_ratio / run.dt[k - 1]
                grads.dt_before[loss] += in_ratio * dt / run.dt[k - 1] ** 2
    return True


@njit(cache=True, nogil=True, **PLAIN)
def pull_steps_back(of: Any, begin: int, above: Any, grads: Any, in_dt: Any) -> int:
    """Go back from step ``begin + len(above)`` to `begin`; return the last one that was right.

    `above` has gradients of the loss in the states after these steps, ``(steps, n, losses)``;
    gradients from later steps are added. If a step is not solved, the sums are useless.
    """
    _begin(of.tables, of.values, of.run.params)
    n, losses = grads.old.shape
    for k in range(begin + len(above) - 1, begin - 1, -1):
        own = above[k - begin]
        for i in range(n):
            for loss in range(losses):
                own[i, loss] += grads.old[i, loss]
                grads.old[i, loss] = grads.older[i, loss]
                grads.older[i, loss] = 0.0
        _set(grads.dt, grads.dt_before)
        _fill(grads.dt_before, 0.0)
        _set(in_dt[k], grads.time)
        if not _pull_step_back(of, k, own, grads):
            return k + 1
        _add(in_dt[k], 1.0, grads.dt)
    return begin
