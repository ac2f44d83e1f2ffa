"""Block-tridiagonal and band matrices: solutions, determinants and gradients, for NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arrays.arrays import for_kernels
from ..errors import Allocating, InputError, SingularMatrixError
from ..execution.calls import Calls
from ..ops import tridiagonal as ops
from ..ops.operation import is_empty
from .likelihood import read_grads, read_in_host_memory

Array = NDArray[Any]


class BlockTridiagonalGrads(NamedTuple):
    """Gradients in the blocks and right sides of a linear system, of their shapes.

    Attributes
    ----------
    lower, diagonal, upper : ndarray
        Gradients in blocks. `lower` is None if the matrix was symmetric: the gradient in `upper` is
        then that in an entry which stands at two places.
    b : ndarray
        That in right sides; None for a determinant.
    """

    lower: Array | None
    diagonal: Array
    upper: Array
    b: Array | None


class BandedGrads(NamedTuple):
    """The gradients in the arguments of :func:`solve_banded`.

    Attributes
    ----------
    ab, b : ndarray
        Gradients of the shapes of the arguments; 0 for what the matrix does not have.
    """

    ab: Array
    b: Array


def solve_block_tridiagonal(
    lower: ArrayLike | None, diagonal: ArrayLike, upper: ArrayLike, b: ArrayLike
) -> Array:
    """Return the solution of a linear system whose matrix is block-tridiagonal.

        L_t x_{t-1} + D_t x_t + U_t x_{t+1} = b_t

    By Gaussian elimination with partial pivoting in the rows of two blocks, as LAPACK does it for
    band matrices (Golub and Van Loan, Matrix Computations, section 4.3). It takes time and memory
    in proportion to the number of blocks.

    Parameters
    ----------
    lower : array_like or None, shape (steps, n, n) or (steps, series, n, n)
        Blocks below the diagonal; the first is not read. None if the matrix is symmetric, so that
        they are the transposes of `upper`.
    diagonal : array_like, shape (steps, n, n) or (steps, series, n, n)
        Blocks on the diagonal.
    upper : array_like, shape (steps, n, n) or (steps, series, n, n)
        Blocks above it; the last is not read.
    b : array_like, shape (steps, n), (steps, n, k), (steps, series, n) or (steps, series, n, k)
        Right sides, `k` for each matrix or one. Only if `diagonal` has an axis of series, `b` has
        one.

    Returns
    -------
    ndarray
        The solutions, of the shape of `b` and the dtype of what is given.

    Raises
    ------
    InputError
        If a shape is wrong.
    SingularMatrixError
        If a matrix is singular, or holds a number that is not finite. It is a
        ``numpy.linalg.LinAlgError``, too.
    InputTypeError, DeviceError
        If a type or a dtype is not supported, or an array is not in host memory.

    See Also
    --------
    solve_block_tridiagonal_vjp : The gradients in the blocks and right sides.
    solve_banded : The same for band matrices in SciPy's form.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.statespace import solve_block_tridiagonal
    >>> two, one = np.full((3, 1, 1), 2.0), np.full((3, 1, 1), -1.0)
    >>> solve_block_tridiagonal(None, two, one, np.ones((3, 1)))[:, 0]
    array([1.5, 2. , 1.5])
    """
    given, _ = _read_blocks(lower, diagonal, upper, b, "b")
    with Allocating("the solutions"):
        return _solved(given).reshape(np.shape(b))


def solve_block_tridiagonal_vjp(
    lower: ArrayLike | None,
    diagonal: ArrayLike,
    upper: ArrayLike,
    *,
    x: ArrayLike,
    grads: ArrayLike,
) -> BlockTridiagonalGrads:
    """Return the gradients in the arguments of :func:`solve_block_tridiagonal`.

    With ``Aᵀ z = ∂L/∂x`` they are ``z`` in `b` and ``-z xᵀ`` in the matrix (Giles, 2008, An
    extended collection of matrix derivative results), of which only blocks that the matrix has are
    computed.

    Parameters
    ----------
    lower, diagonal, upper
        As :func:`solve_block_tridiagonal` was given.
    x : array_like
        The solutions that it returned.
    grads : array_like, of the shape of `x`
        The gradients of a loss in the solutions.

    Returns
    -------
    BlockTridiagonalGrads
        The gradients. Those in blocks that are not read are 0.

    Raises
    ------
    InputError, InputTypeError, SingularMatrixError, DeviceError
        As :func:`solve_block_tridiagonal`.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.statespace import solve_block_tridiagonal_vjp
    >>> two, one = np.full((3, 1, 1), 2.0), np.full((3, 1, 1), -1.0)
    >>> x = np.array([[1.5], [2.0], [1.5]])
    >>> found = solve_block_tridiagonal_vjp(None, two, one, x=x, grads=np.ones((3, 1)))
    >>> found.b[:, 0], found.upper[:, 0, 0]
    (array([1.5, 2. , 1.5]), array([-6., -6.,  0.]))
    """
    given, is_symmetric = _read_blocks(lower, diagonal, upper, x, "x")
    above = _read_grads(grads, np.shape(x), given[3]).reshape(given[3].shape)
    with Allocating("the gradients"):
        *blocks, in_b = _pulled(given, above)
        return _shaped(blocks, is_symmetric, np.shape(diagonal), in_b.reshape(np.shape(x)))


def slogdet_block_tridiagonal(
    lower: ArrayLike | None, diagonal: ArrayLike, upper: ArrayLike
) -> tuple[Any, Any]:
    """Return sign and logarithm of the determinant of block-tridiagonal matrices.

    As :func:`numpy.linalg.slogdet`, by the elimination of :func:`solve_block_tridiagonal`.

    Parameters
    ----------
    lower, diagonal, upper
        As :func:`solve_block_tridiagonal` takes them.

    Returns
    -------
    sign : float or ndarray, shape (series,)
        1 or -1; 0 if a matrix is singular, and NaN if it holds NaN or an infinity.
    logabsdet : float or ndarray, shape (series,)
        The logarithm of the absolute value of the determinant; -inf if that is 0.

    Raises
    ------
    InputError
        If a shape is wrong.
    InputTypeError, DeviceError
        If a type or a dtype is not supported, or an array is not in host memory.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.statespace import slogdet_block_tridiagonal
    >>> two, one = np.full((3, 1, 1), 2.0), np.full((3, 1, 1), -1.0)
    >>> sign, log_det = slogdet_block_tridiagonal(None, two, one)
    >>> (sign * np.exp(log_det)).round(6)
    np.float64(4.0)
    """
    given, _ = _read_blocks(lower, diagonal, upper)
    with Allocating("the determinants"):
        if is_empty([each.shape for each in given]):
            signs = np.ones(given[1].shape[1], given[1].dtype)
            logs = np.zeros_like(signs)
        else:
            logs, signs = ops.determinants(Calls(), (), given, False)
    return (signs, logs) if np.ndim(diagonal) == 4 else (signs[0], logs[0])


def slogdet_block_tridiagonal_vjp(
    lower: ArrayLike | None, diagonal: ArrayLike, upper: ArrayLike, *, grads: ArrayLike = 1.0
) -> BlockTridiagonalGrads:
    """Return the gradients of `logabsdet` in the blocks of :func:`slogdet_block_tridiagonal`.

    They are the transposed inverse, of which only blocks that the matrix has are computed: in time
    in proportion to their number (a selected inverse; Takahashi, Fagan and Chin, 1973).

    Parameters
    ----------
    lower, diagonal, upper
        As :func:`slogdet_block_tridiagonal` was given.
    grads : array_like, shape () or (series,), default 1
        The gradients of a loss in the logarithms.

    Returns
    -------
    BlockTridiagonalGrads
        The gradients, without any in `b`.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`slogdet_block_tridiagonal`.
    SingularMatrixError
        If a matrix is singular, or holds a number that is not finite.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.statespace import slogdet_block_tridiagonal_vjp
    >>> two, one = np.full((3, 1, 1), 2.0), np.full((3, 1, 1), -1.0)
    >>> slogdet_block_tridiagonal_vjp(None, two, one).diagonal[:, 0, 0].round(6)
    array([0.75, 1.  , 0.75])
    """
    given, is_symmetric = _read_blocks(lower, diagonal, upper)
    series = given[1].shape[1]
    above = read_grads(grads, series, np.ndim(diagonal) == 4, given[1].dtype)
    with Allocating("the gradients"):
        if is_empty([each.shape for each in given]):
            found = [np.zeros_like(each) for each in given]
        else:
            logs = np.empty(series, given[1].dtype)
            found = ops.inverses(Calls(), (), logs, [above], given, [True] * 3, False)
            _check(found[1], above)
        return _shaped(found, is_symmetric, np.shape(diagonal), None)


def solve_banded(l_and_u: tuple[int, int], ab: ArrayLike, b: ArrayLike) -> Array:
    """Return the solution of a linear system with a band matrix.

    As :func:`scipy.linalg.solve_banded`, with gradients by :func:`solve_banded_vjp`. The matrix is
    solved as a block-tridiagonal one, whose blocks are as large as the wider half of the band.

    Parameters
    ----------
    l_and_u : tuple of int
        How many diagonals there are below and above the main one.
    ab : array_like, shape (l + u + 1, n)
        The diagonals, the highest first: ``ab[u + i - j, j] = a[i, j]``.
    b : array_like, shape (n,) or (n, k)
        Right sides.

    Returns
    -------
    ndarray
        The solutions, of the shape of `b` and the dtype of what is given.

    Raises
    ------
    InputError
        If a shape is wrong.
    SingularMatrixError
        If the matrix is singular, or holds a number that is not finite.
    InputTypeError, DeviceError
        If a type or a dtype is not supported, or an array is not in host memory.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.statespace import solve_banded
    >>> ab = np.array([[0.0, -1.0, -1.0], [2.0, 2.0, 2.0], [-1.0, -1.0, 0.0]])
    >>> solve_banded((1, 1), ab, np.ones(3))
    array([1.5, 2. , 1.5])
    """
    given, _, count = _read_bands(l_and_u, ab, b)
    with Allocating("the solutions"):
        found = _solved(given)
        return found.reshape(-1, found.shape[3])[:count].reshape(np.shape(b))


def solve_banded_vjp(
    l_and_u: tuple[int, int], ab: ArrayLike, *, x: ArrayLike, grads: ArrayLike
) -> BandedGrads:
    """Return the gradients in the arguments of :func:`solve_banded`.

    Parameters
    ----------
    l_and_u, ab
        As :func:`solve_banded` was given.
    x : array_like
        The solutions that it returned.
    grads : array_like, of the shape of `x`
        The gradients of a loss in the solutions.

    Returns
    -------
    BandedGrads
        The gradients.

    Raises
    ------
    InputError, InputTypeError, SingularMatrixError, DeviceError
        As :func:`solve_banded`.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.statespace import solve_banded_vjp
    >>> x = np.array([0.5, 0.25])
    >>> solve_banded_vjp((0, 0), np.array([[2.0, 4.0]]), x=x, grads=np.ones(2)).ab
    array([[-0.25  , -0.0625]])
    """
    given, places, count = _read_bands(l_and_u, ab, x, "x")
    above = _sides(_read_grads(grads, np.shape(x), given[3]), given[3])
    with Allocating("the gradients"):
        *blocks, in_b = _pulled(given, above)
        size = np.size(ab)
        flat = np.zeros(size + 2, in_b.dtype)
        for own, at in zip(blocks, places, strict=True):
            flat[at.reshape(-1)] = own.reshape(-1)
        rows = in_b.reshape(-1, in_b.shape[3])[:count]
        return BandedGrads(flat[:size].reshape(np.shape(ab)), rows.reshape(np.shape(x)))


# -- Reading ---------------------------------------------------------------------------------------


def _read_blocks(
    lower: Any, diagonal: Any, upper: Any, sides: Any = None, name: str = ""
) -> tuple[list[Array], bool]:
    """Return blocks, and right sides or solutions if there is a name, as operations take them.

    And whether there is no `lower`.
    """
    blocks = {"lower": lower, "diagonal": diagonal, "upper": upper}
    arrays: dict[str, Any] = {
        each: None if own is None and each == "lower" else read_in_host_memory(each, own)
        for each, own in blocks.items()
    }
    if name:
        arrays[name] = read_in_host_memory(name, sides)
    given = ops.whole(arrays)
    dtype = np.result_type(*[each.dtype for each in given if each is not None])
    with Allocating("copies of arrays"):
        given[0] = ops.below(given[0], given[2], np.concatenate)
        return [for_kernels(each, dtype) for each in given], lower is None


def _shaped(
    blocks: list[Array], is_symmetric: bool, shape: tuple[int, ...], b: Array | None
) -> BlockTridiagonalGrads:
    """Return gradients in the shape of arguments; that in `lower` is added to that in `upper`."""
    if is_symmetric:
        blocks[2][:-1] += blocks[0][1:].swapaxes(-1, -2)
    lower, diagonal, upper = (each.reshape(shape) for each in blocks)
    return BlockTridiagonalGrads(None if is_symmetric else lower, diagonal, upper, b)


def _read_bands(
    l_and_u: Any, ab: Any, sides: Any, name: str = "b"
) -> tuple[list[Array], Array, int]:
    """Return blocks and right sides, the places of blocks among bands, and the number of rows."""
    ab, sides = read_in_host_memory("ab", ab), read_in_host_memory(name, sides)
    size, steps, places = ops.bands(l_and_u, ab.shape, sides.shape, name)
    dtype = np.result_type(ab.dtype, sides.dtype)
    with Allocating("copies of arrays"):
        flat = np.concatenate([ab.reshape(-1), [0, 1]]).astype(dtype)
        blocks = [flat[each].reshape(steps, 1, size, size) for each in places]
        columns = 1 if sides.ndim == 1 else sides.shape[1]
        whole = _sides(sides, np.empty((steps, 1, size, columns), dtype))
        return [*blocks, whole], places, len(sides)


def _sides(sides: Array, like: Array) -> Array:
    """Return right sides of rows as those of blocks; rows that were added have zeros."""
    found = np.zeros((like.shape[0] * like.shape[2], like.shape[3]), like.dtype)
    found[: len(sides)] = sides.reshape(len(sides), like.shape[3])
    return found.reshape(like.shape)


def _read_grads(grads: Any, shape: tuple[int, ...], like: Array) -> Array:
    """Return the gradients of a loss in solutions."""
    above = read_in_host_memory("grads", grads)
    if above.shape != shape:
        raise InputError(f"grads has shape {above.shape}; expected {shape}, as x")
    with Allocating("the gradients"):
        found: Array = for_kernels(above, like.dtype)
        return found


def _solved(given: list[Array]) -> Array:
    """Return the solutions of blocks and right sides."""
    if given[3].size == 0:
        return np.zeros_like(given[3])
    (found,) = ops.forward(Calls(), ops.Form(), given, False)
    _check(found, given[3])
    return found


def _pulled(given: list[Array], above: Array) -> list[Array]:
    """Return the gradients in blocks and right sides, from solutions and gradients in them."""
    if given[3].size == 0:
        return [np.zeros_like(each) for each in given]
    found = ops.backward(Calls(), ops.Form(), given[3], [above], given, [True] * len(given), False)
    _check(found[3], above)
    return found


def _check(found: Array, sides: Array) -> None:
    """Raise if the matrix was singular."""
    if np.isnan(found).any() and np.isfinite(sides).all():
        t, n = np.argwhere(np.isnan(found))[0][:2]
        raise SingularMatrixError(
            f"the matrix of series {n} is singular, or has numbers that are not finite: the "
            f"solution is NaN at block {t}; expected a regular matrix to solve with"
        )
