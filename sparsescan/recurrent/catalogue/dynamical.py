"""Cells that are steps of ordinary differential equations."""

from __future__ import annotations

from ...graph.functions import sigmoid, tanh
from ..cell import Cell
from ..definition import Choice, Constant, Hidden, Input, Vector
from .activations import activation


class AntisymmetricRNN(Cell):
    """AntisymmetricRNN (Chang, Chen, Haber and Chi, 2019, arXiv 1902.09689).

    ::

        h' = h + ε φ(W x + (U - Uᵀ - γ I) h)
    """

    weight_ih = Input()
    weight_hh = Hidden()
    epsilon = Constant(1.0)
    gamma = Constant(0.0)
    nonlinearity = activation("tanh")

    def step(self, x, h):
        a = self.weight_hh(h) - self.weight_hh.T(h) - self.gamma * h
        return h + self.epsilon * self.nonlinearity(self.weight_ih(x) + a)


class GatedAntisymmetricRNN(Cell):
    """AntisymmetricRNN with a gate (Chang, Chen, Haber and Chi, 2019, arXiv 1902.09689).

    ::

        a  = (U - Uᵀ - γ I) h
        h' = h + ε σ(W_z x + a) ∘ tanh(W_n x + a + b)

    The paper has no ``b``, which is torchrecurrent's `bias_hh`.
    """

    weight_ih = Input("z", "n")
    weight_hh = Hidden(bias=False)
    bias_hh = Vector(is_bias=True)
    epsilon = Constant(1.0)
    gamma = Constant(0.0)

    def step(self, x, h):
        a = self.weight_hh(h) - self.weight_hh.T(h) - self.gamma * h
        z, n = sigmoid(self.weight_ih.z(x) + a), tanh(self.weight_ih.n(x) + a + self.bias_hh)
        return h + self.epsilon * z * n


class coRNN(Cell):
    """Coupled oscillatory RNN (Rusch and Mishra, 2021, arXiv 2010.00951), with explicit damping.

    ::

        z' = z + Δt (tanh(W x + U h + V z) - γ h - ε z)
        h' = h + Δt z'
    """

    weight_ih = Input()
    weight_hh = Hidden()
    weight_ch = Hidden()
    dt = Constant(0.1)
    gamma = Constant(1.0)
    epsilon = Constant(1.0)

    def step(self, x, h, z):
        force = tanh(self.weight_ih(x) + self.weight_hh(h) + self.weight_ch(z))
        z = z + self.dt * (force - self.gamma * h - self.epsilon * z)
        return h + self.dt * z, z


class UnICORNN(Cell):
    """Undamped independent controlled oscillatory RNN (Rusch and Mishra, 2021, arXiv 2103.05487).

    ::

        z' = z - Δt σ(v) ∘ (tanh(W x + u ∘ h) + α h)
        h' = h + Δt σ(v) ∘ z'
    """

    weight_ih = Input()
    weight_hh = Vector()
    weight_ch = Vector()
    bias_hh = Vector(is_bias=True)
    dt = Constant(0.1)
    alpha = Constant(0.0)

    def step(self, x, h, z):
        rate = self.dt * sigmoid(self.weight_ch)
        force = tanh(self.weight_ih(x) + self.weight_hh * h + self.bias_hh)
        z = z - rate * (force + self.alpha * h)
        return h + rate * z, z


class LEM(Cell):
    """Long expressive memory (Rusch, Mishra, Erichson and Mahoney, 2022, arXiv 2110.04744).

    ::

        r  = Δt σ(W_r x + U_r h)
        s  = Δt σ(W_s x + U_s h)
        z' = (1 - s) ∘ z + s ∘ tanh(W_z x + U_z h)
        h' = (1 - r) ∘ h + r ∘ tanh(W_h x + V z')

    The paper multiplies V with z'. torchrecurrent multiplies V with z, as does ``memory="old"``.
    """

    weight_ih = Input("r", "s", "z", "h")
    weight_hh = Hidden("r", "s", "z")
    weight_ch = Hidden()
    dt = Constant(1.0)
    memory = Choice("new", "old")

    def step(self, x, h, z):
        r = self.dt * sigmoid(self.weight_ih.r(x) + self.weight_hh.r(h))
        s = self.dt * sigmoid(self.weight_ih.s(x) + self.weight_hh.s(h))
        new = z + s * (tanh(self.weight_ih.z(x) + self.weight_hh.z(h)) - z)
        seen = self.weight_ch(new if self.memory == "new" else z)
        return h + r * (tanh(self.weight_ih.h(x) + seen) - h), new
