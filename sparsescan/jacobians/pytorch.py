"""From PyTorch modules to operators; the functions import PyTorch, not this module."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from ..arrays.arrays import on_device
from ..errors import InputError, InputTypeError, SparseScanError
from ..recurrent.cell import Cell
from ..recurrent.cells import GRUCell, LSTMCell, RNNCell
from .activations import (
    ELU,
    GELU,
    Hardtanh,
    LeakyReLU,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)
from .conv import Conv1d, Conv2d, ConvTranspose2d
from .linear import Linear
from .normalization import BatchNorm, BatchNorm1d, BatchNorm2d, LayerNorm
from .pooling import AdaptiveAvgPool2d, AvgPool2d, MaxPool2d
from .reshape import Dropout, Flatten
from .shared.checks import Shape, check_sizes
from .shared.operator import Operator
from .upsample import Upsample

_LAYERS: tuple[Any, ...] = (
    *(AdaptiveAvgPool2d, AvgPool2d, BatchNorm1d, BatchNorm2d, Conv1d, Conv2d, ConvTranspose2d),
    *(Dropout, ELU, Flatten, GELU, Hardtanh, LayerNorm, LeakyReLU, Linear, MaxPool2d, ReLU),
    *(Sigmoid, SiLU, Softmax, Softplus, Tanh, Upsample),
)
# Arguments that modules do not store as attributes of the same name.
_OTHERS = {"axes", "bias", "dtype", "input_shape", "mask", "rng", "weight_mask"}


def from_torch(module: Any, input_shape: Any = None) -> list[Any]:
    """Return the operators of a PyTorch module, or its cell, sharing its parameters.

    Parameters
    ----------
    module : torch.nn.Module
        A ``torch.nn.Sequential``, nested or not, of layers that :mod:`sparsescan.jacobians` has; or
        one such layer; or an ``RNNCell``, ``GRUCell`` or ``LSTMCell``. Weights pruned by
        ``torch.nn.utils.prune`` leave the pattern. Other forward hooks, and
        ``torch.nn.utils.parametrize``, raise an error.
    input_shape : tuple of int
        Shape of one sample, without the batch axis. If a batch normalisation is in training mode,
        which couples the samples of a batch, pass the shape of the whole batch. A cell needs none.

    Returns
    -------
    list of Operator, or of Cell
        One operator for each call of a layer, for :class:`Sequential`, without layers that do
        nothing (``Identity``); or the cell. Parameters and running statistics share the module's
        memory, so an optimiser's changes in place take effect at once. If a layer is called twice,
        its two operators share the parameters, and the gradient is the sum of theirs.

    Raises
    ------
    ImportError
        If PyTorch is not installed.
    InputError
        If this package does not have a layer or its mode, or if hooks or parametrisations may
        change what a layer computes. The message names the layer.
    InputTypeError
        If `module` is no module, a parameter is not float32 or float64, or its device is neither a
        CPU nor a CUDA device.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.jacobians import from_torch
    >>> from_torch(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh()), (3,))
    [Linear((3,) → (2,), nnz=6), Tanh((2,) → (2,), nnz=2)]
    >>> (cell,) = from_torch(torch.nn.GRUCell(3, 2))
    """
    from torch import nn

    if not isinstance(module, nn.Module):
        raise InputTypeError(f"module is a {type(module).__name__}; expected a torch.nn.Module")
    cells = {getattr(nn, cell.__name__): cell for cell in (RNNCell, GRUCell, LSTMCell)}
    if type(module) in cells:
        return [_cell(cells[type(module)], module)]
    shape = check_sizes("input_shape", input_shape)
    layers = list(_layers(module, "module"))
    types = {getattr(nn, operator.__name__): operator for operator in _LAYERS}
    norms = nn.BatchNorm1d, nn.BatchNorm2d
    joint = any(type(layer) in norms and layer.training for _, layer in layers)
    ops: list[Operator] = []
    for name, layer in layers:
        _refuse_parametrisations(name, layer)
        operator = types.get(type(layer))
        if operator is None:
            other = " (sparsescan.torch has it)" if isinstance(layer, nn.RNNBase) else ""
            raise InputError(
                f"{name} is a {type(layer).__name__}, which has no operator{other}; expected one "
                f"of {', '.join(sorted(known.__name__ for known in types))}"
            )
        _refuse_hooks(name, layer)
        try:
            ops.append(_operator(operator, layer, shape, joint))
        except SparseScanError as error:
            raise type(error)(f"{name} ({type(layer).__name__}): {error}") from error
        shape = ops[-1].output_shape
    return ops


def _cell(kind: Any, module: Any) -> Cell:
    """Return a cell with the parameters of PyTorch's cell."""
    name = f"module ({type(module).__name__})"
    _refuse_parametrisations("module", module)
    _refuse_hooks("module", module)
    pruned = _pruned(module)
    options = {"nonlinearity": module.nonlinearity} if kind is RNNCell else {}
    for bias in ("bias_ih", "bias_hh"):
        if bias in pruned:
            raise InputError(f"{name}: its {bias} is pruned; expected pruned weights at most")
    masks = {
        f"{weight}_mask": (getattr(module, f"{weight}_mask") != 0).cpu().numpy()
        for weight in pruned
    }
    cell: Cell = kind(module.input_size, module.hidden_size, module.bias, **options, **masks)
    for each, array in _arrays(module, pruned, cell.parameter_names).items():
        setattr(cell, each, array)
    return cell


def _layers(module: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the place and the module of every layer, in the order in which they are called."""
    from torch import nn

    if type(module) not in (nn.Sequential, nn.Identity):
        yield name, module
        return
    _refuse_hooks(name, module)
    # Not named_children, which skips a layer that occurs a second time.
    for key, child in module._modules.items():
        yield from _layers(child, f"{name}[{key}]" if key.isdigit() else f"{name}.{key}")


def _operator(operator: Any, layer: Any, shape: Shape, joint: bool) -> Operator:
    """Return the operator of a layer, with the layer's own parameters."""
    names = inspect.signature(operator).parameters.keys()
    arguments: dict[str, Any] = {name: getattr(layer, name) for name in names - _OTHERS}
    _refuse_modes(layer)
    if joint:
        # Axes count a batch axis before the samples; here the batch is a part of the sample.
        for name in ("dim", "start_dim", "end_dim"):
            if arguments.get(name, -1) is not None and arguments.get(name, -1) >= 0:
                arguments[name] += 1
    if operator is BatchNorm1d:
        # If a sample is (C,), the axis before it is not channels.
        arguments["axes"] = len(shape) - joint
    if "bias" in names:
        arguments["bias"] = layer.bias is not None
    pruned = _pruned(layer)
    if pruned and "weight_mask" not in names:
        raise InputError(
            f"its {' and '.join(sorted(pruned))} is pruned; only convolutions and Linear may be "
            "pruned"
        )
    if "bias" in pruned:
        raise InputError("its bias is pruned; expected a pruned weight at most")
    arrays = _arrays(layer, pruned)
    if "weight" in pruned:
        arguments["weight_mask"] = (layer.weight_mask != 0).cpu().numpy()
    converted: Operator = operator(**arguments, input_shape=shape)
    for name, array in arrays.items():
        setattr(converted, name, array)
    if isinstance(converted, BatchNorm) and layer.num_batches_tracked is not None:
        count = layer.num_batches_tracked
        converted._batches = on_device(count) if count.is_cuda else count.numpy()
    return converted


def _refuse_modes(layer: Any) -> None:
    """Raise if a layer is in a mode that its operator does not have."""
    from torch import nn

    if type(layer) is nn.Dropout and layer.training and layer.p > 0:
        raise InputError(
            "it draws its own mask in training mode; call .eval(), or build "
            "sparsescan.jacobians.Dropout with a mask"
        )
    for name, wanted in (("return_indices", False), ("recompute_scale_factor", None)):
        if getattr(layer, name, wanted) not in (wanted, False):
            raise InputError(f"{name} is {getattr(layer, name)}; expected {wanted}")


def _refuse_parametrisations(name: str, layer: Any) -> None:
    """Raise if something else computes a parameter of a layer."""
    from torch.nn.utils.parametrize import is_parametrized

    if is_parametrized(layer):
        # PyTorch gives such a module a new class, whose name would not explain the error.
        raise InputError(
            f"{name} ({type(layer).__name__}): it has parametrisations of "
            f"{', '.join(layer.parametrizations)}; expected none: remove them by "
            "torch.nn.utils.parametrize.remove_parametrizations"
        )


def _refuse_hooks(name: str, module: Any) -> None:
    """Raise if a module has a hook that may change what its forward computes."""
    from torch.nn.utils.prune import BasePruningMethod

    for kind, hooks in (
        ("forward hook", module._forward_hooks),
        ("forward pre-hook", module._forward_pre_hooks),
    ):
        for hook in hooks.values():
            if kind == "forward hook" or not isinstance(hook, BasePruningMethod):
                raise InputError(
                    f"{name} ({type(module).__name__}): it has the {kind} "
                    f"{getattr(hook, '__name__', type(hook).__name__)}, which may change what it "
                    "computes; expected no hooks but those of torch.nn.utils.prune"
                )


def _pruned(layer: Any) -> set[str]:
    """Return the names of pruned parameters, after checking that all hooks are of pruning."""
    return {hook._tensor_name for hook in layer._forward_pre_hooks.values()}


def _arrays(
    layer: Any,
    pruned: set[str],
    names: Iterable[str] = ("weight", "bias", "running_mean", "running_var"),
) -> dict[str, Any]:
    """Return the parameters and running statistics of a layer."""
    from torch import nn

    arrays = {}
    for name in names:
        # Pruning keeps the parameter under another name, and recomputes the attribute.
        tensor = getattr(layer, f"{name}_orig" if name in pruned else name, None)
        if tensor is None:
            continue
        if not name.startswith("running") and not isinstance(tensor, nn.Parameter):
            raise InputError(
                f"its {name} is a {type(tensor).__name__} that something else computes; expected a "
                "torch.nn.Parameter"
            )
        arrays[name] = _array(name, tensor)
    return arrays


def _array(name: str, tensor: Any) -> Any:
    """Return the memory of a tensor as a NumPy array, or a CuPy array if it is on a GPU."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ("float32", "float64"):
        raise InputTypeError(f"{name} has dtype {dtype}; expected float32 or float64")
    if tensor.device.type not in ("cpu", "cuda"):
        raise InputTypeError(
            f"{name} is on the device {tensor.device}; expected float32 or float64 on a CPU or a "
            "CUDA device"
        )
    tensor = tensor.detach().resolve_neg()
    return on_device(tensor) if tensor.is_cuda else tensor.numpy()
