"""Run other packages' own tests on what sparsescan puts in the place of their functions.

``.ci/peers`` runs them, and ``tests/support/peers/count.py`` says when a test that does not pass
counts as refused, as of other words, or as failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from .experiment import Experiment, Piece, Results, Table

_ROOT = Path(__file__).parent.parent
_SUITES = {
    "pytorch": ("pytorch-nn", "pytorch-modules"),
    "torchrecurrent": ("torchrecurrent",),
    "scipy": ("scipy-torch", "scipy-jax"),
    "mamba": ("mamba",),
    "jax": ("jax",),
}
# Characters of a message that tell what it is about.
_SAID = 60


def measure(suite: str, quick: bool) -> Results:
    """Run the tests of one package."""
    few = {"PYTEST_ADDOPTS": "-k 'TestSOSFilt and rank1'"} if quick else {}
    environment = {**os.environ, "PYTHON": sys.executable, **few}
    command = [str(_ROOT / ".ci" / "peers"), suite]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"missing": {suite: done.stderr.strip().rpartition("\n")[2]}}
    folder = _ROOT / "build" / "peers"
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in _SUITES[suite]}


def _pieces(quick: bool) -> Iterable[Piece]:
    # SciPy comes with its tests.
    for suite in ["scipy"] if quick else _SUITES:
        yield Piece(suite, partial(measure, suite, quick))


def _tables(results: Results) -> list[Table]:
    heads, counts, others = ["pass"], [], []
    for piece in results["pieces"].values():
        for name, suite in piece.items():
            if name == "missing":
                continue
            heads = list(suite["outcomes"])
            numbers = map(str, suite["outcomes"].values())
            counts.append([name, suite["version"], str(suite["run"]), *numbers])
            said = Counter[tuple[str, str]]()
            for each in suite["did not pass"]:
                said[each["outcome"], each["said"].replace("\n", " ")[:_SAID]] += each["tests"]
            others += [[name, *key, str(number)] for key, number in said.most_common()]
    return [
        Table(["tests", "of", "run", *heads], counts, ["run", *heads]),
        Table(["tests", "outcome", "what was said", "number"], others, ["number"]),
    ]


EXPERIMENT = Experiment(
    "suites", "Other packages' own tests", _pieces, lambda quick: {}, tables=_tables
)
