"""Gated cells whose sums are normalised over units, in each step."""

from __future__ import annotations

from typing import Any

from ...graph.functions import layer_norm, sigmoid, sqrt, tanh
from ...graph.operations import Node
from ..cell import Cell
from ..definition import Hidden, Input, Vector


def _normalised(matrix: Any, scale: Any, gates: str, vector: Node) -> list[Node]:
    """Return the products of some gates, normalised as one vector and multiplied by scales."""
    products, count = [getattr(matrix, gate)(vector) for gate in gates], len(gates)
    middle = sum(products[1:], products[0]).mean() / count
    centred = [each - middle for each in products]
    squares = [each * each for each in centred]
    inverse = 1 / sqrt(sum(squares[1:], squares[0]).mean() / count + 1e-5)
    pairs = zip(centred, gates, strict=True)
    return [each * inverse * getattr(scale, gate) for each, gate in pairs]


class LayerNormLSTM(Cell):
    """LSTM with layer normalisation (Ba, Kiros and Hinton, 2016, arXiv 1607.06450, eq. 20 to 22).

    ::

        (f, i, o, g) = a ∘ LN(W x) + b ∘ LN(U h)
        c' = σ(f) ∘ c + σ(i) ∘ tanh(g)
        h' = σ(o) ∘ tanh(a_c ∘ LN(c') + b_c)

    LN, ``(v - mean(v)) / sqrt(mean((v - mean(v))²) + 1e-5)``, is over the units of all four gates.
    The first sum has three biases in the paper; here it has one, ``bias_hh``. The states are
    ``[h, c]``.
    """

    weight_ih = Input("f", "i", "o", "g", bias=False)
    weight_hh = Hidden("f", "i", "o", "g", bias=False)
    scale_ih = Vector("f", "i", "o", "g", initial=1)
    scale_hh = Vector("f", "i", "o", "g", initial=1)
    bias_hh = Vector("f", "i", "o", "g", is_bias=True)
    scale_c = Vector(initial=1)
    bias_c = Vector(is_bias=True)

    def step(self, x, h, c):
        reads = _normalised(self.weight_ih, self.scale_ih, "fiog", x)
        keeps = _normalised(self.weight_hh, self.scale_hh, "fiog", h)
        f, i, o, g = (a + b for a, b in zip(reads, keeps, strict=True))
        bias = self.bias_hh
        c = sigmoid(f + bias.f) * c + sigmoid(i + bias.i) * tanh(g + bias.g)
        return sigmoid(o + bias.o) * tanh(layer_norm(c, self.scale_c, self.bias_c)), c


class LayerNormGRU(Cell):
    """GRU with layer normalisation (Ba, Kiros and Hinton, 2016, arXiv 1607.06450, eq. 26 to 28).

    ::

        (z, r) = a ∘ LN(W x) + b ∘ LN(U h)
        n  = tanh(a_n ∘ LN(W_n x) + σ(r) ∘ (b_n ∘ LN(U_n h)))
        h' = (1 - σ(z)) ∘ h + σ(z) ∘ n

    LN is that of :class:`LayerNormLSTM`, over the units of both gates, and separately over those of
    ``n``. All sums have biases: ``(z, r)`` has one bias for its sum, ``n`` has one for each term.
    """

    weight_ih = Input("z", "r", "n", bias=False)
    weight_hh = Hidden("z", "r", "n", bias=False)
    scale_ih = Vector("z", "r", "n", initial=1)
    scale_hh = Vector("z", "r", "n", initial=1)
    bias_ih = Vector("z", "r", "n", is_bias=True)
    bias_hn = Vector(is_bias=True)

    def step(self, x, h):
        W, U, bias = self.weight_ih, self.weight_hh, self.bias_ih
        a, b = self.scale_ih, self.scale_hh
        z, r = _normalised(W, a, "zr", x)
        z_h, r_h = _normalised(U, b, "zr", h)
        z, r = sigmoid(z + z_h + bias.z), sigmoid(r + r_h + bias.r)
        n = layer_norm(W.n(x), a.n, bias.n) + r * layer_norm(U.n(h), b.n, self.bias_hn)
        return h + z * (tanh(n) - h)
