"""Sizes of pictures: as they are written, and whether a model makes them."""

from __future__ import annotations

import re

from cai_apps.applications.diffusion.model.design import Design
from cai_mesh.errors import ConfigError

Size = int | tuple[int, int]
"""Side in pixels, or height and width, in the order of diffusers' arguments and of tensors."""


def parse_size(text: str) -> Size:
    """The size that "512" or "512x768" (height x width) says. Raises `ConfigError` for anything else."""
    match = re.fullmatch(r"(\d{1,6})(?:x(\d{1,6}))?", text.strip())
    if match is None:
        raise ConfigError(
            "no size of pictures", got=text, expected="as 512, or 512x768: height x width in pixels"
        )
    return int(match[1]) if match[2] is None else (int(match[1]), int(match[2]))


def sides(design: Design, size: Size | None) -> tuple[int, int]:
    """Height and width of pictures in pixels.

    Args:
        size: None: of the images that the denoiser was trained on.

    Raises:
        ConfigError: they do not divide into latents and patches, or are not of the kind that the denoiser makes.
    """
    if size is None:
        trained = design.denoiser["sample_size"]
        rows, columns = (trained, trained) if isinstance(trained, int) else trained
        size = (rows * design.factor, columns * design.factor)
    height, width = (size, size) if isinstance(size, int) else size
    if min(height, width) < 1 or height % design.multiple or width % design.multiple:
        raise ConfigError(
            "pictures of this size do not divide into latents and patches",
            got=f"{height} x {width}",
            expected=f"multiples of {design.multiple}",
        )
    if design.family.square and height != width:
        raise ConfigError(
            f"a {design.family.name} makes square pictures",
            got=f"{height} x {width}",
            fix="give one number for both sides",
        )
    most = design.denoiser.get("pos_embed_max_size")
    if most and max(height, width) > most * design.multiple:
        raise ConfigError(
            f"this {design.family.name} has positions for smaller pictures only",
            got=f"{height} x {width}",
            expected=f"{most * design.multiple} pixels a side at most",
        )
    return height, width
