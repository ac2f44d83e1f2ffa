"""Every contender of every line of the table; a group is a line."""

from __future__ import annotations

from functools import lru_cache

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from . import contests, table1
from .contests import OURS, Contest, Work
from .peers import MissingPeerError
from .timing import fastest

_CONTESTS = contests.CONTESTS + table1.CONTESTS
_CASES = [
    pytest.param(contest, contender, id=f"{contest.name}-{contender}".replace(" ", "_"))
    for contest in _CONTESTS
    for contender in (OURS, *contest.required)
]


@lru_cache(maxsize=1)
def _work(name: str, reduced: bool) -> Work:
    return next(contest for contest in _CONTESTS if contest.name == name).make(reduced)


@pytest.mark.parametrize(("contest", "contender"), _CASES)
def test_engine(
    contest: Contest, contender: str, reduced: bool, benchmark: BenchmarkFixture
) -> None:
    work = _work(contest.name, reduced)
    try:
        variant, call = fastest(work.contenders[contender](), trials=0 if reduced else 3)
    except MissingPeerError as missing:
        pytest.skip(str(missing))
    work.check(contender, call())
    benchmark.group = contest.work
    benchmark.extra_info.update(variant=variant, required=contest.required.get(contender))
    if reduced:
        benchmark.group += ", reduced"
        benchmark.pedantic(call)
    else:
        benchmark(call)
