"""Pictures with classes: read by number, scaled to the model's square, and normalized as the model expects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cai_apps.applications.classification.classes import classes_of, number_of
from cai_apps.applications.classification.config import DIGITS, Data
from cai_apps.data.images import Digits, Folder
from cai_apps.data.sealed import key_of
from cai_mesh.errors import DataError

PROCESSOR = "preprocessor_config.json"
"""The file that says how pictures are normalized, as transformers has it."""


@dataclass(frozen=True)
class Normalization:
    """What is taken from colours between 0 and 1, and what they are divided by.

    Args:
        mean, std: numbers for red, green and blue.
    """

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @staticmethod
    def of(directory: Path | None) -> Normalization:
        """Return that of a model's directory, or the default where nothing is said."""
        file = None if directory is None else directory / PROCESSOR
        if file is None or not file.is_file():
            return Normalization()
        table = json.loads(file.read_text(encoding="utf-8"))
        if not table.get("do_normalize", True):
            return Normalization((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        default = Normalization()
        return Normalization(
            tuple(table.get("image_mean", default.mean)), tuple(table.get("image_std", default.std))
        )

    def processor(self, side: int) -> dict[str, Any]:
        """Return the table by which transformers opens what prepares pictures."""
        return {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"height": side, "width": side},
            "resample": 3,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }


@dataclass(frozen=True)
class Pictures:
    """Pictures where they lie.

    Args:
        sources: those of "training", and of "validation" where it has a source of its own.
        classes: names of the classes.
        normalization: the treatment of colours.
        content: digest of the pictures and their classes.
    """

    sources: Mapping[str, Digits | Folder]
    classes: tuple[str, ...]
    normalization: Normalization
    content: str

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of samples of each part."""
        return {part: source.size for part, source in self.sources.items()}

    def rows(self, part: str, indices: np.ndarray) -> dict[str, Tensor]:
        """Return samples of a part by number: `pixel_values` float32 [n, 3, side, side], and labels int64 [n]."""
        source = self.sources[part]
        pictures = torch.from_numpy(np.stack([source.image(int(number)) for number in indices]))
        mean, std = (
            torch.tensor(values)[:, None, None]
            for values in (self.normalization.mean, self.normalization.std)
        )
        labels = [
            number_of(source.labels[source.label(int(number))], self.classes, part) for number in indices
        ]
        pixels = (pictures.permute(0, 3, 1, 2).float() / 255 - mean) / std
        return {"pixel_values": pixels.contiguous(), "labels": torch.tensor(labels)}


def prepare_pictures(
    data: Data, side: int, former: Mapping[int, str] | None, normalization: Normalization
) -> Pictures:
    """Look at the pictures of a config.

    Args:
        data: the sources.
        side: pixels of the square that the model sees.
        former: names of a pretrained model's classes.
        normalization: the treatment of colours.

    Raises:
        DataError: there are no pictures, one is in no class, or the classes of validation are others.
    """
    sources = {"training": source_of(data.source, side)}
    if data.validation_source is not None:
        sources["validation"] = source_of(data.validation_source, side)
    classes = classes_of(sources["training"].labels, former)
    for part, source in sources.items():
        for name in source.labels:
            number_of(name, classes, part)
    content = key_of(*(source.fingerprint(data.cache) for source in sources.values()))
    return Pictures(sources, classes, normalization, content)


def source_of(name: str, side: int) -> Digits | Folder:
    """Return the pictures of a source.

    Raises:
        DataError: there are none, or one is in no class.
    """
    if name == DIGITS:
        return Digits(side)
    folder = Folder.of(Path(name).expanduser(), side, "")
    if loose := [file for file in folder.files if file.parent.name not in folder.labels]:
        raise DataError(
            f"{len(loose)} of {folder.size} pictures are in no class",
            got=str(loose[0]),
            expected="a folder of pictures for each class, named by it",
        )
    return folder
