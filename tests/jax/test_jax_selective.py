"""Arguments of selective scans of JAX's front door."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparsescan import InputError, InputTypeError
from sparsescan.jax import selective_scan


def test_none_is_no_input() -> None:
    with pytest.raises(InputTypeError, match="B is None, no array"):
        selective_scan(
            np.ones((1, 1, 2)), np.ones((1, 1, 2)), np.ones((1, 1)), None, np.ones((1, 1))
        )


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("A", np.ones(3), InputError),
        ("B", np.ones((2, 2, 9)), InputError),
        ("D", np.ones(2), InputError),
        ("A", np.ones((4, 2), complex), InputTypeError),
        ("u", "no", InputTypeError),
        ("delta_softplus", 2, InputTypeError),
    ],
)
def test_errors(name: str, value: Any, error: Any) -> None:
    whole, factor = np.ones((2, 4, 5)), np.ones((2, 2, 5))
    given: dict[str, Any] = {"u": whole, "delta": whole, "A": np.ones((4, 2))}
    given |= {"B": factor, "C": factor, name: value}
    with pytest.raises(error, match=f"{name} is|{name} has"):
        selective_scan(**given)
