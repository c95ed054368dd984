"""Pictures with captions and labels, by number: scans of digits, or the user's own directory.

What a picture is depends only on its source, so every machine with the same files reads the same.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cai_apps.config.places import check_regular
from cai_apps.data.content import digest_of_files
from cai_mesh.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
OTHER_FORMATS = (
    ".tif", ".tiff", ".gif", ".heic", ".heif", ".avif", ".jxl", ".jp2", ".j2k", ".jfif", ".jpe", ".ico", ".tga",
    ".ppm", ".pgm", ".pnm", ".psd", ".svg", ".exr", ".hdr", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2",
    ".raf",
)  # fmt: skip
"""Endings of the names of pictures that are not read."""
ORIENTATION, LYING = 0x0112, (5, 6, 7, 8)
"""Key of EXIF, and its values for images whose sides change places when they are looked at."""
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Source(Protocol):
    """Images by number."""

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def labels(self) -> Sequence[str]:
        """Names of the labels; empty where there are none."""
        ...

    def image(self, number: int) -> np.ndarray:
        """uint8 [side, side, 3]."""
        ...

    def caption(self, number: int) -> str: ...

    def label(self, number: int) -> int:
        """Number of its label."""
        ...

    def fingerprint(self, cache: str) -> str:
        """Return what changes when any image, caption or label does, and only then.

        Args:
            cache: the directory `data.cache`, where digests of files are kept.
        """
        ...


@dataclass(frozen=True)
class Digits:
    """The 1,797 scans of digits, 8 x 8 pixels of 17 greys, that come with scikit-learn (UCI, Alpaydin and Kaynak)."""

    side: int

    @cached_property
    def _scans(self) -> tuple[np.ndarray, np.ndarray]:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise DataError(
                'data.source = "digits" needs scikit-learn', fix="pip install scikit-learn"
            ) from error
        digits = load_digits()
        return (digits.images * (255 / 16)).round().astype(np.uint8), digits.target  # type: ignore[union-attr]

    @property
    def size(self) -> int:
        return 1797

    @property
    def labels(self) -> Sequence[str]:
        return NUMBERS

    def image(self, number: int) -> np.ndarray:
        from PIL import Image

        scan = Image.fromarray(self._scans[0][number])
        return np.asarray(scan.resize((self.side, self.side), Image.Resampling.BILINEAR).convert("RGB"))

    def caption(self, number: int) -> str:
        return f"the digit {NUMBERS[self.label(number)]}"

    def label(self, number: int) -> int:
        return int(self._scans[1][number])

    def fingerprint(self, cache: str) -> str:
        return f"digits {self.side}"


@dataclass(frozen=True)
class Folder:
    """A directory of images, scaled so that one side fits and cropped in the middle."""

    files: tuple[Path, ...]
    captions: tuple[str, ...]
    side: int
    labels: tuple[str, ...]

    @staticmethod
    def of(directory: Path, side: int, caption: str | None) -> Folder:
        """Raises `DataError` where there are no images, or some without a caption."""
        if directory.exists() and not directory.is_dir():
            raise DataError(f"{directory} is no directory", expected="a directory of images")
        files = sorted(f for f in directory.rglob("*") if f.suffix.lower() in SUFFIXES)
        for file in files:
            check_regular(file)
        if not files:
            raise DataError(
                f"no images in {directory}",
                got=left_out(directory),
                expected=f"shapes, digits, or a directory with files {', '.join(SUFFIXES)}",
            )
        captions_by_file = _metadata(directory)
        captions = [_caption(file, directory, captions_by_file, caption) for file in files]
        without = [file.name for file, text in zip(files, captions, strict=True) if text is None]
        if without:
            raise DataError(
                f"{len(without)} of {len(files)} images have no caption",
                got=", ".join(without[:5]),
                expected="a .txt file of the same name, or a line in metadata.jsonl",
                fix="write them, or set data.caption to one for all of them",
            )
        labels = sorted({file.parent.name for file in files if file.parent != directory})
        return Folder(tuple(files), tuple(map(str, captions)), side, tuple(labels))

    @property
    def size(self) -> int:
        return len(self.files)

    def image(self, number: int, shape: tuple[int, int] | None = None) -> np.ndarray:
        """uint8 [height, width, 3] of `shape`; None: the square. Raises `DataError` for a file that is no image."""
        from PIL import Image, ImageOps

        height, width = shape or (self.side, self.side)
        with self._opened(number) as file:
            image = _colours(ImageOps.exif_transpose(file))
        return np.asarray(ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC))

    def shape(self, number: int) -> tuple[int, int]:
        """Height and width in pixels, as the image is looked at. Raises `DataError` for a file that is no image."""
        with self._opened(number) as file:
            lies = file.getexif().get(ORIENTATION, 1) in LYING
            return (file.width, file.height) if lies else (file.height, file.width)

    @contextmanager
    def _opened(self, number: int) -> Iterator[Image.Image]:
        from PIL import Image

        try:
            with Image.open(self.files[number]) as file:
                yield file
        except Exception as error:  # of every format, and of images that would fill the memory
            raise DataError(
                f"a damaged image: {self.files[number]}",
                cause=str(error) or type(error).__name__,
                fix="replace or remove it",
            ) from None

    def caption(self, number: int) -> str:
        return self.captions[number]

    def label(self, number: int) -> int:
        name = self.files[number].parent.name
        if name not in self.labels:
            raise DataError(
                f"{self.files[number]} has no label", expected="a subdirectory for each label, named by it"
            )
        return self.labels.index(name)

    def fingerprint(self, cache: str) -> str:
        images = digest_of_files({f"{n:09d}": file for n, file in enumerate(self.files)}, cache)
        labels = [file.parent.name if file.parent.name in self.labels else None for file in self.files]
        return hashlib.sha256(json.dumps([self.side, images, self.captions, labels]).encode()).hexdigest()


def left_out(directory: Path) -> str:
    """Return a line that counts the pictures of a directory that are not read, by endings; empty: there are none."""
    endings = Counter(file.suffix.lower() for file in directory.rglob("*") if file.is_file())
    counts = [f"{endings[ending]:,} {ending}" for ending in OTHER_FORMATS if endings[ending]]
    if not counts:
        return ""
    return f"left out of {directory}: {', '.join(counts)}; convert them to .png or .jpg to train on them"


def _colours(image: Image.Image) -> Image.Image:
    """Return an image in red, green and blue of 8 bits: 16 bits are scaled down, and what is transparent is white."""
    from PIL import Image

    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.float64) / 257
        image = Image.fromarray(grey.round().clip(0, 255).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def _metadata(directory: Path) -> dict[str, str]:
    """Captions by path or file name, of metadata.jsonl."""
    file = directory / "metadata.jsonl"
    captions_by_file = {}
    check_regular(file)
    try:
        lines = file.read_text(encoding="utf-8-sig").rstrip("\n").split("\n") if file.is_file() else []
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is no text", cause=str(error), expected="JSON, a line an image") from None
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            captions_by_file[record["file_name"]] = record["text"]
            record["text"].encode()  # a string, and no half of a surrogate pair
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DataError(
                f"a broken line: {file}:{number}", expected='{"file_name": ..., "text": ...}'
            ) from None
    return captions_by_file


def _caption(file: Path, directory: Path, captions_by_file: dict[str, str], common: str | None) -> str | None:
    """Return an image's caption: of the file beside it, else of metadata.jsonl by path or name, else the common one."""
    caption_file = file.with_suffix(".txt")
    check_regular(caption_file)
    if not caption_file.is_file():
        return captions_by_file.get(
            file.relative_to(directory).as_posix(), captions_by_file.get(file.name, common)
        )
    try:
        return caption_file.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise DataError(
            f"a caption that is no UTF-8 text: {caption_file}", cause=str(error), fix="save it as UTF-8"
        ) from None
