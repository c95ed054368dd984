"""What the model says besides the structure: how sure it is, distances, masked residues (section 1.9)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from cai_apps.applications.protein.model.layers import linear


@dataclass(frozen=True)
class Said:
    """Scores before their softmax or sigmoid.

    Args:
        plddt: scores of how well a residue's surroundings are met, in 50 bins [B, R, 50].
        distances: scores of the distance between beta carbons, in 64 bins [B, R, R, 64].
        residues: scores of the residue that was masked in the alignment, among 23 [B, S, R, 23].
        resolved: whether an atom would be seen in an experiment [B, R, 37].
        errors: scores of the error of one residue's place, seen from another, in 64 bins [B, R, R, 64]; None: the
            model does not predict it.
    """

    plddt: Tensor
    distances: Tensor
    residues: Tensor
    resolved: Tensor
    errors: Tensor | None


class Confidence(nn.Module):
    """The predicted lDDT of each residue: Algorithm 29."""

    def __init__(self, c_s: int, width: int = 128, bins: int = 50):
        super().__init__()
        self.norm = nn.LayerNorm(c_s)
        self.first = linear(c_s, width, initial="relu")
        self.second = linear(width, width, initial="relu")
        self.out = linear(width, bins, initial="final")

    def forward(self, s: Tensor) -> Tensor:
        """s of the structure module [B, R, c_s] -> [B, R, bins]."""
        return self.out(F.relu(self.second(F.relu(self.first(self.norm(s))))))


class Heads(nn.Module):
    """All of them.

    Args:
        c_m, c_z, c_s: widths.
        errors: whether the model predicts aligned errors (its weights are called `ptm`).
    """

    def __init__(self, c_m: int, c_z: int, c_s: int, *, errors: bool = True):
        super().__init__()
        self.plddt = Confidence(c_s)
        self.distances = linear(c_z, 64, initial="final")
        self.residues = linear(c_m, 23, initial="final")
        self.resolved = linear(c_s, 37, initial="final")
        self.errors = linear(c_z, 64, initial="final") if errors else None

    def forward(self, m: Tensor, z: Tensor, s: Tensor, placed: Tensor) -> Said:
        """m, z, s of the trunk, and s of the structure module."""
        half = self.distances(z)
        return Said(
            self.plddt(placed),
            half + half.transpose(1, 2),
            self.residues(m),
            self.resolved(s),
            None if self.errors is None else self.errors(z),
        )
