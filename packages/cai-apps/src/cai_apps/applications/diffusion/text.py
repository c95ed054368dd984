"""Captions: tokens of a CLIP tokenizer, and what text encoders make of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cai_apps.applications.diffusion.families import Family
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import CLIPTokenizer

ADAPTED = ("q_proj", "k_proj", "v_proj", "out_proj")
"""Ends of the names of layers of text encoders that have adapters unless a config says which."""
KINDS = ("CLIPTextModel", "CLIPTextModelWithProjection")


def build_text_encoder(config: Mapping[str, Any]) -> nn.Module:
    """The text encoder of a config, on the device of the context."""
    import transformers

    made = transformers.CLIPTextConfig(**{k: v for k, v in config.items() if k != "architectures"})
    return getattr(transformers, kind_of_text(config))(made)


def kind_of_text(config: Mapping[str, Any]) -> str:
    """The class of transformers that a text encoder's config is of.

    Raises:
        ConfigError: it is none of those known here.
    """
    name = config.get("architectures", KINDS)[0]
    if name not in KINDS:
        raise ConfigError(
            "a text encoder of an unknown kind",
            got=name,
            expected=" or ".join(KINDS),
            fix="leave its directory out: SD3 works without its third text encoder" if "T5" in name else "",
        )
    return name


def embed(
    family: Family,
    denoiser: Mapping[str, Any],
    texts: Sequence[nn.Module],
    tokens: Tensor,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """What a denoiser takes of captions.

    Args:
        denoiser: its config.
        texts: the text encoders.
        tokens: int64 [n, encoders, length].

    Returns text [n, length, width] of `dtype`; and pooled [n, width] where the denoiser takes it, as `join` says.
    """
    return join(family, denoiser, [read(family, text, tokens[:, i], dtype) for i, text in enumerate(texts)])


def read(family: Family, text: nn.Module, tokens: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """What one text encoder says of tokens int64 [n, length]: text [n, length, width], of `dtype`; and pooled
    [n, width] where the denoiser takes it."""
    if family.condition == "text":
        return {"text": text(input_ids=tokens).last_hidden_state.to(dtype)}
    found = text(input_ids=tokens, output_hidden_states=True)
    return {"text": found.hidden_states[-2].to(dtype), "pooled": found.text_embeds.to(dtype)}


def join(
    family: Family, denoiser: Mapping[str, Any], said: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """What a denoiser takes of what its text encoders say, in their order.

    For SD3 the states before the last layer of all encoders lie side by side, filled up with zeros, and are followed by
    as many zeros in place of a third encoder's (T5), as diffusers does without one.
    """
    if family.condition == "text":
        return dict(said[0])
    states = torch.cat([each["text"] for each in said], -1)
    states = nn.functional.pad(states, (0, denoiser["joint_attention_dim"] - states.shape[-1]))
    return {
        "text": torch.cat([states, torch.zeros_like(states)], 1),
        "pooled": torch.cat([each["pooled"] for each in said], -1),
    }


def train_tokenizer(captions: Iterable[str], size: int) -> CLIPTokenizer:
    """A CLIP tokenizer of at most `size` tokens for these captions."""
    from transformers import CLIPTokenizer

    letters = sorted({c for caption in captions for c in caption.lower() if not c.isspace()})
    vocabulary = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    smallest = CLIPTokenizer(vocab={word: number for number, word in enumerate(vocabulary)}, merges=[])
    return smallest.train_new_from_iterator(captions, size)


def tokenize(
    tokenizers: Sequence[CLIPTokenizer], captions: Sequence[str], length: int
) -> tuple[Tensor, list[int]]:
    """int64 [captions, encoders, length], and the numbers of the captions that had to be cut."""
    ids, cut = [], set()
    for tokenizer in tokenizers:
        options: dict[str, Any] = {"padding": "max_length", "max_length": length, "truncation": True}
        ids.append(torch.tensor(tokenizer(list(captions), **options)["input_ids"]).view(-1, length))
        lengths = (len(each) for each in tokenizer(list(captions), verbose=False)["input_ids"])
        cut |= {number for number, tokens in enumerate(lengths) if tokens > length}
    return torch.stack(ids, 1), sorted(cut)


def load_tokenizers(directory: Path, count: int) -> list[CLIPTokenizer]:
    """Those of a pipeline's directory, or of a run's: `tokenizer`, `tokenizer_2`; the first where one is missing."""
    from transformers import CLIPTokenizer

    found = []
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3")[:count]:
        home = directory / name
        found.append(CLIPTokenizer.from_pretrained(home) if home.is_dir() else found[0])
    return found
