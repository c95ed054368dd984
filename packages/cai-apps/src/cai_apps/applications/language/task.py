"""A causal language model as a run sees it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cai_apps.applications.language.base import base_name, is_base, weights_directory
from cai_apps.applications.language.config import Config
from cai_apps.applications.language.generate import SAMPLING, continued, generate, place_of
from cai_apps.applications.language.model import (
    Maker,
    build,
    call_options,
    on_meta,
)
from cai_apps.applications.language.noise import KEYS, NoisySamples
from cai_apps.applications.language.prompts import Prompts, ids_of
from cai_apps.applications.language.texts import prepared_texts
from cai_apps.applications.language.validation import resolve
from cai_apps.applications.language.weights import pretrained, quantized_base
from cai_apps.compose.adapter_files import check_adapter, check_trained_beside, save_adapter
from cai_apps.compose.conversions import saved_tensors
from cai_apps.compose.documents import check_keeps_documents_apart
from cai_apps.compose.dora import with_lengths
from cai_apps.compose.expert_adapters import ends_of, expert_parameters, without_experts
from cai_apps.compose.lora import (
    initializer,
    learned_modules,
    merged,
    need_peft,
    peft_options,
    plain_name,
    targets_of,
)
from cai_apps.compose.losses import NextTokenLoss
from cai_apps.compose.models import (
    causal_model,
    check_made,
    load_model_config,
    meta_model,
    model_config_for,
)
from cai_apps.compose.positions import PositionsKnown
from cai_apps.compose.quantized_base import check_quantized, quantized_share, scales_of
from cai_apps.compose.routing.entry import routers_for
from cai_apps.compose.routing.places import text_places
from cai_apps.compose.sharding import DTYPES
from cai_apps.compose.workload import Workload
from cai_apps.config.adapters import read_adapter
from cai_apps.config.sections import Experts
from cai_apps.data.batches import Samples
from cai_apps.data.chat.prepare import check_first, length_report
from cai_apps.data.content import digest_of_weights
from cai_apps.data.document_rows import lengths_of, split_documents
from cai_apps.data.documents import Documents
from cai_apps.data.packed import blank, count_targets, split
from cai_apps.data.streams import StreamRows, TextStream
from cai_apps.data.tokenizer import load_tokenizer, tokenizer_digest
from cai_apps.planner.flops import model_flops
from cai_apps.report.outcome import show_outcome
from cai_apps.run.files.origin import Origin
from cai_apps.run.files.position import Unit
from cai_apps.run.task import Work
from cai_mesh.checkpoint import new_directory, save_hf
from cai_mesh.comm import AnyMesh
from cai_mesh.errors import CaiError, ConfigError, DataError
from cai_mesh.layout import BoxedTensor
from cai_tensor_parallel import cut_batch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from cai_apps.compose.session import Session
    from cai_apps.run.files.directory import RunDirectory
    from cai_apps.run.task import Job


def tokenizer_directory(run: RunDirectory) -> Path:
    """Where a run keeps its tokenizer."""
    return run.path / "tokenizer"


def tokenizer_of(run: RunDirectory, config: Config) -> Path | None:
    """Return the directory of the tokenizer of a run that is gone on with; None: it has none.

    Raises:
        ConfigError: `data.tokenizer` names one that gives a text other ids.
    """
    directory = tokenizer_directory(run)
    if not directory.is_dir():
        return None
    if config.data.tokenizer in ("train", "auto"):
        return directory
    try:
        named = tokenizer_digest(load_tokenizer(config.data.tokenizer))
    except ConfigError:  # gone, or no way to the hub: the run has its own
        return directory
    if named != tokenizer_digest(load_tokenizer(directory)):
        raise ConfigError(
            f"the tokenizer {config.data.tokenizer!r} is not the one that {run.path} was trained with",
            cause="it is another one, or it was edited: its ids would mean something else to the run's weights",
            fix=f"set data.tokenizer to {directory}, or begin a new run in another log.directory",
        )
    return directory


def workload(config: Config, model: PretrainedConfig) -> Workload:
    """A causal language model of transformers, and its loss on the next token."""
    options = call_options(model)
    return Workload(
        build=partial(build, config, model),
        inputs=lambda batch: {name: value for name, value in batch.items() if name != "labels"} | options,
        target=lambda batch: batch["labels"],
        loss=partial(NextTokenLoss.of, mode=config.parallel.tensor.mode, kernels=config.train.kernels),
        correct=NextTokenLoss.correct,
        predicted=NextTokenLoss.predicted,
        example=partial(_example, config),
        initializer=initializer,
        running=PositionsKnown(),
        pretrained=pretrained(config),
        has_base=bool(config.lora.rank),
        quantized=quantized_base(config),
        experts=config.experts,
        token_weights=text_places,
        part=own_tokens,
    )


def own_tokens(batch: dict[str, Tensor], mesh: AnyMesh) -> dict[str, Tensor]:
    """Return this rank's tokens of a batch of whole rows, whose `labels` are those of the place they stand at."""
    rows = {name: value for name, value in batch.items() if name != "labels"}
    parts = cut_batch(rows | {"shift_labels": batch["labels"]}, mesh)
    labels = parts.pop("shift_labels")
    return parts | {"labels": labels}


def _example(config: Config, samples: int) -> dict[str, Tensor]:
    length = config.data.sequence_length
    ids = torch.zeros(samples, length, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    if config.model.neftune_alpha:
        batch[KEYS] = ids[:, 0]
    if config.data.boundaries != "keep":
        return batch
    starts = torch.tensor([[0, length // 2, length]], dtype=torch.int32).expand(samples, 3).contiguous()
    return batch | {"position_ids": ids, "cu_seqlens": starts}


class LanguageTask:
    """`cai_apps.run.task.Task` of language models."""

    config: ClassVar[type[Config]] = Config
    """The class of its configs."""

    def resolve(self, config: Config, ranks: int) -> Config:
        return resolve(config, load_model_config(config.model.name), ranks)

    def workload(self, config: Config) -> Workload:
        return self.workload_of(config, load_model_config(config.model.name))

    def workload_of(self, config: Config, model: PretrainedConfig) -> Workload:
        """Return the workload of a config for a model of such a config."""
        return workload(config, model)

    def prepare(self, config: Config, before: RunDirectory | None = None) -> Documents:
        check_made(config.model.name)
        if config.model.weights == "pretrained" and not is_base(config):
            weights_directory(config)  # refuses a model that has none
        if config.data.format == "chat":
            check_first(*config.data.sources)  # before a base is trained
        if config.lora.rank:
            need_peft()
        if config.lora.rank or config.model.neftune_alpha or config.experts != Experts():
            model = on_meta(
                config, load_model_config(config.model.name)
            )  # refuses what has no place in the model
            routers_for(config.experts, model)
            check_quantized(model, config.lora.base)
            if config.lora.adapter is not None:
                check_adapter_of(config, model)
        if config.data.boundaries == "keep":
            check_keeps_documents_apart(meta_model(load_model_config(config.model.name)), config.model.name)
        rows = load_model_config(config.model.name).vocab_size
        tokenizer = weights_directory(config) if is_base(config) else None
        if before is not None:
            tokenizer = tokenizer_of(before, config)
        prepared: Any = prepared_texts(config.data, rows, tokenizer)
        if config.log.prompts:
            ids_of(config, load_tokenizer(prepared.tokenizer))  # refuses those that are too long
        training, _ = _split(config, prepared)
        check_enough(config, training.size)
        return prepared

    def documents(self, prepared: Any) -> Documents:
        """Return the texts of prepared data."""
        return prepared

    def announce(self, config: Config, prepared: Documents) -> str:
        if isinstance(prepared, TextStream):
            return f"{base_line(config)}{config.model.name} on a stream of {', '.join(config.data.sources)}"
        if config.data.format == "text":
            return f"{base_line(config)}{config.model.name} on {prepared.tokens:,} tokens of text"
        about = "\n".join(length_report(prepared).lines())
        training, _ = _split(config, prepared)
        times = config.train.steps * config.train.global_batch / training.size
        return (
            f"{about}\n{training.size:,} rows of {config.data.sequence_length:,} tokens hold what is trained on; "
            f"{config.train.steps:,} steps of {config.train.global_batch:,} rows read each {times:.3g} times\n"
            f"{base_line(config)}{config.model.name} on {prepared.count:,} conversations"
        )

    def origin(self, prepared: Documents) -> Origin:
        amount = "a stream" if isinstance(prepared, TextStream) else f"{prepared.tokens:,} tokens"
        return Origin({"tokenizer": prepared.vocabulary}, prepared.text, amount)

    def base(self, config: Config) -> str | None:
        return base_digest(config)

    def fill(self, job: Job) -> None:
        load_tokenizer(job.prepared.tokenizer).save_pretrained(tokenizer_directory(job.run))

    def work(self, job: Job) -> Work:
        config: Config = job.config
        length = config.data.sequence_length
        model = model_config_for(config.model.name, load_tokenizer(tokenizer_directory(job.run)))
        flops = model_flops(on_meta(config, model), model)
        training, validation = _split(config, job.prepared)
        prompts = None
        if config.log.prompts:
            tokenizer = load_tokenizer(tokenizer_directory(job.run))
            prompts = Prompts.of(config, tokenizer, job.prepared, training)
        if config.model.neftune_alpha:
            training = NoisySamples(training, config.train.seed)
        return Work(
            workload(config, model),
            training,
            validation,
            count=count_targets,
            counted="target tokens",
            unit=Unit("tokens", length),
            blank=blank,
            in_order=config.data.streaming,
            texts=None if prompts is None else prompts.continued,
            flops={
                "mfu": lambda batch: flops.causal(lengths_of(batch)),
                "mfu_full_attention": lambda batch: flops.full(lengths_of(batch)),
            },
        )

    def export(self, session: Session, job: Job) -> None:
        tokenizer = tokenizer_directory(job.run)
        if job.config.lora.rank:
            model: Any = session.model
            weights = with_lengths(model, session.trained_weights())
            self.write_adapter(weights, job.config, model.config, job.run.export, tokenizer, job.base)
        else:
            self.write_model(session, job.run.export, tokenizer)

    def write_model(self, session: Session, directory: Path, tokenizer: Path) -> None:
        """Write the model of a session as an HF directory. Collective."""
        export_hf(session, directory, tokenizer)

    def write_adapter(
        self,
        weights: Mapping[str, BoxedTensor],
        config: Config,
        model: PretrainedConfig,
        directory: Path,
        tokenizer: Path,
        digest: str | None,
    ) -> None:
        """Write adapters as a folder of peft, by the arguments of `export_adapter`. Collective."""
        export_adapter(weights, config, model, directory, tokenizer, digest)

    def finish(self, job: Job) -> None:
        show_outcome(job.run, job.config)
        if job.config.lora.rank:
            print(f"adapter        {job.run.export}; cai export RUN DIR --merge writes the whole model")
        else:
            print(f"HF export      {job.run.export}")
        if job.config.data.format == "chat":
            print(f'try it         cai generate {shlex.quote(str(job.directory))} --chat --prompt "..."')
        if job.config.log.sample_tokens:
            print(f"sample         {_sample_or_reason(job)}")


def base_line(config: Config, make: Maker = causal_model) -> str:
    """Return a line that says how much of a run's base is quantized, or nothing where none is.

    Args:
        config: the config of the run.
        make: a function that makes its model.
    """
    if config.lora.base == "compute":
        return ""
    model = on_meta(config, load_model_config(config.model.name), make)
    return f"{quantized_share(model, config.lora.base)}\n"


def check_enough(config: Config, size: int) -> None:
    """Raise DataError where a global batch has more samples than the data.

    Args:
        config: the resolved config.
        size: the number of samples.
    """
    train, ranks = config.train, config.parallel.replicate * config.parallel.shard
    if size >= train.global_batch:
        return
    passes = size // (ranks * train.microbatch_size)
    fix = f"set train.global_batch to {passes * ranks * train.microbatch_size} or less"
    if not passes and size >= ranks:
        fix = f"set train.global_batch to {size // ranks * ranks} and train.microbatch_size to 1"
    elif not passes:
        fix = f"set parallel.shard to {size} or less, train.global_batch likewise"
    raise DataError(
        "a global batch has more samples than the data",
        got=f"train.global_batch = {train.global_batch}, {size} sequences of "
        f"{config.data.sequence_length} tokens",
        cause="one step would read the same text several times",
        fix=f"{fix}; or set data.sequence_length lower, or give more text",
    )


LANGUAGE = LanguageTask()


def _sample_or_reason(job: Job) -> str:
    """A sample, or why there is none: the run is done, and nothing of it depends on that."""
    try:
        return _sample(job)
    except CaiError as error:
        return f"none: {str(error).splitlines()[0]}"


def _sample(job: Job) -> str:
    """Text of the exported model; of conversations, what it answers where the first of them is answered."""
    sampling = replace(SAMPLING, max_tokens=job.config.log.sample_tokens)
    if job.config.data.format == "text":
        return generate(
            job.run.export, sampling=sampling, cache=job.config.data.cache, base=job.config.lora.base
        )
    documents: Documents = job.task.documents(job.prepared)  # type: ignore[attr-defined]
    prompt = documents.ids(0)[: int(documents.trained(0).argmax())].tolist()
    place = place_of(job.run.export, cache=job.config.data.cache, base=job.config.lora.base)
    return continued(place, load_tokenizer(place.tokenizer), prompt, sampling)


def _split(config: Config, prepared: Documents) -> tuple[Samples, Samples | None]:
    """The sequences that are trained on, and those for validation."""
    divide = split_documents if config.data.boundaries == "keep" else split
    length, other = config.data.sequence_length, prepared.held_out
    fraction = config.data.validation_fraction if other is None else 0.0
    validation = None if other is None else divide(other, length, 0.0)[0]
    if isinstance(prepared, TextStream):
        return StreamRows(prepared, length, config.train.seed), validation
    training, held_out = divide(prepared, length, fraction)
    validation = validation or held_out
    return training, validation if validation is not None and validation.size else None


def export_hf(session: Session, directory: Path, tokenizer: Path) -> None:
    """Write a Hugging Face directory, in the compute dtype, from the master weights. Collective.

    Tensors have the names and the cuts of files on the hub: each expert of a layer stands by itself. Adapters are in
    the weights of their layers.
    """
    dtype = DTYPES[session.config.precision.compute]
    model: Any = session.model
    config: Any = session.config
    plain, weights = meta_model(model.config), session.weights.masters()
    if config.lora.rank:
        weights = merged(model, session.trained_weights(), config.lora)
    tensors, scales = partial(saved_tensors, plain), scales_of(model)

    def names(name: str) -> str | None:
        return None if name in scales else plain_name(name)

    save_hf(model, directory, weights=weights, dtype=dtype, names=names, tensors=tensors)
    if dist.get_rank() == 0:
        load_tokenizer(tokenizer).save_pretrained(directory)
    dist.barrier()


def export_adapter(
    weights: Mapping[str, BoxedTensor],
    config: Config,
    model: PretrainedConfig,
    directory: Path,
    tokenizer: Path,
    digest: str | None,
    make: Maker = causal_model,
    task_type: str = "CAUSAL_LM",
) -> None:
    """Write adapters, and what is trained whole beside them, as a folder of peft. Collective.

    Args:
        weights: the trained weights by name, as `with_lengths` gives them.
        config: the config of the run.
        model: the config of its model.
        directory: the folder, which appears whole or not at all.
        tokenizer: the directory of the run's tokenizer, which is copied.
        digest: the digest of the base's weights.
        make: a function that makes the model without adapters.
        task_type: peft's name of the kind of model.

    Raises:
        CheckpointError: the folder is not empty.
    """
    with torch.device("meta"):
        plain = make(model)
    learned = learned_modules(plain, config.lora.modules_to_save)
    chosen = targets_of(plain, config.lora, learned)
    parameters = ends_of(expert_parameters(plain, chosen), chosen)
    options = peft_options(config.lora, without_experts(plain, chosen), parameters)
    options.base_model_name_or_path = base_name(config)
    adapted = on_meta(config, model, make)
    with new_directory(directory) as new:
        save_adapter(new, weights, adapted, options, digest, task_type)
        new.write(lambda: load_tokenizer(tokenizer).save_pretrained(new.temporary), first=True)


def base_digest(config: Config) -> str | None:
    """Return the digest of the weights beside which adapters learn; None: all weights learn."""
    if not config.lora.rank:
        return None
    return digest_of_weights({"": weights_directory(config)}, config.data.cache)


def check_adapter_of(config: Config, model: nn.Module) -> None:
    """Raise ConfigError where the adapter that a run goes on from is not one of its base."""
    adapter = read_adapter(str(config.lora.adapter))
    check_adapter(adapter, model)
    if line := check_trained_beside(adapter, config.model.name, base_digest(config)):
        print(line, flush=True)
