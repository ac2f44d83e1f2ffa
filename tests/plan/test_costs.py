"""Costs of operations: counts against a plain count, constants on disk, and their measurement."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import chains, every_schedule, patterns_of, schedules

import sparsescan
from sparsescan import Pattern, Schedule
from sparsescan.cli.main import main
from sparsescan.parallel.network import Network, network_file
from sparsescan.plan import calibrate
from sparsescan.plan.costs import cpu as costs
from sparsescan.plan.costs.cpu import CpuModel, load_cpu, save_cpu
from sparsescan.plan.costs.cuda import gpu_file
from sparsescan.plan.costs.operations import FAMILIES, Operations
from sparsescan.strategies.machine import Machine, worker_file
from sparsescan.symbolic.pattern import multiply_adds, of_mask
from sparsescan.symbolic.program import Program

F4 = np.dtype(np.float32)


def banded(size: int) -> Pattern:
    return of_mask(np.abs(np.subtract.outer(np.arange(size), np.arange(size))) <= 1)


@given(st.data())
def test_counts_of_any_schedule(data: Any) -> None:
    """Every node is walked down to its Jacobians: its pattern, and whether samples differ."""
    chain = data.draw(chains(max_n=9, min_size=1))
    if not len(chain.jacobians):
        return
    patterns = patterns_of(chain.jacobians)
    n, batch = len(patterns), data.draw(st.integers(1, 20))
    chosen = data.draw(schedules(n))
    schedule = getattr(Schedule, chosen)(n) if chosen in ("linear", "blelloch") else chosen
    schedule = Schedule.linear(n) if schedule == "auto" else schedule
    batched = np.array([data.draw(st.booleans()) for _ in range(n)])
    program = Program(patterns, schedule)
    operations = Operations.of(program, 4, batch, batched)

    nodes = {(k + 1, k + 2): (patterns[k], bool(batched[k])) for k in range(n)}
    expected: Counter[tuple[str, tuple[float, ...]]] = Counter()
    for level in schedule.levels:
        for start, mid, stop in level.ops.tolist():
            right, differs = nodes[mid, stop]
            kind = {"general": "csr"}.get(right.kind, right.kind)
            if start == 0:
                shared = kind != "diagonal" and not differs and batch > 2 and stop == mid + 1
                passes = math.ceil(batch / 8) if shared else batch
                name = ("shared " if shared else "") + kind + "·x"
                counts = right.nnz * passes, right.shape[0] * batch, batch
            else:
                left, other = nodes[start, mid]
                differs |= other
                pattern = sparsescan.symbolic.pattern.product(right, left)
                nodes[start, stop] = pattern, differs
                first = {"general": "csr"}.get(left.kind, left.kind)
                name = f"{kind}·{first}"
                name += ", dense" * (name == "csr·csr" and pattern.kind == "dense")
                name = "any·diagonal" if first == "diagonal" else name
                name = "diagonal·any" if kind == "diagonal" else name
                times = batch if differs else 1
                looked = right.nnz * (stop == mid + 1) + left.nnz * (mid == start + 1)
                counts = (
                    multiply_adds(right, left) * times,
                    (pattern.nnz + looked) * times,
                    times,
                )
            expected[name, tuple(map(float, counts))] += 1
    # The last operation is that of an inclusive scan.
    names = [FAMILIES[family] for family in operations.family[:-1]]
    rows = [tuple(row) for row in operations.counts[:-1].tolist()]
    assert Counter(zip(names, rows, strict=True)) == expected


def test_levels_take_what_their_operations_take() -> None:
    machine = load_cpu(Path("no such file"))
    patterns = [Pattern.dense((8, 8)), banded(8), Pattern.diagonal(8)] * 5
    for schedule in every_schedule(15):
        program = Program(patterns, schedule)
        operations = Operations.of(program, 4, 3, np.ones(15, bool))
        run, times = CpuModel(machine, F4, 3, 1).level_times(program)
        assert run == machine.run
        assert sum(times) == pytest.approx(
            operations.nanoseconds(machine.families["float32"])[:-1].sum()
        )
        assert len(times) == len(schedule.levels)


def test_threads_share_samples_and_rows_but_not_one_small_run() -> None:
    machine = load_cpu(Path("no such file"))

    def total(pattern: Pattern, n: int, batch: int, threads: int) -> float:
        program = Program([pattern] * n, Schedule.linear(n))
        run, times = CpuModel(machine, F4, batch, threads).level_times(program)
        return run + sum(times)

    size = 100_000
    rows = np.arange(size)
    pairs = np.stack([rows - rows % 2, rows - rows % 2 + 1], axis=1)
    small = Pattern.dense((20, 20))
    large = Pattern(2 * np.arange(size + 1), pairs.ravel(), (size, size))
    assert total(small, 1000, 4, 4) < 0.5 * total(small, 1000, 4, 1)
    assert total(small, 1000, 1, 4) >= total(small, 1000, 1, 1)
    assert total(large, 4, 1, 4) < 0.6 * total(large, 4, 1, 1)
    # Too little to wake anybody for.
    assert total(small, 10, 4, 4) == total(small, 10, 4, 1)


def test_values_that_no_cache_holds_come_from_memory() -> None:
    machine = load_cpu(Path("no such file"))
    n, size = 50, 2_000_000
    program = Program([Pattern.diagonal(size)] * n, Schedule.linear(n))
    _, times = CpuModel(machine, F4, 1, 64).level_times(program)
    moved = (n - 1) * 3 * size * 4
    assert sum(times) >= moved / machine.bandwidth / machine.memory_threads


# ---------------------------------------------------------------------------------------------
# Constants
# ---------------------------------------------------------------------------------------------


def test_constants_on_disk(tmp_path: Path) -> None:
    built_in = load_cpu(tmp_path / "none.json")
    path = save_cpu(built_in, tmp_path / "folder" / "machine.json")
    assert load_cpu(path) == built_in
    content = json.loads(path.read_text())
    families = content["families"]
    for damaged in (
        "",
        "[]",
        "{",
        json.dumps(content | {"run": -1}),
        json.dumps(content | {"run": "fast"}),
        json.dumps(content | {"more": 1}),
        json.dumps(content | {"bandwidth": 0}),
        json.dumps(content | {"meet": float("nan")}),
        json.dumps(content | {"families": families | {"float32": families["float32"][1:]}}),
        json.dumps(content | {"families": {"float32": families["float32"]}}),
        json.dumps({key: value for key, value in content.items() if key != "wake"}),
    ):
        path.write_text(damaged)
        assert load_cpu(path) == built_in
    path.write_bytes(b"\xff\xfe")
    assert load_cpu(path) == built_in


@pytest.mark.skipif(sys.platform != "linux", reason="the variables of Linux")
@pytest.mark.parametrize("named", [None, "", "a/relative/folder"])
def test_without_a_home_there_is_no_file_and_calibration_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], named: str | None
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if named is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", named)
    # As it stays without HOME, for a user that is in no /etc/passwd.
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    files = (costs.machine_file(), gpu_file("H200"), network_file(), worker_file())
    assert files == (None,) * 4
    assert (load_cpu().name, Network.load().name) == ("built in", "built in")
    assert Machine.load() == Machine(network=Network.load())
    for command in (["calibrate"], ["info"]):
        code = main(command)
        printed = capsys.readouterr()
        if command == ["info"]:
            assert "calibration none" in printed.out
        else:
            assert code != 0
            assert "XDG_CACHE_HOME" in printed.err


@pytest.mark.slow
def test_calibration_measures_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Quickly here, so that nothing can be said of the numbers but that they are some."""
    monkeypatch.setattr(calibrate, "_SECONDS", 0.0)
    monkeypatch.setattr(calibrate, "_TIMES", 2)
    monkeypatch.setattr(calibrate, "_STEPS", 100)
    # The table of PyTorch's modules is written beside the constants, not to the user's folder.
    if importlib.util.find_spec("torch"):
        modules = importlib.import_module("sparsescan.torch.calibrate")
        for name, sizes in (("_HIDDEN", [4]), ("_BATCH", [1]), ("_STEPS", [1, 2])):
            monkeypatch.setattr(modules, name, sizes)
        times = importlib.import_module("sparsescan.torch.calls.times")
        monkeypatch.setattr(times, "machine_file", lambda: tmp_path / "machine.json")
    monkeypatch.setattr(costs, "machine_file", lambda: tmp_path / "machine.json")
    assert main(["calibrate"]) == 0
    rows = Counter(line[:16].strip() for line in capsys.readouterr().out.splitlines())
    assert all(rows[family] == 2 for family in FAMILIES)
    machine = load_cpu()
    assert machine.name != "built in"
    assert machine.run > 0
    for constants in machine.families.values():
        assert (np.array(constants) >= 0).all()
        assert (np.array(constants).sum(axis=1) > 0).all()
