"""Does training still go the same way when fewer bits are kept or sent? A tiny LLaMA on real text, form beside form.

    python benchmarks/loss_curves.py --out benchmarks/results/zero-loss-curves.json --plot curves.png

Every form trains the same model from the same weights on the same batches, on two gloo ranks of this machine: bytes of
the Python standard library's sources, which need no tokenizer. Two more float32 runs with other batches show how far
losses differ for reasons that do not matter. Writes every tenth training loss (the mean of the ten before it, over
both ranks), the loss on text that was held out, and the seconds, which on a CPU say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from cai_apps.data.sources import documents
from cai_zero import Compression, LossScale, MixedPrecision, shard_module, shard_optimizer
from cai_zero.optimizers import AdamW

RANKS, SEQUENCE, BATCH = 2, 128, 8
BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Form:
    """One way to train.

    Args:
        stage: ZeRO stage.
        compute: dtype of the model's parameters and activations.
        master: dtype of the weights that the optimizer steps; None: as `MixedPrecision` decides.
        compression: of what travels.
        optimizer: which AdamW, by a name that `optimizer_of` knows.
        seed: of the order of the batches.
    """

    stage: int = 2
    compute: torch.dtype = torch.float32
    master: torch.dtype | None = None
    compression: Compression | None = None
    optimizer: str = "torch"
    seed: int = 0


FORMS = {
    "float32": Form(),
    "float32, other batches": Form(seed=1),
    "float32, other batches again": Form(seed=2),
    "int8 weights": Form(compression=Compression(weights="int8")),
    "int8 weights, ZeRO-3": Form(stage=3, compression=Compression(weights="int8")),
    "int8 gradients": Form(compression=Compression(gradients="int8")),
    "int8 gradients, no error feedback": Form(
        compression=Compression(gradients="int8", error_feedback=False)
    ),
    "fp8 weights and gradients": Form(compression=Compression(weights="fp8", gradients="fp8")),
    "8-bit moments": Form(optimizer="int8 moments"),
    "bfloat16 moments": Form(optimizer="bfloat16 moments"),
    "bfloat16": Form(compute=BF16),
    "bfloat16, no masters, rounded to the nearest": Form(compute=BF16, master=BF16),
    "bfloat16, no masters, stochastic rounding": Form(compute=BF16, master=BF16, optimizer="stochastic"),
    "float16, loss scale": Form(compute=FP16),
}


def optimizer_of(form: Form, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW of torch, or of cai_zero with fewer bits."""
    options = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.01}
    if form.optimizer == "torch":
        return torch.optim.AdamW(params, fused=True, **options)
    fewer = {
        "int8 moments": {"state_dtype": "int8"},
        "bfloat16 moments": {"state_dtype": BF16},
        "stochastic": {"stochastic_rounding": True},
    }
    return AdamW(params, **options, **fewer[form.optimizer])


def batch(data: torch.Tensor, step: int, rank: int, seed: int) -> torch.Tensor:
    """[BATCH, SEQUENCE + 1] bytes of random places."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + RANKS * step + rank)
    starts = torch.randint(0, len(data) - SEQUENCE, (BATCH, 1), generator=generator)
    return data[starts + torch.arange(SEQUENCE + 1)].long()


def build() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=SEQUENCE,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids[:, :-1]).logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def prepare(form: Form, mesh: Any) -> tuple[nn.Module, Any]:
    """The sharded model and its optimizer."""
    model = build()
    precision = MixedPrecision(compute=form.compute, master=form.master)
    if form.stage == 3:
        shard_module(model, mesh, precision=precision, compression=form.compression)
        return model, optimizer_of(form, list(model.parameters()))
    inner = optimizer_of(form, list(model.parameters()))
    return model, shard_optimizer(
        inner, mesh, model=model, stage=form.stage, precision=precision, compression=form.compression
    )


def train(form: Form, steps: int, data: torch.Tensor, held_out: torch.Tensor) -> dict[str, Any]:
    """One form on this rank; the losses are means over the ranks."""
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",))
    model, optimizer = prepare(form, mesh)
    scale = LossScale(mesh, interval=100) if form.compute == FP16 else None
    losses, started = torch.zeros(steps), time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
        loss = loss_of(model, batch(data, step, rank, form.seed))
        losses[step] = loss.detach()
        if scale is None:
            loss.backward()
            optimizer.step()
        else:
            scale.scale(loss).backward()
            scale.step(optimizer)
            scale.update()
        optimizer.zero_grad()
    seconds = time.perf_counter() - started
    with torch.no_grad():
        evaluated = torch.stack([loss_of(model, batch(held_out, i, rank, 9)) for i in range(8)]).mean()
    totals = torch.cat([losses, evaluated.view(1)])
    dist.all_reduce(totals)
    totals /= RANKS
    result = {
        "losses": [round(float(x), 4) for x in totals[:steps].view(-1, 10).mean(1)],
        "held_out": round(float(totals[-1]), 4),
        "seconds": round(seconds, 1),
    }
    return result if scale is None else result | {"loss_scale": scale.value, "skipped": scale.skipped}


def rank_main(rank: int, form: Form, steps: int, directory: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    text = "\n".join(documents("stdlib", limit_bytes=2_000_000)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    result = train(form, steps, data[:-200_000], data[-200_000:])
    if rank == 0:
        Path(directory, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def plot(results: dict[str, Any], path: Path) -> None:
    """Losses of all forms, and below how far each is from float32."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 6), sharex=True, dpi=70)
    colors = iter(pyplot.get_cmap("tab20").colors)
    base = results["forms"]["float32"]["losses"]
    for name, form in results["forms"].items():
        steps = [10 * (i + 1) for i in range(len(form["losses"]))]
        style = {"color": "0.8", "zorder": 0} if "other batches" in name else {"color": next(colors)}
        above.plot(steps, form["losses"], label=name, linewidth=1.1, **style)
        below.plot(steps, [a - b for a, b in zip(form["losses"], base, strict=True)], linewidth=1.1, **style)
    above.set_ylabel("training loss")
    above.legend(fontsize=7, bbox_to_anchor=(1.01, 1), loc="upper left")
    below.set_ylabel("difference to float32")
    below.set_xlabel("step")
    below.set_ylim(-0.1, 0.1)
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="a multiple of 10")
    parser.add_argument(
        "--only", default="", help="run the forms whose name has this in it; the others stay as they are"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "question": __doc__.splitlines()[0],
        "command": ["python", "benchmarks/loss_curves.py", "--steps", str(options.steps)],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
        },
        "ranks": RANKS,
        "steps": options.steps,
        "tokens_per_step": RANKS * BATCH * SEQUENCE,
        "parameters": sum(p.numel() for p in build().parameters()),
        "forms": {},
    }
    if options.only and options.out.exists():
        kept = json.loads(options.out.read_text())
        if kept["versions"] != results["versions"] or kept["steps"] != options.steps:
            parser.error(f"{options.out} is of other versions or steps: run all forms")
        results = kept
    for name, form in FORMS.items():
        if options.only not in name:
            continue
        with tempfile.TemporaryDirectory() as directory:
            mp.spawn(rank_main, (form, options.steps, directory), nprocs=RANKS)
            results["forms"][name] = json.loads(Path(directory, "result.json").read_text())
        print(name, {k: v for k, v in results["forms"][name].items() if k != "losses"}, flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    results["forms"] = {name: results["forms"][name] for name in FORMS if name in results["forms"]}
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
