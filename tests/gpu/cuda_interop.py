"""Chains whose values lie on a CUDA device: reading and checking them."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any

import fake_cupy
import numpy as np
import pytest
import scipy.sparse as sp
from fake_cupy import Tensor, state
from hypothesis import given
from malformed import malformed
from on_device import SIMULATED, cupy_or_stand_in

from sparsescan import (
    BatchedCSR,
    CSRChain,
    DeviceError,
    InputError,
    InputTypeError,
    Pattern,
    PatternMismatchError,
    SparseScanError,
)
from sparsescan.chains import containers
from sparsescan.chains.chain import Chain
from sparsescan.chains.containers import PeriodicChain
from sparsescan.chains.grads import LocalGrads, check_places, read_grad
from sparsescan.chains.reading import is_stack, length
from sparsescan.chains.steps import pattern_of
from sparsescan.kernels.cuda import device as _device
from sparsescan.kernels.cuda.checks import check_kernel

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)

simulated = pytest.mark.skipif(not SIMULATED, reason="looks into the stand-in for CuPy")
every_device = pytest.mark.parametrize("number", [0, 1])


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return cupy_or_stand_in(monkeypatch)


def device(cupy: Any, number: int = 1) -> Any:
    """Return a device, to be made the current one."""
    if number >= cupy.cuda.runtime.getDeviceCount():
        pytest.skip("needs a second device")
    return cupy.cuda.Device(number)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[fake_cupy.Launch]:
    return fake_cupy.watch(monkeypatch)


def draw(*shape: int, dtype: Any = float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def csr(rows: int, cols: int, seed: int = 0, dtype: Any = float) -> sp.csr_array:
    """Return a matrix with a third of the entries, always some, and an explicit zero."""
    rng = np.random.default_rng([seed, rows, cols])
    matrix = sp.random_array((rows, cols), density=0.4, rng=rng, format="csr", dtype=dtype)
    matrix.data[0] = 0
    return matrix


class Foreign:
    """An array of another library on a device."""

    def __init__(self, array: Any) -> None:
        self._kept = array
        self._device = array.device.id
        about = array.__cuda_array_interface__
        self.__cuda_array_interface__ = {
            key: about[key] for key in ("shape", "typestr", "data", "strides")
        } | {"version": 2}

    def __len__(self) -> int:
        return len(self._kept)


def put(cupy: Any, host: Any) -> Any:
    """Copy to the current device, in the same form; a view remains the same view."""
    if isinstance(host, list):
        return [put(cupy, entry) for entry in host]
    if isinstance(host, np.ndarray):
        if host.base is None or host.size == 0:
            return cupy.asarray(host)
        whole = cupy.asarray(host.base)
        start = whole.data + (host.ctypes.data - host.base.ctypes.data)
        return cupy.ndarray(host.shape, host.dtype, start, host.strides)
    if isinstance(host, BatchedCSR | CSRChain):
        return type(host)(put(cupy, host.data), host.indices, host.indptr, host.shape)
    if sp.issparse(host):
        import cupyx.scipy.sparse

        arrays = tuple(cupy.asarray(array) for array in (host.data, host.indices, host.indptr))
        container = cupyx.scipy.sparse.csr_matrix
        if isinstance(host, sp.csr_array):
            container = getattr(cupyx.scipy.sparse, "csr_array", container)
        return container(arrays, shape=host.shape)
    return host


def values_at(
    cupy: Any, address: int, size: int, dtype: np.dtype[Any], number: int | None
) -> np.ndarray:
    """Read what lies at an address, of a device or of the host, as a kernel sees it."""
    nbytes = size * dtype.itemsize
    if size == 0:
        return np.empty(0, dtype)
    if number is None:
        return np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype).copy()
    memory = cupy.cuda.UnownedMemory(address, nbytes, None, number)
    with cupy.cuda.Device(number):
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        values: np.ndarray = cupy.ndarray((size,), dtype, pointer).get()
    return values


def all_values(cupy: Any, chain: Chain, patterns: Any) -> list[np.ndarray]:
    """Read the values of every step, (batch, nnz), by the addresses that kernels get."""
    values = []
    for k, pattern in enumerate(patterns):
        if chain.stack is not None:
            base, step, sample = chain.stack
            first = base + k * step
        else:
            first, sample = chain.leaves[k].tolist()
        places = [first + b * sample for b in range(chain.batch or 1)]
        step_values = [
            values_at(cupy, place, pattern.nnz, chain.dtype, chain.device) for place in places
        ]
        values.append(np.stack(step_values))
    return values


def assert_equal(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


# A chain of each form, in host memory.
FORMS: dict[str, Callable[[], Any]] = {
    "dense list": lambda: [draw(3, 4), draw(2, 3), draw(5, 2)],
    "dense list, batches": lambda: [draw(6, 3, 4), draw(2, 3), draw(6, 5, 2)],
    "float32": lambda: [draw(3, 4, dtype=F32), draw(6, 2, 3, dtype=F32)],
    "transposed": lambda: [draw(4, 3).T, draw(3, 2, 6).T],
    "strided": lambda: [draw(3, 8)[:, ::2], draw(12, 2, 3)[::2], draw(6, 5, 6)[:, :, ::3]],
    "reversed steps": lambda: [draw(3, 4)[::-1], draw(2, 3)[:, ::-1]],
    "csr": lambda: [csr(3, 4), csr(2, 3), csr(5, 2)],
    "csr_matrix": lambda: [sp.csr_matrix(csr(3, 4)), csr(2, 3)],
    "BatchedCSR": lambda: [
        BatchedCSR(draw(6, a.nnz), a.indices, a.indptr, a.shape) for a in (csr(3, 4), csr(2, 3))
    ],
    "all kinds": lambda: [
        draw(3, 4),
        csr(3, 3),
        BatchedCSR(draw(6, 3), [0, 1, 2], [0, 1, 2, 3], (3, 3)),
        draw(6, 2, 3),
    ],
    "one step, one sample": lambda: [draw(1, 3, 4)],
    "no entries": lambda: [csr(3, 4), sp.csr_array((2, 3)), sp.csr_array((0, 2))],
    "dense stack": lambda: draw(5, 3, 3),
    "dense stack, batches": lambda: draw(5, 6, 3, 3),
    "reversed stack": lambda: draw(5, 6, 3, 3, dtype=F32)[::-1],
    "stack of every other sample": lambda: draw(5, 12, 3, 3)[:, ::2],
    "stack, transposed": lambda: draw(5, 6, 3, 3).swapaxes(2, 3),
    "samples before steps": lambda: draw(6, 5, 3, 3).swapaxes(0, 1),
    "stack of one": lambda: draw(1, 2, 3),
    "CSRChain": lambda: CSRChain(draw(5, 4), [0, 0, 1, 1], [0, 1, 3, 4], (3, 3)),
    "CSRChain, batches": lambda: CSRChain(draw(5, 6, 4)[::-1], [0, 0, 1, 1], [0, 1, 3, 4], (3, 3)),
    "CSRChain, no entries": lambda: CSRChain(draw(5, 0), [], [0, 0, 0], (2, 2)),
}
every_form = pytest.mark.parametrize("form", FORMS)


# -- Reading --------------------------------------------------------------------------------------


@every_form
@every_device
def test_a_chain_on_a_device_is_read_as_on_the_host(cupy: Any, form: str, number: int) -> None:
    host = FORMS[form]()
    n = len(host)
    expected = Chain(n)
    patterns = expected.read(host)
    # The values are there, and another device may be the current one.
    with device(cupy, number):
        there = put(cupy, host)
    chain = Chain(n)
    patterns_read = chain.read(there)
    assert all(a is b for a, b in zip(patterns_read, patterns, strict=True))
    assert length(there) == n
    assert chain.device == number
    assert expected.device is None
    assert chain.period == expected.period == is_stack(there)
    assert (chain.stack is not None) == (chain.period == 1)
    assert chain.stack is None or chain.stack[0] != 0  # by which kernels know what is stacked
    assert chain.batch == expected.batch
    assert chain.dtype == expected.dtype
    np.testing.assert_array_equal(chain.leaves[:, 1] != 0, expected.leaves[:, 1] != 0)
    values = all_values(cupy, chain, patterns)
    assert_equal(values, all_values(cupy, expected, patterns))
    expected.stacks = []  # the table says the same
    assert_equal(values, all_values(cupy, expected, patterns))
    if chain.period == 0:
        assert [pattern_of(k, jacobian) for k, jacobian in enumerate(there)] == list(patterns)


@every_form
def test_a_plans_patterns_on_a_device(cupy: Any, form: str) -> None:
    host = FORMS[form]()
    chain = Chain(len(host))
    patterns = chain.read(host)
    there = put(cupy, host)
    assert chain.read(there, patterns) is patterns
    assert chain.device == 0
    waits = state.waits
    assert chain.read(there, patterns) is patterns
    assert state.waits == waits
    # Bare values, in the order of the patterns.
    values = all_values(cupy, chain, patterns)
    again = Chain(len(host))
    again.read([cupy.asarray(step) for step in values], patterns)
    assert_equal(all_values(cupy, again, patterns), values)
    other = [Pattern.dense((9, 7))] * len(host)
    with pytest.raises(PatternMismatchError, match="as the plan was made for"):
        chain.read(there, other)
    chain.read(host, patterns)
    assert chain.device is None
    assert all(chain.leaves[:, 0] != 0)


def test_a_chain_that_is_read_again_is_as_a_new_one(cupy: Any) -> None:
    """What the table says is remembered from read to read, of chains in any form and place."""
    rng = np.random.default_rng(0)
    stack, batches = draw(4, 3, 3), draw(4, 6, 3, 3)
    one, shared = Pattern.diagonal(3), Pattern.dense((3, 3))
    forms: list[Any] = [
        *(stack, stack[::-1], batches, batches[:, ::-1], batches.astype(F32)),
        *(np.broadcast_to(stack[:, None], (4, 6, 3, 3)), np.broadcast_to(stack[0], (4, 3, 3))),
        *(list(stack), list(batches), [*stack[:2], *batches[2:]]),
        *(PeriodicChain([draw(2, 6, 3), draw(9)], [one, shared]),),
        *(PeriodicChain([draw(2, 3), draw(2, 9)], [one, shared]),),
    ]
    host = len(forms)
    forms += [put(cupy, form) for form in forms[:-2]]
    again = Chain(4)
    for k in rng.integers(0, len(forms), 300).tolist():
        fresh = Chain(4)
        for chain in (fresh, again):
            chain.read(forms[k])
            if rng.random() < 0.3 and chain is again:
                chain.differs()
            chain.convert(F64)
        assert again.stacks == fresh.stacks or forms[k].dtype == F32
        assert (again.differs(), again.batch) == (fresh.differs(), fresh.batch)
        np.testing.assert_array_equal(again.batched, fresh.batched)
        np.testing.assert_array_equal(again.leaves[:, 1], fresh.leaves[:, 1])
        if k < host and getattr(forms[k], "dtype", F64) == F64:
            np.testing.assert_array_equal(again.leaves, fresh.leaves)
        for turn, period in ((0, 1), (0, 2), (1, 2)):
            leaves = fresh.leaves[turn::period]
            if k < host:
                expected = (leaves[:, 0] == leaves[0, 0]).all() and not leaves[:, 1].any()
                assert again.is_shared(turn, period) == expected


def test_what_is_contiguous_is_not_copied(cupy: Any) -> None:
    stack = cupy.asarray(draw(5, 6, 3, 3))
    size = stack.nbytes // 5
    state.waits = 0
    chain = Chain(5)
    chain.leaves[:, 0] = 99
    chain.read(stack)
    assert chain.stack == (stack.data.ptr, size, size // 6)
    assert (chain.leaves[:, 0] == 99).all()  # no table is filled
    chain.read(stack[::-1])
    assert chain.stack == (stack.data.ptr + 4 * size, -size, size // 6)
    chain.read(CSRChain(stack.reshape(5, 6, 9)[::-1, ::2], *dense_indices(3), (3, 3)))
    assert chain.stack == (stack.data.ptr + 4 * size, -size, size // 3)
    chain.read(list(stack))
    assert chain.stack is None
    assert chain.leaves[:, 0].tolist() == [stack.data.ptr + k * size for k in range(5)]
    assert state.waits == 0


def dense_indices(size: int) -> tuple[np.ndarray, np.ndarray]:
    return np.tile(np.arange(size), size), np.arange(size + 1) * size


@every_device
def test_arrays_of_other_libraries_are_not_copied(cupy: Any, number: int) -> None:
    matrix = csr(3, 3)
    with device(cupy, number):
        values = cupy.asarray(draw(5, 6, 3, 3, dtype=F32))
        grad = cupy.asarray(draw(6, 3, dtype=F32))
        data = Foreign(cupy.asarray(draw(6, matrix.nnz)))
        index_arrays = [Foreign(cupy.asarray(a)) for a in (matrix.indices, matrix.indptr)]
    step = values.nbytes // 5
    chain = Chain(5)
    assert length(Foreign(values)) == 5
    patterns = chain.read(Foreign(values))
    assert chain.stack == (values.data.ptr, step, step // 6)
    assert chain.device == number
    assert chain.period == 1
    assert chain.dtype == F32
    chain.read([Foreign(matrix) for matrix in values], patterns)
    assert chain.leaves[:, 0].tolist() == [values.data.ptr + k * step for k in range(5)]
    batched = BatchedCSR(data, *index_arrays, (3, 3))
    assert batched.pattern is Pattern(matrix.indptr, matrix.indices, (3, 3))
    chain.read([batched] * 5)
    assert chain.device == number
    assert read_grad(Foreign(grad), 3, 6).data.ptr == grad.data.ptr
    local = LocalGrads(Foreign(values[:, :, 0]), 5, [3] * 6, (6,))
    assert local.device == number


# -- Index arrays on a device ---------------------------------------------------------------------


@simulated
def test_index_arrays_are_checked_once(cupy: Any, launches: list[Any]) -> None:
    import cupyx

    matrices = put(cupy, [csr(3, 4), csr(3, 3), csr(2, 3)])
    chain = Chain(3)
    waits = state.waits
    patterns = chain.read(matrices)
    assert [launch.kernel for launch in launches] == ["check_indices"] * 3
    # The result of a kernel, and the two index arrays: each waits once.
    assert state.waits == waits + 9
    for matrix in matrices:
        matrix.data *= 2
    rebuilt = [
        cupyx.scipy.sparse.csr_matrix((m.data + 1, m.indices, m.indptr), m.shape) for m in matrices
    ]
    batched = [BatchedCSR(cupy.zeros((6, m.nnz)), m.indices, m.indptr, m.shape) for m in matrices]
    waits = state.waits
    for jacobians in (matrices, rebuilt, batched):
        assert chain.read(jacobians, patterns) is patterns
        assert chain.read(jacobians) == list(patterns)
    assert len(launches) == 3
    assert state.waits == waits
    # Copies of index arrays are new ones.
    copied = matrices[1].indices.copy()
    matrices[1] = cupyx.scipy.sparse.csr_array(
        (matrices[1].data, copied, matrices[1].indptr), (3, 3)
    )
    chain.read(matrices, patterns)
    assert len(launches) == 4


def test_what_was_learnt_of_index_arrays_goes_with_them(cupy: Any) -> None:
    gc.collect()
    known = len(containers._orders)
    ids = set()
    for k in range(200):
        indices, indptr = cupy.asarray(np.array([k])), cupy.asarray(np.array([0, 1]))
        ids.add((id(indices), id(indptr)))
        chain = CSRChain(cupy.zeros((1, 1)), indices, indptr, (1, 200))
        assert chain.indices.tolist() == [k]
        assert len(containers._orders) == known + 1
        del indices, indptr
        assert len(containers._orders) == known
    assert len(ids) < 200  # some came twice, of arrays with another column


def test_index_arrays_are_followed_as_they_were_checked(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is written into them from then on."""
    from sparsescan.kernels.cuda import checks as cuda_checks

    safe = cuda_checks.is_safe
    matrix = csr(4, 5, seed=3)
    wanted = Pattern(matrix.indptr, matrix.indices, (4, 5))
    for dtype in (np.int32, np.int64):
        indptr, indices = (
            cupy.asarray(array.astype(dtype)) for array in (matrix.indptr, matrix.indices)
        )

        def poisoned(*arguments: Any, arrays: Any = (indptr, indices)) -> bool:
            was_safe = safe(*arguments)
            for array in arrays:
                array.fill(1_000_000)
            return was_safe

        monkeypatch.setattr(cuda_checks, "is_safe", poisoned)
        values = cupy.asarray(np.ones((2, matrix.nnz)))
        assert BatchedCSR(values, indices, indptr, (4, 5)).pattern is wanted


def grids(size: int) -> list[tuple[int, int]]:
    return [(1, 1), (1, 2), (3, 1), (2, size), (size + 3, 2)]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_kernel_finds_a_fault_at_every_place(cupy: Any, dtype: Any) -> None:
    matrix = csr(4, 5, seed=3)
    indptr, indices = matrix.indptr.astype(dtype), matrix.indices.astype(dtype)
    nnz = len(indices)

    def faults(indptr: np.ndarray, indices: np.ndarray) -> set[int]:
        pointers, columns = cupy.asarray(indptr), cupy.asarray(indices)
        seen = set()
        for blocks, threads in grids(4):
            fault = cupy.zeros(1, np.int32)
            arguments = pointers.data.ptr, 4, columns.data.ptr, nnz, 5, fault.data.ptr
            stream = cupy.cuda.get_current_stream().ptr
            _device.launch(check_kernel(np.dtype(dtype)), blocks, threads, stream, *arguments)
            seen.add(int(fault.get()[0]))
        return seen

    assert faults(indptr, indices) == {0}
    assert faults(indptr, indices[::-1].copy()) == {0}  # unsorted is safe
    for place in range(5):
        for value in (-1, np.iinfo(dtype).min, np.iinfo(dtype).max, nnz + 1):
            bad = indptr.copy()
            bad[place] = value
            assert faults(bad, indices) == {1}
    falls = indptr.copy()
    falls[1], falls[2] = indptr[2], indptr[1]
    assert indptr[1] < indptr[2]
    assert faults(falls, indices) == {1}
    assert faults(np.minimum(indptr, nnz - 1), indices) == {1}
    for place in range(nnz):
        for value in (-1, 5, np.iinfo(dtype).min, np.iinfo(dtype).max):
            bad = indices.copy()
            bad[place] = value
            assert faults(indptr, bad) == {1}


INDEX_DTYPES = ("i4", "i8", "u4", "u8", "i2", "u1", "f8", "?")


def outcome(cupy: Any, indptr: Any, indices: Any, shape: tuple[int, int]) -> Any:
    """Return the pattern and made-up values in its order; or the error."""
    try:
        layout = containers.canonical_order("jacobians[3]", indptr, indices, shape)
    except SparseScanError as error:
        return type(error), str(error), error.__cause__
    values = np.arange(1.0, 2 * layout.size + 1).reshape(2, layout.size)
    if isinstance(indptr, np.ndarray):
        return layout.pattern, layout.values(values).tolist()
    waits = state.waits
    in_order = layout.values(cupy.asarray(values))
    assert state.waits == waits
    return layout.pattern, in_order.get().tolist()


@given(malformed(INDEX_DTYPES, least=0))
def test_faults_are_found_and_named_as_on_the_host(cupy: Any, matrix: Any) -> None:
    indptr, indices, shape = matrix.indptr, matrix.indices, matrix.shape
    expected = outcome(cupy, indptr, indices, shape)
    assert outcome(cupy, cupy.asarray(indptr), cupy.asarray(indices), shape) == expected


# -- One place ------------------------------------------------------------------------------------


def test_a_chain_lies_on_one_device(cupy: Any) -> None:
    here = draw(3, 3)
    there = [None, None]
    for number in range(2):
        with device(cupy, number):
            there[number] = cupy.asarray(here)
    first, second = there
    sparse = put(cupy, csr(3, 3))
    for jacobians, message in [
        ([first, first, first, second], "jacobians[3] is on device 1, jacobians[0] on device 0"),
        ([second, sparse], "jacobians[1] is on device 0, jacobians[0] on device 1"),
        ([first, here], "jacobians[1] is in host memory, jacobians[0] on device 0"),
        ([first, csr(3, 3)], "jacobians[1] is in host memory, jacobians[0] on device 0"),
        ([csr(3, 3), csr(3, 3), sparse], "jacobians[2] is on device 0, jacobians[0] in host mem"),
        ([here, Foreign(second)], "jacobians[1] is on device 1, jacobians[0] in host memory"),
        ([first, here.tolist()], "jacobians[1] is in host memory, jacobians[0] on device 0"),
    ]:
        patterns = [pattern_of(0, jacobian) for jacobian in jacobians]
        for expected in (None, patterns):
            with pytest.raises(DeviceError) as caught:
                Chain(len(jacobians)).read(jacobians, expected)
            assert str(caught.value).startswith(message)
            assert "; expected all on one device" in str(caught.value)
            assert ("cupy.asarray" in str(caught.value)) == ("host mem" in message)
    # A call that failed leaves nothing behind.
    chain = Chain(2)
    with pytest.raises(DeviceError):
        chain.read([first, second])
    chain.read([csr(3, 3), csr(3, 3)])
    assert chain.device is None


def test_all_input_lies_on_one_device(cupy: Any) -> None:
    grad, stack = draw(3), draw(2, 3, 3)
    chain, on_host = Chain(2), Chain(2)
    chain.read(cupy.asarray(stack))
    on_host.read(stack)
    none = LocalGrads(None, 2, [3, 3, 3], ())
    local = LocalGrads(draw(2, 3), 2, [3, 3, 3], ())
    with device(cupy):
        elsewhere = LocalGrads([None, cupy.asarray(grad)], 2, [3, 3, 3], ())
    assert elsewhere.device == 1
    there = read_grad(cupy.asarray(grad), 3, None)
    assert check_places(there, chain, none) == 0
    assert check_places(grad, on_host, local) is None
    assert check_places(there, Chain(0), none) == 0
    for arguments, message in [
        ((grad, chain, none), "grad is in host memory, jacobians on device 0"),
        ((there, on_host, none), "grad is on device 0, jacobians in host memory"),
        ((there, chain, local), "local_grads is in host memory, grad on device 0"),
        ((there, chain, elsewhere), "local_grads is on device 1, grad on device 0"),
    ]:
        with pytest.raises(DeviceError) as caught:
            check_places(*arguments)
        assert str(caught.value).startswith(f"{message}; expected all on one device")


# -- Errors are those of the host -----------------------------------------------------------------

BAD_CHAINS = {
    "dtype of a matrix": lambda: [draw(3, 3), draw(3, 3, dtype=np.float16)],
    "dtype of a stack": lambda: draw(2, 3, 3, dtype=np.int64),
    "axes of a matrix": lambda: [draw(3, 3), draw(3)],
    "no axes": lambda: [draw(3, 3), np.array(1.0)],
    "axes of a stack": lambda: draw(2, 3),
    "few axes": lambda: draw(2),
    "shapes": lambda: [draw(3, 4), draw(2, 2)],
    "a stack that is not square": lambda: draw(2, 3, 4),
    "batches": lambda: [draw(2, 3, 4), draw(3, 2, 3)],
    "a pattern": lambda: [draw(3, 3), Pattern.diagonal(3)],
    "a CSRChain in a list": lambda: [FORMS["CSRChain"]()],
}


@pytest.mark.parametrize("name", BAD_CHAINS)
def test_bad_chains(cupy: Any, name: str) -> None:
    host = BAD_CHAINS[name]()
    messages = []
    for jacobians in (host, put(cupy, host)):
        with pytest.raises((InputError, InputTypeError)) as caught:
            Chain(length(jacobians)).read(jacobians)
        messages.append((type(caught.value), str(caught.value)))
    assert messages[0] == messages[1]


@simulated
@pytest.mark.parametrize(
    ("option", "why"),
    [("requires_grad", "requires grad"), ("negated", r"the other sign; \.resolve_neg\(\) copies")],
)
def test_what_cupy_cannot_read(cupy: Any, option: str, why: str) -> None:
    tensor = Tensor(draw(3, 3), **{option: True})
    for call in (
        lambda: Chain(1).read([tensor]),
        lambda: length(tensor),
        lambda: read_grad(tensor, 3, None),
        lambda: LocalGrads(tensor, 1, [3], ()),
    ):
        with pytest.raises(InputTypeError, match=f"Tensor that CuPy cannot read: .*{why}"):
            call()


@simulated
def test_what_is_not_aligned_is_refused(cupy: Any) -> None:
    odd = cupy.zeros(3 * 24 + 1, np.uint8)[1:].view(np.float64)
    assert odd.data.ptr % 8
    with pytest.raises(InputError, match=r"grad is not aligned; expected multiples of 8 bytes"):
        read_grad(odd, 9, None)
    strided = Tensor(np.ndarray((2, 3), F64, cupy.zeros(60, np.uint8)._array, strides=(28, 8)))
    with pytest.raises(InputError, match=r"jacobians\[0\] is not aligned"):
        Chain(1).read([strided])


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    tensor, matrix = Tensor(draw(2, 3, 3)), csr(3, 3)
    for name, call in [
        ("grad", lambda: read_grad(tensor, 3, None)),
        ("jacobians", lambda: length(tensor)),
        ("jacobians", lambda: Chain(2).read(tensor)),
        ("jacobians[1]", lambda: Chain(2).read([matrix, tensor])),
        ("local_grads", lambda: LocalGrads(tensor, 2, [3, 3], (3,))),
        ("local_grads[1]", lambda: LocalGrads([None, tensor], 2, [3, 3], (3,))),
        ("BatchedCSR data", lambda: BatchedCSR(tensor, matrix.indices, matrix.indptr, (3, 3))),
        ("CSRChain indices", lambda: CSRChain(draw(2, 9), tensor, matrix.indptr, (3, 3))),
        ("CSRChain indptr", lambda: CSRChain(draw(2, 9), matrix.indices, tensor, (3, 3))),
    ]:
        with pytest.raises(DeviceError) as caught:
            call()
        assert str(caught.value) == (
            f"{name} is a fake_cupy.Tensor on a CUDA device, but CuPy cannot be imported: "
            "pip install 'sparsescan[cuda13]', or [cuda12]"
        )
        assert caught.value.__cause__ is None


# -- Converting and uploading ---------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("dtype", [F32, F64])
def test_convert(cupy: Any, form: str, dtype: np.dtype[Any]) -> None:
    host = FORMS[form]()
    number = cupy.cuda.runtime.getDeviceCount() - 1
    with device(cupy, number):
        there = put(cupy, host)
    expected, chain = Chain(len(host)), Chain(len(host))
    patterns = expected.read(host)
    chain.read(there)
    expected.convert(dtype)
    chain.convert(dtype)
    expected.dtype = chain.dtype = dtype  # by which the test reads
    assert_equal(all_values(cupy, chain, patterns), all_values(cupy, expected, patterns))
    assert chain.device == number


class Transfers:
    """Counts copies from the host."""

    def __init__(self, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: list[int] = []
        asarray = cupy.asarray

        def count(a: Any, dtype: Any = None) -> Any:
            if isinstance(a, np.ndarray):
                self.bytes.append(a.nbytes)
            return asarray(a, dtype)

        monkeypatch.setattr(cupy, "asarray", count)


@every_form
def test_upload(cupy: Any, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = FORMS[form]()
    chain, expected = Chain(len(host)), Chain(len(host))
    patterns = expected.read(host)
    chain.read(host)
    transfers = Transfers(cupy, monkeypatch)
    number = cupy.cuda.runtime.getDeviceCount() - 1
    state.waits = 0
    with device(cupy, number):
        chain.upload()
    assert chain.device == number
    assert len(transfers.bytes) == 1
    assert (chain.stack is None) == (expected.stack is None)
    assert state.waits == 0
    assert_equal(all_values(cupy, chain, patterns), all_values(cupy, expected, patterns))


def test_upload_promotes_and_shares(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = draw(3, 3, dtype=F32), csr(3, 3)
    chain = Chain(5)
    patterns = chain.read([narrow, wide, wide, wide, wide])
    transfers = Transfers(cupy, monkeypatch)
    chain.upload()
    # An array that is there many times is sent once.
    assert transfers.bytes == [8 * (9 + wide.nnz)]
    assert len(set(chain.leaves[:, 0].tolist())) == 2
    values = all_values(cupy, chain, patterns)
    np.testing.assert_array_equal(values[0].reshape(3, 3), narrow)
    np.testing.assert_array_equal(values[4][0], wide.data)
    chain.convert(F64)
    assert len(set(chain.leaves[:, 0].tolist())) == 2


# -- Local gradients ------------------------------------------------------------------------------

LOCALS: dict[str, Callable[[], Any]] = {
    "none": lambda: [None] * 4,
    "list": lambda: [draw(6, 3), None, draw(6, 3, dtype=F32), draw(3, 6).T],
    "no first": lambda: [None, draw(6, 3), None, None],
    "stack": lambda: draw(4, 6, 3),
    "reversed": lambda: draw(4, 6, 3)[::-1],
    "float32": lambda: draw(4, 6, 3, dtype=F32),
    "strided": lambda: draw(8, 6, 3)[::2],
    "transposed": lambda: draw(4, 3, 6).swapaxes(1, 2),
    "samples first": lambda: draw(6, 4, 3).swapaxes(0, 1),
}
every_local = pytest.mark.parametrize("form", LOCALS)


def read_back(cupy: Any, local: LocalGrads, dtype: np.dtype[Any]) -> list[np.ndarray | None]:
    """Every local gradient by the address that kernels get."""
    addresses = np.full(5, 99, np.int64)
    local.fill(addresses)
    assert addresses[4] == 0
    if local.stack is not None:
        base, step = local.stack
        assert addresses[:4].tolist() == [base + k * step for k in range(4)]
    return [
        values_at(cupy, address, 18, dtype, local.device).reshape(6, 3) if address else None
        for address in addresses[:4].tolist()
    ]


@every_local
@pytest.mark.parametrize("where", ["host", "device", "upload"])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_local_gradients(cupy: Any, form: str, where: str, dtype: np.dtype[Any]) -> None:
    host = LOCALS[form]()
    number = cupy.cuda.runtime.getDeviceCount() - 1
    with device(cupy, number):
        local = LocalGrads(put(cupy, host) if where == "device" else host, 4, [3] * 5, (6,))
        if where == "upload":
            local.upload()
        some = form != "none"
        assert local.given == some
        assert local.device == (number if where != "host" and some else None)
        grad = draw(6, 3, seed=9)
        first = grad if host[0] is None else grad + host[0]
        if where == "host":
            out = np.full((6, 3), np.nan)
            local.add_first(grad, out)
        else:
            there = cupy.full((6, 3), np.nan)
            local.add_first(cupy.asarray(grad), there)
            out = there.get()
    np.testing.assert_array_equal(out, first)
    state.waits = 0
    local.convert(dtype)  # while another device may be the current one
    assert state.waits == 0
    assert (local.stack is not None) == isinstance(host, np.ndarray)
    if some:
        for actual, expected in zip(read_back(cupy, local, dtype), host, strict=True):
            assert (actual is None) == (expected is None)
            if expected is not None:
                np.testing.assert_array_equal(actual, expected.astype(dtype))


@simulated
def test_local_gradients_that_came_as_one_array_are_not_taken_apart(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = cupy.asarray(draw(4, 6, 3))
    size = stack.nbytes // 4
    views = []
    getitem = type(stack).__getitem__
    monkeypatch.setattr(
        type(stack), "__getitem__", lambda self, key: views.append(key) or getitem(self, key)
    )
    for some, address, step in [
        (stack, stack.data.ptr, size),
        (stack[::-1], stack.data.ptr + 3 * size, -size),
        (stack[::3], stack.data.ptr, 3 * size),
    ]:
        views.clear()
        local = LocalGrads(some, len(some), [3] * 5, (6,))
        local.convert(F64)
        local.add_first(cupy.zeros((6, 3)), cupy.zeros((6, 3)))
        assert local.stack == (address, step)
        assert len(views) <= 2


def test_local_gradients_are_uploaded_at_once(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = Transfers(cupy, monkeypatch)
    for form in LOCALS:
        transfers.bytes.clear()
        LocalGrads(LOCALS[form](), 4, [3] * 5, (6,)).upload()
        assert len(transfers.bytes) == (form != "none")


def test_bad_local_gradients(cupy: Any) -> None:
    host = draw(3, 6, 3)
    with device(cupy):
        elsewhere = cupy.asarray(host[0])
    for local, message in [
        ([None, cupy.asarray(host[0]), elsewhere], "local_grads[2] is on device 1, local_grads[1]"),
        (
            [cupy.asarray(host[0]), None, host[0]],
            "local_grads[2] is in host memory, local_grads[0]",
        ),
    ]:
        with pytest.raises(DeviceError) as caught:
            LocalGrads(local, 3, [3] * 4, (6,))
        assert str(caught.value).startswith(message)
    for sizes, batch_shape, bad in [
        ([3] * 4, (5,), host),
        ([3] * 4, (), host),
        ([3, 3, 2, 3], (6,), host),
        ([2, 3, 3, 3], (6,), host),
        ([3] * 4, (6,), host[:2]),
        ([3] * 4, (6,), host.astype(np.int64)),
        ([3] * 4, (6,), [None, host[0, 0], None]),
        ([3] * 4, (6,), np.array(1.0)),
    ]:
        messages = []
        for local in (bad, put(cupy, bad)):
            with pytest.raises((InputError, InputTypeError)) as caught:
                LocalGrads(local, 3, sizes, batch_shape)
            messages.append((type(caught.value), str(caught.value).replace("cupy", "numpy")))
        assert messages[0] == messages[1]


# -- What kernels were launched -------------------------------------------------------------------


def test_importing_imports_no_cuda() -> None:
    import subprocess

    code = (
        "import sys, numpy as np, sparsescan; "
        "sparsescan.exclusive_scan(np.ones(2), np.ones((3, 2, 2))); "
        "assert not {'cupy', 'numba.cuda', 'sparsescan.kernels.cuda.device'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
