"""Shards of cai-zero (stage 3) that cai-gemini keeps on device and host as planned train as on one process."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import twin
from shards import DISK, MIXED, STREAMED, Case, adamw, planned, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cai_gemini import ChunkResidency, OffloadedOptimizer, Tiers
from cai_mesh import BoxedTensor, checkpoint
from cai_mesh.errors import PlanError
from cai_mesh.protocols import Residency
from cai_mesh.testing import assert_same_as_one_device, run_ranks
from cai_zero import (
    LossScale,
    MixedPrecision,
    optimizer_state,
    restore_groups,
    shard_module,
    unsharded,
)
from cai_zero.optimizers import Lamb


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", (1, 2), "auto", activations=True),
        Case("gpt2", (2, 2), MIXED),
        Case("llama", (2, 2), "device", own=False, keep=True),
        Case("gpt2", (1, 2), "host", own=False),
        Case("llama", (1, 2), STREAMED),
        Case("llama", (1, 2), "host", own=False, plain=True),
    ],
    ids=str,
)
def test_equals_one_process(case: Case):
    twin.assert_equals_one_process(case.name, run_ranks(case.shape[0] * case.shape[1], train, case))


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", (1, 2), DISK),
        Case("gpt2", (2, 2), "nvme", own=False),
        Case("llama", (2, 1), "nvme", keep=True),
    ],
    ids=str,
)
def test_shards_on_a_disk_equal_one_process(case: Case, tmp_path: Path):
    case = replace(case, folder=tmp_path)
    twin.assert_equals_one_process(case.name, run_ranks(case.shape[0] * case.shape[1], train, case))
    assert not any(tmp_path.iterdir()), "scratch files are gone with the run"


@pytest.mark.matrix
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("residency", ["auto", "host", "device", MIXED, Tiers(1.0, 0.0)], ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize("name", list(twin.MODELS))
def test_every_mix_equals_one_process(name, shape, residency, own, keep):
    case = Case(name, shape, residency, own=own, keep=keep)
    twin.assert_equals_one_process(name, run_ranks(shape[0] * shape[1], train, case))


def infer_between_steps(infers: bool) -> list[torch.Tensor]:
    """Train with shards on the host; between steps each rank infers another number of times, if it does."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)))
    mesh, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)), dist.get_rank()
    shard_module(model, mesh, residency=ChunkResidency("auto", device_memory=10**8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.full((2, 4), 1.0 + step + rank, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if infers:
            with unsharded(model), torch.no_grad():
                for _ in range(1 + 2 * rank):
                    model(torch.ones(2, 4, dtype=torch.float64))
    with unsharded(model):
        return [param.detach().clone() for param in model.parameters()]


def test_whole_weights_for_a_while_change_nothing():
    (inferring, _), (plain, _) = (run_ranks(2, infer_between_steps, infers) for infers in (True, False))
    assert all(map(torch.equal, inferring, plain))


# -- checkpoints ---------------------------------------------------------------------------------------------------


def leg(directory: str, tiers: str | Tiers, first: int, last: int, own: bool):
    """Steps `first` to `last` of the twin's run, from a checkpoint and to another; `own`: of the optimizer's making."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp_shard",))
    residency, model = planned(tiers, nvme=directory), twin.build("llama")
    if first:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
    shard_module(model, mesh, residency=residency)
    optimizer = residency.optimizer(adamw(model.parameters()))
    if first and own:
        optimizer.load(directory)
    elif first:
        restore_groups(optimizer, checkpoint.load(directory, complete_state(model, optimizer))["groups"])
    losses = []
    for step in range(first, last):
        ids = twin.batch(step, mesh.get_local_rank(), mesh.size())
        loss = twin.loss_of(model(input_ids=ids, use_cache=False).logits, ids)
        loss.backward()
        optimizer.clip_grad_norm_(twin.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(twin.mean_over(mesh.get_group(), loss))
    if own:
        optimizer.save(directory, step=last)
    else:
        checkpoint.save(directory, complete_state(model, optimizer), step=last).wait()
    return losses, twin.full({n: BoxedTensor.from_param(p) for n, p in model.named_parameters()})


def complete_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    held = optimizer_state(optimizer, model)
    groups = held.pop("param_groups")
    return {**{f"model.{n}": p for n, p in model.named_parameters()}, **held, "groups": groups}


@pytest.mark.parametrize(
    ("own", "one", "two"),
    [(False, MIXED, "auto"), (True, MIXED, DISK), (True, "nvme", "auto"), (False, DISK, "host")],
)
def test_a_checkpoint_goes_on_over_other_ranks_and_residencies(tmp_path, own, one, two):
    losses, _, final = twin.reference("llama")
    first = run_ranks(2, leg, str(tmp_path), one, 0, 3, own)
    then = run_ranks(4, leg, str(tmp_path), two, 3, 4, own)
    for got in first:
        assert got[0] == pytest.approx(losses[:3], rel=1e-9)
    for got in then:
        assert got[0] == pytest.approx(losses[3:], rel=1e-9)
        assert_same_as_one_device(got[1], final, tolerance=1e-8)


# -- beside shards that stay on the device, bit for bit ------------------------------------------------------------


class Net(nn.Module):
    """Blocks, the second frozen, the third used only now and then."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(5)
        )
        self.head = nn.Linear(16, 9)
        self.layers[1].requires_grad_(False)

    def forward(self, ids, skip=False):
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            x = x + layer(x) if i != 2 or not skip else x
        return self.head(x)


def net(residency: Residency | None, mesh=None, **options) -> nn.Module:
    torch.manual_seed(0)
    return shard_module(Net(), mesh, residency=residency, **options)


def loss_of(model: nn.Module, step: int, rank: int = 0) -> torch.Tensor:
    ids = torch.randint(0, 9, (3, 5), generator=torch.Generator().manual_seed(10 * step + rank))
    return nn.functional.cross_entropy(model(ids, step % 3 == 1).float().flatten(0, 1), ids.flatten())


def losses_of(model: nn.Module, optimizer, steps=range(5), rank: int = 0) -> list[float]:
    found = []
    for step in steps:
        for part in range(2):
            loss = loss_of(model, 2 * step + part, rank)
            loss.backward()
            found.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return found


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def bfloat16_steps(tiers: str | Tiers | None):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    residency = None if tiers is None else planned(tiers)
    model = net(residency, mesh, precision=MixedPrecision(compute=torch.bfloat16))
    optimizer = (
        adamw(model.parameters()) if residency is None else residency.optimizer(adamw(model.parameters()))
    )
    losses = losses_of(model, optimizer, rank=mesh.get_local_rank())
    return losses, values(model)


@pytest.mark.parametrize("residency", [MIXED, "auto"], ids=str)
def test_bfloat16_is_that_of_shards_on_the_device_bit_for_bit(residency):
    plain, ours = run_ranks(2, bfloat16_steps, None), run_ranks(2, bfloat16_steps, residency)
    for (losses, final), (got, weights) in zip(plain, ours, strict=True):
        assert got == losses
        assert all(torch.equal(a, b) for a, b in zip(final, weights, strict=True))


def unfrozen_steps(tiers: str | Tiers | None, folder: Path | None):
    """Block 1, frozen at first (`Net`), and half of block 4 are unfrozen in turns; then block 0 is frozen."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    residency = None if tiers is None else planned(tiers, nvme=None if folder is None else str(folder))
    torch.manual_seed(0)
    plain = Net()
    plain.layers[4].requires_grad_(False)
    model = shard_module(plain, mesh, residency=residency)
    inner = adamw(model.parameters())
    optimizer, rank = inner if residency is None else residency.optimizer(inner), mesh.get_local_rank()
    losses = losses_of(model, optimizer, range(4), rank)
    model.layers[1].requires_grad_(True)
    losses += losses_of(model, optimizer, range(4, 6), rank)
    model.layers[4][0].requires_grad_(True)
    losses += losses_of(model, optimizer, range(6, 8), rank)
    model.requires_grad_(True)
    model.layers[0].requires_grad_(False)
    losses += losses_of(model, optimizer, range(8, 11), rank)
    return losses, values(model)


@pytest.mark.parametrize("tiers", ["auto", "host", "device", STREAMED, DISK, "nvme"], ids=str)
def test_what_is_unfrozen_is_trained(tiers, tmp_path):
    """Beside shards on the device, which tests/loops compares with one process."""
    folder = tmp_path if tiers in (DISK, "nvme") else None
    plain, ours = run_ranks(2, unfrozen_steps, None, None), run_ranks(2, unfrozen_steps, tiers, folder)
    for (losses, final), (got, weights) in zip(plain, ours, strict=True):
        assert got == losses
        assert all(torch.equal(a, b) for a, b in zip(final, weights, strict=True))


def pair(**options) -> tuple[tuple[nn.Module, torch.optim.Optimizer], tuple[nn.Module, OffloadedOptimizer]]:
    """A model whose shards stay on the device, and one under a planned residency, of one process each."""
    plain, residency = net(None), planned(**options)
    model = net(residency)
    return (plain, adamw(plain.parameters())), (model, residency.optimizer(adamw(model.parameters())))


def assert_alike(a: nn.Module, b: nn.Module) -> None:
    assert all(torch.equal(x, y) for x, y in zip(values(a), values(b), strict=True))


def test_what_a_forward_left_unsharded_is_gathered_anew_after_a_step():
    """Such as a loss that nobody calls backward on; torch's fused steps count no version."""
    (plain, theirs), (model, ours) = pair()
    torch.manual_seed(0)
    alone = Net()
    found = []
    for m, opt in ((alone, adamw(alone.parameters())), (plain, theirs), (model, ours)):
        losses = []
        for step in (0, 2, 3, 5):  # in which every block is used
            loss_of(m, step).backward()
            loss_of(m, step)
            opt.step()
            opt.zero_grad()
            losses.append(float(loss_of(m, step).detach()))
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == found[1]


@pytest.mark.parametrize("residency", [MIXED, DISK, "nvme"], ids=str)
def test_evaluations_and_writes_between_steps(residency, tmp_path):
    """The trace of a step does not know of them; shards that were written to are gathered anew."""
    (plain, theirs), (model, ours) = pair(residency=residency, nvme=str(tmp_path))
    for step in range(6):
        for m, opt in ((plain, theirs), (model, ours)):
            losses = losses_of(m, opt, range(step, step + 1))
            with torch.no_grad():
                losses.append(float(loss_of(m, 77)))
                m.layers[3][0].weight.mul_(0.5)
                m.embed.weight.mul_(0.5)
                losses.append(float(loss_of(m, 77)))
            if m is plain:
                expected = losses
        assert losses == expected
    assert_alike(plain, model)


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scale_skips_the_same_steps(fused):
    def run(residency, fused):
        model = net(residency)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused, foreach=False)
        optimizer = inner if residency is None else residency.optimizer(inner)
        scale = LossScale(None, initial=2.0**10, interval=2)
        for step in range(6):
            loss = loss_of(model, step) * (float("inf") if step in (1, 4) else 1.0)
            scale.scale(loss).backward()
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()
        assert scale.skipped == 2
        return model

    assert_alike(run(planned(), fused), run(None, True))


# -- memory, time, errors ------------------------------------------------------------------------------------------


def test_the_budget_is_never_passed_and_memory_that_is_there_is_used():
    plain = net(None)
    expected = losses_of(plain, adamw(plain.parameters()))
    states = []
    for budget in (21_000, 50_000, 90_000):
        residency = planned("auto", budget)
        model = net(residency)
        optimizer = residency.optimizer(adamw(model.parameters()))
        ledger = residency._engine.ledger
        ledger.limit = budget
        assert losses_of(model, optimizer) == expected
        assert ledger.peak <= budget
        states.append(len(residency._engine.plan.state))
    assert states[0] < states[1] < states[2]


def test_what_lies_beside_the_shards_is_left_free():
    residency = planned("auto", 100_000, observe=lambda: 60_000)
    model = net(residency)
    losses_of(model, residency.optimizer(adamw(model.parameters())))
    assert residency._engine.ledger.peak <= 50_000
    cramped = planned("auto", 100_000, observe=lambda: 105_000)
    model = net(cramped)
    optimizer = cramped.optimizer(adamw(model.parameters()))
    with pytest.raises(PlanError, match=r"too small for one layer at a time(.|\n)*at least [\d,]+ bytes"):
        losses_of(model, optimizer)


def test_a_step_runs_until_its_shards_are_needed():
    """`step` returns while a late chunk is not stepped; the forward waits for that chunk."""
    (plain, theirs), (model, ours) = pair(residency="host")
    assert losses_of(model, ours, range(3)) == losses_of(plain, theirs, range(3))
    gate, late = threading.Event(), ours._engine.chunks[-2]
    run = late.step.run
    late.step.run = lambda *args: (gate.wait(), run(*args))  # type: ignore[method-assign]
    for m, opt in ((model, ours), (plain, theirs)):
        loss_of(m, 0).backward()
        opt.step()
    assert late._stepping is not None and not late._stepping.done()
    reached = []
    model.layers[0].register_forward_pre_hook(lambda *_: reached.append("first"))
    first = ours._engine.chunks[0]
    assert first.name.startswith(("embed", "layers.0"))
    threading.Thread(target=lambda: (first.finish_step(), reached.append("open"), gate.set())).start()
    with torch.no_grad():
        assert torch.equal(loss_of(model, 1), loss_of(plain, 1))
    assert "open" in reached, "the forward used a chunk that was not stepped"
    assert late._stepping is None


def test_errors():
    with pytest.raises(PlanError, match="unknown residency"):
        ChunkResidency("tape")
    for disk in ("nvme", Tiers(disk=0.5), Tiers(disk_weights=0.5)):
        with pytest.raises(PlanError, match="no directory for state on the disk"):
            ChunkResidency(disk)
    with pytest.raises(PlanError, match="memory is not known"):
        net(ChunkResidency("auto"))
    with pytest.raises(
        PlanError, match=r"one layer at a time(.|\n)*5KB(.|\n)*more than [\d,]+ bytes(.|\n)*layers"
    ):
        net(ChunkResidency("auto", device_memory="5KB"))
    residency = planned("host")
    assert isinstance(residency, Residency)
    with pytest.raises(PlanError, match="no shards to step yet"):
        residency.optimizer(adamw(Net().parameters()))
    model = net(residency)
    with pytest.raises(PlanError, match="already has a model's shards"):
        net(residency)
    with pytest.raises(PlanError, match="does not have"):
        residency.optimizer(adamw(Net().parameters()))
    meshed = Lamb(model.parameters())
    meshed.mesh = "a mesh"
    with pytest.raises(PlanError, match=r"communicates(.|\n)*Lamb"):
        residency.optimizer(meshed)
    residency.optimizer(adamw(model.parameters()))
    with pytest.raises(PlanError, match="already have an optimizer"):
        residency.optimizer(adamw(model.parameters()))
    short = ChunkResidency("host", host_memory="10KB")
    model = net(short)
    with pytest.raises(PlanError, match=r"host memory is too small(.|\n)*10KB(.|\n)*[\d,]+ bytes"):
        short.optimizer(adamw(model.parameters()))
