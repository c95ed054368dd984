"""Inputs for a small model of transformers: what the signature of its forward and its `main_input_name` ask for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

LENGTH = 12
"""Tokens of a text."""
SAMPLES = 1600
"""Samples of a sound wave: a few frames of every speech encoder that takes waves."""
FRAMES = 64
"""Frames of an encoder of frames that says no number of its own."""
SIDE = 64
"""Pixels along a side of an image, for a model whose config says no size."""
MELS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")
"""The names of a frame's features in configs."""
Shape = tuple[int, ...]
Form = dict[str, Shape]
"""Shapes of one sample by name; those of `ONES` are of ones."""
ONES = ("attention_mask", "pixel_attention_mask", "spatial_shapes")


def forms_of(model_class: type[nn.Module], config: Any) -> list[Form]:
    """The forms that a class's main input may have, the likely one first. Text comes with padding, or has none.

    Raises AttributeError where the config does not say a size that is needed.
    """
    make = MAKERS.get(getattr(model_class, "main_input_name", "input_ids"))
    return [{}, {"attention_mask": (LENGTH,)}] if make is None else make(config)


def small_inputs(
    model_class: type[nn.Module], config: Any, vocabulary: int, *, labelled: bool, form: int = 0
) -> dict[str, torch.Tensor]:
    """Keyword arguments of a forward, the same at every call; token ids below `vocabulary`, floats in float64.

    Text: `input_ids` and `attention_mask` [2, 12], the first row ending with two padding tokens. Classes whose main
    input is an image, frames or a wave get `pixel_values` [2, C, H, W], `input_features` [2, mel, frames] or
    [2, frames, mel], or `input_values` [2, samples], by the number of the form. Models with a decoder of their own get
    `decoder_input_ids` [2, 12] where there are no labels to make them of. Labels are token ids [2, 12].
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, vocabulary, (2, LENGTH), generator=generator)
    inputs = {
        name: torch.ones(2, *shape, dtype=torch.int64)
        if name in ONES
        else torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        for name, shape in forms_of(model_class, config)[form].items()
    }
    if getattr(model_class, "main_input_name", "input_ids") not in MAKERS:
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        inputs = {"input_ids": ids, "attention_mask": mask} | inputs
    if labelled:
        return inputs | {"labels": ids}
    decodes = "decoder_input_ids" in inspect.signature(model_class.forward).parameters
    return inputs | ({"decoder_input_ids": ids.flip(1)} if decodes else {})


def documents() -> dict[str, torch.Tensor]:
    """`position_ids` [2, 12] and `cu_seqlens` [2, 4] of rows with several documents, one of them empty."""
    lengths = ((5, 7, 0), (3, 4, 5))
    places = [[place for length in row for place in range(length)] for row in lengths]
    ends = torch.tensor(lengths).cumsum(1)
    starts = torch.nn.functional.pad(ends, (1, 0)).int()
    return {"position_ids": torch.tensor(places), "cu_seqlens": starts}


def encoder_states(config: Any) -> dict[str, torch.Tensor]:
    """`encoder_hidden_states` [2, 7, features] in float64 for a decoder, the same at every call."""
    text = config.get_text_config()
    width = getattr(text, "cross_attention_hidden_size", None) or text.hidden_size
    generator = torch.Generator().manual_seed(2)
    return {"encoder_hidden_states": torch.randn(2, 7, width, generator=generator, dtype=torch.float64)}


def parts_of(config: Any) -> list[Any]:
    """A config and the configs in it."""
    inner = [value for value in vars(config).values() if hasattr(value, "to_json_string")]
    return [config, *(part for child in inner for part in parts_of(child))]


def _first(config: Any, *names: str) -> Any:
    """A value that a config, or one in it, has by one of these names; None where none has."""
    parts = parts_of(config)
    values = (getattr(part, name, None) for name in names for part in parts)
    return next((value for value in values if value is not None), None)


def _image(config: Any) -> list[Form]:
    size, channels = _first(config, "image_size"), _first(config, "num_channels") or 3
    height, width = (size, size) if isinstance(size, int) else size or (SIDE, SIDE)
    images: list[Form] = [{"pixel_values": (channels, height, width)}]
    count, patch = _first(config, "num_patches"), _first(config, "patch_size")
    if size is None and isinstance(count, int) and isinstance(patch, int):  # patches that are cut out already
        patches = {"pixel_values": (count, channels * patch**2), "pixel_attention_mask": (count,)}
        images.append({**patches, "spatial_shapes": (2,)})
    return images


def _frames(config: Any) -> list[Form]:
    mels, positions = _first(config, *MELS), _first(config, "max_source_positions")
    if mels is None:
        raise AttributeError(f"{type(config).__name__} says no number of mel bins")
    first: list[Form] = [] if positions is None else [{"input_features": (mels, 2 * positions)}]
    frames = {"input_features": (FRAMES, mels)}
    return [*first, frames, {**frames, "attention_mask": (FRAMES,)}]


def _wave(config: Any) -> list[Form]:
    wave: list[Form] = [{"input_values": (SAMPLES,)}]
    mels, length = getattr(config, "num_mel_bins", None), getattr(config, "max_length", None)
    return wave if mels is None or length is None else [*wave, {"input_values": (length, mels)}]


def _any(config: Any) -> list[Form]:
    return [*_wave(config), {"inputs": _image(config)[0]["pixel_values"]}]


MAKERS: dict[str, Callable[[Any], list[Form]]] = {
    "pixel_values": _image,
    "input_features": _frames,
    "input_values": _wave,
    "inputs": _any,
}
"""Main inputs that are not token ids: the forms they may have."""
