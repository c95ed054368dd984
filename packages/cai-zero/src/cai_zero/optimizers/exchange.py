"""Full matrices from parts held by several ranks, on the rank that works on each, and back: the communication."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cai_mesh.comm import ParallelMesh, all_gather_object, all_to_all_into
from cai_mesh.layout import Box
from cai_zero.optimizers.sums import Axes


def divide(costs: Sequence[int], workers: int) -> list[int]:
    """A worker for every cost, largest first to whoever has least (Graham's LPT rule); equal inputs, equal result."""
    load, chosen = [0] * workers, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        worker = min(range(workers), key=lambda w: (load[w], w))
        chosen[i], load[worker] = worker, load[worker] + costs[i]
    return chosen


def agree_groups(axes: Sequence[Axes], mesh: ParallelMesh | None) -> dict[Axes, dist.ProcessGroup | None]:
    """The process group of every set of axes that occurs. Collective over the mesh.

    Pipeline stages may hold parameters divided over different axes, and a group must be made by all ranks of the
    mesh; so all sets of all ranks are made, in one order.
    """
    all_axes = set(axes)
    if mesh is None:
        return dict.fromkeys(all_axes)
    for name in mesh.names:
        all_axes = set().union(*all_gather_object(all_axes, mesh.group(name)))
    return {key: mesh.group(key) for key in sorted(all_axes)}


@dataclass(frozen=True)
class Exchange:
    """The matrices of one set of axes: who works on which, and which boxes every rank holds.

    Args:
        group: the ranks that share the matrices; None for one.
        rank: this one's number in it.
        shapes: the shape of every matrix.
        worker: the rank that works on every matrix.
        boxes: [rank][matrix]: the boxes it holds, in the order they travel.
    """

    group: dist.ProcessGroup | None
    rank: int
    shapes: list[tuple[int, ...]]
    worker: list[int]
    boxes: list[list[list[Box]]]

    @staticmethod
    def plan(
        shapes: list[tuple[int, ...]],
        costs: list[int],
        boxes: list[list[Box]],
        group: dist.ProcessGroup | None,
    ) -> Exchange:
        """Divide the work and tell one another what each holds. Collective over the group."""
        world, rank = (group.size(), dist.get_rank(group)) if group is not None else (1, 0)
        return Exchange(group, rank, shapes, divide(costs, world), all_gather_object(boxes, group))

    def matrices_of(self, worker: int) -> list[int]:
        """Matrices a rank works on."""
        return [i for i, chosen in enumerate(self.worker) if chosen == worker]

    @functools.cached_property
    def splits(self) -> tuple[list[int], list[int]]:
        """(elements this rank holds of every worker's matrices, elements every rank holds of this one's)."""

        def numel(holder: int, worker: int) -> int:
            return sum(box.numel for i in self.matrices_of(worker) for box in self.boxes[holder][i])

        world = range(len(self.boxes))
        return [numel(self.rank, w) for w in world], [numel(h, self.rank) for h in world]

    def collect(
        self, pieces: list[list[torch.Tensor]], dtype: torch.dtype, device: torch.device
    ) -> dict[int, torch.Tensor]:
        """The full matrices this rank works on, from every rank's pieces (a view a box). Collective."""
        piece_sizes, work_sizes = self.splits
        flat = [piece.to(dtype).reshape(-1) for piece in self._outgoing(pieces)]
        outgoing = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        incoming = torch.empty(sum(work_sizes), dtype=dtype, device=device)
        all_to_all_into(incoming, outgoing, self.group, out_splits=work_sizes, in_splits=piece_sizes)
        matrices = self.matrices_of(self.rank)
        full = {i: torch.empty(self.shapes[i], dtype=dtype, device=device) for i in matrices}
        at = 0
        for i, box in self._incoming():
            full[i][box.slices()] = incoming[at : at + box.numel].view(box.shape)
            at += box.numel
        return full

    def give_back(
        self,
        full: dict[int, torch.Tensor],
        pieces: list[list[torch.Tensor]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Write into every rank's pieces what the workers return of their matrices. Collective."""
        piece_sizes, work_sizes = self.splits
        flat = [full[i][box.slices()].reshape(-1) for i, box in self._incoming()]
        outgoing = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        incoming = torch.empty(sum(piece_sizes), dtype=dtype, device=device)
        all_to_all_into(incoming, outgoing, self.group, out_splits=piece_sizes, in_splits=work_sizes)
        at = 0
        for piece in self._outgoing(pieces):
            piece.copy_(incoming[at : at + piece.numel()].view(piece.shape))
            at += piece.numel()

    def _outgoing(self, pieces: list[list[torch.Tensor]]) -> Iterator[torch.Tensor]:
        """This rank's pieces by worker, in the order they travel."""
        return (piece for w in range(len(self.boxes)) for i in self.matrices_of(w) for piece in pieces[i])

    def _incoming(self) -> Iterator[tuple[int, Box]]:
        """(matrix, box) of all that ranks hold of this rank's matrices, in the order they travel."""
        matrices = self.matrices_of(self.rank)
        return ((i, box) for holder in self.boxes for i in matrices for box in holder[i])
