"""Pipelined back-propagation: with stale weights, and with micro-batches instead."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..formatting import quantity
from .graph import Graph, blocks
from .machine import Machine
from .strategy import LayerPlan, Prediction, Strategy, Work

Costs = NDArray[np.float64]

# Most places for registers among which the best are chosen; tables grow with its square.
_PLACES = 4096


@dataclass(frozen=True)
class Placement:
    """A pipeline placement vector: after which layers there is a pair of pipeline registers.

    ``K`` pairs make ``K + 1`` forward stages, FS1 to FS(K+1), and as many backward stages, BKS1 to
    BKS(K+1), of which BKS1 has the layers of FS(K+1). Forward stage ``i`` has the layers from
    ``p_(i-1) + 1`` to ``p_i``.

    Attributes
    ----------
    layers : int
        Layers of the network, without its input.
    registers : tuple of int
        ``(p_1, …, p_K)``: numbers of layers, counted from 1, that increase.

    Raises
    ------
    InputError
        If there is no such layer, or none behind it.

    Notes
    -----
    Zhang and Abdelrahman (2021), section 4.1.

    Examples
    --------
    >>> placement = Placement(12, (3, 6))
    >>> placement.stages, placement.parts
    (6, (slice(0, 3, None), slice(3, 6, None), slice(6, 12, None)))
    >>> placement.degrees  # of staleness
    (4, 2, 0)
    >>> placement.stale([1] * 12)  # share of the weights
    0.5
    """

    layers: int
    registers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        bounds = (0, *self.registers, self.layers)
        if any(a >= b for a, b in itertools.pairwise(bounds)):
            raise InputError(
                f"registers is {self.registers}; expected numbers of layers that increase, from 1 "
                f"to {self.layers - 1}"
            )

    def __str__(self) -> str:
        where = ", ".join(map(str, self.registers))
        behind = f", registers after layer{'s' * (len(self.registers) > 1)} {where}"
        return f"{self.stages} stages" + behind * bool(where)

    @property
    def stages(self) -> int:
        """Forward and backward stages: ``2 (K + 1)``."""
        return 2 * len(self.registers) + 2

    @property
    def parts(self) -> tuple[slice, ...]:
        """Layers of each forward stage, counted from 0."""
        bounds = (0, *self.registers, self.layers)
        return tuple(slice(a, b) for a, b in itertools.pairwise(bounds))

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degree of staleness of stage ``i``: its weights are ``2 (K - i + 1)`` cycles old."""
        return tuple(range(self.stages - 2, -1, -2))

    def stale(self, weights: Sequence[int]) -> float:
        """Return the share of weights that are stale: those before the last pair of registers.

        Parameters
        ----------
        weights : sequence of int
            Number of weights of each layer.
        """
        last = self.registers[-1] if self.registers else 0
        return sum(weights[:last]) / max(sum(weights), 1)


def balance(costs: Costs, stages: int) -> tuple[int, ...] | None:
    """Return the first layers of all stages but one, if the dearest is to be as cheap as can be.

    ``costs[a, b]`` is that of a stage of layers ``a`` to ``b - 1``; inf where there can be none. If
    there is no way, return None.

    Examples
    --------
    >>> sizes = np.array([3, 1, 1, 1, 3.0])
    >>> ends = np.concatenate([[0], np.cumsum(sizes)])
    >>> balance(np.where(ends > ends[:, None], ends - ends[:, None], np.inf), 3)
    (1, 4)
    """
    n = len(costs) - 1
    best = costs[0]
    choices = []
    for _ in range(stages - 1):
        # Cost of the slowest stage up to b, if the last of them begins at a.
        slowest = np.maximum(best[:, None], costs)
        choices.append(slowest.argmin(axis=0))
        best = slowest.min(axis=0)
    if not np.isfinite(best[n]):
        return None
    cuts = [n]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return tuple(reversed(cuts[1:]))


def place(
    network: Graph, machine: Machine, workers: int, samples: int, given: tuple[int, ...] | None
) -> Placement:
    """Return the registers that are given, checked, or those that balance the stages."""
    layers, inside = len(network.layers) - 1, _inside(network)
    if given is not None:
        return _checked(Placement(layers, given), workers, inside)
    places = np.flatnonzero(~np.logical_or.reduce([*inside.values()]))
    if len(places) > _PLACES:
        raise InputError(
            f"{network.name} can be cut in {len(places) - 2} places; expected {_PLACES} at "
            "most, or registers that are given"
        )
    forward, backward, messages = _times(network, machine, samples)
    # A stage has its layers, and messages on both sides.
    ends = np.concatenate([[0], np.cumsum(forward + backward)])[places]
    beside = messages[places] + messages[places][:, None]
    follows = np.arange(len(ends)) > np.arange(len(ends))[:, None]
    chosen = balance(np.where(follows, ends - ends[:, None] + beside, np.inf), workers)
    if chosen is None:
        raise InputError(
            f"workers is {workers}; expected no more than the stages that {network.name} can "
            f"be cut into, which are {len(places) - 1}"
            + (_why_together(inside, slice(None)) if workers <= layers else "")
        )
    return Placement(layers, tuple(int(places[k]) for k in chosen))


def _inside(network: Graph) -> dict[str, NDArray[np.bool_]]:
    """Return, by the reason, whether there can be no register behind each layer."""
    shared, block = np.zeros(len(network.layers), bool), np.ones(len(network.layers), bool)
    last = {layer.shares: k for k, layer in enumerate(network.layers) if layer.shares is not None}
    for first, k in last.items():
        shared[first:k] = True
    block[[0, *(each.stop - 1 for each in blocks(network))]] = False
    return {"layers that share their weights": shared, "layers of a block": block}


def _why_together(inside: dict[str, NDArray[np.bool_]], where: Any) -> str:
    """Say which layers stay together there."""
    names = " and ".join(which for which, layers in inside.items() if layers[where].any())
    return f": {names} stay together" if names else ""


def _checked(placement: Placement, workers: int, inside: dict[str, NDArray[np.bool_]]) -> Placement:
    """Check that there is a stage for each worker, and no register inside a block."""
    registers = placement.registers
    if len(placement.parts) != workers:
        raise InputError(
            f"registers is {registers}; expected {workers - 1} of them for {workers} workers"
        )
    wrong = [p for p in registers if any(layers[p] for layers in inside.values())]
    if wrong:
        raise InputError(
            f"registers is {registers}; expected none after layer {wrong[0]}"
            + _why_together(inside, wrong[0])
        )
    return placement


def _times(network: Graph, machine: Machine, samples: int) -> tuple[Costs, Costs, Costs]:
    """Return nanoseconds of each layer forward and backward, and of a message behind each."""
    numbers, same = np.unique(network.alike[1:], return_inverse=True)
    each = [(network, k) for k in numbers.tolist()]
    forward = np.array([machine.forward(*one, samples) for one in each])[same]
    backward = np.array([machine.backward(*one, samples) for one in each])[same]
    sizes = samples * machine.itemsize * np.array([layer.size for layer in network.layers])
    messages = np.array(machine.network.latency + machine.network.inverse_bandwidth * sizes, float)
    messages[[0, -1]] = 0
    return forward, backward, messages


class StageCosts:
    """Costs of the stages of a placement, for some samples at a time.

    For each stage: nanoseconds of its passes, `forward`, `backward` and `work` for both, and of the
    `messages` on both sides; its number of `weights`, and entries, for a sample, of what it has
    `kept`, its input and all outputs of its layers, and of its input, `entering`.
    """

    def __init__(
        self, network: Graph, machine: Machine, placement: Placement, samples: int
    ) -> None:
        self._layers, self._machine, self._placement = network.layers, machine, placement
        forward, backward, messages = _times(network, machine, samples)
        parts, both = placement.parts, forward + backward
        self.forward = np.array([forward[part].sum() for part in parts])
        self.backward = np.array([backward[part].sum() for part in parts])
        self.work = np.array([both[part].sum() for part in parts])
        self.messages = np.array([messages[part.start] + messages[part.stop] for part in parts])
        inside = [self._layers[part.start : part.stop + 1] for part in parts]
        self.weights = [sum(layer.weights for layer in own[1:]) for own in inside]
        self.kept = [sum(layer.size for layer in own) for own in inside]
        self.entering = [own[0].size for own in inside]

    @property
    def agreeing(self) -> float:
        """Nanoseconds in which workers agree that nothing is wrong, and on the loss."""
        calls, workers = ("maximum", "broadcast"), len(self._placement.parts)
        return sum(self._machine.collective(call, workers) for call in calls)

    def sent(self, batch: int) -> int:
        """Count bytes that the busiest worker sends: activations forward, gradients backward."""
        cuts = [0, *(self._layers[p].size for p in self._placement.registers), 0]
        return self._machine.itemsize * batch * max(a + b for a, b in itertools.pairwise(cuts))

    def plans(self, batch: int) -> Iterator[LayerPlan]:
        """Yield what each layer sends, and what it needs for one minibatch."""
        machine, last = self._machine, len(self._placement.parts) - 1
        for stage, part in enumerate(self._placement.parts):
            for k in range(part.start + 1, part.stop + 1):
                layer = self._layers[k]
                size = layer.size * (k == part.stop and stage < last)
                size += self.entering[stage] * (k == part.start + 1 and stage > 0)
                sent = batch * machine.itemsize * size
                memory = machine.needed(layer.weights, batch * layer.size)
                yield LayerPlan(layer.name, (1, 1, 1, 1), range(stage, stage + 1), sent, memory)


class _Stages(Strategy):
    """A pipeline with a stage of the network on each worker.

    Registers that are not given are placed by dynamic programming, where one output is all that
    later layers read, and not between layers that share their weights: so a recurrent network has
    two stages at most, its steps and its readout.
    """

    def __init__(self, registers: Sequence[int] | None = None) -> None:
        self._given = None if registers is None else tuple(registers)

    def _placed(self, work: Work, samples: int) -> Placement:
        return place(work.graph, work.machine, work.workers, samples, self._given)


class Pipeline(_Stages):
    """Pipelined back-propagation with stale weights: no bubbles, and not exact.

    Each worker has a forward stage and the backward stage of the same layers. In every cycle a
    minibatch is fed, so a step takes as long as the slowest stage.

    Parameters
    ----------
    registers : sequence of int, optional
        The pipeline placement vector: layers of the graph behind which there are pipeline
        registers, one less than workers. By default the slowest stage is as fast as can be.

    Notes
    -----
    Zhang and Abdelrahman, Pipelined Training with Stale Weights in Deep Convolutional Neural
    Networks (2021).

    Examples
    --------
    >>> from sparsescan.strategies import Machine
    >>> from sparsescan.strategies.graph import Graph, Layer
    >>> layers = [Layer(f"l{k}", "linear", (k - 1,), (100,), 10100, 10000) for k in range(1, 9)]
    >>> network = Graph("deep", [Layer("x", "input", (), (100,)), *layers])
    >>> prediction = Pipeline().predict(network, Machine(), workers=4, batch=32)
    >>> prediction.how, prediction.stale, prediction.bytes
    ('8 stages, registers after layers 2, 4, 6', 0.75, 25600)
    """

    name = "pipeline, stale weights"
    exact = False

    def _predict(self, work: Work) -> Prediction:
        """Return a step of a full pipeline."""
        network, machine, _, batch = work
        placement = self._placed(work, batch)
        costs = StageCosts(network, machine, placement, batch)
        # A step takes as long as the slowest stage.
        slowest = int((costs.work + costs.messages).argmax())
        memory = [
            machine.needed(weights, batch * kept, batch * degree * kept)
            for weights, kept, degree in zip(
                costs.weights, costs.kept, placement.degrees, strict=True
            )
        ]
        times = {
            "forward": costs.forward[slowest],
            "backward": costs.backward[slowest],
            "activations": costs.messages[slowest],
            "loss": costs.agreeing,
        }
        stale = placement.stale([layer.weights for layer in network.layers[1:]])
        most, plans = (costs.sent(batch), max(memory)), tuple(costs.plans(batch))
        return Prediction(self.name, str(placement), times, *most, stale, plans)


class MicroBatches(_Stages):
    """A pipeline of micro-batches (GPipe): exact, with a bubble of ``P - 1`` of them.

    A minibatch is cut into micro-batches, which go through the pipeline one after the other; the
    weights change when all are done. Workers keep the inputs of their stage, and run it forward
    again before they run it backward.

    Parameters
    ----------
    registers : sequence of int, optional
        As for :class:`Pipeline`.
    count : int, optional
        Number of micro-batches, a divisor of the batch. By default the fastest.

    Notes
    -----
    Huang et al., GPipe (2019).
    """

    name = "pipeline, micro-batches"

    def __init__(self, registers: Sequence[int] | None = None, count: int | None = None) -> None:
        super().__init__(registers)
        self._count = count

    def _predict(self, work: Work) -> Prediction:
        """Return a step of the fastest count."""
        batch, given = work.batch, self._count
        if given is not None and (given < 1 or batch % given):
            raise InputError(f"count is {given}; expected a divisor of batch = {batch}")
        divisors = [d for d in range(1, batch + 1) if batch % d == 0]
        ways = []
        for count in divisors if given is None else [given]:
            placement = self._placed(work, batch // count)
            ways.append(self._counted(work, placement, count))
        return min(ways, key=lambda way: way.total)

    def _counted(self, work: Work, placement: Placement, count: int) -> Prediction:
        """Predict a step of so many micro-batches, with the bubble as "idle"."""
        network, machine, _, batch = work
        samples = batch // count
        costs = StageCosts(network, machine, placement, samples)
        both = costs.messages
        # The last stage runs forward once, just before it runs backward.
        first, second = costs.forward.copy(), costs.forward + costs.backward
        first[-1] = 0
        slowest = int((first + second + both * 2).argmax())
        taken = count * (first + second)
        # Each way the first micro-batch goes through all stages, and the others follow it.
        total = both.sum()
        for stages in (first, second):
            total += stages.sum() + (count - 1) * (stages + both).max()
        total = max(total, taken.max() + 2 * count * both[slowest])
        # A stage keeps all inputs, and activations and gradients of one micro-batch.
        memory = [
            machine.needed(weights, samples * kept, (batch - samples) * entering)
            for weights, kept, entering in zip(
                costs.weights, costs.kept, costs.entering, strict=True
            )
        ]
        how = f"{quantity(count, 'micro-batch', 'micro-batches')}; {placement}"
        times = {
            "forward": count * costs.forward[slowest],
            "backward": count * (first[slowest] + costs.backward[slowest]),
            "activations": count * 2 * both[slowest],
            "loss": costs.agreeing,
            "idle": total - taken[slowest] - 2 * count * both[slowest],
        }
        most, plans = (costs.sent(batch), max(memory)), tuple(costs.plans(batch))
        return Prediction(self.name, how, times, *most, layers=plans)
