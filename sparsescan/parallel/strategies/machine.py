"""Machine: what the cost models know of one worker and the network between workers."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ...costs import machine_file
from ...errors import InputError
from ...jacobians import Conv2d, Tanh
from ..network import BUILT_IN, Network, load_network
from .graph import Graph, Layer

__all__ = ["Machine", "load_machine", "measure_machine", "save_machine", "worker_file"]

# Of what is measured: a convolution, numbers that are copied, and how often each is done.
_CONV, _IMAGE, _COPIED, _TIMES = (16, 16, 3), (16, 16, 16), 1 << 22, 51
# Where the system does not say how much memory there is.
_MEMORY = 16 << 30
_Path = str | os.PathLike[str]


@dataclass(frozen=True)
class Machine:
    """A worker, and the network that connects it to others of its kind.

    Attributes
    ----------
    name : str
        Of the machine.
    multiply_adds : float
        Of dense products in float32, per nanosecond.
    bandwidth : float
        Bytes of memory per nanosecond.
    overhead : float
        Nanoseconds of a layer beside its arithmetic.
    memory : int
        Bytes of a worker.
    network : Network
        α and β.
    itemsize : int
        Bytes of a number.
    """

    name: str = "built in"
    multiply_adds: float = 1000.0
    bandwidth: float = 200.0
    overhead: float = 10_000.0
    memory: int = 16 << 30
    network: Network = field(default=BUILT_IN)
    itemsize: int = 4

    def forward(self, graph: Graph, k: int, samples: float = 1.0, share: float = 1.0) -> float:
        """Nanoseconds of the forward pass of layer `k`.

        Parameters
        ----------
        graph : Graph
            The network.
        k : int
            Number of the layer.
        samples : float
            How many.
        share : float
            Of its output that is computed.
        """
        layer = graph.layers[k]
        if layer.kind in ("input", "flatten"):
            return 0.0
        return self.overhead + self._work(layer, graph, k, samples, share)

    def backward(self, graph: Graph, k: int, samples: float = 1.0, share: float = 1.0) -> float:
        """The same of its backward pass: as long for each of its input and its parameters."""
        layer = graph.layers[k]
        if layer.kind in ("input", "flatten"):
            return 0.0
        products = 1 + (layer.weights > 0 or layer.shares is not None)
        return products * (self.overhead + self._work(layer, graph, k, samples, share))

    def _work(self, layer: Layer, graph: Graph, k: int, samples: float, share: float) -> float:
        """What takes longer, arithmetic or memory."""
        read = sum(graph.layers[i].size for i in layer.inputs)
        entries = samples * (read + share * layer.size) + share * layer.weights
        arithmetic = samples * share * layer.multiply_adds / self.multiply_adds
        return max(arithmetic, entries * self.itemsize / self.bandwidth)


def worker_file() -> Path:
    """Where the worker that was measured is kept: beside the constants of the engine."""
    return machine_file().with_name("worker.json")


def load_machine(path: _Path | None = None) -> Machine:
    """A machine from a JSON file with its attributes; those that are left out are built in.

    Parameters
    ----------
    path : str or path-like, optional
        The file; by default that of the worker that was measured, if there is one.

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
    try:
        return _machine_of(json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        known = ", ".join(sorted(made.name for made in fields(Machine)))
        raise InputError(
            f"{path}: {error}; expected a JSON object with some of {known}; network is one with "
            "latency and inverse_bandwidth"
        ) from None


def save_machine(machine: Machine, path: _Path | None = None) -> Path:
    """Write a machine to a JSON file; the path."""
    file = worker_file() if path is None else Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(machine), indent=1) + "\n", encoding="utf-8")
    return file


def measure_machine(network: Network | None = None) -> Machine:
    """What a worker on this computer does, by this process alone; takes about a second.

    Multiply-adds are those of a convolution, and the overhead is that of an activation, as they run
    here; memory gives and takes an array that no cache holds.

    Parameters
    ----------
    network : Network, optional
        Between workers; by default as :func:`~sparsescan.parallel.load_network` has it.

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
        name=platform.processor() or platform.machine(),
        multiply_adds=len(images) * math.prod(_IMAGE[1:]) * conv.weight.size / multiplying,
        bandwidth=2 * given.nbytes / copying,
        overhead=_usual(lambda: layer.forward(x)),
        memory=_memory(),
        network=load_network() if network is None else network,
    )


def _usual(call: Callable[[], Any]) -> float:
    """Nanoseconds of a call, the median: other workers may be on the same core."""
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


def _machine_of(found: Any) -> Machine:
    """From what JSON says; or ValueError or TypeError."""
    if not isinstance(found, dict):
        raise TypeError(f"it is a {type(found).__name__}")
    given: dict[str, Any] = dict(found)
    network = given.pop("network", asdict(BUILT_IN))
    if not isinstance(network, dict):
        raise TypeError(f"network is a {type(network).__name__}")
    network = asdict(BUILT_IN) | {"name": "given"} | network
    whole = {"memory": int, "itemsize": int}
    _check("", given, Machine, whole)
    _check("network.", network, Network, {})
    given = {name: whole.get(name, float)(v) if name != "name" else v for name, v in given.items()}
    return Machine(**given, network=Network(**network))


def _check(
    prefix: str, given: Mapping[str, Any], kind: type[Any], whole: Mapping[str, Any]
) -> None:
    """Names and numbers: positive, but for those of a network that may be 0."""
    known = {made.name for made in fields(kind)} - {"network"}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{prefix}{name} is not known")
        if name == "name":
            if not isinstance(value, str):
                raise TypeError(f"{prefix}name is {value!r}")
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{prefix}{name} is {value!r}")
        least = 0 if prefix or name == "overhead" else math.ulp(0.0)
        if not (math.isfinite(value) and value >= least) or (name in whole and value < 1):
            raise ValueError(f"{prefix}{name} is {value}")
