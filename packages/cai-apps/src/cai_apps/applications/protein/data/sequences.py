"""Sequences and alignments from FASTA, A3M and Stockholm files."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cai_apps.applications.protein.chemistry import GAP, LETTERS, UNKNOWN
from cai_mesh.errors import DataError

STANDING_FOR = {"B": "D", "J": "X", "O": "X", "U": "C", "Z": "E"}
"""Letters that stand for one of two residues, or for a rare one."""
_CHAINS = re.compile(r"#(\d+(?:,\d+)*)(?:[ \t]+(\d+(?:,\d+)*))?[ \t]*(?:\r?\n|$)")
_NUMBERS = {letter: number for number, letter in enumerate(LETTERS)} | {"X": UNKNOWN, "-": GAP}
_NUMBERS |= {letter: _NUMBERS[other] for letter, other in STANDING_FOR.items()}


@dataclass(frozen=True)
class Alignment:
    """Sequences beside the one whose structure is asked for, which is the first.

    Args:
        names: the names of the sequences.
        residues: numbers of the residues [sequences, residues], uint8; a gap is `GAP`.
        deletions: the number of residues of a sequence that lie before this one and beside none of the first, uint16.
    """

    names: tuple[str, ...]
    residues: np.ndarray
    deletions: np.ndarray


def numbers_of(sequence: str, where: str) -> np.ndarray:
    """Numbers of the letters of a sequence without gaps, uint8.

    Raises `DataError` for an empty sequence, or a letter that is no residue, by its place.
    """
    if not sequence:
        raise DataError(f"{where} is empty", expected=f"letters of {LETTERS}")
    for place, letter in enumerate(sequence.upper(), 1):
        if letter not in _NUMBERS or letter == "-":
            raise DataError(
                f"{where} has a letter that is no residue",
                got=f"{letter!r} at residue {place}",
                expected=f"{LETTERS}, X for an unknown one, or B, J, O, U, Z",
            )
    return np.array([_NUMBERS[letter] for letter in sequence.upper()], np.uint8)


def read_fasta(path: Path) -> list[tuple[str, str]]:
    """(name, sequence) of each entry.

    Raises `DataError` for a file without an entry, or text before the first.
    """
    entries = list(_entries(path))
    if not entries:
        raise DataError(
            f"{path} has no sequence", expected="lines of a name, >NAME, each with its sequence below"
        )
    return entries


def _entries(path: Path) -> Iterator[tuple[str, str]]:
    name, parts = None, []
    for line in _text(path).splitlines():
        if line.startswith(">"):
            if name is not None:
                yield name, "".join(parts)
            name, parts = line[1:].strip(), []
        elif line.strip() and not line.startswith("#"):
            if name is None:
                raise DataError(f"{path} does not begin with a name", got=line[:40], expected=">NAME")
            parts.append("".join(line.split()))
    if name is not None:
        yield name, "".join(parts)


def read_a3m(path: Path) -> Alignment:
    """An alignment whose first sequence is whole; residues of others beside none of its own are small letters.

    Raises `DataError` for no sequence, a row of another length or a letter that is no residue, by name and line; and
    for an alignment of several chains, as ColabFold writes it.
    """
    _check_chains(path)
    return _aligned(read_fasta(path), path)


def _check_chains(path: Path) -> None:
    """Raise `DataError` where the first line of an alignment has lengths and copies of several chains: #5,4 1,1."""
    match = _CHAINS.match(_text(path))
    if match is None:
        return
    lengths, copies = match[1].split(","), (match[2] or "1").split(",")
    if len(lengths) > 1 or any(int(copy) != 1 for copy in copies):
        raise DataError(
            f"{path} is an alignment of several chains",
            got=match[0].strip(),
            expected="one chain, once",
            cause="it is of a complex, as ColabFold writes it; chains are folded by themselves here",
            fix="give the alignment of each chain by itself",
        )


def read_stockholm(path: Path) -> Alignment:
    """An alignment in Stockholm's format: columns where the first sequence has a gap become deletions.

    Raises `DataError` as `read_a3m`.
    """
    rows: dict[str, list[str]] = {}
    for line in _text(path).splitlines():
        if line.strip() and not line.startswith(("#", "//")):
            name, *parts = line.split()
            if len(parts) != 1:
                raise DataError(
                    f"{path} has a line that is no row of an alignment",
                    got=line.strip()[:60],
                    expected="a name and its aligned sequence, which has no spaces",
                )
            rows.setdefault(name, []).append(parts[0])
    if not rows:
        raise DataError(f"{path} has no sequence", expected="lines of a name and its aligned sequence")
    sequences = [(name, "".join(parts).replace(".", "-").replace("~", "-")) for name, parts in rows.items()]
    _check_lengths(sequences, path)
    query_columns = np.array([letter != "-" for letter in sequences[0][1]])
    written = [
        (
            name,
            "".join(
                a if k else a.lower() if a != "-" else ""
                for a, k in zip(row.upper(), query_columns, strict=True)
            ),
        )
        for name, row in sequences
    ]
    return _aligned(written, path)


def _aligned(entries: list[tuple[str, str]], path: Path) -> Alignment:
    drop = str.maketrans("", "", string.ascii_lowercase)
    rows = [(name, row.replace(".", "").translate(drop)) for name, row in entries]
    numbers_of(rows[0][1], f"the first sequence of {path}")
    _check_lengths(rows, path)
    for name, row in rows:
        strange = sorted(set(row) - set(_NUMBERS))
        if strange:
            raise DataError(f"{path} has letters that are no residues", got=f"{', '.join(strange)} in {name}")
    residues = np.array([[_NUMBERS[letter] for letter in row] for _, row in rows], np.uint8)
    deletions = np.stack([_deletions(row) for _, row in entries])
    names = tuple(name for name, _ in entries)
    first = np.unique(residues, axis=0, return_index=True)[1]
    order = np.sort(first)  # a sequence counts once
    return Alignment(tuple(names[i] for i in order), residues[order], deletions[order])


def _check_lengths(rows: list[tuple[str, str]], path: Path) -> None:
    length = len(rows[0][1])
    for number, (name, row) in enumerate(rows, 1):
        if len(row) != length:
            raise DataError(
                f"a row of {path} has another length",
                got=f"{len(row)} columns in sequence {number} ({name})",
                expected=f"{length}, as the first has",
                cause="a damaged file, or sequences that are not aligned",
            )


def _deletions(row: str) -> np.ndarray:
    """Return the number of small letters before each column."""
    counts, count = [], 0
    for letter in row.replace(".", ""):
        if letter.islower():
            count += 1
        else:
            counts.append(count)
            count = 0
    return np.array(counts, np.uint16)


def _text(path: Path) -> str:
    """Return the text of a file without the NUL that MMseqs2 and ColabFold write behind it."""
    try:
        parts = [part for part in path.read_text(encoding="utf-8-sig").split("\0") if part.strip()]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text", cause=str(error), expected="sequences, in UTF-8") from None
    if len(parts) > 1:
        raise DataError(
            f"{path} has several alignments, with a NUL between them",
            got=len(parts),
            expected="one",
            fix="write each into a file of its own",
        )
    return parts[0] if parts else ""
