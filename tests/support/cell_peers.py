"""Cells of the catalogue beside those of other libraries, in float64.

A peer computes one step, from the states that our cell has to those that it has next, with our
parameters under the names that both use. Autograd through steps of a peer is the oracle of outputs,
states and gradients. Where a peer differs from the paper that both cite, it is bent here until it
does what the paper says: each such place says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sparsescan.recurrent import catalogue

torch = pytest.importorskip("torch")
torchrecurrent = pytest.importorskip("torchrecurrent")
snntorch = pytest.importorskip("snntorch")

Array = NDArray[Any]
Tensors = dict[str, Any]
# Takes the module, parameters, an input, and our states; returns our next states.
Step = Callable[[Any, Tensors, Any, tuple[Any, ...]], tuple[Any, ...]]

_ACTIVATIONS = (
    *("tanh", "relu", "sigmoid", "hardsigmoid", "softplus"),
    *("elu", "leaky_relu", "silu", "identity"),
)
_RATES = (0.3, 0.85)


@dataclass(frozen=True)
class Peer:
    """A cell of another library, and how it is called.

    Attributes
    ----------
    cell : type
        Our cell.
    make : callable
        Makes the module from input size, hidden size, bias and our options.
    step : callable
        Runs it.
    options : dict of str to tuple
        Options of our cell, and what they may be.
    same_sizes : bool
        Whether there are as many inputs as units.
    positive : tuple of int
        States that are never negative.
    spread : callable
        Returns a parameter from normal numbers, by its name.
    """

    cell: Any
    make: Callable[..., Any]
    step: Step
    options: Mapping[str, Any] = field(default_factory=dict)
    same_sizes: bool = False
    positive: tuple[int, ...] = ()
    spread: Callable[[str, Array], Array] = lambda name, normal: normal / 2

    @property
    def name(self) -> str:
        return self.cell.__name__

    def few_options(self, which: int) -> dict[str, Any]:
        """Return the default options, or others that are the same in each process.

        Kernels are compiled for each set of options, which takes a second.
        """
        if which == 0:
            return {}
        places = {key: which + 3 * k + len(self.name) for k, key in enumerate(self.options)}
        return {key: some[places[key] % len(some)] for key, some in self.options.items()}


def gradients(
    peer: Peer,
    options: Mapping[str, Any],
    sizes: tuple[int, int, bool],
    params: Mapping[str, Array],
    x: Array,
    state: Array,
    grads: Array,
) -> dict[str, Any]:
    """Return all states ``(T, B, S)`` of a sequence, and gradients of ``(states * grads).sum()``.

    ``state_grads`` are those in the states after each step, ``state`` in the first.
    """
    module = peer.make(*sizes, **options)
    given = {name: torch.tensor(array, requires_grad=True) for name, array in params.items()}
    read, begin = (torch.tensor(array, requires_grad=True) for array in (x, state))
    chain = [begin]
    for input_of_step in read:
        parts = torch.split(chain[-1], sizes[1], dim=-1)
        chain.append(torch.cat(peer.step(module, given, input_of_step, parts), dim=-1))
    states = torch.stack(chain[1:])
    leaves = {"input": read, "state": begin, **given}
    loss = (states * torch.tensor(grads)).sum()
    found = torch.autograd.grad(loss, [*leaves.values(), *chain[1:]], allow_unused=True)
    arrays = [
        np.zeros(leaf.shape) if grad is None else grad.numpy()
        for leaf, grad in zip([*leaves.values(), *chain[1:]], found, strict=True)
    ]
    results = dict(zip(leaves, arrays, strict=False))
    after = np.stack(arrays[len(leaves) :])
    return {"states": states.detach().numpy(), "state_grads": after} | results


# ---------------------------------------------------------------------------------------------
# torchrecurrent
# ---------------------------------------------------------------------------------------------


def call(module: Any, params: Tensors, x: Any, *states: Any) -> Any:
    """Run a module with these parameters; one number may have the shape ``(1,)`` there."""
    own = dict(module.named_parameters()) | dict(module.named_buffers())
    shaped = {
        name: value.reshape(own[name].shape) if value.dim() == 0 else value
        for name, value in params.items()
    }
    return torch.func.functional_call(module, shaped, (x, *states))


def one(module: Any, params: Tensors, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Run a cell with one state."""
    return (call(module, params, x, *states),)


def two(module: Any, params: Tensors, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Run a cell with two states."""
    return call(module, params, x, states)


def janet(module: Any, params: Tensors, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Run a cell whose two states are always the same."""
    h, c = call(module, params, x, (*states, *states))
    assert h is c
    return (c,)


def intersection(module: Any, params: Tensors, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    return call(module, params, x, states[1])


def mclstm(module: Any, params: Tensors, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    output, after = call(module, params, x, states[1:])
    return output, *after


def lem(module: Any, params: Tensors, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give the second state of the paper to a module that multiplies the one before."""
    h, z = states
    after, new = call(module, params, x, (h, z))
    if module.memory == "new":
        after, _ = call(module, params, x, (h, new))
    return after, new


def scrn(module: Any, params: Tensors, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Find the hidden state of the paper, which the module computes but does not return.

    Where ``y' = tanh(U h' + V s')`` has an identity and zeros, ``h'`` is the arctangent.
    """
    y, h, s = states
    before = h if module.recurrent == "hidden" else y
    y, s_after = call(module, params, x, (before, s))
    size = h.shape[-1]
    second = torch.arange(2 * size) >= size
    to = dict(params)
    for name in to:
        if name[-2:] in ("hh", "ch"):
            to[name] = torch.where(second if to[name].dim() == 1 else second[:, None], 0, to[name])
    to["weight_hh"] = (
        to["weight_hh"] + torch.eye(2 * size, dtype=h.dtype)[:, size:] * second[:, None]
    )
    squashed, _ = call(module, to, x, (before, s))
    return y, torch.atanh(squashed), s_after


def nas(module: Any, params: Tensors, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Multiply in the fourth gate, where the module adds, by two biases of each sample."""
    if module.join == "sum":
        return call(module, params, x, states)
    size = states[0].shape[-1]
    fourth = slice(3 * size, 4 * size)
    zero = torch.zeros(8 * size, dtype=x.dtype)
    to = {"bias_ih": zero, "bias_hh": zero} | params
    read = x @ to["weight_ih"].T + to["bias_ih"]
    product = read * (states[0] @ to["weight_hh"].T + to["bias_hh"])
    total = read + states[0] @ to["weight_hh"].T + to["bias_hh"]
    change = torch.zeros_like(total)
    change[:, fourth] = (product - total)[:, fourth]
    return call(module, to | {"bias_hh": to["bias_hh"] + change}, x, states)


def typed(module: Any, params: Tensors, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Run a cell that keeps its last input; we keep products of it.

    The last input is taken to be 0, and the products are added to biases.
    """
    *own, z, f, o = states
    bias = params.get("bias_hh", torch.zeros(3 * z.shape[-1], dtype=x.dtype))
    to = params | {"bias_hh": bias + torch.cat([z, f, o], dim=-1)}
    after = call(module, to, x, (own[-1], torch.zeros_like(x)))
    after = (after[0], after[1][0]) if len(own) == 2 else (after[0],)
    return *after, *torch.split(x @ params["weight_hh"].T, z.shape[-1], dim=-1)


def tau(module: Any, params: Tensors, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    return call(module, params, x, states[0], states[-1]), *states[:-1]


class Hardsigmoid(torch.nn.Module):
    """PyTorch's; whose own has the sixth in its derivative as float32, also for float64."""

    def forward(self, a: Any) -> Any:
        return torch.nn.functional.relu6(a + 3) / 6


def made(name: str, ours: Sequence[str] = ()) -> Callable[..., Any]:
    """Return what makes a cell of torchrecurrent; of `ours` it knows nothing."""
    kind = getattr(torchrecurrent, f"{name}Cell")
    known = inspect.signature(kind).parameters

    def make(inputs: int, hidden: int, bias: bool, **options: Any) -> Any:
        biases = {key: bias for key in known if key.endswith("bias")}
        own = {key: options.pop(key) for key in (*ours, "delay") if key in options}
        module = kind(inputs, hidden, **biases, **options).double()
        for key, child in list(module.named_children()):
            if isinstance(child, torch.nn.Hardsigmoid):
                setattr(module, key, Hardsigmoid())
            elif isinstance(child, torch.nn.Softplus):
                child.threshold = 500  # and not 20, from where on it is not exact
        for key in ours:
            setattr(module, key, own[key])
        return module

    return make


def _torchrecurrent(
    name: str,
    step: Step | None = None,
    ours: Mapping[str, Any] | None = None,
    same_sizes: bool = False,
    **numbers: Any,
) -> Peer:
    """Return the peer of a cell of torchrecurrent, with all activations that it may have."""
    kind = getattr(torchrecurrent, f"{name}Cell")
    options = {
        key: _ACTIVATIONS
        for key in inspect.signature(kind).parameters
        if key.endswith("nonlinearity")
    }
    if step is None:
        step = two if issubclass(kind, torchrecurrent.base.DoubleStateCellBase) else one
    return Peer(
        getattr(catalogue, name),
        made(name, tuple(ours or ())),
        step,
        options | numbers | dict(ours or {}),
        same_sizes,
    )


# ---------------------------------------------------------------------------------------------
# snnTorch
# ---------------------------------------------------------------------------------------------


class _Atan(snntorch.surrogate.ATan):
    """snnTorch's, whose spikes are float32: and so would gradients be that pass them."""

    @staticmethod
    def forward(ctx: Any, potential: Any, alpha: float) -> Any:
        return snntorch.surrogate.ATan.forward(ctx, potential, alpha).to(potential.dtype)


class _FastSigmoid(snntorch.surrogate.FastSigmoid):
    @staticmethod
    def forward(ctx: Any, potential: Any, slope: float) -> Any:
        return snntorch.surrogate.FastSigmoid.forward(ctx, potential, slope).to(potential.dtype)


def _snntorch(name: str, **rates: float) -> Peer:
    def make(inputs: int, hidden: int, bias: bool, **options: Any) -> Any:
        if options.pop("spike_grad") == "atan":
            alpha = options.pop("alpha_of_atan")
            options["spike_grad"] = lambda u: _Atan.apply(u, alpha)
        else:
            slope = options.pop("slope")
            options["spike_grad"] = lambda u: _FastSigmoid.apply(u, slope)
        options.pop("slope", None), options.pop("alpha_of_atan", None)
        factor = torch.tensor(options.pop("graded_spikes_factor"), dtype=torch.float64)
        module = getattr(snntorch, name)(**rates, **options).double()
        module.graded_spikes_factor = factor
        return module

    def step(module: Any, params: Tensors, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
        return torch.func.functional_call(module, params, (x, *states[1:]))

    def spread(name: str, normal: Array) -> Array:
        # Away from bounds, and alpha above beta.
        low = {"alpha": 0.75, "beta": 0.25, "threshold": 0.5}[name]
        return low + 0.2 * np.tanh(np.abs(normal))

    options = {
        "reset_mechanism": ("subtract", "zero", "none"),
        "spike_grad": ("atan", "fast_sigmoid"),
        "alpha_of_atan": (2.0, 0.7),
        "slope": (25.0, 3.0),
        "graded_spikes_factor": (1.0, 1.5),
    }
    cell = getattr(catalogue, name)
    if name != "Alpha":
        options["reset_delay"] = (True, False)
    return Peer(cell, make, step, options, same_sizes=True, spread=spread)


# ---------------------------------------------------------------------------------------------
# Cells without a package of their own
# ---------------------------------------------------------------------------------------------


def min_gru(module: Any, params: Tensors, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Compute minGRU as Algorithm 1 of its paper does."""
    z, n = torch.nn.functional.linear(x, params["weight_ih"], params.get("bias_ih")).chunk(2, -1)
    z = torch.sigmoid(z)
    return ((1 - z) * states[0] + z * n,)


def min_lstm(module: Any, params: Tensors, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Compute minLSTM as Algorithm 3 of its paper does."""
    f, i, n = torch.nn.functional.linear(x, params["weight_ih"], params.get("bias_ih")).chunk(3, -1)
    f, i = torch.sigmoid(f), torch.sigmoid(i)
    return (f / (f + i) * states[0] + i / (f + i) * n,)


def slstm(module: Any, params: Tensors, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Compute sLSTM as the package ``xlstm`` does, in ``slstm_forward_pointwise``.

    That package needs others that are large; so its step is written here anew. It takes the first
    branch where all of ``n`` is 0; here each unit takes its own.
    """
    linear = torch.nn.functional.linear
    raw = linear(x, params["weight_ih"], params.get("bias_ih"))
    raw = raw + _by_heads(params["weight_hh"], states[0], 4)
    _, c, n, m = states
    i, f, z, o = raw.chunk(4, -1)
    decayed = m + torch.nn.functional.logsigmoid(f)
    after = torch.where(n == 0, i, torch.maximum(i, decayed))
    one = torch.ones_like(i)
    i = torch.minimum(torch.exp(i - after), one)
    f = torch.minimum(torch.exp(decayed - after), one)
    c, n = f * c + i * torch.tanh(z), f * n + i
    return torch.sigmoid(o) * c / n, c, n, after


def _by_heads(weight: Any, h: Any, gates: int) -> Any:
    """Return products of the gates of a matrix whose heads multiply their own units."""
    size = weight.shape[1]
    blocks = weight.reshape(gates, -1, size, size)  # gate, head, row, column
    return torch.einsum("bhi,ghoi->bgho", h.unflatten(-1, (-1, size)), blocks).flatten(1)


def block_diagonal_lstm(
    module: Any, params: Tensors, x: Any, states: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Compute an LSTM whose hidden weights are a block for each head."""
    linear, (h, c) = torch.nn.functional.linear, states
    raw = linear(x, params["weight_ih"], params.get("bias_ih"))
    raw = raw + _by_heads(params["weight_hh"], h, 4) + params.get("bias_hh", 0)
    i, f, g, o = raw.chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def projected_lstm(module: Any, params: Tensors, x: Any, states: tuple[Any, ...]) -> Any:
    """Compute an LSTM as PyTorch's documentation defines it with projections."""
    linear, (h, c), project = torch.nn.functional.linear, states, params["weight_hr"]
    raw = linear(x, params["weight_ih"], params.get("bias_ih"))
    raw = raw + linear(h[:, : len(project)], params["weight_hh"], params.get("bias_hh"))
    i, f, g, o = raw.chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = linear(o.sigmoid() * c.tanh(), project)
    return torch.nn.functional.pad(h, (0, c.shape[1] - len(project))), c


def _norm(a: Any, scale: Any) -> Any:
    return torch.nn.functional.layer_norm(a, a.shape[-1:], eps=1e-5) * scale


def layer_norm_lstm(
    module: Any, params: Tensors, x: Any, states: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Compute equations 20 to 22 of Ba, Kiros and Hinton."""
    h, c = states
    gates = _norm(x @ params["weight_ih"].T, params["scale_ih"])
    gates = gates + _norm(h @ params["weight_hh"].T, params["scale_hh"])
    f, i, o, g = (gates + params.get("bias_hh", 0)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * (_norm(c, params["scale_c"]) + params.get("bias_c", 0)).tanh(), c


def layer_norm_gru(
    module: Any, params: Tensors, x: Any, states: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Compute equations 26 to 28 of Ba, Kiros and Hinton."""
    (h,), size = states, states[0].shape[-1]
    read, keep = x @ params["weight_ih"].T, h @ params["weight_hh"].T
    a, b = params["scale_ih"], params["scale_hh"]
    bias = params.get("bias_ih", torch.zeros(3 * size, dtype=x.dtype))
    two = slice(2 * size)
    gates = _norm(read[..., two], a[two]) + _norm(keep[..., two], b[two]) + bias[two]
    z, r = gates.sigmoid().chunk(2, -1)
    last = slice(2 * size, None)
    kept = _norm(keep[..., last], b[last]) + params.get("bias_hn", 0)
    n = (_norm(read[..., last], a[last]) + bias[last] + r * kept).tanh()
    return ((1 - z) * h + z * n,)


def _lstm(p: Tensors, x: Any, h: Any, c: Any) -> tuple[Any, Any]:
    """Return the next states of PyTorch's LSTM, whose input has masks behind it in `x`."""
    weight = p["weight_ih"]
    own = weight, p["weight_hh"], p.get("bias_ih"), p.get("bias_hh")
    return torch._VF.lstm_cell(x[:, : weight.shape[1]], (h, c), *own)


def mogrifier_lstm(_: None, p: Tensors, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Compute equations 1 and 2 of Melis, Kočiský and Blunsom."""
    (h, c), q, r = states, p["weight_q"].chunk(3), p["weight_r"].chunk(2)
    for k in range(5):
        if k % 2:
            h = 2 * (x @ r[k // 2].T).sigmoid() * h
        else:
            x = 2 * (h @ q[k // 2].T).sigmoid() * x
    return _lstm(p, x, h, c)


def zoneout_lstm(_: None, p: Tensors, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    h, c = states
    new_h, new_c = _lstm(p, x, h, c)
    keeps_h, keeps_c = x[:, p["weight_ih"].shape[1] :].chunk(2, -1)
    return torch.lerp(h, new_h, keeps_h), torch.lerp(c, new_c, keeps_c)


def variational_lstm(_: None, p: Tensors, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    h, c = states
    return _lstm(p, x, h * x[:, -h.shape[1] :], c)


def _sums(p: Tensors, x: Any, h: Any) -> tuple[Any, Any, Any]:
    """Return the sums of all gates of `x` and of `h`, and the mask behind the input in `x`."""
    weight, units = p["weight_ih"], h.shape[1]
    linear = torch.nn.functional.linear
    given = linear(x[:, : weight.shape[1]], weight, p.get("bias_ih"))
    return given, linear(h, p["weight_hh"], p.get("bias_hh")), x[:, -units:]


def dropout_lstm(_: None, p: Tensors, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    h, c = states
    given, own, mask = _sums(p, x, h)
    i, f, g, o = (given + own).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * mask * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def dropout_gru(_: None, p: Tensors, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    (h,) = states
    given, own, mask = _sums(p, x, h)
    z, r = (
        torch.sigmoid(a + b) for a, b in zip(given.chunk(3, -1)[:2], own.chunk(3, -1), strict=False)
    )
    _, again, _ = _sums(p, x, r * h)
    n = torch.tanh(given.chunk(3, -1)[2] + again.chunk(3, -1)[2])
    return ((1 - z) * h + z * mask * n,)


def variational_gru(_: None, p: Tensors, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    (h,) = states
    given, _, mask = _sums(p, x, h)
    _, own, _ = _sums(p, x, mask * h)
    (r, z, n), (r_own, z_own, n_own) = given.chunk(3, -1), own.chunk(3, -1)
    r, z = torch.sigmoid(r + r_own), torch.sigmoid(z + z_own)
    return ((1 - z) * torch.tanh(n + r * n_own) + z * h,)


def nothing(*sizes: Any, **options: Any) -> None:
    """Make no module."""


PEERS = {
    peer.name: peer
    for peer in (
        _torchrecurrent("ATR"),
        _torchrecurrent("AntisymmetricRNN", epsilon=_RATES, gamma=_RATES),
        _torchrecurrent("BR"),
        _torchrecurrent("CFN"),
        _torchrecurrent("DSGU"),
        _torchrecurrent("FastGRNN"),
        _torchrecurrent("FastRNN"),
        _torchrecurrent("GatedAntisymmetricRNN", epsilon=_RATES, gamma=_RATES),
        _torchrecurrent("IndRNN"),
        _torchrecurrent("IntersectionRNN", intersection, same_sizes=True),
        _torchrecurrent("JANET", janet),
        _torchrecurrent("LEM", lem, {"memory": ("new", "old")}, dt=_RATES),
        _torchrecurrent("LiGRU"),
        _torchrecurrent("LightRU"),
        _torchrecurrent("MCLSTM", mclstm),
        _torchrecurrent("MGU"),
        _torchrecurrent("MUT1"),
        _torchrecurrent("MUT2"),
        _torchrecurrent("MUT3"),
        _torchrecurrent("MiRU1", update_coefficient=_RATES),
        _torchrecurrent("MiRU2", update_coefficient=_RATES, reset_coefficient=_RATES),
        _torchrecurrent("MinimalRNN"),
        _torchrecurrent("MultiplicativeLSTM"),
        _torchrecurrent("NAS", nas, {"join": ("product", "sum")}),
        _torchrecurrent("NBR"),
        _torchrecurrent("OriginalLSTM"),
        _torchrecurrent("PeepholeLSTM"),
        _torchrecurrent("RAN"),
        _torchrecurrent("ResLSTM"),
        _torchrecurrent("SCRN", scrn, {"recurrent": ("hidden", "output")}),
        _torchrecurrent("SGRN"),
        _torchrecurrent("SGU"),
        _torchrecurrent("STAR"),
        _torchrecurrent("TGRU", typed),
        _torchrecurrent("TLSTM", typed),
        _torchrecurrent("TRNN"),
        _torchrecurrent("UGRNN"),
        _torchrecurrent("UnICORNN", dt=_RATES, alpha=_RATES),
        _torchrecurrent("WMCLSTM"),
        _torchrecurrent("coRNN", dt=_RATES, gamma=_RATES, epsilon=_RATES),
        _torchrecurrent("tauGRU", tau, delay=(1, 2, 4)),
        _snntorch("Alpha", alpha=0.9, beta=0.8),
        _snntorch("Leaky", beta=0.9),
        _snntorch("Synaptic", alpha=0.9, beta=0.8),
        Peer(catalogue.BlockDiagonalLSTM, nothing, block_diagonal_lstm, {"heads": (2, 3)}),
        Peer(catalogue.LayerNormGRU, nothing, layer_norm_gru),
        Peer(catalogue.LayerNormLSTM, nothing, layer_norm_lstm),
        Peer(catalogue.MogrifierLSTM, nothing, mogrifier_lstm, same_sizes=True),
        Peer(catalogue.RecurrentDropoutGRU, nothing, dropout_gru),
        Peer(catalogue.RecurrentDropoutLSTM, nothing, dropout_lstm),
        Peer(catalogue.VariationalGRU, nothing, variational_gru),
        Peer(catalogue.VariationalLSTM, nothing, variational_lstm),
        Peer(catalogue.ZoneoutLSTM, nothing, zoneout_lstm),
        Peer(catalogue.minGRU, nothing, min_gru),
        Peer(catalogue.minLSTM, nothing, min_lstm),
        Peer(catalogue.ProjectedLSTM, nothing, projected_lstm, {"proj_size": (1, 3)}),
        Peer(catalogue.sLSTM, nothing, slstm, {"heads": (4, 1, 2)}, positive=(2,)),
    )
}
