"""Whole sequences of recurrent cells on a GPU: all states, and the gradients of all of them.

One launch runs all steps of both directions of a layer. A block has a few samples of one direction,
and waits for no other. `lanes` neighbouring threads share a unit: each multiplies a part of its
weights by the vectors of all samples of the block, which lie in shared memory; then they exchange
sums, so that each has whole ones, for other samples than its neighbours, and computes what is
elementwise for those alone.

A step has stages: products of all matrices whose vectors are known, what is elementwise, a barrier,
products of what that has computed, and so on; backward it has them in the reverse order. All of a
cell but these loops is a :class:`CudaProgram`, and functions that its source is compiled to.

The weights are in registers for the whole sequence where they fit: in float32 those of up to 176
units of one matrix, and of 88 of three or four; in float64 of 96, 64 and 48. Beyond, each step
reads them from the L2 cache, in tiles of 16 bytes a thread and matrix, a tile ahead of its use; as
one tile serves all samples of the block, a block then has up to eight.

Products with the inputs come from a matrix product over all steps, ``[direction][step][sample][slot
· unit]`` in `products`. Forward, what is kept takes their places, backward the gradients in sums;
sums without products of the input have theirs in `rest`. What is more, vectors that are kept
beside those and arguments of matrices, is in `more`, ``[direction][vector][step][sample][unit]``.

Where samples begin anew in the middle, kernels of their own have the states that the next step
reads behind those that steps have written. For samples that are reset these are those in the slot
at the end where a direction does not begin, which no step reads; and the gradients in them are
behind the direction's in ``carry``. Behind the lengths there is
``[step][sample]``, and a row more: whether the sample is reset when a direction goes to this step
from the one before in time, or back.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ....arrays.cuda import for_block
from ...render.cuda import CudaProgram
from .backward import back_kernel
from .forward import run_kernel
from .layout import LoopLayout
from .parts import Pass


class SequenceKernels(NamedTuple):
    """Compiled for one program, units, and a dtype.

    Attributes
    ----------
    run : callable
        Write the states of some steps, and what is kept.
    back : callable
        Write the gradients in the products of some steps, the last step first.
    threads, samples : int
        Threads of a block, and samples.
    """

    run: Any
    back: Any
    threads: int
    samples: int

    def blocks(self, batch: int, directions: int) -> int:
        """Return how many blocks there are."""
        return -(-batch // self.samples) * directions


@cache
def sequence_kernels(
    code: CudaProgram,
    layout: LoopLayout,
    dtype: np.dtype[Any],
    samples: int,
    has_resets: bool = False,
) -> SequenceKernels:
    """Return the kernels for a program, with so many samples in a block, with resets or without.

    Both take addresses of packed weights and parameters, then counts; both directions of what they
    have lie behind each other. They work on steps `begin` to `end` of each direction's own order.
    There are products and what is kept of `segment` steps, all or those; states, ``[state][step +
    2][sample][width]``, have one slot more before the first step and behind the last.
    """
    about = code, layout, dtype, samples, has_resets
    run, back = run_kernel(Pass(*about, back=False)), back_kernel(Pass(*about, back=True))
    kernels = (for_block(each, layout.threads) for each in (run, back))
    return SequenceKernels(*kernels, layout.threads, samples)
