"""The order of transforms, in one place: from a config to a session that trains.

Meta build, split over stages, FP8 layers, parallelize, swap kernels, recompute, compile, materialize, shard or offload,
and a runner for the schedule. Every transform keeps parameter names, so a checkpoint of one layout is one of all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from cai_apps.blocks import compile_blocks, recompute_blocks
from cai_apps.config import Config
from cai_apps.materialize import materialize
from cai_apps.models import meta_model, pretrained_directory
from cai_apps.offloading import offload_model
from cai_apps.residency import offloads
from cai_apps.validate import mesh_spec, microbatches
from cai_gemini import ChunkResidency, OffloadedOptimizer, offload_activations
from cai_kernels import convert_to_fp8
from cai_kernels.swap import KINDS, swap
from cai_mesh import rng
from cai_mesh.checkpoint import load_hf, save_hf
from cai_mesh.comm import build_mesh, coordinate, group
from cai_mesh.gradients import clip_grad_norm_
from cai_mesh.layout import BoxedTensor, attach_to, canonical_name, reduce_of, sites
from cai_mesh.protocols import GradSync
from cai_pipeline import PipelineRunner, split
from cai_tensor_parallel import parallelize, vocab_parallel_cross_entropy, vocab_start
from cai_zero import (
    Gather,
    MixedPrecision,
    ShardedOptimizer,
    optimizer_state,
    restore_groups,
    shard_module,
    shard_optimizer,
    sharding_of,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass
class Session:
    """A model, its optimizer and the runner of its schedule on one mesh.

    A step is `step` (forward and backward of every microbatch) and `update`. Gradients are those of the sum of the
    loss over target tokens, divided by `total_tokens`, so that layouts and masks change nothing.
    """

    config: Config
    mesh: DeviceMesh
    model: nn.Module
    optimizer: torch.optim.Optimizer
    runner: PipelineRunner
    sync: GradSync | None
    steps: int = 0
    """Steps taken; with the seed and the rank's place, the key of torch's own random numbers (dropout)."""

    def step(self, microbatches: list[dict[str, Tensor]], *, total_tokens: int) -> Tensor:
        """Forward and backward of this data rank's microbatches.

        Args:
            microbatches: `input_ids` and `labels` [B, S]; alike on the pp, cp and tp ranks of a data rank.
            total_tokens: target tokens (labels that are not -100, shifted) of the whole global batch.

        Returns this data rank's part of the loss, a float64 scalar, on every rank.
        """
        differing = {a: i for a, i in coordinate(self.mesh).items() if a != "tp"}
        rng.seed_torch(self.config.train.seed, self.steps, differing)
        self.model.train()
        return self.runner.step(*_split_targets(microbatches, total_tokens))

    def update(self, lr: float) -> Tensor:
        """Clip, step at learning rate `lr`, drop the gradients; returns the gradient norm before clipping."""
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = lr
        if self.sync is not None:
            self.sync.finish()
        clip = self.config.optimizer.clip
        if isinstance(self.optimizer, (ShardedOptimizer, OffloadedOptimizer)):
            norm = self.optimizer.clip_grad_norm_(clip)
        else:
            norm = clip_grad_norm_(self.model.parameters(), clip, self.mesh)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return norm

    def evaluate(self, microbatches: list[dict[str, Tensor]], *, total_tokens: int) -> Tensor:
        """The loss of `step`, forward only, in evaluation mode."""
        self.model.eval()
        return self.runner.evaluate(*_split_targets(microbatches, total_tokens))

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of the session: `model.NAME` in master precision, `optimizer.NAME.SLOT`.

        Tensors are views of the session's own memory; load into them, then call `loaded` with the rest.
        """
        if isinstance(self.optimizer, OffloadedOptimizer):
            return self.optimizer.checkpoint_state()
        named = {canonical_name(n, p): p for n, p in self.model.named_parameters()}
        if isinstance(self.optimizer, ShardedOptimizer):
            model = {n: BoxedTensor.from_param(p) for n, p in named.items() if not p.requires_grad}
            model |= self.optimizer.weights()
            held = self.optimizer.state_for_checkpoint()
        else:
            model = {n: BoxedTensor.from_param(p) for n, p in named.items()}
            held = optimizer_state(self.optimizer, self.model)
        return {
            **{f"model.{name}": value for name, value in model.items()},
            **{f"optimizer.{name}": value for name, value in held.items()},
        }

    def loaded(self, values: Mapping[str, Any], step: int) -> None:
        """Take over what a checkpoint holds besides tensors, after those were loaded into `state()`."""
        restore_groups(self.optimizer, values["optimizer.param_groups"])
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.publish()
        self.steps = step

    def export(self, directory: str | os.PathLike, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write a Hugging Face directory, in the compute dtype, from the master weights. Collective."""
        weights = self.optimizer.weights() if isinstance(self.optimizer, ShardedOptimizer) else None
        save_hf(self.model, directory, weights=weights, dtype=DTYPES[self.config.precision.compute])
        if dist.get_rank() == 0:
            tokenizer.save_pretrained(directory)
        dist.barrier()


Microbatches = list[dict[str, Tensor]]


def _split_targets(microbatches: Microbatches, total: int) -> tuple[Microbatches, list[tuple[Tensor, int]]]:
    inputs = [{"input_ids": batch["input_ids"]} for batch in microbatches]
    return inputs, [(batch["labels"], total) for batch in microbatches]


@dataclass(frozen=True)
class TokenLoss:
    """Cross-entropy of next tokens, summed and divided by a number of targets given with the labels.

    Args:
        group: tensor-parallel ranks whose logits are cut by vocabulary (None: logits are whole).
        vocab_start: this rank's first column.
    """

    group: dist.ProcessGroup | None
    vocab_start: int

    def __call__(self, output: Any, target: tuple[Tensor, int]) -> Tensor:
        """`output.logits` [B, S, V/tp] and labels [B, S] (-100: no target) -> scalar, float32 or wider."""
        labels, total = target
        logits = output.logits[:, :-1].flatten(0, 1)
        labels = labels[:, 1:].flatten()
        if self.group is None:
            wide = logits if logits.dtype == torch.float64 else logits.float()
            return F.cross_entropy(wide, labels, reduction="sum") / total
        start = self.vocab_start
        return (
            vocab_parallel_cross_entropy(logits, labels, self.group, vocab_start=start, reduction="sum")
            / total
        )


def apply(config: Config, model_config: PretrainedConfig, *, device: torch.device) -> Session:
    """Build the session a resolved config describes. Collective: every rank of the job calls it.

    The order is: meta build, `split`, linear layers in FP8, `parallelize`, `swap`, recompute, compile, materialize, the
    optimizer and its sharding, or both of them chunk by chunk with `offload`; runner.
    Raises `CaiError`s of those transforms before any memory is allocated.
    """
    mesh = build_mesh(mesh_spec(config), device_type=device.type)
    model = meta_model(model_config)
    split(model, mesh)
    compiled = config.train.compile == "on" or (config.train.compile == "auto" and device.type == "cuda")
    if config.precision.linear == "fp8":
        # a cast that is kept costs 2 bytes a parameter on every rank: too much where parameters are sharded
        convert_to_fp8(model, scaling="row", cache_weight=config.parallel.zero < 3 and not compiled)
    parallelize(model, mesh)
    loss = TokenLoss(group(mesh, "tp"), _head_start(model))
    swap(model, kinds=_kernels(config, device, compiled))
    if config.memory.recompute == "full" and config.memory.activations == "device":
        recompute_blocks(model, compiled=compiled)
    if compiled:
        compile_blocks(model)
    if config.memory.activations == "host":
        offload_activations(model)
    for module, name, param in sites(model):
        attach_to(module, name, reduce=replace(reduce_of(param), divisor=1.0))
    compute = DTYPES[config.precision.compute]
    master = torch.float32 if compute == torch.bfloat16 else compute
    if offloads(config, mesh.size()):
        adamw = _adamw(config, model)
        optimizer = offload_model(config, model, adamw, device=device, master=master, compute=compute)
        sync = None  # backward after backward, gradients add up where they are
        _load_pretrained(config, model)
    else:
        pretrained = config.model.weights == "pretrained"
        materialize(model, seed=config.train.seed, dtype=master, device=device, pretrained=pretrained)
        _load_pretrained(config, model)
        optimizer, sync = _shard(config, model, mesh, MixedPrecision(compute=compute, master=master))
    runner = PipelineRunner(
        model,
        mesh,
        schedule=config.parallel.pipeline.schedule,
        microbatches=microbatches(config),
        loss_fn=loss,
        grad_sync=sync,
    )
    return Session(config, mesh, model, optimizer, runner, sync)


def _load_pretrained(config: Config, model: nn.Module) -> None:
    if config.model.weights == "pretrained":
        load_hf(model, pretrained_directory(config.model.name))


def _kernels(config: Config, device: torch.device, compiled: bool) -> tuple[str, ...]:
    """Which kinds of modules run kernels. Triton has none in float64.

    Beside compiled blocks two kinds remain: the compiler keeps torch's attention as it is and does not reach the loss.
    """
    if config.train.kernels == "auto":
        if device.type != "cuda" or config.precision.compute == "fp64":
            return ()
        return ("attention", "loss") if compiled else KINDS
    return KINDS if config.train.kernels == "on" else ()


def _head_start(model: nn.Module) -> int:
    """First vocabulary column of this rank's output layer (0 on stages without one)."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    weight = getattr(head, "weight", None)
    return vocab_start(weight) if weight is not None else 0


def _shard(
    config: Config, model: nn.Module, mesh: DeviceMesh, precision: MixedPrecision
) -> tuple[torch.optim.Optimizer, GradSync]:
    copies = _copy_engines(config, mesh)
    if config.parallel.zero == 3:
        residency = _residency(config)
        gather = Gather(copy_engines=copies)
        shard_module(model, mesh, precision=precision, residency=residency, gather=gather)
        optimizer = _adamw(config, model)
        return residency.optimizer(optimizer) if residency is not None else optimizer, sharding_of(model)
    optimizer = shard_optimizer(
        _adamw(config, model),
        mesh,
        model=model,
        stage=config.parallel.zero,
        precision=precision,
        overlap_gather=True,
        copy_engines=copies,
    )
    return optimizer, optimizer


def _residency(config: Config) -> ChunkResidency | None:
    """Where the shards of ZeRO-3 live on several ranks; None: on the device."""
    memory = config.memory
    if memory.residency == "device":
        return None
    return ChunkResidency(
        memory.residency,
        device_memory=memory.device_memory,
        host_memory=memory.host_memory,
        nvme=None if memory.nvme is None else Path(memory.nvme).expanduser(),
    )


def _copy_engines(config: Config, mesh: DeviceMesh) -> bool:
    """Whether shards are gathered by copies between GPUs: by the config, or where all ranks run on one host."""
    if config.parallel.copy_engines != "auto":
        return config.parallel.copy_engines == "on"
    ranks = dist.get_world_size()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count()))
    return mesh.device_type == "cuda" and ranks > 1 and ranks <= here and config.parallel.shard > 1


def _adamw(config: Config, model: nn.Module) -> torch.optim.AdamW:
    options = config.optimizer
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=True,
    )
