"""Draw the pictures of the site from the package itself, into ``docs/_drawn``."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

import draw_levels
import measured
import numpy as np
from matplotlib.figure import Figure

import sparsescan
from bench import readme

DOCS = Path(__file__).parent
OUTPUT = DOCS / "_drawn"
LINEAR, SCAN = "#d9822b", "#3b6fb6"
ENGINE, FACE, ROOF = "#3b6fb6", "#a85f14", "#6d3b06"


def main() -> None:
    """Draw all of them."""
    OUTPUT.mkdir(exist_ok=True)
    _save(workers(), "workers.svg")
    _save(ratios(), "ratios.svg")
    (OUTPUT / "levels.svg").write_text(draw_levels.svg())
    (OUTPUT / "rooms.svg").write_text(rooms((DOCS.parent / "CONTRIBUTING.md").read_text()))


def workers() -> Figure:
    """Draw the steps of scans over the number of workers, as their plans count them."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    for n, marker in ((100, "o"), (1_000, "s"), (10_000, "^")):
        counts = [2**k for k in range(15) if 2**k < 2 * n]
        pattern = sparsescan.Pattern.diagonal(8)
        plan = sparsescan.plan([pattern] * n, schedule="blelloch")
        steps = [plan.predict(workers).steps for workers in counts]
        axes.loglog(counts, steps, marker + "-", color=SCAN, markersize=4)
        axes.text(counts[0] * 1.1, steps[0] * 1.1, f"scan, n = {n:,}", color=SCAN)
        axes.axhline(n - 1, color=LINEAR, linestyle="--", linewidth=1)
        axes.text(2**14, (n - 1) * 1.1, f"back-propagation, n = {n:,}", color=LINEAR, ha="right")
        axes.axhline(2 * np.log2(n), color="gray", linestyle=":", linewidth=1)
    axes.text(2**14, 2 * np.log2(100), "2 log₂ n", color="gray", ha="right", va="top", size=8)
    axes.set(xlabel="workers", ylabel="steps, one after the other", xlim=(0.8, 2**14 * 1.2))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def ratios() -> Figure:
    """Draw the ratios of the README's table, each below its name, so that a phone shows them."""
    lines = readme.TABLES["README"]["lines"]
    rows = [readme.row(measured.rows(), line["work"], line.get("peer", ""))[1] for line in lines]
    figure = Figure(figsize=(5.6, 0.42 * len(rows) + 0.5), layout="constrained")
    axes = figure.subplots()
    for k, (line, row) in enumerate(zip(lines, rows, strict=True)):
        ratio = row.theirs / row.ours
        color = SCAN if ratio > 1 else LINEAR
        axes.plot([1, ratio], [k, k], color=color, linewidth=6, solid_capstyle="butt")
        peer = "" if row.peer.startswith("PyTorch") else f", beside {row.peer}"
        axes.text(1.03, k - 0.42, line["cells"][0].removesuffix(" *") + peer, size=9, va="center")
        axes.text(max(ratio, 1) * 1.06, k, readme.ratio(ratio), size=9, va="center")
    axes.axvline(1, color="gray", linewidth=1)
    axes.set(xscale="log", xlim=(0.45, 150), ylim=(len(rows) - 0.4, -0.8), yticks=[])
    axes.set_xticks(
        [0.5, 1, 2, 5, 10, 20, 50, 100], ["½×", "1×", "2×", "5×", "10×", "20×", "50×", "100×"]
    )
    axes.minorticks_off()
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def rooms(contributing: str) -> str:
    """Return the rooms of CONTRIBUTING's table as a picture: whatever is above imports below."""
    rows = [
        (name.replace("`", ""), what.replace("`", "").split(";")[0].split(": ")[-1])
        for name, what in re.findall(r"^\| (`.*?) \| (.*?) \|$", contributing, re.MULTILINE)
        if not name.startswith("`.venv")
    ]
    high, wide = 34, 760
    boxes = []
    for floor, (name, what) in enumerate(reversed(rows)):
        y = high * floor + 60
        fill = FACE if floor < 7 else ENGINE
        boxes.append(
            f'<rect x="20" y="{y}" width="{wide}" height="{high - 4}" rx="4" fill="{fill}"/>'
            f'<text x="36" y="{y + 20}" font-weight="bold" fill="#fff">{escape(name)}</text>'
            f'<text x="190" y="{y + 20}" fill="#fff">{escape(what)}</text>'
        )
    height = high * len(rows) + 70
    roof = f'<path d="M10 56L{20 + wide / 2} 8L{wide + 30} 56Z" fill="{ROOF}"/>'
    caller = f'<text x="{20 + wide / 2}" y="44" text-anchor="middle" fill="#fff">sparsescan</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide + 40} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13.5">'
        f"{roof}{caller}{''.join(boxes)}</svg>\n"
    )


def _save(figure: Figure, name: str) -> None:
    figure.savefig(OUTPUT / name, transparent=True, metadata={"Date": None})
