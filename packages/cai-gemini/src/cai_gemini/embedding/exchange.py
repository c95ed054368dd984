"""How ranks ask each other for embeddings: ids out, embeddings back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from cai_mesh import comm
from cai_mesh.comm import all_to_all_into
from cai_mesh.errors import DataError


@dataclass(frozen=True)
class Questions:
    """What all ranks ask of this one, and what it asked of them.

    Args:
        ids: asked of this rank, int64 [K], those of rank 0 first; each rank's in the order of its bags.
        bags: the bag of each id, numbered through the bags of all ranks, int64 [K].
        bag_counts: bags of every rank.
        received: ids from every rank.
        sent: ids to every rank.
        order: which of this rank's ids went out, in the order in which they did, int64 [sum(sent)].
    """

    ids: torch.Tensor
    bags: torch.Tensor
    bag_counts: list[int]
    received: list[int]
    sent: list[int]
    order: torch.Tensor

    def offsets(self) -> torch.Tensor:
        """Where each bag begins in `ids`, int64 [sum(bag_counts)]."""
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
        rows: of the table.
        group: of the ranks that share the table.
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
    sent, known = torch.stack([sizes, theirs]).tolist()
    if any(count < 0 for count, _ in known):
        raise DataError(
            "ids outside the embedding table",
            got=f"rank {next(rank for rank, (count, _) in enumerate(known) if count < 0)} of {world} has such ids",
            expected=f"0 to {rows - 1}",
        )
    sent, received = [count for count, _ in sent], [count for count, _ in known]
    outgoing = torch.stack([ids, bags], 1)[order]
    incoming = torch.empty(sum(received), 2, dtype=torch.int64, device=ids.device)
    all_to_all_into(incoming, outgoing, group, out_splits=received, in_splits=sent).wait()
    bag_counts = [count for _, count in known]
    first = torch.tensor([sum(bag_counts[:rank]) for rank in range(world)]).repeat_interleave(
        torch.tensor(received)
    )
    numbered = incoming[:, 1] + first.to(ids.device, non_blocking=True)
    return Questions(incoming[:, 0].contiguous(), numbered, bag_counts, received, sent, order)


def send_weights(weights: torch.Tensor, asked: Questions, group: dist.ProcessGroup) -> torch.Tensor:
    """The weights [K] that belong to `asked.ids`, from each rank's own [T]; differentiable."""
    return comm.all_to_all(weights[asked.order], group, out_splits=asked.received, in_splits=asked.sent)


def answer_rows(rows: torch.Tensor, asked: Questions, group: dist.ProcessGroup) -> torch.Tensor:
    """Send each id's row [K, D] back; returns [T, D] in the order of this rank's ids."""
    back = comm.all_to_all(rows, group, out_splits=asked.sent, in_splits=asked.received)
    return back[asked.order.argsort()]


def answer_sums(sums: torch.Tensor, asked: Questions, group: dist.ProcessGroup) -> torch.Tensor:
    """Send every rank the partial sums [sum(bag_counts), D] of its bags; returns the sums [B, D] of this rank's."""
    world, own = group.size(), asked.bag_counts[group.rank()]
    back = comm.all_to_all(sums, group, out_splits=[own] * world, in_splits=asked.bag_counts)
    return back.view(world, own, sums.shape[1]).sum(0)


def answer_columns(
    parts: torch.Tensor, widths: list[int], asked: Questions, group: dist.ProcessGroup
) -> torch.Tensor:
    """Send every rank the columns [sum(bag_counts), widths[rank]] of its bags; returns [B, sum(widths)]."""
    own, width = asked.bag_counts[group.rank()], parts.shape[1]
    back = comm.all_to_all(
        parts.reshape(-1),
        group,
        out_splits=[own * each for each in widths],
        in_splits=[count * width for count in asked.bag_counts],
    )
    split = back.split([own * each for each in widths])
    return torch.cat([part.view(own, each) for part, each in zip(split, widths, strict=True)], 1)
