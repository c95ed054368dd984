"""Images and sounds: sizes of tiny configs, and batches by what a model's forward takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sweep.configs import LENGTH, RESERVED, SIZES, VOCAB, NotBuilt, first_line

SAMPLES = 2
LABELS = 4
FRAMES = 64
WAVE = 5200
"""Of a sound; 16 frames of an encoder that takes one for 320 samples."""
SPOKEN = 5
"""Labels of CTC, fewer than the frames."""

MEDIA_SIZES: list[tuple[str, int]] = [
    (r"image_size", 32),
    (r"patch_size", 8),
    (r"num_patches", 16),
    (r"(num_conv_pos_embeddings|conv_depthwise_kernel_size|context_size|max_pos_emb)", 15),
    (r"max_source_positions|max_speech_positions", 32),
    (r"num_mel_bins|input_feat_per_channel|feature_projection_input_dim", 32),
    (r"(stage_)?depths?|stage_num\w*|num_block_repeats|n_attn_blocks", 2),
    (r"num_codevectors_per_group|codebook_size", 8),
    (r"groups_width", 16),
    (r"num_filters", 2),
    (r"num_attention_heads|num_heads", 4),
    (r"(neck_)?hidden_sizes|embed_dims?|base_attn_unit_dims|conv_dim|tdnn_dim|\w*channels", 32),
    (r"\w*(hidden_dim|proj_dim|feedforward_dim)", 64),
    *SIZES,
]
"""As `SIZES`, and what a list of sizes of this name has at most in each place."""

KEPT = ("num_feat_extract_layers", "num_stages", "num_encoder_blocks", "stage_names", "num_labels")
"""What other values say already."""

STAGED = {"image_size": 64}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SWIN = {**STAGED, "window_size": 2}
EXTRAS: dict[str, dict[str, Any]] = {
    "blip_2_qformer": {"encoder_hidden_size": 64},
    "cvt": {"depth": (1, 2, 3)},  # its third stage asks for the third of its blocks' rates
    "dia_decoder": {"cross_hidden_size": 64},
    "efficientnet": {
        **STAGED,
        "width_coefficient": 0.25,
        "depth_coefficient": 0.3,
        "hidden_dim": 320,
        "in_channels": [32, 16, 24, 40, 80, 112, 192],
        "out_channels": [16, 24, 40, 80, 112, 192, 320],
    },
    "fun_asr_nano": {
        "adaptor_config": {"hidden_size": 64, "intermediate_size": 16, "num_attention_heads": 4}
    },
    "fun_asr_nano_encoder": {"max_position_embeddings": 128},
    "granite_speech": {"window_size": 10, "downsample_rate": 5},
    "granite_speech_plus": {"window_size": 10, "downsample_rate": 5},
    "hiera": {"image_size": [64, 64]},
    "levit": {**STAGED, "patch_size": 16},
    "mimi": {"upsample_groups": 64},
    "mobilenet_v1": {**STAGED, "depth_multiplier": 0.25},
    "mobilenet_v2": {**STAGED, "depth_multiplier": 0.25},
    "mobilevitv2": {"image_size": 128},
    "moonshine": {
        **{f"{side}_num_key_value_heads": 4 for side in ("encoder", "decoder")},
        "pad_token_id": 0,
    },
    "moonshine_streaming": {"num_key_value_heads": 4},
    "perceiver": {"image_size": 8, "num_latents": 16, "d_latents": 32, "num_self_attends_per_block": 2},
    "pp_lcnet": {**STAGED, "scale": 0.25, "class_expand": 64},
    "swin": SWIN,
    "swinv2": SWIN,
    "donut-swin": SWIN,
    "qwen3_asr_encoder": {"n_window": 50, "n_window_infer": 800, "output_dim": 64},
    "shieldgemma2": {"mm_tokens_per_image": 4, "yes_token_index": 10, "no_token_index": 11},
    "speech-encoder-decoder": {"pad_token_id": 0},
    "voxtral": {"audio_token_id": 2},
    "voxtral_encoder": {"intermediate_size": 256},
    "wav2vec2-bert": {"vocab_size": VOCAB},
    "wav2vec2-conformer": {"vocab_size": VOCAB},
}
"""What single types need besides: sizes that are tied to one another."""

WITHOUT_LOSS = ("pp_lcnet", "shieldgemma2")
"""Image classifiers that compute none of classes."""
MELS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim")
"""How configs name the features of a frame; `FEATURES` are those of the types that say it otherwise."""
FEATURES = {"fun_asr_nano": 224, "granite_speech5_ctc": 128, "pop2piano": 64}
FRAMES_OF = {"fun_asr_nano": 8, "qwen3_asr": 100, "voxtral_realtime": 8 * LENGTH}
"""Of types that take few, a multiple of a window, or as many as the text that the sound is added to has tokens for."""
FIXED = ("whisper", "voxtral_encoder")
"""Encoders that take as many frames as they have positions for, mel bins first."""
MELS_FIRST = ("qwen3_asr_encoder", "voxtral_realtime_encoder")
MASKED = (
    "lasr_encoder",
    "parakeet_encoder",
    "qwen3_asr_encoder",
    "granite_speech5_encoder",
    "fun_asr_nano_encoder",
)
"""Encoders that need a mask of the frames."""


def batch(kind: str, model: nn.Module, step: int) -> dict[str, Any]:
    """The batch of a step for an image classifier or a speech model; `classes` are for a loss that it lacks."""
    generator = torch.Generator().manual_seed(step)
    make = _images if kind == "image" else _sounds
    return make(model, generator)


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.float64)


def _ids(generator: torch.Generator, length: int, most: int = VOCAB, least: int = RESERVED) -> torch.Tensor:
    return torch.randint(least, most, (SAMPLES, length), generator=generator)


def _images(model: nn.Module, generator: torch.Generator) -> dict[str, Any]:
    config: Any = model.config
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 64)
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(vision, "num_channels", 3)
    classes = _ids(generator, 1, LABELS, 0)[:, 0]
    inputs: dict[str, Any] = {"classes" if config.model_type in WITHOUT_LOSS else "labels": classes}
    if config.model_type == "shieldgemma2":  # it answers yes or no
        ids = _ids(generator, LENGTH)
        ids[:, : config.mm_tokens_per_image] = config.image_token_index
        inputs = {"classes": classes % 2, "input_ids": ids, "token_type_ids": torch.zeros_like(ids)}
    if config.model_type == "siglip2":
        side = int(vision.num_patches**0.5)
        return inputs | {
            "pixel_values": _random(generator, vision.num_patches, channels * vision.patch_size**2),
            "pixel_attention_mask": torch.ones(SAMPLES, vision.num_patches, dtype=torch.int64),
            "spatial_shapes": torch.tensor([[side, side]] * SAMPLES),
        }
    if config.model_type == "imagegpt":
        return inputs | {"input_ids": _ids(generator, LENGTH)}
    name = "inputs" if config.model_type == "perceiver" else "pixel_values"
    return inputs | {name: _random(generator, channels, height, width)}


def _sounds(model: nn.Module, generator: torch.Generator) -> dict[str, Any]:
    config: Any = model.config
    if config.model_type == "dia":  # it makes sounds of text: a row of codes for every channel
        channels, words = config.decoder_config.num_channels, config.decoder_config.vocab_size
        codes = _ids(generator, LENGTH * channels, min(VOCAB, words)).view(SAMPLES, LENGTH, channels)
        labels = codes.transpose(1, 2).reshape(SAMPLES * channels, LENGTH)
        return {"input_ids": _ids(generator, LENGTH), "decoder_input_ids": codes, "labels": labels}
    if config.model_type == "kyutai_speech_to_text":  # its text comes with the codes of a sound
        codes = _ids(generator, LENGTH * (config.num_codebooks + 1)).view(SAMPLES, LENGTH, -1)
        return {"input_ids": codes, "labels": codes[..., 0]}
    name, sound = type(model).__name__, _sound(model, generator)
    if name.endswith("CTC"):
        return sound | {"labels": _ids(generator, SPOKEN, min(VOCAB, _words(config)))}
    if name.endswith("Classification"):
        return sound | {"labels": _ids(generator, 1, LABELS, 0)[:, 0]}
    ids = _ids(generator, LENGTH, min(VOCAB, _words(config)))
    if not _hears_in_text(model):
        return sound | {"labels": ids}
    ids[:, : config.tiny_audio_tokens] = _audio_token(config)
    return sound | {"input_ids": ids, "labels": ids.masked_fill(ids == _audio_token(config), -100)}


def _words(config: Any) -> int:
    return getattr(config, "vocab_size", None) or config.get_text_config(decoder=True).vocab_size


def _audio_token(config: Any) -> int:
    return getattr(config, "audio_token_id", None) or getattr(config, "audio_token_index", 2)


def _takes(model: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(type(model).forward).parameters


def _hears_in_text(model: nn.Module) -> bool:
    """Whether a model of text puts sounds in the places of audio tokens."""
    return getattr(model, "main_input_name", "") == "input_ids" and "decoder_input_ids" not in _takes(model)


def _sound(model: nn.Module, generator: torch.Generator) -> dict[str, Any]:
    config: Any = model.config
    taken = _takes(model)
    parts = [config, *(v for v in vars(config).values() if hasattr(v, "to_json_string"))]
    if config.model_type == "audio-spectrogram-transformer":
        return {"input_values": _random(generator, config.max_length, config.num_mel_bins)}
    if "input_features" not in taken or model.main_input_name in ("input_values", "inputs"):
        if "padding_mask" in taken:
            mask = torch.ones(SAMPLES, WAVE, dtype=torch.bool)
            return {"input_values": _random(generator, 1, WAVE), "padding_mask": mask}
        return {"input_values": _random(generator, WAVE)}
    named = [getattr(part, name, None) for name in MELS for part in parts]
    mels = FEATURES.get(config.model_type) or next(each for each in named if isinstance(each, int))
    kinds = {part.model_type for part in parts}
    frames = next((2 * part.max_source_positions for part in parts if part.model_type in FIXED), FRAMES)
    frames = FRAMES_OF.get(config.model_type, frames)
    shape = (mels, frames) if kinds & {*FIXED, *MELS_FIRST} else (frames, mels)
    sound: dict[str, Any] = {"input_features": _random(generator, *shape)}
    if kinds & {*MASKED}:
        name = "input_features_mask" if "input_features_mask" in taken else "attention_mask"
        sound[name] = torch.ones(SAMPLES, frames, dtype=torch.int64)
    return sound


def settle(model: nn.Module) -> None:
    """Find how many audio tokens the text of a model needs that puts sounds in their places.

    Raises NotBuilt where it takes no number of them.
    """
    if not _hears_in_text(model) or model.config.model_type == "kyutai_speech_to_text":  # type: ignore[union-attr]
        return
    failure: Exception | None = None
    for count in range(1, LENGTH):
        model.config.tiny_audio_tokens = count  # type: ignore[union-attr]
        try:
            with torch.no_grad():
                model(**batch("speech", model, 0))
            return
        except Exception as error:
            failure = error
    raise NotBuilt(f"it takes no number of audio tokens: {first_line(failure)}") from failure  # type: ignore[arg-type]
