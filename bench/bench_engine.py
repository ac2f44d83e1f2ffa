"""Every contender of every line of the table, and what a new process pays; a group is a line."""

from __future__ import annotations

from functools import lru_cache

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from . import contests, table1
from .contests import OURS, Contest, Work
from .peers import MissingPeerError
from .startup import STARTUPS
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


@pytest.mark.benchmark(group="new processes, from start to end")
@pytest.mark.parametrize("name", STARTUPS)
def test_startup(name: str, reduced: bool, benchmark: BenchmarkFixture) -> None:
    startup = STARTUPS[name]
    startup.seconds()  # fills the cache of compiled kernels
    seconds: list[float] = []
    rounds = 1 if reduced else 5
    benchmark.pedantic(lambda: seconds.append(startup.seconds()), rounds=rounds)
    benchmark.extra_info.update(what=startup.what, limit=startup.limit, seconds=seconds)
