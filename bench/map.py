"""The map of recurrent calls: modules beside PyTorch's, over all sizes; some in JAX.

A piece is a network of one mode and of one width and batch; its points differ in their lengths.
Points take turns, ours and the peer's, each with one thread or two, whichever was faster. Points of
more multiply-adds than a bound are left out, and are counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from sparsescan.torch.calibrate import keep_memory

from . import map_drawings
from .experiment import Drawing, Experiment, Piece, Results, Row, Table
from .map_races import (
    INFERENCE,
    INPUTS,
    KINDS,
    TORCHRECURRENT,
    TRAINING,
    Affine,
    Contender,
    InJax,
    Point,
    Race,
    Recurrent,
    Stack,
    Way,
)
from .page import significant
from .peers import PYTORCH, MissingPeerError
from .races import apart
from .timing import call_for, counting, quiet, sleep, take_rounds

OURS, THEIRS = "sparsescan", "peer"
PYTORCH_KERNEL = "pytorch"  # as `explain` calls it
MODES = TRAINING, INFERENCE
MAP, JAX, STACKS, AFFINE = "map", "jax", "stacks", "affine"
ODD, ODD_JAX = "odd", "odd in jax"  # sizes that are no powers of two
# Ratios below which a point is too slow.
LIMITS = {MAP: 0.95, ODD: 0.9, JAX: 1.0, ODD_JAX: 1.0, STACKS: 0.95, AFFINE: 0.95}
_PEERS = {
    MAP: "PyTorch",
    ODD: "PyTorch, odd sizes",
    JAX: "jax.lax.scan",
    ODD_JAX: "jax.lax.scan, odd sizes",
    STACKS: "PyTorch, pruned stacks",
    AFFINE: "PyTorch, affine_scan",
}

# Of parts that are drawn.
_CAPTIONS = {
    MAP: "The time of torch.nn's modules, and for MGU and LiGRU of torchrecurrent's loops,",
    ODD: "The time of torch.nn's modules",
    JAX: "The time of a jitted lax.scan",
    ODD_JAX: "The time of a jitted lax.scan",
}


class Sizes(NamedTuple):
    """A grid."""

    hidden: tuple[int, ...]
    batch: tuple[int, ...]
    steps: tuple[int, ...]


_GRID = Sizes((16, 32, 64, 128, 256, 512), (1, 16, 64, 256), (1, 4, 16, 64, 256, 1000))
# JAX compiles for seconds at each point.
_JAX_GRID = Sizes((16, 64, 256), (1, 16, 64), (1, 16, 256))
# What calls of clients have, and no tile, vector or thread divides.
_ODD_GRID = Sizes((25, 50, 70, 100), (3, 9, 10, 13, 17, 40), (24, 30, 50))
_BOTH_GRID = Sizes((25, 100, 128), (1, 10, 17), (30, 200))
_ODD_JAX_GRID = Sizes((50,), (9, 17), (30,))
_AFFINE_GRID = Sizes((4, 16, 64), (1, 16), (1, 16, 256, 1000))
_STACKS = ((784, 1024, 1024, 10), 0.05), ((784, 1024, 1024, 10), 0.2), ((64, 256, 256, 10), 0.1)
_STACK_BATCHES = 1, 8, 64
_QUICK = Sizes((16,), (1, 16), (1, 16, 64))
_QUICK_KINDS = ("GRU", "MGU")
# Multiply-adds of the largest call that is measured: one to four seconds of two cores.
_MOST, _QUICK_MOST = 100_000_000_000, 10_000_000
# Rounds, of which long calls have fewer, by the seconds for those of one point; seconds of a turn,
# and of the calls that choose a variant.
_ROUNDS, _QUICK_ROUNDS, _SECONDS = 5, 2, 1.5
_TURN, _QUICK_TURN, _TRIAL = 0.02, 0.002, 0.01
# A variant whose call is longer is tried once, unless it takes so many times as long as another. Of
# calls that are very long the variant is that of fewer steps.
_LONG, _ODD, _VERY_LONG = 0.2, 3, 2.0
# How many times as many rounds there may be, if other programs use the cores.
_PATIENCE = 2
# Calls of ours before any that is timed, and the seconds after which there is no other: a module
# records a call when its shape has come a few times.
_FIRST, _PREPARING = 6, 1.0
# How far outputs and gradients may be apart, relative to their norms: rounding may decide on which
# side of a kink of a ReLU a number is.
_BOUND = 1e-2
_SHOWN = 40
# Calls that stand among the lines of all experiments, and in the tables of README and site.
_LINES = (
    ("GRU, inference, H=32, B=1", "T=1"),
    ("LSTM, inference, H=32, B=1", "T=1"),
    ("GRU, training, H=32, B=1", "T=16"),
    ("LSTM, training, H=32, B=16", "T=16"),
    ("LSTM, training, H=128, B=64", "T=64"),
    ("LSTM, training, H=512, B=1", "T=64"),
    ("LSTM, inference, H=128, B=16", "T=64"),
)


# -- Measuring ------------------------------------------------------------------------------------


@dataclass
class _Runner:
    """A point that is timed: the chosen way of both, and the medians of turns."""

    ways: dict[str, Way]
    usual: dict[str, float]  # seconds of a call of each
    about: Results
    rounds: int
    samples: dict[str, list[float | None]] = field(default_factory=lambda: {OURS: [], THEIRS: []})


def measure(points: Sequence[Point], most: int, quick: bool) -> Results:
    """Time ours and the peer at all points, which take turns.

    Returns
    -------
    dict
        ``points`` by their names. Each has ``samples``: the median seconds of the calls of each
        turn, null for a round without one. It has the ``variants`` that were faster, how far the
        outputs and gradients are apart at most (``difference``), and, where modules can tell, the
        ``kernel`` that ran and the seconds that were ``predicted``. Beside them are
        ``cores_others_used`` in each round, ``missing`` peers, and the multiply-adds of points that
        were ``left out``, since these are more than `most`.
    """
    keep_memory()
    left_out = {each.name: each.work for each in points if each.work > most}
    runners: dict[str, _Runner] = {}
    missing: dict[str, str] = {}
    likely: dict[str, str] = {}
    for each in points:
        if each.work <= most:
            try:
                runners[each.name] = runner = _runner(each.race(), likely, quick)
                likely = runner.about["variants"]
            except MissingPeerError as error:
                missing["peer"] = str(error)
    used = _take_turns(runners, _QUICK_TURN if quick else _TURN)
    return {
        "points": {name: {"samples": each.samples, **each.about} for name, each in runners.items()},
        "cores_others_used": used,
        "missing": missing,
        "left out": left_out,
    }


def _runner(race: Race, likely: Mapping[str, str], quick: bool) -> _Runner:
    """Choose the ways of both contenders, first those that are likely; compare the results."""
    ways: dict[str, Way] = {}
    variants: dict[str, str] = {}
    taken: dict[str, float] = {}
    results = {}
    for who, contender in ((OURS, race.ours), (THEIRS, race.theirs)):
        results[who], seconds = _tried(contender, likely.get(who), may_prepare=who == OURS)
        variants[who] = min(seconds, key=lambda name: seconds[name])
        ways[who], taken[who] = contender.ways[variants[who]], seconds[variants[who]]
    assert results[OURS].keys() == results[THEIRS].keys()
    difference = max(apart(results[OURS], results[THEIRS], _BOUND).values())
    about: Results = {"variants": variants, "difference": difference}
    with ways[OURS].within():
        explained = race.explained()
    if explained is not None:
        about |= {"kernel": explained.kernel, "predicted": explained.predicted}
    fit = max(1, int(_SECONDS / sum(taken.values())))
    return _Runner(ways, taken, about, min(fit, _QUICK_ROUNDS if quick else _ROUNDS))


def _tried(
    contender: Contender, likely: str | None, *, may_prepare: bool
) -> tuple[Mapping[str, Any], dict[str, float]]:
    """Return what the first call computes, and the shortest seconds of the ways.

    A first call that is long may be so since it prepares or compiles. If the call of the likely way
    is very long, no other one is tried.
    """
    result: dict[str, Any] | None = None
    seconds: dict[str, float] = {}
    for name in sorted(contender.ways, key=lambda name: name != likely):
        way = contender.ways[name]
        sleep()
        with way.within():
            way.clear()
            start = time.perf_counter()
            output = way.call()
            first = time.perf_counter() - start
            if result is None:
                result = {key: each.copy() for key, each in contender.read(output).items()}
            end = start + _PREPARING
            for _ in range(_FIRST if may_prepare else 0):
                start = time.perf_counter()
                if start > end:
                    break
                way.clear()
                way.call()
                first = time.perf_counter() - start
            is_odd = first > _ODD * min(seconds.values(), default=0)
            is_again = first <= _LONG or (may_prepare and is_odd)
            # Some: where a thread sleeps, a trial may be of one call.
            trials = [min(call_for(way.call, _TRIAL, way.clear)) for _ in range(4 * is_again)]
            seconds[name] = min(trials, default=first)
        if name == likely and seconds[name] > _VERY_LONG:
            break
    assert result is not None
    return result, seconds


def _take_turns(runners: Mapping[str, _Runner], turn: float) -> list[float]:
    """Add rounds, more of them if other programs use the cores; how many cores those used."""
    wanted = max((each.rounds for each in runners.values()), default=0)

    def take(used: list[float]) -> None:
        order = (OURS, THEIRS) if len(used) % 2 else (THEIRS, OURS)
        for each in runners.values():
            # Points that have had their rounds wait for the others.
            had = [one is not None for one in each.samples[OURS]]
            calm = sum(one and is_calm for one, is_calm in zip(had, quiet(used), strict=True))
            is_due = calm < each.rounds and sum(had) < _PATIENCE * each.rounds
            for who in order:
                taken = _turn(each.ways[who], turn, each.usual[who]) if is_due else None
                each.samples[who].append(taken)

    return take_rounds(take, wanted, _PATIENCE)


def _turn(way: Way, length: float, usual: float) -> float:
    """Return the median seconds of the calls of a turn.

    Threads of the contender before it may still wait for work, and keep a core, in the first call.
    """
    sleep()
    with way.within():
        taken = call_for(way.call, length / 2, way.clear)
        # Else it counts: what takes long warms up within a call.
        if taken[0] < length or taken[0] > _ODD * usual:
            taken = call_for(way.call, length, way.clear)
    return round(median(taken), 9)


# -- The experiment -------------------------------------------------------------------------------


class Group(NamedTuple):
    """Points that are measured together, and where their ratios stand."""

    part: str  # MAP, JAX, STACKS or AFFINE
    name: str  # of the network
    mode: str
    hidden: int  # 0 for what has no width
    batch: int
    points: tuple[Point, ...]

    @property
    def key(self) -> str:
        """Name the piece."""
        letter = "N" if self.part == AFFINE else "H"
        width = f", {letter}={self.hidden}" if self.hidden else ""
        batch = f", B={self.batch}" if self.batch else ""
        return f"{self.name}, {self.mode}{width}{batch}"


def groups(quick: bool) -> Iterator[Group]:
    """Yield all groups, the map first."""
    kinds = _QUICK_KINDS if quick else KINDS
    for kind in kinds:
        yield from _of_grid(MAP, kind, _QUICK if quick else _GRID, partial(Recurrent, kind))
    for kind in kinds:
        if kind not in TORCHRECURRENT:
            sizes = Sizes((16,), (1,), (1, 4)) if quick else _JAX_GRID
            yield from _of_grid(JAX, f"{kind} in JAX", sizes, partial(InJax, kind))
            name, few = f"{kind} of odd sizes", Sizes((5,), (3,), (7, 8))
            make = partial(Recurrent, kind)
            yield from _of_grid(ODD, name, few if quick else _ODD_GRID, make)
            make, name = partial(make, both=True), f"{name}, both directions"
            yield from _of_grid(ODD, name, few if quick else _BOTH_GRID, make)
            name, own = f"{kind} of odd sizes in JAX", few if quick else _ODD_JAX_GRID
            yield from _of_grid(ODD_JAX, name, own, partial(InJax, kind))
    for widths, kept in _STACKS[-1:] if quick else _STACKS:
        name = f"stack {'-'.join(map(str, widths))}, pruned by {1 - kept:.0%}"
        for mode in MODES:
            own = tuple(Stack(widths, kept, mode, batch) for batch in _STACK_BATCHES)
            yield Group(STACKS, name, mode, 0, 0, own)
    for is_diagonal in (True, False):
        name = f"affine_scan, {'diagonal' if is_diagonal else 'dense'}"
        sizes = Sizes((4,), (1,), (1, 16)) if quick else _AFFINE_GRID
        yield from _of_grid(
            AFFINE, name, sizes, lambda mode, *own, d=is_diagonal: Affine(d, own[0], mode, *own[1:])
        )


def _of_grid(part: str, name: str, sizes: Sizes, make: Callable[..., Point]) -> Iterator[Group]:
    for mode in MODES:
        for hidden in sizes.hidden:
            for batch in sizes.batch:
                own = tuple(make(mode, hidden, batch, steps) for steps in sizes.steps)
                yield Group(part, name, mode, hidden, batch, own)


def _most(quick: bool) -> int:
    return _QUICK_MOST if quick else _MOST


def _pieces(quick: bool) -> Iterable[Piece]:
    for group in groups(quick):
        yield Piece(group.key, partial(measure, group.points, _most(quick), quick))


def _about(quick: bool) -> Results:
    counts = [each.work > _most(quick) for group in groups(quick) for each in group.points]
    return {
        "training": "forward pass, and backward pass from a gradient of all outputs, into all "
        "parameters and the input (in JAX the first state, too); gradients are None before; "
        "float32, no optimiser",
        "inference": "forward pass under torch.inference_mode, in JAX without gradients",
        "sizes": "input of 32 entries; H units, B samples, T steps",
        "PyTorch": "the module that sparsescan.torch.convert was given a copy of: of torch.nn, of "
        "torchrecurrent 0.2.5 (MGU, LiGRU), or a stack that torch.nn.utils.prune has pruned; of "
        "affine_scan the loop over steps",
        "JAX": "jitted lax.scan over the equations of the cell, gates of one vector in one matrix "
        "product; the faster of two forms, the fastest unroll of 1, 4 and 16, "
        "unless 4 is slower by a quarter. Only H = 16, 64, 256, B = 1, 16, 64 and T = 1, "
        "16, 256, and few odd sizes: it compiles for seconds at each point",
        "threads": "two or one, whichever was faster, of each contender (of lax.scan two cores or "
        "one)",
        "a time": "the median over rounds of the median of a turn; rounds in which others used the "
        "cores do not count",
        "left out": f"{sum(counts)} of {len(counts):,} points: calls of more than "
        f"{_most(quick):,} multiply-adds, which are B·T·H·(H + {INPUTS})·gates, "
        "and three times that in training",
    }


# -- What is shown --------------------------------------------------------------------------------


class Ratio(NamedTuple):
    """The times of a point, ours and the peer's."""

    group: Any
    point: str
    ours: float
    theirs: float
    kernel: str  # that ran, where a module can tell

    @property
    def ratio(self) -> float:
        """The peer's time over ours."""
        return self.theirs / self.ours

    @property
    def is_pytorch(self) -> bool:
        """Whether PyTorch's own kernel ran."""
        return self.kernel == PYTORCH_KERNEL


def ratios(results: Results, every: Iterable[Any]) -> list[Ratio]:
    """Return all ratios there are of some groups, in their order."""
    found = []
    for group in every:
        piece = results["pieces"].get(group.key, {"points": {}})
        for name, point in piece["points"].items():
            calm = quiet(piece["cores_others_used"])
            both = (median(counting(point["samples"][who], calm)) for who in (OURS, THEIRS))
            found.append(Ratio(group, name, *both, point.get("kernel", "")))
    return found


def summed_up(peer: str, name: str, own: Sequence[Ratio], limit: float) -> list[str]:
    """Return the line of a table: medians, ends, and how many are below a limit."""
    values = [each.ratio for each in own]
    numbers = [f"{value:.2f}" for value in (median(values), min(values), max(values))]
    below = sum(value < limit for value in values)
    kernels = sum(each.is_pytorch for each in own)
    return [f"beside {peer}", name, *numbers, f"{below} of {len(own)}", f"{limit:g}", f"{kernels}"]


SUMMED_UP = ["median", "least", "most", "below", "the limit", "PyTorch's kernel"]


def worst(shown: Sequence[tuple[Ratio, float]], count: int) -> Table:
    """Return the table of all ratios that are below a limit, and of others that come next."""
    in_order = sorted(shown, key=lambda each: each[0].ratio / each[1])
    count = max(count, sum(each.ratio < limit for each, limit in shown))
    rows = [
        [
            *("the worst points", f"{each.group.key}, {each.point}", f"{each.ratio:.2f}"),
            *(significant(1e3 * taken) for taken in (each.theirs, each.ours)),
            *("below" * (each.ratio < limit), each.kernel),
        ]
        for each, limit in in_order[:count]
    ]
    numbers = ["ratio", "theirs, ms", "ours, ms"]
    return Table(["points", "call", *numbers, "the limit", "ran"], rows, numbers)


def grid_of(peer: str, own: Sequence[Ratio], name: Callable[[Any], str]) -> Table:
    """Return the table of ratios, with a line for each group."""
    rows: dict[str, dict[str, str]] = {}
    for each in own:
        rows.setdefault(name(each.group), {})[each.point] = f"{each.ratio:.2f}"
    heads = list(dict.fromkeys(each.point for each in own))
    lines = [
        [f"beside {peer}", key, *(row.get(head, "") for head in heads)] for key, row in rows.items()
    ]
    return Table(["peer", "call", *heads], lines, heads)


def _tables(results: Results) -> list[Table]:
    every = ratios(results, groups(results["quick"]))
    rows = []
    for part, limit in LIMITS.items():
        own = [each for each in every if each.group.part == part]
        names = dict.fromkeys(each.group.name for each in own) if part in _CAPTIONS else {}
        for mode in MODES:
            for name in ("all", *names):
                of = [r for r in own if r.group.mode == mode and name in ("all", r.group.name)]
                if of:
                    rows.append(summed_up(_PEERS[part], f"{name}, {mode}", of, limit))
    grids = [
        grid_of(_PEERS[part], [r for r in every if r.group.part == part], lambda group: group.key)
        for part in (STACKS, AFFINE)
    ]
    points = worst([(each, LIMITS[each.group.part]) for each in every], _SHOWN)
    return [Table(["peer", "calls", *SUMMED_UP], rows, SUMMED_UP), points, *grids]


def _rows(results: Results) -> list[Row]:
    every = ratios(results, groups(results["quick"]))
    found = {(each.group.key, each.point): each for each in every}
    return [
        Row(f"{key}, {point}", PYTORCH, found[key, point].theirs, found[key, point].ours)
        for key, point in _LINES
        if (key, point) in found
    ]


def _drawings(results: Results) -> list[Drawing]:
    drawings = []
    for part, limit in ((part, LIMITS[part]) for part in _CAPTIONS):
        own = [group for group in groups(results["quick"]) if group.part == part]
        cells = [_cell(each.group, each.point, each) for each in ratios(results, own)]
        if not cells:
            continue
        for group in own:
            left_out = results["pieces"].get(group.key, {}).get("left out", ())
            cells += [_cell(group, point, None) for point in left_out]
        said = map_drawings.caption(_CAPTIONS[part], limit, cells)
        figure = map_drawings.draw(cells, limit)
        drawings.append(Drawing(f"All sizes beside {_PEERS[part]}", said, figure))
    return drawings


def _cell(group: Group, point: str, of: Ratio | None) -> map_drawings.Cell:
    sizes = group.hidden, group.batch, int(point.removeprefix("T="))
    ratio, is_pytorch = (None, False) if of is None else (of.ratio, of.is_pytorch)
    return map_drawings.Cell(group.name, group.mode, *sizes, ratio, is_pytorch)


EXPERIMENT = Experiment(
    "map", "All sizes of recurrent calls", _pieces, _about, _drawings, _rows, _tables
)
