"""Networks of any cells by autograd of the cells' definitions, sample by sample, in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from cell_oracle import Reference, Runs
from numpy.typing import NDArray

Array = NDArray[Any]


class Expected(dict[str, Array]):
    """Results, and the least distance from a point where a function or a derivative jumps."""

    nearest = math.inf


def autograd_of(
    net: Any,
    x: Array,
    state: Array,
    lengths: Array | None,
    above: Array,
    carry: Array,
    resets: Array | None = None,
    reset_states: Array | None = None,
) -> Expected:
    """Return outputs, last states and gradients, as a training step is asked for.

    Where a sample is reset, a sequence of its own begins, with zeros or with `reset_states`.
    Outputs are all states of the last layer, or of all layers, if there are gradients in them.
    """
    steps, batch, _ = x.shape
    lengths = np.full(batch, steps) if lengths is None else lengths
    resets = np.zeros((steps, batch), bool) if resets is None else resets
    results = Expected()
    results |= {
        "output": np.zeros((steps, batch, *above.shape[2:])),
        "last": np.array(state, np.float64),
        "input": np.zeros(x.shape),
        "state": np.array(carry, np.float64),
    }
    results |= {name: np.zeros(array.shape) for name, array in net.params.items()}
    anew = np.zeros(state.shape) if reset_states is None else reset_states
    results["reset_states"] = np.zeros(anew.shape)
    for n, length in enumerate(lengths):
        if length:
            arrays = x, state, above, carry, anew
            given = (each[:, n : n + 1].astype(np.float64) for each in arrays)
            _run_sample(net, n, int(length), results, *given, resets[:length, n])
    if reset_states is None:
        del results["reset_states"]
    return results


def _run_sample(
    net: Any,
    n: int,
    length: int,
    results: Expected,
    x: Array,
    state: Array,
    above: Array,
    carry: Array,
    anew: Array,
    resets: Array,
) -> None:
    units, given, layers = net.hidden_size, x[:length], []
    width, is_whole = len(net.cells[0]), above.ndim == 4
    for layer in range(len(net.cells)):
        layers.append(given)
        outputs = []
        for back in range(width):
            k = layer * width + back
            both = _parts(state[k], units), _parts(anew[k], units)
            runs, _ = _run(net, layer, back, given, *both, None, resets)
            outputs.append([_turned(each, back) for each in runs.outputs])
            last = np.concatenate([each[-1] for each in runs.outputs], axis=-1)
            if is_whole:
                results["output"][:length, n, k] = np.concatenate(outputs[-1], axis=-1)[:, 0]
            results["last"][k, n] = last[0]
        every = [np.concatenate(each, axis=-1) for each in zip(*outputs, strict=True)]
        given = every[0]
    wide, grad = width * units, above[:length]
    if not is_whole:
        whole = np.concatenate(every[: above.shape[-1] // wide], axis=-1)
        results["output"][:length, n] = whole[:, 0]
    for layer, cells in reversed(list(enumerate(net.cells))):
        if is_whole:
            own = above[:length, :, layer * width : (layer + 1) * width]
            own = own.reshape(length, 1, width, -1, units).swapaxes(2, 3).reshape(length, 1, -1)
            if layer + 1 < len(net.cells):
                own[..., :wide] += grad
            grad = own
        below = np.zeros(layers[layer].shape)
        for back, cell in enumerate(cells):
            k = layer * width + back
            states = cell.state_size // units
            cotangents = [np.zeros((length, 1, units)) for _ in range(states)]
            for begin in range(back * units, grad.shape[-1], wide):
                cotangents[begin // wide] += _turned(grad[..., begin : begin + units], back)
            for each, part in zip(cotangents, _parts(carry[k], units), strict=True):
                each[-1] += part
            both = _parts(state[k], units), _parts(anew[k], units)
            runs, in_anew = _run(net, layer, back, layers[layer], *both, cotangents, resets)
            below += _turned(runs.input_grad, back)
            results.nearest = min(results.nearest, runs.nearest)
            results["state"][k, n] = np.concatenate(runs.state_grads, axis=-1)[0]
            results["reset_states"][k, n] = np.concatenate(in_anew, axis=-1)[0]
            for name, each in runs.param_grads.items():
                results[net.name_of(name, layer, back)] += each
        grad = below
    results["input"][:length, n] = grad[:, 0]


def _run(
    net: Any,
    layer: int,
    back: int,
    x: Array,
    states: list[Array],
    anew: list[Array],
    cotangents: Any,
    resets: Array,
) -> tuple[Runs, list[Array]]:
    """Run a direction of a layer, whose cotangents and outputs are in the order of its steps.

    The gradients in the states that resets set are returned, too.
    """
    steps, cell = len(x), net.cells[layer][back]
    if cotangents is None:
        cotangents = [np.zeros((len(x), *each.shape)) for each in states]
    params = {name: np.array(array, np.float64) for name, array in cell.params.items()}
    masks = {name: mask.on(np) for name, mask in cell.masks.items() if mask is not None}
    x, reference = _turned(x, back), Reference(type(cell), cell.options)
    # Between the first step of an episode and the one before it there is a cut, from both sides.
    cuts = [steps - t if back else t for t in np.flatnonzero(resets) if t > 0]
    bounds, parts = [0, *sorted(cuts), steps], []
    in_anew, in_states = ([np.zeros_like(each) for each in states] for _ in range(2))
    for begin, end in itertools.pairwise(bounds):
        is_anew = begin > 0 or (not back and resets[0])
        own = [each[begin:end] for each in cotangents]
        parts.append(reference.run(params, x[begin:end], anew if is_anew else states, own, masks))
        for total, grad in zip(
            in_anew if is_anew else in_states, parts[-1].state_grads, strict=True
        ):
            total += grad
    runs = parts[0]._replace(state_grads=in_states)
    whole = runs._replace(
        outputs=[
            np.concatenate(own) for own in zip(*(each.outputs for each in parts), strict=True)
        ],
        input_grad=np.concatenate([each.input_grad for each in parts]),
        param_grads={
            name: sum(each.param_grads[name] for each in parts) for name in runs.param_grads
        },
        nearest=min(each.nearest for each in parts),
    )
    return whole, in_anew


def _parts(state: Array, units: int) -> list[Array]:
    """Return the states of a cell, of which each has one number a unit."""
    return np.split(state, state.shape[-1] // units, axis=-1)


def _turned(array: Array, back: int) -> Array:
    """Return an array in the order of a direction's steps."""
    return array[::-1].copy() if back else array
