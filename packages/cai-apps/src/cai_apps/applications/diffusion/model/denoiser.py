"""What is trained: a denoiser of diffusers, and the text encoders where they learn too, as one module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cai_apps.applications.diffusion.model.captions import ADAPTED, build_text_encoder, embed
from cai_apps.applications.diffusion.model.design import TEXTS, Design
from cai_apps.applications.diffusion.model.families import Family
from cai_apps.compose.blocks import blocks_of
from cai_apps.compose.lora import add_adapters, initialize, is_adapter, plain_name
from cai_apps.compose.models import initializer as transformers_initializer
from cai_apps.config.sections import LoRA
from cai_mesh.errors import CheckpointError
from cai_mesh.files import check_header, weight_files

EMBEDDING = ".norm1.emb."
"""The part of a DiT's parameter names that marks a block's embedding of times and labels."""


class Denoiser(nn.Module):
    """Noisy latents [n, c, h, w], times [n] and a condition -> what is in them, [n, c or 2 c, h, w].

    Args:
        denoiser: a denoiser of diffusers.
        family: its family, which knows what it takes.
        texts: text encoders that are trained too; without any the condition comes embedded.
    """

    def __init__(self, denoiser: nn.Module, family: Family, texts: list[nn.Module]):
        super().__init__()
        self.denoiser = denoiser
        self.texts = nn.ModuleDict({str(number): text for number, text in enumerate(texts)})
        self._family = family
        self.layer_classes = family.layer_classes

    def forward(self, sample: Tensor, time: Tensor, **condition: Tensor) -> Tensor:
        """`condition`: text [n, length, width], pooled [n, width], label int64 [n]; tokens int64 [n, encoders, length]
        in place of text and pooled where text encoders are trained."""
        if self.texts:
            texts = list(self.texts.values())
            tokens = condition["tokens"].unbind(1)
            condition = embed(self._family, self.denoiser.config, texts, tokens, sample.dtype)  # type: ignore[arg-type]
        return self.denoiser(**self._family.takes(sample, time, condition), return_dict=False)[0]


def build(design: Design, *, train_text: bool, lora: LoRA | None = None) -> Denoiser:
    """The model of a design, on the device of the context; with `lora.rank` its adapters alone are trained."""
    import diffusers

    kind = getattr(diffusers, design.denoiser["_class_name"])
    denoiser = kind.from_config(dict(design.denoiser))
    if design.family.name == "DiT":
        _share_embedders(denoiser)
    texts = [build_text_encoder(text) for text in design.texts] if train_text else []
    model = Denoiser(denoiser, design.family, texts)
    if lora is not None and lora.rank:
        add_adapters(model, lora, targets(design, lora, train_text=train_text))
    return model


def targets(design: Design, lora: LoRA, *, train_text: bool) -> tuple[str, ...]:
    """Ends of the names of the layers that have adapters."""
    return lora.targets or (*design.family.adapted, *(ADAPTED if train_text and design.texts else ()))


def _share_embedders(denoiser: nn.Module) -> None:
    """Let all blocks of a DiT have one embedding of times and labels, as in its paper; diffusers gives each its own.

    Labels are dropped by who reads samples, not by the layer, whose random numbers nobody could repeat.
    """
    blocks: Any = denoiser.transformer_blocks
    for block in blocks:
        block.norm1.emb = blocks[0].norm1.emb
    blocks[0].norm1.emb.class_embedder.dropout_prob = 0.0


def check_shared(directory: Path) -> None:
    """Raises CheckpointError where the blocks of a DiT have embeddings of times and labels that differ."""
    from safetensors import safe_open

    first: dict[str, Tensor] = {}
    for file in sorted(set(weight_files(directory).tensors.values())):
        check_header(directory / file)
        with safe_open(directory / file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no dict)
                _, separator, key = name.partition(EMBEDDING)
                if separator and not torch.equal(
                    first.setdefault(key, value := tensors.get_tensor(name)), value
                ):
                    raise CheckpointError(
                        f"the blocks of the DiT in {directory} have embeddings that differ",
                        got=name,
                        expected="one embedding of times and labels, as in the paper, copied to every block",
                        cause="its blocks were trained with an embedding each, which cai does not",
                    )


def layers(model: nn.Module) -> list[nn.Module]:
    """What is compiled and recomputed of a `Denoiser`: the layers its family names, and blocks without any of them."""
    named: tuple[str, ...] = model.layer_classes  # type: ignore[assignment]
    compiled_layers: list[nn.Module] = []
    for block in blocks_of(model):
        inside = [module for module in block.modules() if type(module).__name__ in named]
        compiled_layers += inside or [block]
    return compiled_layers


def initializer(design: Design) -> Callable[[nn.Module], Callable[[nn.Module], None]]:
    """Return a function that makes, for a `Denoiser`, what fills the parameters and buffers of one of its modules."""

    def of(model: nn.Module) -> Callable[[nn.Module], None]:
        assert isinstance(model, Denoiser)
        named = {module: name for name, module in model.named_modules()}
        layers = ((module, plain_name(f"{name}.")) for module, name in named.items())
        zero = {module for module, name in layers if name is not None and _is_zero(design, name)}
        denoiser_modules = set(model.denoiser.modules()) | {model, model.texts}
        text = transformers_initializer(model.texts)

        def fill(module: nn.Module) -> None:
            if is_adapter(f"{named[module]}."):
                initialize(module, named[module])
            elif module not in denoiser_modules:
                text(module)
            elif module in zero:
                for param in module.parameters(recurse=False):
                    nn.init.zeros_(param)
            else:
                _reset(module)

        return fill

    return of


def _is_zero(design: Design, name: str) -> bool:
    """Whether a layer, by its name with a dot after it, starts at zero."""
    return name.startswith("denoiser.") and name.removesuffix(".").endswith(design.family.zero)


def _reset(module: nn.Module) -> None:
    """The initial values that torch's and diffusers' layers give themselves when they are built."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]
    elif type(module).__name__ == "RMSNorm":
        for name, param in module.named_parameters(recurse=False):
            nn.init.constant_(param, float(name == "weight"))
    elif getattr(module, "pos_embed", None) is not None and "pos_embed" in module._buffers:
        _fill_positions(module)


def _fill_positions(module: Any) -> None:
    """The table of sines of diffusers' `PatchEmbed`."""
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    table = module.pos_embed
    values = get_2d_sincos_pos_embed(
        table.shape[-1],
        module.pos_embed_max_size or int((module.height * module.width) ** 0.5),
        base_size=module.base_size,
        interpolation_scale=module.interpolation_scale,
        output_type="pt",
    )
    table.copy_(values.to(torch.float32).unsqueeze(0))


def parts(design: Design, *, train_text: bool) -> dict[str, str]:
    """What is trained: the beginning of its parameters' names -> its folder in a pipeline's directory."""
    texts = TEXTS[: len(design.texts)] if train_text else ()
    return {"denoiser.": design.family.folder} | {f"texts.{i}.": folder for i, folder in enumerate(texts)}
