"""Expressions of one number for a thread of a CUDA device."""

from __future__ import annotations

from typing import ClassVar

from .base import Renderer


class CudaRenderer(Renderer):
    """Write expressions on single numbers, of the dtype that ``real`` makes."""

    target = "cuda"
    words: ClassVar[tuple[str, ...]] = ("real", "zero", "one", "inf", "nan")

    def number(self, value: float) -> str:
        """Return the text of a number, of the dtype of all others."""
        text = super().number(value)
        return {"0.0": "zero", "1.0": "one"}.get(text, f"real({text})")
