"""Front doors beside what they take the place of: modules of PyTorch, and loops of JAX.

A step of a module is all that a user of PyTorch waits for: forward, loss, backward, and Adam.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import sparsescan.torch
from sparsescan import Pattern, affine_scan, affine_scan_vjp
from sparsescan.recurrent import GRU

from . import peers, step, step_networks
from .drawing import BLUE, GREEN, ORANGE, PINK, SKY
from .experiment import Drawing, Experiment, Options, Piece, Results, Row, cpu_only
from .peers import FLUSHING, PYTORCH
from .timing import THREADS, Call

Array = NDArray[Any]

OURS, JAX = step.OURS, step.JAX
NUMPY = "sparsescan, NumPy calls"
ASSOCIATIVE, DOUBLING = "jax.lax.associative_scan", "PyTorch, by doubling"
# The recurrence to which one with an impulse is compared.
OFFSETS = "sparsescan, offsets at every step"
# A jitted call may take 1.15 times as long as calls with NumPy's arrays.
_AS_NUMPY = 1 / 1.15
# An impulse may take 1.1 times as long as offsets at every step.
_AS_OFFSETS = 1 / 1.1
_CALLS = 2000


# -- Modules --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Module:
    """A recurrent network, its sequences, and the ratio that is asked for.

    The loss is one of all outputs, or of the `last_only`: of packed sequences it is then one of the
    last layer's final states.
    """

    kind: str
    hidden: int
    wanted: float
    options: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    inputs: int = 12
    steps: int = 1000
    batch: int = 16
    last_only: bool = False

    @property
    def name(self) -> str:
        last = step.AT_LAST if self.last_only else ""
        two = ", two layers, both directions" if self.options else ""
        lengths = f"T={self.steps // 10} to {self.steps:,}" if self.packed else f"T={self.steps:,}"
        return f"{self.kind}({self.inputs}, {self.hidden}){two}, B={self.batch}, {lengths}{last}"

    def both(self, wanted: float | None = None) -> tuple[Module, Module]:
        """Return it, and that of a loss at the last step, of which another ratio may be wanted."""
        return self, replace(self, last_only=True, wanted=wanted or self.wanted)

    def measure(self, quick: bool) -> Results:
        """Return the times of training steps."""
        torch.manual_seed(0)
        theirs = getattr(nn, self.kind)(self.inputs, self.hidden, **self.options)
        ours = copy.deepcopy(theirs)
        sparsescan.torch.convert(ours)
        x = torch.randn(self.steps, self.batch, self.inputs)
        lengths = torch.linspace(self.steps // 10, self.steps, self.batch).long()
        width = self.hidden * (2 if theirs.bidirectional else 1)
        head = nn.Linear(width, 2)

        def loss(module: nn.Module, head: nn.Module) -> Any:
            given = pack_padded_sequence(x, lengths, enforce_sorted=False) if self.packed else x
            output, state = module(given)
            if self.last_only and self.packed:
                h_n = state[0] if self.kind == "LSTM" else state
                output = torch.cat(tuple(h_n[-width // self.hidden :]), dim=-1)
            elif self.last_only:
                output = output[-1]
            elif self.packed:
                output = output.data
            return head(output).square().mean()

        pytorch = peers.in_both_modes(partial(_trained, theirs, head, loss), apart=self.last_only)
        makers = {OURS: partial(_trained, ours, head, loss), **pytorch}
        wanted = dict.fromkeys(pytorch, self.wanted)
        # A step of PyTorch's through packed sequences takes seconds.
        return step.timed(makers, wanted, quick, few=self.packed)


def _trained(
    module: nn.Module, head: nn.Module, loss: Callable[[nn.Module, nn.Module], Any]
) -> dict[str, Call]:
    """Return a step by each Adam of PyTorch, for the threads that it may be given."""
    head = copy.deepcopy(head)
    params = [*module.parameters(), *head.parameters()]

    def call(threads: int, optimiser: torch.optim.Adam) -> None:
        torch.set_num_threads(threads)
        optimiser.zero_grad()
        loss(module, head).backward()
        optimiser.step()

    optimisers = {"Adam": torch.optim.Adam(params), "fused": torch.optim.Adam(params, fused=True)}
    return {
        f"{n} threads, {name}": partial(call, n, optimiser)
        for n in (THREADS, 1)
        for name, optimiser in optimisers.items()
    }


_BOTH = {"num_layers": 2, "bidirectional": True}
MODULES = (
    *Module("GRU", 20, 20).both(25),
    *Module("GRU", 64, 6).both(),
    *Module("LSTM", 20, 6).both(4),
    *Module("LSTM", 20, 5, _BOTH).both(),
    *Module("LSTM", 20, 20, _BOTH, packed=True).both(),
)


@dataclass(frozen=True)
class Stack:
    """A pruned network that ``convert`` takes, as :mod:`bench.step_networks` makes it."""

    case: step_networks.NetworkCase

    @property
    def name(self) -> str:
        return self.case.name

    def measure(self, quick: bool) -> Results:
        """Return the times of training steps."""
        race = self.case.race()
        theirs = race.module
        ours = sparsescan.torch.Sequential(*theirs.children())
        x = torch.from_numpy(race.x)
        labels = torch.arange(len(x)) % 10

        def loss(module: nn.Module, _: nn.Module) -> Any:
            return nn.functional.cross_entropy(module(x), labels)

        makers = {
            OURS: partial(_trained, ours, nn.Identity(), loss),
            PYTORCH: partial(_trained, theirs, nn.Identity(), loss),
        }
        return step.timed(makers, self.case.wanted, quick)


# Residual blocks are no stacks.
STACKS = tuple(Stack(case) for case in step_networks.NETWORKS if case.kind in ("VGG-11", "MLP"))


# -- Networks in JAX ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Jitted:
    """A recurrent network in JAX: value and gradients of a jitted loss."""

    case: step.Case

    @property
    def name(self) -> str:
        case = self.case
        net = f"{case.kind}({case.inputs}, {case.hidden}) in JAX"
        last = step.AT_LAST if case.last_only else ""
        return f"{net}, B={case.batch}, T={case.steps:,}{last}"

    def measure(self, quick: bool) -> Results:
        """Return the times of values and gradients."""
        race = self.case.race()
        assert race.jax is not None
        makers = {OURS: partial(self.ours, race), NUMPY: race.ours, JAX: race.jax}
        return step.timed(makers, {NUMPY: _AS_NUMPY, JAX: self.case.jax}, quick)

    def ours(self, race: Any) -> dict[str, Call]:
        jax = peers.load_jax()
        from sparsescan.jax import recurrent

        def loss(params: Any, x: Any, state: Any, grad: Any) -> Any:
            return race.loss(recurrent(race.net, params, x, state)[0], grad)

        gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
        given = jax.device_put((dict(race.net.params), race.x, race.state, race.grad))
        return {"jit": lambda: jax.block_until_ready(gradients(*given))}


NETWORKS = tuple(map(Jitted, step.Case("GRU", 12, 20, 16, 1000, 1.0, 1.5).both()))


# -- Linear recurrences ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Recurrence:
    """A linear recurrence in JAX, and the ratios that are asked for."""

    steps: int
    size: int
    batch: int
    is_diagonal: bool
    wanted: dict[str, float]
    is_constant: bool = False

    @property
    def name(self) -> str:
        kind = "diagonal" if self.is_diagonal else "dense"
        kind = f"one {kind}" if self.is_constant else kind
        return f"affine_scan, {kind} {self.size}×{self.size}, B={self.batch}, T={self.steps:,}"

    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """Return matrices, offsets, the first state, and gradients in all states."""
        rng = np.random.default_rng(0)
        lead, own = (self.steps, self.batch), (self.size,) * (1 if self.is_diagonal else 2)
        shape = own if self.is_constant else (*lead, *own)
        a = rng.standard_normal(shape, np.float32) / (2 * math.sqrt(own[0]))
        b, loss = (rng.standard_normal((*lead, self.size), np.float32) for _ in range(2))
        return a, b, np.zeros((self.batch, self.size), np.float32), loss

    def measure(self, quick: bool) -> Results:
        """Return the times of forward and backward passes."""
        makers: dict[str, Callable[[], dict[str, Call]]] = {
            OURS: self.ours,
            NUMPY: self.numpy,
            JAX: partial(self.jax, associative=False),
        }
        if not self.is_constant:
            makers[ASSOCIATIVE] = partial(self.jax, associative=True)
        if self.is_diagonal and not self.is_constant:
            makers[DOUBLING] = self.doubling
        return step.timed(makers, self.wanted, quick)

    def ours(self) -> dict[str, Call]:
        jax = peers.load_jax()
        from sparsescan.jax import affine_scan as scan

        *given, loss = jax.device_put(self.arrays())
        shape = self.steps, *given[0].shape

        def value(a: Any, b: Any, y0: Any) -> Any:
            a = jax.numpy.broadcast_to(a, shape) if self.is_constant else a
            return (scan(a, b, y0, pattern=self._pattern) * loss).sum()

        gradients = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2)))
        return {"jit": lambda: jax.block_until_ready(gradients(*given))}

    def numpy(self) -> dict[str, Call]:
        a, b, y0, loss = self.arrays()
        a = np.broadcast_to(a, (self.steps, *a.shape)) if self.is_constant else a

        def call() -> Any:
            y = affine_scan(a, b, y0, pattern=self._pattern)
            return affine_scan_vjp(a, y0, y, loss, pattern=self._pattern)

        return {"NumPy": call}

    @property
    def _pattern(self) -> Pattern | None:
        return Pattern.diagonal(self.size) if self.is_diagonal else None

    def jax(self, associative: bool) -> dict[str, Call]:
        jax = peers.load_jax()
        jnp, lax = jax.numpy, jax.lax
        *given, loss = jax.device_put(self.arrays())

        def apply(a: Any, y: Any) -> Any:
            return a * y if self.is_diagonal else jnp.einsum("...ij,...j->...i", a, y)

        def combine(first: Any, second: Any) -> Any:
            (a, b), (later, c) = first, second
            product = later * a if self.is_diagonal else later @ a
            return product, apply(later, b) + c

        def states(a: Any, b: Any, y0: Any, unroll: int) -> Any:
            if associative:
                b = b.at[0].add(apply(a[0], y0))
                return lax.associative_scan(combine, (a, b))[1]

            def body(y: Any, each: Any) -> Any:
                y = apply(each[0], y) + each[1]
                return y, y

            if self.is_constant:
                return lax.scan(lambda y, each: body(y, (a, each)), y0, b, unroll=unroll)[1]
            return lax.scan(body, y0, (a, b), unroll=unroll)[1]

        def variant(unroll: int) -> Call:
            def value(a: Any, b: Any, y0: Any) -> Any:
                return (states(a, b, y0, unroll) * loss).sum()

            gradients = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2)))
            return lambda: jax.block_until_ready(gradients(*given))

        return {f"unroll={n}": variant(n) for n in ((1,) if associative else (1, 4, 16))}

    def doubling(self) -> dict[str, Call]:
        """Return PyTorch's: pairs, then fours, …, are joined, all at once."""
        *arrays, loss = (torch.from_numpy(each) for each in self.arrays())
        given = [each.requires_grad_() for each in arrays]

        def call(threads: int) -> Any:
            torch.set_num_threads(threads)
            a, b, y0 = given
            y = torch.cat([b[:1] + a[:1] * y0, b[1:]])
            k = 1
            while k < self.steps:
                y = torch.cat([y[:k], y[k:] + a[k:] * y[:-k]])
                a = torch.cat([a[:k], a[k:] * a[:-k]])
                k *= 2
            return torch.autograd.grad(y, given, loss)

        return {f"{n} threads": partial(call, n) for n in (THREADS, 1)}


def _like_a_filter(is_constant: bool) -> tuple[Recurrence, ...]:
    sizes = (2000, 16, 4), (1000, 64, 16), (20_000, 64, 1)
    wanted = (
        {JAX: 1.5} if is_constant else {JAX: 1.5, NUMPY: _AS_NUMPY, ASSOCIATIVE: 1, DOUBLING: 1}
    )
    return tuple(Recurrence(*each, True, wanted, is_constant) for each in sizes)


RECURRENCES = (
    Recurrence(1000, 20, 16, False, {JAX: 1.5, NUMPY: _AS_NUMPY, ASSOCIATIVE: 10}),
    *_like_a_filter(is_constant=False),
    *_like_a_filter(is_constant=True),
    Recurrence(100_000, 1, 1, True, {JAX: 1, ASSOCIATIVE: 1, DOUBLING: 1}),
    Recurrence(100_000, 64, 1, True, {JAX: 1, ASSOCIATIVE: 1, DOUBLING: 1}),
)


@dataclass(frozen=True)
class Impulse:
    """A linear recurrence whose states decay from the first offset past all normal numbers."""

    steps: int
    size: int
    dtype: str

    @property
    def name(self) -> str:
        size = f"diagonal {self.size}×{self.size}"
        return f"affine_scan, a decaying impulse, {size}, B=1, T={self.steps:,}, {self.dtype}"

    def arrays(self) -> tuple[Array, Array, Array]:
        """Return diagonals, random offsets, and those of which all but the first are zero."""
        rng, shape = np.random.default_rng(0), (self.steps, 1, self.size)
        decay = rng.uniform(0.9, 0.99, shape)
        # The smallest normal number of float64 is near the eighth power of float32's.
        decay = decay**8 if self.dtype == "float64" else decay
        a = (decay * rng.choice([-1, 1], shape)).astype(self.dtype)
        b = rng.standard_normal(shape).astype(self.dtype)
        impulse = np.zeros_like(b)
        impulse[0] = b[0]
        return a, b, impulse

    def measure(self, quick: bool) -> Results:
        """Return the times of the states, from an impulse and from offsets at every step."""
        a, b, impulse = self.arrays()
        pattern = Pattern.diagonal(self.size)
        makers: dict[str, peers.Variants] = {
            OURS: lambda: {"NumPy": partial(affine_scan, a, impulse, pattern=pattern)},
            OFFSETS: lambda: {"NumPy": partial(affine_scan, a, b, pattern=pattern)},
        }
        return step.timed(makers, {OFFSETS: _AS_OFFSETS}, quick)


IMPULSES = tuple(Impulse(5000, 1024, dtype) for dtype in ("float32", "float64"))


# -- The operator ---------------------------------------------------------------------------------


class _Empty(torch.autograd.Function):
    """A function of tensors that computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*params)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *(torch.empty_like(param) for param in ctx.saved_tensors))


def measure_overhead(calls: int) -> Results:
    """Time a tiny network by the module, by the operator of a compiled graph, and by the step.

    Beside the step, the module takes time for PyTorch's graph, and for the way from tensors to
    arrays and back; the operator also for PyTorch's dispatcher.

    Returns
    -------
    dict
        ``seconds`` of a call without a graph, and ``seconds_with_gradients`` of one with the
        gradients in the parameters, where a function of these tensors that computes nothing is a
        peer: alone, and in turns with the step, as a training step calls both.
    """
    net = sparsescan.torch.GRU(3, 4)
    x, params = torch.randn(2, 1, 3), list(net.parameters())
    array, grad = x.numpy(), torch.ones(2, 1, 4)
    step, above = GRU(3, 4).training_step(), grad.numpy()
    about: tuple[Any, ...] = (x, None, None, params, [], net.mode, 4, 1, True, False)
    operators = torch.ops.sparsescan

    def gradients(output: torch.Tensor) -> None:
        torch.autograd.grad(output, params, grad)

    def run_step() -> None:
        step.forward(array)
        step.backward(above, needs_input_grad=False)

    def run_empty() -> None:
        gradients(_Empty.apply(grad, *params))

    with torch.no_grad():
        alone = {
            "module": _each(lambda: net(x), calls),
            "operator": _each(lambda: operators.recurrent_forward(*about, False), calls),
            "training step": _each(lambda: step.forward(array), calls),
        }
    both = {
        "module": _each(lambda: gradients(net(x)[0]), calls),
        "operator": _each(lambda: gradients(operators.recurrent(*about, True)[0]), calls),
        "training step": _each(run_step, calls),
        "empty function": _each(run_empty, calls),
        "training step, then empty function": _each(lambda: (run_step(), run_empty()), calls),
    }
    return {"seconds": alone, "seconds_with_gradients": both}


def _each(call: Call, times: int) -> float:
    for _ in range(times // 10):
        call()
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(times // 5):
            call()
        samples.append((time.perf_counter() - start) / (times // 5))
    return float(np.median(samples))


# -- The experiment -------------------------------------------------------------------------------


def _pieces(options: Options) -> Iterable[Piece]:
    cpu_only("doors", options)
    quick = *MODULES[:2], RECURRENCES[0], IMPULSES[0]
    every = *MODULES, *STACKS, *NETWORKS, *RECURRENCES, *IMPULSES
    for case in quick if options.quick else every:
        yield Piece(case.name, partial(case.measure, options.quick))
    calls = _CALLS // 10 if options.quick else _CALLS
    yield Piece("overhead of a call", partial(measure_overhead, calls))


def _about(options: Options) -> Results:
    return {
        "a step": "of modules of PyTorch: forward pass, a loss, backward pass and Adam; in JAX: a "
        "loss, and its gradients in all that enters; of recurrent networks the loss is one of all "
        "outputs or of the last one; float32",
        "an impulse": "affine_scan alone, called with NumPy's arrays: offsets of zero but in the "
        "first step, beside offsets at every step",
        "PyTorch": "for both the faster of 2 threads or 1, and of Adam or fused Adam; masks prune; "
        "recurrent networks with torch.set_flush_denormal and without, and if the loss is at the "
        "last step, a ratio is to the faster and both are in a table",
        "JAX": "jitted value_and_grad; of lax.scan the fastest of the unrolls 1, 4 and 16",
    }


def _rows(results: Results) -> list[Row]:
    contenders = PYTORCH, FLUSHING, JAX, NUMPY, ASSOCIATIVE, DOUBLING, OFFSETS
    return step.rows("Front door", results, contenders)


def _drawings(results: Results) -> list[Drawing]:
    colors = {PYTORCH: BLUE, FLUSHING: SKY, JAX: GREEN, NUMPY: "grey"}
    colors |= {ASSOCIATIVE: ORANGE, DOUBLING: "black", OFFSETS: PINK}
    return step.draw_races("Front doors", step.races(results), colors)


EXPERIMENT = Experiment(
    name="doors",
    title="Front doors: modules of PyTorch, networks and linear recurrences of JAX",
    pieces=_pieces,
    about=_about,
    drawings=_drawings,
    rows=_rows,
    tables=step.in_both_modes,
)
