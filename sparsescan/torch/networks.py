"""Recurrent modules as networks of NumPy, with copies of their parameters."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import FileError, InputTypeError, short
from ..recurrent import Recurrent
from ..recurrent.catalogue import ProjectedLSTM
from .calls.sequences import Sequences
from .calls.shapes import kind_of
from .conversion.structure import is_seen


def as_network(module: nn.Module) -> Any:
    """Return a network that computes what a recurrent module does; other modules as they are.

    Parameters that :mod:`torch.nn.utils.prune` has pruned are those that are kept.

    Raises
    ------
    InputTypeError
        If calls of the module do more than those of PyTorch's or ours: a class with a ``forward``
        of its own, and hooks.
    """
    forward = type(module).forward
    if not forward.__module__.startswith(("torch.nn.", "sparsescan.torch.")) or is_seen(module):
        raise InputTypeError(
            f"network has {short(module)}, which has a forward or hooks of its own; expected the "
            "recurrent modules and layers in it, one after the other"
        )
    if not isinstance(module, nn.RNNBase | Sequences):
        return module
    cell, options = kind_of(module.mode)
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
    """Return the module in a file that ``torch.save`` has written; it runs code of the file."""
    try:
        module = torch.load(path, map_location="cpu", weights_only=False)
    except OSError:
        raise
    except Exception as error:  # whatever the file's code, or what is damaged, raises
        raise FileError(f"{path}: {error}; expected a file of torch.save(model, path)") from None
    if not isinstance(module, nn.Module):
        raise FileError(
            f"{path} has a {type(module).__name__}; expected a module, as torch.save(model, path) "
            "writes it, and not its parameters alone"
        )
    return module


def array_of(module: nn.Module, name: str) -> Any:
    """Return a copy of a parameter in float32 or float64, as the next call would read it."""
    value: Tensor | None = getattr(module, name)
    mask = getattr(module, f"{name}_mask", None)
    if mask is not None:
        value = getattr(module, f"{name}_orig") * mask
    if value is None:
        return None
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    return value.detach().to("cpu", dtype, copy=True).numpy()
