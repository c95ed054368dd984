"""What writing weight gradients into chunks costs Inductor in fusion: a LLaMA layer by autograd and by the seam.

    python benchmarks/fusion.py            # counts, on any machine
    python benchmarks/fusion.py --layers 8 # on a GPU also milliseconds of forward and backward

Counted are the kernels that Inductor makes beside matrix products, the calls of these, and the bytes that its kernels
read and write. One JSON line a form. To compare two versions, run it with PYTHONPATH set to either.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time

import torch
import torch._inductor.config
import torch.distributed as dist
from torch._inductor import metrics
from torch._inductor.utils import run_and_get_code
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaModel

from cai_zero import MixedPrecision, shard_optimizer

SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
SMALL = {"hidden_size": 256, "intermediate_size": 896, "num_attention_heads": 8, "num_key_value_heads": 2}


def build(layers: int, device: torch.device) -> LlamaModel:
    sizes = SIZES if device.type == "cuda" else SMALL
    config = LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=256, attn_implementation="sdpa")
    torch.manual_seed(0)
    return LlamaModel(config).to(device, torch.bfloat16)


def counted(step) -> dict[str, int]:
    metrics.reset()
    _, codes = run_and_get_code(step)
    calls = sum(code.count("extern_kernels.") for code in codes)
    seam = sum(code.count("torch.ops.cai_mesh.") for code in codes)
    return {
        "graphs": len(codes),
        "kernels": metrics.generated_kernel_count,
        "products": calls,
        "operators_of_the_seam": seam,
        "bytes": metrics.num_bytes_accessed,
    }


def milliseconds(step, runs: int = 20) -> float:
    for _ in range(5):
        step()
    taken = []
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        taken.append(1000 * (time.perf_counter() - start))
    return round(statistics.median(taken), 3)


def measure(form: str, layers: int, tokens: int, device: torch.device) -> dict:
    model = build(layers, device)
    if form == "seam":
        mesh = dist.init_device_mesh(device.type, (1,), mesh_dim_names=("dp_shard",))
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = shard_optimizer(
            inner, mesh, model=model, precision=MixedPrecision(compute=torch.bfloat16)
        )
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True)
    ids = torch.randint(0, 256, (1, tokens), device=device)

    def step():
        loss = model(input_ids=ids, use_cache=False).last_hidden_state.float().square().mean()
        if form == "seam":
            with optimizer.defer():
                loss.backward()
            optimizer.zero_grad()
        else:
            loss.backward()
            model.zero_grad(set_to_none=True)

    torch._dynamo.reset()
    torch._inductor.config.force_disable_caches = True  # what is cached is not counted
    torch._logging.set_logs(inductor_metrics=True)  # bytes are counted only for this log
    row = {"form": form, "layers": layers, "tokens": tokens} | counted(step)
    if device.type == "cuda":
        row["milliseconds"] = milliseconds(step)
        row["device"] = torch.cuda.get_device_name()
    return row | {"torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=0, help="0: 4096 on a GPU, 64 on a CPU")
    parser.add_argument("--label", default="", help="name of the version in the output")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = options.tokens or (4096 if device.type == "cuda" else 64)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1
        )
        for form in ("autograd", "seam"):
            print(
                json.dumps({"label": options.label} | measure(form, options.layers, tokens, device)),
                flush=True,
            )
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
