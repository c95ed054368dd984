"""What plans say of experts and parameters is checked: by name, by size, and on a small model."""

from __future__ import annotations

import pytest
from role_models import build

from cai_mesh.errors import PlanError
from cai_mesh.gradients import Ready
from cai_tensor_parallel import Plan, plan_for
from cai_tensor_parallel.cut.heads import informed, shares_heads
from cai_tensor_parallel.cut.transform import Cut
from cai_tensor_parallel.modes import experts, one_d, tables, whole
from cai_tensor_parallel.modes.head_runs import picked_heads, queries_per_pick
from cai_tensor_parallel.plans import match
from cai_tensor_parallel.trial import verify
from cai_tensor_parallel.trial.verify import trial_of, verified


def tried(name, plan=None, ranks=2, **options):
    verify._verified.cache_clear()
    return verified(trial_of(build(name, **options), labelled=True), plan, Cut("1d", "whole"), ranks)


def changed(name, **roles):
    """The carried plan of a model, with other roles for the globs that end in the given words; None: without them."""
    plan = dict(plan_for(build(name)).roles)
    for word, role in roles.items():
        for glob in [glob for glob in plan if glob.endswith("." + word)]:
            plan.pop(glob)
            if role is not None:
                plan[glob] = role
    return Plan(plan)


def test_parameters_are_named_by_their_last_word():
    model = build("mixtral")
    roles = match(Plan({"*.experts*": "moe_tp_experts"}), model)
    assert set(roles) == {f"model.layers.{layer}.mlp.experts" for layer in range(2)} | {
        f"model.layers.{layer}.mlp.experts.act_fn" for layer in range(2)
    }
    plan = Plan({"*.down_proj": "rowwise", "*.experts": "moe_tp_experts"})
    assert {name for name, role in match(plan, model).items() if role.parameter == "down_proj"} == {
        f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(2)
    }


def test_a_carried_plan_may_name_what_is_not_there_and_one_that_is_given_may_not():
    model = build("mimo_v2_flash", mlp_layer_types=["dense", "dense"])
    carried = plan_for(model)
    assert not [glob for glob in carried.roles if "experts" in glob]
    with pytest.raises(PlanError, match="matches no module or parameter"):
        match(Plan({**carried.roles, "model.layers.*.mlp.experts.gate_up_proj": "packed_colwise"}), model)


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ({"*.experts.down_proj": "rowwise"}, "no role that says what it makes"),
        (
            {"*.experts.down_proj": "colwise_gather_output", "*.experts": "moe_tp_experts"},
            "a role of modules",
        ),
        ({"*.q_proj.weight": "colwise"}, "no role that says what it makes"),
        ({"*.experts.down_proj": "packed_rowise"}, "did you mean 'packed_rowwise'"),
    ],
)
def test_roles_of_parameters_are_checked(roles, said):
    with pytest.raises(PlanError, match=said):
        match(Plan(roles), build("mixtral"))


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ({"*.q_proj.weight": "colwise", "*.q_proj": "local_params"}, "parameter of a layer"),
        ({"*.experts.down_proj": "rowwise", "*.experts": "moe_tp_experts"}, "not cut.*gate_up_proj"),
        (
            {"*.experts.gate_up_proj": "packed_colwise:7", "*.experts": "local_params"},
            "something else|not divide",
        ),
        ({"*.self_attn": "mla_kv_a_proj"}, "rotary features"),
    ],
)
def test_roles_that_a_module_cannot_have_are_refused(roles, said):
    with pytest.raises(PlanError, match=f"(?s){said}"):
        tried("mixtral", Plan(roles))


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("mixtral", {"experts": "local_params"}),  # no sum
        ("gpt_oss", {"sinks": None}),  # of other heads
        ("gpt_oss", {"gate_up_proj_bias": None}),
        (
            "deepseek_v2",
            {"kv_a_proj_with_mqa": "replicated"},
        ),  # the gradient of the rotary part is one rank's
        ("deepseek_v2", {"kv_a_proj_with_mqa": "replicated_with_grad_allreduce"}),  # and the other is whole
        ("beam", {"gate_bias": None}),
    ],
)
def test_a_plan_without_a_role_that_it_needs_is_refused(name, roles):
    tried(name)
    with pytest.raises(PlanError, match=r"something (else|whole)|does not run|not cut"):
        tried(name, changed(name, **roles))


def first_head(queries, shared, degree, rank):
    return (0,) * len(picked_heads(queries, shared, degree, rank))


def alone(x, ranks):
    return Ready(x)


MISTAKES = {
    "gradients of what experts get are not summed": ("mixtral", 2, experts, "copy_to", lambda x, group: x),
    "biases count twice": ("gpt_oss", 2, experts, "_on_one", lambda p, group, first: p),
    "other heads": ("llama", 4, one_d, "picked_heads", first_head),
    "gradients of shared heads are one rank's": ("llama", 4, whole, "start_sum", alone),
    "gradients of rotary features are one rank's": ("deepseek_v2", 2, whole, "start_sum", alone),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_mistakes_are_seen_on_a_small_model(mistake, monkeypatch):
    name, ranks, module, function, wrong = MISTAKES[mistake]
    tried(name, ranks=ranks)
    monkeypatch.setattr(module, function, wrong)
    with pytest.raises(PlanError, match="something else"):
        tried(name, ranks=ranks)


def test_heads_of_a_rank():
    assert [picked_heads(8, 2, 4, rank) for rank in range(4)] == [(0,), (0,), (1,), (1,)]
    assert [picked_heads(12, 3, 2, rank) for rank in range(2)] == [(0, 0, 1), (1, 2, 2)]
    assert queries_per_pick(12, 3, 2) == 2
    assert queries_per_pick(8, 2, 4) == 2


def test_heads_that_ranks_share_are_tried_on_as_many_ranks():
    model = build("llama")
    roles = match(plan_for(model), model)
    assert not shares_heads(informed(model, roles, 2))
    assert shares_heads(informed(model, roles, 4))
    with pytest.raises(PlanError, match=r"4 attention heads of (.*) over 3 ranks"):
        informed(model, roles, 3)


def test_key_value_heads_that_nobody_repeats_are_refused():
    model = build("llama")
    for layer in model.model.layers:
        del layer.self_attn.num_key_value_groups
        layer.self_attn.num_heads, layer.self_attn.num_key_value_heads = 4, 2
    with pytest.raises(PlanError, match="has no num_key_value_groups"):
        informed(model, match(plan_for(model), model), 4)


def test_every_role_of_transformers_is_known():
    from transformers import CONFIG_MAPPING

    used = {
        role
        for kind in CONFIG_MAPPING
        for role in (getattr(CONFIG_MAPPING[kind], "base_model_tp_plan", None) or {}).values()
    }
    assert len(used) > 10
    Plan({role: role for role in used}).parsed()


@pytest.mark.parametrize("role", ["embedding_colwise", "embedding_rowwise", "replicate"])
def test_roles_of_embeddings(role):
    tried("llama", Plan({"model.embed_tokens": role, "lm_head": "replicated"}))


def test_embeddings_cut_by_features_are_made_whole(monkeypatch):
    monkeypatch.setattr(tables, "gather_from", lambda x, dim, group: x.repeat(1, 1, 2))
    with pytest.raises(PlanError, match="something else"):
        tried("llama", Plan({"model.embed_tokens": "embedding_colwise"}))
