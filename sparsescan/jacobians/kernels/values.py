"""Kernels that write the values of a Jacobian in one pass."""

from __future__ import annotations

from ...kernels.compile import njit


@njit(nogil=True, cache=True)
def relu(x, out):  # type: ignore[no-untyped-def]
    """Write ``not (x <= 0)``, which is 1 at NaN."""
    for i in range(len(x)):
        out[i] = 0 if x[i] <= 0 else 1
