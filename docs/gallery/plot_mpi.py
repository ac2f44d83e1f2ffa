"""
A chain too large for one machine
=================================

With MPI every rank makes, holds and scans its own part of a chain, and gets the gradients of its
part. Only small products and vectors are sent. This page starts a program on 1, 2 and 4 ranks of
this machine, and asks each rank how much memory it has taken.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

# %%
# The program
# -----------
# The chain has 3,000 dense Jacobians of 100 by 100, 240 MB in all. A rank seeds each of its steps
# by the number of the step, so that any number of ranks makes the same chain, and none holds all of
# it. At the end rank 0 prints the memory of all ranks, and the norm of the gradient in the first
# state.

PROGRAM = """
import json, resource
import numpy as np
from mpi4py import MPI
from sparsescan import parallel

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB, on Linux

comm, n, size = MPI.COMM_WORLD, 3000, 100
first, last = n * comm.rank // comm.size, n * (comm.rank + 1) // comm.size
before = peak()
mine = np.empty((last - first, size, size))
for k in range(first, last):
    mine[k - first] = np.random.default_rng(k).standard_normal((size, size)) / 10
grad = np.ones(size) if comm.rank == 0 else None  # at the end of the chain
grads = parallel.inclusive_scan(comm, grad, mine)
memory = comm.gather(peak() - before)
end = comm.gather(float(np.linalg.norm(grads[-1])))
if comm.rank == 0:
    print(json.dumps({"memory": memory, "end": end[-1]}))
"""

# %%
# Started on some ranks
# ---------------------
# ``mpiexec -n 4 python -m mpi4py program.py``, with one thread for each rank. The variables let
# Open MPI run more ranks than there are cores, and let root run it, as containers do.

SETTINGS = {
    "NUMBA_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
beside_python = Path(sys.executable).parent
mpiexec = shutil.which("mpiexec", path=f"{beside_python}{os.pathsep}{os.environ.get('PATH', '')}")


def run(ranks):
    """Return what the program prints on so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        done = subprocess.run(
            [mpiexec, "-n", str(ranks), sys.executable, "-m", "mpi4py", program],
            env=os.environ | SETTINGS,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
    return json.loads(done.stdout)


results = {ranks: run(ranks) for ranks in (1, 2, 4)}
for ranks, result in results.items():
    print(f"{ranks} ranks: {max(result['memory']):.0f} MiB at most, end {result['end']:.6g}")

# %%
# The gradient is the same on any number of ranks, and equals that of a loop that makes one Jacobian
# after the other and holds none; each of four ranks has about a quarter of the chain.

x = np.ones(100)
for k in range(3000):
    x = np.random.default_rng(k).standard_normal((100, 100)) / 10 @ x
for result in results.values():
    np.testing.assert_allclose(result["end"], np.linalg.norm(x), rtol=1e-6)
assert max(results[4]["memory"]) < 0.5 * max(results[1]["memory"])

fig, axes = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
place, places, names = 0, [], []
for ranks, result in results.items():
    bars = place + np.arange(ranks)
    axes.bar(bars, result["memory"], color="#0072b2", label="taken by a rank" * (ranks == 1))
    axes.hlines(
        3000 * 100 * 100 * 8 / 2**20 / ranks,
        *(bars[0] - 0.5, bars[-1] + 0.5),
        color="#d55e00",
        lw=2,
        label="the Jacobians of a rank" * (ranks == 1),
    )
    places.append(bars.mean())
    names.append(f"{ranks} rank{'s' * (ranks > 1)}")
    place += ranks + 1
axes.set_xticks(places, names)
axes.tick_params(axis="x", length=0)
axes.set(ylabel="peak memory of a rank, MiB", title="Each rank holds its part of the chain")
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
plt.show()
