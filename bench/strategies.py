"""Ways to spread a training step over workers: predicted up to many, measured on a few ranks.

``sparsescan.strategies.compare`` says what all strategies take for networks and numbers of
workers, by the model; and on the ranks of this machine, all of them train LeNet-5, ResNet-8 and
an RNN in turns, beside what is predicted from what layers and exchanges take, measured in the same
run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from sparsescan.strategies import Machine, Prediction, Scan, build, compare
from sparsescan.strategies.compare import draw_over_workers, styles

from . import drawing
from .experiment import Drawing, Experiment, Options, Piece, Results, Row
from .scaling import _call, _on_ranks, cores, missing

__all__ = ["EXPERIMENT"]

# Networks and their samples of a step; of the recurrent ones as in the other experiments.
NETWORKS = {
    "lenet5": 256,
    "vgg11": 256,
    "vgg16": 256,
    "resnet-110": 256,
    "inception-v3": 256,
    "rnn:1000": 16,
    "gru:500": 16,
}
_QUICK_NETWORKS = ("lenet5", "rnn:1000")
WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_QUICK_WORKERS = (1, 4, 64)
# Those that the tables show.
_SHOWN = (4, 64)
# Networks that are measured, with so many samples, on so many ranks.
MEASURED = {"lenet5": 64, "resnet-8": 16, "rnn:100": 16}
_QUICK_MEASURED = ("lenet5", "rnn:100")
RANKS = (1, 2, 4)
_NAMES = {
    "lenet5": "LeNet-5",
    "vgg11": "VGG-11",
    "vgg16": "VGG-16",
    "resnet-8": "ResNet-8",
    "resnet-110": "ResNet-110",
    "inception-v3": "Inception-v3",
}
_FILLS = {"lenet5": "none", "resnet-8": "left", "rnn:100": "full"}


def _title(network: str) -> str:
    kind, _, steps = network.partition(":")
    return f"{kind.upper()}, T={int(steps):,}" if steps else _NAMES[network]


# -- Pieces ---------------------------------------------------------------------------------------


def _pieces(options: Options) -> list[Piece]:
    networks: Iterable[str] = _QUICK_NETWORKS if options.quick else NETWORKS
    counts = _QUICK_WORKERS if options.quick else WORKERS
    measured = _QUICK_MEASURED if options.quick else tuple(MEASURED)
    return [
        *(Piece(f"predicted, {name}", partial(_predict, name, counts)) for name in networks),
        *(Piece(f"measured, P={count}", partial(_measure, count, measured)) for count in RANKS),
    ]


def _predict(name: str, counts: Sequence[int]) -> Results:
    with ProcessPoolExecutor(cores(), get_context("spawn")) as pool:
        # Those of many workers take longest, and so come first.
        every = [*pool.map(partial(_compared, name), counts[::-1])][::-1]
    return {"network": name, "batch": NETWORKS[name], "comparisons": every}


def _compared(name: str, workers: int) -> Results:
    one = compare(build(name), Machine(), workers, NETWORKS[name])
    return {
        "workers": one.workers,
        "single_nanoseconds": one.single.total,
        "predictions": [_plain(each) | {"fits": one.fits(each)} for each in one.predictions],
        "reasons": one.reasons,
    }


def _plain(prediction: Prediction) -> Results:
    """Describe a prediction as JSON can hold it, without its layers."""
    return {name: value for name, value in prediction.to_dict().items() if name != "layers"}


def _measure(ranks: int, networks: tuple[str, ...]) -> Results:
    with tempfile.TemporaryDirectory() as name:
        folder, file = Path(name), Path(name) / "results.json"
        _call([*_on_ranks(ranks), "bench.strategies", str(file), *networks], folder)
        results: Results = json.loads(file.read_text())
    return results | {"cores": cores()}


def _on_rank(path: str, *networks: str) -> None:
    """Train the networks by every strategy; rank 0 writes the file."""
    from mpi4py import MPI

    from sparsescan.strategies import measure_here, run

    comm = MPI.COMM_WORLD
    machines, runs = {}, []
    for name in networks:
        batch = MEASURED[name]
        machine = measure_here(comm, name, batch)
        done = run(comm, name, machine, batch)
        measured = [
            _plain(one.prediction)
            | {"measured_nanoseconds": one.nanoseconds, "measured_bytes": one.bytes}
            for one in done.measured
        ]
        about = {"network": name, "batch": batch, "pairs": done.pairs, "reasons": done.reasons}
        runs.append(about | {"measured": measured})
        machines[name] = machine.to_dict()
    if comm.rank == 0:
        known = {"ranks": comm.size, "machines": machines, "runs": runs}
        Path(path).write_text(json.dumps(known))


def _about(options: Options) -> Results:
    if options.device != "cpu":
        raise SystemExit("strategies is of the CPU: run it without --device")
    why = missing()
    if why:
        raise SystemExit(f"strategies {why}")
    machine = Machine()
    network = machine.network
    return {
        "predicted": "by the model, for workers and a network that are made up",
        "a worker": f"{machine.multiply_adds:g} multiply-adds and {machine.bandwidth:g} bytes of "
        f"memory a ns, {machine.overhead:,.0f} ns a layer beside, {machine.memory >> 30} GiB",
        "the network": f"α = {network.latency:,.0f} ns, β = {network.inverse_bandwidth:g} ns/byte",
        "measured": f"on {cores()} cores, one thread a rank; all strategies in turns",
        "MPI": f"mpi4py {version('mpi4py')}",
        "dtype": "float32",
    }


# -- What is shown --------------------------------------------------------------------------------


def _drawings(results: Results) -> list[Drawing]:
    pieces = results["pieces"].values()
    predicted = [piece for piece in pieces if "comparisons" in piece]
    measured = [piece for piece in pieces if "runs" in piece]
    drawings = [_over_workers(predicted)] if predicted else []
    return drawings + ([_beside(measured)] if measured else [])


def _over_workers(pieces: list[Results]) -> Drawing:
    columns = min(len(pieces), 3)
    figure, panels = drawing.panels_in_rows(len(pieces), columns, 4 * columns)
    for axes, piece in zip(panels, pieces, strict=True):
        counts = [one["workers"] for one in piece["comparisons"]]
        points: dict[str, list[Any]] = {}
        for one in piece["comparisons"]:
            for prediction in one["predictions"]:
                point = one["workers"], prediction["total"], prediction["fits"]
                points.setdefault(prediction["strategy"], []).append(point)
        alone = piece["comparisons"][0]["single_nanoseconds"]
        draw_over_workers(axes, counts, points, alone, 8)
        axes.set_xlabel("workers")
        axes.set_title(f"{_title(piece['network'])}, B={piece['batch']}", fontsize="medium")
    figure.supylabel("predicted time of a step, ms")
    drawing.legend(figure, panels, 3, order=styles())
    caption = (
        "Predicted time of a training step by every strategy, for made-up workers. Hollow: more "
        "memory than a worker has. Dashed: gradients are stale. A strategy that is missing "
        "cannot use so many workers."
    )
    return Drawing("Which way to parallelise", caption, figure)


def _beside(pieces: list[Results]) -> Drawing:
    """Measured over predicted, one panel for each number of ranks."""
    figure, panels = drawing.panels_in_rows(len(pieces), len(pieces), 4 * len(pieces))
    for axes, piece in zip(panels, pieces, strict=True):
        both = []
        for run in piece["runs"]:
            for one in run["measured"]:
                if one["strategy"] not in styles():
                    # Batch parallelism by a scan, which earlier runs have beside it.
                    continue
                x, y = one["total"] / 1e6, one["measured_nanoseconds"] / 1e6
                style = styles()[one["strategy"]] | {"fillstyle": _FILLS[run["network"]], "ls": ""}
                axes.plot(x, y, ms=8, label=one["strategy"], **style)
                both += [x, y]
        ends = [0.7 * min(both), 1.4 * max(both)]
        axes.plot(ends, ends, "k:", lw=1)
        axes.set(xscale="log", yscale="log", xlabel="predicted, ms", ylabel="measured, ms")
        for axis in (axes.xaxis, axes.yaxis):
            drawing.decades(axis, "{:g}")
        axes.set_title(f"{piece['ranks']} rank{'s' * (piece['ranks'] > 1)}", fontsize="medium")
        drawing.plain(axes, "both")
    drawing.legend(figure, panels, order=styles())
    caption = (
        "A training step on the ranks of this machine, measured beside predicted; hollow: LeNet-5 "
        "with 64 samples, half full: ResNet-8 with 16, full: an RNN of 100 steps with 16. On the "
        "dotted line both are equal. "
        f"{_bytes_said(pieces)} {_order_said(pieces)}"
    )
    return Drawing("Strategies on the ranks of this machine", caption, figure)


def _bytes_said(pieces: list[Results]) -> str:
    every = [one for piece in pieces for run in piece["runs"] for one in run["measured"]]
    equal = sum(one["bytes"] == one["measured_bytes"] for one in every)
    return f"The busiest rank sent as many bytes as predicted in {equal} of {len(every)} cases."


def _order_said(pieces: list[Results]) -> str:
    """Describe the order by number of ranks: more than there are cores are harder to predict."""
    said = []
    for piece in pieces:
        right, pairs = (sum(run["pairs"][k] for run in piece["runs"]) for k in (0, 1))
        off = [
            abs(one["measured_nanoseconds"] / one["total"] - 1)
            for run in piece["runs"]
            for one in run["measured"]
        ]
        said.append(f"P={piece['ranks']}: {right} of {pairs} pairs, and {max(off):.0%} off at most")
    return f"Strategies that differ by more than 15%, in the order predicted: {'; '.join(said)}."


def _rows(results: Results) -> list[Row]:
    """Return the scan beside the best of the others that fit, be it faster or slower."""
    rows = []
    for piece in results["pieces"].values():
        for one in piece.get("comparisons", ()):
            if one["workers"] in _SHOWN:
                what = f"{_title(piece['network'])}, B={piece['batch']}, {one['workers']} workers"
                rows += _beside_scan(f"{what}, predicted", one["predictions"], "total")
        for run in piece.get("runs", ()):
            if piece["ranks"] > 1:
                what = f"{_title(run['network'])}, B={run['batch']}, {piece['ranks']} ranks"
                shared = f" on {piece['cores']} cores" * (piece["ranks"] > piece["cores"])
                work = f"{what}{shared}, measured"
                rows += _beside_scan(work, run["measured"], "measured_nanoseconds")
    return rows


def _beside_scan(work: str, runs: list[Results], key: str) -> list[Row]:
    times = {one["strategy"]: one[key] / 1e9 for one in runs if one.get("fits", True)}
    scan = times.pop(Scan.name, None)
    if scan is None or not times:
        return []
    best = min(times, key=lambda name: times[name])
    return [Row(work, best, times[best], scan)]


EXPERIMENT = Experiment(
    name="strategies",
    title="Which way to parallelise",
    pieces=_pieces,
    about=_about,
    drawings=_drawings,
    rows=_rows,
)


if __name__ == "__main__":
    _on_rank(*sys.argv[1:])
