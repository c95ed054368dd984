"""Pictures of a run's prompts from fixed seeds: drawn before, on the way and at the end; `cai report` shows them.

RUN_DIR/pictures/before/last/0.png      of the first prompt, by the pretrained weights that training began with
                 500/average/0.png      after 500 steps, by the averaged weights
                 500/last/0.png         by the weights as they were
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from cai_apps.applications.diffusion.config import Config
from cai_apps.applications.diffusion.model.design import RAW, Design
from cai_apps.applications.diffusion.model.encoders import encoder_directory
from cai_apps.applications.diffusion.model.export import export
from cai_apps.applications.diffusion.sampling.sampler import open_sampler
from cai_apps.applications.diffusion.sampling.scheduler import options
from cai_apps.config import file as config_file
from cai_apps.report.inline_images import picture
from cai_apps.run.files.directory import RunDirectory
from cai_mesh.files import own_folder, remove, replaced

if TYPE_CHECKING:
    from cai_apps.compose.session import Session
    from cai_apps.run.task import Job

PICTURES = "pictures"
BEFORE = "before"
WEIGHTS = "weights"
"""Directory of the export that pictures on the way are drawn from; taken away after it."""
KINDS = {"last": "by the weights as they were", "average": "by the averaged weights"}
AT_ONCE = 8
"""Pictures that are drawn together."""


def draw_before(job: Job, design: Design) -> None:
    """Pictures by the weights that training begins with, where they are pretrained. One process."""
    directory = encoder_directory(job.config, design)
    home = job.run.path / PICTURES / BEFORE
    if directory is not None and not home.is_dir():
        _draw(job, directory, home / "last")


def draw_on_the_way(session: Session, job: Job, design: Design, step: int) -> None:
    """Pictures after a step, every `sampling.every` steps; not after the last one.

    The model is exported and drawn from on the first rank, so any layout can do it. Collective.
    """
    config: Config = job.config
    every = config.sampling.every
    if not every or not config.sampling.prompts or step % every or step >= config.train.steps:
        return
    home = job.run.path / PICTURES
    weights = home / WEIGHTS
    if dist.get_rank() == 0:
        own_folder(home, below=job.run.path)
        remove(weights)
    dist.barrier()
    export(session, design, config, weights, job.run.path)
    if dist.get_rank() == 0:
        _draw_all(job, weights, home / str(step))
        remove(weights)
    dist.barrier()


def draw_at_the_end(job: Job) -> None:
    """Pictures by a run's export. One process."""
    remove(job.run.path / PICTURES / WEIGHTS)  # of a run that was killed while it drew
    _draw_all(job, job.run.export, job.run.path / PICTURES / str(job.config.train.steps))


def _draw_all(job: Job, export: Path, home: Path) -> None:
    """Draw pictures by every kind of weights that an export has."""
    averaged = (export / RAW).is_dir()
    _draw(job, export, home / ("average" if averaged else "last"))
    if averaged:
        _draw(job, export, home / "last", raw=True)


def _draw(job: Job, directory: Path, home: Path, *, raw: bool = False) -> None:
    from PIL import Image

    config: Config = job.config
    if not config.sampling.prompts:
        return
    device = torch.device("cpu") if job.device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    sampler = open_sampler(directory, raw=raw, device=device)
    pictures = sampler.in_batches(config.sampling.prompts, options(config), batch=AT_ONCE)
    own_folder(home, below=job.run.path)
    for number, drawn in enumerate(pictures):
        with replaced(home / f"{number}.png") as file:
            Image.fromarray(drawn).save(file, format="PNG")


def show(run: RunDirectory) -> str:
    """HTML tables of a run's pictures, a row a prompt and a column a step; one for each kind of weights.

    They hold the pictures themselves; empty where none were drawn.
    """
    home = run.path / PICTURES
    if not home.is_dir():
        return ""
    config = config_file.read(run.config_file, Config)
    steps = sorted((d.name for d in home.iterdir() if d.name == BEFORE or d.name.isdigit()), key=_order)
    tables = [_table(config, home, steps, kind) for kind in KINDS]
    return "".join(table for table in tables if table)


def _order(step: str) -> int:
    return -1 if step == BEFORE else int(step)


def _table(config: Config, home: Path, steps: list[str], kind: str) -> str:
    drawn_steps = [step for step in steps if (home / step / kind).is_dir()]
    if not drawn_steps:
        return ""
    head = "".join(f"<th>{step if step == BEFORE else f'step {step}'}" for step in drawn_steps)
    rows = []
    for number, prompt in enumerate(config.sampling.prompts):
        cells = "".join(f"<td>{_cell(home / step / kind / f'{number}.png')}" for step in drawn_steps)
        rows.append(f"<tr><th>{html.escape(prompt)}{cells}")
    title = f"Pictures {KINDS[kind]}, seed {config.sampling.seed}"
    return f"<h2>{title}</h2><table><tr><th>{head}{''.join(rows)}</table>"


def _cell(file: Path) -> str:
    if not file.is_file():
        return ""
    return picture(file.read_bytes(), "png", width=128)
