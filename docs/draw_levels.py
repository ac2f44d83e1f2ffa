"""Draw the picture of the first page, which moves from a loop to the levels of a scan."""

from __future__ import annotations

from sparsescan import Schedule

N = 16
PITCH, ROW, RADIUS, LEFT, TOP = 29, 21, 7, 40, 62
# Seconds: of all, of a step of the loop; when nodes move, when levels begin, and of a level.
WHOLE, STEP, MOVES, MOVED, BEGINS, LEVEL = 12.0, 0.3, 5.4, 6.6, 6.8, 0.45
HIDDEN, FAINT, SEEN = "opacity:0", "opacity:.2", "opacity:1"

Point = tuple[float, float]


class Motion:
    """The rules of an animation; what shares a name moves alike."""

    def __init__(self) -> None:
        self.rules: dict[str, str] = {}

    def __call__(self, name: str, *at: tuple[float, str]) -> str:
        """Return the style of what has declarations from given seconds on."""
        said = "".join(f"{100 * seconds / WHOLE:.1f}%{{{what}}}" for seconds, what in at)
        self.rules[name] = f"@keyframes {name}{{{said}}}"
        return f'style="animation-name:{name}"'


def svg() -> str:
    """Return the picture: that of the scan, where nothing may move."""
    loop, scan = Schedule.linear(N), Schedule.blelloch(N)
    motion = Motion()
    x = [LEFT + PITCH * k for k in range(N)]
    inputs = {(k, k + 1): (x[k], float(TOP)) for k in range(N)}
    lines, nodes = [], []
    # The tree; and on which level it has each gradient.
    place, level_of = dict(inputs), {}
    for number, level in enumerate(scan.levels, 1):
        begins = BEGINS + LEVEL * number
        faint = ((0, HIDDEN), (MOVED - 0.4, HIDDEN), (MOVED, FAINT), (begins, FAINT))
        style = motion(f"level{number}", *faint, (begins + 0.1, SEEN), (WHOLE, SEEN))
        for start, mid, stop in level.ops.tolist():
            here = place[start, stop] = x[stop - 1], TOP + ROW * number
            kind = "gradient" if start == 0 else "jacobian"
            lines += [
                line(each, here, kind, style) for each in (place[start, mid], place[mid, stop])
            ]
            if start == 0:
                level_of[stop] = number
            else:
                nodes.append(node(here, kind, style))
    # The loop, whose nodes move to their levels.
    place = dict(inputs)
    steps = [op for level in loop.levels for op in level.ops.tolist()]
    for number, (start, mid, stop) in enumerate(steps, 1):
        here = place[start, stop] = x[stop - 1], TOP + ROW * number
        appears, begins = STEP * number, BEGINS + LEVEL * level_of[stop]
        before = ((0, HIDDEN), (appears - 0.1, HIDDEN))
        style = motion(
            f"line{number}",
            *(*before, (appears, SEEN), (MOVES, SEEN), (MOVES + 0.4, HIDDEN), (WHOLE, HIDDEN)),
        )
        ends = place[start, mid], place[mid, stop]
        lines += [line(each, here, "gradient loop", style) for each in ends]
        below = f";transform:translateY({ROW * (number - level_of[stop])}px)"
        up = ";transform:none"
        style = motion(
            f"node{number}",
            *((seconds, what + below) for seconds, what in before),
            *((appears, SEEN + below), (MOVES, SEEN + below), (MOVED, FAINT + up)),
            *((begins, FAINT + up), (begins + 0.1, SEEN + up), (WHOLE, SEEN + up)),
        )
        nodes.append(node((x[stop - 1], TOP + ROW * level_of[stop]), "gradient", style))
    for k, here in enumerate(inputs.values()):
        nodes.append(node(here, "jacobian" if k else "gradient"))
    words = titles(x, loop.depth, scan.depth, motion)
    style = (
        f".levels *{{animation:{WHOLE:g}s 3 both}}.levels .loop{{opacity:0}}"
        "@media(prefers-reduced-motion:reduce),print{.levels *{animation:none!important}}"
    )
    said = (
        f"For {N} layers a loop computes gradients in {loop.depth} steps, one after the other; "
        f"a scan computes them in {scan.depth} levels, each at once."
    )
    return (
        f'<svg class="levels" viewBox="0 0 {x[-1] + LEFT} {TOP + ROW * N}" role="img" '
        f'aria-label="{said}"><style>{style}{"".join(motion.rules.values())}</style>'
        f"{''.join([*lines, *nodes, *words])}</svg>\n"
    )


def titles(x: list[float], steps: int, levels: int, motion: Motion) -> list[str]:
    """Return what stands above and below the nodes."""
    first = motion("first", (0, SEEN), (MOVES, SEEN), (MOVES + 0.4, HIDDEN), (WHOLE, HIDDEN))
    then = motion("then", (0, HIDDEN), (MOVED - 0.4, HIDDEN), (MOVED, SEEN), (WHOLE, SEEN))
    middle, below = (x[0] + x[-1]) / 2, TOP + ROW * (levels + 3)
    return [
        text(middle, 22, f"a loop: {steps} steps", first, "title loop"),
        text(middle, 22, f"a scan: {levels} levels", then, "title"),
        *(
            text(at, TOP - 15, said)
            for at, said in zip((x[0], x[1], x[-1]), ("∇xₙ", "Jₙ", "J₂"), strict=True)
        ),
        text(middle, below, "● gradients, ∇xₙ to ∇x₁", then, "gradient"),
        text(middle, below + 26, "● transposed Jacobians, and their products", then, "jacobian"),
        text(middle, below + 52, "all of a level at once", then),
    ]


def node(here: Point, kind: str, style: str = "") -> str:
    return f'<circle class="{kind}" cx="{here[0]}" cy="{here[1]}" r="{RADIUS}" {style}/>'


def line(a: Point, b: Point, kind: str, style: str) -> str:
    return f'<path class="{kind}" d="M{a[0]} {a[1]}L{b[0]} {b[1]}" {style}/>'


def text(x: float, y: float, said: str, style: str = "", kind: str = "") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" {style}>{said}</text>'
