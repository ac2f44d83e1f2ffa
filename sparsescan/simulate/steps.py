"""Simulations: the user's residual or rate, a pattern, and a method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from ..checks import check_count, check_count_or_none, check_number
from ..errors import GradientError, InputError, InputTypeError, NewtonError, short
from ..symbolic.pattern import Pattern, of_keys, rows_of, union
from .adapt import End, march_until
from .arguments import check_form, check_order, names_unknown
from .compiled import Loops, Steps
from .derivatives import (
    CLOSE,
    Arguments,
    Coloured,
    Derivative,
    Differences,
    InJax,
    InTorch,
    Names,
    Source,
    Value,
    read_pattern,
)
from .factors import Vector
from .methods import TABLEAUS, check_method
from .newton import NotSolved, Solver, Tolerance
from .params import Params, read_array
from .run import ROOM, Problem, Run, too_short
from .schemes import BackwardDifferences, ResidualScheme, RungeKutta, Scheme, fresh
from .slopes import scales, slopes
from .traced import Traced

How = Literal["complex", "forward", "jax", "torch"]
Watch = Callable[[int], object] | None  # called after each step, with their number
# Called with a state, the time before it, and the length of a step.
Compare = Callable[[Vector, float, float], None]

# Up to this many parameters without a pattern, derivatives are taken one by one.
_MOST_PARAMS = 256


class _Given:
    """Derivatives from the user's functions where given, and from another source otherwise.

    Parameters
    ----------
    source : Source
        The other source.
    functions : dict of int to callable
        By the place of an argument: the user's function for the Jacobian in it.
    vjp : callable or None
        The user's function of λ and the arguments that returns ``(∂f/∂p)ᵀ λ``.
    form : _Form
        The form of the functions' arguments.
    """

    def __init__(
        self,
        source: Source,
        functions: dict[int, Callable[..., Any]],
        vjp: Callable[..., Any] | None,
        form: _Form,
    ) -> None:
        self._source, self._functions, self._vjp, self._form = source, functions, vjp, form
        self.value, self.along, self.note = source.value, source.along, source.note
        self.confirm, self.begin, self.settle = source.confirm, source.begin, source.settle

    @property
    def origin(self) -> str:
        return self._source.origin

    def renew(self, where: int) -> bool:
        return where not in self._functions and self._source.renew(where)

    def fresh(self) -> _Given:
        return _Given(self._source.fresh(), self._functions, self._vjp, self._form)

    def jacobian(
        self, arguments: Arguments, where: int, coloured: Coloured, exact: bool = True
    ) -> Vector:
        function = self._functions.get(where)
        if function is None:
            return self._source.jacobian(arguments, where, coloured, exact)
        found = function(*self._form.of(arguments))
        name = "jacobian" if where == 0 else "jacobian_old"
        values = _values(name, found, coloured.pattern)
        self.note(arguments, where, coloured, values)
        return values

    def in_params(self, arguments: Arguments, above: Vector) -> Vector:
        """Return ``(∂f/∂p)ᵀ above``, column by column."""
        if self._vjp is None:
            return self._source.in_params(arguments, above)
        vjp, form, own = self._vjp, self._form, self._form.of(arguments)
        columns = (form.params.vector_of(vjp(form.shaped(each), *own)) for each in above.T)
        return np.stack([*columns], 1)


class _Form(NamedTuple):
    """The form in which the user's functions take their arguments.

    Attributes
    ----------
    params : Params
        The structure of parameters.
    batch : int or None
        The number of samples, if states have an axis of samples.
    """

    params: Params
    batch: int | None

    @property
    def structure(self) -> tuple[Any, ...]:
        """A key: forms of the same structure share compiled functions."""
        return *self.params.structure, self.batch

    def shaped(self, state: Any) -> Any:
        """Return a state in the user's shape."""
        return state if self.batch is None else state.reshape(self.batch, -1)

    def of(self, arguments: Arguments) -> Arguments:
        """Return arguments in the user's form; states are read-only, since they are kept."""
        *own, vector = arguments
        for k, argument in enumerate(own):
            if isinstance(argument, np.ndarray):
                own[k] = self.shaped(argument.view())
                own[k].flags.writeable = False
            elif self.batch is not None and np.ndim(argument):  # in a trace of JAX
                own[k] = self.shaped(argument)
        return *own, self.params.of(vector)

    def flat(self, name: str, found: Any, arguments: Arguments) -> Any:
        """Return a function's result as a vector."""
        if self.batch is None:
            return found
        shape = self.batch, arguments[0].shape[0] // self.batch
        if getattr(found, "shape", None) != shape:
            raise InputError(
                f"{name} returned {short(found)} of shape {np.shape(found)}; expected {shape}, for "
                "all samples of u0 at once"
            )
        return found.reshape(-1)


def _values(name: str, found: Any, pattern: Pattern) -> Vector:
    """Return the values of a matrix from a function, in the order of a pattern."""
    if sp.issparse(found):
        matrix = sp.csr_array(found)
        if not matrix.has_sorted_indices:
            matrix = matrix.sorted_indices()
        if (
            matrix.shape != pattern.shape
            or matrix.nnz != pattern.nnz
            or not np.array_equal(matrix.indptr, pattern.indptr)
            or not np.array_equal(matrix.indices, pattern.indices)
        ):
            raise InputError(
                f"{name} returned a matrix of shape {matrix.shape} with {matrix.nnz} entries; "
                f"expected the pattern, {pattern}: keep explicit zeros"
            )
        found = matrix.data
    array = np.asarray(found)
    if array.ndim == 2:  # values of each sample
        array = array.reshape(-1)
    if array.shape != (pattern.nnz,) or array.dtype.kind not in "fiu":
        raise InputError(
            f"{name} returned {short(found)} of shape {array.shape} and dtype {array.dtype}; "
            f"expected {pattern.nnz} values in the order of the pattern, or a sparse array"
        )
    return array.astype(np.float64)  # a copy: the function may return the same array each time


class _Simulation:
    """Base of both kinds of simulations."""

    _name: str  # name of the function in errors
    _form: tuple[str, ...]  # names of its arguments
    # Names in errors of the arguments before the parameters, and how many of them are states.
    _kinds: tuple[str, ...]
    _states: int

    def __init__(
        self,
        function: Callable[..., Any],
        pattern: Any,
        jacobians: dict[int, Callable[..., Any] | None],
        vjp: Callable[..., Any] | None,
        derivatives: How | None,
        param_patterns: Mapping[Any, Any] | None,
    ) -> None:
        if not callable(function):
            raise InputTypeError(f"{self._name} is {short(function)}; expected a function")
        names = ["jacobian", "jacobian_old"]
        for name, each in [*zip(names, jacobians.values(), strict=False), ("vjp", vjp)]:
            if each is not None and not callable(each):
                raise InputTypeError(f"{name} is {short(each)}; expected a function")
        if derivatives not in ("complex", "forward", "jax", "torch", None):
            raise InputError(
                f"derivatives is {short(derivatives)}; expected 'complex', 'forward', 'jax' or "
                "'torch'"
            )
        check_form(self._name, function, self._form)
        self._reads, self._made = pattern is None, cast("_Simulation | None", None)
        self._pattern: Pattern | None = None
        if pattern is not None:
            self._pattern = read_pattern("pattern", pattern, None)
            n = self._pattern.shape[0]
            if self._pattern.shape != (n, n) or n == 0:
                raise InputError(f"pattern has shape {self._pattern.shape}; expected a square one")
            self._coloured = Coloured(self._pattern)
        elif derivatives in ("jax", "torch") or any(jacobians.values()):
            raise InputError(
                "pattern is None; expected one for a function of JAX or PyTorch, or with a jacobian"
            )
        self._schemes: dict[Any, Scheme] = {}
        # What the function was read as, for each structure and shape of its arguments.
        self._readings: dict[Any, Traced] = {}
        self._is_known = False  # whether the function was seen to take its arguments in this order
        self._function, self._jacobians, self._vjp = function, jacobians, vjp
        self._derivatives, self._param_patterns = derivatives, dict(param_patterns or {})

    @property
    def pattern(self) -> Pattern:
        """Where the Jacobian in the new state may be nonzero."""
        if self._pattern is None:
            raise InputError("the pattern is not known before forward, which reads it")
        return self._pattern

    @property
    def uses_jax(self) -> bool:
        """Whether the function is a JAX function."""
        return self._derivatives == "jax"

    def _scheme(self, source: Source, batch: int) -> Scheme:
        """Return the equations of a step of `batch` samples."""
        raise NotImplementedError

    def _arguments(self, u: Vector, old: Vector, time: float, dt: float) -> Arguments:
        """Return the function's arguments except parameters; the step of `dt` ends at `time`."""
        raise NotImplementedError

    def _scheme_for(self, form: _Form) -> Scheme:
        """Return the equations of a step for a run; their compiled functions are kept."""
        known = self._schemes.get(form.structure)
        if known is not None:
            return fresh(known)

        source: Source
        if self.uses_jax:
            source = InJax(partial(self._flat, form), self._name)
        elif self._derivatives == "torch":
            source = InTorch(partial(self._flat, form), self._name)
        else:
            source = self._differences(form)
            if self._derivatives is None:
                source = self._traced(form, source)
        given = {where: each for where, each in self._jacobians.items() if each is not None}
        if given or self._vjp is not None:
            source = _Given(source, given, self._vjp, form)
        scheme = self._schemes.setdefault(form.structure, self._scheme(source, form.batch or 1))
        return fresh(scheme)

    def _flat(self, form: _Form, *arguments: Any) -> Any:
        """Return the function's result as a vector."""
        return form.flat(self._name, self._called(form.of(arguments)), arguments)

    def _differences(self, form: _Form) -> Differences:
        pattern_of_params = partial(self._pattern_of_params, form)
        about = self._names(form), self._derivatives, pattern_of_params
        return Differences(partial(self._flat, form), *about)

    def _traced(self, form: _Form, others: Differences) -> Traced:
        def on_symbols(function: Callable[..., Any], arguments: Arguments) -> Any:
            return form.flat(self._name, function(*form.of(arguments)), arguments)

        return Traced(on_symbols, self._function, self._names(form), others)

    def _with(self, patterns: list[Any]) -> _Simulation:
        """Return this simulation with other patterns."""
        raise NotImplementedError

    def _patterned(self, u0: Any, params: Any, t0: Any, dt: Any) -> _Simulation:
        """Return this simulation with the pattern of its function at the first state.

        Entries of earlier runs are kept: the function may take those branches again.
        """
        if not self._reads:
            return self
        first, lengths = read_array("u0", u0), read_array("dt", dt)
        if first.dtype.kind not in "fiub" or first.ndim not in (1, 2) or not first.size:
            raise InputError(
                f"u0 has shape {first.shape} and dtype {first.dtype}; expected real numbers, or "
                "those of each sample"
            )
        form = _Form(Params(params), None if first.ndim == 1 else len(first))
        u = first.astype(np.float64).reshape(-1)
        length = float(lengths.reshape(-1)[0]) if lengths.size and lengths.dtype.kind in "fi" else 0
        arguments = self._arguments(u, u, _number("t0", t0) + length, length)
        key = form.structure, first.shape
        reading = self._readings.get(key)
        if reading is None:
            made = self._traced(form, self._differences(form))
            reading = self._readings.setdefault(key, made)
        source = reading.fresh()
        found = source.patterns((*arguments, form.params.vector), self._states)
        patterns = [_of_one(each, first.shape[-1]) for each in found]
        if self._made is not None and self._made.pattern.shape == patterns[0].shape:
            known = [each.pattern for each in self._made._matrices(1)]
            patterns = list(map(union, zip(known, patterns, strict=True)))
            if patterns == known:
                return self._made
        self._made = self._with(patterns)
        self._pattern = self._made.pattern
        return self._made

    def _names(self, form: _Form) -> Names:
        """Return the names of the function and its arguments in errors."""

        def number(where: int, k: int) -> str:
            if where >= len(self._kinds):
                return form.params.title_of(k)
            if where >= self._states:
                return self._kinds[where]
            sample = ""
            if form.batch is not None:
                sample, k = f" of sample {k // self.pattern.shape[0]}", k % self.pattern.shape[0]
            return f"{self._kinds[where]} {k}{sample}"

        return Names(self._name, ("pattern", "pattern_old")[: self._states], number)

    def _called(self, arguments: Arguments) -> Any:
        """Return the function's result, or raise if it takes its arguments in another order.

        Only the first calls are checked so; later calls may fail for other reasons.
        """
        if self._is_known:
            return self._function(*arguments)
        try:
            found = self._function(*arguments)
        except Exception:
            check_order(self._name, self._function, self._form, arguments)
            raise
        if np.shape(found) != arguments[0].shape:
            check_order(self._name, self._function, self._form, arguments)
        self._is_known = True
        return found

    def _pattern_of_params(self, form: _Form) -> Pattern:
        """Return the pattern of parameters: dense, except for parameters with a pattern."""
        params = form.params
        n, size = self.pattern.shape[0] * (form.batch or 1), len(params.vector)
        blocks: dict[int, sp.csr_array] = {}
        free = np.ones(size, bool)
        for name, given in self._param_patterns.items():
            place = params.slice_of(name)
            shape = n, place.stop - place.start
            pattern = read_pattern(f"param_patterns[{name!r}]", given, shape)
            matrix = sp.csr_array((np.ones(pattern.nnz), pattern.indices, pattern.indptr), shape)
            blocks[place.start] = matrix
            free[place] = False
        if free.sum() > _MOST_PARAMS:
            raise InputError(
                f"params has {int(free.sum())} numbers without a pattern; expected at most "
                f"{_MOST_PARAMS}, whose derivatives are taken one by one: pass vjp, "
                "param_patterns, or a function of JAX and derivatives='jax'"
            )
        for column in np.flatnonzero(free):
            blocks[int(column)] = sp.csr_array(np.ones((n, 1)))
        return Pattern(sp.csr_array(sp.hstack([blocks[k] for k in sorted(blocks)])))

    @names_unknown
    def forward(
        self,
        u0: ArrayLike,
        params: Any = None,
        *,
        steps: int | None = None,
        dt: float | ArrayLike,
        t0: float = 0.0,
        until: float | None = None,
        error: tuple[float, float] = (1e-3, 1e-6),
        max_dt: float | None = None,
        t_eval: ArrayLike | None = None,
        rtol: float = 1e-8,
        atol: float = 1e-10,
        memory_limit: int | None = None,
        check: bool = False,
        progress: bool = False,
    ) -> Run:
        """Take all steps, and keep what the backward pass needs.

        Parameters
        ----------
        u0 : array_like, shape (n,) or (batch, n)
            The initial state, of any real dtype; all computation is in float64. One call can run
            several samples. Functions then take and return the states of all samples,
            ``(batch, n)``, and values of Jacobians are ``(batch, nnz)``. The steps of each sample
            are as exact as if it ran alone.
        params : float, array_like, dict, tuple or None
            Parameters, as the function takes them. A dict or a tuple holds numbers or arrays. The
            call copies them.
        steps : int, optional
            The number of steps; by default the number of lengths in `dt`.
        dt : float or array_like, shape (steps,)
            The length of all steps, or of each step. Lengths are all positive or, to go backward in
            time, all negative.
        t0 : float, default 0
            The time of `u0`.
        until : float, optional
            The time to reach, with steps as long as their errors allow. `dt` is then the first
            length to try, negative if `until` is before `t0`, and `steps` is not given. Gradients
            are for the steps that were taken, with constant lengths.
        error : tuple of float, default (1e-3, 1e-6)
            With `until`, the relative and the absolute error that a step may have:
            ``abs + rel |u|`` in each unknown. ``"kencarp4"``, ``"kencarp5"``, ``"tsit5"`` and
            ``"sdirk3"`` compare a step with the same step by a method of one order less. For all
            other methods half the change of the rate estimates the error; for
            :class:`ImplicitSteps` this is the slope of states. ``"rk4"`` has no estimate. The first
            three are for smooth rates. The other estimates see a jump of the rate anywhere in a
            step, but not a pulse that ends within the step: see `max_dt`.
        max_dt : float, optional
            With `until`, the greatest length of a step.
        t_eval : array_like, shape (k,), optional
            Ordered times from `t0` to `until`, at which steps end exactly. The states there are
            ``run.states[run.evaluated]``.
        rtol, atol : float
            Newton's method stops when its remaining error, estimated by how fast corrections
            shrink, is a tenth of ``atol + rtol |u|`` in each unknown. Gradients are those of the
            exact solution of each step, up to this error.
        memory_limit : int, optional
            Bytes for states, factors and everything else that is kept, without inputs and outputs.
            If not all states fit, only those of one segment at a time are kept, and `Run.backward`
            repeats the steps of each segment.
        check : bool, default False
            Whether to compare Jacobians with differences of the function, entry by entry, at ``u0``
            and after each step, and products of `vjp`, parameter by parameter.
        progress : bool, default False
            Whether to show tqdm's progress bar, if the run takes longer than two seconds.

        Returns
        -------
        Run
            The states, and gradients by ``run.backward``.

        Raises
        ------
        InputError, InputTypeError
            If an argument is wrong, or a function returns a wrong shape.
        NewtonError
            If a step was not solved, or with `until` no step is short enough for its error. Its
            attribute `run` has the states before. A :class:`KeyboardInterrupt` has this attribute
            too.
        GradientError
            If the run notices that a pattern lacks an entry; with `check` also if a Jacobian or a
            product that a function returns is wrong.
        MemoryLimitError
            If `memory_limit` is too low even for segments.
        """
        patterned = self._patterned(u0, params, t0, dt)
        problem = patterned._problem(u0, params, t0, rtol, atol, memory_limit)
        end, times = None, None
        if until is not None:
            end, times = self._read_end(problem.t0, until, steps, dt, error, max_dt, t_eval)
        elif max_dt is not None or t_eval is not None:
            name = "t_eval" if max_dt is None else "max_dt"
            raise InputError(f"{name} is given without until; expected both, or dt for each step")
        lengths, has_one = _read_dt(steps if end is None else 1, dt)
        with _watching(progress, None if end is not None else len(lengths)) as watch:
            compare = patterned._comparing(problem) if check and len(lengths) else None
            if compare is not None:
                compare(problem.u0, 0.0, float(lengths[0]))
            if end is not None:
                return _march_until(problem, end, times, watch, compare)
            run = Run(problem, lengths, has_one)

            def watch_step(k: int) -> None:
                if compare is not None:
                    compare(run.last.reshape(-1), lengths[k - 1], lengths[k - 1])
                if watch is not None:
                    watch(k)

            has_watch = watch is not None or compare is not None
            run.march(watch_step if has_watch else None, each=compare is not None)
        return run

    def prepare(
        self,
        u0: ArrayLike,
        params: Any,
        *,
        steps: int | None,
        dt: float | ArrayLike,
        t0: float = 0.0,
        rtol: float = 1e-8,
        atol: float = 1e-10,
        memory_limit: int | None = None,
    ) -> Run:
        """Return a run before its first step; arguments are those of :meth:`forward`."""
        patterned = self._patterned(u0, params, t0, dt)
        problem = patterned._problem(u0, params, t0, rtol, atol, memory_limit)
        return Run(problem, *_read_dt(steps, dt))

    def _problem(
        self, u0: Any, params: Any, t0: Any, rtol: Any, atol: Any, memory_limit: Any
    ) -> Problem:
        """Return the problem, made of checked copies."""
        n = self.pattern.shape[0]
        first = read_array("u0", u0)
        is_state = first.ndim in (1, 2) and first.shape[-1] == n and len(first)
        if first.dtype.kind not in "fiub" or not is_state:
            raise InputError(
                f"u0 has shape {first.shape} and dtype {first.dtype}; expected {n} real numbers, "
                "or those of each sample"
            )
        memory_limit = check_count_or_none("memory_limit", memory_limit, 0)
        structure = Params(params)
        for name in self._param_patterns:
            structure.slice_of(name)
        tolerance = Tolerance(_positive("rtol", rtol), _positive("atol", atol))
        scheme = self._scheme_for(_Form(structure, None if first.ndim == 1 else len(first)))
        state = first.astype(np.float64).reshape(-1)
        return Problem(
            scheme, state, first.shape, structure, _number("t0", t0), tolerance, memory_limit
        )

    def _read_end(
        self, t0: float, until: Any, steps: Any, dt: Any, error: Any, max_dt: Any, t_eval: Any
    ) -> tuple[End, Vector | None]:
        """Check `until` and its options; return the time to reach, and the times to meet."""
        until = _number("until", until)
        if steps is not None or np.ndim(dt):
            raise InputError("until is given with the number or the lengths of steps; expected dt")
        first, ahead = _number("dt", dt), float(np.sign(until - t0))
        if ahead * first < 0:
            raise InputError(
                f"dt is {first} and until, {until}, is {'after' if ahead > 0 else 'before'} t0, "
                f"{t0}; expected a dt that leads there"
            )
        longest = np.inf  # SciPy's users pass it too
        if max_dt is not None and not (isinstance(max_dt, float) and max_dt == np.inf):
            longest = _positive("max_dt", max_dt)
        if ahead and t0 + ahead * min(abs(first), longest) == t0 and first:
            raise InputError(too_short(ahead * min(abs(first), longest), t0))
        try:
            relative, absolute = error
        except (TypeError, ValueError):
            raise InputError(f"error is {short(error)}; expected two positive numbers") from None
        allowed = Tolerance(_positive("error[0]", relative), _positive("error[1]", absolute))
        stops, times = [until] if ahead else [], None
        if t_eval is not None:
            times = read_array("t_eval", t_eval)
            if times.ndim != 1 or times.dtype.kind not in "fiu":
                raise InputError(f"t_eval is {short(t_eval)}; expected a vector of times")
            times = times.astype(np.float64)
            low, high = sorted((t0, until))
            if not ((low <= times) & (times <= high)).all():
                raise InputError(
                    f"t_eval is {short(t_eval)}; expected times from t0, {t0}, to until, {until}"
                )
            if not (np.diff(times) * (ahead or 1.0) > 0).all():
                raise InputError(f"t_eval is {short(t_eval)}; expected times one after the other")
            stops = [*times[(times != t0) & (times != until)].tolist(), *stops]
        return End(stops, allowed, longest, first), times

    def _comparing(self, problem: Problem) -> Compare:
        """Return a function that compares Jacobians with differences at each state."""
        old, time = problem.u0, problem.t0

        def compare(u: Vector, passed: float, dt: float) -> None:
            nonlocal old, time
            time += passed
            with np.errstate(all="ignore"):
                self._check(problem, u, old, time, dt)
            old = u

        return compare

    def _check(self, problem: Problem, u: Vector, old: Vector, time: float, dt: float) -> None:
        """Compare Jacobians at a state with differences."""
        form = _Form(problem.params, None if len(problem.shape) == 1 else problem.shape[0])
        arguments = *self._arguments(u, old, time, dt), problem.params.vector
        source, names = problem.scheme.source, self._names(form)
        base = source.value(arguments)
        patterns, size = self._matrices(form.batch or 1), np.abs(base)

        def derivative(where: int) -> Derivative:
            values = source.jacobian(arguments, where, patterns[where])
            return Derivative(arguments, where, patterns[where], values, base, size, "given")

        found = [derivative(where) for where in range(len(patterns))]
        size = size + sum(each.sizes(each.x) for each in found)
        for where in range(len(found)):
            try:
                _check_jacobian(derivative(where), source.value, names)
            except GradientError:
                if not source.renew(where):
                    raise
                _check_jacobian(derivative(where), source.value, names)
        if self._vjp is not None:
            _check_vjp(source, arguments, base, size, names)

    def _matrices(self, batch: int) -> list[Coloured]:
        """Return the patterns of the function's Jacobians in states."""
        return [self._coloured.blocks(batch)]


def _march_until(
    problem: Problem,
    end: End,
    t_eval: Vector | None,
    watch: Watch,
    compare: Compare | None,
) -> Run:
    """March with chosen lengths; under a memory limit, march again with these lengths."""
    solver = Solver(problem.scheme.matrices, problem.tolerance, ROOM)
    march = Steps.of(problem.t0, problem.u0, keeps_all=problem.memory_limit is None)
    about = problem.scheme, problem.u0.size // problem.shape[-1], problem.u0
    vector, tolerance = problem.params.vector, problem.tolerance
    loops = None if compare else Loops.to_choose_lengths(*about, vector, tolerance)

    def run() -> Run:
        kept = solver if march.keeps_all else None
        solver.factorisations += 0 if loops is None else loops.factorisations
        found = Run(problem, np.array(march.lengths), False, march, kept)
        if t_eval is not None:
            found.note_evaluated(t_eval)
        return found

    def name(what: str, k: int) -> str:
        sample, number = divmod(k, problem.shape[-1])
        return f"{what} {number}" + (f" of sample {sample}" if len(problem.shape) > 1 else "")

    def watch_step(k: int) -> None:
        if compare is not None:
            compare(march.states[-1], march.lengths[-1], march.lengths[-1])
        if watch is not None:
            watch(k)

    try:
        with np.errstate(all="ignore"):
            march_until(
                problem.scheme,
                solver,
                problem.params.vector,
                end,
                found=march,
                loops=loops,
                watch=watch_step,
                name=name,
            )
    except BaseException as failure:
        # As in a march with given lengths.
        told = failure
        if isinstance(failure, NotSolved):
            told = NewtonError(f"{failure.why}{problem.params.told}")
        if march.keeps_all:
            told.run = run()  # type: ignore[attr-defined]
        raise told from None
    found = run()
    if not march.keeps_all:
        found.march(None)
    return found


@contextmanager
def _watching(shows: bool, total: int | None) -> Iterator[Watch]:
    """Return a function that shows a bar once steps take long; None without a bar."""
    if not shows:
        yield None
        return
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(
            f"a bar needs tqdm ({error}): pip install 'sparsescan[demo]', or tqdm alone"
        ) from error
    with tqdm(total=total, unit="step", delay=2, leave=False) as bar:
        yield lambda k: bar.update(k - bar.n)


def _of_one(pattern: Pattern, n: int) -> Pattern:
    """Return the pattern of one sample's Jacobian, which is a block of the whole."""
    if pattern.shape == (n, n):
        return pattern
    rows = rows_of(pattern)
    if (rows // n != pattern.indices // n).any():
        raise InputError("pattern is None, and samples depend on each other; expected a pattern")
    return of_keys(np.unique(rows % n * n + pattern.indices % n), (n, n))


def _check_jacobian(derivative: Derivative, value: Value, names: Names) -> None:
    """Compare a Jacobian with differences, along a direction and entry by entry."""
    x, rng = derivative.x, np.random.default_rng(0)
    direction = rng.choice([-1.0, 1.0], len(x)) * rng.uniform(0.5, 1.0, len(x)) * scales(x)
    if x.any():  # a number that is 0 has no scale
        direction *= x != 0
    row, column = derivative.compare(value, direction, names), None
    if row is None:
        row, column = derivative.compare_entries(value, names)
    if row is None:
        return
    number = "" if column is None else f", by {names.number(derivative.where, column)}"
    raise GradientError(
        f"the Jacobian of {names.pattern(derivative.where)} is wrong in row {row}{number}: "
        f"differences of {names.function} are others"
    )


def _check_vjp(
    source: Source, arguments: Arguments, base: Vector, size: Vector, names: Names
) -> None:
    """Compare `vjp` with differences: number by number, or many numbers at once."""
    x, rng = arguments[-1], np.random.default_rng(0)
    directions = np.diag(scales(x))
    if len(x) > _MOST_PARAMS:
        directions = directions.sum(0) * rng.choice([-1.0, 1.0], (1, len(x)))
    above = rng.choice([-1.0, 1.0], len(base)) * rng.uniform(0.5, 1.0, len(base))
    above /= np.where(size > 0, size, 1.0)
    found = directions * source.in_params(arguments, above[:, None])[:, 0]
    by_steps = slopes(
        lambda params: source.value((*arguments[:-1], params)), x, directions, base, size
    )
    bound = (8 * by_steps.errors + CLOSE * np.abs(by_steps.values)) @ np.abs(above)
    # At a kink the slope of either side is right.
    bound += np.nan_to_num(by_steps.most - by_steps.least) @ np.abs(above)
    bound += CLOSE * np.abs(found).sum(1)
    is_apart = np.abs(found.sum(1) - by_steps.values @ above) > bound
    if is_apart.any():
        number = "params"
        if len(x) <= _MOST_PARAMS:
            number = names.number(len(arguments) - 1, int(np.argmax(is_apart)))
        raise GradientError(f"vjp is wrong in {number}: differences of {names.function} are others")


def _read_dt(steps: Any, dt: Any) -> tuple[NDArray[np.float64], bool]:
    """Return the length of each step, and whether the caller gave one for all."""
    lengths = read_array("dt", dt)
    if lengths.dtype.kind not in "fiu" or lengths.ndim > 1:
        raise InputError(f"dt is {short(dt)}; expected a number, or one for each step")
    if lengths.ndim == 0:
        if steps is None:
            raise InputError("steps is None; expected a number of steps, or dt for each")
        _check_dt(lengths.reshape(1))
        lengths, has_one = np.full(check_count("steps", steps, 0), float(lengths)), True
    else:
        has_one = False
        if steps is not None and check_count("steps", steps, 0) != len(lengths):
            raise InputError(f"dt has {len(lengths)} lengths; expected {steps}, one for each step")
        _check_dt(lengths)
    return lengths.astype(np.float64), has_one


def _check_dt(lengths: NDArray[Any]) -> None:
    """Raise unless all steps go forward in time, or all backward."""
    with np.errstate(invalid="ignore"):
        ahead = np.sign(lengths)
        bad = np.flatnonzero(~np.isfinite(lengths) | (ahead == 0) | (ahead != ahead[:1]))
    if len(bad):
        raise InputError(
            f"dt is {lengths[bad[0]]} in step {bad[0]}; expected positive numbers, or all negative"
        )


def _number(name: str, given: Any) -> float:
    """Return a finite number, which may be an array or a tensor without axes."""
    return check_number(name, given.item() if getattr(given, "shape", None) == () else given)


def _positive(name: str, given: Any) -> float:
    """Return a positive number."""
    number = _number(name, given)
    if number <= 0:
        raise InputError(f"{name} is {short(given)}; expected a positive number")
    return number


class ImplicitSteps(_Simulation):
    """Steps ``F(u, u_old, t, dt, p) = 0``, each solved for ``u`` by Newton's method.

    Parameters
    ----------
    residual : callable
        ``residual(u, u_old, t, dt, p)`` returns ``F``, an array of the length of ``u``. The time
        `t` is the end of the step. The function is of NumPy (Numba may compile it), JAX or PyTorch.
    pattern : Pattern, sparse array or mask, shape (n, n), optional
        Where ``∂F/∂u`` may be nonzero. By default each run reads the function at its first state,
        and finds where it depends on ``u``.
    pattern_old : Pattern, sparse array or mask, shape (n, n), optional
        Where ``∂F/∂u_old`` may be nonzero. The default is `pattern`, if that is given.
    jacobian, jacobian_old : callable, optional
        Functions of the arguments of `residual` that return these Jacobians, as values in the order
        of the pattern, or as sparse arrays with the pattern.
    vjp : callable, optional
        ``vjp(λ, u, u_old, t, dt, p)`` returns ``(∂F/∂p)ᵀ λ`` in the structure of ``p``.
    derivatives : {"complex", "forward", "jax", "torch"}, optional
        The source of all other derivatives. "complex" takes complex steps, which are exact to
        rounding; the function must take complex numbers. "forward" takes differences of the
        function, with steps that fit each number. "jax" is for JAX functions, "torch" for PyTorch
        functions of float64 tensors. By default the function is read: each of its operations has
        its exact derivative. If it cannot be read, complex steps are taken as long as they agree
        with differences, and then differences; `Run.derivatives` and a warning say so.
    param_patterns : dict, optional
        Only for a function that is not read: by the name of a parameter that is a long array, where
        ``∂F/∂p`` may be nonzero, ``(n, size)``. Derivatives in other parameters are taken number by
        number.

    Attributes
    ----------
    pattern, pattern_old : Pattern
        The patterns.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    See Also
    --------
    TimeSteps : Methods for ``M u' = f(u, t, p)``.
    sparsescan.SolveStep : Only the adjoint chain, for given matrices.

    Notes
    -----
    A step is an implicit function. Its derivatives are linear solves:
    ``∂u/∂u_old = -(∂F/∂u)⁻¹ ∂F/∂u_old``. The transposed Jacobian of a step is a pair of steps of a
    chain, ``[SolveStep((∂F/∂u)ᵀ), -(∂F/∂u_old)ᵀ]``; the gradient between them is ``λ``.

    Columns of a pattern that share no row are differentiated together (Curtis, Powell and Reid, "On
    the estimation of sparse Jacobian matrices", 1974). Later iterations and steps reuse the factors
    of a Jacobian, and the backward pass refines its solves with them.

    Examples
    --------
    Logistic growth with diffusion, backward Euler:

    >>> import numpy as np, scipy.sparse as sp
    >>> from sparsescan.simulate import ImplicitSteps
    >>> n = 50
    >>> second = sp.diags_array([1.0, -2.0, 1.0], offsets=[-1, 0, 1], shape=(n, n)).tocsr()
    >>> def residual(u, u_old, t, dt, p):
    ...     return u - u_old - dt * (p["d"] * (second @ u) + p["r"] * u * (1 - u))
    >>> sim = ImplicitSteps(residual, second)
    >>> u0 = np.exp(-np.linspace(-3, 3, n) ** 2)
    >>> run = sim.forward(u0, {"d": 0.2, "r": 1.0}, steps=20, dt=0.1)
    >>> grads = run.backward(grad_last=np.ones(n))  # of the sum of the last state
    >>> step = 1e-6
    >>> more, less = (
    ...     sim.forward(u0, {"d": 0.2 + h, "r": 1.0}, steps=20, dt=0.1).last.sum()
    ...     for h in (step, -step)
    ... )
    >>> bool(abs((more - less) / (2 * step) - grads.params["d"]) < 1e-5)
    True
    """

    _name, _form = "residual", ("u", "u_old", "t", "dt", "p")
    _kinds, _states = ("unknown", "old unknown", "t", "dt"), 2

    def __init__(
        self,
        residual: Callable[..., Any],
        pattern: Any = None,
        pattern_old: Any = None,
        *,
        jacobian: Callable[..., Any] | None = None,
        jacobian_old: Callable[..., Any] | None = None,
        vjp: Callable[..., Any] | None = None,
        derivatives: How | None = None,
        param_patterns: Mapping[Any, Any] | None = None,
    ) -> None:
        super().__init__(
            residual, pattern, {0: jacobian, 1: jacobian_old}, vjp, derivatives, param_patterns
        )
        if pattern is None:
            if pattern_old is not None:
                raise InputError("pattern is None with a pattern_old; expected both, or none")
            return
        self._coloured_old = self._coloured
        if pattern_old is not None:
            own = read_pattern("pattern_old", pattern_old, self.pattern.shape)
            self._coloured_old = Coloured(own)

    @property
    def pattern_old(self) -> Pattern:
        """Where the Jacobian in the old state may be nonzero."""
        made = self._made if self._reads else self
        if not isinstance(made, ImplicitSteps):
            raise InputError("the pattern is not known before forward, which reads it")
        return made._coloured_old.pattern

    def _with(self, patterns: list[Any]) -> ImplicitSteps:
        about: Any = {"vjp": self._vjp, "derivatives": self._derivatives}
        about["param_patterns"] = self._param_patterns
        return ImplicitSteps(self._function, *patterns, **about)

    def _scheme(self, source: Source, batch: int) -> Scheme:
        new = self._coloured.blocks(batch)
        has_own = self._coloured_old is not self._coloured
        return ResidualScheme(source, new, self._coloured_old.blocks(batch) if has_own else new)

    def _arguments(self, u: Vector, old: Vector, time: float, dt: float) -> Arguments:
        return u, old, time, dt

    def _matrices(self, batch: int) -> list[Coloured]:
        return [*super()._matrices(batch), self._coloured_old.blocks(batch)]

    def __repr__(self) -> str:
        return f"ImplicitSteps({self._pattern or self._function})"


class TimeSteps(_Simulation):
    """Steps of a method for ``M u' = f(u, t, p)``.

    Parameters
    ----------
    rate : callable
        ``rate(u, t, p)`` returns ``f``, an array of the length of ``u``. The function is of NumPy
        (Numba may compile it), JAX or PyTorch.
    pattern : Pattern, sparse array or mask, shape (n, n), optional
        Where ``∂f/∂u`` may be nonzero. By default each run reads the function at its first state,
        and finds where it depends on ``u``.
    method : str, default "backward_euler"
        Implicit methods: ``"backward_euler"`` (order 1), ``"crank_nicolson"`` (2), ``"bdf2"`` (2;
        its first step is backward Euler), and four that are stiffly accurate and L-stable,
        ``"sdirk2"`` (2), ``"sdirk3"`` (3), ``"kencarp4"`` (4) and ``"kencarp5"`` (5). Explicit
        methods: ``"euler"`` (1), ``"heun"`` (2), ``"rk4"`` (4) and ``"tsit5"`` (5).
    mass : sparse array, shape (n, n), optional
        The matrix ``M``, the identity by default. It may be singular, for algebraic equations. All
        implicit methods except Crank-Nicolson then satisfy these equations exactly.
    jacobian : callable, optional
        ``jacobian(u, t, p)`` returns ``∂f/∂u``, as values in the order of the pattern, or as a
        sparse array with the pattern.
    vjp : callable, optional
        ``vjp(λ, u, t, p)`` returns ``(∂f/∂p)ᵀ λ`` in the structure of ``p``.
    derivatives, param_patterns
        As for :class:`ImplicitSteps`.

    Attributes
    ----------
    pattern : Pattern
        The pattern.
    method : str
        The method.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    See Also
    --------
    ImplicitSteps : Steps with your own equations.

    Notes
    -----
    A stage of a Runge–Kutta method with coefficients ``a`` and ``c`` is

        M (U_i - u) = Δ Σ_j a_ij f(U_j, t + c_i Δ, p),    j ≤ i,

    and the last stage is the next state. BDF2 is
    ``M (a u_{t+1} + b u_t + c u_{t-1}) = Δ f(u_{t+1})``; its coefficients follow from the lengths
    of two steps. The SDIRK methods are those of Alexander, "Diagonally implicit Runge-Kutta methods
    for stiff O.D.E.'s", 1977. KenCarp4 and KenCarp5 are the implicit parts of ARK4(3)6L[2]SA and
    ARK5(4)8L[2]SA of Kennedy and Carpenter, "Additive Runge-Kutta schemes for
    convection-diffusion-reaction equations", 2003. Tsit5 is of Tsitouras, "Runge-Kutta pairs of
    order 5(4) satisfying only the first column simplifying assumption", 2011. Gradients are those
    of the discrete steps, and include the gradients in their lengths.

    Examples
    --------
    A stiff decay of two unknowns towards a forcing, and the derivative of the end in the rate:

    >>> import numpy as np
    >>> from sparsescan.simulate import TimeSteps
    >>> def rate(u, t, p):
    ...     return -p * (u - np.cos(t))
    >>> sim = TimeSteps(rate, np.eye(2), method="sdirk3")
    >>> run = sim.forward([0.0, 1.0], 50.0, steps=40, dt=0.05)
    >>> bool(np.allclose(run.last, np.cos(2.0), atol=0.03))
    True
    >>> run.backward(grad_last=[1.0, 0.0]).u0.shape
    (2,)
    """

    _name, _form = "rate", ("u", "t", "p")
    _kinds, _states = ("unknown", "t"), 1

    def __init__(
        self,
        rate: Callable[..., Any],
        pattern: Any = None,
        method: str = "backward_euler",
        *,
        mass: Any = None,
        jacobian: Callable[..., Any] | None = None,
        vjp: Callable[..., Any] | None = None,
        derivatives: How | None = None,
        param_patterns: Mapping[Any, Any] | None = None,
    ) -> None:
        super().__init__(rate, pattern, {0: jacobian}, vjp, derivatives, param_patterns)
        self.method = check_method(method)
        self._mass: sp.csr_array | None = None
        if mass is None:
            return
        if not sp.issparse(mass):
            mass = np.asarray(mass)
        shape = (mass.shape[:1] * 2) if pattern is None else self.pattern.shape
        if mass.shape != shape or mass.ndim != 2 or mass.dtype.kind not in "fiub":
            raise InputError(
                f"mass has shape {mass.shape} and dtype {mass.dtype}; expected a real matrix of "
                f"shape {shape if shape else '(n, n)'}"
            )
        self._mass = sp.csr_array(mass, dtype=np.float64, copy=True)
        self._mass.sum_duplicates()
        if method in TABLEAUS and not TABLEAUS[method].is_implicit:
            raise InputError(
                f"mass is given for method {method!r}; expected an implicit method, or none: "
                "an explicit one has nothing to solve with"
            )

    def _with(self, patterns: list[Any]) -> TimeSteps:
        about: Any = {"mass": self._mass, "vjp": self._vjp, "derivatives": self._derivatives}
        about["param_patterns"] = self._param_patterns
        return TimeSteps(self._function, patterns[0], self.method, **about)

    def _read_end(self, t0: float, until: Any, *others: Any) -> tuple[End, Vector | None]:
        if self.method == "rk4":
            raise InputError(f"until is {short(until)}; expected None: rk4 has no error estimate")
        return super()._read_end(t0, until, *others)

    def _scheme(self, source: Source, batch: int) -> Scheme:
        mass = self._mass
        if mass is not None and batch > 1:
            mass = sp.csr_array(sp.kron(sp.eye_array(batch), mass, format="csr"))
        about = source, self._coloured.blocks(batch), mass
        if self.method == "bdf2":
            return BackwardDifferences(*about)
        return RungeKutta(TABLEAUS[self.method], *about)

    def _arguments(self, u: Vector, old: Vector, time: float, dt: float) -> Arguments:
        return u, time

    def __repr__(self) -> str:
        return f"TimeSteps({self._pattern or self._function}, {self.method!r})"
