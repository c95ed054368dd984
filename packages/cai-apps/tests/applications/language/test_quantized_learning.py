"""What a model that was trained here loses in 4 and 8 bits, and what adapters beside it learn."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cai_apps.cli import main
from cai_kernels import dequantize, quantize

pytest.importorskip("peft")
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]
COMMON = {"train.device": "cpu", "parallel.shard": 1, "train.compile": "off", "log.sample_tokens": 0}
BASE = COMMON | {
    "data.sequence_length": 128, "train.steps": 200, "train.global_batch": 16, "train.microbatch_size": 16,
    "train.validate_every": 200, "parallel.tensor.size": 1, "parallel.pipeline.size": 1, "optimizer.lr": 3e-3,
}  # fmt: skip
LORA = COMMON | {
    "model.weights": "pretrained", "lora.rank": 8, "train.steps": 60, "train.validate_every": 60,
    "log.sample_tokens": 0,
}  # fmt: skip


def train(recipe: str, run: Path, values: dict) -> dict:
    words = [f"--{key}={value}" for key, value in (values | {"log.directory": run}).items()]
    assert main(["train", recipe, *words]) == 0
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("quantized")
    config = AutoConfig.for_model(
        "llama", vocab_size=2048, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    config.save_pretrained(home / "shape")
    train("llama-tiny", home / "base", BASE | {"model.name": home / "shape", "data.cache": home / "cache"})
    return home


def loss_of(directory: Path, kind: str) -> float:
    """The loss on text that the model was not trained on: this repository's own."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if kind != "compute":
        for layer in model.model.layers.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.data = dequantize(*quantize(layer.weight.data, kind), kind, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "\n".join(path.read_text() for path in sorted(Path(__file__).parent.glob("test_*.py")))
    ids = torch.tensor(tokenizer(text)["input_ids"])
    rows = ids[: len(ids) // 128 * 128].view(-1, 128)[:200]
    with torch.no_grad():
        return float(
            sum(model(input_ids=row, labels=row).loss for row in rows.split(20)) / len(rows.split(20))
        )


def test_perplexity_of_a_trained_model(home):
    losses = {kind: loss_of(home / "base" / "export", kind) for kind in ("compute", "int8", "nf4")}
    perplexities = {kind: math.exp(loss) for kind, loss in losses.items()}
    print(perplexities)
    assert losses["compute"] < 6.0, "the model has learned nothing"
    assert perplexities["int8"] < 1.002 * perplexities["compute"]
    assert 1.0001 * perplexities["compute"] < perplexities["nf4"] < 1.05 * perplexities["compute"]


def test_adapters_learn_beside_codes_what_they_learn_beside_numbers(home):
    values = LORA | {"model.name": home / "base" / "export", "data.cache": home / "cache"}
    last = {
        kind: train("sft-tiny", home / kind, values | {"lora.base": kind})
        for kind in ("compute", "int8", "nf4")
    }
    print({kind: line["validation_loss"] for kind, line in last.items()})
    expected = last["compute"]["validation_loss"]
    assert last["int8"]["validation_loss"] == pytest.approx(expected, rel=0.01)
    assert last["nf4"]["validation_loss"] == pytest.approx(expected, rel=0.05)
    assert last["nf4"]["validation_loss"] != expected
