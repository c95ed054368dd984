"""One to three coloured shapes on a grid of nine places, and a caption that says which is where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cai_mesh import rng

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (240, 210, 40),
    "purple": (150, 60, 190),
    "orange": (245, 140, 30),
}
KINDS = ("circle", "square", "triangle")
SIZES = {"small": 0.2, "large": 0.3}
"""Side of a shape as a share of the image's."""
PLACES = tuple(
    f"{row} {column}" if (row, column) != ("middle", "middle") else "middle"
    for row in ("top", "middle", "bottom")
    for column in ("left", "middle", "right")
)
BACKGROUND = (235, 235, 230)
FINER = 4
"""Pixels are drawn as squares of so many, and averaged."""


@dataclass(frozen=True)
class Shape:
    size: str
    colour: str
    kind: str
    place: str

    def text(self) -> str:
        """Return the shape in words."""
        article = "a" if self.size[0] not in "aeiou" else "an"
        return f"{article} {self.size} {self.colour} {self.kind} at the {self.place}"


@dataclass(frozen=True)
class Shapes:
    """`size` images of `side` pixels; number n is the same whatever the others are."""

    size: int
    side: int
    seed: int = 0

    @property
    def labels(self) -> Sequence[str]:
        """The place of the first shape."""
        return PLACES

    def scene(self, number: int) -> tuple[Shape, ...]:
        """What is to be seen on an image."""
        numbers = np.random.default_rng(abs(rng.key(self.seed, "shapes", int(number))))
        count = int(numbers.integers(1, 4))
        places = numbers.permutation(len(PLACES))[:count]

        def pick(choices: Sequence[str]) -> str:
            return choices[int(numbers.integers(len(choices)))]

        return tuple(
            Shape(pick(list(SIZES)), pick(list(COLOURS)), pick(KINDS), PLACES[p]) for p in sorted(places)
        )

    def image(self, number: int) -> np.ndarray:
        return draw(self.scene(number), self.side)

    def caption(self, number: int) -> str:
        return " and ".join(shape.text() for shape in self.scene(number))

    def label(self, number: int) -> int:
        return PLACES.index(self.scene(number)[0].place)

    def fingerprint(self, cache: str) -> str:
        return f"shapes 1 {self.size} {self.side} {self.seed}"


def draw(scene: Sequence[Shape], side: int) -> np.ndarray:
    """uint8 [side, side, 3]."""
    from PIL import Image, ImageDraw

    full = side * FINER
    image = Image.new("RGB", (full, full), BACKGROUND)
    pen = ImageDraw.Draw(image)
    for shape in scene:
        row, column = divmod(PLACES.index(shape.place), 3)
        x, y, half = (2 * column + 1) * full / 6, (2 * row + 1) * full / 6, SIZES[shape.size] * full / 2
        box = (x - half, y - half, x + half, y + half)
        colour = COLOURS[shape.colour]
        if shape.kind == "circle":
            pen.ellipse(box, fill=colour)
        elif shape.kind == "square":
            pen.rectangle(box, fill=colour)
        else:
            pen.polygon([(x, y - half), (x - half, y + half), (x + half, y + half)], fill=colour)
    return np.asarray(image.resize((side, side), Image.Resampling.BOX))
