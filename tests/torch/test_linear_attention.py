"""Linear attention, and the models that a page makes of it, beside the loops of definitions."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_attention import plain_attention
from sampling import slow
from torch import Tensor
from torch.nn.functional import normalize
from torch_checks import close

import sparsescan
from sparsescan import DeviceError, InputError, InputTypeError
from sparsescan.ops.attention import LINEAR_ATTENTION
from sparsescan.torch import linear_attention

PAGE = Path(sparsescan.__file__).parent.parent / "docs" / "how" / "attention.md"


class Case:
    """Random arguments; some may be missing, and some share axes."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64, small: bool = False) -> None:
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        most = (2, 4, 3, 4, 4) if small else (4, 150, 4, 40, 50)
        batch, length, heads, keys, values = (int(rng.integers(1, n)) for n in most)
        if rng.random() < 0.1 and not small:  # segments have fewer steps
            keys = 150
        whole = batch, length, heads, keys

        def maybe(*shape: int) -> Tensor | None:
            return torch.randn(shape) if rng.random() < 0.5 else None

        q, k, decay = torch.randn(whole), torch.randn(whole) / keys**0.5, None
        if rng.random() < 0.7:
            axes = int(rng.integers(3, 5))
            decay = torch.rand([n if rng.random() < 0.8 else 1 for n in whole[:axes]])
        a = b = None
        if rng.random() < 0.5:
            a = normalize(torch.randn(whole), dim=-1)
            b = -a * torch.rand(*whole[:3], 1)
        state = maybe(batch, heads, keys, values)
        v, bonus = torch.randn(*whole[:3], values), maybe(heads, keys)
        given = q, k, v, decay, a, b, bonus, state
        self.given = [None if x is None else x.to(dtype).requires_grad_() for x in given]

    def leaves(self, given: list[Tensor | None] | None = None) -> list[Tensor]:
        return [x for x in (self.given if given is None else given) if x is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(seed=st.integers(0, 2**32))
def test_outputs_states_and_gradients(dtype: torch.dtype, seed: int) -> None:
    case = Case(seed, dtype)
    exact = [None if x is None else x.detach().double().requires_grad_() for x in case.given]
    given = case.given
    if seed % 3 == 0:  # axes in another order in memory
        given = [
            x if x is None else x.transpose(0, -1).contiguous().transpose(0, -1) for x in given
        ]
    ours, right = linear_attention(*given, return_last_state=True), plain_attention(*exact)
    weights = [torch.randn_like(x).to(dtype) for x in right]
    found, theirs = (
        torch.autograd.grad(
            sum((x * w).sum() for x, w in zip(results, weights, strict=True)), leaves
        )
        for results, leaves in ((ours, case.leaves()), (right, case.leaves(exact)))
    )
    for one, other in zip((*ours, *found), (*right, *theirs), strict=True):
        assert one.dtype == dtype
        assert one.shape == other.shape
        scale = 1 + float(other.detach().abs().max())
        assert float((one - other).detach().abs().max()) <= 300 * torch.finfo(dtype).eps * scale


@pytest.mark.parametrize("cut", [0, 1, 64, 129, 130])
def test_last_states_begin_what_follows(cut: int) -> None:
    """Values and gradients of a call in two parts are those of the whole one."""
    torch.manual_seed(0)
    given = [torch.randn(2, 130, 3, 9, requires_grad=True) for _ in range(3)]
    given.append(torch.rand(2, 130, 3, requires_grad=True))
    results = []
    for ends in ((0, 130), (0, cut, 130)):
        outs, state = [], None
        for begin, end in itertools.pairwise(ends):
            part = [each[:, begin:end] for each in given]
            out, state = linear_attention(*part, initial_state=state, return_last_state=True)
            outs.append(out)
        whole = torch.cat(outs, 1)
        grads = torch.autograd.grad(whole.square().sum() + state.sum(), given)
        results.append([whole, state, *grads])
    close(*results)


@pytest.mark.parametrize(("size", "bound"), [(32, 0.5), (64, 1), (128, 4), (256, 16)])
def test_few_states_are_kept(size: int, bound: float) -> None:
    """All would be as many times the memory of an input as there are values."""
    given = [(2, 2048, 2, size)] * 3
    kept = LINEAR_ATTENTION.shapes((), [*given, *[None] * 5])[2]
    assert math.prod(kept) <= bound * math.prod(given[0])


@pytest.mark.parametrize("seed", slow(4))
def test_opcheck(seed: int) -> None:
    operator: Any = torch.ops.sparsescan.linear_attention.default
    case = Case(seed, small=True)
    given = [x.detach() if x is not None else None for x in case.given]
    if given[3] is not None:
        given[3] = given[3].expand(given[0].shape[: given[3].dim()]).contiguous()
    torch.library.opcheck(
        operator, (*(x if x is None else x.requires_grad_() for x in given), [], [], True)
    )


# -- Errors ----------------------------------------------------------------------------------------

KEY = torch.ones(2, 7, 3, 4)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no tensor": ({"q": np.ones((2, 7, 3, 4))}, InputTypeError, "q is array.* expected a tensor"),
    "nothing": ({"v": None}, InputTypeError, "v is None; expected a tensor"),
    "complex": ({"k": KEY + 0j}, InputTypeError, "k has dtype torch.complex64"),
    "another": (
        {"a": KEY.double(), "b": KEY},
        InputTypeError,
        "a has dtype torch.float64, q torch",
    ),
    "axes": ({"q": KEY[0]}, InputError, r"q has shape \(7, 3, 4\); expected \(batch, length"),
    "k": ({"k": KEY[..., :3]}, InputError, r"k has shape \(2, 7, 3, 3\); expected \(2, 7, 3, 4\)"),
    "v": ({"v": KEY[:, :6]}, InputError, r"v has shape \(2, 6, 3, 4\); expected \(2, 7, 3, values"),
    "decay": ({"decay": KEY[0]}, InputError, r"decay has shape \(7, 3, 4\); expected \(2, 7, 3\)"),
    "no b": ({"a": KEY}, InputError, "b is None, and a is given; expected both"),
    "bonus": ({"bonus": KEY[0, 0, 0]}, InputError, r"bonus has shape \(4,\); expected \(3, 4\)"),
    "state": ({"initial_state": KEY}, InputError, r"initial_state has shape .*\(2, 3, 4, 4\)"),
    "flag": ({"return_last_state": 2}, InputTypeError, "return_last_state is 2; expected True"),
    "device": ({"v": KEY.to("meta")}, DeviceError, "v is on meta; .*flash-linear-attention"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    change, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        linear_attention(**{"q": KEY, "k": KEY, "v": KEY, **change})


# -- Models of papers, with states of the papers' shapes -------------------------------------------


def each_step(step: Callable[..., tuple[Any, Tensor]], state: Any, *rows: Tensor) -> Tensor:
    """Return the outputs of a loop over the second axis of rows."""
    outputs = []
    for row in zip(*(each.unbind(1) for each in rows), strict=True):
        state, out = step(state, *row)
        outputs.append(out)
    return torch.stack(outputs, 1)


def outer(x: Tensor, y: Tensor) -> Tensor:
    return x[..., :, None] * y[..., None, :]


def times(matrix: Tensor, x: Tensor) -> Tensor:
    return (matrix @ x[..., None])[..., 0]


B, T, H, K, V = 2, 70, 2, 5, 3
BY_VALUES = torch.zeros(B, H, V, K).double()
EYE = torch.eye(K).double()


def linear_transformer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def step(state: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
        q, k = (torch.where(x > 0, x + 1, torch.exp(x)) for x in (q, k))
        s, z = state[0] + outer(k, v), state[1] + k
        return (s, z), times(s.mT, q) / (q * z).sum(-1, keepdim=True)

    return each_step(step, (BY_VALUES.mT, torch.zeros(B, H, K).double()), q, k, v)


def fast_weights(q: Tensor, k: Tensor, v: Tensor, rate: Tensor) -> Tensor:
    def step(w: Tensor, q: Tensor, k: Tensor, v: Tensor, rate: Tensor) -> Any:
        q, k = q / q.sum(-1, keepdim=True), k / k.sum(-1, keepdim=True)
        w = w + outer(rate[..., None] * (v - times(w, k)), k)
        return w, times(w, q)

    return each_step(step, BY_VALUES, q, k, v, rate)


def retention(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
        s = gamma[:, None, None] * s + outer(k, v)
        return s, times(s.mT, q)

    return each_step(step, BY_VALUES.mT, q, k, v)


def gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Any:
        s = torch.diag_embed(alpha) @ s + outer(k, v)
        return s, times(s.mT, q)

    return each_step(step, BY_VALUES.mT, q, k, v, alpha)


def delta_net(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    return gated_delta_net(q, k, v, torch.ones_like(beta), beta)


def gated_delta_net(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Any:
        k, alpha, beta = k / k.norm(dim=-1, keepdim=True), alpha[..., None], beta[..., None]
        s = s @ (alpha[..., None] * (EYE - outer(beta * k, k))) + outer(beta * v, k)
        return s, times(s, q)

    return each_step(step, BY_VALUES, q, k, v, alpha, beta)


def rwkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    def step(s: Tensor, r: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
        out = times((s + torch.diag_embed(u) @ outer(k, v)).mT, r)
        return torch.diag_embed(w) @ s + outer(k, v), out

    return each_step(step, BY_VALUES.mT, r, k, v, w)


def rwkv7(r: Tensor, k: Tensor, v: Tensor, w: Tensor, kappa: Tensor, a: Tensor) -> Tensor:
    def step(s: Tensor, r: Tensor, k: Tensor, v: Tensor, w: Tensor, x: Tensor, a: Tensor) -> Any:
        x = x / x.norm(dim=-1, keepdim=True)
        s = s @ (torch.diag_embed(w) - outer(x, a * x)) + outer(v, k)
        return s, times(s, r)

    return each_step(step, BY_VALUES, r, k, v, w, kappa, a)


def mamba2(*given: Tensor) -> Tensor:
    x, dt, a, b, c, d = given

    def step(h: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Any:
        b, c = (each.expand(B, H, K) for each in (b, c))  # one group
        h = torch.exp(dt * a)[..., None, None] * h + outer(x, dt[..., None] * b)
        return h, times(h, c) + d[:, None] * x

    return each_step(step, BY_VALUES, x, dt, b, c)


def mlstm(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    """Return outputs by the equations without a stabiliser, which float64 does not need."""

    def step(state: Any, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Any:
        i, f, k = torch.exp(i)[..., None], torch.sigmoid(f)[..., None], k / K**0.5
        c = f[..., None] * state[0] + outer(i * v, k)
        n = f * state[1] + i * k
        below = (n * q).sum(-1, keepdim=True).abs()
        return (c, n), times(c, q) / torch.maximum(below, torch.ones_like(below))

    return each_step(step, (BY_VALUES, torch.zeros(B, H, K).double()), q, k, v, i, f)


HEAD, ROWS, COLUMNS = (B, T, H), (B, T, H, K), (B, T, H, V)
MODELS: dict[Callable[..., Tensor], list[tuple[int, ...]]] = {
    linear_transformer: [ROWS, ROWS, COLUMNS],
    fast_weights: [ROWS, ROWS, COLUMNS, HEAD],
    retention: [ROWS, ROWS, COLUMNS, (H,)],
    gated_linear_attention: [ROWS, ROWS, COLUMNS, ROWS],
    delta_net: [ROWS, ROWS, COLUMNS, HEAD],
    gated_delta_net: [ROWS, ROWS, COLUMNS, HEAD, HEAD],
    rwkv6: [ROWS, ROWS, COLUMNS, ROWS, (H, K)],
    rwkv7: [ROWS, ROWS, COLUMNS, ROWS, ROWS, ROWS],
    mamba2: [COLUMNS, HEAD, (H,), (B, T, 1, K), (B, T, 1, K), (H,)],
    mlstm: [ROWS, ROWS, COLUMNS, HEAD, HEAD],
}
# Of others what follows the values is between 0 and 1.
OF_ANY_SIZE = linear_transformer, mamba2, mlstm


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Return the functions of the page."""
    found: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.M)[0], found)
    return found


def test_the_page_has_these_models() -> None:
    assert re.findall(r"^def (\w+)", PAGE.read_text(), re.M) == [f.__name__ for f in MODELS]


@pytest.mark.parametrize("plain", MODELS, ids=lambda plain: plain.__name__)
def test_models_of_papers(plain: Callable[..., Tensor], models: dict[str, Any]) -> None:
    given = []
    for n, shape in enumerate(MODELS[plain]):
        is_share = n > 2 and plain not in OF_ANY_SIZE
        is_share |= plain is fast_weights and n < 2
        drawn = (torch.rand if is_share else torch.randn)(shape, dtype=torch.float64)
        if plain is mamba2 and n in (1, 2):
            drawn = drawn.abs() * (1 if n == 1 else -1)
        given.append((3 * drawn if plain is mlstm and n > 2 else drawn).requires_grad_())
    found, right = models[plain.__name__](*given), plain(*given)
    weights = torch.randn_like(right)
    close(
        [found, *torch.autograd.grad((found * weights).sum(), given)],
        [right, *torch.autograd.grad((right * weights).sum(), given)],
    )


# -- NumPy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"v": None}, InputTypeError, "v has dtype object"),
        ({"k": np.ones((2, 7, 3, 4), complex)}, InputTypeError, "k has dtype complex128"),
        ({"decay": np.ones((2, 3))}, InputError, r"decay has shape \(2, 3\); .*\(2, 7, 3\)"),
        ({"grads": np.ones((2, 7, 3))}, InputError, r"grads has shape .*\(2, 7, 3, 4\)"),
        ({"grads_last": np.ones(2)}, InputError, r"grads_last has shape .*\(2, 3, 4, 4\)"),
    ],
)
def test_errors_of_numpy(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    ones = KEY.numpy()
    with pytest.raises(kind, match=message):
        sparsescan.linear_attention_vjp(
            **{**dict.fromkeys(("q", "k", "v", "grads"), ones), **change}
        )


def test_numpy_takes_what_cannot_be_written_and_the_widest_dtype() -> None:
    one = np.broadcast_to(np.float32(1), (2, 7, 3, 4))
    out, last = sparsescan.linear_attention(one, one, one.astype(float), return_last_state=True)
    assert out.dtype == last.dtype == np.float64
    np.testing.assert_array_equal(out, 4.0 * np.arange(1, 8)[:, None, None] * np.ones_like(one))
