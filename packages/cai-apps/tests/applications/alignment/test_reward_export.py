"""What a run exports opens in transformers and peft, and says there of a padded batch what it says of single texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl_toys import CPU, END, PADDING, PAIRS, START, Ours, pair, write_model, write_records

from cai_apps.applications.alignment.config import Alignment, Config
from cai_apps.applications.alignment.task import ALIGNMENT
from cai_apps.cli import main
from cai_apps.compose.apply import apply
from cai_apps.compose.models import load_model_config, model_config_for
from cai_apps.compose.value_head import has_stored_head
from cai_apps.config import file as config_file
from cai_apps.data.tokenizer import load_tokenizer
from cai_apps.run.files.finding import find_run
from cai_apps.run.task import Job
from cai_mesh import checkpoint
from cai_mesh.errors import ConfigError
from cai_mesh.testing import run_ranks

OPTIONS = {
    "model.weights": "pretrained",
    "data.sequence_length": 96,
    "data.validation_fraction": 0.0,
    "optimizer.lr": 0.05,
    "lr_schedule.warmup_steps": 0,
    "log.sample_tokens": 0,
    "train.steps": 2,
    "train.global_batch": 2,
    "train.microbatch_size": 1,
    "train.validate_every": 0,
    "train.device": "cpu",
    "train.compile": "off",
    "parallel.shard": 1,
}
TEXTS = ["So long, and be kind.", "Hi.", "It is 5.", "3+3 is 6, two twos are 4. So long, and be kind."]


def train(recipe: str, home: Path, name: str, model: Path, **more: Any) -> Path:
    """Train two steps; returns the run."""
    records = write_records(home / "pairs.jsonl", [pair(*texts) for texts in PAIRS])
    values = OPTIONS | {"model.name": model, "data.source": records, "data.cache": home / "cache"}
    values |= {"log.directory": home / name} | {key.replace("__", "."): value for key, value in more.items()}
    assert main(["train", recipe, *(f"--{key}={value}" for key, value in values.items())]) == 0
    return home / name


def conversations(tokenizer: Any) -> list[list[int]]:
    """The ids of texts of different lengths, each a turn of a conversation that is over."""
    messages = (
        [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": text}] for text in TEXTS
    )
    return [
        tokenizer(tokenizer.apply_chat_template(turns, tokenize=False))["input_ids"] for turns in messages
    ]


def logits_of_run(run: Path, texts: list[list[int]]) -> list[torch.Tensor]:
    """What the model of a run's newest checkpoint says at the last token of each text by itself. On one rank."""
    run_directory, source = find_run(run)
    config = ALIGNMENT.resolve(config_file.read(run_directory.config_file, Config), 1)
    model = model_config_for(config.model.name, load_tokenizer(run_directory.path / "tokenizer"))
    session = apply(config, ALIGNMENT.workload_of(config, model), device=CPU)
    session.loaded(checkpoint.load(source, session.state()), 0)
    with torch.no_grad():
        return [session.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1] for ids in texts]


def padded(tokenizer: Any, texts: list[list[int]]) -> dict[str, torch.Tensor]:
    """A batch of texts as users make it: by the tokenizer."""
    return dict(tokenizer.pad({"input_ids": texts}, return_tensors="pt"))


def rewards(model: Any, tokenizer: Any, texts: list[list[int]]) -> torch.Tensor:
    batch = padded(tokenizer, texts)
    assert batch["input_ids"].shape[1] > min(map(len, texts))
    with torch.no_grad():
        return model.eval()(**batch).logits


def opened(directory: Path, **options: Any) -> Any:
    """A sequence classification of a folder, which has all its weights and no others."""
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        directory, output_loading_info=True, dtype=torch.float32, **options
    )
    assert not any(loading.values()), loading
    return model


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def base(home):
    return write_model(home / "base", 1)


def test_a_reward_model_opens_as_a_sequence_classification(home, base):
    run = train("rm-tiny", home, "reward", base)
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    texts = conversations(tokenizer)
    expected = torch.stack(run_ranks(1, logits_of_run, run, texts)[0])
    model = opened(run / "export")
    assert model.config.num_labels == 1 and model.config.architectures == ["LlamaForSequenceClassification"]
    torch.testing.assert_close(rewards(model, tokenizer, texts), expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.1
    assert main(["export", str(run), str(home / "again")]) == 0
    again = opened(home / "again").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


def test_an_adapter_of_a_reward_model_opens_on_its_base(home, base, capsys):
    run = train("rm-tiny", home, "reward-lora", base, lora__rank=4)
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    texts = conversations(tokenizer)
    expected = torch.stack(run_ranks(1, logits_of_run, run, texts)[0])
    assert expected.std() > 0.1
    assert "AutoPeftModelForSequenceClassification with num_labels=1" in capsys.readouterr().out
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    by_hand = PeftModel.from_pretrained(plain, run / "export")
    torch.testing.assert_close(rewards(by_hand, tokenizer, texts), expected, rtol=1e-5, atol=1e-5)
    alone = AutoPeftModelForSequenceClassification.from_pretrained(run / "export", num_labels=1)
    torch.testing.assert_close(rewards(alone, tokenizer, texts), expected, rtol=1e-5, atol=1e-5)
    assert main(["export", str(run), str(home / "adapter")]) == 0
    assert (home / "adapter" / "adapter_config.json").read_text() == (
        run / "export" / "adapter_config.json"
    ).read_text()
    assert main(["export", str(run), str(home / "merged"), "--merge"]) == 0
    joined = opened(home / "merged")
    torch.testing.assert_close(rewards(joined, tokenizer, texts), expected, rtol=1e-5, atol=1e-5)


def test_an_adapter_of_dpo_opens_on_its_base(home, base):
    run = train("dpo-tiny", home, "dpo-lora", base, lora__rank=4, reference__form="adapter")
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    texts = conversations(tokenizer)
    expected = torch.stack(run_ranks(1, logits_of_run, run, texts)[0])
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ends = torch.tensor([len(ids) - 1 for ids in texts])

    def last(model):
        with torch.no_grad():
            logits = model.eval()(**padded(tokenizer, texts)).logits
        return logits[torch.arange(len(texts)), ends]

    assert (last(plain) - expected).norm() > 1e-2 * expected.norm()
    for model in (
        PeftModel.from_pretrained(plain, run / "export"),
        AutoPeftModelForCausalLM.from_pretrained(run / "export"),
    ):
        torch.testing.assert_close(last(model), expected, rtol=1e-5, atol=1e-5)
    assert main(["export", str(run), str(home / "dpo-merged"), "--merge"]) == 0
    model, loading = AutoModelForCausalLM.from_pretrained(home / "dpo-merged", output_loading_info=True)
    assert not any(loading.values()), loading
    torch.testing.assert_close(last(model), expected, rtol=1e-5, atol=1e-5)


PADDED = {
    "its own": (PADDING, None),
    "that of an end": (END, START),
    "none": (None, None),
}
"""The token that fills texts up, and that of a beginning."""


def exported(jobs: list[Job]) -> None:
    """Write the models of runs as they are before the first step. On one rank."""
    for job in jobs:
        ALIGNMENT.export(apply(job.config, ALIGNMENT.work(job).workload, device=CPU), job)


def test_published_reward_models_are_read_with_their_heads(tmp_path):
    """What transformers has written says the same when it has been read and written here."""
    records = write_records(tmp_path / "pairs.jsonl", [pair(*texts) for texts in PAIRS])
    cases = [("llama", name) for name in PADDED] + [("qwen2", "its own"), ("gpt2", "its own")]
    jobs = []
    for number, (kind, name) in enumerate(cases):
        padding, bos = PADDED[name]
        model = write_model(tmp_path / f"{number}", number, labels=1, kind=kind, padding=padding, bos=bos)
        jobs.append(Ours(Alignment("reward"), model, records).job(tmp_path / f"run-{number}"))
    run_ranks(1, exported, jobs)
    for (_, name), job in zip(cases, jobs, strict=True):
        published, model = opened(Path(job.config.model.name)).eval(), opened(job.run.export).eval()
        tokenizer = AutoTokenizer.from_pretrained(job.run.export)
        texts = conversations(tokenizer)
        published.config.pad_token_id = None
        with torch.no_grad():
            expected = torch.cat([published(input_ids=torch.tensor([ids])).logits for ids in texts])
            alone = torch.cat([model(input_ids=torch.tensor([ids])).logits for ids in texts])
        torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-5)
        assert expected.std() > 0.01
        if name == "none":
            assert model.config.pad_token_id is None
        else:
            assert tokenizer.pad_token_id == model.config.pad_token_id != tokenizer.eos_token_id
            torch.testing.assert_close(rewards(model, tokenizer, texts), expected, rtol=1e-5, atol=1e-5)


def test_a_head_of_several_labels_is_refused(tmp_path):
    records = write_records(tmp_path / "pairs.jsonl", [pair(*texts) for texts in PAIRS])
    model = write_model(tmp_path / "model", 1, labels=2)
    with pytest.raises(ConfigError, match="classify into 2 labels") as refused:
        Ours(Alignment("reward"), model, records).job(tmp_path / "run")
    assert "num_labels = 1" in str(refused.value)


HEADS = {
    "TRL's value head": {"v_head.summary.weight": (1, 32), "v_head.summary.bias": (1,)},
    "ColossalChat's": {"value_head.weight": (1, 32)},
    "UltraRM's": {"regression_head.weight": (1, 32)},
    "two layers": {"score.0.weight": (32, 32), "score.2.weight": (1, 32)},
    "a bias": {"score.weight": (1, 32), "score.bias": (1,)},
}
"""Heads as other libraries store them, by name and shape."""


@pytest.mark.parametrize("head", HEADS)
def test_a_head_under_another_name_is_refused(tmp_path, head):
    """To begin with a new head would lose the one that was trained."""
    records = write_records(tmp_path / "pairs.jsonl", [pair(*texts) for texts in PAIRS])
    model = write_model(tmp_path / "model", 1)
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {n: torch.ones(s) for n, s in HEADS[head].items()}, model / "model.safetensors")
    with pytest.raises(ConfigError, match="does not read") as refused:
        Ours(Alignment("reward"), model, records).job(tmp_path / "run")
    names = [name for name in HEADS[head] if name != "score.weight"]
    assert names[0] in str(refused.value) and "score.weight" in str(refused.value)


def test_buffers_that_old_files_hold_are_no_heads(tmp_path):
    """GPT-2's file on the hub has no prefix, and its masks as buffers."""
    records = write_records(tmp_path / "pairs.jsonl", [pair(*texts) for texts in PAIRS])
    model = write_model(tmp_path / "model", 1, kind="gpt2")
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 8, 8)}, model / "model.safetensors")
    assert Ours(Alignment("reward"), model, records).job(tmp_path / "run").config.model.name == str(model)
    assert not has_stored_head(model, load_model_config(str(model)))
