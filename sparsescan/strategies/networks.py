"""Networks: those that are built in, as graphs and as operators, and those that are trained."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from ..checks import check_count
from ..errors import InputError, InputTypeError, short
from ..jacobians import (
    AdaptiveAvgPool2d,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Flatten,
    Linear,
    MaxPool2d,
    Pad,
    ReLU,
    Residual,
    Sequential,
    Softmax,
    Tanh,
)
from ..jacobians.activations import Elementwise
from ..jacobians.reshape import Permute
from ..jacobians.shared.operator import Operator
from ..recurrent import Cell, GRUCell, RNNCell
from ..symbolic.pattern import Pattern
from .graph import Graph, Layer

#: Names for :func:`sparsescan.strategies.build`; ``N`` is 8, 14, 20, …, and ``T`` a count of steps.
NAMES = (
    "lenet5",
    "alexnet",
    "alexnet-owt",
    "vgg11",
    "vgg16",
    "resnet-N",
    "inception-v3",
    "rnn:T",
    "gru:T",
)

# Chains of layers, each as (channels, kernel, stride, padding, groups) of a convolution, whose last
# entries may be left out and which an activation follows, "M" for max-pools of 3 by 2 or "m" of 2
# by 2, or the features of a linear layer. The first entry is the shape of a sample.
_Chain = tuple[tuple[int, ...], Sequence[str | int | tuple[int, ...]]]


def _vgg(*widths: int | str) -> list[str | tuple[int, ...]]:
    """Return 3×3 convolutions of so many channels, and max-pools."""
    return [width if isinstance(width, str) else (width, 3, 1, 1) for width in widths]


_VGG11 = _vgg(64, "m", 128, "m", 256, 256, "m", 512, 512, "m", 512, 512, "m")
_VGG16 = _vgg(
    *(64, 64, "m", 128, 128, "m", *((256,) * 3), "m", *((512,) * 3), "m", *((512,) * 3), "m")
)
_LINEAR = (4096, 4096, 1000)
_CHAINS: dict[str, _Chain] = {
    "lenet5": ((1, 32, 32), [(6, 5), "m", (16, 5), "m", 120, 84, 10]),
    "alexnet": (
        (3, 227, 227),
        [
            *((96, 11, 4), "M", (256, 5, 1, 2, 2), "M"),
            *((384, 3, 1, 1), (384, 3, 1, 1, 2), (256, 3, 1, 1, 2), "M", *_LINEAR),
        ],
    ),
    "alexnet-owt": (
        (3, 224, 224),
        [
            *((64, 11, 4, 2), "M", (192, 5, 1, 2), "M"),
            *((384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1), "M", *_LINEAR),
        ],
    ),
    "vgg11": ((3, 32, 32), [*_VGG11, 10]),
    "vgg16": ((3, 224, 224), [*_VGG16, *_LINEAR]),
}
#: The cell, entries of an input, and classes of the recurrent experiments; hidden units.
CELLS: dict[str, tuple[type[Cell], int, int]] = {"rnn": (RNNCell, 1, 10), "gru": (GRUCell, 20, 9)}
HIDDEN = 20


class Builder:
    """A graph of samples of a shape, to which layers are added one by one.

    Every method that adds a layer returns its number; its name begins with `prefix`. A layer reads
    the one that was added last, or layer ``x``. Shapes, parameters and entries are those of the
    operator. Multiply-adds are those of convolutions, linear layers and cells, as they are usually
    counted.

    Examples
    --------
    >>> from sparsescan.strategies.networks import Builder
    >>> builder = Builder("small", (3, 32, 32))
    >>> builder.conv(64, 3, padding=1)
    1
    >>> builder.layers[1].nnz
    1696512
    """

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name = name
        self.layers = [Layer("input", "input", (), shape)]
        self.prefix = ""
        self._named: Counter[str] = Counter()

    @property
    def last(self) -> int:
        """Number of the layer that was added last."""
        return len(self.layers) - 1

    def graph(self) -> Graph:
        """Return the graph of all layers."""
        return Graph(self.name, self.layers)

    def add(self, layer: Layer, *inputs: int) -> int:
        """Add a layer that reads others, by default the last, under a name of its kind."""
        start = self.prefix + layer.kind
        self._named[start] += 1
        name = f"{start}{self._named[start]}"
        self.layers.append(replace(layer, name=name, inputs=inputs or (self.last,)))
        return self.last

    def extend(self, ops: Iterable[Operator], x: int | None = None) -> int:
        """Add the layers of operators, the first of which reads layer `x`; return the last."""
        x = self.last if x is None else x
        for op in ops:
            if isinstance(op, Residual):
                x = self.sum(self.extend(op.ops, x), self.extend(op.shortcut, x))
            else:
                x = self.add(_layer(op), x)
        return x

    def conv(
        self,
        channels: int,
        kernel: Any,
        stride: Any = 1,
        padding: Any = 0,
        *,
        groups: int = 1,
        norm: bool = False,
        x: int | None = None,
    ) -> int:
        """Add a convolution with a bias, or with a batch normalisation and a ReLU in one layer."""
        x = self.last if x is None else x
        shape = self.layers[x].shape
        sizes = shape[0], channels, kernel, stride, padding
        layer = _made(Conv2d, *sizes, groups=groups, bias=not norm, input_shape=shape)
        # The normalisation has a factor and a bias for each channel.
        return self.add(replace(layer, weights=layer.weights + 2 * channels * norm), x)

    def pool(self, *sizes: Any, x: int | None = None) -> int:
        """Add a pooling, by maxima or means: its kernel, stride and padding."""
        return self._reading(x, MaxPool2d, *sizes)

    def linear(self, features: int, *, x: int | None = None) -> int:
        """Add a linear layer with a bias."""
        x = self.last if x is None else x
        return self.add(_made(Linear, self.layers[x].size, features), x)

    def cells(self, cell: Cell, steps: int) -> int:
        """Add the steps of a recurrent network, which read inputs of their own, too."""
        shapes = cell.shapes.values()
        taps = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
        weights, state = sum(map(math.prod, shapes)), (cell.state_size,)
        first = Layer("", "cell", (), state, weights, taps, cell.nnz)
        later = replace(first, weights=0, shares=self.last + 1)
        for t in range(steps):
            self.add(later if t else first)
        return self.last

    def elementwise(self, *, x: int | None = None) -> int:
        """Add an activation."""
        return self._reading(x, ReLU)

    def flatten(self, *, x: int | None = None) -> int:
        """Add a layer that joins the axes of an image."""
        return self._reading(x, Flatten)

    def sum(self, *inputs: int) -> int:
        """Add a sum; zeros continue inputs with fewer channels than the first."""
        return self._join("add", inputs, self.layers[inputs[0]].shape)

    def concat(self, *inputs: int) -> int:
        """Add a layer that joins the channels of some layers."""
        shapes = [self.layers[k].shape for k in inputs]
        return self._join("concat", inputs, (sum(s[0] for s in shapes), *shapes[0][1:]))

    def _join(self, kind: str, inputs: tuple[int, ...], shape: tuple[int, ...]) -> int:
        nnz = sum(self.layers[k].size for k in inputs)
        return self.add(Layer("", kind, inputs, shape, nnz=nnz), *inputs)

    def _reading(self, x: int | None, kind: type[Operator], *sizes: Any) -> int:
        x = self.last if x is None else x
        return self.add(_made(kind, *sizes, input_shape=self.layers[x].shape), x)


# All other layers mix or move the elements, as a "norm" does.
_KINDS: dict[str, tuple[type[Operator], ...]] = {
    "conv": (Conv2d,),
    "pool": (MaxPool2d, AvgPool2d, AdaptiveAvgPool2d),
    "linear": (Linear,),
    "flatten": (Flatten, Permute),
    "softmax": (Softmax,),
    "elementwise": (Dropout, Elementwise),
}


def _layer(op: Operator) -> Layer:
    """Return what an operator is in a graph, without a name and inputs."""
    kind = next((kind for kind, ops in _KINDS.items() if isinstance(op, ops)), "norm")
    # Without the statistics of a normalisation, which are not learned.
    every: dict[str, tuple[int, ...]] = getattr(op, "shapes", {})
    shapes = {name: shape for name, shape in every.items() if not name.startswith("running")}
    nnz, shape = op.nnz, op.output_shape
    layer = Layer("", kind, (), shape, sum(map(math.prod, shapes.values())), nnz=nnz)
    if isinstance(op, AdaptiveAvgPool2d):
        y, x = (-(-n // m) for n, m in zip(op.input_shape[-2:], shape[-2:], strict=True))
        return replace(layer, kernel=(y, x), stride=(y, x))
    if kind == "linear":
        return replace(layer, multiply_adds=nnz)
    if isinstance(op, Conv2d):
        taps = math.prod(shapes["weight"]) * math.prod(shape[:-3]) * math.prod(shape[-2:])
        layer = replace(layer, multiply_adds=taps, groups=op.groups)
    if isinstance(op, (Conv2d, MaxPool2d, AvgPool2d)):
        y, x = (d * (k - 1) + 1 for k, d in zip(op.kernel_size, op.dilation, strict=True))
        sizes: Any = op.stride, op.padding
        return replace(layer, kernel=(y, x), stride=sizes[0], padding=sizes[1])
    return layer


@lru_cache(1 << 10)
def _made(kind: type[Operator], *sizes: Any, **options: Any) -> Layer:
    return _layer(kind(*sizes, **options))


# -------------------------------------------------------------------------------------------------
# Networks by name
# -------------------------------------------------------------------------------------------------


def built_in(name: str) -> Graph:
    """Return the graph of a network that is built in."""
    kind, colon, steps = name.partition(":")
    if kind in CELLS and colon and steps.isdecimal() and steps.strip("0"):
        if len(steps) > _DIGITS:
            raise InputError(f"network is {short(name)}; expected fewer than {10**_DIGITS:,} steps")
        cell, features, classes = CELLS[kind]
        builder = Builder(name, (HIDDEN,))
        builder.cells(cell(features, HIDDEN), int(steps))
        builder.linear(classes)
        return builder.graph()
    if _blocks(name):
        return _resnet(name)
    if name == "inception-v3":
        return _inception(name)
    if name not in _CHAINS:
        raise InputError(
            f"network is {short(name)}; expected one of {', '.join(NAMES)}, where N is 6n + 2, as "
            "in resnet-110, and T at least 1"
        )
    return from_sequential(Sequential(_chain(name, np.random.default_rng(0))), name)


def _blocks(name: str) -> int:
    """Return the blocks of each width of ``resnet-N``; 0 if the name is another."""
    match = re.fullmatch(f"resnet-([1-9][0-9]{{0,{_DIGITS - 1}}})", name)
    layers = int(match[1]) if match else 0
    if layers in (50, 152):
        raise InputError(
            f"network is {name!r}, of which the better known is for ImageNet and is not built in; "
            f"expected one of {', '.join(NAMES)}, such as resnet-56"
        )
    return layers // 6 if layers % 6 == 2 else 0


def _widths(name: str) -> Iterator[tuple[int, int, int]]:
    """Yield channels, number among those, and stride of every block of ``resnet-N``."""
    for channels in (16, 32, 64):
        for block in range(_blocks(name)):
            yield channels, block, 2 if channels > 16 and block == 0 else 1


def _resnet(name: str) -> Graph:
    builder = Builder(name, (3, 32, 32))
    builder.conv(16, 3, padding=1, norm=True)
    for channels, block, stride in _widths(name):
        start = builder.last
        builder.prefix = f"{channels}.{block}."
        builder.conv(channels, 3, stride, 1, norm=True)
        inner = builder.conv(channels, 3, padding=1, norm=True)
        # Every other place of the input, whose channels zeros continue.
        builder.sum(inner, start if stride == 1 else builder.pool(1, 2, x=start))
    builder.prefix = ""
    builder.pool(8)
    builder.flatten()
    builder.linear(10)
    return builder.graph()


# The modules of Inception-v3 and their branches: channels@kernel, then /stride where height and
# width are not kept, of each convolution; | between two that read the same; poolings by name.
# More steps, or layers, would take seconds to write down.
_DIGITS = 5
_FORK = "384@1x3|384@3x1"
_MODULES = {
    **{
        f"A{k + 1}": ("64@1", "48@1 64@5", "64@1 96@3 96@3", f"mean {c}@1")
        for k, c in enumerate((32, 64, 64))
    },
    "B1": ("384@3/2", "64@1 96@3 96@3/2", "max"),
    **{
        f"C{k + 1}": (
            "192@1",
            f"{c}@1 {c}@1x7 192@7x1",
            f"{c}@1 {c}@7x1 {c}@1x7 {c}@7x1 192@1x7",
            "mean 192@1",
        )
        for k, c in enumerate((128, 160, 160, 192))
    },
    "D1": ("192@1 320@3/2", "192@1 192@1x7 192@7x1 192@3/2", "max"),
    **dict.fromkeys(
        ("E1", "E2"), ("320@1", f"384@1 {_FORK}", f"448@1 384@3 {_FORK}", "mean 192@1")
    ),
}


def _inception(name: str) -> Graph:
    builder = Builder(name, (3, 299, 299))
    for channels, kernel, stride, padding in ((32, 3, 2, 0), (32, 3, 1, 0), (64, 3, 1, 1)):
        builder.conv(channels, kernel, stride, padding, norm=True)
    builder.pool(3, 2)
    builder.conv(80, 1, norm=True)
    builder.conv(192, 3, norm=True)
    builder.pool(3, 2)
    for module, branches in _MODULES.items():
        builder.prefix, start = f"Inception{module}.", builder.last
        ends: list[int] = []
        for branch in branches:
            x = [start]
            for part in branch.split():
                x = [_branch_layer(builder, one, x[0]) for one in part.split("|")]
            ends += x
        builder.concat(*ends)
    builder.prefix = ""
    builder.pool(8)
    builder.flatten()
    builder.linear(1000)
    return builder.graph()


def _branch_layer(builder: Builder, text: str, x: int) -> int:
    """Add a layer of a branch of Inception-v3."""
    if text in ("mean", "max"):
        return builder.pool(3, 1, 1, x=x) if text == "mean" else builder.pool(3, 2, x=x)
    channels, _, sizes = text.partition("@")
    kernel, _, stride = sizes.partition("/")
    height, _, width = kernel.partition("x")
    size = int(height), int(width or height)
    padding = (0, 0) if stride else (size[0] // 2, size[1] // 2)
    return builder.conv(int(channels), size, int(stride or 1), padding, norm=True, x=x)


# -------------------------------------------------------------------------------------------------
# Networks of operators
# -------------------------------------------------------------------------------------------------

_RUN = f"{', '.join(_CHAINS)} or resnet-N, where N is 6n + 2, which can be run"


def sequential(name: str, rng: np.random.Generator | int | None = None) -> Sequential:
    """Return a network that is built in, to be run; LeNet-5 has tanh and means, as in 1998.

    Parameters
    ----------
    name : {"lenet5", "alexnet", "alexnet-owt", "vgg11", "vgg16", "resnet-N"}
        Name of the network; ``N`` is 8, 14, 20, …, as for :func:`sparsescan.strategies.build`.
    rng : numpy.random.Generator or int, optional
        Random generator of the parameters, which are drawn when they are first read.

    Returns
    -------
    Sequential
        Its layers are those of ``build(name)`` behind the input. In ResNet-N, the normalisation, by
        frozen statistics, and the ReLU of a convolution are layers of their own. The last
        normalisation of each block starts with weight 0, and so the block as its shortcut (Goyal et
        al., 2017, section 5.1).

    Raises
    ------
    InputError
        If the network cannot be run.

    Notes
    -----
    Jacobians may not fit into memory: those of alexnet have 0.7·10⁹ entries for a sample, those of
    vgg16 15·10⁹.

    Examples
    --------
    >>> from sparsescan.strategies.networks import sequential
    >>> sequential("lenet5", 0)
    Sequential((1, 32, 32) → (10,), 12 steps)
    >>> sequential("resnet-20", 0).output_shape
    (10,)
    """
    generator = np.random.default_rng(rng)
    if _blocks(name):
        return Sequential(_residual(name, generator))
    if name not in _CHAINS:
        why = (
            ", whose modules join the channels of their branches, which no chain of operators does"
        )
        raise InputError(f"network is {name!r}{why * (name == 'inception-v3')}; expected {_RUN}")
    return Sequential(_chain(name, generator))


def _chain(name: str, rng: np.random.Generator) -> list[Operator]:
    """Return the operators of a network whose layers stand one behind the other."""
    pool, act = (AvgPool2d, Tanh) if name == "lenet5" else (MaxPool2d, ReLU)
    shape, layers = _CHAINS[name]
    ops: list[Operator] = []

    def add(op: Operator) -> None:
        nonlocal shape
        ops.append(op)
        shape = op.output_shape

    for layer in layers:
        if isinstance(layer, str):
            add(pool(*((3, 2) if layer == "M" else (2,)), input_shape=shape))
        elif isinstance(layer, tuple):
            channels, kernel, stride, padding, groups = *layer, *(1, 0, 1)[len(layer) - 2 :]
            sizes = shape[0], channels, kernel, stride, padding
            add(Conv2d(*sizes, groups=groups, input_shape=shape, rng=rng))
            add(act(input_shape=shape))
        else:
            add((act if len(shape) == 1 else Flatten)(input_shape=shape))
            add(Linear(shape[0], layer, rng=rng))
    return ops


def _residual(name: str, rng: np.random.Generator) -> list[Operator]:
    """Return the operators of ``resnet-N``."""
    ops: list[Operator] = [*_normalised((3, 32, 32), 16, 1, rng), ReLU(input_shape=(16, 32, 32))]
    for channels, _, stride in _widths(name):
        shape = ops[-1].output_shape
        first = _normalised(shape, channels, stride, rng)
        inner = first[-1].output_shape
        conv, norm = _normalised(inner, channels, 1, rng)
        norm.weight = np.zeros(channels, np.float32)
        shortcut = _every_other(shape, channels) if stride > 1 else ()
        block = Residual(*first, ReLU(input_shape=inner), conv, norm, shortcut=shortcut)
        ops += [block, ReLU(input_shape=inner)]
    pool = AvgPool2d(8, input_shape=ops[-1].output_shape)
    return [*ops, pool, Flatten(input_shape=pool.output_shape), Linear(64, 10, rng=rng)]


def _normalised(
    shape: tuple[int, ...], channels: int, stride: int, rng: np.random.Generator
) -> tuple[Conv2d, BatchNorm2d]:
    """Return a 3×3 convolution without a bias, and the normalisation behind it."""
    conv = Conv2d(shape[0], channels, 3, stride, 1, bias=False, input_shape=shape, rng=rng)
    return conv, BatchNorm2d(channels, input_shape=conv.output_shape)


def _every_other(shape: tuple[int, ...], channels: int) -> tuple[AvgPool2d, Pad]:
    """Return layers that take every other place of an image, and add channels of zeros."""
    pool = AvgPool2d(1, 2, input_shape=shape)
    zeros = (0, channels - shape[0]), (0, 0), (0, 0)
    return pool, Pad(zeros, input_shape=pool.output_shape)


def from_sequential(network: Sequential, name: str = "network") -> Graph:
    """Return the graph of a network of operators.

    Parameters
    ----------
    network : Sequential
        The network. Its operators become layers; a residual block becomes the layers that it goes
        around, those of its shortcut, and a sum.
    name : str
        Name of the graph.

    Returns
    -------
    Graph
        Behind the input, its layers are those of `network` if it has no residual blocks.

    Examples
    --------
    >>> from sparsescan.jacobians import Linear, Sequential, Tanh
    >>> from sparsescan.strategies.networks import from_sequential
    >>> from_sequential(Sequential([Linear(3, 2, rng=0), Tanh(input_shape=(2,))]))
    Graph('network', 3 layers, 8 weights)
    """
    builder = Builder(name, network.input_shape)
    builder.extend(network.ops)
    return builder.graph()


def from_chain(patterns: Sequence[Pattern], name: str = "chain") -> Graph:
    """Return the graph of a chain of Jacobians.

    Parameters
    ----------
    patterns : sequence of Pattern
        Patterns of the transposed Jacobians, from the LAST to the first.
    name : str
        Name of the graph.

    Returns
    -------
    Graph
        A linear layer for each, or an elementwise one where the pattern is diagonal. Every entry of
        a linear layer counts as a parameter, since a chain does not tell their number.
    """
    if not patterns:
        raise InputError("patterns is empty; expected at least one")
    builder = Builder(name, (patterns[-1].shape[0],))
    for pattern in reversed(patterns):
        if pattern.kind == "diagonal":
            builder.elementwise()
            continue
        nnz = pattern.nnz
        builder.add(Layer("", "linear", (), (pattern.shape[1],), nnz, nnz, nnz))
    return builder.graph()


class Recurrent:
    """A recurrent cell over a sequence, and a linear layer that reads its last state.

    Parameters
    ----------
    cell : Cell
        The cell, the same in all steps.
    readout : Linear
        Linear layer from the last state to the classes.
    steps : int
        Length of a sequence; a sample has the shape ``(steps, cell.input_size)``.
    """

    def __init__(self, cell: Cell, readout: Linear, steps: int) -> None:
        if not isinstance(cell, Cell):
            raise InputTypeError(f"cell is a {type(cell).__name__}; expected a recurrent cell")
        if not isinstance(readout, Linear):
            raise InputTypeError(f"readout is a {type(readout).__name__}; expected a Linear")
        if readout.input_shape != (cell.state_size,):
            raise InputError(
                f"readout has input_shape {readout.input_shape}; expected {(cell.state_size,)}"
            )
        self.cell, self.readout = cell, readout
        self.steps = check_count("steps", steps, 1)

    def graph(self, name: str = "recurrent") -> Graph:
        """Return the graph, as :func:`sparsescan.strategies.build` makes it."""
        cell, builder = self.cell, Builder(name, (self.cell.state_size,))
        builder.cells(cell, self.steps)
        builder.extend([self.readout])
        return builder.graph()


#: What a forecast is for.
AnyNetwork = Graph | Sequential | Recurrent


def graph_of(network: object, name: str = "network") -> Graph:
    """Return a graph itself, or that of a network.

    Raises
    ------
    InputError, InputTypeError
        If two layers share parameters, or there is no such network.
    """
    if isinstance(network, Graph):
        return network
    if isinstance(network, Recurrent):
        return network.graph(name)
    if not isinstance(network, Sequential):
        # The whole name of its type: there are several of the name Sequential.
        kind = type(network)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        raise InputTypeError(
            f"network is a {module}{kind.__name__}; expected a name such as 'lenet5', a "
            "sparsescan.jacobians.Sequential, a list of patterns or, of a module of PyTorch, "
            "build(module, input_shape)"
        )
    owned = [(op, params) for op in network.layers if (params := [*op.params.values()])]
    for (op, mine), (other, theirs) in itertools.combinations(owned, 2):
        if any(np.may_share_memory(*pair) for pair in itertools.product(mine, theirs)):
            raise InputError(
                f"network has layers that share memory for parameters, {op!r} and {other!r}; "
                "expected layers with parameters of their own"
            )
    return from_sequential(network, name)
