"""Count the results of another package's tests: ``count.py RESULTS VERSION``.

``RESULTS.xml`` is pytest's report of the tests on what sparsescan puts in the package's place, and
``RESULTS-plain.xml``, if there is one, that of the package by itself: tests that do not pass there
are left out. Prints a row of a table, and writes ``RESULTS.json`` with what tests said that did not
pass: each outcome and text once, with the number of its tests and the first of them. A test that
does not pass

- is *refused* if it ends in an error of sparsescan's, which names what it does not compute;
- has *other words* if it expects an error, and gets one of that class with another text;
- *fails* otherwise.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

OUTCOMES = "pass", "refused", "other words", "fail"
_OTHER_WORDS = "Regex pattern did not match", "does not match"


def outcomes(path: Path) -> dict[str, tuple[str, str]]:
    """Return the outcome of each test that ran, and the first line of what was said."""
    found = {}
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        failures = [*case.iter("failure"), *case.iter("error")]
        said = "; ".join(str(each.get("message")) for each in failures)
        if not failures:
            outcome = "pass"
        elif said.startswith("sparsescan.errors."):
            outcome = "refused"
        elif said.startswith("AssertionError") and any(each in said for each in _OTHER_WORDS):
            outcome = "other words"
        else:
            outcome = "fail"
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome, said
    return found


def not_passed(counted: dict[str, tuple[str, str]]) -> list[dict[str, str | int]]:
    """Return each outcome and text of tests that did not pass, most tests first."""
    tests: dict[tuple[str, str], list[str]] = {}
    for test, found in counted.items():
        if found[0] != "pass":
            tests.setdefault(found, []).append(test)
    return [
        {"outcome": outcome, "said": said, "tests": len(names), "first": names[0]}
        for (outcome, said), names in sorted(tests.items(), key=lambda each: -len(each[1]))
    ]


def main(results: str, version: str) -> None:
    """Count, print and write the results of one package."""
    ours = outcomes(Path(f"{results}.xml"))
    left_out = []
    if (plain := Path(f"{results}-plain.xml")).exists():
        left_out = [test for test, (outcome, _) in outcomes(plain).items() if outcome != "pass"]
    counted = {test: found for test, found in ours.items() if test not in left_out}
    counts = Counter(outcome for outcome, _ in counted.values())
    name = Path(results).name
    cells = [name, version, len(counted), *(counts[each] for each in OUTCOMES)]
    print(f"| {' | '.join(map(str, cells))} |")
    kept = {
        "version": version,
        "run": len(counted),
        "outcomes": {each: counts[each] for each in OUTCOMES},
        "fail on the package itself": left_out,
        "did not pass": not_passed(counted),
    }
    Path(f"{results}.json").write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
