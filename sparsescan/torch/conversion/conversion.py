"""Replace the modules of a model that run faster here, and put PyTorch's modules back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from ...errors import InputTypeError, short
from ...recurrent.arguments import check_option
from ..calls.recurrent_op import has_kernels
from ..calls.sequences import Sequences
from ..sequential import Sequential, why_not
from . import alone, torchrecurrent
from .derived import KINDS, behind
from .kinds import base_of, become, plain_class, with_base
from .masked import settle
from .structure import is_container, modules_of, without_kernels

# Devices for which recurrent modules have kernels.
_DEVICES = ("cpu", "cuda")


class Conversion(NamedTuple):
    """The modules that :func:`.torch.convert` replaced or left alone; prints one line for each.

    Attributes
    ----------
    replaced : list of str
        Names of the modules that were replaced.
    left : dict of str to str
        Names of recurrent modules, pruned layers and stacks of these that were left alone, with the
        reason. A layer in such a stack has no separate entry.
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
    """Replace the recurrent modules and the pruned layers of a model, in place.

    Each :class:`torch.nn.RNN`, ``GRU`` and ``LSTM`` becomes a module of this package. So does each
    :class:`torch.nn.Sequential` of layers that have kernels, if ``torch.nn.utils.prune`` has left
    at most a quarter of its weights. A ``Linear`` or a convolution that is pruned as much, and that
    the model calls itself, as in ``F.relu(self.fc1(x))``, is replaced alone. A stack is faster,
    since kernels pass results from layer to layer. PyTorch still computes where it is faster, for
    example with few samples or small layers. Only masks show pruning: zeros without a mask, which
    ``prune.remove`` leaves, may be trained.

    Layers of torchrecurrent 0.2.5, such as ``torchrecurrent.MGU``, then run whole sequences in the
    kernels of the cell of that name in :mod:`sparsescan.recurrent.catalogue`; under
    ``torch.compile`` they run as before. All converted recurrent modules take `resets`, which set
    states to zero inside a sequence: see :class:`RNN`.

    Modules stay the same objects, with their parameters, buffers and hooks, so existing optimisers
    and saved `state_dict` files still fit. Later changes of a module take effect at its next call.
    Modules also stay instances of their classes. In a class derived from PyTorch's ``RNN``, ``GRU``
    or ``LSTM``, ``super().forward`` then runs the kernels. Such a module is left alone if its
    `forward` does not call that, or if it overrides something that PyTorch's `forward` uses. If
    this function raises, nothing is replaced. :func:`revert` undoes it.

    Modules are left alone if no kernel takes their parameters, such as half precision. So convert a
    model after you have set the dtype and the device for its runs.

    Modules that a model calls step by step stay as they are, since each call returns before the
    next input exists. These are the cells of PyTorch and torchrecurrent, and the neurons of
    snnTorch except ``LeakyParallel``, whose network is replaced. If nothing else happens between
    the steps, use a layer such as ``module(catalogue.Leaky)`` in their place: see :func:`module`.
    A module that loops in Python runs its loop by kernels after :func:`loop`.

    Parameters
    ----------
    model : torch.nn.Module
        The model, or one of those modules.
    memory_limit : int, optional
        Bytes that a call of a PyTorch recurrent module may keep for its backward pass, without
        input and output; see :class:`RNN`. Gates that do not fit are recomputed.
    truncate : int, optional
        Steps of a segment: gradients of these modules flow at most to the previous segment; see
        :class:`RNN`.

    Returns
    -------
    Conversion
        Which modules were replaced, which were left alone, and why.

    Raises
    ------
    InputTypeError
        If `model` is no module.
    InputError
        If `memory_limit` or `truncate` is not a valid count.

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
        become(module, kind)
        if isinstance(module, nn.RNNBase):
            if memory_limit is not None:
                module.memory_limit = memory_limit
            if truncate is not None:
                module.truncate = truncate
    return Conversion(plan.replaced, plan.left)


def revert(model: nn.Module) -> Conversion:
    """Put PyTorch's modules back into a model, in place: the inverse of :func:`convert`.

    Modules of :func:`loop` loop in Python again.
    Modules stay the same objects with their parameters, buffers, hooks and mode, so optimisers and
    a `state_dict` still fit. Modules get back the classes that they had, the user's derived classes
    included, and torchrecurrent's layers theirs. A reverted model can be loaded from a file without
    ``sparsescan``. `memory_limit` and `truncate` are dropped.

    Parameters
    ----------
    model : torch.nn.Module
        The model, or one of its modules.

    Returns
    -------
    Conversion
        Which modules were replaced by PyTorch's, and which stay, since PyTorch has no such module:
        modules of :func:`module`, modules with `return_states`, and classes derived from this
        package's.

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
        kind, base = type(module), base_of(module)
        if isinstance(module, Sequences) and module.return_states:
            left[name] = "PyTorch has no return_states"
        elif plain_class(base) is not base:
            become(module, with_base(module, plain_class(base)))
            for each in ("_options", "_loops"):
                vars(module).pop(each, None)
            replaced.append(name)
        elif is_replaced(module):
            left[name] = f"it is a {kind.__name__}, in whose place PyTorch has none"
        settle(vars(module).get("weight"))
    return Conversion(replaced, left)


def _check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"model is {short(model)}; expected a torch.nn.Module")


class Plan(NamedTuple):
    """The changes that a conversion of a model makes.

    Attributes
    ----------
    kinds : dict of Module to type
        The new class of each module that changes.
    replaced : list of str
        Names of the modules to replace.
    left : dict of str to str
        Names of the modules to leave alone, and why.
    """

    kinds: dict[nn.Module, type[nn.Module]]
    replaced: list[str]
    left: dict[str, str]


def plan_of(model: nn.Module) -> Plan:
    """Return the changes of a conversion. This may raise, and changes nothing yet."""
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
            # The layers get an entry too; a stack inside this one may be replaced.
            inside.update(each for each in modules_of(module) if not is_container(each))
        elif torchrecurrent.is_layer(module):
            inside.update(module.modules())
    return plan


def is_replaced(module: nn.Module) -> bool:
    """Return whether a module is of this package, as replaced modules are."""
    return (
        isinstance(module, (Sequences, Sequential))
        or torchrecurrent.is_replacement(module)
        or alone.is_replacement(module)
    )


def _replacement_of(module: Any, is_inside: bool) -> tuple[type[nn.Module] | None, str | None]:
    """Return the class that a module gets or already has, or why it stays.

    Both are None for modules that are never replaced by themselves, such as a layer in a stack.
    """
    if is_replaced(module):
        return type(module), None
    if torchrecurrent.is_layer(module):
        why = torchrecurrent.why_not(module) or without_kernels(module, _DEVICES)
        return (None, why) if why else (torchrecurrent.replacement_of(module), None)
    if isinstance(module, nn.RNNBase):
        own = base_of(module)
        found: Any = KINDS.get(own) or behind(own)
        why = f"it is a {own.__name__}, {found}" if isinstance(found, str) else ""
        why = why or _why_not(module)
        return (None, why) if why else (with_base(module, found), None)
    if is_inside:
        return None, None
    if type(module) is nn.Sequential:
        reason = why_not(module)
        return (Sequential, None) if reason is None else (None, reason)
    reason = alone.why_not(module)
    return (alone.replacement_of(module), None) if reason == "" else (None, reason)


def _why_not(module: Any) -> str:
    """Return why PyTorch has to run its recurrent module; "" if there are kernels."""
    why = without_kernels(module, _DEVICES)
    weight = next(module.parameters())
    if why or weight.is_meta or has_kernels(module.mode, module.hidden_size, weight, module.bias):
        return why
    return "CuPy is missing, or its kernels have no room for so many units on this GPU"
