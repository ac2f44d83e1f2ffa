"""Compare what the papers on strategies publish with what the model says here.

Integrated parallelism (Gholami et al., 2018): time over the batch size (Figure 4), which is also
measured, and speed-ups by grids, with overlap and without (Figures 6 to 8). DeePa (Jia et al.,
2018): throughput on 16 GPUs, with overlap and without (Figure 7), over the minibatch (Figure 13)
and over GPUs and nodes (Figure 14). Pipelines with stale weights (Zhang and Abdelrahman, 2021):
speed-ups on two accelerators (Table 5) and memory (Tables 7 and 9). The texts of the papers have
few of the figures' numbers; those that they have are in ``docs/papers``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from sparsescan.parallel import Network
from sparsescan.strategies import Machine, build
from sparsescan.strategies.graph import Graph
from sparsescan.strategies.integrated import BatchParallel, Integrated
from sparsescan.strategies.networks import sequential
from sparsescan.strategies.per_layer.predict import PerLayer
from sparsescan.strategies.pipeline import Pipeline, Placement
from sparsescan.strategies.strategy import Strategy

from .experiment import Experiment, Piece, Results, Table
from .page import significant
from .timing import rounded, seconds

# Integrated parallelism: samples of a step; the processors of Cori, and the network of Table 1. The
# rate is the one that the published totals of Figures 6 and 7 have in common: a step of four images
# takes half as long as what pure batch parallelism communicates.
_SIZES = tuple(1 << k for k in range(12))
_CORI = Machine(
    "KNL of Cori",
    multiply_adds=212.0,
    bandwidth=400.0,
    overhead=0.0,
    network=Network("Cori", 2000.0, 1 / 6, 1 / 6, 0.0),
)
_MANY, _IMAGES = 512, 2048
_ONES = {
    "Figure 6: 16 × 32, model in all layers": Integrated((16, 32), ("model",)),
    "Figure 7: 16 × 32, model in linear layers": Integrated((16, 32), ("batch", "model")),
    "the best grid": Integrated(),
    "per layer": PerLayer(),
}
# DeePa: a GPU of a K80, of which a board has two that share a slot, at half its peak.
_K80 = Machine(
    "GPU of a K80",
    multiply_adds=1092.0,
    bandwidth=240.0,
    memory=12 << 30,
    network=Network("PCIe", 5000.0, 1 / 8, 1 / 8, 0.0),
)
_GPUS, _EACH = 16, 32
_NETWORKS = "alexnet-owt", "vgg16", "inception-v3"
_MINIBATCHES = (128, 256, 512, 1024, 2048)
_SCALES = (1, 2, 4, 8, 16)
# Pipelines: residual networks for CIFAR's images on two accelerators.
_DEPTHS, _BATCH = (20, 56, 110, 224, 362), 128
_MEASURED = {"lenet5": (1, 2, 4, 8, 16, 32, 64, 128), "resnet-20": (1, 2, 4, 8, 16, 32)}
_QUICK_MEASURED = {"lenet5": (1, 8)}


def _pieces(quick: bool) -> list[Piece]:
    networks = _NETWORKS[:1] if quick else _NETWORKS
    depths = _DEPTHS[:2] if quick else _DEPTHS
    measured = _QUICK_MEASURED if quick else _MEASURED
    return [
        Piece("time by batch size, predicted", _by_batch),
        *(
            Piece(f"time by batch size, {name}, measured", partial(_measured, name, sizes))
            for name, sizes in measured.items()
        ),
        Piece("grids of AlexNet", _grids),
        *(Piece(f"16 GPUs, {name}", partial(_gpus, name)) for name in networks),
        *(Piece(f"P100 in nodes of four, {name}", partial(_nodes, name)) for name in networks),
        Piece("two accelerators", partial(_pairs, depths)),
        Piece("memory of pipelines", partial(_memory, depths)),
    ]


# -- Integrated parallelism -----------------------------------------------------------------------


def _step(strategy: Strategy, graph: Graph, machine: Machine, workers: int, batch: int) -> Results:
    predicted = strategy.predict(graph, machine, workers, batch)
    sending = sum(
        predicted.nanoseconds.get(part, 0.0) for part in ("weights", "activations", "halo")
    )
    return {"how": predicted.how, "nanoseconds": predicted.total, "communicating": sending}


def _by_batch() -> Results:
    """Nanoseconds of a sample on one worker."""
    machines = {machine.name: machine for machine in (Machine(), _CORI, Machine.load("v100"))}
    nanoseconds = {
        f"{name}, {machine.name}": [
            BatchParallel().predict(build(name), machine, 1, size).total / size for size in _SIZES
        ]
        for name in ("alexnet", "lenet5", "resnet-20")
        for machine in machines.values()
    }
    return {"sizes": list(_SIZES), "nanoseconds of a sample": nanoseconds}


def _measured(name: str, sizes: Sequence[int]) -> Results:
    """Seconds of training steps by compiled kernels here."""
    network = sequential(name, 0)
    step = network.training_step()
    rng, samples = np.random.default_rng(0), {}
    for size in sizes:
        x = rng.standard_normal((size, *network.input_shape), np.float32)

        def call(x: Any = x) -> Any:
            return step.backward(step.forward(x), needs_input_grad=False)

        samples[str(size)] = rounded(seconds(call, 15))
    return {"network": name, "seconds": samples}


def _grids() -> Results:
    graph, steps = build("alexnet"), {}
    for overlap in (False, True):
        machine = replace(_CORI, overlap=overlap)
        batch = _step(BatchParallel(), graph, machine, _MANY, _IMAGES)
        every = {"batch": batch}
        every |= {name: _step(one, graph, machine, _MANY, _IMAGES) for name, one in _ONES.items()}
        steps["overlap" if overlap else "no overlap"] = every
    return steps


# -- DeePa ----------------------------------------------------------------------------------------


def _images(graph: Graph, workers: int, batch: int) -> list[tuple[int, int, int, int]]:
    return [(1 if layer.kind == "input" else workers, 1, 1, 1) for layer in graph.layers]


def _trick(graph: Graph, workers: int, batch: int) -> list[tuple[int, int, int, int]]:
    """Images for all layers but the linear ones, and what is elementwise behind these."""
    chosen = _images(graph, workers, batch)
    for k, layer in enumerate(graph.layers):
        kinds = {layer.kind, *(graph.layers[i].kind for i in layer.inputs)}
        if layer.kind in ("linear", "elementwise") and "linear" in kinds:
            parts = max(d for d in range(1, workers + 1) if workers % d == layer.size % d == 0)
            chosen[k] = (1, parts, 1, 1)
    return chosen


_WAYS = {"images": PerLayer(_images), "one weird trick": PerLayer(_trick), "per layer": PerLayer()}


def _throughput(graph: Graph, machine: Machine, workers: int, batch: int) -> Results:
    """Images a second, with overlap and without."""
    return {
        key: {
            name: batch / _step(one, graph, way, workers, batch)["nanoseconds"] * 1e9
            for name, one in _WAYS.items()
        }
        for key, way in (
            ("no overlap", replace(machine, overlap=False)),
            ("overlap", replace(machine, overlap=True)),
        )
    }


def _gpus(name: str) -> Results:
    graph = build(name)
    rates = {str(size): _throughput(graph, _K80, _GPUS, size) for size in _MINIBATCHES}
    return {"network": name, "images a second": rates}


def _nodes(name: str) -> Results:
    graph, machine = build(name), Machine.load("p100")
    rates = {str(count): _throughput(graph, machine, count, _EACH * count) for count in _SCALES}
    return {"network": name, "images a second": rates}


# -- Pipelines with stale weights -----------------------------------------------------------------


def _pairs(depths: Sequence[int]) -> Results:
    """Speed-ups on two workers; hybrid training is pipelined for half of the epochs."""
    machines = {"p100": Machine.load("p100"), "built in": Machine()}
    gains: dict[str, Results] = {name: {} for name in machines}
    for name, machine in machines.items():
        for depth in depths:
            graph = build(f"resnet-{depth}")
            alone = BatchParallel().predict(graph, machine, 1, _BATCH).total
            both = Pipeline().predict(graph, machine, 2, _BATCH)
            speedup = alone / both.total
            hybrid = 2 / (1 + 1 / speedup)
            gains[name][str(depth)] = {"speedup": speedup, "hybrid": hybrid, "how": both.how}
    return gains


def _memory(depths: Sequence[int]) -> Results:
    """How much more a pipeline of four stages keeps than one accelerator, in all; and PipeDream.

    Activations and their gradients count, and weights, as in the paper; registers stand behind the
    first group of blocks, or the second layer of LeNet-5. PipeDream keeps four copies of weights.
    """
    memory = {}
    for name in ("lenet5", *(f"resnet-{depth}" for depth in depths)):
        graph = build(name)
        # Others have no output of their own in what PyTorch sums up.
        layers = [one for one in graph.layers[1:] if one.kind not in ("elementwise", "flatten")]
        names = [one.name for one in layers]
        register = 4 if name == "lenet5" else names.index("32.0.conv1")
        placement = Placement(len(layers), (register,))
        outputs = _BATCH * sum(one.size for one in layers)
        kept = _BATCH * sum(
            degree * sum(one.size for one in layers[part])
            for degree, part in zip(placement.degrees, placement.parts, strict=True)
        )
        one = 2 * outputs + graph.weights
        memory[name] = {
            "stale": kept / one,
            "stashing": (kept + placement.stages * graph.weights) / one,
            "stale weights": placement.stale([each.weights for each in layers]),
        }
    return memory


# -- What is shown --------------------------------------------------------------------------------


def _about(quick: bool) -> Results:
    return {
        "predicted": "by the model of sparsescan.strategies, from figures of the machines",
        "machines": {one.name: one.to_dict() for one in (_CORI, _K80)},
        "measured": "training steps of compiled kernels, two threads, 15 calls after one",
        "dtype": "float32",
    }


def _tables(results: Results) -> list[Table]:
    """Return times over the batch size, and images a second, with overlap and without."""
    pieces = results["pieces"]
    rows, predicted = [], pieces.get("time by batch size, predicted", {})
    for name, each in predicted.get("nanoseconds of a sample", {}).items():
        of = dict(zip(map(str, predicted["sizes"]), np.divide(each, min(each)), strict=True))
        rows.append((f"{name}, predicted", of))
    for piece in pieces.values():
        if "seconds" in piece:
            each = {size: median(taken) / int(size) for size, taken in piece["seconds"].items()}
            least = min(each.values())
            of = {size: taken / least for size, taken in each.items()}
            rows.append((f"{piece['network']}, measured", of))
    sizes = list(map(str, _SIZES))
    lines = [
        [name, *(f"{of[size]:.2f}" if size in of else "" for size in sizes)] for name, of in rows
    ]
    tables = [Table(["time of a sample over the least, batch", *sizes], lines, sizes)]
    for title, counted in (("16 GPUs", "images of a step"), ("P100", "GPUs, 32 images each")):
        lines = [
            [f"{key}: images a second", count, f"{way}, {overlap}", significant(rate)]
            for key, piece in pieces.items()
            if key.startswith(title)
            for count, rates in piece["images a second"].items()
            for overlap, ways in rates.items()
            for way, rate in ways.items()
        ]
        tables.append(Table(["model", counted, "strategy", "rate"], lines, [counted, "rate"]))
    return tables


EXPERIMENT = Experiment(
    "published", "Strategies beside what their papers publish", _pieces, _about, tables=_tables
)
