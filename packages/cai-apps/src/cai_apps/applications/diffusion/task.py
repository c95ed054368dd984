"""A diffusion model as a run sees it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cai_apps.applications.diffusion.config import DRAWN, GENERATED, Config
from cai_apps.applications.diffusion.data.buckets import Buckets
from cai_apps.applications.diffusion.data.cache import Prepared, prepare
from cai_apps.applications.diffusion.data.samples import Images, SubjectAndClass, split
from cai_apps.applications.diffusion.model.denoiser import parts
from cai_apps.applications.diffusion.model.design import LABELS, load_design
from cai_apps.applications.diffusion.model.export import export
from cai_apps.applications.diffusion.model.loading import weights_digest
from cai_apps.applications.diffusion.model.tensor_parallel import share_of, trains_text
from cai_apps.applications.diffusion.sampling.gallery import (
    PICTURES,
    draw_at_the_end,
    draw_before,
    draw_on_the_way,
)
from cai_apps.applications.diffusion.sampling.labels import label_numbers
from cai_apps.applications.diffusion.training.flops import image_flops
from cai_apps.applications.diffusion.training.workload import workload
from cai_apps.applications.diffusion.validation import resolve
from cai_apps.compose.workload import Workload
from cai_apps.data.batches import Samples, count_present, mark
from cai_apps.data.images import left_out
from cai_apps.report.outcome import show_outcome
from cai_apps.run.files.origin import Origin
from cai_apps.run.files.position import Unit
from cai_apps.run.task import Work
from cai_mesh.files import write_text

if TYPE_CHECKING:
    from cai_apps.compose.session import Session
    from cai_apps.run.files.directory import RunDirectory
    from cai_apps.run.task import Job


TENSOR = "tensor.json"
"""The file in a run's directory that says what tensor-parallel ranks divide, and which parts stay whole and why."""


class DiffusionTask:
    """`cai_apps.run.task.Task` of diffusion models."""

    def resolve(self, config: Config, ranks: int) -> Config:
        return resolve(config, load_design(config.model.name), ranks)

    def workload(self, config: Config) -> Workload:
        return workload(config, load_design(config.model.name))

    def prepare(self, config: Config, before: RunDirectory | None = None) -> Prepared:
        prepared = prepare(config, None if before is None else before.path)
        design = load_design(config.model.name)
        if design.family.condition == "label":
            label_numbers(design, config.sampling.prompts, prepared.labels)
        return prepared

    def origin(self, prepared: Prepared) -> Origin:
        classes = {f"name of class {number}": name for number, name in enumerate(prepared.labels)}
        tokenizer = {} if prepared.vocabulary is None else {"tokenizer": prepared.vocabulary}
        return Origin(tokenizer | classes, prepared.content, f"{prepared.images:,} images")

    def base(self, config: Config) -> str | None:
        design = load_design(config.model.name)
        if not config.lora.rank or design.directory is None:
            return None
        folders = parts(design, train_text=trains_text(config, design)).values()
        return weights_digest(design.directory, [*folders], config.data.cache)

    def announce(self, config: Config, prepared: Prepared) -> str:
        share = share_of(config, load_design(config.model.name))
        sources = (config.data.source, *([config.prior.source] if config.prior.images else []))
        directories = [Path(source).expanduser() for source in sources if source not in (*DRAWN, GENERATED)]
        lines = [*map(left_out, directories), *([] if share is None else [str(share)])]
        head = "".join(f"{line}\n" for line in lines if line)
        size, ratio = config.data.size, config.data.max_ratio
        shape = f"{size} x {size}" if ratio == 1 else f"about {size} x {size}, sides up to {ratio:g} : 1"
        return f"{head}{config.model.name} on {prepared.images:,} images of {shape}"

    def fill(self, job: Job) -> None:
        tokenizer = job.prepared.tokenizer
        for tokenizer_path in Path(tokenizer).glob("tokenizer*") if tokenizer is not None else ():
            shutil.copytree(tokenizer_path, job.run.path / tokenizer_path.name, dirs_exist_ok=True)
        if job.prepared.labels:
            write_text(job.run.path / LABELS, "\n".join(job.prepared.labels))
        share = share_of(job.config, load_design(job.config.model.name))
        if share is not None:
            write_text(job.run.path / TENSOR, share.to_json())
        draw_before(job, load_design(job.config.model.name))

    def work(self, job: Job) -> Work:
        config: Config = job.config
        design = load_design(config.model.name)
        images = Images(
            job.prepared, 0, job.prepared.images, config.objective.condition_dropout, config.train.seed
        )
        training, validation = _samples(config, images)
        device = (
            torch.device("cuda", torch.cuda.current_device()) if job.device == "cuda" else torch.device("cpu")
        )
        per_image = image_flops(config, design)
        return Work(
            workload(config, design, device),
            training,
            validation,
            count=lambda batch: count_present(batch, len(batch["u"])),
            counted="images",
            unit=Unit("images"),
            blank=mark,
            flops={"mfu_full_attention": lambda batch: per_image * len(batch["u"])},
            after_step=lambda session, step: draw_on_the_way(session, job, design, step),
        )

    def export(self, session: Session, job: Job) -> None:
        export(session, load_design(job.config.model.name), job.config, job.run.export, job.run.path)

    def finish(self, job: Job) -> None:
        show_outcome(job.run, job.config)
        print(f"export         {job.run.export}")
        if job.config.sampling.prompts:
            draw_at_the_end(job)
            print(f"pictures       {job.run.path / PICTURES}, shown by cai report {job.run.path}")


def _samples(config: Config, images: Images) -> tuple[Samples, Samples | None]:
    """What is trained on, and what validates."""
    if config.prior.images:
        return SubjectAndClass(images, images.size - config.prior.images, config.prior.weight), None
    training, validation = split(images, config.data.validation_fraction)
    held_out = validation if validation.size else None
    if config.data.max_ratio == 1:
        return training, held_out
    batch, seed = config.train.global_batch, config.train.seed
    return Buckets(training, batch, seed), None if held_out is None else Buckets(
        held_out, batch, seed, once=True
    )


DIFFUSION = DiffusionTask()
