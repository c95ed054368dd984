"""A small instance of a model's class and config, on which `split` is verified first.

Config values that only set the size of the model become small; those that set what it computes stay.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cai_mesh.errors import PlanError

LAYERS = 8
HEADS = 4
HIDDEN = 32
VOCABULARY = 64
PARAMETER_LIMIT = 20_000_000

_SMALL = {
    "intermediate_size": 24,
    "ffn_dim": 24,
    "n_inner": 24,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "rotary_dim": 4,
    "vocab_size": VOCABULARY,
}


@dataclass(frozen=True)
class SmallModel:
    """A `Trial` made of a model class and a small config. Two are equal when class and all config values are equal."""

    model_class: type[nn.Module]
    values: str
    attention: str
    layers: str
    config: Any = field(compare=False, repr=False)

    def build(self) -> nn.Module:
        """A new instance: float64, on the CPU, in evaluation mode, every parameter random (norm weights too)."""
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            model = self.model_class(copy.deepcopy(self.config)).double().eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.2, generator=generator).requires_grad_(True)
        return model

    def loss(self, output: Any) -> torch.Tensor:
        """The loss that the model computes from its labels."""
        return output.loss

    def inputs(self) -> dict[str, torch.Tensor]:
        """Token ids, attention mask and labels, all [2, 12]; the first row ends with two padding tokens."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(4, VOCABULARY, (2, 12), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def small_model(model: nn.Module) -> SmallModel:
    """A small version of a transformers causal LM.

    A narrow config is tried first. If the class refuses it, one that only has fewer layers and a smaller vocabulary.
    Raises PlanError when `model` has no config, or no small instance can be built.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_json_string"):
        raise PlanError(
            f"cannot split {type(model).__name__}",
            got="a module without a transformers config",
            expected="a causal language model of transformers >= 5",
        )
    layers = find_layers(model)
    failure: Exception | None = None
    for narrow in (True, False):
        try:
            smaller = _shrink(config, narrow)
            values = smaller.to_json_string(use_diff=False)
            small = SmallModel(type(model), values, smaller._attn_implementation, layers, smaller)
            if _parameter_count(small) > PARAMETER_LIMIT:
                break
            built = small.build()
            with torch.no_grad(), torch.device("cpu"):
                built(**small.inputs(), use_cache=False)
        except Exception as error:
            failure = failure or error
            continue
        return small
    raise PlanError(
        f"cannot build a small {type(model).__name__} to verify the split on",
        got=f"{type(failure).__name__}: {failure}" if failure else f"over {PARAMETER_LIMIT:,} parameters",
        cause="its config ties sizes together in a way that is not known here",
    ) from failure


def _parameter_count(small: SmallModel) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in small.model_class(copy.deepcopy(small.config)).parameters())


def _shrink(config: Any, narrow: bool) -> Any:
    small = copy.deepcopy(config)
    text = small.get_text_config()
    _fewer_layers(text)
    if narrow:
        _narrower(text)
    else:
        text.vocab_size = min(text.vocab_size, VOCABULARY)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(text, name, None)
        if not isinstance(value, int) or value >= VOCABULARY:
            setattr(text, name, None)
    if getattr(small, "_experts_implementation", None) is not None:
        small._experts_implementation = "eager"
    if small._attn_implementation not in ("eager", "sdpa"):
        small._attn_implementation = "sdpa"
    return small


def _fewer_layers(text: Any) -> None:
    before = text.num_hidden_layers
    after = min(before, LAYERS)
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, value[:after])
    text.num_hidden_layers = after


def _narrower(text: Any) -> None:
    hidden, heads = text.hidden_size, text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if getattr(text, "word_embed_proj_dim", None) is not None:
        text.word_embed_proj_dim = HIDDEN if text.word_embed_proj_dim == hidden else HIDDEN // 2
    if getattr(text, "num_key_value_heads", None) is not None:
        text.num_key_value_heads = HEADS if kv_heads == heads else min(kv_heads, HEADS // 2)
    latent_attention = hasattr(text, "qk_rope_head_dim")
    if vars(text).get("head_dim") is not None and not latent_attention:
        text.head_dim = HIDDEN // HEADS
    text.hidden_size, text.num_attention_heads = HIDDEN, HEADS
    for name, value in _SMALL.items():
        now = getattr(text, name, None)
        if isinstance(now, int):
            setattr(text, name, min(now, value))


def find_layers(model: nn.Module) -> str:
    """The name of the model's list of decoder layers: the largest `ModuleList` of `num_hidden_layers` entries.

    Raises PlanError when there is none, and for an encoder-decoder, which has two.
    """
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise PlanError(
            f"cannot split {type(model).__name__}", got="an encoder-decoder", expected="a causal LM"
        )
    wanted = config.get_text_config().num_hidden_layers
    found = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == wanted
    }
    outer = {name: size for name, size in found.items() if not any(name.startswith(o + ".") for o in found)}
    if not outer:
        raise PlanError(
            f"cannot find the decoder layers of {type(model).__name__}",
            expected=f"a ModuleList of {wanted} layers, as config.num_hidden_layers says",
        )
    return max(outer, key=lambda name: outer[name])
