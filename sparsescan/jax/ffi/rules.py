"""Primitives of JAX for functions of kernels: how they are made, mapped and differentiated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .calls import vary, varying


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


def set_map(made: Any, rule: Callable[..., Any]) -> None:
    """Let maps of a primitive follow a rule, but maps along an axis of length 0.

    Nothing is computed for these, and results are empty: no array tells how many samples a map has.
    """

    def checked(args: Any, dims: Any, **about: Any) -> Any:
        if size_of(args, dims) != 0:
            return rule(args, dims, **about)
        pairs = zip(args, dims, strict=True)
        one = [alike(jax.typeof(each), shape_of_one(each, dim)) for each, dim in pairs]
        results = jax.eval_shape(functools.partial(made.bind, **about), *one)
        empty = [jnp.zeros((0, *each.shape), each.dtype) for each in results]
        return vary(empty, varying(args)), [0] * len(empty)

    batching.primitive_batchers[made] = checked


def shape_of_one(array: Any, dim: int | None) -> tuple[int, ...]:
    """Return the shape of an argument of one map."""
    shape: tuple[int, ...] = array.shape
    return shape if dim is None else shape[:dim] + shape[dim + 1 :]


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
