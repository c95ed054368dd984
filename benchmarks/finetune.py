"""Adapters on a model folder: the folder, and the peers that train them (peft in a plain loop, compiled, Liger, FSDP2).

    python benchmarks/finetune.py folder DIR --model llama-8b
    python benchmarks/finetune.py peft DIR --form compiled --out rows.jsonl
    python benchmarks/finetune.py outline DIR --model llama-70b    # no weights; with `shipped.py --drawn`
    python benchmarks/finetune.py chats FILE    # conversations of real text, of 8 to 4,096 tokens by a log-uniform law

Ours is `cai train llama-8b --model.name DIR --model.weights pretrained --lora.rank 16` by `shipped.py`. Rows are full
of random tokens; bfloat16, AdamW, clipping, rank 16 on all linear layers of the blocks. No activation is made again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

FORMS = ("plain", "compiled", "liger", "fsdp2", "fsdp2-compiled")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("folder", "outline", "chats", "peft"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--form", choices=FORMS, default="plain")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a microbatch")
    parser.add_argument("--microbatches", type=int, default=2, help="microbatches of a step")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--experts", action="store_true", help="adapters beside attention and stacked experts"
    )
    parser.add_argument("--checkpointing", action="store_true", help="make activations of each layer again")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def write_folder(options: argparse.Namespace, device: torch.device) -> None:
    """Random weights and a small tokenizer, as a folder of a pretrained model has them."""
    from cai_apps.compose.models import load_model_config
    from cai_apps.data.tokenizer import train_tokenizer

    with device:
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(load_model_config(options.model))
        torch.set_default_dtype(torch.float32)
    began = time.perf_counter()
    model.save_pretrained(options.folder, max_shard_size="4GB")
    train_tokenizer([Path(argparse.__file__).read_text()], 500).save_pretrained(options.folder)
    print(f"written in {time.perf_counter() - began:.0f} s")


def write_outline(options: argparse.Namespace) -> None:
    """What a folder of a pretrained model has beside its weights, of which there is one that nobody reads."""
    from safetensors.torch import save_file
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from cai_apps.compose.models import load_model_config
    from cai_apps.data.chat.tokenizer import train_text_tokenizer

    config = load_model_config(options.model)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(options.folder)
    save_file({"none": torch.zeros(1)}, options.folder / "model.safetensors", {"format": "pt"})
    train_text_tokenizer([Path(argparse.__file__).read_text()] * 4, 2000).save_pretrained(options.folder)


def write_chats(path: Path, count: int = 4000) -> None:
    """Questions and answers cut of the standard library; 3 characters are about a token of a small tokenizer."""
    text = "".join(
        file.read_text(errors="replace") for file in sorted(Path(argparse.__file__).parent.glob("*.py"))
    )
    random = torch.Generator().manual_seed(0)
    at, lines = 0, []
    for _ in range(count):
        length = int(8 * 512 ** torch.rand(1, generator=random).item()) * 3
        at = (at + length) % (len(text) - 3 * 4096)
        part = text[at : at + length]
        messages = [
            {"role": "user", "content": part[: length // 4] + "?"},
            {"role": "assistant", "content": part[length // 4 :] + "."},
        ]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")


def peft_model(options: argparse.Namespace, device: torch.device) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = AutoConfig.from_pretrained(options.folder)
    with device:
        torch.set_default_dtype(torch.bfloat16)
        base = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        torch.set_default_dtype(torch.float32)
    if options.form == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=base, fused_linear_cross_entropy=True)
    targets: dict = {"target_modules": "all-linear"}
    if options.experts:
        parameters = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
        targets = {
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "target_parameters": parameters,
        }
    lora = LoraConfig(r=options.rank, lora_alpha=options.rank, task_type="CAUSAL_LM", **targets)
    model = get_peft_model(base, lora).train()
    if options.checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.enable_input_require_grads()
    if "compiled" in options.form:
        for layer in base.model.layers:
            layer.forward = torch.compile(layer.forward)
    if "fsdp2" in options.form:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in base.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    return model


def loss_of(model: nn.Module, ids: torch.Tensor, form: str) -> torch.Tensor:
    if form == "liger":  # its loss takes the head with it
        return model(input_ids=ids, labels=ids, use_cache=False).loss
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def train(options: argparse.Namespace, device: torch.device) -> dict:
    model = peft_model(options, device)
    learned = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(
        learned, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
    )
    seconds, vocabulary = [], model.config.vocab_size
    for _ in range(options.steps):
        began = time.perf_counter()
        for _ in range(options.microbatches):
            ids = torch.randint(0, vocabulary, (options.batch, options.sequence), device=device)
            loss = loss_of(model, ids, options.form) / options.microbatches
            loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        seconds.append(time.perf_counter() - began)
    step = statistics.median(seconds[options.warmup :])
    tokens = options.batch * options.microbatches * options.sequence
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {
        "form": f"peft, {options.form}",
        "torch": torch.__version__,
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "tokens_per_second_per_gpu": round(tokens / step, 1),
        "step_seconds": round(step, 4),
        "peak_gib": round(peak, 2),
        "loss": value * options.microbatches,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }


def main() -> None:
    options = arguments()
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if options.action == "folder":
        write_folder(options, device)
        return
    if options.action == "outline":
        write_outline(options)
        return
    if options.action == "chats":
        write_chats(options.folder)
        return
    if "fsdp2" in options.form:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    row = train(options, device)
    print(json.dumps(row))
    if options.out is not None and int(os.environ.get("RANK", 0)) == 0:
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
