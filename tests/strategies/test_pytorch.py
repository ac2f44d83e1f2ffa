"""Graphs of PyTorch's modules, and plans as PyTorch takes them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import pipeline
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.flop_counter import FlopCounterMode

from sparsescan import Pattern
from sparsescan.errors import InputError, InputTypeError
from sparsescan.strategies import Machine, build, compare
from sparsescan.strategies.graph import Graph
from sparsescan.strategies.integrated import BatchParallel, Integrated
from sparsescan.strategies.per_layer.predict import PerLayer
from sparsescan.strategies.pipeline import MicroBatches
from sparsescan.strategies.pytorch import from_torch, to_torch
from sparsescan.strategies.scan import Scan
from sparsescan.strategies.strategy import Prediction


class Block(nn.Module):
    """A residual block, by calls of functions, a method and modules."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 1)
        self.shortcut = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.norm(self.conv1(x)) + self.shortcut(x))
        return torch.cat([y, self.conv2(y).relu()], dim=1)


def lenet5() -> nn.Sequential:
    sizes = [400, 120, 84, 10]
    pairs = [(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Flatten(), *(layer for pair in pairs for layer in pair)),
    )[:-1]


@settings(max_examples=examples(20))
@given(st.data())
def test_work_and_parameters_are_those_that_pytorch_counts(data: st.DataObject) -> None:
    channels, size, kernel, stride, padding = (
        data.draw(st.integers(*ends)) for ends in ((1, 4), (7, 12), (1, 3), (1, 2), (0, 1))
    )
    groups = data.draw(st.sampled_from([1, channels]))
    net = nn.Sequential(
        nn.Conv2d(channels, 2 * channels, kernel, stride, padding, groups=groups),
        Block(2 * channels),
        nn.GroupNorm(1, 6 * channels),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6 * channels, 5, bias=data.draw(st.booleans())),
    )
    graph = from_torch(net, (channels, size, size + 1))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        out = net.eval()(torch.zeros(1, channels, size, size + 1))
    assert graph.layers[-1].shape == tuple(out.shape[1:])
    assert 2 * graph.multiply_adds == counter.get_total_flops()
    assert graph.weights == sum(p.numel() for p in net.parameters())
    assert {"1.conv1", "1.shortcut", "5"} <= {layer.name for layer in graph.layers}
    # Every strategy can be asked about it.
    assert compare(graph, Machine(), 2, 8).predictions


class Rows(nn.Module):
    """Two images, one above the other."""

    def forward(self, x):
        return torch.cat([x, x], dim=2)


@pytest.mark.parametrize(
    ("module", "wrong"),
    [
        (nn.LSTM(3, 4), "torch.fx cannot trace|lstm"),
        (nn.Sequential(nn.Softmax2d()), "0, which is Softmax2d.*which has no operator"),
        (nn.Sequential(nn.Unflatten(2, (3, 3))), "Unflatten"),
        (Rows(), "a concatenation of channels"),
        (nn.Sequential(*[nn.Conv2d(1, 1, 1)] * 2), "calls 0 twice"),
    ],
)
def test_what_is_no_such_network_is_named(module: nn.Module, wrong: str) -> None:
    with pytest.raises(InputError, match=wrong):
        from_torch(module, (1, 9, 9))
    with pytest.raises(InputTypeError, match="module is a int"):
        from_torch(3, (1,))  # type: ignore[arg-type]


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))


def planned(grid: tuple[int, int]) -> tuple[nn.Sequential, Graph, Prediction]:
    torch.manual_seed(0)
    net = perceptron()
    graph = from_torch(net, (12,))
    prediction = Integrated(grid, ("model",)).predict(graph, Machine(), math.prod(grid), 16)
    return net, graph, prediction


def test_channels_are_an_axis_of_the_mesh() -> None:
    net, graph, prediction = planned((2, 4))
    plan = to_torch(prediction, net, 8)
    assert plan.mesh == {"samples": 4, "channels": 2}
    assert set(plan.parallelize) == {"0", "2", "4"}
    assert not plan.split_points
    assert not plan.left
    batch = to_torch(BatchParallel().predict(graph, Machine(), 8, 16), net, 8)
    assert (batch.mesh, batch.parallelize, batch.left) == ({"samples": 8}, {}, {})


def test_what_pytorch_cannot_divide_is_said() -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 4))
    graph = from_torch(net, (2, 8, 8))
    chosen = [(1, 1, 1, 1), (1, 1, 2, 1), (2, 1, 1, 1), (1, 2, 1, 1), (2, 1, 1, 1)]
    plan = to_torch(PerLayer(chosen).predict(graph, Machine(), 2, 4), net, 2)
    assert list(plan.parallelize) == ["2"]
    assert list(plan.left) == ["0"]
    assert "(1, 1, 2, 1)" in plan.left["0"]
    for wrong in (
        Scan().predict(graph, Machine(), 2, 4),
        BatchParallel().predict(build("lenet5"), Machine(), 2, 4),
    ):
        with pytest.raises(InputError, match="prediction is "):
            to_torch(wrong, net, 2)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # PyTorch's own
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_are_cut_by_pytorch(stages: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 1), Block(2), nn.Flatten(), nn.Linear(54, 5), nn.Tanh())
    net.eval()
    graph, x = from_torch(net, (1, 3, 3)), torch.randn(4, 1, 3, 3)
    prediction = MicroBatches().predict(graph, Machine(), stages, 4)
    plan = to_torch(prediction, net, stages)
    assert plan.mesh == {"stages": stages}
    # A call of a function is with the stage before.
    assert set(plan.left) <= {"1.relu", "relu"} - set(plan.split_points)
    pipe = pipeline(net, (x,), split_spec=plan.split_points)
    assert pipe.num_stages == stages
    (y,) = pipe(x)
    assert torch.equal(y, net(x))


def _rank(rank: int, path: str) -> None:
    dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=2)
    net, _, prediction = planned((2, 1))
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((16, 12), np.float32))
    wanted = net(x)
    wanted.square().sum().backward()
    grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    plan = to_torch(prediction, net, 2)
    mesh = init_device_mesh("cpu", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
    parallel: Any = parallelize_module(net, mesh["channels"], plan.parallelize)
    assert parallel[0].weight.to_local().shape == (4, 12)
    y = parallel(x)
    torch.testing.assert_close(y, wanted)
    y.square().sum().backward()
    for param, grad in zip(parallel.parameters(), grads, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), grad)
    dist.destroy_process_group()


@pytest.mark.slow
def test_parallelize_module_computes_the_same(tmp_path: Any) -> None:
    torch.multiprocessing.spawn(_rank, (str(tmp_path / "store"),), nprocs=2)  # type: ignore[no-untyped-call]


def test_a_comparison_takes_what_build_does_and_returns_plans() -> None:
    module = nn.Sequential(nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, 8))
    graph = build(module, (4096,))
    assert graph.layers == from_torch(module, (4096,)).layers
    compared = compare(graph, Machine(), 4, 8, ["integrated", "scan", "integrated"])
    assert sorted(one.strategy for one in compared.predictions) == ["integrated", "scan"]
    plan = compared.to_torch(module, "integrated")
    prediction = next(one for one in compared.predictions if one.strategy == "integrated")
    assert plan.mesh == to_torch(prediction, module, 4).mesh
    with pytest.raises(InputError, match="which PyTorch does not have"):
        compared.to_torch(module, "scan")
    with pytest.raises(InputError, match="strategy is 'none'; expected one of"):
        compared.to_torch(module, "none")
    with pytest.raises(InputError, match="strategy is 'none'; expected one of batch; model"):
        compare("lenet5", Machine(), 4, 8, ["none"])
    with pytest.raises(InputError, match="whose input_shape is None"):
        compare(module, Machine(), 4, 8)
    patterns = [Pattern.diagonal(3), Pattern.dense((3, 3))]
    assert [layer.kind for layer in build(patterns).layers] == ["input", "linear", "elementwise"]
