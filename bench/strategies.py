"""Ways to spread a training step over workers, predicted up to many.

``sparsescan.strategies.compare`` says what all strategies take for networks and numbers of
workers, by the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

from sparsescan.strategies import Machine, build, compare
from sparsescan.strategies.compare import draw_over_workers, styles
from sparsescan.strategies.strategy import Prediction

from . import drawing
from .experiment import Drawing, Experiment, Piece, Results
from .scaling import cores

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


def _title(network: str) -> str:
    kind, _, steps = network.partition(":")
    return f"{kind.upper()}, T={int(steps):,}" if steps else network.upper()


# -- Pieces ---------------------------------------------------------------------------------------


def _pieces(quick: bool) -> Iterable[Piece]:
    for name in _QUICK_NETWORKS if quick else NETWORKS:
        run = partial(_predict, name, _QUICK_WORKERS if quick else WORKERS)
        yield Piece(f"predicted, {name}", run)


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


def _about(quick: bool) -> Results:
    machine = Machine()
    network = machine.network
    return {
        "predicted": "by the model, for workers and a network that are made up",
        "a worker": f"{machine.multiply_adds:g} multiply-adds and {machine.bandwidth:g} bytes of "
        f"memory a ns, {machine.overhead:,.0f} ns a layer beside, {machine.memory >> 30} GiB",
        "the network": f"α = {network.latency:,.0f} ns, β = {network.inverse_bandwidth:g} ns/byte",
        "dtype": "float32",
    }


# -- What is shown --------------------------------------------------------------------------------


def _drawings(results: Results) -> list[Drawing]:
    predicted = [piece for piece in results["pieces"].values() if "comparisons" in piece]
    return [_over_workers(predicted)] if predicted else []


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


EXPERIMENT = Experiment("strategies", "Which way to parallelise", _pieces, _about, _drawings)
