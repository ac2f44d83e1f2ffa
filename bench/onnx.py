"""Inference of recurrent networks over whole sequences, beside ONNX Runtime and PyTorch.

A piece is a network, a batch, a number of threads and a peer; its points differ in their lengths,
and are timed as those of the map. All contenders are given the same threads.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import sparsescan.torch

from . import peers
from .experiment import Experiment, Piece, Results, Table
from .map import SUMMED_UP, Ratio, grid_of, measure, ratios, summed_up, worst
from .map_races import GATES, Contender, Race, Way, nothing, on_threads
from .timing import THREADS

Array = NDArray[Any]
Arrays = dict[str, Array]

RUNTIME, PYTORCH = "ONNX Runtime", peers.PYTORCH
PEERS = RUNTIME, PYTORCH
# Entries of an input, and units.
_SIZES = (1, 40), (40, 128), (32, 64), (32, 256), (32, 512)
_KINDS, _BATCHES, _STEPS = ("LSTM", "GRU", "RNN"), (1, 16), (1, 16, 64, 256, 1000)
_QUICK_KINDS, _QUICK_STEPS = ("LSTM", "GRU"), (1, 64)
# The least number of steps at which something is asked, and what of each ratio.
_LONG, _EACH = 64, 1.0
_SHOWN = 20
# The order of gates in ONNX, by their places in PyTorch.
_GATES = {"RNN": (0,), "GRU": (1, 0, 2), "LSTM": (0, 3, 1, 2)}
# Versions that every ONNX Runtime of the last years reads.
_OPSET, _IR = 14, 8
HINT = "pip install onnxruntime onnx"


# -- Contenders -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sequence:
    """A forward pass through sequences of one length, by our module and by a peer."""

    kind: str
    inputs: int
    hidden: int
    batch: int
    threads: int
    peer: str
    steps: int

    @property
    def name(self) -> str:
        return f"T={self.steps}"

    @property
    def work(self) -> int:
        own = self.hidden * (self.hidden + self.inputs) * GATES[self.kind]
        return self.batch * self.steps * own

    def race(self) -> Race:
        torch.manual_seed(0)
        theirs = getattr(nn, self.kind)(self.inputs, self.hidden)
        ours = copy.deepcopy(theirs)
        done = sparsescan.torch.convert(ours)
        assert done.replaced == [""], done
        x = torch.randn(self.steps, self.batch, self.inputs)

        def explained() -> Any:
            with torch.no_grad():
                return sparsescan.torch.explain(ours, x)

        make = {RUNTIME: self._runtime, PYTORCH: self._module}[self.peer]
        return Race(self._module(ours, x), make(theirs, x), explained)

    def _module(self, module: nn.Module, x: Tensor) -> Contender:
        def call() -> Any:
            with torch.no_grad():
                return module(x)

        way = Way(call, nothing, partial(on_threads, self.threads))
        return Contender({"no_grad": way}, _of_tensors)

    def _runtime(self, module: nn.Module, x: Tensor) -> Contender:
        """Return a session of ONNX Runtime, which makes its outputs or is given memory for them."""
        runtime = peers.require("onnxruntime", HINT)
        shapes = _shapes(self)
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        graph = graph_of(module, self.kind, tuple(x.shape), shapes)
        session = runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        given = {"X": x.numpy()}
        arrays = {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
        binding = session.io_binding()
        binding.bind_cpu_input("X", given["X"])
        for name, array in arrays.items():
            about = "cpu", 0, np.float32, array.shape, array.ctypes.data
            binding.bind_output(name, *about)

        def bound() -> list[Array]:
            session.run_with_iobinding(binding)
            return [*arrays.values()]

        calls = {"io binding": bound, "run": lambda: session.run(None, given)}
        ways = {name: Way(call, nothing, nullcontext) for name, call in calls.items()}
        return Contender(ways, _of_outputs)


def _shapes(of: Sequence) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of what a network of ONNX computes."""
    states = dict.fromkeys(["Y_h", "Y_c"] if of.kind == "LSTM" else ["Y_h"], (1, of.batch))
    lead = {"Y": (of.steps, 1, of.batch), **states}
    return {name: (*shape, of.hidden) for name, shape in lead.items()}


def graph_of(
    module: Any,
    kind: str,
    shape: tuple[int, ...],
    shapes: dict[str, tuple[int, ...]],
    states: Iterable[str] = (),
) -> bytes:
    """Return a model of ONNX with a module's parameters, for inputs of one shape.

    It is given initial states by their names, in the order in which it returns them behind outputs.
    """
    onnx = peers.require("onnx", HINT)
    helper = onnx.helper
    order = list(_GATES[kind])

    def in_order(name: str) -> Array:
        param: Array = getattr(module, name).detach().numpy()
        return param.reshape(len(order), module.hidden_size, -1)[order]

    biases = [in_order(f"bias_{which}_l0").reshape(-1) for which in ("ih", "hh")]
    params = {
        "W": in_order("weight_ih_l0").reshape(1, -1, module.input_size),
        "R": in_order("weight_hh_l0").reshape(1, -1, module.hidden_size),
        "B": np.concatenate(biases)[None],
    }
    # The reset gate of PyTorch's GRU multiplies what the product with the state gives.
    options = {"linear_before_reset": 1} if kind == "GRU" else {}
    node = helper.make_node(
        kind,
        ["X", *params, *(["", *states] if states else [])],
        [*shapes],
        hidden_size=module.hidden_size,
        **options,
    )
    of_type = partial(helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT)
    graph = helper.make_graph(
        [node],
        kind,
        [
            of_type("X", shape=shape),
            *(
                of_type(s, shape=each)
                for s, each in zip(states, [*shapes.values()][1:], strict=False)
            ),
        ],
        [of_type(name, shape=each) for name, each in shapes.items()],
        [onnx.numpy_helper.from_array(array, name) for name, array in params.items()],
    )
    opsets = [helper.make_opsetid("", _OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR)
    onnx.checker.check_model(model)
    data: bytes = model.SerializeToString()
    return data


def _of_tensors(output: Any) -> Arrays:
    outputs, states = output
    states = states if isinstance(states, tuple) else (states,)
    return _named([each.numpy() for each in (outputs, *states)])


def _of_outputs(output: list[Array]) -> Arrays:
    outputs, *states = output
    return _named([outputs[:, 0], *states])


def _named(arrays: Iterable[Array]) -> Arrays:
    return dict(zip(["output", "h", "c"], arrays, strict=False))


# -- The experiment -------------------------------------------------------------------------------


class Group(NamedTuple):
    """Calls that differ in their lengths, which are measured together."""

    points: tuple[Sequence, ...]

    @property
    def of(self) -> Sequence:
        """What all have in common."""
        return self.points[0]

    @property
    def call(self) -> str:
        """Name what is called, without the peer."""
        threads = f"{self.of.threads} thread{'s' * (self.of.threads > 1)}"
        return f"{self.of.kind}({self.of.inputs}, {self.of.hidden}), B={self.of.batch}, {threads}"

    @property
    def key(self) -> str:
        """Name the piece."""
        return f"{self.call}, {self.of.peer}"


def groups(quick: bool) -> Iterator[Group]:
    """Yield all groups, those beside ONNX Runtime first."""
    kinds, steps = (_QUICK_KINDS, _QUICK_STEPS) if quick else (_KINDS, _STEPS)
    sizes, batches = (_SIZES[:1], _BATCHES[:1]) if quick else (_SIZES, _BATCHES)
    for peer, kind, size, batch, threads in product(PEERS, kinds, sizes, batches, (1, THREADS)):
        own = kind, *size, batch, threads, peer
        yield Group(tuple(Sequence(*own, count) for count in steps))


def _pieces(quick: bool) -> Iterable[Piece]:
    for group in groups(quick):
        most = max(each.work for each in group.points)
        yield Piece(group.key, partial(measure, group.points, most, quick))


def _about(quick: bool) -> Results:
    return {
        "a call": "the forward pass through B sequences of T steps, float32, states begin as "
        "zeros; outputs of all steps and last states",
        "networks": "(entries of an input, units), one layer",
        "sparsescan": "the module of torch.nn, converted, under torch.no_grad",
        RUNTIME: "a model of one operator, RNN, GRU (linear_before_reset) or LSTM, for inputs of "
        "this shape; session.run or a call with io binding, whose outputs have their memory, "
        "whichever was faster",
        PYTORCH: "the module of torch.nn under torch.no_grad",
        "threads": "one or two for each contender: torch.set_num_threads, intra_op_num_threads",
        "a time": "the median over rounds of the median of a turn; rounds in which others used the "
        "cores do not count",
        "asked": f"of T ≥ {_LONG}, beside {RUNTIME}: {_EACH:g}× each",
    }


def _steps(ratio: Ratio) -> int:
    return int(ratio.point.removeprefix("T="))


def _tables(results: Results) -> list[Table]:
    every = ratios(results, groups(results["quick"]))
    asked = [each for each in every if _steps(each) >= _LONG and each.group.of.peer == RUNTIME]
    parts = {"all": every}
    for attribute, values in (("kind", _KINDS), ("batch", _BATCHES), ("threads", (1, THREADS))):
        for value in values:
            parts[f"{attribute} {value}"] = [
                each for each in every if getattr(each.group.of, attribute) == value
            ]
    parts |= {f"T={steps}": [r for r in every if _steps(r) == steps] for steps in _STEPS}
    rows = [
        summed_up(peer, name, own, _EACH)
        for peer in PEERS
        for name, part in parts.items()
        if (own := [each for each in part if each.group.of.peer == peer])
    ]
    grids = [
        grid_of(peer, [r for r in every if r.group.of.peer == peer], lambda group: group.call)
        for peer in PEERS
    ]
    points = worst([(each, _EACH) for each in asked], _SHOWN)
    return [Table(["peer", "calls", *SUMMED_UP], rows, SUMMED_UP), points, *grids]


EXPERIMENT = Experiment("onnx", "Inference beside ONNX Runtime", _pieces, _about, tables=_tables)
