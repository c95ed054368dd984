"""Images that a diffusion model learns from: shapes drawn here, crops of a photo, scans of digits, or a directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from cai_apps.applications.diffusion.config import Data
from cai_apps.applications.diffusion.data.shapes import Shapes
from cai_apps.data.images import Digits, Folder, Source
from cai_mesh.errors import DataError

CROPS = ((150, 0, 400), (180, 20, 380), (120, 10, 417), (200, 40, 340))
"""Left, top and side of each crop of the flower, in pixels."""


def source_of(data: Data) -> Source:
    """The source that a config names.

    Raises:
        DataError: there is none, it is empty, or an image has no caption (all named).
    """
    if data.source == "shapes":
        return Shapes(data.samples, data.size)
    if data.source == "digits":
        return Digits(data.size)
    if data.source == "flower":
        return Crops(data.size, data.caption or "a flower")
    return Folder.of(Path(data.source).expanduser(), data.size, data.caption)


@dataclass(frozen=True)
class Crops:
    """Four crops of the photo of a flower that comes with scikit-learn (a dahlia, 640 x 427 pixels)."""

    side: int
    text: str

    @cached_property
    def _photo(self) -> np.ndarray:
        try:
            from sklearn.datasets import load_sample_image
        except ImportError as error:
            raise DataError(
                'data.source = "flower" needs scikit-learn', fix="pip install scikit-learn"
            ) from error
        return load_sample_image("flower.jpg")

    @property
    def size(self) -> int:
        return len(CROPS)

    @property
    def labels(self) -> Sequence[str]:
        return ()

    def image(self, number: int) -> np.ndarray:
        from PIL import Image

        first_column, first_row, side = CROPS[number]
        crop = Image.fromarray(self._photo[first_row : first_row + side, first_column : first_column + side])
        return np.asarray(crop.resize((self.side, self.side), Image.Resampling.BICUBIC))

    def caption(self, number: int) -> str:
        return self.text

    def label(self, number: int) -> int:
        raise DataError("the crops of one photo have no labels", expected="data.source = digits or shapes")

    def fingerprint(self, cache: str) -> str:
        return f"flower {self.side} {self.text}"
