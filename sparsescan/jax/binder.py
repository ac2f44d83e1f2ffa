"""Make each operation three JAX primitives, with derivatives of any order and ``vmap``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from ..ops import operation as ops
from ..ops.operation import MappedAxis, Operation, Shape
from .ffi.calls import together, vary, varying
from .ffi.programs import replay
from .ffi.rules import (
    alike,
    differentiated,
    filled,
    mapped,
    primitive,
    set_map,
    shape_of_one,
    size_of,
)


class Functions:
    """JAX's functions for formulas, as :class:`sparsescan.ops.operation.Functions` says."""

    concat = staticmethod(jnp.concatenate)
    stack = staticmethod(jnp.stack)
    flip = staticmethod(jnp.flip)
    moveaxis = staticmethod(jnp.moveaxis)
    broadcast_to = staticmethod(jnp.broadcast_to)
    matmul = staticmethod(functools.partial(jnp.matmul, precision="highest"))
    exp = staticmethod(jnp.exp)
    log = staticmethod(jnp.log)
    isnan = staticmethod(jnp.isnan)
    where = staticmethod(jnp.where)
    amax = staticmethod(jnp.max)
    detach = staticmethod(jax.lax.stop_gradient)
    linalg: Any = jnp.linalg
    sigmoid = staticmethod(jax.nn.sigmoid)
    repeat = staticmethod(jnp.repeat)
    take = staticmethod(jnp.take)
    is_complex = staticmethod(jnp.iscomplexobj)
    complex = staticmethod(jax.lax.complex)
    constant = staticmethod(jnp.asarray)

    @staticmethod
    def filled(like: Any, shape: Shape, value: float) -> Any:
        """Return an array of one repeated number, with the dtype of another array."""
        return vary(jnp.full(shape, value, like.dtype), varying(like))

    @staticmethod
    def eye(like: Any, size: int) -> Any:
        """Return the identity matrix, of the dtype of another array."""
        return vary(jnp.eye(size, dtype=like.dtype), varying(like))

    @staticmethod
    def adjoint(x: Any) -> Any:
        """Return the array itself: JAX does not conjugate gradients in complex numbers."""
        return x

    @staticmethod
    def contiguous(x: Any) -> Any:
        """Return the array itself."""
        return x

    @staticmethod
    def add_at(x: Any, places: Any, values: Any) -> Any:
        """Return an array with values added at places along the last axis."""
        return x.at[..., places].add(values)

    @staticmethod
    def softplus(x: Any) -> Any:
        """Return ``log(1 + exp(x))``; like PyTorch's, it is the identity beyond 20."""
        return jnp.where(x > 20, x, jax.nn.softplus(jnp.minimum(x, 20)))

    @staticmethod
    def loop(step: Any, begin: Any, rows: Sequence[Any]) -> tuple[Any, Any]:
        """Return the last state and the stacked outputs of steps."""
        begin = vary(begin, varying([begin, *rows]))
        last: tuple[Any, Any] = jax.lax.scan(lambda state, row: step(state, *row), begin, rows)
        return last

    @staticmethod
    def run(operation: Operation, form: Any, *given: Any) -> Sequence[Any]:
        """Return the results of an operation."""
        return bind(operation)(form, *given)

    @staticmethod
    def pull(function: Any, given: Any, above: Any) -> Sequence[Any]:
        """Return the gradients in all arguments."""
        pulled: Sequence[Any] = jax.vjp(lambda *own: tuple(function(*own)), *given)[1](tuple(above))
        return pulled


FUNCTIONS = Functions()


class _Form(NamedTuple):
    """A form of an operation, and which of its inputs are given."""

    form: Any
    there: tuple[bool, ...]

    def whole(self, arrays: Sequence[Any]) -> list[Any]:
        """Return a list for all inputs, with None for inputs that are not given."""
        rest = iter(arrays)
        return [next(rest) if there else None for there in self.there]

    def only(self, whole: Sequence[Any]) -> list[Any]:
        """Return a list for the given inputs only."""
        return [each for each, there in zip(whole, self.there, strict=True) if there]


@functools.cache
def bind(operation: Operation) -> Callable[..., list[Any]]:
    """Return a function ``call(form, *given)`` with derivatives of any order, in both modes.

    First gradients in reverse mode and ``vmap`` run kernels.
    """
    name, count, behind = operation.name, operation.results, operation.kept

    def shapes_of(form: _Form, given: Sequence[Any]) -> tuple[Shape | None, ...]:
        return tuple(form.whole([each.shape for each in given]))

    def compute(*given: Any, form: _Form, keeps: bool) -> list[Any]:
        shapes = shapes_of(form, given)
        if ops.is_empty(shapes):
            more = operation.shapes(form.form, shapes)[count:] if keeps else []
            results = operation.plain(FUNCTIONS, form.form, *form.whole(given))
            return [*results, *(FUNCTIONS.filled(given[0], each, 0) for each in more)]
        about = operation, form.form, shapes, given[0].dtype.name, keeps
        return replay(ops.record, about, given)

    def compute_slope(kept: Any, *both: Any, form: _Form) -> list[Any]:
        size = len(both) // 2
        given, slopes = both[:size], both[size:]
        if operation.slope is None:
            plain = functools.partial(operation.plain, FUNCTIONS, form.form)
            return list(jax.jvp(lambda *own: plain(*form.whole(own)), given, slopes)[1])
        whole = form.whole(given), form.whole(slopes)
        return list(operation.slope(FUNCTIONS, form.form, kept, *whole))

    def compute_gradients(kept: Any, *both: Any, form: _Form, needs: Sequence[bool]) -> list[Any]:
        above, given = both[:count], both[count:]
        shapes = shapes_of(form, given)
        is_real = operation.has_complex or not jnp.iscomplexobj(kept)
        if ops.is_empty(shapes) or operation.backward is None or not is_real:
            return compute_again(kept, *both, form=form, needs=needs)
        flags = tuple(map(bool, form.whole(needs)))
        about = operation, form.form, shapes, kept.dtype.name, flags, False
        whole = form.whole(given)
        read = [whole[k] for k in operation.reads if whole[k] is not None]
        return replay(ops.record_gradients, about, [kept, *above, *read])

    def compute_again(kept: Any, *both: Any, form: _Form, needs: Sequence[bool]) -> list[Any]:
        whole = form.whole(both[count:])
        grads = form.only(ops.again(operation, FUNCTIONS, form.form, kept, both[:count], whole))
        return [each for each, need in zip(grads, needs, strict=True) if need]

    def axes_of(form: _Form, shapes: Sequence[Shape]) -> list[MappedAxis]:
        return form.only(operation.axes(form.whole(shapes)))

    run = primitive(name, compute)
    slope = primitive(f"{name}_slope", compute_slope)
    gradients = primitive(f"{name}_gradients", compute_gradients)

    def shapes_of_run(*given: Any, form: _Form, keeps: bool) -> list[Any]:
        shapes = operation.shapes(form.form, shapes_of(form, given))
        return [alike(given[0], each) for each in (shapes if keeps else shapes[:count])]

    def jvp_of_run(given: Any, slopes: Any, *, form: _Form, keeps: bool) -> Any:
        results = run.bind(*given, form=form, keeps=True)
        own = filled(given, slopes)
        along = slope.bind(results[behind], *given, *own, form=form)
        more = results[count:] if keeps else []
        nothing = [ad.Zero(jax.typeof(each).to_tangent_aval()) for each in more]
        return [*results[:count], *more], [*along, *nothing]

    def map_run(args: Any, dims: Any, *, form: _Form, keeps: bool) -> Any:
        maps = size_of(args, dims)
        axes = axes_of(form, [*map(shape_of_one, args, dims)])
        results = run.bind(*_folded(maps, args, dims, axes), form=form, keeps=keeps)
        pairs = zip(results, operation.out_axes, strict=False)
        apart = [ops.parted(FUNCTIONS, maps, each, place) for each, place in pairs]
        return apart, [0] * len(apart)

    def shapes_of_slope(kept: Any, *both: Any, form: _Form) -> list[Any]:
        return shapes_of_run(*both[: len(both) // 2], form=form, keeps=False)

    def transpose_slope(above: Any, kept: Any, *both: Any, form: _Form) -> Any:
        given, slopes = both[: len(both) // 2], both[len(both) // 2 :]
        needs = tuple(map(ad.is_undefined_primal, slopes))
        own = [ad.instantiate_zeros(each) for each in above]
        grads = iter(gradients.bind(kept, *own, *given, form=form, needs=needs))
        return [None] * (1 + len(given)) + [next(grads) if need else None for need in needs]

    def shapes_of_gradients(kept: Any, *both: Any, form: _Form, needs: Sequence[bool]) -> list[Any]:
        pairs = zip(both[count:], needs, strict=True)
        return [alike(each, each.shape) for each, need in pairs if need]

    def map_gradients(args: Any, dims: Any, *, form: _Form, needs: Sequence[bool]) -> Any:
        maps, shapes = size_of(args, dims), [*map(shape_of_one, args, dims)]
        places = operation.out_axes[behind], *operation.out_axes[:count]
        axes = [MappedAxis(k, shape[k]) for k, shape in zip(places, shapes, strict=False)]
        rest = axes_of(form, shapes[1 + count :])
        axes += [each._replace(is_shared=False) for each in rest]
        grads = iter(gradients.bind(*_folded(maps, args, dims, axes), form=form, needs=needs))
        apart = []
        own = zip(shapes[1 + count :], axes[1 + count :], needs, strict=True)
        for shape, axis, need in own:
            if need:
                each = ops.parted(FUNCTIONS, maps, next(grads), axis.place)
                # If the samples of a map share an argument, each sample has its own gradient.
                adds = shape[axis.place] != axis.size
                apart.append(each.sum(1 + axis.place, keepdims=True) if adds else each)
        return apart, [0] * len(apart)

    run.def_abstract_eval(shapes_of_run)
    ad.primitive_jvps[run] = jvp_of_run
    set_map(run, map_run)
    slope.def_abstract_eval(shapes_of_slope)
    ad.primitive_jvps[slope] = differentiated(compute_slope)
    ad.primitive_transposes[slope] = transpose_slope
    set_map(slope, mapped(compute_slope))
    gradients.def_abstract_eval(shapes_of_gradients)
    ad.primitive_jvps[gradients] = differentiated(compute_again)
    set_map(gradients, map_gradients)

    def call(form: Any, *given: Any) -> list[Any]:
        if operation.check_values is not None and not any(
            isinstance(each, jax.core.Tracer) for each in given
        ):
            operation.check_values(form, given)
        own = _Form(form, tuple(each is not None for each in given))
        results: list[Any] = run.bind(*together(own.only(given)), form=own, keeps=False)
        return results

    return call


def _folded(
    maps: int, args: Sequence[Any], dims: Sequence[Any], axes: Sequence[MappedAxis]
) -> list[Any]:
    """Return the arguments of all maps concatenated along an axis."""
    return [
        ops.folded(FUNCTIONS, maps, each, dim, axis)
        for each, dim, axis in zip(args, dims, axes, strict=True)
    ]
