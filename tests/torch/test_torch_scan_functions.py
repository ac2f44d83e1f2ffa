"""Functions with gradients of their own in steps of ``sparsescan.torch.scan``, beside the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from looping import Spike
from sampling import examples
from test_torch_scan import loop
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from sparsescan.torch import explain, scan
from sparsescan.torch.capture import trace

STEPS, BATCH, UNITS = 4, 3, 5


@pytest.fixture(autouse=True)
def _seed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trace, "_MOST_EACH", 10**6)
    torch.manual_seed(7)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


def call(function: Any, *given: Any) -> Any:
    """Return the result of a function."""
    return function.apply(*given)


# -- As snnTorch has them, but for the dtype of spikes ---------------------------------------------


class Surrogate(Function):
    """A spike, with one number for its gradient."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, slope: float) -> Tensor:
        ctx.save_for_backward(input_)
        ctx.slope = slope
        return (input_ > 0).to(input_.dtype)


class ATan(Surrogate):
    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (input_,) = ctx.saved_tensors
        grad_input = grad_output.clone()
        scale = (torch.pi / 2 * ctx.slope * input_).pow_(2)
        return ctx.slope / 2 / (1 + scale) * grad_input, None


class FastSigmoid(Surrogate):
    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (input_,) = ctx.saved_tensors
        grad_input = grad_output.clone()
        return grad_input / (ctx.slope * torch.abs(input_) + 1.0) ** 2, None


class Sigmoid(Surrogate):
    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (input_,) = ctx.saved_tensors
        power = torch.exp(-ctx.slope * input_)
        return grad_output.clone() * ctx.slope * power / ((power + 1) ** 2), None


class StraightThrough(Surrogate):
    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return grad_output.clone(), None


class Leaky(nn.Module):
    """snnTorch's neuron, with its reset by subtraction."""

    def __init__(self, function: Any, slope: float) -> None:
        super().__init__()
        self.function, self.slope = function, slope
        self.beta, self.threshold = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.tensor(0.5))
        self.inputs = nn.Linear(UNITS, UNITS)

    def fire(self, mem: Tensor) -> Tensor:
        spikes: Tensor = self.function.apply(mem - self.threshold, self.slope)
        return spikes

    def forward(self, mem: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        if not mem == None:  # noqa: E711, SIM201, as it is there
            self.mem = mem
        reset = self.fire(self.mem).clone().detach()
        mem = self.beta.clamp(0, 1) * self.mem + self.inputs(x) - reset * self.threshold
        return mem, self.fire(mem)


@pytest.mark.parametrize("function", [ATan, FastSigmoid, Sigmoid, StraightThrough])
def test_spiking_neurons(function: Any) -> None:
    neuron = Leaky(function, 2.0)
    for slope in (2.0, 1.5):  # that of now
        neuron.slope = slope
        compare(neuron, [*neuron.parameters()], True)


# -- Others ----------------------------------------------------------------------------------------


class Reversal(Function):
    """The identity, whose gradient is turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Tensor:
        return -above


class Separate(Function):
    """A function whose context is set up apart, with a rule for maps."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rate: float) -> Tensor:
        return torch.sin(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.rate = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return (above * torch.exp(-ctx.rate * x * x) if ctx.needs_input_grad[0] else None), None


class Between(Function):
    """A function that saves what it has computed between, which is a constant then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        between = torch.exp(-x * x)
        ctx.save_for_backward(between)
        ctx.x = x
        return torch.tanh(x) * between

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Tensor:
        (between,) = ctx.saved_tensors
        below: Tensor = above * between * (1 + ctx.x)
        return below


class Masked(Function):
    """A function that writes into its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        below = above.clone()
        below[x < 0] = 0
        return below.mul_(2)


class Pair(Function):
    """A function of two tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return above * y * x, above * torch.cos(x)


class Nested(Function):
    """A function of another one, which is in its gradient, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        spikes: Tensor = call(Spike, x) * x
        return spikes

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        below: Tensor = above * call(Separate, x, 1.0) + above * call(Spike, x)
        return below


class Flat(Function):
    """A function without gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> None:
        return None


CAPTURED: dict[str, Callable[[Tensor], Tensor]] = {
    "spike": lambda x: call(Spike, x),
    "reversal": lambda x: call(Reversal, x),
    "separate": lambda x: call(Separate, x, 0.5),
    "between": lambda x: call(Between, x),
    "masked": lambda x: call(Masked, x),
    "pair": lambda x: call(Pair, x, 2 * x),
    "twice": lambda x: call(Pair, x, x),
    "nested": lambda x: call(Nested, x),
    "flat": lambda x: call(Flat, x),
    "composed": lambda x: call(Spike, call(Reversal, x) - 0.1) * x,
}


def compare(step: Any, params: list[Tensor], is_captured: bool) -> None:
    """Compare results and gradients, those of gradients among them, with those of a loop."""
    init = torch.randn(BATCH, UNITS, requires_grad=True)
    xs = torch.randn(STEPS, BATCH, UNITS, requires_grad=True)
    assert explain(step, init, xs).is_captured == is_captured
    both = []
    for run in (scan, loop):
        last, ys = run(step, init, xs)
        found, leaves = [last, ys], [init, xs, *params]
        total = (last.sin() + (ys * torch.arange(1.0, UNITS + 1)).cos()).sum()
        for _ in range(3):
            about: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
            grads = torch.autograd.grad(total, leaves, create_graph=True, **about)
            found += grads
            total = sum((each.square().sum() for each in grads), torch.zeros(()))
            if not total.requires_grad:
                break
        both.append(found)
    assert len(both[0]) == len(both[1])
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


def steps_of(function: Callable[[Tensor], Tensor]) -> Iterator[tuple[Any, list[Tensor]]]:
    """Yield steps that call a function of what waits for the state, and of inputs alone."""
    weight = (torch.randn(UNITS, UNITS) / 2).requires_grad_()

    def of_states(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        new = torch.tanh(h @ weight + x)
        new = function(new) + 0.5 * new
        return new, new * x

    def of_inputs(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        new = torch.tanh(h @ weight + function(x))
        return new, function(new * x)

    for step in (of_states, of_inputs):
        yield step, [weight]


@pytest.mark.parametrize("name", CAPTURED)
def test_functions_have_their_gradients_of_any_order(name: str) -> None:
    for step, params in steps_of(CAPTURED[name]):
        compare(step, params, True)


def forward(change: Callable[[Any, Tensor], Any]) -> Any:
    """Return a function that computes something, with the gradient of a square."""

    class Made(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            ctx.save_for_backward(x)
            return change(ctx, x)

        @staticmethod
        def backward(ctx: Any, above: Tensor, *others: Tensor) -> Tensor:
            below: Tensor = 2 * above * ctx.saved_tensors[0]
            return below

    return Made.apply


def backward(below: Callable[[Any, Tensor, Tensor], Any], **attributes: Any) -> Any:
    """Return a square, with another gradient."""

    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.result = x * x
        result: Tensor = ctx.result
        return result

    def call(ctx: Any, above: Tensor) -> Any:
        return below(ctx, ctx.saved_tensors[0], above)

    members = {"forward": staticmethod(forward), "backward": staticmethod(call), **attributes}
    made: Any = type("Made", (Function,), members)
    return made.apply


def marked(ctx: Any, x: Tensor) -> Tensor:
    y = x * x
    ctx.mark_non_differentiable(y)
    return y


class BothNeeded(Pair):
    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Any:
        x, y = ctx.saved_tensors
        own = above * y if ctx.needs_input_grad[1] else above
        return own, above * x


class Recursive(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Tensor:
        below: Tensor = -call(Recursive, above)
        return below


@once_differentiable
def once(ctx: Any, above: Tensor) -> Tensor:
    below: Tensor = above * ctx.saved_tensors[0]
    return below


def refused() -> dict[str, tuple[Callable[[Tensor], Tensor], str]]:
    """Return functions that no kernel computes, and why."""
    weight, calls = torch.rand(UNITS), [0]
    several = forward(lambda ctx, x: (x * x, x.sin()))

    def counted(ctx: Any, x: Tensor, above: Tensor) -> Tensor:
        calls.append(0)
        return above * (len(calls) % 2)

    return {
        "result": (backward(lambda ctx, x, g: g * ctx.result), "reads the result"),
        "closed over": (backward(lambda ctx, x, g: g * weight), "not given"),
        "closed over before": (forward(lambda ctx, x: x * weight), "not given"),
        "branch": (backward(lambda ctx, x, g: g if x.sum() > 0 else 2 * g), "bool"),
        "asked": (forward(lambda ctx, x: x * (2 if x.requires_grad else 1)), "requires_grad"),
        "not linear": (backward(lambda ctx, x, g: F.hardtanh(g)), "linear"),
        "constant": (backward(lambda ctx, x, g: x), "linear"),
        "stopped": (backward(lambda ctx, x, g: g.detach()), "linear"),
        "within": (backward(lambda ctx, x, g: call(Reversal, g) * x), "linear"),
        "units": (backward(lambda ctx, x, g: g - g.mean(-1, keepdim=True)), "mean"),
        "samples": (backward(lambda ctx, x, g: g * x.sum(0)), "sum"),
        "float32": (forward(lambda ctx, x: (x.float() * 0.3).to(x.dtype)), "dtypes"),
        "marked": (forward(marked), "one tensor"),
        "several": (lambda x: several(x)[0], "one tensor"),
        "several need": (lambda x: call(BothNeeded, x, x * x), "needs_input_grad"),
        "again and again": (lambda x: call(Recursive, x), "in gradients of others"),
        "random": (backward(lambda ctx, x, g: g * torch.rand_like(x)), "rand"),
        "jvp": (backward(lambda ctx, x, g: g, jvp=staticmethod(lambda ctx, t: t)), "jvp"),
        "none": (lambda x: backward(lambda ctx, x, g: ())(x), "0 gradients"),
        "counter": (backward(counted), "Python"),
    }


@pytest.mark.parametrize("name", refused())
def test_others_run_as_a_loop(name: str) -> None:
    function, why = refused()[name]
    step, params = next(steps_of(function))
    init, xs = torch.randn(BATCH, UNITS), torch.randn(STEPS, BATCH, UNITS)
    for _ in range(2):  # traced, and found
        assert why in explain(step, init, xs).text
    if name in ("random", "counter"):  # each run is another one
        return
    results = [run(step, init, xs)[1] for run in (scan, loop)]
    torch.testing.assert_close(*results)
    if name != "none":
        grads = [torch.autograd.grad(each.sin().sum(), params) for each in results]
        torch.testing.assert_close(*grads)


def test_one_that_is_differentiated_once_is_a_loop() -> None:
    function = backward(lambda *about: None)
    function.__self__.backward = staticmethod(once)
    for step, params in steps_of(function):
        init, xs = torch.randn(BATCH, UNITS), torch.randn(STEPS, BATCH, UNITS)
        assert "grad_enabled" in explain(step, init, xs).text
        results = [run(step, init, xs)[1] for run in (scan, loop)]
        torch.testing.assert_close(*(torch.autograd.grad(each.sum(), params) for each in results))


def test_a_gradient_is_that_of_now() -> None:
    """What a gradient reads, but no operator before it, may change from call to call."""
    held: dict[str, Any] = {"rate": 1.0, "below": lambda x: x}
    function = backward(lambda ctx, x, g: g * held["rate"] * held["below"](x))
    changes: list[dict[str, Any]] = [{}, {"rate": 2.0}, {"below": torch.sin}, {"rate": 1.0}, {}]
    step, params = next(steps_of(function))
    for change in changes:
        held.update(change)
        compare(step, params, True)


def test_maps_and_functions_elsewhere() -> None:
    step, _ = next(steps_of(CAPTURED["separate"]))
    init, xs = torch.randn(BATCH, UNITS), torch.randn(2, STEPS, BATCH, UNITS)

    def grads(run: Any) -> Any:
        grad = torch.func.grad(lambda xs: run(step, init, xs)[1].sin().sum())
        return torch.func.vmap(grad)(xs)

    torch.testing.assert_close(grads(scan), grads(loop))
    x = torch.randn(3, requires_grad=True)
    call(Reversal, x).sum().backward()
    assert x.grad is not None
    assert (x.grad == -1).all()


# -- Random bodies ---------------------------------------------------------------------------------

_PLACES = st.integers(0, 9)
_PLANS = st.lists(st.tuples(st.sampled_from([*CAPTURED]), _PLACES, _PLACES), min_size=1, max_size=4)


@given(plan=_PLANS, seed=st.integers(0, 1000))
@settings(max_examples=examples(10), deadline=None)
def test_random_bodies(plan: list[Any], seed: int) -> None:
    """Of functions of what was computed before."""
    torch.manual_seed(seed)
    weight = (torch.randn(UNITS, UNITS) / 2).requires_grad_()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        values = [h, x, torch.tanh(h @ weight)]
        for name, a, b in plan:
            first, second = (values[-1 - k % len(values)] for k in (a, b))
            values.append(torch.tanh(CAPTURED[name](first) + 0.5 * second))
        return values[-1], values[-2]

    compare(step, [weight], True)
