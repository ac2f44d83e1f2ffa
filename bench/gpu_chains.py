"""Random chains on a GPU: the same bits every time, and right; and a few for compute-sanitizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

import sparsescan
from sparsescan import BatchedCSR, CSRChain, Schedule, jacobians

Array = NDArray[Any]

CHAINS, REPETITIONS = 200, 20
WHOLES = ("dense stack", "CSRChain", "list")
SCHEDULES = ("auto", "linear", "blelloch", "truncated", "chunked")
# Few, as kernels for small dense steps are compiled for their size.
_SIZES = (1, 3, 20, 33, 64)
# Recurrent networks with weights in registers, of one lane and several; and not.
STEPS = (
    ("RNN", 20, np.float32),
    ("GRU", 20, np.float64),
    ("LSTM", 64, np.float32),
    ("LSTM", 130, np.float32),
)
_FORMS = ("csr", "batched csr", "dense", "batched dense", "diagonal")


@dataclass(frozen=True)
class RandomChain:
    """Arguments of a scan, on the host, and in words."""

    grad: Array
    jacobians: Any
    local_grads: list[Array | None] | None
    schedule: Schedule | str

    def __str__(self) -> str:
        kind = type(self.jacobians).__name__
        local = "" if self.local_grads is None else ", local gradients"
        dtype, shape = self.grad.dtype, self.grad.shape
        return (
            f"{len(self.jacobians)} steps as {kind}, {self.schedule}, grad {shape} {dtype}{local}"
        )


def random_chain(
    rng: np.random.Generator,
    whole: str | None = None,
    schedule: str | None = None,
    dtype: Any = None,
    *,
    most: int = 64,
) -> RandomChain:
    """Draw a chain, or what of it is not given."""
    whole = whole or rng.choice(WHOLES)
    schedule = schedule or rng.choice(SCHEDULES)
    dtype = dtype or rng.choice([np.float32, np.float64])
    batch = (None, 1, 3, 16)[rng.integers(4)]
    lead = () if batch is None else (batch,)
    draw = _Values(rng, dtype, positive=rng.random() < 0.5)
    n = int(rng.integers(1, (most if whole != "list" else most // 4) + 1))
    jacobians: Any
    if whole == "list":
        sizes = rng.integers(1, 65, n + 1)
        jacobians = [
            _step(draw, rng.choice(_FORMS), (sizes[k + 1], sizes[k]), lead) for k in range(n)
        ]
    else:
        sizes = np.full(n + 1, rng.choice(_SIZES) if whole == "dense stack" else rng.integers(200))
        sizes += sizes == 0
        shape = sizes[0], sizes[0]
        if whole == "dense stack":
            jacobians = draw((n, *lead, *shape), sizes[0])
        else:
            indices, indptr, entries = _pattern(rng, shape)
            data = draw((n, *lead, len(indices)), entries)
            jacobians = CSRChain(data, indices, indptr, shape)
    local = None
    if rng.random() < 0.4:
        local = [draw((*lead, sizes[k])) if rng.random() < 0.6 else None for k in range(n)]
    tree: Schedule | str = schedule
    if schedule == "truncated":
        tree = Schedule.truncated(n, int(rng.integers(n.bit_length() + 1)))
    elif schedule == "chunked":
        tree = Schedule.chunked(n, int(rng.integers(1, n + 2)))
    return RandomChain(draw((*lead, sizes[0])), jacobians, local, tree)


def repeat(
    gpu: Any,
    chains: int = CHAINS,
    repetitions: int = REPETITIONS,
    entropy: int | None = None,
    save: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Run random chains again and again; which of them gave other bits at times, or were wrong.

    The seed of chain `k` is ``[entropy, k]``; the entropy is fresh unless it is given. After each
    chain, what is known is passed to `save`.
    """
    entropy = np.random.SeedSequence().entropy if entropy is None else entropy
    # As text, since it is too long for some readers of JSON.
    report = {"entropy": str(entropy), "repetitions": repetitions, "asked": chains, "done": 0}
    failed: list[dict[str, Any]] = []
    for k in range(chains):
        chain = random_chain(np.random.default_rng([entropy, k]))
        why = _fault(gpu, chain, repetitions)
        if why is not None:
            failed.append({"chain": k, "what": str(chain), "why": why})
        report["done"] = k + 1
        save(report | {"failed": failed})
    return report | {"failed": failed}


def _fault(gpu: Any, chain: RandomChain, repetitions: int) -> str | None:
    scan, (exact, bounds) = prepare(gpu, chain), reference(chain)
    first: list[Array] = []
    for _ in range(repetitions):
        _poison(gpu, sum(array.nbytes for array in exact))
        gradients = [gpu.get(array) for array in scan()]
        first = first or gradients
        if [array.tobytes() for array in gradients] != [array.tobytes() for array in first]:
            return "other bits"
    pairs = zip(first, exact, bounds, strict=True)
    right = all((np.abs(array - x) <= bound).all() for array, x, bound in pairs)
    return None if right else "wrong"


def sanitize(gpu: Any) -> int:
    """Run a few scans and training steps of each family of kernels, small; how many."""
    cases = list(product(WHOLES, SCHEDULES, (np.float32, np.float64)))
    for count, case in enumerate(cases):
        chain = random_chain(np.random.default_rng(count), *case, most=16)
        why = _fault(gpu, chain, 1)
        assert why is None, f"{chain} is {why}"
    for kind, units, dtype in STEPS:
        assert _step_is_right(gpu, kind, units, dtype), f"a step of {kind} {units} is wrong"
    return len(cases) + len(STEPS)


def _step_is_right(gpu: Any, kind: str, units: int, dtype: Any) -> bool:
    """Whether a training step on samples of different lengths gives what one on the CPU gives."""
    rng = np.random.default_rng(units)
    net = getattr(jacobians, kind)(3, units, bidirectional=True, dtype=dtype, rng=rng)
    x = rng.standard_normal((6, 5, 3)).astype(dtype)
    above = rng.standard_normal((6, 5, 2 * units)).astype(dtype)

    def run(put: Callable[[Array], Any]) -> list[Array]:
        for name, array in net.params.items():
            setattr(net, name, put(array))
        step = net.training_step()
        output, last = step.forward(put(x), lengths=[6, 1, 4, 0, 6])
        grads = step.backward(put(above))
        return [*map(gpu.get, (output, last, grads.input, grads.state, *grads.params.values()))]

    expected, actual = run(lambda array: array), run(gpu.put)
    bound = 1e4 * np.finfo(dtype).eps
    pairs = zip(actual, expected, strict=True)
    return all(np.abs(a - b).max() <= bound * np.abs(b).max(initial=0) for a, b in pairs)


def prepare(gpu: Any, chain: RandomChain) -> Callable[[], Iterable[Any]]:
    """Return a scan of the chain with a plan, all on the device."""
    plan = sparsescan.plan(chain.jacobians, schedule=chain.schedule, device=gpu.device)
    jacobians = changed(chain.jacobians, gpu.put, gpu.csr)
    local = chain.local_grads
    if local is not None:
        local = [None if array is None else gpu.put(array) for array in local]
    grad = gpu.put(chain.grad)
    return lambda: plan.exclusive_scan(grad, jacobians, local_grads=local)


def reference(chain: RandomChain) -> tuple[Any, list[Array]]:
    """Back-propagation in float64 on the CPU, and how far a scan of the dtype may be from it.

    Every order of multiplication is within ``ε m |J_k| ⋯ |J_n| |∇x_n|``, with `m` the numbers that
    are summed up on the way.
    """
    exact = _linear(chain, lambda array: array.astype(np.float64))
    sizes = _linear(chain, lambda array: np.abs(array.astype(np.float64)))
    eps, terms, bounds = float(np.finfo(chain.grad.dtype).eps), 0, []
    for size in sizes:
        terms += size.shape[-1] + 2
        bounds.append(2 * eps * terms * size + 1e3 * np.finfo(chain.grad.dtype).tiny)
    return exact, bounds


def changed(jacobians: Any, change: Callable[[Array], Any], csr: Any = None) -> Any:
    """Change the values of a chain; `csr` changes a CSR array as a whole."""
    if isinstance(jacobians, CSRChain):
        return CSRChain.from_pattern(change(jacobians.data), jacobians.pattern)
    if isinstance(jacobians, np.ndarray):
        return change(jacobians)

    def step(jacobian: Any) -> Any:
        if isinstance(jacobian, BatchedCSR):
            return BatchedCSR.from_pattern(change(jacobian.data), jacobian.pattern)
        if isinstance(jacobian, np.ndarray):
            return change(jacobian)
        if csr is not None:
            return csr(jacobian)
        parts = change(jacobian.data), jacobian.indices, jacobian.indptr
        return sp.csr_array(parts, shape=jacobian.shape)

    return [step(jacobian) for jacobian in jacobians]


def _linear(chain: RandomChain, change: Callable[[Array], Array]) -> Any:
    local = chain.local_grads
    if local is not None:
        local = [None if array is None else change(array) for array in local]
    return sparsescan.exclusive_scan(
        change(chain.grad),
        changed(chain.jacobians, change),
        local_grads=local,
        schedule="linear",
        device="cpu",
    )


def _poison(gpu: Any, size: int) -> None:
    """Leave NaNs where the memory pool takes the next result from."""
    gpu.xp.full(max(size // 4, 1), np.nan, np.float32)


@dataclass(frozen=True)
class _Values:
    """Draws values with which a product neither grows nor shrinks fast.

    Normal ones, or their magnitudes, with which nothing cancels: those bounds are the tight ones.
    """

    rng: np.random.Generator
    dtype: Any
    positive: bool

    def __call__(self, shape: tuple[int, ...], entries: float = 1) -> Array:
        """Values for rows of that many entries."""
        values = self.rng.standard_normal(shape)
        values = np.abs(values) / entries if self.positive else values / np.sqrt(entries)
        return values.astype(self.dtype)


def _step(draw: _Values, form: str, shape: tuple[int, int], lead: tuple[int, ...]) -> Any:
    if not form.startswith("batched"):
        lead = ()
    if form.endswith("dense"):
        return draw((*lead, *shape), shape[1])
    if form == "diagonal" and shape[0] == shape[1]:
        return sp.diags_array(draw((shape[0],))).tocsr()
    indices, indptr, entries = _pattern(draw.rng, shape)
    data = draw((*lead, len(indices)), entries)
    if lead:
        return BatchedCSR(data, indices, indptr, shape)
    return sp.csr_array((data, indices, indptr), shape=shape)


def _pattern(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Array, Array, float]:
    """Return indices, row pointers, and the mean entries of a row, of which some are empty."""
    mask = rng.random(shape) < rng.choice([0.05, 0.2, 0.6])
    mask[rng.random(shape[0]) < 0.1] = False
    indptr = np.concatenate([[0], np.cumsum(mask.sum(axis=1))]).astype(np.int32)
    indices = np.nonzero(mask)[1].astype(np.int32)
    return indices, indptr, max(1.0, len(indices) / shape[0])
