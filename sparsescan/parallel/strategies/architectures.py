"""Architectures: the networks that are built in, as graphs and as operators."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from ...errors import InputError
from ...jacobians import (
    AdaptiveAvgPool2d,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Flatten,
    Linear,
    MaxPool2d,
    Operator,
    Pad,
    ReLU,
    Residual,
    Sequential,
    Softmax,
    Tanh,
)
from ...jacobians.activations import Elementwise
from ...jacobians.reshape import Permute
from ...pattern import Pattern
from .graph import Graph, Layer

__all__ = ["NAMES", "Builder", "build", "from_chain", "from_sequential", "sequential"]

#: What :func:`build` knows; ``N`` is 8, 14, 20, …, and ``T`` a number of time steps.
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

# Of VGG: channels of 3×3 convolutions, and "M" for max-pools.
_VGG11 = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")
_VGG16 = (64, 64, "M", 128, 128, "M", *((256,) * 3), "M", *((512,) * 3), "M", *((512,) * 3), "M")
# Of the recurrent experiments: entries of an input and of the state, classes.
_HIDDEN, _RNN, _GRU = 20, (1, 10), (20, 9)

Pair = tuple[int, int]
Sizes = int | Pair


class Builder:
    """A graph in the making: layers are added one by one, and what follows from their arguments.

    Every method that adds a layer returns its number. Layers read the one that was added last,
    unless they are told otherwise by ``x``. Multiply-adds are those of convolutions, linear layers
    and cells, as they are usually counted.

    Parameters
    ----------
    name : str
        Of the network.
    shape : tuple of int
        Of one sample.

    Attributes
    ----------
    layers : list of Layer
        So far.
    prefix : str
        Before the names of the layers that are added.

    Examples
    --------
    >>> from sparsescan.parallel.strategies.architectures import Builder
    >>> made = Builder("small", (3, 32, 32))
    >>> made.conv(64, 3, padding=1)
    1
    >>> made.layers[1].nnz  # as that of the operator
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
        """The graph of all layers."""
        return Graph(self.name, self.layers)

    def add(self, layer: Layer) -> int:
        """Add a layer as it is."""
        self.layers.append(layer)
        return self.last

    def conv(
        self,
        channels: int,
        kernel: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        *,
        groups: int = 1,
        norm: bool = False,
        x: int | None = None,
    ) -> int:
        """A convolution, with a bias or, in the same layer, a batch normalisation and a ReLU."""
        x, shape = self._read(x)
        sizes = _pair(kernel), _pair(stride), _pair(padding)
        weights = channels * (shape[0] // groups) * math.prod(sizes[0])
        out = channels, *_pooled(shape, *sizes)
        return self.add(
            Layer(
                self._name("conv"),
                "conv",
                (x,),
                out,
                # The normalisation has a factor and a bias for each channel.
                weights=weights + channels * (2 if norm else 1),
                multiply_adds=weights * math.prod(out[1:]),
                nnz=channels * (shape[0] // groups) * _meetings(shape, *sizes),
                kernel=sizes[0],
                stride=sizes[1],
                padding=sizes[2],
                groups=groups,
            )
        )

    def pool(
        self,
        kernel: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        *,
        x: int | None = None,
    ) -> int:
        """A pooling, by maxima or means."""
        x, shape = self._read(x)
        sizes = _pair(kernel), _pair(kernel if stride is None else stride), _pair(padding)
        out = shape[0], *_pooled(shape, *sizes)
        nnz = shape[0] * _meetings(shape, *sizes)
        name = self._name("pool")
        return self.add(Layer(name, "pool", (x,), out, 0, 0, nnz, *sizes))

    def linear(self, features: int, *, x: int | None = None) -> int:
        """A linear layer with a bias."""
        x, shape = self._read(x)
        size = math.prod(shape) * features
        name = self._name("linear")
        return self.add(Layer(name, "linear", (x,), (features,), size + features, size, size))

    def cell(self, gates: int, features: int, hidden: int) -> int:
        """The next step of a recurrent network, which reads so many features of its own."""
        first = next((k for k, layer in enumerate(self.layers) if layer.kind == "cell"), None)
        size = gates * hidden * (features + hidden)
        weights = 0 if first is not None else size + 2 * gates * hidden
        name, x, nnz = self._name("cell"), self.last, hidden * hidden
        return self.add(Layer(name, "cell", (x,), (hidden,), weights, size, nnz, shares=first))

    def elementwise(self, *, x: int | None = None) -> int:
        """An activation."""
        x, shape = self._read(x)
        name = self._name("elementwise")
        return self.add(Layer(name, "elementwise", (x,), shape, nnz=math.prod(shape)))

    def flatten(self) -> int:
        """What joins the axes of an image."""
        x, shape = self._read(None)
        size = math.prod(shape)
        return self.add(Layer(self._name("flatten"), "flatten", (x,), (size,), nnz=size))

    def sum(self, *inputs: int) -> int:
        """A sum; an input with fewer channels than the first is continued by zeros."""
        return self._join("add", inputs, self.layers[inputs[0]].shape)

    def concat(self, *inputs: int) -> int:
        """The channels of some layers, one after the other."""
        shapes = [self.layers[k].shape for k in inputs]
        return self._join("concat", inputs, (sum(s[0] for s in shapes), *shapes[0][1:]))

    def _join(self, kind: str, inputs: tuple[int, ...], shape: tuple[int, ...]) -> int:
        nnz = sum(self.layers[k].size for k in inputs)
        return self.add(Layer(self._name(kind), kind, inputs, shape, nnz=nnz))

    def _read(self, x: int | None) -> tuple[int, tuple[int, ...]]:
        x = self.last if x is None else x
        return x, self.layers[x].shape

    def _name(self, kind: str) -> str:
        start = self.prefix + kind
        self._named[start] += 1
        return f"{start}{self._named[start]}"


def _pair(sizes: int | Sequence[int]) -> Pair:
    y, x = (sizes, sizes) if isinstance(sizes, int) else sizes
    return y, x


def _pooled(shape: Sequence[int], kernel: Pair, stride: Pair, padding: Pair) -> Pair:
    """Height and width of the output."""
    y, x = (
        (n + 2 * p - k) // s + 1
        for n, k, s, p in zip(shape[1:], kernel, stride, padding, strict=True)
    )
    return y, x


def _meetings(shape: Sequence[int], kernel: Pair, stride: Pair, padding: Pair) -> int:
    """Pairs of a place in the input and one in the output whose window contains it."""
    counts = []
    axes = zip(
        shape[1:],
        _pooled(shape, kernel, stride, padding),
        kernel,
        stride,
        padding,
        strict=True,
    )
    for size, out, k, s, p in axes:
        first = np.arange(out) * s - p
        counts.append(int((np.minimum(first + k, size) - np.maximum(first, 0)).clip(0).sum()))
    return math.prod(counts)


# -------------------------------------------------------------------------------------------------
# Networks by name
# -------------------------------------------------------------------------------------------------


def build(name: str) -> Graph:
    """A network that is built in.

    Parameters
    ----------
    name : str
        One of :data:`NAMES`, with a number for ``N`` or ``T``:

        lenet5
            LeCun et al. (1998) as it is built today, for images of 32×32 with one channel.
        alexnet
            Krizhevsky et al. (2012): convolutions 2, 4 and 5 in two groups; 61.0 million
            parameters.
        alexnet-owt
            Krizhevsky (2014), "one weird trick", without groups; 61.1 million parameters.
        vgg11
            The convolutions of Simonyan and Zisserman (2014) for images of 32×32, and one linear
            layer.
        vgg16
            The same authors', for images of 224×224.
        resnet-N
            He et al. (2016) for images of 32×32, whose shortcuts have no parameters: ``N = 6n + 2``
            layers with weights for `n` blocks of each width, such as resnet-20 or resnet-110.
        inception-v3
            Szegedy et al. (2016) for images of 299×299, without the auxiliary classifier.
        rnn:T, gru:T
            `T` steps of a recurrent network with 20 hidden units that reads 1 and 20 features at a
            time, and a linear layer. What is called its input is the first state.

        Batch normalisations and the ReLUs behind them are part of their convolutions in the last
        two of the networks for images.

    Returns
    -------
    Graph
        The network.

    Raises
    ------
    InputError
        If there is no network of this name.

    Examples
    --------
    >>> from sparsescan.parallel.strategies.architectures import build
    >>> build("lenet5")
    Graph('lenet5', 13 layers, 61706 weights)
    """
    kind, colon, steps = name.partition(":")
    if kind in _CELLS and colon and steps.isdecimal() and int(steps):
        return _recurrent(name, *_CELLS[kind], int(steps))
    if _blocks(name):
        return _resnet(name)
    if name not in _MADE:
        raise InputError(
            f"network is {name!r}; expected one of {', '.join(NAMES)}, where N is 6n + 2, as in "
            "resnet-110, and T at least 1"
        )
    return _MADE[name](name)


def _lenet5(name: str) -> Graph:
    made = Builder(name, (1, 32, 32))
    for channels in (6, 16):
        made.conv(channels, 5)
        made.elementwise()
        made.pool(2)
    made.flatten()
    _classifier(made, 120, 84, 10)
    return made.graph()


def _classifier(made: Builder, *features: int) -> None:
    """Linear layers with activations between them."""
    for k, size in enumerate(features):
        if k > 0:
            made.elementwise()
        made.linear(size)


def _alexnet(name: str) -> Graph:
    made = Builder(name, (3, 227, 227))
    made.conv(96, 11, 4)
    made.elementwise()
    made.pool(3, 2)
    made.conv(256, 5, padding=2, groups=2)
    made.elementwise()
    made.pool(3, 2)
    for channels, groups in ((384, 1), (384, 2), (256, 2)):
        made.conv(channels, 3, padding=1, groups=groups)
        made.elementwise()
    made.pool(3, 2)
    made.flatten()
    _classifier(made, 4096, 4096, 1000)
    return made.graph()


def _alexnet_owt(name: str) -> Graph:
    made = Builder(name, (3, 224, 224))
    made.conv(64, 11, 4, 2)
    made.elementwise()
    made.pool(3, 2)
    made.conv(192, 5, padding=2)
    made.elementwise()
    made.pool(3, 2)
    for channels in (384, 256, 256):
        made.conv(channels, 3, padding=1)
        made.elementwise()
    made.pool(3, 2)
    made.flatten()
    _classifier(made, 4096, 4096, 1000)
    return made.graph()


def _vgg(name: str, side: int, widths: Sequence[int | str], features: tuple[int, ...]) -> Graph:
    made = Builder(name, (3, side, side))
    for width in widths:
        if isinstance(width, str):
            made.pool(2)
        else:
            made.conv(width, 3, padding=1)
            made.elementwise()
    made.flatten()
    _classifier(made, *features)
    return made.graph()


def _blocks(name: str) -> int:
    """Of ``resnet-N``, the blocks of each width; 0 if the name is another."""
    found = re.fullmatch("resnet-([1-9][0-9]*)", name)
    layers = int(found[1]) if found else 0
    return layers // 6 if layers % 6 == 2 else 0


def _widths(name: str) -> Iterator[tuple[int, int, int]]:
    """Of every block of ``resnet-N`` its channels, its number among those, and its stride."""
    for channels in (16, 32, 64):
        for block in range(_blocks(name)):
            yield channels, block, 2 if channels > 16 and block == 0 else 1


def _resnet(name: str) -> Graph:
    made = Builder(name, (3, 32, 32))
    made.conv(16, 3, padding=1, norm=True)
    for channels, block, stride in _widths(name):
        start = made.last
        made.prefix = f"{channels}.{block}."
        made.conv(channels, 3, stride, 1, norm=True)
        inner = made.conv(channels, 3, padding=1, norm=True)
        # Every other place of the input, whose channels zeros continue.
        made.sum(inner, start if stride == 1 else made.pool(1, 2, x=start))
    made.prefix = ""
    made.pool(8)
    made.flatten()
    made.linear(10)
    return made.graph()


def _inception(name: str) -> Graph:
    made = Builder(name, (3, 299, 299))
    for channels, kernel, stride, padding in ((32, 3, 2, 0), (32, 3, 1, 0), (64, 3, 1, 1)):
        made.conv(channels, kernel, stride, padding, norm=True)
    made.pool(3, 2)
    made.conv(80, 1, norm=True)
    made.conv(192, 3, norm=True)
    made.pool(3, 2)
    # Of a branch, what its convolutions are: channels, kernel and, if it is not 1, stride.
    for k, pooled in enumerate((32, 64, 64)):
        branches: list[_Branch] = [
            [(64, 1)],
            [(48, 1), (64, 5)],
            [(64, 1), (96, 3), (96, 3)],
            ["mean", (pooled, 1)],
        ]
        _module(made, f"A{k + 1}", branches)
    _module(made, "B1", [[(384, 3, 2)], [(64, 1), (96, 3), (96, 3, 2)], ["max"]])
    row, column = (1, 7), (7, 1)
    for k, c in enumerate((128, 160, 160, 192)):
        branches = [
            [(192, 1)],
            [(c, 1), (c, row), (192, column)],
            [(c, 1), (c, column), (c, row), (c, column), (192, row)],
            ["mean", (192, 1)],
        ]
        _module(made, f"C{k + 1}", branches)
    branches = [
        [(192, 1), (320, 3, 2)],
        [(192, 1), (192, row), (192, column), (192, 3, 2)],
        ["max"],
    ]
    _module(made, "D1", branches)
    fork: _Fork = ((384, (1, 3)), (384, (3, 1)))
    for k in range(2):
        branches = [
            [(320, 1)],
            [(384, 1), fork],
            [(448, 1), (384, 3), fork],
            ["mean", (192, 1)],
        ]
        _module(made, f"E{k + 1}", branches)
    made.prefix = ""
    made.pool(8)
    made.flatten()
    made.linear(1000)
    return made.graph()


_Conv = tuple[int, Sizes] | tuple[int, Sizes, int]
_Fork = tuple[tuple[int, Pair], tuple[int, Pair]]
_Branch = Sequence[str | _Conv | _Fork]


def _module(made: Builder, name: str, branches: Sequence[_Branch]) -> None:
    """Branches that read one layer, and whose outputs are joined."""
    made.prefix, start = f"Inception{name}.", made.last
    ends: list[int] = []
    for branch in branches:
        x = [start]
        for part in branch:
            if part == "mean":
                x = [made.pool(3, 1, 1, x=x[0])]
            elif part == "max":
                x = [made.pool(3, 2, x=x[0])]
            elif isinstance(part[0], tuple):
                x = [_normal(made, conv, x[0]) for conv in part]  # type: ignore[arg-type]
            else:
                x = [_normal(made, part, x[0])]  # type: ignore[arg-type]
        ends += x
    made.concat(*ends)


def _normal(made: Builder, conv: _Conv, x: int) -> int:
    """A convolution; without a stride, one that keeps height and width."""
    channels, kernel, *stride = conv
    y, z = _pair(kernel)
    if stride:
        return made.conv(channels, kernel, stride[0], norm=True, x=x)
    return made.conv(channels, kernel, padding=(y // 2, z // 2), norm=True, x=x)


def _recurrent(name: str, gates: int, features: int, classes: int, steps: int) -> Graph:
    made = Builder(name, (_HIDDEN,))
    for _ in range(steps):
        made.cell(gates, features, _HIDDEN)
    made.linear(classes)
    return made.graph()


_CELLS = {"rnn": (1, *_RNN), "gru": (3, *_GRU)}
_MADE: dict[str, Callable[[str], Graph]] = {
    "lenet5": _lenet5,
    "alexnet": _alexnet,
    "alexnet-owt": _alexnet_owt,
    "vgg11": lambda name: _vgg(name, 32, _VGG11, (10,)),
    "vgg16": lambda name: _vgg(name, 224, _VGG16, (4096, 4096, 1000)),
    "inception-v3": _inception,
}


# -------------------------------------------------------------------------------------------------
# Networks of operators
# -------------------------------------------------------------------------------------------------

# Those whose layers stand one behind the other.
_CHAINS = ("lenet5", "alexnet", "alexnet-owt", "vgg11", "vgg16")
_RUN = (
    f"{', '.join(_CHAINS)} or resnet-N, where N is 6n + 2, which can be run, as can rnn:T and "
    "gru:T (Recurrent.named)"
)


def sequential(name: str, rng: np.random.Generator | int | None = None) -> Sequential:
    """A network that is built in, to be run; LeNet-5 has tanh and means, as in 1998.

    Parameters
    ----------
    name : {"lenet5", "alexnet", "alexnet-owt", "vgg11", "vgg16", "resnet-N"}
        Of the network; ``N`` is 8, 14, 20, …, as for :func:`build`.
    rng : numpy.random.Generator or int, optional
        What draws the parameters, when they are first read.

    Returns
    -------
    Sequential
        Its layers are those of ``build(name)`` behind the input. In ResNet-N, what a convolution
        has in itself there stands behind it: a normalisation by frozen statistics, and a ReLU. The
        last normalisation of each block starts with weight 0, and so the block as its shortcut
        (Goyal et al., 2017, section 5.1).

    Raises
    ------
    InputError
        If the network cannot be run.

    Notes
    -----
    What a scan reads may not fit into memory: the Jacobians of alexnet have 0.7·10⁹ entries for a
    sample, those of vgg16 15·10⁹.

    Examples
    --------
    >>> from sparsescan.parallel.strategies.architectures import sequential
    >>> sequential("lenet5", 0)
    Sequential((1, 32, 32) → (10,), 12 steps)
    >>> sequential("resnet-20", 0).output_shape
    (10,)
    """
    generator = np.random.default_rng(rng)
    if _blocks(name):
        return Sequential(_residual(name, generator))
    if name == "inception-v3":
        raise InputError(
            "network is 'inception-v3', whose modules join the channels of their branches, which "
            f"no chain of operators does; expected {_RUN}"
        )
    if name not in _CHAINS:
        raise InputError(f"network is {name!r}; expected {_RUN}")
    return Sequential(_chain(name, generator))


def _chain(name: str, rng: np.random.Generator) -> list[Operator]:
    """The operators of a network whose layers stand one behind the other."""
    small = name == "lenet5"
    ops: list[Operator] = []
    for before, layer in pairwise(build(name).layers):
        shape = before.shape
        if layer.kind == "conv":
            sizes = layer.shape[0], layer.kernel, layer.stride, layer.padding
            ops.append(Conv2d(shape[0], *sizes, groups=layer.groups, input_shape=shape, rng=rng))
        elif layer.kind == "pool":
            pool = AvgPool2d if small else MaxPool2d
            ops.append(pool(layer.kernel, layer.stride, input_shape=shape))
        elif layer.kind == "elementwise":
            ops.append(Tanh(input_shape=shape) if small else ReLU(input_shape=shape))
        elif layer.kind == "flatten":
            ops.append(Flatten(input_shape=shape))
        else:
            ops.append(Linear(shape[0], layer.shape[0], rng=rng))
    return ops


def _residual(name: str, rng: np.random.Generator) -> list[Operator]:
    """The operators of ``resnet-N``."""
    ops: list[Operator] = [*_normalised((3, 32, 32), 16, 1, rng), ReLU(input_shape=(16, 32, 32))]
    for channels, _, stride in _widths(name):
        shape = ops[-1].output_shape
        first = _normalised(shape, channels, stride, rng)
        made = first[-1].output_shape
        conv, norm = _normalised(made, channels, 1, rng)
        norm.weight = np.zeros(channels, np.float32)
        shortcut = _every_other(shape, channels) if stride > 1 else ()
        block = Residual(*first, ReLU(input_shape=made), conv, norm, shortcut=shortcut)
        ops += [block, ReLU(input_shape=made)]
    pool = AvgPool2d(8, input_shape=ops[-1].output_shape)
    return [*ops, pool, Flatten(input_shape=pool.output_shape), Linear(64, 10, rng=rng)]


def _normalised(
    shape: tuple[int, ...], channels: int, stride: int, rng: np.random.Generator
) -> tuple[Conv2d, BatchNorm2d]:
    """A 3×3 convolution, whose bias is that of the normalisation behind it."""
    conv = Conv2d(shape[0], channels, 3, stride, 1, bias=False, input_shape=shape, rng=rng)
    return conv, BatchNorm2d(channels, input_shape=conv.output_shape)


def _every_other(shape: tuple[int, ...], channels: int) -> tuple[AvgPool2d, Pad]:
    """Every other place of an image, whose channels zeros continue."""
    pool = AvgPool2d(1, 2, input_shape=shape)
    zeros = (0, channels - shape[0]), (0, 0), (0, 0)
    return pool, Pad(zeros, input_shape=pool.output_shape)


def from_sequential(network: Sequential, name: str = "network") -> Graph:
    """The graph of a network of operators.

    Parameters
    ----------
    network : Sequential
        The network. Its operators and those of residual blocks become layers: of a block those
        that it goes around, those of its shortcut, and one more, which adds.
    name : str
        Of the graph.

    Returns
    -------
    Graph
        Behind the input, its layers are those of `network` if it has no residual blocks.

    Examples
    --------
    >>> from sparsescan.jacobians import Linear, Sequential, Tanh
    >>> from sparsescan.parallel.strategies.architectures import from_sequential
    >>> from_sequential(Sequential([Linear(3, 2, rng=0), Tanh(input_shape=(2,))]))
    Graph('network', 3 layers, 8 weights)
    """
    made = Builder(name, network.input_shape)
    append(made, network.ops, made.last)
    return made.graph()


def append(made: Builder, ops: Sequence[Operator], x: int) -> int:
    """Add the layers of operators, of which the first reads layer `x`; the number of the last."""
    for op in ops:
        if isinstance(op, Residual):
            end = append(made, op.ops, x)
            x = made.sum(end, append(made, op.shortcut, x))
        else:
            x = made.add(_layer(op, made._name(_kind(op)), x))
    return x


def _kind(op: Operator) -> str:
    if isinstance(op, Conv2d):
        return "conv"
    if isinstance(op, (MaxPool2d, AvgPool2d, AdaptiveAvgPool2d)):
        return "pool"
    if isinstance(op, Linear):
        return "linear"
    if isinstance(op, (Flatten, Permute)):
        return "flatten"
    if isinstance(op, Softmax):
        return "softmax"
    if isinstance(op, (Dropout, Elementwise)):
        return "elementwise"
    # What mixes or moves the elements in another way.
    return "norm"


def _layer(op: Operator, name: str, x: int) -> Layer:
    kind = _kind(op)
    weights = sum(math.prod(array.shape) for array in op.params.values())
    nnz, shape = op.nnz, op.output_shape
    if isinstance(op, Conv2d):
        taps = math.prod(op.weight.shape) * math.prod(shape[:-3]) * math.prod(shape[-2:])
        sizes = _pair(op.kernel_size), _pair(op.stride), _pair(op._before)
        return Layer(name, kind, (x,), shape, weights, taps, nnz, *sizes, groups=op.groups)
    if isinstance(op, (MaxPool2d, AvgPool2d)):
        sizes = _pair(op.kernel_size), _pair(op.stride), _pair(op.padding)
        return Layer(name, kind, (x,), shape, weights, 0, nnz, *sizes)
    if isinstance(op, AdaptiveAvgPool2d):
        pairs = zip(op.input_shape[-2:], shape[-2:], strict=True)
        size = _pair([-(-n // m) for n, m in pairs])
        return Layer(name, kind, (x,), shape, weights, 0, nnz, size, size)
    dense = nnz if isinstance(op, Linear) else 0
    return Layer(name, kind, (x,), shape, weights, dense, nnz)


def from_chain(patterns: Sequence[Pattern], name: str = "chain") -> Graph:
    """The graph of a chain of Jacobians.

    Parameters
    ----------
    patterns : sequence of Pattern
        Of the transposed Jacobians, from the LAST to the first.
    name : str
        Of the graph.

    Returns
    -------
    Graph
        A linear layer for each, or an elementwise one where the pattern is diagonal. A chain does
        not tell how many parameters its layers have: every entry of a linear one counts as one.
    """
    if not patterns:
        raise InputError("patterns is empty; expected at least one")
    made = Builder(name, (patterns[-1].shape[0],))
    for pattern in reversed(patterns):
        if pattern.kind == "diagonal":
            made.elementwise()
            continue
        nnz, title = pattern.nnz, made._name("linear")
        made.add(Layer(title, "linear", (made.last,), (pattern.shape[1],), nnz, nnz, nnz))
    return made.graph()
