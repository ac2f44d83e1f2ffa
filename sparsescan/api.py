"""The calls: check, plan, run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ._arrays import is_on_device
from ._place import place
from .chain import Chain, check_chain, is_stack, length, pattern_of
from .containers import check_dtype
from .costs import Model
from .errors import DeviceError, InputError, MemoryLimitError
from .measure import measure
from .pattern import Pattern, TooLargeError
from .plan import Gradients, ScanPlan, needed_bytes
from .planner import Choice, choose, choose_for, model_for
from .program import Program
from .schedule import Schedule, check_count

__all__ = ["exclusive_scan", "inclusive_scan", "plan"]

# What "auto" said of the chains of single scans, by the keys of their patterns.
_choices: dict[Any, Choice] = {}
_KEPT = 64


def exclusive_scan(
    grad: ArrayLike,
    jacobians: Any,
    *,
    local_grads: Any = None,
    schedule: Schedule | str = "auto",
    device: str | None = None,
    stream: Any = None,
) -> Gradients:
    """Gradients of a chain of layers, from the last layer's output to the first layer's.

    With ``J_i = (∂x_i/∂x_{i-1})ᵀ``, the exclusive scan of ``[∇x_n, J_n, …, J_1]`` under
    ``A ◇ B = B·A`` is ``[I, ∇x_n, …, ∇x_1]``; this returns it without the identity:

        ∇x_{i-1} = J_i ∇x_i + l_{i-1},        i = n, …, 2,

    where ``l`` are the local gradients, if any.

    Parameters
    ----------
    grad : array_like of float32 or float64, shape (d_n,) or (batch, d_n)
        Gradient ``∇x_n`` of the loss at the end of the chain. If it is on a CUDA device (CuPy's, or
        any array with ``__cuda_array_interface__``), so must be all other values, and the result is
        CuPy's.
    jacobians : sequence, CSRChain, PeriodicChain or ndarray
        The transposed Jacobians ``[J_n, …, J_1]``, from the LAST layer to the first; ``J_i`` has
        shape ``(d_{i-1}, d_i)``. An element is a SciPy CSR array or matrix, a
        :class:`BatchedCSR`, or a dense array ``(rows, cols)`` or ``(batch, rows, cols)``; all
        samples share an element without a batch axis. Or all in one: a :class:`CSRChain`, or a
        dense array ``(n, rows, cols)`` or ``(n, batch, rows, cols)``. A reversed view ``J[::-1]``
        is not copied. Or an array for each of a few patterns that take turns: a
        :class:`PeriodicChain`. The last one, ``J_1``, does not enter the result.
    local_grads : sequence or ndarray, optional
        ``local_grads[i]``, None or an array of the shape of the ``i``-th returned gradient, is
        added to it: a loss that reads a middle layer, or every step of a recurrent network.
    schedule : Schedule or {"auto", "linear", "blelloch"}, default "auto"
        How to combine; ``"auto"`` is never slower than ``"linear"``.
    device : {None, "cpu", "cuda"}, optional
        Where to compute; None is where the data is. With "cuda", NumPy input is copied to the
        current CUDA device, and the result back.
    stream : optional
        CUDA stream to work on, of CuPy, PyTorch or anything with ``__cuda_stream__``, or its
        handle; by default CuPy's current one.

    Returns
    -------
    list of ndarray, or ndarray
        The ``n`` gradients ``[∇x_n, …, ∇x_1]``, each of shape ``(d_i,)`` or ``(batch, d_i)`` and of
        the dtype to which all input promotes. One array, with a leading axis of length ``n``, if
        the Jacobians came as one; one for each pattern of a :class:`PeriodicChain`. The arrays of a
        list are views of one buffer.

    Raises
    ------
    InputError
        If a shape, an index, a size or an option is wrong. It is a :class:`ValueError`.
    InputTypeError
        If a type, a sparse format or a dtype is not supported. It is a :class:`TypeError`.
    DeviceError
        If the device, or the device that holds the data, cannot be used.

    See Also
    --------
    inclusive_scan : One gradient more, that of the first layer's input.
    plan : The work that depends on patterns only, done once.

    Notes
    -----
    BPPSA (Wang, Bai and Pekhimenko, MLSys 2020), equations 3 to 5 and Algorithm 1.

    Products of Jacobians are kept in range by exact powers of two, one for each column of a
    product. The result is that of the linear scan where a value is not finite, or where the entries
    of a column are so far apart that one power of two cannot keep them all at full precision (more
    than 2^170 in float32, 2^1490 in float64).

    The same input gives the same bits. By a schedule that is named it does so whatever the number
    of threads (``NUMBA_NUM_THREADS``); ``"auto"`` may choose another one for another number.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsescan
    >>> relu = sp.diags_array([1.0, 0.0, 1.0]).tocsr()
    >>> linear = sp.csr_array([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]])
    >>> sparsescan.exclusive_scan([1.0, 2.0, 3.0], [relu, linear])
    [array([1., 2., 3.]), array([1., 0., 3.])]
    """
    return _scan_once(grad, jacobians, local_grads, schedule, device, stream, inclusive=False)


def inclusive_scan(
    grad: ArrayLike,
    jacobians: Any,
    *,
    local_grads: Any = None,
    schedule: Schedule | str = "auto",
    device: str | None = None,
    stream: Any = None,
) -> Gradients:
    """Gradients of a chain of layers, down to the input of the first.

    As :func:`exclusive_scan`, and one more at the end: ``∇x_0 = J_1 ∇x_1 + l_0``.

    Parameters
    ----------
    grad, jacobians, schedule, device, stream
        As for :func:`exclusive_scan`.
    local_grads : sequence or ndarray, optional
        As there, with ``n + 1`` entries.

    Returns
    -------
    list of ndarray, or ndarray
        The ``n + 1`` gradients ``[∇x_n, …, ∇x_0]``. A list also for a single rectangular Jacobian
        that came as an array, since the two gradients differ in length.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`exclusive_scan`.

    Examples
    --------
    >>> import numpy as np, sparsescan
    >>> sparsescan.inclusive_scan(np.ones(2), np.full((3, 2, 2), 0.5))
    array([[1., 1.],
           [1., 1.],
           [1., 1.],
           [1., 1.]])
    """
    return _scan_once(grad, jacobians, local_grads, schedule, device, stream, inclusive=True)


def plan(
    jacobians: Any,
    *,
    schedule: Schedule | str = "auto",
    batch: int | None = None,
    dtype: DTypeLike | None = None,
    device: str | None = None,
    memory_limit: int | None = None,
    effort: str = "estimate",
) -> ScanPlan:
    """The part of a scan that depends on patterns only, to be run many times.

    Parameters
    ----------
    jacobians : sequence, CSRChain, PeriodicChain or ndarray
        Jacobians as for :func:`exclusive_scan`, of which only the patterns are used, or bare
        :class:`Pattern` objects; from the LAST layer to the first.
    schedule : Schedule or {"auto", "linear", "blelloch"}, default "auto"
        How to combine. ``"auto"`` is the tree, anything between the linear and the Blelloch scan,
        that takes least on this machine; it is never slower than ``"linear"``.
    batch : int, optional
        Insist on this batch size; by default a plan runs any, and is made for one sample.
    dtype : {float32, float64}, optional
        Insist on this dtype; by default a plan runs both, and is made for float64.
    device : {None, "cpu", "cuda"}, optional
        Where to compute, as for :func:`exclusive_scan`; None is where the Jacobians are, or, for
        patterns, where the data of a run is.
    memory_limit : int, optional
        Bytes that the plan and a run may take beside Jacobians and gradients, as
        :attr:`ScanPlan.workspace_bytes` counts them.
    effort : {"estimate", "measure"}, default "estimate"
        How ``"auto"`` finds what takes least: by predicted times (see ``sparsescan calibrate``),
        which is the same plan every time; or by scanning made-up values with those that are
        predicted to be the fastest, which takes a second or more.

    Returns
    -------
    ScanPlan
        Print it to see what it does.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`exclusive_scan`.
    MemoryLimitError
        If the schedule, or with ``"auto"`` every one, needs more than `memory_limit`. It is a
        :class:`MemoryError`, and says how much the least would need.

    Notes
    -----
    Of every schedule the products are stored in that form, their own pattern or dense, which takes
    least: node and edge elimination as in DeePa (section 4).

    Examples
    --------
    >>> import numpy as np, sparsescan
    >>> plan = sparsescan.plan([sparsescan.Pattern.diagonal(3)] * 4, schedule="blelloch")
    >>> plan.exclusive_scan(np.ones(3), np.full((4, 3), 0.5))
    array([[1.   , 1.   , 1.   ],
           [0.5  , 0.5  , 0.5  ],
           [0.25 , 0.25 , 0.25 ],
           [0.125, 0.125, 0.125]])
    """
    _check_device(device)
    chosen_batch = None if batch is None else check_count("batch", batch, 1)
    chosen_dtype = None if dtype is None else check_dtype(dtype)
    limit = None if memory_limit is None else check_count("memory_limit", memory_limit, 0)
    patterns, on_device = _patterns(jacobians)
    if on_device and device == "cpu":
        raise DeviceError(
            "device is 'cpu', but jacobians are on a CUDA device; expected host memory "
            "(cupy.asnumpy)"
        )
    if effort not in ("estimate", "measure"):
        raise InputError(f"effort is {effort!r}; expected 'estimate' or 'measure'")
    if effort == "measure" and schedule != "auto":
        raise InputError(f"effort is 'measure', but schedule is {schedule!r}; expected 'auto'")
    device = "cuda" if on_device else device
    model = model_for(device, chosen_dtype or np.dtype(np.float64), chosen_batch or 1)
    choice = _choose(schedule, patterns, model, device, limit, measured=effort == "measure")
    return ScanPlan(
        patterns,
        choice.schedule,
        reason=choice.reason,
        batch=chosen_batch,
        dtype=chosen_dtype,
        device=device,
        memory_limit=limit,
        dense=choice.dense,
        alternatives=choice.alternatives,
        program=choice.program,
    )


def _scan_once(
    grad: ArrayLike,
    jacobians: Any,
    local_grads: Any,
    schedule: Schedule | str,
    device: str | None,
    stream: Any,
    *,
    inclusive: bool,
) -> Gradients:
    _check_device(device)
    with place(grad, device, stream):
        chain = Chain(length(jacobians))
        patterns = chain.read(jacobians)
        device = "cuda" if chain.device is not None else device
        shape: tuple[int, ...] = getattr(grad, "shape", ())
        batch = int(shape[0]) if len(shape) == 2 else 1
        model = model_for(device, chain.dtype, max(batch, 1))
        choice = _choose_once(schedule, patterns, model, device)
        once = ScanPlan(
            patterns,
            choice.schedule,
            reason=choice.reason,
            device=device,
            dense=choice.dense,
            program=choice.program,
        )
        return once._scan_once(grad, chain, local_grads, inclusive=inclusive)


def _patterns(jacobians: Any) -> tuple[Sequence[Pattern], bool]:
    """The patterns of Jacobians, any of which may be a bare pattern; whether any is on a device."""
    n = length(jacobians)
    if is_stack(jacobians) or not any(isinstance(jacobian, Pattern) for jacobian in jacobians):
        chain = Chain(n)
        return chain.read(jacobians), chain.device is not None
    patterns = [pattern_of(k, jacobian) for k, jacobian in enumerate(jacobians)]
    return check_chain(patterns), any(is_on_device(jacobian) for jacobian in jacobians)


def _choose(
    schedule: Schedule | str,
    patterns: Sequence[Pattern],
    model: Model,
    device: str | None,
    memory_limit: int | None = None,
    *,
    measured: bool = False,
) -> Choice:
    """The schedule that runs, and why."""
    n = len(patterns)
    makers = {"linear": Schedule.linear, "blelloch": Schedule.blelloch}
    if isinstance(schedule, Schedule):
        if schedule.n != n:
            raise InputError(f"schedule is {schedule!r}; expected one for {n} Jacobians")
    elif not isinstance(schedule, str) or schedule not in (*makers, "auto"):
        raise InputError(
            f"schedule is {schedule!r}; expected 'auto', 'linear', 'blelloch' or a Schedule"
        )
    elif schedule != "auto":
        schedule = makers[schedule](n)
    dtype, batch = model.dtype, model.batch

    def fits(program: Program) -> bool:
        return memory_limit is None or (needed_bytes(program, dtype, batch, device) <= memory_limit)

    nbytes = math.inf if memory_limit is None else memory_limit
    if isinstance(schedule, Schedule):
        try:
            return choose_for(patterns, schedule, model, fits=fits, nbytes=nbytes)
        except TooLargeError:
            least = needed_bytes(Program(patterns, Schedule.linear(n)), dtype, batch, device)
            raise MemoryLimitError(
                f"memory_limit is {memory_limit} bytes; {schedule} needs more, and "
                f"the least, Schedule.linear({n}), {least}"
            ) from None
    return choose(
        patterns,
        model,
        fits=fits,
        nbytes=nbytes,
        more=_for_device(patterns, batch) if device == "cuda" else (),
        measure=partial(measure, patterns, dtype, batch, device) if measured else None,
    )


def _choose_once(
    schedule: Schedule | str, patterns: Sequence[Pattern], model: Model, device: str | None
) -> Choice:
    """The same for one scan; what "auto" says of a chain is remembered."""
    if schedule != "auto":
        return _choose(schedule, patterns, model, device)
    numbers: dict[Pattern, int] = {}
    steps = [numbers.setdefault(pattern, len(numbers)) for pattern in patterns]
    chain = tuple(pattern.key for pattern in numbers), np.array(steps).tobytes()
    key = chain, model.dtype, model.batch, model.workers, device
    choice = _choices.get(key)
    if choice is None:
        while len(_choices) >= _KEPT:
            _choices.pop(next(iter(_choices)), None)
        choice = _choose(schedule, patterns, model, device)
        # The program would keep the patterns.
        _choices[key] = replace(choice, program=None)
    return choice


def _for_device(patterns: Sequence[Pattern], batch: int) -> list[Schedule]:
    """Chunks for small steps of one pattern, which have kernels of their own, even for one."""
    from .device import chunk_count

    n, chunks = len(patterns), chunk_count(patterns, batch) if patterns else None
    if chunks is None:
        return []
    return [Schedule.chunked(n, count) for count in sorted({1, chunks})]


def _check_device(device: str | None) -> None:
    if device not in (None, "cpu", "cuda"):
        raise DeviceError(f"device is {device!r}; expected None, 'cpu' or 'cuda'")
