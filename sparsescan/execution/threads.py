"""Worker threads for kernels that release the GIL.

Numba's own layers would do for one caller, but workqueue must not be entered by two threads at once
and GNU OpenMP must not be used after a fork. These are plain Python threads: a kernel does not need
all of them to come, so callers share them without waiting for each other, and a forked child starts
its own.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from numba import config
from numba.core.compiler_lock import global_compiler_lock

from ..kernels.cpu.run import abort

__all__ = ["Team", "lent", "share", "thread_count", "usable_cores", "work"]

# It calls a function on each thread of another library, and waits until all have returned.
Team = Callable[[Callable[[], None]], None]

# Nanoseconds of predicted work above which the main thread only waits, so that it sees signals.
LONG = 50_000_000

_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()


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

    Returns when none of them runs any more, whatever happens, since they write to memory that the
    caller then frees. An exception in any of them, such as a lack of memory, stops the others and
    is raised here; and so does an interrupt: Python raises it in the main thread, but not while
    that is in compiled code, so for long work, as `nanoseconds` predicts it, a thread of its own
    takes the place of the main one.
    """
    if threads <= 1 and nanoseconds <= LONG:
        kernel(tables, 0)
        return
    helpers: list[Future[None]] = []
    failed = True
    try:
        long = nanoseconds > LONG and threading.current_thread() is threading.main_thread()
        apart = long and _start(helpers, _guard, kernel, tables, 0)
        for i in range(1, threads):
            if not _call_help(helpers, _guard, kernel, tables, i):
                break
        if apart:
            helpers[0].result()
        else:
            kernel(tables, 0)
        failed = False
    finally:
        try:
            _wait(helpers, tables, failed)
        finally:
            # Another interrupt may have come before that one began to wait.
            _wait(helpers, tables, failed)
    for helper in helpers:
        if not helper.cancelled():
            helper.result()


_lent = threading.local()


@contextmanager
def lent(team: Team | None) -> Iterator[None]:
    """Let the threads of another library be the helpers of :func:`share`, on this thread.

    Threads of OpenMP spin for a while when they have nothing to do, on cores that helpers of our
    own would have to share with them.
    """
    before = getattr(_lent, "team", None)
    _lent.team = team
    try:
        yield
    finally:
        _lent.team = before


def share(call: Callable[[int], None], parts: int) -> None:
    """Call ``call(i)`` for every `i` below `parts`, on this thread and on helpers.

    Each takes the next part that nobody has taken, so one that comes late delays nobody.
    """
    if parts == 1:
        call(0)
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

        team(work_off_or_end)
        if errors:
            raise errors[0]
        return
    helpers: list[Future[None]] = []
    try:
        for _ in range(min(parts, thread_count()) - 1):
            if not _call_help(helpers, work_off):
                break
        work_off()
    except BaseException:
        # The helpers take no other part.
        end = 0
        raise
    finally:
        for helper in helpers:
            if not helper.cancel():
                helper.result()


def _call_help(helpers: list[Future[None]], call: Callable[..., None], *arguments: Any) -> bool:
    """Add a helper that makes this call; False if there can be none."""
    try:
        helpers.append(_executor().submit(call, *arguments))
    except RuntimeError:
        # No thread can be started, for example since the main one has ended: do without.
        return False
    return True


def _start(helpers: list[Future[None]], call: Callable[..., None], *arguments: Any) -> bool:
    """Add a helper that makes this call at once, in a new thread; False if there can be none."""
    helper: Future[None] = Future()

    def run() -> None:
        if not helper.set_running_or_notify_cancel():
            return
        try:
            call(*arguments)
        except BaseException as error:
            helper.set_exception(error)
        else:
            helper.set_result(None)

    # It is added before it starts, so that an interrupt in between finds it.
    helpers.append(helper)
    try:
        threading.Thread(target=run, name="sparsescan-main").start()
    except RuntimeError:
        helpers.remove(helper)
        return False
    return True


def _wait(helpers: list[Future[None]], tables: Any, failed: bool) -> None:
    """Wait until no helper runs, however often that is interrupted; if work has failed, stop it."""
    interrupt: BaseException | None = None
    while not all(helper.cancel() or helper.done() for helper in helpers):
        try:
            if failed:
                abort(tables)
            wait(helpers)
        except BaseException as error:
            interrupt, failed = error, True
    if interrupt is not None:
        raise interrupt


def _guard(kernel: Callable[[Any, int], None], tables: Any, i: int) -> None:
    try:
        kernel(tables, i)
    except BaseException:
        abort(tables)
        raise


def _executor() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(1, thread_count() - 1), "sparsescan")
        return _pool


def _renew() -> None:
    """Start anew in a forked child, where the threads of the parent do not exist."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()
    global_compiler_lock.release()  # type: ignore[no-untyped-call]


if hasattr(os, "register_at_fork"):
    # A child would wait forever for a thread that was compiling, so a fork waits for that thread.
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=_renew,
    )
