"""What cannot be is said before anything is read, allocated or started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cai_apps import applications, recipes
from cai_apps.applications import diffusion
from cai_apps.applications.diffusion.model.design import load_design
from cai_apps.applications.diffusion.task import DIFFUSION
from cai_apps.cli import main
from cai_apps.config.validation import ranks_of
from cai_mesh.errors import CaiError, ConfigError


def resolved(recipe: str, **changes: Any) -> Any:
    config = recipes.load(recipe, {"parallel.shard": 1, **changes})
    return DIFFUSION.resolve(config, ranks_of(config))


@pytest.mark.parametrize(
    ("recipe", "changes", "words"),
    [
        (
            "sd-v1-tiny",
            {"data.size": 33},
            r"do not divide.*data\.size = 33.*multiple of 4.*set data\.size to 32",
        ),
        ("sd-v1", {"data.size": 500}, r"do not divide.*multiple of 64.*set data\.size to 512"),
        ("sd3", {"data.size": 520}, r"do not divide.*multiple of 16"),
        ("dit-tiny", {"data.size": 32}, r"positions for one size.*latents of 16"),
        ("sd-v1-tiny", {"objective.prediction": "v"}, 'the objective and the scheduler disagree.*"epsilon"'),
        ("sd-v2-tiny", {"objective.prediction": "epsilon"}, 'disagree.*set objective.prediction to "v"'),
        ("sd3-tiny", {"objective.prediction": "epsilon"}, 'disagree.*"flow"'),
        ("sd3-tiny", {"objective.min_snr": 5.0}, "does nothing for a flow"),
        ("sd-v1-tiny", {"objective.min_snr": -1.0}, r"min_snr is too small.*above 0"),
        ("sd-v1-tiny", {"objective.timesteps": "logit_normal"}, "is for flows"),
        ("sd-v1-tiny", {"objective.condition_dropout": 1.0}, "dropout is too large.*below 1"),
        ("sd-v1-tiny", {"objective.condition_dropout": -0.1}, "condition_dropout"),
        ("sd-v1-tiny", {"data.validation_fraction": 1.0}, "fraction is too large.*below 1"),
        ("sd-v1-tiny", {"sampling.steps": 0}, "sampling.steps"),
        ("sd-v1-tiny", {"sampling.scheduler": "flow"}, "is not for a UNet"),
        ("sd3-tiny", {"sampling.scheduler": "dpm"}, "is not for a SD3"),
        ("sd-v1-tiny", {"model.weights": "pretrained"}, "is only a shape"),
        ("sd-v1-tiny", {"model.name": "sd-v1-tny"}, "no model 'sd-v1-tny'.*sd-v1-tiny"),
        ("sd-v1-tiny", {"optimizer.ema_decay": 1.5}, "ema_decay"),
        ("sd-v1-tiny", {"parallel.pipeline.size": 2}, r"tensor parallelism.*pipeline\.size = 2"),
        ("dit-tiny", {"parallel.tensor.size": 2, "parallel.tensor.sequence": True}, "sequence = True"),
        (
            "sd3-tiny",
            {"parallel.tensor.size": 4, "parallel.tensor.mode": "2d"},
            'mode = "2d".*leave both out',
        ),
    ],
)
def test_a_config_that_cannot_be(recipe, changes, words):
    with pytest.raises(CaiError, match=f"(?s){words}"):
        resolved(recipe, **changes)


def pipeline(directory: Path, **changes: dict[str, Any]) -> Path:
    """The directory of a pipeline with the configs of sd-v2-tiny, and no weights."""
    design = load_design("sd-v2-tiny")
    parts = {
        "unet/config.json": design.denoiser,
        "scheduler/scheduler_config.json": design.scheduler,
        "vae/config.json": design.autoencoder,
        "text_encoder/config.json": design.texts[0],
    }
    for name, config in parts.items():
        if changes.get(name, {}) is None:
            continue
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**(config or {}), **changes.get(name, {})}))
    return directory


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"unet/config.json": None}, r"no denoiser in .*unet or transformer"),
        ({"scheduler/scheduler_config.json": None}, "no scheduler in"),
        ({"unet/config.json": {"cross_attention_dim": 48}}, r"text embeddings.*cross_attention_dim = 48"),
        ({"text_encoder/config.json": {"hidden_size": 64}}, r"text embeddings are not.*64 wide"),
        ({"text_encoder/config.json": None}, "has no text encoder"),
        ({"vae/config.json": {"latent_channels": 8}}, r"other latents.*8 channels"),
        (
            {"text_encoder/config.json": {"architectures": ["T5EncoderModel"]}},
            "text encoder of an unknown kind",
        ),
        ({"unet/config.json": {"_class_name": "FluxTransformer2DModel"}}, "denoiser of an unknown kind"),
        ({"scheduler/scheduler_config.json": {"prediction_type": "sample"}}, "disagree"),
    ],
)
def test_a_directory_whose_parts_do_not_fit(tmp_path, changes, words):
    directory = pipeline(tmp_path / "pipeline", **changes)
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        resolved("sd-v2-tiny", **{"model.name": str(directory)})


def test_the_directory_of_those_errors_is_good_without_them(tmp_path):
    directory = pipeline(tmp_path / "pipeline")
    assert resolved("sd-v2-tiny", **{"model.name": str(directory)}).model.name == str(directory)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(diffusion, "_there", lambda module: module != "diffusers")
    config = recipes.load("sd-v1-tiny")
    with pytest.raises(ConfigError, match=r"(?s)need diffusers.*pip install 'cai-apps\[diffusion\]'"):
        applications.of(config).train(config, "run", frozenset())


@pytest.mark.parametrize("command", [["train"], ["plan"]])
def test_the_commands_tell_it_without_a_traceback(capsys, command):
    assert main([*command, "sd-v1-tiny", "--data.size", "33"]) == 2
    told = capsys.readouterr().err
    assert "do not divide" in told and "fix:" in told and "Traceback" not in told
