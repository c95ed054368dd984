"""Which files of a directory hold a model's weights, as `from_pretrained` of transformers and diffusers chooses them.

    model.safetensors                                   transformers; before its index
    model.safetensors.index.json                        with model-00001-of-00002.safetensors and others
    diffusion_pytorch_model.safetensors.index.json      diffusers; before its one file
    diffusion_pytorch_model.safetensors
    model.fp16.safetensors                              a variant, and its index:
    model.safetensors.index.fp16.json

Weights without a variant come first. A directory that has those of one variant alone is read as that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cai_mesh.errors import CaiError, CheckpointError
from cai_mesh.files.headers import check_header, weight_map

TRANSFORMERS, DIFFUSERS = "model", "diffusion_pytorch_model"
"""The beginnings of names of files with weights."""
_VARIANT = re.compile(
    rf"(?:{TRANSFORMERS}|{DIFFUSERS})"
    r"(?:\.(?P<file>(?!.*-\d{5}-of-\d{5}\.)[\w-]+)\.safetensors|\.safetensors\.index\.(?P<index>[\w-]+)\.json)"
)


_OTHERS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
"""Endings of weights that are not read: pickles can run code, and the others are of other programs."""


@dataclass(frozen=True)
class WeightFiles:
    """The weights of a directory.

    Args:
        variant: the variant that they are of, such as "fp16"; None: they are of none.
        tensors: the name of the file that holds a tensor, by the tensor's name.
        listing: the name of the index; None: there is one file.
    """

    variant: str | None
    tensors: Mapping[str, str]
    listing: str | None

    @property
    def names(self) -> list[str]:
        """The names of the files that are read."""
        return sorted({*self.tensors.values(), *([] if self.listing is None else [self.listing])})


def index_name(stem: str, variant: str | None = None) -> str:
    """Return the name of the index of several files."""
    return f"{stem}.safetensors.index{'' if variant is None else f'.{variant}'}.json"


def weight_files(directory: Path, *, error: type[CaiError] = CheckpointError) -> WeightFiles:
    """Return the files of a directory that hold its weights; headers and index are checked.

    Raises `error` where there are none, or several variants and none of them plain, or one is not sound.
    """
    plain = _of_variant(directory, None, error)
    if plain is not None:
        return plain
    entries = directory.iterdir() if directory.is_dir() else ()
    matches = [match for entry in entries if (match := _VARIANT.fullmatch(entry.name))]
    variants = sorted({match["file"] or match["index"] for match in matches})
    if len(variants) > 1:
        raise error(
            f"several variants of the weights at {directory}",
            got=", ".join(variants),
            expected="one, or weights without a variant",
            fix="leave one of them there",
        )
    chosen = _of_variant(directory, variants[0], error) if variants else None
    if chosen is None:
        raise _no_weights(directory, error)
    return chosen


def _no_weights(directory: Path, error: type[CaiError]) -> CaiError:
    others = sorted(path.name for ending in _OTHERS for path in directory.glob(f"*{ending}"))
    return error(
        f"no weights at {directory}: it holds no safetensors",
        got=", ".join(others[:4]) or None,
        expected=f"{TRANSFORMERS}.safetensors or {index_name(TRANSFORMERS)}, {DIFFUSERS}.safetensors or "
        f"{index_name(DIFFUSERS)}, or these of one variant",
        cause="files of pickles, as .bin and .pt, run code when they are read" if others else "",
        fix="convert them with the library that wrote them, if you trust them: from_pretrained(DIR), then "
        "save_pretrained(DIR)"
        if others
        else "download the repository's .safetensors; one that has .bin files alone must be converted first",
    )


def _of_variant(directory: Path, variant: str | None, error: type[CaiError]) -> WeightFiles | None:
    """Return the weights of one variant, or the plain ones; None: there are none."""
    for stem in (TRANSFORMERS, DIFFUSERS):
        file = f"{stem}{'' if variant is None else f'.{variant}'}.safetensors"
        listing = index_name(stem, variant)
        for name in (file, listing) if stem == TRANSFORMERS else (listing, file):
            if not (directory / name).is_file():
                continue
            if name == listing:
                return WeightFiles(variant, weight_map(directory / name, error=error), listing)
            return WeightFiles(
                variant, dict.fromkeys(check_header(directory / name, error=error), name), None
            )
    return None
