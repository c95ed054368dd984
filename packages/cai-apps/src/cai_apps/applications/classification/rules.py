"""Rules that a config of a classification must keep. They need neither torch nor transformers."""

from __future__ import annotations

from cai_apps.applications.classification.config import Config
from cai_apps.config import validation
from cai_apps.config.held_out import check_validation
from cai_mesh.errors import ConfigError


def check(config: Config) -> None:
    """Raise CaiError for what can be told of a config before anything is loaded."""
    validation.check(config)
    check_settings(config)


def check_settings(config: Config) -> None:
    """Raise ConfigError for settings that a classification does not have."""
    data, tensor = config.data, config.parallel.tensor
    check_validation(config, 1.0 if data.validation_source is not None else data.validation_fraction)
    validation.check_adapters(config, config.lora, weights=config.model.weights)
    validation.refuse_context(config, "whole texts or pictures, each with one class")
    if data.second_text is not None and data.second_text in (data.text, data.label):
        raise ConfigError(
            "data.second_text is another field already",
            got=f"data.text = {data.text!r}, data.second_text = {data.second_text!r}, data.label = {data.label!r}",
            expected="three fields of a record",
        )
    if tensor.mode != "1d" or tensor.sequence:
        raise ConfigError(
            "a sample has one class, which is said of one place of it or of all together",
            got=f'parallel.tensor.mode = "{tensor.mode}", sequence = {tensor.sequence}',
            expected='"1d", without sequence: attention and feed-forward layers are cut',
            fix="leave both out",
        )
    if config.parallel.experts.size > 1:
        raise ConfigError(
            "experts are spread over ranks in language models",
            got=f"parallel.experts.size = {config.parallel.experts.size}",
            expected="1",
        )
