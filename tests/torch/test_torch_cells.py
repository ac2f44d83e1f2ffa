"""Modules of any cell, beside autograd of the cell's definition in float64."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from module_copies import copies_of
from network_oracle import autograd_of
from sampling import slow
from some_cells import (
    CELLS,
    MGU,
    SCRN,
    Driven,
    Elementwise,
    Leaky,
    Masked,
    PeepholeLSTM,
    Spiking,
    Tied,
)
from torch.nn.utils import prune
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch_checks import close, tensors_of

from sparsescan import InputError, InputTypeError
from sparsescan.recurrent import Cell, Hidden, Input, Recurrent, catalogue
from sparsescan.torch import module
from sparsescan.torch.cells import CellModule

EPS = torch.finfo(torch.float64).eps
READ_UNITS = (Leaky, Elementwise)


ALL = [*CELLS.values(), Spiking]


def step_by_step(net: Any, given: Any, hx: Any = None) -> Any:
    """Run a module by PyTorch's own operations."""
    return net._without_kernels(given, hx)


def made(rng: np.random.Generator, **more: Any) -> tuple[Any, Any]:
    """Return a module, maybe of pruned weights, and the network that it is."""
    cell = ALL[rng.integers(len(ALL))]
    inputs, hidden, layers = (int(n) for n in rng.integers(1, [6, 8, 4]))
    options: dict[str, Any] = {
        "bias": bool(rng.integers(2)),
        "bidirectional": bool(rng.integers(2)),
    }
    if cell in READ_UNITS:
        inputs, layers = hidden, 1
    net = module(cell)(inputs, hidden, layers, **options, **more, dtype=torch.float64)
    if "weight_hh_l0" in dict(net.named_parameters()) and rng.integers(2):
        prune.random_unstructured(net, "weight_hh_l0", float(rng.choice([0.3, 0.9])))
    theirs = Recurrent(cell, inputs, hidden, layers, **options, dtype=np.float64)
    for name in theirs.params:
        setattr(theirs, name, getattr(net, name).detach().numpy())
    return net, theirs


@given(st.integers(0, 2**32 - 1))
def test_any_arguments(seed: int) -> None:
    """Results and gradients by kernels and step by step, in any form, of any cell."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    batch_first = bool(rng.integers(2))
    net, theirs = made(rng, batch_first=batch_first)
    steps, batch = (int(n) for n in rng.integers(1, [9, 7]))
    form = ("batched", "unbatched", "packed")[rng.integers(3)]
    batch = 1 if form == "unbatched" else batch
    lengths = rng.integers(1, steps + 1, batch) if form == "packed" else None
    if lengths is not None:
        lengths[rng.integers(batch)] = steps
    lead = net.num_layers * (1 + net.bidirectional)
    x = rng.standard_normal((steps, batch, net.input_size))
    begin = rng.standard_normal((lead, batch, net.states * net.hidden_size))
    has_state = bool(rng.integers(2))
    above = rng.standard_normal((steps, batch, net.hidden_size * (1 + net.bidirectional)))
    if lengths is not None:
        above *= (np.arange(steps)[:, None] < lengths)[..., None]
    carry = rng.standard_normal(begin.shape)
    expected = autograd_of(theirs, x, begin * has_state, lengths, above, carry)
    assume(expected.nearest > 1e-9)

    def call(function: Any) -> None:
        leaf = torch.tensor(x, requires_grad=True)
        state = torch.tensor(begin, requires_grad=True)
        given: Any = leaf.squeeze(1) if form == "unbatched" else leaf
        if batch_first and form != "unbatched":
            given = given.transpose(0, 1)
        if lengths is not None:
            own = torch.from_numpy(lengths)
            given = pack_padded_sequence(given, own, batch_first, enforce_sorted=False)
        hx: Any = state.squeeze(1) if form == "unbatched" else state
        hx = hx.chunk(net.states, -1) if net.states > 1 else hx
        output, last = function(given, hx if has_state else None)
        assert isinstance(last, tuple) == (net.states > 1)
        last = torch.cat(tensors_of(last), -1)
        if lengths is not None:
            assert isinstance(output, PackedSequence)
            output, _ = pad_packed_sequence(output, batch_first)
        if form == "unbatched":
            output, last = output.unsqueeze(1), last.unsqueeze(1)
        elif batch_first:
            output = output.transpose(0, 1)
        close([output, last], [expected["output"], expected["last"]])
        leaves = [leaf, state, *(getattr(net, name) for name in theirs.params)]
        loss = (output * torch.tensor(above)).sum() + (last * torch.tensor(carry)).sum()
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        names = ["input", "state", *theirs.params]
        for name, leaf_, grad in zip(names, leaves, grads, strict=True):
            if name == "state" and not has_state:
                continue
            # Masked weights have gradients of the definition, too.
            close(grad.reshape(leaf_.shape), expected[name])

    assert net._takes(torch.tensor(x), None, [p for each in net.all_weights for p in each])
    call(net)
    call(partial(step_by_step, net))


@pytest.mark.parametrize("name", ["LEM", "Leaky", *slow(*catalogue.__all__)])
def test_each_cell_of_the_catalogue(name: str) -> None:
    """Kernels and PyTorch's own operations have the same results and gradients."""
    net = module(getattr(catalogue, name))(4, 4, dtype=torch.float64)
    x = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    leaves, found = [x, *net.parameters()], []
    for function in (net, partial(step_by_step, net)):
        torch.manual_seed(0)  # of masks
        output, last = function(x)
        loss = output.sin().sum() + sum(each.cos().sum() for each in tensors_of(last))
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        found.append([output, *tensors_of(last), *grads])
    close(*found)


@pytest.mark.parametrize("cell", [MGU, *slow(SCRN)])
def test_opcheck(cell: Any) -> None:
    net = module(cell)(2, 3)
    params = list(net.parameters())
    state = torch.randn(1, 4, 3 * net.states, requires_grad=True)
    x, lengths = torch.randn(5, 4, 2, requires_grad=True), torch.tensor([5, 2, 3, 5])
    about = net.mode, 3, 1, True, False, [-1, -1, 0]
    for more in ((None, None), (state, lengths)):
        given = x, *more, params, [], *about, True
        torch.library.opcheck(torch.ops.sparsescan.recurrent.default, given)
    given = x.detach(), None, lengths, [each.detach() for each in params], [], *about, False
    torch.library.opcheck(torch.ops.sparsescan.recurrent_forward.default, given)


def test_a_mode_that_nobody_has_registered() -> None:
    net = module(MGU)(2, 3)
    given = torch.zeros(5, 4, 2), None, None, list(net.parameters()), [], "MGU.0123", 3, 1, True
    with pytest.raises(InputError, match=r"MGU\.0123 is no mode of a recurrent network here"):
        torch.ops.sparsescan.recurrent(*given, False, [-1, -1, 0], False)


def test_modes_are_what_is_computed() -> None:
    """Equal classes have one mode; others have their own, whatever their names."""
    first = module(Spiking)(2, 3)
    assert first.mode == module(Spiking)(4, 5, 2).mode
    assert first.mode != module(Spiking)(2, 3, decay=0.8).mode

    def again(factor: float) -> Any:
        class Twice(Cell):
            weight_ih = Input()
            weight_hh = Hidden()

            def step(self, x: Any, h: Any) -> Any:
                return factor * (self.weight_ih(x) + self.weight_hh(h))

        return module(Twice)(2, 3)

    one, two, other = again(0.5), again(0.5), again(0.25)
    assert one.mode == two.mode != other.mode
    x = torch.randn(4, 2, 2)
    other.load_state_dict(one.state_dict())
    assert not torch.equal(one(x)[0], other(x)[0])


def test_traces() -> None:
    net = module(Spiking)(3, 4, dtype=torch.float64)
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    with warnings.catch_warnings(), torch.no_grad():  # of PyTorch, about itself
        warnings.simplefilter("ignore")
        traced: Any = torch.jit.trace(net, x, check_trace=False)
    close(traced(2 * x)[0], net(2 * x)[0])


def test_dropout() -> None:
    torch.manual_seed(0)
    net = module(MGU)(3, 4, 3, dropout=0.5, dtype=torch.float64)
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    outputs = []
    for function in (net, partial(step_by_step, net)):
        torch.manual_seed(1)
        outputs.append(function(x)[0])
        assert not torch.equal(function(x)[0], outputs[-1])
    close(*outputs)
    net.eval()
    assert torch.equal(net(x)[0], net(x)[0])


def test_copies_and_files() -> None:
    net = module(Spiking)(3, 4, 2, decay=0.5)
    x = torch.randn(5, 2, 3)
    expected, _ = net(x)
    for other in copies_of(net):
        assert torch.equal(other(x)[0], expected)
        assert type(other) is type(net)
        assert other.weight_hh_l0 is not net.weight_hh_l0
        assert other.mode == net.mode
    assert repr(net) == "Spiking(3, 4, num_layers=2, decay=0.5)"
    assert isinstance(net, CellModule)
    assert module(Spiking) is type(net)


def test_parameters() -> None:
    """Names and order of the cell's, and where they begin."""
    torch.manual_seed(0)
    net = module(PeepholeLSTM)(3, 400, 2, bidirectional=True)
    theirs = Recurrent(PeepholeLSTM, 3, 400, 2, bidirectional=True)
    shapes = {name: tuple(each.shape) for name, each in net.named_parameters()}
    assert list(shapes.items()) == [(name, each.shape) for name, each in theirs.params.items()]
    for param in net.parameters():
        assert 0.048 < float(param.detach().abs().max()) <= 0.05
    tied = module(Tied)(3, 4)
    assert tied.alpha_l0.item() == pytest.approx(0.3)
    assert tied.scale_l0.tolist() == pytest.approx([0.7] * 4)
    assert [each.shape for each in module(MGU)(3, 4, bias=False).parameters()] == [(8, 3), (8, 4)]


def test_errors() -> None:
    with pytest.raises(InputTypeError, match="cell is 3; expected a class of cells, with a step"):
        module(3)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="expected a class of cells, with a step"):
        module(Cell)
    with pytest.raises(InputTypeError, match="Spiking has no argument 'dt'"):
        module(Spiking)(3, 4, dt=1.0)
    with pytest.raises(InputError, match="dropout is 2; expected a number from 0 to 1"):
        module(MGU)(3, 4, dropout=2)
    net = module(PeepholeLSTM)(3, 4)
    h = torch.zeros(1, 2, 4)
    for x, hx, said in (
        ([1.0], None, r"input is \[1\.0\]; expected a tensor"),
        (torch.zeros(5, 2, 4), None, r"input has shape \(5, 2, 4\); expected \(T, batch, 3\)"),
        (torch.zeros(2, 5, 2, 3), None, "input has shape"),
        (torch.zeros(5, 2, 3), h, r"expected a tuple of 2 tensors of shape \(1, 2, 4\)"),
        (torch.zeros(5, 2, 3), (h, h[:, :1]), r"a state of hx has shape \(1, 1, 4\); expected"),
    ):
        with pytest.raises((InputError, InputTypeError), match=said):
            net(x, hx)
    with pytest.raises(RuntimeError, match="dtype"):
        net(torch.zeros(5, 2, 3, dtype=torch.float64))


# -- Random masks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["whole", "batch_first", "alone", "packed"])
def test_masks_are_those_of_dropout(form: str) -> None:
    """For a seed, in each form; once for a sequence or a step; and expectations in inference."""
    units, steps, batch, packed = 3, 5, 4, None
    net = module(Masked)(2, units, 2, batch_first=form == "batch_first", bidirectional=True)
    shape = {"batch_first": (batch, steps), "alone": (steps,)}.get(form, (steps, batch))
    x = torch.randn(*shape, 2)
    if form == "packed":
        x = packed = pack_padded_sequence(x, torch.tensor([2, 5, 3, 5]), enforce_sorted=False)

    def ones(*, is_once: bool) -> Any:
        if packed is not None:
            return torch.ones(batch if is_once else len(packed.data), units)
        shown = [1 if is_once and k == (form == "batch_first") else n for k, n in enumerate(shape)]
        return torch.ones(*shown, units)

    torch.manual_seed(1)
    given = {}
    for end in ("_l0", "_l0_reverse", "_l1", "_l1_reverse"):
        once = torch.nn.functional.dropout(ones(is_once=True), 0.6)
        keep = torch.nn.functional.dropout(ones(is_once=False), 0.25)
        given[f"keep{end}"], given[f"once{end}"] = (keep != 0).to(keep.dtype), once
        if packed is not None:
            sorted_rows = torch.cat([torch.arange(n) for n in packed.batch_sizes.tolist()])
            given[f"once{end}"] = once[sorted_rows]
    if packed is not None:
        given = {name: packed._replace(data=each) for name, each in given.items()}
    torch.manual_seed(1)
    drawn = net(x)
    close(drawn, net(x, **given), factor=0)
    close(drawn, net._without_kernels(x, None, **given))
    assert not torch.equal(tensors_of(drawn)[0], tensors_of(net(x))[0])
    net.eval()
    mean = {name: 0.75 if name.startswith("keep") else 1.0 for name in given}
    if packed is None:
        full = {name: torch.full((units,), each) for name, each in mean.items()}
    else:
        rows = torch.ones(len(packed.data), units)
        full = {name: packed._replace(data=each * rows) for name, each in mean.items()}
    close(net(x), net(x, **full), factor=0)


def test_further_inputs_that_are_refused() -> None:
    net, x = module(Driven)(2, 3), torch.zeros(5, 4, 2)
    for further, error, said in (
        ({}, InputError, r"drive_l0 is not given; .* broadcasts to \(5, 4, 3\)"),
        ({"drive_l0": 1.0}, InputTypeError, "drive_l0 is 1.0; expected a Tensor, as input"),
        ({"drive_l0": x[:, 0]}, InputError, r"drive_l0 has shape \(5, 2\); expected one that"),
        ({"drive": x}, InputTypeError, "drive is no argument of this call; .*drive_l0, clock_l0"),
    ):
        with pytest.raises(error, match=said):
            net(x, **further)
    with pytest.raises(InputError, match=r"once is 1\.5; expected a number from 0 to 1"):
        module(Masked)(2, 3, once=1.5)
