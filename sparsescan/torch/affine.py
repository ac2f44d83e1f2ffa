"""Linear recurrences for PyTorch."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from ..checks import check_flag
from ..errors import InputTypeError
from ..locks import new_lock
from ..ops.readings import Reading, read_shapes, read_shapes_anew
from ..ops.recurrence import RECURRENCE, form_of, whole_shapes
from ..symbolic.pattern import Pattern
from .binder import View, bind
from .calls.arrays import NUMBERS, check_tensors
from .calls.direct import is_direct


def affine_scan(
    matrices: Tensor,
    offsets: Tensor | None = None,
    initial: Tensor | None = None,
    *,
    pattern: Pattern | None = None,
    transposed: bool = False,
) -> Tensor:
    """Return the states of a linear recurrence in the order of time, ``y_t = A_t y_{t-1} + b_t``.

    This is :func:`sparsescan.affine_scan` for PyTorch tensors. It is differentiable any number of
    times in all tensors, in both modes, and under the transforms of ``torch.func``. It is one
    operator, registered with ``torch.library``, so ``torch.compile`` does not break the graph.
    Contiguous tensors are not copied, nor are transposed dense matrices in host memory. Tensors on
    a CUDA device are scanned there, on PyTorch's current stream; this needs CuPy.

    Parameters
    ----------
    matrices : Tensor
        The matrices ``A_1, …, A_T``: dense, ``(T, size, size)`` or ``(T, batch, size, size)``;
        diagonals, ``(T, size)`` or ``(T, batch, size)``; a number for each step, ``(T,)``; values
        in the order of `pattern`, ``(T, nnz)`` or ``(T, batch, nnz)``. One matrix for all steps has
        no first axis, or one of length one. Samples share matrices without a batch axis.
    offsets : Tensor, shape (T, size) or (T, batch, size), optional
        The terms ``b_1, …, b_T``; zeros by default.
    initial : Tensor, shape (size,) or (batch, size), optional
        The state ``y_0``; zeros by default.
    pattern : Pattern, optional
        The pattern of the matrices, if `matrices` are values. If shapes are ambiguous, pass
        ``Pattern.diagonal(size)`` for diagonals or ``Pattern.dense((size, size))`` for dense
        matrices.
    transposed : bool, default False
        Whether a step applies ``A_tᵀ`` in place of ``A_t``.

    Returns
    -------
    Tensor, shape (T, size) or (T, batch, size)
        The states ``y_1, …, y_T``.

    Raises
    ------
    InputError
        If a shape or a size is wrong, or if shapes are ambiguous.
    InputTypeError
        If a type or a layout is not supported, or dtypes differ. Complex numbers are supported only
        in host memory.
    DeviceError
        If the tensors are not all in host memory or on one CUDA device, or the device cannot be
        used.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.torch import affine_scan
    >>> decay = torch.full((4, 1), 0.5, requires_grad=True)
    >>> y = affine_scan(decay, torch.ones(4, 1))
    >>> y.flatten().tolist()
    [1.0, 1.5, 1.75, 1.875]
    >>> y[-1].backward()
    >>> decay.grad.flatten().tolist()
    [0.0, 0.25, 0.75, 1.75]
    """
    given = matrices, offsets, initial
    is_own = is_direct(*given)
    key = _key(*given, pattern, transposed) if is_own else None
    known = None if key is None else _known.get(key)
    if known is _ONE_STEP:
        return _one_step(*given)
    if known is not None and matrices.is_contiguous():
        return _bound.run(known, given)[0]
    transposed = check_flag("transposed", transposed)
    check_tensors(
        {"matrices": matrices, "offsets": offsets, "initial": initial},
        ("offsets", "initial"),
        dtypes=NUMBERS,
        has_cuda=True,
    )
    if matrices.is_cuda and matrices.is_complex():
        raise InputTypeError(
            f"matrices has dtype {matrices.dtype} on {matrices.device}; expected float32 or "
            "float64 there: complex numbers are scanned on the CPU (matrices.cpu())"
        )
    added, begin = (None if each is None else tuple(each.shape) for each in (offsets, initial))
    # A compiler cannot trace a cached function.
    read = read_shapes_anew if torch.compiler.is_compiling() else read_shapes
    reading = read(tuple(matrices.shape), added, begin, pattern)
    if key is not None and _is_one_step(reading, *given):
        _remember(key, _ONE_STEP)
        return _one_step(matrices.reshape(reading.axes).expand(reading.shape), offsets, initial)
    form = form_of(reading, pattern, transposed)
    whole = matrices
    if reading.is_number:
        whole = matrices.reshape(reading.axes).expand(reading.shape).contiguous()
    elif reading.kind == "dense" and not matrices.is_contiguous() and matrices.mT.is_contiguous():
        # Column-major matrices are the transposes of row-major ones.
        whole, form = matrices.mT, form.adjoint
    inside = whole_shapes(reading, form, added, begin)
    count = 1 if not reading.batch else reading.batch[0]
    states = reading.steps, *reading.batch, reading.size
    if is_own:
        view = View(inside, (reading.steps, count, reading.size), states)
        program = _bound.program(form, (whole, offsets, initial), view)
        if key is not None and whole is matrices:
            _remember(key, program)
        return _bound.run(program, (whole, offsets, initial))[0]
    tensors = [
        each if each is None or shape in (None, tuple(each.shape)) else each.reshape(shape)
        for each, shape in zip((whole, offsets, initial), inside, strict=True)
    ]
    return _bound(form, *tensors)[0].reshape(states)


# -- Calls of shapes that came before --------------------------------------------------------------

_MOST = 64
_known: OrderedDict[Any, Any] = OrderedDict()
_ONE_STEP = object()  # beside programs
_lock = new_lock()
_bound = bind(RECURRENCE)


def _key(
    matrices: Tensor,
    offsets: Tensor | None,
    initial: Tensor | None,
    pattern: Pattern | None,
    transposed: bool,
) -> Any:
    """Return all properties of the arguments that a call reads; None for unusual arguments."""
    if type(transposed) is not bool or not (pattern is None or type(pattern) is Pattern):
        return None
    return (
        *[
            None if each is None else (each.shape, each.dtype, each.layout, each.is_cpu)
            for each in (matrices, offsets, initial)
        ],
        pattern,
        transposed,
    )


def _remember(key: Any, program: Any) -> None:
    with _lock:
        _known[key] = program
        while len(_known) > _MOST:
            _known.popitem(last=False)


def _is_one_step(
    reading: Reading, matrices: Tensor, offsets: Tensor | None, initial: Tensor | None
) -> bool:
    """Return whether a scan is one step with diagonals, which PyTorch computes faster."""
    if offsets is None or initial is None or not matrices.is_cpu:
        return False
    return reading.kind == "diagonal" and reading.axes[0] == len(offsets) == 1


def _one_step(matrices: Tensor, offsets: Any, initial: Any) -> Tensor:
    return torch.addcmul(offsets, matrices, initial.unsqueeze(0))
