"""Recursive filters of many samples on the host, and what the gradients in them take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import Allocating, InputError
from .execution.threads import share, thread_count
from .kernels.cpu.filters import FilterNeeds, FilterSizes, differentiate, filter_blocks
from .kernels.cpu.sixteen import WIDTH

__all__ = ["FilterGrads", "filter_samples", "filter_samples_vjp"]

Array = NDArray[Any]

# Multiply-adds that are worth another thread, and parts for each, so that late ones delay nobody.
_GRAIN, _PARTS = 1 << 19, 4
# As many multiply-adds as a forward pass has are those in a backward pass, of all gradients.
_PASSES = 2
# Steps of a tile: what is computed of them stays in the nearest caches, less of it if coefficients
# change.
_TILE, _TILE_OF_CHANGES = 128, 48


class FilterGrads(NamedTuple):
    """Gradients in what :func:`filter_samples` has been given; None for those not asked for.

    Attributes
    ----------
    b, a, x, start : ndarray or None
        Of the shapes of the arguments.
    """

    b: Array | None
    a: Array | None
    x: Array | None
    start: Array | None


def filter_samples(b: Array, a: Array, x: Array, start: Array | None = None) -> Array:
    """Return samples that a recursive filter has gone through, each by itself.

        a_0[t] y[t] = Σ_k b_k[t] x[t-k] - Σ_{k>0} a_k[t] y[t-k] + s[t]

    Parameters
    ----------
    b, a : ndarray, shape (1 or N, 1 or T, taps)
        The coefficients, of each sample and step, or shared; those of `a` begin with ``a_0``.
    x : ndarray, shape (N, T)
        The samples. There is nothing before their first step.
    start : ndarray, shape (N, M), optional
        The terms ``s`` of the leading steps; later ones are 0, and those behind the last step are
        left out.

    Returns
    -------
    ndarray, shape (N, T)
        The filtered samples. The bits do not depend on the number of threads.

    Raises
    ------
    InputError
        If the constant ``a_0`` of a filter is 0.
    """
    for name, array in (("b", b), ("a", a)):
        if array.shape[-1] == 0:
            raise InputError(f"{name} has no coefficients; expected at least one")
    if a.shape[1] == 1 and not a[..., 0].all():
        raise InputError(
            "a[0] is 0; expected another number, since all coefficients are divided by it"
        )
    with Allocating("the filter"):
        y = np.empty(x.shape, x.dtype)
        if y.size == 0:
            return y
        shape = _shape(b, a, x, start)
        given = _factors(b, shape, False), _factors(a, shape, True), x.ravel(), _flat(start, x)
        rows = 2 * (shape.tile + shape.before) + _rows_of_coefficients(shape)

        def run(first: int, last: int) -> None:
            room = np.empty((rows, WIDTH), x.dtype)
            filter_blocks(shape, *given, y.ravel(), room, first, last)

        _share(run, shape, 1)
        return y


def filter_samples_vjp(
    grads: Array,
    b: Array,
    a: Array,
    x: Array,
    y: Array,
    starts: int = 0,
    needs: Sequence[bool] = (True, True, True, True),
) -> FilterGrads:
    """Return the gradients in all that enters :func:`filter_samples`.

    Parameters
    ----------
    grads, y : ndarray, shape (N, T)
        The gradients of a loss in the filtered samples, and these.
    b, a, x
        As there.
    starts : int, default 0
        The length of `start`; 0 if there is none.
    needs : sequence of bool
        Which gradients to return: those in `b`, `a`, `x` and `start`.

    Returns
    -------
    FilterGrads
        The gradients. The bits do not depend on the number of threads.
    """
    samples = len(x)
    with Allocating("the gradients"):
        blocks = -(-samples // WIDTH)
        own = [_gradients(each, need, x, blocks) for each, need in zip((b, a), needs, strict=False)]
        in_x = np.empty(x.shape if needs[2] else 0, x.dtype)
        in_start = np.zeros((samples, starts) if needs[3] else 0, x.dtype)
        if x.size == 0:
            return _found(
                needs, *(np.zeros(each.shape, x.dtype) for each in (b, a)), in_x, in_start
            )
        shape = _shape(b, a, x, None)._replace(starts=starts)
        given = (
            *(grads.ravel(), _factors(b, shape, False), _factors(a, shape, True)),
            *(x.ravel(), y.ravel(), own[0].ravel(), own[1].ravel(), in_x.ravel(), in_start.ravel()),
        )
        flags = FilterNeeds(*map(int, needs))
        taps = shape.b_taps + shape.a_taps
        rows = 5 * (shape.tile + shape.before) + taps * (1 + shape.tile)
        rows += _rows_of_coefficients(shape)

        def run(first: int, last: int) -> None:
            room = np.empty((rows, WIDTH), x.dtype)
            differentiate(shape, flags, *given, room, first, last)

        _share(run, shape, _PASSES)
        in_b, in_a = (
            # Of each sample and tap, or of each block, step and tap, if it is not of all three.
            each.sum(0, keepdims=True) if need and len(each) > len(to) else each
            for each, to, need in zip(own, (b, a), needs, strict=False)
        )
        return _found(needs, in_b, in_a, in_x, in_start)


def _found(needs: Sequence[bool], *gradients: Array) -> FilterGrads:
    return FilterGrads(
        *(each if need else None for each, need in zip(gradients, needs, strict=True))
    )


def _gradients(coefficients: Array, need: bool, x: Array, blocks: int) -> Array:
    """Return room for gradients in coefficients, of which some are then added up."""
    count, changes, taps = coefficients.shape
    if not need:
        return np.empty((0, 1, taps), x.dtype)
    varies = changes > 1
    lead = len(x) if count > 1 or not varies else blocks
    return np.empty((lead, changes if varies else 1, taps), x.dtype)


def _shape(b: Array, a: Array, x: Array, start: Array | None) -> FilterSizes:
    """Return the sizes of a filter."""
    before = max(b.shape[2], a.shape[2]) - 1
    changes = b.shape[1] > 1 or a.shape[1] > 1
    tile = max(_TILE_OF_CHANGES if changes else _TILE, -(-before // 8) * 8)
    return FilterSizes(
        samples=len(x),
        steps=x.shape[1],
        tile=tile,
        before=before,
        b_taps=b.shape[2],
        a_taps=a.shape[2],
        b_sample=b.shape[1] * b.shape[2] if len(b) > 1 else 0,
        b_step=b.shape[2] if b.shape[1] > 1 else 0,
        a_sample=a.shape[1] * a.shape[2] if len(a) > 1 else 0,
        a_step=a.shape[2] if a.shape[1] > 1 else 0,
        starts=0 if start is None else start.shape[1],
    )


def _flat(start: Array | None, x: Array) -> Array:
    return np.empty(0, x.dtype) if start is None else start.ravel()


def _factors(coefficients: Array, shape: FilterSizes, normalise: bool) -> Array:
    """Return coefficients as kernels read them: normalised, and with zeros behind, if shared."""
    if len(coefficients) > 1:
        return coefficients.ravel()
    own: Array = coefficients[0]
    if normalise:
        with np.errstate(all="ignore"):
            own = own / -own[:, :1]
            own[:, 0] = 1 / coefficients[0, :, 0]
    if len(own) > 1:
        own = np.concatenate([own, np.zeros((shape.before, own.shape[1]), own.dtype)])
    flat: Array = own.ravel()
    return flat


def _rows_of_coefficients(shape: FilterSizes) -> int:
    """Return how many rows coefficients of a tile take."""
    if not shape.b_sample and not shape.a_sample:
        return 0
    return (shape.tile + shape.before) * (shape.b_taps + shape.a_taps)


def _share(run: Any, shape: FilterSizes, passes: int) -> None:
    """Share out blocks of samples, through which so many passes are made."""
    blocks = -(-shape.samples // WIDTH)
    work = passes * shape.samples * shape.steps * (shape.b_taps + shape.a_taps)
    threads = max(1, min(thread_count(), work // _GRAIN))
    parts = min(blocks, threads * _PARTS) if threads > 1 else 1
    ends = [blocks * k // parts for k in range(parts + 1)]
    tasks = [partial(run, *ends[k : k + 2]) for k in range(parts)]
    share(lambda k: tasks[k](), parts)
