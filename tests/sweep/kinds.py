"""The kinds of models of the page on heads: their types, how one is built tiny, and the batches of its loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForAudioClassification,
    AutoModelForCTC,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)
from transformers.models.auto import modeling_auto

from sweep import media
from sweep.configs import LENGTH, PARAMETER_LIMIT, RESERVED, TEXT, VOCAB, NotBuilt, Small, first_line, tiny


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Args:
        title: in the page.
        mappings: (what it is called, auto class, its names by model type); of a type in several the first counts.
        small: what makes its configs small.
    """

    title: str
    mappings: tuple[tuple[str, Any, Mapping[str, Any]], ...]
    small: Small = TEXT

    @property
    def types(self) -> list[str]:
        return sorted({name for _, _, names in self.mappings for name in names})

    def of(self, model_type: str) -> tuple[str, Any, str]:
        """What the head of a type is called, its auto class, and the name of its first class."""
        name, auto, names = next(mapping for mapping in self.mappings if model_type in mapping[2])
        classes = names[model_type]
        return name, auto, classes if isinstance(classes, str) else classes[0]


MEDIA = Small(media.MEDIA_SIZES, {**TEXT.extras, **media.EXTRAS}, lists=True, kept=media.KEPT)
KINDS = {
    "masked": Kind(
        "Masked",
        (("masked", AutoModelForMaskedLM, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),),
    ),
    "seq2seq": Kind(
        "Seq2seq",
        (("seq2seq", AutoModelForSeq2SeqLM, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),),
    ),
    "image": Kind(
        "Image classification",
        (
            (
                "classes",
                AutoModelForImageClassification,
                modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
            ),
        ),
        MEDIA,
    ),
    "speech": Kind(
        "Speech",
        (
            ("CTC", AutoModelForCTC, modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES),
            ("text", AutoModelForSpeechSeq2Seq, modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES),
            (
                "classes",
                AutoModelForAudioClassification,
                modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
            ),
        ),
        MEDIA,
    ),
}


def build(kind: str, model_type: str) -> nn.Module:
    """The model, of one seed. Raises NotBuilt where transformers does not build it small."""
    config: Any = tiny(model_type, KINDS[kind].small)
    if kind == "masked":
        config.is_decoder = False
    elif kind != "image" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    if kind in ("image", "speech"):
        config.num_labels = media.LABELS
    _, auto, class_name = KINDS[kind].of(model_type)
    config.architectures = [class_name]
    torch.manual_seed(0)
    try:
        model = auto.from_config(config).double().train()
    except Exception as error:
        raise NotBuilt(f"transformers does not build it: {first_line(error)}") from error
    if sum(p.numel() for p in model.parameters()) > PARAMETER_LIMIT:
        raise NotBuilt("its smallest config known here is large")
    if kind == "speech":
        media.settle(model)
    return model


def batch(kind: str, model: nn.Module, step: int) -> dict[str, Any]:
    """The batch of a step; every column has the same."""
    if kind in ("image", "speech"):
        return media.batch(kind, model, step)
    generator = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(RESERVED, VOCAB, (2, 2, LENGTH), generator=generator)
    labels[:, ::3] = -100
    return {"input_ids": ids, "labels": labels}


def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The loss of a batch: the model's own, or cross-entropy of the classes that it is given instead of labels."""
    inputs = {name: value for name, value in batch.items() if name != "classes"}
    output: Any = model(**inputs, use_cache=False) if _caches(model) else model(**inputs)
    return F.cross_entropy(output[0], batch["classes"]) if "classes" in batch else output.loss


def _caches(model: nn.Module) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))
