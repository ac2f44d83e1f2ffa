"""ScanPlan: a schedule for chains of fixed patterns, and its numeric runs."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arrays.arrays import check_memory, load_cupy, namespace, read_array, upload
from ..arrays.frozen import Frozen
from ..arrays.streams import place
from ..chains.chain import Chain
from ..chains.grads import LocalGrads, check_grad, check_places, grad_or_zeros, placed
from ..chains.implicit import ImplicitChain
from ..chains.steps import PlannedSteps
from ..checks import check_count
from ..errors import InputError, InputTypeError, out_of_memory
from ..execution.solves import Given
from ..execution.threads import thread_count
from ..execution.workspace import Workspace
from ..symbolic.implicit import Step
from ..symbolic.program import Program
from ..symbolic.schedule import Schedule
from .choice import Alternative, InputKind, PlanChoice, PlanOptions, admit, check_solves
from .describe import describe, to_dict
from .prediction import ScanPrediction, predict
from .search import choose_schedule

# How many workspaces a slot keeps, e.g. for different batch sizes; how many choices a plan keeps.
_KEPT, _CHOICES = 4, 64

Gradients = list[NDArray[Any]] | NDArray[Any]
_NO_OPTIONS = PlanOptions()
_NO_LOCAL_GRADS = LocalGrads(None, 0, (), ())


@dataclass
class ScanSlot:
    """A chain and the workspaces that it ran in, of one run at a time, kept for the next."""

    chain: Chain
    workspaces: dict[Any, Any] = field(default_factory=dict)


class ScanPlan(Frozen):
    """A schedule for chains of fixed patterns, with the symbolic phase done.

    :func:`sparsescan.plan` makes it. Several threads may use a plan at once, and it may be used
    after a fork. From the second run with the same kind of input on, a run allocates nothing that
    grows with the chain, except the gradients it returns.

    With ``schedule="auto"``, the fastest schedule depends on the kind of input: its batch size and
    dtype, its device, and which Jacobians all samples share. The first run of a new kind chooses
    again, by predicted times alone, and keeps the choice. `schedule`, `reason`, `dense`,
    `alternatives` and what the plan prints describe the latest run. Before the first run, they are
    for `batch` samples of `dtype`, or for one sample of float64.

    Attributes
    ----------
    n : int
        Number of Jacobians.
    patterns : tuple of Pattern or ImplicitPattern
        The pattern of every Jacobian, from the last layer to the first.
    schedule : Schedule
        The schedule of the latest run, or of the first run to come.
    reason : str
        Why this schedule was chosen.
    batch : int or None
        The only batch size that the plan accepts, if there is one.
    dtype : dtype or None
        The only dtype that the plan accepts, if there is one.
    device : {None, "cpu", "cuda"}
        Where the plan runs; None runs where the data is.
    memory_limit : int or None
        Bytes that the plan and a run may take.
    reverse : bool
        Whether Jacobians, local gradients and gradients are in the order of time. (`patterns`
        always run from the last layer to the first.)
    auto : bool
        Whether the schedule is chosen for each kind of input.
    dense : frozenset of tuple
        The products ``(start, stop)`` that are stored densely although their patterns are sparse,
        in numbers of elements as a schedule counts them.
    alternatives : tuple of Alternative
        The schedules that the planner looked at, with the nanoseconds predicted then.
    """

    n: int
    patterns: tuple[Step, ...]
    batch: int | None
    dtype: np.dtype[Any] | None
    device: str | None
    memory_limit: int | None
    reverse: bool
    auto: bool

    def __init__(
        self, patterns: Sequence[Step], choice: PlanChoice, options: PlanOptions = _NO_OPTIONS
    ) -> None:
        self._set(n=len(patterns), patterns=tuple(patterns), **options._asdict())
        self._options = options
        program = choice.program
        if patterns and program is None:
            program = Program(patterns, choice.schedule, dense=choice.dense)
        # For the input that the plan was made for, for other kinds, and for the latest.
        self._first = self._latest = replace(choice, program=program)
        self._others: dict[InputKind, PlanChoice] = {}
        self._linear: Program | None = None
        self._steps = PlannedSteps(self.patterns)
        factors, starts = self._steps.factors, self._steps.starts
        # Lengths of all gradients that a run makes, and where they start.
        self._sizes = [factor.shape[1] for factor in factors[:1]]
        self._sizes += [factor.shape[0] for factor in factors]
        self._offsets = np.concatenate([[0], np.cumsum(self._sizes, dtype=np.int64)]).tolist()
        # Lengths of the gradients before each step, and behind the last.
        self._step_sizes = self._sizes
        if starts is not None:
            self._step_sizes = [self._sizes[k] for k in starts.tolist()]
        # Whether all gradients of an exclusive, and of an inclusive, scan have one length.
        self._uniform = len(set(self._sizes[:-1])) <= 1, len(set(self._sizes)) <= 1
        self._idle: deque[ScanSlot] = deque()
        if program is not None:
            admit(program, choice.kind, self.memory_limit)

    @property
    def schedule(self) -> Schedule:
        """The schedule of the latest run, or of the first run to come."""
        return self._latest.schedule

    @property
    def reason(self) -> str:
        """Why this schedule was chosen."""
        return self._latest.reason

    @property
    def dense(self) -> frozenset[tuple[int, int]]:
        """Products ``(start, stop)`` that are stored densely although their patterns are sparse."""
        return self._latest.dense

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The schedules that the planner looked at."""
        return self._latest.alternatives

    @property
    def kind(self) -> InputKind:
        """The kind of input for which the plan and the forms of its products were chosen."""
        return self._first.kind

    @property
    def workspace_bytes(self) -> int:
        """A bound on the bytes of the plan and a run, without Jacobians and gradients.

        It counts products with their indices, scratch memory of every thread, and tables, for as
        many samples as the latest run had. Before the first run, it is for `batch` samples of
        `dtype`, or for one sample of float64. Every Jacobian counts as if it differed between
        samples.
        """
        return self._latest.workspace_bytes

    def settle(self, kind: InputKind) -> Program:
        """Return the choice for this kind of input, which the plan describes from now on."""
        choice = self._latest
        if kind != choice.kind:
            choice = self._first
            if kind != choice.kind:
                choice = self._others.get(kind) or self._choose(kind)
            self._latest = choice
        assert choice.program is not None  # since there are Jacobians
        return choice.program

    def _choose(self, kind: InputKind) -> PlanChoice:
        """Choose for a new kind of input. Threads do not wait: all make the same choice."""
        choice = first = self._first
        if self.auto:
            choice = choose_schedule(self.patterns, None, kind, self.memory_limit)
            known = [first, *self._others.values()]
            form = choice.schedule, choice.dense
            same = (each.program for each in known if (each.schedule, each.dense) == form)
            program = next(same, choice.program)
            if program is None:
                program = Program(self.patterns, choice.schedule, dense=choice.dense)
            choice = replace(choice, program=program)
        if len(self._others) >= _CHOICES:
            self._others.pop(next(iter([*self._others])), None)
        return self._others.setdefault(kind, replace(choice, kind=kind))

    def exclusive_scan(
        self, grad: ArrayLike | None, jacobians: Any, *, local_grads: Any = None, stream: Any = None
    ) -> Gradients:
        """Return the gradients of :func:`sparsescan.exclusive_scan`, for a chain of these patterns.

        Parameters
        ----------
        grad : array_like, shape (d_n,) or (batch, d_n), or None
            Gradient at the end of the chain. None means zeros; there must be `local_grads` then.
        jacobians : sequence, CSRChain, ImplicitChain, PeriodicChain or ndarray
            Jacobians with the plan's patterns, or only their values in the order of the patterns: a
            sequence of arrays ``(nnz,)`` or ``(batch, nnz)``, or one array ``(n, nnz)`` or
            ``(n, batch, nnz)``. If a pattern is not dense, an array always means values.
        local_grads : sequence or ndarray, optional
            A term for each returned gradient, which the scan adds. ``local_grads[0]`` is added to
            `grad` (see :func:`sparsescan.exclusive_scan`, double-counted gradient).
        stream : optional
            As for :func:`sparsescan.exclusive_scan`.

        Returns
        -------
        list of ndarray, or ndarray
            The ``n`` gradients ``[∇x_n, …, ∇x_1]``: one array if the Jacobians came as one array, a
            list with one array per pattern for a :class:`.PeriodicChain`.

        Raises
        ------
        PatternMismatchError
            If a Jacobian has another pattern than the plan was made for.
        InputError, InputTypeError, MemoryLimitError
            As :func:`sparsescan.exclusive_scan`.

        Examples
        --------
        >>> import numpy as np, sparsescan
        >>> values = np.full((3, 4), 0.5)
        >>> plan = sparsescan.plan([sparsescan.Pattern.dense((2, 2))] * 3)
        >>> plan.exclusive_scan([1.0, 2.0], values)
        array([[1. , 2. ],
               [1.5, 1.5],
               [1.5, 1.5]])
        """
        with _Reading(self, stream, grad, jacobians, local_grads) as (slot, first, current):
            return self.run(slot, first, local_grads, inclusive=False, stream=current)

    def inclusive_scan(
        self, grad: ArrayLike | None, jacobians: Any, *, local_grads: Any = None, stream: Any = None
    ) -> Gradients:
        """Return gradients of every layer's input and output: one more, ``∇x_0``, at the end.

        Parameters
        ----------
        grad, jacobians, local_grads, stream
            As for :meth:`exclusive_scan`; `local_grads` has one entry more.

        Returns
        -------
        list of ndarray, or ndarray
            The ``n + 1`` gradients ``[∇x_n, …, ∇x_0]``. For a single rectangular Jacobian in an
            array, it is a list too, since the two gradients differ in length.

        Raises
        ------
        PatternMismatchError, InputError, InputTypeError, MemoryLimitError
            As :meth:`exclusive_scan`.

        Examples
        --------
        >>> import numpy as np, sparsescan
        >>> plan = sparsescan.plan([sparsescan.Pattern.dense((2, 2))])
        >>> plan.inclusive_scan([1.0, 2.0], [np.eye(2) * 3])
        [array([1., 2.]), array([3., 6.])]
        """
        with _Reading(self, stream, grad, jacobians, local_grads) as (slot, first, current):
            return self.run(slot, first, local_grads, inclusive=True, stream=current)

    def predict(self, workers: int) -> ScanPrediction:
        """Return the steps and the work of an exclusive scan of one sample with some workers.

        It is for the schedule of the latest run.

        Parameters
        ----------
        workers : int
            The number of workers, at least 1; there may be more than this machine has.

        Returns
        -------
        ScanPrediction
            Steps and multiply-adds, on the critical path and in all.

        Raises
        ------
        InputError, InputTypeError
            If `workers` is not a positive integer.

        Examples
        --------
        >>> import sparsescan
        >>> plan = sparsescan.plan([sparsescan.Pattern.diagonal(8)] * 1000, schedule="blelloch")
        >>> plan.predict(1).steps, plan.predict(128).steps, plan.predict(1000).steps
        (1984, 26, 18)
        """
        return predict(self._latest.program, check_count("workers", workers, 1))

    def to_dict(self) -> dict[str, Any]:
        """Return what the plan prints as lists, numbers and strings, which JSON can store.

        Returns
        -------
        dict
            ``levels`` has a dict for each level, with counts for one sample. Bytes and times are
            for the dtype and the number of samples under ``predicted_for``, those of the latest
            run.

        Examples
        --------
        >>> import sparsescan
        >>> plan = sparsescan.plan([sparsescan.Pattern.dense((2, 2))] * 4, schedule="blelloch")
        >>> plan.to_dict()["levels"][0]["multiply_adds"]
        12
        """
        return to_dict(self.patterns, self._options, self._latest)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, in NumPy's ``.npz`` format and without pickle.

        Parameters
        ----------
        path : str or path-like
            The file, written under exactly this name; one that exists is replaced.

        Raises
        ------
        InputError, InputTypeError
            If `path` is no path.
        OSError
            If the file cannot be written.

        See Also
        --------
        load : The way back.

        Notes
        -----
        The file stores the patterns, the schedule of the latest run and the options. It stores no
        products.

        Examples
        --------
        >>> import numpy as np, sparsescan, tempfile, os
        >>> plan = sparsescan.plan([sparsescan.Pattern.dense((2, 2))] * 3, schedule="blelloch")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "plan.npz")
        ...     plan.save(path)
        ...     loaded = sparsescan.ScanPlan.load(path)
        >>> loaded
        ScanPlan(3 Jacobians, Schedule.blelloch(3))
        >>> loaded.exclusive_scan([1.0, 2.0], np.full((3, 4), 0.5))
        array([[1. , 2. ],
               [1.5, 1.5],
               [1.5, 1.5]])
        """
        from .files import save_plan

        save_plan(path, self.patterns, self._options, self._latest)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> ScanPlan:
        """Read a plan that :meth:`save` has written.

        Parameters
        ----------
        path : str or path-like
            The file.

        Returns
        -------
        ScanPlan
            The plan prints the same text as the saved one, and its results have the same bits. With
            ``"auto"`` this holds for the kind of input of the last run before the plan was saved;
            for other kinds the plan chooses again, on this machine. A plan for a device can be
            loaded on a machine without one.

        Raises
        ------
        FileError
            If the file is damaged or is no plan. It is a :class:`ValueError`.
        InputError, InputTypeError
            If `path` is no path.
        MemoryLimitError
            If a run on this machine, which may have more threads, needs more than the plan's limit.
        OSError
            If the file cannot be opened, such as :class:`FileNotFoundError`.

        See Also
        --------
        save : Has an example.
        """
        from .files import load_plan

        return ScanPlan(*load_plan(path))

    def lend(
        self, grad: ArrayLike | None, jacobians: Any, local_grads: Any
    ) -> tuple[ScanSlot, Any]:
        """Lend a slot that has read Jacobians, and return it with the gradient at their end."""
        steps = self._steps
        try:
            slot = self._idle.pop()
        except IndexError:
            slot = ScanSlot(Chain(len(steps.factors), self.reverse, steps.starts))
        chain = slot.chain
        try:
            if steps.starts is not None or isinstance(jacobians, ImplicitChain):
                jacobians = steps.unfold(jacobians, self.reverse)
            chain.read(jacobians, steps.factors)
            if grad is not None:
                return slot, read_array("grad", grad)
            size = self._sizes[0] if self.n else None
            period = chain.period if steps.starts is None else 0
            return slot, grad_or_zeros(None, local_grads, size, chain.batch, period)
        except BaseException:
            self.take_back(slot)
            raise

    def take_back(self, slot: ScanSlot) -> None:
        """Keep a slot that was lent for the next run."""
        slot.chain.release()
        self._idle.append(slot)

    def waiting(self) -> list[tuple[Program, InputKind]]:
        """Return the programs of the workspaces that wait for the next run."""
        slots = [*self._idle]
        return [(program, kind) for slot in slots for program, kind, *_ in [*slot.workspaces]]

    def hold(self, most: int) -> tuple[list[tuple[Program, InputKind]], int]:
        """Return :meth:`waiting`, and a bound on the bytes of these workspaces and of all programs.

        While this bound is above `most`, slots are freed, those that have waited longest first.
        """
        choices = [self._first, *[*self._others.values()]]
        chosen = Counter({(each.program, each.kind) for each in choices if each.program})
        while True:
            waiting = self.waiting()
            held = chosen | Counter(waiting)
            nbytes = sum(n * kind.needed_bytes(program) for (program, kind), n in held.items())
            if nbytes <= most or not self._idle:
                return waiting, nbytes
            with suppress(IndexError):  # another thread may have taken the last
                self._idle.popleft()

    def run(
        self, slot: ScanSlot, first: Any, local_grads: Any, *, inclusive: bool, stream: Any = None
    ) -> Gradients:
        """Scan the chain that a slot has read, from the gradient at its end.

        The caller releases the chain. `stream` is CuPy's current one, for callers that have it.
        """
        chain, starts = slot.chain, self._steps.starts
        local, dtype = self._check(chain, first, local_grads, inclusive)
        count, shape = len(self._steps.factors) + inclusive, first.shape
        xp = np if type(first) is np.ndarray else namespace(first)
        if count == 0:
            return xp.empty((0, *shape), dtype) if chain.period == 1 else []
        on_device, download = xp is not np or self.device == "cuda", False
        if on_device and self._first.program is not None and self._first.program.solved:
            check_solves(self.patterns, None, True, self.reverse)
        if on_device and xp is np:
            xp, first, download = load_cupy(), upload(first), True
            chain.upload()
            local.upload()
        batch = shape[0] if len(shape) > 1 else 1
        size = self._offsets[count] if self.n else shape[-1]
        if chain.period > 1:
            # Whole periods; the last one may be incomplete.
            size = -(-count // chain.period) * self._offsets[chain.period]
        if not on_device:
            check_memory("the gradients", batch * size * dtype.itemsize)
        kind = InputKind(batch, dtype, on_device, chain.differs() if batch > 1 else None)
        program, whole = None, False
        if count > 1 and batch > 0:
            program = self.settle(kind)
            chain.convert(dtype, None if on_device else program.multiplied)
            whole = on_device and _runs_whole_steps(program, chain, dtype)
        if whole:
            # No gradients within steps.
            size = (self.n + inclusive) * shape[-1]
        elif starts is not None:
            local.spread(starts[: self.n + inclusive], chain.period)
        out = xp.empty(batch * size, dtype)
        if local.given:
            local.add_first(first, out[: first.size].reshape(shape))
            local.convert(dtype)
        else:
            out[: first.size] = first.reshape(-1)
        if program is not None:
            if on_device:
                workspace = self._device_workspace(slot, program, kind, local, whole)
                workspace.run(chain, local, out, inclusive=inclusive, stream=stream)
            elif not self._workspace(slot, program, kind, local).run(
                out,
                inclusive,
                Given(chain.array, local.array, chain.name) if program.solved else None,
            ):
                # The linear scan defines which gradients a non-finite value reaches. A product may
                # spread it differently, and cannot hold entries of any range.
                if self._linear is None:
                    self._linear = Program(self.patterns, Schedule.linear(self.n))
                self._workspace(slot, self._linear, kind, local).run(out, inclusive)
        out = out.get() if download else out
        return self._cut(out, shape, self.n + inclusive, chain.period, whole)

    def _check(
        self, chain: Chain, first: Any, local_grads: Any, inclusive: bool
    ) -> tuple[LocalGrads, np.dtype[Any]]:
        """Check the arguments; return local gradients, and the dtype of all gradients."""
        check_grad(first, self._sizes[0] if self.n else None, chain.batch)
        batch_shape, local = first.shape[:-1], _NO_LOCAL_GRADS
        if self.batch is not None and batch_shape != (self.batch,):
            raise InputError(
                f"grad has shape {first.shape}; expected ({self.batch}, ·), the batch of the plan"
            )
        if local_grads is not None:
            # The factors of implicit steps take turns, and gradients do not.
            period = chain.period if self._steps.starts is None else 0
            sizes = self._step_sizes or [first.shape[-1]]
            local = LocalGrads(
                local_grads, self.n + inclusive, sizes, batch_shape, period, reverse=self.reverse
            )
        if chain.device is not None or type(first) is not np.ndarray or local.given:
            check_places(first, chain, local)
        dtype: np.dtype[Any] = first.dtype
        if local.given or (self.n > 0 and chain.dtype != dtype):
            dtype = np.result_type(dtype, *[chain.dtype] * (self.n > 0), *local.dtypes)
        if self.dtype is not None and dtype != self.dtype:
            raise InputTypeError(
                f"the input is of dtype {dtype}; expected {self.dtype}, the plan's"
            )
        return local, dtype

    def _workspace(
        self, slot: ScanSlot, program: Program, kind: InputKind, local: LocalGrads
    ) -> Workspace:
        """Return a workspace on the CPU for this program and this kind of input."""
        chain, threads = slot.chain, thread_count()
        key = program, kind, local.given, threads, tuple(chain.merged)
        workspace: Workspace | None = slot.workspaces.get(key)
        if workspace is None:
            self._make_room(slot, program, kind)
            workspace = slot.workspaces[key] = Workspace(
                program,
                chain.leaves,
                kind.dtype,
                kind.batch,
                chain.batched,
                local.given,
                threads,
                chain.merged,
            )
        if local.given:
            local.fill(workspace.local_grads)
        return workspace

    def _device_workspace(
        self, slot: ScanSlot, program: Program, kind: InputKind, local: LocalGrads, whole: bool
    ) -> Any:
        """Return a workspace on the current device for this program and this kind of input.

        `whole` says that steps are implicit and run whole.
        """
        from ..execution.cuda.workspace import DeviceWorkspace

        chain = slot.chain
        stacked = bool(chain.stacks) if whole else chain.stack is not None
        how = None if not local.given else "list" if local.stack is None else "stack"
        key = program, kind, stacked, how, whole, chain.device
        if key not in slot.workspaces:
            self._make_room(slot, program, kind, whole)
            slot.workspaces[key] = DeviceWorkspace(
                program, kind.dtype, kind.batch, chain.batched, stacked, how, whole
            )
        return slot.workspaces[key]

    def _make_room(
        self, slot: ScanSlot, program: Program, kind: InputKind, whole: bool = True
    ) -> None:
        """Make room for one more workspace; raise if the memory limit forbids it."""
        admit(program, kind, self.memory_limit, whole=whole)
        while len(slot.workspaces) >= _KEPT:
            del slot.workspaces[next(iter(slot.workspaces))]

    def _cut(
        self, out: NDArray[Any], shape: tuple[int, ...], count: int, period: int, whole: bool
    ) -> Gradients:
        """Cut the buffer of all gradients into the gradients of steps.

        They lie one after the other. Gradients within implicit steps lie between them, unless the
        steps ran `whole`.
        """
        starts, batch_shape = self._steps.starts, shape[:-1]
        gradients: Gradients
        if whole or (starts is None and period <= 1 and self._uniform[count - self.n]):
            gradients = out.reshape(count, *shape)
            gradients = gradients if period else list(gradients)
        elif starts is None and period > 1:
            turns = range(min(period, count))
            gradients = [self._turn(out, turn, count, batch_shape, period) for turn in turns]
        elif starts is not None and period:
            gradients = self._turn(out, 0, int(starts[count - 1]) + 1, batch_shape, period)
        else:
            places = range(count) if starts is None else starts[:count].tolist()
            gradients = [self._one(out, k, batch_shape) for k in places]
        return gradients[::-1] if self.reverse else gradients

    def _one(self, out: NDArray[Any], k: int, batch_shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the `k`-th gradient."""
        batch, (start, stop) = batch_shape[0] if batch_shape else 1, self._offsets[k : k + 2]
        return out[batch * start : batch * stop].reshape(*batch_shape, stop - start)

    def _turn(
        self, out: NDArray[Any], turn: int, count: int, batch_shape: tuple[int, ...], period: int
    ) -> NDArray[Any]:
        """Return the gradients that enter the Jacobians of one turn, of `count` in all."""
        batch, (start, stop) = batch_shape[0] if batch_shape else 1, self._offsets[turn : turn + 2]
        rows = out.reshape(-(-count // period), batch * self._offsets[period])
        steps = -(-(count - turn) // period)
        part = rows[:steps, batch * start : batch * stop]
        return part.reshape(steps, *batch_shape, stop - start)

    def __repr__(self) -> str:
        return f"ScanPlan({self.n} Jacobians, {self.schedule})"

    def __str__(self) -> str:
        return describe(self.patterns, self._options, self._latest)


class _Reading:
    """A context for one run: it lends a slot of the plan, and sets the device and stream.

    It is no generator, and sets no device for the host: such a call takes as long as a Jacobian.
    """

    __slots__ = ("_arguments", "_place", "_plan", "_slot", "_stream")

    def __init__(self, plan: ScanPlan, stream: Any, *arguments: Any) -> None:
        self._plan, self._stream, self._arguments = plan, stream, arguments
        self._slot: ScanSlot | None = None
        self._place: ExitStack | None = None

    def __enter__(self) -> tuple[ScanSlot, Any, Any]:
        """Return the slot, the gradient at the end of its chain, and CuPy's stream."""
        grad, _, local_grads = self._arguments
        device, current = self._plan.device, None
        try:
            if type(grad) is not np.ndarray or device == "cuda" or self._stream is not None:
                self._place = ExitStack()
                there = place(*placed(grad, local_grads), device, self._stream)
                current = self._place.enter_context(there)
            self._slot, first = self._plan.lend(*self._arguments)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self._slot, first, current

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._slot is not None:
            self._plan.take_back(self._slot)
        if self._place is not None:
            self._place.__exit__(kind, error, trace)
        if isinstance(error, MemoryError):
            raise out_of_memory("the scan", error) from None


def _runs_whole_steps(program: Program, chain: Chain, dtype: np.dtype[Any]) -> bool:
    """Return whether the current device has kernels for the implicit steps of a chain."""
    from ..execution.cuda.chunks import form_of

    form = form_of(program, dtype)
    return form is not None and form.terms > 0 and chain.is_shared(1, 2)
