"""Structures come back from files as they were written; what is no chain of a protein is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gemmi
import numpy as np
import pytest
import torch
from small_alphafold import drawn_frames

from cai_apps.applications.protein.chemistry import LETTERS, UNKNOWN, tables
from cai_apps.applications.protein.data.chains import directory_of
from cai_apps.applications.protein.data.structures import Chain, read_chain, write_chain
from cai_apps.applications.protein.model.atoms import atoms_of, groups_of
from cai_apps.applications.protein.model.frames import Frames
from cai_mesh.errors import ConfigError, DataError


@pytest.fixture
def chain() -> Chain:
    """All twenty residues; of one no atom is known, of another one is missing."""
    residue = torch.arange(len(LETTERS))
    frames = drawn_frames(len(LETTERS), 1)
    frames = Frames(frames.rotation[0].double(), frames.origin[0].double())
    angles = torch.nn.functional.normalize(
        torch.randn(len(LETTERS), 7, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
        dim=-1,
    )
    atoms, known = (
        atoms_of(groups_of(frames, angles, residue), residue).numpy(),
        tables().there.numpy()[:-1].copy(),
    )
    known[3], known[5, 4] = False, False
    return Chain("made", residue.numpy(), atoms * known[..., None], known, 0.0)


@pytest.fixture
def path(chain, tmp_path) -> Path:
    write_chain(tmp_path / "made.cif", chain, np.linspace(0, 95, len(LETTERS)))
    return tmp_path / "made.cif"


def test_a_chain_comes_back(chain, path, tmp_path):
    found = read_chain(path)
    assert (found.name, found.sequence) == ("made_A", LETTERS)
    assert np.array_equal(found.known, chain.known)
    np.testing.assert_allclose(found.atoms, chain.atoms, atol=1e-4)
    written = gemmi.read_structure(str(path))
    assert written[0]["A"][3].name == "CYS"  # the fourth has no atom and is not there
    assert written[0]["A"][1][0].b_iso == pytest.approx(5.0)
    unknown = replace(chain, residue=np.where(np.arange(20) == 7, UNKNOWN, chain.residue))
    write_chain(tmp_path / "x.cif", unknown)
    again = read_chain(tmp_path / "x.cif")
    assert again.sequence == LETTERS.replace("G", "X")
    assert not again.known[7].any()


def edited(path: Path, change) -> Path:
    structure = gemmi.read_structure(str(path))
    change(structure)
    out = path.with_name("edited.cif")
    structure.make_mmcif_document().write_file(str(out))
    return out


def test_of_two_places_the_one_most_often_taken(chain, path):
    def change(structure):
        residue = structure[0]["A"][0]
        first = residue[1]
        first.altloc, first.occ = "A", 0.3
        other = first.clone()
        other.altloc, other.occ, other.pos = "B", 0.7, gemmi.Position(1, 2, 3)
        residue.add_atom(other, 2)

    found = read_chain(edited(path, change))
    assert found.atoms[0, 1].tolist() == [1, 2, 3]
    np.testing.assert_allclose(found.atoms[0, 0], chain.atoms[0, 0], atol=1e-4)


def test_selenium_is_read_as_the_sulfur(chain, path):
    def change(structure):
        number = next(i for i, residue in enumerate(structure[0]["A"]) if residue.name == "MET")
        residue = structure[0]["A"][number]
        residue.name = "MSE"
        for atom in residue:
            if atom.name == "SD":
                atom.name, atom.element = "SE", gemmi.Element("Se")
        entity = structure.entities[0]
        entity.full_sequence = ["MSE" if name == "MET" else name for name in entity.full_sequence]

    found = read_chain(edited(path, change))
    assert found.sequence == LETTERS
    assert np.array_equal(found.known, chain.known)


SHIPPED = directory_of("shipped")


def without_sequence(path: Path, change, *, cif: bool = False) -> Path:
    """A shipped structure, changed, in a file that does not tell its sequence."""
    structure = gemmi.read_structure(str(SHIPPED / "1A8O.cif"))
    structure.setup_entities()
    for entity in structure.entities:
        entity.full_sequence = []
    change(structure[0][0])
    if cif:
        path.write_text(structure.make_mmcif_document().as_string())
    else:
        options = gemmi.PdbWriteOptions()
        options.seqres_records = False
        path.write_text(structure.make_pdb_string(options))
    return path


def cut_out(chain) -> None:
    del chain[10:14]


def renumbered(chain) -> None:
    for number, residue in enumerate(chain, 1):
        residue.seqid.num = residue.label_seq = number


@pytest.mark.parametrize("cif", [False, True])
def test_a_gap_of_a_file_without_a_sequence_stays_open(tmp_path, cif):
    whole = read_chain(SHIPPED / "1A8O.cif")
    found = read_chain(without_sequence(tmp_path / ("x.cif" if cif else "x.pdb"), cut_out, cif=cif))
    assert found.sequence == f"{whole.sequence[:10]}XXXX{whole.sequence[14:]}"
    assert not found.known[10:14].any()
    np.testing.assert_allclose(found.atoms[14:], whole.atoms[14:], atol=2e-3)


def test_numbers_that_jump_along_a_bond_are_no_gap(tmp_path):
    """As those of antibodies by Kabat, or of a chain that was numbered by another."""

    def change(chain):
        for residue in chain:
            if residue.seqid.num > 170:
                residue.seqid.num += 30

    found = read_chain(without_sequence(tmp_path / "x.pdb", change))
    assert found.sequence == read_chain(SHIPPED / "1A8O.cif").sequence


def test_a_gap_that_numbers_hide_is_refused(tmp_path):
    def change(chain):
        cut_out(chain)
        renumbered(chain)

    with pytest.raises(DataError, match="has a gap of unknown length"):
        read_chain(without_sequence(tmp_path / "x.pdb", change))


def test_a_residue_with_an_alternative_counts_once(tmp_path):
    def change(chain):
        other = chain[5].clone()
        other.name = "ALA" if other.name != "ALA" else "SER"
        for residue, letter in ((chain[5], "A"), (other, "B")):
            for atom in residue:
                atom.altloc = letter
        chain.add_residue(other, 6)

    whole = read_chain(SHIPPED / "1A8O.cif")
    assert read_chain(without_sequence(tmp_path / "x.pdb", change)).sequence == whole.sequence


MODIFIED = {
    "SEP": "SER", "TPO": "THR", "PTR": "TYR", "HYP": "PRO", "MLY": "LYS", "CSO": "CYS", "KCX": "LYS", "LLP": "LYS",
    "ALY": "LYS", "M3L": "LYS", "CME": "CYS", "OCS": "CYS", "PCA": "GLU", "CGU": "GLU", "TYS": "TYR", "HIC": "HIS",
    "HIE": "HIS", "HSD": "HIS", "CYX": "CYS", "ASH": "ASP",
}  # fmt: skip


@pytest.mark.parametrize("name", MODIFIED)
def test_a_modified_residue_is_its_parent(name, chain, path):
    parent = MODIFIED[name]

    def change(structure):
        for residue in structure[0]["A"]:
            residue.name = name if residue.name == parent else residue.name
        entity = structure.entities[0]
        entity.full_sequence = [name if n == parent else n for n in entity.full_sequence]

    found = read_chain(edited(path, change))
    assert found.sequence == LETTERS
    assert np.array_equal(found.known, chain.known)


def test_a_residue_that_the_file_says_the_parent_of(path):
    structure = gemmi.read_structure(str(path))
    structure[0]["A"][1].name = "Q1X"
    entity = structure.entities[0]
    entity.full_sequence = ["Q1X" if name == "ARG" else name for name in entity.full_sequence]
    document = structure.make_mmcif_document()
    columns = ["id", "auth_asym_id", "auth_seq_id", "auth_comp_id", "label_comp_id", "parent_comp_id"]
    loop = document[0].init_loop("_pdbx_struct_mod_residue.", columns)
    loop.add_row(["1", "A", "2", "Q1X", "Q1X", "ARG"])
    path.write_text(document.as_string())
    assert read_chain(path).sequence == LETTERS


def test_the_nitrogens_of_arginine_are_named_by_their_distance(tmp_path):
    structure = gemmi.read_structure(str(SHIPPED / "1A8O.cif"))
    for residue in structure[0][0]:
        if residue.name == "ARG":
            first, second = residue.find_atom("NH1", "*"), residue.find_atom("NH2", "*")
            first.name, second.name = "NH2", "NH1"
    (tmp_path / "x.cif").write_text(structure.make_mmcif_document().as_string())
    found, whole = read_chain(tmp_path / "x.cif"), read_chain(SHIPPED / "1A8O.cif")
    np.testing.assert_allclose(found.atoms, whole.atoms, atol=1e-4)


def nucleic(structure):
    for residue in structure[0]["A"]:
        residue.name = "DA"
    structure.entities[0].full_sequence = ["DA"] * len(structure[0]["A"])
    structure.entities[0].polymer_type = gemmi.PolymerType.Dna


def several(structure):
    other = structure[0]["A"].clone()
    other.name = "B"
    structure[0].add_chain(other)


def empty(structure):
    for chain in structure[0]:
        for residue in chain:
            while len(residue):
                del residue[0]


@pytest.mark.parametrize(
    ("change", "wanted", "error", "said"),
    [
        (nucleic, None, DataError, "has no protein"),
        (empty, None, DataError, "has no atoms"),
        (several, None, ConfigError, "has several chains"),
        (several, "C", ConfigError, "no chain C of a protein"),
    ],
)
def test_what_is_no_chain_of_a_protein(change, wanted, error, said, path):
    with pytest.raises(error, match=said):
        read_chain(edited(path, change), wanted)


def test_files_that_are_none(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_chain(tmp_path / "none.cif")
    broken = tmp_path / "broken.cif"
    broken.write_text("data_x\nloop_\n_atom_site.id\n'")
    with pytest.raises(DataError, match="cannot be read"):
        read_chain(broken)
