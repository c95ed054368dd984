"""Conversion of models to FP8 linear layers: which layers, what stays, how close the results are."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from kernel_checks import DEVICE
from torch import nn

from cai_kernels import Fp8Linear, KernelError, convert_to_fp8, swap

LAYERS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
NAMES = [f"model.layers.{i}.{name}" for i in range(2) for name in LAYERS]


def config(**options) -> hf.LlamaConfig:
    return hf.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        **options,
    )


def llama(**options) -> nn.Module:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(config(**options)).to(DEVICE, torch.bfloat16)


def loss_and_gradients(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    return output.logits.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_a_llama_computes_the_same_but_for_fp8(scaling):
    plain = llama()
    model = copy.deepcopy(plain)
    assert convert_to_fp8(model, scaling=scaling) == NAMES
    (want, want_gradients), (got, gradients) = loss_and_gradients(plain), loss_and_gradients(model)
    assert not torch.equal(got, want)
    assert (got - want).float().norm() < 0.08 * want.float().norm()
    for name, gradient in want_gradients.items():
        assert (gradients[name] - gradient).float().norm() < 0.16 * gradient.float().norm(), name


def test_what_is_converted_and_what_stays():
    model = llama(attention_bias=True).eval()
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.model.layers[0].mlp.up_proj.train()
    model.model.layers[1].mlp.up_proj.note = "kept"
    names = convert_to_fp8(
        model,
        scaling="row",
        fast_accumulate=False,
        backend="reference",
        skip=lambda name, layer: name.endswith("down_proj") and layer.in_features == 128,
    )
    assert names == [name for name in NAMES if "down_proj" not in name]
    for name in names:
        layer = model.get_submodule(name)
        assert type(layer) is Fp8Linear and layer.training == (name == "model.layers.0.mlp.up_proj")
        how = layer.linear_products
        assert (how.scaling, how.fast_accumulate, how.backend) == ("row", False, "reference")
    assert type(model.lm_head) is nn.Linear and type(model.model.layers[0].mlp.down_proj) is nn.Linear
    assert model.model.layers[1].mlp.up_proj.note == "kept"
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    weight = model.model.layers[0].self_attn.q_proj.weight
    old = weight.detach().clone()
    loss_and_gradients(model)
    optimizer.step()
    assert not torch.equal(weight, old)
    with pytest.raises(KernelError, match="no linear layer"):
        convert_to_fp8(model, skip=lambda name, layer: "down_proj" in name)


class Shared(nn.Module):
    """One layer under two names, and two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32, device=DEVICE)
        self.second = self.first
        self.layers = nn.ModuleList([nn.Linear(32, 32, bias=False, device=DEVICE) for _ in range(2)])
        self.layers[1].weight = self.layers[0].weight
        self.odd = nn.Linear(32, 24, device=DEVICE)


def test_shared_layers_and_tied_weights():
    model = Shared()
    assert convert_to_fp8(model) == ["first", "layers.0", "layers.1"]
    assert type(model.first) is Fp8Linear and model.second is model.first
    assert model.layers[0] is not model.layers[1] and model.layers[0].weight is model.layers[1].weight
    assert model.layers[0].bias is None and type(model.odd) is nn.Linear
    model = Shared()
    assert convert_to_fp8(model, skip=lambda name, _: name == "second") == ["layers.0", "layers.1"]
    assert type(model.first) is nn.Linear and model.second is model.first


def test_tied_embeddings_stay_tied():
    model = llama(tie_word_embeddings=True)
    assert convert_to_fp8(model) == NAMES
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config())
    assert convert_to_fp8(model) == NAMES
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device=DEVICE)
    rotary = type(model.model.rotary_emb)(model.config)
    model.model.rotary_emb = rotary.to(DEVICE)  # its buffers had no values
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    assert loss_and_gradients(model)[0].isfinite().all()


def test_gpt2_has_nothing_to_convert():
    model = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=96, n_positions=32))
    before = [type(module) for module in model.modules()]
    with pytest.raises(KernelError, match="no linear layer"):
        convert_to_fp8(model)
    assert [type(module) for module in model.modules()] == before


def changed_by(change: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 32))
    layer = model[2]
    if change == "forward hook":
        layer.register_forward_hook(lambda *_: None)
    elif change == "forward pre-hook":
        layer.register_forward_pre_hook(lambda *_: None)
    elif change == "backward hook":
        layer.register_full_backward_hook(lambda *_: None)
    elif change == "state dict hook":
        layer.register_state_dict_post_hook(lambda *_: None)
    elif change == "forward":
        layer.forward = lambda x: x
    elif change == "buffer":
        layer.register_buffer("mask", torch.ones(16))
    elif change == "compile":
        layer.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    "change",
    ["forward hook", "forward pre-hook", "backward hook", "state dict hook", "forward", "buffer", "compile"],
)
def test_a_layer_that_was_changed_is_refused(change):
    model = changed_by(change)
    with pytest.raises(KernelError, match="'2' was changed by another transform") as refusal:
        convert_to_fp8(model)
    assert "before other transforms" in str(refusal.value)
    assert type(model[0]) is type(model[2]) is nn.Linear
    assert convert_to_fp8(model, skip=lambda name, _: name == "2") == ["0"]


def test_a_converted_model_can_be_swapped():
    model = llama()
    convert_to_fp8(model)
    plain = loss_and_gradients(model)[0]
    model.zero_grad()
    swapped = swap(model, kinds=("norm", "activation"))
    assert any(entry.kind == "activation" for entry in swapped.replaced)
    torch.testing.assert_close(loss_and_gradients(model)[0], plain, rtol=0.05, atol=0.05)


def test_errors_name_the_argument():
    model = nn.Sequential(nn.Linear(16, 16))
    for wrong, said in (
        ({"scaling": "channel"}, "unknown scaling"),
        ({"backend": "fast"}, "unknown backend"),
    ):
        with pytest.raises(KernelError, match=said):
            convert_to_fp8(model, **wrong)
    with pytest.raises(KernelError, match="from_linear"):
        convert_to_fp8(model[0])
    assert type(model[0]) is nn.Linear
