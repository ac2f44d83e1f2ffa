"""Solutions of block-tridiagonal and band systems, and their gradients, beside dense ones."""

from __future__ import annotations

import tracemalloc
from typing import Any

import jax
import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax_doubles import double as double
from numpy.typing import NDArray
from sampling import long_run

from sparsescan import InputError, InputTypeError, SingularMatrixError
from sparsescan.jax import statespace as of_jax
from sparsescan.statespace import (
    slogdet_block_tridiagonal,
    slogdet_block_tridiagonal_vjp,
    solve_banded,
    solve_banded_vjp,
    solve_block_tridiagonal,
    solve_block_tridiagonal_vjp,
)
from sparsescan.torch import statespace as of_torch

Array = NDArray[Any]


def dense(lower: Any, diagonal: Any, upper: Any) -> Any:
    """Return the matrix of blocks (steps, n, n), of PyTorch."""
    steps, n = len(diagonal), diagonal.shape[-1]
    rows = []
    for t in range(steps):
        row = [torch.zeros(n, n, dtype=diagonal.dtype)] * steps
        row[t] = diagonal[t]
        if t > 0:
            row[t - 1] = upper[t - 1].mT if lower is None else lower[t]
        if t + 1 < steps:
            row[t + 1] = upper[t]
        rows.append(torch.cat(row, 1))
    return torch.cat(rows)


def by_dense(lower: Any, diagonal: Any, upper: Any, b: Any) -> Any:
    """Return solutions by one dense matrix for each series."""
    if diagonal.ndim == 4:
        blocks = [[None] * diagonal.shape[1] if x is None else x.unbind(1) for x in (lower, upper)]
        every = zip(blocks[0], diagonal.unbind(1), blocks[1], b.unbind(1), strict=True)
        return torch.stack([by_dense(*each) for each in every], 1)
    flat = b.reshape(diagonal.shape[0] * diagonal.shape[-1], -1)
    return torch.linalg.solve(dense(lower, diagonal, upper), flat).reshape(b.shape)


@st.composite
def systems(draw: st.DrawFn) -> tuple[Any, ...]:
    """Draw blocks, right sides and gradients; blocks on the diagonal may be singular."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    steps, n, k = draw(st.integers(1, 9)), draw(st.integers(1, 5)), draw(st.integers(0, 3))
    series = draw(st.sampled_from([(), (1,), (3,)]))
    lower, diagonal, upper = rng.normal(size=(3, steps, *series, n, n))
    if draw(st.booleans()):
        diagonal[..., 0] = 0
    scale = draw(st.sampled_from([1e-15, 1.0, 1e15]))
    b, above = rng.normal(size=(2, steps, *series, n, *([k] if k else [])))
    if draw(st.booleans()):  # strided
        diagonal, b = (np.repeat(each, 2, -1)[..., ::2] for each in (diagonal, b))
    is_symmetric = draw(st.booleans())
    return None if is_symmetric else lower * scale, diagonal * scale, upper * scale, b, above


@settings(max_examples=long_run(1000, 60))
@given(systems())
def test_solutions_and_gradients_are_those_of_a_dense_matrix(system: Any) -> None:
    lower, diagonal, upper, b, above = system
    leaves = [None if x is None else torch.tensor(x).requires_grad_() for x in system[:4]]
    try:
        right = by_dense(*leaves)
    except RuntimeError:
        return
    there = [x for x in leaves if x is not None]
    grads = torch.autograd.grad(right, there, torch.tensor(above), allow_unused=True)
    x = solve_block_tridiagonal(lower, diagonal, upper, b)
    spread = np.abs(right.detach().numpy()).max(initial=0)
    pulled = np.abs(grads[-1].numpy()).max(initial=0)
    # How much larger than right sides solutions are is how much rounding is enlarged, at most.
    size = max(np.abs(diagonal).max(), np.abs(upper).max())
    loss = 1e3 * np.finfo(float).eps * max(1, size * spread, size * pulled)
    np.testing.assert_allclose(x, right.detach(), rtol=0, atol=loss * spread)
    found = solve_block_tridiagonal_vjp(lower, diagonal, upper, x=x, grads=above)
    assert (found.lower is None) == (lower is None)
    ours = [each for each in found if each is not None]
    for one, other, like in zip(ours, grads, there, strict=True):
        wanted = np.zeros(like.shape) if other is None else other.numpy()
        bound = loss * (pulled if like is there[-1] else pulled * spread * 4)
        np.testing.assert_allclose(one, wanted, rtol=0, atol=bound)


@settings(max_examples=long_run(1000, 60))
@given(systems())
def test_determinants_and_gradients_are_those_of_a_dense_matrix(system: Any) -> None:
    """Of matrices whose condition leaves half of the digits, with a weight for each series."""
    arrays = system[:3]
    leaves = [None if x is None else torch.tensor(x).requires_grad_() for x in arrays]
    blocks = [None if x is None else x if x.ndim == 4 else x[:, None] for x in leaves]
    series = range(blocks[1].shape[1])  # type: ignore[union-attr]
    whole = torch.stack([dense(*[None if x is None else x[:, n] for x in blocks]) for n in series])
    condition = torch.linalg.cond(whole.detach()).max().item()
    if not condition < 1e8:
        return
    signs, logs = torch.linalg.slogdet(whole)
    weights = np.linspace(-1, 2, len(series))
    there = [x for x in leaves if x is not None]
    loss = logs @ torch.tensor(weights)
    grads = torch.autograd.grad(loss, there, materialize_grads=True)
    has_series = arrays[1].ndim == 4
    sign, log_det = slogdet_block_tridiagonal(*arrays)
    assert np.shape(log_det) == (np.shape(weights) if has_series else ())
    np.testing.assert_array_equal(np.ravel(sign), signs.detach())
    bound = 1e4 * np.finfo(float).eps * condition
    np.testing.assert_allclose(np.ravel(log_det), logs.detach(), rtol=1e-13, atol=bound)
    found = slogdet_block_tridiagonal_vjp(*arrays, grads=weights if has_series else weights[0])
    assert found.b is None
    assert (found.lower is None) == (arrays[0] is None)
    ours = [each for each in found if each is not None]
    most = max(each.abs().max().item() for each in grads)
    for one, other in zip(ours, grads, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=bound * most)


def test_blocks_outside_are_not_read() -> None:
    rng = np.random.default_rng(0)
    lower, diagonal, upper = rng.normal(size=(3, 4, 2, 2))
    b = rng.normal(size=(4, 2))
    right = solve_block_tridiagonal(lower, diagonal, upper, b)
    lower[0], upper[-1] = np.nan, np.inf
    x = solve_block_tridiagonal(lower, diagonal, upper, b)
    assert np.array_equal(x, right)
    found = solve_block_tridiagonal_vjp(lower, diagonal, upper, x=x, grads=b)
    assert found.lower is not None
    assert not found.lower[0].any()
    assert not found.upper[-1].any()
    assert np.isfinite(found.lower).all()
    of_log = slogdet_block_tridiagonal_vjp(lower, diagonal, upper)
    assert np.isfinite(np.stack([of_log.lower, of_log.diagonal, of_log.upper])).all()


@settings(max_examples=long_run(1000, 60))
@given(
    seed=st.integers(0, 2**32),
    below=st.integers(0, 4),
    above=st.integers(0, 4),
    size=st.integers(1, 12),
    columns=st.sampled_from([(), (1,), (3,)]),
)
def test_bands_are_those_of_scipy(
    seed: int, below: int, above: int, size: int, columns: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(seed)
    ab, (b, grads) = (
        rng.normal(size=(below + above + 1, size)),
        rng.normal(size=(2, size, *columns)),
    )
    i, j = np.ogrid[:size, :size]
    band = above + i - j
    is_there = (band >= 0) & (band < len(ab))
    matrix = np.where(is_there, ab[np.clip(band, 0, len(ab) - 1), j], 0)
    condition = np.linalg.cond(matrix)
    if condition > 1e8:
        return
    x = solve_banded((below, above), ab, b)
    bound = 1e-13 * condition
    right = np.linalg.solve(matrix, b)
    if max(below, above) < size:  # else SciPy refuses
        np.testing.assert_allclose(scipy.linalg.solve_banded((below, above), ab, b), right)
    np.testing.assert_allclose(x, right, rtol=0, atol=bound * np.abs(right).max())
    found = solve_banded_vjp((below, above), ab, x=x, grads=grads)
    z = np.linalg.solve(matrix.T, grads)
    np.testing.assert_allclose(found.b, z, rtol=0, atol=bound * np.abs(z).max())
    of_matrix = -np.outer(z, x) if x.ndim == 1 else -z @ x.T
    wanted = np.zeros_like(ab)
    rows, cols = np.nonzero(is_there)
    wanted[band[rows, cols], cols] = of_matrix[rows, cols]
    np.testing.assert_allclose(
        found.ab, wanted, rtol=0, atol=4 * bound * max(np.abs(of_matrix).max(), 1e-300)
    )


def drawn(series: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(1)
    lead = (4, 2) if series else (4,)
    blocks = [torch.randn(*lead, 3, 3).double() for _ in range(3)]
    return [each.requires_grad_() for each in (*blocks, torch.randn(*lead, 3, 2).double())]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("series", [False, True])
def test_pytorch_has_all_derivatives(series: bool) -> None:
    leaves = drawn(series)
    torch.testing.assert_close(of_torch.solve_block_tridiagonal(*leaves), by_dense(*leaves))
    for function in (
        of_torch.solve_block_tridiagonal,
        lambda _, *rest: of_torch.solve_block_tridiagonal(None, *rest),
    ):
        assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, leaves)
    for function in (
        lambda *own: of_torch.slogdet_block_tridiagonal(*own)[1],
        lambda _, *rest: of_torch.slogdet_block_tridiagonal(None, *rest)[1],
    ):
        assert torch.autograd.gradcheck(function, leaves[:3], check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, leaves[:3])
    ab = torch.randn(4, 7).double().requires_grad_()
    b = torch.randn(7).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda *own: of_torch.solve_banded((2, 1), *own), (ab, b))


def test_transforms_of_pytorch() -> None:
    leaves = [each.detach() for each in drawn()]

    def solve(*own: Any) -> Any:
        return of_torch.solve_block_tridiagonal(*own)

    two = torch.stack([leaves[3], leaves[3] * 2 + 1])
    mapped = torch.func.vmap(lambda b: solve(*leaves[:3], b))(two)
    torch.testing.assert_close(mapped, torch.stack([solve(*leaves[:3], b) for b in two]))
    torch._dynamo.reset()
    compiled = torch.compile(solve, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*leaves), solve(*leaves))
    signs, logs = of_torch.slogdet_block_tridiagonal(*leaves[:3])
    two = torch.stack([leaves[1], 2 * leaves[1]])
    maps = torch.func.vmap(
        lambda d: of_torch.slogdet_block_tridiagonal(leaves[0], d, leaves[2]), 0
    )(two)
    assert torch.equal(torch.stack(maps)[:, 0], torch.stack([signs, logs]))
    bands = torch.randn(4, 6).double(), torch.randn(6).double()

    def banded(*own: Any) -> Any:
        return of_torch.solve_banded((1, 2), *own)

    compiled = torch.compile(banded, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*bands), banded(*bands))


def test_jax_has_all_derivatives_and_maps() -> None:
    tensors = drawn()
    own = [each.detach().numpy() for each in tensors]

    def loss(*own: Any) -> Any:
        return (of_jax.solve_block_tridiagonal(*own) ** 2).sum()

    right = (by_dense(*tensors) ** 2).sum()
    np.testing.assert_allclose(jax.jit(loss)(*own), right.item(), rtol=1e-10)
    grads = jax.jit(jax.grad(loss, argnums=range(4)))(*own)
    theirs = torch.autograd.grad(right, tensors)
    for one, other in zip(grads, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9 * other.abs().max().item())
    ways = [each + 1 for each in own]
    _, slope = jax.jvp(loss, own, ways)
    along = sum((g * way).sum() for g, way in zip(grads, ways, strict=True))
    np.testing.assert_allclose(slope, along, rtol=1e-9)
    two = np.stack([own[1], own[1] * 2])
    mapped = jax.vmap(lambda d: of_jax.solve_block_tridiagonal(own[0], d, own[2], own[3]))(two)
    each = [solve_block_tridiagonal(own[0], d, own[2], own[3]) for d in two]
    np.testing.assert_allclose(mapped, np.stack(each), rtol=1e-12)
    grads = jax.grad(lambda *own: of_jax.slogdet_block_tridiagonal(*own)[1], range(3))(*own[:3])
    for one, other in zip(grads, slogdet_block_tridiagonal_vjp(*own[:3]), strict=False):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    ab = np.array([[2.0, 2.0], [-1.0, 0.0]])
    np.testing.assert_allclose(
        jax.grad(lambda ab: of_jax.solve_banded((1, 0), ab, np.ones(2)).sum())(ab),
        solve_banded_vjp((1, 0), ab, x=np.array([0.5, 0.75]), grads=np.ones(2)).ab,
    )


def test_long_systems_take_memory_for_their_blocks_alone() -> None:
    """A dense matrix of so many unknowns would have 36 GB."""
    rng = np.random.default_rng(0)
    lower, diagonal, upper = rng.normal(size=(3, 22_000, 3, 3))
    diagonal += 6 * np.eye(3)
    b = rng.normal(size=(22_000, 3))
    tracemalloc.start()
    try:
        x = solve_block_tridiagonal(lower, diagonal, upper, b)
        found = solve_block_tridiagonal_vjp(lower, diagonal, upper, x=x, grads=b)
        logs = slogdet_block_tridiagonal_vjp(lower, diagonal, upper)
        assert tracemalloc.get_traced_memory()[1] < 40 * lower.nbytes
    finally:
        tracemalloc.stop()
    left = (diagonal @ x[..., None])[..., 0] - b
    left[1:] += (lower[1:] @ x[:-1, :, None])[..., 0]
    left[:-1] += (upper[:-1] @ x[1:, :, None])[..., 0]
    assert np.abs(left).max() < 1e-12
    np.testing.assert_allclose(found.diagonal, -found.b[..., None] * x[:, None], rtol=1e-12)
    assert np.isfinite(logs.diagonal).all()


def test_nothing_to_solve() -> None:
    none = np.empty((0, 2, 2))
    assert solve_block_tridiagonal(none, none, none, np.empty((0, 2))).shape == (0, 2)
    assert solve_block_tridiagonal(None, *np.ones((2, 3, 1, 1)), np.empty((3, 1, 0))).size == 0
    assert solve_banded((1, 1), np.empty((3, 0)), np.empty((0, 2))).shape == (0, 2)
    found = solve_block_tridiagonal_vjp(None, none, none, x=none[..., 0], grads=none[..., 0])
    assert found.diagonal.shape == none.shape
    tensors = torch.empty(0, 2, 2), torch.empty(0, 2)
    assert of_torch.solve_block_tridiagonal(None, tensors[0], *tensors).shape == (0, 2)
    assert slogdet_block_tridiagonal(none, none, none) == (1, 0)
    assert of_torch.slogdet_block_tridiagonal(None, tensors[0], tensors[0]) == (1, 0)
    assert slogdet_block_tridiagonal_vjp(None, none, none).upper.shape == none.shape


def test_a_singular_matrix() -> None:
    zeros, ones = np.zeros((3, 1, 1)), np.ones((3, 1))
    with pytest.raises(SingularMatrixError, match="the matrix of series 0 is singular"):
        solve_block_tridiagonal(None, zeros, zeros, ones)
    with pytest.raises(np.linalg.LinAlgError):
        solve_banded((0, 0), np.array([[1.0, np.nan]]), np.ones(2))
    tensors = torch.zeros(3, 1, 1), torch.zeros(3, 1, 1), torch.ones(3, 1)
    assert of_torch.solve_block_tridiagonal(None, *tensors).isnan().all()
    assert np.isnan(of_jax.solve_block_tridiagonal(None, zeros, zeros, ones)).all()
    mixed = torch.zeros(3, 1, 1).double(), torch.zeros(3, 1, 1), torch.ones(3, 1)
    with pytest.raises(
        InputTypeError, match=r"upper has dtype torch.float32, diagonal torch.float64"
    ):
        of_torch.solve_block_tridiagonal(None, *mixed)
    assert slogdet_block_tridiagonal(None, zeros, zeros) == (0, -np.inf)
    assert np.isnan(slogdet_block_tridiagonal(None, zeros + np.inf, zeros)).all()
    with pytest.raises(SingularMatrixError, match="the matrix of series 0 is singular"):
        slogdet_block_tridiagonal_vjp(None, zeros, zeros)


def test_arguments_stay_as_they_are_and_dtypes_are_kept() -> None:
    rng = np.random.default_rng(0)
    blocks, b = rng.normal(size=(3, 4, 2, 2)).astype(np.float32), np.ones((4, 2), np.float32)
    before = blocks.copy(), b.copy()
    lower, diagonal, upper = blocks
    x = solve_block_tridiagonal(lower, diagonal, upper, b)
    assert x.dtype == np.float32
    solve_block_tridiagonal_vjp(lower, diagonal, upper, x=x, grads=b)
    assert np.array_equal(blocks, before[0])
    assert np.array_equal(b, before[1])


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"diagonal": np.ones((3, 1, 2))}, InputError, r"diagonal has shape \(3, 1, 2\); expected"),
        ({"upper": np.ones((2, 2, 2))}, InputError, r"upper has shape \(2, 2, 2\); expected \(3,"),
        ({"lower": np.ones((2, 2, 2))}, InputError, r"lower has shape \(2, 2, 2\); expected \(3,"),
        ({"b": np.ones((3, 3))}, InputError, r"b has shape \(3, 3\); expected \(3, 2\)"),
        ({"b": np.ones((3, 2), complex)}, InputTypeError, "b has dtype complex128"),
        ({"upper": None}, InputTypeError, "upper"),
    ],
)
def test_errors(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    right = {"lower": None, "diagonal": np.ones((3, 2, 2)), "upper": np.ones((3, 2, 2))}
    with pytest.raises(kind, match=message):
        solve_block_tridiagonal(**{**right, "b": np.ones((3, 2)), **change})


@pytest.mark.parametrize(
    ("l_and_u", "ab", "b", "message"),
    [
        (1, (3, 4), (4,), "l_and_u is 1; expected two integers"),
        ((1, -1), (3, 4), (4,), "not negative"),
        ((1, 1), (2, 4), (4,), r"ab has shape \(2, 4\); expected \(3, n\)"),
        ((1, 1), (3, 4), (5,), r"b has shape \(5,\); expected \(4,\) or \(4, k\)"),
    ],
)
def test_errors_of_bands(l_and_u: Any, ab: Any, b: Any, message: str) -> None:
    with pytest.raises((InputError, InputTypeError), match=message):
        solve_banded(l_and_u, np.ones(ab), np.ones(b))
    with pytest.raises((InputError, InputTypeError), match=message):
        of_torch.solve_banded(l_and_u, torch.ones(ab), torch.ones(b))


def test_gradients_have_the_shape_of_solutions() -> None:
    ones = np.ones((3, 1, 1))
    with pytest.raises(InputError, match=r"grads has shape \(2, 1\); expected \(3, 1\), as x"):
        solve_block_tridiagonal_vjp(ones, ones, ones, x=np.ones((3, 1)), grads=np.ones((2, 1)))
    with pytest.raises(InputError, match=r"x has shape \(2, 1\)"):
        solve_block_tridiagonal_vjp(ones, ones, ones, x=np.ones((2, 1)), grads=np.ones((2, 1)))
