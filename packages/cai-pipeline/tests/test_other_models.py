"""Encoder-decoders and image classifiers in stages, against the same model in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from pipeline_families import build as build_lm
from pipeline_families import config_of, sum_tied_gradients
from pipeline_models import (
    MODELS,
    PAIRS,
    WORDS,
    batches,
    build,
    compare,
    inputs_of,
    loss_of,
    reference,
    train,
)
from torch.distributed.device_mesh import init_device_mesh

from cai_mesh.errors import PlanError
from cai_mesh.layout import attach, canonical_name, reduce_of
from cai_mesh.testing import run_ranks
from cai_pipeline import PipelineRunner, Trial, split
from cai_pipeline.plans.placement import place
from cai_pipeline.run import transfer
from cai_pipeline.stages.call import Call
from cai_pipeline.stages.partition import partition, tied_parameters
from cai_pipeline.stages.small_model import small_model
from cai_pipeline.stages.stage import run_stage
from cai_pipeline.stages.verify_split import Tried, chain, gradients, structure_of, verify_call, verify_split

LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "interleaved": {"chunks": 2},
    "zb-h1": {},
    "zb-v": {"chunks": 2, "placement": "v"},
    "auto": {},
}
ENCODER = 3
"""Layers of the encoders here."""


@pytest.mark.parametrize(
    ("name", "ranks", "schedule", "ragged"),
    [
        ("t5", 2, "1f1b", True),
        ("t5", 4, "zb-h1", False),
        ("t5", 4, "zb-v", True),
        ("flan-t5", 2, "interleaved", True),
        ("bart", 4, "1f1b", True),
        ("bart", 2, "zb-v", False),
        ("whisper", 2, "interleaved", True),
        ("whisper", 4, "zb-h1", False),
        ("whisper", 2, "auto", True),
        ("vit", 4, "1f1b", True),
        ("vit", 2, "interleaved", False),
        ("vit", 2, "zb-v", True),
    ],
)
def test_training_is_that_of_one_process(name: str, ranks: int, schedule: str, ragged: bool) -> None:
    counts = (4, 6)
    found = run_ranks(ranks, train, name, ranks, schedule, counts, ragged, **LAYOUTS[schedule])
    compare(found, name, counts, ragged)


@pytest.mark.parametrize("name", ["t5", "whisper", "vit"])
def test_what_travels_in_eight_bits_is_near(name: str) -> None:
    """Several tensors among them, of which the position bias of T5 travels as it is."""
    (expected, *_), losses = reference(name, 4, True), set()
    for of_rank in run_ranks(4, train, name, 4, "1f1b", (4,), True, wire="fp8"):
        found = of_rank[4][0]
        losses.add(float(found.pop("loss")))
        for key, value in found.items():
            if key.startswith("grad."):
                assert (value - expected[key]).norm() <= 0.2 * expected[key].norm() + 1e-6, key
    (loss,) = losses
    assert 0 < abs(loss - float(expected["loss"])) <= 0.02 * float(expected["loss"])


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", list(LAYOUTS))
@pytest.mark.parametrize("name", list(MODELS))
def test_all_schedules(name: str, schedule: str, ranks: int) -> None:
    counts = (4, 6)
    found = run_ranks(ranks, train, name, ranks, schedule, counts, True, **LAYOUTS[schedule])
    compare(found, name, counts, True)


@pytest.mark.parametrize("name", list(MODELS))
def test_a_boundary_may_be_anywhere(name: str) -> None:
    """Two stages, the second of which begins at any layer; the one with the encoder's end may begin the decoder."""
    whole, inputs = build(name), inputs_of(name, 1)
    structure = verify_split(small_model(whole))
    expected = whole(**inputs)
    loss_of_all(expected).backward()
    for cut in range(1, 8):
        parts = parts_of(whole, structure, [range(cut), range(cut, 8)])
        output = chain(parts, inputs, loss_of_all)
        torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=0)
        found = gradients(parts)
        for key, parameter in whole.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found.pop(key), gradient, rtol=1e-10, atol=1e-12, msg=f"{cut}: {key}")
        assert not found


def loss_of_all(output: Any) -> torch.Tensor:
    return output.logits.square().mean()


def parts_of(whole: Any, structure: Any, stage_layers: list[range]) -> list[Any]:
    parts = []
    for rank in range(len(stage_layers)):
        part = copy.deepcopy(whole)
        part.zero_grad()
        tied = tied_parameters(part, structure, stage_layers)
        partition(part, structure, stage_layers, place(len(stage_layers)), rank, tied)
        for name, each in tied.items():
            attach(each.parameter, name=name)
        parts.append(part)
    return parts


def sent_by_each(name: str, stage_layers: list[range]) -> list[list[tuple[int, ...]]]:
    """The shapes of what each stage but the last sends."""
    whole = build(name)
    parts = parts_of(whole, structure_of(small_model(whole)), stage_layers)
    shapes, received = [], None
    for part in parts[:-1]:
        received = run_stage(part, received, inputs_of(name, 1))
        tensors = (received,) if isinstance(received, torch.Tensor) else received
        shapes.append([tuple(each.shape) for each in tensors])
    return shapes


def test_what_travels() -> None:
    """Source and target have 8 and 6 tokens. A position bias of T5 is [1, heads, length, length]."""
    cuts = [range(2), range(2, 3), range(3, 5), range(5, 8)]
    source, target = (2, 8, 32), (2, 6, 32)
    assert sent_by_each("bart", cuts) == [[source], [source], [target, source]]
    biased = [[source, (1, 4, 8, 8)], [source], [target, (1, 4, 6, 6), source]]
    assert sent_by_each("t5", cuts) == biased
    assert sent_by_each("vit", cuts) == [[(2, 17, 32)]] * 3


def test_code_may_ask_a_placeholder_for_the_dtype_of_its_weight() -> None:
    """As Mamba does of its head, on every stage."""
    config = hf.MambaConfig(hidden_size=32, num_hidden_layers=4, vocab_size=96, state_size=4)
    verify_split(small_model(hf.MambaForCausalLM(config)))
    part = parts_of(build("vit"), structure_of(small_model(build("vit"))), [range(4), range(4, 8)])[1]
    projection = part.vit.embeddings.patch_embeddings.projection
    assert not list(projection.parameters()) and not hasattr(projection, "weight")


def count_messages(name: str) -> list[int]:
    """Tensors that the first of four ranks starts to send in a second step, and those it did before that."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    sent: list[int] = []

    def counted(group: Any, *, sends: Any = (), receives: Any = ()) -> Any:
        sent.append(len(sends))
        return start(group, sends=sends, receives=receives)

    start = transfer.start_exchange
    whole = build_lm(config_of("llama", 8)) if name == "llama" else build(name)
    model = split(whole, mesh, balance=[2, 2, 2, 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "start_exchange", counted)
        runner = PipelineRunner(model, mesh, schedule="gpipe", microbatches=4, loss_fn=loss_of)
        inputs, targets = batches("t5" if name == "llama" else name, 4, 0, False)
        if name == "llama":
            inputs = [{"input_ids": each["decoder_input_ids"]} for each in inputs]
        steps = []
        for _ in range(2):
            sent.clear()
            runner.step(inputs, targets)
            steps.append(sum(sent))
    return steps


def test_one_tensor_is_one_message() -> None:
    """Four outputs and, the first time, their shape; the first stage of T5 sends the position bias too."""
    assert run_ranks(4, count_messages, "llama")[0] == [5, 4]
    assert run_ranks(4, count_messages, "t5")[0] == [10, 8]


@pytest.mark.parametrize(
    ("name", "frozen", "schedule"),
    [
        ("t5", "encoder.", "zb-h1"),
        ("t5", "decoder.block.4", "1f1b"),
        ("whisper", "model.encoder.", "interleaved"),
        ("vit", "vit.embeddings", "zb-h1"),
    ],
)
def test_frozen_parts(name: str, frozen: str, schedule: str) -> None:
    found = run_ranks(2, train, name, 2, schedule, (4,), True, frozen=frozen, **LAYOUTS[schedule])
    compare(found, name, (4,), True, frozen)


def embeddings_shared(name: str) -> dict[str, tuple[list[int], bool]]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    model = split(build(name), mesh, balance=[2, 2, 2, 2])
    specs = {canonical_name(key, p): reduce_of(p) for key, p in model.named_parameters()}
    return {
        key: (torch.distributed.get_process_group_ranks(spec.tied), spec.owner)
        for key, spec in specs.items()
        if spec.tied is not None
    }


def test_tied_embeddings_are_shared_by_up_to_three_ranks() -> None:
    """The decoder begins on the second rank."""
    tied = (("t5", "shared.weight", [0, 1, 3]), ("whisper", "model.decoder.embed_tokens.weight", [1, 3]))
    for name, weight, ranks in tied:
        found = run_ranks(4, embeddings_shared, name)
        assert found == [{weight: (ranks, rank == ranks[0])} if rank in ranks else {} for rank in range(4)]


def step_with(name: str, call: str) -> Any:
    """Loss and the largest gradient's difference to one process with labels, or the refusal."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    inputs = inputs_of(name, 1, longer=70 if call == "long" else 0)
    if name in PAIRS:
        inputs["labels"] = inputs["decoder_input_ids"].roll(-1, 1)
        if call == "labels alone":
            inputs.pop("decoder_input_ids")
        elif call == "long":
            inputs["decoder_attention_mask"] = torch.ones_like(inputs["decoder_input_ids"])
    else:
        inputs["labels"] = torch.tensor([1, 3])
    model = split(build(name), mesh)
    runner = PipelineRunner(model, mesh, microbatches=2, loss_fn=lambda output, _: output.loss / 2)
    try:
        loss = runner.step([inputs, inputs], [None, None])
    except PlanError as error:
        return str(error)
    sum_tied_gradients(model)
    whole = build(name)
    expected = whole(**inputs).loss
    expected.backward()
    wanted = {key: p.grad for key, p in whole.named_parameters() if p.grad is not None}
    own = {canonical_name(key, p): p.grad for key, p in model.named_parameters() if p.grad is not None}
    off = [
        float((own[key] - wanted[key]).abs().max() / wanted[key].abs().max().clamp(min=1e-9)) for key in own
    ]
    return max(*off, abs(float(loss) - float(expected.detach())))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("t5", "labels alone"),
        ("bart", "labels alone"),
        ("t5", "labels and ids"),
        ("whisper", "labels and ids"),
        ("vit", "labels"),
        ("flan-t5", "long"),
    ],
)
def test_calls_with_labels(name: str, call: str) -> None:
    for got in run_ranks(2, step_with, name, call):
        assert got < 1e-5  # the models' own losses compute in float32


def test_whisper_needs_its_decoders_input() -> None:
    for got in run_ranks(2, step_with, "whisper", "labels alone"):
        assert "decoder_input_ids" in got
        assert "pass decoder_input_ids: the labels, shifted to the right" in got


def evaluate(name: str) -> tuple[float, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model = split(build(name), mesh, chunks=2, placement="v")
    runner = PipelineRunner(model, mesh, schedule="bfs", microbatches=2, loss_fn=loss_of)
    inputs, targets = batches(name, 3, 0, ragged=True)
    loss = float(runner.evaluate(inputs, targets))
    output = runner.forward(inputs[1])
    return loss, None if output is None else (output.logits, output.get("encoder_last_hidden_state"))


@pytest.mark.parametrize("name", ["t5", "whisper", "vit"])
def test_evaluation_and_forward(name: str) -> None:
    model = build(name)
    inputs, targets = batches(name, 3, 0, ragged=True)
    with torch.no_grad():
        expected = sum(float(loss_of(model(**i), t)) for i, t in zip(inputs, targets, strict=True))
        whole = model(**inputs[1])
    first, second = run_ranks(2, evaluate, name)
    assert [first[0], second[0]] == pytest.approx([expected] * 2, rel=1e-9)
    assert second[1] is None
    logits, memory = first[1]
    torch.testing.assert_close(logits, whole.logits, rtol=1e-9, atol=1e-9)
    if name in PAIRS:
        torch.testing.assert_close(memory, whole.encoder_last_hidden_state, rtol=1e-9, atol=1e-9)


def _beit(**options: Any) -> Any:
    config = hf.BeitConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48, image_size=16,
        patch_size=4, **options,
    )  # fmt: skip
    return hf.BeitForImageClassification(config)


def _swin() -> Any:
    return hf.SwinForImageClassification(
        hf.SwinConfig(
            image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
        )
    )


class LeakyT5(hf.T5ForConditionalGeneration):
    """An encoder-decoder that reads the embeddings of the source once more, after the decoder."""

    def forward(self, input_ids: Any, labels: Any, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        output["logits"] = output.logits + self.encoder.embed_tokens(input_ids).mean()
        output["loss"] = output.loss + output.logits.mean()
        return output


def _leaky() -> Any:
    return LeakyT5(
        hf.T5Config(d_model=32, d_kv=8, num_heads=4, d_ff=48, num_layers=2, decoder_start_token_id=0)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _beit(use_shared_relative_position_bias=True), "beit.layers.1, which needs a gradient"),
        (_swin, "'PlaceholderLayer' object has no attribute 'downsample'"),
        (_leaky, "encoder.embed_tokens has parameters and runs among the layers"),
    ],
)
def test_models_that_cannot_be_split_are_refused(make: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        verify_split(small_model(make()))


class Beside(torch.nn.Module):
    """Two lists of layers and no encoder between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.first, *self.second):
            x = layer(x)
        return x


class Pair(torch.nn.Module):
    """Not of transformers: an encoder of three layers that returns a tensor, and two layers that read it."""

    class Reader(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.source = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.own(x) + self.source(source).mean(1, keepdim=True))

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Module()
        self.encoder.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)
        )
        self.encoder.forward = self._encode
        self.start = torch.nn.Linear(4, 8)
        self.layers = torch.nn.ModuleList(Pair.Reader() for _ in range(2))

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.encoder.layers:
            x = layer(x)
        return x

    def forward(self, source: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        memory, x = self.encoder(source), self.start(x)
        for layer in self.layers:
            x = layer(x, memory)
        return x


def trial_of(make: Any, *lists: str) -> Trial:
    def small() -> torch.nn.Module:
        torch.manual_seed(0)
        return make()

    def inputs() -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        wide = torch.randn(2, 5, 8, dtype=torch.float64, generator=generator)
        narrow = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
        return {"source": wide, "x": narrow} if make is Pair else {"x": wide}

    return Trial(small, inputs, lambda output: output.square().sum(), lists)  # type: ignore[arg-type]


def test_two_lists_of_a_trial() -> None:
    structure = verify_split(trial_of(Pair, "encoder.layers", "layers"))
    assert structure.encoder is not None and structure.encoder.entry is None
    with pytest.raises(PlanError, match="an encoder that is a module of its own"):
        verify_split(trial_of(Beside, "first", "second"))


@pytest.mark.parametrize("name", ["t5", "bart", "whisper", "vit"])
def test_dropout_in_training(name: str) -> None:
    """Also at the end of an encoder and on a decoder's embeddings, wherever the boundary is."""
    model = MODELS[name]()
    for key in ("dropout_rate", "dropout", "hidden_dropout_prob"):
        if hasattr(model.config, key):
            setattr(model.config, key, 0.1)
    small = small_model(type(model)(model.config))  # a model that was built without dropout has none
    trained = small.build().double().train()
    draws = [trained(**small.inputs()).logits for _ in range(2)]
    assert not torch.equal(*draws), "there is dropout"
    for cut in range(1, 8):  # raises where stages give something else
        assert "logits" not in verify_call(Tried(small, (range(cut), range(cut, 8))), Call(training=True))


def test_layers_left_out_at_random_are_refused() -> None:
    small = small_model(hf.M2M100ForConditionalGeneration(hf.M2M100Config(**_small_layers())))
    verify_split(small)
    with pytest.raises(PlanError, match="leaves out layers at random"):
        verify_call(Tried(small), Call(training=True))


def _small_layers() -> dict[str, Any]:
    return {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 96,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    }  # fmt: skip


def test_a_t5_that_cannot_shift_labels_is_tried_without() -> None:
    """As transformers' T5Config is by itself."""
    config = hf.T5Config(d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=2, vocab_size=WORDS)
    assert not hasattr(config, "decoder_start_token_id")
    small = small_model(hf.T5ForConditionalGeneration(config))
    assert not small.labelled
    verify_split(small)


@pytest.mark.parametrize(("samples", "length"), [(6, 6), (12, 12), (32, 32)])
def test_sizes_of_a_call_may_be_equal(samples: int, length: int) -> None:
    """Samples, tokens and features of one number each: places say which a dim is of. The model is 32 wide."""
    whole = build("t5")
    small = small_model(whole)
    ids = torch.zeros(samples, length, dtype=torch.int64)
    masks = {"decoder_attention_mask": ids, "attention_mask": torch.zeros(samples, 1, length, length)}
    given = {"inputs_embeds": torch.zeros(samples, length, 32), "decoder_input_ids": ids, **masks}
    call = Call.of(whole, given, small, {})
    assert {keyword.name: keyword.shape for keyword in call.more} == {
        "inputs_embeds": ("batch", "length", "hidden"),
        "decoder_input_ids": ("batch", "length"),
        "decoder_attention_mask": ("batch", "length"),
        "attention_mask": ("batch", 1, "length", "length"),
    }


def square(ranks: int) -> float:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
    runner = PipelineRunner(split(build("t5"), mesh), mesh, microbatches=1, loss_fn=loss_of)
    ids = torch.arange(64).reshape(8, 8) % WORDS
    return float(runner.step([{"input_ids": ids, "decoder_input_ids": ids}], [ids]))


def test_as_many_samples_as_tokens() -> None:
    ids = torch.arange(64).reshape(8, 8) % WORDS
    expected = loss_of(build("t5")(input_ids=ids, decoder_input_ids=ids), ids).item()
    assert run_ranks(2, square, 2) == pytest.approx([expected] * 2, rel=1e-9)
