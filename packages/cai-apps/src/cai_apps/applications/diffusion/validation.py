"""Rules that a diffusion config must keep, checked before memory is allocated and ranks start."""

from __future__ import annotations

import torch

from cai_apps.applications.diffusion.config import Config
from cai_apps.applications.diffusion.model.denoiser import build, targets
from cai_apps.applications.diffusion.model.design import Design
from cai_apps.applications.diffusion.model.noise_process import process_of
from cai_apps.applications.diffusion.model.tensor_parallel import share_of, trains_text
from cai_apps.applications.diffusion.rules import check_design
from cai_apps.applications.diffusion.sampling.scheduler import make_scheduler, options
from cai_apps.compose.lora import check_targets, need_peft
from cai_apps.config import validation
from cai_mesh.errors import ConfigError


def resolve(config: Config, design: Design, world_size: int) -> Config:
    """The config with every open value worked out.

    Raises:
        ConfigError: a value is out of range, or parts of the design do not fit each other or the config.
        MeshError: the degrees do not multiply to `world_size`.
    """
    config = validation.resolve(config, world_size)
    check_design(config, design)
    share_of(config, design)
    make_scheduler(design, options(config))
    _check_objective(config, design)
    if config.lora.rank:
        _check_adapted(config, design)
    return config


def _check_objective(config: Config, design: Design) -> None:
    objective = config.objective
    process = process_of(
        design.scheduler, min_snr=objective.min_snr, logit_normal=objective.timesteps == "logit_normal"
    )
    says = getattr(process, "prediction", "flow")
    if says != objective.prediction:
        raise ConfigError(
            "the objective and the scheduler disagree on what the denoiser says",
            got=f'objective.prediction = "{objective.prediction}"',
            expected=f'"{says}", by the {design.scheduler["_class_name"]} of {design.name}',
            fix=f'set objective.prediction to "{says}"',
        )


def _check_adapted(config: Config, design: Design) -> None:
    need_peft()
    if config.lora.dora:
        raise ConfigError(
            "lengths of rows (DoRA) are learned of language models",
            got="lora.dora = true",
            fix="leave lora.dora out",
        )
    train_text = trains_text(config, design)
    with torch.device("meta"):
        model = build(design, train_text=train_text)
    check_targets(model, targets(design, config.lora, train_text=train_text))
