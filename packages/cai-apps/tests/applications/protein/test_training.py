"""`cai train alphafold-tiny` on one, two and four ranks equals a plain loop that clips each sample by itself.

All weights are random: as training starts, the last layers of updates are zero, and most gradients with them.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from layouts import full
from torch import nn

from cai_apps import recipes
from cai_apps.applications.protein.data.batch import features_of, truth_of
from cai_apps.applications.protein.data.samples import Pieces
from cai_apps.applications.protein.design import sizes_of
from cai_apps.applications.protein.loss.whole import losses, total
from cai_apps.applications.protein.model.alphafold import AlphaFold
from cai_apps.applications.protein.task import PROTEIN
from cai_apps.applications.protein.weights import read_weights, write_openfold
from cai_apps.applications.protein.workload import STAGES, piece_of, workload
from cai_apps.compose.apply import apply
from cai_apps.data.batches import Batches
from cai_mesh.comm import all_reduce, group
from cai_mesh.errors import CaiError
from cai_mesh.layout import BoxedTensor, canonical_name
from cai_mesh.testing import run_ranks

STEPS, BATCH, DECAY, CLIP = 3, 4, 0.9, 28.0
CHANGES = {
    "train.steps": STEPS,
    "train.global_batch": BATCH,
    "train.device": "cpu",
    "precision.compute": "fp64",
    "data.residues": 20,
    "data.sequences": 4,
    "data.extra": 5,
    "objective.rounds": 3,
    "optimizer.clip_samples": CLIP,
    "optimizer.ema_decay": DECAY,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {},
    "2": {"parallel.shard": 2, "parallel.zero": 3},
    "2-zero0": {"parallel.shard": 2, "parallel.zero": 0},
    "4": {"parallel.shard": 4, "parallel.zero": 1},
    "4-copies": {"parallel.shard": 2, "parallel.replicate": 2, "parallel.zero": 2},
    "2-full": {"parallel.shard": 2, "parallel.zero": 2, "memory.recompute": "full"},
    "2-most": {"parallel.shard": 2, "parallel.zero": 3, "memory.recompute": "most"},
    "1-compiled": {"train.compile": "on"},
    "2-fine": {"parallel.shard": 2, "parallel.zero": 2, "objective.stage": "fine_tuning"},
    "2-host": {
        "parallel.shard": 2,
        "parallel.zero": 3,
        "memory.residency": "host",
        "optimizer.clip_samples": None,
    },
    "1-host": {"memory.residency": "host", "optimizer.clip_samples": None},
}
TIMEOUT = 400.0
"""Seconds; blocks that are compiled on a CPU take minutes."""
UNUSED = ("heads.resolved", "heads.errors")
"""Heads without a loss in the first training."""
RUNS = ("1", "2", "4", "2-full", "2-host", "2-fine")


def config_of(weights: Path, layout: str, **more: Any) -> Any:
    changes = {"parallel.shard": 1, "parallel.zero": 1, "model.weights": str(weights)}
    changes |= {"data.cache": str(weights.parent), **CHANGES, **LAYOUTS[layout], **more}
    config = recipes.load("alphafold-tiny", changes)
    parallel = config.parallel
    return PROTEIN.resolve(config, parallel.shard * parallel.replicate * parallel.tensor.size)


def pieces(config: Any) -> Pieces:
    chains = list(PROTEIN.prepare(config).training.values())
    return Pieces(chains, piece_of(config), config.objective.rounds, BATCH, config.train.seed)


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """A file of random weights, by OpenFold's names."""
    model, draws = (
        AlphaFold(sizes_of("alphafold-tiny", templates=False, errors=True)),
        torch.Generator().manual_seed(0),
    )
    with torch.no_grad():
        for name, param in model.named_parameters():
            near_one = "norm" in name and name.endswith("weight")
            param.copy_(0.1 * torch.randn(param.shape, generator=draws) + near_one)
    path = tmp_path_factory.mktemp("weights") / "random.pt"
    write_openfold(model, path)
    return path


def trained(weights: str, layout: str):
    """What every rank returns: losses, norms, weights and averages."""
    config = config_of(Path(weights), layout)
    session = apply(config, workload(config), device=torch.device("cpu"))
    data = group(session.mesh, ("dp_replicate", "dp_shard"))
    rank, ranks = (0, 1) if data is None else (dist.get_rank(data), dist.get_world_size(data))
    batches = Batches(pieces(config), BATCH, 1, rank, ranks, config.train.seed)
    found, norms = [], []
    for step in range(STEPS):
        loss = session.step(batches.at(step * BATCH), total=BATCH).clone()
        norms.append(float(session.norm()))
        session.update(config.optimizer.lr, norms[-1])
        all_reduce(loss, data)
        found.append(float(loss))
    assert session.average is not None
    if session.weights.offloaded is not None:
        held = {n.removeprefix("model."): b for n, b in session.state().items() if n.startswith("model.")}
        masters = {name: each.present for name, each in held.items()}
    else:
        masters = session.weights.masters() or BoxedTensor.of_model(session.model)
    return found, norms, full(masters), full(session.average.values())


def compiled_step(weights: str) -> float:
    """The loss of a step whose layers and methods are each one graph, or torch raises."""
    config = config_of(Path(weights), "1-compiled")
    whole = functools.partial(torch.compile, backend="eager", fullgraph=True)
    with mock.patch.object(torch, "compile", lambda function, **options: whole(function)):
        session = apply(config, workload(config), device=torch.device("cpu"))
        return float(session.step(Batches(pieces(config), BATCH, 1, 0, 1, 0).at(0), total=BATCH))


def twin(weights: Path, clip: float | None, stage: str):
    """The plain loop: a backward a sample, torch's clipping, a sum, torch's AdamW; also whether any was clipped."""
    config = config_of(weights, "1")
    model = AlphaFold(sizes_of(config.model.name, templates=False, errors=True))
    read_weights(model, weights)
    model = model.double()
    options = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), options.lr, (options.beta1, options.beta2), options.eps, options.weight_decay
    )
    averages = {name: value.detach().clone() for name, value in model.named_parameters()}
    batches = Batches(pieces(config), BATCH, 1, 0, 1, config.train.seed)
    found, norms, clipped = [], [], 0
    unused = UNUSED if stage == "initial" else ()
    used = [param for name, param in model.named_parameters() if not name.startswith(unused)]
    for step in range(STEPS):
        sums = [torch.zeros_like(param) for param in used]
        summed = 0.0
        for batch in batches.at(step * BATCH):
            batch = {n: v.double() if v.is_floating_point() else v for n, v in batch.items()}
            truth = truth_of(batch)
            (loss,) = total(losses(model(features_of(batch)), truth, bonds=True), STAGES[stage])
            loss = loss * truth.mask.sum().sqrt()
            gradients = torch.autograd.grad(loss, used)
            norm = torch.stack([g.norm() for g in gradients]).norm()
            factor = 1.0 if clip is None or norm < clip else clip / norm
            clipped += clip is not None and bool(norm > clip)
            for each, gradient in zip(sums, gradients, strict=True):
                each.add_(gradient * factor / BATCH)
            summed += loss.item()
        for param, each in zip(used, sums, strict=True):
            param.grad = each
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), options.clip)))
        optimizer.step()
        found.append(summed / BATCH)
        decay = min(DECAY, (2 + step) / (11 + step))
        for name, value in model.named_parameters():
            averages[name].mul_(decay).add_(value.detach(), alpha=1 - decay)
    return found, norms, {name: value.detach() for name, value in model.named_parameters()}, averages, clipped


@pytest.fixture(scope="module")
def twins(weights):
    kinds = ((CLIP, "initial"), (None, "initial"), (CLIP, "fine_tuning"))
    return {kind: twin(weights, *kind) for kind in kinds}


def check(weights: Path, twins: dict, layout: str) -> None:
    config = config_of(weights, layout)
    expected = twins[config.optimizer.clip_samples, config.objective.stage]
    ranks = config.parallel.shard * config.parallel.replicate
    for found in run_ranks(ranks, trained, str(weights), layout, timeout=TIMEOUT):
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-9)
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)
        for own, wanted in zip(found[2:], expected[2:4], strict=True):
            assert own.keys() == wanted.keys()
            for name, value in wanted.items():
                torch.testing.assert_close(own[name], value, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("layout", RUNS)
def test_equals_a_plain_loop(weights, twins, layout):
    check(weights, twins, layout)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in RUNS])
def test_equals_a_plain_loop_in_other_layouts(weights, twins, layout):
    check(weights, twins, layout)


def test_some_samples_are_clipped_and_some_are_not(twins):
    assert 0 < twins[CLIP, "initial"][4] < STEPS * BATCH


def test_rounds_are_drawn_for_a_step_and_every_number_comes(weights):
    config = config_of(weights, "1")
    drawn = [pieces(config).drawn_rounds(step) for step in range(300)]
    assert {count: drawn.count(count) > 70 for count in (1, 2, 3)} == {1: True, 2: True, 3: True}
    batch = pieces(config).rows(np.arange(2), np.arange(8, 10))
    assert batch["alignment"].shape[1] == drawn[2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train.microbatch_size": 2}, "train.microbatch_size = 2"),
        ({"memory.residency": "host"}, "several samples a step"),
        ({"optimizer.clip_samples": 0.0}, "clip_samples is too small"),
        ({"parallel.tensor.size": 2}, "tensor.size = 2"),
        ({"model.name": "alphafold-tinny"}, "alphafold-tiny"),
        ({"model.weights": "/nowhere.pt"}, "no weights at /nowhere.pt"),
        ({"objective.clamped": 1.5}, "objective.clamped"),
        ({"data.source": "/nowhere"}, "no directory /nowhere"),
        ({"data.validation": ["1ABC"]}, "1ABC"),
        ({"data.max_resolution": 0.5}, "no chain"),
        ({"folding.chains": ["1A80"]}, "did you mean '1A8O'"),
    ],
)
def test_what_cannot_be_is_refused_before_ranks_start(weights, changes, said):
    with pytest.raises(CaiError, match=said):
        PROTEIN.prepare(config_of(weights, "1", **changes))


def test_names_of_parameters_are_those_of_openfold(weights):
    config = config_of(weights, "1")
    with torch.device("meta"):
        model = workload(config).build()
    assert len({canonical_name(name, param) for name, param in model.named_parameters()}) == len(
        torch.load(weights, weights_only=True)
    )


def test_what_is_compiled_is_one_graph(weights, twins):
    (found,) = run_ranks(1, compiled_step, str(weights), timeout=TIMEOUT)
    assert found == pytest.approx(twins[CLIP, "initial"][0][0], abs=1e-9)
