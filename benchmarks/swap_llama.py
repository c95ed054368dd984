"""A Hugging Face LLaMA on one GPU, eager, with Liger-Kernel's patch, with `cai_kernels.swap`, and compiled, in one run.

    python benchmarks/swap_llama.py --shape llama-1b [--forms swap,liger,eager,compile,swap-compile] [--out FILE]
    python benchmarks/swap_llama.py --shape small --curve 200 --forms eager,swap

Every form is the same model class with the same weights, bfloat16 compute and float32 masters (`shard_optimizer` on one
rank), fused AdamW with clipping, torch's attention, no recompute. The loss is the model's own. `compile` compiles every
block and the loss's logits stay whole; `swap-compile` compiles blocks and swaps what is outside them. `--curve` trains
on text of the standard library, byte by byte, and records every loss.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import pydoc_data.topics
import statistics
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

from cai_kernels.swap import KINDS, swap
from cai_zero import MixedPrecision, ShardedOptimizer, shard_optimizer

SHAPES = {  # width, hidden, layers, heads, kv heads, vocabulary
    "tiny": (64, 128, 2, 4, 2, 512),
    "small": (768, 2048, 12, 12, 4, 32000),
    "llama-1b": (2048, 8192, 16, 32, 8, 128256),
}
PEAK = 989e12
WARM, CLIP = 4, 1.0


def build(shape: str, sequence: int, device: torch.device) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, hidden, layers, heads, kv, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=vocabulary,
        max_position_embeddings=sequence,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with device:
        return LlamaForCausalLM(config).train()


@contextlib.contextmanager
def unpatched() -> Iterator[None]:
    """Undo what a form does to the model's module: Liger-Kernel puts its classes where later models find them."""
    from transformers.models.llama import modeling_llama

    kept = dict(vars(modeling_llama))
    try:
        yield
    finally:
        vars(modeling_llama).update(kept)


def prepare(form: str, model: nn.Module) -> str:
    """Change the model as `form` says; returns what was done."""
    done = ""
    if form == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model, cross_entropy=False, fused_linear_cross_entropy=True)
    if form.startswith("swap"):
        done = str(swap(model, kinds=("attention", "loss") if form == "swap-compile" else KINDS))
    if form.endswith("compile"):
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward)
    return done


def optimizer_of(model: nn.Module) -> ShardedOptimizer:
    inner = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    precision = MixedPrecision(compute=torch.bfloat16, master=torch.float32)
    return shard_optimizer(inner, None, model=model, stage=0, precision=precision)


def step(model: nn.Module, optimizer: ShardedOptimizer, ids: torch.Tensor) -> torch.Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.clip_grad_norm_(CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def text_batches(count: int, batch: int, sequence: int) -> list[torch.Tensor]:
    """Bytes of the standard library's help texts, [batch, sequence] each."""
    data = torch.frombuffer(
        bytearray("\n".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8
    )
    random = torch.Generator().manual_seed(3)
    starts = torch.randint(0, len(data) - sequence, (count, batch), generator=random)
    return [torch.stack([data[s : s + sequence] for s in row]).long() for row in starts.tolist()]


def run(form: str, options: argparse.Namespace, device: torch.device) -> dict:
    model = build(options.shape, options.sequence, device)
    row: dict = {"form": form, "done": prepare(form, model)}
    optimizer = optimizer_of(model)
    if options.curve:
        batches = text_batches(options.curve, options.batch, options.sequence)
        row["losses"] = [float(step(model, optimizer, ids.to(device))) for ids in batches]
        return row
    vocabulary = SHAPES[options.shape][-1]
    random = torch.Generator().manual_seed(1)
    pool = [
        torch.randint(0, vocabulary, (options.batch, options.sequence), generator=random).to(device)
        for _ in range(3)
    ]
    times = []
    for i in range(WARM + options.steps):
        if device.type == "cuda":
            torch.cuda.synchronize()
            if i == WARM:
                torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = step(model, optimizer, pool[i % len(pool)])
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[WARM:])
    tokens = options.batch * options.sequence
    row |= {"step_s": seconds, "tokens_per_second": tokens / seconds, "loss": float(loss)}
    parameters = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    width, _, layers, *_ = SHAPES[options.shape]
    for name, attention in (("mfu_causal", 6), ("mfu_full", 12)):
        row[name] = (6 * parameters + attention * layers * width * options.sequence) * tokens / seconds / PEAK
    if device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-1b", choices=SHAPES)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--curve", type=int, default=0, help="steps of real text whose losses are recorded")
    parser.add_argument("--forms", default="swap,liger,eager,compile,swap-compile")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rows = []
    for form in options.forms.split(","):
        try:
            with unpatched():
                row = run(form, options, device)
        except Exception as error:
            row = {"form": form, "error": repr(error)[:400]}
        rows.append(row)
        if options.out:
            options.out.write_text(json.dumps(record(rows, device), indent=1) + "\n")
        print(json.dumps({k: v for k, v in row.items() if k not in ("losses", "done")}), flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch._dynamo.reset()


def record(rows: list[dict], device: torch.device) -> dict:
    versions: dict[str, str | None] = {}
    for name in ("torch", "triton", "transformers", "liger-kernel"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {"command": " ".join(sys.argv), "device": name, "versions": versions, "rows": rows}


if __name__ == "__main__":
    main()
