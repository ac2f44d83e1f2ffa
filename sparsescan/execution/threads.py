"""Worker threads for kernels that release the GIL.

Numba's own threading layers do not fit: two threads must not enter workqueue at once, and GNU
OpenMP must not be used after a fork. These are plain Python threads. A kernel does not need all of
them, so callers share them without waiting for each other, and a forked child starts its own.
Waking a sleeping thread takes long compared with the calls of a small network's training step. So
an idle thread spins for a while, looking for the next call. A caller that waits for the end of a
call spins too. Both do so in compiled code, without the GIL.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import numpy as np
from numba import config
from numba.core.compiler_lock import global_compiler_lock
from numpy.typing import NDArray

from ..arrays.addresses import kernel_address
from ..kernels.compile import entry_for_c
from ..kernels.cpu import waiting
from ..kernels.cpu.flushing import flush, mode, set_mode
from ..kernels.cpu.replay import begin, help_out
from ..kernels.cpu.run import abort
from ..kernels.cpu.waiting import POSTED, WAITING, WORDS, await_call, await_end
from ..locks import new_lock

Array = NDArray[Any]

# Nanoseconds of predicted work above which the main thread only waits, so that it sees signals.
LONG = 50_000_000
# Nanoseconds that threads spin before they sleep, and the nanoseconds from posting a call to the
# caller's own part of the work.
_AWAKE, _PAUSE = 200_000, 25_000
# Words that no helper reads.
_NOBODY = np.zeros(WORDS, np.int64)


class Team(Protocol):
    """The threads of another library."""

    def __call__(self, work: Callable[[], None]) -> None:
        """Call a function on each thread, and wait until all have returned."""

    def call(self, function: int, argument: int) -> None:
        """Do so with a compiled function of one word, given by its address."""


def thread_count() -> int:
    """Return ``NUMBA_NUM_THREADS``, by default the number of CPUs this process may use."""
    return int(config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]


def usable_cores() -> frozenset[int]:
    """Return numbers of the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def work(
    kernel: Callable[[Any, int], None], tables: Any, threads: int, nanoseconds: float = 0.0
) -> None:
    """Call ``kernel(tables, i)`` on this thread with ``i = 0``, and on helpers that come in time.

    It returns only when no call runs any more, since calls write to memory that the caller then
    frees. An exception in any call, such as a lack of memory, stops the others and is raised here.
    So is an interrupt. Python cannot raise it while the main thread is in compiled code. So if
    `nanoseconds` predicts long work, another thread works in place of the main thread.
    """
    if threads <= 1 and nanoseconds <= LONG:
        before = mode()
        try:
            flush()
            kernel(tables, 0)
        finally:
            set_mode(before)
        return
    calls: list[_PostedCall] = []

    def begin() -> None:
        long = nanoseconds > LONG and threading.current_thread() is threading.main_thread()
        apart = long and _start(calls, _guard, kernel, tables, 0)
        for i in range(1, threads):
            if not _call_help(calls, _guard, kernel, tables, i):
                break
        if apart:
            calls[0].wait()
        else:
            _flushed(kernel, tables, 0)

    _finish(calls, begin, lambda: abort(tables))


def _flushed(call: Callable[..., None], *arguments: Any) -> None:
    """Make a call on this thread while subnormal numbers count as 0."""
    before = mode()
    try:
        flush()
        call(*arguments)
    finally:
        set_mode(before)


_lent = threading.local()


@contextmanager
def lent(team: Team | None) -> Iterator[None]:
    """Use the threads of another library as helpers of :func:`share`, in this thread's calls.

    Idle OpenMP threads spin for a while, on cores that our own helpers would need.
    """
    before = getattr(_lent, "team", None)
    _lent.team = team
    try:
        yield
    finally:
        _lent.team = before


def share(call: Callable[[int], None], parts: int) -> None:
    """Call ``call(i)`` for every `i` below `parts`, on this thread and on helpers.

    Each thread takes the next free part, so a late thread delays nobody.
    """
    if parts == 1:
        _flushed(call, 0)
        return
    take = itertools.count().__next__
    end = parts

    def work_off() -> None:
        while (i := take()) < end:
            call(i)

    team: Team | None = getattr(_lent, "team", None)
    if team is not None:
        errors: list[BaseException] = []

        def work_off_or_end() -> None:
            nonlocal end
            try:
                work_off()
            except BaseException as error:
                end = 0
                errors.append(error)

        # Threads that the team starts inherit this thread's mode.
        team(partial(_flushed, work_off_or_end))
        if errors:
            raise errors[0]
        return
    calls: list[_PostedCall] = []

    def begin() -> None:
        for _ in range(min(parts, thread_count()) - 1):
            if not _call_help(calls, work_off):
                break
        _flushed(work_off)

    def stop() -> None:
        # The helpers take no other part.
        nonlocal end
        end = 0

    _finish(calls, begin, stop)


def replay(header: Array, arrays: Array, control: Array, parts: int) -> None:
    """Make the calls of a recording, on this thread and on helpers, without the GIL.

    Parameters
    ----------
    header, arrays, control : ndarray of int64
        The recording's words, the addresses of arrays, and room for the words of a replay.
    parts : int
        How many threads are useful.
    """
    team: Team | None = getattr(_lent, "team", None)
    if team is not None and parts > 1:
        begin(header, arrays, control)
        team.call(entry_for_c(help_out), kernel_address(control))
        return
    words = _helpers().look_out(parts - 1) if parts > 1 else _NOBODY
    waiting.replay(words, header, arrays, control)


def _finish(calls: list[_PostedCall], begin: Callable[[], None], stop: Callable[[], None]) -> None:
    """Do this thread's part of some work, which posts `calls`, and wait until no call runs.

    Interrupts do not end the wait. If anything fails, the work is stopped, and the first exception
    is raised. Calls that no helper has taken are dropped.
    """
    failure: BaseException | None = None
    has_begun = False

    def go_on() -> None:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            begin()
        if failure is not None:
            stop()
        while calls:
            call = calls[-1]
            if not call.cancel():
                call.wait()
            calls.pop()
            if call.error is not None:
                raise call.error

    is_over = False
    while not is_over:
        try:
            # An interrupt may come between two turns of this loop, too.
            while calls or not has_begun:
                try:
                    go_on()
                except BaseException as error:
                    failure = error if failure is None else failure
            is_over = True
        except BaseException as error:
            failure = error if failure is None else failure
    if failure is not None:
        raise failure


def _call_help(calls: list[_PostedCall], call: Callable[..., None], *arguments: Any) -> bool:
    """Add a call for a helper that comes in time; False if there can be no helper."""
    # Added before it is posted or started, so that an interrupt in between finds it.
    calls.append(_PostedCall(call, arguments))
    try:
        _helpers().post(calls[-1])
    except RuntimeError:
        # No thread can start, for example because the main thread has ended: work without.
        calls.pop()
        return False
    return True


def _start(calls: list[_PostedCall], call: Callable[..., None], *arguments: Any) -> bool:
    """Add a call that a new thread makes at once; False if no thread can start."""
    calls.append(_PostedCall(call, arguments))
    try:
        threading.Thread(target=calls[-1].make, name="sparsescan-main").start()
    except RuntimeError:
        calls.pop()
        return False
    return True


def _guard(kernel: Callable[[Any, int], None], tables: Any, i: int) -> None:
    try:
        kernel(tables, i)
    except BaseException:
        abort(tables)
        raise


# -- Helpers --------------------------------------------------------------------------------------


class _PostedCall:
    """A call for another thread, which the caller may cancel until it has begun.

    Attributes
    ----------
    error : BaseException or None
        The exception that the call raised.
    ended : ndarray of int64
        Not 0 once the call has ended and its helper has released the GIL.
    """

    def __init__(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._work: tuple[Callable[..., None], tuple[Any, ...]] | None = function, arguments
        self._takers: list[str] = []
        self._running = threading.Lock()
        self._running.acquire()
        self.error: BaseException | None = None
        self.ended = np.zeros(1, np.int64)

    def _goes_to(self, taker: str) -> bool:
        """Return whether this thread has claimed it first: an append cannot be interrupted."""
        self._takers.append(taker)
        return self._takers[0] == taker

    def make(self) -> None:
        """Make the call, unless it is cancelled, and drop everything it has used."""
        if not self._goes_to("helper") or self._work is None:
            return
        function, arguments = self._work
        # A thread that makes calls does nothing else.
        flush()
        try:
            function(*arguments)
        except BaseException as error:
            self.error = error
        finally:
            self._work = None
            self._running.release()

    def cancel(self) -> bool:
        """Cancel the call; return False if a thread has begun it."""
        is_cancelled = self._goes_to("caller")
        if is_cancelled:
            self._work = None
        return is_cancelled

    def wait(self) -> None:
        """Wait for its end."""
        if not await_end(self.ended, _AWAKE):
            with self._running:
                pass


class Crew:
    """Threads that make calls for others.

    Parameters
    ----------
    most : int
        How many threads there may be. They start when they are needed.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._threads: list[threading.Thread] = []
        self._starting = new_lock()
        self._posted: deque[_PostedCall] = deque()
        self._sleepers: list[threading.Lock] = []
        self._words = np.zeros(WORDS, np.int64)
        self._numbers = itertools.count(1)
        self._is_closed = False
        # The calling thread compiles or loads both functions here, so that no helper has to.
        await_call(self._words, 0, np.zeros(1, np.int64), 0, 0)
        await_end(np.ones(1, np.int64), 0)

    def post(self, call: _PostedCall) -> None:
        """Let the next free thread make a call; RuntimeError if no thread is free or can start."""
        self._posted.append(call)
        self._words[POSTED] = next(self._numbers)
        if self._words[WAITING] < len(self._posted):
            self._wake()

    def look_out(self, count: int) -> Array:
        """Let `count` threads spin for replays, if as many can start; return their words."""
        with suppress(RuntimeError):
            for _ in range(count - int(self._words[WAITING])):
                self._wake()
        return self._words

    def _wake(self) -> None:
        """Let one more thread wait for calls, unless all do; RuntimeError if none can start."""
        try:
            self._sleepers.pop().release()
        except IndexError:
            self._start()

    def _start(self) -> None:
        with self._starting:
            if len(self._threads) < self._most:
                # No program waits for these when it ends.
                thread = threading.Thread(target=self._work, name="sparsescan", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    if not self._threads:
                        self._posted.clear()
                        raise
                    return
                self._threads.append(thread)

    def _work(self) -> None:
        """Make calls, the oldest first; sleep after a while without calls."""
        flush()
        asleep, ended = threading.Lock(), np.zeros(1, np.int64)
        asleep.acquire()
        while not self._is_closed:
            seen = self._words[POSTED]
            try:
                call = self._posted.popleft()
            except IndexError:
                if not await_call(self._words, seen, ended, _AWAKE, _PAUSE):
                    self._sleep(asleep)
                continue
            ended[0] = 1
            call.make()
            ended = call.ended
            del call
        ended[0] = 1

    def _sleep(self, asleep: threading.Lock) -> None:
        """Wait until somebody releases the lock, which is then locked again."""
        self._sleepers.append(asleep)
        if self._posted or self._is_closed:
            # That release came before anybody could see this thread sleep.
            try:
                self._sleepers.remove(asleep)
                return
            except ValueError:  # somebody saw it sleep
                pass
        asleep.acquire()

    def close(self) -> None:
        """End all threads; wait for those that are not in a long call."""
        self._is_closed = True
        self._words[POSTED] = -1
        while self._sleepers:
            self._sleepers.pop().release()
        for thread in self._threads:
            thread.join(1.0)


_crew: Crew | None = None
_lock = new_lock()


def _helpers() -> Crew:
    global _crew
    with _lock:
        if _crew is None:
            _crew = Crew(max(1, thread_count() - 1))
        return _crew


@atexit.register
def _close() -> None:
    """Make sure that no thread runs compiled code when the interpreter ends and frees it."""
    if _crew is not None:
        _crew.close()


def _renew() -> None:
    """Reset in a forked child, where the parent's threads do not exist."""
    global _crew
    _crew = None
    global_compiler_lock.release()  # type: ignore[no-untyped-call]


if hasattr(os, "register_at_fork"):
    # A child would wait forever for a thread that was compiling, so a fork waits for that thread.
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=_renew,
    )
