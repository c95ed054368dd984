"""A plan draws which rank holds what."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from cai_apps import applications, recipes
from cai_apps.planner.drawing import bars, holdings, kinds_of, layers_of


def drawn(recipe: str, changes: dict, ranks: int) -> str:
    """What `cai plan` prints of a recipe."""
    config = recipes.load(recipe, changes)
    return applications.of(config).plan(config, ranks, recipe, None).text


def test_every_rank_stands_in_one_cell_and_every_layer_in_one_row():
    text = drawn("llama-tiny", {"train.device": "cpu"}, 8)
    table = text.split("which rank holds what:\n")[1].split("\n\n")[0].splitlines()
    assert [re.split(r"  +", line.strip()) for line in table[:3]] == [
        ["data 0", "data 1"],
        ["layers 0-1", "ranks 0-1", "ranks 2-3"],
        ["layers 2-3", "ranks 4-5", "ranks 6-7"],
    ]
    assert table[3:] == [
        "  2 tensor ranks in a cell: each has a part of every layer",
        "  ZeRO-1 divides optimizer state over 2 ranks of a row",
    ]
    bar = re.findall(r"place \d  ([WOGUA]+)", text)
    assert len(bar) == 2 and len(bar[0]) == 48 > len(bar[1]) and "A activations" in text


def stage(rank: int, *names: str, **numbers: int) -> SimpleNamespace:
    """A place in a pipeline as a plan has it."""
    state = SimpleNamespace(**({"parameters": 10, "optimizer": 20, "gradients": 30} | numbers))
    return SimpleNamespace(
        rank=rank, blocks=names, state=state, unsharded=0, activations=40, accumulates=False, peak=70
    )


def plan(replicate: int, shard: int, *stages: SimpleNamespace) -> SimpleNamespace:
    axes = {"pp": len(stages), "dp_replicate": replicate, "dp_shard": shard, "cp": 1, "tp": 1}
    config = SimpleNamespace(parallel=SimpleNamespace(zero=3))
    return SimpleNamespace(axes=axes, stages=stages, config=config)


def test_many_data_ranks_are_the_first_and_the_last():
    lines = holdings(plan(2, 8, stage(0, "model.layers.0"), stage(1, "model.layers.1")))
    assert lines[1].split() == ["data", "0", "data", "1", "data", "2", "...", "data", "15"]
    assert lines[3].split() == ["layers", "1", "rank", "16", "rank", "17", "rank", "18", "...", "rank", "31"]
    assert "weights, gradients and optimizer state over 8 ranks" in lines[4]
    assert lines[5].strip() == "2 such groups in a row hold the same"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("m.layers.0", "m.layers.1", "m.layers.6", "m.layers.7"), "layers 0-1, 6-7"),
        (("encoder.block.0", "decoder.layer.1"), "block 0; layer 1"),
        (("down", "up"), "2 blocks"),
        ((), "0 blocks"),
    ],
)
def test_layers_are_told_in_runs(names, words):
    assert layers_of(stage(0, *names)) == words


def test_gradients_that_come_as_activations_go_are_not_counted_twice():
    assert kinds_of(stage(0, "layers.0"))["activations"] == 10
    lines = bars(
        plan(1, 1, stage(0, "layers.0"), stage(1, "layers.1", parameters=0, optimizer=0, gradients=0))
    )
    assert lines[1].count("O") == 2 * lines[1].count("W") > 0
    letters = lines[2].split()[2]
    assert {*letters} == {"A"} and len(letters) == pytest.approx(4 * lines[1].count("A"), abs=1)
