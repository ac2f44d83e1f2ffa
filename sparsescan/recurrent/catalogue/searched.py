"""Cells that an architecture search has found."""

from __future__ import annotations

from ...graph.functions import relu, sigmoid, tanh
from ..cell import Cell
from ..definition import Choice, Hidden, Input


class MUT1(Cell):
    """First mutated GRU (Jozefowicz, Zaremba and Sutskever, 2015, ICML, PMLR 37).

    ::

        z  = σ(W_z x)
        r  = σ(W_r x + U_r h)
        h' = z ∘ tanh(U_n (r ∘ h) + tanh(W_n x)) + (1 - z) ∘ h

    The paper has ``x`` in place of ``W_n x``, with as many inputs as units.
    """

    weight_ih = Input("z", "r", "n")
    weight_hh = Hidden("r", "n")

    def step(self, x, h):
        r = sigmoid(self.weight_ih.r(x) + self.weight_hh.r(h))
        n = tanh(self.weight_hh.n(r * h) + tanh(self.weight_ih.n(x)))
        return h + sigmoid(self.weight_ih.z(x)) * (n - h)


class MUT2(Cell):
    """Second mutated GRU (Jozefowicz, Zaremba and Sutskever, 2015, ICML, PMLR 37).

    ::

        z  = σ(W_z x + U_z h)
        r  = σ(W_r x + U_r h)
        h' = z ∘ tanh(W_n x + U_n (r ∘ h)) + (1 - z) ∘ h

    The paper has ``x`` in place of ``W_r x``, with as many inputs as units.
    """

    weight_ih = Input("z", "r", "n")
    weight_hh = Hidden("z", "r", "n")

    def step(self, x, h):
        z = sigmoid(self.weight_ih.z(x) + self.weight_hh.z(self.seen(h)))
        r = sigmoid(self.weight_ih.r(x) + self.weight_hh.r(h))
        n = tanh(self.weight_ih.n(x) + self.weight_hh.n(r * h))
        return h + z * (n - h)

    def seen(self, h):
        """Return the function of the state that ``z`` reads."""
        return h


class MUT3(MUT2):
    """Third mutated GRU (Jozefowicz, Zaremba and Sutskever, 2015, ICML, PMLR 37).

    ::

        z  = σ(W_z x + U_z tanh(h))
        r  = σ(W_r x + U_r h)
        h' = z ∘ tanh(W_n x + U_n (r ∘ h)) + (1 - z) ∘ h
    """

    def seen(self, h):
        return tanh(h)


class NAS(Cell):
    """Cell of a neural architecture search (Zoph and Le, 2017, arXiv 1611.01578).

    ::

        a  = tanh(tanh(σ(g_1) ∘ relu(g_2)) + c)             g_k = W_k x + U_k h
        c' = a ∘ tanh(σ(g_3) + relu((W_4 x) ∘ (U_4 h)))
        b  = tanh(tanh(tanh(g_5) ∘ σ(g_6)) + σ(tanh(g_7) + σ(g_8)))
        h' = tanh(c' ∘ b)

    In ``g_4`` the paper multiplies. torchrecurrent adds, as does ``join="sum"``.
    """

    weight_ih = Input(*"abcdefgh")
    weight_hh = Hidden(*"abcdefgh")
    join = Choice("product", "sum")

    def step(self, x, h, c):
        W, U = self.weight_ih, self.weight_hh
        d = W.d(x) * U.d(h) if self.join == "product" else W.d(x) + U.d(h)
        first = tanh(sigmoid(W.a(x) + U.a(h)) * relu(W.b(x) + U.b(h)))
        second = tanh(sigmoid(W.c(x) + U.c(h)) + relu(d))
        third = tanh(tanh(W.e(x) + U.e(h)) * sigmoid(W.f(x) + U.f(h)))
        fourth = sigmoid(tanh(W.g(x) + U.g(h)) + sigmoid(W.h(x) + U.h(h)))
        c = tanh(first + c) * second
        return tanh(c * tanh(third + fourth)), c
