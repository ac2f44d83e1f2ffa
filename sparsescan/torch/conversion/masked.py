"""Pruned weights: masks, which each call compares by content, and masked weights.

A call leaves lazy masked weights, which are computed when somebody uses them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ...execution.calls import call_all
from ...kernels.cpu.masks import count_changes
from ...locks import cached_property

# Entries of a mask per task.
_TASK = 1 << 18


class Kept:
    """The weights that a mask keeps.

    Attributes
    ----------
    shape : tuple of int
        Shape of the weights.
    """

    def __init__(self, is_kept: NDArray[np.bool_]) -> None:
        self.shape = is_kept.shape
        self._is_kept = is_kept.reshape(-1).astype(np.int8)

    @cached_property
    def count(self) -> int:
        """How many weights are kept."""
        return int(np.count_nonzero(self._is_kept))

    @cached_property
    def places(self) -> Tensor:
        """The places of kept weights among all, in order."""
        return torch.from_numpy(np.flatnonzero(self._is_kept))

    def full(self, values: Tensor | float, dtype: torch.dtype) -> Tensor:
        """Return an array in the weights' shape with these values, and zeros elsewhere."""
        array = torch.zeros(self.shape, dtype=dtype, device="cpu")
        array.view(-1)[self.places] = values
        return array

    def changes(self, mask: NDArray[Any]) -> tuple[list[partial[None]], NDArray[np.int64]]:
        """Return tasks that compare a mask, and the array in which they count changes."""
        ends = range(0, mask.size, _TASK)
        counts, entries = np.zeros(len(ends), np.int64), mask.reshape(-1)
        return [
            partial(count_changes, a, min(a + _TASK, mask.size), self._is_kept, entries, counts, k)
            for k, a in enumerate(ends)
        ], counts


# Equal masks share one object, as long as somebody holds it; by shape and bits.
_kept: weakref.WeakValueDictionary[Any, Kept] = weakref.WeakValueDictionary()


def kept_now(
    masks: Sequence[Tensor], dtype: torch.dtype, before: Sequence[Kept | None]
) -> list[Kept] | None:
    """Return which weights masks keep; None if a mask has values other than 0 and 1.

    Parameters
    ----------
    masks : sequence of Tensor
        The masks.
    dtype : dtype
        The dtype of the weights, to which masks are converted.
    before : sequence of Kept or None
        The result of the previous call, which is compared first.
    """
    arrays = [each.detach().to(dtype).contiguous().numpy() for each in masks]
    changes = [
        known.changes(array) if known is not None and known.shape == array.shape else ([], None)
        for array, known in zip(arrays, before, strict=True)
    ]
    call_all([task for tasks, _ in changes for task in tasks])
    kept: list[Kept] = []
    for array, known, (_, counts) in zip(arrays, before, changes, strict=True):
        own = known if counts is not None and not counts.any() else _kept_of(array)
        if own is None:
            return None
        kept.append(own)
    return kept


def _kept_of(mask: NDArray[Any]) -> Kept | None:
    is_kept = mask != 0
    if not (mask[is_kept] == 1).all():
        return None
    key = mask.shape, np.packbits(is_kept).tobytes()
    kept = _kept.get(key)
    return _kept.setdefault(key, Kept(is_kept)) if kept is None else kept


class Values:
    """The kept weights of a layer at one call.

    Attributes
    ----------
    kept : Kept
        The weights that its mask kept.
    kept_values : ndarray or None
        Their values, in order; None until the call has read them.
    """

    def __init__(self, kept: Kept, source: Tensor) -> None:
        self.kept = kept
        self.kept_values: NDArray[Any] | None = None
        self._source: Tensor | None = source.detach()
        self._dtype = source.dtype

    def set(self, values: NDArray[Any]) -> None:
        """Note the values of the call."""
        self.kept_values, self._source = values, None

    def full(self) -> Tensor:
        """Return the product of mask and weight."""
        if self._source is not None:
            return self.kept.full(1.0, self._dtype) * self._source
        assert self.kept_values is not None
        return self.kept.full(torch.from_numpy(self.kept_values), self._dtype)


class MaskedWeight(Tensor):
    """A lazy masked weight, without memory.

    PyTorch's hook computes the product of mask and weight at each call, though it is rarely used.
    Any use of this tensor turns it into a plain tensor with its graph, as PyTorch's would be.
    """

    pending: Values

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = [each for each in tree_leaves((args, kwargs)) if type(each) is MaskedWeight]
        for each in found:
            _compute(each)
        if found:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def is_untouched(weight: Any) -> bool:
    """Return whether a masked weight is still unused."""
    return type(weight) is MaskedWeight


def settle(weight: Any) -> None:
    """Turn an unused masked weight into a plain tensor."""
    if is_untouched(weight):
        _compute(weight)


def _compute(weight: MaskedWeight) -> None:
    """Turn a masked weight into a plain tensor, in place."""
    values = weight.pending
    del weight.pending
    weight.__class__ = Tensor  # type: ignore[assignment]
    with _disable_current_modes(), torch.inference_mode(weight.is_inference()):
        weight.data = values.full()


class _Product(torch.autograd.Function):
    """The product of a weight and its mask, for gradients that do not come from a call."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, values: Values) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.kept = values.kept
        return _nowhere(source)

    @staticmethod
    def backward(ctx: Any, above: Tensor | None) -> Any:
        return None if above is None else above * ctx.kept.full(1.0, above.dtype), None


def _nowhere(like: Tensor) -> Tensor:
    """Return a tensor in the shape of another, with memory for one number only."""
    one = torch.full((1,), torch.nan, dtype=like.dtype, device="cpu").numpy()
    array = np.lib.stride_tricks.as_strided(one, like.shape, (0,) * like.dim())
    return torch.from_numpy(array)


def masked_weight(source: Tensor, values: Values) -> MaskedWeight:
    """Return the product of a weight and its mask, with its graph."""
    weight: Any
    if torch.is_grad_enabled() and source.requires_grad:
        weight = _Product.apply(source, values)
    else:
        weight = _nowhere(source)
    weight.pending = values
    weight.__class__ = MaskedWeight
    masked: MaskedWeight = weight
    return masked
