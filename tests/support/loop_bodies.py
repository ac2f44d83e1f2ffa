"""Bodies of loops as users of JAX write them, for tests of scans: those that kernels run, and not.

A body is ``body(p, carry, x)``, and takes its parameters as ``p[name, *shape]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

INPUTS, UNITS, BATCH = 6, 5, 4
# So many that kernels run steps without products.
MANY = 260
Body = Callable[[Any, Any, Any], Any]


class Parameters(dict):
    """Parameters that are drawn where a body takes them for the first time."""

    def __init__(self, rng: np.random.Generator, dtype: Any) -> None:
        super().__init__()
        self.rng, self.dtype = rng, dtype

    def __missing__(self, key: tuple[Any, ...]) -> Any:
        self[key] = jnp.asarray(0.4 * self.rng.standard_normal(key[1:]), self.dtype)
        return self[key]


def _dense(p: Any, name: str, x: Any, outputs: int = UNITS, bias: bool = True) -> Any:
    y = x @ p[name, x.shape[-1], outputs]
    return y + p[f"{name}_bias", outputs] if bias else y


def elman(p: Any, h: Any, x: Any) -> Any:
    """Step an RNN."""
    h = jnp.tanh(_dense(p, "ih", x) + _dense(p, "hh", h, bias=False))
    return h, h


def gru_split(p: Any, h: Any, x: Any) -> Any:
    """Step a GRU whose gates are parts of two products."""
    a = jnp.split(_dense(p, "ih", x, 3 * UNITS), 3, axis=-1)
    b = jnp.split(_dense(p, "hh", h, 3 * UNITS), 3, axis=-1)
    r, z = jax.nn.sigmoid(a[0] + b[0]), jax.nn.sigmoid(a[1] + b[1])
    h = (1 - z) * jnp.tanh(a[2] + r * b[2]) + z * h
    return h, h


def gru_of_flax(p: Any, h: Any, x: Any) -> Any:
    """Step a GRU with six products."""
    r = jax.nn.sigmoid(_dense(p, "ir", x) + _dense(p, "hr", h, bias=False))
    z = jax.nn.sigmoid(_dense(p, "iz", x) + _dense(p, "hz", h, bias=False))
    n = jnp.tanh(_dense(p, "in", x) + r * _dense(p, "hn", h))
    h = (1.0 - z) * n + z * h
    return h, h


def lstm_of_flax(p: Any, carry: Any, x: Any) -> Any:
    """Step an LSTM whose products are concatenated weights, cut into gates."""
    c, h = carry
    weights = jnp.concatenate([p[f"h{gate}", UNITS, UNITS] for gate in "ifgo"], axis=-1)
    biases = jnp.concatenate([p[f"b{gate}", UNITS] for gate in "ifgo"], axis=-1)
    dense = jnp.split(jnp.dot(h, weights) + biases, 4, axis=-1)
    i, f, g, o = (
        _dense(p, f"i{gate}", x, bias=False) + y for gate, y in zip("ifgo", dense, strict=True)
    )
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (c, h), h


def lstm_of_haiku(p: Any, carry: Any, x: Any) -> Any:
    """Step an LSTM with one product of the input and the state."""
    h, c = carry["hidden"], carry["cell"]
    gated = _dense(p, "linear", jnp.concatenate([x, h], axis=-1), 4 * UNITS)
    i, g, f, o = jnp.split(gated, indices_or_sections=4, axis=-1)
    f = jax.nn.sigmoid(f + 1)
    c = f * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return {"hidden": h, "cell": c}, h


def gru_of_haiku(p: Any, h: Any, x: Any) -> Any:
    """Step a GRU that cuts weights in its body."""
    w_h = p["w_h", UNITS, 3 * UNITS]
    w_hz, w_ha = jnp.split(w_h, indices_or_sections=[2 * UNITS], axis=1)
    b_z, b_a = jnp.split(p["b", 3 * UNITS], indices_or_sections=[2 * UNITS], axis=0)
    gates = jnp.matmul(x, p["w_i", x.shape[-1], 3 * UNITS])
    zr_x, a_x = jnp.split(gates, indices_or_sections=[2 * UNITS], axis=-1)
    zr = jax.nn.sigmoid(zr_x + jnp.matmul(h, w_hz) + jnp.broadcast_to(b_z, zr_x.shape))
    z, r = jnp.split(zr, indices_or_sections=2, axis=-1)
    a = jnp.tanh(a_x + jnp.matmul(r * h, w_ha) + jnp.broadcast_to(b_a, a_x.shape))
    h = (1 - z) * h + z * a
    return h, h


def _gru_of_equinox(p: Any, h: Any, x: Any) -> Any:
    gates = jnp.split(p["w_ih", 3 * UNITS, INPUTS] @ x + p["bias", 3 * UNITS], 3)
    hidden = jnp.split(p["w_hh", 3 * UNITS, UNITS] @ h, 3)
    reset = jax.nn.sigmoid(gates[0] + hidden[0])
    inp = jax.nn.sigmoid(gates[1] + hidden[1])
    new = jnp.tanh(gates[2] + reset * (hidden[2] + p["bias_n", UNITS]))
    return new + inp * (h - new)


def gru_of_equinox(p: Any, h: Any, x: Any) -> Any:
    """Step a GRU of one sample, which is mapped over samples in the body."""
    # They are drawn before the map.
    p["w_ih", 3 * UNITS, INPUTS], p["w_hh", 3 * UNITS, UNITS], p["bias", 3 * UNITS]
    p["bias_n", UNITS]
    h = jax.vmap(lambda a, b: _gru_of_equinox(p, a, b))(h, x)
    return h, h


def mgu(p: Any, h: Any, x: Any) -> Any:
    """Step a minimal gated unit: a product of what the step has computed."""
    f = jax.nn.sigmoid(_dense(p, "xf", x) + _dense(p, "hf", h, bias=False))
    n = jnp.tanh(_dense(p, "xn", x) + _dense(p, "hn", f * h, bias=False))
    return (h := (1 - f) * h + f * n), h


def ligru(p: Any, h: Any, x: Any) -> Any:
    """Step a light GRU, by a rectifier."""
    z, n = jnp.split(_dense(p, "x", x, 2 * UNITS) + _dense(p, "h", h, 2 * UNITS, False), 2, -1)
    z = jax.nn.sigmoid(z)
    return (h := z * h + (1 - z) * jax.nn.relu(n)), h


def _layer_norm(p: Any, name: str, x: Any) -> Any:
    mean, var = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * p[f"{name}_scale", UNITS]


def normalised_gru(p: Any, h: Any, x: Any) -> Any:
    """Step a GRU with layer normalisation of its gates."""
    z = jax.nn.sigmoid(_layer_norm(p, "z", _dense(p, "xz", x) + _dense(p, "hz", h)))
    n = jnp.tanh(_layer_norm(p, "n", _dense(p, "xn", x) + _dense(p, "hn", h)))
    return (h := (1 - z) * n + z * h), {"h": h, "z": z}


def independent(p: Any, h: Any, x: Any) -> Any:
    """Units that read no others."""
    h = jax.nn.relu(_dense(p, "x", x) + p["u", UNITS] * h)
    return h, None


def leaky(p: Any, h: Any, x: Any) -> Any:
    """Several small steps of a differential equation, with a scalar that is trained."""
    for _ in range(2):
        h = h + 0.1 * jax.nn.softplus(p["rate",]) * (jnp.tanh(_dense(p, "h", h)) - h)
    h = h + 0.2 * _dense(p, "x", x)
    return h, h**2


def filtered(p: Any, h: Any, x: Any) -> Any:
    """Step a filter of the input of each unit."""
    decay = jax.nn.sigmoid(p["decay", MANY])
    return (h := decay * h + (1 - decay) * x), h


@jax.custom_jvp
def _spike(v: Any) -> Any:
    return (v > 0).astype(v.dtype)


@_spike.defjvp
def _slope_of_spike(given: Any, slopes: Any) -> Any:
    (v,), (slope,) = given, slopes
    return _spike(v), slope / (1 + jnp.abs(10 * v)) ** 2


@jax.custom_vjp
def _step(v: Any) -> Any:
    return jnp.where(v > 0, 1.0, 0.0)


_step.defvjp(
    lambda v: (_step(v), v), lambda v, above: (above * jnp.where(jnp.abs(v) < 0.5, 1.0, 0.1),)
)


def spiking(p: Any, carry: Any, x: Any) -> Any:
    """Leaky neurons, whose spikes have other derivatives."""
    v, s = carry
    v = 0.9 * v + _dense(p, "x", x) + _dense(p, "s", s, bias=False) - jax.lax.stop_gradient(s)
    s = _spike(v - 0.3)
    return (v, s), s


def spiking_backwards(p: Any, v: Any, x: Any) -> Any:
    """Neurons with a derivative for reverse mode alone."""
    s = _step(v - 0.3)
    return 0.9 * v * (1 - s) + _dense(p, "x", x), s


def counted(p: Any, carry: Any, x: Any) -> Any:
    """Step a counter, a sum of losses, and weights that stay, in the carry."""
    count, h, total, weight = carry["count"], carry["h"], carry["loss"], carry["weight"]
    h = jnp.tanh(_dense(p, "x", x) + h @ weight)
    carry = {"count": count + 1, "h": h, "loss": total + jnp.mean(h**2) / (1 + count)}
    return {**carry, "weight": weight}, (h, count, x.sum())


def columns(p: Any, h: Any, x: Any) -> Any:
    """States of shape (units, batch)."""
    h = jnp.tanh(p["h", UNITS, UNITS] @ h + p["x", UNITS, INPUTS] @ x.T + p["b", UNITS, 1])
    return h, h


def two_layers(p: Any, carry: Any, x: Any) -> Any:
    """Two layers in one body, the states as they were are outputs."""
    a, b = carry
    c = jnp.tanh(_dense(p, "a", x) + _dense(p, "aa", a))
    d = jnp.tanh(_dense(p, "b", c) + _dense(p, "bb", b))
    return (c, d), (a, jnp.concatenate([b, d], -1))


def attended(p: Any, h: Any, x: Any) -> Any:
    """Softmax over units."""
    h = h + jax.nn.softmax(_dense(p, "h", h)) * jnp.tanh(_dense(p, "x", x)) - 0.1 * h
    return h, h


def gates_in_an_axis(p: Any, h: Any, x: Any) -> Any:
    """Gates that are an axis of their own."""
    gates = _dense(p, "x", x, 2 * UNITS) + _dense(p, "h", h, 2 * UNITS, bias=False)
    a, b = jnp.moveaxis(gates.reshape(-1, 2, UNITS) + p["b", 2, UNITS], 1, 0)
    h = 0.5 * h + jnp.stack([jnp.tanh(a), jnp.sin(b)]).sum(0)
    return h, h


def estimates(p: Any, carry: Any, x: Any) -> Any:
    """Step numbers in a dict."""
    mean = carry["mean"] + jax.nn.sigmoid(p["rate",]) * (x[0] - carry["mean"])
    error = x[0] - carry["mean"]
    precision = 1 / (1 / carry["precision"] + 0.1 * error**2 + 0.1)
    return {"mean": mean, "precision": precision}, mean * precision


def many_functions(p: Any, h: Any, x: Any) -> Any:
    """Functions of one number."""
    a = _dense(p, "x", x) + _dense(p, "h", h)
    a = jax.nn.silu(a) + jax.nn.gelu(h) - jax.nn.elu(a) + jax.nn.softplus(h) + jax.nn.log_sigmoid(a)
    a = a + jnp.clip(h, -0.3, 0.2) + jnp.maximum(h, p["m", UNITS]) - jnp.abs(a) / (1 + jnp.abs(a))
    a = a + jnp.where((h > 0.1) & ~(a <= 0), jnp.cos(a), jnp.expm1(-jnp.square(h)))
    h = jnp.tanh(a) + 0.1 * jnp.sign(h) * jnp.sqrt(1 + h * h) + jax.nn.leaky_relu(h) * (h != 0)
    return 0.5 * h, jnp.log(1 + h * h)


def more_functions(p: Any, h: Any, x: Any) -> Any:
    """Functions that are seldom in loops."""
    a = _dense(p, "x", x) + _dense(p, "h", h)
    b = jnp.logaddexp(a, h) + jnp.log1p(a * a) + jnp.exp2(-jnp.abs(a)) + jnp.arctan2(a, 1 + h * h)
    b = b + jax.nn.gelu(a, approximate=False) + jax.scipy.special.erf(h) + jnp.sinc(h)
    b = b + jnp.abs(a) ** 1.7 + jnp.sinh(0.3 * a) - jnp.cosh(0.2 * a) + jnp.tan(0.1 * a)
    b = b + jnp.arctan(a) + jnp.arctanh(0.5 * jnp.sin(a)) + jnp.nan_to_num(h)
    b = b + 0.1 * jnp.round(4 * a) + 0.2 * jnp.floor(3 * h) - 0.1 * jnp.ceil(5 * a)
    h = jnp.tanh(0.1 * b) * (h > 0.1).astype(jnp.int32) + 0.3 * a
    return jnp.where(jnp.isfinite(h), h, 0), h


def extremes(p: Any, h: Any, x: Any) -> Any:
    """Extremes over units, some of them masked, and what is true of all units or any."""
    a = _dense(p, "x", x) + _dense(p, "h", h)
    masked = jnp.where(p["mask", UNITS] > 0, a, -jnp.inf)
    a = a - 0.3 * h.max(-1, keepdims=True) + 0.2 * a.min(-1)[:, None] + jax.nn.softmax(masked)
    a = a - 0.1 * jax.nn.logsumexp(h, -1, keepdims=True)
    is_out = jnp.any(a > 1.2, -1, keepdims=True) | jnp.all(h < 0, -1, keepdims=True)
    return jnp.tanh(jnp.where(is_out, 0.5 * a, a)), h


def interleaved(p: Any, h: Any, x: Any) -> Any:
    """Gates that are every other number, or an axis behind the units; products of one column."""
    gates = _dense(p, "h", h, 2 * UNITS) + _dense(p, "x", x, 2 * UNITS)
    a = jnp.tanh(gates[:, ::2]) * jax.nn.sigmoid(gates[:, 1::2])
    pairs = (h @ p["w", UNITS, 3 * UNITS]).reshape(*h.shape, 3)
    a = a + jnp.sin(pairs[..., 0]) * pairs[..., 2]
    h = a + 0.3 * jax.nn.sigmoid(_dense(p, "one", h, 1)) * h + 0.1 * (a @ p["v", UNITS])[:, None]
    return h, h


def masked(p: Any, h: Any, x: Any) -> Any:
    """Step samples that have a step; inputs of others are no numbers."""
    is_there = ~jnp.isnan(x[:, :1])
    new = jnp.tanh(_dense(p, "x", jnp.where(is_there, x, 0)) + _dense(p, "h", h, bias=False))
    h = jnp.where(is_there, new, h)
    return h, h * x[:, 1:2]


def with_resets(p: Any, carry: Any, inputs: Any) -> Any:
    """Step a GRU of an agent, whose state episodes begin anew."""
    is_first = inputs[:, -1:] > 0.5
    h = jnp.where(is_first, p["begin", UNITS], carry)
    h, _ = gru_of_haiku(p, h, inputs)
    return h, jnp.max(h, axis=-1)


def with_dropout(p: Any, carry: Any, x: Any) -> Any:
    """Step an RNN with dropout, whose key is in the carry."""
    h, key = carry
    key, own = jax.random.split(key)
    keep = jax.random.bernoulli(own, 0.7, h.shape)
    h = jnp.tanh(_dense(p, "x", x) + _dense(p, "h", jnp.where(keep, h / 0.7, 0)))
    return (h, key), h


def with_two_inputs(p: Any, h: Any, x: Any) -> Any:
    """Step by products of two inputs, a gate of the input alone, and steps of some length."""
    a, b, dt = x[:, :2], x[:, 2:3] * x[:, 3:], jnp.exp(x[:, :1])
    gate = jax.nn.sigmoid(_dense(p, "g", a, 2 * UNITS)).reshape(-1, 2, UNITS)
    f = gate[:, 0] * jnp.tanh(_dense(p, "a", a) + _dense(p, "b", b) + _dense(p, "h", h))
    return h + 0.1 * dt * (f - gate[:, 1] * h), jnp.linalg.norm(h + 1)


def counted_within(p: Any, carry: Any, x: Any) -> Any:
    """Step with a rate that falls, and a power of it, in the carry."""
    h, count, power = carry
    rate = 0.1 / (1 + count)
    h = h - rate * (h - x) / jnp.sqrt(1 - 0.5 * power)
    return (h, count + 1, power * 0.9), h


def over_samples(p: Any, h: Any, x: Any) -> Any:
    """Step by means over samples, which are units of kernels."""
    return jnp.tanh(h - h.mean(0) + _dense(p, "x", x, MANY)), h


Case = tuple[Body, Callable[[Any], Any], tuple[int, ...]]


def _state(make: Callable[..., Any]) -> Any:
    return make(BATCH, UNITS)


def _pair(make: Callable[..., Any]) -> Any:
    return make(BATCH, UNITS), make(BATCH, UNITS)


def _counts(make: Callable[..., Any]) -> Any:
    about = {"count": jnp.int32(2), "loss": make(), "weight": make(UNITS, UNITS)}
    return {"h": make(BATCH, UNITS), **about}


_X = (BATCH, INPUTS)
CAPTURED: dict[str, Case] = {
    "elman": (elman, _state, _X),
    "elman of one sample": (elman, lambda make: make(UNITS), (INPUTS,)),
    "elman of two axes": (elman, lambda make: make(2, 3, UNITS), (2, 3, INPUTS)),
    "gru, split": (gru_split, _state, _X),
    "gru of flax": (gru_of_flax, _state, _X),
    "lstm of flax": (lstm_of_flax, _pair, _X),
    "lstm of haiku": (
        lstm_of_haiku,
        lambda make: dict(zip(("hidden", "cell"), _pair(make), strict=True)),
        _X,
    ),
    "gru of haiku": (gru_of_haiku, _state, _X),
    "gru of equinox": (gru_of_equinox, _state, _X),
    "mgu": (mgu, _state, _X),
    "ligru": (ligru, _state, _X),
    "normalised gru": (normalised_gru, _state, _X),
    "independent": (independent, _state, _X),
    "leaky": (leaky, _state, _X),
    "filtered": (filtered, lambda make: make(BATCH, MANY), (BATCH, MANY)),
    "spiking": (spiking, _pair, _X),
    "spiking, backwards": (spiking_backwards, _state, _X),
    "counted": (counted, _counts, _X),
    "columns": (columns, lambda make: make(UNITS, BATCH), _X),
    "two layers": (two_layers, _pair, _X),
    "attended": (attended, _state, _X),
    "gates in an axis": (gates_in_an_axis, _state, _X),
    "many estimates": (
        estimates,
        lambda make: {"mean": make(MANY), "precision": 1 + abs(make(MANY))},
        (1,),
    ),
    "many functions": (many_functions, _state, _X),
    "more functions": (more_functions, _state, _X),
    "extremes": (extremes, _state, _X),
    "interleaved": (interleaved, _state, _X),
    "over samples": (over_samples, lambda make: make(BATCH, MANY), _X),
    "masked": (masked, _state, _X),
    "with resets": (with_resets, _state, _X),
    "with dropout": (with_dropout, lambda make: (_state(make), jax.random.key(3)), _X),
    "with two inputs": (with_two_inputs, _state, _X),
    "counted within": (
        counted_within,
        lambda make: (make(MANY), jnp.int32(0), jnp.asarray(0.9, make().dtype)),
        (MANY,),
    ),
}


# -- Bodies that no kernel runs -------------------------------------------------------------------


def _while(p: Any, h: Any, x: Any) -> Any:
    h = jax.lax.fori_loop(0, 3, lambda _, a: jnp.tanh(a + _dense(p, "x", x)), h)
    return h, h


def _gather(p: Any, h: Any, x: Any) -> Any:
    order = jnp.argsort(h, -1)
    return jnp.tanh(jnp.take_along_axis(h, order, -1) + _dense(p, "x", x)), None


def _cumulative(p: Any, h: Any, x: Any) -> Any:
    return jnp.tanh(jnp.cumsum(h, -1)), h


def _fast_weights(p: Any, carry: Any, x: Any) -> Any:
    h, s = carry
    h = jnp.tanh(jnp.einsum("bij,bj->bi", s, h) + _dense(p, "x", x))
    return (h, 0.9 * s + h[:, :, None] * h[:, None, :]), h


def _over_all(p: Any, h: Any, x: Any) -> Any:
    return jnp.tanh(h - h.mean() + _dense(p, "x", x)), h


def _power_of_states(p: Any, h: Any, x: Any) -> Any:
    return jnp.abs(h) ** (1 + jnp.abs(_dense(p, "x", x))), h


def _other_product(p: Any, h: Any, x: Any) -> Any:
    weight = p["w", INPUTS, UNITS, UNITS]
    return jnp.tanh(jnp.einsum("bi,ijk,bj->bk", x, weight, h)), h


def _changed_weights(p: Any, h: Any, x: Any) -> Any:
    return jnp.tanh(h @ (p["w", UNITS, UNITS] * x[0, 0])), h


def _rolled(p: Any, h: Any, x: Any) -> Any:
    return jnp.tanh(jnp.roll(h, 1, -1) + _dense(p, "x", x)), h


def _narrow(p: Any, h: Any, x: Any) -> Any:
    return (h + x.mean()).astype(jnp.float16), h


def _rounded(p: Any, h: Any, x: Any) -> Any:
    return 0.5 * h.astype(jnp.float16).astype(h.dtype) + _dense(p, "x", x), h


def _integers(p: Any, count: Any, x: Any) -> Any:
    return count + 1, count * x


@jax.custom_vjp
def _clipped(v: Any) -> Any:
    return v


_clipped.defvjp(lambda v: (v, None), lambda _, above: (jnp.clip(above, -0.1, 0.1),))


def _clipped_gradients(p: Any, h: Any, x: Any) -> Any:
    return jnp.tanh(_clipped(h) + _dense(p, "x", x)), h


def _printing(p: Any, h: Any, x: Any) -> Any:
    jax.debug.callback(lambda a: None, h[0, 0])
    return jnp.tanh(h + _dense(p, "x", x)), h


def _mixed(p: Any, carry: Any, x: Any) -> Any:
    h, scale = carry
    h = jnp.tanh(scale * h + _dense(p, "x", x))
    return (h, jnp.sqrt(1 + jnp.sum(h * h))), h


def _narrow_state(make: Callable[..., Any]) -> Any:
    return make(BATCH, UNITS).astype(jnp.float16)


# With what explains it.
NOT_CAPTURED: dict[str, tuple[Case, str]] = {
    "while": ((_while, _state, _X), "(scan|while).*fori_loop"),
    "gather": ((_gather, _state, _X), "(sort|gather).*line.*(argsort|take_along_axis)"),
    "cumulative": ((_cumulative, _state, _X), "cumsum.*line.*jnp.cumsum"),
    "fast weights": (
        (_fast_weights, lambda make: (make(BATCH, UNITS), make(BATCH, UNITS, UNITS)), _X),
        r"a carry of float64\[4,5\], which depends on carries of float64\[4,5,5\]",
    ),
    "over all": ((_over_all, _state, _X), "reduce_sum.*line.*h.mean.*samples"),
    "power": ((_power_of_states, _state, _X), "pow .*line"),
    "other product": ((_other_product, _state, _X), "dot_general.*line.*einsum"),
    "changed weights": ((_changed_weights, _state, _X), "dot_general.*same in all steps"),
    "rolled": ((_rolled, _state, _X), "slice.*part of the units|concatenate"),
    "narrow": ((_narrow, _narrow_state, _X), "no carries of float32 or float64"),
    "rounded": ((_rounded, _state, _X), "convert_element_type.*line.*float16"),
    "integers": ((_integers, lambda make: jnp.int32(0), _X), "no carries of float32 or float64"),
    "clipped gradients": ((_clipped_gradients, _state, _X), "custom_vjp_call.*line.*_clipped"),
    "printing": ((_printing, _state, _X), "effects"),
    "scalars": (
        (estimates, lambda make: {"mean": make(), "precision": 1 + abs(make())}, (1,)),
        r"float64\[\] has so few numbers",
    ),
    "mixed": ((_mixed, lambda make: (make(BATCH, UNITS), make()), _X), r"a carry of float64\[\]"),
}
