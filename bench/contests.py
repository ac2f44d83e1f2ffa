"""The table of the engine's benchmarks: for each work, its contenders and what is required.

``pytest --benchmark-only`` and ``python -m bench engine`` run these contests. The engine is the
contender :data:`OURS`. In a round each contender has a pause, in which the threads of the one
before go to sleep, calls for as long as it takes to warm up, then some that count.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, compress
from statistics import median
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import DTypeLike, NDArray

import sparsescan
from sparsescan import ScanPlan
from sparsescan.symbolic.schedule import Level, schedule_of

from . import workloads
from .machine import Cpu
from .peers import (
    MissingPeerError,
    jax_associative_scans,
    jax_scans,
    load_mkl,
    mkl_products,
    numpy_loops,
    of_sample,
    scipy_batch_loops,
    scipy_loop,
)
from .timing import (
    PAUSE,
    Call,
    call_for,
    calls_in,
    counting,
    fastest,
    finished,
    seconds,
    take_rounds,
    that_count,
)

MakeWork = Callable[[bool], "Work"]  # from whether it is reduced
Op = tuple[int, int, int]

OURS = "sparsescan"
NO_PLAN = "sparsescan, no plan asked for"
# In which form the steps of a stencil come, and what scans them.
PLAN, LIST, NEW_PLAN = (
    "CSRChain, plan reused",
    "list of csr_array, no plan asked for",
    "list of csr_array, a new plan",
)
_WARM_UP, _SECONDS_A_TURN = 0.2, 0.1
# How many rounds to try for one that nobody disturbs.
_PATIENCE = 4


class WrongResultError(AssertionError):
    """A contender that did not compute what is right."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One piece of work, ready to be timed."""

    # Each makes a contender's variants, or raises MissingPeerError.
    contenders: dict[str, Callable[[], dict[str, Call]]]
    bytes: int  # that must be moved, however it is done
    flops: int
    dtype: np.dtype[Any] = np.dtype(np.float32)  # noqa: RUF009
    # The array to compare, from a contender and what its call returned.
    answer: Callable[[str, Any], NDArray[Any]] = lambda contender, result: np.asarray(result)
    # The answer in float64; without it, contenders must agree with the engine's first peer.
    right: NDArray[Any] | None = None
    # For a contender whose call does only a part of the work, how many such parts there are.
    repeats: Mapping[str, float] = field(default_factory=dict)
    unchecked: tuple[str, ...] = ()  # contenders that compute something else, such as a floor

    def check(self, contender: str, result: Any) -> None:
        """Raise WrongResultError if a contender did not compute what is right."""
        if contender in self.unchecked:
            return
        expected = self._expected
        error = np.abs(self.answer(contender, result) - expected).max()
        largest = np.abs(expected).max()
        if not error <= np.sqrt(np.finfo(self.dtype).eps) * largest:
            raise WrongResultError(
                f"{contender} is wrong by {error:.1e}, where the largest entry is {largest:.1e}"
            )

    def variant(self, contender: str, device: Any, trials: int) -> tuple[str, Call]:
        """Return the name and call of a contender's fastest variant, if all are right."""
        variants = self.contenders[contender]()
        for call in variants.values():
            self.check(contender, finished(device, call))
        name, _ = fastest(
            {key: partial(finished, device, call) for key, call in variants.items()}, trials
        )
        return name, variants[name]

    def start(
        self, device: Any, trials: int, skipped: dict[str, str]
    ) -> tuple[dict[str, Call], dict[str, str]]:
        """Return the fastest calls, and their variants, of contenders that are not skipped.

        A peer that fails, other than by not being there, is skipped as well; but a wrong result, or
        a failure of ours, is an error.
        """
        calls: dict[str, Call] = {}
        variants: dict[str, str] = {}
        for contender in [name for name in self.contenders if name not in skipped]:
            try:
                variants[contender], calls[contender] = self.variant(contender, device, trials)
            except MissingPeerError as missing:
                skipped[contender] = str(missing)
            except Exception as error:
                if contender.startswith(OURS) or isinstance(error, WrongResultError):
                    raise
                traceback.print_exc()
                skipped[contender] = f"{type(error).__name__}: {error}"[:200]
        return calls, variants

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

    A ratio is the time of another contender over the engine's; None where nothing is asked.
    """

    name: str
    work: str
    make: MakeWork
    required: Mapping[str, float | None]


def measure(
    contest: Contest, rounds: int, reduced: bool, patience: int = _PATIENCE
) -> dict[str, Any]:
    """All that the contenders took; up to `patience` times as many rounds if others disturb."""
    work = contest.make(reduced)
    skipped: dict[str, str] = {}
    calls, variants = work.start(Cpu(), 1 if reduced else 5, skipped)
    times = {name: calls_in(_SECONDS_A_TURN, Cpu(), call, 1, 100) for name, call in calls.items()}
    samples: dict[str, list[list[float]]] = {name: [] for name in calls}
    cores: dict[str, list[float]] = {name: [] for name in calls}

    def take(_: list[float]) -> None:
        for name, call in calls.items():
            time.sleep(0 if reduced else PAUSE)
            call_for(call, 0 if reduced else _WARM_UP)
            turn, cpu = time.perf_counter(), time.process_time()
            parts = work.repeats.get(name, 1)
            samples[name].append([parts * taken for taken in seconds(call, times[name])])
            cores[name].append((time.process_time() - cpu) / (time.perf_counter() - turn))

    used = take_rounds(take, rounds, patience)
    for contender, call in calls.items():
        work.check(contender, call())  # no call may have changed what the next one reads
    counted = that_count(used)
    kept = {name: [*chain(*counting(turns, counted))] for name, turns in samples.items()}
    medians = {name: median(taken) for name, taken in kept.items()}
    ceilings = Cpu().ceilings(work.bytes, work.dtype)
    return {
        "name": contest.name,
        "work": contest.work,
        "missing": {peer: skipped[peer] for peer in contest.required if peer in skipped},
        "median_seconds": medians,
        "ratios": {
            name: {
                "required": required,
                "measured": medians[name] / medians[OURS] if name in medians else None,
                "skipped": skipped.get(name),
            }
            for name, required in contest.required.items()
        },
        "floor": {
            "bytes": work.bytes,
            "bytes per second": ceilings.bytes_per_second,
            "flops": work.flops,
            "flops per second": ceilings.flops_per_second,
            "seconds": ceilings.seconds(work.bytes, work.flops),
        },
        "variants": variants,
        "parts_of_which_one_was_timed": dict(work.repeats),
        "cores_used": {name: median(compress(used, counted)) for name, used in cores.items()},
        "cores_others_used": used,
        "rounds_that_count": counted,
        "samples_seconds": samples,
    }


def plan_of(jacobians: Sequence[Any], *levels: list[Op], device: str | None = None) -> ScanPlan:
    """Return a plan of these levels of operations alone, so not all of its gradients are made."""
    tables = [
        Level(f"level {k}", np.array(ops), np.arange(len(ops) + 1)) for k, ops in enumerate(levels)
    ]
    schedule = schedule_of(len(jacobians), tables, f"only({levels})")
    return sparsescan.plan(jacobians, schedule=schedule, device=device)


def csr_bytes(matrix: sp.csr_array) -> int:
    return int(matrix.data.nbytes + matrix.indices.nbytes + matrix.indptr.nbytes)


def product_flops(a: sp.csr_array, b: sp.csr_array) -> int:
    """FLOPs of ``a @ b``: twice its multiply-adds."""
    return 2 * int(np.diff(b.indptr).astype(np.int64)[a.indices].sum())


def spgemm(reduced: bool) -> Work:
    """Return the numeric product of two Jacobians; the engine knows its pattern.

    A plan offers no bare product, so this one has a schedule that is nothing else: the product
    ``[1, 3)`` of the first two Jacobians, and no gradient but the first. A second plan applies the
    product to that, to show that it is right.
    """
    j2, j1 = workloads.conv_pair(6, (4, 8, 16)) if reduced else workloads.conv_pair()
    grad = np.ones(j2.shape[1], j2.dtype)
    last = sparsescan.Pattern.diagonal(j1.shape[0])
    chain, values = [j2, j1, last], [j2.data, j1.data, np.ones(last.nnz, j1.dtype)]

    def ours() -> dict[str, Call]:
        plan = plan_of(chain, [(1, 2, 3)])
        return {"plan": lambda: plan.exclusive_scan(grad, values)}

    def answer(contender: str, result: Any) -> NDArray[Any]:
        if contender == OURS:
            applied = plan_of(chain, [(1, 2, 3)], [(0, 1, 3)])
            return np.asarray(applied.exclusive_scan(grad, values)[2])
        if contender == "MKL":  # handles that are kept give nothing back
            result = load_mkl().dot_product_mkl(j1, j2)
        return np.asarray(result @ grad)

    return Work(
        contenders={
            OURS: ours,
            "SciPy @": lambda: {"csr_array @ csr_array": lambda: j1 @ j2},
            "MKL": lambda: mkl_products(j1, j2),
        },
        bytes=sum(map(csr_bytes, (j1, j2, j1 @ j2))),
        flops=product_flops(j1, j2),
        answer=answer,
    )


def stencil(n: int, side: int, dtype: DTypeLike, form: str = PLAN) -> MakeWork:
    """Make steps of one pattern: a :class:`CSRChain` and a plan, or a list of matrices.

    The matrices of the list have index arrays of their own; those of the chain's peer share them.
    """

    def make(reduced: bool) -> Work:
        grad, chain = data = workloads.stencil(20 if reduced else n, 8 if reduced else side, dtype)
        matrices = data.matrices(shared=form == PLAN)
        pattern_bytes = chain.indices.nbytes + chain.indptr.nbytes
        if form != PLAN:
            pattern_bytes *= 1 + len(chain)
        plan = sparsescan.plan(chain)
        ours = {
            PLAN: lambda: plan.exclusive_scan(grad, chain),
            LIST: lambda: sparsescan.exclusive_scan(grad, matrices),
            NEW_PLAN: lambda: sparsescan.plan(matrices).exclusive_scan(grad, matrices),
        }
        return Work(
            contenders={
                OURS: lambda: {form: ours[form]},
                "SciPy loop": lambda: {"csr_array @ ndarray": scipy_loop(grad, matrices)},
            },
            bytes=chain.data[:-1].nbytes + len(chain) * grad.nbytes + pattern_bytes,
            flops=2 * (len(chain) - 1) * chain.nnz,
            dtype=grad.dtype,
        )

    return make


def rnn(reduced: bool) -> Work:
    """Back-propagation through time with dense Jacobians of a batch."""
    data = workloads.tanh_rnn(20, 2, 4) if reduced else workloads.tanh_rnn(1000, 16, 20)
    grad, jacobians = data
    plan = sparsescan.plan(jacobians)
    read = jacobians[:-1]
    return Work(
        contenders={
            OURS: lambda: {"plan": lambda: plan.exclusive_scan(grad, jacobians)},
            NO_PLAN: lambda: {"exclusive_scan": lambda: sparsescan.exclusive_scan(grad, jacobians)},
            "NumPy loop": lambda: numpy_loops(*data),
            "jax.lax.scan": lambda: jax_scans(*data),
            "jax.lax.associative_scan": lambda: jax_associative_scans(*data),
        },
        bytes=read.nbytes + len(jacobians) * grad.nbytes,
        flops=2 * read.size,
        dtype=grad.dtype,
    )


def exact_gradients(grad: NDArray[Any], jacobians: Sequence[Any]) -> list[NDArray[Any]]:
    """All gradients of a batch, from the last to the first, in float64."""
    samples = [
        scipy_loop(x, [of_sample(jacobian, b).astype(np.float64) for jacobian in jacobians])()
        for b, x in enumerate(grad.astype(np.float64))
    ]
    return [np.stack(of_samples) for of_samples in zip(*samples, strict=True)]


def vgg11(batch: int) -> MakeWork:
    """Back-propagation through a pruned network; the samples share the Jacobians of its weights."""

    def make(reduced: bool) -> Work:
        net = workloads.vgg11(0.97, 8, 8) if reduced else workloads.vgg11(0.97)
        rng = np.random.default_rng(4)
        images = rng.standard_normal((batch, *net.input_shape), np.float32)
        jacobians = net.jacobians(net.activations(images))
        values = [jacobian.data for jacobian in jacobians]
        grad = rng.standard_normal((batch, net.patterns[0].shape[1]), np.float32)
        plan = net.plan(schedule="auto", batch=batch, dtype=np.float32)
        gradients = exact_gradients(grad, jacobians)

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


def _stencil_contest(
    n: int, side: int, dtype: str, ratio: float | None, form: str = PLAN
) -> Contest:
    key = {PLAN: "plan", LIST: "list", NEW_PLAN: "new-plan"}[form]
    return Contest(
        f"stencil-n={n}-unknowns={side**2}-{dtype}-{key}",
        f"n={n:,}, {side**2:,} unknowns (5-point stencil), {form}, {dtype}",
        stencil(n, side, dtype, form),
        {"SciPy loop": ratio},
    )


CONTESTS = (
    Contest(
        "spgemm-conv-64-128-256",
        "numeric SpGEMM, conv 64→128→256 at 16×16, 3×3, 97% pruned, float32",
        spgemm,
        {"SciPy @": 4, "MKL": 2},
    ),
    _stencil_contest(1000, 16, "float64", 4),
    _stencil_contest(1000, 16, "float64", 1, LIST),
    _stencil_contest(1000, 16, "float64", None, NEW_PLAN),
    _stencil_contest(100, 256, "float32", 1.4),
    _stencil_contest(100, 256, "float64", 1.4),
    Contest(
        "rnn-T=1000-B=16-H=20-float32",
        "T=1,000, B=16, H=20 dense, plan reused, float32",
        rnn,
        {NO_PLAN: None, "NumPy loop": 2, "jax.lax.associative_scan": 30, "jax.lax.scan": 1.3},
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
