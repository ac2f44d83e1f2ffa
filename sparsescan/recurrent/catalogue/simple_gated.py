"""Simple gated units, whose input multiplies the state; and the intersection RNN."""

from __future__ import annotations

from ..cell import Cell
from ..definition import Hidden, Input
from .activations import activation


class SGU(Cell):
    """Simple gated unit (Gao and Glowacka, 2016, arXiv 1604.02910).

    ::

        g  = tanh(U_g ((W_g x) ∘ h))
        n  = softplus(g ∘ h)
        z  = hardsigmoid(W_z x + U_z h)
        h' = (1 - z) ∘ h + z ∘ n
    """

    weight_ih = Input("g", "z")
    weight_hh = Hidden("g", "z")
    nonlinearity = activation("tanh")
    output_nonlinearity = activation("softplus")
    gate_nonlinearity = activation("hardsigmoid")

    def step(self, x, h):
        g = self.nonlinearity(self.weight_hh.g(self.weight_ih.g(x) * h))
        n = self.output_nonlinearity(self.project(g * h))
        z = self.gate_nonlinearity(self.weight_ih.z(x) + self.weight_hh.z(h))
        return h + z * (n - h)

    def project(self, gated):
        """Return the argument of the output's function."""
        return gated


class DSGU(SGU):
    """Deep simple gated unit (Gao and Glowacka, 2016, arXiv 1604.02910).

    ::

        g  = tanh(U_g ((W_g x) ∘ h))
        n  = σ(V (g ∘ h))
        z  = hardsigmoid(W_z x + U_z h)
        h' = (1 - z) ∘ h + z ∘ n
    """

    weight_ho = Hidden(bias=False)
    output_nonlinearity = activation("sigmoid")

    def project(self, gated):
        return self.weight_ho(gated)


class IntersectionRNN(Cell):
    """Intersection RNN (Collins, Sohl-Dickstein and Sussillo, 2017, arXiv 1611.09913).

    ::

        d, n = relu(W_d x + U_d h), tanh(W_n x + U_n h)
        a, b = σ(W_a x + U_a h), σ(W_b x + U_b h)
        y' = a ∘ x + (1 - a) ∘ d
        h' = b ∘ h + (1 - b) ∘ n

    The state is ``[y, h]``. No step reads the previous output ``y``. The number of inputs must be
    the number of units.
    """

    weight_ih = Input("d", "n", "a", "b")
    weight_hh = Hidden("d", "n", "a", "b")
    depth_nonlinearity = activation("relu")
    recurrent_nonlinearity = activation("tanh")
    gate_nonlinearity = activation("sigmoid")

    def step(self, x, y, h):
        W, U = self.weight_ih, self.weight_hh
        d = self.depth_nonlinearity(W.d(x) + U.d(h))
        n = self.recurrent_nonlinearity(W.n(x) + U.n(h))
        a = self.gate_nonlinearity(W.a(x) + U.a(h))
        b = self.gate_nonlinearity(W.b(x) + U.b(h))
        return d + a * (x - d), n + b * (h - n)
