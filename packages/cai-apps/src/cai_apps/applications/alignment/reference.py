"""What a reference model says of answers: computed before the first step, or in each step.

A reference is a model that does not learn, on the same ranks as the one that does, by the same transforms. Where its
log-probabilities are computed before, it has its memory alone: it is gone when the model that learns is built.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cai_apps.applications.alignment.algorithms import ALGORITHMS
from cai_apps.applications.alignment.config import Config
from cai_apps.applications.alignment.objective import Objective
from cai_apps.compose.forward_only import FrozenModel, freeze
from cai_apps.compose.lora import without_adapters
from cai_apps.compose.workload import Batch, Forwards, Workload
from cai_apps.data.batches import Batches
from cai_apps.data.preference.rows import PreferenceRows, blank
from cai_apps.data.sealed import open_or_make, problem
from cai_apps.run.loop.progress import counted
from cai_mesh.comm import DATA_AXES, all_reduce, degree, group, index

KL = "kl_"
"""The beginning of the names of what a batch has of prompts with answers to other prompts."""
ROWS = ("input_ids", "labels", "position_ids", "cu_seqlens", "scored")
"""What there is of both kinds of answers."""
FILE = "log_probs.npy"
SECONDS = 5.0
"""Seconds from one sign of progress to the next."""


def answer_scores(objective: Objective, output: Any, rows: Mapping[str, Tensor]) -> Tensor:
    """Return the scores of the answers of all samples, float64 [B, D]: a `Score`."""
    return objective.scorer.of_all(output, rows)


def mismatched(batch: Batch) -> Batch:
    """Return the rows of a batch with answers to other prompts in place of the answers."""
    return batch | {name: batch[KL + name] for name in ROWS}


@dataclass
class Comparison:
    """What a step needs to know before it is taken: scores of a reference, and the KL of KTO.

    Args:
        config: the resolved config.
        model: the reference model where it stays beside the one that learns; None: it does not.
    """

    config: Config
    model: Forwards | None = None

    def __call__(self, forwards: Forwards, microbatches: Sequence[Batch]) -> Sequence[Batch]:
        """Return microbatches with "reference" and "kl": `Workload.before_step`. Collective."""
        algorithm = ALGORITHMS[self.config.alignment.algorithm]
        is_judged = algorithm.units == "judged"
        if algorithm.reference and self.config.reference.form != "computed":
            microbatches = self._compared(forwards, microbatches, "")
            if is_judged:
                microbatches = self._compared(forwards, microbatches, KL)
        return _with_kl(forwards, microbatches) if is_judged else microbatches

    def _compared(self, forwards: Forwards, microbatches: Sequence[Batch], prefix: str) -> list[Batch]:
        """Return microbatches with scores of the reference, zeros where there is no last stage."""
        questions = [mismatched(batch) for batch in microbatches] if prefix else microbatches
        if self.config.reference.form == "adapter":
            with without_adapters(forwards.model):
                scores = forwards.scores(questions, answer_scores)
        else:
            assert self.model is not None, "the reference is made before the first step"
            scores = self.model.scores(questions, answer_scores)
        documents = [batch["cu_seqlens"][:, 1:] for batch in questions]
        scores = scores or [torch.zeros_like(ends, dtype=torch.float64) for ends in documents]
        return [
            batch | {f"{prefix}reference": score} for batch, score in zip(microbatches, scores, strict=True)
        ]


def _with_kl(forwards: Forwards, microbatches: Sequence[Batch]) -> list[Batch]:
    """Return microbatches with the mean log-ratio of mismatched answers over the whole step's batch. Collective.

    Microbatches, ranks and rows change nothing in it (Ethayarajh et al., arXiv:2402.01306, section 4.1).
    """
    scores = forwards.scores([mismatched(batch) for batch in microbatches], answer_scores)
    device = microbatches[0]["present"].device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for batch, score in zip(microbatches, scores, strict=False):  # no score without a last stage
        present = batch["present"]
        units = present.shape[1]
        ratios = score[:, :units] - batch[f"{KL}reference"][:, :units]
        sums += torch.stack([torch.where(present, ratios, 0.0).sum(), present.sum().double()])
    all_reduce(sums, group(forwards.mesh, DATA_AXES)).wait()
    kl = sums[0] / sums[1].clamp_min(1)
    return [batch | {"kl": kl} for batch in microbatches]


def log_probs(
    config: Config,
    workload: Workload,
    rows: Sequence[PreferenceRows],
    documents: int,
    key: str,
    device: torch.device,
) -> np.ndarray:
    """Return what the reference says of every document, float64 [documents], from the cache if it is there. Collective.

    Args:
        config: the resolved config.
        workload: the workload of the reference.
        rows: all rows that are trained on and validated.
        documents: the number of documents.
        key: a digest of the reference, of the documents and of how it computes.
        device: the device of this rank.
    """
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        shared = [_cached(config.data.cache, key, documents)]
    dist.broadcast_object_list(shared)
    if shared[0] is not None:
        return shared[0]
    model = freeze(config, workload, device=device)
    values = torch.zeros(documents, dtype=torch.float64, device=device)
    for part in rows:
        _score(model, part, values, config)
    for axes in (DATA_AXES, ("pp",)):
        all_reduce(values, group(model.mesh, axes)).wait()
    array = values.cpu().numpy()
    if dist.get_rank() == 0:
        open_or_make(config.data.cache, key, lambda scratch: np.save(scratch / FILE, array))
    return array


def _cached(cache: str, key: str, documents: int) -> np.ndarray | None:
    """Return what the cache has under a key; None: nothing."""
    directory = Path(cache).expanduser() / key
    if not directory.is_dir() or problem(directory) is not None:
        return None
    array = np.load(directory / FILE, allow_pickle=False)
    return array if len(array) == documents else None


def _score(model: FrozenModel, rows: PreferenceRows, values: Tensor, config: Config) -> None:
    """Add what this data rank's rows say to the values of their documents. Collective."""
    mesh, train = model.mesh, config.train
    place = index(mesh, DATA_AXES), degree(mesh, DATA_AXES)
    batches = Batches(rows, train.global_batch, train.microbatch_size, *place, seed=None, blank=blank)
    last_sign = time.monotonic()
    with counted(rows.size, "rows, read by the reference", visible=dist.get_rank() == 0) as show:
        for first in range(0, rows.size, train.global_batch):
            batch = [
                {name: value.to(model.runner.device) for name, value in microbatch.items()}
                for microbatch in batches.at(first)
            ]
            sides = (0, 1) if rows.is_paired else (0,)
            _put(values, batch, model.scores(batch, answer_scores), sides)
            if not rows.is_paired:
                questions = [mismatched(microbatch) for microbatch in batch]
                _put(values, batch, model.scores(questions, answer_scores), (1,))
            if time.monotonic() - last_sign > SECONDS:
                last_sign = time.monotonic()
                show(min(first + train.global_batch, rows.size))


def _put(values: Tensor, batch: Sequence[Batch], scores: Sequence[Tensor], sides: tuple[int, ...]) -> None:
    """Write scores to the places of their documents.

    Args:
        values: those of all documents; of unit n there are documents 2 n and 2 n + 1.
        batch: microbatches.
        scores: the scores of each; none without a last stage.
        sides: the documents of a unit that lie in the rows, 0 or 1, in their order.
    """
    for rows, score in zip(batch, scores, strict=False):
        first = 2 * rows["number"]
        documents = torch.stack([first + side for side in sides], dim=-1).flatten(1)
        present = rows["present"].repeat_interleave(len(sides), dim=1)
        values[documents[present]] = score[:, : documents.shape[1]][present]
