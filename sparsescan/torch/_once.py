"""Backward passes by kernels, which have no derivatives of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Once", "Twice"]


class Once(torch.autograd.Function):
    """The graph of a backward pass, which ends there, and says so."""

    @staticmethod
    def forward(
        ctx: Any, call: Callable[..., Any], arguments: Any, what: str, *tensors: Any
    ) -> tuple[Tensor, ...]:
        ctx.what = what
        return tuple(call(*arguments))

    @staticmethod
    def backward(ctx: Any, *above: Any) -> Any:
        raise RuntimeError(
            f"gradients of {ctx.what} of sparsescan were differentiated once more; expected one "
            "backward pass: torch.nn's has second derivatives"
        )


class Twice(torch.autograd.Function):
    """The graph of a backward pass that is computed again where it is differentiated.

    `again` computes what `call` does, from the tensors, by operations that have derivatives; None
    among the tensors stays None.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Callable[..., Any], arguments: Any, again: Callable[..., Any], *tensors: Any
    ) -> tuple[Tensor, ...]:
        ctx.again = again
        ctx.save_for_backward(*tensors)
        return tuple(call(*arguments))

    @staticmethod
    def backward(ctx: Any, *above: Any) -> Any:
        needs, given = ctx.needs_input_grad[3:], ctx.saved_tensors
        some = [each for each, need in zip(given, needs, strict=True) if need]
        has_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            results = ctx.again(*given)
        pairs = [
            (result, grad)
            for result, grad in zip(results, above, strict=True)
            if grad is not None and result.requires_grad
        ]
        found: Any = [None] * len(some)
        if pairs:
            outputs, grads = zip(*pairs, strict=True)
            found = torch.autograd.grad(
                outputs, some, grads, create_graph=has_graph, allow_unused=True
            )
        each = iter(found)
        return (None, None, None, *(next(each) if need else None for need in needs))
