"""The files of the benchmarks import each other one way, inside functions and for types too."""

from __future__ import annotations

import ast
from pathlib import Path

FOLDER = Path(__file__).parent


def imported(path: Path) -> set[str]:
    """Return the files of this folder that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            names |= {node.module} if node.module else {alias.name for alias in node.names}
    return names & {other.stem for other in FOLDER.glob("*.py")}


def test_nothing_is_imported_in_a_circle() -> None:
    left = {path.stem: imported(path) for path in FOLDER.glob("*.py")}
    assert "contests" in left["table1"]
    while free := [name for name, needed in left.items() if not needed & left.keys()]:
        for name in free:
            del left[name]
    assert not left, {name: sorted(needed & left.keys()) for name, needed in left.items()}
