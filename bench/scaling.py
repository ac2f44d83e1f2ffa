"""Scans over MPI ranks: strong and weak scaling, up to 4,096 ranks by the model, and memory.

Section 3.6 of the paper: Θ(n/p + log p) steps of a scan of n Jacobians by p workers, each of which
holds n/p of them. It is measured on the ranks of this machine, one thread each, beside what the
model predicts from constants that are measured in the same run; the model then says what more
ranks would take.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sparsescan.execution.threads import usable_cores

from . import children
from .experiment import Experiment, Options, Piece, Results, Row, cpu_only
from .resident import GIVE_BACK, MIB
from .scaling_drawings import drawings
from .scaling_model import ALONE, CHAINS, INFINIBAND

_ROOT = Path(__file__).parent.parent
RANKS = (1, 2, 4)
_MEMORY_RANKS, _QUICK_MEMORY_RANKS = (1, 2, 4, 8), (1, 4)
# Turns, and seconds of each sample.
_ROUNDS, _QUICK_ROUNDS = (25, 0.1), (5, 0.02)
_QUICK_CHAINS = ("dense", "diagonal")
# Rows of a step, steps, and MiB for each rank, which are too few for half of the steps.
_MEMORY, _QUICK_MEMORY = (256, 512, 96), (128, 512, 24)
# Chains of the model: of these lengths; with so few steps that ranks have none; of so many for each
# rank; on 1, 2, 4, … ranks, or on 1, 4, 16, …, but not on more than so many.
_FEW, _EACH = 64, 16
_MODEL: Results = {
    "strong": [["dense", 4096], ["dense", 65_536], ["diagonal", 4096]],
    "few": _FEW,
    "each": _EACH,
    "stride": 1,
    "most": 4096,
}
_QUICK_MODEL = _MODEL | {"strong": [["dense", 4096]], "stride": 2}


def missing() -> str | None:
    """Why no ranks can be started, if so."""
    if importlib.util.find_spec("mpi4py") is None or _mpiexec() is None:
        return "needs mpi4py and mpiexec: pip install 'sparsescan[mpi]'"
    if not Path("/proc/self/clear_refs").exists():
        return "needs Linux, which tells the memory of each rank"
    return None


def cores() -> int:
    """CPUs that this process may use, and so the ranks."""
    return len(usable_cores())


# -- Starting ranks -------------------------------------------------------------------------------


def _mpiexec() -> str | None:
    """Return the path of mpiexec; the one that was installed beside this Python comes first."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which("mpiexec", path=folders)


def _settings(folder: Path) -> dict[str, str]:
    """Return the environment of processes with one thread each, whose cache folder is this one."""
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    return {
        "XDG_CACHE_HOME": str(folder),
        "PYTHONPATH": path,
        "NUMBA_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # Open MPI: more ranks than cores, which let each other work; root; scans by doubling.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
        "OMPI_MCA_coll_tuned_exscan_algorithm": "2",
    }


# Let glibc keep what is freed, as for the other experiments.
_KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def _call(command: list[str], folder: Path, memory: dict[str, str] = _KEEP) -> None:
    children.run(command, _settings(folder) | memory)


def _on_ranks(ranks: int) -> list[str]:
    return [str(_mpiexec()), "-n", str(ranks), sys.executable, "-m", "mpi4py", "-m"]


@cache
def _machine() -> bytes:
    """Return the constants of this machine with one thread, as they are kept."""
    with tempfile.TemporaryDirectory() as name:
        _call([sys.executable, "-m", "sparsescan", "calibrate"], Path(name))
        return (Path(name) / "sparsescan" / "machine.json").read_bytes()


@contextmanager
def _calibrated() -> Iterator[Path]:
    """Yield a cache folder with them, and nothing else."""
    machine = _machine()
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "sparsescan" / "machine.json"
        file.parent.mkdir()
        file.write_bytes(machine)
        yield Path(name)


# -- Pieces ---------------------------------------------------------------------------------------


def _pieces(options: Options) -> list[Piece]:
    limited = _QUICK_MEMORY_RANKS if options.quick else _MEMORY_RANKS
    return [
        *(Piece(f"times, P={ranks}", partial(_times, options, ranks)) for ranks in RANKS),
        Piece("model", partial(_model, options)),
        *(Piece(f"memory, P={ranks}", partial(_memory, options, ranks)) for ranks in limited),
    ]


def _measure(ranks: int, what: str, **options: Any) -> Results:
    """Run :mod:`bench.scaling_ranks` on so many ranks; its results."""
    memory = GIVE_BACK if what == "memory" else _KEEP
    with _calibrated() as folder:
        return _answer([*_on_ranks(ranks), "bench.scaling_ranks"], [what], options, folder, memory)


def _answer(
    program: list[str], what: list[str], options: Results, folder: Path, memory: dict[str, str]
) -> Results:
    """Return the results of a program, which writes them to the file that it is told."""
    file = folder / "results.json"
    _call([*program, str(file), *what, json.dumps(options)], folder, memory)
    results: Results = json.loads(file.read_text())
    return results


def _times(options: Options, ranks: int) -> Results:
    names = _QUICK_CHAINS if options.quick else tuple(CHAINS)
    chains = {(name, CHAINS[name].n) for name in names}
    chains |= {(name, each * ranks) for name in names if (each := CHAINS[name].each)}
    rounds, seconds = _QUICK_ROUNDS if options.quick else _ROUNDS
    measured = _measure(ranks, "times", chains=sorted(chains), rounds=rounds, seconds=seconds)
    return measured | {"cores": cores(), "oversubscribed": ranks > cores()}


def _memory(options: Options, ranks: int) -> Results:
    size, n, limit = _QUICK_MEMORY if options.quick else _MEMORY
    measured = _measure(ranks, "memory", size=size, n=n, limit=limit * MIB)
    return measured | {"size": size, "n": n}


def _model(options: Options) -> Results:
    """Predict for the network between as many ranks as there are cores, and for another one."""
    with _calibrated() as folder:
        _call([*_on_ranks(max(2, cores())), "sparsescan", "calibrate", "--mpi"], folder)
        program = [sys.executable, "-m", "bench.scaling_model"]
        return _answer(program, [], _QUICK_MODEL if options.quick else _MODEL, folder, _KEEP)


def _about(options: Options) -> Results:
    cpu_only("scaling", options)
    why = missing()
    if why:
        raise SystemExit(f"scaling {why}")
    size, n, limit = _QUICK_MEMORY if options.quick else _MEMORY
    rounds, seconds = _QUICK_ROUNDS if options.quick else _ROUNDS
    return {
        "ranks": f"{', '.join(map(str, RANKS))}, one thread each; more than {cores()} share cores",
        "MPI": f"mpi4py {version('mpi4py')}; exclusive scans by recursive doubling",
        "base": f"{ALONE}: sparsescan.ScanPlan.exclusive_scan of the whole chain, one thread",
        "dtype": "float64",
        "rounds": f"{rounds}, samples of {seconds:g} s or one call",
        "constants": "sparsescan calibrate, and sparsescan.parallel.measure on the same ranks",
        INFINIBAND.name: (
            f"α = {INFINIBAND.latency:,.0f} ns, β = {INFINIBAND.inverse_bandwidth:g} ns a byte, "
            f"{INFINIBAND.exchange:g} in a round of an exscan, {INFINIBAND.call:,.0f} ns a call of "
            "its operator"
        ),
        "memory": f"{n} steps of {size}×{size}, {limit} MiB for each rank (RLIMIT_DATA)",
    }


def _rows(results: Results) -> list[Row]:
    """Return the best way to combine the parts, beside one process."""
    rows = []
    for piece in results["pieces"].values():
        for scan in piece.get("scans", ()):
            about, medians = CHAINS[scan["chain"]], scan["median_seconds"]
            if scan["n"] != about.n or piece["ranks"] == 1:
                continue
            shared = f" on {piece['cores']} cores" * piece["oversubscribed"]
            ours = medians["groups" if about.batch else "auto"]
            work = f"{about.what}, n={scan['n']:,}: {piece['ranks']} ranks{shared}"
            rows.append(Row(work, ALONE, medians[ALONE], ours))
    return rows


EXPERIMENT = Experiment(
    name="scaling",
    title="Scaling over MPI ranks",
    pieces=_pieces,
    about=_about,
    drawings=drawings,
    rows=_rows,
)
