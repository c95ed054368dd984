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
from cai_apps.applications.diffusion.data.sources import Folder, Source, source_of
from cai_apps.applications.diffusion.model.design import Design
from cai_apps.applications.diffusion.sampling.sampler import open_sampler
from cai_apps.applications.diffusion.sampling.scheduler import options
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
    """

    subject: Source
    others: Source
    count: int
    caption_of_class: str | None

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

    def fingerprint(self) -> str:
        inputs = (self.subject.fingerprint(), self.others.fingerprint(), self.count, self.caption_of_class)
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
        class_images: Source = Folder.of(draw_class(config, design, base), config.data.size, prior.prompt)
    else:
        data = replace(config.data, source=prior.source, caption=prior.prompt or None)
        class_images = source_of(data)
    if class_images.size < prior.images:
        raise DataError(
            f"too few images of the class in {prior.source}",
            got=class_images.size,
            expected=f"prior.images = {prior.images}",
        )
    return SubjectAndClass(subject, class_images, prior.images, prior.prompt or None)


def draw_class(config: Config, design: Design, base: Path) -> Path:
    """A directory in the cache with `prior.images` pictures of `prior.prompt`, drawn by the weights in `base`.

    Only pictures that are missing are drawn, so one that was interrupted goes on.
    """
    from PIL import Image

    prior = config.prior
    home = private_folder(Path(config.data.cache), "data.cache") / f"class-{_key(config, design, base)}"
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


def _key(config: Config, design: Design, base: Path) -> str:
    files = sorted(base.rglob("*.safetensors"))
    weights = [[str(f.relative_to(base)), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    drawing = asdict(options(config))
    inputs = [config.prior.prompt, drawing, weights, design.scheduler]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:20]
