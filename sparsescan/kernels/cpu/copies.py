"""Plain loops over arrays, where a recording needs a kernel."""

from __future__ import annotations

from ..compile import njit

# No reference counting: threads that share arrays would wait for each other at every call.
_kernel = njit(nogil=True, cache=True, _nrt=False)


@_kernel
def fill_with(array, value):
    """Write an integer everywhere."""
    for i in range(len(array)):
        array[i] = value


@_kernel
def copy_into(out, array):
    """Copy contiguous numbers."""
    for i in range(len(out)):
        out[i] = array[i]


@_kernel
def add_range(total, part, begin, end):
    """Add some numbers of an array to those of another."""
    for i in range(begin, end):
        total[i] += part[i]


@_kernel
def add_up_rows(total, rows):
    """Write the sum of contiguous rows."""
    size = len(total)
    for i in range(size):
        total[i] = rows[i]
    for first in range(size, len(rows), max(size, 1)):
        for i in range(size):
            total[i] += rows[first + i]


@_kernel
def transpose_into(out, array, rows, columns):
    """Transpose contiguous matrices."""
    for first in range(0, len(out), max(rows * columns, 1)):
        for i in range(rows):
            for j in range(columns):
                out[first + j * rows + i] = array[first + i * columns + j]


@_kernel
def add_up_parts(total, sums, parts, rows, columns, stride):
    """Write the sum of the parts of each matrix, whose rows begin at multiples of a stride."""
    for first in range(len(total) // max(columns, 1)):
        matrix, row = first // rows, first % rows
        to = first * columns
        for part in range(parts):
            begin = ((matrix * parts + part) * rows + row) * stride
            for column in range(columns):
                if part == 0:
                    total[to + column] = sums[begin + column]
                else:
                    total[to + column] += sums[begin + column]
