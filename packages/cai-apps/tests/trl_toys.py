"""Small models, records and trainers of TRL, and what a run of ours says of the same records."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chat_tokenizers import tokenizer_of
from datasets import Dataset
from layouts import full, gradients_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import KTOConfig, KTOTrainer

from cai_apps.applications.alignment.config import Alignment, Config, Data, Reference
from cai_apps.applications.alignment.task import ALIGNMENT
from cai_apps.compose.apply import apply
from cai_apps.config import sections as c
from cai_apps.data.batches import Batches
from cai_apps.run.task import Job

CPU = torch.device("cpu")
START, END, PADDING = "<|im_start|>", "<|im_end|>", "<|padding|>"
TOKENS = (START, END, PADDING)
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Turns of which an answer's last token is the one that ends it."""
LINES = TURNS.replace("<|im_end|>{%", "<|im_end|>\n{%")
"""The same with a line feed after each turn, as in ChatML."""
BARE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
"""Nothing around what is said: a prompt of one digit is one token."""
PAIRS = [
    ("Two and 3?", "It is 5.", "Hi there, so long."),
    ("Hello!", "Hello there! Be kind.", "bye"),
    ("Say hi.", "Hi.", "a question, an answer"),
    ("What is 3+3?", "3+3 is 6, two twos are 4.", "user system tool"),
    ("Be kind?", "So long, and be kind.", "So be it; 5"),
]
"""Prompts, and their better and worse answers, of different lengths."""
MARGINS = [0.5, 0.0, 1.25, -0.25, 2.0]
LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 640, "max_position_embeddings": 128,
}  # fmt: skip
SHAPES = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 640},
    "gpt2": {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 640, "n_positions": 128, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
}  # fmt: skip


def pair(prompt: str, chosen: str, rejected: str, **more: Any) -> dict[str, Any]:
    """A record of messages."""
    answers = {
        key: [{"role": "assistant", "content": text}]
        for key, text in (("chosen", chosen), ("rejected", rejected))
    }
    return {"prompt": [{"role": "user", "content": prompt}], **answers, **more}


def judged(desirable: list[bool]) -> list[dict[str, Any]]:
    """Records of single answers, good ones first answers of `PAIRS`, bad ones second."""
    records = (pair(*texts) for texts in PAIRS)
    return [
        {"prompt": record["prompt"], "completion": record["chosen" if good else "rejected"], "label": good}
        for record, good in zip(records, desirable, strict=False)
    ]


def tokenizer(template: str = TURNS, padding: str | None = PADDING, bos: str | None = None):
    """A tokenizer with a chat template, and a token that fills texts up."""
    vocabulary = tokenizer_of("bytes", TOKENS, eos=END, bos=bos, template=template)
    vocabulary.pad_token = padding
    return vocabulary


def write_model(
    directory: Path,
    seed: int,
    *,
    template: str = TURNS,
    labels: int = 0,
    padding: str | None = PADDING,
    bos: str | None = None,
    kind: str = "llama",
    **more: Any,
) -> Path:
    """Write a random model as transformers does, with its tokenizer.

    Args:
        labels: outputs of a value head in place of logits; 0: none.
        more: values of its config.
    """
    vocabulary, head = tokenizer(template, padding, bos), {"num_labels": labels} if labels else {}
    config = AutoConfig.for_model(
        kind, **SHAPES[kind] | more, **head, bos_token_id=vocabulary.bos_token_id, eos_token_id=vocabulary.eos_token_id,
        pad_token_id=vocabulary.pad_token_id, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(seed)
    auto = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
    auto.from_config(config, dtype=torch.float32).save_pretrained(directory)
    vocabulary.save_pretrained(directory)
    return directory


def write_records(file: Path, records: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@dataclass(frozen=True)
class Ours:
    """A run of ours on records: what `measured` needs to know.

    Args:
        alignment: the algorithm and its options.
        model: the directory of the model.
        records: the file of the records.
        reference: the directory of the reference model; None: there is none.
    """

    alignment: Alignment
    model: Path
    records: Path
    reference: Path | None = None
    length: int = field(default=96)

    def job(self, home: Path) -> Job:
        """The run, prepared, whose one step is over all records."""
        home.mkdir()
        cache = str(home.parent / "cache")
        reference = Reference() if self.reference is None else Reference(model=str(self.reference))
        config = Config(
            model=replace(Config().model, name=str(self.model), weights="pretrained"),
            data=Data(str(self.records), sequence_length=self.length, validation_fraction=0.0, cache=cache),
            alignment=self.alignment,
            reference=reference,
            parallel=c.Parallel(shard=1, zero=0),
            precision=c.Precision(compute="fp32"),
            train=c.Train(steps=1, global_batch=1, microbatch_size=1, device="cpu"),
        )  # fmt: skip
        resolved = ALIGNMENT.resolve(config, 1)
        job = Job(ALIGNMENT, resolved, home, ALIGNMENT.prepare(resolved), "cpu")
        ALIGNMENT.fill(job)
        train = replace(config.train, global_batch=ALIGNMENT.work(job).training.size)
        return replace(job, config=ALIGNMENT.resolve(replace(config, train=train), 1))


Result = tuple[float, dict[str, torch.Tensor]]
"""A loss, and gradients by name."""


def measured(jobs: dict[str, Job]) -> dict[str, Result]:
    """The loss of each run's one step, and the gradients by name. On one rank."""
    return {name: _measured(job) for name, job in jobs.items()}


def _measured(job: Job) -> Result:
    work = ALIGNMENT.work(job)
    if work.completed is not None:
        work = work.completed(CPU)
    session = apply(job.config, work.workload, device=CPU)
    train = job.config.train
    batch = Batches(
        work.training, train.global_batch, train.microbatch_size, 0, 1, seed=7, blank=work.blank
    ).at(0)
    loss = session.step(batch, total=float(sum(map(work.count, batch)))).clone()
    return float(loss), {name: value.clone() for name, value in full(gradients_of(session)).items()}


def options(directory: Path, size: int) -> dict[str, Any]:
    """Arguments of all trainers: all records in one batch, float32, on the CPU."""
    return {
        "output_dir": str(directory), "per_device_train_batch_size": size, "bf16": False, "use_cpu": True,
        "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip


def loaded(directory: Path, head: bool = False) -> Any:
    kind = AutoModelForSequenceClassification if head else AutoModelForCausalLM
    return kind.from_pretrained(directory, dtype=torch.float32)


def by_trainer(trainer: Any, change: Callable[[dict], dict] = dict) -> Result:
    """The loss that a trainer of TRL computes on its first batch, and the gradients by name.

    Args:
        change: (batch) -> the batch that the trainer computes on.
    """
    model = trainer.model.train()
    model.zero_grad()
    batch = change(trainer._prepare_inputs(next(iter(trainer.get_train_dataloader()))))
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    gradients = {
        name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None
    }
    return float(loss.detach()), gradients


def by_kto_trainers(case: Ours, home: Path, arguments: dict[str, Any]) -> Result:
    """The loss and the gradients of TRL's KTO, averaged over ranks that have two records each. On every rank."""
    from accelerate.state import AcceleratorState

    rank, ranks = dist.get_rank(), dist.get_world_size()
    environment = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, str(value))
        AcceleratorState._reset_state(reset_partial_state=True)
        trainer = KTOTrainer(
            loaded(case.model),
            ref_model=loaded(case.reference),
            args=KTOConfig(**options(home / "output", 2) | arguments),
            train_dataset=records_of(case.records),
            processing_class=tokenizer(),
        )
        assert trainer.accelerator.num_processes == ranks
        loss, gradients = by_trainer(trainer)
        AcceleratorState._reset_state(reset_partial_state=True)
    total = torch.tensor(loss, dtype=torch.float64)
    for value in (total, *gradients.values()):
        dist.all_reduce(value.div_(ranks))
    return float(total), gradients


def records_of(file: Path) -> Dataset:
    return Dataset.from_list([json.loads(line) for line in file.read_text().splitlines()])
