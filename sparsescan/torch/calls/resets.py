"""States that begin anew in the middle of a sequence: what modules take, and how they read it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ...errors import InputError, InputTypeError, short


def check_resets(resets: Any, given: Any) -> Any:
    """Return resets, bools for each step and sample, without a last axis of 1."""
    if isinstance(given, PackedSequence):
        return check_packed(resets, given)
    if not isinstance(resets, Tensor):
        raise InputTypeError(f"resets is {short(resets)}; expected a tensor of bools")
    why = "as the first axes of input" if given.dim() == 3 else "one for each step"
    return _check(resets, given, why)


def check_packed(resets: Any, given: PackedSequence) -> PackedSequence:
    """Return resets that are packed like an input."""
    if not isinstance(resets, PackedSequence):
        raise InputTypeError(
            f"resets is {short(resets)}; expected a PackedSequence of bools, as input is packed"
        )
    flags = _check(resets.data, given.data, "as input.data", "resets.data")
    # A compiler that looks on knows no numbers.
    if not torch.compiler.is_compiling() and not (
        _are_equal(resets.batch_sizes, given.batch_sizes)
        and _are_equal(resets.sorted_indices, given.sorted_indices)
    ):
        raise InputError(
            "resets has other batch_sizes or sorted_indices than input; expected both packed by "
            "the same lengths"
        )
    return resets._replace(data=flags)


def _check(flags: Tensor, x: Tensor, why: str, name: str = "resets") -> Tensor:
    if flags.dtype != torch.bool:
        raise InputTypeError(
            f"{name} has dtype {flags.dtype}; expected torch.bool: resets != 0 makes bools of "
            "numbers"
        )
    if flags.shape == (*x.shape[:-1], 1):
        flags = flags.squeeze(-1)
    if flags.shape != x.shape[:-1]:
        raise InputError(
            f"{name} has shape {tuple(flags.shape)}; expected {tuple(x.shape[:-1])}, {why}"
        )
    if flags.device != x.device:
        raise InputError(f"{name} is on {flags.device}; expected {x.device}, where input is")
    return flags


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one is other or torch.equal(one, other)


def begins_before(
    resets: Tensor | None, lengths: Tensor | None, steps: int, back: int
) -> list[Tensor | None]:
    """Return which samples a direction resets before each step, in a column; None for none.

    A direction that runs backward in time begins anew when it leaves such a step. Steps that a
    sample does not have are not reset.
    """
    if resets is None:
        return [None] * steps
    flags = resets
    if lengths is not None:
        has = torch.arange(steps, device=lengths.device)[:, None] < lengths
        flags = flags & has.to(flags.device)
    columns: list[Tensor | None] = list(flags[..., None].unbind())
    return [*columns[1:], None] if back else columns
