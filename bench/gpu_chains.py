"""Chains on a GPU: the same bits every time, and right.

Random ones, a long one whose blocks wait for each other, one for every family of kernels, and a few
for compute-sanitizer. Each part passes what it knows to `save` as it goes: one that is stopped has
left what it had found.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

import sparsescan
from sparsescan import BatchedCSR, CSRChain, ImplicitChain, ImplicitPattern, Pattern, Schedule
from sparsescan import recurrent as cells

from . import workloads
from .peers import load_torch

Array = NDArray[Any]
Report = dict[str, Any]
# What a case has found: None, or why it is not right.
Case = Callable[[], str | None]

CHAINS, REPETITIONS = 200, 20
WHOLES = ("dense stack", "CSRChain", "list")
SCHEDULES = ("auto", "linear", "blelloch", "truncated", "chunked")
# Few, as kernels for small dense steps are compiled for their size.
SIZES = (1, 3, 20, 33, 64)
# Recurrent networks with weights in registers, of one lane and several; and not.
STEPS = (
    ("RNN", 20, np.float32),
    ("GRU", 20, np.float64),
    ("LSTM", 64, np.float32),
    ("LSTM", 130, np.float32),
)
# Networks, with weights in registers and not, of whose samples a block of an H100 has several where
# there are so many: it has 132 multiprocessors, which fewer would not fill.
SHARED = (("LSTM", 64), ("GRU", 130))
MANY = 2, 600  # steps and samples
# Cells, steps, and into how many chunks these are cut: in one launch, whose blocks wait for each
# other, and in three.
IMPLICIT = (("RNN", 64, 4), ("LSTM", 13, 3))
# How many times the rounding of the largest entry is too far from what is exact.
_FAR = 1e4
# Units, and inputs, of cells and networks.
_UNITS, _INPUTS = 20, 3
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
        sizes = np.full(n + 1, rng.choice(SIZES) if whole == "dense stack" else rng.integers(200))
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
    save: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Run random chains again and again; which of them gave other bits at times, or were wrong.

    The seed of chain `k` is ``[entropy, k]``; the entropy is fresh unless it is given. After each
    chain, what is known is passed to `save`.
    """
    entropy = np.random.SeedSequence().entropy if entropy is None else entropy
    # As text, since it is too long for some readers of JSON.
    report = {"entropy": str(entropy), "repetitions": repetitions, "asked": chains, "done": 0}
    failed: list[Report] = []
    for k in range(chains):
        chain = random_chain(np.random.default_rng([entropy, k]))
        why = _fault(gpu, chain, repetitions)
        if why is not None:
            failed.append({"chain": k, "what": str(chain), "why": why})
        report["done"] = k + 1
        save(report | {"failed": failed})
    return report | {"failed": failed}


def _fault(
    gpu: Any,
    chain: RandomChain,
    repetitions: int,
    after: Callable[[float], None] = lambda seconds: None,
    expected: tuple[Any, Any] | None = None,
) -> str | None:
    """Return why runs of a chain are not right, each of which has taken some seconds.

    What is expected is a :func:`reference`, which is made here by default.
    """
    scan, (exact, bounds) = prepare(gpu, chain), expected or reference(chain)
    first: list[bytes] = []
    for _ in range(repetitions):
        # Leave NaNs where the memory pool takes the next result from.
        gpu.xp.full(max(sum(array.nbytes for array in exact) // 4, 1), np.nan, np.float32)
        begin, result = time.perf_counter(), scan()
        gradients = [*map(gpu.get, result)] if isinstance(result, list) else [*gpu.get(result)]
        after(time.perf_counter() - begin)
        bits = [array.tobytes() for array in gradients]
        pairs = zip(gradients, exact, bounds, strict=True)
        if not first and not all((np.abs(array - x) <= bound).all() for array, x, bound in pairs):
            return "wrong"
        first = first or bits
        if bits != first:
            return "other bits"
    return None


# -- A long chain in one launch -------------------------------------------------------------------


def chained(
    gpu: Any,
    repetitions: int = REPETITIONS,
    *,
    steps: int = 30_000,
    batch: int = 16,
    units: int = _UNITS,
    chunks: int = 75,
    entropy: int | None = None,
    save: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Run implicit steps of an RNN in one launch again and again: other bits, or wrong ones.

    A block of each chunk and sample waits for the gradient of the chunk before, whose block has
    begun before it: of 1,200 an H100 runs 528 at once. What is known is passed to `save` before the
    first run and after each; there is none after one that is not right.
    """
    entropy = np.random.SeedSequence().entropy if entropy is None else entropy
    rng = np.random.default_rng(entropy)
    weights = np.linalg.qr(rng.standard_normal((units, units)))[0].astype(np.float32)
    # Magnitudes walk at random, and neither grow nor decay: squares of slopes are 1 on average.
    spread = 0.02
    slopes = np.exp(spread * rng.standard_normal((steps, batch, units), np.float32) - spread**2)
    grad = rng.standard_normal((batch, units), np.float32)
    pattern = ImplicitPattern([Pattern.diagonal(units), Pattern.dense((units, units))], shared=[1])
    jacobians, chunk = ImplicitChain([slopes, weights.ravel()], pattern), -(-steps // chunks)
    chain = RandomChain(grad, jacobians, None, Schedule.chunked(steps, chunks))
    failed: list[Report] = []
    seconds: list[float] = []
    report: Report = {
        "entropy": str(entropy),
        "what": f"{steps} implicit steps of {units} units and {batch} samples in {chunks} chunks",
        "blocks": -(-(steps - 1) // chunk) * batch,
        "asked": repetitions,
        "done": 0,
        "failed": failed,
        "seconds": seconds,
    }
    if not _is_one_launch(gpu, pattern, steps, batch, chunk):
        failed.append({"run": 0, "why": "three launches"})
    save(report)

    def after(taken: float) -> None:
        seconds.append(taken)
        report["done"] = len(seconds)
        save(report)

    # One step after the other, with nothing of the package, which would compile kernels first.
    exact = np.empty(slopes.shape)
    exact[0] = grad
    for t in range(steps - 1):
        np.matmul(slopes[t] * exact[t], weights.T.astype(np.float64), out=exact[t + 1])
    # A step adds a rounding of each of its sums, at random: ten times as much is wrong.
    far = 10 * units * _eps(np.float32) * np.sqrt(1 + np.arange(steps))[:, None, None]
    expected = exact, far * np.linalg.norm(exact, axis=-1, keepdims=True)
    why = _fault(gpu, chain, repetitions, after, expected)
    if why is not None:
        failed.append({"run": len(seconds) - 1, "why": why})
        save(report)
    return report


def _is_one_launch(gpu: Any, pattern: ImplicitPattern, steps: int, batch: int, chunk: int) -> bool:
    """Return whether steps in chunks of so many are one launch on a GPU; True elsewhere."""
    if gpu.device != "cuda":
        return True
    from sparsescan.execution.cuda.chunks import chunk_form, in_one_launch

    dtype = np.dtype(np.float32)
    form = chunk_form([pattern] * steps, dtype)
    return form is not None and in_one_launch(form, dtype, steps, batch, chunk)


# -- Every family of kernels ----------------------------------------------------------------------


def run_cases(cases: Mapping[str, Case], save: Callable[[Report], None] = lambda _: None) -> Report:
    """Run some cases, one after the other.

    Each of the ``cases`` has a ``name``, whether it is ``ok``, ``why`` not (None if it is), and its
    ``seconds``, with what is compiled. What is known is passed to `save` before and after each; the
    one that is ``running`` is named, and printed: its kernels may take a tool so long that it is
    stopped.
    """
    found: list[Report] = []
    report: Report = {"asked": len(cases), "done": 0, "running": None, "cases": found}
    for name, case in cases.items():
        print(f"{len(found) + 1} of {len(cases)}: {name}", flush=True)
        save(report | {"running": name})
        begin = time.perf_counter()
        try:
            why = case()
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"[:500]
        taken = round(time.perf_counter() - begin, 3)
        found.append({"name": name, "ok": why is None, "why": why, "seconds": taken})
        report["done"] = len(found)
        save(report)
    return report


def family_cases(gpu: Any) -> dict[str, Case]:
    """Return a small case of every family of kernels, beside float64 on the CPU.

    Cases make their data when they are called.
    """
    rng = np.random.default_rng(49)
    draw = _Values(rng, np.float32, positive=True)

    def chain(make: Callable[[], RandomChain]) -> Case:
        # A plan's first run, that in which a graph is captured, and one that starts it again.
        return lambda: _fault(gpu, make(), 3)

    def dense(steps: int, batch: int, size: int, tree: Schedule | str) -> RandomChain:
        stack = draw((steps, batch, size, size), size)
        local: list[Array | None] = [draw((batch, size)) for _ in range(steps)]
        return RandomChain(draw((batch, size)), stack, local, tree)

    def sparse(steps: int, batch: int, size: int) -> RandomChain:
        matrices = [_step(draw, "csr", (size, size), ()) for _ in range(steps)]
        return RandomChain(draw((batch, size)), matrices, None, "blelloch")

    def stencil(steps: int, side: int) -> RandomChain:
        grad, matrices = workloads.stencil(steps, side, np.float32)
        return RandomChain(grad, matrices, None, "linear")

    cases: dict[str, Case] = {
        "dense steps in chunks": chain(partial(dense, 97, 4, _UNITS, Schedule.chunked(97, 8))),
        "products of sparse matrices": chain(partial(sparse, 9, 2, 300)),
        "products of large dense steps": chain(partial(dense, 6, 2, 160, "blelloch")),
        "sweeps over small sparse steps": chain(partial(stencil, 50, 16)),
        "large sparse steps": chain(partial(stencil, 4, 128)),
        "repair of what is not finite": partial(_repair_fault, gpu, draw),
        "linear recurrence and its gradients": partial(_recurrence_fault, gpu, rng),
    }
    for kind in ("RNN", "GRU", "LSTM"):
        cases[f"implicit steps of {kind}"] = chain(partial(_implicit, kind, 97, 4, 4))
        cases[f"training step of {kind}"] = partial(_step_fault, gpu, kind, _UNITS, np.float32)
    for kind, units in SHARED:
        step = partial(_step_fault, gpu, kind, units, np.float32, *MANY)
        cases[f"training step of {kind}, several samples in a block"] = step
    return cases


def _implicit(kind: str, steps: int, batch: int, chunks: int) -> RandomChain:
    """Return implicit steps of the form that a cell has, with random slopes and weights."""
    draw = _Values(np.random.default_rng(steps), np.float32, positive=False)
    pattern = getattr(cells, f"{kind}Cell")(_INPUTS, _UNITS).implicit_pattern
    slopes, weights = pattern.factors
    values = [
        draw((*lead, factor.nnz), factor.nnz / factor.shape[0])
        for lead, factor in (((steps, batch), slopes), ((), weights))
    ]
    grad, chain = draw((batch, slopes.shape[1])), ImplicitChain(values, pattern)
    return RandomChain(grad, chain, None, Schedule.chunked(steps, chunks))


def _repair_fault(gpu: Any, draw: _Values) -> str | None:
    """Return why a chain with an infinite entry is not that of the linear scan."""
    stack = draw((12, 2, _UNITS, _UNITS), _UNITS)
    stack[5, 1, 3, 4] = np.inf
    chain = RandomChain(draw((2, _UNITS)), stack, None, Schedule.chunked(12, 3))
    with np.errstate(all="ignore"):
        exact = np.stack(_linear(chain, lambda array: array.astype(np.float64)))
    actual = np.stack([gpu.get(array) for array in prepare(gpu, chain)()])
    right = np.isclose(actual, exact, rtol=1e-4, atol=0, equal_nan=True).all()
    return None if right else "wrong"


def _recurrence_fault(
    gpu: Any, rng: np.random.Generator, steps: int = 40, batch: int = 3, size: int = 8
) -> str | None:
    """Return why states of a linear recurrence, or gradients in all that enters, are not right."""
    shapes = (steps, batch, size, size), (steps, batch, size), (batch, size), (steps, batch, size)
    matrices, offsets, initial, loss = (rng.standard_normal(shape, np.float32) for shape in shapes)
    matrices /= np.sqrt(size, dtype=np.float32)
    a, b, start, above = map(gpu.put, (matrices, offsets, initial, loss))
    y = sparsescan.affine_scan(a, b, start)
    grads = sparsescan.affine_scan_vjp(a, initial=start, states=y, grads=above)
    actual = [gpu.get(each) for each in (y, grads.matrices, grads.offsets, grads.initial)]

    states, within = [initial.astype(np.float64)], np.zeros((steps + 1, batch, size))
    for t in range(steps):
        states.append(np.einsum("bij,bj->bi", matrices[t], states[-1]) + offsets[t])
    for t in reversed(range(steps)):
        within[t + 1] += loss[t]
        within[t] = np.einsum("bij,bi->bj", matrices[t], within[t + 1])
    before, after = np.stack(states[:-1]), np.stack(states[1:])
    exact = after, within[1:, :, :, None] * before[:, :, None], within[1:], within[0]
    return _differs(actual, exact, np.float32)


def _differs(actual: Iterable[Array], exact: Iterable[Array], dtype: Any) -> str | None:
    """Return "wrong" if an array is far from another one, at the scale of its largest entry."""
    bound, pairs = _FAR * _eps(dtype), zip(actual, exact, strict=True)
    right = all(np.abs(a - b).max(initial=0) <= bound * np.abs(b).max(initial=0) for a, b in pairs)
    return None if right else "wrong"


# -- For compute-sanitizer ------------------------------------------------------------------------


def sanitizer_cases(gpu: Any) -> dict[str, Case]:
    """Return a few scans and training steps of each family of kernels, small."""
    cases: dict[str, Case] = {}
    for kind, steps, chunks in IMPLICIT:
        chain = _implicit(kind, steps, 2, chunks)
        cases[f"implicit steps of {kind}: {chain}"] = partial(_fault, gpu, chain, 1)
    for count, case in enumerate(product(WHOLES, SCHEDULES, (np.float32, np.float64))):
        chain = random_chain(np.random.default_rng(count), *case, most=16)
        cases[f"{count}: {chain}"] = partial(_fault, gpu, chain, 1)
    for kind, units, dtype in STEPS:
        name = f"training step of {kind} with {units} units in {np.dtype(dtype)}"
        cases[name] = partial(_step_fault, gpu, kind, units, dtype)
    for kind, units in SHARED:
        step = partial(_step_fault, gpu, kind, units, np.float32, *MANY)
        cases[f"training step of {kind} with {units} units, several samples in a block"] = step
    return cases


def _step_fault(
    gpu: Any, kind: str, units: int, dtype: Any, steps: int = 6, batch: int = 5
) -> str | None:
    """Return why a training step on samples of different lengths is not what PyTorch gives."""
    rng = np.random.default_rng(units)
    net = getattr(cells, kind)(_INPUTS, units, bidirectional=True, dtype=dtype, rng=rng)
    params = dict(net.params)
    x = rng.standard_normal((steps, batch, _INPUTS)).astype(dtype)
    above = rng.standard_normal((steps, batch, 2 * units)).astype(dtype)
    lengths = np.arange(batch) * (steps - 1) % (steps + 1)  # none, a few steps, or all
    exact = _by_pytorch(kind, params, x, above, lengths)

    for name, array in params.items():
        setattr(net, name, gpu.put(array))
    step = net.training_step()
    output, last = step.forward(gpu.put(x), lengths=lengths)
    grads = step.backward(gpu.put(above))
    results = output, last, grads.input, grads.state, *grads.params.values()
    return _differs(map(gpu.get, results), exact, dtype)


def _by_pytorch(
    kind: str, params: Mapping[str, Array], x: Array, above: Array, lengths: Array
) -> list[Array]:
    """Return outputs, last states and gradients of both directions on the CPU, in float64."""
    torch, units = load_torch(), above.shape[2] // 2
    module = getattr(torch.nn, kind)(_INPUTS, units, bidirectional=True, dtype=torch.float64)
    own = dict(module.named_parameters())
    for name, array in params.items():
        own[name].data[...] = torch.as_tensor(array)
    inputs = torch.as_tensor(x).double().requires_grad_()
    parts = 1 + (kind == "LSTM")
    start = torch.zeros(2, x.shape[1], parts * units, dtype=torch.float64, requires_grad=True)
    output, last = torch.zeros(above.shape, dtype=torch.float64), start.clone()
    for length in set(lengths.tolist()) - {0}:
        which = torch.as_tensor(np.flatnonzero(lengths == length))
        state = [part.contiguous() for part in start[:, which].split(units, dim=2)]
        rows, after = module(inputs[:length, which], tuple(state) if parts > 1 else state[0])
        output[:length, which] = rows
        last[:, which] = torch.cat(after, dim=2) if parts > 1 else after
    sources = inputs, start, *(own[name] for name in params)
    grads = torch.autograd.grad((output * torch.as_tensor(above)).sum(), sources)
    return [each.detach().numpy() for each in (output, last, *grads)]


# -- Scans and what they should give --------------------------------------------------------------


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
    are summed up on the way. For implicit steps of cells, whose gradients decay while that grows,
    the bound is a part of the largest entry of a gradient.
    """
    exact = _linear(chain, lambda array: array.astype(np.float64))
    if isinstance(chain.jacobians, ImplicitChain):
        return exact, [_FAR * _eps(chain.grad.dtype) * _largest(gradient) for gradient in exact]
    sizes = _linear(chain, lambda array: np.abs(array.astype(np.float64)))
    eps, terms, bounds = _eps(chain.grad.dtype), 0, []
    for size in sizes:
        terms += size.shape[-1] + 2
        bounds.append(2 * eps * terms * size + 1e3 * np.finfo(chain.grad.dtype).tiny)
    return exact, bounds


def _eps(dtype: Any) -> float:
    return float(np.finfo(dtype).eps)


def _largest(array: Array) -> Array:
    """Return the largest magnitude of each sample's entries."""
    largest: Array = np.abs(array).max(axis=-1, keepdims=True)
    return largest


def changed(jacobians: Any, change: Callable[[Array], Any], csr: Any = None) -> Any:
    """Change the values of a chain; `csr` changes a CSR array as a whole."""
    if isinstance(jacobians, CSRChain):
        return CSRChain.from_pattern(change(jacobians.data), jacobians.pattern)
    if isinstance(jacobians, ImplicitChain):
        return ImplicitChain([*map(change, jacobians.values)], jacobians.pattern)
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


def _linear(chain: RandomChain, change: Callable[[Array], Array]) -> list[Array]:
    """Return the gradients by NumPy and SciPy, one after the other.

    Nothing of the package is used, which would compile kernels for the CPU first.
    """
    jacobians, local = changed(chain.jacobians, change), chain.local_grads or []
    grad, grads = change(chain.grad), list[Array]()
    for k in range(len(jacobians)):
        grad = _applied(jacobians, k - 1, grad) if k else grad
        if k < len(local) and local[k] is not None:
            grad = grad + change(local[k])
        grads.append(grad)
    return grads


def _applied(jacobians: Any, k: int, grad: Array) -> Array:
    """Return a step of a chain times a gradient."""
    if isinstance(jacobians, ImplicitChain):
        for values, pattern in zip(jacobians.values, jacobians.pattern.factors, strict=True):
            grad = _product(values if values.ndim == 1 else values[k], pattern, grad)
        return grad
    if isinstance(jacobians, CSRChain):
        return _product(jacobians.data[k], jacobians.pattern, grad)
    step = jacobians[k]
    if isinstance(step, np.ndarray):
        product: Array = (step @ grad[..., None])[..., 0]
        return product
    return _product(step.data, step, grad)


def _product(values: Array, pattern: Any, grad: Array) -> Array:
    """Return a sparse matrix, which samples share or not, times a gradient."""
    terms, rows = values * grad[..., pattern.indices], pattern.shape[0]
    count = terms.shape[-1]
    ones = sp.csr_array((np.ones(count), np.arange(count), pattern.indptr), shape=(rows, count))
    sums: Array = (ones @ terms.reshape(math.prod(terms.shape[:-1]), count).T).T
    return sums.reshape(*terms.shape[:-1], rows)


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
