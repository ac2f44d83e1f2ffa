"""Steps for which a scan solves with a matrix in place of multiplying by one."""

from __future__ import annotations

from typing import Any

from ..errors import InputError
from ..symbolic.implicit import ImplicitPattern
from .implicit import ImplicitStep
from .reading import split


class SolveStep(ImplicitStep):
    """A transposed Jacobian ``M⁻ᵀ``, given by its inverse ``Mᵀ``: a scan solves with ``Mᵀ``.

    Implicit time stepping (backward Euler, Crank–Nicolson, Newton's method in each step) solves
    ``M_t y_t = N_t y_{t-1} + b_t``. Its transposed Jacobian ``N_tᵀ M_t⁻ᵀ`` is two steps of a chain,
    ``[SolveStep(M_tᵀ), N_tᵀ]``. The gradient between them is the adjoint state ``λ_t``, from which
    the gradients of all parameters follow:

        M_tᵀ λ_t = ∇y_t,    ∇y_{t-1} = N_tᵀ λ_t,    ∂b_t = λ_t,    ∂N_t = λ_t y_{t-1}ᵀ,
        ∂M_t = -λ_t y_tᵀ

    Parameters
    ----------
    matrix : array_like or sparse array of float32 or float64
        The matrix ``Mᵀ``, transposed like all Jacobians of a chain: a SciPy CSR array or matrix
        (``M.T`` of a CSC matrix needs no copy), a :class:`BatchedCSR`, or a dense array
        ``(size, size)`` or ``(batch, size, size)``. All samples share a matrix without a batch
        axis.

    Attributes
    ----------
    pattern : ImplicitPattern
        The pattern of ``Mᵀ``, marked as solved. :func:`plan` takes it in place of the step.
    values : list of ndarray
        The values of ``Mᵀ``, in the order of its pattern.
    shape : tuple of int
        ``(size, size)``.
    batch : int or None
        Number of samples, or None if they share the matrix.

    Raises
    ------
    InputError
        If the matrix is not square, or malformed.
    InputTypeError
        If a type, a sparse format or a dtype is not supported.

    See Also
    --------
    ImplicitPattern : Steps of several factors, some of which are solved.

    Notes
    -----
    A scan raises :class:`SingularMatrixError`, which names the step, if the factorisation finds a
    matrix singular to working precision (a pivot is zero). If a value of a matrix is not finite,
    all gradients before that step are NaN.

    The schedule is the linear one, since the product of an inverse and a matrix is dense. A
    schedule that multiplies Jacobians raises :class:`InputError`. (``"truncated:0"``,
    ``"chunked:2"``, and any schedule for up to three Jacobians multiply none.) Scans run on the
    CPU.

    :func:`plan` analyses a pattern once. Tridiagonal, banded, dense and small matrices are
    factorised with LAPACK's algorithms. One compiled call does this for all steps that follow each
    other, with the Jacobians between them. SuperLU factorises all other matrices; the plan chooses
    its order of columns. A run copies the values of each matrix and factorises the copy, unless it
    has a factorisation of the same values. Steps that share an array, or have equal values, are
    factorised once, if they follow each other or a few of them take turns. Later runs of a plan
    reuse these factors.

    Examples
    --------
    Backward Euler for ``y' = -K y``, from the last step to the first, with a loss ``y_3[0]``:

    >>> import numpy as np, scipy.sparse as sp, sparsescan
    >>> stiff = sp.diags_array([[-1.0] * 2, [2.0] * 3, [-1.0] * 2], offsets=[-1, 0, 1])
    >>> m = (sp.eye_array(3) + 0.5 * stiff).tocsc()  # M y_t = y_{t-1}
    >>> step = sparsescan.SolveStep(m.T)
    >>> step
    SolveStep(Pattern((3, 3), nnz=7, general))
    >>> grads = sparsescan.inclusive_scan([1.0, 0.0, 0.0], [step] * 3)
    >>> np.allclose(grads[-1], np.linalg.matrix_power(np.linalg.inv(m.toarray()), 3)[0])
    True
    """

    def __init__(self, matrix: Any) -> None:
        pattern, values = split("matrix", matrix, None)
        if pattern.shape[0] != pattern.shape[1]:
            raise InputError(f"matrix has shape {pattern.shape}; expected a square one")
        super().__init__([values], ImplicitPattern([pattern], solved=[0]))

    def __repr__(self) -> str:
        batch = "" if self.batch is None else f", batch={self.batch}"
        return f"SolveStep({self.pattern.factors[0]}{batch})"
