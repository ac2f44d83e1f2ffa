"""Masked weights that a call leaves behind, which are computed when somebody looks at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from .masks import Kept


class Values:
    """The kept weights of a layer at one call.

    Attributes
    ----------
    kept : Kept
        What its mask kept.
    kept_values : ndarray or None
        Their values, in order; None before the call has read them.
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
    """A masked weight that has no memory yet.

    PyTorch's hook computes the product of mask and weight at each call, and few ever look at it.
    Whoever uses this in any way finds a plain tensor, with its graph, as if it had been computed.
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
    """Return whether nobody has used a masked weight yet."""
    return type(weight) is MaskedWeight


def settle(weight: Any) -> None:
    """Make a plain tensor of a masked weight that nobody has used yet."""
    if is_untouched(weight):
        _compute(weight)


def _compute(weight: MaskedWeight) -> None:
    """Make a plain tensor of a masked weight, in its place."""
    values = weight.pending
    del weight.pending
    weight.__class__ = Tensor  # type: ignore[assignment]
    with _disable_current_modes(), torch.inference_mode(weight.is_inference()):
        weight.data = values.full()


class _Product(torch.autograd.Function):
    """The product of a weight and its mask, for gradients that come from elsewhere than a call."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, values: Values) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.kept = values.kept
        return _nowhere(source)

    @staticmethod
    def backward(ctx: Any, above: Tensor | None) -> Any:
        return None if above is None else above * ctx.kept.full(1.0, above.dtype), None


def _nowhere(like: Tensor) -> Tensor:
    """Return a tensor of the shape of another that has memory for one number only."""
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
