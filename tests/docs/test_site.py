"""The site is built as it is published: its gallery runs, and its links lead somewhere."""

from __future__ import annotations

import builtins
import json
import os
import re
import subprocess
import sys
from html import escape, unescape
from pathlib import Path

import mpi_launch
import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "bench" / "results"
SCRIPTS = sorted((DOCS / "gallery").glob("plot_*.py"))


def test_there_are_scripts_and_each_has_a_title() -> None:
    assert len(SCRIPTS) >= 8
    for script in SCRIPTS:
        title, rule = script.read_text(encoding="utf-8").splitlines()[1:3]
        assert rule == "=" * len(title), script.name


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """Return the pages by their files.

    A warning ends the build, in a script of the gallery, too; and so does a script that finds one
    of its claims wrong. None leaves a file.
    """
    pytest.importorskip("sphinx_gallery")
    pytest.importorskip("sphinx_copybutton")
    if not mpi_launch.IS_INSTALLED:
        pytest.skip("needs mpi4py and mpiexec")
    folder, before = tmp_path_factory.mktemp("site"), sorted((DOCS / "gallery").iterdir())
    # All scripts run, whether or not they have changed.
    options = ["-q", "-W", "-E", "-D", "sphinx_gallery_conf.run_stale_examples=1", "-b", "html"]
    command = [sys.executable, "-m", "sphinx", *options, "-d", folder / "trees", DOCS, folder]
    env = os.environ | mpi_launch.sleeping()
    built = subprocess.run(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True
    )
    assert built.returncode == 0, built.stderr.decode()
    assert sorted((DOCS / "gallery").iterdir()) == before
    return {path: path.read_text() for path in folder.rglob("*.html")}


@pytest.mark.slow
def test_every_link_leads_somewhere(pages: dict[Path, str]) -> None:
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
                broken.append(f"{path}: {link}")
    assert not broken


@pytest.mark.slow
def test_names_in_docstrings_have_pages(pages: dict[Path, str]) -> None:
    """But for those of other packages and of Python."""
    code = r'<code class="xref py[^"]*"><span class="pre">([^<]+)</span></code>(?!</a>)'
    unknown = {
        f"{path}: {unescape(name)}"
        for path, text in pages.items()
        for name in re.findall(code, text)
        if name.startswith("sparsescan") or "." not in name.removeprefix(".")
        if not hasattr(builtins, name)
    }
    assert not unknown


@pytest.mark.slow
def test_every_script_of_the_gallery_draws(pages: dict[Path, str]) -> None:
    drawn = {
        path.stem: re.findall(r'<img [^>]*src="[^"]*sphx_glr_(\w+)_\d{3}\.\w+"', text)
        for path, text in pages.items()
        if path.parent.name == "auto_gallery"
    }
    for script in SCRIPTS:
        assert script.stem in drawn[script.stem]


@pytest.mark.slow
def test_all_results_are_shown(pages: dict[Path, str]) -> None:
    shown = {path.stem: text for path, text in pages.items() if path.parent.name == "results"}
    names = set(re.findall(r"<tr><td><code>([^<]+\.json)</code></td>", shown["files"]))
    assert names == {path.name for path in RESULTS.glob("*.json")}
    assert not any("cannot be shown" in text for text in shown.values())
    for path in RESULTS.glob("cpu-*.json"):
        for line in json.loads(path.read_text())["engine"]:
            assert escape(line["work"], quote=False) in shown["the-engine"]
