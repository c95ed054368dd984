"""The loss of a model whose logits stay cut: replaced where it is proved to be that of next tokens, else refused."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from cai_mesh.comm import AnyMesh, ParallelMesh
from cai_mesh.errors import PlanError
from cai_mesh.layout import layout_of
from cai_tensor_parallel.modes import check_mode
from cai_tensor_parallel.modes.context import ModeContext, Ranks
from cai_tensor_parallel.modes.forms import GRIDS
from cai_tensor_parallel.modes.vocab import CausalLMLoss, ShardedLogits, vocab_start

ROWS, TOKENS, COLUMNS = 2, 5, 11
"""Sizes of the logits on which a loss is tried; a model that has a vocabulary size gets so many columns."""


def is_next_token_loss(model: nn.Module) -> bool:
    """Whether a model's forward calls its `loss_function`, and that equals the loss of next tokens on random logits,
    in all its options."""
    function = getattr(model, "loss_function", None)
    forward = inspect.unwrap(type(model).forward)
    if not callable(function) or "loss_function" not in forward.__code__.co_names:
        return False
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    columns = getattr(text, "vocab_size", COLUMNS)
    with torch.device("cpu"), torch.no_grad():
        random = torch.Generator().manual_seed(0)
        logits = torch.randn(ROWS, TOKENS, columns, generator=random)
        labels = torch.randint(columns, (ROWS, TOKENS), generator=random)
        labels[0, :2], ignored = -100, int(labels[1, 2])
        options: tuple[dict[str, Any], ...] = (
            {},
            {"num_items_in_batch": 3},
            {"ignore_index": ignored},
            {"shift_labels": labels.flip(1)},
        )
        try:
            return all(_agrees(function, logits, labels, columns, case) for case in options)
        except Exception:  # a loss that takes other arguments is another one
            return False


def _agrees(
    function: Any, logits: torch.Tensor, labels: torch.Tensor, columns: int, case: dict[str, Any]
) -> bool:
    if "ignore_index" in case:
        labels = labels.clamp(min=0)
    arguments = {"logits": logits, "labels": labels, "vocab_size": columns} | case
    return torch.allclose(function(**arguments), CausalLMLoss(ShardedLogits())(**arguments), rtol=1e-4)


def sharded_logits(model: nn.Module, mesh: AnyMesh, *, mode: str = "1d") -> ShardedLogits:
    """The layout of logits over the ranks after `parallelize(..., logits="sharded")` of a model of transformers.

    For a loss of one's own: `vocab_parallel_cross_entropy(logits, form.own(labels), form.columns,
    vocab_start=form.start)`, whose sum over samples is `form.summed` of it. Without an output layer, as on another
    pipeline stage, all is here.

    Args:
        mesh, mode: that `parallelize` got.
    """
    check_mode(mode)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    ranks = ParallelMesh.of(mesh, alone="tp")
    if not isinstance(weight, torch.Tensor) or ranks.degree("tp") == 1:
        return ShardedLogits()
    return form_of_logits(weight, ranks, mode)


def form_of_logits(weight: torch.Tensor, ranks: Ranks, mode: str) -> ShardedLogits:
    """The layout of the logits of an output weight [V, features], from this rank's part of it."""
    if mode not in GRIDS:
        return ShardedLogits(ranks.group("tp"), vocab_start(weight))
    form, columns = GRIDS[mode].inner, layout_of(weight).global_shape[0]
    start = min(ranks.index(form.features) * -(-columns // ranks.degree(form.features)), columns)
    return ShardedLogits(ranks.group(form.features), start, ranks.group(form.batch))


def cut_loss(model: nn.Module, head: nn.Module, context: ModeContext) -> None:
    """Let a model compute its loss from cut logits, or refuse labels where that is not the loss of next tokens."""
    if is_next_token_loss(model):
        assert isinstance(head.weight, torch.Tensor)
        loss = CausalLMLoss(form_of_logits(head.weight, context.ranks, context.mode))
        model.loss_function = loss  # type: ignore[assignment]
        return
    model.register_forward_pre_hook(_refuse_labels, with_kwargs=True)


def _refuse_labels(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("labels") is not None:
        raise PlanError(
            f"{type(model).__name__} cannot compute its own loss from cut logits",
            cause="its loss is not the one of next tokens, which is known to be right for them",
            fix='parallelize(..., logits="whole"), or compute a loss of the cut logits yourself',
        )
