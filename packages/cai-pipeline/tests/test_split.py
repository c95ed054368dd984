from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from pipeline_families import FAMILIES, build, config_of, token_ids
from torch.distributed.device_mesh import init_device_mesh

from cai_mesh.errors import MeshError, PlanError
from cai_mesh.layout import attach, canonical_name, reduce_of
from cai_mesh.testing import assert_names_kept, run_ranks
from cai_pipeline import Trial, split
from cai_pipeline.plans.placement import Held, place
from cai_pipeline.stages.balance import balance_layers
from cai_pipeline.stages.partition import partition, tied_parameters
from cai_pipeline.stages.placeholders import Placeholder
from cai_pipeline.stages.small_model import find_layers, small_model
from cai_pipeline.stages.stage import run_stage
from cai_pipeline.stages.verify_split import chain, gradients, verify_split


def parts_of(whole: Any, held: Held) -> list[Any]:
    """The model of each stage; one for all stages of a rank."""
    structure = verify_split(small_model(whole))
    stage_layers = balance_layers([1.0] * len(structure.layers(whole)), len(held))
    parts = []
    for rank in range(max(held) + 1):
        part = copy.deepcopy(whole)
        tied = tied_parameters(part, structure, stage_layers)
        partition(part, structure, stage_layers, held, rank, tied)
        for name, each in tied.items():
            attach(each.parameter, name=name)
        parts.append(part)
    return [parts[rank] for rank in held]


PLACED = {"4 ranks": place(4), "loop": place(2, 2), "v": place(2, 2, "v"), "loop of 3": place(2, 3)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("padded", "placed"),
    [(False, "4 ranks"), (True, "4 ranks"), (True, "loop"), (True, "v"), (False, "loop of 3")],
)
def test_the_stages_compute_what_the_model_computes(family: str, padded: bool, placed: str) -> None:
    whole = build(config_of(family, 7))
    parts = parts_of(whole, PLACED[placed])
    inputs = {"input_ids": token_ids(1), "labels": token_ids(2)}
    if padded:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][1, -3:] = 0
    expected = whole(**inputs)
    expected.loss.backward()
    output = chain(parts, inputs, lambda output: output.loss)
    # GPT-J multiplies attention in float32, whose sums depend on how memory is aligned on some CPUs
    wide = 1e-8 if family == "gptj" else 0
    torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=wide)
    torch.testing.assert_close(output.loss, expected.loss, rtol=0, atol=wide)
    found = gradients(dict.fromkeys(parts))
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found.pop(name), parameter.grad, rtol=1e-12, atol=max(wide, 1e-12))
    assert not found


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_kept_and_every_parameter_has_one_owner(family: str) -> None:
    whole = build(config_of(family, 5))
    names = [name for name, _ in whole.named_parameters(remove_duplicate=False)]
    held: list[str] = []
    for part in parts_of(whole, place(3)):
        own = [name for name, _ in part.named_parameters()]
        assert_names_kept(names, own)
        held += own
    assert len(held) == len(set(held))
    assert {name for name, _ in whole.named_parameters()} <= set(held)


def test_a_layer_keeps_its_index_and_a_placeholder_its_attributes() -> None:
    parts = parts_of(build(config_of("gemma3", 6)), place(3))
    names = [name for name, _ in parts[1].named_parameters()]
    assert {name.split(".")[2] for name in names} == {"2", "3"}
    placeholder = parts[1].model.layers[5]
    assert isinstance(placeholder, Placeholder)
    assert not list(placeholder.parameters())
    assert placeholder.hidden_size == 32


def test_a_stage_refuses_to_run_alone() -> None:
    parts = parts_of(build(config_of("llama", 2)), place(2))
    for part in parts:
        with pytest.raises(PlanError, match="one stage of a pipeline"):
            part(input_ids=token_ids(0))
    with pytest.raises(PlanError, match="without the output"):
        run_stage(parts[1], None, {"input_ids": token_ids(0)})


def test_skipped_layers_are_noticed() -> None:
    config = config_of("opt", 2)
    config.layerdrop = 1.0
    first, last = (part.train() for part in parts_of(build(config), place(2)))
    with pytest.raises(PlanError, match="layerdrop"):
        run_stage(first, None, {"input_ids": token_ids(0)})
    with pytest.raises(PlanError, match="layerdrop"):
        run_stage(last, torch.zeros(2, 9, 32, dtype=torch.float64), {"input_ids": token_ids(0)})


class LeakyLlama(hf.LlamaForCausalLM):
    """A model whose head also reads the embeddings, which the last stage does not have."""

    def forward(self, input_ids: Any, labels: Any = None, use_cache: bool = False, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids, use_cache=use_cache).last_hidden_state
        logits = self.lm_head(hidden + self.model.embed_tokens(input_ids))
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=logits.shape[-1])
        return hf.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


class MixingLlama(hf.LlamaForCausalLM):
    """A model with a parameter beside its layers."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.model.scale = torch.nn.Parameter(torch.ones(()))


def test_a_model_that_leaks_around_its_layers_is_refused() -> None:
    with torch.device("meta"):
        model = LeakyLlama(config_of("llama", 4))
    with pytest.raises(PlanError, match="Leaky"):
        verify_split(small_model(model))


def test_a_parameter_beside_the_layers_is_refused() -> None:
    with torch.device("meta"):
        model = MixingLlama(config_of("llama", 4))
    with pytest.raises(PlanError, match="beside its layers"):
        verify_split(small_model(model))


def test_other_models_are_refused() -> None:
    with pytest.raises(PlanError, match="Linear"):
        small_model(torch.nn.Linear(2, 2))
    with torch.device("meta"):
        resnet = hf.ResNetForImageClassification(hf.ResNetConfig())
    with pytest.raises(PlanError, match="cannot find the layers of ResNet"):
        find_layers(resnet)


def test_verifying_leaves_the_random_state_alone() -> None:
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config_of("llama", 3))
    before = torch.get_rng_state()
    verify_split(small_model(model))
    assert torch.equal(before, torch.get_rng_state())


def split_on_ranks(family: str, layers: int, shape: tuple[int, ...]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp_shard")[: len(shape)])
    with torch.device("meta"):
        whole = hf.AutoModelForCausalLM.from_config(config_of(family, layers))
        model = split(whole, mesh)
    assert model is whole
    specs = {name: reduce_of(parameter) for name, parameter in model.named_parameters()}
    return {
        "layers": next(iter(model.cai_stages.own.values())).layers,
        "names": {name: canonical_name(name, parameter) for name, parameter in model.named_parameters()},
        "tied": {
            name: (torch.distributed.get_process_group_ranks(spec.tied), spec.owner)
            for name, spec in specs.items()
            if spec.tied is not None
        },
    }


def test_tied_embeddings_stay_on_both_ends() -> None:
    ranks = run_ranks(6, split_on_ranks, "gpt2", 3, (3, 2))
    word = "transformer.wte.weight"
    assert [each["tied"] for each in ranks] == [
        {word: ([0, 4], True)},
        {word: ([1, 5], True)},
        {},
        {},
        {"lm_head.weight": ([0, 4], False)},
        {"lm_head.weight": ([1, 5], False)},
    ]
    assert ranks[4]["names"]["lm_head.weight"] == word
    assert ranks[0]["names"][word] == word
    assert "lm_head.weight" not in ranks[0]["names"]


def test_the_balance_counts_the_head() -> None:
    ranks = run_ranks(2, split_on_ranks, "llama", 13, (2,))
    assert [each["layers"] for each in ranks] == [range(7), range(7, 13)]
    assert not ranks[0]["tied"]


def refused_split(layers: int, options: dict[str, Any], axis: str) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config_of("llama", layers))
    before = [name for name, _ in model.named_parameters()]
    with pytest.raises((PlanError, MeshError)) as refusal:
        split(model, mesh, **options)
    assert before == [name for name, _ in model.named_parameters()]
    return str(refusal.value)


@pytest.mark.parametrize(
    ("layers", "options", "axis", "message"),
    [
        (1, {}, "pp", "fewer layers"),
        (3, {"chunks": 2}, "pp", "fewer layers"),
        (4, {"chunks": 0}, "pp", "no stages"),
        (6, {"chunks": 3, "placement": "v"}, "pp", "two chunks"),
        (4, {"placement": "loops"}, "pp", "did you mean 'loop'"),
        (4, {"balance": [1, 2]}, "pp", "does not divide"),
        (4, {"balance": "speed"}, "pp", "unknown balance"),
        (4, {}, "tp", "'pp'"),
    ],
)
def test_requests_that_do_not_fit(layers: int, options: dict[str, Any], axis: str, message: str) -> None:
    for text in run_ranks(2, refused_split, layers, options, axis):
        assert message in text


class Tower(torch.nn.Module):
    """Not of transformers: patches and positions, layers, a norm and a head; `skip` reads the patches again."""

    def __init__(self, layers: int, width: int = 8, *, skip: bool = False):
        super().__init__()
        self.patches, self.positions = torch.nn.Linear(6, width), torch.nn.Embedding(4, width)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(layers)
        )
        self.norm, self.head, self.skip = torch.nn.LayerNorm(width), torch.nn.Linear(width, 3), skip

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        first = x = self.patches(pixels) + self.positions(torch.arange(4, device=pixels.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x + first if self.skip else x).mean(1))


def tower_trial(**options: Any) -> Trial:
    def small() -> Tower:
        torch.manual_seed(0)
        return Tower(3, **options)

    pixels = torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return Trial(small, lambda: {"pixels": pixels}, lambda scores: scores.square().sum(), "layers")


def split_tower() -> list[str]:
    model = split(Tower(5), init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), trial=tower_trial())
    return [name for name, _ in model.named_parameters()]


def test_a_model_that_is_not_of_transformers_is_split_by_its_trial() -> None:
    first, last = run_ranks(2, split_tower)
    assert first[0] == "patches.weight" and "norm.weight" in last
    assert [name for name, _ in Tower(5).named_parameters()] == [*first, *last]


def test_a_trial_finds_what_a_split_would_break() -> None:
    with pytest.raises(PlanError, match=r"computes something else|does not run when split"):
        verify_split(tower_trial(skip=True))
    wrong = replace(tower_trial(), layers="blocks")
    with pytest.raises(PlanError, match="no list of layers 'blocks'"):
        verify_split(wrong)
    with pytest.raises(PlanError, match="without a transformers config"):
        small_model(Tower(3))
