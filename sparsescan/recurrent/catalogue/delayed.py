"""Cells that read an earlier input, or a state of more than one step before."""

from __future__ import annotations

from ...checks import check_count
from ..cell import Cell
from ..definition import Constant, Hidden, Input, Vector
from .activations import activation


class TRNN(Cell):
    """Strongly typed RNN (Balduzzi and Ghifary, 2016, arXiv 1602.02218).

    ::

        f  = σ(W_f x)
        h' = f ∘ h + (1 - f) ∘ (W_z x)
    """

    weight_ih = Input("z", "f")
    gate_nonlinearity = activation("sigmoid")

    def step(self, x, h):
        z = self.weight_ih.z(x)
        return z + self.gate_nonlinearity(self.weight_ih.f(x)) * (h - z)


class TGRU(Cell):
    """Strongly typed GRU (Balduzzi and Ghifary, 2016, arXiv 1602.02218); x₋ is the last input.

    ::

        z  = W_z x + V_z x₋
        f  = σ(W_f x + V_f x₋)
        o  = tanh(W_o x + V_o x₋)
        h' = f ∘ h + z ∘ o

    The state is ``[h, V_z x₋, V_f x₋, V_o x₋]``, where V is `weight_hh`.
    """

    weight_ih = Input("z", "f", "o")
    weight_hh = Input("z", "f", "o", bias=False)
    bias_hh = Vector("z", "f", "o", is_bias=True)
    gate_nonlinearity = activation("sigmoid")
    output_nonlinearity = activation("tanh")

    def step(self, x, h, z, f, o):
        W, V, b = self.weight_ih, self.weight_hh, self.bias_hh
        z, o = W.z(x) + z + b.z, self.output_nonlinearity(W.o(x) + o + b.o)
        f = self.gate_nonlinearity(W.f(x) + f + b.f)
        return f * h + z * o, V.z(x), V.f(x), V.o(x)


class TLSTM(Cell):
    """Strongly typed LSTM (Balduzzi and Ghifary, 2016, arXiv 1602.02218); x₋ is the last input.

    ::

        z  = W_z x + V_z x₋
        f  = σ(W_f x + V_f x₋)
        o  = tanh(W_o x + V_o x₋)
        c' = f ∘ c + (1 - f) ∘ z
        h' = c' ∘ o

    The state is ``[h, c, V_z x₋, V_f x₋, V_o x₋]``, where V is `weight_hh`. No step reads the
    previous output ``h``.
    """

    weight_ih = Input("z", "f", "o")
    weight_hh = Input("z", "f", "o", bias=False)
    bias_hh = Vector("z", "f", "o", is_bias=True)
    gate_nonlinearity = activation("sigmoid")
    output_nonlinearity = activation("tanh")

    def step(self, x, h, c, z, f, o):
        W, V, b = self.weight_ih, self.weight_hh, self.bias_hh
        z, o = W.z(x) + z + b.z, self.output_nonlinearity(W.o(x) + o + b.o)
        c = z + self.gate_nonlinearity(W.f(x) + f + b.f) * (c - z)
        return c * o, c, V.z(x), V.f(x), V.o(x)


class tauGRU(Cell):
    """GRU with a weighted time delay (Erichson, Lim and Mahoney, 2022, arXiv 2212.00228).

    ::

        u  = tanh(W_u x + U_u h)
        z  = tanh(W_z x + U_z h_d)        h_d is h, as it was `delay` steps ago
        g  = σ(W_g x + U_g h)
        a  = σ(W_a x + U_a h)
        h' = (1 - g) ∘ h + g ∘ (u + a ∘ z)

    The state is ``[h, h_1, …, h_d]``, where ``h_k`` is h as it was k steps ago, and d is `delay`.
    """

    weight_ih = Input("u", "z", "g", "a")
    weight_hh = Hidden("u", "z", "g", "a")
    delay = Constant(1)
    nonlinearity = activation("tanh")
    gate_nonlinearity = activation("sigmoid")

    @property
    def states(self):
        """The number of vectors that make up the state."""
        return 1 + check_count("delay", self.delay, 1)

    def step(self, x, h, *delayed):
        W, U = self.weight_ih, self.weight_hh
        u = self.nonlinearity(W.u(x) + U.u(h))
        z = self.nonlinearity(W.z(x) + U.z(delayed[-1]))
        g = self.gate_nonlinearity(W.g(x) + U.g(h))
        a = self.gate_nonlinearity(W.a(x) + U.a(h))
        return h + g * (u + a * z - h), h, *delayed[:-1]
