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
class Log(sections.Log):
    sample_tokens: Annotated[int, NATURAL] = 64
    """Length of the text generated from the export at the end; 0: none."""


@dataclass(frozen=True)
class Config(sections.RunConfig):
    application: Literal["language"] = "language"
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    lora: sections.LoRA = field(default_factory=sections.LoRA)
    log: Log = field(default_factory=Log)
