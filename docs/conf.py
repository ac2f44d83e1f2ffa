"""The site: ``sphinx-build -W -b html docs build/docs``."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import re
import sys
import textwrap
import warnings
from collections import Counter
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.addnodes import desc_signature, pending_xref
from sphinx.application import Sphinx
from sphinx_gallery.sorting import ExplicitOrder

from sparsescan.cli.main import main as command_line
from sparsescan.recurrent import Cell

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["COLUMNS"] = "80"  # of what commands say

_filters = contextlib.ExitStack()


def raise_warnings(gallery_conf: object, script: str, when: str) -> None:
    """Let a warning end a script of the gallery, as an error does."""
    if when == "before":
        _filters.enter_context(warnings.catch_warnings())
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive", UserWarning)
        # The gallery looks for each object under all modules, where it has former names, too.
        warnings.filterwarnings("ignore", module=r"sphinx_gallery\.")
    else:
        _filters.close()


project = "sparsescan"
author = "the authors of sparsescan"
html_title = "sparsescan"
extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
# Programs and commands, not what they print.
copybutton_selector = ", ".join(
    f"div.highlight-{name} pre" for name in ("python", "Python", "sh", "default")
)
exclude_patterns = ["gallery", "_drawn"]
templates_path = ["_templates"]
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
myst_links_external_new_tab = False
# Functions and the order of the gallery are not kept with the configuration.
suppress_warnings = ["config.cache"]

# Members of a class stand on its page, each with its docstring.
autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"
toc_object_entries_show_parents = "hide"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "within_subsection_order": ExplicitOrder(
        [
            "plot_train_gru.py",
            "plot_own_cell.py",
            "plot_spiking.py",
            "plot_episodes.py",
            "plot_long_series.py",
            "plot_ensemble.py",
            "plot_selective.py",
            "plot_pruned_rnn.py",
            "plot_pruned_cnn.py",
            "plot_advection_diffusion.py",
            "plot_fit_diffusion.py",
            "plot_cable.py",
            "plot_smoother.py",
            "plot_filter.py",
            "plot_mpi.py",
            "plot_flop_of_steps.py",
            "plot_strategies.py",
        ]
    ),
    "abort_on_example_error": True,
    "reset_modules": ("matplotlib", raise_warnings),
    "reset_modules_order": "both",
    "image_srcset": ["2x"],
    "capture_repr": (),
    "download_all_examples": False,
    "copyfile_regex": r".*\.md",
    "show_signature": False,
    "remove_config_comments": True,
    "write_computation_times": False,
    "plot_gallery": "True",
}

html_theme = "pydata_sphinx_theme"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_show_sourcelink = False
html_copy_source = False
html_domain_indices = False
html_math_renderer = "mathml"
html_theme_options = {
    "logo": {
        "text": "sparsescan",
        "image_light": "favicon.svg",
        "image_dark": "favicon.svg",
        "alt_text": "",
    },
    "navbar_align": "left",
    "header_links_before_dropdown": 8,
    "show_prev_next": False,
    "navigation_depth": 2,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_end": [],
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
}
MODULES = (
    "sparsescan",
    *(
        f"sparsescan.{room}"
        for room in ("recurrent", "recurrent.catalogue", "jacobians", "simulate")
    ),
    *(f"sparsescan.{room}" for room in ("torch", "jax", "parallel", "strategies")),
)
# Pages that have none below them.
html_sidebars = {name: [] for name in ("index", "for-me", "contributing")}


class Run(Directive):
    """Show a program, and below it what it prints."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Run the program."""
        program = "\n".join(self.content)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program, self.state.document.current_source, "exec"), {})
        shown = [nodes.literal_block(program, program, language="python")]
        if printed.getvalue():
            said = printed.getvalue().rstrip()
            shown.append(nodes.literal_block(said, said, language="text", classes=["printed"]))
        return shown


class Help(Directive):
    """Show what a command says about itself."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Ask the command."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            command_line([*self.arguments, "--help"])
        return [nodes.literal_block(said.getvalue(), said.getvalue(), language="text")]


def formula(self: Any, node: nodes.math) -> None:
    """Write a formula in a line as MathML, which needs no program in the browser."""
    self.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def displayed(self: Any, node: nodes.math_block) -> None:
    """Write a formula with a line of its own as MathML."""
    self.body.append(f'<div class="formula">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def keep_formulas(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Show the indented lines of a docstring, which are formulas, as they stand."""
    end = next((k for k, line in enumerate(lines) if line.startswith("---")), len(lines))
    for k in range(end - 1, 1, -1):
        before, blank, line = lines[k - 2 : k + 1]
        begins = line.startswith("    ") and not blank and before and before[0] != " "
        if begins and not before.endswith("::"):
            lines[k:k] = ["::", ""]


def show_definition(
    app: Sphinx, what: str, name: str, obj: Any, options: object, lines: list[str]
) -> None:
    """Show by what a cell of the catalogue is defined, that of its bases first."""
    if what != "class" or not name.startswith("sparsescan.recurrent.catalogue."):
        return
    lines += ["", ".. code-block:: python", ""]
    for each in reversed(obj.__mro__[: obj.__mro__.index(Cell)]):
        source = inspect.getsource(each).splitlines()
        (defined,) = ast.parse("\n".join(source)).body
        for part in ast.walk(defined):
            if isinstance(part, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(part):
                said = part.body[0]
                source[said.lineno - 1 : said.end_lineno] = [None] * (
                    said.end_lineno - said.lineno + 1
                )
        shown = "\n".join(line for line in source if line is not None).replace(":\n\n", ":\n", 1)
        lines += [f"    {line}" for line in shown.splitlines()] + [""]


def show_formulas_as_text(app: Sphinx, page: nodes.document) -> None:
    """Show literal blocks of docstrings, which are formulas, without the colours of Python."""
    if app.env.docname.startswith("reference/generated/"):
        for block in page.findall(nodes.literal_block):
            block.setdefault("language", "text")


def show_signature(
    app: Sphinx,
    what: str,
    name: str,
    obj: object,
    options: object,
    signature: str | None,
    returned: str | None,
) -> tuple[str, str | None] | None:
    """Show dtypes by name, and no arguments of errors and of a class that other calls make."""
    if signature is None:  # of a module or an attribute
        return None
    if what == "exception" or signature == "(*_, **__)":
        return "", ""
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", signature), returned


def skip_alias(
    app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object
) -> bool | None:
    """Leave out fields of named tuples, which docstrings list, and classes by another name."""
    is_field = str(getattr(obj, "__doc__", "")).startswith("Alias for field")
    return True if is_field or (isinstance(obj, type) and obj.__name__ != name) else None


def list_errors_once(app: Sphinx, page: nodes.document) -> None:
    """Leave errors, which have headings, out of their page's contents."""
    for signature in page.findall(desc_signature):
        if signature.parent["objtype"] == "exception":
            signature["_toc_name"] = ""


def full_names() -> dict[str, str]:
    """Return public names in full by what pages call them: after `sparsescan.`, or if unique alone.

    A name that several modules have is the root's, if it is one of them.
    """
    members = [f"{module}.{name}" for module in MODULES for name in import_module(module).__all__]
    times = Counter(name.rpartition(".")[2] for name in members)
    alone = {last: name for name in members if times[last := name.rpartition(".")[2]] == 1}
    return alone | {name.removeprefix("sparsescan."): name for name in (*MODULES[1:], *members)}


def link_names(app: Sphinx, page: nodes.document) -> None:
    """Make code that is a public name, or a call or member of one, a link to its page."""
    if app.env.docname == "contributing":  # where `plan` is a folder
        return
    names = full_names()
    for node in list(page.findall(nodes.literal)):
        name = node.astext().partition("(")[0].removeprefix("sparsescan.")
        owner, _, member = name.rpartition(".")
        target = names.get(name) or (owner in names and f"{names[owner]}.{member}")
        if not target or isinstance(node.parent, pending_xref | nodes.reference | nodes.title):
            continue
        link = pending_xref(refdomain="py", reftype="obj", reftarget=target, refwarn=False)
        link["refdoc"] = app.env.docname
        node.replace_self(link)
        link += node


def draw(app: Sphinx) -> None:
    """Draw the pictures, and write the pages of measurements."""
    report = import_module("bench.report")
    report.write_pages(ROOT / "bench" / "results", ROOT / "docs" / "benchmarks" / "results")
    import_module("draw_pages").main()


def describe(
    app: Sphinx, name: str, template: str, context: dict[str, Any], page: nodes.document | None
) -> None:
    """Give a page the description that search engines show: its first paragraph."""
    said = next((each.astext() for each in page.findall(nodes.paragraph)), "") if page else ""
    said = textwrap.shorten(said, 160, placeholder=" …")
    said = said or f"sparsescan: {context.get('title', '')}"
    tag = f'<meta name="description" content="{escape(said)}"/>'
    context["metatags"] = context.get("metatags", "") + tag


def setup(app: Sphinx) -> None:
    """Add what is the site's own."""
    app.add_directive("run", Run)
    app.add_directive("help", Help)
    app.add_html_math_renderer("mathml", (formula, None), (displayed, None))
    measured, gallery_figures = map(import_module, ("measured", "gallery_figures"))
    app.add_role("ratio", measured.Ratio())
    app.add_directive("slower", measured.Slower)
    app.connect("builder-inited", draw)
    # After the gallery, which comes at 500.
    app.connect("builder-inited", gallery_figures.draw_cards, priority=600)
    app.connect("doctree-read", gallery_figures.show_captions)
    app.connect("html-page-context", describe)
    app.connect("autodoc-skip-member", skip_alias)
    app.connect("autodoc-process-signature", show_signature)
    app.connect("doctree-read", link_names)
    app.connect("doctree-read", show_formulas_as_text)
    # Before Sphinx collects contents and numpydoc reads docstrings, which come at 500.
    app.connect("doctree-read", list_errors_once, priority=100)
    app.connect("autodoc-process-docstring", keep_formulas, priority=100)
    app.connect("autodoc-process-docstring", show_definition, priority=900)
