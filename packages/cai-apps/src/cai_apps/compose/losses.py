"""Losses that know how their inputs are cut over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from cai_kernels import CrossEntropyParts, cross_entropy_gradient, cross_entropy_parts
from cai_kernels.swap import Logits
from cai_mesh.comm import all_reduce, gather_from
from cai_tensor_parallel import (
    ColumnMaths,
    ShardedLogits,
    TorchChunks,
    head_log_probs,
    sharded_logits,
    vocab_parallel_cross_entropy,
)

IGNORED = -100
"""The label of a token that has no target."""


class KernelColumns:
    """`cai_tensor_parallel.ColumnMaths` by kernels: logits are read once, and once more in backward.

    Their gradient is written over them: of a model's step nobody keeps the logits, and they are large.
    """

    def scan(
        self, logits: Tensor, target: Tensor, *, vocab_start: int, ignore_index: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        column_parts = cross_entropy_parts(logits, target, vocab_start=vocab_start, ignore_index=ignore_index)
        return column_parts.maximum, column_parts.sum_exp, column_parts.target_logit

    def gradient(
        self,
        logits: Tensor,
        target: Tensor,
        maximum: Tensor,
        sum_exp: Tensor,
        dloss: Tensor,
        *,
        vocab_start: int,
    ) -> Tensor:
        parts = CrossEntropyParts(maximum, sum_exp, maximum, maximum)
        columns = (vocab_start, vocab_start + logits.shape[-1])
        dlogits = cross_entropy_gradient(logits, target, parts, dloss, vocab=columns, out=logits.detach())
        torch.autograd.graph.increment_version(logits)
        return dlogits


class KernelChunks(TorchChunks):
    """`cai_tensor_parallel.ChunkMaths` by kernels: a chunk's logits are read once, and once more in backward.

    Kernels have no entropy of some columns: that is torch's.
    """

    def scan(
        self,
        logits: Tensor,
        target: Tensor,
        *,
        first: int,
        ignore_index: int,
        softcap: float | None,
        entropy: bool,
    ) -> Tensor:
        options: dict[str, Any] = {"ignore_index": ignore_index, "softcap": softcap}
        if entropy or not logits.shape[1]:
            return super().scan(logits, target, first=first, entropy=entropy, **options)
        return torch.stack(cross_entropy_parts(logits, target, vocab_start=first, **options))

    def write_gradient(
        self,
        logits: Tensor,
        target: Tensor,
        stats: Tensor,
        upstream: Tensor,
        *,
        first: int,
        softcap: float | None,
    ) -> None:
        if len(upstream) == 2 or not logits.shape[1]:
            super().write_gradient(logits, target, stats, upstream, first=first, softcap=softcap)
            return
        maximum, total, _ = (part.contiguous() for part in stats)
        parts = CrossEntropyParts(maximum, total, maximum, maximum)
        columns = (first, first + logits.shape[1])
        cross_entropy_gradient(
            logits, target, parts, -upstream[0], vocab=columns, softcap=softcap, out=logits
        )


@dataclass(frozen=True)
class NextTokenLoss:
    """Cross-entropy of next tokens, summed.

    Args:
        form: the way in which logits are cut over tensor-parallel ranks.
        kernels: whether cut logits go through kernels; "auto": on GPUs, but for float64, which Triton lacks.
    """

    form: ShardedLogits
    kernels: Literal["auto", "on", "off"] = "auto"

    @classmethod
    def of(
        cls,
        model: nn.Module,
        mesh: DeviceMesh,
        mode: str = "1d",
        kernels: Literal["auto", "on", "off"] = "auto",
    ) -> NextTokenLoss:
        """Return the loss for a causal language model of transformers that `parallelize` has cut."""
        return cls(sharded_logits(model, mesh, mode=mode), kernels)

    def __call__(self, output: Any, labels: Tensor) -> Tensor:
        """Return the loss of each place's own label, which is its next token.

        Args:
            output: its `logits` [B, S, V] are in that form.
            labels: int64 [B, S]; -100: no target.

        Returns a scalar, float32 or wider.
        """
        return self.form.summed(
            self._losses(output.logits.flatten(0, 1), self.form.own(labels).flatten(), "sum")
        )

    def log_probs(self, output: Any, labels: Tensor, places: Tensor) -> Tensor:
        """Return the log-probability of the label at some places of this rank's samples, 0 where there is none.

        Logits that are not formed yet are of these places alone; a chunk of them exists at a time, over ranks too.

        Args:
            output: its `logits` [b, S, V] are in that form.
            labels: int64 [b, S], those of this rank's samples (`form.own`); -100: no target.
            places: int64 [b, K], from 0 to S - 1.

        Returns [b, K], float32 or wider, used alike on the ranks that share the vocabulary.
        """
        logits = output.logits.flatten(0, 1)
        waits = isinstance(logits, Logits) and logits.pending()
        if self.form.columns is not None and not waits:  # to choose among logits would be a copy
            return -self._losses(logits, labels.flatten(), "none").view(labels.shape).gather(1, places)
        first = labels.shape[1] * torch.arange(len(labels), device=places.device)
        chosen = logits.index_select(0, (first[:, None] + places).flatten())
        return self._rows(chosen, labels.gather(1, places).flatten()).view(places.shape)

    def _rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the log-probability of the target of each row of logits, before they are formed where they wait."""
        if self.form.columns is None:
            return -self._losses(logits, target, "none")
        assert isinstance(logits, Logits)

        def question(head: nn.Module, hidden: Tensor, softcap: float | None) -> Tensor:
            maths = KernelChunks() if self.runs_kernels(hidden) else None
            log_probs = head_log_probs(
                head, hidden, target, ignore_index=IGNORED, softcap=softcap, maths=maths
            )
            assert isinstance(log_probs, Tensor)
            return log_probs

        answer = logits.answer(question)
        return -self._losses(logits.form(), target, "none") if answer is None else answer

    def _losses(self, logits: Tensor, target: Tensor, reduction: Literal["sum", "none"]) -> Tensor:
        """Return the cross-entropy of rows of logits, a scalar or one number a row."""
        if self.form.columns is None:
            wide = logits if logits.dtype == torch.float64 else logits.float()
            return F.cross_entropy(wide, target, ignore_index=IGNORED, reduction=reduction)
        return vocab_parallel_cross_entropy(
            logits,
            target,
            self.form.columns,
            vocab_start=self.form.start,
            ignore_index=IGNORED,
            reduction=reduction,
            maths=self._maths(logits),
        )

    def correct(self, output: Any, labels: Tensor) -> Tensor:
        """Return how many labels are the likeliest token at their place, of all samples: a float64 scalar."""
        target = self.form.own(labels)
        right = (self.likeliest(output) == target) & (target != IGNORED)
        return self.form.summed(right.sum(dtype=torch.float64))

    def predicted(self, output: Any) -> Tensor:
        """Return the likeliest token at each place of all samples, int64 [B, S]."""
        return gather_from(self.likeliest(output), 0, self.form.samples)

    def likeliest(self, output: Any) -> Tensor:
        """Return the token with the highest logit at each place of this rank's samples, the first of equal ones.

        Ranks exchange two numbers a place; logits stay as they are.
        """
        logits = output.logits
        if self.form.columns is None:
            return logits.argmax(-1)
        wide = torch.promote_types(logits.dtype, torch.float32)
        if logits.shape[-1]:
            top, place = logits.max(-1)
            top, place = top.to(wide), place + self.form.start
        else:
            top = logits.new_full(logits.shape[:-1], -math.inf, dtype=wide)
            place = torch.zeros_like(top, dtype=torch.int64)
        greatest = top.clone()
        all_reduce(greatest, self.form.columns, op="max").wait()
        elsewhere = (top != greatest) & ~greatest.isnan()  # of what is not a number any place will do
        place = place.masked_fill(elsewhere, torch.iinfo(torch.int64).max)
        all_reduce(place, self.form.columns, op="min").wait()
        return place

    def runs_kernels(self, tensor: Tensor) -> bool:
        """Return whether kernels compute with a tensor's kind of numbers where it is."""
        able = self.kernels == "on" or (tensor.is_cuda and tensor.dtype != torch.float64)
        return able and self.kernels != "off"

    def _maths(self, logits: Tensor) -> ColumnMaths | None:
        return KernelColumns() if self.runs_kernels(logits) and logits.shape[-1] else None
