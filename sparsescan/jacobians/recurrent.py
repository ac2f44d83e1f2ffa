"""Recurrent cells: from a state and an input to the next state.

What a cell makes of its products ``a = W_ih x + b_ih + W_hh h + b_hh`` is elementwise, so

    (∂s_t/∂s_{t-1})ᵀ = Σ_g W_gᵀ diag(d_g) + D,   d_g the slopes of s_t in the product of gate g,

where ``D`` is what the state passes on directly: ``z`` in a GRU, ``f`` in an LSTM. The products of
all steps are recomputed at once, from rows ``[x, 1, h]``, one for each of `n` steps and samples.
Arrays over them are ``(products, n, hidden_size)``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .._arrays import Constant, check_array, check_memory, namespace, output
from ..containers import BatchedCSR, CSRChain
from ..errors import InputError
from ..kernels.recurrent import fill_entries, fill_gru, fill_lstm, fill_rnn
from ..pattern import Pattern, of_mask, rows_of
from ..schedule import check_count
from ._fixed import Fixed
from ._operator import as_matrix
from ._parameters import Parameter, Parametrised, check_mask, initial, masked

__all__ = ["Cell", "GRUCell", "LSTMCell", "RNNCell"]

Array = Any  # numpy.ndarray or cupy.ndarray
Shape = tuple[int, ...]


class _Slopes(NamedTuple):
    """Derivatives of the new state.

    Attributes
    ----------
    products : ndarray, shape (products, n, hidden_size)
        In the products. For an LSTM those of ``c_t`` in i, f and g, and of ``h_t`` in o.
    carry : ndarray or None, shape (n, hidden_size)
        In the old state directly: ``z`` or ``f``.
    inner : ndarray or None, shape (n, hidden_size)
        Of ``h_t`` in ``c_t``, for an LSTM.
    """

    products: Array
    carry: Array = None
    inner: Array = None


class _Layout(NamedTuple):
    """Where the entries of a pattern come from.

    Attributes
    ----------
    columns : ndarray of int, shape (nnz,)
        Column of every entry.
    sources : ndarray of int, shape (weighted,)
        For the entries of the first `hidden_size` rows, their place in the weight of a gate.
    place : ndarray of int
        The entries that have a part which the state passes on directly.
    """

    columns: Constant
    sources: Constant
    place: Constant


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
        What draws initial parameters, from the same distribution as PyTorch.

    Attributes
    ----------
    state_size : int
        Length of ``s_t``.
    pattern : Pattern
        Where ``(∂s_t/∂s_{t-1})ᵀ`` may have nonzeros, whatever the input and the parameters.

    See Also
    --------
    RNNCell, GRUCell, LSTMCell
    """

    weight_ih = Parameter()
    weight_hh = Parameter()
    bias_ih = Parameter()
    bias_hh = Parameter()
    # For each gate, which product has its part of weight_ih, and which that of weight_hh. The
    # latter are the last products, in the order of the gates.
    _ih: ClassVar[tuple[int, ...]]
    _hh: ClassVar[tuple[int, ...]]
    _parts: ClassVar[int] = 1  # vectors of length hidden_size that make up the state
    _carries: ClassVar[bool] = True  # whether the last of them is passed on directly
    _kernel: ClassVar[Callable[..., None]]

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
        self.bias = bool(bias)
        self.state_size = self._parts * self.hidden_size
        self._gates = len(self._ih)
        rows = self._gates * self.hidden_size
        shapes: dict[str, Shape | None] = {
            "weight_ih": (rows, self.input_size),
            "weight_hh": (rows, self.hidden_size),
            "bias_ih": (rows,) if bias else None,
            "bias_hh": (rows,) if bias else None,
        }
        self._set_parameters(shapes, initial(1 / math.sqrt(self.hidden_size), dtype, rng))
        self._masks = {
            "weight_ih": check_mask("weight_ih_mask", weight_ih_mask, self._shapes["weight_ih"]),
            "weight_hh": check_mask("weight_hh_mask", weight_hh_mask, self._shapes["weight_hh"]),
        }

    # -- What each cell says --------------------------------------------------------------------

    @abstractmethod
    def _kept(self, gates: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Where the Jacobian may have nonzeros, from the kept hidden weights of each gate."""

    @abstractmethod
    def _advance(self, xp: Any, a: Array, state: Array, out: Array) -> None:
        """Write the new state from the products `a`, which may be overwritten."""

    @abstractmethod
    def _slopes(self, xp: Any, a: Array, state: Array) -> _Slopes:
        """The slopes from the products `a`, which may be overwritten."""

    def _columns(self, xp: Any, slopes: _Slopes) -> tuple[Array, Array]:
        """Slopes ``(gates, n, state_size)`` of the whole state in ``v``, and the direct part."""
        return slopes.products[-self._gates :], slopes.carry

    def _product_grads(self, xp: Any, slopes: _Slopes, grad: Array) -> Array:
        """Gradients in the products from that in the new state; the slopes are overwritten."""
        return xp.multiply(slopes.products, grad, out=slopes.products)

    # -- What a caller uses ---------------------------------------------------------------------

    @cached_property
    def pattern(self) -> Pattern:
        """Where the transposed Jacobian may have nonzeros."""
        size, mask = self.state_size, self._masks["weight_hh"]
        if mask is None and self._parts == 1:
            return Pattern.dense((size, size))
        check_memory(f"the pattern of a cell with {size} states", 17 * size * size)
        shape = self._gates, self.hidden_size, self.hidden_size
        gates = np.ones(shape, bool) if mask is None else mask.on(np).reshape(shape)
        return of_mask(self._kept(gates))

    @property
    def nnz(self) -> int:
        """Entries of the pattern."""
        return self.pattern.nnz

    @np.errstate(over="ignore", invalid="ignore")
    def forward(self, x: Array, state: Array) -> Array:
        """The next state.

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

    @np.errstate(over="ignore", invalid="ignore")
    def unroll(self, x: Array, state: Array = None) -> Array:
        """All states of a sequence, one step after the other.

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
            As :meth:`forward`.
        MemoryLimitError
            If the states would take more memory than there is.
        """
        x = check_array("x", x)
        if x.ndim < 2 or x.shape[-1] != self.input_size:
            raise InputError(f"x has shape {x.shape}; expected (T, …, {self.input_size})")
        steps, lead = x.shape[0], x.shape[1:-1]
        if state is None:
            state = namespace(x).zeros((*lead, self.state_size), x.dtype)
        state = check_array("state", state)
        if state.shape != (*lead, self.state_size):
            raise InputError(
                f"state has shape {state.shape}; expected {(*lead, self.state_size)}, as x has "
                f"shape {x.shape}"
            )
        xp, dtype = self._place(x, state)
        states = output(xp, None, (steps + 1, *lead, self.state_size), dtype, what="the states")
        batch = math.prod(lead)
        flat = states.reshape(steps + 1, batch, self.state_size)
        flat[0] = state.reshape(batch, self.state_size)
        x = x.reshape(steps * batch, self.input_size).astype(dtype, copy=False)
        a = self._products(xp, self._rows(xp, x, None))
        a = a.reshape(len(a), steps, batch, self.hidden_size)
        weight = self._weight(xp, "weight_hh", dtype).transpose(0, 2, 1)
        v = xp.empty((self._gates, batch, self.hidden_size), dtype)
        for t in range(steps):
            now = a[:, t]
            recurrent = now[-self._gates :]
            recurrent += xp.matmul(flat[t, :, : self.hidden_size], weight, out=v)
            self._advance(xp, now, flat[t], flat[t + 1])
        return states

    @np.errstate(over="ignore", invalid="ignore")
    def values(self, x: Array, state: Array, *, out: Array = None) -> Array:
        """Values of ``(∂s_t/∂s_{t-1})ᵀ``, in the order of the pattern.

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
            Values of all steps and samples, in the order of time. A scan goes from the last step
            to the first: give it ``values[::-1]``, which is no copy.

        Raises
        ------
        InputError, InputTypeError
            If a shape or a dtype is wrong.
        DeviceError
            If the arrays and the parameters are not in one place.
        MemoryLimitError
            If the values would take more memory than there is.

        Notes
        -----
        The gates are recomputed, for all steps in one go: BPPSA (MLSys 2020), Appendix E.
        """
        xp, lead, (x, state) = self._read(x=x, state=state)
        shape = (*lead, self.nnz)
        apart = [x, state, *self.params.values()]
        out = output(xp, out, shape, state.dtype, what=f"the values of {self!r}", apart=apart)
        if out.size == 0:
            return out
        a = self._products(xp, self._rows(xp, x, state))
        slopes, direct = self._columns(xp, self._slopes(xp, a, state))
        self._fill(xp, slopes, direct, out.reshape(-1, self.nnz))
        return out

    def jacobian(self, x: Array, state: Array) -> sp.csr_array | BatchedCSR | CSRChain:
        """The transposed Jacobian ``(∂s_t/∂s_{t-1})ᵀ``.

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
        axes = np.ndim(state) - 1
        if axes > 2:
            raise InputError(f"state has {axes + 1} axes; expected at most (T, batch, state_size)")
        values = self.values(x, state)
        if axes == 2:
            return CSRChain.from_pattern(values[::-1], self.pattern)
        return as_matrix(values, self.pattern)

    @np.errstate(over="ignore", invalid="ignore")
    def param_grads(self, x: Array, state: Array, grad_state: Array) -> dict[str, Array]:
        """Gradients of the loss in the parameters, summed over all steps and samples.

        ``∇θ = Σ_t (∂s_t/∂θ)ᵀ ∇s_t``: equation 2 of BPPSA (MLSys 2020).

        Parameters
        ----------
        x, state
            As for :meth:`values`.
        grad_state : array_like, shape (…, state_size)
            Gradients ``∇s_t`` in the states AFTER each step. A scan returns them from the last step
            to the first: pass ``gradients[::-1]``.

        Returns
        -------
        dict of str to ndarray
            A gradient of the shape of each parameter.

        Raises
        ------
        InputError, InputTypeError, DeviceError
            As :meth:`forward`.
        """
        xp, _, (x, state, grad) = self._read(x=x, state=state, grad_state=grad_state)
        rows = self._rows(xp, x, state)
        slopes = self._slopes(xp, self._products(xp, rows), state)
        grad_a = self._product_grads(xp, slopes, grad)
        # ∇A for a = A [x, 1, h].
        whole = xp.matmul(grad_a.transpose(0, 2, 1), rows)
        one = self.input_size
        found = {
            "weight_ih": whole[list(self._ih), :, :one],
            "weight_hh": whole[list(self._hh), :, one + 1 :],
            "bias_ih": whole[list(self._ih), :, one],
            "bias_hh": whole[list(self._hh), :, one],
        }
        return {
            name: masked(
                xp, xp.ascontiguousarray(found[name]).reshape(shape), self._masks.get(name)
            )
            for name, shape in self._shapes.items()
        }

    @np.errstate(over="ignore", invalid="ignore")
    def input_grads(self, x: Array, state: Array, grad_state: Array) -> Array:
        """Gradients of the loss in the inputs: ``(∂s_t/∂x_t)ᵀ ∇s_t``.

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
        slopes = self._slopes(xp, self._products(xp, self._rows(xp, x, state)), state)
        grad_a = self._product_grads(xp, slopes, grad)
        out = xp.zeros_like(x)
        for product, weight in zip(self._ih, self._weight(xp, "weight_ih", x.dtype), strict=True):
            out += xp.matmul(grad_a[product], weight)
        return out.reshape(*lead, self.input_size)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.input_size}, {self.hidden_size}, nnz={self.nnz})"

    # -- Products and values --------------------------------------------------------------------

    def _read(self, **arrays: Any) -> tuple[Any, Shape, list[Array]]:
        """The library, the leading axes, and the arrays in one dtype, ``(n, size)`` each."""
        checked = {name: check_array(name, array) for name, array in arrays.items()}
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

    def _place(self, *arrays: Array) -> tuple[Any, np.dtype[Any]]:
        """The library and the dtype that arrays and parameters have in common."""
        everything = *arrays, *self.params.values()
        return namespace(*everything), np.result_type(*(array.dtype for array in everything))

    def _weight(self, xp: Any, name: str, dtype: np.dtype[Any]) -> Array:
        """A weight ``(gates, hidden_size, ·)``, 0 where it is pruned."""
        weight = masked(xp, getattr(self, name), self._masks[name]).astype(dtype, copy=False)
        return weight.reshape(self._gates, self.hidden_size, -1)

    def _rows(self, xp: Any, x: Array, state: Array) -> Array:
        """Rows ``[x, 1, h]``, or ``[x, 1]`` if the state is None."""
        hidden = 0 if state is None else self.hidden_size
        rows = xp.empty((len(x), self.input_size + 1 + hidden), x.dtype)
        rows[:, : self.input_size] = x
        rows[:, self.input_size] = 1
        if state is not None:
            rows[:, self.input_size + 1 :] = state[:, :hidden]
        return rows

    def _products(self, xp: Any, rows: Array) -> Array:
        """The products of all rows; without the parts of ``weight_hh`` if those end at the 1."""
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
            # What a product does not read must not reach it as inf·0 either.
            start = 0 if k in self._ih else one
            stop = rows.shape[1] if k in self._hh else one + 1
            xp.matmul(rows[:, start:stop], A[k, start:stop], out=a[k])
        return a

    @cached_property
    def _layout(self) -> _Layout:
        pattern, hidden = self.pattern, self.hidden_size
        columns = pattern.indices
        rows = rows_of(pattern)
        sources = (columns % hidden * hidden + rows)[rows < hidden]
        carried = (columns - rows) % hidden == 0
        carried &= rows >= (self.state_size - hidden if self._carries else self.state_size)
        return _Layout(Constant(columns), Constant(sources), Constant(np.flatnonzero(carried)))

    def _fill(self, xp: Any, slopes: Array, direct: Array, out: Array) -> None:
        """Write all values; `out` is ``(n, nnz)``, `slopes` is ``(gates, n, state_size)``."""
        weight = self._weight(xp, "weight_hh", out.dtype)
        if xp is np and self._masks["weight_hh"] is None:
            rows = np.tile(weight.transpose(0, 2, 1), (1, 1, self._parts))
            self._kernel(np.ascontiguousarray(rows), slopes, direct, out)
            return
        layout = self._layout
        weights = xp.take(weight.reshape(self._gates, -1), layout.sources.on(xp), axis=1)
        columns, place = layout.columns.on(xp), layout.place.on(xp)
        if direct is None:
            direct = xp.empty((0, 0), out.dtype)
        fill = fill_entries if xp is np else _fill_arrays
        fill(weights, slopes, columns, direct, place, out)


def _fill_arrays(
    weights: Array, slopes: Array, columns: Array, direct: Array, place: Array, out: Array
) -> None:
    """As the kernel :func:`fill_entries`, by operations on whole arrays."""
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


def _sigmoid(xp: Any, x: Array) -> Array:
    """``σ(x) = 1 / (1 + exp(-x))``, in place; where ``exp`` overflows it is 0.

    For float32 several times as fast as ``expit``, which NumPy does not vectorise.
    """
    xp.negative(x, out=x)
    xp.exp(x, out=x)
    x += 1
    return xp.reciprocal(x, out=x)


def _slope_of_tanh(xp: Any, y: Array, out: Array) -> Array:
    """``tanh' = 1 - tanh²`` from ``y = tanh``."""
    xp.multiply(y, y, out=out)
    return xp.subtract(1, out, out=out)


class RNNCell(Cell):
    """Elman cell: ``h_t = φ(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh)``.

        (∂h_t/∂h_{t-1})ᵀ = W_hhᵀ diag(φ').

    Parameters
    ----------
    input_size, hidden_size : int
        Length of ``x_t`` and ``h_t``.
    bias : bool, default True
        Whether there are biases.
    nonlinearity : {"tanh", "relu"}, default "tanh"
        ``φ``.
    weight_ih_mask, weight_hh_mask, dtype, rng
        As for :class:`Cell`.

    Attributes
    ----------
    weight_ih, weight_hh : ndarray, shapes (hidden_size, input_size), (hidden_size, hidden_size)
        The weights; an array that is set is shared, not copied.
    bias_ih, bias_hh : ndarray or None, shape (hidden_size,)
        The biases.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.RNNCell`; BPPSA (MLSys 2020), Section 4.1.

    Examples
    --------
    Back-propagation through 100 steps, with a loss at every one, by a scan:

    >>> import numpy as np, sparsescan
    >>> from sparsescan.jacobians import RNNCell
    >>> rng = np.random.default_rng(0)
    >>> cell = RNNCell(3, 20, rng=rng)
    >>> x = rng.standard_normal((100, 16, 3), np.float32)
    >>> local_grads = rng.standard_normal((100, 16, 20), np.float32)
    >>> states = cell.unroll(x)
    >>> plan = sparsescan.plan([cell.pattern] * 100)
    >>> values = cell.values(x, states[:-1])
    >>> zero = np.zeros((16, 20), np.float32)
    >>> grads = plan.exclusive_scan(zero, values[::-1], local_grads=local_grads[::-1])[::-1]
    >>> {name: grad.shape for name, grad in cell.param_grads(x, states[:-1], grads).items()}
    {'weight_ih': (20, 3), 'weight_hh': (20, 20), 'bias_ih': (20,), 'bias_hh': (20,)}
    """

    _ih = _hh = (0,)
    _carries = False
    _kernel = staticmethod(fill_rnn)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
        *,
        weight_ih_mask: ArrayLike | None = None,
        weight_hh_mask: ArrayLike | None = None,
        dtype: DTypeLike = np.float32,
        rng: np.random.Generator | int | None = None,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise InputError(f"nonlinearity is {nonlinearity!r}; expected 'tanh' or 'relu'")
        self.nonlinearity = nonlinearity
        super().__init__(
            input_size,
            hidden_size,
            bias,
            weight_ih_mask=weight_ih_mask,
            weight_hh_mask=weight_hh_mask,
            dtype=dtype,
            rng=rng,
        )

    def _kept(self, gates: NDArray[np.bool_]) -> NDArray[np.bool_]:
        kept: NDArray[np.bool_] = gates[0].T
        return kept

    def _advance(self, xp: Any, a: Array, state: Array, out: Array) -> None:
        if self.nonlinearity == "tanh":
            xp.tanh(a[0], out=out)
        else:
            xp.maximum(a[0], 0, out=out)

    def _slopes(self, xp: Any, a: Array, state: Array) -> _Slopes:
        if self.nonlinearity == "tanh":
            y = xp.tanh(a, out=a)
            return _Slopes(_slope_of_tanh(xp, y, out=a))
        a[...] = ~(a <= 0)  # 1 at NaN, as in PyTorch
        return _Slopes(a)


class GRUCell(Cell):
    """Gated recurrent unit.

        r = σ(u_r + v_r),  z = σ(u_z + v_z),  n = tanh(u_n + r∘v_n),
        h_t = (1 - z)∘n + z∘h_{t-1},

    with ``u = W_ih x_t + b_ih`` and ``v = W_hh h_{t-1} + b_hh``, so with ``a = (1 - z)(1 - n²)``

        (∂h_t/∂h_{t-1})ᵀ = W_rᵀ diag(a v_n r (1 - r)) + W_zᵀ diag((h_{t-1} - n) z (1 - z))
                           + W_nᵀ diag(a r) + diag(z).

    Parameters
    ----------
    input_size, hidden_size, bias
        As for :class:`Cell`.
    weight_ih_mask, weight_hh_mask, dtype, rng
        As for :class:`Cell`.

    Attributes
    ----------
    weight_ih, weight_hh : ndarray, shapes (3·hidden_size, input_size), (3·hidden_size, hidden_size)
        The weights of the gates r, z and n; an array that is set is shared, not copied.
    bias_ih, bias_hh : ndarray or None, shape (3·hidden_size,)
        The biases.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.GRUCell`. The Jacobian is that of BPPSA (MLSys 2020), Appendix E.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.jacobians import GRUCell
    >>> cell = GRUCell(1, 2, weight_hh_mask=np.tile([[True, False], [True, True]], (3, 1)))
    >>> cell.weight_hh = np.ones((6, 2))
    >>> cell.weight_ih, cell.bias_ih, cell.bias_hh = np.zeros((6, 1)), np.zeros(6), np.zeros(6)
    >>> cell.jacobian([0.0], [0.0, 0.0]).toarray()
    array([[0.75, 0.25],
           [0.  , 0.75]])

    Back-propagation through 50 steps, from a loss that reads the last state:

    >>> import sparsescan
    >>> cell = GRUCell(12, 20, rng=0)
    >>> plan = sparsescan.plan([cell.pattern] * 50)  # once
    >>> x = np.random.default_rng(0).standard_normal((50, 16, 12), np.float32)
    >>> states = cell.unroll(x)
    >>> grads = plan.exclusive_scan(states[-1], cell.values(x, states[:-1])[::-1])[::-1]
    >>> cell.param_grads(x, states[:-1], grads)["weight_hh"].shape
    (60, 20)
    """

    # Products u_n, r, z, v_n.
    _ih = (1, 2, 0)
    _hh = (1, 2, 3)
    _kernel = staticmethod(fill_gru)

    def _kept(self, gates: NDArray[np.bool_]) -> NDArray[np.bool_]:
        if not self.bias:
            # Without any weight v_n is 0, and r has no effect.
            gates = gates.copy()
            gates[0] &= gates[2].any(axis=1, keepdims=True)
        kept: NDArray[np.bool_] = np.logical_or.reduce(gates).T
        np.fill_diagonal(kept, True)
        return kept

    def _advance(self, xp: Any, a: Array, state: Array, out: Array) -> None:
        r, z = _sigmoid(xp, a[1:3])
        n, v_n = a[0], a[3]
        v_n *= r
        n += v_n
        xp.tanh(n, out=n)
        xp.subtract(state, n, out=out)
        out *= z
        out += n

    def _slopes(self, xp: Any, a: Array, state: Array) -> _Slopes:
        r, z = _sigmoid(xp, a[1:3])
        n, v_n = a[0], a[3]
        slopes = xp.empty_like(a)
        in_u_n, in_r, in_z, in_v_n = slopes
        n += xp.multiply(r, v_n, out=in_r)
        xp.tanh(n, out=n)
        rest = 1 - z
        _slope_of_tanh(xp, n, out=in_u_n)
        in_u_n *= rest
        xp.multiply(in_u_n, r, out=in_v_n)
        in_r *= in_u_n
        xp.subtract(state, n, out=in_z)
        in_z *= z
        in_z *= rest
        in_r *= xp.subtract(1, r, out=rest)
        return _Slopes(slopes, z)


class LSTMCell(Cell):
    """Long short-term memory; its state is one vector ``s_t = [h_t, c_t]``.

        i = σ(a_i),  f = σ(a_f),  g = tanh(a_g),  o = σ(a_o),
        c_t = f∘c_{t-1} + i∘g,  h_t = o∘tanh(c_t),

    with ``a = W_ih x_t + b_ih + W_hh h_{t-1} + b_hh``, so with ``e = o (1 - tanh²(c_t))``

        (∂c_t/∂h_{t-1})ᵀ = W_iᵀ diag(g i (1 - i)) + W_fᵀ diag(c_{t-1} f (1 - f))
                           + W_gᵀ diag(i (1 - g²)),
        (∂h_t/∂h_{t-1})ᵀ = (∂c_t/∂h_{t-1})ᵀ diag(e) + W_oᵀ diag(tanh(c_t) o (1 - o)),
        (∂c_t/∂c_{t-1})ᵀ = diag(f),  (∂h_t/∂c_{t-1})ᵀ = diag(e f).

    Parameters
    ----------
    input_size, hidden_size, bias
        As for :class:`Cell`; the state has length ``2·hidden_size``.
    weight_ih_mask, weight_hh_mask, dtype, rng
        As for :class:`Cell`.

    Attributes
    ----------
    weight_ih, weight_hh : ndarray, shapes (4·hidden_size, input_size), (4·hidden_size, hidden_size)
        The weights of the gates i, f, g and o; an array that is set is shared, not copied.
    bias_ih, bias_hh : ndarray or None, shape (4·hidden_size,)
        The biases.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.LSTMCell`, whose state is a pair.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.jacobians import LSTMCell
    >>> cell = LSTMCell(1, 1)
    >>> cell.weight_hh = np.array([[0.0], [0.0], [4.0], [0.0]])
    >>> cell.weight_ih, cell.bias_ih, cell.bias_hh = np.zeros((4, 1)), np.zeros(4), np.zeros(4)
    >>> cell.jacobian([0.0], [0.0, 0.0]).toarray()
    array([[1.  , 2.  ],
           [0.25, 0.5 ]])
    """

    _ih = _hh = (0, 1, 2, 3)
    _parts = 2
    _kernel = staticmethod(fill_lstm)

    def _kept(self, gates: NDArray[np.bool_]) -> NDArray[np.bool_]:
        mask = self._masks["weight_ih"]
        if mask is not None and not self.bias:
            # Without any weight g is 0, and i has no effect.
            inputs = mask.on(np).reshape(4, self.hidden_size, -1)
            gates = gates.copy()
            gates[0] &= (gates[2].any(axis=1) | inputs[2].any(axis=1))[:, None]
        diagonal = np.eye(self.hidden_size, dtype=bool)
        h_from_h, c_from_h = gates.any(axis=0).T, gates[:3].any(axis=0).T
        return np.concatenate(
            [np.hstack([h_from_h, c_from_h]), np.hstack([diagonal, diagonal])], dtype=bool
        )

    def _gate_values(self, xp: Any, a: Array) -> tuple[Array, Array, Array, Array]:
        """``i``, ``f``, ``g`` and ``o``, all but one in place."""
        g = xp.tanh(a[2])
        i, f, _, o = _sigmoid(xp, a)
        return i, f, g, o

    def _advance(self, xp: Any, a: Array, state: Array, out: Array) -> None:
        i, f, g, o = self._gate_values(xp, a)
        hidden = self.hidden_size
        new_h, new_c = out[:, :hidden], out[:, hidden:]
        xp.multiply(f, state[:, hidden:], out=new_c)
        g *= i
        new_c += g
        xp.tanh(new_c, out=new_h)
        new_h *= o

    def _slopes(self, xp: Any, a: Array, state: Array) -> _Slopes:
        i, f, g, o = self._gate_values(xp, a)
        c = state[:, self.hidden_size :]
        slopes = xp.empty_like(a)
        in_i, in_f, in_g, in_o = slopes
        # All of c_t but the derivative of each sigmoid; then tanh(c_t).
        xp.multiply(i, g, out=in_i)
        xp.multiply(f, c, out=in_f)
        tanh_c = xp.add(in_i, in_f)
        xp.tanh(tanh_c, out=tanh_c)
        inner = _slope_of_tanh(xp, tanh_c, out=xp.empty_like(o))
        inner *= o
        xp.multiply(tanh_c, o, out=in_o)
        _slope_of_tanh(xp, g, out=in_g)
        in_g *= i
        rest = tanh_c
        for gate, slope in ((i, in_i), (f, in_f), (o, in_o)):
            slope *= xp.subtract(1, gate, out=rest)
        return _Slopes(slopes, f, inner)

    def _columns(self, xp: Any, slopes: _Slopes) -> tuple[Array, Array]:
        products, f, inner = slopes
        hidden = self.hidden_size
        columns = xp.empty((4, len(f), 2 * hidden), f.dtype)
        columns[:3, :, hidden:] = products[:3]
        xp.multiply(products[:3], inner, out=columns[:3, :, :hidden])
        columns[3, :, :hidden] = products[3]
        columns[3, :, hidden:] = 0
        return columns, xp.concatenate([inner * f, f], axis=1)

    def _product_grads(self, xp: Any, slopes: _Slopes, grad: Array) -> Array:
        products, _, inner = slopes
        hidden = self.hidden_size
        grad_h, grad_c = grad[:, :hidden], grad[:, hidden:]
        products[:3] *= inner * grad_h + grad_c
        products[3] *= grad_h
        return products
