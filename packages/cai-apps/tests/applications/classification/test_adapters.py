"""Adapters of models that classify: a plain loop over peft's on every layout, its folders, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from classification_toys import (
    CLASSES,
    KINDS,
    PICTURES,
    batch,
    config_of,
    opened,
    saved,
    trained_session,
    twin,
)
from layouts import Case, full, parameters_of
from torch import nn

from cai_apps.applications.classification.export import FACTS, TOKENIZER, write_adapter, write_model
from cai_apps.applications.classification.model import config_for, kind_of, with_adapters
from cai_apps.applications.classification.rules import check_settings
from cai_apps.config.sections import LoRA
from cai_apps.data.tokenizer import train_tokenizer
from cai_apps.run.files.directory import RunDirectory
from cai_mesh.errors import ConfigError
from cai_mesh.testing import assert_same_as_one_device, run_ranks

peft = pytest.importorskip("peft")

LORA = LoRA(rank=4, alpha=8)
TARGETS = {
    "bert": ["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"],
    "roberta": ["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"],
    "distilbert": ["q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"],
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "vit": ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"],
}
HEADS = {"distilbert": ["pre_classifier", "classifier"], "llama": ["score"]}
"""What learns whole beside adapters; of the others "classifier"."""
OPTIONS = {"plain": LORA, "dora": replace(LORA, dora=True), "stabilized": replace(LORA, rank_stabilized=True)}
CASES = {
    1: [("one", kind, "plain") for kind in KINDS] + [("one", "bert", "dora"), ("one", "vit", "stabilized")],
    2: [
        ("data2-zero3", "roberta", "plain"),
        ("data2-zero3", "llama", "dora"),
        ("tensor2", "bert", "plain"),
        ("tensor2", "llama", "dora"),
        ("tensor2", "vit", "plain"),
        ("pipeline2", "bert", "plain"),
        ("pipeline2", "vit", "plain"),
    ],
}


def run_of(directory: Path, home: Path, kind: str) -> RunDirectory:
    """A run's directory with what an export reads of it."""
    facts = {"classes": CLASSES, "processor": {"size": 8} if kind in PICTURES else None}
    (home / FACTS).write_text(json.dumps(facts))
    if kind not in PICTURES:
        train_tokenizer(["a text"], 300).save_pretrained(home / TOKENIZER)
    return RunDirectory(home)


def trained(cases, directories, home):
    results = []
    for layout, kind, option in cases:
        session, begun, losses = trained_session(layout, kind, directories[kind], OPTIONS[option])
        last = {name: value.clone() for name, value in full(parameters_of(session)).items()}
        place = Path(home) / f"{layout}-{kind}-{option}"
        if dist.get_rank() == 0:
            place.mkdir(parents=True)
            run_of(directories[kind], place, kind)
        dist.barrier()
        run = RunDirectory(place)
        write_adapter(session, run, place / "adapter", "of the base")
        write_model(session, run, place / "merged")
        results.append((begun, losses, last))
    return results if dist.get_rank() == 0 else None


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    home = tmp_path_factory.mktemp("classifiers")
    return {kind: saved(kind, home) for kind in KINDS}


def of_peft(kind: str, directory: Path, option: str) -> nn.Module:
    lora = OPTIONS[option]
    options = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rank_stabilized,
        use_dora=lora.dora,
        target_modules=TARGETS[kind],
        exclude_modules=r".*(pooler|classifier)\..*",
        modules_to_save=HEADS.get(kind, ["classifier"]),
        task_type=None if kind in PICTURES else "SEQ_CLS",
    )
    return peft.get_peft_model(opened(kind, directory), options).double()


def name_here(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")


def begin_alike(model: nn.Module, begun: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give adapters of peft the weights that a run began with; returns lengths of rows (DoRA) by name."""
    lengths = {}
    for name, param in model.named_parameters():
        if ".lora_magnitude_vector." in name:
            layer = model.get_submodule(name.partition(".lora_magnitude_vector.")[0])
            lengths[name_here(name)] = layer.base_layer.weight.detach().norm(dim=1)
            param.data.copy_(lengths[name_here(name)])
        elif ".lora_" in name:
            param.data.copy_(begun[name_here(name)])
    return lengths


@pytest.mark.parametrize("world", CASES)
def test_adapters_equal_a_plain_loop_over_peft_and_are_its_folders(world, directories, tmp_path):
    results = run_ranks(world, trained, CASES[world], directories, str(tmp_path), timeout=500)[0]
    for (layout, kind, option), (begun, losses, last) in zip(CASES[world], results, strict=True):
        model = of_peft(kind, directories[kind], option)
        lengths = begin_alike(model, begun)
        expected_losses, expected = twin(kind, model, without_decay=lengths)
        assert losses == pytest.approx(expected_losses, rel=1e-9), (layout, kind)
        frozen = {name_here(name) for name, param in model.named_parameters() if not param.requires_grad}
        learned = {
            name_here(name): value for name, value in expected.items() if name_here(name) not in frozen
        }
        learned = {name: value - lengths.get(name, 0.0) for name, value in learned.items()}
        assert_same_as_one_device({name: last[name] for name in learned}, learned, tolerance=1e-7)
        place, rows = tmp_path / f"{layout}-{kind}-{option}", batch(kind, 9)
        rows = {name: value.double() if value.is_floating_point() else value for name, value in rows.items()}
        read = (
            peft.PeftModel.from_pretrained(opened(kind, directories[kind]), place / "adapter").double().eval()
        )
        exported = opened(kind, place / "merged").eval()
        logits = model.eval()(**rows).logits
        torch.testing.assert_close(read(**rows).logits, logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(exported(**rows).logits, logits, rtol=1e-5, atol=1e-5)
        stored = "tokenizer.json" if kind not in PICTURES else "preprocessor_config.json"
        assert (place / "adapter" / stored).is_file()


def test_a_pooler_that_the_files_lack_learns(directories, tmp_path):
    """BERT's models of masked words have none: it begins at random, and would be lost."""
    from transformers import AutoModelForMaskedLM

    config = config_for(str(directories["bert"]), CLASSES)
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    learned = {}
    for place in (directories["bert"], tmp_path):
        with torch.device("meta"):
            model = with_adapters(config, kind_of(config, "bert"), LORA, place)
        learned[place] = {
            name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name
        }
    head = {"classifier.weight", "classifier.bias"}
    assert learned[directories["bert"]] == head
    assert learned[tmp_path] == head | {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}


def test_what_does_not_go_together_is_refused(directories, tmp_path):
    from transformers import AutoModelForImageClassification, ResNetConfig

    plain = config_of(directories["bert"], Case(), LORA)
    check_settings(plain)
    with pytest.raises(ConfigError, match="adapters over random weights"):
        check_settings(replace(plain, model=replace(plain.model, weights="random")))
    with pytest.raises(ConfigError, match=r"lora\.rank is 0"):
        check_settings(replace(plain, lora=LoRA(alpha=3)))
    options = ResNetConfig(depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 8, 8], embedding_size=8)
    AutoModelForImageClassification.from_config(options).save_pretrained(tmp_path)
    config = config_for(str(tmp_path), CLASSES)
    with pytest.raises(ConfigError, match="means and variances of batches"), torch.device("meta"):
        with_adapters(config, "pictures", LORA, tmp_path)
    config = config_for(str(directories["bert"]), CLASSES)
    with pytest.raises(ConfigError, match="query"), torch.device("meta"):
        with_adapters(config, "texts", replace(LORA, targets=("querry",)), directories["bert"])
