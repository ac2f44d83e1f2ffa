"""Machine: one worker and the network between workers, as the cost models see them."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ..errors import InputError
from ..jacobians import Conv2d, Tanh
from ..parallel.network import BUILT_IN, Network, load_network
from ..planning.costs.cpu import machine_file
from .graph import Graph, Layer
from .presets import PRESETS
from .times import Times

__all__ = ["Machine", "load_machine", "measure_machine", "save_machine", "worker_file"]

# Measurements: a convolution, numbers that are copied, and repetitions of each.
_CONV, _IMAGE, _COPIED, _TIMES = (16, 16, 3), (16, 16, 16), 1 << 22, 51
# Where the system does not say how much memory there is.
_MEMORY = 16 << 30
_Path = str | os.PathLike[str]
# Rounds of messages of a collective of a few bytes, over the logarithm of the workers.
_ROUNDS = {"maximum": 2, "broadcast": 1, "gather": 1}


@dataclass(frozen=True)
class Machine:
    """A worker, and the network that connects it to others of its kind.

    Attributes
    ----------
    name : str
        Name of the machine.
    multiply_adds : float
        Multiply-adds of dense products in float32, per nanosecond.
    bandwidth : float
        Bytes of memory per nanosecond.
    overhead : float
        Nanoseconds of a layer beside its arithmetic.
    memory : int
        Bytes of memory of a worker.
    network : Network
        α and β between workers, or between nodes if there are some.
    itemsize : int
        Bytes of a number.
    state : int
        Numbers that the optimiser keeps for each parameter: 0 of SGD, 1 with momentum, 2 of Adam.
    overlap : bool
        Whether gradients of parameters are summed while a backward pass goes on, as in DeePa
        (section 5) and in Figure 8 of integrated parallelism.
    within : Network, optional
        α and β between workers of one node.
    node : int
        Workers of a node, which are numbered one after the other; 1 without `within`.
    times : Times, optional
        Measured times of the layers of a network, which replace the model's; they are not saved.
        Without them, updates, the loss and agreements of ranks in every step take no time.
    """

    name: str = "built in"
    multiply_adds: float = 1000.0
    bandwidth: float = 200.0
    overhead: float = 10_000.0
    memory: int = 16 << 30
    network: Network = field(default=BUILT_IN)
    itemsize: int = 4
    state: int = 0
    overlap: bool = False
    within: Network | None = None
    node: int = 1
    times: Times | None = field(default=None, compare=False, repr=False)

    def forward(self, graph: Graph, k: int, samples: float = 1.0, share: float = 1.0) -> float:
        """Return nanoseconds of the forward pass of layer `k`; a whole cell is one step of many.

        Parameters
        ----------
        graph : Graph
            The network.
        k : int
            Number of the layer.
        samples : float
            Number of samples.
        share : float
            Share of its output that is computed.
        """
        layer = graph.layers[k]
        if (known := self._measured("forward", graph, k, samples, share)) is not None:
            one_of_many = layer.kind == "cell" and share == 1
            return self._of_many(("forward",), graph, k, samples) if one_of_many else known
        if layer.kind in ("input", "flatten"):
            return 0.0
        return self.overhead + self._work(layer, graph, k, samples, share)

    def backward(self, graph: Graph, k: int, samples: float = 1.0, share: float = 1.0) -> float:
        """Return nanoseconds of its backward pass, for its input and for its parameters."""
        if graph.layers[k].kind == "cell" and share == 1:
            return self._of_many(("values", "product", "params"), graph, k, samples)
        if (known := self._measured("params", graph, k, samples, share)) is not None:
            both = self.values(graph, k, samples, share) + self.product(graph, k, samples, share)
            # A gradient that leads to no parameters is not needed.
            return known + both * any(graph.trained[i] for i in graph.layers[k].inputs)
        layer = graph.layers[k]
        if layer.kind in ("input", "flatten"):
            return 0.0
        products = 1 + (layer.weights > 0 or layer.shares is not None)
        return products * (self.overhead + self._work(layer, graph, k, samples, share))

    def values(self, graph: Graph, k: int, samples: float = 1.0, share: float = 1.0) -> float:
        """Return nanoseconds in which the values of the Jacobian of layer `k` are written."""
        if (known := self._measured("values", graph, k, samples, share)) is not None:
            return known
        layer = graph.layers[k]
        return share * self.itemsize * layer.values(samples) / self.bandwidth

    def product(self, graph: Graph, k: int, samples: float = 1.0, share: float = 1.0) -> float:
        """Return nanoseconds of the product of its Jacobian with a gradient of each sample."""
        known = self._measured("product", graph, k, samples, share)
        return self.columns(graph, k, samples * share) if known is None else known

    def columns(self, graph: Graph, k: int, samples: float = 1.0, columns: float = 1.0) -> float:
        """Return nanoseconds of its product with so many columns for each sample."""
        layer, count = graph.layers[k], samples * columns
        read = sum(graph.layers[i].size for i in layer.inputs)
        entries = layer.values(samples) + count * (read + layer.size)
        nbytes = self.itemsize * entries + layer.index_bytes
        return max(count * layer.nnz / self.multiply_adds, nbytes / self.bandwidth)

    def params(self, graph: Graph, k: int, samples: float = 1.0, share: float = 1.0) -> float:
        """Return nanoseconds of the gradients of its parameters."""
        known = self._measured("params", graph, k, samples, share)
        layer = graph.layers[k]
        if known is not None or not (layer.weights or layer.shares is not None):
            return known or 0.0
        return self._work(layer, graph, k, samples, share)

    def update(self, graph: Graph, k: int, share: float = 1.0) -> float:
        """Return nanoseconds of the update of its parameters."""
        if graph.layers[k].shares is not None:
            return 0.0
        return self._measured("update", graph, k, 1.0, share) or 0.0

    def call(self, part: str, graph: Graph, k: int, samples: float = 1.0) -> float:
        """Return nanoseconds of one call for all steps of a cell, beside :meth:`step` of each."""
        if self.times is None or self.times.row(graph, k) is None:
            # A forward pass has the overhead in every step.
            return 0.0 if part == "forward" else self.overhead
        cell = graph.layers[k].kind == "cell"
        return self.times.at(self.times.calls[part][0], samples) if cell else 0.0

    def step(self, part: str, graph: Graph, k: int, samples: float = 1.0) -> float:
        """Return nanoseconds of a part of layer `k`; a cell is one step of a call of many."""
        times, cell = self.times, graph.layers[k].kind == "cell"
        if times is not None and cell and times.row(graph, k) is not None:
            return times.at(times.calls[part][1], samples)
        taken: float = getattr(self, part)(graph, k, samples)
        return taken

    def _of_many(self, parts: Sequence[str], graph: Graph, k: int, samples: float) -> float:
        """Return nanoseconds of a step of a cell; the first has those of the call."""
        calls = 0.0
        if graph.layers[k].shares is None:
            calls = sum(self.call(part, graph, k, samples) for part in parts)
        return calls + sum(self.step(part, graph, k, samples) for part in parts)

    def loss(self, samples: float = 1.0) -> float:
        """Return nanoseconds of the loss and its gradient."""
        return 0.0 if self.times is None else self.times.at(self.times.loss, samples)

    @property
    def sweep(self) -> float:
        """Nanoseconds of a chain of products beside them."""
        return 0.0 if self.times is None else self.times.sweep

    def chain(self, graph: Graph, k: int, share: float = 1.0) -> float:
        """Return :attr:`sweep` for layer `k` alone, or 0 if its input needs no gradient.

        All steps of a whole cell are one chain.
        """
        layer = graph.layers[k]
        if layer.kind == "cell" and share == 1:
            return self.sweep * (layer.shares is None)
        return self.sweep * any(graph.trained[i] for i in layer.inputs)

    def shared(self, work: Sequence[float], workers: int) -> float:
        """Return nanoseconds of work, given for each worker that has some as if all worked.

        The others leave their cores to these.
        """
        contention = 1.0 if self.times is None else self.times.contention
        return max(max(work) / contention, sum(work) / workers)

    def among(self, workers: int) -> Machine:
        """Return a machine whose network connects so many workers: that within a node, if it can.

        Between nodes the machine itself, of which :meth:`exchange` and :meth:`all_reduce` use both
        networks, and whatever else is sent the one between nodes.
        """
        if self.within is None or workers > self.node:
            return self
        return replace(self, network=self.within, within=None, node=1)

    def exchange(self, blocks: Any, nbytes: Any, near: Any = 0) -> Any:
        """Return nanoseconds in which `blocks` workers give each other parts of what they have.

        ``α⌈log₂ blocks⌉ + β·nbytes``, with the bytes of the busiest. So all-gathers take what
        equation 6 of integrated parallelism says, and a halo one message for each neighbour. `near`
        are bytes within a node, and α is that of nodes if there are others.
        """
        rounds = np.ceil(np.log2(np.maximum(blocks, 1)))
        inner = self.within or self.network
        alpha = np.where(np.asarray(nbytes) > 0, self.network.latency, inner.latency)
        beta = self.network.inverse_bandwidth
        return alpha * rounds + beta * nbytes + inner.inverse_bandwidth * near

    def summing(self, nbytes: Any, copies: Any, near: Any) -> Any:
        """Return nanoseconds of the bytes of a sum over copies, so many of them in each node.

        Nodes sum first, and then those of all nodes that have equal pieces: equation 4 of
        integrated parallelism on both levels, without its latency, which is :meth:`rounds`.
        """
        near = np.clip(near, 1, copies)
        inner = self.within or self.network
        here = inner.inverse_bandwidth * (near - 1) / near
        nodes = np.maximum(copies / near, 1)
        between = self.network.inverse_bandwidth * (nodes - 1) / nodes / near
        return 2 * nbytes * (here + between)

    def rounds(self, copies: int) -> float:
        """Return the latency of a sum over so many copies, of which there are many in a node."""
        near = min(copies, self.node)
        here = (self.within or self.network).latency * (near - 1).bit_length()
        return 2.0 * (here + self.network.latency * (-(-copies // near) - 1).bit_length())

    def all_reduce(self, sums: Iterable[tuple[int, int, float]]) -> float:
        """Return nanoseconds of sums in one message: copies, those in a node, and numbers."""
        some = [one for one in sums if one[2]]
        most = max((copies for copies, *_ in some), default=1)
        each = (self.summing(n * self.itemsize, copies, near) for copies, near, n in some)
        return float(self.rounds(most) + math.fsum(each))

    def needed(self, weights: int, activations: int, others: int = 0) -> int:
        """Count bytes of parameters, activations, the gradients of both, and other numbers."""
        return self.itemsize * ((2 + self.state) * weights + 2 * activations + others)

    def hidden(self, parts: Mapping[str, float]) -> dict[str, float]:
        """Return nanoseconds of a step by part, without the sums that a backward pass hides."""
        times = dict(parts)
        if self.overlap and "weights" in times:
            hiding = times.get("backward", 0.0) + times.get("parameters", 0.0)
            times["weights"] = max(times["weights"] - hiding, 0.0)
        return times

    def collective(self, name: str, workers: int) -> float:
        """Return nanoseconds of a "maximum", "broadcast" or "gather" of a few bytes."""
        if self.times is None:
            return _ROUNDS[name] * (workers - 1).bit_length() * self.network.latency
        return self.times.collectives.get(name, 0.0)

    def _measured(
        self, part: str, graph: Graph, k: int, samples: float, share: float
    ) -> float | None:
        row = None if self.times is None else self.times.row(graph, k)
        if self.times is None or row is None:
            return None
        return self.times.of(part, row, samples, share)

    def _work(self, layer: Layer, graph: Graph, k: int, samples: float, share: float) -> float:
        """Return nanoseconds of arithmetic or of memory, whichever takes longer."""
        read = sum(graph.layers[i].size for i in layer.inputs)
        entries = samples * (read + share * layer.size) + share * layer.weights
        arithmetic = samples * share * layer.multiply_adds / self.multiply_adds
        nanoseconds: float = np.maximum(arithmetic, entries * self.itemsize / self.bandwidth)
        return nanoseconds


def worker_file() -> Path:
    """Return the file of the worker that was measured, beside the constants of the engine."""
    return machine_file().with_name("worker.json")


def load_machine(path: _Path | None = None) -> Machine:
    """Load a machine from a JSON file with its attributes; those left out are built in.

    Parameters
    ----------
    path : str or path-like, optional
        The file, or the name of one of ``sparsescan.strategies.presets.PRESETS``; by default
        the file of the worker that was measured, if there is one.

    Returns
    -------
    Machine

    Raises
    ------
    InputError
        If the file does not describe a machine.
    OSError
        If it cannot be read.
    """
    if path is None:
        path = worker_file()
        if not path.exists():
            return Machine(network=load_network())
    if path in PRESETS:
        return _machine_of({"name": path} | PRESETS[str(path)].machine)
    try:
        return _machine_of(json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        known = ", ".join(sorted({each.name for each in fields(Machine)} - {"times"}))
        raise InputError(
            f"{path}: {error}; expected a JSON object with some of {known}; network and within "
            "are such objects with latency and inverse_bandwidth"
        ) from None


def save_machine(machine: Machine, path: _Path | None = None) -> Path:
    """Write a machine to a JSON file; return its path."""
    file = worker_file() if path is None else Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    known = asdict(replace(machine, times=None))
    del known["times"]
    file.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return file


def measure_machine(network: Network | None = None) -> Machine:
    """Measure a worker on this computer, by this process alone; takes about a second.

    Multiply-adds are those of a convolution, the overhead is that of an activation, and the
    bandwidth that of copying an array that no cache holds.

    Parameters
    ----------
    network : Network, optional
        The network between workers; by default that of :func:`~sparsescan.parallel.load_network`.

    Returns
    -------
    Machine
    """
    conv = Conv2d(*_CONV, padding=1, input_shape=_IMAGE, rng=0)
    images = np.ones((32, *_IMAGE), np.float32)
    multiplying = _usual(lambda: conv.forward(images))
    given, copied = np.ones((2, _COPIED), np.float32)
    copying = _usual(lambda: np.copyto(copied, given))
    layer, x = Tanh(input_shape=(1,)), np.zeros((1, 1), np.float32)
    return Machine(
        name=f"measured, {platform.processor() or platform.machine()}",
        multiply_adds=len(images) * math.prod(_IMAGE[1:]) * conv.weight.size / multiplying,
        bandwidth=2 * given.nbytes / copying,
        overhead=_usual(lambda: layer.forward(x)),
        memory=_memory(),
        network=load_network() if network is None else network,
    )


def _usual(call: Callable[[], Any]) -> float:
    """Return the median nanoseconds of a call: other workers may be on the same core."""
    samples = []
    for _ in range(_TIMES):
        start = time.perf_counter_ns()
        call()
        samples.append(time.perf_counter_ns() - start)
    return float(max(median(samples), 1))


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return _MEMORY


def _machine_of(content: Any) -> Machine:
    """Return the machine of a JSON object, or raise ValueError or TypeError."""
    if not isinstance(content, dict):
        raise TypeError(f"it is {content!r:.40}")
    given: dict[str, Any] = {"name": "given"} | content
    network = _network_of("network", given.pop("network", {}))
    within = given.pop("within", None)
    known = {each.name: type(each.default) for each in fields(Machine) if each.default is not None}
    whole = {name: _number(name, value, known) for name, value in given.items()}
    if within is None and whole.get("node", 1) > 1:
        raise ValueError(f"node is {whole['node']} without within, the network of its workers")
    inner = None if within is None else _network_of("within", within)
    return Machine(**whole, network=network, within=inner)


def _network_of(path: str, content: Any) -> Network:
    """Return the network of a JSON object; what it leaves out is built in."""
    if not isinstance(content, dict):
        raise TypeError(f"{path} is {content!r:.40}")
    values = asdict(BUILT_IN)
    kinds = {name: type(value) for name, value in values.items()}
    given = {"name": "given"} | content if content else {}
    return Network(**values | {n: _number(f"{path}.{n}", v, kinds) for n, v in given.items()})


def _number(path: str, value: Any, kinds: Mapping[str, type[Any]]) -> Any:
    """Check a value; numbers are positive, or at least 0 where that means that there is none."""
    *network, name = path.split(".")
    kind = kinds.get(name)
    if kind is None:
        raise ValueError(f"{path} is not known")
    if kind in (str, bool):
        if not isinstance(value, kind):
            raise TypeError(f"{path} is {value!r}")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{path} is {value!r}")
    zero = network or name in ("overhead", "state")
    least = 0 if zero else 1 if kind is int else math.ulp(0.0)
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"{path} is {value}")
    return kind(value)
