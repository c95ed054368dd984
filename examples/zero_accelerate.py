"""ZeRO in a loop written with Hugging Face accelerate: a small LLaMA on the source of Python's standard library.

    torchrun --nproc-per-node 2 examples/zero_accelerate.py --stage 2

What changes in such a loop: model and optimizer are sharded first, and `cai_zero.integrations.accelerate.prepare` takes
the place of `accelerator.prepare`, which would wrap the model in DistributedDataParallel and reduce gradients a second
time. Accumulation, clipping, loaders and schedules are accelerate's own.
Needs torch, transformers, accelerate, cai-mesh[hf] and cai-zero.
"""

from __future__ import annotations

import argparse
import inspect

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from cai_mesh import checkpoint
from cai_zero import shard_module, shard_optimizer
from cai_zero.integrations.accelerate import prepare

BATCH, LENGTH, ACCUMULATE = 8, 64, 2


def build_model() -> LlamaForCausalLM:
    set_seed(0)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def samples() -> list[dict[str, torch.Tensor]]:
    """A module of the standard library, cut into sequences of bytes."""
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", help="a directory for from_pretrained")
    options = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, cpu=not torch.cuda.is_available())
    world = accelerator.num_processes
    mesh = None  # one process, started without torchrun
    if world > 1:
        mesh = init_device_mesh(accelerator.device.type, (world,), mesh_dim_names=("dp_shard",))
    model = build_model().to(accelerator.device)
    if options.stage == 3:
        shard_module(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    else:
        inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
        optimizer = shard_optimizer(inner, mesh, model=model, stage=options.stage)

    # Accelerate deals whole batches out to the ranks in turn and steps a schedule once for every rank.
    loader = DataLoader(samples(), batch_size=BATCH // world // ACCUMULATE)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=5 * world)
    model, optimizer, loader, schedule = prepare(accelerator, model, optimizer, loader, warmup)

    step, total = 0, torch.zeros((), device=accelerator.device)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)  # divides by the number of microbatches
            total += loss.detach() / ACCUMULATE
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.print(f"step {step} loss {float(accelerator.reduce(total, 'mean')):.6f}", flush=True)
            step, total = step + 1, torch.zeros_like(total)
            if step == options.steps:
                break

    if options.save:
        checkpoint.save_hf(model, options.save)
    accelerator.end_training()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
