"""Arrays of ``.npz`` files that are read when they are used, and checks of their checksums."""

from __future__ import annotations

import math
import mmap
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Iterable
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..formatting import exact_bytes

# Bytes that are read at once.
_BLOCK = 1 << 20
# Bytes of the fixed part of the header before each member of a zip file.
_LOCAL_HEADER = 30


def map_arrays(file: BinaryIO) -> dict[str, NDArray[Any]]:
    """Map the arrays of an open ``.npz`` file into memory, read-only and as they are stored.

    Compressed members are extracted to temporary files, and these are mapped.
    """
    arrays = {}
    with zipfile.ZipFile(file) as archive:
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name == info.filename:
                continue
            if info.compress_type == zipfile.ZIP_STORED:
                # The header ends with a name and extra fields of these lengths.
                start = info.header_offset + _LOCAL_HEADER
                start += sum(struct.unpack("<HH", whole[start - 4 : start]))
                arrays[name] = _map(name, whole, start, info.file_size)
            else:
                with archive.open(info) as member, tempfile.TemporaryFile() as extracted:
                    shutil.copyfileobj(member, extracted)
                    extracted.flush()
                    own = mmap.mmap(extracted.fileno(), 0, access=mmap.ACCESS_READ)
                arrays[name] = _map(name, own, 0, info.file_size)
    return arrays


def _map(name: str, buffer: mmap.mmap, start: int, size: int) -> NDArray[Any]:
    """Return the array whose ``.npy`` file is `size` bytes of a buffer from `start` on."""
    buffer.seek(start)
    version = np.lib.format.read_magic(buffer)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(buffer)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(buffer)
    else:
        raise InputError(f"{name} has version {version} of the .npy format; expected 1 or 2")
    if dtype.hasobject:
        raise InputError(f"{name} has dtype {dtype}; expected numbers or strings")
    first = buffer.tell()
    stored, expected = size - (first - start), math.prod(shape) * dtype.itemsize
    if stored != expected:
        raise InputError(
            f"{name} has {exact_bytes(stored)}; expected {exact_bytes(expected)} of shape {shape}"
        )
    return np.ndarray(shape, dtype, buffer, first, order="F" if fortran else "C")


def check_members(archive: zipfile.ZipFile, members: Iterable[zipfile.ZipInfo]) -> None:
    """Read members of a zip file; raise if the checksum of one is wrong."""
    for info in members:
        try:
            with archive.open(info) as member:
                while member.read(_BLOCK):
                    pass
        except zipfile.BadZipFile:
            raise InputError(f"{info.filename} is damaged: its checksum is wrong") from None
