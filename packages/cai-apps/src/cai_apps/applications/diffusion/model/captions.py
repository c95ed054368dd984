"""Captions: tokens of a CLIP tokenizer, and what text encoders make of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cai_apps.applications.diffusion.model.design import T5, T5_LENGTH, is_t5, kind_of_text
from cai_apps.applications.diffusion.model.families import Family
from cai_apps.data.tokenizer import tokenizer_digest
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import CLIPTokenizer

ADAPTED = ("q_proj", "k_proj", "v_proj", "out_proj")
"""Ends of the names of layers of text encoders that have adapters unless a config says which."""


def build_text_encoder(config: Mapping[str, Any]) -> nn.Module:
    """The text encoder of a config, on the device of the context."""
    import transformers

    kind = transformers.T5Config if is_t5(config) else transformers.CLIPTextConfig
    text_config = kind(**{k: v for k, v in config.items() if k != "architectures"})
    return getattr(transformers, T5 if is_t5(config) else kind_of_text(config))(text_config)


def embed(
    family: Family,
    denoiser: Mapping[str, Any],
    texts: Sequence[nn.Module],
    tokens: Sequence[Tensor],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """What a denoiser takes of captions.

    Args:
        denoiser: its config.
        texts: the text encoders.
        tokens: int64 [n, length] for each of them.

    Returns text [n, length, width] of `dtype`; and pooled [n, width] where the denoiser takes it, as `join` says.
    """
    outputs = [read(family, text, ids, dtype) for text, ids in zip(texts, tokens, strict=True)]
    return join(family, denoiser, outputs)


def read(family: Family, text: nn.Module, tokens: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """What one text encoder says of tokens int64 [n, length]: text [n, length, width], of `dtype`; and pooled
    [n, width] where the denoiser takes it, but of a T5."""
    if family.condition == "text" or is_t5({"architectures": [type(text).__name__]}):
        return {"text": text(input_ids=tokens).last_hidden_state.to(dtype)}
    output = text(input_ids=tokens, output_hidden_states=True)
    return {"text": output.hidden_states[-2].to(dtype), "pooled": output.text_embeds.to(dtype)}


def join(
    family: Family, denoiser: Mapping[str, Any], outputs: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """What a denoiser takes of what its text encoders say, in their order.

    For SD3 the states before the last layer of the CLIP encoders lie side by side, filled up with zeros, and are
    followed by those of the T5, or by zeros in their place, as diffusers does it.
    """
    if family.condition == "text":
        return dict(outputs[0])
    clips = [embeddings for embeddings in outputs if "pooled" in embeddings]
    states = torch.cat([embeddings["text"] for embeddings in clips], -1)
    states = nn.functional.pad(states, (0, denoiser["joint_attention_dim"] - states.shape[-1]))
    third = [embeddings["text"] for embeddings in outputs if "pooled" not in embeddings]
    third = third or [states.new_zeros(states.shape[0], T5_LENGTH, states.shape[-1])]
    return {
        "text": torch.cat([states, *third], 1),
        "pooled": torch.cat([embeddings["pooled"] for embeddings in clips], -1),
    }


def train_tokenizer(captions: Iterable[str], size: int) -> CLIPTokenizer:
    """A CLIP tokenizer of at most `size` tokens for these captions."""
    from transformers import CLIPTokenizer

    letters = sorted({c for caption in captions for c in caption.lower() if not c.isspace()})
    vocabulary = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    smallest = CLIPTokenizer(vocab={word: number for number, word in enumerate(vocabulary)}, merges=[])
    return smallest.train_new_from_iterator(captions, size)


def tokenize(
    tokenizers: Sequence[Any], captions: Sequence[str], lengths: Sequence[int]
) -> tuple[list[Tensor], list[int]]:
    """int64 [captions, length] for each tokenizer, and the numbers of the captions that one of them had to cut."""
    ids, truncated_captions = [], set()
    for tokenizer, length in zip(tokenizers, lengths, strict=True):
        options: dict[str, Any] = {"padding": "max_length", "max_length": length, "truncation": True}
        ids.append(torch.tensor(tokenizer(list(captions), **options)["input_ids"]).view(-1, length))
        full_ids = tokenizer(list(captions), verbose=False)["input_ids"]
        truncated_captions |= {number for number, tokens in enumerate(full_ids) if len(tokens) > length}
    return ids, sorted(truncated_captions)


def tokenizers_digest(tokenizers: Sequence[Any]) -> str:
    """Return a digest of all that decides which ids captions have, whatever the tokenizers are called."""
    rules = [[tokenizer_digest(t), t.pad_token_id, t.padding_side, t.truncation_side] for t in tokenizers]
    return hashlib.sha256(json.dumps(rules).encode()).hexdigest()


def load_tokenizers(directory: Path, texts: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Those of a pipeline's directory, or of a run's: `tokenizer`, `tokenizer_2`; the first where one is missing.

    Args:
        texts: configs of the text encoders.

    Raises:
        ConfigError: that of a T5 is missing, or there is none.
    """
    from transformers import AutoTokenizer, CLIPTokenizer

    if texts and not (directory / "tokenizer").is_dir():
        raise ConfigError("text encoders without a tokenizer", expected=str(directory / "tokenizer"))

    tokenizers = []
    for name, text in zip(("tokenizer", "tokenizer_2", "tokenizer_3"), texts, strict=False):
        home = directory / name
        if is_t5(text):
            if not home.is_dir():
                raise ConfigError("a T5 without its tokenizer", expected=str(home))
            tokenizers.append(AutoTokenizer.from_pretrained(home, trust_remote_code=False))
        else:
            tokenizers.append(
                CLIPTokenizer.from_pretrained(home, trust_remote_code=False)
                if home.is_dir()
                else tokenizers[0]
            )
    return tokenizers
