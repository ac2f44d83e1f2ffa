"""Cells that are elementwise linear in the state, so that their Jacobians are diagonal."""

from __future__ import annotations

from ...graph.functions import sigmoid
from ..cell import Cell
from ..definition import Input


class minGRU(Cell):
    """minGRU (Feng, Tung, Ahmed, Bengio and Hajimirsadeghi, 2024, arXiv 2410.01201).

    ::

        z  = σ(W_z x)
        h' = (1 - z) ∘ h + z ∘ (W_h x)
    """

    weight_ih = Input("z", "h")

    def step(self, x, h):
        return h + sigmoid(self.weight_ih.z(x)) * (self.weight_ih.h(x) - h)


class minLSTM(Cell):
    """minLSTM (Feng, Tung, Ahmed, Bengio and Hajimirsadeghi, 2024, arXiv 2410.01201).

    ::

        f  = σ(W_f x)
        i  = σ(W_i x)
        h' = (f ∘ h + i ∘ (W_h x)) / (f + i)
    """

    weight_ih = Input("f", "i", "h")

    def step(self, x, h):
        f, i = sigmoid(self.weight_ih.f(x)), sigmoid(self.weight_ih.i(x))
        return (f * h + i * self.weight_ih.h(x)) / (f + i)
