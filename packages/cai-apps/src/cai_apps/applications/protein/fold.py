"""The structure of one chain by a model, and how sure the model is of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cai_apps.applications.protein.chemistry import tables
from cai_apps.applications.protein.data.clusters import Masking
from cai_apps.applications.protein.data.examples import Piece, each_tensor, query
from cai_apps.applications.protein.data.sequences import Alignment
from cai_apps.applications.protein.data.structures import Chain, write_chain
from cai_apps.applications.protein.data.templates import Template
from cai_apps.applications.protein.loss.heads import confidence, predicted_errors, predicted_tm
from cai_apps.applications.protein.loss.points import lddt
from cai_apps.applications.protein.model.alphafold import ALPHA, AlphaFold, Features
from cai_apps.compose.broken import watched
from cai_mesh.errors import DataError
from cai_mesh.files import write_text


@dataclass(frozen=True)
class Options:
    """How a chain is folded.

    Args:
        rounds: one after the other, each with its own draw of the alignment.
        sequences, extra: sequences of the alignment that lead clusters, and others, as in training.
        templates: so many are read at most, by a model that reads any.
        masked: share of its residues that are masked, as in training.
        seed: the seed of what is drawn.
    """

    rounds: int = 4
    sequences: int = 512
    extra: int = 1024
    templates: int = 4
    masked: float = 0.15
    seed: int = 0


@dataclass(frozen=True)
class Prediction:
    """What a model says of a chain.

    Args:
        chain: its residues and atoms.
        plddt: the expected lDDT of each residue, 0 to 100 [R].
        errors: the expected error of one residue's place, seen from another, angstroms [R, R]; None: a model without.
        tm: the TM-score that these let expect; None: a model without.
    """

    chain: Chain
    plddt: np.ndarray
    errors: np.ndarray | None
    tm: float | None

    def write(self, path: Path) -> list[Path]:
        """As mmCIF, confidence where B factors are; beside it PATH.pae.json where errors are predicted."""
        write_chain(path, self.chain, self.plddt)
        if self.errors is None:
            return [path]
        errors_path = path.with_suffix(".pae.json")
        record = {
            "predicted_aligned_error": np.round(self.errors, 2).tolist(),
            "max_predicted_aligned_error": 31.75,
            "ptm": round(self.tm or 0.0, 4),
            "plddt": np.round(self.plddt, 2).tolist(),
        }
        write_text(errors_path, json.dumps([record]))
        return [path, errors_path]


def alone(name: str, residues: np.ndarray) -> Alignment:
    """An alignment of nothing but the chain itself; numbers of its residues [R]."""
    return Alignment((name,), residues[None].astype(np.uint8), np.zeros((1, len(residues)), np.uint16))


def features_of_rounds(
    model: AlphaFold,
    alignment: Alignment,
    options: Options,
    templates: Sequence[Template] = (),
    rounds: int | None = None,
) -> list[Features]:
    """Return what a model reads of an alignment in each round, on the host.

    Args:
        model: the model, which may read templates.
        alignment: an alignment whose first sequence is folded.
        options: rounds, sequences and templates.
        templates: related structures.
        rounds: the number of rounds; None: that of the options.
    """
    draws = torch.Generator().manual_seed(options.seed)
    count = 0 if model.template is None else min(options.templates, len(templates))
    piece = Piece(1, options.sequences, options.extra, masking=Masking(options.masked), templates=count)
    return query(alignment, piece, options.rounds if rounds is None else rounds, draws, templates)


@torch.no_grad()
def fold(
    model: AlphaFold, name: str, alignment: Alignment, options: Options, templates: Sequence[Template] = ()
) -> Prediction:
    """The chain whose sequence is the first of an alignment.

    Args:
        model: a model in evaluation mode, on its device and in its dtype.
        name: the name of the chain that is returned.

    Raises `DataError` for a prediction that is not finite.
    """
    reference = next(model.parameters())
    features_by_round = features_of_rounds(model, alignment, options, templates)
    rounds = [_on(features, reference) for features in features_by_round]
    last_round = model(rounds)
    atoms, scores = last_round.folded.atoms[0].double().cpu(), last_round.scores
    if not bool(atoms.isfinite().all()):
        with watched(model) as first:
            model(rounds)
        raise DataError(
            f"the structure of {name} is not finite",
            got=f"the first output that is not: {first[0] if first else 'in no one module'}",
            cause="weights that are not, or a dtype too narrow",
        )
    residue = rounds[0].residue[0].cpu()
    atom_mask = tables().there[residue]
    chain = Chain(name, residue.numpy(), atoms.numpy(), atom_mask.numpy(), 0.0)
    errors = None if scores.errors is None else predicted_errors(scores.errors)[0].cpu().numpy()
    tm = None if scores.errors is None else float(predicted_tm(scores.errors, rounds[0].mask)[0])
    return Prediction(chain, confidence(scores.plddt)[0].cpu().numpy(), errors, tm)


def _on(features: Features, like: torch.Tensor) -> Features:
    return each_tensor(features, lambda x: x.to(like.device, like.dtype if x.is_floating_point() else None))


def likeness(predicted: Chain, true: Chain) -> float:
    """The mean lDDT of alpha carbons beside a known structure, 0 to 1, over those that it has."""
    predicted_alpha, true_alpha = (
        torch.from_numpy(chain.atoms[None, :, ALPHA]) for chain in (predicted, true)
    )
    alpha_mask = torch.from_numpy(true.known[None, :, ALPHA])
    residue_lddt = lddt(predicted_alpha, true_alpha, alpha_mask)
    return float((residue_lddt * alpha_mask).sum() / alpha_mask.sum())
