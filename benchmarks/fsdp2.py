"""The peer: torch FSDP2 (fully_shard per layer) around the same Hugging Face model, in a plain loop.

bfloat16 compute, float32 master weights and reduction, fused AdamW, gradient clipping: what `cai train` does too.
Run by `train_llama.py` under torch.distributed.run; prints one JSON line on rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from cai_apps.compose.models import load_model_config, meta_model


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def build(options: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    model = meta_model(load_model_config(options.model))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        if options.compile:
            layer.forward = torch.compile(layer.forward)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local()
            local.fill_(1.0) if "norm" in name else local.normal_(0.0, 0.02)
        for module in model.modules():
            if "RotaryEmbedding" in type(module).__name__:
                model._init_weights(module)
    return model


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def main() -> None:
    options = arguments()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    model = build(options, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    seconds = []
    for _ in range(options.steps):
        start = time.perf_counter()
        ids = torch.randint(0, model.config.vocab_size, (options.batch, options.sequence), device=device)
        loss = loss_of(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        step = statistics.median(seconds[options.warmup :])
        print(json.dumps({"step_seconds": step, "peak_bytes": peak, "loss": loss.item()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
