"""Calls of recurrent modules that are prepared once per shape of inputs, and then cost little.

For a short sequence, the work of PyTorch and Python takes longer than the kernels. So for inputs of
a new shape both passes are recorded. From then on a call checks its arguments, takes memory for
results, and lets compiled code do the rest. Parameters are not kept: each call reads their current
values.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ...execution.recording import Recording, Result
from ...kernels.addresses import address_of
from ...locks import new_lock
from ...recurrent.arguments import DEFAULTS
from ...recurrent.host_sizes import Extent
from ...recurrent.passes import Passes
from ...recurrent.step_pool import StepPool
from .direct import has_saving_hooks, is_direct, is_transformed
from .recorded import ResultTensor, Room, give_scratch, new_tensors, run, take_scratch
from .recurrent_op import gradients
from .saved import HAS_FUSED, check_others, free_places, save, saved
from .shapes import network_of
from .states import apart, joined
from .times import Key, predict

_PLAIN = frozenset((Tensor, nn.Parameter))
_DTYPES = frozenset((torch.float32, torch.float64))
# The most prepared shapes, and the most unused bytes, not counting those of the latest shape.
_MOST, _MOST_BYTES = 128, 1 << 28
_turn = itertools.count().__next__


def key_of(module: Any, given: Any, hx: Any, weights: list[Any]) -> tuple[Any, ...] | None:
    """Return the parts of a call's :class:`Key`; None if the call is unusual in any way.

    It makes the checks of :func:`is_direct` and :func:`is_recorded` in one pass over the tensors:
    calling both would double the time, in each call of a module.
    """
    if (
        type(given) not in _PLAIN
        or (dtype := given.dtype) not in _DTYPES
        or not given.is_cpu
        or given.is_neg()
        or not _is_plain(module)
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or torch.is_autocast_enabled("cpu")
        # A checkpoint counts saved tensors, and other calls save more.
        or has_saving_hooks()
    ):
        return None
    has_graph = given.requires_grad
    for each in (*weights, *_listed(hx)):
        if type(each) not in _PLAIN or each.dtype is not dtype or not each.is_cpu:
            return None
        if each.is_neg():  # negated when it is read
            return None
        has_graph = has_graph or each.requires_grad
    return (
        *(module.mode, module.input_size, module.hidden_size, module.num_layers),
        *(module.bias, module.bidirectional, module.batch_first, dtype, given.shape),
        *(hx is not None, has_graph and torch.is_grad_enabled(), torch.get_num_threads()),
    )


def _is_plain(module: Any) -> bool:
    """Return whether a module is ordinary: not pruned, without dropout and projections."""
    return not (
        module._forward_pre_hooks or module._is_short or (module.dropout > 0 and module.training)
    )


class _Held:
    """The memory of a call whose backward pass may still come."""

    __slots__ = ("_room", "_rooms")

    def __init__(self, rooms: StepPool[Room], room: Room) -> None:
        self._rooms, self._room = rooms, [room]

    def take(self) -> Room | None:
        """Return the memory, at the first call only."""
        try:
            return self._room.pop()
        except IndexError:
            return None

    def __del__(self) -> None:
        room = self.take()
        if room is not None:
            self._rooms.give_back(room)


class _Backward(NamedTuple):
    """A backward pass: its recording, its own memory, and its results.

    `order` has the places of the results that the caller gets.
    """

    recording: Recording
    nbytes: int
    results: list[ResultTensor]
    order: list[int]


class Prepared:
    """A call of a module that was recorded for inputs of a shape.

    Parameters
    ----------
    key : Key
        The shape and options that it is prepared for.

    Attributes
    ----------
    nbytes : int
        Bytes of the memory of a call.
    rooms : StepPool
        The memory of calls.
    states : int
        How many states a cell has.
    used : int
        The time of the last use: a count of calls of all modules.
    """

    def __init__(self, key: Key) -> None:
        self.key, self.used, shape = key, _turn(), key.shape
        steps, batch = key.sizes
        self._turns = len(key.x) == 3 and key.is_batch_first and steps > 1 and batch > 1
        network = network_of(shape)
        self._weight_shapes = [torch.Size(each.shape) for each in network.params.values()]
        cells = [cell for layer in network.cells for cell in layer]
        self._names = [f"{name} {k}" for k, cell in enumerate(cells) for name in cell.shapes]
        own = len(cells), *((batch,) if len(key.x) == 3 else ()), shape.hidden_size
        self._state_shape = torch.Size(own)
        extent = Extent(steps, batch, max(1, steps) if key.has_backward else 0)
        self._passes = Passes(
            *(network, extent, str(key.dtype)[6:]), has_state=key.has_state, states_apart=True
        )
        self._forward, self.nbytes = self._passes.forward, self._passes.nbytes
        self.rooms = StepPool(partial(_new_room, self.nbytes))
        self._results = list(map(self._result, self._forward.results))
        self.states = len(self._results) - 1
        self._backwards: dict[tuple[bool, bool, bool], _Backward] = {}
        self._free: dict[tuple[bool, ...], tuple[int, ...]] = {}

    def _result(self, result: Result) -> ResultTensor:
        shape: tuple[int, ...] = result.shape
        strides = None
        if result.name.startswith(("last ", "state ")):
            shape = self._state_shape
        elif result.name in ("output", "input"):
            steps, batch, width = shape
            if len(self.key.x) == 2:
                shape = steps, width
            elif self.key.is_batch_first:
                shape, strides = (batch, steps, width), (width, batch * width, 1)
        return ResultTensor.of(result, self.key.dtype, shape, strides)

    def free(self, needs: tuple[bool, ...]) -> tuple[int, ...]:
        """Return the places of arguments that may change before the first backward pass."""
        found = self._free.get(needs)
        if found is None:
            key, states = self.key, self.states if self.key.has_state else 0
            found = self._free[needs] = free_places(
                *(key.shape, needs, states),
                is_long=key.sizes[0] > 1,
                is_copied=self._turns,
                is_fused=HAS_FUSED and key.dtype is torch.float32,
            )
        return found

    def takes(self, hx: Any, weights: Sequence[Tensor]) -> bool:
        """Return whether states and weights have the expected shapes."""
        own = [self._state_shape] * (self.states if hx is not None else 0)
        return [each.shape for each in weights] == self._weight_shapes and own == [
            each.shape for each in _listed(hx)
        ]

    def __call__(self, x: Tensor, hx: Any, weights: Sequence[Tensor]) -> Any:
        """Return the outputs and the last states, in the form of a module."""
        if self.key.has_backward:
            output, *lasts = _Call.apply(self, x, *_listed(hx), *weights)
        else:
            (output, *lasts), room = self.forward(x, *_listed(hx), *weights)
            self.rooms.give_back(room)
        return output, tuple(lasts) if self.states > 1 else lasts[0]

    def forward(self, x: Tensor, *tensors: Tensor) -> tuple[tuple[Tensor, ...], Room]:
        """Return the results, and the memory that the backward pass needs."""
        room = self.rooms.take()
        # A copy must live until the end.
        given = [self.in_order(x), *[each.contiguous() for each in tensors]]
        results = new_tensors(self._results, room)
        run(self._forward, [room.address], given, results)
        return tuple(results), room

    def backward(
        self, room: Room, above: Tensor | None, carry: Sequence[Tensor | None], needs_x: bool
    ) -> list[Tensor]:
        """Return gradients in the input if `needs_x`, the initial states and the parameters.

        `carry` are the gradients in the last states.
        """
        has_state = any(each is not None for each in carry)
        variant = above is not None, has_state, needs_x
        own = self._backwards.get(variant)
        if own is None:
            with _lock:
                own = self._backwards[variant] = self._record(*variant)
        given = [] if above is None else [self.in_order(above)]
        if has_state:
            none = self._no_grad()
            given += [none if each is None else each.contiguous() for each in carry]
        results, scratch = new_tensors(own.results, room), take_scratch(own.nbytes)
        run(own.recording, [room.address, address_of(scratch)], given, results)
        give_scratch(scratch)
        return [results[place] for place in own.order]

    def _record(self, has_output: bool, has_state: bool, needs_x: bool) -> _Backward:
        recording, nbytes = self._passes.backward(
            has_output=has_output, has_state=has_state, needs_input_grad=needs_x
        )
        places = {each.name: place for place, each in enumerate(recording.results)}
        states = self.states if self.key.has_state else 0
        names = ["input"] * needs_x + [f"state {n}" for n in range(states)] + self._names
        results = list(map(self._result, recording.results))
        return _Backward(recording, nbytes, results, [places[name] for name in names])

    def gradients(
        self,
        above: Tensor | None,
        carry: Sequence[Tensor | None],
        needs_x: bool,
        tensors: Sequence[Tensor],
    ) -> list[Tensor]:
        """Do :meth:`backward` with a step that runs forward again."""
        count = len(carry) if self.key.has_state else 0
        x, states, params = tensors[0], tensors[1 : count + 1], tensors[count + 1 :]
        grad_state = None
        if any(each is not None for each in carry):
            none = self._no_grad()
            grad_state = self._joined([none if each is None else each for each in carry])
        in_output = None if above is None else self._by_steps(above)
        state = self._joined(states) if count else None
        grads = gradients(
            *((self.key.mode, *self.key[2:6], DEFAULTS.encode()), needs_x),
            *((in_output, grad_state), torch.zeros(1, device="cpu")),
            (self._by_steps(x), state, None, list(params), []),
        )
        below = [self._by_steps(grads.pop(), back=True)] if needs_x else []
        first, *rest = grads
        own = first if len(self.key.x) == 3 else first.squeeze(1)
        return [*below, *(apart(own, count) if count else ()), *rest]

    def _no_grad(self) -> Tensor:
        """Return zeros for the gradient in a state."""
        return torch.zeros(self._state_shape, dtype=self.key.dtype, device="cpu")

    def _by_steps(self, x: Tensor, *, back: bool = False) -> Tensor:
        """Return inputs or outputs as ``(T, batch, …)``, or back in the caller's form."""
        if len(self.key.x) == 2:
            return x.squeeze(1) if back else x.unsqueeze(1)
        return x.transpose(0, 1) if self.key.is_batch_first else x

    def _joined(self, states: Sequence[Tensor]) -> Tensor:
        state = joined(states)
        return state if len(self.key.x) == 3 else state.unsqueeze(1)

    def in_order(self, x: Tensor) -> Tensor:
        """Return inputs or outputs in the order of memory, step by step."""
        return (x.transpose(0, 1) if self._turns else x).contiguous()

    @property
    def free_bytes(self) -> int:
        """Bytes of memory that no call uses."""
        return self.rooms.free * self.nbytes


class _Call(torch.autograd.Function):
    """The graph of a prepared call."""

    @staticmethod
    def forward(ctx: Any, prepared: Prepared, *tensors: Tensor) -> tuple[Tensor, ...]:
        results, room = prepared.forward(*tensors)
        ctx.prepared, ctx.held = prepared, _Held(prepared.rooms, room)
        save(ctx, tensors, prepared.free(ctx.needs_input_grad[1:]))
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, above: Tensor | None, *carry: Tensor | None) -> tuple[Any, ...]:
        prepared, needs, room = ctx.prepared, ctx.needs_input_grad, None
        ctx.saved_tensors  # noqa: B018, raises if one has changed
        if not torch.is_grad_enabled() and is_direct(above, *carry):
            room = ctx.held.take()
        if room is None:
            # It is differentiated again, or this is a second backward pass.
            check_others(ctx)
            grads = prepared.gradients(above, carry, needs[1], saved(ctx))
        else:
            grads = prepared.backward(room, above, carry, needs[1])
            prepared.rooms.give_back(room)
        return (None, *grads) if needs[1] else (None, None, *grads)


def _listed(hx: Any) -> Sequence[Tensor]:
    """Return the initial states of a call."""
    return () if hx is None else hx if type(hx) is tuple else (hx,)


# -- Calls that are known --------------------------------------------------------------------------

_lock = new_lock()
# What runs a call: a prepared call, or PyTorch's kernel (True).
_calls: OrderedDict[tuple[Any, ...], Prepared | bool] = OrderedDict()


def find(key: tuple[Any, ...]) -> Prepared | bool:
    """Return the prepared call for a key; otherwise return whether PyTorch's kernel runs it."""
    found = _calls.get(key)
    if type(found) is Prepared:
        found.used = _turn()
        return found
    return found is True


# Calls that PyTorch's kernel runs, by keys that are quick to make; parameters do not matter.
_left: set[tuple[Any, ...]] = set()


def left_key(module: Any, given: Any, hx: Any) -> tuple[Any, ...] | None:
    """Return the key for :func:`is_left`; None if the call is unusual in any way."""
    if type(given) is not Tensor or is_transformed() or not _is_plain(module):
        return None
    return (
        *(module.mode, module.hidden_size, module.num_layers, module.bidirectional),
        *(module.batch_first, given.shape, given.dtype, hx is None, torch.is_grad_enabled()),
        torch.get_num_threads(),
    )


def is_left(key: tuple[Any, ...] | None) -> bool:
    """Return whether PyTorch's kernel is known to run a call."""
    return key in _left


def leave(key: tuple[Any, ...] | None) -> None:
    """Let PyTorch's kernel run these calls from now on."""
    if key is not None:
        if len(_left) >= _MOST:
            _left.clear()
        _left.add(key)


def prepare(key: tuple[Any, ...], *, may_be_theirs: bool) -> Prepared | bool:
    """Do :func:`find` for a new call."""
    with _lock:
        found = _calls.get(key)
        if found is None:
            own = Key(*key)
            found = True if may_be_theirs and _is_theirs(own) else Prepared(own)
        _calls[key] = found
        _calls.move_to_end(key)
        _let_go()
        return found


def run_prepared(
    x: Tensor,
    state: Tensor | None,
    params: list[Tensor],
    mode: str,
    hidden_size: int,
    num_layers: int,
    has_backward: bool,
) -> tuple[Tensor, Tensor] | None:
    """Return outputs and last states of layers with biases, if the call is prepared.

    States are joined, as for the operators. The caller has checked that there are kernels.
    """
    given = (x, *params) if state is None else (x, state, *params)
    if (
        not (x.is_cpu and is_direct(*given))
        or any(each.is_neg() for each in given)
        or has_saving_hooks()
    ):
        return None
    about = mode, x.shape[2], hidden_size, num_layers, True, False, False, x.dtype, x.shape
    key = *about, state is not None, has_backward, torch.get_num_threads()
    call = find(key) or prepare(key, may_be_theirs=False)
    if not isinstance(call, Prepared):
        return None
    hx: Any = state
    if state is not None and call.states > 1:
        hx = state.chunk(call.states, -1)
    output, last = call(x, hx, params)
    return output, torch.cat(last, -1) if call.states > 1 else last


_only: str | None = None


@contextmanager
def only(kernels: str) -> Iterator[None]:
    """Let all calls use ``"sparsescan"``'s or ``"pytorch"``'s kernels, even if these are slower."""
    global _only
    before, _only = _only, kernels
    _forget()
    try:
        yield
    finally:
        _only = before
        _forget()


def _forget() -> None:
    _calls.clear()
    _left.clear()


def _is_theirs(key: Key) -> bool:
    return predict(key).is_theirs if _only is None else _only == "pytorch"


def _new_room(nbytes: int) -> Room:
    """Return memory for a call; free unused memory of other calls for it."""
    with _lock:
        _let_go()
    return Room(nbytes)


def _let_go() -> None:
    """Drop the calls that were used the longest ago, if there are too many, and free memory.

    Memory of other calls is freed first. They stay prepared, and take new memory at their next use.
    """
    while len(_calls) > _MOST:
        _calls.popitem(last=False)
    made = [each for each in _calls.values() if type(each) is Prepared]
    nbytes = sum(each.free_bytes for each in made)
    for each in sorted(made, key=lambda one: one.used)[:-1]:
        if nbytes <= _MOST_BYTES:
            break
        nbytes -= each.free_bytes
        each.rooms.clear()
