"""Traces of steps, which are kept: what each call of a step does is compared with them.

A step runs once in each call of a scan, with stand-ins for tensors, that have no numbers. Each
function of PyTorch that it calls is looked up among those that known steps have called at this
place, and returns what it returned there; so nothing is computed. What the step reads, such as
attributes of modules, may change as it likes: as soon as it calls another function, or one with
other arguments, it is traced anew, by operators.
"""

from __future__ import annotations

import inspect
import linecache
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ... import locks
from ...capture.equations import NotCaptured
from ...locks import new_lock
from .functions import Watcher, watched
from .mutations import functional

# Of how many shapes traces are kept, and how many of each.
_MOST, _MOST_EACH = 256, 64
_RANDOM = "random numbers of Python or NumPy"
# Attributes whose values depend on more than a trace knows, and functions that change tensors.
_REFUSED = {
    *("requires_grad", "grad_fn", "is_leaf", "grad", "data", "_backward_hooks"),
    *("requires_grad_", "register_hook", "retain_grad", "backward", "data_ptr", "numpy", "tolist"),
    *("item", "__bool__", "__int__", "__float__", "__index__", "__array__", "untyped_storage"),
    *("storage", "_version", "__dlpack__", "__deepcopy__", "__reduce_ex__", "set_", "__set__"),
    *("storage_offset", "_base", "_is_view", "is_inference", "is_shared", "is_pinned"),
}
# Functions that read numbers out of lists of tensors; no dispatch mode sees them do so.
_READERS = {"tensor", "as_tensor", "asarray", "new_tensor", "new"}
_CONSTANTS: tuple[type, ...] = (
    *(bool, int, str, type(None), type(...), type(NotImplemented), type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class Unknown(BaseException):
    """A call that no trace has at this place; no exception that a step would catch."""


class Place:
    """A place in traces: what may be called next.

    Attributes
    ----------
    next : dict
        The places behind each call; or why it is in the way, a text.
    found : Any
        What the call before returned: stand-ins for tensors.
    fresh : list of (Tensor, int)
        Those that are new, and their numbers.
    """

    __slots__ = ("found", "fresh", "next")

    def __init__(self, found: Any, fresh: Sequence[tuple[Tensor, int]]) -> None:
        self.found, self.fresh = found, fresh
        self.next: dict[Any, Any] = {}


class Like(NamedTuple):
    """What a trace knows of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Trace(NamedTuple):
    """A step as a graph of operators.

    Attributes
    ----------
    graph : GraphModule
        The graph.
    stands : list of Tensor
        What stands in it for each tensor that the step closes over.
    obstacle : str
        Why nothing can be computed by the graph, if so.
    """

    graph: Any
    stands: list[Tensor]
    obstacle: str


class Found(NamedTuple):
    """A trace, what it is for this call, and the tensors that the step closes over.

    Attributes
    ----------
    made : Any
        What was made of the trace.
    spec : TreeSpec
        The tree of results.
    outside : list of Tensor
        The tensors.
    """

    made: Any
    spec: Any
    outside: list[Tensor]


class _Mode(Watcher):
    """Sees each call of a function of PyTorch."""

    def __init__(self, root: Place, samples: Sequence[Tensor]) -> None:
        super().__init__()
        self.place = root
        self.places = {id(each): k for k, each in enumerate(samples)}
        self.kept: list[Any] = list(samples)
        self.outside: list[Tensor] = []
        # What was raised, which a step may have caught.
        self.failed: BaseException | None = None

    @property
    def is_plain(self) -> bool:
        """Whether calls have derivatives: an ``autograd.Function`` switches forward mode off."""
        own = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return own == self.begun and torch._C._is_fwd_grad_enabled()

    def stop(self, error: BaseException) -> NoReturn:
        """Raise an error, and remember it."""
        self.failed = self.failed or error
        raise error from None

    def run(self, step: Callable[..., Any], trees: Sequence[Any], leaves: Sequence[Any]) -> Any:
        """Return the results of a step."""
        count = trees[0].num_leaves
        pairs = zip(trees, (leaves[:count], leaves[count:]), strict=True)
        with watched(), self:
            results = step(*(pytree.tree_unflatten(own, tree) for tree, own in pairs))
        if self.failed is not None:
            raise self.failed
        return results

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.failed is not None:
            raise self.failed
        if call is Tensor.__iter__:  # an iterator is used up
            with self:
                return iter(args[0].unbind(0))
        return self.seen(call, args, kwargs or {})

    def seen(self, call: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a call."""
        raise NotImplementedError

    def key(self, call: Any, args: Any, kwargs: Any) -> Any:
        """Return what equal calls have in common."""
        return call, self.is_plain, self.code(args), self.code(kwargs) if kwargs else None

    def code(self, given: Any) -> Any:
        """Return an argument, as it is compared."""
        kind = type(given)
        if isinstance(given, Tensor):
            place = self.places.get(id(given))
            return place if place is not None else self.code_outside(given)
        if kind is float:
            return float, given.hex()
        if kind in (tuple, list, torch.Size):
            return kind, *[self.code(each) for each in given]
        if kind is dict:
            return dict, *[(name, self.code(each)) for name, each in given.items()]
        if kind is slice:
            return slice, *[self.code(each) for each in (given.start, given.stop, given.step)]
        if kind in _CONSTANTS or isinstance(given, (type, torch.device)):
            return kind, given
        raise NotCaptured(f"an argument of {kind.__module__}.{kind.__qualname__}")

    def code_outside(self, given: Tensor) -> Any:
        """Return a tensor that the step closes over, as it is compared."""
        if type(given) not in (Tensor, nn.Parameter):
            raise NotCaptured(f"a tensor of {type(given).__qualname__}")
        number = len(self.outside)
        self.outside.append(given)
        self.kept.append(given)
        self.places[id(given)] = -1 - number
        shape, stride = tuple(given.shape), tuple(given.stride())
        return type(given), number, given.dtype, given.device, shape, stride


class _Replay(_Mode):
    """Compares calls with known ones."""

    def seen(self, call: Any, args: Any, kwargs: Any) -> Any:
        """Return what the call returned before."""
        try:
            place = self.place.next.get(self.key(call, args, kwargs))
        except NotCaptured as error:
            self.stop(error)
        if place is None:
            self.stop(Unknown())
        if type(place) is str:
            self.stop(NotCaptured(place))
        self.place = place
        for tensor, number in place.fresh:
            self.places[id(tensor)] = number
        return place.found


class _Silence(TorchDispatchMode):
    """Sees what is computed, though nothing should be."""

    def __init__(self, mode: _Mode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.mode.stop(NotCaptured(f"{call}, which no function of PyTorch shows"))


class _Reads(_Silence):
    """Sees when PyTorch reads a number out of a tensor that the step closes over."""

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in call.tags and not isinstance(args[0], FakeTensor):
            self.mode.stop(NotCaptured(f"{call}, which reads a number out of a tensor"))
        return call(*args, **(kwargs or {}))


class _Recorder(_Mode):
    """Notes calls while operators are traced."""

    def __init__(self, root: Place, samples: Sequence[Tensor]) -> None:
        super().__init__(root, samples)
        self.stands: list[Tensor] = []
        self.number = len(samples)
        self.canonical: dict[int, Any] = dict(enumerate(samples))

    def seen(self, call: Any, args: Any, kwargs: Any) -> Any:
        """Return what the call returns, and note it."""
        name = getattr(call, "__name__", str(call))
        if name == "__get__":
            name = getattr(call.__self__, "__name__", name)
        key = None
        try:
            key = self.key(call, args, kwargs)
            if not torch._C._is_fwd_grad_enabled():
                raise NotCaptured(f"{_function_of()}, a function with gradients of its own")
            if not self.is_plain or name in _REFUSED or name == "_set_grad_enabled":
                raise NotCaptured(f"{name}, which a trace cannot keep")
            given = (*args, *kwargs.values())
            lists = [each for each in given if isinstance(each, (tuple, list))]
            if name in _READERS and any(isinstance(k, Tensor) for k in pytree.tree_leaves(lists)):
                raise NotCaptured(f"{name}, which reads a number out of a tensor")
            found = call(*self.with_stands(args), **self.with_stands(kwargs))
            own = self.noted(found)
        except NotCaptured as error:
            why = f"{error}{line_of()}"
            if key is not None:
                self.place.next.setdefault(key, why)
            self.stop(NotCaptured(why))
        except Exception as error:  # which the step may catch
            self.stop(error)
        known = self.place.next.get(key)
        if type(known) is not Place:
            known = self.place.next[key] = own
        # What a known step has returned here: later calls may return it again.
        self.canonical.update((number, tensor) for tensor, number in known.fresh)
        self.place = known
        return found

    def with_stands(self, given: Any) -> Any:
        """Return arguments with what stands for tensors that the step closes over."""
        if isinstance(given, Tensor):
            place = self.places[id(given)]
            if place >= 0:
                return given
            while len(self.stands) < len(self.outside):
                own = self.outside[len(self.stands)]
                with _disable_current_modes(), torch._C.DisableTorchFunction():
                    stand = torch.empty_strided(tuple(own.shape), own.stride(), dtype=own.dtype)
                self.kept.append(stand)
                self.stands.append(stand)
            return self.stands[-1 - place]
        if isinstance(given, (tuple, list)) and type(given) in (tuple, list):
            return type(given)(map(self.with_stands, given))
        if type(given) is dict:
            return {name: self.with_stands(each) for name, each in given.items()}
        return given

    def noted(self, found: Any) -> Place:
        """Return a place behind a call, from what it returned."""
        leaves, spec = pytree.tree_flatten(found)
        fresh = []
        for k, each in enumerate(leaves):
            if isinstance(each, Tensor):
                if not all(isinstance(size, int) for size in each.shape):
                    raise NotCaptured("a shape that depends on numbers")
                place = self.places.get(id(each))
                if place is None:
                    place = self.places[id(each)] = self.number
                    self.canonical[place] = each
                    self.kept.append(each)
                    self.number += 1
                    fresh.append((each, place))
                leaves[k] = self.canonical[place]
            elif not isinstance(each, (*_CONSTANTS, float, complex)):
                raise NotCaptured(f"a result of {type(each).__qualname__}")
        # Trees make tuples of sizes.
        is_size = isinstance(found, torch.Size)
        return Place(found if is_size else pytree.tree_unflatten(leaves, spec), fresh)


def _function_of() -> str:
    """Return the name of the ``autograd.Function`` that runs."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        own = frame.f_locals.get("cls")
        if frame.f_code.co_name == "apply" and isinstance(own, type):
            return f"{own.__module__}.{own.__qualname__}"
        frame = frame.f_back
    return "a function without forward mode"


# Whose lines are no caller's.
FOLDERS = tuple(str(Path(each).parent) for each in (torch.__file__, locks.__file__))


def line_of() -> str:
    """Return the line of the caller's text that runs."""
    frame: Any = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(FOLDERS):
        frame = frame.f_back
    if frame is None:
        return ""
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f" ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno}: {text!r})"


# -- Steps -----------------------------------------------------------------------------------------


_lock = new_lock()
_roots: OrderedDict[Any, Place] = OrderedDict()
_counts: dict[Any, int] = {}


def find(
    step: Callable[..., Any],
    trees: Sequence[Any],
    likes: Sequence[Like],
    make: Callable[[Trace, Any], Any],
    settle: Callable[[Any], None] | None = None,
) -> Found:
    """Return what was made of the trace of a step for some tensors.

    Parameters
    ----------
    step : callable
        The step, of the carry and an input.
    trees : list of TreeSpec
        The trees of both.
    likes : list of Like
        All leaves of both.
    make : callable
        ``make(trace, spec)`` returns what is kept with a trace.
    settle : callable, optional
        Changes the graph before anything in it is in the way.
    """
    if torch.is_inference_mode_enabled():  # which has no forward mode
        with torch.inference_mode(False):
            return find(step, trees, likes, make, settle)
    key = tuple(map(str, trees)), tuple(likes), torch.get_default_dtype(), settle
    found = _known(key, step, trees)
    if found is not None:
        return found
    with _lock:
        return _traced(key, step, trees, likes, make)


def _known(key: Any, step: Callable[..., Any], trees: Sequence[Any]) -> Found | None:
    """Return what was made of a trace that is that of a step; None if there is none."""
    root = _roots.get(key)
    if root is None:
        return None
    mode, begun = _Replay(root, root.found), _random_states()
    try:
        with temporarily_clear_interpreter_stack(), _Silence(mode):
            leaves, spec = pytree.tree_flatten(mode.run(step, trees, root.found))
    except Unknown:
        return None
    finally:
        # A step that took another branch for these numbers may have had a trace, too.
        if _takes_back(begun):
            raise NotCaptured(_RANDOM)
    made = mode.place.next.get((spec, tuple(map(mode.code, leaves))))
    return None if made is None else Found(made, spec, mode.outside)


def _traced(key: Any, step: Any, trees: Sequence[Any], likes: Sequence[Like], make: Any) -> Found:
    """Trace a step, and keep that."""
    kept: list[Any] = []
    begun = _random_states()

    def run(*samples: Tensor) -> Any:
        root = _roots.get(key)
        if root is None:
            root = _roots[key] = Place(list(samples), ())
            _counts[key] = 0
            while len(_roots) > _MOST:
                _counts.pop(_roots.popitem(last=False)[0])
        if _counts[key] >= _MOST_EACH:
            raise NotCaptured(f"a step that was another one in {_MOST_EACH} calls")
        _counts[key] += 1
        mode = _Recorder(root, samples)
        mode.canonical = dict(enumerate(root.found))
        kept.append(mode)
        with _Reads(mode):
            leaves, spec = pytree.tree_flatten(mode.run(step, trees, samples))
        for each in leaves:
            if each is not None and not isinstance(each, Tensor):
                raise NotCaptured(f"a result of {type(each).__qualname__}")
        kept.append((spec, tuple(map(mode.code, leaves))))
        return mode.with_stands(leaves)

    with temporarily_clear_interpreter_stack():
        samples = [torch.empty_strided(each.shape, each.stride, dtype=each.dtype) for each in likes]
        about: dict[str, Any] = {"pre_dispatch": True, "record_stack_traces": True}
        graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True, **about)(*samples)
        if key[-1] is not None:
            key[-1](graph)
        functional(graph)
        mode, terminal = kept
        obstacle = _impurity(graph, samples)
        if _takes_back(begun):
            obstacle = _RANDOM
        trace = Trace(graph, mode.stands, obstacle)
        made = mode.place.next[terminal] = make(trace, terminal[0])
    again = _known(key, step, trees)
    if again is None or again.made is not made:
        trace = trace._replace(obstacle="Python, which does something else when it runs again")
        made = mode.place.next[terminal] = make(trace, terminal[0])
    return Found(made, terminal[0], mode.outside)


def _random_states() -> Any:
    """Return the states of the generators of random numbers that Python and NumPy have."""
    return random.getstate(), np.random.get_state()  # noqa: NPY002, that of code that uses it


def _takes_back(begun: Any) -> bool:
    """Return whether numbers were drawn since generators had some states, which they get again."""
    of_python, of_numpy = _random_states()
    is_same = of_python == begun[0] and of_numpy[2:] == begun[1][2:]
    if is_same and np.array_equal(of_numpy[1], begun[1][1]):
        return False
    random.setstate(begun[0])
    np.random.set_state(begun[1])  # noqa: NPY002
    return True


def _impurity(graph: Any, samples: Sequence[Tensor]) -> str:
    """Return which operator draws random numbers or changes a tensor, if one does."""
    flat = make_fx(graph, tracing_mode="fake", _allow_non_fake_inputs=True)(*samples)
    for own in (graph, flat):
        for node in own.graph.nodes:
            target = node.target
            if node.op != "call_function" or not isinstance(target, OpOverload):
                continue
            is_inside = own is flat and node.args and _is_made(node.args[0])
            if own is graph and str(target).startswith(("aten.empty", "aten.new_empty")):
                return f"{target}, whose numbers are not known"
            # That of a new tensor from a number in Python changes nothing.
            is_inside |= target is torch.ops.aten.detach_.default and _is_made(node.args[0])
            if target._schema.is_mutable and not is_inside:
                return f"{target}, which changes a tensor"
            is_norm = "batch_norm" in str(target) or "instance_norm" in str(target)
            if is_norm and any(each is True for each in node.args):
                return f"{target}, which may change its statistics"
            if own is flat and torch.Tag.nondeterministic_seeded in target.tags:
                return f"{target}, which draws random numbers"
    return ""


def _is_made(node: Any) -> bool:
    """Return whether an operator has made an argument."""
    return isinstance(node, torch.fx.Node) and node.op == "call_function"
