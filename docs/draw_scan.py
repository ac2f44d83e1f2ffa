"""Draw docs/scan.svg from the schedules themselves: ``python docs/draw_scan.py``."""

from __future__ import annotations

from pathlib import Path

from sparsescan import Schedule

N = 16
PITCH, ROW, RADIUS = 34, 26, 8
DIGITS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
VECTOR, MATRIX, INK, GREY = "#d9822b", "#3b6fb6", "#222222", "#9aa0a6"


def panel(schedule: Schedule, title: str, left: int) -> tuple[list[str], int]:
    """One schedule, elements from left to right and steps from top to bottom; and its height."""
    top = 78
    x = [left + 40 + PITCH * k for k in range(N)]
    lines, nodes = [], []
    at = {(k, k + 1): (x[k], top) for k in range(N)}
    names = [index("∇x", N)] + [index("J", N - k + 1) for k in range(1, N)]
    for k in range(N):
        nodes.append(node(*at[k, k + 1], VECTOR if k == 0 else MATRIX))
        nodes.append(text(x[k], top - 18, names[k], INK))
    y = top
    for level in schedule.levels:
        for first, last in zip(level.runs[:-1], level.runs[1:], strict=True):
            step = y
            for start, mid, stop in level.ops[first:last].tolist():
                step += ROW
                here = (x[stop - 1], step)
                color = VECTOR if start == 0 else MATRIX
                for operand in (at[start, mid], at[mid, stop]):
                    lines.append(line(*operand, *here, color))
                at[start, stop] = here
                nodes.append(node(*here, color))
        y += ROW * level.depth
    height = y + ROW + 18
    for k in range(N):
        end = at[0, k + 1]
        lines.append(line(*end, x[k], height - 30, GREY, dash=True))
        nodes.append(text(x[k], height - 14, index("∇x", N - k), INK))
    heading = text(left + 40 + PITCH * (N - 1) / 2, 30, title, INK, size=20)
    return [heading, *lines, *nodes], height


def index(name: str, number: int) -> str:
    return name + str(number).translate(DIGITS)


def node(x: float, y: float, color: str) -> str:
    return f'<circle cx="{x}" cy="{y}" r="{RADIUS}" fill="{color}"/>'


def line(x0: float, y0: float, x1: float, y1: float, color: str, dash: bool = False) -> str:
    style = ' stroke-dasharray="3 4" stroke-width="1.2"' if dash else ' stroke-width="2"'
    return f'<path d="M{x0} {y0}L{x1} {y1}" stroke="{color}"{style} fill="none"/>'


def text(x: float, y: float, words: str, color: str, size: int = 15) -> str:
    return f'<text x="{x}" y="{y}" fill="{color}" font-size="{size}">{words}</text>'


def main() -> None:
    """Write the picture."""
    linear = Schedule.linear(N)
    blelloch = Schedule.blelloch(N)
    width = PITCH * (N - 1) + 80
    left, left_height = panel(linear, f"back-propagation: {linear.depth} steps", 0)
    right, right_height = panel(blelloch, f"the scan: {blelloch.depth} steps", width + 30)
    height = max(left_height, right_height) + 26
    legend = [
        node(width - 180, height - 12, VECTOR),
        text(width - 110, height - 7, "gradient", INK, size=18),
        node(width - 20, height - 12, MATRIX),
        text(width + 128, height - 7, "transposed Jacobian or product", INK, size=18),
    ]
    Path(__file__).with_name("scan.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * width + 30} {height}" '
        'font-family="Helvetica, Arial, sans-serif" text-anchor="middle">'
        '<rect width="100%" height="100%" fill="#ffffff"/>'
        + "".join(left + right + legend)
        + "</svg>\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
