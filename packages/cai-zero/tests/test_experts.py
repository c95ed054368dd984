"""A toy layer of experts on dense and expert views of the same ranks equals one process, in every stage.

Every rank of an `ep` group sees the tokens of all of them and computes with the experts it has; the results are summed.
So a token travels through one expert, its gradient comes from all data ranks, and experts are shared by fewer ranks
(`edp`) than the layers around them (`dp_shard`).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zero_models import train_plainly

from cai_mesh import BoxedTensor, ParallelMesh, checkpoint, clip_grad_norm_
from cai_mesh.comm import DATA_AXES, EXPERT_GRADIENT_AXES, all_gather, reduce_scatter
from cai_mesh.errors import MeshError
from cai_mesh.gradients import flat_of
from cai_mesh.layout import Layout, ReduceSpec, Shard, attach_to
from cai_mesh.testing import assert_same_as_one_device, run_ranks
from cai_zero import optimizer_state, restore_groups, shard_module, shard_optimizer

WIDTH, EXPERTS, TOKENS, BATCH, STEPS = 6, 4, 3, 8, 3


class Experts(nn.Module):
    """Token number i of a sample goes to expert (its id) mod E."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 3)
        self.group, self.first = None, 0

    def forward(self, x, ids):
        """x [B, T, D], ids [B, T]."""
        shape, x = x.shape, x.flatten(0, 1)
        chosen = ids.flatten() % EXPERTS
        if self.group is not None:
            x = all_gather(x, 0, self.group)
            everyone = [torch.empty_like(chosen) for _ in range(self.group.size())]
            dist.all_gather(everyone, chosen, group=self.group)
            chosen = torch.cat(everyone)
        out = torch.zeros_like(x)
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            out = out + torch.tanh(x @ up) @ down * (chosen == self.first + i)[:, None]
        return reduce_scatter(out, 0, self.group).view(shape) if self.group is not None else out.view(shape)

    def split(self, mesh: ParallelMesh):
        """Keep this rank's experts."""
        degree, index = mesh.degree("ep"), mesh.index("ep")
        spec = ReduceSpec(EXPERT_GRADIENT_AXES, divisor=float(mesh.degree(DATA_AXES)))
        for name, full in list(self.named_parameters()):
            layout = Layout(tuple(full.shape)).then("ep", degree, index, Shard(0))
            part = nn.Parameter(full.detach().chunk(degree)[index].clone())
            setattr(self, name, part)
            attach_to(self, name, layout, reduce=spec)
        self.group, self.first = mesh.group("ep"), index * (EXPERTS // degree)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Experts()

    def forward(self, x, ids):
        return x + self.experts(torch.tanh(self.mix(self.norm(x))), ids)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 13, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, ids)
        return self.head(x)


def build():
    torch.manual_seed(4)
    return Net().double()


def loss_of(model, step, rank=0, world=1):
    ids = torch.randint(0, 13, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    mine = ids[rank * BATCH // world : (rank + 1) * BATCH // world]
    return nn.functional.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())


@dataclass(frozen=True)
class Leg:
    """A stage on a mesh of `shape` (dp_replicate, dp_shard) with `ep` ranks to a set of experts."""

    stage: int
    shape: tuple[int, int]
    ep: int

    @property
    def world(self):
        return self.shape[0] * self.shape[1]


def twin(steps):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = train_plainly(model, optimizer, loss_of, steps, clip=0.3)
    return losses, norms, {n: p.detach() for n, p in model.named_parameters()}


def state_of(model, optimizer, stage):
    if stage == 3:
        named = {n: BoxedTensor.from_param(p) for n, p in model.named_parameters()}
        held = optimizer_state(optimizer, model)
    else:
        named, held = optimizer.weights(), optimizer.state_for_checkpoint()
    return named | {f"optimizer.{name}": value for name, value in held.items()}


def train(leg, start, folder):
    mesh = dist.init_device_mesh("cpu", leg.shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    mesh = ParallelMesh.of(mesh, ep=leg.ep)
    model = build()
    for block in model.layers:
        block.experts.split(mesh)
    if leg.stage == 3:
        shard_module(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if leg.stage < 3:
        optimizer = shard_optimizer(optimizer, mesh, model=model, stage=leg.stage)
    held = {n: flat_of(p).numel() for n, p in model.named_parameters()}
    if start:
        values = checkpoint.load(folder, state_of(model, optimizer, leg.stage))
        restore_groups(optimizer if leg.stage == 3 else optimizer.inner, values["optimizer.param_groups"])
        if leg.stage < 3:
            optimizer.publish()
    losses, norms = torch.zeros(STEPS, dtype=torch.float64), []
    for step in range(start, start + STEPS):
        loss = loss_of(model, step, mesh.index(DATA_AXES), leg.world)
        loss.backward()
        norm = (
            clip_grad_norm_(model.parameters(), 0.3, mesh)
            if leg.stage == 3
            else optimizer.clip_grad_norm_(0.3)
        )
        optimizer.step()
        optimizer.zero_grad()
        losses[step - start] = loss.detach()
        norms.append(float(norm))
    dist.all_reduce(losses)
    state = state_of(model, optimizer, leg.stage)
    checkpoint.save(folder, state, step=start + STEPS)
    shapes = {n: tuple(p.shape) for n, p in build().named_parameters()}
    nothing = {n: BoxedTensor(shape, torch.float64, ()) for n, shape in shapes.items()}
    final = {n: state.get(n, nothing[n]).to_full(dist.group.WORLD) for n in shapes}
    return (losses / leg.world).tolist(), norms, final, held


def run(legs, folder):
    losses, norms = [], []
    for leg in legs:
        results = run_ranks(leg.world, train, leg, len(losses), str(folder))
        assert all(other[0] == results[0][0] and other[1] == results[0][1] for other in results)
        losses, norms = losses + results[0][0], norms + results[0][1]
    expected = twin(STEPS * len(legs))
    assert losses == pytest.approx(expected[0], rel=1e-9)
    assert norms == pytest.approx(expected[1], rel=1e-9)
    assert_same_as_one_device(results[0][2], expected[2], tolerance=1e-9)
    return results


@pytest.mark.parametrize("shape", [(1, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_equals_one_process(stage, shape, tmp_path):
    results = run([Leg(stage, shape, 2)], tmp_path)
    name = "layers.0.experts.up"
    cut = shape[1] // 2 if stage == 3 else 1  # of the four copies of an expert, those of one replica share it
    held = [result[3][name] for result in results]
    assert sum(held) == EXPERTS * WIDTH * 2 * WIDTH * 4 // 2 // cut


def test_checkpoints_move_between_views_and_stages(tmp_path):
    run(
        [Leg(1, (1, 4), 2), Leg(3, (1, 4), 4), Leg(0, (1, 2), 1), Leg(3, (2, 2), 2), Leg(2, (1, 2), 2)],
        tmp_path,
    )


def without_a_view():
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    whole = ParallelMesh.of(mesh, ep=2)
    for stage in (1, 3):
        model = build()
        for block in model.layers:
            block.experts.split(whole)
        inner = torch.optim.AdamW(model.parameters())
        shard = {
            1: lambda m=model, o=inner: shard_optimizer(o, mesh, model=m),
            3: lambda m=model: shard_module(m, mesh),
        }
        with pytest.raises(MeshError, match="without an expert view"):
            shard[stage]()
        loss_of(model, 0).backward()
        with pytest.raises(MeshError, match="that the mesh given for its norm lacks"):
            clip_grad_norm_(model.parameters(), 1.0, mesh)


def test_a_mesh_without_an_expert_view_is_refused():
    run_ranks(2, without_a_view)


BESIDE = (
    ("dp_replicate", "edp"),
    ("dp_shard", "edp"),
    ("dp_shard", "ep"),
    ("dp_replicate", "etp"),
    ("cp", "edp"),
    ("replica", "experts"),
)
"""Meshes as DeepSpeed-MoE's, Megatron's and torchtitan's ranks of experts would be written down, but in one view."""


def beside():
    """What each mesh and stage says, with dense parameters alone and with experts that know of the axis."""
    said = {}
    for names in BESIDE:
        mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
        if "experts" in names:
            mesh = ParallelMesh.of(mesh, axes={"dp_replicate": "replica", "edp": "experts"})
        for stage in range(4):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
            if names[1] == "edp":
                attach_to(model[1], "weight", reduce=ReduceSpec(EXPERT_GRADIENT_AXES))
            try:
                if stage == 3:
                    shard_module(model, mesh)
                else:
                    shard_optimizer(
                        torch.optim.SGD(model.parameters(), lr=0.1), mesh, model=model, stage=stage
                    )
                said[names, stage] = "nothing"
            except MeshError as error:
                said[names, stage] = str(error)
    return said


def test_dense_parameters_on_an_axis_of_experts_alone_are_refused():
    for said in run_ranks(2, beside):
        for (names, _), text in said.items():
            assert f"axis {names[1]!r}" in text and "ParallelMesh.of(mesh, ep=...)" in text
