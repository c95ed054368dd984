"""ZeRO in a Lightning Fabric loop: a small LLaMA on the source of Python's standard library.

    torchrun --nproc-per-node 2 examples/zero_fabric.py --stage 2

`ZeroStrategy` is the whole of it: Fabric's strategy for several processes, without DistributedDataParallel and with
cai-zero. The loop stays Fabric's own: `backward`, `no_backward_sync`, `clip_gradients`, `save`.
Needs torch, transformers (for the model), lightning-fabric, cai-mesh and cai-zero.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from lightning_fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from cai_mesh import clip_grad_norm_
from cai_zero import full_state_dict, shard_module, shard_optimizer, sharding_of

BATCH, LENGTH, ACCUMULATE = 8, 64, 2


class ZeroStrategy(DDPStrategy):
    """ZeRO of some stage over all processes. Set up the module first, then the optimizer over its parameters."""

    def __init__(self, stage: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.stage = stage
        self._backward_sync_control = _Defer(self)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Unlike the parent's: nothing is wrapped."""
        self.mesh = init_device_mesh(
            self.root_device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",)
        )
        self.module = module
        if self.stage == 3:
            self.sync = sharding_of(shard_module(module, self.mesh))
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if self.stage == 3:
            return optimizer
        self.sync = shard_optimizer(optimizer, self.mesh, model=self.module, stage=self.stage)
        return self.sync

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """A rank holds a shard of the gradients."""
        if self.stage == 3:
            return clip_grad_norm_(module.parameters(), max_norm, self.mesh, norm_type=norm_type)
        return optimizer.clip_grad_norm_(max_norm)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Full tensors on rank 0, which writes the file."""
        return full_state_dict(module)


class _Defer(_BackwardSyncControl):
    """`fabric.no_backward_sync`."""

    def __init__(self, strategy: ZeroStrategy):
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager:
        return self._strategy.sync.defer() if enabled else contextlib.nullcontext()


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def read_text() -> torch.Tensor:
    """The bytes of a module of the standard library, as tokens."""
    return torch.tensor(list(inspect.getsource(argparse).encode()))


def batch_of(text: torch.Tensor, step: int, rank: int, world: int) -> torch.Tensor:
    """This rank's rows of the batch [BATCH, LENGTH] of a step; the batch does not depend on the ranks."""
    starts = torch.randint(0, len(text) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step))
    mine = starts[rank * BATCH // world : (rank + 1) * BATCH // world]
    return torch.stack([text[start : start + LENGTH] for start in mine.tolist()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", help="a file for fabric.save")
    options = parser.parse_args()

    fabric = Fabric(
        strategy=ZeroStrategy(options.stage),
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
    )
    fabric.launch()
    model = fabric.setup_module(build_model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=5)

    text = read_text()
    for step in range(options.steps):
        total = torch.zeros((), device=fabric.device)
        batch = batch_of(text, step, fabric.global_rank, fabric.world_size).to(fabric.device)
        for micro, ids in enumerate(batch.chunk(ACCUMULATE)):
            with fabric.no_backward_sync(model, enabled=micro + 1 < ACCUMULATE):
                loss = model(input_ids=ids, labels=ids).loss / ACCUMULATE
                fabric.backward(loss)
            total += loss.detach()
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        fabric.print(f"step {step} loss {float(fabric.all_reduce(total)):.6f}", flush=True)

    if options.save:
        fabric.save(options.save, {"model": model})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
