"""Find out whether anybody needs the gradient in a masked weight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# The last input of a function that probes. A backward pass for all gradients reaches it; a pass for
# some gradients (`torch.autograd.grad`, or `backward` with `inputs`) does not.
probe = torch.zeros((), requires_grad=True, device="cpu")


def is_looked_at(weight: Tensor) -> bool:
    """Return whether a tensor keeps its gradient, or shows it to a hook."""
    return weight.requires_grad and bool(weight.retains_grad or weight._backward_hooks)


def asks_for_some(ctx: Any, nodes: Iterable[Any]) -> bool:
    """Return whether a pass for some gradients reaches one of these nodes."""
    edges = ctx.next_functions
    runs = torch._C._will_engine_execute_node
    last = edges[-1][0] if edges else None
    if last is None or getattr(last, "variable", None) is not probe or runs(last):
        return False
    return any(node is not None and runs(node) for node in nodes)
