"""Samples as tensors by name, as the loop reads and moves them, and back.

What differs between rounds has them as its second dimension; names of the truth begin with "truth.".
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cai_apps.applications.protein.loss.whole import Truth
from cai_apps.applications.protein.model.alphafold import Features, Templates
from cai_apps.data.batches import mark

DRAWN = ("alignment", "alignment_mask", "extra", "extra_mask")
"""Features that differ between rounds."""
TRUTH, TEMPLATES = "truth.", "templates."


def packed(rounds: Sequence[Features], truth: Truth | None = None) -> dict[str, Tensor]:
    """The rounds of samples and their truth; each tensor has the samples along its first dimension."""
    first = rounds[0]
    features = replace(first, **{name: torch.stack([getattr(r, name) for r in rounds], 1) for name in DRAWN})
    return _named(features, "") | ({} if truth is None else _named(truth, TRUTH))


def features_of(batch: dict[str, Tensor]) -> list[Features]:
    """The rounds that `packed` was given."""
    templates = _filled(Templates, batch, TEMPLATES) if any(k.startswith(TEMPLATES) for k in batch) else None
    names = [field.name for field in fields(Features) if field.name != "templates"]
    features = Features(**{name: batch[name] for name in names}, templates=templates)
    # a slice's strides depend on the number of rounds, and torch compiles anew for other strides
    drawn = [[tensor.contiguous() for tensor in getattr(features, name).unbind(1)] for name in DRAWN]
    return [
        replace(features, **dict(zip(DRAWN, round_tensors, strict=True)))
        for round_tensors in zip(*drawn, strict=True)
    ]


def truth_of(batch: dict[str, Tensor]) -> Truth:
    """The truth that `packed` was given."""
    return _filled(Truth, batch, TRUTH)


def blank(batch: dict[str, Tensor], missing: Tensor) -> dict[str, Tensor]:
    """Return a batch, of which the samples that are marked (bool [n]) have no known residues, so no weight."""
    name = f"{TRUTH}mask"
    mask = batch[name]
    return mark(batch, missing) | {name: mask.masked_fill(missing.view(-1, *[1] * (mask.dim() - 1)), 0)}


def _named(value: Any, prefix: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for field in fields(value):
        member = getattr(value, field.name)
        if is_dataclass(member):
            tensors |= _named(member, f"{prefix}{field.name}.")
        elif member is not None:
            tensors[f"{prefix}{field.name}"] = member
    return tensors


def _filled(kind: type, batch: dict[str, Tensor], prefix: str) -> Any:
    hints = typing.get_type_hints(kind)
    members = {
        name: _filled(hint, batch, f"{prefix}{name}.") if is_dataclass(hint) else batch[f"{prefix}{name}"]
        for name, hint in hints.items()
    }
    return kind(**members)
