"""Layers of one kind share their compiled code, however many there are, in one piece each.

torch compiles a function eight times and no more: what differs from layer to layer, such as a number that a hook holds,
leaves all other layers of a large model uncompiled, with a warning among others as the only sign.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from layouts import Case, model_config, run_config, train_steps
from torch._dynamo.utils import counters

from cai_apps.applications.language.config import LoRA
from cai_apps.applications.language.task import workload
from cai_apps.compose.apply import apply
from cai_apps.config.sections import Experts
from cai_mesh.testing import run_ranks

LAYERS = 12
BALANCED = Experts(aux_loss=0.01, z_loss=0.01, show=True)
ADAPTERS = LoRA(rank=2, targets=("q_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
CHANGES = {
    "llama": {},
    "qwen3": {},
    "gpt2": {},
    "qwen3_moe": {"experts": BALANCED},
    "mixtral": {"experts": BALANCED},
    "deepseek_v3": {"experts": BALANCED},
    "olmoe with adapters": {"experts": BALANCED, "lora": ADAPTERS},
}
"""A type of model, and sections of the config that it is trained with."""


def compiled(kind: str, recompute: str) -> tuple[int, dict[str, int]]:
    """Graphs that a session makes of so many layers, and where the compiler gave up, in two steps."""
    case = Case(kernels="on", compile="on", recompute=recompute)
    config = replace(run_config(case, "fp32", 2), **CHANGES[kind])
    model = model_config(kind.partition(" ")[0])
    model.num_hidden_layers = LAYERS
    if getattr(model, "layer_types", None):
        model.layer_types = model.layer_types[:1] * LAYERS
    plain = torch.compile
    torch._dynamo.reset()
    counters.clear()
    torch.compile = functools.partial(plain, backend="eager")  # the graphs are the same, and made at once
    try:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            session = apply(config, workload(config, model), device=torch.device("cpu"))
            train_steps(session, case, 0, 2)
    finally:
        torch.compile = plain
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


def compiled_each(recompute: str) -> dict[str, tuple[int, dict[str, int]]]:
    """All kinds in one start of ranks."""
    return {kind: compiled(kind, recompute) for kind in CHANGES}


@pytest.mark.parametrize("recompute", ["none", pytest.param("selective", marks=pytest.mark.matrix)])
def test_layers_share_their_graphs(recompute):
    for kind, (graphs, breaks) in run_ranks(1, compiled_each, recompute, timeout=300)[0].items():
        assert not breaks, kind
        assert graphs <= 2, f"{kind}: the first layer's input may need no gradient"
