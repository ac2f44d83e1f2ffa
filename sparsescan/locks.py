"""Locks that a forked child can take, whichever thread of the parent holds them.

A child has one thread, the one that has forked: what another thread holds at that moment nobody
would ever release. So all locks are made here, and a child renews those that are held. What a lock
protects has to be whole between any two lines of the code that holds it, as for an interrupt: a
value is made first, and kept by one assignment.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> Any:
    """Return a lock that its holder may take again, and that a forked child finds free."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:

    class cached_property(functools.cached_property):  # noqa: N801
        """Compute an attribute when it is first read, as ``functools.cached_property`` does.

        Before Python 3.12 that has a lock.
        """

        def __init__(self, function: Callable[[Any], Any]) -> None:
            super().__init__(function)
            if hasattr(self, "lock"):
                self.lock = new_lock()


def _renew() -> None:
    """Free the locks that threads hold which do not exist in this child."""
    for lock in _locks:
        if lock.acquire(blocking=False):
            lock.release()  # it was free, or this thread holds it
        else:
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
