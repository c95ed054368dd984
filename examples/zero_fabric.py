"""ZeRO in a Lightning Fabric loop: a small LLaMA on the source of Python's standard library.

    torchrun --nproc-per-node 2 examples/zero_fabric.py --stage 2

`ZeroStrategy` is the whole of it: Fabric's strategy for several processes, without DistributedDataParallel and with
cai-zero. The loop stays Fabric's own: `backward`, `no_backward_sync`, `clip_gradients`, `save`.
Needs torch, transformers (for the model), lightning-fabric, cai-mesh and cai-zero.
"""

from __future__ import annotations

import argparse
import inspect
import os

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from transformers import LlamaConfig, LlamaForCausalLM

from cai_zero.integrations.fabric import ZeroStrategy

BATCH, LENGTH, ACCUMULATE = 8, 64, 2


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
