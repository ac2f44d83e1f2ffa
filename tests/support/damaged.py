"""Files of arrays, and what is none, for those who have to refuse them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest


def arrays_of(contents: bytes) -> dict[str, np.ndarray]:
    """Return the arrays in an ``.npz`` file."""
    with np.load(io.BytesIO(contents)) as arrays:
        return dict(arrays)


def file_of(arrays: Mapping[str, Any]) -> bytes:
    """Return an ``.npz`` file of these arrays but those that are None."""
    file = io.BytesIO()
    np.savez(file, **{key: array for key, array in arrays.items() if array is not None})
    return file.getvalue()


def other_files() -> dict[str, tuple[bytes, str]]:
    """Return files that nobody has saved here, by name, and what is said of each."""
    array, archive = io.BytesIO(), io.BytesIO()
    np.save(array, np.ones(3))
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("version", b"1")
    return {
        "empty": (b"", "not a zip file"),
        "text": (b"a line\n" * 100, "not a zip file"),
        "one.npy": (array.getvalue(), "not a zip file"),
        "other.zip": (archive.getvalue(), "the key 'version' is missing"),
    }


class _Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("the file was unpickled",)


def bomb() -> np.ndarray:
    """Return an array that fails the test when it is unpickled."""
    array = np.empty((), object)
    array[()] = _Bomb()
    return array
