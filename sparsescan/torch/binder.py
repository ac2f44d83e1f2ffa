"""Operations for PyTorch: an operator of its dispatcher each, with derivatives of any order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

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
from .calls.recorded import ResultTensor, Room, give_scratch, run, take_scratch

# Calls of some shapes before they are recorded, which takes as long as a few, and recordings.
_OFTEN, _MOST = 4, 64
_library = torch.library.Library("sparsescan", "FRAGMENT")


class Functions:
    """PyTorch's functions for formulas, as :class:`sparsescan.ops.operation.Functions` says."""

    concat = staticmethod(torch.concat)
    stack = staticmethod(torch.stack)
    flip = staticmethod(torch.flip)
    moveaxis = staticmethod(torch.movedim)
    broadcast_to = staticmethod(torch.broadcast_to)
    matmul = staticmethod(torch.matmul)
    exp = staticmethod(torch.exp)
    sigmoid = staticmethod(torch.sigmoid)
    softplus = staticmethod(torch.nn.functional.softplus)
    is_complex = staticmethod(torch.is_complex)
    complex = staticmethod(torch.complex)
    adjoint = staticmethod(torch.conj)

    @staticmethod
    def filled(like: Tensor, shape: Shape, value: float) -> Tensor:
        """Return an array of one number of the kind of another."""
        return like.new_full(shape, value)

    @staticmethod
    def constant(array: Any) -> Tensor:
        """Return an array of NumPy as a tensor."""
        return torch.from_numpy(array)

    @staticmethod
    def contiguous(x: Tensor) -> Tensor:
        """Return a tensor whose numbers lie end to end."""
        return x.contiguous()

    @staticmethod
    def repeat(x: Tensor, count: int, axis: int) -> Tensor:
        """Return a tensor in which each entry along an axis comes so often."""
        return x.repeat_interleave(count, axis)

    @staticmethod
    def add_at(x: Tensor, places: Any, values: Tensor) -> Tensor:
        """Return a tensor to whose places along the last axis values are added."""
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
        """Return the gradients in all that is given."""
        return gradients_of(lambda *own: tuple(function(*own)), given, above)


FUNCTIONS = Functions()


class Bound:
    """An operation as a function ``call(form, *given)`` of PyTorch, which returns all results.

    It is an operator ``sparsescan::name``, so that ``torch.compile`` keeps a graph whole, and it is
    differentiable any number of times, in both modes, and under the transforms of ``torch.func``.
    """

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self._programs: OrderedDict[Any, _Program] = OrderedDict()
        self._lock = new_lock()
        self._register()

    def __call__(self, form: Any, *given: Tensor | None) -> Sequence[Tensor]:
        """Return the results."""
        keeps = torch.is_grad_enabled() and any(
            each is not None and each.requires_grad for each in given
        )
        results: Sequence[Tensor]
        if is_transformed():
            if self.operation.slope is None or not takes_rules(*given):
                return self.operation.plain(FUNCTIONS, form, *given)
            results = _Transformed.apply(self, form, *given)
        elif not is_direct(*given):
            numbers, tables = self.encoded(form)
            found = self._call(*given, numbers, tables, keeps)
            results = (found,) if isinstance(found, Tensor) else found
        elif keeps:
            results = _Direct.apply(self, form, *given)
        else:
            results = self.forward(form, given, keeps=False)
        return results[: self.operation.results]

    # -- Kernels -----------------------------------------------------------------------------------

    def forward(self, form: Any, given: Sequence[Tensor | None], *, keeps: bool) -> list[Tensor]:
        """Return the results, and what is kept behind them if it `keeps`."""
        operation = self.operation
        given = [None if each is None else _plain(each) for each in given]
        if operation.check_values is not None:
            operation.check_values(form, [array_of(each) for each in given])
        first = given[0]
        assert first is not None
        program = self._program(form, given)
        if ops.is_empty(program.shapes):
            results = [*operation.plain(FUNCTIONS, form, *given)]
            shapes = operation.shapes(form, program.shapes)
            more = [first.new_zeros(shape) for shape in shapes[operation.results :]]
            return [*results, *(more if keeps else [])]
        if program.count():
            return program.forward(given, keeps)
        with here(first):
            arrays = list(map(array_of, given))
            return list(map(tensor_of, ops.compute(operation, form, arrays, keeps=keeps)))

    def backward(
        self,
        form: Any,
        kept: Tensor,
        above: Sequence[Tensor],
        given: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> list[Tensor]:
        """Return the gradients that are needed; of inputs that are not read only shapes count."""
        operation, flags = self.operation, tuple(needs)
        program = self._program(form, given)
        program.check(kept, above)
        if ops.is_empty(program.shapes) or (kept.is_complex() and not operation.has_complex):
            found = ops.again(operation, FUNCTIONS, form, kept, above, given)
            return [each for each, need in zip(found, flags, strict=True) if need]
        kept, *above = map(_plain, (kept, *above))
        given = [
            _plain(each) if each is not None and k in operation.reads else each
            for k, each in enumerate(given)
        ]
        if program.is_recorded:
            return program.backward(kept, above, given, flags)
        with here(kept):
            arrays = list(map(array_of, above)), list(map(array_of, given))
            found = ops.compute_gradients(operation, form, array_of(kept), *arrays, flags)
            return list(map(tensor_of, found))

    def _program(self, form: Any, given: Sequence[Tensor | None]) -> _Program:
        shapes = tuple([None if each is None else tuple(each.shape) for each in given])
        first = given[0]
        assert first is not None
        key = form, shapes, first.dtype
        program = self._programs.get(key)
        if program is None:
            if self.operation.check is not None:
                self.operation.check(form, shapes)
            program = _Program(self.operation, form, shapes, first.dtype)
            with self._lock:
                self._programs[key] = program
                while len(self._programs) > _MOST:
                    self._programs.popitem(last=False)
        return program

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
        _library.impl(name, self._operator, "CPU")
        _library.impl(f"{name}_backward", self._operator_back, "CPU")
        register: Any = torch.library
        register.register_fake(f"sparsescan::{name}", self._fake, lib=_library)
        register.register_fake(f"sparsescan::{name}_backward", self._fake_back, lib=_library)
        register.register_autograd(
            f"sparsescan::{name}", self._differentiate, setup_context=self._save, lib=_library
        )

    def _results(self, results: list[Tensor]) -> Any:
        """Return results as the operator does: with nothing in place of what is not kept."""
        if len(results) < max(self.operation.results, self.operation.kept + 1):
            results.append(results[0].new_empty(0))
        return tuple(results) if len(results) > 1 else results[0]

    def _operator(self, *arguments: Any) -> Any:
        *given, numbers, tables, keeps = arguments
        form = self._decoded(numbers, tables)
        return self._results(self.forward(form, given, keeps=keeps))

    def _operator_back(self, *arguments: Any) -> list[Tensor]:
        kept, *tensors, numbers, tables, needs = arguments
        form, count = self._decoded(numbers, tables), self.operation.results
        above, given = tensors[:count], tensors[count:]
        found = iter(self.backward(form, kept, above, given, needs))
        return [next(found) if need else kept.new_empty(0) for need in needs]

    def _fake(self, *arguments: Any) -> Any:
        *given, numbers, tables, keeps = arguments
        shapes = self.operation.shapes(self._decoded(numbers, tables), _shapes_of(given))
        results = [given[0].new_empty(shape) for shape in shapes]
        return self._results(results if keeps else results[: self.operation.results])

    def _fake_back(self, *arguments: Any) -> list[Tensor]:
        kept, *tensors, _, _, needs = arguments
        pairs = zip(tensors[self.operation.results :], needs, strict=True)
        return [kept.new_empty(each.shape if need else (0,)) for each, need in pairs]

    def _save(self, ctx: Any, inputs: Any, output: Any) -> None:
        *given, numbers, tables, _ = inputs
        results = output if isinstance(output, tuple) else (output,)
        _save(ctx, self, self._decoded(numbers, tables), given, results)
        # PyTorch takes an empty list for one of tensors.
        ctx.behind = None if numbers else [], [None] * len(tables), None

    def _differentiate(self, ctx: Any, *above: Any) -> Any:
        needs = ctx.needs_input_grad[: len(self.operation.inputs)]
        return *_gradients(ctx, above, needs), *ctx.behind

    def encoded(self, form: Any) -> tuple[list[int], list[Tensor]]:
        """Return a form as operators take it: as numbers, and tables."""
        numbers, tables = self.operation.encode(form)
        return numbers, list(map(torch.from_numpy, tables))

    def _decoded(self, numbers: Sequence[int], tables: Sequence[Tensor]) -> Any:
        return self.operation.decode(numbers, [each.numpy() for each in tables])


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory is all that there is of it, in one piece."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _shapes_of(given: Sequence[Tensor | None]) -> Shapes:
    return [None if each is None else tuple(each.shape) for each in given]


# Operations by their names: compilers follow a look into a dictionary.
_bounds: dict[str, Bound] = {}


def bind(operation: Operation) -> Bound:
    """Return an operation as a function of PyTorch, once it is registered."""
    return _bounds.setdefault(operation.name, Bound(operation))


# -- Derivatives -----------------------------------------------------------------------------------


def _save(ctx: Any, bound: Bound, form: Any, given: Sequence[Any], results: Sequence[Any]) -> None:
    operation = bound.operation
    ctx.bound, ctx.form = bound, form
    if operation.kept >= operation.results:
        ctx.mark_non_differentiable(results[operation.kept])
    # Of inputs that are not read only shapes are kept: they may change before the backward pass.
    ctx.shapes = [
        None if each is None or k in operation.reads else each.shape for k, each in enumerate(given)
    ]
    read = [each if k in operation.reads else None for k, each in enumerate(given)]
    ctx.save_for_backward(results[operation.kept], *read)


def _gradients(ctx: Any, above: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients in inputs, given those in all results; None where none is needed."""
    kept, *given = ctx.saved_tensors
    bound, form, count = ctx.bound, ctx.form, ctx.bound.operation.results
    given = [
        kept.new_empty(()).expand(shape) if each is None and shape is not None else each
        for each, shape in zip(given, ctx.shapes, strict=True)
    ]
    tensors = [kept, *above[:count], *given]

    def again(kept: Tensor, *tensors: Any) -> Sequence[Any]:
        above, given = tensors[:count], tensors[count:]
        found = ops.again(bound.operation, FUNCTIONS, form, kept, above, given)
        return [kept.new_zeros(0) if each is None else each for each in found]

    if any(map(is_mapped, tensors)):
        found = over_maps(again, tensors)
    elif torch.is_grad_enabled() or is_transformed():
        found = again(*tensors)
    elif is_direct(*tensors):
        rest = iter(bound.backward(form, kept, above[:count], given, needs))
        return [next(rest) if need else None for need in needs]
    else:
        numbers, tables = bound.encoded(form)
        found = bound.call_back(*tensors, numbers, tables, list(needs))
    return [each if need else None for each, need in zip(found, needs, strict=True)]


class _Direct(torch.autograd.Function):
    """An operation with its gradients, for calls that nothing else wants to see."""

    @staticmethod
    def forward(ctx: Any, bound: Bound, form: Any, *given: Tensor | None) -> tuple[Tensor, ...]:
        results = bound.forward(form, given, keeps=True)
        _save(ctx, bound, form, given, results)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Any:
        return None, None, *_gradients(ctx, above, ctx.needs_input_grad[2:])


class _Transformed(Mappable):
    """An operation for transforms of ``torch.func`` and forward mode."""

    @staticmethod
    def forward(bound: Bound, form: Any, *given: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(bound.forward(form, given, keeps=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        bound, form, *given = inputs
        _save(ctx, bound, form, given, output)
        ctx.save_for_forward(output[bound.operation.kept], *given)

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


# -- Recordings ------------------------------------------------------------------------------------


class _Program:
    """Both passes of an operation for contiguous tensors of some shapes in host memory.

    Parameters
    ----------
    operation : Operation
        The operation.
    form : object
        Its form.
    shapes : sequence
        The shapes of all inputs.
    dtype : dtype
        Of all tensors.
    """

    def __init__(self, operation: Operation, form: Any, shapes: Shapes, dtype: torch.dtype) -> None:
        self.shapes = shapes
        self._about, self._dtype, self._calls = (operation, form, shapes, str(dtype)[6:]), dtype, 0
        shapes_of = operation.shapes(form, shapes)
        self._shapes = shapes_of[operation.kept], *shapes_of[: operation.results]
        self._recorded: dict[Any, tuple[Recorded, list[ResultTensor]]] = {}
        self._rooms = StepPool(partial(Room, 0))

    def check(self, kept: Tensor, above: Sequence[Tensor]) -> None:
        """Raise unless these are what the forward pass has kept, and gradients in its results."""
        names = "kept", *(f"above_{k}" for k in range(len(above)))
        for name, each, shape in zip(names, (kept, *above), self._shapes, strict=True):
            if each.shape != shape or each.dtype != self._dtype:
                raise InputError(
                    f"{name} has shape {tuple(each.shape)} and dtype {each.dtype}; expected "
                    f"{shape} and {self._dtype}"
                )

    def count(self) -> bool:
        """Count a call, and return whether there have been enough of them to record it."""
        self._calls += 1
        return self.is_recorded

    @property
    def is_recorded(self) -> bool:
        """Whether calls are recorded."""
        return self._calls > _OFTEN

    def forward(self, given: Sequence[Tensor | None], keeps: bool) -> list[Tensor]:
        """Return the results, and what is kept."""
        return self._run(ops.record, (keeps,), [each for each in given if each is not None])

    def backward(
        self, kept: Tensor, above: Sequence[Tensor], given: Sequence[Any], needs: tuple[bool, ...]
    ) -> list[Tensor]:
        """Return the gradients that are needed."""
        reads = self._about[0].reads
        read = [given[k] for k in reads if given[k] is not None]
        return self._run(ops.record_gradients, (needs, True), [kept, *above, *read])

    def _run(self, record: Any, more: Any, given: list[Tensor]) -> list[Tensor]:
        found = self._recorded.get((record, more))
        if found is None:
            recorded = record(*self._about, *more)
            results = [ResultTensor.of(each, self._dtype) for each in recorded.recording.results]
            found = self._recorded[record, more] = recorded, results
        recorded, results = found
        room, scratch = self._rooms.take(), take_scratch(recorded.nbytes)
        tensors = [each.new(room) for each in results]
        run(recorded.recording, [address_of(scratch)], given, tensors)
        give_scratch(scratch)
        self._rooms.give_back(room)
        return tensors
