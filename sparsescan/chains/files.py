"""Chains on disk as NumPy's ``.npz`` archives, never pickle; and functions for files of plans.

Version 2 of the format. Jacobians of one form, pattern and dtype are a *group*. A chain in one
array is one group; a periodic chain has one group per pattern:

================= ================================================================================
``version``       int, 2
``layout``        ``"list"``, ``"csr_chain"``, ``"periodic"`` or ``"dense_stack"``
``grad``          the gradient at the end of the chain
``patterns``      int (p, 3): kind (0 general, 1 diagonal, 2 dense), rows and columns of each
``indptr_p``      int: the row pointers of pattern `p`, if it is a general one
``indices_p``     int: its column indices
``groups``        int (g, 4): pattern, form (0 sparse, 1 dense, 2 one value for all turns), dtype
                  (0 float32, 1 float64), and values of a block
``steps``         int (n,): the group of each Jacobian
``values_g_b``    float: block `b` of group `g`, of shape (count, nnz) or (count, batch, nnz), in
                  the order of the chain
================= ================================================================================

A block has about a megabyte, so that a rank that scans a part of a chain reads little else.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from .. import errors
from ..arrays.arrays import device_of, read_array
from ..checks import check_count
from ..errors import FileError, InputError, InputTypeError, short
from ..symbolic.pattern import Pattern
from .chain import Chain
from .containers import BatchedCSR, CSRChain, PeriodicChain
from .grads import read_grad
from .reading import length, steps_of

_VERSION = 2
_KINDS = ("general", "diagonal", "dense")
_LAYOUTS = ("list", "csr_chain", "periodic", "dense_stack")
_SPARSE, _DENSE, _SAME = range(3)
_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
_REMEDY = "expected a file written by sparsescan.save_chain"
# Bytes of a block of values.
_BLOCK = 1 << 20

Path = str | os.PathLike[str]
# Pattern, form and values of a group.
_Group = tuple[Pattern, int, NDArray[Any]]


# -- Writing --------------------------------------------------------------------------------------


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
        :func:`sparsescan.exclusive_scan`, and checked in the same way.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`sparsescan.exclusive_scan`; nothing is written then.
    OSError
        If the file cannot be written.

    See Also
    --------
    load_chain : Reads the file.

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
    groups: Sequence[_Group]
    steps: NDArray[Any] = np.zeros(len(patterns), np.uint8)
    if isinstance(jacobians, CSRChain):
        layout, groups = "csr_chain", [(jacobians.pattern, _SPARSE, jacobians.read())]
    elif isinstance(jacobians, PeriodicChain):
        layout, arrays = "periodic", jacobians.read()
        forms = [_SAME if array.ndim == 1 else _SPARSE for array in arrays]
        groups = list(zip(jacobians.patterns, forms, arrays, strict=True))
        steps = np.arange(len(patterns)) % len(groups)
    elif isinstance(jacobians, np.ndarray):
        array = read_array("jacobians", jacobians)
        *leading, rows, cols = array.shape
        flat = array.reshape(*leading, rows * cols)
        layout, groups = "dense_stack", [(Pattern.dense((rows, cols)), _DENSE, flat)]
    else:
        layout, (groups, steps) = "list", _grouped(jacobians, patterns, chain.values)
    write_arrays(path, {"layout": layout, "grad": first, "steps": steps} | _pack_groups(groups))


def _grouped(
    jacobians: Sequence[Any], patterns: Sequence[Pattern], all_values: Sequence[NDArray[Any]]
) -> tuple[list[_Group], NDArray[Any]]:
    """Return the groups of a list, and the group of each Jacobian."""
    values_of: dict[Any, list[NDArray[Any]]] = {}
    keys = []
    for jacobian, pattern, values in zip(jacobians, patterns, all_values, strict=True):
        is_sparse = sp.issparse(jacobian) or isinstance(jacobian, BatchedCSR)
        keys.append((pattern, _SPARSE if is_sparse else _DENSE, values.dtype, values.ndim))
        values_of.setdefault(keys[-1], []).append(values)
    number = {key: g for g, key in enumerate(values_of)}
    groups = [(pattern, form, np.stack(v)) for (pattern, form, *_), v in values_of.items()]
    return groups, np.array([number[key] for key in keys], np.min_scalar_type(len(number)))


def _pack_groups(groups: Sequence[_Group]) -> dict[str, NDArray[Any]]:
    unique = {pattern: p for p, pattern in enumerate(dict.fromkeys(group[0] for group in groups))}
    packed, table = pack_patterns(list(unique)), []
    for g, (pattern, form, given) in enumerate(groups):
        array = given[None] if form == _SAME else given
        size = max(_BLOCK // max(array.itemsize * math.prod(array.shape[1:]), 1), 1)
        table.append((unique[pattern], form, _DTYPES.index(array.dtype), size))
        for b, first in enumerate(range(0, max(len(array), 1), size)):
            packed[f"values_{g}_{b}"] = array[first : first + size]
    return packed | {"groups": np.array(table, np.int64).reshape(-1, 4)}


def pack_patterns(patterns: Sequence[Pattern]) -> dict[str, NDArray[Any]]:
    """Return the arrays that hold different patterns; :func:`unpack_patterns` is the way back."""
    packed, table = dict[str, NDArray[Any]](), []
    for p, pattern in enumerate(patterns):
        # Without entries, nothing else in the file would limit the size of a dense pattern.
        kind = pattern.kind if pattern.nnz else "general"
        table.append((_KINDS.index(kind), *pattern.shape))
        if kind == "general":
            packed |= {f"indptr_{p}": pattern.indptr, f"indices_{p}": pattern.indices}
    return packed | {"patterns": np.array(table, np.int64).reshape(-1, 3)}


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays, and the version of the format, to a file of exactly this name."""
    # np.savez would append .npz to a name without it.
    with open(path, "wb") as file, errors.Allocating(f"the file {os.fspath(path)!r}"):
        np.savez(file, allow_pickle=False, version=np.int64(_VERSION), **arrays)


def check_path(path: Any) -> Path:
    """Return the name of a file, or raise an error: open() also takes numbers of open files."""
    try:
        name: str | bytes = os.fspath(path)
    except Exception:  # not a path
        raise InputTypeError(f"path is {short(path)}; expected a str or a path-like") from None
    if isinstance(name, bytes):
        name = os.fsdecode(name)
    if "\0" in name:
        raise InputError(f"path is {short(name)}; expected a name without a null character")
    return name


# -- Reading --------------------------------------------------------------------------------------


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
        array. Values of one pattern are views of one buffer, and matrices of one pattern share
        read-only index arrays.

    Raises
    ------
    FileError
        If the file is damaged, is no chain, or is of sparsescan 0.2. It is a :class:`ValueError`.
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
    with open_chain(path) as file:
        return file.grad, file.whole()


@contextmanager
def open_chain(path: Path) -> Iterator[ChainFile]:
    """Open a chain that :func:`save_chain` has written, to be read in parts.

    Inside the ``with`` block, any fault of the file raises a :class:`FileError`.

    Examples
    --------
    >>> import numpy as np, sparsescan, tempfile, os
    >>> from sparsescan.chains.files import open_chain
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "chain.npz")
    ...     sparsescan.save_chain(path, [1.0], np.arange(100.0).reshape(100, 1, 1))
    ...     with open_chain(path) as file:
    ...         file.n, file.part(50, 52).tolist()
    (100, [[[50.0]], [[51.0]]])
    """
    with open_arrays(path, _REMEDY) as arrays:
        yield ChainFile(arrays)


@contextmanager
def open_arrays(path: Path, remedy: str) -> Iterator[Arrays]:
    """Open a file of arrays; any fault raises a :class:`FileError` that names the file."""
    path = check_path(path)
    with open(path, "rb") as file:
        try:
            yield Arrays(file)
        except errors.SparseScanError as error:
            raise FileError(f"{os.fspath(path)}: {error}; {remedy}") from None
        except Exception as error:
            # Readers of zip and .npy raise anything from BadZipFile to MemoryError.
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise FileError(
                f"{os.fspath(path)} is no .npz file, or a damaged one ({what}); {remedy}"
            ) from error


class Arrays:
    """The arrays of a file; a missing one, or a wrong type, raises an :class:`InputError`."""

    def __init__(self, file: Any) -> None:
        self._archive = zipfile.ZipFile(file)
        self._names = set(self._archive.namelist())
        version = self.scalar("version", "iu", "one integer")
        if version != _VERSION:
            by = ", the format of sparsescan 0.2: save it again with this release" * (version == 1)
            raise InputError(f"version is {version}{by}; expected {_VERSION}")

    def __contains__(self, key: str) -> bool:
        return f"{key}.npy" in self._names

    def __getitem__(self, key: str) -> NDArray[Any]:
        """Read an array, in native byte order; raise if any byte of it is damaged."""
        if key not in self:
            raise InputError(f"the key {key!r} is missing")
        with self._archive.open(f"{key}.npy") as member:
            array = np.lib.format.read_array(member, allow_pickle=False)
            # zipfile compares the checksum when it reads the end.
            if member.read(1):
                raise InputError(f"{key} has more bytes than its shape {array.shape} needs")
        native: NDArray[Any] = array.astype(array.dtype.newbyteorder("="), order="C", copy=False)
        return native

    def integers(self, key: str, *columns: int) -> NDArray[np.integer[Any]]:
        """Read an array of integers, shape ``(m, *columns)``."""
        array = self[key]
        wanted = (len(array) if array.ndim else 0, *columns)
        if array.dtype.kind not in "iu" or array.shape != wanted:
            expected = ", ".join(["·", *map(str, columns)])
            raise InputError(f"{_seen(key, array)}; expected integers ({expected})")
        return array

    def floats(self, key: str) -> NDArray[np.floating[Any]]:
        """Read an array of float32 or float64."""
        array = self[key]
        if array.dtype not in _DTYPES:
            raise InputError(f"{_seen(key, array)}; expected float32 or float64")
        return array

    def scalar(self, key: str, kinds: str, what: str) -> Any:
        """Read one element of the dtype kinds `kinds`."""
        array = self[key]
        if array.dtype.kind not in kinds or array.ndim != 0:
            raise InputError(f"{_seen(key, array)}; expected {what}")
        return array.item()


def _seen(key: str, array: NDArray[Any]) -> str:
    return f"{key} has dtype {array.dtype} and shape {array.shape}"


class ChainFile:
    """The Jacobians of a file, to be read in parts.

    Attributes
    ----------
    n : int
        Number of Jacobians.
    grad : ndarray, shape (d_n,) or (batch, d_n)
        Gradient at the end of the chain.
    dtype : dtype
        The dtype to which the Jacobians and the gradient promote.
    period : int
        1 for a chain in one array, 0 for a list; else the number of patterns that take turns.
    """

    def __init__(self, arrays: Arrays) -> None:
        self._arrays, self.grad = arrays, arrays.floats("grad")
        self._layout = arrays.scalar("layout", "U", "one string")
        if self._layout not in _LAYOUTS:
            raise InputError(f"layout is {self._layout!r}; expected one of {', '.join(_LAYOUTS)}")
        self._table, self._groups = arrays.integers("patterns", 3), arrays.integers("groups", 4)
        self._steps = arrays.integers("steps")
        self.n, count = len(self._steps), len(self._groups)
        for column, end in enumerate((len(self._table), 1 + _SAME, len(_DTYPES))):
            check_range(f"groups[:, {column}]", self._groups[:, column], end)
        check_range("steps", self._steps, count)
        self.period = 0 if self._layout == "list" else count
        self._stacked = self._layout in ("csr_chain", "dense_stack")
        if self._stacked and count != 1:
            raise InputError(f"groups has {count} rows; expected 1 for a {self._layout}")
        if self.period and (self._steps != np.arange(self.n) % count).any():
            raise InputError(f"steps has other groups than those in turns, of a {self._layout}")
        self._counts = np.bincount(self._steps, minlength=count)
        self._counts[self._groups[:, 1] == _SAME] = 1
        dtypes = [_DTYPES[number] for number in np.unique(self._groups[:, 2])] if self.n else []
        self.dtype: np.dtype[Any] = np.result_type(self.grad, *dtypes)

    def whole(self) -> Any:
        """Read all Jacobians, in the form in which they were saved."""
        if self._layout != "periodic":
            return self.part(0, self.n)
        patterns = unpack_patterns(self._arrays, self._groups[:, 0].tolist())
        counts = self._counts.tolist()
        values = [self._values(g, 0, counts[g], pattern) for g, pattern in enumerate(patterns)]
        return self._checked(PeriodicChain(values, patterns), 0)

    def part(self, start: int, stop: int) -> Any:
        """Read Jacobians `start` to ``stop - 1``, in the form of the whole.

        For a periodic chain, it is a list of ``csr_array``, :class:`BatchedCSR` and, where the
        pattern is dense, arrays.
        """
        own = self._steps[start:stop]
        used, turns = np.unique([0] if self._stacked else own, return_inverse=True)
        patterns = unpack_patterns(self._arrays, self._groups[used, 0].tolist())
        before, until = (
            np.bincount(self._steps[:end], minlength=len(self._groups)).tolist()
            for end in (start, stop)
        )
        values = [
            self._values(g, before[g], until[g], pattern)
            for g, pattern in zip(used.tolist(), patterns, strict=True)
        ]
        if self._layout == "csr_chain":
            return self._checked(CSRChain.from_pattern(values[0], patterns[0]), start)
        if self._layout == "dense_stack":
            return self._checked(_dense(values[0], patterns[0]), start)
        same = self._groups[used, 1] == _SAME
        rows = [repeat(v) if one else iter(v) for v, one in zip(values, same, strict=True)]
        jacobians: list[Any] = []
        for g, turn in zip(own.tolist(), turns.tolist(), strict=True):
            pattern, array = patterns[turn], next(rows[turn])
            if self._groups[g, 1] == _DENSE or (self.period and pattern.kind == "dense"):
                jacobians.append(_dense(array, pattern))
            elif array.ndim == 1:
                index = pattern.indices, pattern.indptr
                jacobians.append(sp.csr_array((array, *index), shape=pattern.shape))
            else:
                jacobians.append(BatchedCSR.from_pattern(array, pattern))
        return self._checked(jacobians, start)

    def shapes(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the rows and columns of these Jacobians, shape ``(stop - start, 2)``."""
        return self._table[self._groups[self._steps[start:stop], 0], 1:].astype(np.int64)

    def _values(self, g: int, first: int, last: int, pattern: Pattern) -> NDArray[Any]:
        """Read values `first` to ``last - 1`` of a group, block by block, or the shared values."""
        _, form, dtype, size = self._groups[g].tolist()
        count = int(self._counts[g])
        if form == _SAME:
            first, last = 0, 1
        check_count(f"groups[{g}, 3]", size, 1)
        values: Any = None
        # Without values the first block tells whether there is a batch.
        begin = min(first, max(count - 1, 0)) // size
        for b in range(begin, max(-(-last // size), begin + 1)):
            key, low = f"values_{g}_{b}", b * size
            block = self._arrays.floats(key)
            wanted = min(size, count - low), *block.shape[1:-1], pattern.nnz
            shape = wanted if values is None else (wanted[0], *values.shape[1:])
            if (block.dtype, block.shape, shape) != (_DTYPES[dtype], wanted, wanted):
                raise InputError(f"{_seen(key, block)}; expected {_DTYPES[dtype]} and {shape}")
            if values is None:
                values = np.empty((last - first, *wanted[1:]), block.dtype)
            here, end = max(first, low), min(last, low + size)
            values[here - first : end - first] = block[here - low : end - low]
        own: NDArray[Any] = values[0] if form == _SAME else values
        return own

    def _checked(self, jacobians: Any, start: int) -> Any:
        """Return Jacobians, checked as a caller's are."""
        chain = Chain(length(jacobians))
        patterns = chain.read(jacobians)
        size = patterns[0].shape[1] if patterns and start == 0 else None
        read_grad(self.grad, size, chain.batch)
        return jacobians


def _dense(values: NDArray[Any], pattern: Pattern) -> NDArray[Any]:
    if pattern.nnz != math.prod(pattern.shape):
        raise InputError(f"a group is dense with {pattern}; expected every entry")
    return values.reshape(*values.shape[:-1], *pattern.shape)


def unpack_patterns(arrays: Arrays, numbers: Iterable[int] | None = None) -> list[Pattern]:
    """Read some of the patterns in a file, by default all."""
    table = arrays.integers("patterns", 3).tolist()
    patterns = []
    for p in range(len(table)) if numbers is None else numbers:
        kind, *shape = table[p]
        check_index(f"patterns[{p}, 0]", kind, len(_KINDS))
        name, (rows, cols) = _KINDS[kind], shape
        if min(shape) < (name != "general") or (name == "diagonal" and rows != cols):
            raise InputError(f"patterns[{p}] is {name} of shape {(rows, cols)}; that cannot be")
        if name == "general":
            indptr, indices = (arrays.integers(f"{each}_{p}") for each in ("indptr", "indices"))
            patterns.append(Pattern(indptr, indices, (rows, cols), name=f"patterns[{p}]"))
        else:
            diagonal = name == "diagonal"
            patterns.append(Pattern.diagonal(rows) if diagonal else Pattern.dense((rows, cols)))
    return patterns


def check_index(what: str, value: int, count: int) -> None:
    """Raise unless `value` is one of 0 to ``count - 1``."""
    if not 0 <= value < count:
        raise InputError(f"{what} is {value}; expected 0 to {count - 1}")


def check_range(what: str, values: NDArray[Any], count: int) -> None:
    """Raise unless all `values` are among 0 to ``count - 1``."""
    for value in (values.min(), values.max()) if len(values) else ():
        check_index(what, int(value), count)
