"""Inputs for a small model of transformers: what the signature of its forward and its `main_input_name` ask for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SAMPLES = 1600
"""Of a sound wave: a few frames of every speech encoder that takes waves."""


def small_inputs(
    model_class: type[nn.Module], config: Any, vocabulary: int, *, labelled: bool
) -> dict[str, torch.Tensor]:
    """Keyword arguments of a forward, the same at every call; token ids below `vocabulary`, floats in float64.

    Text: `input_ids` and `attention_mask` [2, 12], the first row ending with two padding tokens. Classes whose main
    input is an image, frames or a wave get `pixel_values` [2, C, H, W], `input_features` [2, mel, frames] or
    `input_values` [2, samples]. Models with a decoder of their own get `decoder_input_ids` [2, 12] where there are no
    labels to make them of. Labels are token ids [2, 12].
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, vocabulary, (2, 12), generator=generator)
    make = MAKERS.get(getattr(model_class, "main_input_name", "input_ids"))
    if make is not None:
        name, shape = make(config)
        inputs = {name: torch.randn(2, *shape, generator=generator, dtype=torch.float64)}
    else:
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
    if labelled:
        return inputs | {"labels": ids}
    decodes = "decoder_input_ids" in inspect.signature(model_class.forward).parameters
    return inputs | ({"decoder_input_ids": ids.flip(1)} if decodes else {})


def _image(config: Any) -> tuple[str, tuple[int, ...]]:
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return "pixel_values", (getattr(config, "num_channels", 3), height, width)


def _frames(config: Any) -> tuple[str, tuple[int, ...]]:
    return "input_features", (config.num_mel_bins, 2 * config.max_source_positions)


def _wave(config: Any) -> tuple[str, tuple[int, ...]]:
    return "input_values", (SAMPLES,)


MAKERS: dict[str, Callable[[Any], tuple[str, tuple[int, ...]]]] = {
    "pixel_values": _image,
    "input_features": _frames,
    "input_values": _wave,
}
"""Main inputs that are not token ids: the name and shape of one sample."""
