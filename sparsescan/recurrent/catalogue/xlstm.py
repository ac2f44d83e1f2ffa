"""Cells of the xLSTM."""

from __future__ import annotations

from ...graph.functions import exp, maximum, minimum, sigmoid, softplus, tanh, where
from ..cell import Cell
from ..definition import Constant, Hidden, Input


class sLSTM(Cell):
    """sLSTM (Beck et al., 2024, arXiv 2405.04517), with a forget gate that is a sigmoid.

    ::

        m' = max(log σ(f̃) + m, ĩ)              ĩ, f̃, z̃, õ = W x + U h, each with rows of its own
        i  = exp(ĩ - m')
        f  = exp(log σ(f̃) + m - m')
        c' = f ∘ c + i ∘ tanh(z̃)
        n' = f ∘ n + i
        h' = σ(õ) ∘ c' / n'

    The state is ``[h, c, n, m]``. While ``n`` is 0, ``m'`` is ``ĩ``, so that ``n'`` is not 0. Each
    of the ``heads``, by default 1, has its own matrices ``U``. The recurrent kernel of the package
    xlstm, with axes (head, column, gate, row), becomes ``weight_hh`` by
    ``kernel.permute(2, 0, 3, 1).reshape(weight_hh.shape)``.
    """

    heads = Constant(1)
    weight_ih = Input("i", "f", "z", "o")
    weight_hh = Hidden("i", "f", "z", "o", bias=False, heads=heads)

    def step(self, x, h, c, n, m):
        W, U = self.weight_ih, self.weight_hh
        i, f = W.i(x) + U.i(h), m - softplus(-(W.f(x) + U.f(h)))
        m = where(n > 0, maximum(f, i), i)
        i, f = exp(i - m), exp(minimum(f - m, 0))
        c, n = f * c + i * tanh(W.z(x) + U.z(h)), f * n + i
        return sigmoid(W.o(x) + U.o(h)) * c / n, c, n, m
