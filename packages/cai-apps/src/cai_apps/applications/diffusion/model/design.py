"""The parts of a model and their shapes, from a preset shipped here or from a directory of diffusers.

A preset is one JSON file with a table for each part; a directory has a subfolder for each, as
`DiffusionPipeline.save_pretrained` writes it. Reading a design needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from cai_apps.applications.diffusion.model.families import Family, check_conditions, family_of
from cai_mesh.errors import ConfigError, did_you_mean

TEXTS = ("text_encoder", "text_encoder_2", "text_encoder_3")
THIRD = 2
"""Place of a T5 among them."""
DENOISERS = ("unet", "transformer")
RENAMED = {("Transformer2DModel", "ada_norm_zero"): "DiTTransformer2DModel"}
"""Classes of published configs by their name then and the kind of their norms, as diffusers has renamed them."""
RAW = "raw"
"""Folder of an export with the last weights, where it has averaged ones."""
LABELS = "labels.txt"
"""Names of labels, one a line, in a run's directory and its export."""
CLIPS = ("CLIPTextModel", "CLIPTextModelWithProjection")
T5 = "T5EncoderModel"
"""The kind of the third text encoder of SD3, which works without it."""
T5_LENGTH = 256
"""Tokens of it that the pipeline of diffusers reads; without it zeros are in their place."""


@dataclass(frozen=True)
class Design:
    """Configs of the parts of a model, as diffusers and transformers write them.

    Args:
        name: the name of the preset, or the directory.
        denoiser: the config of the denoiser, which is trained.
        scheduler: the config that says how images turn into noise.
        autoencoder: the config of an `AutoencoderKL`; None: the model works on pixels.
        fold: the side of the squares of pixels that become channels, for a model without an autoencoder.
        texts: configs of the text encoders, in the order of diffusers' pipelines; empty: labels are the condition.
        directory: the directory of weights and tokenizers; None: a preset, which has none.
    """

    name: str
    denoiser: Mapping[str, Any]
    scheduler: Mapping[str, Any]
    autoencoder: Mapping[str, Any] | None
    fold: int
    texts: tuple[Mapping[str, Any], ...]
    directory: Path | None = None

    @property
    def family(self) -> Family:
        """What the denoiser takes."""
        return family_of(self.denoiser["_class_name"])

    @property
    def channels(self) -> int:
        """The channels of a latent image."""
        return 3 * self.fold**2 if self.autoencoder is None else self.autoencoder["latent_channels"]

    @property
    def factor(self) -> int:
        """Pixels along a side of a latent."""
        if self.autoencoder is None:
            return self.fold
        return 2 ** (len(self.autoencoder["block_out_channels"]) - 1)

    @property
    def multiple(self) -> int:
        """What the sides of an image must be multiples of."""
        return self.factor * self.family.multiple(self.denoiser)

    @property
    def clips(self) -> tuple[Mapping[str, Any], ...]:
        """The text encoders that are no T5."""
        return tuple(text for text in self.texts if not is_t5(text))

    @property
    def text_length(self) -> int:
        """Tokens of a caption that a CLIP reads."""
        return min((text["max_position_embeddings"] for text in self.clips), default=0)

    @property
    def text_lengths(self) -> tuple[int, ...]:
        """Tokens of a caption that each text encoder reads."""
        return tuple(T5_LENGTH if is_t5(text) else self.text_length for text in self.texts)


def presets() -> list[str]:
    """Names of the designs that ship with cai."""
    return sorted(f.name.removesuffix(".json") for f in _presets().iterdir() if f.name.endswith(".json"))


def _presets():
    return resources.files("cai_apps.applications.diffusion") / "presets"


def load_design(name: str) -> Design:
    """The design of a preset, a directory, or a hub id that can be downloaded.

    Raises:
        ConfigError: none of them exists, or a part is missing or of a kind that is not known here.
    """
    if name in presets():
        table = json.loads((_presets() / f"{name}.json").read_text(encoding="utf-8"))
        texts = tuple(table.get("texts", ()))
        return Design(
            name,
            table["denoiser"],
            table["scheduler"],
            table.get("autoencoder"),
            table.get("fold", 1),
            texts,
        )
    directory = Path(name).expanduser()
    home = directory if directory.is_dir() else _downloaded(name)
    try:
        design = _of_directory(home)
        _check(design)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"a config.json of a part of {name} lacks what diffusers writes, or has it in another form",
            cause=f"{type(error).__name__}: {error}",
            expected="a directory as DiffusionPipeline.save_pretrained writes it",
        ) from None
    return design


def _check(design: Design) -> None:
    """Look at what is read of the configs of all parts."""
    check_conditions(design.denoiser)
    for number, text in enumerate(design.texts):
        if not (number == THIRD and design.family.name == "SD3" and is_t5(text)):
            kind_of_text(text)
    times = design.scheduler.get("num_train_timesteps", 1000)
    if not isinstance(times, int) or times < 1:
        raise ValueError(f"num_train_timesteps is {times!r}")
    sizes = {
        "block_out_channels": () if design.autoencoder is None else design.autoencoder["block_out_channels"],
        "latent_channels": (design.channels,),
        "fold": (design.fold, design.factor, design.multiple),
        "max_position_embeddings": design.text_lengths,
        "hidden_size": [text["d_model" if is_t5(text) else "hidden_size"] for text in design.texts],
    }
    for name, values in sizes.items():
        if wrong := [size for size in values if not isinstance(size, int) or size < 1]:
            raise ValueError(f"{name} is {wrong[0]!r}")


def _downloaded(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.ckpt", "*.msgpack", "*.onnx*"]))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no model {name!r}",
            expected="a preset, a directory of diffusers, or a hub id that can be downloaded",
            cause=str(error).splitlines()[0],
            fix=did_you_mean(name, presets()),
        ) from None


def _of_directory(directory: Path) -> Design:
    denoiser = next((d for d in DENOISERS if (directory / d / "config.json").is_file()), None)
    if denoiser is None:
        raise ConfigError(
            f"no denoiser in {directory}",
            expected=f"a subfolder {' or '.join(DENOISERS)} with a config.json, as diffusers writes it",
        )
    texts = [directory / text / "config.json" for text in TEXTS]
    scheduler = directory / "scheduler" / "scheduler_config.json"
    if not scheduler.is_file():
        raise ConfigError(f"no scheduler in {directory}", expected=str(scheduler))
    autoencoder = directory / "vae" / "config.json"
    return Design(
        str(directory),
        _present(_read(directory / denoiser / "config.json")),
        _read(scheduler),
        _read(autoencoder) if autoencoder.is_file() else None,
        _fold(directory),
        tuple(_read(text) for text in texts if text.is_file()),
        directory,
    )


def _present(denoiser: dict[str, Any]) -> dict[str, Any]:
    """Return a denoiser's config with the present name of its class, which diffusers works out as it reads it."""
    kind = RENAMED.get((denoiser.get("_class_name", ""), denoiser.get("norm_type", "")))
    return denoiser if kind is None else denoiser | {"_class_name": kind}


def _fold(directory: Path) -> int:
    file = directory / "model_index.json"
    return int(_read(file).get("fold", 1)) if file.is_file() else 1


def _read(file: Path) -> dict[str, Any]:
    try:
        table = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON", cause=str(error), fix="copy or download it again") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{file} is no table", got=type(table).__name__, expected="as diffusers writes it")
    return table


def is_t5(config: Mapping[str, Any]) -> bool:
    """Whether a text encoder's config is of a T5."""
    return config.get("architectures", [""])[0] == T5


def kind_of_text(config: Mapping[str, Any]) -> str:
    """The class of transformers that a config of a CLIP text encoder is of.

    Raises:
        ConfigError: it is none of those known here.
    """
    name = config.get("architectures", CLIPS)[0]
    if name not in CLIPS:
        raise ConfigError(
            "a text encoder of an unknown kind",
            got=name,
            expected=" or ".join(CLIPS),
            fix="a T5 can be the third text encoder of an SD3 alone" if "T5" in name else "",
        )
    return name
