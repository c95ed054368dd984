"""One GPU and a larger model: `cai_gemini.offload` beside DeepSpeed and FSDP2, each in a process of its own.

    python benchmarks/offload.py --billions 3 --cap 40 --batch 8 --forms cai,deepspeed-2,deepspeed-3,fsdp2 [--out FILE]

The allocator is capped with `torch.cuda.set_per_process_memory_fraction`. A LLaMA shape of about the asked size with
random weights, sequence 2048, every block recomputed, AdamW with clipping, bfloat16 compute, float32 masters. Every
form trains the same model on the same random tokens with the same attention. `cai-swap` runs cai_kernels in the model,
`cai-unstreamed` lets the host step all that does not stay on the device.
`--host-memory` and `--nvme` limit what our forms keep in host memory and say where the rest goes.
`--state-dtype bfloat16` keeps master weights and moments in it, `--activations` the inputs of blocks in host memory.
`--timeline FILE` records one more step of ours, after those that are timed (`cai report` draws it).
Tokens a second are of the median step; peaks are torch's allocated bytes and the process's resident set. The link and
the host's AdamW are measured beside ours, and the floor of a step that follows from them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

LR, DECAY, BETAS, VOCAB, SEQUENCE = 1e-4, 0.1, (0.9, 0.95), 32000, 2048
SHAPES = {  # width, hidden, layers; heads of 128
    0: (256, 512, 4),
    1.5: (2048, 5632, 28),
    3: (2560, 6912, 36),
    6.7: (4096, 11008, 32),
    12: (5120, 13824, 36),
    18: (6144, 16384, 39),
}
Step = Callable[[torch.Tensor], torch.Tensor]


def config(billions: float, sequence: int):
    from transformers import LlamaConfig

    width, hidden, layers = SHAPES[billions]
    return LlamaConfig(
        vocab_size=VOCAB if billions else 512,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 128, 2),
        num_key_value_heads=max(width // 128, 2),
        max_position_embeddings=sequence,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )


def meta_model(options: argparse.Namespace) -> nn.Module:
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(config(options.billions, options.sequence))
    if not options.activations:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def values(name: str, param: torch.Tensor) -> torch.Tensor:
    """Ones for vectors, one block of normal numbers tiled for matrices: a host's generator is one thread."""
    if param.dim() < 2:
        return torch.ones(param.shape)
    block = torch.empty(2**20 + 1).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(len(name)))
    return block.repeat(-(-param.numel() // block.numel()))[: param.numel()].view(param.shape)


def rotary(model: nn.Module, device: torch.device) -> None:
    """The buffers of a meta model."""
    inner = model.model
    inner.rotary_emb = type(inner.rotary_emb)(config=model.config).to(device)


def real_model(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> nn.Module:
    model = meta_model(options).to(dtype).to_empty(device=device)
    rotary(model, device)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(values(name, param))
    return model


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


# -- forms ---------------------------------------------------------------------------------------------------------


def cai(options: argparse.Namespace, device: torch.device, facts: dict) -> Step:
    from cai_gemini import Tuning, offload, offload_activations

    model = meta_model(options).to(getattr(torch, options.state_dtype))
    rotary(model, device)
    if options.activations:
        offload_activations(model)
    if options.form == "cai-swap":
        from cai_kernels import swap

        facts["swapped"] = str(swap(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, betas=BETAS)
    memory = int(options.cap * 2**30) if options.cap else None if device.type == "cuda" else "100MB"
    model, moved = offload(
        model,
        optimizer,
        residency="host" if options.form == "cai-host" else "auto",
        device=device,
        device_memory=memory,
        host_memory=options.host_memory,
        nvme=options.nvme,
        compute=torch.bfloat16,
        materialize=values,
        tuning=Tuning(
            stream=options.form != "cai-unstreamed",
        ),
    )
    facts["engine"], facts["optimizer"], facts["norms"] = moved._engine, moved, []

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, ids)
        loss.backward()
        facts["norms"].append(moved.clip_grad_norm_(options.clip))
        moved.step()
        return loss.detach()

    return step


def build_environment() -> None:
    """For DeepSpeed's host AdamW, which is compiled on first use, with the headers of torch's wheels."""
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    os.environ.setdefault("MAX_JOBS", "8")
    homes = [home for home in ("/usr/local/cuda-13.0", "/usr/local/cuda") if os.path.isdir(f"{home}/bin")]
    if homes:
        os.environ.setdefault("CUDA_HOME", homes[0])
    headers = Path(torch.__file__).parent.parent / "nvidia" / "cu13" / "include"
    if headers.is_dir() and not Path(os.environ.get("CUDA_HOME", "/"), "include", "cublas_v2.h").exists():
        os.environ["CPATH"] = os.pathsep.join(filter(None, [str(headers), os.environ.get("CPATH")]))


def deepspeed(options: argparse.Namespace, device: torch.device, facts: dict) -> Step:
    build_environment()
    import deepspeed as ds
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    stage = int(options.form[-1])
    ds.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False)
    zero: dict = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 10**8,
        "allgather_bucket_size": 10**8,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    if stage == 3:
        zero |= {
            "offload_param": {"device": "cpu", "pin_memory": True},
            "stage3_prefetch_bucket_size": 10**8,
            "stage3_param_persistence_threshold": 10**5,
            "stage3_max_live_parameters": 5 * 10**8,
            "stage3_max_reuse_distance": 5 * 10**8,
        }
    settings = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_clipping": options.clip,
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
        "zero_optimization": zero,
    }
    home = torch.device("cpu") if stage == 3 else device
    model = real_model(options, home, torch.bfloat16)
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=LR, weight_decay=DECAY, betas=BETAS, adamw_mode=True)
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=settings)
    rotary(engine.module, device)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(engine, ids)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def fsdp2(options: argparse.Namespace, device: torch.device, facts: dict) -> Step:
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    mesh = dist.init_device_mesh(device.type, (1,))
    model = meta_model(options)
    policy = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **policy)
    fully_shard(model, **policy)
    model.to_empty(device="cpu")
    rotary(model, device)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.to_local().copy_(values(name, param))  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, betas=BETAS, fused=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


FORMS = {
    "cai": cai,
    "cai-host": cai,
    "cai-swap": cai,
    "cai-unstreamed": cai,
    "deepspeed-2": deepspeed,
    "deepspeed-3": deepspeed,
    "fsdp2": fsdp2,
}


# -- one form, in this process -------------------------------------------------------------------------------------


def run_form(options: argparse.Namespace) -> dict:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        if options.cap:
            torch.cuda.set_per_process_memory_fraction(min(1.0, options.cap * 2**30 / total), 0)
        torch.cuda.set_device(device)
    facts: dict = {}
    start = time.perf_counter()
    step = FORMS[options.form](options, device, facts)
    row = {"form": options.form, "build_s": time.perf_counter() - start}
    random = torch.Generator().manual_seed(1)
    vocab = VOCAB if options.billions else 512
    pool = [
        torch.randint(0, vocab, (options.batch, options.sequence), generator=random).to(device)
        for _ in range(3)
    ]
    times, losses = [], []
    for i in range(options.warmup + options.steps):
        if device.type == "cuda":
            torch.cuda.synchronize()
            if i == options.warmup:
                torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses.append(float(step(pool[i % len(pool)])))
        times.append(time.perf_counter() - start)
    if device.type == "cuda":
        torch.cuda.synchronize()
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
        row["reserved_bytes"] = torch.cuda.max_memory_reserved()
    row["step_s"] = statistics.median(times[options.warmup :])
    row["tokens_per_second"] = options.batch * options.sequence / row["step_s"]
    row["host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    row |= {"steps_s": times, "losses": losses}
    if "engine" in facts:
        optimizer = facts.pop("optimizer")
        if options.timeline:
            optimizer.record_timeline()
            for ids in pool[:2]:
                float(step(ids))
            optimizer.timeline().save(options.timeline)
        row["norms"] = [float(norm) for norm in facts.pop("norms")]
        row["placement"] = str(optimizer.placement())
        row |= planned(facts.pop("engine"), device, options)
    return row | facts


def planned(engine, device: torch.device, options: argparse.Namespace) -> dict:
    """What stays on the device, and the floor of a step under that plan, and where the host stepped all the rest."""
    from cai_gemini.engine.disk_use import disk_traffic
    from cai_gemini.planning.policy import on_device
    from cai_gemini.planning.simulation import Step as Sized
    from cai_gemini.planning.simulation import floor, simulate
    from cai_gemini.rates import measure, measure_disk

    engine.finish()
    rates, sizes = measure(device, engine.worker), engine.sizes
    if engine.store is not None:
        read, write = measure_disk(options.nvme)
        rates = replace(rates, disk_read=read, disk_write=write)
    numel = [chunk.unit.shard.numel() if chunk.trains else 0 for chunk in engine.chunks]
    sized = Sized(numel, disk=disk_traffic(engine.chunks))
    budget, alone = engine._schedule.budget, replace(engine.plan, places=on_device(engine.plan.state))
    return {
        "chunks": len(sizes),
        "weights_stay": len(engine.plan.weights),
        "state_stays": len(engine.plan.state),
        "state_streamed": len(engine.plan.streamed),
        "state_bytes_on_device": sum(sizes[i].state for i in engine.plan.state),
        "rates_gbs": {name: value / 1e9 for name, value in vars(rates).items() if value and value < math.inf},
        "floor_s": floor(engine.trace, sizes, engine.plan, rates, sized),
        "host_floor_s": floor(engine.trace, sizes, alone, rates, sized),
        "simulated_s": simulate(engine.trace, sizes, engine.plan, budget, rates, sized)[0],
        "compute_s": sum(engine.trace.seconds),
        "beside_bytes": max(engine.trace.other_bytes),
    }


# -- all forms -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--billions", type=float, default=3, choices=sorted(SHAPES))
    parser.add_argument("--cap", type=float, default=0, help="GiB that torch may take of the GPU (0: no cap)")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=SEQUENCE)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    parser.add_argument("--host-memory", help="of our forms, such as 100GB")
    parser.add_argument("--nvme", help="directory on a disk, for our forms")
    parser.add_argument("--forms", default="cai,cai-host,deepspeed-2,deepspeed-3,fsdp2")
    parser.add_argument(
        "--state-dtype", default="float32", choices=("float32", "bfloat16"), help="of our forms"
    )
    parser.add_argument("--activations", action="store_true", help="in host memory, in our forms")
    parser.add_argument("--timeline", help="file for a recorded step of our forms")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.form:
        print("ROW " + json.dumps(run_form(options)), flush=True)
        return
    rows = []
    for form in options.forms.split(","):
        rows.append(row := apart(form, options))
        shown = {k: v for k, v in row.items() if k not in ("steps_s", "losses", "swapped")}
        print(json.dumps(shown), flush=True)
        if options.out:
            record = {"command": " ".join(sys.argv), "versions": versions(), "rows": rows}
            if torch.cuda.is_available():
                record["device"] = torch.cuda.get_device_name()
            options.out.write_text(json.dumps(record, indent=1) + "\n")


def apart(form: str, options: argparse.Namespace) -> dict:
    """A row from a process of its own, or why there is none."""
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    names = ("billions", "cap", "batch", "sequence", "steps", "warmup", "clip", "state_dtype")
    command = [sys.executable, __file__, "--form", form]
    for name in names:
        command += ["--" + name.replace("_", "-"), str(getattr(options, name))]
    for name in ("host_memory", "nvme", "timeline"):
        if getattr(options, name):
            command += ["--" + name.replace("_", "-"), getattr(options, name)]
    command += ["--activations"] if options.activations and form.startswith("cai") else []
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=options.timeout
        )
    except subprocess.TimeoutExpired:
        return {"form": form, "error": f"no result in {options.timeout:.0f} s"}
    found = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if not found:
        return {
            "form": form,
            "error": " | ".join(done.stderr.strip().splitlines()[-4:])[-800:] or "no output",
        }
    return json.loads(found[-1][4:])


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in ("torch", "transformers", "deepspeed"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


if __name__ == "__main__":
    main()
