"""Which related structures are templates: from hits of a search, or as given (section 1.2.3)."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cai_apps.applications.protein.chemistry import LETTERS, UNKNOWN, residues
from cai_apps.applications.protein.data.hhr import Hit
from cai_apps.applications.protein.data.sequences import numbers_of
from cai_apps.applications.protein.data.structures import Chain, load_gemmi, read_chain
from cai_apps.applications.protein.data.templates import NOWHERE, Template
from cai_mesh.errors import CaiError, DataError

SHORTEST, COVERED, ITSELF, ALIKE = 10, 0.1, 0.95, 0.9
"""Residues a template has at least; shares: of the query beside it at least, of the query in it at most where the two
are alike, of a hit alike to the structure at least."""
_ENDINGS = tuple(kind + packed for kind in (".cif", ".mmcif", ".pdb", ".ent") for packed in ("", ".gz"))


@dataclass(frozen=True)
class Chosen:
    """Templates of a query.

    Args:
        templates: the templates, in the order in which their hits were looked at.
        dropped: other hits that were looked at, each with the reason.
    """

    templates: list[Template]
    dropped: list[tuple[Hit, str]]


def choose(
    query: np.ndarray, hits: Sequence[Hit], folder: Path, newest: datetime.date | None = None,
    most: int = 20, by_sum: bool = False, strict: bool = False,
) -> Chosen:  # fmt: skip
    """Templates from hits and a folder of structures, ENTRY.cif or ENTRY.pdb.

    Args:
        query: numbers of its residues [R].
        newest: structures released later, or at no known date, are dropped.
        most: so many are kept at most; others are not looked at.
        by_sum: those with most residues expected to be right come first, else the first of the file.
        strict: raise what a structure is refused for, where it would be dropped.

    Raises `DataError` where hits are of another query.
    """
    order = sorted(hits, key=lambda hit: -hit.sum_probs) if by_sum else list(hits)
    for hit in order:
        _check_query(query, hit)
    chosen = Chosen([], [])
    for hit in order:
        if len(chosen.templates) == most:
            break
        reason = _unfit(query, hit)
        if not reason:
            try:
                chosen.templates.append(_read(query, hit, folder, newest))
            except CaiError as error:
                if strict:
                    raise
                reason = " ".join(error.render().split())
        if reason:
            chosen.dropped.append((hit, reason))
    return chosen


def drawn(templates: Sequence[Template], generator: torch.Generator, most: int = 4) -> list[Template]:
    """Some of them in any order, for one sample of training: as many as a number drawn from 0 to all, or `most`."""
    count = int(torch.randint(len(templates) + 1, (), generator=generator))
    order = torch.randperm(len(templates), generator=generator)
    return [templates[int(at)] for at in order[: min(count, most)]]


def given(query: np.ndarray, chains: Sequence[Chain]) -> list[Template]:
    """Structures that were found otherwise, each aligned with the query from end to end.

    Raises `DataError` for one of which no residue with atoms is beside the query.
    """
    templates = []
    for chain in chains:
        place = np.full(len(query), NOWHERE, np.int64)
        query_places, chain_places = aligned(query, chain.residue)
        place[query_places] = chain_places
        templates.append(_with_atoms(Template(chain, place)))
    return templates


def aligned(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places of two sequences that lie beside each other in a global alignment (BLOSUM62), twice [columns]."""
    gemmi = load_gemmi()
    names = [*(amino_acid.name for amino_acid in residues()), "UNK"]
    first, second = ([names[min(int(number), UNKNOWN)] for number in sequence] for sequence in (one, other))
    result = gemmi.align_string_sequences(first, second, [], gemmi.AlignmentScoring("b"))
    rows = [
        result.add_gaps(letters, which) for which, letters in ((1, "x" * len(one)), (2, "x" * len(other)))
    ]
    both = np.array([list(row) for row in rows]) == "x"
    places = both.cumsum(1) - 1
    return places[0, both.all(0)], places[1, both.all(0)]


def _letters(query: np.ndarray) -> str:
    return "".join((LETTERS + "X")[min(number, UNKNOWN)] for number in query)


def _check_query(query: np.ndarray, hit: Hit) -> None:
    letters = _letters(query)
    row = hit.query.replace("-", "")
    query_piece = letters[hit.query_start : hit.query_start + len(row)]
    differ = [
        at for at, (a, b) in enumerate(zip(row, query_piece, strict=False)) if a != b and "X" not in (a, b)
    ]
    if len(query_piece) < len(row) or differ:
        at = hit.query_start + (differ[0] if differ else len(query_piece))
        raise DataError(
            f"hit {hit.number} ({hit.name}) is of another query",
            got=f"another residue at place {at + 1}",
            expected=letters[:40],
        )


def _unfit(query: np.ndarray, hit: Hit) -> str:
    """Why a hit is no template whatever its structure is; empty: it may be."""
    letters = _letters(query)
    if hit.entry is None:
        return f"{hit.name} names no entry and chain, as 1ABC_A does"
    if len(hit.sequence) < SHORTEST:
        return f"too short: {len(hit.sequence)} residues"
    if hit.aligned / len(query) <= COVERED:
        return f"too short: {hit.aligned} of {len(query)} residues of the query beside it"
    if hit.sequence in letters and len(hit.sequence) > ITSELF * len(query):
        return "the query itself"
    return ""


def _read(query: np.ndarray, hit: Hit, folder: Path, newest: datetime.date | None) -> Template:
    assert hit.entry is not None
    entry, chain = hit.entry
    path = _file(folder, entry)
    if newest is not None:
        date = released(path)
        if date is None or date > newest:
            raise DataError(
                f"{path.name} is too new", got=date or "no date of release", expected=f"up to {newest}"
            )
    return placed(query, hit, read_chain(path, chain))


def structures_of(hits: Sequence[Hit], folder: Path) -> dict[str, Path]:
    """Return the files of the structures that hits name, by entry and ending; those that are not there are left out."""
    files = {hit.entry[0]: _found(folder, hit.entry[0]) for hit in hits if hit.entry is not None}
    return {f"{entry} {path.name[len(entry) :]}": path for entry, path in files.items() if path is not None}


def _found(folder: Path, entry: str) -> Path | None:
    names = (f"{name}{ending}" for name in (entry, entry.lower()) for ending in _ENDINGS)
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _file(folder: Path, entry: str) -> Path:
    path = _found(folder, entry)
    if path is None:
        raise DataError(f"no structure of {entry} in {folder}", expected=f"{entry}.cif or {entry}.pdb")
    return path


def released(path: Path) -> datetime.date | None:
    """When a structure was released, from its mmCIF; None: it does not say."""
    gemmi = load_gemmi()
    if ".cif" not in path.name and ".mmcif" not in path.name:
        return None
    try:
        block: Any = gemmi.cif.read(str(path))[0]
    except (RuntimeError, ValueError, OSError, IndexError) as error:
        raise DataError(f"{path} cannot be read as a structure", got=str(error).splitlines()[0]) from None
    tags = ("_pdbx_audit_revision_history.revision_date", "_database_PDB_rev.date")
    dates = [gemmi.cif.as_string(date) for tag in tags for date in block.find_values(tag)]
    try:
        return min((datetime.date.fromisoformat(date) for date in dates if date), default=None)
    except ValueError:
        raise DataError(f"{path} has a damaged date of release", got=", ".join(dates)) from None


def placed(query: np.ndarray, hit: Hit, chain: Chain) -> Template:
    """A hit's alignment as places of its chain; where the hit counts otherwise, its sequence is aligned with it.

    Raises `DataError` where less than nine tenths agree, or no residue beside the query has atoms.
    """
    template_residues = numbers_of(hit.sequence.replace("*", "X"), f"the template of hit {hit.number}")
    start = hit.template_start
    if np.array_equal(template_residues, chain.residue[start : start + len(template_residues)]):
        where = np.arange(start, start + len(template_residues))
    else:
        template_places, chain_places = aligned(template_residues, chain.residue)
        a, b = template_residues[template_places], chain.residue[chain_places]
        same = int(((a == b) | (a == UNKNOWN) | (b == UNKNOWN)).sum())
        shorter = min(len(template_residues), len(chain.residue))
        if same < ALIKE * shorter:
            raise DataError(
                f"template mismatch: hit {hit.number} ({hit.name}) is not of {chain.name}",
                got=f"{same} of {shorter} residues alike",
                expected=f"{ALIKE:.0%}",
                cause="another release of the entry",
            )
        where = np.full(len(template_residues), NOWHERE)
        where[template_places] = chain_places
    place = np.full(len(query), NOWHERE, np.int64)
    pairs = hit.pairs()
    place[pairs[:, 0]] = where[pairs[:, 1]]
    return _with_atoms(Template(chain, place))


def _with_atoms(template: Template) -> Template:
    aligned_places = template.place[template.place != NOWHERE]
    if not template.chain.known[aligned_places].any():
        raise DataError(
            f"{template.chain.name} has no atoms beside the query", got=f"{len(aligned_places)} residues"
        )
    return template
