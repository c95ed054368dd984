"""What the endings of a file's name say of it: how it is packed, and in which form its text stands."""

from __future__ import annotations

from pathlib import Path

LINES = (".jsonl", ".ndjson")
"""Endings of files that have one JSON object a line."""
LISTED = ".json"
"""The ending of files that are one list of JSON objects, or have one a line."""
DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""What stands between two fields of a line, by the ending of a table's name."""
COLUMNS = ".parquet"
PACKED = (".gz", ".bz2", ".xz")
"""Endings of packed files, after that of what is packed."""


def packing_of(file: Path) -> str:
    """Return the ending by which a file is packed; empty: it is not."""
    ending = file.suffix.lower()
    return ending if ending in PACKED else ""


def form_of(file: Path) -> str:
    """Return the ending that says in which form a file's text stands, in small letters: ".jsonl" of "a.JSONL.gz".

    Files of lines have one form, whichever of `LINES` they end with. Of a packed file without another ending it is its
    packing.
    """
    name = Path(file.stem) if packing_of(file) else file
    ending = name.suffix.lower() or packing_of(file)
    return LINES[0] if ending in LINES else ending
