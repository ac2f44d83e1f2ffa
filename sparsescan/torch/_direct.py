"""Calls that need not go through PyTorch's dispatcher, which take longer than a small network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["is_direct"]

_PLAIN = frozenset((Tensor, nn.Parameter, type(None)))


def is_direct(*tensors: Tensor | None) -> bool:
    """Return whether a call may run kernels itself, since nothing else wants to see an operator.

    Compilers and exports, modes such as that of fake tensors, transforms of ``torch.func``, traces,
    and subclasses of tensors replace, record or refuse operators, and all find them registered.
    """
    return not (
        torch.compiler.is_compiling()
        or not _PLAIN.issuperset(map(type, tensors))
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )
