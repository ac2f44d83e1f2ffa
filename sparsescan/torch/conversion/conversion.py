"""Replace the modules of a model that are computed faster here."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from ...errors import InputTypeError, short
from ...symbolic.schedule import check_count
from ..calls.recurrent_op import has_kernels
from ..calls.sequences import Sequences
from ..recurrent import GRU, LSTM, RNN
from ..sequential import Sequential, why_not
from . import alone, torchrecurrent
from .kinds import plain_class
from .structure import is_container, modules_of, without_kernels

_KINDS: dict[type[nn.Module], type[nn.RNNBase]] = {nn.RNN: RNN, nn.GRU: GRU, nn.LSTM: LSTM}
# Devices whose tensors recurrent modules have kernels for.
_DEVICES = ("cpu", "cuda")


class Conversion(NamedTuple):
    """The modules that :func:`convert` has replaced and left; printed, a line for each.

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
    take effect at its next call.

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
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"model is {short(model)}; expected a torch.nn.Module")
    if memory_limit is not None:
        check_count("memory_limit", memory_limit, 0)
    if truncate is not None:
        check_count("truncate", truncate, 1)
    replaced, left = list[str](), dict[str, str]()
    inside = set[nn.Module]()
    for name, module in model.named_modules():
        kind, why = _replacement_of(module, module in inside)
        if why:
            left[name] = why
        elif kind is not None and kind is not type(module):
            module.__class__ = kind
            if memory_limit is not None:
                module.memory_limit = memory_limit
            if truncate is not None:
                module.truncate = truncate
            replaced.append(name)
        if type(module) is Sequential:
            for each in modules_of(module):
                each.__class__ = plain_class(type(each))
            inside.update(modules_of(module))
        elif type(module) is nn.Sequential and why:
            # It is said of the layers, too; a stack within this one may be replaced.
            inside.update(each for each in modules_of(module) if not is_container(each))
        elif torchrecurrent.is_layer(module):
            inside.update(module.modules())
    return Conversion(replaced, left)


def _replacement_of(module: Any, is_inside: bool) -> tuple[type[nn.Module] | None, str | None]:
    """Return the class that a module becomes, or has already, or why it stays.

    Both are None for what is none of those that might be replaced, such as a layer inside of a
    stack, for which the stack stands.
    """
    if (
        isinstance(module, (Sequences, Sequential))
        or torchrecurrent.is_replacement(module)
        or alone.is_replacement(module)
    ):
        return type(module), None
    if type(module) in _KINDS:
        why = _why_not(module)
        return (None, why) if why else (_KINDS[type(module)], None)
    if torchrecurrent.is_layer(module):
        why = torchrecurrent.why_not(module) or without_kernels(module, _DEVICES)
        return (None, why) if why else (torchrecurrent.replacement_of(module), None)
    if isinstance(module, nn.RNNBase):
        return None, f"it is a {type(module).__name__}, whose forward may differ"
    if is_inside:
        return None, None
    if type(module) is nn.Sequential:
        reason = why_not(module)
        return (Sequential, None) if reason is None else (None, reason)
    reason = alone.why_not(module)
    return (alone.replacement_of(module), None) if reason == "" else (None, reason)


def _why_not(module: Any) -> str:
    """Return why PyTorch runs a recurrent module of its own; "" if there are kernels."""
    if module.proj_size:
        return "proj_size has no kernel"
    why = without_kernels(module, _DEVICES)
    weight = next(module.parameters())
    if why or weight.is_meta or has_kernels(module.mode, module.hidden_size, weight, module.bias):
        return why
    return "CuPy is missing, or its kernels have no room for so many units on this GPU"
