"""Plain loops over arrays, where a recording needs a kernel."""

from __future__ import annotations

from ..compile import njit

# Without counts of references: threads that share arrays would wait for each other at every call.
_kernel = njit(nogil=True, cache=True, _nrt=False)


@_kernel
def fill_with(array, value):
    """Write a number, a whole one, everywhere."""
    for i in range(len(array)):
        array[i] = value


@_kernel
def copy_into(out, array):
    """Copy numbers, which lie end to end."""
    for i in range(len(out)):
        out[i] = array[i]


@_kernel
def add_range(total, part, begin, end):
    """Add some numbers of an array to those of another."""
    for i in range(begin, end):
        total[i] += part[i]
