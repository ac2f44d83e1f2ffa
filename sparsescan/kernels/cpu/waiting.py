"""Waiting without the GIL: a helper for the next call, a caller for the end of one.

A thread that sleeps takes some 30 microseconds to wake up, and a step of a small network has calls
that take a few hundred. So threads look out for each other for a while before they sleep.
"""

from __future__ import annotations

from ..compile import njit
from .memory import clock, fetch_add, load, relax

__all__ = ["POSTED", "WAITING", "WORDS", "await_call", "await_end"]

# Words that threads share, a cache line apart: a number that is another one after each call that is
# posted, and how many helpers wait for one without sleeping.
POSTED, WAITING, WORDS = 0, 16, 32
# Turns of waiting after which the clock is read.
_TURNS = 64


@njit
def _await_change(words, index, seen, nanoseconds):
    """Wait until a word has changed, at most so long; return whether it has."""
    turns, end = 0, clock() + nanoseconds
    while load(words, index) == seen:
        turns += 1
        # Where no clock can be read, the turns are counted.
        if turns % _TURNS == 0 and (clock() > end or turns > nanoseconds):
            return False
        relax(turns)
    return True


@njit(nogil=True, cache=True)
def await_call(words, seen, ended, nanoseconds, pause):
    """Say that a call has ended, wait for the next one, and return whether it has come.

    Then the helper waits for a pause: who has posted the call holds the GIL until it begins with
    the work itself, and a thread that waits for the GIL sleeps.
    """
    fetch_add(ended, 0, 1)
    fetch_add(words, WAITING, 1)
    has_come = _await_change(words, POSTED, seen, nanoseconds)
    fetch_add(words, WAITING, -1)
    if has_come:
        end = clock() + pause
        while clock() < end:
            pass
    return has_come


@njit(nogil=True, cache=True)
def await_end(ended, nanoseconds):
    """Wait for the end of a call, at most so long; return whether it has ended."""
    return _await_change(ended, 0, 0, nanoseconds)
