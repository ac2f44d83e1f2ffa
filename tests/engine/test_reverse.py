"""In the order of time: what a scan of the reversed chain gives, reversed, and nothing copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from oracles import Chain, assert_within, chains, patterns_of, same_bits, values_only

import sparsescan
from sparsescan import CSRChain, InputError, InputTypeError, Pattern, ScanPlan
from sparsescan.chains.containers import PeriodicChain


def turned(jacobians: Any) -> Any:
    """Turn a chain round, by other ways than the library's."""
    if isinstance(jacobians, CSRChain):
        return CSRChain.from_pattern(np.flip(jacobians.data, 0), jacobians.pattern)
    return np.flip(jacobians, 0) if isinstance(jacobians, np.ndarray) else [*reversed(jacobians)]


@given(chains())
def test_every_form_in_the_order_of_time(chain: Chain) -> None:
    local = chain.local_grads
    local = local if local is None else turned(local)
    jacobians = turned(chain.jacobians)
    forward = chain.scan()
    result = chain.call()(chain.grad, jacobians, local_grads=local, reverse=True)
    assert type(result) is type(forward)
    assert same_bits(result, turned(forward))
    assert_within(turned(result), chain.oracle(), chain.dtype)
    plan = sparsescan.plan(jacobians, reverse=True)
    assert plan.patterns == tuple(patterns_of(chain.jacobians))
    scan = chain.call(plan)
    for values in (jacobians, values_only(jacobians), jacobians):
        assert same_bits(scan(chain.grad, values, local_grads=local), result)


def test_results_are_views_and_input_is_not_copied() -> None:
    jacobians, local = np.ones((50, 4, 3, 3)), np.ones((50, 4, 3))
    jacobians.flags.writeable = local.flags.writeable = False
    plan = sparsescan.plan(jacobians, reverse=True)
    grads = plan.exclusive_scan(None, jacobians, local_grads=local)
    assert isinstance(grads, np.ndarray)
    assert grads.base is not None
    assert grads.strides[0] < 0
    listed = plan.exclusive_scan(None, [*jacobians], local_grads=[*local])
    assert len({id(each.base) for each in listed}) == 1


def test_the_order_is_saved(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((6, 3, 3))
    plan = sparsescan.plan(values, reverse=True)
    plan.save(tmp_path / "plan")
    loaded = ScanPlan.load(tmp_path / "plan")
    assert loaded.reverse
    assert same_bits(
        loaded.inclusive_scan(np.ones(3), values), plan.inclusive_scan(np.ones(3), values)
    )


def broken(n: int, k: int, bad: Any) -> list[Any]:
    """Square steps, of which the caller's `k`-th is another one."""
    steps: list[Any] = [sp.csr_array(np.eye(3)) for _ in range(n)]
    steps[k] = bad
    return steps


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (
            np.eye(4),
            InputError,
            r"^jacobians\[(3|4)\] has shape .*, but jacobians\[(4|5)\] has .*first layer to",
        ),
        (np.eye(3, dtype=int), InputTypeError, r"^jacobians\[4\] has dtype int"),
        (sp.coo_array(np.eye(3)), InputTypeError, r"^jacobians\[4\] is a coo_array"),
        ("x", InputTypeError, r"^jacobians\[4\] "),
    ],
)
def test_errors_count_as_the_caller_does(bad: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        sparsescan.exclusive_scan(np.ones(3), broken(7, 4, bad), reverse=True)
    with pytest.raises(error, match=message):
        sparsescan.plan(broken(7, 4, bad), reverse=True)


def test_what_has_no_order_of_time_is_refused() -> None:
    patterns = [Pattern.diagonal(2), Pattern.dense((2, 2))]
    chain = PeriodicChain([np.ones((3, 2)), np.ones(4)], patterns)
    for call in (
        lambda: sparsescan.exclusive_scan(np.ones(2), chain, reverse=True),
        lambda: sparsescan.plan(chain, reverse=True),
        lambda: sparsescan.plan(patterns * 3, reverse=True).exclusive_scan(np.ones(2), chain),
    ):
        with pytest.raises(InputTypeError, match=r"^jacobians is a PeriodicChain, whose"):
            call()
    for call in (
        lambda: sparsescan.exclusive_scan(np.ones(2), np.ones((3, 2, 2)), reverse=np.ones(2)),
        lambda: sparsescan.plan(patterns, reverse=np.ones(2)),
    ):
        with pytest.raises(InputTypeError, match=r"^reverse is array.*; expected True or False"):
            call()
