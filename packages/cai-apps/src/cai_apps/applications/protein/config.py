"""What a run of AlphaFold is, beside the sections of every run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from cai_apps.config import sections
from cai_apps.config.ranges import COUNT, FILLED, NATURAL, POSITIVE, SHARE, Range

MODELS = ("alphafold", "alphafold-small", "alphafold-tiny")
"""Presets."""


@dataclass(frozen=True)
class Model:
    name: Annotated[str, FILLED] = "alphafold-tiny"
    """A preset: alphafold (93M parameters, as model_1_ptm), alphafold-small, alphafold-tiny."""
    weights: Annotated[str, FILLED] = "random"
    """random: made from train.seed; else a file of OpenFold's (.pt) or AlphaFold's (.npz) weights."""
    errors: bool = True
    """Whether aligned errors are predicted; published weights without "ptm" in their name have no such head."""


@dataclass(frozen=True)
class Data:
    source: Annotated[str, FILLED] = "shipped"
    """'shipped' (three small chains of the PDB, their alignments synthetic), or a directory: for each chain an
    alignment NAME.a3m or NAME.sto and its structure NAME.cif or NAME.pdb; where NAME is ENTRY_CHAIN, ENTRY.cif will
    do. Related structures come from NAME.hhr."""
    residues: Annotated[int, COUNT] = 256
    """Neighbouring residues of a chain that a sample holds."""
    sequences: Annotated[int, COUNT] = 128
    """Sequences of the alignment that lead clusters."""
    extra: Annotated[int, COUNT] = 1024
    """Other sequences."""
    templates: Annotated[int, NATURAL] = 0
    """Related structures; 0: none are read."""
    template_structures: Annotated[str | None, FILLED] = None
    """Directory of the structures that NAME.hhr names; None: that of `source`."""
    max_resolution: Annotated[float, POSITIVE] = 9.0
    """Angstroms; structures that are coarser are left out."""
    validation: tuple[str, ...] = ()
    """Names of chains that are kept for validation and never trained on."""
    cache: Annotated[str, FILLED] = "~/.cache/cai"
    """Directory for what was read."""


@dataclass(frozen=True)
class Objective:
    rounds: Annotated[int, Range(least=1, most=1000)] = 4
    """Rounds of a step at most (recycling): how many is drawn anew for each, alike on all ranks; the last one learns.
    Validation takes all of them."""
    stage: Literal["initial", "fine_tuning"] = "initial"
    """Whose weights losses have: of training from the start, or of training on with violations of bonds."""
    clamped: Annotated[float, SHARE] = 0.9
    """Share of samples in which errors of the backbone have a most."""
    masked: Annotated[float, SHARE] = 0.15
    """Share of the alignment's residues that are masked and learned."""


@dataclass(frozen=True)
class Folding:
    chains: tuple[str, ...] = ()
    """Chains of `data` that are folded at the end, beside their structures; `cai report` shows them."""
    every: Annotated[int, NATURAL] = 0
    """Steps between folds on the way; 0: only at the end."""


@dataclass(frozen=True)
class Config(sections.RunConfig):
    application: Literal["protein"] = "protein"
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    objective: Objective = field(default_factory=Objective)
    folding: Folding = field(default_factory=Folding)
