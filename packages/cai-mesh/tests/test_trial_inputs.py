"""Small models of transformers get the inputs that their class takes, and run with them."""

from __future__ import annotations

import pytest
import torch
import transformers

from cai_mesh.errors import PlanError
from cai_mesh.trial import arguments_of, shrunk, tensors_of

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


@pytest.mark.parametrize("name", ["ViTForImageClassification", "WhisperForConditionalGeneration", "T5Model"])
def test_a_small_model_of_a_small_model_is_the_same(name):
    small = shrunk(model_of(name), labelled=False)
    assert shrunk(small.build(), labelled=False) == small
