"""Backward passes by kernels, which have no derivatives of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .direct import is_mapped, is_transformed


class Once(torch.autograd.Function):
    """The graph of a backward pass, which ends there, and says so."""

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
    """Return the gradients in all tensors, with graphs of their own.

    `above` are those in the results of ``run(*tensors)``; None stands for zeros.
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
    """Return the results of a call with arguments, some of which may be batches of gradients.

    The innermost batch is taken apart; its tensors may be batches of an outer one.
    """
    flags = list(map(is_mapped, arguments))
    if not any(flags):
        return call(*arguments)
    level = _level_of_maps()
    while True:
        # A batch of another level gets an axis of the length that is passed.
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
        # Forward mode asks for an axis that is the first one in memory, too.
        made: Tensor = torch._add_batch_dim(result.contiguous(), 0, level)
        return made

    results = torch.func.vmap(call, dims)(*parts)
    return batch(results) if isinstance(results, Tensor) else tuple(map(batch, results))


class Mappable(torch.autograd.Function):
    """A function of which arguments may be batches of gradients.

    It is mapped over them before it is applied: PyTorch sees no graph of what is in such a batch.
    """

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        """Return the results, those of each tensor of a batch."""
        return over_maps(super().apply, arguments)


def as_batch(call: Callable[[Tensor], list[Tensor | None]], tensor: Tensor) -> list[Any]:
    """Return the results of a call with a batch of gradients, along the first axis of a tensor."""
    level = _level_of_maps()
    results = call(torch._remove_batch_dim(tensor, level, 1, 0))
    return [None if each is None else torch._add_batch_dim(each, 0, level) for each in results]


def _level_of_maps() -> int:
    level: int = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def _apart(tensor: Tensor | None) -> Any:
    """Return a tensor that is computed from another one, and that no third one depends on."""
    return None if tensor is None else tensor.view_as(tensor)
