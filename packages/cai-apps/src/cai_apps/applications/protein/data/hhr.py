"""Hits of HHsearch and HHblits from their output, .hhr."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cai_mesh.errors import DataError

_ROW = re.compile(r"([QT]) (\S+)\s+(\d+) ([A-Za-z*-]+)\s+(\d+) \((\d+)\)\s*$")
_OTHER = re.compile(r"[QT] (Consensus|ss_\w+|sa_\w+)\s|Confidence\s|\s|$")
_ENTRY = re.compile(r"([0-9][A-Za-z0-9]{3})_([A-Za-z0-9.]+)$")
_NEEDED = ("Probab", "E-value", "Aligned_cols", "Sum_probs")


@dataclass(frozen=True)
class Hit:
    """A sequence that is like the query, and how they lie beside each other.

    Args:
        number: the hit's number in the file, from 1.
        name: as the file has it, to the first space.
        probability: the probability that the two are related, percent.
        e_value: the number of hits as good that are expected by chance.
        aligned: columns where both have a residue, as the file tells.
        sum_probs: the number of these that are expected to be right.
        query, template: the aligned rows, of one length; `-` is a gap.
        query_start, template_start: places of their first letters, from 0.
    """

    number: int
    name: str
    probability: float
    e_value: float
    aligned: int
    sum_probs: float
    query: str
    template: str
    query_start: int
    template_start: int

    @property
    def entry(self) -> tuple[str, str] | None:
        """The entry of the Protein Data Bank, four capitals, and its chain; None: the name is none of these."""
        match = _ENTRY.match(self.name)
        return (match[1].upper(), match[2]) if match else None

    @property
    def sequence(self) -> str:
        """The sequence of the template, without gaps."""
        return self.template.replace("-", "")

    def pairs(self) -> np.ndarray:
        """Places of the query, and of `sequence`, in columns where both have a residue [columns, 2]."""
        rows = np.array([list(self.query), list(self.template)]) != "-"
        places = rows.cumsum(1) - 1
        places[0] += self.query_start
        return places[:, rows.all(0)].T


def read_hhr(path: Path) -> list[Hit]:
    """The hits of a file in their order.

    Raises `DataError` by line where the file is damaged: not of this kind, cut off, rows whose numbers do not fit.
    """
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    starts = [at for at, line in enumerate(lines) if re.match(r"No +\d+\s*$", line)]
    if not lines or not lines[0].startswith("Query "):
        raise DataError(
            f"{path} is no output of HHsearch, line 1",
            got=lines[0][:40] if lines else "an empty file",
            expected="Query NAME",
        )
    head = lines[: starts[0]] if starts else lines
    listed = sum(bool(re.match(r" *\d+ \S.*\(\d+\)\s*$", line)) for line in head)
    if not any(line.startswith(" No Hit") for line in head):
        raise DataError(
            f"{path} is cut off, line {len(lines)}", got="no table of hits", expected=" No Hit  Prob"
        )
    if listed > len(starts):
        raise DataError(
            f"{path} is cut off, line {len(lines)}",
            got=f"alignments of {len(starts)} hits",
            expected=f"{listed}, as its table has",
        )
    ends = [*starts, len(lines)][1:]
    return [_hit(path, lines, *bounds) for bounds in zip(starts, ends, strict=False)]


def _damaged(path: Path, line: int, got: object, expected: object) -> DataError:
    """Lines are counted from 0 here and from 1 in what is said."""
    return DataError(f"{path} is damaged, line {line + 1}", got=got, expected=expected)


def _hit(path: Path, lines: list[str], start: int, end: int) -> Hit:
    number = int(lines[start].split()[1])
    if end - start < 3:
        raise _damaged(path, end - 1, "the end of the file", f"name and numbers of hit {number}")
    if not lines[start + 1].startswith(">"):
        raise _damaged(path, start + 1, lines[start + 1][:40], f">NAME of hit {number}")
    statistics = dict(re.findall(r"([\w-]+)=(\S+)", lines[start + 2]))
    try:
        probability, e_value, aligned, sum_probs = (float(statistics[name]) for name in _NEEDED)
    except (KeyError, ValueError):
        raise _damaged(path, start + 2, lines[start + 2][:60], " ".join(f"{n}=" for n in _NEEDED)) from None
    rows: dict[str, str] = {"Q": "", "T": ""}
    starts: dict[str, int] = {}
    after: dict[str, int] = {}
    last = start + 2
    for at, kind, first, row, final in _rows(path, lines, start + 3, end):
        letters = len(row.replace("-", ""))
        if final - first + 1 != letters or after.get(kind, first) != first:
            raise _damaged(
                path,
                at,
                f"{letters} letters from {first} to {final}",
                f"rows go on at {after.get(kind, first)}",
            )
        if kind == "T" and len(rows["Q"]) != len(rows["T"]) + len(row):
            raise _damaged(path, at, f"{len(row)} columns", "as many as the row of the query above has")
        rows[kind], after[kind], last = rows[kind] + row.upper(), final + 1, at
        starts.setdefault(kind, first - 1)
    if len(starts) < 2 or len(rows["Q"]) != len(rows["T"]):
        raise _damaged(path, last, "no row of the template", f"rows Q and T of hit {number}")
    hit = Hit(
        number, (lines[start + 1][1:].split() or [""])[0], probability, e_value, int(aligned), sum_probs,
        rows["Q"], rows["T"], starts["Q"], starts["T"],
    )  # fmt: skip
    if len(hit.pairs()) != hit.aligned:
        raise _damaged(path, last, f"{len(hit.pairs())} aligned columns", f"{hit.aligned} of hit {number}")
    return hit


def _rows(path: Path, lines: list[str], start: int, end: int) -> Iterator[tuple[int, str, int, str, int]]:
    """Line, kind, first number, letters and last number of the rows of sequences."""
    for at in range(start, end):
        line = lines[at]
        row = None if _OTHER.match(line) else _ROW.match(line)
        if row is not None:
            yield at, row[1], int(row[3]), row[4], int(row[5])
        elif line.startswith(("Q ", "T ")) and not _OTHER.match(line):
            raise _damaged(path, at, line[:60], "NAME FIRST LETTERS LAST (LENGTH)")
