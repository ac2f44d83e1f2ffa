"""Loops of PyTorch, run by kernels: they give what a loop in Python gives, with all derivatives."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils import _pytree as pytree

from sparsescan.errors import InputError, InputTypeError
from sparsescan.torch import explain, scan
from sparsescan.torch.scan import _Loop

STEPS, BATCH, INPUTS, UNITS = 5, 3, 2, 4
run = _Loop.run
WIDE = torch.float64
Step = Callable[[Any, Any], tuple[Any, Any]]
Body = tuple[nn.Module, Step, Any]


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(7)
    default = torch.get_default_dtype()
    torch.set_default_dtype(WIDE)
    yield
    torch.set_default_dtype(default)


def loop(step: Step, init: Any, xs: Any, reverse: bool = False) -> tuple[Any, Any]:
    """Return what the documentation of PyTorch's ``scan`` says."""
    carry, rows = init, []
    count = len(pytree.tree_leaves(xs)[0])
    for t in reversed(range(count)) if reverse else range(count):
        carry, y = step(carry, pytree.tree_map(lambda each, t=t: each[t], xs))
        rows.append(y)
    rows = rows[::-1] if reverse else rows
    return carry, pytree.tree_map(
        lambda *each: None if each[0] is None else torch.stack(each), *rows
    )


l1_unstructured: Any = prune.l1_unstructured


class LayerNormGRU(nn.Module):
    """A GRU with normalized gates, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(INPUTS, 3 * UNITS), nn.Linear(UNITS, 3 * UNITS, bias=False)
        self.norm = nn.LayerNorm(UNITS)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        a, b = self.x(x).chunk(3, -1), self.h(h).chunk(3, -1)
        r, z = torch.sigmoid(self.norm(a[0] + b[0])), torch.sigmoid(a[1] + b[1])
        return (1 - z) * torch.tanh(a[2] + r * b[2]) + z * h


def gru() -> Body:
    cell = nn.GRUCell(INPUTS, UNITS)

    def step(h: Any, x: Any) -> Any:
        h = cell(x, h)
        return h, h

    return cell, step, torch.zeros(BATCH, UNITS)


def lstm() -> Body:
    cell = nn.LSTMCell(INPUTS, UNITS)

    def step(state: Any, x: Any) -> Any:
        h, c = cell(x, state)
        return (h, c), {"h": h, "twice": h, "nothing": None, "x": x}

    return cell, step, (torch.randn(BATCH, UNITS), torch.randn(BATCH, UNITS))


def normed() -> Body:
    cell = LayerNormGRU()

    def step(h: Any, x: Any) -> Any:
        h = cell(h, x)
        return h, h.square().sum(-1)

    return cell, step, torch.randn(BATCH, UNITS)


def concatenated() -> Body:
    both, head = nn.Linear(INPUTS + UNITS, UNITS), nn.Linear(UNITS, 3)

    def step(carry: Any, x: Any) -> Any:
        h, total, none = carry
        h = functional.relu(both(torch.cat([x, h], -1))) * 0.9 + 0.1 * h
        y = functional.gelu(head(h))
        return (h, total + y.sum(), none), y

    return nn.ModuleList([both, head]), step, (torch.randn(BATCH, UNITS), torch.zeros(()), None)


def leaky() -> Body:
    """Neurons with a reset that is detached, products by ``@``, and clamped decays."""
    cell = nn.ParameterDict({"w": torch.randn(UNITS, UNITS), "decay": torch.randn(UNITS)})
    inputs = nn.Linear(INPUTS, UNITS)

    def step(v: Any, x: Any) -> Any:
        decay = cell["decay"].clamp(0, 1)
        reset = (v > 1).to(v.dtype).detach()
        v = decay * v + inputs(x) + functional.softplus(v) @ cell["w"] - reset
        v = torch.where(v < -2, -2.0, v.tanh())
        return v, torch.maximum(v, 0.5 * v.abs())

    return nn.ModuleList([cell, inputs]), step, torch.randn(BATCH, UNITS)


CAPTURED = [gru, lstm, normed, concatenated, leaky]


def leaves_of(tree: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(tree) if each is not None]


def check(step: Step, init: Any, xs: Any, module: nn.Module, **options: Any) -> None:
    """Compare results and gradients with those of a loop."""
    given = [each for each in leaves_of((init, xs)) if each.requires_grad]
    given += [each for each in module.parameters() if each.requires_grad]
    found, expected = scan(step, init, xs, **options), loop(step, init, xs, **options)
    assert str(pytree.tree_structure(found)) == str(pytree.tree_structure(expected))
    grads = []
    for results in (found, expected):
        loss: Any = sum(
            (each * (k + each).sin()).sum() for k, each in enumerate(leaves_of(results))
        )
        grads.append(torch.autograd.grad(loss, given, allow_unused=True) if given else ())
    pairs = [*zip(leaves_of(found), leaves_of(expected), strict=True), *zip(*grads, strict=True)]
    for ours, theirs in pairs:
        if theirs is None:
            assert ours is None or not ours.any()
            continue
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("body", CAPTURED)
@pytest.mark.parametrize("reverse", [False, True])
def test_kernels_run_a_body(body: Any, reverse: bool) -> None:
    module, step, init = body()
    init = pytree.tree_map(lambda each: each if each is None else each.requires_grad_(), init)
    xs = torch.randn(STEPS, BATCH, INPUTS, requires_grad=True)
    how = explain(step, init, xs)
    assert how.is_captured, how
    check(step, init, xs, module, reverse=reverse)


def refused() -> dict[str, tuple[Step, str]]:
    """Return steps that no kernel runs, and what is in the way."""
    cell, norm = nn.GRUCell(INPUTS, UNITS), nn.BatchNorm1d(UNITS)
    counts, calls, number = torch.zeros(()), [0], torch.tensor(0.7)

    def after(change: Callable[[Tensor], Tensor]) -> Step:
        def step(h: Any, x: Any) -> Any:
            h = change(cell(x, h))
            return h, h

        return step

    def counted(h: Tensor) -> Tensor:
        counts.add_(1)
        return h * counts

    def alternating(h: Any) -> Any:
        calls.append(0)
        return h * (len(calls) % 2)

    def hooked(h: Any) -> Any:
        h.register_hook(lambda g: 2 * g)
        return h

    def switched(h: Tensor) -> Tensor:
        with torch.no_grad():
            return h * 2

    some: dict[str, tuple[Step, str]] = {
        "dropout": (after(lambda h: functional.dropout(h, 0.5)), "bernoulli"),
        "random": (after(lambda h: h + torch.randn(UNITS)), "rand"),
        "statistics": (after(norm), "add_"),
        "buffer": (after(counted), "add_"),
        "item": (after(lambda h: h * float(h.sum() > 0)), "float"),
        "branch": (after(lambda h: h if h.sum() > 0 else 2 * h), "bool"),
        "no_grad": (after(switched), "grad_enabled"),
        "random branch": (after(lambda h: h if random.random() < 2 else -h), "random"),
        "counter": (after(alternating), "Python"),
        "sorted": (after(lambda h: h.sort(-1)[0]), "sort"),
        "numpy": (after(lambda h: h + torch.from_numpy(h.detach().numpy())), "numpy"),
        "hooked": (after(hooked), "function"),
        "attribute": (after(lambda h: h * (2 if h.requires_grad else 1)), "requires_grad"),
        # Of tensors in place of numbers.
        "bound": (after(lambda h: h.clamp(-0.5, number)), "reads a number"),
        "alpha": (after(lambda h: torch.add(h, h, alpha=number)), "reads a number"),
        "full": (after(lambda h: h * torch.full((UNITS,), number)), "reads a number"),
        "list": (after(lambda h: h * torch.tensor([number] * UNITS)), "reads a number"),
        "list by name": (after(lambda h: h * torch.as_tensor(data=[number])), "reads a number"),
        "size": (
            after(lambda h: h.repeat_interleave((3 * number).long(), 1)[:, :UNITS]),
            "depends on numbers",
        ),
    }
    return some


@pytest.mark.parametrize("name", refused())
def test_other_bodies_run_as_a_loop_and_say_why(name: str) -> None:
    step, why = refused()[name]
    init, xs = torch.randn(BATCH, UNITS), torch.randn(STEPS, BATCH, INPUTS)
    for _ in range(2):  # traced, and found
        how = explain(step, init, xs)
        assert not how.is_captured
        assert why in how.text.lower() or why in how.text
    if name == "counter":  # each run is another one
        return
    results = []
    for function in (scan, loop):
        torch.manual_seed(3)
        own, _ = refused()[name]  # with buffers of its own
        results.append(function(own, init, xs))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


def test_numbers_that_a_step_draws_are_those_of_the_loop_though_one_without_was_traced() -> None:
    cell = nn.RNNCell(INPUTS, UNITS)

    def made(chance: float) -> Step:
        def step(h: Any, x: Any) -> Any:
            h = cell(x, h)
            if chance and random.random() < chance:
                h = -h
            return h, h

        return step

    init, xs = torch.randn(BATCH, UNITS), torch.randn(STEPS, BATCH, INPUTS)
    for chance in (0.0, 1.0, 0.5):
        results = []
        for function in (scan, loop):
            random.seed(1)
            results.append(function(made(chance), init, xs))
        torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)
    assert explain(made(0), init, xs).is_captured
    assert "random" in explain(made(0.5), init, xs).text


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_a_life_of_a_module() -> None:
    """Whatever happens to a module, the loop gives what it gives now."""
    module = LayerNormGRU()
    held: dict[str, Any] = {"module": module, "scale": 1.0}

    def step(h: Any, x: Any) -> Any:
        h = held["scale"] * held["module"](h, x)
        return h, h

    def change(**options: Any) -> Callable[[], Any]:
        return lambda: held.update(options)

    hooks: list[Any] = []
    events: list[Callable[[], Any]] = [
        lambda: None,
        lambda: module.eval(),
        lambda: setattr(module, "h", nn.Linear(UNITS, 3 * UNITS)),
        lambda: l1_unstructured(module.x, "weight", 0.5),
        lambda: hooks.append(module.register_forward_hook(lambda m, args, out: 0.5 * out)),
        lambda: hooks.pop().remove(),
        lambda: hooks.append(module.x.register_full_backward_hook(lambda m, g, o: (None,))),
        lambda: hooks.pop().remove(),
        lambda: parametrizations.orthogonal(module.h, "weight"),
        change(module=copy.deepcopy(LayerNormGRU())),
        change(scale=0.5),
        lambda: held["module"].h.weight.requires_grad_(False),
        lambda: setattr(held["module"], "norm", nn.Identity()),
        lambda: setattr(held["module"], "norm", nn.Dropout(0.0)),
    ]
    xs = torch.randn(STEPS, BATCH, INPUTS)
    for event in events:
        event()
        check(step, torch.zeros(BATCH, UNITS), xs, held["module"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch, at first use
def test_forward_mode_second_derivatives_and_maps() -> None:
    _, step, init = normed()
    xs = torch.randn(STEPS, BATCH, INPUTS)

    def run(function: Any) -> Callable[..., Tensor]:
        return lambda init, xs: function(step, init, xs)[1].sin().sum()

    turn = torch.randn_like(xs)

    def derivatives(function: Callable[..., Tensor]) -> list[Any]:
        grad = torch.func.grad(function, 1)
        return [
            grad(init, xs),
            torch.func.jvp(lambda x: function(init, x), (xs,), (turn,))[1],
            torch.func.grad(lambda x: grad(init, x).square().sum())(xs),
            torch.func.vmap(grad, (None, 0))(init, torch.stack([xs, turn])),
        ]

    pairs = zip(derivatives(run(scan)), derivatives(run(loop)), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_calls_kernels_between_its_graphs(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, rate = nn.GRUCell(INPUTS, UNITS), nn.Parameter(torch.randn(UNITS))
    calls = []
    monkeypatch.setattr(_Loop, "run", lambda loop: (calls.append(loop.found), run(loop))[1])

    def model(x: Tensor) -> Tensor:
        decay = torch.sigmoid(rate)

        def step(carry: Any, x: Tensor) -> Any:
            h, total = carry
            h = decay * cell(x, h)
            return (h, total + h), {"h": h, "nothing": None}

        x = x.tanh()
        (_, total), ys = scan(step, (x.new_zeros(BATCH, UNITS), x.new_ones(BATCH, UNITS)), x)
        return ys["h"].relu().sum() + total.sin().sum()

    leaves = [torch.randn(STEPS, BATCH, INPUTS, requires_grad=True), rate, *cell.parameters()]
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        results = [each(leaves[0]) for each in (model, compiled)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(each, leaves) for each in results))
    assert len(calls) == 4
    assert all(found.made.plan for found in calls)


def test_a_graph_that_has_to_be_whole_is_refused_and_transforms_in_one_have_all_steps() -> None:
    _, step, init = gru()
    xs = torch.randn(STEPS, BATCH, INPUTS)

    def loss(xs: Tensor) -> Tensor:
        return scan(step, init, xs)[1].sin().sum()

    def slopes(xs: Tensor) -> Tensor:
        found: Tensor = torch.func.grad(loss)(xs)
        return found

    with pytest.raises(RuntimeError, match=r"disable|marked as skipped"):
        torch.compile(loss, backend="eager", fullgraph=True)(xs)
    compiled = torch.compile(slopes, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(xs), slopes(xs))


def test_no_steps_other_axes_and_results_of_their_own() -> None:
    _, step, init = lstm()
    last, ys = scan(step, init, torch.zeros(0, BATCH, INPUTS))
    assert ys["h"].shape == (0, BATCH, UNITS)
    assert ys["nothing"] is None
    torch.testing.assert_close(last, init)
    xs = torch.randn(STEPS, BATCH, INPUTS)
    expected = loop(step, init, xs)[1]
    _, ys = scan(step, init, xs.movedim(0, 1), dim=1)
    torch.testing.assert_close(ys["h"], expected["h"].movedim(0, 1))
    _, ys = scan(step, init, xs)
    with torch.no_grad():
        ys["h"].zero_()
        ys["x"].zero_()
    assert ys["twice"].any()
    assert xs.all()
    assert scan(lambda h, x: (h, x), torch.zeros(2), torch.ones(3, 2))[1].shape == (3, 2)


def test_wrong_arguments() -> None:
    _, step, init = gru()
    xs = torch.zeros(STEPS, BATCH, INPUTS)
    with pytest.raises(InputTypeError, match="combine_fn is 3"):
        scan(3, init, xs)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="init has 1"):
        scan(step, 1, xs)
    with pytest.raises(InputError, match="dim is 3"):
        scan(step, init, xs, dim=3)
    with pytest.raises(InputError, match="xs has no tensors"):
        scan(step, init, ())
    with pytest.raises(InputError, match=r"xs has \[1, 2\] steps"):
        scan(step, init, (torch.zeros(1, 2), torch.zeros(2, 2)))
    with pytest.raises(InputError, match="after a step"):
        scan(lambda h, x: (h[:1], h), init, xs)
    with pytest.raises(InputError, match="after a step"):
        scan(lambda h, x: ((h, h), h), init, xs)
    with pytest.raises(InputTypeError, match="expected a carry and an output"):
        scan(lambda h, x: h, init, xs)


def test_a_step_reads_shapes_and_a_known_step_begins_like_another() -> None:
    """Calls that return sizes, or what they are given, are known when steps run again."""
    init, xs = torch.randn(BATCH, UNITS), torch.randn(STEPS, BATCH, UNITS)

    def first(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h + x).reshape(x.shape)
        return h, h

    def second(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h + x).contiguous()
        return h, h

    for step in (first, second, first):
        assert explain(step, init, xs).is_captured
        torch.testing.assert_close(scan(step, init, xs), loop(step, init, xs))


def test_norms_of_inputs_are_known_before_the_loop() -> None:
    """A kernel reads them as they are, not the product and its sums; other products stay in it."""
    inputs, norm, other = nn.Linear(INPUTS, UNITS), nn.LayerNorm(UNITS), nn.Linear(INPUTS, UNITS)
    module = nn.ModuleList([inputs, norm, other])
    init, xs = torch.randn(BATCH, UNITS), torch.randn(STEPS, BATCH, INPUTS, requires_grad=True)

    def normed(h: Any, x: Any) -> Any:
        h = torch.tanh(h + norm(inputs(x)) * 0.5)
        return h, h

    def both(h: Any, x: Any) -> Any:
        h = torch.tanh(h + norm(inputs(x)) * 0.5 + other(x) * h)
        return h, h

    for step, has_product in ((normed, False), (both, True)):
        text = explain(step, init, xs).text
        assert "given_0" in text
        assert "sqrt" not in text
        assert ("input_" in text) == has_product
        check(step, init, xs, module)


def test_parameters_without_axes_and_cells_of_inputs_alone() -> None:
    rate = torch.tensor(0.3, requires_grad=True)
    cell = nn.LSTMCell(INPUTS, UNITS)
    init, xs = torch.randn(BATCH, UNITS), torch.randn(STEPS, BATCH, INPUTS)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        seen, _ = cell(x)
        h = torch.tanh(h - rate * (h - seen).clamp(max=0.2))
        return h, h

    assert explain(step, init, xs).is_captured
    found, expected = (run(step, init, xs)[1] for run in (scan, loop))
    torch.testing.assert_close(found, expected)
    leaves = [rate, *cell.parameters()]
    slopes = [torch.autograd.grad(each.sin().sum(), leaves) for each in (found, expected)]
    torch.testing.assert_close(*slopes)
