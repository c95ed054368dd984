"""cai-tensor-parallel inside the stages of a pipeline equals one process; gpt2 ties a cut embedding over the stages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import twin
from torch.distributed.device_mesh import init_device_mesh

from cai_mesh import BoxedTensor, clip_grad_norm_
from cai_mesh.layout import canonical_name, reduce_of
from cai_mesh.testing import run_ranks
from cai_pipeline import PipelineRunner, split
from cai_pipeline.plans.placement import Placement
from cai_tensor_parallel import parallelize, sub_axes

MICROBATCHES = 4


def sum_tied(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        holders = reduce_of(parameter).tied
        if holders is not None:
            dist.all_reduce(parameter.grad, group=holders)


EVEN = 8
"""A length that two ranks can divide."""


def train(
    name: str,
    schedule: str,
    sequence: bool = False,
    mode: str = "1d",
    chunks: int = 1,
    placement: Placement = "loop",
):
    axes = {"pp": 2} | sub_axes(mode, 2 if mode == "1d" else 4)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    stage = split(twin.build(name), mesh, chunks=chunks, placement=placement)
    whole = name in twin.PAIRS
    logits = "whole" if whole else "sharded"
    model = parallelize(stage, mesh, logits=logits, mode=mode, sequence=sequence)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_fn(output, ids):
        if whole:
            return twin.loss_of(output.logits, ids) / MICROBATCHES
        return model.loss_function(logits=output.logits, labels=ids, vocab_size=twin.VOCAB) / MICROBATCHES

    runner = PipelineRunner(model, mesh, schedule=schedule, microbatches=MICROBATCHES, loss_fn=loss_fn)
    backward = twin.in_microbatches(runner, MICROBATCHES, name)
    if whole:  # an evaluation first: what it sends has no graph and says nothing of parts
        first = twin.batch(0)[:, :EVEN] if sequence else twin.batch(0)
        parts = list(first.chunk(MICROBATCHES))
        runner.evaluate([twin.inputs_of(name, part) for part in parts], parts)
    losses, norms = [], []
    for step in range(twin.STEPS):
        ids = twin.batch(step)
        losses.append(float(backward(ids[:, :EVEN] if sequence else ids)))
        sum_tied(model)
        norms.append(float(clip_grad_norm_(model.parameters(), twin.CLIP, mesh)))
        optimizer.step()
        optimizer.zero_grad()
    boxed = {canonical_name(n, p): BoxedTensor.from_param(p) for n, p in model.named_parameters()}
    return losses, norms, twin.full(boxed)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", list(twin.MODELS))
def test_equals_one_process(name: str, schedule: str):
    twin.assert_equals_one_process(name, run_ranks(4, train, name, schedule))


@pytest.mark.parametrize("name", list(twin.MODELS))
def test_a_stream_that_is_cut_passes_from_stage_to_stage(name: str, monkeypatch: pytest.MonkeyPatch):
    whole = twin.batch
    monkeypatch.setattr(twin, "batch", lambda *args: whole(*args)[:, :EVEN])
    twin.assert_equals_one_process(name, run_ranks(4, train, name, "1f1b", True))


def test_a_stream_that_a_grid_cuts_passes_from_stage_to_stage():
    results = run_ranks(8, train, "gpt2", "1f1b", False, "2d", timeout=300)
    twin.assert_equals_one_process("gpt2", results)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", list(twin.DEEP))
def test_several_stages_a_rank(name: str, sequence: bool, monkeypatch: pytest.MonkeyPatch):
    whole = twin.batch
    if sequence:
        monkeypatch.setattr(twin, "batch", lambda *args: whole(*args)[:, :EVEN])
    twin.assert_equals_one_process(name, run_ranks(4, train, name, "interleaved", sequence, "1d", 2))


def test_several_stages_of_a_grid():
    results = run_ranks(8, train, "gpt2, 4 layers", "interleaved", False, "2d", 2, timeout=300)
    twin.assert_equals_one_process("gpt2, 4 layers", results)


@pytest.mark.parametrize("how", ["1f1b", "cut along the sequence", "in a V"])
@pytest.mark.parametrize("name", list(twin.PAIRS))
def test_an_encoder_decoder(name: str, how: str, monkeypatch: pytest.MonkeyPatch):
    """T5's position bias is of a rank's heads alone, and travels so."""
    whole, sequence = twin.batch, how == "cut along the sequence"
    if sequence:
        monkeypatch.setattr(twin, "batch", lambda *args: whole(*args)[:, :EVEN])
    arguments = ("zb-v", False, "1d", 2, "v") if how == "in a V" else ("1f1b", sequence)
    twin.assert_equals_one_process(name, run_ranks(4, train, name, *arguments))


def freeze_tables(model: torch.nn.Module) -> torch.nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("relative_attention_bias" not in name)
    return model


def frozen() -> tuple[float, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    model = parallelize(split(freeze_tables(twin.build("t5")), mesh), mesh)
    loss_fn = lambda output, ids: twin.loss_of(output.logits, ids) / MICROBATCHES  # noqa: E731
    runner = PipelineRunner(model, mesh, schedule="1f1b", microbatches=MICROBATCHES, loss_fn=loss_fn)
    loss = twin.in_microbatches(runner, MICROBATCHES, "t5")(twin.batch(0))
    sum_tied(model)
    return float(loss), float(clip_grad_norm_(model.parameters(), twin.CLIP, mesh))


def test_a_position_bias_of_a_frozen_table():
    """It travels without a graph, and what comes back of it is not used."""
    model = freeze_tables(twin.build("t5"))
    loss = twin.loss_of(model(**twin.inputs_of("t5", twin.batch(0))).logits, twin.batch(0))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), twin.CLIP)
    for found in run_ranks(4, frozen):
        assert found == pytest.approx((loss.item(), norm.item()), rel=1e-9)
