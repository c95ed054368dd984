"""What a run of a model that classifies texts or pictures is, beside the sections of every run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from cai_apps.config import sections
from cai_apps.config.ranges import FILLED, PART, Range

MODULES, DIGITS = "modules", "digits"
"""Sources that are here already: texts, and pictures."""


@dataclass(frozen=True)
class Model:
    name: Annotated[str, FILLED] = "bert-tiny"
    """A preset, a local directory with an HF config.json, or a hub id, of a kind that transformers has a sequence or an
    image classification of: BERT, RoBERTa, DeBERTa, ViT, LLaMA and many more."""
    weights: Literal["random", "pretrained"] = "random"
    """random: made from train.seed; pretrained: read from the directory's (or hub id's) safetensors. A head that those
    lack, or that is of other classes, begins anew."""


@dataclass(frozen=True)
class Data:
    source: Annotated[str, FILLED] = MODULES
    """Texts: a file of records with a text and its class (.jsonl, .json, .csv, .tsv, .parquet), a folder or a glob of
    such, a directory written by datasets.save_to_disk, or 'modules' (functions of the standard library, by the module
    that they are from). Pictures: a directory that
    has a folder of pictures for each class, or 'digits' (scikit-learn's 1,797 scans)."""
    text: Annotated[str, FILLED] = "text"
    """Field of a record, or column of a table, with the text."""
    second_text: Annotated[str | None, FILLED] = None
    """Field of a second text beside it, such as the hypothesis that a premise may bear out; None: there is none."""
    label: Annotated[str, FILLED] = "label"
    """Field with the class: a name, or a number from 0."""
    tokenizer: Annotated[str, FILLED] = "auto"
    """auto: that of the pretrained model, or one that is trained on the texts; a directory or hub id."""
    sequence_length: Annotated[int, Range(least=4)] = 128
    """Tokens of a text; longer ones are cut at their end, of two texts the longer one first."""
    validation_source: Annotated[str | None, FILLED] = None
    """Where the samples for validation are, as `source` says; None: a part of the source."""
    validation_fraction: Annotated[float, PART] = 0.1
    """Part of the samples that is kept for validation and never trained on, drawn by their numbers."""
    cache: Annotated[str, FILLED] = "~/.cache/cai"
    """Directory for tokens and tokenizers."""


@dataclass(frozen=True)
class Config(sections.RunConfig):
    application: Literal["classification"] = "classification"
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    lora: sections.LoRA = field(default_factory=sections.LoRA)
