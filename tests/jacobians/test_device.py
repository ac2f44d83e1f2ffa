"""Operators on CuPy's arrays give what they give on NumPy's; a stand-in where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_cupy
import numpy as np
import pytest
from layers import CELLS, OPERATORS, mask

from sparsescan import DeviceError, InputTypeError
from sparsescan.arrays.arrays import is_cupy
from sparsescan.jacobians import (
    Linear,
)

BATCH = 4
MIXED = "expected input and parameters in one place"
OUT_ON_HOST = r"out is a numpy\.ndarray; expected an array of cupy"
OUT_ON_DEVICE = r"out is a cupy\.ndarray; expected an array of numpy"


every_cell = pytest.mark.parametrize("name", CELLS)
every_operator = pytest.mark.parametrize("name", OPERATORS)
every_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])
every_lead = pytest.mark.parametrize("lead", [(), (BATCH,), (0,)], ids=["one", "batch", "empty"])


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_cupy.real() or fake_cupy.install(monkeypatch)


def pair(cupy: Any, name: str, dtype: Any) -> tuple[Any, Any]:
    """Return the operator with random parameters on the host, and the same on the device."""
    make = (OPERATORS | CELLS)[name]
    host, device = make(dtype), make(dtype)
    share(cupy, host, device, np.random.default_rng(0))
    return host, device


def share(cupy: Any, host: Any, device: Any, rng: np.random.Generator) -> None:
    """Give both operators the same random arrays."""
    for inner, outer in zip(getattr(host, "ops", ()), getattr(device, "ops", ()), strict=True):
        share(cupy, inner, outer, rng)
    for name in getattr(host, "_shapes", ()):
        old = getattr(host, name)
        value = rng.standard_normal(old.shape).astype(old.dtype)
        value = np.abs(value) + 1 if name == "running_var" else value
        setattr(host, name, value)
        setattr(device, name, cupy.asarray(value))
    if getattr(host, "mask", None) is not None:
        device.mask = cupy.asarray(host.mask)


def draw(shape: tuple[int, ...], dtype: Any, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def close(actual: Any, expected: np.ndarray, factor: float = 100) -> None:
    """On the device, of the same shape and dtype, and equal up to rounding; NaN and ∞, too."""
    assert is_cupy(actual)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    finite = expected[np.isfinite(expected)]
    atol = factor * np.finfo(expected.dtype).eps * max(1, np.abs(finite).max(initial=0))
    np.testing.assert_allclose(actual.get(), expected, rtol=0, atol=atol)


# -- Operators ----------------------------------------------------------------------------------


@every_operator
@every_dtype
@every_lead
def test_forward_on_a_device(cupy: Any, name: str, dtype: Any, lead: tuple[int, ...]) -> None:
    host, device = pair(cupy, name, dtype)
    x = draw((*lead, *host.input_shape), dtype)
    close(device.forward(cupy.asarray(x)), host.forward(x))


@every_operator
@every_dtype
@every_lead
def test_values_on_a_device(cupy: Any, name: str, dtype: Any, lead: tuple[int, ...]) -> None:
    host, device = pair(cupy, name, dtype)
    x = draw((*lead, *host.input_shape), dtype)
    expected = host.values(x)
    on_device = cupy.asarray(x)
    close(device.values(on_device), expected)
    close(device.values(on_device, device.forward(on_device)), expected)
    out = cupy.full(expected.shape, np.nan, dtype)
    assert device.values(on_device, out=out) is out
    close(out, expected)
    np.testing.assert_array_equal(on_device.get(), x)


# Those of a Residual need a scan, and there is none on a device.
@pytest.mark.parametrize("name", [name for name in OPERATORS if not name.startswith("Residual")])
@every_dtype
@every_lead
def test_parameter_gradients_on_a_device(
    cupy: Any, name: str, dtype: Any, lead: tuple[int, ...]
) -> None:
    host, device = pair(cupy, name, dtype)
    x = draw((*lead, *host.input_shape), dtype)
    grad_y = draw((*lead, *host.output_shape), dtype, 3)
    expected = host.param_grads(x, grad_y)
    actual = device.param_grads(cupy.asarray(x), cupy.asarray(grad_y))
    assert actual.keys() == expected.keys() == host.params.keys()
    for param in expected:
        close(actual[param], expected[param], 1000)


@every_operator
def test_values_at_extreme_input(cupy: Any, name: str) -> None:
    host, device = pair(cupy, name, np.float32)
    x = draw((BATCH, *host.input_shape), np.float32)
    x.reshape(BATCH, -1)[:, 0] = [np.nan, np.inf, -np.inf, 3e38]
    close(device.values(cupy.asarray(x)), host.values(x))


@pytest.mark.parametrize("name", [name for name in OPERATORS if name.startswith("MaxPool2d")])
@every_dtype
def test_largest_inputs_that_are_equal_or_nan(cupy: Any, name: str, dtype: Any) -> None:
    host, device = pair(cupy, name, dtype)
    rng = np.random.default_rng(4)
    x = rng.choice(np.array([-np.inf, 0, 1, np.inf, np.nan], dtype), (50, *host.input_shape))
    close(device.forward(cupy.asarray(x)), host.forward(x))
    close(device.values(cupy.asarray(x)), host.values(x))


@every_operator
def test_what_is_mixed_is_refused(cupy: Any, name: str) -> None:
    host, device = pair(cupy, name, np.float32)
    x = draw(host.input_shape, np.float32)
    on_device = cupy.asarray(x)
    values = host.values(x)
    with pytest.raises(InputTypeError, match=OUT_ON_HOST):
        device.values(on_device, out=values)
    with pytest.raises(InputTypeError, match=OUT_ON_DEVICE):
        host.values(x, out=cupy.asarray(values))
    with pytest.raises(DeviceError, match=MIXED):
        host.values(x, cupy.asarray(host.forward(x)))
    with pytest.raises(DeviceError, match=MIXED):
        host.param_grads(on_device, draw(host.output_shape, np.float32))
    if host.params or (getattr(host, "mask", None) is not None and host.nnz):
        for mixed, other in ((device, x), (host, on_device)):
            with pytest.raises(DeviceError, match=MIXED):
                mixed.forward(other)
            with pytest.raises(DeviceError, match=MIXED):
                mixed.values(other)


def test_a_mask_of_weights_is_taken_from_the_host(cupy: Any) -> None:
    with pytest.raises(DeviceError, match=r"weight_mask is a cupy\.ndarray on a CUDA device"):
        Linear(4, 3, weight_mask=cupy.asarray(mask(3, 4)))


@every_dtype
def test_jacobians_on_a_device_are_matrices_there(cupy: Any, dtype: Any) -> None:
    host, device = pair(cupy, "Tanh", dtype)
    x = draw(host.input_shape, dtype)
    actual, expected = device.jacobian(cupy.asarray(x)), host.jacobian(x)
    close(actual.data, expected.data)
    for name in ("indices", "indptr"):
        np.testing.assert_array_equal(getattr(actual, name).get(), getattr(expected, name))
    again = device.jacobian(cupy.asarray(x))
    assert again.indices is actual.indices
    batch = device.jacobian(cupy.asarray(np.stack([x, x])))
    close(batch[1].data, expected.data)


# -- Recurrent cells ----------------------------------------------------------------------------


@every_cell
@every_dtype
@pytest.mark.parametrize("lead", [(), (BATCH,), (5, BATCH), (5, 0)], ids=str)
def test_cells_on_a_device(cupy: Any, name: str, dtype: Any, lead: tuple[int, ...]) -> None:
    host, device = pair(cupy, name, dtype)
    x, state, grad = (
        draw((*lead, size), dtype, seed)
        for seed, size in enumerate((host.input_size, host.state_size, host.state_size))
    )
    inputs = cupy.asarray(x), cupy.asarray(state)
    close(device.forward(*inputs), host.forward(x, state))
    expected = host.values(x, state)
    close(device.values(*inputs), expected)
    out = cupy.full(expected.shape, np.nan, dtype)
    assert device.values(*inputs, out=out) is out
    close(out, expected)
    close(device.input_grads(*inputs, cupy.asarray(grad)), host.input_grads(x, state, grad))
    expected_grads = host.param_grads(x, state, grad)
    grads = device.param_grads(*inputs, cupy.asarray(grad))
    assert grads.keys() == expected_grads.keys() == host.params.keys()
    for param in grads:
        close(grads[param], expected_grads[param], 1000)
    np.testing.assert_array_equal(inputs[0].get(), x)
    np.testing.assert_array_equal(inputs[1].get(), state)


@every_cell
@every_dtype
@pytest.mark.parametrize("lead", [(5,), (5, BATCH)], ids=str)
def test_linearizations_on_a_device(
    cupy: Any, name: str, dtype: Any, lead: tuple[int, ...]
) -> None:
    host, device = pair(cupy, name, dtype)
    x, state, grad = (
        draw((*lead, size), dtype, seed)
        for seed, size in enumerate((host.input_size, host.state_size, host.state_size))
    )
    expected = host.linearize(x, state)
    steps = device.linearize(cupy.asarray(x), cupy.asarray(state))
    chain = steps.implicit()
    for actual, values in zip(chain.values, expected.implicit().values, strict=True):
        close(actual, values)
    close(steps.jacobian().data, expected.jacobian().data)
    close(steps.input_grads(cupy.asarray(grad)), expected.input_grads(grad))
    with pytest.raises(DeviceError, match=MIXED):
        steps.input_grads(grad)


# -- Chains -------------------------------------------------------------------------------------


# -- The stand-in -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, n: x + n,
        lambda x, n: n + x,
        lambda x, n: n @ x,
        lambda x, n: n < x,
        lambda x, n: x.__iadd__(n),
        lambda x, n: n.__iadd__(x),
        lambda x, n: np.add(x, x),
        lambda x, n: np.add(n, 1, out=x),
        lambda x, n: np.sum(x),
        lambda x, n: np.where(x, n, n),
        lambda x, n: np.asarray(x),
        lambda x, n: np.asarray([x, x]),
        lambda x, n: n.__setitem__(0, x[0]),
        lambda x, n: n.__setitem__(slice(None), x),
        lambda x, n: x.__setitem__(0, n[0:1]),
        lambda x, n: x.__setitem__(0, [1.0]),
        lambda x, n: x[np.array([0])],
        lambda x, n: x.fill(n),
        lambda x, n: fake_cupy.cupy.add(x, n),
        lambda x, n: fake_cupy.cupy.add(x, [1.0, 2.0]),
        lambda x, n: fake_cupy.cupy.add(x, x, out=n),
        lambda x, n: fake_cupy.cupy.add(x, x, where=x > 0),
        lambda x, n: fake_cupy.cupy.sum(n),
        lambda x, n: fake_cupy.cupy.sum(x, out=n),
        lambda x, n: fake_cupy.cupy.sum(x, where=x > 0),
        lambda x, n: fake_cupy.cupy.where(x > 0, x, n),
        lambda x, n: fake_cupy.cupy.where(n > 0, x, x),
        lambda x, n: fake_cupy.cupy.take(x, x, mode="clip"),
        lambda x, n: fake_cupy.cupy.take(x, np.array([0])),
        lambda x, n: fake_cupy.cupy.concatenate([x, n]),
        lambda x, n: fake_cupy.cupy.einsum("i,i", x, n),
        lambda x, n: fake_cupy.cupy.copyto(x, n),
        lambda x, n: fake_cupy.cupy.lib.stride_tricks.as_strided(n, (2,), (0,)),
        lambda x, n: bool(x[0]),
        lambda x, n: float(x[0]),
    ],
)
def test_the_stand_in_does_not_mix(mix: Callable[[Any, Any], Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        mix(fake_cupy.cupy.asarray(np.ones(2)), np.ones(2))


def test_the_stand_in_refuses_what_is_undefined(cupy: Any) -> None:
    x = cupy.zeros(4)
    with pytest.raises(IndexError, match="more than once"):
        x[cupy.asarray([1, 1])] = 1
    with pytest.raises(AssertionError, match="leaves its array"):
        cupy.lib.stride_tricks.as_strided(x, (3,), (16,))
    view = cupy.lib.stride_tricks.as_strided(x, (3, 2), (8, 8))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(TypeError, match="CuPy's sum takes only"):
        cupy.sum(x, initial=1)
    assert not hasattr(cupy, "errstate")


def test_the_stand_in_goes_away() -> None:
    import sys

    with pytest.MonkeyPatch.context() as patch:
        fake_cupy.install(patch)
        assert sys.modules["cupy"] is fake_cupy.cupy
    assert sys.modules.get("cupy") is not fake_cupy.cupy
