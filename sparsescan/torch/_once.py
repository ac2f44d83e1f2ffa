"""Backward passes that have no derivatives of their own, and say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Once"]


class Once(torch.autograd.Function):
    """The graph of a backward pass, which ends there."""

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
