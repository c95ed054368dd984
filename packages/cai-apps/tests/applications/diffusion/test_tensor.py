"""Denoisers cut over two and four ranks: results, every gradient and two steps are those of one process, in float64.

Heads that divide, that do not, and that do not go round; norms of heads, dual attention, attention with a group norm;
an odd batch and images that are not square.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cai_apps import recipes
from cai_apps.applications.diffusion.model.denoiser import build, layers
from cai_apps.applications.diffusion.model.design import Design, load_design
from cai_apps.applications.diffusion.model.tensor_parallel import Share, share_of, trial_of
from cai_apps.applications.diffusion.task import DIFFUSION
from cai_apps.compose.blocks import compile_layers
from cai_mesh.errors import PlanError
from cai_mesh.gradients import share_in_graphs
from cai_mesh.layout import BoxedTensor
from cai_mesh.testing import assert_same_as_one_device, run_ranks
from cai_mesh.trial import Trial
from cai_tensor_parallel import Plan, parallelize, plan_for
from cai_tensor_parallel.finding import survey

LEVELS = {
    "block_out_channels": [56, 16, 16],
    "attention_head_dim": [7, 2, 1],
    "down_block_types": ["CrossAttnDownBlock2D", "AttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "AttnUpBlock2D", "CrossAttnUpBlock2D"],
    "norm_num_groups": 8,
}
"""Over two ranks seven heads are cut in four and three, and one stays whole; over four two do not go round either."""
SD3 = {"num_attention_heads": 3, "attention_head_dim": 16, "caption_projection_dim": 48}
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "unet": ("sd-v2-tiny", LEVELS, False),
    "unet and text": ("sd-v1-tiny", {"activation_fn": "gelu"}, True),
    "sd3": ("sd3-tiny", {**SD3, "qk_norm": "rms_norm", "dual_attention_layers": [0, 1]}, True),
    "dit": ("dit-tiny", {"num_attention_heads": 7, "activation_fn": "geglu"}, False),
}
"""A preset, what is changed of its denoiser, and whether its text encoders are trained."""


def design_of(case: str) -> Design:
    preset, changes, _ = CASES[case]
    design = load_design(preset)
    return replace(design, denoiser={**design.denoiser, **changes})


def model_of(case: str) -> nn.Module:
    torch.manual_seed(1)
    model = build(design_of(case), train_text=CASES[case][2]).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():  # away from the zeros and ones that hide mistakes
            param.normal_(0.0, 0.2, generator=generator)
    return model


def inputs_of(case: str) -> dict[str, torch.Tensor]:
    """Of three samples."""
    design, generator = design_of(case), torch.Generator().manual_seed(2)
    denoiser, family = design.denoiser, design.family
    sides = (16, 16) if family.square else (8, 12)
    found = {
        "sample": torch.randn(3, denoiser["in_channels"], *sides, generator=generator, dtype=torch.float64),
        "time": torch.tensor([1, 500, 900]).to(torch.float32 if family.flow else torch.int64),
    }
    if family.condition == "label":
        return found | {"label": torch.tensor([0, 3, 9])}
    if CASES[case][2]:
        return found | {"tokens": torch.randint(512, (3, len(design.texts), 7), generator=generator)}
    width = denoiser[family.widths["text"]]
    return found | {"text": torch.randn(3, 7, width, generator=generator, dtype=torch.float64)}


def steps(model: nn.Module, inputs: dict[str, torch.Tensor]):
    """What the first forward returns, its gradients, and the weights after two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    first, gradients = None, {}
    for _ in range(2):
        output = model(**inputs)
        (
            output * torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype).view(output.shape)
        ).mean().backward()
        if first is None:
            first = output.detach()
            gradients = {
                n: BoxedTensor.like(p, torch.zeros_like(p) if p.grad is None else p.grad.clone())
                for n, p in model.named_parameters()
            }
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return first, gradients, {n: BoxedTensor.from_param(p) for n, p in model.named_parameters()}


def full(boxed: dict[str, BoxedTensor], group: Any = None) -> dict[str, torch.Tensor]:
    return {name: each.to_full(group) for name, each in boxed.items()}


def on_ranks(case: str, compiled: bool = False):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    trial = trial_of(design_of(case), train_text=CASES[case][2], ranks=mesh.size())
    model = parallelize(model_of(case), mesh, trial=trial)
    if compiled:
        share_in_graphs(model)
        compile_layers(layers(model))
    first, gradients, after = steps(model, inputs_of(case))
    own = {n: p.detach().clone() for n, p in model.named_parameters()}
    return first, full(gradients, mesh.get_group()), full(after, mesh.get_group()), own


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", list(CASES))
def test_equals_one_process(case, ranks):
    first, gradients, after = steps(model_of(case), inputs_of(case))
    gradients, after = full(gradients), full(after)
    for got in run_ranks(ranks, on_ranks, case, timeout=200):
        torch.testing.assert_close(got[0], first, rtol=1e-9, atol=1e-9)
        assert_same_as_one_device(got[1], gradients, tolerance=1e-8)
        assert_same_as_one_device(got[2], after, tolerance=1e-8)
        # what every rank has whole, each has updated by itself
        alike = {name: value for name, value in got[3].items() if value.shape == after[name].shape}
        assert 0 < len(alike) < len(after)
        assert_same_as_one_device(alike, {name: after[name] for name in alike}, tolerance=1e-8)


@pytest.mark.matrix
def test_compiled_layers_equal_those_of_one_process():
    """The compiler rounds otherwise than eager code does, so both are compiled."""
    model = model_of("dit")
    compile_layers(layers(model))
    first, gradients, after = steps(model, inputs_of("dit"))
    for got in run_ranks(2, on_ranks, "dit", compiled=True, timeout=240):
        torch.testing.assert_close(got[0], first, rtol=1e-9, atol=1e-9)
        assert_same_as_one_device(got[1], full(gradients), tolerance=1e-8)
        assert_same_as_one_device(got[2], full(after), tolerance=1e-8)


def built(name: str, **changes: Any) -> nn.Module:
    design = load_design(name)
    with torch.device("meta"):
        return build(replace(design, denoiser={**design.denoiser, **changes}), train_text=False)


def test_plans_are_globs_over_parts():
    plan = plan_for(built("sd3-tiny"))
    assert plan.roles == {
        **{
            f"denoiser.transformer_blocks.*.attn.{name}": "colwise"
            for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
        },
        "denoiser.transformer_blocks.*.attn.to_out.0": "rowwise",
        "denoiser.transformer_blocks.*.attn.to_add_out": "rowwise",
        **{f"denoiser.transformer_blocks.*.{name}.net.0.proj": "colwise" for name in ("ff", "ff_context")},
        **{f"denoiser.transformer_blocks.*.{name}.net.2": "rowwise" for name in ("ff", "ff_context")},
    }
    assert plan.divided == {"denoiser.transformer_blocks.*.attn": ("heads",)}
    gated = plan_for(built("sd-v1-tiny")).roles
    assert (
        gated["denoiser.down_blocks.*.attentions.*.transformer_blocks.*.ff.net.0.proj"] == "packed_colwise:2"
    )


def test_what_cannot_be_cut_stays_whole_and_is_named():
    five = survey(built("sd-v2"), 4).whole  # 5, 10, 20 and 20 heads
    assert set(five.values()) == {"5 heads do not go round 4 ranks"}
    assert all(".0.attentions" in name or "up_blocks.3" in name for name in five)
    assert not survey(built("sd-v2"), 2).whole
    across = built("dit-tiny")
    for block in across.denoiser.transformer_blocks:
        block.attn1.norm_q = nn.LayerNorm(64, device="meta")
    assert set(survey(across, 2).whole.values()) == {"a norm is over all of its heads"}
    unknown = built("dit-tiny")
    unknown.denoiser.transformer_blocks[0].attn1.processor = nn.Identity()
    assert survey(unknown, 2).whole == {
        "denoiser.transformer_blocks.0.attn1": "Identity is not known to compute head by head"
    }


def test_the_share_that_is_cut_is_told(tmp_path):
    config = DIFFUSION.resolve(
        recipes.load("sd-v2-tiny", {"parallel.shard": 1, "parallel.tensor.size": 4}), 4
    )
    share = share_of(config, load_design("sd-v2-tiny"))
    assert isinstance(share, Share) and 0.1 < share.cut < 0.2
    assert str(share).endswith("6 parts stay whole (2 heads do not go round 4 ranks)")
    assert json.loads(share.to_json())["whole"] == share.whole


def wrong_plans():
    """A gate that is cut as if it were no gate, and heads that are not divided, are refused by the trial."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    right = plan_for(built("sd-v1-tiny"), 2)
    trial = trial_of(load_design("sd-v1-tiny"), train_text=False, ranks=2)
    assert isinstance(trial, Trial)
    plain = {name: role.replace("packed_colwise:2", "colwise") for name, role in right.roles.items()}
    for plan in (Plan(plain, right.divided), Plan(right.roles)):
        with pytest.raises(PlanError):
            parallelize(built("sd-v1-tiny"), mesh, plan, trial=trial)
    parallelize(built("sd-v1-tiny"), mesh, right, trial=trial)


def test_wrong_plans_are_refused_by_the_trial():
    run_ranks(2, wrong_plans, timeout=120)
