"""Encoder-decoders and image classifiers in stages, against the same model in one process."""

from __future__ import annotations

from typing import Any

import pytest
from pipeline_models import compare, train

from cai_mesh.testing import run_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "interleaved": {"chunks": 2},
    "zb-h1": {},
    "zb-v": {"chunks": 2, "placement": "v"},
}


@pytest.mark.parametrize(
    ("name", "ranks", "schedule", "ragged"),
    [
        ("t5", 2, "1f1b", True),
        ("t5", 4, "zb-h1", False),
        ("flan-t5", 2, "interleaved", True),
        ("bart", 4, "1f1b", True),
        ("bart", 2, "zb-v", False),
        ("whisper", 2, "interleaved", True),
        ("whisper", 4, "zb-h1", False),
        ("t5", 4, "zb-v", True),
        ("vit", 4, "1f1b", True),
        ("vit", 2, "interleaved", False),
        ("vit", 2, "zb-v", True),
    ],
)
def test_training_is_that_of_one_process(name: str, ranks: int, schedule: str, ragged: bool) -> None:
    counts = (4, 6)
    found = run_ranks(ranks, train, name, ranks, schedule, counts, ragged, **LAYOUTS[schedule])
    compare(found, name, counts, ragged)
