"""Which activations a training step keeps under a limit of memory, against all choices."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparsescan.jacobians.training.checkpoints import choose_segments, needed_bytes

sizes = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans()), max_size=7)


def held(ends: tuple[int, ...], maps: np.ndarray, kept: np.ndarray) -> int:
    """Run through a step: the most bytes that are held at once, by what is held when."""
    most, borders = 0, sum(int(maps[end - 1]) for end in ends)
    for begin, end in itertools.pairwise((0, *ends)):
        inside = sum(int(maps[k]) for k in range(begin, end - 1))
        most = max(most, inside + sum(int(kept[k]) for k in range(begin, end)))
    return borders + most


@given(sizes, st.integers(0, 60))
def test_all_choices(stages: list[tuple[int, int, bool]], limit: int) -> None:
    maps = np.array([100 * each[0] for each in stages], np.int64)
    kept = np.array([100 * each[1] for each in stages], np.int64)
    may_end = np.array([each[2] for each in stages], bool)
    may_end[-1:] = True
    inside = [k + 1 for k in range(len(stages) - 1) if may_end[k]]
    last = (len(stages),) if stages else ()
    every = [
        (*some, *last)
        for count in range(len(inside) + 1)
        for some in itertools.combinations(inside, count)
    ]
    chosen = choose_segments(maps, kept, may_end, 100 * limit)
    assert tuple(chosen) in every
    needed = needed_bytes(chosen, maps, kept)
    assert needed == held(tuple(chosen), maps, kept)
    fit = [ends for ends in every if held(ends, maps, kept) <= 100 * limit]
    if not fit:
        assert needed == min(held(ends, maps, kept) for ends in every)
        return
    assert needed <= 100 * limit
    again = [ends[-2] if len(ends) > 1 else 0 for ends in [tuple(chosen), *fit]]
    assert again[0] == min(again)
