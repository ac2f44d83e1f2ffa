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
    LayerNorm,
    Linear,
    MaxPool2d,
    Pad,
    Permute,
    ReLU,
    Residual,
    Sequential,
    Softmax,
)
from sparsescan.parameters import parametrised
from sparsescan.recurrent import GRUCell, RNNCell
from sparsescan.strategies.networks import (
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

RUN = (
    r"lenet5, alexnet, alexnet-owt, vgg11, vgg16 or resnet-N, where N is 6n \+ 2, which can be run"
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_published(name):
    graph = build(name)
    weights, multiply_adds = PUBLISHED[name]
    # ResNet's is given in three digits only.
    assert graph.weights == pytest.approx(weights, rel=2e-3 if name == "resnet-110" else 0)
    assert graph.multiply_adds == pytest.approx(multiply_adds, rel=2e-3)
    assert graph.layers[-1].shape == ((10,) if graph.layers[0].shape[1] == 32 else (1000,))


@pytest.mark.parametrize(
    ("layers", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85), (1202, 19.4)]
)
def test_residual_networks_have_the_parameters_of_the_paper(layers, millions):
    """He et al. (2016), table 6."""
    digits = 1 if millions > 1 else 2
    assert round(build(f"resnet-{layers}").weights / 1e6, digits) == millions


@pytest.mark.parametrize("layers", [8, 14, 56, 110])
def test_resnet_has_so_many_layers_with_weights(layers):
    assert sum(layer.weights > 0 for layer in build(f"resnet-{layers}").layers) == layers


@pytest.mark.parametrize("layers", [50, 152])
def test_networks_for_imagenet_are_not_confused_with_those_of_cifar(layers):
    """He et al. (2016) have two networks of as many layers; those of Table 1 are not built in."""
    for make in (build, sequential):
        with pytest.raises(InputError, match=rf"'resnet-{layers}', .* ImageNet.* expected one of"):
            make(f"resnet-{layers}")


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
    convolutions = set()
    for name in ("vgg16", "alexnet-owt", "inception-v3"):
        graph = build(name)
        for k, layer in enumerate(graph.layers):
            if layer.kind == "conv":
                convolutions.add((graph.input_shape(k)[0], *layer.shape, layer.kernel[0]))
    assert (128, 128, 112, 112, 3) in convolutions  # C1
    assert (512, 512, 28, 28, 3) in convolutions  # C2
    assert (192, 64, 35, 35, 1) in convolutions  # C3
    assert (48, 64, 35, 35, 5) in convolutions  # C4
    assert (64, 192, 27, 27, 5) in convolutions  # C5
    assert (256, 256, 13, 13, 3) in convolutions  # C6
    assert (32, 64, 147, 147, 3) in convolutions  # C7
    assert (448, 384, 8, 8, 3) in convolutions  # C8


@pytest.mark.parametrize(("kind", "cell"), [("rnn", RNNCell(1, 20)), ("gru", GRUCell(20, 20))])
def test_cells_share_weights(kind, cell):
    graph = build(f"{kind}:7")
    first, *rest, last = graph.layers[1:]
    assert all(layer.inputs == (k,) for k, layer in enumerate(graph.layers[1:]))
    assert len(rest) == 6
    assert first.weights == sum(math.prod(array.shape) for array in cell.params.values())
    assert {(layer.weights, layer.shares) for layer in rest} == {(0, 1)}
    assert {layer.nnz for layer in (first, *rest)} == {cell.pattern.nnz}
    assert last.kind == "linear"


def test_long_recurrences_are_built_in_linear_time():
    assert len(build("rnn:30000").layers) == 30_002


@pytest.mark.parametrize(
    "name",
    [
        *["lenet", "rnn", "rnn:", "rnn:0", "rnn:-3", "gru:x", "vgg11:3"],
        *["resnet", "resnet-", "resnet-2", "resnet-9", "resnet-08", "resnet-18", "resnet--8"],
    ],
)
def test_unknown_names_are_answered_with_those_known(name):
    with pytest.raises(InputError, match=f"network is '{name}'; expected one of lenet5, alexnet"):
        build(name)
    with pytest.raises(InputError, match=f"network is '{name}'; expected {RUN}"):
        sequential(name)


def test_what_cannot_be_run_is_told():
    for name in ("rnn:5", "gru:5"):
        with pytest.raises(InputError, match="as can rnn:T and gru:T"):
            sequential(name)
    with pytest.raises(InputError, match=f"join the channels of their branches.*; expected {RUN}"):
        sequential("inception-v3")


def test_all_names_are_built():
    for name in NAMES:
        one = name.replace("T", "3").replace("-N", "-14")
        assert build(one).name == one


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
    builder = Builder("test", (ins, *size))
    builder.conv(outs, kernel, stride, padding, groups=groups)
    conv = Conv2d(
        ins, outs, kernel, stride, padding, groups=groups, input_shape=(ins, *size), rng=0
    )
    assert builder.layers[1].shape == conv.output_shape
    assert builder.layers[1].nnz == conv.pattern.nnz
    assert builder.layers[1].weights == conv.weight.size + conv.bias.size
    # A weight is multiplied once for every output of its channel.
    assert builder.layers[1].multiply_adds == conv.weight.size * math.prod(conv.output_shape[1:])
    half = tuple(min(p, k // 2) for p, k in zip(padding, kernel, strict=True))
    if all(n + 2 * p >= k for n, p, k in zip(size, half, kernel, strict=True)):
        builder.pool(kernel, stride, half, x=0)
        pool = MaxPool2d(kernel, stride, half, input_shape=(ins, *size))
        assert builder.layers[-1].shape == pool.output_shape
        assert builder.layers[-1].nnz == pool.pattern.nnz


@pytest.fixture
def undrawn(monkeypatch):
    """Parameters of zeros, which take neither time nor memory."""

    def zeros(seed, bound, shape, dtype):
        return np.zeros(shape, dtype)

    monkeypatch.setattr(parametrised, "_uniform", zeros)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", ["lenet5", "alexnet", "alexnet-owt", "vgg11", "vgg16"])
def test_chains_that_run_are_those_of_the_graph(name):
    network = sequential(name, 0)
    assert not any("pattern" in vars(op) for op in network.layers)
    assert from_sequential(network, name).layers == build(name).layers


@pytest.mark.parametrize("name", ["resnet-8", "resnet-20", "resnet-110"])
def test_residual_networks_that_run_are_those_of_the_graph(name):
    network, folded = sequential(name, 0), build(name)
    graph = from_sequential(network, name)
    assert not any("pattern" in vars(op) for op in network.layers)
    assert graph.weights == folded.weights
    assert graph.multiply_adds == folded.multiply_adds

    def of(graph, *kinds):
        layers = [layer for layer in graph.layers if layer.kind in kinds]
        return [(layer.shape, layer.multiply_adds, layer.nnz) for layer in layers]

    for kind in ("conv", "pool", "linear", "flatten"):
        assert of(graph, kind) == of(folded, kind)
    # A sum reads zeros that continue the channels, here those that a layer has made.
    assert [shape for shape, *_ in of(graph, "add")] == [shape for shape, *_ in of(folded, "add")]
    # The normalisations, and the two times that zeros continue the channels.
    assert len(of(graph, "norm")) == len(of(graph, "conv")) + 2


def test_a_residual_network_starts_as_its_shortcuts():
    """The last normalisations have weight 0, so however deep it is, the numbers stay finite."""
    network = sequential("resnet-110", 0)
    x = np.random.default_rng(0).standard_normal((1, 3, 32, 32), np.float32)
    xs, linear = network.activations(x), network.ops[-1]
    # Behind the first ReLU every other place is left, and every other of those.
    pooled = np.zeros(64)
    pooled[:16] = xs[3][0, :, ::4, ::4].mean(axis=(1, 2), dtype=np.float64)
    expected = pooled @ linear.weight.T + linear.bias
    tolerance = 100 * np.finfo(np.float32).eps
    np.testing.assert_allclose(xs[-1][0], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["lenet5", "vgg11", "resnet-8"])
def test_networks_that_run_are_drawn_by_their_seed(name):
    network = sequential(name, 0)
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
            Residual(
                BatchNorm2d(4, input_shape=image),
                shortcut=[
                    AvgPool2d(1, input_shape=image),
                    Residual(ReLU(input_shape=image), shortcut=[ReLU(input_shape=image)]),
                ],
            ),
            Pad(0, input_shape=image),
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
    kinds = (
        "input norm conv elementwise add norm pool elementwise elementwise add add norm pool pool "
        "flatten flatten norm linear softmax"
    )
    assert [layer.kind for layer in graph.layers] == kinds.split()
    reads = [(0,), (1,), (2,), (3, 1), (4,), (4,), (6,), (6,), (7, 8), (5, 9), (10,)]
    assert [layer.inputs for layer in graph.layers[1:12]] == reads
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
