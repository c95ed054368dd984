"""The README's tables hold every public name."""

from __future__ import annotations

import re
from pathlib import Path

import cai_kernels


def test_the_tables_hold_every_public_name():
    text = (Path(__file__).parent.parent / "README.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    told, public = set(re.findall(r"`(\w+)`", "\n".join(rows))), set(cai_kernels.__all__)
    assert told == public, f"not told: {public - told}; not public: {told - public}"
