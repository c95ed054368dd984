"""3d tensor parallelism: a linear layer as products of blocks on an l x l x l cube of ranks.

Agarwal et al., "A three-dimensional approach to parallel matrix multiplication", 1995; for transformers Bian et al.,
"Maximizing Parallelism in Distributed Training for Huge Neural Networks" (arXiv:2105.14450).

A column-cut layer reads x with features over k and makes y with features over j; a row-cut one from j to k. With a the
axis of the input's features, c that of the output's, and i the third:

    rank (i, a, c) holds x [T/l^2 over (i, c), in/l over a], W [out/l over c, in/l^2 over (a, i)]
    y  = x gathered over c  times  W gathered over i, transposed;  summed over a, of which every rank keeps its samples
    dx = dy gathered over a  times  W gathered over i;             summed over c, likewise
    dW = dy gathered over a, transposed, times x gathered over c;  summed over i, likewise

With T, in and out of the whole layer a rank so receives (l-1)/l^3 x (3 T in + 2 T out + 3 in out) numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cai_mesh.comm import Members, gathered, start_scatter_sum, start_sum
from cai_mesh.gradients import TRANSPOSED, Ready
from cai_mesh.protocols import TensorHandle
from cai_tensor_parallel.modes.summed import Summed, Tensors


@dataclass(frozen=True)
class Cube(Summed):
    """A linear layer on a cube of ranks. Activations are [samples, ..., features].

    Args:
        ins: ranks along the axis of the input's features, which hold other samples of the output.
        outs: ranks along the axis of the output's features, which hold other samples of the input.
        thirds: ranks that hold the other parts of this rank's part of the weight.
        samples: all ranks that hold the same features of the output, of other samples.
    """

    ins: Members
    outs: Members
    thirds: Members
    samples: Members

    @property
    def key(self) -> str:
        return f"cube of {self.ins.name}, {self.outs.name} and {self.thirds.name}, {self.products.key}"

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Tensors]:
        """x [samples/l^2, ..., in/l] -> [samples/l^2, ..., out/l]; saves x."""
        product, _ = self.products.forward(gathered(x, 0, self.outs), self._whole(weight), None)
        y = start_scatter_sum(product, 0, self.ins).wait()
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
        dy_all = gathered(dy, 0, self.ins)
        dx: TensorHandle = Ready(None)
        if needs_input:
            product, _, _ = self.products.backward(
                dy_all, self._whole(weight), saved, needs_input=True, needs_weight=False, needs_bias=False
            )
            assert product is not None
            dx = start_scatter_sum(product, 0, self.outs)
        dw: Tensors = ()
        if needs_weight:
            shape = list(weight.shape)
            shape[self._dim] *= self.thirds.size
            part = self.part_of_sum((dy_all, gathered(saved[0], 0, self.outs)), shape, weight)
            dw = (start_scatter_sum(part, self._dim, self.thirds).wait(),)
        return dx, dw, None if bias is None else bias.wait()

    @property
    def _dim(self) -> int:
        """The weight's dimension of input features, in which its parts are cut once more."""
        return int(self.products is not TRANSPOSED)

    def _whole(self, weight: torch.Tensor) -> torch.Tensor:
        return gathered(weight, self._dim, self.thirds)
