"""The peer: torch.distributed.pipelining around the same Hugging Face model, in a plain loop.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/pipelining.py --schedule 1f1b --compile

bfloat16 compute, float32 master weights and gradients (FSDP2 over the ranks of `--data`, also over one, gathered once a
step as torchtitan does), fused AdamW, clipping over all stages: what `cai train` does too. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F

from cai_apps.compose.models import load_model_config, meta_model
from cai_pipeline.plans.placement import Held, place, stages_of
from cai_pipeline.stages.balance import balance_ranks

SCHEDULES = {  # its class, stages of a rank, whether the second stage turns round
    "gpipe": (schedules.ScheduleGPipe, 1, False),
    "1f1b": (schedules.Schedule1F1B, 1, False),
    "interleaved": (schedules.ScheduleInterleaved1F1B, 2, False),
    "zb-interleaved": (schedules.ScheduleInterleavedZeroBubble, 2, False),
    "zb-v": (schedules.ScheduleZBVZeroBubble, 2, True),
    "dualpipe-v": (schedules.ScheduleDualPipeV, 2, True),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--microbatches", type=int, default=8, help="of one sequence each")
    parser.add_argument("--data", type=int, default=1, help="data ranks of each stage")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--schedule", default="1f1b", choices=SCHEDULES)
    parser.add_argument("--compile", action="store_true", help="compile each layer and the loss")
    parser.add_argument("--form", default="torch", help="name of this run in the output")
    parser.add_argument("--out", type=Path, help="file to append to")
    return parser.parse_args()


class Part(nn.Module):
    """Some layers of a LLaMA; the first holds the embedding too, the last the norm and the head.

    Tokens or hidden states (microbatch, sequence[, hidden]) in; hidden states or logits out. Layers are balanced as
    ours are, the head counted.
    """

    def __init__(self, model: Any, index: int, held: Held, compiled: bool) -> None:
        count = len(held)
        super().__init__()
        layers = model.model.layers
        costs = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        mine = balance_ranks(costs, held, last=model.lm_head.weight.numel())[index]
        self.embed = model.model.embed_tokens if index == 0 else None
        self.layers = nn.ModuleList([layers[at] for at in mine])
        self.norm, self.head = (model.model.norm, model.lm_head) if index == count - 1 else (None, None)
        self.rotary = model.model.rotary_emb
        if compiled:
            for layer in self.layers:
                layer.forward = torch.compile(layer.forward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rotary = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_embeddings=rotary, position_ids=positions)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def build(model: Any, part: Part, mesh: DeviceMesh, device: torch.device) -> Part:
    """Values on the device, sharded, gathered once a step."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in part.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    part.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            local = parameter.to_local()
            local.fill_(1.0) if "norm" in name else local.normal_(0.0, 0.02)
    model._init_weights(part.rotary)
    return part


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def clip(parts: list[Part], pipeline: dist.ProcessGroup) -> None:
    gradients = [p.grad for part in parts for p in part.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    square = norm**2
    dist.all_reduce(square, group=pipeline)
    owners = [p for part in parts for p in part.parameters()]
    torch.nn.utils.clip_grads_with_norm_(owners, 1.0, square**0.5, foreach=True)


def main() -> None:
    options = arguments()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    kind, chunks, turns = SCHEDULES[options.schedule]
    depth = dist.get_world_size() // options.data
    mesh = init_device_mesh(device.type, (depth, options.data), mesh_dim_names=("pp", "dp"))
    rank, pipeline = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    held = place(depth, chunks, "v" if turns else "loop")
    own = stages_of(held, rank)
    config = load_model_config(options.model)
    if options.layers:
        config.num_hidden_layers = options.layers
    model = meta_model(config)
    parts = [build(model, Part(model, index, held, options.compile), mesh["dp"], device) for index in own]
    stages = [
        PipelineStage(part, index, depth * chunks, device, group=pipeline)
        for index, part in zip(own, parts, strict=True)
    ]
    loss_fn = torch.compile(loss_of) if options.compile else loss_of
    argument = stages if issubclass(kind, schedules.PipelineScheduleMulti) else stages[0]
    schedule = kind(argument, n_microbatches=options.microbatches, loss_fn=loss_fn)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    first, last = 0 in own, depth * chunks - 1 in own
    seconds, losses = [], []
    for _ in range(options.steps):
        start = time.perf_counter()
        shape = (options.microbatches, options.sequence)
        ids = torch.randint(0, config.vocab_size, shape, device=device)
        dist.broadcast(ids, group_src=0, group=pipeline)
        losses = []
        told = {"target": ids, "losses": losses} if last else {}
        schedule.step(*([ids] if first else []), **told)
        clip(parts, pipeline)
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.tensor([torch.cuda.max_memory_allocated() if on_gpu else 0], device=device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if last and mesh["dp"].get_local_rank() == 0:
        step = statistics.median(seconds[options.warmup :])
        tokens = options.microbatches * options.sequence / step / depth
        row = {
            "form": options.form,
            "schedule": options.schedule,
            "compile": options.compile,
            "ranks": dist.get_world_size(),
            "microbatches": options.microbatches,
            "tokens_per_second_per_gpu": round(tokens, 1),
            "step_seconds": round(step, 4),
            "peak_gib": round(peak.item() / 2**30, 2),
            "loss": round(torch.stack(losses).mean().item(), 4),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        }
        print(json.dumps(row), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
