"""Many gradients at once: an ensemble, one gradient for each sample, and a very long series."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

import sparsescan.torch

from . import races
from .experiment import Results
from .peers import PYTORCH, in_threads
from .races import OURS

LOOP, FREE = "sparsescan, a loop", "sparsescan, no limit"
_STEPS, _INPUTS, _HIDDEN = 500, 12, 20
_MODELS, _BATCH, _SAMPLES = 32, 4, 64
# Of a very long series of one sample; the limit is of memory beside inputs and outputs.
_LONG, _WIDE, _LIMIT = 2_000_000, 32, 512 << 20


def _converted(module: nn.Module) -> nn.Module:
    ours = copy.deepcopy(module)
    sparsescan.torch.convert(ours)
    return ours


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()


def ensemble(quick: bool) -> Results:
    """Return the times of gradients in all parameters of some models of one shape."""
    torch.manual_seed(0)
    theirs = [nn.GRU(_INPUTS, _HIDDEN) for _ in range(_MODELS)]
    ours = [_converted(each) for each in theirs]
    x = torch.randn(_STEPS, _BATCH, _INPUTS)
    params, _ = stack_module_state(ours)
    of_all = vmap(grad(lambda own, x: _loss(functional_call(ours[0], own, (x,))[0])), (0, None))

    def loop(models: list[nn.Module]) -> list[Any]:
        return [
            torch.autograd.grad(_loss(model(x)[0]), list(model.parameters())) for model in models
        ]

    makers = {
        OURS: lambda: in_threads(lambda: of_all(params, x)),
        PYTORCH: lambda: in_threads(lambda: loop(theirs)),
        LOOP: lambda: in_threads(lambda: loop(ours)),
    }
    return races.timed(makers, {PYTORCH: 40, LOOP: 3}, quick)


def each_sample(quick: bool) -> Results:
    """Return the times of gradients in all parameters of one model, one for each sample."""
    torch.manual_seed(0)
    theirs = nn.GRU(_INPUTS, _HIDDEN)
    ours = _converted(theirs)
    x = torch.randn(_SAMPLES, _STEPS, _INPUTS)
    params = dict(ours.named_parameters())
    of_each = vmap(grad(lambda own, x: _loss(functional_call(ours, own, (x,))[0])), (None, 0))

    def loop() -> list[Any]:
        every = list(theirs.parameters())
        return [torch.autograd.grad(_loss(theirs(one)[0]), every) for one in x]

    makers = {
        OURS: lambda: in_threads(lambda: of_each(params, x)),
        PYTORCH: lambda: in_threads(loop),
    }
    return races.timed(makers, {PYTORCH: 20}, quick)


def series(quick: bool) -> Results:
    """Return the times of a forward and a backward pass within a limit of memory."""
    torch.manual_seed(0)
    free = sparsescan.torch.GRU(1, _WIDE)
    limited = copy.deepcopy(free)
    limited.memory_limit = _LIMIT
    x, above = torch.randn(_LONG, 1, 1), torch.ones(_LONG, 1, _WIDE)

    def call(model: nn.Module) -> Any:
        return torch.autograd.grad(model(x)[0], list(model.parameters()), above)

    makers = {
        OURS: lambda: in_threads(partial(call, limited)),
        FREE: lambda: in_threads(partial(call, free)),
    }
    return races.timed(makers, {FREE: 1 / 1.6}, quick, few=True)


MANY: dict[str, Callable[[bool], Results]] = {
    f"an ensemble of {_MODELS} GRU({_INPUTS}, {_HIDDEN}), B={_BATCH}, T={_STEPS}": ensemble,
    f"gradients of each of {_SAMPLES} samples, GRU({_INPUTS}, {_HIDDEN}), T={_STEPS}": each_sample,
    f"GRU(1, {_WIDE}), B=1, T={_LONG:,}, within {_LIMIT >> 20} MiB": series,
}
