"""What is attached to a parameter stays with the module, or the change that would lose it is refused."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from cai_mesh.errors import LayoutError
from cai_mesh.layout import (
    Layout,
    ReduceSpec,
    Shard,
    attach,
    attach_to,
    canonical_name,
    keep_attached,
    layout_of,
    record_of,
    reduce_of,
    refresh,
    sites,
)
from cai_mesh.storage import ModuleLifecycle

CUT = Layout((8, 4)).then("tp", 2, 1, Shard(0))
SPEC = ReduceSpec(("dp_shard",), divisor=3.0)


def cut_model(device="cpu"):
    """Two layers that share a weight, which is cut; a third one full."""
    model = nn.Sequential(*(nn.Linear(4, 4, device=device) for _ in range(3)))
    model[1].weight = model[0].weight
    for layer in model[:2]:
        attach_to(layer, "weight", CUT, name="the.weight", reduce=SPEC)
    return model


def assert_kept(model):
    for layer in model[:2]:
        assert layout_of(layer.weight) == CUT and reduce_of(layer.weight) == SPEC
        assert canonical_name("0.weight", layer.weight) == "the.weight"
    for other in (model[2].weight, model[0].bias):
        assert layout_of(other) == Layout(tuple(other.shape)) and canonical_name("x", other) == "x"


def test_attaching_keeps_what_is_there():
    model = cut_model()
    assert_kept(model)
    attach_to(model[0], "weight", reduce=ReduceSpec(divisor=1.0))
    assert layout_of(model[0].weight) == CUT and reduce_of(model[1].weight).divisor == 1.0
    with pytest.raises(LayoutError, match="does not describe this tensor"):
        attach_to(model[0], "weight", Layout((9, 4)))
    assert layout_of(model[0].weight) == CUT
    assert [(name, param is model[0].weight) for _, name, param in sites(model)] == [
        ("weight", True), ("bias", False), ("weight", True), ("bias", False), ("weight", False), ("bias", False)
    ]  # fmt: skip


@pytest.mark.parametrize("change", ["deepcopy", "twice", "child", "pickle"])
def test_copies_keep_it(change):
    model = cut_model()
    if change == "pickle":
        stream = io.BytesIO()
        torch.save(model, stream)
        other = torch.load(io.BytesIO(stream.getvalue()), weights_only=False)
        refresh(other)
    elif change == "child":
        other = nn.Sequential(copy.deepcopy(model[0]), model[1], model[2])
    else:
        other = copy.deepcopy(model)
        other = copy.deepcopy(other) if change == "twice" else other
    assert other[0].weight is not model[0].weight
    assert_kept(other)
    attach_to(other[0], "weight", name="another.weight")
    assert_kept(model)
    other = copy.deepcopy(other)
    assert canonical_name("x", other[0].weight) == "another.weight"


def test_loading_by_assignment_keeps_it():
    model = cut_model()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = model[0].weight
    model.load_state_dict(state, assign=True)
    assert model[0].weight is not before
    assert_kept(model)
    model[0].load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)}, assign=True)
    assert_kept(model)


def test_the_next_forward_finds_parameters_that_were_replaced():
    model = cut_model("meta")
    keep_attached(model)
    model.to_empty(device="cpu")
    assert layout_of(model[0].weight) != CUT  # nobody was told
    model(torch.ones(1, 4))
    assert_kept(model)
    model[0].weight = model[1].weight = nn.Parameter(torch.ones(4, 4))
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each(torch.ones(1, 4))
        assert_kept(each)


def test_a_parameter_of_another_shape_is_refused():
    model = cut_model()
    model[0].weight = nn.Parameter(torch.ones(8, 4))  # the full one
    with pytest.raises(LayoutError, match="'weight' was replaced by one of another shape") as caught:
        refresh(model)
    assert "(4, 4)" in str(caught.value)


def test_what_was_attached_to_a_tensor_alone_is_recorded():
    model = nn.Linear(4, 4)
    attach(model.weight, CUT)
    assert record_of(copy.deepcopy(model).weight).layout is None
    refresh(model)
    assert layout_of(copy.deepcopy(model).weight) == CUT


class Listener:
    def __init__(self, refuses=False):
        self.calls, self.refuses = [], refuses

    def before_copy(self):
        self.calls.append("copy")
        if self.refuses:
            raise LayoutError("no copies")

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append(name)


def test_a_copy_of_a_watched_model_is_a_plain_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    lifecycle, listener = ModuleLifecycle({layer: list(layer.parameters()) for layer in model}), Listener()
    lifecycle.listen(listener)
    other = copy.deepcopy(model)
    assert set(listener.calls) == {"copy"}
    listener.calls.clear()
    other(torch.ones(1, 4)).sum().backward()
    assert not listener.calls and other[0].weight.grad is not None
    model(torch.ones(1, 4)).sum().backward()
    assert {"before_use", "after_use", "grads_ready", "backward_done"} <= set(listener.calls)
    lifecycle.listen(Listener(refuses=True))
    with pytest.raises(LayoutError, match="no copies"):
        copy.deepcopy(model)
