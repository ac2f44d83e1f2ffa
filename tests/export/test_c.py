"""Models as C files: compiled with sanitizers, beside the steps of NumPy's cells in float64."""

from __future__ import annotations

import inspect
import itertools
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from some_cells import SCRN, ByHeads, Driven, Normalised, Tied

from sparsescan import export, jacobians
from sparsescan.errors import InputError, InputTypeError
from sparsescan.graph.functions import sigmoid, tanh
from sparsescan.graph.operations import OPERATIONS
from sparsescan.graph.render.c import functions_for
from sparsescan.recurrent import GRU, LSTM, RNN, Cell, GRUCell, Recurrent, catalogue
from sparsescan.recurrent.definition import (
    Given,
    Hidden,
    Initial,
    Input,
    Mask,
    declared,
    further_of,
    sizes_of,
)
from sparsescan.recurrent.further import of_network

Array = np.ndarray[Any, Any]
CLEAN = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-Wpedantic"]
SANITIZED = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# Compilers, their options, and what runs the programs.
COMPILERS: dict[str, tuple[list[str], list[str]]] = {
    "gcc": (SANITIZED, []),
    "clang": (SANITIZED, []),
    "aarch64-linux-gnu-gcc": (["-O2", "-static"], ["qemu-aarch64"]),
}
EACH = [
    pytest.param(name, marks=[pytest.mark.slow] * (name != "gcc"), id=name) for name in COMPILERS
]
LENGTHS = 0, 1, 7
# Runs a model on sequences, whole, in two parts and step by step, which have to return equal bits.
DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define CHECK(is_right) \
    do { if (!(is_right)) { printf("line %d\n", __LINE__); exit(1); } } while (0)
#define RUN_STEPS(name, state) \
    name##_init(state); \
    for (t = 0; t < steps; t++) { name##_step(state, x + t * width, again + t * wide); } \
    CHECK(memcmp(y, again, steps * wide * sizeof *y) == 0); \
    name##_init(state); \
    name##_run(state, steps / 2, x, again); \
    name##_run(state, steps - steps / 2, x + steps / 2 * width, again + steps / 2 * wide); \
    CHECK(memcmp(y, again, steps * wide * sizeof *y) == 0)
#define BEGIN(name, upper, real) \
    static void try_##name(FILE *in, FILE *out, size_t steps) \
    { \
        size_t t, width = upper##_BATCH * upper##_INPUTS, wide = upper##_BATCH * upper##_OUTPUTS; \
        real *x = malloc((steps * width + 1) * sizeof *x); \
        real *y = malloc((steps * wide + 1) * sizeof *y); \
        real *again = malloc((steps * wide + 1) * sizeof *y); \
        name##_state *state = malloc(sizeof *state); \
        CHECK(fread(x, sizeof *x, steps * width, in) == steps * width); \
        memset(y, 77, steps * wide * sizeof *y); \
        name##_init(state);
#define END \
        CHECK(fwrite(y, sizeof *y, steps * wide, out) == steps * wide); \
        free(x), free(y), free(again), free(state); \
        (void)t; \
    }
#define ONE_WAY(name, upper, real) \
    BEGIN(name, upper, real) name##_run(state, steps, x, y); RUN_STEPS(name, state); END
#define BOTH_WAYS(name, upper, real) \
    BEGIN(name, upper, real) \
    real *work = malloc(steps * upper##_WORK * sizeof *x + 1); \
    name##_run(state, steps, x, y, work); \
    free(work); \
    END
"""


class Case(NamedTuple):
    """A model, its files, and a function that computes its outputs in float64."""

    name: str
    files: Any
    batch: int
    dtype: Any
    widths: tuple[int, int]
    expected: Callable[[Array], Array]


def random_network(cell: type[Cell], rng: Any, *sizes: Any, **options: Any) -> Recurrent:
    """Return a network with random parameters in float64."""
    net = Recurrent(cell, *sizes, dtype=np.float64, rng=rng, **options)
    for name, array in net.params.items():
        setattr(net, name, array + rng.normal(0, 0.1, array.shape))
    return net


def plain(network: Recurrent, x: Array) -> Array:
    """Return the outputs of a network, step by step in NumPy.

    What a call gives to steps is behind the inputs; masks are their expectations.
    """
    units, place = network.cells[0][0].hidden_size, network.input_size
    given, further = x[..., :place].astype(np.float64), iter(of_network(network))
    for cells in network.cells:
        outputs = []
        for back, cell in enumerate(cells):
            columns = [given]
            for each in itertools.islice(further, len(further_of(type(cell)))):
                if isinstance(each.declared, Mask):
                    expectation = each.declared.values(each.p)[1]
                    columns.append(np.full((*x.shape[:2], units), expectation))
                else:
                    columns.append(x[..., place : place + units].astype(np.float64))
                    place += units
            inputs = np.concatenate(columns, -1)
            state = np.zeros((x.shape[1], cell.state_size))
            if isinstance(cell, Begun):
                state[:, cell.hidden_size :] = cell.params["begin"]
            size, *_ = sizes_of(type(cell), cell.options, cell.hidden_size)
            found = np.empty((*x.shape[:2], size))
            for t in reversed(range(len(x))) if back else range(len(x)):
                state = cell.forward(inputs[t], state)
                found[t] = state[:, :size]
            outputs.append(found)
        given = np.concatenate(outputs, -1)
    return given


class Begun(Cell):
    """Initial states that are parameters, of one of two states."""

    weight_ih = Input()
    weight_hh = Hidden()
    begin = Initial("c")

    def step(self, x: Any, h: Any, c: Any) -> Any:
        c = tanh(self.weight_ih(x) + self.weight_hh(h)) - 0.5 * c
        return sigmoid(c), c


class Mixed(Cell):
    """One vector is multiplied by a whole matrix, and by one of few columns."""

    weight_ih = Input()
    weight_hh = Hidden("a", bias=False)
    few = Hidden("a", cols=1)

    def step(self, x: Any, h: Any) -> Any:
        return sigmoid(self.few.a(h) + self.weight_ih(x)) * tanh(self.weight_hh.a(h))


class Bare(Cell):
    """A step without parameters, which reads an input that is given."""

    drive = Given()

    def step(self, x: Any, h: Any) -> Any:
        return tanh(x - 0.5 * h * self.drive)


class Folder:
    """Models that are compiled into one program."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cases: list[Case] = []

    def add(
        self, model: Any, inputs: int, outputs: int, expected: Any = None, **options: Any
    ) -> None:
        """Write a model."""
        name = f"model{len(self.cases)}"
        files = export.c(model, self.path / f"{name}.c", **options)
        dtype = np.dtype(options.get("dtype", np.float64))
        expected = expected or (lambda x: plain(model, x))
        batch = options.get("batch", 1)
        self.cases.append(Case(name, files, batch, dtype, (inputs, outputs), expected))

    def check(self, compiler: str, *more: str) -> None:
        """Raise unless each model returns what is expected, for sequences of some lengths."""
        for case, results in self._run(compiler, more):
            for found, expected in results:
                if len(found) == 0:
                    continue
                assert found.shape == expected.shape
                scale = np.maximum(np.abs(expected).max(initial=0), 1)
                most = 400 * np.finfo(case.dtype).eps * scale
                np.testing.assert_allclose(found, expected, rtol=0, atol=most, err_msg=case.name)

    def _run(
        self, compiler: str, more: Sequence[str]
    ) -> list[tuple[Case, list[tuple[Array, Array]]]]:
        rng = np.random.default_rng(1)
        flags, runner = COMPILERS[compiler]
        if not all(map(shutil.which, [compiler, *runner])):
            pytest.skip(f"{compiler} is not here")
        includes, calls, tries = "", "", ""
        given: list[list[Array]] = []
        for case in self.cases:
            header = case.files.header.read_text()
            way = "BOTH_WAYS" if "_WORK" in header else "ONE_WAY"
            real = {4: "float", 8: "double"}[case.dtype.itemsize]
            includes += f'#include "{case.name}.h"\n'
            tries += f"{way}({case.name}, {case.name.upper()}, {real})\n"
            calls += "".join(f"    try_{case.name}(in, out, {steps});\n" for steps in LENGTHS)
            shape = case.batch, case.widths[0]
            given.append([rng.normal(size=(t, *shape)).astype(case.dtype) for t in LENGTHS])
        main = 'int main(void)\n{\n    FILE *in = fopen("in", "rb"), *out = fopen("out", "wb");\n'
        text = f"{DRIVER}{includes}{tries}{main}{calls}    return fclose(in) + fclose(out);\n}}\n"
        (self.path / "driver.c").write_text(text)
        (self.path / "in").write_bytes(b"".join(x.tobytes() for own in given for x in own))
        sources = [f"{case.name}.c" for case in self.cases]
        command = [compiler, *CLEAN, *(more or flags), "driver.c", *sources, "-lm", "-o", "program"]
        for words in (command, [*runner, "./program"]):
            done = subprocess.run(words, cwd=self.path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        content, found = (self.path / "out").read_bytes(), []
        for case, own in zip(self.cases, given, strict=True):
            results = []
            for x in own:
                whole = len(x), case.batch, case.widths[1]
                size = int(np.prod(whole)) * case.dtype.itemsize
                y, content = np.frombuffer(content[:size], case.dtype), content[size:]
                results.append((y.reshape(whole), case.expected(x) if len(x) else x[..., :0]))
            found.append((case, results))
        assert not content
        return found


def options_of(cell: type[Cell]) -> dict[str, Any]:
    """Return options that make a cell's matrices and states smaller, if it has some."""
    names = {
        vars(size)["_name"]
        for each in declared(cell).values()
        if isinstance(each, Hidden)
        for size in each._sizes.values()
        if not isinstance(size, int)
    }
    return dict.fromkeys(names, 2)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    rng, folder = np.random.default_rng(0), Folder(tmp_path_factory.mktemp("cells"))
    names = [name for name in catalogue.__all__ if inspect.isclass(getattr(catalogue, name))]
    for place, name in enumerate(names):
        cell, units = getattr(catalogue, name), 6
        options = options_of(cell) | {"bias": place % 3 > 0}
        try:
            net = random_network(cell, rng, 3, units, **options)
        except InputError:  # the cell reads the input of each unit
            net = random_network(cell, rng, units, units, **options)
        kind = "series" if place % 2 else "libm"
        outputs, *_ = sizes_of(cell, net.cells[0][0].options, units)
        folder.add(net, net.input_size, outputs, batch=1 + place % 2, functions=kind)
    for cell in (Tied, SCRN, Normalised, ByHeads, Begun, Mixed):
        net = random_network(cell, rng, 5, 10, num_layers=2)
        folder.add(net, 5, 10)
    return folder


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    rng, folder = np.random.default_rng(2), Folder(tmp_path_factory.mktemp("networks"))
    for dtype, kind in ((np.float32, "libm"), (np.float32, "series"), (np.float64, "series")):
        net = random_network(catalogue.MGU, rng, 1, 17, num_layers=2, bidirectional=True)
        folder.add(net, 1, 34, batch=2, functions=kind, dtype=dtype)
        net = random_network(catalogue.PeepholeLSTM, rng, 1, 41, num_layers=2)
        folder.add(net, 1, 41, functions=kind, dtype=dtype)
    net = random_network(
        catalogue.ProjectedLSTM, rng, 3, 7, num_layers=2, bidirectional=True, proj_size=3
    )
    folder.add(net, 3, 6)
    return folder


@pytest.mark.parametrize("compiler", EACH)
def test_each_cell_computes_what_it_does_in_numpy(compiler: str, cells: Folder) -> None:
    cells.check(compiler)


@pytest.mark.parametrize("compiler", EACH)
def test_networks_compute_what_they_do_in_numpy(compiler: str, networks: Folder) -> None:
    networks.check(compiler)
    if compiler == "gcc":
        networks.check(compiler, "-O3", "-march=native")


def test_modules_of_pytorch_with_layers_behind_them(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch import nn

    from sparsescan.torch import convert, module

    torch.manual_seed(0)
    functions = [
        *(nn.ELU(0.7), nn.Hardsigmoid(), nn.Hardtanh(-0.3, 0.4), nn.LeakyReLU(0.2), nn.ReLU()),
        *(nn.SiLU(), nn.Sigmoid(), nn.Softplus(2.0, 0.3), nn.Softsign(), nn.Tanh()),
        *(nn.Softmax(-1), nn.LogSoftmax(-1), nn.LayerNorm(5), nn.LayerNorm(5, bias=False)),
    ]
    models = [nn.Sequential(nn.GRU(2, 7), nn.Linear(7, 5), each) for each in functions]
    models += [
        module(catalogue.ProjectedLSTM)(3, 8, 2, proj_size=4),
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LSTM(4, 6, 2), nn.Dropout(), nn.Linear(6, 2)),
        nn.Sequential(nn.RNN(3, 6, nonlinearity="relu", bias=False), nn.Tanh()),
        nn.Sequential(nn.LSTM(3, 6, 2, proj_size=2), nn.Linear(2, 2), nn.LSTM(2, 4, proj_size=3)),
        nn.Sequential(nn.GRU(3, 6, 2, bidirectional=True), nn.Linear(12, 3), nn.Softmax(-1)),
        nn.Sequential(module(catalogue.MGU)(3, 4), nn.Sequential(nn.LSTM(4, 2), nn.Identity())),
    ]
    torch.nn.utils.prune.random_unstructured(models[-5][2], "weight_hh_l1", 0.5)
    convert(models[-3])
    folder = Folder(tmp_path)
    for place, model in enumerate(models):
        model.double().eval()
        for param in model.parameters():
            param.data += 0.1 * torch.randn_like(param)

        def expected(x: Array, model: Any = model) -> Array:
            given = torch.tensor(x)
            for each in model.modules():
                if not isinstance(each, nn.Sequential):
                    given = each(given)
                    given = given[0] if isinstance(given, tuple) else given
            return np.asarray(given.detach())

        read = export.parts.read(model)
        folder.add(model, read.inputs, read.parts[-1].outputs, expected, batch=1 + place % 2)
    folder.check("gcc")


def test_each_operation_has_a_function_in_c() -> None:
    for name, operation in OPERATIONS.items():
        text = operation.c.format("a", "b", "c")
        called = set(re.findall(r"(real_\w+)\(", text))
        defined = "\n".join(functions_for(text, np.dtype(np.float32), False))
        assert all(f"real {each}(" in defined for each in called), name
        assert text


def test_modules_whose_calls_do_more_are_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Doubled(torch.nn.LSTM):
        def forward(self, *given: Any) -> Any:
            return super().forward(*given)[0] * 2

    hooked = torch.nn.Sequential(torch.nn.GRU(1, 2), torch.nn.Linear(2, 1))
    hooked[1].register_forward_hook(lambda *_: None)
    for model, error, message in (
        (Doubled(1, 2), InputTypeError, "Doubled.*has a forward or hooks of its own"),
        (hooked, InputTypeError, "Linear.*has a forward or hooks of its own"),
        ([GRU(1, 2), torch.nn.Softmax(0)], InputError, "dim of Softmax is 0; expected -1"),
        ([GRU(1, 2), torch.nn.LayerNorm(3)], InputError, "is behind 2 outputs; expected"),
        ([GRU(1, 2), torch.nn.Conv1d(2, 2, 1)], InputTypeError, "network has Conv1d"),
        (torch.nn.Linear(1, 2), InputError, "expected a recurrent layer in it"),
        (torch.nn.Sequential(torch.nn.Tanh(), torch.nn.GRU(1, 2)), InputError, "a layer before it"),
    ):
        with pytest.raises(error, match=message):
            export.c(model, tmp_path / "model.c")
    assert not list(tmp_path.iterdir())


def test_layers_of_numpy_and_inputs_that_are_given(tmp_path: Path) -> None:
    rng, folder = np.random.default_rng(3), Folder(tmp_path)
    layers = jacobians.Sequential(
        [
            jacobians.Linear(6, 4, weight_mask=rng.random((4, 6)) < 0.5, dtype=np.float64, rng=rng),
            jacobians.LeakyReLU(0.3, input_shape=(4,)),
            jacobians.Softmax(-1, input_shape=(4,)),
        ]
    )
    gru = random_network(GRUCell, rng, 2, 6)

    def head(x: Array) -> Array:
        return np.asarray(layers.forward(plain(gru, x).reshape(-1, 6))).reshape(*x.shape[:2], 4)

    folder.add([gru, layers], 2, 4, head, batch=3)
    driven = random_network(Driven, rng, 2, 5)
    folder.add(driven, 2 + 2 * 5, 5)
    folder.add(driven.cells[0][0], 2 + 2 * 5, 5, lambda x: plain(driven, x))
    for directions in (1, 2):
        options = {"num_layers": 3, "bidirectional": directions == 2}
        deep = random_network(Driven, rng, 2, 5, **options)
        folder.add(deep, 2 + 3 * directions * 2 * 5, 5 * directions, batch=2)
    first = jacobians.Linear(3, 2, dtype=np.float64, rng=rng)

    def behind(x: Array) -> Array:
        own = np.asarray(first.forward(x[..., :3].reshape(-1, 3))).reshape(*x.shape[:2], 2)
        return plain(driven, np.concatenate([own, x[..., 3:]], -1))

    folder.add([first, driven], 3 + 2 * 5, 5, behind)
    folder.add(random_network(Bare, rng, 4, 4), 4 + 4, 4, dtype=np.float64)
    folder.check("gcc")


def test_the_program_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    page = Path(__file__).parents[2] / "docs" / "how" / "c.md"
    blocks = dict(re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.DOTALL | re.M))
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    exec(compile(blocks["python"], str(page), "exec"), space)
    Path("main.c").write_text(blocks["c"])
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not here")
    command = re.search(r"`cc (-std.*?)`", page.read_text())
    assert command
    subprocess.run(["gcc", *CLEAN, *command[1].split()], check=True)
    x = torch.randn(20, 1)
    text = " ".join(f"{float(each):.9g}" for each in x)
    done = subprocess.run(["./a.out"], input=text, capture_output=True, text=True, check=True)
    lstm, linear = space["model"]
    expected = linear(lstm(x)[0]).detach().numpy()[:, 0]
    np.testing.assert_allclose(np.array(done.stdout.split(), float), expected, atol=2e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_series_have_the_error_that_is_stated(dtype: Any, tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not here")
    names = "exp", "expm1", "tanh", "sigmoid"
    calls = "".join(f"        y[{k}] = real_{name}(x);\n" for k, name in enumerate(names))
    real, suffix = ("float", "##f") if dtype == np.float32 else ("double", "")
    functions = "\n".join(functions_for(calls, np.dtype(dtype), True))
    text = f"""
#include <math.h>
#include <stdio.h>
typedef {real} real;
#define REAL(name) name{suffix}
{functions}
int main(void)
{{
    real x, y[4];
    while (fread(&x, sizeof x, 1, stdin)) {{
{calls}
        fwrite(y, sizeof *y, 4, stdout);
    }}
    return 0;
}}
"""
    (tmp_path / "main.c").write_text(text)
    command = ["gcc", *CLEAN, "-O3", "-march=native", "main.c", "-lm"]
    subprocess.run(command, cwd=tmp_path, check=True)
    rng, most = np.random.default_rng(0), np.log(np.finfo(dtype).max)
    x = np.concatenate(
        [
            rng.uniform(-1.1 * most, 1.1 * most, 50_000),
            np.exp(rng.uniform(-most, 2, 50_000)) * rng.choice([-1, 1], 50_000),
            [0, -0.0, np.inf, -np.inf, np.nan],
        ]
    ).astype(dtype)
    done = subprocess.run([tmp_path / "a.out"], input=x.tobytes(), capture_output=True, check=True)
    found = np.frombuffer(done.stdout, dtype).reshape(-1, 4).T
    a = x.astype(np.longdouble)
    with np.errstate(all="ignore"):
        exact = np.exp(a), np.expm1(a), np.tanh(a), 1 / (1 + np.exp(-a))
        every = [each.astype(dtype) for each in exact]
    for name, y, expected, rounded in zip(names, found, exact, every, strict=True):
        unit = np.spacing(np.abs(rounded))
        is_normal = np.isfinite(rounded) & (np.abs(rounded) >= 2 * np.finfo(dtype).tiny)
        error = np.abs(y[is_normal] - expected[is_normal]) / unit[is_normal]
        assert error.max() < 4, name
        is_small = np.isfinite(rounded) & ~is_normal
        assert np.all(np.abs(y[is_small] - rounded[is_small]) <= 2 * np.finfo(dtype).tiny)
        np.testing.assert_array_equal(y[~np.isfinite(rounded)], rounded[~np.isfinite(rounded)])


def test_a_program_in_cpp_calls_a_model(tmp_path: Path) -> None:
    if not all(map(shutil.which, ["gcc", "g++"])):
        pytest.skip("there are no compilers here")
    export.c(LSTM(2, 3, rng=0), tmp_path / "new.c", name="class")
    text = """
#include "new.h"
int main()
{
    class_state state;
    const float x[CLASS_BATCH * CLASS_INPUTS] = {1, 2};
    float y[CLASS_OUTPUTS];
    class_init(&state);
    class_step(&state, x, y);
    return y[0] == state.l0[0][0] && y[0] != 0 ? 0 : 1;
}
"""
    (tmp_path / "main.cpp").write_text(text)
    for command in (
        ["gcc", "-std=c99", "-c", "new.c"],
        ["g++", "-Wall", "-Wextra", "-Werror", "main.cpp", "new.o", "-lm", "-o", "program"],
        ["./program"],
    ):
        subprocess.run(command, cwd=tmp_path, check=True)


def test_files_say_what_memory_is_needed(tmp_path: Path) -> None:
    files = export.c(LSTM(1, 40, rng=0), tmp_path / "model.c", batch=2, dtype="float64")
    constants = 8 * (160 * (1 + 1 + 40))
    assert files.state_bytes == 2 * 2 * 40 * 8
    assert files.constant_bytes == constants
    assert files.stack_bytes == 160 * 8
    assert f"states 1280, constants {constants}, arrays on the stack 1280" in (
        files.header.read_text()
    )
    assert str(files).endswith("model.c: bytes of states 1,280, constants 53,760, stack 1,280")


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"path": "model.txt"}, InputError, "path is 'model.txt'; expected a name that ends in .c"),
        ({"path": 3}, InputTypeError, "path is 3; expected that of a file"),
        ({"path": "my-model.c"}, InputError, "name is 'my-model'; expected letters, digits"),
        ({"name": "größe"}, InputError, "name is 'größe'; expected letters, digits"),
        ({"name": 3}, InputError, "name is 3; expected letters"),
        ({"batch": 0}, InputError, "batch is 0; expected at least 1"),
        ({"dtype": "float16"}, InputTypeError, "dtype is 'float16'; expected float32 or float64"),
        ({"functions": "fast"}, InputError, "functions is 'fast'; expected 'libm' or 'series'"),
        ({"network": 3}, InputTypeError, "network has 3; expected a cell, a network of cells"),
        ({"network": []}, InputError, "network is \\[\\]; expected at least one layer"),
        ({"network": [GRU(1, 2), RNN(3, 2)]}, InputError, "behind 2 outputs; expected 3"),
    ],
)
def test_wrong_arguments_are_named(
    changed: dict[str, Any], error: Any, message: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"network": GRU(1, 2), "path": "model.c"} | changed
    if isinstance(given["path"], str):
        given["path"] = str(tmp_path / given["path"])
        message = message.replace("path is '", "path is '.*")
    with pytest.raises(error, match=message):
        export.c(given.pop("network"), given.pop("path"), **given)
    assert not list(tmp_path.iterdir())
