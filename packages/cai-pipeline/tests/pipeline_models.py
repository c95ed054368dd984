"""Small encoder-decoders and image classifiers, their batches, and their training in one process and on stages."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from pipeline_families import optimizer_of, snapshot, sum_tied_gradients
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from cai_mesh.testing import assert_same_as_one_device
from cai_pipeline import PipelineRunner, split
from cai_pipeline.plans.placement import Placement
from cai_pipeline.run.wire import Wire

STEPS = 2
WORDS = 96
Inputs = dict[str, torch.Tensor]

_T5: dict[str, Any] = {
    "d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "vocab_size": WORDS, "num_layers": 3,
    "num_decoder_layers": 5, "dropout_rate": 0.0, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8,
}  # fmt: skip
_BART: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 3, "decoder_layers": 5, "encoder_attention_heads": 4, "dropout": 0.0,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": WORDS,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
_WHISPER: dict[str, Any] = {
    "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 40, "suppress_tokens": [],
    "begin_suppress_tokens": [], "apply_spec_augment": False,
}  # fmt: skip
_IMAGE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
    "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 5,
}  # fmt: skip

PAIRS = {
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5)),
    "flan-t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(**_T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    ),
    "longt5": lambda: hf.LongT5ForConditionalGeneration(hf.LongT5Config(**_T5, local_radius=4)),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**_BART)),
    "mbart": lambda: hf.MBartForConditionalGeneration(hf.MBartConfig(**_BART)),
    "pegasus": lambda: hf.PegasusForConditionalGeneration(hf.PegasusConfig(**_BART)),
    "marian": lambda: hf.MarianMTModel(hf.MarianConfig(**_BART)),
    "whisper": lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(**_BART, **_WHISPER)),
}
IMAGES = {
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**_IMAGE)),
    "deit": lambda: hf.DeiTForImageClassification(hf.DeiTConfig(**_IMAGE)),
    "beit": lambda: hf.BeitForImageClassification(
        hf.BeitConfig(**_IMAGE, use_relative_position_bias=True, drop_path_rate=0.0)
    ),
    "dinov2": lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(**_IMAGE, mlp_ratio=2)),
}
MODELS = {**PAIRS, **IMAGES}


def build(name: str) -> Any:
    """A float64 model with random parameters, the same in every process; eight layers, three of them an encoder's."""
    model = MODELS[name]().double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    return model.train()


def inputs_of(name: str, seed: int, longer: int = 0) -> Inputs:
    """Two samples without labels, the same in every process; texts of `6 + longer` and `8 + longer` tokens."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> torch.Tensor:
        return torch.randint(3, WORDS, (2, length), generator=generator)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(2, *shape, generator=generator, dtype=torch.float64)

    if name in IMAGES:
        wide = {"interpolate_pos_encoding": True} if name == "vit" and longer else {}
        side = 16 + (4 * longer if wide else 0)
        return {"pixel_values": numbers(3, side, side), **wide}  # type: ignore[dict-item]
    decoder = {"decoder_input_ids": ids(6 + longer)}
    if name == "whisper":
        return {"input_features": numbers(8, 20), **decoder}
    mask = torch.ones(2, 8 + longer, dtype=torch.int64)
    mask[0, -2:] = 0
    return {"input_ids": ids(8 + longer), "attention_mask": mask, **decoder}


def batches(name: str, count: int, step: int, ragged: bool) -> tuple[list[Inputs], list[torch.Tensor]]:
    """Microbatches and targets of one step; ragged ones differ in length, or in the size of an image."""
    inputs = [inputs_of(name, 100 * step + m, 2 * (m % 3) if ragged else 0) for m in range(count)]
    if name in IMAGES:
        return inputs, [torch.tensor([m % 5, (m + step) % 5]) for m in range(count)]
    return inputs, [each["decoder_input_ids"].roll(-1, 1) for each in inputs]


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    logits = output.logits
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), target.flatten(), reduction="sum") / 100.0


def freeze(model: torch.nn.Module, frozen: str) -> None:
    """Freeze the parameters whose names begin like this; nothing for an empty text."""
    for name, parameter in model.named_parameters():
        if frozen and name.startswith(frozen):
            parameter.requires_grad_(False)


def reference(name: str, count: int, ragged: bool, frozen: str = "") -> list[dict[str, torch.Tensor]]:
    """Loss, gradients and parameters after each step of a plain loop in this process."""
    model = build(name)
    freeze(model, frozen)
    optimizer, steps = optimizer_of(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for inputs, target in zip(*batches(name, count, step, ragged), strict=True):
            part = loss_of(model(**inputs), target)
            part.backward()
            loss += part.detach()
        steps.append(snapshot(model, loss, optimizer))
    return steps


def train(
    name: str,
    ranks: int,
    schedule: str,
    counts: tuple[int, ...],
    ragged: bool,
    *,
    chunks: int = 1,
    placement: Placement = "loop",
    balance: tuple[int, ...] | None = None,
    frozen: str = "",
    wire: Wire = "full",
) -> dict[int, list[dict[str, torch.Tensor]]]:
    """What `reference` gives, on this rank's stages, for each number of microbatches."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
    trained = {}
    for count in counts:
        model = split(build(name), mesh, chunks=chunks, placement=placement, balance=balance or "auto")
        freeze(model, frozen)
        optimizer = optimizer_of(model)
        how: dict[str, Any] = {"schedule": schedule, "wire": wire}
        runner = PipelineRunner(model, mesh, microbatches=count, loss_fn=loss_of, **how)
        trained[count] = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = runner.step(*batches(name, count, step, ragged))
            sum_tied_gradients(model)
            trained[count].append(snapshot(model, loss, optimizer))
    return trained


def compare(found: list[Any], name: str, counts: tuple[int, ...], ragged: bool, frozen: str = "") -> None:
    """All ranks have what one process has, and together all of it."""
    for count in counts:
        for step, expected in enumerate(reference(name, count, ragged, frozen)):
            for rank in found:
                own = rank[count][step]
                assert_same_as_one_device(own, {key: expected[key] for key in own}, tolerance=1e-9)
            assert {key for rank in found for key in rank[count][step]} == set(expected)
