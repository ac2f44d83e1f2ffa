"""Recurrent cells with the parameters of PyTorch's."""

from __future__ import annotations

from typing import Any, Literal

from ..graph.functions import sigmoid, tanh
from .cell import Cell
from .definition import Choice, Hidden, Input


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
        The weights. Assigning an array shares it, without a copy.
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
    Back-propagation by a scan through 100 steps, with a loss at every step:

    >>> import numpy as np, sparsescan
    >>> from sparsescan.recurrent import RNNCell
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

    weight_ih = Input()
    weight_hh = Hidden()
    nonlinearity = Choice("tanh", "relu")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
        **options: Any,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, nonlinearity=nonlinearity, **options)

    def step(self, x: Any, h: Any) -> Any:
        """Return the new state."""
        return self.nonlinearity(self.weight_ih(x) + self.weight_hh(h))


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
        The weights of the gates r, z and n. Assigning an array shares it, without a copy.
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
    >>> from sparsescan.recurrent import GRUCell
    >>> cell = GRUCell(1, 2, weight_hh_mask=np.tile([[True, False], [True, True]], (3, 1)))
    >>> cell.weight_hh = np.ones((6, 2))
    >>> cell.weight_ih, cell.bias_ih, cell.bias_hh = np.zeros((6, 1)), np.zeros(6), np.zeros(6)
    >>> cell.jacobian([0.0], [0.0, 0.0]).toarray()
    array([[0.75, 0.25],
           [0.  , 0.75]])

    Back-propagation through 50 steps, for a loss of the last state:

    >>> import sparsescan
    >>> cell = GRUCell(12, 20, rng=0)
    >>> plan = sparsescan.plan([cell.pattern] * 50, reverse=True)  # once
    >>> x = np.random.default_rng(0).standard_normal((50, 16, 12), np.float32)
    >>> states = cell.unroll(x)
    >>> grads = plan.exclusive_scan(states[-1], cell.values(x, states[:-1]))
    >>> cell.param_grads(x, states[:-1], grads)["weight_hh"].shape
    (60, 20)
    """

    weight_ih = Input("r", "z", "n")
    weight_hh = Hidden("r", "z", "n")

    def step(self, x: Any, h: Any) -> Any:
        """Return the new state."""
        r = sigmoid(self.weight_ih.r(x) + self.weight_hh.r(h))
        z = sigmoid(self.weight_ih.z(x) + self.weight_hh.z(h))
        n = tanh(self.weight_ih.n(x) + r * self.weight_hh.n(h))
        return n + z * (h - n)


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
        The weights of the gates i, f, g and o. Assigning an array shares it, without a copy.
    bias_ih, bias_hh : ndarray or None, shape (4·hidden_size,)
        The biases.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    The cell is that of :class:`torch.nn.LSTMCell`, whose state is a pair.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.recurrent import LSTMCell
    >>> cell = LSTMCell(1, 1)
    >>> cell.weight_hh = np.array([[0.0], [0.0], [4.0], [0.0]])
    >>> cell.weight_ih, cell.bias_ih, cell.bias_hh = np.zeros((4, 1)), np.zeros(4), np.zeros(4)
    >>> cell.jacobian([0.0], [0.0, 0.0]).toarray()
    array([[1.  , 2.  ],
           [0.25, 0.5 ]])
    """

    weight_ih = Input("i", "f", "g", "o")
    weight_hh = Hidden("i", "f", "g", "o")

    def step(self, x: Any, h: Any, c: Any) -> Any:
        """Return the new states."""
        i = sigmoid(self.weight_ih.i(x) + self.weight_hh.i(h))
        f = sigmoid(self.weight_ih.f(x) + self.weight_hh.f(h))
        g = tanh(self.weight_ih.g(x) + self.weight_hh.g(h))
        o = sigmoid(self.weight_ih.o(x) + self.weight_hh.o(h))
        c_new = f * c + i * g
        return o * tanh(c_new), c_new
