"""What the model reads of an alignment: some sequences with those like them, masked here and there (section 1.2.7).

Which sequences lead a cluster, and what is masked, is drawn from a generator; all else follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from cai_apps.applications.protein.chemistry import GAP, LETTERS
from cai_apps.applications.protein.data.sequences import Alignment

MASK = 22
"""The number of what is masked."""
KINDS = 23
SMALL = 1e-6


@dataclass(frozen=True)
class Masking:
    """How residues of an alignment are masked for the model to find, as BERT does (Devlin et al., 2019).

    Args:
        share: the share of residues that are drawn for it.
        uniform, profile, same: shares of these that become any residue, one of their column, or stay; the rest are
            masked.
    """

    share: float = 0.15
    uniform: float = 0.1
    profile: float = 0.1
    same: float = 0.1


@dataclass(frozen=True)
class Clusters:
    """The features of one draw. S: sequences that lead a cluster; E: extra ones.

    Args:
        features: [S, R, 49]; extra: [E, R, 25].
        true: numbers of the residues before they were masked [S, R]; masked: which were [S, R].
    """

    features: Tensor
    extra: Tensor
    true: Tensor
    masked: Tensor


def draw(
    alignment: Alignment, sequences: int, extra: int, masking: Masking, generator: Generator
) -> Clusters:
    """Sequences that lead a cluster, the first always among them, and as many extra ones as there are at most."""
    residues = torch.from_numpy(alignment.residues).long()
    deletions = torch.from_numpy(alignment.deletions.astype("int32")).float()
    order = torch.cat(
        [torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(len(residues) - 1, generator=generator)]
    )
    leading_rows, extra_rows = order[:sequences], order[sequences:]
    profile = F.one_hot(residues, GAP + 1).float().mean(0)
    true = residues[leading_rows]
    corrupted_residues, masked = mask(true, profile, masking, generator)
    nearest = nearest_of(corrupted_residues, residues[extra_rows])
    likeness, lost = summaries(
        corrupted_residues, deletions[leading_rows], residues[extra_rows], deletions[extra_rows], nearest
    )
    features = torch.cat(
        [_sequence(corrupted_residues, deletions[leading_rows]), likeness, _squashed(lost)[..., None]], -1
    )
    sampled_rows = extra_rows[torch.randperm(len(extra_rows), generator=generator)[:extra]]
    return Clusters(features, _sequence(residues[sampled_rows], deletions[sampled_rows]), true, masked)


def target_features(residue: Tensor) -> Tensor:
    """Numbers of the residues [R] -> [R, 22]; the first feature, a break in the chain, is 0."""
    return F.pad(F.one_hot(residue, len(LETTERS) + 1).float(), (1, 0))


def mask(residues: Tensor, profile: Tensor, masking: Masking, generator: Generator) -> tuple[Tensor, Tensor]:
    """Residues [S, R] with some replaced, and which were drawn for it; profile [R, 22]: shares of a column."""
    uniform = torch.zeros(GAP + 1)
    uniform[: len(LETTERS)] = 1 / len(LETTERS)
    shares = (
        masking.uniform * uniform
        + masking.profile * profile
        + masking.same * F.one_hot(residues, GAP + 1).float()
    )
    hidden = 1 - masking.uniform - masking.profile - masking.same
    shares = F.pad(shares, (0, 1), value=hidden)
    drawn = torch.rand(residues.shape, generator=generator) < masking.share
    other = torch.multinomial(shares.flatten(0, 1), 1, generator=generator).view(residues.shape)
    return torch.where(drawn, other, residues), drawn


def nearest_of(leading: Tensor, extra: Tensor) -> Tensor:
    """Return the leading sequence [S, R] with which each other one [E, R] agrees at most places, by number [E].

    Gaps do not count.
    """
    leading_kinds, extra_kinds = (
        F.one_hot(residues, KINDS)[..., :GAP].float().flatten(1) for residues in (leading, extra)
    )
    return (extra_kinds @ leading_kinds.T).argmax(1)


def summaries(
    leading: Tensor, deletions: Tensor, extra: Tensor, extra_deletions: Tensor, nearest: Tensor
) -> tuple[Tensor, Tensor]:
    """Shares of the residues in each cluster [S, R, 23], and the mean number of deletions [S, R]."""
    counts = torch.ones(len(leading)).index_add_(0, nearest, torch.ones(len(extra)))
    counts = (counts + SMALL)[:, None]
    kinds = F.one_hot(leading, KINDS).float().index_add_(0, nearest, F.one_hot(extra, KINDS).float())
    lost = deletions.clone().index_add_(0, nearest, extra_deletions)
    return kinds / counts[..., None], lost / counts


def _sequence(residues: Tensor, deletions: Tensor) -> Tensor:
    """[n, R, 25]: the residue, whether some were deleted before it, how many."""
    return torch.cat(
        [
            F.one_hot(residues, KINDS).float(),
            deletions.clamp(max=1)[..., None],
            _squashed(deletions)[..., None],
        ],
        -1,
    )


def _squashed(deletions: Tensor) -> Tensor:
    """A number of deletions as a number below 1."""
    return torch.atan(deletions / 3) * (2 / math.pi)
