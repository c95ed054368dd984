"""Chains of the data folded by a run, on the way and at the end, beside their known structures.

RUN_DIR/folds/500/NAME.cif         after 500 steps, by the averaged weights where there are some
              500/NAME.pae.json    errors that the model expects
              500/scores.json      by the name of each chain: lDDT beside its structure, confidence, TM-score
        folds/truth/NAME.cif       the known structure
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from cai_apps.applications.protein.config import Config
from cai_apps.applications.protein.data.chains import load
from cai_apps.applications.protein.data.structures import write_chain
from cai_apps.applications.protein.export import export, load_export
from cai_apps.applications.protein.fold import Options, fold, likeness
from cai_apps.compose.sharding import DTYPES
from cai_mesh.files import own_folder, remove, write_text

if TYPE_CHECKING:
    from cai_apps.compose.session import Session
    from cai_apps.run.task import Job

FOLDS, TRUTH, SCORES, WEIGHTS = "folds", "truth", "scores.json", "weights"


def fold_on_the_way(session: Session, job: Job, step: int) -> None:
    """Fold after a step, every `folding.every` steps; not after the last one. Collective; the first rank folds."""
    config: Config = job.config
    every = config.folding.every
    if not every or not config.folding.chains or step % every or step >= config.train.steps:
        return
    weights = job.run.path / FOLDS / WEIGHTS
    if dist.get_rank() == 0:
        own_folder(weights.parent, below=job.run.path)
        remove(weights)
    dist.barrier()
    export(session, config, weights)
    if dist.get_rank() == 0:
        _fold_all(job, weights, step)
        remove(weights)
    dist.barrier()


def fold_at_the_end(job: Job) -> None:
    """Fold by a run's export. One process."""
    config: Config = job.config
    if not config.folding.chains:
        return
    remove(job.run.path / FOLDS / WEIGHTS)  # of a run that was killed while it folded
    scores = _fold_all(job, job.run.export, config.train.steps)
    for name, score in scores.items():
        print(
            f"folded         {name}: lDDT {score['lddt']:.2f} beside its structure, confidence {score['plddt']:.0f}"
        )
    print(f"structures     {job.run.path / FOLDS}, shown by cai report {job.run.path}")


def _fold_all(job: Job, weights: Path, step: int) -> dict[str, dict[str, float]]:
    config: Config = job.config
    device = torch.device("cpu") if job.device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    model = load_export(weights).to(device, DTYPES[config.precision.compute])
    home, truth = job.run.path / FOLDS / str(step), job.run.path / FOLDS / TRUTH
    for directory in (home, truth):
        own_folder(directory, below=job.run.path)
    data, objective = config.data, config.objective
    options = Options(
        objective.rounds,
        data.sequences,
        data.extra,
        data.templates,
        objective.masked,
        config.train.seed,
    )
    scores: dict[str, dict[str, float]] = {}
    for name in config.folding.chains:
        record = load(job.prepared.file(name))
        prediction, chain = fold(model, name, record.alignment, options, record.templates), record.chain
        prediction.write(home / f"{name}.cif")
        write_chain(truth / f"{name}.cif", chain)
        scores[name] = {"lddt": likeness(prediction.chain, chain), "plddt": float(prediction.plddt.mean())}
        if prediction.tm is not None:
            scores[name]["tm"] = prediction.tm
    write_text(home / SCORES, json.dumps(scores, indent=1))
    return scores
