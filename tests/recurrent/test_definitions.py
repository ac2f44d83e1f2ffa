"""Definitions of cells: what is refused, with the line and what to write, and what they may say."""

from __future__ import annotations

import copy
import cProfile
import gc
import linecache
import math
import pickle
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from program_runs import evaluate

from sparsescan import InputError, InputTypeError
from sparsescan.graph.functions import (
    absolute,
    elu,
    hardsigmoid,
    hardtanh,
    leaky_relu,
    maximum,
    minimum,
    silu,
    softsign,
    tanh,
    where,
)
from sparsescan.graph.operations import Node, number, symbol
from sparsescan.recurrent import (
    Cell,
    Choice,
    Constant,
    Hidden,
    Input,
    Scalar,
    Vector,
    relu,
    sigmoid,
    softplus,
    stop_gradient,
    surrogate,
)
from sparsescan.recurrent.catalogue import sLSTM
from sparsescan.recurrent.definition import FORMER_FUNCTIONS
from sparsescan.recurrent.program import INPUT, analyse

HEADER = """\
import functools, math, random
import numpy as np
import torch
from sparsescan.graph.functions import *
from sparsescan.recurrent import *

"""
_made = iter(range(1 << 62))


def define(source: str) -> Any:
    """Return the class `C` of some text, whose lines error messages show."""
    path = f"cells_{next(_made)}.py"
    text = HEADER + textwrap.dedent(source)
    linecache.cache[path] = len(text), None, text.splitlines(keepends=True), path
    namespace: dict[str, Any] = {"__name__": "cells"}
    try:
        exec(compile(text, path, "exec"), namespace)
    finally:
        del linecache.cache[path]
    return namespace["C"]


def define_step(body: str) -> Any:
    """Return a class with all kinds of declarations, and a step of one state."""
    lines = textwrap.indent(textwrap.dedent(body).strip(), " " * 8)
    return define(f"""\
class C(Cell):
    weight_ih = Input("a", "b")
    weight_hh = Hidden()
    gates = Hidden("a", "b")
    u = Vector()
    p = Vector("i", "f")
    alpha = Scalar(1.0)
    dt, _trains_all = Constant(2.0), False
    act = Choice("tanh", "relu")
    reset = Choice("zero", "subtract")

    def helper(self, a):
        return a

    def step(self, x, h):
{lines}
""")


# -- What cannot be traced ------------------------------------------------------------------------

# Each line, what the message says that it has, and what to write instead.
BRANCH = "a branch on a number", "where(condition, a, b)"
NUMPY = "a call of NumPy", "tanh(a)"
TORCH = "a call of PyTorch", "tanh(a)"
CONVERSION = "a conversion to a number", "others of sparsescan.recurrent"
UNITS = ", which is over units", "or softmax, logsumexp, layer_norm"
INDEX = "an index of a unit", "elementwise operations"
LOOP = "a loop over units", "one matrix with several gates"
POWER = "the exponent", "np.exp(exponent * np.log(base))"
EQUAL = "a comparison by == or !=", "(a >= b) * (a <= b)"
BITS = "& or |, ^, ~", "a * b for both of two conditions"
INTEGERS = "an operation of integers", "+ - * /"
OTHER = "among vectors", "vectors and numbers"
REFUSED = {
    "return h if h > 0 else x": BRANCH,
    "return h and x": BRANCH,
    "return not h": BRANCH,
    "return max(h, 0)": BRANCH,
    "return h * (0 < h < 1)": BRANCH,
    "assert (h > 0).all": ("the attribute 'all', which is over units", "np.sum(a), np.mean(a)"),
    "while h > 0: h = h - 1": BRANCH,
    "return np.cbrt(h)": NUMPY,
    "return np.where(h > 0)": NUMPY,
    "return np.clip(h, 0, None)": OTHER,
    "return np.clip(h, 0, 1, out=h)": NUMPY,
    "return np.tanh(h, where=h > 0)": NUMPY,
    "return np.maximum(h, np.ones(3))": NUMPY,
    "return np.where(h > 0, np.ones(3), h)": OTHER,
    "return np.stack([h, x])": NUMPY,
    "return np.add.reduce(h)": ("numpy.add.reduce", "np.sum(a), np.mean(a)"),
    "return torch.softmax(h, -1)": UNITS,
    "return torch.nn.functional.layer_norm(h, (4,))": UNITS,
    "return h / h.norm()": UNITS,
    "return np.add(h, 1, out=np.ones(3))": NUMPY,
    "return np.ones(3) * h": NUMPY,
    "return np.asarray(h)": NUMPY,
    "return np.float64(2) ** h": NUMPY,
    "return h @ np.ones(3)": ("@", "W = Hidden(), and calls: self.W(a)"),
    "return np.ones((3, 3)) @ h": ("@", "W = Hidden(), and calls: self.W(a)"),
    "return h.sum(0)": ("sum with arguments other than axis=-1", "sum(a)"),
    "return h + x.mean()": ("the mean of the input", "it in the inputs"),
    "return h @ x": ("@ of two vectors", "np.sum(a), np.mean(a)"),
    "return torch.tanh(h)": TORCH,
    "return torch.nn.functional.relu(h)": TORCH,
    "return torch.where(h > 0, h, x)": TORCH,
    "return torch.stack([h, x])": TORCH,
    "return math.tanh(h)": CONVERSION,
    "return float(h)": CONVERSION,
    "return round(h)": CONVERSION,
    "return math.floor(h)": CONVERSION,
    "return complex(h)": CONVERSION,
    "return [h, x][h > 0]": CONVERSION,
    "return range(h)": CONVERSION,
    "return np.take(h, 0)": NUMPY,
    "return h[np.argmax(h)]": UNITS,
    "return h[0]": INDEX,
    "return h[1:]": INDEX,
    "return x[..., None]": INDEX,
    "h[0] = 1": INDEX,
    "del h[0]": INDEX,
    "return sum(h)": LOOP,
    "for a in h: pass": LOOP,
    "a, b = h": LOOP,
    "return 1 in h": LOOP,
    "return list(map(tanh, h))": LOOP,
    "return len(h)": ("the length of a vector", "elementwise operations"),
    "return h.sigmoid()": ("the attribute 'sigmoid'", "sigmoid(a)"),
    "return h.tanh()": ("the attribute 'tanh'", "np.tanh"),
    "return h.clip(0, 1)": ("the attribute 'clip'", "np.tanh(a), or sigmoid(a)"),
    "return h.T": ("the attribute 'T'", "tanh(a)"),
    "return h ** 1.5": POWER,
    "return h ** 17": POWER,
    "return h ** -0.5": POWER,
    "return h ** h": POWER,
    "return h ** math.nan": POWER,
    "return h ** 'a'": POWER,
    "return 2 ** h": ("a number to the power of a vector", "exp(vector * math.log(base))"),
    "return where(h == 0, x, h)": EQUAL,
    "return where(h != x, x, h)": EQUAL,
    "return 1.0 * (h in (x, 1))": EQUAL,
    "return where((h > 0) & (h < 1), 0, 1)": BITS,
    "return where(True | (h < 1), 0, 1)": BITS,
    "return where(~(h > 0), 0, 1)": BITS,
    "return h % 2": ("%", "where(a >= b, a - b, a) to take b off once"),
    "return 2 % h": ("%", "where(a >= b, a - b, a) to take b off once"),
    "return 2 // h": INTEGERS,
    "return divmod(h, 2)": INTEGERS,
    "return h << 1": INTEGERS,
    "return self.u(h)": ("a call of a vector", "a product, a * b"),
    "return self.alpha(h)": ("a call of a vector", "a product, a * b"),
    "return f'{h:.2f}'": ("a text of a number", ""),
    "return h + 'a'": ("'a' among vectors", "vectors and numbers"),
    "return None * h": ("None among vectors", "vectors and numbers"),
    "return h + [1, 2]": OTHER,
    "return h + np.ones(3)": OTHER,
    "return torch.ones(3) * h": OTHER,
    "return h + 1j": OTHER,
    "return 10**400 * h": OTHER,
    "return h + self": ("self among vectors", "vectors and numbers"),
    "return tanh('a')": OTHER,
    "return tanh(self.act)": OTHER,
    "return self.reset(h)": ("a call of 'zero', which is no function", "if … == 'zero'"),
    "return h + self.weight_hh": ("self.weight_hh among vectors", "vectors and numbers"),
    "return self.p * h": ("vectors of 1 and of 2 times as many numbers", "of one length"),
    "return self.gates.a + h": ("self.gates.a among vectors", "vectors and numbers"),
    "return h + self.weight_hh.T": ("self.weight_hh.T among vectors", "vectors and numbers"),
    "return self.weight_hh @ h": ("@", "a call, self.weight_hh(a)"),
    "return h @ self.weight_hh": ("@", "self.weight_hh(a), or self.weight_hh.T(a) for its"),
    "return h @ self.weight_hh.T": ("@", "a call, self.weight_hh(a)"),
    "return self.weight_hh.T @ h": ("@", "a call, self.weight_hh.T(a)"),
    "return self.weight_ih @ x": ("@", "a call, self.weight_ih.a(a)"),
    "return x @ self.weight_ih.b": ("@", "a call, self.weight_ih.b(a)"),
    "return self.gates(np.concatenate([h, h]))": (
        "a product of gates with 2 vectors of units",
        "a product with each, self.gates.a(…) + self.gates.b(…)",
    ),
    "return self.gates(h) + h": ("vectors of 1 and of 2 times as many numbers", "of one length"),
    "return np.split(h, 2)[0]": ("a split, into 2, of 1 times", "np.split(a, n)"),
    "return np.split(self.gates(h), 3)[0]": ("a split, into 3, of 2 times", "np.split(a, n)"),
    "return np.split(self.gates(h), [1])[0]": ("a split, into [1], of 2", "np.split(a, n)"),
    "return np.split(self.gates(h), 2, 1)[0]": ("a split, into 2, of 2", "np.split(a, n)"),
    "return np.split(np.concatenate([h, 1.0]), 2)[0]": (
        "a concatenation of numbers",
        "np.concatenate([a, b])",
    ),
    "return np.split(np.concatenate([h, h], dtype=float), 2)[0]": (
        "a concatenation of numbers, or with other arguments",
        "np.concatenate([a, b])",
    ),
    "return np.split(np.concatenate([h, h]).mean(heads=2), 2)[0]": (
        "the mean of heads of 2 vectors",
        "it for each of them",
    ),
    "return h[:2]": ("an index of a unit", "a Hidden(cols=n) multiplies the first n units"),
    "return self.gates.c(h)": ("the gate 'c' of gates", "one of its gates: a, b"),
    "return self.p.o * h": ("the gate 'o' of p", "one of its gates: i, f"),
    "return self.weight_hh.a(h)": ("the gate 'a' of weight_hh", "one of its gates: T"),
    "return self.gates.T(h)": ("the gate 'T' of gates", "one of its gates: a, b"),
    "return self.weight_ih.a(h)": ("a product of weight_ih, an Input,", "a Hidden for it"),
    "return self.weight_ih.b(2 * x)": ("a product of weight_ih, an Input,", "a Hidden for it"),
    "return self.weight_hh(2.0)": ("a product of weight_hh with 2.0", "a vector of units"),
    "return self.nothing * h": ("self.nothing, which C does not declare", "Constant(…), Choice"),
    "return self.hidden_size * h": ("self.hidden_size, which C does not", "Constant(…), Choice"),
    "return self.bias_hh + h": ("self.bias_hh, a bias", "products, which add the biases"),
    "return self.bias_ih + h": ("self.bias_ih, a bias", "products, which add the biases"),
    "self.cache = h": ("an assignment to self.cache", "a local variable, or another state"),
    "self.u = h": ("an assignment to self.u", "a local variable, or another state"),
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_traced_is_refused(line: str) -> None:
    what, instead = REFUSED[line]
    with pytest.raises(InputTypeError, match="which cannot be traced") as caught:
        define_step(f"{line}\nreturn h")
    message = str(caught.value)
    assert f"{line!r} has " in message
    number_of_line = HEADER.count("\n") + 16
    assert message.startswith("cells_")
    assert f".py, line {number_of_line}: " in message
    found, _, rest = message.partition(", which cannot be traced")
    assert what in found
    assert instead in rest.partition("; write ")[2]


def test_the_line_is_that_of_a_helper() -> None:
    with pytest.raises(InputTypeError, match=r"line 12: 'return max\(a, 0\)' has a branch"):
        define("""\
            def positive(a):

                return 0.0 + other(a)

            def other(a):
                return max(a, 0)

            class C(Cell):
                def step(self, x, h):
                    return positive(h)
        """)


def test_vectors_of_other_code_are_compared_and_kept() -> None:
    """Only a step may not ask whether symbols are equal."""
    a, b = symbol("state", 0), symbol("state", 1)
    assert a == symbol("state", 0)
    assert a != b
    assert [b, a].index(a) == 1
    with pytest.raises(InputTypeError):
        define_step("return 1.0 * (h == x)")
    assert a != b


@pytest.mark.parametrize(
    ("line", "message"),
    {
        "return h, x": "returns 2 states and takes 1; expected as many, in the same order",
        "return ()": "returns 0 states and takes 1",
        "return None": "returns None; expected vectors of units",
        "pass": "returns None; expected vectors of units",
        "return 'a'": "returns 'a'; expected vectors of units",
        "return {'h': h}": r"returns \{'h': state\(0\)\}; expected vectors of units",
        "return self.weight_hh": r"returns self\.weight_hh; expected vectors of units",
        "return self.gates(h)": r"returns joined\(.*; expected vectors of units, one for each",
        "return self.p": r"returns self\.p; expected vectors of units",
        "return self.gates.b": r"returns self\.gates\.b; expected vectors of units",
        "yield h": "returns <generator object .*; expected vectors of units",
    }.items(),
)
def test_what_a_step_returns(line: str, message: str) -> None:
    with pytest.raises(InputTypeError, match=rf"C\.step \(cells_\d+\.py, line 21\) {message}"):
        define_step(line)


def test_a_sum_of_the_input_reads_a_number_for_each_unit() -> None:
    """No other number of the step is one of the input."""
    drawn = define("""\
        class C(Cell):
            weight_hh = Hidden()

            def step(self, x, h):
                return np.tanh(np.mean(x + h) - self.weight_hh(h))
    """)
    with pytest.raises(InputError, match="input_size is 3 and hidden_size 8; expected equal ones"):
        drawn(3, 8)


def test_errors_of_a_step_stay_what_they_are() -> None:
    with pytest.raises(ZeroDivisionError):
        define_step("return h * (1 / 0)")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'b'"):
        define_step("return where(h > 0, h)")


@pytest.mark.parametrize(
    "step",
    [
        "def step(self): return 1",
        "def step(self, x): return x",
        "def step(self, x, h, *, k): return h",
        "def step(self, x, h, k=2): return h",
        "def step(self, x, h, **rest): return h",
        "def step(self, *rest): return rest[1:]",
        "step = staticmethod(lambda x, h: h)",
        "step = classmethod(lambda cls, x, h: h)",
        "step = functools.partial(lambda self, x, h: h, 3)",
        "step = 3",
    ],
)
def test_what_is_no_step(step: str) -> None:
    with pytest.raises(InputTypeError, match=r"C\.step is .*; expected a method step\(self, x, h"):
        define(f"class C(Cell):\n    {step}\n")


@pytest.mark.parametrize("states", ["", "states = 0", "states = -1", "states = 2.0", "states = ''"])
def test_how_many_states_must_be_said(states: str) -> None:
    with pytest.raises(InputTypeError, match=r"C\.states is .*; expected the number of states"):
        define(f"class C(Cell):\n    {states}\n    def step(self, x, *states): return states\n")


def test_any_number_of_states() -> None:
    class Delayed(Cell):
        weight_hh = Hidden()
        delay = Constant(1)

        @property
        def states(self) -> int:
            return 1 + int(self.delay)

        def step(self, x, h, *delayed):
            return tanh(self.weight_hh(delayed[-1])), h, *delayed[:-1]

    assert Delayed(2, 3).state_size == 6
    assert Delayed(2, 3, delay=4).program.states == 5
    assert Delayed(2, 3, delay=4).state_size == 15
    assert Delayed(2, 3).program.states == 2


# -- What is not refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "other"),
    {
        "return np.float64(0.5) * h": "return 0.5 * h",
        "return np.sqrt(2) + h": "return math.sqrt(2) + h",
        "return np.float32(2) - h": "return 2 - h",
        "return np.int64(2) / h": "return 2 / h",
        "return 1.0 * (np.float64(2) < h)": "return 1.0 * (2 < h)",
        "return 1.0 * (np.float64(2) >= h)": "return 1.0 * (2 >= h)",
        "return np.array(2.0) * h": "return 2 * h",
        "return torch.tensor(2.0) * h": "return 2 * h",
        "return h * np.pi": "return math.pi * 1 * h if False else h * math.pi",
        "return h + True": "return h + 1",
        "return [h]": "return h",
        "return abs(h)": "return absolute(h)",
        "return +h": "return h",
        "return sum([h, x])": "return h + x",
        "h += 1; h *= 2; return h": "return (h + 1) * 2",
        "return 1 < h": "return h > 1",
        "return 1 <= h": "return h >= 1",
        "return h ** 0.5": "return sqrt(h)",
        **{
            f"return np.{name}(h)": f"return {name}(h)"
            for name in ("absolute", "cos", "exp", "expm1", "log", "sin", "sqrt", "tanh")
        },
        **{
            f"return np.{name}(1, h)": f"return {name}(1, h)"
            for name in ("arctan2", "maximum", "minimum")
        },
        "return np.where(h > 0, np.float32(2), h)": "return where(h > 0, 2, h)",
        "return np.where(1, h, x)": "return h",
        "return np.clip(h, -1, 1)": "return hardtanh(h)",
        "return np.maximum(np.float64(0), h)": "return maximum(0, h)",
        **{
            f"a = h; return {instead}": f"return {name}(h)"
            for name, instead in FORMER_FUNCTIONS.items()
            if name in ("elu", "hardtanh", "leaky_relu", "silu", "softsign")
        },
        "return np.mean(h)": "return h.mean(-1)",
        "return np.sum(h, axis=-1, keepdims=True)": "return h.sum()",
        "return np.linalg.norm(h)": "a = (h * h).sum(); z = a <= 0; "
        "return np.where(z, 0, np.sqrt(np.where(z, 1, a)))",
        "return h ** -2": "return 1 / (h * h)",
        "return h ** 5.0": "return h * ((h * h) * (h * h))",
        "return h ** 0 * x": "return x",
        "return h - -x": "return h + x",
        "return -h + x": "return x - h",
        "return -h * -x": "return h * x",
        "return -1 * h": "return -h",
        "return self.weight_hh(h ** 0)": "return self.weight_hh(tanh(0) + 1)",
        "return h / 1 + 0": "return h",
        "return where(h > 0, x, x)": "return x",
        "return self.helper(h)": "return h",
        "return self.act(h)": "return tanh(h)",
        "return identity(h)": "return h",
        "return h if self.reset == 'zero' else x": "return h",
        "return h if self.act == 'relu' else x": "return x",
        "return {h: x}[h]": "return x",
    }.items(),
)
def test_texts_that_mean_the_same(line: str, other: str) -> None:
    """Two texts of one graph have one graph."""
    assert define_step(line)(3, 3).program.outputs == define_step(other)(3, 3).program.outputs


def test_a_step_may_branch_on_options_and_loop_over_gates() -> None:
    class Looped(Cell):
        gates = Hidden("a", "b", "c")
        depth = Constant(2)
        act = Choice("tanh", "relu")

        def step(self, x, h):
            for _ in range(int(self.depth)):
                h = self.act(h)
            for gate in "abc":
                h = h + getattr(self.gates, gate)(h) if self.depth > 1 else h
            return h

    assert len(Looped(2, 3).program.slots) == 3
    assert not Looped(2, 3, depth=1).program.slots
    assert Looped(2, 3, depth=1).program.outputs[0].operation == "tanh"
    assert Looped(2, 3, depth=1, act="relu").program.outputs[0].operation == "relu"


# -- Declarations ---------------------------------------------------------------------------------


def shapes(cell: Cell) -> dict[str, tuple[int, ...]]:
    return {name: each.shape for name, each in cell.params.items()}


def test_parameters_are_in_the_order_of_pytorch() -> None:
    class Everything(Cell):
        _trains_all = False
        weight_ih = Input("r", "z", "n")
        alpha = Scalar(0.25)
        weight_hh = Hidden("r", "z", bias=("z",))
        kernel = Input(bias=False)
        u = Vector("i", "f", initial=0.5)
        inner = Hidden()

        def step(self, x, h):
            return h

    cell = Everything(3, 4)
    assert list(shapes(cell).items()) == [
        ("weight_ih", (12, 3)),
        ("alpha", ()),
        ("weight_hh", (8, 4)),
        ("kernel", (4, 3)),
        ("u", (8,)),
        ("inner", (4, 4)),
        ("bias_ih", (12,)),
        ("bias_hh", (4,)),
        ("inner_bias", (4,)),
    ]
    assert cell.alpha == 0.25
    assert cell.alpha.dtype == np.float32
    assert (cell.u == 0.5).all()
    assert abs(cell.weight_ih).max() <= 0.5
    assert cell.bias_hh is cell.params["bias_hh"]
    without = Everything(3, 4, bias=False)
    assert not any("bias" in name for name in without.parameter_names)
    assert without.bias_ih is None
    with pytest.raises(InputError, match="bias_ih cannot be set"):
        without.bias_ih = np.zeros(12)
    with pytest.raises(InputError, match=r"weight_hh is set to an array of shape \(3,\)"):
        cell.weight_hh = np.zeros(3)


@pytest.mark.parametrize(
    ("declaration", "message"),
    {
        "Vector('1')": "a gate is '1'; expected a name",
        "Vector('T')": "a gate is 'T'; expected a name",
        "Vector('if')": "a gate is 'if'; expected a name",
        "Hidden('_a')": "a gate is '_a'; expected a name",
        "Input(2)": "a gate is 2; expected a name",
        "Hidden('a', 'b', 'a')": r"gates are \('a', 'b', 'a'\); expected different names",
        "Hidden('a', 'b', bias='a')": "bias is 'a'; expected True, False or some of",
        "Hidden('a', 'b', bias=('c',))": r"bias is \('c',\); expected True, False or some of",
        "Hidden(bias=1)": "bias is 1; expected True, False or some of",
        "Input('a', bias=[[]])": r"bias is \[\[\]\]; expected True, False or some of",
        "Choice()": r"choices are \(\); expected names",
        "Choice('tanh', 3)": r"choices are \('tanh', 3\); expected names",
        "Choice('tanh', 'where')": "a choice is 'where'; expected 'absolute', .* or 'tanh'",
    }.items(),
)
def test_wrong_declarations(declaration: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        define(f"class C(Cell):\n    a = {declaration}\n    def step(self, x, h): return h")


@pytest.mark.parametrize(
    ("declarations", "step", "unused"),
    [
        ("h0 = Vector()", "return tanh(self.u * h + x)", "self.h0"),
        ("h0 = Vector()\n    def initial(self): return self.h0", "return self.u * h", "self.h0"),
        ("s = Scalar(1.0); w = Hidden()", "return self.u * h", "self.s, self.w"),
        ("b = Vector(is_bias=True)", "return self.u * h", "self.b"),
        ("w = Input('f', 'n')", "return self.u * h + self.w.n(x)", "self.w.f"),
        ("v = Vector('f', 'n')", "return self.u * h + self.v.f", "self.v.n"),
        ("w = Hidden()", "return self.u * h + self.w.T(h)", "the bias of self.w.T"),
        (
            "k = Choice('a', 'b'); v = Vector(); w = Vector()",
            "return self.u * h * (self.v if self.k == 'b' else 1)",
            "self.w",
        ),
        ("w = Hidden()", "self.w(h); return self.u * h", "self.w"),
        ("m = Given(); n = Mask(0.5)", "return self.u * h", "self.m, self.n"),
    ],
)
def test_what_a_step_never_uses_is_named(declarations: str, step: str, unused: str) -> None:
    source = f"""\
class C(Cell):
    u = Vector()
    {declarations}

    def step(self, x, h):
        {step}
"""
    with pytest.raises(
        InputError, match=rf"C.step \(cells_\d+.py, line \d+\) never uses {unused}( \(|:)"
    ):
        define(source)


@pytest.mark.parametrize("value", ["'a'", "None", "math.inf", "math.nan", "10**400", "1j", "[1.0]"])
@pytest.mark.parametrize("kind", ["Constant(", "Scalar(", "Vector(initial="])
def test_numbers_are_finite(kind: str, value: str) -> None:
    if kind.startswith("Vector") and value == "None":
        return
    name = "k" if kind == "Constant(" else "initial"
    with pytest.raises(InputTypeError, match=f"{name} is .*; expected a finite number"):
        define(f"class C(Cell):\n    k = {kind}{value})\n    def step(self, x, h): return h")


@pytest.mark.parametrize(
    ("declarations", "message"),
    {
        "a = b = Hidden()": r"C\.a is b, too; expected a declaration of its own",
        "a = b = Constant(1.0)": r"C\.a is b, too; expected a declaration of its own",
        "weight_a = Input(); bias_a = Vector()": r"C\.bias_a has the name of the bias of weight_a",
        "a_bias = Constant(1.0); a = Hidden()": r"C\.a_bias has the name of the bias of a; ",
        "weight_a = Input(); bias_a = 3": r"C\.bias_a has the name of the bias of weight_a; ",
        "bias = Vector()": r"C\.bias has a name that cells use themselves; expected another",
        "forward = Vector()": r"C\.forward has a name that cells use",
        "params = Constant(1.0)": r"C\.params has a name that cells use",
        "hidden_size = Constant(1)": r"C\.hidden_size has a name that cells use",
        "state_size = Scalar(1)": r"C\.state_size has a name that cells use",
        "options = Choice('tanh')": r"C\.options has a name that cells use",
        "rng = Constant(1.0)": r"C\.rng has a name that cells use",
        "dtype = Constant(1.0)": r"C\.dtype has a name that cells use",
        "pattern = Hidden()": r"C\.pattern has a name that cells use",
        "lengths = Given()": r"C\.lengths has a name that cells use",
        "dropout = Mask(0.5)": r"C\.dropout has a name that cells use",
        "a = Hidden(); a_mask = Constant(1.0)": r"C\.a_mask has a name that cells use",
    }.items(),
)
def test_names_that_are_taken(declarations: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        define(f"class C(Cell):\n    {declarations}\n    def step(self, x, h): return h")


@pytest.mark.parametrize(
    ("declarations", "step", "message"),
    [
        ("a = Initial('y')", "h, c): return h, c", r"C\.a is Initial\('y'\); .* step, h, c"),
        ("a = Initial()", "h, c): return h, c", r"C\.a is Initial\(\); .* of the step, h, c"),
        ("a = Initial()", "*h): return h\n    states = 2", r"C\.a is Initial\(\); expected names"),
        (
            "a = Initial(); b = Initial('h')",
            "h): return h",
            "C has two Initial for h; expected one",
        ),
        (
            "a = Initial()",
            "h): return h + self.a",
            r"self\.a, a declaration of states, which .* the state, an argument of the step",
        ),
    ],
)
def test_initial_states_that_cannot_be(declarations: str, step: str, message: str) -> None:
    with pytest.raises((InputError, InputTypeError), match=f"(?s){message}"):
        define(f"class C(Cell):\n    {declarations}\n    def step(self, x, {step}")


@pytest.mark.parametrize(
    ("declarations", "step", "message"),
    [
        ("h = State(2)", "h): return 0.5 * h + self.w(x)", "C.h is a State of 2 .* behind them; "),
        ("h = State(2)", "h): return self.r(self.w(x)) + 1", "C.h is a State of 2 .* behind them"),
        ("h = State(1)", "h): return self.r(self.w(x))", "C.h is a State of 1 .* behind them"),
        ("a = State(2)", "h): return self.r(self.w(x))", "C.a is a State; .* of the step among: h"),
        ("h = State(-1)", "h): return self.r(self.w(x))", "size is -1; expected"),
        (
            "h = State(2); b = Initial('h')",
            "h): return self.r(self.w(x))",
            "C.h is a State, and begins with a parameter",
        ),
        ("h = State(2)", "h): return self.r(self.w(x)) + 0 * self.h", "self.h, a declaration of"),
        ("h = State(k)", "h): return h", "size of h is a Constant that the class does not declare"),
    ],
)
def test_states_that_cannot_be_shorter(declarations: str, step: str, message: str) -> None:
    source = f"""\
k = Constant(2)
class C(Cell):
    w, r = Input(), Hidden(rows=2, bias=False)
    {declarations}
    def step(self, x, {step}
"""
    with pytest.raises((InputError, InputTypeError), match=f"(?s){message}"):
        define(source)


def test_a_state_is_shorter_if_what_is_returned_is() -> None:
    source = """\
class C(Cell):
    _trains_all = False
    size = Constant(3)
    h, c = State(size), State(2)
    w, v, r = Input(), Vector(), Hidden(rows=size, bias=False)
    up = Hidden(cols=2)
    def step(self, x, h, c, n):
        h = np.where(x > 0.3, h, np.tanh(self.r(self.w(x))) * self.v) - abs(0.5 * h)
        return h / (1 + n * n), 2 * self.up.T(n) + c * h, n + h
"""
    cell = define(source)(8, 8, size=4)
    output, state = cell.training_step().forward(np.ones((3, 5, 8), np.float32))
    assert (output.shape, state.shape) == ((3, 5, 4), (1, 5, 14))
    with pytest.raises(InputError, match="hidden_size is 1; expected at least"):
        define(source)(1, 1)


# -- Options --------------------------------------------------------------------------------------


class Optional(Cell):
    weight_hh = Hidden()
    dt = Constant(1.0)
    act = Choice("tanh", "relu", "identity")

    def step(self, x, h):
        return h + self.dt * self.act(self.weight_hh(h))


def test_options_are_checked() -> None:
    cell = Optional(2, 3, dt=0.5, act="relu")
    assert (cell.dt, cell.act) == (0.5, "relu")
    assert Optional(2, 3).act == "tanh"
    for value in ("1", None, math.nan, np.ones(2), 1j):
        with pytest.raises(InputTypeError, match=r"dt is .*; expected a finite number"):
            Optional(2, 3, dt=value)
    for value in ("sigmoid", 1, None, tanh):
        with pytest.raises(InputError, match=r"act is .*; expected 'tanh', 'relu' or 'identity'"):
            Optional(2, 3, act=value)
    with pytest.raises(InputTypeError, match=r"has no argument 'td'; expected .*: dt, act"):
        Optional(2, 3, td=1.0)
    for name in ("dt", "act"):
        with pytest.raises(InputError, match=f"{name} cannot be changed after"):
            setattr(cell, name, 2.0)


def test_programs_are_made_once_for_each_options() -> None:
    assert Optional(2, 3).program is Optional(5, 7).program
    assert Optional(2, 3, dt=2).program is Optional(2, 3, dt=np.float32(2.0)).program
    assert Optional(2, 3, dt=Fraction(1, 2)).program is Optional(2, 3, dt=0.5).program
    assert Optional(2, 3, dt=0.5).program is not Optional(2, 3).program
    (output,) = Optional(2, 3, act="identity").program.outputs
    assert "tanh" not in repr(output)


def test_an_input_that_is_read_by_units_has_their_number() -> None:
    cls = define("class C(Cell):\n    def step(self, x, h): return tanh(x + h)")
    assert cls(3, 3).program.uses_input
    with pytest.raises(InputError, match="input_size is 2 and hidden_size 3; expected equal ones"):
        cls(2, 3)


def test_a_hidden_matrix_multiplies_an_input_of_its_length() -> None:
    cls = define("""\
        class C(Cell):
            w = Hidden()
            def step(self, x, h): return tanh(self.w(x) + self.w(h))
    """)
    assert len(cls(3, 3).program.slots[0].terms) == 2
    with pytest.raises(InputError, match="input_size is 2 and hidden_size 3; expected equal ones"):
        cls(2, 3)


def test_biases_of_their_own_are_those_of_cells_with_biases() -> None:
    cls = define("""\
        class C(Cell):
            weight_hh = Hidden("f", bias=False)
            bias_hh = Vector("f", "g", is_bias=True)
            b = Vector(is_bias=True)
            def step(self, x, h):
                return tanh(self.weight_hh.f(h) + self.bias_hh.f) + self.bias_hh.g * h + self.b
    """)
    assert shapes(cls(2, 3)) == {"weight_hh": (3, 3), "bias_hh": (6,), "b": (3,)}
    assert shapes(cls(2, 3, bias=False)) == {"weight_hh": (3, 3)}
    assert cls(2, 3).program.slots[0].vectors == (("bias_hh", 0),)
    assert len(cls(2, 3).program.rows) == 2
    assert not cls(2, 3, bias=False).program.slots[0].vectors
    assert not cls(2, 3, bias=False).program.rows


def test_forward_in_place_of_step_is_named() -> None:
    with pytest.raises(InputTypeError, match=r"C defines forward, which .* expected step\(self, x"):
        define("class C(Cell):\n    def forward(self, x, h): return tanh(x + h)")


def test_a_base_class_has_no_step() -> None:
    class Base(Cell):
        weight_hh = Hidden()

    for cls in (Cell, Base):
        with pytest.raises(InputTypeError, match="without a step"):
            cls(2, 3)


# -- Inheritance ----------------------------------------------------------------------------------


class Elman(Cell):
    weight_ih = Input()
    weight_hh = Hidden()
    act = Choice("tanh", "relu")

    def sums(self, x, h):
        return self.weight_ih(x) + self.weight_hh(h)

    def step(self, x, h):
        return self.act(self.sums(x, h))


def test_declarations_are_inherited() -> None:
    class Leaky(Elman):
        alpha = Scalar(0.5)

        def step(self, x, h):
            return h + self.alpha * (super().step(x, h) - h)

    class Steep(Leaky):
        act = Choice("relu", "tanh")
        weight_hh = Hidden(bias=False)

        def sums(self, x, h):
            return 2 * super().sums(x, h)

    assert list(shapes(Leaky(2, 3))) == ["weight_ih", "weight_hh", "alpha", "bias_ih", "bias_hh"]
    assert list(shapes(Steep(2, 3))) == ["weight_ih", "weight_hh", "alpha", "bias_ih"]
    assert "tanh" in repr(Leaky(2, 3).program.outputs)
    assert "relu" in repr(Steep(2, 3).program.outputs)
    assert "2.0" in repr(Steep(2, 3).program.outputs)
    assert len(Elman(2, 3).program.slots[0].terms) == 2
    assert list(shapes(Elman(2, 3))) == ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]


def test_a_declaration_is_taken_back() -> None:
    class NoInput(Elman):
        weight_ih = None

        def step(self, x, h):
            return tanh(self.weight_hh(h))

    assert list(shapes(NoInput(2, 3))) == ["weight_hh", "bias_hh"]
    with pytest.raises(InputTypeError, match="None"):

        class _Broken(Elman):
            weight_ih = None

            def sums(self, x, h):
                return self.weight_hh(h) + self.weight_ih


def test_a_class_is_defined_again() -> None:
    """Two classes of one text are two, with equal graphs, and do not need each other."""
    source = """\
        class C(Cell):
            weight_hh = Hidden()
            dt = Constant(1.0)
            def step(self, x, h): return tanh(self.dt * self.weight_hh(h))
    """
    one, other = define(source), define(source)
    assert one is not other
    assert one(2, 3).program is not other(2, 3).program
    assert one(2, 3).program.outputs == other(2, 3).program.outputs
    del one
    gc.collect()
    assert other(2, 3, dt=3.0).program.outputs != other(2, 3).program.outputs


# -- Symbols --------------------------------------------------------------------------------------

# Functions, and points at which their derivatives jump, or numbers are large.
POINTS = (-1000.0, -40.0, -3.0, -1.0, -0.0, 0.0, 1.0, 3.0, 40.0, 1000.0)
FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "tanh": (tanh, torch.tanh),
    "sigmoid": (sigmoid, torch.sigmoid),
    "softplus": (softplus, lambda a: torch.logaddexp(a, torch.zeros_like(a))),
    "silu": (silu, torch.nn.functional.silu),
    "softsign": (softsign, torch.nn.functional.softsign),
    "relu": (relu, torch.relu),
    "absolute": (absolute, torch.abs),
    "elu": (elu, torch.nn.functional.elu),
    "elu with alpha": (lambda a: elu(a, 0.3), lambda a: torch.nn.functional.elu(a, 0.3)),
    "leaky_relu": (leaky_relu, torch.nn.functional.leaky_relu),
    "hardtanh": (hardtanh, torch.nn.functional.hardtanh),
    "hardtanh with bounds": (
        lambda a: hardtanh(a, -3.0, 40.0),
        lambda a: torch.nn.functional.hardtanh(a, -3.0, 40.0),
    ),
    "hardsigmoid": (hardsigmoid, lambda a: torch.nn.functional.hardtanh(a, -3, 3) / 6 + 0.5),
    "maximum": (lambda a: maximum(a, 1), lambda a: torch.maximum(a, torch.ones_like(a))),
    "minimum": (lambda a: minimum(1, a), lambda a: torch.minimum(a, torch.ones_like(a))),
    "maximum of two": (lambda a: maximum(a, a * a), lambda a: torch.maximum(a, a * a)),
    "where": (
        lambda a: where(a >= 1, 3 * a, a * a),
        lambda a: torch.where(a >= 1, 3 * a, a * a),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_derivatives_where_they_jump_and_far_out(name: str) -> None:
    function, expected = FUNCTIONS[name]
    a = symbol("state", 0)
    program = analyse([function(a)])
    points = torch.tensor(POINTS, dtype=torch.float64, requires_grad=True)
    y = expected(points)
    (slope,) = torch.autograd.grad(y.sum(), points)
    known = {a: np.array(POINTS), symbol("gradient", 0): np.ones(len(POINTS))}
    found = evaluate(program.outputs[0], known, {})
    np.testing.assert_allclose(found, y.detach(), rtol=1e-12, atol=1e-300)
    (grad,) = program.state_grads
    assert grad is not None
    np.testing.assert_allclose(
        np.broadcast_to(evaluate(grad, known, {}), found.shape), slope, rtol=1e-12, atol=1e-17
    )


def test_equal_expressions_are_one_node() -> None:
    a, b = symbol("state", 0), symbol("state", 1)
    assert tanh(a + b) is tanh(a + b)
    assert tanh(a + b) is not tanh(b + a)
    assert number(0.0) is not number(-0.0)
    assert number(1) is number(np.float32(1))
    assert a + 0.5 * b is a + b * 0.5 or (a + 0.5 * b).arguments[1] is 0.5 * b


def test_long_expressions_are_shown_in_part() -> None:
    """One that is read twice in each of many levels would have more text than there is memory."""
    a = symbol("state", 0)
    for _ in range(60):
        a = tanh(a * a)
    assert repr(a).startswith("tanh(multiply(tanh(multiply(")
    assert "…" in repr(a)
    with pytest.raises(InputTypeError, match="the exponent tanh"):
        a**a


def test_symbols_that_nobody_holds_are_forgotten() -> None:
    def alive() -> int:
        gc.collect()
        # An isinstance would ask what a dead proxy stands for.
        return sum(issubclass(type(each), Node) for each in gc.get_objects())

    before = alive()
    define_step("return tanh(h * 0.123456) + 0.654321")
    assert alive() == before


def test_numbers_are_computed_beforehand() -> None:
    for left, right in [
        (tanh(0.5), math.tanh(0.5)),
        (maximum(1, 2) * 3, 6.0),
        (absolute(-2), 2.0),
        (-number(2), -2.0),
        (number(3) > 2, 1.0),
    ]:
        assert left is number(right)
    assert (number(1) / 0).operation == "divide"


def test_what_is_differentiated_as_something_else_is_its_value() -> None:
    a = symbol("state", 0)
    step = surrogate(lambda a: a > 0, lambda a: 1 / (1 + a * a))
    program = analyse([step(a) + stop_gradient(a * a)])
    assert repr(program.outputs[0]) == repr((a > 0) + a * a)
    (grad,) = program.state_grads
    assert grad is symbol("gradient", 0) * (1 / (1 + a * a))
    for functions in ((1, abs), (abs, None)):
        with pytest.raises(InputError, match="expected a function of one vector"):
            surrogate(*functions)


def test_pickles_and_copies() -> None:
    """A cell is pickled with its parameters and options; symbols stay one where they are again."""
    cell = Optional(2, 3, dt=0.5, weight_hh_mask=np.eye(3, dtype=bool))
    data = pickle.dumps(cell)
    assert b"operations" not in data
    for other in (pickle.loads(data), copy.deepcopy(cell), copy.copy(cell)):
        assert other.program is cell.program
        assert (other.dt, other.act) == (0.5, "tanh")
        for name, array in cell.params.items():
            assert np.array_equal(other.params[name], array)
    (output,) = cell.program.outputs
    assert pickle.loads(pickle.dumps(output)) is output
    assert copy.deepcopy(output) is output
    assert pickle.loads(pickle.dumps(INPUT)) is INPUT


def test_threads_trace_at_once() -> None:
    """Each gets what one would get alone, and the profiler of a thread stays what it was."""
    count, rounds = 8, 20
    barrier = threading.Barrier(count)

    def trace(k: int) -> list[Any]:
        found = []
        barrier.wait()
        for dt in range(1, rounds + 1):
            found.append(Optional(2, 3, dt=dt + 0.125).program)
        assert sys.getprofile() is None
        return found

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(count) as pool:
            programs = list(pool.map(trace, range(count)))
    finally:
        sys.setswitchinterval(interval)
    for same in zip(*programs, strict=True):
        assert len({each.outputs for each in same}) == 1
        assert len({id(each) for each in same}) == 1


def test_tracing_leaves_a_profiler_alone() -> None:
    calls: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        calls.append(event)

    profiler = cProfile.Profile()
    profiler.enable()
    define_step("a = tanh(self.u * h); return a")
    profiler.disable()
    sys.setprofile(profile)
    try:
        program = define_step("a = tanh(self.u * h); return a")(3, 3).program
        assert program.names[program.outputs[0]] == "a"
        assert sys.getprofile() is profile
        with pytest.raises(InputTypeError):
            define_step("return tanh(h[0])")
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert calls


def test_heads_divide_the_units() -> None:
    cell = define_step("return np.tanh(softmax(self.weight_hh(h), heads=2) + self.weight_ih.a(x))")
    assert cell(3, 4).hidden_size == 4
    with pytest.raises(
        InputError, match="hidden_size is 5; expected a multiple of 2, the heads of"
    ):
        cell(3, 5)
    with pytest.raises(InputError, match=r"heads is 0; expected"):
        define_step("return softmax(h, heads=0)")
    with pytest.raises(InputError, match="hidden_size is 6; expected a multiple of 4"):
        sLSTM(3, 6, heads=4)
    with pytest.raises(InputTypeError, match=r"heads is 2.5; expected an integer"):
        sLSTM(3, 6, heads=2.5)
    with pytest.raises(InputError, match=r"heads is 0; expected at least 1"):
        Hidden(heads=0)
    with pytest.raises(InputError, match=r"rows is 3 and bias True; expected bias=False"):
        Hidden(rows=3)
    with pytest.raises(InputError, match="heads is 2, rows 0 and cols 3; expected heads, or rows"):
        Hidden(heads=2, cols=3)
    with pytest.raises(InputError, match="heads of weight_hh is a Constant that"):

        class Foreign(Cell):
            weight_hh = Hidden(heads=Constant(2))

            def step(self, x: Any, h: Any) -> Any:
                return self.weight_hh(h)


class _Gated(Cell):
    weight_ih, weight_hh = Input("i", "f", "g"), Hidden("i", "f", "g")
    scale = Vector("i", "f", "g", initial=1)

    def step(self, x: Any, h: Any) -> Any:
        i, f, g = (
            sigmoid((getattr(self.weight_ih, k)(x) + getattr(self.weight_hh, k)(h)) * scale)
            for k, scale in (("i", self.scale.i), ("f", self.scale.f), ("g", self.scale.g))
        )
        return f * h + i * g


class _Split(_Gated):
    def step(self, x: Any, h: Any) -> Any:
        whole = sigmoid((self.weight_ih(x) + self.weight_hh(h)) * self.scale)
        first, g = np.split(np.concatenate([whole, h]), 2)
        (i, f), (g, _) = np.split(first, np.int64(2)), np.split(g, indices_or_sections=2, axis=-1)
        return f * h + i * g


def test_gates_together_are_computed_one_by_one() -> None:
    """A vector of all gates, and its parts, are those of the gates' own products."""
    assert _Split.program_of({}).outputs == _Gated.program_of({}).outputs


class _Reduced(Cell):
    def step(self, x: Any, h: Any, c: Any, n: Any, m: Any) -> Any:
        both = np.concatenate([h, c])
        found = both.sum(), np.mean(both), np.max(both), np.linalg.norm(both)
        return tuple(np.split(each, 2)[1] for each in found)


@pytest.mark.parametrize("units", [1, 5])
def test_reductions_of_several_vectors_are_over_all_their_numbers(units: int) -> None:
    state = np.random.default_rng(units).standard_normal((3, 4, units))
    found = _Reduced(1, units).forward(np.zeros((3, 1)), state.reshape(3, -1))
    both = state[:, :2].reshape(3, -1)
    expected = both.sum(-1), both.mean(-1), both.max(-1), np.sqrt((both**2).sum(-1))
    np.testing.assert_allclose(found, np.stack(expected, -1).repeat(units, -1), rtol=1e-14)
