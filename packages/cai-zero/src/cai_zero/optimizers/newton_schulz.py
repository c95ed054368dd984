"""Orthogonalising matrices by Newton-Schulz iterations: the arithmetic of Muon."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cai_mesh.errors import PlanError


@dataclass(frozen=True)
class NewtonSchulz:
    """The iteration to orthogonal matrices: `steps` times X = a X + (b A + c A²) X with A = X Xᵀ, from X of norm 1.

    The coefficients (Jordan et al., "Muon", kellerjordan.github.io/posts/muon) push the singular values into
    about [0.7, 1.2] in five steps, and no closer; (2, -1.5, 0.5) converges to 1 but slowly from small ones.

    Args:
        coefficients: (a, b, c).
        steps: iterations.
        eps: floor of the norm a matrix is divided by.
        dtype: the dtype of the iterations and of matrices in flight between ranks; None: float32 or float64, as the
            maths.
    """

    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    steps: int = 5
    eps: float = 1e-7
    dtype: torch.dtype | None = torch.bfloat16

    def __post_init__(self) -> None:
        if len(self.coefficients) != 3 or self.steps < 0 or self.eps < 0:
            raise PlanError(
                "Newton-Schulz iterations are not defined so",
                got=self,
                expected="three coefficients, steps and eps not negative",
            )
        if self.dtype is not None and not (self.dtype.is_floating_point and self.dtype.itemsize >= 2):
            raise PlanError(
                "Newton-Schulz iterations cannot run in this dtype",
                got=self.dtype,
                expected="bfloat16, float16, float32, float64 or None",
            )

    def __call__(self, matrices: torch.Tensor) -> torch.Tensor:
        """Orthogonalise every matrix of a batch [n, R, C]; a new tensor of the same dtype."""
        a, b, c = self.coefficients
        tall = matrices.size(-2) > matrices.size(-1)
        x = matrices.mT if tall else matrices
        x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=self.eps)
        for _ in range(self.steps):
            gram = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.mT if tall else x


def work(shape: tuple[int, ...]) -> int:
    """Multiplications of one iteration on a matrix, up to a factor."""
    rows, columns = shape
    short = min(rows, columns)
    return short * short * (2 * max(rows, columns) + short)
