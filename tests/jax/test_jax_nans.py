"""Values that are not finite, where JAX is told to look for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from fresh_python import run_python
from sampling import slow

# JAX keeps fast calls that do not look, so each setting has a process of its own.
CALLS = """
import jax, jax.numpy as jnp, numpy as np
from sparsescan.jax import affine_scan, recurrent
from sparsescan.recurrent import GRU, RNN

jax.config.update(SETTING, True)
net, x = GRU(3, 4, rng=0), np.ones((5, 2, 3), np.float32)
grown = RNN(1, 1, nonlinearity="relu", rng=0)
params = {name: np.full_like(each, 1e30) for name, each in grown.params.items()}
odd = x.copy()
odd[0, 0, 0] = VALUE

def loss(x):
    return recurrent(net, net.params, x)[0].sum()

def overflow(x):
    output, _ = recurrent(grown, params, np.ones((30, 1, 1), np.float32))
    return output * 0 if SETTING.endswith("nans") else output  # inf * 0 is NaN

calls = {
    "call": loss,
    "gradient": jax.grad(loss),
    "direction": lambda x: jax.jvp(loss, (x,), (x,))[1],
    "samples": lambda x: jax.vmap(loss)(jnp.stack([x, x])),
    "affine": lambda x: affine_scan(x[:, 0, :2, None] * np.ones((5, 2, 2), np.float32)),
    "affine gradient": jax.grad(lambda x: affine_scan(x[:, 0, :2, None] * jnp.eye(2)).sum()),
}
calls |= {f"compiled {name}": jax.jit(call) for name, call in calls.items()}
if SETTING.endswith("infs"):
    # A compiled call looks at its results alone, and gates make finite ones of all numbers.
    calls = {name: call for name, call in calls.items() if not name.startswith("compiled")}
finite = list(calls.values())
calls |= {"overflow": overflow, "compiled overflow": jax.jit(overflow)}
for name, call in calls.items():
    try:
        jax.block_until_ready(call(odd))
    except FloatingPointError as error:  # JAX's own, as of its own functions
        assert "invalid value" in str(error) or "nan" in str(error), error
    else:
        raise AssertionError(name)
for call in finite:
    jax.block_until_ready(call(x))  # what is finite raises nothing
"""


@pytest.mark.parametrize(
    ("setting", "value"), [("jax_debug_nans", "np.nan"), *slow(("jax_debug_infs", "np.inf"))]
)
def test_values_that_are_not_finite(setting: str, value: str, tmp_path: Path) -> None:
    run_python(CALLS.replace("SETTING", repr(setting)).replace("VALUE", value), tmp_path)
