"""Products of one step that threads share if there are fewer samples than threads.

The thread that runs the steps, the *leader*, posts each product, and computes the first of its
parts; helpers compute the others. Then the leader computes the parts that no helper has begun, so a
helper that comes late, or never, delays nobody. Each helper has the same part of each product,
which stays in its core's cache.
"""

from __future__ import annotations

from typing import Any

from ...kernels.compile import njit
from ...kernels.cpu.lanes import lane_count
from ...kernels.cpu.memory import exchange, fetch_add, load, relax
from ...kernels.cpu.tiles import TILE_ROWS, TILE_VECTORS, add_tile
from .stages import address, pointer, pointer_at

Array = Any
_kernel = njit(nogil=True, cache=True, _nrt=False)
_helper = njit(_nrt=False)
_inline = njit(_nrt=False, forceinline=True)
# Terms that are summed before they are added to the others.
_PART = 64
# Entries of a matrix from which sharing pays, compared with synchronising the threads.
_WORTH = 1 << 15
# Words that threads share; words that several threads write are a cache line apart. They are the
# number of posted products, or `_OVER` and more; the last product; and for each part except the
# first, how many were begun, and how many are done.
_POSTED, _PRODUCT, _PARTS, _LINE = 0, 8, 32, 8
_OVER = 1 << 60


def words_of(helpers: int) -> int:
    """Return how many words a leader and its helpers share."""
    return _PARTS + 2 * _LINE * helpers


@_inline
def multiply(s, m, x, step, jump, bias, begins, out, stride, samples):
    """Write ``m x + bias`` to `out` if it begins a sum, else add ``m x``, with units as lanes.

    All arguments except `s` and `m` are pointers. Samples are `step` apart in `x`, and `stride` in
    `out`. A sample's numbers are in blocks, like the columns of `m`; blocks begin `jump` apart.
    """
    values = pointer(m.values, m.value_at)
    about = values, m.vectors, m.cols, m.blocks, m.block, x, step, jump, bias, begins
    if s.helpers == 0 or m.rows * m.cols < _WORTH:
        _multiply(about, out, stride, samples, 0, -(-m.vectors // TILE_VECTORS))
    else:
        _share(about, out, stride, samples, s.help, s.helpers + 1)


@_helper
def _share(about, out, stride, samples, words, parts):
    """Compute a product with helpers."""
    values, vectors, cols, blocks, block, x, step, jump, bias, begins = about
    tiles = -(-vectors // TILE_VECTORS)
    number = words[_POSTED] + 1
    p = _PRODUCT
    words[p], words[p + 5], words[p + 8] = address(values), address(x), address(bias)
    words[p + 1], words[p + 2], words[p + 3], words[p + 4] = vectors, cols, blocks, block
    words[p + 6], words[p + 7], words[p + 9] = step, jump, 1 if begins else 0
    words[p + 10], words[p + 11], words[p + 12] = address(out), stride, samples
    fetch_add(words, _POSTED, 1)
    _multiply(about, out, stride, samples, 0, tiles // parts)
    for part in range(1, parts):
        begun = _PARTS + 2 * _LINE * (part - 1)
        if exchange(words, begun, number - 1, number):
            first, end = tiles * part // parts, tiles * (part + 1) // parts
            _multiply(about, out, stride, samples, first, end)
            continue
        turns = 0
        while load(words, begun + _LINE) < number:
            relax(turns)
            turns += 1


@_inline
def _multiply(about, out, stride, samples, first, end):
    """Compute some tiles of a product."""
    values, vectors, cols, blocks, block, x, step, jump, bias, begins = about
    lanes = lane_count(x)
    # The fewest tiles, of equal height: a tile with few rows waits for its sums.
    height = -(-samples // -(-samples // TILE_ROWS))
    for tile in range(first, end):
        v = tile * TILE_VECTORS
        width = min(TILE_VECTORS, vectors - v)
        b = 0
        while b < samples:
            place, at = b * stride + v * lanes, v * lanes * cols
            start, start_at, start_step, rows = out, place, stride, min(height, samples - b)
            if begins:
                start, start_at, start_step = bias, v * lanes, 0
            add_tile(
                *(out, place, stride, start, start_at, start_step, values, at),
                *(x, b * step, step, 1, jump, blocks, block, _PART, width, rows),
            )
            b += height


@_kernel
def help_out(words, part, parts, like):
    """Compute a part of each product that a leader posts, until the leader ends this."""
    begun, number, turns = _PARTS + 2 * _LINE * (part - 1), 1, 0
    while True:
        posted = load(words, _POSTED)
        if posted >= _OVER:
            return
        if posted < number:
            relax(turns)
            turns += 1
            continue
        number, turns = posted, 0
        # The leader waits for a part only if a helper has begun it.
        if exchange(words, begun, number - 1, number):
            p = _PRODUCT
            values, x = pointer_at(words[p], like), pointer_at(words[p + 5], like)
            bias, out = pointer_at(words[p + 8], like), pointer_at(words[p + 10], like)
            vectors, cols, blocks, block = words[p + 1], words[p + 2], words[p + 3], words[p + 4]
            step, jump, begins = words[p + 6], words[p + 7], words[p + 9] != 0
            about = values, vectors, cols, blocks, block, x, step, jump, bias, begins
            tiles = -(-vectors // TILE_VECTORS)
            first, end = tiles * part // parts, tiles * (part + 1) // parts
            _multiply(about, out, words[p + 11], words[p + 12], first, end)
            fetch_add(words, begun + _LINE, number - load(words, begun + _LINE))
        number += 1


@_kernel
def end_help(words):
    """Let the helpers of a leader end."""
    fetch_add(words, _POSTED, _OVER)
