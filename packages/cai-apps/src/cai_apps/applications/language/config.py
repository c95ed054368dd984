"""What a run of a causal language model is, beside the sections of every run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from cai_apps.config import sections
from cai_apps.config.ranges import FILLED, NATURAL
from cai_apps.data.section import Data


@dataclass(frozen=True)
class Model:
    name: Annotated[str, FILLED] = "llama-tiny"
    """A preset, a local directory with an HF config.json, or a hub id."""
    weights: Literal["random", "pretrained"] = "random"
    """random: made from train.seed; pretrained: read from the directory's (or hub id's) safetensors. A preset is only a
    shape, without weights; llama-tiny-base alone is trained, on text, when a run first asks for it."""
    neftune_alpha: Annotated[float, NATURAL] = 0.0
    """Noise on the embeddings in training (NEFTune, arXiv:2310.05914): this over the root of a text's tokens times its
    features; usually 5 to 15. 0: none."""


@dataclass(frozen=True)
class LoRA(sections.LoRA):
    modules_to_save: Annotated[tuple[str, ...], FILLED] = ()
    """Modules that are trained whole beside the adapters, and kept in their file, by their names or the ends of them:
    "lm_head", "embed_tokens", "norm"."""
    adapter: Annotated[str | None, FILLED] = None
    """Folder of an adapter, as peft writes it, that training goes on from; rank, alpha and layers are its own."""
    base: sections.BaseKind = "compute"
    """What the frozen linear layers of the blocks are kept in. compute: precision.compute. nf4: 4 bits an element and a
    scale for 64 of them, as QLoRA has it (arXiv:2305.14314). int8: 8 bits, and a scale a row."""


@dataclass(frozen=True)
class Log(sections.Log):
    sample_tokens: Annotated[int, NATURAL] = 64
    """Length of the text generated from the export at the end, and of those after `prompts`; 0: none."""
    prompts: tuple[str, ...] = ()
    """Texts that the model goes on with after each validation, by its likeliest tokens, on every layout; of
    conversations, messages of a user that it answers. They are in `cai report`, texts.jsonl and trackers."""


@dataclass(frozen=True)
class Config(sections.RunConfig):
    application: Literal["language"] = "language"
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    lora: LoRA = field(default_factory=LoRA)
    experts: sections.Experts = field(default_factory=sections.Experts)
    log: Log = field(default_factory=Log)
