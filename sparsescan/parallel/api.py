"""The calls: read this rank's part, plan together, run together."""

from __future__ import annotations

from typing import Any

from numpy.typing import ArrayLike, DTypeLike

from ..arrays.arrays import read_array
from ..arrays.streams import check_device
from ..chains.chain import Chain
from ..chains.steps import patterns_in, read_chain
from ..checks import check_flag
from ..errors import DeviceError
from ..plan.scan_plan import Gradients
from .communicator import Communicator
from .grid import check_grid
from .plan import Options, ParallelPlan, check_form
from .planning import Request, make_plan


def plan(
    comm: Any,
    jacobians: Any,
    *,
    reverse: bool = False,
    batch: int | None = None,
    dtype: DTypeLike | None = None,
    grid: tuple[int, ...] | None = None,
    schedule: str = "auto",
    device: str | None = None,
) -> ParallelPlan:
    """Prepare the part of a scan over many ranks that depends on patterns only.

    All ranks call this together, each with its own part of the chain.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    jacobians : sequence, CSRChain, ImplicitChain or ndarray
        This rank's part of the chain, from the LAST layer to the first, as for
        :func:`sparsescan.plan`: Jacobians, of which only the patterns are used, or bare patterns.
        The parts follow each other in the order of the ranks; a part may be empty. On a grid with
        `rows`, pass this rank's rows of each Jacobian, ``(own, d_i)``, with all columns; a rank may
        have no rows.
    reverse : bool, default False
        Whether this rank's Jacobians, local gradients and results are in the order of time, as for
        :func:`sparsescan.plan`. The order of the ranks does not change: the first rank has the end
        of the chain.
    batch : int, optional
        The only number of samples per rank to accept.
    dtype : {float32, float64}, optional
        The only dtype of all input to accept.
    grid : Grid or tuple of int, optional
        ``(chain, batch)`` or ``(chain, batch, rows)``, see :class:`Grid`; by default all ranks
        share the chain.
    schedule : {"auto", "vectors", "products"}, default "auto"
        How to combine the parts. With ``"vectors"`` each rank sends the gradient to the next rank
        when it is done. With ``"products"`` all ranks multiply their parts at once, and MPI's
        exclusive scan combines the products. ``"auto"`` takes the way with the shorter predicted
        time, and ``"vectors"`` if ranks share rows.
    device : {None, "cpu", "cuda"}, default None
        Where each rank scans its part: by default where its Jacobians are, and on the CPU for bare
        patterns. With ``"cuda"`` it scans on the rank's current CUDA device, and copies gradients
        back if the input was NumPy's. Products of parts are combined in host memory. A gradient
        goes from device to device if MPI reads their memory, otherwise through the host.

    Returns
    -------
    ParallelPlan
        Print it to see what it does.

    Raises
    ------
    InputError, InputTypeError, DeviceError, RankError
        On all ranks, if anything is wrong on any rank: as for :func:`sparsescan.plan`, or if parts
        do not chain, ranks of different groups have different patterns, or options differ.

    See Also
    --------
    predict : The time, messages and memory of a grid, or of the best grid of some ranks.

    Notes
    -----
    If ranks share the rows of steps, each rank owns the entries of a gradient that its rows make,
    and ``grid.entries(rank, d_n)`` of the gradient that enters the chain. Its rows also read
    entries of other ranks, its halo, which follows from the patterns. The plan tells their owners
    once, and each scan sends only these entries. Shares of rows need not be equal.
    """
    world = Communicator.of(comm)

    def read() -> Request:
        options = Options(grid, schedule, batch, dtype, device, reverse)
        checked = _check_options(world, jacobians, options)
        chained = checked.grid.rows == 1
        patterns, there = patterns_in(jacobians, checked.reverse, chained=chained)
        return Request(patterns, _with_device(checked, len(patterns), there), 1, 8)

    return make_plan(world, read)


def exclusive_scan(
    comm: Any,
    grad: ArrayLike | None,
    jacobians: Any,
    *,
    local_grads: Any = None,
    reverse: bool = False,
    grid: tuple[int, ...] | None = None,
    schedule: str = "auto",
    device: str | None = None,
) -> Gradients:
    """Scan a chain whose parts lie on many ranks, like :func:`sparsescan.exclusive_scan`.

    All ranks call this together, each with its own part of the chain.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    grad : array_like, shape (d_n,) or (batch, d_n), or None
        Gradient at the end of the chain, on the ranks that hold the first part; None on all others.
        None on the first part means zeros; these ranks must then pass `local_grads`. On a grid with
        `rows`, this rank's entries of it, ``(own,)`` or ``(batch, own)``:
        ``grid.entries(rank, d_n)``.
    jacobians : sequence, CSRChain, ImplicitChain or ndarray
        This rank's part of the transposed Jacobians ``[J_n, …, J_1]``, from the LAST layer to the
        first. The parts follow each other in the order of the ranks; a part may be empty. On a grid
        with `rows`, this rank's rows of each Jacobian: ``(own, d_i)``, with all columns.
    local_grads : sequence or ndarray, optional
        For each gradient of this rank, None or an array of its shape, which is added. The first one
        is added to `grad` (see :func:`sparsescan.exclusive_scan`, double-counted gradient).
    reverse, grid, schedule, device
        As for :func:`plan`.

    Returns
    -------
    list of ndarray, or ndarray
        The gradients that enter the Jacobians of this rank, one per Jacobian. All ranks together
        have ``[∇x_n, …, ∇x_1]``. On a grid with `rows`, this rank's entries of them: of the first
        gradient the entries that it owned, of each other one as many as it has rows of the previous
        Jacobian. (If these numbers differ, the result is a list even for Jacobians in one array.)

    Raises
    ------
    InputError, InputTypeError, DeviceError, RankError, MemoryError
        On all ranks, if anything is wrong on any of them.

    Notes
    -----
    BPPSA (Wang, Bai and Pekhimenko, MLSys 2020), section 3.6: a rank holds ``n/p`` Jacobians, and
    at most their product.

    Results have the same bits in every run on one grid. If a value is not finite, the result is
    that of the linear scan.
    """
    options = Options(grid, schedule, device=device, reverse=reverse)
    return _scan_once(comm, grad, jacobians, local_grads, options, inclusive=False)


def inclusive_scan(
    comm: Any,
    grad: ArrayLike | None,
    jacobians: Any,
    *,
    local_grads: Any = None,
    reverse: bool = False,
    grid: tuple[int, ...] | None = None,
    schedule: str = "auto",
    device: str | None = None,
) -> Gradients:
    """Scan down to the input of the first layer; the last rank gets one more gradient.

    Parameters
    ----------
    comm, grad, jacobians, local_grads, reverse, grid, schedule, device
        As for :func:`exclusive_scan`. The ranks that hold the last part get one more gradient, and
        pass one more entry of `local_grads`.

    Returns
    -------
    list of ndarray, or ndarray
        As :func:`exclusive_scan`; the last rank of each group has ``∇x_0`` at the end.

    Raises
    ------
    InputError, InputTypeError, DeviceError, RankError, MemoryError
        On all ranks, if anything is wrong on any of them.
    """
    options = Options(grid, schedule, device=device, reverse=reverse)
    return _scan_once(comm, grad, jacobians, local_grads, options, inclusive=True)


def _scan_once(
    comm: Any,
    grad: ArrayLike | None,
    jacobians: Any,
    local_grads: Any,
    options: Options,
    *,
    inclusive: bool,
) -> Gradients:
    world = Communicator.of(comm)
    chain = Chain(0)

    def read() -> Request:
        nonlocal chain
        checked = _check_options(world, jacobians, options)
        chained = checked.grid.rows == 1
        chain, patterns = read_chain(jacobians, checked.reverse, chained=chained)
        shape: tuple[int, ...] = () if grad is None else read_array("grad", grad).shape
        samples = chain.batch or (shape[0] if len(shape) == 2 else 1)
        there = _with_device(checked, chain.n, chain.device is not None)
        return Request(patterns, there, max(samples, 1), chain.dtype.itemsize)

    once = make_plan(world, read)
    return once._scan(grad, jacobians, local_grads, chain=chain, inclusive=inclusive)


def _check_options(world: Communicator, jacobians: Any, options: Options) -> Options:
    """Check and return the options for reading Jacobians; raise for a wrong form."""
    check_form(jacobians)
    reverse = check_flag("reverse", options.reverse)
    return options._replace(reverse=reverse, grid=check_grid(options.grid, world.size))


def _with_device(options: Options, n: int, there: bool) -> Options:
    """Return the options, with the device that Jacobians are on if none is asked for."""
    check_device(options.device)
    if options.device == "cpu" and there:
        raise DeviceError(
            "device is 'cpu', but jacobians is on a CUDA device; expected arrays in host memory "
            "(cupy.asnumpy)"
        )
    if options.device is None and n:
        return options._replace(device="cuda" if there else "cpu")
    return options
