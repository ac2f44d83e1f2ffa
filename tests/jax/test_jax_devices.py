"""JAX's front door on several devices and threads at once, under a limit of time."""

from __future__ import annotations

import pytest
from fresh_python import run_python
from sampling import slow

# Callbacks of JAX wait for each other from arrays of some 100 kB on.
SHAPES = [(40, 3, 5, 16), *slow(((400, 17, 16, 64),))]
LIMIT = 100.0

START = """
    import faulthandler, threading
    faulthandler.dump_traceback_later({limit}, exit=True)
    import jax, jax.numpy as jnp, numpy as np
    from functools import partial
    from jax.sharding import Mesh, PartitionSpec as P
    from sparsescan import Pattern
    from sparsescan.recurrent import {kind}
    from sparsescan.jax import affine_scan, lfilter, recurrent, scan, selective_scan

    steps, batch, hidden, size = {shape}
    assert len(jax.devices()) == 4
    rng = np.random.default_rng(0)
    net = {kind}(3, hidden, rng=rng)
    x = rng.standard_normal((steps, batch, 3), np.float32)
    lengths = rng.integers(0, steps + 1, batch)
    a = rng.random((steps, batch, size), np.float32)
    b = rng.standard_normal((steps, batch, size), np.float32)
    diagonal = Pattern.diagonal(size)
    taps = np.array([1, -0.5], np.float32)
    rates = -rng.random((size, 2), np.float32)

    def loss_of_network(params, x, lengths):
        output, last = recurrent(net, params, x, lengths=lengths)
        return jnp.sin(output).sum() + last.sum()

    def loss_of_scan(a, b):
        return jnp.sin(affine_scan(a, b, pattern=diagonal)).sum()

    def loss_of_filter(taps, x):
        return jnp.sin(lfilter(np.ones(1, np.float32), taps, x, axis=0)).sum()

    def loss_of_selective(rates, x):
        u = jnp.moveaxis(x, 0, -1)
        return jnp.sin(selective_scan(u, jnp.ones_like(u), rates, rates, rates)).sum()

    weights = rng.standard_normal((size, size), np.float32) / size

    def loss_of_loop(weights, x):
        def step(h, x):
            return jnp.tanh(h @ weights + x), h

        return jnp.sin(scan(step, 0 * x[0], x)[1]).sum()

    cases = [
        (jax.value_and_grad(loss_of_loop, argnums=(0, 1)), (weights, b)),
        (jax.value_and_grad(loss_of_network, argnums=(0, 1)), (net.params, x, lengths)),
        (jax.value_and_grad(loss_of_scan, argnums=(0, 1)), (a, b)),
        (jax.value_and_grad(loss_of_filter, argnums=(0, 1)), (taps, b)),
        (jax.value_and_grad(loss_of_selective, argnums=(0, 1)), (rates, b)),
    ]

    def check(actual, expected, rtol=0.0):
        for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            scale = np.abs(theirs).max(initial=1)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=rtol * scale)
"""

THREADS = """
    for function, given in cases:
        jitted = jax.jit(function)
        expected = jitted(*given)
        for count in (2, 8):
            failed = []

            def call():
                try:
                    for _ in range(10):
                        check(jitted(*given), expected)
                except BaseException as error:
                    failed.append(error)

            threads = [threading.Thread(target=call) for _ in range(count)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            assert not failed, failed
    print("threads")
"""

DEVICES = """
    for function, given in cases:
        expected = jax.jit(function)(*given)
        four = jax.tree.map(lambda each: np.stack([each] * 4), given)
        for _ in range(3):
            results = jax.pmap(function)(*four)
            for k in range(4):
                check(jax.tree.map(lambda each: each[k], results), expected)
        compiled = jax.jit(function, donate_argnums=1).lower(*given).compile()
        given = given[0], jnp.array(given[1]), *given[2:]
        check(compiled(*given), expected)
    print("pmap")
"""

SHARDED = """
    mesh = Mesh(np.array(jax.devices()), ("d",))
    x, lengths = np.concatenate([x] * 4, 1), np.concatenate([lengths] * 4)
    a, b = (np.concatenate([each] * 4, 1) for each in (a, b))
    sharded, whole = P(None, "d"), P()

    for function, given, specs in (
        (loss_of_network, (net.params, x, lengths), (whole, sharded, P("d"))),
        (loss_of_scan, (a, b), (sharded, sharded)),
        (lambda a, b: loss_of_scan(a[:, 0], b), (a, b), (whole, sharded)),  # shared by samples
        (loss_of_filter, (taps, b), (whole, sharded)),
        (loss_of_selective, (rates, b), (whole, sharded)),
        (loss_of_loop, (weights, b), (whole, sharded)),
    ):
        gradients = partial(jax.value_and_grad, argnums=(0, 1))

        @jax.jit
        @partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=(whole, specs[:2]))
        def apart(*given):
            return gradients(lambda *each: jax.lax.psum(function(*each), "d"))(*given)

        check(apart(*given), jax.jit(gradients(function))(*given), 1e-4)
    print("shard_map")
"""

# One device has decays that both share, and samples of its own. The default ``check_vma=True`` of
# ``jax.shard_map`` compares gradients with their arguments.
CHECKED = """
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))

    def loss(a, b):
        return jax.lax.psum(affine_scan(a, b, pattern=Pattern.diagonal(1))[-1].sum(), "d")

    gradient = jax.shard_map(
        jax.grad(loss, argnums=1), mesh=mesh, in_specs=(P(), P(None, "d")),
        out_specs=P(None, "d"),
    )
    grads = gradient(np.full((3, 1), 0.5, np.float32), np.ones((3, 2, 1), np.float32))
    assert grads[..., 0].T.tolist() == [[0.25, 0.5, 1.0], [0.25, 0.5, 1.0]], grads
    states = jax.jit(
        jax.shard_map(
            jax.grad(lambda b: affine_scan(np.full((3, 1), 0.5, np.float32), b[:, 0],
                                           pattern=Pattern.diagonal(1)).sum()),
            mesh=mesh, in_specs=P(None, "d"), out_specs=P(None, "d"),
        )
    )(np.ones((3, 2, 1), np.float32))
    assert states.ravel().tolist() == [1.75, 1.75, 1.5, 1.5, 1.0, 1.0], states
    print("check_vma")
"""


PARTS = {"threads": THREADS, "pmap": DEVICES, "shard_map": SHARDED, "check_vma": CHECKED}


@pytest.fixture(scope="module", params=SHAPES)
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the names of the parts that one process has come to the end of."""
    shape = request.param
    start = START.format(limit=LIMIT, kind="LSTM" if shape[0] % 3 else "GRU", shape=shape)
    return run_python(
        start + "".join(PARTS.values()),
        tmp_path_factory.mktemp("devices"),
        timeout=LIMIT + 20,
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )


@pytest.mark.parametrize("part", PARTS)
def test_several(part: str, said: str) -> None:
    assert part in said.splitlines()
