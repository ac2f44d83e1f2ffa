"""Equal bits whatever the number of threads; plans shared by threads and by forked children."""

from __future__ import annotations

import hashlib
import importlib
import os
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numba
import numpy as np
import pytest
from fresh_python import run_python
from oracles import assert_within, every_schedule, indices_of, mask, same_bits, sequential
from sampling import slow, times

import sparsescan
import sparsescan.execution.stages
from sparsescan import BatchedCSR, CSRChain
from sparsescan.execution import threads as _threads
from sparsescan.execution.recording import Recorder, Recording, Space, _unpack
from sparsescan.kernels.cpu.memory import clock, fetch_add, load
from sparsescan.kernels.cpu.run import abort
from sparsescan.kernels.cpu.tables import ABORTED, Run, Tables
from sparsescan.kernels.cpu.waiting import POSTED, WAITING, WORDS, await_call, await_end, replay

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


# ---------------------------------------------------------------------------------------------
# The number of threads
# ---------------------------------------------------------------------------------------------


def cases():
    """Chains that are cut between runs, between samples and between rows."""
    rng = np.random.default_rng(0)
    size = 23
    where = mask(rng, "sparse", size, size) | np.eye(size, dtype=bool)
    indices, indptr = indices_of(where)

    def csr(*leading):
        data = 0.5 * rng.standard_normal((*leading, len(indices)))
        return CSRChain(data, indices, indptr, (size, size))

    def dense(*leading):
        return 0.2 * rng.standard_normal((*leading, size, size))

    yield "csr", csr(37), ()
    yield "csr, shared by a batch", csr(37), (5,)
    yield "csr, shared by eleven", csr(37), (11,)
    yield "batched csr", csr(37, 5), (5,)
    yield "dense", dense(37), ()
    yield "batched dense", dense(37, 5), (5,)
    few = csr(3, 4).data
    mixed = [*dense(2), BatchedCSR(few[0], indices, indptr, (size, size)), *dense(2), *dense(2, 4)]
    yield "some steps batched", mixed, (4,)
    wide = csr(6)
    wide.data[:] *= np.logspace(-200, 200, 6)[:, None]
    yield "scaled", CSRChain(wide.data, indices, indptr, (size, size)), ()
    holes = dense(9)
    holes[4, 3, 3] = np.nan
    yield "not finite", holes, ()
    moved = np.eye(size, dtype=bool)[rng.integers(0, size, size)]
    single = CSRChain(rng.standard_normal((37, size)), *indices_of(moved), (size, size))
    yield "one entry in a row", single, ()
    yield "one entry in a row, shared by eleven", single, (11,)


CASES = {name: (jacobians, leading) for name, jacobians, leading in cases()}


@pytest.mark.parametrize("local", [False, True], ids=["plain", "local gradients"])
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_threads_gives_the_same_bits(name, local, with_threads):
    jacobians, leading = CASES[name]
    n, size = len(jacobians), 23
    rng = np.random.default_rng(1)
    grad = rng.standard_normal((*leading, size))
    local_grads = list(rng.standard_normal((n, *leading, size))) if local else None
    for schedule in every_schedule(n):
        plan = sparsescan.plan(jacobians, schedule=schedule)
        seen = set()
        for threads in (1, 2, 3, 5, 2, 1):
            with_threads(threads)
            result = plan.exclusive_scan(grad, jacobians, local_grads=local_grads)
            seen.add(hashlib.sha256(np.array(result).tobytes()).hexdigest())
        assert len(seen) == 1, schedule
        if name not in ("scaled", "not finite"):
            assert_within(result, sequential(grad, jacobians, local_grads), np.float64)


@pytest.mark.parametrize("name", [name for name in CASES if "shared" in name])
def test_a_sample_has_the_bits_that_it_has_alone(name, with_threads):
    jacobians, leading = CASES[name]
    grad = np.random.default_rng(1).standard_normal((*leading, 23))
    for schedule in every_schedule(len(jacobians)):
        plan = sparsescan.plan(jacobians, schedule=schedule)
        with_threads(1)
        alone = [plan.exclusive_scan(sample, jacobians) for sample in grad]
        for threads in (1, 2, 3, 5):
            with_threads(threads)
            together = plan.exclusive_scan(grad, jacobians)
            assert same_bits(together.swapaxes(0, 1), alone), schedule


def test_the_cases_are_cut_into_pieces(with_threads):
    """So that the test above tests something: several units, of every kind of work."""
    kinds = set()
    for jacobians, leading in CASES.values():
        for schedule in every_schedule(len(jacobians)):
            with_threads(3)
            plan = sparsescan.plan(jacobians, schedule=schedule)
            plan.exclusive_scan(np.ones((*leading, 23)), jacobians)
            for slot in plan._idle:
                for workspace in slot.workspaces.values():
                    kinds |= {(row[0], row[2] > 1) for row in workspace._stages.stages.tolist()}
    work = sparsescan.kernels.cpu.tables.Work
    for kind in (work.RUNS, work.VECTOR, work.CHECK, work.MULTIPLY):
        assert (kind, True) in kinds
    assert (work.SETTLE, False) in kinds


CSR_SHA = """
    import hashlib, numpy as np
    from numba import config, njit
    from sparsescan.kernels.cpu.matvec import csr_matvec
    multiply = njit(lambda *arguments: csr_matvec(*arguments))
    rng = np.random.default_rng(0)
    sha = hashlib.sha256()
    lengths = np.arange(41)
    indptr = np.append(0, lengths.cumsum())
    indices = rng.integers(0, 50, indptr[-1])
    for dtype in (np.float32, np.float64):
        m, x = rng.standard_normal(len(indices)).astype(dtype), rng.standard_normal((50, 8))
        for read in (x[:, 0].astype(dtype), x.astype(dtype)):
            y = np.zeros(8 * 41, dtype)
            multiply(0, 41, indptr, indices, m, read, y, 41, 8, None)
            sha.update(y.tobytes())
    print(config.CPU_NAME, sha.hexdigest())
"""


@pytest.mark.slow
def test_processors_without_wide_vectors_give_the_same_bits(tmp_path):
    """For products of CSR matrices, where sums of eight samples take several smaller vectors."""
    _, here = run_python(CSR_SHA, tmp_path).split()
    environment = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    assert run_python(CSR_SHA, tmp_path, **environment).split() == ["generic", here]


# ---------------------------------------------------------------------------------------------
# Several threads of the caller
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
def test_one_plan_in_eight_threads_at_once(threads, with_threads):
    """With different values, dtypes, batches and local gradients; each gets its own answer.

    Errors of some leave the others alone.
    """
    with_threads(threads)
    n, size = 40, 9
    plan = sparsescan.plan(np.zeros((n, size, size)), schedule="blelloch")
    start = threading.Barrier(8)

    def work(seed):
        rng = np.random.default_rng(seed)
        dtype = np.dtype([np.float32, np.float64][seed % 2])
        leading = [(), (3,)][seed // 2 % 2]
        start.wait()
        for _ in range(15):
            jacobians = (0.3 * rng.standard_normal((n, *leading, size, size))).astype(dtype)
            grad = rng.standard_normal((*leading, size)).astype(dtype)
            local = list(rng.standard_normal((n, *leading, size)).astype(dtype))
            local = local if seed >= 4 else None
            result = plan.exclusive_scan(grad, jacobians, local_grads=local)
            assert_within(result, sequential(grad, jacobians, local, dtype=dtype), dtype)
            with pytest.raises(sparsescan.InputError):
                plan.exclusive_scan(grad, jacobians[..., :4])
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


# ---------------------------------------------------------------------------------------------
# Forks
# ---------------------------------------------------------------------------------------------

FORKS = """
    import os, signal, sys, threading
    import numpy as np, scipy.sparse as sp, sparsescan, sparsescan.execution.stages

    sparsescan.execution.stages.RUN_GRAIN = sparsescan.execution.stages.ROW_GRAIN = 1
    rng = np.random.default_rng(0)
    jacobians, grad = 0.2 * rng.standard_normal((40, 12, 12)), rng.standard_normal(12)
    plan = sparsescan.plan(jacobians, schedule="blelloch")
    expected = plan.exclusive_scan(grad, jacobians)
    sparse = sp.random_array((300, 300), density=0.01, rng=rng) + 5 * sp.eye_array(300)
    sparse = sp.csr_array(sparse)
    solves = [sparsescan.SolveStep(sparse), sparsescan.SolveStep(2 * sparse)] * 5
    solver = sparsescan.plan(solves)
    solved = solver.inclusive_scan(np.ones(300), solves)

    def child():
        signal.alarm(60)  # a child that hangs is killed, and seen
        same = (plan.exclusive_scan(grad, jacobians) == expected).all()
        same &= np.array_equal(solver.inclusive_scan(np.ones(300), solves), solved)
        more = [sparsescan.SolveStep(k * sparse) for k in range(1, 11)]
        same &= np.isfinite(solver.inclusive_scan(np.ones(300), more)).all()
        where = rng.random((6, 6)) < 0.5
        chain = [where * 1.0] * 5
        other = sparsescan.exclusive_scan(np.ones(6), chain, schedule="blelloch")
        return same and np.isfinite(other).all()

    def fork_and_wait():
        pid = os.fork()
        if pid == 0:
            os._exit(0 if child() else 1)
        assert os.waitpid(pid, 0)[1] == 0, "the child failed"
"""


@needs_fork
def test_a_plan_works_in_a_forked_child(tmp_path):
    code = textwrap.dedent(FORKS) + textwrap.dedent("""
        for _ in range(5):
            fork_and_wait()
            assert child()
    """)
    run_python(code, tmp_path, NUMBA_NUM_THREADS="3")


@pytest.mark.slow
@needs_fork
def test_forks_while_other_threads_are_scanning(tmp_path):
    """Locks and workers that the others hold at that moment are none of the child's.

    Numba's workqueue, which no two threads may enter at once, is none of a scan's.
    """
    code = textwrap.dedent(FORKS) + textwrap.dedent("""
        import numba, warnings
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        from sparsescan import Pattern
        stop = threading.Event()
        wrong = []

        @numba.njit(parallel=True)
        def total(x):
            sum = 0.0
            for i in numba.prange(len(x)):
                sum += x[i]
            return sum

        assert total(np.ones(1000)) == 1000
        assert numba.threading_layer() == "workqueue"

        def scan(seed):
            rng = np.random.default_rng(seed)
            while not stop.is_set():
                if not (plan.exclusive_scan(grad, jacobians) == expected).all():
                    wrong.append(seed)
                rows = np.sort(rng.choice(9, 4, replace=False))
                pattern = Pattern([0, 4], rows, (1, 9))
                sparsescan.plan([pattern])

        threads = [threading.Thread(target=scan, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(30):
                fork_and_wait()
                assert total(np.ones(1000)) == 1000
        finally:
            stop.set()
        for thread in threads:
            thread.join()
        assert not wrong
    """)
    run_python(code, tmp_path, NUMBA_THREADING_LAYER="workqueue", NUMBA_NUM_THREADS="3")


def test_a_thread_may_outlive_the_main_one(tmp_path):
    """No worker can be started then; the thread's scans go on without."""
    code = """
        import threading, numpy as np, sparsescan, sparsescan.execution.stages
        sparsescan.execution.stages.RUN_GRAIN = 1
        jacobians, grad = np.full((40, 4, 6, 6), 0.1), np.ones((4, 6))
        expected = sparsescan.exclusive_scan(grad, jacobians, schedule="blelloch")

        def late():
            threading.main_thread().join()
            result = sparsescan.exclusive_scan(grad, jacobians, schedule="blelloch")
            print((result == expected).all())

        threading.Thread(target=late).start()
    """
    assert run_python(code, tmp_path, NUMBA_NUM_THREADS="2").strip() == "True"


def test_a_thread_that_fails_lets_nobody_wait(monkeypatch):
    """Its unit will never be done: who waits for that is let go, and the error is raised."""
    monkeypatch.setattr(_threads, "_crew", None)
    tables = Tables(np.zeros(Run.WIDTH, np.int64), *[None] * 4)

    def kernel(t, thread):
        if thread == 1:
            raise MemoryError("no room")
        give_up = time.monotonic() + 30
        while t.run[Run.DONE] == 0:
            assert time.monotonic() < give_up
            time.sleep(0.001)

    with pytest.raises(MemoryError, match="no room"):
        _threads.work(kernel, tables, 2)
    assert tables.run[Run.STATUS] == ABORTED


@pytest.mark.skipif(
    not hasattr(time, "pthread_getcpuclockid"), reason="no clock of another thread can be read"
)
@pytest.mark.parametrize("share", ["a quarter or more", "next to nothing"])
def test_helpers_leave_a_run_that_waits_for_a_quarter_of_its_time(share, with_threads, monkeypatch):
    """Where another program has its core, a thread is late; here the test is that thread.

    It claims one of two units that share the rows of a step, and ends it once the helper has waited
    long enough. Then the helper ends what it has claimed meanwhile, and leaves the rest; or it goes
    on, if that was a small part of the time that the run has taken.
    """
    rng = np.random.default_rng()
    jacobians, grad = rng.standard_normal((2, 12, 24, 24)), rng.standard_normal(24)
    plan = sparsescan.plan(jacobians[0], schedule="linear")
    with_threads(1)
    expected = [plan.exclusive_scan(grad, each) for each in jacobians]
    with_threads(2)
    runs = []

    def work_late(kernel, tables, threads, nanoseconds):
        assert threads == 2
        run, give_up = tables.run, time.monotonic() + 60
        started = int(run[Run.STARTED])
        assert 0 <= time.monotonic_ns() - started < 60e9
        if share == "next to nothing":
            run[Run.STARTED] -= 3_600_000_000_000
        first = tables._replace(run=run.copy())
        first.run[Run.UNITS] = run[Run.NEXT] = 1
        helper = threading.Thread(target=kernel, args=(tables, 1))
        helper.start()

        def wait_until(come):
            while not come():
                if time.monotonic() > give_up:
                    abort(tables)
                assert helper.is_alive()
                time.sleep(0.001)

        # The helper has done the other unit, and claimed one of the next step. Then it waits, from
        # its first microseconds on, and as long again as the run has taken until then.
        wait_until(lambda: run[Run.NEXT] == 3)
        clock = time.pthread_getcpuclockid(helper.ident)
        waits = time.clock_gettime(clock) + 2e-4
        wait_until(lambda: time.clock_gettime(clock) > waits)
        end = 2 * time.monotonic_ns() - started
        wait_until(lambda: time.monotonic_ns() > end)
        kernel(first, 0)
        run[Run.DONE] += 1
        helper.join()
        runs.append((int(run[Run.DONE]), int(run[Run.UNITS])))
        kernel(tables, 0)

    workspace = importlib.import_module("sparsescan.execution.workspace")
    monkeypatch.setattr(workspace, "work", work_late)
    for each, gradients in zip(jacobians, expected, strict=True):
        assert same_bits(plan.exclusive_scan(grad, each), gradients)
    assert runs == [(3 if share == "a quarter or more" else 22, 22)] * 2


# ---------------------------------------------------------------------------------------------
# Interrupts
# ---------------------------------------------------------------------------------------------

INTERRUPT = """
    import os, signal, sys, threading, time
    import numpy as np, sparsescan
    from sparsescan.execution import threads as _threads
    from sparsescan.kernels.cpu.tables import ABORTED, Run, FINISHED, Tables
    from sparsescan.kernels.cpu.run import abort

    # A shell starts what it runs in the background with interrupts ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt_in(*seconds):
        for k in seconds:
            threading.Timer(k, os.kill, (os.getpid(), signal.SIGINT)).start()
        return time.monotonic()
"""

needs_signals = pytest.mark.skipif(os.name != "posix", reason="no signal can be sent to oneself")


@needs_signals
@pytest.mark.parametrize("threads", [3, *slow(1)])
def test_an_interrupt_ends_kernels_that_would_never_end(threads, tmp_path):
    """However often it comes; and when it is raised, none of them runs any more."""
    code = textwrap.dedent(INTERRUPT) + textwrap.dedent("""
        from numba import njit
        from sparsescan.kernels.cpu.memory import fetch_add, load, relax

        @njit(nogil=True)
        def run_until_aborted(t, thread):
            fetch_add(t.run, Run.OPERANDS, 1)
            while load(t.run, Run.STATUS) == FINISHED:
                relax(np.int64(2000))
            fetch_add(t.run, Run.OPERANDS, -1)

        empty = np.empty(0)
        tables = Tables(np.zeros(Run.WIDTH, np.int64), empty, empty, empty, empty)
        abort(tables)
        run_until_aborted(tables, 0)  # it is compiled
        tables.run[:] = 0
        start = interrupt_in(0.5, 0.5, 0.6)
        try:
            _threads.work(run_until_aborted, tables, int(sys.argv[1]), nanoseconds=1e12)
        except KeyboardInterrupt:
            running, seconds = tables.run[Run.OPERANDS], time.monotonic() - start
        try:
            time.sleep(1)  # for those that are left
        except KeyboardInterrupt:
            pass
        print(running, seconds < 10)
    """)
    code = f"import sys\nsys.argv = ['', {threads}]\n{code}"
    assert run_python(code, tmp_path, NUMBA_NUM_THREADS="3").split() == ["0", "True"]


@pytest.mark.slow
@needs_signals
@pytest.mark.parametrize("schedule", ["linear", "blelloch"])
def test_an_interrupt_ends_a_long_scan(schedule, tmp_path):
    """In the middle of its one run of vectors, and of its one product of matrices."""
    code = (
        f"schedule = {schedule!r}\n"
        + textwrap.dedent(INTERRUPT)
        + textwrap.dedent("""
        def chain(cost):
            # About so many multiply-adds, in steps that are all one array.
            size = 256 if schedule == "linear" else int(cost ** (1 / 3))
            steps = int(cost / size**2) if schedule == "linear" else 4
            step = np.full((size, size), 1 / size, np.float32)
            return np.ones(size, np.float32), np.broadcast_to(step, (steps, size, size))

        def timed(grad, jacobians):
            plan = sparsescan.plan(jacobians, schedule=schedule)
            start = time.monotonic()
            plan.exclusive_scan(grad, jacobians)
            return time.monotonic() - start

        cost = 3e8
        timed(*chain(1e6))  # it is compiled
        grad, jacobians = chain(cost * max(1.0, min(4.0 / timed(*chain(cost)), 50.0)))
        plan = sparsescan.plan(jacobians, schedule=schedule)
        start = interrupt_in(0.3)
        try:
            plan.exclusive_scan(grad, jacobians)
            print("too fast to be interrupted")
        except KeyboardInterrupt:
            print(time.monotonic() - start < 1.5)
        small = np.full((3, 4, 4), 0.25, np.float32)
        assert (sparsescan.exclusive_scan(np.ones(4, np.float32), small) == 1).all()
    """)
    )
    printed = run_python(code, tmp_path).strip()
    if printed != "True":
        assert printed == "too fast to be interrupted"
        pytest.skip(printed)


def test_short_scans_and_other_threads_have_no_thread_of_their_own(monkeypatch):
    def start(*arguments):
        raise AssertionError("a thread was started")

    monkeypatch.setattr(_threads, "_start", start)
    jacobians = np.full((100, 4, 4), 0.25)
    assert (sparsescan.exclusive_scan(np.ones(4), jacobians) == 1).all()
    monkeypatch.setattr(_threads, "LONG", 0)
    with ThreadPoolExecutor(1) as pool:
        assert (pool.submit(sparsescan.exclusive_scan, np.ones(4), jacobians).result() == 1).all()
    with pytest.raises(AssertionError, match="a thread was started"):
        sparsescan.exclusive_scan(np.ones(4), jacobians)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_thread_in_place_of_the_main_one_gives_the_same(threads, with_threads, monkeypatch):
    jacobians = 0.2 * np.random.default_rng(0).standard_normal((40, 12, 12))
    plan = sparsescan.plan(jacobians, schedule="blelloch")
    with_threads(threads)
    expected = plan.exclusive_scan(np.ones(12), jacobians)
    monkeypatch.setattr(_threads, "LONG", 0)
    assert same_bits(plan.exclusive_scan(np.ones(12), jacobians), expected)


def test_an_error_in_the_place_of_the_main_thread_is_raised_here():
    tables = Tables(np.zeros(Run.WIDTH, np.int64), *[None] * 4)

    def kernel(t, thread):
        raise MemoryError(threading.current_thread() is threading.main_thread())

    with pytest.raises(MemoryError, match="False"):
        _threads.work(kernel, tables, 1, nanoseconds=1e12)
    assert tables.run[Run.STATUS] == ABORTED


def test_no_system_without_threads_is_left_waiting(monkeypatch):
    """Where none can be started, the main thread does its own work."""

    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(_threads, "_crew", None)
    monkeypatch.setattr(_threads, "LONG", 0)
    assert (sparsescan.exclusive_scan(np.ones(4), np.full((9, 4, 4), 0.25)) == 1).all()


def test_parts_are_taken_once_by_callers_that_share_helpers(monkeypatch):
    """Helpers that are awake, asleep or late, and callers of which some fail."""
    crew = _threads.Crew(3)
    monkeypatch.setattr(_threads, "_crew", crew)
    monkeypatch.setattr(_threads, "thread_count", lambda: 4)

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(300):
            parts, fails, taken = rng.integers(2, 9), rng.random() < 0.1, []
            pause = rng.choice([0, 0, 1e-5, 5e-4])

            def call(part, pause=pause, fails=fails, taken=taken):
                time.sleep(pause)
                taken.append(part)
                if fails and part == 1:
                    raise ValueError("part 1")

            if fails:
                with pytest.raises(ValueError, match="part 1"):
                    _threads.share(call, parts)
                assert len(set(taken)) == len(taken)
            else:
                _threads.share(call, parts)
                assert sorted(taken) == list(range(parts))
            time.sleep(rng.choice([0, 1e-4, 5e-4]))
        return True

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))
    assert {thread.name for thread in crew._threads} == {"sparsescan"}
    crew.close()
    assert not any(thread.is_alive() for thread in crew._threads)


def test_a_call_that_is_taken_is_waited_for_and_another_is_not_made():
    crew, begun, end, made = _threads.Crew(1), threading.Event(), threading.Event(), []

    def run():
        begun.set()
        assert end.wait(60)
        made.append("first")

    calls = [_threads._PostedCall(run, ()), _threads._PostedCall(made.append, ("second",))]
    for call in calls:
        crew.post(call)
    assert begun.wait(60)
    assert not calls[0].cancel()
    assert calls[1].cancel()
    threading.Timer(0.05, end.set).start()
    calls[0].wait()
    assert made == ["first"]
    crew.close()
    assert made == ["first"]
    assert calls[0].error is calls[1].error is None


def test_who_waits_is_told_of_a_call_or_of_none():
    words, ended = np.zeros(WORDS, np.int64), np.zeros(1, np.int64)
    assert not await_end(ended, 1000)
    assert not await_call(words, 0, ended, 1000, 0)
    assert ended[0] == 1
    assert await_end(ended, 0)
    threading.Timer(0.05, words.__setitem__, (POSTED, 7)).start()
    assert await_call(words, 0, ended, 60_000_000_000, 1000)
    assert words[WAITING] == 0


@numba.njit(nogil=True)
def meet(words, others, nanoseconds):
    """Note a thread, and in the second word whether so many have come in time."""
    fetch_add(words, 0, 1)
    end = clock() + nanoseconds
    while load(words, 0) < others:
        if clock() > end:
            return
    fetch_add(words, 1, 1)


def meeting(threads: int) -> Recording:
    """Return calls of which each waits for the others, so that each needs a thread of its own."""
    recorder = Recorder(Space(0), 2)
    words = recorder.array(1, (2,), np.int64)
    recorder.together([partial(recorder.launch, meet, words, threads, 10**10)] * threads)
    return recorder.recording()


@numba.njit
def replay_and_keep_the_gil(words, header, arrays, control):
    replay(words, header, arrays, control)


@pytest.fixture
def crew(monkeypatch):
    """Two helpers that do not fall asleep, of callers with three threads."""
    crew = _threads.Crew(2)
    monkeypatch.setattr(_threads, "_crew", crew)
    monkeypatch.setattr(_threads, "_AWAKE", 10**11)
    monkeypatch.setattr("sparsescan.execution.recording.thread_count", lambda: 3)
    yield crew
    crew.close()


def test_helpers_take_part_in_replays_without_the_gil(crew):
    recording, words = meeting(3), np.zeros(2, np.int64)
    recording.run([np.zeros(1), words])
    assert words.tolist() == [3, 3]
    for _ in range(100):
        control, words = np.empty(recording.words, np.int64), np.zeros(2, np.int64)
        addresses = np.array([0, words.ctypes.data])
        replay_and_keep_the_gil(crew._words, recording.header, addresses, control)
        assert words.tolist() == [3, 3]
    assert crew._words[WAITING] == 2


class Pair(NamedTuple):
    first: object
    second: object


class OtherPair(NamedTuple):
    first: object
    second: object


def random_argument(rng, depth=2):
    """Return a number, an array of any layout, or a tuple of these."""
    kind = rng.integers(7 if depth else 5)
    if kind == 0:
        return int(rng.integers(-9, 9))
    if kind == 1:
        return bool(rng.integers(2))
    if kind == 2:
        return rng.choice([np.int32, np.int64, np.uint8, np.bool_])(1)
    if kind < 5:
        dtype = rng.choice([np.float32, np.float64, np.int64, np.uint8])
        array = np.zeros(rng.integers(0, 4, rng.integers(1, 4)), dtype)
        array = array.T if rng.random() < 0.3 else array
        array = array[::2] if rng.random() < 0.3 else array
        array.flags.writeable = rng.random() < 0.7
        return array
    parts = [random_argument(rng, depth - 1) for _ in range(2)]
    return (tuple, Pair._make, OtherPair._make)[rng.integers(3)](parts)


def words_of(value):
    if isinstance(value, tuple):
        return [word for part in value for word in words_of(part)]
    if not isinstance(value, np.ndarray):
        return [int(value)]
    where = value.__array_interface__["data"][0]
    return [0, 0, value.size, value.itemsize, where, *value.shape, *value.strides]


def test_a_recording_calls_the_code_for_the_types_of_its_arguments():
    """What tells them apart takes less time than Numba's types, and has no fewer of them."""
    rng, types = np.random.default_rng(0), {}
    for _ in range(times(2000)):
        arguments, words = (random_argument(rng), random_argument(rng)), []
        key = _unpack(arguments, words, {})
        own = numba.typeof(arguments)
        assert types.setdefault(key, own) == own
        assert words == words_of(arguments)
    assert len(set(types.values())) > 500


def test_a_program_ends_while_helpers_look_out_for_calls(tmp_path):
    code = """
        import numpy as np
        from sparsescan.recurrent import RNN
        step = RNN(3, 20, rng=0).training_step()
        for _ in range(2):
            step.forward(np.zeros((1000, 16, 3)))
        print("end")
    """
    for _ in range(3):
        assert run_python(code, tmp_path, NUMBA_NUM_THREADS="3").strip() == "end"


def test_helpers_that_look_out_for_calls_allocate_nothing(tmp_path):
    """Without the GIL they must not: Python's counts of memory may end at any time."""
    code = """
        import tracemalloc
        from sparsescan.execution.threads import Crew, _PostedCall
        crew = Crew(3)
        for _ in range(20_000):
            crew.post(_PostedCall(int, ()))
            tracemalloc.start()
            tracemalloc.stop()
        print("end")
    """
    assert run_python(code, tmp_path).strip() == "end"


def test_parts_that_are_left_are_not_taken_after_an_error(with_threads, monkeypatch):
    with_threads(3)
    monkeypatch.setattr(_threads, "thread_count", lambda: 3)
    main, taken = threading.main_thread(), []

    def call(part):
        taken.append(part)
        if threading.current_thread() is main:
            raise KeyboardInterrupt
        time.sleep(0.005)

    with pytest.raises(KeyboardInterrupt):
        _threads.share(call, 2000)
    assert len(taken) < 100
