"""Make each operation an operator of PyTorch's dispatcher, with derivatives of any order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..execution.recurrence import Recorded
from ..kernels.addresses import address_of
from ..locks import new_lock
from ..ops import operation as ops
from ..ops.operation import Operation, Shape, Shapes
from ..recurrent.step_pool import StepPool
from .calls.arrays import array_of, here, tensor_of
from .calls.direct import is_direct, is_mapped, is_transformed, takes_rules
from .calls.once import Mappable, gradients_of, over_maps
from .calls.recorded import ResultTensor, Room, give_scratch, new_tensors, run, take_scratch

# How many shapes of calls keep their recordings.
_MOST = 64
_library = torch.library.Library("sparsescan", "FRAGMENT")


class Functions:
    """PyTorch's functions for formulas, as :class:`sparsescan.ops.operation.Functions` says."""

    concat = staticmethod(torch.cat)
    stack = staticmethod(torch.stack)
    flip = staticmethod(torch.flip)
    moveaxis = staticmethod(torch.movedim)
    broadcast_to = staticmethod(torch.broadcast_to)
    matmul = staticmethod(torch.matmul)
    exp = staticmethod(torch.exp)
    log = staticmethod(torch.log)
    isnan = staticmethod(torch.isnan)
    where = staticmethod(torch.where)
    amax = staticmethod(torch.amax)
    detach = staticmethod(torch.detach)
    linalg: Any = torch.linalg
    sigmoid = staticmethod(torch.sigmoid)
    softplus = staticmethod(torch.nn.functional.softplus)
    is_complex = staticmethod(torch.is_complex)
    complex = staticmethod(torch.complex)
    adjoint = staticmethod(torch.conj)

    @staticmethod
    def filled(like: Tensor, shape: Shape, value: float) -> Tensor:
        """Return a tensor of one repeated number, with the dtype and device of another tensor."""
        return like.new_full(shape, value)

    @staticmethod
    def eye(like: Tensor, size: int) -> Tensor:
        """Return the identity matrix, of the dtype of another tensor."""
        return torch.eye(size, dtype=like.dtype, device=like.device)

    @staticmethod
    def constant(array: Any) -> Tensor:
        """Return a NumPy array as a tensor."""
        return torch.from_numpy(array)

    @staticmethod
    def contiguous(x: Tensor) -> Tensor:
        """Return a contiguous tensor."""
        return x.contiguous()

    @staticmethod
    def repeat(x: Tensor, count: int, axis: int) -> Tensor:
        """Return a tensor in which each entry along an axis is repeated."""
        return x.repeat_interleave(count, axis)

    @staticmethod
    def take(x: Tensor, places: Any, axis: int) -> Tensor:
        """Return the entries at places along an axis."""
        return x.index_select(axis, torch.from_numpy(places))

    @staticmethod
    def add_at(x: Tensor, places: Any, values: Tensor) -> Tensor:
        """Return a tensor with values added at places along the last axis."""
        return x.index_add(-1, torch.from_numpy(places), values)

    @staticmethod
    def loop(step: Any, begin: Any, rows: Sequence[Any]) -> tuple[Any, Any]:
        """Return the last state and the stacked outputs of steps."""
        state, outputs = begin, []
        for t in range(max(len(row) for row in rows if row is not None)):
            state, out = step(state, *(None if row is None else row[t] for row in rows))
            outputs.append(out)
        return state, torch.stack(outputs) if outputs else None

    @staticmethod
    def run(operation: Operation, form: Any, *given: Any) -> Sequence[Tensor]:
        """Return the results of an operation."""
        return _bounds[operation.name](form, *given)

    @staticmethod
    def pull(function: Any, given: Any, above: Any) -> Sequence[Tensor]:
        """Return the gradients in all arguments."""
        return gradients_of(lambda *own: tuple(function(*own)), given, above)


FUNCTIONS = Functions()


class Bound:
    """An operation as a function ``call(form, *given)`` of PyTorch, which returns all results.

    It is an operator ``sparsescan::name``, so ``torch.compile`` does not break the graph. It is
    differentiable any number of times, in both modes, and under the transforms of ``torch.func``.
    """

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self._programs: OrderedDict[Any, Program] = OrderedDict()
        self._lock = new_lock()
        self._register()

    def __call__(self, form: Any, *given: Tensor | None) -> Sequence[Tensor]:
        """Return the results."""
        if is_transformed():
            if self.operation.slope is None or not takes_rules(*given):
                return self.operation.plain(FUNCTIONS, form, *given)
            results: Sequence[Tensor] = _Transformed.apply(self, form, *given)
            return results[: self.operation.results]
        if is_direct(*given):
            return self.run(self.program(form, given), given)
        numbers, tables = self.encoded(form)
        found = self._call(*given, numbers, tables, _has_graph(given))
        return (found,) if isinstance(found, Tensor) else found[: self.operation.results]

    # -- Kernels -----------------------------------------------------------------------------------

    def program(
        self, form: Any, given: Sequence[Tensor | None], view: View | None = None
    ) -> Program:
        """Return both passes for inputs of these shapes."""
        shapes = _shapes_of(given)
        first = given[0]
        assert first is not None
        key = form, shapes, first.dtype, view
        program = self._programs.get(key)
        if program is None:
            inside = shapes if view is None else view.inputs
            if self.operation.check is not None:
                self.operation.check(form, inside)
            program = Program(self, form, first.dtype, shapes, view)
            with self._lock:
                self._programs[key] = program
                while len(self._programs) > _MOST:
                    self._programs.popitem(last=False)
        return program

    def run(self, program: Program, given: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Return the results by a program, for calls that nothing in PyTorch observes."""
        if _has_graph(given):
            results: Sequence[Tensor] = _Direct.apply(program, *given)
            return results[: self.operation.results]
        return program.forward(given, keeps=False)

    # -- The operators -----------------------------------------------------------------------------

    def _register(self) -> None:
        operation, name = self.operation, self.operation.name
        count = max(operation.results, operation.kept + 1)
        inputs = ", ".join(
            f"Tensor{'?' * each.endswith('?')} {each.rstrip('?')}" for each in operation.inputs
        )
        above = ", ".join(f"Tensor above_{k}" for k in range(operation.results))
        results = ", ".join(["Tensor"] * count)
        _library.define(f"{name}({inputs}, int[] form, Tensor[] tables, bool keeps) -> ({results})")
        _library.define(
            f"{name}_backward(Tensor kept, {above}, {inputs}, int[] form, Tensor[] tables, "
            "bool[] needs) -> Tensor[]"
        )
        operators = torch.ops.sparsescan
        self._call: Any = getattr(operators, name).default
        self.call_back: Any = getattr(operators, f"{name}_backward").default
        for device in ("CPU",) if operation.on_device is None else ("CPU", "CUDA"):
            _library.impl(name, self._operator, device)
            _library.impl(f"{name}_backward", self._operator_back, device)
        register: Any = torch.library
        register.register_fake(f"sparsescan::{name}", self._fake, lib=_library)
        register.register_fake(f"sparsescan::{name}_backward", self._fake_back, lib=_library)
        register.register_autograd(
            f"sparsescan::{name}", self._differentiate, setup_context=self._save, lib=_library
        )

    def _results(self, results: list[Tensor]) -> Any:
        """Return the results in the operator's form: an empty tensor replaces what is not kept."""
        if len(results) < max(self.operation.results, self.operation.kept + 1):
            results.append(results[0].new_empty(0))
        return tuple(results) if len(results) > 1 else results[0]

    def _operator(self, *arguments: Any) -> Any:
        *given, numbers, tables, keeps = arguments
        program = self.program(self.decoded(numbers, tables), given)
        return self._results(program.forward(given, keeps))

    def _operator_back(self, *arguments: Any) -> list[Tensor]:
        kept, *tensors, numbers, tables, needs = arguments
        above, given = tensors[: self.operation.results], tensors[self.operation.results :]
        program = self.program(self.decoded(numbers, tables), given)
        read = {k: given[k] for k in self.operation.reads}
        found = iter(program.backward(kept, above, read, needs))
        return [next(found) if need else kept.new_empty(0) for need in needs]

    def _fake(self, *arguments: Any) -> Any:
        *given, numbers, _, keeps = arguments
        # Tables may be fake, like tensors; no shape depends on them.
        shapes = self.operation.shapes(self.operation.decode(numbers, []), _shapes_of(given))
        results = [given[0].new_empty(shape) for shape in shapes]
        return self._results(results if keeps else results[: self.operation.results])

    def _fake_back(self, *arguments: Any) -> list[Tensor]:
        kept, *tensors, _, _, needs = arguments
        pairs = zip(tensors[self.operation.results :], needs, strict=True)
        return [kept.new_empty(each.shape if need else (0,)) for each, need in pairs]

    def _save(self, ctx: Any, inputs: Any, output: Any) -> None:
        *given, numbers, tables, _ = inputs
        results = output if isinstance(output, tuple) else (output,)
        # If tables are fake there is no form; a compiled backward pass needs none.
        ctx.bound, ctx.program, ctx.form, ctx.encoded = self, None, None, (numbers, tables)
        _save(ctx, given, results)
        # PyTorch reads an empty list as a list of tensors.
        ctx.behind = None if numbers else [], [None] * len(tables), None

    def _differentiate(self, ctx: Any, *above: Any) -> Any:
        needs = ctx.needs_input_grad[: len(self.operation.inputs)]
        return *_gradients(ctx, above, needs), *ctx.behind

    def encoded(self, form: Any) -> tuple[list[int], list[Tensor]]:
        """Return a form as operators take it: numbers and tables."""
        numbers, tables = self.operation.encode(form)
        return numbers, list(map(torch.from_numpy, tables))

    def decoded(self, numbers: Sequence[int], tables: Sequence[Tensor]) -> Any:
        """Return the form that numbers and tables encode."""
        return self.operation.decode(numbers, [each.numpy() for each in tables])


def is_on_device(tensor: Tensor) -> bool:
    """Return whether a device other than the CPU must run the kernels for a tensor."""
    return not tensor.is_cpu


def _plain(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor without conjugation or negation bits."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.resolve_conj().resolve_neg().contiguous()


def _moved(tensor: Tensor, shape: Shape) -> Tensor:
    """Return a tensor with the same numbers in another shape, which is not a view."""
    return tensor.new_empty(shape).copy_(tensor.reshape(shape))


def _has_graph(given: Sequence[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in given
    )


def _shapes_of(given: Sequence[Tensor | None]) -> tuple[Shape | None, ...]:
    return tuple([None if each is None else tuple(each.shape) for each in given])


# Operations by name: compilers can trace a lookup in a dictionary.
_bounds: dict[str, Bound] = {}


def bind(operation: Operation) -> Bound:
    """Return an operation as a function of PyTorch; register it at the first call."""
    if operation.name not in _bounds:
        _bounds[operation.name] = Bound(operation)
    return _bounds[operation.name]


# -- Derivatives -----------------------------------------------------------------------------------


def _save(ctx: Any, given: Sequence[Any], results: Sequence[Any]) -> None:
    operation = ctx.bound.operation
    if operation.kept >= operation.results:
        ctx.mark_non_differentiable(results[operation.kept])
    # For inputs that gradients do not read, only shapes are kept: the caller may change them.
    ctx.shapes = _shapes_of(given) if ctx.program is None else ctx.program.shapes
    ctx.save_for_backward(results[operation.kept], *[given[k] for k in operation.reads])


def _gradients(ctx: Any, above: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients in inputs from those in all results; None where not needed."""
    bound, form, program = ctx.bound, ctx.form, ctx.program
    operation, saved = bound.operation, ctx.saved_tensors
    kept, count = saved[0], operation.results
    is_once = not torch.is_grad_enabled() and is_direct(*saved, *above[:count])
    given = dict(zip(operation.reads, saved[1:], strict=True))
    if is_once and program is not None:
        rest = iter(program.backward(kept, above[:count], given, needs))
        return [next(rest) if need else None for need in needs]
    view = None if program is None else program.view
    whole = [
        given[k] if k in given else None if shape is None else kept.new_empty(()).expand(shape)
        for k, shape in enumerate(ctx.shapes)
    ]
    tensors = [kept, *above[:count], *whole]

    def again(kept: Tensor, *tensors: Any) -> Sequence[Any]:
        above, given = tensors[:count], tensors[count:]
        if view is not None:
            kept, above, given = view.inside(kept, above, given)
        own = bound.decoded(*ctx.encoded) if form is None else form
        found = ops.again(bound.operation, FUNCTIONS, own, kept, above, given)
        return [
            kept.new_zeros(0) if each is None else each.reshape(like.shape)
            for each, like in zip(found, tensors[count:], strict=True)
        ]

    if any(map(is_mapped, tensors)):
        found = over_maps(again, tensors)
    elif torch.is_grad_enabled() or is_transformed():
        found = again(*tensors)
    elif is_once:
        program = bound.program(bound.decoded(*ctx.encoded) if form is None else form, whole)
        rest = iter(program.backward(kept, above[:count], given, needs))
        return [next(rest) if need else None for need in needs]
    else:
        if view is not None:
            kept, above, whole = view.inside(kept, above[:count], whole)
        numbers, tables = ctx.encoded if form is None else bound.encoded(form)
        found = bound.call_back(kept, *above[:count], *whole, numbers, tables, list(needs))
    return [each if need else None for each, need in zip(found, needs, strict=True)]


class _Direct(torch.autograd.Function):
    """An operation with its gradients, for calls that nothing in PyTorch observes."""

    @staticmethod
    def forward(ctx: Any, program: Program, *given: Tensor | None) -> tuple[Tensor, ...]:
        results = program.forward(given, keeps=True)
        ctx.bound, ctx.form, ctx.program = program.bound, program.form, program
        _save(ctx, given, results)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Any:
        return None, *_gradients(ctx, above, ctx.needs_input_grad[1:])


class _Transformed(Mappable):
    """An operation for transforms of ``torch.func`` and forward mode."""

    @staticmethod
    def forward(bound: Bound, form: Any, *given: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(bound.program(form, given).forward(given, keeps=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.bound, ctx.form, *given = inputs
        ctx.program = None
        _save(ctx, given, output)
        ctx.save_for_forward(output[ctx.bound.operation.kept], *given)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Any:
        return None, None, *_gradients(ctx, above, ctx.needs_input_grad[2:])

    @staticmethod
    def jvp(ctx: Any, _: Any, __: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        operation, (kept, *given) = ctx.bound.operation, ctx.saved_tensors
        along = operation.slope(FUNCTIONS, ctx.form, kept, given, slopes)
        return *along, *[None] * (operation.kept >= operation.results)

    @staticmethod
    def vmap(info: Any, dims: Any, bound: Bound, form: Any, *given: Tensor | None) -> Any:
        operation, count = bound.operation, info.batch_size
        pairs = list(zip(given, dims[2:], strict=True))
        axes = operation.axes([_shape_of_one(each, dim) for each, dim in pairs])
        whole = [
            ops.folded(FUNCTIONS, count, each, dim, axis)
            for (each, dim), axis in zip(pairs, axes, strict=True)
        ]
        results = zip(_Transformed.apply(bound, form, *whole), operation.out_axes, strict=True)
        apart = tuple(ops.parted(FUNCTIONS, count, each, axis) for each, axis in results)
        return apart, (0,) * len(apart)


def _shape_of_one(array: Tensor | None, dim: int | None) -> Shape | None:
    """Return the shape of an input of one map."""
    if array is None:
        return None
    shape = tuple(array.shape)
    return shape if dim is None else shape[:dim] + shape[dim + 1 :]


# -- Programs --------------------------------------------------------------------------------------


class View(NamedTuple):
    """Shapes that an operation sees in place of the caller's, with equal numbers of elements.

    Attributes
    ----------
    inputs : sequence
        The shapes of the inputs.
    result, outside : tuple of int
        The shape of the result, and the shape that the caller gets.
    """

    inputs: Shapes
    result: Shape
    outside: Shape

    def inside(self, kept: Tensor, above: Sequence[Tensor], given: Sequence[Any]) -> Any:
        """Return the result, its gradient, and inputs, as the operation sees them."""
        whole = [
            None if each is None or shape is None else each.reshape(shape)
            for each, shape in zip(given, self.inputs, strict=True)
        ]
        return kept.reshape(self.result), [above[0].reshape(self.result)], whole


class Program:
    """Both passes of an operation for tensors of some shapes, without derivatives.

    Parameters
    ----------
    bound : Bound
        The operation.
    form : object
        Its form.
    dtype : dtype
        Of all tensors.
    shapes : tuple
        The shapes of all inputs.
    view : View, optional
        The shapes that the operation sees, if they differ from `shapes`.

    Attributes
    ----------
    bound, form, shapes, view
        As given.
    """

    def __init__(
        self, bound: Bound, form: Any, dtype: torch.dtype, shapes: Any, view: View | None
    ) -> None:
        self.bound, self.form, self.shapes, self.view = bound, form, shapes, view
        self._operation, self._dtype = bound.operation, dtype
        self._inputs = shapes if view is None else view.inputs
        results = bound.operation.shapes(form, self._inputs)
        own = results if view is None else [view.outside]
        self._results = own[self._operation.kept], *own[: self._operation.results]
        self._more = results[self._operation.results :]
        self._is_empty = ops.is_empty(self._inputs)
        self._recorded: dict[Any, tuple[Recorded, list[ResultTensor]]] = {}
        self._rooms = StepPool(partial(Room, 0))

    def forward(self, given: Sequence[Tensor | None], keeps: bool) -> list[Tensor]:
        """Return the results, and after them what is kept, if `keeps`."""
        operation = self._operation
        given = [None if each is None else _plain(each) for each in given]
        first: Any = given[0]
        if operation.check_values is not None:
            operation.check_values(self.form, [array_of(each) for each in given])
        if self._is_empty:
            results = [*operation.plain(FUNCTIONS, self.form, *self._inside(given))]
            results += [first.new_zeros(shape) for shape in self._more * keeps]
            return results if self.view is None else [_moved(results[0], self.view.outside)]
        if operation.on_device is None or not is_on_device(first):
            there = [each for each in given if each is not None]
            return self._run(ops.record, (keeps,), there, self._results[1:])
        with here(first):
            found = operation.on_device[0](self.form, list(map(array_of, self._inside(given))))
            if self.view is not None:
                found = [found[0].reshape(self.view.outside)]
            return list(map(tensor_of, found))

    def backward(
        self,
        kept: Tensor,
        above: Sequence[Tensor],
        given: dict[int, Tensor | None],
        needs: Sequence[bool],
    ) -> list[Tensor]:
        """Return the gradients that are needed; `given` are the inputs that gradients read."""
        operation, needs = self._operation, tuple(needs)
        for k, each in enumerate((kept, *above)):
            if each.shape != self._results[k] or each.dtype != self._dtype:
                raise InputError(
                    f"{f'above_{k - 1}' if k else 'kept'} has shape {tuple(each.shape)} and dtype "
                    f"{each.dtype}; expected {self._results[k]} and {self._dtype}"
                )
        kept, *above = [_plain(each) for each in (kept, *above)]
        read = {k: None if each is None else _plain(each) for k, each in given.items()}
        by_kernels = not self._is_empty and operation.backward is not None
        by_kernels &= operation.has_complex or not self._dtype.is_complex
        shapes = [shape for shape, need in zip(self.shapes, needs, strict=True) if need]
        on_device = operation.on_device if is_on_device(kept) else None
        if by_kernels and on_device is None:
            arrays = [kept, *above, *[each for each in read.values() if each is not None]]
            return self._run(ops.record_gradients, (needs, True), arrays, shapes)
        whole: Any = [
            read[k] if k in read else None if shape is None else kept.new_empty(()).expand(shape)
            for k, shape in enumerate(self.shapes)
        ]
        if self.view is not None:
            kept, above, whole = self.view.inside(kept, above, whole)
        if on_device is None or not by_kernels:
            every = ops.again(operation, FUNCTIONS, self.form, kept, above, whole)
            # Gradients by PyTorch's own operations have a graph, which nobody has asked for.
            found = [each.detach() for each, need in zip(every, needs, strict=True) if need]
        else:
            with here(kept):
                known = array_of(kept), list(map(array_of, above)), list(map(array_of, whole))
                found = list(map(tensor_of, on_device[1](self.form, *known, needs)))
        return [each.reshape(shape) for each, shape in zip(found, shapes, strict=True)]

    def _inside(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return inputs as the operation sees them."""
        return [
            each if each is None or shape is None else each.view(shape)
            for each, shape in zip(given, self._inputs, strict=True)
        ]

    def _run(
        self, record: Any, more: Any, given: list[Tensor], shapes: Sequence[Shape]
    ) -> list[Tensor]:
        """Return the results of a recording; the first ones have these shapes."""
        found = self._recorded.get((record, more))
        if found is None:
            recorded = record(self._operation, self.form, self._inputs, str(self._dtype)[6:], *more)
            results = [
                ResultTensor.of(each, self._dtype, shape)
                for each, shape in zip_longest(recorded.recording.results, shapes)
            ]
            found = self._recorded[record, more] = recorded, results
        recorded, results = found
        room, scratch = self._rooms.take(), take_scratch(recorded.nbytes)
        tensors = new_tensors(results, room)
        run(recorded.recording, [address_of(scratch)], given, tensors)
        give_scratch(scratch)
        self._rooms.give_back(room)
        return tensors
