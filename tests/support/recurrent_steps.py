"""Training steps of recurrent networks for tests: random ones, and PyTorch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from sparsescan.execution.recording import _SPACE
from sparsescan.recurrent import GRU, LSTM, RNN
from sparsescan.recurrent.host import HostMemory
from sparsescan.recurrent.passes import RecordedMemory
from sparsescan.recurrent.step import TrainingStep

torch = pytest.importorskip("torch")

Array = NDArray[Any]
KINDS = {"RNN": RNN, "relu": RNN, "GRU": GRU, "LSTM": LSTM}


def autograd(
    net: Any, x: Array, state: Array, lengths: Array | None, above: Array, carry: Array, dtype: str
) -> dict[str, Array]:
    """Return outputs, states and gradients by PyTorch in a dtype, given by its name."""
    dtype = getattr(torch, dtype)
    kind = type(net).__name__
    options = {"nonlinearity": net.cells[0][0].nonlinearity} if kind == "RNN" else {}
    layer = getattr(torch.nn, kind)(
        net.input_size,
        net.hidden_size,
        net.num_layers,
        bias=net.cells[0][0].bias,
        bidirectional=net.bidirectional,
        dtype=dtype,
        **options,
    )
    for name, array in net.params.items():
        getattr(layer, name).data = torch.tensor(np.where(kept(net, name), array, 0), dtype=dtype)
    given = [torch.tensor(array, dtype=dtype, requires_grad=True) for array in (x, state)]
    read, begin = given[0], given[1]
    if lengths is not None:
        read = torch.nn.utils.rnn.pack_padded_sequence(
            read, torch.as_tensor(lengths), enforce_sorted=False
        )
    if kind == "LSTM":
        begin = tuple(part.contiguous() for part in begin.chunk(2, dim=-1))
    output, last = layer(read, begin)
    if lengths is not None:
        output, _ = torch.nn.utils.rnn.pad_packed_sequence(output, total_length=len(x))
    last = torch.cat(last, dim=-1) if kind == "LSTM" else last
    grads = [torch.tensor(array, dtype=dtype) for array in (above, carry)]
    torch.autograd.backward([output, last], grads)
    tensors = {"output": output, "last": last, "input": given[0].grad, "state": given[1].grad}
    tensors |= {name: getattr(layer, name).grad for name in net.params}
    arrays = {name: tensor.detach().numpy() for name, tensor in tensors.items()}
    return {name: np.where(kept(net, name), array, 0) for name, array in arrays.items()}


def kept(net: Any, name: str) -> Any:
    """Return the mask of a weight."""
    cell, own = net._places.get(name, (None, ""))
    mask = None if cell is None else cell.masks.get(own)
    return True if mask is None else mask.on(np)


def gradients_of(
    step: Any,
    x: Array,
    state: Array,
    lengths: Array | None,
    above: Array,
    carry: Array,
    resets: Array | None = None,
    reset_states: Array | None = None,
) -> dict[str, Array]:
    """Return outputs, states and gradients by a training step."""
    output, last = step.forward(x, state, lengths, resets, reset_states)
    grads = step.backward(above, carry)
    found = {"output": output, "last": last, "input": grads.input, "state": grads.state}
    if reset_states is not None:
        found["reset_states"] = grads.reset_states
    return found | grads.params


def arguments_of(
    rng: np.random.Generator, net: Any, steps: int, batch: int, dtype: Any, shorter: bool = False
) -> tuple[Any, ...]:
    """Return random arguments of a training step, and gradients of its results."""
    directions = (1 + net.bidirectional) * net.num_layers
    states = (directions, batch, net.state_size)
    shapes = (steps, batch, net.input_size), states
    x, state = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    width = net.hidden_size * (1 + net.bidirectional)
    above, carry = (
        rng.standard_normal(shape).astype(dtype) for shape in ((steps, batch, width), states)
    )
    lengths = rng.integers(1, steps + 1, batch) if shorter else None
    return x, state, lengths, above, carry


@st.composite
def networks(draw: Any, units: int = 21, inputs: int = 19, layers: int = 3) -> Any:
    """Draw a network in float64, at most so large."""
    kind = draw(st.sampled_from(["RNN", "relu", "GRU", "LSTM"]))
    hidden, inputs = draw(st.integers(1, units)), draw(st.integers(1, inputs))
    layers, both = draw(st.integers(1, layers)), draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    gates = {"GRU": 3, "LSTM": 4}.get(kind, 1)
    masks = {}
    widths = {"weight_hh_l0": hidden, "weight_ih_l0": inputs}
    if layers > 1:
        widths["weight_ih_l1"] = hidden * (1 + both)
    for name, width in widths.items():
        density = draw(st.sampled_from([None, 0.0, 0.1, 0.9]))
        if density is not None:
            masks[name] = rng.random((gates * hidden, width)) < density
    options = {"nonlinearity": "relu"} if kind == "relu" else {}
    return KINDS[kind](
        *(inputs, hidden, layers, draw(st.booleans())),
        **options,
        bidirectional=both,
        masks=masks,
        dtype=np.float64,
        rng=rng,
    )


def memory_of(step: TrainingStep) -> HostMemory:
    """Return the memory of the last pass, whose arrays are where :func:`array_in` finds them."""
    memory = step._memory
    assert isinstance(memory, RecordedMemory)
    passes, _ = memory._passes[memory._kind]
    return passes._memory


def array_in(step: TrainingStep, array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of a memory, of which a recording knows the place."""
    memory = step._memory
    assert isinstance(memory, RecordedMemory)
    begin = array.__array_interface__["data"][0] - _SPACE
    return np.ndarray(array.shape, array.dtype, memory._room, begin)
