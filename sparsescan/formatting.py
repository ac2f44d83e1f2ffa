"""How numbers and tables are shown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

# Most columns of a line that is printed.
COLUMNS = 80


def align(rows: Sequence[Sequence[str]], indent: str = "    ") -> list[str]:
    """Return the lines of a table: its first column to the left, all others to the right.

    Columns that are too many for a line come below, behind the first one once more.
    """
    first, *columns = zip(*rows, strict=True)
    blocks = [[first]]
    room = COLUMNS - len(indent) + 2
    for column in columns:
        if sum(2 + max(map(len, each)) for each in (*blocks[-1], column)) > room:
            blocks.append([first])
        blocks[-1].append(column)
    return [line for block in blocks for line in _aligned(block, indent)]


def _aligned(columns: Sequence[Sequence[str]], indent: str) -> list[str]:
    widths = [max(map(len, column)) for column in columns]
    return [
        indent
        + "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in zip(*columns, strict=True)
    ]


def wrap(text: str, indent: str) -> list[str]:
    """Return the lines of a paragraph; all but the first are indented further."""
    further = f"{indent}  "
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=indent,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )


def quantity(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number and what it counts, by default with an "s" unless it is 1."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def format_count(number: int) -> str:
    """Return a number with a prefix of 1000 where it is large."""
    return _scaled(number, 1000, ["", "k", "M", "G", "T", "P"])


def format_bytes(number: int) -> str:
    """Return a number of bytes in the largest binary unit that it fills."""
    return _scaled(number, 1024, [" B", " KiB", " MiB", " GiB", " TiB", " PiB"])


def exact_bytes(number: int) -> str:
    """Return a number of bytes as :func:`format_bytes` does, and exactly, as a limit is given."""
    return f"{format_bytes(number)} ({number:,} bytes)" if number >= 1024 else format_bytes(number)


def format_time(nanoseconds: float) -> str:
    """Return a time in the largest unit that it fills."""
    return _scaled(round(nanoseconds), 1000, [" ns", " µs", " ms", " s"])


def _scaled(number: float, base: int, units: Sequence[str]) -> str:
    power = 0
    # A number that is rounded to the next unit is given in that unit.
    while max(number, float(f"{number:.3g}")) >= base and power < len(units) - 1:
        number /= base
        power += 1
    if power == 0:
        return f"{number}{units[0]}"
    return f"{number:.3g}{units[power]}" if number < 999.5 else f"{number:.0f}{units[power]}"
