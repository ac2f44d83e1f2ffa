"""Tensors as arrays, and arrays as tensors, without a copy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ...arrays.arrays import is_cupy, on_device
from ...arrays.streams import place
from ...errors import DeviceError, InputTypeError, short
from .team import pytorchs_threads

FLOATS = (torch.float32, torch.float64)
NUMBERS = (*FLOATS, torch.complex64, torch.complex128)


def check_tensors(
    given: Mapping[str, Any],
    optional: Collection[str],
    *,
    dtypes: Sequence[torch.dtype] = FLOATS,
    are_mixed: bool = False,
    has_cuda: bool = False,
    of_complex: str = "",
    of_devices: str = "",
) -> None:
    """Raise an error unless all are dense tensors, on one device that has kernels.

    Parameters
    ----------
    given : mapping of str to object
        The arguments, by their names in errors.
    optional : collection of str
        Names of arguments that may be None.
    dtypes : sequence of dtype
        The allowed dtypes.
    are_mixed : bool
        Whether dtypes may differ between arguments.
    has_cuda : bool
        Whether there are kernels on CUDA devices.
    of_complex, of_devices : str
        Additions to errors about complex numbers and about other devices.
    """
    known: str = next((name for name, each in given.items() if each is not None), "")
    first: Any = given.get(known)
    for name, tensor in given.items():
        if tensor is None and name in optional:
            continue
        if not isinstance(tensor, Tensor):
            raise InputTypeError(f"{name} is {short(tensor)}; expected a tensor")
        if tensor.dtype not in dtypes:
            *most, last = (str(each).removeprefix("torch.") for each in dtypes)
            raise InputTypeError(
                f"{name} has dtype {tensor.dtype}; expected {', '.join(most)} or {last}"
                f"{', one for all tensors' * (not are_mixed)}{of_complex * tensor.is_complex()}"
            )
        if tensor.dtype != first.dtype and not are_mixed:
            raise InputTypeError(
                f"{name} has dtype {tensor.dtype}, {known} {first.dtype}; expected "
                "one dtype for all tensors"
            )
        if tensor.layout is not torch.strided:
            raise InputTypeError(
                f"{name} has layout {tensor.layout}; expected a dense tensor ({name}.to_dense())"
            )
        if tensor.device.type not in ("cpu", "cuda")[: 1 + has_cuda]:
            or_cuda = " or a CUDA device" * has_cuda
            raise DeviceError(
                f"{name} is on {tensor.device}; expected a tensor on the CPU ({name}.cpu())"
                f"{or_cuda}{of_devices}"
            )
        if tensor.device != first.device:
            raise DeviceError(
                f"{name} is on {tensor.device}, {known} on {first.device}; expected "
                "all on one device"
            )


def here(x: Tensor) -> AbstractContextManager[None]:
    """Return a context for work on a tensor's device: with PyTorch's threads, or on its stream."""
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
