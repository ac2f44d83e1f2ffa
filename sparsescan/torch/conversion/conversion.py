"""Replace the modules of a model that are computed faster here, and put PyTorch's back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ...errors import InputTypeError, short
from ...recurrent.arguments import check_option
from ..calls.recurrent_op import has_kernels
from ..calls.sequences import Sequences
from ..sequential import Sequential, why_not
from . import alone, torchrecurrent
from .derived import KINDS, behind
from .kinds import plain_class
from .masked import settle
from .structure import is_container, modules_of, without_kernels

# Devices whose tensors recurrent modules have kernels for.
_DEVICES = ("cpu", "cuda")


class Conversion(NamedTuple):
    """The modules that :func:`.torch.convert` has replaced and left; printed, a line for each.

    Attributes
    ----------
    replaced : list of str
        Names of the modules that were replaced.
    left : dict of str to str
        Names of recurrent modules, pruned layers and stacks of them that were left alone, and why.
        A layer in such a stack has no entry of its own.
    """

    replaced: list[str]
    left: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{name or 'model'}: replaced" for name in self.replaced]
        lines += [f"{name or 'model'}: left alone, {why}" for name, why in self.left.items()]
        return "\n".join(lines) or "no recurrent modules, and no pruned layers"


def convert(
    model: nn.Module, *, memory_limit: int | None = None, truncate: int | None = None
) -> Conversion:
    """Replace the recurrent modules of a model, and its pruned layers, in place.

    Each :class:`torch.nn.RNN`, ``GRU`` and ``LSTM`` becomes one of this package, and so does each
    :class:`torch.nn.Sequential` of layers that have kernels, if ``torch.nn.utils.prune`` has left
    at most a quarter of its weights. A ``Linear`` or a convolution that is pruned so, and that a
    model calls itself, as ``F.relu(self.fc1(x))`` does, is replaced alone; a stack is faster, where
    kernels go from layer to layer. PyTorch computes where it is faster, as for few samples or small
    layers. Pruning is recognised by its masks: zeros without one, as ``prune.remove`` leaves them,
    may be trained.

    Layers of torchrecurrent 0.2.5, such as ``torchrecurrent.MGU``, run whole sequences by the
    kernels of the cell of that name in :mod:`sparsescan.recurrent.catalogue`; under
    ``torch.compile`` they run as before. From then on, these and PyTorch's recurrent modules take
    `resets`, which set states to zero inside a sequence: see :class:`RNN`.

    Modules stay the same objects, with their parameters, buffers and hooks, so an optimiser that
    has been made, and a `state_dict` that has been saved, fit as before. Later changes of a module
    take effect at its next call. Modules stay instances of their classes, too. Of a class derived
    from PyTorch's ``RNN``, ``GRU`` or ``LSTM``, ``super().forward`` then reaches the kernels; it is
    left if its `forward` does not call that, or if it changes what PyTorch's goes through. If this
    function raises, nothing is replaced. :func:`revert` undoes it.

    Modules whose parameters no kernel takes, such as those of half precision, are left, since
    PyTorch would run them: convert a model once it has the dtype and the device that it runs with.

    Modules that a model calls step by step itself stay as they are, since each step returns before
    the next input is there: cells of PyTorch and torchrecurrent, and neurons of snnTorch but
    ``LeakyParallel``, whose network is replaced. Where nothing else happens between the steps, a
    layer of ``module(catalogue.Leaky)`` may take their place: see :func:`module`.

    Parameters
    ----------
    model : torch.nn.Module
        The model, or one of those modules.
    memory_limit : int, optional
        Bytes that a call of a recurrent module of PyTorch may keep for its backward pass, beside
        input and output; see :class:`RNN`. Gates that do not fit are computed again.
    truncate : int, optional
        Steps of a segment: gradients of these modules flow at most to the segment before; see
        :class:`RNN`.

    Returns
    -------
    Conversion
        Which modules were replaced, and which were left alone, and why.

    Raises
    ------
    InputTypeError
        If `model` is no module.
    InputError
        If `memory_limit` is no count of bytes, or `truncate` none of steps.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.torch import convert
    >>> model = torch.nn.ModuleDict({"rnn": torch.nn.GRU(3, 5), "head": torch.nn.Linear(5, 2)})
    >>> print(convert(model))
    rnn: replaced
    """
    check_option("memory_limit", memory_limit)
    check_option("truncate", truncate)
    plan = plan_of(model)
    for module, kind in plan.kinds.items():
        _become(module, kind)
        if isinstance(module, nn.RNNBase):
            if memory_limit is not None:
                module.memory_limit = memory_limit
            if truncate is not None:
                module.truncate = truncate
    return Conversion(plan.replaced, plan.left)


def revert(model: nn.Module) -> Conversion:
    """Put PyTorch's modules back into a model, in place: the inverse of :func:`convert`.

    Modules stay the same objects with their parameters, buffers, hooks and mode, so optimisers and
    a `state_dict` fit as before, and a class that a user has derived from PyTorch's is that again.
    Layers of torchrecurrent become its own. What has been reverted needs no ``sparsescan`` where it
    is loaded from a file. `memory_limit` and `truncate` are forgotten.

    Parameters
    ----------
    model : torch.nn.Module
        The model, or one of its modules.

    Returns
    -------
    Conversion
        Which modules were replaced by PyTorch's, and which of this package were left alone, since
        PyTorch has none of that kind: those of :func:`module`, those with `return_states`, and
        those of classes derived from this package's.

    Raises
    ------
    InputTypeError
        If `model` is no module.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.torch import convert, revert
    >>> model = torch.nn.Sequential(torch.nn.GRU(3, 5))
    >>> _ = convert(model)
    >>> print(revert(model))
    0: replaced
    >>> type(model[0])
    <class 'torch.nn.modules.rnn.GRU'>
    """
    _check_module(model)
    replaced, left = list[str](), dict[str, str]()
    for name, module in model.named_modules():
        kind, base = type(module), _base_of(module)
        if isinstance(module, Sequences) and module.return_states:
            left[name] = "PyTorch has no return_states"
        elif plain_class(base) is not base:
            _become(module, _with_base(module, plain_class(base)))
            vars(module).pop("_options", None)
            replaced.append(name)
        elif is_replaced(module):
            left[name] = f"it is a {kind.__name__}, in whose place PyTorch has none"
        settle(vars(module).get("weight"))
    return Conversion(replaced, left)


def _become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Let a module be of another class, whatever its own does when an attribute is set."""
    object.__setattr__(module, "__class__", kind)


def _base_of(module: nn.Module) -> Any:
    """Return the class of a module, as it was before weights were parametrised."""
    return type(module).__bases__[0] if is_parametrized(module) else type(module)


def _with_base(module: nn.Module, base: Any) -> Any:
    """Return the class that a module has with another base.

    PyTorch makes a class for each parametrised module, whose properties compute weights.
    """
    if not is_parametrized(module):
        return base
    kind, left_out = type(module), ("__dict__", "__weakref__", "__abstractmethods__", "_abc_impl")
    about = {name: each for name, each in vars(kind).items() if name not in left_out}
    return type(base)(kind.__name__, (base,), about)


def _check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"model is {short(model)}; expected a torch.nn.Module")


class Plan(NamedTuple):
    """What a conversion of a model does.

    Attributes
    ----------
    kinds : dict of Module to type
        The classes that modules are to become.
    replaced : list of str
        Names of the modules that are to be replaced.
    left : dict of str to str
        Names of those that are left alone, and why.
    """

    kinds: dict[nn.Module, type[nn.Module]]
    replaced: list[str]
    left: dict[str, str]


def plan_of(model: nn.Module) -> Plan:
    """Return what a conversion of a model does, which may raise, and changes nothing yet."""
    _check_module(model)
    plan = Plan({}, [], {})
    inside = set[nn.Module]()
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            if module not in inside:
                plan.left[name] = "torch.jit has compiled it"
                inside.update(module.modules())
            continue
        kind, why = _replacement_of(module, module in inside)
        if why:
            plan.left[name] = why
        elif kind is not None and kind is not type(module):
            plan.kinds[module] = kind
            plan.replaced.append(name)
        if (kind or type(module)) is Sequential:
            plan.kinds.update(
                (each, plain_class(type(each)))
                for each in modules_of(module)
                if alone.is_replacement(each)
            )
            inside.update(modules_of(module))
        elif type(module) is nn.Sequential and why:
            # It is said of the layers, too; a stack within this one may be replaced.
            inside.update(each for each in modules_of(module) if not is_container(each))
        elif torchrecurrent.is_layer(module):
            inside.update(module.modules())
    return plan


def is_replaced(module: nn.Module) -> bool:
    """Return whether a module is of this package, such as one that has been replaced."""
    return (
        isinstance(module, (Sequences, Sequential))
        or torchrecurrent.is_replacement(module)
        or alone.is_replacement(module)
    )


def _replacement_of(module: Any, is_inside: bool) -> tuple[type[nn.Module] | None, str | None]:
    """Return the class that a module becomes, or has already, or why it stays.

    Both are None for what is none of those that might be replaced, such as a layer inside of a
    stack, for which the stack stands.
    """
    if is_replaced(module):
        return type(module), None
    if torchrecurrent.is_layer(module):
        why = torchrecurrent.why_not(module) or without_kernels(module, _DEVICES)
        return (None, why) if why else (torchrecurrent.replacement_of(module), None)
    if isinstance(module, nn.RNNBase):
        own = _base_of(module)
        found: Any = KINDS.get(own) or behind(own)
        why = f"it is a {own.__name__}, {found}" if isinstance(found, str) else ""
        why = why or _why_not(module)
        return (None, why) if why else (_with_base(module, found), None)
    if is_inside:
        return None, None
    if type(module) is nn.Sequential:
        reason = why_not(module)
        return (Sequential, None) if reason is None else (None, reason)
    reason = alone.why_not(module)
    return (alone.replacement_of(module), None) if reason == "" else (None, reason)


def _why_not(module: Any) -> str:
    """Return why PyTorch runs a recurrent module of its own; "" if there are kernels."""
    why = without_kernels(module, _DEVICES)
    weight = next(module.parameters())
    if why or weight.is_meta or has_kernels(module.mode, module.hidden_size, weight, module.bias):
        return why
    return "CuPy is missing, or its kernels have no room for so many units on this GPU"
