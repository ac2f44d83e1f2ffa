"""Results and arguments after a call: their memory, and what may be changed in place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch_checks import close, tensors_of
from torch_doors import DOORS, door

import sparsescan.torch
from sparsescan.recurrent.catalogue import LEM, PeepholeLSTM
from sparsescan.torch import lfilter, module
from sparsescan.torch.calls import sequences
from sparsescan.torch.calls.prepared import only

FORMS = "steps first", "batch first", "one sample", "packed"
KINDS = "RNN", "GRU", "LSTM"
LENGTHS = torch.tensor([2, 4, 1, 3, 4])


@pytest.fixture(params=["operator", "prepared"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run prepared calls, or the operator, as calls with anything special do."""
    if request.param == "operator":
        monkeypatch.setattr(sequences, "key_of", lambda *_: None)
    with only("sparsescan"):
        yield


class Call:
    """A call of a recurrent module, whose gradients are still to be computed."""

    def __init__(self, net: Any, form: str, has_state: bool = True, needs: str = "all") -> None:
        torch.manual_seed(0)
        shape = (5, 4, 3) if net.batch_first else (4, 5, 3)
        x = torch.randn(shape if form != "one sample" else (4, 3), dtype=torch.float64)
        batch = () if form == "one sample" else (5,)
        rows, count = net.num_layers * (1 + net.bidirectional), 1 if net.mode != "LSTM" else 2
        count = getattr(net, "states", count)
        hx = tuple(torch.randn(rows, *batch, 3, dtype=torch.float64) for _ in range(count))
        inputs, params = [x, *hx * has_state], list(net.parameters())
        for each in inputs:
            each.requires_grad_(needs != "parameters")
        for each in params:
            each.requires_grad_(needs != "inputs")
        self.leaves = [each for each in (*inputs, *params) if each.requires_grad]
        # Which may be changed in place, as leaves may not.
        self.given = [2 * each for each in inputs]
        x, *states = self.given
        given: Any = x
        if form == "packed":
            given = pack_padded_sequence(x, LENGTHS, net.batch_first, enforce_sorted=False)
        self.result = net(given, (tuple(states) if count > 1 else states[0]) if states else None)
        self.outputs = tensors_of(self.result)

    def gradients(self) -> list[Tensor]:
        loss = sum(each.sin().sum() for each in self.outputs)
        assert isinstance(loss, Tensor)
        return list(torch.autograd.grad(loss, self.leaves))


def pair(kind: str, form: str, **options: Any) -> list[Any]:
    """Return a module of PyTorch, and ours with the same parameters."""
    options |= {"batch_first": form == "batch first", "dtype": torch.float64}
    theirs = getattr(nn, kind)(3, 3, **options)
    ours = getattr(sparsescan.torch, kind)(3, 3, **options)
    ours.load_state_dict(theirs.state_dict())
    return [theirs, ours]


def check_own(results: Sequence[Tensor], others: Sequence[Tensor] = ()) -> None:
    """Check that each of some tensors has all of an array, which no other tensor has."""
    places = [each.untyped_storage().data_ptr() for each in (*others, *results) if each.numel()]
    assert len(set(places)) == len(places)
    for each in results:
        assert each.untyped_storage().nbytes() == each.nbytes


# -- Memory ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_modules_have_results_laid_out_as_pytorchs(kind: str, form: str) -> None:
    for layers, bidirectional, has_state in ((1, False, False), (1, True, True), (2, False, True)):
        nets = pair(kind, form, num_layers=layers, bidirectional=bidirectional)
        theirs, ours = (Call(net, form, has_state) for net in nets)
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert one.stride() == other.stride()
            assert other._is_view() or not one._is_view()  # which `detach_` refuses
        found = [each.gradients() for each in (theirs, ours)]
        for one, other in zip(*found, strict=True):
            assert one.is_contiguous() == other.is_contiguous()
        check_own([*ours.outputs, *found[1]], ours.leaves)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [*KINDS, PeepholeLSTM, LEM])
def test_all_states_are_arrays_of_their_own(kind: Any, form: str) -> None:
    make = getattr(sparsescan.torch, kind) if isinstance(kind, str) else module(kind)
    options = {"batch_first": form == "batch first", "dtype": torch.float64}
    call = Call(make(3, 3, 2, **options, return_states=True), form)
    output, last, states = call.result
    first = states[0] if isinstance(states, tuple) and form != "packed" else states
    first = first if isinstance(first, Tensor) else first[0]
    assert tensors_of(output)[0] is tensors_of(first)[0]
    every = tensors_of([last, states])
    check_own([*every, *call.gradients()], call.leaves)
    for each in every:
        assert (
            each.transpose(0, 1) if options["batch_first"] and each.shape[0] == 5 else each
        ).is_contiguous()


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", DOORS)
def test_functions_have_contiguous_results(name: str) -> None:
    one = door(name)
    given = [each.requires_grad_() for each in one.given]
    for _ in range(2):
        results = one.ours(*given)
    check_own(results, given)
    assert all(each.is_contiguous() for each in results)
    grads = torch.autograd.grad(results, given, [torch.randn_like(each) for each in results])
    check_own(grads, [*given, *results])
    assert all(each.is_contiguous() for each in grads)


def test_filtered_samples_are_contiguous_along_any_axis() -> None:
    b, x = torch.randn(2), torch.randn(4, 3, 2)
    for axis in range(3):
        shape = [4, 3, 2]
        shape[axis] = 1
        for each in lfilter(b, torch.ones(1), x, axis, torch.zeros(shape)):
            assert each.is_contiguous()


# -- Changes in place ------------------------------------------------------------------------------


def changed(call: Call, place: int, way: str) -> list[Tensor]:
    """Change a result in place; return all results, and gradients behind them."""
    result = call.outputs[place]
    if way == "multiplied":
        result.mul_(2)
    elif way == "without a graph":
        with torch.no_grad():
            result.add_(1)
    else:
        result[..., 1] = 0
    return [*call.outputs, *call.gradients()]


WAYS = "multiplied", "without a graph", "reset"


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_results_of_modules_may_be_changed(kind: str, form: str) -> None:
    nets = pair(kind, form, num_layers=2)
    count = len(Call(nets[0], form).outputs)
    for place, way in itertools.product(range(count), WAYS):
        theirs, ours = (changed(Call(net, form), place, way) for net in nets)
        close(ours, theirs)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_results_without_a_graph_may_be_changed(kind: str, form: str) -> None:
    nets = pair(kind, form, num_layers=2)
    found = []
    for net in nets:
        with torch.no_grad():
            call = Call(net, form)
            for each in call.outputs:
                each[..., 1] = 0
                each.view(-1) if each.is_contiguous() else each.reshape(-1)
                each.mul_(2)
        found.append(call.outputs)
    close(found[1], found[0])


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", DOORS)
def test_results_of_functions_may_be_changed(name: str) -> None:
    """Gradients are right, or refused where they need states that have been changed."""
    one = door(name)
    given = [each.requires_grad_() for each in one.given]

    def gradients(results: Sequence[Tensor]) -> Any:
        loss = sum(each.sin().sum() for each in results)
        assert isinstance(loss, Tensor)
        return torch.autograd.grad(loss, given)

    for place in range(len(one.ours(*given))):
        expected = list(one.plain(*given))
        expected[place] = 2 * expected[place]
        results = one.ours(*given)
        results[place].mul_(2)
        if name.startswith(("affine", "lfilter", "sosfilt")) and place == 0:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                gradients(results)
        else:
            close(gradients(results), gradients(expected))


def with_changed(net: Any, form: str, place: int, needs: str) -> list[Tensor] | str:
    """Return results and gradients if an argument changes before the backward pass, or an error."""
    call = Call(net, form, needs=needs)
    arguments = [*call.given, *net.parameters()]
    before = arguments[place].detach().clone()
    with torch.no_grad():
        arguments[place].mul_(1.5)
    try:
        return [*call.outputs, *call.gradients()]
    except RuntimeError as error:
        return str(error)
    finally:
        with torch.no_grad():
            arguments[place].copy_(before)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("needs", ["all", "parameters", "inputs"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_arguments_may_be_changed_where_pytorch_takes_that(
    kind: str, form: str, needs: str
) -> None:
    """Gradients are those of the call, whether PyTorch has them or an error."""
    nets = pair(kind, form, num_layers=2)
    call = Call(nets[1], form, needs=needs)
    right = [*call.outputs, *call.gradients()]
    for place in range(len(call.given) + len(list(nets[0].parameters()))):
        theirs, ours = (with_changed(net, form, place, needs) for net in nets)
        if isinstance(ours, str):
            is_data = form == "packed" and needs == "inputs" and place == 0
            assert "modified by an inplace operation" in ours
            assert isinstance(theirs, str) or is_data
        else:
            close(ours, right)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("kind", KINDS)
def test_no_second_pass_runs_with_arguments_that_changed(kind: str) -> None:
    _, net = pair(kind, "steps first")
    for way in ("again", "with a graph"):
        call = Call(net, "steps first")
        loss = sum(each.sin().sum() for each in call.outputs)
        assert isinstance(loss, Tensor)
        if way == "again":
            torch.autograd.grad(loss, call.leaves, retain_graph=True)
        with torch.no_grad():
            net.bias_ih_l0.add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace .*forward again"):
            torch.autograd.grad(loss, call.leaves, create_graph=way != "again")
