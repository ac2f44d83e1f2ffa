"""Modules and functions that loop in Python, run by kernels where that gives the same."""

from __future__ import annotations

import builtins
import datetime
import functools
import gc
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from ...capture.equations import NotCaptured
from ...capture.loop import Explanation
from ...errors import InputTypeError, short
from ..calls.direct import is_eager, is_transformed, is_watched
from ..capture.functions import watched
from ..capture.trace import FOLDERS, Found, Like, Trace, find
from ..conversion.kinds import Kind, base_of, become, plain_class, reduced, with_base
from ..scan import explained as of_scan
from .bodies import LENGTHS, Reading
from .comparison import Calls, Moved, check_calls, check_gradients, check_same
from .program import Program
from .unrolled import Unrolled, without_writes
from .watch import STATE, Snapshot, is_standard

Target = TypeVar("Target", bound=Callable[..., Any])

# Fewer steps run as they are.
_FEWEST = 9
_MOST_KEPT = 64
# After so many calls that were new in some way, more than others, nothing is tried any more.
_PATIENCE = 16
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)
# What Python does that a forward pass cannot do but each time, and modules of such functions.
_EFFECTS = {builtins.print, builtins.input, warnings.warn}
_OUTSIDE = ("time", "posix", "nt", "io", "_io", "_socket")


class _Given:
    """The arguments of a call.

    Attributes
    ----------
    leaves : list
        Their leaves.
    tensors : list of Tensor
        The tensors among them, each once.
    """

    def __init__(self, tree: Any) -> None:
        self.leaves, self._spec = pytree.tree_flatten(tree)
        own = {id(each): each for each in self.leaves if isinstance(each, Tensor)}
        self.tensors, self._places = [*own.values()], {key: k for k, key in enumerate(own)}

    def key(self) -> Any:
        """Return what calls have in common that are compared once."""
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        same = tuple(self._places.get(id(each)) for each in self.leaves)
        return self._spec, same, *map(_key, self.leaves), *modes, torch.get_default_dtype()

    def call(
        self, plain: Any, tensors: Sequence[Tensor], numbers: Mapping[int, int] | None = None
    ) -> Any:
        """Return the results for other tensors, and for other numbers in some places."""
        leaves = [
            (numbers or {}).get(k, each) if place is None else tensors[place]
            for k, each in enumerate(self.leaves)
            for place in (self._places.get(id(each)),)
        ]
        args, kwargs = tree = pytree.tree_unflatten(leaves, self._spec)
        results = plain(*args, **kwargs)
        self.check(tree, leaves)
        return results

    def check(self, tree: Any, leaves: Sequence[Any]) -> None:
        """Raise if a call has changed lists or dicts among arguments, which had some leaves."""
        own, spec = pytree.tree_flatten(tree)
        if spec != self._spec or any(a is not b for a, b in zip(own, leaves, strict=True)):
            raise NotCaptured("arguments, which a call changes")


def _key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.shape, leaf.stride(), leaf.requires_grad
    return type(leaf), leaf


# Places of the number of steps: leaves, and the axis of each; None for an integer.
Steps = tuple[tuple[int, int | None], ...]


@dataclass(frozen=True, eq=False)
class _Made:
    """A trace of few steps, and the tree of its results."""

    trace: Trace
    spec: Any


class _Ready(NamedTuple):
    """What runs a call.

    Attributes
    ----------
    steps : tuple
        Where the number of steps stands.
    made : _Made
        The trace of the fewest steps that it is for.
    trains : tuple of bool
        Which tensors that it closes over have gradients.
    program : Program
        What runs it.
    shares : list of int
        For each result, the first tensor that shares its memory.
    text : str
        What it runs.
    """

    steps: Steps
    made: _Made
    trains: tuple[bool, ...]
    program: Program
    shares: list[int]
    text: str


class State:
    """What is known of a module or a function that loops.

    Attributes
    ----------
    report : Explanation
        How the last call ran.
    """

    def __init__(self) -> None:
        self.report = Explanation(False, "it was not called")
        self.steps: Steps | None = None
        self._snapshots: list[Snapshot] = []
        self._verdicts: OrderedDict[Any, _Ready | str] = OrderedDict()
        self._programs: OrderedDict[Any, Program] = OrderedDict()
        self._new = self._known = 0

    def __deepcopy__(self, memo: Any) -> State:
        return State()

    def __reduce__(self) -> Any:
        return State, ()

    def call(self, root: Any, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what ``plain(*args, **kwargs)`` returns; `root` holds what it reads."""
        given = _Given((args, kwargs))
        why = _why_not(given)
        if not why and self._new > _PATIENCE + self._known:
            why = "its attributes or arguments are new in most calls"
        try:
            snapshot = None if why else Snapshot(root)
        except Exception as error:
            why = _text(error)
        if why or snapshot is None:
            self.report = Explanation(False, f"{_PYTHON}{why}")
            return plain(*args, **kwargs)
        key = *given.key(), self._number(snapshot)
        known = self._verdicts.get(key)
        if isinstance(known, str):
            self._known += 1
            self.report = Explanation(False, known)
            return plain(*args, **kwargs)
        if known is not None:
            found = _again(known, plain, given)
            if found is not None:
                self._known += 1
                self.report = Explanation(True, known.text)
                return pytree.tree_unflatten(found, known.made.spec)
        self._new += 1
        verdict, results = _First(self, snapshot, root, plain, given).run(args, kwargs)
        if verdict is not None:
            self._verdicts[key] = verdict
            text = verdict.text if isinstance(verdict, _Ready) else verdict
            self.report = Explanation(isinstance(verdict, _Ready), text)
            if len(self._verdicts) > _MOST_KEPT:
                self._verdicts.popitem(last=False)
        return results

    def _number(self, snapshot: Snapshot) -> int:
        """Return the number of a state of attributes, which may be new."""
        for each in self._snapshots:
            if each.marks == snapshot.marks:
                return id(each)
        self._snapshots.append(snapshot)
        if len(self._snapshots) > _PATIENCE:
            gone = id(self._snapshots.pop(0))
            for key in [each for each in list(self._verdicts) if each[-1] == gone]:
                self._verdicts.pop(key, None)  # another thread may have done so
        return id(snapshot)

    def program(self, founds: Sequence[Found]) -> Program:
        """Return the program for three traces."""
        key = tuple(each.made for each in founds)
        if key not in self._programs:
            pairs = zip(key, LENGTHS, strict=True)
            traces = [Unrolled(each.trace, length) for each, length in pairs]
            self._programs[key] = Program(Reading(traces), traces[0].constants)
            if len(self._programs) > _MOST_KEPT:
                self._programs.popitem(last=False)
        return self._programs[key]


def _why_not(given: _Given) -> str:
    """Return why a call runs as it is, whatever its module does; "" if it need not."""
    tensors = given.tensors
    if not tensors or any(each.device.type != "cpu" for each in tensors):
        return "it has no tensors on a CPU"
    for each in given.leaves:
        if not isinstance(each, Tensor) and type(each) not in _CONSTANTS:
            return f"an argument of {type(each).__qualname__}"
        if isinstance(each, Tensor) and each.__dict__:
            return "a tensor with attributes"
    if parametrize._cache_enabled:
        return "parametrize.cached, which keeps tensors that a trace would make"
    is_seen = torch._C._len_torch_function_stack() or torch.is_autocast_enabled("cpu")
    if is_seen or not is_eager(*tensors) or is_transformed() or is_watched():
        return "autocast, a transform, a compiler, or hooks that want to see each operator"
    return ""


def _again(ready: _Ready, plain: Any, given: _Given) -> list[Any] | None:
    """Return the results of a call, by kernels; None if it is none that was compared."""
    try:
        found = _traced(plain, given, ready.steps, LENGTHS[0])
        if found.made is not ready.made or _trains(found) != ready.trains:
            return None
        tensors = [*given.tensors, *found.outside]
        length = _length(given, ready.steps)
        results = ready.program.run(length, given.tensors, found.outside)
        return _apart(results, ready.shares, [*tensors, *ready.program.constants])
    except Exception:
        return None


def _trains(found: Found) -> tuple[bool, ...]:
    return tuple(each.requires_grad for each in found.outside)


def _traced(
    plain: Any, given: _Given, steps: Steps, length: int, look: Sequence[Any] = ()
) -> Found:
    """Return the trace of a call of so many steps; `look` are contexts around it."""
    axes = {id(given.leaves[k]): axis for k, axis in steps}
    likes = [_like(each, axes.get(id(each)), length) for each in given.tensors]
    numbers = {k: length for k, axis in steps if axis is None}

    def run(tensors: Any, _: Any) -> Any:
        with ExitStack() as stack:
            for each in look:
                stack.enter_context(each)
            return given.call(plain, tensors, numbers)

    trees = [pytree.tree_structure([0] * count) for count in (len(likes), 0)]
    return find(run, trees, likes, _Made, without_writes)


def _like(tensor: Tensor, axis: int | None, length: int) -> Like:
    shape, stride = list(tensor.shape), list(tensor.stride())
    if axis is not None:
        shape[axis] = length
        # Axes lie in memory as they do in the tensor.
        size = 1
        for k in sorted(range(len(shape)), key=lambda k: (stride[k], -k)):
            if stride[k]:
                stride[k], size = size, size * max(shape[k], 1)
    return Like(tensor.dtype, tuple(shape), tuple(stride))


def _length(given: _Given, steps: Steps) -> int:
    """Return how many steps a call has; 0 if arguments differ in that."""
    found = set[Any]()
    for k, axis in steps:
        leaf: Any = given.leaves[k] if k < len(given.leaves) else None
        if axis is None:
            found.add(leaf if type(leaf) is int else 0)
        else:
            is_there = isinstance(leaf, Tensor) and axis < leaf.dim()
            found.add(leaf.shape[axis] if is_there else 0)
    return found.pop() if len(found) == 1 else 0


def _candidates(given: _Given) -> Iterator[Steps]:
    """Yield where the number of steps may stand, likely ones first."""
    sizes = [
        (k, axis, size)
        for k, leaf in enumerate(given.leaves)
        for axis, size in (
            enumerate(leaf.shape)
            if isinstance(leaf, Tensor)
            else [(None, leaf)] * (type(leaf) is int)
        )
        if size >= _FEWEST
    ]
    axes = sorted({axis for _, axis, _ in sizes if axis is not None})
    order = [*dict.fromkeys(size for _, _, size in sizes)]
    for some in [*axes, -1]:
        for size in order:
            group = [(k, axis) for k, axis, own in sizes if own == size and axis in (some, None)]
            yield tuple(group) if some >= 0 else ()
    for size in order:
        yield tuple((k, axis) for k, axis, own in sizes if own == size)
    for k, axis, _ in sizes:
        yield ((k, axis),)


def _shares(given: Sequence[Tensor], results: Sequence[Any]) -> list[int]:
    """Return, for each result, the number of the first tensor that shares its memory."""
    seen: dict[int, int] = {}
    memories = [each if each is None else each.untyped_storage() for each in [*given, *results]]
    found = [
        k if memory is None else seen.setdefault(id(memory), k) for k, memory in enumerate(memories)
    ]
    return found[len(given) :]


def _apart(results: Sequence[Any], shares: Sequence[int], given: Sequence[Tensor]) -> list[Any]:
    """Copy results that share memory with others, and should not."""
    own = _shares(given, results)
    return [
        each.clone() if share == len(given) + k != own[k] else each
        for k, (each, share) in enumerate(zip(results, shares, strict=True))
    ]


class _Effects:
    """Stops what a forward pass does that nothing can do in its place, such as printing."""

    def __init__(self) -> None:
        self.found = ""

    def __enter__(self) -> None:
        self._collects = gc.isenabled()
        gc.disable()  # whose callbacks may read clocks
        sys.setprofile(self._see)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        if self._collects:
            gc.enable()

    def _see(self, frame: Any, event: str, called: Any) -> None:
        if event != "c_call":
            return
        owner = getattr(called, "__self__", None)
        if type(owner) is ModuleType:
            is_effect = owner.__name__ in _OUTSIDE or called in _EFFECTS
        else:
            is_date = isinstance(owner, type) and issubclass(owner, datetime.date)
            is_effect = is_date and called.__name__ in ("now", "utcnow", "today")
        if is_effect and not self._is_ours(frame):
            self.found = f"{called.__qualname__}, which may differ in each call"
            raise NotCaptured(self.found)

    def _is_ours(self, frame: Any) -> bool:
        """Return whether PyTorch makes a call, or the standard library for it, or an import."""
        paths = list[str]()
        while frame is not None and not frame.f_code.co_filename.startswith(FOLDERS):
            paths.append(frame.f_code.co_filename)
            frame = frame.f_back
        is_import = any(each.startswith("<frozen importlib") for each in paths)
        # A module of PyTorch may run code of other packages as it is imported.
        is_import |= frame is not None and frame.f_code.co_name == "<module>"
        return is_import or all(map(is_standard, paths))


class _First:
    """A call that is the first of its kind: it runs in both ways, which are compared."""

    def __init__(
        self, state: State, snapshot: Snapshot, root: Any, plain: Any, given: _Given
    ) -> None:
        self.state, self.snapshot, self.root = state, snapshot, root
        self.plain, self.given = plain, given
        self.steps: Steps = ()
        self.calls: list[Calls] = []

    def run(self, args: Any, kwargs: Any) -> tuple[_Ready | str | None, Any]:
        """Return how further calls run, and the results."""
        begun = torch.get_rng_state()
        if sys.getprofile() is not None:
            self.state.report = Explanation(False, f"{_PYTHON}a profiler sees its first call")
            return None, self.plain(*args, **kwargs)
        try:
            founds, program = self._proposed()
            why = ""
        except Exception as error:
            why = _text(error)
        if not self._is_as_before() or not torch.equal(begun, torch.get_rng_state()):
            self.snapshot.restore()
            torch.set_rng_state(begun)
            why = "attributes or generators of random numbers, which a call changes"
        if why:
            return f"{_PYTHON}{why}", self.plain(*args, **kwargs)
        rows = [self.given.leaves[k] for k, axis in self.steps if axis is not None]
        if any(map(_is_one_integer, rows)):
            text = "integers that are all alike: a comparison would say nothing"
            self.state.report = Explanation(False, f"{_PYTHON}{text}")
            return None, self.plain(*args, **kwargs)
        tensors = [*self.given.tensors, *founds[0].outside]
        before = _random_states(), list(map(_version, tensors))
        with watched(), Calls() as calls:
            theirs = self.plain(*args, **kwargs)
        try:
            self.given.check((args, kwargs), self.given.leaves)
            now = _random_states(), list(map(_version, tensors))
            if not self._is_as_before() or before != now:
                raise NotCaptured("attributes, tensors or random numbers, which a call changes")
            length = _length(self.given, self.steps)
            check_calls(self.calls, calls, length)
            return self._compared(theirs, founds[0], program, length), theirs
        except Exception as error:
            return f"{_PYTHON}{_text(error)}", theirs

    def _is_as_before(self) -> bool:
        try:
            return Snapshot(self.root).marks == self.snapshot.marks
        except Exception:
            return False

    def _proposed(self) -> tuple[list[Found], Program]:
        """Return traces and what they are read as."""
        known = [] if self.state.steps is None else [self.state.steps]
        why: NotCaptured | None = None
        for steps in dict.fromkeys([*known, *_candidates(self.given)]):
            if not steps or _length(self.given, steps) < _FEWEST:
                continue
            try:
                founds, calls = [], []
                for length in LENGTHS:
                    calls.append(Calls())
                    effects = _Effects()
                    look = calls[-1], effects
                    found = _traced(self.plain, self.given, steps, length, look)
                    if effects.found or found.made.trace.obstacle:
                        raise NotCaptured(effects.found or found.made.trace.obstacle)
                    founds.append(found)
                    if length > LENGTHS[0] and calls[0].sums == calls[-1].sums:
                        raise NotCaptured("")
                if any(each.made.spec != founds[0].made.spec for each in founds):
                    raise NotCaptured("as many results as there are steps")
                if len({(len(each.outside), _trains(each)) for each in founds}) > 1:
                    raise NotCaptured("other tensors in longer loops")
                program = self.state.program(founds)
            except NotCaptured as error:
                why = why if why is not None and str(why) else error
            except Exception:
                why = why or NotCaptured("")
            else:
                self.state.steps, self.steps, self.calls = steps, steps, calls
                return founds, program
        nothing = "no loop of at least 9 steps, as many as an argument has along an axis"
        raise NotCaptured(str(why or "") or nothing)

    def _compared(self, theirs: Any, found: Found, program: Program, length: int) -> _Ready:
        leaves, spec = pytree.tree_flatten(theirs)
        if spec != found.made.spec:
            raise NotCaptured("results that differ from length to length")
        loops: list[Explanation] = []
        inputs, outside = self.given.tensors, found.outside
        constants = program.constants

        def run(inputs: Any, outside: Any, see: Any = lambda *_: None) -> list[Any]:
            results = program.run(length, inputs, outside, see)
            return _apart(results, shares, [*inputs, *outside, *constants])

        shares = _shares([*inputs, *outside, *constants], leaves)
        ours = run(inputs, outside, lambda *about: loops.append(of_scan(*about)))
        if not any(each.is_captured for each in loops):
            raise NotCaptured("\n".join(each.text for each in loops) or "no steps with carries")
        if _shares([*inputs, *outside, *constants], ours) != shares:
            raise NotCaptured("results that share memory")
        check_same(leaves, ours)
        # Tensors that are alike here, such as zeros, are not for other numbers.
        moved = Moved([*inputs, *outside, *self.snapshot.tensors])
        of_inputs, of_outside = (list(map(moved.twin, some)) for some in (inputs, outside))
        with watched(), moved:
            again = self.given.call(self.plain, of_inputs)
        again = list(map(moved.twin, pytree.tree_leaves(again)))
        ours = run(of_inputs, of_outside)
        check_same(again, ours)
        check_gradients(again, ours, [*of_inputs, *of_outside])
        text = "\n".join(f"a loop of {length} steps: {each.text}" for each in loops)
        return _Ready(self.steps, found.made, _trains(found), program, shares, text)


_PYTHON = "Python runs it: "


def _text(error: Exception) -> str:
    if isinstance(error, NotCaptured):
        return str(error)
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _is_one_integer(rows: Tensor) -> bool:
    is_integer = not rows.is_floating_point() and rows.dtype != torch.bool
    return is_integer and rows.numel() > 0 and bool((rows == rows.flatten()[0]).all())


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _random_states() -> Any:
    return random.getstate(), repr(np.random.get_state()), bytes(torch.get_rng_state().tolist())  # noqa: NPY002


# -- Names of users --------------------------------------------------------------------------------


def loop(target: Target) -> Target:
    """Let a module or a function that loops in Python run its loop by compiled kernels.

    What it computes is traced at lengths of 4, 5 and 6 steps. Operators that repeat as often as
    there are steps are the body of a loop, which :func:`scan` runs. What comes before, between and
    behind loops runs as it is: a product for all steps at once, a stack, a head. There may be
    several loops, as in layers or directions, and several cells in a step; lists, ``stack`` and
    ``cat``, ``out[:, t] = h``, masks, states of two steps before, and decoders that read what they
    wrote are understood. Which axis of which argument has the steps, or which integer is their
    number, is found.

    Results never change: at the first call for a length, a shape, a dtype, a mode, or a state of
    attributes, the call runs in both ways. The functions of PyTorch that it calls have to be as
    many as short traces foretell. Results have to agree up to rounding, and so have results and
    gradients for other numbers near those of inputs and parameters. What differs runs in Python
    from then on, and so does what draws random numbers, changes attributes, buffers or arguments,
    prints, reads clocks or numbers out of tensors, or has a step that no kernel runs.
    ``print(explain(module, x))`` says which way a call runs, and why. Each call runs 4 steps in
    Python, without numbers, and looks at attributes, hooks, closures and globals; so it sees what
    has changed. Calls of less than 9 steps, under transforms of ``torch.func``, compilers, exports
    or autocast run as before.

    Parameters
    ----------
    target : torch.nn.Module or callable
        The module or function. A module stays the same object, with its parameters, buffers and
        hooks, an instance of its class, and equal to others in files and copies; :func:`revert`
        undoes it. In place of a function a new one is returned.

    Returns
    -------
    torch.nn.Module or callable
        The module, or a function with the same arguments and results.

    Raises
    ------
    InputTypeError
        If `target` is neither, or a module of ``torch.jit``, or its metaclass lets no class stand
        in the place of its own.

    See Also
    --------
    scan : The loop itself, which knows its step, and needs no comparison.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.torch import explain, loop
    >>> class Encoder(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.cell = torch.nn.GRUCell(12, 20)
    ...     def forward(self, x):
    ...         h, states = torch.zeros(x.shape[1], 20), []
    ...         for t in range(x.shape[0]):
    ...             h = self.cell(x[t], h)
    ...             states.append(h)
    ...         return torch.stack(states)
    >>> encoder = loop(Encoder())
    >>> encoder(torch.zeros(50, 16, 12)).shape
    torch.Size([50, 16, 20])
    >>> explain(encoder, torch.zeros(50, 16, 12)).is_captured
    True
    """
    if isinstance(target, torch.jit.ScriptModule):
        raise InputTypeError("target is a module of torch.jit; expected one that runs in Python")
    if isinstance(target, nn.Module):
        become(target, with_base(target, _looped(base_of(target))))
        return target
    if not callable(target) or isinstance(target, type):
        raise InputTypeError(f"target is {short(target)}; expected a module or a function")
    state = State()

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return target(*args, **kwargs)
        return state.call(target, target, args, kwargs)

    vars(call)[STATE] = state
    return cast(Target, call)


def explained(target: Any, *given: Any) -> Explanation:
    """Return how a call of a module or a function of :func:`loop` runs."""
    target(*given)
    state = state_of(target)
    assert state is not None
    return state.report


def state_of(target: Any) -> State | None:
    """Return what is known of a module or a function of :func:`loop`; None for others."""
    if isinstance(target, nn.Module):
        return _state(target) if is_looped(target) else None
    found: State | None = getattr(target, STATE, None)
    return found


def is_looped(module: nn.Module) -> bool:
    """Return whether a module is one of :func:`loop`."""
    kind = base_of(module)
    return vars(kind).get("__reduce_ex__") is _reduced


def _state(module: Any) -> State:
    own: dict[str, Any] = vars(module)
    if type(own.get(STATE)) is not State:
        own[STATE] = State()
    state: State = own[STATE]
    return state


class _Kind(Kind):
    """The type of classes of modules that loop; attributes that are set are those of the user's."""

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(plain_class(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(plain_class(self), name)


@functools.cache
def _looped(kind: Any) -> Any:
    """Return the class that a module of a class becomes."""
    if plain_class(kind) is not kind:
        return kind

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return kind.forward(self, *args, **kwargs)
        plain = functools.partial(kind.forward, self)
        return _state(self).call(self, plain, args, kwargs)

    about: dict[str, Any] = {"_plain": kind, "__doc__": kind.__doc__, "__module__": kind.__module__}
    about |= {"__qualname__": kind.__qualname__, "forward": forward, "__reduce_ex__": _reduced}
    about["__prepare_scriptable__"] = _plain_twin
    try:
        return _Kind(kind.__name__, (kind,), about)
    except TypeError:
        raise InputTypeError(
            f"the metaclass of {kind.__qualname__} lets no class stand in its place; expected a "
            "usual class of modules"
        ) from None


def _reduced(module: Any, protocol: Any) -> Any:
    """Return what copies and files of a module are made from."""
    return reduced(module, protocol, _without_state)


def _plain_twin(module: Any) -> Any:
    """Return what ``torch.jit.script`` reads: a module of the user's class."""
    kind: Any = plain_class(type(module))
    twin: nn.Module = kind.__new__(kind)
    twin.__dict__ = {name: each for name, each in vars(module).items() if name != STATE}
    return twin


def _without_state(kind: Any) -> Any:
    made = _looped(kind)
    return made.__new__(made)
