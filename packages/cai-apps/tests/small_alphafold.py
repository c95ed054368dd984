"""A model of AlphaFold's widths with few blocks, its weights and its input: all drawn, alike everywhere."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cai_apps.applications.protein.chemistry import LETTERS
from cai_apps.applications.protein.model.alphafold import AlphaFold, Features, Sizes, Templates
from cai_apps.applications.protein.model.evoformer import BlockSizes, PairSizes
from cai_apps.applications.protein.model.frames import Frames, rotation_of
from cai_apps.applications.protein.model.structure import StructureSizes

SIZES = Sizes(blocks=1, extra_blocks=1, structure=StructureSizes(blocks=2))
SEQUENCES, RESIDUES, EXTRA, TEMPLATES = 5, 9, 6, 2


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Weights of which none is 0 or 1, as many at first are: untouched, layers would say nothing."""
    draw = random(0)
    for name, param in sorted(model.named_parameters()):
        near_one = "norm" in name and name.endswith("weight")
        scale = 0.03 if param.dim() > 1 else 0.1
        param.copy_(torch.randn(param.shape, generator=draw, dtype=torch.float64) * scale + near_one)


def model() -> AlphaFold:
    built = AlphaFold(SIZES).eval()
    fill(built)
    return built


def raw(seed: int) -> dict[str, Tensor]:
    """Features of one round before they are put together; residues are those of every round."""
    draw, same = random(seed), random(1000)
    shape = (1, TEMPLATES, RESIDUES)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=draw, dtype=torch.float64)

    def most(*sizes: int) -> Tensor:
        return (torch.rand(*sizes, generator=draw, dtype=torch.float64) > 0.15).double()

    mask = torch.ones(1, RESIDUES, dtype=torch.float64)
    mask[:, -2:] = 0
    return {
        "residue": torch.randint(20, (1, RESIDUES), generator=same),
        "mask": mask,
        "index": torch.arange(RESIDUES)[None],
        "target": normal(1, RESIDUES, 22),
        "alignment": normal(1, SEQUENCES, RESIDUES, 49),
        "alignment_mask": most(1, SEQUENCES, RESIDUES),
        "extra": normal(1, EXTRA, RESIDUES, 25),
        "extra_mask": most(1, EXTRA, RESIDUES),
        "template_pair": normal(*shape, RESIDUES, 88),
        "template_angles": normal(*shape, 57),
        "template_known": most(*shape),
        "template_there": torch.ones(1, TEMPLATES, dtype=torch.float64),
    }


def features(seed: int, dtype: torch.dtype = torch.float32) -> Features:
    found = {n: t.to(dtype) if t.is_floating_point() else t for n, t in raw(seed).items()}
    templates = Templates(*(found.pop(f"template_{name}") for name in ("pair", "angles", "known", "there")))
    return Features(**found, templates=templates)


def drawn_frames(count: int, seed: int) -> Frames:
    """[1, count], float32."""
    draw = random(seed)
    quaternion = torch.randn(1, count, 4, generator=draw)
    quaternion = quaternion / quaternion.norm(dim=-1, keepdim=True)
    return Frames(rotation_of(quaternion), torch.randn(1, count, 3, generator=draw) * 8)


def loss_inputs() -> dict[str, Tensor]:
    """What losses read, of one sample with `RESIDUES` residues."""
    draw, n = random(7), RESIDUES

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=draw)

    def most(*sizes: int) -> Tensor:
        return (torch.rand(*sizes, generator=draw) > 0.25).float()

    atoms = normal(1, n, 37, 3) * 5
    return {
        "x": normal(1, 20, 3) * 8, "true_x": normal(1, 20, 3) * 8, "x_mask": most(1, 20), "mask": most(1, n),
        "residue": torch.randint(20, (1, n), generator=draw), "raw": normal(3, 1, n, 7, 2),
        "chi": nn.functional.normalize(normal(1, n, 4, 2), dim=-1), "chi_mask": most(1, n, 4),
        "pairs": normal(1, n, n, 64), "beta": normal(1, n, 3) * 8, "rows": normal(1, SEQUENCES, n, 23),
        "true_rows": torch.randint(23, (1, SEQUENCES, n), generator=draw), "masked": most(1, SEQUENCES, n),
        "atom_scores": normal(1, n, 37), "seen": most(1, n, 37), "confidence": normal(1, n, 50),
        "atoms": atoms, "true_atoms": atoms + normal(1, n, 37, 3),
    }  # fmt: skip


def crowded() -> tuple[Tensor, Tensor, Tensor]:
    """Residues, their places and atoms of two pieces of a chain in which nothing is as it should be."""
    draw, n = random(9), RESIDUES
    residue, index = torch.randint(20, (1, n), generator=draw), torch.arange(n)[None].clone()
    residue[0, 1], residue[0, 4] = LETTERS.index("P"), LETTERS.index("C")
    index[:, n // 2 :] += 3
    start = 1.5 * torch.arange(n, dtype=torch.float64)[None, :, None, None]
    return residue, index, start + 2 * torch.randn(1, n, 14, 3, generator=draw, dtype=torch.float64)


PAIR = PairSizes(c_z=16, triangle=16, heads=2, head=8, factor=2, dropout=0.0)
SMALL = Sizes(
    block=BlockSizes(c_m=24, heads=2, head=8, outer=4, factor=2, dropout=0.0, pair=PAIR), blocks=1,
    extra_block=BlockSizes(c_m=8, heads=2, head=4, outer=4, factor=2, dropout=0.0, one_query=True, pair=PAIR),
    extra_blocks=1, template=None,
    structure=StructureSizes(c_s=32, c_z=16, head=8, heads=2, blocks=2, dropout=0.0, angles=16),
)  # fmt: skip


def helix(count: int) -> tuple[torch.Tensor, Frames, torch.Tensor]:
    """Residues, backbone and torsions of an ideal helix: 100 degrees and 1.5 angstroms a residue."""
    residue = torch.arange(count) % len(LETTERS)
    turn = torch.arange(count, dtype=torch.float64) * math.radians(100)
    zero, one = torch.zeros_like(turn), torch.ones_like(turn)
    rows = ([turn.cos(), -turn.sin(), zero], [turn.sin(), turn.cos(), zero], [zero, zero, one])
    about = torch.stack([torch.stack(row, -1) for row in rows], -2)
    origin = torch.stack([2.3 * turn.cos(), 2.3 * turn.sin(), 1.5 * turn / math.radians(100)], -1)
    angles = torch.zeros(count, 7, 2, dtype=torch.float64)
    angles[..., 1] = 1
    angles[:, 3:] = torch.tensor([math.sin(1.0), math.cos(1.0)])
    return residue[None], Frames(about[None], origin[None]), angles[None]
