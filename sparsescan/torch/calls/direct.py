"""Calls that bypass PyTorch's dispatcher, which takes longer than a small network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

Function = TypeVar("Function", bound=Callable[..., Any])

_PLAIN = frozenset((Tensor, nn.Parameter, type(None)))
_is_batch = torch._C._functorch.is_legacy_batchedtensor


def uncompiled(function: Any) -> Any:
    """Return a function that ``torch.compile`` leaves out of its graphs.

    Unlike ``torch.compiler.disable``, this does not import the compiler, which takes a second.
    """
    return torch._disable_dynamo(function)  # type: ignore[attr-defined]


def constant(function: Function) -> Function:
    """Mark a function into which ``torch.compile`` need not look: arguments tell its result.

    ``torch.compiler.assume_constant_result`` says the same, and imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_direct(*tensors: Tensor | None) -> bool:
    """Return whether a call may run kernels directly, since nothing else needs an operator.

    Compilers, exports, modes such as fake tensors, transforms of ``torch.func``, forward mode,
    traces, and tensor subclasses replace, record or refuse operators. They need a registered
    operator.
    """
    if not is_eager(*tensors) or is_transformed():
        return False
    for each in tensors:  # a generator would be slower
        if each is not None and _is_batch(each):
            return False
    return True


def is_eager(*tensors: Tensor | None) -> bool:
    """Return whether a call computes real values, maybe under a transform of ``torch.func``."""
    return not (
        torch.compiler.is_compiling()
        or not _PLAIN.issuperset(map(type, tensors))
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
    )


def is_mapped(argument: Any) -> bool:
    """Return whether this is a batch of gradients, from ``is_grads_batched=True``."""
    return isinstance(argument, Tensor) and _is_batch(argument)


def as_leaf(module: Any, *given: Any) -> Any:
    """Return a call of a module in a graph of ``torch.fx``, where PyTorch's modules are leaves.

    Return None if the first of `given` is no proxy of such a graph.
    """
    if not isinstance(given[0], Proxy):
        return None
    tracer: Any = given[0].tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), given, {})


def has_saving_hooks() -> bool:
    """Return whether something observes all saved tensors, as checkpoints do."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func`` or forward mode is active."""
    return bool(torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0)


def is_forward_twice() -> bool:
    """Return whether forward mode is active within forward mode."""
    return _transforms().count(TransformType.Jvp) > 1


def takes_rules(*tensors: Tensor | None) -> bool:
    """Return whether transforms support the rules of our `autograd.Function` classes.

    In nested forward mode PyTorch (2.13) treats their derivatives as zeros, and under
    ``torch.func.functionalize`` it does not support them. Traces and other observers need operators
    in their place, which lose derivatives in forward mode.
    """
    keys = _transforms()
    return (
        is_eager(*tensors)
        and keys.count(TransformType.Jvp) < 2
        and TransformType.Functionalize not in keys
    )


def _transforms() -> list[TransformType]:
    """Return the active transforms of ``torch.func``."""
    if not torch._C._are_functorch_transforms_active():
        return []
    return [each.key() for each in retrieve_all_functorch_interpreters()]


def is_recorded() -> bool:
    """Return whether a ``torch.func`` transform, forward mode or ``torch.jit.trace`` is active.

    They cannot see inside kernels.
    """
    return is_transformed() or torch._C._get_tracing_state() is not None


def is_exported_to_onnx() -> bool:
    """Return whether ``torch.onnx.export`` is active; it cannot translate our operators."""
    return torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export()


def is_watched() -> bool:
    """Return whether something observes each call of a module or a function.

    This is a global module hook, a hook of all saved tensors (as in checkpoints), a function mode
    other than that of the default device, a transform or a trace.
    """
    return bool(
        modules._has_any_global_hook()
        or is_recorded()
        or has_saving_hooks()
        or (
            torch._C._len_torch_function_stack()
            and any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())
        )
    )
