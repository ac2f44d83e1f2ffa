"""Calls that are prepared for a shape: they answer from what there is now, by either kernel."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_checks import close

import sparsescan.torch
from sparsescan.errors import InputError, InputTypeError
from sparsescan.kernels.cpu.lanes import lanes, sample_lanes
from sparsescan.recurrent.catalogue import MGU
from sparsescan.torch import calibrate, explain
from sparsescan.torch.calls import prepared, times
from sparsescan.torch.calls.prepared import Prepared, only
from sparsescan.torch.calls.times import Key, TimeTable, name_of, predict

KINDS = ("RNN", "GRU", "LSTM")
Rng = np.random.Generator


def pair(kind: str, *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """Return PyTorch's module and ours, with the same parameters."""
    theirs = getattr(nn, kind)(*arguments, **options)
    ours = copy.deepcopy(theirs)
    sparsescan.torch.convert(ours)
    return theirs, ours


def prepared_calls() -> list[Prepared]:
    return [each for each in prepared._calls.values() if isinstance(each, Prepared)]


# -- What is there now -----------------------------------------------------------------------------


def in_place(module: Any, rng: Rng) -> None:
    with torch.no_grad():
        for each in module.parameters():
            each.mul_(0.9)


def by_an_optimiser(module: Any, rng: Rng) -> None:
    kind = (torch.optim.SGD, torch.optim.Adam)[rng.integers(2)]
    optimiser = kind(module.parameters(), 0.1)
    x = torch.ones(2, 3, module.input_size, dtype=module.weight_hh_l0.dtype)
    module(x)[0].square().sum().backward()
    optimiser.step()
    optimiser.zero_grad()


def by_data(module: Any, rng: Rng) -> None:
    weight = module.weight_hh_l0
    weight.data.add_(0.1)
    weight.data[0] = 0.3


def other_data(module: Any, rng: Rng) -> None:
    weight = module.weight_ih_l0
    weight.data = torch.full_like(weight, 0.2).t().contiguous().t()  # not contiguous, too


def by_numpy(module: Any, rng: Rng) -> None:
    module.weight_hh_l0.detach().numpy()[...] *= -1


def by_a_state_dict(module: Any, rng: Rng) -> None:
    state = {name: 0.5 * each for name, each in module.state_dict().items()}
    module.load_state_dict(state, assign=bool(rng.integers(2)))


def another_parameter(module: Any, rng: Rng) -> None:
    module.bias_ih_l0 = nn.Parameter(torch.full_like(module.bias_ih_l0, 0.1))


def freed_parameter(module: Any, rng: Rng) -> None:
    """Let the memory of the last one, and perhaps its identity, be used again."""
    for k in range(3):
        shape, dtype = module.weight_hh_l0.shape, module.weight_hh_l0.dtype
        del module.weight_hh_l0
        gc.collect(0)
        module.weight_hh_l0 = nn.Parameter(torch.full(shape, 0.1 * k, dtype=dtype))


def frozen(module: Any, rng: Rng) -> None:
    for each in module.parameters():
        each.requires_grad_(bool(rng.integers(2)))


def hooked(module: Any, rng: Rng) -> None:
    module.register_forward_hook(_twice)


def before_hooked(module: Any, rng: Rng) -> None:
    module.register_forward_pre_hook(_one_more)


def _twice(module: Any, args: Any, result: Any) -> Any:
    return result[0] * 2, result[1]


def _one_more(module: Any, args: Any) -> Any:
    return args[0] + 1, *args[1:]


def evaluated(module: Any, rng: Rng) -> None:
    module.train(bool(rng.integers(2)))


def other_order(module: Any, rng: Rng) -> None:
    module.batch_first = not module.batch_first


def tied(module: Any, rng: Rng) -> None:
    module.bias_hh_l0 = module.bias_ih_l0


EVENTS: dict[str, Callable[[Any, Rng], None]] = {
    each.__name__: each
    for each in (
        *(in_place, by_an_optimiser, by_data, other_data, by_numpy, by_a_state_dict),
        *(another_parameter, freed_parameter, frozen, hooked, before_hooked, evaluated),
        *(other_order, tied),
    )
}


def answers(module: Any, seed: int) -> list[Tensor | None]:
    """Return what a call and its backward pass do, of a form that is drawn."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    dtype = module.weight_hh_l0.dtype
    steps, batch = (int(n) for n in rng.integers(1, [5, 4]))
    is_batched, has_state = rng.random() < 0.8, rng.random() < 0.5
    shape = (batch, steps) if module.batch_first else (steps, batch)
    x = torch.randn(*(shape if is_batched else (steps,)), module.input_size, dtype=dtype)
    x.requires_grad_(rng.random() < 0.7)
    lead = module.num_layers * (1 + module.bidirectional)
    own = (lead, *((batch,) if is_batched else ()), module.hidden_size)
    hx: Any = None
    if has_state:
        hx = [torch.randn(own, dtype=dtype, requires_grad=rng.random() < 0.7) for _ in range(2)]
        hx = tuple(hx) if module.mode == "LSTM" else hx[0]
    if rng.random() < 0.2:
        with torch.no_grad():
            output, last = module(x, hx)
        return [output, *(last if isinstance(last, tuple) else (last,))]
    output, last = module(x, hx)
    lasts = last if isinstance(last, tuple) else (last,)
    loss = torch.zeros((), dtype=dtype)
    for each in (output, *lasts):
        if rng.random() < 0.6:
            loss = loss + (each * torch.randn_like(each)).sum()
    states = () if hx is None else hx if isinstance(hx, tuple) else (hx,)
    leaves = [each for each in (x, *states, *module.parameters()) if each.requires_grad]
    found = [output, *lasts]
    for _ in range(1 + int(rng.integers(2))):
        if loss.requires_grad and leaves:
            found += torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    return [None if each is None else each + 0 for each in found]


def zeros_for_none(found: list[Tensor | None], other: list[Tensor | None]) -> list[Tensor | None]:
    """PyTorch says None for some gradients that are 0, and others say 0."""
    pairs = zip(found, other, strict=True)
    return [torch.zeros_like(two) if one is None and two is not None else one for one, two in pairs]


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.sampled_from(sorted(EVENTS)), min_size=1, max_size=6),
    st.sampled_from(["sparsescan", "pytorch", ""]),
)
def test_no_call_answers_from_what_was(seed: int, names: list[str], kernels: str) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    kind = KINDS[rng.integers(3)]
    options = {name: bool(rng.integers(2)) for name in ("batch_first", "bidirectional")}
    dtype = (torch.float32, torch.float64)[rng.integers(2)]
    theirs, ours = pair(kind, 2, int(rng.integers(1, 20)), 1, dtype=dtype, **options)

    def compare() -> None:
        for k in range(2):
            expected, actual = answers(theirs, seed + k), answers(ours, seed + k)
            close(zeros_for_none(actual, expected), zeros_for_none(expected, actual))

    with only(kernels or "sparsescan"):
        if not kernels:
            prepared._only = None  # by whichever is faster
        compare()
        for k, name in enumerate(names):
            for module in (theirs, ours):
                torch.manual_seed(k)
                EVENTS[name](module, np.random.default_rng(seed + k))
            compare()
            if rng.integers(4) == 0:
                ours = pickle.loads(pickle.dumps(ours)) if rng.integers(2) else copy.deepcopy(ours)


def test_functional_calls_have_the_parameters_they_are_given() -> None:
    theirs, ours = pair("GRU", 2, 3, dtype=torch.float64)
    x = torch.randn(4, 2, 2, dtype=torch.float64)
    with only("sparsescan"):
        for k in range(3):
            given = {name: each * k for name, each in theirs.state_dict().items()}
            results = [torch.func.functional_call(each, given, (x,)) for each in (ours, theirs)]
            close(*results)
        close(ours(x), theirs(x))
        assert prepared_calls()


def test_two_threads_at_once() -> None:
    theirs, ours = pair("LSTM", 3, 40, dtype=torch.float64)

    def work(seed: int) -> None:
        for k in range(30):
            torch.manual_seed(seed + k)
            x = torch.randn(5, 3, 3, dtype=torch.float64, requires_grad=True)
            found = []
            for module in (theirs, ours):
                output, _ = module(x)
                found.append([output, *torch.autograd.grad(output.square().sum(), [x])])
            close(*found)

    with only("sparsescan"), ThreadPoolExecutor(3) as pool:
        list(pool.map(work, (0, 100, 200)))  # raises what they do


def test_memory_is_used_again_with_and_without_a_backward_pass() -> None:
    _, ours = pair("GRU", 3, 5)
    x = torch.randn(4, 2, 3)
    with only("sparsescan"):
        for _ in range(3):
            ours(x)  # whose graph is gone at once
            ours(x)[0].sum().backward()
        (call,) = prepared_calls()
        assert call.rooms.free == 1
        outputs = [ours(x)[0] for _ in range(3)]
        assert call.rooms.free == 0
        del outputs
        assert call.rooms.free == 3


def test_memory_that_others_need_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls stay prepared without it, and take it again."""
    monkeypatch.setattr(prepared, "_MOST_BYTES", 1 << 16)
    _, ours = pair("GRU", 3, 5)
    with only("sparsescan"):
        for _ in range(2):
            for steps in range(1, 60):
                ours(torch.randn(steps, 2, 3))
            calls = prepared_calls()
            nbytes = sum(each.free_bytes for each in calls)
            assert 0 < nbytes <= (1 << 16) + 2 * max(each.nbytes for each in calls)
            assert len(calls) == 59
        monkeypatch.setattr(prepared, "_MOST", 3)
        ours(torch.randn(70, 2, 3))
        assert len(prepared._calls) <= 3


def test_large_results_are_nobody_elses() -> None:
    _, ours = pair("GRU", 8, 64)
    x = torch.randn(200, 4, 8)
    with only("sparsescan"), torch.no_grad():
        kept = []
        for k in range(4):
            output, last = ours(x * k)
            kept.append((output, output.clone(), last, last.clone()))
        for output, same, last, other in kept:
            assert torch.equal(output, same)
            assert torch.equal(last, other)


# -- Which kernel ----------------------------------------------------------------------------------


def table(ours: float, theirs: float) -> TimeTable:
    """Return times that are the same for all sizes, but for the number of steps."""
    part = {"ours": [[[ours, 10 * ours]]], "theirs": [[[theirs, 10 * theirs]]]}
    names = [
        name_of(kind, has_backward, threads)
        for kind in KINDS
        for has_backward in (False, True)
        for threads in (1, 2)
    ]
    return TimeTable("made up", [8], [1], [1, 10], dict.fromkeys(names, part))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ours", "kernel"),
    [(1e-5, "sparsescan"), (0.9e-4, "sparsescan"), (0.95e-4, "pytorch"), (1e-3, "pytorch")],
)
def test_the_faster_kernel_is_taken(
    kind: str, ours: float, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "read_table", lambda: table(ours, 1e-4))
    theirs, module = pair(kind, 3, 5, dtype=torch.float64)
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    about = explain(module, x)
    assert about.kernel == kernel
    assert about.predicted is not None
    assert about.other is not None
    # A kernel that is faster by less than the margin is not taken.
    is_faster = about.predicted < about.other
    assert is_faster == (ours != 0.95e-4) == ("10% longer" not in about.reason)
    assert "4 steps of 2 samples" in str(about)
    assert "training" in str(about)
    with torch.no_grad():
        assert "inference" in explain(module, x).reason
    with only("sparsescan"):
        prepared._only = None
        for _ in range(8):
            close([module(x)[0]], [theirs(x)[0]])
        assert bool(prepared_calls()) == (kernel == "sparsescan")


def test_times_are_interpolated() -> None:
    own = table(1e-5, 1e-4)
    key = Key("GRU", 32, 8, 1, True, False, False, torch.float32, (1, 1, 32), False, False, 1)

    def ours(**changes: Any) -> float:
        found = predict(key._replace(**changes), own).ours
        assert found is not None
        return found

    assert ours() == pytest.approx(1e-5)
    assert ours(x=(10, 1, 32)) == pytest.approx(1e-4)
    # Between both, and behind the last.
    assert 1e-5 < ours(x=(3, 1, 32)) < 1e-4
    assert ours(x=(20, 1, 32)) == pytest.approx(2e-4)
    assert ours(num_layers=2) > ours()
    assert predict(key._replace(mode="MGU.123"), own) == (None, None)


@pytest.mark.parametrize(
    ("kind", "units", "computed"), [("RNN_TANH", 20, 16), ("GRU", 32, 16), ("LSTM", 64, 13)]
)
def test_times_are_those_of_as_many_samples_as_are_computed(
    kind: str, units: int, computed: int
) -> None:
    """By our kernels, which may fill up groups; PyTorch's fill up none."""
    if sample_lanes(np.dtype(np.float32)) == lanes(np.dtype(np.float32)):
        pytest.skip("vectors are those of AVX2")
    part = {who: [[[1e-5], [16e-5]]] for who in ("ours", "theirs")}
    parts = dict.fromkeys(table(1, 1).times, part)
    own = TimeTable("made up", [8], [1, 16], [1], parts)
    key = Key(kind, 32, units, 1, True, False, False, torch.float32, (1, 13, 32), False, False, 1)
    assert predict(key, own) == pytest.approx((computed * 1e-5, 13e-5))


def test_long_inputs_of_few_samples_cost_pytorch_little() -> None:
    """It multiplies those of all steps at once; ours takes each step's weights from memory."""
    part = {who: [[[1e-5, 1e-3], [1e-5, 2e-3]]] for who in ("ours", "theirs")}
    own = TimeTable("made up", [8], [1, 100], [1, 10], dict.fromkeys(table(1, 1).times, part))
    key = Key("LSTM", 32, 8, 1, True, False, False, torch.float32, (10, 1, 32), False, False, 1)
    assert predict(key, own) == pytest.approx((1e-3, 1e-3))
    # Twice the weights.
    long = key._replace(input_size=72, x=(10, 1, 72))
    assert predict(long, own) == pytest.approx((1.99e-3, 1e-3 + 2e-5))
    many = long._replace(x=(10, 100, 72))
    assert predict(many, own) == pytest.approx((3.99e-3, 3.99e-3))


def test_explanations_of_other_calls() -> None:
    x = torch.randn(4, 2, 3)
    cell = sparsescan.torch.module(MGU)(3, 5)
    assert explain(cell, x).kernel == "sparsescan"
    gru = sparsescan.torch.GRU(3, 5)
    assert explain(gru, x.half()).kernel == "pytorch"
    assert "no choice" in explain(gru, nn.utils.rnn.pack_sequence([x[:, 0]])).reason
    with pytest.raises(InputTypeError, match="module is Linear"):
        explain(nn.Linear(3, 5), x)


def test_measured_times_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for folder, path in ((None, None), (tmp_path / "cpu.json", tmp_path / "recurrent.json")):
        monkeypatch.setattr(times, "machine_file", lambda folder=folder: folder)
        assert times.table_file() == path
    for name, sizes in (("_HIDDEN", [4]), ("_BATCH", [1]), ("_STEPS", [1, 2])):
        monkeypatch.setattr(calibrate, name, sizes)
    before, kept = torch.get_num_threads(), []
    monkeypatch.setattr(calibrate, "keep_memory", lambda: kept.append(True))
    assert calibrate.calibrate() == path
    assert kept
    assert torch.get_num_threads() == before
    found = times.read_table()
    assert (found.hidden, found.batch, found.steps) == ([4], [1], [1, 2])
    assert len(found.times) == 6 * len({1, before})
    for part in found.times.values():
        for contender in ("ours", "theirs"):
            assert all(0 < each < 1 for each in part[contender][0][0])
    # What is no table is not read.
    for text in ("", "[]", '{"name": "x"}', path.read_text()[:-20]):
        path.write_text(text)
        assert times.read_table() == times._built_in()
    built_in = times._built_in()
    assert set(built_in.times) == {
        name_of(kind, has_backward, threads)
        for kind in KINDS
        for has_backward in (False, True)
        for threads in (1, 2)
    }


def test_another_default_device() -> None:
    theirs, ours = pair("LSTM", 3, 5, dtype=torch.float64)
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    with only("sparsescan"), torch.device("meta"):
        for module in (theirs, ours):
            module(x)[1][0].sum().backward()
    close([ours.weight_hh_l0.grad], [theirs.weight_hh_l0.grad])


def test_inputs_that_are_negated_when_they_are_read() -> None:
    theirs, ours = pair("GRU", 3, 5, dtype=torch.float64)
    x = torch.randn(4, 2, 3, dtype=torch.complex128).conj().imag
    assert x.is_neg()
    with only("sparsescan"), torch.no_grad():
        close(ours(x), theirs(x))
        close(ours(x.resolve_neg()), theirs(x))


@pytest.mark.parametrize("kernels", ["sparsescan", "pytorch"])
def test_parameters_of_other_shapes_are_refused(kernels: str) -> None:
    """No call that was prepared reads beyond what there is."""
    _, ours = pair("GRU", 3, 5)
    x = torch.randn(4, 2, 3)
    with only(kernels):
        ours(x)
        ours.weight_hh_l0 = nn.Parameter(torch.randn(15, 4))
        for _ in range(2):
            with pytest.raises((InputError, RuntimeError), match=r"shape|size"):
                ours(x)


def test_what_is_left_to_pytorch_is_left_for_plain_modules_alone() -> None:
    """Dropout draws the same numbers, and pruned weights are not read, whatever ran before."""
    _, plain = pair("GRU", 3, 7, num_layers=2)
    _, other = pair("GRU", 3, 7, num_layers=2, dropout=0.5)
    x, outputs = torch.randn(4, 2, 3), []
    for kernels in ("sparsescan", "pytorch"):
        with only(kernels):
            plain(x)
            assert prepared.is_left(prepared.left_key(plain, x, None)) == (kernels == "pytorch")
            torch.manual_seed(0)
            outputs.append(other(x)[0])
    assert torch.equal(*outputs)
    nn.utils.prune.random_unstructured(plain, "weight_hh_l0", 0.5)
    assert prepared.left_key(plain, x, None) is None
