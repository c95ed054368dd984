"""What the model reads and learns of one chain: a piece of it, one draw of its alignment for each round.

All are padded to the same sizes, so that samples stack; what is padded is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from cai_apps.applications.protein.chemistry import GAP, UNKNOWN
from cai_apps.applications.protein.data import clusters, truth
from cai_apps.applications.protein.data.clusters import Masking
from cai_apps.applications.protein.data.sequences import Alignment
from cai_apps.applications.protein.data.structures import Chain
from cai_apps.applications.protein.data.templates import Template
from cai_apps.applications.protein.data.templates import features as template_features
from cai_apps.applications.protein.loss.whole import Truth
from cai_apps.applications.protein.model.alphafold import Features
from cai_mesh.errors import DataError

RESOLUTION = 3.0
"""Angstroms up to which confidence is learned from a structure (section 1.9.6)."""
T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """How much of a chain one sample holds.

    Args:
        residues: neighbouring ones, drawn where a chain has more.
        sequences: sequences of the alignment that lead clusters; extra: others.
        clamped: share of samples whose errors of the backbone have a most (section 1.11.5).
        masking: the masking of the alignment.
        templates: 0: features have none.
    """

    residues: int = 256
    sequences: int = 128
    extra: int = 1024
    clamped: float = 0.9
    masking: Masking = field(default_factory=Masking)
    templates: int = 0


def check_pair(alignment: Alignment, chain: Chain) -> None:
    """Raise `DataError` unless an alignment is of the sequence of a chain, with where they differ first."""
    one, other = alignment.residues[0], chain.residue
    if len(one) != len(other):
        raise DataError(
            f"the alignment is not of {chain.name}",
            got=f"{len(one)} residues in its first sequence ({alignment.names[0]})",
            expected=f"{len(other)} residues, {chain.sequence[:40]}",
        )
    differ = np.flatnonzero((one != other) & (one != UNKNOWN) & (other != UNKNOWN))
    if len(differ):
        raise DataError(
            f"the alignment is not of {chain.name}",
            got=f"another residue at place {differ[0] + 1}, and {len(differ) - 1} more",
            fix="align the sequence of the chain, with residues that have no atoms",
        )


def example(
    alignment: Alignment, chain: Chain, piece: Piece, rounds: int, generator: Generator,
    templates: Sequence[Template] = (),
) -> tuple[list[Features], Truth]:  # fmt: skip
    """A sample of a batch of one: the features of each round, and the truth of the last.

    Args:
        rounds: each has its own draw of the alignment; the piece and the templates are the same.
        templates: already chosen; the first are taken that the piece has room for.

    Raises `DataError` where the alignment or a template is of another sequence.
    """
    check_pair(alignment, chain)
    _check_templates(chain, templates)
    length = len(chain.residue)
    start = int(torch.randint(max(length - piece.residues, 0) + 1, (), generator=generator))
    at = slice(start, start + piece.residues)
    piece_alignment = Alignment(alignment.names, alignment.residues[:, at], alignment.deletions[:, at])
    clamped = float(torch.rand((), generator=generator) < piece.clamped)
    residue = torch.from_numpy(np.minimum(piece_alignment.residues[0], UNKNOWN)).long()
    drawn = [
        clusters.draw(piece_alignment, piece.sequences, piece.extra, piece.masking, generator)
        for _ in range(rounds)
    ]
    template_tensors = None
    if piece.templates:
        piece_templates = [template.cut(at) for template in templates]
        template_tensors = template_features(piece_templates, piece.residues, piece.templates)
    features = [replace(_features(residue, start, draw, piece), templates=template_tensors) for draw in drawn]
    return features, _truth(chain, at, drawn[-1], piece, clamped)


def query(
    alignment: Alignment, piece: Piece, rounds: int, generator: Generator,
    templates: Sequence[Template] = (),
) -> list[Features]:  # fmt: skip
    """The features of each round of a whole chain, whose structure nobody knows; a batch of one.

    Args:
        piece: the most sequences and templates that are read; nothing is padded.
        templates: the first are taken that the piece has room for.
    """
    residue = torch.from_numpy(np.minimum(alignment.residues[0], UNKNOWN)).long()
    sequences = min(piece.sequences, len(alignment.residues))
    extra = max(1, min(piece.extra, len(alignment.residues) - sequences))
    piece = replace(piece, residues=len(residue), sequences=sequences, extra=extra)
    drawn = (
        clusters.draw(alignment, piece.sequences, piece.extra, piece.masking, generator)
        for _ in range(rounds)
    )
    template_tensors = (
        template_features(templates, piece.residues, piece.templates) if piece.templates else None
    )
    return [replace(_features(residue, 0, draw, piece), templates=template_tensors) for draw in drawn]


def _check_templates(chain: Chain, templates: Sequence[Template]) -> None:
    for template in templates:
        if len(template.place) != len(chain.residue):
            raise DataError(
                f"template {template.chain.name} is not of {chain.name}",
                got=f"places of {len(template.place)} residues",
                expected=len(chain.residue),
            )


def _features(residue: Tensor, start: int, drawn: clusters.Clusters, piece: Piece) -> Features:
    count, rows, extra = piece.residues, piece.sequences, piece.extra
    residue_mask = torch.ones(len(residue))
    return Features(
        residue=_padded(residue, count, value=UNKNOWN)[None],
        mask=_padded(residue_mask, count)[None],
        index=(start + torch.arange(count))[None],
        target=_padded(clusters.target_features(residue), count)[None],
        alignment=_padded(drawn.features, rows, count)[None],
        alignment_mask=_padded(torch.ones(drawn.true.shape), rows, count)[None],
        extra=_padded(drawn.extra, extra, count)[None],
        extra_mask=_padded(torch.ones(drawn.extra.shape[:2]), extra, count)[None],
    )


def _truth(chain: Chain, at: slice, drawn: clusters.Clusters, piece: Piece, clamped: float) -> Truth:
    count, rows = piece.residues, piece.sequences
    residue = _padded(torch.from_numpy(chain.residue[at]), count, value=UNKNOWN)
    atoms = _padded(torch.from_numpy(chain.atoms[at]), count)
    atom_mask = _padded(torch.from_numpy(chain.known[at]), count)
    angles, angles_known = truth.torsions(residue, atoms, atom_mask)
    groups = truth.groups(residue, atoms, atom_mask)
    fine = float(0.1 <= chain.resolution <= RESOLUTION)
    padded_truth = Truth(
        residue, _padded(torch.ones(len(chain.residue[at])), count), atoms, atom_mask, angles, angles_known, groups,
        _padded(drawn.true, rows, count, value=GAP), _padded(drawn.masked.float(), rows, count),
        torch.tensor(clamped), torch.tensor(fine), at.start + torch.arange(count),
    )  # fmt: skip
    return each_tensor(padded_truth, lambda x: (x.float() if x.is_floating_point() else x)[None])


def stacked(samples: Sequence[T]) -> T:
    """Features or truths of samples as those of one batch."""
    first: Any = samples[0]
    if isinstance(first, Tensor):
        return torch.cat(list(samples))  # type: ignore[arg-type, return-value]
    if not is_dataclass(first):
        return first
    members = {f.name: stacked([getattr(sample, f.name) for sample in samples]) for f in fields(first)}
    return replace(first, **members)  # type: ignore[type-var]


def each_tensor(value: Any, change: Any) -> Any:
    """All tensors in a dataclass, and in those in it, changed."""
    if isinstance(value, Tensor):
        return change(value)
    if not is_dataclass(value):
        return value
    return replace(value, **{f.name: each_tensor(getattr(value, f.name), change) for f in fields(value)})  # type: ignore[type-var]


def _padded(x: Tensor, *sizes: int, value: float = 0) -> Tensor:
    """The first dims of x made as long as `sizes`."""
    widths = [0, 0] * (x.dim() - len(sizes))
    for dim in reversed(range(len(sizes))):
        widths += [0, sizes[dim] - x.shape[dim]]
    return F.pad(x, widths, value=value)
