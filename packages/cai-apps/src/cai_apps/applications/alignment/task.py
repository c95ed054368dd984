"""An alignment run as the shared loop sees it: the task of a language model, on answers that are compared."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from cai_apps.applications.alignment.algorithms import ALGORITHMS
from cai_apps.applications.alignment.config import Config
from cai_apps.applications.alignment.export import export_reward_model
from cai_apps.applications.alignment.reference import Comparison, log_probs
from cai_apps.applications.alignment.rules import check_alignment, with_head
from cai_apps.applications.alignment.shared_prompts import check_rows, flops_of, saved_line
from cai_apps.applications.alignment.workload import has_value_head, maker_of, workload
from cai_apps.applications.language.base import is_base, weights_directory
from cai_apps.applications.language.model import on_meta
from cai_apps.applications.language.noise import NoisySamples
from cai_apps.applications.language.prompts import Prompts, ids_of
from cai_apps.applications.language.task import (
    LanguageTask,
    base_line,
    check_adapter_of,
    check_enough,
    export_adapter,
    export_hf,
    tokenizer_directory,
    tokenizer_of,
)
from cai_apps.applications.language.validation import resolve
from cai_apps.compose.forward_only import freeze
from cai_apps.compose.lora import need_peft
from cai_apps.compose.models import (
    check_made,
    load_model_config,
    meta_model,
    model_config_for,
    pretrained_directory,
)
from cai_apps.compose.quantized_base import check_quantized
from cai_apps.compose.routing.entry import routers_for
from cai_apps.compose.value_head import check_reward_model, has_stored_head
from cai_apps.compose.workload import Workload
from cai_apps.config.adapters import OPTIONS, WEIGHTS
from cai_apps.data.batches import Samples
from cai_apps.data.content import digest_of_files, digest_of_weights
from cai_apps.data.documents import Documents
from cai_apps.data.preference.lengths import PreferenceReport
from cai_apps.data.preference.prepare import Preferences, prepare_preferences
from cai_apps.data.preference.rows import PreferenceRows, blank, split_preferences
from cai_apps.data.preference.sources import check_first
from cai_apps.data.sealed import key_of
from cai_apps.data.tokenizer import load_tokenizer, tokenizer_digest
from cai_apps.planner.flops import model_flops
from cai_apps.report.outcome import show_outcome
from cai_apps.run.files.origin import Origin
from cai_apps.run.files.position import Unit
from cai_apps.run.task import Work
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PretrainedConfig

    from cai_apps.compose.session import Session
    from cai_apps.run.files.directory import RunDirectory
    from cai_apps.run.task import Job
    from cai_mesh.layout import BoxedTensor


class AlignmentTask(LanguageTask):
    """`cai_apps.run.task.Task` of models that learn from preferences."""

    config: ClassVar[type[Config]] = Config

    def resolve(self, config: Config, ranks: int) -> Config:
        check_alignment(config)
        resolved: Any = resolve(with_head(config), load_model_config(config.model.name), ranks)
        return resolved

    def workload_of(self, config: Config, model: PretrainedConfig) -> Workload:
        plain = workload(config, model)
        if config.reference.form != "model":
            return plain
        reference = model if config.reference.model is None else load_model_config(config.reference.model)
        return replace(
            plain, frozen_elements=sum(param.numel() for param in meta_model(reference).parameters())
        )

    def prepare(self, config: Config, before: RunDirectory | None = None) -> Preferences:
        check_made(config.model.name)
        model = load_model_config(config.model.name)
        units = ALGORITHMS[config.alignment.algorithm].units
        weights = None
        if config.model.weights == "pretrained" and not is_base(config):
            weights = weights_directory(config)
        check_first(units, *config.data.sources)  # before a base is trained
        if config.lora.rank:
            need_peft()
        if has_value_head(config):
            check_reward_model(model)
        built = on_meta(config, model, maker_of(config))  # refuses what has no place in the model
        check_quantized(built, config.lora.base)
        routers_for(config.experts, built)
        if is_base(config):
            weights = weights_directory(config)
        if has_value_head(config) and weights is not None:
            has_stored_head(weights, model)  # refuses what would be lost
        if config.lora.adapter is not None:
            check_adapter_of(config, built)
        check_rows(config, config.model.name)
        if (reference := config.reference.model) is not None:
            check_made(reference)
            check_rows(config, reference)
        tokenizer = weights if is_base(config) else None
        if before is not None:
            tokenizer = tokenizer_of(before, config)
        prepared = prepare_preferences(config.data, units, model.vocab_size, tokenizer)
        check_same_ids(config, prepared)
        if config.log.prompts:
            ids_of(config, load_tokenizer(prepared.tokenizer))  # refuses those that are too long
        training, _ = _split(config, prepared)
        check_enough(config, training.size)
        return prepared

    def documents(self, prepared: Preferences) -> Documents:
        return prepared.documents

    def announce(self, config: Config, prepared: Preferences) -> str:
        about = "\n".join(PreferenceReport(**prepared.facts).lines())
        training, _ = _split(config, prepared)
        times = config.train.steps * config.train.global_batch / training.size
        noun = "pairs" if prepared.kind == "pairs" else "judged answers"
        return (
            f"{about}\n{saved_line(training)}"
            f"{training.size:,} rows of {config.data.sequence_length:,} tokens hold what is trained on; "
            f"{config.train.steps:,} steps of {config.train.global_batch:,} rows read each {times:.3g} times\n"
            f"{base_line(config, maker_of(config))}"
            f"{config.model.name} by {config.alignment.algorithm} on {prepared.units:,} {noun}"
        )

    def origin(self, prepared: Preferences) -> Origin:
        return Origin({"tokenizer": prepared.vocabulary}, prepared.text, f"{prepared.tokens:,} tokens")

    def work(self, job: Job) -> Work:
        config: Config = job.config
        tokenizer = load_tokenizer(tokenizer_directory(job.run))
        model = model_config_for(config.model.name, tokenizer)
        flops = model_flops(on_meta(config, model, maker_of(config)), model)
        training, validation = _split(config, job.prepared)
        prompts = (
            Prompts.of(config, tokenizer, job.prepared.documents, training) if config.log.prompts else None
        )
        comparison = Comparison(config)
        work = Work(
            workload(config, model, comparison),
            _noisy(training, config),
            validation,
            count=lambda batch: int(batch["present"].sum()),
            counted="pairs" if job.prepared.kind == "pairs" else "judged answers",
            unit=Unit("tokens", config.data.sequence_length),
            blank=blank,
            texts=None if prompts is None else prompts.continued,
            flops={
                "mfu": lambda batch: flops_of(flops.causal, batch),
                "mfu_full_attention": lambda batch: flops_of(flops.full, batch),
            },
        )
        if not ALGORITHMS[config.alignment.algorithm].reference or config.reference.form == "adapter":
            return work
        return replace(work, completed=partial(_completed, work, job, training, comparison))

    def finish(self, job: Job) -> None:
        if not has_value_head(job.config):
            super().finish(job)
            return
        show_outcome(job.run, job.config)
        if job.config.lora.rank:
            print(
                f"adapter        {job.run.export}, for AutoPeftModelForSequenceClassification with num_labels=1"
            )
            print("               cai export RUN DIR --merge writes the whole model")
        else:
            print(f"HF export      {job.run.export}, for AutoModelForSequenceClassification")

    def write_model(self, session: Session, directory: Path, tokenizer: Path) -> None:
        write = export_reward_model if has_value_head(session.config) else export_hf
        write(session, directory, tokenizer)

    def write_adapter(
        self,
        weights: Mapping[str, BoxedTensor],
        config: Config,
        model: PretrainedConfig,
        directory: Path,
        tokenizer: Path,
        digest: str | None,
    ) -> None:
        kind = "SEQ_CLS" if has_value_head(config) else "CAUSAL_LM"
        export_adapter(weights, config, model, directory, tokenizer, digest, maker_of(config), kind)


ALIGNMENT = AlignmentTask()


def _completed(
    work: Work, job: Job, training: PreferenceRows, comparison: Comparison, device: torch.device
) -> Work:
    """Return the work with the reference: its log-probabilities, or the model itself. Collective."""
    config: Config = job.config
    reference, model = reference_workload(config, job)
    if config.reference.form == "model":
        comparison.model = freeze(config, reference, device=device)
        return work
    validation = work.validation
    rows = [training, *([validation] if isinstance(validation, PreferenceRows) else [])]
    score, prepared = ALGORITHMS[config.alignment.algorithm].score, job.prepared
    key = key_of("reference", score, model, prepared.text, prepared.vocabulary, config.data.sequence_length)
    array = log_probs(config, reference, rows, prepared.documents.count, key, device)
    return replace(
        work,
        training=_noisy(replace(training, reference=array), config),
        validation=None if validation is None else replace(validation, reference=array),  # type: ignore[type-var]
    )


def reference_workload(config: Config, job: Job) -> tuple[Workload, dict[str, Any]]:
    """Return the workload of a run's reference model, and what tells it from others, by content."""
    name, tokenizer = config.reference.model, load_tokenizer(tokenizer_directory(job.run))
    if name is not None:
        model = replace(config.model, name=name, weights="pretrained", neftune_alpha=0.0)
        config = replace(config, model=model, lora=type(config.lora)())
    shape = model_config_for(config.model.name, tokenizer)
    facts: dict[str, Any] = {"model": shape.to_dict(), "compute": config.precision.compute}
    facts |= {"linear": config.precision.linear, "base": config.lora.base}
    if config.model.weights == "pretrained":
        facts["weights"] = digest_of_weights({"": weights_directory(config)}, config.data.cache)
        if config.lora.adapter is not None:
            place = Path(config.lora.adapter).expanduser()
            facts["adapter"] = digest_of_files(
                {name: place / name for name in (OPTIONS, WEIGHTS)}, config.data.cache
            )
    else:
        facts["seed"] = config.train.seed
    return workload(config, shape), facts


def check_same_ids(config: Config, prepared: Preferences) -> None:
    """Raise ConfigError where the reference model reads other ids than the one that learns, or lacks some of them."""
    name = config.reference.model
    if name is None:
        return
    digest = tokenizer_digest(load_tokenizer(pretrained_directory(name)))
    if digest != prepared.vocabulary:
        raise ConfigError(
            "the tokenizer of the reference model is not that of the model that learns",
            got=f"reference.model = {name!r}, model.name = {config.model.name!r}",
            cause="the same ids would be other texts to it, and its log-probabilities mean nothing",
            fix="take a reference with the same tokenizer, or leave reference.model out",
        )
    rows = load_model_config(name).vocab_size
    if rows >= load_model_config(config.model.name).vocab_size:  # whose embedding has every id
        return
    largest = int(prepared.documents.stream().max())
    if largest >= rows:
        raise ConfigError(
            "the reference model has no embedding of a token of the answers or prompts",
            got=f"id {largest}",
            expected=f"ids below its vocab_size = {rows}",
            fix="take a reference with as many embeddings, or leave reference.model out",
        )


def _noisy(rows: PreferenceRows, config: Config) -> Samples:
    return NoisySamples(rows, config.train.seed) if config.model.neftune_alpha else rows


def _split(config: Config, prepared: Preferences) -> tuple[PreferenceRows, PreferenceRows | None]:
    """Return the rows that are trained on, and those for validation."""
    return split_preferences(
        prepared,
        config.data.sequence_length,
        config.data.validation_fraction,
        shares_prompts=config.alignment.share_prompts,
    )
