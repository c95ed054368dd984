"""Directories as they lie on the hub: names of tensors, variants, shards, old classes and schedulers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import small_pipelines
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel

from cai_apps.applications.diffusion.model.denoiser import build, check_shared, parts
from cai_apps.applications.diffusion.model.design import load_design
from cai_apps.applications.diffusion.model.loading import read_part, variant_of
from cai_apps.applications.diffusion.sampling.sampler import Sampler
from cai_apps.applications.diffusion.sampling.scheduler import Options, make_scheduler
from cai_apps.compose.published_names import hub_name, present_tensors
from cai_mesh.checkpoint import load_hf, save_hf
from cai_mesh.errors import CheckpointError, ConfigError

PROMPTS = ["a large red circle", "a small blue square"]
SCHEDULES = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("pipelines")
    return {name: small_pipelines.save(name, home / name) for name in ("sd", "sd3", "dit")}


def of_hub(pipeline: Path, home: Path) -> Path:
    """A pipeline whose text encoder has the names that transformers wrote before 5.6, and a buffer of theirs."""
    shutil.copytree(pipeline, home)
    file = home / "text_encoder" / "model.safetensors"
    weights = {
        f"text_model.{name.removeprefix('text_model.')}": value for name, value in load_file(file).items()
    }
    weights["text_model.embeddings.position_ids"] = torch.arange(small_pipelines.LENGTH)[None]
    save_file(weights, file, metadata={"format": "pt"})
    return home


def variant(folder: Path, stem: str, name: str, *, keep: bool) -> None:
    """Write the weights of a folder as a variant of 16 bits."""
    plain = folder / f"{stem}.safetensors"
    halves = {n: v.half() if v.is_floating_point() else v for n, v in load_file(plain).items()}
    save_file(halves, folder / f"{stem}.{name}.safetensors", metadata={"format": "pt"})
    if not keep:
        plain.unlink()


def sharded(folder: Path, stem: str, name: str | None = None) -> None:
    """Cut the weights of a folder into two files and an index, of a variant where there is a name."""
    dot = "" if name is None else f".{name}"
    weights = load_file(folder / f"{stem}{dot}.safetensors")
    (folder / f"{stem}{dot}.safetensors").unlink()
    where = {}
    for number, names in enumerate((sorted(weights)[::2], sorted(weights)[1::2]), 1):
        file = f"{stem}{dot}-{number:05d}-of-00002.safetensors"
        save_file({n: weights[n] for n in names}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    (folder / f"{stem}.safetensors.index{dot}.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )


LAYOUTS: dict[str, Callable[[Path, str], None]] = {
    "plain": lambda folder, stem: None,
    "plain and fp16": lambda folder, stem: variant(folder, stem, "fp16", keep=True),
    "fp16": lambda folder, stem: variant(folder, stem, "fp16", keep=False),
    "shards": sharded,
    "shards of fp16": lambda folder, stem: (
        variant(folder, stem, "fp16", keep=False), sharded(folder, stem, "fp16"),
    )[1],
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("part", ["text_encoder", "unet"])
def test_training_reads_what_from_pretrained_reads(pipelines, tmp_path, layout, part):
    home = of_hub(pipelines["sd"], tmp_path / "hub")
    kind: Any = CLIPTextModel if part == "text_encoder" else diffusers.UNet2DConditionModel
    LAYOUTS[layout](home / part, "model" if part == "text_encoder" else "diffusion_pytorch_model")
    expected = kind.from_pretrained(home / part, variant=variant_of(home / part))
    with torch.device("meta"):
        model = (
            type(expected)(expected.config) if part == "text_encoder" else kind.from_config(expected.config)
        )
    model.to_empty(device="cpu")
    load_hf(model, home / part, tensors=partial(present_tensors, model))
    values = dict(model.named_parameters())
    for name, value in expected.named_parameters():
        assert torch.equal(values[name].float(), value.float()), name


def test_the_text_encoder_of_a_whole_model(pipelines, tmp_path):
    home = of_hub(pipelines["sd"], tmp_path / "hub")
    design = load_design(str(home))
    model = build(design, train_text=True)
    for within, folder in parts(design, train_text=True).items():
        tensors = partial(present_tensors, model.get_submodule(within.removesuffix(".")))
        load_hf(model, home / folder, within=within, tensors=tensors)
    text = CLIPTextModel.from_pretrained(home / "text_encoder")
    for value, expected in zip(model.texts["0"].parameters(), text.parameters(), strict=True):
        assert torch.equal(value, expected)


def test_old_attention_of_a_unet(tmp_path):
    """`query`, `key`, `value` and `proj_attn`, as diffusers called them before 0.15."""
    unet = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(32, 64), norm_num_groups=8, layers_per_block=1, attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    unet.save_pretrained(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    old = {}
    for name, value in load_file(file).items():
        for now, then in (("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn")):
            name = name.replace(f".{now}.", f".{then}.")
        old[name] = value
    save_file(old, file, metadata={"format": "pt"})
    again = diffusers.UNet2DModel.from_config(unet.config)
    load_hf(again, tmp_path, tensors=partial(present_tensors, again))
    for value, expected in zip(again.parameters(), unet.parameters(), strict=True):
        assert torch.equal(value, expected)


def test_files_are_written_by_the_names_of_the_hub(pipelines, tmp_path):
    text = CLIPTextModel.from_pretrained(of_hub(pipelines["sd"], tmp_path / "hub") / "text_encoder")
    save_hf(text, tmp_path / "out", names=partial(hub_name, text))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(name.startswith("text_model.") for name in written)
    again = CLIPTextModel.from_pretrained(tmp_path / "out")
    assert all(map(torch.equal, again.parameters(), text.parameters()))


def test_weights_of_another_text_encoder_are_not_filled_with_random_numbers(pipelines, tmp_path):
    home = of_hub(pipelines["sd"], tmp_path / "hub") / "text_encoder"
    weights = load_file(home / "model.safetensors")
    del weights["text_model.final_layer_norm.bias"]
    save_file(weights, home / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="lacks 1 tensors of a CLIPTextModel"):
        read_part(CLIPTextModel, home, torch.float32)


def test_several_variants_and_none_plain(pipelines, tmp_path):
    folder = shutil.copytree(pipelines["sd"] / "unet", tmp_path / "unet")
    variant(folder, "diffusion_pytorch_model", "bf16", keep=True)
    variant(folder, "diffusion_pytorch_model", "fp16", keep=False)
    with pytest.raises(CheckpointError, match="several variants"):
        load_hf(torch.nn.Linear(1, 1), folder)
    with pytest.raises(ConfigError, match="several variants"):
        variant_of(folder)


def test_embeddings_of_a_dit_are_compared_within_a_variant(pipelines, tmp_path):
    folder = shutil.copytree(pipelines["dit"] / "transformer", tmp_path / "transformer")
    weights = load_file(folder / "diffusion_pytorch_model.safetensors")
    first = "transformer_blocks.0.norm1.emb."
    for name in weights:
        if ".norm1.emb." in name:
            weights[name] = weights[first + name.partition(".norm1.emb.")[2]].clone()
    save_file(weights, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    variant(folder, "diffusion_pytorch_model", "fp16", keep=True)
    check_shared(folder)


def test_the_published_class_of_a_dit(pipelines, tmp_path):
    home = shutil.copytree(pipelines["dit"], tmp_path / "dit")
    file = home / "transformer" / "config.json"
    config = json.loads(file.read_text()) | {
        "_class_name": "Transformer2DModel",
        "norm_type": "ada_norm_zero",
    }
    file.write_text(json.dumps(config))
    assert load_design(str(home)).family.name == "DiT"
    options = Options(steps=2)
    pictures = [
        Sampler(d, device="cpu", dtype=torch.float32).pictures(["3"], options)
        for d in (home, pipelines["dit"])
    ]
    np.testing.assert_array_equal(*pictures)


# -- schedulers -------------------------------------------------------------------------------------------------------

OWN = {
    "PNDM of SD 1.5": {
        "_class_name": "PNDMScheduler", "skip_prk_steps": True, "set_alpha_to_one": False, "steps_offset": 1,
        "clip_sample": False, "trained_betas": None,
    },
    "DDIM of SD 2.1": {
        "_class_name": "DDIMScheduler", "prediction_type": "v_prediction", "set_alpha_to_one": False,
        "skip_prk_steps": True, "steps_offset": 1, "clip_sample": False,
    },
    "zero terminal SNR": {
        "_class_name": "DDIMScheduler", "prediction_type": "v_prediction", "rescale_betas_zero_snr": True,
        "timestep_spacing": "trailing", "set_alpha_to_one": True, "steps_offset": 1, "clip_sample": False,
    },
    "Euler of SD Turbo": {
        "_class_name": "EulerDiscreteScheduler", "timestep_spacing": "trailing", "steps_offset": 1,
        "clip_sample": False, "set_alpha_to_one": False, "interpolation_type": "linear",
    },
    "an old file": {"_class_name": "DDIMScheduler"},
    "linspace": {"_class_name": "DDIMScheduler", "timestep_spacing": "linspace", "clip_sample": False},
}  # fmt: skip
"""Configs of published models (stable-diffusion-v1-5, stable-diffusion-2-1, sd-turbo), and of those that were tuned."""


def with_scheduler(pipeline: Path, home: Path, own: dict[str, Any]) -> Path:
    shutil.copytree(pipeline, home)
    (home / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULES | own))
    return home


@pytest.mark.parametrize("name", ["ddim", "dpm"])
@pytest.mark.parametrize("own", OWN)
def test_pictures_are_those_of_the_pipeline_that_from_pretrained_opens(pipelines, tmp_path, own, name):
    home = with_scheduler(pipelines["sd"], tmp_path / "sd", OWN[own])
    kinds = {"ddim": diffusers.DDIMScheduler, "dpm": diffusers.DPMSolverMultistepScheduler}
    options = Options(steps=5, guidance=3.0, scheduler=name, seed=2)
    sampler = Sampler(home, device="cpu", dtype=torch.float32)
    noise = sampler._noise(len(PROMPTS), options, 0)
    given: dict[str, Any] = {}
    if OWN[own]["_class_name"] != kinds[name].__name__:
        given["scheduler"] = kinds[name].from_pretrained(home, subfolder="scheduler")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(home, safety_checker=None, **given)
    pipeline.set_progress_bar_config(disable=True)
    steps = {"num_inference_steps": 5, "guidance_scale": 3.0, "latents": noise, "output_type": "np"}
    expected = pipeline(PROMPTS, **steps).images
    assert np.abs(sampler.pictures(PROMPTS, options) / 255 - expected).max() < 0.6 / 255 + 1e-3


@pytest.mark.parametrize("own", ["an old file", "linspace", "Euler of SD Turbo"])
def test_a_dit_keeps_its_own_offset(pipelines, tmp_path, own):
    home = with_scheduler(pipelines["dit"], tmp_path / "dit", OWN[own])
    expected = diffusers.DDIMScheduler.from_pretrained(home, subfolder="scheduler")
    expected.set_timesteps(7)
    scheduler = make_scheduler(load_design(str(home)), Options(steps=7, scheduler="ddim"))
    assert scheduler.timesteps.tolist() == expected.timesteps.tolist()
    assert scheduler.config.clip_sample == expected.config.clip_sample
