"""Pipelines of diffusers with small random weights, as `DiffusionPipeline.save_pretrained` writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from cai_apps.applications.diffusion.model.captions import train_tokenizer

CAPTIONS = ["a large red circle", "a small blue square", ""]
LENGTH = 20
"""Tokens of a caption."""


def autoencoder(**more: Any) -> diffusers.AutoencoderKL:
    """Two pixels to a latent; tiles of 16 x 16 latents."""
    shape: dict[str, Any] = {
        "block_out_channels": [16, 32],
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "latent_channels": 4,
        "norm_num_groups": 8,
        "sample_size": 32,
    }
    return diffusers.AutoencoderKL(**shape | more)


def clip(kind: type = CLIPTextModel, width: int = 16) -> Any:
    shape = {"hidden_size": width, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return kind(
        CLIPTextConfig(**shape, **ids, projection_dim=16, max_position_embeddings=LENGTH, vocab_size=300)
    )


def tokenizer() -> Any:
    found = train_tokenizer(CAPTIONS, 200)
    found.model_max_length = LENGTH
    return found


def sd() -> diffusers.DiffusionPipeline:
    """Latents of 8 x 8."""
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    return diffusers.StableDiffusionPipeline(
        vae=autoencoder(),
        text_encoder=clip(),
        tokenizer=tokenizer(),
        unet=unet,
        scheduler=diffusers.DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def dit() -> diffusers.DiffusionPipeline:
    transformer = diffusers.DiTTransformer2DModel(
        num_layers=3,
        num_attention_heads=2,
        attention_head_dim=16,
        sample_size=8,
        in_channels=4,
        out_channels=8,
        num_embeds_ada_norm=1000,
        norm_num_groups=8,
    )
    return diffusers.DiTPipeline(transformer, autoencoder(), diffusers.DDIMScheduler(clip_sample=False))


def sd3() -> diffusers.DiffusionPipeline:
    transformer = diffusers.SD3Transformer2DModel(
        num_layers=3,
        num_attention_heads=2,
        attention_head_dim=16,
        sample_size=8,
        in_channels=4,
        joint_attention_dim=64,
        out_channels=4,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        pos_embed_max_size=16,
    )
    words = tokenizer()
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder(shift_factor=0.1),
        text_encoder=clip(CLIPTextModelWithProjection),
        tokenizer=words,
        text_encoder_2=clip(CLIPTextModelWithProjection),
        tokenizer_2=words,
        text_encoder_3=None,
        tokenizer_3=None,
    )


def t5_tokenizer() -> Any:
    from transformers import T5TokenizerFast

    words = sorted({f"\u2581{word}" for caption in CAPTIONS for word in caption.split()})
    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((word, -1.0) for word in ("\u2581", *words))]
    return T5TokenizerFast(vocab=scores, extra_ids=0)


def sd3_t5() -> diffusers.DiffusionPipeline:
    """With a third text encoder."""
    from transformers import T5Config, T5EncoderModel

    shape = {"d_model": 64, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 32}
    t5 = T5EncoderModel(T5Config(**shape, feed_forward_proj="gated-gelu"))
    parts = sd3().components | {"text_encoder_3": t5, "tokenizer_3": t5_tokenizer()}
    return diffusers.StableDiffusion3Pipeline(**{k: v for k, v in parts.items() if v is not None})


PIPELINES: dict[str, Callable[[], Any]] = {"sd": sd, "dit": dit, "sd3": sd3, "sd3-t5": sd3_t5}


def save(name: str, directory: Path, **how: Any) -> Path:
    """A pipeline of weights from a fixed seed, in a directory."""
    torch.manual_seed(0)
    pipeline = PIPELINES[name]()
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            for param in part.parameters():
                if not param.any():
                    torch.nn.init.normal_(param, std=0.1)
    pipeline.save_pretrained(directory, **how)
    return directory
