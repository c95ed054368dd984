"""A model that classifies texts or pictures, as a run sees it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from cai_apps.applications.classification.config import DIGITS, Config
from cai_apps.applications.classification.export import (
    FACTS,
    TOKENIZER,
    base_digest,
    model_config,
    write_adapter,
    write_model,
)
from cai_apps.applications.classification.model import (
    body_of,
    is_new_head,
    kind_of,
    longest_of,
    own_classes,
    pretrained,
    side_of,
)
from cai_apps.applications.classification.pictures import Normalization, Pictures, prepare_pictures
from cai_apps.applications.classification.rules import check_settings
from cai_apps.applications.classification.texts import Texts, load_tokenizer, prepare_texts
from cai_apps.applications.classification.workload import LABELS, workload
from cai_apps.compose.lora import need_peft
from cai_apps.compose.models import load_model_config, pretrained_directory
from cai_apps.compose.workload import Workload, on_meta
from cai_apps.config import validation
from cai_apps.data.batches import count_present, mark
from cai_apps.data.images import left_out
from cai_apps.planner.flops import model_flops
from cai_apps.report.outcome import show_outcome
from cai_apps.run.files.origin import Origin
from cai_apps.run.files.position import Unit
from cai_apps.run.task import Work
from cai_mesh.errors import DataError
from cai_mesh.files import write_text

if TYPE_CHECKING:
    from cai_apps.compose.session import Session
    from cai_apps.run.files.directory import RunDirectory
    from cai_apps.run.task import Job

SEED = 0
"""The seed of the draw of samples that are kept for validation: they are the same in every run."""


@dataclass(frozen=True)
class Chosen:
    """Some samples of prepared data: `cai_apps.data.batches.Samples`.

    Args:
        prepared: the data.
        part: "training", or "validation" where that has a source of its own.
        numbers: the samples' numbers.
    """

    prepared: Texts | Pictures
    part: str
    numbers: np.ndarray

    @property
    def size(self) -> int:
        return len(self.numbers)

    def rows(self, indices: np.ndarray, positions: np.ndarray) -> dict[str, Tensor]:
        """Return samples by number."""
        return self.prepared.rows(self.part, self.numbers[indices])


class ClassificationTask:
    """`cai_apps.run.task.Task` of models that classify."""

    def resolve(self, config: Config, ranks: int) -> Config:
        config = validation.resolve(config, ranks)
        check_settings(config)
        name, model = config.model.name, load_model_config(config.model.name)
        if kind_of(model, name) == "pictures":
            side_of(model, name)
            if config.data.source == Config().data.source:
                config = replace(config, data=replace(config.data, source=DIGITS))
        if config.model.weights == "pretrained":
            pretrained_directory(name)  # refuses a preset, which has none
        return config

    def workload(self, config: Config) -> Workload:
        model = load_model_config(config.model.name)
        return workload(config, model, kind_of(model, config.model.name))

    def prepare(self, config: Config, before: RunDirectory | None = None) -> Texts | Pictures:
        name, model = config.model.name, load_model_config(config.model.name)
        if config.lora.rank:
            need_peft()
        if (
            config.model.weights == "pretrained"
        ):  # refuses adapters without a place, and heads that cannot be told
            body_of(on_meta(workload(config, model, kind_of(model, name))))  # type: ignore[arg-type]
        former = own_classes(model, config.model.weights)
        is_trained = config.model.weights == "pretrained"
        if kind_of(model, name) == "pictures":
            directory = pretrained_directory(name) if is_trained else None
            prepared: Texts | Pictures = prepare_pictures(
                config.data, side_of(model, name), former, Normalization.of(directory)
            )
        else:
            tokenizer: str | Path | None = config.data.tokenizer
            if tokenizer == "auto":
                tokenizer = name if is_trained else None
                if before is not None and (before.path / TOKENIZER).is_dir():
                    tokenizer = before.path / TOKENIZER
            vocabulary = model.get_text_config().vocab_size
            prepared = prepare_texts(config.data, vocabulary, longest_of(model), former, tokenizer)
        training, _ = split(config, prepared)
        _check_enough(config, training.size)
        return prepared

    def origin(self, prepared: Texts | Pictures) -> Origin:
        meanings = {f"name of class {number}": name for number, name in enumerate(prepared.classes)}
        if isinstance(prepared, Texts):
            meanings["tokenizer"] = prepared.vocabulary
        return Origin(meanings, prepared.content, f"{sum(prepared.sizes.values()):,} samples")

    def base(self, config: Config) -> str | None:
        return base_digest(config)

    def announce(self, config: Config, prepared: Texts | Pictures) -> str:
        training, held_out = split(config, prepared)
        noun = "texts" if isinstance(prepared, Texts) else "pictures"
        lines = []
        if isinstance(prepared, Pictures) and config.data.source != DIGITS:
            lines.append(left_out(Path(config.data.source).expanduser()))
        if config.model.weights == "pretrained" and is_new_head(config.model.name, prepared.classes):
            lines.append(
                "the head begins anew: the classes of these data are not those of the pretrained model"
            )
        lines.append(
            f"{config.model.name} on {training.size:,} {noun} of {len(prepared.classes)} classes, "
            f"{0 if held_out is None else held_out.size:,} for validation"
        )
        return "\n".join(line for line in lines if line)

    def fill(self, job: Job) -> None:
        prepared, processor = job.prepared, None
        if isinstance(prepared, Texts):
            load_tokenizer(prepared.tokenizer).save_pretrained(job.run.path / TOKENIZER)
        else:
            name = job.config.model.name
            processor = prepared.normalization.processor(side_of(load_model_config(name), name))
        facts = {"classes": prepared.classes, "processor": processor}
        write_text(job.run.path / FACTS, json.dumps(facts, indent=2))

    def work(self, job: Job) -> Work:
        config, prepared = job.config, job.prepared
        model = model_config(job.run, config.model.name)
        kind = kind_of(model, config.model.name)
        fill = None
        if config.model.weights == "pretrained":
            fill = pretrained(config.model.name, pretrained_directory(config.model.name), model, kind)
        plain = workload(config, model, kind, getattr(prepared, "names", ()), fill)
        flops = model_flops(on_meta(plain), model)  # type: ignore[arg-type]
        training, held_out = split(config, prepared)
        return Work(
            plain,
            training,
            held_out,
            count=lambda batch: count_present(batch, len(batch[LABELS])),
            counted="samples",
            unit=Unit("samples"),
            blank=mark,
            flops={"mfu_full_attention": lambda batch: flops.full(_lengths(batch, model))},
        )

    def export(self, session: Session, job: Job) -> None:
        if job.config.lora.rank:
            write_adapter(session, job.run, job.run.export, job.base)
        else:
            write_model(session, job.run, job.run.export)

    def finish(self, job: Job) -> None:
        show_outcome(job.run, job.config)
        name = "text" if isinstance(job.prepared, Texts) else "image"
        if job.config.lora.rank:
            count = len(job.prepared.classes)
            opened = (
                f"for AutoPeftModelForSequenceClassification with num_labels={count}"
                if name == "text"
                else "of peft"
            )
            print(f"adapter        {job.run.export}, {opened}")
            print("               cai export RUN DIR --merge writes the whole model")
            return
        print(f"HF export      {job.run.export}")
        opened = f'pipeline("{name}-classification", {str(job.run.export)!r})'
        print(
            f"try it         python -c {shlex.quote(f'from transformers import pipeline; print({opened}(...))')}"
        )


def split(config: Config, prepared: Texts | Pictures) -> tuple[Chosen, Chosen | None]:
    """Return the samples that are trained on, and those for validation."""
    sizes, fraction = prepared.sizes, config.data.validation_fraction
    numbers = np.arange(sizes["training"])
    if "validation" in sizes:
        return Chosen(prepared, "training", numbers), Chosen(
            prepared, "validation", np.arange(sizes["validation"])
        )
    held_out = round(len(numbers) * fraction)
    drawn = np.random.default_rng(SEED).permutation(len(numbers))
    training = Chosen(prepared, "training", np.sort(drawn[held_out:]))
    return training, Chosen(prepared, "training", np.sort(drawn[:held_out])) if held_out else None


CLASSIFICATION = ClassificationTask()


def _lengths(batch: dict[str, Tensor], model: Any) -> np.ndarray:
    """Return the tokens of each sample, without those that fill it up."""
    if "attention_mask" in batch:
        return batch["attention_mask"].sum(1).numpy()
    if "input_ids" in batch:
        return np.full(*batch["input_ids"].shape)
    side, patch = batch["pixel_values"].shape[-1], getattr(model, "patch_size", 16)
    return np.full(len(batch["pixel_values"]), (side // patch) ** 2 + 1)


def _check_enough(config: Config, size: int) -> None:
    if size < config.train.global_batch:
        raise DataError(
            "a global batch has more samples than the data",
            got=f"train.global_batch = {config.train.global_batch}, {size} samples",
            cause="one step would read the same samples several times",
            fix=f"set train.global_batch to {size} or less, or give more",
        )
