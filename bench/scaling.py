"""Scans over MPI ranks: strong and weak scaling, and up to 4,096 ranks by the model.

Section 3.6 of the paper: Θ(n/p + log p) steps of a scan of n Jacobians by p workers, each of which
holds n/p of them. It is measured on the ranks of this machine, one thread each, beside what the
model predicts from constants that are measured in the same run; the model then says what more
ranks would take. ``docs/gallery/plot_mpi.py`` shows the memory of each rank.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from sparsescan.execution.threads import usable_cores

from . import children, drawing
from .drawing import BLUE, GREEN, ORANGE, legend, plot_with_spread
from .experiment import Drawing, Experiment, Piece, Results, Row
from .scaling_model import ALONE, CHAINS, INFINIBAND

_ROOT = Path(__file__).parent.parent
RANKS = (1, 2, 4)
# Turns, and seconds of each sample.
_ROUNDS, _QUICK_ROUNDS = (25, 0.1), (5, 0.02)
_QUICK_CHAINS = ("dense", "diagonal")
# Chains of the model: of these lengths, and of so many steps for each rank; on 1, 2, 4, … ranks, or
# on 1, 4, 16, …, but not on more than so many.
_MODEL: Results = {
    "strong": [["dense", 4096], ["dense", 65_536], ["diagonal", 4096]],
    "each": 16,
    "stride": 1,
    "most": 4096,
}
_QUICK_MODEL = _MODEL | {"strong": [["dense", 4096]], "stride": 2}
_GREY = "grey"
_STYLES: dict[str, dict[str, Any]] = {
    ALONE: {"color": _GREY, "marker": "D", "ms": 4.5},
    "vectors": {"color": BLUE, "marker": "s", "ms": 5},
    "products": {"color": ORANGE, "marker": "o", "ms": 5},
    "groups": {"color": GREEN, "marker": "^", "ms": 6},
    "auto": {"color": "black", "marker": "o", "ms": 9, "mfc": "none", "ls": ""},
}


def missing() -> str | None:
    """Why no ranks can be started, if so."""
    if importlib.util.find_spec("mpi4py") is None or _mpiexec() is None:
        return "needs mpi4py and mpiexec: pip install 'sparsescan[mpi]'"
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


def call(command: list[str], folder: Path) -> None:
    children.run(command, _settings(folder) | _KEEP)


def on_ranks(ranks: int) -> list[str]:
    return [str(_mpiexec()), "-n", str(ranks), sys.executable, "-m", "mpi4py", "-m"]


@cache
def _machine() -> bytes:
    """Return the constants of this machine with one thread, as they are kept."""
    with tempfile.TemporaryDirectory() as name:
        call([sys.executable, "-m", "sparsescan", "calibrate"], Path(name))
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


def _pieces(quick: bool) -> Iterator[Piece]:
    for ranks in RANKS:
        yield Piece(f"times, P={ranks}", partial(_times, quick, ranks))
    yield Piece("model", partial(_model, quick))


def _times(quick: bool, ranks: int) -> Results:
    names = _QUICK_CHAINS if quick else tuple(CHAINS)
    chains = {(name, CHAINS[name].n) for name in names}
    chains |= {(name, each * ranks) for name in names if (each := CHAINS[name].each)}
    rounds, seconds = _QUICK_ROUNDS if quick else _ROUNDS
    options = {"chains": sorted(chains), "rounds": rounds, "seconds": seconds}
    with _calibrated() as folder:
        measured = _answer([*on_ranks(ranks), "bench.scaling_ranks"], options, folder)
    return measured | {"cores": cores(), "oversubscribed": ranks > cores()}


def _model(quick: bool) -> Results:
    """Predict for the network between as many ranks as there are cores, and for another one."""
    with _calibrated() as folder:
        call([*on_ranks(max(2, cores())), "sparsescan", "calibrate", "--mpi"], folder)
        program = [sys.executable, "-m", "bench.scaling_model"]
        return _answer(program, _QUICK_MODEL if quick else _MODEL, folder)


def _answer(program: list[str], options: Results, folder: Path) -> Results:
    """Return the results of a program, which writes them to the file that it is told."""
    file = folder / "results.json"
    call([*program, str(file), json.dumps(options)], folder)
    results: Results = json.loads(file.read_text())
    return results


def _about(quick: bool) -> Results:
    why = missing()
    if why:
        raise SystemExit(f"scaling {why}")
    rounds, seconds = _QUICK_ROUNDS if quick else _ROUNDS
    return {
        "ranks": f"{', '.join(map(str, RANKS))}, one thread each; more than {cores()} share cores",
        "MPI": f"mpi4py {version('mpi4py')}; exclusive scans by recursive doubling",
        "base": f"{ALONE}: sparsescan.ScanPlan.exclusive_scan of the whole chain, one thread",
        "dtype": "float64",
        "rounds": f"{rounds}, samples of {seconds:g} s or one call",
        "constants": "sparsescan calibrate, and parallel.Network.measure on the same ranks",
        INFINIBAND.name: (
            f"α = {INFINIBAND.latency:,.0f} ns, β = {INFINIBAND.inverse_bandwidth:g} ns a byte, "
            f"{INFINIBAND.exchange:g} in a round of an exscan, {INFINIBAND.call:,.0f} ns a call of "
            "its operator"
        ),
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


# -- What is shown --------------------------------------------------------------------------------


def _drawings(results: Results) -> list[Drawing]:
    pieces = results["pieces"]
    times = [piece for piece in pieces.values() if "scans" in piece]
    shown = [_measured(times)] if times else []
    return shown + ([_model_drawn(pieces["model"])] if "model" in pieces else [])


def _measured(times: list[Results]) -> Drawing:
    """Draw a panel for each chain and kind of scaling: milliseconds over ranks."""
    panels_of: dict[tuple[str, str], dict[int, Results]] = {}
    for piece in times:
        for scan in piece["scans"]:
            about, ranks = CHAINS[scan["chain"]], piece["ranks"]
            kinds = {"strong": about.n, "weak": (about.each or 0) * ranks}
            for kind, n in kinds.items():
                if n == scan["n"]:
                    panels_of.setdefault((kind, scan["chain"]), {})[ranks] = scan
    figure, panels = drawing.panels_in_rows(len(panels_of), 2, 10.5)
    for axes, ((kind, name), scans) in zip(panels, sorted(panels_of.items()), strict=True):
        for way, style in _STYLES.items():
            chosen = {p: scan for p, scan in scans.items() if way in scan["samples_seconds"]}
            spreads = {
                p: drawing.quartiles(scan["samples_seconds"][way], 1e-3)
                for p, scan in chosen.items()
            }
            plot_with_spread(axes, spreads, label=way, lw=1.5, **style)
            if way != "auto":
                said = [1e3 * scan["predicted_seconds"][way] for scan in chosen.values()]
                axes.plot(list(chosen), said, ls="--", lw=1.2, color=style["color"])
        _over_ranks(axes, sorted(scans), (1, 2, 5))
        each = f"{CHAINS[name].n:,} steps" if kind == "strong" else f"{CHAINS[name].each:,} a rank"
        axes.set_title(f"{CHAINS[name].what}, {each}", size=10)
        axes.set_ylabel("ms of a scan")
    legend(figure, panels, 6, loc="outside upper center")
    shared = [piece["ranks"] for piece in times if piece["oversubscribed"]]
    caption = (
        "Scans on more and more ranks, one thread each, and by one process: medians, and quartiles "
        "as bars; of the whole chain, or of as many steps for each rank. Dashed is what the model "
        "predicts from constants that were measured in the same run. Parts of the chain are "
        "combined by gradients, which every rank hands on, or by products, for which all ranks "
        "work at once; the ring is what the plan chooses. A product of dense d×d matrices takes d "
        "times as long as one with a gradient, so that more than d ranks are needed for products "
        "to pay; samples in groups need no products."
    )
    if shared:
        caption += f" On {', '.join(map(str, shared))} ranks several shared a core."
    return Drawing("Strong and weak scaling", caption, figure)


def _model_drawn(model: Results) -> Drawing:
    networks = [network["name"] for network in model["networks"]]
    figure, panels = drawing.panels_in_rows(2 * len(networks), 2, 10.5, sharey=True)
    for k, network in enumerate(networks):
        for axes, what in zip(panels[2 * k : 2 * k + 2], ("strong", "weak"), strict=True):
            own = [curve for curve in model[what] if curve["network"] == network]
            for curve, dashes in zip(own, ("-", "--", ":"), strict=False):
                n = f"n={curve['n'][-1]:,}" if what == "strong" else f"{curve['n'][0]:,} a rank"
                axes.plot([], [], ls=dashes, color=_GREY, label=f"{curve['chain']}, {n}")
                for way in ("vectors", "products"):
                    ms, color = 1e3 * np.array(curve[way], float), _STYLES[way]["color"]
                    axes.plot(curve["ranks"], ms, ls=dashes, lw=1.6, color=color)
            _over_ranks(axes, own[0]["ranks"][::2])
            axes.legend(fontsize=8, frameon=False)
            where = network if network == INFINIBAND.name else "this machine's network"
            axes.set_title(f"{what} scaling, {where}", size=10)
        panels[2 * k].set_ylabel("predicted ms of a scan")
    caption = (
        "By the calibrated model, on up to 4,096 ranks, each with a core as fast as here: with the "
        f"constants of the network of this machine, and with those of an {INFINIBAND.name} ("
        f"{INFINIBAND.latency / 1e3:g} µs, {1 / INFINIBAND.inverse_bandwidth:g} GB/s). By vectors "
        "(blue) a scan takes as long as on one rank, and a message for each more; by products "
        "(orange) what n/p steps and log p rounds of an exclusive scan by recursive doubling take. "
        "Where products could not pay, there is no line."
    )
    return Drawing("Scaling to 4,096 ranks", caption, figure)


def _over_ranks(axes: Any, ranks: Sequence[int], digits: tuple[int, ...] = (1,)) -> None:
    """Both axes are logarithmic; times are named that begin with these digits."""
    from matplotlib.ticker import NullLocator

    axes.set(xscale="log", yscale="log", xlabel="ranks")
    axes.set_xticks(ranks, [f"{count:,}" for count in ranks])
    axes.xaxis.set_minor_locator(NullLocator())
    drawing.decades(axes.yaxis, "{:,.10g}", digits)
    axes.grid(alpha=0.25)


EXPERIMENT = Experiment("scaling", "Scaling over MPI ranks", _pieces, _about, _drawings, _rows)
