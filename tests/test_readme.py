"""The README's programs run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(import .*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[block.split("\n")[-2][:40] for block in BLOCKS])
def test_program(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {})


def test_there_are_programs() -> None:
    assert len(BLOCKS) >= 3
