"""ScanPlan: a schedule for chains of fixed patterns; the numeric runs."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arrays.arrays import check_memory, load_cupy, memory_left, namespace, upload
from ..arrays.frozen import Frozen
from ..arrays.streams import place
from ..chains.chain import Chain, LocalGrads, check_grad, check_places, grad_or_zeros, placed
from ..chains.steps import Steps
from ..errors import InputError, InputTypeError, MemoryLimitError, out_of_memory
from ..execution.solves import Given
from ..execution.threads import thread_count
from ..execution.workspace import Workspace
from ..formatting import exact_bytes, format_bytes
from ..planning.search import Alternative
from ..symbolic.implicit import Step
from ..symbolic.program import Program
from ..symbolic.schedule import Schedule, check_count
from .choose import check_solves, choose_schedule, needed_bytes
from .describe import describe, to_dict
from .prediction import ScanPrediction, predict
from .spec import Kind, PlanSpec

if TYPE_CHECKING:
    from ..execution.device import DeviceWorkspace

__all__ = ["ScanPlan", "Slot"]

# Workspaces that one slot of a plan keeps, e.g. for different batch sizes; and choices of a plan.
_KEPT, _CHOICES = 4, 64

Gradients = list[NDArray[Any]] | NDArray[Any]


class _Ready(NamedTuple):
    """The schedule, with its program, that runs input of one kind."""

    spec: PlanSpec
    program: Program | None


class ScanPlan(Frozen):
    """A schedule for chains of fixed patterns, with the symbolic phase done.

    Made by :func:`sparsescan.plan`. A plan may be used from several threads at once, and after a
    fork. Its second run with the same kind of input allocates nothing that grows with the chain but
    the gradients it returns.

    With ``schedule="auto"``, what takes least depends on the kind of input: its batch size and
    dtype, the device it is on, and which Jacobians all samples share. A run of another kind than
    before chooses again, by predicted times alone, and keeps the choice. `schedule`, `reason`,
    `dense` and `alternatives`, and all that the plan prints, are those of the latest run; before
    the first, those for `batch` samples of `dtype`, or for one of float64.

    Attributes
    ----------
    n : int
        Number of Jacobians.
    patterns : tuple of Pattern or ImplicitPattern
        The pattern of every Jacobian, from the last layer to the first.
    schedule : Schedule
        The schedule that ran last, or will run first.
    reason : str
        Why that one.
    batch : int or None
        The batch size that the plan insists on, if any.
    dtype : dtype or None
        The dtype that the plan insists on, if any.
    device : {None, "cpu", "cuda"}
        Where it runs; None is where the data is.
    memory_limit : int or None
        Bytes that it may take.
    reverse : bool
        Whether Jacobians, local gradients and gradients are in the order of time. (`patterns` are
        not: a scan begins with the last.)
    dense : frozenset of tuple
        The products ``(start, stop)``, of elements as a schedule numbers them, that are stored
        densely although their patterns are sparse.
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

    def __init__(self, spec: PlanSpec, program: Program | None = None) -> None:
        patterns = spec.patterns
        self._set(
            n=len(patterns),
            patterns=tuple(patterns),
            batch=spec.batch,
            dtype=spec.dtype,
            device=spec.device,
            memory_limit=spec.memory_limit,
            reverse=spec.reverse,
        )
        if patterns and program is None:
            program = Program(patterns, spec.schedule, dense=spec.dense)
        # For the input that the plan was made for, for other kinds, and for the latest.
        self._first = self._latest = _Ready(spec, program)
        self._others: dict[Kind, _Ready] = {}
        self._linear: Program | None = None
        self._steps = Steps(self.patterns)
        factors = self._steps.factors
        # Lengths of all gradients that a run makes, and where they start.
        self._sizes = [factors[0].shape[1]] if factors else []
        self._sizes += [factor.shape[0] for factor in factors]
        starts = self._steps.starts
        # Lengths of the gradients before each step, and behind the last.
        self._step_sizes = (
            self._sizes if starts is None else [self._sizes[k] for k in starts.tolist()]
        )
        self._offsets = np.concatenate([[0], np.cumsum(self._sizes, dtype=np.int64)]).tolist()
        # Whether all gradients of an exclusive, and of an inclusive, scan have one length.
        self._uniform = len(set(self._sizes[:-1])) <= 1, len(set(self._sizes)) <= 1
        self._idle: deque[Slot] = deque()
        if program is not None:
            self._admit(program, spec.kind.dtype, spec.kind.batch)

    @property
    def schedule(self) -> Schedule:
        """The schedule that ran last, or will run first."""
        return self._latest.spec.schedule

    @property
    def reason(self) -> str:
        """Why that one."""
        return self._latest.spec.reason

    @property
    def dense(self) -> frozenset[tuple[int, int]]:
        """Products ``(start, stop)`` that are stored densely although their patterns are sparse."""
        return self._latest.spec.dense

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The schedules that the planner looked at."""
        return self._latest.spec.alternatives

    @property
    def workspace_bytes(self) -> int:
        """Bytes that the plan and a run take beside Jacobians and gradients, at most.

        The products with their indices, scratch of every thread, and tables; for as many samples as
        ran last, or before the first run `batch` of `dtype`, or one of float64; as if every
        Jacobian differed between samples.
        """
        return _workspace_bytes(self._latest)

    def settle(self, kind: Kind) -> Program | None:
        """Return what runs input of this kind: from now on, all that is printed is about it."""
        ready = self._latest
        if kind != ready.spec.kind:
            ready = self._first
            if kind != ready.spec.kind:
                ready = self._others.get(kind) or self._choose(kind)
            self._latest = ready
        return ready.program

    def _choose(self, kind: Kind) -> _Ready:
        """Choose what runs input of a new kind; no threads wait, since all choose the same."""
        spec, program = self._first
        if spec.chooses_for(kind):
            choice = choose_schedule(self.patterns, None, kind, self.memory_limit)
            spec = spec.with_choice(choice)
            known = [self._first, *self._others.values()]
            same = (
                ready.program
                for ready in known
                if (ready.spec.schedule, ready.spec.dense) == (spec.schedule, spec.dense)
            )
            program = next(same, choice.program)
            if program is None:
                program = Program(self.patterns, spec.schedule, dense=spec.dense)
        if len(self._others) >= _CHOICES:
            self._others.pop(next(iter([*self._others])), None)
        return self._others.setdefault(kind, _Ready(replace(spec, ran=kind), program))

    def _admit(
        self, program: Program, dtype: np.dtype[Any], batch: int, whole: bool = True
    ) -> None:
        """Raise if a program and a run of it need more than the limit, or than there is."""
        if self.memory_limit is None and (not program.products or self.device == "cuda"):
            return
        needed = needed_bytes(program, dtype, batch, self.device, whole=whole)
        limit = memory_left() if self.memory_limit is None else self.memory_limit
        if needed <= limit:
            return
        linear = Program(self.patterns, Schedule.linear(self.n))
        least = needed_bytes(linear, dtype, batch, self.device)
        if self.memory_limit is None:
            raise MemoryLimitError(
                f"{program.schedule} needs {format_bytes(needed)}, and this machine has "
                f"{format_bytes(limit)} left; the least, Schedule.linear({self.n}), needs "
                f"{format_bytes(least)}"
            )
        raise MemoryLimitError(
            f"memory_limit is {exact_bytes(self.memory_limit)}; {program.schedule} needs "
            f"{exact_bytes(needed)}, and the least, Schedule.linear({self.n}), {exact_bytes(least)}"
        )

    def exclusive_scan(
        self, grad: ArrayLike | None, jacobians: Any, *, local_grads: Any = None, stream: Any = None
    ) -> Gradients:
        """Return what :func:`sparsescan.exclusive_scan` does, for a chain of these patterns.

        Parameters
        ----------
        grad : array_like, shape (d_n,) or (batch, d_n), or None
            Gradient at the end of the chain; None is zeros, if there are `local_grads`.
        jacobians : sequence, CSRChain, ImplicitChain, PeriodicChain or ndarray
            Jacobians of the plan's patterns; or only their values, in the order of the patterns: a
            sequence of arrays ``(nnz,)`` or ``(batch, nnz)``, or one array ``(n, nnz)`` or
            ``(n, batch, nnz)``. For a pattern that is not dense, an array always holds values.
        local_grads : sequence or ndarray, optional
            A term that is added to each returned gradient, ``local_grads[0]`` to `grad` (see
            :func:`sparsescan.exclusive_scan`, double-counted gradient).
        stream : optional
            As for :func:`sparsescan.exclusive_scan`.

        Returns
        -------
        list of ndarray, or ndarray
            The ``n`` gradients ``[∇x_n, …, ∇x_1]``; one array if the Jacobians came as one, one for
            each pattern of a :class:`PeriodicChain`.

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
        return self._scan(grad, jacobians, local_grads, stream, inclusive=False)

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
            The ``n + 1`` gradients ``[∇x_n, …, ∇x_0]``. A list also for a single rectangular
            Jacobian that came as an array, since the two gradients differ in length.

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
        return self._scan(grad, jacobians, local_grads, stream, inclusive=True)

    def predict(self, workers: int) -> ScanPrediction:
        """Return steps and work of an exclusive scan of one sample with any number of workers.

        By the schedule of the latest run.

        Parameters
        ----------
        workers : int
            How many, at least 1: more than this machine has, if you like.

        Returns
        -------
        ScanPrediction
            Steps and multiply-adds, on the critical path and in all.

        Raises
        ------
        InputError, InputTypeError
            If `workers` is no positive integer.

        Examples
        --------
        >>> import sparsescan
        >>> plan = sparsescan.plan([sparsescan.Pattern.diagonal(8)] * 1000, schedule="blelloch")
        >>> plan.predict(1).steps, plan.predict(128).steps, plan.predict(1000).steps
        (1984, 26, 18)
        """
        return predict(self._latest.program, check_count("workers", workers, 1))

    def to_dict(self) -> dict[str, Any]:
        """Return what the plan prints, for programs: lists, numbers and strings, as JSON has them.

        Returns
        -------
        dict
            ``levels`` has a dict for each level: the counts are for one sample. Bytes and times are
            for the dtype and the number of samples under ``predicted_for``, those of the latest
            run.

        Examples
        --------
        >>> import sparsescan
        >>> plan = sparsescan.plan([sparsescan.Pattern.dense((2, 2))] * 4, schedule="blelloch")
        >>> plan.to_dict()["levels"][0]["multiply_adds"]
        12
        """
        latest = self._latest
        return to_dict(latest.spec, latest.program, _workspace_bytes(latest))

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
        Stored are the patterns, the schedule of the latest run and the options, but no products.

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
        from .files import save_spec

        save_spec(path, self._latest.spec)

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
            It prints the same, and gives the same bits; with ``"auto"`` for input of the kind that
            ran last before it was saved, while for any other it chooses anew, on this machine. A
            plan for a device can be loaded without one.

        Raises
        ------
        PlanFileError
            If the file is damaged or something else. It is a :class:`ValueError`.
        InputError, InputTypeError
            If `path` is no path.
        MemoryLimitError
            If a run on this machine, with more threads maybe, needs more than the plan's limit.
        OSError
            If the file cannot be opened, such as :class:`FileNotFoundError`.

        See Also
        --------
        save : Has an example.
        """
        from .files import load_spec

        return ScanPlan(load_spec(path))

    def _scan(
        self,
        grad: ArrayLike | None,
        jacobians: Any,
        local_grads: Any,
        stream: Any,
        *,
        inclusive: bool,
    ) -> Gradients:
        with place(*placed(grad, local_grads), self.device, stream) as current_stream:
            try:
                slot = self._idle.pop()
            except IndexError:
                chain = Chain(len(self._steps.factors), self.reverse, self._steps.starts)
                slot = self.slot(chain)
            try:
                slot.chain.read(self._steps.unfold(jacobians, self.reverse), self._steps.factors)
                return self.run(slot, grad, local_grads, inclusive=inclusive, stream=current_stream)
            except MemoryError as error:
                raise out_of_memory("the scan", error) from None
            finally:
                slot.chain.release()
                self._idle.append(slot)

    def slot(self, chain: Chain) -> Slot:
        """Return a slot to run a chain in."""
        return Slot(chain, self._admit)

    def run(
        self,
        slot: Slot,
        grad: ArrayLike | None,
        local_grads: Any,
        *,
        inclusive: bool,
        stream: Any = None,
    ) -> Gradients:
        """Scan the chain that a slot has read, and that the caller will release.

        `stream` is CuPy's current one, for callers that have it.
        """
        chain, steps = slot.chain, self._steps
        count = len(steps.factors) + inclusive
        first, local, dtype = self._read(chain, grad, local_grads, inclusive)
        batch_shape = first.shape[:-1]
        sizes = self._sizes or [first.shape[-1]]
        xp = namespace(first)
        if count == 0:
            return xp.empty((0, *first.shape), dtype) if chain.period == 1 else []
        solves = self._first.program is not None and self._first.program.solved
        if solves and (xp is not np or self.device == "cuda"):
            check_solves(self.patterns, None, True, self.reverse)
        download = xp is np and self.device == "cuda"
        if download:
            xp = load_cupy()
            first = upload(first)
            chain.upload()
            local.upload()
        batch = batch_shape[0] if batch_shape else 1
        size = self._offsets[count] if self.n else sizes[0]
        if chain.period > 1:
            # Whole periods, the last of which may lack its end.
            size = -(-count // chain.period) * self._offsets[chain.period]
        if xp is np:
            check_memory("the gradients", batch * size * dtype.itemsize)
        program, whole = None, False
        if self.n and count > 1 and batch > 0:
            differs = chain.differs() if batch > 1 else None
            program = self.settle(Kind(batch, dtype, xp is not np, differs))
            assert program is not None  # since there are Jacobians
            chain.convert(dtype, program.multiplied if xp is np else None)
            whole = xp is not np and slot.runs_whole_steps(program, dtype)
        if whole:
            # No gradients within steps.
            count = self.n + inclusive
            size = count * sizes[0]
        elif steps.starts is not None:
            local.spread(steps.starts[: self.n + inclusive], chain.period)
        out = xp.empty(batch * size, dtype)
        local.add_first(first, out[: first.size].reshape(first.shape))
        if program is not None:
            local.convert(dtype)
            if xp is not np:
                workspace = slot.on_device(program, dtype, batch, local, whole)
                workspace.run(chain, local, out, inclusive=inclusive, stream=stream)
            elif not slot.workspace(program, dtype, batch, local).run(
                out, inclusive, Given(chain.array, local.array, chain.name)
            ):
                # The linear scan defines what a value reaches that is not finite, of which a
                # product may make something else; nor can a product hold entries of any range.
                if self._linear is None:
                    self._linear = Program(self.patterns, Schedule.linear(self.n))
                slot.workspace(self._linear, dtype, batch, local).run(out, inclusive)
        out = out.get() if download else out
        if whole:
            cut = _as_stack(out.reshape(count, *batch_shape, sizes[0]), chain.period)
        elif steps.starts is None:
            cut = self._cut(out, count, sizes, batch_shape, chain.period)
        else:
            cut = self._cut_steps(out, self.n + inclusive, batch_shape, chain.period)
        return cut[::-1] if self.reverse else cut

    def _read(
        self, chain: Chain, grad: ArrayLike | None, local_grads: Any, inclusive: bool
    ) -> tuple[Any, LocalGrads, np.dtype[Any]]:
        """Return what comes with a chain, checked, and the dtype of all gradients."""
        size = self._sizes[0] if self.n else None
        starts, count = self._steps.starts, self.n + inclusive
        # The factors of implicit steps take turns, and gradients do not.
        period = chain.period if starts is None else 0
        first = grad_or_zeros(grad, local_grads, size, chain.batch, period)
        check_grad(first, size, chain.batch)
        batch_shape = first.shape[:-1]
        if self.batch is not None and batch_shape != (self.batch,):
            raise InputError(
                f"grad has shape {first.shape}; expected ({self.batch}, ·), the batch of the plan"
            )
        sizes = self._step_sizes or [first.shape[-1]]
        local = LocalGrads(local_grads, count, sizes, batch_shape, period, reverse=self.reverse)
        check_places(first, chain, local)
        dtype = np.result_type(first.dtype, *[chain.dtype] * (self.n > 0), *local.dtypes)
        if self.dtype is not None and dtype != self.dtype:
            raise InputTypeError(
                f"the input is of dtype {dtype}; expected {self.dtype}, the plan's"
            )
        return first, local, dtype

    def _cut(
        self,
        out: NDArray[Any],
        count: int,
        sizes: Sequence[int],
        batch_shape: tuple[int, ...],
        period: int,
    ) -> Gradients:
        """Return the gradients, which lie one after the other in `out`."""
        if period > 1:
            turns = range(min(period, count))
            return [self._turn(out, turn, count, batch_shape, period) for turn in turns]
        if self._uniform[count - self.n]:
            return _as_stack(out.reshape(count, *batch_shape, sizes[0]), period)
        return [self._one(out, k, batch_shape) for k in range(count)]

    def _cut_steps(
        self, out: NDArray[Any], count: int, batch_shape: tuple[int, ...], period: int
    ) -> Gradients:
        """Return the gradients of the steps; those within a step lie between them in `out`."""
        starts = self._steps.starts
        assert starts is not None
        if not period:
            return [self._one(out, k, batch_shape) for k in starts[:count].tolist()]
        return self._turn(out, 0, int(starts[count - 1]) + 1, batch_shape, period)

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
        latest = self._latest
        return describe(latest.spec, latest.program, _workspace_bytes(latest))


def _as_stack(gradients: NDArray[Any], period: int) -> Gradients:
    """Return gradients as one array, or as a list if the Jacobians came as a sequence."""
    return gradients if period else list(gradients)


def _workspace_bytes(ready: _Ready) -> int:
    if ready.program is None:
        return 0
    kind = ready.spec.kind
    return needed_bytes(ready.program, kind.dtype, kind.batch, kind.device)


class Slot:
    """Chain and workspaces of one run at a time, kept for the next."""

    def __init__(
        self, chain: Chain, admit: Callable[[Program, np.dtype[Any], int, bool], None]
    ) -> None:
        self.chain = chain
        self._admit = admit
        self._workspaces: dict[Any, Any] = {}

    def workspace(
        self, program: Program, dtype: np.dtype[Any], batch: int, local: LocalGrads
    ) -> Workspace:
        """Return a workspace on the CPU for this program and this kind of input."""
        threads, merged = thread_count(), self.chain.merged
        batched, key = self.chain.batched, self.chain.differs()
        workspace: Workspace = self._kept(
            (program, dtype, batch, key, local.given, threads, tuple(merged)),
            lambda: Workspace(
                program, self.chain.leaves, dtype, batch, batched, local.given, threads, merged
            ),
        )
        local.fill(workspace.local_grads)
        return workspace

    def runs_whole_steps(self, program: Program, dtype: np.dtype[Any]) -> bool:
        """Return whether the current device has kernels for the implicit steps of the chain."""
        from ..execution.device import form_of

        form = form_of(program, dtype)
        return form is not None and form.terms > 0 and self.chain.is_shared(1, 2)

    def on_device(
        self, program: Program, dtype: np.dtype[Any], batch: int, local: LocalGrads, whole: bool
    ) -> DeviceWorkspace:
        """Return a workspace on the current device for this program and this kind of input.

        `whole` says that steps are implicit and run whole.
        """
        from ..execution.device import DeviceWorkspace

        stacked = bool(self.chain.stacks) if whole else self.chain.stack is not None
        how = None if not local.given else "list" if local.stack is None else "stack"
        batched, key = self.chain.batched, self.chain.differs()
        workspace: DeviceWorkspace = self._kept(
            (program, dtype, batch, key, stacked, how, whole, self.chain.device),
            lambda: DeviceWorkspace(program, dtype, batch, batched, stacked, how, whole),
            whole,
        )
        return workspace

    def _kept(self, key: tuple[Any, ...], make: Callable[[], Any], whole: bool = True) -> Any:
        workspace = self._workspaces.get(key)
        if workspace is None:
            program, dtype, batch = key[:3]
            self._admit(program, dtype, batch, whole)
            while len(self._workspaces) >= _KEPT:
                del self._workspaces[next(iter(self._workspaces))]
            workspace = self._workspaces[key] = make()
        return workspace
