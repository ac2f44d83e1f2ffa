"""CellUnits: some hidden units of a recurrent cell, for workers that share its steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.arrays import Mirrored
from ..errors import InputError
from ..execution.sharing import quiet
from ..symbolic.pattern import Pattern
from .jacobian import Equations, Linearization

Array = Any


class CellUnits:
    """Some hidden units `U` of a cell, which read the whole state before them.

        (∂h_t[U]/∂h_{t-1})ᵀ = Σ_g W_g[U]ᵀ diag(d_g[U]) + D[:, U],

    with the slopes ``d_g`` and ``D`` of the cell.

    Parameters
    ----------
    cell : Cell
        The whole, whose state is its hidden units alone.
    units : slice
        Which of them.

    Attributes
    ----------
    state_size, units : int
        Length of the state before, and number of units.
    pattern : Pattern
        The pattern of the transposed Jacobian, dense.
    nnz : int
        Entries of the pattern.
    params : dict of str to ndarray
        Copies of the units' parameters, by the names of the cell.

    Raises
    ------
    InputError
        If the state has more than the hidden units, or if parameters do not belong to single units,
        have heads, or have fewer rows or columns.
    """

    def __init__(self, cell: Any, units: slice) -> None:
        terms = [term for slot in cell.program.slots for term in slot.terms]
        shared = [name for name, param in cell.params.items() if param.ndim == 0]
        shared += [term.matrix for term in terms if term.is_transposed]
        program = cell.program
        shared += [*program.reductions, *program.partial, *program.further_grads]
        if cell.state_size != cell.hidden_size or cell.program.stages > 1 or shared:
            raise InputError(
                f"{cell!r} cannot be restricted; expected a state of hidden units, which no "
                "product of a step reads but that before it, and parameters of one unit each"
            )
        self.units = len(range(*units.indices(cell.hidden_size)))
        self.program, self._code, self._declared = cell.program, cell._code, cell._declared
        self._biases, self.bias = cell._biases, cell.bias
        self.input_size, self.hidden_size = cell.input_size, cell.hidden_size
        self.state_size = cell.state_size
        self.pattern = Pattern.dense((self.state_size, self.units))
        self.nnz = self.pattern.nnz

        def own(array: Array) -> Array:
            """Return the rows of the units, gate by gate."""
            gates = array.reshape(-1, cell.hidden_size, *array.shape[1:])
            return gates[:, units].reshape(-1, *array.shape[1:]).copy()

        self.params: dict[str, Array] = {name: own(param) for name, param in cell.params.items()}
        self.masks = {
            name: None if mask is None else Mirrored(own(mask.on(np)))
            for name, mask in cell.masks.items()
        }
        self.shapes = {name: param.shape for name, param in self.params.items()}
        self._equations = Equations(self, units)

    @quiet
    def forward(self, x: Array, state: Array) -> Array:
        """Return the new units, shape ``(n, units)``, from `x` and the whole state before."""
        x, state = self._in_one_dtype(x, state)
        out = np.empty((len(x), self.units), x.dtype)
        self._equations.forward(np, self.params, x, state, out)
        return out

    def values(self, x: Array, state: Array, *, out: Array) -> None:
        """Write the entries of the Jacobian; `out` is ``(n, nnz)``."""
        x, state = self._in_one_dtype(x, state)
        Linearization(self, np, x.shape[:1], x, state).fill(out)

    def param_grads(self, x: Array, state: Array, grad: Array) -> dict[str, Array]:
        """Return parameter gradients from the gradient in the units, summed over samples."""
        x, state, grad = self._in_one_dtype(x, state, grad)
        return Linearization(self, np, x.shape[:1], x, state).sum_params(grad)

    def _in_one_dtype(self, *arrays: Array) -> list[Array]:
        dtype = np.result_type(*arrays, *self.params.values())
        return [array.astype(dtype, copy=False) for array in arrays]
