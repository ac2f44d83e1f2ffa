"""The races on a GPU: each function makes one, or raises MissingPeerError.

Everybody computes in float32: TF32, which is faster and less exact, is off everywhere.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

import sparsescan
from sparsescan import CSRChain, Pattern, recurrent
from sparsescan.recurrent import RNNCell

from . import peers, workloads
from .contests import OURS, csr_bytes, plan_of, product_flops
from .gpu_measure import Race, Ratio
from .timing import Call

VALUES = f"{OURS}, with values"
IMPLICIT = f"{OURS}, implicit"
SLOPES = f"{OURS}, implicit, with slopes"
CUDNN = "PyTorch/cuDNN"
CUDNN_GRAPH = "PyTorch/cuDNN in a CUDA graph"
SPGEMM = "cupyx.cusparse.spgemm"
TORCH_LOOP, TORCH_GRAPH = "PyTorch's loop", "PyTorch's loop in a CUDA graph"
LOOP = "cupyx csr @ vector"

# PyTorch's backward of a cuDNN module copies what its forward kept, where that is asked to stay, as
# it must be to be timed more than once: as many bytes again as the forward pass has states.
RESERVE = "clones cuDNN's reserve space in each call, as retain_graph=True keeps it"
# What PyTorch asks of cuDNN in float32 for so many units at most, forward and backward.
PERSISTENT = "has a persistent kernel of cuDNN{}: one launch for all steps of a pass"
_PERSISTENT_UNITS = {"RNN": (384, 256), "GRU": (192, 128), "LSTM": (192, 128)}

HIDDEN = 20
STEPS = (1000, 30_000, 10, 30, 100, 300, 3000, 10_000)
BATCHES = (2, 4, 8, 32, 64, 128, 256)
RECORD, AIM = 108, 500  # the paper's best ratio, and ours
# Units, steps and batch of the networks whose training steps are timed, the largest last: cuDNN is
# expected to be faster from 128 or 256 units on. Blocks have several samples in a batch of 600.
NETWORKS = (
    *((HIDDEN, 1000, 16), (HIDDEN, 30_000, 16), (64, 1000, 16), (128, 1000, 16)),
    *((128, 1000, 64), (64, 200, 600), (256, 500, 16), (512, 500, 16)),
)
_ITEM = 4  # bytes of a float32
_INPUTS = 12  # of the networks whose whole training steps are timed


# -- A tanh RNN against PyTorch -------------------------------------------------------------------


class _TanhNetwork:
    """One RNN in PyTorch and as a cell, its states, and the Jacobians' values, on the device."""

    def __init__(self, gpu: Any, steps: int, batch: int) -> None:
        self.torch = torch = peers.load_torch()
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        torch.manual_seed(0)
        place = gpu.torch_name
        self.module = torch.nn.RNN(1, HIDDEN)
        # Orthogonal weights and faint input: the gradient neither vanishes nor explodes on its way.
        torch.nn.init.orthogonal_(self.module.weight_hh_l0)
        for bias in (self.module.bias_ih_l0, self.module.bias_hh_l0):
            torch.nn.init.zeros_(bias)
        self.module.to(place)
        self.x = (1e-4 * torch.randn(steps, batch, 1)).to(place)
        self.start = torch.zeros(1, batch, HIDDEN, device=place, requires_grad=True)
        self.grad = torch.randn(1, batch, HIDDEN).to(place)
        outputs, self.last = self.module(self.x, self.start)

        xp = gpu.xp
        self.cell = RNNCell(1, HIDDEN)
        for name in self.cell.params:
            setattr(self.cell, name, xp.asarray(getattr(self.module, f"{name}_l0").detach()))
        states = torch.cat([self.start, outputs]).detach()
        self.inputs, self.states = xp.asarray(self.x), xp.asarray(states)
        self.last_grad = xp.asarray(self.grad)[0]
        self.values = self.cell.values(self.inputs, self.states[:-1])
        self.plan = sparsescan.plan([self.cell.pattern] * steps, device=gpu.device)
        self.steps = self.implicit_steps()
        self.implicit_plan = sparsescan.plan(
            [self.cell.implicit_pattern] * steps, device=gpu.device
        )

    def scan(self) -> Any:
        return self.plan.exclusive_scan(self.last_grad, self.values[::-1])

    def scan_with_values(self) -> Any:
        self.cell.values(self.inputs, self.states[:-1], out=self.values)
        return self.scan()

    def implicit_steps(self) -> Any:
        return self.cell.linearize(self.inputs, self.states[:-1]).implicit()

    def scan_implicit(self) -> Any:
        return self.implicit_plan.exclusive_scan(self.last_grad, self.steps)

    def scan_with_slopes(self) -> Any:
        return self.implicit_plan.exclusive_scan(self.last_grad, self.implicit_steps())

    def backward(self) -> Any:
        grad = self.torch.autograd.grad
        return grad(self.last, self.start, self.grad, retain_graph=True)

    def graphed(self) -> Call:
        """Capture the backward pass once; its forward has to be on the stream of the capture."""
        cuda = self.torch.cuda
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            start = self.start.detach().clone().requires_grad_()
            last = self.module(self.x, start)[1]
            backward = partial(self.torch.autograd.grad, last, start, self.grad, retain_graph=True)
            for _ in range(3):
                backward()
        cuda.current_stream().wait_stream(side)
        return _captured(cuda, side, backward)


def _captured(cuda: Any, stream: Any, call: Call) -> Call:
    """Return a replay of PyTorch's graph of a call."""
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, stream=stream):
        result = call()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def rnn(gpu: Any, steps: int, batch: int) -> Race:
    """Return the gradient of the first state from that of the last; forward is not timed."""
    net = _TanhNetwork(gpu, steps, batch)
    first = gpu.get(net.values[0]).reshape(batch, HIDDEN, HIDDEN)

    def answer(contender: str, result: Any) -> NDArray[Any]:
        if not contender.startswith(OURS):
            return gpu.get(result[0]).reshape(batch, HIDDEN)
        return np.einsum("bij,bj->bi", first, gpu.get(result[-1]))

    read, written = (steps - 1) * batch * HIDDEN**2, steps * batch * HIDDEN
    return Race(
        name=f"rnn T={steps} B={batch}",
        work=f"backward of a tanh RNN, T={steps}, B={batch}, H={HIDDEN}, to its first state",
        about={"T": steps, "B": batch},
        contenders={
            OURS: lambda: {"plan": net.scan},
            VALUES: lambda: {"values into out=, plan": net.scan_with_values},
            IMPLICIT: lambda: {"plan of implicit steps": net.scan_implicit},
            SLOPES: lambda: {"linearize, plan of implicit steps": net.scan_with_slopes},
            CUDNN: lambda: {"autograd.grad": net.backward},
            CUDNN_GRAPH: lambda: {"CUDAGraph.replay": net.graphed()},
        },
        bytes=_ITEM * (read + written),
        flops=2 * read,
        # The three phases of a chunked scan read everything twice, and multiply it up.
        # So do implicit steps, of which slopes are read once.
        floors={
            "two passes": (_ITEM * (2 * read + written), 2 * read * (HIDDEN + 1)),
            "implicit": (_ITEM * 2 * written, 2 * read * (HIDDEN + 1)),
        },
        answer=answer,
        ratios=tuple(
            Ratio(peer, ours, clock)
            for clock in ("call", "device")
            for peer in (CUDNN, CUDNN_GRAPH)
            for ours in (OURS, VALUES, IMPLICIT, SLOPES)
        ),
        notes={CUDNN: f"{RESERVE}; {persistent('RNN', HIDDEN)}", CUDNN_GRAPH: RESERVE},
        size=_ITEM * read,
    )


def persistent(kind: str, units: int) -> str:
    """Return in which passes cuDNN has a persistent kernel; "" if it has none."""
    forward, back = (units <= most for most in _PERSISTENT_UNITS[kind])
    only = "" if forward and back else " in the forward pass only"
    return PERSISTENT.format(only) if forward or back else ""


def training_step(gpu: Any, kind: str, units: int, steps: int, batch: int = 16) -> Race:
    """Forward and backward: the gradients of input and parameters, from those of all outputs."""
    torch, xp = peers.load_torch(), gpu.xp
    torch.manual_seed(0)
    module = getattr(torch.nn, kind)(_INPUTS, units).to(gpu.torch_name)
    x = torch.randn(steps, batch, _INPUTS).to(gpu.torch_name).requires_grad_()
    grad = torch.randn(steps, batch, units).to(gpu.torch_name)
    net = getattr(recurrent, kind)(_INPUTS, units)
    for name in net.params:
        setattr(net, name, xp.asarray(getattr(module, name).detach()))
    step, given, above = net.training_step(), xp.asarray(x.detach()), xp.asarray(grad)

    def ours() -> Any:
        step.forward(given)
        grads = step.backward(above)
        return [grads.input, *(grads.params[name] for name in net.params)]

    def theirs() -> Any:
        sources = [x, *(getattr(module, name) for name in net.params)]
        return torch.autograd.grad(module(x)[0], sources, grad)

    rows, gates = steps * batch, {"RNN": 1, "GRU": 3, "LSTM": 4}[kind]
    return Race(
        name=f"training step {kind} H={units} T={steps} B={batch}",
        work=f"a training step of {kind}, T={steps}, B={batch}, H={units}, {_INPUTS} inputs",
        contenders={
            OURS: lambda: {"training step": ours},
            CUDNN: lambda: {"forward, autograd.grad": theirs},
        },
        # Inputs and outputs are read by both passes; outputs, and gradients of inputs, are written.
        bytes=_ITEM * rows * 3 * (_INPUTS + units),
        flops=3 * 2 * rows * gates * units * (_INPUTS + units),
        # Each gradient at its own scale.
        answer=lambda contender, result: np.concatenate(
            [array.ravel() / np.linalg.norm(array) for array in map(gpu.get, result)]
        ),
        ratios=(
            Ratio(CUDNN, required=5 if steps == max(STEPS) else None),
            Ratio(CUDNN, clock="device"),
        ),
        notes={CUDNN: note} if (note := persistent(kind, units)) else {},
        size=_ITEM * rows * (_INPUTS + units),
    )


# -- One level's products --------------------------------------------------------------------------


def vgg11(
    side: int, channels: tuple[int, int, int] = (128, 256, 512), pruned: float = 0.97
) -> list[sp.csr_array]:
    """Transposed Jacobians of VGG-11's pruned convolutions from the third on, and of the pools.

    From the last layer to the first, on ``side × side`` images, with int32 indices, which every
    library is fastest with. Average pooling stands for max-pooling, which has the same pattern.
    """
    rng = np.random.default_rng(0)
    first, second, third = channels
    layers = [(first, second), (second, second), None, (second, third), (third, third), None]
    jacobians, last = [], first
    for layer in [*layers, (third, third), (third, third)]:
        if layer is None:
            half = sp.kron(sp.eye_array(side // 2), np.full((2, 1), 0.5))
            pool = sp.kron(sp.eye_array(last), sp.kron(half, half))
            pooling = sp.csr_array(pool.astype(np.float32))
            jacobians.append(workloads.with_indices(pooling, np.int32))
            side //= 2
        else:
            jacobians.append(workloads.pruned_jacobian(rng, layer, side, pruned))
            last = layer[1]
    return jacobians[::-1]


def one_level(
    gpu: Any, jacobians: Sequence[sp.csr_array], products: Sequence[int]
) -> tuple[Call, Callable[[NDArray[Any]], Any]]:
    """Make a call that runs one level of products and nothing else, and one that applies them.

    The product of elements ``k`` and ``k + 1`` is made for each `k` in `products`. TO ADAPT if the
    engine comes to offer the launch of one level: what is timed now is the run of a plan that has
    only this level, with its check of the values' shapes, its upload and its test for finiteness.
    """
    n = len(jacobians) + 1
    last = Pattern.diagonal(jacobians[-1].shape[0])
    values = [gpu.put(matrix.data) for matrix in jacobians]
    values.append(gpu.put(np.ones(last.nnz, np.float32)))
    level = [(k, k + 1, k + 2) for k in products]
    starts = [k for k in range(1, n) if k - 1 not in products]
    applied = [[(0, k, stop)] for k, stop in pairwise([*starts, n])]
    chain = [*jacobians, last]
    product = plan_of(chain, level, device=gpu.device)
    first = gpu.put(np.ones(jacobians[0].shape[1], np.float32))

    def apply(grad: NDArray[Any]) -> Any:
        whole = plan_of(chain, level, *applied, device=gpu.device)
        return whole.exclusive_scan(gpu.put(grad), values)[n - 1]

    return lambda: product.exclusive_scan(first, values), apply


def spgemm(gpu: Any, work: str, jacobians: Sequence[sp.csr_array], products: Sequence[int]) -> Race:
    """Race for the values of a level's products, of which the plan knows the patterns."""
    ours, apply = one_level(gpu, jacobians, products)
    grad = np.ones(jacobians[0].shape[1], np.float32)
    pairs = [(jacobians[k], jacobians[k - 1]) for k in products]
    on_device = [(gpu.csr(a), gpu.csr(b)) for a, b in pairs]

    def answer(contender: str, result: Any) -> NDArray[Any]:
        if contender == OURS:
            return gpu.get(apply(grad))
        matrices = dict(enumerate(jacobians, 1))
        for k, product in zip(products, result, strict=True):
            matrices[k] = product.get() if hasattr(product, "get") else product
            del matrices[k + 1]
        x = grad
        for matrix in matrices.values():
            x = matrix @ x
        return x

    return Race(
        name=f"spgemm {work}",
        work=f"values of one level's products: {work}, 97% pruned, float32",
        contenders={
            OURS: lambda: {"a plan of one level": ours},
            SPGEMM: lambda: {"alpha=1": lambda: [gpu.spgemm(a, b) for a, b in on_device]},
        },
        bytes=sum(csr_bytes(matrix) for a, b in pairs for matrix in (a, b, a @ b)),
        flops=sum(product_flops(a, b) for a, b in pairs),
        answer=answer,
        ratios=(
            Ratio(SPGEMM, required=5),
            Ratio(SPGEMM, clock="device"),
        ),
        notes={SPGEMM: "finds the structure of the product in each call, and allocates it"},
        size=sum(csr_bytes(matrix) for pair in pairs for matrix in pair),
    )


def spgemm_pair(gpu: Any, reduced: bool = False) -> Race:
    pair = workloads.conv_pair(6, (4, 8, 16)) if reduced else workloads.conv_pair()
    pair = [workloads.with_indices(matrix, np.int32) for matrix in pair]
    return spgemm(gpu, "conv 64→128→256 at 16×16", pair, (1,))


def spgemm_level(gpu: Any, reduced: bool = False) -> Race:
    network = vgg11(4, (2, 4, 8), pruned=0.5) if reduced else vgg11(8)
    work = "VGG-11's convs 128→256→256 at 8×8, 256→512→512 at 4×4, 512→512→512 at 2×2"
    return spgemm(gpu, work, network, (1, 4, 7))


# -- Whole plans ----------------------------------------------------------------------------------


def stencil(gpu: Any, steps: int = 12, side: int = 1024) -> Race:
    """Matrix-vector products with a 5-point stencil, whose steps share a pattern."""
    data = workloads.stencil(steps, side, np.float32)
    chain = CSRChain.from_pattern(gpu.put(data.chain.data), data.chain.pattern)
    plan = sparsescan.plan(data.chain, schedule="linear", device=gpu.device)
    grad = gpu.put(data.grad)
    values = data.chain.data[:-1]
    pattern = data.chain.indices.nbytes + data.chain.indptr.nbytes
    return _linear(
        gpu,
        f"n={steps}, {side}×{side} unknowns (5-point stencil), CSRChain",
        lambda: plan.exclusive_scan(grad, chain),
        grad,
        data.matrices(shared=True)[:-1],
        values.nbytes + steps * data.grad.nbytes + pattern,
        2 * values.size,
    )


def convolutions(gpu: Any, reduced: bool = False) -> Race:
    """Matrix-vector products with Jacobians of many patterns."""
    network = vgg11(4, (2, 4, 8), pruned=0.5) if reduced else vgg11(32)
    plan = sparsescan.plan(network, schedule="linear", device=gpu.device)
    values = [gpu.put(matrix.data) for matrix in network]
    grad = gpu.put(np.ones(network[0].shape[1], np.float32))
    used = network[:-1]
    vectors = _ITEM * (used[0].shape[1] + sum(matrix.shape[0] for matrix in used))
    return _linear(
        gpu,
        "VGG-11's pruned convs from the third on, as for 128×128 images, and pools",
        lambda: plan.exclusive_scan(grad, values),
        grad,
        used,
        sum(map(csr_bytes, used)) + vectors,
        2 * sum(matrix.nnz for matrix in used),
    )


def _linear(
    gpu: Any, work: str, ours: Call, grad: Any, matrices: list[sp.csr_array], moved: int, flops: int
) -> Race:
    shared: dict[int, Any] = {}

    def on_device(matrix: sp.csr_array) -> Any:
        """With index arrays that are on the device once, if the host has them once."""
        copy, address = gpu.csr(matrix), matrix.indices.ctypes.data
        copy.indices, copy.indptr = shared.setdefault(address, (copy.indices, copy.indptr))
        return copy

    def loop(multiply: Callable[[Any, Any], Any]) -> Call:
        return peers.loop(grad, [partial(multiply, matrix) for matrix in steps])

    def answer(contender: str, result: Any) -> NDArray[Any]:
        """Each gradient at its own scale."""
        host = [gpu.get(array) for array in result]
        return np.concatenate([array / np.abs(array).max() for array in host])

    steps = [on_device(matrix) for matrix in matrices]
    return Race(
        name=f"linear {work}",
        work=f"matrix-vector products: {work}, float32",
        contenders={
            OURS: lambda: {"plan, linear": ours},
            LOOP: lambda: {
                "matrix @ vector": loop(operator.matmul),
                "cusparse.spmv": loop(gpu.spmv),
            },
        },
        bytes=moved,
        flops=flops,
        answer=answer,
        ratios=(Ratio(LOOP), Ratio(LOOP, clock="device")),
        notes={LOOP: "makes cuSPARSE's descriptors in each call, which its device time has not"},
        size=moved,
    )


# -- Linear recurrences ----------------------------------------------------------------------------


def affine(gpu: Any, steps: int = 5000, batch: int = 1, units: int = 1024) -> Race:
    """Return a linear recurrence of diagonals, ``y_t = a_t y_{t-1} + b_t``."""
    torch = peers.load_torch()
    rng = np.random.default_rng(0)
    shape = steps, batch, units
    a, b = (rng.uniform(0.5, 1, shape), rng.standard_normal(shape))
    given = [gpu.put(each.astype(np.float32)) for each in (a, b)]
    tensors = [torch.as_tensor(each.astype(np.float32)).to(gpu.torch_name) for each in (a, b)]
    pattern, states = Pattern.diagonal(units), torch.empty_like(tensors[1])

    def ours() -> Any:
        return sparsescan.affine_scan(*given, pattern=pattern)

    def loop() -> Any:
        state = torch.zeros_like(states[0])
        for step in range(steps):
            torch.addcmul(tensors[1][step], tensors[0][step], state, out=states[step])
            state = states[step]
        return states

    moved = _ITEM * steps * batch * units
    return Race(
        name=f"affine_scan T={steps} B={batch}",
        work=f"affine_scan of {units} diagonals, T={steps}, B={batch}, float32",
        contenders={
            OURS: lambda: {"affine_scan": ours},
            TORCH_LOOP: lambda: {"addcmul": loop},
            TORCH_GRAPH: lambda: {
                "CUDAGraph.replay": _captured(torch.cuda, torch.cuda.Stream(), loop)
            },
        },
        bytes=3 * moved,
        flops=2 * steps * batch * units,
        answer=lambda contender, result: gpu.get(result),
        ratios=(Ratio(TORCH_GRAPH), Ratio(TORCH_GRAPH, clock="device")),
        size=2 * moved,
    )


# -- Which races there are ------------------------------------------------------------------------

RACES: dict[str, list[partial[Race]]] = {
    "rnn": [partial(rnn, steps=steps, batch=16) for steps in STEPS[:2]],
    "pair": [partial(spgemm_pair)],
    "steps": [
        partial(training_step, kind=kind, units=units, steps=steps, batch=batch)
        for units, steps, batch in NETWORKS
        for kind in ("RNN", "GRU", "LSTM")
    ],
    "affine": [partial(affine), partial(affine, steps=1000, batch=16, units=64)],
    "sweeps": [partial(stencil, steps=1000, side=16), partial(stencil), partial(convolutions)],
    "level": [partial(spgemm_level)],
    "sizes": [
        partial(rnn, steps=steps, batch=batch)
        for steps, batch in [*((t, 16) for t in STEPS[2:]), *((1000, b) for b in BATCHES)]
    ],
}

# Sizes for a rehearsal, of the races that have them.
_REDUCED = {"steps": 8, "batch": 2, "units": 5, "side": 6, "reduced": True}


def reduced(make: partial[Race]) -> partial[Race]:
    """Return a race of small size."""
    has = inspect.signature(make.func).parameters
    sizes = {name: size for name, size in _REDUCED.items() if name in has}
    return partial(make.func, **make.keywords | sizes)
