"""Two shipped structures as templates of a query of twenty residues, with gaps and leaps."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np

from cai_apps.applications.protein.data.structures import read_chain
from cai_apps.applications.protein.data.templates import Template

SHIPPED = Path(str(files("cai_apps.applications.protein") / "data" / "shipped"))
PLACES = {
    "4CUP": [0, 1, 2, -1, -1, 7, 8, 20, 21, 22, 44, 45, 46, 71, 72, 103, -1, 113, 114, 115],
    "1A8O": [-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 30, 31, 50, 51, 52, 60, 61, -1, 69],
}
"""Among them are residues without atoms, with some of them, glycines and selenium."""
RESIDUES = 20


def given() -> list[Template]:
    return [
        Template(read_chain(SHIPPED / f"{name}.cif"), np.array(places)) for name, places in PLACES.items()
    ]
