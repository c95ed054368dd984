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
from cai_mesh.comm import all_reduce, gather_from
from cai_tensor_parallel import ColumnMaths, ShardedLogits, sharded_logits, vocab_parallel_cross_entropy

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

        Logits that are not formed yet are of these places alone; a chunk of them exists at a time.

        Args:
            output: its `logits` [b, S, V] are in that form.
            labels: int64 [b, S], those of this rank's samples (`form.own`); -100: no target.
            places: int64 [b, K], from 0 to S - 1.

        Returns [b, K], float32 or wider, used alike on the ranks that share the vocabulary.
        """
        logits = output.logits.flatten(0, 1)
        if self.form.columns is not None:  # they are there: to choose among them would be a copy
            return -self._losses(logits, labels.flatten(), "none").view(labels.shape).gather(1, places)
        first = labels.shape[1] * torch.arange(len(labels), device=places.device)
        chosen = logits.index_select(0, (first[:, None] + places).flatten())
        return -self._losses(chosen, labels.gather(1, places).flatten(), "none").view(places.shape)

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

    def _maths(self, logits: Tensor) -> ColumnMaths | None:
        able = self.kernels == "on" or (logits.is_cuda and logits.dtype != torch.float64)
        return KernelColumns() if able and self.kernels != "off" and logits.shape[-1] else None
