"""A small model that other libraries train, save and load, on ranks of a group or in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from cai_gemini import offload
from cai_zero import MixedPrecision, shard_module, shard_optimizer
from cai_zero.integrations.accelerate import prepare
from cai_zero.integrations.fabric import ZeroStrategy

ROWS, LENGTH = 4, 12
FORMS = ("zero0", "zero1", "zero2", "zero3", "zero1-bf16", "offload")


def build() -> LlamaForCausalLM:
    """Tied, so a name stands for another's tensor."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, max_position_embeddings=LENGTH, tie_word_embeddings=True, **sizes)
    return LlamaForCausalLM(config)


def adamw(params: Any) -> torch.optim.Optimizer:
    """Two groups, with options of their own."""
    listed = list(params)
    groups = [{"params": listed[:3], "weight_decay": 0.0}, {"params": listed[3:]}]
    return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1)


def formed(form: str) -> tuple[Any, Any]:
    """Model and optimizer in this form; "plain" as they are."""
    model = build()
    mesh = init_device_mesh("cpu", (world(),), mesh_dim_names=("dp_shard",)) if world() > 1 else None
    if form == "zero3":
        shard_module(model, mesh)
    optimizer: Any = adamw(model.parameters())
    if form[:5] in ("zero0", "zero1", "zero2"):
        precision = MixedPrecision(compute=torch.bfloat16) if form.endswith("bf16") else None
        optimizer = shard_optimizer(optimizer, mesh, model=model, stage=int(form[4]), precision=precision)
    if form == "offload":
        model, optimizer = offload(model, optimizer, residency="host", device_memory="4MB")
    return model, optimizer


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def train(
    model: Any, optimizer: Any, steps: range, backward: Callable[[Any], Any] | None = None
) -> list[float]:
    """Losses of the whole batch, of which each rank has its share."""
    losses = []
    for step in steps:
        rows = torch.randint(0, 32, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        ids = rows[rank() * ROWS // world() :][: ROWS // world()]
        loss = model(input_ids=ids, labels=ids).loss
        backward(loss) if backward is not None else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        if dist.is_initialized():
            dist.all_reduce(mean)
        losses.append(float(mean) / world())
    return losses


def as_launched() -> None:
    """The environment that a launcher gives a rank."""
    if dist.is_initialized():
        os.environ |= {"RANK": str(rank()), "LOCAL_RANK": str(rank()), "WORLD_SIZE": str(world())}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world()), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "ways"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "GROUP_WORLD_SIZE": "1"}


def by_accelerate(form: str):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    as_launched()
    accelerator = Accelerator(cpu=True)
    return accelerator, *prepare(accelerator, *formed(form))


def by_fabric(form: str):
    from lightning_fabric import Fabric

    as_launched()
    strategy: Any = ZeroStrategy() if world() > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=world(), strategy=strategy)
    fabric.launch()
    return fabric, *fabric.setup(*formed(form))
