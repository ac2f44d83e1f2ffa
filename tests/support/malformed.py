"""Random CSR matrices, mostly malformed, and a sequence that lies about its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
from hypothesis import strategies as st

NUMBERS = [-(2**63), -(2**31), -1, 0, 1, 2, 3, 5, 7, 2**31 - 1, 2**31, 2**63 - 1]


@st.composite
def malformed(draw: Any, dtypes: Sequence[str], least: int = 1) -> sp.csr_array:
    """Draw a CSR array some of whose arrays were changed behind SciPy's back.

    There are `least` to three changes, some of them of the dtype to one of `dtypes`.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, cols = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    matrix = sp.random_array((rows, cols), density=0.5, rng=rng, format="csr")
    for _ in range(draw(st.integers(least, 3))):
        name = draw(st.sampled_from(["indptr", "indices", "data"]))
        array = getattr(matrix, name)
        change = draw(st.sampled_from(["entry", "near", "length", "dtype", "order", "axes"]))
        if change == "entry" and array.size and array.dtype.kind != "f":
            wide = array.astype(np.int64)
            wide.flat[draw(st.integers(0, array.size - 1))] = draw(st.sampled_from(NUMBERS))
            array = wide if draw(st.booleans()) else wide.astype(np.int32)
        elif change == "near" and array.size and array.dtype.kind in "iu":
            array = array.copy()
            with np.errstate(all="ignore"):
                array.flat[draw(st.integers(0, array.size - 1))] += array.dtype.type(1)
        elif change == "length":
            array = np.resize(array, draw(st.integers(0, array.size + 3)))
        elif change == "dtype":
            with np.errstate(all="ignore"):
                array = array.astype(draw(st.sampled_from(dtypes)))
        elif change == "order":
            array = array[::-1]
        elif change == "axes":
            array = array.reshape(draw(st.sampled_from([(1, -1), (-1, 1)])))
        setattr(matrix, name, array)
    return matrix


class Liar(list[Any]):
    """A sequence that says one length and gives another."""

    def __init__(self, length: int, items: Sequence[Any]) -> None:
        super().__init__(items)
        self.length = length

    def __len__(self) -> int:
        return self.length
