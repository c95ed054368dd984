"""Layers that hand on channels last compute what they did: results, every gradient, in a copy too."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import nn

from cai_apps.applications.diffusion.model.channels_last import keep_channels_last

LAYERS = {
    "resnet": lambda: ResnetBlock2D(in_channels=8, out_channels=16, temb_channels=12, groups=4),
    "attention": lambda: Transformer2DModel(2, 4, in_channels=8, norm_num_groups=4, cross_attention_dim=6),
    "down": lambda: Downsample2D(8, use_conv=True),
    "up": lambda: Upsample2D(8, use_conv=True),
}
GIVEN = {"resnet": (3, 12), "attention": (3, 5, 6)}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[name]().double()


def run(layer: nn.Module, name: str, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(2)
    given = [torch.randn(GIVEN[name], generator=random, dtype=torch.float64)] if name in GIVEN else []
    more = {"return_dict": False} if name == "attention" else {}
    layer.zero_grad()
    found = layer(x, *given, **more)
    image = found[0] if isinstance(found, tuple) else found
    image.square().sum().backward()
    return image, {n: p.grad.clone(memory_format=torch.preserve_format) for n, p in layer.named_parameters()}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_what_they_did(name):
    x = torch.randn(3, 8, 6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected, gradients = run(build(name), name, x)
    layer = build(name)
    keep_channels_last([layer])
    twin = copy.deepcopy(layer)
    for each in (layer, twin):
        got, own = run(each, name, x)
        assert got.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(own, gradients)
        assert all(grad.is_contiguous() for grad in own.values())
    with torch.no_grad():
        for param in layer.parameters():
            param.zero_()
    torch.testing.assert_close(run(twin, name, x)[0], expected)  # a copy has its own weights


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_one_graph(name):
    layer = build(name)
    keep_channels_last([layer])
    x = torch.randn(3, 8, 6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected, gradients = run(layer, name, x)
    layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    got, own = run(layer, name, x)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(own, gradients)


@pytest.mark.parametrize("name", ["resnet", "down", "up"])
def test_backward_keeps_weights_as_they_are_stored(name):
    layer = build(name)
    keep_channels_last([layer])
    x = torch.randn(3, 8, 6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    given = [torch.randn(GIVEN[name], dtype=torch.float64)] if name in GIVEN else []
    layer.forward = torch.compile(layer.forward)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        layer(x, *given)
    stored = {param.data_ptr() for param in layer.parameters()}
    shapes = {param.shape for param in layer.parameters() if param.dim() == 4}
    found = [tensor.data_ptr() in stored for tensor in kept if tensor.shape in shapes]
    assert found and all(found)
