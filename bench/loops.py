"""Loops as users write them: ``sparsescan.jax.scan`` beside ``jax.lax.scan``, and PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import peers, races
from .experiment import Experiment, Piece, Results
from .peers import PYTORCH
from .races import JAX, OURS
from .timing import Call

Array = NDArray[Any]
Params = dict[str, Any]
SCAN = "PyTorch's prototype of scan"


# -- Steps ----------------------------------------------------------------------------------------


def _gru(jax: Any, p: Params, h: Any, x: Any) -> Any:
    a, b = jax.numpy.split(x @ p["x"] + p["b"], 3, -1), jax.numpy.split(h @ p["h"], 3, -1)
    r, z = jax.nn.sigmoid(a[0] + b[0]), jax.nn.sigmoid(a[1] + b[1])
    return (1 - z) * jax.numpy.tanh(a[2] + r * b[2]) + z * h


def _lstm(jax: Any, p: Params, state: Any, x: Any) -> Any:
    h, c = state
    i, f, g, o = jax.numpy.split(x @ p["x"] + h @ p["h"] + p["b"], 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jax.numpy.tanh(g)
    return jax.nn.sigmoid(o) * jax.numpy.tanh(c), c


def _mgu(jax: Any, p: Params, h: Any, x: Any) -> Any:
    units = h.shape[-1]
    a = x @ p["x"] + p["b"]
    f = jax.nn.sigmoid(a[:, :units] + h @ p["h"][:, :units])
    return (1 - f) * h + f * jax.numpy.tanh(a[:, units:] + (f * h) @ p["h"][:, units:])


def _ligru(jax: Any, p: Params, h: Any, x: Any) -> Any:
    z, n = jax.numpy.split(x @ p["x"] + p["b"] + h @ p["h"], 2, -1)
    z = jax.nn.sigmoid(z)
    return z * h + (1 - z) * jax.nn.relu(n)


def _normalised_gru(jax: Any, p: Params, h: Any, x: Any) -> Any:
    def norm(a: Any) -> Any:
        return (a - a.mean(-1, keepdims=True)) * jax.lax.rsqrt(a.var(-1, keepdims=True) + 1e-5)

    a, b = jax.numpy.split(x @ p["x"] + p["b"], 3, -1), jax.numpy.split(h @ p["h"], 3, -1)
    r, z = jax.nn.sigmoid(norm(a[0]) + norm(b[0])), jax.nn.sigmoid(norm(a[1]) + norm(b[1]))
    return (1 - z) * jax.numpy.tanh(norm(a[2]) + r * norm(b[2])) + z * h


# How many gates and states each has.
_STEPS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "GRU": (_gru, 3, 1),
    "LSTM": (_lstm, 4, 2),
    "MGU": (_mgu, 2, 1),
    "LiGRU": (_ligru, 2, 1),
    "LayerNorm-GRU": (_normalised_gru, 3, 1),
}


def _leaves(jax: Any, state: Params, x: Any) -> Params:
    """Step numbers that read a neighbour each, as a hierarchical filter does."""
    new, above = {}, x[0]
    for name, each in state.items():
        above = each + 0.1 * jax.nn.sigmoid(each) * (jax.numpy.tanh(above) - each)
        new[name] = above
    return new


# -- Races ----------------------------------------------------------------------------------------


def _differences(calls: dict[str, Call]) -> dict[str, float]:
    return races.apart_from_ours({who: call() for who, call in calls.items()})


@dataclass(frozen=True)
class Loop:
    """A loop whose body is written in JAX, and the ratio that is asked for."""

    kind: str
    units: int
    wanted: float
    steps: int = 1000
    batch: int = 16
    inputs: int = 12

    @property
    def name(self) -> str:
        if self.kind == "scalars":
            return f"{self.units} scalars in a dict, T={self.steps:,}"
        return f"{self.kind}, H={self.units}, B={self.batch}, T={self.steps:,}"

    def measure(self, quick: bool) -> Results:
        """Return the times of values and gradients of a loss of all states."""
        makers = {OURS: partial(self.calls, True), JAX: partial(self.calls, False)}
        return races.timed(makers, {JAX: self.wanted}, quick, _differences)

    def calls(self, is_ours: bool) -> dict[str, Call]:
        """Return calls of a jitted loss and its gradients; loops of JAX are unrolled, or not."""
        jax = peers.load_jax()
        from sparsescan.jax import scan

        params, begin, x, above = self._given(jax)
        step: Any = _leaves if self.kind == "scalars" else _STEPS[self.kind][0]

        def loss(unroll: int, params: Any, begin: Any, x: Any) -> Any:
            def body(state: Any, x: Any) -> Any:
                new = step(jax, params, state, x) if params else step(jax, state, x)
                return new, jax.tree.leaves(new)[0]

            run = scan if is_ours else jax.lax.scan
            return (run(body, begin, x, unroll=unroll)[1] * above).sum()

        def call(unroll: int) -> Call:
            both = jax.value_and_grad(partial(loss, unroll), argnums=(0, 1, 2))

            @jax.jit
            def run(*given: Any) -> tuple[Any, dict[str, Any]]:
                value, grads = both(*given)
                return value, {str(k): each for k, each in enumerate(jax.tree.leaves(grads))}

            given = jax.device_put((params, begin, x))
            return lambda: jax.block_until_ready(run(*given))[1]

        return {f"unroll={n}": call(n) for n in ((1,) if is_ours else (1, 4))}

    def _given(self, jax: Any) -> tuple[Any, ...]:
        """Return parameters, first states, inputs, and the gradients in all outputs."""
        rng = np.random.default_rng(0)
        if self.kind == "scalars":
            begin = {f"node {k}": jax.numpy.float32(0.1) for k in range(self.units)}
            shapes = (self.steps, 1), (self.steps,)
            return {}, begin, *(rng.standard_normal(each, np.float32) for each in shapes)
        _, gates, states = _STEPS[self.kind]
        params = {
            "x": rng.standard_normal((self.inputs, gates * self.units), np.float32),
            "h": rng.standard_normal((self.units, gates * self.units), np.float32),
            "b": rng.standard_normal(gates * self.units, np.float32),
        }
        params = {name: each / np.sqrt(self.units) for name, each in params.items()}
        zeros = jax.numpy.zeros((self.batch, self.units))
        x = rng.standard_normal((self.steps, self.batch, self.inputs), np.float32)
        above = rng.standard_normal((self.steps, self.batch, self.units), np.float32)
        return params, (zeros,) * states if states > 1 else zeros, x, above


@dataclass(frozen=True)
class TorchLoop:
    """A loop of PyTorch over a GRUCell, in a module or as the step of a scan."""

    door: str
    wanted: dict[str, float]
    units: int = 20
    steps: int = 200
    batch: int = 16
    inputs: int = 12

    @property
    def name(self) -> str:
        about = f"H={self.units}, B={self.batch}, T={self.steps:,}"
        return f"{self.door} of a torch.nn.GRUCell, {about}"

    def measure(self, quick: bool) -> Results:
        """Return the times of forward and backward passes."""
        makers = {OURS: self._ours, PYTORCH: partial(self._calls, self._module())}
        if self.door == "scan":
            makers[SCAN] = self._prototype
        return races.timed(makers, self.wanted, quick, _differences)

    def _module(self) -> Any:
        """Return the module, with the same parameters each time."""
        torch = peers.load_torch()

        class Looped(torch.nn.Module):  # type: ignore[misc]
            def __init__(self, inputs: int, units: int) -> None:
                super().__init__()
                self.cell = torch.nn.GRUCell(inputs, units)

            def forward(self, x: Any) -> Any:
                h, states = x.new_zeros(x.shape[1], self.cell.hidden_size), []
                for each in x:
                    h = self.cell(each, h)
                    states.append(h)
                return torch.stack(states)

        torch.manual_seed(0)
        return Looped(self.inputs, self.units)

    def _ours(self) -> dict[str, Call]:
        from sparsescan.torch import loop, scan

        return self._scanned(scan) if self.door == "scan" else self._calls(loop(self._module()))

    def _prototype(self) -> dict[str, Call]:
        peers.load_torch()
        from torch._higher_order_ops.scan import scan

        return self._scanned(scan)

    def _scanned(self, scan: Any) -> dict[str, Call]:
        """Return calls of a scan over the cell."""
        module = self._module()
        cell = module.cell

        def step(h: Any, x: Any) -> Any:
            h = cell(x, h)
            return h, h.clone()

        def forward(x: Any) -> Any:
            return scan(step, x.new_zeros(x.shape[1], cell.hidden_size), x)[1]

        module.forward = forward
        return self._calls(module)

    def _calls(self, module: Any) -> dict[str, Call]:
        """Return calls of a module's passes, with one thread or two."""
        torch, rng = peers.load_torch(), np.random.default_rng(0)
        shapes = [(self.steps, self.batch, size) for size in (self.inputs, self.units)]
        x, above = (torch.tensor(rng.standard_normal(each, np.float32)) for each in shapes)
        leaves = {"x": x.requires_grad_(), **dict(module.named_parameters())}

        def call() -> dict[str, Any]:
            found = torch.autograd.grad(module(x), [*leaves.values()], above)
            return dict(zip(leaves, found, strict=True))

        return peers.in_threads(call)


LOOPS: tuple[Loop | TorchLoop, ...] = (
    *(Loop(kind, 20, 4) for kind in _STEPS),
    *(Loop(kind, 64, 3) for kind in _STEPS),
    Loop("scalars", 60, 2, steps=614),
    TorchLoop("loop", {PYTORCH: 10}),
    TorchLoop("scan", {PYTORCH: 10, SCAN: 40}),
)


def _pieces(quick: bool) -> Iterable[Piece]:
    for each in LOOPS[:1] if quick else LOOPS:
        yield Piece(each.name, partial(each.measure, quick))


def _about(quick: bool) -> Results:
    return {
        "a call": "a jitted loss and its gradients in parameters, first states and inputs; float32",
        "JAX": "jax.lax.scan of the same body; the faster of the unrolls 1 and 4",
        "a call of PyTorch": "forward and backward, into parameters and inputs; float32; the "
        "faster of one thread and two; loop is of a module with a loop in Python, scan of its step",
        SCAN: "torch._higher_order_ops.scan",
    }


_TITLE = "Loops of JAX and PyTorch"
EXPERIMENT = Experiment(
    "loops",
    _TITLE,
    _pieces,
    _about,
    partial(races.drawings, _TITLE),
    partial(races.rows, _TITLE),
)
