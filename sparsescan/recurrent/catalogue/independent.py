"""Cells with units that read only their own state."""

from __future__ import annotations

from ...graph.functions import sigmoid, tanh
from ..cell import Cell
from ..definition import Choice, Hidden, Input, Scalar, Vector
from .activations import activation


class IndRNN(Cell):
    """Independently recurrent network (Li, Li, Cook, Zhu and Gao, 2018, arXiv 1803.04831).

    ::

        h' = φ(W x + u ∘ h)
    """

    weight_ih = Input()
    vector_u = Vector()
    bias_hh = Vector(is_bias=True)
    nonlinearity = activation("tanh")

    def step(self, x, h):
        return self.nonlinearity(self.weight_ih(x) + self.vector_u * h + self.bias_hh)


class BR(Cell):
    """Bistable recurrent cell (Vecoven, Ernst and Drion, 2021, PLoS ONE 16, e0252676).

    ::

        a  = 1 + tanh(W_a x + u_a ∘ h)
        c  = σ(W_c x + u_c ∘ h)
        h' = c ∘ h + (1 - c) ∘ tanh(W_n x + a ∘ h)
    """

    weight_ih = Input("a", "c", "n")
    weight_hh = Vector("a", "c")
    bias_hh = Vector("a", "c", is_bias=True)

    def step(self, x, h):
        a = 1 + tanh(self.weight_ih.a(x) + self.weight_hh.a * h + self.bias_hh.a)
        c = sigmoid(self.weight_ih.c(x) + self.weight_hh.c * h + self.bias_hh.c)
        return c * h + (1 - c) * tanh(self.weight_ih.n(x) + a * h)


class NBR(Cell):
    """Neuromodulated bistable recurrent cell (Vecoven, Ernst, Drion, 2021, PLoS ONE 16, e0252676).

    ::

        a  = 1 + tanh(W_a x + U_a h)
        c  = σ(W_c x + U_c h)
        h' = c ∘ h + (1 - c) ∘ tanh(W_n x + a ∘ h)
    """

    weight_ih = Input("a", "c", "n")
    weight_hh = Hidden("a", "c")

    def step(self, x, h):
        a = 1 + tanh(self.weight_ih.a(x) + self.weight_hh.a(h))
        c = sigmoid(self.weight_ih.c(x) + self.weight_hh.c(h))
        return c * h + (1 - c) * tanh(self.weight_ih.n(x) + a * h)


class SCRN(Cell):
    """Structurally constrained recurrent network (Mikolov et al., 2014, arXiv 1412.7753).

    ::

        s' = (1 - α) B x + α s
        h' = σ(P s' + A x + R h)
        y' = tanh(U h' + V s')

    The state is ``[y, h, s]``. The paper multiplies R with h. torchrecurrent multiplies R with y,
    as does ``recurrent="output"``. The paper's α is 0.95; here that is its initial value, and it is
    trained.
    """

    weight_ih = Input("s", "h")
    weight_hh = Hidden("h", "y")
    weight_ch = Hidden("h", "y")
    alpha = Scalar(initial=0.95)
    recurrent = Choice("hidden", "output")

    def step(self, x, y, h, s):
        s = (1 - self.alpha) * self.weight_ih.s(x) + self.alpha * s
        seen = self.weight_hh.h(h if self.recurrent == "hidden" else y)
        h = sigmoid(self.weight_ch.h(s) + self.weight_ih.h(x) + seen)
        return tanh(self.weight_hh.y(h) + self.weight_ch.y(s)), h, s
