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
    """Plan a scan over many ranks: what depends on patterns only, to be run many times.

    All ranks call this together, each with its own part of the chain.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    jacobians : sequence, CSRChain, ImplicitChain or ndarray
        This rank's part of the chain, from the LAST layer to the first: its Jacobians, of which
        only the patterns are used, or bare patterns; as for :func:`sparsescan.plan`. The parts
        follow each other in the order of the ranks; a part may be empty. On a grid with `rows`,
        its rows of each: ``(own, d_i)``, with all columns; a rank may have none.
    reverse : bool, default False
        Whether this rank's Jacobians, local gradients and results are in the order of time, as for
        :func:`sparsescan.plan`. The order of the ranks stays: the first one has the end of the
        chain.
    batch : int, optional
        Accept only this number of samples of each rank.
    dtype : {float32, float64}, optional
        Accept only this dtype of all input.
    grid : Grid or tuple of int, optional
        ``(chain, batch)`` or ``(chain, batch, rows)``, see :class:`Grid`; by default all ranks are
        on the chain.
    schedule : {"auto", "vectors", "products"}, default "auto"
        How to combine the parts: by the gradient, which every rank hands on to the next when it is
        done; or by the product of each part, in an exclusive scan of MPI, so that all ranks work at
        once. ``"auto"`` takes what is predicted to take less; vectors where ranks share rows.
    device : {None, "cpu", "cuda"}, default None
        Where each rank scans its part: by default where its Jacobians are, and on the CPU for bare
        patterns; with ``"cuda"`` on the rank's current CUDA device, from which gradients go back
        if the input was NumPy's. Products of parts are combined in host memory; a gradient goes
        from device to device if MPI reads their memory, and otherwise by way of the host.

    Returns
    -------
    ParallelPlan
        Print it to see what it does.

    Raises
    ------
    InputError, InputTypeError, DeviceError, RankError
        On all ranks, if anything is wrong on any: as for :func:`sparsescan.plan`, or if parts do
        not chain, ranks of different groups have other patterns, or options differ.

    See Also
    --------
    predict : The time, messages and memory of a grid, or of the best of so many ranks.

    Notes
    -----
    Where ranks share the rows of steps, each owns the entries of a gradient that its rows make, and
    ``grid.entries(rank, d_n)`` of the gradient that enters the chain. The other entries that its
    rows read, its halo, follow from the patterns: their owners are told once, and send these
    entries and no others in every scan. Shares of rows need not be equal.
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
    """Scan a chain whose parts lie on many ranks; as :func:`sparsescan.exclusive_scan`.

    All ranks call this together, each with its own part of the chain.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    grad : array_like, shape (d_n,) or (batch, d_n), or None
        Gradient at the end of the chain, on the ranks that hold the first part; None on others, and
        where it is zeros and the loss enters by `local_grads`, which must then be given there. On a
        grid with `rows`, this rank's entries of it, ``(own,)`` or ``(batch, own)``:
        ``grid.entries(rank, d_n)``.
    jacobians : sequence, CSRChain, ImplicitChain or ndarray
        This rank's part of the transposed Jacobians ``[J_n, …, J_1]``, from the LAST layer to the
        first. The parts follow each other in the order of the ranks; a part may be empty. On a grid
        with `rows`, its rows of each: ``(own, d_i)``, with all columns.
    local_grads : sequence or ndarray, optional
        For each gradient that this rank gets, None or an array of its shape that is added to it;
        that of the first adds to `grad` (see :func:`sparsescan.exclusive_scan`, double-counted
        gradient).
    reverse, grid, schedule, device
        As for :func:`plan`.

    Returns
    -------
    list of ndarray, or ndarray
        The gradients that enter the Jacobians of this rank, as many as it holds. All ranks together
        have ``[∇x_n, …, ∇x_1]``. On a grid with `rows`, its entries of them: of the first those
        that came to it, of each other one as many as it has rows of the Jacobian before. (For
        Jacobians in one array this is a list, if those are not equally many.)

    Raises
    ------
    InputError, InputTypeError, DeviceError, RankError, MemoryError
        On all ranks, if anything is wrong on any of them.

    Notes
    -----
    BPPSA (Wang, Bai and Pekhimenko, MLSys 2020), section 3.6: a rank holds ``n/p`` Jacobians, and
    the product of them at most.

    Results have the same bits in every run on one grid. Where a value is not finite, the result is
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
    """Scan down to the input of the first layer: one gradient more, on the last rank.

    Parameters
    ----------
    comm, grad, jacobians, local_grads, reverse, grid, schedule, device
        As for :func:`exclusive_scan`; the ranks that hold the last part get one gradient more, and
        have one more entry of `local_grads`.

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
    """Return the options that say how Jacobians are read, checked; raise for a wrong form."""
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
