"""How a denoiser is cut over tensor-parallel ranks: what is cut of it, and the small model on which that is tried."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from cai_apps.applications.diffusion.config import Config
from cai_apps.applications.diffusion.model.denoiser import build, targets
from cai_apps.applications.diffusion.model.design import Design
from cai_apps.compose.lora import add_adapters
from cai_apps.config.sections import LoRA
from cai_mesh.errors import ConfigError
from cai_mesh.trial import Trial
from cai_tensor_parallel.finding import survey
from cai_tensor_parallel.plans import match

WIDTH = 8
"""The width of a head of the small model."""
LENGTH = 6
"""The length of its captions, in tokens."""
SAMPLES = 2


@dataclass(frozen=True)
class Share:
    """What of a model is cut.

    Args:
        cut: part of its parameters that ranks divide.
        whole: attentions and feed-forward layers that every rank has whole, by name: why.
    """

    cut: float
    whole: Mapping[str, str]

    def to_json(self) -> str:
        """The same as a JSON object."""
        return json.dumps({"cut": self.cut, "whole": dict(self.whole)}, indent=2)

    def __str__(self) -> str:
        """One line; parts that stay whole are counted by reason."""
        reasons = list(self.whole.values())
        counted = [
            f"{reasons.count(reason)} parts stay whole ({reason})" for reason in dict.fromkeys(reasons)
        ]
        return "; ".join((f"tensor ranks divide {self.cut:.0%} of the parameters", *counted))


def trains_text(config: Config, design: Design) -> bool:
    """Whether the text encoders learn with the denoiser."""
    return config.model.text_encoder == "trained" and bool(design.texts)


def share_of(config: Config, design: Design) -> Share | None:
    """What tensor-parallel ranks divide of the model of a config; None where there is one.

    Raises:
        ConfigError: nothing of it can be cut over so many.
    """
    ranks = config.parallel.tensor.size
    if ranks == 1:
        return None
    with torch.device("meta"):
        model = build(design, train_text=trains_text(config, design))
    model_survey = survey(model, ranks)
    kinds = {name: role.kind for name, role in match(model_survey.plan, model).items()}
    sharded_modules = [
        model.get_submodule(n) for n, kind in kinds.items() if not kind.startswith("replicated")
    ]
    total = sum(param.numel() for param in model.parameters())
    share = Share(sum(_weight(module) for module in sharded_modules) / total, model_survey.whole)
    if not sharded_modules:
        raise ConfigError(
            f"nothing of {design.name} can be cut over {ranks} tensor-parallel ranks",
            got=str(share),
            fix="lower parallel.tensor.size, raise parallel.shard",
        )
    return share


def _weight(module: nn.Module) -> int:
    return module.get_parameter("weight").numel()


def trial_of(design: Design, *, train_text: bool, ranks: int, lora: LoRA = LoRA()) -> Trial | None:  # noqa: B008 (frozen)
    """The small model on which a plan for `ranks` ranks is tried; None for one rank. The same one for equal designs.

    With `lora.rank` it has adapters where the model has some, of those of its layers that it has too.
    """
    if ranks == 1:
        return None
    parts = {"denoiser": dict(design.denoiser), "texts": [dict(text) for text in design.clips]}
    return _trial(json.dumps(parts, sort_keys=True), train_text, ranks, lora)


@lru_cache(maxsize=16)
def _trial(parts: str, train_text: bool, ranks: int, lora: LoRA) -> Trial:
    table = json.loads(parts)
    texts = tuple(_small_text(text, ranks) for text in table["texts"])
    kind = table["denoiser"]["_class_name"]
    undropped = {"dropout": 0.0} if "dropout" in table["denoiser"] else {}
    small = {**table["denoiser"], **undropped, **SMALL[kind](table["denoiser"], texts, ranks)}
    design = Design("a small model", small, {}, None, 1, texts)

    def made() -> nn.Module:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            model = build(design, train_text=train_text)
            adapted = _present(model, targets(design, lora, train_text=train_text)) if lora.rank else ()
            if adapted:
                add_adapters(model, lora, adapted)
            model = model.double().eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in model.parameters():
                param.normal_(0.0, 0.2, generator=generator).requires_grad_(True)
        return model

    return Trial(made, lambda: _inputs(design, train_text), _loss)


def _present(model: nn.Module, targets: Sequence[str]) -> tuple[str, ...]:
    """Return those of some ends of names that layers of a model have."""
    names = [f".{name}" for name, _ in model.named_modules()]
    return tuple(target for target in targets if any(name.endswith(f".{target}") for name in names))


def _loss(output: Tensor) -> Tensor:
    flat = output.flatten()
    return (flat * torch.linspace(-1.0, 1.0, flat.numel(), dtype=flat.dtype)).sum()


def _inputs(design: Design, train_text: bool) -> dict[str, Tensor]:
    """Return arguments of a `Denoiser`'s forward; latents and embeddings are float64."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    denoiser, family = design.denoiser, design.family
    side = denoiser["sample_size"]
    arguments = {
        "sample": drawn(SAMPLES, denoiser["in_channels"], side, side),
        "time": torch.tensor([3, 700]).to(torch.float32 if family.flow else torch.int64),
    }
    if family.condition == "label":
        return arguments | {"label": torch.tensor([1, 4])}
    if train_text:
        ids = torch.randint(3, 40, (SAMPLES, len(design.texts), LENGTH), generator=generator)
        ids[..., -1] = 1  # the end, by every config of CLIP
        return arguments | {"tokens": ids}
    arguments["text"] = drawn(SAMPLES, LENGTH, denoiser[family.widths["text"]])
    if "pooled" in family.widths:
        arguments["pooled"] = drawn(SAMPLES, denoiser[family.widths["pooled"]])
    return arguments


# -- small configs -------------------------------------------------------------------------------------------------


def _like(heads: int, ranks: int) -> int:
    """Heads that divide over two ranks, do not, or do not go round, as the large model's do over its own."""
    if heads % ranks == 0:
        return 4
    return 3 if heads > (ranks - 1) * -(-heads // ranks) else 1


def _small_text(text: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    heads = _like(text["num_attention_heads"], ranks)
    return {
        **text,
        "hidden_size": heads * WIDTH,
        "num_attention_heads": heads,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "projection_dim": 16,
        "vocab_size": 40,
        "max_position_embeddings": LENGTH,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "attention_dropout": 0.0,
    }


def _unet(denoiser: Mapping[str, Any], texts: tuple[Mapping[str, Any], ...], ranks: int) -> dict[str, Any]:
    """Heads level by level like the large model's."""
    levels = len(denoiser["block_out_channels"])
    heads = denoiser.get("num_attention_heads") or denoiser["attention_head_dim"]
    small = [
        _like(level_heads, ranks)
        for level_heads in (heads if isinstance(heads, list | tuple) else [heads] * levels)
    ]
    return {
        "block_out_channels": [level_heads * WIDTH for level_heads in small],
        "attention_head_dim": small,
        "num_attention_heads": None,
        "layers_per_block": 1,
        "transformer_layers_per_block": 1,
        "norm_num_groups": 4,
        "cross_attention_dim": sum(text["hidden_size"] for text in texts) or 24,
        "sample_size": 2 ** (levels - 1),
    }


def _dit(denoiser: Mapping[str, Any], texts: tuple[Mapping[str, Any], ...], ranks: int) -> dict[str, Any]:
    return {
        "num_attention_heads": _like(denoiser["num_attention_heads"], ranks),
        "attention_head_dim": WIDTH,
        "num_layers": 2,
        "num_embeds_ada_norm": 10,
        "sample_size": 3 * denoiser["patch_size"],
    }


def _sd3(denoiser: Mapping[str, Any], texts: tuple[Mapping[str, Any], ...], ranks: int) -> dict[str, Any]:
    """Three layers; the first has a dual attention where any has."""
    heads = _like(denoiser["num_attention_heads"], ranks)
    dual = bool(denoiser.get("dual_attention_layers"))
    return {
        "num_attention_heads": heads,
        "attention_head_dim": WIDTH,
        "caption_projection_dim": heads * WIDTH,
        "num_layers": 3,
        "joint_attention_dim": sum(text["hidden_size"] for text in texts) or 24,
        "pooled_projection_dim": sum(text["projection_dim"] for text in texts) or 16,
        "pos_embed_max_size": 6,
        "sample_size": 3 * denoiser["patch_size"],
        **({"dual_attention_layers": [0]} if dual else {}),
    }


SMALL: dict[str, Callable[[Mapping[str, Any], tuple[Mapping[str, Any], ...], int], dict[str, Any]]] = {
    "UNet2DConditionModel": _unet,
    "DiTTransformer2DModel": _dit,
    "SD3Transformer2DModel": _sd3,
}
"""Functions that return what of a config becomes small, by the class of diffusers. All else but dropout stays."""
