"""Saved arguments: those for the first backward pass, and those only for later ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from .direct import has_saving_hooks
from .shapes import Shape
from .times import KINDS


@lru_cache(maxsize=256)
def free_places(
    shape: Shape,
    needs: tuple[bool, ...],
    states: int,
    *,
    is_long: bool,
    is_copied: bool,
    is_fused: bool,
) -> tuple[int, ...]:
    """Return the places of arguments that may change before the first backward pass of a network.

    PyTorch's own networks do not save them. The first gradients do not depend on them, or a copy is
    kept. Only a second backward pass needs them unchanged, since it runs forward again.

    Parameters
    ----------
    shape : Shape
        The network.
    needs : tuple of bool
        Which of the input, the initial states and the parameters have gradients.
    states : int
        The number of tensors of initial states.
    is_long : bool
        Whether there is more than one step.
    is_copied : bool
        Whether a copy of the input is kept.
    is_fused : bool
        Whether PyTorch has one fused operator, which saves everything.
    """
    if shape.mode not in KINDS or shape.options.is_bounded or (is_fused and shape.mode == "LSTM"):
        return ()
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
    saved = into and not is_copied, *(hidden, gates)[:states], *found
    return tuple(place for place, is_saved in enumerate(saved) if not is_saved)


def save(ctx: Any, tensors: Sequence[Any], free: Sequence[int]) -> None:
    """Keep tensors for backward passes; those at `free` places may change before the first one."""
    kept, others = list(tensors), []
    if free and not has_saving_hooks():  # hooks that observe all saved tensors
        for place in free:
            each = kept[place]
            if each is not None and not each.is_inference():
                kept[place] = None
                others.append((place, each, each._version))
    ctx.others = others
    ctx.save_for_backward(*kept)


def saved(ctx: Any) -> list[Any]:
    """Return all tensors; raise if one has changed that must not change."""
    tensors = list(ctx.saved_tensors)
    for place, each, _ in ctx.others:
        tensors[place] = each
    return tensors


def check_others(ctx: Any) -> None:
    """Raise if a tensor that was free to change has changed."""
    for _, tensor, version in ctx.others:
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {tuple(tensor.shape)} is at version "
                f"{tensor._version}; expected version {version} instead, since another backward "
                "pass, or a second derivative, runs forward again"
            )


# Whether PyTorch computes with oneDNN, in single precision.
HAS_FUSED: bool = torch.backends.mkldnn.is_available()
