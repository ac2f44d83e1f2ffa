"""Odd values, and other forms of good ones, at random: for calls that nobody means to make."""

from __future__ import annotations

import array
import collections
import decimal
import fractions
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp

import sparsescan
from sparsescan import BatchedCSR, CSRChain, Pattern, Schedule
from sparsescan import jacobians as layers
from sparsescan.chains.containers import PeriodicChain

try:
    import torch
except ImportError:
    torch = None

DTYPES = (
    *("f4", "f8", "f2", "g", "F", "D", "i1", "i4", "i8", "u4", "u8", "?"),
    *("O", "S3", "U3", "V8", "M8[s]", "m8[s]", ">f4", ">f8", ">i4", "f,i"),
)
FORMATS = ("csr", "csc", "coo", "bsr", "dia", "dok", "lil")


# ---------------------------------------------------------------------------------------------
# Odd values
# ---------------------------------------------------------------------------------------------


class Lying(collections.abc.Sequence):
    """A sequence that says one length and gives another."""

    def __init__(self, items: Sequence[Any], length: Any) -> None:
        self.items, self.length = list(items), length

    def __len__(self) -> Any:
        return self.length

    def __getitem__(self, k: Any) -> Any:
        return self.items[k]


class Changing(list):
    """A list that gives other items each time it is read: which are right, nobody can say."""

    instances = 0

    def __init__(self, items: Sequence[Any]) -> None:
        super().__init__(items)
        Changing.instances += 1

    def __iter__(self) -> Iterator[Any]:
        items = list(super().__iter__())
        if len(self):
            self.append(self.pop(0))
        return iter(items)


class OfArray:
    """An object that NumPy reads as an array."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.array


class Hostile:
    """An object that raises whatever is asked of it."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("hostile")

    __array__ = __len__ = __iter__ = __getitem__ = __index__ = __float__ = __bool__ = _refuse
    __eq__ = __lt__ = __repr__ = __str__ = __fspath__ = __call__ = _refuse
    __hash__ = object.__hash__


class Subclass(np.ndarray):
    """An array of another class."""


class MatrixSubclass(sp.csr_array):
    """A CSR array of another class."""


class Text(str):
    """A string of another class."""


def masked(values: Any) -> np.ma.MaskedArray:
    """Return an array with a mask over its first entry."""
    array = np.ma.array(np.asarray(values))
    if array.size:
        array[(0,) * array.ndim] = np.ma.masked
    return array


def nested(depth: int) -> list[Any]:
    """Return a list in a list, so deep."""
    items: list[Any] = [1.0]
    for _ in range(depth):
        items = [items]
    return items


def itself() -> list[Any]:
    """Return a list that holds itself."""
    items: list[Any] = []
    items.append(items)
    return items


NUMBERS: list[Any] = [
    *(0, 1, 2, 3, -1, 2**31, 2**40, 2**62, 2**63, -(2**63), 2**64, 10**50, 10**5000),
    *(0.0, 1.5, -2.0, float("nan"), float("inf"), 1j, True, False),
    *(decimal.Decimal(2), fractions.Fraction(1, 3)),
    *(np.float32(1), np.float64(2), np.int8(2), np.int64(3), np.uint64(2**63), np.bool_(True)),
    *(np.longdouble(1), np.complex64(1), np.datetime64("2020"), np.str_("linear"), np.void(b"ab")),
]
CLASSES: list[Any] = [
    *(type, object, int, float, list, dict, str, np.float64, np.ndarray, np.dtype, sp.csr_array),
    *(Pattern, Schedule, BatchedCSR, CSRChain, PeriodicChain, sparsescan.ScanPlan, layers.Linear),
]


def odd_array(rng: np.random.Generator) -> Any:
    """Return an array that few arguments can be."""
    shape = tuple(rng.integers(0, 4, rng.integers(0, 5)))
    array = np.zeros(shape, DTYPES[rng.integers(len(DTYPES))])
    if array.dtype.kind in "fiu":
        array = array + rng.integers(0, 3, shape).astype(array.dtype)
    return array


def huge_array(rng: np.random.Generator) -> Any:
    """Return a view that shows far more entries than there are."""
    shapes = [(4, 2**20, 2**20), (2**40,), (2, 2**40), (2**29, 2**29), (3, 2, 2**20, 2**20)]
    kinds = [1.0, np.float32(1), 1, True, 1j]
    return np.broadcast_to(kinds[rng.integers(5)], shapes[rng.integers(len(shapes))])


def odd(rng: np.random.Generator) -> Any:
    """Anything at all."""
    matrix = sp.csr_array(np.eye(int(rng.integers(1, 4))))
    pattern = Pattern.diagonal(2)
    makers: list[Callable[[], Any]] = [
        lambda: NUMBERS[rng.integers(len(NUMBERS))],
        lambda: NUMBERS[rng.integers(len(NUMBERS))],
        lambda: CLASSES[rng.integers(len(CLASSES))],
        lambda: [None, Ellipsis, NotImplemented, np, np.newaxis, slice(None)][rng.integers(6)],
        lambda: ["", "abc", "auto", "linear", "cpu", Text("auto"), b"abc", bytearray(b"ab")][
            rng.integers(8)
        ],
        lambda: [[], (), {}, set(), {1: 2}, {"a"}, frozenset([1]), range(3)][rng.integers(8)],
        lambda: (x for x in (1.0, 2.0)),
        lambda: iter([1.0, 2.0]),
        lambda: lambda *_: 0,
        lambda: ValueError("x"),
        lambda: memoryview(np.ones(3)),
        lambda: array.array("d", [1.0, 2.0]),
        lambda: odd_array(rng),
        lambda: odd_array(rng),
        lambda: huge_array(rng),
        lambda: np.ma.masked,
        lambda: masked(np.ones((2, 2))),
        lambda: np.matrix(np.eye(2)),
        lambda: np.rec.array([(1.0, 2)], dtype=[("a", "f8"), ("b", "i4")]),
        lambda: matrix.asformat(FORMATS[rng.integers(len(FORMATS))]),
        lambda: sp.csr_matrix(np.eye(2)),
        lambda: sp.coo_array(np.ones(3)),
        lambda: pattern,
        lambda: BatchedCSR.from_pattern(np.ones((2, 2)), pattern),
        lambda: CSRChain.from_pattern(np.ones((2, 2)), pattern),
        lambda: PeriodicChain([np.ones((2, 2))], [pattern]),
        lambda: Schedule.linear(3),
        lambda: sparsescan.plan([pattern]),
        lambda: Hostile(),
        lambda: OfArray(np.ones((2, 2))),
        lambda: OfArray(None),
        lambda: Lying([1.0, 2.0], [-1, 1, 3, 2**62, 2**80, "x"][rng.integers(6)]),
        lambda: nested([3, 40, 3000][rng.integers(3)]),
        lambda: itself(),
        lambda: [1.0, "a", None],
        lambda: [[1.0], [1.0, 2.0]],
    ]
    if torch is not None:
        makers += [lambda: odd_tensor(rng)] * 2
    return makers[rng.integers(len(makers))]()


def odd_tensor(rng: np.random.Generator) -> Any:
    """Return a tensor of PyTorch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse CSR is in beta
        makers: list[Callable[[], Any]] = [
            lambda: torch.ones(2, dtype=torch.float64),
            lambda: torch.ones((2, 2)).T,
            lambda: torch.ones(2, requires_grad=True),
            lambda: torch.ones(2, dtype=torch.bfloat16),
            lambda: torch.ones(2, device="meta"),
            lambda: torch.eye(3).to_sparse(),
            lambda: torch.eye(3).to_sparse_csr(),
            lambda: torch.eye(3, dtype=torch.float64).to_sparse_csc(),
            lambda: torch.ones(2, dtype=torch.int32),
        ]
        return makers[rng.integers(len(makers))]()


# ---------------------------------------------------------------------------------------------
# Other forms of a good value
# ---------------------------------------------------------------------------------------------


def one_of(rng: np.random.Generator, makers: Sequence[Callable[[], Any]]) -> Any:
    """Return the result of one of some functions; anything at all, if it raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return makers[rng.integers(len(makers))]()
    except (TypeError, ValueError, MemoryError, AttributeError, IndexError, ZeroDivisionError):
        return odd(rng)  # The last is what `Hostile` raises.


def unaligned(values: np.ndarray) -> np.ndarray:
    """Return a copy at an address that is no multiple of the item size."""
    room = np.zeros(values.nbytes + 1, np.uint8)
    copy = room[1:].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def other_array(rng: np.random.Generator, given: Any) -> Any:
    """Another form of an array: the same values in another way, or something close to them."""
    if isinstance(given, np.ma.MaskedArray) or not isinstance(given, np.ndarray):
        return odd(rng)
    if given.dtype.names or given.size > 1000:
        return given
    kept = given.copy()
    kept.setflags(write=False)
    makers: list[Callable[[], Any]] = [
        lambda: given.tolist(),
        lambda: tuple(given.tolist()),
        lambda: kept,
        lambda: np.asfortranarray(given),
        lambda: given[::-1].copy()[::-1] if given.ndim else given,
        lambda: np.repeat(given, 2, axis=-1)[..., ::2] if given.ndim else given,
        lambda: unaligned(given) if given.dtype != object else given,
        lambda: given.astype(given.dtype.newbyteorder(">")),
        lambda: given.astype(np.float32),
        lambda: given.astype(np.float64),
        lambda: given.astype(["f2", "g", "F", "i8", "?", "O"][rng.integers(6)]),
        lambda: given.view(Subclass),
        lambda: np.matrix(given) if given.ndim <= 2 else given,
        lambda: OfArray(given),
        lambda: masked(given),
        lambda: np.ma.array(given),
        lambda: sp.csr_array(np.atleast_2d(given)) if given.ndim in (1, 2) else given,
        lambda: [masked(row) for row in given] if given.ndim else masked(given),
        lambda: given[None],
        lambda: given[..., None],
        lambda: given[:-1] if given.ndim else given,
        lambda: np.concatenate([given, given]) if given.ndim else given,
        lambda: given.reshape(-1),
        lambda: given.T,
        lambda: given.sum(),
        lambda: given[:0] if given.ndim else given,
        lambda: np.broadcast_to(given[:1], given.shape) if given.ndim and len(given) else given,
        lambda: with_odd_entry(rng, given),
        lambda: memoryview(np.ascontiguousarray(given)) if given.dtype.kind in "fiu" else given,
    ]
    if torch is not None and given.dtype in (np.float32, np.float64, np.int32, np.int64):
        makers += [lambda: torch.from_numpy(given.copy())]
    return one_of(rng, makers)


def with_odd_entry(rng: np.random.Generator, given: np.ndarray) -> np.ndarray:
    """Return a copy with one entry that is not finite, or for integers out of range."""
    changed = given.copy()
    if changed.size and changed.dtype.kind in "fi":
        entries = [np.nan, np.inf, -np.inf] if changed.dtype.kind == "f" else [-1, 7, 2**31 - 1]
        changed.flat[rng.integers(changed.size)] = entries[rng.integers(3)]
    return changed


def other_matrix(rng: np.random.Generator, given: Any) -> Any:
    """Another form of a Jacobian."""
    if isinstance(given, np.ndarray):
        return other_array(rng, given)
    if isinstance(given, BatchedCSR):
        return [given.data, CSRChain.from_pattern(given.data[:1], given.pattern), given.pattern][
            rng.integers(3)
        ]
    if not (sp.issparse(given) and given.format == "csr"):
        return odd(rng)
    changed = given.copy()
    choice = rng.integers(8)
    if choice == 0:
        return given.asformat(FORMATS[rng.integers(len(FORMATS))])
    if choice == 1:
        return given.toarray()
    if choice == 2:
        return MatrixSubclass(given)
    if choice == 3:
        changed.indices, changed.indptr = (
            changed.indices.astype(np.int64),
            changed.indptr.astype(np.int64),
        )
        return changed
    if choice == 4:
        # Unsorted, and with an entry in two parts.
        data = np.concatenate([given.data[::-1], given.data])
        rows = np.repeat(np.arange(given.shape[0]), np.diff(given.indptr))
        order = np.argsort(np.concatenate([rows[::-1], rows]), kind="stable")
        changed.data = data[order]
        changed.indices = np.concatenate([given.indices[::-1], given.indices])[order]
        changed.indptr = given.indptr * 2
        return changed
    name = ("data", "indices", "indptr")[rng.integers(3)]
    setattr(changed, name, other_array(rng, getattr(changed, name)) if choice < 7 else odd(rng))
    return changed


def other_sequence(rng: np.random.Generator, given: Any) -> Any:
    """Another form of a sequence, or one with other entries."""
    if not isinstance(given, list):
        return other_array(rng, given)
    at = rng.integers(len(given)) if given else 0
    makers: list[Callable[[], Any]] = [
        lambda: tuple(given),
        lambda: collections.UserList(given),
        lambda: collections.deque(given),
        lambda: as_objects(given),
        lambda: Lying(given, len(given) + [-1, 1, 0, 2**50][rng.integers(4)]),
        lambda: Changing(given),
        lambda: iter(given),
        lambda: (item for item in given),
        lambda: dict(enumerate(given)),
        lambda: given[:-1],
        lambda: [*given, *given[:1]],
        lambda: given[::-1],
        lambda: [*given[:at], odd(rng), *given[at + 1 :]],
        lambda: [*given[:at], odd(rng), *given[at + 1 :]],
        lambda: [*given[:at], *(other_matrix(rng, item) for item in given[at:])],
        lambda: [other_matrix(rng, item) if k == at else item for k, item in enumerate(given)],
    ]
    return one_of(rng, makers)


def as_objects(items: Sequence[Any]) -> np.ndarray:
    """Return an array whose entries are these objects."""
    array = np.empty(len(items), object)
    for k, item in enumerate(items):
        array[k] = item
    return array


def other(rng: np.random.Generator, given: Any) -> Any:
    """Return a value that takes the place of an argument."""
    if rng.random() < 0.35:
        return odd(rng)
    if isinstance(given, list):
        return other_sequence(rng, given)
    if isinstance(given, bool) or given is None or isinstance(given, str):
        return odd(rng)
    if isinstance(given, (int, float)):
        return NUMBERS[rng.integers(len(NUMBERS))]
    if isinstance(given, tuple):
        return [*given] if rng.random() < 0.3 else changed_tuple(rng, given)
    return other_matrix(rng, given)


def changed_tuple(rng: np.random.Generator, given: tuple[Any, ...]) -> Any:
    """Return a tuple with another entry, or one entry more or fewer; or an array of it."""
    at = rng.integers(len(given)) if given else 0
    makers: list[Callable[[], Any]] = [
        lambda: (*given[:at], other(rng, given[at]) if given else 1, *given[at + 1 :]),
        lambda: given[:-1],
        lambda: (*given, 2),
        lambda: np.array(given),
        lambda: Lying(given, len(given) + 1),
    ]
    return one_of(rng, makers)
