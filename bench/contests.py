"""The table of the engine's benchmarks: for each work, its contenders and what is required.

The engine is the contender :data:`OURS`. Everything here is used twice: by ``pytest
--benchmark-only`` and by ``python -m bench.compare``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

import sparsescan
from sparsescan.schedule import Level

from . import workloads
from .peers import (
    Call,
    jax_associative_scans,
    jax_scans,
    load_mkl,
    mkl_products,
    numpy_loops,
    of_sample,
    scipy_batch_loops,
    scipy_loop,
)

OURS = "sparsescan"
ONE_SHOT = "sparsescan, one-shot"


@dataclass(frozen=True)
class Work:
    """One piece of work, ready to be timed.

    Attributes
    ----------
    contenders : dict
        For each contender what makes its variants; it raises MissingPeerError.
    bytes, flops : int
        What must be moved and computed, however it is done.
    answer : callable
        The result as an array to compare, from a contender and what its call returned.
    repeats : dict
        For a contender whose call does only a part of the work, how many such parts there are.
    unchecked : tuple
        Contenders that compute something else, such as a floor.
    right : ndarray, optional
        The answer in float64; without it, contenders must agree with the engine's first peer.
    """

    contenders: dict[str, Callable[[], dict[str, Call]]]
    bytes: int
    flops: int
    dtype: np.dtype[Any]
    answer: Callable[[str, Any], NDArray[Any]] = lambda contender, result: np.asarray(result)
    repeats: Mapping[str, float] = field(default_factory=dict)
    unchecked: tuple[str, ...] = ()
    right: NDArray[Any] | None = None

    def check(self, contender: str, result: Any) -> None:
        """Stop if a contender did not compute what is right."""
        if contender in self.unchecked:
            return
        found, expected = self.answer(contender, result), self._expected
        error = np.abs(found - expected).max() / np.abs(expected).max()
        if not error < np.sqrt(np.finfo(self.dtype).eps):
            raise AssertionError(f"{contender} is wrong: relative difference {error:.1e}")

    @cached_property
    def _expected(self) -> NDArray[Any]:
        if self.right is not None:
            return self.right
        peer = next(name for name in self.contenders if not name.startswith(OURS))
        call = next(iter(self.contenders[peer]().values()))
        return self.answer(peer, call())


@dataclass(frozen=True)
class Contest:
    """Lines of the table: the work, made by ``make(reduced)``, and the ratios to reach.

    The ratio is the time of another contender over that of the engine; None where nothing is asked.
    """

    name: str
    work: str
    make: Callable[[bool], Work]
    required: Mapping[str, float | None]


def spgemm(reduced: bool) -> Work:
    """The numeric product of two Jacobians; the engine knows its pattern.

    A plan offers no bare product, so this one has a schedule that is nothing else: the product
    ``[1, 3)`` of the first two Jacobians, and no gradient but the first. A second plan applies the
    product to that, to show that it is right.
    """
    j2, j1 = workloads.conv_pair(6, (4, 8, 16)) if reduced else workloads.conv_pair()
    grad = np.ones(j2.shape[1], j2.dtype)
    last = sparsescan.Pattern.diagonal(j1.shape[0])
    values = [j2.data, j1.data, np.ones(last.nnz, j1.dtype)]

    def plan(*ops: tuple[int, int, int]) -> sparsescan.ScanPlan:
        levels = [Level("product", np.array([op]), np.array([0, 1])) for op in ops]
        schedule = sparsescan.Schedule(3, levels, f"product{ops}")
        return sparsescan.plan([j2, j1, last], schedule=schedule)

    def ours() -> dict[str, Call]:
        product = plan((1, 2, 3))
        return {"plan": lambda: product.exclusive_scan(grad, values)}

    def answer(contender: str, result: Any) -> NDArray[Any]:
        if contender == OURS:
            return np.asarray(plan((1, 2, 3), (0, 1, 3)).exclusive_scan(grad, values)[2])
        if contender == "MKL":
            result = load_mkl().dot_product_mkl(j1, j2)
        return np.asarray(result @ grad)

    product = j1 @ j2
    index = product.indices.itemsize
    operands = sum(m.data.nbytes + m.indices.nbytes + m.indptr.nbytes for m in (j1, j2))
    return Work(
        contenders={
            OURS: ours,
            "SciPy @": lambda: {"csr_array @ csr_array": lambda: j1 @ j2},
            "MKL": lambda: mkl_products(j1, j2),
        },
        bytes=operands + product.nnz * (index + product.dtype.itemsize) + product.indptr.nbytes,
        flops=2 * int(np.diff(j2.indptr).astype(np.int64)[j1.indices].sum()),
        dtype=product.dtype,
        answer=answer,
    )


def stencil_plan(n: int, side: int, dtype: DTypeLike) -> Callable[[bool], Work]:
    """A :class:`CSRChain` and a plan, against matrices that share their index arrays."""

    def make(reduced: bool) -> Work:
        grad, chain = data = workloads.stencil(20 if reduced else n, 8 if reduced else side, dtype)
        plan = sparsescan.plan(chain)
        matrices = data.matrices(shared=True)
        return Work(
            contenders={
                OURS: lambda: {"plan": lambda: plan.exclusive_scan(grad, chain)},
                "SciPy loop": lambda: {"csr_array @ ndarray": scipy_loop(grad, matrices)},
            },
            bytes=_stencil_bytes(data),
            flops=2 * (len(chain) - 1) * chain.nnz,
            dtype=grad.dtype,
        )

    return make


def stencil_list(reduced: bool) -> Work:
    """A list of matrices, each with its own index arrays, and no plan."""
    n, side = (20, 8) if reduced else (1000, 16)
    data = workloads.stencil(n, side, np.float64)
    grad, chain = data
    matrices = data.matrices(shared=False)
    indices = len(chain) * (chain.indices.nbytes + chain.indptr.nbytes)
    return Work(
        contenders={
            OURS: lambda: {
                "exclusive_scan": lambda: sparsescan.exclusive_scan(grad, matrices),
            },
            "SciPy loop": lambda: {"csr_array @ ndarray": scipy_loop(grad, matrices)},
        },
        bytes=_stencil_bytes(data) + indices,
        flops=2 * (len(chain) - 1) * chain.nnz,
        dtype=grad.dtype,
    )


def rnn(reduced: bool) -> Work:
    """Back-propagation through time with dense Jacobians of a batch."""
    data = workloads.tanh_rnn(20, 2, 4) if reduced else workloads.tanh_rnn(1000, 16, 20)
    grad, jacobians = data
    plan = sparsescan.plan(jacobians)
    read = jacobians[:-1]
    return Work(
        contenders={
            OURS: lambda: {"plan": lambda: plan.exclusive_scan(grad, jacobians)},
            ONE_SHOT: lambda: {
                "exclusive_scan": lambda: sparsescan.exclusive_scan(grad, jacobians)
            },
            "NumPy loop": lambda: numpy_loops(*data),
            "jax.lax.scan": lambda: jax_scans(*data),
            "jax.lax.associative_scan": lambda: jax_associative_scans(*data),
        },
        bytes=read.nbytes + len(jacobians) * grad.nbytes,
        flops=2 * read.size,
        dtype=grad.dtype,
    )


def vgg11(batch: int) -> Callable[[bool], Work]:
    """Back-propagation through a pruned network; the samples share the Jacobians of its weights."""

    def make(reduced: bool) -> Work:
        net = workloads.vgg11(0.97, 8, 8) if reduced else workloads.vgg11(0.97)
        rng = np.random.default_rng(4)
        images = rng.standard_normal((batch, *net.input_shape), np.float32)
        jacobians = net.jacobians(net.activations(images))
        values = [jacobian.data for jacobian in jacobians]
        grad = rng.standard_normal((batch, net.patterns[0].shape[1]), np.float32)
        plan = net.plan(schedule="auto", batch=batch, dtype=np.float32)

        exact = [
            scipy_loop(x, [of_sample(jacobian, b).astype(np.float64) for jacobian in jacobians])()
            for b, x in enumerate(grad.astype(np.float64))
        ]
        gradients = [np.stack(samples) for samples in zip(*exact, strict=True)]

        def answer(contender: str, result: Any) -> NDArray[Any]:
            """All gradients, each relative to its largest entry."""
            if contender != OURS:
                result = [x.T if isinstance(x, np.ndarray) else np.stack(x) for x in result]
            pairs = zip(result, gradients, strict=True)
            return np.concatenate([(x / np.abs(right).max()).ravel() for x, right in pairs])

        read = net.patterns[:-1]
        indices = sum(
            pattern.indices.nbytes + pattern.indptr.nbytes
            for pattern in set(read)
            if pattern.kind == "general"
        )
        return Work(
            contenders={
                OURS: lambda: {"plan": lambda: plan.exclusive_scan(grad, values)},
                "SciPy loop": lambda: scipy_batch_loops(grad, jacobians),
            },
            bytes=sum(data.nbytes for data in values[:-1])
            + indices
            + grad.itemsize * sum(x.size for x in gradients),
            flops=2 * batch * sum(pattern.nnz for pattern in read),
            dtype=grad.dtype,
            answer=answer,
            right=answer(OURS, gradients),
        )

    return make


def _stencil_bytes(data: workloads.Stencil) -> int:
    grad, chain = data
    pattern = chain.indices.nbytes + chain.indptr.nbytes
    return chain.data[:-1].nbytes + len(chain) * grad.nbytes + pattern


CONTESTS = (
    Contest(
        "spgemm-conv-64-128-256",
        "numeric SpGEMM, conv 64→128→256 at 16×16, 3×3, 97% pruned, float32",
        spgemm,
        {"SciPy @": 4, "MKL": 2},
    ),
    Contest(
        "stencil-n=1000-unknowns=256-float64-plan",
        "n=1,000, 256 unknowns (5-point stencil), CSRChain, plan reused, float64",
        stencil_plan(1000, 16, np.float64),
        {"SciPy loop": 4},
    ),
    Contest(
        "stencil-n=1000-unknowns=256-float64-list",
        "n=1,000, 256 unknowns (5-point stencil), list of csr_array, one-shot, float64",
        stencil_list,
        {"SciPy loop": 1},
    ),
    Contest(
        "stencil-n=100-unknowns=65536-float32-plan",
        "n=100, 65,536 unknowns (5-point stencil), CSRChain, plan reused, float32",
        stencil_plan(100, 256, np.float32),
        {"SciPy loop": 1.4},
    ),
    Contest(
        "stencil-n=100-unknowns=65536-float64-plan",
        "n=100, 65,536 unknowns (5-point stencil), CSRChain, plan reused, float64",
        stencil_plan(100, 256, np.float64),
        {"SciPy loop": 1.4},
    ),
    Contest(
        "rnn-T=1000-B=16-H=20-float32",
        "T=1,000, B=16, H=20 dense, plan reused, float32",
        rnn,
        {
            ONE_SHOT: None,
            "NumPy loop": 2,
            "jax.lax.associative_scan": 30,
            "jax.lax.scan": 1.3,
        },
    ),
    *(
        Contest(
            f"vgg11-pruned-B={batch}-float32",
            f"VGG-11 pruned by 97%, 32×32 images, B={batch}, plan reused, float32",
            vgg11(batch),
            {"SciPy loop": 1.5},
        )
        for batch in (1, 16)
    ),
)
