"""Names for numbers: columns of tables, slots of descriptors, and kinds."""

from __future__ import annotations

from collections import namedtuple
from typing import Protocol, cast


class Numbers(Protocol):
    """Numbers by their names, which are constants in compiled functions."""

    def __getattr__(self, name: str) -> int: ...


def numbered(title: str, *names: str) -> Numbers:
    """Return numbers by the words of some texts, each one more than the last, or what it says.

    Examples
    --------
    >>> numbered("Run", "NEXT DONE=16 STATUS", "WIDTH")
    Run(NEXT=0, DONE=16, STATUS=17, WIDTH=18)
    """
    numbers: dict[str, int] = {}
    following = 0
    for word in " ".join(names).split():
        name, _, given = word.partition("=")
        numbers[name] = int(given or following)
        following = numbers[name] + 1
    return cast(Numbers, namedtuple(title, numbers)(**numbers))
