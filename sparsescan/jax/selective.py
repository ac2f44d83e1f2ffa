"""Selective scans for JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..errors import InputTypeError, short
from ..execution import selective
from ..execution.selective import Inputs
from .ffi.calls import FLOATS, as_arrays, check_platform, together, vary, varying
from .ffi.programs import replay
from .ffi.rules import MappedAxis, Rules, operator

_NAMES = "u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state"


def selective_scan(
    u: Any,
    delta: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    initial_state: Any = None,
) -> Any:
    """Return the outputs of a selective state space model, as Mamba has it.

    With ``δ = softplus(delta + delta_bias)``, or ``delta + delta_bias``, it is, for each channel,

    ``h_t = exp(δ_t A) h_{t-1} + δ_t B_t u_t``, ``y_t = C_t·h_t + D u_t``, ``out_t = y_t silu(z_t)``

    from ``h_0`` on, zeros by default (Gu and Dao, 2023, arXiv 2312.00752, Algorithm 2, with
    ``exp(δ A)`` of equation 4 for states and ``δ B`` for inputs, as in its code).

    As :func:`sparsescan.torch.selective_scan`, for arrays of JAX, under ``jax.jit``, ``jax.vmap``,
    by which channels become more channels, parameters or not, and all derivatives, of any order. It
    takes the place of a ``jax.lax.scan`` over the steps. States are computed where they are used,
    and memory is that of a few arrays of the size of `u`. Results have the same bits for any number
    of threads. Gradients of gradients and forward mode are a ``jax.lax.scan``.

    Parameters
    ----------
    u, delta : array_like, shape (batch, channels, length)
        The inputs, and the sizes of steps.
    A : array_like, shape (channels, states)
        The rates, real.
    B, C : array_like
        How inputs enter the states, and how these are read: of shape (batch, states, length) the
        same for all channels, of shape (batch, groups, states, length) for those of a group, whose
        number divides that of channels, or of shape (channels, states) constant in time.
    D : array_like, shape (channels,), optional
        The factor by which inputs are added to the outputs.
    z : array_like, shape (batch, channels, length), optional
        The gate.
    delta_bias : array_like, shape (channels,), optional
        What is added to `delta`.
    delta_softplus : bool, default False
        Whether softplus is applied to that sum.
    return_last_state : bool, default False
        Whether to return the last states, too, which are differentiable as well.
    initial_state : array_like, shape (batch, channels, states), optional
        The states ``h_0``, such as those that another call has returned as last ones; zeros by
        default.

    Returns
    -------
    out : jax.Array, shape (batch, channels, length)
        The outputs, of the widest dtype of all that is given, float32 or float64.
    last_state : jax.Array, shape (batch, channels, states)
        The states after the last step, if asked for.

    Raises
    ------
    InputError
        If a shape is wrong.
    InputTypeError
        If a type is not supported, such as a complex `A`.
    DeviceError
        If JAX computes elsewhere than on the CPU.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from sparsescan.jax import selective_scan
    >>> u, B = jnp.ones((1, 1, 4)), jnp.ones((1, 1, 4))
    >>> delta = jnp.array([[[1.0, 1.0, 0.0, 1.0]]])
    >>> A = jnp.array([[-0.6931472]])  # a step of size 1 halves states
    >>> selective_scan(u, delta, A, B, C=B).ravel().tolist()
    [1.0, 1.5, 1.5, 1.75]
    >>> grad = jax.grad(lambda delta: selective_scan(u, delta, A, B, C=B)[0, 0, -1])(delta)
    >>> [round(each, 3) for each in grad.ravel().tolist()]
    [0.25, 0.327, -0.02, 0.48]
    """
    check_platform()
    for name, value in (
        ("delta_softplus", delta_softplus),
        ("return_last_state", return_last_state),
    ):
        if not isinstance(value, bool):
            raise InputTypeError(f"{name} is {short(value)}; expected True or False")
    values = u, delta, A, B, C, D, z, delta_bias, initial_state
    given = as_arrays(FLOATS, **dict(zip(_NAMES, values, strict=True)))
    shapes: Any = [None if each is None else each.shape for each in given]
    selective.check_shapes(*shapes)
    # What all channels share is of one group.
    given = [
        each[:, None] if k in (3, 4) and each.ndim == 3 else each for k, each in enumerate(given)
    ]
    form = _Form(tuple(each is not None for each in given), delta_softplus)
    out, last = _operator(form, *together([each for each in given if each is not None]))
    return (out, last) if return_last_state else out


class _Form(NamedTuple):
    """Which inputs there are, and whether softplus is applied."""

    there: tuple[bool, ...]
    softplus: bool

    def inputs(self, given: Sequence[Any]) -> Inputs:
        """Return all inputs, or what is given in place of them, by their names."""
        rest = iter(given)
        every: Any = [next(rest) if there else None for there in self.there]
        every.append(self.softplus)
        return Inputs(*every)

    def shapes(self, given: Sequence[Any]) -> Inputs:
        """Return their shapes."""
        return self.inputs([each.shape for each in given])


def _forward(form: _Form, given: Sequence[Any], keeps: bool) -> list[Any]:
    u = given[0]
    if 0 in u.shape or 0 in given[2].shape:
        more = [jnp.zeros_like(u, shape=_shapes(form, given)[2])] if keeps else []
        return [*_plain(form, *given), *more]
    about = form.shapes(given), keeps, u.dtype.name
    out, last, *more = replay(selective.record_scan, about, _turned(form, given))
    return [out, last.mT, *more]


def _gradients(
    form: _Form, needs: tuple[bool, ...], kept: Any, above: Sequence[Any], given: Sequence[Any]
) -> list[Any]:
    shapes = [each.shape for each, need in zip(given, needs, strict=True) if need]
    u, grads, last = given[0], above[0], above[1]
    if 0 in u.shape or 0 in given[2].shape:
        found = _again(form, kept, above, given)
        return [each for each, need in zip(found, needs, strict=True) if need]
    flags = iter(needs)
    every = tuple(there and next(flags) for there in form.there)
    about = form.shapes(given), every, u.dtype.name
    given = [kept, grads, last.mT, *_turned(form, given)]
    found = replay(selective.record_scan_vjp, about, given)
    results = [
        selective.factor_grad(each, shape) if len(shape) == 4 else each
        for each, shape in zip(found, shapes, strict=True)
    ]
    return [*results[:-1], results[-1].mT] if every[-1] else results


def _turned(form: _Form, given: Sequence[Any]) -> list[Any]:
    """Return inputs of which those with states have these before channels, as kernels read them."""
    turned = [each.mT if each.ndim == 2 else each for each in given]
    return [*turned[:-1], turned[-1].mT] if form.there[-1] else turned


def _slope(form: _Form, kept: Any, given: Sequence[Any], slopes: Sequence[Any]) -> list[Any]:
    along: list[Any] = jax.jvp(lambda *own: _plain(form, *own), given, slopes)[1]
    return along


def _again(form: _Form, kept: Any, above: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    return list(jax.vjp(lambda *own: _plain(form, *own), *given)[1](list(above)))


def _plain(form: _Form, *given: Any) -> list[Any]:
    """Return the outputs and the last states, step by step, by JAX's own operations."""
    every: Any = form.inputs(given)
    u, delta, a, b, c, skip, z, bias, start, _ = every
    channels = u.shape[1]
    delta = delta if bias is None else delta + bias[:, None]
    if form.softplus:
        # As PyTorch's, it is the identity beyond 20.
        delta = jnp.where(delta > 20, delta, jax.nn.softplus(jnp.minimum(delta, 20)))

    def at_step(factor: Any, steps: Any) -> Any:
        """Return `B` or `C` at a step, of the shape of states."""
        return factor if factor.ndim == 2 else jnp.repeat(steps, channels // steps.shape[1], 1)

    def step(state: Any, of: Any) -> Any:
        size, pushed, b_now, c_now = of
        state = jnp.exp(size[..., None] * a) * state + pushed[..., None] * at_step(b, b_now)
        return state, (state * at_step(c, c_now)).sum(-1)

    rows = (delta, delta * u, *(each if each.ndim == 4 else None for each in (b, c)))
    steps = jax.tree.map(lambda each: jnp.moveaxis(each, -1, 0), rows)
    begin = jnp.zeros((*u.shape[:2], a.shape[1]), u.dtype) if start is None else start
    begin = vary(begin, varying(given))
    last, out = jax.lax.scan(step, begin, steps)
    out = jnp.moveaxis(out, 0, -1)
    out = out if skip is None else out + skip[:, None] * u
    return [out if z is None else out * jax.nn.silu(z), last]


def _shapes(form: _Form, given: Sequence[Any]) -> list[tuple[int, ...]]:
    (batch, channels, length), states = given[0].shape, given[2].shape[1]
    segments = selective.segments_of(length, states)
    return [
        (batch, channels, length),
        (batch, channels, states),
        (batch, segments, states, channels),
    ]


def _axes(shapes: Sequence[tuple[int, ...]]) -> list[MappedAxis]:
    """Return the axes of channels, or of their groups."""
    places = [int(len(each) > 2) for each in shapes]
    return [MappedAxis(k, each[k]) for k, each in zip(places, shapes, strict=True)]


_operator = operator(
    "selective_scan",
    Rules(
        forward=_forward,
        gradients=_gradients,
        slope=_slope,
        again=_again,
        shapes=_shapes,
        axes=_axes,
        out_axes=(1, 1, 3),
        results=2,
        kept=2,
    ),
)
