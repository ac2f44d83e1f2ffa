"""Tensors as arrays, and arrays as tensors, without a copy."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ...arrays.arrays import is_cupy, on_device
from ...arrays.streams import place
from .team import pytorchs_threads


def here(x: Tensor) -> AbstractContextManager[None]:
    """Return a context for work where a tensor is: with PyTorch's threads, or on its stream."""
    if x.is_cpu:
        return pytorchs_threads()
    stream = torch.cuda.current_stream(x.device)
    return place("x", on_device(x.detach()), None, stream)


def array_of(tensor: Tensor | None) -> Any:
    """Return a tensor's memory as an array of NumPy or CuPy."""
    if tensor is None:
        return None
    own = tensor.detach().resolve_conj().resolve_neg()
    return own.numpy() if own.is_cpu else on_device(own)


def tensor_of(array: Any) -> Tensor:
    """Return an array's memory as a tensor."""
    return from_dlpack(array) if is_cupy(array) else torch.from_numpy(array)
