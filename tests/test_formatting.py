"""Sizes and times as people read them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsescan.formatting import exact_bytes, format_bytes, quantity

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


@given(st.integers(0, 2**60))
def test_bytes_are_near_what_is_written_in_the_largest_unit_they_fill(number: int) -> None:
    text, unit = format_bytes(number).split()
    assert float(text) * UNITS[unit] == pytest.approx(number, rel=0.006)
    assert unit in ("B", "PiB") or 1 <= float(text) < 1024
    assert unit == "B" or number >= UNITS[unit] * 0.99


@given(st.integers(0, 2**60))
def test_a_limit_is_written_exactly(number: int) -> None:
    """So that it can be passed as the next one."""
    last = re.findall(r"[\d,]+", exact_bytes(number))[-1]
    assert int(last.replace(",", "")) == number
    assert exact_bytes(number).startswith(format_bytes(number))


def test_quantity() -> None:
    assert quantity(1, "part") == "1 part"
    assert quantity(0, "part") == "0 parts"
    assert quantity(2, "batch", "batches") == "2 batches"
