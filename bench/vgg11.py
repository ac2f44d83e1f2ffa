"""The gradients of a pruned VGG-11, of which Figure 10 of the paper counts the work.

97% of the weights of every convolution are pruned by magnitude. The convolutional part is a chain
of 21 sparse Jacobians. Its backward pass is timed beside loops over the same Jacobians, and beside
PyTorch's dense one. ``docs/gallery/plot_flop_of_steps.py`` counts the FLOP of each step.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

from sparsescan import Schedule
from sparsescan.jacobians import Sequential, from_torch

from . import races
from .contests import exact_gradients
from .experiment import Drawing, Experiment, Piece, Results, Row
from .networks import copied, prune_smallest, vgg11
from .peers import scipy_batch_loops
from .races import OURS
from .timing import Call

PRUNED = 0.97
# Convolutions, their ReLUs, and max-pools; and the levels of the paper's up-sweep (section 5.3).
STEPS, UP_LEVELS = 21, 2
SCIPY, TORCH, TORCH_PARAMETERS = "SciPy", "PyTorch, dense", "PyTorch, dense, with parameters"
VALUES, PARAMETERS = f"{OURS}, with values", f"{OURS}, with values and parameters"
UP_SWEEP = f"{OURS}, the paper's schedule"
_BATCHES = (1, 16)


def network() -> torch.nn.Sequential:
    """Return the convolutional part with random weights, pruned."""
    torch.manual_seed(0)
    whole = vgg11()
    prune_smallest(whole, PRUNED)
    return whole[:STEPS]


def operators(features: torch.nn.Sequential) -> Sequential:
    return Sequential(from_torch(features, (3, 32, 32)))


# -- The backward pass ----------------------------------------------------------------------------


def measure(batch: int, quick: bool) -> Results:
    """Time all gradients of the convolutional part, by the planner's schedule and the paper's.

    Some contenders make the values of the Jacobians, or the gradients of the parameters as well.
    """
    features = network()
    net = operators(features)
    images = torch.randn(batch, 3, 32, 32)
    xs = net.activations(images.numpy())
    values = net.values(xs)
    jacobians = net.jacobians(xs)
    grad = np.random.default_rng(0).standard_normal((batch, net.patterns[0].shape[1]), np.float32)
    plan = net.plan(batch=batch, dtype=np.float32)
    buffers = [np.empty_like(each) for each in values]

    def with_values() -> Any:
        return plan.exclusive_scan(grad, net.values(xs, out=buffers))

    def with_parameters() -> Any:
        grads = with_values()
        return [*grads, net.param_grads(xs, grads)]

    def by_paper() -> dict[str, Call]:
        tree = Schedule.truncated(STEPS, UP_LEVELS)
        other = net.plan(schedule=tree, batch=batch, dtype=np.float32)
        return {"plan": partial(other.exclusive_scan, grad, values)}

    makers = {
        OURS: lambda: {"plan": partial(plan.exclusive_scan, grad, values)},
        VALUES: lambda: {"values into out=, plan": with_values},
        PARAMETERS: lambda: {"values, plan, param_grads": with_parameters},
        SCIPY: lambda: scipy_batch_loops(grad, jacobians),
        TORCH: lambda: _torch(features, images, grad, parameters=False),
        TORCH_PARAMETERS: lambda: _torch(features, images, grad, parameters=True),
    }
    if batch == 1:  # for more images its products would take gigabytes
        makers[UP_SWEEP] = by_paper

    def differences(calls: dict[str, Call]) -> dict[str, float]:
        exact, found = exact_gradients(grad, jacobians), {}
        right = {f"activation {k}": x for k, x in enumerate(exact)}
        for name, call in calls.items():
            grads = call()[:STEPS]
            if name == SCIPY:
                grads = [np.stack(x) if isinstance(x, list) else x.T for x in grads]
            elif name in (TORCH, TORCH_PARAMETERS):
                grads = [grad, *grads[: STEPS - 1]]
            own = dict(zip(right, map(np.asarray, grads), strict=True))
            found[name] = max(races.apart(own, right).values())
        return found

    return races.timed(makers, {}, quick, differences)


def _torch(
    features: torch.nn.Sequential, images: torch.Tensor, grad: Any, *, parameters: bool
) -> dict[str, Call]:
    """Gradients of all activations but the first, from the last to the first, and of parameters."""

    def variant(form: torch.memory_format) -> Call:
        own = copied(features).to(memory_format=form)
        x, xs = images.contiguous(memory_format=form), list[torch.Tensor]()
        for layer in own:
            x = layer(x)
            xs.append(x)
        sources = [*xs[-2::-1], *(own.parameters() if parameters else ())]
        above = torch.from_numpy(grad).reshape(x.shape).contiguous(memory_format=form)
        return lambda: torch.autograd.grad(x, sources, above, retain_graph=True)

    return {str(form)[6:]: variant(form) for form in (torch.contiguous_format, torch.channels_last)}


# -- The experiment -------------------------------------------------------------------------------


def _pieces(quick: bool) -> Iterable[Piece]:
    for batch in _BATCHES[:1] if quick else _BATCHES:
        yield Piece(f"backward, B={batch}", partial(measure, batch, quick))


def _about(quick: bool) -> Results:
    return {
        "pruned": f"{PRUNED:.0%} of the weights of every convolution, by magnitude",
        "dtype": "float32",
    }


def _backward(results: Results) -> Results:
    """Return the races of backward passes, be they alone or among other works of a piece."""
    return {
        key.removeprefix("backward, "): piece
        if "samples" in piece
        else {"samples": piece["works"]["backward"]["samples_seconds"]}
        for key, piece in results["pieces"].items()
        if key.startswith("backward, ")
    }


def _rows(results: Results) -> list[Row]:
    rows = []
    for batch, piece in _backward(results).items():
        for what, ours, peer in (
            ("gradients, values known", OURS, SCIPY),
            ("gradients", VALUES, TORCH),
            ("gradients and those of parameters", PARAMETERS, TORCH_PARAMETERS),
        ):
            rows += races.row(f"pruned VGG-11, {batch}: {what}", piece, peer, ours)
    return rows


def _drawings(results: Results) -> list[Drawing]:
    more = (
        "All gradients of the activations but the images, where it is said with the values of the "
        "Jacobians or with the gradients of the parameters, over those of our plan with values."
    )
    return races.draw("The whole backward pass", _backward(results), more)


EXPERIMENT = Experiment("vgg11", "Pruned VGG-11", _pieces, _about, _drawings, _rows)
