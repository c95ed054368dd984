"""What the kinds of denoisers take beside noisy latents, as a table: a new kind is a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Family:
    """Args:
    name: its name in messages.
    folder: the denoiser's folder in a pipeline's directory.
    condition: "text", "label", or "text and pooled": embeddings of tokens and one of the whole caption.
    arguments: names of the denoiser's keyword arguments, by what they hold: sample, time, text, pooled, label.
    widths: keys of its config with the widths of what it takes: text, pooled.
    multiple: a function of its config: the number that the sides of its latents must be multiples of.
    square: its latents are as high as wide, and always of one size.
    zero: ends of the names of layers whose weights start at zero, so that blocks begin as the identity.
    layer_classes: classes of its parts that are compiled, and recomputed, each as a whole.
    adapted: ends of the names of layers that have adapters unless a config says which.
    convolutional: its layers are fastest where channels are last in memory.
    flow: it learns a flow, not a diffusion.
    unknown: keys of its config that ask for conditions nobody gives it here.
    """

    name: str
    folder: str
    condition: str
    arguments: Mapping[str, str]
    widths: Mapping[str, str]
    multiple: Callable[[Mapping[str, Any]], int]
    square: bool
    zero: tuple[str, ...]
    layer_classes: tuple[str, ...]
    adapted: tuple[str, ...]
    convolutional: bool
    flow: bool
    unknown: tuple[str, ...] = ()

    def takes(self, sample: Tensor, time: Tensor, condition: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The denoiser's keyword arguments."""
        inputs = {"sample": sample, "time": time, **condition}
        return {name: inputs[what] for what, name in self.arguments.items()}


ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
"""The projections of diffusers' attention."""
FAMILIES = {
    "UNet2DConditionModel": Family(
        "UNet",
        "unet",
        "text",
        {"sample": "sample", "time": "timestep", "text": "encoder_hidden_states"},
        {"text": "cross_attention_dim"},
        lambda config: 2 ** (len(config["block_out_channels"]) - 1),
        square=False,
        zero=("conv2", "proj_out", "conv_out"),
        layer_classes=("ResnetBlock2D", "Transformer2DModel", "Downsample2D", "Upsample2D"),
        adapted=ATTENTION,
        convolutional=True,
        flow=False,
        unknown=("class_embed_type", "num_class_embeds", "addition_embed_type", "encoder_hid_dim_type"),
    ),
    "DiTTransformer2DModel": Family(
        "DiT",
        "transformer",
        "label",
        {"sample": "hidden_states", "time": "timestep", "label": "class_labels"},
        {},
        lambda config: config["patch_size"],
        square=True,
        zero=("norm1.linear", "proj_out_1", "proj_out_2"),
        layer_classes=("BasicTransformerBlock",),
        adapted=ATTENTION,
        convolutional=False,
        flow=False,
    ),
    "SD3Transformer2DModel": Family(
        "SD3",
        "transformer",
        "text and pooled",
        {
            "sample": "hidden_states",
            "time": "timestep",
            "text": "encoder_hidden_states",
            "pooled": "pooled_projections",
        },
        {"text": "joint_attention_dim", "pooled": "pooled_projection_dim"},
        lambda config: config["patch_size"],
        square=False,
        zero=("norm1.linear", "norm1_context.linear", "norm_out.linear", "proj_out"),
        layer_classes=("JointTransformerBlock",),
        adapted=(*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        convolutional=False,
        flow=True,
    ),
}
"""Families by the class of diffusers. Zeros: SD's `zero_module` (Rombach et al., arXiv:2112.10752), adaLN-Zero (Peebles
and Xie, arXiv:2212.09748)."""


def family_of(kind: str) -> Family:
    """The family of a class of diffusers.

    Raises:
        ConfigError: it is none of those known here.
    """
    if kind not in FAMILIES:
        raise ConfigError("a denoiser of an unknown kind", got=kind, expected=", ".join(FAMILIES))
    return FAMILIES[kind]


def check_conditions(denoiser: Mapping[str, Any]) -> None:
    """Raises ConfigError where a denoiser's config asks for more than a family gives it, as SDXL's does, or takes more
    channels than it makes, as one for inpainting."""
    family = family_of(denoiser["_class_name"])
    unknown_conditions = [
        f"{key} = {denoiser[key]!r}" for key in family.unknown if denoiser.get(key) is not None
    ]
    if unknown_conditions:
        raise ConfigError(
            f"a {family.name} with conditions that are not known here",
            got=", ".join(unknown_conditions),
            expected=f"{family.condition} alone",
        )
    in_channels, out_channels = (
        denoiser["in_channels"],
        denoiser.get("out_channels") or denoiser["in_channels"],
    )
    if out_channels not in (in_channels, 2 * in_channels):
        raise ConfigError(
            f"a {family.name} that makes other channels than it takes",
            got=f"in_channels = {in_channels}, out_channels = {out_channels}",
            expected=f"out_channels = {in_channels}, or {2 * in_channels} with a learned variance",
        )


def predicts_variance(denoiser: Mapping[str, Any]) -> bool:
    """Whether the second half of the output channels of a config is of the variance (arXiv:2102.09672)."""
    return (denoiser.get("out_channels") or denoiser["in_channels"]) == 2 * denoiser["in_channels"]
