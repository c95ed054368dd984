"""Writes what modules of OpenFold compute with the weights and inputs of `small_modules`, each by itself.

    PYTHONPATH=path/to/openfold:packages/cai-apps/tests python openfold_modules.py

As `openfold_values.py`. Kept of each module: results, of each gradient its norm and two of its numbers, and how far its
results are off in bf16 (the median over several inputs).
"""

from __future__ import annotations

from pathlib import Path

import torch
from openfold_values import openfold
from safetensors.torch import save_file
from small_modules import (
    C_M,
    C_S,
    C_T,
    C_Z,
    CASES,
    FACTOR,
    HEAD,
    HEADS,
    OUTER,
    Inputs,
    cast,
    frames_of,
    inputs,
    loss,
    typical_error,
)  # fmt: skip
from torch import Tensor, nn


def modules() -> dict:
    """By the names of `CASES`: a module of OpenFold, and how it is called."""
    from openfold.model import embedders, evoformer, msa, outer_product_mean, structure_module, template
    from openfold.model import triangular_attention as attention
    from openfold.model import triangular_multiplicative_update as multiplication
    from openfold.model.pair_transition import PairTransition

    def pair(module, given):
        return [module(given["z"], mask=given["z_mask"])]

    def alignment(module, given):
        return [module(given["m"], mask=given["m_mask"])]

    points = (C_S, C_Z, HEAD, HEADS, 4, 8)
    structure = structure_module.StructureModule(
        C_S, C_Z, HEAD, C_S, HEADS, 4, 8, 0.0, 2, 1, 2, 7, 10.0, 1e-8, 1e5
    )
    return {
        "row attention": (
            msa.MSARowAttentionWithPairBias(C_M, C_Z, HEAD, HEADS),
            lambda module, given: [module(given["m"], z=given["z"], mask=given["m_mask"])],
        ),
        "column attention": (msa.MSAColumnAttention(C_M, HEAD, HEADS), alignment),
        "global column attention": (msa.MSAColumnGlobalAttention(C_M, HEAD, HEADS), alignment),
        "transition": (evoformer.MSATransition(C_M, FACTOR), lambda module, given: [module(given["m"])]),
        "pair transition": (PairTransition(C_Z, FACTOR), lambda module, given: [module(given["z"])]),
        "outer product mean": (outer_product_mean.OuterProductMean(C_M, C_Z, OUTER), alignment),
        "triangle multiplication, outgoing": (multiplication.TriangleMultiplicationOutgoing(C_Z, C_Z), pair),
        "triangle multiplication, incoming": (multiplication.TriangleMultiplicationIncoming(C_Z, C_Z), pair),
        "triangle attention, starting": (attention.TriangleAttention(C_Z, HEAD, HEADS), pair),
        "triangle attention, ending": (attention.TriangleAttention(C_Z, HEAD, HEADS, starting=False), pair),
        "point attention": (
            structure_module.InvariantPointAttention(*points),
            lambda module, given: [module(given["s"], given["z"], rigid(given), given["mask"])],
        ),
        "angles": (
            structure_module.AngleResnet(C_S, C_S, 2, 7, 1e-8),
            lambda module, given: list(module(given["s"], given["start"])),
        ),
        "structure module": (structure, fold),
        "template stack": (
            template.TemplatePairStack(C_T, HEAD, C_T, 2, HEADS, FACTOR, 0.0, False, False, None),
            templates,
        ),
        "template attention": (
            template.TemplatePointwiseAttention(C_T, C_Z, HEAD, HEADS, inf=1e5),
            lambda module, given: [module(given["templates"], given["z"], template_mask=given["there"])],
        ),
        "input embedder": (
            embedders.InputEmbedder(22, 49, C_Z, C_M, 32),
            lambda module, given: list(module(given["target"], given["index"], given["alignment"])),
        ),
        "recycling embedder": (
            embedders.RecyclingEmbedder(C_M, C_Z, 3.25, 20.75, 15),
            lambda module, given: list(module(given["first"], given["z"], given["points"])),
        ),
    }


def rigid(given: Inputs):
    from openfold.utils.rigid_utils import Rigid, Rotation

    frames = frames_of(given)
    return Rigid(Rotation(rot_mats=frames.rotation), frames.origin)


def templates(module: nn.Module, given: Inputs) -> list[Tensor]:
    """Its transitions without a mask, which changes nothing that is read later."""
    mask = given["z_mask"][:, None]
    return [module(given["templates"], mask, chunk_size=None, _mask_trans=False).flatten(0, 1)]


def fold(module: nn.Module, given: Inputs) -> list[Tensor]:
    out = module({"single": given["s"], "pair": given["z"]}, given["residue"], given["mask"])
    positions = out["positions"]
    return [out["single"], positions[-1], positions[0], out["unnormalized_angles"][-1]]


def main() -> None:
    openfold()  # puts in what a CPU lacks
    values, theirs, given = {}, modules(), inputs()
    for name, case in CASES.items():
        module, call = theirs[name]
        ours, by_name = case.made(), dict(module.eval().named_parameters())
        with torch.no_grad():
            for own, param in ours.named_parameters():
                by_name.pop(case.theirs(own)).copy_(param)
        assert not by_name, (name, sorted(by_name))
        found = call(module, cast(given, torch.float32))
        loss(found).backward()
        by_name = dict(module.named_parameters())
        for number, value in enumerate(found):
            values[f"{name}.result.{number}"] = value
        for own, _ in ours.named_parameters():
            grad = by_name[case.theirs(own)].grad
            values[f"{name}.gradient.{own}"] = torch.stack(
                [grad.norm(), grad.flatten()[0], grad.flatten()[-1]]
            )
        try:
            half = module.bfloat16()
            off = typical_error(lambda held, half=half, call=call: call(half, held), case)
        except RuntimeError as said:  # OpenFold runs this in float32
            print(f"{name}: no bf16: {said}")
            continue
        values[f"{name}.bf16"] = torch.tensor([off])
        print(f"{name}: bf16 {off:.5f}")
    kept = {name: value.detach().float().contiguous() for name, value in values.items()}
    save_file(kept, Path(__file__).with_name("openfold_modules.safetensors"))


if __name__ == "__main__":
    main()
