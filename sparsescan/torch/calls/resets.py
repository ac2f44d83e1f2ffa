"""Resets of states inside a sequence: the arguments of modules, and their checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ...errors import InputError, InputTypeError, short
from ...recurrent import arguments


def check_resets(resets: Any, given: Any) -> Any:
    """Return resets, bools for each step and sample, without a last axis of 1."""
    if isinstance(given, PackedSequence):
        return check_packed(resets, given)
    if not isinstance(resets, Tensor):
        raise InputTypeError(f"resets is {short(resets)}; expected a tensor of bools")
    return _check(resets, given, ("resets", "input"))


def check_packed(resets: Any, given: PackedSequence) -> PackedSequence:
    """Return resets that are packed like an input."""
    if not isinstance(resets, PackedSequence):
        raise InputTypeError(
            f"resets is {short(resets)}; expected a PackedSequence of bools, as input is packed"
        )
    flags = _check(resets.data, given.data, ("resets.data", "input.data"))
    # A tracing compiler has no values.
    if not torch.compiler.is_compiling() and not (
        _are_equal(resets.batch_sizes, given.batch_sizes)
        and _are_equal(resets.sorted_indices, given.sorted_indices)
    ):
        raise InputError(
            "resets has other batch_sizes or sorted_indices than input; expected both packed by "
            "the same lengths"
        )
    return resets._replace(data=flags)


def _check(flags: Tensor, x: Tensor, names: tuple[str, str]) -> Tensor:
    checked: Tensor = arguments.check_resets(flags, x, names)
    if flags.device != x.device:
        raise InputError(f"{names[0]} is on {flags.device}; expected {x.device}, where input is")
    return checked


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one is other or torch.equal(one, other)


def begins_before(
    resets: Tensor | None, lengths: Tensor | None, steps: int, back: int
) -> list[Tensor | None]:
    """Return which samples a direction resets before each step, as columns; None without resets.

    A direction that runs backward in time is reset after such a step. Resets beyond the length of a
    sample have no effect.
    """
    if resets is None:
        return [None] * steps
    flags = resets
    if lengths is not None:
        has = torch.arange(steps, device=lengths.device)[:, None] < lengths
        flags = flags & has.to(flags.device)
    columns: list[Tensor | None] = list(flags[..., None].unbind())
    return [*columns[1:], None] if back else columns
