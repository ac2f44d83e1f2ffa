"""Programs of the README and of the site's pages run as they stand; the README stays short."""

from __future__ import annotations

import pydoc
import re
import sys
import traceback
from pathlib import Path

import pytest

import sparsescan
import sparsescan.jacobians
import sparsescan.recurrent
import sparsescan.recurrent.catalogue
import sparsescan.simulate
import sparsescan.statespace.hmm
import sparsescan.strategies
from sparsescan import errors

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
# Those that Sphinx writes are not the site's sources.
WRITTEN = {"auto_gallery", "generated", "results"}
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if not WRITTEN & set(path.parts)]
WORDS = 900


def programs(path: Path) -> list[str]:
    """Return the blocks of a page that are run: not those that need a GPU, or ranks."""
    return re.findall(r"^```(?:python|\{run\})\n(.*?)^```", path.read_text(), re.DOTALL | re.M)


def links(path: Path) -> list[str]:
    """Return where a page's links inside the repository lead, with their anchors."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


@pytest.mark.parametrize(
    "block", programs(README), ids=["ten lines", "one line of PyTorch", "a cell"]
)
def test_program(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {})


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=[path.relative_to(DOCS).as_posix() for path in PAGES])
def test_programs_of_a_page(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in programs(path):
        exec(compile(block, str(path), "exec"), {})


def test_the_readme_is_short() -> None:
    assert len(README.read_text().split()) <= WORDS


def test_pages_have_programs() -> None:
    assert sum(len(programs(path)) for path in PAGES) > 10


@pytest.mark.parametrize("path", [README, *PAGES], ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    for link in links(path):
        where, _, anchor = link.partition("#")
        target = path.parent / where if where else path
        if WRITTEN & set(target.parts):
            continue  # Sphinx has warned if it is not written.
        assert target.exists(), link
        heads = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)
        names = [re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads]
        assert not anchor or anchor in names, link


@pytest.mark.parametrize(
    ("module", "pages"),
    [
        (sparsescan, ["scan", "errors"]),
        (sparsescan.jacobians, ["jacobians"]),
        (sparsescan.recurrent, ["recurrent"]),
        (sparsescan.recurrent.catalogue, ["recurrent"]),
        (sparsescan.simulate, ["simulate"]),
        (sparsescan.statespace, ["statespace"]),
        (sparsescan.statespace.hmm, ["statespace"]),
        (sparsescan.parallel, ["parallel"]),
        (sparsescan.strategies, ["strategies"]),
    ],
)
def test_the_reference_has_every_public_name(module: object, pages: list[str]) -> None:
    text = "".join((DOCS / "reference" / f"{page}.md").read_text() for page in pages)
    directive = r"^(?:   |\.\. autoexception:: sparsescan\.)(\w+)$"
    listed = set(re.findall(directive, text, re.MULTILINE))
    assert set(module.__all__) - {"__version__"} <= listed  # type: ignore[attr-defined]


ERRORS = [error for error in vars(errors).values() if isinstance(error, type)]
ERRORS = [error for error in ERRORS if issubclass(error, errors.SparseScanError)]


@pytest.mark.parametrize("error", ERRORS)
def test_a_traceback_says_where_an_error_is_explained(error: type[Exception]) -> None:
    page = (DOCS / "reference" / "errors.md").read_text()
    assert re.search(rf"^## {error.__name__}$", page, re.MULTILINE)
    assert re.search(rf"^\.\. autoexception:: sparsescan\.(errors\.)?{error.__name__}$", page, re.M)
    raised = error("grad is wrong")
    assert str(raised) == "grad is wrong"
    (note,) = raised.__notes__
    (name,) = re.findall(r"help\((.*)\)", note)
    assert pydoc.locate(name) is error
    assert error is errors.SparseScanError or "usual" in (error.__doc__ or "")
    if sys.version_info >= (3, 11):
        assert note in "".join(traceback.format_exception(raised))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_the_reference_has_every_name_of_a_front_door(name: str) -> None:
    pytest.importorskip(name)
    module = __import__(f"sparsescan.{name}", fromlist=["__all__"])
    listed = re.findall(r"^   (\w+)$", (DOCS / "reference" / f"{name}.md").read_text(), re.M)
    assert set(module.__all__) == set(listed)
