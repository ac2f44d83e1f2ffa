"""Malformed and odd calls of the whole public API, made at random.

Each call starts as a good one; then some of its arguments are replaced by what is not expected, or
by another form of the same. It must raise one of the package's own exceptions, in a message of some
lines at most, or give the right answer: that of an oracle that shares no code with the package.

``python tests/support/fuzz_calls.py 100000`` makes so many calls. Call `i` depends on the seed and
`i` alone: ``--seed 0 --only 1234`` makes that one, and says what it is.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import contextlib
import copy
import functools
import itertools
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import scipy.sparse as sp
from odd_values import (
    Changing,
    Hostile,
    Lying,
    masked,
    odd,
    other,
    other_sequence,
    torch,
)

import sparsescan
from sparsescan import (
    BatchedCSR,
    CSRChain,
    ImplicitChain,
    ImplicitPattern,
    ImplicitStep,
    Pattern,
    Schedule,
    SolveStep,
    SparseScanError,
    recurrent,
)
from sparsescan import jacobians as layers
from sparsescan.chains.containers import PeriodicChain
from sparsescan.symbolic.indexed import IndexedPattern
from sparsescan.symbolic.schedule import Level

# Characters that a message may have: it shows a value, not all of it.
LONGEST_MESSAGE = 1200
# Seconds of a call that are worth a line.
SLOW = 5.0


# ---------------------------------------------------------------------------------------------
# The values that accepted input stands for
# ---------------------------------------------------------------------------------------------


class NotDocumentedError(Exception):
    """Input was accepted that the documentation does not say to be."""


FLOATS = np.float32, np.float64
NUMBERS = *FLOATS, np.complex64, np.complex128


def floats(value: Any, dtypes: tuple[Any, ...] = FLOATS) -> np.ndarray:
    """Return an array of float32 or float64, in its own dtype, as NumPy reads it."""
    if isinstance(value, np.ma.MaskedArray) or sp.issparse(value):
        raise NotDocumentedError(f"{type(value)} was read as an array")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.numpy()
    array = np.asarray(value)
    if array.dtype.newbyteorder("=") not in dtypes:
        raise NotDocumentedError(f"dtype {array.dtype} was read as floats")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def clean(jacobian: Any, pattern: Pattern | None = None) -> Any:
    """Return a Jacobian as a CSR array, a BatchedCSR or a dense array that nobody can doubt."""
    if isinstance(jacobian, BatchedCSR):
        return jacobian
    if isinstance(jacobian, SolveStep):
        matrix = as_dense(clean(jacobian.values[0], jacobian.pattern.factors[0]))
        return np.linalg.inv(matrix.astype(np.float64))
    if isinstance(jacobian, ImplicitStep):
        pairs = zip(jacobian.values, jacobian.pattern.factors, strict=True)
        first, second = (as_dense(clean(values, factor)) for values, factor in pairs)
        return second @ first
    if sp.issparse(jacobian):
        parts = floats(jacobian.data), np.asarray(jacobian.indices), np.asarray(jacobian.indptr)
        matrix = sp.csr_array(tuple(map(np.ascontiguousarray, parts)), shape=jacobian.shape)
        matrix.sum_duplicates()
        return matrix
    values = floats(jacobian)
    if pattern is None or (
        values.ndim in (2, 3)
        and pattern.nnz == np.prod(pattern.shape)
        and values.shape[-2:] == pattern.shape
    ):
        return values
    return oracles.on_pattern(np.ascontiguousarray(values), pattern)


def as_dense(jacobian: Any) -> np.ndarray:
    """Return the matrix, or one for each sample."""
    if isinstance(jacobian, BatchedCSR):
        samples = [jacobian[b].toarray() for b in range(jacobian.batch)]
        return np.array(samples, jacobian.dtype).reshape(-1, *jacobian.shape)
    return jacobian.toarray() if sp.issparse(jacobian) else jacobian


def steps(jacobians: Any, patterns: Sequence[Pattern] | None = None) -> list[Any]:
    """Return the Jacobians of a chain in any form, clean; `patterns` are those of bare values."""
    if isinstance(jacobians, np.ndarray):
        jacobians = np.asarray(jacobians)
    if isinstance(jacobians, CSRChain):
        return oracles.steps_of(jacobians)
    if isinstance(jacobians, ImplicitChain):
        factors = steps(jacobians.factors())
        return [as_dense(b) @ as_dense(a) for a, b in zip(factors[::2], factors[1::2], strict=True)]
    if isinstance(jacobians, PeriodicChain):
        return [
            clean(array if array.ndim == 1 else array[step], pattern)
            for step in range(jacobians.steps)
            for array, pattern in zip(jacobians.values, jacobians.patterns, strict=True)
        ]
    if isinstance(jacobians, Lying):
        jacobians = list(itertools.islice(jacobians, 100))
    given = [None] * len(jacobians) if patterns is None else patterns
    return [clean(jacobian, pattern) for jacobian, pattern in zip(jacobians, given, strict=True)]


def flat(result: Any, chain: Any, count: int) -> list[np.ndarray]:
    """Return the gradients of a scan, one by one."""
    period = len(chain.patterns) if isinstance(chain, PeriodicChain) else 1
    if period == 1:
        return list(result)
    return [result[k % period][k // period] for k in range(count)]


def check_scan(
    result: Any,
    grad: Any,
    jacobians: Any,
    local_grads: Any,
    inclusive: bool,
    patterns: Sequence[Pattern] | None = None,
    *,
    reverse: Any = False,
) -> None:
    """Raise unless these are the gradients."""
    if reverse and patterns is not None:
        patterns = patterns[::-1]
    chain = steps(jacobians, patterns)
    if reverse:
        chain = [*reversed(chain)]
    # Zeros, of the dtype that decides nothing.
    x = np.zeros(flat(result, jacobians, 1)[-bool(reverse)].shape, "f4") if grad is None else None
    x = floats(grad) if x is None else x
    if x.size > 1_000_000:
        assert len(result) == 0  # nobody has memory for one
        return
    local = None
    count = len(chain) + inclusive
    if local_grads is not None:
        if isinstance(local_grads, np.ndarray):
            local_grads = np.asarray(local_grads)
        given = list(itertools.islice(local_grads, 100))
        if isinstance(jacobians, PeriodicChain) and len(jacobians.patterns) > 1:
            stacks = [[None] * count if each is None else each for each in given]
            given = flat(stacks, jacobians, count)
        local = [None if each is None else floats(each) for each in given]
        local = local[::-1] if reverse else local
    arrays = [x, *(step.data if hasattr(step, "indptr") else step for step in chain)]
    dtype = np.result_type(*(each.dtype for each in arrays), *_dtypes(local))
    expected = oracles.sequential(x, chain, local, inclusive=inclusive, dtype=dtype)
    actual = flat(result, jacobians, count)
    actual = [*reversed(actual)] if reverse else actual
    assert len(actual) == len(expected.exact) == count
    for k, (one, exact, bound) in enumerate(
        zip(actual, expected.exact, expected.bounds, strict=True)
    ):
        assert one.shape == exact.shape, (k, one.shape, exact.shape)
        assert one.dtype == dtype, (k, one.dtype, dtype)
        finite = np.isfinite(exact)
        with np.errstate(all="ignore"):
            off = np.abs(one.astype(np.float64) - exact)
            # Without a bound where it reads what is not finite.
            assert (off[finite] <= np.nan_to_num(bound[finite], nan=np.inf)).all(), (k, one, exact)
        assert (np.isnan(one) == np.isnan(exact)).all(), (k, one, exact)


def _dtypes(local: Sequence[Any] | None) -> list[np.dtype[Any]]:
    return [each.dtype for each in local or () if each is not None]


# ---------------------------------------------------------------------------------------------
# Calls
# ---------------------------------------------------------------------------------------------


@dataclass
class Call:
    """One call: what is called with what, and what has to hold for its result.

    Attributes
    ----------
    run : callable
        Makes the call.
    text : str
        The call in words, for whoever repeats it.
    check : callable
        Raises unless a result is right.
    allowed : tuple of type
        Exceptions that are documented beside the package's own.
    """

    run: Callable[[], Any]
    text: str
    check: Callable[[Any], None] = lambda result: None
    allowed: tuple[type[Exception], ...] = ()


@dataclass
class Chain:
    """A good chain with a gradient, and what else a scan takes."""

    grad: Any
    jacobians: Any
    options: dict[str, Any] = field(default_factory=dict)


def good_chain(rng: np.random.Generator) -> Chain:
    """Return a chain in any form."""
    n, batch = int(rng.integers(0, 5)), [None, None, 1, 3][rng.integers(4)]
    sizes = [int(size) for size in rng.integers(1, 5, n + 1)]
    form = ["list", "stack", "csr chain", "periodic", "list"][rng.integers(5)]
    dtype = [np.float32, np.float64][rng.integers(2)]
    if form != "list":
        sizes = [sizes[0]] * (n + 1)
    lead = () if batch is None else (batch,)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    if form == "stack":
        jacobians: Any = draw(n, *lead, sizes[0], sizes[0])
    elif form == "csr chain" or (form == "periodic" and n == 0):
        where = oracles.mask(rng, "sparse", sizes[0], sizes[0])
        indices, indptr = oracles.indices_of(where)
        jacobians = CSRChain(draw(n, *lead, len(indices)), indices, indptr, where.shape)
    elif form == "periodic":
        patterns = [Pattern.diagonal(sizes[0]), Pattern.dense((sizes[0], sizes[0]))]
        patterns = patterns[: rng.integers(1, 3)]
        n = n * len(patterns)
        arrays = [draw(n // len(patterns), *lead, pattern.nnz) for pattern in patterns]
        jacobians, sizes = PeriodicChain(arrays, patterns), [sizes[0]] * (n + 1)
    else:
        forms = [str(form) for form in rng.choice(oracles.FORMS, n)]
        jacobians = [
            oracles.jacobian(rng, form, "sparse", (rows, cols), batch, dtype, np.int32)
            for form, (cols, rows) in zip(forms, itertools.pairwise(sizes), strict=True)
        ]
    return Chain(draw(*lead, sizes[0]), jacobians)


def scan(rng: np.random.Generator) -> Call:
    """Return a scan in one call."""
    chain = good_chain(rng)
    inclusive = bool(rng.integers(2))
    arguments: dict[str, Any] = {"grad": chain.grad, "jacobians": chain.jacobians}
    arguments |= options_of_a_scan(rng, chain, inclusive)
    if rng.random() < 0.3:
        schedules = [
            "auto",
            "linear",
            "blelloch",
            "truncated:1",
            "chunked:3",
            *oracles.every_schedule(len(chain.jacobians)),
        ]
        arguments["schedule"] = schedules[rng.integers(len(schedules))]
    if rng.random() < 0.2:
        arguments["device"] = [None, "cpu"][rng.integers(2)]
    turn(rng, arguments, arguments)
    spoil(rng, arguments)
    function = sparsescan.inclusive_scan if inclusive else sparsescan.exclusive_scan
    return Call(
        lambda: function(**arguments),
        f"{function.__name__}({told(arguments)})",
        lambda result: check_scan(
            result,
            arguments["grad"],
            arguments["jacobians"],
            arguments.get("local_grads"),
            inclusive,
            reverse=arguments.get("reverse", False),
        ),
    )


def turn(rng: np.random.Generator, options: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Put some chains into the order of time, and leave out some gradients."""
    jacobians = arguments["jacobians"]
    if rng.random() < 0.2 and isinstance(jacobians, (list, np.ndarray)):
        options["reverse"] = True
        arguments["jacobians"] = jacobians[::-1]
        if options is not arguments:
            options["jacobians"] = options["jacobians"][::-1]
        if arguments.get("local_grads") is not None:
            arguments["local_grads"] = arguments["local_grads"][::-1]
    if rng.random() < 0.5 and any(each is not None for each in arguments.get("local_grads", ())):
        arguments["grad"] = None


def planned(rng: np.random.Generator) -> Call:
    """Return a plan, and a scan by it."""
    chain = good_chain(rng)
    inclusive = bool(rng.integers(2))
    options: dict[str, Any] = {"jacobians": chain.jacobians}
    if rng.random() < 0.3 and isinstance(chain.jacobians, list):
        options["jacobians"] = oracles.patterns_of(chain.jacobians)
    good = {
        "schedule": ["auto", "linear", "blelloch", "chunked:2"][rng.integers(4)],
        "batch": None,
        "dtype": None,
        "device": [None, "cpu"][rng.integers(2)],
        "memory_limit": [None, 10**9][rng.integers(2)],
    }
    options |= {name: value for name, value in good.items() if rng.random() < 0.3}
    arguments: dict[str, Any] = {"grad": chain.grad, "jacobians": chain.jacobians}
    arguments |= options_of_a_scan(rng, chain, inclusive)
    if rng.random() < 0.3 and isinstance(chain.jacobians, list):
        arguments["jacobians"] = [
            item.data if sp.issparse(item) or isinstance(item, BatchedCSR) else item
            for item in chain.jacobians
        ]
    turn(rng, options, arguments)
    spoil(rng, options if rng.random() < 0.5 else arguments)

    def run() -> Any:
        plan = sparsescan.plan(**options)
        str(plan), repr(plan), plan.to_dict()
        call = plan.inclusive_scan if inclusive else plan.exclusive_scan
        for _ in range(int(rng.integers(1, 3))):
            result = call(**arguments)
        return plan, result

    def check(returned: Any) -> None:
        plan, result = returned
        given = arguments["jacobians"], arguments.get("local_grads")
        patterns, reverse = plan.patterns, plan.reverse
        check_scan(result, arguments["grad"], *given, inclusive, patterns, reverse=reverse)

    return Call(run, f"plan({told(options)}).scan({told(arguments)})", check)


def options_of_a_scan(rng: np.random.Generator, chain: Chain, inclusive: bool) -> dict[str, Any]:
    """Return some of the options that every scan takes."""
    options: dict[str, Any] = {}
    if rng.random() < 0.3 and not isinstance(chain.jacobians, PeriodicChain):
        shapes = [chain.grad.shape]
        for step in chain.jacobians if isinstance(chain.jacobians, list) else ():
            shapes.append((*chain.grad.shape[:-1], step.shape[-2]))
        count = len(chain.jacobians) + inclusive
        shapes = [shapes[min(k, len(shapes) - 1)] for k in range(count)]
        local = [rng.standard_normal(shape).astype(chain.grad.dtype) for shape in shapes]
        options["local_grads"] = [None if rng.random() < 0.3 else each for each in local]
    if rng.random() < 0.1:
        options["stream"] = None
    return options


def spoil(rng: np.random.Generator, arguments: dict[str, Any]) -> None:
    """Replace one or two of the arguments."""
    names = list(arguments)
    for _ in range(rng.integers(1, 3)):
        name = names[rng.integers(len(names))]
        arguments[name] = other(rng, arguments[name])


def told(arguments: dict[str, Any]) -> str:
    """Return the arguments in words."""
    return ", ".join(f"{name}={in_words(value)}" for name, value in arguments.items())


def in_words(value: Any, depth: int = 3) -> str:
    """Return a value in words."""
    try:
        if isinstance(value, np.ndarray):
            text = f"<{type(value).__name__} {value.dtype} {value.shape} {value.strides}>"
            return f"{text}{value.tolist()}" if value.size < 10 else text
        if sp.issparse(value):
            parts = [in_words(getattr(value, k, None)) for k in ("data", "indices", "indptr")]
            return f"<{type(value).__name__} {value.shape} {parts}>"
        if isinstance(value, Lying):
            return f"<Lying {value.length} of {in_words(value.items)}>"
        if isinstance(value, (list, tuple)) and depth:
            return f"{type(value).__name__}[{', '.join(in_words(x, depth - 1) for x in value)}]"
        return repr(value)[:300]
    except Exception:
        return f"<{type(value).__name__}>"


def pattern(rng: np.random.Generator) -> Call:
    """Return a pattern, from index arrays or by its kind."""
    rows, cols = (int(size) for size in rng.integers(0, 5, 2))
    where = oracles.mask(rng, "sparse", rows, cols)
    indices, indptr = oracles.indices_of(where)
    kind = rng.integers(5)
    if kind == 0:
        arguments: dict[str, Any] = {"size": rows}
        spoil(rng, arguments)
        return Call(
            lambda: Pattern.diagonal(**arguments),
            f"Pattern.diagonal({told(arguments)})",
            lambda pattern: check_pattern(pattern, "diagonal", (arguments["size"],) * 2),
        )
    if kind == 1:
        arguments = {"shape": (rows, cols)}
        spoil(rng, arguments)
        return Call(
            lambda: Pattern.dense(**arguments),
            f"Pattern.dense({told(arguments)})",
            lambda pattern: check_pattern(pattern, "dense", arguments["shape"]),
        )
    arguments = {"indptr": indptr, "indices": indices, "shape": (rows, cols)}
    spoil(rng, arguments)

    def check(pattern: Pattern) -> None:
        shape = [entry.__index__() for entry in arguments["shape"]]
        assert pattern.shape == tuple(shape)
        for name in ("indptr", "indices"):
            given = arguments[name]
            if isinstance(given, np.ma.MaskedArray) or sp.issparse(given):
                raise NotDocumentedError(f"{type(given)} was read as {name}")
            given = np.asarray(given)
            assert given.dtype.kind in "iu" or given.size == 0
            assert getattr(pattern, name).tolist() == given.tolist()
        assert pickle.loads(pickle.dumps(pattern)) is pattern is copy.deepcopy(pattern)

    return Call(lambda: Pattern(**arguments), f"Pattern({told(arguments)})", check)


def check_pattern(pattern: Pattern, kind: str, shape: Any) -> None:
    """Raise unless a pattern is what was asked for; and its arrays, where they are small."""
    rows, cols = pattern.shape
    assert (rows, cols) == tuple(entry.__index__() for entry in shape)
    assert pattern.nnz == (rows if kind == "diagonal" else rows * cols)
    if max(rows, cols) < 100:
        full = np.eye(rows) if kind == "diagonal" else np.ones((rows, cols))
        assert pattern.indices.tolist() == sp.csr_array(full).indices.tolist()
    elif rows >= 2**40:
        try:
            pattern.indptr  # noqa: B018
        except sparsescan.MemoryLimitError:
            return
        raise AssertionError("that much memory was found")


def container(rng: np.random.Generator) -> Call:
    """Return a container, and a scan of it."""
    size, n, batch = (int(k) for k in rng.integers(1, 4, 3))
    where = oracles.mask(rng, "sparse", size, size)
    indices, indptr = oracles.indices_of(where)
    index = {"indices": indices, "indptr": indptr, "shape": (size, size)}
    pattern = Pattern(**index)
    patterns = [pattern, Pattern.diagonal(size)]

    def draw(*lead: int) -> np.ndarray:
        return rng.standard_normal((*lead, pattern.nnz))

    kind = rng.integers(8)
    if kind == 0:
        name, arguments = "BatchedCSR", {"data": draw(batch)} | index
    elif kind == 1:
        name, arguments = "CSRChain", {"data": draw(n)} | index
    elif kind == 2:
        name, arguments = "CSRChain.from_pattern", {"data": draw(n, batch), "pattern": pattern}
    elif kind < 5:
        values = [draw(n), rng.standard_normal(size)]
        name, arguments = "PeriodicChain", {"values": values, "patterns": patterns}
    elif kind == 7:
        places = rng.integers(0, 3, pattern.nnz)
        arguments = {"pattern": pattern, "index": places, "size": 3}
        spoil(rng, arguments)
        return indexed_step(arguments)
    else:
        name = "ImplicitChain" if kind == 5 else "ImplicitStep"
        values = [draw(n) if kind == 5 else draw(), rng.standard_normal(size)]
        positions = [[], [1]][rng.integers(2)]
        arguments = {"values": values, "pattern": ImplicitPattern(patterns, positions)}
    spoil(rng, arguments)
    cls = getattr(sparsescan, name.split(".")[0])
    make = cls.from_pattern if "." in name else cls

    def run() -> Any:
        chain = make(**arguments)
        repr(chain)
        if rng.random() < 0.2:
            # Shapes are no longer those that were checked.
            change_shapes(chain)
        jacobians = [chain] if isinstance(chain, (BatchedCSR, ImplicitStep)) else chain
        cols = chain.patterns[0].shape[1] if name == "PeriodicChain" else chain.shape[1]
        lead = () if getattr(chain, "batch", None) is None else (chain.batch,)
        if max((*lead, 1)) * cols > 1 << 28:
            # It would take what memory this machine has, or be more than NumPy counts.
            raise sparsescan.MemoryLimitError("no gradient of this size is made here")
        grad = np.broadcast_to(1.0, (*lead, cols))
        return jacobians, grad, sparsescan.inclusive_scan(grad, jacobians)

    def check(returned: Any) -> None:
        jacobians, grad, result = returned
        check_scan(result, grad, jacobians, None, True)

    return Call(run, f"{name}({told(arguments)})", check)


def solve_step(rng: np.random.Generator) -> Call:
    """Return a step to solve with, among others, and a scan of it.

    The matrices are orthogonal, but for what is odd, so that bounds are small.
    """
    size, batch = int(rng.integers(1, 5)), [None, 3][rng.integers(2)]
    lead = () if batch is None else (batch,)
    matrix: Any = np.linalg.qr(rng.standard_normal((*lead, size, size)))[0]
    if batch is None and rng.random() < 0.5:
        matrix = sp.csr_array(matrix)
    arguments = {"matrix": matrix}
    options: dict[str, Any] = {"schedule": ["auto", "linear", "blelloch"][rng.integers(3)]}
    options["reverse"] = bool(rng.integers(2))
    other_step = rng.standard_normal((size, size))
    if rng.random() < 0.7:
        if rng.random() < 0.6:
            arguments["matrix"] = other(rng, matrix)
        else:
            spoil(rng, options)

    def run() -> Any:
        step = SolveStep(**arguments)
        repr(step)
        sparsescan.plan([step, step.pattern])
        grad = np.ones((*(() if step.batch is None else (step.batch,)), step.shape[0]))
        chain = [step, other_step, step] if step.shape[0] == size else [step]
        return grad, chain, sparsescan.inclusive_scan(grad, chain, **options)

    def check(returned: Any) -> None:
        grad, chain, result = returned
        if not np.isfinite(floats(chain[0].values[0])).all():
            assert np.isnan(result[0 if options["reverse"] else -1]).any()
            return
        turn = slice(None, None, -1 if options["reverse"] else 1)
        x, eps, reach = np.asarray(grad), np.finfo(result[0].dtype).eps, 1.0
        for step, one in zip(chain[turn], result[turn][1:], strict=True):
            matrix = np.asarray(clean(step), np.float64)
            x = (matrix @ x[..., None])[..., 0]
            reach = np.linalg.norm(matrix, axis=(-2, -1)).max(initial=1) * reach
            # The matrices are those that were made, with an entry or so that is another.
            is_solved = isinstance(step, SolveStep) and matrix.size > 0
            worst = np.linalg.cond(matrix).max(initial=1) if is_solved else 1
            reach *= max(worst, 1)
            assert one.shape == x.shape
            assert (np.abs(one - x) <= 1000 * eps * reach).all(), (one, x)

    text = f"SolveStep({told(arguments)}), {told(options)}"
    return Call(run, text, check)


def indexed_step(arguments: dict[str, Any]) -> Call:
    """Return a step of weights that are read through an index."""

    def run() -> Any:
        index = IndexedPattern(**arguments)
        repr(index)
        weights = np.arange(1.0, min(index.size, 10) + 1)
        grad = np.ones(index.shape[1])
        step = ImplicitStep([weights], ImplicitPattern([index]))
        return index, weights, grad, sparsescan.inclusive_scan(grad, [step])

    def check(returned: Any) -> None:
        index, weights, grad, result = returned
        values = weights[np.asarray(arguments["index"]).astype(int)]
        parts = values, index.pattern.indices, index.pattern.indptr
        check_scan(result, grad, [sp.csr_array(parts, shape=index.shape)], None, True)

    return Call(run, f"IndexedPattern({told(arguments)})", check)


def change_shapes(chain: Any) -> None:
    """Reshape the arrays of a container in place, and set its attributes."""
    for one in chain.values if hasattr(chain, "values") else [chain.data]:
        if isinstance(one, np.ndarray) and one.flags.c_contiguous:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that this will not be possible one day
                one.shape = (one.size, 1)
    for name in ("steps", "batch", "shape", "patterns", "data"):
        try:
            getattr(chain, name)
            setattr(chain, name, 10**6)
        except (SparseScanError, AttributeError):
            pass
        else:
            raise NotDocumentedError(f"{name} could be set")


def schedule(rng: np.random.Generator) -> Call:
    """Return a schedule."""
    n = int(rng.integers(0, 9))
    runs = [[(0, k, k + 1)] for k in range(1, n)]
    constructors: list[tuple[str, dict[str, Any]]] = [
        ("linear", {"n": n}),
        ("blelloch", {"n": n}),
        ("truncated", {"n": n, "up_levels": int(rng.integers(0, 4))}),
        ("chunked", {"n": n, "chunks": int(rng.integers(1, 5))}),
        ("from_levels", {"n": n, "levels": [("linear", [[run[0] for run in runs]])]}),
        ("from_levels", {"n": n, "levels": [(f"step {k}", [run]) for k, run in enumerate(runs)]}),
        ("from_levels", {"n": n, "levels": list(Schedule.blelloch(n).levels)}),
        ("", {"n": n, "levels": [], "text": "none"}),
    ]
    name, arguments = constructors[rng.integers(len(constructors))]
    spoil(rng, arguments)
    if name == "from_levels" and isinstance(arguments["levels"], list) and rng.random() < 0.5:
        arguments["levels"] = odd_levels(rng, arguments["levels"])
    make = getattr(Schedule, name) if name else Schedule

    def check(schedule: Schedule) -> None:
        assert schedule.n == arguments["n"].__index__()
        if schedule.n <= 100:
            letters = [f"{k}," for k in range(schedule.n)]
            scanned = schedule.scan(letters, lambda a, b: a + b)
            assert scanned == list(itertools.accumulate(letters))
        assert pickle.loads(pickle.dumps(schedule)) == schedule == copy.deepcopy(schedule)

    return Call(lambda: make(**arguments), f"Schedule.{name}({told(arguments)})", check)


def odd_levels(rng: np.random.Generator, levels: list[Any]) -> list[Any]:
    """Levels of which one is not as it should be."""
    levels = list(levels)
    if not levels:
        return [odd(rng)]
    at = rng.integers(len(levels))
    level = levels[at]
    if isinstance(level, Level):
        name = ("name", "ops", "runs")[rng.integers(3)]
        parts = {key: getattr(level, key) for key in ("name", "ops", "runs")}
        parts[name] = other(rng, parts[name])
        levels[at] = Level(**parts)
    elif isinstance(level, tuple) and len(level) == 2:
        name, runs = level
        choice = rng.integers(4)
        if choice == 0:
            levels[at] = name, other(rng, runs)
        elif choice == 1:
            levels[at] = odd(rng), runs
        elif choice == 2:
            levels[at] = name, [other(rng, np.array(run)) for run in runs]
        else:
            levels[at] = name, [other(rng, run) for run in runs]
    return levels


def scan_of_a_schedule(rng: np.random.Generator) -> Call:
    """Return a schedule run in any monoid."""
    n = int(rng.integers(0, 9))
    arguments: dict[str, Any] = {"items": list("abcdefghi"[:n]), "combine": None}
    schedule = oracles.every_schedule(n)[0]
    name = list(arguments)[rng.integers(2)]
    arguments["combine"] = lambda a, b: (a, b)
    arguments[name] = other_sequence(rng, arguments["items"]) if name == "items" else odd(rng)
    if isinstance(arguments["combine"], (type, Hostile)):
        arguments["combine"] = None
    return Call(lambda: schedule.scan(**arguments), f"{schedule}.scan({told(arguments)})")


def predicted(rng: np.random.Generator) -> Call:
    """Predictions of a plan."""
    workers = odd(rng)
    plan = sparsescan.plan([Pattern.diagonal(2)] * int(rng.integers(0, 5)))
    return Call(lambda: plan.predict(workers), f"{plan}.predict({in_words(workers)})")


def file_call(rng: np.random.Generator) -> Call:
    """Files: chains and plans, odd names, and bytes that are no file of ours."""
    folder = Path(tempfile.gettempdir()) / f"fuzz-{os.getpid()}"
    if not folder.exists():
        folder.mkdir()
        atexit.register(shutil.rmtree, folder)
    path = folder / "file.npz"
    chain = good_chain(rng)
    kind = rng.integers(4)
    if kind == 0:
        arguments: dict[str, Any] = {
            "path": path,
            "grad": chain.grad,
            "jacobians": chain.jacobians,
        }
        name = ("grad", "jacobians")[rng.integers(2)]
        arguments[name] = other(rng, arguments[name])
        given = arguments[name]
        if isinstance(given, np.ndarray) and given.nbytes > 1_000_000:
            arguments[name] = None  # it would fill the disk

        def run() -> Any:
            sparsescan.save_chain(**arguments)
            return sparsescan.load_chain(path)

        def check(returned: Any) -> None:
            grad, jacobians = returned
            result = sparsescan.inclusive_scan(grad, jacobians)
            check_scan(result, arguments["grad"], arguments["jacobians"], None, True)

        return Call(run, f"save_chain({told(arguments)})", check)
    if kind == 1:
        # A path where no file is, and none could be.
        strange = odd(rng)
        if isinstance(strange, (str, bytes)):
            strange = [b"\0", "\0", folder / "no" / "file", folder, "x" * 5000][rng.integers(5)]
        calls: list[Callable[[], Any]] = [
            lambda: sparsescan.save_chain(strange, np.ones(2), [np.eye(2)]),
            lambda: sparsescan.load_chain(strange),
            lambda: sparsescan.plan([np.eye(2)]).save(strange),
            lambda: sparsescan.ScanPlan.load(strange),
        ]
        return Call(
            calls[rng.integers(4)], f"a file at {in_words(strange)}", refuse_all, (OSError,)
        )
    if kind == 2:
        sparsescan.save_chain(path, chain.grad, chain.jacobians)
    else:
        sparsescan.plan(chain.jacobians).save(path)
    content = bytearray(path.read_bytes())
    if rng.random() < 0.5:
        content = content[: rng.integers(len(content))]
    else:
        for _ in range(rng.integers(1, 4)):
            content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    path.write_bytes(content)
    load = sparsescan.load_chain if kind == 2 else sparsescan.ScanPlan.load

    def same(returned: Any) -> None:
        # A flipped bit may be in what nobody reads, such as the time of an entry.
        if kind == 2:
            grad, jacobians = returned
            result = sparsescan.inclusive_scan(grad, jacobians)
            check_scan(result, chain.grad, chain.jacobians, None, True)
        else:
            assert returned.patterns == sparsescan.plan(chain.jacobians).patterns

    return Call(lambda: load(path), f"a damaged file of {in_words(chain.jacobians)}", same)


def refuse_all(result: Any) -> None:
    """Raise: no result is right."""
    raise NotDocumentedError(f"{in_words(result)} was returned")


# ---------------------------------------------------------------------------------------------
# Layers
# ---------------------------------------------------------------------------------------------

IMAGE = (2, 4, 4)
LAYERS: dict[str, dict[str, Any]] = {
    "AdaptiveAvgPool2d": {"output_size": 2, "input_shape": IMAGE},
    "AvgPool2d": {"kernel_size": 2, "stride": 2, "padding": 1, "input_shape": IMAGE},
    "BatchNorm1d": {"num_features": 2, "eps": 1e-5, "affine": True, "input_shape": (2, 5)},
    "BatchNorm2d": {"num_features": 2, "eps": 1e-5, "affine": True, "input_shape": IMAGE},
    "Conv1d": {
        "in_channels": 2,
        "out_channels": 3,
        "kernel_size": 2,
        "dilation": 1,
        "input_shape": (2, 5),
    },
    "Conv2d": {
        "in_channels": 2,
        "out_channels": 2,
        "kernel_size": 3,
        "stride": 1,
        "padding": 1,
        "groups": 1,
        "bias": True,
        "padding_mode": "zeros",
        "input_shape": IMAGE,
        "weight_mask": np.ones((2, 2, 3, 3), bool),
        "rng": 0,
    },
    "ConvTranspose2d": {
        "in_channels": 2,
        "out_channels": 2,
        "kernel_size": 2,
        "stride": 2,
        "output_padding": 0,
        "input_shape": IMAGE,
    },
    "Dropout": {"p": 0.5, "input_shape": (3,), "mask": np.array([True, False, True])},
    "ELU": {"alpha": 1.0, "input_shape": (3,)},
    "Flatten": {"start_dim": 1, "end_dim": -1, "input_shape": IMAGE},
    "GELU": {"approximate": "none", "input_shape": (3,)},
    "Hardtanh": {"min_val": -1.0, "max_val": 1.0, "input_shape": (3,)},
    "LayerNorm": {"normalized_shape": (3,), "eps": 1e-5, "input_shape": (2, 3), "bias": True},
    "LeakyReLU": {"negative_slope": 0.1, "input_shape": (3,)},
    "Linear": {
        "in_features": 3,
        "out_features": 2,
        "bias": True,
        "weight_mask": np.array([[True, False, True], [False, True, True]]),
        "dtype": np.float64,
        "rng": 0,
    },
    "MaxPool2d": {"kernel_size": 2, "ceil_mode": False, "input_shape": IMAGE},
    "Pad": {"pad_width": ((0, 1), (1, 0), (0, 0)), "input_shape": IMAGE},
    "Permute": {"dims": (0, 2, 3, 1), "input_shape": IMAGE},
    "ReLU": {"input_shape": (3,)},
    "SiLU": {"input_shape": (3,)},
    "Sigmoid": {"input_shape": (3,)},
    "Softmax": {"dim": 1, "input_shape": (3,)},
    "Softplus": {"beta": 1.0, "threshold": 20.0, "input_shape": (3,)},
    "Tanh": {"input_shape": (3,)},
    "Upsample": {"scale_factor": 2.0, "mode": "bilinear", "input_shape": IMAGE},
}
CELLS: dict[str, dict[str, Any]] = {
    name: {"input_size": 2, "hidden_size": 3, "bias": True, "rng": 0, "dtype": np.float64}
    for name in ("GRUCell", "LSTMCell", "RNNCell")
}


def class_of(name: str) -> Any:
    """Return a class of layers or cells."""
    return getattr(recurrent if name in CELLS else layers, name)


def layer_made(rng: np.random.Generator) -> Call:
    """Return a layer, whose Jacobian is the derivative of what it computes."""
    everything = LAYERS | CELLS
    name = list(everything)[rng.integers(len(everything))]
    arguments = dict(everything[name])
    spoil(rng, arguments)

    def check(layer: Any) -> None:
        sizes = (layer.input_size, layer.state_size) if name in CELLS else layer.shape
        if sizes[0] * sizes[1] < 10_000:
            (check_cell if name in CELLS else check_layer)(rng, layer)
        elif max(sizes) > 2**33:
            # It is not made before somebody asks for it.
            for attribute in ("pattern", "params"):
                with contextlib.suppress(SparseScanError):
                    getattr(layer, attribute)

    return Call(lambda: class_of(name)(**arguments), f"{name}({told(arguments)})", check)


def check_layer(rng: np.random.Generator, layer: Any) -> None:
    """Raise unless a Jacobian is that of finite differences."""
    repr(layer)
    mask = getattr(layer, "mask", None)
    x = rng.standard_normal(layer.input_shape)
    if mask is not None and mask.shape != layer.input_shape:
        return  # for a batch
    # No entry is near zero, where activations bend.
    x = np.where(np.abs(x) < 0.01, 0.5, x)
    jacobian = layer.jacobian(x)
    assert jacobian.shape == (x.size, int(np.prod(layer.output_shape)))
    exact = np.array(
        [(layer.forward(x + d) - layer.forward(x - d)).reshape(-1) / 2e-6 for d in bumps(x)]
    )
    assert np.allclose(jacobian.toarray(), exact.reshape(jacobian.shape), atol=1e-3, rtol=1e-3)


def check_cell(rng: np.random.Generator, cell: Any) -> None:
    """Check a recurrent cell."""
    repr(cell)
    x, h = rng.standard_normal(cell.input_size), rng.standard_normal(cell.state_size)
    actual = cell.jacobian(x, h).toarray()
    exact = [(cell.forward(x, h + d) - cell.forward(x, h - d)) / 2e-6 for d in bumps(h)]
    assert np.allclose(actual, np.array(exact), atol=1e-3, rtol=1e-3)


def bumps(x: np.ndarray) -> Iterator[np.ndarray]:
    """Yield a step along every axis."""
    for k in range(x.size):
        bump = np.zeros(x.size)
        bump[k] = 1e-6
        yield bump.reshape(x.shape)


def layer_called(rng: np.random.Generator) -> Call:
    """Return a good layer, called with odd arrays: what it accepts, it reads as NumPy does."""
    everything = LAYERS | CELLS
    name = list(everything)[rng.integers(len(everything))]
    layer = class_of(name)(**everything[name])
    if name in CELLS:
        x = rng.standard_normal((4, 2, 2))
        state = rng.standard_normal((4, 2, layer.state_size))
        arrays = {"x": x, "state": state}
        methods = {
            "forward": arrays,
            "values": arrays,
            "jacobian": arrays,
            "unroll": {"x": x, "state": state[0]},
            "param_grads": arrays | {"grad_state": state},
            "input_grads": arrays | {"grad_state": state},
        }
    else:
        x = rng.standard_normal((*[(2,), ()][rng.integers(2)], *layer.input_shape))
        y = layer.forward(x)
        methods = {
            "forward": {"x": x},
            "values": {"x": x, "y": y},
            "jacobian": {"x": x},
            "param_grads": {"x": x, "grad_y": y},
        }
    method = list(methods)[rng.integers(len(methods))]
    arguments: dict[str, Any] = dict(methods[method])
    if method == "values" and rng.random() < 0.3:
        arguments["out"] = getattr(layer, method)(**arguments)
    spoil(rng, arguments)
    out_given = "out" in arguments

    def check(result: Any) -> None:
        read = {
            key: None if value is None else floats(value)
            for key, value in arguments.items()
            if key != "out"
        }
        assert_same(result, getattr(layer, method)(**read))
        if out_given and arguments["out"] is not None:
            assert result is arguments["out"]

    return Call(
        lambda: getattr(layer, method)(**arguments), f"{name}.{method}({told(arguments)})", check
    )


def parameter(rng: np.random.Generator) -> Call:
    """Return a parameter that is set, and then read by a kernel."""
    name = ("Linear", "Conv2d", "BatchNorm2d", "LayerNorm", "GRUCell", "RNNCell")[rng.integers(6)]
    layer = class_of(name)(**(LAYERS | CELLS)[name])
    attribute = list(layer.params)[rng.integers(len(layer.params))]
    value = other(rng, layer.params[attribute].copy())

    def run() -> Any:
        setattr(layer, attribute, value)
        if rng.random() < 0.2 and isinstance(value, np.ndarray) and value.flags.c_contiguous:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value.shape = (value.size,)
        if name in CELLS:
            return layer.values(np.ones((2, 2)), np.ones((2, 3)))
        return layer.values(np.ones(layer.input_shape))

    def check(result: Any) -> None:
        actual = getattr(layer, attribute).reshape(-1)
        assert np.array_equal(actual, floats(value).reshape(-1), equal_nan=True)
        assert result.dtype in (np.float32, np.float64)

    return Call(run, f"{name}.{attribute} = {in_words(value)}", check)


def sequential(rng: np.random.Generator) -> Call:
    """Layers one after the other, with odd layers, activations and gradients."""
    ops: Any = [layers.Linear(3, 3, rng=0), layers.Tanh(input_shape=(3,)), layers.Linear(3, 2)]
    if rng.random() < 0.5:
        ops[1] = layers.Residual(layers.Tanh(input_shape=(3,)), layers.Linear(3, 3, rng=1))
    if rng.random() < 0.3:
        wrong = other_sequence(rng, ops)
        cls = (layers.Sequential, layers.Residual)[rng.integers(2)]
        make = (lambda: layers.Residual(*wrong)) if cls is layers.Residual else (lambda: cls(wrong))
        if not isinstance(wrong, (list, tuple)):
            make = lambda: layers.Sequential(wrong)  # noqa: E731
        return Call(make, f"{cls.__name__}({in_words(wrong)})", lambda layer: repr(layer))
    net = layers.Sequential(ops)
    x = rng.standard_normal((2, 3))
    xs = net.activations(x)
    grads = net.plan().exclusive_scan(xs[-1], net.values(xs))
    methods: dict[str, dict[str, Any]] = {
        "forward": {"x": x},
        "activations": {"x": x},
        "values": {"activations": xs},
        "jacobians": {"activations": xs},
        "param_grads": {"activations": xs, "gradients": grads},
    }
    method = list(methods)[rng.integers(len(methods))]
    arguments = dict(methods[method])
    spoil(rng, arguments)

    def check(result: Any) -> None:
        if method == "param_grads":
            return  # it reads what layers have, and nothing of the steps between them
        read = {
            key: floats(value) if key == "x" else [floats(each) for each in value]
            for key, value in arguments.items()
        }
        assert_same(result, getattr(net, method)(**read))

    return Call(
        lambda: getattr(net, method)(**arguments), f"Sequential.{method}({told(arguments)})", check
    )


NETWORKS = {"RNN": recurrent.RNN, "GRU": recurrent.GRU, "LSTM": recurrent.LSTM}
# What is no flag, and no number of layers.
NO_FLAGS = (np.array(True), np.array([False]), np.ones(2), [], [True], "False", None, 0.0, 2, -1)
COUNTS = (0, -1, 10**6, 10**12, 1 << 62, 1 << 70, True, 1.0, "1", [1], np.ones(1), np.array(1))


def network_made(rng: np.random.Generator) -> Call:
    """Return a recurrent network, or a step of implicit factors, with an odd flag or count."""
    name = list(NETWORKS)[rng.integers(3)]
    arguments: dict[str, Any] = {"input_size": 2, "hidden_size": 3, "num_layers": 1, "bias": True}
    arguments |= {"bidirectional": bool(rng.integers(2)), "rng": 0, "dtype": np.float64}
    size = NETWORKS[name](2, 3).params["weight_hh_l0"].shape
    arguments["masks"] = {"weight_hh_l0": rng.random(size) < 0.3}
    odd_one = ("num_layers", "bias", "bidirectional", "masks")[rng.integers(4)]
    if odd_one == "masks":
        spoil(rng, arguments)
    elif rng.random() < 0.7:
        choices = COUNTS if odd_one == "num_layers" else NO_FLAGS
        arguments[odd_one] = choices[rng.integers(len(choices))]
    else:
        arguments[odd_one] = odd(rng)

    def check(net: Any) -> None:
        assert net.num_layers <= 10_000
        assert isinstance(net.bidirectional, bool)
        if max(net.input_size, net.hidden_size, net.num_layers) < 100:
            output, _ = net.training_step().forward(np.ones((2, 1, net.input_size)))
            assert output.shape == (2, 1, net.hidden_size * (1 + net.bidirectional))

    return Call(lambda: NETWORKS[name](**arguments), f"{name}({told(arguments)})", check)


def network_called(rng: np.random.Generator) -> Call:
    """Run a recurrent network forward and backward, on odd arrays, lengths and flags."""
    name, batch = list(NETWORKS)[rng.integers(3)], int(rng.choice([0, 1, 3]))
    both = bool(rng.integers(2))
    net = NETWORKS[name](2, 3, bidirectional=both, rng=0, dtype=np.float64)
    shape = (1 + both, batch, net.state_size)
    arguments: dict[str, Any] = {
        "x": rng.standard_normal((4, batch, 2)),
        "state": rng.standard_normal(shape),
        "lengths": rng.integers(0, 5, batch),
        "grad_output": rng.standard_normal((4, batch, 3 * (1 + both))),
        "grad_state": rng.standard_normal(shape),
        "needs_input_grad": bool(rng.integers(2)),
    }
    good = dict(arguments)
    if rng.random() < 0.3:
        arguments["needs_input_grad"] = NO_FLAGS[rng.integers(len(NO_FLAGS))]
    elif rng.random() < 0.5:
        lengths = arguments["lengths"]
        odd_lengths = (masked(lengths), lengths.tolist(), [[]], [], lengths.astype(">i2"))
        arguments["lengths"] = odd_lengths[rng.integers(len(odd_lengths))]
    else:
        spoil(rng, arguments)

    def run(given: dict[str, Any]) -> Any:
        step = net.training_step()
        output, state = step.forward(given["x"], given["state"], given["lengths"])
        grads = step.backward(
            given["grad_output"],
            given["grad_state"],
            needs_input_grad=given["needs_input_grad"],
        )
        return [output, state, grads.state, *grads.params.values()]

    def check(result: Any) -> None:
        read = {
            key: None if value is None else floats(value)
            for key, value in arguments.items()
            if key in ("x", "state", "grad_output", "grad_state")
        }
        if isinstance(arguments["lengths"], np.ma.MaskedArray):
            raise NotDocumentedError("lengths with a mask were taken")
        lengths = arguments["lengths"]
        read["lengths"] = None if lengths is None else np.array(lengths, np.int64)
        assert_same(result, run(good | read))

    return Call(lambda: run(arguments), f"{name}: {told(arguments)}", check)


def implicit_made(rng: np.random.Generator) -> Call:
    """Return the pattern of an implicit step, with positions that are none."""
    positions = (1, 0, -1, 2, 1.0, [1], (1,), np.array(1), np.array([1]), True, "1", None, 1 << 70)
    arguments: dict[str, Any] = {"factors": [Pattern.diagonal(2), Pattern.dense((2, 2))]}
    for name in ("shared", "solved"):
        picked = [positions[rng.integers(len(positions))] for _ in range(rng.integers(3))]
        arguments[name] = picked if rng.random() < 0.7 else other(rng, picked)
    if rng.random() < 0.2:
        spoil(rng, arguments)
    return Call(
        lambda: ImplicitPattern(**arguments),
        f"ImplicitPattern({told(arguments)})",
        lambda made: repr(made),
    )


def affine(rng: np.random.Generator) -> Call:
    """Run a linear recurrence in the order of time, with odd arrays and flags."""
    batch = int(rng.choice([0, 1, 3]))
    arguments: dict[str, Any] = {
        "matrices": rng.standard_normal((4, batch, 2)) / 2,
        "offsets": rng.standard_normal((4, batch, 2)),
        "initial": rng.standard_normal((batch, 2)),
        "pattern": Pattern.diagonal(2),
    }
    spoil(rng, arguments)

    def check(result: Any) -> None:
        read = {
            key: value if key == "pattern" or value is None else floats(value, NUMBERS)
            for key, value in arguments.items()
        }
        assert_same(result, sparsescan.affine_scan(**read))

    return Call(
        lambda: sparsescan.affine_scan(**arguments), f"affine_scan({told(arguments)})", check
    )


FLAGS = "transposed", "needs_matrices_grad", "return_states"


def door(rng: np.random.Generator) -> Call:
    """Call a function of a front door with one argument that is odd, and flags that are none."""
    name, function, arguments = pick_door(rng)
    changed = list(arguments)[rng.integers(len(arguments))]
    if changed in FLAGS and rng.random() < 0.8:
        arguments[changed] = NO_FLAGS[rng.integers(len(NO_FLAGS))]
    elif torch is not None and rng.random() < 0.2:
        arguments[changed] = torch.eye(3).to_sparse()
    else:
        value = odd(rng)
        # After a list that holds itself JAX leaves Python no depth of recursion.
        is_kept = name.startswith("jax.") and isinstance(value, (list, dict))
        arguments[changed] = None if is_kept or rng.random() < 0.1 else value

    def check(_: Any) -> None:
        if changed in FLAGS and not any(arguments[changed] is one for one in (True, False)):
            kinds = (int, np.integer, np.bool_)
            if not (isinstance(arguments[changed], kinds) and arguments[changed] in (0, 1)):
                raise NotDocumentedError(f"{changed} was taken")

    return Call(lambda: function(**arguments), f"{name}({told(arguments)})", check)


def pick_door(rng: np.random.Generator) -> tuple[str, Callable[..., Any], dict[str, Any]]:
    """Return a function of some front door, and arguments that it takes."""
    steps = int(rng.integers(1, 4))
    matrices, offsets = (rng.standard_normal((steps, 2)).astype(np.float32) for _ in range(2))
    vectors = {"matrices": matrices, "initial": offsets[0]}
    if rng.random() < 0.25:
        about = vectors | {"states": offsets, "grads": offsets, "needs_matrices_grad": True}
        about |= {"pattern": None, "transposed": False}
        return "affine_scan_vjp", sparsescan.affine_scan_vjp, about
    about = vectors | {"offsets": offsets, "pattern": None, "transposed": False}
    x, state = offsets[:, None], np.zeros((1, 1, 3), np.float32)
    resets, net = np.zeros((steps, 1), bool), recurrent.GRU(2, 3, rng=0)
    if torch is not None and rng.random() < 0.6:
        import sparsescan.torch as front

        def of_torch(given: dict[str, Any]) -> dict[str, Any]:
            return {
                key: torch.from_numpy(each) if isinstance(each, np.ndarray) else each
                for key, each in given.items()
            }

        if rng.random() < 0.6:
            return "torch.affine_scan", front.affine_scan, of_torch(about)
        kind = (front.GRU, front.module(recurrent.GRUCell))[rng.integers(2)]
        called = of_torch({"input": x, "hx": state, "resets": resets, "reset_states": state})
        return f"torch.{kind.__name__}", kind(2, 3), called
    try:
        import sparsescan.jax as jax_front
    except ImportError:
        return "affine_scan", sparsescan.affine_scan, about
    if rng.random() < 0.5:
        return "jax.affine_scan", jax_front.affine_scan, about
    called = {"params": dict(net.params), "x": x, "state": state, "lengths": np.array([steps])}
    called |= {"resets": resets, "reset_states": state}
    called |= {"memory_limit": None, "truncate": None, "return_states": False}
    return "jax.recurrent", functools.partial(jax_front.recurrent, net), called


def training_step(rng: np.random.Generator) -> Call:
    """Run layers forward and backward in one step, with odd arrays and flags."""
    ops = [layers.Linear(3, 4, rng=0), layers.Tanh(input_shape=(4,)), layers.Linear(4, 2, rng=1)]
    net, batch = layers.Sequential(ops), int(rng.choice([0, 1, 3]))
    arguments: dict[str, Any] = {
        "x": rng.standard_normal((batch, 3)),
        "grad_output": rng.standard_normal((batch, 2)),
        "needs_input_grad": bool(rng.integers(2)),
    }
    if rng.random() < 0.3:
        arguments["needs_input_grad"] = NO_FLAGS[rng.integers(len(NO_FLAGS))]
    else:
        spoil(rng, arguments)

    def run(x: Any, grad_output: Any, needs_input_grad: Any) -> Any:
        step = net.training_step()
        output = step.forward(x)
        grads = step.backward(grad_output, needs_input_grad=needs_input_grad)
        return [output, *grads.params.values()]

    def check(result: Any) -> None:
        read = [floats(arguments[name]) for name in ("x", "grad_output")]
        assert_same(result, run(*read, False))

    return Call(lambda: run(**arguments), f"Sequential: {told(arguments)}", check)


def assert_same(a: Any, b: Any) -> None:
    """Raise unless two results have the same bits."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        a, b = list(a.values()), list(b.values())
    if isinstance(a, list):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
        return
    if isinstance(a, (CSRChain, BatchedCSR)) or sp.issparse(a):
        assert type(a) is type(b)
        a, b = a.data, b.data
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert np.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)


# How often each kind of call is made.
KINDS: dict[Callable[[np.random.Generator], Call], int] = {
    scan: 25,
    planned: 25,
    pattern: 8,
    container: 8,
    solve_step: 4,
    schedule: 8,
    scan_of_a_schedule: 1,
    predicted: 1,
    file_call: 3,
    layer_made: 8,
    layer_called: 8,
    parameter: 3,
    sequential: 2,
    network_made: 4,
    network_called: 8,
    implicit_made: 2,
    affine: 4,
    training_step: 4,
    door: 8,
}


def make(seed: int, i: int) -> Call:
    """Call number `i`."""
    Changing.instances = 0
    rng = np.random.default_rng([seed, i])
    kinds = list(KINDS)
    odds = np.array([*KINDS.values()], float)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that np.matrix is old, and the like
        return kinds[rng.choice(len(kinds), p=odds / odds.sum())](rng)


def outcome(call: Call) -> str:
    """``"refused"`` or ``"right"``; whatever else happens is raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            result = call.run()
        except SparseScanError as error:
            if len(str(error)) > LONGEST_MESSAGE:
                raise NotDocumentedError(f"a message of {len(str(error))} characters") from error
            return "refused"
        except call.allowed:
            return "refused"
    if Changing.instances:
        return "right"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the oracle
        call.check(result)
    return "right"


def run(seed: int, numbers: Sequence[int], *, most: int = 20) -> collections.Counter[str]:
    """Make calls, print those that fail, and count what came of all."""
    counts: collections.Counter[str] = collections.Counter()
    for i in numbers:
        start, text = time.perf_counter(), "while it was made"
        try:
            call = make(seed, i)
            text = call.text
            counts[outcome(call)] += 1
        except Exception:
            counts["wrong"] += 1
            print(f"seed {seed}, call {i}: {text[:3000]}\n{traceback.format_exc()}", flush=True)
            if counts["wrong"] == most:
                break
        if time.perf_counter() - start > SLOW:
            print(f"seed {seed}, call {i} took {time.perf_counter() - start:.1f} s: {text[:300]}")
    return counts


def main() -> None:
    """Make as many calls as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one call")
    arguments = parser.parse_args()
    start = time.perf_counter()
    if arguments.only is not None:
        print(make(arguments.seed, arguments.only).text)
    numbers = range(arguments.count) if arguments.only is None else [arguments.only]
    counts = run(arguments.seed, numbers)
    seconds = time.perf_counter() - start
    print(
        f"seed {arguments.seed}: {counts.total()} calls in {seconds:.0f} s: {counts['refused']} "
        f"refused, {counts['right']} right, {counts['wrong']} wrong"
    )
    sys.exit(bool(counts["wrong"]))


if __name__ == "__main__":
    main()
