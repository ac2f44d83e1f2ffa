"""Strategies side by side: the scan as one of them, tables, machines and the command line."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepa_paper import image_parallelism
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import slow

import sparsescan
from sparsescan import Pattern
from sparsescan.cli.main import main
from sparsescan.errors import InputError, InputTypeError
from sparsescan.jacobians import Linear, Sequential, Tanh
from sparsescan.parallel import Network, predict
from sparsescan.recurrent import GRUCell, RNNCell
from sparsescan.strategies import (
    Machine,
    build,
    compare,
)
from sparsescan.strategies.compare import strategies
from sparsescan.strategies.graph import Graph, Layer, blocks
from sparsescan.strategies.integrated import (
    BatchParallel,
    DomainParallel,
    Integrated,
    ModelParallel,
)
from sparsescan.strategies.machine import PRESETS
from sparsescan.strategies.networks import Recurrent, graph_of
from sparsescan.strategies.per_layer.configurations import edges_of
from sparsescan.strategies.per_layer.predict import PerLayer
from sparsescan.strategies.pipeline import MicroBatches, Pipeline
from sparsescan.strategies.scan import Scan, parts_of
from sparsescan.strategies.strategy import Prediction, Strategy

ROOT = Path(__file__).parents[2]
NETWORK = Network("test", 100.0, 0.5, 0.5, 10.0)
BUILT_IN = ("lenet5", "alexnet", "vgg11", "resnet-110", "inception-v3", "rnn:50", "gru:20")
SOME = ["lenet5", "alexnet", "rnn:50", *slow("vgg11", "resnet-110", "inception-v3", "gru:20")]
positive = st.floats(1e-3, 1e9)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Layers that read one or two of some layers before them, so that all outputs are read."""
    layers = [Layer("x", "input", (), (3,))]
    for k in range(1, draw(st.integers(2, 14))):
        inputs = {k - 1, draw(st.integers(max(k - 3, 0), k - 1))}
        nnz = draw(st.integers(0, 50))
        layers.append(Layer(f"l{k}", "add", tuple(sorted(inputs)), (3,), nnz=nnz))
    return Graph("random", layers)


# -- The scan -------------------------------------------------------------------------------------


def test_networks_that_cannot_be_are_refused() -> None:
    cell, linear = RNNCell(2, 3, rng=0), Linear(3, 3, rng=0)
    for wrong, argument in (
        (lambda: Recurrent(None, linear, 2), "cell is a NoneType"),  # type: ignore[arg-type]
        (lambda: Recurrent(cell, Sequential([linear]), 2), "readout is a Sequential"),  # type: ignore[arg-type]
        (
            lambda: graph_of([linear]),
            "network is a list; expected a name .*Sequential",
        ),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputTypeError, match=argument):
            wrong()
    with pytest.raises(InputError, match=r"network has layers that share memory.*; expected"):
        graph_of(Sequential([linear, linear]))
    tied = Linear(3, 3, rng=0)
    tied.weight = linear.weight
    with pytest.raises(InputError, match="share memory for parameters"):
        graph_of(Sequential([linear, Tanh(input_shape=(3,)), tied]))
    with pytest.raises(InputTypeError, match="network is a int; expected a name"):
        compare(5, Machine(), 4, 8)  # type: ignore[arg-type]
    # Only parameters have to be there once.
    act = Tanh(input_shape=(3,))
    assert len(graph_of(Sequential([act, linear, act])).layers) == 4


def test_the_graph_of_a_recurrent_network_has_the_parameters_that_there_are() -> None:
    mask = np.eye(3, dtype=bool)
    cell = GRUCell(2, 3, bias=False, weight_hh_mask=np.tile(mask, (3, 1)), rng=0)
    readout = Linear(3, 4, bias=False, weight_mask=np.ones((4, 3)) > 0, rng=0)
    graph = Recurrent(cell, readout, 5).graph()
    assert graph.weights == 9 * 2 + 9 * 3 + 12
    assert [layer.nnz for layer in graph.layers[1:]] == [3] * 5 + [12]
    assert [layer.shares for layer in graph.layers[1:]] == [None, 1, 1, 1, 1, None]


def test_graphs_that_cannot_be_are_refused() -> None:
    x = Layer("x", "input", (), (3,))
    for layers, wrong in (
        ([], r"layers\[0\] is no input"),
        ([Layer("a", "add", (), (3,))], r"layers\[0\] is no input"),
        ([x, Layer("a", "add", (), (3,))], r"layers\[1\]\.inputs is \(\); expected earlier"),
        ([x, Layer("a", "add", (0, 1), (3,))], r"layers\[1\]\.inputs is \(0, 1\)"),
        ([x, Layer("a", "add", (-1,), (3,))], r"layers\[1\]\.inputs is \(-1,\)"),
        ([x, Layer("a", "b", (0,), (3,))], r"layers\[1\]\.kind is 'b'; expected one of"),
        ([x, Layer("x", "add", (0,), (3,))], "two layers have the same name"),
    ):
        with pytest.raises(InputError, match=wrong):
            Graph("wrong", layers)


def test_channels_of_a_concatenation_follow_each_other() -> None:
    graph = build("inception-v3")
    for k, layer in enumerate(graph.layers[1:], 1):
        channels = [graph.layers[j].shape[0] * (layer.kind == "concat") for j in layer.inputs]
        firsts = itertools.accumulate(channels[:-1], initial=0)
        edges = [(j, k, first) for j, first in zip(layer.inputs, firsts, strict=True)]
        assert [edge for edge in edges_of(graph) if edge[1] == k] == edges


@given(graphs())
def test_a_chain_is_cut_wherever_one_output_goes_on(graph: Graph) -> None:
    last = len(graph.layers) - 1
    edges = [(i, k) for k, layer in enumerate(graph.layers) for i in layer.inputs]
    cuts = [k for k in range(1, last + 1) if not any(i < k < j for i, j in edges)]
    parts = blocks(graph)
    assert [block[-1] for block in parts] == cuts
    assert [k for block in parts for k in block] == list(range(1, last + 1))


@given(graphs(), st.data())
def test_parts_follow_each_other_and_none_is_empty(graph: Graph, data: st.DataObject) -> None:
    units = len(blocks(graph))
    count = data.draw(st.integers(1, units))
    parts = parts_of(graph, count)
    assert len(parts) == count
    assert all(parts)
    assert [k for part in parts for k in part] == list(range(units))


def test_a_worker_holds_its_share_of_the_jacobians() -> None:
    """Section 3.6: Θ(max(n/p, 1)) Jacobians."""
    network, machine = build("rnn:512"), Machine(network=NETWORK)
    held = [Scan((p, 1), "vectors").predict(network, machine, p, 4).memory for p in (1, 8, 64, 512)]
    jacobian = 4 * 4 * 20 * 20  # bytes, samples, and 20 units
    for p, nbytes in zip((1, 8, 64, 512), held, strict=True):
        # States, gradients and parameters are the rest.
        assert 512 // p * jacobian < nbytes < 1.25 * (512 // p + 1) * jacobian


@pytest.mark.parametrize("name", BUILT_IN)
def test_more_workers_than_parts_and_samples_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=rf"workers is 1021: {name} can be cut into"):
        Scan().predict(build(name), Machine(), 1021, 8)


def test_where_nothing_fits_the_least_memory_is_predicted() -> None:
    machine = Machine(memory=1000)
    prediction = Scan().predict(build("lenet5"), machine, 4, 16)
    others = [
        Scan(grid, "vectors").predict(build("lenet5"), machine, 4, 16) for grid in ((2, 2), (4, 1))
    ]
    assert prediction.memory == min(other.memory for other in others) > machine.memory


# -- Side by side ---------------------------------------------------------------------------------


class Fixed(Strategy):
    """A strategy with a prediction of its own."""

    def __init__(self, name: str, nanoseconds: float, memory: int, stale: float = 0.0) -> None:
        self.name = name
        self._found = Prediction(name, "as told", {"forward": nanoseconds}, 7, memory, stale)

    def _predict(self, *arguments: Any) -> Any:
        return self._found


class Never(Fixed):
    def _predict(self, *arguments: Any) -> Any:
        raise InputError("it never can")


def test_the_best_is_first_and_what_does_not_fit_is_last() -> None:
    chosen = [
        Fixed("fast but large", 1e3, 2000),
        Fixed("slow", 3e3, 10),
        Fixed("fast", 2e3, 1000, stale=0.25),
        Never("never", 0, 0),
    ]
    comparison = compare(build("lenet5"), Machine(memory=1000), 4, 8, chosen)
    assert [one.strategy for one in comparison.predictions] == ["fast", "slow", "fast but large"]
    text = str(comparison).splitlines()
    assert text[0] == "lenet5, 4 workers, 8 samples a step; a worker has 1000 B (built in)"
    names = [line.split("  ")[1].strip() for line in text[2:6]]
    assert names == ["one worker", "fast", "slow", "fast but large"]
    assert "25% stale" in text[3]
    assert "exact" in text[4]
    assert "1.95 KiB !" in text[5]
    assert "  without never: it never can" in text


@pytest.mark.parametrize("name", SOME)
def test_parts_of_all_predictions_are_printed_and_add_up(name: str) -> None:
    comparison = compare(build(name), Machine(), 4, 16)
    assert len(comparison.predictions) + len(comparison.reasons) == len(strategies())
    assert "scan" in [one.strategy for one in comparison.predictions]
    for one in comparison.predictions:
        assert one.total == sum(one.nanoseconds.values()) > 0
        assert min(one.nanoseconds.values()) >= 0
        assert one.bytes >= 0
        assert one.memory > 0
        assert f"\n  {one.strategy}" in str(comparison)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "workers", "machine", "overlap"),
    [
        ("vgg16", 15_120, None, False),
        ("inception-v3", 15_120, "h100", True),
    ],
)
def test_many_workers_take_seconds(
    name: str, workers: int, machine: str | None, overlap: bool
) -> None:
    """No number up to 16,384 has more divisors than 15,120 has.

    Half a minute is what a user waits; a core that others share takes up to twice as long.
    """
    worker = Machine() if machine is None else Machine.load(machine)
    start = time.process_time()
    comparison = compare(build(name), replace(worker, overlap=overlap), workers, 256)
    assert time.process_time() - start < 60
    best = next(one for one in comparison.predictions if one.strategy == "per layer")
    assert all(
        best.total <= one.total * (1 + 1e-9)
        for one in comparison.predictions
        if one.strategy in ("batch", "model", "domain", "integrated")
    )


def test_a_pipeline_of_too_many_places_is_refused() -> None:
    layers = [Layer("x", "input", (), (3,))]
    layers += [Layer(f"l{k}", "linear", (k - 1,), (3,), 9, 9, 9) for k in range(1, 5000)]
    with pytest.raises(InputError, match="cut in 4998 places; expected 4096 at most"):
        Pipeline().predict(Graph("long", layers), Machine(), 4, 8)
    prediction = Pipeline((1000, 2000, 3000)).predict(Graph("long", layers), Machine(), 4, 8)
    assert prediction.how == "8 stages, registers after layers 1000, 2000, 3000"


@given(graphs())
def test_layers_that_are_alike_cost_the_same(graph: Graph) -> None:
    for k, first in enumerate(graph.alike):
        assert first <= k
        for price in (Machine().forward, Machine().backward, Machine().columns):
            assert price(graph, first, 3) == price(graph, k, 3)
        if first < k:
            assert graph.alike[k - 1] == first


# -- Like with like -------------------------------------------------------------------------------


def costs_of(prediction: Prediction) -> tuple[Any, ...]:
    return (
        {part: time for part, time in prediction.nanoseconds.items() if time},
        prediction.bytes,
        prediction.memory,
    )


@pytest.mark.parametrize("name", SOME)
def test_equal_plans_cost_and_need_the_same_in_every_row(name: str) -> None:
    graph, machine, workers, batch = build(name), Machine(state=1), 4, 16
    rows = [BatchParallel(), Integrated((1, workers)), PerLayer(image_parallelism)]
    batches = [costs_of(row.predict(graph, machine, workers, batch)) for row in rows]
    assert batches[0] == batches[1] == batches[2]
    rows = [ModelParallel(), Integrated((workers, 1), ("model",))]
    if name.startswith(("alexnet", "vgg")):
        rows.append(DomainParallel())
    for row in rows:
        prediction = row.predict(graph, machine, workers, batch)
        chosen = [(1, 1, 1, 1), *(layer.configuration for layer in prediction.layers)]
        again = PerLayer(chosen).predict(graph, machine, workers, batch)
        assert costs_of(prediction) == costs_of(again)
        assert (prediction.layers, sum(times := prediction.nanoseconds.values())) == (
            again.layers,
            sum(times),
        )
    # One worker has no choice.
    rows = [BatchParallel(), ModelParallel(), PerLayer(), Integrated()]
    alone = compare(graph, machine, 1, batch).single
    for row in [*rows, Pipeline(()), MicroBatches((), 1)]:
        prediction = row.predict(graph, machine, 1, batch)
        assert (prediction.bytes, prediction.memory) == (0, alone.memory)
        assert prediction.total == pytest.approx(alone.total)


def test_sums_of_gradients_are_hidden_behind_the_backward_pass() -> None:
    """Figure 8 of integrated parallelism, and DeePa, section 5: in every row alike."""
    graph = build("alexnet")
    apart, together = (
        compare(graph, Machine(overlap=on), 8, 64, rows)
        for on in (False, True)
        for rows in [[BatchParallel(), ModelParallel(), Scan((2, 4), "vectors")]]
    )
    for one in apart.predictions:
        (other,) = [each for each in together.predictions if each.strategy == one.strategy]
        times = one.nanoseconds
        hiding = times.get("backward", 0) + times.get("parameters", 0)
        hidden = min(times.get("weights", 0), hiding)
        assert other.total == pytest.approx(one.total - hidden)
        assert one.strategy == "model" or hidden > 0


# -- Machines -------------------------------------------------------------------------------------


@given(positive, positive, st.floats(0, 1e9), st.integers(1, 1 << 50), positive)
@settings(max_examples=20)
def test_machines_come_back_from_files(
    tmp_path_factory: pytest.TempPathFactory,
    rate: float,
    bandwidth: float,
    overhead: float,
    memory: int,
    latency: float,
) -> None:
    network = replace(NETWORK, latency=latency)
    machine = Machine("ours", rate, bandwidth, overhead, memory, network, 8)
    path = tmp_path_factory.mktemp("machine") / "folder" / "machine.json"
    assert Machine.load(machine.save(path)) == machine


def test_the_documented_machines_are_those_of_the_code() -> None:
    """The table of the page, its sources, and what it says of all machines."""
    page = (ROOT / "docs" / "how" / "strategies.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == list(PRESETS)
    rounds = re.search(r"takes ([\d,]+) ns within a node and ([\d,]+) ns between", page)
    beside = re.search(r"A layer takes ([\d,]+) ns", page)
    assert rounds is not None
    assert beside is not None
    latencies = [float(text.replace(",", "")) for text in rounds.groups()]
    for name, cells in rows:
        machine = PRESETS[name]
        within = machine.within
        assert within is not None
        numbers = [float(re.sub(r"[^\d.]", "", cell)) for cell in cells.split("|")]
        assert numbers == pytest.approx(
            [
                # Operations of a nanosecond are 10⁹ a second.
                2 * machine.multiply_adds / 1e3,
                machine.memory / 2**30,
                machine.bandwidth,
                machine.node,
                1 / within.inverse_bandwidth,
                1 / machine.network.inverse_bandwidth,
            ]
        )
        assert [within.latency, machine.network.latency] == latencies
        assert machine.overhead == float(beside.group(1).replace(",", ""))
        assert f"\n- `{name}`: " in page


def test_workers_of_one_node_do_not_use_the_network_between_nodes() -> None:
    """And a node more is priced by both."""
    graph, slow = build("alexnet"), Network("slow", 1e12, 1e6, 1e6, 0.0)
    machine = Machine.load("v100")
    cut, alone = replace(machine, network=slow), replace(machine, within=None, node=1)
    assert machine.within is not None
    fast = replace(alone, network=machine.within)
    for workers in (4, 8):
        inside = compare(graph, cut, workers, 64)
        assert inside.predictions == compare(graph, fast, workers, 64).predictions
    for row in (BatchParallel(), DomainParallel(), Scan((2, 8))):
        both = row.predict(graph, machine, 16, 64)
        ends = [row.predict(graph, one, 16, 64).total for one in (fast, alone)]
        assert ends[0] < both.total < ends[1]
        assert both.bytes == row.predict(graph, alone, 16, 64).bytes
    # Of eight ranks of a part, as many are in each node as the other part has there.
    times = [Scan((2, 8)).predict(graph, one, 16, 64).nanoseconds for one in (fast, machine)]
    assert times[0]["weights"] < times[1]["weights"]


@given(st.integers(1, 4), st.integers(1, 4), st.floats(1, 1e9))
def test_a_sum_over_nodes_is_that_of_each_and_that_of_their_pieces(
    nodes: int, node: int, nbytes: float
) -> None:
    """A reduce-scatter in each node, an all-reduce of a piece between nodes, an all-gather."""
    inner, outer = Network("", 3.0, 0.5, 0.0, 0.0), Network("", 50.0, 7.0, 0.0, 0.0)
    machine = Machine(network=outer, within=inner, node=4)
    steps = 2 * nbytes * (node - 1) / node * 0.5
    steps += 2 * nbytes / node * (nodes - 1) / nodes * 7.0
    assert machine.summing(nbytes, nodes * node, node) == pytest.approx(steps)
    assert machine.rounds(4 * nodes) == 2 * (3.0 * 2 + 50.0 * (nodes - 1).bit_length())


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "Expecting value"),
        ("[]", "it is []"),
        ('{"speed": 1}', "speed is not known"),
        ('{"multiply_adds": 0}', "multiply_adds is 0"),
        ('{"bandwidth": -1}', "bandwidth is -1"),
        ('{"bandwidth": Infinity}', "bandwidth is inf"),
        ('{"memory": "16 GiB"}', "memory is '16 GiB'"),
        ('{"memory": 0.5}', "memory is 0.5"),
        ('{"name": 1}', "name is 1"),
        ('{"network": 3}', "network is 3"),
        ('{"within": 3, "node": 4}', "within is 3"),
        ('{"node": 4}', "node is 4 without within"),
        ('{"network": {"latency": NaN}}', "network.latency is nan"),
        ('{"network": {"name": "n", "speed": 1}}', "network.speed is not known"),
    ],
)
def test_bad_machine_files_are_refused(tmp_path: Any, text: str, wrong: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        Machine.load(path)
    assert wrong in str(caught.value)
    assert str(path) in str(caught.value)


def test_this_machine_is_measured() -> None:
    machine = Machine.measure(NETWORK)
    assert machine.network == NETWORK
    measured = ("multiply_adds", "bandwidth", "overhead", "memory", "itemsize")
    assert all(asdict(machine)[name] > 0 for name in measured)


# -- The command line -----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))


def command(*arguments: object) -> int:
    return main(["strategies", *map(str, arguments)])


def test_the_command_prints_a_table(tmp_path: Any, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    machine = Machine("a small one", memory=1 << 20).save(tmp_path / "machine.json")
    picture = tmp_path / "p.png"
    options = ["--workers", 4, "--batch", 8, "--machine", machine, "--plot", picture]
    assert command("lenet5", *options) == 0
    out, _ = capsys.readouterr()
    assert out.startswith("lenet5, 4 workers, 8 samples a step; a worker has 1 MiB (a small one)")
    # In three tables, whose lines a terminal shows, and in the plans.
    assert out.count("\n  scan") == 4
    assert max(len(line) for line in out.splitlines()[1:-1]) <= 80
    assert str(picture) in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_writes_plans(tmp_path: Any, capsys: Any) -> None:
    """Some strategies, with overlap: what each layer is, where, what it sends and needs."""
    path, workers = tmp_path / "plans.json", 4
    chosen = "--strategy", "batch", "--strategy", "per layer", "--strategy", "scan"
    options = ["--workers", workers, "--batch", 64, "--json", path, *chosen]
    assert command("alexnet", *options, "--overlap") == 0
    out, _ = capsys.readouterr()
    assert str(path) in out
    assert "pipeline" not in out
    written, graph = json.loads(path.read_text()), build("alexnet")
    assert written["machine"]["overlap"] is True
    assert {one["strategy"] for one in written["predictions"]} == {"batch", "per layer", "scan"}
    for one in written["predictions"]:
        names = [layer["name"] for layer in one["layers"]]
        assert [name for name in names if name != "loss"] == [x.name for x in graph.layers[1:]]
        for layer in one["layers"]:
            devices = range(*(layer["devices"][end] for end in ("start", "stop", "step")))
            assert set(devices) <= set(range(workers))
            if one["strategy"] != "scan":
                assert len(devices) == np.prod(layer["configuration"])
    (batch,) = [one for one in written["predictions"] if one["strategy"] == "batch"]
    # All workers send and need the same.
    assert sum(layer["memory"] for layer in batch["layers"]) == batch["memory"]
    assert sum(layer["bytes"] for layer in batch["layers"]) == pytest.approx(
        batch["bytes"], rel=1e-3
    )


def test_whoever_reads_the_output_may_stop() -> None:
    """As ``head`` does: nothing is said, and the exit code is 0."""
    line = [sys.executable, "-m", "sparsescan", "strategies", "lenet5", "--workers", "2"]
    with subprocess.Popen(
        [*line, "--batch", "4"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()  # type: ignore[union-attr]
        assert process.stderr.read() == b""  # type: ignore[union-attr]
    assert process.returncode == 0


def test_the_command_reads_saved_chains(tmp_path: Any, capsys: Any) -> None:
    path = tmp_path / "chain.npz"
    sparsescan.save_chain(path, np.ones(5), np.ones((6, 5, 5)))
    assert command(path, "--workers", 2, "--batch", 4) == 0
    assert "\n  scan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["lenet6", "--workers", 2, "--batch", 4], "lenet6"),
        (["rnn:0", "--workers", 2, "--batch", 4], "rnn:0"),
        (["lenet5", "--workers", 0, "--batch", 4], "workers"),
        (["lenet5", "--workers", 2, "--batch", -4], "batch"),
        (["lenet5", "--workers", "two", "--batch", 4], "two"),
        (["lenet5", "--batch", 4], "--workers"),
        (["lenet5", "--workers", 2, "--batch", 4, "--machine", "nowhere.json"], "nowhere.json"),
        (["nowhere.npz", "--workers", 2, "--batch", 4], "nowhere.npz"),
        (["lenet5", "--workers", 2, "--batch", 4, "--strategy", "best"], "strategy is 'best'"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[object], wrong: str, capsys: Any) -> None:
    assert command(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sparsescan: ")
    assert err.count("\n") == 1
    assert wrong in err


HUGE = [
    (lambda: compare(build("lenet5"), Machine(), 10**9, 64), "workers is 1000000000; expected"),
    (lambda: compare(build("lenet5"), Machine(), 4, 10**12), "batch is 1000000000000; expected"),
    (lambda: build("rnn:1000000000"), "network is 'rnn:1000000000'; expected fewer than 100,000"),
    (lambda: build("resnet-6000002"), "network is 'resnet-6000002'; expected one of"),
    (lambda: build(f"resnet-{'9' * 5000}"), "network is 'resnet-999"),
    (lambda: predict([Pattern.diagonal(2)], 10**9), "ranks is 1000000000; expected at most"),
]


@pytest.mark.parametrize(("call", "words"), HUGE, ids=[words for _, words in HUGE])
def test_counts_that_would_take_minutes_are_refused(call: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()
