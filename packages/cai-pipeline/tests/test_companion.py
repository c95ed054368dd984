"""A companion's sums travel along the stages, and their gradient comes back to every layer."""

from __future__ import annotations

import pytest
import torch
from pipeline_families import token_ids
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from cai_mesh.errors import PlanError
from cai_mesh.layout import canonical_name
from cai_mesh.testing import run_ranks
from cai_pipeline import PipelineRunner, accompany, split


def build():
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, vocab_size=96,
        tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).double()


class Squares:
    """Adds up what layers return and its squares; their product is a loss of all layers together."""

    size = 2

    def __init__(self, model):
        self.sums, self.inputs = None, []
        for layer in model.model.layers:
            if type(layer).__name__ == "LlamaDecoderLayer":
                layer.register_forward_hook(self._add)

    def _add(self, layer, args, output):
        self.sums = self.sums + torch.stack([output.mean(), output.square().mean()])

    def begin(self, model, received, inputs):
        self.sums = torch.zeros(2, dtype=torch.float64) if received is None else received + 0
        self.inputs.append(inputs["input_ids"])

    def end(self):
        return self.sums

    def loss(self):
        return self.sums[0] * self.sums[1]


def expected(microbatches):
    model = build()
    squares = Squares(model)
    total = 0.0
    for inputs in microbatches:
        squares.begin(model, None, inputs)
        loss = model(**inputs).logits.square().mean() + squares.loss()
        loss.backward()
        total += loss.item()
    return total, {name: param.grad for name, param in model.named_parameters()}


def batches():
    return [{"input_ids": token_ids(seed), "use_cache": False} for seed in (1, 2)]


def stepped(schedule, chunks, placement):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model = split(build(), mesh, chunks=chunks, placement=placement)
    squares = Squares(model)
    accompany(model, squares)

    def loss(output, target):
        return output.logits.square().mean() + squares.loss()

    runner = PipelineRunner(model, mesh, schedule=schedule, microbatches=2, loss_fn=loss)
    total = runner.step(batches(), [None, None]).item()
    assert runner.evaluate(batches(), [None, None]).item() == pytest.approx(total)
    assert len(squares.inputs) == 4 * chunks
    with pytest.raises(PlanError, match="has a companion"):
        accompany(model, squares)
    return total, {canonical_name(n, p): p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("schedule", "chunks", "placement"), [("1f1b", 1, "loop"), ("interleaved", 2, "loop"), ("zb-v", 2, "v")]
)
def test_a_loss_of_all_layers_is_that_of_the_whole_model(schedule, chunks, placement):
    total, gradients = expected(batches())
    names = set()
    for got_total, got in run_ranks(2, stepped, schedule, chunks, placement):
        assert got_total == pytest.approx(total, rel=1e-12)
        for name, gradient in got.items():
            assert torch.allclose(gradient, gradients[name], rtol=1e-9, atol=1e-12), name
        names |= got.keys()
    assert names == gradients.keys()
