"""Rules that a config of an alignment run must keep. They need neither torch nor transformers."""

from __future__ import annotations

from dataclasses import fields, replace

from cai_apps.applications.alignment.algorithms import ALGORITHMS
from cai_apps.applications.alignment.config import Alignment, Config, Reference
from cai_apps.applications.language import rules as language
from cai_apps.config import validation
from cai_mesh.errors import ConfigError

HEAD = "score"
"""The name of the value head, which learns whole beside adapters."""


def check(config: Config) -> None:
    """Raise CaiError for what can be told of a config before anything is loaded."""
    check_alignment(config)
    language.check(with_head(config))


def with_head(config: Config) -> Config:
    """Return a config whose value head learns whole beside adapters, if it has both."""
    lora = config.lora
    if (
        ALGORITHMS[config.alignment.algorithm].score != "value"
        or not lora.rank
        or HEAD in lora.modules_to_save
    ):
        return config
    return replace(config, lora=replace(lora, modules_to_save=(*lora.modules_to_save, HEAD)))


def check_alignment(config: Config) -> None:
    """Raise ConfigError for options that an algorithm does not read, or a reference that there is not."""
    _check_options(config.alignment)
    _check_reference(config)
    if config.alignment.share_prompts:
        validation.refuse_context(config, "pairs with prompts that are computed once for both answers")
    algorithm = ALGORITHMS[config.alignment.algorithm]
    if config.data.trained != ("all",):
        raise ConfigError(
            "data.trained is for conversations",
            got=", ".join(config.data.trained),
            expected='"all": what is compared are the answers, whole',
        )
    if config.data.validation_source is not None:
        raise ConfigError(
            "preferences for validation are held out of the source",
            got=f"data.validation_source = {config.data.validation_source!r}",
            fix="set data.validation_fraction in its place",
        )
    if config.alignment.share_prompts and config.model.neftune_alpha:
        raise ConfigError(
            "a prompt that is computed once has one noise for both answers",
            got=f"alignment.share_prompts = true, model.neftune_alpha = {config.model.neftune_alpha}",
            fix="leave one of them out",
        )
    if algorithm.score == "value" and config.log.prompts:
        raise ConfigError(
            "a reward model writes no text", got="log.prompts", fix="leave log.prompts out, or train by dpo"
        )


def _check_options(options: Alignment) -> None:
    algorithm = ALGORITHMS[options.algorithm]
    read = {"algorithm", *algorithm.options, *(() if algorithm.beta is None else ("beta",))}
    if algorithm.units == "pairs":
        read.add("share_prompts")
    for field in fields(Alignment):
        value = getattr(options, field.name)
        if field.name not in read and value != field.default:
            raise ConfigError(
                f"alignment.algorithm {options.algorithm!r} has no {field.name}",
                got=f"alignment.{field.name} = {value}",
                expected=f"options among {', '.join(sorted(read - {'algorithm'})) or 'none'}",
                fix=f"leave alignment.{field.name} out",
            )


def _check_reference(config: Config) -> None:
    name, reference = config.alignment.algorithm, config.reference
    if not ALGORITHMS[name].reference:
        if reference != Reference():
            raise ConfigError(
                f"alignment.algorithm {name!r} has no reference model",
                got=f"reference.model = {reference.model!r}, reference.form = {reference.form!r}",
                fix="leave [reference] out",
            )
        return
    if reference.form == "adapter" and not config.lora.rank:
        raise ConfigError(
            'reference.form = "adapter" is the model with its adapters off, and it has none',
            got="lora.rank = 0",
            fix='set lora.rank, or reference.form to "computed" or "model"',
        )
    if reference.form == "adapter" and reference.model is not None:
        raise ConfigError(
            "two references at once",
            got=f'reference.model = {reference.model!r}, reference.form = "adapter"',
            fix="leave one of them out",
        )
    if reference.form == "adapter" and config.lora.adapter is not None:
        raise ConfigError(
            "the model with its adapters off is not the one that training goes on from",
            got=f'lora.adapter = {config.lora.adapter!r}, reference.form = "adapter"',
            fix='set reference.form to "computed" or "model": the adapter as it is in its folder',
        )
    if reference.form == "adapter" and config.lora.modules_to_save:
        raise ConfigError(
            "the model with its adapters off has learned: modules are trained whole beside them",
            got=f"lora.modules_to_save = {', '.join(config.lora.modules_to_save)}",
            fix='set reference.form to "computed" or "model"',
        )
