"""Architectures have the published sizes, and the entries that operators really have."""

from __future__ import annotations

import numpy as np
import pytest

from sparsescan import InputError, Pattern
from sparsescan.jacobians import (
    AdaptiveAvgPool2d,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Flatten,
    LayerNorm,
    Linear,
    Pad,
    Permute,
    ReLU,
    Residual,
    Sequential,
    Softmax,
)
from sparsescan.strategies import build
from sparsescan.strategies.networks import (
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
    digits, graph = 1 if millions > 1 else 2, build(f"resnet-{layers}")
    assert round(graph.weights / 1e6, digits) == millions
    assert sum(layer.weights > 0 for layer in graph.layers) == layers


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


def test_what_cannot_be_run_is_told():
    with pytest.raises(InputError, match=f"network is 'rnn:5'; expected {RUN}"):
        sequential("rnn:5")
    with pytest.raises(InputError, match=f"join the channels of their branches.*; expected {RUN}"):
        sequential("inception-v3")


@pytest.mark.parametrize("name", ["lenet5", "alexnet", "alexnet-owt", "vgg11", "vgg16"])
def test_chains_that_run_are_those_of_the_graph(name):
    network = sequential(name, 0)
    # Nothing was drawn.
    assert not any({"pattern", "weight"} & vars(op).keys() for op in network.layers)
    assert from_sequential(network, name).layers == build(name).layers


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
