"""Recurrent networks as primitives of JAX, with derivatives of any order, in both modes.

There are four. `_run` is a network, and `_slope` its derivative in a direction, which is linear in
that. Its transpose is `_gradients`, whose own derivative is `_slope_of_gradients`. The derivative
of a layer is a forward pass of the cells that :func:`~sparsescan.recurrent.tangent.tangent_of`
makes, and that of its gradients a backward pass of these. Networks of several layers are
differentiated layer by layer.

All take *numbers*: the parameters in their order, the inputs and the initial states; and *marks*:
lengths and resets, if there are any. New axes of inputs are samples. New axes of parameters, as of
an ensemble of models, are *members*: all numbers and marks have one in front, and one call runs all
members, which threads share.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from ...errors import MemoryLimitError
from ...execution.calls import LINE
from ...execution.recording import Recording, groups_of
from ...graph.expressions import is_linear
from ...recurrent import Recurrent
from ...recurrent.arguments import Options
from ...recurrent.definition import width_of
from ...recurrent.memory import has_reset_states
from ...recurrent.passes import RecurrentLike
from ...recurrent.recorded import Parameters, RecordedStep, parameters_of, program_text, record
from ...recurrent.tangent import TangentLayer, run_layers, tangent_of
from ..binder import FUNCTIONS
from .calls import vary, varying
from .programs import Lengths, add, call, key_of
from .rules import alike, differentiated, filled, mapped, merge, parted, primitive, set_map, size_of


class TracedNetwork:
    """A network, equal to others that compute the same from the same parameters."""

    def __init__(self, network: RecurrentLike) -> None:
        self.network = network
        self._parameters: dict[str, list[Parameters]] = {}
        self.cells: list[Any] = [cell for layer in network.cells for cell in layer]
        about = [
            (
                *(program_text(type(cell), cell.program), cell.shapes, cell.hidden_size),
                [
                    None if mask is None else np.packbits(mask.on(np)).tobytes()
                    for mask in cell.masks.values()
                ],
            )
            for cell in self.cells
        ]
        self._key = repr((about, len(network.cells), len(network.cells[0])))

    @property
    def count(self) -> int:
        """How many parameters there are."""
        return sum(len(cell.shapes) for cell in self.cells)

    def parameters(self, dtype: str) -> list[Parameters]:
        """Return what gradients of the parameters of each direction are sums of."""
        if dtype not in self._parameters:
            self._parameters[dtype] = parameters_of(self.network, dtype)
        return self._parameters[dtype]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TracedNetwork) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return self._key


class _Form(NamedTuple):
    """A network, its options, and its marks.

    `has_reset_states` says whether the states that resets set are beside the initial ones.
    `members` is how many members there are, 0 if arrays have no axis of these.
    """

    network: TracedNetwork
    options: Options
    has_lengths: bool
    has_resets: bool
    has_reset_states: bool = False
    members: int = 0

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return self.network.count + 2

    def marks(self, marks: Sequence[Any]) -> tuple[Any, Any]:
        """Return lengths and resets, or None."""
        each = iter(marks)
        lengths = next(each) if self.has_lengths else None
        return lengths, next(each) if self.has_resets else None

    @property
    def lead(self) -> tuple[int, ...]:
        """The axes in front of all others."""
        return (self.members,) if self.members else ()

    @property
    def axes(self) -> list[int | None]:
        """The axis of samples of each of the numbers and marks; None for parameters."""
        first = len(self.lead)
        marks = [first] * self.has_lengths + [first + 1] * self.has_resets
        return [*(None,) * self.network.count, first + 1, first + 1, *marks]

    @property
    def one(self) -> _Form:
        """The form of one member."""
        return self._replace(members=0)

    def times(self, count: int) -> _Form:
        """Return the form of so many times as many members."""
        return self._replace(members=count * max(self.members, 1))

    def joined(self, arrays: Sequence[Any]) -> list[Any]:
        """Return arrays for these, from some with another axis of members in front."""
        return [merge(each, 0) for each in arrays] if self.members else list(arrays)

    def apart(self, count: int, arrays: Sequence[Any]) -> list[Any]:
        """Return arrays with another axis in front, of so many times as many members."""
        return [each.reshape(count, *self.lead, *each.shape[1:]) for each in arrays]


def run(
    network: TracedNetwork,
    options: Options,
    params: Sequence[Any],
    x: Any,
    state: Any,
    lengths: Any,
    resets: Any,
) -> tuple[Any, Any]:
    """Return outputs, those of one step in one axis, and last states.

    The states that resets set may be :func:`~sparsescan.recurrent.memory.beside` the initial ones.
    """
    marks_of = lengths is not None, resets is not None
    has_states = has_reset_states(state, len(network.cells))
    form = _Form(network, options, *marks_of, has_states)
    marks = [each for each in (lengths, resets) if each is not None]
    output, last = _run.bind(*params, x, state, *marks, form=form, keeps="")
    return output, last


# -- Programs --------------------------------------------------------------------------------------


# Bytes of the memory of all members from which it is not kept: a backward pass begins with another
# forward one, in memory that stays near. New memory takes as long, and may be too much.
_MOST_KEPT = 1 << 24


class _Step(NamedTuple):
    """A recorded training step, and the keys of its programs.

    Attributes
    ----------
    recorded : RecordedStep
        The step of one member.
    memory : tuple of int
        The shape of the memory of the forward pass.
    kept : tuple of int
        What is kept of it.
    forward, backward : int
        The keys; `backward` is 0 if there is none.
    """

    recorded: RecordedStep
    memory: tuple[int, ...]
    kept: tuple[int, ...]
    forward: int
    backward: int

    @property
    def is_again(self) -> bool:
        """Whether the backward pass begins with a forward one."""
        return self.kept != self.memory


@functools.lru_cache(maxsize=256)
def _step_of(form: _Form, steps: int, batch: int, dtype: str, keeps: str, needs_x: bool) -> _Step:
    """Return the programs of a network for inputs of a shape.

    A backward pass will come if `keeps` says whether there are gradients of the parameters for
    ``"all"`` samples, or only what they are sums of, for ``"each"``. It has those in inputs if they
    are needed.
    """
    net = form.network.network
    recorded = record(
        *(net, steps, batch, dtype),
        lengths=np.int32 if form.has_lengths else None,
        has_resets=form.has_resets,
        has_reset_states=form.has_reset_states,
        has_backward=keeps != "",
        keeps_samples=keeps == "each",
        needs_input_grad=needs_x,
        options=form.options if keeps == "all" else form.options.unbounded(),
    )
    about = form, steps, batch, dtype, keeps
    forward, backward = key_of("forward", *about), key_of("backward", *about, needs_x)
    rows = len(form.network.cells) * (1 + form.has_reset_states)
    shapes = [(steps, batch, width_of(net)), (rows, batch, net.state_size)]
    size = np.dtype(dtype).itemsize
    marks = [4 * batch] * form.has_lengths + [steps * batch] * form.has_resets
    given = [math.prod(each) * size for each in shapes] + marks
    given += [each.size * size for each in net.params.values()]
    count, groups = len(given), max(groups_of(form.members), 1)
    # Memory that gradients of each sample need has an axis for these.
    rows = max(batch, 1) if keeps == "each" else 1
    columns = -(-recorded.nbytes // (rows * LINE)) * LINE
    memory = kept = (*form.lead, rows, columns) if keeps == "each" else (*form.lead, columns)
    is_again = keeps != "" and groups < form.members and math.prod(memory) > _MOST_KEPT
    if is_again or not keeps:
        memory = (groups * columns * rows,)
        kept = (*form.lead, 0) if is_again else memory
    # Of the arrays only the memory, and the results behind all others, are results.
    checked = Lengths(2, max(form.members, 1) * batch, steps) if form.has_lengths else None
    one = columns * rows
    own_memory = [0] if is_again or not keeps else []
    made = _for_members(form, recorded.forward, [one, *given], own_memory)
    add(forward, made, [-3, *range(count), -1, -2], math.prod(memory), checked)
    step = _Step(recorded, memory, kept, forward, 0 if recorded.backward is None else backward)
    if recorded.backward is None:
        return step
    above = [math.prod(each.shape) * size for each in recorded.forward.results]
    results = len(recorded.backward.results)
    own = [-1 - k for k in range(results)]
    if not is_again:
        bytes_of = [one, recorded.back_nbytes, *above]
        made = _for_members(form, recorded.backward, bytes_of, [1])
        add(backward, made, [0, -results - 2, 1, 2, *own], 0)
        return step
    # Memory of both passes, and what the first of them returns, are results behind the others.
    behind = 4 + count
    both = recorded.forward.then(
        recorded.backward,
        [0, *range(4, behind), 2, 3],
        [0, 1, *range(behind, behind + 2 + results)],
    )
    bytes_of = [one, recorded.back_nbytes, *above, *given, *above]
    made = _for_members(form, both, bytes_of, range(4))
    memories = [-results - 1 - k for k in range(4)]
    add(backward, made, [*memories, *range(count + 2), *own], math.prod(memory), checked)
    return step


def fits(
    network: TracedNetwork,
    options: Options,
    has_lengths: bool,
    has_resets: bool,
    has_reset_states: bool,
    steps: int,
    batch: int,
    dtype: str,
) -> bool:
    """Return whether a backward pass fits in a limit."""
    form = _Form(network, options, has_lengths, has_resets, has_reset_states)
    try:
        _step_of(form, steps, batch, dtype, "all", True)
    except MemoryLimitError:
        return False
    return True


def _for_members(
    form: _Form, recording: Recording, given: list[int], scratch: Collection[int]
) -> Recording:
    """Return a recording for all members, given the bytes of all arrays but the results."""
    if not form.members:
        return recording
    own = [math.prod(each.shape) * each.dtype.itemsize for each in recording.results]
    return recording.members(form.members, [*given, *own], scratch)


def _step_for(form: _Form, x: Any, keeps: str, needs_x: bool = True) -> _Step:
    """Return the programs of a network for such inputs."""
    return _step_of(form, *x.shape[-3:-1], x.dtype.name, keeps, needs_x)


def _kinds(form: _Form, recording: Recording) -> list[Any]:
    """Return the shapes and dtypes of the results of a recording of one member, for all."""
    return [((*form.lead, *each.shape), each.dtype) for each in recording.results]


def _given(form: _Form, numbers: Sequence[Any]) -> list[Any]:
    """Return numbers and marks in the order of programs."""
    count = form.network.count
    return [*numbers[count:], *numbers[:count]]


def _forward(*given: Any, form: _Form, keeps: str) -> list[Any]:
    """Return outputs, last states and, if it `keeps` that, the memory of the pass."""
    x = given[form.network.count]
    step = _step_for(form, x, keeps)
    results = [*_kinds(form, step.recorded.forward), (step.memory, np.uint8)]
    output, last, memory = call(step.forward, _given(form, given), results)
    kept = vary(jnp.zeros(step.kept, np.uint8), varying(x)) if step.is_again else memory
    return [output, last, kept] if keeps else [output, last]


def _backward(
    form: _Form, keeps: str, kept: Any, above: Any, given: Any, needs_x: bool
) -> dict[str, Any]:
    """Return the results of a backward pass by their names."""
    step = _step_for(form, given[form.network.count], keeps, needs_x)
    assert step.recorded.backward is not None
    names = [each.name for each in step.recorded.backward.results]
    results = _kinds(form, step.recorded.backward)
    groups = max(groups_of(form.members), 1)
    scratch = ((groups * step.recorded.back_nbytes,), np.uint8)
    if step.is_again:
        memory: list[Any] = [(step.memory, np.uint8), scratch]
        memory += [((groups, *each.shape), each.dtype) for each in step.recorded.forward.results]
        arrays = call(step.backward, [*_given(form, given), *above], [*results, *memory])
    else:
        memory = [(kept.shape, np.uint8), scratch]
        arrays = call(step.backward, [kept, *above], [*results, *memory], {0: len(results)})
    return dict(zip(names, arrays, strict=False))


def _sums(network: TracedNetwork, factors: Mapping[str, Any], x: Any) -> list[Any]:
    """Return the gradients in the parameters: sums of products over steps and samples."""
    grads = []
    for k, one in enumerate(network.parameters(x.dtype.name)):
        own = {"input": x} | {
            name: factors[f"{name} {k}"]
            for name in ("products", "states", "arguments", "input", "rows")
            if f"{name} {k}" in factors
        }
        rows = {name: each.reshape(-1, each.shape[-1]) for name, each in own.items()}
        parts = []
        for group in one.groups:
            # One product of matrices is faster than several.
            others = [rows[name][:, begin:end] for name, begin, end in group.factors]
            above = rows["products"][:, group.first : group.end]
            product = jnp.matmul(above.T, jnp.concatenate(others, 1), precision="highest")
            parts.append(product.reshape(-1))
        parts += [rows[name].sum(0) for name in ("products", "rows") if name in rows]
        every = jnp.concatenate([*parts, jnp.zeros(1, x.dtype)])
        for name, shape in one.shapes.items():
            grads.append(every[one.orders[name]].sum(-1).reshape(shape))
    return grads


def _gradients_of(kept: Any, *given: Any, form: _Form, maps: int, needs_x: bool) -> list[Any]:
    """Return the gradients in all numbers, those in parameters for each of so many maps.

    The samples of maps are side by side; without maps, 0, there are sums over all samples. Those in
    inputs are zeros unless they are needed.
    """
    above, numbers = given[:2], given[2:]
    x = numbers[form.network.count]
    keeps = "each" if maps else "all"
    if kept.shape != _step_for(form, x, keeps).kept:
        # Of another pass, which had these samples and others, or fewer.
        *_, kept = _forward(*numbers, form=form, keeps=keeps)
    found = _backward(form, keeps, kept, above, numbers, needs_x)
    in_x = found.pop("input") if needs_x else jnp.zeros_like(x)
    cells = form.network.cells
    if not maps:
        params = [found[f"{name} {k}"] for k, each in enumerate(cells) for name in each.shapes]
        return [*params, in_x, found["state"]]
    in_state = found.pop("state")

    def sums(x: Any, factors: Any) -> Any:
        own = {name: parted(array, maps) for name, array in factors.items()}
        return jax.vmap(functools.partial(_sums, form.network))(own, parted(x, maps))

    params = (jax.vmap(sums) if form.members else sums)(x, found)
    return [*params, in_x, in_state]


def _nothing_kept() -> Any:
    """Return what stands for the memory of a pass if that has to be run again."""
    return jnp.zeros(0, np.uint8)


# -- Derivatives -----------------------------------------------------------------------------------


def _along(form: _Form, given: Sequence[Any], slopes: Sequence[Any]) -> Any:
    """Return the derivatives of outputs and last states in a direction."""
    if form.members:
        return jax.vmap(functools.partial(_along, form.one))(list(given), list(slopes))
    numbers, marks = given[: form.size], given[form.size :]
    if _is_by_layers(form):
        by_layers = functools.partial(_by_layers, form, marks)
        return jax.jvp(by_layers, tuple(numbers), tuple(slopes))[1]
    made = _tangent(form.network, bool(form.options.return_states))
    own = form._replace(network=made.network)
    return made.layer.results(*_run.bind(*made.joined(numbers, slopes), *marks, form=own, keeps=""))


def _gradients_along(
    form: _Form, above: Sequence[Any], given: Sequence[Any], slopes: Sequence[Any]
) -> Any:
    """Return the derivatives of the gradients in all numbers in a direction of these."""
    numbers, marks = given[: form.size], given[form.size :]

    def along(*numbers: Any) -> Any:
        return _along(form, [*numbers, *marks], slopes)

    return jax.vjp(along, *numbers)[1](tuple(above))


def _is_by_layers(form: _Form) -> bool:
    """Return whether a network is differentiated layer by layer."""
    return len(form.network.network.cells) > 1 or form.options.return_states == "layers"


def _by_layers(form: _Form, marks: Sequence[Any], *numbers: Any) -> tuple[Any, Any]:
    """Return outputs and last states of several layers, each by itself."""
    net, layers = form.network.network, _layers(form.network)

    def run(k: int, options: Options, numbers: list[Any]) -> tuple[Any, Any]:
        own = form._replace(network=layers[k], options=options)
        output, last = _run.bind(*numbers, *marks, form=own, keeps="")
        return output, last

    one = net.cells[0][0]
    sizes = len(net.cells), len(net.cells[0]), one.hidden_size, len(one.program.further_grads)
    return run_layers(FUNCTIONS, run, sizes, form.options, numbers)


@functools.lru_cache(maxsize=256)
def _layers(network: TracedNetwork) -> list[TracedNetwork]:
    """Return the layers of a network."""
    return [TracedNetwork(_OneLayer(cells)) for cells in network.network.cells]


class _OneLayer:
    """A layer of cells, as a network."""

    def __init__(self, cells: Sequence[Any]) -> None:
        self.cells = (tuple(cells),)
        self.input_size, self.state_size = cells[0].input_size, cells[0].state_size

    @property
    def params(self) -> dict[str, Any]:
        """The parameters by their names."""
        (cells,) = self.cells
        return {
            self.name_of(name, 0, back): each
            for back, cell in enumerate(cells)
            for name, each in cell.params.items()
        }

    def name_of(self, parameter: str, layer: int, back: int) -> str:
        """Return the name of a parameter of a cell."""
        return Recurrent.name_of(parameter, layer, back)


class _TangentNetwork(NamedTuple):
    """The layer for derivatives of another one, as a network, and the weights that both keep."""

    layer: TangentLayer
    network: TracedNetwork
    masks: list[Any]

    def joined(self, *given: Sequence[Any]) -> list[Any]:
        """Return the numbers of this layer, from those of the other and a direction."""
        masked = [
            [
                each if mask is None else jnp.where(mask, each, 0)
                for each, mask in zip(arrays, self.masks, strict=True)
            ]
            for arrays in given
        ]
        return self.layer.joined(FUNCTIONS, *masked)


@functools.lru_cache(maxsize=256)
def _tangent(network: TracedNetwork, returns_states: bool) -> _TangentNetwork:
    """Return the layer for the derivatives of a layer."""
    (cells,) = network.network.cells
    cell: Any = cells[0]
    tangent = tangent_of(type(cell), cell.options, cell.bias)
    made = Recurrent(
        *(tangent.cell, 2 * cell.input_size, cell.hidden_size),
        bidirectional=len(cells) > 1,
        rng=0,
    )
    masks = [each.masks.get(name) for each in cells for name in tangent.names]
    kept = [None if mask is None else mask.on(np) for mask in masks]
    layer = TangentLayer(tangent, cell.hidden_size, len(cells), returns_states)
    return _TangentNetwork(layer, TracedNetwork(made), [*kept, None, None])


# -- The primitives --------------------------------------------------------------------------------


def _in_front(count: int, each: Any, dim: int | None) -> Any:
    """Return an argument with an axis of maps in front, of which all may share it."""
    if dim is None:
        return jnp.broadcast_to(each, (count, *each.shape))
    return jnp.moveaxis(each, dim, 0)


def _as_members(form: _Form, count: int, args: Sequence[Any], dims: Sequence[Any]) -> list[Any]:
    """Return arguments of which those of each map are members."""
    pairs = zip(args, dims, strict=True)
    return form.joined([_in_front(count, each, dim) for each, dim in pairs])


def _merged(
    count: int, args: Sequence[Any], dims: Sequence[Any], axes: Sequence[int | None]
) -> list[Any]:
    """Return arguments whose samples are those of all maps."""
    merged = []
    for each, dim, axis in zip(args, dims, axes, strict=True):
        if axis is not None:
            each = merge(_in_front(count, each, dim), axis)
        merged.append(each)
    return merged


_run = primitive("run", _forward)


def _shapes_of_run(*given: Any, form: _Form, keeps: str) -> list[Any]:
    x = given[form.network.count]
    net = form.network.network
    (*lead, steps, batch, _), one = x.shape, form.network.cells[0]
    rows, returned = len(form.network.cells), form.options.return_states
    width = (one.program.states if returned else 1) * one.hidden_size
    width *= rows if returned == "layers" else len(net.cells[0])
    shapes = (*lead, steps, batch, width), (*lead, rows, batch, net.state_size)
    results = [alike(x, shape) for shape in shapes]
    return [*results, alike(x, _step_for(form, x, keeps).kept, np.uint8)] if keeps else results


def _jvp_of_run(given: Any, slopes: Any, *, form: _Form, keeps: str) -> Any:
    output, last, kept = _run.bind(*given, form=form, keeps=keeps or "all")
    own = filled(given[: form.size], slopes[: form.size])
    along = _slope.bind(kept, *given, *own, form=form)
    if not keeps:
        return [output, last], along
    return [output, last, kept], [*along, ad.Zero(jax.typeof(kept).to_tangent_aval())]


def _map_run(args: Any, dims: Any, *, form: _Form, keeps: str) -> Any:
    count = size_of(args, dims)
    if any(each is not None for each in dims[: form.network.count]):
        own = _as_members(form, count, args, dims)
        results = form.apart(count, _run.bind(*own, form=form.times(count), keeps=keeps))
        return results, [0] * len(results)
    own = _merged(count, args, dims, form.axes)
    output, last, *kept = _run.bind(*own, form=form, keeps=keeps and "each")
    axis = len(form.lead) + 1
    results = [*(parted(each, count, axis) for each in (output, last)), *kept]
    # There is one memory, for the samples of all maps.
    return results, [0, 0, *(None for _ in kept)]


def _transpose_run(above: Any, *given: Any, form: _Form, keeps: str) -> Any:
    """Return the transpose of a network that is linear in inputs and states together."""
    count, unknown = form.network.count, [ad.is_undefined_primal(each) for each in given]
    is_known = not any(unknown[:count]) and not keeps
    kinds = "input", "state", "further"
    if not is_known or not all(
        is_linear(each.program.traced, kinds) for each in form.network.cells
    ):
        raise NotImplementedError("the transpose of a loop that is not linear in its inputs")
    numbers = [
        jnp.zeros(each.aval.shape, each.aval.dtype) if is_missing else each
        for each, is_missing in zip(given, unknown, strict=True)
    ]
    own = [ad.instantiate_zeros(each) for each in above]
    grads = _gradients.bind(_nothing_kept(), *own, *numbers, form=form, maps=0, needs_x=True)
    behind = [None] * (len(given) - form.size)
    pairs = zip([*grads, *behind], unknown, strict=True)
    return [grad if is_missing else None for grad, is_missing in pairs]


_run.def_abstract_eval(_shapes_of_run)
ad.primitive_jvps[_run] = _jvp_of_run
ad.primitive_transposes[_run] = _transpose_run
set_map(_run, _map_run)


def _compute_slope(kept: Any, *given: Any, form: _Form) -> Any:
    return _along(form, given[: -form.size], given[-form.size :])


_slope = primitive("slope", _compute_slope)


def _shapes_of_slope(kept: Any, *given: Any, form: _Form) -> list[Any]:
    return _shapes_of_run(*given[: -form.size], form=form, keeps="")


def _transpose_slope(above: Any, kept: Any, *given: Any, form: _Form) -> Any:
    numbers, slopes = given[: -form.size], given[-form.size :]
    own = [ad.instantiate_zeros(each) for each in above]
    needs_x = ad.is_undefined_primal(slopes[form.network.count])
    grads = _gradients.bind(kept, *own, *numbers, form=form, maps=0, needs_x=needs_x)
    needed = [g if ad.is_undefined_primal(s) else None for g, s in zip(grads, slopes, strict=True)]
    return [None] * (1 + len(numbers)) + needed


_slope.def_abstract_eval(_shapes_of_slope)
ad.primitive_jvps[_slope] = differentiated(_compute_slope)
ad.primitive_transposes[_slope] = _transpose_slope
set_map(_slope, mapped(_compute_slope))

_gradients = primitive("gradients", _gradients_of)


def _shapes_of_gradients(
    kept: Any, *given: Any, form: _Form, maps: int, needs_x: bool
) -> list[Any]:
    numbers = given[2 : 2 + form.size]
    lead, first = (maps,) if maps else (), len(form.lead)
    params = [
        alike(each, (*each.shape[:first], *lead, *each.shape[first:])) for each in numbers[:-2]
    ]
    return [*params, *(alike(each, each.shape) for each in numbers[-2:])]


def _jvp_of_gradients(given: Any, slopes: Any, *, form: _Form, maps: int, needs_x: bool) -> Any:
    if maps:
        one = functools.partial(_each_map, form=form, maps=maps, needs_x=needs_x)
        return differentiated(one)(given, slopes)
    results = _gradients.bind(*given, form=form, maps=0, needs_x=needs_x)
    count = 2 + form.size
    own = filled(given[1 : 1 + count], slopes[1 : 1 + count])
    return results, _slope_of_gradients.bind(*given[1:], *own, form=form)


def _apart(form: _Form, maps: int, args: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
    """Return arguments whose samples, at these axes, are of each map, which is a member."""
    pairs = zip(args, axes, strict=True)
    return form.joined(
        [
            _in_front(maps, each, None) if axis is None else parted(each, maps, axis)
            for each, axis in pairs
        ]
    )


def _each_map(kept: Any, *given: Any, form: _Form, maps: int, needs_x: bool) -> Any:
    """Return the gradients of each map by itself."""
    first = len(form.lead)
    own = _apart(form, maps, given, [first + 1, first + 1, *form.axes])
    about = {"form": form.times(maps), "maps": 0, "needs_x": needs_x}
    results = _gradients.bind(_nothing_kept(), *own, **about)
    *params, x, state = form.apart(maps, results)
    moved = [jnp.moveaxis(each, 0, first) for each in params]
    return [*moved, *(merge(each, first + 1) for each in (x, state))]


def _transpose_gradients(
    slopes: Any, kept: Any, *given: Any, form: _Form, maps: int, needs_x: bool
) -> Any:
    above, numbers = given[:2], given[2:]
    directions = [ad.instantiate_zeros(each) for each in slopes]
    if maps:
        first, count = len(form.lead), form.network.count
        own = _apart(form, maps, [*numbers, *directions[count:]], [*form.axes, *2 * [first + 1]])
        # Directions of parameters have an axis of maps, and no samples.
        turns = form.joined([jnp.moveaxis(each, first, 0) for each in directions[:count]])
        whole = *own[:-2], *turns, *own[-2:]
        results = _slope.bind(_nothing_kept(), *whole, form=form.times(maps))
        along = [merge(each, first + 1) for each in form.apart(maps, results)]
    else:
        along = _slope.bind(kept, *numbers, *directions, form=form)
    needed = [a if ad.is_undefined_primal(b) else None for a, b in zip(along, above, strict=True)]
    return [None, *needed, *(None for _ in numbers)]


def _map_gradients(args: Any, dims: Any, *, form: _Form, maps: int, needs_x: bool) -> Any:
    count, (kept, *given) = size_of(args, dims), args
    first = len(form.lead)
    if any(each is not None for each in dims[3 : 3 + form.network.count]):
        own = _as_members(form, count, args, dims)
        found = _gradients.bind(*own, form=form.times(count), maps=maps, needs_x=needs_x)
        results = form.apart(count, found)
        return results, [0] * len(results)
    own = _merged(count, given, dims[1:], [first + 1, first + 1, *form.axes])
    # Memory that is mapped is of single maps; that of all has these samples, or others.
    kept = _nothing_kept() if dims[0] is not None else kept
    about = {"form": form, "maps": count * max(maps, 1), "needs_x": needs_x}
    *params, x, state = _gradients.bind(kept, *own, **about)
    params = [parted(each, count, first) for each in params]
    if not maps:
        params = [each.squeeze(1 + first) for each in params]
    results = [*params, *(parted(each, count, first + 1) for each in (x, state))]
    return results, [0] * len(results)


_gradients.def_abstract_eval(_shapes_of_gradients)
ad.primitive_jvps[_gradients] = _jvp_of_gradients
ad.primitive_transposes[_gradients] = _transpose_gradients
set_map(_gradients, _map_gradients)


def _compute_slope_of_gradients(*given: Any, form: _Form) -> list[Any]:
    count = 2 + form.size
    own, slopes = given[:-count], given[-count:]
    along = _gradients_along(form, own[:2], own[2:], slopes[2:])
    more = _gradients.bind(_nothing_kept(), *slopes[:2], *own[2:], form=form, maps=0, needs_x=True)
    return [a + b for a, b in zip(along, more, strict=True)]


_slope_of_gradients = primitive("slope_of_gradients", _compute_slope_of_gradients)


def _shapes_of_slope_of_gradients(*given: Any, form: _Form) -> list[Any]:
    return [alike(each, each.shape) for each in given[2 : 2 + form.size]]


def _transpose_slope_of_gradients(slopes: Any, *given: Any, form: _Form) -> Any:
    count = 2 + form.size
    (*above,), numbers, own = given[:2], given[2:-count], given[-count:]
    directions = [ad.instantiate_zeros(each) for each in slopes]
    grads = [
        *_slope.bind(_nothing_kept(), *numbers, *directions, form=form),
        *_gradients_along(form, above, numbers, directions),
    ]
    needed = [g if ad.is_undefined_primal(s) else None for g, s in zip(grads, own, strict=True)]
    return [None] * (2 + len(numbers)) + needed


_slope_of_gradients.def_abstract_eval(_shapes_of_slope_of_gradients)
ad.primitive_jvps[_slope_of_gradients] = differentiated(_compute_slope_of_gradients)
ad.primitive_transposes[_slope_of_gradients] = _transpose_slope_of_gradients
set_map(_slope_of_gradients, mapped(_compute_slope_of_gradients))
