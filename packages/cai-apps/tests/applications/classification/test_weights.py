"""Weights as they are published: bare layers, old names of norms, models of masked words, heads of other classes."""

from __future__ import annotations

import pytest
import torch
from classification_toys import CLASSES, KINDS, PICTURES, saved
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForImageClassification, AutoModelForSequenceClassification

from cai_apps.applications.classification.model import build, config_for, is_new_head, kind_of, pretrained
from cai_mesh.errors import CheckpointError


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    home = tmp_path_factory.mktemp("classifiers")
    return {kind: saved(kind, home) for kind in KINDS}


def read(directory, classes=CLASSES) -> dict[str, torch.Tensor]:
    """What a model of some classes has after reading a directory; what is not read is 7."""
    config = config_for(str(directory), classes)
    kind = kind_of(config, str(directory))
    model = build(config, kind)
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    pretrained(str(directory), directory, config, kind)(model)
    return dict(model.named_parameters())


def published(kind, directory) -> dict[str, torch.Tensor]:
    make = AutoModelForImageClassification if kind in PICTURES else AutoModelForSequenceClassification
    return dict(make.from_pretrained(directory).named_parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_all_weights_are_those_of_transformers(kind, directories):
    got, want = read(directories[kind]), published(kind, directories[kind])
    assert got.keys() == want.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], rtol=0, atol=0)
    assert not is_new_head(str(directories[kind]), CLASSES)


@pytest.mark.parametrize("classes", [("a", "b"), ("a", "b", "c")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_other_classes_begins_anew(kind, classes, directories):
    """Of as many classes too, where they are called otherwise."""
    got, want = read(directories[kind], classes), published(kind, directories[kind])
    heads = [name for name, value in got.items() if (value == 7).all()]
    assert heads and all(name.startswith(("classifier", "pre_classifier", "score")) for name in heads)
    for name in got.keys() - set(heads):
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=0)
    assert is_new_head(str(directories[kind]), classes)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_without_a_head_are_read(kind, directories, tmp_path):
    """As ViT's of ImageNet-21k are on the hub: names without the layers' prefix."""
    AutoModel.from_pretrained(directories[kind]).save_pretrained(tmp_path)
    got, want = read(tmp_path), published(kind, directories[kind])
    new = {name for name, value in got.items() if (value == 7).all()}
    assert new == {name for name in got if name.startswith(("classifier", "pre_classifier", "score"))}
    for name in got.keys() - new:
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=0)


def test_berts_of_masked_words_with_old_names(directories, tmp_path):
    """bert-base-uncased on the hub: gamma and beta of norms, the head of masked words, no pooler perhaps."""
    directory = directories["bert"]
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in load_file(directory / "model.safetensors").items()
        if not name.startswith("classifier") and "pooler" not in name
    }
    tensors["cls.predictions.bias"] = torch.zeros(96)
    tensors["cls.seq_relationship.weight"] = torch.zeros(2, 32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    got, want = read(tmp_path), published("bert", directory)
    new = {name for name, value in got.items() if (value == 7).all()}
    assert new == {name for name in got if name.startswith("classifier") or "pooler" in name}
    for name in got.keys() - new:
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=0)


def test_files_that_lack_layers_are_refused(directories, tmp_path):
    directory = directories["roberta"]
    tensors = load_file(directory / "model.safetensors")
    lost = next(name for name in tensors if "layer.2" in name)
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(CheckpointError, match="lacks weights of its model") as caught:
        read(tmp_path)
    assert lost in str(caught.value)
