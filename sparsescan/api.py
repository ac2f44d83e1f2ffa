"""The calls: check, plan, run."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .arrays.streams import check_device, place
from .chains.containers import check_dtype
from .chains.grads import grad_or_zeros, placed
from .chains.steps import patterns_in, read_chain
from .checks import check_count_or_none, check_flag
from .errors import Allocating, DeviceError
from .plan import once
from .plan.choice import InputKind, PlanOptions, check_solves
from .plan.scan_plan import Gradients, ScanPlan, ScanSlot
from .plan.search import choose_schedule
from .symbolic.schedule import Schedule, read_schedule


def exclusive_scan(
    grad: ArrayLike | None,
    jacobians: Any,
    *,
    local_grads: Any = None,
    reverse: bool = False,
    schedule: Schedule | str = "auto",
    device: str | None = None,
    stream: Any = None,
) -> Gradients:
    """Return the gradients of a chain of layers, from the last layer's output to the first's.

    With ``J_i = (∂x_i/∂x_{i-1})ᵀ``, the exclusive scan of ``[∇x_n, J_n, …, J_1]`` under
    ``A ◇ B = B·A`` is ``[I, ∇x_n, …, ∇x_1]``; this returns it without the identity:

        ∇x_{i-1} = J_i ∇x_i + l_{i-1},        i = n, …, 2,

    where ``l`` are the local gradients, if any.

    Parameters
    ----------
    grad : array_like of float32 or float64, shape (d_n,) or (batch, d_n), or None
        Gradient ``∇x_n`` of the loss at the end of the chain. None means zeros: the whole loss then
        enters by `local_grads`, which give the number of samples. If `grad` is on a CUDA device
        (CuPy's, or any array with ``__cuda_array_interface__``), all other values must be there
        too, and the result is a CuPy array.
    jacobians : sequence, CSRChain, ImplicitChain, PeriodicChain or ndarray
        The transposed Jacobians ``[J_n, …, J_1]``, from the LAST layer to the first; ``J_i`` has
        shape ``(d_{i-1}, d_i)``. An element is a SciPy CSR array or matrix, a
        :class:`BatchedCSR`, a dense array ``(rows, cols)`` or ``(batch, rows, cols)``, an
        :class:`ImplicitStep`, or a :class:`SolveStep`, whose inverse is the Jacobian. All samples
        share an element without a batch axis. One object may hold all Jacobians: a
        :class:`CSRChain`, an :class:`ImplicitChain`, or a dense array ``(n, rows, cols)`` or
        ``(n, batch, rows, cols)``. A reversed view ``J[::-1]`` is not copied. If a few patterns
        take turns, pass ``CSRChain.from_pattern(values, patterns)``, with one array per pattern.
        The result does not depend on the last Jacobian, ``J_1``.
    local_grads : sequence or ndarray, optional
        ``local_grads[i]``, None or an array of the shape of the ``i``-th returned gradient, is
        added to it. Use it for a loss that reads a middle layer, or every step of a recurrent
        network. ``local_grads[0]`` is added to `grad` (see Notes, double-counted gradient).
    reverse : bool, default False
        Whether `jacobians`, `local_grads` and the result are in the order of time, from the first
        layer to the last. The scan still runs from the end, as ``jax.lax.scan`` does with
        ``reverse=True``. The result is then ``[∇x_1, …, ∇x_n]``. It consists of views: nothing is
        copied. A chain of several patterns does not support this order.
    schedule : Schedule or str, default "auto"
        In which order to multiply: ``"auto"``, which is never slower than ``"linear"``;
        ``"linear"``; ``"blelloch"``; ``"truncated:2"`` (up-sweep levels); ``"chunked:8"`` (chunks);
        or a :class:`Schedule`.
    device : {None, "cpu", "cuda"}, optional
        Where to compute. None computes where the data is. "cuda" copies NumPy input to the current
        CUDA device, and the result back.
    stream : optional
        CUDA stream to work on: one of CuPy or PyTorch, any object with ``__cuda_stream__``, or a
        bare handle. The default is CuPy's current stream. A plan keeps the streams that its memory
        was allocated on, so a stream passed as a bare handle must exist as long as the plan.

    Returns
    -------
    list of ndarray, or ndarray
        The ``n`` gradients ``[∇x_n, …, ∇x_1]``, each of shape ``(d_i,)`` or ``(batch, d_i)`` and of
        the dtype to which all input promotes. If the Jacobians came as one array, the result is one
        array with a leading axis of length ``n``. For a chain of several patterns, it is a list of
        one array per pattern. The arrays of a list are views of one buffer.

    Raises
    ------
    InputError
        If a shape, an index, a size or an option is wrong. It is a :class:`ValueError`.
    InputTypeError
        If a type, a sparse format or a dtype is not supported. It is a :class:`TypeError`.
    DeviceError
        If the device, or the device that holds the data, cannot be used.
    SingularMatrixError
        If a matrix to solve with is singular. It is a :class:`numpy.linalg.LinAlgError`.
    MemoryLimitError
        If the gradients and the workspace take more memory than there is. It is a
        :class:`MemoryError`.

    See Also
    --------
    inclusive_scan : Also returns the gradient of the first layer's input.
    plan : The work that depends on patterns only, done once.

    Notes
    -----
    BPPSA (Wang, Bai and Pekhimenko, MLSys 2020), equations 3 to 5 and Algorithm 1.

    Double-counted gradient: `grad` and ``local_grads[0]`` are both gradients of the last layer's
    output, and the scan adds them. If the loss reads every step, ``local_grads[0]`` already has its
    gradient in the last output. Then pass ``grad=None``, or this gradient counts twice.

    The scan keeps products of Jacobians in range by exact powers of two, one for each column of a
    product. It falls back to the linear scan if a value is not finite, or if the entries of a
    column differ so much that one power of two cannot keep them all at full precision (by a factor
    above 2^170 in float32, 2^1490 in float64).

    Equal input gives equal bits. With a named schedule this holds for any number of threads
    (``NUMBA_NUM_THREADS``); ``"auto"`` may choose another schedule for another number of threads.

    The library keeps the latest plans in host memory, up to 16 MiB. A second call with the same
    patterns takes little longer than a scan by a :func:`plan`.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsescan
    >>> relu = sp.diags_array([1.0, 0.0, 1.0]).tocsr()
    >>> linear = sp.csr_array([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]])
    >>> sparsescan.exclusive_scan([1.0, 2.0, 3.0], [relu, linear])
    [array([1., 2., 3.]), array([1., 0., 3.])]
    >>> sparsescan.exclusive_scan([1.0, 2.0, 3.0], [linear, relu], reverse=True)
    [array([1., 0., 3.]), array([1., 2., 3.])]
    """
    return _scan_once(
        grad, jacobians, local_grads, reverse, schedule, device, stream, inclusive=False
    )


def inclusive_scan(
    grad: ArrayLike | None,
    jacobians: Any,
    *,
    local_grads: Any = None,
    reverse: bool = False,
    schedule: Schedule | str = "auto",
    device: str | None = None,
    stream: Any = None,
) -> Gradients:
    """Return the gradients of a chain of layers, down to the input of the first.

    These are the gradients of :func:`exclusive_scan`, then ``∇x_0 = J_1 ∇x_1 + l_0``.

    Parameters
    ----------
    grad, jacobians, reverse, schedule, device, stream
        As for :func:`exclusive_scan`.
    local_grads : sequence or ndarray, optional
        As for :func:`exclusive_scan`, with ``n + 1`` entries.

    Returns
    -------
    list of ndarray, or ndarray
        The ``n + 1`` gradients ``[∇x_n, …, ∇x_0]``; in the order of time with `reverse`. For a
        single rectangular Jacobian in an array, it is a list too, since the two gradients differ in
        length.

    Raises
    ------
    InputError, InputTypeError, DeviceError, MemoryLimitError
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
    return _scan_once(
        grad, jacobians, local_grads, reverse, schedule, device, stream, inclusive=True
    )


def plan(
    jacobians: Any,
    *,
    reverse: bool = False,
    schedule: Schedule | str = "auto",
    batch: int | None = None,
    dtype: DTypeLike | None = None,
    device: str | None = None,
    memory_limit: int | None = None,
) -> ScanPlan:
    """Prepare the part of a scan that depends on patterns only, to be run many times.

    Parameters
    ----------
    jacobians : sequence, CSRChain, ImplicitChain, PeriodicChain or ndarray
        Jacobians as for :func:`exclusive_scan`, from the LAST layer to the first; only their
        patterns are used. Bare :class:`Pattern` and :class:`ImplicitPattern` objects will do.
    reverse : bool, default False
        Whether `jacobians` here, and Jacobians, local gradients and results in every scan by this
        plan, are in the order of time, as for :func:`exclusive_scan`.
    schedule : Schedule or str, default "auto"
        In which order to multiply, as for :func:`exclusive_scan`. ``"auto"`` chooses the tree,
        between the linear and the Blelloch scan, with the least predicted time on this machine (see
        ``sparsescan calibrate``). It chooses the same plan every time, and is never slower than
        ``"linear"``.
    batch : int, optional
        The only batch size to accept; by default a plan runs any.
    dtype : {float32, float64}, optional
        The only dtype to accept; by default a plan runs both. ``"auto"`` chooses a schedule for
        each kind of input. If `batch` and `dtype` are given, it chooses now, and the first run
        seldom has to choose again.
    device : {None, "cpu", "cuda"}, optional
        Where to compute, as for :func:`exclusive_scan`. None computes where the Jacobians are or,
        for bare patterns, where the data of a run is.
    memory_limit : int, optional
        Bytes that the plan and a run may take in addition to Jacobians and gradients, as
        :attr:`ScanPlan.workspace_bytes` counts them.

    Returns
    -------
    ScanPlan
        Print it to see what it does.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`exclusive_scan`.
    MemoryLimitError
        If the schedule (every schedule, with ``"auto"``) needs more than `memory_limit`, or more
        memory than there is; on the CPU the gradients of `batch` samples count too. It is a
        :class:`MemoryError`. Its message says how much the cheapest schedule would need.

    Notes
    -----
    A product is stored in its own pattern or dense. The plan chooses the forms for which all
    products together have the least predicted time.

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
    check_device(device)
    options = PlanOptions(
        batch=check_count_or_none("batch", batch, 1),
        dtype=None if dtype is None else check_dtype(dtype),
        device=device,
        memory_limit=check_count_or_none("memory_limit", memory_limit, 0),
        reverse=check_flag("reverse", reverse),
    )
    with Allocating("the plan"):
        patterns, on_device = patterns_in(jacobians, options.reverse)
        if on_device and device == "cpu":
            raise DeviceError(
                "device is 'cpu', but jacobians are on a CUDA device; expected host memory "
                "(cupy.asnumpy)"
            )
        asked = read_schedule(schedule, len(patterns))
        options = options._replace(device="cuda" if on_device else device, auto=asked is None)
        samples, wanted = options.batch or 1, np.dtype(options.dtype or np.float64)
        kind = InputKind.of(patterns, samples, wanted, options.device == "cuda")
        check_solves(patterns, asked, kind.on_device, options.reverse)
        choice = choose_schedule(patterns, asked, kind, options.memory_limit)
        return ScanPlan(patterns, choice, options)


def _scan_once(
    grad: ArrayLike | None,
    jacobians: Any,
    local_grads: Any,
    reverse: bool,
    schedule: Schedule | str,
    device: str | None,
    stream: Any,
    *,
    inclusive: bool,
) -> Gradients:
    check_device(device)
    reverse = check_flag("reverse", reverse)
    with place(*placed(grad, local_grads), device, stream), Allocating("the scan"):
        form = once.form_of(grad, jacobians, local_grads, reverse, schedule, device)
        lent = once.lend(form, grad, jacobians, local_grads)
        plan, slot, first = lent or _plan_once(
            grad, jacobians, local_grads, reverse, schedule, device
        )
        try:
            gradients = plan.run(slot, first, local_grads, inclusive=inclusive)
        finally:
            plan.take_back(slot)
        once.keep(form, plan)
        return gradients


def _plan_once(
    grad: ArrayLike | None,
    jacobians: Any,
    local_grads: Any,
    reverse: bool,
    schedule: Schedule | str,
    device: str | None,
) -> tuple[ScanPlan, ScanSlot, Any]:
    """Return a plan for one scan, a slot with the chain, and the gradient at its end."""
    chain, patterns = read_chain(jacobians, reverse)
    asked = read_schedule(schedule, len(patterns))
    on_device = device == "cuda" or chain.device is not None
    if chain.starts is not None:
        check_solves(patterns, asked, on_device, reverse)
    size = patterns[0].shape[1] if patterns else None
    period = chain.period if chain.starts is None else 0
    first = grad_or_zeros(grad, local_grads, size, chain.batch, period)
    kind = once.kind_of(chain, first, on_device)
    options = PlanOptions(
        device="cuda" if on_device else device, reverse=reverse, auto=asked is None
    )
    return ScanPlan(patterns, once.choose(asked, patterns, kind), options), ScanSlot(chain), first
