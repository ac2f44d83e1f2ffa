"""Convert recurrent modules to NumPy networks, with copies of their parameters."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import FileError, InputTypeError, short
from ..recurrent import Recurrent
from ..recurrent.catalogue import ProjectedLSTM
from .calls.shapes import kind_of
from .conversion.structure import is_seen


def as_network(module: Any) -> Any:
    """Return a NumPy network equal to a recurrent module; return other modules unchanged.

    Of parameters that :mod:`torch.nn.utils.prune` has pruned, the kept weights are used.

    Raises
    ------
    InputTypeError
        If calls of the module do more than PyTorch's or ours: it has hooks, or its class has its
        own ``forward``.
    """
    forward = type(module).forward
    if not forward.__module__.startswith(("torch.nn.", "sparsescan.torch.")) or is_seen(module):
        raise InputTypeError(
            f"network has {short(module)}, which has a forward or hooks of its own; expected the "
            "recurrent modules and layers in it, one after the other"
        )
    if not hasattr(module, "all_weights"):  # which recurrent modules of PyTorch and ours have
        return module
    cell, options = kind_of(module.mode)
    # Kernels of shorter states know another class.
    cell = getattr(module, "cell", cell)
    if module.proj_size:
        cell, options = ProjectedLSTM, {"proj_size": module.proj_size}
    network = Recurrent(
        *(cell, module.input_size, module.hidden_size, module.num_layers, bool(module.bias)),
        bidirectional=module.bidirectional,
        rng=0,
        **options,
    )
    for name in network.params:
        setattr(network, name, array_of(module, name))
    return network


def load(path: str | os.PathLike[str]) -> nn.Module:
    """Load a module from a file of ``torch.save``. This runs code in the file."""
    try:
        module = torch.load(path, map_location="cpu", weights_only=False)
    except OSError:
        raise
    except Exception as error:  # code in the file, or damage, may raise anything
        raise FileError(f"{path}: {error}; expected a file of torch.save(model, path)") from None
    if not isinstance(module, nn.Module):
        raise FileError(
            f"{path} has a {type(module).__name__}; expected a module, as torch.save(model, path) "
            "writes it, and not its parameters alone"
        )
    return module


def array_of(module: nn.Module, name: str) -> Any:
    """Return a copy of a parameter, as the next call would read it, in float32 or float64."""
    value: Tensor | None = getattr(module, name)
    mask = getattr(module, f"{name}_mask", None)
    if mask is not None:
        value = getattr(module, f"{name}_orig") * mask
    if value is None:
        return None
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    return value.detach().to("cpu", dtype, copy=True).numpy()
