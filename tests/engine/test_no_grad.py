"""Without a gradient at the end there are zeros, whose shape local gradients give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from oracles import Chain, assert_within, chains, patterns_of, same_bits, sequential, values_only
from test_periodic import Case, cases

import sparsescan
from sparsescan import InputError, InputTypeError


@given(chains())
def test_none_is_zeros_in_every_form(chain: Chain) -> None:
    local = chain.local_grads
    assume(local is not None and any(each is not None for each in local))
    zeros = np.zeros(chain.grad.shape, np.float32)  # of the dtype that decides nothing
    chain.grad = None
    result = chain.scan()
    plan = sparsescan.plan(patterns_of(chain.jacobians))
    assert same_bits(chain.scan(plan, values_only(chain.jacobians)), result)
    chain.grad = zeros
    assert same_bits(chain.scan(), result)
    if len(result):
        dtype = result[0].dtype
        expected = sequential(zeros, chain.jacobians, local, inclusive=chain.inclusive, dtype=dtype)
        assert_within(result, expected, dtype)


@given(cases())
def test_none_is_zeros_where_patterns_take_turns(case: Case) -> None:
    assume(case.local is not None and any(each is not None for each in case.local))
    scan = sparsescan.inclusive_scan if case.inclusive else sparsescan.exclusive_scan
    result = scan(None, case.chain, local_grads=case.local)
    case.grad = np.zeros(case.grad.shape, np.float32)
    assert same_bits(result, case.scans()[0])
    assert same_bits(case.in_turns(result), list(case.scans()[1]))


def test_the_doubled_gradient_that_none_avoids() -> None:
    """A loss of every step: passed twice, the last step's gradient counts twice."""
    local = np.ones((4, 2))
    jacobians = np.zeros((4, 2, 2))
    assert sparsescan.exclusive_scan(local[0], jacobians, local_grads=local)[0].tolist() == [2, 2]
    assert sparsescan.exclusive_scan(None, jacobians, local_grads=local)[0].tolist() == [1, 1]
    assert "Double-counted gradient" in str(sparsescan.exclusive_scan.__doc__)


class Broken(list[Any]):
    def __iter__(self) -> Any:
        raise RuntimeError("no more")


@pytest.mark.parametrize(
    ("local", "error", "message"),
    [
        (3, InputTypeError, "is a int; expected a sequence"),
        (7.0, InputTypeError, "is a float; expected a sequence"),
        ("abc", InputTypeError, "is a str; expected a sequence"),
        ({0: np.ones(2)}, InputTypeError, "is a dict; expected a sequence"),
        (np.ones(()), InputTypeError, "is a ndarray; expected a sequence"),
        (Broken([1, 2, 3]), InputTypeError, "cannot be read: no more"),
        ([np.ones(3), None, None, None], InputError, "has 4 entries; expected 3"),
        ([np.ones(3)] * 2, InputError, "has 2 entries; expected 3"),
        (np.ones((2, 3)), InputError, "has 2 entries; expected 3"),
        ([None, np.ones(2), None], InputError, r"\[1\] has shape \(2,\); expected \(3,"),
        ([None, np.ones((2, 2, 3)), None], InputError, r"\[1\] has shape \(2, 2, 3\); expected"),
        ([None, np.ones(3, int), None], InputTypeError, r"\[1\] has dtype int"),
        ([None, None, [1, 2, 3]], InputTypeError, r"\[2\] has dtype int64; expected float"),
        (np.ones((3, 4)), InputError, r"\[0\] has shape \(4,\); expected \(3,\)"),
        (np.ones(3), InputError, r"\[0\] has shape \(\); expected \(3,\)"),
    ],
)
def test_local_gradients_that_do_not_fit_are_named(local: Any, error: Any, message: str) -> None:
    jacobians = np.zeros((3, 3, 3))
    plan = sparsescan.plan(jacobians)
    for call in (sparsescan.exclusive_scan, plan.exclusive_scan):
        for grad in (None, np.ones(3)):
            with pytest.raises(error, match=f"^local_grads ?{message}"):
                call(grad, jacobians, local_grads=local)


@pytest.mark.parametrize(
    ("local", "message"),
    [
        (None, "^grad is None, and local_grads has no gradient either; expected the g"),
        ([None] * 3, "^grad is None, and local_grads has no gradient either; expected"),
        ([None, np.ones((5, 3)), np.ones(3)], r"^local_grads\[2\] has shape \(3,\); expected"),
    ],
)
def test_what_gives_no_zeros_is_named(local: Any, message: str) -> None:
    for call in (sparsescan.exclusive_scan, sparsescan.plan(np.zeros((3, 3, 3))).exclusive_scan):
        with pytest.raises(InputError, match=message):
            call(None, np.zeros((3, 3, 3)), local_grads=local)


def test_batches_of_jacobians_and_of_local_gradients_are_one() -> None:
    jacobians = np.zeros((3, 5, 3, 3))
    with pytest.raises(
        InputError, match=r"^local_grads\[0\] has shape \(4, 3\); expected \(5, 3\)"
    ):
        sparsescan.exclusive_scan(None, jacobians, local_grads=np.ones((3, 4, 3)))
    with pytest.raises(InputError, match=r"^local_grads\[0\] has shape \(3,\); expected \(5, 3\)"):
        sparsescan.exclusive_scan(None, jacobians, local_grads=np.ones((3, 3)))
