"""The columns of the sweep: ways to train a model with cai. Only this file of the sweep knows cai_apps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import PretrainedConfig

from cai_apps.applications.language.config import Config
from cai_apps.applications.language.task import workload
from cai_apps.applications.language.validation import resolve
from cai_apps.compose.apply import apply
from cai_apps.compose.materialize import materialize
from cai_apps.compose.models import initializer, meta_model
from cai_apps.compose.session import Session
from cai_apps.config import sections as c
from cai_apps.data.section import Data
from cai_kernels.errors import KernelError
from cai_mesh.comm import all_reduce, group
from cai_mesh.errors import CaiError
from cai_mesh.layout import BoxedTensor
from sweep.configs import LENGTH, NotBuilt, first_line, tiny
from sweep.plain_loop import (
    BATCH,
    BETAS,
    CLIP,
    EPS,
    LR,
    MICROBATCH,
    SEED,
    STEPS,
    WEIGHT_DECAY,
    Reference,
    Trained,
    batch,
    reference,
    targets,
)
from sweep.shares import shares

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Column:
    """One way to train.

    Args:
        what: it is, for the page.
        train: the run of one model on the ranks of a process group.
        ranks: how many.
    """

    what: str
    train: Callable[..., Trained]
    ranks: int = 1


@dataclass(frozen=True)
class Refused:
    """cai said no before training: its whole message."""

    message: str


@dataclass(frozen=True)
class Crashed:
    """Anything else that ended a run: the first line, and all of it."""

    reason: str
    trace: str = ""


def run_config(
    *,
    shard: int = 1,
    zero: int = 1,
    experts: int = 1,
    context: int = 1,
    tensor: int = 1,
    sequence: bool = False,
    pipeline: int = 1,
    kernels: str = "off",
    residency: str = "device",
    compute: str = "fp32",
) -> Config:
    """A config of the product with the plain loop's numbers."""
    return Config(
        parallel=c.Parallel(
            shard=shard,
            zero=zero,  # type: ignore[arg-type]
            experts=c.ExpertRanks(experts),
            context=c.Context(size=context),
            tensor=c.Tensor(size=tensor, sequence=sequence),
            pipeline=c.Pipeline(size=pipeline),
        ),
        train=c.Train(
            steps=STEPS,
            global_batch=BATCH,
            microbatch_size=MICROBATCH,
            seed=SEED,
            kernels=kernels,  # type: ignore[arg-type]
            compile="off",
        ),
        data=Data(sequence_length=LENGTH),
        memory=c.Memory(residency=residency),  # type: ignore[arg-type]
        precision=c.Precision(compute=compute),  # type: ignore[arg-type]
        optimizer=c.Optimizer(
            lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY, clip=CLIP
        ),
    )


class _Refusal(Exception):
    """Wraps an error of cai raised before the first step."""


def train(model_config: PretrainedConfig, **options: Any) -> Trained:
    """Train under `run_config(**options)`; all ranks return the same losses, and the full parameters."""
    try:
        config = resolve(run_config(**options), model_config, dist.get_world_size())
        session = apply(config, workload(config, model_config), device=CPU)
    except (CaiError, KernelError) as error:
        raise _Refusal(str(error)) from error
    shared, tensor = None, config.parallel.tensor.size
    if tensor > 1:
        whole = materialize(meta_model(model_config), initializer, seed=SEED, dtype=torch.float32, device=CPU)
        shared = shares(whole, session.model.eval(), batch(0)[0], tensor)
    losses, first = [], 0.0
    for step in range(STEPS):
        microbatches, total = _microbatches(session, step)
        loss = session.step(microbatches, total=total)
        norm = float(session.norm())
        session.update(LR, norm)
        first = norm if step == 0 else first
        losses.append(_over_data_ranks(session, loss))
    microbatches, total = _microbatches(session, STEPS)
    losses.append(_over_data_ranks(session, session.evaluate(microbatches, total=total).loss))
    return Trained(losses, first, _parameters(session), shared)


def _over_data_ranks(session: Session, loss: torch.Tensor) -> float:
    loss = loss.clone()
    all_reduce(loss, group(session.mesh, ("dp_replicate", "dp_shard")))
    return float(loss)


def _microbatches(session: Session, step: int) -> tuple[list[dict[str, torch.Tensor]], int]:
    """This data rank's microbatches of a global step, and the targets in the whole of it."""
    ids, labels = batch(step)
    data = group(session.mesh, ("dp_replicate", "dp_shard"))
    index, ranks = (0, 1) if data is None else (dist.get_rank(data), dist.get_world_size(data))
    rows = slice(index * BATCH // ranks, (index + 1) * BATCH // ranks)
    pairs = zip(
        ids[rows].split(MICROBATCH),
        F.pad(labels[rows, 1:], (0, 1), value=-100).split(MICROBATCH),
        strict=True,
    )
    return [{"input_ids": i, "labels": t} for i, t in pairs], targets(labels)


def _parameters(session: Session) -> dict[str, torch.Tensor]:
    """Full parameters, from the boxes every rank holds. Collective."""
    held = {n.removeprefix("model."): v for n, v in session.state().items() if n.startswith("model.")}
    boxed = {n: v if isinstance(v, BoxedTensor) else BoxedTensor.like(v, v) for n, v in held.items()}
    known: list = [None] * dist.get_world_size()
    dist.all_gather_object(known, {n: (b.global_shape, b.dtype) for n, b in boxed.items()})
    shapes = {n: shape for names in known for n, shape in names.items()}
    world = dist.group.WORLD
    return {n: boxed.get(n, BoxedTensor(*shapes[n], ())).to_full(world).clone() for n in sorted(shapes)}


COLUMNS: dict[str, Column] = {
    "one rank": Column("`cai_apps.compose.apply` on one rank, kernels off.", train),
    "kernels": Column(
        'The same with `train.kernels = "on"`; on a CPU the kernels run in their plain torch forms.',
        partial(train, kernels="on"),
    ),
    "offloaded": Column(
        'One rank with `memory.residency = "host"`: parameters, gradients and optimizer state in host memory.',
        partial(train, residency="host"),
    ),
    "zero3": Column(
        "Two ranks, each with half of every parameter.", partial(train, shard=2, zero=3), ranks=2
    ),
    "experts 2": Column(
        "Two ranks, each with half of every layer's experts, of types that have some.",
        partial(train, shard=2, experts=2),
        ranks=2,
    ),
    "context 2": Column(
        "Two ranks, each with half of every row of tokens.", partial(train, context=2), ranks=2
    ),
    "tp2": Column("Two ranks that share every layer: tensor parallelism.", partial(train, tensor=2), ranks=2),
    "tp2 sequence": Column(
        "The same, with the stream between the layers cut along the sequence.",
        partial(train, tensor=2, sequence=True),
        ranks=2,
    ),
    "pp2": Column(
        "Two ranks, each with half of the layers: pipeline stages.", partial(train, pipeline=2), ranks=2
    ),
}


def run_cell(column: str, model_type: str, compute: str = "fp32") -> Trained | Refused | Crashed | None:
    """One cell, on each of its ranks; what went wrong is returned, so that the processes live on."""
    config = tiny(model_type)
    try:
        trained = COLUMNS[column].train(config, compute=compute)
    except _Refusal as refusal:
        return Refused(str(refusal))
    except Exception as error:
        return _crashed(error)
    return trained if dist.get_rank() == 0 else None


def run_plain(model_type: str) -> Reference | NotBuilt | Crashed:
    """The plain loop of a row, from the values the product starts with."""
    try:
        config = tiny(model_type)
        return reference(config, lambda: _initial(config))
    except NotBuilt as reason:
        return reason
    except Exception as error:
        return _crashed(error)


def _initial(config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """What the product starts from; nothing where it refuses to start, as its cells will say."""
    try:
        model = materialize(meta_model(config), initializer, seed=SEED, dtype=torch.float32, device=CPU)
    except CaiError:
        return {}
    return {name: p.detach() for name, p in model.named_parameters()}


def _crashed(error: Exception) -> Crashed:
    import traceback

    return Crashed(first_line(error), "".join(traceback.format_exception(error)))
