"""The tree of a schedule on one line: which Jacobians are multiplied with each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from .schedule import Schedule

# Elements in a row, beyond which only the first and the last are written.
_MOST = 4

# The shapes of an element, of (1 2), (1 2 3), (1 2 3 4), and of all longer rows; others follow.
_ELEMENT, _LONG = 0, _MOST


def tree(schedule: Schedule, width: int) -> str:
    """Return which Jacobians are multiplied with each other before they meet the gradient.

    Parameters
    ----------
    schedule : Schedule
        For any number of Jacobians.
    width : int
        Characters that there is room for, at least 1.

    Returns
    -------
    str
        Numbers are the Jacobians ``1`` to ``n - 1``, counted from the last layer; an exclusive scan
        does not read number ``n``. Parentheses are matrix products, from the left to the right:
        ``(2 3 4)`` is ``((2 3) 4)``. Products stand in the order of their first Jacobian; one that
        is an operand of several others stands in each of them.

    Notes
    -----
    A product ``((… b) c)`` is written as one list, ``(… b c)``, if `b` and `c` have the same shape:
    they are Jacobians, or lists of more than four, or products whose operands have the same shapes.
    Only the first and the last of more than four Jacobians in a row are written: ``1 … 99``, or
    ``(2 … 99)`` for their product. If all that does not fit into `width`, then neither are the
    inner ones of three or more neighbours of the same shape: ``(1 2) … (997 998)``. Text that still
    does not fit is cut off after a whole word, and an ellipsis added.

    Examples
    --------
    >>> from sparsescan import Schedule
    >>> from sparsescan.symbolic.tree import tree
    >>> tree(Schedule.linear(5), 60)
    '1 2 3 4'
    >>> tree(Schedule.linear(100), 60)
    '1 … 99'
    >>> tree(Schedule.blelloch(8), 60)
    '1 (2 3) ((4 5) (6 7))'
    >>> tree(Schedule.blelloch(1000), 60)
    '1 (2 3) ((4 5) (6 7)) (((8 9) (10 11)) ((12 13) (14 15))) …'
    >>> tree(Schedule.truncated(1000, 1), 60)
    '1 (2 3) … (998 999)'
    >>> tree(Schedule.chunked(12, 4), 60)
    '1 2 (3 4 5) (6 7 8) 9 10 11'
    >>> tree(Schedule.chunked(1000, 32), 60)
    '1 … 30 (31 … 61) … (937 … 967) 968 … 999'
    """
    forest = _Forest(schedule)
    text = forest.text(width, shorten=False)
    if len(text) > width:
        text = forest.text(width, shorten=True)
    if len(text) > width:
        fitting = text[: max(text.rfind(" ", 0, width - 1), 0)]
        text = f"{fitting.removesuffix(' …')} …".lstrip()
    return text


class _Forest:
    """The products of a schedule; nodes are numbered, the elements first."""

    def __init__(self, schedule: Schedule) -> None:
        n = schedule.n
        none = np.empty((0, 3), np.int64)
        ops = np.concatenate([none, *[level.ops for level in schedule.levels]])
        ops = ops[ops[:, 0] > 0]
        # They are sorted by length, so that operands come before their products.
        ops = ops[np.lexsort((ops[:, 0], ops[:, 2] - ops[:, 0]))]
        start, mid, stop = ops.T
        starts = np.concatenate([np.arange(n), start])
        lengths = np.concatenate([np.ones(n, np.int64), stop - start])
        keys = lengths * (n + 1) + starts
        left = np.searchsorted(keys, (mid - start) * (n + 1) + start)
        right = np.searchsorted(keys, (stop - mid) * (n + 1) + mid)
        readers = np.bincount(np.concatenate([left, right]), minlength=len(keys))
        readers[:1] = 1  # the gradient
        top = np.flatnonzero(readers == 0)
        self._top: list[int] = top[np.argsort(starts[top], kind="stable")].tolist()
        self._left: list[int] = np.concatenate([starts[:n], left]).tolist()
        self._right: list[int] = np.concatenate([starts[:n], right]).tolist()
        self._shapes(n)

    def _shapes(self, n: int) -> None:
        """Give every shape a number."""
        shapes = [_ELEMENT] * n
        # A shape is written as that of its right operand.
        self._last = [-1] + [_ELEMENT] * _LONG
        known: dict[tuple[int, int], int] = {}
        for left, right in zip(self._left[n:], self._right[n:], strict=True):
            pair = shapes[left], shapes[right]
            if pair[1] == _ELEMENT and pair[0] <= _LONG:
                shape = min(pair[0] + 1, _LONG)
            elif pair in known:
                shape = known[pair]
            else:
                shape = known[pair] = len(self._last)
                self._last.append(pair[1])
            shapes.append(shape)
        self._shape = shapes

    def text(self, width: int, shorten: bool) -> str:
        """Return all of it, or if that is longer than `width` at least so much."""
        written, length = [], 0
        # A loop, not a recursion: products may be nested as deeply as there are Jacobians.
        pending = [self._words(self._top, shorten)]
        while pending and length <= width:
            word = next(pending[-1], None)
            if word is None:
                pending.pop()
                word = ")" if pending else ""
            elif isinstance(word, int):
                pending.append(self._words(self._listed(word), shorten))
                word = "("
            written.append(word)
            length += len(word)
        return "".join(written)

    def _listed(self, node: int) -> list[int]:
        """Return what stands in the parentheses of a product."""
        nodes = [self._right[node]]
        left = self._left[node]
        while self._last[self._shape[left]] == self._shape[self._right[node]]:
            node, left = left, self._left[left]
            nodes.append(self._right[node])
        return [left, *nodes[::-1]]

    def _words(self, nodes: list[int], shorten: bool) -> Iterator[str | int]:
        """Return text and products, with spaces between them."""
        most = 2 if shorten else len(nodes)
        space = ""
        for shape, group in itertools.groupby(nodes, key=self._shape.__getitem__):
            run: list[int | str] = list(group)
            if len(run) > (_MOST if shape == _ELEMENT else most):
                run[1:-1] = ["…"]
            for word in run:
                yield space
                yield str(word) if shape == _ELEMENT else word
                space = " "
