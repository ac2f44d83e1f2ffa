"""ParallelPlan: a scan over the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._arrays import (
    check_array,
    check_one_place,
    device_of,
    is_cupy,
    is_on_device,
    load_cupy,
    namespace,
    upload,
)
from .._place import place
from ..chain import Chain, LocalGrads, _check_count, is_stack, read_grad
from ..containers import CSRChain
from ..errors import DeviceError, InputError, InputTypeError
from ..kernels._threads import thread_count
from ..pattern import Pattern
from ..plan import Gradients, _Slot
from .communicator import Communicator, Fault
from .exchange import exscan_messages, rounds
from .forecast import Forecast, boundaries
from .maps import Merger, Message, Ranges, State, Terms, vector_of, vector_words
from .part import Part, PartCost, Reduction
from .rows import Rows

__all__ = ["ParallelPlan", "check_form"]

# Terms for which a plan keeps memory.
_KEPT = 4
# Of a number that a rank does not know.
_UNKNOWN = -(1 << 60)


class _Memory:
    """What a plan needs to exchange data on some terms."""

    def __init__(self, plan: ParallelPlan, terms: Terms) -> None:
        xp = load_cupy() if plan._sends_from_device else np
        self.entering, self.leaving = (
            xp.zeros(vector_words(size, terms), np.int64) for size in plan._sizes
        )
        if plan._rows is not None:
            self.messages = plan._rows.messages(terms)
        if plan.schedule == "vectors":
            return
        layout, algorithm = plan.forecast.layout, plan.forecast.algorithm
        assert algorithm is not None
        words = layout.words(terms)
        self.given, self.found = (
            Message(np.zeros(words, np.int64), layout, terms) for _ in range(2)
        )
        self.merger = Merger(plan._ranges, layout, terms, thread_count())
        if not terms.samples:
            return
        for merges in rounds(algorithm, plan.grid.chain):
            for merge in merges[plan.position]:
                if merge.stop < plan.grid.chain:
                    self.merger.prepare(*merge)


class ParallelPlan:
    """A scan over the ranks of a communicator, with the symbolic phase done.

    Made by :func:`sparsescan.parallel.plan`. Its scans are called by all ranks together.

    Attributes
    ----------
    n : int
        Jacobians of this rank.
    grid : Grid
        How ranks share chain and batch.
    position, group, row : int
        Which part of the chain this rank holds, for which samples, and which share of its rows.
    schedule : {"vectors", "products"}
        How parts are combined.
    reason : str
        Why so.
    forecast : Forecast
        What a scan is predicted to take, if all Jacobians differ between samples.
    batch : int or None
        Samples of each rank that the plan insists on, if any.
    dtype : dtype or None
        The dtype that the plan insists on, if any.
    device : {"cpu", "cuda"}
        Where each rank scans its part.
    """

    def __init__(
        self,
        world: Communicator,
        group: Communicator,
        patterns: Sequence[Pattern],
        part: Part | Rows,
        costs: Sequence[PartCost],
        forecast: Forecast,
        *,
        reason: str,
        batch: int | None,
        dtype: np.dtype[Any] | None,
        device: str,
        sends_from_device: bool,
        signature: int,
    ) -> None:
        self._world = world
        self._comm = group
        self._patterns = patterns
        self.n = len(patterns)
        self.grid = forecast.grid
        self.position, self.group = self.grid.position(world.rank), self.grid.group(world.rank)
        self.row = self.grid.row(world.rank)
        self.schedule = forecast.schedule
        self.forecast = forecast
        self.reason = reason
        self.batch = batch
        self.dtype = dtype
        self.device = device
        # Gradients go from device to device where MPI reads their memory.
        self._sends_from_device = sends_from_device
        self._signature = signature
        mine = costs[self.row :: self.grid.rows]
        self._steps = sum(cost.steps for cost in mine)
        # Lengths of the gradients that enter and leave this part, or what this rank owns of them.
        self._sizes = boundaries(mine)[self.position : self.position + 2]
        # There is no limit to what it may take.
        self._slot = _Slot(Chain(self.n), lambda *needed: None)
        self._rows = part if isinstance(part, Rows) else None
        self._part = part if isinstance(part, Part) else None
        self._memory: dict[Terms, _Memory] = {}
        # Of a chain without steps: lengths of the gradient's shares in the last scan.
        self._passed_on: list[int] = []
        self._is_last = self.position == self.grid.chain - 1
        self._reduction: Reduction | None = None
        if self.schedule == "products":
            assert self._part is not None
            assert forecast.form is not None
            maps: list[Pattern | None] = [
                cost.maps[forecast.form].pattern if cost.maps else None for cost in costs
            ]
            self._ranges = Ranges(maps)
            self._pattern = maps[self.position]
            if self._pattern is not None:
                self._reduction = self._part.reduction(forecast.form)

    def exclusive_scan(
        self, grad: ArrayLike | None, jacobians: Any, *, local_grads: Any = None
    ) -> Gradients:
        """Gradients of all but the first layer's input; as :func:`parallel.exclusive_scan`.

        Parameters
        ----------
        grad : array_like, shape (d_n,) or (batch, d_n), or None
            Gradient at the end of the chain, on the ranks of position 0; None on others. Where
            ranks share rows, this rank's entries of it: ``(own,)`` or ``(batch, own)``.
        jacobians : sequence, CSRChain or ndarray
            Jacobians of this rank, or its rows of them, of the plan's patterns; or only their
            values, as for :meth:`sparsescan.ScanPlan.exclusive_scan`.
        local_grads : sequence or ndarray, optional
            What is added to each gradient that this rank gets, of the same shape.

        Returns
        -------
        list of ndarray, or ndarray
            As many gradients as this rank has Jacobians, or its entries of them.

        Raises
        ------
        PatternMismatchError, InputError, InputTypeError, DeviceError, RankError, MemoryError
            On all ranks, if anything is wrong on any of them.
        """
        return self._scan(grad, jacobians, local_grads, inclusive=False)

    def inclusive_scan(
        self, grad: ArrayLike | None, jacobians: Any, *, local_grads: Any = None
    ) -> Gradients:
        """The same down to the input of the first layer: one gradient more, on the last rank.

        Parameters
        ----------
        grad, jacobians, local_grads
            As for :meth:`exclusive_scan`.

        Returns
        -------
        list of ndarray, or ndarray
            As many gradients as this rank has Jacobians; on the last rank of a group one more.

        Raises
        ------
        PatternMismatchError, InputError, InputTypeError, DeviceError, RankError, MemoryError
            On all ranks, if anything is wrong on any of them.
        """
        return self._scan(grad, jacobians, local_grads, inclusive=True)

    def __repr__(self) -> str:
        return (
            f"ParallelPlan({self.n} of {self._steps} Jacobians, {self.grid} ranks, {self.schedule})"
        )

    def __str__(self) -> str:
        return "\n".join([f"{self!r}", f"  why: {self.reason}", str(self.forecast)])

    def _scan(
        self,
        grad: ArrayLike | None,
        jacobians: Any,
        local_grads: Any,
        *,
        inclusive: bool,
        chain: Chain | None = None,
    ) -> Gradients:
        """A scan; of a chain that has been read already, if one is given."""
        # Ranks fail together, even if one of them has no device.
        with ExitStack() as stack:
            call = _Call(inclusive, _is_one_array(jacobians))
            with call.fault:
                stack.enter_context(place(None, self.device, None))
            if chain is not None:
                self._slot.chain = chain
            return self._scan_here(grad, jacobians, local_grads, call, read=chain is None)

    def _scan_here(
        self, grad: ArrayLike | None, jacobians: Any, local_grads: Any, call: _Call, *, read: bool
    ) -> Gradients:
        """The same, with the device that it is on as the current one."""
        fault = call.fault
        try:
            with fault:
                if read:
                    check_form(jacobians)
                    self._slot.chain.read(jacobians, self._patterns)
                call.local_grads = self._read_local(local_grads, call.inclusive)
                call.first = self._read_first(grad)
                self._check_places(call)
                if call.download:
                    self._upload(call)
            terms = self._open(call)
            finite = True
            if terms is not None and self._prepare(terms, fault):
                by_products = self.schedule == "products" and terms.samples and self._steps
                finite = (self._by_products if by_products else self._by_vectors)(terms, call)
                self._download(call)
            if self._world.agree(fault.error, int(not finite)):
                # What a value that is not finite reaches is defined by the linear scan.
                assert terms is not None
                self._by_vectors(terms, call)
                self._download(call)
                self._world.agree(fault.error)
            assert call.result is not None
            return call.result
        finally:
            self._slot.chain.release()

    def _read_local(self, local_grads: Any, inclusive: bool) -> list[NDArray[Any] | None] | None:
        """Local gradients of this rank, but for their shapes, which are not known yet."""
        if local_grads is None:
            return None
        _check_count(local_grads, self.n + (inclusive and self._is_last))
        return [
            None if array is None else check_array(f"local_grads[{k}]", array)
            for k, array in enumerate(local_grads)
        ]

    def _read_first(self, grad: Any) -> Any:
        """The gradient at the end of the chain, where this rank has it."""
        if self.position > 0:
            if grad is not None:
                raise InputError(
                    "grad is given; expected None on ranks that do not hold the first part"
                )
            return None
        if grad is None:
            raise InputError("grad is None; expected the gradient, since this is the first part")
        size = self._sizes[0] if self._steps else None
        return read_grad(grad, size, self._slot.chain.batch)

    def _check_places(self, call: _Call) -> None:
        """Raise if not all input is in one place, or not where the plan scans."""
        given = {"grad": call.first}
        given |= {f"local_grads[{k}]": array for k, array in enumerate(call.local_grads or ())}
        places = {name: device_of(array) for name, array in given.items() if array is not None}
        if self.n:
            places["jacobians"] = self._slot.chain.device
        for name, found in places.items():
            first, *_ = places
            if self.device == "cpu" and found is not None:
                raise DeviceError(
                    f"{name} is on a CUDA device; expected host memory (cupy.asnumpy), or a plan "
                    "with device='cuda'"
                )
            check_one_place(name, found, first, places[first])
            if found is not None:
                check_one_place(name, found, "the current device", load_cupy().cuda.Device().id)
        call.download = self.device == "cuda" and set(places.values()) <= {None}

    def _upload(self, call: _Call) -> None:
        """Bring input from host memory to the current device."""
        if self.n:
            self._slot.chain.upload()
        if call.first is not None:
            call.first = upload(call.first)
        if call.local_grads is not None:
            call.local_grads = [None if a is None else upload(a) for a in call.local_grads]

    def _download(self, call: _Call) -> None:
        """Bring gradients to host memory, if the input came from there."""
        if call.download and call.fault.error is None:
            with call.fault:
                found = call.result
                call.result = list(map(_host, found)) if isinstance(found, list) else _host(found)

    def _open(self, call: _Call) -> Terms | None:
        """What the ranks of a group agree on; None if one has failed, or they do not."""
        chain, first = self._slot.chain, call.first
        dtypes = {array.dtype for array in call.local_grads or () if array is not None}
        if self.n:
            dtypes.add(chain.dtype)
        batch = chain.batch
        if first is not None:
            dtypes.add(first.dtype)
            batch = first.shape[0] if first.ndim == 2 else -1
        itemsize = max((dtype.itemsize for dtype in dtypes), default=0)
        signature = self._signature + call.inclusive
        known = _UNKNOWN if batch is None else 0
        failed, itemsize, most, least, batched, local, high, low = self._comm.maximum(
            [
                call.fault.error is not None,
                itemsize,
                known or (batch or 0),
                known or -(batch or 0),
                chain.batch is not None,
                call.local_grads is not None,
                signature,
                -signature,
            ]
        )
        if failed:
            return None
        if self._steps == 0 and high == -low:
            self._pass_on(first)
        with call.fault:
            if high != -low:
                raise InputError("ranks call different scans, or scans of different plans")
            if most != -least:
                raise InputError(
                    f"ranks have different batches, from {_batch(-least)} to {_batch(most)}; "
                    "expected one for all of a chain"
                )
            return self._terms(itemsize, most, bool(batched), bool(local))
        return None

    def _pass_on(self, first: NDArray[Any] | None) -> None:
        """Of a chain without steps, only who has the gradient knows its length."""
        sizes = [0] * self.grid.rows
        if first is not None:
            sizes[self.row] = first.shape[-1]
        sizes = self._comm.maximum(sizes)
        # On all ranks, if the length of any has changed.
        if self._passed_on != sizes:
            self._passed_on = sizes
            self._sizes = [sizes[self.row]] * 2
            self._memory.clear()

    def _terms(self, itemsize: int, batch: int, batched: bool, local: bool) -> Terms:
        dtype = np.dtype(f"f{itemsize}")
        if self.dtype is not None and dtype != self.dtype:
            raise InputTypeError(
                f"the input is of dtype {dtype}; expected {self.dtype}, the plan's"
            )
        if self.batch is not None and batch != self.batch:
            raise InputError(f"ranks have {_batch(batch)}; expected {self.batch}, the plan's")
        return Terms(dtype, None if batch < 0 else batch, batched, local)

    def _prepare(self, terms: Terms, fault: Fault) -> bool:
        """Take the memory that these terms need; whether all ranks of the chain have it."""
        if terms in self._memory:
            return True
        while len(self._memory) >= _KEPT:
            del self._memory[next(iter(self._memory))]
        made = None
        with fault:
            made = _Memory(self, terms)
            if self._rows is not None:
                self._rows.prepare(self._slot.chain, terms)
            if self._reduction is not None and terms.samples:
                self._reduction.prepare(self._slot.chain, terms)
        if self._comm.maximum([fault.error is not None])[0]:
            return False
        assert made is not None
        self._memory[terms] = made
        return True

    def _by_vectors(self, terms: Terms, call: _Call) -> bool:
        """Every rank sweeps its part when the one before has done so."""
        memory, y = self._memory[terms], call.first
        good, rows = call.fault.error is None, self.grid.rows
        if self.position > 0:
            self._comm.receive(memory.entering, self._comm.rank - rows)
            with self._comm.ending("reading a message"):
                good = good and _host(memory.entering[:1])[0] == State.VECTOR
            y = vector_of(memory.entering, self._sizes[0], terms)
        with self._comm.ending("writing a message"):
            memory.leaving[0] = State.BAD
        leaving = None
        if self._rows is not None:
            leaving = self._sweep_rows(y if good else None, terms, call)
        elif good:
            with call.fault:
                leaving = self._sweep(y, terms, call)
        if leaving is not None and not self._is_last:
            with call.fault:
                leaving = leaving if self._sends_from_device else _host(leaving)
                vector_of(memory.leaving, self._sizes[1], terms)[...] = leaving
                memory.leaving[0] = State.VECTOR
        if not self._is_last:
            self._comm.send(memory.leaving, self._comm.rank + rows)
        return True

    def _by_products(self, terms: Terms, call: _Call) -> bool:
        """All ranks work at once; whether no value was met that is not finite."""
        memory, rank = self._memory[terms], self.position
        merger, given, found = memory.merger, memory.given, memory.found
        merger.error = None
        state: int = State.BAD
        if call.fault.error is None:
            with call.fault:
                state = self._element(given, merger, terms, call)
        given.describe(rank, rank + 1, state)
        algorithm = self.forecast.algorithm
        assert algorithm is not None
        messages = exscan_messages(algorithm, self._comm.size, rank)
        self._comm.exclusive_scan(given.words, found.words, merger, messages)
        call.fault.error = call.fault.error or merger.error
        if rank == 0:
            return state != State.BAD
        if found.state != State.VECTOR or found.range != (0, rank):
            return False
        if call.fault.error is None:
            with call.fault:
                y = found.vector(self._sizes[0]).reshape(*terms.shape, self._sizes[0])
                self._sweep(y, terms, call)
        return state != State.BAD

    def _element(self, given: Message, merger: Merger, terms: Terms, call: _Call) -> int:
        """Write what this rank contributes; its state."""
        if self.position == 0:
            leaving = self._sweep(call.first, terms, call)
            given.vector(self._sizes[1])[:] = _host(leaving)
            return State.VECTOR
        if self._is_last:
            return State.UNUSED
        if self._reduction is None or self._pattern is None:
            return State.NOTHING
        sizes = [self._sizes[0], *(pattern.shape[0] for pattern in self._patterns[:-1])]
        local = LocalGrads(call.local_grads, self.n, sizes, terms.shape)
        product = self._reduction.run(self._slot.chain, local, terms)
        if product is None:
            return State.BAD
        merger.write(given, product, self._pattern)
        return State.MAP

    def _sweep(self, y: Any, terms: Terms, call: _Call) -> Any:
        """Scan this rank's part from the gradient that enters it; what leaves it."""
        if self.device == "cuda" and not is_cupy(y):
            y = upload(y)
        y = y.astype(terms.dtype, copy=False)
        assert self._part is not None
        local, scan = call.local_grads, self._part.sweep._run
        if self._is_last or self.n == 0:
            call.result = scan(self._slot, y, local, call.inclusive and self._is_last)
            return y
        found = scan(self._slot, y, None if local is None else [*local, None], True)
        leaving = found[-1]
        call.result = found[:-1]
        if call.stacked and isinstance(call.result, list):
            # One rectangular Jacobian that came as an array.
            call.result = namespace(y).stack(call.result)
        return leaving

    def _sweep_rows(self, y: Any, terms: Terms, call: _Call) -> NDArray[Any] | None:
        """The same of steps whose rows are spread; without `y`, only take part; None if it fails.

        All ranks that share them call it, whatever has happened.
        """
        assert self._rows is not None
        count = self.n + (call.inclusive and self._is_last)
        steps = max(count - 1, 0) if self._is_last else self.n
        found = self._rows.sweep(
            y,
            self._slot.chain,
            call.local_grads,
            self._memory[terms].messages,
            terms,
            count,
            steps,
            call.fault,
            stacked=call.stacked,
        )
        if found is None:
            return None
        call.result, leaving = found
        return leaving


@dataclass
class _Call:
    """One scan."""

    inclusive: bool
    # Whether the Jacobians came as one array.
    stacked: bool
    fault: Fault = field(default_factory=Fault)
    # Of NumPy, or of CuPy.
    first: Any = None
    local_grads: list[Any] | None = None
    # Whether the input was brought to a device, from where the result goes back.
    download: bool = False
    result: Gradients | None = None


def _batch(batch: int) -> str:
    return "no batch axis" if batch < 0 else f"a batch of {batch}"


def check_form(jacobians: Any) -> None:
    """Raise if this rank's part is of a form that only a scan on one machine takes."""
    if is_stack(jacobians) and not _is_one_array(jacobians):
        raise InputTypeError(
            f"jacobians is a {type(jacobians).__name__}; expected a list, a CSRChain or an array"
        )


def _is_one_array(jacobians: Any) -> bool:
    """Whether Jacobians come as one array, and so do their gradients."""
    return isinstance(jacobians, (np.ndarray, CSRChain)) or is_on_device(jacobians)


def _host(array: Any) -> NDArray[Any]:
    """An array of NumPy or CuPy in host memory."""
    found: NDArray[Any] = array.get() if is_cupy(array) else array
    return found
