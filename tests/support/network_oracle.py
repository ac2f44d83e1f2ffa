"""Networks of any cells by autograd of the cells' definitions, sample by sample, in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from cell_oracle import Reference, Runs
from numpy.typing import NDArray

__all__ = ["Expected", "autograd_of"]

Array = NDArray[Any]


class Expected(dict[str, Array]):
    """Results, and the least distance from a point where a function or a derivative jumps."""

    nearest = math.inf


def autograd_of(
    net: Any, x: Array, state: Array, lengths: Array | None, above: Array, carry: Array
) -> Expected:
    """Return outputs, last states and gradients, as a training step is asked for."""
    steps, batch, _ = x.shape
    lengths = np.full(batch, steps) if lengths is None else lengths
    results = Expected()
    results |= {
        "output": np.zeros((steps, batch, above.shape[2])),
        "last": np.array(state, np.float64),
        "input": np.zeros(x.shape),
        "state": np.array(carry, np.float64),
    }
    results |= {name: np.zeros(array.shape) for name, array in net.params.items()}
    for n, length in enumerate(lengths):
        if length:
            given = (each[:, n : n + 1].astype(np.float64) for each in (x, state, above, carry))
            _run_sample(net, n, int(length), results, *given)
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
) -> None:
    units, given, layers = net.hidden_size, x[:length], []
    width = len(net.cells[0])
    for layer in range(len(net.cells)):
        layers.append(given)
        outputs = []
        for back in range(width):
            begin = _parts(state[layer * width + back], units)
            runs = _run(net, layer, back, given, begin, None)
            outputs.append(_turned(runs.outputs[0], back))
            last = np.concatenate([each[-1] for each in runs.outputs], axis=-1)
            results["last"][layer * width + back, n] = last[0]
        given = np.concatenate(outputs, axis=-1)
    results["output"][:length, n] = given[:, 0]
    grad = above[:length]
    for layer, cells in reversed(list(enumerate(net.cells))):
        below = np.zeros(layers[layer].shape)
        for back, cell in enumerate(cells):
            k = layer * width + back
            states = cell.state_size // units
            cotangents = [np.zeros((length, 1, units)) for _ in range(states)]
            cotangents[0] += _turned(grad[..., back * units : (back + 1) * units], back)
            for each, part in zip(cotangents, _parts(carry[k], units), strict=True):
                each[-1] += part
            begin = _parts(state[k], units)
            runs = _run(net, layer, back, layers[layer], begin, cotangents)
            below += _turned(runs.input_grad, back)
            results.nearest = min(results.nearest, runs.nearest)
            results["state"][k, n] = np.concatenate(runs.state_grads, axis=-1)[0]
            for name, each in runs.param_grads.items():
                results[net.name_of(name, layer, back)] += each
        grad = below
    results["input"][:length, n] = grad[:, 0]


def _run(net: Any, layer: int, back: int, x: Array, states: list[Array], cotangents: Any) -> Runs:
    cell = net.cells[layer][back]
    if cotangents is None:
        cotangents = [np.zeros((len(x), *each.shape)) for each in states]
    params = {name: np.array(array, np.float64) for name, array in cell.params.items()}
    masks = {name: mask.on(np) for name, mask in cell.masks.items() if mask is not None}
    return Reference(type(cell), cell.options).run(
        params, _turned(x, back), states, cotangents, masks
    )


def _parts(state: Array, units: int) -> list[Array]:
    """Return the states of a cell, of which each has one number a unit."""
    return np.split(state, state.shape[-1] // units, axis=-1)


def _turned(array: Array, back: int) -> Array:
    """Return an array in the order of a direction's steps."""
    return array[::-1].copy() if back else array
