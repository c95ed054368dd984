"""The twenty amino acids: their atoms, torsions and rigid groups, as tables of tensors.

An atom has a place among the 14 that a residue can have at most, and among 37 kinds. Eight rigid groups make up a
residue: backbone, omega (no atoms), phi (none), psi, and chi 1 to 4.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

CPU = torch.device("cpu")
LETTERS = "ARNDCQEGHILKMFPSTWYV"
UNKNOWN, GAP = 20, 21
"""Numbers of a residue that is none of the twenty, and of none."""
_KINDS = """
N CA C CB O CG CG1 CG2 OG OG1 SG CD CD1 CD2 ND1 ND2 OD1 OD2 SD CE CE1 CE2 CE3 NE NE1 NE2 OE1 OE2 CH2 NH1 NH2 OH CZ CZ2
CZ3 NZ OXT
"""
ATOMS = tuple(_KINDS.split())
GROUPS, PLACES = 8, 14


@dataclass
class Residue:
    """One amino acid.

    Args:
        letter, name: its names of one and of three letters.
        atoms: names in their order, with the group each moves with and its place in that group's frame.
        chi: the four atoms of each torsion of the side chain.
        alike: whether each of these looks the same after half a turn.
        swaps: atoms that such a turn renames.
    """

    letter: str
    name: str
    atoms: dict[str, tuple[int, tuple[float, float, float]]] = field(default_factory=dict)
    chi: list[list[str]] = field(default_factory=list)
    alike: list[bool] = field(default_factory=list)
    swaps: dict[str, str] = field(default_factory=dict)


@functools.cache
def residues() -> tuple[Residue, ...]:
    """The twenty, in the order of `LETTERS`."""
    amino_acids: list[Residue] = []
    text = (files(__package__) / "data" / "residues.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        kind, *words = line.split()
        if kind == "residue":
            amino_acids.append(Residue(*words))
        elif kind == "atom":
            name, group, x, y, z = words
            amino_acids[-1].atoms[name] = (int(group), (float(x), float(y), float(z)))
        elif kind == "chi":
            amino_acids[-1].chi.append(words[:4])
            amino_acids[-1].alike.append(words[4:] == ["alike"])
        elif kind == "swap":
            amino_acids[-1].swaps[words[0]] = words[1]
    return tuple(amino_acids)


@dataclass(frozen=True)
class Tables:
    """Tables by the number of a residue, 0 to 20 (unknown: no side chain and no places).

    Args:
        there: whether each of the 14 places holds an atom [21, 14].
        kind: the kind among 37 of the atom at a place, 0 where there is none [21, 14].
        group: the group with which it moves [21, 14].
        place: its position in the group's frame, angstroms [21, 14, 3].
        rotation, origin: the frames of the eight groups at torsions of 0, each in the one before it [21, 8, 3, 3],
            [21, 8, 3].
        chi: places of the four atoms of each torsion of the side chain [21, 4, 4]; has_chi: which there are [21, 4].
        alike: whether each of these looks the same after half a turn [21, 4].
        renamed: the place whose name an atom gets by such a turn, its own for most [21, 14].
    """

    there: Tensor
    kind: Tensor
    group: Tensor
    place: Tensor
    rotation: Tensor
    origin: Tensor
    chi: Tensor
    has_chi: Tensor
    alike: Tensor
    renamed: Tensor


@contextlib.contextmanager
def ordinary() -> Iterator[None]:
    """Tensors made inside are ordinary ones on the CPU, whatever modes of torch are on around it.

    For tables that are made once and kept: made inside a plan or on the meta device they would have no values, made
    under inference mode they could not be used in training.
    """
    with unset_fake_temporarily(), torch.inference_mode(False), torch.device("cpu"):
        yield


@functools.cache
def tables(device: torch.device = CPU, dtype: torch.dtype = torch.float64) -> Tables:
    """Return the tables on a device, numbers in a dtype; they are made once for each."""
    with ordinary():
        reference = _tables() if (device, dtype) == (CPU, torch.float64) else tables()
        tensors = (t.to(device, dtype if t.is_floating_point() else None) for t in vars(reference).values())
        return Tables(*tensors)


def _tables() -> Tables:
    count = len(LETTERS) + 1
    has_atom, kind, group = (torch.zeros(count, PLACES, dtype=torch.int64) for _ in range(3))
    place = torch.zeros(count, PLACES, 3, dtype=torch.float64)
    rotation = torch.eye(3, dtype=torch.float64).repeat(count, GROUPS, 1, 1)
    origin = torch.zeros(count, GROUPS, 3, dtype=torch.float64)
    for number, residue in enumerate(residues()):
        for at, (name, (of, where)) in enumerate(residue.atoms.items()):
            has_atom[number, at], kind[number, at], group[number, at] = 1, ATOMS.index(name), of
            place[number, at] = torch.tensor(where, dtype=torch.float64)
        for of, (turn, start) in _groups(residue).items():
            rotation[number, of], origin[number, of] = turn, start
    return Tables(has_atom.bool(), kind, group, place, rotation, origin, *_torsions(count))


def _torsions(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`chi`, `has_chi`, `alike` and `renamed` of `Tables`."""
    chi, has_chi = torch.zeros(count, 4, 4, dtype=torch.int64), torch.zeros(count, 4, dtype=torch.bool)
    pi_periodic, renamed = torch.zeros(count, 4, dtype=torch.bool), torch.arange(PLACES).repeat(count, 1)
    for number, residue in enumerate(residues()):
        places = list(residue.atoms)
        for at, (atoms, same) in enumerate(zip(residue.chi, residue.alike, strict=True)):
            chi[number, at] = torch.tensor([places.index(atom) for atom in atoms])
            has_chi[number, at], pi_periodic[number, at] = True, same
        for one, other in residue.swaps.items():
            first, second = places.index(one), places.index(other)
            renamed[number, first], renamed[number, second] = second, first
    return chi, has_chi, pi_periodic, renamed


def _groups(residue: Residue) -> dict[int, tuple[Tensor, Tensor]]:
    """Rotation and origin of the groups that a residue has but for the backbone and omega: section 1.8.4."""
    at = {name: torch.tensor(where, dtype=torch.float64) for name, (_, where) in residue.atoms.items()}
    unit = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    group_frames = {
        2: (_axes(at["N"] - at["CA"], unit), at["N"]),
        3: (_axes(at["C"] - at["CA"], at["CA"] - at["N"]), at["C"]),
    }
    for number, (first, second, third, _) in enumerate(residue.chi):
        if number == 0:
            group_frames[4] = (_axes(at[third] - at[second], at[first] - at[second]), at[third])
        else:  # the axis is that of the group before, which begins where it turns
            group_frames[4 + number] = (_axes(at[third], -unit), at[third])
    return group_frames


def _axes(x: Tensor, plane_vector: Tensor) -> Tensor:
    """A rotation whose first axis is along x, its second toward `plane_vector`."""
    first = x / x.norm()
    second = plane_vector - (first @ plane_vector) * first
    second = second / second.norm()
    return torch.stack([first, second, torch.linalg.cross(first, second)], -1)
