"""Whole training steps of recurrent networks beside PyTorch and JAX, of others beside PyTorch.

A step is the forward pass, the backward pass from gradients of outputs, and the gradients of
parameters; of recurrent networks also of input and initial state. There is no optimiser. Recurrent
networks have gradients of all outputs, as from a loss at every step, or of the last output only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsescan.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell

from . import cell_scan, peers, races
from .experiment import Experiment, Piece, Results
from .networks import NETWORKS, NetworkCase
from .peers import FLUSHING, PYTORCH
from .races import JAX, OURS
from .timing import Call

Array = NDArray[Any]

AT_LAST = ", loss at the last step"
_NETWORKS = {"RNN": RNN, "GRU": GRU, "LSTM": LSTM}
CELLS = {"RNN": RNNCell, "GRU": GRUCell, "LSTM": LSTMCell}
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_UNROLLS = 1, 4, 16
# The cases of a quick run.
QUICK = ("RNN, H=20, B=16, T=1,000", "LSTM, H=20, B=16, T=1,000")
QUICK += tuple(name + AT_LAST for name in QUICK)


@dataclass(frozen=True)
class Case:
    """A network, the sizes of its input, and the ratios that are asked for.

    Attributes
    ----------
    kept : float or None
        Share of the hidden weights that is kept, None without pruning.
    pytorch, jax : float
        How many times as long as ours the peers are meant to take.
    last_only : bool
        Whether the loss is one of the last output, and not of all.
    """

    kind: str
    inputs: int
    hidden: int
    batch: int
    steps: int
    pytorch: float = 1
    jax: float = 1
    kept: float | None = None
    last_only: bool = False

    bound = races.BOUND

    @property
    def name(self) -> str:
        pruned = "" if self.kept is None else f", {1 - self.kept:.0%} of the hidden weights pruned"
        pruned += AT_LAST if self.last_only else ""
        return f"{self.kind}, H={self.hidden}, B={self.batch}, T={self.steps:,}{pruned}"

    @property
    def wanted(self) -> dict[str, float]:
        modes = (PYTORCH, FLUSHING) if self.last_only else (PYTORCH,)
        return dict.fromkeys(modes, self.pytorch) | {JAX: self.jax}

    def both(self, pytorch: float | None = None) -> tuple[Case, Case]:
        """Return the case, and that of a loss at the last step; PyTorch's ratio may be another."""
        return self, replace(self, last_only=True, pytorch=pytorch or self.pytorch)

    def race(self) -> _Race:
        """Return the contenders."""
        return _Race(self)


CASES = (
    *Case("RNN", 1, 20, 16, 1000, 25, 4).both(30),
    *Case("RNN", 1, 20, 16, 10_000, 25, 4).both(),
    *Case("RNN", 1, 20, 16, 100, 12, 3).both(),
    *Case("GRU", 12, 20, 16, 1000, 30, 6).both(50),
    *Case("GRU", 38, 20, 16, 259, 30, 6).both(),  # the paper's set S, M, and L
    *Case("GRU", 24, 20, 16, 517, 30, 6).both(),
    *Case("GRU", 12, 20, 16, 1034, 30, 6).both(),
    *Case("LSTM", 12, 20, 16, 1000, 8, 8).both(6),
    *Case("GRU", 12, 64, 16, 1000, 6, 5).both(12),
    *Case("GRU", 12, 128, 16, 1000, 5, 4).both(),
    *Case("LSTM", 12, 64, 16, 1000, 6, 5).both(),
    *Case("LSTM", 12, 128, 16, 1000, 5, 4).both(2.5),
    *Case("GRU", 12, 20, 1, 1000, 20, 3).both(),
    *Case("GRU", 12, 20, 3, 1000, 20, 3).both(),
    *Case("RNN", 12, 512, 16, 1000, 5, 3, kept=0.05).both(),
)


# -- Contenders -----------------------------------------------------------------------------------


class _Race:
    """The contenders for one case: functions that make their variants."""

    def __init__(self, case: Case) -> None:
        self.case, rng = case, np.random.default_rng(0)
        masks = None
        if case.kept is not None:
            shape = (_GATES[case.kind] * case.hidden, case.hidden)
            masks = {"weight_hh_l0": rng.random(shape) < case.kept}
        self.net = _NETWORKS[case.kind](case.inputs, case.hidden, masks=masks, rng=0)
        if masks is not None:
            self.net.weight_hh_l0 = np.where(masks["weight_hh_l0"], self.net.weight_hh_l0, 0)
        self.masks = masks or {}
        shape = case.steps, case.batch
        self.x = rng.standard_normal((*shape, case.inputs), np.float32)
        self.grad = rng.standard_normal((*shape, case.hidden), np.float32)
        if case.last_only:
            self.grad[:-1] = 0
        self.state = np.zeros((1, case.batch, self.net.state_size), np.float32)

    def makers(self) -> dict[str, peers.Variants]:
        """Return the contenders by name."""
        pytorch = peers.in_both_modes(self.pytorch, apart=self.case.last_only)
        return {OURS: self.ours, **pytorch, JAX: self.jax}

    def ours(self) -> dict[str, Call]:
        step = self.net.training_step()

        def call() -> dict[str, Array]:
            step.forward(self.x, self.state)
            grads = step.backward(self.grad)
            assert grads.input is not None
            return {"input": grads.input, "state": grads.state} | grads.params

        return {"training step": call}

    def pytorch(self) -> dict[str, Call]:
        layer = getattr(torch.nn, self.case.kind)(self.case.inputs, self.case.hidden)
        for name, array in self.net.params.items():
            getattr(layer, name).data = torch.tensor(array)
        x = torch.tensor(self.x, requires_grad=True)
        state = torch.tensor(self.state, requires_grad=True)
        grad, parameters = torch.tensor(self.grad), dict(layer.named_parameters())

        def call() -> dict[str, Array]:
            begin = state
            if self.case.kind == "LSTM":
                begin = tuple(part.contiguous() for part in state.chunk(2, dim=-1))
            output, _ = layer(x, begin)
            given = (output[-1], grad[-1]) if self.case.last_only else (output, grad)
            grads = torch.autograd.grad(given[0], [x, state, *parameters.values()], given[1])
            names = ["input", "state", *parameters]
            return dict(zip(names, [each.numpy() for each in grads], strict=True))

        return peers.in_threads(call)

    def loss(self, output: Any, grad: Any) -> Any:
        """Return JAX's number whose gradients of the outputs are these."""
        if self.case.last_only:
            output, grad = output[-1], grad[-1]
        return (output * grad).sum()

    def jax(self) -> dict[str, Call]:
        jax = peers.load_jax()
        cell = CELLS[self.case.kind](self.case.inputs, self.case.hidden)
        params = {name.removesuffix("_l0"): each for name, each in self.net.params.items()}
        on_device = jax.device_put((params, self.x, self.state[0], self.grad))

        def variant(unroll: int, is_packed: bool) -> Call:
            outputs = cell_scan.outputs(cell, unroll, is_packed)

            def loss(params: Any, x: Any, state: Any, grad: Any) -> Any:
                return self.loss(outputs(params, x, state), grad)

            gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))

            def call() -> dict[str, Array]:
                _, (params, x, state) = jax.block_until_ready(gradients(*on_device))
                return {"input": x, "state": state} | {f"{k}_l0": g for k, g in params.items()}

            return call

        name, best = cell_scan.fastest(variant, _UNROLLS)
        return {name: best}


def measure(case: Case | NetworkCase, quick: bool) -> Results:
    """Return the times of a training step of each contender, as :func:`bench.races.timed` does.

    Beside them are the ``differences`` of each gradient from a peer's, relative to it.
    """
    race = case.race()

    def differences(calls: dict[str, Call]) -> dict[str, float]:
        found = {
            who: {name: np.asarray(g) * race.masks.get(name, 1) for name, g in call().items()}
            for who, call in calls.items()
        }
        return races.apart_from_ours(found, case.bound)

    return races.timed(race.makers(), case.wanted, quick, differences)


# -- The experiment -------------------------------------------------------------------------------


def _pieces(quick: bool) -> Iterable[Piece]:
    for case in (*CASES, *NETWORKS):
        if case.name in QUICK or not quick:
            yield Piece(case.name, partial(measure, case, quick))


def _about(quick: bool) -> Results:
    return {
        "a step": "forward pass, and gradients of input, initial state and parameters from those "
        "of all outputs, or of the last one where the loss is at the last step; float32, no "
        "optimiser",
        "memory": "glibc keeps what is freed (mallopt), for all contenders",
        "PyTorch": "torch.nn and autograd, 2 threads or 1, whichever were faster; recurrent "
        "networks with torch.set_flush_denormal and without, and if the loss is at the last step, "
        "a ratio is to the faster and both are in a table",
        "JAX": "jitted value_and_grad over lax.scan, as in cells: the faster of two forms, the "
        "fastest of the unrolls 1, 4 and 16",
    }


EXPERIMENT = Experiment(
    "step",
    "Whole training steps",
    _pieces,
    _about,
    partial(races.drawings, "Whole training steps"),
    partial(races.rows, "Training step"),
    races.in_both_modes,
)
