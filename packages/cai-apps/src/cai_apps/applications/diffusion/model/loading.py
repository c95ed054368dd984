"""How the parts of a model come into memory for sampling: in full or in 8 bits, at once or layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from cai_apps.applications.diffusion.model.design import RAW, Design
from cai_apps.applications.diffusion.model.quantization import Kind, quantize_layers
from cai_apps.compose.blocks import blocks_of
from cai_apps.data.content import digest_of_weights
from cai_gemini import HostModel
from cai_mesh.errors import CheckpointError, ConfigError
from cai_mesh.files import check_weights, weight_files

Decoding = Literal["auto", "whole", "sliced", "tiled"]
WAYS: tuple[Decoding, ...] = get_args(Decoding)


@dataclass(frozen=True)
class Memory:
    """What sampling holds in memory.

    Each part (text encoders, denoiser, autoencoder) is on the device only while it works, so the most that is there is
    what the largest needs.

    Args:
        weights: the form of the layers inside blocks of the denoiser and the text encoders: "plain": in the dtype
            of computation; "int8" or "fp8": in 8 bits, made anew for each use (`quantization`). All else stays as is:
            norms, biases, tables, embedders of times and labels, the first and the last layers, the autoencoder.
        residency: "device", or "host": of those layers each is on the device only while it and the one before it run.
        vae: the way pictures are decoded: "whole": all of a batch at once; "sliced": one by one; "tiled": one by one,
            each in overlapping tiles that are blended, which differs a little; "auto": the first of these that fits.
    """

    weights: Literal["plain"] | Kind = "plain"
    residency: Literal["device", "host"] = "device"
    vae: Decoding = "auto"


EVERYTHING = Memory()
"""Weights as they are, on the device."""


def denoiser_home(design: Design, directory: Path, *, raw: bool) -> Path:
    """The folder of the denoiser's weights. Raises `ConfigError` where there is none."""
    home = directory / RAW / design.family.folder if raw else directory / design.family.folder
    if not home.is_dir():
        raise ConfigError(f"no weights at {home}", cause="the run kept no average of its weights")
    variant_of(home)
    return home


def load_denoiser(
    design: Design, home: Path, *, device: torch.device | str, dtype: torch.dtype, memory: Memory
) -> HostModel:
    """The denoiser of a folder, frozen, on the host."""
    import diffusers

    kind = getattr(diffusers, design.denoiser["_class_name"])
    model = read_part(kind, home, dtype)
    return settled(model, [*_layers(model, design.family.layer_classes)], device, memory)


def read_part(kind: Any, home: Path, dtype: torch.dtype) -> nn.Module:
    """Return the model of a folder on the host, as `from_pretrained` of its library reads it.

    Args:
        kind: a class of diffusers or transformers.
        home: the folder.
        dtype: the dtype of its weights in memory.

    Raises:
        ConfigError: there are no weights, or several variants and none of them plain.
        CheckpointError: the weights are damaged or of another model: a tensor is missing, which the libraries would
            fill with random numbers, or has another shape.
    """
    options: dict[str, Any] = {
        "variant": variant_of(home),
        "use_safetensors": True,
        "output_loading_info": True,
    }
    options["torch_dtype" if hasattr(kind, "load_config") else "dtype"] = dtype  # diffusers, transformers
    try:
        model, report = kind.from_pretrained(home, **options)
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{home} holds the weights of another model", cause=(str(error).splitlines() or [""])[0]
        ) from None
    missing = sorted(map(str, (*report["missing_keys"], *report["mismatched_keys"])))
    if missing:
        raise CheckpointError(
            f"{home} lacks {len(missing)} tensors of a {kind.__name__}",
            got=", ".join(missing[:4]),
            cause="the files are of another model, or call its parts by names that are not known",
            fix="check that config.json is the one these weights were made with",
        )
    return model


def settle_text(model: nn.Module, device: torch.device | str, memory: Memory) -> HostModel:
    """A text encoder on the host, as `memory` says."""
    inner = set(blocks_of(model))
    return settled(model, [(name, m) for name, m in model.named_modules() if m in inner], device, memory)


def settled(
    model: nn.Module, layers: Sequence[tuple[str, nn.Module]], device: torch.device | str, memory: Memory
) -> HostModel:
    """A model on the host, frozen, with its layers stored and placed as `memory` says.

    Layers are quantized one after the other. A GPU does it, so it holds the full weight of one of them at a time.
    """
    model.eval().requires_grad_(False)
    if memory.weights != "plain":
        quantize_layers(layers, memory.weights, device)
    return HostModel(model, device, [layer for _, layer in layers] if memory.residency == "host" else [])


def _layers(module: nn.Module, names: Sequence[str], prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules of these classes, with their names."""
    for name, child in module.named_children():
        if type(child).__name__ in names:
            yield prefix + name, child
        else:
            yield from _layers(child, names, f"{prefix}{name}.")


def variant_of(folder: Path) -> str | None:
    """Which variant of the weights a folder of diffusers or transformers holds, such as "bf16"; None: the plain ones.

    Raises:
        ConfigError: there are none, or several variants and none without a name.
        CheckpointError: an index names files outside the folder, or the header of a file is not sound.
    """
    check_weights(folder)
    return weight_files(folder, error=ConfigError).variant


def weights_digest(directory: Path, folders: Sequence[str], cache: str) -> str:
    """Return a digest of the tensors in some folders of a pipeline's directory: of those that are read.

    Raises:
        ConfigError: a folder has no weights, or several variants and none of them plain.
    """
    return digest_of_weights({folder: directory / folder for folder in folders}, cache)


def free_bytes(device: torch.device) -> int | None:
    """Bytes of a GPU's memory that this process may still use; None elsewhere, where nobody counts."""
    if device.type != "cuda":
        return None
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + idle


def decoding_of(
    autoencoder: Any, count: int, height: int, width: int, itemsize: int, free: int | None
) -> Literal["whole", "sliced", "tiled"]:
    """How pictures are decoded, or encoded but for tiles, in memory that is free.

    The last layers of a decoder hold most: up to four images as large as the picture of the channels before the last
    step, in the dtype of computation.

    Args:
        autoencoder: its config.
        count: pictures [height, width] at once.
        itemsize: bytes of a number.
        free: bytes; None: enough.
    """
    channels = autoencoder["block_out_channels"][:2][-1]
    image_bytes = 4 * channels * height * width * itemsize
    if free is None or image_bytes * count <= free:
        return "whole"
    return "sliced" if image_bytes <= free else "tiled"
