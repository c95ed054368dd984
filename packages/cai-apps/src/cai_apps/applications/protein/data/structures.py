"""A chain of a structure from mmCIF or PDB files (gemmi), and a structure to mmCIF."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cai_apps.applications.protein.chemistry import LETTERS, PLACES, UNKNOWN, residues
from cai_apps.config.places import check_regular
from cai_mesh.errors import ConfigError, DataError
from cai_mesh.files import write_text

SAME = {"MSE": "MET"}
"""Residues that are another with an atom exchanged: selenium is the sulfur's place."""
ATOM = {"SE": "SD"}


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
    return _chain(f"{path.name.split('.')[0]}_{name}", structure, *polymers[name])


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


def _chain(name: str, structure: Any, polymer: Any, entity: Any) -> Chain:
    full_sequence = [] if entity is None else [entry.split(",")[0] for entry in entity.full_sequence]
    sequence = full_sequence or [residue.name for residue in polymer]
    by_name = {amino_acid.name: number for number, amino_acid in enumerate(residues())}
    number = np.array(
        [by_name.get(SAME.get(residue_name, residue_name), UNKNOWN) for residue_name in sequence], np.int64
    )
    atoms = np.zeros((len(sequence), PLACES, 3))
    occupancy = np.zeros((len(sequence), PLACES))
    order = _places()
    for count, residue in enumerate(polymer):
        at = residue.label_seq - 1 if full_sequence else count
        places_of = order[number[at]]
        for atom in residue:
            kind = ATOM.get(atom.name, atom.name) if residue.name in SAME else atom.name
            if kind in places_of and atom.occ > occupancy[at, places_of.index(kind)]:
                place = places_of.index(kind)
                atoms[at, place], occupancy[at, place] = atom.pos.tolist(), atom.occ
    return Chain(name, number, atoms, occupancy > 0, float(structure.resolution))


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
