"""ZeRO in a plain PyTorch loop: a small LLaMA on the source of Python's standard library, stages 0 to 3.

    torchrun --nproc-per-node 2 examples/zero_bare_loop.py --stage 3

Needs torch, transformers (for the model), cai-mesh[hf] and cai-zero.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from cai_mesh import checkpoint, clip_grad_norm_
from cai_zero import shard_module, shard_optimizer, sharding_of

BATCH, LENGTH = 8, 64


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
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=2, help="microbatches of a step")
    parser.add_argument("--save", help="a directory for from_pretrained")
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("dp_shard",))

    model = build_model().to(device)
    if options.stage == 3:
        # The module is sharded, and an ordinary optimizer steps this rank's shards.
        sync = sharding_of(shard_module(model, mesh))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    else:
        # The module stays unsharded, and the optimizer is sharded.
        inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
        optimizer = sync = shard_optimizer(inner, mesh, model=model, stage=options.stage)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=5)

    text = read_text()
    for step in range(options.steps):
        total = torch.zeros((), device=device)
        for micro, ids in enumerate(batch_of(text, step, rank, world).to(device).chunk(options.accumulate)):
            # Only the last backward of a step has to be reduced.
            with sync.defer() if micro + 1 < options.accumulate else contextlib.nullcontext():
                loss = next_token_loss(model, ids) / options.accumulate
                loss.backward()
            total += loss.detach()
        # The norm of the whole model's gradients, of which this rank has a shard.
        if options.stage == 3:
            norm = clip_grad_norm_(model.parameters(), 1.0, mesh)
        else:
            norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {float(total) / world:.6f} norm {float(norm):.4f}", flush=True)

    if options.save:
        # Every rank writes its shards at their place; nothing is gathered.
        checkpoint.save_hf(model, options.save)
    dist.destroy_process_group()


def next_token_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


if __name__ == "__main__":
    main()
