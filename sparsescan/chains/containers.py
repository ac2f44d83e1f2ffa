"""Sparse matrices that share one pattern: over a batch, or over the steps of a chain."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..arrays import arrays as _arrays
from ..arrays.arrays import is_on_device, read_array
from ..arrays.frozen import Frozen
from ..errors import Allocating, InputError, InputTypeError, short
from ..symbolic import pattern as _pattern
from ..symbolic.pattern import Pattern

_END = object()


class SharedPattern:
    """Values whose last axis follows one pattern."""

    _forms: ClassVar[dict[int, str]]  # the shapes that the values may have, by number of axes

    def __init__(
        self, data: ArrayLike, indices: ArrayLike, indptr: ArrayLike, shape: tuple[int, int]
    ) -> None:
        name = type(self).__name__
        order = canonical_order(name, indptr, indices, _pattern.check_shape(name, shape))
        with Allocating(f"a copy of {name} data"):
            self._data = order.values(self._check_data(data, order.size))
        self._pattern = order.pattern
        self._check()

    @classmethod
    def from_pattern(cls, data: ArrayLike, pattern: Pattern) -> Any:
        """Return a container of values in the order of a :class:`Pattern`, without more checks.

        Parameters
        ----------
        data : array_like
            The values; the last axis has length ``pattern.nnz``.
        pattern : Pattern
            The pattern.
        """
        if not isinstance(pattern, Pattern):
            raise InputTypeError(f"pattern is a {type(pattern).__name__}; expected a Pattern")
        batched = object.__new__(cls)
        batched._data = cls._check_data(data, pattern.nnz)
        batched._pattern = pattern
        batched._check()
        return batched

    @classmethod
    def _check_data(cls, data: ArrayLike, nnz: int) -> Any:
        array = _arrays.check_array(f"{cls.__name__} data", data)
        cls._check_form(array, nnz)
        return array

    @classmethod
    def _check_form(cls, array: Any, nnz: int) -> None:
        if array.ndim not in cls._forms or array.shape[-1] != nnz:
            expected = " or ".join(cls._forms.values())
            raise InputError(
                f"{cls.__name__} has data of shape {array.shape}; expected {expected} with "
                f"nnz = {nnz}"
            )

    def read(self) -> Any:
        """Return the values for a scan, as an array whose shape the caller cannot change.

        Raises
        ------
        InputError
            If the array that was passed has been given another shape since.
        """
        data = self._data
        array = data.view() if type(data) is np.ndarray else data
        self._check_form(array, self._pattern.nnz)
        if array.dtype.char not in "fd" or not array.dtype.isnative:
            _arrays.check_array(f"{type(self).__name__} data", array)
        return array

    def _check(self) -> None:
        """Raise for values that this class refuses."""

    @property
    def data(self) -> Any:
        """The values, in the order of the pattern; the array that was passed, if canonical."""
        return self._data

    @property
    def pattern(self) -> Pattern:
        """The pattern that all matrices share."""
        return self._pattern

    @property
    def indices(self) -> NDArray[np.integer[Any]]:
        """Column indices of the pattern, shape ``(nnz,)``."""
        return self._pattern.indices

    @property
    def indptr(self) -> NDArray[np.integer[Any]]:
        """Row pointers of the pattern, shape ``(rows + 1,)``."""
        return self._pattern.indptr

    @property
    def shape(self) -> tuple[int, int]:
        """Shape ``(rows, cols)`` of one matrix."""
        return self._pattern.shape

    @property
    def nnz(self) -> int:
        """Stored entries of one matrix."""
        return self._pattern.nnz

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        dtype: np.dtype[Any] = self._data.dtype
        return dtype


class BatchedCSR(SharedPattern):
    """One CSR pattern with values for each sample of a batch.

    Parameters
    ----------
    data : array_like of float32 or float64, shape (batch, nnz)
        Values of every sample.
    indices : array_like of int, shape (nnz,)
        Column indices.
    indptr : array_like of int, shape (rows + 1,)
        Row pointers.
    shape : tuple of int
        ``(rows, cols)`` of one matrix.

    Raises
    ------
    InputError
        If the arrays are no CSR structure or their sizes do not agree.
    InputTypeError
        If a dtype is not supported.

    Notes
    -----
    Rows with unsorted or duplicate columns are made canonical (sorted, duplicates summed) on a
    copy. The index arrays are copied; canonical values are not.

    The values may lie on a CUDA device, as an array of CuPy, or of any library that has
    ``__cuda_array_interface__``. So may the index arrays, which are checked there; this waits for
    the device, but not for arrays that were checked before: write nothing else into those.

    Examples
    --------
    >>> import numpy as np, sparsescan
    >>> relu = sparsescan.BatchedCSR(np.ones((16, 3)), [0, 1, 2], [0, 1, 2, 3], (3, 3))
    >>> relu
    BatchedCSR((3, 3), batch=16, nnz=3, float64)
    """

    _forms: ClassVar = {2: "(batch, nnz)"}

    @property
    def batch(self) -> int:
        """Number of samples."""
        return len(self._data)

    def __getitem__(self, sample: int) -> Any:
        """Return one sample as a sparse array of SciPy or CuPy that shares the values."""
        return as_csr(self._data[sample], self._pattern)

    def __repr__(self) -> str:
        return f"BatchedCSR({self.shape}, batch={self.batch}, nnz={self.nnz}, {self.dtype})"


class CSRChain(SharedPattern):
    """A chain whose steps all have one CSR pattern: values for each step, and maybe each sample.

    Parameters
    ----------
    data : array_like of float32 or float64, shape (n, nnz) or (n, batch, nnz)
        Values of every step, from the LAST layer to the first. A reversed view such as ``J[::-1]``
        of time-ordered values is used as it is, without a copy.
    indices : array_like of int, shape (nnz,)
        Column indices.
    indptr : array_like of int, shape (rows + 1,)
        Row pointers.
    shape : tuple of int
        ``(rows, cols)`` of one Jacobian; more than one step needs ``rows == cols``.

    Raises
    ------
    InputError
        If the arrays are no CSR structure, their sizes do not agree, or the steps do not chain.
    InputTypeError
        If a dtype is not supported.

    Notes
    -----
    Rows with unsorted or duplicate columns are made canonical (sorted, duplicates summed) on a
    copy. The index arrays are copied; canonical values are not.

    The values may lie on a CUDA device, as an array of CuPy, or of any library that has
    ``__cuda_array_interface__``. So may the index arrays, which are checked there; this waits for
    the device, but not for arrays that were checked before: write nothing else into those.

    Examples
    --------
    >>> import numpy as np, sparsescan
    >>> chain = sparsescan.CSRChain(np.ones((100, 4)), [0, 0, 1, 1], [0, 1, 3, 4], (3, 3))
    >>> chain
    CSRChain((3, 3), n=100, nnz=4, float64)
    >>> sparsescan.exclusive_scan(np.ones(3), chain).shape
    (100, 3)
    """

    _forms: ClassVar = {2: "(n, nnz)", 3: "(n, batch, nnz)"}

    @classmethod
    def from_pattern(cls, data: Any, pattern: Pattern | Sequence[Pattern]) -> Any:
        """Return a chain of values in the order of one pattern, or of several that take turns.

        Parameters
        ----------
        data : array_like, or sequence of array_like
            The values, as for the class; the last axis has length ``pattern.nnz``. For a list of
            patterns, a list with the values of all Jacobians of each pattern: ``(steps, nnz)`` or
            ``(steps, batch, nnz)``, or ``(nnz,)`` if all steps and samples share them.
        pattern : Pattern, or sequence of Pattern
            The pattern; or the patterns of one step, from its last layer to the first.

        Returns
        -------
        CSRChain or PeriodicChain
            A :class:`.PeriodicChain` if `pattern` is a list.
        """
        if isinstance(pattern, list | tuple):
            return PeriodicChain(data, pattern)
        return super().from_pattern(data, pattern)  # type: ignore[arg-type]

    def _check(self) -> None:
        if len(self) > 1 and self.shape[0] != self.shape[1]:
            raise InputError(
                f"CSRChain has {len(self)} steps of shape {self.shape}; expected a square shape, "
                "so that they chain"
            )

    @property
    def batch(self) -> int | None:
        """Number of samples, or None if the values have no batch axis."""
        return self._data.shape[1] if self._data.ndim == 3 else None

    def __len__(self) -> int:
        return len(self._data)

    def __repr__(self) -> str:
        batch = "" if self.batch is None else f", batch={self.batch}"
        return f"CSRChain({self.shape}, n={len(self)}{batch}, nnz={self.nnz}, {self.dtype})"


class PeriodicChain(Frozen):
    """A chain in which a few patterns take turns, such as the layers of every time step.

    ``CSRChain.from_pattern(values, patterns)`` makes it.

    Parameters
    ----------
    values : sequence of array_like of float32 or float64
        For each pattern the values of all its Jacobians, from the LAST step to the first:
        ``(steps, nnz)`` or ``(steps, batch, nnz)``; or ``(nnz,)``, if all steps and samples share
        them. At least one must have an axis of steps.
    patterns : sequence of Pattern
        The patterns of one step, from its last layer to the first.

    Attributes
    ----------
    values : list of ndarray
        The arrays that were passed.
    patterns : list of Pattern
        The patterns of one step.
    steps : int
        How often the patterns take turns.
    batch : int or None
        Number of samples, or None if no values have a batch axis.

    Raises
    ------
    InputError
        If sizes do not agree, or the Jacobians do not chain.
    InputTypeError
        If a type or a dtype is not supported.

    Notes
    -----
    A scan returns a list with one array ``(steps, …)`` per pattern, of the gradients that its
    Jacobians are applied to. In an inclusive scan the first array has one more gradient.
    `local_grads` are a list of the same form; the entry of a pattern may be None. With one pattern
    only, a scan treats the chain as a :class:`sparsescan.CSRChain`.

    Examples
    --------
    >>> import numpy as np, sparsescan
    >>> from sparsescan import CSRChain, Pattern
    >>> slopes, weight = np.full((100, 2), 0.5), np.array([0.0, 1.0, 1.0, 0.0])
    >>> patterns = [Pattern.diagonal(2), Pattern.dense((2, 2))]
    >>> chain = CSRChain.from_pattern([slopes, weight], patterns)
    >>> chain
    PeriodicChain((2, 2), (2, 2); steps=100, float64)
    >>> after, inside = sparsescan.exclusive_scan([1.0, 2.0], chain)
    >>> after.shape, inside.shape, after[1], inside[1]
    ((100, 2), (100, 2), array([1. , 0.5]), array([0.5 , 0.25]))
    """

    steps: int
    batch: int | None

    def __init__(self, values: Sequence[ArrayLike], patterns: Sequence[Pattern]) -> None:
        turns: list[Pattern] = []
        for j, pattern in enumerate(entries_of("patterns", patterns)):
            if not isinstance(pattern, Pattern):
                raise InputTypeError(
                    f"patterns[{j}] is a {type(pattern).__name__}; expected a Pattern"
                )
            turns.append(pattern)
        arrays = list(itertools.islice(entries_of("values", values), len(turns) + 1))
        if not turns or len(arrays) != len(turns):
            raise InputError(
                f"values has {len(values)} arrays and patterns has {len(turns)}; expected as many, "
                "at least one"
            )
        arrays = [_arrays.check_array(f"values[{j}]", array) for j, array in enumerate(arrays)]
        views = _views(arrays)
        known: dict[str, tuple[int, int]] = {}  # sizes, and the array that says so
        for j, (array, pattern) in enumerate(zip(views, turns, strict=True)):
            if array.ndim not in (1, 2, 3) or array.shape[-1] != pattern.nnz:
                raise InputError(
                    f"values[{j}] has shape {array.shape}; expected (nnz,), (steps, nnz) or "
                    f"(steps, batch, nnz) with nnz = {pattern.nnz}"
                )
            for axis, size in zip(("steps", "batch"), array.shape[:-1], strict=False):
                first, expected = known.setdefault(axis, (j, size))
                if size != expected:
                    raise InputError(
                        f"values[{j}] has shape {array.shape}; expected {axis} = {expected}, as "
                        f"values[{first}] has"
                    )
        if "steps" not in known or known["steps"][1] == 0:
            raise InputError(
                "values has no steps, or only arrays that all steps share; expected an array of "
                "shape (steps, nnz) or (steps, batch, nnz)"
            )
        rows = [pattern.shape[0] for pattern in turns]
        for j, pattern in enumerate(turns):
            # The first one follows the last, which is rows[-1], in the next step.
            if pattern.shape[1] != rows[j - 1]:
                raise InputError(
                    f"patterns[{j}] has shape {pattern.shape}; expected (·, {rows[j - 1]}), as the "
                    f"Jacobian before it has {rows[j - 1]} rows"
                )
        self._values, self._patterns = arrays, turns
        self._shapes = [array.shape for array in views]
        self._set(steps=known["steps"][1], batch=known["batch"][1] if "batch" in known else None)

    @property
    def values(self) -> list[Any]:
        """Return the arrays that were passed, one for each pattern."""
        return list(self._values)

    @property
    def patterns(self) -> list[Pattern]:
        """Return the patterns of one step."""
        return list(self._patterns)

    def read(self) -> list[Any]:
        """Return the values for a scan, as arrays whose shape the caller cannot change.

        Raises
        ------
        InputError
            If an array that was passed has been given another shape since.
        """
        views = _views(self._values)
        for j, (array, shape) in enumerate(zip(views, self._shapes, strict=True)):
            if array.shape != shape:
                raise InputError(f"values[{j}] has shape {array.shape} now; expected {shape}")
        return views

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype that all values promote to."""
        return np.result_type(*(array.dtype for array in self._values))

    def __len__(self) -> int:
        return self.steps * len(self._patterns)

    def __repr__(self) -> str:
        shapes = ", ".join(str(pattern.shape) for pattern in self._patterns)
        batch = "" if self.batch is None else f", batch={self.batch}"
        return f"PeriodicChain({shapes}; steps={self.steps}{batch}, {self.dtype})"


def _views(arrays: Sequence[Any]) -> list[Any]:
    return [read_array(f"values[{j}]", array) for j, array in enumerate(arrays)]


def entries_of(name: str, given: Any) -> Iterator[Any]:
    """Yield the entries of a sequence, or raise an error that names it."""
    is_sequence = isinstance(given, (Sequence, np.ndarray)) or _arrays.is_cupy(given)
    if not is_sequence or isinstance(given, (str, bytes)):
        raise InputTypeError(f"{name} is {short(given)}; expected a list")
    _arrays.check_no_mask(name, given)
    gave = 0
    try:
        count, left = len(given), iter(given)
        while (entry := next(left, _END)) is not _END and gave <= count:
            gave += 1
            yield entry
    except Exception as error:  # of a 0-d array, or of a caller's own class
        raise InputTypeError(f"{name} cannot be read: {error}") from None
    if gave != count:
        raise InputError(f"{name} gave other than {count} entries; expected {count}, its length")


def check_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return `dtype` if it is float32 or float64, or raise an error that names it."""
    try:
        # NumPy would also take the dtype of any object that has one.
        if not isinstance(dtype, (str, type, np.dtype)):
            raise TypeError
        chosen = np.dtype(dtype)
    except Exception:  # of NumPy, which reads strings, lists, dicts and attributes
        raise InputTypeError(f"dtype is {short(dtype)}; expected float32 or float64") from None
    if chosen not in (np.float32, np.float64):
        raise InputTypeError(f"dtype is {chosen!s:.100}; expected float32 or float64")
    return chosen


# Index arrays of patterns, with their copies on devices, as long as the patterns live.
_index_arrays: weakref.WeakKeyDictionary[Pattern, tuple[_arrays.Mirrored, _arrays.Mirrored]] = (
    weakref.WeakKeyDictionary()
)


def as_csr(values: Any, pattern: Pattern) -> Any:
    """Return a matrix of SciPy, or of CuPy on a device, that shares these values."""
    xp = _arrays.namespace(values)
    if pattern not in _index_arrays:
        _index_arrays[pattern] = (
            _arrays.Mirrored(pattern.indices),
            _arrays.Mirrored(pattern.indptr),
        )
    # Older versions of CuPy have no csr_array.
    csr = getattr(_arrays.sparse(xp), "csr_array", None) or _arrays.sparse(xp).csr_matrix
    with _arrays.beside(values):
        indices, indptr = (array.on(xp) for array in _index_arrays[pattern])
        if xp is np:
            return csr((values, indices, indptr), shape=pattern.shape)
        # CuPy's constructor waits for the device to read the last row's end, and a capture allows
        # no waiting. An empty matrix takes index arrays as they are.
        matrix = csr(pattern.shape)
        matrix.data, matrix.indices, matrix.indptr = values, indices, indptr
        return matrix


class CanonicalOrder:
    """The order that takes entries of a CSR matrix, as they were passed, to those of a pattern.

    Parameters
    ----------
    indptr, indices : ndarray
        Index arrays that are safe to follow, and are not shared with the caller.
    shape : tuple of int
        ``(rows, cols)``.

    Attributes
    ----------
    pattern : Pattern
        Where the entries are.
    size : int
        Number of entries that were passed.
    """

    def __init__(self, indptr: NDArray[Any], indices: NDArray[Any], shape: tuple[int, int]) -> None:
        self.size = len(indices)
        # The order of the entries row by row, with sorted columns; None if they are sorted.
        self._order: NDArray[np.intp] | None = None
        if _pattern.unsorted_row(indptr, indices) >= 0:
            row_of = np.repeat(np.arange(shape[0]), np.diff(indptr))
            self._order = np.lexsort((indices, row_of))
            rows, cols = row_of[self._order], indices[self._order]
            new = np.ones(len(rows), bool)
            new[1:] = (rows[1:] != rows[:-1]) | (cols[1:] != cols[:-1])
            # The first entry of each place.
            self._starts = np.flatnonzero(new)
            indices = cols[new]
            indptr = _pattern.indptr_of(rows[new], shape[0])
        self.pattern = _pattern.trusted(indptr, indices, shape)

    def values(self, data: Any) -> Any:
        """Return `data` in the order of the pattern, with values that share a place summed."""
        if self._order is None:
            return data
        if not _arrays.is_cupy(data):
            return np.add.reduceat(data[..., self._order], self._starts, axis=-1)
        # CuPy's reduceat takes differences of a running sum, which cancel.
        xp = _arrays.namespace(data)
        counts = np.diff(self._starts, append=self.size)
        with _arrays.beside(data):
            sums = xp.take(data, xp.asarray(self._order[self._starts]), axis=-1)
            for k in range(1, counts.max()):
                more = np.flatnonzero(counts > k)
                terms = xp.take(data, xp.asarray(self._order[self._starts[more] + k]), axis=-1)
                sums[..., xp.asarray(more)] += terms
        return sums


# Orders of index arrays on devices, by the ids of the two arrays and the shape. Weak references
# tell whether an id still belongs to the same array.
_orders: dict[Any, tuple[weakref.ref[Any], weakref.ref[Any], CanonicalOrder]] = {}


def canonical_order(name: str, indptr: Any, indices: Any, shape: tuple[int, int]) -> CanonicalOrder:
    """Return the order that index arrays describe, or raise an error.

    Arrays on a device are checked there the first time; that call waits for the device.
    """
    there = is_on_device(indptr), is_on_device(indices)
    if there != (True, True):
        if there[0]:
            indptr = _arrays.on_device(indptr, f"{name} indptr").get()
        if there[1]:
            indices = _arrays.on_device(indices, f"{name} indices").get()
        with Allocating(f"the pattern of {name}"):
            return CanonicalOrder(*_pattern.check_index_arrays(name, indptr, indices, shape), shape)
    key = id(indptr), id(indices), shape
    known = _orders.get(key)
    if known is not None and known[0]() is indptr and known[1]() is indices:
        return known[2]
    order = CanonicalOrder(*_check_on_device(name, indptr, indices, shape), shape)

    def forget(_: object) -> None:
        _orders.pop(key, None)

    _orders[key] = weakref.ref(indptr, forget), weakref.ref(indices, forget), order
    return order


def _check_on_device(
    name: str, indptr: Any, indices: Any, shape: tuple[int, int]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return copies in host memory of safe index arrays on a device; or raise an error."""
    from ..kernels.cuda.checks import is_safe

    indptr, indices = (
        _arrays.on_device(indptr, f"{name} indptr"),
        _arrays.on_device(indices, f"{name} indices"),
    )
    place = _arrays.device_of(indptr)
    _arrays.check_one_place(f"{name} indices", _arrays.device_of(indices), f"{name} indptr", place)
    with _arrays.beside(indptr):
        indptr = _pattern.check_index_form(name, "indptr", indptr)
        indices = _pattern.check_index_form(name, "indices", indices)
        # The copies are checked and followed, since the caller's arrays may change meanwhile.
        # Unsigned integers beyond int64 become negative, which the check refuses.
        wide = np.int32 if indptr.dtype == indices.dtype == np.dtype(np.int32) else np.int64
        pointers, columns = (
            _arrays.contiguous(array, np.dtype(wide)).copy() for array in (indptr, indices)
        )
        _pattern.check_row_pointers(name, pointers, shape)
        if is_safe(pointers, columns, shape[1]):
            return pointers.get(), columns.get()
        # Errors have the same words as for arrays of the host.
        return _pattern.check_index_arrays(name, indptr.get(), indices.get(), shape)


def as_matrix(values: Any, pattern: Pattern) -> Any:
    """Return values ``(nnz,)`` as a CSR array, ``(batch, nnz)`` as a BatchedCSR."""
    if values.ndim == 2:
        return BatchedCSR.from_pattern(values, pattern)
    return as_csr(values, pattern)
