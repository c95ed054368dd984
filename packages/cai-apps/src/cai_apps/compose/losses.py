"""Losses that know how their inputs are cut over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from cai_tensor_parallel import ShardedLogits, sharded_logits, vocab_parallel_cross_entropy


@dataclass(frozen=True)
class NextTokenLoss:
    """Cross-entropy of next tokens, summed.

    Args:
        form: how logits are cut over tensor-parallel ranks.
    """

    form: ShardedLogits

    @classmethod
    def of(cls, model: nn.Module, mesh: DeviceMesh, mode: str = "1d") -> NextTokenLoss:
        """For a causal language model of transformers that `parallelize` has cut."""
        return cls(sharded_logits(model, mesh, mode=mode))

    def __call__(self, output: Any, labels: Tensor) -> Tensor:
        """`output.logits` [B, S, V] in that form and labels [B, S] (-100: no target) -> scalar, float32 or wider."""
        logits = output.logits[:, :-1].flatten(0, 1)
        labels = self.form.own(labels[:, 1:]).flatten()
        if self.form.columns is None:
            wide = logits if logits.dtype == torch.float64 else logits.float()
            return F.cross_entropy(wide, labels, reduction="sum")
        loss = vocab_parallel_cross_entropy(
            logits, labels, self.form.columns, vocab_start=self.form.start, reduction="sum"
        )
        return self.form.summed(loss)
