"""Samples of a prepared source, and everything about them that is random.

What is drawn for a sample depends on the seed and on its number in the run's endless order alone. So every layout draws
the same, and a resumed run what the run before it would have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from cai_apps.applications.diffusion.data.cache import EMPTY, Prepared
from cai_mesh import rng
from cai_mesh.errors import DataError


@dataclass(frozen=True)
class Images:
    """The images [first, first + size) of a prepared source.

    Args:
        dropout: share of the samples whose caption is left empty, or whose label is the unknown one.
        seed: the seed that decides which those are, and the times of all samples.
    """

    prepared: Prepared
    first: int
    size: int
    dropout: float
    seed: int

    @cached_property
    def _files(self) -> dict[str, Tensor]:
        return {name: self.prepared.open(name) for name in self.prepared.tensors}

    def rows(self, indices: np.ndarray, positions: np.ndarray) -> dict[str, Tensor]:
        """What is known of samples.

        `pixels` uint8, or `mean` (and `std`) of the latents; `text` (and `pooled`), `tokens` or `label`; `u` float64,
        the time in (0, 1); and `position` int64, from which the noise is drawn on the device.
        """
        where, position = torch.from_numpy(self.first + indices), torch.from_numpy(positions)
        dropped = rng.unit(rng.key(self.seed, "dropped"), position) < self.dropout
        columns = {"position": position, "u": rng.unit(rng.key(self.seed, "time"), position)}
        columns |= self._pictures(where)
        if "label" in self._files:
            label = torch.where(dropped, self.prepared.classes, self._files["label"][where])
            return columns | {"label": label}
        captions = torch.where(dropped, EMPTY, self._files["caption"][where])
        texts = (name for name in ("tokens", "text", "pooled") if name in self._files)
        return columns | {name: self._files[name][captions] for name in texts}

    def _pictures(self, where: Tensor) -> dict[str, Tensor]:
        """Pixels or latents of images, which are of one shape."""
        names, ending = ("pixels", "mean", "std"), ""
        if "bucket" in self._files:
            ending, where = f".{int(self._files['bucket'][where[0]])}", self._files["row"][where]
        return {name: self._files[name + ending][where] for name in names if name + ending in self._files}


@dataclass(frozen=True)
class SubjectAndClass:
    """Images of a subject and of its class in turn: every even place of the run's order has the subject.

    Args:
        images: the images of both; the first `subject` are the subject's.
        weight: the weight of the loss of an image of the class.
    """

    images: Images
    subject: int
    weight: float

    @property
    def size(self) -> int:
        """Pairs of an image of the subject with one of the class."""
        return self.subject * (self.images.size - self.subject)

    def rows(self, indices: np.ndarray, positions: np.ndarray) -> dict[str, Tensor]:
        """As of `Images`, and `share` float64: the loss is the mean over the subject plus `weight` times that over
        the class, and each of the two is half of the batch."""
        first, class_size = self.subject, self.images.size - self.subject
        of_subject = positions % 2 == 0
        chosen = np.where(of_subject, indices % first, first + indices // first % class_size)
        share = torch.from_numpy(np.where(of_subject, 2.0, 2.0 * self.weight))
        return self.images.rows(chosen, positions) | {"share": share}


def draw(like: Tensor, position: Tensor, seed: int, purpose: str, most: int | None = None) -> Tensor:
    """Standard normal numbers in the shape of `like` [n, ...], float64: those of each sample by its position.

    Args:
        most: numbers that a sample of the run has at most, where not all have as many.
    """
    count = like[0].numel()
    index = position.unsqueeze(1) * (count if most is None else most) + torch.arange(
        count, device=position.device
    )
    return torch.special.ndtri(rng.unit(rng.key(seed, purpose), index)).view(like.shape)


def split(images: Images, fraction: float) -> tuple[Images, Images]:
    """Those to train on, and those for validation, none of whose captions are dropped.

    There is at least one of those where their fraction is above 0.

    Raises:
        DataError: nothing is left to train on.
    """
    held_out = max(1, round(images.size * fraction)) if fraction > 0 else 0
    if images.size <= held_out:
        raise DataError(
            "the source is too small to train on",
            got=f"{images.size} images",
            expected=f"more than {held_out}",
        )
    training = images.size - held_out
    return (
        replace(images, size=training),
        replace(images, first=images.first + training, size=held_out, dropout=0.0),
    )
