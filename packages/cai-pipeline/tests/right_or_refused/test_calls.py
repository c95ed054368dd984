"""However a split model is called, its stages do what the whole model does, or refuse the call on every rank."""

from __future__ import annotations

import pytest
import torch
from odd_llamas import ODD, build
from pipeline_families import sum_tied_gradients, token_ids
from torch.distributed.device_mesh import init_device_mesh
from transformers.modeling_outputs import CausalLMOutputWithPast

from cai_mesh.errors import PlanError
from cai_mesh.layout import canonical_name
from cai_mesh.testing import run_ranks
from cai_pipeline import PipelineRunner, split

CALLS = {
    "plain": {},
    "positions": {"position_ids": torch.arange(3, 12).repeat(2, 1)},
    "mask": {"attention_mask": torch.tensor([[1] * 9, [1] * 6 + [0] * 3])},
    "wide mask": {"attention_mask": torch.zeros(2, 1, 9, 9, dtype=torch.float64)},
    "items": {"num_items_in_batch": 7},
    "items on the device": {"num_items_in_batch": torch.tensor(7)},
    "no cache": {"use_cache": False},
    "hidden states": {"output_hidden_states": True},
    "routers, unused": {"output_router_logits": False},
}


def differences(name, training, call, layers=4):
    """The largest difference to the whole model: of the loss, and of gradients; or the refusal."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    whole = build(name, layers).train(training)
    inputs = {"input_ids": token_ids(1), "labels": token_ids(2), **call}
    try:
        model = split(build(name, layers).train(training), mesh)
        runner = PipelineRunner(model, mesh, microbatches=2, loss_fn=lambda output, _: output.loss / 2)
        got = runner.step([inputs, inputs], [None, None])
    except PlanError as error:
        return str(error)
    sum_tied_gradients(model)
    expected = whole(**inputs).loss
    expected.backward()
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    held = {canonical_name(n, p): p.grad for n, p in model.named_parameters() if p.grad is not None}
    largest = max(float((held[n] - wanted[n]).abs().max() / wanted[n].abs().max()) for n in held)
    return max(largest, abs(float(got) - float(expected.detach())))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("case", list(CALLS))
def test_calls_that_are_right(case, training):
    name = "mixtral" if case.startswith("routers") else "llama"
    for got in run_ranks(2, differences, name, training, CALLS[case]):
        assert got < 1e-6


REFUSED = {
    "routers": ("mixtral", {"output_router_logits": True}, "loss off by"),
    "mask of text": ("llama", {"attention_mask": {"full_attention": None}}, "attention_mask"),
    "unknown tensor": ("llama", {"something": torch.zeros(2, 9, 500)}, "something"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_calls_that_cannot_be_split_are_refused(case):
    name, call, message = REFUSED[case]
    for got in run_ranks(2, differences, name, True, call):
        assert message in str(got)


CACHE = next(
    name for name in ("cache", "past_key_values") if name in CausalLMOutputWithPast.__dataclass_fields__
)
"""What Transformers calls it, before and since 5.24."""


def of_hidden_states(output):
    return output.loss + sum(state.square().mean() for state in output.hidden_states)


def of_the_cache(output):
    return output.loss + output[CACHE].layers[0].keys.mean()


@pytest.mark.parametrize(
    ("loss", "call", "entry"),
    [
        (of_hidden_states, {"output_hidden_states": True}, "hidden_states"),
        (of_the_cache, {"use_cache": True}, CACHE),
    ],
)
def test_a_loss_of_what_other_stages_have_is_refused(loss, call, entry):
    first, last = run_ranks(2, asked_for, loss, call)
    assert first is None
    assert f"does not have the model's '{entry}'" in last


def asked_for(loss, call):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model = split(build("llama"), mesh)
    runner = PipelineRunner(model, mesh, microbatches=1, loss_fn=lambda output, _: loss(output))
    output = runner.forward({"input_ids": token_ids(1), "labels": token_ids(2), **call})
    if mesh.get_local_rank() == 0:
        return output
    with pytest.raises(PlanError) as refusal:
        loss(output)
    assert "NotHere" in repr(output)
    return str(refusal.value)


OUTCOMES = {
    "Base": "",
    "NoiseFirst": "",
    "SharedNoise": "computes something else",
    "SometimesShorter": "leaves out layers",
}


@pytest.mark.parametrize("name", list(OUTCOMES))
def test_randomness_outside_layers(name):
    for got in run_ranks(2, steps, name):
        assert OUTCOMES[name] in got


def steps(name):
    """One step in evaluation mode, which all of them can do, and one in training mode."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model = split(build(name), mesh)
    runner = PipelineRunner(model, mesh, microbatches=1, loss_fn=lambda output, _: output.loss)
    batch = [{"input_ids": token_ids(1), "labels": token_ids(2)}]
    model.eval()
    runner.step(batch, [None])
    model.train()
    try:
        runner.step(batch, [None])
    except PlanError as error:
        return str(error)
    return ""


def test_every_layer_is_tried():
    for got in run_ranks(2, differences, "LateSkip", False, {}, 12):
        assert "computes something else" in got


def test_a_flag_is_tried_by_its_value():
    for got in run_ranks(2, differences, "Base", False, {"shift": False}):
        assert got < 1e-6
    for got in run_ranks(2, differences, "Base", False, {"shift": True}):
        assert "output off by" in got


def test_the_odd_ones_are_all_tested():
    assert set(ODD) == {*OUTCOMES, "LateSkip"}
