"""Embedding and logits over a vocabulary cut into consecutive parts, and a language model's loss of cut logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional as F

from cai_mesh.comm import gather_from, reduce_from
from cai_mesh.layout import layout_of
from cai_tensor_parallel.modes.cross_entropy import vocab_parallel_cross_entropy


def vocab_start(weight: torch.Tensor) -> int:
    """First row of the vocabulary a cut table or head holds (0 where it holds none)."""
    segments = layout_of(weight).segments(0)
    return segments[0][0] if segments else 0


def vocab_parallel_embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    vocab_start: int,
    padding_idx: int | None = None,
    vocab_size: int | None = None,
    sparse: bool = False,
) -> torch.Tensor:
    """Look up ids in a table cut by rows.

    Args:
        ids: [...], int64, over the whole vocabulary.
        weight: [V/tp, D], rows `vocab_start` onwards.
        padding_idx: an id of the whole vocabulary whose row gets no gradient.
        vocab_size: V; ids outside raise on every rank as torch's embedding does (on a GPU, in the kernel). None: they
            are not looked for, and give zeros.
        sparse: the gradient of the table is a sparse tensor.

    Returns [..., D]: every rank's rows where it has them, zeros elsewhere, summed over the group.
    """
    rows = weight.shape[0]
    outside = (ids < vocab_start) | (ids >= vocab_start + rows)
    elsewhere = outside if vocab_size is None else outside & (ids >= 0) & (ids < vocab_size)
    local = (ids - vocab_start).masked_fill(elsewhere, 0)  # ids that no rank has stay outside the table
    if padding_idx is not None:
        padding_idx -= vocab_start
        if not 0 <= padding_idx < rows:
            padding_idx = None
    if rows == 0:
        embedded = F.embedding(local, weight.new_zeros(1, weight.shape[1])) + weight.sum()
    else:
        embedded = F.embedding(local, weight, padding_idx, sparse=sparse)
    return reduce_from(embedded.masked_fill(outside.unsqueeze(-1), 0.0), group)


def gather_logits(logits: torch.Tensor, vocab_size: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Whole logits [..., V] from cut ones [..., V/tp]; differentiable, the result used alike on all ranks."""
    if group is None:
        return logits
    widest = -(-vocab_size // group.size())
    padded = F.pad(logits, (0, widest - logits.shape[-1]))
    return gather_from(padded, -1, group)[..., :vocab_size]


@dataclass(frozen=True)
class ShardedLogits:
    """The layout of logits over ranks: [samples of this rank, ..., columns of this rank].

    Args:
        columns: ranks that hold the other columns (None: all are here).
        start: this rank's first column.
        samples: ranks that hold other samples (None: all are here).
    """

    columns: dist.ProcessGroup | None = None
    start: int = 0
    samples: dist.ProcessGroup | None = None

    def own(self, labels: torch.Tensor) -> torch.Tensor:
        """Labels [B, ...] of this rank's samples."""
        return labels if self.samples is None else labels.chunk(self.samples.size())[self.samples.rank()]

    def summed(self, loss: torch.Tensor) -> torch.Tensor:
        """The sum of losses over the samples of all ranks, used alike on all."""
        return reduce_from(loss, self.samples)


class CausalLMLoss:
    """Stands in for a Hugging Face model's `loss_function` when its logits are cut.

    Args:
        form: the ranks over which logits are cut; labels are those of all samples.
    """

    def __init__(self, form: ShardedLogits):
        self.form = form

    def __deepcopy__(self, memo: dict) -> CausalLMLoss:
        return self  # process groups belong to the process

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        """The loss of next-token prediction: mean over targets, or the sum over `num_items_in_batch`."""
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if num_items_in_batch is None:
            num_items_in_batch = (shift_labels != ignore_index).sum()
        loss = vocab_parallel_cross_entropy(
            logits.flatten(0, -2),
            self.form.own(shift_labels).flatten(),
            self.form.columns,
            vocab_start=self.form.start,
            ignore_index=ignore_index,
            reduction="sum",
        )
        return self.form.summed(loss) / num_items_in_batch
