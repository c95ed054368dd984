"""The frozen parts of a model: an autoencoder between pixels and latents, and text encoders.

Without an autoencoder latents are the pixels themselves, with squares of them folded into channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cai_apps.applications.diffusion.config import Config
from cai_apps.applications.diffusion.design import TEXTS, Design
from cai_apps.applications.diffusion.text import build_text_encoder
from cai_mesh.errors import ConfigError


@dataclass(frozen=True)
class Autoencoder:
    """Between pixels, uint8 [n, 3, h, w], and latents [n, c, h / factor, w / factor].

    Args:
        design: whose it is.
        model: an `AutoencoderKL`; None: pixels are folded.
    """

    design: Design
    model: Any = None

    @torch.no_grad()
    def moments(self, pixels: Tensor) -> dict[str, Tensor]:
        """Mean and standard deviation of the latents, or the latents themselves as `mean`."""
        images = pixels.to(self._dtype) / 127.5 - 1
        if self.model is None:
            return {"mean": nn.functional.pixel_unshuffle(images, self.design.fold)}
        found = self.model.encode(images).latent_dist
        return {"mean": found.mean, "std": found.std}

    def latents(self, mean: Tensor, std: Tensor | None, noise: Tensor | None) -> Tensor:
        """A draw of the latents, in the scale that denoisers work in."""
        drawn = mean if std is None or noise is None else mean + std * noise
        return drawn if self.model is None else (drawn - self._shift) * self.model.config.scaling_factor

    @torch.no_grad()
    def images(self, latents: Tensor) -> Tensor:
        """uint8 [n, 3, h, w] of latents in that scale."""
        latents = latents.to(self._dtype)
        if self.model is None:
            found = nn.functional.pixel_shuffle(latents, self.design.fold)
        else:
            found = self.model.decode(latents / self.model.config.scaling_factor + self._shift).sample
        return ((found + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)

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
        model = AutoencoderKL.from_pretrained(directory / "vae", torch_dtype=dtype)
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
    found: list[nn.Module] = []
    for number, config in enumerate(design.texts):
        if directory is not None:
            kind: Any = type(_meta(config))
            model = kind.from_pretrained(directory / TEXTS[number], dtype=dtype)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed + 1 + number)
                model = build_text_encoder(config)
        found.append(model.to(device, dtype).eval().requires_grad_(False))
    return found


def _meta(config: Any) -> nn.Module:
    with torch.device("meta"):
        return build_text_encoder(config)


def check_widths(design: Design) -> None:
    """Raises ConfigError where the text encoders do not make what the denoiser takes."""
    family = design.family
    if family.condition == "label":
        return
    if not design.texts:
        raise ConfigError(
            f"{design.name} has no text encoder", expected=f"captions are what a {family.name} takes"
        )
    made: dict[str, Sequence[int]] = {
        "text": [text["hidden_size"] for text in design.texts],
        "pooled": [text.get("projection_dim", 512) for text in design.texts],
    }
    for what, key in family.widths.items():
        taken, width = design.denoiser[key], sum(made[what])
        fits = width <= taken if (family.condition, what) == ("text and pooled", "text") else width == taken
        if not fits:
            raise ConfigError(
                f"the {what} embeddings are not what the {family.name} takes",
                got=f"{width} wide, of {len(design.texts)} text encoder{'s' * (len(design.texts) > 1)}",
                expected=f"{key} = {taken}",
                fix="use the text encoders that this denoiser was made for",
            )
