"""Recurrent modules in place of PyTorch's, beside PyTorch's own in float64."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling import slow
from some_cells import PeepholeLSTM
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode
from torch_checks import check_compiled, close, tensors_of

import sparsescan.torch
from sparsescan import InputTypeError
from sparsescan.recurrent.catalogue import MGU
from sparsescan.torch import convert
from sparsescan.torch.calls import recurrent_op, sequences
from sparsescan.torch.calls.prepared import only

KINDS = ("RNN", "GRU", "LSTM")


def pair(kind: str, *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """PyTorch's module and ours, with the same parameters."""
    theirs = getattr(nn, kind)(*arguments, **options)
    ours = getattr(sparsescan.torch, kind)(*arguments, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def agree(theirs: Any, ours: Any, given: Any, hx: Any, seed: int) -> None:
    """Both give the same results and gradients, in input, states and parameters."""
    collected = []
    for module in (theirs, ours):
        leaves = [each.clone().requires_grad_() for each in tensors_of((given, *(hx or ())))]
        own = leaves[0]
        if isinstance(given, PackedSequence):
            own = PackedSequence(leaves[0], *given[1:])
        states = None if hx is None else tuple(leaves[1:]) if len(hx) == 2 else leaves[1]
        results = tensors_of(module(own, states))
        rng = torch.Generator().manual_seed(seed)
        weights = [torch.randn(each.shape, generator=rng, dtype=each.dtype) for each in results]
        loss = sum((each * w).sum() for each, w in zip(results, weights, strict=True))
        params = list(module.parameters())
        collected.append([*results, *torch.autograd.grad(loss, [*leaves, *params])])
    close(collected[1], collected[0])


@given(st.integers(0, 2**32 - 1))
def test_any_arguments(seed: int) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    kind = KINDS[rng.integers(3)]
    inputs, hidden, layers = (int(n) for n in rng.integers(1, [6, 8, 4]))
    options: dict[str, Any] = {
        name: bool(rng.integers(2)) for name in ("bias", "batch_first", "bidirectional")
    }
    if kind == "RNN":
        options["nonlinearity"] = ("tanh", "relu")[rng.integers(2)]
    elif kind == "LSTM" and rng.integers(2):
        options["proj_size"] = int(rng.integers(hidden))
    theirs, ours = pair(kind, inputs, hidden, layers, dtype=torch.float64, **options)
    if rng.integers(2):
        amount = float(rng.choice([0.3, 0.9]))
        for module in (theirs, ours):
            torch.manual_seed(seed)
            prune.random_unstructured(module, "weight_hh_l0", amount)
    steps, batch = (int(n) for n in rng.integers(1, [9, 7]))
    form = ("batched", "unbatched", "packed")[rng.integers(3)]
    shape = (steps, inputs) if form == "unbatched" else (steps, batch, inputs)
    if options["batch_first"] and form != "unbatched":
        shape = (batch, steps, inputs)
    x: Any = torch.randn(shape, dtype=torch.float64)
    if form == "packed":
        lengths = torch.from_numpy(rng.integers(1, steps + 1, batch))
        x = pack_padded_sequence(x, lengths, options["batch_first"], enforce_sorted=False)
    hx = None
    if rng.integers(2):
        lead = layers * (1 + options["bidirectional"])
        many = (lead,) if form == "unbatched" else (lead, batch)
        sizes = [options.get("proj_size") or hidden, hidden][: 1 + (kind == "LSTM")]
        hx = [torch.randn(*many, size, dtype=torch.float64) for size in sizes]
    with patch.object(sequences, "_PROJECTED_STEPS", 1):
        assert ours._takes(x, None, list(ours.parameters()))
        with only("sparsescan") if rng.integers(2) else nullcontext():
            agree(theirs, ours, x, hx, seed)


@pytest.mark.parametrize("kind", ["GRU", *slow("RNN", "LSTM")])
def test_opcheck(kind: str) -> None:
    net = getattr(sparsescan.torch, kind)(2, 3)
    params = list(net.parameters())
    state = torch.randn(1, 4, 6 if kind == "LSTM" else 3, requires_grad=True)
    x, lengths = torch.randn(5, 4, 2, requires_grad=True), torch.tensor([5, 2, 3, 5])
    about = net.mode, 3, 1, True, False, [-1, -1, 0]
    for more in ((None, None), (state, lengths)):
        for masks in ([None] * 4, []):
            given = x, *more, params, masks, *about, True
            torch.library.opcheck(torch.ops.sparsescan.recurrent.default, given)
    given = x.detach(), None, lengths, [each.detach() for each in params], [], *about, False
    torch.library.opcheck(torch.ops.sparsescan.recurrent_forward.default, given)


@pytest.mark.parametrize("kind", [sparsescan.torch.LSTM, sparsescan.torch.module(MGU)])
def test_exported_models_take_any_number_of_steps(kind: Any) -> None:
    """PyTorch's own modules are exported for one."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(kind(3, 4, batch_first=True))
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("steps")}
    whole = torch.export.export(net, (torch.randn(2, 7, 3),), dynamic_shapes=(dims,)).module()
    for shape in ((2, 31, 3), (5, 4, 3)):
        x = torch.randn(shape)
        torch.testing.assert_close(whole(x), net(x))


@pytest.mark.parametrize("kind", [sparsescan.torch.LSTM, sparsescan.torch.module(PeepholeLSTM)])
def test_compiled_models(kind: Any) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"rnn": kind(3, 4, 2), "head": nn.Linear(4, 2)})

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model["head"](model["rnn"](x)[0]).square().sum()

    check_compiled(loss, [torch.randn(6, 2, 3)], list(model.parameters()))


def test_steps_are_used_again_without_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_op, "_steps", OrderedDict())
    net = sparsescan.torch.GRU(3, 5)
    for _ in range(4):
        net(torch.zeros(2, 2, 3), resets=torch.zeros(2, 2, dtype=torch.bool))
    gc.collect()
    (steps,) = recurrent_op._steps.values()
    assert steps.free == 1


def test_dropout() -> None:
    """Between layers, while training; what is dropped is drawn as PyTorch does."""
    torch.manual_seed(0)
    theirs, ours = pair("GRU", 3, 4, 3, dropout=0.5, dtype=torch.float64)
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    agree(theirs.eval(), ours.eval(), x, None, 0)
    ours.train()
    with torch.random.fork_rng():
        assert not torch.equal(ours(x)[0], ours(x)[0])
        torch.manual_seed(1)
        first = ours(x)
        torch.manual_seed(1)
        assert torch.equal(ours(x)[0], first[0])
    assert first[1].shape == theirs(x)[1].shape


@pytest.mark.parametrize("is_transformed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_dropped_is_what_pytorch_drops(kind: str, is_transformed: bool) -> None:
    """For one seed, of samples with as many steps and of packed ones."""
    options = {"dropout": 0.4, "bidirectional": True, "dtype": torch.float64}
    nets = pair(kind, 3, 4, 3, **options)
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    packed = pack_padded_sequence(x, torch.tensor([6, 2, 3, 4]), enforce_sorted=False)
    found = []
    for net in nets:
        for sequence in (x, packed):

            def loss(params: Any, net: Any = net, sequence: Any = sequence) -> torch.Tensor:
                torch.manual_seed(5)
                output, _ = torch.func.functional_call(net, params, (sequence,))
                return torch.as_tensor(tensors_of(output)[0]).sin().sum()

            params = dict(net.named_parameters())
            if is_transformed and net is nets[1]:
                found.append(list(torch.func.grad(loss)(params).values()))
            else:
                found.append(list(torch.autograd.grad(loss(params), list(params.values()))))
    close(found[2:], found[:2])


class _Counted(nn.Module):
    """A parametrisation that counts how often it is read."""

    count = 0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return 2 * weight


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("way", ["called", "cached", "packed", "refused", "transformed"])
@pytest.mark.parametrize("kind", KINDS)
def test_parametrisations_are_read_as_often_as_by_pytorch(kind: str, way: str) -> None:
    """Else one that has a state, as of spectral norms, would go on by other steps."""
    found = []
    for make in (getattr(nn, kind), getattr(sparsescan.torch, kind)):
        torch.manual_seed(0)
        net = make(3, 4, 2, dtype=torch.float64)
        counts = [_Counted(), _Counted()]
        parametrizations.spectral_norm(net, "weight_hh_l0")
        parametrize.register_parametrization(net, "bias_ih_l0", counts[0])
        parametrize.register_parametrization(net, "weight_ih_l1", counts[1])
        x = torch.randn(5, 2, 3, dtype=torch.float64)
        given: Any = pack_padded_sequence(x, torch.tensor([5, 3])) if way == "packed" else x
        for training in (True, True, False, True):
            net.train(training)
            with parametrize.cached() if way == "cached" else nullcontext():
                if way == "refused":
                    with pytest.raises(ValueError, match="RNN input dtype"):
                        net(x.float())
                output = net(given)[0]
                if way == "transformed":
                    torch.func.grad(lambda x, net=net: net(x)[0].sum())(x)
        found.append([output, *net.buffers(), *[torch.tensor(each.count) for each in counts]])
    close(found[1], found[0])


@pytest.mark.parametrize("kind", KINDS)
def test_operations_are_counted_as_pytorchs(kind: str) -> None:
    nets = pair(kind, 3, 5, 2, bidirectional=True, dtype=torch.float64)
    for is_packed, needs_input in itertools.product((False, True), (False, True)):
        found = []
        for net in nets:
            x = torch.randn(6, 4, 3, dtype=torch.float64, requires_grad=needs_input)
            given: Any = x
            if is_packed:
                given = pack_padded_sequence(x, torch.tensor([6, 2, 3, 4]), enforce_sorted=False)
            with FlopCounterMode(display=False) as counter:
                output = tensors_of(net(given)[0])[0]
                forward = counter.get_total_flops()
                output.sum().backward()
            found.append((forward, counter.get_total_flops()))
        assert found[0] == found[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, 2, 2, 3),
        lambda: torch.zeros(5, 2, 4),
        lambda: torch.zeros(0, 2, 3),
        lambda: torch.zeros(5, 2, 3, dtype=torch.float64),
        lambda: torch.zeros(5, 2, 3, dtype=torch.int64),
        lambda: [1.0],
    ],
)
def test_errors_are_pytorchs(make: Any) -> None:
    theirs, ours = pair("GRU", 3, 4)
    messages = []
    for net in (theirs, ours):
        with pytest.raises(Exception) as caught:  # noqa: PT011, whatever PyTorch raises
            net(make())
        messages.append((type(caught.value), str(caught.value)))
    assert messages[0] == messages[1]
    with pytest.raises(RuntimeError, match="Expected hidden size"):
        ours(torch.zeros(5, 2, 3), torch.zeros(1, 3, 4))


def test_what_has_no_kernel_is_pytorchs() -> None:
    x = torch.randn(5, 2, 3)
    with warnings.catch_warnings():  # of PyTorch, that oneDNN has none either
        warnings.simplefilter("ignore")
        theirs, ours = pair("LSTM", 3, 4, proj_size=2)
        torch.testing.assert_close(ours(x), theirs(x))
    theirs, ours = pair("GRU", 3, 4, dtype=torch.bfloat16)
    torch.testing.assert_close(ours(x.bfloat16()), theirs(x.bfloat16()))


def test_arguments_are_pytorchs() -> None:
    theirs, ours = pair("RNN", 3, 4, 2, "relu", False, True)
    assert repr(ours) == repr(theirs)
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(ours(x), theirs(x))
    for kind, wrong in (("GRU", {"proj_size": 2}), ("RNN", {"nonlinearity": "sine"})):
        with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0]) as expected:
            getattr(nn, kind)(3, 4, **wrong)
        with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0]) as raised:
            getattr(sparsescan.torch, kind)(3, 4, **wrong)
        assert str(raised.value) == str(expected.value)


def test_threads() -> None:
    net, x = sparsescan.torch.GRU(3, 4), torch.randn(8, 30, 2, 3)

    def run(k: int) -> torch.Tensor:
        for _ in range(10):
            (grad,) = torch.autograd.grad(net(x[k])[0].square().sum(), net.weight_hh_l0)
        return grad

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, range(8)))
    assert all(map(torch.equal, results, map(run, range(8))))


class Encoded(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Outputs of a network, and its gradients, computed by who asks for them."""

    def __init__(self, net: torch.nn.Module, x: torch.Tensor) -> None:
        self.net, self.x = net, x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.net(self.x[k])[0]
        (grad,) = torch.autograd.grad(output.square().sum(), [self.net.weight_hh_l0])
        return output.detach(), grad


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # by JAX, if other tests use it
@pytest.mark.parametrize("context", ["fork", *slow("spawn")])
def test_workers_of_a_data_loader(context: str) -> None:
    net, x = sparsescan.torch.GRU(3, 5), torch.randn(4, 30, 2, 3)
    data = Encoded(net, x)
    expected = [data[k] for k in range(len(data))]
    loader = torch.utils.data.DataLoader(
        data, batch_size=None, num_workers=2, multiprocessing_context=context, timeout=120
    )
    for computed, wanted in zip(loader, expected, strict=True):
        for one, other in zip(computed, wanted, strict=True):
            assert torch.equal(one, other)


def test_convert() -> None:
    class Own(nn.GRU):
        def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: A002
            return input, hx

    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "a": nn.ModuleDict({"b": nn.LSTM(3, 4, bidirectional=True)}),
            "own": Own(3, 4),
            "projected": nn.LSTM(3, 4, proj_size=2),
            "rest": nn.Linear(3, 2),
        }
    )
    x = torch.randn(5, 2, 3)
    expected, weight = model["a"]["b"](x)[0], model["a"]["b"].weight_hh_l0
    done = convert(model)
    assert done.replaced == ["a.b", "projected"]
    assert done.left.keys() == {"own"}
    assert str(done).splitlines()[0] == "a.b: replaced"
    assert type(model["a"]["b"]) is sparsescan.torch.LSTM
    assert model["a"]["b"].weight_hh_l0 is weight
    torch.testing.assert_close(model["a"]["b"](x)[0], expected)
    assert convert(model).replaced == []
    assert str(convert(nn.Linear(2, 2))) == "no recurrent modules, and no pruned layers"
    alone = nn.GRU(2, 2)
    assert str(convert(alone)) == "model: replaced"
    with pytest.raises(InputTypeError, match=r"model is 3; expected a torch\.nn\.Module"):
        convert(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_pytorch_runs_is_not_reported_as_replaced(dtype: torch.dtype) -> None:
    """Until it has a dtype that kernels take."""
    stack = nn.Sequential(nn.Linear(9, 30), nn.ReLU())
    prune.l1_unstructured(stack[0], "weight", 0.95)
    model = nn.ModuleDict({name: getattr(nn, name)(3, 4) for name in KINDS} | {"stack": stack})
    model.to(dtype)
    done = convert(model)
    assert done.replaced == []
    assert done.left.keys() == {*KINDS, "stack"}
    name = str(dtype).removeprefix("torch.")
    for line in str(done).splitlines():
        assert f": left alone, its parameters are of {name}, which PyTorch computes" in line
    assert all(type(model[kind]) is getattr(nn, kind) for kind in KINDS)
    assert convert(model.float()).replaced == [*KINDS, "stack"]


def test_modules_without_values_are_replaced() -> None:
    """A model is made on the device "meta", and gets memory and values later."""
    with torch.device("meta"):
        model = nn.ModuleDict({"rnn": nn.GRU(3, 4), "head": nn.Linear(4, 2)})
    assert convert(model).replaced == ["rnn"]
    model.to_empty(device="cpu")
    assert sparsescan.torch.explain(model["rnn"], torch.zeros(50, 2, 3)).kernel == "sparsescan"


def test_only_what_records_calls_sees_operators() -> None:
    net, x = sparsescan.torch.GRU(3, 4), torch.randn(5, 2, 3)
    matrices = torch.rand(4, 3, 3)
    for call, tensor, name in (
        (lambda x: net(x)[0], x, "sparsescan.recurrent"),
        (lambda a: sparsescan.torch.affine_scan(a), matrices, "sparsescan.affine_scan"),
    ):
        graph = make_fx(call)(tensor)
        assert name in graph.code
        other = torch.randn_like(tensor)
        assert torch.equal(graph(other), call(other))
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(call(tensor), FakeTensor)
        with torch.profiler.profile() as profile:
            call(tensor)
        assert not any(event.name.startswith("sparsescan::") for event in profile.events())


class Holder(torch.Tensor):
    """A tensor without memory of its own, which notes the operators that are called with it."""

    seen: list[str]
    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, dtype=inner.dtype, requires_grad=True
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner.detach()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        args, kwargs = tree_map_only(Holder, lambda each: each.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


def test_parameters_that_are_no_plain_tensors_find_operators() -> None:
    net, x = sparsescan.torch.GRU(3, 4), torch.randn(5, 2, 3)
    params, about = list(net.parameters()), (net.mode, 4, 1, True, False, [-1, -1, 0])
    matrices, offsets = torch.rand(4, 3, 3), torch.rand(4, 2, 3, requires_grad=True)

    def run(params: list[torch.Tensor]) -> torch.Tensor:
        return recurrent_op.run(x, None, None, params, [], *about, True)[0]

    def scan(params: list[torch.Tensor]) -> torch.Tensor:
        return sparsescan.torch.affine_scan(matrices, params[0])

    for call, tensors, name in (
        (run, params, "recurrent_forward"),
        (scan, [offsets], "affine_scan"),
    ):
        Holder.seen = []
        held = [Holder(each) for each in tensors]
        output = call(held)
        assert f"sparsescan.{name}.default" in Holder.seen
        expected = call(tensors)
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
        grads = torch.autograd.grad(output.sum(), held)
        torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), tensors))


def test_subnormal_numbers_count_after_a_call() -> None:
    """On this thread, and on those that PyTorch computes with, which help the kernels."""
    small = torch.full((1 << 20,), 1e-40)
    module = sparsescan.torch.GRU(3, 20)
    x = torch.randn(400, 32, 3)
    for flushes in (False, True, False):
        torch.set_flush_denormal(flushes)
        try:
            module(x)[0][-1].sum().backward()
            assert bool((small[:1] * 1 == 0).all()) == flushes
            if not flushes:
                assert (small * 1 != 0).all()
        finally:
            torch.set_flush_denormal(False)
