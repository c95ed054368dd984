"""Layers with quantized weights, and the conversion of models to them: what stays, what is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from kernel_checks import DEVICE
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from cai_kernels import KernelError, QuantizedLinear, convert_to_quantized

KINDS = ["nf4", "int8"]


def values(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def linear(inputs=64, outputs=32, bias=True):
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias, device=DEVICE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_its_linear_with_a_rounded_weight(kind):
    plain = linear().eval()
    layer = QuantizedLinear.from_linear(plain, kind)
    assert layer.bias is plain.bias and not layer.training
    assert not layer.weight.requires_grad and not layer.scales.requires_grad
    x = values(3, 64)
    torch.testing.assert_close(layer(x), F.linear(x, layer.dequantized(torch.float32), plain.bias))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    torch.testing.assert_close(layer.dequantized(torch.float32), plain.weight.detach(), rtol=0, atol=0.02)
    assert repr(layer) == f"QuantizedLinear(in_features=64, out_features=32, bias=True, kind={kind})"
    assert QuantizedLinear.from_linear(linear(bias=False), kind).bias is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.type(torch.bfloat16),
    ],
    ids=["to", "bfloat16", "half", "double", "type"],
)
def test_casts_change_neither_codes_nor_scales(cast, kind):
    model = nn.Sequential(QuantizedLinear.from_linear(linear(), kind))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weight, bias = cast(model)[0].weight, model[0].bias
    assert isinstance(weight, nn.Parameter) and bias.dtype != torch.float32
    for name in ("0.weight", "0.scales"):
        assert torch.equal(model.state_dict()[name], before[name])
    assert model.to("meta")[0].scales.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_files(kind, tmp_path):
    layer, x = QuantizedLinear.from_linear(linear(), kind), values(3, 64)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    loaded = QuantizedLinear(64, 32, device=DEVICE, kind=kind)
    assert not loaded(x).any()
    loaded.load_state_dict(torch.load(tmp_path / "layer.pt"))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert torch.equal(other(x), layer(x)) and other.weight.data_ptr() != layer.weight.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_written_later_is_the_one_quantized_first(kind):
    plain = linear()
    layer = QuantizedLinear.from_linear(plain.to("meta"), kind)
    assert layer.weight.is_meta and layer.scales.is_meta and layer.bias is plain.bias
    with pytest.raises(KernelError, match="no memory yet"):
        layer.write_weight(linear().weight)
    layer.to_empty(device=DEVICE)
    codes = layer.weight
    layer.write_weight(linear().weight.double().cpu())
    assert layer.weight is codes
    assert torch.equal(codes, QuantizedLinear.from_linear(linear(), kind).weight)
    before = codes.clone()
    with pytest.raises(KernelError, match="weight is not finite"):
        layer.write_weight(torch.full((32, 64), torch.nan))
    with pytest.raises(KernelError, match="weight does not fit the layer"):
        layer.write_weight(torch.zeros(64, 32))
    assert torch.equal(codes, before)
    for name in ("weight", "scales"):
        wrong = {**layer.state_dict(), name: getattr(layer, name).half()}
        with pytest.raises(KernelError, match=f"{name} is not what a layer in {kind} stores"):
            layer.load_state_dict(wrong)


class Model(nn.Module):
    """One layer under two names, a head tied to an embedding, and odd features."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(96, 64, device=DEVICE)
        self.first, self.layers = (
            linear(64, 64),
            nn.ModuleList([linear(64, 128), linear(128, 64, bias=False)]),
        )
        self.second, self.odd = self.first, linear(40, 64)
        self.head = linear(64, 96, bias=False)
        self.head.weight = self.embed.weight
        self.requires_grad_(False)

    def forward(self, ids):
        return self.layers[1](self.layers[0](self.second(self.embed(ids))))


@pytest.mark.parametrize("kind", KINDS)
def test_conversion_replaces_what_is_chosen(kind):
    model, calls = Model(), []
    model.layers[0].note = "stays"
    model.layers[1].bias_of_norm = None
    biases = model.first.bias, model.layers[0].bias
    old = [weakref.ref(layer.weight) for layer in (model.first, *model.layers)]
    want = model(torch.arange(96, device=DEVICE))
    chosen = lambda name, layer: calls.append(name) or name not in ("odd", "head")  # noqa: E731
    assert convert_to_quantized(model, kind, chosen=chosen) == ["first", "layers.0", "layers.1"]
    assert sorted(calls) == ["first", "head", "layers.0", "layers.1", "odd", "second"]
    assert model.second is model.first and type(model.first) is QuantizedLinear
    assert type(model.odd) is type(model.head) is nn.Linear and model.head.weight is model.embed.weight
    assert model.layers[0].note == "stays" and model.layers[0].kind == kind
    assert model.first.bias is biases[0] and model.layers[0].bias is biases[1]
    got = model(torch.arange(96, device=DEVICE))
    assert 0 < (got - want).norm() < (0.2 if kind == "nf4" else 0.02) * want.norm()
    gc.collect()
    assert [weight() for weight in old] == [None] * 3
    with pytest.raises(KernelError, match="no linear layer to quantize"):
        convert_to_quantized(model, kind, chosen=lambda name, _: name == "first")


def test_a_layer_is_left_if_one_of_its_names_is():
    model = Model()
    assert convert_to_quantized(model, "nf4", chosen=lambda name, _: name in ("first", "layers.0")) == [
        "layers.0"
    ]
    assert type(model.first) is nn.Linear


def test_no_layer_lives_on_while_the_next_is_quantized(monkeypatch):
    model = nn.Sequential(*(linear(64, 64) for _ in range(3))).requires_grad_(False)
    old, alive = [weakref.ref(layer) for layer in model], []
    quantized = QuantizedLinear.from_linear

    def from_linear(layer, kind):
        gc.collect()
        alive.append(sum(reference() is not None for reference in old))
        return quantized(layer, kind)

    monkeypatch.setattr(QuantizedLinear, "from_linear", from_linear)
    convert_to_quantized(model, "int8", chosen=lambda *_: True)
    assert alive == [3, 2, 1]


def test_models_without_values():
    model = Model().to("meta")
    assert convert_to_quantized(model, "nf4", chosen=lambda name, _: "layers" in name)
    assert model.layers[0].weight.is_meta and model.layers[0].scales.shape == (128, 1)
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(64, 8)).requires_grad_(False)
        assert convert_to_quantized(model, "nf4", chosen=lambda *_: True) == ["0"]
        assert model(torch.empty(2, 64)).shape == (2, 8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda layer: layer.weight.requires_grad_(), "the weight of 'layers.1' trains"),
        (lambda layer: layer.register_forward_hook(lambda *_: None), "'layers.1' was changed by another"),
        (lambda layer: layer.weight[3, 5].fill_(torch.inf), "the weight of 'layers.1' is not finite"),
        (lambda layer: layer.double().weight.fill_(1e300), "the weight of 'layers.1' is not finite"),
    ],
    ids=["trains", "hook", "infinity", "too large"],
)
def test_conversion_refuses_and_leaves_the_model(change, said):
    model = Model()
    change(model.layers[1])
    with pytest.raises(KernelError, match=said):
        convert_to_quantized(model, "nf4", chosen=lambda name, _: "layers" in name)
    assert {type(layer) for layer in model.layers} == {nn.Linear}
    assert convert_to_quantized(model, "nf4", chosen=lambda name, _: name == "layers.0") == ["layers.0"]


def test_conversion_refuses_what_does_not_fit():
    model = Model()
    with pytest.raises(KernelError, match="the weight of 'head' is tied") as refusal:
        convert_to_quantized(model, "nf4", chosen=lambda name, _: name == "head")
    assert "'embed' and 'head'" in str(refusal.value)
    with pytest.raises(KernelError, match="the weight of 'odd' cannot be stored in nf4"):
        convert_to_quantized(model, "nf4", chosen=lambda name, _: name == "odd")
    assert convert_to_quantized(model, "int8", chosen=lambda name, _: name == "odd") == ["odd"]
    with pytest.raises(KernelError, match="unknown kind"):
        convert_to_quantized(model, "fp4", chosen=lambda *_: True)
    with pytest.raises(KernelError, match="cannot be replaced in place"):
        convert_to_quantized(linear(), "nf4", chosen=lambda *_: True)
