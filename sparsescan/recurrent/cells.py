"""Recurrent cells with the parameters of PyTorch's."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..symbolic.schedule import check_choice
from .cell import Array, Cell, Slopes
from .loops import sequences
from .loops.values import fill_gru, fill_lstm, fill_rnn
from .step import unroll

__all__ = ["Cell", "GRUCell", "LSTMCell", "RNNCell"]


def _sigmoid(xp: Any, x: Array) -> Array:
    """Compute ``σ(x) = 1 / (1 + exp(-x))`` in place; it is 0 where ``exp`` overflows.

    For float32 several times as fast as ``expit``, which NumPy does not vectorise.
    """
    xp.negative(x, out=x)
    xp.exp(x, out=x)
    x += 1
    return xp.reciprocal(x, out=x)


def _slope_of_tanh(xp: Any, y: Array, out: Array) -> Array:
    """Compute ``tanh' = 1 - tanh²`` from ``y = tanh``."""
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
    >>> plan = sparsescan.plan([cell.pattern] * 100, reverse=True)
    >>> values = cell.values(x, states[:-1])
    >>> grads = plan.exclusive_scan(None, values, local_grads=local_grads)
    >>> {name: grad.shape for name, grad in cell.param_grads(x, states[:-1], grads).items()}
    {'weight_ih': (20, 3), 'weight_hh': (20, 20), 'bias_ih': (20,), 'bias_hh': (20,)}
    """

    _ih = _hh = (0,)
    _carries = False
    _blocks = ((0,),)
    _kinds = ("tanh", "relu")
    _kernel = staticmethod(fill_rnn)
    _kept_gates = 1
    _writes_gates = False
    _run_kernel = staticmethod(sequences.run_rnn)
    _unroll = staticmethod(unroll)
    _back_kernel = staticmethod(sequences.back_rnn)

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
        self.nonlinearity = check_choice("nonlinearity", nonlinearity, "tanh", "relu")
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

    def _slopes(self, xp: Any, a: Array, state: Array) -> Slopes:
        if self.nonlinearity == "tanh":
            y = xp.tanh(a, out=a)
            return Slopes(_slope_of_tanh(xp, y, out=a))
        a[...] = ~(a <= 0)  # 1 at NaN, as in PyTorch
        return Slopes(a)

    def _factor(self, slopes: Slopes) -> list[Array]:
        return [slopes.products[0]]


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
    >>> plan = sparsescan.plan([cell.pattern] * 50, reverse=True)  # once
    >>> x = np.random.default_rng(0).standard_normal((50, 16, 12), np.float32)
    >>> states = cell.unroll(x)
    >>> grads = plan.exclusive_scan(states[-1], cell.values(x, states[:-1]))
    >>> cell.param_grads(x, states[:-1], grads)["weight_hh"].shape
    (60, 20)
    """

    # Products u_n, r, z, v_n.
    _ih = (1, 2, 0)
    _hh = (1, 2, 3)
    _blocks = ((0,), (0,), (0,), (0,))
    _kinds = ("gru",)
    _kernel = staticmethod(fill_gru)
    _kept_gates = 4
    _run_kernel = staticmethod(sequences.run_gru)
    _unroll = staticmethod(unroll)
    _back_kernel = staticmethod(sequences.back_gru)

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

    def _slopes(self, xp: Any, a: Array, state: Array) -> Slopes:
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
        return Slopes(slopes, z)

    def _factor(self, slopes: Slopes) -> list[Array]:
        return [*slopes.products[1:], slopes.carry]


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
    _blocks = ((0, 1), (0, 1), (0, 1), (0,), (0, 1))
    _kinds = ("lstm",)
    _kernel = staticmethod(fill_lstm)
    _kept_gates = 4
    _run_kernel = staticmethod(sequences.run_lstm)
    _unroll = staticmethod(unroll)
    _back_kernel = staticmethod(sequences.back_lstm)

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
        """Compute ``i``, ``f``, ``g`` and ``o``, all but ``g`` in place."""
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

    def _slopes(self, xp: Any, a: Array, state: Array) -> Slopes:
        i, f, g, o = self._gate_values(xp, a)
        c = state[:, self.hidden_size :]
        slopes = xp.empty_like(a)
        in_i, in_f, in_g, in_o = slopes
        # The slopes but for the derivative of each sigmoid; then tanh(c_t).
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
        return Slopes(slopes, f, inner)

    def _columns(self, xp: Any, slopes: Slopes) -> tuple[Array, Array]:
        products, f, inner = slopes
        hidden = self.hidden_size
        columns = xp.empty((4, len(f), 2 * hidden), f.dtype)
        columns[:3, :, hidden:] = products[:3]
        xp.multiply(products[:3], inner, out=columns[:3, :, :hidden])
        columns[3, :, :hidden] = products[3]
        columns[3, :, hidden:] = 0
        return columns, xp.concatenate([inner * f, f], axis=1)

    def _factor(self, slopes: Slopes) -> list[Array]:
        (in_i, in_f, in_g, in_o), f, e = slopes
        return [e * in_i, in_i, e * in_f, in_f, e * in_g, in_g, in_o, e * f, f]

    def _product_grads(self, slopes: Slopes, grad: Array) -> Array:
        products, _, inner = slopes
        grad_h, grad_c = grad[:, : self.hidden_size], grad[:, self.hidden_size :]
        in_c = inner * grad_h + grad_c
        grads: Array = products.copy()
        grads[:3] *= in_c
        grads[3] *= grad_h
        return grads
