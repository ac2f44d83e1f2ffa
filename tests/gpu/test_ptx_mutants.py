"""Each barrier and fence of every kernel is left out, each bound shifted: which launches tell."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the test extra installs numba-cuda on Linux only"
)
pytest.importorskip("numba_cuda")

from numba import cuda, int64, void  # noqa: E402
from ptx import FaultError, Program, lower  # noqa: E402
from ptx.mutation_run import KERNELS, TABLE, run, table_of  # noqa: E402

from sparsescan.kernels.cuda.device import load, store  # noqa: E402

I8 = np.int64(0)

# Barriers that launches do without, one by one, and why.
NOT_NEEDED = {
    "rescale": ["a fence behind each share: here one block takes all shares, and fences the next"],
    "carry": ["the first: a thread sets what it alone changes later, or is read behind the next"],
}
# Bounds that may be shifted, one by one, beyond those of `min` and `max`, and of `range`, and why.
LANES = "matvec, the first doubling of lanes: any number of lanes for a row gives its sum"
HALF = "matvec, half of one lane: one turn more, in which no thread has a partner"
GROUPS = "matvec, the end of the groups of rows: one turn more, past the last row"
CLEARED = "rescale_share, the end of what is cleared: one turn more, which clears nothing"
OUTSIDE = "rescale_share, the end of the exponents: behind is what is set in a later phase"
FLAG = "rescale_share, the end of the exponents: one more is the flag, which is set in the end"
NO_EXPONENT = "noted, none: one below all others stands for it as well as the one below that"
LDEXP = "scale: 2^100 is made exactly in either of the two ways that libdevice's ldexp has"
TURNS = "the end of a loop over steps: each turn looks whether its step is there"
SEGMENT = "whether the gates of all steps are kept: nothing comes before the one segment"
SLOPES = "where slopes are, before it is known whether a thread has a chain: zero if it has none"
CHANCE = "one that only some orders of threads tell, which differ from run to run"
CACHE = "a step, or a value, more is brought to the cache, which nothing reads"
ANY_BOUND = {
    "vectors": [HALF, GROUPS, *4 * [LDEXP]],
    "level": [
        *2 * ["multiply_full, the end of the groups of rows: one turn more, which stores no row"],
        "multiply_full, the end of a row: one turn more, which adds nothing",
        *2 * ["multiply_sparse, the end of the segments: one turn more, without segments"],
        *2 * ["multiply_sparse, the end of the factors: one turn more, without factors"],
        *2 * ["multiply_sparse, the end of those that are loaded: one turn more, without factors"],
        *[CLEARED, OUTSIDE, *2 * [FLAG], NO_EXPONENT],
        "rescale_alone, the end of the phases: the last one twice",
        *[*3 * [LANES], HALF, *2 * [GROUPS], *3 * [LDEXP]],
    ],
    "rescale": [
        "rescale_together, who waits in the end: others may as well",
        "rescale_together, the first look at the shares that are done: another follows",
        "matvec, the largest term of a row: a larger one of the next changes no bits of the sum",
        *[CLEARED, OUTSIDE, *2 * [NO_EXPONENT], GROUPS, *5 * [LDEXP]],
    ],
    "sweep_steps": [
        *3 * ["a row of the table, or an address, of the step behind the last, which is not made"],
        *9 * [CACHE],
        *3 * ["values: one behind the last is loaded, and not multiplied"],
        *6 * ["columns: that of an entry behind the last, which is not multiplied"],
        *4 * ["where rows begin: one row more, which is not added up"],
        "local gradients: one is loaded for a row that is not there",
        *8 * ["terms: one behind the last, which no row has"],
    ],
    "multiply": [
        "the copy of `present` before a step: one chain more computes, and stores nothing",
        "the end of a row: behind it are zeros, as far as its pitch",
    ],
    "chained": [
        "the end of the rows of slopes: one turn more, which loads zeros",
        *2 * ["slopes: a row behind those of the chunk, which nothing reads before it is written"],
        *2 * ["the product of a piece behind the last, or of none, which is not applied"],
        "the end of the pieces of a sample: one product more, behind which is nothing",
        "the end of the vectors: one more is cleared, of the team's own columns",
        *8 * ["local gradients: one is loaded for a step behind the last, which is not made"],
        CHANCE,
        *2 * [TURNS],
    ],
    "multiply of implicit steps": [
        *3 * ["copies of `present`: one chain more computes, and stores nothing"],
        *8 * [SLOPES],
        "the step behind the last of a chunk, which is made, and not multiplied",
        *5 * ["slopes behind the last of a chunk, which are loaded, or stored, and make no step"],
        "the end of a row: behind it are zeros, as far as its pitch",
    ],
    "sweep of implicit steps": [
        *3 * ["slopes behind the last of a chunk, or of no chain, which are loaded first"],
        "slopes behind the last of a chunk, which are loaded ahead",
        "whether a chain is there: one that is not has no steps",
        TURNS,
    ],
    "repair of implicit steps": [
        "a sample more: it is the first one of the next step, whose gradients are made twice",
        *2 * ["weights of slopes that are not there, by zeros as long as gradients are finite"],
        "whether a step is there: the loop ends with the last",
        "whether a chain is there: one that is not has no steps",
        TURNS,
    ],
    "multiply of two unknowns for each unit": [
        "the last column, where `carry` finds as well what is not finite",
        CHANCE,
        *2 * ["copies of `present`: one chain more computes, and stores nothing"],
        "the end of the weights of a thread: one place more, to which a slope comes later",
        *4 * [SLOPES],
        "the step behind the last of a chunk, which is made, and not multiplied",
        *5 * ["slopes behind the last of a chunk, which are loaded, or stored, and make no step"],
    ],
    "sweep of two unknowns for each unit": [
        "a remainder of zero: a weight that is read seems not to be, and the linear scan decides",
        "slopes behind the last of a chunk, or of no chain, which are loaded first",
        "slopes behind the last of a chunk, which are loaded ahead",
        "whether a chain is there: one that is not has no steps",
        TURNS,
    ],
    "repair of two unknowns for each unit": [
        "a sample more: it is the first one of the next step, whose gradients are made twice",
        *2 * ["slopes that are not there, by zeros as long as gradients are finite"],
        "whether a step is there: the loop ends with the last",
        "whether a chain is there: one that is not has no steps",
        TURNS,
    ],
    "carry": [TURNS],
    "sweep": [TURNS],
    "repair": [TURNS],
    "run of a GRU": [SEGMENT, CACHE],
    "back_sequence of a GRU": [SEGMENT, CACHE],
    "run of an LSTM": [
        "the biases of a thread: one without a unit reads those behind, and uses none",
        *[SEGMENT, CACHE],
    ],
    "back_sequence of an LSTM": [SEGMENT, CACHE],
    "run of an MGU": [SEGMENT, CACHE],
    "back_sequence of an MGU": [SEGMENT, CACHE],
    "run of cells with rows of parameters": [
        "the biases of a thread: one without a unit reads those behind, and uses none",
        *[SEGMENT, CACHE],
    ],
    "back_sequence of cells with rows of parameters": [
        "parameters of a thread: one without a unit reads those behind, and uses none",
        *[SEGMENT, CACHE],
    ],
}


@cuda.jit
def reversed_below(x, y, n):
    """Reverse the first `n` numbers; write the larger of each and 5."""
    shared = cuda.shared.array(64, int64)
    i = int64(cuda.threadIdx.x)
    if i < n:
        shared[i] = load(x, i, I8)
    cuda.syncthreads()
    cuda.threadfence()
    if i < n:
        store(y, i, max(shared[n - 1 - i], int64(5)), I8)


def launch(program: Program, n: int, mutation: int) -> list[int]:
    x, y = np.arange(64), np.full(64, -1)
    places = [x.ctypes.data, y.ctypes.data, n]
    memory = [(array.ctypes.data, array.nbytes) for array in (x, y)]
    program.launch(1, 64, places, memory, mutation=mutation)
    return y.tolist()


def test_a_launch_makes_one_mutation() -> None:
    text = lower(reversed_below.py_func, void(*[int64] * 3)).ptx("9.0")
    program = Program(text, "reversed_below", mutable=True)
    kinds = [mutation.kind for mutation in program.mutations]
    assert sorted(set(kinds)) == ["barrier", "bound", "fence"]
    right = [max(k, 5) for k in range(39, -1, -1)] + [-1] * 24
    assert launch(program, 40, 0) == right
    reached = program.different.copy()
    for number, kind in enumerate(kinds, 1):
        if kind == "barrier":
            with pytest.raises(FaultError, match="a race between threads"):
                launch(program, 40, number)
        elif kind == "fence" or not reached[number - 1]:
            assert launch(program, 40, number) == right
    told = [
        number
        for number, kind in enumerate(kinds, 1)
        if kind == "bound" and reached[number - 1] and is_told(program, number, right)
    ]
    assert told


def is_told(program: Program, number: int, right: list[int]) -> bool:
    try:
        return launch(program, 40, number) != right
    except FaultError:
        return True


@pytest.mark.release
def test_what_launches_tell_is_what_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other versions of Numba or NVVM there may be other instructions: then by shares."""
    counted, table = table_of(run(monkeypatch)), json.loads(TABLE.read_text())
    assert list(table) == list(KERNELS)
    for name in KERNELS:
        waits = [counted[name][kind] for kind in ("barrier", "fence")]
        undetected = sum(w["mutants"] - w["detected"] - w["no difference"] for w in waits)
        assert undetected <= len(NOT_NEEDED.get(name, [])), name
        bound = counted[name]["bound"]
        undetected = bound["mutants"] - sum(bound[key] for key in bound if key != "mutants")
        assert undetected <= len(ANY_BOUND.get(name, [])), name
        for kind, said in table[name].items():
            now = counted[name][kind]
            if now["mutants"] == said["mutants"]:
                # The order of threads is another one in each run.
                assert now["detected"] >= said["detected"] - 1, (name, kind, now)
            elif said["mutants"]:
                share = said["detected"] / said["mutants"]
                assert now["detected"] >= 0.8 * share * now["mutants"], (name, kind, now)
