"""Blocks of a model and the chunk of one block."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.layout import Layout, ReduceSpec, Shard, attach, layout_of, record_of, reduce_of
from cai_mesh.storage import FlatUnit, Share, blocks, check_parameters


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 3), nn.ModuleList([nn.Linear(3, 3)])) for _ in "ab"
        )
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def names(found):
    return {module: [name for name, _ in params] for module, params in found.items()}


def test_outermost_elements_are_blocks_and_the_rest_is_the_models():
    model = Net()
    found = names(blocks(model))
    assert list(found) == [model.layers[0], model.layers[1], model], "order of first parameters, model last"
    assert found[model.layers[0]] == [
        "layers.0.0.weight",
        "layers.0.0.bias",
        "layers.0.1.0.weight",
        "layers.0.1.0.bias",
    ]
    assert found[model] == ["embed.weight"], "a tied parameter is listed once"


def test_a_parameter_of_two_blocks_is_the_models():
    model = Net()
    model.layers[1][0].weight = model.layers[0][0].weight
    found = names(blocks(model))
    assert "layers.0.0.weight" in found[model]
    assert not any("0.weight" in n and n.endswith("0.0.weight") for n in found[model.layers[0]])


def test_a_block_that_stands_twice_is_one():
    block = nn.Linear(2, 2)
    model = nn.Module()
    model.layers = nn.ModuleList([block, nn.Linear(2, 2), block])
    found = names(blocks(model))
    assert found == {
        block: ["layers.0.weight", "layers.0.bias"],
        model.layers[1]: ["layers.1.weight", "layers.1.bias"],
    }


def test_lists_of_lists_are_looked_into():
    model = nn.Module()
    model.stages = nn.ModuleList(
        [nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.ModuleDict({"x": nn.Linear(2, 2)})]
    )
    found = names(blocks(model))
    assert list(found) == [*model.stages[0], model], "a list is never called: no hook of it would fire"


def test_canonical_names_and_models_of_one_list():
    model = nn.ModuleList([nn.Linear(2, 2), None, nn.Linear(2, 2)])
    attach(model[2].weight, name="elsewhere.weight")
    found = names(blocks(model))
    assert found == {model[0]: ["0.weight", "0.bias"], model[2]: ["elsewhere.weight", "2.bias"]}
    assert blocks(nn.Module()) == {}


def unit_of(model, index=0, world=2):
    options = {
        "share": Share(world, index, frozenset({"dp_shard"})),
        "master": torch.float32,
        "compute": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    return FlatUnit(model, list(model.named_parameters()), **options)


def test_the_unsharded_chunk_comes_and_goes_under_the_same_names():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30))
    original = {n: p.detach().clone() for n, p in model.named_parameters()}
    before = list(model.parameters())
    unit = unit_of(model, world=1)
    assert [n for n, _ in model.named_parameters()] == list(original)
    assert all(p.dim() == 1 for p in model.parameters())
    assert all(p.untyped_storage().nbytes() == 0 for p in before), "the original parameters stay in memory"
    assert unit.unsharded.untyped_storage().nbytes() == 0
    unit.allocate_storage()
    unit.unsharded.copy_(unit.shard)
    unit.swap_in()
    assert unit.is_unsharded
    for name, param in model.named_parameters():
        assert param.dtype == torch.bfloat16
        assert torch.equal(param, original[name].bfloat16())
    unit.free_storage()
    assert not unit.is_unsharded
    assert unit.unsharded.untyped_storage().nbytes() == 0
    for name, param in model.named_parameters():
        assert torch.equal(param.view(original[name].shape), original[name])


def test_shards_are_views_with_layouts_spans_and_gradients():
    model = nn.Linear(20, 30)
    attach(model.weight, Layout((60, 20)).then("tp", 2, 1, Shard(0)))
    units = [unit_of_copy(model, index) for index in range(3)]
    assert sum(u.kept[0].numel() for u in units) == 600
    assert [record_of(u.kept[0]).slices[0].range for u in units] == [(0, 256), (256, 512), (512, 600)]
    for unit in units:
        weight, bias = unit.kept
        assert record_of(weight).slices[0].layout.global_shape == (60, 20)
        assert record_of(weight).slices[0].axes == {"tp", "dp_shard"}
        assert record_of(bias).slices[0].axes == {"dp_shard"}
        gradient = torch.arange(256.0)
        unit.set_shard_gradient(gradient)
        assert weight.grad.data_ptr() == gradient.data_ptr()
        assert weight.grad.numel() == weight.numel()
        assert unit.shard_gradient is gradient
        weight.data.fill_(3)
        assert unit.shard[: weight.numel()].eq(3).all()


def unit_of_copy(model, index):
    copy = nn.Linear(20, 30)
    attach(copy.weight, layout_of(model.weight))
    return unit_of(copy, world=3, index=index)


def test_cleared_gradients_start_again():
    unit = unit_of(nn.Linear(10, 10), world=1)
    unit.set_shard_gradient(torch.ones(256))
    for param in unit.kept:
        param.grad = None
    assert unit.shard_gradient is None
    unit.set_shard_gradient(torch.ones(256))
    unit.kept[1].grad = None  # an optimizer of its own cleared only this one
    gradient = unit.shard_gradient
    assert gradient is not None
    gradient.add_(1.0)
    assert unit.kept[0].grad.eq(2).all()
    assert unit.kept[1].grad.eq(1).all()


def test_scalars_and_empty_parameters_live_in_chunks():
    model = nn.Module()
    model.scalar, model.none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 3))
    for index in range(2):
        copy = nn.Module()
        copy.scalar, copy.none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 3))
        unit = unit_of(copy, index=index)
        assert [p.numel() for p in unit.kept] == [1 - index, 0]
        assert unit.used[0].shape == ()
        assert unit.used[1].shape == (0, 3)


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (torch.zeros(2, dtype=torch.int64), "cannot be sharded"),
        (torch.zeros(2, dtype=torch.complex64), "cannot be sharded"),
        (torch.eye(2).to_sparse(), "cannot be sharded"),
        (torch.zeros(2, device="meta"), "meta tensor"),
    ],
)
def test_what_cannot_live_in_a_chunk_is_refused(tensor, match):
    with pytest.raises(PlanError, match=match) as caught:
        check_parameters([("a.b", tensor)])
    assert "'a.b'" in str(caught.value)


def test_a_parameter_outside_the_model_is_refused():
    with pytest.raises(PlanError, match="not part of the model"):
        FlatUnit(
            nn.Linear(2, 2),
            [("x", nn.Parameter(torch.zeros(2)))],
            master=torch.float32,
            compute=torch.float32,
            device=torch.device("cpu"),
        )
    assert reduce_of(torch.zeros(1)) == ReduceSpec()
