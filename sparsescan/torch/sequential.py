"""A Sequential that replaces PyTorch's, and computes with the weights that pruning has kept."""

from __future__ import annotations

import copy
import math
import sys
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..errors import SparseScanError
from ..jacobians import Sequential as Network
from ..jacobians import from_torch
from ..jacobians.shared.operator import Operator
from ..locks import new_lock
from ..recurrent.step_pool import StepPool
from .calls.arrays import array_of, tensor_of
from .calls.direct import is_direct, is_mapped, is_watched
from .calls.once import Once, as_batch
from .calls.team import pytorchs_threads
from .calls.times import Seconds
from .conversion.kinds import Kind
from .conversion.masked import Kept, Values, is_untouched, kept_now, masked_weight
from .conversion.probe import asks_for_some, is_looked_at, probe
from .conversion.structure import (
    FLOATS,
    STATISTICS,
    StackLayer,
    StackStructure,
    has_operator,
    is_container,
    is_pruning,
    modules_of,
    read,
    without_kernels,
)

Array = NDArray[Any]

# From this share of kept weights on, PyTorch's dense products are as fast.
_DENSE = 0.25
# Networks to keep for each stack, for different structures, shapes of the input, or masks.
_KEPT = 8
# If this many networks in a row were used only once, a stack changes too often.
_MOST_NEW = 4
# Our convolution is faster from this many weights per output, and multiply-adds in all, on.
_TAPS, _LARGE = 128, 10_000_000
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d)
# Where PyTorch is faster, it computes this many calls before masks are checked again.
_AGAIN = 64


# Times of our kernels and of PyTorch, without and with a backward pass, which `python -m bench map`
# measured on a Xeon with AVX-512.
_OURS = (
    Seconds(call=450e-6, weight=0.42e-9, kept=3.7e-9, product=2.2e-11),
    Seconds(call=950e-6, weight=1.25e-9, kept=8.5e-9, product=4.4e-11),
)
_THEIRS = (
    Seconds(call=40e-6, weight=0.46e-9, product=1.0e-11),
    Seconds(call=220e-6, weight=1.25e-9, product=2.8e-11),
)


class Sequential(nn.Sequential, metaclass=Kind):
    """A :class:`torch.nn.Sequential` whose pruned weights take no time.

    If :func:`sparsescan.jacobians.from_torch` has operators for all layers, a call runs as one
    training step (:meth:`sparsescan.jacobians.Sequential.training_step`). Convolutions and linear
    layers then compute only with the weights that ``torch.nn.utils.prune`` has kept. Each call uses
    the current state of the stack: its layers with their settings and hooks, and the contents of
    parameters, statistics and masks. As in PyTorch's pruning, ``layer.weight`` of a pruned layer is
    the product of mask and parameter at the last call; its gradient, if asked for, is dense. In
    training mode each batch updates the running statistics of batch normalisations.

    PyTorch computes everything that has no kernel: other layers, devices and dtypes, dropout in
    training mode, masks of numbers other than 0 and 1, layers with hooks, parametrisations or their
    own methods, a structure or masks that change at each call, and calls that are recorded or
    transformed (``torch.compile``, ``torch.func``, ``torch.jit``, fake tensors). It also computes
    stacks of only linear layers if it is faster, because there are few samples or many kept
    weights.

    Parameters
    ----------
    *args
        The layers, as for :class:`torch.nn.Sequential`.

    Notes
    -----
    There are only first derivatives: a second derivative raises a :class:`RuntimeError`. If an
    input or a weight is infinite or NaN, it has no effect through a pruned weight; PyTorch's
    product with 0 is NaN.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.utils import prune
    >>> from sparsescan.torch.sequential import Sequential
    >>> model = Sequential(torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    >>> _ = prune.l1_unstructured(model[0], "weight", 0.98)
    >>> model(torch.randn(64, 784)).sum().backward()
    >>> model[0].weight_orig.grad.count_nonzero() < 0.03 * 784 * 512
    tensor(True)
    """

    _plain = nn.Sequential

    def forward(self, input: Any) -> Any:  # noqa: A002, PyTorch's name
        """Return the output of the last layer."""
        if torch.compiler.is_compiling():
            return super().forward(input)
        output = run(self, input)
        return super().forward(input) if output is None else output

    # `torch.jit.script` compiles its source.
    forward.__wrapped__ = nn.Sequential.forward  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Sequential:
        """Return a copy; masked weights lose their graph: PyTorch copies only leaf tensors."""
        for module in self.modules():
            weight = vars(module).get("weight")
            if isinstance(weight, Tensor) and not weight.is_leaf:
                memo[id(weight)] = weight.detach().clone()
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(vars(self), memo))
        return copied


def run(stack: nn.Module, given: Any) -> Tensor | None:
    """Return the output of a stack, or None if PyTorch has to compute it."""
    known = _known_of(stack)
    known.runs_here = False
    if known.leaves(given):
        return None
    call = _prepare(stack, known, given) if _takes(given) else None
    return None if call is None else call.run(given)


def _takes(given: Any) -> bool:
    """Return whether a call with this input may have kernels."""
    return (
        is_direct(given)
        and isinstance(given, Tensor)
        and given.device.type == "cpu"
        and given.dtype in FLOATS
        and given.layout is torch.strided
        and given.dim() >= 2
        and 0 not in given.shape
        and not given.is_neg()
        and not torch.is_autocast_enabled("cpu")
        and not is_watched()
    )


def why_not(module: nn.Sequential) -> str | None:
    """Return why PyTorch should compute a stack; None if it should not.

    The answer is "" for a stack in which nothing is pruned.
    """
    layers = [each for each in modules_of(module) if not is_container(each)]
    buffers = [dict(each.named_buffers(recurse=False)) for each in layers]
    masks = [each["weight_mask"] for each in buffers if "weight_mask" in each]
    if not masks:
        return ""
    for layer in layers:
        if not has_operator(layer):
            return f"a {type(layer).__name__} has no kernel"
        hooks = [*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()]
        if not all(map(is_pruning, hooks)):
            return f"a {type(layer).__name__} has hooks"
        why = without_kernels(layer, ("cpu",))
        if why:
            return why
    return why_dense(masks) or None


def why_dense(masks: Sequence[Tensor]) -> str:
    """Return why PyTorch computes if too many weights are kept; "" if few are kept."""
    kept = sum(int(torch.count_nonzero(mask)) for mask in masks)
    share = kept / max(sum(mask.numel() for mask in masks), 1)
    if is_sparse(share):
        return ""
    return f"{share:.0%} of its weights are kept, where PyTorch's dense products are faster"


def is_sparse(share: float) -> bool:
    """Return whether so few weights are kept that kernels may be faster."""
    return share <= _DENSE


def _is_slower(structure: StackStructure, kept: Sequence[Kept], x: Tensor) -> bool:
    """Return whether our kernels are slower than PyTorch: for linear layers with few samples.

    Or for a single small convolution.
    """
    if len(structure.layers) == 1 and isinstance(structure.layers[0].module, _CONVOLUTIONS):
        return _is_small(structure.layers[0].module, structure.layers[0].tensors["weight"], x)
    weighted = [each for each in structure.layers if "weight" in each.tensors]
    if not all(isinstance(each.module, nn.Linear) for each in weighted):
        return False
    following, dense, read = iter(kept), 0, 0
    for each in weighted:
        size = each.tensors["weight"].numel()
        dense += size
        read += size if each.mask is None else next(following).count
    samples, has_backward = x.numel() // x.shape[-1], torch.is_grad_enabled()
    ours = _OURS[has_backward].of(weights=dense, kept=read, products=samples * read)
    return ours > _THEIRS[has_backward].of(weights=dense, products=samples * dense)


def _is_small(conv: Any, weight: Tensor, x: Tensor) -> bool:
    """Return whether PyTorch is faster for a convolution, however few weights are kept."""
    steps = 1 if conv.transposed else math.prod(conv.stride)
    multiply_adds = x.numel() // x.shape[1] // steps * weight.numel()
    return weight.numel() < _TAPS * conv.out_channels or multiply_adds < _LARGE


# -- Networks --------------------------------------------------------------------------------------


def _without_arrays(layers: Sequence[Operator]) -> list[Operator]:
    """Return copies of layers in which zeros without memory replace the parameters."""
    copies = [copy.copy(layer) for layer in layers]
    for layer in copies:
        _let_go(layer)
    return copies


def _let_go(layer: Operator) -> None:
    for name in getattr(layer, "parameter_names", ()):
        array = getattr(layer, name)
        vars(layer)[name] = np.broadcast_to(array.dtype.type(0), array.shape)


class _BoundStep:
    """A training step of layers that takes the parameters with each call.

    Parameters
    ----------
    layers : sequence of Operator
        The layers. They are copied without their arrays, so that steps are independent.

    Attributes
    ----------
    step : NetworkStep
        The step.
    """

    def __init__(self, layers: Sequence[Operator]) -> None:
        self._layers = _without_arrays(layers)
        self.step = Network(self._layers).training_step()

    def forward(self, x: Array, arrays: Mapping[tuple[int, str], Array]) -> Array:
        """Compute the output of the last layer.

        Parameters
        ----------
        x : ndarray, shape ``(batch, *input_shape)``
            The inputs.
        arrays : dict of (int, str) to ndarray
            Parameters, running statistics and counts of batches, by the number of the layer and the
            name in PyTorch. They are not copied.
        """
        for (k, name), array in arrays.items():
            # Reading a parameter checks its shape.
            own = "_batches" if name == "num_batches_tracked" else name
            vars(self._layers[k])[own] = array
        return self.step.forward(x)

    def release(self) -> None:
        """Let go of the arrays of the last call."""
        for layer in self._layers:
            _let_go(layer)


_Pool = StepPool[_BoundStep]


class _Network:
    """The operators of a structure with its masks, and their training steps.

    Attributes
    ----------
    pool : StepPool
        The steps.
    layers : list of Module
        Copies of the layers without hooks, for PyTorch to compute with.
    reads_again : bool
        Whether the backward pass reads parameters again.
    """

    def __init__(self, structure: StackStructure) -> None:
        modules = [layer.module for layer in structure.layers]
        ops = _without_arrays(from_torch(nn.Sequential(*modules), structure.shape))
        self.pool = StepPool(lambda: _BoundStep(ops))
        first = self.pool.take()
        self.pool.give_back(first)
        self.layers = [_copy(module) for module in modules]
        self.reads_again = any(isinstance(module, nn.LayerNorm) for module in modules)
        # A step for single samples does not have the statistics of the batch.
        knows_batch = first.step.has_batch_axis or not structure.joint
        self.is_right = knows_batch and _has_parameters(ops, structure.layers)


def _has_parameters(ops: Sequence[Operator], layers: Sequence[StackLayer]) -> bool:
    """Return whether operators have exactly the parameters of their layers."""
    return all(
        set(getattr(op, "parameter_names", ())) == layer.tensors.keys() - {"num_batches_tracked"}
        for op, layer in zip(ops, layers, strict=True)
    )


def _copy(module: nn.Module) -> nn.Module:
    """Return a module with the same settings, without tensors and hooks."""
    copied = type(module).__new__(type(module))
    own = {name: value for name, value in vars(module).items() if not isinstance(value, Tensor)}
    vars(copied).update(own | vars(nn.Module()) | {"training": module.training})
    vars(copied).update(dict.fromkeys(("bias", "weight", *STATISTICS)))
    return copied


class _Stack:
    """The latest networks of one stack, and its masks at the last call."""

    def __init__(self) -> None:
        self.runs_here = False  # whether the last call was not PyTorch's
        self.kept: list[Kept] = []
        self._lock = new_lock()
        # By key: the objects whose addresses are in the key, and the network or None.
        self._known: OrderedDict[Any, tuple[Any, _Network | None]] = OrderedDict()
        self._made = 0  # networks made since the last reuse
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._left: dict[Any, int] = {}  # calls until the choice is made again

    def leave(self, x: Tensor) -> None:
        """Let PyTorch, which is faster, compute the next calls with inputs of a shape."""
        if len(self._left) >= _KEPT:
            self._left.clear()
        self._left[x.shape, torch.is_grad_enabled()] = _AGAIN

    def leaves(self, x: Any) -> bool:
        """Return whether PyTorch is to compute this call."""
        if not self._left or not isinstance(x, Tensor):
            return False
        key = x.shape, torch.is_grad_enabled()
        count = self._left.pop(key, 0)
        if count > 1:
            self._left[key] = count - 1
        return count > 0

    def network(self, structure: StackStructure, kept: Sequence[Kept]) -> _Network | None:
        """Return the network of a structure; None if a layer has no operator."""
        key = structure.key, tuple(map(id, kept))
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                self._made = 0
                return self._known[key][1]
            if self._made >= _MOST_NEW and hash(key) not in self._passed:
                # A stack may change at each call; making a network takes longer than PyTorch's
                # call.
                _keep(self._passed, hash(key), None)
                return None
            self._made += 1
            network = _make(structure)
            _keep(self._known, key, ((structure.modules, list(kept)), network))
            return network


def _keep(those: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value; drop the oldest if there are too many."""
    those[key] = value
    while len(those) > _KEPT:
        those.popitem(last=False)


def _make(structure: StackStructure) -> _Network | None:
    try:
        network = _Network(structure)
    except SparseScanError:
        return None
    return network if network.is_right else None


_lock = new_lock()
_stacks: weakref.WeakKeyDictionary[nn.Module, _Stack] = weakref.WeakKeyDictionary()


class _Pruned(NamedTuple):
    """A masked weight of a call.

    Attributes
    ----------
    place : int
        The place of the masked parameter among the tensors of the call.
    module : Module
        The layer.
    values : Values
        The kept values.
    weight : Tensor
        The tensor that the layer shows as its weight.
    """

    place: int
    module: nn.Module
    values: Values
    weight: Tensor


class _Call(NamedTuple):
    """A call that kernels run.

    Attributes
    ----------
    network : _Network
        The network that runs.
    names : list of tuple
        The number of the layer and the name of each tensor.
    tensors : list of Tensor
        Parameters and statistics; for a pruned layer the parameter before masking.
    pruned : list of _Pruned
        The masked weights.
    """

    network: _Network
    names: list[tuple[int, str]]
    tensors: list[Tensor]
    pruned: list[_Pruned]

    def run(self, x: Tensor) -> Tensor:
        """Return the output."""
        if torch.is_grad_enabled():
            some = [x, *self.tensors]
            if any(each.requires_grad for each in some):
                masked = [each.weight for each in self.pruned]
                output: Tensor = _Step.apply(self, *some, *masked, probe)
                return output
        step = self.network.pool.take()
        output = self.forward(step, x)
        _give_back(self.network.pool, step)
        return output

    def forward(self, step: _BoundStep, x: Tensor) -> Tensor:
        """Run a step forward, record what it read, and update the running statistics."""
        output = _forward(step, x, self.names, self.tensors)
        for each in self.pruned:
            k, _ = self.names[each.place]
            each.values.set(step.step.kept_weights(str(k)))
        step.step.update_running_stats()
        for (k, name), tensor in zip(self.names, self.tensors, strict=True):
            # PyTorch counts no versions of running means and variances.
            is_counted = name == "num_batches_tracked" and self.network.layers[k].training
            if is_counted and not tensor.is_inference():
                increment_version(tensor)
        return output


def _forward(
    step: _BoundStep, x: Tensor, names: Sequence[tuple[int, str]], tensors: Sequence[Tensor]
) -> Tensor:
    arrays = dict(zip(names, map(array_of, tensors), strict=True))
    with pytorchs_threads():
        return tensor_of(step.forward(array_of(x), arrays))


def _known_of(stack: nn.Module) -> _Stack:
    """Return the cached networks of a stack."""
    known = _stacks.get(stack)
    if known is None:
        with _lock:
            known = _stacks.setdefault(stack, _Stack())
    return known


def _prepare(stack: nn.Module, known: _Stack, x: Tensor) -> _Call | None:
    """Read a stack, and set masked weights in its pruned layers; None if PyTorch has to run."""
    structure = read(stack, x)
    if structure is None:
        return None
    masks = [layer.mask for layer in structure.layers if layer.mask is not None]
    before: Any = known.kept if len(known.kept) == len(masks) else [None] * len(masks)
    with pytorchs_threads():
        kept = kept_now(masks, x.dtype, before)
    if kept is None:
        return None
    known.kept = kept
    if _is_slower(structure, kept, x):
        known.leave(x)
        return None
    network = known.network(structure, kept)
    if network is None:
        return None
    known.runs_here = True
    names, tensors, pruned = list[tuple[int, str]](), list[Tensor](), list[_Pruned]()
    following = iter(kept)
    for k, layer in enumerate(structure.layers):
        for name, tensor in layer.tensors.items():
            if name == "weight" and layer.mask is not None:
                values = Values(next(following), tensor)
                weight = masked_weight(tensor, values)
                vars(layer.module)["weight"] = weight
                pruned.append(_Pruned(len(tensors), layer.module, values, weight))
            names.append((k, name))
            tensors.append(tensor)
    return _Call(network, names, tensors, pruned)


# -- Graphs ----------------------------------------------------------------------------------------


class _Lease(NamedTuple):
    """The lease of a step that has run forward and waits for its backward pass."""

    pool: _Pool
    steps: list[_BoundStep]  # until its backward pass

    def end(self) -> None:
        """Give the step back for other calls."""
        while self.steps:
            _give_back(self.pool, self.steps.pop())


def _give_back(pool: _Pool, step: _BoundStep) -> None:
    step.release()
    pool.give_back(step)


class _Step(torch.autograd.Function):
    """The graph of a call.

    It leads to the parameters behind masked weights, and to the masked weights themselves. PyTorch
    computes the dense gradients of the latter, if somebody asks for them. The graph saves the
    tensors as well as the step, so that a second backward pass through it is right too: it runs
    forward again.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, *others: Tensor) -> Tensor:
        pool = call.network.pool
        step = pool.take()
        masked = {each.place for each in call.pruned}
        # The repeated forward pass must not update statistics again. Masked weights may differ from
        # those of the call, if an optimiser has stepped.
        saved = [
            None if k in masked else tensor.clone() if name in STATISTICS else tensor
            for k, ((_, name), tensor) in enumerate(zip(call.names, call.tensors, strict=True))
        ]
        output = call.forward(step, x)
        ctx.lease = _Lease(pool, [step])
        weakref.finalize(ctx, ctx.lease.end).atexit = False
        ctx.network, ctx.names = call.network, call.names
        ctx.pruned = [(*each[:3], weakref.ref(each.weight)) for each in call.pruned]
        ctx.save_for_backward(x, *saved)
        return output

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Any, ...]:
        if is_mapped(above):
            rows = partial(_Step.rows, ctx)
            return None, *as_batch(rows, above)
        if torch.is_grad_enabled():
            saved = (each for each in ctx.saved_tensors if each is not None)
            about = "a stack", "modules of torch.nn"
            grads = list(Once.apply(_Step.run, (ctx, above), *about, above, probe, *saved))
        else:
            grads = _Step.run(ctx, above)
        return None, *grads

    @staticmethod
    def rows(ctx: Any, above: Tensor) -> list[Tensor | None]:
        """Return the gradients in all arguments, for each of a batch of gradients in the result."""
        found = zip(*(_Step.run(ctx, each) for each in above), strict=True)
        return [None if each[0] is None else torch.stack(each) for each in found]

    @staticmethod
    def run(ctx: Any, above: Tensor) -> list[Tensor | None]:
        """Return the gradients in all arguments of the call."""
        network, (pool, steps) = ctx.network, ctx.lease
        asked = any(
            _is_asked(ctx, k - len(ctx.pruned) - 1, module, ref())
            for k, (_, module, _, ref) in enumerate(ctx.pruned)
        )
        dense = _Step.dense(ctx, above) if asked else {}
        if not steps or network.reads_again:
            x, *tensors = _Step.tensors(ctx)
        if steps:
            step = steps.pop()
        else:
            step = pool.take()
            _forward(step, x, ctx.names, tensors)
        with pytorchs_threads():
            grads = step.step.backward(array_of(above), needs_input_grad=ctx.needs_input_grad[1])
        _give_back(pool, step)
        below = None if grads.input is None else torch.from_numpy(grads.input)
        found = [
            None if name in STATISTICS else torch.from_numpy(grads.params[f"{k}.{name}"])
            for k, name in ctx.names
        ]
        for place in dense:
            found[place] = None  # the masked weight passes it on
        return [below, *found, *(dense.get(place) for place, *_ in ctx.pruned), None]

    @staticmethod
    def tensors(ctx: Any) -> list[Tensor]:
        """Return the input and all tensors of the call, unchanged.

        This raises if one of them has changed, or if they were freed.
        """
        x, *tensors = ctx.saved_tensors
        for place, _, values, _ in ctx.pruned:
            tensors[place] = values.full()
        return [x, *tensors]

    @staticmethod
    def dense(ctx: Any, above: Tensor) -> dict[int, Tensor]:
        """Return the dense gradients in masked weights, by their places."""
        x, *tensors = (each.detach() for each in _Step.tensors(ctx))
        layers = list(map(copy.copy, ctx.network.layers))
        with torch.enable_grad():
            asked = {place: tensors[place].requires_grad_() for place, *_ in ctx.pruned}
            for (k, name), tensor in zip(ctx.names, tensors, strict=True):
                vars(layers[k])[name] = tensor.clone() if name in STATISTICS else tensor
            for layer in layers:
                x = layer.forward(x)
            grads = torch.autograd.grad(x, list(asked.values()), above.detach())
        return dict(zip(asked, grads, strict=True))


def _is_asked(ctx: Any, edge: int, layer: nn.Module, weight: Tensor | None) -> bool:
    """Return whether somebody may use the gradient in a masked weight."""
    if weight is None:
        return False
    if not is_untouched(weight) and is_looked_at(weight):
        return True
    if not asks_for_some(ctx, [ctx.next_functions[edge][0]]):
        return False
    # A caller that asks for some gradients holds a further reference to the tensors.
    own = vars(layer).get("weight") is weight
    return sys.getrefcount(weight) > _alone() + own


def _count(_: Any, __: Any, ___: Any, weight: Any) -> int:
    """Return the number of references to a tensor, as :func:`_is_asked` counts them."""
    return sys.getrefcount(weight)


@cache
def _alone() -> int:
    """Return the number of references to a tensor that nobody else holds."""
    held = [torch.zeros(1, device="cpu")]
    ref = weakref.ref(held[0])
    return _count(None, None, None, ref()) - len(held)
