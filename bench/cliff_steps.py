"""Steps of every kind, and special inputs of the shapes that their random ones have.

Numbers are in the order of time, and samples of a recurrence have the second axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

import sparsescan
from sparsescan import CSRChain, ImplicitChain, ImplicitPattern, Pattern
from sparsescan import jacobians as layers
from sparsescan.jacobians import Linear, ReLU, Residual, Sequential
from sparsescan.recurrent import GRU, LSTM, RNN

from . import workloads
from .networks import NetworkCase
from .timing import Call

Array = NDArray[Any]

RANDOM, AGAIN = "random", "random, again"
# Sizes of numbers that are subnormal; from where an impulse decays, and by how many powers of ten.
_SUBNORMAL = {np.dtype(np.float32): 1e-40, np.dtype(np.float64): 1e-310}
_IMPULSE = {np.dtype(np.float32): 1e-36, np.dtype(np.float64): 1e-304}
_DECADES = {np.dtype(np.float32): 10, np.dtype(np.float64): 20}
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


class Numbers(NamedTuple):
    """All numbers of a step.

    Attributes
    ----------
    x, initial : ndarray or None
        Inputs and initial state, or offsets and initial state; a scan of Jacobians has none.
    grads : ndarray
        Gradients of a loss in the results of a network, or in every state.
    params : dict of str to ndarray
        Weights and biases of a network, or values of Jacobians and matrices.
    """

    x: Array | None
    initial: Array | None
    grads: Array
    params: dict[str, Array]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.grads.dtype


class Passes(NamedTuple):
    """What is done before a turn, and the calls by their names, which follow each other."""

    ready: Call
    calls: dict[str, Call]


class Step:
    """A step on numbers, which has a `name`.

    It makes random ``numbers()``, and the calls for some, ``passes(numbers)``. Where there are
    steps in time, ``decaying(numbers, rate)`` turns numbers into those by which an impulse decays
    by a factor in each. Of Jacobians, ``rebased(numbers, by)`` turns them into those of the same
    steps where each unit is as many times as large.

    Attributes
    ----------
    samples : int or None
        The axis of samples; None if there is one sample.
    is_in_time : bool
        Whether there are steps in time, which are the first axis of gradients.
    has_relu : bool
        Whether biases can switch units off.
    has_units : bool
        Whether it has Jacobians.
    """

    samples: int | None
    is_in_time = has_relu = has_units = False


def inputs(step: Any) -> dict[str, Numbers]:
    """Return the random numbers of a step, twice, and all special ones that make sense for it."""
    numbers = step.numbers()
    special = {
        name: make(step, numbers) for name, (fits, make) in SPECIAL.items() if fits(step, numbers)
    }
    return {RANDOM: numbers, AGAIN: numbers} | special


# -- Special inputs --------------------------------------------------------------------------------

Change = Callable[[Array], Array]


def _changed(numbers: Numbers, change: Change, *names: str) -> Numbers:
    """Change some arrays, as far as they are there; of parameters "weights" or "biases"."""
    params = {
        key: change(array) if ("biases" if "bias" in key else "weights") in names else array
        for key, array in numbers.params.items()
    }
    others = {name: getattr(numbers, name) for name in ("x", "initial", "grads") if name in names}
    made = {name: change(array) for name, array in others.items() if array is not None}
    return numbers._replace(params=params, **made)


def _times(factor: float) -> Change:
    return lambda array: array * array.dtype.type(factor)


def _filled(value: float) -> Change:
    return lambda array: np.full_like(array, value)


def _set(where: Callable[[Array], Any], value: float) -> Change:
    """Set the entries at some places, with the signs that they have."""

    def change(array: Array) -> Array:
        array = array.copy()
        at = where(array)
        array[at] = np.copysign(array.dtype.type(value), array[at])
        return array

    return change


def _kept(where: Any) -> Change:
    """Keep some entries, and zeros elsewhere."""

    def change(array: Array) -> Array:
        kept = np.zeros_like(array)
        kept[where] = array[where]
        return kept

    return change


def _sample(step: Step) -> tuple[Any, ...]:
    """Return where the first sample is."""
    assert step.samples is not None
    return (*[slice(None)] * step.samples, 0)


def _largest(array: Array) -> Any:
    # No layer has pruned the largest ones.
    return np.unravel_index(np.abs(array).argmax(), array.shape)


def _apart(step: Step, numbers: Numbers) -> Numbers:
    rng = np.random.default_rng(1)
    return _changed(
        numbers,
        lambda array: (array * 10.0 ** rng.uniform(-12, 12, array.shape)).astype(array.dtype),
        "weights",
    )


def _units_apart(step: Step, numbers: Numbers) -> Numbers:
    by = 10.0 ** np.random.default_rng(1).uniform(-12, 12, numbers.grads.shape[-1])
    grads = (numbers.grads * by).astype(numbers.dtype)
    return step.rebased(numbers._replace(grads=grads), by)


def _impulse(step: Step, numbers: Numbers) -> Numbers:
    first = _IMPULSE[numbers.dtype]
    rate = 10 ** (-_DECADES[numbers.dtype] / len(numbers.grads))
    numbers = _changed(numbers, _filled(0), "x", "grads", "biases")
    numbers = _changed(numbers, _filled(first), "initial")
    numbers.grads[-1] = first
    return step.decaying(numbers, rate)


def _subnormal(step: Step, numbers: Numbers) -> Numbers:
    numbers = _changed(numbers, _times(_SUBNORMAL[numbers.dtype]), "x", "initial", "grads")
    return _changed(numbers, _filled(0), "biases")


def _overflow(step: Step, numbers: Numbers) -> Numbers:
    most = 0.9 * np.finfo(numbers.dtype).max
    return _changed(numbers, lambda array: array / np.abs(array).max() * most, "weights")


def _in_time(step: Step, numbers: Numbers) -> bool:
    return step.is_in_time


def _samples(step: Step, numbers: Numbers) -> bool:
    return step.samples is not None


def _has_x(step: Step, numbers: Numbers) -> bool:
    return numbers.x is not None


def _always(step: Step, numbers: Numbers) -> bool:
    return True


# Whether an input makes sense for a step, and what makes it.
SPECIAL: dict[str, tuple[Callable[[Step, Numbers], bool], Callable[[Step, Numbers], Numbers]]] = {
    "loss at the last step": (_in_time, lambda s, n: _changed(n, _kept(-1), "grads")),
    "loss at a step in 100": (
        _in_time,
        lambda s, n: _changed(n, _kept(slice(None, None, -100)), "grads"),
    ),
    "loss of one sample": (_samples, lambda s, n: _changed(n, _kept(_sample(s)), "grads")),
    "decay to subnormal": (_in_time, _impulse),
    "subnormal": (_always, _subnormal),
    "subnormal weights": (
        _always,
        lambda s, n: _changed(n, _times(_SUBNORMAL[n.dtype]), "weights", "biases"),
    ),
    "inputs × 1,000": (_has_x, lambda s, n: _changed(n, _times(1e3), "x")),
    "ReLUs off": (lambda s, n: s.has_relu, lambda s, n: _changed(n, _filled(-100), "biases")),
    "weights × 1,000": (_always, lambda s, n: _changed(n, _times(1e3), "weights")),
    "weights far apart": (_always, _apart),
    "units far apart": (lambda s, n: s.has_units, _units_apart),
    "overflow": (_always, _overflow),
    "NaN in a sample": (
        _samples,
        lambda s, n: _changed(n, _set(lambda _: _sample(s), np.nan), "x", "grads"),
    ),
    "NaN in a weight": (_always, lambda s, n: _changed(n, _set(_largest, np.nan), "weights")),
    "infinite inputs": (_has_x, lambda s, n: _changed(n, _set(lambda _: ..., np.inf), "x")),
    "infinite gradients": (_always, lambda s, n: _changed(n, _set(lambda _: -1, np.inf), "grads")),
    "zeros": (_always, lambda s, n: _changed(n, _filled(0), "x", "initial", "grads", "biases")),
    "zero weights": (_always, lambda s, n: _changed(n, _filled(0), "weights", "biases")),
    "ones": (
        _always,
        lambda s, n: _changed(n, _filled(1), "x", "initial", "grads", "weights", "biases"),
    ),
}


# -- Recurrent networks ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Recurrent(Step):
    """A recurrent network of one layer."""

    kind: str
    hidden: int
    batch: int
    steps: int = 1000
    dtype: DTypeLike = np.float32
    nonlinearity: Literal["tanh", "relu"] = "tanh"

    is_in_time = True

    @property
    def name(self) -> str:
        kind = f"RNN({self.nonlinearity})" if self.kind == "RNN" else self.kind
        kind += "" if self.dtype is np.float32 else " in float64"
        return f"{kind}, H={self.hidden}, B={self.batch}, T={self.steps:,}"

    @property
    def samples(self) -> int | None:
        return 1 if self.batch > 1 else None

    @property
    def has_relu(self) -> bool:
        return self.nonlinearity == "relu"

    def network(self) -> Any:
        if self.kind == "RNN":
            return RNN(12, self.hidden, nonlinearity=self.nonlinearity, rng=0)
        return {"GRU": GRU, "LSTM": LSTM}[self.kind](12, self.hidden, rng=0)

    def numbers(self) -> Numbers:
        rng, net = np.random.default_rng(0), self.network()
        params = {name: array.astype(self.dtype) for name, array in net.params.items()}
        shapes = (
            (self.steps, self.batch, 12),
            (1, self.batch, net.state_size),
            (self.steps, self.batch, self.hidden),
        )
        arrays = (rng.standard_normal(shape).astype(self.dtype) for shape in shapes)
        return Numbers(*arrays, params)

    def passes(self, numbers: Numbers) -> Passes:
        net = self.network()
        for name, array in numbers.params.items():
            setattr(net, name, array)
        step = net.training_step()
        return Passes(
            lambda: None,
            {
                "forward": lambda: step.forward(numbers.x, numbers.initial),
                "backward": lambda: step.backward(numbers.grads),
            },
        )

    def decaying(self, numbers: Numbers, rate: float) -> Numbers:
        """Let a gate, or the weights of an RNN, take `rate` of the state in each step."""
        params = {name: array.copy() for name, array in numbers.params.items()}
        gates = params["weight_hh_l0"].reshape(_GATES[self.kind], self.hidden, self.hidden)
        bias = params["bias_ih_l0"].reshape(_GATES[self.kind], self.hidden)
        if self.kind == "RNN":
            gates[0] = rate * np.eye(self.hidden)
        else:
            # What is new is 0: the third gate of both; the second one keeps the state.
            gates[2] = 0
            bias[1] = np.log(rate / (1 - rate))
        return numbers._replace(params=params)


# -- Networks of layers ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layers(Step):
    """A network of layers, made once, whose parameters are set before each turn."""

    name: str
    make: Callable[[], Sequential]
    batch: int

    samples = 0
    has_relu = True

    def numbers(self) -> Numbers:
        rng, net = np.random.default_rng(0), self.make()
        shape, out = _without_batch(net, self.batch)
        x = rng.standard_normal((self.batch, *shape), np.float32)
        grads = rng.standard_normal((self.batch, *out), np.float32)
        params = {
            f"{place}.{own}": np.array(array)
            for place, layer in _placed(net.ops)
            for own, array in layer.params.items()
        }
        return Numbers(x, None, grads, params)

    def passes(self, numbers: Numbers) -> Passes:
        net, step = _training(self.make)
        known = dict(_placed(net.ops))

        def ready() -> None:
            for name, array in numbers.params.items():
                layer, _, own = name.rpartition(".")
                setattr(known[layer], own, array)

        calls: dict[str, Call] = {
            "forward": lambda: step.forward(numbers.x),
            "backward": lambda: step.backward(numbers.grads),
        }
        return Passes(ready, calls)


@cache
def _training(make: Callable[[], Sequential]) -> tuple[Sequential, Any]:
    net = make()
    return net, net.training_step()


def _placed(ops: Iterable[Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the layers of a network with their places, those of residual blocks too."""
    for k, layer in enumerate(ops):
        place = f"{before}{k}"
        if isinstance(layer, Residual):
            yield from _placed(layer.ops, f"{place}.")
            yield from _placed(layer.shortcut, f"{place}.shortcut.")
        else:
            yield place, layer


def _without_batch(net: Sequential, batch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of a sample and its result; networks of whole batches have their axis."""
    shapes = net.input_shape, net.output_shape
    is_whole = all(shape[0] == batch for shape in shapes)
    first, last = (shape[1:] if is_whole else shape for shape in shapes)
    return first, last


@cache
def _pruned(kind: str, batch: int, kept: float) -> Sequential:
    return NetworkCase(kind, batch, kept, 1).race().net


@cache
def _dense() -> Sequential:
    # So large that BLAS multiplies.
    return Sequential([Linear(784, 512, rng=0), ReLU(input_shape=(512,)), Linear(512, 512, rng=0)])


@cache
def _smooth() -> Sequential:
    """Return a network of the layers that the others do not have."""
    shape = (8, 14, 14)
    smooth = "ELU", "GELU", "SiLU", "Tanh", "Softplus", "Sigmoid"
    return Sequential(
        [
            layers.Conv2d(1, 8, 3, input_shape=(1, 16, 16), rng=0),
            *(getattr(layers, kind)(input_shape=shape) for kind in smooth),
            layers.MaxPool2d(2, input_shape=shape),
            layers.Flatten(input_shape=(8, 7, 7)),
            *(layers.LayerNorm(392), Linear(392, 10, rng=0)),
            layers.Softmax(1, input_shape=(10,)),
        ]
    )


# -- Linear recurrences ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Affine(Step):
    """A linear recurrence of dense matrices or of diagonals."""

    steps: int
    batch: int
    size: int
    is_diagonal: bool
    dtype: DTypeLike = np.float32

    samples, is_in_time = 1, True

    @property
    def name(self) -> str:
        kind = "diagonals" if self.is_diagonal else "dense matrices"
        in_dtype = "" if self.dtype is np.float32 else " in float64"
        return f"affine_scan, {self.steps:,} {kind} of {self.size}, B={self.batch}{in_dtype}"

    def numbers(self) -> Numbers:
        rng = np.random.default_rng(0)
        if self.is_diagonal:
            matrices = rng.uniform(0.9, 1, (self.steps, self.batch, self.size))
            matrices *= rng.choice([-1, 1], matrices.shape)
        else:
            turn = np.linalg.qr(rng.standard_normal((self.size, self.size)))[0]
            matrices = turn * rng.uniform(0.9, 1, (self.steps, self.batch, 1, 1))
        shape = self.steps, self.batch, self.size
        x, grads = (rng.standard_normal(shape).astype(self.dtype) for _ in range(2))
        initial = rng.standard_normal(shape[1:]).astype(self.dtype)
        return Numbers(x, initial, grads, {"matrices": matrices.astype(self.dtype)})

    def passes(self, numbers: Numbers) -> Passes:
        pattern = Pattern.diagonal(self.size) if self.is_diagonal else None
        matrices, initial, states = numbers.params["matrices"], numbers.initial, np.empty(0)

        def forward() -> None:
            nonlocal states
            states = sparsescan.affine_scan(matrices, numbers.x, initial, pattern=pattern)

        def backward() -> None:
            sparsescan.affine_scan_vjp(
                matrices, initial=initial, states=states, grads=numbers.grads, pattern=pattern
            )

        return Passes(lambda: None, {"forward": forward, "backward": backward})

    def decaying(self, numbers: Numbers, rate: float) -> Numbers:
        step = np.ones(self.size) if self.is_diagonal else np.eye(self.size)
        matrices = np.empty_like(numbers.params["matrices"])
        matrices[:] = rate * step
        return numbers._replace(params={"matrices": matrices})


# -- Chains of Jacobians ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Chain(Step):
    """A scan of Jacobians, by a plan unless there is no schedule."""

    kind: str
    steps: int
    batch: int
    size: int
    schedule: str | None
    dtype: DTypeLike = np.float32

    samples, is_in_time, has_units = 1, True, True

    @property
    def name(self) -> str:
        door = "exclusive_scan" if self.schedule is None else f"plan, {self.schedule}"
        in_dtype = "" if self.dtype is np.float32 else " in float64"
        return f"{door}, {self.steps:,} {self.kind} of {self.size}, B={self.batch}{in_dtype}"

    def numbers(self) -> Numbers:
        rng = np.random.default_rng(0)
        if self.kind == "stencils":
            chain = workloads.stencil(self.steps, round(self.size**0.5), self.dtype).chain
            params = {"values": np.asarray(chain.data)}
        elif self.kind == "dense steps":
            values = workloads.tanh_rnn(self.steps, self.batch, self.size, self.dtype).jacobians
            params = {"values": values}
        else:
            slopes = workloads.tanh_rnn_slopes(self.steps, self.batch, self.size)
            params = {
                "values": slopes.slopes.astype(self.dtype),
                "shared": slopes.weights.astype(self.dtype),
            }
        grads = rng.standard_normal((self.steps, self.batch, self.size)).astype(self.dtype)
        return Numbers(None, None, grads, params)

    def passes(self, numbers: Numbers) -> Passes:
        chain = self._chain(numbers.params)
        if self.schedule is None:
            scan: Any = partial(sparsescan.exclusive_scan, reverse=True)
        else:
            schedule = self.schedule
            scan = sparsescan.plan(chain, reverse=True, schedule=schedule).exclusive_scan
        calls: dict[str, Call] = {"scan": lambda: scan(None, chain, local_grads=numbers.grads)}
        return Passes(lambda: None, calls)

    @property
    def _like(self) -> CSRChain:
        """A chain of stencils with the pattern."""
        return workloads.stencil(1, round(self.size**0.5), self.dtype).chain

    def _chain(self, params: dict[str, Array]) -> Any:
        values = params["values"]
        if self.kind == "stencils":
            like = self._like
            return CSRChain(values, like.indices, like.indptr, like.shape)
        if self.kind == "dense steps":
            return values
        pattern = ImplicitPattern(
            [Pattern.diagonal(self.size), Pattern.dense((self.size, self.size))], shared=[1]
        )
        return ImplicitChain([values, params["shared"].ravel()], pattern)

    def _times(self, numbers: Numbers, factor: Any) -> Numbers:
        """Multiply Jacobians, or what all steps share of them."""
        *_, name = numbers.params
        made = (numbers.params[name] * factor).astype(numbers.dtype)
        return numbers._replace(params=numbers.params | {name: made})

    def decaying(self, numbers: Numbers, rate: float) -> Numbers:
        return self._times(numbers, numbers.dtype.type(rate))

    def rebased(self, numbers: Numbers, by: Array) -> Numbers:
        """Multiply rows of each Jacobian, and divide columns."""
        if self.kind == "stencils":
            like = self._like
            factor = np.repeat(by, np.diff(like.indptr)) / by[like.indices]
        else:
            factor = by[:, None] / by
        return self._times(numbers, factor)


# -- All -------------------------------------------------------------------------------------------

STEPS: dict[str, Step] = {
    each.name: each
    for each in (
        _Recurrent("RNN", 20, 16),
        _Recurrent("RNN", 20, 16, nonlinearity="relu"),
        _Recurrent("GRU", 20, 16),
        _Recurrent("LSTM", 20, 16),
        _Recurrent("GRU", 20, 16, dtype=np.float64),
        _Recurrent("RNN", 128, 16, nonlinearity="relu"),
        _Recurrent("RNN", 64, 16),
        _Recurrent("GRU", 64, 16),
        _Recurrent("LSTM", 128, 16, steps=300),
        _Recurrent("RNN", 20, 1),
        _Recurrent("RNN", 20, 1, nonlinearity="relu"),
        _Recurrent("GRU", 20, 1),
        _Recurrent("LSTM", 20, 1),
        _Layers("MLP, pruned by 98%, B=64", partial(_pruned, "MLP", 64, 0.02), 64),
        _Layers("ResNet-20, pruned by 95%, B=4", partial(_pruned, "ResNet-20", 4, 0.05), 4),
        _Layers("two dense layers by BLAS, B=64", _dense, 64),
        _Layers("convolution, smooth activations, pool, norm, softmax, B=16", _smooth, 16),
        _Affine(2000, 4, 64, is_diagonal=True),
        _Affine(2000, 4, 64, is_diagonal=True, dtype=np.float64),
        _Affine(1000, 16, 8, is_diagonal=False),
        _Affine(1000, 16, 8, is_diagonal=False, dtype=np.float64),
        _Chain("stencils", 200, 4, 256, None),
        _Chain("stencils", 200, 4, 256, "linear", np.float64),
        _Chain("stencils", 64, 4, 36, "blelloch"),
        _Chain("dense steps", 200, 4, 20, "auto"),
        _Chain("dense steps", 200, 4, 20, "blelloch"),
        _Chain("dense steps", 200, 4, 20, "blelloch", np.float64),
        _Chain("implicit steps", 1000, 4, 20, "auto"),
        _Chain("implicit steps", 1000, 4, 20, "chunked:8"),
    )
}
# The steps of a quick run.
QUICK_STEPS: dict[str, Step] = {
    each.name: each
    for each in (
        _Recurrent("RNN", 20, 16, 200, nonlinearity="relu"),
        _Recurrent("GRU", 20, 1, 200),
        _Layers("two dense layers by BLAS, B=64", _dense, 64),
        _Affine(200, 4, 16, is_diagonal=True),
        _Chain("dense steps", 50, 4, 20, "blelloch"),
    )
}
