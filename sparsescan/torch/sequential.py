"""Sequential in place of PyTorch's: layers that compute with the weights that pruning has kept."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import jacobians
from ..errors import SparseScanError
from ..jacobians import NetworkStep, from_torch
from ..jacobians.step_pool import StepPool
from ._once import Once
from ._team import pytorchs_threads

__all__ = ["Sequential", "why_not"]

_DTYPES = (torch.float32, torch.float64)
# Share of the weights that are kept, from which on PyTorch's dense products are as fast.
_DENSE = 0.25
# Steps that are kept for each stack: of several shapes of the input, or masks.
_KEPT = 8


class Sequential(nn.Sequential):
    """:class:`torch.nn.Sequential`, whose pruned weights take no time.

    Where :func:`sparsescan.jacobians.from_torch` has operators for all layers, a call runs as one
    training step (:meth:`sparsescan.jacobians.Sequential.training_step`): convolutions and linear
    layers compute with the weights that ``torch.nn.utils.prune`` has kept. A mask that changes is
    seen at the next call, and running statistics of a ``BatchNorm2d`` in training take in each
    batch. PyTorch computes all that has no kernel: other layers, devices and dtypes, dropout in
    training mode, and calls within a graph of ``torch.compile``.

    Parameters
    ----------
    *args
        The layers, as of :class:`torch.nn.Sequential`.

    Notes
    -----
    Gradients may be taken once: a second derivative raises a :class:`RuntimeError`.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.utils import prune
    >>> from sparsescan.torch import Sequential
    >>> model = Sequential(torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    >>> _ = prune.l1_unstructured(model[0], "weight", 0.98)
    >>> model(torch.randn(64, 784)).sum().backward()
    >>> model[0].weight_orig.grad.count_nonzero() < 0.03 * 784 * 512
    tensor(True)
    """

    def forward(self, input: Any) -> Any:  # noqa: A002, PyTorch's name
        """Return the output of the last layer."""
        if torch.compiler.is_compiling() or not self._takes(input):
            return super().forward(input)
        layers = list(_flat(self))
        pool = _pool_of(self, layers, input)
        if pool is None:
            return super().forward(input)
        params = {
            f"{k}.{name}": tensor
            for k, layer in enumerate(layers)
            for name, tensor in _parameters(layer).items()
        }
        some = (input, *params.values())
        if torch.is_grad_enabled() and any(each.requires_grad for each in some):
            return _Step.apply(pool, tuple(params), *some)
        step = pool.take()
        output = _forward(step, input)
        step.update_running_stats()
        pool.give_back(step)
        return output

    def _takes(self, given: Any) -> bool:
        """Return whether this input, and the modules in their modes, may have kernels."""
        if (
            not isinstance(given, Tensor)
            or given.device.type != "cpu"
            or given.dtype not in _DTYPES
            or given.layout is not torch.strided
            or given.dim() < 2
            or 0 in given.shape
            or torch.is_autocast_enabled("cpu")
        ):
            return False
        for layer in _flat(self):
            tensors = _parameters(layer).values()
            if any(each.device.type != "cpu" or each.dtype != given.dtype for each in tensors):
                return False
        return True


def _flat(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers in the order in which they are called, but those that do nothing."""
    if type(module) in (nn.Sequential, Sequential):
        for child in module._modules.values():
            if child is not None:
                yield from _flat(child)
    elif type(module) is not nn.Identity:
        yield module


def _parameters(layer: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a layer by the names that its operator has for them."""
    own = dict(layer.named_parameters(recurse=False))
    return {name.removesuffix("_orig"): tensor for name, tensor in own.items()}


def why_not(module: nn.Sequential) -> str | None:
    """Return why PyTorch had better compute a stack; None if it had not.

    The answer is "" for a stack in which nothing is pruned.
    """
    layers = list(_flat(module))
    masks = [mask for mask in map(_mask, layers) if mask is not None]
    if not masks:
        return ""
    for layer in layers:
        if not hasattr(jacobians, type(layer).__name__):
            return f"a {type(layer).__name__} has no kernel"
        hooks = [*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()]
        if any(not hasattr(hook, "_tensor_name") for hook in hooks):
            return f"a {type(layer).__name__} has hooks"
    kept = sum(int(torch.count_nonzero(mask)) for mask in masks)
    share = kept / max(sum(mask.numel() for mask in masks), 1)
    if share > _DENSE:
        return f"{share:.0%} of its weights are kept, where PyTorch's dense products are faster"
    return None


def _mask(layer: nn.Module) -> Tensor | None:
    """Return the mask of the weight of a layer, if that is pruned."""
    return dict(layer.named_buffers(recurse=False)).get("weight_mask")


# -- Steps -----------------------------------------------------------------------------------------


_Pool = StepPool[NetworkStep]


class _Lease(NamedTuple):
    """A step that has run forward and waits for its backward pass."""

    pool: _Pool
    steps: list[NetworkStep]  # this one, until its backward pass

    def end(self) -> None:
        """Let another call use the step."""
        while self.steps:
            self.pool.give_back(self.steps.pop())


_lock = threading.Lock()
_pools: weakref.WeakKeyDictionary[nn.Module, dict[Any, _Pool | None]]
_pools = weakref.WeakKeyDictionary()


def _pool_of(module: nn.Sequential, layers: list[nn.Module], x: Tensor) -> _Pool | None:
    """Return the steps for an input and the present masks; None if there is no operator for it."""
    # A normalisation in training couples the samples of a batch, whose number then counts.
    joint = any(isinstance(layer, nn.BatchNorm2d) and layer.training for layer in layers)
    shape = tuple(x.shape if joint else x.shape[1:])
    arrays = [
        (each.data_ptr(), tuple(each.shape), each._version if each is _mask(layer) else 0)
        for layer in layers
        for each in (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
    ]
    key = shape, x.dtype, tuple(layer.training for layer in layers), tuple(arrays)
    with _lock:
        known = _pools.setdefault(module, {})
        if key not in known:
            while len(known) >= _KEPT:
                known.pop(next(iter(known)))
            known[key] = _make(layers, shape, joint)
        return known[key]


def _make(layers: list[nn.Module], shape: tuple[int, ...], joint: bool) -> _Pool | None:
    try:
        network = jacobians.Sequential(from_torch(nn.Sequential(*layers), shape))
        pool = StepPool(network.training_step)
        pool.give_back(pool.take())
    except SparseScanError:
        return None
    outputs = [op.output_shape for op in network.layers]
    if joint and any(len(output) < 2 or output[0] != shape[0] for output in outputs):
        return None  # such a step does not know the statistics of the batch
    return pool


def _forward(step: NetworkStep, x: Tensor) -> Tensor:
    with pytorchs_threads():
        return torch.from_numpy(step.forward(x.detach().numpy()))


class _Step(torch.autograd.Function):
    """The graph of a call.

    The input is saved as well as the step that has run, so that a second backward pass through the
    same graph is right, too: it runs forward again.
    """

    @staticmethod
    def forward(
        ctx: Any, pool: _Pool, names: tuple[str, ...], x: Tensor, *params: Tensor
    ) -> Tensor:
        step = pool.take()
        output = _forward(step, x)
        step.update_running_stats()
        ctx.lease = _Lease(pool, [step])
        weakref.finalize(ctx, ctx.lease.end).atexit = False
        ctx.names = names
        ctx.save_for_backward(x, *params)
        return output

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Any, ...]:
        x, *params = ctx.saved_tensors
        if torch.is_grad_enabled():
            grads = list(Once.apply(_Step.run, (ctx, above, x), "a stack", above, x, *params))
        else:
            grads = _Step.run(ctx, above, x)
        below = grads.pop() if ctx.needs_input_grad[2] else None
        return None, None, below, *grads

    @staticmethod
    def run(ctx: Any, above: Tensor, x: Tensor) -> list[Tensor]:
        """Return the gradients in the parameters, and in the input if that needs one."""
        pool, steps = ctx.lease
        if steps:
            step = steps.pop()
        else:
            step = pool.take()
            _forward(step, x)
        with pytorchs_threads():
            grads = step.backward(above.detach().numpy(), needs_input_grad=ctx.needs_input_grad[2])
        pool.give_back(step)
        arrays = [grads.params[name] for name in ctx.names]
        if grads.input is not None:
            arrays.append(grads.input)
        return [torch.from_numpy(array) for array in arrays]
