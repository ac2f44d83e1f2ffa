"""The linear recurrence of PyTorch's front door: its operator, arguments, and what is kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling import slow

from sparsescan import DeviceError, InputError, InputTypeError, Pattern
from sparsescan.torch import affine, affine_scan, binder

EPS = torch.finfo(torch.float64).eps


@pytest.mark.parametrize(("number", "values"), [(0, 9), (1, 3), *slow((2, 6))])
def test_opcheck(number: int, values: int) -> None:
    """Of dense, diagonal and sparse matrices; samples share the offsets."""
    indices = [torch.tensor([0, 1, 3, 6]), torch.tensor([0, 0, 1, 0, 1, 2])] * (number == 2)
    shapes = (4, 2, values), (4, 1, 3), (2, 3)
    inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    operator = torch.ops.sparsescan.affine_scan.default
    torch.library.opcheck(operator, (*inputs, [number, 3, 1], indices, True))


def test_errors() -> None:
    a = torch.rand(4, 3, 3)
    with pytest.raises(InputTypeError, match=r"offsets has dtype torch\.float64, matrices torch\."):
        affine_scan(a, torch.rand(4, 3, dtype=torch.float64))
    with pytest.raises(InputTypeError, match=r"matrices is \[tensor.*expected a tensor"):
        affine_scan([a])  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="pattern is 3; expected a Pattern"):
        affine_scan(a, pattern=3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"offsets has shape \(5, 3\); expected \(4, 3\)"):
        affine_scan(a, torch.rand(5, 3))
    with pytest.raises(DeviceError, match=r"matrices is on meta; .* \(matrices.cpu\(\)\)"):
        affine_scan(a.to("meta"), pattern=Pattern.diagonal(3))
    with pytest.raises(InputTypeError, match=r"matrices has layout torch.sparse_coo; expected a d"):
        affine_scan(a[0].to_sparse(), torch.rand(4, 3))
    with pytest.raises(InputTypeError, match=r"offsets has layout torch._mkldnn; expected a dense"):
        affine_scan(a, torch.rand(4, 3).to_mkldnn())
    with pytest.raises(InputError, match=r"may be matrices \(T, size, size\) or diagonals"):
        affine_scan(a, torch.rand(4, 3, 3))


def test_recordings_are_as_many_as_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affine, "_MOST", 3)
    monkeypatch.setattr(binder, "_MOST", 3)
    for steps in (1, 2, 3, 4, 5, 5, 5):
        affine_scan(torch.ones(steps, 2), pattern=Pattern.diagonal(2))
    assert len(affine._known) == len(affine._bound._programs) == 3
    with torch.no_grad():
        turned = torch.rand(2, 5).t()  # not contiguous
        states = affine_scan(turned, initial=torch.ones(2), pattern=Pattern.diagonal(2))
    assert torch.allclose(states, turned.cumprod(0))


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("shared", ["", "matrices", "matrices and offsets"])
def test_one_step_is_one_operation(batch: tuple[int, ...], shared: str) -> None:
    """Of PyTorch, from the first call on."""
    rng = np.random.default_rng()

    def tensor(*shape: int) -> torch.Tensor:
        return torch.tensor(rng.standard_normal(shape), requires_grad=True)

    a = tensor(1, 4) if "matrices" in shared else tensor(1, *batch, 4)
    b = tensor(1, 4) if "offsets" in shared else tensor(1, *batch, 4)
    y = tensor(*batch, 4)
    found = [affine_scan(a, b, y, pattern=Pattern.diagonal(4)) for _ in range(8)]
    assert all(torch.equal(each, found[0]) for each in found)
    assert found[0].shape == (1, *batch, 4)
    assert torch.allclose(found[0], a * y + b, rtol=4 * EPS)
    assert torch.autograd.gradcheck(affine_scan, (a, b, y), check_batched_grad=False)
    assert torch.autograd.gradgradcheck(affine_scan, (a, b, y))
