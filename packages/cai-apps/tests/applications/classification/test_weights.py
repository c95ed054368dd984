"""Weights as they are published: bare layers, old names of norms, models of masked words, heads of other classes."""

from __future__ import annotations

import pytest
import torch
from classification_toys import CLASSES, KINDS, PICTURES, saved
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    HGNetV2Config,
)

from cai_apps.applications.classification.model import (
    build,
    config_for,
    is_new_head,
    kind_of,
    pretrained,
    side_of,
    with_adapters,
)
from cai_apps.config.sections import LoRA
from cai_mesh.errors import CheckpointError, ConfigError


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


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_models_of_pictures_and_texts_as_published(kind, tmp_path):
    """openai/clip-vit and google/siglip on the hub: a tower beside one of texts, and no part called as the model is."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = sizes | {"image_size": 12, "patch_size": 4}
    config = AutoConfig.for_model(kind, text_config=sizes | {"vocab_size": 60}, vision_config=vision)
    torch.manual_seed(3)
    whole = AutoModel.from_config(config)
    whole.save_pretrained(tmp_path)
    want, classified = dict(whole.named_parameters()), config_for(str(tmp_path), CLASSES)
    assert side_of(classified, kind) == 12
    got = read(tmp_path)
    assert {name for name, value in got.items() if (value == 7).all()} == {
        "classifier.weight",
        "classifier.bias",
    }
    for name in got.keys() - {"classifier.weight", "classifier.bias"}:
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=0)
    with torch.device("meta"):
        model = with_adapters(classified, "pictures", LoRA(rank=2), tmp_path)
    learned = {name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name}
    assert learned == {"classifier.weight", "classifier.bias"}


def test_a_head_that_cannot_be_told_from_the_layers_is_refused(tmp_path):
    options = HGNetV2Config(embedding_size=8, depths=[1], hidden_sizes=[8], stem_channels=[3, 4, 8],
                            stage_in_channels=[8], stage_mid_channels=[4], stage_out_channels=[8],
                            stage_num_blocks=[1], stage_downsample=[False], stage_light_block=[False],
                            stage_kernel_size=[3], stage_numb_of_layers=[1])  # fmt: skip
    AutoModelForImageClassification.from_config(options).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot be told from the layers below it"):
        read(tmp_path)


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
