"""Cells with one gate between the last state and a candidate for the next one."""

from __future__ import annotations

from ...graph.functions import sigmoid, tanh
from ..cell import Cell
from ..definition import Hidden, Input
from .activations import activation


class MGU(Cell):
    """Minimal gated unit (Zhou, Wu, Zhang and Zhou, 2016, arXiv 1603.09420).

    ::

        f  = σ(W_f x + U_f h)
        n  = φ(W_n x + U_n (f ∘ h))
        h' = (1 - f) ∘ h + f ∘ n
    """

    weight_ih = Input("f", "n")
    weight_hh = Hidden("f", "n")
    nonlinearity = activation("tanh")
    gate_nonlinearity = activation("sigmoid")

    def step(self, x, h):
        f = self.gate_nonlinearity(self.weight_ih.f(x) + self.weight_hh.f(h))
        n = self.nonlinearity(self.weight_ih.n(x) + self.weight_hh.n(f * h))
        return h + f * (n - h)


class UGRNN(Cell):
    """Update gate RNN (Collins, Sohl-Dickstein and Sussillo, 2017, arXiv 1611.09913).

    ::

        c  = tanh(W_c x + U_c h)
        g  = σ(W_g x + U_g h)
        h' = g ∘ h + (1 - g) ∘ c
    """

    weight_ih = Input("c", "g")
    weight_hh = Hidden("c", "g")

    def step(self, x, h):
        c = tanh(self.weight_ih.c(x) + self.weight_hh.c(h))
        g = sigmoid(self.weight_ih.g(x) + self.weight_hh.g(h))
        return c + g * (h - c)


class LiGRU(Cell):
    """Light gated recurrent unit (Ravanelli, Brakel, Omologo and Bengio, 2018, arXiv 1803.10225).

    ::

        z  = σ(W_z x + U_z h)
        n  = relu(W_n x + U_n h)
        h' = z ∘ h + (1 - z) ∘ n

    The paper normalises ``W x`` over a batch. This cell does not: normalise in the layer before.
    """

    weight_ih = Input("z", "n")
    weight_hh = Hidden("z", "n")
    nonlinearity = activation("relu")
    gate_nonlinearity = activation("sigmoid")

    def step(self, x, h):
        z = self.gate_nonlinearity(self.weight_ih.z(x) + self.weight_hh.z(h))
        n = self.nonlinearity(self.weight_ih.n(x) + self.weight_hh.n(h))
        return n + z * (h - n)


class LightRU(Cell):
    """Light recurrent unit (Ye, Zhang, Liu, Li, Chang and Zheng, 2024, Electronics 13, 3204).

    ::

        n  = tanh(W_n x)
        f  = σ(W_f x + U h)
        h' = (1 - f) ∘ h + f ∘ n
    """

    weight_ih = Input("n", "f")
    weight_hh = Hidden()

    def step(self, x, h):
        f = sigmoid(self.weight_ih.f(x) + self.weight_hh(h))
        return h + f * (tanh(self.weight_ih.n(x)) - h)


class MinimalRNN(Cell):
    """MinimalRNN (Chen, 2017, arXiv 1711.06788).

    ::

        z  = φ(W x)
        u  = σ(U h + V z)
        h' = u ∘ h + (1 - u) ∘ z
    """

    weight_ih = Input()
    weight_hh = Hidden()
    weight_mm = Hidden(bias=False)
    nonlinearity = activation("tanh")
    gate_nonlinearity = activation("sigmoid")

    def step(self, x, h):
        z = self.nonlinearity(self.weight_ih(x))
        u = self.gate_nonlinearity(self.weight_hh(h) + self.weight_mm(z))
        return z + u * (h - z)


class STAR(Cell):
    """Stackable recurrent cell (Turkoglu, D'Aronco, Wegner and Schindler, 2021, arXiv 1911.11033).

    ::

        z  = tanh(W_z x)
        k  = σ(W_k x + U h)
        h' = tanh((1 - k) ∘ h + k ∘ z)
    """

    weight_ih = Input("z", "k")
    weight_hh = Hidden()

    def step(self, x, h):
        k = sigmoid(self.weight_ih.k(x) + self.weight_hh(h))
        return tanh(h + k * (tanh(self.weight_ih.z(x)) - h))


class SGRN(Cell):
    """Simple gated recurrent network (Zu and Wei, 2020, doi 10.1049/gtd2.12056).

    ::

        f  = σ(W x + U h)
        h' = tanh((1 - f) ∘ (W x) + f ∘ h)
    """

    weight_ih = Input()
    weight_hh = Hidden()

    def step(self, x, h):
        a = self.weight_ih(x)
        return tanh(a + sigmoid(a + self.weight_hh(h)) * (h - a))
