"""Log-probabilities as a rule of the output layer: what ranks that share a vocabulary say to each other around chunks.

A column-cut output layer makes logits; this rule makes what is wanted of them. So the seam of linear layers sees to the
rest: the gradient of the input is summed over the ranks, that of the weight goes into its chunk, at once or later, and
weights are where they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn

from cai_mesh.comm import Members, start_sum
from cai_mesh.errors import PlanError
from cai_mesh.gradients import Ready, by_rule, routed
from cai_mesh.protocols import TensorHandle
from cai_tensor_parallel.log_probs.chunks import ChunkMaths, TorchChunks, chunk_size, merged
from cai_tensor_parallel.modes.one_d import Column
from cai_tensor_parallel.modes.summed import Summed
from cai_tensor_parallel.modes.vocab import vocab_start

CHUNK_BYTES = 256 << 20
"""Bytes of a rank's part of the logits of a chunk, in float32 (float64 for float64)."""
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class LogProbs(Summed):
    """Log-probabilities [T] of targets in place of a layer's results; with entropies [T, 2].

    Forward exchanges one number a place and then two (with entropies three); backward makes the logits of each chunk
    again and sums the input's gradient once.

    Args:
        ranks: that share the layer.
        target: [T], int64, over the whole vocabulary.
        first: the place of this rank's first column in it.
        ignore_index: the target of places that give 0 and take no gradient.
        softcap: the cap of logits.
        entropy: whether entropies are wanted, too.
        chunk_bytes: see `CHUNK_BYTES`.
        maths: the computations on a chunk's logits.
    """

    ranks: Members
    target: torch.Tensor
    first: int
    ignore_index: int
    softcap: float | None
    entropy: bool
    chunk_bytes: int
    maths: ChunkMaths

    @property
    def key(self) -> str:
        """The weight's gradient is added up before it is handed on, whatever it is of."""
        return f"log-probabilities over {self.ranks.name}"

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Tensors]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        stats = hidden.new_empty((4, hidden.shape[0]), dtype=wide)
        for rows in self._chunks(hidden, weight):
            logits, _ = self.products.forward(hidden[rows], weight, bias)
            stats[:, rows] = self.maths.scan(
                logits,
                self.target[rows],
                first=self.first,
                ignore_index=self.ignore_index,
                softcap=self.softcap,
                entropy=self.entropy,
            )
        maximum = funcol.wait_tensor(funcol.all_reduce(stats[0], "max", self.ranks.name))
        sums = merged(stats, maximum)
        total, aimed, *moment = start_sum(sums if self.entropy else sums[:2], self.ranks).wait().unbind(0)
        log_total, ignored = total.log(), self.target == self.ignore_index
        log_probs = (aimed - maximum - log_total).masked_fill(ignored, 0.0)
        entropy = (
            (log_total - moment[0] / total).masked_fill(ignored, 0.0) if moment else torch.zeros_like(total)
        )
        saved = (hidden, torch.stack((maximum, total, entropy)), *(() if bias is None else (bias,)))
        return (torch.stack((log_probs, entropy), -1) if self.entropy else log_probs), saved

    def backward(
        self, dy: torch.Tensor, weight: torch.Tensor, saved: Tensors, **needs: bool
    ) -> tuple[TensorHandle, Tensors, torch.Tensor | None]:
        hidden, stats, *biases = saved
        bias = biases[0] if biases else None
        upstream = dy.reshape(len(self.target), -1).t().to(stats.dtype)
        upstream = upstream.masked_fill(self.target == self.ignore_index, 0.0)
        dx = torch.zeros_like(hidden) if needs["needs_input"] else None
        wide = torch.promote_types(weight.dtype, torch.float32)
        dw = torch.zeros_like(weight, dtype=wide) if needs["needs_weight"] else None
        db = torch.zeros_like(bias, dtype=wide) if bias is not None and needs["needs_bias"] else None
        for rows in self._chunks(hidden, weight):
            logits, operand = self.products.forward(hidden[rows], weight, bias)
            self.maths.write_gradient(
                logits,
                self.target[rows],
                stats[:, rows],
                upstream[:, rows],
                first=self.first,
                softcap=self.softcap,
            )
            dx_part, operands, db_part = self.products.backward(logits, weight, operand, **needs)
            if dx is not None and dx_part is not None:
                dx[rows] = dx_part
            if dw is not None:
                self.products.write_weight_grad(operands, dw, fresh=False)
            if db is not None and db_part is not None:
                db += db_part
        handle = Ready(None) if dx is None else start_sum(dx, self.ranks)
        return handle, (() if dw is None else (dw,)), None if db is None else db.to(weight.dtype)

    def _chunks(self, hidden: torch.Tensor, weight: torch.Tensor) -> Iterator[slice]:
        """Places of each chunk. Ranks may have other chunks: nothing is exchanged between them."""
        width = torch.promote_types(hidden.dtype, torch.float32).itemsize
        step = chunk_size(weight.shape[0], width, self.chunk_bytes)
        return (slice(start, start + step) for start in range(0, hidden.shape[0], step))


def is_cut_by_columns(head: nn.Module) -> bool:
    """Return whether a linear layer's results are cut over ranks and stay so, in mode 1d: `head_log_probs` takes it."""
    rule = routed(head)
    return isinstance(rule, Column) and not rule.gather


def head_log_probs(
    head: nn.Module,
    hidden: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    entropy: bool = False,
    chunk_bytes: int | None = None,
    maths: ChunkMaths | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of targets under an output layer cut by `parallelize(..., logits="sharded")`, without logits.

    Those of a chunk of places exist at a time, in forward and again in backward; two numbers a place are exchanged
    (Megatron-LM, arXiv:1909.08053, section 3). Collective over the ranks that share the layer, in its weights' sight:
    where those are gathered for a call of the layer, this is called from it.

    Args:
        head: the layer, [V/tp, D] on this rank, in mode 1d.
        hidden: [..., D], its input, whole and alike on these ranks; for a scale of logits, scaled.
        target: [...], int64, over the whole vocabulary, or `ignore_index`. Not checked against the vocabulary.
        softcap: logits become softcap * tanh(logits / softcap).
        entropy: also return the entropy of each distribution.
        chunk_bytes: bytes of a rank's part of a chunk's logits, in float32; None: 256 MiB.
        maths: the computations on a chunk's logits, such as kernels; None: plain torch.

    Returns [...], float32 or wider, 0 where ignored; with `entropy` (log-probabilities, entropies). Alike on these
    ranks, and used alike. Differentiable once, in `hidden` and the layer's parameters. Raises `PlanError` for another
    layer, or shapes that do not fit.
    """
    rule = routed(head)
    if not is_cut_by_columns(head) or not isinstance(rule, Column):
        raise PlanError(
            "log-probabilities over ranks are of an output layer whose columns they share",
            got=f"{type(head).__name__}, {'computed by torch' if rule is None else rule.key}",
            fix='parallelize(model, mesh, logits="sharded") in mode "1d"; else take those of whole logits',
        )
    weight, limit = head.weight, CHUNK_BYTES if chunk_bytes is None else chunk_bytes
    assert isinstance(weight, torch.Tensor)
    if hidden.shape[:-1] != target.shape or hidden.dim() < 2 or limit < 1:
        raise PlanError(
            "hidden states do not fit their targets, or a chunk has no bytes",
            got=f"hidden states {tuple(hidden.shape)}, targets {tuple(target.shape)}, chunk_bytes {limit}",
            expected="[..., D] and [...], at least 1 byte",
        )
    rule_of_chunks = LogProbs(
        rule.products,
        rule.ranks,
        target.reshape(-1),
        vocab_start(weight),
        ignore_index,
        softcap,
        entropy,
        limit,
        maths or TorchChunks(),
    )
    log_probs = by_rule(head, rule_of_chunks, hidden.reshape(-1, hidden.shape[-1]))
    if not entropy:
        return log_probs.view(target.shape)
    return log_probs[:, 0].view(target.shape), log_probs[:, 1].view(target.shape)
