"""ParallelPlan: a scan over the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..arrays.arrays import (
    check_one_place,
    device_of,
    is_cupy,
    is_on_device,
    load_cupy,
    namespace,
    read_array,
    upload,
)
from ..arrays.streams import place
from ..chains.chain import Chain, LocalGrads, grad_or_zeros, is_stack, read_grad, read_local_grads
from ..chains.containers import CSRChain
from ..chains.implicit import ImplicitChain
from ..chains.steps import Steps
from ..errors import DeviceError, InputError, InputTypeError
from ..execution.threads import thread_count
from ..plan.choice import Kind
from ..plan.scan_plan import Gradients, ScanSlot
from ..symbolic.implicit import Step
from .communicator import Communicator, Fault
from .exchange import ALGORITHMS, exscan_messages, rounds
from .forecast import Forecast, boundaries
from .halo import Halo
from .maps import Merger, Message, Ranges, State, Terms, vector_of, vector_words
from .part import FORMS, Part, PartCost
from .reduction import Reduction
from .rows import Messages, RowSweep, Sweep

__all__ = ["Decision", "Options", "ParallelPlan", "Ranks", "check_form"]

# Terms for which a plan keeps memory, and kinds of input for which it keeps what was chosen.
_KEPT, _WAYS = 4, 64
# Terms before the ranks have agreed on any.
_NO_TERMS = Terms(np.dtype(np.float64), None, False, False)
# In place of a number that a rank does not know.
_UNKNOWN = -(1 << 60)


class Options(NamedTuple):
    """Options of a plan."""

    grid: Any
    schedule: str
    batch: int | None = None
    dtype: DTypeLike | None = None
    device: str | None = None
    reverse: bool = False


class Ranks(NamedTuple):
    """The ranks of a plan.

    Attributes
    ----------
    world : Communicator
        All ranks.
    group : Communicator
        The ranks that work on the same samples.
    direct : bool
        Whether MPI sends gradients from device to device.
    signature : int
        A number that tells plans apart, the same on all ranks.
    """

    world: Communicator
    group: Communicator
    direct: bool
    signature: int


class Decision(NamedTuple):
    """How the ranks combine their parts.

    Attributes
    ----------
    costs : sequence of PartCost
        The costs of each rank of a group.
    forecast : Forecast
        The way that was chosen.
    reason : str
        Why that one.
    kind : Kind
        The input that it is for.
    """

    costs: Sequence[PartCost]
    forecast: Forecast
    reason: str
    kind: Kind


class _Elements:
    """Memory for an exclusive scan over the products of parts, on some terms."""

    def __init__(self, maps: Ranges, forecast: Forecast, position: int, terms: Terms) -> None:
        capacity, count = forecast.capacity, forecast.grid.chain
        self.algorithm = forecast.algorithm or ALGORITHMS[0]
        words = capacity.words(terms)
        self.own, self.prefix = (
            Message(np.zeros(words, np.int64), capacity, terms) for _ in range(2)
        )
        self.merger = Merger(maps, capacity, terms, thread_count())
        for merges in rounds(self.algorithm, count) if terms.samples else ():
            for merge in merges[position]:
                if merge.stop < count:
                    self.merger.prepare(*merge)


class _Memory(NamedTuple):
    """Memory in which a plan exchanges data, on some terms."""

    entering: Any
    leaving: Any
    messages: Messages
    elements: _Elements | None


class _Way(NamedTuple):
    """A rank's part, and how it is combined with the others, for one kind of input."""

    part: Part | RowSweep
    decision: Decision
    # Where products of parts are combined: these, and what makes that of this part, if any does.
    maps: Ranges | None = None
    reduction: Reduction | None = None


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
        How parts are combined: for the batch size and the dtype of the latest scan, which all ranks
        choose together at the first scan of each.
    reason : str
        Why so.
    forecast : Forecast
        The time and memory that such a scan is predicted to take, if all Jacobians differ between
        samples.
    batch : int or None
        Samples of each rank that the plan insists on, if any.
    dtype : dtype or None
        The dtype that the plan insists on, if any.
    device : {"cpu", "cuda"}
        Where each rank scans its part.
    reverse : bool
        Whether arrays of this rank are in the order of time.
    """

    def __init__(
        self,
        ranks: Ranks,
        patterns: Sequence[Step],
        part: Part | RowSweep,
        decision: Decision,
        options: Options,
        settle: Callable[[Kind], tuple[Part | RowSweep, Decision]],
    ) -> None:
        rank = ranks.world.rank
        self._world, self._comm, self._direct, self._signature = ranks
        self._patterns = patterns
        self._unfolded = Steps(patterns)
        self._settle = settle
        self.n = len(patterns)
        self.grid = decision.forecast.grid
        self.position, self.group = self.grid.position(rank), self.grid.group(rank)
        self.row = self.grid.row(rank)
        self.batch = options.batch
        self.dtype = None if options.dtype is None else np.dtype(options.dtype)
        self.device = options.device or "cpu"
        self.reverse = options.reverse
        costs = decision.costs[self.row :: self.grid.rows]
        self._steps = sum(cost.steps for cost in costs)
        # Lengths of the gradients that enter and leave this part, or what this rank owns of them.
        self._sizes = boundaries(costs)[self.position : self.position + 2]
        chain = Chain(len(self._unfolded.factors), self.reverse, self._unfolded.starts)
        self._slot = ScanSlot(chain)
        self._memory: dict[Terms, _Memory] = {}
        # For a chain without steps: lengths of the gradient's shares in the last scan.
        self._passed_on: list[int] = []
        self._is_last = self.position == self.grid.chain - 1
        # How parts are combined, for each kind of input.
        self._ways: dict[Kind, _Way] = {}
        self._way = self._add_way(part, decision)

    @property
    def schedule(self) -> str:
        """How parts are combined: in the latest scan, or in the first."""
        return self._way.decision.forecast.schedule

    @property
    def reason(self) -> str:
        """Why so."""
        return self._way.decision.reason

    @property
    def forecast(self) -> Forecast:
        """The cost predicted for a scan of so many samples, if all Jacobians differ."""
        return self._way.decision.forecast

    def exclusive_scan(
        self, grad: ArrayLike | None, jacobians: Any, *, local_grads: Any = None
    ) -> Gradients:
        """Return the gradients of all but the first layer's input.

        This is :func:`parallel.exclusive_scan` with the symbolic phase done.

        Parameters
        ----------
        grad : array_like, shape (d_n,) or (batch, d_n), or None
            Gradient at the end of the chain, on the ranks of position 0; None on others, and
            where it is zeros and the loss enters by `local_grads`, which must then be given there.
            Where ranks share rows, this rank's entries of it: ``(own,)`` or ``(batch, own)``.
        jacobians : sequence, CSRChain, ImplicitChain or ndarray
            Jacobians of this rank, or its rows of them, of the plan's patterns; or only their
            values, as for :meth:`sparsescan.ScanPlan.exclusive_scan`.
        local_grads : sequence or ndarray, optional
            Arrays that are added to the gradients that this rank gets, of the same shapes.

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
        """Return the gradients down to the first layer's input: one more, on the last rank.

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
        kind = self._way.decision.kind
        samples = f"{kind.batch:,} sample{'s' * (kind.batch > 1)} of {kind.dtype} on each rank"
        why = f"  why, for {samples}: {self.reason}"
        return "\n".join([f"{self!r}", why, str(self.forecast)])

    def _scan(
        self,
        grad: ArrayLike | None,
        jacobians: Any,
        local_grads: Any,
        *,
        inclusive: bool,
        chain: Chain | None = None,
    ) -> Gradients:
        """Scan Jacobians, or the chain that has read them already."""
        call = _Call(inclusive, _is_one_array(jacobians))
        if chain is not None:
            self._slot.chain = chain
        with ExitStack() as stack:
            stack.callback(self._slot.chain.release)
            # Ranks fail together, even if one of them has no device.
            with call.fault:
                stack.enter_context(place("grad", None, self.device, None))
                if chain is None:
                    check_form(jacobians)
                    unfolded = self._unfolded
                    flat = unfolded.unfold(jacobians, self.reverse)
                    self._slot.chain.read(flat, unfolded.factors)
                self._read(call, grad, local_grads)
            finite = True
            if self._open(call) and self._prepare(call):
                elements = self._memory[call.terms].elements
                if elements is not None and call.terms.samples and self._steps:
                    finite = self._by_products(elements, call)
                else:
                    self._by_vectors(call)
                self._download(call)
            if self._world.agree(call.fault.error, int(not finite)):
                # Only the linear scan defines what a value reaches that is not finite.
                self._by_vectors(call)
                self._download(call)
                self._world.agree(call.fault.error)
        return call.result[::-1] if self.reverse else call.result

    def _read(self, call: _Call, grad: Any, local_grads: Any) -> None:
        """Read what is not Jacobians, and bring the input to a device if it has to go there."""
        call.local_grads = self._read_local(local_grads, call.inclusive)
        call.first = self._read_first(grad, call.local_grads)
        self._check_places(call)
        if call.download:
            if self.n:
                self._slot.chain.upload()
            if call.first is not None:
                call.first = upload(call.first)
            if call.local_grads is not None:
                call.local_grads = [None if a is None else upload(a) for a in call.local_grads]

    def _read_local(self, local_grads: Any, inclusive: bool) -> list[NDArray[Any] | None] | None:
        """Read local gradients of this rank; their shapes are checked when terms are known."""
        if local_grads is None:
            return None
        given = read_local_grads(local_grads, self.n + (inclusive and self._is_last))
        arrays = [
            None if array is None else read_array(f"local_grads[{k}]", array)
            for k, array in enumerate(given)
        ]
        return arrays[::-1] if self.reverse else arrays

    def _read_first(self, grad: Any, local_grads: Any) -> Any:
        """Read the gradient at the end of the chain, where this rank has it."""
        if self.position > 0:
            if grad is not None:
                raise InputError(
                    "grad is given; expected None on ranks that do not hold the first part"
                )
            return None
        batch, size = self._slot.chain.batch, self._sizes[0] if self._steps else None
        return read_grad(grad_or_zeros(grad, local_grads, size, batch), size, batch)

    def _check_places(self, call: _Call) -> None:
        """Raise if not all input is in one place, or not where the plan scans."""
        given = {"grad": call.first}
        given |= {f"local_grads[{k}]": array for k, array in enumerate(call.local_grads or ())}
        places = {name: device_of(array) for name, array in given.items() if array is not None}
        if self.n:
            places["jacobians"] = self._slot.chain.device
        for name, device in places.items():
            first, *_ = places
            if self.device == "cpu" and device is not None:
                raise DeviceError(
                    f"{name} is on a CUDA device; expected host memory (cupy.asnumpy), or a plan "
                    "with device='cuda'"
                )
            check_one_place(name, device, first, places[first])
            if device is not None:
                check_one_place(name, device, "the current device", load_cupy().cuda.Device().id)
        call.download = self.device == "cuda" and set(places.values()) <= {None}

    def _download(self, call: _Call) -> None:
        """Bring gradients to host memory, if the input came from there."""
        if call.download and call.fault.error is None:
            with call.fault:
                result = call.result
                call.result = (
                    list(map(_host, result)) if isinstance(result, list) else _host(result)
                )

    def _open(self, call: _Call) -> bool:
        """Agree on terms with the ranks of the group; return False if any has failed."""
        chain, first, fault = self._slot.chain, call.first, call.fault
        dtypes = {array.dtype for array in call.local_grads or () if array is not None}
        if self.n:
            dtypes.add(chain.dtype)
        batch = chain.batch
        if first is not None:
            dtypes.add(first.dtype)
            batch = first.shape[0] if first.ndim == 2 else -1
        signature = self._signature + call.inclusive
        failed, itemsize, most, least, batched, local, high, low = self._comm.maximum(
            [
                fault.error is not None,
                max((dtype.itemsize for dtype in dtypes), default=0),
                _UNKNOWN if batch is None else batch,
                _UNKNOWN if batch is None else -batch,
                chain.batch is not None,
                call.local_grads is not None,
                signature,
                -signature,
            ]
        )
        if failed:
            return False
        if self._steps == 0 and high == -low:
            self._pass_on(first)
        with fault:
            if high != -low:
                raise InputError("ranks call different scans, or scans of different plans")
            if most != -least:
                raise InputError(
                    f"ranks have different batches, from {_batch(-least)} to {_batch(most)}; "
                    "expected one for all of a chain"
                )
            call.terms = self._terms(itemsize, most, bool(batched), bool(local))
        if fault.error is None and self._steps and self.grid.rows == 1:
            # All ranks of the group have these terms, and come here together.
            with fault:
                self._choose_way(call.terms)
        return fault.error is None

    def _choose_way(self, terms: Terms) -> None:
        """Choose how parts are combined for such input, together with the ranks of the group."""
        kind = Kind(max(terms.samples, 1), terms.dtype)
        if kind not in self._ways:
            part, decision = self._settle(kind)
            self._comm.together(lambda: self._add_way(part, decision))
        self._way = self._ways[kind]

    def _add_way(self, part: Part | RowSweep, decision: Decision) -> _Way:
        way = _Way(part, decision)
        if decision.forecast.schedule == "products" and isinstance(part, Part):
            form = decision.forecast.form or FORMS[0]
            maps = [cost.maps[form].pattern if cost.maps else None for cost in decision.costs]
            reduction = None if maps[self.position] is None else part.reduction(form)
            way = _Way(part, decision, Ranges(maps), reduction)
        while len(self._ways) >= _WAYS:
            del self._ways[next(iter(self._ways))]
        self._ways[decision.kind] = way
        return way

    def _pass_on(self, first: NDArray[Any] | None) -> None:
        """Take the gradient's length from the ranks that have it, for a chain without steps."""
        sizes = [0] * self.grid.rows
        if first is not None:
            sizes[self.row] = first.shape[-1]
        sizes = self._comm.maximum(sizes)
        # All ranks take new memory if the length on any has changed.
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

    def _prepare(self, call: _Call) -> bool:
        """Take the memory that a scan needs; return whether all ranks of the group have it."""
        terms = call.terms
        if terms in self._memory:
            return True
        while len(self._memory) >= _KEPT:
            del self._memory[next(iter(self._memory))]
        with call.fault:
            self._memory[terms] = self._take_memory(terms)
        if self._comm.maximum([call.fault.error is not None])[0]:
            self._memory.pop(terms, None)
            return False
        return True

    def _take_memory(self, terms: Terms) -> _Memory:
        xp = load_cupy() if self._direct else np
        entering, leaving = (xp.zeros(vector_words(n, terms), np.int64) for n in self._sizes)
        chain, elements = self._slot.chain, None
        halos: Sequence[Halo] = ()
        part, decision, maps, reduction = self._way
        if isinstance(part, RowSweep):
            halos = part.halos
            part.prepare(chain, terms)
        if maps is not None:
            elements = _Elements(maps, decision.forecast, self.position, terms)
            if reduction is not None and terms.samples:
                reduction.prepare(chain, terms)
        return _Memory(entering, leaving, Messages(halos, terms), elements)

    def _check_turned(self, call: _Call) -> None:
        """Check local gradients that came in the order of time, to count them as the caller does.

        Whoever uses them checks them as well, from the last to the first.
        """
        if self.reverse and call.local_grads is not None:
            with call.fault:
                given = call.local_grads[::-1]
                sizes = [self._sizes[0], *(pattern.shape[0] for pattern in self._patterns)]
                LocalGrads(given, len(given), sizes, call.terms.shape, reverse=True)

    def _by_vectors(self, call: _Call) -> None:
        """Sweep this rank's part when the rank before has done so."""
        self._check_turned(call)
        memory, terms, rows, y = self._memory[call.terms], call.terms, self.grid.rows, call.first
        good = call.fault.error is None
        if self.position > 0:
            self._comm.receive(memory.entering, self._comm.rank - rows)
            with self._comm.ending("reading a message"):
                good = good and _host(memory.entering[:1])[0] == State.VECTOR
            y = vector_of(memory.entering, self._sizes[0], terms)
        with self._comm.ending("writing a message"):
            memory.leaving[0] = State.BAD
        leaving = None
        part = self._way.part
        if isinstance(part, RowSweep):
            leaving = self._sweep_rows(part, y if good else None, memory.messages, call)
        elif good:
            with call.fault:
                leaving = self._sweep(y, call)
        if self._is_last:
            return
        if leaving is not None:
            with call.fault:
                leaving = leaving if self._direct else _host(leaving)
                vector_of(memory.leaving, self._sizes[1], terms)[...] = leaving
                memory.leaving[0] = State.VECTOR
        self._comm.send(memory.leaving, self._comm.rank + rows)

    def _by_products(self, elements: _Elements, call: _Call) -> bool:
        """Scan all parts at once; return whether no value was met that is not finite."""
        self._check_turned(call)
        rank, fault = self.position, call.fault
        own, prefix, merger = elements.own, elements.prefix, elements.merger
        merger.error = None
        state: int = State.BAD
        if fault.error is None:
            with fault:
                state = self._element(own, merger, call)
        own.describe(rank, rank + 1, state)
        messages = exscan_messages(elements.algorithm, self._comm.size, rank)
        self._comm.exclusive_scan(own.words, prefix.words, merger, messages)
        fault.error = fault.error or merger.error
        if rank == 0:
            return state != State.BAD
        if prefix.state != State.VECTOR or prefix.range != (0, rank):
            return False
        if fault.error is None:
            with fault:
                y = prefix.vector(self._sizes[0]).reshape(*call.terms.shape, self._sizes[0])
                self._sweep(y, call)
        return state != State.BAD

    def _element(self, own: Message, merger: Merger, call: _Call) -> int:
        """Write the element that this rank contributes; return its state."""
        reduction = self._way.reduction
        if self.position == 0:
            own.vector(self._sizes[1])[:] = _host(self._sweep(call.first, call))
            return State.VECTOR
        if self._is_last:
            return State.UNUSED
        if reduction is None:
            return State.NOTHING
        sizes = [self._sizes[0], *(pattern.shape[0] for pattern in self._patterns[:-1])]
        local = LocalGrads(call.local_grads, self.n, sizes, call.terms.shape)
        if self._unfolded.starts is not None:
            local.spread(self._unfolded.starts[:-1])
        product = reduction.run(self._slot.chain, local, call.terms)
        if product is None:
            return State.BAD
        merger.write(own, product, reduction.pattern)
        return State.MAP

    def _sweep(self, y: Any, call: _Call) -> Any:
        """Scan this rank's part from the gradient that enters it; return the one that leaves it."""
        part: Any = self._way.part
        if self.device == "cuda" and not is_cupy(y):
            y = upload(y)
        y = y.astype(call.terms.dtype, copy=False)
        local = call.local_grads
        if self._is_last or self.n == 0:
            inclusive = call.inclusive and self._is_last
            call.result = part.sweep.run(self._slot, y, local, inclusive=inclusive)
            return y
        local = None if local is None else [*local, None]
        gradients = part.sweep.run(self._slot, y, local, inclusive=True)
        call.result, leaving = gradients[:-1], gradients[-1]
        if call.stacked and isinstance(call.result, list):
            # One rectangular Jacobian that came as an array.
            call.result = namespace(y).stack(call.result)
        return leaving

    def _sweep_rows(
        self, part: RowSweep, y: Any, messages: Messages, call: _Call
    ) -> NDArray[Any] | None:
        """Sweep steps whose rows are spread, as :meth:`RowSweep.sweep` does."""
        count = self.n + (call.inclusive and self._is_last)
        steps = max(count - 1, 0) if self._is_last else self.n
        chain, local, terms = self._slot.chain, call.local_grads, call.terms
        request = Sweep(chain, local, messages, terms, count, steps, call.stacked)
        swept = part.sweep(y, request, call.fault)
        if swept is None:
            return None
        call.result, leaving = swept
        return leaving


@dataclass
class _Call:
    """State of one scan."""

    inclusive: bool
    # Whether the Jacobians came as one array.
    stacked: bool
    fault: Fault = field(default_factory=Fault)
    # The gradient at the end of the chain, of NumPy or of CuPy.
    first: Any = None
    local_grads: list[Any] | None = None
    # Whether the input was brought to a device, from where the result goes back.
    download: bool = False
    terms: Terms = field(default=_NO_TERMS)
    result: Gradients = field(default_factory=list)


def _batch(batch: int) -> str:
    return "no batch axis" if batch < 0 else f"a batch of {batch}"


def check_form(jacobians: Any) -> None:
    """Raise if this rank's part is of a form that only a scan on one machine takes."""
    if is_stack(jacobians) and not _is_one_array(jacobians):
        raise InputTypeError(
            f"jacobians is a {type(jacobians).__name__}; expected a list, a CSRChain, an "
            "ImplicitChain or an array"
        )


def _is_one_array(jacobians: Any) -> bool:
    """Whether Jacobians come as one array, and so do their gradients."""
    one = np.ndarray, CSRChain, ImplicitChain
    return isinstance(jacobians, one) or is_on_device(jacobians)


def _host(array: Any) -> NDArray[Any]:
    """Return an array of NumPy or CuPy in host memory."""
    host: NDArray[Any] = array.get() if is_cupy(array) else array
    return host
