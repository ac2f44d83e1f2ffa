"""Patterns whose values are weights, each at many places, read through an index."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arrays.arrays import check_memory, host_array
from ..arrays.frozen import Frozen
from ..checks import check_count
from ..errors import Allocating, InputError, InputTypeError, short
from .pattern import Pattern, check_host, check_index_form, index_dtype


class IndexedPattern(Frozen):
    """A pattern whose entry ``k`` has the value ``weights[index[k]]``, for all samples.

    An :class:`.ImplicitPattern` with ``indexed={position: (index, size)}`` has it as a factor,
    which is given by its weights: a convolution has few weights, each at every place of the image.
    If a scan on the CPU multiplies no matrix by the factor, it reads the weights row by row, and
    stores rows with equal weights once.

    Parameters
    ----------
    pattern : Pattern
        Where the entries are.
    index : array_like of int, shape (nnz,)
        For each entry, the number of its weight.
    size : int
        Number of weights.

    Attributes
    ----------
    pattern : Pattern
        Where the entries are.
    size : int
        Number of weights.
    shape : tuple of int
        ``(rows, cols)``.
    nnz : int
        Entries of the pattern.
    distinct : int
        Entries of all different rows, where rows with equal weights count once.

    Raises
    ------
    InputError
        If the index has another length than the pattern's entries, or names a missing weight.
    InputTypeError
        If a type is wrong.

    See Also
    --------
    sparsescan.ImplicitPattern, sparsescan.ImplicitStep

    Examples
    --------
    >>> import sparsescan
    >>> from sparsescan import ImplicitPattern, ImplicitStep, Pattern
    >>> two = Pattern([0, 2, 4, 6], [0, 1, 1, 2, 2, 3], (3, 4))  # a signal of 4, 2 weights
    >>> pattern = ImplicitPattern([two], indexed={0: ([0, 1, 0, 1, 0, 1], 2)})
    >>> (factor,) = pattern.indexed
    >>> factor
    IndexedPattern((3, 4), nnz=6, 2 weights)
    >>> factor.distinct
    2
    >>> step = ImplicitStep([[0.5, 2.0]], pattern)
    >>> sparsescan.inclusive_scan([1.0, 1.0, 1.0, 1.0], [step])[1]
    array([2.5, 2.5, 2.5])
    """

    __slots__ = (
        "__weakref__",
        "_key",
        "distinct",
        "nnz",
        "pattern",
        "shape",
        "size",
        "sources",
        "starts",
    )

    pattern: Pattern
    size: int
    shape: tuple[int, int]
    nnz: int
    distinct: int
    _key: tuple[Any, ...] | None
    # The entries of row `i` are the weights ``sources[starts[i]], sources[starts[i] + 1], …``.
    starts: NDArray[np.integer[Any]]
    sources: NDArray[np.integer[Any]]

    def __init__(self, pattern: Pattern, index: ArrayLike, size: int) -> None:
        if not isinstance(pattern, Pattern):
            raise InputTypeError(f"pattern is {short(pattern)}; expected a Pattern")
        size = check_count("size", size, 0)
        check_host("index", index)
        array = check_index_form("index", "weights", host_array("index", index))
        if len(array) != pattern.nnz:
            raise InputError(
                f"index has {len(array)} entries; expected {pattern.nnz}, one for each of {pattern}"
            )
        check_memory(f"the index of {pattern}", 24 * len(array))
        with Allocating(f"the index of {pattern}"):
            # A copy, made before it is checked.
            array = np.array(array)
            _check_range("index", array, size)
            self._adopt(pattern, *_merge_rows(pattern, array), size)

    def _adopt(
        self, pattern: Pattern, starts: NDArray[Any], sources: NDArray[Any], size: int
    ) -> None:
        starts = starts.astype(pattern.index_dtype)
        sources = sources.astype(index_dtype((0, 0), size))
        for array in (starts, sources):
            array.setflags(write=False)
        self._set(
            pattern=pattern,
            size=size,
            shape=pattern.shape,
            nnz=pattern.nnz,
            distinct=len(sources),
            starts=starts,
            sources=sources,
            _key=None,
        )

    @property
    def key(self) -> tuple[Any, ...]:
        """A key: equal for equal patterns, without references to them."""
        if self._key is None:
            digest = hashlib.blake2b(self.starts.data, digest_size=16)
            digest.update(self.sources.data)
            about = self.pattern.key, self.size, self.distinct, digest.digest()
            self._key = "indexed", *about
        return self._key

    @property
    def index(self) -> NDArray[np.integer[Any]]:
        """For each entry, the number of its weight, shape ``(nnz,)``."""
        counts = np.diff(self.pattern.indptr)
        within = np.arange(self.nnz) - np.repeat(self.pattern.indptr[:-1], counts)
        index: NDArray[np.integer[Any]] = self.sources[np.repeat(self.starts, counts) + within]
        return index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IndexedPattern) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"IndexedPattern({self.shape}, nnz={self.nnz}, {self.size} weights)"

    def __reduce__(self) -> tuple[Any, ...]:
        return indexed, (self.pattern, self.starts, self.sources, self.size)


def indexed(
    pattern: Pattern, starts: NDArray[Any], sources: NDArray[Any], size: int
) -> IndexedPattern:
    """Return the indexed pattern whose row `i` has the weights from ``sources[starts[i]]`` on.

    Raises
    ------
    InputError
        If a start or a source is outside the arrays.
    """
    if starts.shape != pattern.shape[:1]:
        raise InputError(
            f"starts has shape {starts.shape}; expected {pattern.shape[:1]}, one for each row"
        )
    counts = np.diff(pattern.indptr)
    used = counts > 0
    _check_range("sources", sources, size)
    if used.any():
        ends = starts[used].astype(np.int64) + counts[used]
        if starts[used].min() < 0 or ends.max() > len(sources):
            raise InputError(f"starts has rows outside of sources, which has {len(sources)}")
    result = object.__new__(IndexedPattern)
    # Rows without entries may begin anywhere.
    result._adopt(pattern, np.where(used, starts, 0), sources, size)
    return result


def _check_range(name: str, array: NDArray[Any], size: int) -> None:
    if array.size and not (array.min() >= 0 and array.max() < size):
        wrong = array.min() if array.min() < 0 else array.max()
        raise InputError(f"{name} has {wrong}; expected weights from 0 to {size - 1}")


def _merge_rows(pattern: Pattern, index: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the start of each row among the different rows, and the weights of these."""
    starts = np.zeros(pattern.shape[0], np.int64)
    counts, parts, total = np.diff(pattern.indptr), list[NDArray[Any]](), 0
    for count in np.unique(counts[counts > 0]).tolist():
        rows = np.flatnonzero(counts == count)
        entries = pattern.indptr[rows].astype(np.int64)[:, None] + np.arange(count)
        different, which = np.unique(index[entries], axis=0, return_inverse=True)
        starts[rows] = total + which.reshape(-1) * count
        parts.append(different.reshape(-1))
        total += different.size
    return starts, np.concatenate([np.zeros(0, index.dtype), *parts])
