"""Recurrent cells: from a state and an input to the next state.

Beyond its products ``a = W_ih x + b_ih + W_hh h + b_hh``, a cell computes elementwise, so

    (∂s_t/∂s_{t-1})ᵀ = Σ_g W_gᵀ diag(d_g) + D,   d_g the slopes of s_t in the product of gate g,

where ``D`` is the part of the state that is passed on directly: ``z`` in a GRU, ``f`` in an LSTM.
The products of all steps are recomputed at once, from `n` rows ``[x, 1, h]``, one for each step and
sample.
Arrays over them are ``(products, n, hidden_size)``.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..arrays.arrays import Constant, check_memory, for_kernels, namespace, output, read_array
from ..chains.containers import BatchedCSR, CSRChain, as_matrix
from ..chains.implicit import ImplicitChain
from ..errors import Allocating, InputError, InputTypeError, short
from ..execution.sharing import even_slices, map_shared, quiet
from ..parameters.fixed import Fixed
from ..parameters.parametrised import Parameter, Parametrised, check_mask, initial, masked
from ..symbolic.implicit import ImplicitPattern
from ..symbolic.pattern import Pattern, of_mask, rows_of
from ..symbolic.schedule import check_count, check_flag
from .loops.values import fill_entries, put_column
from .units import CellUnits

__all__ = ["Cell", "Linearization", "Slopes"]

# Rows of a block, which fits the cache with its products and slopes.
_ROWS = 8192
# OpenBLAS gives a product of so many multiplications to one thread. It wakes its threads for each
# larger one, and those spin while they wait for the next: beside other work, products then take
# up to thirty times as long. So they are cut into tiles of so many rows, unless they are wide.
_ONE_THREAD, _ROWS_OF_TILE, _WIDE = 1 << 18, 64, 150
# Share of entries from which on weights are multiplied as a dense matrix.
_DENSE = 0.35
# What a cell computes.
_EQUATIONS = {"_ih", "_hh", "_parts", "_carries", "_advance", "_slopes", "_columns"}
_EQUATIONS |= {"_factor", "_product_grads", "_products", "forward"}

Array = Any  # numpy.ndarray or cupy.ndarray
Shape = tuple[int, ...]


class Slopes(NamedTuple):
    """Derivatives of the new state.

    Attributes
    ----------
    products : ndarray, shape (products, n, hidden_size)
        Derivatives in the products. For an LSTM those of ``c_t`` in i, f and g, and of ``h_t`` in
        o.
    carry : ndarray or None, shape (n, hidden_size)
        Derivative in the old state directly: ``z`` or ``f``.
    inner : ndarray or None, shape (n, hidden_size)
        Derivative of ``h_t`` in ``c_t``, for an LSTM.
    """

    products: Array
    carry: Array = None
    inner: Array = None


class Cell(Parametrised, Fixed, ABC):
    """A recurrent cell ``s_t = f(x_t, s_{t-1}; θ)`` and ``(∂s_t/∂s_{t-1})ᵀ``, sparse.

    The methods take any number of axes before the last one, such as ``(T, batch)``: all steps and
    samples at once, since :meth:`unroll` has left the states.

    Parameters
    ----------
    input_size, hidden_size : int
        Length of ``x_t`` and ``h_t``.
    bias : bool, default True
        Whether there are biases.
    weight_ih_mask, weight_hh_mask : array_like of bool, of the shape of the weight, optional
        True where a weight is kept. A pruned weight counts as 0 and has a gradient of 0; a pruned
        hidden weight leaves the pattern.
    dtype : {float32, float64}, default float32
        Dtype of initial parameters.
    rng : numpy.random.Generator or int, optional
        Source of the initial parameters, from the same distribution as PyTorch.

    Attributes
    ----------
    state_size : int
        Length of ``s_t``.
    pattern : Pattern
        Where ``(∂s_t/∂s_{t-1})ᵀ`` may have nonzeros, whatever the input and the parameters.

    See Also
    --------
    RNNCell, GRUCell, LSTMCell

    Examples
    --------
    The state of an LSTM is ``[h, c]``, so that its Jacobian has twice as many rows as units:

    >>> from sparsescan.jacobians import Cell, LSTMCell
    >>> cell = LSTMCell(3, 4)
    >>> isinstance(cell, Cell), cell.state_size, cell.pattern.shape
    (True, 8, (8, 8))
    """

    weight_ih = Parameter()
    weight_hh = Parameter()
    bias_ih = Parameter()
    bias_hh = Parameter()
    # For each gate, the product that holds its share of weight_ih, and the one that holds its share
    # of weight_hh. The latter are the last products, in the order of the gates.
    _ih: ClassVar[tuple[int, ...]]
    _hh: ClassVar[tuple[int, ...]]
    _parts: ClassVar[int] = 1  # vectors of length hidden_size that make up the state
    _carries: ClassVar[bool] = True  # whether the last of them is passed on directly
    # The slopes as a factor have a block of rows for each gate, and one for the direct part: the
    # parts of the state in which each block has entries.
    _blocks: ClassVar[tuple[tuple[int, ...], ...]]
    _kernel: ClassVar[Callable[..., None]]
    # Which compiled loops compute its sequences. A class that defines other equations does not
    # inherit them.
    _kinds: ClassVar[tuple[str, ...]] = ()
    # For whole sequences: vectors of length hidden_size that are kept of a step for the backward
    # pass, or that it writes; whether the forward pass writes any; the kernels of both passes, and
    # what runs that of the first.
    _kept_gates: ClassVar[int]
    _writes_gates: ClassVar[bool] = True
    _run_kernel: ClassVar[Callable[..., None]]
    _unroll: ClassVar[Callable[..., Any]]
    _back_kernel: ClassVar[Callable[..., None]]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        weight_ih_mask: ArrayLike | None = None,
        weight_hh_mask: ArrayLike | None = None,
        dtype: DTypeLike = np.float32,
        rng: np.random.Generator | int | None = None,
    ) -> None:
        self.input_size = check_count("input_size", input_size, 1)
        self.hidden_size = check_count("hidden_size", hidden_size, 1)
        self.bias = check_flag("bias", bias)
        self.state_size = self._parts * self.hidden_size
        self._gates = len(self._ih)
        rows = self._gates * self.hidden_size
        shapes: dict[str, Shape | None] = {
            "weight_ih": (rows, self.input_size),
            "weight_hh": (rows, self.hidden_size),
            "bias_ih": (rows,) if self.bias else None,
            "bias_hh": (rows,) if self.bias else None,
        }
        self.declare_parameters(shapes, initial(1 / math.sqrt(self.hidden_size), dtype, rng))
        self._masks = {
            "weight_ih": check_mask("weight_ih_mask", weight_ih_mask, self._shapes["weight_ih"]),
            "weight_hh": check_mask("weight_hh_mask", weight_hh_mask, self._shapes["weight_hh"]),
        }

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "_kinds" not in vars(cls) and not _EQUATIONS.isdisjoint(vars(cls)):
            cls._kinds = ()

    # -- Defined by each cell -------------------------------------------------------------------

    @abstractmethod
    def _kept(self, gates: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return where the Jacobian may have nonzeros, from the hidden weights each gate keeps."""

    @abstractmethod
    def _advance(self, xp: Any, a: Array, state: Array, out: Array) -> None:
        """Write the new state from the products `a`, which may be overwritten."""

    @abstractmethod
    def _slopes(self, xp: Any, a: Array, state: Array) -> Slopes:
        """Return the slopes from the products `a`, which may be overwritten."""

    def _columns(self, xp: Any, slopes: Slopes) -> tuple[Array, Array]:
        """Return the slopes ``(gates, n, state_size)`` in ``W_hh h``, and the direct part."""
        return slopes.products[-self._gates :], slopes.carry

    @abstractmethod
    def _factor(self, slopes: Slopes) -> list[Array]:
        """Return the slopes of each block in each of its parts of the state."""

    def _product_grads(self, slopes: Slopes, grad: Array) -> Array:
        """Return the gradients in the products from the gradient in the new state."""
        return slopes.products * grad

    # -- Public ---------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """Return what compiled loops over sequences compute: tanh, relu, gru or lstm.

        Raises
        ------
        InputTypeError
            If the cell is none of these, or a class of its own that defines other equations.
        """
        kind = getattr(self, "nonlinearity", *self._kinds[:1]) if self._kinds else None
        if kind not in self._kinds:
            raise InputTypeError(
                f"the cell is {short(self)}, for whose equations there are no compiled loops over "
                "sequences; expected an RNNCell, GRUCell or LSTMCell"
            )
        return str(kind)

    @cached_property
    @Allocating("the pattern")
    def pattern(self) -> Pattern:
        """Where the transposed Jacobian may have nonzeros."""
        size = self.state_size
        if self._masks["weight_hh"] is None and self._parts == 1:
            return Pattern.dense((size, size))
        check_memory(f"the pattern of a cell with {size} states", 17 * size * size)
        return of_mask(self._kept(self._kept_by_gate()))

    @property
    def nnz(self) -> int:
        """Entries of the pattern."""
        return self.pattern.nnz

    @cached_property
    @Allocating("the patterns of the factors")
    def implicit_pattern(self) -> ImplicitPattern:
        """Patterns of the factors of the transposed Jacobian, as an implicit step applies them.

        ``(∂s_t/∂s_{t-1})ᵀ = W D``, the slopes ``D`` sparse, and the weights ``W`` the same in all
        steps and samples: a linear scan over both reads far less than one over their products.
        """
        hidden, blocks = self.hidden_size, len(self._blocks)
        check_memory(f"the factors of {self!r}", 17 * self._parts * blocks * hidden * hidden)
        unit = np.arange(hidden)
        slopes = np.zeros((blocks, hidden, self._parts, hidden), bool)
        for block, parts in enumerate(self._blocks):
            for part in parts:
                slopes[block, unit, part, unit] = True
        weights = np.zeros((self._parts, hidden, blocks, hidden), bool)
        weights[0, :, : self._gates] = self._kept_by_gate().transpose(2, 0, 1)
        if self._carries:
            weights[-1, unit, -1, unit] = True
        first, last = slopes.reshape(blocks * hidden, -1), weights.reshape(self._parts * hidden, -1)
        # Samples share the weights, and dense ones take less time for an entry.
        kept = Pattern.dense(last.shape) if last.mean() > _DENSE else of_mask(last)
        return ImplicitPattern((of_mask(first), kept), shared=[1])

    @Allocating("the next state")
    @quiet
    def forward(self, x: Array, state: Array) -> Array:
        """Compute the next state.

        Parameters
        ----------
        x : array_like of float32 or float64, shape (…, input_size)
            The input ``x_t``, of NumPy or CuPy.
        state : array_like, shape (…, state_size)
            The state ``s_{t-1}``.

        Returns
        -------
        ndarray, shape (…, state_size)
            The state ``s_t``, of the dtype to which all arrays promote.

        Raises
        ------
        InputError, InputTypeError
            If a shape or a dtype is wrong.
        DeviceError
            If the arrays and the parameters are not in one place.
        """
        xp, lead, (x, state) = self._read(x=x, state=state)
        out = xp.empty(state.shape, state.dtype)
        self._advance(xp, self._products(xp, self._rows(xp, x, state)), state, out)
        return out.reshape(*lead, self.state_size)

    @Allocating("the states of a sequence")
    @quiet
    def unroll(self, x: Array, state: Array = None) -> Array:
        """Compute all states of a sequence, one step after the other.

        Parameters
        ----------
        x : array_like, shape (T, …, input_size)
            The inputs ``x_1, …, x_T``.
        state : array_like, shape (…, state_size), optional
            The state ``s_0``; by default zeros.

        Returns
        -------
        ndarray, shape (T + 1, …, state_size)
            The states ``s_0, …, s_T``.

        Raises
        ------
        InputError, InputTypeError, DeviceError
            As :meth:`forward`; if the cell has no :attr:`kind`; or if there are more units than a
            GPU's kernels take, as for :meth:`TrainingStep.forward`.
        MemoryLimitError
            If the states would take more memory than there is.
        """
        _ = self.kind
        x = read_array("x", x)
        if x.ndim < 2 or x.shape[-1] != self.input_size:
            raise InputError(f"x has shape {x.shape}; expected (T, …, {self.input_size})")
        steps, lead = x.shape[0], x.shape[1:-1]
        if state is None:
            state = namespace(x).zeros((*lead, self.state_size), x.dtype)
        state = read_array("state", state)
        if state.shape != (*lead, self.state_size):
            raise InputError(
                f"state has shape {state.shape}; expected {(*lead, self.state_size)}, as x has "
                f"shape {x.shape}"
            )
        _, dtype = self._place(x, state)
        batch = math.prod(lead)
        x = for_kernels(x.reshape(steps, batch, self.input_size), dtype)
        first = for_kernels(state.reshape(batch, self.state_size), dtype)
        return self._unroll(self, x, first).reshape(steps + 1, *lead, self.state_size)

    @Allocating("the linearization")
    def linearize(self, x: Array, state: Array) -> Linearization:
        """Compute the derivatives of all steps once, for several calls of a backward pass.

        Parameters
        ----------
        x, state
            As for :meth:`values`.

        Returns
        -------
        Linearization
            Its methods are those of the cell, without `x` and `state`. The parameters must stay as
            they are while it is in use.

        Raises
        ------
        InputError, InputTypeError, DeviceError
            As :meth:`forward`.

        Notes
        -----
        The gates are recomputed, for all steps in one go: BPPSA (MLSys 2020), Appendix E.
        """
        xp, lead, (x, state) = self._read(x=x, state=state)
        return Linearization(self, xp, lead, x, state)

    @Allocating("the values")
    def values(self, x: Array, state: Array, *, out: Array = None) -> Array:
        """Compute the values of ``(∂s_t/∂s_{t-1})ᵀ``, in the order of the pattern.

        Parameters
        ----------
        x : array_like, shape (…, input_size)
            The inputs ``x_t``.
        state : array_like, shape (…, state_size)
            The states BEFORE each step: ``states[:-1]`` of what :meth:`unroll` returned.
        out : ndarray, optional
            Where to write the values: contiguous, of the shape and dtype that is returned.

        Returns
        -------
        ndarray, shape (…, nnz)
            Values of all steps and samples, in the order of time: for scans with ``reverse=True``.

        Raises
        ------
        InputError, InputTypeError
            If a shape or a dtype is wrong.
        DeviceError
            If the arrays and the parameters are not in one place.
        MemoryLimitError
            If the values would take more memory than there is.

        See Also
        --------
        linearize : Compute the gates once for the values and for the gradients.
        """
        xp, lead, (x, state) = self._read(x=x, state=state)
        apart = [x, state, *self.params.values()]
        room = self._output(xp, lead, state.dtype, out, apart)
        if room.size > 0:
            Linearization(self, xp, lead, x, state)._fill(room)
        return room if out is None else out

    def jacobian(self, x: Array, state: Array) -> sp.csr_array | BatchedCSR | CSRChain:
        """Return the transposed Jacobian ``(∂s_t/∂s_{t-1})ᵀ``.

        Parameters
        ----------
        x, state
            As for :meth:`values`, with at most two axes before the last: ``(batch,)`` or
            ``(T, batch)``.

        Returns
        -------
        csr_array, BatchedCSR or CSRChain
            For none, one or two such axes. A chain runs from the LAST step to the first, for
            :func:`sparsescan.exclusive_scan`.

        Raises
        ------
        InputError, InputTypeError, DeviceError, MemoryLimitError
            As :meth:`values`.
        """
        state = read_array("state", state)
        if state.ndim > 3:
            raise InputError(
                f"state has {state.ndim} axes; expected at most (T, batch, state_size)"
            )
        return self.linearize(x, state).jacobian()

    @Allocating("the gradients of the parameters")
    def param_grads(self, x: Array, state: Array, grad_state: Array) -> dict[str, Array]:
        """Return the gradients of the loss in the parameters, summed over all steps and samples.

        ``∇θ = Σ_t (∂s_t/∂θ)ᵀ ∇s_t``: equation 2 of BPPSA (MLSys 2020).

        Parameters
        ----------
        x, state
            As for :meth:`values`.
        grad_state : array_like, shape (…, state_size)
            Gradients ``∇s_t`` in the states AFTER each step, in the order of time, as scans with
            ``reverse=True`` return them.

        Returns
        -------
        dict of str to ndarray
            A gradient of the shape of each parameter.

        Raises
        ------
        InputError, InputTypeError, DeviceError
            As :meth:`forward`.
        """
        xp, lead, (x, state, grad) = self._read(x=x, state=state, grad_state=grad_state)
        return Linearization(self, xp, lead, x, state)._param_grads(grad)

    @Allocating("the gradients of the input")
    def input_grads(self, x: Array, state: Array, grad_state: Array) -> Array:
        """Return the gradients of the loss in the inputs: ``(∂s_t/∂x_t)ᵀ ∇s_t``.

        Parameters
        ----------
        x, state, grad_state
            As for :meth:`param_grads`.

        Returns
        -------
        ndarray, shape (…, input_size)
            The gradients ``∇x_t``, for example for the layer below.

        Raises
        ------
        InputError, InputTypeError, DeviceError
            As :meth:`forward`.
        """
        xp, lead, (x, state, grad) = self._read(x=x, state=state, grad_state=grad_state)
        return Linearization(self, xp, lead, x, state)._input_grads(grad)

    def restrict(self, units: slice) -> CellUnits:
        """Return the part of this cell that computes some hidden units from the whole state.

        Parameters
        ----------
        units : slice
            Which of them.

        Returns
        -------
        CellUnits
            The part, with a copy of its rows of the parameters.

        Raises
        ------
        InputError
            If the state is more than the hidden units.
        """
        if self.state_size != self.hidden_size:
            raise InputError(f"{self!r} cannot be restricted; expected a state of hidden units")
        return CellUnits(self, units)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.input_size}, {self.hidden_size}, nnz={self.nnz})"

    # -- Products and values --------------------------------------------------------------------

    def _kept_by_gate(self) -> NDArray[np.bool_]:
        """Return which hidden weights are kept, ``(gates, hidden_size, hidden_size)``."""
        mask, shape = self._masks["weight_hh"], (self._gates, self.hidden_size, self.hidden_size)
        return np.ones(shape, bool) if mask is None else mask.on(np).reshape(shape)

    def _read(self, **arrays: Any) -> tuple[Any, Shape, list[Array]]:
        """Return NumPy or CuPy, the leading axes, and the arrays in one dtype, ``(n, size)``."""
        checked = {name: read_array(name, array) for name, array in arrays.items()}
        x = checked["x"]
        lead: Shape = x.shape[:-1]
        for name, array in checked.items():
            size = self.input_size if name == "x" else self.state_size
            if array.ndim == 0 or array.shape != (*lead, size):
                expected = f"{(*lead, size)}, as x has shape {x.shape}"
                expected = f"(…, {size})" if name == "x" else expected
                raise InputError(f"{name} has shape {array.shape}; expected {expected}")
        xp, dtype = self._place(*checked.values())
        count = math.prod(lead)
        rows = [
            array.reshape(count, array.shape[-1]).astype(dtype, copy=False)
            for array in checked.values()
        ]
        return xp, lead, rows

    def _output(
        self, xp: Any, lead: Shape, dtype: np.dtype[Any], out: Array, apart: Sequence[Array]
    ) -> Array:
        """Return an array for values: `out`, if it is given and fits."""
        shape = (*lead, self.nnz)
        return output(xp, out, shape, dtype, what=f"the values of {self!r}", apart=apart)

    def _place(self, *arrays: Array) -> tuple[Any, np.dtype[Any]]:
        """Return NumPy or CuPy, and the dtype that arrays and parameters have in common."""
        everything = *arrays, *self.params.values()
        return namespace(*everything), np.result_type(*(array.dtype for array in everything))

    def _weight(self, xp: Any, name: str, dtype: np.dtype[Any]) -> Array:
        """Return a weight ``(gates, hidden_size, ·)``, 0 where it is pruned."""
        weight = masked(xp, getattr(self, name), self._masks[name]).astype(dtype, copy=False)
        return weight.reshape(self._gates, self.hidden_size, -1)

    def _rows(self, xp: Any, x: Array, state: Array) -> Array:
        """Return the rows ``[x, 1, h]``, or ``[x, 1]`` if the state is None."""
        hidden = 0 if state is None else self.hidden_size
        rows = xp.empty((len(x), self.input_size + 1 + hidden), x.dtype)
        rows[:, : self.input_size] = x
        rows[:, self.input_size] = 1
        if state is not None:
            rows[:, self.input_size + 1 :] = state[:, :hidden]
        return rows

    def _products(self, xp: Any, rows: Array) -> Array:
        """Return the products of all rows, without ``weight_hh`` if the rows are ``[x, 1]``."""
        one, count = self.input_size, max(self._hh) + 1
        A = xp.zeros((count, one + 1 + self.hidden_size, self.hidden_size), rows.dtype)
        for name, places, part in (
            ("ih", self._ih, slice(None, one)),
            ("hh", self._hh, slice(one + 1, None)),
        ):
            for g, weight in enumerate(self._weight(xp, f"weight_{name}", rows.dtype)):
                A[places[g], part] = weight.T
                if self.bias:
                    bias = getattr(self, f"bias_{name}").reshape(self._gates, -1)
                    A[places[g], one] += bias[g]
        a = xp.empty((count, len(rows), self.hidden_size), rows.dtype)
        for k in range(count):
            # Elements that a product does not read are left out: inf·0 would be NaN.
            start = 0 if k in self._ih else one
            stop = rows.shape[1] if k in self._hh else one + 1
            _product(xp, rows[:, start:stop], A[k, start:stop], out=a[k])
        return a

    @cached_property
    def _entries(self) -> tuple[Constant, Constant, Constant]:
        """The column of every entry, its place in a gate's weight, and the entries passed on.

        Only the first `hidden_size` rows have entries of the weights. The last array holds the
        entries that have a direct part.
        """
        pattern, hidden = self.pattern, self.hidden_size
        columns = pattern.indices
        rows = rows_of(pattern)
        sources = (columns % hidden * hidden + rows)[rows < hidden]
        carried = (columns - rows) % hidden == 0
        carried &= rows >= (self.state_size - hidden if self._carries else self.state_size)
        return Constant(columns), Constant(sources), Constant(np.flatnonzero(carried))

    @cached_property
    def _kept_weights(self) -> Constant:
        """Where the entries of the factor with the weights are in it, if it is dense."""
        pattern = self.implicit_pattern.factors[1]
        return Constant(rows_of(pattern) * pattern.shape[1] + pattern.indices)

    def _fill(self, xp: Any, slopes: Array, direct: Array, out: Array) -> None:
        """Write all values; `out` is ``(n, nnz)``, `slopes` is ``(gates, n, state_size)``."""
        weight = self._weight(xp, "weight_hh", out.dtype)
        if xp is np and self._masks["weight_hh"] is None:
            rows = np.tile(weight.transpose(0, 2, 1), (1, 1, self._parts))
            self._kernel(np.ascontiguousarray(rows), slopes, direct, out)
            return
        columns, sources, place = (constant.on(xp) for constant in self._entries)
        weights = xp.take(weight.reshape(self._gates, -1), sources, axis=1)
        if direct is None:
            direct = xp.empty((0, 0), out.dtype)
        fill = fill_entries if xp is np else _fill_arrays
        fill(weights, slopes, columns, direct, place, out)


class _Block(NamedTuple):
    """The rows ``[x, 1, h]`` of a slice, and the slopes of their new states."""

    at: slice
    rows: Array
    slopes: Slopes


class Linearization:
    """Derivatives of a cell at given inputs and states, made by :meth:`Cell.linearize`.

    Examples
    --------
    >>> import numpy as np, sparsescan
    >>> from sparsescan.jacobians import GRUCell
    >>> cell = GRUCell(12, 20, rng=0)
    >>> plan = sparsescan.plan([cell.pattern] * 50, reverse=True)  # once
    >>> x = np.random.default_rng(0).standard_normal((50, 16, 12), np.float32)
    >>> states = cell.unroll(x)
    >>> steps = cell.linearize(x, states[:-1])
    >>> grads = plan.exclusive_scan(states[-1], steps.values())
    >>> steps.param_grads(grads)["weight_hh"].shape
    (60, 20)
    """

    def __init__(self, cell: Cell, xp: Any, lead: Shape, x: Array, state: Array) -> None:
        self._cell, self._xp, self._lead = cell, xp, lead
        self._shape, self._dtype = x.shape, x.dtype

        def linearized(at: slice) -> _Block:
            rows = cell._rows(xp, x[at], state[at])
            return _Block(at, rows, cell._slopes(xp, cell._products(xp, rows), state[at]))

        # A device takes all rows at once. The blocks do not depend on the number of threads.
        count = max(1, round(len(x) / _ROWS)) if xp is np else 1
        self._row_blocks = map_shared(linearized, even_slices(len(x), count))

    @Allocating("the values")
    def values(self, *, out: Array = None) -> Array:
        """Compute the values, as :meth:`Cell.values`."""
        apart = [block.rows for block in self._row_blocks] + [*self._cell.params.values()]
        room = self._cell._output(self._xp, self._lead, self._dtype, out, apart)
        self._fill(room)
        return room if out is None else out

    def jacobian(self) -> sp.csr_array | BatchedCSR | CSRChain:
        """Return the Jacobian, as :meth:`Cell.jacobian`."""
        values, pattern = self.values(), self._cell.pattern
        if len(self._lead) == 2:
            return CSRChain.from_pattern(values[::-1], pattern)
        return as_matrix(values, pattern)

    def implicit(self, *, reverse: bool = False) -> ImplicitChain:
        """Return all Jacobians as implicit steps, of :attr:`Cell.implicit_pattern`.

        Parameters
        ----------
        reverse : bool, default False
            Whether to return them in the order of time, for scans with ``reverse=True``.

        Returns
        -------
        ImplicitChain
            The steps from the LAST one to the first, unless `reverse`. Its memory for each step and
            sample grows with the state, not with its square.

        Raises
        ------
        InputError
            If the input had no axis of steps, or more than one of samples.
        MemoryLimitError
            If the slopes would take more memory than there is.

        Examples
        --------
        >>> import numpy as np, sparsescan
        >>> from sparsescan.jacobians import RNNCell
        >>> cell = RNNCell(3, 20, rng=0)
        >>> plan = sparsescan.plan([cell.implicit_pattern] * 100, reverse=True)
        >>> x = np.random.default_rng(0).standard_normal((100, 16, 3), np.float32)
        >>> states = cell.unroll(x)
        >>> steps = cell.linearize(x, states[:-1])
        >>> grads = plan.exclusive_scan(states[-1], steps.implicit(reverse=True))
        >>> steps.param_grads(grads)["weight_hh"].shape
        (20, 20)
        """
        cell, xp, lead = self._cell, self._xp, self._lead
        if len(lead) not in (1, 2):
            raise InputError(
                f"the steps have the axes {lead}; expected (T,) or (T, batch) for a chain"
            )
        pattern = cell.implicit_pattern
        slopes = output(
            xp, None, (*lead, pattern.factors[0].nnz), self._dtype, what=f"the slopes of {cell!r}"
        )
        flat = slopes.reshape(self._shape[0], -1)
        places, start = [], 0  # the entries of a row are neighbours
        for parts in cell._blocks:
            places += [(start + k, len(parts)) for k in range(len(parts))]
            start += len(parts) * cell.hidden_size
        put = put_column if xp is np else _put

        def fill(block: _Block) -> None:
            out = flat[block.at]
            for array, place in zip(cell._factor(block.slopes), places, strict=True):
                put(array, out, *place)

        map_shared(fill, self._row_blocks)
        turned = slopes if check_flag("reverse", reverse) else slopes[::-1]
        return ImplicitChain([turned, self._weights()], pattern)

    def _weights(self) -> Array:
        """Return the values of the factor that all steps share."""
        cell, xp = self._cell, self._xp
        hidden, width = cell.hidden_size, cell._gates * cell.hidden_size
        dense = xp.zeros((cell._parts, hidden, len(cell._blocks) * hidden), self._dtype)
        weight = cell._weight(xp, "weight_hh", self._dtype)
        dense[0, :, :width] = weight.transpose(2, 0, 1).reshape(hidden, width)
        if cell._carries:
            dense[-1, :, width:] = xp.eye(hidden, dtype=self._dtype)
        return xp.take(dense.reshape(-1), cell._kept_weights.on(xp))

    @Allocating("the gradients of the parameters")
    def param_grads(self, grad_state: Array) -> dict[str, Array]:
        """Return the gradients of the parameters, as :meth:`Cell.param_grads`."""
        return self._param_grads(self._read(grad_state))

    @Allocating("the gradients of the input")
    def input_grads(self, grad_state: Array) -> Array:
        """Return the gradients of the inputs, as :meth:`Cell.input_grads`."""
        return self._input_grads(self._read(grad_state))

    def _fill(self, out: Array) -> None:
        cell, xp = self._cell, self._xp
        flat = out.reshape(self._shape[0], cell.nnz)

        def fill(block: _Block) -> None:
            cell._fill(xp, *cell._columns(xp, block.slopes), flat[block.at])

        map_shared(fill, self._row_blocks)

    def _param_grads(self, grad: Array) -> dict[str, Array]:
        cell, xp = self._cell, self._xp

        def products(block: _Block) -> Array:
            return _sum_of_products(
                xp, cell._product_grads(block.slopes, grad[block.at]), block.rows
            )

        # ∇A for a = A [x, 1, h].
        whole = sum(map_shared(products, self._row_blocks))
        one = cell.input_size
        grads = {
            "weight_ih": whole[list(cell._ih), :, :one],
            "weight_hh": whole[list(cell._hh), :, one + 1 :],
            "bias_ih": whole[list(cell._ih), :, one],
            "bias_hh": whole[list(cell._hh), :, one],
        }
        for name, shape in cell._shapes.items():
            array = xp.ascontiguousarray(grads[name]).reshape(shape)
            grads[name] = masked(xp, array, cell._masks.get(name))
        return {name: grads[name] for name in cell._shapes}

    def _input_grads(self, grad: Array) -> Array:
        cell, xp = self._cell, self._xp
        out = xp.zeros(self._shape, self._dtype)
        weights = cell._weight(xp, "weight_ih", self._dtype)

        def add(block: _Block) -> None:
            grads = cell._product_grads(block.slopes, grad[block.at])
            for product, weight in zip(cell._ih, weights, strict=True):
                out[block.at] += _product(xp, grads[product], weight)

        map_shared(add, self._row_blocks)
        return out.reshape(*self._lead, cell.input_size)

    def _read(self, grad_state: Array) -> Array:
        """Return the gradients as rows of the cell's dtype."""
        grad = read_array("grad_state", grad_state)
        shape = (*self._lead, self._cell.state_size)
        if grad.shape != shape:
            raise InputError(f"grad_state has shape {grad.shape}; expected {shape}, as state")
        namespace(grad, *(block.rows for block in self._row_blocks))
        return grad.reshape(-1, self._cell.state_size).astype(self._dtype, copy=False)


def _put(array: Array, out: Array, start: int, step: int) -> None:
    """Write a column of blocks, as the kernel :func:`put_column` does."""
    out[:, start : start + array.shape[1] * step : step] = array


def _tiles(size: int, most: int) -> list[slice]:
    """Return slices of at most so many, and about even."""
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
    whole = len(b) // _ROWS_OF_TILE * _ROWS_OF_TILE
    many = a[:, :whole].reshape(len(a), -1, _ROWS_OF_TILE, a.shape[2]).swapaxes(2, 3)
    pieces = b[:whole].reshape(-1, _ROWS_OF_TILE, b.shape[1])
    side = math.isqrt(_ONE_THREAD // _ROWS_OF_TILE)
    for rows, cols in itertools.product(_tiles(a.shape[2], side), _tiles(b.shape[1], side)):
        part = sums[:, rows, cols]
        np.matmul(many[:, :, rows], pieces[:, :, cols]).sum(axis=1, out=part)
        part += np.matmul(a[:, whole:, rows].transpose(0, 2, 1), b[whole:, cols])
    return sums


def _fill_arrays(
    weights: Array, slopes: Array, columns: Array, direct: Array, place: Array, out: Array
) -> None:
    """Write all values, as the kernel :func:`fill_entries`, by operations on whole arrays."""
    weighted = weights.shape[1]
    out[:, weighted:] = 0
    first, columns_of_first = out[:, :weighted], columns[:weighted]
    for g, weight in enumerate(weights):
        term = slopes[g][:, columns_of_first]
        term *= weight
        if g == 0:
            first[...] = term
        else:
            first += term
    if len(place):
        out[:, place] += direct[:, columns[place]]
