"""Tables in mode 1d: embeddings whose rows or features are cut, and tables with a column for every head."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from cai_mesh.comm import gather_from
from cai_mesh.errors import PlanError
from cai_mesh.layout import Shard
from cai_tensor_parallel.modes.context import ModeContext
from cai_tensor_parallel.modes.vocab import vocab_parallel_embedding, vocab_start


def cut_rows(module: nn.Module, context: ModeContext) -> None:
    """A vocabulary cut over the ranks: each looks up its rows, and the results are summed."""
    check_embedding(module, context)
    assert isinstance(module, nn.Embedding)
    vocabulary = module.weight.shape[0]
    start = vocab_start(context.cutter.cut(module, "weight", Shard(0)))
    group, scaled = context.group, hasattr(module, "embed_scale")

    def forward(self: Any, ids: torch.Tensor) -> torch.Tensor:
        rows = vocab_parallel_embedding(
            ids,
            self.weight,
            group,
            vocab_start=start,
            padding_idx=self.padding_idx,
            vocab_size=vocabulary,
            sparse=self.sparse,
        )
        if not scaled:
            return rows
        scale = self.embed_scale
        return rows * (scale.to(self.weight.dtype) if isinstance(scale, torch.Tensor) else scale)

    module.forward = types.MethodType(forward, module)


def cut_features(module: nn.Module, context: ModeContext) -> None:
    """Features cut over the ranks: each looks up its part of all rows, and the parts are put together."""
    check_embedding(module, context)
    assert isinstance(module, nn.Embedding)
    width = module.weight.shape[1]
    if width % context.cutter.degree:
        raise PlanError(
            f"{context.module_name}: its features do not divide",
            got=f"{width} features over {context.cutter.degree} ranks",
            fix="choose a tensor-parallel degree that divides them",
        )
    context.cutter.cut(module, "weight", Shard(1))
    original, group = module.forward, context.group

    def forward(self: Any, ids: torch.Tensor) -> torch.Tensor:
        return gather_from(original(ids), -1, group)

    module.forward = types.MethodType(forward, module)


def cut_columns(module: nn.Embedding, context: ModeContext) -> None:
    """A table of values for every head, as of relative positions: each rank looks up those of its heads."""
    check_embedding(module, context)
    if module.embedding_dim % context.cutter.degree:
        raise PlanError(
            f"{context.module_name}: its columns do not divide",
            got=f"{module.embedding_dim} columns over {context.cutter.degree} ranks",
            fix="choose a tensor-parallel degree that divides them",
        )
    context.cutter.cut(module, "weight", Shard(1))


def check_embedding(module: nn.Module, context: ModeContext) -> None:
    """Raise `PlanError` for what is not a lookup, alone or times `embed_scale`, in a weight of its own."""
    got = ""
    if not isinstance(module, nn.Embedding) or module._parameters.get("weight") is None:
        got = f"{type(module).__name__} without a weight of its own"
    elif "forward" in module.__dict__:
        got = f"{type(module).__name__} with a replaced forward"
    elif not is_lookup(module):
        got = f"{type(module).__name__}, which computes more than a lookup"
    elif module.max_norm is not None or module.scale_grad_by_freq:
        got = "max_norm" if module.max_norm is not None else "scale_grad_by_freq"
    if got:
        raise PlanError(
            f"{context.module_name} cannot be cut as a lookup",
            got=got,
            expected="a plain Embedding",
            fix="pass a plan that gives it the role replicated",
        )


def is_lookup(embedding: nn.Module) -> bool:
    """Whether an embedding is a lookup, alone or times its `embed_scale`."""
    return type(embedding).forward is nn.Embedding.forward or hasattr(embedding, "embed_scale")
