"""Each operation, through each door, in each way of calling it, beside one plain formula.

``PYTHONPATH=tests/support python tests/conformance/test_conformance.py`` prints which of them run,
and which are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax_doubles import double as double
from problems import OPERATIONS, Wish
from sampling import long_run
from ways import DOORS, MEMBERS, Drawn, expected, tensors

from sparsescan import InputError
from sparsescan.execution import threads
from sparsescan.jax.ffi import programs
from sparsescan.ops import affine, attention, filters, selective
from sparsescan.recurrent import host_sizes, passes

# What a call has to have, in ways that ask for that.
FORMS = {
    "compiled": Wish(has_lengths=False),  # PyTorch compiles no call of a packed sequence
    "hessian": Wish(is_real=True, has_layers=False),  # JAX compiles for long
    "vmap of marks": Wish(has_lengths=True, has_resets=True, samples=3, steps=4),
    "lengths": Wish(has_lengths=True),
    "resets": Wish(has_resets=True),
    "masks": Wish(has_masks=True),
    "no samples": Wish(samples=0),
    "no steps": Wish(steps=0),
    "one step": Wish(steps=1),
    "threads": Wish(samples=40),
    "float32": Wish(),
}
WAYS = list(dict.fromkeys([*DOORS["JAX"], *FORMS]))
OF_NETWORKS = {"vmap of marks", "lengths", "resets", "masks"}

NARROW = {"float64": np.float32, "complex128": np.complex64}

# Calls that are refused: the error, and what it says.
ONCE = "differentiated"
REFUSED: dict[tuple[str, str, str], tuple[Any, str]] = {
    ("simulate", "PyTorch", "vmap"): (InputError, "under a transform of torch.func"),
    ("simulate", "PyTorch", "forward"): (InputError, "under a transform of torch.func"),
    ("simulate", "PyTorch", "second"): (RuntimeError, ONCE),
    ("simulate", "JAX", "forward"): (TypeError, "can't apply forward-mode"),
    ("simulate", "JAX", "second"): (InputError, ONCE),
    ("simulate", "PyTorch", "hessian"): (InputError, "under a transform of torch.func"),
    ("simulate", "JAX", "hessian"): (InputError, ONCE),
    **{
        ("simulate", door, "no samples"): (InputError, "expected 3 real numbers, or those of each")
        for door in DOORS
    },
}


def is_there(operation: str, door: str, way: str) -> bool:
    """Return whether there is such a call at all."""
    if way in OF_NETWORKS and operation != "recurrent":
        return False
    if door == "NumPy" and operation in ("lfilter", "sosfilt", "selective_scan"):
        return False  # SciPy has filters
    if (operation, door, way) == ("recurrent", "PyTorch", "no steps"):
        return False  # PyTorch's own modules refuse to run, and ours say the same
    if (operation, door, way) == ("simulate", "NumPy", "float32"):
        return False  # its results are of double precision
    return way in DOORS[door] or way not in DOORS["PyTorch"]


CELLS = [
    (operation, door, way)
    for operation in OPERATIONS
    for door in DOORS
    for way in WAYS
    if is_there(operation, door, way)
]


def table() -> str:
    """Return the table of all calls: that they run, are refused, or do not exist."""
    lines = ["| | " + " | ".join(WAYS) + " |", "| --- " * (1 + len(WAYS)) + "|"]
    for operation in OPERATIONS:
        for door in DOORS:
            marks = [
                "refused"
                if (operation, door, way) in REFUSED
                else "run"
                if is_there(operation, door, way)
                else "–"
                for way in WAYS
            ]
            lines.append(f"| {operation}, {door} | " + " | ".join(marks) + " |")
    return "\n".join(lines)


@pytest.fixture(autouse=True)
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():  # of PyTorch, about itself
        warnings.simplefilter("ignore")
        yield


def drawn(operation: str, door: str, way: str, seed: int) -> Drawn:
    """Draw a call, weights of its results, and a direction in its numbers."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    # PyTorch packs samples of at least one step, outside of maps.
    is_packed = door == "PyTorch"
    wish = FORMS.get(way, Wish())._replace(shortest=int(is_packed))
    problem = OPERATIONS[operation](rng, wish)

    def like(array: Any, *lead: int) -> Any:
        shape = (*lead, *np.shape(array))
        real = rng.standard_normal(shape)
        drawn = real + 1j * rng.standard_normal(shape) if np.iscomplexobj(array) else real
        return drawn.astype(np.asarray(array).dtype)

    results = problem.plain(*map(tensors, (problem.numbers, problem.flags)))
    if way == "float32":
        for name, each in problem.numbers.items():
            problem.numbers[name] = each.astype(NARROW[each.dtype.name])
    is_map = way in ("vmap", "vmap of marks")
    lead = (MEMBERS,) if is_map else ()
    weights = tuple(like(each.numpy(), *lead) for each in results)
    if way == "float32":
        weights = tuple(each.astype(NARROW[each.dtype.name]) for each in weights)
    along = {name: like(each) for name, each in problem.numbers.items()}
    mapped: dict[str, int] = {}
    if is_map:
        some = [name for name in problem.numbers if rng.random() < 0.6] or [*problem.numbers][:1]
        if way == "vmap of marks":  # and of samples: parameters make members of an ensemble
            some = [name for name in some if name in ("x", "state", "anew")]
            some += ["resets"] if is_packed else ["lengths", "resets"]
        mapped = {name: -int(rng.integers(2)) for name in some}
        for part in (problem.numbers, problem.flags):
            for name in mapped.keys() & part.keys():
                # No number is far from what it is, such as a first coefficient from 2.
                other = part[name][::-1] if part is problem.flags else 0.9 * part[name]
                part[name] = np.stack([part[name], other], mapped[name])
    return Drawn(problem, weights, along, mapped)


def arrays_of(found: dict[str, Any]) -> dict[tuple[str, Any], Any]:
    """Return all arrays that a door or the formula gives, by what they are and their names."""
    return {
        (what, name): np.asarray(
            each.detach().resolve_conj() if isinstance(each, torch.Tensor) else each
        )
        for what, part in found.items()
        for name, each in (part.items() if isinstance(part, dict) else enumerate(part))
    }


def agree(found: dict[str, Any], right: dict[str, Any], *, is_narrow: bool) -> None:
    """Check that all that a door gives is what the formula gives, but for rounding."""
    ours, theirs = arrays_of(found), arrays_of({what: right[what] for what in found})
    largest = max([1.0, *(np.max(np.abs(each), initial=0) for each in theirs.values())])
    for name, other in theirs.items():
        dtype = np.dtype(NARROW[other.dtype.name] if is_narrow else other.dtype)
        assert ours[name].shape == other.shape, name
        assert ours[name].dtype == dtype, name
        apart = np.max(np.abs(ours[name] - other), initial=0)
        assert apart <= (2e3 if is_narrow else 1e5) * np.finfo(dtype).eps * largest, name
    assert "results" not in found or len(found["results"]) == len(right["results"])


def cells_of(*doors: str) -> Any:
    """Return a mark that runs a test for all calls through some doors."""
    some = [cell for cell in CELLS if cell[1] in doors]
    return pytest.mark.parametrize(("operation", "door", "way"), some)


# Kernels for other sizes are compiled, and those for smaller examples would be, too.
@cells_of("NumPy", "PyTorch")
@settings(max_examples=long_run(12, 2), phases=[Phase.generate])
@given(seed=st.integers(0, 2**32 - 1))
def test_calls(operation: str, door: str, way: str, seed: int) -> None:
    check(operation, door, way, seed)


# JAX compiles every call anew.
@cells_of("JAX")
@settings(max_examples=long_run(3, 1), phases=[Phase.generate])
@given(seed=st.integers(0, 2**32 - 1))
def test_calls_of_jax(operation: str, door: str, way: str, seed: int) -> None:
    check(operation, door, way, seed)


def check(operation: str, door: str, way: str, seed: int) -> None:
    """Draw a call, and check that it is refused or gives what the formula gives."""
    one = drawn(operation, door, way, seed)
    # JAX compiles each operation of a call that is not compiled as a whole.
    run = DOORS[door].get(way, DOORS[door]["compiled" if door == "JAX" else "reverse"])
    f = one.problem.ours[door]
    if (operation, door, way) in REFUSED:
        error, said = REFUSED[operation, door, way]
        with pytest.raises(error, match=said):
            run(f, one)
        return
    found = run(f, one)
    agree(found, expected(one), is_narrow=way == "float32")
    if way == "threads":
        check_threads(run, f, one, found)


def check_threads(run: Any, f: Any, one: Drawn, found: dict[str, Any]) -> None:
    """Check that many threads of kernels, and of callers, give the same bits."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (
            threads,
            affine,
            attention,
            filters,
            selective,
            host_sizes,
            passes,
            programs,
        ):
            patch.setattr(module, "thread_count", lambda: 3)
        for module in (attention, filters, selective):
            patch.setattr(module, "_GRAIN", 1)
        with ThreadPoolExecutor(3) as pool:
            others = list(pool.map(lambda _: run(f, one), range(3)))
    for other in map(arrays_of, others):
        for name, array in arrays_of(found).items():
            assert other[name].tobytes() == array.tobytes(), name


if __name__ == "__main__":
    print(table())
