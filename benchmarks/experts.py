"""Peers that train a mixture of experts on several GPUs, in plain loops on a model of transformers.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/experts.py DIR --form plain

`DIR` has a config.json of Qwen3-MoE; `--out` appends a row. `fsdp2`: every rank has all experts, which `fully_shard`
gathers, and transformers multiplies by grouped products. `plain`: experts are spread over the ranks, tokens travel by
`all_to_all_single` with splits that the host reads, a row for each choice, and `torch._grouped_mm` multiplies; the rest
is FSDP2. bfloat16 compute, float32 master weights, fused AdamW, clipping. Ours is `cai train` by `shipped.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import types
from pathlib import Path

import torch
import torch.distributed as dist
from fsdp2 import loss_of
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from cai_apps.compose.models import load_model_config, meta_model


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="of the model's config.json, or the name of a preset")
    parser.add_argument("--form", choices=("fsdp2", "plain"), default="plain")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def forward(self: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Experts over all ranks, of which this one has `len(self.down_proj)`; a row travels for each choice."""
    ranks, own = dist.get_world_size(), len(self.down_proj)
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=ranks * own)
    of_ranks = torch.empty_like(counts)
    dist.all_to_all_single(of_ranks, counts)
    sent = counts.view(ranks, own).sum(1).tolist()
    received = of_ranks.view(ranks, own).sum(1).tolist()
    rows = all_to_all_single_autograd(hidden[order // ids.shape[1]], received, sent, dist.group.WORLD)
    expert = torch.arange(own, device=rows.device).repeat(ranks).repeat_interleave(of_ranks)
    by_expert = expert.argsort(stable=True)
    ends = of_ranks.view(ranks, own).sum(0).cumsum(0).to(torch.int32)
    up, down = self.gate_up_proj.to(rows.dtype), self.down_proj.to(rows.dtype)
    first, second = torch._grouped_mm(rows[by_expert], up.transpose(1, 2), offs=ends).chunk(2, -1)
    products = torch._grouped_mm(nn.functional.silu(first) * second, down.transpose(1, 2), offs=ends)
    back = torch.empty_like(products).index_copy(0, by_expert, products)
    back = all_to_all_single_autograd(back, sent, received, dist.group.WORLD)
    by_choice = torch.empty_like(back).index_copy(0, order, back).view(*ids.shape, -1)
    return (by_choice * weights[..., None].to(by_choice.dtype)).sum(1)


def spread_experts(model: nn.Module) -> set[nn.Parameter]:
    """Keep this rank's part of the experts of each layer; returns the parameters."""
    ranks, parts = dist.get_world_size(), set()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            whole = getattr(experts, name)
            part = nn.Parameter(torch.empty(len(whole) // ranks, *whole.shape[1:], device="meta"))
            setattr(experts, name, part)
            parts.add(part)
        experts.forward = types.MethodType(forward, experts)
    return parts


def build(options: argparse.Namespace, device: torch.device) -> nn.Module:
    config = load_model_config(options.folder)
    config._experts_implementation = "grouped_mm"
    model = meta_model(config)
    parts = spread_experts(model) if options.form == "plain" else set()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy, ignored_params=parts & set(layer.parameters()))
    fully_shard(model, mp_policy=policy, ignored_params=parts)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = getattr(parameter, "to_local", lambda p=parameter: p)()
            local.fill_(1.0) if "norm" in name else local.normal_(0.0, 0.02)
        for module in model.modules():
            if "RotaryEmbedding" in type(module).__name__:
                model._init_weights(module)
    return model


def clip(parameters: list[nn.Parameter], limit: float) -> None:
    """Clip by the norm of all gradients, of which ranks have parts: DTensors and experts alike."""
    grads = [getattr(p.grad, "to_local", lambda g=p.grad: g)() for p in parameters if p.grad is not None]
    total = torch.stack(torch._foreach_norm(grads)).square().sum()
    dist.all_reduce(total)
    torch._foreach_mul_(grads, (limit / (total.sqrt() + 1e-6)).clamp(max=1.0))


def main() -> None:
    options = arguments()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    model = build(options, device)
    parameters = list(model.parameters())
    kinds = [[p for p in parameters if isinstance(p, DTensor) == shared] for shared in (True, False)]
    groups = [{"params": kind} for kind in kinds if kind]  # the fused kernel takes no mixture
    optimizer = torch.optim.AdamW(groups, lr=3e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    seconds = []
    for _ in range(options.steps):
        began = time.perf_counter()
        ids = torch.randint(0, model.config.vocab_size, (options.batch, options.sequence), device=device)
        loss = loss_of(model, ids)
        loss.backward()
        clip(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        seconds.append(time.perf_counter() - began)
    step = statistics.median(seconds[options.warmup :])
    row = {
        "form": options.form,
        "ranks": dist.get_world_size(),
        "tokens_per_second_per_gpu": round(options.batch * options.sequence / step, 1),
        "step_seconds": round(step, 4),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else 0.0,
        "loss": round(value, 4),
    }
    if dist.get_rank() == 0:
        print(json.dumps(row), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
