"""Networks of PyTorch as graphs, and plans as PyTorch takes them; imports PyTorch."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining import SplitPoint
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.fx.passes.shape_prop import ShapeProp
from torch.utils.benchmark import Timer

from ..errors import InputError, InputTypeError
from ..symbolic.schedule import check_count
from .architectures import Builder, pair
from .graph import Graph, Layer
from .machine import Machine, load_machine
from .strategy import Prediction
from .times import PARTS, Times

__all__ = ["TorchPlan", "from_torch", "measure_module", "to_torch"]

# Samples with which shapes are found.
_BATCH = 2
# How often a batch is halved to measure times of fewer samples, and seconds of each measurement.
_HALVINGS, _SECONDS = 4, 0.01
_ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.ELU, nn.Tanh, nn.Sigmoid),
    *(nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Dropout, nn.Dropout2d),
    nn.Identity,
)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm)
_ELEMENTWISE = (
    *("relu", "relu_", "gelu", "silu", "tanh", "sigmoid", "elu", "leaky_relu", "dropout"),
    *("hardswish", "hardtanh", "relu6", "contiguous"),
)
_SHAPES = "flatten", "view", "reshape"


def from_torch(module: nn.Module, input_shape: Sequence[int], name: str = "network") -> Graph:
    """Return the graph of a network of PyTorch, which `torch.fx` traces.

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
        Its layers have the names of the modules, or those of `torch.fx` for calls of functions.

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
    return _Reader(_trace(module, input_shape), name, tuple(input_shape)).graph()


def _trace(module: nn.Module, input_shape: Sequence[int]) -> fx.GraphModule:
    """Return the calls of a module, with the shapes of what they return."""
    if not isinstance(module, nn.Module):
        raise InputTypeError(
            f"module is a {type(module).__name__}; expected a torch.nn.Module, whose graph is to "
            "be found"
        )
    training = module.training
    try:
        traced = fx.symbolic_trace(module.eval())
        ShapeProp(traced).propagate(_samples(module, _BATCH, input_shape))
    except Exception as error:
        # Whatever the module itself raises.
        raise InputError(
            f"module is {type(module).__name__}, which torch.fx cannot trace for input_shape "
            f"{tuple(input_shape)}: {error}"
        ) from error
    finally:
        module.train(training)
    return traced


def _samples(module: nn.Module, count: int, input_shape: Sequence[int]) -> Tensor:
    """Return samples of the dtype of a module's parameters, on their device."""
    like = next(module.parameters(), torch.empty(0))
    return torch.ones(count, *input_shape, dtype=like.dtype, device=like.device)


class _Reader:
    """Adds the layers of a traced module to a builder."""

    def __init__(self, traced: fx.GraphModule, name: str, shape: tuple[int, ...]) -> None:
        self._modules, self._numbers = dict(traced.named_modules()), dict[fx.Node, int]()
        self._builder, self._names = Builder(name, shape), set[str]()
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                self._numbers[node] = 0
            elif node.op != "output":
                self._numbers[node] = self._add(node)

    def graph(self) -> Graph:
        """Return the graph."""
        return self._builder.graph()

    def _add(self, node: fx.Node) -> int:
        module = self._modules[str(node.target)] if node.op == "call_module" else None
        name = node.name if module is None else str(node.target)
        if name in self._names:
            raise InputError(
                f"module calls {name} twice; expected layers with parameters of their own"
            )
        self._names.add(name)
        number = self._layer(node, module, [self._numbers[one] for one in node.all_input_nodes])
        layer = self._builder.layers[number]
        if number != self._builder.last or layer.shape != _shape(node):
            raise self._wrong(node)
        if module is not None:
            layer = replace(layer, weights=sum(p.numel() for p in module.parameters()))
        self._builder.layers[number] = replace(layer, name=name)
        return number

    def _layer(self, node: fx.Node, module: nn.Module | None, inputs: list[int]) -> int:
        """Add the layer of a module, or of a call of a function or a method."""
        builder, x = self._builder, inputs[0] if inputs else 0
        called = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        unary = called if len(inputs) == 1 else ""
        if isinstance(module, _ACTIVATIONS) or unary in _ELEMENTWISE:
            return builder.elementwise(x=x)
        if isinstance(module, nn.Flatten) or unary in _SHAPES:
            is_flat = len(builder.layers[x].shape) == 1
            return builder.elementwise(x=x) if is_flat else builder.flatten(x=x)
        if isinstance(module, nn.AdaptiveAvgPool2d) or called == "adaptive_avg_pool2d":
            return self._means(node, x)
        if called in ("add", "add_", "iadd") and len(inputs) == 2:
            return builder.sum(*inputs)
        axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        if node.target is torch.cat and axis == 1:
            return builder.concat(*inputs)
        if isinstance(module, _NORMS):
            # By numbers that are fixed, or that depend on the whole sample.
            fixed = isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d))
            shape, nnz = builder.layers[x].shape, builder.layers[x].size ** (1 if fixed else 2)
            return builder.add(Layer(builder.name_of("norm"), "norm", (x,), shape, nnz=nnz))
        if isinstance(module, nn.Linear) and len(builder.layers[x].shape) == 1:
            return builder.linear(module.out_features, x=x)
        if isinstance(module, (nn.MaxPool2d, nn.AvgPool2d, nn.Conv2d)):
            windows: Any = module.kernel_size, module.stride, module.padding
            if not isinstance(module, nn.Conv2d):
                return builder.pool(*windows, x=x)
            if set(pair(module.dilation)) == {1} and not isinstance(module.padding, str):
                return builder.conv(module.out_channels, *windows, groups=module.groups, x=x)
        raise self._wrong(node)

    def _means(self, node: fx.Node, x: int) -> int:
        """Add means over windows, of the sizes that the output has."""
        shape, out = self._builder.layers[x].shape, _shape(node)[1:]
        if any(n % m for n, m in zip(shape[1:], out, strict=True)):
            raise self._wrong(node)
        height, width = (n // m for n, m in zip(shape[1:], out, strict=True))
        return self._builder.pool((height, width), x=x)

    def _wrong(self, node: fx.Node) -> InputError:
        what = self._modules.get(str(node.target), node.target)
        return InputError(
            f"module has {node.name}, which is {what}; expected convolutions without dilation, "
            "poolings, linear layers of vectors, normalisations, activations, sums, or "
            "concatenations of channels"
        )


def _shape(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of what a call returns, for one sample."""
    return tuple(node.meta["tensor_meta"].shape)[1:]


def measure_module(
    module: nn.Module, input_shape: Sequence[int], batch: int = 64, machine: Machine | None = None
) -> Machine:
    """Measure the layers of a network as PyTorch runs them, on the device of its parameters.

    Each is called with random numbers, forward, backward to its input, and backward to its
    parameters, which plain SGD then updates; for a batch, and for fewer samples. Convolutions and
    linear layers are measured with half of their outputs, too: a worker that has some of the
    channels reads the whole input. The loss is the cross-entropy of the outputs. A copy of the
    module is called, as it is in training.

    Parameters
    ----------
    module : torch.nn.Module
        A network that :func:`from_torch` takes.
    input_shape : sequence of int
        Shape of one sample.
    batch : int
        Samples of a step.
    machine : Machine, optional
        Where memory and networks are taken from; by default that of
        :func:`~sparsescan.strategies.load_machine`.

    Returns
    -------
    Machine
        For graphs that :func:`from_torch` makes of this module.

    Raises
    ------
    InputTypeError
        If `module` is not a Module.
    InputError
        If it cannot be traced, a layer is unknown, or `batch` is not a positive number.

    Examples
    --------
    >>> from torch import nn
    >>> from sparsescan.strategies import BatchParallel
    >>> from sparsescan.strategies.pytorch import from_torch, measure_module
    >>> net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8))
    >>> machine = measure_module(net, (64,), batch=16)
    >>> predicted = BatchParallel().predict(from_torch(net, (64,)), machine, workers=4, batch=16)
    """
    batch = check_count("batch", batch, 1)
    graph = from_torch(module, input_shape)
    traced = _out_of_place(fx.symbolic_trace(copy.deepcopy(module).train()))
    # Some normalisations cannot be trained on one sample.
    sizes = sorted({max(min(batch, 2), batch >> k) for k in range(_HALVINGS + 1)})
    runs = [_Timed(traced).measure(_samples(module, n, input_shape)) for n in sizes]
    table = np.stack([run.parts for run in runs], axis=-1)
    # An update takes as long for any number of samples.
    update = table[:, PARTS.index("update")]
    update[:] = np.median(update, axis=-1, keepdims=True)
    parts = {part: table[:, k] for k, part in enumerate(PARTS)}
    halves = {part: runs[-1].halves[:, k] for k, part in enumerate(PARTS)}
    loss = np.array([run.loss for run in runs])
    times = Times(graph.layers[1:], sizes, parts, halves, {}, loss, 0.0, {}, 1.0)
    given = load_machine() if machine is None else machine
    return replace(given, name=f"{given.name}, layers measured with PyTorch", times=times)


def _out_of_place(traced: fx.GraphModule) -> fx.GraphModule:
    """Return a traced module none of whose calls overwrites its input, which is used again."""
    for module in traced.modules():
        if "inplace" in vars(module):
            vars(module)["inplace"] = False
    for node in traced.graph.nodes:
        if node.op == "call_method" and node.target.endswith("_"):
            node.target = node.target[:-1]
        elif node.target is operator.iadd:
            node.target = operator.add
        elif getattr(node.target, "__name__", "").endswith("_"):
            node.target = getattr(torch, node.target.__name__[:-1])
        if node.kwargs.get("inplace"):
            node.kwargs = {**node.kwargs, "inplace": False}
    traced.recompile()
    return traced


class _Timed(fx.Interpreter):
    """Runs a traced module call by call, and measures each.

    ``parts`` are nanoseconds, (calls, parts); ``halves``, (calls, parts, 2), are those of the whole
    layer and of half of its outputs, nan where there is no such half; ``loss`` is the time of the
    cross-entropy and its gradient.
    """

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced, garbage_collect_values=False)
        self._times, self._halves = list[list[float]](), list[list[float]]()

    def measure(self, x: Tensor) -> _Timed:
        """Run with random numbers of this shape; return itself."""
        logits = self.run(torch.randn_like(x).requires_grad_()).flatten(1)
        self.parts = np.array(self._times)
        self.halves = np.stack([self.parts, np.array(self._halves)], axis=-1)
        labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)

        def loss() -> None:
            torch.autograd.grad(nn.functional.cross_entropy(logits, labels), logits)

        self.loss = _nanoseconds(loss)
        return self

    def run_node(self, node: fx.Node) -> Any:
        """Run a call; its output begins a graph of its own for autograd."""
        y = super().run_node(node)
        if node.op in ("placeholder", "output"):
            return y
        inputs = [self.env[one] for one in node.all_input_nodes]
        module = self.fetch_attr(str(node.target)) if node.op == "call_module" else None
        params = [] if module is None else [*module.parameters()]
        self._times.append(_parts(lambda: super(_Timed, self).run_node(node), inputs, params))
        half, times = _half_of(module), [math.nan] * len(PARTS)
        if half is not None:
            times = _parts(lambda: half(*inputs), inputs, [*half.parameters()])
        self._halves.append(times)
        return y.detach().requires_grad_()


def _half_of(module: Any) -> nn.Module | None:
    """Return a layer with the first half of the outputs, if it can be cut so."""
    linear, convolution = isinstance(module, nn.Linear), isinstance(module, nn.Conv2d)
    if not (linear or (convolution and module.groups == 1)) or len(module.weight) < 2:
        return None
    half: nn.Module = copy.deepcopy(module)
    for name, param in module.named_parameters(recurse=False):
        setattr(half, name, nn.Parameter(param[: len(module.weight) // 2].detach().clone()))
    return half


def _parts(call: Callable[[], Tensor], inputs: list[Any], params: list[Any]) -> list[float]:
    """Return nanoseconds of each of :data:`PARTS` of a call."""
    y = call()
    grad, own = torch.randn_like(y), [each.detach().clone() for each in params]
    for each in own:
        each.grad = torch.zeros_like(each)

    def back(leaves: list[Any]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True)

    taken = dict.fromkeys(PARTS, 0.0)
    taken["forward"] = _nanoseconds(call)
    taken["product"] = _nanoseconds(back(inputs))
    if params:
        taken["params"] = _nanoseconds(back(params))
        taken["update"] = _nanoseconds(torch.optim.SGD(own).step)
    return [taken[part] for part in PARTS]


def _nanoseconds(call: Callable[[], Any]) -> float:
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return 1e9 * timer.blocked_autorange(min_run_time=_SECONDS).median


@dataclass(frozen=True)
class TorchPlan:
    """A plan as PyTorch takes it.

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
        Layers with parameters that PyTorch cannot divide as planned, or with which it cannot begin
        a stage, and what is done instead.
    """

    mesh: dict[str, int]
    parallelize: dict[str, Any]
    split_points: dict[str, SplitPoint]
    left: dict[str, str]


def to_torch(prediction: Prediction, module: nn.Module, workers: int) -> TorchPlan:
    """Return a plan for a network of PyTorch as PyTorch takes it.

    Linear layers that are cut along channels become entries of ``parallelize_module`` on an axis
    of the mesh; a pipeline's registers become split points. The rest is shared along samples.

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
        If the plan is not of this module, or is that of a scan, which PyTorch does not have.

    Examples
    --------
    >>> from torch import nn
    >>> from sparsescan.strategies import Integrated, Machine
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
