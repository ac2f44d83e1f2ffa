"""Modules whose states begin anew in the middle, beside PyTorch's, run episode by episode."""

from __future__ import annotations

import copy
import inspect
import itertools
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torchrecurrent
from hypothesis import given
from hypothesis import strategies as st
from sampling import slow
from some_cells import MGU, PeepholeLSTM, Spiking
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch_checks import check_compiled, close, tensors_of

import sparsescan.torch
from sparsescan import InputError, InputTypeError
from sparsescan.recurrent import catalogue
from sparsescan.torch import convert, module
from sparsescan.torch.conversion import torchrecurrent as conversion

EPS = torch.finfo(torch.float64).eps
KINDS = ("RNN", "GRU", "LSTM")


def apart(
    net: Any, x: Any, states: list[Any], lengths: Any, resets: Any, reset_states: list[Any]
) -> Any:
    """Run each episode of each sample by itself; return outputs and last states.

    The first begins with the states of directions that run forward, the last one with the others.
    """
    count, (steps, batch, _) = 1 + net.bidirectional, x.shape
    is_back = (torch.arange(net.num_layers * count) % count == 1)[:, None, None]
    outputs, lasts = [], []
    for n in range(batch):
        length = int(lengths[n])
        cuts = [t for t in range(1, length) if resets[t, n]]
        bounds, parts = [0, *cuts, length], []
        first, last = [], []
        for begin, end in itertools.pairwise(bounds):
            # Directions that run backward in time begin with the last episode.
            is_first = begin == 0 and not bool(resets[0, n])
            used = is_back & (end == length) | ~is_back & is_first
            pairs = zip(states, reset_states, strict=True)
            hx = tuple(torch.where(used, *(each[:, n : n + 1] for each in pair)) for pair in pairs)
            output, after = net(x[begin:end, n : n + 1], hx if len(hx) > 1 else hx[0])
            parts.append(output)
            after = after if isinstance(after, tuple) else (after,)
            first, last = first or after, after
        parts.append(x.new_zeros(steps - length, 1, parts[0].shape[2]))
        outputs.append(torch.cat(parts))
        lasts.append([torch.where(is_back, a, b) for a, b in zip(first, last, strict=True)])
    whole = [torch.cat(each, 1) for each in zip(*lasts, strict=True)]
    return torch.cat(outputs, 1), *whole


@given(st.integers(0, 2**32 - 1))
def test_any_arguments(seed: int) -> None:
    """By kernels and step by step, packed or not, with pruned weights, to zeros or other states."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    kind = KINDS[rng.integers(3)]
    inputs, hidden, layers = (int(n) for n in rng.integers(1, [6, 8, 4]))
    options: dict[str, Any] = {name: bool(rng.integers(2)) for name in ("bias", "bidirectional")}
    if kind == "LSTM" and rng.integers(2):
        options["proj_size"] = int(rng.integers(hidden))
    theirs = getattr(nn, kind)(inputs, hidden, layers, **options, dtype=torch.float64)
    batch_first = bool(rng.integers(2))
    options |= {"batch_first": batch_first, "dtype": torch.float64}
    ours = getattr(sparsescan.torch, kind)(inputs, hidden, layers, **options)
    ours.load_state_dict(theirs.state_dict())
    if rng.integers(3) == 0:
        amount = float(rng.choice([0.3, 0.9]))
        for net in (theirs, ours):
            torch.manual_seed(seed)
            prune.random_unstructured(net, "weight_hh_l0", amount)
    steps, batch = (int(n) for n in rng.integers(1, [9, 7]))
    form = ("batched", "unbatched", "packed")[rng.integers(3)]
    batch = 1 if form == "unbatched" else batch
    lengths = torch.full((batch,), steps)
    if form == "packed":
        lengths = torch.from_numpy(rng.integers(1, steps + 1, batch))
        lengths[rng.integers(batch)] = steps
    resets = torch.from_numpy(rng.random((steps, batch)) < rng.choice([0.1, 0.5]))
    data = torch.randn(steps, batch, inputs, dtype=torch.float64)
    many, states = (layers * (1 + options["bidirectional"]), batch), 1 + (kind == "LSTM")
    sizes = [options.get("proj_size") or hidden, hidden][:states] * 2
    begin = [torch.randn(*many, size, dtype=torch.float64) for size in sizes]
    has_others = bool(rng.integers(2))
    begin[states:] = begin[states:] if has_others else map(torch.zeros_like, begin[states:])

    def run(call: Any) -> list[torch.Tensor]:
        leaves = [each.clone().requires_grad_() for each in (data, *begin)]
        results = call(leaves[0], leaves[1 : 1 + states], leaves[1 + states :])
        own = torch.Generator().manual_seed(seed)
        weights = [torch.randn(e.shape, generator=own, dtype=e.dtype) for e in results]
        loss = sum((each * w).sum() for each, w in zip(results, weights, strict=True))
        params = [p for net in (theirs, ours) for p in net.parameters()]
        grads = torch.autograd.grad(
            loss, [*leaves, *params], allow_unused=True, materialize_grads=True
        )
        half, count = len(params) // 2, len(leaves) - (0 if has_others else states)
        return [*results, *grads[:count], sum_of(grads[len(leaves) :], half)]

    def sum_of(grads: Any, half: int) -> Any:
        return torch.cat([(a + b).flatten() for a, b in zip(grads, grads[half:], strict=False)])

    def call_ours(function: Any) -> Any:
        def call(x: Any, states: list[Any], others: list[Any]) -> list[torch.Tensor]:
            given, flags, hx, anew = x, resets, states, others
            if form == "unbatched":
                given, flags = x[:, 0], resets[:, 0]
                hx, anew = ([each[:, 0] for each in some] for some in (states, others))
            elif batch_first:
                given, flags = x.transpose(0, 1), resets.T
            if form == "packed":
                given, flags = (
                    pack_padded_sequence(each, lengths, batch_first, enforce_sorted=False)
                    for each in (given, flags)
                )
            hx, anew = (tuple(each) if len(each) > 1 else each[0] for each in (hx, anew))
            output, last = function(given, hx, flags, anew if has_others else None)
            if form == "packed":
                output, _ = pad_packed_sequence(output, batch_first)
            last = list(last) if isinstance(last, tuple) else [last]
            if form == "unbatched":
                return [output[:, None], *(each[:, None] for each in last)]
            return [output.transpose(0, 1) if batch_first else output, *last]

        return call

    expected = run(lambda x, states, others: apart(theirs, x, states, lengths, resets, others))

    def call(*arguments: Any) -> Any:
        return ours(*arguments[:2], resets=arguments[2], reset_states=arguments[3])

    close(run(call_ours(call)), expected)
    ours._takes = lambda *_: False
    close(run(call_ours(call)), expected)


def loss_of(net: Any, *given: Any, **more: Any) -> Any:
    output, last = net(*given, **more)
    return output.sin().sum() + sum(each.cos().sum() for each in tensors_of(last))


@pytest.mark.parametrize("name", ["LEM", "Leaky", "SCRN", *slow("UnICORNN", "sLSTM")])
def test_cells_of_the_catalogue(name: str) -> None:
    torch.manual_seed(0)
    net = module(getattr(catalogue, name))(4, 4, dtype=torch.float64)
    x = torch.randn(6, 3, 4, dtype=torch.float64, requires_grad=True)
    resets, found = torch.rand(6, 3) < 0.3, []
    anew = tuple(torch.randn(1, 3, 4, dtype=x.dtype).requires_grad_() for _ in range(net.states))
    others = anew if net.states > 1 else anew[0]
    for call in (
        lambda: net(x, resets=resets, reset_states=others),
        lambda: net._without_kernels(x, None, resets, others),
    ):
        results = tensors_of(call())
        loss = sum(each.sin().sum() for each in results)
        leaves = [x, *anew, *net.parameters()]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        found.append([*results, *grads])
    close(*found)


@pytest.mark.parametrize("net", [sparsescan.torch.GRU(3, 4, 2), module(PeepholeLSTM)(3, 4)])
def test_compiled_models(net: Any) -> None:
    torch.manual_seed(0)
    x, params = torch.randn(6, 2, 3), list(net.parameters())
    anew = [torch.randn(net.num_layers, 1, 4).requires_grad_() for _ in range(net.states)]
    params += anew

    def loss(*resets: torch.Tensor | None) -> torch.Tensor:
        begin = tuple(each.expand(-1, 2, -1) for each in anew)
        states = begin if net.states > 1 else begin[0]
        total = loss_of(net, x, resets=resets[0], reset_states=states)
        return total + sum(loss_of(net, x, resets=each) for each in resets)

    given = torch.rand(6, 2) < 0.4, torch.zeros(6, 2, dtype=torch.bool), None
    check_compiled(loss, given, params)


@pytest.mark.parametrize("kind", ["GRU", *slow("RNN", "LSTM")])
def test_opcheck(kind: str) -> None:
    net = getattr(sparsescan.torch, kind)(2, 3)
    params, resets = list(net.parameters()), torch.rand(5, 4) < 0.5
    x, lengths = torch.randn(5, 4, 2, requires_grad=True), torch.tensor([5, 2, 3, 5])
    about = net.mode, 3, 1, True, False, [-1, -1, 0]
    both = torch.randn(2, 4, 3 * net.states, requires_grad=True)
    for state in (None, both):
        given = x, state, lengths, params, [], *about, True
        torch.library.opcheck(torch.ops.sparsescan.recurrent.default, given, {"resets": resets})
    given = x.detach(), None, None, [each.detach() for each in params], [], *about, False
    operator = torch.ops.sparsescan.recurrent_forward.default
    torch.library.opcheck(operator, given, {"resets": resets})


def test_transforms_of_surrogates() -> None:
    """Maps over resets and both modes: the conformance suite has no surrogates."""
    torch.manual_seed(1)
    net: Any = module(Spiking)(3, 4, dtype=torch.float64)
    params = dict(net.named_parameters())
    x = torch.randn(3, 6, 2, 3, dtype=torch.float64)
    resets = torch.rand(3, 6, 2) < 0.4
    params["anew"] = torch.randn(1, 2, 4 * net.states, dtype=x.dtype).requires_grad_()

    def loss(params: Any, x: torch.Tensor, resets: torch.Tensor) -> torch.Tensor:
        own = {name: each for name, each in params.items() if name != "anew"}
        anew = params["anew"].chunk(net.states, -1)
        options = {"resets": resets, "reset_states": anew if net.states > 1 else anew[0]}
        output, last = torch.func.functional_call(net, own, (x,), options)
        return (output * torch.arange(4)).sum() + sum(m.square().sum() for m in tensors_of(last))

    grads = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(params, x, resets)
    for k in range(3):
        expected = torch.autograd.grad(loss(params, x[k], resets[k]), list(params.values()))
        close([each[k] for each in grads.values()], expected)

    def of_anew(anew: torch.Tensor) -> torch.Tensor:
        return loss({**params, "anew": anew}, x[0], resets[0])

    many = torch.randn(3, *params["anew"].shape, dtype=x.dtype)
    close(torch.func.vmap(of_anew)(many), torch.stack(list(map(of_anew, many))))
    tangent = torch.randn_like(x[0])
    with warnings.catch_warnings():  # of PyTorch, about itself
        warnings.simplefilter("ignore")
        both = torch.func.hessian(of_anew), partial(torch.autograd.functional.hessian, of_anew)
        close(*(hessian(params["anew"]) for hessian in both))
        _, along = torch.func.jvp(lambda x: loss(params, x, resets[0]), (x[0],), (tangent,))
    given = x[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(params, given, resets[0]), given)
    close(along, (grad * tangent).sum())


@pytest.mark.parametrize("name", ["MGU", "JANET", *slow("TGRU", "tauGRU")])
def test_layers_of_torchrecurrent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels and by torchrecurrent's own steps, from no state and from another one."""
    torch.manual_seed(0)
    batch_first = name != "MGU"
    # PyTorch's derivative of Hardsigmoid has a sixth as float32, also for float64.
    known = inspect.signature(getattr(torchrecurrent, f"{name}Cell")).parameters
    own = [key for key in known if key.endswith("nonlinearity") and name in ("SGU", "DSGU")]
    options = dict.fromkeys(own, "tanh")
    net = getattr(torchrecurrent, name)(4, 4, 2, 0.0, batch_first, **options).double()
    theirs = copy.deepcopy(net)
    assert convert(net).replaced == [""]
    x = torch.randn(7, 3, 4, dtype=torch.float64)
    resets, state = torch.rand(7, 3) < 0.3, None

    def turned(array: torch.Tensor) -> torch.Tensor:
        return array.transpose(0, 1) if batch_first else array

    for _ in range(2):
        given = turned(x).clone().requires_grad_()
        assert conversion._sequence_of(net, given, state) is not None
        results = net(given, state, resets=turned(resets))
        found = [results, torch.autograd.grad(results[0].sin().sum(), given)]
        if name == "tauGRU":
            break
        with monkeypatch.context() as patch:
            patch.setattr(conversion, "_sequence_of", lambda *_: None)
            results = net(given, state, resets=turned(resets))
        close(found, [results, torch.autograd.grad(results[0].sin().sum(), given)])
        _, state = theirs(turned(x))
        state = tuple(each.detach() for each in state) if name == "JANET" else None
        resets[0, 1] = True
    # Each episode of one sample by itself.
    cuts = [0, *(t for t in range(1, 7) if resets[t, 0]), 7]
    parts = [theirs(turned(x[a:b, :1]), None)[0] for a, b in itertools.pairwise(cuts)]
    output, _ = net(turned(x[:, :1]), None, resets=turned(resets[:, :1]))
    close(output, torch.cat(parts, 1 if batch_first else 0))


def test_a_layer_of_torchrecurrent_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    net = torchrecurrent.tauGRU(3, 4)
    convert(net)
    resets = torch.zeros(5, 2, dtype=torch.bool)
    with pytest.raises(InputError, match="resets were given to a tauGRU without kernels"):
        net.bfloat16()(torch.randn(5, 2, 3).bfloat16(), resets=resets)
    other = torchrecurrent.MGU(3, 4)
    convert(other)
    for x in (torch.zeros(5, 3), [1.0]):
        with pytest.raises(InputError, match=r"inp is .*; expected a tensor \(T, batch, input_s"):
            other(x, resets=resets)
    with pytest.raises(InputTypeError, match=r"resets has dtype torch\.int64; expected bool"):
        other(torch.zeros(5, 2, 3), resets=resets.long())


def test_errors() -> None:
    x, flags = torch.zeros(5, 2, 3), torch.zeros(5, 2, dtype=torch.bool)
    lengths = torch.tensor([2, 5])

    def packed(data: Any, lengths: Any = lengths) -> PackedSequence:
        return pack_padded_sequence(data, lengths, enforce_sorted=False)

    for net in (sparsescan.torch.GRU(3, 4), module(MGU)(3, 4)):
        for own_x, resets, error, said in (
            (x, flags[0], InputError, r"resets has shape \(2,\); expected \(5, 2\), as input"),
            (x, flags.T, InputError, r"resets has shape \(2, 5\); expected \(5, 2\)"),
            (x[:, 0], flags, InputError, r"resets has shape \(5, 2\); expected \(5,\), as input"),
            (
                x,
                flags.int(),
                InputTypeError,
                r"resets has dtype torch\.int32; expected bool",
            ),
            (x, flags.numpy(), InputTypeError, "expected a tensor of bools"),
            (x, packed(flags), InputTypeError, "expected a tensor of bools"),
            (x, flags.to("meta"), InputError, "resets is on meta; expected cpu, where input is"),
            (packed(x), flags, InputTypeError, "expected a PackedSequence of bools, as input is"),
            (packed(x), packed(x), InputTypeError, r"resets.data has dtype torch\.float32"),
            (packed(x), packed(flags, [5, 5]), InputError, r"resets.data has shape \(10,\)"),
            (packed(x), packed(flags, [5, 2]), InputError, "has other batch_sizes or sorted_indic"),
            (packed(x), packed(flags, [3, 4]), InputError, "has other batch_sizes or sorted_indic"),
        ):
            with pytest.raises(error, match=said):
                net(own_x, resets=resets)
            with pytest.raises(error, match=said):
                net._without_kernels(own_x, None, resets)
        with pytest.raises(InputError, match=r"input has shape \(5, 2, 4\); expected"):
            net(torch.zeros(5, 2, 4), resets=flags)
        for own, anew, error, said in (
            (None, torch.zeros(1, 2, 4), InputError, "reset_states is given, and resets is None"),
            (flags, torch.zeros(1, 4), InputError, r"a state of reset_states has shape \(1, 4\)"),
            (flags, [1.0], InputTypeError, r"reset_states has \[1.0\]; expected a tensor"),
            (flags, (x, x), InputTypeError, r"expected a tensor of shape \(1, 2, 4\)"),
        ):
            with pytest.raises(error, match=said):
                net(x, resets=own, reset_states=anew)
    with pytest.raises(TypeError):
        sparsescan.torch.GRU(3, 4)(x, None, flags)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_they_are_computed_step_by_step() -> None:
    torch.manual_seed(0)
    net, x = sparsescan.torch.GRU(3, 4, dtype=torch.float64), torch.randn(5, 2, 3).double()
    resets = torch.rand(5, 2) < 0.5
    expected = net(x, resets=resets)
    actual = net.cuda()(x.cuda(), resets=resets.cuda())
    close([each.cpu() for each in tensors_of(actual)], expected)


INTEGERS = (*(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), torch.uint32)


@pytest.mark.parametrize("batch_first", [False, True])
def test_flags_may_have_an_axis_of_one(batch_first: bool) -> None:
    """As those of RL libraries, which are masks of states."""
    x, flags = torch.randn(5, 9, 3), torch.rand(5, 9) < 0.4
    lengths = torch.tensor([5, 9, 2, 7, 1] if batch_first else [5, 1, 2, 3, 4, 5, 3, 2, 1])
    pack = partial(pack_padded_sequence, lengths=lengths, batch_first=batch_first)
    pack = partial(pack, enforce_sorted=False)
    nets = [
        sparsescan.torch.GRU(3, 6, 2, batch_first=batch_first),
        module(catalogue.MGU)(3, 6, batch_first=batch_first),
        torchrecurrent.MGU(3, 6, batch_first=batch_first),
    ]
    convert(nn.Sequential(*nets[2:]))
    for net in nets:
        expected, _ = net(x, resets=flags)
        assert torch.equal(net(x, resets=flags[:, :, None])[0], expected)
        for integer in INTEGERS:
            with pytest.raises(InputTypeError, match="expected bool: resets != 0"):
                net(x, resets=flags.to(integer))
        mapped = torch.func.vmap(lambda one, anew, net=net: net(one, resets=anew)[0])
        many = x[None], flags[None, :, :, None]
        close(mapped(*many)[0], expected)
        with pytest.raises(InputError, match=r"resets has shape \(5, 9, 1, 1\)"):
            net(x, resets=flags[:, :, None, None])
    for net in nets[:2]:
        expected, _ = net(pack(x), resets=pack(flags))
        assert torch.equal(net(pack(x), resets=pack(flags[:, :, None]))[0].data, expected.data)
        expected, _ = net(x[0], resets=flags[0])
        assert torch.equal(net(x[0], resets=flags[0, :, None])[0], expected)
