"""A plan takes arrays of any form in turn, and refuses what a new plan refuses."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from oracles import same_bits

import sparsescan
from sparsescan import Pattern, ScanPlan

N, SIZE = 5, 3


def plain(rng: np.random.Generator) -> Any:
    return rng.standard_normal((N, SIZE, SIZE))


# One array of Jacobians: contiguous or not, of one sample or two, with or without rows and columns.
FORMS = {
    "plain": plain,
    "single": lambda rng: plain(rng).astype(np.float32),
    "swapped": lambda rng: plain(rng).astype(">f8"),
    "transposed": lambda rng: plain(rng).transpose(0, 2, 1),
    "by columns": lambda rng: np.asfortranarray(plain(rng)),
    "turned": lambda rng: plain(rng)[::-1],
    "spread": lambda rng: np.repeat(plain(rng), 2, axis=0)[::2],
    "one for all": lambda rng: np.broadcast_to(plain(rng)[:1], (N, SIZE, SIZE)),
    "unaligned": lambda rng: np.frombuffer(b"." + plain(rng).tobytes(), "f8", offset=1).reshape(
        N, SIZE, SIZE
    ),
    "values": lambda rng: plain(rng).reshape(N, -1),
    "values apart": lambda rng: plain(rng).reshape(N, -1).repeat(2, axis=1)[:, ::2],
    "of samples": lambda rng: rng.standard_normal((N, 2, SIZE, SIZE)),
    "values of samples": lambda rng: rng.standard_normal((N, 2, SIZE * SIZE)),
    "list": lambda rng: list(plain(rng)),
    "longer": lambda rng: rng.standard_normal((N + 1, SIZE, SIZE)),
    "wider": lambda rng: rng.standard_normal((N, SIZE, SIZE + 1)),
    "flat": lambda rng: plain(rng).ravel(),
    "integers": lambda rng: np.ones((N, SIZE, SIZE), int),
    "none": lambda rng: plain(rng)[:0],
}


def outcome(plan: ScanPlan, grad: Any, jacobians: Any) -> Any:
    """Return gradients, or the error that is raised in their place."""
    try:
        return plan.inclusive_scan(grad, jacobians)
    except sparsescan.SparseScanError as error:
        return type(error), str(error)


@pytest.mark.parametrize("reverse", [False, True])
def test_as_a_new_plan_does(reverse: bool) -> None:
    """An array of the form that was read last is taken by its address; any other is checked."""
    patterns, rng = [Pattern.dense((SIZE, SIZE))] * N, np.random.default_rng()
    old = sparsescan.plan(patterns, reverse=reverse, schedule="linear")
    for first, second in itertools.product(FORMS, repeat=2):
        for name in (first, first, second, second):
            jacobians = FORMS[name](rng)
            samples = (2,) if "samples" in name else ()
            grad = rng.standard_normal((*samples, SIZE)).astype(rng.choice(["f4", "f8"]))
            new = sparsescan.plan(patterns, reverse=reverse, schedule="linear")
            ours, theirs = (outcome(plan, grad, jacobians) for plan in (old, new))
            is_same = ours == theirs if isinstance(theirs, tuple) else same_bits(ours, theirs)
            assert is_same, (first, second, name)
