"""Linear attention: the operation, checks of shapes, and the functions for NumPy.

    S_t = diag(w_t) S_{t-1} + b_t (a_tᵀ S_{t-1}) + k_t v_tᵀ,    o_t = S_tᵀ q_t

The operation takes `q`, `k`, `a` and `b` of shape (batch, length, heads, keys), `v` (batch, length,
heads, values), `decay` (batch, length, heads) or (batch, length, heads, keys), `bonus` (heads,
keys) and initial states (batch, heads, keys, values). It returns the outputs and the last states,
and keeps the states before each segment of steps: (batch, heads, segments, keys, values).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arrays.arrays import for_kernels, is_on_device, read_array
from ..checks import check_flag
from ..errors import Allocating, DeviceError, InputError
from ..execution.calls import Calls
from ..execution.threads import thread_count
from ..kernels.cpu import attention as kernels
from ..kernels.cpu.attention import Attention, AttentionGradients, room_size
from ..kernels.cpu.copies import add_up_rows, copy_into
from ..kernels.cpu.lanes import lanes
from .operation import Functions, MappedAxis, Operation, Shape, Shapes, is_empty, summed

Array = NDArray[Any]

# Numbers of states, of all steps, that are worth another thread, and tasks for each thread.
_GRAIN, _TURNS = 1 << 15, 4
# Bytes of a segment's states, in blocks of two 64-byte vectors, that fit the second-level cache;
# and the least and the most steps of a segment.
_BYTES, _LEAST, _MOST = 1 << 19, 16, 64

NAMES = "q", "k", "v", "decay", "a", "b", "bonus", "initial_state"


class AttentionGrads(NamedTuple):
    """Gradients in the arguments of :func:`sparsescan.linear_attention`, in the same shapes.

    Attributes
    ----------
    q, k, v, decay, a, b, bonus, initial_state : ndarray or None
        The gradients; None for arguments that were not given.
    """

    q: Array
    k: Array
    v: Array
    decay: Array | None
    a: Array | None
    b: Array | None
    bonus: Array | None
    initial_state: Array | None


def linear_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    decay: ArrayLike | None = None,
    a: ArrayLike | None = None,
    b: ArrayLike | None = None,
    bonus: ArrayLike | None = None,
    initial_state: ArrayLike | None = None,
    return_last_state: bool = False,
) -> Any:
    """Return the outputs of linear attention, whose states are matrices, with decay and delta rule.

        S_t = diag(w_t) S_{t-1} + b_t (a_tᵀ S_{t-1}) + k_t v_tᵀ,    o_t = S_tᵀ q_t

    for each sample and head, where ``w`` is `decay`.
    :doc:`Many models are special cases </how/attention>`. With a `bonus` ``u``,
    ``o_t = S_{t-1}ᵀ q_t + ((q_t ∘ u)·k_t) v_t``.

    Parameters
    ----------
    q, k : array_like, shape (batch, length, heads, keys)
        The queries that read the states, and the keys under which values are written.
    v : array_like, shape (batch, length, heads, values)
        The values.
    decay : array_like, shape (batch, length, heads) or (batch, length, heads, keys), optional
        The factor of a state, or of each of its rows; a row belongs to a key. An axis of length 1
        means that all samples, steps or heads share the factor. By default nothing decays.
    a, b : array_like, shape (batch, length, heads, keys), optional
        The vectors of the delta rule: it reads ``a_tᵀ S_{t-1}`` from the old state, and adds the
        result under the key ``b_t``.
    bonus : array_like, shape (heads, keys), optional
        The weight of a step's own value in its output, for each key.
    initial_state : array_like, shape (batch, heads, keys, values), optional
        The states ``S_0``; zeros by default.
    return_last_state : bool, default False
        Whether to return the states after the last step too.

    Returns
    -------
    out : ndarray, shape (batch, length, heads, values)
        The outputs, in the dtype that all input promotes to, float32 or float64.
    last_state : ndarray, shape (batch, heads, keys, values)
        The states after the last step, if asked for.

    Raises
    ------
    InputError
        If a shape is wrong, or if only one of `a` and `b` is given.
    InputTypeError
        If a type or a dtype is not supported.
    DeviceError
        If an array is not in host memory.

    See Also
    --------
    linear_attention_vjp : The gradients in all arguments.

    Examples
    --------
    A value is written under each of two keys, then one is replaced; the last query reads both.

    >>> import numpy as np, sparsescan
    >>> k = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])[None, :, None]
    >>> q, v = np.ones((1, 3, 1, 2)), np.array([1.0, 2.0, 5.0])[None, :, None, None]
    >>> sparsescan.linear_attention(q, k, v, a=k, b=-k).ravel()
    array([1., 3., 7.])
    """
    returns_last = check_flag("return_last_state", return_last_state)
    given, _ = _read_all(q, k, v, decay, a, b, bonus, initial_state)
    with Allocating("the outputs"):
        if is_empty([None if each is None else each.shape for each in given]):
            found = [np.zeros_like(given[2]), _first(given)]
        else:
            found = _forward(Calls(), (), given, False)
    return tuple(found) if returns_last else found[0]


def linear_attention_vjp(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    decay: ArrayLike | None = None,
    a: ArrayLike | None = None,
    b: ArrayLike | None = None,
    bonus: ArrayLike | None = None,
    initial_state: ArrayLike | None = None,
    *,
    grads: ArrayLike,
    grads_last: ArrayLike | None = None,
) -> AttentionGrads:
    """Return the gradients in all arguments of :func:`linear_attention`.

    The call repeats the forward pass, and keeps the states before segments of steps.

    Parameters
    ----------
    q, k, v, decay, a, b, bonus, initial_state
        As :func:`linear_attention` was given.
    grads : array_like, shape (batch, length, heads, values)
        The gradients of a loss in the outputs.
    grads_last : array_like, shape (batch, heads, keys, values), optional
        The gradients of the loss in the last states; zeros by default.

    Returns
    -------
    AttentionGrads
        The gradients, by the names of the arguments.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`linear_attention`.

    Examples
    --------
    >>> import numpy as np, sparsescan
    >>> k = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])[None, :, None]
    >>> q, v = np.ones((1, 3, 1, 2)), np.array([1.0, 2.0, 5.0])[None, :, None, None]
    >>> loss_grads = np.array([0.0, 0.0, 1.0])[None, :, None, None]  # of the last output
    >>> sparsescan.linear_attention_vjp(q, k, v, a=k, b=-k, grads=loss_grads).v.ravel()
    array([0., 1., 1.])
    """
    inputs = q, k, v, decay, a, b, bonus, initial_state
    given, above = _read_all(*inputs, grads=grads, grads_last=grads_last)
    loss, last = above
    start = _first(given)
    for name, own, expected in (("grads", loss, given[2].shape), ("grads_last", last, start.shape)):
        if own is not None and own.shape != expected:
            raise InputError(f"{name} has shape {own.shape}; expected {expected}")
    last = np.zeros_like(start) if last is None else last
    with Allocating("the gradients"):
        needs, calls = [each is not None for each in given], Calls()
        if is_empty([None if each is None else each.shape for each in given]):
            found = [np.zeros_like(each) for each in given if each is not None]
            found[-1:] = [last] if needs[-1] else found[-1:]
        else:
            kept = _forward(calls, (), given, True)[-1]
            found = _backward(calls, (), kept, [loss, last], given, needs, False)
        rest = iter(found)
        whole: Any = dict(zip(NAMES, [next(rest) if need else None for need in needs], strict=True))
        if decay is not None:
            whole["decay"] = summed(whole["decay"], np.shape(decay))
    return AttentionGrads(**whole)


def _first(given: Sequence[Any]) -> Array:
    """Return the states before the first step."""
    q, v, start = given[0], given[2], given[-1]
    shape = q.shape[0], *q.shape[2:], v.shape[3]
    return np.zeros(shape, q.dtype) if start is None else start.copy()


def _read_all(*inputs: Any, **above: Any) -> tuple[list[Any], list[Any]]:
    """Return inputs, and gradients in results, as contiguous arrays of one dtype, checked."""
    named = dict(zip(NAMES, inputs, strict=True)) | above
    arrays = {}
    for name, each in named.items():
        is_there = each is not None or name in (*NAMES[:3], "grads")
        arrays[name] = read_array(name, each) if is_there else None
        if is_on_device(arrays[name]):
            raise DeviceError(
                f"{name} is on a CUDA device; expected an array in host memory: there use "
                "flash-linear-attention"
            )
    given = _whole(np.broadcast_to, [arrays[name] for name in NAMES])
    whole = [*given, *[arrays[name] for name in above]]
    dtype = np.result_type(*[each.dtype for each in whole if each is not None])
    with Allocating("copies of arrays"):
        whole = [None if each is None else for_kernels(each, dtype) for each in whole]
    return whole[: len(NAMES)], whole[len(NAMES) :]


def attend(xp: Functions, given: Sequence[Any], returns_last: Any) -> Any:
    """Return the outputs, and the last states if asked for; inputs are in the order of `NAMES`.

    It is :func:`sparsescan.torch.linear_attention`, in the functions of any library.
    """
    returns_last = check_flag("return_last_state", returns_last)
    out, last = xp.run(LINEAR_ATTENTION, (), *_whole(xp.broadcast_to, given))
    return (out, last) if returns_last else out


def _whole(broadcast_to: Any, given: Sequence[Any]) -> list[Any]:
    """Return checked inputs, with a decay for each sample and step."""
    shapes: Any = [None if each is None else tuple(each.shape) for each in given]
    check_shapes(*shapes)
    q, k, v, decay, *others = given
    if decay is not None:
        decay = broadcast_to(decay, (*q.shape[:3], *q.shape[3:][: len(decay.shape) - 3]))
    return [q, k, v, decay, *others]


def _segment(keys: int) -> int:
    return max(_LEAST, min(_MOST, _BYTES // (128 * max(keys, 1))))


# -- Kernel calls ----------------------------------------------------------------------------------


def _forward(calls: Calls, form: tuple[()], given: Sequence[Any], keeps: bool) -> list[Array]:
    shapes, dtype = _shapes(form, [None if x is None else x.shape for x in given]), given[0].dtype
    names = ("out", "last", "kept")[: 2 + keeps]
    results = [calls.result(*about, dtype) for about in zip(names, shapes, strict=False)]
    scan = _read(given)
    arrays = [*[each.reshape(-1) for each in results], np.empty(0, dtype)][:3]
    _share(calls, partial(_run, calls, kernels.forward, scan, arrays, False), given)
    return results


def _backward(
    calls: Calls,
    form: tuple[()],
    kept: Array,
    above: Sequence[Array],
    given: Sequence[Any],
    needs: Sequence[bool],
    conjugated: bool,
) -> list[Array]:
    scan, (q, bonus), dtype = _read(given), (given[0], given[6]), kept.dtype
    results = [
        calls.result(name, array.shape, dtype) if need else None
        for name, array, need in zip(NAMES, given, needs, strict=True)
    ]
    none = np.empty(0, dtype)
    flat = [none if each is None else each.reshape(-1) for each in results]
    # Gradients in the bonus are summed in float64, over the steps of a sample, then over samples.
    batch, own = len(q), calls.zeros(0 if results[6] is None else len(q) * bonus.size, np.float64)
    dq, dk, dv, dw, da, db, _, dstart = flat
    into = AttentionGradients(dq, dk, dv, dw, da, db, dstart, own)
    arrays = [*[each.reshape(-1) for each in (*above, kept)], into]
    _share(calls, partial(_run, calls, kernels.backward, scan, arrays, True), given)
    if results[6] is not None:
        total = calls.room(bonus.size, np.float64)
        calls.launch(add_up_rows, total, own) if batch else None
        calls.launch(copy_into, flat[6], total)
    return [each for each in results if each is not None]


def _run(
    calls: Calls, kernel: Any, scan: Attention, arrays: Any, is_back: bool, first: int, last: int
) -> None:
    sizes = scan.keys, scan.values, scan.segment, lanes(scan.q.dtype)
    room = calls.borrow(room_size(*sizes, is_back), scan.q.dtype)
    calls.launch(kernel, scan, first, last, *arrays, room)
    calls.give_back(room)


def _read(given: Sequence[Any]) -> Attention:
    """Return the arguments of the kernels."""
    (_, length, heads, keys), values = given[0].shape, given[2].shape[3]
    none = np.empty(0, given[0].dtype)
    q, k, v, decay, a, b, bonus, start = (
        none if each is None else each.reshape(-1) for each in given
    )
    return Attention(
        heads=heads,
        keys=keys,
        values=values,
        length=length,
        segment=_segment(keys),
        decays=0 if given[3] is None else 1 if given[3].ndim == 3 else keys,
        reads_before=int(given[6] is not None),
        q=q,
        k=k,
        a=a,
        b=b,
        v=v,
        w=decay,
        bonus=bonus,
        start=start,
    )


def _share(calls: Calls, call: Any, given: Sequence[Any]) -> None:
    """Divide the heads of all samples into enough ranges that threads end together."""
    (batch, _, heads, _), work = given[0].shape, given[0].size * given[2].shape[3]
    ranges = max(1, min(batch * heads, _TURNS * thread_count(), work // _GRAIN))
    ends = [batch * heads * n // ranges for n in range(ranges + 1)]
    calls.together([partial(call, *ends[n : n + 2]) for n in range(ranges)])


# -- Shapes ----------------------------------------------------------------------------------------


def check_shapes(
    q: Shape,
    k: Shape,
    v: Shape,
    decay: Shape | None,
    a: Shape | None,
    b: Shape | None,
    bonus: Shape | None,
    initial_state: Shape | None,
) -> None:
    """Raise an InputError unless the shapes of inputs agree."""
    if len(q) != 4:
        raise InputError(f"q has shape {q}; expected (batch, length, heads, keys)")
    batch, length, heads, keys = q
    if len(v) != 4 or v[:3] != q[:3]:
        raise InputError(
            f"v has shape {v}; expected ({batch}, {length}, {heads}, values), as q has shape {q}"
        )
    if (a is None) != (b is None):
        one, other = ("a", "b") if b is None else ("b", "a")
        raise InputError(f"{other} is None, and {one} is given; expected both of them or neither")
    state = batch, heads, keys, v[3]
    for name, shape, expected in (
        ("k", k, q),
        ("a", a, q),
        ("b", b, q),
        ("bonus", bonus, (heads, keys)),
        ("initial_state", initial_state, state),
    ):
        if shape is not None and shape != expected:
            raise InputError(f"{name} has shape {shape}; expected {expected}")
    if decay is not None and (
        len(decay) not in (3, 4)
        or any(own not in (1, most) for own, most in zip(decay, q, strict=False))
    ):
        raise InputError(
            f"decay has shape {decay}; expected {q[:3]}, a number for each head, or {q}, one for "
            "each key, where axes may be 1"
        )


# -- The operation ---------------------------------------------------------------------------------


def _plain(xp: Functions, form: tuple[()], *given: Any) -> list[Any]:
    """Return the outputs and the last states step by step."""
    q, k, v, decay, a, b, bonus, start = given

    def step(before: Any, q: Any, k: Any, v: Any, w: Any, a: Any, b: Any) -> Any:
        state = before if w is None else before * (w if w.ndim == 3 else w[..., None])[..., None]
        if a is not None:
            state = state + b[..., None] * (a[..., None] * before).sum(-2)[..., None, :]
        added = k[..., None] * v[..., None, :]
        state = state + added
        seen = state if bonus is None else before + bonus[..., None] * added
        return state, (q[..., None] * seen).sum(-2)

    rows = [None if each is None else xp.moveaxis(each, 1, 0) for each in (q, k, v, decay, a, b)]
    (batch, _, heads, keys), values = q.shape, v.shape[3]
    begin = xp.filled(q, (batch, heads, keys, values), 0)
    last, out = xp.loop(step, begin if start is None else begin + start, rows)
    return [xp.filled(v, v.shape, 0) if out is None else xp.moveaxis(out, 0, 1), last]


def _shapes(form: tuple[()], shapes: Shapes) -> list[Shape]:
    q, v = shapes[0], shapes[2]
    assert q is not None
    assert v is not None
    batch, length, heads, keys = q
    segments = max(length - 1, 0) // _segment(keys)
    return [v, (batch, heads, keys, v[3]), (batch, heads, segments, keys, v[3])]


def _axes(shapes: Shapes) -> list[MappedAxis]:
    """Return the axes of heads."""
    places = 2, 2, 2, 2, 2, 2, 0, 1
    return [
        MappedAxis(k, 1 if each is None else each[k])
        for k, each in zip(places, shapes, strict=True)
    ]


def _check(form: tuple[()], shapes: Shapes) -> None:
    whole: Any = shapes
    check_shapes(*whole)
    q, decay = whole[0], whole[3]
    if decay is not None and decay not in (q, q[:3]):
        raise InputError(f"decay has shape {decay}; expected {q[:3]} or {q}, of each step")


LINEAR_ATTENTION = Operation(
    name="linear_attention",
    inputs=(*NAMES[:3], *(f"{name}?" for name in NAMES[3:])),
    encode=lambda form: ([], []),
    decode=lambda numbers, tables: (),
    shapes=_shapes,
    forward=_forward,
    backward=_backward,
    plain=_plain,
    axes=_axes,
    out_axes=(2, 1, 1),
    reads=tuple(range(8)),
    results=2,
    kept=2,
    check=_check,
)
