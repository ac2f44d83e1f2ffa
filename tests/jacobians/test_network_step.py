"""Training steps of networks of layers, against PyTorch's autograd in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from autodiff import randomise
from hypothesis import given
from hypothesis import strategies as st
from layers import OPERATORS
from torch import nn
from torch.nn.utils import prune

from sparsescan import InputError, InputTypeError, MemoryLimitError
from sparsescan.formatting import exact_bytes
from sparsescan.jacobians import (
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Flatten,
    Linear,
    MaxPool2d,
    ReLU,
    Residual,
    Sequential,
    Tanh,
    from_torch,
)
from sparsescan.jacobians.shared.operator import Operator
from sparsescan.jacobians.training import stages, weighted
from sparsescan.jacobians.training.network_step import NetworkStep

EPS64 = float(np.finfo(np.float64).eps)
F4, F8 = np.dtype(np.float32), np.dtype(np.float64)


def close(actual: Any, expected: Any, what: Any = "", scale: float = 1) -> None:
    """Equal to rounding, by the largest number of the array, or a larger one."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, what
    if expected.size:
        assert np.abs(actual - expected).max() <= 1e3 * EPS64 * max(
            scale, np.abs(expected).max()
        ), what


def random_mask(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return a mask of any density; some have empty rows, or lack whole channels."""
    mask = rng.random(shape) < rng.choice([0, 0.05, 0.3, 0.8, 1])
    if rng.random() < 0.3:
        mask[rng.integers(shape[0])] = False
    if rng.random() < 0.3:
        mask[:, rng.integers(shape[1])] = False
    return mask


def masked(module: Any, rng: np.random.Generator) -> Any:
    """Prune most parameters of a module of PyTorch by a random mask."""
    randomise(module, rng)
    if rng.random() < 0.8:
        mask = random_mask(rng, tuple(module.weight.shape))
        prune.custom_from_mask(module, "weight", torch.tensor(mask))
    return module


def run_torch(net: Any, x: np.ndarray, grad: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict]:
    """Return the output, and the gradients in the input and in the parameters."""
    given = torch.tensor(x, requires_grad=True)
    y = net(given)
    names, params = zip(*net.named_parameters(), strict=True) if [*net.parameters()] else ((), ())
    x_grad, *grads = torch.autograd.grad(y, [given, *params], torch.tensor(grad), allow_unused=True)
    named = {
        name.removesuffix("_orig"): (np.zeros(param.shape) if each is None else each.numpy())
        for name, param, each in zip(names, params, grads, strict=True)
    }
    return y.detach().numpy(), x_grad.numpy(), named


def check(net: Any, input_shape: tuple[int, ...], batch: int, rng: np.random.Generator) -> None:
    """Compare with PyTorch twice, the second time in the arrays of the first."""
    net = net.double()
    for param in net.parameters():
        # The slopes of large sums would be all rounding.
        param.data /= param[0].numel() ** 0.5
    ours = Sequential(from_torch(net, input_shape))
    # Normalisations of what hardly varies multiply rounding by up to 300.
    scale = 100 if any(isinstance(each, nn.LayerNorm) for each in net.modules()) else 1
    with pytest.MonkeyPatch.context() as patch:
        # From which density on, and from how many weights on, layers are taken as dense.
        patch.setattr(weighted, "DENSITY", rng.choice([-1, 0.5, 2]))
        patch.setattr(weighted, "MATRIX_DENSITY", rng.choice([-1, 0.5, 2]))
        patch.setattr(weighted, "MATRIX", 1)
        step, out = ours.training_step(), None
    for _ in range(2):
        x = rng.standard_normal((batch, *input_shape))
        x.setflags(write=False)
        grad = rng.standard_normal((batch, *ours.output_shape))
        grad.setflags(write=False)
        y = step.forward(x)
        for k, op in enumerate(ours.ops):
            if hasattr(op, "kept_weights"):
                kept = op.weight[op.kept_weights()]
                np.testing.assert_array_equal(step.kept_weights(str(k)), kept)
        input_grad, params = step.backward(grad, out=out)
        expected = run_torch(net, x, grad)
        close(y, expected[0], "output", scale)
        close(input_grad, expected[1], "input", scale)
        assert params.keys() == expected[2].keys()
        for name, array in params.items():
            close(array, expected[2][name], name, scale)
            assert out is None or array.base is out[name] or array is out[name]
        out = params


# ---------------------------------------------------------------------------------------------
# Right
# ---------------------------------------------------------------------------------------------


Net = tuple[nn.Module, tuple[int, ...]]


def random_convolutions(rng: np.random.Generator) -> Net:
    """Return up to two of them, since each is written with the border that the other reads."""

    def draw(low: int, high: int) -> tuple[int, int]:
        return tuple(int(n) for n in rng.integers(low, high + 1, 2))

    layers: list[nn.Module] = []
    channels, sizes = int(rng.choice([1, 2, 4, 6])), draw(1, 9)
    input_shape = (channels, *sizes)
    for _ in range(2):
        groups = int(rng.choice([n for n in (1, 2, channels) if channels % n == 0]))
        after = groups * int(rng.integers(1, 10))
        kernel, stride, dilation, padding = draw(1, 3), draw(1, 3), draw(1, 2), draw(0, 3)
        transposed = bool(rng.random() < 0.3)
        if transposed:
            more = tuple(
                int(rng.integers(0, max(s, d))) for s, d in zip(stride, dilation, strict=True)
            )
            out = [
                (n - 1) * s - 2 * p + d * (k - 1) + m + 1
                for n, s, p, d, k, m in zip(
                    sizes, stride, padding, dilation, kernel, more, strict=True
                )
            ]
            rest: dict[str, Any] = {"output_padding": more}
            kind: Any = nn.ConvTranspose2d
        else:
            out = [
                (n + 2 * p - d * (k - 1) - 1) // s + 1
                for n, s, p, d, k in zip(sizes, stride, padding, dilation, kernel, strict=True)
            ]
            rest, kind = {}, nn.Conv2d
        if min(out) < 1:
            continue
        module = kind(
            channels,
            after,
            kernel,
            stride,
            padding,
            dilation=dilation,
            groups=groups,
            bias=bool(rng.random() < 0.7),
            **rest,
        )
        layers.append(masked(module, rng))
        if rng.random() < 0.5:
            layers.append(nn.ReLU())
        channels, sizes = after, tuple(out)
    return nn.Sequential(*(layers or [nn.Tanh()])), input_shape


def random_network(rng: np.random.Generator) -> Net:
    channels, size = int(rng.integers(1, 4)), int(rng.integers(4, 11))
    shape = (channels, size, size)
    layers: list[nn.Module] = []
    for _ in range(int(rng.integers(1, 4))):
        width = int(rng.integers(1, 12))
        layers.append(masked(nn.Conv2d(channels, width, 3, padding=1), rng))
        layers += [
            [nn.ReLU()],
            [nn.Tanh()],
            [nn.LeakyReLU(0.3)],
            [nn.BatchNorm2d(width).eval(), nn.ReLU()],
            [nn.ReLU(), nn.ReLU()],
            [nn.Tanh(), nn.LayerNorm((size, size))],
            [nn.Softmax(1)],
            [],
        ][rng.integers(8)]
        if size >= 3:
            pool = [
                nn.MaxPool2d(2),
                nn.MaxPool2d(3, 1, 1),
                nn.MaxPool2d(3, 2),
                nn.AvgPool2d(2),
                None,
            ]
            chosen = pool[rng.integers(5)]
            if chosen is not None:
                layers.append(chosen)
                size = chosen(torch.zeros(1, 1, size, size)).shape[-1]
        channels = width
    layers += [nn.Flatten(), masked(nn.Linear(channels * size * size, 7), rng)]
    if rng.random() < 0.5:
        layers += [nn.ReLU(), masked(nn.Linear(7, 3), rng), nn.Softmax(-1)]
    return nn.Sequential(*layers), shape


RANDOM_NETS = pytest.mark.parametrize("made", [random_convolutions, random_network])


@RANDOM_NETS
@given(st.integers(0, 2**32 - 1))
def test_any_network(made: Callable[[np.random.Generator], Net], seed: int) -> None:
    rng = np.random.default_rng(seed)
    check(*made(rng), int(rng.integers(1, 40)), rng)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_layer(name: str) -> None:
    """Between two others, as its own Jacobian and its own gradients of parameters."""
    rng = np.random.default_rng(0)
    op = OPERATORS[name](F8)
    if isinstance(op, Residual):
        ops: list[Operator] = [op]
    else:
        ops = [ReLU(input_shape=op.input_shape), op, Tanh(input_shape=op.output_shape)]
    net = Sequential(ops)
    batch = 1 if name == "Dropout-batch" else 4
    x = rng.standard_normal((batch, *net.input_shape)) + 0.1
    grad = rng.standard_normal((batch, *net.output_shape))
    step = net.training_step()
    if step.has_batch_axis:
        x, grad = x[0], grad[0]
    y = step.forward(x)
    input_grad, params = step.backward(grad)
    xs = net.activations(x)
    flat = grad.reshape(*x.shape[: x.ndim - len(net.input_shape)], -1)
    grads = net.plan().inclusive_scan(flat, net.values(xs))
    close(y, xs[-1])
    close(input_grad, np.reshape(grads[-1], x.shape))
    expected = [array for each in net.param_grads(xs, grads) for array in each.values()]
    assert len(params) == len(expected)
    for actual, array in zip(params.values(), expected, strict=True):
        close(actual, array)


class Block(nn.Module):
    """A residual block of PyTorch."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        around = x if self.shortcut is None else self.shortcut(x)
        return around + self.body(x)


def residual(rng: np.random.Generator, narrow: int, wide: int, size: int, training: int) -> Any:
    """Return a block of each: ours and PyTorch's; with the number of samples, in training."""

    def module(a: int, b: int, kernel: int, stride: int) -> nn.Conv2d:
        return masked(nn.Conv2d(a, b, kernel, stride, kernel // 2), rng).double()

    def norm(width: int) -> Any:
        module = nn.BatchNorm2d(width).double().train(bool(training))
        randomise(module, rng)
        return module

    stride = 1 if narrow == wide else 2
    body = nn.Sequential(
        module(narrow, wide, 3, stride), norm(wide), nn.ReLU(), module(wide, wide, 3, 1), norm(wide)
    )
    shortcut = nn.Sequential(module(narrow, wide, 1, 2)) if stride == 2 else None
    lead = (training,) if training else ()
    ours = Residual(
        *from_torch(body, (*lead, narrow, size, size)),
        shortcut=() if shortcut is None else from_torch(shortcut, (*lead, narrow, size, size)),
    )
    return Block(body, shortcut), ours


def check_blocks(net: Sequential, theirs: nn.Module, x: np.ndarray, grad: np.ndarray) -> None:
    """Compare with PyTorch, where the body of a block is a module of its own."""
    y, input_grad, params = run_torch(theirs, x, grad)
    step = net.training_step()
    close(step.forward(x), y)
    grads = step.backward(grad)
    close(grads.input, input_grad)
    assert len(grads.params) == len(params)
    # Some are sums of large numbers that are 0: a bias has no effect in front of a normalisation.
    scale = len(x) * max(np.abs(array).max() for array in params.values())
    for name, array in params.items():
        close(grads.params[name.replace("body.", "")], array, name, scale)
    close(step.forward(x), y)


def small_net(dtype: Any = F4, keep: float = 0.3, seed: int = 0) -> Sequential:
    rng, options = np.random.default_rng(seed), {"padding": 1, "dtype": dtype}
    first, second, last = (
        rng.random(shape) < keep for shape in [(6, 2, 3, 3), (8, 6, 3, 3), (10, 128)]
    )
    return Sequential(
        [
            Conv2d(2, 6, 3, input_shape=(2, 8, 8), rng=0, weight_mask=first, **options),
            ReLU(input_shape=(6, 8, 8)),
            MaxPool2d(2, input_shape=(6, 8, 8)),
            Conv2d(6, 8, 3, input_shape=(6, 4, 4), rng=1, weight_mask=second, **options),
            ReLU(input_shape=(8, 4, 4)),
            Flatten(input_shape=(8, 4, 4)),
            Linear(128, 10, dtype=dtype, rng=2, weight_mask=last),
        ]
    )


# ---------------------------------------------------------------------------------------------
# Promises
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F4, F8])
@pytest.mark.parametrize("batch", [3, 70])
@pytest.mark.parametrize("keep", [0.3, 1])
def test_bits_are_those_of_one_thread(
    dtype: Any, batch: int, keep: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "_TASK", 1)
    rng = np.random.default_rng(0)
    net = small_net(dtype, keep)
    x = rng.standard_normal((batch, 2, 8, 8)).astype(dtype)
    grad = rng.standard_normal((batch, 10)).astype(dtype)
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(stages, "thread_count", lambda count=threads: count)
        step = net.training_step()
        y = step.forward(x)
        grads = step.backward(grad)
        results.append([y, grads.input, *grads.params.values()])
    for each in results[1:]:
        for actual, expected in zip(each, results[0], strict=True):
            assert actual.tobytes() == expected.tobytes()


def test_places_of_an_image_are_not_taken_for_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are as many of both, and threads share either."""
    rng = np.random.default_rng(0)
    net = Sequential(
        [
            Conv2d(2, 4, 3, padding=1, input_shape=(2, 4, 4), dtype=F8, rng=0),
            BatchNorm2d(4, input_shape=(4, 4, 4), dtype=F8),
            AvgPool2d(2, input_shape=(4, 4, 4)),
            BatchNorm2d(4, input_shape=(4, 2, 2), dtype=F8),
            ReLU(input_shape=(4, 2, 2)),
            MaxPool2d(2, input_shape=(4, 2, 2)),
        ]
    )
    x, grad = rng.standard_normal((3, 2, 4, 4)), rng.standard_normal((3, 4, 1, 1))
    results = []
    monkeypatch.setattr(stages, "_TASK", 1)
    for threads in (1, 4):
        monkeypatch.setattr(stages, "thread_count", lambda count=threads: count)
        step = net.training_step()
        y = step.forward(x)
        grads = step.backward(grad)
        (segment,) = step._segments
        assert max(len(group.parts) for group in segment.ahead) == threads
        results.append([y, grads.input, *grads.params.values()])
    for actual, expected in zip(*results, strict=True):
        assert actual.tobytes() == expected.tobytes()
    assert not any(
        isinstance(group.stages[0], weighted.Mix) and len(group.stages) > 1
        for group in (*segment.ahead, *segment.back)
    )


def test_blocks_in_blocks_and_borders_behind_them() -> None:
    """Maps that share a gradient have one border, that of the widest reader."""
    rng = np.random.default_rng(0)

    def conv(kernel: int = 3) -> nn.Conv2d:
        return masked(nn.Conv2d(2, 2, kernel, padding=kernel // 2), rng).double()

    def operators(*modules: nn.Module) -> list[Operator]:
        return from_torch(nn.Sequential(*modules), (2, 6, 6))

    a, b, c, last = conv(), conv(), conv(), conv(7)
    block = Block(nn.Sequential(b), nn.Sequential(c))
    theirs = nn.Sequential(Block(nn.Sequential(a, block), None), last)
    inner = Residual(*operators(b), shortcut=operators(c))
    net = Sequential([Residual(*operators(a), inner), *operators(last)])
    x, grad = rng.standard_normal((2, 3, 2, 6, 6))
    check_blocks(net, theirs, x, grad)


def test_axes_that_are_flattened_in_part() -> None:
    rng = np.random.default_rng(0)
    first, last = nn.Conv2d(2, 3, 3, padding=1), nn.Conv1d(3, 2, 5, padding=2)
    net = nn.Sequential(masked(first, rng), nn.ReLU(), nn.Flatten(2), masked(last, rng))
    check(net, (2, 4, 5), 3, rng)
    check(nn.Sequential(masked(first, rng), nn.Flatten(2), nn.Linear(20, 3)), (2, 4, 5), 3, rng)


@pytest.mark.parametrize("between", [[], [nn.ReLU()]])
def test_a_block_behind_flattened_images(between: list[nn.Module]) -> None:
    rng = np.random.default_rng(0)
    first = [masked(nn.Conv2d(2, 3, 3, padding=1), rng), nn.Flatten(), *between]
    linear = masked(nn.Linear(60, 60), rng)
    theirs = nn.Sequential(*first, Block(nn.Sequential(linear), None), nn.Linear(60, 2)).double()
    body, last = (from_torch(nn.Sequential(each), (60,)) for each in (linear, theirs[-1]))
    ops = from_torch(theirs[: len(first)], (2, 4, 5))
    net = Sequential([*ops, Residual(*body), *last])
    x, grad = rng.standard_normal((3, 2, 4, 5)), rng.standard_normal((3, 2))
    check_blocks(net, theirs, x, grad)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("keep", [0.3, 1])
def test_samples_do_not_disturb_each_other(bad: float, keep: float) -> None:
    net = small_net(keep=keep)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 2, 8, 8), np.float32)
    grad = rng.standard_normal((5, 10), np.float32)
    step = net.training_step()
    clean = step.forward(x), step.backward(grad).input
    x[2, 0, 3, 3] = bad
    y, input_grad = step.forward(x), step.backward(grad).input
    others = [0, 1, 3, 4]
    assert y[others].tobytes() == clean[0][others].tobytes()
    assert input_grad[others].tobytes() == clean[1][others].tobytes()
    assert not np.isfinite(y[2]).all()


def test_of_equal_and_of_no_numbers_the_pool_chooses_as_pytorch() -> None:
    rng = np.random.default_rng(0)
    values = np.array([0, 1, 1, 2, -np.inf, np.nan])
    for kernel, stride, padding in ((2, 2, 0), (3, 1, 1), (3, 2, 1)):
        x = rng.choice(values, (6, 2, 7, 7))
        theirs = nn.MaxPool2d(kernel, stride, padding)
        step = Sequential(
            [MaxPool2d(kernel, stride, padding, input_shape=(2, 7, 7))]
        ).training_step()
        y = step.forward(x)
        grad = rng.standard_normal(y.shape)
        expected = run_torch(theirs, x, grad)
        np.testing.assert_array_equal(y, expected[0])
        np.testing.assert_allclose(step.backward(grad).input, expected[1], rtol=1e-12)


def test_gradients_that_nobody_needs() -> None:
    net = small_net(F8)
    rng = np.random.default_rng(0)
    x, grad = rng.standard_normal((4, 2, 8, 8)), rng.standard_normal((4, 10))
    step = net.training_step()
    step.forward(x)
    expected = step.backward(grad).params
    step.forward(x)
    grads = step.backward(grad, needs_input_grad=False)
    assert grads.input is None
    assert list(grads.params) == list(expected)
    for name, array in grads.params.items():
        assert array.tobytes() == expected[name].tobytes()


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_results_belong_to_the_caller_and_parameters_are_read_in_forward(batch: int) -> None:
    net = small_net(F8)
    rng = np.random.default_rng(0)
    x, grad = rng.standard_normal((batch, 2, 8, 8)), rng.standard_normal((batch, 10))
    step = net.training_step()
    y = step.forward(x)
    grads = step.backward(grad)
    kept = copy.deepcopy([y, grads.input, *grads.params.values()])
    before = copy.deepcopy(net.layers[3].weight)
    step.forward(x)
    net.layers[3].weight *= 2
    again = step.backward(grad)
    step.forward(x + 1)
    for actual, expected in zip([y, grads.input, *grads.params.values()], kept, strict=True):
        np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(again.input, grads.input)
    net.layers[3].weight = before
    y[...] = 0  # and may be changed
    np.testing.assert_array_equal(step.forward(x), kept[0])


# ---------------------------------------------------------------------------------------------
# Memory, dense layers, and what is refused
# ---------------------------------------------------------------------------------------------


def test_memory_is_said_and_limited() -> None:
    net = small_net()
    step = net.training_step()
    assert step.nbytes == 0
    step.forward(np.ones((16, 2, 8, 8), np.float32))
    needed = step.nbytes
    arrays = [array for each in step._maps for array in (each.x, each.grad)]
    arrays += [stage.kept for stage in step._stages]
    (base,) = {id(array.base): array.base for array in arrays}.values()
    assert base.nbytes == needed
    assert "16 samples" in repr(step)
    assert "6 Linear" in str(step)
    with pytest.raises(MemoryLimitError, match=r"memory_limit is .*16 samples need at least"):
        net.training_step(memory_limit=needed // 10).forward(np.ones((16, 2, 8, 8), np.float32))
    step = net.training_step(memory_limit=needed)
    step.forward(np.ones((16, 2, 8, 8), np.float32))
    assert "twice" not in repr(step)


def test_says_which_layers_are_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    def reasons(keep: float) -> list[str]:
        lines = str(small_net(keep=keep).training_step()).splitlines()[2:]
        return [line.partition("dense: ")[2] for line in lines]

    monkeypatch.setattr(weighted, "DENSITY", 0.5)  # as where there is AVX-512
    assert reasons(0.3) == ["", "", ""]
    # The first layer has too few channels.
    assert reasons(1) == ["", "faster by blocks of rows", "faster by blocks of rows"]
    monkeypatch.setattr(weighted, "MATRIX", 1)
    assert reasons(1) == ["", "faster by blocks of rows", "faster by BLAS"]


@pytest.mark.parametrize("training", [False, True])
def test_activations_that_are_computed_again(training: bool) -> None:
    """Under every limit down to the lowest, results have the bits of those without one."""
    rng = np.random.default_rng(0)
    batch, lead = 5, 5 if training else 0
    ops: list[Operator] = []
    for narrow, wide, size in ((3, 4, 8), (4, 4, 4), (4, 4, 4)):
        block = residual(rng, narrow, wide, size, lead)[1]
        ops += [block, ReLU(input_shape=block.output_shape)]
    shape = ops[-1].output_shape
    ops += [MaxPool2d(2, input_shape=shape), Flatten(1 + training, input_shape=(*shape[:-2], 2, 2))]
    ops += [Tanh(input_shape=ops[-1].output_shape)]
    net = Sequential(ops)
    x, grad = rng.standard_normal((batch, 3, 8, 8)), rng.standard_normal((batch, 16))
    limit, least, tried = None, "", 0
    expected: list[Any] = []
    while True:
        step, out = net.training_step(memory_limit=limit), None
        try:
            step.forward(x)
        except MemoryLimitError as error:
            refused = str(error)
            break
        for _ in range(2):  # what is left of a step does not disturb the next
            y = step.forward(x)
            input_grad, out = step.backward(grad, out=out)
            results = [y, input_grad, *out.values()]
            expected = expected or [array.copy() for array in results]
            for actual, right in zip(results, expected, strict=True):
                np.testing.assert_array_equal(actual, right)
        assert limit is None or step.nbytes <= limit
        assert ("twice" in repr(step)) == (tried > 0)
        limit, least, tried = step.nbytes - 1, exact_bytes(step.nbytes), tried + 1
    assert f"need at least {least}" in refused
    assert tried >= 3


def test_bad_input() -> None:
    net = small_net()
    step = net.training_step()
    with pytest.raises(InputError, match="backward was called without a forward pass"):
        step.backward(np.ones((4, 10), np.float32))
    for wrong in ((4, 2, 8, 9), (2, 8), (1, 4, 2, 8, 8)):
        with pytest.raises(InputError, match=r"x has shape .*expected \(batch, 2, 8, 8\)"):
            step.forward(np.ones(wrong, np.float32))
    with pytest.raises(InputTypeError, match="x has dtype int64"):
        step.forward(np.ones((4, 2, 8, 8), np.int64))
    step.forward(np.ones((4, 2, 8, 8), np.float32))
    with pytest.raises(InputError, match=r"grad_output has shape \(3, 10\); expected \(4, 10\)"):
        step.backward(np.ones((3, 10), np.float32))
    grads = step.backward(np.ones((4, 10), np.float32))
    with pytest.raises(InputError, match="backward was called without"):
        step.backward(np.ones((4, 10), np.float32))
    step.forward(np.ones((4, 2, 8, 8), np.float32))
    for name, wrong in (
        ("0.weight", np.ones((6, 2, 3, 3))),
        ("6.bias", np.ones(11, np.float32)),
        ("6.weight", np.ones((128, 10), np.float32).T),
        ("3.bias", None),
    ):
        with pytest.raises(InputError, match=rf"out\['{name}'\] is"):
            step.backward(np.ones((4, 10), np.float32), out=grads.params | {name: wrong})
    with pytest.raises(InputTypeError, match="out is 3; expected the params"):
        step.backward(np.ones((4, 10), np.float32), out=3)  # type: ignore[arg-type]
    step.backward(np.ones((4, 10), np.float32), out=grads.params)
    for limit in (-1, "1 GB"):
        with pytest.raises((InputError, InputTypeError), match="memory_limit"):
            net.training_step(memory_limit=limit)  # type: ignore[arg-type]
    assert isinstance(step, NetworkStep)


@pytest.mark.parametrize("limited", [False, True])
def test_running_statistics_take_in_a_batch(limited: bool) -> None:
    """As in PyTorch's forward pass, also in blocks, and if activations are computed again."""
    pairs = []
    for _ in range(2):  # PyTorch copies no pruned layer
        torch.manual_seed(0)
        rng = np.random.default_rng(0)
        pairs.append([residual(rng, 3, 4, 8, 5), residual(rng, 4, 4, 4, 5)])
    theirs = nn.Sequential(*(block for block, _ in pairs[0]))
    net = Sequential([ours for _, ours in pairs[1]])
    step = net.training_step()
    x = rng.standard_normal((3, 5, 3, 8, 8))
    if limited:
        step.forward(x[0])
        step = net.training_step(memory_limit=step.nbytes - 1)
    for batch in x:
        y = step.forward(batch)
        step.update_running_stats()
        theirs(torch.from_numpy(batch))
        step.backward(np.ones_like(y))
    ours = nn.Sequential(*(block for block, _ in pairs[1]))
    for (name, buffer), right in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        close(buffer.numpy(), right.numpy(), name)
    with pytest.raises(InputError, match="update_running_stats was called without a forward pass"):
        step.update_running_stats()


def test_running_statistics_of_samples_that_are_joined() -> None:
    shape = (2, 2, 3, 3)
    norm = BatchNorm2d(2, input_shape=shape, training=True)
    step = Sequential([norm, Flatten(input_shape=shape)]).training_step()
    step.forward(np.ones(shape))
    with pytest.raises(InputError, match=r"keep the axis of samples first; .*\(36,\)"):
        step.update_running_stats()
