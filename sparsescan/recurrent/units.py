"""CellUnits: some hidden units of a recurrent cell, for workers that share its steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..symbolic.pattern import Pattern

__all__ = ["CellUnits"]

Array = Any


def _rows_of(cell: Any, param: Array, units: slice) -> Array:
    """Return the rows of some hidden units of a parameter or its mask, gate by gate."""
    gates = param.reshape(-1, cell.hidden_size, *param.shape[1:])
    return gates[:, units].reshape(-1, *param.shape[1:])


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
        Parameters of the units, copied, by the names of the cell.
    """

    def __init__(self, cell: Any, units: slice) -> None:
        self._cell, self._chosen = cell, units
        self.state_size = cell.state_size
        self.units = len(range(*units.indices(cell.hidden_size)))
        self.pattern = Pattern.dense((self.state_size, self.units))
        self.nnz = self.pattern.nnz
        self.params: dict[str, Array] = {
            name: _rows_of(cell, param, units).copy() for name, param in cell.params.items()
        }
        self._masks = {
            name: _rows_of(cell, mask.on(np), units)
            for name, mask in cell._masks.items()
            if mask is not None
        }

    @np.errstate(over="ignore", invalid="ignore")
    def forward(self, x: Array, state: Array) -> Array:
        """Return the new units, shape ``(n, units)``, from `x` and the whole state before."""
        products = self._products(x, state)
        out = np.empty(products.shape[1:], products.dtype)
        self._cell._advance(np, products, state[:, self._chosen], out)
        return out

    @np.errstate(over="ignore", invalid="ignore")
    def values(self, x: Array, state: Array, *, out: Array) -> None:
        """Write the entries of the Jacobian; `out` is ``(n, nnz)``."""
        slopes, direct = self._cell._columns(np, self._slopes(x, state))
        jacobians = out.reshape(len(out), self.state_size, self.units)
        np.einsum("gjk,gnj->nkj", self._weight("weight_hh"), slopes, out=jacobians)
        if direct is not None:
            unit = np.arange(self.units)
            jacobians[:, np.arange(self.state_size)[self._chosen], unit] += direct

    @np.errstate(over="ignore", invalid="ignore")
    def param_grads(self, x: Array, state: Array, grad: Array) -> dict[str, Array]:
        """Return gradients of the parameters from that of the units, summed over samples."""
        products = self._cell._product_grads(self._slopes(x, state), grad)
        grads = {}
        for part, places, read in self._reads(x, state):
            each = products[list(places)].transpose(0, 2, 1)
            grads[f"weight_{part}"] = (each @ read).reshape(-1, read.shape[1])
            grads[f"bias_{part}"] = each.sum(axis=2).reshape(-1)
        for name, mask in self._masks.items():
            grads[name][~mask] = 0
        return {name: grads[name] for name in self.params}

    def _reads(self, x: Array, state: Array) -> tuple[tuple[str, tuple[int, ...], Array], ...]:
        """Return, for each kind of weights, the products it is part of, and what it multiplies."""
        return ("ih", self._cell._ih, x), ("hh", self._cell._hh, state)

    def _weight(self, name: str) -> Array:
        """Return a weight ``(gates, units, ·)``, 0 where it is pruned."""
        weight, mask = self.params[name], self._masks.get(name)
        weight = weight if mask is None else np.where(mask, weight, 0)
        return weight.reshape(-1, self.units, weight.shape[1])

    def _products(self, x: Array, state: Array) -> Array:
        """Return the products of weights with input and state, ``(products, n, units)``."""
        dtype = np.result_type(x, state, *self.params.values())
        products = np.zeros((max(self._cell._hh) + 1, len(x), self.units), dtype)
        for part, places, read in self._reads(x, state):
            for place, weight in zip(places, self._weight(f"weight_{part}"), strict=True):
                products[place] += read @ weight.T
            if self._cell.bias:
                bias = self.params[f"bias_{part}"].reshape(len(places), 1, self.units)
                products[list(places)] += bias
        return products

    def _slopes(self, x: Array, state: Array) -> Any:
        return self._cell._slopes(np, self._products(x, state), state[:, self._chosen])
