"""Many gradients at once: an ensemble, one gradient for each sample, and a very long series."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

import sparsescan.torch

from . import races
from .experiment import Results
from .peers import PYTORCH
from .races import OURS
from .timing import THREADS, Call

LOOP, FREE = "sparsescan, a loop", "sparsescan, no limit"
_STEPS, _INPUTS, _HIDDEN = 500, 12, 20


def _on_threads(call: Callable[[], Any]) -> dict[str, Call]:
    def run(threads: int) -> Any:
        torch.set_num_threads(threads)
        return call()

    return {f"{n} threads": partial(run, n) for n in (THREADS, 1)}


def _converted(module: nn.Module) -> nn.Module:
    ours = copy.deepcopy(module)
    sparsescan.torch.convert(ours)
    return ours


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()


@dataclass(frozen=True)
class Ensemble:
    """The gradients of some models of one shape, for one batch."""

    models: int = 32
    batch: int = 4

    @property
    def name(self) -> str:
        return f"an ensemble of {self.models} GRU({_INPUTS}, {_HIDDEN}), B={self.batch}, T={_STEPS}"

    def measure(self, quick: bool) -> Results:
        """Return the times of gradients in all parameters of all models."""
        torch.manual_seed(0)
        theirs = [nn.GRU(_INPUTS, _HIDDEN) for _ in range(self.models)]
        ours = [_converted(each) for each in theirs]
        x = torch.randn(_STEPS, self.batch, _INPUTS)
        params, _ = stack_module_state(ours)
        of_all = vmap(grad(lambda own, x: _loss(functional_call(ours[0], own, (x,))[0])), (0, None))

        def loop(models: list[nn.Module]) -> list[Any]:
            return [
                torch.autograd.grad(_loss(model(x)[0]), list(model.parameters()))
                for model in models
            ]

        makers = {
            OURS: lambda: _on_threads(lambda: of_all(params, x)),
            PYTORCH: lambda: _on_threads(lambda: loop(theirs)),
            LOOP: lambda: _on_threads(lambda: loop(ours)),
        }
        return races.timed(makers, {PYTORCH: 40, LOOP: 3}, quick)


@dataclass(frozen=True)
class EachSample:
    """The gradients in all parameters of one model, one for each sample."""

    samples: int = 64

    @property
    def name(self) -> str:
        return f"gradients of each of {self.samples} samples, GRU({_INPUTS}, {_HIDDEN}), T={_STEPS}"

    def measure(self, quick: bool) -> Results:
        """Return the times of all gradients."""
        torch.manual_seed(0)
        theirs = nn.GRU(_INPUTS, _HIDDEN)
        ours = _converted(theirs)
        x = torch.randn(self.samples, _STEPS, _INPUTS)
        params = dict(ours.named_parameters())
        of_each = vmap(grad(lambda own, x: _loss(functional_call(ours, own, (x,))[0])), (None, 0))

        def loop() -> list[Any]:
            every = list(theirs.parameters())
            return [torch.autograd.grad(_loss(theirs(one)[0]), every) for one in x]

        makers = {
            OURS: lambda: _on_threads(lambda: of_each(params, x)),
            PYTORCH: lambda: _on_threads(loop),
        }
        return races.timed(makers, {PYTORCH: 20}, quick)


@dataclass(frozen=True)
class Series:
    """A very long series of one sample, within a limit of memory beside inputs and outputs."""

    steps: int = 2_000_000
    hidden: int = 32
    limit: int = 512 << 20

    @property
    def name(self) -> str:
        within = f"within {self.limit >> 20} MiB"
        return f"GRU(1, {self.hidden}), B=1, T={self.steps:,}, {within}"

    def measure(self, quick: bool) -> Results:
        """Return the times of a forward and a backward pass."""
        torch.manual_seed(0)
        free = sparsescan.torch.GRU(1, self.hidden)
        limited = copy.deepcopy(free)
        limited.memory_limit = self.limit
        x = torch.randn(self.steps, 1, 1)
        above = torch.ones(self.steps, 1, self.hidden)

        def call(model: nn.Module) -> Any:
            return torch.autograd.grad(model(x)[0], list(model.parameters()), above)

        makers = {
            OURS: lambda: _on_threads(lambda: call(limited)),
            FREE: lambda: _on_threads(lambda: call(free)),
        }
        return races.timed(makers, {FREE: 1 / 1.6}, quick, few=True)


MANY = Ensemble(), EachSample(), Series()
