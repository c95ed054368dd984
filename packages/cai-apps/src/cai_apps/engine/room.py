"""How large a paged cache is: what a block takes in all layers, and how many blocks there is room for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
        graphs: whether forwards of one token a request are CUDA graphs, on a GPU that has the model alone. A graph is
            made when a batch of its size first comes, within a second.
    """

    memory: float | None = None
    block_size: int = 16
    batch_tokens: int = 2048
    requests: int = 256
    graphs: bool = True

    def __post_init__(self) -> None:
        for name in ("block_size", "batch_tokens", "requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is out of range", got=getattr(self, name), expected="1 or more")
        if self.memory is not None and self.memory <= 0:
            raise ConfigError("memory is out of range", got=self.memory, expected="GiB, more than 0")


class _Sizes:
    """A rule that attends as usual and notes the bytes of a token's keys and values."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        if not call.causal:
            raise ConfigError(
                "an attention layer of this model looks both ways", fix="take a causal language model"
            )
        self.bytes += sum(rows[0, :, 0].numel() * rows.element_size() for rows in (key, value))
        return masked_attention(query, key, value, call)


def token_bytes(model: nn.Module) -> int:
    """Return the bytes of one token's keys and values in all layers, by a forward of one token."""
    sizes = _Sizes()
    ids = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    with torch.no_grad(), attention_replaced(model, lambda name: sizes):
        model(input_ids=ids, position_ids=ids, use_cache=False)
    return sizes.bytes


def block_count(model: nn.Module, options: EngineOptions, longest: int | None) -> int:
    """Return how many blocks there is room for.

    Args:
        model: the model, on its device.
        options: the size of the engine.
        longest: tokens of the longest request, if there is a limit.

    Raises:
        ConfigError: there is no room for one block.
    """
    size = token_bytes(model) * options.block_size
    device = next(model.parameters()).device
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
    if longest is not None:
        blocks = min(blocks, options.requests * -(-longest // options.block_size))
    return blocks
