"""A plugin of pytest: JAX's tests of its LSTM on a GPU run with our recurrent networks on a CPU.

The reference that they compare it with is JAX's own, a ``lax.scan``.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from jax._src import test_util
from jax.experimental import rnn

from sparsescan.jax import recurrent
from sparsescan.recurrent import LSTM, Recurrent


def pytest_configure(config: pytest.Config) -> None:
    """Put our LSTM in the place of cuDNN's, and run tests that ask for a GPU."""
    rnn.lstm = _lstm
    test_util.run_on_devices = lambda *_: lambda test: test


def _lstm(
    x: Any,
    h_0: Any,
    c_0: Any,
    weights: Any,
    seq_lengths: Any,
    input_size: int,
    hidden_size: int,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
) -> tuple[Any, Any, Any]:
    network = LSTM(input_size, hidden_size, num_layers, bidirectional=bidirectional)
    unpacked = rnn.unpack_lstm_weights(weights, input_size, hidden_size, num_layers, bidirectional)
    kinds = zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), unpacked, strict=True)
    # JAX counts a direction as a layer.
    params = {
        Recurrent.name_of(kind, *divmod(k, 1 + bidirectional)): param
        for kind, params in kinds
        for k, param in params.items()
    }
    begin = jnp.concatenate([h_0, c_0], -1)
    output, last = recurrent(network, params, x.swapaxes(0, 1), begin, seq_lengths)
    return output.swapaxes(0, 1), last[..., :hidden_size], last[..., hidden_size:]
