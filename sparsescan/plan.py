"""ScanPlan: a schedule for chains of fixed patterns; the numeric runs."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._arrays import load_cupy, namespace, upload
from ._place import place
from .chain import Chain, LocalGrads, check_places, read_grad
from .describe import describe, to_dict
from .errors import InputError, InputTypeError, MemoryLimitError
from .kernels._threads import thread_count
from .pattern import Pattern
from .planner import Alternative
from .prediction import Prediction, predict
from .program import Program, Workspace, workspace_bytes
from .schedule import Schedule, check_count

if TYPE_CHECKING:
    from .device import DeviceWorkspace

__all__ = ["ScanPlan", "needed_bytes"]

# Workspaces that one slot of a plan keeps, e.g. for different batch sizes.
_KEPT = 4

Gradients = list[NDArray[Any]] | NDArray[Any]


def needed_bytes(program: Program, dtype: np.dtype[Any], batch: int, device: str | None) -> int:
    """Bytes that a program and a run of it take beside Jacobians and gradients, at most."""
    if device == "cuda":
        from .device import device_bytes

        return device_bytes(program, dtype, batch)
    return workspace_bytes(program, dtype, batch, thread_count())


class ScanPlan:
    """A schedule for chains of fixed patterns, with the symbolic phase done.

    Made by :func:`sparsescan.plan`. A plan may be used from several threads at once, and after a
    fork. Its second run with the same kind of input allocates nothing that grows with the chain but
    the gradients it returns.

    Attributes
    ----------
    n : int
        Number of Jacobians.
    patterns : tuple of Pattern
        The pattern of every Jacobian, from the last layer to the first.
    schedule : Schedule
        What runs.
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
    dense : frozenset of tuple
        The products ``(start, stop)``, of elements as a schedule numbers them, that are stored
        densely although their patterns are sparse.
    alternatives : tuple of Alternative
        The schedules that the planner looked at, with the nanoseconds predicted then.
    """

    def __init__(
        self,
        patterns: Sequence[Pattern],
        schedule: Schedule,
        *,
        reason: str,
        batch: int | None = None,
        dtype: np.dtype[Any] | None = None,
        device: str | None = None,
        memory_limit: int | None = None,
        dense: frozenset[tuple[int, int]] = frozenset(),
        alternatives: tuple[Alternative, ...] = (),
        program: Program | None = None,
    ) -> None:
        self.n = len(patterns)
        self.patterns = tuple(patterns)
        self.schedule = schedule
        self.batch = batch
        self.dtype = dtype
        self.device = device
        self.reason = reason
        self.memory_limit = memory_limit
        self.dense = dense
        self.alternatives = alternatives
        if patterns and program is None:
            program = Program(patterns, schedule, dense=dense)
        self._program = program
        self._linear: Program | None = None
        self._sizes = [patterns[0].shape[1]] if patterns else []
        self._sizes += [pattern.shape[0] for pattern in patterns]
        self._offsets = np.concatenate([[0], np.cumsum(self._sizes, dtype=np.int64)]).tolist()
        # Whether all gradients of an exclusive, and of an inclusive, scan have one length.
        self._uniform = len(set(self._sizes[:-1])) <= 1, len(set(self._sizes)) <= 1
        self._idle: deque[_Slot] = deque()
        if program is not None:
            self._admit(program, np.dtype(dtype or np.float64), batch or 1)

    @property
    def workspace_bytes(self) -> int:
        """Bytes that the plan and a run take beside Jacobians and gradients, at most.

        The products with their indices, scratch of every thread, and tables; for `batch` samples of
        `dtype`, or one of float64 where the plan insists on none, as if every Jacobian differed
        between samples.
        """
        if self._program is None:
            return 0
        dtype = np.dtype(self.dtype or np.float64)
        return needed_bytes(self._program, dtype, self.batch or 1, self.device)

    def _admit(self, program: Program, dtype: np.dtype[Any], batch: int) -> None:
        """Raise if a program and a run of it need more than the limit."""
        if self.memory_limit is None:
            return
        needed = needed_bytes(program, dtype, batch, self.device)
        if needed <= self.memory_limit:
            return
        linear = Program(self.patterns, Schedule.linear(self.n))
        least = needed_bytes(linear, dtype, batch, self.device)
        raise MemoryLimitError(
            f"memory_limit is {self.memory_limit} bytes; {self.schedule} needs {needed}, and the "
            f"least, Schedule.linear({self.n}), {least}"
        )

    def exclusive_scan(
        self, grad: ArrayLike, jacobians: Any, *, local_grads: Any = None, stream: Any = None
    ) -> Gradients:
        """Gradients of all but the first layer's input; as :func:`sparsescan.exclusive_scan`.

        Parameters
        ----------
        grad : array_like, shape (d_n,) or (batch, d_n)
            Gradient at the end of the chain.
        jacobians : sequence, CSRChain, PeriodicChain or ndarray
            Jacobians of the plan's patterns; or only their values, in the order of the patterns: a
            sequence of arrays ``(nnz,)`` or ``(batch, nnz)``, or one array ``(n, nnz)`` or
            ``(n, batch, nnz)``. Of a pattern that is not dense, an array always holds values.
        local_grads : sequence or ndarray, optional
            What is added to each returned gradient.
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
        InputError, InputTypeError
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
        self, grad: ArrayLike, jacobians: Any, *, local_grads: Any = None, stream: Any = None
    ) -> Gradients:
        """Gradients of every layer's input and output: one more, ``∇x_0``, at the end.

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
        PatternMismatchError, InputError, InputTypeError
            As :meth:`exclusive_scan`.

        Examples
        --------
        >>> import numpy as np, sparsescan
        >>> plan = sparsescan.plan([sparsescan.Pattern.dense((2, 2))])
        >>> plan.inclusive_scan([1.0, 2.0], [np.eye(2) * 3])
        [array([1., 2.]), array([3., 6.])]
        """
        return self._scan(grad, jacobians, local_grads, stream, inclusive=True)

    def predict(self, workers: int) -> Prediction:
        """What an exclusive scan of one sample would take with any number of workers.

        Parameters
        ----------
        workers : int
            How many, at least 1: more than this machine has, if you like.

        Returns
        -------
        Prediction
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
        return predict(self._program, check_count("workers", workers, 1))

    def to_dict(self) -> dict[str, Any]:
        """What the plan prints, for programs: made of lists, numbers and strings, as JSON is.

        Returns
        -------
        dict
            ``levels`` has a dict for each level: the counts are for one sample, bytes for the dtype
            of the plan, or float64.

        Examples
        --------
        >>> import sparsescan
        >>> plan = sparsescan.plan([sparsescan.Pattern.dense((2, 2))] * 4, schedule="blelloch")
        >>> plan.to_dict()["levels"][0]["multiply_adds"]
        12
        """
        return to_dict(self, self._program)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, in NumPy's ``.npz`` format and without pickle.

        Parameters
        ----------
        path : str or path-like
            The file, written under exactly this name; one that exists is replaced.

        Raises
        ------
        OSError
            If the file cannot be written.

        See Also
        --------
        load : The way back.

        Notes
        -----
        Stored are the patterns, the schedule and the options, but no products.

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
        from .plan_file import save_plan

        save_plan(path, self)

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
            It prints the same, and gives the same bits. One for a device can be loaded without it.

        Raises
        ------
        PlanFileError
            If the file is damaged or something else. It is a :class:`ValueError`.
        MemoryLimitError
            If a run on this machine, with more threads maybe, needs more than the plan's limit.
        OSError
            If the file cannot be opened, such as :class:`FileNotFoundError`.

        See Also
        --------
        save : Has an example.
        """
        from .plan_file import load_plan

        return load_plan(path)

    def _scan(
        self, grad: ArrayLike, jacobians: Any, local_grads: Any, stream: Any, *, inclusive: bool
    ) -> Gradients:
        with place(grad, self.device, stream):
            try:
                slot = self._idle.pop()
            except IndexError:
                slot = _Slot(Chain(self.n), self._admit)
            try:
                slot.chain.read(jacobians, self.patterns)
                return self._run(slot, grad, local_grads, inclusive)
            finally:
                slot.chain.release()
                self._idle.append(slot)

    def _scan_once(
        self, grad: ArrayLike, chain: Chain, local_grads: Any, *, inclusive: bool
    ) -> Gradients:
        """Scan the chain that the plan was made from, which has been read already."""
        return self._run(_Slot(chain, self._admit), grad, local_grads, inclusive)

    def _run(self, slot: _Slot, grad: ArrayLike, local_grads: Any, inclusive: bool) -> Gradients:
        chain = slot.chain
        first = read_grad(grad, self._sizes[0] if self.n else None, chain.batch)
        batch_shape = first.shape[:-1]
        if self.batch is not None and batch_shape != (self.batch,):
            raise InputError(
                f"grad has shape {first.shape}; expected ({self.batch}, ·), the batch of the plan"
            )
        count = self.n + inclusive
        sizes = self._sizes if self.n else [first.shape[-1]]
        local = LocalGrads(local_grads, count, sizes, batch_shape, chain.period)
        check_places(first, chain, local)
        dtype = np.result_type(first.dtype, *[chain.dtype] * (self.n > 0), *local.dtypes)
        if self.dtype is not None and dtype != self.dtype:
            raise InputTypeError(
                f"the input is of dtype {dtype}; expected {self.dtype}, the plan's"
            )
        xp = namespace(first)
        if count == 0:
            return xp.empty((0, *first.shape), dtype) if chain.period == 1 else []
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
        out = xp.empty(batch * size, dtype)
        local.add_first(first, out[: first.size].reshape(first.shape))
        if self._program is not None and count > 1 and batch > 0:
            chain.convert(dtype)
            local.convert(dtype)
            if xp is np:
                self._fill(self._program, slot, out, batch, local, inclusive)
            else:
                slot.on_device(self._program, dtype, batch, local).run(
                    chain, local, out, inclusive=inclusive
                )
        return self._cut(out.get() if download else out, count, sizes, batch_shape, chain.period)

    def _fill(
        self,
        program: Program,
        slot: _Slot,
        out: NDArray[Any],
        batch: int,
        local: LocalGrads,
        inclusive: bool,
    ) -> None:
        """Run the schedule; or the linear one, where products of Jacobians cannot decide.

        What a value reaches that is not finite is defined by the linear scan, and a product may
        make something else of it. Nor can a product hold entries of any range.
        """
        if slot.workspace(program, out.dtype, batch, local).run(out, inclusive):
            return
        if self._linear is None:
            self._linear = Program(self.patterns, Schedule.linear(self.n))
        slot.workspace(self._linear, out.dtype, batch, local).run(out, inclusive)

    def _cut(
        self,
        out: NDArray[Any],
        count: int,
        sizes: Sequence[int],
        batch_shape: tuple[int, ...],
        period: int,
    ) -> Gradients:
        """The gradients, which lie one after the other in `out`."""
        batch = batch_shape[0] if batch_shape else 1
        offsets = self._offsets
        if period > 1:
            rows = out.reshape(-(-count // period), batch * offsets[period])
            taken = [-(-(count - turn) // period) for turn in range(period)]
            return [
                rows[:steps, batch * start : batch * stop].reshape(steps, *batch_shape, size)
                for steps, start, stop, size in zip(
                    taken, offsets[:period], offsets[1:], sizes, strict=False
                )
            ]
        if self._uniform[count - self.n]:
            stack = out.reshape(count, *batch_shape, sizes[0])
            return stack if period else list(stack)
        return [
            out[batch * offsets[k] : batch * offsets[k + 1]].reshape(*batch_shape, sizes[k])
            for k in range(count)
        ]

    def __repr__(self) -> str:
        return f"ScanPlan({self.n} Jacobians, {self.schedule})"

    def __str__(self) -> str:
        return describe(self, self._program)


class _Slot:
    """What one run at a time uses, and leaves to the next."""

    def __init__(self, chain: Chain, admit: Callable[[Program, np.dtype[Any], int], None]) -> None:
        self.chain = chain
        self._admit = admit
        self._workspaces: dict[Any, Any] = {}

    def workspace(
        self, program: Program, dtype: np.dtype[Any], batch: int, local: LocalGrads
    ) -> Workspace:
        threads = thread_count()
        batched, key = self._batched()
        workspace: Workspace = self._kept(
            (program, dtype, batch, key, local.given, threads),
            lambda: Workspace(
                program, self.chain.leaves, dtype, batch, batched, local.given, threads
            ),
        )
        local.fill(workspace.local_grads)
        return workspace

    def on_device(
        self, program: Program, dtype: np.dtype[Any], batch: int, local: LocalGrads
    ) -> DeviceWorkspace:
        from .device import DeviceWorkspace

        stacked = self.chain.stack is not None
        how = None if not local.given else "list" if local.stack is None else "stack"
        batched, key = self._batched()
        workspace: DeviceWorkspace = self._kept(
            (program, dtype, batch, key, stacked, how, self.chain.device),
            lambda: DeviceWorkspace(program, dtype, batch, batched, stacked, how),
        )
        return workspace

    def _batched(self) -> tuple[NDArray[np.bool_], tuple[int, bytes]]:
        """Which Jacobians differ between samples, and the same to look it up by."""
        batched = self.chain.leaves[:, 1] != 0
        count = int(np.count_nonzero(batched))
        return batched, (count, batched.tobytes() if 0 < count < len(batched) else b"")

    def _kept(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        workspace = self._workspaces.get(key)
        if workspace is None:
            self._admit(*key[:3])
            while len(self._workspaces) >= _KEPT:
                del self._workspaces[next(iter(self._workspaces))]
            workspace = self._workspaces[key] = make()
        return workspace
