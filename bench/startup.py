"""The costs of a new process: the import, and its first scan with compiled kernels in the cache."""

from __future__ import annotations

import sys
from typing import NamedTuple

from . import children

_TIMED = """
import time
{before}
start = time.perf_counter()
{timed}
print(time.perf_counter() - start)
"""

_DATA = """
import numpy as np, scipy.sparse as sp, sparsescan
diagonals = [np.ones(256)] * 3
matrix = sp.diags_array(diagonals, offsets=[-1, 0, 1], shape=(256, 256)).tocsr()
matrix.data /= 3
dense = np.full((100, 16, 20, 20), 0.05, np.float32)
"""


class Startup(NamedTuple):
    """Code whose time counts, what runs before it, and the limit in seconds."""

    what: str
    before: str
    timed: str
    limit: float

    def seconds(self) -> float:
        """Run it in a new process."""
        code = _TIMED.format(before=self.before, timed=self.timed)
        return float(children.run([sys.executable, "-c", code], seconds=300))


STARTUPS = {
    "import": Startup(
        "import sparsescan beyond import numba, scipy.sparse",
        "import numba, scipy.sparse",
        "import sparsescan",
        0.3,
    ),
    "first-scan-list": Startup(
        "first scan of a new process, warm cache: 100 csr_array of 256 unknowns",
        _DATA,
        "sparsescan.exclusive_scan(np.ones(256), [matrix] * 100)",
        0.5,
    ),
    "first-scan-chain": Startup(
        "the same, a CSRChain",
        _DATA,
        "values = np.tile(matrix.data, (100, 1))\n"
        "chain = sparsescan.CSRChain(values, matrix.indices, matrix.indptr, matrix.shape)\n"
        "sparsescan.exclusive_scan(np.ones(256), chain)",
        0.5,
    ),
    "first-scan-dense": Startup(
        "the same, T=100, B=16, H=20 dense, float32",
        _DATA,
        "sparsescan.exclusive_scan(np.ones((16, 20), np.float32), dense)",
        0.5,
    ),
    "first-scan-blelloch": Startup(
        "the same, 100 csr_array, schedule='blelloch', which makes products",
        _DATA,
        "sparsescan.exclusive_scan(np.ones(256), [matrix] * 100, schedule='blelloch')",
        0.5,
    ),
}
