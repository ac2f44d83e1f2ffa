"""The steps of a model as functions of C99."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..graph.expressions import topological
from ..graph.operations import Node, Reduction
from ..graph.render.base import without_brackets
from ..graph.render.c import CRenderer, literal
from ..recurrent.program import INPUT
from .parts import Dense, Function, Layer, Part, Step

# What functions of steps call. `add_product` takes four rows at once, so that sums are read and
# written a fourth as often.
HELPERS = {
    "add_product": """/* y += w^T x, where w is (n, m). */
static inline void add_product(real *y, const real *w, const real *x, int n, int m)
{
    int i, k;
    for (i = 0; i + 4 <= n; i += 4) {
        const real *const v = w + (size_t)i * (size_t)m;
        const real a = x[i], b = x[i + 1], c = x[i + 2], d = x[i + 3];
        for (k = 0; k < m; k++) {
            y[k] += (v[k] * a + v[m + k] * b) + (v[2 * m + k] * c + v[3 * m + k] * d);
        }
    }
    for (; i < n; i++) {
        const real *const v = w + (size_t)i * (size_t)m;
        const real a = x[i];
        for (k = 0; k < m; k++) {
            y[k] += v[k] * a;
        }
    }
}""",
    "add_sum": """/* y += scale times the sum of x, of n numbers each. */
static inline void add_sum(real *y, const real *x, int n, real scale)
{
    int k;
    real sum = 0;
    for (k = 0; k < n; k++) {
        sum += x[k];
    }
    for (k = 0; k < n; k++) {
        y[k] += sum * scale;
    }
}""",
    "set_maximum": """/* y = the largest of x, of n numbers each. */
static inline void set_maximum(real *y, const real *x, int n)
{
    int k;
    real most = x[0];
    for (k = 1; k < n; k++) {
        most = real_maximum(most, x[k]);
    }
    for (k = 0; k < n; k++) {
        y[k] = most;
    }
}""",
    "copy": """static inline void copy(real *y, const real *x, int n)
{
    int k;
    for (k = 0; k < n; k++) {
        y[k] = x[k];
    }
}""",
}


class Source:
    """Write the parts of a model.

    Parameters
    ----------
    name : str
        How names begin.
    dtype : numpy.dtype
        That of all numbers.

    Attributes
    ----------
    tables, functions : list of str
        Definitions of constants, and of functions that read them.
    constants, scratch : int
        How many numbers are in tables, and at most in arrays of a function.
    """

    def __init__(self, name: str, dtype: np.dtype[Any]) -> None:
        self.name, self.dtype = name, dtype
        self.tables: list[str] = []
        self.functions: list[str] = []
        self.constants = self.scratch = 0

    def add(self, part: Part) -> list[str]:
        """Add the functions of a part, and return their names: one for each direction."""
        if isinstance(part, Layer):
            return [self._step(each, "real *state", "state") for each in part.steps]
        if isinstance(part, Function):
            return [self._step(part.step, "real *y", "x")]
        return [self._dense(part)]

    def table(self, array: Any) -> str:
        """Add a table of constants, and return its name."""
        name = f"{self.name}_{len(self.tables)}"
        texts = [literal(value, self.dtype) for value in self.dtype.type(array).ravel()]
        rows = (", ".join(texts[k : k + 8]) for k in range(0, len(texts), 8))
        body = ",\n    ".join(rows)
        self.tables.append(f"static const real {name}[{len(texts)}] = {{\n    {body}\n}};")
        self.constants += len(texts)
        return name

    def _function(self, parameters: str, arrays: dict[str, int], lines: Sequence[str]) -> str:
        name = f"{self.name}_part{len(self.functions)}"
        has_k = any("k = 0" in line for line in lines)
        declared = ["int k;"] * has_k
        declared += [f"real {array}[{size}];" for array, size in arrays.items()]
        body = "\n".join(f"    {line}" for line in (*declared, *lines))
        self.functions.append(f"static void {name}({parameters})\n{{\n{body}\n}}")
        self.scratch = max(self.scratch, sum(arrays.values()))
        return name

    def _dense(self, part: Dense) -> str:
        outputs, inputs = part.weights.shape
        bias, weights = self.table(part.bias), self.table(part.weights.T)
        lines = [
            f"copy(y, {bias}, {outputs});",
            f"add_product(y, {weights}, x, {inputs}, {outputs});",
        ]
        return self._function("const real *x, real *y", {}, lines)

    def _step(self, step: Step, target: str, source: str) -> str:
        """Add the function of a step, which reads states in an array and writes a target."""
        program, units = step.program, step.units
        renderer = CRenderer(program.names, self.dtype)
        arrays = {"s": len(program.slots) * units} if program.slots else {}
        rows = dict(zip(program.rows, step.rows, strict=True))
        # The arrays of what is there.
        stored: dict[Node, str] = {}

        def load(each: Node) -> str:
            """Return the text of a number that is there."""
            if each in rows and np.ndim(rows[each]) == 0:
                return literal(float(rows[each]), self.dtype)
            if each in rows and each not in stored:
                stored[each] = self.table(rows[each])
            if each in stored:
                return f"{stored[each]}[k]"
            if each is INPUT:
                return "x[k]"
            place = each.details[0] if not each.arguments and each.details else 0
            if each.operation == "further":
                value = step.further[place]
                is_given = isinstance(value, int)
                return f"given[{value} + k]" if is_given else literal(value, self.dtype)
            array = {"state": source, "slot": "s"}.get(each.operation)
            return f"{array}[{place * units} + k]" if array else ""

        lines = []
        if program.slots:
            is_zero = not step.biases.any()
            bias = "0" if is_zero else f"{self.table(step.biases)}[k]"
            lines += _loop(arrays["s"], [f"s[k] = {bias};"])
        lines += self._products(step, {INPUT: "x"}, source)
        stages = [program.stage_of(each) for each in program.arguments]
        arguments = [
            [each for each, of in zip(program.arguments, stages, strict=True) if of == stage]
            for stage in range(program.stages - 1)
        ]
        loops = [*filter(None, arguments), list(program.outputs)]
        for place, roots in enumerate(loops[:-1]):
            later = [each for more in loops[place + 1 :] for each in more]
            kept = dict.fromkeys([*roots, *_shared(roots, later, load)])
            body, texts = renderer.assignments(kept, {}, load)
            for each in kept:
                array = f"t{len(arrays)}"
                arrays[array] = units
                body.append(f"{array}[k] = {without_brackets(texts[each])};")
                stored[each] = array
            lines += _loop(units, body)
            lines += self._products(step, {each: stored[each] for each in roots}, source)
        body, texts = renderer.assignments(program.outputs, {}, load)
        into = target.removeprefix("real *")
        body += [
            f"{into}[{k * units} + k] = {without_brackets(texts[each])};"
            for k, each in enumerate(program.outputs)
        ]
        lines += _loop(units, body)
        reads_x = source == "x" or any("x[" in line or " x," in line for line in lines)
        unread = ["(void)x;"] * (not reads_x)
        if step.is_given:
            unread += ["(void)given;"] * (not any("given[" in line for line in lines))
        given = "const real *given, " * step.is_given
        return self._function(f"const real *x, {given}{target}", arrays, [*unread, *lines])

    def _products(self, step: Step, vectors: dict[Node, str], source: str) -> Iterator[str]:
        """Yield what multiplies and reduces vectors; states are in an array, and read at first."""
        units = step.units

        def text_of(argument: Node) -> str:
            if argument.operation == "state" and INPUT in vectors:
                return f"{source} + {argument.details[0] * units}"
            return vectors.get(argument, "")

        for product in step.products:
            vector = text_of(product.argument)
            heads, cols, rows = product.weights.shape
            if not vector:
                continue
            table = self.table(product.weights)
            for head in range(heads):
                to = f"s + {product.slot * units + head * rows}"
                matrix = f"{table} + {head * cols * rows}" if head else table
                moved = f"{vector} + {head * cols}" if head else vector
                yield f"add_product({to}, {matrix}, {moved}, {cols}, {rows});"
        for slot, term in itertools.chain.from_iterable(
            ((k, term) for term in each.terms) for k, each in enumerate(step.program.slots)
        ):
            vector = text_of(term.argument)
            if not vector or not isinstance(term.matrix, Reduction):
                continue
            size = units // term.matrix.heads
            for first in range(0, units, size):
                about = f"s + {slot * units + first}, {vector} + {first}, {size}"
                if term.matrix.is_linear:
                    scale = 1 / size if term.matrix.operation == "mean" else 1.0
                    yield f"add_sum({about}, {literal(scale, self.dtype)});"
                else:
                    yield f"set_maximum({about});"


def _shared(roots: Sequence[Node], later: Sequence[Node], load: Any) -> list[Node]:
    """Return what is computed for some nodes, and read as it is by what is computed later."""
    now = {each for each in topological(roots, is_leaf=load) if each.arguments and not load(each)}
    read = set(later)
    for each in topological(later, is_leaf=lambda one: one in now or load(one)):
        if each not in now:
            read.update(each.arguments)
    return [each for each in topological(roots, is_leaf=load) if each in now and each in read]


def _loop(count: int, body: Sequence[str]) -> list[str]:
    """Return a loop over units."""
    return [f"for (k = 0; k < {count}; k++) {{", *(f"    {line}" for line in body), "}"]
