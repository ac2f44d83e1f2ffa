"""Programs of the README and of the site's pages run as they stand; the README stays short."""

from __future__ import annotations

import builtins
import pydoc
import re
import subprocess
import sys
import traceback
from html import unescape
from pathlib import Path

import pytest

import sparsescan
import sparsescan.jacobians
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


@pytest.mark.parametrize("block", programs(README), ids=["ten lines", "one line of PyTorch"])
def test_program(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {})


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=[path.relative_to(DOCS).as_posix() for path in PAGES])
def test_programs_of_a_page(path: Path) -> None:
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
        (sparsescan.parallel, ["parallel", "errors"]),
        (sparsescan.strategies, ["strategies"]),
    ],
)
def test_the_reference_has_every_public_name(module: object, pages: list[str]) -> None:
    text = "".join((DOCS / "reference" / f"{page}.md").read_text() for page in pages)
    directive = r"^(?:   |\.\. autoexception:: sparsescan\.)(?:parallel\.)?(\w+)$"
    listed = set(re.findall(directive, text, re.MULTILINE))
    assert set(module.__all__) - {"__version__"} <= listed  # type: ignore[attr-defined]


ERRORS = [error for error in vars(errors).values() if isinstance(error, type)]
ERRORS = [error for error in ERRORS if issubclass(error, errors.SparseScanError)]


@pytest.mark.parametrize("error", ERRORS)
def test_a_traceback_says_where_an_error_is_explained(error: type[Exception]) -> None:
    page = (DOCS / "reference" / "errors.md").read_text()
    assert re.search(rf"^## {error.__name__}$", page, re.MULTILINE)
    assert re.search(
        rf"^\.\. autoexception:: sparsescan\.(parallel\.)?{error.__name__}$", page, re.M
    )
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


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx_gallery")
    output, trees = tmp_path / "site", tmp_path / "trees"
    # Without the gallery's programs, which .ci/run runs.
    options = f"-q -W -E -D plot_gallery=0 -b html -d {trees}".split()
    command = [sys.executable, "-m", "sphinx", *options, str(DOCS), str(output)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = {path: path.read_text() for path in output.rglob("*.html")}
    anchors = {path: set(re.findall(r' id="([^"]+)"', text)) for path, text in pages.items()}
    broken = []
    for path, text in pages.items():
        for link in re.findall(r'<(?:a|img)[^>]*? (?:href|src)="([^"]+)"', text):
            where, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", where):
                continue
            target = (path.parent / where).resolve() if where else path
            known = anchors.get(target)
            if not target.exists() or (anchor and known is not None and anchor not in known):
                broken.append(f"{path.relative_to(output)}: {link}")
    assert not broken
    # Names that docstrings refer to have a page, but for those of other packages and of Python.
    code = r'<code class="xref py[^"]*"><span class="pre">([^<]+)</span></code>(?!</a>)'
    unknown = {
        f"{path.relative_to(output)}: {unescape(name)}"
        for path, text in pages.items()
        for name in re.findall(code, text)
        if name.startswith("sparsescan") or "." not in name.removeprefix(".")
        if not hasattr(builtins, name)
    }
    assert not unknown
