"""The steps of a scan through a pruned network, and its backward pass, by all contenders."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping
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
from sparsescan.chains.containers import as_matrix
from sparsescan.jacobians import Sequential, from_torch

from . import peers
from .contests import OURS, Op, Work, exact_gradients, plan_of
from .gpu_cusparse import NumericSpGEMM, load
from .peers import MissingPeerError, load_mkl, mkl_products, of_sample, scipy_batch_loops
from .timing import PAUSE, Call, calls_in, rounded
from .vgg11_flop import Analysis, Interval, Step, layer_names

Array = NDArray[Any]

SCIPY, MKL, CUSPARSE, REUSE = "SciPy", "MKL", "cuSPARSE", "cuSPARSE, numeric stage"
TORCH, TORCH_PARAMETERS = "PyTorch, dense", "PyTorch, dense, with parameters"
VALUES, PARAMETERS = f"{OURS}, with values", f"{OURS}, with values and parameters"
UP_SWEEP = f"{OURS}, the paper's schedule"

# Multiply-adds of a step that is timed, and entries of a matrix: seconds, and some gigabytes.
_MOST_WORK, _MOST_ENTRIES = 1_000_000_000, 200_000_000
# Seconds that a turn is meant to take, and how many calls it may be.
_SECONDS_A_TURN = 0.05
_FEWEST, _MOST = 2, 30
_ITEM = 4  # bytes of a float32


# -- The network's Jacobians ----------------------------------------------------------------------


class Chain:
    """Jacobians and gradients of a network at some images.

    The first layer of the network is its convolutional part, which may be pruned; it has to be on
    the device, a Cpu or Cuda.

    Attributes
    ----------
    net : Sequential
        The convolutional part as operators.
    xs, values : list of array
        Activations from the first to the last; values of the Jacobians from the last to the first.
    grad : array, shape (batch, d)
        The gradient of the loss in the last activation.
    jacobians : list of csr_array or BatchedCSR
        From the last to the first, in host memory.
    """

    def __init__(self, net: Any, images: torch.Tensor, labels: torch.Tensor, device: Any) -> None:
        self.device, self.features = device, net[0]
        self.images = images.to(device.torch_name)
        y = self.features(self.images).detach().requires_grad_()
        loss = nn.functional.cross_entropy(net[1:](y), labels.to(device.torch_name))
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
        return exact_gradients(self.device.get(self.grad), self.jacobians)


class Nodes:
    """The matrices that schedules make of a chain's Jacobians, for its first sample.

    Attributes
    ----------
    steps : list of Step
        The operations of all schedules, each once: a vector by each matrix, and every product.
    patterns : dict
        The patterns by intervals.
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
        self._matrices = {
            (k, k + 1): of_sample(jacobian, 0) for k, jacobian in enumerate(chain.jacobians, 1)
        }

    def matrix(self, interval: Interval) -> sp.csr_array:
        """Return the matrix as SciPy multiplies it up, sorted, without entries that are zero."""
        if interval not in self._matrices:
            left, right = self._products[interval].operands
            product = self._matrices[interval] = self.matrix(right) @ self.matrix(left)
            product.sort_indices()
        return self._matrices[interval]

    def values(self, interval: Interval) -> Array:
        """Return the values in the order of the pattern, zeros included."""
        return in_pattern(self.matrix(interval), self.patterns[interval])

    def too_large(self, step: Step) -> str | None:
        """Why a step is not timed, if it is not."""
        if step.flop > 2 * _MOST_WORK:
            return f"{step.flop // 2:,} multiply-adds"
        matrices = [*step.operands[step.vector :], *[(step.start, step.stop)] * (not step.vector)]
        for interval in matrices:
            if self.patterns[interval].nnz > _MOST_ENTRIES:
                return f"{self.patterns[interval].nnz:,} entries"
            product = self._products.get(interval)
            if product is not None and product is not step and (reason := self.too_large(product)):
                return reason
        return None


def in_pattern(matrix: sp.csr_array, pattern: Pattern) -> Array:
    """Return values of a sorted matrix in the order of a pattern that has all of its entries."""
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


def step_work(nodes: Nodes, step: Step) -> Work:
    return (_vector_work if step.vector else _product_work)(nodes, step)


def _vector_work(nodes: Nodes, step: Step) -> Work:
    """Return a gradient multiplied by a layer's Jacobian, or by a product."""
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
        return np.reshape(device.get(result if index is None else result[index]), -1)

    peers: dict[str, Callable[[], dict[str, Call]]] = {
        SCIPY: lambda: {"csr_array @ ndarray": lambda: matrix @ x},
        MKL: lambda: _mkl_vectors(matrix, x),
    }
    if device.on_gpu:
        peers = {CUSPARSE: lambda: _cusparse_vectors(device, matrix, grad)}
    if step.stop == step.mid + 1:
        peers[TORCH] = lambda: _torch_layer(nodes.chain, step.mid)
    return Work(
        contenders={OURS: ours, **peers},
        answer=answer,
        right=matrix.astype(np.float64) @ x,
        bytes=_bytes(pattern) + _ITEM * sum(pattern.shape),
        flops=step.flop,
    )


def _product_work(nodes: Nodes, step: Step) -> Work:
    """Return the product of two matrices, checked by what it makes of a vector."""
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

    def plan(*levels: list[Op]) -> sparsescan.ScanPlan:
        return plan_of(patterns, *levels, device=device.device)

    def ours() -> dict[str, Call]:
        product = plan([(1, 2, 3)])
        return {"plan": lambda: product.exclusive_scan(grad, values())}

    def answer(contender: str, result: Any) -> Array:
        if contender == OURS:
            applied = plan([(1, 2, 3)], [(0, 1, 3)]).exclusive_scan(grad, values())
            return np.asarray(device.get(applied[2]))
        if contender == MKL:  # handles that are kept give nothing back
            result = load_mkl().dot_product_mkl(right, left)
        host = result.get() if hasattr(result, "get") else result
        return np.asarray(host @ x)

    peers: dict[str, Callable[[], dict[str, Call]]] = {
        SCIPY: lambda: {"csr_array @ csr_array": lambda: right @ left},
        MKL: lambda: mkl_products(right, left),
    }
    if device.on_gpu:
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
        flops=step.flop,
    )


def backward(chain: Chain, other: Schedule | None = None) -> Work:
    """All gradients of the convolutional part, by the planner's schedule and maybe another one.

    Some contenders make the gradients of the parameters as well.
    """
    net, device, batch = chain.net, chain.device, len(chain.images)
    plan = net.plan(batch=batch, dtype=np.float32, device=device.device)
    buffers = [device.xp.empty_like(values) for values in chain.values]
    loop = CUSPARSE if device.on_gpu else SCIPY

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
        grads = result[: len(net)]
        if contender in (TORCH, TORCH_PARAMETERS):
            grads = [chain.torch_grad, *result[: len(net) - 1]]
        elif contender == loop:
            grads = [np.stack(x) if isinstance(x, list) else device.get(x).T for x in result]
        pairs = zip(grads, chain.grads, strict=True)
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
        flops=2 * batch * sum(pattern.nnz for pattern in net.patterns[:-1]),
    )


def call_seconds(device: Any) -> float:
    """How long a call of a plan takes that computes next to nothing."""
    one = Pattern.dense((1, 1))
    plan = sparsescan.plan([one, one], schedule="linear", device=device.device)
    grad, values = (device.put(np.ones(size, np.float32)) for size in (1, (2, 1)))
    call = partial(plan.exclusive_scan, grad, values)
    return float(median(device.samples(call, 100, "call", False)))


def _relative(x: Array, right: Array) -> Array:
    """Flat, in multiples of the largest entry of what is right."""
    return np.asarray(x).reshape(-1) / (np.abs(right).max() or 1.0)


def _bytes(pattern: Pattern) -> int:
    """Bytes of the values of a matrix, and of its indices where there have to be any."""
    index = 0 if pattern.kind != "general" else pattern.nnz + pattern.shape[0] + 1
    return _ITEM * pattern.nnz + pattern.index_dtype.itemsize * index


# -- Peers ----------------------------------------------------------------------------------------


def _mkl_vectors(matrix: sp.csr_array, x: Array) -> dict[str, Call]:
    """Multiply ``A @ x`` by `sparse_dot_mkl`, and with a handle that is made only once."""
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

    def step(multiply: Callable[[Any, Any], Any], matrix: Any, own: bool, x: Any) -> Any:
        return multiply(matrix, x.reshape(-1) if own else x).reshape(-1, batch)

    def loop(multiply: Callable[[Any, Any], Any]) -> Call:
        return peers.loop(first, [partial(step, multiply, *each) for each in steps])

    variants = {"matrix @ array": loop(operator.matmul)}
    if batch == 1:
        variants["cusparse.spmv"] = loop(gpu.spmv)
    return variants


def interleaved(jacobian: BatchedCSR) -> sp.csr_array:
    """One matrix for all samples, of vectors whose entry ``(i, b)`` is at ``i * batch + b``."""
    batch = len(jacobian.data)
    blocks = sp.block_diag([jacobian[b] for b in range(batch)], "csr")
    rows, cols = (np.arange(batch * size).reshape(batch, -1).T.ravel() for size in jacobian.shape)
    mixed = sp.csr_array(blocks[rows][:, cols])
    mixed.sort_indices()
    return mixed


def _torch_layer(chain: Chain, k: int) -> dict[str, Call]:
    """PyTorch's backward of the layer whose Jacobian is element `k`, dense, of the first sample."""
    layer = chain.features[len(chain.net) - k]
    x = torch.as_tensor(chain.xs[len(chain.net) - k][:1], device=chain.device.torch_name)
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
        features = _copied(chain.features).to(chain.device.torch_name, memory_format=form)
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
    """Copy the layers; ``deepcopy`` refuses the weights that pruning has made."""
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
        ``works``: for each its samples, medians and floor, in seconds, and which variants were the
        fastest; ``missing``: peers and why they are not there.
    """
    calls: dict[str, dict[str, Call]] = {}
    missing: dict[str, str] = {}
    variants: dict[str, dict[str, str]] = {name: {} for name in works}
    for name, work in works.items():
        for contender in work.contenders:
            try:
                variants[name][contender], call = work.variant(contender, device, trials=2)
            except MissingPeerError as reason:
                missing[contender] = str(reason)
                continue
            except (RuntimeError, MemoryError) as error:
                if contender.startswith(OURS):
                    raise
                missing.setdefault(contender, f"{name}: {type(error).__name__}: {error}"[:200])
                continue
            calls.setdefault(contender, {})[name] = call
    samples = _take_turns(calls, device, rounds)
    return {
        "works": {
            name: {
                "flop": work.flops,
                "bytes": work.bytes,
                "floor_seconds": device.ceilings(work.bytes).seconds(work.bytes, work.flops),
                "median_seconds": {c: median(samples[c, name]) for c in variants[name]},
                "samples_seconds": {c: samples[c, name] for c in variants[name]},
                "variants": variants[name],
            }
            for name, work in works.items()
        },
        "missing": missing,
    }


def _take_turns(
    calls: dict[str, dict[str, Call]], device: Any, rounds: int
) -> dict[tuple[str, str], list[float]]:
    """Return samples of each contender and work."""
    times = {
        (contender, name): calls_in(_SECONDS_A_TURN, device, call, _FEWEST, _MOST)
        for contender, by_work in calls.items()
        for name, call in by_work.items()
    }
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in times}
    for _ in range(rounds):
        for contender, by_work in calls.items():
            time.sleep(PAUSE)
            for name, call in by_work.items():
                taken = device.samples(call, times[contender, name], "call", False)
                samples[contender, name] += rounded(taken)
    return samples
