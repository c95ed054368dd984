"""The loss and the logits of a cut model are its own: whole by default, and cut only where that is asked for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from cai_mesh.errors import PlanError
from cai_mesh.testing import run_ranks
from cai_tensor_parallel import gather_logits, parallelize

VOCAB = 97
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
}
OPTIONS = {
    "mean": {},
    "items in batch": {"num_items_in_batch": 5},
    "ignored": {"ignore_index": 7},
    "masked": {},
}


def model_of(name):
    torch.manual_seed(0)
    auto = AutoModelForMaskedLM if name == "eurobert" else AutoModelForCausalLM
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id"), 0)
    model = auto.from_config(AutoConfig.for_model(name, **SIZES, **special)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.2)
    return model


def batch(masked=False):
    ids = torch.randint(1, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 3] = 7
    if masked:
        labels[:, ::2] = -100
    return ids, labels


def own_loss(logits, labels, vocab_size, **_):
    """Smoothed, of this token and not the next."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def losses(name, case, logits):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole, model = model_of(name), model_of(name)
    if case == "its own":
        whole.loss_function = model.loss_function = own_loss
    model = parallelize(model, mesh, logits=logits)
    ids, labels = batch(case == "masked")
    try:
        got = model(input_ids=ids, labels=labels, **OPTIONS.get(case, {})).loss
    except PlanError as error:
        return str(error)
    expected = whole(input_ids=ids, labels=labels, **OPTIONS.get(case, {})).loss
    got.backward()
    expected.backward()
    norm = dict(whole.named_parameters())["model.norm.weight"].grad
    torch.testing.assert_close(
        dict(model.named_parameters())["model.norm.weight"].grad, norm, rtol=1e-5, atol=1e-7
    )
    return float(got.detach()) - float(expected.detach())


@pytest.mark.parametrize("case", [*OPTIONS, "its own"])
@pytest.mark.parametrize("name", ["llama", "eurobert"])
def test_the_loss_is_the_models_own(name, case):
    for got in run_ranks(2, losses, name, case, "whole"):
        assert abs(got) < 1e-6


@pytest.mark.parametrize(
    ("name", "case"), [("llama", "mean"), ("llama", "items in batch"), ("llama", "masked")]
)
def test_cut_logits_have_the_loss_of_next_tokens(name, case):
    for got in run_ranks(2, losses, name, case, "sharded"):
        assert abs(got) < 1e-6


@pytest.mark.parametrize(("name", "case"), [("eurobert", "mean"), ("llama", "its own")])
def test_cut_logits_refuse_another_loss(name, case):
    for got in run_ranks(2, losses, name, case, "sharded"):
        assert "from cut logits" in got and "whole" in got


def logits_and_text():
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole, model = model_of("llama"), parallelize(model_of("llama"), mesh)
    ids, labels = batch()
    torch.testing.assert_close(model(input_ids=ids).logits, whole(input_ids=ids).logits)
    grads = []
    for each in (whole, model):
        F.cross_entropy(
            each(input_ids=ids).logits.flatten(0, 1), labels.flatten(), label_smoothing=0.2
        ).backward()
        grads.append(each.model.norm.weight.grad)
    torch.testing.assert_close(*grads)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), whole.generate(ids, **options))
    cut = parallelize(model_of("llama"), mesh, logits="sharded")(input_ids=ids).logits
    assert cut.shape[-1] < VOCAB
    torch.testing.assert_close(gather_logits(cut, VOCAB, mesh.get_group()), whole(input_ids=ids).logits)
    with pytest.raises(PlanError, match="did you mean 'sharded'"):
        parallelize(model_of("llama"), mesh, logits="shard")


def test_logits_are_whole_for_a_loss_of_ones_own_and_for_generate():
    run_ranks(2, logits_and_text)
