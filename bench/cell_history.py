"""Our training steps of RNN, GRU and LSTM beside those before cells were defined once, in turns.

The package as it was then is taken from git, and runs in a process of its own, as today's does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .experiment import Results
from .peers import MissingPeerError
from .step import OURS, Case

__all__ = ["BEFORE", "COMMIT", "measure_history"]

BEFORE = "kernels before"
# The last one whose RNN, GRU and LSTM had kernels of their own.
COMMIT = "ad6f076e91184371bf69d730b6c52087fefcbec3"
_ROOT = Path(__file__).parent.parent
_ROUNDS, _QUICK_ROUNDS, _TURN, _QUICK_TURN = 9, 2, 0.1, 0.01

# A process that answers lines: a case, then turns of so many seconds.
_SERVER = """
import json, sys, time
import numpy as np
import sparsescan
from sparsescan.recurrent import GRU, LSTM, RNN
nets, gates = {"RNN": RNN, "GRU": GRU, "LSTM": LSTM}, {"RNN": 1, "GRU": 3, "LSTM": 4}
print(sparsescan.__file__, flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "kind" in asked:
        kind, hidden, kept = asked["kind"], asked["hidden"], asked["kept"]
        rng, masks = np.random.default_rng(0), None
        if kept is not None:
            masks = {"weight_hh_l0": rng.random((gates[kind] * hidden, hidden)) < kept}
        net = nets[kind](asked["inputs"], hidden, masks=masks, rng=0)
        if masks is not None:
            net.weight_hh_l0 = np.where(masks["weight_hh_l0"], net.weight_hh_l0, 0)
        lead = asked["steps"], asked["batch"]
        x = rng.standard_normal((*lead, asked["inputs"]), np.float32)
        grad = rng.standard_normal((*lead, hidden), np.float32)
        if asked["last_only"]:
            grad[:-1] = 0
        state = np.zeros((1, asked["batch"], net.state_size), np.float32)
        step = net.training_step()
    def call():
        step.forward(x, state)
        return step.backward(grad)
    samples = []
    for length in (0, *asked["turns"]):
        samples = []
        while not samples or sum(samples) < length:
            start = time.perf_counter()
            grads = call()
            samples.append(time.perf_counter() - start)
    sums = {name: float(np.abs(each).sum(dtype=float)) for name, each in grads.params.items()}
    print(json.dumps({"samples": samples, "sums": sums}), flush=True)
"""


class _Server:
    """A process with one version of the package."""

    def __init__(self, root: Path, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            cwd=root,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert Path(self._answer()).parent.parent == root.resolve()

    def ask(self, **asked: Any) -> Any:
        """Return the answer to a question."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return json.loads(self._answer())

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with {self.process.wait()}")
        return line.strip()


@contextmanager
def _servers() -> Iterator[dict[str, _Server]]:
    old = _checked_out()
    made: dict[str, _Server] = {}
    try:
        made[OURS] = _Server(_ROOT, {})
        made[BEFORE] = _Server(old, {"NUMBA_CACHE_DIR": str(old / "compiled")})
        yield made
    finally:
        for each in made.values():
            each.process.kill()
            each.process.communicate()


def _checked_out() -> Path:
    """Return a folder with the package as it was; it and its compiled code stay for other runs."""
    folder = Path(tempfile.gettempdir()) / f"sparsescan-{COMMIT[:8]}"
    if not (folder / "sparsescan").exists():
        archive = ["git", "archive", COMMIT, "sparsescan"]
        done = subprocess.run(archive, cwd=_ROOT, capture_output=True, check=False)
        if done.returncode:
            raise MissingPeerError(f"git has no commit {COMMIT[:8]}: git fetch --unshallow")
        folder.mkdir(exist_ok=True)
        subprocess.run(["tar", "x", "-C", str(folder)], input=done.stdout, check=True)
    return folder.resolve()


def measure_history(case: Case, wanted: float, *, quick: bool) -> Results:
    """Return ``samples`` of a training step in both versions, in turns, as other races do."""
    rounds, turn = (_QUICK_ROUNDS, _QUICK_TURN) if quick else (_ROUNDS, _TURN)
    keys = ("kind", "inputs", "hidden", "batch", "steps", "kept", "last_only")
    samples: dict[str, list[float]] = {OURS: [], BEFORE: []}
    try:
        with _servers() as servers:
            about = {key: getattr(case, key) for key in keys}
            sums = {name: each.ask(**about, turns=[turn])["sums"] for name, each in servers.items()}
            for name, total in sums[OURS].items():
                apart = abs(total - sums[BEFORE][name])
                if not apart <= case.bound * abs(sums[BEFORE][name]) + 1e-30:
                    raise AssertionError(f"{name}: sums of gradients are {apart:.1e} apart")
            for which in range(rounds):
                for name in (OURS, BEFORE)[:: 1 if which % 2 else -1]:
                    samples[name] += servers[name].ask(turns=[turn / 2, turn])["samples"]
    except MissingPeerError as error:
        return {"missing": {BEFORE: str(error)}}
    return {
        "samples": {name: [round(each, 9) for each in own] for name, own in samples.items()},
        "variants": {},
        "missing": {},
        "wanted": {BEFORE: wanted},
    }
