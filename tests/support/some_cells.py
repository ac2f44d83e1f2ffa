"""Cells for tests of kernels: of one stage and of several, with parameters of all kinds."""

from __future__ import annotations

from typing import Any

from sparsescan.graph.functions import (
    exp,
    layer_norm,
    minimum,
    relu,
    sigmoid,
    softmax,
    surrogate,
    tanh,
)
from sparsescan.recurrent import Cell, GRUCell, LSTMCell, RNNCell
from sparsescan.recurrent.definition import (
    Constant,
    Given,
    Hidden,
    Initial,
    Input,
    Mask,
    Scalar,
    State,
    StepNumber,
    Vector,
)
from sparsescan.recurrent.program import CellProgram


class MGU(Cell):
    """Minimal gated unit (Zhou et al., 2016): two stages."""

    weight_ih = Input("f", "n")
    weight_hh = Hidden("f", "n")

    def step(self, x: Any, h: Any) -> Any:
        f = sigmoid(self.weight_ih.f(x) + self.weight_hh.f(h))
        n = tanh(self.weight_ih.n(x) + self.weight_hh.n(f * h))
        return h + f * (n - h)


class PeepholeLSTM(Cell):
    """LSTM whose gates see the cell (Gers and Schmidhuber, 2000): vectors of parameters."""

    weight_ih = Input("i", "f", "g", "o")
    weight_hh = Hidden("i", "f", "g", "o")
    weight_ph = Vector("i", "f", "o")

    def step(self, x: Any, h: Any, c: Any) -> Any:
        w, u, p = self.weight_ih, self.weight_hh, self.weight_ph
        i = sigmoid(w.i(x) + u.i(h) + p.i * c)
        f = sigmoid(w.f(x) + u.f(h) + p.f * c)
        c = f * c + i * tanh(w.g(x) + u.g(h))
        o = sigmoid(w.o(x) + u.o(h) + p.o * c)
        return o * tanh(c), c


class Tied(Cell):
    """A scalar, and a matrix that multiplies a state, what was computed, and as its transpose."""

    weight_ih = Input()
    weight_hh = Hidden()
    weight_ch = Hidden("a", "b", bias=("b",))
    alpha = Scalar(initial=0.3)
    scale = Vector(initial=0.7)

    def step(self, x: Any, h: Any, c: Any) -> Any:
        a = tanh(self.weight_ih(x) + self.weight_hh(c) + self.weight_ch.a(h))
        b = sigmoid(self.weight_hh.T(a) + self.weight_ch.b(c) + self.scale)
        rate = sigmoid(self.alpha)
        c = rate * c + (1 - rate) * b * a
        return tanh(self.weight_hh(c) + self.scale * h), c


class SCRN(Cell):
    """Structurally constrained network (Mikolov et al., 2015), with an output: three stages."""

    weight_ih = Input("s", "h")
    weight_hh = Hidden()
    weight_sh = Hidden(bias=False)
    weight_ho = Hidden()
    rate = Vector(initial=0.6)

    def step(self, x: Any, y: Any, s: Any, h: Any) -> Any:
        s = (1 - self.rate) * self.weight_ih.s(x) + self.rate * s
        h = sigmoid(self.weight_sh(s) + self.weight_ih.h(x) + self.weight_hh(h))
        return relu(self.weight_ho(h) + minimum(s, y)), s, h


class Diagonal(Cell):
    """IndRNN (Li et al., 2018): no matrix multiplies states."""

    weight_ih = Input()
    u = Vector()

    def step(self, x: Any, h: Any) -> Any:
        return tanh(self.weight_ih(x) + self.u * h)


class Leaky(Cell):
    """A neuron that reads the input of its unit: nothing is multiplied by a matrix."""

    beta = Scalar(initial=0.4)
    threshold = Vector(initial=0.5)

    def step(self, x: Any, spike: Any, m: Any) -> Any:
        m = exp(-self.beta * self.beta) * m + x - self.threshold * spike
        return sigmoid(3 * (m - self.threshold)), m


class Elementwise(Cell):
    """The input is read elementwise and multiplied; the output is a state that nothing reads."""

    weight_ih = Input(bias=False)
    weight_hh = Hidden()

    def step(self, x: Any, y: Any, h: Any, before: Any) -> Any:
        a = tanh(self.weight_ih(x) + self.weight_hh(h) * x)
        return a * x + before, a, h


class Spiking(Cell):
    """Neurons with an option, whose spikes have a derivative of their own."""

    weight_ih = Input()
    weight_hh = Hidden(bias=False)
    decay = Constant(0.9)
    spike = surrogate(lambda a: a > 0, lambda a: 1 / (1 + 9 * a * a))

    def step(self, x: Any, spikes: Any, m: Any) -> Any:
        m = self.decay * m + self.weight_ih(x) + self.weight_hh(spikes) - spikes
        return self.spike(m - 0.2), m


class Normalised(Cell):
    """Sums over units, and a maximum, of which there are no kernels for CUDA yet."""

    weight_ih = Input("g", "n")
    weight_hh = Hidden("g", "n")
    scale = Vector(initial=1)

    def step(self, x: Any, h: Any) -> Any:
        g = softmax(self.weight_ih.g(x) + self.weight_hh.g(h))
        a = self.weight_ih.n(x) + self.weight_hh.n(g * h)
        return h + g * (tanh(layer_norm(a, self.scale, eps=0.1)) - h)


class ByHeads(Cell):
    """Matrices with two heads, one of them also as its transpose, and a product of rank 2."""

    weight_ih = Input("a", "b")
    weight_hh = Hidden("a", "b", heads=2)
    inner = Hidden(heads=2)
    down = Hidden(rows=2, bias=False)
    up = Hidden(cols=2)

    def step(self, x: Any, h: Any) -> Any:
        a = tanh(self.weight_ih.a(x) + self.weight_hh.a(h) + self.inner.T(h))
        b = sigmoid(self.weight_ih.b(x) + self.weight_hh.b(a * h) + self.up(self.down(h)))
        return h + b * (tanh(self.inner(a)) - h)


class Faded(Cell):
    """Gradients die within a few steps."""

    weight_ih = Input()
    weight_hh = Hidden()
    drive = Given()

    def step(self, x: Any, h: Any) -> Any:
        return self.drive * tanh(self.weight_ih(x) + self.weight_hh(h)) * 1e-3


class Masked(Cell):
    """Two masks: of each step, and of a sequence."""

    weight_ih = Input()
    weight_hh = Hidden()
    once = Mask(0.6, per="sequence")
    keep = Mask(0.25, scaled=False)

    def step(self, x: Any, h: Any) -> Any:
        return h + self.keep * (tanh(self.weight_ih(x) + self.weight_hh(self.once * h)) - h)


class Driven(Cell):
    """Further inputs, read elementwise and multiplied, and a mask; a GPU has no kernels for it."""

    weight_ih = Input("f", "n")
    weight_hh = Hidden("f", "n")
    drive = Given()
    clock = Given()
    drop = Mask(0.4, scaled=False)

    def step(self, x: Any, h: Any, c: Any) -> Any:
        f = sigmoid(self.weight_ih.f(x) + self.weight_hh.f(self.drive * h) - self.clock)
        n = tanh(self.weight_ih.n(x) + self.weight_hh.n(self.drive))
        c = c + self.drop * (f * n - c) * self.clock
        return f * tanh(c + self.drive * self.drive), c


class Unread(Driven):
    """A step that reads further inputs alone, and so no layer below."""

    weight_ih = None

    def step(self, x: Any, h: Any, c: Any) -> Any:
        f = sigmoid(self.weight_hh.f(self.drive * h) - self.clock)
        c = c + self.drop * (f * tanh(self.weight_hh.n(self.drive)) - c)
        return f * tanh(c), c


class Begun(Cell):
    """The second of two states begins with a parameter; steps read their number."""

    weight_ih = Input("f", "n")
    weight_hh = Hidden("f", "n")
    begin = Initial("c")
    place = StepNumber()

    def step(self, x: Any, h: Any, c: Any) -> Any:
        f = sigmoid(self.weight_ih.f(x) + self.weight_hh.f(h))
        c = f * c + (1 - f) * tanh(self.weight_ih.n(x) + self.weight_hh.n(h))
        return tanh(c + 0.3 * self.place), c


class Narrow(Cell):
    """The first of two states has two numbers."""

    h = State(2)
    weight_ih = Input("f", "n")
    weight_hh = Hidden("f", "n", cols=2)
    weight_hr = Hidden(rows=2, bias=False)

    def step(self, x: Any, h: Any, c: Any) -> Any:
        f = sigmoid(self.weight_ih.f(x) + self.weight_hh.f(h))
        c = f * c + (1 - f) * tanh(self.weight_ih.n(x) + self.weight_hh.n(h))
        return tanh(self.weight_hr(c)) + 0.5 * h, c


CELLS: dict[str, type[Cell]] = {
    each.__name__: each for each in (MGU, PeepholeLSTM, Tied, SCRN, Diagonal, Leaky, Elementwise)
}


def program_of(name: str) -> CellProgram:
    """Return the program of one of these cells, or of PyTorch's."""
    if name in CELLS:
        return CELLS[name](1, 1).program
    cell = {"GRU": GRUCell, "LSTM": LSTMCell}.get(name, RNNCell)
    options = {"nonlinearity": "relu"} if name == "relu" else {}
    return cell(1, 1, **options).program
