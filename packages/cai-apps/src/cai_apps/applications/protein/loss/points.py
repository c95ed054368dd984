"""Errors of points as residues see them (FAPE, Algorithm 28): no motion of the whole changes them, a mirror does."""

from __future__ import annotations

import torch
from torch import Tensor

from cai_apps.applications.protein.model.frames import Frames

SMALL = 1e-4
"""What is added under the root, squared angstroms, and to the counts that means divide by."""


def fape(
    frames: Frames,
    x: Tensor,
    true_frames: Frames,
    true_x: Tensor,
    frame_mask: Tensor,
    x_mask: Tensor,
    *,
    clamp: float | None = 10.0,
    scale: float = 10.0,
) -> Tensor:
    """The mean distance between points and true points, each pair seen from each frame and its true frame, [B].

    Args:
        frames, true_frames: [B, F]; frame_mask: [B, F].
        x, true_x: [B, P, 3], angstroms; x_mask: [B, P].
        clamp: distances count as this at most, angstroms; None: there is no most.
        scale: the distance that counts as 1, angstroms.
    """
    return _mean(_apart(frames, x, true_frames, true_x), frame_mask, x_mask, clamp, scale)


def _apart(frames: Frames, x: Tensor, true_frames: Frames, true_x: Tensor) -> Tensor:
    """How far each point lies from its true one, seen from each frame: [B, F, P]."""
    local_points = frames[..., None].inverted(x[:, None])
    true_local_points = true_frames[..., None].inverted(true_x[:, None])
    return ((local_points - true_local_points).square().sum(-1) + SMALL).sqrt()


def _mean(
    distance: Tensor, frame_mask: Tensor, x_mask: Tensor, clamp: float | None, scale: float = 10.0
) -> Tensor:
    if clamp is not None:
        distance = distance.clamp(max=clamp)
    frame_mask, x_mask = (mask.to(distance.dtype) for mask in (frame_mask, x_mask))
    seen_from = (distance / scale * frame_mask[..., None] * x_mask[:, None]).sum(-1)
    of_frames = (seen_from / (frame_mask.sum(-1, keepdim=True) + SMALL)).sum(-1)
    return of_frames / (x_mask.sum(-1) + SMALL)


def backbone(placed: Frames, true: Frames, mask: Tensor, clamped: Tensor) -> Tensor:
    """FAPE of the backbone's origins from its frames; `clamped` [B] is 0 where a sample has no most (section 1.11.5).

    Args:
        placed, true: [B, R]; mask: [B, R].
    """
    distance = _apart(placed, placed.origin, true, true.origin)
    most, all_of_it = (_mean(distance, mask, mask, clamp) for clamp in (10.0, None))
    return clamped * most + (1 - clamped) * all_of_it


def distances(x: Tensor) -> Tensor:
    """Return the distances between each two of the points [B, n, 3]: [B, n, n]."""
    return ((x[:, :, None] - x[:, None]).square().sum(-1) + 1e-10).sqrt()


@torch.no_grad()
def lddt(x: Tensor, true: Tensor, mask: Tensor, cutoff: float = 15.0) -> Tensor:
    """How well the surroundings of each point are met (Mariani et al., 2013), in [0, 1], [B, n].

    The share of true distances below `cutoff` (angstroms) that are met within 0.5, 1, 2 and 4, on average.

    Args:
        x, true: [B, n, 3]; mask: [B, n].
    """
    predicted_distances, true_distances = distances(x), distances(true)
    mask = mask.to(predicted_distances.dtype)
    diagonal = torch.eye(x.shape[1], dtype=predicted_distances.dtype, device=x.device)
    counts = (
        (true_distances < cutoff).to(predicted_distances.dtype)
        * mask[:, :, None]
        * mask[:, None]
        * (1 - diagonal)
    )
    deviation = (predicted_distances - true_distances).abs()
    met = sum((deviation < bound).to(predicted_distances.dtype) for bound in (0.5, 1.0, 2.0, 4.0)) / 4
    return (1e-10 + (counts * met).sum(-1)) / (1e-10 + counts.sum(-1))
