"""How far atoms of a residue may lie apart: from lengths of bonds, angles between them, and sizes of atoms."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from importlib.resources import files
from itertools import permutations

import torch
from torch import Tensor

from cai_apps.applications.protein.chemistry import CPU, LETTERS, PLACES, Residue, ordinary, residues

RADII = {"C": 1.7, "N": 1.55, "O": 1.52, "S": 1.8}
"""Van der Waals radii by element, angstroms."""
OVERLAP = 1.5
"""The overlap that two atoms without a bond may have, angstroms (section 1.9.11)."""
DEVIATIONS = 12.0
"""How many standard deviations a length or an angle may be off."""
COMMON = "common"
Pair = tuple[str, ...]
Spread = tuple[float, float]
"""Mean and standard deviation."""


@functools.cache
def _table() -> dict[str, dict[Pair, Spread]]:
    """Return the lengths of bonds (two atoms), angstroms, and the angles (three), degrees, of each residue by name."""
    spreads_by_residue: dict[str, dict[Pair, Spread]] = {}
    residue_spreads: dict[Pair, Spread] = {}
    for line in (files(__package__) / "data" / "bonds.txt").read_text(encoding="utf-8").splitlines():
        kind, *words = line.split()
        if kind == "residue":
            residue_spreads = spreads_by_residue[words[0]] = {}
        elif kind in ("bond", "angle"):
            *atoms, mean, deviation = words
            residue_spreads[tuple(atoms)] = float(mean), float(deviation)
    return spreads_by_residue


def _of(residue: Residue) -> dict[Pair, Spread]:
    """Bonds and angles of a residue: its own, and those common to all that it says nothing else of."""
    table = _table()
    common = {atoms: spread for atoms, spread in table[COMMON].items() if set(atoms) <= set(residue.atoms)}
    return common | table[residue.name]


def distances(residue: Residue) -> dict[Pair, Spread]:
    """Return the distances between two atoms that share a bond, or both have one to a third, angstroms.

    Distances of the second kind follow from the law of cosines, and their deviations from those of both bonds and of
    the angle as if they were independent.
    """
    spreads = _of(residue)
    pair_distances = {atoms: spread for atoms, spread in spreads.items() if len(atoms) == 2}
    bonds = pair_distances | {(second, first): spread for (first, second), spread in pair_distances.items()}
    for (first, middle, third), (degrees, spread) in ((a, s) for a, s in spreads.items() if len(a) == 3):
        (one, one_off), (other, other_off) = bonds[first, middle], bonds[middle, third]
        angle, off = math.radians(degrees), math.radians(spread)
        length = math.sqrt(one**2 + other**2 - 2 * one * other * math.cos(angle))
        parts = (
            one * other * math.sin(angle) * off,
            (one - other * math.cos(angle)) * one_off,
            (other - one * math.cos(angle)) * other_off,
        )
        pair_distances[first, third] = length, math.hypot(*parts) / length
    return pair_distances


@dataclass(frozen=True)
class Bounds:
    """Bounds of distances, and radii, by the number of a residue, 0 to 20 (unknown: no atoms).

    Args:
        lower, upper: bounds of the distance between two of the 14 places, angstroms [21, 14, 14]; both 0 where there
            are no two atoms.
        radius: the radius of the atom at a place, angstroms [21, 14].
    """

    lower: Tensor
    upper: Tensor
    radius: Tensor


@functools.cache
def bounds(device: torch.device = CPU, dtype: torch.dtype = torch.float64) -> Bounds:
    """Return the bounds on a device in a dtype; they are made once for each."""
    with ordinary():
        reference = _bounds() if (device, dtype) == (CPU, torch.float64) else bounds()
        return Bounds(*(tensor.to(device, dtype) for tensor in vars(reference).values()))


def _bounds() -> Bounds:
    count = len(LETTERS) + 1
    lower, upper = (torch.zeros(count, PLACES, PLACES, dtype=torch.float64) for _ in range(2))
    radius = torch.zeros(count, PLACES, dtype=torch.float64)
    for number, residue in enumerate(residues()):
        place = {name: at for at, name in enumerate(residue.atoms)}
        for name, at in place.items():
            radius[number, at] = RADII[name[0]]
        for first, second in permutations(place.values(), 2):
            lower[number, first, second] = radius[number, first] + radius[number, second] - OVERLAP
            upper[number, first, second] = math.inf
        for (one, other), (length, deviation) in distances(residue).items():
            for pair in ((place[one], place[other]), (place[other], place[one])):
                lower[(number, *pair)] = length - DEVIATIONS * deviation
                upper[(number, *pair)] = length + DEVIATIONS * deviation
    return Bounds(lower, upper, radius)
