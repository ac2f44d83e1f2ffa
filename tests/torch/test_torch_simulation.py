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
    decay, gain = (
        p if isinstance(p, tuple) else (p["decay"], p["gain"]) if isinstance(p, dict) else (p, 1.0)
    )
    return -decay * u + gain * np.roll(u, 1) ** 2 * np.cos(t)


@pytest.mark.parametrize("kind", ["number", "dict", "tuple"])
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
        params = {"number": decay, "dict": {"decay": decay, "gain": gain}, "tuple": (decay, gain)}
        return simulate(sim, u0, params[kind], dt=dt, **options)

    found = states(u0, decay, gain, dt)
    assert found.shape == ((4,) if last else (6, 4))
    assert torch.autograd.gradcheck(states, (u0, decay, gain, dt), atol=1e-7)


def test_in_the_middle_of_a_network() -> None:
    sim = ImplicitSteps(lambda u, old, t, dt, p: u - old + dt * p * u, np.eye(3))
    layer = torch.nn.Linear(2, 3)
    y = simulate(sim, torch.tanh(layer(torch.ones(2))), 0.5, steps=3, dt=0.1)
    assert y.dtype == torch.float32
    y.sum().backward()
    expected = sum(1.05**-k for k in range(4)) * (1 - y[0] ** 2)
    assert torch.allclose(layer.bias.grad, expected.detach(), rtol=1e-5)


def test_bad_arguments_are_named() -> None:
    sim = TimeSteps(rate, np.eye(2))
    u0 = torch.ones(2)
    with pytest.raises(InputTypeError, match="sim is 3"):
        simulate(3, u0, steps=1, dt=0.1)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="u0 is"):
        simulate(sim, np.ones(2), steps=1, dt=0.1)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match=r"params\['decay'\] is on meta"):
        simulate(sim, u0, {"decay": torch.ones(1, device="meta")}, steps=1, dt=0.1)
    with pytest.raises(InputError, match="u0 has shape"):
        simulate(sim, torch.ones(3), 1.0, steps=1, dt=0.1)
    with pytest.raises(InputTypeError, match="last is False; expected True"):
        simulate(sim, u0, 1.0, steps=200, dt=0.1, memory_limit=2500)
