"""Contenders for the training step of one cell of the catalogue.

Each makes :class:`Step` functions, which return the outputs, and the gradients in the input, in the
first state, which is zeros, and in all parameters by the names that these have in the cell.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numba
import numpy as np
from numpy.typing import NDArray

from sparsescan.recurrent import Cell, GRUCell, Hidden, Input, LSTMCell, catalogue, sigmoid
from sparsescan.recurrent.definition import further_of
from sparsescan.recurrent.step import TrainingStep

from . import cell_scan, peers
from .timing import THREADS, fastest

Array = NDArray[Any]

UNROLLS = 1, 2, 4, 8, 16
# Steps of the sequences that tell with how many threads Python's loops are faster.
_SHORT = 100
# Options of our cells where torchrecurrent computes something else than the paper that it cites.
_AS_THERE: dict[str, dict[str, Any]] = {
    "LEM": {"memory": "old"},
    "NAS": {"join": "sum"},
    "SCRN": {"recurrent": "output"},
}
# Which of our states those of torchrecurrent's layers are, unless they are all of them in order.
_STATES = {
    "IntersectionRNN": (1,),
    "MCLSTM": (1, 2),
    "SCRN": (0, 2),
    "TGRU": (0,),
    "TLSTM": (1,),
    "tauGRU": (0,),
}


class Step(Protocol):
    """A whole training step, from the gradients in all outputs, or from others if there are any."""

    def __call__(self, grad: Array | None = None) -> dict[str, Any]:
        """Return the outputs and the gradients by their names."""


@dataclass(frozen=True)
class Case:
    """A cell of the catalogue, and the sizes of its input."""

    kind: str
    hidden: int = 20
    inputs: int = 12  # as many as units where a cell reads the input of each unit
    batch: int = 16
    steps: int = 1000
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        heads = f"{self.options['heads']} heads, " if "heads" in self.options else ""
        return f"{self.kind}, {heads}H={self.hidden}, B={self.batch}, T={self.steps:,}"

    def as_in_torchrecurrent(self) -> Case:
        """Return the case with what torchrecurrent computes."""
        return replace(self, options={**self.options, **_AS_THERE.get(self.kind, {})})

    def without_zeros(self) -> Case:
        """Return the case with masks that are drawn, and are never 0."""
        masks = further_of(getattr(catalogue, self.kind))
        return replace(self, options=dict.fromkeys(masks, 0.0))

    def given(self) -> Given:
        """Return the cell, and what it computes with."""
        kind: type[Cell] = getattr(catalogue, self.kind)
        make = partial(kind, hidden_size=self.hidden, rng=0, **self.options)
        try:
            cell = make(self.inputs)
        except ValueError:
            cell = make(self.hidden)
        return given_of(cell, self.steps, self.batch)


@dataclass(frozen=True)
class Given:
    """A cell, the inputs, the first state, and the gradients in all outputs."""

    cell: Cell
    x: Array
    state: Array
    grad: Array

    @property
    def kind(self) -> str:
        """Name of the cell."""
        return type(self.cell).__name__

    def first(self, count: int) -> Given:
        """Return the first steps."""
        return replace(self, x=self.x[:count], grad=self.grad[:count])


def given_of(cell: Cell, steps: int, batch: int) -> Given:
    """Return what a cell computes with."""
    rng, lead = np.random.default_rng(0), (steps, batch)
    return Given(
        cell,
        rng.standard_normal((*lead, cell.input_size), np.float32),
        np.zeros((batch, cell.state_size), np.float32),
        rng.standard_normal((*lead, cell.hidden_size), np.float32),
    )


# -- Ours -----------------------------------------------------------------------------------------


def ours(given: Given) -> dict[str, Step]:
    """Return our training step, with as many threads as there are cores and with one."""
    steps = {count: given.cell.training_step() for count in (THREADS, 1)}
    return {f"{n} threads": partial(_ours, given, step, n) for n, step in steps.items()}


def forward(given: Given, variant: str) -> Callable[[], Any]:
    """Return our forward pass."""
    step, threads = given.cell.training_step(), int(variant.split()[0])

    def call() -> Any:
        numba.config.NUMBA_NUM_THREADS = threads
        return step.forward(given.x, given.state[None], rng=0)

    return call


def _ours(
    given: Given, step: TrainingStep, threads: int, grad: Array | None = None
) -> dict[str, Any]:
    numba.config.NUMBA_NUM_THREADS = threads
    output, _ = step.forward(given.x, given.state[None], rng=0)  # of masks, if it has any
    grads = step.backward(given.grad if grad is None else grad)
    return {"output": output, "input": grads.input, "state": grads.state[0], **grads.params}


class _ResetGRU(Cell):
    """The GRU of :class:`sparsescan.recurrent.catalogue.RecurrentDropoutGRU`, without dropout."""

    weight_ih = Input("z", "r", "n")
    weight_hh = Hidden("z", "r", "n")

    def step(self, x: Any, h: Any) -> Any:
        W, U = self.weight_ih, self.weight_hh
        z, r = sigmoid(W.z(x) + U.z(h)), sigmoid(W.r(x) + U.r(h))
        return h + z * (np.tanh(W.n(x) + U.n(r * h)) - h)


# Cells with masks, and those that they are without.
UNMASKED: dict[str, type[Cell]] = {
    "RecurrentDropoutGRU": _ResetGRU,
    "RecurrentDropoutLSTM": LSTMCell,
    "VariationalGRU": GRUCell,
    "VariationalLSTM": LSTMCell,
    "ZoneoutLSTM": LSTMCell,
}


def unmasked(given: Given) -> dict[str, Step]:
    """Return our training step of a cell without its masks."""
    cell = UNMASKED[given.kind](given.cell.input_size, given.cell.hidden_size)
    for name, array in given.cell.params.items():
        setattr(cell, name, array)
    return ours(replace(given, cell=cell))


# -- JAX ------------------------------------------------------------------------------------------


def jax(given: Given) -> dict[str, Step]:
    """Return the jitted scan of the fastest form and unroll, for two cores and for one."""
    name, best = cell_scan.fastest(partial(jitted, given), UNROLLS)
    return {name: best, f"{name}, {ONE_CORE}": best}


def jitted(given: Given, unroll: int, is_packed: bool) -> Step:
    jax = peers.load_jax()
    run = jax.jit(cell_scan.with_gradients(cell_scan.outputs(given.cell, unroll, is_packed)))
    *arrays, all_grads = jax.device_put((dict(given.cell.params), given.x, given.state, given.grad))

    def call(grad: Array | None = None) -> dict[str, Any]:
        given_grad = all_grads if grad is None else grad
        output, (params, x, state) = jax.block_until_ready(run(*arrays, given_grad))
        return {"output": output, "input": x, "state": state, **params}

    return call


# -- PyTorch --------------------------------------------------------------------------------------


def torchrecurrent(given: Given) -> dict[str, Step]:
    """Return the step of torchrecurrent's layer of a name, with our parameters."""
    package = peers.require("torchrecurrent", "pip install torchrecurrent==0.2.5")
    torch = peers.load_torch()
    known = inspect.signature(getattr(package, f"{given.kind}Cell")).parameters
    options = {key: True for key in known if key.endswith("bias")}
    options |= {key: each for key, each in given.cell.options.items() if key in known}
    layer = getattr(package, given.kind)(given.cell.input_size, given.cell.hidden_size, **options)
    params = dict(layer.cells[0].named_parameters())
    _fill(params, given)
    with torch.no_grad():
        _, last = layer(torch.tensor(given.x[:1]))
    states = [torch.zeros_like(each).requires_grad_() for each in _tensors(last)]
    of_ours = _STATES.get(given.kind, tuple(range(given.cell.program.states)))

    def run(x: Any) -> Any:
        return layer(x, _nested(last, iter(states)))[0]

    found = dict(zip(map(_of_state, of_ours), states, strict=False))
    if given.kind == "JANET":
        found = {}  # both of its states are ours
    return _in_threads(torch, given, run, {**found, **params})


def snntorch(given: Given) -> dict[str, Step]:
    """Return the loop over steps that snnTorch's users write, with neurons that learn."""
    package = peers.require("snntorch", "pip install snntorch")
    torch = peers.load_torch()
    rates = [name for name in ("alpha", "beta") if name in given.cell.params]
    about = {name: float(given.cell.params[name]) for name in rates}
    neuron = getattr(package, given.kind)(**about, spike_grad=package.surrogate.atan())
    for name in (*rates, "threshold"):
        # As learn_beta=True does: Alpha has such an argument for each rate, but refuses it.
        number = getattr(neuron, name).detach().clone()
        delattr(neuron, name)
        setattr(neuron, name, torch.nn.Parameter(number))
    params = dict(neuron.named_parameters())
    shape = given.state[:, : given.cell.hidden_size].shape
    states = [torch.zeros(shape, requires_grad=True) for _ in range(given.cell.program.states - 1)]

    def run(x: Any) -> Any:
        spikes, now = [], states
        for input_of_step in x:
            spike, *now = neuron(input_of_step, *now)
            spikes.append(spike)
        return torch.stack(spikes)

    found = {_of_state(k + 1): each for k, each in enumerate(states)}
    return _in_threads(torch, given, run, {**found, **params})


def xlstm(given: Given) -> dict[str, Step]:
    """Return the sLSTM of the package ``xlstm``, its form without CUDA, behind a linear map."""
    module = peers.require("xlstm.blocks.slstm.cell", "pip install --no-deps xlstm mlstm_kernels")
    torch = peers.load_torch()
    config = module.sLSTMCellConfig(
        hidden_size=given.cell.hidden_size,
        num_heads=given.cell.options["heads"],
        backend="vanilla",
        batch_size=given.x.shape[1],
        input_shape="SBGNH",
        output_shape="SBH",
        dtype="float32",
        enable_automatic_mixed_precision=False,
    )
    cell = module.sLSTMCell_vanilla(config)
    linear = torch.nn.Linear(given.cell.input_size, 4 * given.cell.hidden_size, bias=False)
    # Its kernel has the gates of a head side by side; here a gate has all heads.
    shape = cell._recurrent_kernel_.shape
    heads, size = shape[0], shape[2]
    del cell._recurrent_kernel_
    kernel = torch.empty(4 * given.cell.hidden_size, size, requires_grad=True)
    params = {"weight_ih": linear.weight, "weight_hh": kernel, "bias_ih": cell._bias_}
    _fill(params, given)
    states = torch.zeros((4, *given.state[:, : given.cell.hidden_size].shape), requires_grad=True)

    def run(x: Any) -> Any:
        turned = kernel.reshape(4, heads, size, size).transpose(0, 1)
        cell._recurrent_kernel_ = turned.reshape(shape)
        return cell(linear(x), states)[0]

    return _in_threads(torch, given, run, params)


def layer_norm_loop(given: Given) -> dict[str, Step]:
    """Return the loop over steps of a cell with layer normalisation, as one writes it in PyTorch.

    What no state is needed for is computed for all steps at once.
    """
    torch = peers.load_torch()
    layer_norm = torch.nn.functional.layer_norm
    own = {
        name: torch.tensor(array, requires_grad=True) for name, array in given.cell.params.items()
    }
    count, units = given.cell.program.states, given.cell.hidden_size
    states = [torch.zeros(given.x.shape[1], units, requires_grad=True) for _ in range(count)]
    turned = own["weight_hh"].T

    def lstm(read: Any, h: Any, c: Any) -> Any:
        keep = layer_norm(h @ turned, (4 * units,), own["scale_hh"])
        f, i, o, g = (read[0] + keep).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * layer_norm(c, (units,), own["scale_c"], own["bias_c"]).tanh(), c

    def gru(read: Any, h: Any) -> Any:
        gates, n = read
        first, last = (h @ turned).split([2 * units, units], -1)
        scale, scale_n = own["scale_hh"].split([2 * units, units])
        z, r = (gates + layer_norm(first, (2 * units,), scale)).sigmoid().chunk(2, -1)
        n = (n + r * layer_norm(last, (units,), scale_n, own["bias_hn"])).tanh()
        return (h + z * (n - h),)

    def run(x: Any) -> Any:
        read, outputs, now = x @ own["weight_ih"].T, [], states
        if count == 2:
            read = (layer_norm(read, (4 * units,), own["scale_ih"], own["bias_hh"]),)
        else:
            parts = [read, own["scale_ih"], own["bias_ih"]]
            parts = zip(*(each.split([2 * units, units], -1) for each in parts), strict=True)
            read = tuple(layer_norm(a, a.shape[-1:], *more) for a, *more in parts)
        for each in zip(*(one.unbind() for one in read), strict=True):
            now = (lstm if count == 2 else gru)(each, *now)
            outputs.append(now[0])
        return torch.stack(outputs)

    return _in_threads(torch, given, run, {f"state {k}": s for k, s in enumerate(states)} | own)


def _fill(params: Mapping[str, Any], given: Given) -> None:
    """Give a module our parameters."""
    assert params.keys() == given.cell.params.keys(), (params.keys(), given.cell.params.keys())
    for name, param in params.items():
        param.data = peers.load_torch().tensor(given.cell.params[name]).reshape(param.shape)


def _tensors(state: Any) -> list[Any]:
    """Return the tensors of a layer's states."""
    return (
        [each for one in state for each in _tensors(one)] if isinstance(state, tuple) else [state]
    )


def _nested(like: Any, states: Iterator[Any]) -> Any:
    """Return states in the form of others."""
    if isinstance(like, tuple):
        return tuple(_nested(one, states) for one in like)
    return next(states)


def _of_state(which: int) -> str:
    """Return the name of the gradient in one of the vectors that make up the first state."""
    return f"state {which}"


def _in_threads(
    torch: Any, given: Given, run: Callable[[Any], Any], leaves: Mapping[str, Any]
) -> dict[str, Step]:
    """Return steps of a module with the number of threads that is faster on a short sequence."""

    def step(of: Given, threads: int) -> Step:
        x, all_grads = torch.tensor(of.x, requires_grad=True), torch.tensor(of.grad)

        def call(grad: Array | None = None) -> dict[str, Any]:
            torch.set_num_threads(threads)
            output = run(x)
            given_grad = all_grads if grad is None else torch.tensor(grad)
            own = {"input": x, **leaves}
            found = torch.autograd.grad(output, [*own.values()], given_grad, allow_unused=True)
            named = zip(own, found, strict=True)
            return {"output": output.detach(), **{k: g for k, g in named if g is not None}}

        return call

    short = given.first(_SHORT)
    name, _ = fastest({f"{count} threads": step(short, count) for count in (THREADS, 1)}, 5)
    return {name: step(given, int(name.split()[0]))}


# -- One core -------------------------------------------------------------------------------------

ONE_CORE = "one core"


@contextmanager
def on_one_core(is_asked: bool) -> Iterator[None]:
    """Keep all threads of this process on one core, if it is asked for."""
    before = os.sched_getaffinity(0) if is_asked else set[int]()
    if is_asked:
        _keep_on({min(before)})
    try:
        yield
    finally:
        if is_asked:
            _keep_on(before)


def _keep_on(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue  # it has ended
