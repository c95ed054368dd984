"""Rigid motions, one for a residue or a group of atoms: a rotation and an origin (section 1.8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def _mixed(first: Tensor, second: Tensor, third: Tensor, x: Tensor) -> Tensor:
    """Vectors [..., 3] in the shares that x [..., 3] has."""
    return first * x[..., :1] + second * x[..., 1:2] + third * x[..., 2:]


def product(one: Tensor, other: Tensor) -> Tensor:
    """Return the product of two rotations [..., 3, 3], written out because matrix units may round it to TF32."""
    return (one[..., :, :, None] * other[..., None, :, :]).sum(-2)


@dataclass(frozen=True)
class Frames:
    """Motions x -> rotation x + origin.

    Args:
        rotation: [..., 3, 3].
        origin: [..., 3].
    """

    rotation: Tensor
    origin: Tensor

    def __getitem__(self, at: tuple) -> Frames:
        """Frames at places of the leading dims, as of a tensor: `frames[..., None]` has a new last one."""
        return Frames(self.rotation[(*at, slice(None), slice(None))], self.origin[(*at, slice(None))])

    def apply(self, x: Tensor) -> Tensor:
        """Points [..., 3] of the frames, in the common space."""
        first, second, third = self.rotation.unbind(-1)
        return _mixed(first, second, third, x) + self.origin

    def inverted(self, x: Tensor) -> Tensor:
        """Points [..., 3] of the common space, in the frames."""
        first, second, third = self.rotation.unbind(-2)
        return _mixed(first, second, third, x - self.origin)

    def then(self, inner: Frames) -> Frames:
        """The motions that first do what `inner` says, then these."""
        return Frames(product(self.rotation, inner.rotation), self.apply(inner.origin))

    def scaled(self, factor: float) -> Frames:
        """The same with origins in another unit."""
        return Frames(self.rotation, self.origin * factor)


def from_points(on_axis: Tensor, origin: Tensor, in_plane: Tensor, eps: float = 1e-20) -> Frames:
    """Frames with an origin, a point on the negative x axis and one in the xy plane: Algorithm 21, turned about z.

    Args:
        on_axis, origin, in_plane: [..., 3].
    """
    first = _unit(origin - on_axis, eps)
    plane_vector = in_plane - origin
    second = _unit(plane_vector - (first * plane_vector).sum(-1, keepdim=True) * first, eps)
    third = torch.linalg.cross(first, second)
    return Frames(torch.stack([first, second, third], -1), origin)


def _unit(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt()


def rotation_of(quaternion: Tensor) -> Tensor:
    """The rotation [..., 3, 3] of a unit quaternion [..., 4], its real part first."""
    a, b, c, d = quaternion.unbind(-1)
    rows = [
        [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
        [2 * (b * c + a * d), a * a - b * b + c * c - d * d, 2 * (c * d - a * b)],
        [2 * (b * d - a * c), 2 * (c * d + a * b), a * a - b * b - c * c + d * d],
    ]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def turned(quaternion: Tensor, vector: Tensor) -> Tensor:
    """A unit quaternion after the turn (1, vector), which is made a unit one: lines 1 to 3 of Algorithm 23.

    Args:
        quaternion: [..., 4]; vector: [..., 3].
    """
    real, imaginary = quaternion[..., :1], quaternion[..., 1:]
    increment = torch.cat(
        [-(imaginary * vector).sum(-1, keepdim=True), real * vector + torch.linalg.cross(imaginary, vector)],
        -1,
    )
    turned_quaternion = quaternion + increment
    return turned_quaternion / torch.linalg.vector_norm(turned_quaternion, dim=-1, keepdim=True)
