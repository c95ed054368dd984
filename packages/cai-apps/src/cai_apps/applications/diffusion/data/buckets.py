"""Images of several shapes: each is scaled and cropped to the nearest of a list, and a batch has one shape.

Aspect-ratio bucketing, as NovelAI described it (2022): what squares would cut off is learned too, and all shapes have
about the same number of pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from cai_apps.applications.diffusion.data.samples import Images
from cai_apps.data.batches import mark
from cai_apps.data.shuffle import permute
from cai_mesh import rng
from cai_mesh.errors import DataError


@dataclass(frozen=True)
class Buckets:
    """Images of several shapes, as samples: those of a global batch have one.

    The shape is drawn for every batch, by how many images have it, and the images from those. So every image is as
    likely as any other, and any layout and a resumed run read the same.

    Args:
        images: images of a prepared source that has shapes.
        batch: samples of a global batch.
        seed: the seed of what is drawn.
        once: nothing is drawn: batches go through the images of one shape after the other, each image once, and what
            fills a shape's last batch has no target. So in validation.
    """

    images: Images
    batch: int
    seed: int
    once: bool = False

    @property
    def size(self) -> int:
        if self.once:
            return self.batch * sum(self._batches)
        return self.images.size

    @cached_property
    def _batches(self) -> list[int]:
        """Batches that the images of each shape fill."""
        return [-(-len(members) // self.batch) for members in self._members]

    @cached_property
    def _members(self) -> list[np.ndarray]:
        first, size = self.images.first, self.images.size
        bucket = self.images.prepared.open("bucket")[first : first + size].numpy()
        return [np.flatnonzero(bucket == number) for number in np.unique(bucket)]

    def rows(self, indices: np.ndarray, positions: np.ndarray) -> dict[str, Tensor]:
        """As of `Images`, of those that the places in the run say; `indices` are of no use.

        Raises:
            DataError: the places are of two global batches.
        """
        number = int(positions[0]) // self.batch
        if int(positions[-1]) // self.batch != number:
            raise DataError(
                "a global batch would have images of two shapes",
                got=f"places {positions[0]} to {positions[-1]} of the run, global batches of {self.batch}",
                cause="the run went on with another train.global_batch than it had",
                fix="set train.global_batch to what it was, or to a divisor of it",
            )
        if self.once:
            return self._next(number, positions)
        ends = np.cumsum([len(members) for members in self._members])
        drawn = rng.unit(rng.key(self.seed, "bucket"), torch.tensor([number])).item() * self.size
        members = self._members[int(np.searchsorted(ends, drawn, side="right"))]
        place = positions % self.batch % len(members)
        chosen = members[permute(place, len(members), seed=self.seed, epoch=number)]
        return self.images.rows(chosen, positions)

    def _next(self, number: int, positions: np.ndarray) -> dict[str, Tensor]:
        """Return the rows of a batch of images that are read once."""
        ends = np.cumsum(self._batches)
        shape = int(np.searchsorted(ends, number, side="right"))
        members, before = self._members[shape], int(ends[shape]) - self._batches[shape]
        place = positions - before * self.batch
        missing = place >= len(members)
        rows = self.images.rows(members[np.minimum(place, len(members) - 1)], positions)
        return mark(rows, torch.from_numpy(missing))
