"""The JSON files of all runs: their kinds, their flaws, and which of them to show."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .experiment import NAMES, Results

# Results that are no experiment's, by a key that only they have.
_KEYS = {"races": "gpu"}
OTHERS = tuple(_KEYS.values())
# Experiments whose files had keys of their own, and what names their pieces there.
_FORMER = {
    "chains": ("grid", ""),
    "cases": ("memory", "chain"),
    "intrinsics": ("intrinsics", "name"),
}
_COME_FROM = ("commit", "dirty", "date", "command", "device", "versions")


@dataclass(frozen=True, eq=False)
class File:
    """A file of results; its kind is the name of the experiment, or one of :data:`OTHERS`."""

    path: Path
    kind: str
    results: Results

    @property
    def device(self) -> str:
        """The name of the device; processors of one name differ in family and model."""
        about = self.results["device"]
        if "gpu" in about:
            return str(about["gpu"])
        family, model, _ = about.get("family, model, stepping", ("", "", ""))
        name = str(about["cpu"])
        return f"{name}, family {family}, model {model}" if family else name

    @property
    def place(self) -> str:
        """The device, and how much of it."""
        cores = self.results["device"].get("cores used")
        return f"{self.device}, {cores} cores" if cores else self.device

    @property
    def on_gpu(self) -> bool:
        return "gpu" in self.results["device"]

    @property
    def asked(self) -> tuple[str, ...]:
        """The parts of a run on a GPU that were asked for; none where all were."""
        return tuple(self.results.get("asked", {}).get("parts", ()))

    @property
    def only(self) -> str:
        """The option that some parts of a run on a GPU were asked for by; "" if all were."""
        return f"--only {' '.join(self.asked)}" if self.asked else ""

    @property
    def commit(self) -> str:
        return str(self.results["commit"])[:8]

    @property
    def day(self) -> str:
        return str(self.results["date"])[:10]

    @property
    def marks(self) -> list[str]:
        """The flaws of the run, in words."""
        results = self.results
        marks = {
            "uncommitted changes": results["dirty"],
            "quick": results.get("quick", False),
            "unfinished": not results.get("done", True),
        }
        parts = {what: ended(part) for what, part in results.get("parts", {}).items()}
        bad = [
            f"{what} {how}"
            for what, how in parts.items()
            if how not in ("ok", "noted") and not results["parts"][what].get("informs")
        ]
        return [mark for mark, holds in marks.items() if holds] + bad


def ended(part: Results) -> str:
    """Say how a part of a run on a GPU, or a case of one, has ended."""
    if part["ok"] and part.get("state") != "running":
        return "ok"
    unfinished = {"left": "not run", "running": "cut off"}
    return unfinished.get(part.get("state", ""), "noted" if part.get("informs") else "failed")


def has_all_parts(files: Iterable[File]) -> bool:
    """Whether one of the files of runs on a GPU has all parts."""
    return any(not file.asked for file in files)


def together(files: Iterable[File]) -> list[list[File]]:
    """Group runs on a GPU that are calls of one run: of a device and a commit, by their dates."""
    groups: dict[tuple[str, ...], list[File]] = {}
    for file in sorted(files, key=lambda file: str(file.results["date"])):
        known = not file.results["dirty"] and file.commit != "unknown"
        of = (file.device, file.commit) if known else (file.device, file.path.name)
        groups.setdefault(of, []).append(file)
    return list(groups.values())


def read(folder: Path) -> tuple[list[File], dict[str, str]]:
    """Read all results in a folder, the preferred ones last; and say why other files are none."""
    files, unread = [], {}
    for path in sorted(folder.glob("*.json")):
        try:
            results = _as_experiment(json.loads(path.read_text()))
            missing = [key for key in _COME_FROM if key not in results]
            kinds = [results.get("experiment"), *(_KEYS[key] for key in results if key in _KEYS)]
        except (ValueError, TypeError, AttributeError) as error:
            unread[path.name] = f"not a JSON object: {error}"
            continue
        known = [kind for kind in kinds if kind in (*NAMES, *OTHERS)]
        if results.get("rehearsal"):
            continue  # of nothing that runs on a GPU
        if missing:
            unread[path.name] = f"without {', '.join(missing)}"
        elif not known:
            unread[path.name] = "of no known kind"
        else:
            files.append(File(path, known[0], results))
    return sorted(files, key=lambda file: (-len(file.marks), file.results["date"])), unread


def _as_experiment(results: Results) -> Results:
    """Return results in the form of experiments, of those that had another one."""
    for key, (kind, name) in _FORMER.items():
        if key in results:
            pieces = results[key]
            if name:
                pieces = {f"{one[name]}{k * ' '}": one for k, one in enumerate(pieces)}
            form = {"experiment": kind, "about": {}, "pieces": pieces}
            return results | form | {"done": "--only" not in results.get("command", "")}
    return results


def newest(files: Iterable[File]) -> dict[tuple[str, ...], File]:
    """Choose the file to show for each kind and device, from files in the order of :func:`read`.

    Runs of other parts on a GPU are shown beside each other.
    """
    return {(file.kind, file.device, *file.asked): file for file in files}
