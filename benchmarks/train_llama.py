"""How fast is `cai train` on a LLaMA, beside torch FSDP2 on the same model in the same run?

    python benchmarks/train_llama.py --out benchmarks/results/llama-1b.json

Runs `cai train RECIPE` once per form and the FSDP2 loop of `fsdp2.py`, one after the other on all GPUs, and writes
tokens/s per GPU, peak bytes and MFU by both conventions (causal attention counted once, and as a full square), with
versions, hardware and commands. Medians over the steps after warm-up. On a machine without GPUs it runs the tiny
recipe, to show that it works; those numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from cai_apps.compose.models import load_model_config, meta_model
from cai_apps.planner.flops import model_flops
from cai_apps.run.loop.metrics import peak_flops

HERE = Path(__file__).parent
WARMUP, STEPS = 5, 14
CAI_FORMS = {
    "cai zero-1 eager": ["--parallel.zero", "1", "--train.compile", "off"],
    "cai zero-1 compile": ["--parallel.zero", "1", "--train.compile", "on"],
    "cai zero-2 compile": ["--parallel.zero", "2", "--train.compile", "on"],
    "cai zero-3 eager": ["--parallel.zero", "3", "--train.compile", "off"],
    "cai zero-3 compile": ["--parallel.zero", "3", "--train.compile", "on"],
}
SPLIT_FORMS = {
    "cai tensor 2 x pipeline 2 eager": ["--parallel.tensor.size", "2", "--parallel.pipeline.size", "2"]
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a GPU")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--timeout", type=int, default=150, help="seconds of one form")
    parser.add_argument("--only", default="", help="run the forms whose name has this in it")
    return parser.parse_args()


def run(command: list[str], timeout: int) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    return done.stdout


def cai(options: argparse.Namespace, flags: list[str], ranks: int, batch: int) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "cai_apps", "train", options.model, *flags]
        command += ["--train.steps", str(STEPS), "--train.global_batch", str(batch)]
        command += ["--data.sequence_length", str(options.sequence), "--data.limit_bytes", "8000000"]
        command += [
            "--log.directory",
            f"{directory}/run",
            "--log.sample_tokens",
            "0",
            "--checkpoint.final",
            "False",
        ]
        if "--parallel.tensor.size" not in flags:
            command += ["--parallel.shard", str(ranks), "--train.microbatch_size", str(options.batch)]
        else:
            command += [
                "--parallel.shard",
                str(ranks // 4),
                "--train.microbatch_size",
                "1",
                "--train.compile",
                "off",
            ]
        run(command, options.timeout)
        lines = [
            json.loads(line) for line in (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()
        ]
    return {
        "step_seconds": statistics.median(line["step_seconds"] for line in lines[WARMUP:]),
        "peak_bytes": max(line["memory_bytes"] for line in lines),
        "losses": [round(line["loss"], 4) for line in lines],
        "command": [word.replace(directory, "RUN_DIR") for word in command[1:]],
    }


def fsdp2(options: argparse.Namespace, compiled: bool, ranks: int) -> dict:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(HERE / "fsdp2.py"), "--model", options.model, "--sequence", str(options.sequence)]
    command += ["--batch", str(options.batch), "--steps", str(STEPS), "--warmup", str(WARMUP)]
    command += ["--compile"] if compiled else []
    output = run(command, options.timeout)
    words = [word.replace(str(HERE), "benchmarks") for word in command[1:]]
    return json.loads(output.strip().splitlines()[-1]) | {"command": words}


def main() -> None:
    options = arguments()
    ranks = torch.cuda.device_count() or 4
    batch = options.batch * ranks
    config = load_model_config(options.model)
    flops, row = model_flops(meta_model(config), config), np.array([options.sequence])
    peak = peak_flops(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    forms = {
        "torch FSDP2 eager": lambda: fsdp2(options, False, ranks),
        **{name: lambda flags=flags: cai(options, flags, ranks, batch) for name, flags in CAI_FORMS.items()},
        "torch FSDP2 compile": lambda: fsdp2(options, True, ranks),
    }
    if ranks % 4 == 0:
        forms |= {
            name: lambda flags=flags: cai(options, flags, ranks, batch) for name, flags in SPLIT_FORMS.items()
        }
    results = {
        "machine": f"{ranks} x {torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **_versions()},
        "model": options.model,
        "sequence": options.sequence,
        "sequences_per_step": batch,
        "forms": {},
    }
    for name, form in forms.items():
        if options.only not in name:
            continue
        try:
            result = form()
            rate = batch * options.sequence / result["step_seconds"] / ranks
            result["tokens_per_second_per_gpu"] = round(rate, 1)
            if peak:
                result["mfu_causal"] = round(rate * flops.causal(row) / options.sequence / peak, 4)
                result["mfu_full_attention"] = round(rate * flops.full(row) / options.sequence / peak, 4)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            result = {"error": str(error)[-1500:]}
        results["forms"][name] = result
        print(name, {k: v for k, v in result.items() if k not in ("losses", "command")}, flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("transformers", "numpy")} | {
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none",
        "multicast": os.environ.get("NCCL_NVLS_ENABLE", "default"),
    }


if __name__ == "__main__":
    main()
