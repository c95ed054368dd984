"""A small model in a user's loop: the plain one on one process, and the same under each plugin on ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from cai_apps.booster import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
    launch,
)

STEPS, ROWS, LENGTH, WORDS = 10, 8, 16, 96
Losses = list[float]


def hybrid(**options: Any) -> Callable[[], Plugin]:
    """Return what makes a hybrid plugin, of one rank of each kind unless options say otherwise."""
    return lambda: HybridParallelPlugin(**{"tp_size": 1, "pp_size": 1, "precision": "fp32"} | options)


ROWS_OVER_RANKS = {"sp_size": 2, "enable_sequence_parallelism": True}
PLUGINS: dict[str, Callable[[], Plugin]] = {
    "ddp": TorchDDPPlugin,
    "zero1": lambda: LowLevelZeroPlugin(stage=1, precision="fp32"),
    "zero2": lambda: LowLevelZeroPlugin(stage=2, precision="fp32", extra_dp_size=2),
    "zero2 on the host": lambda: LowLevelZeroPlugin(stage=2, precision="fp32", cpu_offload=True),
    "fsdp": TorchFSDPPlugin,
    "tensor 2": hybrid(tp_size=2, zero_stage=1),
    "tensor 2 of sequences": hybrid(
        tp_size=2, enable_sequence_parallelism=True, sequence_parallelism_mode="split_gather"
    ),
    "rows by heads": hybrid(**ROWS_OVER_RANKS, zero_stage=2),
    "rows in a ring": hybrid(**ROWS_OVER_RANKS, sequence_parallelism_mode="ring_attn", zero_stage=3),
    "pipeline 2": hybrid(pp_size=2, microbatch_size=2),
    "pipeline 2 tensor 2": hybrid(pp_size=2, tp_size=2, num_microbatches=4, zero_stage=1),
    "clipped": hybrid(pp_size=2, tp_size=2, num_microbatches=4, zero_stage=1, max_norm=0.2),
    "clipped shards": hybrid(zero_stage=3, max_norm=0.2),
    "pipeline 2 interleaved": hybrid(
        pp_size=2, num_microbatches=4, pp_style="interleaved", num_model_chunks=2, zero_stage=2
    ),
    "pipeline 2 in a v": hybrid(
        pp_size=2, num_microbatches=4, pp_style="zbv", num_model_chunks=2, scheduler_nodes=[], zero_stage=1
    ),
    "pipeline 2 zero3": hybrid(pp_size=2, num_microbatches=2, zero_stage=3),
    "pipeline 2 rows": hybrid(**ROWS_OVER_RANKS, pp_size=2, num_microbatches=2),
}
"""Plugins for four ranks, in fp32; Gemini has no fp32, as in ColossalAI."""
CLIPPED = {"clipped": 0.2, "clipped shards": 0.2}
"""Largest norms of those that clip."""


def llama() -> nn.Module:
    """Return a model of four layers, the same each time."""
    torch.manual_seed(5)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": WORDS}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2))


def mixtral() -> nn.Module:
    """Return a model with four experts in each of two layers, the same each time."""
    torch.manual_seed(5)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": WORDS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(**shape, **heads, num_local_experts=4, num_experts_per_tok=2))


def tokens(step: int) -> torch.Tensor:
    """Return the rows of a step, [ROWS, LENGTH]."""
    return torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two groups, as scripts make them, which asks how long a gradient is: eps is large."""
    norms = [param for name, param in model.named_parameters() if "norm" in name]
    others = [param for name, param in model.named_parameters() if "norm" not in name]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-2)


def plain_losses(
    build: Callable[[], nn.Module] = llama, clip: float | None = None, steps: int = STEPS
) -> Losses:
    """Return the losses of the loop that torch's users write, on one process."""
    model = build()
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
    losses = []
    for step in range(steps):
        ids = tokens(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


class Loop:
    """The same loop with a booster.

    Args:
        plugin: the plugin.
        build: what makes the model.
    """

    def __init__(self, plugin: Plugin, build: Callable[[], nn.Module] = llama):
        self.plugin, self.booster = plugin, Booster(plugin=plugin)
        model = build()
        optimizer = optimizer_of(model)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
        boosted = self.booster.boost(model, optimizer, lr_scheduler=schedule)
        self.model, self.optimizer, _, _, self.schedule = boosted

    def backward(self, ids: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        """Add the gradients of this data rank's rows, times a weight; return their loss times it."""
        batch = {"input_ids": ids, "labels": ids}
        if self.plugin.pp_size > 1:
            outputs = self.booster.execute_pipeline(
                iter([batch]), self.model, lambda output, inputs: output.loss * weight, self.optimizer
            )
            return outputs["loss"]
        loss = self.model(**batch).loss * weight
        self.booster.backward(loss, self.optimizer)
        return loss

    def step(self, step: int, *, halves: bool = False) -> float:
        """Take a step; return its loss over all data ranks.

        Args:
            step: its number.
            halves: whether gradients come in two backwards, the first of which talks to nobody.
        """
        plugin = self.plugin
        ids = tokens(step).chunk(plugin.dp_size)[plugin.dp_rank]
        total = torch.zeros(())
        parts = ids.chunk(2) if halves else [ids]
        for number, part in enumerate(parts):
            stays = number + 1 < len(parts)
            with self.booster.no_sync(self.model, self.optimizer) if stays else nullcontext():
                total += self.backward(part, weight=1 / len(parts)).detach().float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        dist.all_reduce(total, group=plugin.dp_group)
        return float(total) / plugin.dp_size

    def losses(self, first: int = 0, last: int = STEPS, *, halves: bool = False) -> Losses:
        """Return the losses of some steps."""
        return [self.step(step, halves=halves) for step in range(first, last)]


def all_losses(names: list[str]) -> dict[str, Losses]:
    """Return the losses under each of some plugins, on a rank."""
    launch()
    return {name: Loop(PLUGINS[name]()).losses() for name in names}


HALVES = ("ddp", "zero2", "fsdp", "zero2 on the host", "pipeline 2", "pipeline 2 zero3")
"""Plugins under which a step has two backwards, the first of which talks to nobody."""


def talks(name: str) -> tuple[int, int]:
    """Return how many collectives a backward has under `no_sync` and outside, on a rank."""
    launch()
    loop, counts = Loop(PLUGINS[name]()), []
    ids = tokens(0).chunk(loop.plugin.dp_size)[loop.plugin.dp_rank]
    loop.step(0)
    for context in (loop.booster.no_sync(loop.model, loop.optimizer), nullcontext()):
        with CommDebugMode() as counted, context:
            loop.backward(ids)
            if loop.optimizer.sync is not None and not loop.optimizer.deferred:
                loop.optimizer.sync.finish()
        counts.append(counted.get_total_counts())
    return counts[0], counts[1]


def accumulated(names: tuple[str, ...]) -> dict[str, Losses]:
    """Return the losses of steps of two backwards, on a rank."""
    launch()
    return {name: Loop(PLUGINS[name]()).losses(halves=True) for name in names}


def spread_experts() -> dict[str, Losses]:
    """Return the losses of a model with experts, spread and not, with a pipeline and without, on a rank."""
    launch()
    options = {"tp_size": 1, "precision": "fp32", "microbatch_size": 2, "zero_stage": 2}
    layouts = {"data": (1, 1), "experts": (1, 4), "pipeline": (2, 2)}
    return {
        name: Loop(MoeHybridParallelPlugin(pp_size=stages, ep_size=ranks, **options), mixtral).losses(0, 4)
        for name, (stages, ranks) in layouts.items()
    }


GEMINI: dict[str, dict[str, Any]] = {
    "bf16": {},
    "state on the host": {"offload_optim_frac": 1.0},
    "half of it": {"offload_optim_frac": 0.5, "offload_param_frac": 0.5, "max_norm": 0.5},
    "tensor 2": {"tp_size": 2},
    "fp16": {"precision": "fp16", "initial_scale": 2.0**4, "offload_optim_frac": 1.0},
}
"""Options of Gemini."""


def gemini_losses() -> dict[str, Losses]:
    """Return the losses under Gemini, on a rank."""
    launch()
    return {
        name: Loop(GeminiPlugin(**{"precision": "bf16"} | options)).losses(0, 4)
        for name, options in GEMINI.items()
    }


def adapted(name: str, directory: str, dora: bool) -> Losses:
    """Return the losses of adapters beside a model, which are written at the end and read back, on a rank."""
    from peft import LoraConfig, PeftModel

    launch()
    plugin = PLUGINS[name]()
    booster = Booster(plugin=plugin)
    options = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=dora)
    model = booster.enable_lora(llama(), lora_config=options)
    loop = Loop(plugin, lambda: model)
    losses = loop.losses(0, 4)
    booster.save_lora_as_pretrained(loop.model, directory)
    read = PeftModel.from_pretrained(llama(), directory).eval()
    ids = tokens(4)
    with torch.no_grad():
        return [*losses, float(read(input_ids=ids, labels=ids).loss)]


def moved(directory: str, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], Losses]:
    """Return losses of runs that change their plugin in the middle, by files, on a rank."""
    launch()
    losses = {}
    for number, (before, after) in enumerate(pairs):
        place, half = Path(directory) / str(number), STEPS // 2
        one = Loop(PLUGINS[before]())
        found = one.losses(0, half)
        shard = number % 2 == 0
        one.booster.save_model(one.model, place / "model", shard=shard, size_per_shard=1)
        one.booster.save_optimizer(one.optimizer, place / "optimizer", shard=shard)
        one.booster.save_lr_scheduler(one.schedule, place / "schedule")
        other = Loop(PLUGINS[after](), lambda: _spoiled(llama()))
        other.booster.load_model(other.model, place / "model")
        other.booster.load_optimizer(other.optimizer, place / "optimizer")
        other.booster.load_lr_scheduler(other.schedule, place / "schedule")
        losses[before, after] = found + other.losses(half, STEPS)
    return losses


def _spoiled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    return copy.deepcopy(model)
