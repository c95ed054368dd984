"""cai-zero over cai-tensor-parallel in a plain loop equals one process: losses, norms, final parameters; every mode."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import twin
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from cai_mesh import BoxedTensor, ParallelMesh, clip_grad_norm_
from cai_mesh.testing import assert_names_kept, run_ranks
from cai_tensor_parallel import cut_batch, parallelize, parallelize_context, parallelize_experts, sub_axes
from cai_zero import shard_module, shard_optimizer

EVEN = 8
"""A length that two ranks can divide."""


def train(name: str, stage: int, mode: str = "1d", sequence: bool = False):
    axes = {"dp_shard": 2} | sub_axes(mode, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model = twin.build(name)
    names = [n for n, _ in model.named_parameters()]
    plain = mode == "1d" and not sequence
    parallelize(model, mesh, mode=mode, sequence=sequence, logits="sharded" if plain else "whole")
    if stage == 3:
        shard_module(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if stage < 3:
        optimizer = shard_optimizer(optimizer, mesh, model=model, stage=stage)
    assert_names_kept(names, [n for n, _ in model.named_parameters()])

    def backward(ids):
        ids = ids[:, :EVEN] if sequence else ids
        logits = None if plain else model(input_ids=ids, use_cache=False).logits
        loss = twin.own_loss(model, ids) if logits is None else twin.loss_of(logits, ids)
        loss.backward()
        return loss

    def clip():
        if stage == 3:
            return clip_grad_norm_(model.parameters(), twin.CLIP, mesh)
        return optimizer.clip_grad_norm_(twin.CLIP)

    losses, norms = twin.train(backward, clip, optimizer, mesh["dp_shard"])
    return losses, norms, twin.full({n: BoxedTensor.from_param(p) for n, p in model.named_parameters()})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", list(twin.MODELS))
def test_equals_one_process(name: str, stage: int):
    twin.assert_equals_one_process(name, run_ranks(4, train, name, stage))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_grid_equals_one_process(stage: int):
    twin.assert_equals_one_process("gpt2", run_ranks(8, train, "gpt2", stage, "2d", timeout=300))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_cut_sequence_equals_one_process(stage: int, monkeypatch: pytest.MonkeyPatch):
    whole = twin.batch
    monkeypatch.setattr(twin, "batch", lambda *args: whole(*args)[:, :EVEN])
    twin.assert_equals_one_process("gpt2", run_ranks(4, train, "gpt2", stage, "1d", True))


def train_experts(name: str, stage: int, ep: int, tensor: int):
    """Experts over `ep` ranks of data and tensor ranks; dense layers over `tensor` ranks, and ZeRO over the others."""
    shape = (dist.get_world_size() // tensor, tensor)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "tp"))
    ranks = ParallelMesh.of(mesh, ep=ep)
    model = twin.build(name)
    parallelize_experts(model, ranks)
    parallelize(model, ranks)
    if stage == 3:
        shard_module(model, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if stage < 3:
        optimizer = shard_optimizer(optimizer, ranks, model=model, stage=stage)

    def backward(ids):
        loss = twin.loss_of(model(input_ids=ids, use_cache=False).logits, ids)
        loss.backward()
        return loss

    def clip():
        if stage == 3:
            return clip_grad_norm_(model.parameters(), twin.CLIP, ranks)
        return optimizer.clip_grad_norm_(twin.CLIP)

    losses, norms = twin.train(backward, clip, optimizer, mesh["dp_shard"])
    return losses, norms, twin.full({n: BoxedTensor.from_param(p) for n, p in model.named_parameters()})


SPREADS = list(itertools.product((0, 1, 2, 3), (2, 4), (1, 2)))
"""Stages of ZeRO, ranks of experts, tensor ranks."""


def train_each(name: str, cases):
    """All in one start of ranks."""
    return [train_experts(name, *case) for case in cases]


@pytest.mark.matrix
@pytest.mark.parametrize("name", list(twin.EXPERTS))
def test_spread_experts_equal_one_process(name: str):
    for results in zip(*run_ranks(4, train_each, name, SPREADS, timeout=500), strict=True):
        twin.assert_equals_one_process(name, list(results))


def test_some_spread_experts_equal_one_process():
    for results in zip(*run_ranks(4, train_each, "mixtral", [(1, 2, 2), (3, 4, 1)]), strict=True):
        twin.assert_equals_one_process("mixtral", list(results))


def train_context(name: str, stage: int, mode: str, tensor: int):
    """Rows over two ranks; ZeRO shards over these and the data ranks alike."""
    shape = (dist.get_world_size() // 2 // tensor, 2, tensor)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "cp", "tp"))
    model = twin.build(name)
    if tensor > 1:
        parallelize(model, mesh)
    parallelize_context(model, mesh, mode=mode)
    if stage == 3:
        shard_module(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if stage < 3:
        optimizer = shard_optimizer(optimizer, mesh, model=model, stage=stage)

    def backward(ids):
        batch = cut_batch({"input_ids": ids, "labels": ids}, mesh)
        labels = batch.pop("shift_labels").flatten()
        logits = model(**batch, use_cache=False).logits.flatten(0, 1)
        part = cross_entropy(logits, labels, reduction="sum") / (ids[:, 1:].numel() / 2)
        part.backward()  # ranks of the context average, as data ranks do
        whole = part.detach() / 2
        dist.all_reduce(whole, group=mesh.get_group("cp"))
        return whole

    def clip():
        if stage == 3:
            return clip_grad_norm_(model.parameters(), twin.CLIP, mesh)
        return optimizer.clip_grad_norm_(twin.CLIP)

    losses, norms = twin.train(backward, clip, optimizer, mesh["dp_shard"])
    return losses, norms, twin.full({n: BoxedTensor.from_param(p) for n, p in model.named_parameters()})


CONTEXTS = list(itertools.product(twin.IN_FLOAT64, (0, 1, 2, 3), ("gather", "ulysses"), (1, 2)))
"""Models, stages of ZeRO, modes, tensor ranks."""


def contexts(cases):
    """All in one start of ranks."""
    return {case: train_context(*case) for case in cases}


@pytest.mark.matrix
def test_rows_over_ranks_equal_one_process():
    assert_rows_over_ranks(CONTEXTS)


def test_some_rows_over_ranks_equal_one_process():
    assert_rows_over_ranks([CONTEXTS[0], CONTEXTS[-1]])


def assert_rows_over_ranks(cases):
    for results in run_ranks(4, contexts, cases, timeout=600):
        for (name, *_), run in results.items():
            twin.assert_equals_one_process(name, [run])
