"""Pruned layers outside a Sequential: the same modules, with our kernels where faster."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils import prune

from ..calls.direct import as_leaf
from ..sequential import Sequential, is_sparse, run, why_dense
from .kinds import Kind
from .structure import is_pruning, without_kernels


class _Alone(metaclass=Kind):
    """The call of a pruned layer outside a stack: it runs as a stack of this layer alone.

    It goes round PyTorch's pruning hook, which would multiply mask and weight first.
    """

    _plain: ClassVar[type[nn.Module]]
    _forward_pre_hooks: Any
    _compiled_call_impl: Any

    def __call__(self: Any, *given: Any, **named: Any) -> Any:
        """Return the output for one input."""
        if (
            len(given) == 1
            and not named
            and self._forward_pre_hooks
            and self._compiled_call_impl is None
            and not torch.compiler.is_compiling()
        ):
            output = as_leaf(self, *given)
            if output is None:
                output = run(_stack_of(self), given[0])
            if output is not None:
                return output
        return super().__call__(*given, **named)  # type: ignore[misc]

    __deepcopy__ = Sequential.__deepcopy__


class Linear(_Alone, nn.Linear):
    """:class:`torch.nn.Linear`, whose pruned weights take no time; :func:`convert` makes it."""

    _plain = nn.Linear


class Conv1d(_Alone, nn.Conv1d):
    """:class:`torch.nn.Conv1d`, whose pruned weights take no time; :func:`convert` makes it."""

    _plain = nn.Conv1d


class Conv2d(_Alone, nn.Conv2d):
    """:class:`torch.nn.Conv2d`, whose pruned weights take no time; :func:`convert` makes it."""

    _plain = nn.Conv2d


class ConvTranspose2d(_Alone, nn.ConvTranspose2d):
    """:class:`torch.nn.ConvTranspose2d`, whose pruned weights take no time."""

    _plain = nn.ConvTranspose2d


_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    each._plain: each for each in (Linear, Conv1d, Conv2d, ConvTranspose2d)
}
# For each layer a stack of one plain layer with the same attributes.
_stacks: weakref.WeakKeyDictionary[nn.Module, nn.Sequential] = weakref.WeakKeyDictionary()


def _stack_of(layer: Any) -> nn.Sequential:
    stack = _stacks.get(layer)
    if stack is None or vars(stack._modules["0"]) is not vars(layer):
        stack = nn.Sequential()
        stack._modules["0"] = plain = layer._plain.__new__(layer._plain)
        plain.__dict__ = vars(layer)
        _stacks[layer] = stack
    return stack


def replacement_of(layer: nn.Module) -> type[nn.Module]:
    """Return the class that replaces the class of a layer outside a stack."""
    return _KINDS[type(layer)]


def is_replacement(layer: nn.Module) -> bool:
    """Return whether a layer has been replaced."""
    return isinstance(layer, _Alone)


def why_not(layer: nn.Module) -> str | None:
    """Return why a layer outside a stack stays as it is.

    The answer is "" if it can be replaced, and None if nothing in the layer is pruned.
    """
    kind, hooks = type(layer).__name__, list(layer._forward_pre_hooks.values())
    pruned = {each._tensor_name for each in hooks if isinstance(each, prune.BasePruningMethod)}
    if not pruned - {"bias"}:
        return _without_mask(layer)
    if type(layer) not in _KINDS:
        return f"a {kind} has no kernel"
    if pruned != {"weight"} or layer._forward_hooks or not all(map(is_pruning, hooks)):
        return f"a {kind} has hooks"
    return without_kernels(layer, ("cpu",)) or why_dense([layer.get_buffer("weight_mask")])


def _without_mask(layer: nn.Module) -> str | None:
    """Return why zeros without a mask are not skipped, if most weights of a layer are zeros."""
    weight = layer._parameters.get("weight")
    if (
        type(layer) not in _KINDS
        or weight is None
        or type(weight) is not nn.Parameter
        or weight.is_meta
        or weight.layout is not torch.strided
    ):
        return None
    kept = int(torch.count_nonzero(weight.detach()))
    share = kept / max(weight.numel(), 1)
    # Some layers are initialised with zeros.
    if kept == 0 or not is_sparse(share):
        return None
    return (
        f"{1 - share:.0%} of its weights are 0, but without a mask training may change them: "
        "prune.custom_from_mask(layer, 'weight', layer.weight != 0), of torch.nn.utils, makes one"
    )
