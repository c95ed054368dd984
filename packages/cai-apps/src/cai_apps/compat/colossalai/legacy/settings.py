"""The config file of ColossalAI's first generation, in cai's sections: mapped, or refused with the line to write."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from cai_apps.booster import BoostConfig, ConfigPlugin
from cai_apps.booster.config import Scaling
from cai_apps.booster.meanings import clipping
from cai_apps.config.sections import Context, Memory, Parallel, Pipeline, Precision, Tensor
from cai_mesh.errors import ConfigError, did_you_mean

MODES = ("1d", "2d", "2.5d", "3d", "sequence")
READ = ("clip_grad_norm", "fp16", "gradient_accumulation", "parallel", "zero")
"""Keys of a file that say how a model is trained; others are the script's own."""


class Settings(dict[str, Any]):
    """What a config file says, by keys and by attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the config has no {name}: {did_you_mean(name, self)}")


def read_settings(config: Any) -> Settings:
    """Return what a config file, or a dict, says. A file is a script of the user's own, which is run.

    Args:
        config: a path of a Python file, a dict, or None.

    Raises:
        ConfigError: there is no such file, or a key is nearly one that says how a model is trained.
    """
    if config is None:
        return Settings()
    if not isinstance(config, Mapping):
        file = Path(config)
        if file.suffix != ".py" or not file.is_file():
            raise ConfigError(
                "there is no such config file", got=str(config), expected="a Python file, or a dict"
            )
        config = {
            name: value for name, value in runpy.run_path(str(file)).items() if not name.startswith("__")
        }
    for name in config:
        nearest = did_you_mean(name, READ)
        if name not in READ and nearest.startswith("did you mean") and name.islower():
            raise ConfigError(f"the config has a key {name!r} that nothing reads", fix=nearest)
    return _nested(config)


def _nested(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Settings({name: _nested(part) for name, part in value.items()})
    return value


def plugin_of(settings: Mapping[str, Any]) -> ConfigPlugin:
    """Return the plugin that a config asks for.

    Raises:
        ConfigError: something in it is not here; the message has the line to write instead.
    """
    config = BoostConfig(
        parallel=_parallel(settings), optimizer=clipping(settings.get("clip_grad_norm") or 0.0)
    )
    config = _with_zero(config, settings.get("zero"))
    return ConfigPlugin(_with_float16(config, settings.get("fp16")))


def _size(value: Any) -> int:
    return int(value.get("size", 1) if isinstance(value, Mapping) else value or 1)


def _parallel(settings: Mapping[str, Any]) -> Parallel:
    parallel = dict(settings.get("parallel") or {})
    stages, tensor = _size(parallel.pop("pipeline", 1)), parallel.pop("tensor", None) or {}
    parallel.pop("data", None)  # the ranks that are left
    if parallel:
        name = next(iter(parallel))
        raise ConfigError(f"parallel has no {name!r}", fix=did_you_mean(name, ("data", "pipeline", "tensor")))
    tensor = dict(tensor) if isinstance(tensor, Mapping) else {"size": tensor, "mode": "1d"}
    size, mode, depth = int(tensor.pop("size", 1)), tensor.pop("mode", None), tensor.pop("depth", None)
    if tensor:
        name = next(iter(tensor))
        raise ConfigError(
            f"parallel.tensor has no {name!r}", fix=did_you_mean(name, ("size", "mode", "depth"))
        )
    if mode is not None and mode not in MODES:
        raise ConfigError("unknown parallel.tensor.mode", got=repr(mode), fix=did_you_mean(str(mode), MODES))
    micro = settings.get("NUM_MICRO_BATCHES")
    pipeline = Pipeline(size=stages, microbatches=None if stages == 1 or micro is None else int(micro))
    if size == 1 or mode is None:
        return Parallel(shard=-1, zero=0, pipeline=pipeline)
    if mode == "sequence":
        return Parallel(shard=-1, zero=0, pipeline=pipeline, context=Context(size=size, mode="ring"))
    layers = Tensor(mode=mode, size=size, depth=depth if mode == "2.5d" else None)
    return Parallel(shard=-1, zero=0, pipeline=pipeline, tensor=layers)


def _with_zero(config: BoostConfig, zero: Mapping[str, Any] | None) -> BoostConfig:
    """Return a config with parameters in shards where `zero` is there; it computes in float16 then, as it did."""
    if zero is None:
        return config
    for name in set(zero) - {"model_config", "optimizer_config"}:
        _refuse(f"zero has a key {name!r}", "zero = dict(model_config=dict(...), optimizer_config=dict(...))")
    model, optimizer = zero.get("model_config") or {}, zero.get("optimizer_config") or {}
    policy = model.get("tensor_placement_policy", "cuda")
    residencies = {"cuda": "device", "cpu": "host", "auto": "auto"}
    if policy not in residencies:
        raise ConfigError(
            "unknown tensor_placement_policy", got=repr(policy), fix=did_you_mean(str(policy), residencies)
        )
    return replace(
        config,
        parallel=replace(config.parallel, zero=3),
        memory=Memory(residency=residencies[policy]),  # type: ignore[arg-type]
        precision=Precision(compute="fp16"),
        scaling=_scaling(optimizer),
    )


def _with_float16(config: BoostConfig, options: Mapping[str, Any] | None) -> BoostConfig:
    if options is None:
        return config
    if config.parallel.zero == 3:
        _refuse(
            "fp16 beside zero, which has a loss scale of its own",
            "zero = dict(optimizer_config=dict(initial_scale=...))",
        )
    return replace(config, precision=Precision(compute="fp16"), outputs="fp32", scaling=_scaling(options))


def _scaling(options: Mapping[str, Any]) -> Scaling:
    names = {
        "initial": ("initial_scale", "init_scale"),
        "growth": ("growth_factor",),
        "backoff": ("backoff_factor",),
    }
    names["interval"] = ("growth_interval",)
    chosen = {key: options[name] for key, spellings in names.items() for name in spellings if name in options}
    return replace(Scaling(), **chosen)


def _refuse(what: str, line: str) -> NoReturn:
    raise ConfigError(f"{what} is not read here", fix=f"write: {line}")
