"""Recorded training steps: what NumPy's has, bit by bit, from and in memory of any content."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sampling import examples
from some_cells import CELLS, Elementwise, Leaky

from sparsescan.execution.recording import Recording
from sparsescan.recurrent import GRU, LSTM, RNN, Recurrent
from sparsescan.recurrent.memory import beside
from sparsescan.recurrent.recorded import parameters_of, record

Array = NDArray[Any]

KINDS = [RNN, GRU, LSTM, *(partial(Recurrent, cell) for cell in CELLS.values())]
READ_UNITS = [kind for kind in KINDS[3:] if kind.args[0] in (Leaky, Elementwise)]

GUARD = 64


class Guarded:
    """An array of 0xFF, which are NaN, between bytes that must stay."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._room = np.full(nbytes + 2 * GUARD, 0xFF, np.uint8)
        self._room[:GUARD] = self._room[GUARD + nbytes :] = 0xA5
        self.array = self._room[GUARD : GUARD + nbytes].view(dtype).reshape(shape)

    def check(self) -> None:
        nbytes = self.array.nbytes
        guards = self._room[:GUARD], self._room[GUARD + nbytes :]
        assert all((guard == 0xA5).all() for guard in guards)


def replay(recording: Recording, memory: list[Guarded], given: list[Array]) -> dict[str, Any]:
    """Return the results of a recording, which changes nothing but these and its memory."""
    results = {each.name: Guarded(each.shape, each.dtype) for each in recording.results}
    before = [each.copy() for each in given]
    recording.run(
        [each.array for each in memory] + given + [each.array for each in results.values()]
    )
    assert all(map(np.array_equal, given, before))
    for each in (*memory, *results.values()):
        each.check()
    return {name: each.array for name, each in results.items()}


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32))
def test_what_numpy_has(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kind, dtype = KINDS[rng.integers(len(KINDS))], (np.float32, np.float64)[rng.integers(2)]
    steps, inputs, hidden = (int(rng.integers(1, most)) for most in (40, 6, 24))
    batch = int(rng.choice([1, 2, 5, 14, 17, 40]))
    layers = int(rng.integers(1, 3))
    inputs, layers = (hidden, 1) if kind in READ_UNITS else (inputs, layers)
    shape = getattr(kind(inputs, hidden).params.get("weight_hh_l0"), "shape", None)
    masks = {"weight_hh_l0": rng.random(shape) < 0.2} if shape and rng.random() < 0.3 else None
    net: Any = kind(
        inputs,
        hidden,
        num_layers=layers,
        bidirectional=bool(rng.random() < 0.5),
        bias=bool(rng.random() < 0.7),
        masks=masks,
        rng=rng,
        dtype=dtype,
    )
    layers = net.num_layers * (1 + net.bidirectional)
    x = rng.standard_normal((steps, batch, inputs)).astype(dtype)
    state = rng.standard_normal((layers, batch, net.state_size)).astype(dtype)
    lengths = rng.integers(0, steps + 1, batch) if rng.random() < 0.5 else None
    resets = rng.random((steps, batch)) < 0.3 if rng.random() < 0.5 else None
    anew = None
    if resets is not None and rng.random() < 0.5:
        anew = rng.standard_normal(state.shape).astype(dtype)
    about = {"lengths": None if lengths is None else np.int64, "has_resets": resets is not None}
    ours = record(net, steps, batch, dtype, **about, has_reset_states=anew is not None)
    step = net.training_step()
    output, last = step.forward(x, state, lengths, resets, anew)
    loss, loss_of_last = (rng.standard_normal(each.shape).astype(dtype) for each in (output, last))
    expected = step.backward(loss, loss_of_last)
    assert ours.backward is not None
    kept, scratch = Guarded((ours.nbytes,), np.uint8), Guarded((ours.back_nbytes,), np.uint8)
    begin, in_begin = state, expected.state
    if anew is not None:
        begin, in_begin = beside(np, state, anew), beside(np, in_begin, expected.reset_states)
    given = [x, begin, *(each for each in (lengths, resets) if each is not None)]
    given += net.params.values()
    results = replay(ours.forward, [kept], given)
    assert np.array_equal(results["output"], output)
    assert np.array_equal(results["last"], last)
    results = replay(ours.backward, [kept, scratch], [loss, loss_of_last])
    assert np.array_equal(results["input"], expected.input)
    assert np.array_equal(results["state"], in_begin)
    cells = [cell for layer in net.cells for cell in layer]
    names = [f"{name} {k}" for k, cell in enumerate(cells) for name in cell._shapes]
    for name, own in zip(net.params, names, strict=True):
        assert np.array_equal(results[own], expected.params[name])


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32))
def test_samples_that_are_kept_have_no_gradient_in_steps_that_are_left_out(seed: int) -> None:
    """What gradients of parameters are sums of is 0 there, whatever was in the memory."""
    rng = np.random.default_rng(seed)
    kind, dtype = KINDS[rng.integers(len(KINDS))], (np.float32, np.float64)[rng.integers(2)]
    inputs, hidden, layers = (int(rng.integers(1, most)) for most in (6, 24, 3))
    steps, batch = int(rng.integers(1, 60)), int(rng.choice([1, 2, 5, 14, 17, 40]))
    inputs, layers = (hidden, 1) if kind in READ_UNITS else (inputs, layers)
    net: Any = kind(inputs, hidden, layers, bidirectional=bool(rng.random() < 0.5), rng=rng)
    for name, param in net.params.items():
        # Gradients decay within a few steps, but for those that gates of 1 let through.
        setattr(net, name, (param / 50).astype(dtype))
    directions = layers * (1 + net.bidirectional)
    x = rng.standard_normal((steps, batch, inputs)).astype(dtype)
    state = rng.standard_normal((directions, batch, net.state_size)).astype(dtype)
    step = net.training_step()
    resets = rng.random((steps, batch)) < 0.1 if rng.random() < 0.5 else None
    output, last = step.forward(x, state, None, resets)
    # Of one step, and one sample.
    loss, loss_of_last = np.zeros_like(output), np.zeros_like(last)
    loss[rng.integers(steps), rng.integers(batch)] = 1
    expected = step.backward(loss, loss_of_last)
    about = {"has_resets": resets is not None, "keeps_samples": True}
    ours = record(net, steps, batch, dtype, lengths=None, **about)
    assert ours.backward is not None
    kept, scratch = Guarded((ours.nbytes,), np.uint8), Guarded((ours.back_nbytes,), np.uint8)
    more = [] if resets is None else [resets]
    replay(ours.forward, [kept], [x, state, *more, *net.params.values()])
    results = replay(ours.backward, [kept, scratch], [loss, loss_of_last])
    assert np.array_equal(results["input"], expected.input)
    assert np.array_equal(results["state"], expected.state)
    names = iter(net.params)
    for k, one in enumerate(parameters_of(net, dtype)):
        own = {
            "input": x,
            **{key.split()[0]: each for key, each in results.items() if key.endswith(f" {k}")},
        }
        rows = {key: each.reshape(-1, each.shape[-1]).astype(float) for key, each in own.items()}
        parts = []
        for group in one.groups:
            read = np.concatenate([rows[key][:, a:b] for key, a, b in group.factors], 1)
            parts.append((rows["products"][:, group.first : group.end].T @ read).ravel())
        parts += [rows[key].sum(0) for key in ("products", "rows") if key in rows]
        sums = np.concatenate([*parts, [0.0]])
        for own_name, shape in one.shapes.items():
            name, actual = next(names), sums[one.orders[own_name]].sum(-1).reshape(shape)
            bound = 1e3 * np.finfo(dtype).eps * np.abs(actual).max(initial=1e-30)
            np.testing.assert_allclose(actual, expected.params[name], 0, bound, err_msg=name)
