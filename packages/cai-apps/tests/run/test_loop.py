"""The loop on a session of one weight, whose every number can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from cai_apps.applications.language.config import Config
from cai_apps.compose.step_loss import Evaluation
from cai_apps.config.sections import EarlyStopping
from cai_apps.data.batches import Batches
from cai_apps.data.documents import Documents
from cai_apps.data.packed import blank, count_targets, split
from cai_apps.run.files.position import Position, Unit
from cai_apps.run.files.standing import Standing
from cai_apps.run.loop.training_loop import Loop
from cai_apps.run.task import Work
from cai_mesh.comm import DATA_AXES, MeshSpec, all_reduce, build_mesh, degree, group, index
from cai_mesh.errors import DataError
from cai_mesh.testing import RankError, run_ranks

BASE = Config()
CONFIG = replace(
    BASE,
    train=replace(
        BASE.train, steps=6, global_batch=4, microbatch_size=1, validate_every=3, validation_batches=9
    ),
    data=replace(BASE.data, sequence_length=8),
    optimizer=replace(BASE.optimizer, lr=0.5),
    lr_schedule=replace(BASE.lr_schedule, warmup_steps=2, decay_steps=6, floor=0.0),
)


@dataclass
class OneWeight:
    """Its loss on a target token t is (w - t / 10)^2, and plain gradient descent takes the steps."""

    config: Config
    mesh: DeviceMesh
    weight: float = 1.0
    gradient: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    updates: int = 0
    steps: int = 0
    skips: bool = False
    broken: int | None = None
    measures: torch.Tensor | None = None

    def step(self, microbatches, *, total):
        targets = torch.cat([self._targets(batch) for batch in microbatches])
        self.measures = self._measured(targets)
        self.gradient = self.gradient + (2 * (self.weight - targets)).sum() / total
        return ((self.weight - targets) ** 2).sum() / total

    def routing(self):
        return {"load_worst": torch.tensor(1.5)}

    def norm(self):
        gradient = self.gradient.clone()
        all_reduce(gradient, group(self.mesh, DATA_AXES)).wait()
        self.gradient = gradient
        return gradient.abs()

    def update(self, lr, norm):
        self.steps += 1
        if not math.isfinite(norm):  # left out: nobody has looked at it
            return
        assert norm == float(self.gradient.abs())
        self.weight, self.gradient = self.weight - lr * float(self.gradient), torch.zeros(())
        self.updates += 1

    def evaluate(self, microbatches, *, total):
        targets = torch.cat([self._targets(batch) for batch in microbatches])
        loss = ((self.weight - targets) ** 2).sum() / total
        return Evaluation(loss, (targets > 0.8).sum(), self._measured(targets))

    def _measured(self, targets):
        """The mean of the targets, and one of nothing."""
        return torch.stack(
            [targets.sum(), torch.zeros(()), targets.new_tensor(len(targets)), torch.zeros(())]
        ).view(2, 2)

    def find_broken(self, microbatches, *, total):
        assert (self.steps, self.updates) == (0, 0), "as before the step that was left out"
        return "the weight" if torch.distributed.get_rank() == self.broken else None

    def _targets(self, batch):
        labels = batch["labels"].double()
        return labels[labels >= 0] / 10


def train(directory, config=CONFIG, start=None, weight=1.0, validation_fraction=0.3):
    """(weight, [(metrics, position)]) of a run on all ranks; the last of its sequences is mostly ignored."""
    tokens = (np.arange(1, 8 * 10 + 4) % 17).astype(np.uint16)
    prepared = Documents(Path(directory), 1, len(tokens), "uint16", 0, "text", "vocabulary")
    if torch.distributed.get_rank() == 0:
        tokens.tofile(Path(directory) / "tokens.bin")
    torch.distributed.barrier()
    mesh = build_mesh(MeshSpec(dp_shard=-1), device_type="cpu")
    training, validation = split(prepared, 8, validation_fraction)
    sizes = (
        config.train.global_batch,
        config.train.microbatch_size,
        index(mesh, DATA_AXES),
        degree(mesh, DATA_AXES),
    )
    session, seen = OneWeight(config, mesh, weight, broken=torch.distributed.get_world_size() - 1), []
    batches = Batches(training, *sizes, seed=config.train.seed)
    held_out = Batches(validation, *sizes, seed=None, blank=blank)
    flops = {"mfu": lambda batch: 80.0 * len(batch["labels"])}
    workload = SimpleNamespace(measures=("target", "nothing"))
    work = Work(workload, training, validation, count_targets, "target tokens", Unit("tokens", 8), flops)  # type: ignore[arg-type]
    loop = Loop(session, work, batches, held_out, torch.device("cpu"), lambda *it: seen.append(it))
    loop.run(start or Position())
    return session.weight, seen


@pytest.fixture
def single(tmp_path):
    return run_ranks(1, train, str(tmp_path))[0]


def test_data_ranks_change_nothing(single, tmp_path):
    for weight, seen in run_ranks(2, train, str(tmp_path)):
        assert weight == pytest.approx(single[0], abs=1e-12)
        for (metrics, position), (expected, expected_position) in zip(seen, single[1], strict=True):
            assert replace(position, standing=expected_position.standing) == expected_position
            assert position.standing.step == expected_position.standing.step
            for name in ("loss", "grad_norm", "lr", "units", "validation_loss"):
                assert getattr(metrics, name) == pytest.approx(getattr(expected, name), abs=1e-12), name
            assert metrics.measures == pytest.approx(expected.measures, abs=1e-12)
            assert metrics.validation_measures == pytest.approx(expected.validation_measures, abs=1e-12)


def due_of(directory):
    """Whether a checkpoint is due after each step, where before the third the last rank's clock alone says so."""
    global Loop
    asked, due = [], []

    class Listening(Loop):
        def __init__(self, *args):
            super().__init__(*args)
            self.by_clock = lambda: asked.append(0) or (len(asked) == 3 and torch.distributed.get_rank() == 1)
            self.on_step = lambda metrics, position: due.append(self.due)

    plain, Loop = Loop, Listening
    try:
        train(directory)
    finally:
        Loop = plain
    return due


def test_one_rank_of_whose_clock_a_checkpoint_is_due_is_enough(tmp_path):
    for due in run_ranks(2, due_of, str(tmp_path)):
        assert due == [False, False, True, False, False, False]


def test_position_and_records(single):
    metrics, positions = zip(*single[1], strict=True)
    places = [(position.step, position.samples, position.units) for position in positions]
    assert places == [(step, 4 * step, 4 * 8 * step) for step in range(1, 7)]
    lowest = min(metrics, key=lambda m: m.validation_loss or math.inf)
    assert positions[-1].standing == Standing(lowest.validation_loss, lowest.step, (6 - lowest.step) // 3)
    assert [m.step for m in metrics] == [1, 2, 3, 4, 5, 6]
    # what has nothing to divide by is left out; targets are tenths of tokens below 17
    assert all(m.measures.keys() == {"target"} and 0 < m.measures["target"] < 1.7 for m in metrics)
    assert [m.validation_measures.keys() for m in metrics if m.validation_loss is not None] == [
        {"validation_target"}
    ] * 2
    assert metrics[0].record()["target"] == metrics[0].measures["target"]
    assert metrics[0].record()["load_worst"] == 1.5
    assert [m.validation_loss is not None for m in metrics] == [False, False, True, False, False, True]
    assert [m.lr for m in metrics[:3]] == [0.25, 0.5, 0.5]
    assert single[0] == pytest.approx(0.85, abs=0.05)
    assert metrics[0].tflops == pytest.approx(10.0 * metrics[0].units_per_second / 1e12)


@pytest.mark.parametrize("fraction, sequences", [(0.2, 2), (0.45, 5), (0.65, 7)])
@pytest.mark.parametrize("ranks, sizes", [(1, (4, 2)), (2, (4, 1)), (2, (8, 4))])
def test_validation_counts_each_target_once(ranks, sizes, fraction, sequences, tmp_path):
    """The mean over the sequences themselves, which fill no whole batch; the last of them is mostly ignored."""
    tokens = np.arange(1, 8 * 10 + 4) % 17
    total = -(-len(tokens) // 8)
    targets = [row[1:] for row in np.split(tokens, range(8, len(tokens), 8))[total - sequences :]]
    train_config = replace(
        CONFIG.train, global_batch=sizes[0], microbatch_size=sizes[1], steps=1, validate_every=1
    )
    config = replace(CONFIG, train=train_config)
    for weight, seen in run_ranks(ranks, train, str(tmp_path), config, None, 1.0, fraction):
        expected = np.mean((weight - np.concatenate(targets) / 10) ** 2)
        last = seen[-1][0]
        assert last.validation_loss == pytest.approx(expected, abs=1e-12)
        assert last.validation_perplexity == pytest.approx(np.exp(expected), abs=1e-12)
        assert last.validation_accuracy == pytest.approx(np.mean(np.concatenate(targets) > 8), abs=1e-12)


def test_second_half_from_a_position_is_the_second_half(single, tmp_path):
    config = replace(CONFIG, train=replace(CONFIG.train, steps=3))
    ((weight, seen),) = run_ranks(1, train, str(tmp_path), config)
    ((weight, _),) = run_ranks(1, train, str(tmp_path), CONFIG, seen[-1][1], weight)
    assert weight == single[0]


def test_loss_that_is_not_finite_ends_the_run(tmp_path):
    with pytest.raises(RankError, match="the loss of step 1 is not finite") as caught:
        run_ranks(2, train, str(tmp_path), CONFIG, None, float("nan"))
    assert DataError.__name__ in str(caught.value)
    assert "on rank 1, the weight" in str(caught.value)


def test_a_run_ends_early_and_stays_ended(tmp_path):
    """Of loss and step of every validation, what transformers' callback makes; a run gone on with does no step."""
    config = replace(
        CONFIG,
        optimizer=replace(CONFIG.optimizer, lr=4.0),  # too high: the loss grows
        train=replace(CONFIG.train, steps=12, validate_every=1),
        early_stopping=EarlyStopping(patience=3),
    )
    ((weight, seen),) = run_ranks(1, train, str(tmp_path), config)
    losses = [metrics.validation_loss for metrics, _ in seen]
    assert len(seen) < 12 and seen[-1][1].standing.stale == 3
    assert seen[-1][1].standing.loss == min(losses) == losses[-4]
    ((again, more),) = run_ranks(1, train, str(tmp_path), config, seen[-1][1], weight)
    assert (again, more) == (weight, [])
    patient = replace(config, early_stopping=EarlyStopping(patience=5))
    ((_, more),) = run_ranks(1, train, str(tmp_path), patient, seen[-1][1], weight)
    assert more
