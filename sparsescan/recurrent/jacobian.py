"""Jacobians and gradients of recurrent cells, for all steps at once, from the graph of a step.

Apart from sums of products, called ``slots``, a cell computes elementwise. So a gradient passes its
stages, from the last to the first, by two alternating kinds of factors,

    (∂s_t/∂s_{t-1})ᵀ = W_0 D_0 W_1 D_1 ⋯,

``D`` has the slopes of each slot: one diagonal for each gradient that it depends on. ``W`` has the
weights, which all steps and samples share. Both also pass on gradients that earlier stages need.
Most cells have one stage. The slots of all steps are recomputed at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import scipy.sparse as sp

from ..arrays.arrays import namespace, output, read_array
from ..chains.containers import BatchedCSR, CSRChain, as_matrix
from ..chains.implicit import ImplicitChain
from ..checks import check_flag, check_has_shape
from ..errors import Allocating, InputError
from ..execution.sharing import even_slices, map_shared
from ..graph.operations import Node, Reduction, symbol
from ..parameters.parametrised import masked
from ..symbolic.pattern import Pattern
from .further import filled_up
from .heads import parts_of, whole_of
from .linear import ONE, Key
from .loops.values import fill_blocks, fill_entries, multiply_rows, put_column
from .program import INPUT
from .structure import DENSE, Places, Structure

# Rows of a block, for up to this many units: the block, its slots and slopes fit the cache.
_ROWS, _UNITS = 8192, 40
# OpenBLAS computes products up to this size on one thread. For each larger product it wakes its
# threads, which then spin until the next one; if other work runs, products take up to thirty times
# as long. So products are cut into tiles of this many rows, unless they are wide.
_ONE_THREAD, _ROWS_OF_TILE, _WIDE = 1 << 18, 64, 150
# The most numbers of multi-stage Jacobians to write at once on the host, and on a device.
_AT_ONCE, _AT_ONCE_ON_DEVICE = 1 << 17, 1 << 26

Array = Any  # numpy.ndarray or cupy.ndarray
Shape = tuple[int, ...]
# A block of Jacobians: a matrix, a diagonal, or the sum of both.
_Part: TypeAlias = "tuple[Array | None, Array | None]"
_Fill = Callable[[Array, Array], None]


class _Weights(NamedTuple):
    """Parameters of a call, in one dtype.

    Attributes
    ----------
    matrices : dict of Key to Array
        The matrices of products, 0 where pruned.
    rows : list of Array
        Parameters that elementwise operations read.
    packed : Array, shape (slots, width, units)
        One matrix that multiplies all columns of rows.
    """

    matrices: dict[Key, Array]
    rows: list[Array]
    packed: Array


class Equations(Structure):
    """The equations of a cell on arrays."""

    # -- Parameters -----------------------------------------------------------------------------

    def weights(self, xp: Any, dtype: np.dtype[Any], params: Mapping[str, Array]) -> _Weights:
        """Return the parameters for a call."""
        blocks: dict[str | Reduction, Array] = {}
        for name, mask in self.masks.items():
            whole = masked(xp, params[name], mask).astype(dtype, copy=False)
            if name in self.program.partial:
                parts = whole.reshape(self._blocks[name], -1, whole.shape[1])
                blocks[name] = whole_of(xp, parts, self.program.heads_of(name), self.units)
            else:
                blocks[name] = whole.reshape(-1, self.units, whole.shape[1])
        for reduction in self.program.reductions:
            blocks[reduction] = xp.asarray(reduction.matrix(self.units)[None], dtype)
        matrices: dict[Key, Array] = {}
        packed = xp.zeros((len(self.sums), self.width, self.units), dtype)
        for room, each in zip(packed, self.sums, strict=True):
            for key, at in each.terms:
                which, gate, is_transposed = key
                turned = blocks[which][gate] if is_transposed else blocks[which][gate].T
                matrices[key] = turned.T
                room[at] += turned
            for name, gate in each.biases:
                room[self.one] += params[name].reshape(-1, self.units)[gate]
        rows = []
        for row in self.program.rows:
            if row.operation != "derived":
                name, gate = row.details
                array = params[name].astype(dtype, copy=False)
                rows.append(array if row.operation == "scalar" else self.block(name, gate, array))
        if self.program.derived:
            values = self.code.on(xp)["derived"](rows, dtype.type)
            rows += [xp.asarray(value, dtype) for value in values]
        return _Weights(matrices, rows, packed)

    # -- The step -------------------------------------------------------------------------------

    def read_rows(self, xp: Any, x: Array, state: Array) -> Array:
        """Return the rows that products read; arguments in them are written later."""
        rows = xp.empty((len(x), self.width), x.dtype)
        rows[:, self.one] = 1
        for at, part in self.copied:
            rows[:, at] = x[:, : self.inputs] if part is None else state[:, part]
        return rows

    def run(
        self, xp: Any, which: str, weights: _Weights, rows: Array, x: Array, state: Array, out: Any
    ) -> None:
        """Run a function of the step, of rows that have been read."""

        def sums(stage: int, *arguments: Array) -> Array:
            for each, array in zip(self.arguments[stage - 1], arguments, strict=True):
                rows[:, self.places[each]] = array
            slots = self.slots[stage]
            found = xp.empty((len(slots), len(rows), self.units), rows.dtype)
            for k, room in zip(slots, found, strict=True):
                own, *_ = self.program.slots[k].terms
                if isinstance(own.matrix, Reduction) and not own.matrix.is_linear:
                    parts = rows[:, self.places[own.argument]].reshape(
                        len(rows), own.matrix.heads, -1
                    )
                    room.reshape(parts.shape)[...] = parts.max(-1, keepdims=True)
                    continue
                first, *others = self.sums[k].runs
                _product(xp, rows[:, first], weights.packed[k, first], out=room)
                for run in others:
                    room += _product(xp, rows[:, run], weights.packed[k, run])
                if self.sums[k].has_bias_apart:
                    room += weights.packed[k, self.one]
            return found

        further = self._own_states(x[:, self.inputs :], self.size)
        given = self._own_input(x[:, : self.inputs]), further, self._own_states(state, self.size)
        self.code.on(xp)[which](sums, *given, weights.rows, out, x.dtype.type)

    def _own_states(self, array: Array, size: int) -> list[Array]:
        """Return the own units of each state, of so many units."""
        parts = [array[:, k : k + size] for k in range(0, array.shape[1], size)]
        return [part[:, self.own] for part in parts] if self.units < size else parts

    def _own_input(self, x: Array) -> Array:
        """Return the own units of the input, if elementwise operations read it."""
        return x[:, self.own] if self.program.uses_input and self.units < self.size else x

    def forward(
        self, xp: Any, params: Mapping[str, Array], x: Array, state: Array, out: Array
    ) -> None:
        """Write the states after the step."""
        weights = self.weights(xp, x.dtype, params)

        def advance(at: slice) -> None:
            rows = self.read_rows(xp, x[at], state[at])
            new = self._own_states(out[at], self.units)
            self.run(xp, "forward", weights, rows, x[at], state[at], new)

        blocks = self.blocks(xp, len(x))
        if len(blocks) == 1:
            advance(blocks[0])
        else:
            map_shared(advance, blocks)

    def blocks(self, xp: Any, count: int) -> list[slice]:
        """Return blocks of rows, which are the same for any number of threads."""
        rows = max(1, _ROWS * _UNITS // max(_UNITS, self.units))
        # A device takes all at once.
        return even_slices(count, max(1, round(count / rows)) if xp is np else 1)

    # -- Gradients ------------------------------------------------------------------------------

    def grads(
        self, xp: Any, which: str, weights: _Weights, block: _Rows, grad: Array, count: int
    ) -> Array:
        """Return the gradients of a block in slots, and `count` others."""
        program, rows = self.program, block.rows
        out = xp.empty((len(program.slots) + count, len(rows), self.units), grad.dtype)

        def back(stage: int) -> list[Array]:
            returned = [program.arguments[b] for b in self.linear.stages[stage].arguments]
            return [self.pull(xp, weights, out, argument) for argument in returned]

        states = [symbol("state", k) for k in range(program.states)]
        read = [rows[:, self.places[each]] if each in self.places else None for each in states]
        given = [each if each is None else each[:, self.own] for each in read]
        x = self._own_input(rows[:, self.places[INPUT]]) if INPUT in self.places else None
        self.code.on(xp)[which](
            *(back, block.slopes, x, given, weights.rows, self._own_states(grad, self.units)),
            *(out, grad.dtype.type),
        )
        return out

    def pull(
        self, xp: Any, weights: _Weights, grads: Array, argument: Node, out: Array = None
    ) -> Array:
        """Return the gradient in the vector that products multiply, or add it to `out`."""
        for slot, grad in zip(self.program.slots, grads, strict=False):
            for matrix, gate, is_transposed, read in slot.terms:
                if read is argument:
                    part = _product(xp, grad, weights.matrices[matrix, gate, is_transposed])
                    if out is None:
                        out = part
                    else:
                        out += part
        return out

    def sum_up(self, xp: Any, grads: Array, rows: Array) -> list[Array]:
        """Return the sums for gradients of parameters, from gradients in slots and in rows."""
        count = len(self.program.slots)
        found = [
            _sum_of_products(xp, grads[group.first : group.last], rows[:, group.columns])
            for group in self.groups
        ]
        if len(grads) > count:
            ones = rows[:, self.one : self.one + 1]
            found.append(_sum_of_products(xp, grads[count:], ones)[:, :, 0])
        return found

    def param_grads(
        self,
        xp: Any,
        weights: _Weights,
        dtype: np.dtype[Any],
        shapes: Mapping[str, Shape],
        sums: Sequence[Array],
    ) -> dict[str, Array]:
        """Return the gradients of the parameters from sums over all rows."""
        program = self.program
        grads = {name: xp.zeros(shape, dtype) for name, shape in shapes.items()}
        for (first, last, columns), part in zip(self.groups, sums, strict=False):
            for k in range(first, last):
                own = part[k - first]
                for (name, gate, is_transposed), at in self.sums[k].terms:
                    if isinstance(name, Reduction):
                        continue
                    block = own[:, at.start - columns.start : at.stop - columns.start]
                    room = self.block(name, gate, grads[name])
                    block = block.T if is_transposed else block
                    if name in program.partial:
                        block = parts_of(xp, block, program.heads_of(name), *room.shape)
                    room += block
                for name, gate in self.sums[k].biases:
                    room = self.block(name, gate, grads[name])
                    room += own[:, self.one - columns.start]
        found = iter(sums[-1] if len(sums) > len(self.groups) else ())
        rows = [
            xp.zeros(self.units, dtype) if grad is None else next(found)
            for grad in self.linear.row_grads
        ]
        if program.derived:
            run = self.code.on(xp)["derived_grads"]
            for k, total in run(weights.rows, rows, dtype.type):
                rows[k] = rows[k] + total
        for row, total in zip(program.rows, rows, strict=True):
            if row.operation == "scalar":
                grads[row.details[0]][...] += total.sum()
            elif row.operation == "vector":
                name, gate = row.details
                self.block(name, gate, grads[name])[...] += total
        return {name: masked(xp, grad, self.masks.get(name)) for name, grad in grads.items()}

    # -- Values of Jacobians --------------------------------------------------------------------

    def filler(self, xp: Any, weights: _Weights, dtype: np.dtype[Any]) -> _Fill:
        """Return a function that writes the values of rows, ``(n, nnz)``, from their slopes."""
        is_sparse = self.pattern.nnz < DENSE * self.state_size * self.pattern.shape[1]
        if xp is not np or (len(self.factors) > 1 and not is_sparse):
            return partial(self._fill_products, xp, weights)
        if len(self.factors) > 1:
            return self._factor_filler(weights, dtype)
        if self.table is None:
            return self._entry_filler(weights, dtype)
        keys, *tables = self.table
        matrices = np.empty((len(keys), self.size, self.units), dtype)
        for room, key in zip(matrices, keys, strict=True):
            room[...] = weights.matrices[key].T
        return lambda slopes, out: fill_blocks(matrices, slopes, *tables, out)

    def _entry_filler(self, weights: _Weights, dtype: np.dtype[Any]) -> _Fill:
        """Return a function that writes the values of a one-stage pattern with masks."""
        ranges, parts, added = self.entries
        factors = np.zeros((int(ranges[:, 2].max()), self.pattern.nnz), dtype)
        for which, key, places, inside, _, _ in parts:
            factors[which, places] = weights.matrices[key].T.reshape(-1)[inside]

        def fill(slopes: Array, out: Array) -> None:
            size = len(out) * self.units
            sources = np.zeros(factors.shape, np.uint64)
            diagonals = [np.empty((0, 2), np.uint64)]
            for places, unit, slope in added:
                # A slope that an entry does not use is skipped, not multiplied by 0: it may be
                # infinite.
                sources[:, places] = slope * size + unit
                table = np.stack([places, slope * size + unit], axis=1)
                diagonals.append(table.astype(np.uint64))
            for which, _, places, _, unit, slope in parts:
                sources[which if which else slice(None), places] = slope * size + unit
            given = slopes.reshape(-1), self.units, np.concatenate(diagonals), out
            fill_entries(factors, sources, ranges, *given)

        return fill

    def _factor_filler(self, weights: _Weights, dtype: np.dtype[Any]) -> _Fill:
        """Return a function that writes the values of sparse Jacobians of several stages."""
        shared = [
            self.weights_of(np, k, weights, dtype, pattern)[None]
            for k, (pattern, _) in enumerate(self.exact_products[1::2])
        ]

        def fill(slopes: Array, out: Array) -> None:
            whole, values = None, None
            for k, (factor, pattern) in enumerate(self.exact_products):
                if k % 2:
                    more = shared[k // 2]
                else:
                    more = np.empty((len(out), factor.nnz), dtype)
                    for places, unit, which in self.slope_places[k // 2]:
                        more[:, places] = 1 if which == ONE else slopes[which][:, unit]
                if whole is None:
                    whole, values = pattern, more
                    continue
                is_last = k == len(self.exact_products) - 1
                result = out if is_last else np.empty((len(out), pattern.nnz), dtype)
                multiply_rows(
                    *(more, factor.indptr, factor.indices),
                    *(values, whole.indptr, whole.indices),
                    *(pattern.indptr, pattern.indices, np.empty(pattern.shape[1], dtype), result),
                )
                whole, values = pattern, result

        return fill

    def _fill_products(self, xp: Any, weights: _Weights, slopes: Array, out: Array) -> None:
        """Write the values by products of whole blocks, for some samples at a time."""
        most = (_AT_ONCE if xp is np else _AT_ONCE_ON_DEVICE) // (self.size * self.units)
        for at in _tiles(len(out), max(1, most)):
            jacobians = self._jacobians(xp, weights, slopes[:, at])
            for pair, places in self.places_of_blocks.items():
                _write(xp, places, jacobians.get(pair, (None, None)), out[at])

    def _jacobians(self, xp: Any, weights: _Weights, slopes: Array) -> dict[tuple[int, int], _Part]:
        """Return the blocks of Jacobians, by states before the step and after it."""
        ones = xp.ones(slopes.shape[1:], slopes.dtype)
        # For each vector, the derivatives of the new states in it.
        parts: list[dict[int, _Part]] = [
            {j: (None, ones)} for j in range(len(self.factors[0].given))
        ]
        for factors in self.factors:
            after: list[dict[int, _Part]] = [{} for _ in factors.returned]
            for block in factors.blocks:
                own: dict[int, _Part] = {}
                # Vectors that no product multiplies come last; products make new arrays to add to.
                for place, which in sorted(block.slopes, key=lambda pair: pair[1] == ONE):
                    slope = None if which == ONE else slopes[which]
                    for j, part in parts[place].items():
                        _add(own, j, _scaled(part, slope))
                if block.is_slot:
                    own = {j: _together(xp, part) for j, part in own.items()}
                for r, keys in block.weights:
                    matrix = sum(weights.matrices[key].T for key in keys)
                    for j, part in own.items():
                        _add(after[r], j, _multiplied(xp, matrix, part) if keys else part)
            parts = after
        return {(k, j): part for k, own in enumerate(parts) for j, part in own.items()}

    # -- Values of factors ----------------------------------------------------------------------

    def put_slopes(self, xp: Any, number: int, slopes: Array, out: Array) -> None:
        """Write the values of a factor of slopes; `out` is ``(n, nnz)``."""
        start = 0
        for block in self.factors[number].blocks:
            # The entries of a row are neighbours.
            step = len(block.slopes)
            for k, (_, which) in enumerate(block.slopes, start):
                if xp is np and which != ONE:
                    put_column(slopes[which], out, k, step)
                else:
                    out[:, k : k + self.units * step : step] = 1 if which == ONE else slopes[which]
            start += step * self.units

    def weights_of(
        self, xp: Any, number: int, weights: _Weights, dtype: np.dtype[Any], pattern: Pattern
    ) -> Array:
        """Return the values of a factor of weights in the order of its pattern."""
        _, blocks, returned = self.factors[number]
        whole = xp.zeros((len(returned), self.size, len(blocks), self.units), dtype)
        for b, block in enumerate(blocks):
            for r, keys in block.weights:
                if not keys:
                    whole[r, :, b] = xp.eye(self.size, dtype=dtype)
                for key in keys:
                    whole[r, :, b] += weights.matrices[key].T
        if pattern.kind == "dense":
            return whole.reshape(-1)
        return xp.take(whole.reshape(-1), self.weight_places(pattern).on(xp))


def _add(parts: dict[int, _Part], j: int, part: _Part) -> None:
    """Add a block to the existing ones, in place."""
    if j not in parts:
        parts[j] = part
        return
    both = []
    for mine, more in zip(parts[j], part, strict=True):
        if mine is not None and more is not None:
            mine += more
        both.append(more if mine is None else mine)
    parts[j] = both[0], both[1]


def _scaled(part: _Part, slope: Array | None) -> _Part:
    """Return a block with each row multiplied by a slope; None means 1."""
    if slope is None:
        return part
    whole, diagonal = part
    return (
        None if whole is None else slope[:, :, None] * whole,
        None if diagonal is None else slope * diagonal,
    )


def _together(xp: Any, part: _Part) -> _Part:
    """Add the diagonal of a block to its matrix, in place, if it has one."""
    whole, diagonal = part
    if whole is None or diagonal is None:
        return part
    unit = xp.arange(whole.shape[1])
    whole[:, unit, unit] += diagonal
    return whole, None


def _multiplied(xp: Any, matrix: Array, part: _Part) -> _Part:
    """Return the product of a matrix and a block that is a matrix or a diagonal."""
    whole, diagonal = part
    if whole is not None:
        return xp.matmul(matrix, whole), None
    assert diagonal is not None
    return matrix * diagonal[:, None, :], None


def _write(xp: Any, places: Places, part: _Part, out: Array) -> None:
    """Write a block to the places of its entries."""
    whole, diagonal = part
    if whole is None:
        out[:, places.places.on(xp)] = 0
    elif places.whole is not None:
        first, last, offset = places.whole
        rows = out[:, first:last].reshape(len(out), whole.shape[1], -1)
        rows[:, :, offset : offset + whole.shape[2]] = whole
    else:
        entries = whole.reshape(len(whole), whole.shape[1] * whole.shape[2])
        out[:, places.places.on(xp)] = entries[:, places.inside.on(xp)]
    if diagonal is not None:
        # The places of a complete diagonal are equally spaced.
        at: Any = places.on_diagonal.on(xp) if places.steps is None else places.steps
        out[:, at] += diagonal if places.steps is not None else diagonal[:, places.units.on(xp)]


class _Rows(NamedTuple):
    """The rows of a block that products read, and the slopes of the new states."""

    at: slice
    rows: Array
    slopes: Array


class Linearization:
    """Derivatives of a cell at given inputs and states; :meth:`.Cell.linearize` makes it.

    Examples
    --------
    >>> import numpy as np, sparsescan
    >>> from sparsescan.recurrent import GRUCell
    >>> cell = GRUCell(12, 20, rng=0)
    >>> plan = sparsescan.plan([cell.pattern] * 50, reverse=True)  # once
    >>> x = np.random.default_rng(0).standard_normal((50, 16, 12), np.float32)
    >>> states = cell.unroll(x)
    >>> steps = cell.linearize(x, states[:-1])
    >>> grads = plan.exclusive_scan(states[-1], steps.values())
    >>> steps.param_grads(grads)["weight_hh"].shape
    (60, 20)
    """

    def __init__(self, cell: Any, xp: Any, lead: Shape, x: Array, state: Array) -> None:
        self._cell, self._xp, self._lead = cell, xp, lead
        self._shape, self._dtype = x.shape, x.dtype
        self._equations: Equations = cell._equations
        equations = self._equations
        self._weights = weights = equations.weights(xp, x.dtype, cell.params)
        count = len(equations.linear.slopes) + len(equations.linear.columns)
        self._has_columns = not equations.linear.columns

        def linearized(at: slice) -> _Rows:
            rows = equations.read_rows(xp, x[at], state[at])
            slopes = xp.empty((count, len(rows), equations.units), x.dtype)
            equations.run(xp, "linearize", weights, rows, x[at], state[at], slopes)
            return _Rows(at, rows, slopes)

        self._blocks = map_shared(linearized, equations.blocks(xp, len(x)))

    @Allocating("the values")
    def values(self, *, out: Array = None) -> Array:
        """Compute the values, as :meth:`.Cell.values`."""
        apart = [array for block in self._blocks for array in (block.rows, block.slopes)]
        apart += self._cell.params.values()
        room = values_room(self._cell, self._xp, self._lead, self._dtype, out, apart)
        self.fill(room)
        return room if out is None else out

    def jacobian(self) -> sp.csr_array | BatchedCSR | CSRChain:
        """Return the Jacobian, as :meth:`.Cell.jacobian`."""
        values, pattern = self.values(), self._cell.pattern
        if len(self._lead) == 2:
            return CSRChain.from_pattern(values[::-1], pattern)
        return as_matrix(values, pattern)

    def implicit(self, *, reverse: bool = False) -> ImplicitChain:
        """Return all Jacobians as implicit steps, of :attr:`Cell.implicit_pattern`.

        Parameters
        ----------
        reverse : bool, default False
            Whether to return the steps in the order of time, for scans with ``reverse=True``.

        Returns
        -------
        ImplicitChain
            The steps from the LAST to the first, unless `reverse`. Its memory per step and sample
            grows with the length of the state, not with its square.

        Raises
        ------
        InputError
            If the input had no axis of steps, or more than one axis of samples.
        MemoryLimitError
            If the slopes would take more memory than there is.

        Examples
        --------
        >>> import numpy as np, sparsescan
        >>> from sparsescan.recurrent import RNNCell
        >>> cell = RNNCell(3, 20, rng=0)
        >>> plan = sparsescan.plan([cell.implicit_pattern] * 100, reverse=True)
        >>> x = np.random.default_rng(0).standard_normal((100, 16, 3), np.float32)
        >>> states = cell.unroll(x)
        >>> steps = cell.linearize(x, states[:-1])
        >>> grads = plan.exclusive_scan(states[-1], steps.implicit(reverse=True))
        >>> steps.param_grads(grads)["weight_hh"].shape
        (20, 20)
        """
        equations, xp, lead = self._equations, self._xp, self._lead
        if len(lead) not in (1, 2):
            raise InputError(
                f"the steps have the axes {lead}; expected (T,) or (T, batch) for a chain"
            )
        is_turned = check_flag("reverse", reverse)
        pattern, values = self._cell.implicit_pattern, []
        for k in range(len(equations.factors)):
            slopes, weights = pattern.factors[2 * k : 2 * k + 2]
            what = f"the slopes of {self._cell!r}"
            room = output(xp, None, (*lead, slopes.nnz), self._dtype, what=what)
            flat = room.reshape(self._shape[0], slopes.nnz)
            self._for_blocks(partial(equations.put_slopes, xp, k), flat)
            values.append(room if is_turned else room[::-1])
            values.append(equations.weights_of(xp, k, self._weights, self._dtype, weights))
        return ImplicitChain(values, pattern)

    @Allocating("the gradients of the parameters")
    def param_grads(self, grad_state: Array) -> dict[str, Array]:
        """Return the gradients of the parameters, as :meth:`.Cell.param_grads`."""
        return self.sum_params(self._read(grad_state))

    @Allocating("the gradients of the input")
    def input_grads(self, grad_state: Array) -> Array:
        """Return the gradients of the inputs, as :meth:`.Cell.input_grads`."""
        return self.pull_inputs(self._read(grad_state))

    # -- Arguments that are checked -------------------------------------------------------------

    def fill(self, out: Array) -> None:
        """Write the values."""
        fill = self._equations.filler(self._xp, self._weights, self._dtype)
        self._for_blocks(fill, out.reshape(self._shape[0], self._cell.nnz))

    def _for_blocks(self, call: _Fill, out: Array) -> None:
        """Call a function with the slopes of each block and the block's part of an array."""
        columns, dtype = self._equations.code.on(self._xp)["columns"], self._dtype.type
        has_columns = self._has_columns

        def call_with_columns(block: _Rows) -> None:
            if not has_columns:
                columns(block.slopes, self._weights.rows, dtype)
            call(block.slopes, out[block.at])

        map_shared(call_with_columns, self._blocks)
        self._has_columns = True

    def sum_params(self, grad: Array) -> dict[str, Array]:
        """Return the gradients of the parameters."""
        equations, xp, weights = self._equations, self._xp, self._weights
        count = sum(each is not None for each in equations.linear.row_grads)

        def sums(block: _Rows) -> list[Array]:
            grads = equations.grads(xp, "param_grads", weights, block, grad[block.at], count)
            return equations.sum_up(xp, grads, block.rows)

        total = [sum(parts) for parts in zip(*map_shared(sums, self._blocks), strict=True)]
        return equations.param_grads(xp, weights, self._dtype, self._cell.shapes, total)

    def pull_inputs(self, grad: Array) -> Array:
        """Return the gradients of the inputs."""
        equations, xp, weights = self._equations, self._xp, self._weights
        out = xp.zeros(self._shape, self._dtype)
        inputs, units = equations.inputs, equations.units
        own = [equations.linear.input_grad, *equations.linear.further_grads]
        begins = [0, *range(inputs, self._shape[1], units)]
        places = [at for at, each in zip(begins, own, strict=True) if each is not None]

        def pull(block: _Rows) -> None:
            part = grad[block.at]
            grads = equations.grads(xp, "input_grads", weights, block, part, len(places))
            for at, one in zip(places, grads[len(grads) - len(places) :], strict=True):
                out[block.at, at : at + units] = one
            equations.pull(xp, weights, grads, INPUT, out[block.at, :inputs])

        map_shared(pull, self._blocks)
        return out.reshape(*self._lead, self._shape[1])

    def _read(self, grad_state: Array) -> Array:
        """Return the caller's gradients as rows in the cell's dtype."""
        grad = read_array("grad_state", grad_state)
        check_has_shape("grad_state", grad, (*self._lead, self._cell.state_size), ", as state")
        namespace(grad, *(block.rows for block in self._blocks))
        return grad.reshape(-1, self._cell.state_size).astype(self._dtype, copy=False)


# -- Arrays of a caller ---------------------------------------------------------------------------


def read_arrays(cell: Any, **arrays: Any) -> tuple[Any, Shape, list[Array]]:
    """Return NumPy or CuPy, the leading axes, and the arrays as ``(n, size)`` in one dtype."""
    checked = {name: read_array(name, array) for name, array in arrays.items()}
    x = checked["x"] = filled_up(cell, checked["x"])
    lead: Shape = x.shape[:-1]
    width = cell.input_size + len(cell.program.further_grads) * cell.hidden_size
    if x.shape[-1:] != (width,):
        raise InputError(f"x has shape {x.shape}; expected (…, {width})")
    for name, array in checked.items():
        if name != "x":
            check_has_shape(name, array, (*lead, cell.state_size), f", as x has shape {x.shape}")
    xp, dtype = place_of(cell, *checked.values())
    count = math.prod(lead)
    rows = [
        array.reshape(count, array.shape[-1]).astype(dtype, copy=False)
        for array in checked.values()
    ]
    return xp, lead, rows


def place_of(cell: Any, *arrays: Array) -> tuple[Any, np.dtype[Any]]:
    """Return NumPy or CuPy, and the dtype to which arrays and parameters promote."""
    everything = *arrays, *cell.params.values()
    return namespace(*everything), np.result_type(*(array.dtype for array in everything))


def values_room(
    cell: Any, xp: Any, lead: Shape, dtype: np.dtype[Any], out: Array, apart: Iterable[Array]
) -> Array:
    """Return an array for values: `out`, if it is given and fits."""
    shape = (*lead, cell.nnz)
    return output(xp, out, shape, dtype, what=f"the values of {cell!r}", apart=apart)


# -- Products of many rows ------------------------------------------------------------------------


def _tiles(size: int, most: int) -> list[slice]:
    """Return slices of about equal length, at most `most`."""
    return even_slices(size, max(1, -(-size // most)))


def _product(xp: Any, a: Array, b: Array, out: Array = None) -> Array:
    """Compute ``a @ b`` for many rows `a` and a small `b`."""
    if xp is not np or len(b) > _WIDE:
        return xp.matmul(a, b, out=out)
    if out is None:
        out = np.empty((len(a), b.shape[1]), a.dtype)
    whole = len(a) // _ROWS_OF_TILE * _ROWS_OF_TILE
    pieces = a[:whole].reshape(-1, _ROWS_OF_TILE, a.shape[1])
    for cols in _tiles(b.shape[1], _ONE_THREAD // (_ROWS_OF_TILE * max(len(b), 1))):
        part = out[:, cols]
        np.matmul(pieces, b[:, cols], out=part[:whole].reshape(-1, _ROWS_OF_TILE, part.shape[1]))
        np.matmul(a[whole:], b[:, cols], out=part[whole:])
    return out


def _sum_of_products(xp: Any, a: Array, b: Array) -> Array:
    """Compute ``aᵀ b`` for each of the arrays `a` and many rows."""
    if xp is not np or a.shape[2] > _WIDE:
        return xp.matmul(a.transpose(0, 2, 1), b)
    sums = np.empty((len(a), a.shape[2], b.shape[1]), a.dtype)
    tiles, left = divmod(len(b), _ROWS_OF_TILE)
    whole = len(b) - left
    many = a[:, :whole].reshape(len(a), tiles, _ROWS_OF_TILE, a.shape[2]).swapaxes(2, 3)
    pieces = b[:whole].reshape(tiles, _ROWS_OF_TILE, b.shape[1])
    side = math.isqrt(_ONE_THREAD // _ROWS_OF_TILE)
    for rows, cols in itertools.product(_tiles(a.shape[2], side), _tiles(b.shape[1], side)):
        part = sums[:, rows, cols]
        np.matmul(many[:, :, rows], pieces[:, :, cols]).sum(axis=1, out=part)
        part += np.matmul(a[:, whole:, rows].transpose(0, 2, 1), b[whole:, cols])
    return sums
