"""Kernels follow what was checked, whatever happens to the caller's arrays and objects."""

from __future__ import annotations

import copy
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsescan
from sparsescan import (
    BatchedCSR,
    CSRChain,
    InputError,
    InputTypeError,
    Pattern,
    Schedule,
    SparseScanError,
)
from sparsescan.chains.chain import Chain
from sparsescan.chains.containers import PeriodicChain
from sparsescan.jacobians import Conv2d, Linear

SECONDS = 0.5


@contextmanager
def written_to(write: Callable[[], None]) -> Iterator[None]:
    """Write again and again, in a thread, while a block runs."""
    stop = threading.Event()

    def keep_writing() -> None:
        while not stop.is_set():
            write()

    thread = threading.Thread(target=keep_writing)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def index_arrays(size: int = 4000) -> tuple[np.ndarray, np.ndarray, Callable[[], None]]:
    """Index arrays of a square matrix, and what writes other ones, good and bad, into them."""
    rng = np.random.default_rng(0)
    indptr = np.arange(size + 1)
    goods = [rng.integers(0, size, size) for _ in range(3)]
    bad = np.full(size, 10**9)
    indices = goods[0].copy()
    turns = iter(range(10**9))

    def write() -> None:
        turn = next(turns) % 6
        indices[:] = bad if turn % 2 else goods[turn // 2]

    return indptr, indices, write


def assert_all_sound(
    write: Callable[[], None], make: Callable[[], Iterable[Pattern]], refusal: str
) -> None:
    """Patterns made beside a writer are safe to follow, and what their own arrays describe."""
    patterns: set[Pattern] = set()
    with written_to(write):
        end = time.process_time() + SECONDS
        while time.process_time() < end:
            try:
                patterns.update(make())
            except InputError as error:
                assert refusal in str(error)  # noqa: PT017
    assert patterns
    for pattern in patterns:
        assert pattern.indices.min() >= 0
        assert pattern.indices.max() < pattern.shape[1]
        again = Pattern(pattern.indptr.copy(), pattern.indices.copy(), pattern.shape)
        assert again is pattern


MAKERS: dict[str, Callable[[Any, Any, Any], Pattern]] = {
    "Pattern": lambda indptr, indices, shape: Pattern(indptr, indices, shape),
    "BatchedCSR": lambda indptr, indices, shape: (
        BatchedCSR(np.ones((1, len(indices))), indices, indptr, shape).pattern
    ),
    "CSRChain": lambda indptr, indices, shape: (
        CSRChain(np.ones((1, len(indices))), indices, indptr, shape).pattern
    ),
}


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("maker", MAKERS)
def test_patterns_of_arrays_that_a_thread_writes_to(maker, dtype):
    indptr, given, write = index_arrays()
    shape = 4000, 4000
    indices = given.astype(dtype)

    def write_both() -> None:
        write()
        indices[:] = given

    assert_all_sound(
        write_both, lambda: [MAKERS[maker](indptr.astype(dtype), indices, shape)], "1000000000"
    )


def test_matrices_that_a_thread_writes_to():
    indptr, indices, write = index_arrays()
    matrix = sp.csr_array((np.ones(4000), indices, indptr), shape=(4000, 4000))
    matrix.indices = indices
    assert_all_sound(
        write, lambda: sparsescan.plan([matrix] * 2, schedule="linear").patterns, "jacobians["
    )


def test_attributes_that_a_thread_replaces():
    """A matrix whose arrays are exchanged while a plan reads it is right, or refused."""
    rng = np.random.default_rng(0)
    one, other = (sp.csr_array(np.tril(np.ones((40, 40)), -k)) for k in (0, 20))
    arrays = [(m.data.copy(), m.indices.copy(), m.indptr.copy()) for m in (one, other)]
    matrix, plan = one.copy(), sparsescan.plan([one] * 3, schedule="linear")
    grad = rng.standard_normal(40)
    expected = plan.inclusive_scan(grad, [one] * 3)
    turns = iter(range(10**9))

    def write() -> None:
        # Each on its own, as another thread sees it.
        matrix.data, matrix.indices, matrix.indptr = arrays[next(turns) % 2]

    counts = [0, 0]
    with written_to(write):
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            try:
                result = plan.inclusive_scan(grad, [matrix] * 3)
            except SparseScanError:
                counts[0] += 1
            else:
                counts[1] += 1
                np.testing.assert_allclose(result, expected)
    assert min(counts) > 0


# ---------------------------------------------------------------------------------------------
# Arrays of which only the form changes
# ---------------------------------------------------------------------------------------------


def reshape(array: np.ndarray, shape: Any) -> None:
    """Give an array another shape in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it will not be possible one day
        array.shape = shape


def test_values_that_are_reshaped_in_place_reach_no_kernel():
    lower = Pattern([0, 1, 3], [0, 0, 1], (2, 2))
    data = np.ones((4, 3))
    chain = CSRChain.from_pattern(data, lower)
    reshape(data, (12, 1))
    with pytest.raises(
        InputError, match=r"^CSRChain has data of shape \(12, 1\); expected \(n, nn"
    ):
        sparsescan.exclusive_scan(np.ones(2), chain)

    data = np.ones((4, 3))
    batched = BatchedCSR.from_pattern(data, lower)
    plan = sparsescan.plan([batched])
    reshape(data, (12, 1))
    with pytest.raises(InputError, match=r"^BatchedCSR has data of shape \(12, 1\); expected \(ba"):
        plan.inclusive_scan(np.ones((12, 2)), [batched])

    data = np.ones((4, 3))
    periodic = PeriodicChain([data], [lower])
    reshape(data, (6, 2))
    with pytest.raises(InputError, match=r"^values\[0\] has shape \(6, 2\) now; expected \(4, 3\)"):
        sparsescan.exclusive_scan(np.ones(2), periodic)


def test_values_of_another_size_in_place_reach_no_kernel():
    """The dtype of an array can be set in place, too, and then it has more entries."""
    data = np.ones((4, 3))
    chain = CSRChain.from_pattern(data, Pattern([0, 1, 3], [0, 0, 1], (2, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data.dtype = np.int64
    with pytest.raises(InputTypeError, match=r"^CSRChain data has dtype int64; expected float32"):
        sparsescan.exclusive_scan(np.ones(2), chain)


def test_values_of_a_sequence_are_looked_at_again_where_they_are_converted():
    first, second = sp.csr_array(np.eye(3, dtype=np.float32)), sp.csr_array(np.eye(3))
    chain = Chain(3)
    chain.read([second, second, first])
    reshape(first.data, (3, 1))
    with pytest.raises(InputError, match=r"^jacobians\[2\] has values of shape \(3, 1\) now"):
        chain.convert(np.dtype(np.float64))


def test_a_parameter_whose_dtype_is_set_in_place_reaches_no_kernel():
    for layer in (Linear(3, 2), Conv2d(1, 1, 3, input_shape=(1, 4, 4))):
        weight = np.ones(layer.weight.shape)
        layer.weight = weight
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            weight.dtype = np.int64
        with pytest.raises(InputError, match="weight has become an array of dtype int64"):
            layer.values()


# ---------------------------------------------------------------------------------------------
# Objects that stay as they were checked
# ---------------------------------------------------------------------------------------------


def test_what_was_checked_cannot_be_set():
    lower = Pattern([0, 1, 3], [0, 0, 1], (2, 2))
    plan = sparsescan.plan([lower] * 3)
    objects: list[tuple[Any, tuple[str, ...]]] = [
        (lower, ("shape", "nnz", "kind", "key")),
        (plan, ("n", "patterns", "schedule", "batch", "dtype", "device", "dense")),
        (plan.schedule, ("n", "levels", "chunks")),
        (PeriodicChain([np.ones((4, 3))], [lower]), ("steps", "batch", "values", "patterns")),
    ]
    for one, names in objects:
        for name in names:
            before = repr(getattr(one, name))
            message = f"^{type(one).__name__}.{name} cannot be changed: make a new one"
            with pytest.raises(InputError, match=message):
                setattr(one, name, 7)
            assert repr(getattr(one, name)) == before


def pickled(one: Any) -> Any:
    return pickle.loads(pickle.dumps(one))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_they_are_copied_and_pickled(copied):
    lower = Pattern([0, 1, 3], [0, 0, 1], (2, 2))
    assert copied(lower) is lower
    for schedule in (Schedule.blelloch(9), Schedule.chunked(9, 2)):
        copy = copied(schedule)
        assert copy == schedule
        assert copy.chunks == schedule.chunks
        assert repr(copy) == repr(schedule)
        assert copy.scan("abcdefghi", str.__add__) == schedule.scan("abcdefghi", str.__add__)
    chain = copied(PeriodicChain([np.ones((4, 3))], [lower]))
    assert (chain.steps, chain.batch, chain.patterns) == (4, None, [lower])


def test_operations_of_no_schedule_can_be_written_to():
    for schedule in (
        Schedule.linear(9),
        Schedule.blelloch(9),
        Schedule.truncated(9, 1),
        Schedule.chunked(9, 3),
        Schedule.from_levels(9, Schedule.blelloch(9).levels),
        sparsescan.plan(np.ones((9, 2, 2))).schedule,
    ):
        for level in schedule.levels:
            for array in (level.ops, level.runs):
                with pytest.raises(ValueError, match="read-only"):
                    array[0] = 0
