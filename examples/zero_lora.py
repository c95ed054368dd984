"""LoRA with peft over ZeRO: small adapters are trained while the frozen weights are sharded (stage 3) or not.

    torchrun --nproc-per-node 2 examples/zero_lora.py --stage 3 --save runs/adapter

In stage 3 each rank holds its shards of the frozen weights as well as of the adapters and of their optimizer state; in
stages 0 to 2 only what concerns the adapters is shared out. The adapter is saved by peft, and here loaded again into
an ordinary model, which then gives the same logits.
Needs torch, transformers (for the model), peft, cai-mesh and cai-zero.
"""

from __future__ import annotations

import argparse
import inspect

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from cai_mesh import clip_grad_norm_
from cai_zero import full_state_dict, shard_module, shard_optimizer

BATCH, LENGTH = 8, 64


def build_base() -> LlamaForCausalLM:
    """In earnest: from_pretrained."""
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


def add_adapters(base: LlamaForCausalLM) -> PeftModel:
    torch.manual_seed(1)
    return get_peft_model(
        base, LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"])
    )


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
    parser.add_argument("--save", help="a directory for peft's adapter")
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("dp_shard",))

    model = add_adapters(build_base()).to(device)
    if options.stage == 3:
        shard_module(model, mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    if options.stage < 3:
        optimizer = shard_optimizer(optimizer, mesh, model=model, stage=options.stage)

    text = read_text()
    for step in range(options.steps):
        ids = batch_of(text, step, rank, world).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if options.stage == 3:
            clip_grad_norm_(model.parameters(), 1.0, mesh)
        else:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {float(total) / world:.6f}", flush=True)

    if options.save:
        save(model, options.save, text[:LENGTH].unsqueeze(0).to(device), rank)
    dist.destroy_process_group()


def save(model: PeftModel, directory: str, ids: torch.Tensor, rank: int) -> None:
    """Save the adapter, and show that an ordinary model with it gives the logits of the one that was trained."""
    adapters = full_state_dict(model, only=lambda name: "lora_" in name)  # unsharded, on rank 0
    with torch.no_grad():
        trained = model(input_ids=ids).logits  # on all ranks: stage 3 gathers
    if rank == 0:
        model.save_pretrained(directory, state_dict=adapters)
        plain = PeftModel.from_pretrained(build_base(), directory).to(ids.device)
        with torch.no_grad():
            again = plain(input_ids=ids).logits
        print(
            f"logits of the reloaded adapter differ by {float((trained - again).abs().max()):.1e}", flush=True
        )


if __name__ == "__main__":
    main()
