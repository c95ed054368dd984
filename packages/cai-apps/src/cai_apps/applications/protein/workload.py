"""What training AlphaFold means: what goes into the model, and its loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cai_apps.applications.protein.chemistry import GROUPS, PLACES
from cai_apps.applications.protein.config import Config
from cai_apps.applications.protein.data.batch import TRUTH, features_of, packed, truth_of
from cai_apps.applications.protein.data.clusters import Masking
from cai_apps.applications.protein.data.examples import Piece
from cai_apps.applications.protein.data.pretrained import weights_directory
from cai_apps.applications.protein.data.truth import Groups
from cai_apps.applications.protein.design import compiled_methods, initializer, layers, sizes_for
from cai_apps.applications.protein.loss.whole import FINE_TUNING, WEIGHTS, Truth, losses, total
from cai_apps.applications.protein.model.alphafold import AlphaFold, Features, Round, Sizes, Templates
from cai_apps.applications.protein.model.frames import Frames
from cai_apps.applications.protein.weights import openfold_name
from cai_apps.compose.sharding import DTYPES
from cai_apps.compose.workload import Batch, Loss, Workload
from cai_mesh.checkpoint import load_hf

STAGES = {"initial": WEIGHTS, "fine_tuning": FINE_TUNING}


def piece_of(config: Config) -> Piece:
    """How much of a chain a sample of a run holds."""
    data, objective = config.data, config.objective
    masking = Masking(objective.masked)
    return Piece(
        data.residues, data.sequences, data.extra, objective.clamped, masking, templates=data.templates
    )


def workload(config: Config) -> Workload:
    """The workload of a config."""
    sizes, compute = sizes_for(config), DTYPES[config.precision.compute]
    weights = STAGES[config.objective.stage]

    def ready(batch: Batch) -> Batch:
        """Features in the dtype of computing; the truth in float32 at least."""
        wide = torch.promote_types(compute, torch.float32)
        return {
            name: value.to(wide if name.startswith(TRUTH) else compute)
            if value.is_floating_point()
            else value
            for name, value in batch.items()
        }

    return Workload(
        build=lambda: AlphaFold(sizes),
        ready=ready,
        inputs=lambda batch: {"rounds": features_of(batch)},
        target=truth_of,
        loss=lambda model, mesh: _loss(weights),
        example=lambda samples: ready(_example(config, sizes, samples)),
        initializer=initializer,
        layers=layers,
        others=compiled_methods,
        pretrained=_pretrained(config),
    )


def _pretrained(config: Config) -> Callable[[nn.Module], None] | None:
    """Reads `prepare_weights`' directory, on any layout."""
    if config.model.weights == "random":
        return None

    def load(model: nn.Module) -> None:
        assert isinstance(model, AlphaFold)
        load_hf(model, weights_directory(config), names=openfold_name(model))

    return load


def _loss(weights: dict[str, float]) -> Loss:
    def loss(prediction: Round, truth: Truth) -> Tensor:
        """The sum over samples; a sample counts by the root of its residues (section 1.9)."""
        sample_losses = total(losses(prediction, truth, bonds="violations" in weights), weights)
        return (sample_losses * truth.mask.sum(-1).sqrt().to(sample_losses.dtype)).sum()

    return loss


def _example(config: Config, sizes: Sizes, samples: int) -> Batch:
    """A microbatch of zeros, of two rounds where a step may have more than one."""
    data, rounds = config.data, min(2, config.objective.rounds)
    templates = None
    count, rows, extra = data.residues, data.sequences, data.extra
    if sizes.template is not None:
        shape = (samples, data.templates, count)
        templates = Templates(
            torch.zeros(*shape, count, sizes.template.pair), torch.zeros(*shape, sizes.template.angles),
            torch.zeros(shape), torch.ones(shape[:2]),
        )  # fmt: skip
    features = Features(
        residue=torch.zeros(samples, count, dtype=torch.int64),
        mask=torch.ones(samples, count),
        index=torch.arange(count).expand(samples, count),
        target=torch.zeros(samples, count, sizes.target),
        alignment=torch.zeros(samples, rows, count, sizes.alignment),
        alignment_mask=torch.ones(samples, rows, count),
        extra=torch.zeros(samples, extra, count, sizes.extra),
        extra_mask=torch.ones(samples, extra, count),
        templates=templates,
    )
    return packed([features] * rounds, _no_truth(samples, count, rows))


def _no_truth(samples: int, count: int, rows: int) -> Truth:
    """Return the truth of a structure of which nothing is known."""
    groups = (samples, count, GROUPS)
    frames = Frames(torch.eye(3).expand(*groups, 3, 3), torch.zeros(*groups, 3))
    return Truth(
        residue=torch.zeros(samples, count, dtype=torch.int64),
        mask=torch.ones(samples, count),
        atoms=torch.zeros(samples, count, PLACES, 3),
        known=torch.zeros(samples, count, PLACES, dtype=torch.bool),
        torsions=torch.zeros(samples, count, 7, 2),
        torsions_known=torch.zeros(samples, count, 7),
        groups=Groups(frames, frames, torch.zeros(groups)),
        rows=torch.zeros(samples, rows, count, dtype=torch.int64),
        masked=torch.zeros(samples, rows, count),
        clamped=torch.ones(samples),
        fine=torch.ones(samples),
        index=torch.arange(count).expand(samples, count),
    )
