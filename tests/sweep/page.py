"""docs/models.md, written from docs/proof/sweep.json."""

from __future__ import annotations


def write(table) -> None:
    pass
