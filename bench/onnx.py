"""Inference of recurrent networks over whole sequences, beside ONNX Runtime and PyTorch.

A piece is a network, a batch, a number of threads and a peer; its points differ in their lengths,
and are timed as those of the map. All contenders are given the same threads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import sparsescan.torch

from . import drawing, peers
from .drawing import BLUE, GREEN, ORANGE, PINK, SKY
from .experiment import Drawing, Experiment, Options, Piece, Results, Table, as_text, cpu_only
from .map import OURS, THEIRS, measure, median_of
from .map_races import GATES, Contender, Race, Way, on_threads
from .page import significant
from .timing import THREADS
from .turns import quiet

__all__ = ["EXPERIMENT", "PEERS", "RUNTIME", "Group", "Ratio", "Sequence", "groups", "ratios"]

Array = NDArray[Any]
Arrays = dict[str, Array]

RUNTIME, PYTORCH = "ONNX Runtime", peers.PYTORCH
PEERS = RUNTIME, PYTORCH
# Entries of an input, and units.
_SIZES = (1, 40), (40, 128), (32, 64), (32, 256), (32, 512)
_KINDS, _BATCHES, _STEPS = ("LSTM", "GRU", "RNN"), (1, 16), (1, 16, 64, 256, 1000)
_QUICK_KINDS, _QUICK_STEPS = ("LSTM", "GRU"), (1, 64)
# The least number of steps at which something is asked: of each ratio, and of their median.
_LONG, _EACH, _MEDIAN = 64, 1.0, 1.5
_SHOWN = 20
# The order of gates in ONNX, by their places in PyTorch.
_GATES = {"RNN": (0,), "GRU": (1, 0, 2), "LSTM": (0, 3, 1, 2)}
# Versions that every ONNX Runtime of the last years reads.
_OPSET, _IR = 14, 8
_HINT = "pip install onnxruntime onnx"
_COLORS = dict(zip(_SIZES, (SKY, GREEN, BLUE, ORANGE, PINK), strict=True))
_STYLES = {1: "o-", 16: "s--"}


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

        way = Way(call, _nothing, partial(on_threads, self.threads))
        return Contender({"no_grad": way}, _of_tensors)

    def _runtime(self, module: nn.Module, x: Tensor) -> Contender:
        """Return a session of ONNX Runtime, which makes its outputs or is given memory for them."""
        runtime = peers.require("onnxruntime", _HINT)
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
        ways = {name: Way(call, _nothing, nullcontext) for name, call in calls.items()}
        return Contender(ways, _of_outputs)


def _shapes(of: Sequence) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of what a network of ONNX computes."""
    states = dict.fromkeys(["Y_h", "Y_c"] if of.kind == "LSTM" else ["Y_h"], (1, of.batch))
    lead = {"Y": (of.steps, 1, of.batch), **states}
    return {name: (*shape, of.hidden) for name, shape in lead.items()}


def graph_of(
    module: Any, kind: str, shape: tuple[int, ...], shapes: dict[str, tuple[int, ...]]
) -> bytes:
    """Return a model of ONNX with a module's parameters, for inputs of one shape."""
    onnx = peers.require("onnx", _HINT)
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
        kind, ["X", *params], [*shapes], hidden_size=module.hidden_size, **options
    )
    of_type = partial(helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT)
    graph = helper.make_graph(
        [node],
        kind,
        [of_type("X", shape=shape)],
        [of_type(name, shape=each) for name, each in shapes.items()],
        [onnx.numpy_helper.from_array(array, name) for name, array in params.items()],
    )
    opsets = [helper.make_opsetid("", _OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR)
    onnx.checker.check_model(model)
    data: bytes = model.SerializeToString()
    return data


def _nothing() -> None:
    """Make ready for a call: nothing is left from the one before."""


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

    kind: str
    inputs: int
    hidden: int
    batch: int
    threads: int
    peer: str
    points: tuple[Sequence, ...]

    @property
    def call(self) -> str:
        """Name what is called, without the peer."""
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return f"{self.kind}({self.inputs}, {self.hidden}), B={self.batch}, {threads}"

    @property
    def key(self) -> str:
        """Name the piece."""
        return f"{self.call}, {self.peer}"


def groups(quick: bool) -> Iterator[Group]:
    """Yield all groups, those beside ONNX Runtime first."""
    kinds, steps = (_QUICK_KINDS, _QUICK_STEPS) if quick else (_KINDS, _STEPS)
    sizes, batches = (_SIZES[:1], _BATCHES[:1]) if quick else (_SIZES, _BATCHES)
    for peer, kind, size, batch, threads in product(PEERS, kinds, sizes, batches, (1, THREADS)):
        own = kind, *size, batch, threads, peer
        yield Group(*own, tuple(Sequence(*own, count) for count in steps))


def _pieces(options: Options) -> Iterable[Piece]:
    cpu_only("onnx", options)
    for group in groups(options.quick):
        most = max(each.work for each in group.points)
        run = partial(measure, group.points, most, quick=options.quick)
        yield Piece(group.key, run)


def _about(options: Options) -> Results:
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
        "asked": f"of T ≥ {_LONG}, beside {RUNTIME}: {_EACH:g}× each, median {_MEDIAN:g}×",
    }


class Ratio(NamedTuple):
    """The times of a call, ours and the peer's."""

    group: Group
    steps: int
    ours: float
    theirs: float
    kernel: str

    @property
    def ratio(self) -> float:
        """The peer's time over ours."""
        return self.theirs / self.ours

    @property
    def call(self) -> str:
        return f"{self.group.call}, T={self.steps}"

    @property
    def is_asked(self) -> bool:
        return self.steps >= _LONG and self.group.peer == RUNTIME


def ratios(results: Results) -> Iterator[Ratio]:
    """Yield all ratios there are, in the order of pieces."""
    for group in groups(results["quick"]):
        piece = results["pieces"].get(group.key, {"points": {}})
        for each in group.points:
            if point := piece["points"].get(each.name):
                calm = quiet(piece["cores_others_used"])
                both = (median_of(point["samples"][who], calm) for who in (OURS, THEIRS))
                yield Ratio(group, each.steps, *both, point.get("kernel", ""))


def _asked(every: list[Ratio]) -> list[Table]:
    """Return the table of what is asked, and whether it is so."""
    own = [each for each in every if each.is_asked]
    if not own:
        return []
    least, middle = min(own, key=lambda each: each.ratio), median(each.ratio for each in own)
    below = sum(each.ratio < _EACH for each in own)
    missed = f"{below} of {len(own)} missed" if below else "met"
    met = "met" if middle >= _MEDIAN else "missed"
    work = f"T ≥ {_LONG}, beside {RUNTIME}"
    rows = [
        [work, f"{_EACH:g}× each", f"{least.ratio:.2f}× ({least.call})", missed],
        [work, f"median {_MEDIAN:g}×", f"{middle:.2f}×", met],
    ]
    return [Table(["calls", "asked", "measured", ""], rows, [])]


def _medians(every: list[Ratio]) -> Table:
    """Return the table of medians by peer, by network, by length and by threads."""
    parts: dict[str, Callable[[Ratio], bool]] = {
        "all": lambda each: True,
        **{kind: partial(_is_of, "kind", kind) for kind in _KINDS},
        **{f"B={batch}": partial(_is_of, "batch", batch) for batch in _BATCHES},
        **{f"{n} thread{'s' * (n > 1)}": partial(_is_of, "threads", n) for n in (1, THREADS)},
        **{f"T={steps}": lambda each, steps=steps: each.steps == steps for steps in _STEPS},
    }
    rows = []
    for peer in PEERS:
        for name, is_part in parts.items():
            own = [each.ratio for each in every if each.group.peer == peer and is_part(each)]
            if own:
                numbers = [f"{value:.2f}" for value in (median(own), min(own), max(own))]
                below = f"{sum(ratio < _EACH for ratio in own)} of {len(own)}"
                rows.append([f"beside {peer}", name, *numbers, below])
    numbers = ["median", "least", "most", "below 1"]
    return Table(["peer", "calls", *numbers], rows, numbers)


def _is_of(name: str, value: Any, ratio: Ratio) -> bool:
    return bool(getattr(ratio.group, name) == value)


def _worst(every: list[Ratio]) -> Table:
    """Return the table of the calls of which something is asked that come off worst."""
    own = sorted((each for each in every if each.is_asked), key=lambda each: each.ratio)
    count = max(_SHOWN, sum(each.ratio < _EACH for each in own))
    rows = [
        [
            f"the worst calls beside {RUNTIME}",
            each.call,
            f"{each.ratio:.2f}",
            *(significant(1e3 * taken) for taken in (each.theirs, each.ours)),
            each.kernel,
        ]
        for each in own[:count]
    ]
    numbers = ["ratio", "theirs, ms", "ours, ms"]
    return Table(["", "call", *numbers, "our kernel"], rows, numbers)


def _whole(every: list[Ratio]) -> Table:
    """Return the table of all ratios."""
    heads = [f"T={steps}" for steps in sorted({each.steps for each in every})]
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for each in every:
        row = rows.setdefault((f"beside {each.group.peer}", each.group.call), {})
        row[f"T={each.steps}"] = f"{each.ratio:.2f}"
    lines = [[*key, *(row.get(head, "") for head in heads)] for key, row in rows.items()]
    return Table(["peer", "call", *heads], lines, heads)


def _tables(results: Results) -> list[Table]:
    every = list(ratios(results))
    made = [*_asked(every), _medians(every), _worst(every), _whole(every)]
    return [table for table in made if table.rows]


def _drawings(results: Results) -> list[Drawing]:
    every = list(ratios(results))
    return [
        _drawing(peer, own)
        for peer in PEERS
        if (own := [r for r in every if _is_of("peer", peer, r)])
    ]


def _drawing(peer: str, every: list[Ratio]) -> Drawing:
    """Draw ratios over lengths: a panel for each kind and number of threads."""
    kinds = [kind for kind in _KINDS if any(each.group.kind == kind for each in every)]
    counts = 1, THREADS
    figure, panels = drawing.panels(
        len(counts), len(kinds), 3.3 * len(kinds) + 0.8, 6.4, sharex=True, sharey=True
    )
    for (row, threads), (column, kind) in product(enumerate(counts), enumerate(kinds)):
        axes = panels[row, column]
        lines: dict[tuple[int, int, int], dict[int, float]] = {}
        for each in every:
            group = each.group
            if (group.kind, group.threads) == (kind, threads):
                line = lines.setdefault((group.inputs, group.hidden, group.batch), {})
                line[each.steps] = each.ratio
        for (inputs, hidden, batch), line in lines.items():
            color, label = _COLORS[inputs, hidden], f"({inputs}, {hidden}), B={batch}"
            axes.plot(
                *zip(*line.items(), strict=True),
                _STYLES[batch],
                color=color,
                ms=4,
                lw=1.2,
                label=label,
            )
        axes.axhline(_EACH, color="black", lw=0.8, ls=":")
        axes.set(xscale="log", yscale="log", title=f"{kind}, {threads} thread{'s' * (threads > 1)}")
        drawing.numbers(axes.xaxis)
        drawing.decades(axes.yaxis, "{:g}")
        drawing.plain(axes, "y")
    for axes in panels[-1]:
        axes.set(xlabel="steps of a sequence")
    for axes in panels[:, 0]:
        axes.set(ylabel="time over ours")
    drawing.legend(figure, panels.flat, 5)
    below = sum(each.ratio < _EACH for each in every)
    caption = (
        f"Inference of sequences: the time of {peer} over ours, by the number of steps. Networks "
        "are (entries of an input, units); the dotted line is where both take as long. "
        f"{below} of {len(every)} calls are below it."
    )
    return Drawing(f"Inference beside {peer}", caption, figure)


def summary(results: Results) -> str:
    """Return the tables as text."""
    return as_text(_tables(results))


EXPERIMENT = Experiment(
    name="onnx",
    title="Inference beside ONNX Runtime",
    pieces=_pieces,
    about=_about,
    drawings=_drawings,
    rows=lambda results: [],
    tables=_tables,
    summary=summary,
)
