"""Processes that benchmarks start."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping


def run(
    command: list[str], environment: Mapping[str, str] | None = None, seconds: float | None = None
) -> str:
    """Run a program with these variables beside ours, for so many seconds at most; its output.

    Raises
    ------
    RuntimeError
        If it fails, with all that it wrote.
    """
    done = subprocess.run(
        command,
        env=os.environ | dict(environment or {}),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=seconds,
    )
    if done.returncode:
        said = done.stdout + done.stderr
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    return done.stdout
