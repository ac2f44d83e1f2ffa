"""Training steps of recurrent networks as recordings, which compiled code runs without Python."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..execution.recording import Recorder, Recording, Space
from .networks import Recurrent
from .step import memory_on_host

__all__ = ["Parameters", "RecordedStep", "parameters_of", "record"]


class RecordedStep(NamedTuple):
    """A training step for inputs of one shape.

    Arrays of a replay of `forward` are the memory, the inputs, initial states, lengths if there are
    any, all parameters, and the results ``output`` and ``last``. Those of `backward` are the memory
    as `forward` has left it, memory for itself, gradients in ``output`` and ``last``, and the
    results: gradients in parameters, in initial states (``state``) and inputs (``input``).

    Attributes
    ----------
    backward : Recording or None
        None if only `forward` was asked for.
    nbytes, back_nbytes : int
        Bytes of the memory, and of that which only `backward` takes.
    """

    forward: Recording
    backward: Recording | None
    nbytes: int
    back_nbytes: int


def record(
    network: Recurrent,
    steps: int,
    batch: int,
    dtype: DTypeLike,
    *,
    lengths: DTypeLike | None,
    has_backward: bool = True,
    keeps_samples: bool = False,
) -> RecordedStep:
    """Record the training step of a network.

    Parameters
    ----------
    network : Recurrent
        The network; its parameters are not read.
    steps, batch : int
        The shape of the inputs, ``(steps, batch, input_size)``.
    dtype : dtype
        Of all arrays.
    lengths : dtype or None
        Of the lengths, if samples have different ones.
    has_backward : bool, default True
        Whether a backward pass will come. Without one less memory is taken.
    keeps_samples : bool, default False
        Whether its results are, in place of gradients in parameters, what these are sums of: for
        each direction ``products``, ``state`` and, above the first layer, ``input``, of all steps
        and samples.
    """
    kept, scratch = Space(0), Space(1)
    shapes = [param.shape for param in network.params.values()]
    count = 3 + (lengths is not None)
    recorder = Recorder(kept, count + len(shapes))
    x = recorder.array(1, (steps, batch, network.input_size), dtype)
    memory = memory_on_host(
        network, x, recorder, keeps_gates=has_backward, keeps_samples=keeps_samples
    )
    states = len(memory.directions), batch, network.state_size
    state = recorder.array(2, states, dtype)
    counts = None if lengths is None else recorder.array(3, (batch,), lengths)
    params = [recorder.array(count + k, shape, dtype) for k, shape in enumerate(shapes)]
    each = len(params) // len(memory.directions)
    memory.forward([params[k : k + each] for k in range(0, len(params), each)], x, state, counts)
    forward = recorder.recording()
    if not has_backward:
        return RecordedStep(forward, None, kept.nbytes, 0)

    memory.calls = recorder = Recorder(scratch, 4)
    above = recorder.array(2, (steps, batch, memory.widths[-1]), dtype)
    memory.backward(above, recorder.array(3, states, dtype), True)
    backward = recorder.recording()
    return RecordedStep(forward, backward, kept.nbytes, scratch.nbytes)


class Parameters(NamedTuple):
    """The parameters of one direction of a layer, and what their gradients are sums of.

    Attributes
    ----------
    shapes : dict of str to tuple of int
        The parameters of the cell by their names, in their order.
    masks : dict of str to ndarray of bool or None
        Where weights are not pruned.
    of_input, of_state : tuple of int
        For each gate the product that its weights of input, and of state, enter: products come in
        rows of `units`.
    inputs, units : int
        The sizes of the input and of the state.
    """

    shapes: dict[str, tuple[int, ...]]
    masks: dict[str, NDArray[np.bool_] | None]
    of_input: tuple[int, ...]
    of_state: tuple[int, ...]
    inputs: int
    units: int


def parameters_of(network: Recurrent) -> list[Parameters]:
    """Return the parameters of each direction of each layer."""
    cells: list[Any] = [cell for layer in network.cells for cell in layer]
    return [
        Parameters(
            cell._shapes,
            {name: None if mask is None else mask.on(np) for name, mask in cell._masks.items()},
            *(cell._ih, cell._hh, cell.input_size, cell.hidden_size),
        )
        for cell in cells
    ]
