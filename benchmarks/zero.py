"""ZeRO stages beside torch FSDP2 and DeepSpeed ZeRO-3: one loop, one model, one loss, in one run of the same ranks.

    python -m torch.distributed.run --standalone --nproc-per-node 4 benchmarks/zero.py --model llama-8b --out FILE

A Hugging Face LLaMA with random weights on random tokens: bfloat16 compute, float32 master weights and gradient
reduction, fused AdamW, clipping at 1.0, the same attention, the same compiled blocks and loss where a form says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from overlap import summary
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cai_mesh.gradients import clip_grad_norm_
from cai_zero import Gather, MixedPrecision, shard_module, shard_optimizer

SHAPES = {
    "tiny": (128, 256, 2, 4, 2, 512),
    "llama-1b": (2048, 8192, 16, 32, 8, 128256),
    "llama-8b": (4096, 14336, 32, 32, 8, 128256),
}
FORMS = "fsdp2 zero3 zero1 fsdp2-compile zero3-compile zero1-compile zero2-compile"
PEAK_FLOPS = 989e12
Step = Callable[[torch.Tensor], torch.Tensor]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="llama-8b")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--forms", default=FORMS, help="names of forms, in order")
    parser.add_argument("--recompute", action="store_true", help="recompute every block in the backward")
    parser.add_argument("--trace", default="", help="forms whose step is traced as well")
    parser.add_argument("--limit", type=float, default=570, help="seconds; no form starts after that")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def config(options: argparse.Namespace):
    from transformers import LlamaConfig

    hidden, inner, layers, heads, kv, vocab = SHAPES[options.model]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=vocab,
        max_position_embeddings=options.sequence,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        use_cache=False,
    )


def token_flops(model: nn.Module, options: argparse.Namespace, *, causal: bool) -> float:
    """Forward and backward of one token; recompute and the input embedding not counted."""
    hidden, _, layers, _, _, vocab = SHAPES[options.model]
    weights = sum(p.numel() for p in model.parameters()) - vocab * hidden
    return 6 * weights + (6 if causal else 12) * layers * hidden * options.sequence


def meta(options: argparse.Namespace, *, compiled: bool) -> nn.Module:
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(config(options))
    for layer in model.model.layers:
        if options.recompute:
            layer.forward = _recomputed(layer.forward)
        if compiled:
            layer.forward = torch.compile(layer.forward)
    return model


def _recomputed(forward: Callable) -> Callable:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def values(name: str, param: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty(param.shape, device=device)
    return made.fill_(1.0) if "norm" in name else made.normal_(0.0, 0.02)


def make_buffers(model: nn.Module, device: torch.device) -> None:
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config).to(device)


def cross_entropy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def adamw(params) -> torch.optim.AdamW:
    fused = torch.cuda.is_available()
    return torch.optim.AdamW(params, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)


def stepper(model: nn.Module, optimizer, clip: Callable[[], torch.Tensor], *, compiled: bool) -> Step:
    loss_of = torch.compile(cross_entropy) if compiled else cross_entropy

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(input_ids=ids).logits, ids)
        loss.backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def fsdp2(model: nn.Module, mesh: DeviceMesh, device: torch.device, *, compiled: bool) -> Step:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard([model.model.norm, model.lm_head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, param in model.named_parameters():
            local = param.to_local()
            local.fill_(1.0) if "norm" in name else local.normal_(0.0, 0.02)
    make_buffers(model, device)
    clip = lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)  # noqa: E731
    return stepper(model, adamw(model.parameters()), clip, compiled=compiled)


def zero(
    stage: int, model: nn.Module, mesh: DeviceMesh, device: torch.device, *, compiled: bool, copies: bool
) -> Step:
    precision = MixedPrecision(compute=torch.bfloat16)
    make_buffers(model, device)
    if stage == 3:
        make = lambda name, param: values(name, param, device)  # noqa: E731
        shard_module(
            model,
            mesh,
            precision=precision,
            materialize=make,
            device=device,
            gather=Gather(copy_engines=copies),
        )
        optimizer = adamw(model.parameters())
        clip = lambda: clip_grad_norm_(model.parameters(), 1.0, mesh)  # noqa: E731
        return stepper(model, optimizer, clip, compiled=compiled)
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is not None:
                module._parameters[key] = nn.Parameter(values(f"{type(module)}.{key}".lower(), param, device))
    inner = adamw(model.parameters())
    optimizer = shard_optimizer(
        inner,
        mesh,
        model=model,
        stage=stage,
        precision=precision,
        overlap_gather=True,
        copy_engines=copies,
    )
    return stepper(model, optimizer, lambda: optimizer.clip_grad_norm_(1.0), compiled=compiled)


def deepspeed(model: nn.Module, options: argparse.Namespace, device: torch.device) -> Step:
    import deepspeed as ds

    ds.init_distributed(verbose=False)
    model = model.to_empty(device=device).to(torch.bfloat16)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(values(name, param, device))
    make_buffers(model, device)
    engine, *_ = ds.initialize(
        model=model,
        optimizer=adamw(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": options.batch,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "reduce_scatter": True,
                "reduce_bucket_size": 200_000_000,
                "stage3_prefetch_bucket_size": 100_000_000,
                "stage3_param_persistence_threshold": 100_000,
                "stage3_max_live_parameters": 1_000_000_000,
                "stage3_max_reuse_distance": 1_000_000_000,
            },
        },
    )

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(engine(input_ids=ids).logits, ids)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def build(
    name: str, options: argparse.Namespace, mesh: DeviceMesh, device: torch.device
) -> tuple[Step, dict]:
    kind, *suffixes = name.split("-")  # such as zero3-compile-copies
    compiled, copies = "compile" in suffixes, "copies" in suffixes
    model = meta(options, compiled=compiled)
    flops = {
        "causal": token_flops(model, options, causal=True),
        "full": token_flops(model, options, causal=False),
    }
    if kind == "fsdp2":
        return fsdp2(model, mesh, device, compiled=compiled), flops
    if kind == "deepspeed3":
        return deepspeed(model, options, device), flops
    stage = int(kind.removeprefix("zero"))
    return zero(stage, model, mesh, device, compiled=compiled, copies=copies), flops


def measure(name: str, options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> dict:
    on_gpu = device.type == "cuda"
    begun = time.perf_counter()
    step, flops = build(name, options, mesh, device)
    vocabulary = SHAPES[options.model][-1]
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    held = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for _ in range(options.warmup + options.steps):
        shape = (options.batch, options.sequence)
        ids = torch.randint(0, vocabulary, shape, device=device, generator=generator)
        start = time.perf_counter()
        losses.append(step(ids).item())
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[options.warmup :])
    rate = options.batch * options.sequence / median
    result = {
        "tokens_per_second_per_gpu": round(rate, 1),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0,
        "model_bytes_before_first_step": held,
        "step_seconds": median,
        "fastest_seconds": min(seconds),
        "mfu_causal": round(rate * flops["causal"] / PEAK_FLOPS, 4),
        "mfu_full_attention": round(rate * flops["full"] / PEAK_FLOPS, 4),
        "losses": [round(loss, 4) for loss in losses],
        "whole_seconds": round(time.perf_counter() - begun, 1),
    }
    if name in options.trace.split() and on_gpu:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(2):
                step(ids).item()
        result["trace"] = summary(profile, 2)
    return result


def main() -> None:
    options = arguments()
    started = time.perf_counter()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    results = header(options)
    for name in options.forms.split():
        late = torch.tensor(time.perf_counter() - started > options.limit, device=device, dtype=torch.int32)
        dist.all_reduce(late)
        if late:
            break
        try:
            result = measure(name, options, mesh, device)
        except torch.OutOfMemoryError as error:
            result = {"error": str(error).splitlines()[0][:300]}
        results["forms"][name] = result
        gc.collect()
        torch._dynamo.reset()
        if on_gpu:
            torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            shown = {k: v for k, v in result.items() if k != "losses"}
            print(name, json.dumps(shown), result.get("losses", [])[-1:], flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1) + "\n")
    dist.destroy_process_group()


def header(options: argparse.Namespace) -> dict:
    from importlib.metadata import version

    gpu = torch.cuda.is_available()
    return {
        "machine": f"{dist.get_world_size()} x {torch.cuda.get_device_name() if gpu else 'CPU'}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else "none",
        },
        "command": ["benchmarks/zero.py", *(a for a in sys.argv[1:] if "/" not in a)],
        "model": options.model,
        "sequence": options.sequence,
        "sequences_of_a_rank": options.batch,
        "recompute": options.recompute,
        "forms": {},
    }


if __name__ == "__main__":
    main()
