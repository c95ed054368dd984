"""How large a paged cache is: what a block takes in all layers, and how many blocks there is room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cai_apps.engine.layout import CacheLayout, LayerCache, layout_of, one_group
from cai_apps.engine.ranks import Logits, Ranks
from cai_apps.engine.schedule import Limits
from cai_mesh.attention import attention_replaced, masked_attention
from cai_mesh.errors import ConfigError
from cai_mesh.protocols import AttentionCall

GIB = 2**30
SHARE = 0.9
"""The part of a GPU's free memory that a cache takes by default; the rest is for what forwards make."""
ON_HOST = 1.0
"""GiB of a cache on the host by default."""


@dataclass(frozen=True)
class EngineOptions:
    """The size of an engine.

    Args:
        memory: GiB of keys and values; None: 90 % of what is free on a GPU, 1 GiB on the host, and never more than
            all requests can fill.
        block_size: tokens of a block.
        batch_tokens: the most tokens of a forward; a longer prompt is computed in several.
        requests: the most requests that are computed side by side.
        prompt_part: the most tokens of a prompt in a forward in which other requests go on, so that a long one holds
            them up less; None: as many as there is room for.
        graphs: whether forwards are CUDA graphs, on a GPU that has the model alone: those of one token a request whole,
            and those that read prompts, of up to 1,024 tokens, between attention layers. One is made when a batch of
            its size comes, within a second.
    """

    memory: float | None = None
    block_size: int = 16
    batch_tokens: int = 2048
    requests: int = 256
    prompt_part: int | None = None
    graphs: bool = True

    def __post_init__(self) -> None:
        for name in ("block_size", "batch_tokens", "requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is out of range", got=getattr(self, name), expected="1 or more")
        if self.prompt_part is not None and self.prompt_part < 1:
            raise ConfigError("prompt_part is out of range", got=self.prompt_part, expected="1 or more")
        if self.memory is not None and self.memory <= 0:
            raise ConfigError("memory is out of range", got=self.memory, expected="GiB, more than 0")


class _Noting:
    """The rule of a layer that attends as usual and notes the keys and values of a token."""

    def __init__(self, name: str, layers: dict[str, LayerCache]):
        self._name, self._layers = name, layers

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        if not call.causal:
            raise ConfigError(
                "an attention layer of this model looks both ways", fix="take a causal language model"
            )
        size = sum(rows[0, :, 0].numel() * rows.element_size() for rows in (key, value))
        form = tuple((rows.shape[1], rows.shape[3], rows.dtype) for rows in (key, value))
        self._layers[self._name] = LayerCache(size, form, call.window)
        return masked_attention(query, key, value, call)


def cached_layers(model: nn.Module, forward: Logits | None = None) -> dict[str, LayerCache]:
    """Return what the layers of a model on this rank keep of a token, by a forward of one token.

    Args:
        model: the model, on its device.
        forward: its forward, on ranks that have it together; None: the model's own.
    """
    layers: dict[str, LayerCache] = {}
    ids = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    with torch.no_grad(), attention_replaced(model, lambda name: _Noting(name, layers)):
        inputs = {"input_ids": ids, "position_ids": ids, "use_cache": False}
        model(**inputs) if forward is None else forward(inputs)
    return layers


def block_count(
    token: int, options: EngineOptions, limits: Limits, device: torch.device, longest: int | None
) -> int:
    """Return how many blocks there is room for.

    Args:
        token: bytes of a token's keys and values in the layers of a group.
        options: the size of the engine.
        limits: that of a forward.
        device: the device of the cache.
        longest: tokens of the longest request, if there is a limit.

    Raises:
        ConfigError: there is no room for one block.
    """
    size = token * options.block_size
    if options.memory is not None:
        room = int(options.memory * GIB)
    elif device.type == "cuda":
        room = int(torch.cuda.mem_get_info(device)[0] * SHARE)
    else:
        room = int(ON_HOST * GIB)
    if room < size:
        raise ConfigError(
            "there is no memory for a block of keys and values",
            got=f"{room / GIB:.3g} GiB",
            expected=f"at least {size / GIB:.3g} GiB for {options.block_size} tokens",
            fix="give the engine more memory, or take a smaller model or more GPUs",
        )
    blocks = room // size
    return blocks if longest is None else min(blocks, options.requests * limits.blocks_of(longest))


def positions(model: Any) -> int | None:
    """Return the most tokens of a request by a model's config; None: as many as there is room for."""
    longest = getattr(model.config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def plan_cache(
    model: nn.Module, options: EngineOptions, longest: int | None, ranks: Ranks, forward: Logits | None
) -> tuple[CacheLayout, Limits, int]:
    """Return the groups of a model's layers, the size of a forward, and the number of blocks. Collective.

    Args:
        model: the model, on its device.
        options: the size of the engine.
        longest: tokens of the longest request, if there is a limit.
        ranks: the ranks that compute it together.
        forward: its forward on them; None: the model's own.

    Raises:
        ConfigError: as `block_count`.
    """
    layers = cached_layers(model, forward)
    layout = layout_of(layers, longest)
    if not ranks.agree(
        layout.windows
    ):  # stages of which each has its own; requests have the same blocks on all
        layout = one_group(list(layers))
    token = max(layer.bytes for layer in layers.values()) * layout.layers
    if layout.windows == (None,):
        token = sum(layer.bytes for layer in layers.values())
    sizes = (options.batch_tokens, options.requests, options.block_size, layout.windows)
    limits = Limits(*sizes, options.prompt_part)
    device = next(model.parameters()).device
    return layout, limits, ranks.least(block_count(token, options, limits, device, longest))
