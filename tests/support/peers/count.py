"""Count the results of another package's tests: ``count.py NAME OURS.xml [PLAIN.xml]``.

Prints a row of a table: tests that ran, that passed, that failed, and that met an error by which
sparsescan refuses what it does not compute. A test that does not pass in PLAIN.xml, where the
package runs by itself, is left out. Names of tests that did not pass go to the standard error.
"""

from __future__ import annotations

import sys
from xml.etree import ElementTree


def outcomes(path: str) -> dict[str, str]:
    """Return the outcome of each test that ran: "pass", "fail" or "refused"."""
    found = {}
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        failures = [*case.iter("failure"), *case.iter("error")]
        if case.find("skipped") is not None:
            continue
        if not failures:
            found[name] = "pass"
        else:
            is_refused = any("sparsescan.errors." in str(each.get("message")) for each in failures)
            found[name] = "refused" if is_refused else "fail"
    return found


def main(name: str, ours: str, plain: str | None = None) -> None:
    """Print the row of one package."""
    results = outcomes(ours)
    if plain is not None:
        passed = {test for test, outcome in outcomes(plain).items() if outcome == "pass"}
        results = {test: outcome for test, outcome in results.items() if test in passed}
    counts = [list(results.values()).count(each) for each in ("pass", "fail", "refused")]
    print(f"| {name} | {len(results)} | {' | '.join(map(str, counts))} |")
    for test, outcome in results.items():
        if outcome != "pass":
            print(f"{name}: {outcome}: {test}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
