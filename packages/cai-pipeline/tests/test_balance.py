from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from cai_mesh.errors import PlanError
from cai_mesh.testing import run_ranks
from cai_pipeline import split
from cai_pipeline.stages.balance import balance_layers, balance_ranks, explicit_layers

costs = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=9)


@settings(deadline=None)
@given(costs, st.integers(1, 5), st.floats(0.0, 20.0), st.floats(0.0, 20.0))
def test_no_other_division_has_a_faster_slowest_stage(
    layers: list[float], stages: int, first: float, last: float
) -> None:
    if len(layers) < stages:
        return

    def slowest(bounds: tuple[int, ...]) -> float:
        totals = [sum(layers[a:b]) for a, b in itertools.pairwise((0, *bounds, len(layers)))]
        totals[0] += first
        totals[-1] += last
        return max(totals)

    best = min(map(slowest, itertools.combinations(range(1, len(layers)), stages - 1)))
    found = balance_layers(layers, stages, first=first, last=last)
    assert [i for stage in found for i in stage] == list(range(len(layers)))
    assert all(found)
    assert slowest(tuple(stage.start for stage in found[1:])) == pytest.approx(best)


def test_a_heavy_head_takes_layers_away() -> None:
    assert balance_layers([1.0] * 12, 3, last=4.0) == [range(5), range(5, 10), range(10, 12)]


def test_ranks_of_several_stages_are_even() -> None:
    v = balance_ranks([1.0] * 32, (0, 1, 1, 0), last=2.4)
    assert list(map(len, v)) == [9, 8, 9, 6]  # 17.4 and 17; even stages, 8, 9, 9 and 6, are 16.4 and 18
    assert balance_ranks([1.0] * 12, (0, 1, 2), last=4.0) == balance_layers([1.0] * 12, 3, last=4.0)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.1, 10.0), min_size=4, max_size=12), st.floats(0.0, 20.0))
def test_balanced_ranks_hold_every_layer_and_are_no_worse(layers: list[float], last: float) -> None:
    def slowest(stages: list[range]) -> float:
        costs = [sum(layers[i] for i in stage) for stage in stages]
        return max(costs[0] + costs[3] + last, costs[1] + costs[2])

    found = balance_ranks(layers, (0, 1, 1, 0), last=last)
    assert [i for stage in found for i in stage] == list(range(len(layers)))
    assert all(found)
    assert slowest(found) <= slowest(balance_layers(layers, 4, last=last))


def test_fewer_layers_than_stages() -> None:
    with pytest.raises(PlanError, match="fewer layers"):
        balance_layers([1.0] * 3, 4)


def test_layers_by_hand() -> None:
    assert explicit_layers([1, 3], 4, 2) == [range(1), range(1, 4)]
    for wrong in ([4], [1, 2], [4, 0]):
        with pytest.raises(PlanError):
            explicit_layers(wrong, 4, 2)


def layers_of_stages() -> list[range]:
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=32, moe_intermediate_size=32, num_experts=16, num_experts_per_tok=2, vocab_size=512,
        num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
    )  # fmt: skip
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    return [
        stage.layers
        for stage in split(AutoModelForCausalLM.from_config(config), mesh).cai_stages.own.values()
    ]


def test_experts_count_as_often_as_they_are_visited() -> None:
    """A layer has 53 k parameters and multiplies with 10 k of them, the head with 16 k."""
    assert run_ranks(2, layers_of_stages) == [[range(5)], [range(5, 8)]]
