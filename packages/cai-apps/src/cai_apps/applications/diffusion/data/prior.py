"""Pictures of the class that a subject belongs to, so that a model that learns the subject keeps what it knew.

DreamBooth (Ruiz et al., arXiv:2208.12242) calls it prior preservation: beside 3 to 5 images of the subject, the model
learns from pictures of the class that it drew itself before training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from cai_apps.applications.diffusion.config import Config
from cai_apps.applications.diffusion.data.sources import source_of
from cai_apps.applications.diffusion.model.captions import load_tokenizers, tokenizers_digest
from cai_apps.applications.diffusion.model.design import TEXTS, Design
from cai_apps.applications.diffusion.model.loading import weights_digest
from cai_apps.applications.diffusion.sampling.sampler import open_sampler
from cai_apps.applications.diffusion.sampling.scheduler import options
from cai_apps.data.images import Folder, Source
from cai_mesh.errors import DataError
from cai_mesh.files import private_folder, replaced

AT_ONCE = 8
"""Pictures that are drawn together."""
FEWEST = 3
"""Images of a subject."""


@dataclass(frozen=True)
class SubjectAndClass:
    """The images of a subject, then the first `count` of its class.

    Args:
        caption_of_class: the caption of the images of the class; None: they have their own.
        drawing: digest of what the images of the class are drawn by; None: they are given.
    """

    subject: Source
    others: Source
    count: int
    caption_of_class: str | None
    drawing: str | None

    @property
    def size(self) -> int:
        return self.subject.size + self.count

    @property
    def labels(self) -> Sequence[str]:
        return ()

    def image(self, number: int) -> np.ndarray:
        """uint8 [side, side, 3]."""
        source, within = self._where(number)
        return source.image(within)

    def caption(self, number: int) -> str:
        source, within = self._where(number)
        keeps_caption = source is self.subject or self.caption_of_class is None
        return source.caption(within) if keeps_caption else str(self.caption_of_class)

    def label(self, number: int) -> int:
        raise DataError("a subject and its class have captions, not labels")

    def fingerprint(self, cache: str) -> str:
        return self._digest(cache, self.others.fingerprint(cache))

    def origin(self, cache: str) -> str:
        """Return a digest that pictures drawn again leave as it is, which other GPUs round in another way."""
        return self._digest(cache, self.drawing or self.others.fingerprint(cache))

    def _digest(self, cache: str, of_class: str) -> str:
        inputs = (self.subject.fingerprint(cache), of_class, self.count, self.caption_of_class)
        return hashlib.sha256(repr(inputs).encode()).hexdigest()

    def _where(self, number: int) -> tuple[Source, int]:
        first = self.subject.size
        return (self.subject, number) if number < first else (self.others, number - first)


def with_class(subject: Source, config: Config, design: Design, base: Path | None) -> Source:
    """The images of a subject with those of its class after them, as `config.prior` says.

    Args:
        base: directory of the weights that draw the class; None: no weights are known.

    Raises:
        DataError: the subject has fewer than three images, or the class fewer than were asked for.
    """
    prior = config.prior
    if subject.size < FEWEST:
        raise DataError(
            f"too few images of the subject in {config.data.source}",
            got=subject.size,
            expected=f"{FEWEST} to 5, of different backgrounds and sides",
        )
    if prior.source == "generated":
        assert base is not None
        drawing = drawing_digest(config, design, base)
        directory = draw_class(config, base, drawing)
        class_images: Source = Folder.of(directory, config.data.size, prior.prompt)
    else:
        data = replace(config.data, source=prior.source, caption=prior.prompt or None)
        drawing, class_images = None, source_of(data)
    if class_images.size < prior.images:
        raise DataError(
            f"too few images of the class in {prior.source}",
            got=class_images.size,
            expected=f"prior.images = {prior.images}",
        )
    return SubjectAndClass(subject, class_images, prior.images, prior.prompt or None, drawing)


def draw_class(config: Config, base: Path, drawing: str) -> Path:
    """A directory in the cache with `prior.images` pictures of `prior.prompt`, drawn by the weights in `base`.

    Only pictures that are missing are drawn, so one that was interrupted goes on.

    Args:
        config: the resolved config.
        base: the directory of a pipeline.
        drawing: digest of what the pictures depend on.
    """
    from PIL import Image

    prior = config.prior
    home = private_folder(Path(config.data.cache), "data.cache") / f"class-{drawing}"
    private_folder(home, "a directory of data.cache")
    missing = [n for n in range(prior.images) if not _file(home, n).is_file()]
    if not missing:
        return home
    device = torch.device("cpu") if config.train.device == "cpu" else None
    sampler = open_sampler(base, device=device)
    for first in range(missing[0], prior.images, AT_ONCE):
        count = min(AT_ONCE, prior.images - first)
        print(f"drawing {prior.prompt!r}: {first} of {prior.images}", flush=True)
        pictures = sampler.pictures([prior.prompt] * count, options(config), first=first)
        for number, picture in enumerate(pictures, first):
            with replaced(_file(home, number)) as file:
                Image.fromarray(picture).save(file, format="PNG")
    return home


def _file(home: Path, number: int) -> Path:
    return home / f"{number:05d}.png"


def drawing_digest(config: Config, design: Design, base: Path) -> str:
    """Return a digest of what pictures of a class depend on: prompt, options, parts of the pipeline and weights."""
    latents = [] if design.autoencoder is None else ["vae"]
    folders = (design.family.folder, *latents, *TEXTS[: len(design.texts)])
    weights = weights_digest(base, folders, config.data.cache)
    parts = [design.denoiser, design.autoencoder, list(design.texts), design.scheduler]
    tokenizers = tokenizers_digest(load_tokenizers(base, design.texts))
    inputs = [config.prior.prompt, asdict(options(config)), weights, parts, tokenizers]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:20]
