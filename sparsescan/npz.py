"""``.npz`` files of which parts are read, by several processes, and that are written in pieces."""

from __future__ import annotations

import io
import itertools
import math
import operator
import struct
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .errors import InputError

__all__ = ["Member", "check_sums", "header", "joined", "read_sums", "write_members"]

# Bytes that are read at once.
_BLOCK = 1 << 20
# Of a zip file: the fixed part of what stands before the bytes of a member, and its sums' modulus.
_LOCAL_HEADER = 30
_POLYNOMIAL = 0xEDB88320

# A file, and where in it the bytes of a member start.
_Place = tuple[Any, int]


class Member:
    """An array in an ``.npz`` file: a slice of it reads those rows from the file, and no more.

    Of a compressed member all rows before them are read, too, but not kept.

    Parameters
    ----------
    archive : ZipFile
        The file, which stays open.
    name : str
        The key of the array.

    Attributes
    ----------
    dtype : dtype
        Of the rows as they come, in native byte order.
    shape : tuple of int
        Of the whole array.
    """

    def __init__(self, archive: zipfile.ZipFile, name: str) -> None:
        info = archive.getinfo(f"{name}.npy")
        self._file, start = _place(archive, info)
        self._file.seek(start)
        version = np.lib.format.read_magic(self._file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read is None:
            raise InputError(f"{name} has version {version} of the .npy format; expected 1 or 2")
        self.shape, self._fortran, self._stored = read(self._file)
        self._start = self._file.tell()
        self.dtype = self._stored.newbyteorder("=")
        found = info.file_size - (self._start - start)
        expected = math.prod(self.shape) * self._stored.itemsize
        if found != expected:
            raise InputError(f"{name} has {found} bytes; expected {expected} of shape {self.shape}")

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        start, stop, _ = rows.indices(len(self))
        count = max(stop - start, 0)
        shape = count, *self.shape[1:]
        made = (
            np.empty(shape, self._stored, "F") if self._fortran else np.empty(shape, self._stored)
        )
        if made.size == 0:
            return made.astype(self.dtype)
        # In Fortran's order the rows' entries lie apart, those of a column together.
        runs = made.T.reshape(-1, count) if self._fortran else made.reshape(1, -1)
        first = start if self._fortran else start * made[0].size
        for k, run in enumerate(runs):
            self._read(first + k * len(self), run)
        return made.astype(self.dtype, copy=False)

    def _read(self, first: int, run: NDArray[Any]) -> None:
        """Fill an array with the entries from the `first`-th on, as they lie in the file."""
        _move(self._file, self._start + first * run.itemsize)
        left = run.view(np.uint8)
        while left.size:
            # A compressed member makes a copy of what is read at once.
            got = self._file.readinto(left[:_BLOCK])
            if not got:
                raise EOFError("it ends too early")
            left = left[got:]


def _place(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Place:
    """Where the bytes of a member are read, as they were before compression."""
    if info.compress_type != zipfile.ZIP_STORED:
        return archive.open(info), 0
    # Before Python 3.13 zipfile reads all that it passes over.
    file = archive.fp
    assert file is not None
    file.seek(info.header_offset)
    name, extra = struct.unpack("<HH", file.read(_LOCAL_HEADER)[26:])
    return file, info.header_offset + _LOCAL_HEADER + name + extra


def _move(file: Any, place: int) -> None:
    """Go to a place of a file; in a compressed member, by reading up to it."""
    if not isinstance(file, zipfile.ZipExtFile):
        file.seek(place)
        return
    if place < file.tell():
        file.seek(0)
    # Its own way forward takes 16 MB.
    while file.tell() < place:
        if not file.read(min(place - file.tell(), _BLOCK)):
            raise EOFError("it ends too early")


def read_sums(archive: zipfile.ZipFile, share: int, shares: int) -> list[tuple[int, int]]:
    """CRC-32 and number of the bytes of each member in one of equal shares of it."""
    sums = []
    for info in archive.infolist():
        file, start = _place(archive, info)
        begin, end = (info.file_size * k // shares for k in (share, share + 1))
        _move(file, start + begin)
        found, left = 0, end - begin
        while left:
            block = file.read(min(left, _BLOCK))
            if not block:
                raise EOFError(f"{info.filename} ends too early")
            found = zlib.crc32(block, found)
            left -= len(block)
        sums.append((found, end - begin))
    return sums


def check_sums(archive: zipfile.ZipFile, shares: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Raise unless what :func:`read_sums` has found in all shares are the sums in the file."""
    for info, sums in zip(archive.infolist(), zip(*shares, strict=True), strict=True):
        whole = 0
        for crc, length in sums:
            whole = joined(whole, crc, length)
        if whole != info.CRC:
            raise InputError(f"{info.filename} is damaged: its checksum is wrong")


def joined(first: int, second: int, length: int) -> int:
    """CRC-32 of bytes that `length` others follow, from the CRC-32 of both.

    It is the remainder of a polynomial over GF(2), which moves up by a byte with each that follows.
    """
    power, square = 1 << 31, 1 << 23  # 1, and x to the 8th
    while length:
        if length & 1:
            power = _times(power, square)
        square = _times(square, square)
        length >>= 1
    return _times(power, first) ^ second


def _times(a: int, b: int) -> int:
    """Product of two remainders; the highest bit is that of 1."""
    made = 0
    for bit in reversed(range(32)):
        if a >> bit & 1:
            made ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return made


def header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """What stands before the entries of an array, in C order, in a ``.npy`` file."""
    file = io.BytesIO()
    described = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_1_0(file, described)
    return file.getvalue()


def write_members(file: BinaryIO, pieces: Iterable[tuple[str, Any]]) -> None:
    """Write an ``.npz`` file as :func:`numpy.savez` does, from bytes with the keys they belong to.

    Those of a key follow each other, its :func:`header` first.
    """
    with zipfile.ZipFile(file, "w") as archive:
        for name, group in itertools.groupby(pieces, operator.itemgetter(0)):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                for _, piece in group:
                    member.write(piece)
