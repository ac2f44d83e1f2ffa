"""Contenders of the map: modules, networks in JAX, pruned stacks and linear recurrences.

A race has ours and one peer, on the same numbers. Training is the forward pass and the backward
pass from a gradient of all outputs, into all parameters and inputs; inference keeps no graph.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import sparsescan.torch
from sparsescan import Pattern
from sparsescan.torch import affine_scan

from . import cell_scan, peers
from .cell_contenders import ONE_CORE, given_of, on_one_core
from .networks import prune_smallest
from .step import CELLS
from .timing import THREADS, Call

Array = NDArray[Any]
Arrays = dict[str, Array]

TRAINING, INFERENCE = "training", "inference"
# Entries of an input at a step.
INPUTS = 32
# Products with each of the two matrices in a step.
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4, "MGU": 2, "LiGRU": 2}
KINDS = tuple(GATES)
# Those whose peers are loops over steps.
TORCHRECURRENT = ("MGU", "LiGRU")
_UNROLLS = 1, 4, 16
# Multiply-adds of a training step, in those of a forward pass.
_OF_TRAINING = 3


class Way(NamedTuple):
    """One way of a contender to do the work.

    Attributes
    ----------
    call : callable
        Does it, and returns the outputs.
    clear : callable
        Makes ready for a call, and is not timed.
    within : callable
        Makes a context in which it is called: so many threads.
    """

    call: Call
    clear: Call
    within: Callable[[], AbstractContextManager[Any]]


class Contender(NamedTuple):
    """The ways of a contender by their names, and what is compared: arrays, from the outputs."""

    ways: Mapping[str, Way]
    read: Callable[[Any], Arrays]


class Race(NamedTuple):
    """Ours and a peer, and what says which kernel ours runs, if it can be asked."""

    ours: Contender
    theirs: Contender
    explained: Callable[[], Any]


class Point(Protocol):
    """A call of some sizes."""

    @property
    def name(self) -> str:
        """What it differs by from the others of its piece."""

    @property
    def work(self) -> int:
        """Multiply-adds of a call, as predicted."""

    def race(self) -> Race:
        """Return the contenders."""


def _work(forward: int, mode: str) -> int:
    return forward * (_OF_TRAINING if mode == TRAINING else 1)


# -- Modules of PyTorch ---------------------------------------------------------------------------


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Give PyTorch and our kernels so many threads."""
    before = torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS
    torch.set_num_threads(count)
    numba.config.NUMBA_NUM_THREADS = count
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        numba.config.NUMBA_NUM_THREADS = before[1]


def called(
    mode: str,
    run: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    grad: Tensor,
) -> tuple[Call, Call]:
    """Return what clears gradients of leaves, and a call of a function of inputs in a mode."""

    def clear() -> None:
        for leaf in leaves:
            leaf.grad = None

    def train() -> Tensor:
        output = run(*inputs)
        output.backward(grad)
        return output

    def infer() -> Tensor:
        with torch.inference_mode():
            return run(*inputs)

    return clear, train if mode == TRAINING else infer


def _contender(
    mode: str,
    run: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    grad: Tensor,
) -> Contender:
    """Return a contender of PyTorch, which leaves gradients in the leaves."""
    own = {name: each.clone() for name, each in inputs.items()}

    def read(output: Tensor) -> Arrays:
        leaves = {**own, **params} if mode == TRAINING else {}
        grads = {name: leaf.grad for name, leaf in leaves.items()}
        found = {name: each.numpy() for name, each in grads.items() if each is not None}
        assert len(found) == len(leaves), f"no gradients in {leaves.keys() - found.keys()}"
        return {"output": output.detach().numpy(), **found}

    for each in own.values():
        each.requires_grad_(mode == TRAINING)
    clear, call = called(mode, run, [*own.values()], [*own.values(), *params.values()], grad)
    ways = {f"{n} threads": Way(call, clear, partial(on_threads, n)) for n in (1, THREADS)}
    return Contender(ways, read)


def _of_modules(
    mode: str, ours: nn.Module, theirs: nn.Module, x: Tensor, run: Callable[[Any], Tensor]
) -> Race:
    """Return the race of two modules, one of which is converted; `run` takes their outputs."""
    done = sparsescan.torch.convert(ours)
    assert done.replaced == [""], done
    with torch.inference_mode():
        shape = run(theirs(x)).shape
    grad = torch.randn(shape)

    def contender(module: nn.Module) -> Contender:
        params = dict(module.named_parameters())
        return _contender(mode, lambda given: run(module(given)), {"x": x}, params, grad)

    def explained() -> Any:
        with torch.inference_mode(mode == INFERENCE):
            return sparsescan.torch.explain(ours, x.clone().requires_grad_(mode == TRAINING))

    return Race(contender(ours), contender(theirs), explained)


@dataclass(frozen=True)
class Recurrent:
    """A module over whole sequences, beside PyTorch's, or beside torchrecurrent's loop."""

    kind: str
    mode: str
    hidden: int
    batch: int
    steps: int
    both: bool = False  # directions

    @property
    def name(self) -> str:
        return f"T={self.steps}"

    @property
    def work(self) -> int:
        own = self.hidden * (self.hidden + INPUTS) * GATES[self.kind] * (1 + self.both)
        return _work(self.batch * self.steps * own, self.mode)

    def race(self) -> Race:
        torch.manual_seed(0)
        package: Any = nn
        if self.kind in TORCHRECURRENT:
            hint = "pip install torchrecurrent==0.2.5"
            package = peers.require("torchrecurrent", hint)
        options = {"bidirectional": True} if self.both else {}
        theirs = getattr(package, self.kind)(INPUTS, self.hidden, **options)
        x = torch.randn(self.steps, self.batch, INPUTS)
        return _of_modules(self.mode, copy.deepcopy(theirs), theirs, x, lambda out: out[0])


@dataclass(frozen=True)
class Stack:
    """A pruned stack of linear layers and ReLUs, beside the same one with PyTorch's pruning."""

    widths: tuple[int, ...]
    kept: float
    mode: str
    batch: int

    @property
    def name(self) -> str:
        return f"B={self.batch}"

    @property
    def work(self) -> int:
        pairs = zip(self.widths, self.widths[1:], strict=False)
        return _work(self.batch * sum(a * b for a, b in pairs), self.mode)

    def race(self) -> Race:
        ours, theirs = self._stack(), self._stack()
        x = torch.randn(self.batch, self.widths[0])
        race = _of_modules(self.mode, ours, theirs, x, lambda out: out)
        return race._replace(explained=nothing)

    def _stack(self) -> nn.Sequential:
        """Return the stack, with the same weights every time: it cannot be copied."""
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for pair in zip(self.widths, self.widths[1:], strict=False):
            layers += [nn.Linear(*pair), nn.ReLU()]
        stack = nn.Sequential(*layers[:-1])
        prune_smallest(stack, 1 - self.kept)
        return stack


# -- Linear recurrences ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Affine:
    """A linear recurrence, beside the loop over its steps."""

    is_diagonal: bool
    size: int
    mode: str
    batch: int
    steps: int

    @property
    def name(self) -> str:
        return f"T={self.steps}"

    @property
    def work(self) -> int:
        own = self.size if self.is_diagonal else self.size**2
        return _work(self.batch * self.steps * own, self.mode)

    def race(self) -> Race:
        torch.manual_seed(0)
        own = (self.size,) if self.is_diagonal else (self.size, self.size)
        lead = self.steps, self.batch
        inputs = {
            "matrices": torch.randn(*lead, *own) / (2 * math.sqrt(self.size)),
            "offsets": torch.randn(*lead, self.size),
            "initial": torch.randn(self.batch, self.size),
        }
        grad = torch.randn(*lead, self.size)
        pattern = Pattern.diagonal(self.size) if self.is_diagonal else None

        def scan(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
            return affine_scan(a, b, y, pattern=pattern)

        loop = _diagonal_loop if self.is_diagonal else _dense_loop
        ours, theirs = (_contender(self.mode, run, inputs, {}, grad) for run in (scan, loop))
        return Race(ours, theirs, nothing)


def _diagonal_loop(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    states = []
    for a_t, b_t in zip(a, b, strict=True):
        y = a_t * y + b_t
        states.append(y)
    return torch.stack(states)


def _dense_loop(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    states = []
    for a_t, b_t in zip(a, b[..., None], strict=True):
        y = torch.baddbmm(b_t, a_t, y[..., None])[..., 0]
        states.append(y)
    return torch.stack(states)


def nothing() -> None:
    """Explain nothing: there is one kernel."""


# -- JAX ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InJax(Recurrent):
    """A recurrent network under ``jax.jit``, beside ``jax.lax.scan`` over its cell."""

    def race(self) -> Race:
        jax = peers.load_jax()
        from sparsescan.jax import recurrent

        cell = CELLS[self.kind](INPUTS, self.hidden, rng=0)
        given = given_of(cell, self.steps, self.batch)
        arrays = jax.device_put((dict(cell.params), given.x, given.state, given.grad))

        def outputs(params: Any, x: Any, state: Any) -> Any:
            return recurrent(cell, params, x, state[None])[0]

        def jitted(function: Any) -> Call:
            is_training = self.mode == TRAINING
            run = jax.jit(cell_scan.with_gradients(function) if is_training else function)
            own = arrays if is_training else arrays[:3]
            return lambda: jax.block_until_ready(run(*own))

        def scan(unroll: int, is_packed: bool) -> Call:
            return jitted(cell_scan.outputs(cell, unroll, is_packed))

        name, fastest = cell_scan.fastest(scan, [n for n in _UNROLLS if n <= self.steps])
        ours = jitted(outputs)
        mine = {f"{n} threads": Way(ours, nothing, partial(on_threads, n)) for n in (1, THREADS)}
        theirs = {
            name: Way(fastest, nothing, partial(on_one_core, False)),
            f"{name}, {ONE_CORE}": Way(fastest, nothing, partial(on_one_core, True)),
        }
        return Race(Contender(mine, self._read), Contender(theirs, self._read), nothing)

    def _read(self, output: Any) -> Arrays:
        if self.mode == INFERENCE:
            return {"output": np.asarray(output)}
        output, (params, x, state) = output
        found = {"output": output, "x": x, "state": state, **params}
        return {name: np.asarray(each) for name, each in found.items()}
