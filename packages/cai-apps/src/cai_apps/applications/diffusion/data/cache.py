"""What ranks read, made once: pixels or latents of every image, tokens or embeddings of every caption.

    <cache>/<key>/NAME.bin          one tensor: samples (or captions) along its first dimension
    <cache>/<key>/tokenizer/        that of the captions, where the design has none of its own
    <cache>/<key>/dataset.json      shapes and dtypes
    <cache>/<key>/files.json        sizes and digests of all these, written last

The key is a digest of the content of everything the files depend on: images, captions, names of classes, size,
tokenizers, encoders and their weights. So a finished directory is never out of date. It is written under a temporary
name and renamed, and compared with its digests when it is opened; a damaged one is made anew. A tokenizer that is
trained here has a directory of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cai_apps.applications.diffusion.config import Config
from cai_apps.applications.diffusion.data.prior import SubjectAndClass, with_class
from cai_apps.applications.diffusion.data.ratios import nearest, shapes_of
from cai_apps.applications.diffusion.data.sources import source_of
from cai_apps.applications.diffusion.model.captions import (
    embed,
    load_tokenizers,
    tokenize,
    tokenizers_digest,
    train_tokenizer,
)
from cai_apps.applications.diffusion.model.design import TEXTS, Design, load_design
from cai_apps.applications.diffusion.model.encoders import (
    Autoencoder,
    encoder_directory,
    load_autoencoder,
    load_texts,
)
from cai_apps.applications.diffusion.model.loading import weights_digest
from cai_apps.applications.diffusion.sampling.labels import numbered
from cai_apps.compose.sharding import DTYPES
from cai_apps.data.images import Folder, Source
from cai_apps.data.sealed import open_or_make
from cai_mesh.errors import DataError
from cai_mesh.files import inside

FORMAT = 5
TOKENIZER = "tokenizer"
AT_ONCE = 16
"""Images or captions that are encoded together."""
EMPTY = 0
"""Number of the caption without words, which a dropped one becomes."""


@dataclass(frozen=True)
class Prepared:
    """A source on disk.

    Args:
        directory: the directory of the files.
        images: the number of images.
        tensors: shape and dtype of each file, by name.
        labels: names; empty where the condition is text.
        tokenizer: directory that holds `tokenizer`; None where there are no captions.
        classes: the number of classes that the denoiser knows; the one after them stands for none.
        content: digest of the images, captions and labels.
        vocabulary: digest of the rules of the tokenizers; None where there are no captions.
    """

    directory: Path
    images: int
    tensors: dict[str, tuple[tuple[int, ...], str]]
    labels: tuple[str, ...]
    tokenizer: str | None
    classes: int
    content: str
    vocabulary: str | None

    def open(self, name: str) -> Tensor:
        """A tensor, mapped into memory: rows are read when they are taken. Do not write to it."""
        shape, dtype = self.tensors[name]
        file = str(inside(self.directory, f"{name}.bin", error=DataError))
        return torch.from_file(file, shared=False, size=math.prod(shape), dtype=getattr(torch, dtype)).view(
            shape
        )


def prepare(config: Config, before: Path | None = None) -> Prepared:
    """Make the files, unless the cache already holds them.

    Args:
        config: the resolved config.
        before: the directory of the run that is gone on with, whose tokenizer and names of classes are kept.

    Raises:
        DataError: the source is missing, empty or damaged, or too small to train on, or has more classes than the
            denoiser.
    """
    design, source = load_design(config.model.name), source_of(config.data)
    if config.prior.images:
        source = with_class(source, config, design, encoder_directory(config, design))
    if source.size < 2:
        raise DataError(f"too few images in {config.data.source}", got=source.size, expected="at least 2")
    content = source.fingerprint(config.data.cache)
    tokenizer = _tokenizer(config, design, source, content, before)
    vocabulary = None if tokenizer is None else tokenizers_digest(load_tokenizers(tokenizer, design.texts))
    labels = numbered(design, source.labels, before)
    directory = open_or_make(
        config.data.cache,
        _key(config, design, content, vocabulary, labels),
        lambda scratch: _Writer(config, design, source, tokenizer, labels, scratch).write(),
    )
    dataset = json.loads((directory / "dataset.json").read_text(encoding="utf-8"))
    tensors = {name: (tuple(shape), dtype) for name, (shape, dtype) in dataset["tensors"].items()}
    text = None if tokenizer is None else str(directory if design.directory is None else design.directory)
    learned = source.origin(config.data.cache) if isinstance(source, SubjectAndClass) else content
    classes = design.denoiser["num_embeds_ada_norm"] if design.family.condition == "label" else 0
    return Prepared(directory, dataset["images"], tensors, labels, text, classes, learned, vocabulary)


def _tokenizer(
    config: Config, design: Design, source: Source, content: str, before: Path | None
) -> Path | None:
    """Return the directory of the captions' tokenizers: the design's, or of the run that goes on, or trained here."""
    if not design.texts:
        return None
    if design.directory is not None:
        return design.directory
    if before is not None and (before / TOKENIZER).is_dir():
        return before

    def train(directory: Path) -> None:
        captions = dict.fromkeys(["", *(source.caption(number) for number in range(source.size))])
        trained = train_tokenizer(captions, size)
        trained.model_max_length = design.text_length  # pipelines of diffusers cut there
        trained.save_pretrained(directory / TOKENIZER)

    size = min(text["vocab_size"] for text in design.texts)
    key = "tokenizer-" + _digest(FORMAT, content, size, design.text_length)
    return open_or_make(config.data.cache, key, train)


def _key(
    config: Config, design: Design, content: str, vocabulary: str | None, labels: tuple[str, ...]
) -> str:
    data = asdict(config.data)
    inputs = {
        "format": FORMAT,
        "source": content,
        "labels": labels,
        "design": [design.autoencoder, design.fold, list(design.texts), design.denoiser["_class_name"]],
        "text": config.model.text_encoder,
        "vocabulary": vocabulary,
        "weights": _weights(config, design),
        **{name: data[name] for name in ("size", "latents", "encoder_dtype")},
    }
    if config.data.max_ratio > 1:
        inputs["max_ratio"] = config.data.max_ratio
    return "images-" + _digest(inputs)


def _digest(*inputs: object) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:20]


def _weights(config: Config, design: Design) -> object:
    """Return what identifies the weights that make the files; None: none do."""
    encoded = design.autoencoder is not None and config.data.latents == "cached"
    embedded = bool(design.texts) and config.model.text_encoder == "frozen"
    if not (encoded or embedded):
        return None
    directory = encoder_directory(config, design)
    if directory is None:
        return config.train.seed
    folders = [*(["vae"] if encoded else []), *(TEXTS[: len(design.texts)] if embedded else [])]
    return weights_digest(directory, folders, config.data.cache)


class _Writer:
    """Writes the files of a source into a directory."""

    def __init__(
        self,
        config: Config,
        design: Design,
        source: Source,
        tokenizer: Path | None,
        labels: tuple[str, ...],
        directory: Path,
    ):
        self._config, self._design, self._source, self._directory = config, design, source, directory
        self._tokenizer, self._labels = tokenizer, labels
        self._tensors: dict[str, tuple[tuple[int, ...], str]] = {}
        self._encoding = {
            "seed": config.train.seed,
            "dtype": DTYPES[config.data.encoder_dtype],
            "device": "cuda" if torch.cuda.is_available() and config.train.device != "cpu" else "cpu",
            "directory": encoder_directory(config, design),
        }

    def write(self) -> None:
        source = self._source
        if self._design.family.condition == "label":
            number = [self._labels.index(name) for name in source.labels]
            self._save({"label": torch.tensor([number[source.label(i)]])} for i in range(source.size))
        if self._tokenizer is not None:
            self._captions(load_tokenizers(self._tokenizer, self._design.texts))
            if self._design.directory is None:
                shutil.copytree(self._tokenizer / TOKENIZER, self._directory / TOKENIZER)
        self._images()
        dataset = {"images": source.size, "tensors": self._tensors}
        (self._directory / "dataset.json").write_text(json.dumps(dataset), encoding="utf-8")

    def _captions(self, tokenizers: list[Any]) -> None:
        """Every caption once; that without words is the first."""
        caption_numbers: dict[str, int] = {"": EMPTY}
        numbers = [
            caption_numbers.setdefault(self._source.caption(i), len(caption_numbers))
            for i in range(self._source.size)
        ]
        self._save({"caption": torch.tensor([number])} for number in numbers)
        tokens, truncated_captions = tokenize(tokenizers, list(caption_numbers), self._design.text_lengths)
        if truncated_captions:
            print(
                f"{len(truncated_captions)} of {len(caption_numbers)} captions are longer than "
                f"{self._design.text_length} tokens and are cut, "
                f"such as {list(caption_numbers)[truncated_captions[0]]!r}",
                flush=True,
            )
        if self._config.model.text_encoder == "trained":
            self._save({"tokens": part} for part in torch.stack(tokens, 1).split(AT_ONCE))
            return
        texts = load_texts(self._design, **self._encoding)
        device, dtype = self._encoding["device"], self._encoding["dtype"]

        def embedded() -> Iterator[dict[str, Tensor]]:
            with torch.no_grad():
                for part in zip(*(ids.split(AT_ONCE) for ids in tokens), strict=True):
                    device_tokens = [ids.to(device) for ids in part]
                    yield embed(self._design.family, self._design.denoiser, texts, device_tokens, dtype)

        self._save(embedded())

    def _images(self) -> None:
        data, source = self._config.data, self._source
        if data.max_ratio == 1:
            self._encoded(source.image, np.arange(source.size), "")
            return
        assert isinstance(source, Folder)
        bucket_shapes = shapes_of(data.size, data.max_ratio, self._design.multiple)
        bucket = np.array([nearest(source.shape(i), bucket_shapes) for i in range(source.size)])
        row = np.zeros_like(bucket)
        for number in np.unique(bucket):
            members = np.flatnonzero(bucket == number)
            row[members] = np.arange(len(members))
            self._encoded(partial(source.image, shape=bucket_shapes[number]), members, f".{number}")
        self._save([{"bucket": torch.from_numpy(bucket), "row": torch.from_numpy(row)}])

    def _encoded(self, image: Callable[[int], np.ndarray], numbers: np.ndarray, ending: str) -> None:
        """Images of one shape in files whose names end so."""
        pixels = (
            torch.from_numpy(np.stack([image(i) for i in part])).permute(0, 3, 1, 2).contiguous()
            for part in np.array_split(numbers, -(-len(numbers) // AT_ONCE))
        )
        if self._config.data.latents == "encoded" or self._design.autoencoder is None:
            # a byte a number; folded when it is read
            self._save({f"pixels{ending}": part} for part in pixels)
            return
        moments = (self._autoencoder.moments(part.to(self._encoding["device"])) for part in pixels)
        self._save({name + ending: value for name, value in part.items()} for part in moments)

    @cached_property
    def _autoencoder(self) -> Autoencoder:
        return load_autoencoder(self._design, **self._encoding)

    def _save(self, parts: Iterable[dict[str, Tensor]]) -> None:
        """Each tensor of the parts, one part after the other, in a file of its own."""
        files = {}
        for part in parts:
            for name, tensor in part.items():
                rows, *rest = self._tensors.get(name, ((0, *tensor.shape[1:]), ""))[0]
                self._tensors[name] = ((rows + len(tensor), *rest), str(tensor.dtype).removeprefix("torch."))
                if name not in files:
                    files[name] = (self._directory / f"{name}.bin").open("wb")
                raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
                files[name].write(raw.numpy().tobytes())
        for file in files.values():
            file.close()
