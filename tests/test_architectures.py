"""Architectures have the published sizes, and the entries that operators really have."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsescan import InputError, Pattern
from sparsescan.jacobians import (
    AdaptiveAvgPool2d,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Flatten,
    GRUCell,
    LayerNorm,
    Linear,
    MaxPool2d,
    Permute,
    ReLU,
    Residual,
    RNNCell,
    Sequential,
    Softmax,
)
from sparsescan.parallel.strategies.architectures import (
    NAMES,
    Builder,
    build,
    from_chain,
    from_sequential,
    sequential,
)

# Parameters and multiply-adds of a forward pass, from the papers and from torchvision, where the
# multiply-adds of AlexNet are those of convolutions in two groups.
PUBLISHED = {
    "lenet5": (61_706, 0.4165e6),
    "alexnet": (60_965_224, 724e6),
    "alexnet-owt": (61_100_840, 714e6),
    "vgg11": (9_220_480 + 5_130, 152.8e6),
    "vgg16": (138_357_544, 15.47e9),
    "resnet-110": (1.73e6, 0.253e9),
    "inception-v3": (23_834_568, 5.71e9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_published(name):
    graph = build(name)
    weights, multiply_adds = PUBLISHED[name]
    # ResNet's is given in three digits only.
    assert graph.weights == pytest.approx(weights, rel=2e-3 if name == "resnet-110" else 0)
    assert graph.multiply_adds == pytest.approx(multiply_adds, rel=2e-3)
    assert graph.layers[-1].shape == ((10,) if graph.layers[0].shape[1] == 32 else (1000,))


def test_resnet_has_110_layers_with_weights():
    assert sum(layer.weights > 0 for layer in build("resnet-110").layers) == 110


def test_inception_is_the_graph_of_the_paper():
    """Convolutions, pools, joins and one linear layer: 120 nodes (DeePa, section 4)."""
    graph = build("inception-v3")
    kinds = [layer.kind for layer in graph.layers]
    assert [kinds.count(kind) for kind in ("conv", "pool", "concat", "linear")] == [94, 14, 11, 1]
    shapes = {layer.name: layer.shape for layer in graph.layers}
    ends = [shapes[name] for name in shapes if name.endswith("concat1")]
    channels = [256, 288, 288, 768, 768, 768, 768, 768, 1280, 2048, 2048]
    assert ends == [(c, s, s) for c, s in zip(channels, [35] * 3 + [17] * 5 + [8] * 3, strict=True)]


def test_layers_of_the_deepa_paper():
    """Table 1: input and output channels, height and width, of convolutions of three networks."""
    found = set()
    for name in ("vgg16", "alexnet-owt", "inception-v3"):
        graph = build(name)
        for k, layer in enumerate(graph.layers):
            if layer.kind == "conv":
                found.add((graph.input_shape(k)[0], *layer.shape, layer.kernel[0]))
    assert (128, 128, 112, 112, 3) in found  # C1
    assert (512, 512, 28, 28, 3) in found  # C2
    assert (192, 64, 35, 35, 1) in found  # C3
    assert (48, 64, 35, 35, 5) in found  # C4
    assert (64, 192, 27, 27, 5) in found  # C5
    assert (256, 256, 13, 13, 3) in found  # C6
    assert (32, 64, 147, 147, 3) in found  # C7
    assert (448, 384, 8, 8, 3) in found  # C8


@pytest.mark.parametrize(("kind", "cell"), [("rnn", RNNCell(1, 20)), ("gru", GRUCell(20, 20))])
def test_cells_share_weights(kind, cell):
    graph = build(f"{kind}:7")
    first, *rest, last = graph.layers[1:]
    assert graph.is_chain
    assert len(rest) == 6
    assert first.weights == sum(math.prod(array.shape) for array in cell.params.values())
    assert {(layer.weights, layer.shares) for layer in rest} == {(0, 1)}
    assert {layer.nnz for layer in (first, *rest)} == {cell.pattern.nnz}
    assert last.kind == "linear"


def test_long_recurrences_are_built_in_linear_time():
    assert len(build("rnn:30000").layers) == 30_002


@pytest.mark.parametrize("name", ["lenet", "rnn", "rnn:", "rnn:0", "rnn:-3", "gru:x", "vgg11:3"])
def test_unknown_names_are_answered_with_those_known(name):
    with pytest.raises(InputError, match=f"network is '{name}'; expected one of lenet5, alexnet"):
        build(name)
    with pytest.raises(InputError, match="expected lenet5 or vgg11, which can be run"):
        sequential(name)


def test_all_names_are_built():
    for name in NAMES:
        assert build(name.replace("T", "3")).name == name.replace("T", "3")


@given(
    st.tuples(*[st.integers(1, 9)] * 2),
    st.tuples(*[st.integers(1, 4)] * 2),
    st.tuples(*[st.integers(1, 3)] * 2),
    st.tuples(*[st.integers(0, 2)] * 2),
    st.sampled_from([(1, 2, 3), (2, 2, 4), (3, 3, 6)]),
)
def test_layers_have_the_entries_of_their_operators(size, kernel, stride, padding, channels):
    kernel = tuple(min(k, n + 2 * p) for k, n, p in zip(kernel, size, padding, strict=True))
    groups, ins, outs = channels
    made = Builder("test", (ins, *size))
    made.conv(outs, kernel, stride, padding, groups=groups)
    conv = Conv2d(
        ins, outs, kernel, stride, padding, groups=groups, input_shape=(ins, *size), rng=0
    )
    assert made.layers[1].shape == conv.output_shape
    assert made.layers[1].nnz == conv.pattern.nnz
    assert made.layers[1].weights == conv.weight.size + conv.bias.size
    # A weight is multiplied once for every output of its channel.
    assert made.layers[1].multiply_adds == conv.weight.size * math.prod(conv.output_shape[1:])
    half = tuple(min(p, k // 2) for p, k in zip(padding, kernel, strict=True))
    if all(n + 2 * p >= k for n, p, k in zip(size, half, kernel, strict=True)):
        made.pool(kernel, stride, half, x=0)
        pool = MaxPool2d(kernel, stride, half, input_shape=(ins, *size))
        assert made.layers[-1].shape == pool.output_shape
        assert made.layers[-1].nnz == pool.pattern.nnz


@pytest.mark.parametrize("name", ["lenet5", "vgg11"])
def test_networks_that_run_are_those_of_the_graph(name):
    network = sequential(name, 0)
    assert from_sequential(network, name).layers == build(name).layers
    x = np.random.default_rng(0).random((1, *network.input_shape), np.float32)
    assert network.forward(x).shape == (1, 10)
    again = sequential(name, 0)
    for a, b in itertools.chain.from_iterable(
        zip(p.params.values(), q.params.values(), strict=True)
        for p, q in zip(network.layers, again.layers, strict=True)
    ):
        np.testing.assert_array_equal(a, b)


def test_every_operator_is_a_layer():
    image = (4, 6, 6)
    network = Sequential(
        [
            BatchNorm2d(4, input_shape=image),
            Residual(
                Conv2d(4, 4, 3, padding=1, groups=2, input_shape=image, rng=0),
                ReLU(input_shape=image),
            ),
            AvgPool2d(2, input_shape=image),
            AdaptiveAvgPool2d(2, input_shape=(4, 3, 3)),
            Permute((0, 2, 3, 1), input_shape=(4, 2, 2)),
            Flatten(input_shape=(2, 2, 4)),
            LayerNorm(16),
            Linear(16, 3, rng=0),
            Softmax(1, input_shape=(3,)),
        ]
    )
    graph = from_sequential(network)
    kinds = "input norm conv elementwise add pool pool flatten flatten norm linear softmax"
    assert [layer.kind for layer in graph.layers] == kinds.split()
    assert graph.layers[4].inputs == (3, 1)
    assert graph.layers[-1].shape == (3,)
    assert graph.weights == sum(array.size for op in network.layers for array in op.params.values())
    ops = [layer for layer in graph.layers[1:] if layer.kind != "add"]
    assert [layer.nnz for layer in ops] == [op.nnz for op in network.layers]


def test_chains_are_graphs():
    graph = from_chain([Pattern.dense((4, 2)), Pattern.diagonal(4), Pattern.dense((3, 4))])
    assert [layer.kind for layer in graph.layers] == ["input", "linear", "elementwise", "linear"]
    assert [layer.shape for layer in graph.layers] == [(3,), (4,), (4,), (2,)]
    assert [layer.nnz for layer in graph.layers] == [0, 12, 4, 8]
    with pytest.raises(InputError, match="patterns is empty"):
        from_chain([])
