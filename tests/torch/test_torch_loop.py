"""Modules that loop in Python: by kernels where they may be, and always what Python gives."""

from __future__ import annotations

import copy
import io
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import looping
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrizations, prune
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from sparsescan.errors import InputTypeError
from sparsescan.torch import convert, explain, loop, revert
from sparsescan.torch.loops.loop import state_of

WIDE = torch.float64


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(7)
    default = torch.get_default_dtype()
    torch.set_default_dtype(WIDE)
    yield
    torch.set_default_dtype(default)


def is_captured(target: Any) -> bool:
    """Return whether kernels ran the last call."""
    state = state_of(target)
    assert state is not None
    return state.report.is_captured


def life(net: Any, args: Any, seed: int = 0) -> list[Any]:
    """Return results, gradients, buffers, and the numbers that generators draw then."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    own = [each.detach().clone() if isinstance(each, Tensor) else each for each in args]
    floats = [k for k in own if isinstance(k, Tensor) and k.is_floating_point()]
    for each in floats:
        each.requires_grad_()
    net.zero_grad()
    results = pytree.tree_leaves(net(*own))
    loss = sum(
        (each * torch.linspace(0.5, 1, each.shape[-1])).sum() for each in results if each.dim()
    )
    loss = loss + sum(each for each in results if not each.dim())
    loss.backward()
    drawn = [random.random(), np.random.rand(), torch.rand(1)]  # noqa: NPY002
    kept = [getattr(net, name, None) for name in ("count", "history")]
    grads = [each.grad for each in (*floats, *net.parameters())]
    return [*results, *grads, *floats, *net.buffers(), *drawn, *kept]


def assert_same(ours: list[Any], theirs: list[Any], roundings: float = 2e4) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, Tensor) and isinstance(a, Tensor):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
            most = float(b.detach().abs().max()) if b.numel() else 0.0
            bound = roundings * torch.finfo(WIDE).eps * max(1.0, most)
            torch.testing.assert_close(a, b, rtol=0, atol=bound, equal_nan=True)
        else:
            assert a == b


def both(kind: Any) -> tuple[Any, Any]:
    """Return a module that loops by kernels, and a twin."""
    theirs = kind()
    return loop(copy.deepcopy(theirs) if kind is not looping.Iterator else kind()), theirs


@pytest.mark.parametrize("kind", looping.TAME, ids=lambda each: each.__name__)
def test_kernels_run_loops_as_people_write_them(kind: Any) -> None:
    ours, theirs = both(kind)
    for steps in (20, 20, 1, 2, 33, 20, 33, 11):
        args = kind.given(steps)
        assert_same(life(ours, args), life(theirs, args))
        assert is_captured(ours) == (steps > 8), steps
    assert "a loop of 11 steps: kernels run the carries float64" in str(state_of(ours).report)


@pytest.mark.parametrize("kind", looping.WILD, ids=lambda each: each.__name__)
def test_other_loops_give_what_python_gives(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = both(kind)
    if kind is looping.Iterator:
        ours.load_state_dict(theirs.state_dict())
    printed = []
    for steps in (1, 2, 9, 9, 13, 13, 21, 21, 40, 21):
        args = kind.given(steps)
        results = []
        for net in (ours, theirs):
            kind.count = 0
            results.append(life(net, args, steps))
            printed.append(capsys.readouterr().out)
        assert_same(*results)
    assert printed[::2] == printed[1::2]
    assert not is_captured(ours)
    assert "Python runs it: " in state_of(ours).report.text


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (looping.EachTenth, "longer loops call otherwise"),
        (looping.EachTenthByANumber, "longer loops call otherwise"),
        (looping.PythonsNumbers, "random numbers of Python"),
        (looping.OwnNumbers, "which a call changes"),
        (looping.Noise, "draws random numbers"),
        (looping.EarlyEnd, "__bool__"),
        (looping.Counter, "which a call changes"),
        (looping.Prints, "print, which may differ in each call"),
        (looping.ReadsNumbers, "item"),
        (looping.Time, "a number that depends on the step"),
        (looping.Weights, "other tensors in longer loops"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_reports_say_why(kind: Any, reason: str) -> None:
    assert reason in explain(loop(kind()), *kind.given(20)).text


# -- Lives -----------------------------------------------------------------------------------------


class Settable(looping.Gru):
    """A module with attributes that its loop reads."""

    scale, skip, late = 1.0, False, 99

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, states = self.begin(x), []
        for t in range(x.shape[0]):
            new = self.cell(x[t] * self.scale * FACTORS["of all"], h)
            h = new + h if self.skip else new
            h = h.tanh() if t == self.late else h
            h = nn.functional.dropout(h, 0.5, self.training)
            states.append(h)
        return self.head(torch.stack(states)), h


FACTORS = {"of all": 1.0}
Net = Any


def train(net: Net) -> Net:
    net.train()
    return net


def evaluate(net: Net) -> Net:
    net.eval()
    return net


def optimise(net: Net) -> Net:
    args = looping.sequence(14)
    net(*args)[0].square().sum().backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    return net


def swap(net: Net) -> Net:
    if "weight_hh" in dict(net.cell.named_parameters()):
        net.cell.weight_hh = nn.Parameter(net.cell.weight_hh.detach() * 0.5)
    return net


def swap_cell(net: Net) -> Net:
    cell = nn.GRUCell(looping.INPUTS, looping.UNITS)
    if "weight_hh" in dict(net.cell.named_parameters()):
        cell.load_state_dict({name: each * 0.9 for name, each in net.cell.state_dict().items()})
        net.cell = cell
    return net


def freeze(net: Net) -> Net:
    net.cell.weight_ih.requires_grad_(not net.cell.weight_ih.requires_grad)
    return net


def scale(net: Net) -> Net:
    net.scale = net.scale * 0.5
    return net


def late(net: Net) -> Net:
    net.late = 12 if net.late == 99 else 99
    return net


def skip(net: Net) -> Net:
    net.skip = not net.skip
    return net


def write(net: Net) -> Net:
    net.cell.bias_ih.data.mul_(1.5)
    return net


def hook(net: Net) -> Net:
    net.cell.register_forward_hook(lambda _, __, out: out * 0.9)
    return net


def hook_all(net: Net) -> Net:
    net.register_forward_hook(lambda _, __, out: (out[0] + 1, out[1]))
    return net


def pruned(net: Net) -> Net:
    method: Any = prune.l1_unstructured
    if "weight_hh_orig" not in dict(net.cell.named_parameters()):
        method(net.cell, "weight_hh", 0.5)
    return net


def copied(net: Net) -> Net:
    return copy.deepcopy(net)


def shallow(net: Net) -> Net:
    return copy.copy(net)


def loaded(net: Net) -> Net:
    net.load_state_dict({name: each * 0.9 for name, each in net.state_dict().items()})
    return net


# Hooks that are lambdas, and parametrised layers, are in no file.
_UNSAVED = AttributeError, pickle.PicklingError, RuntimeError


def pickled(net: Net) -> Net:
    try:
        return pickle.loads(pickle.dumps(net))
    except _UNSAVED:
        return net


def saved(net: Net) -> Net:
    file = io.BytesIO()
    try:
        torch.save(net, file)
    except _UNSAVED:
        return net
    file.seek(0)
    return torch.load(file, weights_only=False)


def cast_twice(net: Net) -> Net:
    return net.to(torch.float32).to(WIDE)


def globals_change(net: Net) -> Net:
    return net  # see below


def normed(net: Net) -> Net:
    if not torch.nn.utils.parametrize.is_parametrized(net.head):
        parametrizations.weight_norm(net.head)
    return net


EVENTS: list[Callable[[Net], Net]] = [
    *(train, evaluate, optimise, swap, swap_cell, freeze, scale, late, skip, write, hook),
    *(
        hook_all,
        pruned,
        copied,
        shallow,
        loaded,
        pickled,
        saved,
        cast_twice,
        globals_change,
        normed,
    ),
]


@given(
    st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from([14, 14, 1, 23])), max_size=4),
    st.booleans(),
)
def test_lives(events: list[tuple[Callable[[Net], Net], int]], trains: bool) -> None:
    torch.manual_seed(3)
    theirs = Settable().train(trains)
    ours = loop(copy.deepcopy(theirs))
    FACTORS["of all"] = 1.0
    for event, steps in [(evaluate, 14), *events]:
        if event is globals_change:
            FACTORS["of all"] *= 0.8
        torch.manual_seed(steps)
        ours = event(ours)
        torch.manual_seed(steps)
        theirs = event(theirs)
        assert isinstance(ours, Settable)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        args = looping.sequence(steps)
        for seed in range(2):
            assert_same(life(ours, args, seed), life(theirs, args, seed))


@pytest.mark.parametrize("event", EVENTS, ids=lambda each: each.__name__)
def test_kernels_run_again_after_an_event(event: Callable[[Net], Net]) -> None:
    """But for dropout, a step that differs from others, and pruning, which sets an attribute."""
    ours = loop(Settable().eval())
    args = looping.sequence(14)
    ours(*args)
    ours = event(ours)
    ours(*args)
    ours(*args)
    assert is_captured(ours) == (event not in (train, late, pruned))


# -- What else may be around -----------------------------------------------------------------------


@pytest.fixture
def pair() -> tuple[Any, Any, Tensor]:
    ours, theirs = both(looping.ListAndStack)
    (x,) = looping.sequence(20)
    ours(x)
    return ours, theirs, x


def test_it_is_the_same_module(pair: tuple[Any, Any, Tensor]) -> None:
    ours, _, x = pair
    assert type(ours) == looping.ListAndStack  # noqa: E721
    assert isinstance(ours, looping.ListAndStack)
    assert loop(ours) is ours
    assert str(explain(ours)) == "model: replaced"
    assert explain(ours, x).is_captured
    assert revert(ours).replaced == [""]
    assert type(ours) is looping.ListAndStack
    assert "_loops" not in vars(ours)
    convert(ours)
    assert state_of(ours) is None


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.*torch.jit")
def test_transforms_and_higher_derivatives(pair: tuple[Any, Any, Tensor]) -> None:
    ours, theirs, x = pair
    x = x.requires_grad_()
    twice = []
    for net in (ours, theirs):

        def loss(params: Any, x: Tensor = x, net: Any = net) -> Tensor:
            result: Tensor = functional_call(net, params, (x,))[0].square().sum()
            return result

        params = {name: each.detach() for name, each in net.named_parameters()}
        mapped = vmap(loss, (None, 0))(params, torch.stack([x, 2 * x]).detach())
        forward = jvp(lambda x, net=net: net(x)[0], (x.detach(),), (x.detach(),))
        first = torch.autograd.grad(net(x)[0].square().sum(), [x], create_graph=True)
        assert is_captured(net) if net is ours else True
        second = torch.autograd.grad(first[0].square().sum(), [x, *net.cell.parameters()])
        again = checkpoint(net, x, use_reentrant=False)[0]
        below = torch.autograd.grad(again.sum(), [x])
        twice.append([*grad(loss)(params).values(), mapped, *forward, *first, *second, *below])
    assert_same(*twice)


def test_functions_keep_their_own_derivatives() -> None:
    for kind in (looping.SpikingLayers, looping.FunctionsAround):
        twice: list[Any] = []
        ours, theirs = both(kind)
        (x,) = looping.sequence(20)
        ours(x.requires_grad_())
        for net in (ours, theirs):
            results, tensors = net(x), [x, *net.parameters()]
            loss = sum((each + 0.3).square().sum() for each in results)
            first = torch.autograd.grad(loss, tensors, create_graph=True, allow_unused=True)
            square = sum(each.square().sum() for each in first if each is not None)
            twice.append([*first, *torch.autograd.grad(square, tensors, allow_unused=True)])
        assert is_captured(ours)
        assert_same(*twice)


def test_modes(pair: tuple[Any, Any, Tensor]) -> None:
    ours, theirs, x = pair
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            given = x.clone()
            for _ in range(2):
                assert_same([ours(given)[0]], [theirs(given)[0]])
            assert is_captured(ours)
            assert not ours(given)[0].requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        ours(x)
        assert not is_captured(ours)


def test_results_are_the_callers_own(pair: tuple[Any, Any, Tensor]) -> None:
    ours, theirs, x = pair
    x = x.requires_grad_()
    grads = []
    for net in (ours, theirs):
        states, last = net(x)
        states.mul_(2)
        last.add_(1)
        grads.append([states.clone(), *torch.autograd.grad(states.sum() + last.sum(), [x])])
    assert is_captured(ours)
    assert_same(*grads)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_compilers_see_the_module_of_the_user(pair: tuple[Any, Any, Tensor]) -> None:
    ours, theirs, x = pair
    expected = theirs(x)[0]
    assert torch.equal(torch.compile(ours, backend="eager")(x)[0], expected)
    assert torch.equal(torch.export.export(ours, (x,)).module()(x)[0], expected)
    assert torch.equal(torch.jit.trace(ours, (x,))(x)[0], expected)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[1], 4)
        for t in range(x.shape[0]):
            h = self.cell(x[t], h)
        return h


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_script_reads_the_module_of_the_user() -> None:
    net = loop(Scripted())
    (x,) = looping.sequence(20)
    script: Any = torch.jit.script
    assert_same([script(net)(x)], [net(x)])
    with pytest.raises(InputTypeError, match="module of torch"):
        loop(script(Scripted()))


def test_functions_and_what_they_close_over() -> None:
    cells = [nn.GRUCell(3, 4), nn.GRUCell(3, 4)]
    cell = cells[0]

    def run(x: Tensor, h: Tensor, *, factor: float = 1.0) -> dict[str, Tensor]:
        """Run a cell."""
        states = []
        for row in x:
            h = cell(row * factor, h)
            states.append(h)
        return {"states": torch.stack(states), "last": h}

    ours = loop(run)
    assert ours.__doc__ == "Run a cell."
    (x,), h = looping.sequence(20), torch.randn(2, 4)
    for cell in cells:  # noqa: B007
        for factor in (1.0, 0.5, 1.0):
            found, expected = ours(x, h, factor=factor), run(x, h, factor=factor)
            assert_same([*found.values()], [*expected.values()])
            assert is_captured(ours)
    assert explain(ours, x, h).is_captured


def test_states_that_go_from_call_to_call() -> None:
    """Gradients of a segment flow into the segments before, through the same parameters."""

    class Segment(looping.Gru):
        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            states = []
            for t in range(x.shape[0]):
                h = self.cell(x[t], h)
                states.append(h)
            return torch.stack(states), h

    theirs = Segment()
    ours = loop(copy.deepcopy(theirs))
    (x,), grads = looping.sequence(12), []
    for net in (ours, theirs):
        h, total = torch.zeros(2, 4), torch.zeros(())
        for _ in range(4):
            states, h = net(x, h)
            total = total + states.square().sum()
        total.backward()
        grads.append([each.grad for each in net.cell.parameters()])
    assert is_captured(ours)
    assert_same(*grads)


def test_axes_of_equal_length_are_told_apart() -> None:
    for kind in (looping.ListAndStack, looping.Unbound, looping.Masked):
        ours, theirs = both(kind)
        x = torch.randn(12, 12, 3)
        args = (x, torch.rand(12, 12) > 0.3) if kind is looping.Masked else (x,)
        for _ in range(2):
            assert_same(life(ours, args), life(theirs, args))
        assert is_captured(ours)


def test_hooks_of_tensors_run_as_often_as_without() -> None:
    ours, theirs = both(looping.ListAndStack)
    (x,) = looping.sequence(20)
    counts = []
    for net in (ours, theirs):
        calls: list[int] = []
        net.cell.weight_hh.register_hook(lambda _, calls=calls: calls.append(1))
        net.cell.register_forward_hook(lambda *_, calls=calls: calls.append(2))
        for _ in range(3):
            net(x)[0].sum().backward()
        counts.append(calls)
    assert counts[0] == counts[1]


def test_objects_whose_attributes_are_new_in_each_call_stay_as_they_are() -> None:
    ours, theirs = (each.eval() for each in both(Settable))
    (x,) = looping.sequence(14)
    for k in range(20):
        ours.scale = theirs.scale = 1 / (1 + k)
        assert_same([ours(x)[0]], [theirs(x)[0]])
    assert "new in most calls" in state_of(ours).report.text


def test_threads() -> None:
    ours, theirs = both(looping.ListAndStack)
    (x,) = looping.sequence(20)
    found: list[tuple[int, Tensor]] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append((n, ours(x[:n])[0])))
        for n in (20, 19, 20, 18, 20)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for n, states in found:
        assert_same([states], [theirs(x[:n])[0]])


def test_errors() -> None:
    for target in (3, nn.GRU):
        with pytest.raises(InputTypeError, match="expected a module or a function"):
            loop(target)  # type: ignore[type-var]
    ours = loop(looping.ListAndStack())
    with pytest.raises(RuntimeError, match="input"):
        ours(torch.randn(20, 2, 5))
    assert is_captured(ours) is False
