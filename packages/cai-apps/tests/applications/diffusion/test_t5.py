"""SD3 with its third text encoder, a T5: pictures and embeddings beside diffusers' pipeline, a run, what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import small_pipelines
import torch

from cai_apps import recipes
from cai_apps.applications.diffusion.model.design import load_design
from cai_apps.applications.diffusion.model.loading import Memory
from cai_apps.applications.diffusion.sampling.sampler import Sampler
from cai_apps.applications.diffusion.sampling.scheduler import Options, make_scheduler
from cai_apps.applications.diffusion.task import DIFFUSION
from cai_apps.run.train import train
from cai_mesh.errors import ConfigError

CAPTIONS = small_pipelines.CAPTIONS
OPTIONS = Options(steps=3, seed=2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return small_pipelines.save("sd3-t5", tmp_path_factory.mktemp("pipelines") / "sd3-t5")


def by_diffusers(directory: Path) -> np.ndarray:
    """float [n, side, side, 3] of the pipeline's own loop."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(directory)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = make_scheduler(load_design(str(directory)), OPTIONS)
    noise = sampler_of(directory)._noise(len(CAPTIONS), OPTIONS, 0)
    given: dict[str, Any] = {"num_inference_steps": 3, "guidance_scale": OPTIONS.guidance}
    return pipeline(CAPTIONS, height=16, width=16, latents=noise, output_type="np", **given).images


def sampler_of(directory: Path, **more: Any) -> Sampler:
    return Sampler(directory, device="cpu", dtype=torch.float32, **more)


def config_of(directory: Path, cache: Path, **more: Any) -> Any:
    changes = {
        "model.name": str(directory),
        "model.weights": "pretrained",
        "model.text_encoder": "frozen",
        "data.size": 16,
        "data.samples": 12,
        "data.cache": str(cache),
        "parallel.shard": 1,
        "train.device": "cpu",
        "train.steps": 1,
        "train.global_batch": 4,
        "train.microbatch_size": 4,
        "train.validate_every": 0,
        "optimizer.ema_decay": None,
        "sampling.prompts": [],
    }
    return DIFFUSION.resolve(recipes.load("sd3-tiny", changes | more), 1)


def test_pictures_are_those_of_diffusers(directory):
    found = sampler_of(directory).pictures(CAPTIONS, OPTIONS)
    assert np.abs(found / 255 - by_diffusers(directory)).max() < 0.6 / 255 + 1e-3
    without = shutil.copytree(directory, directory.with_name("without"))
    shutil.rmtree(without / "text_encoder_3")
    other = sampler_of(without).pictures(CAPTIONS, OPTIONS).astype(int)
    assert np.abs(other - found).max() > 1, "the T5 changes nothing"
    in_8_bits = sampler_of(directory, memory=Memory("int8", "host")).pictures(CAPTIONS, OPTIONS)
    assert in_8_bits.shape == found.shape


def test_embeddings_are_those_of_diffusers(directory, tmp_path):
    config = config_of(directory, tmp_path)
    prepared = DIFFUSION.prepare(config)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(directory)
    from cai_apps.applications.diffusion.data.sources import source_of

    text, pooled, caption = (prepared.open(name) for name in ("text", "pooled", "caption"))
    assert text.shape[1:] == (small_pipelines.LENGTH + 256, 64)
    for number, prompt in ((0, ""), (int(caption[3]), source_of(config.data).caption(3))):
        states, _, of_all, _ = pipeline.encode_prompt(
            prompt, prompt, prompt, do_classifier_free_guidance=False
        )
        torch.testing.assert_close(text[number], states[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(pooled[number], of_all[0], rtol=1e-4, atol=1e-5)


def test_a_run_exports_a_pipeline_with_all_of_it(directory, tmp_path):
    where = {"log.directory": str(tmp_path / "run")}
    export = train(DIFFUSION, config_of(directory, tmp_path / "cache", **where), label="t5").export
    found = sampler_of(export).pictures(CAPTIONS, OPTIONS)
    assert np.abs(found / 255 - by_diffusers(export)).max() < 0.6 / 255 + 1e-3


def test_what_cannot_be_is_refused(directory, tmp_path):
    with pytest.raises(ConfigError, match="T5 is not trained"):
        config_of(directory, tmp_path, **{"model.text_encoder": "trained"})
    other = shutil.copytree(directory, tmp_path / "other")
    shutil.rmtree(other / "tokenizer_3")
    with pytest.raises(ConfigError, match="T5 without its tokenizer"):
        sampler_of(other).pictures(CAPTIONS, OPTIONS)
    file = other / "text_encoder_3" / "config.json"
    file.write_text(file.read_text().replace('"d_model": 64', '"d_model": 32'))
    with pytest.raises(ConfigError, match="d_model = 32"):
        config_of(other, tmp_path)
