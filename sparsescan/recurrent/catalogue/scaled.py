"""Cells that mix the old state with a candidate by scalars, which may be trained."""

from __future__ import annotations

from ...graph.functions import sigmoid, tanh
from ..cell import Cell
from ..definition import Constant, Hidden, Input, Scalar, Vector
from .activations import activation


class FastRNN(Cell):
    """FastRNN (Kusupati, Singh, Bhatia, Kumar, Jain and Varma, 2018, arXiv 1901.02358).

    ::

        n  = φ(W x + U h)
        h' = σ(α) n + σ(β) h

    The paper starts with a small ``σ(α)`` and ``σ(β)`` near 1; torchrecurrent exchanges the two.
    """

    weight_ih = Input()
    weight_hh = Hidden()
    alpha = Scalar(initial=-3.0)
    beta = Scalar(initial=3.0)
    nonlinearity = activation("tanh")

    def step(self, x, h):
        n = self.nonlinearity(self.weight_ih(x) + self.weight_hh(h))
        return sigmoid(self.alpha) * n + sigmoid(self.beta) * h


class FastGRNN(Cell):
    """FastGRNN (Kusupati, Singh, Bhatia, Kumar, Jain and Varma, 2018, arXiv 1901.02358).

    ::

        z  = φ(W x + U h + b_z)
        n  = tanh(W x + U h + b_n)
        h' = (σ(ζ) (1 - z) + σ(ν)) ∘ n + z ∘ h

    The paper's ``φ`` is ``σ``; torchrecurrent's default is tanh.
    """

    weight_ih = Input(bias=False)
    weight_hh = Hidden(bias=False)
    bias_ih = Vector("z", "n", is_bias=True)
    bias_hh = Vector("z", "n", is_bias=True)
    zeta = Scalar(initial=3.0)
    nu = Scalar(initial=-3.0)
    nonlinearity = activation("sigmoid")

    def step(self, x, h):
        a = self.weight_ih(x) + self.weight_hh(h)
        z = self.nonlinearity(a + self.bias_ih.z + self.bias_hh.z)
        n = tanh(a + self.bias_ih.n + self.bias_hh.n)
        return (sigmoid(self.zeta) * (1 - z) + sigmoid(self.nu)) * n + z * h


class MiRU1(Cell):
    """Minion recurrent unit 1 (Zyarah and Kudithipudi, 2025, arXiv 2503.06175).

    ::

        r  = σ(W_r x + U_r h)
        n  = φ(W_n x + U_n (r ∘ h))
        h' = λ h + (1 - λ) n
    """

    weight_ih = Input("r", "n")
    weight_hh = Hidden("r", "n")
    update_coefficient = Constant(0.5)
    nonlinearity = activation("tanh")
    gate_nonlinearity = activation("sigmoid")

    def step(self, x, h):
        r = self.gate_nonlinearity(self.weight_ih.r(x) + self.weight_hh.r(h))
        n = self.nonlinearity(self.weight_ih.n(x) + self.weight_hh.n(r * h))
        return n + self.update_coefficient * (h - n)


class MiRU2(Cell):
    """Minion recurrent unit 2 (Zyarah and Kudithipudi, 2025, arXiv 2503.06175).

    ::

        n  = φ(W x + θ U h + b)
        h' = λ h + (1 - λ) n
    """

    weight_ih = Input()
    weight_hh = Hidden(bias=False)
    bias_hh = Vector(is_bias=True)
    update_coefficient = Constant(0.5)
    reset_coefficient = Constant(0.5)
    nonlinearity = activation("tanh")

    def step(self, x, h):
        a = self.weight_ih(x) + self.bias_hh
        n = self.nonlinearity(a + self.reset_coefficient * self.weight_hh(h))
        return n + self.update_coefficient * (h - n)
