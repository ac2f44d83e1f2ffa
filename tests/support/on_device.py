"""Chains on a CUDA device: of CuPy where there is a GPU; else of its stand-in.

Kernels then run in Numba's simulator (``NUMBA_ENABLE_CUDASIM=1``), or as PTX on the CPU
(``SPARSESCAN_PTX=1``).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import settings
from numba import config
from oracles import Chain
from sampling import EXAMPLES

from sparsescan import BatchedCSR, CSRChain

IN_PYTHON, IN_PTX = bool(config.ENABLE_CUDASIM), "SPARSESCAN_PTX" in os.environ
SIMULATED = IN_PYTHON or IN_PTX


def cupy_or_stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CuPy; where there is no GPU its stand-in, until the test ends."""
    if not SIMULATED:
        return pytest.importorskip("cupy")
    import fake_cupy

    if IN_PTX:
        import ptx.stand_in

        ptx.stand_in.install(monkeypatch)
    else:
        import simulator

        simulator.install()
    return fake_cupy.install(monkeypatch)


def run_as_compiled_if(chosen: bool) -> None:
    """Skip a case as compiled that is not one of a few, as each has kernels of its own.

    With ``--explore`` all are run.
    """
    if IN_PTX and not chosen and settings().max_examples <= EXAMPLES:
        pytest.skip("others like it are run as compiled")


def jacobians_on(cupy: Any, jacobians: Any) -> Any:
    """Jacobians with their values, and the index arrays of CSR matrices, on the device."""
    if isinstance(jacobians, np.ndarray):
        # As a view of what is stored, so that reversed stacks stay reversed.
        return cupy.asarray(jacobians)
    if isinstance(jacobians, CSRChain):
        return CSRChain.from_pattern(cupy.asarray(jacobians.data), jacobians.pattern)
    return [_step_on(cupy, step) for step in jacobians]


def _step_on(cupy: Any, step: Any) -> Any:
    if isinstance(step, BatchedCSR):
        return BatchedCSR.from_pattern(cupy.asarray(step.data), step.pattern)
    if sp.issparse(step):
        from cupyx.scipy.sparse import csr_matrix

        parts = tuple(cupy.asarray(part) for part in (step.data, step.indices, step.indptr))
        return csr_matrix(parts, shape=step.shape)
    return cupy.asarray(step)


def chain_on(cupy: Any, chain: Chain) -> tuple[Any, Any, Any]:
    """Gradient, Jacobians and local gradients on the device."""
    local = chain.local_grads
    if local is not None:
        local = [None if array is None else cupy.asarray(array) for array in local]
    return cupy.asarray(chain.grad), jacobians_on(cupy, chain.jacobians), local


def to_host(result: Any) -> Any:
    """Gradients in host memory."""
    return [gradient.get() for gradient in result] if isinstance(result, list) else result.get()
