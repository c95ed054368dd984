"""Logits of all places of a microbatch exist nowhere: over tensor ranks, in stage 3, with gradients and without."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from layouts import Case, model_config
from preference_toys import LENGTH, config_of, rows_of
from torch.utils._python_dispatch import TorchDispatchMode

from cai_apps.applications.alignment.reference import Comparison, answer_scores
from cai_apps.applications.alignment.workload import workload
from cai_apps.compose.apply import apply
from cai_apps.compose.forward_only import freeze
from cai_apps.data.batches import Batches
from cai_apps.data.documents import open_documents
from cai_apps.data.preference.prepare import Preferences
from cai_apps.data.preference.rows import PreferenceRows
from cai_kernels.linear_cross_entropy import inputs
from cai_mesh.comm import DATA_AXES, degree, index
from cai_mesh.storage import finding
from cai_mesh.testing import run_ranks
from cai_tensor_parallel.log_probs import rule

VOCAB, BATCH, CHUNK = 96, 8, 5
CPU = torch.device("cpu")
CASES = {
    "tensor": Case(tensor=2, kernels="on", microbatches=1),
    "sequence": Case(tensor=2, sequence=True, kernels="on", microbatches=1),
    "zero3": Case(data=2, zero=3, kernels="on", microbatches=1),
    "zero3-head-alone": Case(data=2, zero=3, kernels="on", microbatches=1),
    "both": Case(data=2, tensor=2, zero=3, kernels="on", microbatches=1),
    "both-head-alone": Case(data=2, tensor=2, zero=3, kernels="on", microbatches=1),
    "torch": Case(tensor=2, microbatches=1),
}


class Widest(TorchDispatchMode):
    """Records the most places for which a result of an operation has a number of columns."""

    def __init__(self, columns: int):
        super().__init__()
        self.columns, self.places = columns, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            has_memory = isinstance(value, torch.Tensor) and not value.is_meta
            has_memory = has_memory and func is not torch.ops.aten.t.default  # a weight's other form
            if has_memory and value.dim() > 1 and value.shape[-1] == self.columns:
                self.places = max(self.places, value.numel() // self.columns)
        return out


def widest(name: str, directory: str) -> dict[str, int]:
    """The most places with logits in a step, in its validation, and in the forwards of a reference."""
    case = CASES[name]
    alone = 1 if "alone" in name else finding.ALONE_ELEMENTS
    with (
        mock.patch.object(rule, "CHUNK_BYTES", CHUNK * 8 * VOCAB // case.tensor),
        mock.patch.object(inputs, "chunk_rows", return_value=CHUNK),
        mock.patch.object(finding, "ALONE_ELEMENTS", alone),
    ):  # ranks are shared with other tests
        return _widest(case, directory)


def _widest(case: Case, directory: str) -> dict[str, int]:
    source = Preferences(open_documents(Path(directory)), "pairs")
    rows = PreferenceRows.of(source, np.arange(source.units), LENGTH)
    config = config_of("dpo", case, "model")
    comparison = Comparison(config)
    plain = workload(config, model_config("llama"), comparison)
    comparison.model = freeze(config, plain, device=CPU)
    session = apply(config, plain, device=CPU)
    ranks = index(session.mesh, DATA_AXES), degree(session.mesh, DATA_AXES)
    batch = Batches(rows, BATCH, config.train.microbatch_size, *ranks, seed=7).at(0)
    places = batch[0]["labels"].numel()
    found = {"all": places}
    for what, run in {
        "reference": lambda: comparison.model.scores(batch, answer_scores),
        "step": lambda: session.step(batch, total=8.0),
        "validation": lambda: session.evaluate(batch, total=8.0),
        "again": lambda: session.step(batch, total=8.0),
    }.items():
        with Widest(VOCAB // case.tensor) as mode:
            run()
        found[what] = mode.places
    session.weights.finish()
    return found


def all_of(names: list[str], directory: str) -> dict[str, dict[str, int]]:
    return {name: widest(name, directory) for name in names}


@pytest.mark.parametrize("world", [2, 4])
def test_logits_of_all_places_are_never_made(world, tmp_path):
    rows_of(tmp_path / "pairs", "pairs")
    names = [name for name, case in CASES.items() if case.world == world]
    for name, found in run_ranks(world, all_of, names, str(tmp_path / "pairs"), timeout=500)[0].items():
        places = found.pop("all")
        assert places > 10 * CHUNK
        if name == "torch":  # as it is without kernels: what counts places does see them
            assert found["reference"] == found["step"] == places
        else:
            assert max(found.values()) <= CHUNK, (name, found)
