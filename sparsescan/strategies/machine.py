"""Machine: one worker and the network between workers, for the cost models."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..jacobians import Conv2d, Tanh
from ..parallel.network import BUILT_IN, Network
from ..plan.costs.constants import file_to_write, machine_file
from .graph import Graph

# Measurements: a convolution, and numbers that are copied.
_CONV, _IMAGE, _COPIED = (16, 16, 3), (16, 16, 16), 1 << 22
# Where the system does not say how much memory there is.
_MEMORY = 16 << 30
_Path = str | os.PathLike[str]
# Rounds of messages of a collective of a few bytes, over the logarithm of the workers.
_ROUNDS = {"maximum": 2, "broadcast": 1, "gather": 1}


@dataclass(frozen=True)
class Machine:
    """A worker, and the network that connects it to other workers like it.

    Attributes
    ----------
    name : str
        Name of the machine.
    multiply_adds : float
        Multiply-adds of dense products in float32, per nanosecond.
    bandwidth : float
        Bytes of memory per nanosecond.
    overhead : float
        Nanoseconds of a layer in addition to its arithmetic.
    memory : int
        Bytes of memory of a worker.
    network : Network
        α and β between workers, or between nodes if there are nodes.
    itemsize : int
        Bytes of a number.
    state : int
        Numbers that the optimiser keeps for each parameter: 0 for SGD, 1 with momentum, 2 for Adam.
    overlap : bool
        Whether gradients of parameters are summed during the backward pass, as in DeePa (section 5)
        and in Figure 8 of integrated parallelism.
    within : Network, optional
        α and β between workers of one node.
    node : int
        Workers per node, numbered consecutively; 1 without `within`.
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

    @classmethod
    def load(cls, path: _Path | None = None) -> Machine:
        """Load a machine from a JSON file of its attributes; defaults replace missing ones.

        Parameters
        ----------
        path : str or path-like, optional
            The file, or the name of one of ``sparsescan.strategies.machine.PRESETS``; by default
            the file of the measured worker, if there is one.

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
            if path is None or not os.path.exists(path):
                return cls(network=Network.load())
        if path in PRESETS:
            return PRESETS[str(path)]
        try:
            machine: Machine = _record(cls(), json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            known = ", ".join(sorted({each.name for each in fields(cls)}))
            raise InputError(
                f"{path}: {error}; expected a JSON object with some of {known}; network and within "
                "are such objects with latency and inverse_bandwidth"
            ) from None
        return machine

    @classmethod
    def measure(cls, network: Network | None = None) -> Machine:
        """Measure this computer as a worker, in this process; this takes about a second.

        A convolution gives the multiply-adds, an activation the overhead, and copying an array
        larger than any cache the bandwidth.

        Parameters
        ----------
        network : Network, optional
            The network between workers; by default the result of :meth:`.Network.load`.

        Returns
        -------
        Machine
        """
        from ..plan.calibrate import nanoseconds, usual  # which loads scipy.optimize

        def taken(call: Callable[..., Any], *arguments: Any) -> float:
            """Return the median nanoseconds: other workers may be on the same core."""
            return max(usual(partial(nanoseconds, partial(call, *arguments))), 1.0)

        conv = Conv2d(*_CONV, padding=1, input_shape=_IMAGE, rng=0)
        images = np.ones((32, *_IMAGE), np.float32)
        multiplying = taken(conv.forward, images)
        given, copied = np.ones((2, _COPIED), np.float32)
        copying = taken(np.copyto, copied, given)
        layer, x = Tanh(input_shape=(1,)), np.zeros((1, 1), np.float32)
        return cls(
            name=f"measured, {platform.processor() or platform.machine()}",
            multiply_adds=len(images) * math.prod(_IMAGE[1:]) * conv.weight.size / multiplying,
            bandwidth=2 * given.nbytes / copying,
            overhead=taken(layer.forward, x),
            memory=_memory(),
            network=Network.load() if network is None else network,
        )

    def save(self, path: _Path | None = None) -> Path:
        """Write the machine to a JSON file, by default where :meth:`load` finds it; return it."""
        file = file_to_write(worker_file() if path is None else Path(path))
        file.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        return file

    def forward(self, graph: Graph, k: int, samples: float = 1.0, share: float = 1.0) -> float:
        """Return nanoseconds of the forward pass of layer `k`.

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
        return self.part("forward", graph, k, samples, share)

    def backward(self, graph: Graph, k: int, samples: float = 1.0, share: float = 1.0) -> float:
        """Return nanoseconds of its backward pass, for its input and for its parameters."""
        layer = graph.layers[k]
        if layer.kind != "cell" or share != 1:
            return (1 + layer.learns) * self.part("forward", graph, k, samples, share)
        # All steps of a whole cell are one call of each part, whose overhead the first has.
        parts = "values", "product", "params"
        calls = len(parts) * self.overhead * (layer.shares is None)
        return calls + sum(self.part(part, graph, k, samples) for part in parts)

    def part(
        self, part: str, graph: Graph, k: int, samples: float = 1.0, share: float = 1.0
    ) -> float:
        """Return nanoseconds of a part of layer `k`: forward, values, product or params.

        These are its output, the values of its Jacobian, the product of that with a gradient, and
        the gradients of its parameters.
        """
        layer = graph.layers[k]
        if part == "values":
            return share * self.itemsize * layer.values(samples) / self.bandwidth
        if part == "product":
            return self.columns(graph, k, samples * share)
        if part == "params" and layer.learns:
            return self._work(graph, k, samples, share)
        if part == "forward" and layer.kind not in ("input", "flatten"):
            return self.overhead + self._work(graph, k, samples, share)
        return 0.0

    def columns(self, graph: Graph, k: int, samples: float = 1.0, columns: float = 1.0) -> float:
        """Return nanoseconds of its Jacobian's product with so many columns for each sample."""
        layer, count = graph.layers[k], samples * columns
        entries = layer.values(samples) + count * (graph.read(k) + layer.size)
        nbytes = self.itemsize * entries + layer.index_bytes
        return max(count * layer.nnz / self.multiply_adds, nbytes / self.bandwidth)

    def _work(self, graph: Graph, k: int, samples: float, share: float) -> float:
        """Return nanoseconds of arithmetic or of memory, whichever takes longer."""
        layer = graph.layers[k]
        entries = samples * (graph.read(k) + share * layer.size) + share * layer.weights
        arithmetic = samples * share * layer.multiply_adds / self.multiply_adds
        nanoseconds: float = np.maximum(arithmetic, entries * self.itemsize / self.bandwidth)
        return nanoseconds

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
        return _ROUNDS[name] * (workers - 1).bit_length() * self.network.latency

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as JSON can hold them."""
        return asdict(self)


def worker_file() -> Path | None:
    """Return the file of the worker that was measured, beside the constants of the engine."""
    beside = machine_file()
    return beside and beside.with_name("worker.json")


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return _MEMORY


def _record(default: Any, content: Any, path: str = "") -> Any:
    """Return the machine or network of a JSON object, or raise ValueError or TypeError.

    Values that it leaves out are those of `default`.
    """
    if not isinstance(content, dict):
        raise TypeError(f"{path or 'it'} is {content!r:.40}")
    values: dict[str, Any] = {"name": "given"} if content or not path else {}
    for name, value in content.items():
        if path or name not in ("network", "within"):
            where = f"{path}.{name}" if path else name
            values[name] = _checked(where, value, type(vars(default).get(name)))
        elif name == "network" or value is not None:
            values[name] = _record(BUILT_IN, value, name)
    if values.get("node", 1) > 1 and "within" not in values:
        raise ValueError(f"node is {values['node']} without within, the network of its workers")
    return replace(default, **values)


def _checked(path: str, value: Any, kind: type[Any]) -> Any:
    """Check a value; numbers are positive, or at least 0 where that means that there is none."""
    *network, name = path.split(".")
    if kind not in (str, bool, int, float):
        raise ValueError(f"{path} is not known")
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number if kind in (int, float) else isinstance(value, kind)):
        raise TypeError(f"{path} is {value!r}")
    if not number:
        return value
    zero = network or name in ("overhead", "state")
    least = 0 if zero else 1 if kind is int else math.ulp(0.0)
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"{path} is {value}")
    return kind(value)


def _preset(
    name: str, peak: float, bandwidth: float, memory: int, node: int, near: float, far: float
) -> Machine:
    """Return a machine of TFLOP/s, GB/s and GiB of memory, and GB/s of a worker on both levels."""
    # Latencies of a round: NCCL 2.10, src/graph/tuning.cc, trees by "LL" over NVLink and a network.
    within, network = (
        replace(BUILT_IN, name="given", latency=each, inverse_bandwidth=1 / rate, exchange=1 / rate)
        for each, rate in ((520.0, near), (5000.0, far))
    )
    levels: dict[str, Any] = {"network": network, "within": within, "node": node}
    return Machine(name, peak * 500, bandwidth, memory=memory << 30, **levels)


#: Machines from public figures by name; docs/how/strategies.md has the sources. Workers are at
#: their peak in float32, without tensor cores: what steps take at least. NVLink is counted in one
#: direction, and the network cards of a node are shared by its workers.
PRESETS = {
    sizes[0]: _preset(*sizes)
    for sizes in (
        ("p100", 10.6, 732.0, 16, 4, 80.0, 12.5 / 4),
        ("v100", 15.7, 900.0, 16, 8, 150.0, 50.0 / 8),
        ("a100", 19.5, 1555.0, 40, 8, 300.0, 25.0),
        ("h100", 66.9, 3350.0, 80, 8, 450.0, 50.0),
    )
}
