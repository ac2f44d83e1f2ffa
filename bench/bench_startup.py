"""Time what a new process pays; the limits hold for `extra_info["seconds"]`."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from .startup import STARTUPS


@pytest.mark.benchmark(group="new processes, from start to end")
@pytest.mark.parametrize("name", STARTUPS)
def test_startup(name: str, reduced: bool, benchmark: BenchmarkFixture) -> None:
    startup = STARTUPS[name]
    startup.seconds()  # fills the cache of compiled kernels
    seconds: list[float] = []
    rounds = 1 if reduced else 5
    benchmark.pedantic(lambda: seconds.append(startup.seconds()), rounds=rounds)
    benchmark.extra_info.update(what=startup.what, limit=startup.limit, seconds=seconds)
