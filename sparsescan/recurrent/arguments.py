"""Check what recurrent networks are called with, in arrays of any package, before anything runs."""

from __future__ import annotations

from typing import Any, Literal

from numpy.typing import NDArray

from ..checks import check_choice, check_count_or_none, check_flag, check_has_shape
from ..errors import InputError, InputTypeError, short
from .host_sizes import FIRST, LAYERS, STATES, Layers

Shape = tuple[int, ...]
Returned = bool | Literal["layers"]


def check_options(
    network: Layers, memory_limit: Any, truncate: Any, return_states: Any
) -> tuple[int | None, int | None, Returned]:
    """Return the options of a training step: a limit, steps of a segment, and what it returns."""
    memory_limit = check_count_or_none("memory_limit", memory_limit, 0)
    truncate = check_count_or_none("truncate", truncate, 1)
    if truncate is not None and len(network.cells[0]) > 1:
        raise InputError(
            f"truncate is {truncate}, and the network has two directions; expected None, or one "
            "direction: segments of both would not be the same"
        )
    return memory_limit, truncate, check_return_states(return_states)


def check_return_states(value: Any) -> Returned:
    """Return a flag, or "layers"."""
    if isinstance(value, str):
        check_choice("return_states", value, "layers")
        return "layers"
    return check_flag("return_states", value)


def returned(return_states: Returned) -> int:
    """Return which states are outputs: those of all layers, of the last one, or its first."""
    if return_states == "layers":
        return LAYERS
    return STATES if return_states else FIRST


def check_input(name: str, x: Any, size: int, *axes: str) -> None:
    """Raise unless an input has axes as one of the texts names them, and then `size` numbers."""
    has_axes = any(names.count(",") + 2 == len(x.shape) for names in axes)
    if not has_axes or x.shape[-1] != size:
        expected = " or ".join(f"({names}, {size})" for names in axes)
        raise InputError(f"{name} has shape {tuple(x.shape)}; expected {expected}")


def check_state(state: Any, shape: Shape, x: Any, name: str = "state") -> None:
    """Raise unless states have the shape that the network and an input say."""
    check_has_shape(name, state, shape, f", as x has shape {x.shape}")


def check_lengths(lengths: Any, shape: Shape) -> None:
    """Raise unless there are integers, one for each sample."""
    if lengths.dtype.kind not in "iu":
        raise InputTypeError(f"lengths has dtype {lengths.dtype}; expected integers")
    check_has_shape("lengths", lengths, shape, ", one for a sample")


def check_length_range(lengths: NDArray[Any], steps: int) -> None:
    """Raise unless lengths are from 0 to the number of steps."""
    if lengths.size and not (lengths.min() >= 0 and lengths.max() <= steps):
        raise InputError(
            f"lengths is {short(lengths.tolist())}; expected integers from 0 to {steps}"
        )


def check_has_resets(resets: Any) -> None:
    """Raise if there are states that resets set, and no resets."""
    if resets is None:
        raise InputError("reset_states is given, and resets is None; expected both, or neither")


def check_resets(resets: Any, x: Any, names: tuple[str, str] = ("resets", "x")) -> Any:
    """Return resets without a last axis of 1: bools for each step, or each step and sample.

    `names` are those of the resets and of the input, for errors.
    """
    name, of = names
    if resets.dtype != bool and str(resets.dtype) != "torch.bool":
        raise InputTypeError(
            f"{name} has dtype {resets.dtype}; expected bool: {name} != 0 makes bools of numbers"
        )
    shape = tuple(x.shape[:-1])
    if resets.shape == (*shape, 1):
        return resets.reshape(shape)
    check_has_shape(name, resets, shape, f", as {of} but for its last axis")
    return resets
