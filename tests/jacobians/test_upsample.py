"""Upsampling is that of PyTorch, and its Jacobian is exact where PyTorch's has rounding errors."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import torch
from autodiff import check_operator, close
from hypothesis import assume, given
from hypothesis import strategies as st

from sparsescan import InputError, InputTypeError
from sparsescan.jacobians.upsample import Upsample

# Below this, weights that PyTorch computes are rounding errors.
NOISE = 1e-12

seeds = st.integers(0, 2**32 - 1)
shapes = st.tuples(st.integers(1, 2), st.integers(1, 8), st.integers(1, 8))
sizes = st.integers(1, 12)
# Rounded fractions: others have weights that are as small as rounding errors, but are none.
fractions = st.builds(operator.truediv, st.integers(1, 30), st.integers(1, 30))
scales = st.integers(1, 3) | fractions.filter(lambda scale: scale < 3)
# Arguments that the size of the output comes from.
targets = st.one_of(
    st.fixed_dictionaries({"size": sizes | st.tuples(sizes, sizes)}),
    st.fixed_dictionaries({"scale_factor": scales | st.tuples(scales, scales)}),
)


def fits(shape: tuple[int, ...], target: dict[str, Any]) -> bool:
    """Whether the output has any elements, and not too many."""
    factors = np.broadcast_to(target.get("scale_factor", 1), 2)
    sizes = [int(n * s) for n, s in zip(shape[1:], factors, strict=True)]
    return min(sizes) >= 1 and max(sizes) <= 16


@given(shapes, targets, seeds)
def test_nearest(shape: tuple[int, ...], target: dict[str, Any], seed: int) -> None:
    assume(fits(shape, target))
    op, module = Upsample(**target, input_shape=shape), torch.nn.Upsample(**target)
    check_operator(op, module, np.random.default_rng(seed), batch=2)


@given(shapes, targets, st.sampled_from([None, False, True]), seeds)
def test_bilinear(
    shape: tuple[int, ...], target: dict[str, Any], align_corners: bool | None, seed: int
) -> None:
    assume(fits(shape, target))
    arguments = {**target, "mode": "bilinear", "align_corners": align_corners}
    op, module = Upsample(**arguments, input_shape=shape), torch.nn.Upsample(**arguments)
    x = np.random.default_rng(seed).standard_normal((2, *shape))
    close(op.forward(x), module(torch.tensor(x)).numpy())
    jacobian = torch.autograd.functional.jacobian(module, torch.tensor(x[:1]))
    expected = jacobian.reshape(op.shape[::-1]).numpy().T
    actual = op.jacobian()
    close(actual.toarray(), expected)
    stored = np.zeros(op.shape, bool)
    stored[np.repeat(np.arange(op.shape[0]), np.diff(actual.indptr)), actual.indices] = True
    np.testing.assert_array_equal(stored, np.abs(expected) > NOISE)
    assert op.nnz == op.pattern.nnz == actual.nnz


@pytest.mark.parametrize(("size", "size_out"), [(26, 22), (39, 33), (7, 91), (41, 100)])
def test_the_nearest_input_is_rounded_as_by_pytorch(size: int, size_out: int) -> None:
    """In float32, whatever the dtype: 11·26/22 is 13, but the nearest input is the 12th."""
    op = Upsample((1, size_out), input_shape=(1, 1, size))
    x = np.arange(size, dtype=np.float64)[None, None]
    expected = torch.nn.Upsample((1, size_out))(torch.tensor(x)[None])[0].numpy()
    np.testing.assert_array_equal(op.forward(x), expected)
    np.testing.assert_array_equal(x.ravel() @ op.jacobian(), expected.ravel())


@given(st.integers(2, 300), st.integers(1, 9))
def test_outputs_on_an_input_read_no_other(size: int, steps: int) -> None:
    """With the corners aligned, every `steps`-th output lies on an input, the others between."""
    op = Upsample((1, (size - 1) * steps + 1), None, "bilinear", True, input_shape=(1, 1, size))
    assert op.nnz == size + 2 * (size - 1) * (steps - 1)
    assert (op.values() > 0).all()


@given(st.integers(1, 200), st.integers(1, 40), st.sampled_from([0, 1, 2]))
def test_odd_fractions_meet_inputs_at_their_centres(size: int, p: int, q: int) -> None:
    """A scale of 3/5 that is written as 0.6 is 3/5: some outputs lie on an input."""
    odd, scale = 2 * p + 1, (2 * p + 1) / (2 * q + 1)
    assume(int(size * scale) >= 1 and int(size * scale) != size)
    op = Upsample(None, (1, scale), "bilinear", input_shape=(1, 1, size))
    places = 2 * np.arange(op.output_shape[2]) + 1
    # The centre of an output, (j + 1/2) (2q + 1) / (2p + 1), is that of an input, i + 1/2.
    on_input = places * (2 * q + 1) % (2 * odd) == odd
    beyond = (places * (2 * q + 1) < odd) | (places * (2 * q + 1) > (2 * size - 1) * odd)
    counts = np.bincount(op.pattern.indices, minlength=op.shape[1])
    np.testing.assert_array_equal(counts, np.where(on_input | beyond, 1, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 2.5}, "size is 2.5; expected an integer or 2 integers"),
        ({"scale_factor": "big"}, "scale_factor is 'big'; expected a number or 2 numbers"),
        ({"scale_factor": (1, 2, 3)}, r"scale_factor is \(1, 2, 3\); expected a number or 2"),
        ({"scale_factor": (1, None)}, r"scale_factor is \(1, None\); expected a number or 2"),
    ],
)
def test_wrong_types(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputTypeError, match=message):
        Upsample(**arguments, input_shape=(2, 5, 6))


def test_images_have_channels() -> None:
    with pytest.raises(InputError, match=r"input_shape is \(5, 6\); expected \(channels, height"):
        Upsample(2, input_shape=(5, 6))
