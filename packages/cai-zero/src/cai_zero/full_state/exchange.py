"""Full tensors on one rank from the boxes of all, and back: one tensor after the other, each box sent once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cai_mesh.comm import all_gather_object, receive, send
from cai_mesh.errors import PlanError
from cai_mesh.layout import Box, BoxedTensor

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes by name."""


@dataclass(frozen=True)
class _Extent:
    """The boxes of one tensor that a rank has, without their values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    owner: bool


@dataclass(frozen=True)
class Exchange:
    """Boxes that travel between one rank and all.

    Args:
        rank: index in the group of the rank that has full tensors.
        group: all ranks that have parts; None: one process without torch.distributed.
        device: the device that tensors travel on.
    """

    rank: int
    group: dist.ProcessGroup | None
    device: torch.device

    @staticmethod
    def of(rank: int, group: dist.ProcessGroup | None, device: torch.device) -> Exchange:
        """The exchange of a group; None: of all ranks of the job."""
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        return Exchange(rank, group, device)

    @property
    def here(self) -> int:
        """This rank's index in the group."""
        return self.group.rank() if self.group is not None else 0

    @property
    def is_full(self) -> bool:
        """Whether this rank has full tensors."""
        return self.here == self.rank

    def gathered(
        self, mine: Mapping[str, BoxedTensor], dtype: torch.dtype | None = None
    ) -> dict[str, torch.Tensor]:
        """Return full tensors in host memory, none on other ranks than the one. Collective.

        Args:
            mine: this rank's boxes by name.
            dtype: the dtype of floating-point tensors in the result; None: each tensor's own.

        Raises `PlanError` on all ranks when no rank has some part of a tensor.
        """
        table = all_gather_object({name: _extent(boxed) for name, boxed in mine.items()}, self.group)
        full: dict[str, torch.Tensor] = {}
        for name, sources in _sources(table).items():
            shape, source_dtype = sources[0][1].shape, sources[0][1].dtype
            target = dtype if dtype is not None and source_dtype.is_floating_point else source_dtype
            if self.is_full:
                full[name] = torch.empty(shape, dtype=target)
            for source, extent in sources:
                if source == self.here == self.rank:
                    for box, view in _pieces(mine[name], extent.boxes):
                        full[name][box.slices()] = view.to("cpu", target)
                elif source == self.here:
                    self._send([view for _, view in _pieces(mine[name], extent.boxes)], self.rank)
                elif self.is_full:
                    self._receive(full[name], extent, source)
        return full

    @torch.no_grad()
    def scatter(self, mine: Mapping[str, BoxedTensor], full: Mapping[str, torch.Tensor]) -> None:
        """Fill the boxes of all ranks from full tensors of the same names, read on the one rank. Collective."""
        table = all_gather_object({name: _extent(boxed) for name, boxed in mine.items()}, self.group)
        for name in dict.fromkeys(name for row in table for name in row):
            for other, extent in enumerate(row.get(name) for row in table):
                if extent is None:
                    continue
                if other == self.here == self.rank:
                    for box, view in mine[name].present.pieces:
                        view.copy_(full[name][box.slices()])
                elif self.is_full:
                    self._send([full[name][box.slices()].to(extent.dtype) for box in extent.boxes], other)
                elif other == self.here:
                    self._fill(mine[name])

    def shapes(self, mine: Mapping[str, BoxedTensor]) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of which any rank has boxes. Collective."""
        table = all_gather_object(
            {name: tuple(boxed.global_shape) for name, boxed in mine.items()}, self.group
        )
        return {name: shape for row in table for name, shape in row.items()}

    def _send(self, parts: list[torch.Tensor], to: int) -> None:
        if parts:
            send(torch.cat([part.reshape(-1) for part in parts]).to(self.device), to, self.group)

    def _receive(self, full: torch.Tensor, extent: _Extent, source: int) -> None:
        """Receive one rank's boxes and put them in their places."""
        if not extent.boxes:
            return
        sizes = [math.prod(box.shape) for box in extent.boxes]
        buffer = torch.empty(sum(sizes), dtype=extent.dtype, device=self.device)
        receive(buffer, source, self.group)
        for box, part in zip(extent.boxes, buffer.cpu().split(sizes), strict=True):
            full[box.slices()] = part.view(box.shape)

    def _fill(self, boxed: BoxedTensor) -> None:
        if not boxed.pieces:
            return
        pieces = boxed.present.pieces
        sizes = [view.numel() for _, view in pieces]
        buffer = torch.empty(sum(sizes), dtype=boxed.dtype, device=self.device)
        receive(buffer, self.rank, self.group)
        for (_, view), part in zip(pieces, buffer.split(sizes), strict=True):
            view.copy_(part.view(view.shape))


def _extent(boxed: BoxedTensor) -> _Extent:
    return _Extent(tuple(boxed.global_shape), boxed.dtype, tuple(box for box, _ in boxed.pieces), boxed.owner)


def _sources(table: list[dict[str, _Extent]]) -> dict[str, list[tuple[int, _Extent]]]:
    """Return who sends which boxes, by name: each distinct box once, from an owner where there is one."""
    sources: dict[str, list[tuple[int, _Extent]]] = {}
    for name in dict.fromkeys(name for row in table for name in row):
        holders = sorted(
            ((index, row[name]) for index, row in enumerate(table) if name in row),
            key=lambda holder: (not holder[1].owner, holder[0]),
        )
        sent: set[Box] = set()
        for index, extent in holders:
            boxes = tuple(box for box in extent.boxes if box not in sent)
            sent.update(boxes)
            sources.setdefault(name, []).append(
                (index, _Extent(extent.shape, extent.dtype, boxes, extent.owner))
            )
        shape, covered = holders[0][1].shape, sum(math.prod(box.shape) for box in sent)
        if covered < math.prod(shape):
            raise PlanError(
                f"no rank of the group holds all of {name!r}",
                got=f"{covered} of {math.prod(shape)} elements",
                fix="pass the group of all ranks over which the model is sharded",
            )
    return sources


def _pieces(boxed: BoxedTensor, boxes: tuple[Box, ...]) -> list[tuple[Box, torch.Tensor]]:
    return [(box, view.detach()) for box, view in boxed.present.pieces if box in boxes]
