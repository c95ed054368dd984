"""`parallelize_context`: the rows of a model cut over the ranks of a mesh, in place."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from cai_mesh.attention import MaskedParts, masked_attention, route_attention
from cai_mesh.comm import AnyMesh, ParallelMesh
from cai_mesh.errors import PlanError
from cai_mesh.protocols import AttentionParts, AttentionRule
from cai_mesh.trial import Trial
from cai_tensor_parallel.context.cutting import Cut
from cai_tensor_parallel.context.rules import RULES, RowRanks, check_heads
from cai_tensor_parallel.context.trial import verify_context
from cai_tensor_parallel.trial.verify import on_first_rank, trial_of


def parallelize_context(
    model: nn.Module,
    mesh: AnyMesh,
    *,
    mode: str = "gather",
    attention: AttentionRule = masked_attention,
    parts: type[AttentionParts] = MaskedParts,
    trial: Trial | None = None,
) -> nn.Module:
    """Let a model of transformers be given parts of rows, of which the ranks of `cp` have all together.

    Each rank calls the model with what `cut_batch` returns: its tokens, their positions in whole rows, and where
    documents begin. Attention sees whole rows, and every other layer its tokens alone. Parameters are whole on every
    rank; gradients are those of a rank's tokens, and ranks of `cp` reduce them as data ranks do: `shard_optimizer` and
    `shard_module` of cai-zero know them, another loop sums over `mesh.group("cp")`. Meta-device models are fine.

    First a small model of the same kind is given whole rows and parts of them: one in which something else than
    attention looks along a row, as a state-space layer, is refused by name.

    Args:
        mesh: a mesh with a `cp` axis.
        mode: "gather", keys and values come to every rank (LLaMA 3, arXiv:2407.21783); "ulysses", ranks exchange
            tokens for heads (arXiv:2309.14509), where heads divide; or "ring", keys and values go from rank to rank
            (arXiv:2310.01889).
        attention: the attention of one rank, to which the last query stands at the last key; see `AttentionRule`.
        parts: the class of the attention of one rank to some keys at a time, for "ring".
        trial: a small model of the same kind; None: made of the model's transformers config.

    Returns the model; as it was where `cp` has one rank. Raises `PlanError` for another mode, heads that do not divide,
    a model whose attention cannot be exchanged, or one that looks along rows otherwise.
    """
    mesh = ParallelMesh.of(mesh)
    if mode not in RULES:
        raise PlanError("unknown mode of a context", got=mode, expected=" or ".join(RULES))
    group = mesh.group("cp")
    if group is None:
        return model
    heads = getattr(getattr(model, "config", None), "num_attention_heads", None)
    if mode == "ulysses" and isinstance(heads, int):
        check_heads(heads, mesh.degree(("cp", "tp")))
    small = trial or trial_of(model, labelled=False)
    if small is None:
        raise PlanError(
            "nothing shows that rows of this model can be cut over ranks",
            got=type(model).__name__,
            expected="a model of transformers, or one with a `trial`",
        )
    on_first_rank(group, lambda: verify_context(small) or {})
    row_cut = Cut(mesh.degree("cp"), mesh.index("cp"))
    ranks = RowRanks(group, row_cut, attention, parts)
    route_attention(model, partial(RULES[mode], ranks))
    model.register_forward_pre_hook(_check_inputs, with_kwargs=True)
    return model


def _check_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call in which the model would count positions, pass over a mask, or shift labels of a rank's tokens."""
    if kwargs.get("position_ids") is None:
        raise PlanError(
            f"{type(model).__name__} has rows over ranks and was called without position_ids",
            cause="it would count a rank's tokens from 0 on",
            fix="call it with what cut_batch returns",
        )
    if kwargs.get("attention_mask") is not None:
        raise PlanError(
            f"{type(model).__name__} has rows over ranks and takes no mask",
            got=f"attention_mask {tuple(kwargs['attention_mask'].shape)}",
            cause="it would be of this rank's tokens, and transformers leaves it out where attention is exchanged",
            fix="give the mask to cut_batch, which makes documents of it",
        )
    config = getattr(model, "config", None)
    asks = kwargs.get("output_router_logits", getattr(config, "output_router_logits", False))
    if kwargs.get("labels") is not None and asks:
        raise PlanError(
            f"{type(model).__name__} has rows over ranks and was asked for the loss of routers",
            cause="it would be of a rank's tokens alone, and it is no sum over tokens",
            fix="call it with output_router_logits=False, or leave labels out and add a loss of your own",
        )
    if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
        raise PlanError(
            f"{type(model).__name__} has rows over ranks and was called with labels",
            cause="it would shift them within a rank's tokens, whose last ones are followed by another rank's",
            fix="give it shift_labels of cut_batch beside them, or compare its logits with those",
        )
