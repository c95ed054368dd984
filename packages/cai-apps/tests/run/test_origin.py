"""A run that goes on keeps its tokenizer, and says or refuses what has changed in its data."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import ALONE, attempt, cai, records, train

from cai_apps.data.tokenizer import train_tokenizer
from cai_apps.run.files import origin
from cai_apps.run.files.origin import Origin
from cai_mesh.errors import CheckpointError

BEFORE = Origin({"tokenizer": "a"}, "text", "10 tokens")
STEP = Path("run/checkpoints/step-3")
WORDS = "the quick brown fox jumps over the lazy dog while it rains and pours in Spain "


def compare(now: Origin, *, new_data: bool = False) -> str | None:
    return origin.check(now, {origin.ORIGIN: BEFORE.value()}, STEP, new_data=new_data)


def test_the_same_data_say_nothing():
    assert compare(BEFORE) is None
    assert origin.check(BEFORE, {}, STEP, new_data=False) is None, (
        "a checkpoint that knows nothing of its data"
    )


@pytest.mark.parametrize("new_data", [False, True])
def test_another_tokenizer_is_refused_even_where_other_data_are_meant(new_data):
    with pytest.raises(CheckpointError, match="another tokenizer"):
        compare(replace(BEFORE, meanings={"tokenizer": "b"}), new_data=new_data)


def test_other_data_are_refused_unless_they_are_meant():
    now = Origin(BEFORE.meanings, "more text", "20 tokens")
    with pytest.raises(
        CheckpointError, match="not those that run/checkpoints/step-3 was trained on"
    ) as caught:
        compare(now)
    assert "10 tokens then, 20 tokens now" in str(caught.value)
    assert "10 tokens then, 20 tokens now" in str(compare(now, new_data=True))


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """Three steps on a text that then became longer, with other words in it."""
    place = tmp_path_factory.mktemp("grown")
    text, run, cache = place / "text.txt", place / "run", place / "cache"
    text.write_text(WORDS * 300)
    options = {"data__source": text, "train__validate_every": 0, "checkpoint__every": 3}
    train(run, cache, ALONE, train__steps=3, lr_schedule__decay_steps=3, **options)
    text.write_text(WORDS * 300 + "zebras and quaggas graze where axolotls swim " * 400)
    return place


def test_a_run_that_goes_on_in_a_longer_text_keeps_its_tokenizer(grown):
    """It trained a tokenizer anew, and wrote over the run's own: the loss rose from 2.8 to 5.6."""
    run, before = grown / "run", (grown / "run" / "tokenizer" / "tokenizer.json").read_bytes()
    config = run / "config.toml"
    refused = cai("train", config, "--train.steps", 6)
    assert refused.returncode != 0
    assert re.search(r"[\d,]+ tokens then, [\d,]+ tokens now", refused.stdout + refused.stderr)
    assert "--data.source" in refused.stdout + refused.stderr
    meant = cai("train", config, "--train.steps", 6, "--data.source", grown / "text.txt")
    assert meant.returncode == 0, meant.stdout + meant.stderr
    assert "the data have changed since step-3" in meant.stdout
    assert (run / "tokenizer" / "tokenizer.json").read_bytes() == before
    losses = [record["loss"] for record in records(run)]
    assert len(losses) == 6
    assert (run / "export" / "tokenizer.json").read_bytes() == before
    assert json.loads(before)["model"]["vocab"]


def test_a_tokenizer_edited_in_place_is_refused(tmp_path):
    tokenizer, text = tmp_path / "tok", tmp_path / "text.txt"
    text.write_text(WORDS * 300)
    train_tokenizer([WORDS], 300).save_pretrained(tokenizer)
    options = {
        "data__source": text,
        "data__tokenizer": tokenizer,
        "train__validate_every": 0,
        "log__sample_tokens": 0,
    }
    train(tmp_path / "run", tmp_path / "cache", ALONE, train__steps=1, **options)
    train_tokenizer(["zebras and quaggas " * 9], 300).save_pretrained(tokenizer)
    refused = attempt(tmp_path / "run", tmp_path / "cache", ALONE, train__steps=2, **options)
    assert refused.returncode != 0
    assert "is not the one that" in refused.stdout + refused.stderr
    assert str(tmp_path / "run" / "tokenizer") in refused.stdout + refused.stderr
    options["data__tokenizer"] = tmp_path / "run" / "tokenizer"
    train(tmp_path / "run", tmp_path / "cache", ALONE, train__steps=2, **options)
