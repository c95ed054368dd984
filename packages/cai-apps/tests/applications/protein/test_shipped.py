"""The structures that come with the package, with their alignments: whole, and as their page says."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files
from pathlib import Path

import gemmi
import numpy as np
import pytest

from cai_apps.applications.protein.chemistry import tables
from cai_apps.applications.protein.data.examples import check_pair
from cai_apps.applications.protein.data.sequences import read_a3m
from cai_apps.applications.protein.data.structures import read_chain

SHIPPED = Path(str(files("cai_apps.applications.protein") / "data" / "shipped"))


@pytest.mark.parametrize(
    ("name", "length", "resolution", "without", "partly"),
    [
        ("1A7G", 82, 2.4, [], []),
        ("1A8O", 70, 1.7, [], [52]),
        ("4CUP", 117, 1.88, [115, 116], [7, 12, 71, 103, 108, 114]),
    ],
)
def test_an_entry(name, length, resolution, without, partly):
    chain, alignment = read_chain(SHIPPED / f"{name}.cif"), read_a3m(SHIPPED / f"{name}.a3m")
    check_pair(alignment, chain)
    assert (len(chain.residue), chain.resolution) == (length, resolution)
    assert np.flatnonzero(~chain.known.any(1)).tolist() == without
    there = tables().there[chain.residue].numpy()
    assert np.flatnonzero((chain.known != there).any(1) & chain.known.any(1)).tolist() == partly
    assert alignment.names == (name, *(f"synthetic {number}" for number in range(1, 32)))
    alike = (alignment.residues == alignment.residues[0]).mean(1)
    assert alike[1:].max() < 0.95
    assert alike.min() > 0.3
    assert alignment.deletions.any()


def test_selenium_and_two_places_are_in_them():
    chain = read_chain(SHIPPED / "1A8O.cif")
    assert "MSE" in (SHIPPED / "1A8O.cif").read_text()
    assert chain.sequence[0] == "M"
    assert chain.known[0, :8].all()  # the selenium too, at the place of a sulfur
    polymer = gemmi.read_structure(str(SHIPPED / "4CUP.cif"))[0][0]
    number, atoms = next((i, r) for i, r in enumerate(polymer) if any(a.altloc == "B" for a in r))
    beta = max((atom for atom in atoms if atom.name == "CB"), key=lambda atom: atom.occ)
    found = read_chain(SHIPPED / "4CUP.cif").atoms[number, 4]
    assert found.tolist() == beta.pos.tolist()


def test_files_are_those_of_their_page():
    told = re.findall(r"`([0-9a-f]{64})  (\S+)`", (SHIPPED / "SOURCE.md").read_text(encoding="utf-8"))
    held = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in SHIPPED.iterdir()
        if path.suffix in (".cif", ".a3m")
    }
    assert held == {name: digest for digest, name in told}
