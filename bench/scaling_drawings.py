"""The pictures of :mod:`bench.scaling`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import drawing
from .drawing import BLUE, GREEN, ORANGE, legend, plot_with_spread
from .experiment import Drawing, Results
from .resident import MIB
from .scaling_model import ALONE, CHAINS, INFINIBAND

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GREY = "grey"
_STYLES: dict[str, dict[str, Any]] = {
    ALONE: {"color": _GREY, "marker": "D", "ms": 4.5},
    "vectors": {"color": BLUE, "marker": "s", "ms": 5},
    "products": {"color": ORANGE, "marker": "o", "ms": 5},
    "groups": {"color": GREEN, "marker": "^", "ms": 6},
    "auto": {"color": "black", "marker": "o", "ms": 10, "mfc": "none", "ls": ""},
}


def drawings(results: Results) -> list[Drawing]:
    pieces = results["pieces"]
    times = [piece for piece in pieces.values() if "scans" in piece]
    limited = [piece for piece in pieces.values() if "limit_bytes" in piece]
    drawings = [_strong(times), _weak(times)] if times else []
    if "model" in pieces:
        drawings += [_model(pieces["model"]), _beyond(pieces["model"])]
    return drawings + ([_memory(limited)] if limited else [])


# -- Measured -------------------------------------------------------------------------------------


def _strong(times: list[Results]) -> Drawing:
    names = _names(times, lambda scan: scan["n"] == CHAINS[scan["chain"]].n)
    figure = _measured(times, names, lambda name, ranks: CHAINS[name].n)
    caption = (
        "A scan of the same chain on more and more ranks, one thread each, and by one process: "
        "medians, and the quartiles as bars. Dashed is what the model predicts from constants that "
        f"were measured in the same run; it takes every rank to have a core.{_shared(times)} "
        f"{_over_predicted(times)} Parts of the chain are combined by gradients, which every rank "
        "hands on, or by products, for which all ranks work at once; the ring is what the plan "
        "chooses. A product of dense d×d matrices takes d times as long as one with a gradient, so "
        "that more than d ranks are needed for products to pay; samples in groups need no products."
    )
    return Drawing("Strong scaling", caption, figure)


def _weak(times: list[Results]) -> Drawing:
    names = [name for name in _names(times, lambda scan: True) if CHAINS[name].each]
    figure = _measured(times, names, lambda name, ranks: (CHAINS[name].each or 0) * ranks)
    steps = "; ".join(f"{CHAINS[name].each:,} steps of the {CHAINS[name].what}" for name in names)
    caption = (
        f"As many steps for each rank: {steps}. One process scans the whole chain.{_shared(times)}"
    )
    return Drawing("Weak scaling", caption, figure)


def _names(times: list[Results], wanted: Callable[[Results], bool]) -> list[str]:
    measured = {scan["chain"] for piece in times for scan in piece["scans"] if wanted(scan)}
    return [name for name in CHAINS if name in measured]


def _shared(times: list[Results]) -> str:
    """Say which ranks shared cores, if any did."""
    shared = [piece["ranks"] for piece in times if piece["oversubscribed"]]
    if not shared:
        return ""
    ranks = ", ".join(map(str, shared))
    return f" On {ranks} ranks (shaded) several shared one of the {times[0]['cores']} cores."


def _over_predicted(times: list[Results]) -> str:
    """How the times of what plans choose compare with predictions."""
    said = []
    for piece in times:
        ratios = [
            scan["median_seconds"][way] / scan["predicted_seconds"][way]
            for scan in piece["scans"]
            for way in ("auto", "groups")
            if way in scan["median_seconds"]
        ]
        said.append(f"{min(ratios):.2g} to {max(ratios):.2g} on {piece['ranks']}")
    return f"What plans choose takes, over what is predicted, {', '.join(said)}."


def _measured(
    times: list[Results], names: Sequence[str], steps: Callable[[str, int], int]
) -> Figure:
    """Return a panel for each chain: milliseconds over ranks."""
    figure, panels = _panels(len(names) or 1, min(len(names), 2) or 1)
    for axes, name in zip(panels, names, strict=False):
        scans = {
            piece["ranks"]: scan
            for piece in times
            for scan in piece["scans"]
            if (scan["chain"], scan["n"]) == (name, steps(name, piece["ranks"]))
        }
        for way, style in _STYLES.items():
            chosen = {p: scan for p, scan in scans.items() if way in scan["samples_seconds"]}
            spreads = {
                p: drawing.quartiles(scan["samples_seconds"][way], 1e-3)
                for p, scan in chosen.items()
            }
            if way == "auto":  # a ring, without bars
                middles = [middle for _, middle, _ in spreads.values()]
                axes.errorbar(list(chosen), middles, None, label=way, lw=1.5, **style)
            elif chosen:
                plot_with_spread(axes, spreads, label=way, lw=1.5, **style | {"capsize": 0})
                said = [1e3 * scan["predicted_seconds"][way] for scan in chosen.values()]
                axes.plot(list(chosen), said, ls="--", lw=1.2, color=style["color"])
        _over_ranks(axes, sorted(scans), (1, 2, 5))
        shared = [p["ranks"] for p in times if p["oversubscribed"] and p["ranks"] in scans]
        if shared:
            axes.axvspan(min(shared) / 1.3, max(shared) * 1.15, color=_GREY, alpha=0.12, lw=0)
        axes.set_title(CHAINS[name].what, size=10)
        axes.set_ylabel("ms of a scan")
    panels[0].plot([], [], ls="--", color=_GREY, label="predicted")
    legend(figure, panels, 6, loc="outside upper center")
    return figure


# -- By the model ---------------------------------------------------------------------------------


def _model(model: Results) -> Drawing:
    networks = [network["name"] for network in model["networks"]]
    figure, panels = _panels(2 * len(networks), 2, sharey=True)
    for k, network in enumerate(networks):
        strong = [curve for curve in model["strong"] if curve["network"] == network]
        weak = [curve for curve in model["weak"] if curve["network"] == network]
        for axes, curves, what in zip(
            panels[2 * k : 2 * k + 2], (strong, weak), ("strong", "weak"), strict=True
        ):
            for curve, dashes in zip(curves, ("-", "--", ":"), strict=False):
                n = f"n={curve['n'][-1]:,}" if what == "strong" else f"{curve['n'][0]:,} a rank"
                label = f"{'diagonal' if curve['chain'] == 'diagonal' else 'dense 20×20'}, {n}"
                axes.plot([], [], ls=dashes, color=_GREY, label=label)
                for way in ("vectors", "products"):
                    color, ms = _STYLES[way]["color"], 1e3 * np.array(curve[way], float)
                    axes.plot(curve["ranks"], ms, ls=dashes, lw=1.6, color=color)
            _over_ranks(axes, weak[0]["ranks"][:: 2 if len(weak[0]["ranks"]) > 8 else 1])
            axes.legend(fontsize=8, frameon=False)
            axes.set_title(f"{what} scaling, {_named(network)}", size=10)
        panels[2 * k].set_ylabel("predicted ms of a scan")
    for way in ("vectors", "products"):
        panels[0].plot([], [], color=_STYLES[way]["color"], lw=1.6, label=f"by {way}")
    panels[0].legend(fontsize=8, frameon=False)
    caption = (
        "By the calibrated model, on up to 4,096 ranks, each with a core as fast as here: with the "
        f"constants of the network of this machine, and with those of an {INFINIBAND.name} ("
        f"{INFINIBAND.latency / 1e3:g} µs, {1 / INFINIBAND.inverse_bandwidth:g} GB/s). By vectors "
        "a scan takes as long as on one rank, and a message for each more; by products what n/p "
        "steps and log p rounds of an exclusive scan by recursive doubling take. Where products "
        "could not pay, there is no line; a sudden fall is where a part begins to fit the cache."
    )
    return Drawing("Scaling to 4,096 ranks", caption, figure)


def _named(network: str) -> str:
    return f"the {network}" if network == INFINIBAND.name else "this machine's network"


def _beyond(model: Results) -> Drawing:
    curves = model["beyond"]
    few = curves[0]["n"][0]
    figure, (axes,) = _panels(1, 1)
    said = []
    for curve, (color, marker) in zip(curves, ((BLUE, "s"), (ORANGE, "o")), strict=True):
        ranks, name, fit = np.array(curve["ranks"]), _named(curve["network"]), curve["fit"]
        products = 1e6 * np.array(curve["products"], float)
        axes.plot(ranks, products, ls="", marker=marker, ms=5, color=color, label=name)
        beyond = ranks[ranks >= few]
        line = 1e6 * (fit["a"] + fit["b"] * np.log2(beyond))
        axes.plot(beyond, line, lw=1.3, color=color)
        said.append(
            f"{1e6 * fit['a']:,.0f} + {1e6 * fit['b']:,.0f} log₂ p µs on {name}, off by "
            f"{fit['off']:.1%} at most"
        )
    _over_ranks(axes, curves[0]["ranks"])
    axes.set_yscale("linear")
    axes.set_ylim(0, None)
    axes.axvline(few, color=_GREY, ls="--", lw=1.2, label=f"p = n = {few}")
    axes.set_ylabel("predicted µs of a scan by products")
    axes.legend(frameon=False, fontsize=9)
    caption = (
        f"{few} steps of 20×20 by products: from p = n on every rank has one step or none, and a "
        "doubling of p adds one round to the exclusive scan and one to both agreements. The lines "
        f"are {'; '.join(said)}. That is the Θ(log p) of the paper's section 3.6."
    )
    return Drawing("More ranks than steps", caption, figure)


# -- Memory ---------------------------------------------------------------------------------------


def _memory(limited: list[Results]) -> Drawing:
    figure, (axes,) = _panels(1, 1)
    for way in ("vectors", "products"):
        runs = {
            piece["ranks"]: run
            for piece in limited
            for run in piece["runs"]
            if run["schedule"] == way
        }
        style, ranks = _STYLES[way], list(runs)
        peaks = [max(run["peak_bytes"]) / MIB for run in runs.values()]
        said = [max(run["predicted_bytes"]) / MIB for run in runs.values()]
        axes.plot(ranks, peaks, ls="", label=f"by {way}", **style)
        axes.plot(ranks, said, ls="--", lw=1.2, color=style["color"])
        for count, peak, run in zip(ranks, peaks, runs.values(), strict=True):
            if run["refused"]:
                axes.plot(count, peak, "x", color="black", ms=13, mew=1.4, zorder=0)
    first = limited[0]
    limit = first["limit_bytes"] / MIB
    axes.axhline(limit, color=_GREY, lw=1.5)
    axes.annotate("the limit of a rank", (1, limit), (0, 4), textcoords="offset points", size=9)
    axes.plot([], [], ls="--", color=_GREY, label="predicted")
    axes.plot([], [], "x", ls="", color="black", ms=9, label="refused: over the limit")
    _over_ranks(axes, [piece["ranks"] for piece in limited])
    ticks = [2.0**k for k in range(2, 11)]
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in ticks if low < tick < high])
    axes.set_ylabel("MiB of the rank that needs most")
    axes.legend(frameon=False, fontsize=9)
    errors = [run["refused"] for piece in limited for run in piece["runs"] if run["refused"]]
    caption = (
        f"{first['n']:,} dense steps of {first['size']}×{first['size']}, "
        f"{first['chain_bytes'] / MIB:,.0f} MiB, of which each rank makes its own part: resident "
        "memory at the peak, with the Jacobians, the gradients and all that the scan needs, beside "
        "what was resident before. Every rank is then given no more than the limit; where it does "
        f"not do, all raise the same error: “{errors[0] if errors else ''}”. Answers agree with "
        "those of a scan that makes one step after the other."
    )
    return Drawing("Memory of a rank", caption, figure)


# -- Parts of all pictures -------------------------------------------------------------------------


def _panels(count: int, columns: int, **options: Any) -> tuple[Figure, list[Axes]]:
    return drawing.panels_in_rows(count, columns, 7 if columns == 1 else 10.5, **options)


def _over_ranks(axes: Axes, ranks: Sequence[int], digits: tuple[int, ...] = (1,)) -> None:
    """Both axes are logarithmic; times are named that begin with these digits."""
    from matplotlib.ticker import NullLocator

    axes.set(xscale="log", yscale="log", xlabel="ranks")
    axes.set_xticks(ranks, [f"{count:,}" for count in ranks])
    axes.xaxis.set_minor_locator(NullLocator())
    drawing.decades(axes.yaxis, "{:,.10g}", digits)
    axes.grid(alpha=0.25)
