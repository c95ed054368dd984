"""What the heads learn: distances, masked residues, atoms that are seen, and how far the structure is off."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cai_apps.applications.protein.loss.means import EPS, cross_entropy, mean
from cai_apps.applications.protein.loss.points import lddt
from cai_apps.applications.protein.model.frames import Frames


def _bins(squared: Tensor, first: float, last: float, count: int) -> Tensor:
    """Return in which of `count` bins squared distances lie; bounds from `first` to `last`, angstroms."""
    bounds = torch.linspace(first, last, count - 1, dtype=squared.dtype, device=squared.device).square()
    return (squared[..., None] > bounds).sum(-1)


def _both(mask: Tensor) -> Tensor:
    return mask[:, :, None] * mask[:, None]


def distogram(scores: Tensor, beta: Tensor, mask: Tensor) -> Tensor:
    """Section 1.9.8. scores [B, R, R, 64], true beta carbons [B, R, 3], mask [B, R] -> [B]."""
    apart = (beta[:, :, None] - beta[:, None]).square().sum(-1)
    return mean(cross_entropy(scores, _bins(apart, 2.3125, 21.6875, scores.shape[-1])), _both(mask))


def masked_residues(scores: Tensor, true: Tensor, masked: Tensor) -> Tensor:
    """Section 1.9.9. scores [B, S, R, 23], numbers of the true residues [B, S, R], which were masked -> [B]."""
    return mean(cross_entropy(scores, true), masked)


def resolved(scores: Tensor, observed_atoms: Tensor, atom_mask: Tensor) -> Tensor:
    """Section 1.9.10. scores [B, R, 37]; which atoms an experiment saw, and which a residue has, [B, R, 37] -> [B]."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return mean(
        F.binary_cross_entropy_with_logits(wide, observed_atoms.to(wide.dtype), reduction="none"), atom_mask
    )


def plddt(scores: Tensor, alpha: Tensor, true: Tensor, mask: Tensor) -> Tensor:
    """Section 1.9.6. scores [B, R, 50] of the lDDT of alpha carbons [B, R, 3] beside true ones, mask [B, R] -> [B]."""
    bins = scores.shape[-1]
    number = (lddt(alpha, true, mask) * bins).long().clamp(max=bins - 1)
    return mean(cross_entropy(scores, number), mask)


def aligned_errors(scores: Tensor, frames: Frames, true: Frames, mask: Tensor) -> Tensor:
    """Section 1.9.7. scores [B, R, R, 64] of where one residue lies, seen from another; mask [B, R] -> [B]."""
    with torch.no_grad():
        predicted_positions, true_positions = (
            residue_frames[..., None].inverted(residue_frames.origin[:, None])
            for residue_frames in (frames, true)
        )
        number = _bins((predicted_positions - true_positions).square().sum(-1), 0.0, 31.0, scores.shape[-1])
    return mean(cross_entropy(scores, number), _both(mask))


def _middles(device: torch.device, bins: int, last: float = 31.0) -> Tensor:
    """What the bins of aligned errors stand for, angstroms; the last, which has no end, for one step more."""
    bounds = torch.linspace(0.0, last, bins - 1, device=device)
    step = bounds[1]
    return torch.cat([bounds + step / 2, bounds[-1:] + 1.5 * step])


def confidence(scores: Tensor) -> Tensor:
    """The lDDT that scores [..., 50] let expect, 0 to 100, [...]."""
    bins = scores.shape[-1]
    middles = (torch.arange(bins, dtype=torch.float32, device=scores.device) + 0.5) * (100 / bins)
    return (scores.float().softmax(-1) * middles).sum(-1)


def predicted_errors(scores: Tensor) -> Tensor:
    """The aligned errors that scores [B, R, R, 64] let expect, angstroms, [B, R, R]."""
    return (scores.float().softmax(-1) * _middles(scores.device, scores.shape[-1])).sum(-1)


def predicted_tm(scores: Tensor, mask: Tensor) -> Tensor:
    """The TM-score that scores of aligned errors [B, R, R, 64] let expect (section 1.9.7), [B]; mask [B, R]."""
    weight = mask.float()
    scale = 1.24 * (weight.sum(-1).clamp(min=19) - 15) ** (1 / 3) - 1.8
    close = 1 / (1 + (_middles(scores.device, scores.shape[-1]) / scale[:, None]).square())
    term = (scores.float().softmax(-1) * close[:, None, None]).sum(-1)
    of_frames = (term * weight[:, None]).sum(-1) / (weight.sum(-1, keepdim=True) + EPS)
    return (of_frames * weight).amax(-1)
