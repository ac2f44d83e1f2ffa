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

from sparsescan.strategies import Machine, Prediction, build, compare
from sparsescan.strategies.compare import draw_over_workers, styles

from . import drawing
from .experiment import Drawing, Experiment, Piece, Results, Table
from .page import significant
from .scaling import call, cores, missing, on_ranks

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
# Networks that are measured, with so many samples, on so many ranks.
MEASURED = {"lenet5": 64, "resnet-8": 16, "rnn:100": 16}
_QUICK_MEASURED = ("lenet5", "rnn:100")
RANKS = (1, 2, 4)


def _title(network: str) -> str:
    kind, _, steps = network.partition(":")
    return f"{kind.upper()}, T={int(steps):,}" if steps else network.upper()


# -- Pieces ---------------------------------------------------------------------------------------


def _pieces(quick: bool) -> Iterable[Piece]:
    for name in _QUICK_NETWORKS if quick else NETWORKS:
        run = partial(_predict, name, _QUICK_WORKERS if quick else WORKERS)
        yield Piece(f"predicted, {name}", run)
    for count in RANKS:
        run = partial(_measure, count, _QUICK_MEASURED if quick else tuple(MEASURED))
        yield Piece(f"measured, P={count}", run)


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
        call([*on_ranks(ranks), "bench.strategies", str(file), *networks], folder)
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


def _about(quick: bool) -> Results:
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
    predicted = [piece for piece in results["pieces"].values() if "comparisons" in piece]
    return [_over_workers(predicted)] if predicted else []


def _tables(results: Results) -> list[Table]:
    """Return what steps took on the ranks of this machine, beside what was predicted."""
    rows = [
        [
            f"{_title(run['network'])}, B={run['batch']}, {piece['ranks']} ranks",
            one["strategy"],
            *(significant(one[key] / 1e6) for key in ("total", "measured_nanoseconds")),
            *(f"{one[key]:,}" for key in ("bytes", "measured_bytes")),
        ]
        for piece in results["pieces"].values()
        for run in piece.get("runs", ())
        for one in run["measured"]
    ]
    numbers = ["predicted, ms", "measured, ms", "predicted bytes", "sent by the busiest rank"]
    return [Table(["step", "strategy", *numbers], rows, numbers)]


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


EXPERIMENT = Experiment(
    "strategies", "Which way to parallelise", _pieces, _about, _drawings, tables=_tables
)


if __name__ == "__main__":
    _on_rank(*sys.argv[1:])
