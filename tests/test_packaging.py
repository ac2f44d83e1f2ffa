"""Versions that several files name agree."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def config() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_newest_version_is_everywhere(config: configparser.ConfigParser) -> None:
    version = config["metadata"]["version"]
    assert re.search(rf"^version: {re.escape(version)}$", text("CITATION.cff"), re.MULTILINE)
    headings = re.findall(r"^## (.*)", text("CHANGELOG.md"), re.MULTILINE)
    released = [heading for heading in headings if heading != "Unreleased"]
    (number, date), *_ = (re.fullmatch(r"(\S+) \((.*)\)", each).groups() for each in released)  # type: ignore[union-attr]
    assert number == version
    assert f"date-released: {date}" in text("CITATION.cff")


def test_the_lowest_versions_are_those_that_are_checked(
    config: configparser.ConfigParser,
) -> None:
    lowest = dict(re.findall(r"^(\w+)>=(.*)$", config["options"]["install_requires"], re.M))
    assert lowest == dict(re.findall(r"^(\w+)==(.*)\.\*$", text(".ci/oldest"), re.MULTILINE))
    page = text("docs/start.md")
    for name, version in lowest.items():
        assert re.search(rf"{name} \({re.escape(version)}\)", page, re.IGNORECASE), name
    pythons = re.findall(r"Python :: (3\.\d+)$", config["metadata"]["classifiers"], re.MULTILINE)
    assert config["options"]["python_requires"] == f">={pythons[0]}"
    assert f"Python is {pythons[0]} to {pythons[-1]}" in page
    assert f"Python {pythons[0]} or later" in text("README.md")
