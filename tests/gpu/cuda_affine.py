"""Linear recurrences on a CUDA device, beside loops that autograd differentiates in float64."""

from __future__ import annotations

from typing import Any

import fake_cupy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from on_device import IN_PYTHON, SIMULATED, cupy_or_stand_in
from sampling import examples
from torch import Tensor

import sparsescan.torch
from sparsescan import CSRChain, DeviceError, Pattern, affine_scan, affine_scan_vjp
from sparsescan.arrays.arrays import is_cupy
from sparsescan.symbolic.pattern import of_mask
from sparsescan.torch import binder

Array = NDArray[Any]

simulated = pytest.mark.skipif(not SIMULATED, reason="looks into the stand-in for CuPy")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return cupy_or_stand_in(monkeypatch)


class Case:
    """Random arguments, of which any may be shared by the samples or not be there."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.dtype = np.dtype(rng.choice([np.float32, np.float64]))
        steps, size, samples = (int(n) for n in rng.integers([0, 1, 1], [7, 6, 4]))
        kept = rng.random((size, size)) < rng.choice([0.3, 1.0])
        self.kept = np.eye(size, dtype=bool) if rng.random() < 0.3 else kept
        self.transposed = bool(rng.random() < 0.5)
        lead = (steps,) if rng.random() < 0.5 else (steps, samples)
        whole = self.draw(rng, *lead, size, size)
        self.pattern = of_mask(self.kept) if rng.random() < 0.6 or not self.kept.all() else None
        if self.pattern is None and rng.random() < 0.5:  # stored column by column
            whole = np.ascontiguousarray(whole.swapaxes(-1, -2)).swapaxes(-1, -2)
        self.matrices = whole if self.pattern is None else whole[..., self.kept]
        if rng.random() < 0.5:
            self.matrices = np.ascontiguousarray(self.matrices[::-1])[::-1]

        def vectors(*lead: int) -> Array | None:
            own = (None, (*lead, size), (*lead, samples, size))[rng.integers(3)]
            return None if own is None else self.draw(rng, *own)

        self.offsets, self.initial = vectors(steps), vectors()
        if self.offsets is not None and steps and rng.random() < 0.3:
            self.matrices = self.matrices[:1]  # one for all steps
        depths = (self.matrices, 2 if self.pattern is None else 1), (self.offsets, 1)
        has_batch = any(each is not None and each.ndim == 2 + depth for each, depth in depths)
        has_batch = has_batch or (self.initial is not None and self.initial.ndim == 2)
        self.batch = (samples,) if has_batch else ()
        self.loss = self.draw(rng, steps, *self.batch, size)
        said = Pattern.dense((size, size)) if self.pattern is None and size > 1 else self.pattern
        self.options: dict[str, Any] = {"pattern": said, "transposed": self.transposed}
        self.options["schedule"] = str(rng.choice(["auto", "linear", "blelloch"]))

    def draw(self, rng: np.random.Generator, *shape: int) -> Array:
        return rng.standard_normal(shape).astype(self.dtype)

    def expected(self) -> list[Array]:
        """States, and gradients in matrices, offsets and initial state of every sample."""

        def leaf(array: Array | None, shape: tuple[int, ...]) -> Tensor:
            wide = torch.zeros(shape, dtype=torch.float64)
            if array is not None:
                given = torch.from_numpy(array.astype(np.float64))
                wide += given.unsqueeze(-2) if given.dim() < len(shape) else given
            return wide.requires_grad_()

        steps, size = self.loss.shape[0], self.loss.shape[-1]
        matrices = torch.tensor(self.matrices.astype(np.float64), requires_grad=True)
        offsets, y0 = leaf(self.offsets, self.loss.shape), leaf(self.initial, self.loss.shape[1:])
        whole = matrices
        if self.pattern is not None:
            whole = matrices.new_zeros(*matrices.shape[:-1], size, size)
            whole[..., torch.from_numpy(self.kept)] = matrices
        whole = whole.mT if self.transposed else whole
        states, y = [], y0
        for t in range(steps):
            y = (whole[t if len(whole) > 1 else 0] @ y[..., None])[..., 0] + offsets[t]
            states.append(y)
        result = torch.stack(states) if steps else offsets * 1
        total = (result * torch.from_numpy(self.loss)).sum() + 0 * (matrices.sum() + y0.sum())
        grads = torch.autograd.grad(total, (matrices, offsets, y0))
        return [each.detach().numpy() for each in (result, *grads)]


def agree(actual: list[Any], expected: list[Array], dtype: Any) -> None:
    scale = max((float(np.abs(each).max(initial=0)) for each in expected), default=0) + 1
    for one, other in zip(actual, expected, strict=True):
        assert is_cupy(one)
        assert one.dtype == dtype
        assert one.shape == other.shape
        assert np.abs(one.get() - other).max(initial=0) <= 1000 * np.finfo(dtype).eps * scale


@settings(max_examples=examples(12) if IN_PYTHON else 2)
@given(st.integers(0, 2**32))
def test_states_and_gradients(cupy: Any, seed: int) -> None:
    case = Case(seed)
    arrays = case.matrices, case.offsets, case.initial, case.loss
    a, b, y0, loss = (None if each is None else cupy.asarray(each) for each in arrays)
    y = affine_scan(a, b, y0, **case.options)
    grads = affine_scan_vjp(a, initial=y0, states=y, grads=loss, **case.options)
    agree([y, *grads], case.expected(), case.dtype)
    some = affine_scan_vjp(
        a, initial=y0, states=y, grads=loss, needs_matrices_grad=False, **case.options
    )
    assert some.matrices is None
    np.testing.assert_array_equal(some.offsets.get(), grads.offsets.get())


def test_a_chain_on_the_device(cupy: Any) -> None:
    rng = np.random.default_rng()
    decay = rng.random((5, 3))
    chain = CSRChain.from_pattern(cupy.asarray(decay), Pattern.diagonal(3))
    y = affine_scan(chain, initial=cupy.ones(3))
    np.testing.assert_allclose(y.get(), np.cumprod(decay, axis=0), rtol=1e-14)


def test_what_is_mixed_is_refused(cupy: Any) -> None:
    a, b = np.ones((4, 3, 3)), np.ones((4, 3))
    with pytest.raises(DeviceError, match=r"some arrays are CuPy's and some NumPy's"):
        affine_scan(cupy.asarray(a), b)
    y = affine_scan(a, b)
    with pytest.raises(DeviceError, match=r"some arrays are CuPy's and some NumPy's"):
        affine_scan_vjp(cupy.asarray(a), states=y, grads=b)


@simulated
def test_work_is_where_the_matrices_are(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fake_cupy.watch(monkeypatch)
    rng = np.random.default_rng()
    a, b = rng.standard_normal((4, 3, 3)), rng.standard_normal((4, 3))
    with cupy.cuda.Device(1):
        there = cupy.asarray(a), cupy.asarray(b)
    y = affine_scan(*there)
    grads = affine_scan_vjp(there[0], states=y, grads=there[1])
    assert {launch.device for launch in launches} == {1}
    assert {each.device.id for each in (y, *grads)} == {1}
    np.testing.assert_allclose(y.get(), affine_scan(a, b), rtol=1e-12)


@simulated
@pytest.mark.parametrize("seed", range(3))
def test_the_door_of_pytorch(cupy: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """With arrays on the device in the place of tensors, which lie there with a GPU only."""

    def array(tensor: Tensor | None) -> Any:
        return None if tensor is None else cupy.asarray(tensor.detach().numpy())

    monkeypatch.setattr(binder, "array_of", array)
    monkeypatch.setattr(binder, "tensor_of", lambda array: torch.from_numpy(array.get()))
    monkeypatch.setattr(binder, "is_on_device", lambda tensor: True)
    launches = fake_cupy.watch(monkeypatch)
    generator = torch.Generator().manual_seed(seed)
    shape = (4, 2, 3) if seed == 2 else (4, 2, 3, 3)
    a = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    b, y0 = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((4, 3), (2, 3))
    )
    pattern = Pattern.diagonal(3) if seed == 2 else None

    def run(a: Tensor, b: Tensor, y0: Tensor) -> Tensor:
        return sparsescan.torch.affine_scan(a, b, y0, pattern=pattern, transposed=seed == 1)

    assert torch.autograd.gradcheck(run, (a, b, y0))
    assert launches
