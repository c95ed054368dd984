"""A checkpoint of any stage and number of ranks goes on as any other, as if nothing had happened."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from over_ranks import full_values
from torch import nn

from cai_mesh import checkpoint
from cai_mesh.errors import CheckpointError
from cai_mesh.gradients import clip_grad_norm_
from cai_mesh.layout import BoxedTensor
from cai_mesh.testing import RankError, assert_same_as_one_device, run_ranks
from cai_zero import MixedPrecision, optimizer_state, restore_groups, shard_module, shard_optimizer, state

state.AT_ONCE = 64  # a few of this small model's parameters: its state is made in several steps
BATCH, STEPS, WIDTH = 24, 3, 6
SCHEDULE = "schedule"


@dataclass(frozen=True)
class Leg:
    """Some steps of the run on one stage and mesh."""

    stage: int
    shape: tuple[int, ...]

    @property
    def world(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.stage}@{'x'.join(map(str, self.shape))}"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.arange(1, WIDTH + 1) / 4, requires_grad=False)
        self.head = nn.Linear(WIDTH, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x * self.scale)


def build(seed: int, dtype: torch.dtype):
    torch.manual_seed(seed)
    return Net().to(dtype)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in named if "bias" not in n], "weight_decay": 0.1},
            {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0, "lr": 5e-3},
        ],
        lr=1e-2,
    )


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 4))


def loss_of(model: nn.Module, step: int, rank: int, world: int) -> torch.Tensor:
    ids = torch.randint(0, 13, (BATCH, 5), generator=torch.Generator().manual_seed(step))
    mine = ids[rank * BATCH // world : (rank + 1) * BATCH // world]
    logits = model(mine[:, :-1]).flatten(0, 1)
    return nn.functional.cross_entropy(logits.double(), mine[:, 1:].flatten())


def twin(steps: int):
    """The uninterrupted run in one process."""
    model = build(0, torch.float64)
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    trained = [p for p in model.parameters() if p.requires_grad]
    losses = []
    for step in range(steps):
        loss = loss_of(model, step, 0, 1)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    found = {n: p.detach() for n, p in model.named_parameters()}
    names = {id(p): n for n, p in model.named_parameters()}
    for param, slots in optimizer.state.items():
        found |= {f"optimizer.{names[id(param)]}.{slot}": value for slot, value in slots.items()}
    return losses, found


def state_of(model: nn.Module, optimizer, stage: int) -> dict:
    """Weights by name, the optimizer's state and its groups, for `cai_mesh.checkpoint`."""
    named = {n: BoxedTensor.from_param(p) for n, p in model.named_parameters()}
    if stage == 3:
        return named | prefixed(optimizer_state(optimizer, model))
    frozen = {n: named[n] for n, p in model.named_parameters() if not p.requires_grad}
    return frozen | optimizer.weights() | prefixed(optimizer.state_for_checkpoint())


def prefixed(state: dict) -> dict:
    return {f"optimizer.{name}": value for name, value in state.items()}


def leg_of(leg: Leg, start: int, folder: str, compute: torch.dtype | None):
    """Resume unless it is the first leg, train, save: (losses, what was loaded, what was saved)."""
    mesh = dist.init_device_mesh(
        "cpu", leg.shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(leg.shape) :]
    )
    rank, world = dist.get_rank(), dist.get_world_size()
    dtype = torch.float64 if compute is None else torch.float32
    model, precision = build(start, dtype), MixedPrecision(compute=compute)
    if leg.stage == 3:
        shard_module(model, mesh, precision=precision)
        optimizer = optimizer_of(model)
    else:
        optimizer = shard_optimizer(
            optimizer_of(model), mesh, model=model, stage=leg.stage, precision=precision
        )
    schedule, loaded = schedule_of(optimizer), {}
    if start:
        state = state_of(model, optimizer, leg.stage)
        values = checkpoint.load(folder, state)
        restore_groups(optimizer if leg.stage == 3 else optimizer.inner, values["optimizer.param_groups"])
        schedule.load_state_dict(values[SCHEDULE])
        if leg.stage < 3:
            optimizer.publish()
        loaded = full_values(state_of(model, optimizer, leg.stage))
    losses = torch.zeros(STEPS, dtype=torch.float64)
    for step in range(start, start + STEPS):
        loss = loss_of(model, step, rank, world)
        loss.backward()
        if leg.stage == 3:
            clip_grad_norm_(model.parameters(), 0.5, mesh)
        else:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses[step - start] = loss.detach()
    dist.all_reduce(losses)
    state = state_of(model, optimizer, leg.stage)
    plain = {k: v for k, v in schedule.state_dict().items() if k not in ("lr_lambdas",)}
    checkpoint.save(folder, state | {SCHEDULE: plain | {"lr_lambdas": [None, None]}}, step=start + STEPS)
    return (losses / world).tolist(), loaded, full_values(state)


def run(legs: list[Leg], folder: Path, compute: torch.dtype | None):
    """Losses of all steps and what the last leg held; what each leg loads is bitwise what the one before saved."""
    losses: list[float] = []
    saved: dict[str, torch.Tensor] = {}
    for leg in legs:
        results = run_ranks(leg.world, leg_of, leg, len(losses), str(folder), compute, timeout=60)
        for _, loaded, _ in results:
            assert set(loaded) == set(saved)
            different = [n for n, value in saved.items() if not torch.equal(loaded[n].to(value.dtype), value)]
            assert not different, f"{leg} loads other values"
        losses, saved = losses + results[0][0], results[0][2]
    return losses, saved


CHAINS = [
    [Leg(1, (2,)), Leg(3, (3,)), Leg(0, (1,)), Leg(2, (4,))],
    [Leg(3, (4,)), Leg(2, (2,)), Leg(1, (3,)), Leg(3, (2, 2))],
]


def name_of(legs: list[Leg]) -> str:
    return "-".join(map(str, legs))


@pytest.mark.parametrize("legs", CHAINS, ids=name_of)
def test_training_goes_on_over_any_stage_and_world(legs: list[Leg], tmp_path: Path):
    check(legs, tmp_path)


def check(legs: list[Leg], folder: Path):
    expected, params = twin(STEPS * len(legs))
    losses, held = run(legs, folder, None)
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-9, atol=0)
    assert_same_as_one_device(held, params, tolerance=1e-9)


@pytest.mark.parametrize("legs", CHAINS, ids=name_of)
def test_float32_masters_of_bfloat16_weights_are_kept(legs: list[Leg], tmp_path: Path):
    losses, held = run(legs, tmp_path, torch.bfloat16)
    assert all(v.dtype == torch.float32 for n, v in held.items() if n != "scale")
    assert any(not torch.equal(v, v.bfloat16().float()) for v in held.values()), "weights were rounded"
    assert losses[-1] < losses[0]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "legs",
    [
        [Leg(stage, (8,)), Leg((stage + 1) % 4, (4,)), Leg((stage + 2) % 4, (6,)), Leg((stage + 3) % 4, (8,))]
        for stage in range(4)
    ],
    ids=name_of,
)
def test_eight_four_six_eight(legs: list[Leg], tmp_path: Path):
    check(legs, tmp_path)


# -- memory --------------------------------------------------------------------------------------------------------

LAYERS, MEGABYTE = 24, 1 << 20


def peak_of(action) -> int:
    """Bytes by which this process grows, at most, while `action` runs."""
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that malloc holds would hide what is taken
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory("VmRSS")
    action()
    return memory("VmHWM") - before


def memory(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def growth(stage: int, folder: str):
    """By how much a rank grows while it saves and loads, and what it holds, in bytes."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model = nn.Sequential()
    model.layers = nn.ModuleList(nn.Linear(1024, 512, bias=False) for _ in range(LAYERS))
    if stage == 3:
        shard_module(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        state = {n: BoxedTensor.from_param(p) for n, p in model.named_parameters()}
        state |= prefixed(optimizer_state(optimizer, model))
    else:
        inner = torch.optim.AdamW(model.parameters())
        optimizer = shard_optimizer(inner, mesh, model=model, stage=stage)
        state = optimizer.weights() | prefixed(optimizer.state_for_checkpoint())
    held = sum(view.nbytes for v in state.values() if isinstance(v, BoxedTensor) for _, view in v.pieces)
    saving = peak_of(lambda: checkpoint.save(folder, state, step=1))
    loading = peak_of(lambda: checkpoint.load(folder, state))
    return saving, loading, held


@pytest.mark.parametrize("stage", [1, 3])
def test_saving_and_loading_take_the_memory_of_a_tensor_and_not_of_the_model(stage: int, tmp_path: Path):
    for saving, loading, held in run_ranks(2, growth, stage, str(tmp_path)):
        assert held > 70 * MEGABYTE
        assert saving < 16 * MEGABYTE
        assert loading < 16 * MEGABYTE


def wider(folder: str):
    model = shard_module(nn.Linear(8, 8), dist.init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    checkpoint.load(folder, {n: BoxedTensor.from_param(p) for n, p in model.named_parameters()})


def narrow(folder: str):
    model = shard_module(nn.Linear(8, 4), dist.init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    checkpoint.save(folder, {n: BoxedTensor.from_param(p) for n, p in model.named_parameters()}, step=1)


def test_a_checkpoint_of_another_model_is_refused_by_all_ranks(tmp_path: Path):
    run_ranks(2, narrow, str(tmp_path))
    with pytest.raises(RankError, match=CheckpointError.__name__) as caught:
        run_ranks(2, wider, str(tmp_path))
    assert str(caught.value).count("(4, 8)") >= 2
