"""The frozen parts of a model: an autoencoder between pixels and latents, and text encoders.

Without an autoencoder latents are the pixels themselves, with squares of them folded into channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cai_apps.applications.diffusion.config import Config
from cai_apps.applications.diffusion.model.captions import build_text_encoder
from cai_apps.applications.diffusion.model.design import TEXTS, Design
from cai_apps.applications.diffusion.model.loading import Decoding, decoding_of, free_bytes, read_part

LARGEST_TILE = 64
"""Latents along a side of a tile."""


@dataclass(frozen=True)
class Autoencoder:
    """A map between pixels, uint8 [n, 3, h, w], and latents [n, c, h / factor, w / factor].

    Args:
        design: the design that it belongs to.
        model: an `AutoencoderKL`; None: pixels are folded.
        decoding: the way pictures are decoded (`loading.Memory`).
    """

    design: Design
    model: Any = None
    decoding: Decoding = "auto"

    @torch.no_grad()
    def moments(self, pixels: Tensor) -> dict[str, Tensor]:
        """Mean and standard deviation of the latents, or the latents themselves as `mean`.

        Images are encoded one by one where memory is short, never in tiles.
        """
        images = pixels.to(self._dtype) / 127.5 - 1
        if self.model is None:
            return {"mean": nn.functional.pixel_unshuffle(images, self.design.fold)}
        self._cut("whole" if self._that_fits(images, 1) == "whole" else "sliced")
        posterior = self.model.encode(images).latent_dist
        return {"mean": posterior.mean, "std": posterior.std}

    def latents(self, mean: Tensor, std: Tensor | None, noise: Tensor | None) -> Tensor:
        """A draw of the latents, in the scale that denoisers work in."""
        drawn = mean if std is None or noise is None else mean + std * noise
        return drawn if self.model is None else (drawn - self._shift) * self.model.config.scaling_factor

    @torch.no_grad()
    def images(self, latents: Tensor) -> Tensor:
        """uint8 [n, 3, h, w] of latents in that scale."""
        latents = latents.to(self._dtype)
        if self.model is None:
            pictures = nn.functional.pixel_shuffle(latents, self.design.fold)
        else:
            self._cut(
                self._that_fits(latents, self.design.factor) if self.decoding == "auto" else self.decoding
            )
            pictures = self.model.decode(latents / self.model.config.scaling_factor + self._shift).sample
        return ((pictures + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)

    def _that_fits(self, x: Tensor, factor: int) -> Literal["whole", "sliced", "tiled"]:
        n, _, height, width = x.shape
        sides = height * factor, width * factor
        return decoding_of(self.model.config, n, *sides, x.element_size(), free_bytes(x.device))

    def _cut(self, how: str) -> None:
        """Let diffusers' model work in this way.

        Tiles are as large as the images it was trained on, 64 latents at most, and a multiple of 4: a quarter of one
        overlaps the next, and diffusers' tiles do not meet where that is no whole number.
        """
        self.model.use_slicing, self.model.use_tiling = how != "whole", how == "tiled"
        size = self.model.config.sample_size
        side = min(max(size if isinstance(size, int) else max(size), 1) // self.design.factor, LARGEST_TILE)
        self.model.tile_latent_min_size = max(side - side % 4, 8)
        self.model.tile_sample_min_size = self.model.tile_latent_min_size * self.design.factor

    @property
    def _shift(self) -> float:
        return self.model.config.get("shift_factor") or 0.0

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float32 if self.model is None else next(self.model.parameters()).dtype


def encoder_directory(config: Config, design: Design) -> Path | None:
    """Where the weights of frozen encoders are; None: they are random."""
    return design.directory if config.model.weights == "pretrained" else None


def load_autoencoder(
    design: Design,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
    directory: Path | None = None,
) -> Autoencoder:
    """The autoencoder of a design, frozen: from a directory of diffusers where there is one, else of random weights."""
    if design.autoencoder is None:
        return Autoencoder(design)
    from diffusers import AutoencoderKL

    if directory is not None:
        model: Any = read_part(AutoencoderKL, directory / "vae", dtype)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoencoderKL.from_config(dict(design.autoencoder))
    return Autoencoder(design, model.to(device, dtype).eval().requires_grad_(False))


def load_texts(
    design: Design,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
    directory: Path | None = None,
) -> list[nn.Module]:
    """The text encoders of a design, frozen, as `load_autoencoder` does."""
    options: dict[str, Any] = {"seed": seed, "dtype": dtype, "device": device, "directory": directory}
    return [load_text(design, number, **options) for number in range(len(design.texts))]


def load_text(
    design: Design,
    number: int,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
    directory: Path | None = None,
) -> nn.Module:
    """One of the text encoders of a design, frozen, as `load_autoencoder` does."""
    config = design.texts[number]
    if directory is not None:
        model = read_part(type(_meta(config)), directory / TEXTS[number], dtype)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + 1 + number)
            model = build_text_encoder(config)
    return model.to(device, dtype).eval().requires_grad_(False)


def _meta(config: Any) -> nn.Module:
    with torch.device("meta"):
        return build_text_encoder(config)
