"""Dropout, Flatten, Pad and Permute: Jacobians that do not depend on the input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from autodiff import check_operator, close
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsescan import BatchedCSR, InputError, InputTypeError, Pattern
from sparsescan.jacobians.reshape import Dropout, Flatten, Pad, Permute

nn = torch.nn

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
seeds = st.integers(0, 2**32 - 1)
probabilities = st.sampled_from([0.0, 0.1, 0.5, 0.9])

# -- Dropout ------------------------------------------------------------------------------------


@given(shape=shapes, p=probabilities, seed=seeds)
def test_dropout_with_a_mask_is_that_of_pytorch(shape, p, seed):
    """For the mask that PyTorch has drawn, seen in what it makes of ones."""
    torch.manual_seed(seed)
    ones = torch.ones((5, *shape), dtype=torch.float64, requires_grad=True)
    y = nn.Dropout(p)(ones)
    (slope,) = torch.autograd.grad(y.sum(), ones)
    op = Dropout(p, input_shape=shape, mask=y.detach().numpy() != 0)
    x = np.random.default_rng(seed).standard_normal((5, *shape))
    close(op.forward(x), x * y.detach().numpy())
    close(op.values(x), slope.numpy().reshape(5, -1))
    close(op.values(x, op.forward(x)), slope.numpy().reshape(5, -1))


@given(shape=shapes, p=probabilities, seed=seeds)
def test_dropout_with_one_mask_for_all_samples(shape, p, seed):
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) >= p
    op = Dropout(p, input_shape=shape, mask=mask)

    def layer(x):
        return x * torch.tensor(mask) / (1 - p)

    check_operator(op, layer, rng, exact=False)
    assert op.pattern is Pattern.diagonal(math.prod(shape))
    np.testing.assert_array_equal(op.values(), op.values(np.ones((2, *shape))))


@given(shape=shapes, p=probabilities | st.just(1.0), seed=seeds)
def test_dropout_without_a_mask_is_the_identity(shape, p, seed):
    check_operator(Dropout(p, input_shape=shape), nn.Dropout(p).eval(), np.random.default_rng(seed))


def test_a_mask_for_each_sample_gives_a_jacobian_for_each():
    mask = np.array([[True, False], [False, False], [True, True]])
    op = Dropout(0.5, input_shape=(2,), mask=mask)
    jacobian = op.jacobian(np.ones((3, 2)))
    assert isinstance(jacobian, BatchedCSR)
    np.testing.assert_array_equal(jacobian.data, 2 * mask)


def test_certain_dropout_leaves_nothing():
    op = Dropout(1, input_shape=(2, 3), mask=np.ones((2, 3), bool))
    x = np.random.default_rng(0).standard_normal((4, 2, 3))
    assert op.nnz == op.pattern.nnz == 0
    assert not op.forward(x).any()
    assert op.values(x).shape == (0,)
    assert op.jacobian().shape == (6, 6)
    op.mask = np.ones((4, 2, 3), bool)
    assert op.values(x).shape == (4, 0)
    # In evaluation nothing is dropped.
    op.mask = None
    assert op.pattern is Pattern.diagonal(6)
    np.testing.assert_array_equal(op.forward(x), x)


def test_without_a_mask_the_output_shares_memory():
    x = np.ones((2, 3))
    assert np.shares_memory(Dropout(input_shape=(3,)).forward(x), x)


def test_batches_of_input_and_mask_must_agree():
    op = Dropout(0.5, input_shape=(4,), mask=np.ones((5, 4), bool))
    words = r"x has shape \(3, 4\), but the mask has shape \(5, 4\)"
    with pytest.raises(InputError, match=words):
        op.values(np.ones((3, 4)))
    with pytest.raises(InputError, match=words):
        op.forward(np.ones((3, 4)))
    with pytest.raises(InputError, match=r"x has shape \(4,\), but the mask has shape \(5, 4\)"):
        op.values(np.ones(4))
    with pytest.raises(InputError, match="x is None"):
        op.values()


# -- Flatten ------------------------------------------------------------------------------------


@given(shape=shapes, data=st.data(), seed=seeds)
def test_flatten_is_that_of_pytorch(shape, data, seed):
    axes = len(shape)
    start = data.draw(st.integers(1, axes))
    stop = data.draw(st.integers(start, axes))
    start, stop = (dim - data.draw(st.sampled_from([0, axes + 1])) for dim in (start, stop))
    op = Flatten(start, stop, input_shape=shape)
    rng = np.random.default_rng(seed)
    assert op.forward(np.ones(shape)).shape == op.output_shape
    assert op.pattern is Pattern.diagonal(math.prod(shape))
    expected = nn.Flatten(start, stop)(torch.ones((2, *shape))).shape
    assert expected == (2, *op.output_shape)
    check_operator(op, nn.Flatten(start, stop), rng)


def test_arguments_of_flatten_that_are_wrong():
    with pytest.raises(InputError, match=r"start_dim is 0; expected an axis of \(batch, 3, 4\)"):
        Flatten(0, input_shape=(3, 4))
    with pytest.raises(InputError, match="end_dim is 3; expected an axis of"):
        Flatten(1, 3, input_shape=(3, 4))
    with pytest.raises(InputError, match="start_dim is 2, but end_dim is -2"):
        Flatten(2, -2, input_shape=(3, 4))
    with pytest.raises(InputTypeError, match="start_dim is None; expected an integer"):
        Flatten(None, input_shape=(3, 4))


# -- Pad ----------------------------------------------------------------------------------------


@given(shape=shapes, data=st.data(), seed=seeds)
@settings(max_examples=25)
def test_pad_is_that_of_numpy_and_of_pytorch(shape, data, seed):
    ends = st.tuples(*[st.integers(0, 2)] * 2)
    width = data.draw(
        st.tuples(*[ends] * len(shape)) | ends | st.tuples(ends) | st.integers(0, 2), label="width"
    )
    op = Pad(width, input_shape=shape)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    expected = np.pad(x, width)
    assert op.output_shape == expected.shape
    np.testing.assert_array_equal(op.forward(x), expected)
    # PyTorch begins with the last axis.
    widths = [size for pair in reversed(op.pad_width) for size in pair]
    check_operator(op, lambda x: nn.functional.pad(x, widths), rng)


@given(shape=shapes, data=st.data())
def test_jacobian_of_a_pad_has_one_entry_a_row(shape, data):
    width = data.draw(st.tuples(*[st.tuples(*[st.integers(0, 2)] * 2)] * len(shape)))
    op = Pad(width, input_shape=shape)
    size = math.prod(shape)
    np.testing.assert_array_equal(op.pattern.indptr, np.arange(size + 1))
    # Every output has the number of the input that it is, and those that are padded have none.
    numbers = np.pad(np.arange(1, size + 1).reshape(shape), width).reshape(-1)
    np.testing.assert_array_equal(numbers[op.pattern.indices], np.arange(1, size + 1))


def test_padded_zeros_are_of_the_input_s_dtype_and_in_new_memory():
    op = Pad((1, 0), input_shape=(2,))
    assert op.pad_width == ((1, 0),)
    for dtype in (np.float32, np.float64):
        x = np.array([[np.nan, 2]], dtype)
        y = op.forward(x)
        np.testing.assert_array_equal(y, np.array([[0, np.nan, 2]], dtype), strict=True)
        assert not np.shares_memory(x, y)


# -- Permute ------------------------------------------------------------------------------------


@given(shape=shapes, data=st.data(), seed=seeds)
def test_permute_is_that_of_pytorch(shape, data, seed):
    axes = len(shape) + 1
    order = data.draw(st.permutations(range(1, axes)))
    dims = (0, *(dim - data.draw(st.sampled_from([0, axes])) for dim in order))
    op = Permute(dims, input_shape=shape)
    check_operator(op, lambda x: x.permute(dims), np.random.default_rng(seed))
    assert op.output_shape == tuple(shape[dim - 1] for dim in order)


@given(shape=shapes, data=st.data())
def test_jacobian_of_a_permutation_is_orthogonal(shape, data):
    order = data.draw(st.permutations(range(1, len(shape) + 1)))
    jacobian = Permute((0, *order), input_shape=shape).jacobian()
    product = (jacobian @ jacobian.T).toarray()
    np.testing.assert_array_equal(product, np.eye(math.prod(shape)))


@pytest.mark.parametrize("dims", [(1, 0, 2), (0, 1), (0, 1, 1), (0, 1, 3), (0, 1, 2, 3), ()])
def test_permute_refuses_what_is_no_permutation_after_the_batch(dims):
    with pytest.raises(InputError, match=r"dims is \(.*\); expected 0, the batch, then 1 to 2"):
        Permute(dims, input_shape=(3, 4))


def test_a_mask_that_is_refused_leaves_the_one_before():
    op = Dropout(input_shape=(2,), mask=[True, False])
    with pytest.raises(InputError, match=r"mask has shape \(3,\)"):
        op.mask = [True] * 3
    np.testing.assert_array_equal(op.mask, [True, False])
