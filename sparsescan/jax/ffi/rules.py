"""Primitives of JAX for functions of kernels: how they are made, mapped and differentiated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Shape = tuple[int, ...]


# -- Pieces ----------------------------------------------------------------------------------------


def primitive(name: str, compute: Callable[..., Any]) -> Any:
    """Return a primitive that computes what a function does."""

    @functools.lru_cache(maxsize=256)
    def compiled(about: tuple[tuple[str, Any], ...]) -> Any:
        return jax.jit(functools.partial(compute, **dict(about)))

    made = Primitive(f"sparsescan_{name}")
    made.multiple_results = True
    made.def_impl(lambda *given, **about: compiled(tuple(about.items()))(*given))
    mlir.register_lowering(made, mlir.lower_fun(compute, multiple_results=True), platform="cpu")
    return made


def alike(x: Any, shape: tuple[int, ...], dtype: Any = None) -> Any:
    """Return an abstract array, which varies over the axes of a mesh over which another does."""
    return x.update(shape=shape, dtype=x.dtype if dtype is None else np.dtype(dtype))


def filled(values: Sequence[Any], slopes: Sequence[Any]) -> list[Any]:
    """Return directions, zeros where there are none."""
    return [
        jnp.zeros_like(value) if type(slope) is ad.Zero else slope
        for value, slope in zip(values, slopes, strict=True)
    ]


def size_of(args: Sequence[Any], dims: Sequence[Any]) -> Any:
    """Return how many maps there are."""
    return next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)


def merge(array: Any, axis: int) -> Any:
    """Return an array of which an axis has that of maps in it, which is in front."""
    array = jnp.moveaxis(array, 0, axis)
    samples = array.shape[axis] * array.shape[axis + 1]
    return array.reshape(*array.shape[:axis], samples, *array.shape[axis + 2 :])


def parted(array: Any, count: int, axis: int = 1) -> Any:
    """Return an array with an axis of maps in front, which was in one of its axes."""
    samples = array.shape[axis] // count
    apart = array.reshape(*array.shape[:axis], count, samples, *array.shape[axis + 1 :])
    return jnp.moveaxis(apart, axis, 0)


def differentiated(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule for forward mode, by that of what a primitive computes."""

    def rule(given: Any, slopes: Any, **about: Any) -> Any:
        places = [k for k, each in enumerate(given) if jnp.issubdtype(each.dtype, np.inexact)]

        def own(*numbers: Any) -> Any:
            whole = list(given)
            for k, each in zip(places, numbers, strict=True):
                whole[k] = each
            return compute(*whole, **about)

        numbers = [given[k] for k in places]
        return jax.jvp(own, numbers, filled(numbers, [slopes[k] for k in places]))

    return rule


def mapped(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule for maps, by those of what a primitive computes."""

    def rule(args: Any, dims: Any, **about: Any) -> Any:
        results = jax.vmap(functools.partial(compute, **about), dims)(*args)
        return results, [0] * len(results)

    return rule


# -- Operators -------------------------------------------------------------------------------------


class MappedAxis(NamedTuple):
    """The axis of an argument into which maps go.

    Attributes
    ----------
    place : int
        Which axis it is.
    size : int
        How long it is, where all maps have arguments of their own.
    is_shared : bool
        Whether it may have length 1 for all of these.
    """

    place: int
    size: int
    is_shared: bool = False


class Rules(NamedTuple):
    """What JAX is told about a function of kernels.

    All take `given`, its arguments, and `form`, which says what they are and is hashable.

    Attributes
    ----------
    forward : callable
        ``forward(form, given, keeps)`` returns the results, and then, if it `keeps` more, an array
        for gradients.
    gradients : callable
        ``gradients(form, needs, kept, above, given)`` returns the gradients that are needed, given
        those in results.
    slope : callable
        ``slope(form, kept, given, slopes)`` returns the derivative of results in a direction by
        functions that have derivatives.
    again : callable
        ``again(form, kept, above, given)`` returns all gradients in that way.
    shapes : callable
        ``shapes(form, given)`` returns the shapes of all that `forward` returns.
    axes : callable
        ``axes(shapes)`` returns an :class:`MappedAxis` for each argument, of such shapes.
    out_axes : tuple of int
        The axis of maps of all that `forward` returns.
    results : int
        How many results there are.
    kept : int
        Which of what `forward` returns gradients are told.
    """

    forward: Callable[..., list[Any]]
    gradients: Callable[..., list[Any]]
    slope: Callable[..., list[Any]]
    again: Callable[..., list[Any]]
    shapes: Callable[..., list[Shape]]
    axes: Callable[[Sequence[Shape]], list[MappedAxis]]
    out_axes: tuple[int, ...]
    results: int
    kept: int


def operator(name: str, rules: Rules) -> Callable[..., list[Any]]:
    """Return a function ``call(form, *given)`` with derivatives of any order, in both modes.

    Reverse mode of first order runs kernels, and so do maps.
    """
    count = rules.results

    def compute(*given: Any, form: Any, keeps: bool) -> list[Any]:
        return rules.forward(form, given, keeps)

    def compute_slope(kept: Any, *both: Any, form: Any) -> list[Any]:
        size = len(both) // 2
        return rules.slope(form, kept, both[:size], both[size:])

    def compute_gradients(kept: Any, *both: Any, form: Any, needs: Sequence[bool]) -> list[Any]:
        return rules.gradients(form, needs, kept, both[:count], both[count:])

    run = primitive(name, compute)
    slope = primitive(f"{name}_slope", compute_slope)
    gradients = primitive(f"{name}_gradients", compute_gradients)

    def shapes_of_run(*given: Any, form: Any, keeps: bool) -> list[Any]:
        shapes = rules.shapes(form, given)
        return [alike(given[0], each) for each in (shapes if keeps else shapes[:count])]

    def jvp_of_run(given: Any, slopes: Any, *, form: Any, keeps: bool) -> Any:
        results = run.bind(*given, form=form, keeps=True)
        own = filled(given, slopes)
        along = slope.bind(results[rules.kept], *given, *own, form=form)
        more = results[count:] if keeps else []
        nothing = [ad.Zero(jax.typeof(each).to_tangent_aval()) for each in more]
        return [*results[:count], *more], [*along, *nothing]

    def map_run(args: Any, dims: Any, *, form: Any, keeps: bool) -> Any:
        maps = size_of(args, dims)
        axes = rules.axes(_shapes_of_one(args, dims))
        results = run.bind(*_folded(maps, args, dims, axes), form=form, keeps=keeps)
        pairs = zip(results, rules.out_axes, strict=False)
        apart = [parted(each, maps, place) for each, place in pairs]
        return apart, [0] * len(apart)

    def shapes_of_slope(kept: Any, *both: Any, form: Any) -> list[Any]:
        return shapes_of_run(*both[: len(both) // 2], form=form, keeps=False)

    def transpose_slope(above: Any, kept: Any, *both: Any, form: Any) -> Any:
        given, slopes = both[: len(both) // 2], both[len(both) // 2 :]
        needs = tuple(map(ad.is_undefined_primal, slopes))
        own = [ad.instantiate_zeros(each) for each in above]
        grads = iter(gradients.bind(kept, *own, *given, form=form, needs=needs))
        return [None] * (1 + len(given)) + [next(grads) if need else None for need in needs]

    def shapes_of_gradients(kept: Any, *both: Any, form: Any, needs: Sequence[bool]) -> list[Any]:
        pairs = zip(both[count:], needs, strict=True)
        return [alike(each, each.shape) for each, need in pairs if need]

    def compute_again(kept: Any, *both: Any, form: Any, needs: Sequence[bool]) -> list[Any]:
        grads = rules.again(form, kept, both[:count], both[count:])
        return [each for each, need in zip(grads, needs, strict=True) if need]

    def map_gradients(args: Any, dims: Any, *, form: Any, needs: Sequence[bool]) -> Any:
        maps, shapes = size_of(args, dims), _shapes_of_one(args, dims)
        places = rules.out_axes[rules.kept], *rules.out_axes[:count]
        axes = [MappedAxis(k, shape[k]) for k, shape in zip(places, shapes, strict=False)]
        axes += [each._replace(is_shared=False) for each in rules.axes(shapes[1 + count :])]
        grads = iter(gradients.bind(*_folded(maps, args, dims, axes), form=form, needs=needs))
        apart = []
        own = zip(shapes[1 + count :], axes[1 + count :], needs, strict=True)
        for shape, axis, need in own:
            if need:
                each = parted(next(grads), maps, axis.place)
                # Where the samples of a map share an argument, there is a gradient of each.
                adds = shape[axis.place] != axis.size
                apart.append(each.sum(1 + axis.place, keepdims=True) if adds else each)
        return apart, [0] * len(apart)

    run.def_abstract_eval(shapes_of_run)
    ad.primitive_jvps[run] = jvp_of_run
    batching.primitive_batchers[run] = map_run
    slope.def_abstract_eval(shapes_of_slope)
    ad.primitive_jvps[slope] = differentiated(compute_slope)
    ad.primitive_transposes[slope] = transpose_slope
    batching.primitive_batchers[slope] = mapped(compute_slope)
    gradients.def_abstract_eval(shapes_of_gradients)
    ad.primitive_jvps[gradients] = differentiated(compute_again)
    batching.primitive_batchers[gradients] = map_gradients

    def call(form: Any, *given: Any) -> list[Any]:
        results: list[Any] = run.bind(*given, form=form, keeps=False)
        return results

    return call


def _shapes_of_one(args: Sequence[Any], dims: Sequence[Any]) -> list[Shape]:
    """Return the shapes of arguments of one map."""
    return [
        each.shape if dim is None else each.shape[:dim] + each.shape[dim + 1 :]
        for each, dim in zip(args, dims, strict=True)
    ]


def _folded(
    maps: int, args: Sequence[Any], dims: Sequence[Any], axes: Sequence[MappedAxis]
) -> list[Any]:
    """Return arguments that have those of all maps side by side on an axis."""
    folded = []
    for each, dim, axis in zip(args, dims, axes, strict=True):
        if dim is None and axis.is_shared:
            folded.append(each)
            continue
        front = each[None] if dim is None else jnp.moveaxis(each, dim, 0)
        whole = [maps, *front.shape[1:]]
        whole[1 + axis.place] = axis.size
        folded.append(merge(jnp.broadcast_to(front, whole), axis.place))
    return folded
