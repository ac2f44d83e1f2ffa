"""The structure of a stack at a call: its layers, their settings and their tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from ... import jacobians

# Layers that normalise by batch statistics.
NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
# The dtypes that kernels take.
FLOATS = (torch.float32, torch.float64)

_TENSORS = frozenset((Tensor, nn.Parameter))
_PARAMETERS = frozenset(("weight", "bias"))
_HOOKS = attrgetter(
    "_forward_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_pre_hooks_with_kwargs"
)
# Layers that return their input, or a view of it, outside training mode.
_VIEWS = (nn.Flatten, nn.Dropout)
# Layers whose derivatives do not need their output.
_REPLACEABLE = frozenset(
    (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, *NORMS, nn.LayerNorm)
)
# Methods that a call of a layer uses.
_METHODS = (
    *("__call__", "_call_impl", "forward", "__getattr__", "__getattribute__"),
    *("_conv_forward", "_check_input_dim", "_output_padding"),
)


class _Kind:
    """A class of modules, as it was when this package was imported.

    Attributes
    ----------
    settings : callable
        Returns the attributes of a module that its forward pass reads.
    before : tuple
        The result of :meth:`methods` at that time.
    names : frozenset of str
        Names of methods; no attribute of a module may hide one.
    """

    def __init__(self, kind: type[nn.Module]) -> None:
        # The first name is there twice, since attrgetter of a single name returns no tuple.
        settings = "training", "training", *getattr(kind, "__constants__", ())
        self.settings = attrgetter(*settings)
        self.names = frozenset(dir(kind))
        self._kind = kind
        self._methods = attrgetter(*(name for name in _METHODS if hasattr(kind, name)))
        self.before = self.methods()

    def methods(self) -> Any:
        """Return the methods that a call uses; somebody may have replaced some."""
        return self._methods(self._kind)


_named: list[Any] = [getattr(nn, name) for name in jacobians.__all__ if hasattr(nn, name)]
_KINDS: dict[type[nn.Module], _Kind] = {
    kind: _Kind(kind) for kind in _named if not issubclass(kind, nn.Sequential)
}
_IDENTITY = {nn.Identity: _Kind(nn.Identity)}
_ALL = _KINDS | _IDENTITY
_SETTINGS = frozenset((bool, int, float, str, tuple, type(None)))
_BasePruning = prune.BasePruningMethod
# The methods that a pruning hook uses, in a form that PyTorch's compilers can trace.
_pruning = _BasePruning.__call__, _BasePruning.apply_mask
# Sequences that call their modules one after the other.
_CONTAINERS: dict[type[nn.Module], _Kind] = {nn.Sequential: _Kind(nn.Sequential)}


class StackLayer(NamedTuple):
    """A layer with an operator, at one call.

    Attributes
    ----------
    module : Module
        The layer.
    tensors : dict of str to Tensor
        Its parameters and running statistics, by the operator's names; for a pruned layer the
        weight is the parameter before masking.
    mask : Tensor or None
        The mask of its weight.
    """

    module: nn.Module
    tensors: dict[str, Tensor]
    mask: Tensor | None


class StackStructure(NamedTuple):
    """A stack at one call, without the contents of its tensors.

    Attributes
    ----------
    key : tuple
        Equal for two calls if only contents of tensors differ; valid as long as `modules` live.
    layers : list of StackLayer
        The layers in the order of calls, without layers that do nothing.
    modules : list of Module
        All modules; the owner of `key` must hold them.
    shape : tuple of int
        Shape of a sample; the shape of the batch if samples are coupled.
    joint : bool
        Whether a normalisation in training couples samples.
    """

    key: tuple[Any, ...]
    layers: list[StackLayer]
    modules: list[nn.Module]
    shape: tuple[int, ...]
    joint: bool


def is_container(module: nn.Module) -> bool:
    """Return whether a module calls its children one after the other."""
    return type(module) in _CONTAINERS


def has_operator(layer: nn.Module) -> bool:
    """Return whether layers of a class have an operator, or need none."""
    return type(layer) in _ALL


def modules_of(stack: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a stack in the order of calls, each container before its children."""
    for child in stack._modules.values():
        if child is None:
            continue
        yield child
        if type(child) in _CONTAINERS:
            yield from modules_of(child)


def without_kernels(module: nn.Module, devices: Collection[str]) -> str:
    """Return why no kernel takes the parameters of a module; "" if one does.

    Parameters on the device ``"meta"`` pass: they have no values yet, and may get any device.
    """
    for each in module.parameters():
        if each.dtype not in FLOATS:
            name = str(each.dtype).removeprefix("torch.")
            return (
                f"its parameters are of {name}, which PyTorch computes: kernels take float32 and "
                "float64"
            )
        if each.device.type not in (*devices, "meta"):
            return f"its parameters are on {each.device.type}, where PyTorch computes"
    return ""


def is_seen(module: nn.Module) -> bool:
    """Return whether somebody observes or has replaced the calls of a module.

    Forward pre-hooks are ignored, since pruning uses them.
    """
    return "forward" in vars(module) or any(_HOOKS(module))


def is_pruning(hook: Any) -> bool:
    """Return whether a hook is PyTorch's own multiplication of a parameter by its mask."""
    kind = type(hook)
    return (
        isinstance(hook, _BasePruning)
        and (kind.__call__, kind.apply_mask) == _pruning
        and "apply_mask" not in vars(hook)
    )


def read(stack: nn.Module, x: Tensor) -> StackStructure | None:
    """Return the structure of a stack; None if it has anything unknown."""
    key: list[Any] = [x.dtype]
    layers: list[StackLayer] = []
    modules: list[nn.Module] = []
    joint = False
    last: type[nn.Module] | None = None  # the layer whose output the next layer reads
    if None in stack._modules.values():
        return None
    for module in modules_of(stack):
        kind = type(module)
        known = _ALL.get(kind) or _CONTAINERS.get(kind)
        attributes = module.__dict__
        if (
            known is None
            or known.methods() != known.before
            or any(_HOOKS(module))
            or not known.names.isdisjoint(attributes)
        ):
            return None
        modules.append(module)
        if kind not in _KINDS:
            if attributes["_forward_pre_hooks"] or None in attributes["_modules"].values():
                return None
            key.append(id(module))
            continue
        if attributes["_modules"]:
            return None
        layer = _layer(module, attributes, x.dtype)
        if layer is None:
            return None
        settings = known.settings(module)
        types = tuple(map(type, settings))
        if not _SETTINGS.issuperset(types):
            return None
        # A layer that works in place may change the caller's tensor, or one a derivative needs.
        if getattr(module, "inplace", False) and last not in _REPLACEABLE:
            return None
        if kind not in _VIEWS:
            last = kind
        joint = joint or (kind in NORMS and module.training)
        layers.append(layer)
        shapes = tuple(each.shape for each in layer.tensors.values())
        about = id(module), settings, types, tuple(layer.tensors), shapes, layer.mask is None
        key.append(about)
    if last is None:
        return None
    shape = tuple(x.shape if joint else x.shape[1:])
    key.append(shape)
    try:
        hash(tuple(key))
    except TypeError:  # a mutable setting
        return None
    return StackStructure(tuple(key), layers, modules, shape, joint)


def _layer(module: nn.Module, attributes: dict[str, Any], dtype: torch.dtype) -> StackLayer | None:
    """Return a layer with its tensors; None if one of them is unknown."""
    parameters, buffers = attributes["_parameters"], attributes["_buffers"]
    mask = None
    own = parameters
    if hooks := attributes["_forward_pre_hooks"]:
        (hook, *more) = hooks.values()
        if more or not is_pruning(hook) or hook._tensor_name != "weight":
            return None
        mask, weight = buffers.get("weight_mask"), parameters.get("weight_orig")
        if "weight" in parameters or "weight" in buffers or weight is None:
            return None
        if not _is_mask(mask, weight) or "weight_orig" in attributes or "weight_mask" in attributes:
            return None
        own = {"weight": weight} | {
            name: each for name, each in parameters.items() if name != "weight_orig"
        }
    if not _PARAMETERS.issuperset(own) or not parameters.keys().isdisjoint(attributes):
        return None
    tensors = {name: each for name, each in own.items() if each is not None}
    if isinstance(module, NORMS):
        statistics = {name: buffers.get(name) for name in STATISTICS}
        if not buffers.keys().isdisjoint(attributes) or any(
            (each is None) == module.track_running_stats for each in statistics.values()
        ):
            return None
        tensors |= {name: each for name, each in statistics.items() if each is not None}
    dtypes = dict.fromkeys(tensors, dtype) | {"num_batches_tracked": torch.int64}
    if not all(each.dtype is dtypes[name] and _is_plain(each) for name, each in tensors.items()):
        return None
    return StackLayer(module, tensors, mask)


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in _TENSORS
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_neg()
    )


def _is_mask(mask: Any, weight: Tensor) -> bool:
    return (
        mask is not None
        and _is_plain(mask)
        and mask.shape == weight.shape
        and not mask.requires_grad
        and not mask.is_complex()
    )
