"""Functions with gradients of their own, as they are traced.

A call of an ``autograd.Function`` runs its ``forward`` and then its ``backward``, between marks.
Each tensor that it is given is behind a mark; the gradient of its result is one, and so is the
result, which names all of these.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, _SingleLevelFunction
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from ...capture.equations import NotCaptured

# How deep functions may be called in gradients of others.
_DEEPEST = 4

_library = torch.library.Library("sparsescan_capture", "DEF")
_library.define("given(Tensor given) -> Tensor")
_library.define("above(Tensor value) -> Tensor")
_library.define(
    "custom(Tensor value, Tensor above, Tensor[] given, Tensor[] grads, int[] places, str name,"
    " int number) -> Tensor"
)


def _marked(value: Tensor, *about: Any) -> Tensor:
    """Return what a mark gives in traces; numbers would lose their gradients."""
    if value.device.type != "meta" and not isinstance(value, FakeTensor):
        raise NotCaptured("a function with gradients of its own, which no kernel runs")
    return value.clone()


for _name in ("given", "above", "custom"):
    _library.impl(_name, _marked, "CompositeExplicitAutograd")
GIVEN, ABOVE, CUSTOM = (
    getattr(torch.ops.sparsescan_capture, name).default for name in ("given", "above", "custom")
)
MARKS = {GIVEN, ABOVE, CUSTOM}
# Each function, with its arguments; a class stands for tensors.
_calls: dict[int, tuple[Any, list[Any]]] = {}
_numbers: dict[Any, int] = {}
_count = itertools.count()


def call(target: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what an operator of a graph returns; of functions, where there are numbers."""
    if target not in MARKS or isinstance(args[0], FakeTensor):
        return target(*args, **kwargs)
    if target is not CUSTOM:
        return args[0]
    cls, own = _calls[args[-1]]
    given = iter(args[2])
    return cls.apply(*(next(given) if each is Tensor else each for each in own))


def _number(cls: Any, args: Sequence[Any]) -> int:
    """Return the number of a call of a function."""
    own = [Tensor if isinstance(each, Tensor) else each for each in args]
    number = _numbers.setdefault((cls, repr(own)), next(_count))
    _calls.setdefault(number, (cls, own))
    return number


_watching: list[None] = []


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Let modes see calls of each ``autograd.Function``; those under no mode are as ever.

    If one thread ends while another one begins, that may miss a call: then it runs a loop.
    """
    _watching.append(None)
    owner: Any = _SingleLevelFunction
    owner.apply = classmethod(_apply)
    try:
        yield
    finally:
        _watching.pop()
        if not _watching:
            with contextlib.suppress(AttributeError):  # another thread has done so
                del owner.apply


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    mode = _get_current_function_mode()
    if isinstance(mode, Watcher) and not kwargs:
        return mode.function(cls, args)
    if isinstance(mode, Onlooker):
        with _pop_mode_temporarily():
            return mode.__torch_function__(cls.apply, (), args, kwargs)
    return super(_SingleLevelFunction, cls).apply(*args, **kwargs)


class Onlooker(TorchFunctionMode):
    """Sees calls of each ``autograd.Function`` where these are watched, and nothing in them."""


class Watcher(TorchFunctionMode):
    """Sees each call of a function of PyTorch, and runs each ``autograd.Function``.

    Attributes
    ----------
    begun : tuple of bool
        Whether gradients and inference mode are on where functions are called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begun = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._depth, self._is_forward = 0, False

    def stop(self, error: BaseException) -> NoReturn:
        """Raise an error, and remember it."""
        raise NotImplementedError

    def function(self, cls: Any, args: Sequence[Any]) -> Any:
        """Return the result of an ``autograd.Function``."""
        name = f"{cls.__module__}.{cls.__qualname__}"
        context = _Context(self, name)
        if self._is_forward:
            return _forward(cls, context, args)
        given = [GIVEN(each) if isinstance(each, Tensor) else each for each in args]
        with self._without_gradients():
            found = _forward(cls, context, given)
        if not isinstance(found, Tensor) or context.is_marked:
            self.stop(NotCaptured(f"{name}: results that are not one tensor with gradients"))
        if cls.jvp is not Function.jvp or getattr(cls, "boxed_grads_call", False):
            self.stop(NotCaptured(f"{name}: a function with jvp, or boxed gradients"))
        if self._depth == _DEEPEST:
            self.stop(NotCaptured(f"{name}: a function in gradients of others in those of others"))
        is_float = [isinstance(each, Tensor) and each.is_floating_point() for each in given]
        context.needs = tuple(is_float) if sum(is_float) == 1 else None
        above = ABOVE(found)
        self._depth += 1
        try:
            backward = cls.backward if cls.vjp is Function.vjp else cls.vjp
            grads = backward(context, above)
        except NotCaptured:
            raise
        except Exception as error:  # which a step could catch here; PyTorch raises it later
            self.stop(NotCaptured(f"{name}.backward: {type(error).__name__}: {error}"))
        self._depth -= 1
        grads = grads if isinstance(grads, tuple) else (grads,)
        if len(grads) < len(given) or any(each is not None for each in grads[len(given) :]):
            self.stop(NotCaptured(f"{name}: {len(grads)} gradients of {len(given)} arguments"))
        tensors = [each for each in given if isinstance(each, Tensor)]
        wanted = [
            grad for each, grad in zip(given, grads, strict=False) if isinstance(each, Tensor)
        ]
        places = [
            k
            for k, (each, grad) in enumerate(zip(tensors, wanted, strict=True))
            if grad is not None and each.is_floating_point()
        ]
        for k in places:
            if (tensors[k].shape, tensors[k].dtype) != (wanted[k].shape, wanted[k].dtype):
                self.stop(NotCaptured(f"{name}: a gradient of another shape or dtype"))
        grads = [wanted[k] for k in places]
        return CUSTOM(found, above, tensors, grads, places, name, _number(cls, args))

    @contextlib.contextmanager
    def _without_gradients(self) -> Iterator[None]:
        """Switch gradients off, as they are in ``forward``; no trace has that."""
        begun = self.begun
        self.begun, self._is_forward = (False, begun[1]), True
        _enable_gradients(False)
        try:
            yield
        finally:
            self.begun, self._is_forward = begun, False
            _enable_gradients(begun[0])


def _enable_gradients(are_on: bool) -> None:
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(are_on)


def _forward(cls: Any, context: _Context, given: Sequence[Any]) -> Any:
    """Return the result of a function."""
    if cls.setup_context is Function.setup_context:
        return cls.forward(context, *given)
    found = cls.forward(*given)
    cls.setup_context(context, tuple(given), found)
    return found


class _Context(FunctionCtx):
    """What ``forward`` leaves for ``backward``.

    Attributes
    ----------
    needs : tuple of bool or None
        Which arguments need gradients; None if that is not known.
    """

    to_save: tuple[Any, ...] = ()

    def __init__(self, watcher: Watcher, name: str) -> None:
        self.needs: tuple[bool, ...] | None = None
        self._watcher, self._name = watcher, name

    @property
    def is_marked(self) -> bool:
        """Whether arguments are changed, or results have no gradients."""
        return hasattr(self, "dirty_tensors") or hasattr(self, "non_differentiable")

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """What was saved."""
        return self.to_save

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """Which arguments need gradients: the only tensor of floats does."""
        if self.needs is None:
            self._watcher.stop(NotCaptured(f"{self._name}: needs_input_grad of several tensors"))
        return self.needs
