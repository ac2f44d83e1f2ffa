"""A plan comes back from its file as it was, and a damaged file is called one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from damaged import arrays_of, bomb, file_of
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    Chain,
    assert_within,
    chains,
    patterns_of,
    same_bits,
    schedules,
    values_only,
)
from sampling import slow
from trees import any_schedule, products_of, random_levels

import sparsescan
from sparsescan import (
    FileError,
    Pattern,
    ScanPlan,
    Schedule,
)
from sparsescan.arrays import arrays
from sparsescan.plan.choice import Alternative, InputKind, PlanChoice, PlanOptions


def assert_same(result: ScanPlan, expected: ScanPlan) -> None:
    assert str(result) == str(expected)
    assert result.schedule == expected.schedule
    assert result.schedule.chunks == expected.schedule.chunks
    assert result.patterns == expected.patterns
    for name in (
        *("n", "reason", "batch", "dtype", "device", "memory_limit", "reverse", "workspace_bytes"),
        *("dense", "alternatives"),
    ):
        assert getattr(result, name) == getattr(expected, name), name


@st.composite
def named_or_tree(draw: Any, n: int) -> Schedule | str:
    if draw(st.booleans()):
        return draw(schedules(n))
    return Schedule.from_levels(
        n, random_levels(np.random.default_rng(draw(st.integers(0, 2**32 - 1))), n)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


def reloaded(plan: ScanPlan, folder: Path) -> ScanPlan:
    plan.save(folder / "plan")
    return ScanPlan.load(folder / "plan")


def run(plan: ScanPlan, chain: Chain) -> Any:
    return chain.scan(plan, values_only(chain.jacobians))


@given(st.data())
def test_a_plan_comes_back_and_gives_the_same_bits(folder: Path, data: Any) -> None:
    chain = data.draw(chains())
    plan = sparsescan.plan(
        patterns_of(chain.jacobians),
        schedule=data.draw(named_or_tree(len(chain.jacobians))),
        batch=data.draw(st.sampled_from([None, chain.batch or None])),
        dtype=data.draw(st.sampled_from([None, chain.dtype])),
        device=data.draw(st.sampled_from([None, "cpu", "cuda"])),
        memory_limit=data.draw(st.sampled_from([None, 10**9])),
    )
    path = folder / "any name"
    plan.save(path)
    loaded = ScanPlan.load(str(path))
    assert_same(loaded, plan)
    if plan.device != "cuda":  # of which there need be none
        result = run(loaded, chain)
        assert same_bits(result, run(plan, chain))
        assert_within(result, chain.oracle(), chain.dtype)


TIMES = st.none() | st.floats(0, 1e12)


@given(st.data())
def test_what_the_planner_said_comes_back(folder: Path, data: Any) -> None:
    """Products that are stored densely, and the schedules that it looked at."""
    chain = data.draw(chains())
    n = len(chain.jacobians)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    schedule = any_schedule(rng, n)
    names = st.sampled_from([repr(schedule), "Schedule.linear(9)"])
    counts = st.integers(0, 2**40)
    choice = PlanChoice(
        schedule,
        frozenset(product for product in products_of(schedule) if rng.random() < 0.5),
        "so it is",
        tuple(data.draw(st.lists(st.builds(Alternative, names, counts, counts, TIMES)))),
    )
    plan = ScanPlan(patterns_of(chain.jacobians), choice)
    loaded = reloaded(plan, folder)
    assert_same(loaded, plan)
    assert loaded.to_dict() == plan.to_dict()
    assert same_bits(run(loaded, chain), run(plan, chain))


def test_wide_indices_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns of 32-bit and of 64-bit indices in one file; dense ones that fit in no memory."""
    monkeypatch.setattr(arrays, "memory_left", lambda: 1 << 50)
    wide = Pattern([0, 1, 2], [0, 2**40], (2, 2**41))
    narrow = Pattern([0, 1, 1], [1], (2, 2))
    huge = Pattern.dense((2**30, 2))
    plan = sparsescan.plan([wide, narrow, narrow, huge], schedule="linear")
    plan.save(tmp_path / "p")
    assert ScanPlan.load(tmp_path / "p").patterns == plan.patterns
    assert (tmp_path / "p").stat().st_size < 10_000


@pytest.mark.parametrize("kind", ["linear", "blelloch", *slow("levels")])
def test_a_long_plan_is_saved_and_loaded_fast(tmp_path: Path, kind: str) -> None:
    n = 30_000
    tree = Schedule.from_levels(n, Schedule.truncated(n, 3).levels)
    plan = sparsescan.plan(
        [Pattern.diagonal(3), Pattern.dense((3, 3))] * (n // 2),
        schedule=tree if kind == "levels" else kind,
    )
    start = time.process_time()
    loaded = reloaded(plan, tmp_path)
    seconds = time.process_time() - start
    assert_same(loaded, plan)
    assert seconds < 3  # measured: 0.07, 0.25, 0.22
    assert (tmp_path / "plan").stat().st_size < 2 * n * (5 * 2) + n + 10_000


# Damage


NAMES = ("blelloch", "chunked", "levels")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, bytes]:
    """Small files, as bytes."""
    rng = np.random.default_rng(7)
    mask = sp.csr_array(np.tri(4))
    lower = Pattern(mask.indptr, mask.indices, mask.shape)
    other = Pattern([0, 1, 2, 3, 4], [3, 2, 1, 0], (4, 4))
    patterns = [lower, other, Pattern.diagonal(4), Pattern.dense((4, 4)), lower, lower, other]
    schedules = {
        "blelloch": Schedule.blelloch(7),
        "chunked": Schedule.chunked(7, 3),
        "levels": Schedule.from_levels(7, random_levels(rng, 7)),
    }
    result = {}
    for name, schedule in schedules.items():
        looked_at = (
            Alternative("Schedule.linear(7)", 6, 0, 12.5),
            Alternative("Schedule.chunked(7, 2)", 4, 1, None),
        )
        choice = PlanChoice(
            schedule,
            frozenset(products_of(schedule)[:2]),
            "asked for",
            looked_at,
            kind=InputKind(2, np.dtype("f4"), False, bytes([0, 1, 1, 0, 1, 0, 1])),
        )
        options = PlanOptions(2, np.dtype("f4"), "cpu", 1 << 30, auto=True)
        plan = ScanPlan(patterns, choice, options)
        plan.save(folder / name)
        result[name] = (folder / name).read_bytes()
    return result


def assert_refused(path: Path, contents: bytes, match: str | None = None) -> None:
    path.write_bytes(contents)
    with pytest.raises(FileError, match=match) as caught:
        ScanPlan.load(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "expected a file written by ScanPlan.save" in message
    assert "\n" not in message


def rewritten(contents: bytes, **changes: Any) -> bytes:
    """Replace arrays in a file; None drops the key."""
    return file_of(arrays_of(contents) | changes)


@given(name=st.sampled_from(NAMES), share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(folder: Path, saved: Any, name: str, share: float) -> None:
    contents = saved[name]
    assert_refused(folder / "cut", contents[: int(share * len(contents))])


@given(name=st.sampled_from(NAMES), data=st.data())
def test_flipped_bytes_change_nothing_or_are_refused(
    folder: Path, saved: Any, name: str, data: Any
) -> None:
    contents = bytearray(saved[name])
    for _ in range(data.draw(st.integers(1, 3))):
        contents[data.draw(st.integers(0, len(contents) - 1))] ^= data.draw(st.integers(1, 255))
    path = folder / "flipped"
    path.write_bytes(contents)
    try:
        plan = ScanPlan.load(path)
    except FileError:
        pass
    else:
        # Zip has bytes that say nothing about the arrays, such as dates.
        assert_same(plan, ScanPlan.load(folder / name))


@given(name=st.sampled_from(NAMES), data=st.data())
def test_arrays_that_were_tampered_with_are_refused_or_make_a_sound_plan(
    folder: Path, saved: Any, name: str, data: Any
) -> None:
    """Checksums are right here: only the reader's own checks stand between file and kernels."""
    arrays = arrays_of(saved[name])
    keys = ["patterns", "indptr_0", "indices_0", "steps", "ops", "dense"]
    key = data.draw(st.sampled_from(keys))
    array = arrays[key].astype(np.int64).reshape(-1)
    values = [-(2**31), -1, 0, 1, 2, 3, 4, 5, 7, 8, 2**31 - 1]
    value = data.draw(st.sampled_from(values[1:-1] if key == "patterns" else values))
    array[data.draw(st.integers(0, array.size - 1))] = value
    path = folder / "tampered"
    path.write_bytes(rewritten(saved[name], **{key: array.reshape(arrays[key].shape)}))
    try:
        plan = ScanPlan.load(path)
    except FileError:
        return
    rng = np.random.default_rng(0)
    steps = [rng.standard_normal((2, p.nnz)).astype("f4") for p in plan.patterns]
    grad = rng.standard_normal((2, plan.patterns[0].shape[1])).astype("f4")
    result = plan.inclusive_scan(grad, steps)
    linear = sparsescan.plan(plan.patterns, schedule="linear").inclusive_scan(grad, steps)
    for one, other in zip(result, linear, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


KEYS = {
    "version": "one integer",
    "about": "one string",
    "patterns": "integers",
    **{f"{key}_{p}": "integers" for p in (0, 1) for key in ("indptr", "indices")},
    "steps": "integers",
    "ops": "integers",
    "dense": "integers",
    "differs": "integers",
}


def test_a_file_has_no_other_keys(saved: dict[str, bytes]) -> None:
    for contents in saved.values():
        assert set(arrays_of(contents)) == set(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_needed(tmp_path: Path, saved: dict[str, bytes], key: str) -> None:
    contents = rewritten(saved["levels"], **{key: None})
    assert_refused(tmp_path / "p", contents, f"the key '{key}' is missing")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("dtype", [object, np.float64, *slow(np.complex128, bool, "S3")])
def test_each_key_has_its_dtype(
    tmp_path: Path, saved: dict[str, bytes], key: str, dtype: Any
) -> None:
    damaged = np.zeros(arrays_of(saved["levels"])[key].shape, dtype)
    contents = rewritten(saved["levels"], **{key: damaged})
    what = f"{key} has dtype .*expected {KEYS[key]}"
    assert_refused(tmp_path / "p", contents, "Object arrays" if dtype is object else what)


@pytest.mark.parametrize("key", KEYS)
def test_each_key_has_its_shape(tmp_path: Path, saved: dict[str, bytes], key: str) -> None:
    array = arrays_of(saved["levels"])[key]
    contents = rewritten(saved["levels"], **{key: np.stack([array, array])})
    assert_refused(tmp_path / "p", contents, f"{key} has dtype .*expected {KEYS[key]}")


@pytest.mark.parametrize(
    ("key", "change", "match"),
    [
        ("version", lambda a: a + 1, "version is 3; expected 2"),
        ("version", lambda a: a - 1, "version is 1, the format of sparsescan 0.2: save it again"),
        ("patterns", lambda a: a - [[9, 0, 0]], r"patterns\[0, 0\] is -\d; expected 0 to 2"),
        ("patterns", lambda a: np.add(a, [[0, 0, 1]]), "diagonal of shape"),
        ("indptr_0", lambda a: a[:-1], "has an indptr of 4 entries; expected 5"),
        ("indptr_0", lambda a: np.append(a, 0), "has an indptr of 6 entries; expected 5"),
        ("indices_0", lambda a: a + 1, r"patterns\[0\] .*index 4 in row 3; expected .*0 to 3"),
        ("steps", lambda a: a + 1, "steps is 4; expected 0 to 3"),
        ("steps", lambda a: a.astype(int) - 1, "steps is -1; expected 0 to 3"),
        ("steps", lambda a: a[:-1], r"\(0, 6, 7\); expected 0 <= start < mid < stop <= 6"),
        ("steps", lambda a: np.append(a, a[-1]), r"levels make no \[0, 8\)"),
        ("ops", lambda a: a[:-1], r"levels make no \[0, 7\)"),
        ("ops", lambda a: a[::-1], "runs|levels make no|has operation"),
        ("ops", lambda a: a + np.uint8([0, 0, 1, 1, 1]), "expected 0 <= start < mid < stop <= 7"),
        ("ops", lambda a: a * np.uint8([1, 0, 1, 1, 1]), "expected a run to make prefixes only"),
        ("ops", lambda a: a + np.uint8([9, 0, 0, 0, 0]), "levels make no"),
        ("ops", lambda a: a - np.uint64(2**63), "runs|levels make no|expected 0 <= start"),
        ("dense", lambda a: a + 1, r"dense has \(3, 5\); expected products of the schedule"),
        ("dense", lambda a: a[:, ::-1], r"dense has \(4, 2\); expected products of the schedule"),
        ("dense", lambda a: a * [[0, 1]], r"dense has \(0, 4\); expected products"),
        (
            "dense",
            lambda a: a.astype("u8") + np.uint64(2**63),
            "expected products of the schedule",
        ),
        ("differs", lambda a: a[:-1], "differs has 6 entries; expected 7"),
        ("about", lambda a: np.array("{"), "no .npz file, or a damaged one"),
        ("about", lambda a: np.array("[]"), "no .npz file, or a damaged one"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, saved: dict[str, bytes], key: str, change: Any, match: str
) -> None:
    damaged = change(arrays_of(saved["chunked"])[key])
    contents = rewritten(saved["chunked"], **{key: damaged})
    assert_refused(tmp_path / "p", contents, match)


@pytest.mark.parametrize(
    ("name", "key", "value", "match"),
    [
        *(
            ("chunked", "schedule", f"Schedule.{text}", "but its levels are other ones")
            for text in ("linear(7)", "chunked(7, 03)", "chunked(7)", "linear(9999999)", "scan(7)")
        ),
        ("chunked", "schedule", 7, "damaged"),
        ("chunked", "levels", ["chunks", "boundaries"], r"levels make no \[0, 3\)"),
        ("chunked", "levels", ["a", "b", "c"], "its levels are other ones"),
        ("chunked", "levels", ["a", "b\n", "c"], "has the name"),
        ("levels", "levels", ["!"] * 9, r"schedule is 'Schedule.from_levels\(7, .* but its"),
        ("chunked", "alternatives", [[1]], "damaged"),
        ("chunked", "options", {}, "damaged"),
        ("chunked", "memory_limit", -1, "memory_limit is -1; expected at least 0"),
        ("chunked", "batch", 0, "batch is 0; expected at least 1"),
        ("chunked", "batch", "1", "batch is '1'; expected an integer"),
        ("chunked", "dtype", "f2", "dtype is float16; expected float32"),
        ("chunked", "dtype", "O", "dtype is object; expected float32"),
        ("chunked", "device", "tpu", "device is 'tpu'; expected 'cpu'"),
        ("chunked", "auto", 2, "auto is 2; expected True or False"),
        ("chunked", "on_device", None, "on_device is None; expected True or False"),
    ],
)
def test_what_is_wrong_in_its_text_is_said(
    tmp_path: Path, saved: dict[str, bytes], name: str, key: str, value: Any, match: str
) -> None:
    """Of the plan, of its options, or of the kind of input that it was made for."""
    about = json.loads(arrays_of(saved[name])["about"].item())
    for part in (about, about["options"], about["kind"]):
        if key in part:
            part[key] = value
    contents = rewritten(saved[name], about=np.array(json.dumps(about)))
    assert_refused(tmp_path / "p", contents, match)


def test_patterns_that_do_not_chain_are_refused(tmp_path: Path, saved: dict[str, bytes]) -> None:
    table = arrays_of(saved["levels"])["patterns"].copy()
    table[table[:, 0] == 2] = 2, 4, 5
    assert_refused(
        tmp_path / "p", rewritten(saved["levels"], patterns=table), r"jacobians\[\d\] has shape"
    )


def test_nothing_is_unpickled(tmp_path: Path, saved: dict[str, bytes]) -> None:
    contents = file_of(arrays_of(saved["levels"]) | {"ops": bomb()})
    assert_refused(tmp_path / "p", contents, "allow_pickle=False")
