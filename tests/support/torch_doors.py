"""Every function and kind of module of PyTorch's front door, as a function of tensors alone.

Each has a second form that PyTorch's own operations compute, by definition and step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from plain_attention import plain_attention
from plain_networks import plain_run
from some_cells import MGU, PeepholeLSTM
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence

import sparsescan.torch
from sparsescan import Pattern
from sparsescan.symbolic.pattern import of_mask
from sparsescan.torch import affine_scan, lfilter, linear_attention, module, selective_scan, sosfilt
from sparsescan.torch.calls.plain import run_plain
from sparsescan.torch.calls.shapes import kind_of

Call = Callable[..., Any]


class Door(NamedTuple):
    """A function, and what it is to be equal to.

    Attributes
    ----------
    ours, plain : callable
        Functions of the tensors, which return a tensor or several.
    given : tuple of Tensor
        Tensors, of double precision.
    """

    ours: Call
    plain: Call
    given: tuple[Tensor, ...]


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, dtype=torch.float64)


# -- Recurrent modules -----------------------------------------------------------------------------

STEPS, BATCH, INPUTS, UNITS = 3, 2, 2, 2


def network(kind: Any, form: str = "", **options: Any) -> Door:
    """Return a module as a function of its input, its initial states and its parameters."""
    made = getattr(sparsescan.torch, kind) if isinstance(kind, str) else module(kind)
    net = made(INPUTS, UNITS, **options, dtype=torch.float64)
    names = [name for name, _ in net.named_parameters()]
    rows = net.num_layers * (1 + net.bidirectional)
    states = tuple(drawn(rows, BATCH, UNITS) for _ in range(net.states))
    is_packed = form == "packed"
    lengths = torch.tensor([STEPS - 1, STEPS]) if is_packed else torch.full((BATCH,), STEPS)
    x = drawn(STEPS, BATCH, INPUTS)
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    # Where rows of what is packed are among all steps and samples, the longer one first.
    places = (torch.arange(STEPS)[:, None] < lengths.flip(0)).flatten().nonzero()[:, 0]

    def ours(x: Tensor, *rest: Tensor) -> Any:
        hx, params = rest[: net.states], dict(zip(names, rest[net.states :], strict=True))
        given: Any = packed._replace(data=x) if is_packed else x
        if net.batch_first:
            given = x.transpose(0, 1)
        output, last = functional_call(net, params, (given, hx if net.states > 1 else hx[0]))
        if net.batch_first:
            output = output.transpose(0, 1)
        return output.data if is_packed else output, *(last if net.states > 1 else (last,))

    def plain(x: Tensor, *rest: Tensor) -> Any:
        hx, params = rest[: net.states], dict(zip(names, rest[net.states :], strict=True))
        if is_packed:
            rows_of_all = x.new_zeros(STEPS * BATCH, INPUTS).index_copy(0, places, x)
            x = rows_of_all.reshape(STEPS, BATCH, INPUTS).flip(1)
        state = torch.cat(hx, -1)
        if isinstance(kind, str):
            outputs, last = plain_run(kind, params, x, state, lengths)
            output = outputs[0]
        else:
            parts = zip(*[iter(rest[net.states :])] * (len(names) // rows), strict=True)
            short = [name.rpartition("_l")[0] for name in names[: len(names) // rows]]
            cells = [dict(zip(short, each, strict=True)) for each in parts]
            program = kind_of(net.mode).program(net.bias)
            about = kind, program, cells, 1 + net.bidirectional, x, state
            output, last = run_plain(*about, lengths if is_packed else None)
        if is_packed:
            output = output.flip(1).flatten(0, 1).index_select(0, places)
        return output, *last.chunk(net.states, -1)

    params = tuple(each.detach() for each in net.parameters())
    return Door(ours, plain, (packed.data if is_packed else x, *states, *params))


# -- Functions -------------------------------------------------------------------------------------


def affine(form: str) -> Door:
    """Return a linear recurrence with matrices of some form."""
    kept = torch.tensor([[1, 0], [1, 1]]).bool()
    pattern = {
        "dense": Pattern.dense((2, 2)),
        "shared": Pattern.dense((2, 2)),
        "diagonal": Pattern.diagonal(2),
        "sparse": of_mask(kept.numpy()),
    }[form]
    shapes = {
        "dense": (STEPS, BATCH, 2, 2),
        "shared": (1, 2, 2),
        "diagonal": (STEPS, BATCH, 2),
        "sparse": (STEPS, 3),
    }
    transposed = form == "sparse"

    def ours(a: Tensor, b: Tensor, y: Tensor) -> Any:
        return (affine_scan(a, b, y, pattern=pattern, transposed=transposed),)

    def plain(a: Tensor, b: Tensor, y: Tensor) -> Any:
        if form == "diagonal":
            a = torch.diag_embed(a)
        elif form == "sparse":
            places = torch.eye(4, dtype=a.dtype)[kept.flatten()].reshape(-1, 2, 2)
            a = torch.einsum("te,eij->tij", a, places).mT
        states = []
        for t in range(STEPS):
            y = torch.einsum("...ij,...j->...i", a[t % len(a)], y) + b[t]
            states.append(y)
        return (torch.stack(states),)

    return Door(ours, plain, (drawn(*shapes[form]), drawn(STEPS, BATCH, 2), drawn(BATCH, 2)))


def by_loop(b: Tensor, a: Tensor, x: Tensor) -> Tensor:
    """Filter along the last axis, with coefficients of shape ``(…, steps or 1, taps)``."""
    b, a = (each.expand(*each.shape[:-2], x.shape[-1], each.shape[-1]) for each in (b, a))
    y: list[Tensor] = []
    for t in range(x.shape[-1]):
        total = x[..., t] * b[..., t, 0]
        for k in range(1, min(b.shape[-1], t + 1)):
            total = total + b[..., t, k] * x[..., t - k]
        for k in range(1, min(a.shape[-1], t + 1)):
            total = total - a[..., t, k] * y[t - k]
        y.append(total / a[..., t, 0])
    return torch.stack(y, -1)


def with_delays(b: Tensor, a: Tensor, x: Tensor, zi: Tensor) -> tuple[Tensor, Tensor]:
    """Filter with initial conditions, by the transposed direct form II."""
    b, a = b / a[0], a / a[0]
    delays, y = list(zi.unbind(-1)), []
    for t in range(x.shape[-1]):
        y.append(b[0] * x[..., t] + delays[0])
        delays = [
            b[k + 1] * x[..., t]
            - a[k + 1] * y[-1]
            + (delays[k + 1] if k + 1 < len(delays) else 0 * delays[0])
            for k in range(len(delays))
        ]
    return torch.stack(y, -1), torch.stack(delays, -1)


def filtered(form: str) -> Door:
    """Return a filter with coefficients that are constant, change, or begin with delays."""
    x, one = drawn(BATCH, STEPS + 1), torch.tensor([1.5, 0.0, 0.0], dtype=torch.float64)
    if form == "changing":
        b, a = drawn(STEPS + 1, 2), drawn(BATCH, STEPS + 1, 3, scale=0.1) + one
        return Door(lambda b, a, x: (lfilter(b, a, x),), lambda *g: (by_loop(*g),), (b, a, x))
    b, a, zi = drawn(3), drawn(3, scale=0.1) + one, drawn(BATCH, 2)
    if form == "delays":
        return Door(lambda b, a, x, zi: lfilter(b, a, x, zi=zi), with_delays, (b, a, x, zi))
    return Door(
        lambda b, a, x: (lfilter(b, a, x),),
        lambda b, a, x: (by_loop(b[None], a[None], x),),
        (b, a, x),
    )


def sections(form: str) -> Door:
    """Return a cascade of filters."""
    sos, x = drawn(2, 6, scale=0.2), drawn(BATCH, STEPS + 1)
    sos[:, 3] += 1.5
    zi = drawn(2, BATCH, 2)

    def plain(sos: Tensor, x: Tensor, zi: Tensor | None = None) -> Any:
        finals = []
        for k, each in enumerate(sos):
            begin = torch.zeros_like(x[..., :2]) if zi is None else zi[k]
            x, final = with_delays(each[:3], each[3:], x, begin)
            finals.append(final)
        return (x,) if zi is None else (x, torch.stack(finals))

    if form == "delays":
        return Door(lambda sos, x, zi: sosfilt(sos, x, zi=zi), plain, (sos, x, zi))
    return Door(lambda sos, x: (sosfilt(sos, x),), plain, (sos, x))


def selective(form: str) -> Door:
    """Return a selective scan, of few arguments or of all."""
    u, delta, A = drawn(BATCH, 2, STEPS), drawn(BATCH, 2, STEPS).abs(), -drawn(2, 2).abs()
    B, C = drawn(BATCH, 2, STEPS), drawn(BATCH, 1, 2, STEPS)
    rest = () if form == "short" else (drawn(2), drawn(BATCH, 2, STEPS), drawn(2))

    def plain(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Tensor) -> Any:
        if rest:
            delta = torch.nn.functional.softplus(delta + rest[2][:, None])
        state, y = torch.zeros_like(u[..., :1] * A), []
        for t in range(STEPS):
            step = delta[..., t, None]
            state = torch.exp(step * A) * state + step * B[:, None, :, t] * u[..., t, None]
            y.append((state * C[..., t]).sum(-1))
        out = torch.stack(y, -1)
        if rest:
            out = (out + rest[0][:, None] * u) * rest[1] * torch.sigmoid(rest[1])
        return out, state

    def ours(*given: Tensor) -> Any:
        return selective_scan(*given, delta_softplus=bool(rest), return_last_state=True)

    return Door(ours, plain, (u, delta, A, B, C, *rest))


def attention(form: str) -> Door:
    """Return linear attention, of few arguments or of all."""
    q, k, v = (drawn(BATCH, STEPS, 2, 2, scale=0.3) for _ in range(3))
    more = (
        drawn(BATCH, STEPS, 2).sigmoid(),
        *(drawn(BATCH, STEPS, 2, 2, scale=0.3) for _ in range(2)),
    )
    rest = () if form == "short" else (*more, drawn(2, 2), drawn(BATCH, 2, 2, 2))

    def ours(*given: Tensor) -> Any:
        return linear_attention(*given, return_last_state=True)

    return Door(ours, plain_attention, (q, k, v, *rest))


DOORS: dict[str, Callable[[], Door]] = {
    "RNN": lambda: network("RNN"),
    "GRU": lambda: network("GRU", num_layers=2, batch_first=True),
    "LSTM": lambda: network("LSTM", bidirectional=True),
    "packed GRU": lambda: network("GRU", "packed"),
    "packed MGU": lambda: network(MGU, "packed", num_layers=2),
    "MGU": lambda: network(MGU, batch_first=True),
    "PeepholeLSTM": lambda: network(PeepholeLSTM, num_layers=2),
    **{
        f"affine_scan, {f}": lambda f=f: affine(f)
        for f in ("dense", "shared", "diagonal", "sparse")
    },
    **{f"lfilter, {f}": lambda f=f: filtered(f) for f in ("constant", "changing", "delays")},
    **{f"sosfilt, {f}": lambda f=f: sections(f) for f in ("constant", "delays")},
    **{f"selective_scan, {f}": lambda f=f: selective(f) for f in ("short", "whole")},
    **{f"linear_attention, {f}": lambda f=f: attention(f) for f in ("short", "whole")},
}


def door(name: str, seed: int = 0) -> Door:
    """Return a door, with random tensors."""
    torch.manual_seed(seed)
    return DOORS[name]()
