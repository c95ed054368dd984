"""What a config of a mixture of experts asks for, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from routed_toys import routed_config

from cai_apps import recipes
from cai_apps.applications.language.config import Config, Model
from cai_apps.applications.language.rules import check_settings
from cai_apps.applications.language.task import LANGUAGE, workload
from cai_apps.applications.language.validation import resolve
from cai_apps.config import sections
from cai_apps.config.sections import Experts
from cai_apps.planner.routers import router_bytes
from cai_mesh.errors import ConfigError


def test_the_coefficient_is_the_models_own_where_it_asks_for_one():
    model = routed_config("olmoe")
    model.router_aux_loss_coef = 0.03
    config = replace(
        Config(), train=sections.Train(global_batch=1), data=replace(Config().data, sequence_length=16)
    )
    assert resolve(config, model, 1).experts.aux_loss is None
    model.output_router_logits = True
    assert resolve(config, model, 1).experts.aux_loss == 0.03
    chosen = replace(config, experts=Experts(aux_loss=0.5))
    assert resolve(chosen, model, 1).experts.aux_loss == 0.5
    none = replace(config, experts=Experts(aux_loss=0.0))
    assert resolve(none, model, 1).experts.aux_loss == 0


def test_a_model_is_not_asked_for_its_own_loss():
    model = routed_config("olmoe")
    assert "output_router_logits" not in workload(Config(), model).inputs({"input_ids": 1, "labels": 2})
    model.output_router_logits = True
    assert workload(Config(), model).inputs({"input_ids": 1})["output_router_logits"] is False


def test_a_grid_of_ranks_is_refused():
    grid = sections.Parallel(tensor=sections.Tensor(mode="2d", size=4))
    with pytest.raises(ConfigError, match=r"experts.aux_loss = 0.1, parallel.tensor.mode = \"2d\""):
        check_settings(replace(Config(), experts=Experts(aux_loss=0.1), parallel=grid))


@pytest.mark.parametrize(
    "option", [{"aux_loss": 0.1}, {"z_loss": 0.1}, {"bias_update": 0.1}, {"router_dtype": "float32"}]
)
def test_a_model_without_routers_is_refused_before_its_data(option, tmp_path):
    config = replace(Config(), experts=Experts(**option), model=Model(name="llama-tiny"))
    config = replace(config, data=replace(config.data, source=str(tmp_path / "nothing.txt")))
    with pytest.raises(
        ConfigError, match=f"experts.{next(iter(option))} is of routers, and LlamaForCausalLM has none"
    ):
        LANGUAGE.prepare(config)


def test_the_plan_has_what_the_losses_keep():
    changes = {"experts.z_loss": 0.0}
    config = LANGUAGE.resolve(recipes.load("mixtral-tiny", changes), 4)
    tokens, layers = 4 * 128, [f"model.layers.{number}" for number in range(4)]
    assert router_bytes(config, LANGUAGE.workload(config)) == dict.fromkeys(layers, tokens * 8 * 4)
    both = LANGUAGE.resolve(recipes.load("mixtral-tiny"), 4)
    assert router_bytes(both, LANGUAGE.workload(both)) == dict.fromkeys(layers, tokens * 8 * 8)
    without = LANGUAGE.resolve(recipes.load("mixtral-tiny", changes | {"experts.aux_loss": 0.0}), 4)
    assert router_bytes(without, LANGUAGE.workload(without)) == {}


def test_a_hub_models_config_may_ask_for_it(tmp_path):
    table = routed_config("mixtral").to_dict() | {"output_router_logits": True, "router_aux_loss_coef": 0.07}
    (tmp_path / "config.json").write_text(json.dumps(table))
    config = recipes.load("llama-tiny", {"model.name": str(tmp_path), "data.sequence_length": 16})
    assert LANGUAGE.resolve(config, 8).experts.aux_loss == 0.07
