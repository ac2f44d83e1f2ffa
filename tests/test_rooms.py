"""The house: a room imports the rooms before it, and what it lends has a public name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import sparsescan

ROOT = Path(sparsescan.__file__).parent

# From the ground up; each may import those before it. A file of the root is a room of its own.
ROOMS = (
    "errors",
    "checks",
    "formatting",
    "locks",
    "arrays",
    "kernels",
    "graph",
    "symbolic",
    "chains",
    "execution",
    "plan",
    "api",
    "ops",
    "differences",
    "__init__",
    "parameters",
    "recurrent",
    "capture",
    "jacobians",
    "simulate",
    "statespace",
    "torch",
    "jax",
    "export",
    "parallel",
    "strategies",
    "examples",
    "cli",
    "__main__",
)
FILES = sorted(
    path.relative_to(ROOT) for path in ROOT.rglob("*.py") if "__pycache__" not in path.parts
)


def room_of(module: tuple[str, ...]) -> str:
    return module[0] if module else "__init__"


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of the syntax tree of a file."""
    return list(ast.walk(ast.parse((ROOT / path).read_text())))


@cache
def imports(path: Path) -> list[tuple[int, tuple[str, ...], str]]:
    """Line, module and name of every import of the package, inside functions and for types too."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, tuple[str, ...], str]]:
    package = path.parent.parts
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, *rest = alias.name.split(".")
                if first == "sparsescan":
                    yield node.lineno, tuple(rest), ""
        if not isinstance(node, ast.ImportFrom):
            continue
        parts = tuple(node.module.split(".")) if node.module else ()
        if node.level:
            parts = package[: len(package) - node.level + 1] + parts
        elif parts[0] == "sparsescan":
            parts = parts[1:]
        else:
            continue
        for alias in node.names:
            inner = (*parts, alias.name)
            is_module = (ROOT.joinpath(*inner).with_suffix(".py")).exists() or (
                ROOT.joinpath(*inner) / "__init__.py"
            ).exists()
            yield node.lineno, inner if is_module else parts, "" if is_module else alias.name


def test_every_file_is_in_a_room() -> None:
    assert {room_of(path.with_suffix("").parts) for path in FILES} == set(ROOMS)


def test_the_root_has_few_files() -> None:
    """What has several files is a folder."""
    assert len([path for path in FILES if len(path.parts) == 1]) <= 8


@pytest.mark.parametrize("room", ROOMS)
def test_no_import_runs_back(room: str) -> None:
    back = [
        f"{path}:{line} imports {'.'.join(module)}"
        for path in FILES
        if room_of(path.with_suffix("").parts) == room
        for line, module, _ in imports(path)
        if ROOMS.index(room_of(module)) > ROOMS.index(room)
    ]
    assert not back, "\n".join(back)


def test_private_names_stay_in_their_room() -> None:
    taken = [
        f"{path}:{line} takes {'.'.join((*module, name))}"
        for path in FILES
        for line, module, name in imports(path)
        if room_of(module) != room_of(path.with_suffix("").parts)
        and any(part.startswith("_") and not part.startswith("__") for part in (*module, name))
    ]
    assert not taken, "\n".join(taken)


def test_no_two_files_import_each_other() -> None:
    """Nor more in a circle."""
    left = {
        path.with_suffix("").parts: {
            module if (*module, "__init__") not in known else (*module, "__init__")
            for _, module, _ in imports(path)
        }
        for known in [{path.with_suffix("").parts for path in FILES}]
        for path in FILES
    }
    left = {file: {m for m in seen if m in left} for file, seen in left.items()}
    while free := [file for file, seen in left.items() if not seen & left.keys()]:
        for file in free:
            del left[file]
    circle = {file: sorted(seen & left.keys()) for file, seen in left.items()}
    assert not circle, circle


# Attributes of other libraries' objects, which have no public ones for this.
NUMBA = {"_cache", "_cache_file", "_cache_path", "_data_path", "_impl", "_index_path", "_version"}
TORCH = {
    *("_backward_hooks", "_forward_hooks", "_forward_pre_hooks", "_modules", "_tensor_name"),
    *(
        "_C",
        "_dynamo",
        "_are_functorch_transforms_active",
        "_get_tracing_state",
        "_len_torch_dispatch_stack",
    ),
    *("_autograd", "_buffers", "_current_level", "_has_any_global_hook"),
    *("_len_torch_function_stack", "_top_saved_tensors_default_hooks", "_will_engine_execute_node"),
    *("_functorch", "_vmapmode_increment_nesting", "_vmapmode_decrement_nesting"),
    *("_add_batch_dim", "_is_fwd_grad_enabled", "_remove_batch_dim", "_schema"),
    *("_cache_enabled", "_disable_dynamo"),
}
# As Python's own modules do after a fork.
THREADING = {"_at_fork_reinit"}
TUPLE = {"_asdict", "_fields", "_replace"}
# Private names of Frozen and of Operator, for classes that are derived from them.
DERIVED = {"_set", "_set_output", "_set_shapes"}
FOREIGN = NUMBA | TORCH | THREADING | TUPLE | DERIVED


def test_private_attributes_stay_in_their_room() -> None:
    """A private name behind a dot is one that the same room defines."""
    defined: dict[str, set[str]] = {room: set(FOREIGN) for room in ROOMS}
    used: list[tuple[str, str, str]] = []
    for path in FILES:
        room = room_of(path.with_suffix("").parts)
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined[room].add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                defined[room].add(node.target.id)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined[room].add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                defined[room].add(node.value)  # of __slots__
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                defined[room].add(node.attr)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                used.append((room, node.attr, f"{path}:{node.lineno}"))
    taken = [
        f"{where} takes {name}"
        for room, name, where in used
        if not name.startswith("__") and name not in defined[room]
    ]
    assert not taken, "\n".join(taken)


# Locks that one thread takes and another one frees: a forked child makes its own crew.
SIGNALS = {"execution/threads.py": 2}


def test_locks_renew_themselves_after_a_fork() -> None:
    """Only `locks` makes locks, and imports what has some."""
    kinds = {"Barrier", "BoundedSemaphore", "Condition", "Event", "Lock", "RLock", "Semaphore"}
    for path in FILES:
        if path.name == "locks.py":
            continue
        made = [
            f"{path}:{node.lineno}"
            for node in nodes(path)
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).removeprefix("threading.") in kinds
            )
            or (
                isinstance(node, ast.ImportFrom)
                and (node.module, node.level) in (("threading", 0), ("functools", 0))
                and {each.name for each in node.names} & {*kinds, "cached_property"}
            )
        ]
        assert len(made) == SIGNALS.get(path.as_posix(), 0), made


def test_the_face_shows_its_names_and_no_others() -> None:
    assert dir(sparsescan) == sorted(sparsescan.__all__)
    assert all(hasattr(sparsescan, name) for name in sparsescan.__all__)
    with pytest.raises(AttributeError, match="module 'sparsescan' has no attribute 'load'"):
        _ = sparsescan.load


# What gives the address of an array, or a pointer to its elements.
ADDRESSES = {
    *("ctypes", "data_ptr", "__array_interface__", "__cuda_array_interface__"),
    *("unsafe_buffer_pointer", "make_array", "get_item_pointer"),
}
GATES = {
    Path("arrays/addresses.py"),
    Path("kernels/addresses.py"),
    Path("torch/calls/recorded.py"),
    Path("kernels/cuda/vectors.py"),  # of arrays that kernels make
}


def test_addresses_are_made_by_gates() -> None:
    """Kernels that follow an address see no strides, so that a gate has to look at them."""
    taken = [
        f"{path}:{node.lineno} takes {ast.unparse(node)}"
        for path in FILES
        if path not in GATES
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        if node.attr in ADDRESSES or ast.unparse(node).endswith(".data.ptr")
    ]
    assert not taken, "\n".join(taken)
