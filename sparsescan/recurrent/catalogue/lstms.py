"""Long short-term memory: without a forget gate, and later variants."""

from __future__ import annotations

from ...graph.functions import sigmoid, tanh
from ..cell import Cell
from ..definition import Constant, Hidden, Input, State, Vector
from .activations import activation


class OriginalLSTM(Cell):
    """LSTM without a forget gate (Hochreiter and Schmidhuber, 1997, Neural Computation 9, 1735).

    ::

        c' = c + σ(W_i x + U_i h) ∘ tanh(W_g x + U_g h)
        h' = σ(W_o x + U_o h) ∘ tanh(c')

    The paper leaves both functions open, and uses ``4σ - 2`` and ``2σ - 1``; here both are tanh.
    """

    weight_ih = Input("i", "g", "o")
    weight_hh = Hidden("i", "g", "o")

    def step(self, x, h, c):
        i = sigmoid(self.weight_ih.i(x) + self.weight_hh.i(h))
        g = tanh(self.weight_ih.g(x) + self.weight_hh.g(h))
        o = sigmoid(self.weight_ih.o(x) + self.weight_hh.o(h))
        c = c + i * g
        return o * tanh(c), c


class BlockDiagonalLSTM(Cell):
    """LSTM whose units are in heads (Pöppel, Beck and Hochreiter, 2024, arXiv 2412.07752).

    ::

        c' = σ(W_f x + U_f h) ∘ c + σ(W_i x + U_i h) ∘ tanh(W_g x + U_g h)
        h' = σ(W_o x + U_o h) ∘ tanh(c')

    All ``U`` are block-diagonal, with one block for each of the ``heads``. With one head, the
    default, the cell is an LSTM.
    """

    heads = Constant(1)
    weight_ih = Input("i", "f", "g", "o")
    weight_hh = Hidden("i", "f", "g", "o", heads=heads)

    def step(self, x, h, c):
        W, U = self.weight_ih, self.weight_hh
        i, f, o = (sigmoid(getattr(W, gate)(x) + getattr(U, gate)(h)) for gate in "ifo")
        c = f * c + i * tanh(W.g(x) + U.g(h))
        return o * tanh(c), c


class PeepholeLSTM(Cell):
    """LSTM whose gates see the cell (Gers, Schraudolph and Schmidhuber, 2002, JMLR 3, 115).

    ::

        i  = σ(W_i x + U_i h + p_i ∘ c)
        f  = σ(W_f x + U_f h + p_f ∘ c)
        c' = f ∘ c + i ∘ φ(W_g x + U_g h)
        o  = σ(W_o x + U_o h + p_o ∘ c')
        h' = o ∘ φ(c')
    """

    weight_ih = Input("i", "f", "g", "o")
    weight_hh = Hidden("i", "f", "g", "o")
    weight_ph = Vector("i", "f", "o")
    nonlinearity = activation("tanh")
    gate_nonlinearity = activation("sigmoid")

    def step(self, x, h, c):
        W, U, p = self.weight_ih, self.weight_hh, self.weight_ph
        i = self.gate_nonlinearity(W.i(x) + U.i(h) + p.i * c)
        f = self.gate_nonlinearity(W.f(x) + U.f(h) + p.f * c)
        c = f * c + i * self.nonlinearity(W.g(x) + U.g(h))
        o = self.gate_nonlinearity(W.o(x) + U.o(h) + p.o * c)
        return o * self.nonlinearity(c), c


class WMCLSTM(Cell):
    """LSTM with working memory connections (Landi et al., 2021, arXiv 2109.00020).

    ::

        i  = σ(W_i x + U_i h + tanh(V_i c))
        f  = σ(W_f x + U_f h + tanh(V_f c))
        c' = f ∘ c + i ∘ tanh(W_g x + U_g h)
        o  = σ(W_o x + U_o h + tanh(V_o c'))
        h' = o ∘ tanh(c')
    """

    weight_ih = Input("i", "f", "g", "o")
    weight_hh = Hidden("i", "f", "g", "o")
    weight_mh = Hidden("i", "f", "o")

    def step(self, x, h, c):
        W, U, V = self.weight_ih, self.weight_hh, self.weight_mh
        i = sigmoid(W.i(x) + U.i(h) + tanh(V.i(c)))
        f = sigmoid(W.f(x) + U.f(h) + tanh(V.f(c)))
        c = f * c + i * tanh(W.g(x) + U.g(h))
        o = sigmoid(W.o(x) + U.o(h) + tanh(V.o(c)))
        return o * tanh(c), c


class MCLSTM(Cell):
    """LSTM with a memory controller (Ben-Ari and Shwartz-Ziv, 2017, NIPS Time Series Workshop).

    ::

        f, i, o, m = σ(W x + U v), each with rows of its own
        c' = f ∘ c + i ∘ φ(W_n x + U_n v)
        v' = m ∘ tanh(c')
        h' = o ∘ tanh(c')

    The state is ``[h, v, c]``. No step reads the previous output ``h``.
    """

    weight_ih = Input("f", "i", "o", "m", "n")
    weight_hh = Hidden("f", "i", "o", "m", "n")
    gate_nonlinearity = activation("sigmoid")
    cell_nonlinearity = activation("tanh")

    def step(self, x, h, v, c):
        W, U = self.weight_ih, self.weight_hh
        f = self.gate_nonlinearity(W.f(x) + U.f(v))
        i = self.gate_nonlinearity(W.i(x) + U.i(v))
        o = self.gate_nonlinearity(W.o(x) + U.o(v))
        m = self.gate_nonlinearity(W.m(x) + U.m(v))
        c = f * c + i * self.cell_nonlinearity(W.n(x) + U.n(v))
        return o * tanh(c), m * tanh(c), c


class MogrifierLSTM(Cell):
    """Mogrifier LSTM of five rounds (Melis, Kočiský and Blunsom, 2020, arXiv 1909.01792).

    ::

        x_1 = 2 σ(Q_1 h) ∘ x
        h_2 = 2 σ(R_2 x_1) ∘ h
        x_3 = 2 σ(Q_3 h_2) ∘ x_1
        h_4 = 2 σ(R_4 x_3) ∘ h_2
        x_5 = 2 σ(Q_5 h_4) ∘ x_3
        c'  = σ(W_f x_5 + U_f h_4) ∘ c + σ(W_i x_5 + U_i h_4) ∘ tanh(W_g x_5 + U_g h_4)
        h'  = σ(W_o x_5 + U_o h_4) ∘ tanh(c')

    ``Q`` and ``R`` have no biases. The number of inputs must be the number of units.
    """

    weight_ih = Hidden("i", "f", "g", "o")
    weight_hh = Hidden("i", "f", "g", "o")
    weight_q = Hidden("q1", "q3", "q5", bias=False)
    weight_r = Hidden("r2", "r4", bias=False)

    def step(self, x, h, c):
        W, U, Q, R = self.weight_ih, self.weight_hh, self.weight_q, self.weight_r
        x = 2 * sigmoid(Q.q1(h)) * x
        h = 2 * sigmoid(R.r2(x)) * h
        x = 2 * sigmoid(Q.q3(h)) * x
        h = 2 * sigmoid(R.r4(x)) * h
        x = 2 * sigmoid(Q.q5(h)) * x
        i, f, o = (sigmoid(getattr(W, gate)(x) + getattr(U, gate)(h)) for gate in "ifo")
        c = f * c + i * tanh(W.g(x) + U.g(h))
        return o * tanh(c), c


class MultiplicativeLSTM(Cell):
    """Multiplicative LSTM (Krause, Lu, Murray and Renals, 2016, arXiv 1609.07959).

    ::

        m  = (W_m x) ∘ (U h)
        i, f, o = σ(W x + V m), each with rows of its own
        c' = f ∘ c + i ∘ tanh(W_g x + V_g m)
        h' = o ∘ tanh(c')
    """

    weight_ih = Input("m", "i", "f", "g", "o")
    weight_hh = Hidden()
    weight_mh = Hidden("i", "f", "g", "o")

    def step(self, x, h, c):
        W, V = self.weight_ih, self.weight_mh
        m = W.m(x) * self.weight_hh(h)
        i, f, o = sigmoid(W.i(x) + V.i(m)), sigmoid(W.f(x) + V.f(m)), sigmoid(W.o(x) + V.o(m))
        c = f * c + i * tanh(W.g(x) + V.g(m))
        return o * tanh(c), c


class ProjectedLSTM(Cell):
    """LSTM with projections (Sak, Senior and Beaufays, 2014, arXiv 1402.1128).

    ::

        c' = σ(W_f x + U_f h) ∘ c + σ(W_i x + U_i h) ∘ tanh(W_g x + U_g h)
        h' = P (σ(W_o x + U_o h) ∘ tanh(c'))

    ``h`` has ``proj_size`` numbers, as in :class:`torch.nn.LSTM` with that argument. The default,
    0, means as many as units.
    """

    proj_size = Constant(0)
    h = State(proj_size)
    weight_ih = Input("i", "f", "g", "o")
    weight_hh = Hidden("i", "f", "g", "o", cols=proj_size)
    weight_hr = Hidden(bias=False, rows=proj_size)

    def step(self, x, h, c):
        W, U = self.weight_ih, self.weight_hh
        i, f, o = (sigmoid(getattr(W, gate)(x) + getattr(U, gate)(h)) for gate in "ifo")
        c = f * c + i * tanh(W.g(x) + U.g(h))
        return self.weight_hr(o * tanh(c)), c


class ResLSTM(Cell):
    """Residual LSTM (Kim, El-Khamy and Lee, 2017, arXiv 1701.03360).

    ::

        i  = σ(W_i x + U_i h + p_i ∘ c)
        f  = σ(W_f x + U_f h + p_f ∘ c)
        c' = f ∘ c + i ∘ φ(W_g x + U_g h)
        o  = σ(W_o x + U_o h + p_o ∘ c')
        h' = o ∘ (P φ(c') + R x)
    """

    weight_ih = Input("i", "f", "g", "o")
    weight_hh = Hidden("i", "f", "g", "o")
    weight_proj = Hidden(bias=False)
    weight_res = Input(bias=False)
    weight_ph = Vector("i", "f", "o")
    nonlinearity = activation("tanh")
    gate_nonlinearity = activation("sigmoid")

    def step(self, x, h, c):
        W, U, p = self.weight_ih, self.weight_hh, self.weight_ph
        i = self.gate_nonlinearity(W.i(x) + U.i(h) + p.i * c)
        f = self.gate_nonlinearity(W.f(x) + U.f(h) + p.f * c)
        c = f * c + i * self.nonlinearity(W.g(x) + U.g(h))
        o = self.gate_nonlinearity(W.o(x) + U.o(h) + p.o * c)
        return o * (self.weight_proj(self.nonlinearity(c)) + self.weight_res(x)), c
