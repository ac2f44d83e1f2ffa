"""Random definitions of cells, as text that is readable when an example fails.

Values stay moderate: what may grow is under a bounded function, and functions that jump are of sums
with an odd number, so that no kink is met exactly.
"""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any

import numpy as np
from hypothesis import strategies as st

# The stages up to which vectors are multiplied by matrices, and reduced.
_MOST_STAGES, _MOST_REDUCED = 3, 5
_HEADER = """\
import numpy as np
from sparsescan.graph.functions import *
from sparsescan.recurrent import Cell, Choice, Constant, Given, Hidden, Input, Mask, Scalar
from sparsescan.recurrent import Initial, StepNumber, Vector

spike = surrogate(lambda a: a > 0, lambda a: 1 / (1 + a * a))
soft_spike = surrogate(lambda a: where(a < 0.3, 0, 1), lambda a: sigmoid(a) * (1 - sigmoid(a)))

"""
_made = iter(range(1 << 62))


@dataclass(frozen=True, eq=False)
class RandomCell:
    """A definition, and what a cell of it is made with.

    Attributes
    ----------
    source : str
        The class ``Drawn``.
    input_size, hidden_size : int
        Sizes that fit.
    bias : bool
        Whether its cells have biases.
    options : dict
        Constants and choices.
    masked : tuple of str, or dict of str to ndarray
        Matrices that are pruned, at random or as it is said.
    """

    source: str
    input_size: int
    hidden_size: int
    bias: bool
    options: dict[str, Any] = field(default_factory=dict)
    masked: tuple[str, ...] | dict[str, Any] = ()

    @cached_property
    def cls(self) -> Any:
        """The class."""
        path = f"<random cell {next(_made)}>"
        text = _HEADER + self.source
        # For error messages, which show lines.
        linecache.cache[path] = len(text), None, text.splitlines(keepends=True), path
        namespace: dict[str, Any] = {"__name__": "random_cell"}
        exec(compile(text, path, "exec"), namespace)
        del linecache.cache[path]
        return namespace["Drawn"]

    def masks(self, rng: np.random.Generator) -> dict[str, Any]:
        """Return which weights are kept, by the name of a matrix."""
        if isinstance(self.masked, dict):
            return dict(self.masked)
        blank = self.cls(self.input_size, self.hidden_size)
        return {name: rng.random(getattr(blank, name).shape) < 0.6 for name in self.masked}

    def make(self, rng: np.random.Generator, dtype: Any = np.float64) -> Any:
        """Return a cell, with random parameters and masks."""
        masks = {f"{name}_mask": mask for name, mask in self.masks(rng).items()}
        return self.cls(
            self.input_size,
            self.hidden_size,
            self.bias,
            dtype=dtype,
            rng=rng,
            **self.options,
            **masks,
        )

    def units(self, least: int) -> int:
        """Return the least number of units, from `least` on, that its heads divide."""
        return least + -least % math.lcm(*map(int, re.findall(r"heads=(\d)", self.source)))

    def __repr__(self) -> str:
        about = f"input_size={self.input_size}, hidden_size={self.hidden_size}, bias={self.bias}"
        return f"\n{self.source}\n{about}, options={self.options}, masked={self.masked}"

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        printer.text(repr(self))


_NUMBERS = "0.37", "-0.61", "1.3", "0.5", "2", "1", "-1", "0"
_OFFSETS = "0.173", "-0.291", "0.0577", "-0.0713"
_SMOOTH = "tanh", "sigmoid", "sin", "cos", "softsign", "silu", "softplus", "identity"
_KINKED = "relu", "absolute", "elu", "leaky_relu", "hardtanh", "hardsigmoid", "spike", "soft_spike"
_TAMED = (
    "exp(tanh({}))",
    "exp(-softplus({}))",
    "expm1(sin({}))",
    "log(1.5 + sin({}))",
    "sqrt(1.25 + cos({}))",
    "sqrt(0.1 + relu({}))",
    "1 / (1.5 + tanh({}))",
    "0.7 / (1 + exp(-{}))",
    "tanh({}) ** 3",
    "(1.5 + sin({})) ** -2",
    "(1.5 + sin({})) ** 0.5",
    "{} ** 1",
    "-{}",
    "+{}",
    "abs({} + 0.123)",
    "elu({} + 0.119, 0.5)",
    "leaky_relu({} - 0.157, slope=0.2)",
    "hardtanh({}, -0.531, 0.713)",
    "hardtanh({} - 0.0371, -1e999, 0.713)",
    "stop_gradient({})",
)
_BINARY = (
    "({} + {})",
    "({} + {})",
    "({} - {})",
    "{} * {}",
    "{} * {}",
    "{} / (1.5 + sin({}))",
    "arctan2({}, {} + 0.0613)",
    "minimum({}, {} + 0.0413)",
    "maximum({}, {} - 0.0291)",
    "({} < {} + 0.0177) * 0.7",
    "(1 - ({} >= {} - 0.0519))",
    "surrogate(lambda a: {}, lambda a: 1 / (1 + a * a))({})",
)
_REDUCTIONS = (
    "({}).mean({heads_alone})",
    "(0.4 * ({}).sum({heads_alone}))",
    "({}).max({heads_alone})",
    "softmax({}{heads})",
    "logsumexp({}{heads})",
    "np.linalg.norm({})",
    "layer_norm({}{heads}, eps=0.1)",
    "layer_norm({}, 0.7, {}{heads}, eps=0.1)",
    "rms_norm({}{heads}, eps=0.1)",
    "rms_norm({}, {}{heads}, eps=0.1)",
    "np.split(layer_norm(np.concatenate([{0}, {1} - h]), eps=0.1), 2)[1]",
    "np.split(np.concatenate([{0}, {0}, {1} + h]).mean() * np.concatenate([h, h, {0}]), 3)[2]",
    "np.split(softmax(np.concatenate([{0}, {1} - 0.3 * h])), 2)[0]",
)
_STATES = "h", "c", "n", "m"


@dataclass
class _Variable:
    """A name in a step, and the stage after whose sums it is known."""

    name: str
    stage: int


class _Writer:
    """A definition that is being written.

    Parameters
    ----------
    integer : callable
        ``integer(low, high)`` draws an integer, both bounds included; the lowest is the simplest.
    size : int
        How many lines the step has at most before the last one.
    has_maxima : bool
        Whether it may have reductions over units that compute a maximum.
    has_further : bool
        Whether it may read further inputs, and begin with parameters.
    """

    def __init__(
        self, integer: Callable[[int, int], int], size: int, has_maxima: bool, has_further: bool
    ) -> None:
        self.integer, self.size, self.has_further = integer, size, has_further
        maxima = () if has_maxima else ("softmax", "logsumexp", "max(")
        self.reductions = [each for each in _REDUCTIONS if not any(map(each.count, maxima))]
        self.hidden = self.pick((2, 3, 1, 4, 6))
        self.declarations: list[str] = []
        self.helpers: list[str] = []
        self.lines: list[str] = []
        self.inputs: list[str] = []
        self.hiddens: list[str] = []
        self.vectors: list[str] = []
        self.parameters: list[str] = []
        self.options: dict[str, Any] = {}
        self.matrices: list[str] = []
        self.variables: list[_Variable] = []
        self.is_square = False
        self.has_helper = self.has_choice = False

    # -- Drawing ----------------------------------------------------------------------------------

    def chance(self, one_in: int) -> bool:
        """Return whether something rare happens, which the smallest example lacks."""
        return bool(self.integer(0, one_in - 1) == one_in - 1)

    def pick(self, options: Any) -> Any:
        """Return one of some things."""
        return options[self.integer(0, len(options) - 1)]

    def heads(self) -> str:
        """Return a number of heads into which the units may be divided, as an argument."""
        return f"heads={self.pick([k for k in (2, 3) if self.hidden % k == 0])}"

    # -- Declarations -----------------------------------------------------------------------------

    def declare(self) -> None:
        """Write what the class declares."""
        names = ["weight_ih", "kernel"][: 1 + self.chance(4)]
        for name in [] if self.chance(12) else names:
            self.inputs += self._matrix(name, "Input")
        names = ["weight_hh", "weight_uh", "inner"][: 1 + self.integer(0, 2)]
        for name in [] if self.chance(12) else names:
            self.hiddens += self._matrix(name, "Hidden")
        if self.chance(3):
            gates = self.pick(("", '"i"', '"i", "f"'))
            initial = f"{', ' if gates else ''}initial=0.4" if self.chance(3) else ""
            self.declarations.append(f"u = Vector({gates}{initial})")
            self.vectors += [f"self.u.{gate}" for gate in "if" if gate in gates] or ["self.u"]
        if self.chance(4):
            self.declarations.append("weight_p = Vector()")
            self.vectors.append("self.weight_p")
        if self.chance(5):
            gates = self.pick(("", '"g", "h"'))
            comma = ", " if gates else ""
            self.declarations.append(f"b = Vector({gates}{comma}is_bias=True)")
            self.vectors += ["self.b.h", "self.b.g"] if gates else ["self.b"]
        self.parameters += self.vectors
        if self.chance(3):
            self.declarations.append("alpha = Scalar(initial=0.3)")
            self.parameters.append("self.alpha")
        if self.chance(5):
            self.declarations.append("beta = Scalar(-0.7)")
            self.parameters.append("self.beta")
        if self.chance(4):
            self.declarations.append("dt = Constant(0.9)")
            self.options |= {"dt": 0.1} if self.chance(2) else {}
            self.parameters.append("self.dt")
        if self.chance(4):
            self.declarations.append('act = Choice("tanh", "softplus", "identity", "cos")')
            name = self.pick((None, "softplus", "identity", "cos"))
            self.options |= {"act": name} if name else {}
            self.has_choice = True
        if self.chance(4):
            self.has_helper = True
            self.helpers += [
                "def mix(self, a, b):",
                f"    return sigmoid(a) * b + {self.pick((*self.parameters, '0.2'))}",
            ]

    def _matrix(self, name: str, kind: str) -> list[str]:
        """Declare a matrix, and return what multiplies: with each gate, or its transpose."""
        gates = "abc"[: self.integer(0, 3)]
        text = ", ".join(f'"{gate}"' for gate in gates)
        bias = self.pick(("", "", "bias=False", "part"))
        if bias == "part":
            bias = f'bias=("{gates[-1]}",)' if gates else ""
        size = ""
        if kind == "Hidden" and self.hidden > 1 and self.chance(2):
            by_heads = (self.heads(),) * 2
            size = self.pick((*by_heads, "cols=1", "rows=1", "rows=2, cols=1"))
            bias = "bias=False" if "rows" in size else bias
        about = ", ".join(filter(None, (text, bias, size)))
        self.declarations.append(f"{name} = {kind}({about})")
        self.matrices.append(name)
        whole = f"self.{name}"
        if gates:
            return [f"{whole}.{gate}" for gate in gates]
        return [whole, f"{whole}.T"] if kind == "Hidden" else [whole]

    # -- Expressions ------------------------------------------------------------------------------

    def atom(self) -> tuple[str, int]:
        """Return a name, mostly of what has been computed, or a number; and its stage."""
        if self.parameters and self.chance(5):
            return self.pick(self.parameters), 0
        if self.chance(10):
            text = self.pick(_NUMBERS)
            return f"({text})" if text.startswith("-") else text, 0
        variable = self.pick(self.variables)
        return variable.name, variable.stage

    def alone(self, depth: int) -> str:
        """Return what depends on parameters alone."""
        if depth == 0 or not self.parameters:
            return str(self.pick((*self.parameters, "0.37")))
        if self.chance(2):
            function = self.pick((*_SMOOTH, "exp", "expm1", "spike", "stop_gradient"))
            return f"{function}({self.alone(depth - 1)})"
        return f"({self.alone(depth - 1)} {self.pick('+-*')} {self.alone(depth - 1)})"

    def product(self, depth: int) -> tuple[str, int]:
        """Return a product with a matrix, or something else if there is none."""
        if self.inputs and (not self.hiddens or self.chance(2)):
            return f"{self.pick(self.inputs)}(x)", 0
        if not self.hiddens:
            return self.expression(depth - 1)
        inner, stage = self.expression(depth - 1) if self.chance(3) else self.atom()
        is_plain = inner in (*_STATES, "x")
        is_number = inner[0] in "v(-+0123456789" or inner.startswith(("abs", "self.dt"))
        if is_number and not is_plain:
            # Maybe a plain number, with which nothing is multiplied.
            inner = f"identity({inner})"
        next_stage = stage if is_plain else stage + 1
        if next_stage >= _MOST_STAGES:
            inner, next_stage = _STATES[0], 0
        return f"{self.pick(self.hiddens)}({inner})", next_stage

    def reduction(self, depth: int) -> tuple[str, int]:
        """Return a reduction over units, or over those of each head."""
        (a, first), (b, second) = self.expression(depth - 1), self.atom()
        stage = max(first, second)
        if stage > _MOST_REDUCED:
            return self.atom()
        heads = f", {self.heads()}" if self.hidden > 1 and self.chance(2) else ""
        about = {"heads": heads, "heads_alone": heads[2:]}
        # An expression may be a number, which has nothing to be summed up: a state is a vector.
        vector = f"({a} + {self.pick(_OFFSETS)} * {_STATES[0]})"
        text = self.pick(self.reductions).format(vector, b, **about)
        return text, stage + 2

    def sum_of_products(self, depth: int) -> tuple[str, int]:
        """Return a sum, nested in any way, of products and other things."""
        parts = []
        for _ in range(self.integer(1, 4)):
            kind = self.integer(0, 5)
            if kind == 0 and self.vectors:
                parts.append((self.pick(self.vectors), 0))
            elif kind == 1:
                parts.append(self.atom())
            else:
                parts.append(self.product(depth))
        while len(parts) > 1:
            at = self.integer(0, len(parts) - 2)
            (a, first), (b, second) = parts[at : at + 2]
            sign = "-" if self.chance(8) else "+"
            parts[at : at + 2] = [(f"({a} {sign} {b})", max(first, second))]
        return parts[0]

    def expression(self, depth: int) -> tuple[str, int]:
        """Return an expression and its stage."""
        if depth <= 0:
            return self.atom()
        kind = self.integer(-3, 12)
        if kind == 12:
            return self.reduction(depth)
        if kind <= -2:
            return self.atom()
        if kind <= 3:
            inner, stage = self.sum_of_products(depth)
            return (f"{self.pick(_SMOOTH[:2])}({inner})" if self.chance(2) else inner), stage
        if kind == 4 and self.parameters:
            return self.alone(2), 0
        if kind == 5:
            inner, stage = self.expression(depth - 1)
            return f"{self.pick(_SMOOTH)}({inner})", stage
        if kind == 6:
            inner, stage = self.expression(depth - 1)
            return f"{self.pick(_KINKED)}({inner} + {self.pick(_OFFSETS)})", stage
        if kind == 7:
            inner, stage = self.expression(depth - 1)
            return self.pick(_TAMED).format(f"({inner})"), stage
        if kind == 8 and (self.has_helper or self.has_choice):
            inner, stage = self.expression(depth - 1)
            if self.has_choice and (not self.has_helper or self.chance(2)):
                return f"self.act({inner})", stage
            other, later = self.expression(depth - 1)
            return f"self.mix({inner}, {other})", max(stage, later)
        if kind == 9:
            parts = [self.atom(), self.atom(), self.expression(depth - 1), self.atom()]
            a, b, chosen, other = (text for text, _ in parts)
            text = f"where({a} < {b} + {self.pick(_OFFSETS)}, {chosen}, {other})"
            return text, max(stage for _, stage in parts)
        (a, first), (b, second) = self.expression(depth - 1), self.expression(depth - 1)
        return self.pick(_BINARY).format(a, b), max(first, second)

    # -- The step ---------------------------------------------------------------------------------

    def write(self) -> RandomCell:
        """Write the class."""
        self.declare()
        self.is_square = self.chance(4)
        if self.has_further and self.chance(2):
            mask = self.pick(("Mask(0.3)", 'Mask(0.2, per="sequence", scaled=False)'))
            self.declarations += [f"keep = {mask}", "drive = Given()", "place = StepNumber()"]
            names = "keep", "drive", "drive", "place"
            self.variables += [_Variable(f"self.{name}", 0) for name in names]
        count = self.integer(1, 4)
        states = _STATES[:count]
        self.variables += [_Variable(name, 0) for name in states]
        if self.is_square:
            self.variables.append(_Variable("x", 0))
        for k in range(self.integer(0, self.size)):
            text, stage = self.expression(3)
            self.lines.append(f"v{k} = {text}")
            # What was computed last is read most.
            self.variables += [_Variable(f"v{k}", stage)] * 2
        outputs = [self.output(name) for name in states]
        text = outputs[0] if count == 1 else f"({', '.join(outputs)})"
        arguments = ", ".join(states)
        if self.chance(6):
            self.declarations.append(f"states = {count}")
            self.lines.insert(0, f"{arguments}, = states")
            arguments = "*states"
        elif self.has_further and self.chance(4):
            begun = states[::-1] if self.chance(2) else states[:1]
            names = ", ".join(f'"{name}"' for name in begun)
            self.declarations.append(f"begin = Initial({names})")
        hidden = self.hidden
        # The input that is read by units has one number for each.
        inputs = hidden if self.is_square else self.integer(1, 3)
        body = "\n".join(f"        {line}" for line in [*self.lines, f"return {text}"])
        helpers = ["", *self.helpers] if self.helpers else []
        above = "".join(f"    {line}\n" for line in (*self.declarations, *helpers, ""))
        return RandomCell(
            "class Drawn(Cell):\n    _trains_all = False\n"
            f"{above}    def step(self, x, {arguments}):\n{body}\n",
            inputs,
            hidden,
            not self.chance(4),
            self.options,
            tuple(name for name in self.matrices if self.chance(4)),
        )

    def recent(self) -> str:
        """Return something of two of the latest names."""
        a, b = (self.pick(self.variables[::-2][:4]).name for _ in range(2))
        if a == b:
            return str(a)
        return str(
            self.pick(("{} * {}", "({} + {})", "({} - {})", "{} / (1.5 + tanh({}))"))
        ).format(a, b)

    def output(self, state: str) -> str:
        """Return a new state, which does not grow over steps."""
        kind = self.integer(0, 15)
        if kind == 0:
            return state
        if kind == 1:
            return str(self.pick(_STATES[:1] + tuple(each.name for each in self.variables[:2])))
        if kind == 2 and self.parameters:
            return f"tanh({self.alone(2)})"
        if kind == 3:
            return "0.25"
        inner = self.expression(2)[0] if self.chance(2) else self.recent()
        if kind in (4, 5, 6):
            gate = self.pick(("sigmoid({})", "exp(-softplus({}))", "exp(sin({}))"))
            factor = self.pick(
                (
                    "tanh({})",
                    "sigmoid({})",
                    "sin({})",
                    "cos({})",
                    "log(1.5 + sin({}))",
                    "sqrt(1.25 + cos({}))",
                    "exp(cos({}))",
                    "expm1(sin({}))",
                    "softplus(sin({}))",
                )
            )
            both = [gate.format(self.recent()), factor.format(inner)]
            return " * ".join(both if self.chance(2) else both[::-1])
        if kind in (7, 8):
            f = f"sigmoid({self.recent()})"
            if self.chance(2):
                return f"{state} + {f} * (tanh({inner}) - {state})"
            return f"{f} * {state} + (1 - {f}) * tanh({inner})"
        if kind == 9:
            return f"0.8 * {state} + sin({inner})"
        if kind == 10:
            return f"softsign({self.recent()})"
        return f"tanh({inner})"


def random_cells(
    size: int = 5, *, has_maxima: bool = True, has_further: bool = False
) -> st.SearchStrategy[RandomCell]:
    """Return definitions of cells whose steps have at most so many lines before the last one.

    Half of them are drawn by Hypothesis, which makes failing ones simpler; the others are as
    different from each other as random numbers make them.
    """

    @st.composite
    def drawn(draw: Any) -> RandomCell:
        integer = lambda low, high: draw(st.integers(low, high))  # noqa: E731
        return _Writer(integer, size, has_maxima, has_further).write()

    def random(seed: int) -> RandomCell:
        return _Writer(Random(seed).randint, size, has_maxima, has_further).write()

    return drawn() | st.integers(0, 2**32 - 1).map(random)
