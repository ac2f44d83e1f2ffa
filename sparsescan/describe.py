"""What a plan prints about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import ScanPlan

__all__ = ["describe"]


def describe(plan: ScanPlan) -> str:
    return repr(plan)
