"""ParallelPlan: a scan over the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..arrays.arrays import check_one_place, device_of, is_cupy, load_cupy, namespace, upload
from ..arrays.streams import place
from ..chains.chain import Chain
from ..chains.containers import PeriodicChain
from ..chains.grads import LocalGrads, grad_or_zeros, read_grad
from ..chains.reading import is_stack
from ..chains.steps import PlannedSteps
from ..errors import DeviceError, InputError, InputTypeError
from ..execution.threads import thread_count
from ..plan.choice import InputKind
from ..plan.scan_plan import Gradients, ScanSlot
from ..symbolic.implicit import Step
from .communicator import Communicator, Fault
from .exchange import ALGORITHMS, exscan_messages, rounds
from .forecast import Forecast, boundaries
from .halo import Halo
from .maps import Merger, Message, Ranges, ScanTerms, State, vector_of, vector_words
from .part import FORMS, Part, PartCost, Reduction
from .rows import Messages, RowSweep, SweepRequest

# Terms for which a plan keeps memory, and kinds of input for which it keeps what was chosen.
_KEPT, _WAYS = 4, 64
# Terms before the ranks have agreed on any.
_NO_TERMS = ScanTerms(np.dtype(np.float64), None, False, False)
# In place of a number that a rank does not know.
_UNKNOWN = -(1 << 60)


class Options(NamedTuple):
    """Options of a plan, as a caller gives them, or checked."""

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


class Combination(NamedTuple):
    """A rank's part, and how the ranks combine their parts, for one kind of input.

    Attributes
    ----------
    part : Part or RowSweep
        The part of this rank.
    costs : sequence of PartCost
        The costs of each rank of a group.
    forecast : Forecast
        The way that was chosen.
    reason : str
        Why that one.
    kind : InputKind
        The input that it is for.
    maps : Ranges or None
        The products of parts, where these are combined.
    reduction : Reduction or None
        What makes that of this part, if any does.
    """

    part: Part | RowSweep
    costs: Sequence[PartCost]
    forecast: Forecast
    reason: str
    kind: InputKind
    maps: Ranges | None = None
    reduction: Reduction | None = None

    def prepared(self, position: int) -> Combination:
        """Return the way with all that combines products, for a rank that holds this part."""
        if self.forecast.schedule != "products" or not isinstance(self.part, Part):
            return self
        form = self.forecast.form or FORMS[0]
        maps = [cost.maps[form].pattern if cost.maps else None for cost in self.costs]
        reduction = None if maps[position] is None else self.part.reduction(form)
        return self._replace(maps=Ranges(maps), reduction=reduction)


class _Elements:
    """Memory for an exclusive scan over the products of parts, on some terms."""

    def __init__(self, maps: Ranges, forecast: Forecast, position: int, terms: ScanTerms) -> None:
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


class ParallelPlan:
    """A scan over the ranks of a communicator, with the symbolic phase done.

    :func:`sparsescan.parallel.plan` makes it. All ranks call its scans together.

    Attributes
    ----------
    n : int
        Jacobians of this rank.
    grid : Grid
        How ranks share chain and batch.
    position, group, row : int
        Which part of the chain this rank holds, for which samples, and which share of its rows.
    schedule : {"vectors", "products"}
        How parts are combined, for the batch size and the dtype of the latest scan. All ranks
        choose it together, at the first scan of each kind.
    reason : str
        Why they are combined so.
    forecast : Forecast
        The predicted time and memory of such a scan, if all Jacobians differ between samples.
    batch : int or None
        The only number of samples of each rank that the plan accepts, if there is one.
    dtype : dtype or None
        The only dtype that the plan accepts, if there is one.
    device : {"cpu", "cuda"}
        Where each rank scans its part.
    reverse : bool
        Whether arrays of this rank are in the order of time.
    """

    def __init__(
        self,
        ranks: Ranks,
        patterns: Sequence[Step],
        way: Combination,
        options: Options,
        settle: Callable[[InputKind], Combination],
    ) -> None:
        rank = ranks.world.rank
        self._world, self._comm, self._direct, self._signature = ranks
        self._unfolded = PlannedSteps(patterns)
        self._settle = settle
        self.n = len(patterns)
        self.grid = way.forecast.grid
        self.position, self.group = self.grid.position(rank), self.grid.group(rank)
        self.row = self.grid.row(rank)
        self.batch = options.batch
        self.dtype = None if options.dtype is None else np.dtype(options.dtype)
        self.device = options.device or "cpu"
        self.reverse = options.reverse
        costs = way.costs[self.row :: self.grid.rows]
        self._steps = sum(cost.steps for cost in costs)
        self._rows = [pattern.shape[0] for pattern in patterns]
        # Lengths of the gradients that enter and leave this part, or what this rank owns of them.
        self._sizes = boundaries(costs)[self.position : self.position + 2]
        chain = Chain(len(self._unfolded.factors), self.reverse, self._unfolded.starts)
        self._slot = ScanSlot(chain)
        self._memory: dict[ScanTerms, _Memory] = {}
        # For a chain without steps: lengths of the gradient's shares in the last scan.
        self._passed_on: list[int] = []
        self._is_last = self.position == self.grid.chain - 1
        # How parts are combined, for each kind of input.
        self._ways = {way.kind: way}
        self._way = way

    @property
    def schedule(self) -> str:
        """How parts are combined: in the latest scan, or in the first."""
        return self._way.forecast.schedule

    @property
    def reason(self) -> str:
        """Why they are combined so."""
        return self._way.reason

    @property
    def forecast(self) -> Forecast:
        """The cost predicted for a scan of so many samples, if all Jacobians differ."""
        return self._way.forecast

    def exclusive_scan(
        self, grad: ArrayLike | None, jacobians: Any, *, local_grads: Any = None
    ) -> Gradients:
        """Return the gradients of all but the first layer's input.

        This is :func:`parallel.exclusive_scan` with the symbolic phase done.

        Parameters
        ----------
        grad : array_like, shape (d_n,) or (batch, d_n), or None
            Gradient at the end of the chain, on the ranks of position 0; None on all others. None
            at position 0 means zeros; these ranks must then pass `local_grads`. If ranks share
            rows, this rank's entries of it: ``(own,)`` or ``(batch, own)``.
        jacobians : sequence, CSRChain, ImplicitChain or ndarray
            Jacobians of this rank, or its rows of them, with the plan's patterns; or only their
            values, as for :meth:`sparsescan.ScanPlan.exclusive_scan`.
        local_grads : sequence or ndarray, optional
            Arrays that are added to this rank's gradients, in the same shapes.

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
        """Return the gradients down to the first layer's input; the last rank gets one more.

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
        kind = self._way.kind
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
        call = _ScanCall(inclusive, is_stack(jacobians))
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
                with call.fault:
                    call.local.check([self._sizes[0], *self._rows], call.terms.shape)
                elements = self._memory[call.terms].elements
                if elements is not None and call.terms.samples and self._steps:
                    finite = self._by_products(elements, call)
                else:
                    self._by_vectors(call)
            if self._world.agree(call.fault.error, int(not finite)):
                # Only the linear scan defines what a value reaches that is not finite.
                self._by_vectors(call)
                self._world.agree(call.fault.error)
        return call.result[::-1] if self.reverse else call.result

    def _read(self, call: _ScanCall, grad: Any, local_grads: Any) -> None:
        """Read what is not Jacobians, and bring the input to a device if it has to go there."""
        chain = self._slot.chain
        places: dict[str, int | None] = {}
        if self.position == 0:
            size = self._sizes[0] if self._steps else None
            first = grad_or_zeros(grad, local_grads, size, chain.batch)
            call.first = read_grad(first, size, chain.batch)
            places["grad"] = device_of(call.first)
        elif grad is not None:
            raise InputError(
                "grad is given; expected None on ranks that do not hold the first part"
            )
        # Their shapes are checked when all ranks know how many samples there are.
        count = self.n + (call.inclusive and self._is_last)
        call.local = LocalGrads(local_grads, count, (), None, reverse=self.reverse)
        if call.local.given:
            places["local_grads"] = call.local.device
        if self.n:
            places["jacobians"] = chain.device
        for name, device in places.items():
            first_name, *_ = places
            if self.device == "cpu" and device is not None:
                raise DeviceError(
                    f"{name} is on a CUDA device; expected host memory (cupy.asnumpy), or a plan "
                    "with device='cuda'"
                )
            check_one_place(name, device, first_name, places[first_name])
            if device is not None:
                check_one_place(name, device, "the current device", load_cupy().cuda.Device().id)
        call.download = self.device == "cuda" and set(places.values()) <= {None}
        if call.download:
            if self.n:
                chain.upload()
            if call.first is not None:
                call.first = upload(call.first)
            call.local.upload()

    def _open(self, call: _ScanCall) -> bool:
        """Agree on terms with the ranks of the group; return False if any has failed."""
        chain, first, fault = self._slot.chain, call.first, call.fault
        dtypes = set(call.local.dtypes)
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
                call.local.given,
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

    def _choose_way(self, terms: ScanTerms) -> None:
        """Choose how parts are combined for such input, together with the ranks of the group."""
        kind = InputKind(max(terms.samples, 1), terms.dtype)
        if kind not in self._ways:
            way = self._settle(kind)
            while len(self._ways) >= _WAYS:
                del self._ways[next(iter(self._ways))]
            self._ways[kind] = way
        self._way = self._ways[kind]

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

    def _terms(self, itemsize: int, batch: int, batched: bool, local: bool) -> ScanTerms:
        dtype = np.dtype(f"f{itemsize}")
        if self.dtype is not None and dtype != self.dtype:
            raise InputTypeError(
                f"the input is of dtype {dtype}; expected {self.dtype}, the plan's"
            )
        if self.batch is not None and batch != self.batch:
            raise InputError(f"ranks have {_batch(batch)}; expected {self.batch}, the plan's")
        return ScanTerms(dtype, None if batch < 0 else batch, batched, local)

    def _prepare(self, call: _ScanCall) -> bool:
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

    def _take_memory(self, terms: ScanTerms) -> _Memory:
        xp = load_cupy() if self._direct else np
        entering, leaving = (xp.zeros(vector_words(n, terms), np.int64) for n in self._sizes)
        chain, elements = self._slot.chain, None
        halos: Sequence[Halo] = ()
        part, maps, reduction = self._way.part, self._way.maps, self._way.reduction
        if isinstance(part, RowSweep):
            halos = part.halos
            part.prepare(chain, terms)
        if maps is not None:
            elements = _Elements(maps, self._way.forecast, self.position, terms)
            if reduction is not None and terms.samples:
                reduction.prepare(chain, terms)
        return _Memory(entering, leaving, Messages(halos, terms), elements)

    def _by_vectors(self, call: _ScanCall) -> None:
        """Sweep this rank's part when the rank before has done so."""
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

    def _by_products(self, elements: _Elements, call: _ScanCall) -> bool:
        """Scan all parts at once; return whether no value was met that is not finite."""
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

    def _element(self, own: Message, merger: Merger, call: _ScanCall) -> int:
        """Write the element that this rank contributes; return its state."""
        reduction = self._way.reduction
        if self.position == 0:
            own.vector(self._sizes[1])[:] = _host(self._sweep(call.first, call))
            return State.VECTOR
        if self._is_last:
            return State.UNUSED
        if reduction is None:
            return State.NOTHING
        local = copy(call.local)
        if self._unfolded.starts is not None:
            local.spread(self._unfolded.starts[:-1])
        product = reduction.run(self._slot.chain, local, call.terms)
        if product is None:
            return State.BAD
        merger.write(own, product, reduction.pattern)
        return State.MAP

    def _sweep(self, y: Any, call: _ScanCall) -> Any:
        """Scan this rank's part from the gradient that enters it; return the one that leaves it."""
        part: Any = self._way.part
        if self.device == "cuda" and not is_cupy(y):
            y = upload(y)
        y = y.astype(call.terms.dtype, copy=False)
        goes_on = not self._is_last and self.n > 0
        inclusive = goes_on or (call.inclusive and self._is_last)
        local = None
        if call.local.given:
            count = self.n + (inclusive and not goes_on)
            local = [*map(call.local.array, range(count)), *[None] * goes_on]
        result = part.sweep.run(self._slot, y, local, inclusive=inclusive)
        if goes_on:
            result, y = result[:-1], result[-1]
            if call.stacked and isinstance(result, list):
                # One rectangular Jacobian that came as an array.
                result = namespace(y).stack(result)
        if call.download:
            result = list(map(_host, result)) if isinstance(result, list) else _host(result)
        call.result = result
        return y

    def _sweep_rows(
        self, part: RowSweep, y: Any, messages: Messages, call: _ScanCall
    ) -> NDArray[Any] | None:
        """Sweep steps whose rows are spread, as :meth:`RowSweep.sweep` does."""
        count = self.n + (call.inclusive and self._is_last)
        steps = max(count - 1, 0) if self._is_last else self.n
        chain, local, terms = self._slot.chain, call.local, call.terms
        request = SweepRequest(chain, local, messages, terms, count, steps, call.stacked)
        swept = part.sweep(y, request, call.fault)
        if swept is None:
            return None
        call.result, leaving = swept
        return leaving


@dataclass
class _ScanCall:
    """State of one scan."""

    inclusive: bool
    # Whether the Jacobians came as one array.
    stacked: bool
    fault: Fault = field(default_factory=Fault)
    # The gradient at the end of the chain, of NumPy or of CuPy.
    first: Any = None
    local: LocalGrads = field(default_factory=lambda: LocalGrads(None, 0, (), None))
    # Whether the input was brought to a device, from where the result goes back.
    download: bool = False
    terms: ScanTerms = field(default=_NO_TERMS)
    result: Gradients = field(default_factory=list)


def _batch(batch: int) -> str:
    return "no batch axis" if batch < 0 else f"a batch of {batch}"


def check_form(jacobians: Any) -> None:
    """Raise if this rank's part is of a form that only a scan on one machine takes."""
    if isinstance(jacobians, PeriodicChain):
        raise InputTypeError(
            f"jacobians is a {type(jacobians).__name__}; expected a list, a CSRChain, an "
            "ImplicitChain or an array"
        )


def _host(array: Any) -> NDArray[Any]:
    """Return an array of NumPy or CuPy in host memory."""
    host: NDArray[Any] = array.get() if is_cupy(array) else array
    return host
