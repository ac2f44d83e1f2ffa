"""Whole training steps of recurrent networks beside PyTorch and JAX, of others beside PyTorch.

A step is the forward pass, the backward pass from gradients of outputs, and the gradients of
parameters; of recurrent networks also of input and initial state. There is no optimiser. Recurrent
networks have gradients of all outputs, as from a loss at every step, or of the last output only.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsescan.recurrent import GRU, LSTM, RNN
from sparsescan.torch.calibrate import keep_memory

from . import children, drawing, peers, recurrent
from .drawing import BLUE, GREEN, ORANGE, SKY, legend, rows_of_bars
from .experiment import Drawing, Experiment, Options, Piece, Results, Row, Table, cpu_only
from .page import significant
from .peers import FLUSHING, PYTORCH
from .resident import GIVE_BACK, growth
from .step_networks import NETWORKS, NetworkCase
from .timing import PAUSE, THREADS, Call

Array = NDArray[Any]

OURS, JAX = "sparsescan", "jax.lax.scan"
# Our backward pass, to which that with a loss at the last step is compared.
EVERY = "sparsescan, loss at every step"
AT_LAST = ", loss at the last step"
_NETWORKS = {"RNN": RNN, "GRU": GRU, "LSTM": LSTM}
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_UNROLLS = 1, 4, 16
_ROUNDS, _QUICK_ROUNDS, _TURN, _QUICK_TURN = 7, 2, 0.2, 0.02
# How many calls tell which variant is fastest; and of calls that take more than a second.
_TRIALS, _FEW_TRIALS, _FEW_ROUNDS = 3, 1, 5
# Those whose first steps are timed.
_PROCESSES = 5
# Norms of gradients that are compared: of smaller ones, the part that is subnormal would count.
SMALLEST = float(np.finfo(np.float32).tiny / np.finfo(np.float32).eps)
# With which the keys of pieces of backward passes begin.
_BACKWARD = "backward: "
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
    pytorch: float
    jax: float
    kept: float | None = None
    last_only: bool = False

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

    # How far gradients may be apart, relative to their norms.
    bound = float(np.sqrt(np.finfo(np.float32).eps))

    def race(self) -> _Race:
        """Return the contenders."""
        return _Race(self)

    def small(self) -> Case:
        """Return the same with less to do, for what only the first call does."""
        return replace(self, steps=10)


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
# Networks whose backward passes are timed with a loss at the last step and at every step, and the
# share of the latter's time that the former is meant to take.
BACKWARD = (
    (Case("RNN", 1, 20, 16, 1000, 1, 1), 0.45),
    (Case("GRU", 12, 20, 16, 1000, 1, 1), 0.45),
    (Case("LSTM", 12, 20, 16, 1000, 1, 1), 0.45),
    (Case("LSTM", 12, 128, 16, 1000, 1, 1), 0.4),
    (Case("GRU", 12, 64, 16, 1000, 1, 1), 0.4),
)


# Long sequences, for which memory is what counts, and a large network.
LONG = tuple(Case(kind, 12, 20, 16, 30_000, 1, 1) for kind in ("RNN", "GRU", "LSTM"))
LARGE = (*LONG, NETWORKS[0])
# The first step of a process, in which kernels are loaded.
FIRST = Case("GRU", 12, 20, 16, 100, 1, 1)

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
        shape = case.steps, case.batch
        self.x = rng.standard_normal((*shape, case.inputs), np.float32)
        self.grad = rng.standard_normal((*shape, case.hidden), np.float32)
        if case.last_only:
            self.grad[:-1] = 0
        self.state = np.zeros((1, case.batch, self.net.state_size), np.float32)

    def kept(self) -> dict[str, Array]:
        """Return the masks of pruned weights."""
        return {} if self.case.kept is None else {"weight_hh_l0": self.net.weight_hh_l0 != 0}

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

        def call(threads: int) -> dict[str, Array]:
            torch.set_num_threads(threads)
            begin = state
            if self.case.kind == "LSTM":
                begin = tuple(part.contiguous() for part in state.chunk(2, dim=-1))
            output, _ = layer(x, begin)
            given = (output[-1], grad[-1]) if self.case.last_only else (output, grad)
            grads = torch.autograd.grad(given[0], [x, state, *parameters.values()], given[1])
            names = ["input", "state", *parameters]
            return dict(zip(names, [each.numpy() for each in grads], strict=True))

        return {f"{n} threads": partial(call, n) for n in (THREADS, 1)}

    def loss(self, output: Any, grad: Any) -> Any:
        """Return JAX's number whose gradients of the outputs are these."""
        if self.case.last_only:
            output, grad = output[-1], grad[-1]
        return (output * grad).sum()

    def jax(self) -> dict[str, Call]:
        jax = peers.load_jax()
        step, hidden = _jax_step(jax, self.case.kind), self.case.hidden

        def variant(unroll: int) -> Call:
            def loss(params: Any, x: Any, state: Any, grad: Any) -> Any:
                def body(s: Any, x_t: Any) -> Any:
                    s = step(params, s, x_t)
                    return s, s[:, :hidden]

                output = jax.lax.scan(body, state[0], x, unroll=unroll)[1]
                return self.loss(output, grad)

            gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))

            def call() -> dict[str, Array]:
                _, grads = jax.block_until_ready(gradients(*on_device))
                return {"input": grads[1], "state": grads[2]} | grads[0]

            return call

        on_device = jax.device_put((dict(self.net.params), self.x, self.state, self.grad))
        return {f"unroll={unroll}": variant(unroll) for unroll in _UNROLLS}


def _jax_step(jax: Any, kind: str) -> Callable[[Any, Any, Any], Any]:
    """Return a cell as a function of parameters, state and input."""
    jnp, sigmoid = jax.numpy, jax.nn.sigmoid

    def products(params: Any, h: Any, x: Any) -> tuple[Any, Any]:
        u = x @ params["weight_ih_l0"].T + params["bias_ih_l0"]
        return u, h @ params["weight_hh_l0"].T + params["bias_hh_l0"]

    def rnn(params: Any, h: Any, x: Any) -> Any:
        u, v = products(params, h, x)
        return jnp.tanh(u + v)

    def gru(params: Any, h: Any, x: Any) -> Any:
        u, v = (jnp.split(each, 3, axis=1) for each in products(params, h, x))
        r, z = sigmoid(u[0] + v[0]), sigmoid(u[1] + v[1])
        n = jnp.tanh(u[2] + r * v[2])
        return n + z * (h - n)

    def lstm(params: Any, state: Any, x: Any) -> Any:
        h, c = jnp.split(state, 2, axis=1)
        u, v = products(params, h, x)
        i, f, g, o = jnp.split(u + v, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
        return jnp.concatenate([sigmoid(o) * jnp.tanh(c), c], axis=1)

    cells: dict[str, Callable[[Any, Any, Any], Any]] = {"RNN": rnn, "GRU": gru, "LSTM": lstm}
    return cells[kind]


def measure(case: Case | NetworkCase, *, quick: bool) -> Results:
    """Return the times of a training step of each contender, as :func:`timed` does.

    Beside them are the ``differences`` of each gradient from a peer's, by the 2-norm, relative to
    it.
    """
    race = case.race()
    makers: dict[str, peers.Variants] = {OURS: race.ours, PYTORCH: race.pytorch}
    if isinstance(case, Case):
        makers |= peers.in_both_modes(race.pytorch, apart=case.last_only)
    if race.jax is not None:
        makers[JAX] = race.jax
    return timed(makers, case.wanted, quick, lambda calls: _differences(race, calls))


def measure_backward(case: Case, share: float, *, quick: bool) -> Results:
    """Return the times of our backward pass with a loss at the last step, and at every step."""
    race = case.race()
    step = race.net.training_step()
    last = np.zeros_like(race.grad)
    last[-1] = race.grad[-1]
    makers: dict[str, peers.Variants] = {
        OURS: lambda: {"training step": partial(step.backward, last)},
        EVERY: lambda: {"training step": partial(step.backward, race.grad)},
    }
    forward = partial(step.forward, race.x, race.state)
    return timed(makers, {EVERY: 1 / share}, quick, before=forward)


def timed(
    makers: Mapping[str, peers.Variants],
    wanted: dict[str, float],
    quick: bool,
    differences: Callable[[dict[str, Call]], dict[str, float]] | None = None,
    before: Call | None = None,
    few: bool = False,
) -> Results:
    """Time contenders, who take turns, each in its fastest variant.

    Something may have to run `before` each call, untimed; then each contender has one variant. A
    `few` calls and rounds have to do where a call takes seconds.

    Returns
    -------
    dict
        For each contender its ``samples`` in seconds and the ``variants`` that were fastest;
        ``missing`` peers, the ratios that are ``wanted``, ``cores_others_used`` in each round, and
        ``differences`` between the calls' results, if they are compared.
    """
    keep_memory()
    calls, chosen = peers.fastest_of_each(makers, _FEW_TRIALS if quick or few else _TRIALS)
    compared = {} if differences is None else {"differences": differences(calls)}
    rounds, turn = (_FEW_ROUNDS if few else _ROUNDS), _TURN
    if quick:
        rounds, turn = _QUICK_ROUNDS, _QUICK_TURN
    samples, others = recurrent.take_turns(calls, rounds, PAUSE, turn, before)
    about = {"wanted": wanted, **compared, "cores_others_used": others}
    return {"samples": samples, **chosen, **about}


def _differences(race: _Race, calls: dict[str, Call]) -> dict[str, float]:
    """How far ours are from each peer's; AssertionError if rounding does not explain it."""
    result, kept, differences = calls[OURS](), race.kept(), {}
    bound = race.case.bound
    for peer in (PYTORCH, FLUSHING, JAX):
        for name, theirs in calls[peer]().items() if peer in calls else ():
            theirs = np.asarray(theirs, np.float64) * kept.get(name, 1)
            size = max(float(np.linalg.norm(theirs)), SMALLEST)
            apart = float(np.linalg.norm(result[name] - theirs)) / size
            differences[f"{name}, {peer}"] = apart
            if not apart < bound:
                raise AssertionError(f"{name}, {peer}: the relative difference is {apart:.1e}")
    return differences


# -- Memory and the first call --------------------------------------------------------------------


def peak(case: Case | NetworkCase, who: str) -> int:
    """By how many bytes this process grows at the peak of two steps, beside inputs."""
    name = {OURS: "ours", PYTORCH: "pytorch"}[who]
    # Kernels are compiled, and libraries have taken what they keep.
    first, *_ = getattr(case.small().race(), name)().values()
    first()
    call, *_ = getattr(case.race(), name)().values()
    return growth(lambda: (call(), call()))[0]


def measure_memory(case: Case | NetworkCase) -> Results:
    """``bytes`` that each takes at the peak, beside inputs, each in a process of its own."""
    return {"bytes": {who: int(_in_child(f"peak({case!r}, {who!r})")) for who in (OURS, PYTORCH)}}


def first_call(case: Case) -> float:
    """Seconds of the first step of this process."""
    (call,) = _Race(case).ours().values()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_first_call(case: Case) -> Results:
    """``seconds`` of the first steps of some processes, after one that may compile."""
    times = [float(_in_child(f"first_call({case!r})")) for _ in range(1 + _PROCESSES)]
    return {"seconds": times[1:]}


def _in_child(expression: str) -> str:
    """Evaluate an expression of this module in a process of its own, and return what it prints."""
    code = f"from bench.step import *; print({expression})"
    return children.run([sys.executable, "-c", code], GIVE_BACK)


# -- The experiment -------------------------------------------------------------------------------


def _pieces(options: Options) -> Iterable[Piece]:
    cpu_only("step", options)
    yield from (
        Piece(case.name, partial(measure, case, quick=options.quick))
        for case in (*CASES, *NETWORKS)
        if case.name in QUICK or not options.quick
    )
    yield from (
        Piece(_BACKWARD + case.name, partial(measure_backward, case, share, quick=options.quick))
        for case, share in BACKWARD
        if case.name in QUICK or not options.quick
    )
    yield Piece("first step of a process", partial(measure_first_call, FIRST))
    if not options.quick:
        yield from (
            Piece(f"memory of {case.name}", partial(measure_memory, case)) for case in LARGE
        )


def _about(options: Options) -> Results:
    return {
        "a step": "forward pass, and gradients of input, initial state and parameters from those "
        "of all outputs, or of the last one where the loss is at the last step; float32, no "
        "optimiser",
        "backward": "our backward pass alone, with a loss at the last step and at every step",
        "memory": "glibc keeps what is freed (mallopt), for all contenders",
        "PyTorch": "torch.nn and autograd, 2 threads or 1, whichever were faster; recurrent "
        "networks with torch.set_flush_denormal and without, and if the loss is at the last step, "
        "a ratio is to the faster and both are in a table",
        "JAX": "jitted value_and_grad over lax.scan, the fastest of the unrolls 1, 4 and 16",
    }


def races(results: Results) -> Results:
    """Return the pieces in which contenders took turns."""
    return {name: piece for name, piece in results["pieces"].items() if "samples" in piece}


def rows(title: str, results: Results, contenders: Sequence[str]) -> list[Row]:
    """Return a line of the table for each race, and each of the peers to show."""
    return [
        row
        for name, piece in races(results).items()
        for peer in to_show(piece, contenders)
        if (row := recurrent.row(f"{title}: {name}", piece, peer, OURS))
    ]


def to_show(piece: Results, contenders: Iterable[str]) -> list[str]:
    """Return the peers that took part, but PyTorch only in the mode in which it was faster."""
    modes = [mode for mode in (PYTORCH, FLUSHING) if mode in piece["samples"]]
    slower = sorted(modes, key=lambda mode: recurrent.quartiles(piece, mode)[1])[1:]
    return [peer for peer in contenders if peer in piece["samples"] and peer not in slower]


def in_both_modes(results: Results) -> list[Table]:
    """Return the table of PyTorch's times with subnormal numbers, and with zeros for them."""
    numbers = ["PyTorch, ms", "with set_flush_denormal, ms"]
    lines = [
        [name, *(significant(recurrent.quartiles(piece, mode, 1e-3)[1]) for mode in both)]
        for name, piece in races(results).items()
        if set(both := (PYTORCH, FLUSHING)) <= set(piece["samples"])
    ]
    return [Table(["step", *numbers], lines, numbers)] if lines else []


def _rows(results: Results) -> list[Row]:
    return rows("Training step", results, (PYTORCH, FLUSHING, JAX, EVERY))


def _drawings(results: Results) -> list[Drawing]:
    colors = {PYTORCH: BLUE, FLUSHING: SKY, JAX: GREEN, EVERY: ORANGE}
    return draw_races("Whole training steps", races(results), colors)


def draw_races(title: str, pieces: Results, peers: dict[str, str]) -> list[Drawing]:
    """How long peers, which have colours, take in multiples of our time; nothing without pieces."""
    if not pieces:
        return []
    figure, [[axes]] = drawing.panels(1, 1, 9, 0.9 + 0.5 * len(pieces))
    shown: set[str] = set()
    for y, piece in enumerate(pieces.values()):
        own = to_show(piece, peers)
        for k, peer in enumerate(own):
            low, middle, high = recurrent.speedup(piece, peer, OURS)
            at, color = y + 0.4 / len(own) * (2 * k + 1 - len(own)), peers[peer]
            axes.plot([low, high], [at, at], color=color, lw=1.2)
            label = peer if peer not in shown else None
            axes.plot(middle, at, "o", color=color, ms=6, label=label)
            axes.plot(piece["wanted"].get(peer, math.nan), at, "|", color=color, ms=12)
            shown.add(peer)
    axes.set_yticks(range(len(pieces)), list(pieces))
    axes.set(xscale="log", ylim=(len(pieces) - 0.4, -0.6), xlabel="time over ours")
    rows_of_bars(axes)
    legend(figure, [axes], len(shown), loc="outside upper center")
    caption = (
        f"{title}. Points are ratios of medians, bars what the quartiles allow, and ticks what is "
        "aimed at."
    )
    return [Drawing(title, caption, figure)]


EXPERIMENT = Experiment(
    name="step",
    title="Whole training steps",
    pieces=_pieces,
    about=_about,
    drawings=_drawings,
    rows=_rows,
    tables=in_both_modes,
)
