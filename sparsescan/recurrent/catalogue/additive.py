"""Cells whose state is a weighted sum of inputs: no nonlinear function links the steps."""

from __future__ import annotations

from ...graph.functions import sigmoid, tanh
from ..cell import Cell
from ..definition import Hidden, Input, Scalar


class ATR(Cell):
    """Addition-subtraction twin-gated network (Zhang et al., 2018, arXiv 1810.12546).

    ::

        p  = W x
        q  = U h
        h' = σ(p + q) ∘ p + σ(p - q) ∘ h
    """

    weight_ih = Input()
    weight_hh = Hidden()

    def step(self, x, h):
        p, q = self.weight_ih(x), self.weight_hh(h)
        return sigmoid(p + q) * p + sigmoid(p - q) * h


class CFN(Cell):
    """Chaos free network (Laurent and von Brecht, 2017, arXiv 1612.06212).

    ::

        θ  = σ(W_θ x + U_θ h)
        η  = σ(W_η x + U_η h)
        h' = θ ∘ tanh(h) + η ∘ tanh(W_n x)
    """

    weight_ih = Input("theta", "eta", "n")
    weight_hh = Hidden("theta", "eta")

    def step(self, x, h):
        theta = sigmoid(self.weight_ih.theta(x) + self.weight_hh.theta(h))
        eta = sigmoid(self.weight_ih.eta(x) + self.weight_hh.eta(h))
        return theta * tanh(h) + eta * tanh(self.weight_ih.n(x))


class JANET(Cell):
    """JANET, an LSTM with a forget gate only (van der Westhuizen, Lasenby, 2018, arXiv 1804.04849).

    ::

        s  = W_s x + U_s h
        n  = tanh(W_n x + U_n h)
        h' = σ(s) ∘ h + (1 - σ(s - β)) ∘ n

    The paper's ``c`` is ``h`` here. The paper fixes β; here it is trained, as in torchrecurrent.
    """

    weight_ih = Input("s", "n")
    weight_hh = Hidden("s", "n")
    beta = Scalar(initial=1.0)

    def step(self, x, h):
        s = self.weight_ih.s(x) + self.weight_hh.s(h)
        n = tanh(self.weight_ih.n(x) + self.weight_hh.n(h))
        return sigmoid(s) * h + (1 - sigmoid(s - self.beta)) * n


class RAN(Cell):
    """Recurrent additive network (Lee, Levy and Zettlemoyer, 2017, arXiv 1705.07393).

    ::

        i  = σ(W_i x + U_i h)
        f  = σ(W_f x + U_f h)
        c' = i ∘ (W_c x) + f ∘ c
        h' = tanh(c')
    """

    weight_ih = Input("c", "i", "f", bias=("i", "f"))
    weight_hh = Hidden("i", "f")

    def step(self, x, h, c):
        i = sigmoid(self.weight_ih.i(x) + self.weight_hh.i(h))
        f = sigmoid(self.weight_ih.f(x) + self.weight_hh.f(h))
        c = i * self.weight_ih.c(x) + f * c
        return tanh(c), c
