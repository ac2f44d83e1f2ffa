"""Chains on disk: an ``.npz`` file, never pickle; and what files of plans share with them.

Version 1 of the format has a handful of arrays, however long the chain is:

==================  ==============================================================================
``version``         int, 1
``layout``          ``"list"``, ``"csr_chain"`` or ``"dense_stack"``
``grad``            the gradient at the end of the chain
``patterns``        int (p, 3): kind (an index into ``_KINDS``), rows and columns of each pattern
``indptr``          int: the row pointers of all general patterns, one after the other
``indices``         int: their column indices
``stack``           the one array of a ``csr_chain`` or a ``dense_stack``
``steps``           int (n, 3), of a list: form (an index into ``_FORMS``), pattern and dtype (an
                    index into ``_DTYPES``) of each Jacobian
``float32``         1-D: the values of all Jacobians of that dtype, one after the other, of a list
``float64``         the same
==================  ==============================================================================

A Jacobian with a batch axis has the batch of ``grad``, so its size needs no place of its own.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from ._arrays import device_of
from .chain import Chain, length, read_grad
from .containers import BatchedCSR, CSRChain, PeriodicChain
from .errors import ChainFileError, DeviceError, InputError, SparseScanError
from .pattern import Pattern

__all__ = [
    "Arrays",
    "check_index",
    "check_used",
    "load_chain",
    "pack_patterns",
    "read_arrays",
    "refusing",
    "save_chain",
    "unpack_patterns",
    "write_arrays",
]

_VERSION = 1
_KINDS = ("general", "diagonal", "dense")
_FORMS = ("csr", "batched_csr", "dense", "batched_dense")
_DTYPES = ("float32", "float64")
_REMEDY = "expected a file written by sparsescan.save_chain"

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
    chain = Chain(length(jacobians))
    patterns = chain.read(jacobians)
    first = read_grad(grad, patterns[0].shape[1] if patterns else None, chain.batch)
    for name, device in (("jacobians", chain.device), ("grad", device_of(first))):
        if device is not None:
            raise DeviceError(
                f"{name} is on device {device}; expected host memory (cupy.asnumpy, .get())"
            )
    arrays: dict[str, Any] = {"version": np.int64(_VERSION), "grad": first}
    if isinstance(jacobians, CSRChain):
        arrays |= {"layout": "csr_chain", "stack": jacobians.data}
        arrays |= pack_patterns([jacobians.pattern])
    elif isinstance(jacobians, PeriodicChain):
        arrays |= {"layout": "periodic"} | pack_patterns(jacobians.patterns)
        arrays |= {f"stack_{j}": array for j, array in enumerate(jacobians.values)}
    elif isinstance(jacobians, np.ndarray):
        native = jacobians.dtype.newbyteorder("=")
        arrays |= {"layout": "dense_stack", "stack": jacobians.astype(native, copy=False)}
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
        What was saved, with the same dtypes and the same bits: a list of ``csr_array``,
        :class:`BatchedCSR` and dense arrays, a :class:`CSRChain`, or one dense array. The values of
        a list are views of one buffer, and matrices of one pattern share read-only index arrays.

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
    with open(path, "rb") as file, refusing(path, ChainFileError, _REMEDY):
        return _unpack(read_arrays(file))


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays to a file of exactly this name."""
    # np.savez would append .npz to a name without it.
    with open(path, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


@contextmanager
def refusing(path: Path, refusal: type[InputError], remedy: str) -> Iterator[None]:
    """Turn whatever is wrong with a file into one kind of error, which names the file."""
    try:
        yield
    except SparseScanError as error:
        raise refusal(f"{os.fspath(path)}: {error}; {remedy}") from None
    except Exception as error:
        # Whatever the readers of zip and .npy stumble over, from BadZipFile to MemoryError.
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise refusal(
            f"{os.fspath(path)} is no .npz file, or a damaged one ({what}); {remedy}"
        ) from error


def pack_patterns(patterns: Sequence[Pattern]) -> dict[str, NDArray[Any]]:
    """The arrays that hold different patterns; :func:`unpack_patterns` is the way back."""
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
        """Get the array `key`, of float32 or float64."""
        array = self[key]
        if array.dtype.newbyteorder("=").name not in _DTYPES:
            raise InputError(f"{key} has dtype {array.dtype}; expected float32 or float64")
        return array.astype(array.dtype.newbyteorder("="), copy=False)

    def scalar(self, key: str, kinds: str, what: str) -> Any:
        """Get the array `key`, one element of the dtype kinds `kinds`."""
        array = self[key]
        if array.dtype.kind not in kinds or array.ndim != 0:
            raise InputError(
                f"{key} has dtype {array.dtype} and shape {array.shape}; expected {what}"
            )
        return array.item()


def read_arrays(file: Any) -> Arrays:
    """The arrays of an open file; an error if any byte of them is damaged."""
    # Reading an array with a damaged header may stop before the end, where zip checks its sum.
    with zipfile.ZipFile(file) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise InputError(f"{damaged} is damaged: its checksum is wrong")
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        return Arrays(dict(arrays))


def _unpack(arrays: Arrays) -> tuple[NDArray[np.floating[Any]], Any]:
    version = arrays.scalar("version", "iu", "one integer")
    if version != _VERSION:
        raise InputError(f"version is {version}; expected {_VERSION}, the format known here")
    layout = arrays.scalar("layout", "U", "one string")
    grad = arrays.floats("grad")
    jacobians: Any
    if layout == "csr_chain":
        patterns = unpack_patterns(arrays)
        if len(patterns) != 1:
            raise InputError(f"patterns has {len(patterns)} rows; expected 1 for a csr_chain")
        jacobians = CSRChain.from_pattern(arrays.floats("stack"), patterns[0])
    elif layout == "periodic":
        patterns = unpack_patterns(arrays)
        values = [arrays.floats(f"stack_{j}") for j in range(len(patterns))]
        jacobians = PeriodicChain(values, patterns)
    elif layout == "dense_stack":
        jacobians = arrays.floats("stack")
    elif layout == "list":
        jacobians = _unpack_steps(arrays, unpack_patterns(arrays), grad)
    else:
        raise InputError(
            f"layout is {layout!r}; expected 'list', 'csr_chain', 'periodic' or 'dense_stack'"
        )
    chain = Chain(length(jacobians))
    found = chain.read(jacobians)
    return read_grad(grad, found[0].shape[1] if found else None, chain.batch), jacobians


def unpack_patterns(arrays: Arrays) -> list[Pattern]:
    """The patterns in a file."""
    indptr, indices = arrays.integers("indptr"), arrays.integers("indices")
    patterns = []
    row_end = entry_end = 0
    for p, (kind, rows, cols) in enumerate(arrays.integers("patterns", 3).tolist()):
        check_index(f"patterns[{p}, 0]", kind, len(_KINDS))
        name = _KINDS[kind]
        if min(rows, cols) < (name != "general") or (name == "diagonal" and rows != cols):
            raise InputError(f"patterns[{p}] is {name} of shape {(rows, cols)}; that cannot be")
        if name == "diagonal":
            patterns.append(Pattern.diagonal(rows))
        elif name == "dense":
            patterns.append(Pattern.dense((rows, cols)))
        else:
            pointers = indptr[row_end : row_end + rows + 1]
            # Pattern checks the rest, also that the last pointer is the number of indices.
            nnz = max(int(pointers[-1]), 0) if len(pointers) else 0
            entries = indices[entry_end : entry_end + nnz]
            patterns.append(Pattern(pointers, entries, (rows, cols), name=f"patterns[{p}]"))
            row_end, entry_end = row_end + rows + 1, entry_end + nnz
    check_used("indptr", len(indptr), row_end)
    check_used("indices", len(indices), entry_end)
    return patterns


def _unpack_steps(
    arrays: Arrays, patterns: Sequence[Pattern], grad: NDArray[np.floating[Any]]
) -> list[Any]:
    batch = grad.shape[0] if grad.ndim == 2 else None
    steps = arrays.integers("steps", 3)
    values = [arrays.floats(name) for name in _DTYPES]
    for name, array in zip(_DTYPES, values, strict=True):
        if array.dtype != name or array.ndim != 1:
            raise InputError(
                f"{name} has dtype {array.dtype} and shape {array.shape}; expected {name} (·)"
            )
    for column, count in enumerate((len(_FORMS), len(patterns), len(_DTYPES))):
        for index in {steps[:, column].min(), steps[:, column].max()} if len(steps) else ():
            check_index(f"steps[:, {column}]", int(index), count)
    ends = [0] * len(_DTYPES)
    jacobians: list[Any] = []
    for k, (form, p, dtype) in enumerate(steps.tolist()):
        name, pattern = _FORMS[form], patterns[p]
        shape: tuple[int, ...] = ()
        if name.startswith("batched"):
            if batch is None:
                raise InputError(f"steps[{k}] has a batch; expected grad of shape (batch, ·)")
            shape = (batch,)
        start = ends[dtype]
        ends[dtype] = start + pattern.nnz * (batch if shape else 1)
        part = values[dtype][start : ends[dtype]]
        check_used(_DTYPES[dtype], start + len(part), ends[dtype])
        jacobians.append(_jacobian(k, name, pattern, part, shape))
    for name, array, end in zip(_DTYPES, values, ends, strict=True):
        check_used(name, len(array), end)
    return jacobians


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


def check_used(key: str, found: int, expected: int) -> None:
    """Raise unless an array has as many entries as the rest of the file says."""
    if found != expected:
        raise InputError(f"{key} has {found} entries; expected {expected}")
