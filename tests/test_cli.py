"""The command line: what it prints and writes, and one line for whatever is wrong."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse as sp

import sparsescan
from sparsescan.cli.main import main
from sparsescan.examples import demo


@pytest.fixture
def listed(tmp_path):
    """Write a file with a list of Jacobians of several shapes."""
    rng = np.random.default_rng(0)
    jacobians = [
        sp.csr_array(rng.standard_normal((5, 4))),
        sp.csr_array(np.eye(5)),
        rng.standard_normal((3, 5)),
        rng.standard_normal((2, 3)),
    ]
    path = tmp_path / "list.npz"
    sparsescan.save_chain(path, rng.standard_normal(4), jacobians)
    return path


@pytest.fixture
def stacked(tmp_path):
    """Write a file with one dense array, float32, in batches of two."""
    rng = np.random.default_rng(1)
    path = tmp_path / "stack.npz"
    grad = rng.standard_normal((2, 3), np.float32)
    sparsescan.save_chain(path, grad, rng.standard_normal((9, 2, 3, 3), np.float32))
    return path


def test_info_names_versions_and_machine(capsys):
    assert main(["info"]) == 0
    rows = {line[:12].strip(): line[12:] for line in capsys.readouterr().out.splitlines()}
    assert rows["sparsescan"] == sparsescan.__version__
    assert rows["numpy"] == np.__version__
    assert int(rows["threads"].split()[0]) >= 1
    assert "usable" in rows["CPU"]
    assert rows["CUDA GPUs"]
    assert {"python", "numba", "scipy", "cupy", "numba-cuda", "Numba cache"} <= set(rows)


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "sparsescan", "info"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("sparsescan")


def test_plan_prints_the_plan(capsys, stacked):
    assert main(["plan", str(stacked), "--schedule", "chunked:3"]) == 0
    _, jacobians = sparsescan.load_chain(stacked)
    schedule = sparsescan.Schedule.chunked(9, 3)
    plan = sparsescan.plan(jacobians, schedule=schedule, batch=2, dtype="float32")
    assert capsys.readouterr().out == f"{plan}\n"


@pytest.mark.parametrize("schedule", ["auto", "linear", "blelloch", "truncated:1", "chunked:2"])
@pytest.mark.parametrize("inclusive", [False, True])
def test_scan_writes_the_gradients_of_a_list(capsys, listed, tmp_path, schedule, inclusive):
    output = tmp_path / "out"
    options = ["--schedule", schedule, *["--inclusive"] * inclusive]
    assert main(["scan", str(listed), "-o", str(output), *options]) == 0
    scan = sparsescan.inclusive_scan if inclusive else sparsescan.exclusive_scan
    expected = scan(*sparsescan.load_chain(listed))
    with np.load(output) as stored:
        assert list(stored) == [f"gradient_{k}" for k in range(4 + inclusive)]
        for k, gradient in enumerate(expected):
            np.testing.assert_allclose(stored[f"gradient_{k}"], gradient, rtol=1e-12, atol=1e-12)
    out = capsys.readouterr().out
    assert out.startswith(f"{output}: {4 + inclusive} gradients of float64, in ")
    assert out.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["scan", "--help"], ["demo", "--help"]])
def test_help_is_printed(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    out, err = capsys.readouterr()
    assert "usage: sparsescan" in out
    assert err == ""
    if "scan" in arguments:
        assert '"gradients"' in out
        assert '"gradient_0"' in out
        assert "with --mpi auto, vectors or products" in " ".join(out.split())


def assert_one_line(capsys, arguments, *words):
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sparsescan: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["COMMAND", "sparsescan --help"]),
        (["learn"], ["'learn'", "demo", "info", "plan", "scan"]),
        (["info", "more"], ["more"]),
        (["info", "--fast"], ["--fast"]),
        (["plan"], ["FILE.npz", "sparsescan plan --help"]),
        (["scan", "x.npz"], ["--output", "sparsescan scan --help"]),
        (["plan", "x.npz", "--schedule"], ["--schedule", "expected one argument"]),
        (["demo", "--batches", "many"], ["--batches", "'many'"]),
        (["demo", "--batches", "0"], ["batches is 0; expected at least 1"]),
        (["demo", "--hidden", "-1"], ["hidden is -1; expected at least 1"]),
        (["demo", "--batch", "0"], ["batch is 0; expected at least 1"]),
        (["demo", "--batch", "1438"], ["batch is 1438; expected at most 702"]),
        (["demo", "--seed", "-1"], ["seed is -1; expected at least 0"]),
        (["demo", "--output", "/no/such/folder/demo.png"], ["/no/such/folder/demo.png"]),
        (["demo", "--output", "."], [".: Is a directory"]),
    ],
)
def test_wrong_options_give_one_line(capsys, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert_one_line(capsys, arguments, *words)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("command", ["plan", "scan"])
def test_a_wrong_device_gives_one_line(capsys, tmp_path, stacked, command):
    more = ["-o", tmp_path / "out.npz"] if command == "scan" else []
    words = "device is 'abacus'; expected None, 'cpu' or 'cuda'"
    assert_one_line(capsys, [command, stacked, *more, "--device", "abacus"], words)


@pytest.mark.parametrize("command", ["plan", "scan"])
def test_a_wrong_file_gives_one_line(capsys, tmp_path, stacked, command):
    more = ["-o", tmp_path / "out.npz"] if command == "scan" else []
    missing, text, cut = tmp_path / "missing.npz", tmp_path / "text.npz", tmp_path / "cut.npz"
    text.write_text("no chain\n")
    cut.write_bytes(stacked.read_bytes()[:-100])
    assert_one_line(capsys, [command, missing, *more], str(missing), "No such file")
    assert_one_line(capsys, [command, tmp_path, *more], str(tmp_path), "Is a directory")
    for path in (text, cut):
        assert_one_line(capsys, [command, path, *more], str(path), "sparsescan.save_chain")
    assert not (tmp_path / "out.npz").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--schedule", "vectors"], "schedule is 'vectors'; expected 'auto', 'linear', 'blelloch'"),
        (["--mpi", "--schedule", "linear"], "'linear' is no schedule of --mpi; expected auto,"),
        (["--mpi"], "pip install 'sparsescan[mpi]'"),
    ],
)
def test_what_does_not_go_with_mpi_gives_one_line(
    capsys, monkeypatch, tmp_path, stacked, options, words
):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert_one_line(capsys, ["scan", stacked, "-o", tmp_path / "out.npz", *options], words)
    assert not (tmp_path / "out.npz").exists()


def test_an_unwritable_output_gives_one_line(capsys, tmp_path, stacked):
    assert_one_line(capsys, ["scan", stacked, "-o", tmp_path], str(tmp_path), "Is a directory")
    lost = tmp_path / "no" / "out.npz"
    assert_one_line(capsys, ["scan", stacked, "-o", lost], str(lost), "No such file")


def test_a_file_name_with_a_line_break_still_gives_one_line(capsys, tmp_path):
    assert_one_line(capsys, ["plan", tmp_path / "two\nlines.npz"], "lines.npz")


def test_missing_packages_give_one_line_that_names_the_extra(capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    hidden = {"matplotlib", "sklearn"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in hidden else find_spec(name)
    )
    words = ["matplotlib, scikit-learn;", "pip install 'sparsescan[demo]'"]
    assert_one_line(capsys, ["demo"], *words)


def test_a_picture_that_cannot_be_drawn_gives_one_line(capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    command = ["strategies", "lenet5", "--workers", 2, "--batch", 4, "--plot"]
    assert_one_line(capsys, [*command, tmp_path], f"{tmp_path}: Is a directory")
    assert_one_line(capsys, [*command, tmp_path / "no" / "a.png"], "No such file")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    words = "pip install 'sparsescan[plot]'"
    assert_one_line(capsys, [*command, tmp_path / "picture.png"], words)
    assert not os.listdir(tmp_path)


def test_a_picture_that_cannot_be_written_is_known_before_the_work(capsys, monkeypatch, stacked):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("sparsescan.cli.main.load_chain", None)
    command = ["strategies", stacked, "--workers", 2, "--batch", 4]
    bad = ["--plot", "/no/such/folder/a.png"]
    assert_one_line(capsys, [*command, *bad], "/no/such/folder/a.png: No such file")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--workers 0 --batch 4", "--workers is 0; expected at least 1"),
        ("--workers -2 --batch 4", "--workers is -2; expected at least 1"),
        ("--workers 2 --batch 0", "--batch is 0; expected at least 1"),
        ("--workers 2 --batch -1", "--batch is -1; expected at least 1"),
    ],
)
def test_wrong_options_of_strategies_give_one_line(capsys, options, words):
    assert_one_line(capsys, ["strategies", "lenet5", *options.split()], words)


def test_ctrl_c_ends_quietly(capsys, monkeypatch):
    def interrupt(**options):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupt)
    assert main(["demo"]) == 130
    assert capsys.readouterr() == ("", "")


def test_the_options_reach_the_demo(monkeypatch):
    seen = {}
    monkeypatch.setattr(demo, "run", lambda **options: seen.update(options))
    options = "--hidden 3 --batches 2 --batch 8 --output x.png --seed 5"
    assert main(["demo", *options.split()]) == 0
    assert seen == {
        "hidden": 3,
        "batches": 2,
        "batch": 8,
        "output": "x.png",
        "seed": 5,
    }


def test_export_writes_a_model(capsys, tmp_path):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.LSTM(1, 3), torch.nn.Linear(3, 1))
    torch.save(model, tmp_path / "model.pt")
    output = tmp_path / "net.c"
    options = ["--name", "amp", "--batch", "2", "--dtype", "float64", "--functions", "series"]
    assert main(["export", str(tmp_path / "model.pt"), str(output), *options]) == 0
    files = sparsescan.export.c(
        model, tmp_path / "again.c", name="amp", batch=2, dtype="float64", functions="series"
    )
    assert capsys.readouterr().out == f"{files}\n".replace("again", "net")
    assert output.read_text().replace("net.h", "again.h") == files.source.read_text()
    assert output.with_suffix(".h").read_text() == files.header.read_text()


def test_export_says_what_is_wrong_with_a_file(capsys, tmp_path):
    torch = pytest.importorskip("torch")
    torch.save(torch.nn.LSTM(1, 3).state_dict(), tmp_path / "dict.pt")
    (tmp_path / "text.pt").write_text("no model")
    torch.save(torch.nn.LSTM(1, 3), tmp_path / "model.pt")
    for name, output, words in (
        ("dict.pt", "net.c", ["dict.pt has a OrderedDict; expected a module"]),
        ("text.pt", "net.c", ["text.pt: ", "expected a file of torch.save(model, path)"]),
        ("none.pt", "net.c", ["none.pt: No such file"]),
        ("model.pt", "net.h", ["expected a name that ends in .c"]),
        ("model.pt", "no/net.c", ["No such file"]),
    ):
        assert_one_line(capsys, ["export", tmp_path / name, tmp_path / output], *words)
    assert not [*tmp_path.glob("net*")]
