"""What a backward pass needs of its arguments, and what only another one does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from .direct import has_saving_hooks
from .shapes import Shape
from .times import KINDS


@lru_cache(maxsize=256)
def needed(
    shape: Shape,
    needs: tuple[bool, ...],
    states: int,
    *,
    is_long: bool,
    is_copied: bool,
    is_fused: bool,
) -> tuple[bool, ...]:
    """Return which arguments must not change before the first backward pass of a network.

    They are those that PyTorch's own networks save. Gradients do not depend on others, or a copy is
    kept: these only have to be there for another backward pass, which runs forward again.

    Parameters
    ----------
    shape : Shape
        The network.
    needs : tuple of bool
        Which of the input, the initial states and the parameters have gradients.
    states : int
        How many tensors of initial states there are.
    is_long : bool
        Whether there is more than one step.
    is_copied : bool
        Whether a copy of the input is kept.
    is_fused : bool
        Whether PyTorch has one operator for all, which saves everything.
    """
    is_again = shape.memory_limit >= 0 or shape.truncate >= 0
    if shape.mode not in KINDS or is_again or (is_fused and shape.mode == "LSTM"):
        return (True,) * len(needs)
    x, begin, weights = needs[0], needs[1 : 1 + states], needs[1 + states :]
    each = len(weights) // (shape.num_layers * shape.directions)
    found, flows = [], x
    for layer in range(shape.num_layers):
        rows = shape.directions * each
        own = weights[layer * rows : (layer + 1) * rows]
        has_graph = flows or any(own) or any(begin)
        for _ in range(shape.directions):
            biases = [False] * (each - 2)
            found += [flows, any(begin) or (is_long and has_graph), *biases]
        flows = has_graph
    into = any(weights[place * each] for place in range(shape.directions))
    hidden = any(weights[1::each])
    gates = x or any(begin[:1]) or any(weights)
    return into and not is_copied, *(hidden, gates)[:states], *found


def save(ctx: Any, tensors: Sequence[Any], flags: Sequence[bool]) -> None:
    """Keep tensors for backward passes; those without a flag may change before the first one."""
    if has_saving_hooks():  # which want to see all
        flags = [True] * len(tensors)
    pairs = list(zip(tensors, flags, strict=True))
    ctx.flags = [flag or each is None or each.is_inference() for each, flag in pairs]
    ctx.save_for_backward(*(each for each, flag in zip(tensors, ctx.flags, strict=True) if flag))
    ctx.others = [
        (each, each._version) for each, flag in zip(tensors, ctx.flags, strict=True) if not flag
    ]


def saved(ctx: Any) -> list[Any]:
    """Return all tensors, unless one with a flag has changed."""
    first, others = iter(ctx.saved_tensors), iter(ctx.others)
    return [next(first) if flag else next(others)[0] for flag in ctx.flags]


def check_others(ctx: Any) -> None:
    """Raise if a tensor without a flag has changed."""
    for tensor, version in ctx.others:
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {tuple(tensor.shape)} is at version "
                f"{tensor._version}; expected version {version} instead, since another backward "
                "pass, or a second derivative, runs forward again"
            )


# Whether PyTorch computes with oneDNN, in single precision.
HAS_FUSED: bool = torch.backends.mkldnn.is_available()
