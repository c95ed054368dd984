"""A batch of whole rows, cut so that every rank has its tokens of each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from cai_mesh.comm import AnyMesh, ParallelMesh, all_gather
from cai_mesh.errors import PlanError
from cai_tensor_parallel.context.cutting import Cut
from cai_tensor_parallel.context.documents import cut_of

IGNORED = -100
"""The label of a token that no loss counts, as in transformers."""


def cut_batch(batch: Mapping[str, Tensor], mesh: AnyMesh) -> dict[str, Tensor]:
    """Return this rank's tokens of a batch of whole rows, for a model of `parallelize_context`.

    Rows that do not divide get tokens at their end that are a document of their own and that no loss counts.

    Args:
        batch: the same on all ranks of `cp`: `input_ids` [B, S], and where there are, `labels` [B, S] as causal models
            of transformers have them, or in their place `shift_labels` [B, S], the token that follows each, or -100
            where none is to be learned; `position_ids` [B, S] or [n, B, S]; `cu_seqlens` [B, D + 1] int32,
            where documents begin and rows end; `attention_mask` [B, S] of ones, and of zeros where a row is filled up.
        mesh: the mesh of the model.

    Returns `input_ids` and `position_ids` [B, S / cp]; `cu_seqlens` of whole rows, where there are documents; and for
    `labels` `shift_labels` [B, S / cp], the token that follows each: compare logits with them as they are,
    `cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum")`, or give a model of transformers both
    `labels` and `shift_labels`. Raises `PlanError` for what it does not know how to cut.
    """
    mesh = ParallelMesh.of(mesh)
    names = {"input_ids", "labels", "shift_labels", "position_ids", "cu_seqlens", "attention_mask"}
    if unknown := sorted(set(batch) - names):
        raise PlanError(
            "a batch has what cut_batch does not know how to cut",
            got=", ".join(unknown),
            expected=", ".join(sorted(names)),
            fix="cut numbers of tokens by own_rows, or leave it out",
        )
    ids = batch["input_ids"]
    row_cut = Cut(mesh.degree("cp"), mesh.index("cp"))
    added = -ids.shape[1] % row_cut.multiple
    starts = _documents(batch, added)
    places = batch.get("position_ids")
    if places is None:
        places = _places(batch.get("cu_seqlens"), ids)
    documents = cut_of(row_cut, starts, ids.shape[1] + added, batch=-2)
    parts = {"input_ids": documents.own(F.pad(ids, (0, added)), -1)}
    parts["position_ids"] = documents.own(F.pad(places, (0, added)), -1)
    if starts is not None:
        parts["cu_seqlens"] = starts
    following = _following(batch)
    if following is not None:
        parts["shift_labels"] = documents.own(F.pad(following, (0, added), value=IGNORED), -1)
    return parts


def own_rows(rows: Tensor, mesh: AnyMesh, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return this rank's part of whole rows, [B, S] to [B, S / cp], in the order of `cut_batch`.

    Args:
        rows: numbers of the tokens of whole rows; S divides by 2 cp.
        mesh: the mesh of the model.
        cu_seqlens: those of `cut_batch`; None: a row is one document.
    """
    mesh = ParallelMesh.of(mesh)
    return cut_of(Cut(mesh.degree("cp"), mesh.index("cp")), cu_seqlens, rows.shape[1]).own(rows, 1)


def whole_rows(part: Tensor, mesh: AnyMesh, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return whole rows of what the ranks of `cp` have of each token, [B, S / cp] to [B, S]. Collective, no gradient.

    Args:
        part: this rank's, in the order of `cut_batch`.
        mesh: the mesh of the model.
        cu_seqlens: those of `cut_batch`; None: a row is one document.
    """
    mesh = ParallelMesh.of(mesh)
    gathered = all_gather(part.detach(), 1, mesh.group("cp"))
    return cut_of(Cut(mesh.degree("cp"), mesh.index("cp")), cu_seqlens, gathered.shape[1]).in_order(
        gathered, 1
    )


def _following(batch: Mapping[str, Tensor]) -> Tensor | None:
    """Return the label of each token's place, [B, S]: the token that follows."""
    if "labels" in batch and "shift_labels" in batch:
        raise PlanError(
            "a batch has labels twice",
            got="labels and shift_labels",
            fix="leave out one of them: shift_labels are those of the place they stand at",
        )
    labels = batch.get("labels")
    return batch.get("shift_labels") if labels is None else F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _places(starts: Tensor | None, ids: Tensor) -> Tensor:
    """Positions that count from each document's beginning; of whole rows where there are none."""
    places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    if starts is None:
        return places
    document = torch.searchsorted(starts.long(), places.contiguous(), right=True) - 1
    return places - starts.long().gather(1, document)


def _documents(batch: Mapping[str, Tensor], added: int) -> Tensor | None:
    """Where documents begin, int32 [B, D + 1], with what fills rows up as documents of its own; None: one a row."""
    ids, mask, starts = batch["input_ids"], batch.get("attention_mask"), batch.get("cu_seqlens")
    length = ids.shape[1]
    if mask is not None and mask.shape != ids.shape:
        raise PlanError(
            "a mask of pairs of tokens cannot be cut",
            got=f"attention_mask {tuple(mask.shape)}",
            expected=f"{tuple(ids.shape)}, of ones and zeros, or cu_seqlens",
        )
    if mask is not None and not bool(mask.bool().all()):
        if starts is not None:
            raise PlanError(
                "a batch has documents and a mask of padding",
                fix="let cu_seqlens say what is padding, as a document of its own",
            )
        starts = _changes(mask.bool())
    if starts is None and not added:
        return None
    if starts is None:
        starts = ids.new_tensor([[0, length]], dtype=torch.int32).expand(len(ids), 2)
    return F.pad(starts, (0, 1), value=length + added).int() if added else starts.int()


def _changes(mask: Tensor) -> Tensor:
    """Where a mask's runs of ones and of zeros begin, int32 [B, runs + 1], rows filled up with their length."""
    rows, length = mask.shape
    begins = [[0, *(mask[row].diff().nonzero().flatten() + 1).tolist()] for row in range(rows)]
    most = max(map(len, begins))
    filled = [begin + [length] * (most + 1 - len(begin)) for begin in begins]
    return torch.tensor(filled, dtype=torch.int32, device=mask.device)
