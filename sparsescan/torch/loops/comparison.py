"""A forward pass both ways: what it calls, what it returns, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...capture.equations import NotCaptured
from ..capture.functions import Onlooker
from .bodies import LENGTHS

# How many roundings of the largest number results may differ by.
_ROUNDINGS = 1024


class Calls(Onlooker):
    """Counts calls of functions of PyTorch, and adds up the numbers that they get."""

    sums: dict[Any, tuple[int, float]]

    def __enter__(self) -> Any:
        self.sums = {}
        return super().__enter__()

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(call, "__name__", "") != "__get__":  # fake tensors have attributes of their own
            count, total = self.sums.get(call, (0, 0.0))
            self.sums[call] = count + 1, total + _total(args) + _total(kwargs or {})
        return call(*args, **(kwargs or {}))


def _total(given: Any) -> float:
    kind = type(given)
    if kind in (int, float):
        return float(given)
    if kind in (tuple, list, torch.Size):
        return sum(map(_total, given))
    if kind is dict:
        return sum(map(_total, given.values()))
    return _total((given.start, given.stop, given.step)) if kind is slice else 0.0


def check_calls(short: Sequence[Calls], long: Calls, length: int) -> None:
    """Raise unless the calls of a long forward pass are as many as those of short ones foretell.

    Sums of numbers are quadratic in the length if numbers are affine in the step.
    """
    for call in {*long.sums, *(each for own in short for each in own.sums)}:
        columns = zip(*(each.sums.get(call, (0, 0.0)) for each in (*short, long)), strict=True)
        for a, b, c, found in columns:
            k = length - LENGTHS[0]
            foretold = a + (b - a) * k + (c - 2 * b + a) * k * (k - 1) / 2
            if not math.isclose(found, foretold, rel_tol=1e-9, abs_tol=1e-9):
                name = getattr(call, "__qualname__", str(call))
                raise NotCaptured(f"{name}, which longer loops call otherwise than short ones")


def check_same(theirs: Sequence[Any], ours: Sequence[Any]) -> None:
    """Raise unless results are the same up to rounding."""
    for k, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if a is None or b is None:
            if a is not b:
                raise NotCaptured(f"result {k} is None in one way, and not in the other")
            continue
        about = [(each.shape, each.dtype, each.stride(), each.requires_grad) for each in (a, b)]
        if about[0] != about[1]:
            raise NotCaptured(f"result {k} has {about[1]}, and not {about[0]}")
        _check_close(f"result {k}", a.detach(), b.detach(), 0.0)


class Moved(Onlooker):
    """Lets a forward pass read tensors with other numbers in place of some.

    Floats are moved by about 2% of their root mean square, or by 0.02 where they are zeros, and
    keep their sign where all are positive. Integers and truth values are drawn between the least
    and the greatest.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._random = torch.Generator().manual_seed(0)
        self._twins: dict[int, Tensor] = {}
        self._given = {id(each): each for each in tensors}

    def _moved(self, own: Tensor) -> Tensor:
        about: dict[str, Any] = {"generator": self._random}
        if not own.numel() or own.is_complex():
            return own
        if not own.is_floating_point():
            least, most = int(own.min()), int(own.max())
            if own.dtype == torch.bool:
                least, most = 0, 1
            return torch.randint(least, most + 1, own.shape, **about).to(own.dtype)
        wide = own.double()
        by = torch.randn(own.shape, dtype=torch.float64, **about) / 64
        new = wide + by * (float(wide.square().mean().sqrt()) or 1.0)
        return (new.abs() if bool((own >= 0).all()) else new).to(own.dtype)

    def twin(self, given: Any) -> Any:
        """Return what is read in place of a tensor; others stay."""
        own = self._given.get(id(given))
        if own is None:
            return given
        if id(own) not in self._twins:
            self._twins[id(own)] = self._moved(own.detach()).requires_grad_(own.requires_grad)
        return self._twins[id(own)]

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(*pytree.tree_map(self.twin, args), **pytree.tree_map(self.twin, kwargs or {}))


def check_gradients(theirs: Sequence[Any], ours: Sequence[Any], wrt: Sequence[Tensor]) -> None:
    """Raise unless gradients of results are the same up to rounding."""
    both = [(a, b) for a, b in zip(theirs, ours, strict=True) if a is not None and a.requires_grad]
    places = [k for k, each in enumerate(wrt) if each.requires_grad]
    if not both or not places:
        return
    random = torch.Generator().manual_seed(0)
    above = [
        torch.randn(a.shape, generator=random, dtype=torch.float64).to(a.dtype) for a, _ in both
    ]
    found = [
        torch.autograd.grad(
            *([each[way] for each in both], [wrt[k] for k in places], above),
            retain_graph=True,
            allow_unused=True,
        )
        for way in range(2)
    ]
    most = max((_most(each) for each in found[0] if each is not None), default=0.0)
    for k, a, b in zip(places, *found, strict=True):
        if (a is None) != (b is None):
            raise NotCaptured(f"there is a gradient in tensor {k} in one way only")
        if a is not None:
            _check_close(f"the gradient in tensor {k}", a, b, most)


def _most(tensor: Tensor) -> float:
    finite = tensor.double().nan_to_num(0.0, 0.0, 0.0)
    return float(finite.abs().max()) if tensor.numel() else 0.0


def _check_close(what: str, a: Tensor, b: Tensor, further: float) -> None:
    if a.shape != b.shape or a.dtype != b.dtype:
        raise NotCaptured(f"{what} has another shape or dtype")
    if not a.is_floating_point():
        if not torch.equal(a, b):
            raise NotCaptured(f"{what} differs")
        return
    eps = _ROUNDINGS * torch.finfo(a.dtype).eps
    bound = eps * (_most(a) + eps * further)
    a, b = a.double(), b.double()
    apart = torch.where(a.isfinite() & b.isfinite(), a - b, 0.0)
    is_same = a.isfinite().eq(b.isfinite()) & (a.isnan() == b.isnan())
    is_same &= a.isfinite() | a.isnan() | (a == b)
    if not bool(is_same.all()) or _most(apart) > bound:
        raise NotCaptured(
            f"{what} differs by {_most(apart):.2g}, and rounding would explain {bound:.2g}"
        )
