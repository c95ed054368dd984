"""The model that learns from preferences, and what a batch of answers means to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cai_apps.applications.alignment.algorithms import ALGORITHMS
from cai_apps.applications.alignment.config import Config
from cai_apps.applications.alignment.objective import Objective, measures_of
from cai_apps.applications.alignment.reference import KL, ROWS, Comparison
from cai_apps.applications.language.base import weights_directory
from cai_apps.applications.language.model import Maker, build, call_options
from cai_apps.applications.language.noise import KEYS
from cai_apps.applications.language.task import own_tokens
from cai_apps.applications.language.weights import pretrained, quantized_base
from cai_apps.compose.lora import initializer
from cai_apps.compose.losses import IGNORED
from cai_apps.compose.models import causal_model, load_model_config
from cai_apps.compose.positions import PositionsKnown
from cai_apps.compose.routing.places import text_places
from cai_apps.compose.value_head import HEAD, has_stored_head, reward_model
from cai_apps.compose.workload import Batch, Workload
from cai_mesh.comm import AnyMesh
from cai_tensor_parallel import own_rows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

INPUTS = ("input_ids", "position_ids", "cu_seqlens", "prefixes", KEYS)
"""The names of what the model reads of a batch; the loss reads the rest, and where documents begin."""


def has_value_head(config: Config) -> bool:
    """Return whether the model of a config has a value head in place of logits."""
    return ALGORITHMS[config.alignment.algorithm].score == "value"


def maker_of(config: Config) -> Maker:
    """Return what makes the model of an algorithm: a causal one, or one with a value head."""
    return reward_model if has_value_head(config) else causal_model


def workload(config: Config, model: PretrainedConfig, comparison: Comparison | None = None) -> Workload:
    """Return the workload of a config.

    Args:
        config: the resolved config.
        model: the config of its model.
        comparison: the forwards before a step; None: as the config says, without a second model.
    """
    options = call_options(model)
    return Workload(
        build=partial(build, config, model, maker_of(config)),
        inputs=lambda batch: {name: batch[name] for name in INPUTS if name in batch} | options,
        target=lambda batch: {
            name: value for name, value in batch.items() if name not in INPUTS or name == INPUTS[2]
        },
        loss=partial(Objective.of, config=config),
        predicted=None if has_value_head(config) else _predicted,
        example=partial(example, config),
        initializer=initializer,
        running=PositionsKnown(),
        pretrained=_pretrained(config),
        has_base=bool(config.lora.rank),
        quantized=quantized_base(config),
        measures=measures_of(config.alignment),
        before_step=comparison or Comparison(config),
        chooses_places=not has_value_head(config),
        experts=config.experts,
        token_weights=text_places,
        part=own_answers,
    )


def own_answers(batch: Batch, mesh: AnyMesh) -> Batch:
    """Return this rank's tokens of a batch of whole rows, and beside them "places" [B, S / cp], theirs in the rows.

    "scored" [B, K] are places among these tokens: those with a label first, of which a rank may have any number.
    """
    names = ("input_ids", "position_ids", "labels", "cu_seqlens")
    parts = own_tokens({name: batch[name] for name in names}, mesh)
    row_places = torch.arange(batch["labels"].shape[1], device=batch["labels"].device)
    parts["places"] = own_rows(row_places.expand_as(batch["labels"]), mesh, parts["cu_seqlens"])
    count = min(batch["scored"].shape[1], parts["labels"].shape[1])
    parts["scored"] = (parts["labels"] == IGNORED).byte().argsort(dim=1, stable=True)[:, :count]
    return {name: value for name, value in batch.items() if not name.startswith(KL)} | parts


def _predicted(objective: Objective, output: object) -> Tensor:
    return objective.scorer.tokens.predicted(output)


def _pretrained(config: Config) -> Callable[[nn.Module], None] | None:
    """Return what fills a model from files; a value head that they do not have stays as it is made."""

    def absent() -> frozenset[str]:
        if not has_value_head(config):
            return frozenset()
        stored = has_stored_head(weights_directory(config), load_model_config(config.model.name))
        return frozenset() if stored else frozenset({f"{HEAD}.weight"})

    return pretrained(config, absent)


def example(config: Config, samples: int) -> Batch:
    """Return a microbatch of so many rows, of any values: half of each row is chosen, half rejected.

    Where prompts are shared a third is the prompt.
    """
    length, algorithm = config.data.sequence_length, ALGORITHMS[config.alignment.algorithm]
    ids = torch.zeros(samples, length, dtype=torch.int64)
    places = [0, length // 2, length, length] if algorithm.units == "pairs" else [0, length, length]
    if config.alignment.share_prompts:
        places = [0, length // 3, 2 * length // 3, length, length]
    starts = torch.tensor([places], dtype=torch.int32).expand(samples, len(places)).contiguous()
    unit = torch.zeros(samples, 1)
    scored = torch.arange(length).expand(samples, length).contiguous()
    batch = {"input_ids": ids, "labels": ids, "position_ids": ids, "cu_seqlens": starts, "scored": scored}
    batch["present"] = unit == 0
    if config.alignment.share_prompts:
        batch["prefixes"] = torch.tensor([0, 0, 0, 3], dtype=torch.int32).expand(samples, 4).contiguous()
    if config.model.neftune_alpha:
        batch[KEYS] = ids[:, 0]
    if algorithm.reference:
        answers = 2 if config.alignment.share_prompts else len(places) - 1
        batch["reference"] = torch.zeros(samples, answers, dtype=torch.float64)
    if algorithm.units == "pairs":
        return batch | {"margin": unit}
    mismatches = {KL + name: batch[name] for name in ROWS}
    zero = torch.zeros((), dtype=torch.float64)
    return batch | mismatches | {f"{KL}reference": unit.double(), "desirable": unit == 0, "kl": zero}
