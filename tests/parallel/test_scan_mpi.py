"""The command line under mpiexec: scans from file to file, and their end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import mpi_launch
import numpy as np
import pytest
import scipy.sparse as sp
from sampling import slow

import sparsescan
from sparsescan import BatchedCSR, CSRChain, Pattern
from sparsescan.chains.containers import PeriodicChain
from sparsescan.cli.main import main
from sparsescan.symbolic.pattern import of_mask

pytestmark = pytest.mark.mpi
SCRIPT = Path(mpi_launch.__file__).parent / "run_commands.py"

Commands = list[dict[str, Any]]


def command(argv: Sequence[object], how: str | None = None) -> dict[str, Any]:
    return {"argv": [*map(str, argv), "--mpi"], "how": how}


def run_all(size: int, folder: Path, commands: Commands) -> mpi_launch.Ended:
    """Run commands on some ranks, one after the other."""
    (folder / "commands.json").write_text(json.dumps(commands))
    return mpi_launch.run(size, "-m", "mpi4py", SCRIPT, folder)


def assert_codes(ended: mpi_launch.Ended, folder: Path, size: int, expected: list[int]) -> None:
    """All ranks gave these exit codes."""
    assert ended.code == 0, ended.output
    content = json.loads((folder / "ended.json").read_text())
    codes = [[code for code, _ in ranks] for ranks in content]
    assert codes == [[code] * size for code in expected], ended.output


# ---------------------------------------------------------------------------------------------
# Ranks write the file that one process writes
# ---------------------------------------------------------------------------------------------


def mask(rng: np.random.Generator, rows: int, cols: int) -> sp.csr_array:
    return sp.csr_array(rng.random((rows, cols)) < 0.6)


def random_chain(
    rng: np.random.Generator, layout: str, n: int, batch: int | None
) -> tuple[Any, Any]:
    """Return a chain of positive numbers, so that nothing cancels."""
    dtype = rng.choice([np.float32, np.float64])
    size = int(rng.integers(1, 6))
    leading = () if batch is None else (batch,)
    own = leading if rng.random() < 0.7 else ()
    if layout == "list":
        sizes = rng.integers(1, 6, n + 1).tolist()
        steps: list[Any] = []
        for shape in zip(sizes[1:], sizes[:-1], strict=True):
            form, where = rng.integers(3), mask(rng, *shape)
            kind = rng.choice([np.float32, np.float64])
            if form == 0:
                steps.append(sp.csr_array(rng.random(shape, kind) * where.toarray()))
            elif form == 1 and batch is not None:
                data = rng.random((batch, where.nnz), kind)
                steps.append(BatchedCSR(data, where.indices, where.indptr, shape))
            else:
                steps.append(rng.random((*own, *shape), kind))
        return rng.random((*leading, sizes[0]), dtype), steps
    if layout == "dense_stack":
        rows = int(rng.integers(1, 6)) if n == 1 else size
        jacobians: Any = rng.random((n, *own, rows, size), dtype)
    elif layout == "csr_chain":
        where = mask(rng, size, size)
        data = rng.random((n, *own, where.nnz), dtype)
        jacobians = CSRChain(data, where.indices, where.indptr, (size, size))
    else:
        middle, period = int(rng.integers(1, 6)), int(layout[-1])
        sizes = [size, *[middle] * (period - 1), size]
        patterns = [
            of_mask(rng.random(shape) < 0.6) if rng.random() < 0.7 else Pattern.dense(shape)
            for shape in zip(sizes[1:], sizes[:-1], strict=True)
        ]
        counts = max(n // period, 1)
        shapes = [(counts, *own), *[[(counts, *leading), ()][rng.integers(2)] for _ in patterns]]
        jacobians = PeriodicChain(
            [
                rng.random((*shape, pattern.nnz), rng.choice([np.float32, np.float64]))
                for shape, pattern in zip(shapes, patterns, strict=False)
            ],
            patterns,
        )
    return rng.random((*leading, size), dtype), jacobians


LAYOUTS = ["list", "csr_chain", "dense_stack", "periodic 1", "periodic 2", "periodic 3"]


def assert_same_file(result: Path, expected: Path, n: int) -> None:
    """Equal members, headers and all, and equal values but for rounding."""
    with zipfile.ZipFile(result) as one, zipfile.ZipFile(expected) as other:
        members, wanted = one.infolist(), other.infolist()
        for a, b in zip(members, wanted, strict=True):
            assert (a.filename, a.file_size, a.compress_type) == (
                b.filename, b.file_size, b.compress_type,
            )  # fmt: skip
            assert one.read(a)[:64] == other.read(b)[:64]
        assert one.testzip() is None
    with np.load(result) as one, np.load(expected) as other:
        assert list(one) == list(other)
        for key in one:
            assert one[key].dtype == other[key].dtype
            assert one[key].flags.c_contiguous
            # Each step rounds sums of up to five products.
            bound = 2 * 6 * (n + 1) * np.finfo(one[key].dtype).eps
            np.testing.assert_allclose(one[key], other[key], rtol=bound, atol=0)


class Case(NamedTuple):
    """A chain, and files of its gradients: of the ranks, and of one process, with what it said."""

    chain: Path
    out: Path
    plain: Path
    n: int
    said: str


class Launch(NamedTuple):
    """Commands on some ranks."""

    size: int
    cases: list[Case]
    ended: mpi_launch.Ended


@pytest.fixture(scope="module", params=slow(1, 3, 4))
def launch(request: Any, tmp_path_factory: Any) -> Launch:
    """Chains of all layouts, with the scan of each."""
    size, folder = request.param, tmp_path_factory.mktemp("chains")
    longer = 3 if size == 3 else 1
    rng = np.random.default_rng(size)
    commands, cases = [], []
    schedules = ["auto", "vectors", "products"]
    for layout in LAYOUTS:
        for n in [0, 1, *rng.integers(2, 20, longer).tolist()]:
            for inclusive in (False, True):
                k = len(cases)
                batch = [None, 3, None, 1, 0 if layout[-1] not in "23" else 2][k % 5]
                file, plain, out = (folder / f"{name}{k}.npz" for name in ("chain", "p", "o"))
                grad, jacobians = random_chain(rng, layout, n, batch)
                sparsescan.save_chain(file, grad, jacobians)
                if k % 4 == 1:
                    with np.load(file) as arrays:
                        contents = dict(arrays)
                    np.savez_compressed(file, **contents)
                options = ["--inclusive"] * inclusive
                said = StringIO()
                with redirect_stdout(said):
                    assert main(["scan", str(file), "-o", str(plain), *options]) == 0
                options += ["--schedule", schedules[k % 3]]
                how = "small blocks" if k % 2 else None
                commands.append(command(["scan", file, "-o", out, *options], how))
                cases.append(Case(file, out, plain, len(jacobians), said.getvalue()))
    ended = run_all(size, folder, commands)
    assert_codes(ended, folder, size, [0] * len(commands))
    return Launch(size, cases, ended)


def test_the_file_is_that_of_the_plain_command(launch: Launch) -> None:
    lines = [line for line in launch.ended.output.splitlines() if "gradients of" in line]
    for case, line in zip(launch.cases, lines, strict=True):
        assert_same_file(case.out, case.plain, case.n)
        start = case.said.partition(", in ")[0].replace(str(case.plain), str(case.out))
        ranks = "1 rank" if launch.size == 1 else f"{launch.size} ranks"
        ending = rf", in [\d.e-]+ s on {ranks}, by (vectors|products)"
        assert re.fullmatch(re.escape(start) + ending, line), line
    assert launch.size < 3 or "by products" in launch.ended.output


@pytest.mark.slow
def test_a_rank_takes_memory_for_its_part(tmp_path: Path) -> None:
    """No rank has more than its share of 8 MB of Jacobians, and as much of gradients."""
    n, size = 64, 1 << 14
    pattern, ranks = Pattern.diagonal(size), 4
    data = np.ones((n, size))
    chains = {
        "stack": CSRChain(data, pattern.indices, pattern.indptr, (size, size)),
        "list": [sp.csr_array((row, pattern.indices, pattern.indptr)) for row in data],
        "periodic": PeriodicChain([data[::2], data[1::2]], [pattern] * 2),
    }
    commands = []
    for name, jacobians in chains.items():
        file = tmp_path / f"{name}.npz"
        sparsescan.save_chain(file, np.ones(size), jacobians)
        options = ["--schedule", "vectors", "--inclusive"]
        commands.append(command(["scan", file, "-o", tmp_path / "out.npz", *options], "peak"))
    ended = run_all(ranks, tmp_path, commands)
    assert_codes(ended, tmp_path, ranks, [0] * len(chains))
    content = json.loads((tmp_path / "ended.json").read_text())
    peaks = [peak for ranks_of_one in content for _, peak in ranks_of_one]
    # Jacobians and gradients, and a few vectors.
    assert max(peaks) < 2 * data.nbytes / ranks + 12 * data[0].nbytes


# ---------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_wrong_is_said_once_on_all_ranks(tmp_path: Path) -> None:
    good, out = tmp_path / "chain.npz", tmp_path / "out.npz"
    sparsescan.save_chain(good, np.ones(3), np.ones((30, 3, 3)))
    contents = good.read_bytes()
    text, cut, flipped = (tmp_path / f"{name}.npz" for name in ("t", "c", "f"))
    text.write_text("no chain")
    cut.write_bytes(contents[:-100])
    changed = bytearray(contents)
    changed[contents.index(np.ones(9).tobytes()) + 15 * 72 + 4] ^= 1  # on a rank in the middle
    flipped.write_bytes(changed)
    wrong: list[tuple[list[object], list[str]]] = [
        ([tmp_path / "no.npz", "-o", out], ["no.npz: No such file or directory; give a path"]),
        ([tmp_path, "-o", out], [f"{tmp_path}: Is a directory"]),
        ([text, "-o", out], ["t.npz is no .npz file", "written by sparsescan.save_chain"]),
        ([cut, "-o", out], ["c.npz is no .npz file", "written by sparsescan.save_chain"]),
        ([flipped, "-o", out], ["f.npz is no .npz file", "CRC-32 for file 'values_0_0.npy'"]),
        ([good, "-o", tmp_path], [f"{tmp_path}: Is a directory"]),
        ([good, "-o", tmp_path / "no" / "o"], ["No such file or directory"]),
        ([good, "-o", "/dev/full"], ["/dev/full: No space left on device"]),
        ([good], ["--output", "sparsescan scan --help"]),
        ([good, "-o", out, "--schedule", "linear"], ["'linear'", "auto, vectors or products"]),
        ([good, "-o", out, "--device", "gpu"], ["device is 'gpu'; expected None, 'cpu' or 'cuda'"]),
    ]
    commands = [command(["scan", *argv], "small blocks") for argv, _ in wrong]
    others: list[tuple[dict[str, Any], list[str]]] = [
        (command(["calibrate"], "no cache"), ["network.json: Not a directory; give a path"]),
    ]
    commands += [each for each, _ in others]
    right = [command(["scan", good, "-o", out]), command(["calibrate"])]
    ended = run_all(3, tmp_path, [*commands, *right])
    assert_codes(ended, tmp_path, 3, [2] * len(commands) + [0, 0])
    lines = [line for line in ended.output.splitlines() if line.startswith("sparsescan: ")]
    for (_, words), line in zip([*wrong, *others], lines, strict=True):
        for word in words:
            assert word in line
    with np.load(out) as stored:
        assert stored["gradients"].shape == (30, 3)
    kept = tmp_path / "cache" / "sparsescan" / "network.json"
    assert f"kept in {kept}" in ended.output
    assert json.loads(kept.read_text())["latency"] > 0


@pytest.mark.parametrize("name", ["scan", *slow("calibrate", "alone")])
def test_what_one_rank_alone_meets_ends_all(name: str, tmp_path: Path) -> None:
    """A bug, or an error that others do not meet."""
    file = tmp_path / "chain.npz"
    sparsescan.save_chain(file, np.ones(3), np.ones((30, 3, 3)))
    scan = command(["scan", file, "-o", tmp_path / "out.npz"], "bug")
    commands = {
        "scan": scan,
        "calibrate": command(["calibrate"], "bug"),
        "alone": scan | {"how": "alone"},
    }
    ended = run_all(2, tmp_path, [commands[name]])
    assert ended.code != 0
    assert "not done after" not in ended.output
    what = "directory: 'nowhere.npz'" if name == "alone" else "ValueError: a bug"
    assert ended.output.count(what) == 1, ended.output
    assert not (tmp_path / "out.npz").exists()


@pytest.mark.slow
def test_the_command_as_it_is_typed(tmp_path: Path) -> None:
    """Without ``-m mpi4py``: the exit code, and one line, whoever ends first."""
    file, out = tmp_path / "chain.npz", tmp_path / "out.npz"
    sparsescan.save_chain(file, np.ones(3), np.ones((30, 3, 3)))
    arguments = ["-m", "sparsescan", "scan", file, "-o", out, "--mpi"]
    ended = mpi_launch.run(2, *arguments)
    assert ended.code == 0, ended.output
    assert ended.output.count("\n") == 1
    assert f"{out}: 30 gradients of float64, in " in ended.output
    arguments[3] = tmp_path / "no.npz"
    ended = mpi_launch.run(2, *arguments)
    assert ended.code == 2, ended.output
    assert ended.output.count("sparsescan: ") == 1
    assert "not done after" not in ended.output


@pytest.mark.slow
def test_without_mpiexec_there_is_one_rank(tmp_path: Path) -> None:
    file, out = tmp_path / "chain.npz", tmp_path / "out.npz"
    sparsescan.save_chain(file, np.ones(3), np.ones((30, 3, 3)))
    ended = subprocess.run(
        [sys.executable, "-m", "sparsescan", "scan", file, "-o", out, "--mpi"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith(" s on 1 rank, by vectors\n")
    with np.load(out) as stored:
        assert stored["gradients"].shape == (30, 3)
