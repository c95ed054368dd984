"""Pictures beside those of diffusers' own pipelines, from one start; and what `cai generate` refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import diffusers.pipelines.dit.pipeline_dit as dit_pipeline
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from cai_apps import recipes
from cai_apps.applications.diffusion.model.design import load_design
from cai_apps.applications.diffusion.sampling.sampler import Sampler, grid
from cai_apps.applications.diffusion.sampling.scheduler import Options, make_scheduler
from cai_apps.applications.diffusion.task import DIFFUSION
from cai_apps.cli import main
from cai_apps.run.train import train
from cai_mesh.errors import ConfigError

CAPTIONS = ["the digit three", "the digit seven", ""]
PROMPTS = {"sd-v2-tiny": CAPTIONS, "sd3-tiny": CAPTIONS, "dit-tiny": ["three", "7", "nine"]}
AUTOENCODER = {
    "block_out_channels": [16, 32],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "latent_channels": 4,
    "norm_num_groups": 8,
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, Path]:
    """An export of each recipe, after two steps whose rate is high, so that no layer is zero."""
    home = tmp_path_factory.mktemp("exports")
    found = {}
    for recipe in PROMPTS:
        changes = {
            "train.steps": 2,
            "train.device": "cpu",
            "optimizer.lr": 0.05,
            "optimizer.ema_decay": None if recipe == "sd3-tiny" else 0.5,
            "parallel.shard": 1,
            "parallel.zero": 0,
            "data.cache": str(home / "cache"),
            "data.samples": 40,
            "train.validate_every": 0,
            "sampling.prompts": [],
            "log.directory": str(home / recipe),
        }
        found[recipe] = train(DIFFUSION, recipes.load(recipe, changes), label=recipe).export
    return found


@pytest.fixture(scope="module")
def pipelines(exported, tmp_path_factory) -> dict[str, Path]:
    """An export, and two pipelines that diffusers made and saved by itself."""
    home = tmp_path_factory.mktemp("pipelines")
    torch.manual_seed(0)
    small = {
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "sample_size": 8,
        "in_channels": 4,
    }
    autoencoder = diffusers.AutoencoderKL(**AUTOENCODER)
    dit = diffusers.DiTTransformer2DModel(
        **small, out_channels=8, num_embeds_ada_norm=1000, norm_num_groups=8
    )
    diffusers.DiTPipeline(dit, autoencoder, diffusers.DDIMScheduler(clip_sample=False)).save_pretrained(
        home / "dit"
    )
    texts = [text_encoder() for _ in range(2)]
    tokenizer = CLIPTokenizer.from_pretrained(exported["sd3-tiny"] / "tokenizer")
    tokenizer.model_max_length = 12
    sd3 = diffusers.SD3Transformer2DModel(
        **small,
        joint_attention_dim=64,
        out_channels=4,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        pos_embed_max_size=16,
    )
    diffusers.StableDiffusion3Pipeline(
        transformer=sd3,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=diffusers.AutoencoderKL(**AUTOENCODER, shift_factor=0.1),
        text_encoder=texts[0],
        tokenizer=tokenizer,
        text_encoder_2=texts[1],
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    ).save_pretrained(home / "sd3")
    return {"sd2": exported["sd-v2-tiny"], "dit": home / "dit", "sd3": home / "sd3"}


def text_encoder() -> CLIPTextModelWithProjection:
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = CLIPTextConfig(**shape, **ids, projection_dim=16, max_position_embeddings=12, vocab_size=1000)
    return CLIPTextModelWithProjection(config)


def sampler_of(directory: Path, **more: Any) -> Sampler:
    return Sampler(directory, device="cpu", dtype=torch.float32, **more)


def by_diffusers(directory: Path, prompts: list[str], options: Options, noise: torch.Tensor) -> np.ndarray:
    """float [n, side, side, 3] of the pipeline's own loop, with the scheduler that the sampler has."""
    third: dict[str, Any] = {"text_encoder_3": None, "tokenizer_3": None} if directory.name == "sd3" else {}
    pipeline = diffusers.DiffusionPipeline.from_pretrained(directory, **third)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = make_scheduler(load_design(str(directory)), options)
    given: dict[str, Any] = {"num_inference_steps": options.steps, "guidance_scale": options.guidance}
    if isinstance(pipeline, diffusers.DiTPipeline):
        return pipeline(class_labels=[int(p) for p in prompts], output_type="np", **given).images
    return pipeline(prompts, latents=noise, output_type="np", **given).images


@pytest.mark.parametrize(
    ("name", "scheduler", "guidance"),
    [
        ("sd2", "ddim", 4.0),
        ("sd2", "dpm", 4.0),
        ("sd2", "dpm", 1.0),
        ("dit", "dpm", 4.0),
        ("dit", "ddim", 2.0),
        ("sd3", "flow", 4.0),
        ("sd3", "flow", 1.0),
    ],
)
def test_pictures_are_those_of_diffusers(pipelines, name, scheduler, guidance, monkeypatch):
    prompts = ["3", "700", "999"] if name == "dit" else CAPTIONS
    options = Options(steps=5, guidance=guidance, scheduler=scheduler, seed=3)
    sampler = sampler_of(pipelines[name])
    found = sampler.pictures(prompts, options)
    noise = sampler._noise(len(prompts), options, 0)
    monkeypatch.setattr(dit_pipeline, "randn_tensor", lambda *_, **__: noise)  # it takes no latents
    expected = by_diffusers(pipelines[name], prompts, options, noise)
    assert np.abs(found / 255 - expected).max() < 0.6 / 255 + 1e-3
    assert found.std() > 1, "pictures, not one colour"


@pytest.mark.parametrize("recipe", list(PROMPTS))
def test_a_picture_is_the_same_whatever_is_drawn_with_it(exported, recipe):
    sampler, options = sampler_of(exported[recipe]), Options(steps=3, seed=1)
    together = sampler.pictures(PROMPTS[recipe], options).astype(int)
    in_parts = sampler.in_batches(PROMPTS[recipe], options, batch=2).astype(int)
    assert np.abs(together - in_parts).max() <= 1
    alone = sampler.pictures(PROMPTS[recipe][2:], options, first=2).astype(int)
    assert np.abs(alone[0] - together[2]).max() <= 1
    other = sampler.pictures(PROMPTS[recipe], Options(steps=3, seed=2)).astype(int)
    assert np.abs(other - together).max() > 1


def test_averaged_and_last_weights_draw_otherwise(exported):
    options = Options(steps=3)
    found = [
        sampler_of(exported["sd-v2-tiny"], raw=raw).latents(["the digit one"], options) for raw in (0, 1)
    ]
    assert not torch.allclose(*found)
    with pytest.raises(ConfigError, match="no weights at"):
        sampler_of(exported["sd3-tiny"], raw=True)


def test_a_directory_that_diffusers_saved_and_another_size(exported, tmp_path):
    diffusers.DiffusionPipeline.from_pretrained(exported["sd-v2-tiny"]).save_pretrained(tmp_path / "saved")
    options = Options(steps=3)
    found = [
        sampler_of(d).pictures(CAPTIONS[:1], options) for d in (tmp_path / "saved", exported["sd-v2-tiny"])
    ]
    np.testing.assert_array_equal(*found)
    assert sampler_of(tmp_path / "saved").pictures(CAPTIONS[:1], Options(size=64, steps=2)).shape == (
        1,
        64,
        64,
        3,
    )


def test_a_velocity_with_nothing_left_at_the_last_step(exported, tmp_path):
    directory = tmp_path / "zero"
    shutil.copytree(exported["sd-v2-tiny"], directory)
    file = directory / "scheduler" / "scheduler_config.json"
    told = json.loads(file.read_text()) | {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    file.write_text(json.dumps(told | {"_class_name": "DDIMScheduler"}))
    for scheduler in ("ddim", "dpm"):
        latents = sampler_of(directory).latents(CAPTIONS[:1], Options(steps=4, scheduler=scheduler))
        assert latents.isfinite().all()


def changed(directory: Path, to: Path, file: str, **keys: Any) -> Path:
    shutil.copytree(directory, to)
    told = json.loads((to / file).read_text()) | keys
    (to / file).write_text(json.dumps(told))
    return to


@pytest.mark.parametrize(
    ("recipe", "file", "keys", "words"),
    [
        (
            "sd-v2-tiny",
            "unet/config.json",
            {"addition_embed_type": "text_time"},
            "conditions that are not known",
        ),
        ("sd-v2-tiny", "unet/config.json", {"num_class_embeds": 10}, "conditions that are not known"),
        ("sd-v2-tiny", "unet/config.json", {"in_channels": 9}, "other channels than it takes"),
        ("sd-v2-tiny", "unet/config.json", {"_class_name": "UNet3DConditionModel"}, "unknown kind"),
        (
            "sd3-tiny",
            "scheduler/scheduler_config.json",
            {"use_dynamic_shifting": True},
            "depends on the size",
        ),
        ("sd-v2-tiny", "scheduler/scheduler_config.json", {"_class_name": "Nothing"}, "does not know"),
    ],
)
def test_a_pipeline_that_is_not_known_is_refused(exported, tmp_path, recipe, file, keys, words):
    directory = changed(exported[recipe], tmp_path / "changed", file, **keys)
    with pytest.raises(ConfigError, match=words):
        sampler_of(directory).latents(CAPTIONS[:1], Options(steps=1))


@pytest.mark.parametrize(
    ("recipe", "arguments", "words"),
    [
        ("sd-v2-tiny", [], "no prompt"),
        ("sd-v2-tiny", ["--prompt", "a", "--scheduler", "flow"], "is not for a UNet"),
        ("sd3-tiny", ["--prompt", "a", "--scheduler", "ddim"], "is not for a SD3"),
        ("sd-v2-tiny", ["--prompt", "a", "--size", "33"], "do not divide"),
        ("dit-tiny", ["--prompt", "thre"], "no label 'thre'"),
        ("dit-tiny", ["--prompt", "11"], "no label '11'"),
        ("sd3-tiny", ["--prompt", "a", "--raw"], "no weights at"),
        ("sd3-tiny", ["--prompt", "a", "--patches", "exact"], "in one process"),
        ("sd3-tiny", ["--prompt", "a", "--steps", "0"], "steps"),
        ("sd3-tiny", ["--prompt", "a", "--images", "0"], "images"),
        ("sd3-tiny", ["--prompt", "a", "--batch", "0"], "batch"),
    ],
)
def test_cai_generate_says_what_is_wrong(exported, capsys, recipe, arguments, words):
    assert main(["generate", str(exported[recipe].parent), *arguments]) == 2
    told = capsys.readouterr().err
    assert words in told and "Traceback" not in told


def test_cai_generate_without_an_export(exported, capsys, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(exported["dit-tiny"].parent / "config.toml", run)
    assert main(["generate", str(run), "--prompt", "three"]) == 2
    told = capsys.readouterr().err
    assert "no export" in told and "Traceback" not in told


def test_cai_generate_writes_a_row_a_prompt(exported, tmp_path, capsys):
    output = tmp_path / "pictures.png"
    arguments = ["--prompt", "three", "four", "--images", "3", "--steps", "2", "--output", str(output)]
    assert main(["generate", str(exported["dit-tiny"].parent), *arguments]) == 0
    side = (
        load_design(str(exported["dit-tiny"])).denoiser["sample_size"]
        * load_design(str(exported["dit-tiny"])).factor
    )
    assert Image.open(output).size == (3 * (side + 2) - 2, 2 * (side + 2) - 2)


def test_several_processes_draw_what_one_does(exported, tmp_path):
    arguments = [
        str(exported["sd-v2-tiny"].parent),
        "--prompt",
        "the digit one",
        "--images",
        "2",
        "--steps",
        "3",
    ]
    assert main(["generate", *arguments, "--output", str(tmp_path / "alone.png")]) == 0
    together = ["--output", str(tmp_path / "together.png"), "--patches", "exact"]
    launcher = [
        sys.executable,
        "-m",
        "cai_apps",
        "run",
        "--nproc-per-node",
        "2",
        "-m",
        "cai_apps",
        "generate",
    ]
    subprocess.run([*launcher, *arguments, *together], check=True)
    alone, strips = (np.asarray(Image.open(tmp_path / f"{n}.png")).astype(int) for n in ("alone", "together"))
    assert np.abs(alone - strips).max() <= 1


def test_a_grid_with_a_row_that_is_not_full():
    pictures = np.arange(3, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 5, 3), dtype=np.uint8)
    found = grid(pictures, 2)
    assert found.shape == (4 + 2 + 4, 5 + 2 + 5, 3)
    assert (found[:4, 7:] == 1).all() and (found[6:, :5] == 2).all() and (found[6:, 7:] == 255).all()
