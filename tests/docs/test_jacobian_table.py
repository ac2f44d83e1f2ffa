"""The table of what a Jacobian may be: each line of it, in all calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsescan
from sparsescan import InputError, InputTypeError, SparseScanError

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "scan.md"
MATRIX = np.array([[1.0, 2.0, 0.0], [0.0, 3.0, 0.0], [4.0, 0.0, 5.0]])
CSR = sp.csr_array(MATRIX)


def objects(*given: Any) -> Any:
    array = np.empty(len(given), object)
    array[:] = given
    return array


def formats() -> list[Any]:
    names = ("csc", "coo", "bsr", "dia", "dok", "lil")
    return [
        [getattr(sp, f"{name}_{kind}")(MATRIX)] for name in names for kind in ("array", "matrix")
    ]


# For each line chains of one or two steps, each made anew, and the start of the message.
LINES: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "CSR arrays": (lambda: [[CSR], [sp.csr_matrix(MATRIX)], (CSR, CSR)], ""),
    "dense arrays": (lambda: [[MATRIX], [MATRIX.tolist()], [torch.tensor(MATRIX)]], ""),
    "one array of all": (
        lambda: [
            np.stack([MATRIX, MATRIX])[::-1],
            np.asfortranarray(np.stack([MATRIX, MATRIX])),
            np.stack([MATRIX.T, MATRIX.T]).swapaxes(1, 2),
        ],
        "",
    ),
    "`J.T`": (lambda: [[CSR.T], *formats()], "jacobians[0] is a "),
    "a generator": (
        lambda: [(each for each in [CSR]), iter([CSR]), map(id, [CSR]), {1}, {0: CSR}],
        "jacobians is a ",
    ),
    "a NumPy array of objects": (
        lambda: [objects(CSR, CSR), objects(MATRIX)],
        "jacobians is an array of objects; expected a list of them",
    ),
    "integers and booleans": (
        lambda: [
            form(MATRIX.astype(dtype))
            for dtype in (int, np.int8, np.uint64, bool)
            for form in (lambda a: [a], lambda a: np.stack([a, a]), lambda a: [sp.csr_array(a)])
        ],
        "jacobians",
    ),
    "float16": (
        lambda: (
            [[MATRIX.astype(dtype)] for dtype in (np.float16, complex, np.complex64)]
            + [[torch.tensor(MATRIX).bfloat16()]]
        ),
        "jacobians[0] ",
    ),
    "a vector of the diagonal": (
        lambda: [[np.ones(3)]],
        "jacobians[0] has shape (3,); expected (rows, cols)",
    ),
    "a single matrix": (lambda: [CSR, MATRIX], "jacobians "),
    "masked arrays": (
        lambda: [
            [np.ma.array(MATRIX, mask=MATRIX == 0)],
            [torch.tensor(MATRIX, requires_grad=True)],
        ],
        "jacobians[0] ",
    ),
}


def lines() -> dict[str, tuple[str, str]]:
    """Return the answer, and what helps, of each line of the table by its first cell."""
    text = PAGE.read_text().split("## What a Jacobian may be")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return {row[0].strip(): (row[1].strip(), row[2].strip()) for row in rows[2:]}


def test_every_line_is_tested() -> None:
    for first in lines():
        assert sum(first.startswith(name) for name in LINES) == 1, first
    assert len(lines()) == len(LINES)


@pytest.mark.parametrize("name", LINES)
def test_each_line(name: str) -> None:
    make, message = LINES[name]
    (answer,) = (answer for first, (answer, _) in lines().items() if first.startswith(name))
    count = len(make())
    plan = {n: sparsescan.plan([sparsescan.Pattern.dense((3, 3))] * n) for n in (1, 2)}
    csr_plan = {n: sparsescan.plan([CSR] * n) for n in (1, 2)}
    calls: list[Callable[[Any], Any]] = [
        sparsescan.plan,
        lambda chain: sparsescan.inclusive_scan(np.ones(3), chain),
    ]
    if name == "CSR arrays":
        calls.append(lambda chain: csr_plan[len(chain)].inclusive_scan(np.ones(3), chain))
    elif answer == "taken":
        calls.append(lambda chain: plan[len(chain)].inclusive_scan(np.ones(3), chain))
    for k in range(count):
        for call in calls:
            chain = make()[k]
            if answer == "taken":
                result = call(chain)
                if call is not sparsescan.plan:
                    expected = MATRIX @ np.ones(3)
                    np.testing.assert_allclose(result[1], expected)
                continue
            with pytest.raises(SparseScanError) as caught:
                call(chain)
            assert str(caught.value).startswith(message)
            kinds = {"InputTypeError": InputTypeError, "InputError": InputError}
            allowed = [kind for kind in kinds if f"`{kind}`" in answer]
            assert type(caught.value).__name__ in allowed, caught.value
    # The way that the table shows helps.
    if name == "`J.T`":
        for (odd,) in make():
            sparsescan.inclusive_scan(np.ones(3), [odd.tocsr()])
    if name == "a vector of the diagonal":
        turned = sp.diags_array(np.full(3, 2.0)).tocsr()
        np.testing.assert_array_equal(sparsescan.inclusive_scan(np.ones(3), [turned])[1], 2)
        diagonal = sparsescan.plan([sparsescan.Pattern.diagonal(3)])
        np.testing.assert_array_equal(diagonal.inclusive_scan(np.ones(3), [np.full(3, 2.0)])[1], 2)
