"""The steps of a scan through a pruned network, and its backward pass, by all contenders."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from statistics import median
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils import prune

import sparsescan
from sparsescan import BatchedCSR, Pattern, Schedule
from sparsescan.jacobians import Sequential, from_torch
from sparsescan.jacobians._operator import as_matrix
from sparsescan.schedule import Level

from . import machine
from .contests import OURS
from .gpu_cusparse import NumericSpGEMM, load
from .peers import (
    Call,
    MissingPeerError,
    fastest,
    load_mkl,
    mkl_products,
    of_sample,
    scipy_batch_loops,
    seconds,
)
from .vgg11_flop import Analysis, Interval, Step, layer_names

__all__ = [
    "CUSPARSE",
    "MKL",
    "OURS",
    "PARAMETERS",
    "REUSE",
    "SCIPY",
    "TORCH",
    "TORCH_PARAMETERS",
    "UP_SWEEP",
    "VALUES",
    "Chain",
    "Cpu",
    "Nodes",
    "Work",
    "backward",
    "call_seconds",
    "product_step",
    "race",
    "vector_step",
]

Array = NDArray[Any]

SCIPY, MKL, CUSPARSE, REUSE = "SciPy", "MKL", "cuSPARSE", "cuSPARSE, numeric stage"
TORCH, TORCH_PARAMETERS = "PyTorch, dense", "PyTorch, dense, with parameters"
VALUES, PARAMETERS = f"{OURS}, with values", f"{OURS}, with values and parameters"
UP_SWEEP = f"{OURS}, the paper's schedule"

# Multiply-adds of a step that is timed, and entries of a matrix: seconds, and some gigabytes.
_MOST_WORK, _MOST_ENTRIES = 1_000_000_000, 200_000_000
# OpenMP threads spin for 200 ms before they sleep, on a core that the next contender needs.
_PAUSE = 0.25
# Seconds that a turn is meant to take, and how many calls it may be.
_SECONDS_A_TURN = 0.05
_FEWEST, _MOST = 2, 30
_ITEM = 4  # bytes of a float32


class Cpu:
    """What :class:`bench.gpu_device.Cuda` offers, on the CPU."""

    xp = np
    device = None
    others = ("cpu", "cpu")

    put = get = staticmethod(np.asarray)

    def synchronize(self) -> None:
        pass

    def samples(self, call: Call, times: int, clock: str, cold: bool) -> list[float]:
        return seconds(call, times)


# -- The network's Jacobians ----------------------------------------------------------------------


class Chain:
    """Jacobians and gradients of a network at some images.

    Parameters
    ----------
    net : nn.Sequential
        Its first layer is the convolutional part; it may be pruned.
    images : Tensor, shape (batch, 3, 32, 32)
        Where.
    labels : Tensor
        What they show.
    device : Cpu or Cuda
        Where everything is computed; the network has to be there.

    Attributes
    ----------
    net : Sequential
        The convolutional part as operators.
    xs, values : list of array
        Activations from the first to the last; values of the Jacobians from the last to the first.
    grad : array, shape (batch, d)
        Of the loss, in the last activation.
    jacobians : list of csr_array or BatchedCSR
        From the last to the first, in host memory.
    """

    def __init__(self, net: Any, images: torch.Tensor, labels: torch.Tensor, device: Any) -> None:
        self.device, self.features = device, net[0]
        self.images = images.to(device.others[0])
        y = self.features(self.images).detach().requires_grad_()
        loss = nn.functional.cross_entropy(net[1:](y), labels.to(device.others[0]))
        (self.torch_grad,) = torch.autograd.grad(loss, y)
        self.net = Sequential(from_torch(self.features, self.images.shape[1:]))
        self.xs = self.net.activations(device.xp.asarray(self.images))
        self.values = self.net.values(self.xs)
        self.grad = device.xp.asarray(self.torch_grad.reshape(len(images), -1))
        self.jacobians = [
            as_matrix(device.get(values), pattern)
            for values, pattern in zip(self.values, self.net.patterns, strict=True)
        ]

    @cached_property
    def grads(self) -> list[Array]:
        """All gradients, from the last to the first, in float64."""
        samples = []
        for b, grad in enumerate(self.device.get(self.grad)):
            found = [grad.astype(np.float64)]
            for jacobian in self.jacobians[:-1]:
                found.append(of_sample(jacobian, b).astype(np.float64) @ found[-1])
            samples.append(found)
        return [np.stack(of_samples) for of_samples in zip(*samples, strict=True)]


class Nodes:
    """Elements and products as matrices, for the first sample of a chain.

    Parameters
    ----------
    chain : Chain
        Of any batch.
    *schedules : Schedule
        Which products there are.

    Attributes
    ----------
    steps : list of Step
        Of all schedules, each once: a vector by each matrix, and every product.
    patterns : dict
        By intervals.
    """

    def __init__(self, chain: Chain, *schedules: Schedule) -> None:
        self.chain = chain
        analysis = Analysis(chain.net.patterns, layer_names(chain.net))
        every = [step for schedule in schedules for step in analysis.steps(schedule)]
        products = {(step.start, step.stop): step for step in every if not step.vector}
        vectors = {step.operands[1]: step for step in every if step.vector}
        self.steps = [*vectors.values(), *products.values()]
        self.patterns = analysis.patterns
        self._products = products
        self._made = {
            (k, k + 1): of_sample(jacobian, 0) for k, jacobian in enumerate(chain.jacobians, 1)
        }

    def matrix(self, interval: Interval) -> sp.csr_array:
        """As SciPy multiplies it up: entries that happen to be zero are dropped; sorted."""
        if interval not in self._made:
            left, right = self._products[interval].operands
            self._made[interval] = self.matrix(right) @ self.matrix(left)
            self._made[interval].sort_indices()
        return self._made[interval]

    def values(self, interval: Interval) -> Array:
        """In the order of the pattern, zeros included."""
        return in_pattern(self.matrix(interval), self.patterns[interval])

    def too_large(self, step: Step) -> str | None:
        """Why a step is not timed, if it is not."""
        if step.flop > 2 * _MOST_WORK:
            return f"{step.flop // 2:,} multiply-adds"
        matrices = [*step.operands[step.vector :], *[(step.start, step.stop)] * (not step.vector)]
        for interval in matrices:
            if self.patterns[interval].nnz > _MOST_ENTRIES:
                return f"{self.patterns[interval].nnz:,} entries"
            made = self._products.get(interval)
            if made is not None and made is not step and (reason := self.too_large(made)):
                return reason
        return None


def in_pattern(matrix: sp.csr_array, pattern: Pattern) -> Array:
    """The values of a sorted matrix in the order of a pattern that has all of its entries."""
    if matrix.nnz == pattern.nnz:
        return matrix.data
    values = np.empty(pattern.nnz, matrix.dtype)
    for first in range(0, pattern.shape[0], 256):
        block = matrix[first : first + 256].toarray()
        ends = pattern.indptr[first : first + len(block) + 1]
        rows = np.repeat(np.arange(len(block)), np.diff(ends))
        values[ends[0] : ends[-1]] = block[rows, pattern.indices[ends[0] : ends[-1]]]
    return values


# -- Works ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Something to be timed.

    Attributes
    ----------
    contenders : dict
        For each contender what makes the variants of its call; it may raise MissingPeerError.
    answer : callable
        What to compare, from a contender and what its call returned.
    right : ndarray
        The answer in float64.
    bytes, flop : int
        What must be moved and computed, however it is done.
    """

    contenders: Mapping[str, Callable[[], dict[str, Call]]]
    answer: Callable[[str, Any], Array]
    right: Array
    bytes: int
    flop: int

    def check(self, contender: str, result: Any) -> None:
        """Stop if a contender did not compute what is right."""
        error = np.abs(self.answer(contender, result) - self.right).max()
        if not error <= np.sqrt(np.finfo(np.float32).eps) * np.abs(self.right).max():
            raise AssertionError(f"{contender} is wrong: {error:.1e} from what is right")


def vector_step(nodes: Nodes, step: Step) -> Work:
    """A gradient multiplied by a layer's Jacobian, or by a product."""
    device, interval = nodes.chain.device, step.operands[1]
    pattern, matrix = nodes.patterns[interval], nodes.matrix(interval)
    x = nodes.chain.grads[step.mid - 1][0].astype(np.float32)
    grad = device.put(x)

    def ours() -> dict[str, Call]:
        last = Pattern.diagonal(pattern.shape[0])
        plan = sparsescan.plan([pattern, last], schedule="linear", device=device.device)
        values = [device.put(v) for v in (nodes.values(interval), np.ones(last.nnz, np.float32))]
        return {"plan": lambda: plan.exclusive_scan(grad, values)}

    def answer(contender: str, result: Any) -> Array:
        index = {OURS: 1, TORCH: 0}.get(contender)
        found: Array = device.get(result if index is None else result[index])
        return found.reshape(-1)

    peers: dict[str, Callable[[], dict[str, Call]]] = {
        SCIPY: lambda: {"csr_array @ ndarray": lambda: matrix @ x},
        MKL: lambda: _mkl_vectors(matrix, x),
    }
    if not isinstance(device, Cpu):
        peers = {CUSPARSE: lambda: _cusparse_vectors(device, matrix, grad)}
    if step.stop == step.mid + 1:
        peers[TORCH] = lambda: _torch_layer(nodes.chain, step.mid)
    return Work(
        contenders={OURS: ours, **peers},
        answer=answer,
        right=matrix.astype(np.float64) @ x,
        bytes=_bytes(pattern) + _ITEM * sum(pattern.shape),
        flop=step.flop,
    )


def product_step(nodes: Nodes, step: Step) -> Work:
    """The product of two matrices, checked by what it makes of a vector."""
    device = nodes.chain.device
    left, right = (nodes.matrix(interval) for interval in step.operands)
    last = Pattern.diagonal(right.shape[0])
    patterns = [*(nodes.patterns[interval] for interval in step.operands), last]
    x = np.random.default_rng(0).uniform(0.5, 1.5, left.shape[1]).astype(np.float32)
    grad = device.put(x)

    @cache
    def values() -> list[Any]:
        host = [nodes.values(interval) for interval in step.operands]
        return [device.put(v) for v in (*host, np.ones(last.nnz, np.float32))]

    def plan(*ops: tuple[int, int, int]) -> sparsescan.ScanPlan:
        """One with these operations and no others, so not all of its gradients are made."""
        levels = [Level("product", np.array([op]), np.array([0, 1])) for op in ops]
        schedule = Schedule(3, levels, f"product{ops}")
        return sparsescan.plan(patterns, schedule=schedule, device=device.device)

    def ours() -> dict[str, Call]:
        product = plan((1, 2, 3))
        return {"plan": lambda: product.exclusive_scan(grad, values())}

    def answer(contender: str, result: Any) -> Array:
        if contender == OURS:
            applied = plan((1, 2, 3), (0, 1, 3)).exclusive_scan(grad, values())
            return np.asarray(device.get(applied[2]))
        if contender == MKL:  # handles that are kept give nothing back
            result = load_mkl().dot_product_mkl(right, left)
        host = result.get() if hasattr(result, "get") else result
        return np.asarray(host @ x)

    peers: dict[str, Callable[[], dict[str, Call]]] = {
        SCIPY: lambda: {"csr_array @ csr_array": lambda: right @ left},
        MKL: lambda: mkl_products(right, left),
    }
    if not isinstance(device, Cpu):
        pair = cache(lambda: (device.csr(right), device.csr(left)))
        peers = {
            CUSPARSE: lambda: {"cusparse.spgemm": lambda: device.spgemm(*pair())},
            REUSE: lambda: {"SpGEMMreuse_compute": NumericSpGEMM(device, load(), *pair())},
        }
    out = nodes.patterns[step.start, step.stop]
    return Work(
        contenders={OURS: ours, **peers},
        answer=answer,
        right=right.astype(np.float64) @ (left.astype(np.float64) @ x),
        bytes=sum(map(_bytes, patterns[:2])) + _ITEM * out.nnz,
        flop=step.flop,
    )


def backward(chain: Chain, other: Schedule | None = None) -> Work:
    """All gradients of the convolutional part; with those of its parameters where it is said.

    By the planner's schedule; by another one as well, if there is one.
    """
    net, device, batch = chain.net, chain.device, len(chain.images)
    plan = net.plan(batch=batch, dtype=np.float32, device=device.device)
    buffers = [device.xp.empty_like(values) for values in chain.values]
    loop = SCIPY if isinstance(device, Cpu) else CUSPARSE

    def with_values() -> Any:
        return plan.exclusive_scan(chain.grad, net.values(chain.xs, out=buffers))

    def with_parameters() -> Any:
        grads = with_values()
        return [*grads, net.param_grads(chain.xs, grads)]

    def by_other() -> dict[str, Call]:
        plan = net.plan(schedule=other, batch=batch, dtype=np.float32, device=device.device)
        return {"plan": lambda: plan.exclusive_scan(chain.grad, chain.values)}

    def answer(contender: str, result: Any) -> Array:
        """Gradients of the activations, each relative to its largest entry."""
        found = result[: len(net)]
        if contender in (TORCH, TORCH_PARAMETERS):
            found = [chain.torch_grad, *result[: len(net) - 1]]
        elif contender == loop:
            found = [np.stack(x) if isinstance(x, list) else device.get(x).T for x in result]
        pairs = zip(found, chain.grads, strict=True)
        return np.concatenate([_relative(device.get(x), right) for x, right in pairs])

    read = zip(net.patterns[:-1], chain.values, strict=False)
    return Work(
        contenders={
            OURS: lambda: {"plan": lambda: plan.exclusive_scan(chain.grad, chain.values)},
            VALUES: lambda: {"values into out=, plan": with_values},
            PARAMETERS: lambda: {"values, plan, param_grads": with_parameters},
            **({UP_SWEEP: by_other} if other else {}),
            loop: lambda: (
                scipy_batch_loops(chain.grad, chain.jacobians)
                if loop == SCIPY
                else _cusparse_loops(chain)
            ),
            TORCH: lambda: _torch_backward(chain, parameters=False),
            TORCH_PARAMETERS: lambda: _torch_backward(chain, parameters=True),
        },
        answer=answer,
        right=np.concatenate([_relative(x, x) for x in chain.grads]),
        bytes=_ITEM * sum(x.size for x in chain.grads)
        + sum(_bytes(pattern) - _ITEM * pattern.nnz + values.nbytes for pattern, values in read),
        flop=2 * batch * sum(pattern.nnz for pattern in net.patterns[:-1]),
    )


def call_seconds(device: Any) -> float:
    """What a call of a plan takes that computes next to nothing."""
    one = Pattern.dense((1, 1))
    plan = sparsescan.plan([one, one], schedule="linear", device=device.device)
    grad, values = (device.put(np.ones(size, np.float32)) for size in (1, (2, 1)))
    call = partial(plan.exclusive_scan, grad, values)
    return float(median(device.samples(call, 100, "call", False)))


def _relative(x: Array, right: Array) -> Array:
    """Flat, in multiples of the largest entry of what is right."""
    return np.asarray(x).reshape(-1) / (np.abs(right).max() or 1.0)


def _bytes(pattern: Pattern) -> int:
    """Of the values of a matrix, and of its indices where there have to be any."""
    index = 0 if pattern.kind != "general" else pattern.nnz + pattern.shape[0] + 1
    return _ITEM * pattern.nnz + pattern.index_dtype.itemsize * index


# -- Peers ----------------------------------------------------------------------------------------


def _mkl_vectors(matrix: sp.csr_array, x: Array) -> dict[str, Call]:
    """``A @ x`` as `sparse_dot_mkl` offers it, and with a handle that is made only once."""
    mkl = load_mkl()
    from sparse_dot_mkl._mkl_interface import MKL as FUNCTIONS
    from sparse_dot_mkl._mkl_interface import _create_mkl_sparse, matrix_descr

    handle, out = _create_mkl_sparse(matrix)[0], np.empty(matrix.shape[0], np.float32)

    def kept_handle() -> Array:
        _ = matrix  # which the handle points into
        status = FUNCTIONS._mkl_sparse_s_mv(10, 1.0, handle, matrix_descr(), x, 0.0, out)
        if status:
            raise RuntimeError(f"mkl_sparse_s_mv returned status {status}")
        return out

    return {
        "dot_product_mkl": lambda: mkl.dot_product_mkl(matrix, x),
        "mkl_sparse_s_mv, kept handle": kept_handle,
    }


def _cusparse_vectors(gpu: Any, matrix: sp.csr_array, x: Any) -> dict[str, Call]:
    on_device = gpu.csr(matrix)
    return {
        "matrix @ vector": lambda: on_device @ x,
        "cusparse.spmv": lambda: gpu.spmv(on_device, x),
    }


def _cusparse_loops(chain: Chain) -> dict[str, Call]:
    """Back-propagation of arrays ``(d, batch)``; samples that share no matrix share a large one."""
    gpu, batch = chain.device, len(chain.images)
    first = gpu.xp.ascontiguousarray(chain.grad.T)
    steps = [
        (gpu.csr(interleaved(jacobian) if own else jacobian), own)
        for jacobian in chain.jacobians[:-1]
        for own in (batch > 1 and isinstance(jacobian, BatchedCSR),)
    ]
    if batch == 1:
        steps = [(gpu.csr(of_sample(jacobian, 0)), True) for jacobian in chain.jacobians[:-1]]

    def loop(multiply: Callable[[Any, Any], Any]) -> Call:
        def run() -> list[Any]:
            gradients = [first]
            for matrix, own in steps:
                x = gradients[-1]
                made = multiply(matrix, x.reshape(-1) if own else x)
                gradients.append(made.reshape(-1, batch))
            return gradients

        return run

    variants = {"matrix @ array": loop(lambda matrix, x: matrix @ x)}
    if batch == 1:
        variants["cusparse.spmv"] = loop(gpu.spmv)
    return variants


def interleaved(jacobian: BatchedCSR) -> sp.csr_array:
    """One matrix for all samples, of vectors whose entry ``(i, b)`` is at ``i * batch + b``."""
    batch = len(jacobian.data)
    made = sp.block_diag([jacobian[b] for b in range(batch)], "csr")
    rows, cols = (np.arange(batch * size).reshape(batch, -1).T.ravel() for size in jacobian.shape)
    mixed = sp.csr_array(made[rows][:, cols])
    mixed.sort_indices()
    return mixed


def _torch_layer(chain: Chain, k: int) -> dict[str, Call]:
    """PyTorch's backward of the layer whose Jacobian is element `k`, dense, of the first sample."""
    layer = chain.features[len(chain.net) - k]
    x = torch.as_tensor(chain.xs[len(chain.net) - k][:1], device=chain.device.others[0])
    grad = torch.from_numpy(chain.grads[k - 1][:1].astype(np.float32)).to(x.device)

    def variant(form: torch.memory_format) -> Call:
        given = x.detach().clone(memory_format=form).requires_grad_()
        y = layer(given)
        out = grad.reshape(y.shape).contiguous(memory_format=form)
        return lambda: torch.autograd.grad(y, given, out, retain_graph=True)

    return _in_formats(variant)


def _torch_backward(chain: Chain, *, parameters: bool) -> dict[str, Call]:
    """Gradients of all activations but the first, from the last to the first, and of parameters."""

    def variant(form: torch.memory_format) -> Call:
        features = _copied(chain.features).to(chain.device.others[0], memory_format=form)
        x = chain.images.contiguous(memory_format=form)
        xs = []
        for layer in features:
            x = layer(x)
            xs.append(x)
        sources = [*xs[-2::-1], *(features.parameters() if parameters else ())]
        out = chain.torch_grad.contiguous(memory_format=form)
        return lambda: torch.autograd.grad(x, sources, out, retain_graph=True)

    return _in_formats(variant)


def _in_formats(variant: Callable[[torch.memory_format], Call]) -> dict[str, Call]:
    return {
        "contiguous": variant(torch.contiguous_format),
        "channels last": variant(torch.channels_last),
    }


def _copied(features: nn.Sequential) -> nn.Sequential:
    """The same layers; what pruning has made of a weight cannot be copied as it is."""
    layers: list[nn.Module] = []
    for layer in features:
        if not isinstance(layer, nn.Conv2d):
            layers.append(layer)
            continue
        conv = nn.Conv2d(layer.in_channels, layer.out_channels, 3, padding=1)
        prune.custom_from_mask(conv, "weight", layer.weight_mask.cpu())
        conv.load_state_dict(layer.state_dict())
        layers.append(conv)
    return nn.Sequential(*layers)


# -- Taking turns ---------------------------------------------------------------------------------


def race(works: Mapping[str, Work], device: Any, rounds: int) -> dict[str, Any]:
    """Time all contenders for some works; a turn of one is all of its works.

    Returns
    -------
    dict
        ``works``: of each its samples, medians and floor, in seconds, and which variants were the
        fastest; ``missing``: peers and why they are not there.
    """
    calls: dict[str, dict[str, Call]] = {}
    times: dict[tuple[str, str], int] = {}
    missing: dict[str, str] = {}
    variants: dict[str, dict[str, str]] = {name: {} for name in works}
    for name, work in works.items():
        for contender, make in work.contenders.items():
            found = _fastest(name, contender, make, work, device, missing)
            if found is None:
                continue
            variants[name][contender], call = found
            calls.setdefault(contender, {})[name] = call
            once = min(seconds(partial(_done, device, call), 1))
            times[contender, name] = max(_FEWEST, min(_MOST, round(_SECONDS_A_TURN / once)))
    samples: dict[str, dict[str, list[float]]] = {
        name: {contender: [] for contender in of} for name, of in variants.items()
    }
    for _ in range(rounds):
        for contender, of in calls.items():
            time.sleep(_PAUSE)
            for name, call in of.items():
                taken = device.samples(call, times[contender, name], "call", False)
                samples[name][contender] += [round(s, 9) for s in taken]
    return {
        "works": {
            name: {
                "flop": work.flop,
                "bytes": work.bytes,
                "floor_seconds": _floor(device, work),
                "median_seconds": {c: median(taken) for c, taken in samples[name].items()},
                "samples_seconds": samples[name],
                "variants": variants[name],
            }
            for name, work in works.items()
        },
        "missing": missing,
    }


def _fastest(
    name: str,
    contender: str,
    make: Callable[[], dict[str, Call]],
    work: Work,
    device: Any,
    missing: dict[str, str],
) -> tuple[str, Call] | None:
    """The fastest variant, once all were found to be right; None for a peer that is missing."""
    try:
        made = make()
        results = [_done(device, call) for call in made.values()]
    except MissingPeerError as reason:
        missing[contender] = str(reason)
        return None
    except (RuntimeError, MemoryError) as error:
        if contender.startswith(OURS):
            raise
        missing.setdefault(contender, f"{name}: {type(error).__name__}: {error}"[:200])
        return None
    for result in results:
        work.check(contender, result)
    chosen, _ = fastest({key: partial(_done, device, call) for key, call in made.items()}, trials=2)
    return chosen, made[chosen]


def _done(device: Any, call: Call) -> Any:
    result = call()
    device.synchronize()
    return result


def _floor(device: Any, work: Work) -> float:
    """Seconds that moving or computing takes at least."""
    if isinstance(device, Cpu):
        rates = machine.bandwidth(work.bytes), machine.flop_rate(np.dtype(np.float32))
    else:
        rates = _rates(device)
    return max(work.bytes / rates[0], work.flop / rates[1])


@cache
def _rates(gpu: Any) -> tuple[float, float]:
    flop_rate = gpu.flop_rate()  # first, which gets the clocks up
    return gpu.bandwidth(), flop_rate
