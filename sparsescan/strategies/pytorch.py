"""Convert PyTorch networks to graphs, and plans to PyTorch's terms; imports PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.pipelining import SplitPoint
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.fx.passes.shape_prop import ShapeProp

from ..errors import InputError, InputTypeError, SparseScanError
from ..jacobians import from_torch as operators_of
from .graph import Graph, Layer
from .networks import Builder
from .strategy import Prediction

# Samples with which shapes are found.
_BATCH = 2
# Calls of functions, methods and modules, in small letters, that jacobians does not read.
_ELEMENTWISE = {
    *("relu", "relu_", "relu6", "gelu", "silu", "tanh", "sigmoid", "elu", "leaky_relu", "dropout"),
    *("dropout2d", "hardswish", "hardsigmoid", "hardtanh", "contiguous"),
}
_SHAPES = {"flatten", "view", "reshape"}
# Normalisations by numbers that depend on the whole sample.
_WHOLE = {"groupnorm", "localresponsenorm"}


def from_torch(module: nn.Module, input_shape: Sequence[int], name: str = "network") -> Graph:
    """Return the graph of a PyTorch network, by `torch.fx`.

    Parameters
    ----------
    module : torch.nn.Module
        A network with one input and one output, such as a Sequential or one with residual blocks:
        convolutions, poolings, linear layers, normalisations, activations, sums and
        concatenations of channels.
    input_shape : sequence of int
        Shape of one sample.
    name : str
        Name of the graph.

    Returns
    -------
    Graph
        Its layers have the names of the modules; for calls of functions, the names of `torch.fx`.

    Raises
    ------
    InputTypeError
        If `module` is not a Module.
    InputError
        If it cannot be traced, or a layer is none of these.

    Examples
    --------
    >>> from torch import nn
    >>> from sparsescan.strategies.pytorch import from_torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    >>> graph = from_torch(net, (3, 8, 8))
    >>> graph, [layer.kind for layer in graph.layers[1:]]
    (Graph('network', 5 layers, 3114 weights), ['conv', 'elementwise', 'flatten', 'linear'])
    """
    traced = _trace(module, input_shape)
    modules, builder = dict(traced.named_modules()), Builder(name, tuple(input_shape))
    numbers, names = dict[fx.Node, int](), set[str]()
    for node in traced.graph.nodes:
        if node.op in ("placeholder", "output"):
            numbers[node] = 0
            continue
        own = modules[str(node.target)] if node.op == "call_module" else None
        title = node.name if own is None else str(node.target)
        if title in names:
            raise InputError(
                f"module calls {title} twice; expected layers with parameters of their own"
            )
        names.add(title)
        before = builder.last
        try:
            number = _add(builder, node, own, [numbers[one] for one in node.all_input_nodes])
            if builder.layers[number].shape != _shape(node):
                raise InputError(f"its output has shape {_shape(node)}, which was not foreseen")
        except SparseScanError as error:
            raise InputError(
                f"module has {title}, which is {own or node.target}: {error}"
            ) from error
        numbers[node] = number
        if number > before:
            builder.layers[number] = replace(builder.layers[number], name=title)
    return builder.graph()


def _trace(module: nn.Module, input_shape: Sequence[int]) -> fx.GraphModule:
    """Return the calls of a module, with the shapes of what they return."""
    if not isinstance(module, nn.Module):
        raise InputTypeError(
            f"module is a {type(module).__name__}; expected a torch.nn.Module, whose graph is to "
            "be found"
        )
    training = module.training
    like = next(module.parameters(), torch.empty(0))
    samples = torch.ones(_BATCH, *input_shape, dtype=like.dtype, device=like.device)
    try:
        traced = fx.symbolic_trace(module.eval())
        ShapeProp(traced).propagate(samples)
    except Exception as error:
        # Whatever the module itself raises.
        raise InputError(
            f"module is {type(module).__name__}, which torch.fx cannot trace for input_shape "
            f"{tuple(input_shape)}: {error}"
        ) from error
    finally:
        module.train(training)
    return traced


def _add(builder: Builder, node: fx.Node, module: Any, inputs: list[int]) -> int:
    """Add the layers of a call of a module, of a function or of a method; return the last."""
    x = inputs[0] if inputs else 0
    called = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if module is not None:
        called = type(module).__name__.lower()
    if called == "identity":
        return x
    if called in _ELEMENTWISE and len(inputs) == 1:
        return builder.elementwise(x=x)
    if called in _SHAPES and len(inputs) == 1:
        return builder.flatten(x=x)
    if called in _WHOLE:
        weights = sum(p.numel() for p in module.parameters())
        shape, nnz = builder.layers[x].shape, builder.layers[x].size ** 2
        return builder.add(Layer("", "norm", (), shape, weights, nnz=nnz), x)
    if called in ("add", "add_", "iadd") and len(inputs) == 2:
        return builder.sum(*inputs)
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if node.target is torch.cat and axis == 1:
        return builder.concat(*inputs)
    if called == "adaptive_avg_pool2d":
        module = nn.AdaptiveAvgPool2d(_shape(node)[1:])
    if module is None:
        raise InputError("expected a layer, an activation, a sum, or a concatenation of channels")
    # Of another precision, and on another device, it is the same layer.
    layer = copy.deepcopy(module).eval().float().cpu()
    return builder.extend(operators_of(layer, builder.layers[x].shape), x)


def _shape(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of what a call returns, for one sample."""
    return tuple(node.meta["tensor_meta"].shape)[1:]


@dataclass(frozen=True)
class TorchPlan:
    """A plan in PyTorch's terms.

    Attributes
    ----------
    mesh : dict of str to int
        Names and sizes of the axes of a device mesh: `init_device_mesh` takes
        ``tuple(mesh.values())`` and ``mesh_dim_names=tuple(mesh)``. Samples are shared along
        "samples", by DistributedDataParallel or FSDP; "stages" are those of a pipeline.
    parallelize : dict of str to ParallelStyle
        For ``parallelize_module(model, mesh["channels"], parallelize)``.
    split_points : dict of str to SplitPoint
        For ``torch.distributed.pipelining.pipeline(…, split_spec=split_points)``.
    left : dict of str to str
        Layers with parameters that PyTorch cannot divide as planned, or cannot begin a stage with,
        and what is done in place of it.
    """

    mesh: dict[str, int]
    parallelize: dict[str, Any]
    split_points: dict[str, SplitPoint]
    left: dict[str, str]


def to_torch(prediction: Prediction, module: nn.Module, workers: int) -> TorchPlan:
    """Return a plan for a PyTorch network in PyTorch's terms.

    Linear layers that are cut along channels become entries of ``parallelize_module`` on an axis of
    the mesh. A pipeline's registers become split points. All other layers share samples.

    Parameters
    ----------
    prediction : Prediction
        A prediction for :func:`from_torch`'s graph of this module.
    module : torch.nn.Module
        The network.
    workers : int
        Number of workers, as predicted.

    Returns
    -------
    TorchPlan

    Raises
    ------
    InputError
        If the plan is for another module, or for a scan, which PyTorch does not have.

    Examples
    --------
    >>> from torch import nn
    >>> from sparsescan.strategies import Machine
    >>> from sparsescan.strategies.integrated import Integrated
    >>> from sparsescan.strategies.pytorch import from_torch, to_torch
    >>> net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8))
    >>> predicted = Integrated((2, 4), ("model",)).predict(
    ...     from_torch(net, (64,)), Machine(), workers=8, batch=64
    ... )
    >>> to_torch(predicted, net, 8).mesh
    {'samples': 4, 'channels': 2}
    """
    modules = dict(module.named_modules())
    calls = [layer for layer in prediction.layers if layer.name in modules]
    if prediction.strategy == "scan" or not calls:
        why = "scans, which PyTorch does not have" if calls else "has no layers of module"
        raise InputError(
            f"prediction is {prediction.strategy!r}, which {why}; expected one for the graph of "
            "module by another strategy"
        )
    if prediction.strategy.startswith("pipeline"):
        return _stages(prediction, modules, workers)
    linear = [one.name for one in calls if isinstance(modules[one.name], nn.Linear)]
    channels = max((one.configuration[1] for one in calls if one.name in linear), default=1)
    mesh = {"samples": workers // channels}
    if channels > 1:
        mesh["channels"] = channels
    entries: dict[str, Any] = {}
    left: dict[str, str] = {}
    for one in calls:
        # A layer without parameters is computed where its input is.
        if not any(True for _ in modules[one.name].parameters()):
            continue
        n, c, h, w = one.configuration
        if one.name in linear and c == channels > 1:
            whole = Replicate()
            entries[one.name] = ColwiseParallel(input_layouts=whole, output_layouts=whole)
        elif c * h * w > 1 or n > mesh["samples"]:
            rest = " and computed by all along channels" if channels > 1 else ""
            left[one.name] = f"planned as {one.configuration}, cut along samples only{rest}"
    return TorchPlan(mesh, entries, {}, left)


def _stages(prediction: Prediction, modules: dict[str, nn.Module], workers: int) -> TorchPlan:
    points: dict[str, SplitPoint] = {}
    left: dict[str, str] = {}
    layers = prediction.layers
    for k in range(1, len(layers)):
        if layers[k].devices == layers[k - 1].devices:
            continue
        # PyTorch cuts at modules only.
        name = next((one.name for one in layers[k:] if one.name in modules), None)
        if name is not None:
            points[name] = SplitPoint.BEGINNING
        if name != layers[k].name:
            left[layers[k].name] = f"its stage begins with {name or 'nothing'}, the next module"
    return TorchPlan({"stages": workers}, {}, points, left)
