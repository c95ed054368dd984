"""A chain of a structure from mmCIF or PDB files (gemmi), and a structure to mmCIF."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cai_apps.applications.protein.chemistry import LETTERS, PLACES, UNKNOWN, residues
from cai_apps.applications.protein.data.sequences import STANDING_FOR
from cai_apps.config.places import check_regular
from cai_mesh.errors import ConfigError, DataError
from cai_mesh.files import write_text

EXCHANGED = {"MSE": {"SE": "SD"}, "SEC": {"SE": "SG"}}
"""Atoms of residues that stand at the place of another atom of their parent: selenium at the sulfur's."""
FORCE_FIELDS = {
    **dict.fromkeys(("HID", "HIE", "HIP", "HSD", "HSE", "HSP"), "HIS"),
    **dict.fromkeys(("CYX", "CYM"), "CYS"),
    "ASH": "ASP", "GLH": "GLU", "LYN": "LYS",
}  # fmt: skip
"""Residues of structures that Amber, CHARMM or GROMACS wrote, by their charge or hydrogen, and what they are."""
BOND = 3.0
"""Angstroms from the carbon of a residue to the nitrogen of the next one at most; the bond has 1.33."""


@dataclass(frozen=True)
class Chain:
    """One chain, with residues of its sequence that no atom is known of.

    Args:
        name: the names of the file and the chain.
        residue: numbers of the residues [R], int64.
        atoms: positions at the 14 places of a residue, angstroms [R, 14, 3], float64; known: which are known [R, 14].
        resolution: angstroms; 0 where the file has none.
    """

    name: str
    residue: np.ndarray
    atoms: np.ndarray
    known: np.ndarray
    resolution: float

    @property
    def sequence(self) -> str:
        """The sequence in letters; X for an unknown residue."""
        return "".join((LETTERS + "X")[number] for number in self.residue)


def load_gemmi() -> Any:
    """The library of structures, which an extra brings; `ConfigError` without it."""
    try:
        import gemmi
    except ImportError:
        raise ConfigError("reading structures needs gemmi", fix='pip install "cai-apps[protein]"') from None
    return gemmi


def read_chain(path: Path, chain: str | None = None) -> Chain:
    """A chain of a file of a structure, its first model; of alternative places the one most often taken.

    Args:
        path: .cif, .mmcif, .pdb or .ent, and .gz of these.
        chain: its name; None: the only chain of a protein.

    Raises:
        DataError: the file cannot be read, or has no atoms or no protein.
        ConfigError: no such chain, or several and none named.
    """
    gemmi = load_gemmi()
    check_regular(path)
    try:
        structure = gemmi.read_structure(str(path))
    except (RuntimeError, ValueError, OSError, IndexError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path} cannot be read as a structure", got=cause) from None
    if not len(structure) or not structure[0].count_atom_sites():
        raise DataError(f"{path} has no atoms")
    structure.setup_entities()
    structure.assign_label_seq_id()
    polymers = _polymers(gemmi, structure)
    if not polymers:
        polymer_types = sorted(
            {str(entity.polymer_type).split(".")[-1] for entity in structure.entities if entity.full_sequence}
        )
        raise DataError(
            f"{path} has no protein", got=", ".join(polymer_types) or "nothing but small molecules"
        )
    name = _chosen(path, polymers, chain)
    polymer, entity = polymers[name]
    sequence, placed = _laid_out(path, polymer, entity)
    return _chain(f"{path.name.split('.')[0]}_{name}", structure, sequence, placed)


def _polymers(gemmi: Any, structure: Any) -> dict[str, tuple[Any, Any]]:
    """Return the protein of each chain that has one, and its entity, by the name of the chain."""
    polymers = {}
    for chain in structure[0]:
        polymer = chain.get_polymer()
        entity = structure.get_entity_of(polymer) if len(polymer) else None
        if len(polymer) and polymer.check_polymer_type() == gemmi.PolymerType.PeptideL:
            polymers[chain.name] = (polymer, entity)
    return polymers


def _chosen(path: Path, polymers: dict[str, Any], chain: str | None) -> str:
    names = ", ".join(polymers)
    if chain is None:
        if len(polymers) > 1:
            raise ConfigError(f"{path} has several chains", got=names, fix="name one of them")
        return next(iter(polymers))
    if chain not in polymers:
        raise ConfigError(f"{path} has no chain {chain} of a protein", got=names, fix=f"one of {names}")
    return chain


def _places() -> list[list[str]]:
    """Return the names of the atoms at the places of each residue, by its number; an unknown one has none."""
    return [*(list(amino_acid.atoms) for amino_acid in residues()), []]


def _laid_out(path: Path, polymer: Any, entity: Any) -> tuple[list[str], list[tuple[int, Any]]]:
    """Return the names of a sequence, and the residues that have atoms with their places in it.

    A file without the sequence has it from its residues; where their bond is broken, the numbers say how many residues
    without atoms are between them, of which nothing else is known.
    """
    sequence = [] if entity is None else [entry.split(",")[0] for entry in entity.full_sequence]
    if sequence:
        residues_at: dict[int, Any] = {}
        for residue in polymer:  # where two residues share a place, the one that the sequence names
            at = residue.label_seq - 1
            if at not in residues_at or residue.name == sequence[at]:
                residues_at[at] = residue
        return sequence, list(residues_at.items())
    placed: list[tuple[int, Any]] = []
    for residue in polymer.first_conformer():
        sequence += ["UNK"] * (_missing(path, placed[-1][1], residue) if placed else 0)
        placed.append((len(sequence), residue))
        sequence.append(residue.name)
    return sequence, placed


def _missing(path: Path, before: Any, after: Any) -> int:
    """Return how many residues are missing between two that follow each other in a file without a sequence."""
    end, start = before.find_atom("C", "*"), after.find_atom("N", "*")
    have_atoms = end is not None and start is not None
    if have_atoms and end.pos.dist(start.pos) <= BOND:
        return 0
    first, last = (residue.label_seq or residue.seqid.num for residue in (before, after))
    if last - first > 1:
        return last - first - 1
    if not have_atoms:
        return 0
    raise DataError(
        f"{path} has a gap of unknown length",
        got=f"{end.pos.dist(start.pos):.1f} angstroms from {before.name} {before.seqid} to {after.name} {after.seqid}",
        expected="a bond, or numbers between which some are missing; or the whole sequence (SEQRES)",
        cause="the file has no sequence, and its numbers go on where the chain does not",
        fix="take the mmCIF of the entry, or number the residues as in the sequence",
    )


def _parent(gemmi: Any, name: str, parents: Mapping[str, str]) -> int:
    """Return the number of a residue, or of the one that it is a modification of.

    Args:
        gemmi: the library of structures, which knows the published modifications.
        name: the name of the residue.
        parents: names of parents by name, as the file has them.
    """
    by_name = {amino_acid.name: number for number, amino_acid in enumerate(residues())}
    for candidate in (name, FORCE_FIELDS.get(name, ""), parents.get(name, "")):
        if candidate in by_name:
            return by_name[candidate]
    letter = gemmi.find_tabulated_residue(name).one_letter_code.upper()
    letter = str(STANDING_FOR.get(letter, letter))
    return LETTERS.index(letter) if letter.strip() and letter in LETTERS else UNKNOWN


def _chain(name: str, structure: Any, sequence: list[str], placed: list[tuple[int, Any]]) -> Chain:
    gemmi = load_gemmi()
    parents = {residue.res_id.name: residue.parent_comp_id for residue in structure.mod_residues}
    number = np.array([_parent(gemmi, residue_name, parents) for residue_name in sequence], np.int64)
    atoms = np.zeros((len(sequence), PLACES, 3))
    occupancy = np.zeros((len(sequence), PLACES))
    order = _places()
    for at, residue in placed:
        places_of, exchanged = order[number[at]], EXCHANGED.get(residue.name, {})
        for atom in residue:
            kind = exchanged.get(atom.name, atom.name)
            if kind in places_of and atom.occ > occupancy[at, places_of.index(kind)]:
                place = places_of.index(kind)
                atoms[at, place], occupancy[at, place] = atom.pos.tolist(), atom.occ
    _name_nitrogens(number, atoms, occupancy)
    return Chain(name, number, atoms, occupancy > 0, float(structure.resolution))


def _name_nitrogens(number: np.ndarray, atoms: np.ndarray, occupancy: np.ndarray) -> None:
    """Let NH1 of arginines be the nitrogen nearer to CD, in place: many files have the two names exchanged."""
    arginine = [amino_acid.name for amino_acid in residues()].index("ARG")
    order = _places()[arginine]
    delta, first, second = (order.index(atom) for atom in ("CD", "NH1", "NH2"))
    rows = np.flatnonzero((number == arginine) & (occupancy[:, [delta, first, second]] > 0).all(1))
    near, far = (
        np.linalg.norm(atoms[rows, place] - atoms[rows, delta], axis=-1) for place in (first, second)
    )
    for row in rows[near > far]:
        for values in (atoms, occupancy):
            values[row, [first, second]] = values[row, [second, first]]


def write_chain(path: Path, chain: Chain, confidence: np.ndarray | None = None) -> None:
    """A chain as mmCIF.

    Args:
        confidence: the confidence in each residue, 0 to 100 [R], written where B factors are.
    """
    gemmi = load_gemmi()
    structure = gemmi.Structure()
    structure.name = chain.name
    model, written = gemmi.Model(1), gemmi.Chain("A")
    order = _places()
    names = [amino_acid.name for amino_acid in residues()] + ["UNK"]
    for at, number in enumerate(chain.residue):
        residue = gemmi.Residue()
        residue.name, residue.seqid = names[number], gemmi.SeqId(str(at + 1))
        residue.label_seq, residue.subchain, residue.entity_type = at + 1, "A", gemmi.EntityType.Polymer
        for place, kind in enumerate(order[number]):
            if chain.known[at, place]:
                atom = gemmi.Atom()
                atom.name, atom.element = kind, gemmi.Element(kind[0])
                atom.pos = gemmi.Position(*map(float, chain.atoms[at, place]))
                atom.b_iso = 0.0 if confidence is None else float(confidence[at])
                residue.add_atom(atom)
        written.add_residue(residue)
    model.add_chain(written)
    structure.add_model(model)
    entity = gemmi.Entity("1")
    entity.entity_type, entity.polymer_type = gemmi.EntityType.Polymer, gemmi.PolymerType.PeptideL
    entity.full_sequence, entity.subchains = [names[number] for number in chain.residue], ["A"]
    structure.entities.append(entity)
    write_text(path, structure.make_mmcif_document().as_string())
