"""What a batch of texts or pictures means to a model that classifies them, and the loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cai_apps.applications.classification.config import Config
from cai_apps.applications.classification.model import Kind, side_of, with_adapters
from cai_apps.compose.lora import initializer
from cai_apps.compose.models import pretrained_directory
from cai_apps.compose.workload import Batch, Workload
from cai_apps.data.batches import PRESENT

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LABELS = "labels"


class ClassLoss:
    """The cross entropy of each sample's class, summed in float32 at least."""

    def __call__(self, output: Any, target: Batch) -> Tensor:
        logits = self._logits(output)
        losses = nn.functional.cross_entropy(logits, target[LABELS], reduction="none")
        return (losses * target[PRESENT]).sum() if PRESENT in target else losses.sum()

    def correct(self, output: Any, target: Batch) -> Tensor:
        """Return the number of samples whose class is the likeliest."""
        right = self._logits(output).argmax(-1) == target[LABELS]
        return (right * target[PRESENT]).sum() if PRESENT in target else right.sum()

    def predicted(self, output: Any) -> Tensor:
        """Return the likeliest class of each sample."""
        return self._logits(output).argmax(-1)

    def _logits(self, output: Any) -> Tensor:
        logits = output.logits
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def workload(
    config: Config,
    model: PretrainedConfig,
    kind: Kind,
    names: tuple[str, ...] = (),
    pretrained: Callable[[nn.Module], None] | None = None,
) -> Workload:
    """Return the workload of a config.

    Args:
        config: the resolved config.
        model: the config of its model, with its classes.
        kind: texts or pictures.
        names: the arrays that it reads of a text, beside labels; none: ids and the mask of those that are there.
        pretrained: a function that fills the model from files; None: initial values stay.
    """
    directory = pretrained_directory(config.model.name) if config.lora.rank else None
    return Workload(
        build=partial(with_adapters, model, kind, config.lora, directory),
        inputs=lambda batch: {name: value for name, value in batch.items() if name not in (LABELS, PRESENT)},
        target=lambda batch: {name: batch[name] for name in (LABELS, PRESENT) if name in batch},
        loss=lambda model, mesh: ClassLoss(),
        correct=lambda loss, output, target: loss.correct(output, target),
        predicted=lambda loss, output: loss.predicted(output),
        example=partial(_example, config, model, kind, names),
        initializer=initializer,
        pretrained=pretrained,
        has_base=bool(config.lora.rank),
        logits="whole",
    )


def _example(
    config: Config, model: PretrainedConfig, kind: Kind, names: tuple[str, ...], samples: int
) -> Batch:
    labels = torch.zeros(samples, dtype=torch.int64)
    if kind == "pictures":
        side = side_of(model, config.model.name)
        return {"pixel_values": torch.zeros(samples, 3, side, side), LABELS: labels}
    row = torch.ones(samples, config.data.sequence_length, dtype=torch.int64)
    return dict.fromkeys(names or ("input_ids", "attention_mask"), row) | {LABELS: labels}
