"""Rules that a diffusion config and the design it names must keep. They need neither torch nor diffusers."""

from __future__ import annotations

from collections.abc import Sequence

from cai_apps.applications.diffusion.config import DRAWN, Config
from cai_apps.applications.diffusion.model.design import Design, is_t5, load_design
from cai_apps.config import validation
from cai_apps.config.held_out import check_validation
from cai_mesh.errors import ConfigError


def check(config: Config) -> None:
    """Raises CaiError for what can be told of a config before anything is loaded. Downloads what a hub id names."""
    validation.check(config)
    check_design(config, load_design(config.model.name))


def check_design(config: Config, design: Design) -> None:
    """Raises ConfigError where parts of the design do not fit each other or the config."""
    check_validation(config, config.data.validation_fraction)
    _check_parallel(config)
    _check_shape(config, design)
    _check_prior(config, design)
    validation.check_adapters(config, config.lora, weights=config.model.weights)


def _check_parallel(config: Config) -> None:
    """Raises ConfigError for stages, and for tensor parallelism in another form than mode 1d."""
    parallel = config.parallel
    validation.refuse_context(config, "pictures")
    if parallel.pipeline.size > 1:
        raise ConfigError(
            "denoisers are trained by data parallelism and ZeRO, and tensor parallelism",
            got=f"parallel.pipeline.size = {parallel.pipeline.size}",
            expected="1",
            fix="raise parallel.shard, and parallel.zero to 3 where memory is short",
        )
    if parallel.tensor.size > 1 and config.lora.dropout:
        raise ConfigError(
            "adapters of a denoiser that drop inputs, on tensor-parallel ranks",
            got=f"parallel.tensor.size = {parallel.tensor.size}, lora.dropout = {config.lora.dropout}",
            fix="set lora.dropout to 0, or raise parallel.shard in place of parallel.tensor.size",
        )
    if parallel.tensor.mode != "1d" or parallel.tensor.sequence:
        raise ConfigError(
            "between a denoiser's blocks are convolutions and modulations by time, which see all samples and features",
            got=f'parallel.tensor.mode = "{parallel.tensor.mode}", sequence = {parallel.tensor.sequence}',
            expected='"1d", without sequence: attention and feed-forward layers are cut',
            fix="leave both out",
        )


def _check_shape(config: Config, design: Design) -> None:
    if config.model.weights == "pretrained" and design.directory is None:
        raise ConfigError(
            f'model.weights = "pretrained", but the preset {design.name!r} is only a shape',
            expected="a directory of diffusers or a hub id",
            fix='set model.name to one, or model.weights to "random"',
        )
    size, multiple = config.data.size, design.multiple
    if size % multiple:
        near = max(1, round(size / multiple)) * multiple
        raise ConfigError(
            "images of this size do not divide into latents and patches",
            got=f"data.size = {size}",
            expected=f"a multiple of {multiple} ({design.factor} pixels to a latent)",
            fix=f"set data.size to {near}",
        )
    side = size // design.factor
    if design.family.square and side != design.denoiser["sample_size"]:
        raise ConfigError(
            f"a {design.family.name} has positions for one size of image",
            got=f"data.size = {size}: latents of {side}",
            expected=f"latents of {design.denoiser['sample_size']}",
            fix=f"set data.size to {design.denoiser['sample_size'] * design.factor}",
        )
    if design.denoiser["in_channels"] != design.channels:
        raise ConfigError(
            "the denoiser takes other latents than the autoencoder makes",
            got=f"{design.channels} channels",
            expected=f"in_channels = {design.denoiser['in_channels']}",
        )
    check_widths(design)
    if config.model.text_encoder == "trained" and design.clips != design.texts:
        raise ConfigError(
            "a T5 is not trained with a denoiser",
            got='model.text_encoder = "trained"',
            expected='"frozen", or a directory without text_encoder_3',
        )
    _check_ratio(config, design)


def _check_ratio(config: Config, design: Design) -> None:
    ratio = config.data.max_ratio
    if ratio == 1:
        return
    cause = ""
    if design.family.square:
        cause = f"a {design.family.name} takes squares"
    elif config.data.source in DRAWN:
        cause = f'the images of "{config.data.source}" are squares'
    elif config.prior.images:
        cause = "a batch of DreamBooth has images of the subject and of its class"
    if cause:
        raise ConfigError(
            "images of several shapes are for directories of them",
            got=f"data.max_ratio = {ratio}",
            cause=cause,
            fix="leave data.max_ratio out",
        )


def check_widths(design: Design) -> None:
    """Raises ConfigError where the text encoders do not make what the denoiser takes."""
    family = design.family
    if family.condition == "label":
        return
    if not design.texts:
        raise ConfigError(
            f"{design.name} has no text encoder", expected=f"captions are what a {family.name} takes"
        )
    encoder_widths: dict[str, Sequence[int]] = {
        "text": [text["hidden_size"] for text in design.clips],
        "pooled": [text.get("projection_dim", 512) for text in design.clips],
    }
    for text in design.texts:
        if is_t5(text) and text["d_model"] != design.denoiser["joint_attention_dim"]:
            raise ConfigError(
                f"the states of the T5 are not what the {family.name} takes",
                got=f"d_model = {text['d_model']}",
                expected=f"joint_attention_dim = {design.denoiser['joint_attention_dim']}",
                fix="use the text encoders that this denoiser was made for",
            )
    for what, key in family.widths.items():
        denoiser_width, width = design.denoiser[key], sum(encoder_widths[what])
        fits = (
            width <= denoiser_width
            if (family.condition, what) == ("text and pooled", "text")
            else width == denoiser_width
        )
        if not fits:
            raise ConfigError(
                f"the {what} embeddings are not what the {family.name} takes",
                got=f"{width} wide, of {len(design.clips)} text encoder{'s' * (len(design.clips) > 1)}",
                expected=f"{key} = {denoiser_width}",
                fix="use the text encoders that this denoiser was made for",
            )


def _check_prior(config: Config, design: Design) -> None:
    prior = config.prior
    if not prior.images:
        return
    if design.family.condition == "label":
        raise ConfigError(
            f"a {design.family.name} has labels; a subject and its class are told by captions",
            got=f"prior.images = {prior.images}",
            expected="0",
        )
    if prior.source == "generated" and not prior.prompt:
        raise ConfigError(
            "prior.prompt is empty",
            expected='what the subject is an example of, as "a photo of a dog"',
        )
    if prior.source == "generated" and config.model.weights != "pretrained":
        raise ConfigError(
            "pictures of the class are drawn by the weights that training begins with",
            got=f'model.weights = "{config.model.weights}"',
            expected='"pretrained", and model.name a directory of diffusers or a hub id',
            fix="set both, or prior.source to a directory with images of the class",
        )
    if config.train.global_batch % 2:
        raise ConfigError(
            "half of a batch shows the subject and half its class",
            got=f"train.global_batch = {config.train.global_batch}",
            expected="an even number",
        )
    if config.data.validation_fraction:
        raise ConfigError(
            "no image of a subject can be spared for validation",
            got=f"data.validation_fraction = {config.data.validation_fraction}",
            expected="0",
        )
