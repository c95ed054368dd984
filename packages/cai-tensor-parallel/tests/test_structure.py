"""What is found from structure: pairs are proved or left whole, never guessed; an error where nothing can be cut."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from cai_mesh.errors import PlanError
from cai_mesh.testing import run_ranks
from cai_mesh.trial import shrunk
from cai_tensor_parallel import Plan, parallelize, plan_for
from cai_tensor_parallel.finding import structure
from cai_tensor_parallel.finding.pairs import find_pairs, pattern
from cai_tensor_parallel.finding.structure import plan_from_structure, searched

BETWEEN = {
    "gelu": nn.functional.gelu,
    "softmax": lambda x: torch.softmax(x, -1),
    "flip": lambda x: x.flip(-1),
    "halves": lambda x: nn.functional.glu(x, -1),
    "sixteen": lambda x: x[..., :16] * x[..., 16:].sigmoid(),
}
"""What lies between two linear layers of a small model: 32 features, and 32 or 16 of them after it."""


class TinyConfig(PreTrainedConfig):
    model_type = "cai_tiny"

    def __init__(self, between="gelu", norm=False, **options):
        super().__init__(**options)
        self.between, self.norm = between, norm
        self.hidden_size, self.num_attention_heads, self.vocab_size, self.num_hidden_layers = 32, 4, 64, 2


class TinyBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.between = BETWEEN[config.between]
        self.up = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32) if config.norm else nn.Identity()
        self.down = nn.Linear(16 if config.between in ("halves", "sixteen") else 32, 32)

    def forward(self, x):
        return x + self.down(self.norm(self.between(self.up(x))))


class Tiny(PreTrainedModel):
    config_class = TinyConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(TinyBlock(config) for _ in range(2))
        self.head = nn.Linear(32, 64)
        self.post_init()

    def get_input_embeddings(self):
        return self.words

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, attention_mask=None):
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(x)}


def tiny(**options) -> Tiny:
    return Tiny(TinyConfig(**options))


def causal(kind: str, **options) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options))


def test_a_pair_around_an_elementwise_function_is_cut():
    assert plan_for(tiny()).roles == {
        "words": "vocab_embedding",
        "head": "vocab_head",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
    }


def test_a_pair_whose_halves_are_multiplied_is_packed():
    assert plan_for(tiny(between="halves")).roles["layers.*.up"] == "packed_colwise:2"


@pytest.mark.parametrize(
    "options", [*({"between": each} for each in ("softmax", "flip", "sixteen")), {"norm": True}]
)
def test_what_mixes_features_is_refused_with_a_template(options):
    with pytest.raises(PlanError, match=r"no two linear layers(.|\n)*layers\.0\.up"):
        plan_for(tiny(**options))


def test_pairs_that_cannot_be_cut_are_found_and_not_proved():
    """So what is refused above is refused by the trial: the walk between layers does not know what mixes features."""
    for between in ("softmax", "flip"):
        (pair,) = find_pairs(shrunk(tiny(between=between), labelled=False), {"head"})
        assert (pair.rows, set(pair.columns)) == ({"layers.*.down"}, {"layers.*.up"})
    assert not find_pairs(shrunk(tiny(norm=True), labelled=False), {"head"})


def test_a_search_is_done_once_and_costs_few_trials(monkeypatch):
    tried = []
    original = structure.verified
    monkeypatch.setattr(structure, "verified", lambda *a: (tried.append(1), original(*a))[1])
    searched.cache_clear()
    model = causal("gpt_neo", hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global"], 2]])
    plan = plan_from_structure(model)
    assert 3 <= len(tried) <= 12
    before = len(tried)
    assert plan_from_structure(model) == plan
    assert len(tried) == before


def test_attributes_are_found_by_trial():
    plan = plan_from_structure(
        causal("gpt_neo", hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global"], 2]])
    )
    assert "num_heads" in plan.divided["transformer.h.*.attn.attention"]
    assert "head_dim" not in plan.divided["transformer.h.*.attn.attention"]


def test_packed_and_interleaved_heads_are_told_apart():
    packed = plan_from_structure(causal("gpt2", n_layer=2))
    assert packed.roles["transformer.h.*.attn.c_attn"] == "packed_colwise:3"
    interleaved = plan_from_structure(causal("bloom", n_layer=2))
    assert interleaved.roles["transformer.h.*.self_attention.query_key_value"] == "colwise"
    assert interleaved.arguments == {"transformer.h.*.self_attention": ("alibi:0:num_heads",)}


def test_attention_that_cannot_be_cut_leaves_the_mlp_cut():
    plan = plan_for(causal("diffllama", num_hidden_layers=2))  # which carries a plan of its embedding alone
    assert plan.roles["model.layers.*.mlp.up_proj"] == "colwise"
    assert not [glob for glob in plan.roles if "attn" in glob]


def test_nothing_is_found_in_a_state_space_model():
    with pytest.raises(PlanError, match="no tensor-parallel plan for MambaForCausalLM"):
        plan_for(causal("mamba", num_hidden_layers=2))


def test_names_stand_for_themselves_where_a_glob_says_more():
    names = ["a.0.out", "a.1.out", "a.0.in.out"]
    assert structure._named({"a.*.out": 1}, names) == {"a.0.out": 1, "a.1.out": 1}
    assert structure._named({"a.*.out": 1}, names[:2]) == {"a.*.out": 1}
    assert structure._named({"a.*.out": 1, "b": 2}, ["c"]) == {}
    assert pattern("0.layers.12.fc1") == "*.layers.*.fc1"


def wrong_plans_of_mpt():
    """An argument that is not cut, or cut along another dim, and attributes that are not divided are all refused."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    options = {"d_model": 32, "n_layers": 1, "n_heads": 4, "vocab_size": 64, "max_seq_len": 40}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mpt", **options))
    right = plan_for(model)
    assert right.arguments
    for plan in (
        Plan(right.roles, right.divided),
        Plan(right.roles, {}, right.arguments),
        Plan(right.roles, right.divided, {"*.attn": ("position_bias:0:nothing",)}),
        Plan(right.roles, right.divided, {"*.attn": ("nothing:0:n_heads",)}),
    ):
        with pytest.raises(PlanError):
            parallelize(model, mesh, plan)
    parallelize(model, mesh, right)


def test_arguments_for_all_heads_must_be_cut():
    run_ranks(2, wrong_plans_of_mpt)


class Whole(Tiny):
    """Adds its head's bias once more, by a layer of its own: neither can be cut."""

    def __init__(self, config):
        super().__init__(config)
        self.extra = nn.LayerNorm(64)
        self.extra.bias = self.head.bias

    def forward(self, input_ids, attention_mask=None):
        return {"logits": self.extra(super().forward(input_ids)["logits"])}


def whole_head():
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Whole(TinyConfig())
    assert "head" not in plan_for(model).roles
    with pytest.raises(PlanError, match="cannot stay cut"):
        parallelize(model, mesh, logits="sharded")
    parallelize(model, mesh)


def test_logits_stay_cut_only_where_the_head_is():
    run_ranks(2, whole_head)
