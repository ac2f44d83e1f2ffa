"""Recurrent networks whose gradients flow at most to the segment before, as a function of JAX.

Windows of two segments are samples of one batch in the backward pass, as on the host: see
:class:`~sparsescan.recurrent.truncated.TruncatedMemory`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...recurrent.arguments import Options
from ...recurrent.memory import beside, has_reset_states
from ...recurrent.truncated import windows_at_once
from .primitives import TracedNetwork, fits, run


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_truncated(
    network: TracedNetwork,
    options: Options,
    params: list[Any],
    x: Any,
    state: Any,
    lengths: Any,
    resets: Any,
) -> tuple[Any, Any]:
    """Return outputs and last states; there are more steps than those of two segments."""
    (output, last), _ = _forward(network, options, params, x, state, lengths, resets)
    return output, last


def _forward(
    network: TracedNetwork,
    options: Options,
    params: list[Any],
    x: Any,
    state: Any,
    lengths: Any,
    resets: Any,
) -> Any:
    """Return the results, and what the backward pass needs."""
    truncate = options.truncate
    assert truncate is not None
    steps, count, anew = len(x), -(-len(x) // truncate), None
    if has_reset_states(state, len(network.cells)):
        state, anew = state[::2], state[1::2]

    def step(state: Any, given: Any) -> Any:
        k, part, flags = given
        own = _lengths_from(lengths, x, truncate, k[None], 1)
        given = params, part, _begun(state, anew), own, flags
        output, last = run(network, options.unbounded(), *given)
        return last, (state, output)

    parts = jnp.arange(count), _cut(x, truncate, count), _cut(resets, truncate, count)
    last, (starts, outputs) = lax.scan(step, state, parts)
    output = outputs.reshape(-1, *outputs.shape[2:])[:steps]
    return (output, last), (params, x, starts, anew, lengths, resets)


def _backward(
    network: TracedNetwork,
    options: Options,
    kept: Any,
    above: Any,
) -> tuple[Any, ...]:
    """Return the gradients in parameters, inputs and initial states."""
    params, x, starts, anew, lengths, resets = kept
    truncate = options.truncate
    assert truncate is not None
    (steps, batch, _), (in_output, in_last) = x.shape, above
    count, has_lengths = len(starts) - 1, lengths is not None or steps % truncate > 0
    most = windows_at_once(network.cells, count, 2 * truncate, batch)
    marks = has_lengths, resets is not None
    about = network, options, *marks, anew is not None
    while most > 1 and not fits(*about, 2 * truncate, most * batch, x.dtype.name):
        most //= 2
    calls = -(-count // most)
    size = -(-count // calls)
    if calls * size > count and not has_lengths:
        lengths = jnp.full(batch, steps, jnp.int32)  # windows behind the last have no steps
    segments = calls * size + 1
    own = jnp.full(batch, steps) if lengths is None else lengths
    lasts = jnp.maximum(-(-own // truncate) - 2, 0)
    given = [_cut(each, truncate, segments) for each in (x, in_output, resets)]
    starts = _filled(starts, segments)

    def call(totals: Any, k: Any) -> Any:
        windows = k * size + jnp.arange(size)
        part, grads, flags = (_in_windows(each, windows) for each in given)
        # Those in the first segment of a window are of the window before, but for the first one.
        is_seen = (jnp.arange(2)[:, None] > 0) | (windows == 0)
        is_seen = jnp.repeat(is_seen, batch, 1)[:, None, :, None]
        shape = grads.shape
        grads = jnp.where(is_seen, grads.reshape(2, truncate, *shape[1:]), 0).reshape(shape)
        carry = jnp.where((lasts == windows[:, None])[..., None], in_last[:, None], 0)
        begin = starts[windows].swapaxes(0, 1)
        begin, carry = (each.reshape(len(each), -1, each.shape[-1]) for each in (begin, carry))
        counts = _lengths_from(lengths, x, truncate, windows, 2)

        def function(params: Any, part: Any, begin: Any) -> Any:
            return run(network, options, params, part, begin, counts, flags)

        own = params, part, _begun(begin, anew)
        in_params, in_part, in_begin = jax.vjp(function, *own)[1]((grads, carry))
        in_anew = None
        if anew is not None:
            in_begin, of_resets = in_begin[::2], in_begin[1::2]
            in_anew = of_resets.reshape(len(anew), size, *anew.shape[1:]).sum(1)
        totals = [a + b for a, b in zip(totals, in_params, strict=True)]
        both = in_part.reshape(2, truncate, size, batch, -1).swapaxes(1, 2)
        return totals, (both, in_begin[:, :batch], in_anew)

    zeros = [jnp.zeros_like(each) for each in params]
    in_params, (both, in_begins, in_anew) = lax.scan(call, zeros, jnp.arange(calls))
    in_begin = in_begins[0] if anew is None else beside(jnp, in_begins[0], in_anew.sum(0))
    both = both.swapaxes(0, 1).reshape(2, calls * size, *both.shape[3:])
    in_x = jnp.pad(both[0], _behind(both[0], 1)) + jnp.pad(both[1], _before(both[1], 1))
    in_x = in_x.reshape(-1, *in_x.shape[2:])[:steps]
    return in_params, in_x, in_begin, None, None


run_truncated.defvjp(_forward, _backward)


def _begun(states: Any, anew: Any) -> Any:
    """Return states that segments or windows begin with, and those that resets set, if any."""
    if anew is None:
        return states
    windows = states.shape[1] // max(1, anew.shape[1])
    return beside(jnp, states, jnp.tile(anew, (1, windows, 1)))


def _behind(array: Any, count: int) -> list[tuple[int, int]]:
    """Return where to add so many zeros: behind the last."""
    return [(0, count), *((0, 0) for _ in array.shape[1:])]


def _before(array: Any, count: int) -> list[tuple[int, int]]:
    """Return where to add so many zeros: before the first."""
    return [(count, 0), *((0, 0) for _ in array.shape[1:])]


def _filled(array: Any, count: int) -> Any:
    """Return an array with zeros behind, so that it has so many rows."""
    return jnp.pad(array, _behind(array, count - len(array)))


def _cut(array: Any, length: int, segments: int) -> Any:
    """Return the steps of an array as segments, with zeros behind; None for None."""
    if array is None:
        return None
    return _filled(array, segments * length).reshape(segments, length, *array.shape[1:])


def _in_windows(array: Any, windows: Any) -> Any:
    """Return what windows are given of an array of segments, as samples; None for None."""
    if array is None:
        return None
    both = jnp.stack([array[windows], array[windows + 1]]).swapaxes(1, 2)
    return both.reshape(2 * array.shape[1], -1, *array.shape[3:])


def _lengths_from(lengths: Any, x: Any, length: int, segments: Any, count: int) -> Any:
    """Return the steps that samples have in so many segments from each of some; None if all."""
    steps, batch, _ = x.shape
    if lengths is None and steps % length == 0:
        return None
    own = jnp.full(batch, steps, jnp.int32) if lengths is None else lengths
    some = jnp.clip(own - length * segments[:, None].astype(own.dtype), 0, count * length)
    # Lengths that a program refuses stay so.
    return jnp.where((own < 0) | (own > steps), -1, some).reshape(-1)
