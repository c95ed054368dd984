"""Modules of AlphaFold by themselves, narrow, with drawn weights and inputs: alike everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from small_alphafold import RESIDUES, SEQUENCES, TEMPLATES, drawn_frames, fill, random
from torch import Tensor, nn

from cai_apps.applications.protein import names
from cai_apps.applications.protein.chemistry import LETTERS
from cai_apps.applications.protein.model.alignment import ColumnAttention, OuterProductMean, RowAttention
from cai_apps.applications.protein.model.atoms import atoms_of, groups_of
from cai_apps.applications.protein.model.embed import InputEmbedder, RecyclingEmbedder
from cai_apps.applications.protein.model.evoformer import PairSizes
from cai_apps.applications.protein.model.frames import Frames
from cai_apps.applications.protein.model.layers import Transition
from cai_apps.applications.protein.model.pair import TriangleAttention, TriangleMultiplication
from cai_apps.applications.protein.model.points import PointAttention
from cai_apps.applications.protein.model.structure import Angles, StructureModule, StructureSizes
from cai_apps.applications.protein.model.template import TemplateAttention, TemplateBlock

C_M, C_Z, C_S, C_T, HEADS, HEAD, OUTER, FACTOR = 24, 16, 32, 8, 2, 8, 4, 2
SIZES = StructureSizes(c_s=C_S, c_z=C_Z, head=HEAD, heads=HEADS, blocks=2, dropout=0.0, angles=C_S)
TEMPLATE = PairSizes(c_z=C_T, triangle=C_T, heads=HEADS, head=HEAD, factor=FACTOR, dropout=0.0)
Inputs = dict[str, Tensor]


def inputs(seed: int = 11) -> Inputs:
    """By name; masks are of 0 and 1, all else is drawn. float64."""
    draw = random(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(1, *sizes, generator=draw, dtype=torch.float64)

    def most(*sizes: int) -> Tensor:
        return (torch.rand(1, *sizes, generator=draw) > 0.2).double()

    n, frames = RESIDUES, drawn_frames(RESIDUES, 3)
    mask = most(n)
    return {
        "m": normal(SEQUENCES, n, C_M), "z": normal(n, n, C_Z), "s": normal(n, C_S), "m_mask": most(SEQUENCES, n),
        "z_mask": most(n, n), "mask": mask, "templates": normal(TEMPLATES, n, n, C_T),
        "there": torch.tensor([[1.0, 0.0]]), "rotation": frames.rotation.double(), "origin": frames.origin.double(),
        "target": normal(n, 22), "alignment": normal(SEQUENCES, n, 49), "first": normal(n, C_M),
        "points": 9 * normal(n, 3), "start": normal(n, C_S),
        "residue": torch.randint(len(LETTERS), (1, n), generator=draw), "index": 3 * torch.arange(n)[None],
    }  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A module.

    Args:
        build: ours.
        call: (module, inputs) -> what is compared.
        table: of its modules, ours and OpenFold's.
    """

    build: Callable[[], nn.Module]
    call: Callable[[nn.Module, Inputs], list[Tensor]]
    table: dict[str, str]

    def made(self) -> nn.Module:
        module = self.build().eval()
        fill(module)
        return module

    def theirs(self, name: str) -> str:
        """OpenFold's name of one of our parameters."""
        module, _, leaf = name.rpartition(".")
        if name == "weight" or name == "attention.weight":  # of point attention's heads
            return f"{self.table[module]}.head_weights".removeprefix(".")
        return f"{self.table[module]}.{leaf}"


def _part(table: dict[str, str], ours: str, theirs: str) -> dict[str, str]:
    """What a table says of a module within another."""
    kept = {own: name for own, name in table.items() if own.startswith(f"{ours}.")}
    return {own.removeprefix(f"{ours}."): name.removeprefix(f"{theirs}.") for own, name in kept.items()}


def _pair_case(build: Callable[[], nn.Module], ours: str, theirs: str) -> Case:
    """Of a module of the pair, which it reads with its mask."""
    table = _part(names.pair_updates("x", "y"), f"x.{ours}", f"y.{theirs}")
    return Case(build, lambda module, given: [module(given["z"], given["z_mask"])], table)


class TemplateStack(nn.Module):
    """The blocks that each template goes through by itself, and the layer norm after them."""

    def __init__(self, sizes: PairSizes, blocks: int):
        super().__init__()
        self.blocks = nn.ModuleList(TemplateBlock(sizes) for _ in range(blocks))
        self.norm = nn.LayerNorm(sizes.c_z)

    def forward(self, t: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            t = block(t, mask)
        return self.norm(t)


def _templates(module: nn.Module, given: Inputs) -> list[Tensor]:
    t = given["templates"].flatten(0, 1)
    return [module(t, given["z_mask"].expand(len(t), -1, -1))]


def _angles(module: nn.Module, given: Inputs) -> list[Tensor]:
    return list(module(given["s"], given["start"]))


def _structure(module: nn.Module, given: Inputs) -> list[Tensor]:
    found = module(given["s"], given["z"], given["mask"], given["residue"])
    first, last = found.blocks[0], found.blocks[-1]
    begun = atoms_of(groups_of(first.frames, first.angles, given["residue"]), given["residue"])
    return [found.s, found.atoms, begun, last.raw_angles]


BLOCK, GLOBAL, STRUCTURE = names.block(one_query=False), names.block(one_query=True), names.structure()
CASES: dict[str, Case] = {
    "row attention": Case(
        lambda: RowAttention(C_M, C_Z, HEADS, HEAD),
        lambda module, given: [module(given["m"], given["z"], given["m_mask"])],
        _part(BLOCK, "row", "msa_att_row"),
    ),
    "column attention": Case(
        lambda: ColumnAttention(C_M, HEADS, HEAD),
        lambda module, given: [module(given["m"], given["m_mask"])],
        _part(BLOCK, "column", "msa_att_col"),
    ),
    "global column attention": Case(
        lambda: ColumnAttention(C_M, HEADS, HEAD, one_query=True),
        lambda module, given: [module(given["m"], given["m_mask"])],
        _part(GLOBAL, "column", "msa_att_col"),
    ),
    "transition": Case(
        lambda: Transition(C_M, FACTOR),
        lambda module, given: [module(given["m"])],
        _part(BLOCK, "transition", "msa_transition"),
    ),
    "pair transition": Case(
        lambda: Transition(C_Z, FACTOR),
        lambda module, given: [module(given["z"])],
        _part(names.pair_updates("x", "y"), "x.transition", "y.pair_transition"),
    ),
    "outer product mean": Case(
        lambda: OuterProductMean(C_M, C_Z, OUTER),
        lambda module, given: [module(given["m"], given["m_mask"])],
        _part(BLOCK, "outer", "outer_product_mean"),
    ),
    "triangle multiplication, outgoing": _pair_case(
        lambda: TriangleMultiplication(C_Z, C_Z, outgoing=True), "outgoing", "tri_mul_out"
    ),
    "triangle multiplication, incoming": _pair_case(
        lambda: TriangleMultiplication(C_Z, C_Z, outgoing=False), "incoming", "tri_mul_in"
    ),
    "triangle attention, starting": _pair_case(
        lambda: TriangleAttention(C_Z, HEADS, HEAD, starting=True), "starting", "tri_att_start"
    ),
    "triangle attention, ending": _pair_case(
        lambda: TriangleAttention(C_Z, HEADS, HEAD, starting=False), "ending", "tri_att_end"
    ),
    "point attention": Case(
        lambda: PointAttention(C_S, C_Z, HEAD, HEADS),
        lambda module, given: [module(given["s"], given["z"], frames_of(given), given["mask"])],
        _part(STRUCTURE, "attention", "ipa") | {"": ""},
    ),
    "angles": Case(lambda: Angles(C_S, C_S, 2), _angles, _part(STRUCTURE, "angles", "angle_resnet")),
    "structure module": Case(lambda: StructureModule(SIZES), _structure, STRUCTURE),
    "template stack": Case(
        lambda: TemplateStack(TEMPLATE, 2),
        _templates,
        names.pair_updates("blocks.0", "blocks.0")
        | names.pair_updates("blocks.1", "blocks.1")
        | {"norm": "layer_norm"},
    ),
    "template attention": Case(
        lambda: TemplateAttention(C_Z, C_T, HEADS, HEAD),
        lambda module, given: [module(given["z"], given["templates"], given["there"])],
        _part(names.template_embedder(0), "attention", "template_pointwise_att"),
    ),
    "input embedder": Case(
        lambda: InputEmbedder(22, 49, C_M, C_Z),
        lambda module, given: list(module(given["target"], given["index"], given["alignment"])),
        names.input_embedder(),
    ),
    "recycling embedder": Case(
        lambda: RecyclingEmbedder(C_M, C_Z),
        lambda module, given: list(module(given["first"], given["z"], given["points"])),
        names.recycling_embedder(),
    ),
}
"""By the name of what they are in the supplement."""
SEEDS = range(100, 115)
WIDE = ("rotation", "origin", "points")
"""Inputs that are float32 where all else is in fewer bits."""


def frames_of(given: Inputs) -> Frames:
    return Frames(given["rotation"], given["origin"])


def cast(given: Inputs, dtype: torch.dtype) -> Inputs:
    """Inputs in a dtype, coordinates in float32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    return {
        name: value.to(wide if name in WIDE else dtype) if value.is_floating_point() else value
        for name, value in given.items()
    }


def error(found: list[Tensor], true: list[Tensor]) -> float:
    """How far results are off, by their norms."""
    off = torch.stack([(a.double() - b).norm() for a, b in zip(found, true, strict=True)]).norm()
    return float(off / torch.stack([b.norm() for b in true]).norm())


def typical_error(call: Callable[[Inputs], list[Tensor]], case: Case) -> float:
    """The median over several inputs of how far results in bf16 are off from ours in float64."""
    exact = case.made().double()
    found = []
    for seed in SEEDS:
        given = inputs(seed)
        with torch.no_grad():
            true = case.call(exact, cast(given, torch.float64))
            found.append(error(call(cast(given, torch.bfloat16)), true))
    return median(found)


def loss(found: list[Tensor]) -> Tensor:
    """Something of which every parameter has a gradient."""
    return sum((value.square().mean() for value in found), torch.zeros((), dtype=found[0].dtype))
