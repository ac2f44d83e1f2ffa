"""A stand-in for a GPU, on which a run is rehearsed: kernels run as compiled PTX, on the CPU.

As a program it is one for compute-sanitizer: it runs a command, and finds nothing.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .machine import Cpu
from .peers import MissingPeerError
from .timing import Call, Ceilings, seconds

_SUPPORT = Path(__file__).parent.parent / "tests" / "support"


class StandIn(Cpu):
    """The stand-in for CuPy as a device, with the interface of :class:`bench.gpu_device.Cuda`.

    What it times says nothing.
    """

    device = "cuda"

    def __init__(self, cupy: Any) -> None:
        self.about = {"device": {"gpu": "stand-in"}, "versions": {}}
        self.xp = cupy
        self.put = cupy.asarray
        self.launches: list[Any] = []

    def get(self, array: Any) -> NDArray[Any]:  # type: ignore[override]
        """Return a copy on the host, of an array of any library."""
        own = type(array).__module__.startswith("torch")
        return np.asarray(array.detach()) if own else np.array(self.xp.asnumpy(array))

    def csr(self, matrix: Any) -> Any:
        """Return a SciPy CSR array as one of CuPy."""
        from cupyx.scipy.sparse import csr_matrix

        class Matrix(csr_matrix):  # type: ignore[misc, no-any-unimported]
            __module__ = csr_matrix.__module__  # by which it is known

            def __matmul__(own, vector: Any) -> Any:  # noqa: N805
                return self.put(matrix @ self.get(vector))

        parts = tuple(self.put(part) for part in (matrix.data, matrix.indices, matrix.indptr))
        return Matrix(parts, shape=matrix.shape)

    def spmv(self, a: Any, x: Any) -> Any:
        return a @ x

    def spgemm(self, a: Any, b: Any) -> Any:
        raise MissingPeerError("there is no cuSPARSE here")

    def samples(self, call: Call, times: int, clock: str, cold: bool) -> list[float]:
        return seconds(call, 1)

    def ceilings(self, moved: int = 0, dtype: Any = None) -> Ceilings:
        return Ceilings(1e9, 1e10)


@contextmanager
def stand_in() -> Iterator[StandIn]:
    """Put the stand-in in the place of CuPy, and the runner of PTX in that of launches."""
    sys.path.insert(0, str(_SUPPORT))
    try:
        import fake_cupy
        import ptx.stand_in
        import pytest
    finally:
        sys.path.remove(str(_SUPPORT))
    with pytest.MonkeyPatch.context() as patch:
        ptx.stand_in.install(patch)
        cupy = fake_cupy.install(patch)
        device = StandIn(cupy)
        device.launches = fake_cupy.watch(patch)  # or a launch could not be captured
        yield device


if __name__ == "__main__":
    done = subprocess.run(sys.argv[sys.argv.index(sys.executable) :], check=False)
    print("========= ERROR SUMMARY: 0 errors")
    sys.exit(done.returncode)
