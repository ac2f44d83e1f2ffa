"""Selective scans, beside the loop that defines them, which autograd differentiates in float64."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling import slow
from torch import Tensor
from torch_checks import close

from sparsescan import DeviceError, InputError, InputTypeError
from sparsescan.ops import selective
from sparsescan.torch import selective_scan

NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")


def loop(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    delta_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return outputs and last states by the definition, all states of all steps at once."""
    batch, channels, length = u.shape

    def wide(factor: Tensor) -> Tensor:
        if factor.dim() == 2:
            return factor[None, :, :, None].expand(batch, -1, -1, length)
        if factor.dim() == 3:
            factor = factor[:, None]
        return factor.repeat_interleave(channels // factor.shape[1], 1)

    if delta_bias is not None:
        delta = delta + delta_bias[:, None]
    if delta_softplus:
        delta = torch.nn.functional.softplus(delta)
    decays = torch.exp(torch.einsum("bdl,dn->lbdn", delta, A))
    added = torch.einsum("bdl,bdnl->lbdn", delta * u, wide(B))
    state = u.new_zeros(batch, channels, A.shape[1]) if initial_state is None else initial_state
    y = torch.zeros_like(u)
    if length:
        states = []
        for decay, each in zip(decays, added, strict=True):
            state = decay * state + each
            states.append(state)
        y = torch.einsum("lbdn,bdnl->bdl", torch.stack(states), wide(C))
    y = y if D is None else y + D[:, None] * u
    return (y if z is None else y * z * torch.sigmoid(z)), state


class Case:
    """Random arguments; some may be missing, or not be differentiated."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64, small: bool = False) -> None:
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        most = (3, 5, 4, 5) if small else (4, 45, 40, 80)
        batch, length, states, channels = (int(rng.integers(1, n)) for n in most)
        if not small:
            batch, length, states = (n * bool(rng.random() > 0.05) for n in (batch, length, states))
            length *= int(rng.choice([1, 3]))

        def made(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, dtype=torch.float64) * scale).to(dtype)

        def factor() -> Tensor:
            kind = rng.integers(3)
            groups = int(rng.choice([n for n in range(1, channels + 1) if channels % n == 0]))
            shapes = (channels, states), (batch, states, length), (batch, groups, states, length)
            return made(*shapes[kind])

        def maybe(*shape: int) -> Tensor | None:
            return made(*shape) if rng.random() < 0.6 else None

        whole = batch, channels, length
        # States grow a little in some cases, and not beyond all numbers.
        self.softplus, grows = bool(rng.random() < 0.5), rng.random() < 0.2
        delta, bias = made(*whole), maybe(channels)
        if self.softplus:
            delta = delta * float(1 if grows else rng.choice([1, 30]))
        else:
            delta, bias = delta.abs() / 3, None if bias is None else bias.abs()
        rates = made(channels, states)
        rates = rates / 100 if grows else -torch.exp(rates) / 4
        values = (
            made(*whole),
            delta,
            rates,
            factor(),
            factor(),
            maybe(channels),
            maybe(*whole),
            bias,
            maybe(batch, channels, states),
        )
        self.given: list[Tensor | None] = list(values)
        for each in self.given:
            if each is not None and rng.random() < 0.8:
                each.requires_grad_()
        self.loses = rng.random(2) < 0.75
        self.odd = bool(rng.random() < 0.3)

    @property
    def some(self) -> list[Tensor]:
        return [each for each in self.given if each is not None]

    def run(self, *tensors: Tensor, by: Any = None) -> tuple[Tensor, Tensor]:
        rest = iter(tensors or self.some)
        given: list[Any] = [None if each is None else next(rest) for each in self.given]
        if by is not None:
            return by(*given, self.softplus)  # type: ignore[no-any-return]
        *first, start = given
        out, last = selective_scan(*first, self.softplus, True, start)
        return out, last

    def strided(self) -> list[Tensor]:
        """Return the tensors with their last two axes in the other order in memory."""
        return [each.mT.contiguous().mT if each.dim() > 1 else each for each in self.some]


def gradients(results: Any, weights: Any, leaves: list[Tensor], loses: Any) -> list[Tensor]:
    """Return the gradients of a weighted sum of some results; zeros for those that it has not."""
    loss = sum(
        (each * w).sum() for each, w, is_in in zip(results, weights, loses, strict=True) if is_in
    )
    if not leaves or not isinstance(loss, Tensor) or not loss.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(seed=st.integers(0, 2**32))
def test_outputs_states_and_gradients(dtype: torch.dtype, seed: int) -> None:
    case = Case(seed, dtype)
    tensors = case.strided() if case.odd else case.some
    before = [each.detach().clone() for each in tensors]
    ours = case.run(*tensors)
    exact = [each.detach().double().requires_grad_(each.requires_grad) for each in case.some]
    right = case.run(*exact, by=loop)
    weights = [torch.randn_like(each) for each in right]
    leaves, exact_leaves = ([x for x in every if x.requires_grad] for every in (case.some, exact))
    found = gradients(ours, [w.to(dtype) for w in weights], leaves, case.loses)
    expected = gradients(right, [w.to(dtype).double() for w in weights], exact_leaves, case.loses)
    assert len(found) == len(expected)
    sizes = [
        float(each.detach().abs().max()) for each in (*right, *expected, *exact) if each.numel()
    ]
    scale = max([1.0, *sizes])
    bound = 500 * torch.finfo(dtype).eps * scale
    for one, other in zip((*ours, *found), (*right, *expected), strict=True):
        assert one.dtype == dtype
        assert one.shape == other.shape
        assert ((one - other).abs() <= bound).all()
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("cut", [0, 1, 33, 74, 75])
def test_last_states_begin_what_follows(cut: int) -> None:
    """Values and gradients of a scan in two parts are those of the whole one."""
    given, results = full(channels=19, length=75), []
    for ends in ((0, 75), (0, cut, 75)):
        outs, state = [], None
        for begin, end in itertools.pairwise(ends):
            part = [each[..., begin:end] if each.dim() == 3 else each for each in given]
            out, state = selective_scan(*part, True, True, state)
            outs.append(out)
        whole = torch.cat(outs, -1)
        grads = torch.autograd.grad(whole.square().sum() + state.sum(), given)
        results.append([whole, state, *grads])
    close(*results)


def full(batch: int = 2, channels: int = 20, length: int = 40, states: int = 5) -> list[Any]:
    """Return all arguments, each of which requires its gradient."""
    torch.manual_seed(0)
    whole, own = (batch, channels, length), (batch, states, length)
    rates = -torch.rand(channels, states) - 0.1
    shapes = (whole, whole, None, own, own, (channels,), whole, (channels,))
    tensors = [rates if shape is None else torch.randn(shape) for shape in shapes]
    return [each.requires_grad_() for each in tensors]


# -- Threads, and memory ---------------------------------------------------------------------------


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective, "_GRAIN", 1)
    given = full(channels=70, length=75, states=9)
    results = []
    for threads, turns in ((1, 1), (2, 4), (3, 50)):
        torch.set_num_threads(threads)
        monkeypatch.setattr(selective, "_TURNS", turns)
        out, last = selective_scan(*given, True, True)
        grads = torch.autograd.grad(out.square().sum() + last.sum(), given)
        results.append([out, last, *grads])
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))


def test_passes_take_memory_of_a_few_inputs() -> None:
    given = full(1, 64, 1024, 64)
    nbytes = given[0].numel() * 4
    for _ in range(2):  # the first call compiles
        tracemalloc.start()
        out = selective_scan(*given, True)
        forward = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        out.sum().backward()
        backward = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert forward < 3 * nbytes
    # Three gradients, what is kept, and four sums for each of B and C.
    assert backward < 18 * nbytes < 64 * nbytes


# -- Compilers and transforms ----------------------------------------------------------------------


def grouped(*given: Any) -> list[Any]:
    """Return inputs of which B and C of all channels are of one group."""
    return [
        each[:, None] if k in (3, 4) and each.ndim == 3 else each for k, each in enumerate(given)
    ]


@pytest.mark.parametrize("seed", [1, *slow(4)])
def test_opcheck(seed: int) -> None:
    case = Case(seed, small=True)
    operator: Any = torch.ops.sparsescan.selective_scan.default
    given = [
        None if each is None else each.detach().requires_grad_() for each in grouped(*case.given)
    ]
    torch.library.opcheck(operator, (*given, [int(case.softplus)], [], True))


# -- Errors ----------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no tensor": ({"u": np.ones((2, 20, 40))}, InputTypeError, "u is array.* expected a tensor"),
    "nothing": ({"B": None}, InputTypeError, "B is None; expected a tensor"),
    "complex": (
        {"A": torch.ones(20, 5, dtype=torch.complex64)},
        InputTypeError,
        "A has dtype torch.complex64; .*affine_scan",
    ),
    "half": ({"u": torch.ones(2, 20, 40).half()}, InputTypeError, "u has dtype torch.float16"),
    "another": (
        {"D": torch.ones(20).double()},
        InputTypeError,
        "D has dtype torch.float64, u torch.float32; expected one dtype",
    ),
    "the others": (
        {"u": torch.ones(2, 20, 40).double()},
        InputTypeError,
        "delta has dtype torch.float32, u torch.float64; expected one dtype",
    ),
    "axes": ({"u": torch.ones(20, 40)}, InputError, r"u has shape \(20, 40\); .*length"),
    "delta": ({"delta": torch.ones(2, 20, 1)}, InputError, r"delta has shape .*\(2, 20, 40\)"),
    "z": ({"z": torch.ones(2, 40, 20)}, InputError, r"z has shape \(2, 40, 20\)"),
    "A": ({"A": torch.ones(5, 20)}, InputError, r"A has shape \(5, 20\); .*20 channels"),
    "B": ({"B": torch.ones(2, 4, 40)}, InputError, r"B has shape \(2, 4, 40\); .*\(2, 5, 40\)"),
    "C": ({"C": torch.ones(2, 40)}, InputError, r"C has shape \(2, 40\); .*\(20, 5\)"),
    "one number": ({"C": torch.ones(())}, InputError, r"C has shape \(\)"),
    "groups": ({"B": torch.ones(2, 3, 5, 40)}, InputError, "B has 3 groups; .*20 channels"),
    "no groups": ({"B": torch.ones(2, 0, 5, 40)}, InputError, "B has shape"),
    "D": ({"D": torch.ones(21)}, InputError, r"D has shape \(21,\); expected \(20,\)"),
    "bias": ({"delta_bias": torch.ones(20, 1)}, InputError, "delta_bias has shape"),
    "flag": ({"delta_softplus": 2}, InputTypeError, "delta_softplus is 2; expected True or False"),
    "device": ({"z": torch.ones(2, 20, 40, device="meta")}, DeviceError, "z is on meta; .*mamba"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    change, kind, message = WRONG[name]
    given = dict(zip(NAMES, full(), strict=False)) | change
    with pytest.raises(kind, match=message):
        selective_scan(**given)


def test_operators_check_what_they_are_given() -> None:
    u, delta, A, *others = grouped(*(each.detach() for each in full(length=80)))
    others += [torch.zeros(2, 20, 5), [1], []]
    call: Any = torch.ops.sparsescan.selective_scan.default
    with pytest.raises(InputError, match="delta has shape"):
        call(u, delta[:, :-1].contiguous(), A, *others, True)
    # Nothing was kept.
    out, _, kept = call(u.requires_grad_(), delta, A, *others, False)
    assert kept.numel() == 0
    with pytest.raises(InputError, match=r"kept has shape .*\(2, 2, 5, 20\)"):
        out.sum().backward()


def test_what_is_saved_must_not_change() -> None:
    u, *rest = (each.detach() for each in full())
    delta, *_ = rest
    out = selective_scan(u, delta.requires_grad_(), *rest[1:])
    u.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# -- Numbers ---------------------------------------------------------------------------------------


def test_fast_decay_and_not_a_number() -> None:
    given = full(1, 17, 70, 3)
    with torch.no_grad():
        given[1].abs_()
        given[2].mul_(1e4)
        given[0][0, 3, 50] = math.nan
    out = selective_scan(*given[:5])
    right, _ = loop(*(each.double() for each in given[:5]))
    torch.testing.assert_close(out, right.float(), equal_nan=True, rtol=1e-3, atol=1e-3)
    assert out[0, 3, 50:].isnan().all()
    assert out.isnan().sum() == 20
