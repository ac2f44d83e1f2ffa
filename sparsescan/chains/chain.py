"""Chain: what the caller passed, checked once and split into patterns and values."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ..arrays import arrays as _arrays
from ..arrays.arrays import (
    beside,
    check_array,
    check_memory,
    check_no_mask,
    check_one_place,
    contiguous,
    device_of,
    is_cupy,
    is_on_device,
    namespace,
    on_device,
    read_array,
)
from ..errors import InputError, InputTypeError, PatternMismatchError
from ..kernels.addresses import address_of, note_if_equal, note_values
from ..symbolic.implicit import ImplicitPattern, Step
from ..symbolic.indexed import IndexedPattern
from ..symbolic.pattern import Pattern, check_shape
from .containers import (
    BatchedCSR,
    CSRChain,
    PeriodicChain,
    canonical_order,
)
from .implicit import Factor, ImplicitChain, ImplicitStep, Weights
from .weights import gathered, spread

__all__ = [
    "Chain",
    "LocalGrads",
    "check_chain",
    "check_grad",
    "check_places",
    "grad_or_zeros",
    "is_stack",
    "length",
    "name_of",
    "pattern_of",
    "patterns_in",
    "placed",
    "read_grad",
    "read_local_grads",
    "split",
    "steps_of",
]

AnyStep = TypeVar("AnyStep", bound=Step)

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_CSR_TYPES = (sp.csr_array, sp.csr_matrix)
_CHAINS = (CSRChain, PeriodicChain, ImplicitChain)
_ONE_STEP = (BatchedCSR, Factor)
_END = object()
# Bytes of all tables and objects of a scan for a step, at least.
_STEP_BYTES = 384
_ORDER = "order them from the last layer to the first, each transposed"
_ORDER_OF_TIME = "order them from the first layer to the last (reverse=True), each transposed"


class Chain:
    """The Jacobians of a scan: a pattern for each, and where its values are.

    A chain can be read into again, so that running a plan allocates nothing that grows with it. All
    values lie in host memory, or on one CUDA device.

    Parameters
    ----------
    n : int
        Number of Jacobians.
    reverse : bool
        Whether they come in the order of time.
    starts : ndarray of int64, optional
        Where the factors of each step start, if they are Jacobians of this chain, which are then
        from the last to the first: for errors, which name the step.

    Attributes
    ----------
    leaves : ndarray of int64, shape (n, 2)
        Address of the values of every Jacobian, and the bytes from one sample to the next (0 if the
        samples share them). Valid until :meth:`release`. The addresses of a chain that came as one
        array on a device are not filled in.
    stacks : list of tuple of int
        For each array that they came in, if there is one of all or a few that take turns: address
        of the values of the first Jacobian, bytes to the next one and to the next sample. Valid as
        long.
    device : int or None
        The CUDA device that has the values; None for host memory.
    batch : int or None
        Number of samples, if any Jacobian has a batch axis.
    dtype : dtype
        The dtype to which the Jacobians promote; float32 for an empty chain.
    values : list of ndarray
        Values of every Jacobian in the order of its pattern, ``(nnz,)`` or ``(batch, nnz)``; None
        for those that came in stacks.
    period : int
        In how many arrays they came, that take turns: 1 for one array of all; 0 for a sequence.
    merged : dict of int to IndexedPattern
        Jacobians of whose rows :meth:`convert` has written those that differ.
    """

    def __init__(
        self, n: int, reverse: bool = False, starts: NDArray[np.int64] | None = None
    ) -> None:
        check_memory(f"a chain of {n} steps", _STEP_BYTES * n)
        self.n, self.reverse, self._starts = n, reverse, starts
        self.leaves = np.zeros((n, 2), np.int64)
        self.batch: int | None = None
        self.dtype = _FLOAT32
        self.device: int | None = None
        self.period = 0
        self.stacks: list[tuple[int, int, int]] = []
        self._steps = np.arange(n)
        # What the table says of stacks, and which Jacobians differ: most reads are like the last.
        self._noted: list[tuple[int, int, int]] = []
        self._known: tuple[NDArray[np.bool_], bytes | None] | None = None
        # The arrays that the addresses point into: one for each Jacobian, or a few that take turns.
        self.values: list[Any] = [None] * n
        self._stacks: list[Any] = []
        self._mixed = False
        # Jacobians that came as weights, and room for their values.
        self._indexed: dict[int, IndexedPattern] = {}
        self._weights: dict[int, Any] = {}
        self._rooms: dict[int, Any] = {}
        self.merged: dict[int, IndexedPattern] = {}
        # Patterns of Jacobians that came as a sequence.
        self._patterns: Sequence[Pattern] = ()
        # Patterns that have been found to be these in turn.
        self._taken: Sequence[Pattern] | None = None
        self._turns: Sequence[Pattern] = ()
        # The patterns and the form of the array that was read last, and the shape of its values.
        self._alike: tuple[Any, ...] = (None, (), ())

    def read(self, jacobians: Any, patterns: Sequence[Pattern] | None = None) -> Sequence[Pattern]:
        """Take Jacobians, and return their patterns.

        With `patterns` given they must have these, and may be bare values in that order.

        Index arrays of CuPy's matrices are checked on their device, which is waited for; but not a
        second time, as long as they live, so that writing new values into a matrix, or making one
        from the same index arrays, costs nothing.

        Raises
        ------
        DeviceError
            If not all values are in host memory or on one device.
        InputError
            If a Jacobian is malformed, or they do not chain, or batch sizes differ.
        InputTypeError
            If a type, a sparse format or a dtype is not supported.
        PatternMismatchError
            If a Jacobian has another pattern than `patterns` says.
        """
        form: tuple[Any, ...] = ()
        if type(jacobians) is np.ndarray:
            array = jacobians = jacobians.view()  # whose form nobody else can change
            form = array.dtype, array.shape, array.strides, array.flags.aligned
            if patterns is not None and self._takes_again(array, form, patterns):
                return patterns
        self._alike = (None, (), ())
        self.period = 0
        is_list = type(jacobians) in (list, tuple)
        if isinstance(jacobians, ImplicitChain):
            raise InputTypeError("jacobians is an ImplicitChain; expected explicit Jacobians here")
        if not is_list and is_stack(jacobians):
            self.period = len(jacobians.patterns) if isinstance(jacobians, PeriodicChain) else 1
        if not is_list and is_on_device(jacobians):
            jacobians = on_device(jacobians, "jacobians")
        count = len(jacobians) if is_list else length(jacobians)
        if count != self.n:
            raise InputError(
                f"jacobians has {count} steps; expected {self.n}, as the plan was made for"
            )
        if self.reverse and self._starts is None:
            jacobians = _in_reverse(jacobians)
        self.batch = self.device = None
        self._stacks, self._patterns, self._indexed, self.merged = [], (), {}, {}
        self.stacks = []
        if isinstance(jacobians, PeriodicChain):
            patterns_read = self._read_periodic(jacobians, patterns)
        elif self.period:
            patterns_read = self._read_stack(jacobians, patterns)
        else:
            patterns_read = self._read_sequence(jacobians, patterns)
        if form and self._stacks and self.stacks[0][0] == jacobians.ctypes.data:
            self._alike = patterns, form, self._stacks[0].shape
        if patterns is not None:
            return patterns
        return check_chain(patterns_read, self.reverse, self.name)

    def _takes_again(
        self, array: NDArray[Any], form: tuple[Any, ...], patterns: Sequence[Pattern]
    ) -> bool:
        """Take an array of Jacobians, if one of these patterns and of its form was read last.

        All that was checked then follows from patterns and form.
        """
        if patterns is not self._alike[0] or form != self._alike[1]:
            return False
        if self.reverse and self._starts is None:
            array = array[::-1]
        values = array.reshape(self._alike[2])
        self.period, self.dtype, self._mixed, self.device = 1, values.dtype, False, None
        self.batch = values.shape[1] if values.ndim == 3 else None
        self._stacks, self._patterns, self._indexed, self.merged = [values], (), {}, {}
        address, step = values.ctypes.data, values.strides[0]
        sample = values.strides[1] if values.ndim == 3 else 0
        self.stacks = [(address, step, sample)]
        if self.stacks == self._noted:
            return True
        before, *strides = self._noted[0] if len(self._noted) == 1 else (0,)
        if before and strides == [step, sample]:
            self.leaves[:, 0] += address - before
            self._noted = self.stacks
        else:
            self._note_stacks(self.stacks, with_addresses=True)
        return True

    def convert(self, dtype: np.dtype[Any], multiplied: NDArray[np.bool_] | None = None) -> None:
        """Make every value of `dtype`, and write values that came as weights.

        `multiplied` says which Jacobians are operands of products; None is all. For the others,
        only rows that differ are written.
        """
        if self.dtype != dtype or self._mixed:
            if self._stacks:
                self._take_stacks([_converted("jacobians", stack, dtype) for stack in self._stacks])
                return
            for k, array in enumerate(self._read_again()):
                if k not in self._indexed:
                    self._take(k, _converted(self.name(k), array, dtype))
        self.merged = {}
        for k, index in self._indexed.items():
            weights = _converted(self.name(k), self._weights[k], dtype)
            write = spread
            if index.pattern.kind == "general" and multiplied is not None and not multiplied[k]:
                write, self.merged[k] = gathered, index
            self._rooms[k] = write(index, weights, self._rooms.get(k))
            self._take(k, self._rooms[k])

    def upload(self) -> None:
        """Copy the values from host memory to the current device: one transfer."""
        if self._stacks:
            stacks = [_arrays.upload(stack) for stack in self._stacks]
            self.device = device_of(stacks[0])
            self._take_stacks(stacks)
            return
        values = _arrays.upload_all(self._read_again(), self.dtype)
        for k, array in enumerate(values):
            self.device = device_of(array)
            self._take(k, array)
            if k in self._indexed:
                self._weights[k] = array

    def array(self, k: int) -> Any:
        """Return the values of the `k`-th Jacobian, ``(nnz,)`` or ``(batch, nnz)``."""
        if not self._stacks:
            return self.values[k]
        step, turn = divmod(k, self.period)
        stack = self._stacks[turn]
        return stack if stack.ndim == 1 else stack[step]

    @property
    def stack(self) -> tuple[int, int, int] | None:
        """The only one of `stacks`; None if there are none, or several."""
        return self.stacks[0] if len(self.stacks) == 1 else None

    def is_shared(self, turn: int, period: int) -> bool:
        """Return whether all Jacobians of one turn of so many are one array for all samples.

        On a device it is known of arrays that take turns, and of a sequence.
        """
        if self.stacks and self.period == period:
            _, step, sample = self.stacks[turn]
            return sample == 0 and (step == 0 or self.n <= turn + period)
        addresses, samples = self.leaves[turn::period].T
        return bool((addresses == addresses[0]).all() and not samples.any())

    @property
    def batched(self) -> NDArray[np.bool_]:
        """Which Jacobians differ between samples."""
        return self._known[0] if self._known else self._differing()[0]

    def differs(self) -> bytes | None:
        """Return which Jacobians differ between samples, as an array of bool; None if all do."""
        return self._known[1] if self._known else self._differing()[1]

    def _differing(self) -> tuple[NDArray[np.bool_], bytes | None]:
        batched = self.leaves[:, 1] != 0
        self._known = batched, None if batched.all() else batched.tobytes()
        return self._known

    def _forget(self) -> None:
        """Forget what is known of the table, which is being written."""
        self._noted, self._known = [], None

    def release(self) -> None:
        """Forget the caller's arrays."""
        self._weights = {}
        if self._stacks:
            self._stacks = []
            return
        for k in range(self.n):
            self.values[k] = None

    def _read_stack(self, jacobians: Any, patterns: Sequence[Pattern] | None) -> Sequence[Pattern]:
        name = "jacobians"
        if patterns and self._turn_of(patterns, patterns[:1]) is not None:
            raise InputError(f"{name} is one array, but the plan has several patterns; pass a list")
        if patterns is not None and not patterns:
            self.dtype, self._mixed = _FLOAT32, False
            values = jacobians.data if isinstance(jacobians, CSRChain) else jacobians
            self.device = device_of(read_array(name, values))
            return patterns
        expected = patterns[0] if patterns is not None else None
        if isinstance(jacobians, CSRChain):
            pattern, values = jacobians.pattern, jacobians.read()
            if expected is not None and pattern is not expected:
                raise _mismatch("jacobians[0]", expected, str(pattern))
        else:
            pattern, values = _split_dense(name, jacobians, 1, expected)
        if len(values) != self.n:
            raise InputError(f"{name} has {len(values)} steps now; expected {self.n}, as it had")
        self.dtype, self._mixed = values.dtype, False
        self.device = device_of(values)
        if values.ndim == 3:
            self.batch = values.shape[1]
        self._take_stacks([values])
        return patterns if patterns is not None else [pattern] * self.n

    def _read_periodic(
        self, jacobians: PeriodicChain, patterns: Sequence[Pattern] | None
    ) -> Sequence[Pattern]:
        turns, values = jacobians.patterns, jacobians.read()
        if patterns is not None:
            k = self._turn_of(patterns, turns)
            if k is not None:
                raise _mismatch(self.name(k), patterns[k], str(turns[k % len(turns)]))
        self.batch = jacobians.batch
        self.dtype = np.result_type(*(array.dtype for array in values))
        self._mixed = any(array.dtype != self.dtype for array in values)
        self.device = device_of(values[0])
        for j, array in enumerate(values):
            check_one_place(f"values[{j}]", device_of(array), "values[0]", self.device)
        self._take_stacks(values)
        return patterns if patterns is not None else turns * jacobians.steps

    def _turn_of(self, patterns: Sequence[Pattern], turns: Sequence[Pattern]) -> int | None:
        """Return the first pattern that is not the one of its turn; None if there is none.

        A sequence of patterns that was right before is not looked at again.
        """
        if patterns is not self._taken or turns != self._turns:
            for k, pattern in enumerate(patterns):
                if pattern is not turns[k % len(turns)]:
                    return k
            self._taken, self._turns = patterns, turns
        return None

    def _take_stacks(self, stacks: Sequence[Any]) -> None:
        self._stacks = [
            stack if _is_walkable(stack) else _copied("jacobians", stack, stack.dtype)
            for stack in stacks
        ]
        period = len(self._stacks)
        self.stacks = []
        for stack in self._stacks:
            # CuPy has no address for an array without elements, but to kernels 0 says that it is
            # none.
            address = _arrays.address_of(stack) or stack.itemsize
            step = stack.strides[0] if stack.ndim > 1 else 0
            sample = stack.strides[1] if stack.ndim == 3 else 0
            self.stacks.append((address, step, sample))
        with_addresses = self.device is None or period > 1
        noted = self.stacks if with_addresses else [(0, 0, sample) for _, _, sample in self.stacks]
        if noted != self._noted:
            self._note_stacks(noted, with_addresses=with_addresses)

    def _note_stacks(self, noted: list[tuple[int, int, int]], *, with_addresses: bool) -> None:
        """Write what is noted of stacks into the table."""
        self._forget()
        for turn, (address, step, sample) in enumerate(noted):
            addresses, samples = self.leaves[turn :: len(noted)].T
            samples[:] = sample
            if with_addresses:
                np.multiply(self._steps[: len(addresses)], step, out=addresses)
                addresses += address
        self._noted = noted

    def _read_sequence(
        self, jacobians: Any, patterns: Sequence[Pattern] | None
    ) -> Sequence[Pattern]:
        self._forget()
        patterns_read: list[Pattern] = []
        # Steps often repeat a pattern without sharing its arrays: compare with one that passed the
        # checks, by size, before checking anew.
        known: dict[Any, Pattern] = {}
        dtypes = set()
        reference: Pattern | None = None
        # The types that may go the short way, which is for host memory.
        short_way: tuple[type, ...] = _CSR_TYPES
        k = -1
        # A caller's own sequence may give other items than it claims: a list is made of it.
        steps = iter(jacobians if type(jacobians) in (list, tuple) else steps_of(jacobians))
        # Another thread may make a list longer, but the loop ends with the table.
        for k, jacobian in zip(range(self.n), steps, strict=False):
            if type(jacobian) in short_way:
                # Each attribute is read once: another thread may replace it.
                data, shape = jacobian.data, jacobian.shape
                indices, indptr = jacobian.indices, jacobian.indptr
                wanted = reference
                if not type(data) is type(indices) is type(indptr) is np.ndarray:
                    wanted = None
                elif patterns is not None:
                    wanted = patterns[k]
                elif wanted is None or shape != wanted.shape or data.size != wanted.nnz:
                    wanted = known.get((shape, data.size))
                if wanted is not None and shape == wanted.shape:
                    if wanted is not reference:
                        reference, columns, pointers = wanted, wanted.indices, wanted.indptr
                    dtype = data.dtype
                    # A dtype that is the same but not this object takes the long way.
                    if (
                        (dtype is _FLOAT64 or dtype is _FLOAT32)
                        and (indices.dtype is _INT32 or indices.dtype is _INT64)
                        and indices.dtype is indptr.dtype
                        and data.ndim == indices.ndim == indptr.ndim == 1
                        and note_if_equal(data, indices, indptr, columns, pointers, self.leaves, k)
                        == dtype.itemsize
                    ):
                        self.values[k] = data
                        dtypes.add(dtype)
                        if patterns is None:
                            patterns_read.append(wanted)
                        continue
            elif short_way and (noted := self._note(k, jacobian, patterns)) is not None:
                dtypes.add(noted)
                if patterns is None:
                    patterns_read.append(jacobian.pattern)
                continue
            expected = None if patterns is None else patterns[k]
            pattern, values = split(self.name(k), jacobian, expected)
            device = None if type(values) is np.ndarray else device_of(values)
            if k == 0 and device is not None:
                self.device, short_way = device, ()
            elif device != self.device:
                check_one_place(self.name(k), device, self.name(0), self.device)
            if patterns is None:
                known[pattern.shape, pattern.nnz] = pattern
                patterns_read.append(pattern)
            dtypes.add(values.dtype)
            if isinstance(jacobian, Weights):
                self._indexed[k], self._weights[k] = jacobian.index, values
            if values.ndim == 2:
                self._check_batch(k, values.shape[0])
            self._take(k, values)
        if k + 1 != self.n:
            raise InputError(f"jacobians gave {k + 1} steps; expected {self.n}, its length")
        if next(steps, _END) is not _END:
            raise InputError(
                f"jacobians gave more than {self.n} steps; expected {self.n}, its length"
            )
        self._mixed = len(dtypes) > 1
        self.dtype = np.result_type(*dtypes) if dtypes else _FLOAT32
        self._patterns = patterns_read if patterns is None else patterns
        return self._patterns

    def _note(
        self, k: int, jacobian: Any, patterns: Sequence[Pattern] | None
    ) -> np.dtype[Any] | None:
        """Take values of a known pattern in host memory; return their dtype, or None."""
        if isinstance(jacobian, _ONE_STEP):
            values, wanted = jacobian.data, jacobian.pattern
            if patterns is not None and wanted is not patterns[k]:
                return None
        elif type(jacobian) is np.ndarray and patterns is not None:
            values, wanted = jacobian, patterns[k]
        else:
            return None
        if type(values) is not np.ndarray or not 1 <= values.ndim <= 2:
            return None
        if values.ndim == 2 and wanted.nnz == wanted.shape[0] * wanted.shape[1]:
            return None  # it may be dense
        dtype = values.dtype
        if dtype is not _FLOAT64 and dtype is not _FLOAT32:
            return None
        noted = note_values(values, wanted.nnz, self.leaves, k)
        if noted % 16 != dtype.itemsize:
            return None
        if noted >= 16:
            self._check_batch(k, noted // 16 - 1)
        self.values[k] = values
        return dtype

    def name(self, k: int) -> str:
        """Return what errors call the `k`-th Jacobian, or its step; the caller may count back."""
        n = self.n
        if self._starts is not None:
            k = int(np.searchsorted(self._starts, k, side="right")) - 1
            n = len(self._starts) - 1
        return name_of(k, n, self.reverse)

    def _check_batch(self, k: int, batch: int) -> None:
        if self.batch not in (None, batch):
            raise InputError(
                f"{self.name(k)} has a batch of {batch}, an earlier one of {self.batch}; expected "
                "one batch size"
            )
        self.batch = batch

    def _read_again(self) -> list[Any]:
        """Return the values of a sequence; an error if the caller has reshaped one since."""
        arrays: list[Any] = []
        views: dict[Any, Any] = {}
        for k, (array, pattern) in enumerate(zip(self.values, self._patterns, strict=True)):
            values = read_array(self.name(k), array)
            # An array that came many times is uploaded once.
            place = _arrays.address_of(values), values.shape, values.strides, values.dtype
            values = views.setdefault(place, values)
            whole = (pattern.nnz,), (self.batch, pattern.nnz)
            if values.shape not in whole and k not in self._indexed:
                raise InputError(
                    f"{self.name(k)} has values of shape {values.shape} now; expected (·, "
                    f"{pattern.nnz}), as it had"
                )
            arrays.append(values)
        return arrays

    def _take(self, k: int, values: Any) -> None:
        """Note where the values of the `k`-th Jacobian lie."""
        if not _is_walkable(values):
            values = _copied(self.name(k), values, values.dtype)
        self._forget()
        self.values[k] = values
        self.leaves[k, 0] = address_of(values) if self.device is None else values.data.ptr
        self.leaves[k, 1] = values.strides[0] if values.ndim == 2 else 0


def is_stack(jacobians: Any) -> bool:
    """Return whether a chain comes as one array, a CSRChain or a PeriodicChain."""
    return isinstance(jacobians, (*_CHAINS, np.ndarray)) or is_on_device(jacobians)


def length(jacobians: Any) -> int:
    """Return the number of Jacobians, or raise if `jacobians` is no sequence of them."""
    if (type(jacobians) is np.ndarray or is_cupy(jacobians)) and jacobians.ndim > 1:
        return len(jacobians)
    if is_stack(jacobians) and not isinstance(jacobians, _CHAINS):
        if is_on_device(jacobians):
            jacobians = on_device(jacobians, "jacobians")
        if jacobians.ndim < 2:
            raise InputError(
                f"jacobians has shape {jacobians.shape}; expected (n, rows, cols) or "
                "(n, batch, rows, cols)"
            )
    elif not isinstance(jacobians, _CHAINS):
        check_no_mask("jacobians", jacobians)
        if _is_sparse(jacobians) or isinstance(jacobians, (BatchedCSR, str, bytes)):
            raise InputTypeError(
                f"jacobians is a {type(jacobians).__name__}; expected a sequence of Jacobians"
            )
        if not isinstance(jacobians, Sequence):
            raise InputTypeError(
                f"jacobians is a {type(jacobians).__name__}; expected a sequence such as a list, "
                "a CSRChain, a PeriodicChain, or an array (n, rows, cols) or (n, batch, rows, cols)"
            )
    return _length("jacobians", jacobians)


def _length(name: str, sequence: Any) -> int:
    """Return the length that a sequence claims, or raise an error that names it."""
    try:
        return len(sequence)
    except Exception as error:  # of a caller's own class
        raise InputTypeError(f"{name} has no length: {error}") from None


def steps_of(jacobians: Any) -> Any:
    """Return a sequence of Jacobians as a list of its own, and what comes in one as it is.

    A sequence may say one length and give another, and other steps when it is read again: a list
    does not.
    """
    n = length(jacobians)
    if is_stack(jacobians):
        if isinstance(jacobians, np.ndarray):
            # It is refused before there are tables for so many steps.
            check_array("jacobians", jacobians[:1])
        return jacobians
    return _items("jacobians", jacobians, n, "steps")


def _items(name: str, sequence: Any, count: int, what: str) -> list[Any]:
    """Return what an argument gives when it is iterated, if that is as much as its length says."""
    try:
        items = list(itertools.islice(sequence, min(count, sys.maxsize - 1) + 1))
    except Exception as error:  # of a caller's own class
        raise InputTypeError(f"{name} cannot be read: {error}") from None
    if len(items) != count:
        gave = len(items) if len(items) < count else f"more than {count}"
        raise InputError(f"{name} gave {gave} {what}; expected {count}, its length")
    return items


def _in_reverse(jacobians: Any) -> Any:
    """Return Jacobians from the last to the first that came in the order of time: views."""
    if isinstance(jacobians, PeriodicChain):
        raise InputTypeError(
            "jacobians is a PeriodicChain, whose arrays run from the last step to the first; "
            "expected another form, or reverse=False"
        )
    if isinstance(jacobians, CSRChain):
        return CSRChain.from_pattern(jacobians.read()[::-1], jacobians.pattern)
    return steps_of(jacobians)[::-1]


def pattern_of(k: int, jacobian: Any) -> Step:
    """Return the pattern of the `k`-th step, which may be a bare one."""
    if isinstance(jacobian, (Pattern, ImplicitPattern)):
        return jacobian
    if isinstance(jacobian, ImplicitStep):
        return jacobian.pattern
    return split(f"jacobians[{k}]", jacobian, None)[0]


def patterns_in(jacobians: Any, reverse: bool) -> tuple[Sequence[Step], bool]:
    """Return the patterns of steps, bare ones too, and whether any is on a device.

    The patterns run from the last layer to the first; the steps do so unless `reverse`.
    """
    steps = steps_of(jacobians)
    if isinstance(steps, ImplicitChain):
        return [steps.pattern] * len(steps), any(map(is_on_device, steps.values))
    bare = Pattern, ImplicitPattern, ImplicitStep
    if is_stack(steps) or not any(isinstance(step, bare) for step in steps):
        chain = Chain(length(steps), reverse)
        return chain.read(steps), chain.device is not None
    patterns = [pattern_of(k, step) for k, step in enumerate(steps)]
    there = any(is_on_device(step) for step in steps)
    return check_chain(patterns[::-1] if reverse else patterns, reverse), there


def name_of(k: int, n: int, reverse: bool) -> str:
    """Return what errors call the `k`-th of `n` Jacobians, which the caller may count back."""
    return f"jacobians[{n - 1 - k if reverse else k}]"


def check_chain(
    patterns: Sequence[AnyStep], reverse: bool = False, name: Callable[[int], str] | None = None
) -> Sequence[AnyStep]:
    """Return `patterns`, or raise an error if their shapes do not chain.

    `reverse` says that the caller has them in the other order, and `name` what errors call each.
    """
    previous = None
    for k, pattern in enumerate(patterns):
        if previous is not None and pattern.shape[1] != previous.shape[0]:
            called = name or partial(name_of, n=len(patterns), reverse=reverse)
            order = _ORDER_OF_TIME if reverse else _ORDER
            raise InputError(
                f"{called(k)} has shape {pattern.shape}, but {called(k - 1)} has "
                f"{previous.shape[0]} rows; expected (·, {previous.shape[0]}): {order}"
            )
        previous = pattern
    return patterns


def read_grad(grad: Any, size: int | None, batch: int | None) -> Any:
    """Return the gradient at the end of the chain, shape ``(size,)`` or ``(batch, size)``."""
    array = check_array("grad", grad)
    check_grad(array, size, batch)
    return array


def check_grad(array: Any, size: int | None, batch: int | None) -> None:
    """Raise unless an array has the shape of the gradient at the end of the chain."""
    wanted = "d_n" if size is None else str(size)
    if batch is not None:
        if array.ndim != 2 or array.shape != (batch, array.shape[1] if size is None else size):
            raise InputError(
                f"grad has shape {array.shape}; expected ({batch}, {wanted}): the Jacobians have a "
                f"batch of {batch} and {wanted} columns"
            )
    elif array.ndim not in (1, 2) or size not in (None, array.shape[-1]):
        raise InputError(f"grad has shape {array.shape}; expected ({wanted},) or (batch, {wanted})")


def placed(grad: Any, local_grads: Any) -> tuple[str, Any]:
    """Return an array that lies where a scan runs, after its name; `grad`, if it is not None."""
    return ("grad", grad) if grad is not None else _first_given(local_grads)


def grad_or_zeros(
    grad: Any, local_grads: Any, size: int | None, batch: int | None, period: int = 0
) -> Any:
    """Return `grad` as an array, or zeros in its place, as many as there are samples.

    `batch` is that of the chain, None if samples share it; `period` is as for :class:`LocalGrads`.
    """
    if grad is not None:
        return read_array("grad", grad)
    name, given = _first_given(local_grads)
    given = read_array(name, given)
    # Without the axis of steps, where gradients of many came as one array.
    shape = given.shape[(name == "local_grads") + (period > 1) :]
    samples = shape[:-1] if batch is None else (batch,)
    size = shape[-1] if size is None and shape else size
    with beside(given):
        return namespace(given).zeros((*samples[:1], size or 0), _FLOAT32)


def _first_given(local_grads: Any) -> tuple[str, Any]:
    """Return the first local gradient that is no None, after its name; or an array of all."""
    if isinstance(local_grads, np.ndarray) or is_on_device(local_grads):
        return "local_grads", local_grads
    if local_grads is not None:
        _check_sequence(local_grads)
        try:
            for k, given in enumerate(local_grads):
                if given is not None:
                    return f"local_grads[{k}]", given
        except Exception as error:  # of a caller's own class
            raise InputTypeError(f"local_grads cannot be read: {error}") from None
    raise InputError(
        "grad is None, and local_grads has no gradient either; expected the gradient at the end of "
        "the chain, or local gradients that say what shape its zeros have"
    )


def check_places(grad: Any, chain: Chain, local: LocalGrads) -> int | None:
    """Return the one device of all input of a scan, None for host memory; or raise an error."""
    device = device_of(grad)
    if chain.n:
        check_one_place("grad", device, "jacobians", chain.device)
    if local.given:
        check_one_place("local_grads", local.device, "grad", device)
    return device


class LocalGrads:
    """Gradients that are added to those a scan returns, checked.

    Parameters
    ----------
    local_grads : None or sequence or array
        None, or for each returned gradient None or an array of its shape.
    count : int
        Number of returned gradients.
    sizes : sequence of int
        Length of each, and maybe of more.
    batch_shape : tuple of int
        ``()`` or ``(batch,)``.
    period : int
        If more than 1, `local_grads` has one array or None for each of so many, that take turns.
    reverse : bool
        Whether they come in the order of time.

    Attributes
    ----------
    given : bool
        Whether there is anything to add.
    dtypes : set of dtype
        The dtypes of the arrays.
    device : int or None
        The CUDA device that has them; None for host memory.
    """

    def __init__(
        self,
        local_grads: Any,
        count: int,
        sizes: Sequence[int],
        batch_shape: tuple[int, ...],
        period: int = 0,
        *,
        reverse: bool = False,
    ) -> None:
        self._count, self._reverse = count, reverse
        # The arrays that were passed: a few that take turns, or one for each gradient, or None.
        self._stacks: list[Any] = []
        self._list: list[Any] = []
        self.device: int | None = None
        if local_grads is not None:
            if is_on_device(local_grads):
                local_grads = on_device(local_grads, "local_grads")
            is_array = isinstance(local_grads, np.ndarray) or is_cupy(local_grads)
            if reverse:
                if not is_array or local_grads.ndim == 0:
                    local_grads = read_local_grads(local_grads, count)
                local_grads = local_grads[::-1]
            sizes = sizes[:count]
            if period > 1:
                self._read_periodic(local_grads, sizes, batch_shape, period)
            elif count and is_array and local_grads.dtype in (_FLOAT32, _FLOAT64):
                self._read_stack(local_grads, sizes, batch_shape)
            else:
                self._read_list(local_grads, sizes, batch_shape)
        given = self._stacks or self._list
        self.dtypes = {array.dtype for array in given if array is not None}
        self.given = bool(self.dtypes)

    def _read_periodic(
        self, stacks: Any, sizes: Sequence[int], batch_shape: tuple[int, ...], period: int
    ) -> None:
        given = []
        for turn, stack in enumerate(read_local_grads(stacks, period, "pattern")):
            if stack is not None:
                name = f"local_grads[{turn}]"
                stack = read_array(name, stack)
                own = sizes[turn::period]
                if stack.shape != (len(own), *batch_shape, *own[:1]):
                    raise InputError(
                        f"{name} has shape {stack.shape}; expected "
                        f"{(len(own), *batch_shape, *own[:1])}, the shape of the gradients it is "
                        "added to"
                    )
                given.append((name, device_of(stack)))
                check_one_place(name, given[-1][1], *given[0])
                self.device = given[0][1]
            self._stacks.append(stack)

    def _read_stack(self, stack: Any, sizes: Sequence[int], batch_shape: tuple[int, ...]) -> None:
        stack = read_array("local_grads", stack)
        _check_count(stack, self._count)
        self._stacks, self.device = [stack], device_of(stack)
        shape = stack.shape[1:]
        if shape != (*batch_shape, sizes[0]) or len(set(sizes)) > 1:
            for k, size in enumerate(sizes):
                if shape != (*batch_shape, size):
                    raise self._wrong_shape(k, shape, (*batch_shape, size))

    def _read_list(self, arrays: Any, sizes: Sequence[int], batch_shape: tuple[int, ...]) -> None:
        first = -1
        arrays = read_local_grads(arrays, self._count)
        for k, (array, size) in enumerate(zip(arrays, sizes, strict=False)):
            if array is not None:
                name = self._name(k)
                array = read_array(name, array)
                if array.shape != (*batch_shape, size):
                    raise self._wrong_shape(k, array.shape, (*batch_shape, size))
                device = None if type(array) is np.ndarray else device_of(array)
                if first < 0:
                    first, self.device = k, device
                elif device != self.device:
                    check_one_place(name, device, self._name(first), self.device)
            self._list.append(array)

    def _name(self, k: int) -> str:
        """Return how errors call the `k`-th, which the caller may count from the end."""
        return f"local_grads[{self._count - 1 - k if self._reverse else k}]"

    def _wrong_shape(self, k: int, shape: tuple[int, ...], expected: tuple[int, ...]) -> InputError:
        return InputError(
            f"{self._name(k)} has shape {shape}; expected {expected}, the shape of the gradient it "
            "is added to"
        )

    @property
    def stack(self) -> tuple[int, int] | None:
        """Address of the first, and bytes to the next, if they came as one array; else None.

        Only for contiguous gradients, as :meth:`convert` makes them.
        """
        if len(self._stacks) != 1:
            return None
        return _arrays.address_of(self._stacks[0]), self._stacks[0].strides[0]

    def add_first(self, grad: Any, out: Any) -> None:
        """Write the first gradient, with what is added to it, to `out`."""
        out[...] = grad
        if self.given:
            (first, *_) = self._stacks or self._list
            if first is not None:
                first = first[0] if self._stacks else first
                with np.errstate(over="ignore", invalid="ignore"):
                    out += first

    def spread(self, places: NDArray[np.int64], period: int = 0) -> None:
        """Make them those of the gradients at these places among more, None for the others.

        If the gradients of one turn of so many are in one array, it is that of the first turn.
        """
        if self._stacks and period > 1:
            self._stacks += [None] * (period - 1)
        elif self._stacks or self._list:
            given = self._stacks[0] if self._stacks else self._list
            self._stacks = []
            self._list = [None] * (int(places[-1]) + 1)
            for place, array in zip(places.tolist(), given, strict=True):
                self._list[place] = array

    def array(self, k: int) -> Any:
        """Return what is added to the `k`-th gradient; None if nothing is."""
        if not self._stacks:
            return self._list[k] if k < len(self._list) else None
        step, turn = divmod(k, len(self._stacks))
        stack = self._stacks[turn]
        return None if stack is None else stack[step]

    def convert(self, dtype: np.dtype[Any]) -> None:
        """Make all of `dtype`, and each contiguous."""
        for turn, stack in enumerate(self._stacks):
            if stack is not None and (stack.dtype != dtype or not stack[:1].flags.c_contiguous):
                self._stacks[turn] = contiguous(stack, dtype)
        self._list = [
            array
            if array is None or (array.dtype == dtype and array.flags.c_contiguous)
            else contiguous(array, dtype)
            for array in self._list
        ]

    def upload(self) -> None:
        """Copy what is in host memory to the current device: one transfer."""
        if not self.given:
            return
        self._stacks = [None if each is None else _arrays.upload(each) for each in self._stacks]
        if self._list:
            self._list = _arrays.upload_all(self._list, np.result_type(*self.dtypes))
        given = self._stacks or self._list
        self.device = next(device_of(array) for array in given if array is not None)

    def fill(self, addresses: NDArray[np.int64]) -> None:
        """Write the address of each array, or 0."""
        if not self.given:
            return
        addresses[:] = 0
        for turn, stack in enumerate(self._stacks):
            if stack is not None:
                address, step = _arrays.address_of(stack), stack.strides[0]
                own = addresses[turn :: len(self._stacks)][: len(stack)]
                own[:] = address + step * np.arange(len(stack))
        for k, array in enumerate(self._list):
            if array is not None:
                addresses[k] = _arrays.address_of(array)


def read_local_grads(local_grads: Any, count: int, of: str = "returned gradient") -> list[Any]:
    """Return the entries of a sequence of local gradients, as many as are expected."""
    _check_count(local_grads, count, of)
    return _items("local_grads", local_grads, count, "entries")


def _check_count(local_grads: Any, count: int, of: str = "returned gradient") -> None:
    _check_sequence(local_grads)
    length = _length("local_grads", local_grads)
    if length != count:
        raise InputError(f"local_grads has {length} entries; expected {count}, one for each {of}")


def _check_sequence(local_grads: Any) -> None:
    check_no_mask("local_grads", local_grads)
    if (
        not (isinstance(local_grads, (Sequence, np.ndarray)) or is_on_device(local_grads))
        or isinstance(local_grads, (str, bytes))
        or getattr(local_grads, "shape", None) == ()
    ):
        raise InputTypeError(
            f"local_grads is a {type(local_grads).__name__}; expected a sequence of arrays or None"
        )


def _is_sparse(matrix: Any) -> bool:
    """Return whether a matrix is one of SciPy's or CuPy's sparse formats."""
    return sp.issparse(matrix) or str(type(matrix).__module__).startswith("cupyx.scipy.sparse")


def split(name: str, jacobian: Any, expected: Pattern | None) -> tuple[Pattern, Any]:
    """Return pattern and values, shape ``(nnz,)`` or ``(batch, nnz)``, of one Jacobian."""
    if type(jacobian) is np.ndarray:
        return _split_dense(name, jacobian, 0, expected)
    if isinstance(jacobian, (*_ONE_STEP, Weights)):
        pattern, values = jacobian.pattern, jacobian.read()
    elif _is_sparse(jacobian) and jacobian.format == "csr":
        pattern, values = _split_csr(name, jacobian)
    elif isinstance(jacobian, Pattern):
        raise InputTypeError(f"{name} is a Pattern, which has no values; expected a Jacobian")
    elif _is_sparse(jacobian):
        raise InputTypeError(
            f"{name} is a {type(jacobian).__name__}; expected CSR: convert it with .tocsr()"
        )
    elif isinstance(jacobian, (ImplicitStep, ImplicitPattern)):
        kind = type(jacobian).__name__
        article = "an" if kind.startswith("I") else "a"
        raise InputTypeError(f"{name} is {article} {kind}; expected an explicit Jacobian here")
    elif isinstance(jacobian, _CHAINS):
        raise InputTypeError(f"{name} is a {type(jacobian).__name__}; expected one Jacobian")
    else:
        return _split_dense(name, jacobian, 0, expected)
    if expected is not None and pattern is not expected:
        raise _mismatch(name, expected, str(pattern))
    return pattern, values


def _split_dense(
    name: str, jacobian: Any, steps: int, expected: Pattern | None
) -> tuple[Pattern, Any]:
    """Return pattern and values of a dense array, or of values of an expected pattern.

    `steps` is 1 if the array has a leading axis for the steps of a chain, else 0.
    """
    array = read_array(name, jacobian)
    shape = array.shape
    leading = "(n, " if steps else "("
    if expected is not None:
        is_full = expected.nnz == expected.shape[0] * expected.shape[1]
        if is_full and array.ndim in (steps + 2, steps + 3) and shape[-2:] == expected.shape:
            return expected, _flat(name, array, expected.nnz)
        if array.ndim in (steps + 1, steps + 2) and shape[-1] == expected.nnz:
            return expected, array
        raise _mismatch(
            name,
            expected,
            f"an array of shape {shape}; values have shape {leading}nnz) or {leading}batch, nnz)",
        )
    if array.ndim not in (steps + 2, steps + 3):
        raise InputError(
            f"{name} has shape {shape}; expected {leading}rows, cols) or {leading}batch, rows, "
            "cols)"
        )
    pattern = Pattern.dense(shape[-2:])
    return pattern, _flat(name, array, pattern.nnz)


def _flat(name: str, array: Any, nnz: int) -> Any:
    """Return values with one axis for rows and columns; a view wherever one can be."""
    shape = (*array.shape[:-2], nnz)
    if type(array) is not np.ndarray:
        if array.flags.c_contiguous:
            return array.reshape(shape)
        # It may be a copy.
        with beside(array):
            return array.reshape(shape)
    (rows, cols), (row, entry) = array.shape[-2:], array.strides[-2:]
    if row != entry * cols and rows > 1 and cols > 1:
        array = _copied(name, array, array.dtype)
    return array.reshape(shape)


def _split_csr(name: str, jacobian: Any) -> tuple[Pattern, Any]:
    shape = check_shape(name, jacobian.shape)
    order = canonical_order(name, jacobian.indptr, jacobian.indices, shape)
    values = read_array(name, jacobian.data)
    if values.shape != (order.size,):
        raise InputError(
            f"{name} has data of shape {values.shape}; expected {(order.size,)}, as its indices"
        )
    return order.pattern, order.values(values)


def _mismatch(name: str, expected: Pattern, what: str) -> PatternMismatchError:
    return PatternMismatchError(f"{name} is {what}; expected {expected}, as the plan was made for")


def _is_walkable(values: Any) -> bool:
    """Return whether the kernels can walk the last axis."""
    flags = values.flags
    # Arrays on a device have been checked for alignment.
    if type(values) is np.ndarray and not flags.aligned:
        return False
    if flags.c_contiguous:
        return True
    return bool(values.shape[-1] <= 1 or values.strides[-1] == values.itemsize)


def _converted(name: str, values: Any, dtype: np.dtype[Any]) -> Any:
    """Return `values` in a dtype: a copy of those that are of another one."""
    return values if values.dtype == dtype else _copied(name, values, dtype)


def _copied(name: str, values: Any, dtype: np.dtype[Any]) -> Any:
    """Return a contiguous copy, if there is memory: a view may show more than there is."""
    if type(values) is np.ndarray:
        check_memory(f"a contiguous copy of {name}", values.size * dtype.itemsize)
    return contiguous(values, dtype)
