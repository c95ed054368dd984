"""Ranks ask each other for embeddings: ids out, embeddings back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from cai_mesh import comm
from cai_mesh.comm import all_to_all_into
from cai_mesh.errors import DataError


@dataclass(frozen=True)
class Questions:
    """The ids that all ranks ask of this one, and those it asked of them.

    Args:
        ids: asked of this rank, int64 [K], those of rank 0 first; each rank's in the order of its bags.
        bags: the bag of each id, numbered through the bags of all ranks, int64 [K].
        bag_counts: bags of every rank.
        received: ids from every rank.
        sent: ids to every rank.
        order: the places of this rank's ids in the order in which they went out, int64 [sum(sent)].
    """

    ids: torch.Tensor
    bags: torch.Tensor
    bag_counts: list[int]
    received: list[int]
    sent: list[int]
    order: torch.Tensor

    def offsets(self) -> torch.Tensor:
        """Return the first place of each bag in `ids`, int64 [sum(bag_counts)]."""
        lengths = torch.bincount(self.bags, minlength=sum(self.bag_counts))
        return lengths.cumsum(0) - lengths


def ask(
    ids: torch.Tensor,
    bags: torch.Tensor,
    bag_count: int,
    rows: int,
    group: dist.ProcessGroup,
    *,
    rows_per_rank: int | None,
) -> Questions:
    """Send every id to the rank that holds its row, or to all ranks. Collective; the host waits once, for the sizes.

    Args:
        ids: int64 [T], on the device of the group.
        bags: the bag of each, int64 [T], ascending.
        bag_count: bags of this rank.
        rows: rows of the table.
        group: the ranks that share the table.
        rows_per_rank: rank r holds rows from r * rows_per_rank on; None: every rank holds a part of every row.

    Raises `DataError` on every rank when one has ids outside the table.
    """
    world = group.size()
    if rows_per_rank is None:
        order = torch.arange(len(ids), device=ids.device).repeat(world)
        counts = torch.full((world,), len(ids), device=ids.device)
    else:
        owner = (ids // rows_per_rank).clamp(0, world - 1)
        order = owner.argsort(stable=True)
        counts = torch.bincount(owner, minlength=world)
    invalid = ((ids < 0) | (ids >= rows)).any()
    sizes = torch.stack([counts, torch.full_like(counts, bag_count)], 1).masked_fill(invalid, -1)
    theirs = torch.empty_like(sizes)
    all_to_all_into(theirs, sizes, group).wait()
    sent, incoming_sizes = torch.stack([sizes, theirs]).tolist()
    if any(count < 0 for count, _ in incoming_sizes):
        raise DataError(
            "ids outside the embedding table",
            got=f"rank {next(rank for rank, (count, _) in enumerate(incoming_sizes) if count < 0)} "
            f"of {world} has such ids",
            expected=f"0 to {rows - 1}",
        )
    sent, received = [count for count, _ in sent], [count for count, _ in incoming_sizes]
    outgoing = torch.stack([ids, bags], 1)[order]
    incoming = torch.empty(sum(received), 2, dtype=torch.int64, device=ids.device)
    all_to_all_into(incoming, outgoing, group, out_splits=received, in_splits=sent).wait()
    bag_counts = [count for _, count in incoming_sizes]
    first = torch.tensor([sum(bag_counts[:rank]) for rank in range(world)]).repeat_interleave(
        torch.tensor(received)
    )
    numbered = incoming[:, 1] + first.to(ids.device, non_blocking=True)
    return Questions(incoming[:, 0].contiguous(), numbered, bag_counts, received, sent, order)


def send_weights(weights: torch.Tensor, questions: Questions, group: dist.ProcessGroup) -> torch.Tensor:
    """The weights [K] that belong to `questions.ids`, from each rank's own [T]; differentiable."""
    return comm.all_to_all(
        weights[questions.order], group, out_splits=questions.received, in_splits=questions.sent
    )


def answer_rows(rows: torch.Tensor, questions: Questions, group: dist.ProcessGroup) -> torch.Tensor:
    """Send each id's row [K, D] back; returns [T, D] in the order of this rank's ids."""
    back = comm.all_to_all(rows, group, out_splits=questions.sent, in_splits=questions.received)
    return back[questions.order.argsort()]


def answer_sums(sums: torch.Tensor, questions: Questions, group: dist.ProcessGroup) -> torch.Tensor:
    """Send every rank the partial sums [sum(bag_counts), D] of its bags; returns the sums [B, D] of this rank's."""
    world, bag_count = group.size(), questions.bag_counts[group.rank()]
    back = comm.all_to_all(sums, group, out_splits=[bag_count] * world, in_splits=questions.bag_counts)
    return back.view(world, bag_count, sums.shape[1]).sum(0)


def answer_columns(
    parts: torch.Tensor, widths: list[int], questions: Questions, group: dist.ProcessGroup
) -> torch.Tensor:
    """Send every rank the columns [sum(bag_counts), widths[rank]] of its bags; returns [B, sum(widths)]."""
    bag_count, width = questions.bag_counts[group.rank()], parts.shape[1]
    back = comm.all_to_all(
        parts.reshape(-1),
        group,
        out_splits=[bag_count * columns for columns in widths],
        in_splits=[count * width for count in questions.bag_counts],
    )
    split = back.split([bag_count * columns for columns in widths])
    return torch.cat([part.view(bag_count, columns) for part, columns in zip(split, widths, strict=True)], 1)
