"""C files of a model: a header and a source."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from ..checks import check_choice, check_count
from ..errors import InputError, InputTypeError, short
from ..graph.render.c import functions_for
from .parts import Layer, Model, Step, read
from .source import HELPERS, Source


class CFiles(NamedTuple):
    """The files that were written, and the memory that their functions take.

    Attributes
    ----------
    header, source : Path
        The files.
    state_bytes, constant_bytes, stack_bytes : int
        Sizes of the struct of states, of all constants, and of the arrays of a step on the stack.
    work_bytes : int
        For each step of a run, of networks of two directions: what the caller lends it.
    """

    header: Path
    source: Path
    state_bytes: int
    constant_bytes: int
    stack_bytes: int
    work_bytes: int

    def __str__(self) -> str:
        work = f", work {self.work_bytes:,} for each step" if self.work_bytes else ""
        return (
            f"{self.header} and {self.source}: bytes of states {self.state_bytes:,}, constants "
            f"{self.constant_bytes:,}, stack {self.stack_bytes:,}{work}"
        )


def c(
    network: Any,
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    batch: int = 1,
    dtype: DTypeLike | None = None,
    functions: str = "libm",
) -> CFiles:
    """Write a trained model as a header and a source file in C99, for inference.

    The files need no other library than ``math.h``, and allocate nothing. With the name ``model``
    they have the struct ``model_state``, which the caller owns, and three functions::

        void model_init(model_state *state);
        void model_step(model_state *state, const float *x, float *y);
        void model_run(model_state *state, size_t steps, const float *x, float *y);

    `x` is ``(batch, MODEL_INPUTS)``, `y` is ``(batch, MODEL_OUTPUTS)``, and those of a run have one
    more axis in front, of steps. After ``model_init`` states are what a sequence begins with:
    zeros, or parameters (:class:`.Initial`). A run goes on from where the last call ended, and
    returns the bits that as many steps return. Threads may run at
    once on states of their own.

    A network of two directions has no ``model_step``, and ``model_run`` takes one more argument,
    ``float *work``, an array of ``steps * MODEL_WORK`` numbers.

    Parameters
    ----------
    network : Cell, Recurrent, torch.nn.Module or sequence of these
        A cell or a network of cells; a recurrent module of PyTorch or :mod:`sparsescan.torch`; or a
        sequence, such as a :class:`torch.nn.Sequential`, of these and of ``Linear`` layers and
        functions of PyTorch or :mod:`sparsescan.jacobians`: each reads the outputs of the one
        before. Dropout is left out, and a random mask of a step is its expectation. Further
        inputs of a step (:class:`.Given`, :class:`.StepNumber`) are columns behind those of `x`,
        ``hidden_size`` for each.
    path : path
        The source file, such as ``model.c``; the header is ``model.h`` beside it.
    name : str, optional
        How names in C begin; by default the name of the file.
    batch : int, default 1
        How many samples run at once.
    dtype : {float32, float64}, optional
        Type of all numbers; by default that of the parameters.
    functions : {"libm", "series"}, default "libm"
        Whether ``tanh``, ``sigmoid``, ``exp`` and ``expm1`` are those of ``math.h``, or series
        of this file, which compilers compute in vectors. Those are within 4 units in the last place
        of the exact values, where these are normal numbers.

    Returns
    -------
    CFiles
        The files and the memory that is needed, which the header has, too.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong, or the network has a part that is not listed here.

    Examples
    --------
    >>> import tempfile
    >>> from sparsescan import export
    >>> from sparsescan.recurrent import LSTM
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     files = export.c(LSTM(1, 40, rng=0), f"{folder}/model.c")
    >>> files.state_bytes, files.constant_bytes
    (320, 26880)
    """
    source_path = _source_path(path)
    name = _check_name(source_path.stem if name is None else name)
    batch = check_count("batch", batch, 1)
    check_choice("functions", functions, "libm", "series")
    model = read(network)
    chosen = np.dtype(model.dtype if dtype is None else dtype)
    if chosen not in (np.float32, np.float64):
        raise InputTypeError(f"dtype is {short(dtype or chosen)}; expected float32 or float64")
    if not any(isinstance(part, Layer) for part in model.parts):
        raise InputError(f"network is {short(network)}; expected a recurrent layer in it")
    writer = _Writer(model, name, batch, chosen)
    header_path = source_path.with_suffix(".h")
    source = writer.source(header_path.name, functions == "series")
    for file, text in ((header_path, writer.header()), (source_path, source)):
        file.write_text(text, encoding="ascii")
    size = chosen.itemsize
    return CFiles(
        *(header_path, source_path, writer.state * size, writer.code.constants * size),
        *((writer.code.scratch + writer.between) * size, writer.work * size),
    )


def _source_path(path: Any) -> Path:
    try:
        source = Path(path)
    except TypeError:
        raise InputTypeError(f"path is {short(path)}; expected that of a file") from None
    if source.suffix != ".c":
        raise InputError(f"path is {short(str(path))}; expected a name that ends in .c")
    return source


def _check_name(name: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
        raise InputError(
            f"name is {short(name)}; expected letters, digits and underscores, a letter first"
        )
    return name


class _Writer:
    """Write the two files of a model."""

    def __init__(self, model: Model, name: str, batch: int, dtype: np.dtype[Any]) -> None:
        self.model, self.name, self.batch, self.dtype = model, name, batch, dtype
        self.real = {4: "float", 8: "double"}[dtype.itemsize]
        self.code = Source(name, dtype)
        self.parts = [(part, self.code.add(part)) for part in model.parts]
        self.inputs, self.outputs = model.inputs, model.parts[-1].outputs
        # The arrays of states: a name, how many numbers a sample has, and what they begin with.
        self.states: list[tuple[str, int, str]] = []
        self.names: dict[str, str] = {}
        layers = [(part, own) for part, own in self.parts if isinstance(part, Layer)]
        for layer, (part, functions) in enumerate(layers):
            for back, (function, step) in enumerate(zip(functions, part.steps, strict=True)):
                self.names[function] = f"l{layer}{'_reverse' * back}"
                begin = "0" if step.initial is None else f"{self.code.table(step.initial)}[k]"
                size = step.program.states * step.units
                self.states.append((self.names[function], size, begin))
        self.state = batch * sum(size for _, size, _ in self.states)
        self.is_whole = any(len(functions) > 1 for _, functions in self.parts)
        widths = [part.outputs for part in model.parts[:-1]]
        # Of a step: what parts return that keep nothing.
        self.between = (
            0
            if self.is_whole
            else sum(part.outputs for part in model.parts[:-1] if not isinstance(part, Layer))
        )
        self.work = batch * max(widths, default=0) * min(len(widths), 2) * self.is_whole

    def header(self) -> str:
        """Return the header."""
        name, upper, real = self.name, self.name.upper(), self.real
        size = self.dtype.itemsize
        x, y = f"const {real} *x", f"{real} *y"
        fields = "\n".join(
            f"    {real} {field}[{self.batch}][{count}];" for field, count, _ in self.states
        )
        run = f"void {name}_run({name}_state *state, size_t steps, {x}, {y}"
        if self.is_whole:
            functions = f"""/* x is (steps, batch, inputs), y (steps, batch, outputs); work has
   steps * {upper}_WORK numbers. */
#define {upper}_WORK {self.work}
{run}, {real} *work);"""
        else:
            functions = f"""/* x is (batch, inputs), y (batch, outputs). */
void {name}_step({name}_state *state, {x}, {y});
/* Some steps, with the results of as many calls of the former. */
{run});"""
        return f"""/* Written by sparsescan. Bytes: states {self.state * size}, constants \
{self.code.constants * size}, arrays on the stack {(self.code.scratch + self.between) * size}. */
#ifndef {upper}_H
#define {upper}_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {{
#endif

#define {upper}_INPUTS {self.inputs}
#define {upper}_OUTPUTS {self.outputs}
#define {upper}_BATCH {self.batch}

/* The states of each layer: those of a sample one after the other. */
typedef struct {{
{fields}
}} {name}_state;

/* Sets all states to those that a sequence begins with. */
void {name}_init({name}_state *state);
{functions}

#ifdef __cplusplus
}}
#endif

#endif
"""

    def source(self, header: str, by_series: bool) -> str:
        """Return the source file."""
        functions = [*self.code.functions, self._init()]
        functions += [self._run_whole()] if self.is_whole else [self._step(), self._run()]
        body = "\n\n".join(functions)
        helpers = [text for each, text in HELPERS.items() if f"{each}(" in body]
        called = "\n\n".join([*helpers, body])
        real = [f"typedef {self.real} real;"]
        real += ["#define REAL(name) name" + "##f" * (self.dtype == np.float32)]
        found = functions_for(called, self.dtype, by_series)
        parts = [
            f'/* Written by sparsescan. */\n#include "{header}"\n#include <math.h>',
            *("\n".join(real), "\n".join(each for each in found if each.startswith("#"))),
            *(each for each in found if not each.startswith("#")),
            *(*helpers, *self.code.tables, body),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _head(self, function: str, parameters: str) -> str:
        return f"void {self.name}_{function}({self.name}_state *state, {parameters})"

    def _init(self) -> str:
        lines = ["int n, k;", f"for (n = 0; n < {self.batch}; n++) {{"]
        for field, count, begin in self.states:
            lines += [f"    for (k = 0; k < {count}; k++) {{"]
            lines += [f"        state->{field}[n][k] = {begin};", "    }"]
        return _function(f"void {self.name}_init({self.name}_state *state)", [*lines, "}"])

    def _call(self, step: Step, function: str, vector: str, row: str) -> str:
        """Return how a call of a step begins, with what is in a row of `x` behind the inputs."""
        given = f", {row} + {self.inputs - self.model.given}" * step.is_given
        return f"{function}({vector}{given}"

    def _step(self) -> str:
        """Return the function of one step, of networks of one direction."""
        lines, arrays, vector = list[str](), list[str](), f"x + n * {self.inputs}"
        for place, (part, (function,)) in enumerate(self.parts):
            is_last = place == len(self.parts) - 1
            into = f"y + n * {self.outputs}"
            if isinstance(part, Layer):
                state = f"state->{self.names[function]}[n]"
                given = f"x + n * {self.inputs}"
                lines += [f"{self._call(part.steps[0], function, vector, given)}, {state});"]
                lines += [f"copy({into}, {state}, {part.outputs});"] * is_last
                vector = state
                continue
            if not is_last:
                into = f"a{place}"
                arrays += [f"real {into}[{part.outputs}];"]
            lines += [f"{function}({vector}, {into});"]
            vector = into
        head = self._head("step", "const real *x, real *y")
        loop = [f"for (n = 0; n < {self.batch}; n++) {{", *(f"    {line}" for line in lines), "}"]
        return _function(head, ["int n;", *arrays, *loop])

    def _run(self) -> str:
        head = self._head("run", "size_t steps, const real *x, real *y")
        x, y = (self.batch * width for width in (self.inputs, self.outputs))
        call = f"    {self.name}_step(state, x + t * {x}, y + t * {y});"
        return _function(head, ["size_t t;", "for (t = 0; t < steps; t++) {", call, "}"])

    def _run_whole(self) -> str:
        """Return the function of whole sequences, part by part."""
        batch, width, vector = self.batch, self.inputs, "x"
        lines = list[str]()
        for place, (part, functions) in enumerate(self.parts):
            into = "y" if place == len(self.parts) - 1 else f"{'ab'[place % 2]}"
            for back, function in enumerate(functions):
                begin = "t = steps; t-- > 0;" if back else "t = 0; t < steps; t++"
                lines += [f"for ({begin}) {{", f"    for (n = 0; n < {batch}; n++) {{"]
                row = f"(t * {batch} + n)"
                given = f"{vector} + {row} * {width}"
                to = f"{into} + {row} * {part.outputs}"
                if isinstance(part, Layer):
                    units = part.outputs // len(functions)
                    to += f" + {units}" * back
                    state = f"state->{self.names[function]}[n]"
                    whole = f"x + {row} * {self.inputs}"
                    call = self._call(part.steps[back], function, given, whole)
                    lines += [f"        {call}, {state});"]
                    lines += [f"        copy({to}, {state}, {units});"]
                else:
                    lines += [f"        {function}({given}, {to});"]
                lines += ["    }", "}"]
            vector, width = into, part.outputs
        count = len(self.parts) - 1
        buffers = ["real *const a = work;"] * (count > 0)
        buffers += [f"real *const b = work + steps * {self.work // 2};"] * (count > 1)
        start = [*buffers, "size_t t, n;", *["(void)work;"] * (not buffers)]
        head = self._head("run", "size_t steps, const real *x, real *y, real *work")
        return _function(head, start + lines)


def _function(head: str, lines: Sequence[str]) -> str:
    body = "\n".join(f"    {line}" for line in lines)
    return f"{head}\n{{\n{body}\n}}"
