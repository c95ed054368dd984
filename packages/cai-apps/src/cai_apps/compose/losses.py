"""Losses that know how their inputs are cut over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from cai_mesh.comm import group
from cai_tensor_parallel import vocab_parallel_cross_entropy, vocab_start


@dataclass(frozen=True)
class NextTokenLoss:
    """Cross-entropy of next tokens, summed.

    Args:
        group: tensor-parallel ranks whose logits are cut by vocabulary (None: logits are unsharded).
        vocab_start: this rank's first column.
    """

    group: dist.ProcessGroup | None
    vocab_start: int

    @classmethod
    def of(cls, model: nn.Module, mesh: DeviceMesh) -> NextTokenLoss:
        """For a causal language model of transformers that `parallelize` has cut."""
        head = model.get_output_embeddings()  # type: ignore[operator]
        weight = getattr(head, "weight", None)  # none on stages without an output layer
        return cls(group(mesh, "tp"), vocab_start(weight) if weight is not None else 0)

    def __call__(self, output: Any, labels: Tensor) -> Tensor:
        """`output.logits` [B, S, V/tp] and labels [B, S] (-100: no target) -> scalar, float32 or wider."""
        logits = output.logits[:, :-1].flatten(0, 1)
        labels = labels[:, 1:].flatten()
        if self.group is None:
            wide = logits if logits.dtype == torch.float64 else logits.float()
            return F.cross_entropy(wide, labels, reduction="sum")
        return vocab_parallel_cross_entropy(
            logits, labels, self.group, vocab_start=self.vocab_start, reduction="sum"
        )
