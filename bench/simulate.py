"""Simulations and their gradients, beside loops of SciPy and JAX, diffrax and Jaxley.

The whole work is timed: all steps, and the gradients of a loss of the last state in the first one
and in parameters that are numbers; in float64.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.integrate import solve_ivp
from scipy.sparse.linalg import splu

from sparsescan import Pattern
from sparsescan.simulate import TimeSteps
from sparsescan.simulate.factors import Matrices

from . import peers, races
from .cable import Cable, march
from .experiment import Experiment, Piece, Results, Table
from .page import significant
from .races import OURS
from .timing import PAUSE, Call, fastest, take_rounds

Array = NDArray[Any]

ALONE, FREE = "sparsescan, the function alone", "sparsescan, no limit"
IN_PYTHON = "sparsescan, steps in Python"
SCIPY, KLU = "SciPy, splu in each iteration", "jax.lax.scan, KLU"
DIFFRAX, JAXLEY = "diffrax, ImplicitEuler", "Jaxley"
TO_A_TIME, SOLVE_IVP = "diffrax, PIDController", "SciPy's solve_ivp, states alone"
KLU_ALONE, UMFPACK, PARDISO = "KLU", "UMFPACK", "Pardiso of MKL"
# Residuals that end Newton's method of peers, and the most iterations.
_ENOUGH, _MOST = 1e-9, 50
# Steps that tell which variant is fastest.
_TRIAL = 10
# The errors of steps whose lengths are chosen, relative and absolute, and the first length to try.
_ERROR, _FIRST = (1e-6, 1e-10), 1e-4


@dataclass(frozen=True)
class Problem:
    """Backward Euler for ``u' = f(u, p)``, and a loss ``above · u`` of the last state.

    Rates and Jacobians, whose values are in the order of the pattern, take NumPy's arrays or JAX's:
    ``rate(u, t, p, xp)``.
    """

    u0: Array
    params: dict[str, float]
    dt: float
    pattern: sp.csr_array
    rate: Callable[..., Any]
    jacobian: Callable[..., Any]
    vjp: Callable[..., dict[str, Any]]

    @property
    def above(self) -> Array:
        return np.random.default_rng(1).standard_normal(len(self.u0))


# -- Problems -------------------------------------------------------------------------------------


def _second(xp: Any, field: Any) -> Any:
    """Return second differences of a field, which is 0 around its grid."""
    if xp is np:
        wide = np.zeros([size + 2 for size in field.shape], field.dtype)
        wide[(slice(1, -1),) * field.ndim] = field
    else:
        wide = xp.pad(field, 1)
    if field.ndim == 1:
        return wide[2:] - 2 * field + wide[:-2]
    within = slice(1, -1)
    beside = wide[2:, within] + wide[:-2, within] + wide[within, 2:] + wide[within, :-2]
    return beside - 4 * field


def _differences(side: int) -> tuple[sp.csr_array, Array, Array]:
    """Return the matrix of :func:`_second`, the row of each entry, and 1 where one is diagonal."""
    line = sp.diags_array([1.0, -2.0, 1.0], offsets=[-1, 0, 1], shape=(side, side))
    matrix = sp.csr_array(sp.kronsum(line, line, format="csr"))
    matrix.sort_indices()
    rows = np.repeat(np.arange(side * side), np.diff(matrix.indptr))
    return matrix, rows, (matrix.indices == rows).astype(float)


def fisher(side: int) -> Problem:
    """Return a wave of Fisher and KPP, which crosses the grid: ``u' = d ∇²u + r u (1 - u)``."""
    matrix, rows, own = _differences(side)
    x, y = np.meshgrid(*[np.arange(side) / side] * 2)

    def spread(u: Any, xp: Any = np) -> Any:
        return _second(xp, u.reshape(side, side)).reshape(-1)

    def rate(u: Any, t: Any, p: Any, xp: Any = np) -> Any:
        return p["d"] * spread(u, xp) + p["r"] * u * (1 - u)

    def jacobian(u: Any, t: Any, p: Any, xp: Any = np) -> Any:
        return p["d"] * matrix.data + own * (p["r"] * (1 - 2 * u))[rows]

    def vjp(above: Array, u: Array, t: Any, p: Any) -> dict[str, Any]:
        return {"d": above @ spread(u), "r": above @ (u * (1 - u))}

    u0 = np.exp(-((x - 0.2) ** 2 + (y - 0.2) ** 2) / 0.005).ravel()
    return Problem(u0, {"d": 5.0, "r": 0.2}, 0.1, matrix, rate, jacobian, vjp)


def brusselator(side: int) -> Problem:
    """Return waves of the Brusselator, of two fields."""
    matrix, rows, own = _differences(side)
    n, entries = side * side, matrix.nnz
    eye = sp.eye_array(n, format="csr")

    def numbered(begin: int, like: sp.csr_array) -> sp.csr_array:
        return sp.csr_array((np.arange(begin, begin + like.nnz) + 1, like.indices, like.indptr))

    blocks = [
        [numbered(0, matrix), numbered(entries, eye)],
        [numbered(entries + n, eye), numbered(entries + 2 * n, matrix)],
    ]
    pattern = sp.csr_array(sp.block_array(blocks, format="csr"))
    pattern.sort_indices()
    order = pattern.data - 1

    def halves(u: Any) -> Any:
        return u[:n], u[n:]

    def spread(u: Any, xp: Any = np) -> Any:
        return _second(xp, u.reshape(side, side)).reshape(-1)

    def rate(u: Any, t: Any, p: Any, xp: Any = np) -> Any:
        u, v = halves(u)
        reacted = p["b"] * u - u * u * v
        found = p["a"] - u - reacted + p["du"] * spread(u, xp), reacted + p["dv"] * spread(v, xp)
        return xp.concatenate(found)

    def jacobian(u: Any, t: Any, p: Any, xp: Any = np) -> Any:
        u, v = halves(u)
        slope, square = p["b"] - 2 * u * v, u * u
        first = p["du"] * matrix.data - own * (1 + slope)[rows]
        second = p["dv"] * matrix.data - own * square[rows]
        return xp.concatenate([first, square, slope, second])[order]

    def vjp(above: Array, u: Array, t: Any, p: Any) -> dict[str, Any]:
        (u, v), (above_u, above_v) = halves(u), halves(above)
        spreads = {"du": above_u @ spread(u), "dv": above_v @ spread(v)}
        return {"a": above_u.sum(), "b": (above_v - above_u) @ u, **spreads}

    rng = np.random.default_rng(0)
    u0 = np.concatenate([1 + 0.5 * rng.random(n), 3 + rng.random(n)])
    params = {"a": 1.0, "b": 3.0, "du": 10.0, "dv": 5.0}
    return Problem(u0, params, 0.02, pattern, rate, jacobian, vjp)


def burgers(n: int) -> Problem:
    """Return Burgers' equation on a line: ``u' = ν u'' - u u'``."""
    pattern = sp.diags_array([1.0, 1.0, 1.0], offsets=[-1, 0, 1], shape=(n, n)).tocsr()
    h = 1 / n

    def rate(u: Any, t: Any, p: Any, xp: Any = np) -> Any:
        half, edge = u * u / (4 * h), xp.zeros(1)
        moved = xp.concatenate([half[1:], edge]) - xp.concatenate([edge, half[:-1]])
        return p["nu"] / h**2 * _second(xp, u) - moved

    def jacobian(u: Any, t: Any, p: Any) -> Any:
        values, beside = np.empty((n, 3)), p["nu"] / h**2
        values[:, 1] = -2 * beside
        values[1:, 0] = beside + u[:-1] / (2 * h)
        values[:-1, 2] = beside - u[1:] / (2 * h)
        return values.ravel()[1:-1]

    def vjp(above: Array, u: Array, t: Any, p: Any) -> dict[str, Any]:
        return {"nu": above @ _second(np, u) / h**2}

    u0 = np.exp(-(((np.arange(n) * h - 0.3) / 0.1) ** 2))
    return Problem(u0, {"nu": 2e-3}, 5e-4, pattern, rate, jacobian, vjp)


_DENSE = sp.csr_array(np.ones((3, 3)))


def lorenz(_: int) -> Problem:
    """Return the three unknowns of Lorenz."""

    def rate(u: Any, t: Any, p: Any, xp: Any = np) -> Any:
        x, y, z = u
        return xp.stack([p["s"] * (y - x), x * (p["r"] - z) - y, x * y - p["b"] * z])

    def jacobian(u: Any, t: Any, p: Any, xp: Any = np) -> Any:
        (x, y, z), s = u, p["s"]
        return xp.asarray([-s, s, 0.0, p["r"] - z, -1.0, -x, y, x, -p["b"]])

    def vjp(above: Array, u: Array, t: Any, p: Any) -> dict[str, Any]:
        return {"s": above[0] * (u[1] - u[0]), "r": above[1] * u[0], "b": -above[2] * u[2]}

    params = {"s": 10.0, "r": 28.0, "b": 8 / 3}
    return Problem(np.array([1.0, 2.0, 20.0]), params, 0.001, _DENSE, rate, jacobian, vjp)


def robertson(_: int) -> Problem:
    """Return Robertson's reaction, of three species."""

    def rate(u: Any, t: Any, p: Any, xp: Any = np) -> Any:
        first, second, third = p["a"] * u[0], p["b"] * u[1] * u[1], p["c"] * u[1] * u[2]
        return xp.stack([third - first, first - second - third, second])

    def jacobian(u: Any, t: Any, p: Any, xp: Any = np) -> Any:
        a, double, y, z = p["a"], 2 * p["b"] * u[1], p["c"] * u[2], p["c"] * u[1]
        return xp.asarray([-a, y, z, a, -double - y, -z, 0.0, double, 0.0])

    def vjp(above: Array, u: Array, t: Any, p: Any) -> dict[str, Any]:
        first, second = above[1] - above[0], above[2] - above[1]
        products = first * u[0], second * u[1] * u[1], -first * u[1] * u[2]
        return dict(zip("abc", products, strict=True))

    params = {"a": 0.04, "b": 3e7, "c": 1e4}
    return Problem(np.array([1.0, 0.0, 0.0]), params, 0.002, _DENSE, rate, jacobian, vjp)


# -- Ours -----------------------------------------------------------------------------------------


def ours(
    problem: Problem, steps: int, alone: bool = False, limit: int | None = None
) -> dict[str, Call]:
    """Return a call with derivatives by functions, or one with the rate alone."""
    given: dict[str, Any] = {"jacobian": problem.jacobian, "vjp": problem.vjp}
    sim = TimeSteps(problem.rate, problem.pattern, **({} if alone else given))
    about = problem.u0, problem.params, problem.above, problem.dt

    def call() -> dict[str, Any]:
        last, grads, seconds = march(sim, *about, steps, limit)
        return {"last": last, "u0": grads.u0, **grads.params, "seconds": seconds}

    return {"complex steps" if alone else "functions": call}


def ours_to(problem: Problem, end: int) -> dict[str, Call]:
    """Return calls that march to a time, with steps as long as their errors allow."""

    def call(sim: TimeSteps) -> dict[str, Any]:
        run = sim.forward(problem.u0, problem.params, until=end, dt=_FIRST, error=_ERROR)
        grads = run.backward(grad_last=problem.above)
        return {"last": run.last, "u0": grads.u0, **grads.params}

    methods = "kencarp4", "kencarp5", "sdirk3"
    return {name: partial(call, TimeSteps(problem.rate, method=name)) for name in methods}


# -- Peers ----------------------------------------------------------------------------------------


def scipy_loop(problem: Problem, steps: int) -> dict[str, Call]:
    """Return a loop as one writes it: Newton's method, and the adjoint by hand."""
    pattern, dt, p = problem.pattern, problem.dt, problem.params
    numbers = sp.csr_array((np.arange(pattern.nnz), pattern.indices, pattern.indptr))
    columns = numbers.tocsc()
    rows = np.repeat(np.arange(len(problem.u0)), np.diff(pattern.indptr))
    own = (pattern.indices == rows).astype(float)

    def factors(u: Array, spec: str) -> Any:
        values = (own - dt * problem.jacobian(u, 0.0, p))[columns.data]
        matrix = sp.csc_array((values, columns.indices, columns.indptr), pattern.shape)
        return splu(matrix, permc_spec=spec)

    def call(spec: str, leads: bool) -> dict[str, Any]:
        start = time.perf_counter()
        states = [problem.u0]
        for _ in range(steps):
            old = states[-1]
            u = 2 * old - states[-2] if leads and len(states) > 1 else old
            for _ in range(_MOST):
                rest = u - old - dt * problem.rate(u, 0.0, p)
                if np.abs(rest).max() < _ENOUGH:
                    break
                u = u - factors(u, spec).solve(rest)
            states.append(u)
        middle = time.perf_counter()
        above, grads = problem.above, dict.fromkeys(p, 0.0)
        for u in states[:0:-1]:
            above = factors(u, spec).solve(above, "T")
            for name, grad in problem.vjp(above, u, 0.0, p).items():
                grads[name] += dt * grad
        seconds = middle - start, time.perf_counter() - middle
        return {"last": states[-1], "u0": above, **grads, "seconds": seconds}

    return {
        f"{spec}, from {'where two states lead' if leads else 'the last state'}": partial(
            call, spec, leads
        )
        for spec in ("MMD_AT_PLUS_A", "COLAMD")
        for leads in (True, False)
    }


def _compiled(last: Callable[[Any, Any], Any], u0: Any, params: Any, above: Any) -> Call:
    """Return a call for the last state and gradients, of a function that returns the state."""
    with peers.in_float64() as jax:

        def loss(u0: Any, params: Any) -> Any:
            state = last(u0, params)
            return above @ state, state

        grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        given = jax.device_put((u0, params))
        program = grads.lower(*given).compile()

    def call() -> dict[str, Any]:
        with peers.in_float64():
            (_, state), (in_u0, in_params) = jax.block_until_ready(program(*given))
        return {"last": state, "u0": in_u0, **in_params}

    return call


def klu_scans(problem: Problem, steps: int) -> dict[str, Call]:
    """Return loops of JAX, whose adjoint is written by hand; by two libraries with KLU."""
    found, lacks = {}, []
    for name, solvers in {"klujax": _klujax, "sparsax": _sparsax}.items():
        try:
            found[name] = _klu_scan(problem, steps, solvers)
        except peers.MissingPeerError as error:
            lacks.append(str(error))
    if not found:
        raise peers.MissingPeerError("; ".join(lacks))
    return found


def _klujax(rows: Any, columns: Any, n: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    klujax = peers.require("klujax", "pip install --no-deps klujax")
    symbol = klujax.analyze(rows, columns, n)

    def solve(values: Any, right: Any) -> Any:
        return klujax.solve_with_symbol(rows, columns, values, right, symbol)

    def transposed(values: Any, right: Any) -> Any:
        return klujax.tsolve_with_symbol(rows, columns, values, right, symbol)

    return solve, transposed


def _sparsax(rows: Any, columns: Any, n: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    sparsax = peers.require("sparsax", "pip install --no-deps sparsax")

    def by(values: Any, right: Any, is_transposed: bool) -> Any:
        factors = sparsax.lu_factor(rows, columns, values, n)
        return sparsax.lu_solve_factor(factors, right, is_transposed)

    return partial(by, is_transposed=False), partial(by, is_transposed=True)


def _klu_scan(problem: Problem, steps: int, solvers: Callable[..., Any]) -> Call:
    with peers.in_float64() as jax:
        jnp, lax, dt, n = jax.numpy, jax.lax, problem.dt, len(problem.u0)
        pattern = problem.pattern
        rows = np.repeat(np.arange(n), np.diff(pattern.indptr)).astype(np.int32)
        columns = pattern.indices.astype(np.int32)
        own = (columns == rows).astype(float)
        solve, transposed = solvers(rows, columns, n)

        def rate(u: Any, p: Any) -> Any:
            return problem.rate(u, 0.0, p, jnp)

        def values(u: Any, p: Any) -> Any:
            return own - dt * problem.jacobian(u, 0.0, p, jnp)

        @jax.custom_vjp
        def advance(old: Any, older: Any, p: Any) -> Any:
            def residual(u: Any) -> Any:
                return u - old - dt * rate(u, p)

            def newton(at: Any) -> Any:
                u, rest, k = at
                u = u - solve(values(u, p), rest)
                return u, residual(u), k + 1

            def goes_on(at: Any) -> Any:
                return (jnp.abs(at[1]).max() >= _ENOUGH) & (at[2] < _MOST)

            guess = 2 * old - older
            return lax.while_loop(goes_on, newton, (guess, residual(guess), 0))[0]

        def forward(old: Any, older: Any, p: Any) -> Any:
            u = advance(old, older, p)
            return u, (u, p)

        def backward(kept: Any, above: Any) -> Any:
            u, p = kept
            found = transposed(values(u, p), above)
            _, pull = jax.vjp(partial(rate, u), p)
            return found, jnp.zeros_like(found), pull(dt * found)[0]

        advance.defvjp(forward, backward)

        def last(u0: Any, p: Any) -> Any:
            def body(states: Any, _: Any) -> Any:
                return (advance(*states, p), states[0]), None

            return lax.scan(body, (u0, u0), length=steps)[0][0]

        return _compiled(last, problem.u0, problem.params, problem.above)


def diffrax_solves(problem: Problem, steps: int) -> dict[str, Call]:
    """Return its implicit Euler method, whose Jacobians are dense."""
    with peers.in_float64() as jax:
        diffrax = peers.require("diffrax", "pip install diffrax")
        optimistix = peers.require("optimistix", "pip install diffrax")
        term = diffrax.ODETerm(lambda t, u, p: problem.rate(u, t, p, jax.numpy))
        times = problem.dt * np.arange(steps + 1)

        def last(finder: Any, u0: Any, p: Any) -> Any:
            return diffrax.diffeqsolve(
                term,
                diffrax.ImplicitEuler(finder(rtol=1e-8, atol=1e-10), root_find_max_steps=_MOST),
                times[0],
                times[-1],
                None,
                u0,
                args=p,
                stepsize_controller=diffrax.StepTo(times),
                max_steps=steps,
            ).ys[0]

        about = problem.u0, problem.params, problem.above
        return {"Chord": _compiled(partial(last, optimistix.Chord), *about)}


def diffrax_to(problem: Problem, end: int) -> dict[str, Call]:
    """Return its stiff methods, with steps as long as the same errors allow."""
    with peers.in_float64() as jax:
        diffrax = peers.require("diffrax", "pip install diffrax")
        term = diffrax.ODETerm(lambda t, u, p: problem.rate(u, t, p, jax.numpy))
        pace = diffrax.PIDController(*_ERROR)

        def last(solver: Any, u0: Any, p: Any) -> Any:
            about: Any = {"args": p, "stepsize_controller": pace}
            return diffrax.diffeqsolve(term, solver, 0.0, end, _FIRST, u0, **about).ys[0]

        about = problem.u0, problem.params, problem.above
        solvers = diffrax.Kvaerno3, diffrax.Kvaerno4, diffrax.Kvaerno5
        return {each.__name__: _compiled(partial(last, each()), *about) for each in solvers}


def solve_ivp_to(problem: Problem, end: int) -> dict[str, Call]:
    """Return SciPy's stiff methods, which have no gradients."""

    def rate(t: float, u: Array) -> Any:
        return problem.rate(u, t, problem.params)

    def call(method: str) -> dict[str, Any]:
        run = solve_ivp(rate, (0, end), problem.u0, method, rtol=_ERROR[0], atol=_ERROR[1])
        return {"last": run.y[:, -1]}

    return {name: partial(call, name) for name in ("LSODA", "BDF", "Radau")}


# -- Solvers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Solves:
    """Factors of the first Newton matrix of a problem, and solves with them."""

    problem: Problem

    @cached_property
    def matrix(self) -> sp.csr_array:
        problem, like = self.problem, self.problem.pattern
        values = problem.jacobian(problem.u0, 0.0, problem.params)
        rate = sp.csr_array((values, like.indices, like.indptr), shape=like.shape)
        found = sp.csr_array(sp.eye_array(like.shape[0]) - problem.dt * rate)
        found.sort_indices()
        return found

    def _call(self, factorise: Callable[[], Callable[[Array], Array]], solves: int) -> Call:
        """Return a call that factorises, and solves for one right-hand side after another."""

        def call() -> dict[str, Any]:
            solve, x = factorise(), self.problem.above
            for _ in range(solves):
                x = solve(x)
            return {"last": x}

        return call

    def ours(self, solves: int) -> dict[str, Call]:
        """Return a call of SuperLU, as simulations use it."""
        matrices, values = Matrices(Pattern(self.matrix)), self.matrix.data

        def factorise() -> Callable[[Array], Array]:
            solve = matrices.factorise(values)
            assert solve is not None
            return lambda x: solve(x, False)

        return {"MMD_AT_PLUS_A, pivots on the diagonal": self._call(factorise, solves)}

    def kvxopt(self, solves: int, name: str) -> dict[str, Call]:
        """Return a call of KLU or UMFPACK, whose symbolic phase is done before."""
        peer = peers.require("kvxopt", "pip install kvxopt")
        solver = peers.require(f"kvxopt.{name}", "pip install kvxopt")
        entries = self.matrix.tocoo()
        places = entries.row.tolist(), entries.col.tolist()
        matrix = peer.spmatrix(entries.data.tolist(), *places, entries.shape)
        symbolic = solver.symbolic(matrix)

        def factorise() -> Callable[[Array], Array]:
            numeric = solver.numeric(matrix, symbolic)
            factors = (symbolic, numeric) if name == "klu" else (numeric,)

            def solve(x: Array) -> Array:
                found = peer.matrix(x)
                solver.solve(matrix, *factors, found)
                return np.array(found).ravel()

            return solve

        return {"": self._call(factorise, solves)}

    def pardiso(self, solves: int) -> dict[str, Call]:
        """Return a call of MKL's Pardiso, whose symbolic phase is done before."""
        peer = peers.require("pypardiso", "pip install pypardiso")
        solver, matrix = peer.PyPardisoSolver(), sp.csr_matrix(self.matrix)
        solver.factorize(matrix)

        def run(phase: int, x: Array) -> Array:
            solver.set_phase(phase)
            found: Array = solver._call_pardiso(matrix, x.reshape(-1, 1))
            return found.ravel()

        def factorise() -> Callable[[Array], Array]:
            run(22, self.problem.above)
            return partial(run, 33)

        return {"": self._call(factorise, solves)}


# -- The experiment -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Race:
    """A simulation, sizes and steps in full and in a quick run, and the ratios asked for.

    Contenders are given the problem of a size, and steps, and make ways that might be fastest. A
    call returns the last state and gradients by name, and the seconds of both passes, if they are
    apart.
    """

    title: str
    full: tuple[int, int]
    quick: tuple[int, int]
    problem: Callable[[int], Any]
    contenders: dict[str, Callable[..., dict[str, Call]]]
    wanted: dict[str, float] = field(default_factory=dict)
    rounds: int = 5
    unit: str = "steps"

    @property
    def name(self) -> str:
        return f"{self.title.format(self.full[0])}, {self.full[1]:,} {self.unit}"

    def measure(self, quick: bool) -> Results:
        """Return the times of contenders in turns, and how far their results are apart."""
        size, steps = self.quick if quick else self.full
        problem = self.problem(size)
        makers = {name: partial(make, problem) for name, make in self.contenders.items()}
        trials = {name: partial(make, _TRIAL) for name, make in makers.items()}
        _, chosen = peers.fastest_of_each(trials, partial(fastest, trials=1))
        calls = {name: makers[name](steps)[way] for name, way in chosen["variants"].items()}
        samples: dict[str, list[float]] = {name: [] for name in calls}
        passes: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        found: dict[str, dict[str, Any]] = {}

        def take(_: list[float]) -> None:
            for name, call in calls.items():
                time.sleep(0 if quick else PAUSE)
                start = time.perf_counter()
                found[name] = call()
                samples[name].append(time.perf_counter() - start)
                if "seconds" in found[name]:
                    passes[name].append(found[name].pop("seconds"))

        used = take_rounds(take, 1 if quick else self.rounds)
        differences = races.apart_from_ours(found)
        about = {"wanted": self.wanted, "differences": differences, "cores_others_used": used}
        return {"samples": samples, "passes": passes, **chosen, **about}


_OURS = {OURS: ours, ALONE: partial(ours, alone=True)}
_GRID = {**_OURS, SCIPY: scipy_loop, KLU: klu_scans}, {SCIPY: 3.0, KLU: 2.0}
_LINE = {**_OURS, DIFFRAX: diffrax_solves}, {DIFFRAX: 10.0}
# Functions alone are read, and steps compiled; those of users' derivatives are not.
_SMALL = {
    OURS: partial(ours, alone=True),
    IN_PYTHON: ours,
    SCIPY: scipy_loop,
    DIFFRAX: diffrax_solves,
}
_CABLE = {OURS: Cable.ours, JAXLEY: Cable.jaxley}, {JAXLEY: 5.0}
_SOLVERS = {
    OURS: Solves.ours,
    KLU_ALONE: partial(Solves.kvxopt, name="klu"),
    UMFPACK: partial(Solves.kvxopt, name="umfpack"),
    PARDISO: Solves.pardiso,
}
_FACTORS = "Factors of a matrix and solves"
_PROBLEMS = {"Fisher–KPP, {0}×{0}": (fisher, 2), "Brusselator, {0}×{0}": (brusselator, 1)}
RACES = (
    *(
        Race(title, (100, 1000), (10, 20), make, *_GRID, rounds)
        for title, (make, rounds) in _PROBLEMS.items()
    ),
    *(
        Race(title, (3, 20_000), (3, 40), make, _SMALL, {IN_PYTHON: 50.0, DIFFRAX: 10.0}, 3)
        for title, make in {"Lorenz, {0} unknowns": lorenz, "Robertson, {0}": robertson}.items()
    ),
    Race(
        "Robertson, {0}, steps by their errors",
        (3, 100_000),
        (3, 10),
        robertson,
        {OURS: ours_to, TO_A_TIME: diffrax_to, SOLVE_IVP: solve_ivp_to},
        {TO_A_TIME: 10.0},
        9,
        "units of time",
    ),
    Race("Burgers, {0:,} unknowns", (1000, 50), (50, 20), burgers, *_LINE, 2),
    Race("Cable, {0} compartments", (500, 4000), (12, 40), Cable, *_CABLE),
    *(
        Race(
            f"{_FACTORS}, {title}",
            (100, 60),
            (10, 3),
            lambda side, make=make: Solves(make(side)),
            _SOLVERS,
            unit="solves",
        )
        for title, (make, _) in _PROBLEMS.items()
    ),
)


def _within(mebibytes: int) -> Race:
    """Return the race of Burgers' equation within a limit of memory and without it."""
    title, sizes = "Burgers, {0:,} unknowns", ((10_000, 2_000), (500, 300))
    contenders = {OURS: partial(ours, limit=mebibytes << 20), FREE: ours}
    unit = f"steps, within {mebibytes} MiB"
    return Race(title, *sizes, burgers, contenders, {FREE: 1 / 1.8}, 3, unit)


def measure_limited(limit: int, quick: bool) -> Results:
    """Return the times of calls within the limit and without it, and the peak of memory."""
    race = _within(limit)
    n, steps = race.quick if quick else race.full
    (call,) = race.contenders[OURS](burgers(n), steps).values()
    tracemalloc.start()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return race.measure(quick) | {"limit": limit << 20, "peak": peak}


def _pieces(quick: bool) -> Iterable[Piece]:
    for each in RACES:
        yield Piece(each.name, partial(each.measure, quick))
    yield Piece(_within(64).name, partial(measure_limited, 1 if quick else 64, quick))


def _tables(results: Results) -> list[Table]:
    """Return seconds of both passes, and the peak within a limit."""
    numbers = ["seconds", "over ours", "forward", "backward", "backward / forward", "difference"]
    rows, peaks = [], []
    for key, piece in races.races(results).items():
        for name in piece["samples"]:
            total, base = (races.quartiles(piece, each)[1] for each in (name, OURS))
            both = np.median(piece["passes"][name] or [(np.nan, np.nan)], axis=0)
            ends = [each for what, each in piece["differences"].items() if what.endswith(name)]
            cells = [total, total / base, *both, both[1] / both[0], max(ends, default=np.nan)]
            rows.append([key, name, *("" if np.isnan(x) else significant(x) for x in cells)])
        if "peak" in piece:
            within = [significant(piece[each] / 2**20) for each in ("limit", "peak")]
            peaks.append([key, *within])
    heads = ["simulation", "limit, MiB", "peak, MiB"]
    every = Table(["simulation", "contender", *numbers], rows, numbers)
    return [every, Table(heads, peaks, heads[1:])]


def _about(quick: bool) -> Results:
    return {
        "the work": "all steps of backward Euler, and gradients of a loss of the last state in the "
        "first one and in parameters; float64; compiled before",
        OURS: "with functions of Jacobians and of products with their transposes in parameters; "
        "or with the function alone, by complex steps; of three unknowns the function alone, "
        "by compiled steps",
        IN_PYTHON: "with these functions of derivatives, so that no step is compiled",
        SCIPY: "the faster of two orders, and of two guesses; the adjoint has factors of each step",
        KLU: "the faster of klujax and sparsax; Newton's method in a while_loop, the adjoint by "
        "hand",
        DIFFRAX: "constant steps, RecursiveCheckpointAdjoint, dense Jacobians",
        TO_A_TIME: "the fastest of Kvaerno3, 4 and 5, with errors of 1e-6 and 1e-10; ours with the "
        "same, by the fastest of kencarp4, kencarp5 and sdirk3",
        SOLVE_IVP: "the fastest of LSODA, BDF and Radau, with these errors",
        JAXLEY: "backward Euler, with checkpoints at two levels: all states take over 24 GB",
        _FACTORS: "what about 15 steps take: one numeric factorisation and 60 solves, the symbolic "
        "phase done before",
    }


EXPERIMENT = Experiment(
    "simulate",
    "Simulations in time, and their gradients",
    _pieces,
    _about,
    partial(races.drawings, "Simulations"),
    partial(races.rows, "Simulation"),
    _tables,
)
