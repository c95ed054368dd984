"""Strips of a picture, and the maths of layers that look across their edges; no communication."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cai_mesh.errors import ConfigError, PlanError


@dataclass(frozen=True)
class Strips:
    """Horizontal strips of equal height, from top to bottom.

    Args:
        count: the number of strips.
        index: the number of one's own strip, from 0 at the top.
    """

    count: int
    index: int

    def check(self, height: int, multiple: int) -> None:
        """Refuse heights that do not divide into strips.

        Args:
            height: rows of the latents.
            multiple: the number that the rows of each strip must be a multiple of.

        Raises:
            ConfigError: they do not divide.
        """
        if height <= 0 or height % (self.count * multiple):
            raise ConfigError(
                "the rows of the latents do not divide among the ranks",
                got=height,
                expected=f"a multiple of {self.count * multiple}: {self.count} ranks x {multiple}",
                fix="another size, or fewer ranks",
            )

    def cut(self, full_tensor: Tensor, dim: int = -2) -> Tensor:
        """One's own part of `full_tensor` along a dimension that `count` divides."""
        return full_tensor.chunk(self.count, dim)[self.index].contiguous()

    def widen(self, local_part: Tensor, dim: int = -2) -> Tensor:
        """A tensor as large as the whole, with one's own part in its place and zeros elsewhere."""
        parts = [torch.zeros_like(local_part)] * self.count
        return torch.cat([*parts[: self.index], local_part, *parts[self.index + 1 :]], dim)

    def with_halo(self, strip: Tensor, edges: list[Tensor], rows: int) -> Tensor:
        """Rows [n, c, h, w] with `rows` more above and below; zeros beyond the picture.

        Args:
            strip: the rows of this rank.
            edges: the first and last rows of each strip, [n, c, 2 rows, w].
            rows: the number of rows of the halo on each side.
        """
        none = torch.zeros_like(strip[:, :, :rows])
        above = edges[self.index - 1][:, :, rows:] if self.index else none
        below = edges[self.index + 1][:, :, :rows] if self.index + 1 < self.count else none
        return torch.cat([above, strip, below], 2)


def edges_of(strip: Tensor, rows: int) -> Tensor:
    """The first and the last rows of a strip [n, c, h, w], as [n, c, 2 rows, w].

    Raises:
        ConfigError: the strip has fewer rows than that.
    """
    if strip.shape[2] < rows:
        raise ConfigError("a strip has too few rows", got=strip.shape[2], expected=f"{rows} or more")
    return torch.cat([strip[:, :, :rows], strip[:, :, strip.shape[2] - rows :]], 2)


def halo_rows(conv: nn.Conv2d, name: str) -> int:
    """Rows of its neighbours that a convolution looks at, above and below.

    Raises:
        PlanError: its strips would not be those of one device.
    """
    (kernel, _), (stride, _), (dilation, _) = conv.kernel_size, conv.stride, conv.dilation
    padding = conv.padding[0]
    if not isinstance(padding, str) and dilation == 1:
        if padding == 0 and kernel == stride:
            return 0
        if kernel == 2 * padding + 1 and (conv.padding_mode == "zeros" or padding == 0):
            return int(padding)
    raise PlanError(
        f"the convolution {name} cannot work on strips",
        got=conv,
        expected="zeros as padding, of half the kernel; or a kernel as high as its stride without padding",
    )


def moments(x: Tensor, groups: int) -> Tensor:
    """Mean and mean of squares of each group of channels, float64 [2, n, groups], of x [n, c, ...].

    They are summed about the mean in float32 or more, so large means lose nothing.
    """
    grouped = x.reshape(len(x), groups, -1)
    grouped = grouped.to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(grouped, -1, correction=0)
    mean, variance = mean.double(), variance.double()
    return torch.stack([mean, variance + mean.square()])


def whole_moments(strip_moments: Tensor, remembered: list[Tensor], index: int) -> Tensor:
    """Mean and variance of the whole picture, float64 [2, n, groups].

    One's own fresh moments, and what those of the whole differed by when all were last known (DistriFusion,
    arXiv:2402.19481, section 4.3). Where that makes a variance below zero, one's own is taken.

    Args:
        strip_moments: `moments` of one's own strip.
        remembered: `moments` of all strips at one step; where that is this step, the result is exact.
        index: the number of one's own strip.
    """
    mean, square = strip_moments + (torch.stack(remembered).mean(0) - remembered[index])
    strip_variance = strip_moments[1] - strip_moments[0].square()
    variance = square - mean.square()
    return torch.stack([mean, torch.where(variance < 0, strip_variance, variance).clamp_min(0)])


def normalize(x: Tensor, norm: nn.GroupNorm, statistics: Tensor) -> Tensor:
    """A group normalization of x [n, c, ...] by a mean and a variance [2, n, groups]."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    mean = statistics[0].to(dtype).unsqueeze(-1)
    scale = (statistics[1] + norm.eps).rsqrt().to(dtype).unsqueeze(-1)
    out = ((x.reshape(len(x), norm.num_groups, -1).to(dtype) - mean) * scale).view(x.shape)
    if norm.affine:
        shape = (1, -1) + (1,) * (x.dim() - 2)
        out = out * norm.weight.to(dtype).view(shape) + norm.bias.to(dtype).view(shape)
    return out.to(x.dtype)
