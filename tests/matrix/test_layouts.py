"""The same training under the product of layouts, ZeRO stages, schedules and models: what a rank of `cai train` does.

Every case trains in float64 from the same seed on the same text and must give the losses of the run on one rank. Ranks
are those of a pool, as most of a short run's time is their start.
"""

from __future__ import annotations

import itertools
import json
import pydoc_data.topics
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from cai_apps import recipes
from cai_apps.applications.language.task import LANGUAGE
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.launch.job import make_job
from cai_apps.run.worker import do_job
from cai_mesh.testing import run_ranks

pytestmark = pytest.mark.matrix

STEPS = 4
TOLERANCE = 1e-9
IN_FLOAT32 = 1e-5
"""Of grids for a LLaMA, whose own norms compute in float32, those of grids in the run's float64."""
CONFIG = """
[model]
name = "{model}"
[data]
source = "{source}"
sequence_length = 64
limit_bytes = 300000
cache = "{cache}"
[parallel]
replicate = {replicate}
shard = {shard}
zero = {zero}
tensor = {{ mode = "{mode}", size = {tensor}, sequence = {sequence} }}
pipeline = {{ size = {pipeline}, chunks = {chunks}, schedule = "{schedule}", unshard = "{unshard}" }}
[precision]
compute = "fp64"
[train]
steps = {steps}
global_batch = 16
microbatch_size = {samples}
device = "cpu"
[log]
directory = "{directory}"
sample_tokens = 0
"""


class Case(NamedTuple):
    model: str
    replicate: int = 1
    shard: int = 1
    zero: int = 0
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    mode: str = "1d"
    sequence: str = "false"
    samples: int = 1
    chunks: int = 1
    unshard: str = "pass"

    def __str__(self) -> str:
        degrees = f"replicate{self.replicate}-shard{self.shard}-tensor{self.tensor}-pipeline{self.pipeline}"
        form = (
            "" if (self.mode, self.sequence) == ("1d", "false") else f"-{self.mode}-sequence {self.sequence}"
        )
        form += "-unshard step" if self.unshard == "step" else ""
        return f"{self.model}-{degrees}-zero{self.zero}-{self.schedule}{form}"


def cases() -> list[Case]:
    found = []
    degrees = itertools.product((1, 2), (1, 2, 4), (1, 2), (1, 2))
    for model, (replicate, shard, tensor, pipeline) in itertools.product(
        ("llama-tiny", "gpt2-tiny"), degrees
    ):
        if not 1 < replicate * shard * tensor * pipeline <= 8:
            continue
        stages = (0, 1, 2, 3) if replicate * shard > 1 else (0,)
        schedules = ("gpipe", "1f1b") if pipeline > 1 else ("1f1b",)
        for zero, schedule in itertools.product(stages, schedules):
            found.append(Case(model, replicate, shard, zero, tensor, pipeline, schedule))
    return found


def chunk_cases() -> list[Case]:
    """Several stages a rank, under every ZeRO stage, with and without tensor ranks."""
    found = []
    for model, schedule, tensor in itertools.product(
        ("llama-tiny", "gpt2-tiny"), ("interleaved", "bfs"), (1, 2)
    ):
        found += [Case(model, 1, 2, zero, tensor, 2, schedule, chunks=2) for zero in range(4)]
        found += [Case(model, 1, 2, 3, tensor, 2, schedule, chunks=2, unshard="step")]
    for model, tensor in itertools.product(("llama-tiny", "gpt2-tiny"), (1, 2)):
        for schedule in ("zb-v", "dualpipe-v", "auto"):
            found += [Case(model, 1, 2, zero, tensor, 2, schedule, chunks=2) for zero in (0, 1)]
            found += [Case(model, 1, 2, 3, tensor, 2, schedule, chunks=2, unshard="step")]
        found += [Case(model, 1, 2, 1, tensor, 2, schedule, chunks=2) for schedule in ("v-half", "v-min")]
    found += [
        Case(model, 1, 2, 1, tensor, 2, "zb-h1") for model in ("llama-tiny", "gpt2-tiny") for tensor in (1, 2)
    ]
    return [*found, Case("llama-tiny", 1, 2, 3, 1, 2, unshard="step")]


def tensor_cases() -> list[Case]:
    """Modes of tensor parallelism, alone and with what they compose with."""
    found = []
    for model in ("llama-tiny", "gpt2-tiny"):
        found += [
            Case(model, tensor=size, mode=mode, samples=4)
            for mode, size in (("2d", 4), ("2.5d", 8), ("3d", 8))
        ]
        found += [Case(model, shard=2, zero=zero, tensor=4, mode="2d", samples=4) for zero in (1, 3)]
        found += [Case(model, tensor=size, sequence="true") for size in (2, 4)]
        found += [Case(model, shard=2, zero=zero, tensor=2, sequence="true") for zero in (1, 3)]
        found += [Case(model, tensor=2, pipeline=2, sequence="true")]
        found += [Case(model, tensor=4, pipeline=2, mode="2d", samples=4)]
    return found


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


def losses(case: Case, folder: Path) -> list[float]:
    """Train as `case` says and return the loss of every step."""
    (folder / "text.txt").write_text("\n\n".join(pydoc_data.topics.topics.values()))
    directory = folder / str(case)
    places = {
        "source": folder / "text.txt",
        "cache": folder / "cache",
        "directory": directory,
        "steps": STEPS,
    }
    file = folder / f"{case}.toml"
    file.write_text(CONFIG.format(**case._asdict(), **places))
    ranks = case.replicate * case.shard * case.tensor * case.pipeline
    config = LANGUAGE.resolve(recipes.load(str(file)), ranks)
    job = make_job(LANGUAGE, config, RunDirectory.of(config, "matrix"), "cpu")
    run_ranks(ranks, do_job, job, torch.device("cpu"), timeout=280)
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]


@pytest.fixture(scope="session")
def one_rank(folder: Path):
    known: dict[str, list[float]] = {}

    def losses_of(model: str) -> list[float]:
        if model not in known:
            known[model] = losses(Case(model), folder)
        return known[model]

    return losses_of


@pytest.mark.parametrize("case", [*cases(), *chunk_cases(), *tensor_cases()], ids=str)
def test_losses_are_those_of_one_rank(case: Case, folder: Path, one_rank, record_property):
    expected, got = one_rank(case.model), losses(case, folder)
    difference = max(abs(a - b) for a, b in zip(expected, got, strict=True))
    record_property("loss_difference", difference)
    assert len(got) == STEPS
    in_float32 = case.model == "llama-tiny" and case.mode != "1d"
    assert difference < (IN_FLOAT32 if in_float32 else TOLERANCE)
