"""Chain: the caller's Jacobians, checked once and split into patterns and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ..arrays import arrays as _arrays
from ..arrays.addresses import kernel_address, place_of
from ..arrays.arrays import check_one_place, device_of, read_array
from ..errors import InputError, InputTypeError
from ..kernels.addresses import note_if_equal, note_values, row_address_of
from ..symbolic.indexed import IndexedPattern
from ..symbolic.pattern import Pattern
from . import reading
from .containers import CSRChain, PeriodicChain
from .implicit import FactorWeights, ImplicitChain
from .weights import gathered, spread

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_CSR_TYPES = (sp.csr_array, sp.csr_matrix)
_END = object()
# The least bytes that tables and objects of a scan take for a step.
_STEP_BYTES = 384


class Chain:
    """The Jacobians of a scan: a pattern for each, and where its values are.

    A chain can be refilled, so that running a plan allocates nothing that grows with the chain. All
    values lie in host memory, or on one CUDA device.

    Parameters
    ----------
    n : int
        Number of Jacobians.
    reverse : bool
        Whether Jacobians come in the order of time.
    starts : ndarray of int64, optional
        Where the factors of each step start, if the Jacobians of this chain are factors of steps.
        They then run from the last to the first. Errors use it to name the step.

    Attributes
    ----------
    leaves : ndarray of int64, shape (n, 2)
        Address of the values of every Jacobian, and the bytes from one sample to the next (0 if the
        samples share them). Valid until :meth:`release`. They are not filled in for a chain that
        came as one array on a device.
    stacks : list of tuple of int
        If the chain came as one array, or as a few that take turns, for each array: the address of
        the first Jacobian's values, and the bytes to the next Jacobian and to the next sample.
        Valid until :meth:`release`.
    device : int or None
        The CUDA device that has the values; None for host memory.
    batch : int or None
        Number of samples, if any Jacobian has a batch axis.
    dtype : dtype
        The dtype to which the Jacobians promote; float32 for an empty chain.
    values : list of ndarray
        Values of every Jacobian in the order of its pattern, ``(nnz,)`` or ``(batch, nnz)``; None
        for those that came in stacks.
    starts : ndarray of int64 or None
        The array that was passed.
    period : int
        How many arrays take turns: 1 if one array holds all Jacobians; 0 for a sequence.
    merged : dict of int to IndexedPattern
        Jacobians for which :meth:`convert` has written only the rows that differ.
    """

    def __init__(
        self, n: int, reverse: bool = False, starts: NDArray[np.int64] | None = None
    ) -> None:
        _arrays.check_memory(f"a chain of {n} steps", _STEP_BYTES * n)
        self.n, self.reverse, self.starts = n, reverse, starts
        # Factors of implicit steps have been reversed already.
        self._is_turned = reverse and starts is None
        self.leaves = np.zeros((n, 2), np.int64)
        self.batch: int | None = None
        self.dtype: np.dtype[Any] = _FLOAT32
        self.device: int | None = None
        self.period = 0
        self.stacks: list[tuple[int, int, int]] = []
        self._steps = np.arange(n)
        # What the table says of stacks, and which Jacobians differ. Most reads repeat the last one.
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
        # Sequences of patterns that were found to equal `patterns`.
        self._taken: Sequence[Pattern] | None = None
        self._turns: Sequence[Pattern] = ()
        # The patterns and the form of the array that was read last, and the shape of its values.
        self._alike: tuple[Any, ...] = (None, (), ())

    def read(
        self, jacobians: Any, patterns: Sequence[Pattern] | None = None, *, chained: bool = True
    ) -> Sequence[Pattern]:
        """Take Jacobians, and return their patterns.

        If `patterns` are given, Jacobians must have these patterns, and may be bare values in that
        order. Otherwise their shapes must chain, unless `chained` is False, as for rows of steps.

        Index arrays of CuPy's matrices are checked on their device, and the call waits for it. They
        are checked only once as long as they live, so writing new values into a matrix, or making
        another matrix of the same index arrays, costs nothing.

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
            array = jacobians = jacobians.view()  # a view of our own, whose shape stays
            form = array.dtype, array.shape, array.strides, array.flags.aligned
            if patterns is not None and self._takes_again(array, form, patterns):
                return patterns
        self._alike = (None, (), ())
        if isinstance(jacobians, ImplicitChain):
            raise InputTypeError("jacobians is an ImplicitChain; expected explicit Jacobians here")
        self.period = 0
        is_list = type(jacobians) in (list, tuple)
        if not is_list and reading.is_stack(jacobians):
            self.period = len(jacobians.patterns) if isinstance(jacobians, PeriodicChain) else 1
            if type(jacobians) is not np.ndarray and _arrays.is_on_device(jacobians):
                jacobians = _arrays.on_device(jacobians, "jacobians")
        n = len(jacobians) if is_list else reading.length(jacobians)
        if n != self.n:
            raise InputError(
                f"jacobians has {n} steps; expected {self.n}, as the plan was made for"
            )
        self.batch = self.device = None
        self._stacks, self._patterns, self._indexed, self.merged = [], (), {}, {}
        self.stacks = []
        read = self._read_stacks if self.period else self._read_sequence
        patterns_read = read(jacobians, patterns)
        if form and self._stacks:
            array = jacobians[::-1] if self._is_turned else jacobians
            if self.stacks[0][0] == place_of(array):  # that is no copy
                self._alike = patterns, form, self._stacks[0].shape
        if patterns is not None or not chained:
            return patterns_read
        return reading.check_chain(patterns_read, self.reverse, self.name)

    def _takes_again(
        self, array: NDArray[Any], form: tuple[Any, ...], patterns: Sequence[Pattern]
    ) -> bool:
        """Take an array of Jacobians, if the last read had the same patterns and form.

        All checks depend on patterns and form alone, so they need not be repeated.
        """
        if patterns is not self._alike[0] or form != self._alike[1]:
            return False
        if self._is_turned:
            array = array[::-1]
        values = array.reshape(self._alike[2])
        self.period, self.dtype, self._mixed, self.device = 1, values.dtype, False, None
        self.batch = values.shape[1] if values.ndim == 3 else None
        self._stacks, self._patterns, self._indexed, self.merged = [values], (), {}, {}
        address, step = row_address_of(values), values.strides[0]
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

        `multiplied` says which Jacobians are operands of products; None means all. For the others,
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
        """Return whether all steps and samples share the Jacobian of one turn.

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

    def _read_stacks(self, jacobians: Any, patterns: Sequence[Pattern] | None) -> Sequence[Pattern]:
        """Take Jacobians in a few arrays that take turns; one array of all has every turn."""
        if patterns is not None and not self.n:
            # No pattern says what such an array would hold.
            values = jacobians.data if isinstance(jacobians, CSRChain) else jacobians
            self.device = device_of(read_array("jacobians", values))
            self.dtype, self._mixed = _FLOAT32, False
            return patterns
        turns, stacks = self._split_stacks(jacobians, patterns)
        self.device = device_of(stacks[0])
        self.dtype, self._mixed = stacks[0].dtype, False
        steps = self.n // len(stacks)
        for turn, stack in enumerate(stacks):
            if turn:
                check_one_place(f"values[{turn}]", device_of(stack), "values[0]", self.device)
            if stack.dtype != self.dtype:
                self.dtype, self._mixed = _FLOAT64, True
            if stack.ndim > 1 and len(stack) != steps:
                raise InputError(
                    f"jacobians has {len(stack)} steps now; expected {self.n}, as it had"
                )
            if stack.ndim == 3:
                self.batch = stack.shape[1]
        self._take_stacks(stacks)
        return patterns if patterns is not None else turns * steps

    def _split_stacks(
        self, jacobians: Any, patterns: Sequence[Pattern] | None
    ) -> tuple[list[Pattern], list[Any]]:
        """Return the patterns that take turns, and the values of each, from the last step on."""
        if isinstance(jacobians, PeriodicChain):
            if self._is_turned:
                raise InputTypeError(
                    "jacobians is a PeriodicChain, whose arrays run from the last step to the "
                    "first; expected another form, or reverse=False"
                )
            turns = jacobians.patterns
            if patterns is not None and (k := self._turn_of(patterns, turns)) is not None:
                raise reading.mismatch(self.name(k), patterns[k], str(turns[k % len(turns)]))
            return turns, jacobians.read()
        name, expected = "jacobians", patterns[0] if patterns else None
        if patterns and self._turn_of(patterns, patterns[:1]) is not None:
            raise InputError(f"{name} is one array, but the plan has several patterns; pass a list")
        if isinstance(jacobians, CSRChain):
            pattern, values = jacobians.pattern, jacobians.read()
            if expected is not None and pattern is not expected:
                raise reading.mismatch(f"{name}[0]", expected, str(pattern))
        else:
            pattern, values = reading.split_dense(name, jacobians, 1, expected)
        return [pattern], [values[::-1] if self._is_turned else values]

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
            stack if _is_walkable(stack) else reading.copied("jacobians", stack, stack.dtype)
            for stack in stacks
        ]
        period = len(self._stacks)
        self.stacks = []
        for stack in self._stacks:
            # CuPy gives an empty array address 0, which kernels read as "no array".
            address = kernel_address(stack, stack.ndim - 1) or stack.itemsize
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
        # The types that may take the short path, which is for host memory.
        short_way: tuple[type, ...] = _CSR_TYPES
        k = -1
        # A caller's own sequence may change between reads, so it is copied to a list.
        if self._is_turned or type(jacobians) not in (list, tuple):
            jacobians = reading.steps_of(jacobians)
        steps = iter(jacobians[::-1] if self._is_turned else jacobians)
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
                        reference, (pointers, columns) = wanted, wanted.index_arrays()
                    dtype = data.dtype
                    # An equal dtype that is another object takes the long path.
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
            pattern, values = reading.split(self.name(k), jacobian, expected)
            device = None if type(values) is np.ndarray else device_of(values)
            if k == 0 and device is not None:
                self.device, short_way = device, ()
            elif device != self.device:
                check_one_place(self.name(k), device, self.name(0), self.device)
            if patterns is None:
                known[pattern.shape, pattern.nnz] = pattern
                patterns_read.append(pattern)
            dtypes.add(values.dtype)
            if isinstance(jacobian, FactorWeights):
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
        if isinstance(jacobian, reading.ONE_STEP):
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
        if self.starts is not None:
            k = int(np.searchsorted(self.starts, k, side="right")) - 1
            n = len(self.starts) - 1
        return reading.name_of(k, n, self.reverse)

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
            place = place_of(values), values.shape, values.strides, values.dtype
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
            values = reading.copied(self.name(k), values, values.dtype)
        self._forget()
        self.values[k] = values
        is_on_host = self.device is None
        self.leaves[k, 0] = (
            row_address_of(values) if is_on_host else kernel_address(values, values.ndim - 1)
        )
        self.leaves[k, 1] = values.strides[0] if values.ndim == 2 else 0


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
    return values if values.dtype == dtype else reading.copied(name, values, dtype)
