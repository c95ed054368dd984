"""Notebooks of examples/ are run cell by cell, and what they keep is small."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "examples" / "notebooks").glob("*.ipynb"))
KEPT_BYTES = 20_000
"""The most that a notebook may take with its outputs."""


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_shows_what_it_printed(notebook: Path):
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(notebook.read_bytes()) < KEPT_BYTES
    assert any(cell["outputs"] for cell in cells), "run it and keep what it prints"
    assert not [each for cell in cells for each in cell["outputs"] if each["output_type"] == "error"]
    kept = json.dumps([cell["outputs"] for cell in cells])
    assert not [place for place in ("home", "tmp", "root") if f"/{place}/" in kept], (
        "a path of somebody's machine"
    )


@pytest.mark.matrix
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(notebook: Path, tmp_path: Path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    shutil.copy(notebook, tmp_path)
    cells = nbformat.read(tmp_path / notebook.name, as_version=4)
    nbclient.NotebookClient(cells, timeout=400, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert all(cell.execution_count for cell in cells.cells if cell.cell_type == "code")
