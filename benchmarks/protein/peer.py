"""OpenFold beside ours: its model and its block with our weights, and what it reads of one of our samples.

OpenFold (github.com/aqlaboratory/openfold, plain PyTorch) is fetched by the user and put on PYTHONPATH, as are
ml_collections and scipy, which it imports. DeepSpeed, FlashAttention and Lightning are not needed, nor its own CUDA
extension: where that is not built, the one attention that calls it is computed in plain torch.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import torch
from torch import Tensor, nn

from cai_apps.applications.protein import names
from cai_apps.applications.protein.chemistry import ATOMS, tables
from cai_apps.applications.protein.loss.whole import Truth
from cai_apps.applications.protein.model.alphafold import AlphaFold, Features, Sizes
from cai_apps.applications.protein.model.evoformer import BlockSizes

EXTENSION = "attn_core_inplace_cuda"
KINDS = 23


def openfold(module: str) -> types.ModuleType:
    """A module of OpenFold. Ends the program where there is none."""
    try:
        extension = importlib.import_module(EXTENSION)
    except ImportError:
        extension = sys.modules[EXTENSION] = types.ModuleType(EXTENSION)
    try:
        primitives = importlib.import_module("openfold.model.primitives")
        found = importlib.import_module(f"openfold.{module}")
    except ImportError as error:
        sys.exit(
            f"OpenFold cannot be imported: {error}\n"
            "fetch github.com/aqlaboratory/openfold, pip install ml_collections scipy dm-tree biopython, "
            "and put its directory on PYTHONPATH"
        )
    if not hasattr(extension, "backward_"):
        primitives.attention_core = _attention
    return found


def _attention(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor | None) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    for bias in biases:
        scores = scores if bias is None else scores + bias
    return scores.softmax(-1) @ v


def randomize(model: nn.Module, seed: int) -> None:
    """Weights that are all at work: as training starts, the last layers of updates are zero."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            value = torch.randn(param.shape, generator=draws)
            if param.dim() > 1:
                value = value / param.shape[-1] ** 0.5
            else:
                value = param.float().cpu() + 0.1 * value
            param.copy_(value)


def _copied(ours: nn.Module, theirs: nn.Module, table: dict[str, str]) -> None:
    """Fill OpenFold's parameters from ours, every one of them."""
    held = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, param in ours.named_parameters():
            held.pop(names.parameter(name, table)).copy_(param)
    if held:
        sys.exit(f"parameters of OpenFold without one of ours: {sorted(held)[:4]}")


def block(sizes: BlockSizes, ours: nn.Module) -> nn.Module:
    """Its EvoformerBlock with the weights of ours."""
    pair = sizes.pair
    theirs = openfold("model.evoformer").EvoformerBlock(
        c_m=sizes.c_m, c_z=pair.c_z, c_hidden_msa_att=sizes.head, c_hidden_opm=sizes.outer,
        c_hidden_mul=pair.triangle, c_hidden_pair_att=pair.head, no_heads_msa=sizes.heads,
        no_heads_pair=pair.heads, transition_n=sizes.factor, msa_dropout=sizes.dropout,
        pair_dropout=pair.dropout, no_column_attention=False, opm_first=False, fuse_projection_weights=False,
        inf=1e9, eps=1e-8,
    )  # fmt: skip
    _copied(ours, theirs, names.block(one_query=False))
    return theirs


def config_of(sizes: Sizes, *, checkpoints: bool) -> Any:
    """Its config of the first training, without templates, of as many blocks as ours."""
    config = openfold("config").model_config("initial_training", train=True)
    config.model.template.enabled = False
    config.model.heads.tm.enabled = config.loss.tm.enabled = sizes.errors
    evoformer, extra = config.model.evoformer_stack, config.model.extra_msa.extra_msa_stack
    evoformer.no_blocks, extra.no_blocks = sizes.blocks, sizes.extra_blocks
    config.model.structure_module.no_blocks = sizes.structure.blocks
    if not checkpoints:
        config.globals.blocks_per_ckpt, extra.ckpt = None, False
    return config


def model(config: Any, ours: AlphaFold | None, sizes: Sizes) -> nn.Module:
    """Its AlphaFold, with the weights of ours where there are any."""
    theirs = openfold("model.model").AlphaFold(config)
    if ours is not None:
        table = names.alphafold(sizes.blocks, sizes.extra_blocks, 0)
        _copied(ours, theirs, table)
    return theirs


def batch_of(rounds: list[Features], truth: Truth) -> dict[str, Tensor]:
    """One of our samples as it names them, the rounds along the last dim."""
    known = _known(truth)
    found = [_round(each) | known for each in rounds]
    return {name: torch.stack([each[name] for each in found], -1) for name in found[0]}


def _round(ours: Features) -> dict[str, Tensor]:
    kinds, there, amount = ours.extra.split((KINDS, 1, 1), -1)
    return {
        "aatype": ours.residue, "target_feat": ours.target, "residue_index": ours.index,
        "msa_feat": ours.alignment, "seq_mask": ours.mask, "msa_mask": ours.alignment_mask,
        "extra_msa": kinds.argmax(-1), "extra_has_deletion": there[..., 0],
        "extra_deletion_value": amount[..., 0], "extra_msa_mask": ours.extra_mask,
    }  # fmt: skip


def _known(truth: Truth) -> dict[str, Tensor]:
    """The structure, by its own transforms of atoms at their places among 37 kinds."""
    transforms = openfold("data.data_transforms")
    residue = truth.residue[0]
    table = tables()
    kind, there = table.kind[residue], table.there[residue] & truth.known[0]
    protein: dict[str, Tensor] = {
        "aatype": residue,
        "all_atom_positions": torch.zeros(len(residue), len(ATOMS), 3, dtype=torch.float64),
        "all_atom_mask": torch.zeros(len(residue), len(ATOMS), dtype=torch.float64),
    }
    place, at = there.nonzero().unbind(-1)
    protein["all_atom_positions"][place, kind[place, at]] = truth.atoms[0, place, at].double()
    protein["all_atom_mask"][place, kind[place, at]] = 1
    for change in (
        transforms.make_atom14_masks,
        transforms.make_atom14_positions,
        transforms.atom37_to_frames,
        transforms.atom37_to_torsion_angles(""),
        transforms.make_pseudo_beta(""),
        transforms.get_backbone_frames,
        transforms.get_chi_angles,
    ):
        protein = change(protein)
    fine = truth.fine[0] > 0
    protein |= {
        "true_msa": truth.rows[0], "bert_mask": truth.masked[0], "use_clamped_fape": truth.clamped[0],
        "resolution": torch.where(fine, 2.0, 9.0), "seq_length": truth.mask[0].sum().long(),
    }  # fmt: skip
    del protein["aatype"]
    return {
        name: (value.float() if value.is_floating_point() else value)[None] for name, value in protein.items()
    }
