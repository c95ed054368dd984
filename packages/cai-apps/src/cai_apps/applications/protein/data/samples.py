"""Chains as the loop reads them: pieces, their alignments drawn anew each time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cai_apps.applications.protein.data.batch import packed
from cai_apps.applications.protein.data.chains import Known, load
from cai_apps.applications.protein.data.examples import Piece, example, stacked
from cai_apps.applications.protein.data.related import drawn
from cai_apps.applications.protein.loss.whole import Truth
from cai_apps.applications.protein.model.alphafold import Features
from cai_mesh import rng

KEPT = 64
"""Chains that stay in memory once they were read."""


class Pieces:
    """`cai_apps.data.batches.Samples` of chains: what is drawn for a sample depends on the seed and its position.

    Args:
        chains: files of `data.chains`.
        piece: the amount of a chain that a sample holds.
        rounds: the largest number of rounds of a step.
        global_batch: samples of a step, which have as many rounds as each other.
        seed: the seed of all that is drawn.
        fixed: every step has all rounds, as in validation.
    """

    def __init__(
        self,
        chains: Sequence[Path],
        piece: Piece,
        rounds: int,
        global_batch: int,
        seed: int,
        *,
        fixed: bool = False,
    ):
        self._chains, self._piece, self._rounds = list(chains), piece, rounds
        self._global_batch, self._seed, self._fixed = global_batch, seed, fixed
        self._kept: OrderedDict[int, Known] = OrderedDict()

    @property
    def size(self) -> int:
        return len(self._chains)

    def rows(self, indices: np.ndarray, positions: np.ndarray) -> dict[str, Tensor]:
        rounds = self._rounds if self._fixed else self.drawn_rounds(int(positions[0]) // self._global_batch)
        found = []
        for index, position in zip(indices.tolist(), positions.tolist(), strict=True):
            draws = torch.Generator().manual_seed(rng.key(self._seed, "piece", position))
            found.append(self._sample(self._known(index), rounds, draws))
        each = [stacked([sample[0][number] for sample in found]) for number in range(rounds)]
        return packed(each, stacked([truth for _, truth in found]))

    def drawn_rounds(self, step: int) -> int:
        """How many rounds a step has: each number from 1 on is as likely (section 1.10)."""
        return 1 + rng.key(self._seed, "rounds", step) % self._rounds

    def _sample(self, known: Known, rounds: int, draws: torch.Generator) -> tuple[list[Features], Truth]:
        most = self._piece.templates
        taken = known.templates[:most] if self._fixed else drawn(known.templates, draws, most)
        return example(known.alignment, known.chain, self._piece, rounds, draws, taken if most else ())

    def _known(self, index: int) -> Known:
        if index in self._kept:
            self._kept.move_to_end(index)
        else:
            self._kept[index] = load(self._chains[index])
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return self._kept[index]
