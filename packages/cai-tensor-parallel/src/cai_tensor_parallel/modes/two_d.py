"""2d and 2.5d tensor parallelism: a linear layer as products of blocks on a q x q grid of ranks (SUMMA).

Van de Geijn and Watts, "SUMMA: Scalable Universal Matrix Multiplication Algorithm", 1997; for transformers Xu and You,
"An Efficient 2D Method for Training Super-Large Deep Learning Models" (Optimus, arXiv:2104.05343), and with copies of
the weights over a depth Wang et al., "Tesseract" (arXiv:2105.14500).

Rank (i, j) holds x_ij [T/q, in/q], the weight's block W_ij [out/q, in/q] and makes y_ij [T/q, out/q]:

    y_ij  = sum over l of x_il W_jl^T      W_lj goes to all of column j, the product is summed at rank (i, l)
    dx_ij = sum over l of dy_il W_lj       dy_il goes to all of row i, W_lj to all of column j
    dW_ij = sum over l of dy_li^T x_lj     from the same dy_il, summed at rank (l, j); and over the depth

With T, in and out of the whole layer a rank so receives (q-1)/q^2 x (2 T out + 3 in out) numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cai_mesh.comm import Members, start_broadcast, start_sum, start_sum_at
from cai_mesh.gradients import TRANSPOSED, Ready
from cai_mesh.protocols import TensorHandle
from cai_tensor_parallel.modes.summed import Summed, Tensors


@dataclass(frozen=True)
class Summa(Summed):
    """A linear layer on a grid of ranks.

    Args:
        rows: the ranks of this one's column, which differ in `tp_row`.
        cols: the ranks of this one's row, which differ in `tp_col`.
        depth: ranks with the same weights and other samples (None: there are none).
        samples: all ranks that differ in their samples and not in their features.
        outs: output features of every part.
    """

    rows: Members
    cols: Members
    depth: Members | None
    samples: Members
    outs: tuple[int, ...]

    @property
    def key(self) -> str:
        return f"summa of {self.samples.name} and {self.cols.name}, {self.products.key}"

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Tensors]:
        """x [..., in/q] -> [..., out/q]; saves x."""
        local_sum, before = None, None
        for number, part in self._weights(weight):
            product, _ = self.products.forward(x, part, None)
            summing = start_sum_at(product, number, self.cols)
            local_sum = summing if number == self.cols.rank else local_sum
            if before is not None:
                before.wait()
            before = summing
        assert local_sum is not None and before is not None
        before.wait()
        y = local_sum.wait()
        return (y if bias is None else y + bias), (x,)

    def backward(
        self,
        dy: torch.Tensor,
        weight: torch.Tensor,
        saved: Tensors,
        *,
        needs_input: bool,
        needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[TensorHandle, Tensors, torch.Tensor | None]:
        bias = start_sum(dy.flatten(0, -2).sum(0), self.samples) if needs_bias else None
        dx, local_sum, before = None, None, None
        gradients = _panels(dy.contiguous(), -1, self.outs, self.cols)
        for (number, dy_part), (_, part) in zip(gradients, self._weights(weight), strict=True):
            product, operands, _ = self.products.backward(
                dy_part, part, saved, needs_input=needs_input, needs_weight=needs_weight, needs_bias=False
            )
            if product is not None:
                dx = product if dx is None else dx.add_(product)
            if not needs_weight:
                continue
            summing = start_sum_at(self.part_of_sum(operands, part.shape, part), number, self.rows)
            local_sum = summing if number == self.rows.rank else local_sum
            if before is not None:
                before.wait()
            before = summing
        return Ready(dx), self._over_depth(local_sum, before), None if bias is None else bias.wait()

    def _over_depth(self, local_sum: TensorHandle | None, last: TensorHandle | None) -> Tensors:
        if local_sum is None or last is None:
            return ()
        last.wait()
        summed = local_sum.wait()
        assert summed is not None
        return (summed if self.depth is None else start_sum(summed, self.depth).wait(),)

    def _weights(self, weight: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The blocks of this rank's column, one after the other."""
        return _panels(weight, int(self.products is TRANSPOSED), self.outs, self.rows)


def _panels(
    panel: torch.Tensor, dim: int, sizes: tuple[int, ...], ranks: Members
) -> Iterator[tuple[int, torch.Tensor]]:
    """(number, what that rank holds) for every rank; while one is used the next is under way.

    Args:
        panel: this rank's part, contiguous.
        dim: the dimension in which the parts have the lengths `sizes`.
    """

    def start(number: int) -> TensorHandle:
        if number == ranks.rank:
            return start_broadcast(panel, number, ranks)
        shape = list(panel.shape)
        shape[dim] = sizes[number]
        return start_broadcast(panel.new_empty(shape), number, ranks)

    coming: TensorHandle = start(0)
    for number in range(ranks.size):
        part = coming.wait()
        assert part is not None
        if number + 1 < ranks.size:
            coming = start(number + 1)
        yield number, part
