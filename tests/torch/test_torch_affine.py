"""The linear recurrence of PyTorch's front door, beside a loop that autograd differentiates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sampling import slow
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, jvp, vmap
from torch_checks import check_compiled, close

from sparsescan import DeviceError, InputError, InputTypeError, Pattern
from sparsescan.symbolic.pattern import of_mask
from sparsescan.torch import affine, affine_scan, binder

EPS = torch.finfo(torch.float64).eps


class Case:
    """Random arguments, of which any may be shared by the samples or not be there."""

    def __init__(self, seed: int, most: int = 9, *, may_be_complex: bool = True) -> None:
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        steps, size, batch = (int(rng.integers(1, most)) for _ in range(3))
        is_complex = may_be_complex and rng.random() < 0.3
        self.dtype = torch.complex128 if is_complex else torch.float64
        kept = torch.from_numpy(rng.random((size, size)) < rng.choice([0.3, 1.0]))
        form = rng.choice(["each", "each", "one", "number"])
        self.is_number = form == "number" and size > 1
        self.is_one = bool(form == "one")
        if self.is_number or rng.random() < 0.3:
            kept = torch.eye(size, dtype=torch.bool)
        self.kept = kept
        has_batch = rng.random() < 0.5
        lead = (1 if self.is_one else steps, *([batch] * has_batch))
        self.is_dense = bool(kept.all()) and rng.random() < 0.7
        self.pattern = None if self.is_dense or self.is_number else of_mask(kept.numpy())
        if self.is_dense and size > 1 and (batch == size or rng.random() < 0.5):
            self.pattern = Pattern.dense((size, size))
        shape = (size, size) if self.is_dense else (int(kept.sum()),)
        if self.is_number:
            shape = (1,) if has_batch or steps == size else ()
        if self.is_one and not has_batch and self.pattern is not None:
            lead = ()  # without an axis of steps
        self.matrices = (torch.randn(*lead, *shape, dtype=self.dtype) / 2).requires_grad_()
        self.transposed = bool(rng.random() < 0.5)

        def vectors(*lead: int, needed: bool) -> Tensor | None:
            choice = rng.integers(2 if needed else 3)
            if choice == 2:
                return None
            own = (*lead, batch, size) if choice else (*lead, size)
            return torch.randn(own, dtype=self.dtype).requires_grad_()

        self.offsets = vectors(steps, needed=self.is_one or self.is_number)
        self.initial = vectors(needed=False)

    @property
    def inputs(self) -> list[Tensor]:
        given = (self.matrices, self.offsets, self.initial)
        return [tensor for tensor in given if tensor is not None]

    def run(self, *inputs: Tensor) -> Tensor:
        matrices, *rest = inputs or self.inputs
        offsets = None if self.offsets is None else rest.pop(0)
        initial = rest.pop(0) if rest else None
        options: Any = {"pattern": self.pattern, "transposed": self.transposed}
        return affine_scan(matrices, offsets, initial, **options)

    def loop(self) -> Tensor:
        return self.by_loop(*self.inputs)

    def by_loop(self, *inputs: Tensor) -> Tensor:
        a, *rest = inputs
        offsets = None if self.offsets is None else rest.pop(0)
        initial = rest.pop(0) if rest else None
        if self.is_number:
            a = a if a.dim() > 1 else a[:, None]
            a = a[..., None] * torch.eye(len(self.kept), dtype=a.dtype)
        elif not self.is_dense:
            places = torch.eye(self.kept.numel(), dtype=a.dtype)[self.kept.flatten()]
            a = torch.einsum("...e,eij->...ij", a, places.reshape(-1, *self.kept.shape))
        product = "...ji,...j->...i" if self.transposed else "...ij,...j->...i"
        size = a.shape[-1]
        if self.is_one:
            assert offsets is not None
            a = a if a.dim() > 2 else a[None]
            a = a.expand(len(offsets), *a.shape[1:])
        y = a.new_zeros(size) if initial is None else initial
        states = []
        for t in range(len(a)):
            y = torch.einsum(product, a[t], y)
            y = y if offsets is None else y + offsets[t]
            states.append(y)
        return torch.stack(torch.broadcast_tensors(*states))


@pytest.fixture(params=[1, 2], ids=["first", "again"])
def runs(request: pytest.FixtureRequest) -> int:
    """Return how often a case is run until its results are looked at."""
    number: int = request.param
    return number


@given(st.integers(0, 2**32))
def test_states_and_gradients(runs: int, seed: int) -> None:
    case = Case(seed)
    frozen = case.inputs[1:] if seed % 3 == 0 else [case.matrices] if seed % 3 == 1 else []
    for tensor in frozen if len(frozen) < len(case.inputs) else ():
        tensor.requires_grad_(False)
    leaves = [each for each in case.inputs if each.requires_grad]
    for _ in range(runs):
        states = case.run()
    expected = case.loop()
    loss = torch.randn_like(expected)
    results = [torch.autograd.grad((y * loss).sum().real, leaves) for y in (states, expected)]
    tensors = (expected.detach(), *results[1])
    scale = max(float(each.abs().max()) for each in tensors if each.numel())
    close((states, *results[0]), (expected, *results[1]), scale, factor=2000)


@pytest.mark.parametrize("seed", range(12))
def test_first_and_second_derivatives(runs: int, seed: int) -> None:
    case = Case(seed, most=4)
    inputs = tuple(case.inputs)
    assert torch.autograd.gradcheck(case.run, inputs)
    assert torch.autograd.gradgradcheck(case.run, inputs)


@pytest.mark.parametrize("seed", [1, *slow(0)])
def test_opcheck(seed: int) -> None:
    case = Case(seed, most=4)
    kind, indices = "diagonal" if case.is_number else "dense", ()
    matrices = case.matrices.detach().clone()
    if case.is_number:
        matrices = matrices.reshape(*matrices.shape[: 2 if matrices.dim() == 3 else 1], 1)
        matrices = matrices.expand(*matrices.shape[:-1], len(case.kept)).contiguous()
    elif case.pattern is not None and case.pattern.kind == "diagonal":
        kind = "diagonal"
    elif case.pattern is not None and case.pattern.kind == "general":
        arrays = case.pattern.indptr, case.pattern.indices
        kind, indices = "sparse", tuple(torch.from_numpy(a.astype(np.int64)) for a in arrays)
    elif not case.is_dense:
        matrices = matrices.unflatten(-1, case.kept.shape)
    if case.is_one and matrices.dim() == (2 if kind == "dense" else 1):
        matrices = matrices[None]
    if kind == "dense" and len(case.kept) == 1:
        kind, matrices = "diagonal", matrices[..., 0]
    offsets, initial, size = case.offsets, case.initial, len(case.kept)
    matrices = matrices.flatten(-2) if kind == "dense" else matrices
    matrices = matrices if matrices.dim() == 3 else matrices[:, None]
    if offsets is not None and offsets.dim() == 2:
        offsets = offsets[:, None]
    if initial is not None and initial.dim() == 1:
        initial = initial[None]
    inputs = [
        None if each is None else each.detach().requires_grad_()
        for each in (matrices, offsets, initial)
    ]
    numbers = [("dense", "diagonal", "sparse").index(kind), size, int(case.transposed)]
    operator = torch.ops.sparsescan.affine_scan.default
    torch.library.opcheck(operator, (*inputs, numbers, list(indices), True))


@pytest.mark.parametrize("seed", [5, *slow(6, 7, 8)])
def test_compiled_graphs_stay_whole(seed: int) -> None:
    case = Case(seed)

    def loss(*inputs: Tensor) -> Tensor:
        return case.run(*(2 * each for each in inputs)).abs().square().sum()

    check_compiled(loss, case.inputs, case.inputs)


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


def maps(f: Any, inputs: list[Tensor], many: list[Tensor], along: list[Tensor]) -> list[Any]:
    """Return results of transforms of a function of some tensors."""
    every = tuple(range(len(inputs)))
    one = [f(*inputs), *jacrev(f, every)(*inputs)]
    some = (0, *[None] * (len(inputs) - 1))
    return [
        *one,
        *jacfwd(f, every)(*inputs),
        *jvp(f, tuple(inputs), tuple(along)),
        jvp(lambda *given: jvp(f, given, tuple(along))[1], tuple(inputs), tuple(along))[1],
        *jvp(grad(lambda *given: f(*given).square().sum(), every), tuple(inputs), tuple(along)),
        vmap(f)(*many),
        vmap(f, some)(many[0], *inputs[1:]),
        vmap(f, (None, *[0] * (len(inputs) - 1)))(inputs[0], *many[1:]) if len(inputs) > 1 else one,
        *vmap(grad(lambda *given: f(*given).sin().sum(), every))(*many),
        *vmap(vmap(grad(lambda *given: f(*given).sin().sum(), every)))(*(m[None] for m in many)),
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@given(st.integers(0, 2**32))
def test_transforms(seed: int) -> None:
    """Of all arguments, whether samples share them or not."""
    case = Case(seed, most=4, may_be_complex=False)
    inputs = [each.detach() for each in case.inputs]
    many = [torch.stack([each, -0.5 * each, each.sin()]) for each in inputs]
    along = [torch.randn_like(each) for each in inputs]
    found = [maps(case.run, inputs, many, along)]
    try:
        found.append(maps(case.by_loop, inputs, many, along))
    except RuntimeError as error:
        # Of PyTorch (2.13), by views of some sizes in forward mode.
        assume("INTERNAL ASSERT" not in str(error))
        raise
    close(*found, factor=2000)


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
