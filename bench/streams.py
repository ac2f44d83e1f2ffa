"""Steps of streams, one at a time, beside ONNX Runtime and PyTorch's modules, on one thread.

A step of LSTM(1, 40) has 6,560 multiply-adds, 26 kB of weights, which the first cache of a core
holds, and 200 exponentials: together less than what calls take. One of a stream is one compiled
call, which hands 250 words to one kernel, and makes one array.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import sparsescan.torch
from sparsescan import recurrent

from . import peers, races
from .experiment import Experiment, Piece, Results, Table
from .map_races import on_threads
from .onnx import HINT, PYTORCH, RUNTIME, graph_of
from .page import significant
from .races import OURS
from .timing import Call

Array = NDArray[Any]

OUR_TORCH = "sparsescan, PyTorch"
_NETWORKS = ("LSTM", 1, 40), ("GRU", 32, 64), ("LSTM", 40, 128)
_BATCHES = 1, 16
# Steps that are timed together, since a clock takes as long as some of them.
_STEPS = 100
# Microseconds that are asked of LSTM(1, 40), and ratios of all beside ONNX Runtime.
_ASKED, _RATIO = {OURS: 3.0, OUR_TORCH: 8.0}, 1.0


def _steps(kind: str, inputs: int, hidden: int, batch: int) -> dict[str, peers.Variants]:
    """Return the contenders, each of which returns the last output of some steps."""
    torch.manual_seed(0)
    module = getattr(nn, kind)(inputs, hidden)
    x = torch.randn(_STEPS, batch, inputs)
    rows = [each[None].numpy() for each in x]

    def ours() -> dict[str, Call]:
        net: Any = getattr(recurrent, kind)(inputs, hidden)
        for name, param in module.named_parameters():
            setattr(net, name, param.detach().numpy())
        return _ways(net.stream(batch), np.empty((batch, hidden), np.float32), [e[0] for e in rows])

    def in_torch() -> dict[str, Call]:
        return _ways(sparsescan.torch.stream(module, batch), torch.empty(batch, hidden), [*x])

    def theirs() -> Any:
        state: Any = None
        with torch.inference_mode():
            for each in x:
                output, state = module(each[None], state)
        return output[0]

    runtime = partial(_runtime, module, kind, rows)
    return {OURS: ours, OUR_TORCH: in_torch, RUNTIME: runtime, PYTORCH: lambda: {"module": theirs}}


def _ways(stream: Any, out: Any, rows: list[Any]) -> dict[str, Call]:
    """Return calls of a stream that make arrays, and that write to one."""

    def run(**options: Any) -> Any:
        stream.reset()
        for each in rows:
            output = stream(each, **options)
        return output

    return {"stream(x)": run, "stream(x, out)": partial(run, out=out)}


def _runtime(module: Any, kind: str, rows: list[Array]) -> dict[str, Call]:
    """Return calls of ONNX Runtime, which is given the states that it has returned."""
    runtime = peers.require("onnxruntime", HINT)
    batch, names = rows[0].shape[1], ["h", "c"][: 1 + (kind == "LSTM")]
    shape = 1, batch, module.hidden_size
    shapes = {f"Y_{name}": shape for name in names}
    graph = graph_of(module, kind, rows[0].shape, {"Y": (1, *shape), **shapes}, names)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    zeros = [np.zeros(shape, np.float32) for _ in names]

    def run() -> Array:
        states = zeros
        for each in rows:
            states = session.run([*shapes], {"X": each, **dict(zip(names, states, strict=True))})
        return np.asarray(states[0][0])

    # Two bindings, each of which reads the states that the other one has written.
    x = np.empty_like(rows[0])
    states = [[np.zeros(shape, np.float32) for _ in names] for _ in range(2)]
    bindings = []
    for own, new in (states, states[::-1]):
        binding = session.io_binding()
        binding.bind_cpu_input("X", x)
        for name, before, after in zip(names, own, new, strict=True):
            about = "cpu", 0, np.float32, shape
            binding.bind_input(name, *about, before.ctypes.data)
            binding.bind_output(f"Y_{name}", *about, after.ctypes.data)
        bindings.append(binding)
    x_at = x.ctypes.data
    for binding in bindings:
        binding.bind_input("X", "cpu", 0, np.float32, x.shape, x_at)

    def bound() -> Array:
        for each in states[0]:
            each[...] = 0
        for k, each in enumerate(rows):
            x[...] = each
            session.run_with_iobinding(bindings[k % 2])
        return np.asarray(states[len(rows) % 2][0][0])

    return {"run": run, "io binding": bound}


def measure(kind: str, inputs: int, hidden: int, batch: int, quick: bool) -> Results:
    """Time all contenders, whose last outputs agree."""

    def differences(calls: dict[str, Call]) -> dict[str, float]:
        found = {name: {"output": np.asarray(call()).copy()} for name, call in calls.items()}
        return races.apart_from_ours(found)

    makers = _steps(kind, inputs, hidden, batch)
    with on_threads(1):
        return races.timed(makers, {RUNTIME: _RATIO}, quick, differences)


def _pieces(quick: bool) -> Iterable[Piece]:
    for network in _NETWORKS[:1] if quick else _NETWORKS:
        for batch in _BATCHES[:1] if quick else _BATCHES:
            kind, inputs, hidden = network
            key = f"{kind}({inputs}, {hidden}), B={batch}"
            yield Piece(key, partial(measure, *network, batch, quick))


def _about(quick: bool) -> Results:
    return {
        "a sample": f"{_STEPS} steps, one after the other, float32, one thread, from zero states",
        OURS: "net.stream(batch)(x), with and without out, whichever was faster",
        OUR_TORCH: "sparsescan.torch.stream(module, batch)(x), likewise",
        RUNTIME: "a model of one operator, given the states that the step before has returned: "
        "session.run, or two io bindings that write each other's inputs",
        PYTORCH: "the module of torch.nn, given such states, under torch.inference_mode",
        "asked": f"µs of a step of LSTM(1, 40), B=1: {_ASKED}; beside {RUNTIME} {_RATIO:g}× each",
    }


def _tables(results: Results) -> list[Table]:
    rows = []
    names = OURS, OUR_TORCH, RUNTIME, PYTORCH
    for key, piece in races.races(results).items():
        there = [name in piece["samples"] for name in names]
        taken = [
            races.quartiles(piece, name, 1e-6 * _STEPS)[1] if is_there else float("nan")
            for name, is_there in zip(names, there, strict=True)
        ]
        ratio = taken[2] / taken[0], taken[3] / taken[0]
        rows.append(
            [key, *(significant(each) if each == each else "—" for each in [*taken, *ratio])]
        )
    heads = ["a step", *(f"{name}, µs" for name in names)]
    heads += [f"{name} / sparsescan" for name in names[2:]]
    return [Table(heads, rows, heads[1:])]


EXPERIMENT = Experiment("streams", "Steps of streams", _pieces, _about, tables=_tables)
