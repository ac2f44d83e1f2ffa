"""Cells with random masks while they train: zoneout, and dropout within a step."""

from __future__ import annotations

from ...graph.functions import sigmoid, tanh
from ..cell import Cell
from ..definition import Hidden, Input, Mask


class ZoneoutLSTM(Cell):
    """LSTM some of whose units keep their states (Krueger et al., 2016, arXiv 1606.01305).

    ::

        c' = c + k_c ∘ (σ(f) ∘ c + σ(i) ∘ tanh(g) - c)
        h' = h + k_h ∘ (σ(o) ∘ tanh(σ(f) ∘ c + σ(i) ∘ tanh(g)) - h)

    with ``(i, f, g, o) = W x + U h``. In each step ``k_h`` is 0 with probability `zoneout_h`, and
    otherwise 1; ``k_c`` likewise with `zoneout_c`. In inference they are ``1 - zoneout_h`` and
    ``1 - zoneout_c``. The defaults are those of the paper's best character model. The states are
    ``[h, c]``.
    """

    weight_ih = Input("i", "f", "g", "o")
    weight_hh = Hidden("i", "f", "g", "o")
    zoneout_h = Mask(0.05, scaled=False)
    zoneout_c = Mask(0.5, scaled=False)

    def step(self, x, h, c):
        W, U = self.weight_ih, self.weight_hh
        i, f, o = sigmoid(W.i(x) + U.i(h)), sigmoid(W.f(x) + U.f(h)), sigmoid(W.o(x) + U.o(h))
        new = f * c + i * tanh(W.g(x) + U.g(h))
        return h + self.zoneout_h * (o * tanh(new) - h), c + self.zoneout_c * (new - c)


class RecurrentDropoutLSTM(Cell):
    """LSTM with dropout of what is added to the cell (Semeniuta et al., 2016, arXiv 1603.05118).

    ::

        c' = σ(f) ∘ c + σ(i) ∘ (d ∘ tanh(g))
        h' = σ(o) ∘ tanh(c')

    with ``(i, f, g, o) = W x + U h``. In each step ``d`` is 0 with probability `update_dropout`,
    and otherwise ``1 / (1 - update_dropout)``; in inference it is 1. The states are ``[h, c]``.
    """

    weight_ih = Input("i", "f", "g", "o")
    weight_hh = Hidden("i", "f", "g", "o")
    update_dropout = Mask(0.25)

    def step(self, x, h, c):
        W, U = self.weight_ih, self.weight_hh
        i, f, o = sigmoid(W.i(x) + U.i(h)), sigmoid(W.f(x) + U.f(h)), sigmoid(W.o(x) + U.o(h))
        c = f * c + i * (self.update_dropout * tanh(W.g(x) + U.g(h)))
        return o * tanh(c), c


class RecurrentDropoutGRU(Cell):
    """GRU with dropout of what is added to the state (Semeniuta et al., 2016, arXiv 1603.05118).

    ::

        n  = tanh(W_n x + U_n (r ∘ h))
        h' = (1 - z) ∘ h + z ∘ (d ∘ n)

    with ``z, r = σ(W x + U h)``, each with rows of its own. In each step ``d`` is 0 with
    probability `update_dropout`, and otherwise ``1 / (1 - update_dropout)``; in inference it is 1.
    """

    weight_ih = Input("z", "r", "n")
    weight_hh = Hidden("z", "r", "n")
    update_dropout = Mask(0.25)

    def step(self, x, h):
        W, U = self.weight_ih, self.weight_hh
        z, r = sigmoid(W.z(x) + U.z(h)), sigmoid(W.r(x) + U.r(h))
        n = tanh(W.n(x) + U.n(r * h))
        return h + z * (self.update_dropout * n - h)


class VariationalLSTM(Cell):
    """LSTM with one mask of the state for a sequence (Gal and Ghahramani, 2016, arXiv 1512.05287).

    ::

        c' = σ(f) ∘ c + σ(i) ∘ tanh(g)
        h' = σ(o) ∘ tanh(c')

    with ``(i, f, g, o) = W x + U (d ∘ h)``. All steps of a sample share one ``d``: 0 with
    probability `state_dropout`, and otherwise ``1 / (1 - state_dropout)``; in inference it is 1.
    All gates share it: equation 7 of the paper. The states are ``[h, c]``.
    """

    weight_ih = Input("i", "f", "g", "o")
    weight_hh = Hidden("i", "f", "g", "o")
    state_dropout = Mask(0.25, per="sequence")

    def step(self, x, h, c):
        W, U, kept = self.weight_ih, self.weight_hh, self.state_dropout * h
        i, f = sigmoid(W.i(x) + U.i(kept)), sigmoid(W.f(x) + U.f(kept))
        c = f * c + i * tanh(W.g(x) + U.g(kept))
        return sigmoid(W.o(x) + U.o(kept)) * tanh(c), c


class VariationalGRU(Cell):
    """GRU with one mask of the state for a sequence (Gal and Ghahramani, 2016, arXiv 1512.05287).

    ::

        n  = tanh(W_n x + r ∘ (U_n (d ∘ h)))
        h' = (1 - z) ∘ n + z ∘ h

    with ``r, z = σ(W x + U (d ∘ h))``, each with its own rows: PyTorch's GRU, with the mask of
    :class:`VariationalLSTM`.
    """

    weight_ih = Input("r", "z", "n")
    weight_hh = Hidden("r", "z", "n")
    state_dropout = Mask(0.25, per="sequence")

    def step(self, x, h):
        W, U, kept = self.weight_ih, self.weight_hh, self.state_dropout * h
        r, z = sigmoid(W.r(x) + U.r(kept)), sigmoid(W.z(x) + U.z(kept))
        n = tanh(W.n(x) + r * U.n(kept))
        return n + z * (h - n)
