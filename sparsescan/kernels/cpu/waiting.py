"""Waiting without the GIL: helpers wait for the next call, callers for the end of a call.

A sleeping thread takes some 30 microseconds to wake up, and so does a thread that waits for the
GIL. A step of a small network has calls that take a few hundred. So threads spin for a while before
they sleep, and helpers take part in replays without the GIL. One caller at a time opens its replay
to the helpers. It leaves when no helper looks at the replay any more.
"""

from __future__ import annotations

from ..addresses import data_address
from ..compile import njit
from .flushing import flush, mode, set_mode
from .memory import clock, fetch_add, load, relax
from .replay import fill, take_part, wait_for_all, work_off

# Words that threads share, a cache line apart: a number that is another one after each call that is
# posted; how many helpers wait for one without sleeping; how many callers want to open a replay;
# the number of the open one, 0 if none is; the address of its control words; how many helpers look
# at it; and how many replays were open.
POSTED, WAITING, _CALLERS, _OPEN, _CONTROL, _INSIDE, _COUNT, WORDS = range(0, 128, 16)
# Turns of waiting after which the clock is read.
_TURNS = 64


@njit
def _is_over(turns, nanoseconds, end):
    """Return whether a wait is over after some turns; without a clock, turns are counted."""
    return turns % _TURNS == 0 and (clock() > end or turns > nanoseconds)


@njit
def _join(words):
    """Take part in the open replay, and return its number; 0 if none is open any more."""
    fetch_add(words, _INSIDE, 1)
    number = load(words, _OPEN)
    if number != 0:
        take_part(words[_CONTROL])
    fetch_add(words, _INSIDE, -1)
    return number


@njit
def _await_call(words, seen, nanoseconds):
    """Wait for a posted call, for a limited time after the last replay; return whether it came."""
    turns, end, joined = 0, clock() + nanoseconds, 0
    while load(words, POSTED) == seen:
        number = load(words, _OPEN)
        if number not in (0, joined):
            joined = _join(words)
            turns, end = 0, clock() + nanoseconds
        turns += 1
        if _is_over(turns, nanoseconds, end):
            return False
        relax(turns)
    return True


@njit(nogil=True, cache=True)
def await_call(words, seen, ended, nanoseconds, pause):
    """Signal that a call has ended, wait for the next call, and return whether it came.

    Meanwhile the helper takes part in replays. After a call is posted it pauses: the caller holds
    the GIL until it begins its own work, and a thread that waits for the GIL would sleep.
    """
    fetch_add(ended, 0, 1)
    fetch_add(words, WAITING, 1)
    has_come = _await_call(words, seen, nanoseconds)
    fetch_add(words, WAITING, -1)
    if has_come:
        end = clock() + pause
        while clock() < end:
            pass
    return has_come


@njit(nogil=True, cache=True)
def await_end(ended, nanoseconds):
    """Wait for the end of a call, for a limited time; return whether it has ended."""
    turns, end = 0, clock() + nanoseconds
    while load(ended, 0) == 0:
        turns += 1
        if _is_over(turns, nanoseconds, end):
            return False
        relax(turns)
    return True


@njit(nogil=True, cache=True)
def replay(words, header, arrays, control):
    """Replay recorded calls, with subnormal numbers as 0; arguments are those of `fill`.

    Helpers that watch `words` take part, unless another caller has opened a replay.
    """
    before = mode()
    flush()
    fill(header, arrays, control)
    is_first = fetch_add(words, _CALLERS, 1) == 0
    if is_first:
        words[_COUNT] += 1
        words[_CONTROL] = data_address(control)
        fetch_add(words, _OPEN, words[_COUNT])
    work_off(header, control)
    wait_for_all(header, control)
    if is_first:
        fetch_add(words, _OPEN, -words[_COUNT])
        turns = 0
        while load(words, _INSIDE) > 0:
            turns += 1
            relax(turns)
    fetch_add(words, _CALLERS, -1)
    set_mode(before)
