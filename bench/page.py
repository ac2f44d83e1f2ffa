"""One HTML page that needs nothing else: its style and its pictures are inside.

Pictures are SVG with letters as paths, which look the same everywhere and sharp on paper; in the
dark their lightness is turned around, and their hues stay.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from io import BytesIO
from itertools import groupby
from math import floor, log10
from operator import itemgetter
from pathlib import Path
from typing import Any

from .experiment import Drawing

# Bytes of an SVG above which a picture of its pixels is the smaller one.
_LARGE = 1_000_000
# Lines of a table that stands open; a longer one opens at a click.
_LINES = 40

_STYLE = "\n" + (Path(__file__).parent / "page.css").read_text()


class Html(str):
    """Text that is HTML already; all other text is escaped."""

    __slots__ = ()


def join(*parts: str) -> Html:
    """One after the other."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def tag(name: str, *parts: str, **attributes: str) -> Html:
    """Return an element; `kind` is its class."""
    names = {"kind": "class"}
    said = "".join(f' {names.get(key, key)}="{escape(v)}"' for key, v in attributes.items())
    return Html(f"<{name}{said}>{join(*parts)}</{name}>")


def listed(items: Sequence[str]) -> Html:
    """Return an unordered list."""
    return tag("ul", *(tag("li", item) for item in items))


def significant(x: float, digits: int = 3) -> str:
    """Round to so many digits, with thousands set apart: ``49.6``, ``0.940``, ``79,700``."""
    rounded = float(f"{x:.{digits - 1}e}")
    places = digits - 1 - floor(log10(abs(rounded))) if rounded else 0
    return f"{rounded:,.{max(places, 0)}f}"


def exactly(x: float | None) -> str:
    """Return a ratio that was published or is asked for."""
    return "" if x is None else f"{x:,.10g}×"


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    numbers: Sequence[str] = (),
    *,
    grouped: bool = False,
) -> Html:
    """Return a table; the columns whose heads are `numbers` are aligned on the decimal point.

    Rows that are grouped stand below their first cell, which has a line of its own. Columns that
    are empty are left out; without rows there is no table. A long one is folded.
    """
    if not rows:
        return Html("")
    filled = [pair for pair in zip(heads, zip(*rows, strict=True), strict=True) if any(pair[1])]
    columns = [_aligned(cells) if head in numbers else cells for head, cells in filled]
    kinds: list[dict[str, str]] = [
        {"kind": "number"} if head in numbers else {} for head, _ in filled
    ]
    first = int(grouped)

    def line(name: str, cells: Sequence[str]) -> Html:
        shown = zip(cells[first:], kinds[first:], strict=True)
        return tag("tr", *(tag(name, cell, **kind) for cell, kind in shown))

    body = []
    for group, members in groupby(zip(*columns, strict=True), key=itemgetter(0)):
        if grouped:
            over = tag("th", tag("span", group), colspan=str(len(columns) - 1))
            body.append(tag("tr", over, kind="group"))
        body += [line("td", cells) for cells in members]
    head = tag("thead", line("th", [head for head, _ in filled]))
    whole = tag("div", tag("table", head, tag("tbody", *body)), kind="wide")
    if len(rows) <= _LINES:
        return whole
    return tag("details", tag("summary", f"All {len(rows)} lines"), whole)


def _aligned(cells: Sequence[str]) -> list[str]:
    """Numbers, perhaps with a unit, that end in room for the decimals that they do not have."""
    decimals = [len("".join(re.findall(r"\.\d+", cell))) for cell in cells]
    most = max(decimals)
    return [
        join(cell, tag("i", **{"data-pad": ".00000000"[own:most]})) if cell and own < most else cell
        for cell, own in zip(cells, decimals, strict=True)
    ]


def figure(drawing: Drawing) -> Html:
    """Return a picture with its caption."""
    kind, data = _picture(drawing.figure)
    width = round(96 * drawing.figure.get_size_inches()[0])
    source = f"data:image/{kind};base64,{b64encode(data).decode()}"
    shown = Html(f'<img alt="{escape(drawing.title)}" width="{width}" src="{source}">')
    said = tag("figcaption", tag("b", drawing.title), ". ", drawing.caption)
    return tag("figure", tag("div", shown, kind="wide"), said)


def _picture(drawn: Any) -> tuple[str, bytes]:
    """Return a figure as SVG, the same bytes every time, or as PNG if that would be large."""
    from matplotlib import rc_context

    svg, png = BytesIO(), BytesIO()
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "sparsescan"}):
        drawn.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    if svg.tell() <= _LARGE:
        return "svg+xml", svg.getvalue()
    drawn.savefig(png, format="png", transparent=True, dpi=200)
    return "png", png.getvalue()


def anchor(title: str) -> str:
    """Return the name of a section in addresses."""
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def page(title: str, head: Html, sections: dict[str, Html]) -> str:
    """Return the whole page; sections by their titles."""
    links, body = [], []
    for name, section in sections.items():
        links.append(join(tag("a", name, href=f"#{anchor(name)}"), " "))
        body.append(tag("section", tag("h2", name, id=anchor(name)), section))
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join([tag("h1", title), head, tag("nav", *links), *body])
        + "\n</body>\n</html>\n"
    )
