"""Cases that are left out unless all tests are asked for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

__all__ = ["examples", "slow"]


def examples(usual: int) -> int:
    """Return how many examples a test takes: `usual`, or as much fewer as others by default."""
    return max(1, min(usual, usual * settings().max_examples // 60))


def slow(*cases: Any) -> list[Any]:
    """Return cases of a parametrised test, marked as slow; a tuple has several arguments."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
