"""Waiting without the GIL: a helper for the next call, a caller for the end of one.

A thread that sleeps takes some 30 microseconds to wake up, and so does one that finds the GIL held
by another; a step of a small network has calls that take a few hundred. So threads look out for
each other for a while before they sleep, and helpers take part in replays without the GIL. One
caller at a time opens its replay to them. It leaves when none of them looks at it any more.
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
    """Return whether a wait of so many turns is over; where no clock is, turns are counted."""
    return turns % _TURNS == 0 and (clock() > end or turns > nanoseconds)


@njit
def _join(words):
    """Take part in the replay that is open, and return its number; 0 if none is any more."""
    fetch_add(words, _INSIDE, 1)
    number = load(words, _OPEN)
    if number != 0:
        take_part(words[_CONTROL])
    fetch_add(words, _INSIDE, -1)
    return number


@njit
def _await_call(words, seen, nanoseconds):
    """Wait until a call is posted, at most so long after the last replay; return whether one is."""
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
    """Say that a call has ended, wait for the next one, and return whether it has come.

    Until it comes the helper takes part in replays. Then it waits for a pause: who has posted the
    call holds the GIL until it begins with the work itself, and a thread that waits for the GIL
    sleeps.
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
    """Wait for the end of a call, at most so long; return whether it has ended."""
    turns, end = 0, clock() + nanoseconds
    while load(ended, 0) == 0:
        turns += 1
        if _is_over(turns, nanoseconds, end):
            return False
        relax(turns)
    return True


@njit(nogil=True, cache=True)
def replay(words, header, arrays, control):
    """Make recorded calls while subnormal numbers count as 0; arguments are those of `fill`.

    Helpers that look at `words` take part unless another caller has them.
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
