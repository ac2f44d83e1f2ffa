"""Arguments of the front door: how all its functions check and pass them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import DeviceError, InputTypeError, short

__all__ = ["as_float", "check_platform"]


def check_platform() -> None:
    """Raise unless JAX computes on the CPU."""
    platform = jax.default_backend()
    if platform != "cpu":
        raise DeviceError(
            f"JAX computes on {platform!r}; expected 'cpu': jax.default_device(jax.devices('cpu')"
            "[0]) and JAX_PLATFORMS=cpu choose it"
        )


def as_float(name: str, given: Any) -> Any:
    """Return an array of JAX, or of a trace, of float32 or float64."""
    try:
        array = jnp.asarray(given)
    except Exception as error:  # of a caller's own class
        raise InputTypeError(f"{name} is {short(given)}, no array: {error}") from None
    if array.dtype not in (np.float32, np.float64):
        raise InputTypeError(f"{name} has dtype {array.dtype}; expected float32 or float64")
    return array
