"""What a run of a diffusion model learns from is identified by content; a run that goes on keeps what numbers mean."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import small_pipelines
import torch
from PIL import Image

from cai_apps import recipes
from cai_apps.applications.diffusion.data.cache import Prepared
from cai_apps.applications.diffusion.data.samples import Images
from cai_apps.applications.diffusion.model.captions import train_tokenizer
from cai_apps.applications.diffusion.sampling.labels import label_names
from cai_apps.applications.diffusion.task import DIFFUSION
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.files.origin import check
from cai_apps.run.train import train
from cai_mesh.errors import CheckpointError, DataError


def images(home: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (40 * number, 90, 0)).save(home / name)
    return home


def prepared(
    cache: Path, source: Path, model: str | None = None, before: Path | None = None, **more
) -> Prepared:
    changes = {
        "data.cache": str(cache),
        "data.source": str(source),
        "train.device": "cpu",
        "train.global_batch": 2,
        "train.microbatch_size": 1,
        "sampling.prompts": [],
        "parallel.shard": 1,
        **({} if model is None else {"model.name": model, "model.weights": "pretrained"}),
        **more,
    }
    recipe = "dit-tiny" if model is None else "sd-v1-tiny"
    config = DIFFUSION.resolve(recipes.load(recipe, {"data.caption": "a thing", **changes}), 1)
    return DIFFUSION.prepare(config, None if before is None else RunDirectory(before))


DIT = {"data.size": 16}
PIPELINE = {"data.size": 16, "model.text_encoder": "frozen", "data.latents": "cached"}


def kept(made: Prepared, run: Path) -> Path:
    """A run's directory with what it keeps."""
    run.mkdir(exist_ok=True)
    (run / "labels.txt").write_text("\n".join(made.labels))
    return run


def test_classes_keep_their_numbers_when_one_is_added(tmp_path):
    home = images(tmp_path / "pets", "cat/1.png", "dog/1.png")
    first = prepared(tmp_path / "cache", home, **DIT)
    assert first.labels == ("cat", "dog") and first.open("label").tolist() == [0, 1]
    images(home, "bird/1.png")
    anew = prepared(tmp_path / "cache", home, **DIT)
    assert anew.labels == ("bird", "cat", "dog")
    going_on = prepared(tmp_path / "cache", home, before=kept(first, tmp_path / "run"), **DIT)
    assert going_on.labels == ("cat", "dog", "bird") and going_on.open("label").tolist() == [2, 0, 1]
    assert going_on.directory != anew.directory


def test_a_class_that_is_gone_keeps_its_number(tmp_path):
    home = images(tmp_path / "pets", "cat/1.png", "dog/1.png", "eel/1.png")
    run = kept(prepared(tmp_path / "cache", home, **DIT), tmp_path / "run")
    shutil.rmtree(home / "cat")
    going_on = prepared(tmp_path / "cache", home, before=run, **DIT)
    assert going_on.labels == ("cat", "dog", "eel") and going_on.open("label").tolist() == [1, 2]


def test_a_checkpoint_of_other_classes_is_refused(tmp_path):
    home = images(tmp_path / "pets", "cat/1.png", "dog/1.png")
    first = DIFFUSION.origin(prepared(tmp_path / "cache", home, **DIT))
    images(home, "bird/1.png")
    second = DIFFUSION.origin(prepared(tmp_path / "cache", home, **DIT))
    with pytest.raises(CheckpointError, match="another name of class 0"):
        check(second, {"origin": first.value()}, tmp_path, new_data=True)


def test_no_class_is_the_number_that_sampling_gives_it(tmp_path):
    home = images(tmp_path / "pets", "cat/1.png", "dog/1.png")
    made = prepared(tmp_path / "cache", home, **DIT)
    label = Images(made, 0, 2, 1.0, 0).rows(np.arange(2), np.arange(2))["label"]
    assert label.tolist() == [10, 10], "num_embeds_ada_norm, not the number of the data's classes"


def test_more_classes_than_the_denoiser_knows_are_refused(tmp_path):
    home = images(tmp_path / "pets", *(f"class {number:02d}/1.png" for number in range(11)))
    with pytest.raises(DataError, match="more classes than the DiT knows"):
        prepared(tmp_path / "cache", home, **DIT)


def test_names_of_classes_come_back_as_they_were_written(tmp_path):
    home = images(tmp_path / "pets", "a\u2028b/1.png", "c\x0bd/1.png")
    made = prepared(tmp_path / "cache", home, **DIT)
    assert tuple(label_names(kept(made, tmp_path / "run"))) == made.labels


def test_a_run_that_goes_on_keeps_its_trained_tokenizer(tmp_path):
    home, directory = images(tmp_path / "images", "1.png", "2.png", "3.png"), tmp_path / "run"
    changes = {
        "train.steps": 1, "train.global_batch": 2, "train.microbatch_size": 1, "train.device": "cpu",
        "data.cache": str(tmp_path / "cache"), "train.validate_every": 0,
        "parallel.shard": 1, "log.directory": str(directory), "data.source": str(home), "data.caption": "red green",
        "sampling.prompts": [], "data.validation_fraction": 0.0,
    }  # fmt: skip
    config = recipes.load("sd-v1-tiny", changes)
    train(DIFFUSION, config, label="tokens")
    tokenizer = (directory / "tokenizer" / "tokenizer.json").read_bytes()
    for number in (1, 2, 3):
        (home / f"{number}.txt").write_text(f"violet umbrellas number {number}")
    train(DIFFUSION, replace(config, train=replace(config.train, steps=2)), label="tokens")
    assert (directory / "tokenizer" / "tokenizer.json").read_bytes() == tokenizer
    assert (directory / "export" / "tokenizer" / "tokenizer.json").read_bytes() == tokenizer


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Path:
    return small_pipelines.save("sd", tmp_path_factory.mktemp("pipeline"))


def same_times(file: Path, content: bytes) -> None:
    """Write a file so that its size and its time of modification are what they were."""
    status = file.stat()
    assert len(content) == status.st_size
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    "part", ["vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"]
)
def test_weights_of_equal_size_and_time_are_others(tmp_path, pipeline, part):
    home, model = images(tmp_path / "images", "1.png", "2.png"), tmp_path / "model"
    shutil.copytree(pipeline, model)
    first = prepared(tmp_path / "cache", home, str(model), **PIPELINE).directory
    content = bytearray((model / part).read_bytes())
    content[-2] ^= 0x40
    same_times(model / part, bytes(content))
    assert prepared(tmp_path / "cache", home, str(model), **PIPELINE).directory != first


def test_weights_that_were_copied_are_the_same(tmp_path, pipeline):
    home = images(tmp_path / "images", "1.png", "2.png")
    made = [
        prepared(
            tmp_path / "cache", home, str(shutil.copytree(pipeline, tmp_path / name)), **PIPELINE
        ).directory
        for name in ("one", "two")
    ]
    assert made[0] == made[1]


def test_the_tokenizer_of_a_pipeline_decides(tmp_path, pipeline):
    home, model = images(tmp_path / "images", "1.png", "2.png"), tmp_path / "model"
    shutil.copytree(pipeline, model)
    first = prepared(tmp_path / "cache", home, str(model), **PIPELINE)
    other = train_tokenizer(["a thing of quite other words"], 120)
    other.save_pretrained(model / "tokenizer")
    second = prepared(tmp_path / "cache", home, str(model), **PIPELINE)
    assert second.directory != first.directory
    assert not torch.equal(first.open("text"), second.open("text"))
    with pytest.raises(CheckpointError, match="another tokenizer"):
        check(DIFFUSION.origin(second), {"origin": DIFFUSION.origin(first).value()}, tmp_path, new_data=True)


def test_the_tokenizers_padding_decides(tmp_path, pipeline):
    home, model = images(tmp_path / "images", "1.png", "2.png"), tmp_path / "model"
    shutil.copytree(pipeline, model)
    first = prepared(tmp_path / "cache", home, str(model), **PIPELINE)
    config = (model / "tokenizer" / "tokenizer_config.json").read_text()
    padded = config.replace('"pad_token": "<|endoftext|>"', '"pad_token": "<|startoftext|>"')
    assert padded != config, "as SD 2 pads with another token than the end"
    (model / "tokenizer" / "tokenizer_config.json").write_text(padded)
    assert prepared(tmp_path / "cache", home, str(model), **PIPELINE).directory != first.directory


def test_images_that_were_moved_and_renamed_are_the_same(tmp_path, pipeline):
    home = images(tmp_path / "one", "a.png", "b.png")
    first = prepared(tmp_path / "cache", home, str(pipeline), **PIPELINE)
    (tmp_path / "two").mkdir()
    for old, new in (("a", "first"), ("b", "second")):
        shutil.move(home / f"{old}.png", tmp_path / "two" / f"{new}.png")
    second = prepared(tmp_path / "cache", tmp_path / "two", str(pipeline), **PIPELINE)
    assert second.directory == first.directory and DIFFUSION.origin(first) == DIFFUSION.origin(second)


def test_images_of_equal_names_in_several_directories_all_count(tmp_path, pipeline):
    home = images(tmp_path / "images", "a/x/1.png", "b/x/1.png")
    first = prepared(tmp_path / "cache", home, str(pipeline), **PIPELINE)
    Image.new("RGB", (32, 32), (9, 9, 9)).save(home / "a/x/1.png")
    assert prepared(tmp_path / "cache", home, str(pipeline), **PIPELINE).directory != first.directory
