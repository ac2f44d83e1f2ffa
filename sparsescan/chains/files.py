"""Chains on disk: an ``.npz`` file, never pickle; and what files of plans share with them.

Version 1 of the format has a handful of arrays, however long the chain is:

==================  ==============================================================================
``version``         int, 1
``layout``          ``"list"``, ``"csr_chain"``, ``"periodic"`` or ``"dense_stack"``
``grad``            the gradient at the end of the chain
``patterns``        int (p, 3): kind (0 general, 1 diagonal, 2 dense), rows and columns of each
                    pattern
``indptr``          int: the row pointers of all general patterns, one after the other
``indices``         int: their column indices
``stack``           the one array of a ``csr_chain`` or a ``dense_stack``
``stack_j``         the array of the j-th pattern of a ``periodic`` chain, from ``stack_0`` on
``steps``           int (n, 3), of a list: form (0 CSR, 1 CSR with a batch axis, 2 dense, 3 dense
                    with a batch axis), pattern and dtype (0 float32, 1 float64) of each Jacobian
``float32``         1-D: of a list the values of all Jacobians in float32, one after the other
``float64``         1-D: those in float64
==================  ==============================================================================

A Jacobian with a batch axis has the batch of ``grad``, so its size needs no place of its own.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from .. import errors
from ..arrays.arrays import device_of, read_array
from ..errors import ChainFileError, InputError, InputTypeError, short
from ..symbolic.pattern import Pattern
from .chain import Chain
from .containers import BatchedCSR, CSRChain, PeriodicChain
from .grads import read_grad
from .npz import check_members, map_arrays
from .reading import length, steps_of

_VERSION = 1
_KINDS = ("general", "diagonal", "dense")
_FORMS = ("csr", "batched_csr", "dense", "batched_dense")
_BATCHED = np.array([name.startswith("batched") for name in _FORMS])
_DTYPES = ("float32", "float64")
_REMEDY = "expected a file written by sparsescan.save_chain"
# Rows of the table of steps that are read at once.
_ROWS = 1 << 16

Path = str | os.PathLike[str]


def save_chain(path: Path, grad: ArrayLike, jacobians: Any) -> None:
    """Write a chain to a file, in NumPy's ``.npz`` format and without pickle.

    Parameters
    ----------
    path : str or path-like
        The file, written under exactly this name; one that exists is replaced.
    grad : array_like of float32 or float64, shape (d_n,) or (batch, d_n)
        Gradient at the end of the chain.
    jacobians : sequence, CSRChain, PeriodicChain or ndarray
        The transposed Jacobians, from the LAST layer to the first, as for
        :func:`sparsescan.exclusive_scan`. They are checked as there.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`sparsescan.exclusive_scan`; nothing is written then.
    OSError
        If the file cannot be written.

    See Also
    --------
    load_chain : The way back.

    Notes
    -----
    Each pattern is stored once. Rows with unsorted or duplicate columns are stored in canonical
    form, big-endian values in native byte order.

    Examples
    --------
    >>> import numpy as np, sparsescan, tempfile, os
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "chain.npz")
    ...     sparsescan.save_chain(path, [1.0, 2.0], np.full((3, 2, 2), 0.5))
    ...     sparsescan.load_chain(path)[1].shape
    (3, 2, 2)
    """
    path, jacobians = check_path(path), steps_of(jacobians)
    chain = Chain(length(jacobians))
    patterns = chain.read(jacobians)
    first = read_grad(grad, patterns[0].shape[1] if patterns else None, chain.batch)
    for name, device in (("jacobians", chain.device), ("grad", device_of(first))):
        if device is not None:
            raise errors.DeviceError(
                f"{name} is on device {device}; expected host memory (cupy.asnumpy, .get())"
            )
    arrays: dict[str, Any] = {"version": np.int64(_VERSION), "grad": first}
    if isinstance(jacobians, CSRChain):
        arrays |= {"layout": "csr_chain", "stack": jacobians.read()}
        arrays |= pack_patterns([jacobians.pattern])
    elif isinstance(jacobians, PeriodicChain):
        arrays |= {"layout": "periodic"} | pack_patterns(jacobians.patterns)
        arrays |= {f"stack_{j}": array for j, array in enumerate(jacobians.read())}
    elif isinstance(jacobians, np.ndarray):
        arrays |= {"layout": "dense_stack", "stack": read_array("jacobians", jacobians)}
    else:
        unique = list(dict.fromkeys(patterns))
        arrays |= {"layout": "list"} | pack_patterns(unique)
        arrays |= _pack_steps(jacobians, patterns, unique, chain.values)
    write_arrays(path, arrays)


def load_chain(path: Path) -> tuple[NDArray[np.floating[Any]], Any]:
    """Read a chain that :func:`save_chain` has written.

    Parameters
    ----------
    path : str or path-like
        The file.

    Returns
    -------
    grad : ndarray, shape (d_n,) or (batch, d_n)
        Gradient at the end of the chain.
    jacobians : list, CSRChain, PeriodicChain or ndarray
        The Jacobians that were saved, with the same dtypes and the same bits: a list of
        ``csr_array``, :class:`BatchedCSR` and dense arrays, a :class:`CSRChain`, or one dense
        array. The values of a list are views of one buffer, and matrices of one pattern share
        read-only index arrays.

    Raises
    ------
    ChainFileError
        If the file is damaged or something else. It is a :class:`ValueError`.
    OSError
        If the file cannot be opened, such as :class:`FileNotFoundError`.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsescan, tempfile, os
    >>> relu = sp.diags_array([1.0, 0.0, 1.0]).tocsr()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "chain.npz")
    ...     sparsescan.save_chain(path, [1.0, 2.0, 3.0], [relu, relu])
    ...     grad, jacobians = sparsescan.load_chain(path)
    >>> sparsescan.exclusive_scan(grad, jacobians)
    [array([1., 2., 3.]), array([1., 0., 3.])]
    """
    path = check_path(path)
    with open(path, "rb") as file, refusing(path, ChainFileError, _REMEDY):
        steps = _unpack(read_arrays(file))
        return steps.grad, steps.whole()


class ChainFile:
    """A chain that :func:`save_chain` has written, to be read in parts; a context manager.

    Parameters
    ----------
    path : str or path-like
        The file.

    Attributes
    ----------
    n : int
        Number of Jacobians.
    grad : ndarray, shape (d_n,) or (batch, d_n)
        Gradient at the end of the chain.
    dtype : dtype
        What the Jacobians and the gradient promote to.
    period : int
        1 for a chain in one array, 0 for a list; else the number of patterns that take turns.

    Raises
    ------
    ChainFileError, OSError
        As :func:`load_chain`; its methods, too.

    Notes
    -----
    The file is mapped into memory, so that a part takes memory for itself only; arrays that are
    compressed are extracted to temporary files first. Only :meth:`check` reads checksums.

    Examples
    --------
    >>> import numpy as np, sparsescan, tempfile, os
    >>> from sparsescan.chains.files import ChainFile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "chain.npz")
    ...     sparsescan.save_chain(path, [1.0], np.arange(100.0).reshape(100, 1, 1))
    ...     with ChainFile(path) as file:
    ...         file.n, file.part(50, 52).tolist()
    (100, [[[50.0]], [[51.0]]])
    """

    def __init__(self, path: Path) -> None:
        self._path = path = check_path(path)
        self._file = open(path, "rb")  # noqa: SIM115
        try:
            with refusing(path, ChainFileError, _REMEDY):
                self._steps = steps = _unpack(Arrays(map_arrays(self._file)))
                self.n, self.grad, self.period = steps.n, steps.grad, steps.period
                self.dtype: np.dtype[Any] = np.result_type(self.grad, *steps.dtypes())
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ChainFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def part(self, start: int, stop: int) -> Any:
        """Jacobians `start` to ``stop - 1``, in the form of the whole.

        Those of a chain of patterns that take turns are a list, of ``csr_array``,
        :class:`BatchedCSR` and, where the pattern is dense, arrays.
        """
        with refusing(self._path, ChainFileError, _REMEDY):
            return self._steps.part(start, stop)

    def shapes(self, start: int, stop: int) -> NDArray[np.int64]:
        """Rows and columns of those Jacobians, shape ``(stop - start, 2)``."""
        with refusing(self._path, ChainFileError, _REMEDY):
            return self._steps.shapes(start, stop)

    def check(self, share: int, shares: int) -> None:
        """Raise if a checksum is wrong, among every `shares`-th array from number `share` on."""
        with refusing(self._path, ChainFileError, _REMEDY), zipfile.ZipFile(self._file) as archive:
            check_members(archive, archive.infolist()[share::shares])


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays to a file of exactly this name."""
    # np.savez would append .npz to a name without it.
    with open(path, "wb") as file, errors.Allocating(f"the file {os.fspath(path)!r}"):
        np.savez(file, allow_pickle=False, **arrays)


def check_path(path: Any) -> Path:
    """Return the name of a file, or raise an error: open() also takes numbers of open files."""
    try:
        name: str | bytes = os.fspath(path)
    except Exception:  # of what is no path
        raise InputTypeError(f"path is {short(path)}; expected a str or a path-like") from None
    if isinstance(name, bytes):
        name = os.fsdecode(name)
    if "\0" in name:
        raise InputError(f"path is {short(name)}; expected a name without a null character")
    return name


@contextmanager
def refusing(path: Path, refusal: type[InputError], remedy: str) -> Iterator[None]:
    """Turn whatever is wrong with a file into one kind of error, which names the file."""
    try:
        yield
    except errors.SparseScanError as error:
        raise refusal(f"{os.fspath(path)}: {error}; {remedy}") from None
    except Exception as error:
        # Whatever the readers of zip and .npy stumble over, from BadZipFile to MemoryError.
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise refusal(
            f"{os.fspath(path)} is no .npz file, or a damaged one ({what}); {remedy}"
        ) from error


def pack_patterns(patterns: Sequence[Pattern]) -> dict[str, NDArray[Any]]:
    """Return the arrays that hold different patterns; :func:`unpack_patterns` is the way back."""
    # Without entries nothing else in the file would bound the size of a dense pattern.
    kinds = [pattern.kind if pattern.nnz else "general" for pattern in patterns]
    general = [p for p, kind in zip(patterns, kinds, strict=True) if kind == "general"]
    table = [(_KINDS.index(kind), *p.shape) for p, kind in zip(patterns, kinds, strict=True)]
    none = np.empty(0, np.int32)
    return {
        "patterns": np.array(table, np.int64).reshape(-1, 3),
        "indptr": np.concatenate([none, *[pattern.indptr for pattern in general]]),
        "indices": np.concatenate([none, *[pattern.indices for pattern in general]]),
    }


def _pack_steps(
    jacobians: Sequence[Any],
    patterns: Sequence[Pattern],
    unique: Sequence[Pattern],
    all_values: Sequence[NDArray[Any]],
) -> dict[str, NDArray[Any]]:
    number = {pattern: p for p, pattern in enumerate(unique)}
    steps = np.empty((len(jacobians), 3), np.int64)
    values_of: dict[str, list[NDArray[Any]]] = {name: [] for name in _DTYPES}
    for k, (jacobian, pattern, values) in enumerate(
        zip(jacobians, patterns, all_values, strict=True)
    ):
        sparse = sp.issparse(jacobian) or isinstance(jacobian, BatchedCSR)
        form = ("" if values.ndim == 1 else "batched_") + ("csr" if sparse else "dense")
        name = values.dtype.name
        steps[k] = _FORMS.index(form), number[pattern], _DTYPES.index(name)
        values_of[name].append(values.ravel())
    packed = {
        name: np.concatenate([np.empty(0, name), *values]) for name, values in values_of.items()
    }
    return {"steps": steps, **packed}


class Arrays:
    """The arrays of a file; an :class:`InputError` for one that is missing or of a wrong type."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = {key: a for key, a in arrays.items() if isinstance(a, np.ndarray)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __getitem__(self, key: str) -> NDArray[Any]:
        if key not in self._arrays:
            raise InputError(f"the key {key!r} is missing")
        return self._arrays[key]

    def integers(self, key: str, *columns: int) -> NDArray[np.integer[Any]]:
        """Get the array `key`, of integers, shape ``(m, *columns)``."""
        array = self[key]
        wanted = (len(array) if array.ndim else 0, *columns)
        if array.dtype.kind not in "iu" or array.shape != wanted:
            expected = ", ".join(["·", *map(str, columns)])
            raise InputError(
                f"{key} has dtype {array.dtype} and shape {array.shape}; "
                f"expected integers ({expected})"
            )
        return array

    def floats(self, key: str) -> NDArray[np.floating[Any]]:
        """Get the array `key`, of float32 or float64, in the byte order of the file."""
        array = self[key]
        if array.dtype.newbyteorder("=").name not in _DTYPES:
            raise InputError(f"{key} has dtype {array.dtype}; expected float32 or float64")
        return array

    def scalar(self, key: str, kinds: str, what: str) -> Any:
        """Get the array `key`, one element of the dtype kinds `kinds`."""
        array = self[key]
        if array.dtype.kind not in kinds or array.ndim != 0:
            raise InputError(
                f"{key} has dtype {array.dtype} and shape {array.shape}; expected {what}"
            )
        return array.item()


def read_arrays(file: Any) -> Arrays:
    """Read the arrays of an open file; raise if any byte of them is damaged."""
    # Reading an array with a damaged header may stop before the end, where zip checks its sum.
    with zipfile.ZipFile(file) as archive:
        check_members(archive, archive.infolist())
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        return Arrays(dict(arrays))


def _in_memory(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in native byte order: a copy of one that is mapped, and so read-only."""
    native = array.dtype.newbyteorder("=")
    return array.astype(native, order="C", copy=not array.flags.writeable)


def _unpack(arrays: Arrays) -> _StoredSteps:
    version = arrays.scalar("version", "iu", "one integer")
    if version != _VERSION:
        raise InputError(f"version is {version}; expected {_VERSION}, the format known here")
    layout = arrays.scalar("layout", "U", "one string")
    grad = _in_memory(arrays.floats("grad"))
    if layout in ("csr_chain", "periodic", "dense_stack"):
        return _Stacks(arrays, grad, layout)
    if layout == "list":
        return _List(arrays, grad)
    raise InputError(
        f"layout is {layout!r}; expected 'list', 'csr_chain', 'periodic' or 'dense_stack'"
    )


class _StoredSteps:
    """The Jacobians of a file, whose arrays are in memory or mapped.

    Attributes
    ----------
    n, grad, period
        As :class:`ChainFile` has them.
    """

    n: int
    period: int

    def __init__(self, grad: NDArray[np.floating[Any]]) -> None:
        self.grad = grad

    def whole(self) -> Any:
        """Read all of them, in the form in which they were saved."""
        return self.part(0, self.n)

    def part(self, start: int, stop: int) -> Any:
        """Read and check some of them."""
        jacobians = self._read(start, stop)
        self._check(jacobians, start)
        return jacobians

    def shapes(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the rows and columns of some of them."""
        raise NotImplementedError

    def dtypes(self) -> set[np.dtype[Any]]:
        """Return the dtypes of their values."""
        raise NotImplementedError

    def _read(self, start: int, stop: int) -> Any:
        raise NotImplementedError

    def _check(self, jacobians: Any, start: int = 0) -> None:
        chain = Chain(length(jacobians))
        patterns = chain.read(jacobians)
        size = patterns[0].shape[1] if patterns and start == 0 else None
        read_grad(self.grad, size, chain.batch)


class _Stacks(_StoredSteps):
    """Jacobians in an array for each of the patterns that take turns, of which there may be one."""

    def __init__(self, arrays: Arrays, grad: NDArray[np.floating[Any]], layout: str) -> None:
        super().__init__(grad)
        self._layout = layout
        self._patterns = [] if layout == "dense_stack" else unpack_patterns(arrays)
        if layout == "periodic":
            self._values = [arrays.floats(f"stack_{j}") for j in range(len(self._patterns))]
            # It is checked from shapes alone.
            hollow = [np.broadcast_to(np.zeros((), float), a.shape) for a in self._values]
            self.n = len(PeriodicChain(hollow, self._patterns))
        else:
            if layout == "csr_chain" and len(self._patterns) != 1:
                raise InputError(
                    f"patterns has {len(self._patterns)} rows; expected 1 for a csr_chain"
                )
            stack, axes = arrays.floats("stack"), 2 if self._patterns else 3
            if stack.ndim not in (axes, axes + 1):
                raise InputError(
                    f"stack has shape {stack.shape}; expected {axes} axes, or {axes + 1} with "
                    "the batch"
                )
            self._values, self.n = [stack], len(stack)
        self.period = len(self._values)

    def whole(self) -> Any:
        if self._layout != "periodic":
            return super().whole()
        jacobians = PeriodicChain(list(map(_in_memory, self._values)), self._patterns)
        self._check(jacobians)
        return jacobians

    def shapes(self, start: int, stop: int) -> NDArray[np.int64]:
        shapes = [pattern.shape for pattern in self._patterns] or [self._values[0].shape[-2:]]
        return np.array(shapes, np.int64)[np.arange(start, stop) % self.period]

    def dtypes(self) -> set[np.dtype[Any]]:
        return {array.dtype for array in self._values} if self.n else set()

    def _read(self, start: int, stop: int) -> Any:
        # How often each pattern has its turn before the part, and up to the end of the part.
        before, until = (
            [len(range(turn, end, self.period)) for turn in range(self.period)]
            for end in (start, stop)
        )
        values = [
            _in_memory(array if array.ndim == 1 else array[first:last])
            for array, first, last in zip(self._values, before, until, strict=True)
        ]
        if self._layout == "dense_stack":
            return values[0]
        if self._layout == "csr_chain":
            return CSRChain.from_pattern(values[0], self._patterns[0])
        jacobians = []
        for k in range(start, stop):
            step, turn = divmod(k, self.period)
            pattern, own = self._patterns[turn], values[turn]
            if own.ndim > 1:
                own = own[step - before[turn]]
            form = ("" if own.ndim == 1 else "batched_") + (
                "dense" if pattern.kind == "dense" else "csr"
            )
            jacobians.append(_jacobian(k, form, pattern, own, own.shape[:-1]))
        return jacobians


class _List(_StoredSteps):
    """Jacobians whose values lie one after the other, in an array for each dtype."""

    period = 0

    def __init__(self, arrays: Arrays, grad: NDArray[np.floating[Any]]) -> None:
        super().__init__(grad)
        self._patterns = _Patterns(arrays)
        self._steps = arrays.integers("steps", 3)
        self.n = len(self._steps)
        self._values = [arrays.floats(name) for name in _DTYPES]
        for name, array in zip(_DTYPES, self._values, strict=True):
            if array.dtype.name != name or array.ndim != 1:
                raise InputError(
                    f"{name} has dtype {array.dtype} and shape {array.shape}; expected {name} (·)"
                )

    def shapes(self, start: int, stop: int) -> NDArray[np.int64]:
        blocks = [self._patterns.table[steps[:, 1], 1:] for steps in self._blocks(start, stop)]
        return np.concatenate([np.empty((0, 2), np.int64), *blocks])

    def dtypes(self) -> set[np.dtype[Any]]:
        used = {index for steps in self._blocks(0, self.n) for index in set(steps[:, 2].tolist())}
        return {np.dtype(_DTYPES[index]) for index in used}

    def _blocks(self, start: int, stop: int) -> Iterator[NDArray[np.integer[Any]]]:
        """Yield blocks of rows of the table of steps, checked."""
        counts = len(_FORMS), len(self._patterns), len(_DTYPES)
        for first in range(start, stop, _ROWS):
            steps = self._steps[first : min(first + _ROWS, stop)]
            for column, count in enumerate(counts):
                for index in {steps[:, column].min(), steps[:, column].max()}:
                    check_index(f"steps[:, {column}]", int(index), count)
            batched = np.flatnonzero(_BATCHED[steps[:, 0]])
            if len(batched) and self.grad.ndim != 2:
                raise InputError(
                    f"steps[{first + batched[0]}] has a batch; expected grad of shape (batch, ·)"
                )
            yield steps

    def _size(self, form: int, p: int) -> int:
        return self._patterns.nnz[p] * (len(self.grad) if _BATCHED[form] else 1)

    def _entries(self, start: int, stop: int) -> list[int]:
        """Count the values of each dtype that some steps have."""
        counts = [0] * len(_DTYPES)
        for steps in self._blocks(start, stop):
            for form, p, dtype in steps.tolist():
                counts[dtype] += self._size(form, p)
        return counts

    def _read(self, start: int, stop: int) -> list[Any]:
        steps = [row for block in self._blocks(start, stop) for row in block.tolist()]
        patterns = self._patterns.make({p for _, p, _ in steps})
        before, own = self._entries(0, start), self._entries(start, stop)
        values = []
        for name, array, first, count in zip(_DTYPES, self._values, before, own, strict=True):
            values.append(_in_memory(array[first : first + count]))
            check_used(name, first + len(values[-1]), first + count)
        ends = [0] * len(_DTYPES)
        jacobians = []
        for k, (form, p, dtype) in enumerate(steps, start):
            first, ends[dtype] = ends[dtype], ends[dtype] + self._size(form, p)
            batch_shape = self.grad.shape[:1] if _BATCHED[form] else ()
            part = values[dtype][first : ends[dtype]]
            jacobians.append(_jacobian(k, _FORMS[form], patterns[p], part, batch_shape))
        after = self._entries(stop, self.n)
        for name, array, *counts in zip(_DTYPES, self._values, before, own, after, strict=True):
            check_used(name, len(array), sum(counts))
        return jacobians


class _Patterns:
    """The patterns in a file, of which only those that are asked for are read.

    Attributes
    ----------
    table : ndarray of int, shape (p, 3)
        Kind, an index into ``_KINDS``, rows and columns of each.
    nnz : list of int
        Entries of each.
    """

    def __init__(self, arrays: Arrays) -> None:
        self._indptr, self._indices = arrays.integers("indptr"), arrays.integers("indices")
        self.table = arrays.integers("patterns", 3)
        self.nnz: list[int] = []
        # Where the index arrays of each start, and at last where all of them end.
        self._starts = [(0, 0)]
        for p, (kind, rows, cols) in enumerate(self.table.tolist()):
            check_index(f"patterns[{p}, 0]", kind, len(_KINDS))
            name = _KINDS[kind]
            if min(rows, cols) < (name != "general") or (name == "diagonal" and rows != cols):
                raise InputError(f"patterns[{p}] is {name} of shape {(rows, cols)}; that cannot be")
            row, entry = self._starts[-1]
            if name == "general":
                last = self._indptr[row + rows : row + rows + 1]
                # Pattern checks the rest, also that the last pointer is the number of indices.
                self.nnz.append(max(int(last[0]), 0) if len(last) else 0)
                row, entry = row + rows + 1, entry + self.nnz[-1]
            else:
                self.nnz.append(rows if name == "diagonal" else rows * cols)
            self._starts.append((row, entry))

    def __len__(self) -> int:
        return len(self.table)

    def make(self, numbers: Iterable[int]) -> dict[int, Pattern]:
        """Read some of them."""
        patterns = {}
        for p in sorted(numbers):
            kind, rows, cols = self.table[p].tolist()
            if _KINDS[kind] == "diagonal":
                patterns[p] = Pattern.diagonal(rows)
            elif _KINDS[kind] == "dense":
                patterns[p] = Pattern.dense((rows, cols))
            else:
                row, entry = self._starts[p]
                indptr = _in_memory(self._indptr[row : row + rows + 1])
                indices = _in_memory(self._indices[entry : entry + self.nnz[p]])
                patterns[p] = Pattern(indptr, indices, (rows, cols), name=f"patterns[{p}]")
        row_end, entry_end = self._starts[-1]
        check_used("indptr", len(self._indptr), row_end)
        check_used("indices", len(self._indices), entry_end)
        return patterns


def unpack_patterns(arrays: Arrays) -> list[Pattern]:
    """Read all patterns in a file."""
    patterns = _Patterns(arrays)
    return list(patterns.make(range(len(patterns))).values())


def _jacobian(
    k: int, form: str, pattern: Pattern, values: NDArray[Any], batch_shape: tuple[int, ...]
) -> Any:
    rows, cols = pattern.shape
    if form == "csr":
        return sp.csr_array((values, pattern.indices, pattern.indptr), shape=pattern.shape)
    if form == "batched_csr":
        return BatchedCSR.from_pattern(values.reshape(*batch_shape, pattern.nnz), pattern)
    if pattern.nnz != rows * cols:
        raise InputError(f"steps[{k}] is dense with {pattern}; expected every entry")
    return values.reshape(*batch_shape, rows, cols)


def check_index(what: str, value: int, count: int) -> None:
    """Raise unless `value` is one of 0 to ``count - 1``."""
    if not 0 <= value < count:
        raise InputError(f"{what} is {value}; expected 0 to {count - 1}")


def check_used(key: str, entries: int, expected: int) -> None:
    """Raise unless an array has as many entries as the rest of the file says."""
    if entries != expected:
        raise InputError(f"{key} has {entries} entries; expected {expected}")
