"""Bad input: one exception that names the argument, what was passed and what is expected."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from fresh_python import run_python
from hypothesis import given, seed, settings
from malformed import Liar, malformed
from oracles import assert_within, every_schedule, same_bits, sequential

import sparsescan
from sparsescan import (
    BatchedCSR,
    CSRChain,
    DeviceError,
    InputError,
    InputTypeError,
    Pattern,
    Schedule,
    SparseScanError,
)
from sparsescan.jacobians import Linear, ReLU
from sparsescan.symbolic.schedule import Level


def csr(rows: int = 3, cols: int = 3, **changes: Any) -> sp.csr_array:
    """Return a full CSR array, some of its arrays replaced after SciPy has checked them."""
    matrix = sp.csr_array(np.arange(1.0, rows * cols + 1).reshape(rows, cols))
    for name, array in changes.items():
        setattr(matrix, name, np.array(array))
    return matrix


def refused(grad: Any, jacobians: Any, **options: Any) -> str:
    """Return the message with which a scan and, where it can see it, a plan refuse this input."""
    messages = set()
    for call in (sparsescan.exclusive_scan, sparsescan.inclusive_scan):
        with pytest.raises(SparseScanError) as caught:
            call(grad, jacobians, **options)
        assert caught.value.__cause__ is None
        messages.add((type(caught.value), str(caught.value)))
    assert len(messages) == 1
    return f"{type(caught.value).__name__}: {caught.value}"


# ---------------------------------------------------------------------------------------------
# CSR structure
# ---------------------------------------------------------------------------------------------

WRONG_VALUES = {
    "starts off 0": ({"indptr": [1, 3, 6, 9]}, "an indptr that starts at 1; expected 0"),
    "falls": ({"indptr": [0, 6, 3, 9]}, "an indptr that falls after row 1; expected"),
    "ends early": ({"indptr": [0, 3, 6, 8]}, "an indptr that ends at 8; expected 9"),
    "ends late": ({"indptr": [0, 3, 6, 10]}, "an indptr that ends at 10; expected 9"),
    "negative indptr": ({"indptr": [0, -3, 6, 9]}, "an indptr that falls after row 0; expected"),
    "short indptr": ({"indptr": [0, 3, 9]}, "an indptr of 3 entries; expected 4 for 3 rows"),
    "long indptr": ({"indptr": [0, 3, 6, 9, 9]}, "an indptr of 5 entries; expected 4 for 3 rows"),
    "index too large": (
        {"indices": [0, 1, 2, 0, 1, 3, 0, 1, 2]},
        "an index 3 in row 1; expected columns 0 to 2",
    ),
    "huge index": (
        {"indices": np.array([0, 1, 2, 0, 1, 2, 0, 1, 2**32])},
        "an index 4294967296 in row 2; expected columns 0 to 2",
    ),
    "negative index": (
        {"indices": [0, 1, 2, -1, 1, 2, 0, 1, 2]},
        "an index -1 in row 1; expected columns 0 to 2",
    ),
    "short data": ({"data": np.ones(8)}, "data of shape (8,); expected (9,)"),
    "long data": ({"data": np.ones(10)}, "data of shape (10,); expected (9,)"),
    "data with two axes": ({"data": np.ones((9, 1))}, "data of shape (9, 1); expected (9,)"),
    "indices with two axes": (
        {"indices": np.zeros((3, 3), np.int32)},
        "indices of shape (3, 3); expected one dimension",
    ),
}
WRONG_TYPES = {
    "float indices": (
        {"indices": np.arange(9.0) % 3}, "indices of dtype float64; expected integers"
    ),
    "float indptr": (
        {"indptr": [0.0, 3.0, 6.0, 9.0]}, "indptr of dtype float64; expected integers"
    ),
    "boolean indices": (
        {"indices": np.zeros(9, bool)}, "indices of dtype bool; expected integers"
    ),
}  # fmt: skip
MALFORMED = {
    name: (changes, f"{kind}: jacobians[1] has {text}")
    for kind, cases in (("InputError", WRONG_VALUES), ("InputTypeError", WRONG_TYPES))
    for name, (changes, text) in cases.items()
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_csr_array(name):
    changes, message = MALFORMED[name]
    bad = csr(**changes)
    before = [array.tobytes() for array in (bad.data, bad.indices, bad.indptr)]
    assert refused(np.ones(3), [csr(), bad, csr()]).startswith(message)
    with pytest.raises(SparseScanError) as caught:
        sparsescan.plan([csr(), bad, csr()])
    assert str(caught.value) == refused(np.ones(3), [csr(), bad, csr()]).split(": ", 1)[1]
    plan = sparsescan.plan([csr()] * 3)
    with pytest.raises(SparseScanError) as caught:
        plan.exclusive_scan(np.ones(3), [csr(), bad, csr()])
    assert str(caught.value).startswith("jacobians[1] ")
    assert [array.tobytes() for array in (bad.data, bad.indices, bad.indptr)] == before


# ---------------------------------------------------------------------------------------------
# Unsorted and duplicate columns: accepted, made canonical on a copy
# ---------------------------------------------------------------------------------------------


def messy() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values, indices and indptr: unsorted rows, columns that come twice, empty rows."""
    return (
        np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        np.array([2, 0, 2, 1, 1, 0], np.int32),
        np.array([0, 3, 3, 6, 6], np.int32),
    )


CLEAN = np.array([[2.0, 0, 4.0, 0], [0, 0, 0, 0], [6.0, 9.0, 0, 0], [0, 0, 0, 0]])


def test_unsorted_and_duplicate_columns_are_summed_on_a_copy():
    arrays = messy()
    grad = np.array([1.0, 10.0, 100.0, 1000.0])
    matrix = sp.csr_array((4, 4))
    matrix.data, matrix.indices, matrix.indptr = arrays
    for jacobians in (
        [matrix, matrix, np.eye(4)],
        [BatchedCSR(arrays[0][None], *arrays[1:], (4, 4))] * 3,
        CSRChain(np.stack([arrays[0]] * 3), *arrays[1:], (4, 4)),
        CSRChain(np.stack([arrays[0]] * 3)[:, None], *arrays[1:], (4, 4)),
    ):
        batched = isinstance(jacobians, CSRChain) and jacobians.batch
        batched = batched or (isinstance(jacobians, list) and hasattr(jacobians[0], "batch"))
        g = grad[None] if batched else grad
        for schedule in every_schedule(3):
            result = sparsescan.exclusive_scan(g, jacobians, schedule=schedule)
            expected = [g, g @ CLEAN.T, g @ CLEAN.T @ CLEAN.T]
            assert same_bits(result, expected)
    for array, fresh in zip(arrays, messy(), strict=True):
        assert array.tobytes() == fresh.tobytes()


# ---------------------------------------------------------------------------------------------
# Shapes that do not agree
# ---------------------------------------------------------------------------------------------


def test_dimensions_that_do_not_chain():
    message = refused(np.ones(30), [np.ones((25, 30)), np.ones((20, 30))])
    assert message == (
        "InputError: jacobians[1] has shape (20, 30), but jacobians[0] has 25 rows; "
        "expected (·, 25): order them from the last layer to the first, each transposed"
    )
    with pytest.raises(InputError, match=r"jacobians\[2\] has shape \(4, 3\), but jacobians\[1\]"):
        sparsescan.plan([Pattern.dense((2, 3)), Pattern.dense((2, 2)), Pattern.dense((4, 3))])
    with pytest.raises(InputError, match=r"has shape \(2, 3\)"):
        sparsescan.exclusive_scan(np.ones(3), np.ones((2, 2, 3)))


@pytest.mark.parametrize("shape", [(3,), (5,), (), (2, 3), (2, 2, 4), (4, 2)])
def test_a_gradient_of_a_wrong_shape(shape):
    message = refused(np.ones(shape), [np.ones((3, 4))] + [np.ones((3, 3))] * 2)
    assert message.startswith(f"InputError: grad has shape {shape}; expected (4,) or (batch, 4)")


def test_batch_sizes_that_differ():
    jacobians = [np.ones((2, 3, 3)), np.ones((3, 3)), np.ones((4, 3, 3))]
    assert refused(np.ones((2, 3)), jacobians).startswith(
        "InputError: jacobians[2] has a batch of 4, an earlier one of 2; expected one batch size"
    )


# ---------------------------------------------------------------------------------------------
# Types
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["coo", "csc", "bsr", "dia", "dok", "lil"])
@pytest.mark.parametrize("kind", ["array", "matrix"])
def test_other_sparse_formats_are_told_the_way(form, kind):
    matrix = getattr(sp, f"{form}_{kind}")(np.eye(3))
    message = refused(np.ones(3), [csr(), matrix, csr()])
    assert message == (
        f"InputTypeError: jacobians[1] is a {form}_{kind}; expected CSR: convert it with .tocsr()"
    )


DTYPES = [np.float16, np.longdouble, complex, np.complex64, int, np.int8, np.uint64, bool, object]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_other_dtypes_are_refused_by_name(dtype):
    name = np.dtype(dtype).name
    if np.dtype(dtype) == np.float64:
        pytest.skip("long double is double here")
    odd = csr()
    odd.data = np.ones(9, dtype)
    says = f"dtype {name}; expected float32 or float64"
    if np.dtype(dtype).kind == "c":
        says += (
            ": sparsescan.affine_scan takes complex numbers in host memory; elsewhere write each "
            "a + bi as the block [[a, -b], [b, a]]"
        )
    elif dtype is not object:
        says += ": convert it with .astype(float)"
    eye = np.eye(3, dtype=dtype)
    assert says in refused(np.ones(3), [csr(), odd])
    assert refused(np.ones(3), [csr(), eye]) == f"InputTypeError: jacobians[1] has {says}"
    assert refused(np.ones(3), np.stack([eye, eye])) == f"InputTypeError: jacobians has {says}"
    assert refused(np.ones(3, dtype), [csr()]) == f"InputTypeError: grad has {says}"
    local = [None, np.ones(3, dtype), None]
    with pytest.raises(InputTypeError, match=re.escape(f"local_grads[1] has {says}")):
        sparsescan.exclusive_scan(np.ones(3), [csr()] * 3, local_grads=local)
    for kind in (BatchedCSR, CSRChain):
        with pytest.raises(InputTypeError, match=re.escape(f"{kind.__name__} data has {says}")):
            kind(np.ones((2, 9), dtype), csr().indices, csr().indptr, (3, 3))
    with pytest.raises(InputTypeError, match=f"dtype is .*{name}.*; expected float32 or float64"):
        sparsescan.plan([csr()], dtype=dtype)


@pytest.mark.parametrize(
    ("jacobians", "message"),
    [
        (None, "jacobians is a NoneType; expected a sequence"),
        (3, "jacobians is a int; expected a sequence"),
        ("csr", "jacobians is a str; expected a sequence"),
        ({1: 2}, "jacobians is a dict; expected a sequence"),
        ((m for m in [csr()]), "jacobians is a generator; expected a sequence"),
        (csr(), "jacobians is a csr_array; expected a sequence"),
        (BatchedCSR(np.ones((2, 3)), [0, 1, 2], [0, 1, 2, 3], (3, 3)), "jacobians is a BatchedCSR"),
        ([Pattern.diagonal(3)], "jacobians[0] is a Pattern, which has no values; expected a Jac"),
        (
            [csr(), CSRChain(np.ones((2, 3)), [0, 1, 2], [0, 1, 2, 3], (3, 3))],
            "jacobians[1] is a C",
        ),
        ([csr(), None], "jacobians[1] has dtype object; expected float32 or float64"),
    ],
)
def test_what_is_no_chain(jacobians, message):
    assert refused(np.ones(3), jacobians).startswith(f"InputTypeError: {message}")


class OnDevice:
    """An object that says that its memory is a GPU's, as CuPy's and PyTorch's arrays do."""

    shape, dtype, ndim = (3,), np.dtype(float), 1

    @property
    def __cuda_array_interface__(self):
        return {"shape": (3,), "typestr": "<f8", "data": (0, False), "version": 3}

    def __len__(self):
        return 3

    def __array__(self, *_, **__):
        raise AssertionError("copied from the device without being asked")


def test_arrays_on_a_device_without_cupy():
    on_device = OnDevice()
    says = r"OnDevice on a CUDA device, but CuPy cannot be imported: pip install"
    for grad, jacobians, name in [
        (on_device, [csr()], "grad"),
        (np.ones(3), on_device, "jacobians"),
        (np.ones(3), [csr(), on_device], "jacobians[1]"),
    ]:
        message = refused(grad, jacobians)
        assert message.startswith(f"DeviceError: {name} is a ")
        assert says in message
    for local, name in [(on_device, "local_grads"), ([on_device], r"local_grads\[0\]")]:
        with pytest.raises(DeviceError, match=f"^{name} is a .*{says}"):
            sparsescan.exclusive_scan(np.ones(3), [csr()], local_grads=local)
    for kind in (BatchedCSR, CSRChain):
        for name in ("data", "indices", "indptr"):
            arrays = {"data": np.ones((2, 9)), "indices": csr().indices, "indptr": csr().indptr}
            arrays[name] = on_device
            with pytest.raises(DeviceError, match=f"^{kind.__name__} {name} is a .*{says}"):
                kind(**arrays, shape=(3, 3))


# ---------------------------------------------------------------------------------------------
# Malformed CSR at random
# ---------------------------------------------------------------------------------------------

INDEX_DTYPES = ("i4", "i8", "u4", "u8", "i2", "f8", ">i4", "O", "?")


def survive(matrix: sp.csr_array, schedules: tuple[str, ...] = ("linear", "blelloch")) -> bool:
    """Scan with such a matrix; whether it was accepted. If it was, the result must be right."""
    rows, cols = matrix.shape
    jacobians = [matrix, np.ones((2, rows)), np.ones((2, 2)), np.ones((cols, 2)), matrix]
    accepted = set()
    for schedule in schedules:
        try:
            result = sparsescan.inclusive_scan(np.ones(cols), jacobians, schedule=schedule)
        except SparseScanError as error:
            assert "jacobians[0]" in str(error)  # noqa: PT017
            accepted.add(False)
        else:
            clean = sp.csr_array(
                (
                    matrix.data.astype(float),
                    matrix.indices.astype(np.int64),
                    matrix.indptr.astype(np.int64),
                ),
                shape=matrix.shape,
            )
            clean.sum_duplicates()
            jacobians = [clean, *jacobians[1:4], clean]
            expected = sequential(np.ones(cols), jacobians, inclusive=True)
            assert_within(result, expected, result[0].dtype)
            accepted.add(True)
    assert len(accepted) == 1
    return accepted.pop()


@given(malformed(INDEX_DTYPES))
def test_malformed_csr_never_crashes(matrix):
    survive(matrix)


@given(malformed(INDEX_DTYPES))
def test_malformed_csr_never_passes_for_a_plans_pattern(matrix):
    """The short way, which compares with a known pattern, lets nothing else through."""
    rows, cols = matrix.shape
    whole = sp.csr_array(np.ones((rows, cols)))
    plan = sparsescan.plan([whole, np.ones((2, rows))], schedule="blelloch")
    try:
        plan.inclusive_scan(np.ones(cols), [matrix, np.ones((2, rows))])
    except SparseScanError as error:
        assert "jacobians[0]" in str(error)  # noqa: PT017
    else:
        assert matrix.nnz >= rows * cols


@pytest.mark.slow
def test_malformed_csr_with_bounds_checked(pytestconfig, tmp_path):
    """The check in an interpreter whose kernels raise where they read or write out of bounds.

    Numba does not tell such kernels from others that it keeps, so they have a folder of their own.
    """
    kernels = pytestconfig.cache.mkdir("kernels-with-bounds-checked")
    variables = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(kernels)}
    printed = run_python("import test_input; test_input.main()", tmp_path, **variables)
    accepted, refused = map(int, printed.split())
    assert accepted > 5
    assert refused > 20


def main() -> None:
    """Run the random input above once; print how many were accepted and refused."""
    counts = [0, 0]

    @seed(0)
    @settings(max_examples=150, deadline=None, database=None)
    @given(malformed(INDEX_DTYPES))
    def run(matrix):
        counts[not survive(matrix, ("blelloch",))] += 1

    run()
    print(*counts)


def test_steps_of_a_chain_over_one_pattern_are_square():
    with pytest.raises(InputError, match=r"CSRChain has 3 steps of shape \(1, 2\)"):
        CSRChain(np.ones((3, 2)), [0, 1], [0, 2], (1, 2))
    assert len(CSRChain(np.ones((1, 2)), [0, 1], [0, 2], (1, 2))) == 1


@pytest.mark.parametrize(("given", "gave"), [(0, "0"), (1, "1"), (3, "more than 2")])
def test_a_sequence_that_lies_about_its_length_is_refused(given, gave, tmp_path):
    matrix = sp.csr_array(np.eye(3) + np.eye(3, k=1))
    plan = sparsescan.plan([matrix] * 2)
    jacobians = Liar(2, [matrix] * given)
    message = f"^jacobians gave {gave} steps; expected 2, its length"
    for call in (
        lambda: plan.inclusive_scan(np.ones(3), jacobians),
        lambda: sparsescan.exclusive_scan(np.ones(3), jacobians),
        lambda: sparsescan.plan(jacobians),
        lambda: sparsescan.save_chain(tmp_path / "chain.npz", np.ones(3), jacobians),
    ):
        with pytest.raises(InputError, match=message):
            call()
    local_grads = Liar(2, [np.ones(3)] * given)
    with pytest.raises(InputError, match=f"^local_grads gave {gave} entries; expected 2"):
        plan.exclusive_scan(np.ones(3), [matrix] * 2, local_grads=local_grads)


def test_a_sequence_that_claims_to_be_long_takes_no_memory():
    with pytest.raises(InputError, match=r"^jacobians gave 1 steps; expected 4611686018427387904"):
        sparsescan.exclusive_scan(np.ones(3), Liar(2**62, [np.eye(3)]))


@pytest.mark.parametrize(("name", "value"), [("data", [1.0] * 3), ("indices", [0, 1, 2])])
def test_attributes_that_somebody_replaced_are_read_or_refused(name, value):
    matrix = sp.csr_array(np.eye(3))
    plan = sparsescan.plan([matrix] * 2)
    replaced = matrix.copy()
    for call in (plan.inclusive_scan, sparsescan.inclusive_scan):
        setattr(replaced, name, value)
        assert np.array_equal(call(np.ones(3), [matrix, replaced]), np.ones((3, 3)))
        setattr(replaced, name, None)
        with pytest.raises(sparsescan.SparseScanError, match=r"jacobians\[1\] has"):
            call(np.ones(3), [matrix, replaced])


# ---------------------------------------------------------------------------------------------
# Objects that compare, count or hold in ways of their own
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "levels",
    [
        csr(),
        np.array(1.0),
        np.ma.array([1.0]),
        [("a", csr())],
        [("a", [csr()])],
        [("a", [np.ma.array([[0, 1, 2]], mask=[[True, False, False]])])],
        [("a", [[np.ma.array([0, 1, 2], mask=[True, False, False])]])],
        [("a", [np.ones((1, 2), int)])],
        [Level("a", csr(), np.array([0, 1]))],
        [Level("a", np.array(3), np.array([0, 1]))],
        [Level("a", np.array([[0, 1, 2]]), None)],
        [Level("a", np.ma.array([[0, 1, 2]]), np.array([0, 1]))],
    ],
)
def test_levels_of_arrays_that_are_not_what_they_show(levels):
    with pytest.raises((InputError, InputTypeError), match="levels"):
        Schedule.from_levels(2, levels)


@pytest.mark.parametrize("dtype", [complex, bool, object, "S1", "M8[s]", np.float32])
def test_empty_index_arrays_are_of_integers_too(dtype):
    empty = np.array([], dtype)
    message = f"^pattern has indices of dtype {re.escape(str(np.dtype(dtype)))}; expected"
    with pytest.raises(InputTypeError, match=message):
        Pattern([0, 0], empty, (1, 3))
    # An empty list is of float64.
    assert Pattern([0, 0], [], (1, 3)).nnz == 0


@pytest.mark.parametrize("shape", [(4, 2**20, 2**20), (2, 3, 2**20, 2**20)])
def test_views_that_show_more_than_any_machine_holds(shape):
    stack = np.broadcast_to(1.0, shape)
    grad = np.broadcast_to(1.0, (*shape[1:-2], 2**20))
    needed = {3: "32 TiB", 4: "48 TiB"}[len(shape)]
    for call in (
        lambda: sparsescan.exclusive_scan(grad, stack),
        lambda: sparsescan.inclusive_scan(grad, list(stack)),
        lambda: sparsescan.plan(stack),
    ):
        with pytest.raises(sparsescan.MemoryLimitError, match=r"^a contiguous copy of jacobians"):
            call()
    with pytest.raises(
        sparsescan.MemoryLimitError, match=f"would take {needed}; this machine has .* left"
    ):
        sparsescan.exclusive_scan(grad, stack)


def test_views_that_repeat_one_step_are_not_copied():
    """However many steps they show, of which only one is there."""
    step = np.full((2, 2), 0.5)
    many = np.broadcast_to(step, (50, 2, 2))
    expected = sparsescan.exclusive_scan(np.ones(2), np.ascontiguousarray(many))
    assert same_bits(sparsescan.exclusive_scan(np.ones(2), many), expected)


def test_gradients_that_no_machine_holds():
    diagonal = Pattern.diagonal(2**40)
    chain = CSRChain.from_pattern(np.broadcast_to(1.0, (3, 2**40)), diagonal)
    with pytest.raises(sparsescan.MemoryLimitError, match="copy of jacobians would take"):
        sparsescan.exclusive_scan(np.broadcast_to(1.0, (2**40,)), chain)
    with pytest.raises(sparsescan.MemoryLimitError, match="expected no more than a machine can"):
        sparsescan.plan([Pattern.diagonal(2**60)] * 3)
    with pytest.raises(sparsescan.MemoryLimitError, match=r"^the index arrays of Pattern.*would t"):
        diagonal.indptr  # noqa: B018
    with pytest.raises(InputError, match=r"^shape is \(4294967296, 4294967296\); expected at most"):
        Pattern.dense((2**32, 2**32))


def test_a_message_is_short_whatever_it_shows():
    huge = np.zeros((1000, 1000))
    many = list(range(10**6))
    for call in (
        lambda: sparsescan.plan([csr()], device=huge),
        lambda: sparsescan.plan([csr()], schedule=many),
        lambda: sparsescan.plan([csr()], batch=-(10**4000)),
        lambda: sparsescan.plan([csr()], dtype="x" * 10**6),
        lambda: Pattern([0], [], many),
        lambda: Schedule.linear(-(10**5000)),
        lambda: Schedule.from_levels(3, [("a", [many])]),
        lambda: sparsescan.load_chain(many),
        lambda: ReLU(input_shape=many),
        lambda: Linear(2, 2, rng=many),
    ):
        with pytest.raises(SparseScanError) as caught:
            call()
        assert len(str(caught.value)) < 300


# ---------------------------------------------------------------------------------------------
# Masks, and sparse tensors of PyTorch
# ---------------------------------------------------------------------------------------------


def test_masked_arrays_without_a_mask_are_refused_too():
    """Whether there is something to lose must not depend on the values."""
    assert refused(np.ma.ones(3), [csr()]).startswith(
        "InputTypeError: grad has a mask, which would"
    )


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("form", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_sparse_tensors_of_pytorch_are_not_on_a_device(form):
    torch = pytest.importorskip("torch")
    tensor = getattr(torch.eye(3, dtype=torch.float64), form)()
    says = "is a sparse tensor of PyTorch in host memory; expected an array, or for a Jacobian a"
    for name, grad, jacobians in [
        ("grad", tensor, [csr()]),
        ("jacobians[1]", np.ones(3), [csr(), tensor]),
    ]:
        assert refused(grad, jacobians).startswith(f"InputTypeError: {name} {says}")
    # The message is right.
    tensor = tensor.to_sparse_csr()
    parts = tensor.values(), tensor.col_indices(), tensor.crow_indices()
    matrix = sp.csr_array(tuple(part.numpy() for part in parts), shape=tensor.shape)
    result = sparsescan.inclusive_scan(np.arange(3.0), [matrix])
    assert np.array_equal(result, [np.arange(3.0)] * 2)
