"""``python -m bench NAME``: an experiment by its name; ``python -m bench report``: the page.

Every experiment writes a JSON file, piece by piece, and goes on where it was cut off. The report
turns all files there are into one HTML page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .experiment import NAMES, RESULTS, as_text, load, run

_ROOT = Path(__file__).parent.parent
# With tables that are made of results.
_PAGES = _ROOT / "README.md", _ROOT / "docs" / "for-me.md"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="NAME")
    for name in NAMES:
        command = commands.add_parser(name)
        command.add_argument("--quick", action="store_true", help="small sizes: does it work?")
        command.add_argument("--only", default="", help="pieces with these words in their keys")
        command.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    report = commands.add_parser("report")
    report.add_argument("--results", type=Path, default=RESULTS, help="folder with the results")
    report.add_argument("--output", type=Path, default=Path("report.html"), help="file to write")
    report.add_argument(
        "--readme", action="store_true", help="renew the tables of the README and the site, too"
    )
    options = parser.parse_args(arguments)
    if options.command != "report":
        experiment = load(options.command)
        path = run(experiment, options.quick, options.output, options.only)
        print(as_text(experiment.tables(json.loads(path.read_text()))))
        print(path)
        return 0
    from .readme import update_tables
    from .report import write

    print(write(options.results, options.output))
    if options.readme:
        for page in _PAGES:
            update_tables(page, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
