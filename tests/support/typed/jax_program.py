"""A program of JAX, as a user who checks types writes it."""

import jax
import jax.numpy as jnp
import numpy as np

from sparsescan.jax import explain, recurrent, scan
from sparsescan.recurrent import GRU

net = GRU(12, 20)
x = np.ones((500, 16, 12), np.float32)


@jax.jit
def loss(params: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean(recurrent(net, params, x)[0])


def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    h = jnp.tanh(h + x)
    return h, h


print(jax.grad(loss)(net.params))
print(scan(step, jnp.zeros(3), jnp.zeros((5, 3)))[0])
print(explain(step, jnp.zeros(3), jnp.zeros((5, 3))))
