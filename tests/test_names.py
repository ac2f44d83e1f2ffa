"""Public names: few, on one page in a newcomer's order; those of the last release still work."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest

import sparsescan
from sparsescan.errors import SparseScanError

ROOT = Path(sparsescan.__file__).parent
PAGE = ROOT.parent / "docs" / "reference" / "index.md"
ROOMS = ("recurrent", "recurrent.catalogue", "jacobians", "simulate", "parallel", "strategies")
# Which has no names of the last release.
NEW = ("export",)
# These import a framework.
DOORS = [pytest.param(door, marks=pytest.mark.slow) for door in ("torch", "jax")]


def public(room: str) -> list[str]:
    """Return the names that a module exports, which is read and not imported."""
    tree = ast.parse((ROOT / room.replace(".", "/") / "__init__.py").read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return [f"{room}.{name}".lstrip(".") for name in names if name != "__version__"]


def module_of(room: str) -> str:
    return f"sparsescan.{room}".rstrip(".")


def lines() -> dict[str, str]:
    """Return what the page says of each name."""
    listed = re.findall(r"^- `([\w.]+)`: (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) == len(dict(listed))
    return dict(listed)


def test_there_are_at_most_150_names_and_the_page_has_each() -> None:
    """The bound is that for 47 cells, before sums over units, matrices, masks, types and scans."""
    names = [name for room in ("", *ROOMS, *NEW, "torch", "jax") for name in public(room)]
    over_units = {"softmax", "logsumexp", "layer_norm", "rms_norm"}
    matrices = {name for name in names if "linear_attention" in name}
    later = {f"recurrent.{name}" for name in ("Given", "Mask", "Initial", "State", "StepNumber")}
    later |= {"jax.scan", "jax.explain", "torch.scan", "torch.loop", "torch.stream", "export.c"}
    later |= {"recurrent.Node"}
    own = {name for name in names if not name.startswith("recurrent.catalogue.")}
    assert len(own - {f"recurrent.{name}" for name in over_units} - matrices - later) <= 150 - 47
    assert sorted(names) == sorted(lines())


@pytest.mark.parametrize("room", ["", *ROOMS, *NEW, *DOORS])
def test_the_page_says_what_the_first_line_of_each_docstring_says(room: str) -> None:
    if room in ("torch", "jax"):
        pytest.importorskip(room)
    module, listed = import_module(module_of(room)), lines()
    for name in public(room):
        said = (inspect.getdoc(getattr(module, name.rpartition(".")[2])) or "").splitlines()[0]
        said = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", said.replace("``", "`"))
        assert listed[name] == said, name


@pytest.mark.parametrize("room", ["", *ROOMS[:1], *ROOMS[2:], *DOORS])
def test_names_of_the_last_release_work_and_say_what_to_write(room: str) -> None:
    if room in ("torch", "jax"):
        pytest.importorskip(room)
    if room != "jax":
        module = import_module(module_of(room))
        find = vars(module).get("_former") or module.__getattr__
        former: Mapping[str, tuple[str, str]] = inspect.getclosurevars(find).nonlocals["former"]
        exported = set(module.__all__)
        assert former
        assert exported.isdisjoint(former)
        for name, (place, instead) in former.items():
            path, _, attribute = place.partition(":")
            what = re.escape(instead or f"from sparsescan.{path} import {attribute}")
            told = rf"^{module.__name__}\.{name} is public no longer, .* write {what}$"
            with pytest.warns(DeprecationWarning, match=told):
                found = getattr(module, name)
            if not instead:
                assert found is getattr(import_module(f"sparsescan.{path}"), attribute)
    with pytest.raises(AttributeError, match=f"module '{module_of(room)}' has no attribute 'no'"):
        _ = import_module(module_of(room)).no


def test_a_warning_is_of_the_line_that_has_the_name() -> None:
    with pytest.warns(DeprecationWarning, match="simulate.Run is public no longer") as caught:
        from sparsescan.simulate import Run  # noqa: F401
    assert {Path(each.filename) for each in caught} == {Path(__file__)}


def test_errors_of_files_are_caught_by_their_former_names() -> None:
    with pytest.warns(DeprecationWarning, match="write FileError$"):
        assert issubclass(sparsescan.FileError, sparsescan.ChainFileError)
    assert issubclass(sparsescan.FileError, SparseScanError)
