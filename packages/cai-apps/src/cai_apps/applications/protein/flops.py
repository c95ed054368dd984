"""FLOPs of training on one sample."""

from __future__ import annotations

from cai_apps.applications.protein.config import Config
from cai_apps.applications.protein.design import sizes_for
from cai_apps.applications.protein.model.alphafold import Sizes
from cai_apps.applications.protein.model.evoformer import BlockSizes, PairSizes


def piece_flops(config: Config) -> float:
    """Forward and backward of the last round and forward of those before it, as many as there are on average.

    Products of the three stacks are counted, which are nearly all; a product of n x k by k x m is 2 n k m.
    """
    sizes = sizes_for(config)
    before = (config.objective.rounds - 1) / 2
    return (3 + before) * forward_flops(
        sizes, config.data.residues, config.data.sequences, config.data.extra, config.data.templates
    )


def forward_flops(sizes: Sizes, residues: int, sequences: int, extra: int, templates: int) -> float:
    """Return the FLOPs of one round, forward."""
    flops = sizes.blocks * block_flops(sizes.block, residues, sequences + templates)
    flops += sizes.extra_blocks * block_flops(sizes.extra_block, residues, extra)
    if sizes.template is not None:
        flops += templates * sizes.template.blocks * _pair(sizes.template.sizes, residues)
    return flops


def _attention(rows: int, length: int, width: int, inner: int) -> float:
    """Gated attention inside rows: five layers, and two products for each pair of places."""
    return 2 * rows * length * (5 * width * inner + 2 * length * inner)


def _pair(of: PairSizes, residues: int) -> float:
    inner, pairs = of.heads * of.head, residues**2
    multiplication = 2 * pairs * (4 * of.c_z * of.triangle + 2 * of.c_z**2 + residues * of.triangle)
    bias = 2 * pairs * of.c_z * of.heads
    attention = _attention(residues, residues, of.c_z, inner) + bias
    return 2 * (multiplication + attention) + 4 * pairs * of.factor * of.c_z**2


def block_flops(of: BlockSizes, residues: int, sequences: int) -> float:
    """Return the FLOPs of one block of a stack, forward."""
    inner, places, pairs = of.heads * of.head, sequences * residues, residues**2
    row = _attention(sequences, residues, of.c_m, inner) + 2 * pairs * of.pair.c_z * of.heads
    if of.one_query:  # queries of a column's mean, one head's keys and values
        column = 2 * places * of.c_m * (2 * of.head + 2 * inner) + 2 * residues * of.c_m * inner
        column += 4 * places * inner
    else:
        column = _attention(residues, sequences, of.c_m, inner)
    transition = 4 * places * of.factor * of.c_m**2
    outer = 2 * places * of.c_m * 2 * of.outer
    outer += 2 * pairs * of.outer**2 * (sequences + of.pair.c_z)
    return row + column + transition + outer + _pair(of.pair, residues)
