"""A simulation that has run: its states, and gradients in all its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InputError, InputTypeError, MemoryLimitError, NewtonError, short
from ..formatting import format_bytes, quantity
from ..kernels.cpu.marching import Trajectory
from ..locks import new_lock
from .compiled import Loops, Steps
from .derivatives import RenewedError
from .factors import Vector
from .newton import NotSolved, Solver, Tolerance
from .params import Params
from .schemes import Grads, Place, Scheme, place_of

# Bytes for factors other than the newest, without a memory limit.
ROOM = 1 << 28


class SimulationGradients(NamedTuple):
    """Gradients of losses in the inputs of a simulation.

    Attributes
    ----------
    u0 : ndarray, shape (n,) or (losses, n)
        The gradient in the initial state.
    params : float, ndarray, dict, tuple or None
        The gradients in the parameters, in their structure; with several losses, each has an axis
        of losses in front.
    dt : float or ndarray
        The gradient in the length of all steps, if that was one number; otherwise the gradients in
        each length, ``(steps,)``. With several losses, an axis of losses is in front.
    """

    u0: Vector
    params: Any
    dt: Any


class Problem(NamedTuple):
    """The problem to solve, without the lengths of steps.

    Attributes
    ----------
    scheme : Scheme
        The equations of a step.
    u0 : ndarray
        The initial state of all samples as one vector; a private copy.
    shape : tuple of int
        The user's shape of states, ``(n,)`` or ``(batch, n)``.
    params : Params
        The parameters.
    t0 : float
        The time of `u0`.
    tolerance : Tolerance
        How exact states are.
    memory_limit : int or None
        Bytes.
    """

    scheme: Scheme
    u0: Vector
    shape: tuple[int, ...]
    params: Params
    t0: float
    tolerance: Tolerance
    memory_limit: int | None


class Run:
    """A simulation that has run, as ``forward`` of `ImplicitSteps` or `TimeSteps` returns it.

    Attributes
    ----------
    states : ndarray, shape (steps + 1, n) or (steps + 1, batch, n), or None
        The states, the initial one first. None if a memory limit left no room for all of them. If
        `forward` raised, these are the states before the error; see :class:`.NewtonError`.
    last : ndarray, shape (n,) or (batch, n)
        The last state.
    times : ndarray, shape (steps + 1,)
        The times of the states.
    evaluated : ndarray of int64, or None
        The numbers of the states at the times of `t_eval`, if that was given:
        ``run.states[run.evaluated]`` are these states.
    newton : ndarray of int64, shape (steps,)
        The number of Newton iterations of each step.
    factorisations : int
        How many matrices were factorised.
    derivatives : str
        The source of the derivatives that no function of the user returns: the function itself,
        which was read; JAX or PyTorch; or complex steps and differences, and why.
    """

    def __init__(
        self,
        problem: Problem,
        dt: NDArray[np.float64],
        has_one_dt: bool,
        march: Steps | None = None,
        solver: Solver | None = None,
    ) -> None:
        scheme, u0 = problem.scheme, problem.u0
        self._scheme, self._params = scheme, problem.params
        self._dt, self._has_one_dt = dt, has_one_dt
        # A backward pass changes the factors and the kept states.
        self._lock = new_lock()
        self._is_half_way = False
        self._left: tuple[Any, ...] | None = None
        self._n, self._count, self._shape = len(u0), len(dt), problem.shape
        self.times = problem.t0 + np.concatenate([[0.0], np.cumsum(dt)])
        if march is not None:
            self.times = np.array(march.times)
        self.evaluated: NDArray[np.int64] | None = None
        still = np.flatnonzero(np.diff(self.times) == 0)
        if len(still):
            raise InputError(too_short(float(dt[still[0]]), float(self.times[still[0]])))
        self.newton = np.zeros(len(dt), np.int64)
        self._length, room = self._segment(problem.memory_limit)
        self._solver = solver or Solver(scheme.matrices, problem.tolerance, room)
        rows = min(self._length, self._count)
        # The state before a segment, and the states of the segment.
        self._states = np.empty((rows + 2, self._n))
        self._inner = np.empty((rows, scheme.stages, self._n))
        # The first state of each segment, with the state before it.
        self._marks = np.empty((-(-self._count // self._length) if rows else 1, 2, self._n))
        about = self._states, self._inner, self.times, dt, self.newton, self._params.vector
        self._trajectory = Trajectory(*about)
        self._loops: Loops | None = None
        if self._length >= self._count:
            samples = u0.size // problem.shape[-1]
            self._loops = Loops(scheme, samples, self._trajectory, problem.tolerance)
        self._begin, self._done, self._last = 0, 0, u0
        self._states[0] = self._states[1] = u0
        self._marks[0] = u0
        if march is not None and solver is not None:
            self._states[1:] = march.states
            if march.inner:
                self._inner[:] = march.inner
            self.newton[:] = march.newton
            self._done, self._last = self._count, march.states[-1]

    def _segment(self, limit: int | None) -> tuple[int, int]:
        """Return how many steps a segment has, and the bytes for factors other than the newest."""
        vector, count, factors = 8 * self._n, self._count, self._scheme.matrices.nbytes
        if limit is None or count == 0:
            return max(count, 1), ROOM

        def needed(length: int) -> int:
            # The rest: factors, values of a Jacobian or two, and a few vectors.
            marks = 2 * vector * -(-count // length)
            return factors + 14 * vector + length * (1 + self._scheme.stages) * vector + marks

        lengths = sorted({count, *(-(-count // parts) for parts in range(1, count + 1))})
        fitting = [length for length in lengths if needed(length) <= limit]
        if not fitting:
            raise MemoryLimitError(
                f"{quantity(count, 'step')} of {quantity(self._n, 'unknown')} take at least "
                f"{format_bytes(min(map(needed, lengths)))}, segment by segment; memory_limit is "
                f"{format_bytes(limit)}"
            )
        return fitting[-1], limit - needed(fitting[-1])

    def note_evaluated(self, t_eval: NDArray[np.float64]) -> None:
        """Record the numbers of the states at the times of `t_eval` that were reached."""
        ahead = np.sign(self.times[-1] - self.times[0])
        reached = t_eval[ahead * t_eval <= ahead * self.times[-1]]
        self.evaluated = np.searchsorted(ahead * self.times, ahead * reached)

    # -- Forward ----------------------------------------------------------------------------------

    def _advance(self, k: int) -> None:
        """Take a step of the current segment, or the first step of the next."""
        if k == self._begin + self._length:
            self._states[:2] = self._states[self._length : self._length + 2]
            self._begin = k
            self._marks[k // self._length] = self._states[:2]
            self._solver.forget()
        self._solver.turn_to(k)
        try:
            state, self.newton[k] = self._scheme.advance(self._solver, self._place(k, 0))
        except NotSolved as error:
            raise self._failure(k, error) from None
        self._states[k - self._begin + 2] = state
        if k == self._done:
            self._done, self._last = k + 1, state

    def _failure(self, k: int, error: NotSolved) -> NewtonError:
        """Return the error for a step without a solution."""
        return NewtonError(
            f"step {k} has no solution that was found, from t={self.times[k]:.6g} with "
            f"dt={self._dt[k]:.6g}{self._params.told}: {error.why}"
        )

    def _place(self, k: int, ends: int) -> Place:
        """Return a step, with `ends` states after its beginning."""
        return place_of(self._trajectory, k, ends, self._begin)

    @property
    def kept(self) -> tuple[Vector, ...]:
        """What a backward pass needs of the forward pass: all states, or those before segments."""
        if self._length < self._count:
            return (self._marks,)
        return self._states, self._inner

    def restore(self, kept: Sequence[Vector]) -> None:
        """Take over what another run has kept, as if this run had taken the steps."""
        for own, given in zip(self.kept, kept, strict=True):
            own[:] = given
        self._done = self._count
        if self._length < self._count:
            self._begin = -1  # no segment's states are here
        else:
            self._last = self._states[-1]

    def march(self, watch: Callable[[int], object] | None, each: bool = False) -> None:
        """Take all steps; call `watch` with their number after some steps, or after each."""
        k = 0
        with self._told():
            while k < self._count:
                begin = k
                if self._loops is not None and not each:
                    k = self._loops.advance(k, self._count)
                    self._done, self._last = k, self._states[k + 1]
                if k == begin:
                    self._advance(k)
                    k += 1
                if watch is not None:
                    watch(k)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Attach the run to an exception that passes through the block.

        NumPy's warnings are off: Newton's method may try any state.
        """
        try:
            with np.errstate(all="ignore"):
                yield
        except BaseException as error:
            error.run = self  # type: ignore[attr-defined]
            raise

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return self._done

    @property
    def planned(self) -> int:
        """How many steps there are."""
        return self._count

    @property
    def states(self) -> Vector | None:
        """All states, the initial one first; None if not all of them are kept."""
        if self._length < self._count:
            return None
        states = self._states[1 : self._done + 2].reshape(-1, *self._shape)
        states.flags.writeable = False
        return states

    @property
    def last(self) -> Vector:
        """The last state."""
        return self._last.reshape(self._shape).copy()

    @property
    def derivatives(self) -> str:
        """The source of the function's derivatives."""
        return self._scheme.source.origin

    @property
    def factorisations(self) -> int:
        """How many matrices were factorised, forward and backward."""
        compiled = 0 if self._loops is None else self._loops.factorisations
        return self._solver.factorisations + compiled

    def __repr__(self) -> str:
        kept = "" if self._length >= self._count else f", kept {self._length} at a time"
        return (
            f"Run({quantity(self._done, 'step')} of {quantity(self._n, 'unknown')}, "
            f"t={self.times[0]:g} to {self.times[self._done]:g}, "
            f"{quantity(int(self.newton.sum()), 'iteration')}, "
            f"{quantity(self.factorisations, 'factorisation')}{kept})"
        )

    # -- Backward ---------------------------------------------------------------------------------

    def backward(
        self,
        grad_states: ArrayLike | Callable[[int], Any] | None = None,
        *,
        grad_last: ArrayLike | None = None,
    ) -> SimulationGradients:
        """Return gradients in the initial state, the parameters and the lengths of steps.

        For steps ``F(u_{t+1}, u_t) = 0`` this is one sweep of linear solves, from the last step to
        the first:

            (∂F/∂u_{t+1})ᵀ λ_t = ∇u_{t+1},    ∇u_t += -(∂F/∂u_t)ᵀ λ_t,    ∇p += -(∂F/∂p)ᵀ λ_t

        You may call it any number of times. Calls from several threads wait for each other.

        Parameters
        ----------
        grad_states : array_like, shape (steps + 1, n) or (losses, steps + 1, n), or callable
            The partial derivative of the loss in each state, or of several losses. Or a function
            that takes the number of a state and returns the derivative in it, ``(n,)`` or
            ``(losses, n)``, or None; it is called from the last state to the first.
        grad_last : array_like, shape (n,) or (losses, n), optional
            A derivative in the last state, which is added.

        Returns
        -------
        Gradients
            Gradients in ``u0``, ``params`` and ``dt``.

        Raises
        ------
        InputError, InputTypeError
            If shapes or dtypes are wrong, or neither is given.
        NewtonError
            If the Jacobian of a step is singular.
        GradientError
            If derivatives of the function are wrong: the pattern lacks an entry, or complex steps
            and differences disagree and it is unclear which are right.
        """
        with self._lock:
            while True:
                try:
                    return self._backward(grad_states, grad_last)
                except RenewedError:  # at most once per argument of the function
                    continue

    def _backward(self, grad_states: Any, grad_last: Any) -> SimulationGradients:
        own, losses = self._read_grads(grad_states, grad_last)
        if self._begin == max(self._done - 1, 0) // self._length * self._length:
            # Each call begins with the factors of the forward pass, so that all calls give the same
            # bits.
            if self._left is None:
                self._left = self._solver.snapshot()
            self._solver.restore(self._left)
        columns = 1 if losses is None else losses
        grads = Grads(self._n, len(self._params.vector), columns)
        in_dt = np.zeros((self._done, columns))
        self._scheme.source.begin()
        k = self._done
        with self._told():
            while k:
                begin = k
                if self._loops is not None:
                    k = self._loops.pull_back(k, own, grads, in_dt)
                if k < begin:
                    continue
                k -= 1
                # The caller's function may call this method itself, which changes the kept states.
                above = grads.old + own(k + 1, k + 2)[0]
                self._keep(k)
                grads.begin()
                later = grads.time.copy()
                self._solver.turn_to(k)
                try:
                    self._scheme.pull_back(self._solver, self._place(k, 1), above, grads)
                except NotSolved as error:
                    raise self._failure(k, error) from None
                in_dt[k] = later
                in_dt[k] += grads.dt
            self._scheme.source.settle()
        u0 = grads.old + own(0, 1)[0]
        dt = in_dt.sum(0) if self._has_one_dt else in_dt
        if losses is None:
            number = float(dt[0]) if self._has_one_dt else dt[:, 0]
            return SimulationGradients(
                u0[:, 0].reshape(self._shape), self._params.of(grads.params[:, 0]), number
            )
        return SimulationGradients(
            u0.T.reshape(losses, *self._shape).copy(),
            self._params.of(grads.params.T, (losses,)),
            dt.T.copy(),
        )

    def _keep(self, k: int) -> None:
        """Recompute the states around a step, unless they are kept."""
        number = k // self._length
        if number * self._length == self._begin and not self._is_half_way:
            return
        # An interrupt or a fork may leave only some of the states.
        self._is_half_way = True
        self._begin = number * self._length
        self._states[:2] = self._marks[number]
        self._solver.forget()
        for step in range(self._begin, min(self._begin + self._length, self._done)):
            self._advance(step)
        self._is_half_way = False

    def _read_grads(
        self, grad_states: Any, grad_last: Any
    ) -> tuple[Callable[[int, int], Vector], int | None]:
        """Return a function for the gradients in some states, and the number of losses.

        The gradients in a range of states have the shape ``(states, n, losses)``.
        """
        if grad_states is None and grad_last is None:
            raise InputError("grad_states and grad_last are None; expected one of them")
        one = self._shape
        last = states = None
        losses: int | None = None
        if grad_last is not None:
            last = _read("grad_last", grad_last, one)
            losses = len(last) if last.ndim > len(one) else None
        if callable(grad_states):
            function = grad_states
            if last is None:
                first = function(self._done)
                if first is not None:
                    first = _read(f"grad_states({self._done})", first, one)
                    losses = len(first) if first.ndim > len(one) else None
        elif grad_states is not None:
            states = _read("grad_states", grad_states, (self._done + 1, *one))
            many = len(states) if states.ndim > len(one) + 1 else None
            if last is not None and many != losses:
                raise InputError(
                    f"grad_states has shape {states.shape}, grad_last {last.shape}; expected one "
                    "number of losses"
                )
            losses = many
        columns = 1 if losses is None else losses
        known: dict[int, Vector | None] = {}  # the function is called once per state

        def of_state(k: int) -> Vector | None:
            if (given := function(k)) is None:
                return None
            given = _read(f"grad_states({k})", given, one)
            if (len(given) if given.ndim > len(one) else None) != losses:
                raise InputError(
                    f"grad_states({k}) has shape {given.shape}; expected "
                    f"{one if losses is None else (losses, *one)}"
                )
            return given.reshape(-1, self._n).T

        def own(begin: int, end: int) -> Vector:
            found = np.zeros((end - begin, self._n, columns))
            if states is not None:
                found += np.moveaxis(states.reshape(columns, -1, self._n)[:, begin:end], 0, 2)
            elif grad_states is not None:
                for k in [k for k in known if k >= end]:
                    del known[k]
                for k in reversed(range(begin, end)):
                    if k not in known:
                        known[k] = of_state(k)
                    if (more := known[k]) is not None:
                        found[k - begin] += more
            if last is not None and end > self._done:
                found[-1] += last.reshape(-1, self._n).T
            return found

        return own, losses


def too_short(dt: float, time: float) -> str:
    """Return the error text for a step that is too short to change the time."""
    return (
        f"dt is {dt:.6g} at t={time:.6g}, where numbers are {np.spacing(abs(time)):.3g} apart; "
        "expected one that changes the time"
    )


def _read(name: str, given: Any, shape: tuple[int, ...]) -> Vector:
    """Return a copy of numbers of a shape, which may have an axis of losses in front."""
    array = np.asarray(given)
    if array.dtype.kind not in "fiub":
        raise InputTypeError(f"{name} is {short(given)}; expected real numbers")
    if array.ndim not in (len(shape), len(shape) + 1) or array.shape[-len(shape) :] != shape:
        raise InputError(
            f"{name} has shape {array.shape}; expected {shape} or (losses, "
            f"{', '.join(map(str, shape))})"
        )
    return array.astype(np.float64)
