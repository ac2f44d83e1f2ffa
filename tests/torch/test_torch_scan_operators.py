"""Operators in a step of ``sparsescan.torch.scan``, each with its derivatives, beside the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from test_torch_scan import loop
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils import _pytree as pytree

from sparsescan.torch import explain, scan
from sparsescan.torch.capture import trace

pytestmark = pytest.mark.slow  # each operator is one more cell, which is compiled

STEPS, BATCH, UNITS = 4, 3, 6
# Numbers at which derivatives jump, or formulas have another branch, and some between.
EDGES = [0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 0.5, -0.5, 6.0, 20.0, 25.0, -25.0, 0.01, 2.0]


# Steps that change tensors of their own.


def changed(h: Tensor, x: Tensor) -> Tensor:
    h = 0.5 * h
    before = h + x
    h += x
    h.mul_(W[0]).clamp_(-1, 1)
    h[h > 0.5] = 0.25
    return h.add_(before)


def filled(h: Tensor, x: Tensor) -> Tensor:
    new, twice = torch.zeros_like(x), h.new_full((BATCH, UNITS), 2.0)
    twice.mul_(h)
    new[:, :] = x
    new += twice
    return new.masked_fill_(h > 1, 0.0).t().t().sub_(0.5)


def changed_in_part(h: Tensor, x: Tensor) -> Tensor:
    both = torch.cat([h, x, h], -1)
    both[:, UNITS : 2 * UNITS] = x * h
    view = both[:, UNITS:]
    view.narrow(1, 0, UNITS).add_(1)
    both[:, :UNITS].copy_(x[0])
    a, b = view.unflatten(1, (2, UNITS)).unbind(1)
    return torch.tanh(a) * b + both[:, :UNITS]


def changed_by_turns(h: Tensor, x: Tensor) -> Tensor:
    h = h + x
    h.t().mul_(2)
    view = h.permute(1, 0)
    h.neg_()
    view.add_(x.T, alpha=2)
    h.lerp_(x, 0.25)
    return view.T.addcmul_(x, x)


def activated(h: Tensor, x: Tensor) -> Tensor:
    return F.relu(F.hardtanh(h + x, -2, 2, inplace=True) + 1, inplace=True) + F.silu(h * 1, True)


def changed_samples(h: Tensor, x: Tensor) -> Tensor:
    h = h + x
    h[0] = 1.0
    h[:, 1] = x[:, 2]
    h[:, ::2] *= 2
    return h


def changed_heads(h: Tensor, x: Tensor) -> Tensor:
    h = h + x
    heads = h.view(BATCH, 2, 3)
    heads[:, 1] *= 2
    heads.transpose(1, 2).add_(1)
    return h


def changed_shape(h: Tensor, x: Tensor) -> Tensor:
    h = h + x
    view = h[:, :2]
    h.unsqueeze_(1)
    view.add_(1)
    return h.squeeze(1)


def detached(h: Tensor, x: Tensor) -> Tensor:
    h = h + x
    part = h.detach()
    part += 1
    return h


# Of a state h and numbers x of a step.
CAPTURED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "abs": lambda h, x: h.abs() + x.abs(),
    "relu": lambda h, x: torch.relu(x) + F.relu(h),
    "leaky_relu": lambda h, x: F.leaky_relu(x) + F.leaky_relu(h, 0.2),
    "leaky_relu, by name": lambda h, x: F.leaky_relu(x, negative_slope=0.3) + h,
    "hardtanh": lambda h, x: F.hardtanh(x) + F.hardtanh(h, -2.0, 0.5),
    "hardtanh, by name": lambda h, x: F.hardtanh(x, min_val=-3.0, max_val=6.0) + h,
    "hardsigmoid": lambda h, x: F.hardsigmoid(x) + F.hardsigmoid(h),
    "relu6": lambda h, x: F.relu6(x) + h,
    "silu": lambda h, x: F.silu(x) + F.silu(h),
    "softplus": lambda h, x: F.softplus(x) + F.softplus(h, beta=2),
    "logsigmoid": lambda h, x: F.logsigmoid(x) + F.logsigmoid(h),
    "sign": lambda h, x: torch.sign(x) * h + torch.sgn(h) + torch.sign(x * torch.inf),
    "clamp": lambda h, x: x.clamp(-1, 3) + h.clamp(min=0.5) + x.clamp(max=1),
    "clamp_min": lambda h, x: torch.clamp_min(x, 0.0) + torch.clamp_max(h, 1.0),
    "clip": lambda h, x: torch.clip(x, -1, 1) + h,
    "clamp, crossing": lambda h, x: (
        h.clamp(2, -1) * x.clamp(0.5, -3) + h.clamp(x, B) + h.clamp(x, x)
    ),
    "clamp, NaN": lambda h, x: torch.where(x > 2, 0, h.clamp(torch.where(x > 2, torch.nan, x))) + h,
    "rsub": lambda h, x: 1 - h + torch.rsub(x, 2.0),
    "reciprocal": lambda h, x: 1 / (x + 40) + torch.reciprocal(h + 50),
    "where": lambda h, x: torch.where(x > h, x, h) + torch.where(x >= 1, 0.0, h),
    "masked_fill": lambda h, x: h.masked_fill(x == 1, 0.0) + x.masked_fill(h > 0, 2.0),
    "addcmul": lambda h, x: torch.addcmul(h, h, x, value=0.5),
    "lerp": lambda h, x: torch.lerp(h, x, 0.25) + torch.lerp(x, h, torch.sigmoid(x)),
    "lerp to an end": lambda h, x: torch.lerp(1e20 * x, h, 1.0) + torch.lerp(h, x, x * 0 + 0.5),
    "alpha": lambda h, x: torch.add(h, x, alpha=0.5) - torch.sub(x, h, alpha=2),
    "tanhshrink": lambda h, x: F.tanhshrink(x) + F.tanhshrink(h),
    "mish": lambda h, x: F.mish(x) + F.mish(h),
    "gelu": lambda h, x: F.gelu(x) + F.gelu(h, approximate="tanh"),
    "elu": lambda h, x: F.elu(x) + F.elu(h, 0.5) + F.selu(x) + F.celu(h, 0.5),
    "maximum": lambda h, x: torch.maximum(h, x) - torch.minimum(h, x * 0),
    "power": lambda h, x: x**2 + h**3,
    "negative power": lambda h, x: (x + 40) ** -2 + h,
    "real power": lambda h, x: (h * h + 0.5) ** 1.5 + (x.abs() + 1) ** -0.3,
    "root": lambda h, x: (x.abs() + 1) ** 0.5 + torch.sqrt(h * h + 1) + torch.rsqrt(x * x + 1),
    "powers at infinity": lambda h, x: h + x**-2 + (x * 1e200) ** -1 + ((h + x).abs()) ** 0.5,
    "sinh": lambda h, x: torch.sinh(x) / (1 + x.abs().exp()) + torch.cosh(20 * x).sqrt() + h,
    "log1p": lambda h, x: torch.log1p(h * h) - torch.log1p(x.abs()),
    "erf": lambda h, x: torch.erf(x) + torch.erfc(h),
    "atan": lambda h, x: torch.atan(x) + torch.sinh(h / 9) + torch.cosh(x / 9),
    "addcdiv": lambda h, x: torch.addcdiv(h, x, 1 + h * h, value=0.5),
    "hardswish": lambda h, x: F.hardswish(x) + F.hardswish(h),
    "round": lambda h, x: h + (x / 3).round() + torch.floor(x / 3) + torch.ceil(x * h),
    "exp": lambda h, x: torch.exp(x / 10) + torch.expm1(h / 10) + torch.log(x * x + 1),
    "sin": lambda h, x: torch.sin(x) + torch.cos(h),
    "square": lambda h, x: torch.square(x) - h,
    "detach": lambda h, x: h.detach() * x + h,
    "logical": lambda h, x: torch.where((x > 0) & ~(h > 0) | torch.logical_not(x < 1), h, x),
    "comparisons": lambda h, x: (x == 1).to(x.dtype) * h + (x != h).double() + (x <= h) * x,
    "changes": changed,
    "new tensors": filled,
    "changed parts": changed_in_part,
    "changed views": changed_by_turns,
    "activations in place": activated,
    "filled": lambda h, x: torch.ones(UNITS) * h + torch.full_like(x, 0.5) - x.new_ones(()),
    "softmax": lambda h, x: torch.softmax(x + h, -1) * h + F.softmax(h, 1),
    "log_softmax": lambda h, x: torch.log_softmax(x + h, -1) * h + F.log_softmax(h, 1),
    "layer_norm": lambda h, x: F.layer_norm(x + h, (UNITS,), eps=1e-3) + h,
    "rms_norm": lambda h, x: F.rms_norm(x + h, (UNITS,), eps=1e-3) + h,
    "mean": lambda h, x: h.mean(-1, keepdim=True) * x + x.sum(1, keepdim=True) / 10,
    "mean without an axis kept": lambda h, x: x * h.mean(-1)[:, None],
    "parts of inputs": lambda h, x: (
        torch.cat([x.chunk(2, -1)[1], *x.split([1, 5], 1)[:1], x.narrow(1, 0, 2)], -1) * h
    ),
    "heads of inputs": lambda h, x: (x.view(BATCH, 2, 3) ** 2).sum(1).repeat(1, 2) + h,
    "units of inputs": lambda h, x: (
        x.unbind(1)[2][:, None] * h + x[:, 2:3] + x[:, -1].unsqueeze(-1)
    ),
    "squeeze": lambda h, x: (h.unsqueeze(1) * x.unsqueeze(1)).squeeze(1),
    "transpose": lambda h, x: (h.t() + x.transpose(0, 1)).t(),
    "permute": lambda h, x: h.permute(1, 0).T + x,
    "matrix in front": lambda h, x: ((W @ x[..., None]) + W @ h[..., None])[..., 0],
    "matmul": lambda h, x: h @ W + torch.mm(x, W.t()) + torch.addmm(B, x, W) + F.linear(h, W, B),
}
# What may stay a loop, but is no other number: parts of a state, casts that cut digits off.
ANY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "changed shape": changed_shape,
    "chunk": lambda h, x: torch.cat([h.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1),
    "split": lambda h, x: torch.cat([*h.split(2, 1)][::-1], 1) + x,
    "split sizes": lambda h, x: torch.cat([*torch.split(h, [1, 2, 3], -1)][::-1], -1) + x,
    "select": lambda h, x: h[:, 0:1] * x + h[:, 2].unsqueeze(-1) + h[:, -1][:, None],
    "unbind": lambda h, x: torch.stack(list(h.unbind(1))[::-1], -1) + x,
    "narrow": lambda h, x: torch.cat([h.narrow(1, 2, 4), x[:, :2]], -1),
    "view": lambda h, x: (h.view(BATCH, 2, 3) * x.reshape(BATCH, 2, 3)).flatten(1),
    "unflatten": lambda h, x: (h.unflatten(1, (3, 2)) + x.unflatten(1, (3, 2))).flatten(1),
    "heads": lambda h, x: torch.softmax(h.view(BATCH, 2, 3), -1).reshape(BATCH, UNITS) * x + h,
    "expand": lambda h, x: h[:, :1].expand(BATCH, UNITS) + x + h,
    "float": lambda h, x: h + (x > 0).float(),
    "long": lambda h, x: h + x.long(),
    "int": lambda h, x: h + (x * 3).to(torch.int32).to(x.dtype),
    "float32": lambda h, x: h + (x / 3).float().double(),
    "bool": lambda h, x: h * x.bool(),
    "axes turned round": lambda h, x: h + x[..., None].T[0].T,
    "trunc": lambda h, x: h + torch.trunc(x) + torch.frac(x / 3),
    "div with a mode": lambda h, x: h + torch.div(x, 2, rounding_mode="floor"),
    "remainder": lambda h, x: h + x % 2 + torch.fmod(x, 2),
    "power of two tensors": lambda h, x: (h.abs() + 1) ** (x / 25),
    "softplus, threshold": lambda h, x: F.softplus(x, threshold=2.0) + h,
    "whole numbers": lambda h, x: h + ((x > 0).long() & 1) + ~(x > 0).long(),
    "strides": lambda h, x: torch.cat([h[:, ::2], x[:, 1::2]], -1),
    "max": lambda h, x: h.amax(-1, keepdim=True) + x.max(-1, keepdim=True).values + h,
    "norm": lambda h, x: h / (1 + h.norm(dim=-1, keepdim=True)) + x,
    "var": lambda h, x: h * x.var(-1, keepdim=True) + h.std(1, keepdim=True),
    "cumsum": lambda h, x: torch.cumsum(h, -1) / 6 + x,
    "logsumexp": lambda h, x: torch.logsumexp(h, -1, keepdim=True) + x,
    "nan_to_num": lambda h, x: torch.nan_to_num(h) + x,
    "einsum": lambda h, x: torch.einsum("bi,ij->bj", h, W) + x,
    "bmm": lambda h, x: torch.bmm(h[:, None], W.expand(BATCH, UNITS, UNITS))[:, 0] + x,
    "glu": lambda h, x: torch.cat([F.glu(h), F.glu(x)], -1),
    "roll": lambda h, x: torch.roll(h, 1, -1) + x.flip(-1),
    "gather": lambda h, x: h[:, torch.tensor([5, 0, 1, 2, 3, 4])] + x,
    "sum of bools": lambda h, x: h + (x > 0).sum(-1, keepdim=True),
    "over samples": lambda h, x: h + x.mean(0, keepdim=True) + h.sum(0) / 9,
    "changed samples": changed_samples,
    "changed heads": changed_heads,
    "changed without gradients": detached,
    "batch in the middle": lambda h, x: F.layer_norm(h.t(), (BATCH,)).t() + x,
    "softmax over samples": lambda h, x: torch.softmax(h, 0) + x,
}
generator = torch.Generator().manual_seed(0)
W = torch.randn(UNITS, UNITS, generator=generator, dtype=torch.float64) / 3
B = torch.randn(UNITS, generator=generator, dtype=torch.float64)


def drawn(seed: int) -> list[Tensor]:
    """Return an initial state and numbers of all steps, of which many are at edges."""
    generator = torch.Generator().manual_seed(seed)

    def one(*shape: int) -> Tensor:
        edges = torch.tensor(EDGES, dtype=torch.float64)
        found = edges[torch.randint(len(EDGES), shape, generator=generator)]
        between = torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.where(torch.rand(shape, generator=generator) < 0.6, found, between)

    return [one(BATCH, UNITS).requires_grad_(), one(STEPS, BATCH, UNITS).requires_grad_()]


def step_of(name: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a step that calls an operator."""
    of, is_of_inputs = {**CAPTURED, **ANY}[name], name.endswith("of inputs")

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        new = torch.tanh(of(h, x) / 8)
        # The same numbers, which no kernel can have before the state.
        same = x if is_of_inputs else torch.where(new > -2, x, new)
        return new, of(new, same) * 0.5

    return step


def results(run: Any, name: str, seed: int) -> list[Tensor]:
    """Return results of a run, and gradients of weighted sums of them."""
    given, step = drawn(seed), step_of(name)
    last, ys = run(step, *given)
    weights = torch.linspace(-1, 2, ys.numel(), dtype=torch.float64).reshape(ys.shape)
    grads = torch.autograd.grad((last.sin() + (ys * weights).sum()).sum(), given, allow_unused=True)
    return [last, ys, *(torch.zeros(()) if grad is None else grad for grad in grads)]


@pytest.fixture(autouse=True)
def _steps_of_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_MOST_EACH", 10**6)


@pytest.mark.parametrize("name", [*CAPTURED, *ANY])
def test_an_operator_is_what_the_loop_has(name: str) -> None:
    if name in CAPTURED:
        assert explain(step_of(name), *drawn(0)).is_captured
    # PyTorch multiplies by 1/6 in float32 there.
    bound = 1e-7 if name == "hardsigmoid" else 1e-10
    for seed in range(2):
        found, expected = results(scan, name, seed), results(loop, name, seed)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound, equal_nan=True)


# -- Random bodies ---------------------------------------------------------------------------------

_SOME = [name for name in CAPTURED if not name.endswith("of inputs")]
_PLACES = st.integers(0, 40)
_PLANS = st.lists(
    st.tuples(st.sampled_from(_SOME), _PLACES, _PLACES, st.booleans()), min_size=1, max_size=6
)


@given(plan=_PLANS, ends=st.lists(_PLACES, min_size=2, max_size=3), seed=st.integers(0, 1000))
@settings(max_examples=examples(20), deadline=None)
def test_random_bodies(plan: list[Any], ends: list[int], seed: int) -> None:
    """Of operators of two values each, which are those before, and products."""
    begin, xs = drawn(seed)
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def step(states: Any, x: Tensor) -> Any:
        values = [*states, torch.tanh(x)]
        for name, a, b, is_product in plan:
            first, second = (values[-1 - k % len(values)] for k in (a, b))
            new = torch.tanh(CAPTURED[name](first, second) / 8)
            values.append(new @ W if is_product else new * scale)
        return tuple(values[-1 - k % len(values)] for k in ends), values[-1]

    leaves = [begin, xs, scale]
    both = []
    for run in (scan, loop):
        init = tuple(torch.tanh(begin * (k + 1)) for k in range(len(ends)))
        found = pytree.tree_leaves(run(step, init, xs))
        total = sum(each.sin().sum() for each in found)
        grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        both.append([*found, *grads])
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
