"""A few cells of the models with other heads; all of them are `python tests/sweep/heads.py`."""

from __future__ import annotations

import functools
import json

import pytest

from cai_mesh.testing import run_ranks
from sweep import heads

CELLS = [
    ("masked", "bert", "swap"),
    ("masked", "bert", "zero3"),
    ("masked", "eurobert", "tp2"),
    ("seq2seq", "t5", "offload"),
    ("seq2seq", "t5", "zero1"),
    ("image", "vit", "zero3"),
    ("image", "deit", "tp2 sequence"),
    ("speech", "hubert", "tp2"),
    ("image", "siglip", "tp2 sequence"),
    ("speech", "whisper", "swap"),
    ("speech", "whisper", "tp2 sequence"),
]


@functools.cache
def plain(kind, model_type):
    return run_ranks(1, heads.trained, kind, model_type, "plain", timeout=heads.TIMEOUT)[0]


@pytest.mark.parametrize(("kind", "model_type", "column"), CELLS)
def test_equals_the_plain_loop(kind, model_type, column):
    assert heads.cell(kind, model_type, column, plain(kind, model_type)) == {"outcome": "right"}


def test_the_page_says_what_the_results_say():
    assert heads.PAGE.read_text() == heads.written(json.loads(heads.RESULTS.read_text()))


def test_a_wrong_cell_is_told():
    wanted = plain("image", "vit")
    losses = [*wanted["losses"][:-1], wanted["losses"][-1] + 1e-5]
    assert heads.judged(wanted, wanted) == {"outcome": "right"}
    assert heads.judged({**wanted, "losses": losses}, wanted)["outcome"] == "wrong"
