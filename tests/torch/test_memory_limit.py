"""Modules that keep less for their backward pass, beside the same without a limit."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from torch import nn

from sparsescan import InputError, MemoryLimitError
from sparsescan.recurrent.catalogue import MGU
from sparsescan.torch import GRU, LSTM, RNN, convert, module

# Steps whose gates are computed again at once are 256.
KINDS: list[Any] = [GRU, LSTM, RNN, module(MGU)]


def results(net: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Return outputs, last states and all gradients."""
    x = x.clone().requires_grad_()
    output, state = net(x)
    states = state if isinstance(state, tuple) else (state,)
    loss = output.square().sum() + sum(each.sum() for each in states)
    return [output, *states, *torch.autograd.grad(loss, [x, *net.parameters()])]


@settings(max_examples=examples(20))
@given(
    kind=st.sampled_from(KINDS),
    steps=st.integers(1, 700),
    batch=st.integers(1, 3),
    layers=st.integers(1, 2),
    bidirectional=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_results_are_those_without_a_limit(
    kind: Any, steps: int, batch: int, layers: int, bidirectional: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    free = kind(3, 4, layers, bidirectional=bidirectional, dtype=torch.float64)
    limited = copy.deepcopy(free)
    x = torch.randn(steps, batch, 3, dtype=torch.float64)
    # Enough for states, too little for gates of many steps.
    limited.memory_limit = 400_000 + 8 * steps * batch * 4 * 9 * layers * (1 + bidirectional)
    expected = results(free, x)
    for _ in range(6):  # calls without a limit are recorded by then
        actual = results(limited, x)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_less_is_kept() -> None:
    net, x = GRU(4, 8), torch.randn(20_000, 1, 4)
    for limit, fits in ((None, True), (8_000_000, True), (3_000_000, True), (500_000, False)):
        net.memory_limit = limit
        if fits:
            net(x)[0].sum().backward()
            continue
        with pytest.raises(MemoryLimitError, match=r"memory_limit is 488 KiB"):
            net(x)
        with torch.no_grad():
            net(x)  # keeps nothing


def test_the_limit_is_an_argument_and_goes_with_the_module() -> None:
    net = LSTM(3, 4, memory_limit=1 << 20)
    for same in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert same.memory_limit == 1 << 20
    assert module(MGU)(3, 4, memory_limit=5).memory_limit == 5
    assert GRU(3, 4).memory_limit is None
    model = nn.Sequential(nn.GRU(3, 4), nn.Linear(4, 2))
    convert(model, memory_limit=1 << 20)
    assert model[0].memory_limit == 1 << 20
    with pytest.raises(InputError, match="memory_limit is -1; expected"):
        net.memory_limit = -1
    with pytest.raises(InputError, match="memory_limit is -1; expected"):
        convert(model, memory_limit=-1)


def test_compiled_graphs_stay_whole() -> None:
    torch.manual_seed(0)
    net, x = GRU(3, 4, memory_limit=1 << 20), torch.randn(400, 2, 3)
    expected = net(x)[0]
    compiled = torch.compile(lambda x: net(x)[0], fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(allow_rnn=True):
        torch.testing.assert_close(compiled(x), expected)


def test_modules_that_version_0_2_has_pickled() -> None:
    """They have an attribute for each option."""
    state = dict(vars(GRU(3, 4)))
    state.pop("_options", None)
    old = GRU.__new__(GRU)
    old.__setstate__(state | {"_memory_limit": 1 << 20, "_truncate": None, "_return_states": True})
    assert (old.memory_limit, old.truncate, old.return_states) == (1 << 20, None, True)
    assert not any(name in vars(old) for name in ("_memory_limit", "_truncate", "_return_states"))
