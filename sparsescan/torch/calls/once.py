"""Backward passes in kernels, which have no further derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .direct import is_mapped, is_transformed


class Once(torch.autograd.Function):
    """The graph of a backward pass without further derivatives: differentiating it raises."""

    @staticmethod
    def forward(
        ctx: Any, call: Callable[..., Any], arguments: Any, what: str, more: str, *tensors: Any
    ) -> tuple[Tensor, ...]:
        ctx.what, ctx.more = what, more
        return tuple(call(*arguments))

    @staticmethod
    def backward(ctx: Any, *above: Any) -> Any:
        raise RuntimeError(
            f"gradients of {ctx.what} of sparsescan were differentiated once more; expected one "
            f"backward pass: {ctx.more} have second derivatives"
        )


class Twice(torch.autograd.Function):
    """The graph of a backward pass that is recomputed if it is differentiated.

    `again` computes the results of `call` from the tensors, by differentiable operations. A None
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
        needs, has_graph = ctx.needs_input_grad[3:], torch.is_grad_enabled()
        with torch.enable_grad():
            given = list(map(_apart, ctx.saved_tensors))
            some = [each for each, need in zip(given, needs, strict=True) if need]
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


def gradients_of(
    run: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], above: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return the gradients in all tensors, with their own graphs.

    `above` are the gradients in the results of ``run(*tensors)``; None means zeros.
    """
    pull: Any
    if is_transformed():
        results, pull = torch.func.vjp(run, *tensors)[:2]
        return list(
            pull(
                tuple(
                    torch.zeros_like(result) if grad is None else grad
                    for result, grad in zip(results, above, strict=True)
                )
            )
        )
    with torch.enable_grad():
        given = [
            _apart(each) if each.requires_grad else each.detach().requires_grad_()
            for each in tensors
        ]
        pairs = [
            (result, grad)
            for result, grad in zip(run(*given), above, strict=True)
            if grad is not None and result.requires_grad
        ]
        found: Any = [None] * len(given)
        if pairs:
            outputs, grads = zip(*pairs, strict=True)
            found = torch.autograd.grad(outputs, given, grads, create_graph=True, allow_unused=True)
    return [
        torch.zeros_like(each) if grad is None else grad
        for each, grad in zip(given, found, strict=True)
    ]


def over_maps(call: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Return the results of a call; some arguments may be batches of gradients.

    It unpacks the innermost batch, whose tensors may be batches of an outer one.
    """
    flags = list(map(is_mapped, arguments))
    if not any(flags):
        return call(*arguments)
    level = _level_of_maps()
    while True:
        # A batch of another level gets a new axis of the given length.
        rows = [
            torch._remove_batch_dim(each, level, 0, 0) if flag else each
            for each, flag in zip(arguments, flags, strict=True)
        ]
        dims = tuple(
            0 if flag and len(row) else None for row, flag in zip(rows, flags, strict=True)
        )
        if any(dim is not None for dim in dims):
            break
        level -= 1
    parts = [
        each if dim is None else row for each, row, dim in zip(arguments, rows, dims, strict=True)
    ]

    def batch(result: Tensor) -> Tensor:
        # Forward mode needs the axis to be first in memory too.
        made: Tensor = torch._add_batch_dim(result.contiguous(), 0, level)
        return made

    results = torch.func.vmap(call, dims)(*parts)
    return batch(results) if isinstance(results, Tensor) else tuple(map(batch, results))


class Mappable(torch.autograd.Function):
    """A function whose arguments may be batches of gradients.

    It is mapped over them before it is applied: PyTorch records no graph inside such a batch.
    """

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        """Return the results, for each tensor of a batch."""
        return over_maps(super().apply, arguments)


def as_batch(call: Callable[[Tensor], list[Tensor | None]], tensor: Tensor) -> list[Any]:
    """Return the results of a call for a batch of gradients along a tensor's first axis."""
    level = _level_of_maps()
    results = call(torch._remove_batch_dim(tensor, level, 1, 0))
    return [None if each is None else torch._add_batch_dim(each, 0, level) for each in results]


def _level_of_maps() -> int:
    level: int = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def _apart(tensor: Tensor | None) -> Any:
    """Return a tensor that is computed from another one, without other dependants."""
    return None if tensor is None else tensor.view_as(tensor)
