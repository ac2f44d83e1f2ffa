"""What the pages of the site say of measurements, from the files in ``bench/results``."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective, SphinxRole

from bench import readme
from bench.experiment import load
from bench.files import File
from bench.page import anchor, significant

RESULTS = Path(__file__).parent.parent / "bench" / "results"
# A call is about as fast as another from here on.
_CLOSE = 0.95
_SHOWN = 8


@cache
def rows() -> readme.Measured:
    """Return all rows, which take a second to read."""
    return readme.rows(RESULTS)


def page_of(file: File) -> str:
    """Return the page of the site that shows a file."""
    return f"/benchmarks/results/{anchor(load(file.kind).title)}"


class Ratio(SphinxRole):
    """The ratio of what is timed, as a link to where it is measured.

    ``{ratio}`WORK``` is beside PyTorch, and ``{ratio}`WORK | PEER``` beside whom it names.
    """

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Write it; what lies behind it is said where a pointer stays."""
        self.env.note_reread()  # results may have changed
        work, _, peer = (part.strip() for part in self.text.partition("|"))
        file, row = readme.row(rows(), work, peer)
        theirs, ours = (significant(1e3 * seconds) for seconds in (row.theirs, row.ours))
        where = f"{file.place}, {file.day}"
        said = f"{row.work}. {row.peer}: {theirs} ms; sparsescan: {ours} ms. {where}"
        page = self.env.app.builder.get_relative_uri(self.env.docname, page_of(file)[1:])
        shown = readme.ratio(row.theirs / row.ours)
        link = nodes.reference(shown, shown, refuri=page, internal=True, reftitle=said)
        link["classes"].append("times")
        return [link], []


class Slower(SphinxDirective):
    """List what takes longer than its peers in an experiment, the worst first."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Write the count and the table."""
        self.env.note_reread()  # results may have changed
        (kind,) = self.arguments
        every = readme.beside_others(rows(), kind)
        if not every:
            return self._parsed(["No complete run is among the results yet."])
        slower = [each for each in every if each[1].theirs < each[1].ours]
        slower.sort(key=lambda each: each[1].theirs / each[1].ours)
        clearly = sum(row.theirs < _CLOSE * row.ours for _, row in slower)
        counts = f"**{len(slower):,} of {len(every):,} calls** are slower"
        if clearly < len(slower):
            counts += f", {clearly:,} of them by more than {1 - _CLOSE:.0%}"
        said = [f"{counts}." if len(slower) <= _SHOWN else f"{counts}. The {_SHOWN} slowest:"]
        if slower:
            said += ["", "| call | ratio | against | theirs, ms | ours, ms |", f"|{' --- |' * 5}"]
        for _, row in slower[:_SHOWN]:
            times = (significant(1e3 * seconds) for seconds in (row.theirs, row.ours))
            cells = (row.work, readme.ratio(row.theirs / row.ours), row.peer, *times)
            said.append(f"| {' | '.join(cells)} |")
        places = dict.fromkeys(f"{file.place}, {file.day}" for file, _ in every)
        page = page_of(every[0][0])
        return self._parsed(
            [*said, "", f"[All that was measured]({page}.md): {'; '.join(places)}."]
        )

    def _parsed(self, lines: list[str]) -> list[nodes.Node]:
        parent = nodes.container()
        self.state.nested_parse(StringList(lines), self.content_offset, parent)
        return [parent]
