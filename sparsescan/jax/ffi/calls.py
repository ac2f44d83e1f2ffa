"""Arguments of the front door: how all its functions check and pass them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from ...arrays.arrays import check_no_mask
from ...errors import DeviceError, InputTypeError, short

FLOATS = "float32", "float64"
NUMBERS = *FLOATS, "complex64", "complex128"


def check_platform() -> None:
    """Raise unless JAX computes on the CPU."""
    platform = jax.default_backend()
    if platform != "cpu":
        raise DeviceError(
            f"JAX computes on {platform!r}; expected 'cpu': jax.default_device(jax.devices('cpu')"
            "[0]) and JAX_PLATFORMS=cpu choose it"
        )


# Arguments that may be None.
_OPTIONAL = {
    *("D", "delta_bias", "initial", "initial_state", "offsets", "reset_states", "state", "z", "zi")
}


def as_arrays(
    dtypes: tuple[str, ...], optional: Collection[str] = _OPTIONAL, /, **given: Any
) -> list[Any]:
    """Return arrays of JAX, or of a trace, of one dtype, that of all; None may stay for some."""
    arrays = {
        name: None if each is None and name in optional else _as_array(name, each, dtypes)
        for name, each in given.items()
    }
    dtype = jnp.result_type(*(each for each in arrays.values() if each is not None))
    return [None if each is None else each.astype(dtype) for each in arrays.values()]


def _as_array(name: str, given: Any, dtypes: tuple[str, ...]) -> Any:
    check_no_mask(name, given)
    try:
        array = jnp.asarray(given)
    except FloatingPointError:  # JAX's own, where jax_debug_nans or jax_debug_infs looks for it
        raise
    except Exception as error:  # of a caller's own class
        raise InputTypeError(f"{name} is {short(given)}, no array: {error}") from None
    if array.dtype not in dtypes:
        expected = " or ".join([", ".join(dtypes[:-1]), dtypes[-1]])
        raise InputTypeError(f"{name} has dtype {array.dtype}; expected {expected}")
    return array


def together(tree: Any) -> Any:
    """Return arrays that all vary over the axes of a mesh over which any does.

    Within ``jax.shard_map`` what does not vary over an axis is the same on all of its devices, and
    so must its gradient be: a sum over them, which is the derivative of this cast.
    """
    return vary(tree, varying(tree))


def varying(tree: Any) -> frozenset[Any]:
    """Return the axes of a mesh over which any of some arrays varies."""
    return frozenset[Any]().union(*map(_varying, jax.tree.leaves(tree)))


def vary(tree: Any, axes: frozenset[Any]) -> Any:
    """Return arrays that vary over these axes."""

    def cast(leaf: Any) -> Any:
        missing = axes - _varying(leaf)
        return jax.lax.pcast(leaf, tuple(missing), to="varying") if missing else leaf

    return jax.tree.map(cast, tree) if axes else tree


def _varying(leaf: Any) -> frozenset[Any]:
    kind = jax.typeof(leaf)
    if hasattr(kind, "manual_axis_type"):
        return frozenset(kind.manual_axis_type.varying)
    return frozenset(getattr(kind, "vma", ()))  # before JAX 0.10
