"""Read machine code for NVIDIA GPUs, an ELF file: which kernels are in it, and what they take."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

# A section without content; and what symbols of kernels have, and those that they call have not.
_NO_BITS, _ENTRY = 8, 0x10
# Attributes of functions in the section ``.nv.info``: formats of 4 bytes, or followed by so many.
_WITH_BYTES = 4
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F


class Resources(NamedTuple):
    """What a kernel takes: registers of a thread, bytes of its stack, shared memory of a block."""

    registers: int
    frame: int
    shared: int


class _Section(NamedTuple):
    name: str
    kind: int
    content: bytes
    size: int
    link: int


def resources_of(cubin: bytes) -> dict[str, Resources]:
    """Return what each kernel of a cubin takes; a ValueError if that is none."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("no ELF file of 64 bits")
    sections = _sections(cubin)
    (symbols,) = (section for section in sections if section.name == ".symtab")
    texts = sections[symbols.link].content
    named = [(_text(texts, at), other) for at, _, other, *_ in _symbols(symbols.content)]
    (info,) = (section.content for section in sections if section.name == ".nv.info")
    attributes = [each for each in _attributes(info) if each[0] in (_FRAME_SIZE, _REGISTERS)]

    def of(kind: int, name: str) -> int:
        found = (value for key, at, value in attributes if (key, named[at][0]) == (kind, name))
        return max(found, default=0)

    shared = {section.name: section.size for section in sections}
    return {
        name: Resources(
            of(_REGISTERS, name), of(_FRAME_SIZE, name), shared.get(f".nv.shared.{name}", 0)
        )
        for name, other in named
        if other & _ENTRY
    }


def _sections(elf: bytes) -> list[_Section]:
    (first,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", elf, 0x3A)
    heads = [struct.unpack_from("<IIQQQQIIQQ", elf, first + k * size) for k in range(count)]
    start = heads[of_names][4]
    return [
        _Section(
            _text(elf, start + name),
            kind,
            b"" if kind == _NO_BITS else elf[offset : offset + length],
            length,
            link,
        )
        for name, kind, _, _, offset, length, link, _, _, _ in heads
    ]


def _symbols(content: bytes) -> Iterator[tuple[int, ...]]:
    return struct.iter_unpack("<IBBHQQ", content)


def _text(content: bytes, start: int) -> str:
    return content[start : content.index(b"\0", start)].decode()


def _attributes(info: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield kind, number of a symbol, and value of attributes that have just these."""
    at = 0
    while at + 4 <= len(info):
        form, kind, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != _WITH_BYTES:
            continue
        if size == 8:
            yield kind, *struct.unpack_from("<II", info, at)
        at += size
