"""Front doors beside what they take the place of: modules of PyTorch, filters, and loops of JAX.

A step of a module is all that a user of PyTorch waits for: forward, loss, backward, and Adam.
"""

from __future__ import annotations

import copy
import math
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

from . import networks, peers, races, statespace, step
from .experiment import Experiment, Piece, Results
from .many import MANY
from .peers import PYTORCH
from .races import JAX, OURS
from .timing import Call

Array = NDArray[Any]

NUMPY = "sparsescan, NumPy calls"
MAMBAPY = "mambapy.pscan"
ASSOCIATIVE, DOUBLING = "jax.lax.associative_scan", "PyTorch, by doubling"
_IN_JAX = OURS, JAX, ASSOCIATIVE
# A jitted call may take 1.15 times as long as calls with NumPy's arrays.
_AS_NUMPY = 1 / 1.15


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
        return races.timed(makers, wanted, quick, few=self.packed)


def _trained(
    module: nn.Module, head: nn.Module, loss: Callable[[nn.Module, nn.Module], Any]
) -> dict[str, Call]:
    """Return a step by each Adam of PyTorch, for the threads that it may be given."""
    head = copy.deepcopy(head)
    params = [*module.parameters(), *head.parameters()]

    def call(optimiser: torch.optim.Adam) -> None:
        optimiser.zero_grad()
        loss(module, head).backward()
        optimiser.step()

    plain = peers.in_threads(partial(call, torch.optim.Adam(params)), ", Adam")
    return plain | peers.in_threads(partial(call, torch.optim.Adam(params, fused=True)), ", fused")


_BOTH = {"num_layers": 2, "bidirectional": True}
MODULES = (
    *Module("GRU", 20, 20).both(25),
    *Module("GRU", 64, 6).both(),
    *Module("LSTM", 20, 6).both(4),
    *Module("LSTM", 20, 5, _BOTH).both(),
    *Module("LSTM", 20, 20, _BOTH, packed=True).both(),
)


def measure_stack(case: networks.NetworkCase, quick: bool) -> Results:
    """Return the times of training steps of a pruned network that ``convert`` takes."""
    race = case.race()
    ours = sparsescan.torch.sequential.Sequential(*race.module.children())
    x = torch.from_numpy(race.x)
    labels = torch.arange(len(x)) % 10

    def loss(module: nn.Module, _: nn.Module) -> Any:
        return nn.functional.cross_entropy(module(x), labels)

    makers = {
        OURS: partial(_trained, ours, nn.Identity(), loss),
        PYTORCH: partial(_trained, race.module, nn.Identity(), loss),
    }
    return races.timed(makers, case.wanted, quick)


# -- Networks in JAX ------------------------------------------------------------------------------


def measure_jitted(case: step.Case, quick: bool) -> Results:
    """Return the times of value and gradients of a jitted loss of a network."""
    race = case.race()

    def ours() -> dict[str, Call]:
        peers.load_jax()
        from sparsescan.jax import recurrent

        def loss(params: Any, x: Any, state: Any, grad: Any) -> Any:
            return race.loss(recurrent(race.net, params, x, state)[0], grad)

        return {"jit": _jitted(loss, dict(race.net.params), race.x, race.state, race.grad)}

    makers = {OURS: ours, NUMPY: race.ours, JAX: race.jax}
    return races.timed(makers, {NUMPY: _AS_NUMPY, JAX: case.jax}, quick)


def _jitted(loss: Callable[..., Any], *given: Any) -> Call:
    """Return a call for a loss and its gradients in the first three of what it is given."""
    jax = peers.load_jax()
    gradients, given = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))), jax.device_put(given)
    return lambda: jax.block_until_ready(gradients(*given))


# -- Linear recurrences ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Recurrence:
    """A linear recurrence in JAX, and the ratios that are asked for."""

    steps: int
    size: int
    batch: int
    is_diagonal: bool
    wanted: dict[str, float]

    @property
    def name(self) -> str:
        kind = "diagonal" if self.is_diagonal else "dense"
        return f"affine_scan, {kind} {self.size}×{self.size}, B={self.batch}, T={self.steps:,}"

    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """Return matrices, offsets, the first state, and gradients in all states."""
        rng = np.random.default_rng(0)
        lead, own = (self.steps, self.batch), (self.size,) * (1 if self.is_diagonal else 2)
        a = rng.standard_normal((*lead, *own), np.float32) / (2 * math.sqrt(own[0]))
        b, loss = (rng.standard_normal((*lead, self.size), np.float32) for _ in range(2))
        return a, b, np.zeros((self.batch, self.size), np.float32), loss

    def measure(self, quick: bool) -> Results:
        """Return the times of forward and backward passes."""
        makers: dict[str, peers.Variants] = {
            OURS: self.ours,
            NUMPY: self.numpy,
            JAX: partial(self.jax, associative=False),
            ASSOCIATIVE: partial(self.jax, associative=True),
        }
        if self.is_diagonal:
            makers[DOUBLING] = self.doubling
        return races.timed(makers, self.wanted, quick, self._differences)

    def _differences(self, calls: dict[str, Call]) -> dict[str, float]:
        # JAX has the loss before its gradients.
        found = {who: call()[1] if who in _IN_JAX else call() for who, call in calls.items()}
        names = "matrices", "offsets", "initial"
        return races.apart_from_ours(
            {who: dict(zip(names, grads, strict=True)) for who, grads in found.items()}
        )

    def ours(self) -> dict[str, Call]:
        peers.load_jax()
        from sparsescan.jax import affine_scan as scan

        return {"jit": self._of_states(partial(scan, pattern=self._pattern))}

    def _of_states(self, states: Callable[..., Any]) -> Call:
        """Return a call for gradients of a loss of what a function makes in JAX."""

        def value(a: Any, b: Any, y0: Any, loss: Any) -> Any:
            return (states(a, b, y0) * loss).sum()

        return _jitted(value, *self.arrays())

    def numpy(self) -> dict[str, Call]:
        a, b, y0, loss = self.arrays()

        def call() -> Any:
            y = affine_scan(a, b, y0, pattern=self._pattern)
            grads = affine_scan_vjp(a, initial=y0, states=y, grads=loss, pattern=self._pattern)
            return grads.matrices, grads.offsets, grads.initial

        return {"NumPy": call}

    @property
    def _pattern(self) -> Pattern | None:
        return Pattern.diagonal(self.size) if self.is_diagonal else None

    def jax(self, associative: bool) -> dict[str, Call]:
        jax = peers.load_jax()
        jnp, lax = jax.numpy, jax.lax

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

            return lax.scan(body, y0, (a, b), unroll=unroll)[1]

        unrolls = (1,) if associative else (1, 4, 16)
        return {f"unroll={n}": self._of_states(partial(states, unroll=n)) for n in unrolls}

    def doubling(self) -> dict[str, Call]:
        """Return PyTorch's: pairs, then fours, …, are joined, all at once."""
        *arrays, loss = (torch.from_numpy(each) for each in self.arrays())
        given = [each.requires_grad_() for each in arrays]

        def call() -> Any:
            a, b, y0 = given
            y = torch.cat([b[:1] + a[:1] * y0, b[1:]])
            k = 1
            while k < self.steps:
                y = torch.cat([y[:k], y[k:] + a[k:] * y[:-k]])
                a = torch.cat([a[:k], a[k:] * a[:-k]])
                k *= 2
            return torch.autograd.grad(y, given, loss)

        return peers.in_threads(call)


_FILTER = {JAX: 1.5, NUMPY: _AS_NUMPY, ASSOCIATIVE: 1, DOUBLING: 1}
_LONG = {JAX: 1, ASSOCIATIVE: 1, DOUBLING: 1}
RECURRENCES = (
    Recurrence(1000, 20, 16, False, {JAX: 1.5, NUMPY: _AS_NUMPY, ASSOCIATIVE: 10}),
    Recurrence(2000, 16, 4, True, _FILTER),
    Recurrence(1000, 64, 16, True, _FILTER),
    Recurrence(20_000, 64, 1, True, _FILTER),
    Recurrence(100_000, 1, 1, True, _LONG),
    Recurrence(100_000, 64, 1, True, _LONG),
)


# -- Selective scans ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selective:
    """A selective state space model in PyTorch, and the ratios that are asked for.

    Each contender has its inputs in the layout that it is written for.
    """

    batch: int
    channels: int
    states: int
    steps: int
    wanted: dict[str, float]

    @property
    def name(self) -> str:
        size = f"D={self.channels}, N={self.states}"
        return f"selective_scan, {size}, B={self.batch}, L={self.steps:,}"

    def tensors(self, channels_last: bool = False) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return `u`, `delta`, `A`, `B`, `C` and `D`, and the gradients in the outputs."""
        rng = np.random.default_rng(0)

        def normal(*shape: int) -> Array:
            return rng.standard_normal(shape, np.float32)

        u, delta, loss = (normal(self.batch, self.channels, self.steps) for _ in range(3))
        b, c = (normal(self.batch, self.states, self.steps) for _ in range(2))
        a = -np.broadcast_to(
            np.arange(1, self.states + 1, dtype=np.float32), (self.channels, self.states)
        )
        delta = np.log1p(np.exp(delta - 3))
        in_time = [u, delta, b, c, loss]
        if channels_last:
            in_time = [each.swapaxes(1, 2) for each in in_time]
        u, delta, b, c, loss = (torch.from_numpy(each.copy()) for each in in_time)
        own = [u, delta, torch.from_numpy(a.copy()), b, c, torch.ones(self.channels)]
        return [each.requires_grad_() for each in own], loss

    def measure(self, quick: bool) -> Results:
        """Return the times of forward and backward passes."""
        makers = {OURS: self.ours, PYTORCH: self.loops, MAMBAPY: self.mambapy}
        return races.timed(makers, self.wanted, quick, self._differences, few=True)

    def _differences(self, calls: dict[str, Call]) -> dict[str, float]:
        found: dict[str, dict[str, Any]] = {}
        for who, call in calls.items():
            grads = dict(zip(["u", "delta", "A", "B", "C", "D"], call(), strict=True))
            if who == MAMBAPY:
                grads |= {name: grads[name].mT for name in ("u", "delta", "B", "C")}
            found[who] = grads
        return races.apart_from_ours(found)

    def _passes(self, scan: Callable[..., torch.Tensor], last: bool = False) -> dict[str, Call]:
        given, loss = self.tensors(channels_last=last)
        return peers.in_threads(lambda: torch.autograd.grad(scan(*given), given, loss))

    def ours(self) -> dict[str, Call]:
        return self._passes(sparsescan.torch.selective_scan)

    def loops(self) -> dict[str, Call]:
        """Return loops over steps, of which all are prepared at once, or each by itself."""

        def at_once(u: Any, delta: Any, a: Any, b: Any, c: Any, d: Any) -> torch.Tensor:
            decays = torch.exp(torch.einsum("bdl,dn->lbdn", delta, a))
            added = torch.einsum("bdl,bnl->lbdn", delta * u, b)
            return _outputs(zip(decays.unbind(), added.unbind(), c.unbind(-1), strict=True), u, d)

        def each(u: Any, delta: Any, a: Any, b: Any, c: Any, d: Any) -> torch.Tensor:
            pushed = (delta * u).unbind(-1)
            steps = zip(delta.unbind(-1), pushed, b.unbind(-1), c.unbind(-1), strict=True)
            made = (
                (torch.exp(size[..., None] * a), push[..., None] * row[:, None], read)
                for size, push, row, read in steps
            )
            return _outputs(made, u, d)

        return {
            f"{name}, {threads}": call
            for name, scan in {"all exponentials at once": at_once, "step by step": each}.items()
            for threads, call in self._passes(scan).items()
        }

    def mambapy(self) -> dict[str, Call]:
        hint = "pip install --no-deps mambapy==1.2.0"
        pscan = peers.require("mambapy.pscan", hint).pscan

        def scan(u: Any, delta: Any, a: Any, b: Any, c: Any, d: Any) -> torch.Tensor:
            added = (delta * u).unsqueeze(-1) * b.unsqueeze(2)
            states = pscan(torch.exp(delta.unsqueeze(-1) * a), added)
            out: torch.Tensor = (states @ c.unsqueeze(-1)).squeeze(3) + d * u
            return out

        return self._passes(scan, last=True)


def _outputs(steps: Iterable[Any], u: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Return the outputs, from decays, what is added to states, and how they are read."""
    state: Any = 0.0
    outputs = []
    for decay, added, read in steps:
        state = decay * state + added
        outputs.append((state @ read.unsqueeze(-1)).squeeze(-1))
    return torch.stack(outputs, -1) + d[:, None] * u


SELECTIVE = (Selective(4, 256, 16, 512, {PYTORCH: 6, MAMBAPY: 4}),)


# -- Recursive filters ----------------------------------------------------------------------------

TORCHAUDIO, TORCHLPC, PHILTORCH = "torchaudio", "torchlpc", "philtorch"


@dataclass(frozen=True)
class Filter:
    """A recursive filter, all of whose input has gradients, and the ratios that are asked for."""

    order: int
    changes: bool
    wanted: dict[str, float]
    batch: int = 32
    steps: int = 4096

    @property
    def name(self) -> str:
        changes = ", other coefficients at each step" if self.changes else ""
        return f"lfilter of order {self.order}{changes}, B={self.batch}, T={self.steps:,}"

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return coefficients, of which ``a_0`` is 1, samples, and gradients in the results."""
        torch.manual_seed(0)
        lead = (self.batch, self.steps) if self.changes else ()
        b = torch.randn(*lead, self.order + 1)
        a = torch.randn(*lead, self.order + 1) / (4 * self.order)
        a[..., 0] = 1
        x, grads = (torch.randn(self.batch, self.steps) for _ in range(2))
        return b.requires_grad_(), a.requires_grad_(), x.requires_grad_(), grads

    def measure(self, quick: bool) -> Results:
        """Return the times of forward and backward passes."""
        makers = {OURS: self.ours, TORCHLPC: self.torchlpc, PHILTORCH: self.philtorch}
        if not self.changes:
            makers[TORCHAUDIO] = self.torchaudio
        return races.timed(makers, self.wanted, quick)

    def _variants(self, call: Callable[..., Any], name: str = "") -> dict[str, Call]:
        """Return calls, for the threads that PyTorch may be given, whose results are checked."""
        b, a, x, grads = self.tensors()
        right = sparsescan.torch.lfilter(b, a, x)
        if not torch.allclose(call(b, a, x), right, rtol=1e-3, atol=1e-4):
            raise AssertionError(f"{name or OURS}: another result")

        return peers.in_threads(lambda: torch.autograd.grad(call(b, a, x), (b, a, x), grads), name)

    def ours(self) -> dict[str, Call]:
        return self._variants(sparsescan.torch.lfilter)

    def torchaudio(self) -> dict[str, Call]:
        functional = peers.require("torchaudio.functional", "pip install torchaudio")

        def call(b: Any, a: Any, x: Any) -> Any:
            return functional.lfilter(x, a, b, clamp=False)

        return self._variants(call)

    def torchlpc(self) -> dict[str, Call]:
        lpc = peers.require("torchlpc", "pip install torchlpc").sample_wise_lpc

        def call(b: Any, a: Any, x: Any) -> Any:
            padded = nn.functional.pad(x, (self.order, 0))
            if self.changes:
                sums = (padded.unfold(1, self.order + 1, 1) * b.flip(-1)).sum(-1)
            else:
                sums = nn.functional.conv1d(padded[:, None], b.flip(0)[None, None])[:, 0]
            return lpc(sums, a[..., 1:].expand(self.batch, self.steps, -1))

        return self._variants(call)

    def philtorch(self) -> dict[str, Call]:
        room = "lpv" if self.changes else "lti"
        lfilter = peers.require(f"philtorch.{room}", "pip install philtorch").lfilter
        backends = {"lpv": ("ssm", "torchlpc"), "lti": ("ssm",)}[room]

        def call(backend: str, b: Any, a: Any, x: Any) -> Any:
            return lfilter(b, a[..., 1:], x, form="df1", backend=backend)

        return {
            name: each
            for backend in backends
            for name, each in self._variants(partial(call, backend), f", {backend}").items()
        }


_ALL = {TORCHAUDIO: 3, TORCHLPC: 1, PHILTORCH: 1}
FILTERS = tuple(
    Filter(
        order, changes, {name: ratio for name, ratio in _ALL.items() if not changes or ratio == 1}
    )
    for order in (2, 8)
    for changes in (False, True)
)


# -- The experiment -------------------------------------------------------------------------------


def _pieces(quick: bool) -> Iterable[Piece]:
    every: dict[str, Callable[[bool], Results]] = {each.name: each.measure for each in MODULES}
    # Residual blocks are no stacks.
    stacks = [case for case in networks.NETWORKS if case.kind in ("VGG-11", "MLP")]
    every |= {case.name: partial(measure_stack, case) for case in stacks}
    for case in step.Case("GRU", 12, 20, 16, 1000, jax=1.5).both():
        last = step.AT_LAST * case.last_only
        name = f"{case.kind}({case.inputs}, {case.hidden}) in JAX, B={case.batch}"
        every[f"{name}, T={case.steps:,}{last}"] = partial(measure_jitted, case)
    every |= {each.name: each.measure for each in RECURRENCES} | MANY
    chains = *statespace.MODELS, *statespace.HIDDEN
    every |= {each.name: each.measure for each in (*SELECTIVE, *FILTERS, *chains)}
    few = [each.name for each in (*MODULES[:2], RECURRENCES[0], *SELECTIVE, FILTERS[0])]
    for name, measure in every.items():
        if name in few or not quick:
            yield Piece(name, partial(measure, quick))


def _about(quick: bool) -> Results:
    return {
        "a step": "of modules of PyTorch: forward pass, a loss, backward pass and Adam; in JAX: a "
        "loss, and its gradients in all that enters; of recurrent networks the loss is one of all "
        "outputs or of the last one; float32",
        "PyTorch": "for both the faster of 2 threads or 1, and of Adam or fused Adam; masks prune; "
        "recurrent networks with torch.set_flush_denormal and without, and if the loss is at the "
        "last step, a ratio is to the faster and both are in a table",
        "filters": "of direct form I: forward and backward pass, for gradients in all coefficients "
        "and samples, a_0 being 1; for all the faster of 2 threads or 1, of philtorch that of its "
        "backends, too; sums of samples before torchlpc by PyTorch's convolution or products",
        "Kalman filters": "the log-likelihood, and gradients in five matrices; float64; alone, and "
        "of statsmodels, there are no gradients",
        "hidden Markov models": "the log-likelihood, and gradients in emissions and probabilities; "
        "float64; lax.scan by logarithms; of hmmlearn the posteriors, which are the first gradient",
        "JAX": "jitted value_and_grad; of lax.scan the fastest of the unrolls 1, 4 and 16; of "
        "Kalman filters and hidden Markov models of 1 and 4",
    }


EXPERIMENT = Experiment(
    "doors",
    "Front doors: modules, scans and filters of PyTorch, networks and recurrences of JAX",
    _pieces,
    _about,
    partial(races.drawings, "Front doors"),
    partial(races.rows, "Front door"),
    races.in_both_modes,
)
