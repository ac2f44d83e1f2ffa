"""The chains of :mod:`bench.scaling`, and what the model says of them on many ranks.

``python -m bench.scaling_model OUT.json JSON`` predicts with the constants of the machine and of
the network that are kept in the cache folder, and with those of :data:`INFINIBAND`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparsescan import Pattern
from sparsescan.parallel import Grid, Network
from sparsescan.parallel.forecast import Forecast, forecasts, setting_of_equal_parts
from sparsescan.plan.choice import InputKind
from sparsescan.plan.costs.cpu import load_cpu
from sparsescan.plan.costs.operations import Model
from sparsescan.symbolic.pattern import of_mask

ALONE = "one process"
_SCHEDULES = ("vectors", "products", "auto")
# 2 µs a message and 10 GB/s, a round of an exscan at half of it; the operator is Python's.
INFINIBAND = Network("InfiniBand-like network", 2000.0, 0.1, 0.2, 20_000.0)


@dataclass(frozen=True)
class Chain:
    """A chain of one pattern.

    `n` are its steps for strong scaling; `each` are those of a rank for weak scaling, if any. With
    a batch, the ranks share the samples.
    """

    what: str
    kind: str
    size: int
    n: int
    each: int | None = None
    batch: int | None = None

    @property
    def schedules(self) -> tuple[str, ...]:
        return ("groups",) if self.batch else _SCHEDULES

    @property
    def pattern(self) -> Pattern:
        if self.kind == "dense":
            return Pattern.dense((self.size, self.size))
        if self.kind == "diagonal":
            return Pattern.diagonal(self.size)
        places = np.arange(self.size)
        return of_mask(np.abs(places[:, None] - places) <= 1)


CHAINS = {
    "dense": Chain("tanh RNN, dense 20×20", "dense", 20, 4096, 1024),
    "stencil": Chain("three-point stencil, 1,024 points", "stencil", 1024, 256),
    "diagonal": Chain("element-wise recurrence, diagonal 4,096", "diagonal", 4096, 1024, 256),
    "groups": Chain("tanh RNN, dense 20×20, B=16 in groups", "dense", 20, 1024, batch=16),
}


def predict(
    patterns: Sequence[Pattern], ranks: int, networks: Sequence[Network]
) -> list[dict[str, Forecast]]:
    """On each network by vectors, and by products if they could pay; ranks share the chain."""
    model: Model = InputKind(1, np.dtype(np.float64)).model()
    setting = setting_of_equal_parts(patterns, Grid(ranks), model, networks[0], {})
    ways_by_schedule = []
    for network in networks:
        ways = forecasts(setting._replace(network=network))
        ways.sort(key=lambda way: -way.nanoseconds)
        # The best of both forms of products.
        ways_by_schedule.append({way.schedule: way for way in ways})
    return ways_by_schedule


def curves(
    name: str, steps: Sequence[int], ranks: Sequence[int], networks: Sequence[Network]
) -> list[dict[str, Any]]:
    """Seconds, and bytes of the rank that needs most, over ranks: one for each network.

    `steps` are those of the whole chain for each number of ranks.
    """
    pattern = CHAINS[name].pattern
    points = [
        predict([pattern] * n, count, networks) for n, count in zip(steps, ranks, strict=True)
    ]
    curves_of_networks = []
    for k, network in enumerate(networks):
        curve = {"chain": name, "network": network.name, "n": list(steps), "ranks": list(ranks)}
        for schedule in ("vectors", "products"):
            ways = [point[k].get(schedule) for point in points]
            curve[schedule] = [way and 1e-9 * way.nanoseconds for way in ways]
            curve[f"{schedule}_bytes"] = [way and max(way.memory) for way in ways]
        curves_of_networks.append(curve)
    return curves_of_networks


def main(file: str, options: str) -> None:
    asked = json.loads(options)
    ranks = [2**k for k in range(0, asked["most"].bit_length(), asked["stride"])]
    networks = [Network.load(), INFINIBAND]
    strong = [
        curve
        for name, n in asked["strong"]
        for curve in curves(name, [n] * len(ranks), ranks, networks)
    ]
    predicted = {
        "machine": asdict(load_cpu()),
        "networks": [asdict(network) for network in networks],
        "strong": strong,
        "weak": curves("dense", [asked["each"] * p for p in ranks], ranks, networks),
    }
    Path(file).write_text(json.dumps(predicted))


if __name__ == "__main__":
    main(*sys.argv[1:])
