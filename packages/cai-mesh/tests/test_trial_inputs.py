"""Small models of transformers get the inputs that their class takes, and run with them."""

from __future__ import annotations

import pytest
import torch
import transformers

from cai_mesh.errors import PlanError
from cai_mesh.trial import arguments_of, shrunk, small_model, tensors_of

VISION = {"vision_config": {"num_hidden_layers": 2}}
LAYERS = {"encoder_layers": 2, "decoder_layers": 2}
CASES = {
    "BertForMaskedLM": ({"num_hidden_layers": 2}, True, {"input_ids", "attention_mask", "labels"}),
    "T5ForConditionalGeneration": (
        {"num_layers": 2, "decoder_start_token_id": 0},
        True,
        {"input_ids", "attention_mask", "labels"},
    ),
    "T5Model": ({"num_layers": 2}, False, {"input_ids", "attention_mask", "decoder_input_ids"}),
    "T5EncoderModel": ({"num_layers": 2}, False, {"input_ids", "attention_mask"}),
    "ViTForImageClassification": ({"num_hidden_layers": 2}, False, {"pixel_values"}),
    "WhisperForConditionalGeneration": (LAYERS, False, {"input_features", "decoder_input_ids"}),
    "WhisperForCausalLM": (LAYERS, True, {"input_ids", "attention_mask", "labels"}),
    "Wav2Vec2Model": ({"num_hidden_layers": 2}, False, {"input_values"}),
    "ASTForAudioClassification": ({"num_hidden_layers": 2}, False, {"input_values"}),
    "CLIPForImageClassification": (VISION, False, {"pixel_values"}),
    "SwinForImageClassification": ({}, False, {"pixel_values"}),
    "Siglip2ForImageClassification": (
        VISION,
        False,
        {"pixel_values", "pixel_attention_mask", "spatial_shapes"},
    ),
    "Wav2Vec2ForCTC": ({"num_hidden_layers": 2}, False, {"input_values"}),
    "ParakeetForCTC": (
        {"encoder_config": {"num_hidden_layers": 2}},
        False,
        {"input_features"},
    ),
}
"""Class -> values of its config, whether it is given labels, and the names of its inputs."""


def model_of(name: str):
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        return model_class(model_class.config_class(**CASES[name][0]))


@pytest.mark.parametrize("name", list(CASES))
def test_inputs_are_what_the_class_takes(name):
    small = shrunk(model_of(name), labelled=CASES[name][1])
    inputs, again = small.inputs(), small.inputs()
    assert set(inputs) == CASES[name][2]
    assert all(torch.equal(value, again[key]) for key, value in inputs.items())
    assert all(t.dtype == torch.float64 for t in inputs.values() if t.is_floating_point())
    model = small.build()
    outputs = tensors_of(model(**arguments_of(model, inputs)))
    assert outputs
    assert all(bool(t.isfinite().all()) for t in outputs.values())


def test_labels_that_a_class_does_not_take_so_are_refused():
    with pytest.raises(PlanError, match="no small ViTForImageClassification"):
        shrunk(model_of("ViTForImageClassification"), labelled=True)


def test_labels_that_give_no_loss_are_refused():
    """A few frames have no alignment with as many labels: the loss of CTC is infinite."""
    with pytest.raises(PlanError, match="not finite"):
        shrunk(model_of("Wav2Vec2ForCTC"), labelled=True)


def test_parts_of_one_width_stay_so():
    """Otherwise there is a layer between encoder and decoder that the whole model does not have."""
    encoder = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
    config = transformers.MoonshineStreamingConfig(
        encoder_config=encoder, **{**encoder, "head_dim": 16, "pad_token_id": 0, "decoder_start_token_id": 1}
    )
    with torch.device("meta"):
        model = transformers.MoonshineStreamingForConditionalGeneration(config)
    assert isinstance(model.model.decoder.proj, torch.nn.Identity)
    assert isinstance(shrunk(model).build().model.decoder.proj, torch.nn.Identity)


@pytest.mark.parametrize("name", ["ViTForImageClassification", "WhisperForConditionalGeneration", "T5Model"])
def test_a_small_model_of_a_small_model_is_the_same(name):
    small = shrunk(model_of(name), labelled=False)
    assert shrunk(small.build(), labelled=False) == small


def test_a_model_whose_heads_stay_wide_is_narrow_with_fewer_layers(monkeypatch):
    """Linear attention has sizes of its own: narrow with all of its 12 layers it is too large, wide with 8 too."""
    model_class = transformers.Qwen3NextForCausalLM
    sizes = {
        "num_hidden_layers": 12,
        "num_experts": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }
    with torch.device("meta"):
        model = model_class(model_class.config_class(**sizes))
    monkeypatch.setattr(small_model, "PARAMETER_LIMIT", 2_000_000)
    small = shrunk(model, labelled=False)
    assert (small.config.num_hidden_layers, small.config.hidden_size) == (8, 32)
    assert set(small.config.layer_types) == set(model.config.layer_types)
    assert sum(param.numel() for param in small.build().parameters()) < 2_000_000


def test_words_of_every_layer_are_few():
    model_class = transformers.Gemma4ForCausalLM
    with torch.device("meta"):
        model = model_class(transformers.Gemma4TextConfig(num_hidden_layers=6))
    assert shrunk(model, labelled=False).config.vocab_size_per_layer_input == 64
