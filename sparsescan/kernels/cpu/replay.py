"""Replay recorded kernel calls with other arrays, in compiled code.

A recording is a sequence of *phases*. A phase has independent *strands*, and starts when all
earlier strands are done. A strand is a sequence of kernel calls. Threads claim strands from a
counter, so a thread that comes late, or never, delays nobody.

A call is a function that takes the address of its arguments' words. Some words are addresses in
arrays that differ between replays, so each replay has its own copy of all words.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..addresses import data_address
from ..compile import njit
from ..numbered import numbered
from .flushing import flush, mode, set_mode
from .memory import array_at, fetch_add, load, relax
from .tables import WORD

_WORDS = np.zeros(0, np.int64)

# Words of a recording.
# `STRANDS` is the address of the number of strands before each phase, and of all; `CALLS` that of
# the number of calls before each strand, and of all; `TABLE` that of pairs for each call: a
# function, and where its words begin. `WORDS` is the address of all words, and `PLACES` that of
# triples for each word that is an address in an array: which word, the number of the array, and
# bytes behind where that begins.
Header = numbered("Header", "PHASES STRANDS CALLS TABLE WORDS WORD_COUNT PLACES PLACE_COUNT SIZE")

# Words that the threads of a replay share, a cache line apart, before their copy of all words.
# `NEXT` counts strands that were claimed, `DONE` those that are done, and `FAILED` is not 0 if a
# call has failed. `HEADER` is the address of the recording's words, and `MOVES` where the triples
# of :func:`again` begin.
Control = numbered("Control", "NEXT DONE=8 FAILED=16 HEADER MOVES SIZE=24")


@intrinsic
def call_at(typingctx, function, argument):
    """Call a function at an address, of one word, and return the word that it returns."""

    def codegen(context, builder, signature, args):
        word = ir.IntType(64)
        called = builder.inttoptr(args[0], ir.FunctionType(word, [word]).as_pointer())
        return builder.call(called, [args[1]])

    return types.int64(types.int64, types.int64), codegen


@njit(inline="always")
def words_at(address, count):
    """Return words at an address."""
    return array_at(address, count, _WORDS)


@njit
def fill(header, arrays, control):
    """Begin a replay: copy all words behind the control words, with these addresses of arrays."""
    count = header[Header.WORD_COUNT]
    given = words_at(header[Header.WORDS], count)
    for i in range(Control.SIZE):
        control[i] = 0
    control[Control.HEADER] = data_address(header)
    for i in range(count):
        control[Control.SIZE + i] = given[i]
    places = words_at(header[Header.PLACES], 3 * header[Header.PLACE_COUNT])
    for i in range(0, len(places), 3):
        control[Control.SIZE + places[i]] = arrays[places[i + 1]] + places[i + 2]


@njit
def work_off(header, control):
    """Work as one of the threads of a replay until no strand is left."""
    phases = header[Header.PHASES]
    strands = words_at(header[Header.STRANDS], phases + 1)
    count = strands[phases]
    calls = words_at(header[Header.CALLS], count + 1)
    table = words_at(header[Header.TABLE], 2 * calls[count])
    words = data_address(control) + Control.SIZE * WORD
    phase = 0
    while True:
        strand = fetch_add(control, Control.NEXT, 1)
        if strand >= count:
            return
        while strand >= strands[phase + 1]:
            phase += 1
        _await(control, strands[phase])
        for i in range(calls[strand], calls[strand + 1]):
            if call_at(table[2 * i], words + table[2 * i + 1] * WORD) != 0:
                control[Control.FAILED] = 1
        fetch_add(control, Control.DONE, 1)


@njit
def _await(control, strands):
    """Wait until so many strands are done."""
    spins = 0
    while load(control, Control.DONE) < strands:
        relax(spins)
        spins += 1


@njit
def wait_for_all(header, control):
    """Wait until all strands are done."""
    phases = header[Header.PHASES]
    _await(control, words_at(header[Header.STRANDS], phases + 1)[phases])


@njit
def take_part(address):
    """Take part in the replay whose control words are at an address."""
    control = words_at(address, Control.SIZE)
    work_off(words_at(control[Control.HEADER], Header.SIZE), control)


@njit(nogil=True, cache=True)
def begin(header, arrays, control):
    """Do :func:`fill`, as an entry point for Python."""
    fill(header, arrays, control)


@njit(nogil=True, cache=True)
def again(control, x, y):
    """Make the calls of a replay that :func:`begin` has begun, on this thread; return a failure.

    Behind all words there is a triple for each that is an address in one of two arrays, which are
    at other addresses now: which word, whether the array is `y`, and bytes behind its beginning.
    """
    before = mode()
    flush()
    for i in range(control[Control.MOVES], len(control), 3):
        control[control[i]] = (y if control[i + 1] else x) + control[i + 2]
    control[Control.NEXT] = 0
    control[Control.DONE] = 0
    work_off(words_at(control[Control.HEADER], Header.SIZE), control)
    set_mode(before)
    return control[Control.FAILED]


@njit(nogil=True, cache=True)
def again_on(control, x, y):
    """Do what :func:`again` does with two arrays."""
    return again(control, data_address(x), data_address(y))


@njit(nogil=True, cache=True)
def help_out(address):
    """Do :func:`take_part` as a thread of another library, and keep that thread's mode."""
    before = mode()
    flush()
    take_part(address)
    set_mode(before)
    return np.int64(0)
