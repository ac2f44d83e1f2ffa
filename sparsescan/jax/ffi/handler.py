"""What XLA calls: recordings run on its buffers, by compiled code, without Python.

XLA hands over a *call frame* (its typed foreign function interface, ``xla/ffi/api/c_api.h``):
addresses of arguments, results and attributes, and of functions of its own. The numbers below are
places of members in its structures, which a later version may only add to.
"""

from __future__ import annotations

import sys

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...kernels.addresses import data_address
from ...kernels.compile import njit
from ...kernels.cpu.flushing import flush, mode, set_mode
from ...kernels.cpu.memory import array_at, fetch_add
from ...kernels.cpu.replay import (
    Control,
    Header,
    call_at,
    fill,
    help_out,
    wait_for_all,
    words_at,
    work_off,
)
from ...kernels.numbered import numbered

ROOT = "sparsescan_programs"
_BYTES, _SHORT = np.zeros(0, np.uint8), np.zeros(0, np.int32)
_WORD = 8


# Words at the symbol `ROOT`.
# `TABLE` is the address of a table of programs: first the number of its places less 1, a power of
# two less 1, and a 0; then for each place a key, 0 if the place is free, and the address of a
# program. A key is at the first place from itself on that was free. `HELP` is the address of
# :func:`help_replay`.
Root = numbered("Root", "TABLE HELP SIZE")

# Words of a program.
# `HEADER` is the address of the header of a recording, and `WORDS` how many words a replay takes.
# Array number `k` of the recording is an argument, or a result if the number at `SOURCES`
# is negative, which counts from -1 down. `LENGTHS` is the argument that holds lengths of samples,
# int32, if it is not negative: so many from 0 to `STEPS`. `THREADS` are worth having. `LARGE` is
# the address of how many bytes each array has, if it is new and best in large pages, else 0.
Program = numbered(
    "Program", "HEADER WORDS SOURCES ARRAYS LENGTHS LENGTH_COUNT STEPS THREADS LARGE SIZE"
)

# Bytes to members of a call frame, and of XLA's interface.
FRAME = numbered(
    "Frame", "EXTENSION=8 API=16 CONTEXT=24 STAGE=32 ARGUMENTS=72 RESULTS=112 ATTRIBUTES=160"
)
API = numbered("Api", "VERSION=32 CREATE_ERROR=48 DESTROY_ERROR=64 SCHEDULE=136")
METADATA, EXECUTE, _INVALID, _MISSING, INTERNAL = 1, 3, 3, 9, 13

_malloc = types.ExternalFunction("malloc", types.int64(types.int64))
_free = types.ExternalFunction("free", types.void(types.int64))
_madvise = types.ExternalFunction("madvise", types.int32(types.int64, types.int64, types.int32))
_HAS_LARGE_PAGES, _LARGE_PAGES, _PAGE = sys.platform == "linux", 14, 1 << 12


@intrinsic
def _root(typingctx):
    """Return the address that the symbol `ROOT` stands for."""

    def codegen(context, builder, signature, args):
        word = ir.IntType(64)
        symbol = cgutils.add_global_variable(builder.module, word, ROOT)
        return builder.ptrtoint(symbol, word)

    return types.int64(), codegen


@intrinsic
def _on_stack(typingctx, count):
    """Return the address of so many words, which are free when the function returns."""

    def codegen(context, builder, signature, args):
        word = ir.IntType(64)
        return builder.ptrtoint(cgutils.alloca_once(builder, word, size=16), word)

    return types.int64(types.int64), codegen


@njit(inline="always")
def _word(address):
    return words_at(address, 1)[0]


@njit(inline="always")
def _short(address):
    return np.int64(array_at(address, 1, _SHORT)[0])


@njit
def _find(key):
    """Return the address of the program with a key; 0 if there is none."""
    table = words_at(_root(), Root.SIZE)[Root.TABLE]
    mask = _word(table)
    place = key & mask
    while True:
        pair = words_at(table + 2 * _WORD * (1 + place), 2)
        if pair[0] == key or pair[0] == 0:
            return pair[1]
        place = (place + 1) & mask


@njit
def _describe(metadata, api):
    """Say which version of the interface this is made for: the one that there is."""
    own, version = array_at(metadata + 24, 2, _SHORT), array_at(api + API.VERSION, 2, _SHORT)
    own[0], own[1] = version[0], version[1]


@njit
def _error(api, code, text):
    """Return an error of XLA with a message that ends with 0."""
    call = words_at(_on_stack(4), 4)
    call[0], call[1], call[2], call[3] = 28, 0, text, code
    return call_at(_word(api + API.CREATE_ERROR), data_address(call))


@njit
def _write_text(out, at, text):
    for character in text:
        out[at] = character
        at += 1
    return at


@njit
def _write_number(out, at, number):
    if number < 0:
        out[at] = 45
        at, number = at + 1, -number
    size = 1
    while number // 10**size > 0:
        size += 1
    for k in range(size):
        out[at + size - 1 - k] = 48 + number // 10**k % 10
    return at + size


_A, _B, _C = b"lengths[", b"] is ", b"; expected an integer from 0 to "


@njit
def _wrong_length(api, place, length, steps):
    out = array_at(_on_stack(16), 128, _BYTES)
    at = _write_number(out, _write_text(out, 0, _A), place)
    at = _write_number(out, _write_text(out, at, _B), length)
    at = _write_number(out, _write_text(out, at, _C), steps)
    out[at] = 0
    return _error(api, _INVALID, data_address(out))


UNKNOWN = b"this program of sparsescan.jax was compiled by another process; compile it in this one"
_FAILED = b"a kernel of sparsescan has failed"


@njit
def _failure(api, text):
    out = array_at(_on_stack(16), 128, _BYTES)
    out[_write_text(out, 0, text)] = 0
    return _error(api, _MISSING, data_address(out))


@njit(nogil=True, cache=True)
def help_replay(address):
    """Take part in the replay whose words are at an address, as a thread of XLA's."""
    help_out(address + _WORD)
    _leave(address)
    return np.int64(0)


@njit
def _leave(address):
    """Free the words of a replay if nobody else looks at them."""
    if fetch_add(words_at(address, 1), 0, -1) == 1:
        _free(address)


@njit
def _call_help(frame, api, address, threads):
    """Ask threads of XLA's for help; one that comes too late finds nothing left to do."""
    call = words_at(_on_stack(5), 5)
    call[0], call[1], call[2] = 40, 0, _word(frame + FRAME.CONTEXT)
    call[3], call[4] = words_at(_root(), Root.SIZE)[Root.HELP], address
    for _ in range(1, threads):
        fetch_add(words_at(address, 1), 0, 1)
        error = call_at(_word(api + API.SCHEDULE), data_address(call))
        if error != 0:  # there are no threads
            fetch_add(words_at(address, 1), 0, -1)
            destroyed = words_at(_on_stack(3), 3)
            destroyed[0], destroyed[1], destroyed[2] = 24, 0, error
            call_at(_word(api + API.DESTROY_ERROR), data_address(destroyed))
            return


@njit
def _data(buffers, k):
    """Return the address of the numbers of a buffer."""
    return _word(_word(buffers + k * _WORD) + 24)


@njit
def _take_large_pages(address, nbytes):
    """Ask for large pages: the system clears new ones of the usual size slower than kernels run."""
    if _HAS_LARGE_PAGES:
        begin = (address + _PAGE - 1) // _PAGE * _PAGE
        _madvise(begin, address + nbytes - begin, _LARGE_PAGES)


@njit(nogil=True, cache=True)
def handle(frame):
    """Run what a call frame asks for; return an error of XLA, or 0."""
    api, extension = _word(frame + FRAME.API), _word(frame + FRAME.EXTENSION)
    if extension != 0 and _short(extension + 8) == METADATA:
        _describe(_word(extension + 24), api)
        return np.int64(0)
    if _short(frame + FRAME.STAGE) != EXECUTE:
        return np.int64(0)
    key = _word(_word(_word(_word(frame + FRAME.ATTRIBUTES)) + 8))
    found = _find(key)
    if found == 0:
        return _failure(api, UNKNOWN)
    program = words_at(found, Program.SIZE)
    arguments, results = _word(frame + FRAME.ARGUMENTS), _word(frame + FRAME.RESULTS)
    if program[Program.LENGTHS] >= 0:
        count, steps = program[Program.LENGTH_COUNT], program[Program.STEPS]
        lengths = array_at(_data(arguments, program[Program.LENGTHS]), count, _SHORT)
        for k in range(count):
            if lengths[k] < 0 or lengths[k] > steps:
                return _wrong_length(api, k, np.int64(lengths[k]), steps)
    # Words that threads share: how many look at them, and those of the replay.
    count, arrays = program[Program.WORDS], program[Program.ARRAYS]
    address = _malloc((1 + count + arrays) * _WORD)
    words_at(address, 1)[0] = 1
    control = words_at(address + _WORD, count)
    places = words_at(address + (1 + count) * _WORD, arrays)
    sources = words_at(program[Program.SOURCES], arrays)
    large = words_at(program[Program.LARGE], arrays)
    for k in range(arrays):
        source = sources[k]
        places[k] = _data(arguments, source) if source >= 0 else _data(results, -1 - source)
        if large[k] > 0:
            _take_large_pages(places[k], large[k])
    header = words_at(program[Program.HEADER], Header.SIZE)
    fill(header, places, control)
    if program[Program.THREADS] > 1:
        _call_help(frame, api, address, program[Program.THREADS])
    before = mode()
    flush()
    work_off(header, control)
    set_mode(before)
    wait_for_all(header, control)
    has_failed = control[Control.FAILED]
    _leave(address)
    return _failure(api, _FAILED) if has_failed else np.int64(0)
