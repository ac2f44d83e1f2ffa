"""Tables of calls that are refused, each by what is said of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from sparsescan import SparseScanError

# The error and its message, of which " … " may stand for a part; and the call.
Refusals = Mapping[str, Callable[[], Any]]


def check_refusals(refusals: Refusals) -> None:
    """Check that each call raises an error whose type and message begin as its key says."""
    for words, call in refusals.items():
        with pytest.raises(SparseScanError) as caught:
            call()
        said = f"{type(caught.value).__name__}: {caught.value}"
        parts = map(re.escape, words.split(" … "))
        assert re.match(".*".join(parts), said, re.DOTALL), f"{words!r}, but not {said!r}"
