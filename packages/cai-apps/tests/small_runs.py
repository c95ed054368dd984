"""Small runs of llama-tiny through the command `cai`, as processes."""

from __future__ import annotations

import json
from pathlib import Path

from cai_mesh.testing import Ended, run_programs

SMALL = {
    "data.limit_bytes": 100_000,
    "data.sequence_length": 32,
    "train.global_batch": 8,
    "train.microbatch_size": 2,
    "train.validate_every": 3,
    "train.validation_batches": 1,
    "lr_schedule.warmup_steps": 2,
    "lr_schedule.decay_steps": 6,
    "log.every": 1,
    "log.sample_tokens": 8,
}
CUBE = {"parallel.shard": 2, "parallel.tensor.size": 2, "parallel.pipeline.size": 2}
PAIR = {"parallel.shard": 1, "parallel.tensor.size": 1, "parallel.pipeline.size": 2, "parallel.zero": 0}
ALONE = {"parallel.shard": 1, "parallel.tensor.size": 1, "parallel.pipeline.size": 1, "parallel.zero": 0}


def cai(*arguments: object) -> Ended:
    """Run a command of cai to its end."""
    return run_programs(["-m", "cai_apps", *map(str, arguments)], timeout=200)[0]


def flags(run: Path, cache: Path, layout: dict, **more: object) -> list[object]:
    """Small batches, a layout and more values as flags."""
    values = {**SMALL, **layout, "log.directory": run, "data.cache": cache}
    values |= {key.replace("__", "."): value for key, value in more.items()}
    return [part for key, value in values.items() for part in (f"--{key}", value)]


def attempt(run: Path, cache: Path, layout: dict, **more: object) -> Ended:
    return cai("train", "llama-tiny", *flags(run, cache, layout, **more))


def train(run: Path, cache: Path, layout: dict, **more: object) -> Ended:
    done = attempt(run, cache, layout, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
