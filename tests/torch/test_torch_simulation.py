"""Simulations under autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparsescan import DeviceError, InputError, InputTypeError
from sparsescan.simulate import ImplicitSteps, TimeSteps

torch = pytest.importorskip("torch")
from sparsescan.torch import simulate  # noqa: E402


def rate(u: Any, t: Any, p: Any) -> Any:
    decay, gain = (p["decay"], p["gain"]) if isinstance(p, dict) else (p, 1.0)
    return -decay * u + gain * np.roll(u, 1) ** 2 * np.cos(t)


@pytest.mark.parametrize("kind", ["number", "dict"])
@pytest.mark.parametrize("last", [False, True])
def test_gradients_are_differences(kind: str, last: bool) -> None:
    rng = np.random.default_rng()
    sim = TimeSteps(rate, np.eye(4) + np.roll(np.eye(4), 1, 0), "crank_nicolson")

    def tensor(*shape: int) -> Any:
        return torch.tensor(rng.uniform(0.2, 0.5, shape), requires_grad=True)

    u0, decay, gain = tensor(4), tensor(), tensor(4)
    dt = tensor(5) if last else tensor()
    options = {"rtol": 1e-12, "atol": 1e-13, "last": last, "steps": 5}

    def states(u0: Any, decay: Any, gain: Any, dt: Any) -> Any:
        params = {"number": decay, "dict": {"decay": decay, "gain": gain}}
        return simulate(sim, u0, params[kind], dt=dt, **options)

    found = states(u0, decay, gain, dt)
    assert found.shape == ((4,) if last else (6, 4))
    assert torch.autograd.gradcheck(states, (u0, decay, gain, dt), atol=1e-7)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # of forward mode
@pytest.mark.parametrize("batch", [None, 3])
def test_rates_that_are_networks(batch: int | None) -> None:
    """Beside the same rate in NumPy, which is read."""
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
    ).double()

    def in_torch(u: Any, t: Any, p: Any) -> Any:
        return torch.func.functional_call(net, p, (u,)) * torch.cos(t)

    def in_numpy(u: Any, t: Any, p: Any) -> Any:
        hidden = np.tanh(u @ p["0.weight"].T + p["0.bias"])
        return (hidden @ p["2.weight"].T + p["2.bias"]) * np.cos(t)

    start = torch.rand((3,) if batch is None else (batch, 3), dtype=torch.float64)
    weights, found = torch.rand(6, *start.shape, dtype=torch.float64), []
    for rate, how in ((in_torch, "torch"), (in_numpy, None)):
        net.zero_grad()
        sim = TimeSteps(rate, np.ones((3, 3)), "crank_nicolson", derivatives=how)
        u0, dt = start.clone().requires_grad_(), torch.tensor(0.1, requires_grad=True)
        states = simulate(sim, u0, dict(net.named_parameters()), dt=dt, steps=5, rtol=1e-12)
        (states * weights).sum().backward()
        found.append([states.detach(), u0.grad, dt.grad, *(each.grad for each in net.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
    params = {name: each.detach().numpy() for name, each in net.named_parameters()}
    sim = TimeSteps(in_torch, np.ones((3, 3)), derivatives="torch")
    assert sim.forward(start.numpy(), params, steps=1, dt=1.0).derivatives == "PyTorch"


def test_in_the_middle_of_a_network() -> None:
    sim = ImplicitSteps(lambda u, old, t, dt, p: u - old + dt * p * u, np.eye(3))
    layer = torch.nn.Linear(2, 3)
    y = simulate(sim, torch.tanh(layer(torch.ones(2))), 0.5, steps=3, dt=0.1)
    assert y.dtype == torch.float32
    y.sum().backward()
    expected = sum(1.05**-k for k in range(4)) * (1 - y[0] ** 2)
    assert torch.allclose(layer.bias.grad, expected.detach(), rtol=1e-5)


QUADRATIC = TimeSteps(lambda u, t, p: -p * u * u, np.eye(2))


def decayed(p: Any, *, u0: Any = None, dt: Any = 0.1, steps: Any = 3, **options: Any) -> Any:
    """States of a quadratic decay, which has derivatives of all orders."""
    u0 = torch.tensor([1.0, 2.0], dtype=torch.float64) if u0 is None else u0
    return simulate(QUADRATIC, u0, p, dt=dt, steps=steps, **options)


def leaf(number: float = 0.5) -> Any:
    return torch.tensor(number, dtype=torch.float64, requires_grad=True)


def test_second_derivatives_are_refused() -> None:
    p = leaf()
    for last in (False, True):
        (grad,) = torch.autograd.grad(decayed(p, last=last).sum(), p, create_graph=True)
        expected = torch.autograd.grad(decayed(p, last=last).sum(), p)
        assert torch.equal(grad.detach(), expected[0])
        with pytest.raises(RuntimeError, match="of a simulation of sparsescan were differentiated"):
            torch.autograd.grad(grad, p)
    for options in ({}, {"vectorize": True}):
        with pytest.raises(RuntimeError, match="differences of gradients have second derivatives"):
            torch.autograd.functional.hessian(lambda p: decayed(p).sum(), p, **options)


@pytest.mark.parametrize("last", [False, True])
def test_batches_of_gradients_are_one_pass(last: bool) -> None:
    u0 = torch.tensor(np.random.default_rng().uniform(0.5, 1, (3, 2)), requires_grad=True)

    def states(u0: Any, p: Any, dt: Any) -> Any:
        return decayed(p, u0=u0, dt=dt, last=last)

    given = u0, leaf(), torch.tensor([0.1, 0.2, 0.1], dtype=torch.float64, requires_grad=True)
    whole, rows = (
        torch.autograd.functional.jacobian(states, given, vectorize=flag) for flag in (True, False)
    )
    for one, other in zip(whole, rows, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # of forward mode
def test_transforms_and_forward_mode_are_refused() -> None:
    p = leaf()

    def loss(p: Any) -> Any:
        return decayed(p).sum()

    transforms = (
        torch.func.grad(loss),
        torch.func.jacrev(loss),
        torch.func.jacfwd(loss),
        torch.func.hessian(loss),
        lambda p: torch.func.vmap(loss)(p[None]),
        lambda p: torch.func.jvp(loss, (p,), (p,)),
        lambda p: torch.func.vjp(loss, p),
    )
    for transform in transforms:
        with pytest.raises(InputError, match=r"called under a transform of torch\.func; expec"):
            transform(p.detach())
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(InputError, match="params has a tangent of forward mode; expected a b"):
            loss(torch.autograd.forward_ad.make_dual(p.detach(), torch.ones_like(p)))
        value = loss(p)
    value.backward()
    assert p.grad < 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_programs_call_it() -> None:
    grads = []

    def loss(p: Any, u0: Any) -> Any:
        return (decayed(torch.exp(p), u0=torch.sin(u0)) ** 2).sum()

    for function in (loss, torch.compile(loss, backend="eager")):
        p, u0 = leaf(), torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
        function(p, u0).backward()
        grads.append([p.grad, u0.grad])
    torch.testing.assert_close(*grads)


def test_times_are_met_and_have_gradients() -> None:
    p, dt = leaf(), leaf(0.1)
    t_eval = [0.25, 0.5, 0.75]
    found = decayed(p, dt=dt, steps=None, until=1.0, t_eval=t_eval, error=(1e-6, 1e-9))
    assert found.shape == (3, 2)
    exact = 1 / (1 / torch.tensor([[1.0, 2.0]]) + 0.5 * torch.tensor(t_eval)[:, None])
    torch.testing.assert_close(found, exact, check_dtype=False, rtol=1e-3, atol=0)
    weights = torch.tensor(np.random.default_rng().standard_normal((3, 2)))
    (found * weights).sum().backward()
    slope = (-(exact**2) * torch.tensor(t_eval)[:, None] * weights).sum()
    torch.testing.assert_close(p.grad, slope, check_dtype=False, rtol=1e-2, atol=1e-3)
    assert dt.grad == 0
    (jacobian,) = torch.autograd.functional.jacobian(
        lambda p: decayed(p, steps=None, until=1.0, t_eval=t_eval, error=(1e-6, 1e-9)),
        (p,),
        vectorize=True,
    )
    torch.testing.assert_close((jacobian * weights).sum(), p.grad)


def test_no_time_is_the_identity() -> None:
    p, dt = leaf(), leaf(0.1)
    u0 = torch.tensor([1.0, 2.0], requires_grad=True)
    found = decayed(p, u0=u0, dt=dt, steps=None, until=0.0)
    assert found.tolist() == [[1, 2]]
    (found**2).sum().backward()
    assert u0.grad.tolist() == [2, 4]
    assert p.grad == dt.grad == 0


def test_backward_in_time() -> None:
    p, dt, u0 = leaf(), leaf(-0.1), torch.tensor([0.5, 0.7], dtype=torch.float64)
    u0.requires_grad_()
    options = {"rtol": 1e-12, "atol": 1e-13, "steps": 4, "t0": 1.0}
    assert torch.autograd.gradcheck(
        lambda p, dt, u0: decayed(p, u0=u0, dt=dt, **options), (p, dt, u0), atol=1e-7
    )
    last = decayed(p, u0=u0, dt=-0.01, steps=None, until=-1.0, last=True, error=(1e-5, 1e-6))
    torch.testing.assert_close(last, 1 / (1 / u0 - 0.5), rtol=1e-2, atol=0)


def test_numbers_of_any_kind() -> None:
    turned = torch.tensor([1 - 1j, 1 - 2j]).conj().imag
    assert turned.is_neg()
    for u0 in (turned, torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.bfloat16)):
        found = decayed(0.5, u0=u0, last=True)
        expected = decayed(0.5, last=True).to(u0.dtype)
        torch.testing.assert_close(found, expected)


def test_bad_arguments_are_named() -> None:
    sim = TimeSteps(rate, np.ones((2, 2)))
    u0 = torch.ones(2)
    with pytest.raises(InputTypeError, match="sim is 3"):
        simulate(3, u0, steps=1, dt=0.1)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="u0 is"):
        simulate(sim, np.ones(2), steps=1, dt=0.1)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match=r"params\['decay'\] is on meta"):
        simulate(sim, u0, {"decay": torch.ones(1, device="meta")}, steps=1, dt=0.1)
    with pytest.raises(InputTypeError, match=r"u0 has layout torch.sparse_coo; expected a dense"):
        simulate(sim, u0.to_sparse(), 1.0, steps=1, dt=0.1)
    with pytest.raises(InputTypeError, match=r"events is no argument of forward; .*no events"):
        simulate(sim, u0, 1.0, steps=1, dt=0.1, events=abs)
    for t0 in (np.nan, torch.tensor(np.nan)):
        with pytest.raises(InputError, match=r"t0 is .*; expected a finite number"):
            simulate(sim, u0, 1.0, steps=1, dt=0.1, t0=t0)
    for other in (None, [1.0, 2.0]):
        with pytest.raises(InputTypeError, match=r"u0 is .*; expected a tensor"):
            simulate(sim, other, 1.0, steps=1, dt=0.1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="u0 has shape"):
        simulate(sim, torch.ones(3), 1.0, steps=1, dt=0.1)
    with pytest.raises(InputTypeError, match="last is False; expected True"):
        simulate(sim, u0, 1.0, steps=200, dt=0.1, memory_limit=2500)
