"""The libraries that the engine is compared with, each at its best settings.

A peer is a dictionary of variants: one piece of work, written in the ways that might be fastest.
:func:`bench.timing.fastest` tries them. Peers are imported when they are asked for, since none is
required.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from sparsescan import BatchedCSR

from .timing import THREADS, Call

PYTORCH, FLUSHING = "PyTorch", "PyTorch, set_flush_denormal"
Variants = Callable[[], dict[str, Call]]


class MissingPeerError(Exception):
    """A peer that is not installed, and how to get it."""


def require(module: str, hint: str) -> Any:
    """Return the module; or MissingPeerError, with how to get it."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # a library of C++ is for another PyTorch
        reason = f"{error}".split(". ")[0]
        raise MissingPeerError(f"{reason}: {hint}") from None


def fastest_of_each(
    makers: Mapping[str, Callable[[], Mapping[str, Any]]],
    choose: Callable[[Mapping[str, Any]], tuple[str, Any]],
) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """Return the call of each contender that is chosen, its ``variants``, and who is ``missing``.

    The name and the call of the fastest variant are chosen, as by :func:`bench.timing.fastest`.
    """
    calls: dict[str, Any] = {}
    variants: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name, make in makers.items():
        try:
            variants[name], calls[name] = choose(make())
        except MissingPeerError as error:
            missing[name] = str(error)
    return calls, {"variants": variants, "missing": missing}


def in_threads(call: Call, name: str = "") -> dict[str, Call]:
    """Return a call with PyTorch on two threads, and on one: steps may be too small to share."""
    torch = load_torch()

    def run(threads: int) -> Any:
        torch.set_num_threads(threads)
        return call()

    return {f"{n} threads{name}": partial(run, n) for n in (THREADS, 1)}


def in_both_modes(make: Variants, *, apart: bool) -> dict[str, Variants]:
    """Return PyTorch as it is, and with subnormal numbers as zeros: two contenders, or one."""

    def flushed() -> dict[str, Call]:
        return {f"{name}, set_flush_denormal": flushing(call) for name, call in make().items()}

    if apart:
        return {PYTORCH: make, FLUSHING: flushed}
    return {PYTORCH: lambda: make() | flushed()}


def flushing(call: Call) -> Call:
    """Return a call for which subnormal numbers are zeros in all of PyTorch's threads.

    ``torch.set_flush_denormal`` changes the thread that calls it, and OpenMP's threads have the
    mode of the thread that started them. So there is a thread for such calls, which has OpenMP's
    threads of its own; the threads of other contenders keep their mode.
    """
    return lambda: _flushing_thread().submit(call).result()


@cache
def _flushing_thread() -> ThreadPoolExecutor:
    torch = load_torch()
    return ThreadPoolExecutor(1, initializer=lambda: torch.set_flush_denormal(True))


def loop(first: Any, steps: Iterable[Callable[[Any], Any]]) -> Call:
    """Return a call that makes each gradient from the one before, and returns all of them."""
    steps = list(steps)

    def run() -> list[Any]:
        gradients = [first]
        for step in steps:
            gradients.append(step(gradients[-1]))
        return gradients

    return run


def scipy_loop(grad: NDArray[Any], matrices: Sequence[sp.csr_array]) -> Call:
    """Back-propagation as one writes it with SciPy."""
    return loop(grad, [matrix.__matmul__ for matrix in matrices[:-1]])


def of_sample(jacobian: sp.csr_array | BatchedCSR, b: int) -> sp.csr_array:
    """Return the Jacobian of sample `b`, which shares its values."""
    return jacobian[b] if isinstance(jacobian, BatchedCSR) else jacobian


def scipy_batch_loops(
    grad: NDArray[Any], jacobians: Sequence[sp.csr_array | BatchedCSR]
) -> dict[str, Call]:
    """Back-propagation of a batch: as a list of vectors, or as a matrix ``(d, batch)``.

    A Jacobian that the samples share takes all columns of the matrix at once; one that they do not
    share takes them one by one, or is one block-diagonal matrix; a diagonal one is a plain array.
    Matrices are made beforehand, but no copy of values that differ between samples and so change on
    every iteration: they are not transposed, and explicit zeros stay.
    """
    batch = len(grad)

    def by_sample(jacobian: sp.csr_array | BatchedCSR) -> _Step:
        if _is_diagonal(jacobian):
            rows = list(jacobian.data)
            return lambda xs: [row * x for row, x in zip(rows, xs, strict=True)]
        own = [of_sample(jacobian, b) for b in range(batch)]
        return lambda xs: [matrix @ x for matrix, x in zip(own, xs, strict=True)]

    def columns(jacobian: sp.csr_array | BatchedCSR) -> _Step:
        if not isinstance(jacobian, BatchedCSR):
            return lambda x: jacobian @ x
        if _is_diagonal(jacobian):
            return lambda x: jacobian.data.T * x
        step = by_sample(jacobian)
        return lambda x: np.stack(step(x.T), axis=1)

    def blocks(jacobian: sp.csr_array | BatchedCSR) -> _Step:
        if not isinstance(jacobian, BatchedCSR) or _is_diagonal(jacobian):
            return columns(jacobian)
        matrix = sp.block_diag([jacobian[b] for b in range(batch)], "csr")
        return lambda x: (matrix @ x.T.reshape(-1)).reshape(batch, -1).T

    listed, matrix = list(grad), np.ascontiguousarray(grad.T)
    forms: dict[str, tuple[Any, Callable[[Any], _Step]]] = {
        "by sample": (listed, by_sample),
        "csr_array @ (d, batch), others by sample": (matrix, columns),
        "csr_array @ (d, batch), others block-diagonal": (matrix, blocks),
    }
    return {
        name: loop(first, [make(jacobian) for jacobian in jacobians[:-1]])
        for name, (first, make) in forms.items()
    }


_Step = Callable[[Any], Any]


def _is_diagonal(jacobian: sp.csr_array | BatchedCSR) -> bool:
    return isinstance(jacobian, BatchedCSR) and jacobian.pattern.kind == "diagonal"


def numpy_loops(grad: NDArray[Any], jacobians: NDArray[Any]) -> dict[str, Call]:
    """Back-propagation through dense steps, into one array."""

    def loop_of(multiply: Any, *columns: int) -> Call:
        def run() -> NDArray[Any]:
            gradients = np.empty((len(jacobians), *grad.shape, *columns), grad.dtype)
            gradients[0] = grad.reshape(gradients.shape[1:])
            for k in range(len(jacobians) - 1):
                multiply(jacobians[k], gradients[k], out=gradients[k + 1])
            return gradients.reshape(-1, *grad.shape)

        return run

    matvec = {"matvec": loop_of(np.matvec)} if hasattr(np, "matvec") else {}
    return {"matmul": loop_of(np.matmul, 1)} | matvec


def jax_scans(grad: NDArray[Any], jacobians: NDArray[Any]) -> dict[str, Call]:
    """``jax.lax.scan``, jitted, its input on the device."""
    jax = load_jax()

    def matmul(step: Any, x: Any) -> Any:
        return (step @ x[..., None])[..., 0]

    def einsum(step: Any, x: Any) -> Any:
        return jax.numpy.einsum("bij,bj->bi", step, x)

    def variant(apply: Any, unroll: int) -> Call:
        @jax.jit
        def scan(grad: Any, jacobians: Any) -> Any:
            def body(x: Any, step: Any) -> Any:
                return apply(step, x), x

            return jax.lax.scan(body, grad, jacobians, unroll=unroll)[1]

        return lambda: scan(*on_device).block_until_ready()

    on_device = jax.device_put((grad, jacobians))
    return {
        f"{apply.__name__}, unroll={unroll}": variant(apply, unroll)
        for apply in (matmul, einsum)
        for unroll in (1, 2, 4, 8)
    }


def jax_associative_scans(grad: NDArray[Any], jacobians: NDArray[Any]) -> dict[str, Call]:
    """``jax.lax.associative_scan``, jitted, its input on the device."""
    jax = load_jax()
    jnp = jax.numpy

    def products(grad: Any, jacobians: Any) -> Any:
        """All products of Jacobians, then applied to the gradient."""
        prefixes = jax.lax.associative_scan(lambda a, b: b @ a, jacobians[:-1])
        return jnp.concatenate([grad[None], jnp.einsum("tbij,bj->tbi", prefixes, grad)])

    def affine(multiply: Any, apply: Any) -> Any:
        """Pairs ``(J, v)`` for ``x ↦ J x + v``, the first of which is constant."""

        def combine(a: Any, b: Any) -> Any:
            return multiply(b[0], a[0]), apply(b[0], a[1]) + b[1]

        def scan(grad: Any, jacobians: Any) -> Any:
            constants = jnp.zeros(jacobians.shape[:-1], grad.dtype).at[0].set(grad)
            matrices = jnp.concatenate([jacobians[:1], jacobians[:-1]])
            return jax.lax.associative_scan(combine, (matrices, constants))[1]

        return scan

    forms = {
        "products": products,
        "affine, matmul": affine(jnp.matmul, lambda j, v: (j @ v[..., None])[..., 0]),
        "affine, einsum": affine(
            lambda b, a: jnp.einsum("...ij,...jk->...ik", b, a),
            lambda j, v: jnp.einsum("...ij,...j->...i", j, v),
        ),
    }
    on_device = jax.device_put((grad, jacobians))

    def variant(form: Any) -> Call:
        scan = jax.jit(form)
        return lambda: scan(*on_device).block_until_ready()

    return {name: variant(form) for name, form in forms.items()}


def mkl_products(a: sp.csr_array, b: sp.csr_array) -> dict[str, Call]:
    """Multiply ``A @ B`` in MKL: by `sparse_dot_mkl`, and with handles that are made only once.

    The second neither creates its operands nor exports its result to SciPy.
    """
    mkl = load_mkl()
    from sparse_dot_mkl._mkl_interface import _create_mkl_sparse, _destroy_mkl_handle
    from sparse_dot_mkl._sparse_sparse import _matmul_mkl

    handles = [_create_mkl_sparse(matrix)[0] for matrix in (a, b)]

    def kept_handles() -> None:
        # Naming the matrices keeps alive what the handles point into.
        _ = a, b
        _destroy_mkl_handle(_matmul_mkl(*handles))

    return {
        "dot_product_mkl": lambda: mkl.dot_product_mkl(a, b),
        "mkl_sparse_spmm, kept handles": kept_handles,
    }


def load_mkl() -> ModuleType:
    """`sparse_dot_mkl`, which does not look for MKL in the environment it is installed in."""
    for library in sorted(Path(sys.prefix, "lib").glob("libmkl_rt*")):
        os.environ.setdefault("MKL_RT", str(library))
    os.environ.setdefault("MKL_DYNAMIC", "FALSE")  # or it uses one thread when it sees fit
    sparse_dot_mkl: ModuleType = require("sparse_dot_mkl", "pip install mkl sparse_dot_mkl")
    sparse_dot_mkl.mkl_set_num_threads(THREADS)
    return sparse_dot_mkl


def torch_columns(module: Any, x: NDArray[Any], columns: NDArray[np.int64]) -> dict[str, Call]:
    """Return some columns of the transposed Jacobian of a layer, one at a time, without zeros."""
    torch = load_torch()
    x_torch = torch.from_numpy(x)[None].requires_grad_()
    y = module(x_torch)
    unit = torch.zeros_like(y)
    above = unit.view(-1)

    def as_csr() -> tuple[NDArray[Any], ...]:
        """Return data, indices and indptr of the Jacobian, whose rows are these columns."""
        places, entries, ends = [], [], [0]
        for j in columns.tolist():
            above[j] = 1
            (grad,) = torch.autograd.grad(y, x_torch, unit, retain_graph=True)
            above[j] = 0
            flat = grad.view(-1)
            places.append(flat.nonzero().squeeze(1))
            entries.append(flat[places[-1]])
            ends.append(ends[-1] + len(places[-1]))
        return torch.cat(entries).numpy(), torch.cat(places).numpy(), np.array(ends)

    return {"autograd.grad, nonzero": as_csr}


def load_jax() -> Any:
    return require("jax", "pip install jax")


def load_torch() -> Any:
    torch = require("torch", "pip install torch")
    torch.set_num_threads(THREADS)
    return torch


@contextmanager
def in_float64() -> Iterator[Any]:
    """Give JAX; some of its libraries change its precision when they are imported."""
    jax = load_jax()
    before = jax.config.jax_enable_x64
    try:
        with jax.enable_x64(True):
            yield jax
    finally:
        jax.config.update("jax_enable_x64", before)
