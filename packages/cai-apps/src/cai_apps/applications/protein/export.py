"""A trained model as files.

export/model.safetensors    the averaged weights where there are some, else the last, float32, by OpenFold's names
export/openfold.pt          the same for OpenFold
export/raw/                 with an average: the last weights in both forms
export/model.json           the preset, whether templates are read, and aligned errors predicted
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from cai_apps.applications.protein.config import Config
from cai_apps.applications.protein.design import sizes_for, sizes_of
from cai_apps.applications.protein.model.alphafold import AlphaFold
from cai_apps.applications.protein.weights import openfold_name, read_weights
from cai_mesh.checkpoint import save_hf
from cai_mesh.errors import DataError
from cai_mesh.layout import BoxedTensor

if TYPE_CHECKING:
    from cai_apps.compose.session import Session

WEIGHTS, OPENFOLD, KIND, RAW = "model.safetensors", "openfold.pt", "model.json", "raw"


def export(session: Session, config: Config, directory: Path) -> None:
    """Write the model as it stands. Collective; the files are seen by all ranks."""
    average, masters = session.average, session.weights.masters()
    _save(session, config, directory, masters if average is None else average.values())
    if average is not None:
        _save(session, config, directory / RAW, masters)
    dist.barrier()


def _save(
    session: Session, config: Config, directory: Path, weights: Mapping[str, BoxedTensor] | None
) -> None:
    kind = {"model": config.model.name, "templates": config.data.templates > 0, "errors": config.model.errors}
    with torch.device("meta"):
        model = AlphaFold(sizes_for(config))
    names = openfold_name(model)
    save_hf(session.model, directory, weights=weights, names=names, dtype=torch.float32)
    if dist.get_rank() == 0:
        (directory / KIND).write_text(json.dumps(kind), encoding="utf-8")
        torch.save(load_file(directory / WEIGHTS), directory / OPENFOLD)


def load_export(directory: Path, *, raw: bool = False) -> AlphaFold:
    """The model of an export, on the CPU in float32, for evaluation.

    Raises `DataError` where the directory is none.
    """
    home = directory / RAW if raw else directory
    if not (home / KIND).is_file():
        raise DataError(
            f"no export of AlphaFold at {home}", cause="the run has not ended, or has no average (raw)"
        )
    kind = json.loads((home / KIND).read_text(encoding="utf-8"))
    model = AlphaFold(sizes_of(kind["model"], templates=kind["templates"], errors=kind["errors"]))
    read_weights(model, home / WEIGHTS)
    return model.eval()
