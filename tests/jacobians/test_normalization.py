"""LayerNorm, BatchNorm1d and BatchNorm2d against PyTorch, in evaluation and in training."""

from __future__ import annotations

import copy
import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from autodiff import check_operator, close
from hypothesis import given
from hypothesis import strategies as st

from sparsescan import InputError, InputTypeError, Pattern
from sparsescan.jacobians import BatchNorm1d, BatchNorm2d, LayerNorm, Sequential, from_torch

nn = torch.nn

sizes = st.integers(1, 4)
shapes = st.lists(sizes, min_size=1, max_size=3).map(tuple)
epsilons = st.sampled_from([1e-5, 1e-2, 3.0])
seeds = st.integers(0, 2**32 - 1)


def kinds_of(sample: tuple[int, ...]) -> tuple[Any, Any]:
    """Return our batch norm of such samples, and PyTorch's."""
    return (BatchNorm2d, nn.BatchNorm2d) if len(sample) == 3 else (BatchNorm1d, nn.BatchNorm1d)


def joint(module: Any) -> Any:
    """Let a sample of a module be a whole batch, as it is for a layer in training."""
    forward = module.forward
    module.forward = lambda x: forward(x[0])[None]
    return module


def flat(module: Any, axes: int) -> Any:
    """Let a module accept more axes before those of a sample."""
    forward = module.forward
    module.forward = lambda x: forward(x.reshape(-1, *x.shape[x.ndim - axes :])).reshape(x.shape)
    return module


def with_statistics(op: Any, module: Any, rng: np.random.Generator) -> None:
    """Random running statistics for both, in the same memory."""
    module.double()
    module.running_mean.copy_(torch.tensor(rng.standard_normal(op.num_features)))
    module.running_var.copy_(torch.tensor(rng.uniform(0.1, 4, op.num_features)))
    op.running_mean, op.running_var = module.running_mean.numpy(), module.running_var.numpy()


# -- LayerNorm ----------------------------------------------------------------------------------


@given(
    before=st.lists(sizes, max_size=2).map(tuple),
    shape=shapes,
    eps=epsilons,
    affine=st.booleans(),
    bias=st.booleans(),
    seed=seeds,
)
def test_layer_norm_is_that_of_pytorch(before, shape, eps, affine, bias, seed):
    op = LayerNorm(shape, eps, affine, bias, input_shape=(*before, *shape))
    size, blocks = math.prod(shape), math.prod(before)
    assert op.nnz == (blocks * size**2 if size > 1 else 0)
    check_operator(op, nn.LayerNorm(shape, eps, affine, bias), np.random.default_rng(seed))


@given(shape=shapes, seed=seeds)
def test_layer_norm_ignores_a_shift_and_without_eps_a_scale(shape, seed):
    """So its Jacobian maps the constant vector and, in the limit, the input itself to zero."""
    rng = np.random.default_rng(seed)
    op = LayerNorm((*shape, 3), eps=0, elementwise_affine=False)
    x = rng.standard_normal(op.input_shape)
    transposed = op.jacobian(x).toarray()
    size = np.abs(transposed).max()
    np.testing.assert_allclose(transposed.sum(axis=0) / size, 0, atol=1e-13)
    np.testing.assert_allclose(x.reshape(-1) @ transposed / size, 0, atol=1e-13)


def test_layer_norm_in_float32_keeps_its_digits_far_from_zero():
    """The mean is a million times the spread: what float64 gives, to the digits of the input."""
    rng = np.random.default_rng(0)
    x = (1000 + 0.001 * rng.standard_normal((4, 32))).astype(np.float32)
    op, module = LayerNorm(32, eps=1e-12), nn.LayerNorm(32, eps=1e-12).double()
    y = module(torch.tensor(x).double()).detach().numpy()
    jacobian = torch.autograd.functional.jacobian(module, torch.tensor(x[0]).double()).numpy()
    for actual, expected in ((op.forward(x), y), (op.values(x[0]).reshape(32, 32), jacobian.T)):
        assert actual.dtype == np.float32
        scale = np.abs(expected).max()
        assert np.abs(actual - expected).max() <= 8 * np.finfo(np.float32).eps * scale


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_layer_norm_of_extreme_input(dtype):
    info = np.finfo(dtype)
    rows = [
        [5, 5, 5, 5],
        [0, 0, 0, 0],
        [info.smallest_subnormal, 0, 0, info.tiny],
        [1e10, -1e10, 0, 1],
        [np.nan, 0, 0, 1],
        [np.inf, 0, 0, 1],
        [-np.inf, np.inf, 0, 1],
    ]
    op, module = (
        LayerNorm(4),
        nn.LayerNorm(4, dtype=torch.float32 if dtype == np.float32 else torch.float64),
    )
    tolerance = 20 * float(info.eps)
    for row in rows:
        x = np.array(row, dtype)
        expected = torch.autograd.functional.jacobian(module, torch.tensor(x)).numpy().T
        actual = op.values(x).reshape(4, 4)
        assert actual.dtype == dtype
        scale = np.nanmax(np.abs(expected), initial=0)
        np.testing.assert_allclose(actual, expected, atol=tolerance * scale, rtol=0)
        y = module(torch.tensor(x)).detach().numpy()
        np.testing.assert_allclose(op.forward(x), y, atol=tolerance, rtol=tolerance)


# -- Batch norms in evaluation ------------------------------------------------------------------


@given(
    before=st.lists(sizes, max_size=2).map(tuple),
    shape=shapes,
    eps=epsilons,
    affine=st.booleans(),
    seed=seeds,
)
def test_batch_norms_in_evaluation_are_those_of_pytorch(before, shape, eps, affine, seed):
    rng = np.random.default_rng(seed)
    ours, theirs = kinds_of(shape)
    more = {} if ours is BatchNorm2d else {"axes": len(shape)}
    op = ours(shape[0], eps, affine=affine, input_shape=(*before, *shape), **more)
    module = flat(theirs(shape[0], eps, affine=affine).eval(), len(shape))
    with_statistics(op, module, rng)
    assert op.pattern is Pattern.diagonal(math.prod(op.input_shape))
    check_operator(op, module, rng)


def test_slope_without_spread_or_eps_is_infinite_as_in_pytorch():
    op, module = BatchNorm2d(2, eps=0, input_shape=(2, 1, 1)), nn.BatchNorm2d(2, eps=0).eval()
    op.running_var = np.array([0.0, 1.0], np.float32)
    module.running_var[0] = 0
    x = torch.ones((1, 2, 1, 1), requires_grad=True)
    (slope,) = torch.autograd.grad(module(x).sum(), x)
    np.testing.assert_array_equal(op.values(), slope.reshape(-1))
    np.testing.assert_array_equal(op.forward(np.ones((2, 1, 1)))[0], np.inf)
    op.weight = np.zeros(2, np.float32)
    np.testing.assert_array_equal(op.values(), [np.nan, 0])


# -- Batch norms in training --------------------------------------------------------------------

of_any_kind = st.tuples(sizes, shapes).map(lambda s: (s[0], *s[1]))
of_any_kind = of_any_kind.filter(lambda s: s[0] * math.prod(s[2:]) > 1)
batches = of_any_kind.filter(lambda s: len(s) == 4)
few = of_any_kind.filter(lambda s: len(s) < 4).map(lambda s: (s[0], s[1:]))


@given(shape=of_any_kind, eps=epsilons, affine=st.booleans(), track=st.booleans(), seed=seeds)
def test_batch_norms_in_training_are_those_of_pytorch(shape, eps, affine, track, seed):
    rng = np.random.default_rng(seed)
    ours, theirs = kinds_of(shape[1:])
    options = {"affine": affine, "track_running_stats": track}
    op = ours(shape[1], eps, **options, input_shape=shape, training=True)
    check_operator(op, joint(theirs(shape[1], eps, **options)), rng, batch=2)


@given(shape=batches)
def test_training_couples_all_elements_of_a_channel(shape):
    op = BatchNorm2d(shape[1], input_shape=shape, training=True)
    channel = np.broadcast_to(np.arange(shape[1])[:, None, None], shape).reshape(-1)
    np.testing.assert_array_equal(
        (op.jacobian(np.zeros(shape)) != 0).toarray(), channel[:, None] == channel
    )


@given(shape=batches, seed=seeds)
def test_batches_are_normalised_by_themselves(shape, seed):
    op = BatchNorm2d(shape[1], input_shape=shape, training=True)
    x = np.random.default_rng(seed).standard_normal((3, *shape))
    close(op.values(x), np.stack([op.values(batch) for batch in x]))
    close(op.forward(x), np.stack([op.forward(batch) for batch in x]))


def test_pattern_and_values_of_a_few_thousand_elements_are_quick():
    op = BatchNorm2d(2, input_shape=(32, 2, 8, 8), training=True)
    x = np.random.default_rng(0).standard_normal((32, 2, 8, 8)).astype(np.float32)
    start = time.perf_counter()
    assert op.pattern.nnz == 2 * 2048**2
    op.values(x)
    assert time.perf_counter() - start < 2


# -- Running statistics -------------------------------------------------------------------------


@given(
    shape=of_any_kind,
    momentum=st.none() | st.floats(0, 1),
    steps=st.integers(1, 4),
    seed=seeds,
)
def test_running_statistics_are_those_of_pytorch(shape, momentum, steps, seed):
    rng = np.random.default_rng(seed)
    ours, theirs = kinds_of(shape[1:])
    op = ours(shape[1], momentum=momentum, input_shape=shape, training=True, dtype=np.float64)
    module = theirs(shape[1], momentum=momentum).double()
    mean, variance = op.running_mean, op.running_var
    x = rng.normal(2, 3, (steps, *shape))
    together = copy.deepcopy(op)
    for batch in x:
        op.update_running_stats(batch)
        module(torch.tensor(batch))
        close(op.running_mean, module.running_mean.numpy())
        close(op.running_var, module.running_var.numpy())
    assert op.num_batches_tracked == module.num_batches_tracked == steps
    assert op.running_mean is mean
    assert op.running_var is variance
    together.update_running_stats(x)
    np.testing.assert_array_equal(together.running_mean, mean)
    np.testing.assert_array_equal(together.running_var, variance)


@pytest.mark.parametrize("training", [True, False])
def test_nothing_but_an_update_changes_the_running_statistics(training):
    shape = (4, 3, 2, 2)
    op = BatchNorm2d(3, input_shape=shape, training=training)
    x = np.random.default_rng(0).standard_normal(shape)
    op.forward(x), op.values(x), op.param_grads(x, x)
    np.testing.assert_array_equal(op.running_mean, np.zeros(3))
    np.testing.assert_array_equal(op.running_var, np.ones(3))
    assert op.num_batches_tracked == 0


def test_what_training_tracks_evaluation_uses():
    shape = (4, 3, 2, 2)
    train = BatchNorm2d(3, input_shape=shape, training=True)
    test = BatchNorm2d(3, input_shape=shape[1:])
    test.running_mean, test.running_var = train.running_mean, train.running_var
    x = np.random.default_rng(0).standard_normal(shape)
    train.update_running_stats(x)
    module = nn.BatchNorm2d(3)
    module(torch.tensor(x, dtype=torch.float32))
    expected = module.eval()(torch.tensor(x, dtype=torch.float32)).detach().numpy()
    np.testing.assert_allclose(test.forward(x), expected, atol=1e-5)


def test_running_statistics_are_no_parameters():
    op = BatchNorm2d(3, input_shape=(3, 1, 1))
    assert op.params.keys() == {"weight", "bias"}
    assert BatchNorm2d(3, affine=False, input_shape=(3, 1, 1)).params == {}
    with pytest.raises(InputError, match=r"BatchNorm2d.running_mean is set .* \(2,\)"):
        op.running_mean = np.ones(2)
    with pytest.raises(InputTypeError, match="running_var has dtype int64"):
        op.running_var = np.ones(3, np.int64)
    bare = BatchNorm2d(3, track_running_stats=False, input_shape=(2, 3, 1, 1), training=True)
    assert bare.running_mean is bare.running_var is None
    with pytest.raises(InputError, match="running_var cannot be set"):
        bare.running_var = np.ones(3)
    with pytest.raises(InputError, match="needs a layer made with training=True and track"):
        bare.update_running_stats(np.ones((2, 3, 1, 1)))
    with pytest.raises(InputError, match="needs a layer made with training=True and track"):
        op.update_running_stats(np.ones((3, 1, 1)))


@given(shape=few, training=st.booleans(), seed=seeds)
def test_batch_norm_1d_in_training_steps(shape, training, seed):
    """As many samples as channels, too, where a batch in evaluation looks like a sample."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    batch, sample = shape
    batch = sample[0] if seed % 2 and sample[0] > 1 else batch
    layers = [nn.BatchNorm1d(sample[0]), nn.Tanh(), nn.BatchNorm1d(sample[0])]
    if len(sample) == 1:
        layers.insert(0, nn.Linear(sample[0], sample[0]))
    module = nn.Sequential(*layers).double().train(training)
    module[-1].eval()
    for layer in module:
        if isinstance(layer, nn.BatchNorm1d):
            nn.init.normal_(layer.weight)
            nn.init.uniform_(layer.running_var, 0.5, 2)
    x, above = (torch.tensor(rng.standard_normal((batch, *sample))) for _ in range(2))
    twin = copy.deepcopy(module)
    net = Sequential(from_torch(twin, x.shape if training else x.shape[1:]))
    step = net.training_step()
    y = module(x.requires_grad_())
    params = dict(module.named_parameters())
    expected = torch.autograd.grad(y, [x, *params.values()], above)
    close(step.forward(x.detach().numpy()), y.detach().numpy())
    step.update_running_stats()
    grads = step.backward(above.numpy())
    scale = max(1.0, *(float(each.abs().max()) for each in expected))
    for ours, theirs in zip(
        [grads.input, *(grads.params[name] for name in params)], expected, strict=True
    ):
        assert np.abs(ours - theirs.numpy()).max() <= 1e4 * np.finfo(float).eps * scale
    for ours, theirs in zip(twin.buffers(), module.buffers(), strict=True):
        close(ours.double().numpy(), theirs.double().numpy())
