"""The FLOPs of a step, beside published figures and a count by hand."""

from __future__ import annotations

import pytest
from torch import nn

from cai_apps import recipes
from cai_apps.applications.diffusion.model.denoiser import build
from cai_apps.applications.diffusion.model.design import load_design
from cai_apps.applications.diffusion.training.flops import image_flops


def counted(recipe: str) -> float:
    """GFLOPs of one forward."""
    config = recipes.load(recipe)
    return image_flops(config, load_design(config.model.name)) / 3e9


def test_dit_has_the_papers_figure():
    assert counted("dit") == pytest.approx(2 * 524.6, rel=0.01), "DiT-XL/2 at 512: 524.6 G multiply-adds"


def test_a_small_dit_by_hand():
    config = recipes.load("dit-tiny")
    design = load_design(config.model.name)
    tokens = (design.denoiser["sample_size"] // design.denoiser["patch_size"]) ** 2
    width = design.denoiser["num_attention_heads"] * design.denoiser["attention_head_dim"]
    once, flops = set(), 0
    for name, layer in build(design, train_text=False).denoiser.named_modules():
        if isinstance(layer, nn.Linear) and layer not in once:
            once.add(layer)
            inside = ".attn1." in name or ".ff." in name or name == "proj_out_2"
            shared = (
                ".emb." in name
            )  # each block asks the embedder that all share, and the last layer does again
            times = tokens if inside else (design.denoiser["num_layers"] + 1 if shared else 1)
            flops += 2 * times * layer.weight.numel()
        elif isinstance(layer, nn.Conv2d):
            flops += 2 * tokens * layer.weight.numel()
    flops += design.denoiser["num_layers"] * 4 * tokens * tokens * width
    assert counted("dit-tiny") == pytest.approx(flops / 1e9, rel=1e-9)
