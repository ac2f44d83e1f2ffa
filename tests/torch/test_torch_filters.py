"""Recursive filters of PyTorch's front door, beside SciPy's and a loop under autograd."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.signal
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_filters import changing
from sampling import slow
from torch import Tensor
from torch_checks import close

from sparsescan import DeviceError, InputError, InputTypeError
from sparsescan.ops import filters
from sparsescan.torch import lfilter, sosfilt

# PyTorch (2.13) compiles what it needs for forward mode by what it tells others not to use.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def by_loop(b: Tensor, a: Tensor, x: Tensor, axis: int = -1) -> Tensor:
    """Filter step by step, by PyTorch's own operations."""
    x = x.movedim(axis, -1)
    b, a = (each[None] if each.dim() == 1 else each for each in (b, a))
    return changing(b, a, x).movedim(-1, axis if axis < 0 else axis - x.dim())


class Case:
    """A random filter, stable on the whole, and samples for it."""

    def __init__(self, seed: int, most: int = 40, dtype: torch.dtype = torch.float64) -> None:
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.axes = [int(n) for n in rng.integers(1, rng.choice([3, 5]), rng.integers(0, 3))]
        if rng.random() < 0.3:
            self.axes = [int(rng.choice([1, 7, 8, 16, 19, 33]))]
        self.steps = int(rng.choice([1, 2, 7, int(rng.integers(1, most)), most]))
        self.axis = int(rng.integers(-len(self.axes) - 1, len(self.axes) + 1))
        shape = [*self.axes]
        shape.insert(self.axis % (len(shape) + 1), self.steps)
        x = torch.randn(shape, dtype=dtype)
        if rng.random() < 0.3:
            x = torch.randn(*shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1])
        self.x = x.requires_grad_()
        self.b = self.coefficients(rng, dtype, is_denominator=False)
        self.a = self.coefficients(rng, dtype, is_denominator=True)

    def coefficients(self, rng: Any, dtype: torch.dtype, is_denominator: bool) -> Tensor:
        taps = int(rng.choice([1, 2, 3, 4, 9]))
        kind = rng.integers(4)
        lead = [n if rng.random() < 0.7 else 1 for n in self.axes]
        if kind == 3 and lead and rng.random() < 0.3:
            lead = lead[1:]
        times = self.steps if rng.random() < 0.7 else 1
        shape = ((taps,), (self.steps, taps), (1, taps), (*lead, times, taps))[kind]
        c = torch.randn(shape, dtype=dtype)
        if is_denominator:
            c = c / (3 * taps)
            c[..., 0] = torch.sgn(c[..., 0]) * (1 + c[..., 0].abs())
        return c.requires_grad_()

    @property
    def inputs(self) -> list[Tensor]:
        return [self.b, self.a, self.x]

    def run(self, *inputs: Tensor) -> Tensor:
        y = lfilter(*(inputs or self.inputs), axis=self.axis)
        assert isinstance(y, Tensor)
        return y

    def loop(self, *inputs: Tensor) -> Tensor:
        return by_loop(*(inputs or self.inputs), axis=self.axis)


# -- Values ----------------------------------------------------------------------------------------


KINDS = st.sampled_from(["real", "complex", "complex samples", "complex coefficients"])


def numbers(rng: np.random.Generator, kind: str, what: str, *shape: int) -> Any:
    """Return random numbers, which are complex if `kind` says so."""
    real = rng.standard_normal(shape)
    is_complex = kind in ("complex", f"complex {what}")
    return real + 1j * rng.standard_normal(shape) if is_complex else real


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.integers(-3, 2),
    st.booleans(),
    KINDS,
    st.integers(0, 2**32),
)
def test_as_scipy(
    b_taps: int, a_taps: int, shape: list[int], axis: int, has_zi: bool, kind: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    axis = axis % (2 * len(shape)) - len(shape)
    shape[axis] = int(rng.choice([0, 1, 3, 40, 300]))
    b, a = (numbers(rng, kind, "coefficients", n) / n for n in (b_taps, a_taps))
    a[1:], a[0] = a[1:] / 2, rng.choice([1.0, -2.0, 0.5])
    x = numbers(rng, kind, "samples", *shape)
    given = tuple(map(torch.from_numpy, (b, a, x)))
    if rng.random() < 0.3 and shape[axis]:  # coefficients of each step
        given = *(each.expand(shape[axis], -1) for each in given[:2]), given[2]
    if not has_zi:
        right = scipy.signal.lfilter(b, a, x, axis) if x.size else x.astype(np.result_type(b, x))
        close([lfilter(*given, axis)], [torch.from_numpy(right)])
        return
    wanted = list(shape)
    wanted[axis] = max(b_taps, a_taps) - 1
    zi = numbers(rng, kind, "samples", *wanted)
    y, zf = lfilter(*given, axis, torch.from_numpy(zi))
    assert (y.shape, zf.shape) == (x.shape, zi.shape)
    if x.size:
        both = scipy.signal.lfilter(b, a, x, axis, zi)
        close([y, zf], [torch.from_numpy(each) for each in both])
    elif not shape[axis]:
        close([zf], [torch.from_numpy(zi.astype(np.result_type(b, zi)))])


@given(st.integers(1, 4), st.integers(0, 2**32))
def test_sections_as_scipy(sections: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sos = scipy.signal.butter(2 * sections, rng.uniform(0.1, 0.8), output="sos")
    axis = int(rng.integers(-3, 3))
    shape = [3, 4, 5]
    shape[axis] = int(rng.choice([1, 2, 50]))
    x = rng.standard_normal(shape)
    scaled = sos * np.where(rng.random((sections, 1)) < 0.5, 1, 2.5)
    given = torch.from_numpy(scaled), torch.from_numpy(x), axis
    close([sosfilt(*given)], [torch.from_numpy(scipy.signal.sosfilt(sos, x, axis))])
    shape[axis] = 2
    zi = rng.standard_normal((sections, *shape))
    both = scipy.signal.sosfilt(sos, x, axis, zi)
    close(sosfilt(*given, torch.from_numpy(zi)), [torch.from_numpy(each) for each in both])


@given(st.integers(0, 2**32), st.sampled_from([8, 16, 64]), KINDS)
def test_values_and_gradients(seed: int, tile: int, kind: str) -> None:
    """Over one tile of steps, or several."""
    case, results = Case(seed, dtype=torch.float64 if kind == "real" else torch.complex128), []
    if kind == "complex samples":
        case.b, case.a = (each.detach().real.requires_grad_() for each in (case.b, case.a))
    elif kind == "complex coefficients":
        case.x = case.x.detach().real.requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "_TILE", tile)
        patch.setattr(filters, "_TILE_OF_CHANGES", tile)
        for call in (case.run, case.loop):
            y = call()
            torch.manual_seed(seed)
            loss = (torch.randn(y.shape, dtype=y.dtype) * y).sum()
            loss = loss.real if loss.is_complex() else loss
            results.append([y, *torch.autograd.grad(loss, case.inputs)])
    close(*results)


def test_a_filter_of_one_coefficient_has_no_delays() -> None:
    x = torch.randn(2, 5, dtype=torch.float64)
    y, final = lfilter(x.new_tensor([3.0]), x.new_tensor([2.0]), x, zi=x.new_zeros(2, 0))
    torch.testing.assert_close(y, 1.5 * x)
    assert final.shape == (2, 0)


@given(st.integers(0, 2**32))
def test_delays_are_added_to_the_first_results(seed: int) -> None:
    """Where coefficients change, too; and those that come back continue the last ones."""
    case = Case(seed)
    order, steps = max(case.b.shape[-1], case.a.shape[-1]) - 1, case.steps
    shape = [*case.axes]
    shape.insert(case.axis % case.x.dim(), order)
    zi = torch.randn(shape, dtype=torch.float64)
    y, zf = lfilter(*case.inputs, axis=case.axis, zi=zi)
    axis = case.axis if case.axis < 0 else case.axis - case.x.dim()
    first = case.a[..., 0] if case.a.dim() > 1 else case.a[:1]
    terms = torch.nn.functional.pad(zi.movedim(axis, -1), (0, steps))[..., :steps] * first
    more = by_loop(torch.ones(1).double(), case.a, terms)
    close([y], [case.loop() + more.movedim(-1, axis)])
    zeros = torch.zeros_like(case.x).movedim(axis, -1)[..., :1].expand(*case.axes, 2 * order + 1)
    last = [each if each.dim() == 1 else each[..., -1:, :] for each in (case.b, case.a)]
    both = [
        each
        if each.dim() == 1
        else torch.cat([each.expand(*each.shape[:-2], steps, -1), *[one] * zeros.shape[-1]], -2)
        for each, one in zip((case.b, case.a), last, strict=True)
    ]
    whole, _ = lfilter(
        *both, torch.cat([case.x.movedim(axis, -1), zeros], -1), zi=zi.movedim(axis, -1)
    )
    after, _ = lfilter(*last, zeros, zi=zf.movedim(axis, -1))
    close([after], [whole[..., steps:]])


# -- Derivatives -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, *slow(2)])
def test_opcheck(seed: int) -> None:
    torch.manual_seed(seed)
    b, a = torch.randn(1, 1, 2), torch.rand(5, 4, 3) / 4
    a[..., 0] = 1
    x, start = torch.randn(5, 4), torch.randn(5, 2)
    inputs = [each.double().requires_grad_() for each in (b, a, x, start)]
    torch.library.opcheck(torch.ops.sparsescan.filter.default, (*inputs, [], [], True))


# -- Dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("b", "a", "x", "dtype"),
    [
        ("float64", "float64", "float32", "float64"),
        ("float32", 1.0, "float32", "float32"),
        ("float32", np.float64(1.5), "float32", "float32"),
        (2, "float64", "float32", "float64"),
        (1j, 1, "float32", "complex64"),
        ("float32", "float64", "complex64", "complex128"),
        ("complex64", "float32", "float64", "complex128"),
    ],
)
def test_dtypes_are_promoted(b: Any, a: Any, x: str, dtype: str) -> None:
    """As PyTorch does, and SciPy; numbers count as PyTorch counts them."""
    rng = np.random.default_rng()
    arrays = [
        (rng.standard_normal(n) / 4 + n - 2).astype(each) if isinstance(each, str) else each
        for n, each in ((3, b), (3, a), (7, x))
    ]
    given = [torch.from_numpy(each) if isinstance(each, np.ndarray) else each for each in arrays]
    y = lfilter(*given)
    assert isinstance(y, Tensor)
    assert y.dtype == getattr(torch, dtype)
    right = torch.from_numpy(np.asarray(scipy.signal.lfilter(*map(np.atleast_1d, arrays))))
    close([y], [right.to(y.dtype)], factor=1e5)


# -- Errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": np.ones(3)}, InputTypeError, "x is array"),
        ({"x": None}, InputTypeError, "x is None; expected a tensor"),
        ({"b": [1.0, 2.0]}, InputTypeError, r"b is \[1.0, 2.0\]; expected a tensor"),
        ({"a": True}, InputTypeError, "a is True; expected a tensor"),
        ({"a": "1"}, InputTypeError, "a is '1'; expected a tensor"),
        ({"zi": 0.0}, InputTypeError, "zi is 0.0; expected a tensor"),
        ({"b": torch.eye(3).to_sparse()}, InputTypeError, "b has layout torch.sparse_coo; expec"),
        ({"x": torch.ones(3).bfloat16()}, InputTypeError, "x has dtype torch.bfloat16; expected"),
        ({"x": torch.ones(3, dtype=torch.int64)}, InputTypeError, "x has dtype torch.int64"),
        ({"x": torch.ones(3, device="meta")}, DeviceError, "x is on meta; expected a tensor on"),
        ({"axis": 1}, InputError, "axis is 1; expected an axis of x, which has 1"),
        ({"axis": 0.0}, InputTypeError, "axis is 0.0; expected an int"),
        ({"x": torch.ones(())}, InputError, "axis is -1; expected an axis of x, which has 0"),
        ({"a": torch.ones(0)}, InputError, r"a has shape \(0,\); expected"),
        ({"a": torch.zeros(2)}, InputError, r"a\[0\] is 0; expected another"),
        ({"b": torch.ones(2, 2)}, InputError, "b has coefficients of 2 steps; expected 3"),
        ({"b": torch.ones(2, 3, 2), "x": torch.ones(5, 3)}, InputError, r"b has leading axes \(2,"),
        ({"zi": torch.ones(2)}, InputError, r"zi has shape \(2,\); expected \(1,\)"),
        ({"zi": torch.ones(2, 1), "x": torch.ones(4, 3)}, InputError, r"zi has axes \(2,\)"),
    ],
)
def test_errors(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"b": torch.ones(2), "a": torch.ones(2), "x": torch.ones(3)}
    with pytest.raises(error, match=message):
        lfilter(**given | changed)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"sos": torch.ones(6)}, InputError, r"sos has shape \(6,\); expected \(sections, 6\)"),
        ({"sos": torch.ones(0, 6)}, InputError, "with at least one section"),
        ({"sos": torch.ones(4, 2, 6)}, InputError, "sos has coefficients of 4 steps; expected 3"),
        ({"zi": torch.ones(1, 2)}, InputError, r"zi has shape \(1, 2\); expected \(2, 2\)"),
        ({"sos": None}, InputTypeError, "sos is None; expected a tensor"),
        ({"sos": 1.0}, InputTypeError, "sos is 1.0; expected a tensor"),
    ],
)
def test_errors_of_sections(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"sos": torch.ones(2, 6), "x": torch.ones(3)}
    with pytest.raises(error, match=message):
        sosfilt(**given | changed)


def test_long_decays_take_no_longer() -> None:
    """Numbers that die away become zeros, not subnormal numbers."""
    x = torch.zeros(1, 20_000)
    x[0, 0] = 1
    y = lfilter(torch.ones(1), torch.tensor([1.0, -0.5]), x)
    assert isinstance(y, Tensor)
    assert int((y != 0).sum()) == 1 - round(math.log2(torch.finfo(torch.float32).tiny))
