"""A table cut over ranks trains as one plain table that sees all ranks' batches."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cai_gemini import CachedEmbedding, RowwiseAdagrad, ShardedEmbedding, lookahead
from cai_mesh import checkpoint
from cai_mesh.errors import DataError, PlanError
from cai_mesh.layout import BoxedTensor
from cai_mesh.testing import run_ranks

ROWS, DIM, STEPS, PADDING = 47, 5, 6, 40


def whole():
    return torch.randn(ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def batch(rank, step, mode):
    """Of another size on every rank; rank 1 has nothing in step 2."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 5, (4 + rank,), generator=generator)
    lengths[0] = 3
    if rank == 1 and step == 2:
        lengths.zero_()
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    ids[ids % 3 == 0] = PADDING
    weights = torch.rand(len(ids), dtype=torch.float64, generator=generator)
    return ids, None if mode is None else lengths.cumsum(0) - lengths, weights


def loss_of(module, mode, ids, offsets, weights):
    if mode is None:
        out = module(ids)
    elif mode == "sum":
        out = module(ids, offsets, per_sample_weights=weights)
    else:
        out = module(ids, offsets)
    return (out.tanh() * torch.arange(1, DIM + 1) * torch.arange(1, len(out) + 1)[:, None]).sum()


def make(name, params):
    return RowwiseAdagrad(params, lr=0.2) if name == "rowwise" else torch.optim.Adagrad(params, lr=0.2)


def build(by, mode, **options):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    options = {"cache": 0.9, "weight": whole(), "padding_idx": PADDING, "device": "cpu"} | options
    return ShardedEmbedding(mesh, ROWS, DIM, by=by, mode=mode, **options)


def train(by, mode, optimizer_name, ahead):
    rank = dist.get_rank()
    module = build(by, mode)
    optimizer = make(optimizer_name, module.parameters())
    stream = [batch(rank, step, mode) for step in range(STEPS)]
    if ahead:
        asked = [each[0] if mode is None else each[:2] for each in stream]
        stream = lookahead(stream, [module], lambda each: [asked.pop(0)], depth=1)
    losses, gradients = [], []
    for ids, offsets, weights in stream:
        optimizer.zero_grad()
        weights.requires_grad_(mode == "sum")
        loss = loss_of(module, mode, ids, offsets, weights)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        gradients.append(weights.grad)
    state = module.optimizer_state(optimizer)
    return (
        losses,
        gradients,
        BoxedTensor.from_param(module.table).to_full(dist.group.WORLD),
        {
            key: BoxedTensor.from_param(value).to_full(dist.group.WORLD)
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        },
    )


def train_plain(world, mode, optimizer_name):
    if mode is None:
        module = nn.Embedding(ROWS, DIM, sparse=True, padding_idx=PADDING, _weight=whole())
    else:
        module = nn.EmbeddingBag(ROWS, DIM, sparse=True, mode=mode, padding_idx=PADDING, _weight=whole())
    optimizer = make(optimizer_name, module.parameters())
    losses, gradients = [[] for _ in range(world)], [[] for _ in range(world)]
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world):
            ids, offsets, weights = batch(rank, step, mode)
            weights.requires_grad_(mode == "sum")
            loss = loss_of(module, mode, ids, offsets, weights)
            loss.backward()
            losses[rank].append(loss.item())
            gradients[rank].append(weights.grad)
        module.weight.grad /= world
        optimizer.step()
    return losses, gradients, module.weight.data, optimizer.state[module.weight]["sum"]


@pytest.mark.parametrize(
    "world, by, mode, optimizer, ahead",
    [
        (2, "rows", "sum", "adagrad", False),
        (3, "rows", "mean", "rowwise", True),
        (3, "rows", None, "adagrad", False),
        (2, "columns", "sum", "adagrad", True),
        (3, "columns", "mean", "adagrad", False),
        (2, "columns", None, "adagrad", False),
    ],
)
def test_ranks_train_as_one_process(world, by, mode, optimizer, ahead):
    losses, gradients, table, sums = train_plain(world, mode, optimizer)
    for rank, got in enumerate(run_ranks(world, train, by, mode, optimizer, ahead)):
        torch.testing.assert_close(got[0], losses[rank], rtol=1e-10, atol=1e-10)
        if mode == "sum":
            for mine, expected in zip(got[1], gradients[rank], strict=True):
                torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(got[2], table, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(got[3]["sum"], sums, rtol=1e-10, atol=1e-10)


def one_step(module, optimizer):
    ids, offsets, _ = batch(dist.get_rank() if dist.is_initialized() else 0, 0, "mean")
    loss_of(module, "mean", ids, offsets, None).backward()
    optimizer.step()
    optimizer.zero_grad()


def save(directory):
    module = build("rows", "mean")
    optimizer = make("adagrad", module.parameters())
    one_step(module, optimizer)
    checkpoint.save(directory, module.state_dict() | module.optimizer_state(optimizer), step=1)
    return BoxedTensor.from_param(module.table).to_full(dist.group.WORLD)


def load(directory):
    module = build("columns", "mean", weight=torch.zeros(ROWS, DIM, dtype=torch.float64))
    optimizer = make("adagrad", module.parameters())
    state = module.optimizer_state(optimizer)
    values = checkpoint.load(directory, module.state_dict() | state)
    module.load_optimizer_state(optimizer, state | values)
    return [
        BoxedTensor.from_param(value).to_full(dist.group.WORLD) for value in (module.table, state["sum"])
    ] + [optimizer.state[module.weight]["step"].item()]


def test_a_checkpoint_moves_between_cuts(tmp_path):
    table = run_ranks(2, save, tmp_path)[0]
    plain = CachedEmbedding(ROWS, DIM, device="cpu", mode="mean", cache=0.8, dtype=torch.float64)
    optimizer = make("adagrad", plain.parameters())
    state = plain.optimizer_state(optimizer)
    values = checkpoint.load(tmp_path, plain.state_dict() | state)
    plain.load_optimizer_state(optimizer, state | values)
    assert torch.equal(plain.table, table) and state["sum"].any()
    for got in run_ranks(3, load, tmp_path):
        assert torch.equal(got[0], table) and torch.equal(got[1], state["sum"]) and got[2] == 1


def initial(by):
    torch.manual_seed(11)
    module = build(by, None, weight=None, dtype=torch.float64)
    return BoxedTensor.from_param(module.table).to_full(dist.group.WORLD)


def test_initial_values_depend_on_no_layout():
    first = run_ranks(2, initial, "rows")[0]
    assert torch.equal(run_ranks(3, initial, "columns")[0], first)
    assert not first[PADDING].any() and first.std() > 0.9


def wrong(by):
    module = build(by, None)
    messages = []
    try:
        module(torch.tensor([0, ROWS if dist.get_rank() else 1]))
    except DataError as error:
        messages.append(str(error))
    for change in ({"weight": torch.zeros(3, DIM)}, {"frequencies": torch.ones(3)}, {"padding_idx": ROWS}):
        try:
            build(by, None, **change)
        except PlanError as error:
            messages.append(str(error))
    try:
        copy.deepcopy(module)
    except PlanError as error:
        messages.append(str(error))
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()))
    try:
        ShardedEmbedding(mesh, ROWS, DIM, by=by, device="cpu")
    except PlanError as error:
        messages.append(str(error))
    try:
        build("diagonals", None)
    except PlanError as error:
        messages.append(str(error))
    return messages


@pytest.mark.parametrize("by", ["rows", "columns"])
def test_errors_reach_every_rank(by):
    for messages in run_ranks(2, wrong, by):
        assert len(messages) == 7
        assert "rank 1 of 2 has such ids" in messages[0] and "0 to 46" in messages[0]


def too_many_ranks():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.raises(PlanError, match="leaves a rank with nothing"):
        ShardedEmbedding(mesh, 5, 1, by="columns", device="cpu")
    with pytest.raises(PlanError, match="leaves a rank with nothing"):
        ShardedEmbedding(mesh, 1, 8, by="rows", device="cpu")


def test_a_rank_with_nothing_is_refused():
    run_ranks(2, too_many_ranks)
