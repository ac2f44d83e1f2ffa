"""Constants of machines in files of the user's cache folder."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...errors import InputError

_Constants = TypeVar("_Constants")
# When a file was written, with how many bytes, and what it says.
_read: dict[Path, tuple[tuple[int, int], Any]] = {}


def machine_file() -> Path | None:
    """Return the file of this machine's constants in the user's cache folder; None without one.

    A user without a home, as that of a container may be, has no such folder.
    """
    if sys.platform == "win32":
        named, below = "LOCALAPPDATA", ("AppData", "Local")
    elif sys.platform == "darwin":
        named, below = "", ("Library", "Caches")
    else:
        named, below = "XDG_CACHE_HOME", (".cache",)
    # A relative folder would be another one in each directory. Without a home "~" stays as it is.
    folder = Path(os.environ.get(named, ""))
    if not folder.is_absolute():
        folder = Path(os.path.expanduser("~"), *below)
    return folder / "sparsescan" / "machine.json" if folder.is_absolute() else None


def file_to_write(path: Path | None) -> Path:
    """Return the path of a file for measured constants, whose folder is made.

    Raises
    ------
    InputError
        If the user has no cache folder.
    OSError
        If it cannot be made.
    """
    if path is None:
        variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
        named = "HOME" if sys.platform == "darwin" else variable
        raise InputError(
            "measured constants are kept in the user's cache folder, and this user has no home; "
            f"expected the environment variable {named} to name a folder by its absolute path"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@cache
def built_in(kind: type[_Constants], name: str) -> _Constants:
    """Return the constants of a file that comes with the package."""
    return kind(**json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8")))


def read_constants(path: Path | None, default: _Constants, positive: Sequence[str]) -> _Constants:
    """Return constants from a file, read again only if it has changed; `default` without any.

    They are like those: a name, numbers, and for each dtype a table of the same shape. None is
    negative, and those in `positive` are not zero.
    """
    if path is None:
        return default
    try:
        about = path.stat()
    except OSError:
        return default
    written = about.st_mtime_ns, about.st_size
    if path not in _read or _read[path][0] != written:
        _read[path] = written, _parse(path, default, positive)
    constants: _Constants | None = _read[path][1]
    return constants or default


def _parse(path: Path, default: _Constants, positive: Sequence[str]) -> _Constants | None:
    """Return constants from a file, None if it does not hold any."""
    try:
        constants = type(default)(**json.loads(path.read_text()))
        for key, expected in vars(default).items():
            value = getattr(constants, key)
            if isinstance(expected, str):
                continue
            if not isinstance(expected, dict):
                value, expected = {"": value}, {"": expected}
            for dtype, table in expected.items():
                numbers = np.array(value[dtype])
                usable = numbers.dtype.kind in "if" and numbers.shape == np.shape(table)
                if not usable or not (np.isfinite(numbers) & (numbers >= 0)).all():
                    return None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return constants if all(getattr(constants, key) > 0 for key in positive) else None


def write_constants(constants: Any, path: Path | None) -> Path:
    """Write constants to a file; the path."""
    path = file_to_write(path)
    path.write_text(json.dumps(asdict(constants), indent=1) + "\n")
    return path
