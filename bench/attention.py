"""Linear attention beside a loop of PyTorch and a jitted ``lax.scan``: training and inference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsescan.torch import linear_attention

from . import peers, races
from .experiment import Experiment, Piece, Results
from .peers import PYTORCH
from .races import JAX, OURS
from .timing import Call

Array = NDArray[Any]
Step = Callable[..., tuple[Any, Any]]


# -- Models: a step in PyTorch or JAX, and all steps by ours ---------------------------------------


def _outer(x: Any, y: Any) -> Any:
    return x[..., :, None] * y[..., None, :]


def _read(state: Any, x: Any) -> Any:
    return (x[..., None, :] @ state)[..., 0, :]


def _mlstm(xp: Any, states: Any, q: Any, k: Any, v: Any, i: Any, log_f: Any) -> tuple[Any, Any]:
    """Take a step of an mLSTM with its stabiliser, whose states are of exponential gates."""
    c, n, before = states
    m = xp.maximum(log_f + before, i)
    forget, write = xp.exp(log_f + before - m)[..., None], xp.exp(i - m)[..., None]
    c, n = forget[..., None] * c + _outer(write * k, v), forget * n + write * k
    below = xp.maximum(abs((n * q).sum(-1)), xp.exp(-m))[..., None]
    return (c, n, m), _read(c, q) / below


def _our_mlstm(q: Any, k: Any, v: Any, i: Any, log_f: Any) -> Any:
    since = log_f.cumsum(1)
    m = ((i - since).cummax(1).values + since).detach()
    before = torch.cat([m[:, :1], m[:, :-1]], 1)
    v = torch.exp(i - m)[..., None] * torch.cat([v, torch.ones_like(v[..., :1])], -1)
    out = linear_attention(q, k, v, decay=torch.exp(log_f + before - m))
    return out[..., :-1] / torch.maximum(out[..., -1:].abs(), torch.exp(-m)[..., None])


def _gated_delta(xp: Any, s: Any, q: Any, k: Any, v: Any, alpha: Any, beta: Any) -> tuple[Any, Any]:
    s = alpha[..., None, None] * s
    s = s + _outer(beta[..., None] * k, v - _read(s, k))
    return s, _read(s, q)


def _our_gated_delta(q: Any, k: Any, v: Any, alpha: Any, beta: Any) -> Any:
    beta = beta[..., None]
    return linear_attention(q, k, beta * v, alpha, a=k, b=-alpha[..., None] * beta * k)


def _rwkv7(xp: Any, s: Any, r: Any, k: Any, v: Any, w: Any, kappa: Any, a: Any) -> tuple[Any, Any]:
    s = w[..., None] * s - _outer(a * kappa, _read(s, kappa)) + _outer(k, v)
    return s, _read(s, r)


def _our_rwkv7(r: Any, k: Any, v: Any, w: Any, kappa: Any, a: Any) -> Any:
    return linear_attention(r, k, v, w, a=kappa, b=-a * kappa)


_MODELS: dict[str, tuple[Step, Callable[..., Any]]] = {
    "mLSTM": (_mlstm, _our_mlstm),
    "gated DeltaNet": (_gated_delta, _our_gated_delta),
    "RWKV-7": (_rwkv7, _our_rwkv7),
}


@dataclass(frozen=True)
class Model:
    """A model, its sizes, and whether gradients in all that is given are asked for."""

    kind: str
    trains: bool
    batch: int = 8
    heads: int = 4
    size: int = 32
    steps: int = 1000

    @property
    def name(self) -> str:
        size = f"{self.heads} heads of {self.size}×{self.size}, B={self.batch}, T={self.steps:,}"
        return f"{self.kind}, {size}{', inference' * (not self.trains)}"

    def arrays(self) -> tuple[list[Array], Array]:
        """Return what is given, and the gradients in the outputs."""
        rng = np.random.default_rng(0)
        head = self.batch, self.steps, self.heads

        def unit(x: Array) -> Array:
            return x / np.linalg.norm(x, axis=-1, keepdims=True)

        def share(*shape: int) -> Array:
            return 1 / (1 + np.exp(-rng.standard_normal(shape) - 2))

        q, k, v, loss = rng.standard_normal((4, *head, self.size))
        more = {
            "mLSTM": lambda: [rng.standard_normal(head), np.log(share(*head))],
            "gated DeltaNet": lambda: [share(*head), share(*head)],
            "RWKV-7": lambda: [share(*head, self.size), unit(k + q), share(*head, self.size)],
        }[self.kind]()
        given = [q, unit(k), v, *more]
        return [each.astype(np.float32) for each in given], loss.astype(np.float32)

    def measure(self, quick: bool) -> Results:
        """Return the times of calls."""
        makers = {OURS: self.ours, PYTORCH: self.loop, JAX: self.scan}
        return races.timed(makers, {PYTORCH: 10, JAX: 2}, quick, self._differences, few=True)

    def _differences(self, calls: dict[str, Call]) -> dict[str, float]:
        return races.apart_from_ours(
            {who: dict(enumerate(map(np.asarray, call()))) for who, call in calls.items()}
        )

    def begin(self) -> list[Array]:
        """Return the first states, zeros: a matrix, and of an mLSTM a vector and a number, too."""
        lead = self.batch, self.heads
        shapes = [(*lead, self.size, self.size), (*lead, self.size), lead]
        return [np.zeros(shape, np.float32) for shape in shapes[: 3 if self.kind == "mLSTM" else 1]]

    def _in_pytorch(self, model: Callable[..., torch.Tensor]) -> dict[str, Call]:
        arrays, loss = self.arrays()
        given = [torch.from_numpy(each).requires_grad_(self.trains) for each in arrays]
        above = torch.from_numpy(loss)

        def call() -> Any:
            out = model(*given)
            return torch.autograd.grad(out, given, above) if self.trains else [out]

        return peers.in_threads(call)

    def ours(self) -> dict[str, Call]:
        return self._in_pytorch(_MODELS[self.kind][1])

    def loop(self) -> dict[str, Call]:
        step = _MODELS[self.kind][0]

        def model(*given: torch.Tensor) -> torch.Tensor:
            states, outputs = [torch.from_numpy(each) for each in self.begin()], []
            state: Any = states if len(states) > 1 else states[0]
            for row in zip(*(each.unbind(1) for each in given), strict=True):
                state, out = step(torch, state, *row)
                outputs.append(out)
            return torch.stack(outputs, 1)

        return self._in_pytorch(model)

    def scan(self) -> dict[str, Call]:
        jax = peers.load_jax()
        step, (arrays, loss), begin = _MODELS[self.kind][0], self.arrays(), self.begin()
        state: Any = tuple(begin) if len(begin) > 1 else begin[0]

        def model(unroll: int, *given: Any) -> Any:
            rows = [jax.numpy.moveaxis(each, 1, 0) for each in given]
            body = lambda state, row: step(jax.numpy, state, *row)  # noqa: E731
            return jax.numpy.moveaxis(jax.lax.scan(body, state, rows, unroll=unroll)[1], 0, 1)

        def gradients(unroll: int, *given: Any) -> Any:
            return jax.vjp(partial(model, unroll), *given)[1](loss)

        def call(unroll: int) -> Call:
            run = jax.jit(
                partial(gradients, unroll) if self.trains else lambda *x: [model(unroll, *x)]
            )
            given = jax.device_put(arrays)
            return lambda: jax.block_until_ready(run(*given))

        return {f"unroll={n}": call(n) for n in (1, 4, 16)}


MODELS = tuple(Model(kind, trains) for trains in (True, False) for kind in _MODELS)


def _pieces(quick: bool) -> Iterable[Piece]:
    for each in MODELS[:1] if quick else MODELS:
        yield Piece(each.name, partial(each.measure, quick))


def _about(quick: bool) -> Results:
    return {
        "a call": "forward and backward pass, for gradients in all that is given; of inference the "
        "forward pass, of PyTorch without a graph; float32, first states are zeros",
        "mLSTM": "with its stabiliser; logarithms of its gates are given",
        "PyTorch": "a loop over the steps; the faster of 2 threads or 1, as of ours",
        "JAX": "jitted; the fastest of the unrolls 1, 4 and 16",
    }


_TITLE = "Linear attention"
EXPERIMENT = Experiment(
    "attention",
    _TITLE,
    _pieces,
    _about,
    partial(races.drawings, _TITLE),
    partial(races.rows, _TITLE),
)
