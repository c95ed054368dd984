"""The weights of a chunk: unsharded parameters, this rank's shard of master weights, and what is written to either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.protocols import CommHandle
from cai_zero.replicated.arriving import arrived
from cai_zero.replicated.halves import Halves, split


@dataclass(eq=False)
class ChunkWeights:
    """One chunk's parameters and master weights, which follow each other from step to step.

    Args:
        names, params: the parameters; others count them by their places here.
        ranges: each one's part of a shard.
        unsharded: [chunk.numel] in compute dtype, which the parameters are views of.
        shard: this rank's shard of `unsharded`, a view.
        flat: this rank's shard in master dtype, once `join` has returned.
        pieces: each parameter's part of it, 1-d and perhaps empty, which the optimizer steps.
        halves: the two halves of master weights, while nobody needs whole numbers; None: they are whole always.
        gathering: the gather of the new parameters after a step, while it is under way.
        versions: the parameters' versions as of the last gather.
        lent: parameters whose memory was asked for since.
    """

    names: Sequence[str]
    params: Sequence[nn.Parameter]
    ranges: Sequence[slice]
    unsharded: torch.Tensor
    shard: torch.Tensor
    flat: nn.Parameter
    pieces: list[nn.Parameter]
    halves: Halves | None = None
    gathering: CommHandle | None = None
    versions: list[int] = field(default_factory=list)
    lent: set[int] = field(default_factory=set)

    @property
    def has_master(self) -> bool:
        """Whether `flat` is a copy, in another dtype or not rounded, and not a view of `unsharded`."""
        return self.halves is not None or self.flat.data_ptr() != self.shard.data_ptr()

    # -- gathers -------------------------------------------------------------------------------------------------

    def wait_gathered(self) -> None:
        """Return once the parameters are those of the last step."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
            arrived(self.params)

    def gathered(self) -> None:
        """Let writes count from now on: parameters are, or will be, those of `flat`."""
        self.versions = [param._version for param in self.params]
        self.lent.clear()

    def to_gather(self) -> torch.Tensor:
        """[shard] of what the parameters of all ranks will be from now on: `flat`, or the upper halves of it.

        On the stream that `flat` is used on: splitting frees its memory.
        """
        self.gathered()
        if self.halves is None:
            return self.flat
        self.halves.split()
        return self.shard

    # -- halves --------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Have the master weights in `flat`. Raises `PlanError` where one that is in halves has been written to."""
        if self.halves is not None and not self.halves.joined:
            self._check_unwritten()
            self.halves.join()

    def split(self) -> None:
        """Have them in halves, where they are kept so: the upper ones are this rank's part of the parameters.

        Not while parameters may have been written to, which `take_writes` has to look at.
        """
        halves = self.halves
        if halves is not None and halves.joined and not self.lent and not self._written():
            halves.split()

    # -- what a loop writes --------------------------------------------------------------------------------------

    def _written(self) -> list[str]:
        """Names of the parameters that have been changed in place since the last gather."""
        if not self.versions:
            return []
        last = zip(self.names, self.params, self.versions, strict=True)
        return [name for name, param, version in last if param._version != version]

    def _check_unwritten(self) -> None:
        written = self._written()
        if written:
            raise PlanError(
                "a parameter was changed in place, which split_master cannot follow",
                got=written[0],
                cause="only the other half of its master weights is kept, which does not tell what has changed",
                fix="change it through param.data, load weights by model.load_state_dict or into "
                'optimizer.weights(), or leave split_master out (`cai train`: precision.master = "whole")',
            )

    def take_writes(self) -> None:
        """Let master weights take what somebody has written to the parameters since, element by element.

        What was not written keeps its precision. Nothing waits for the device. Raises as `join` does.
        """
        if self.halves is not None and not self.halves.joined:
            self._check_unwritten()
            return
        if not self.has_master or not self.versions:
            return
        for i, param in enumerate(self.params):
            if param._version != self.versions[i] or i in self.lent:
                master, current = self.flat.detach()[self.ranges[i]], self.shard[self.ranges[i]]
                written = current != self._rounded(master, current)
                master.copy_(torch.where(written, current.to(master.dtype), master))
        self.gathered()

    def _rounded(self, master: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The parameters that master weights give."""
        if self.halves is None:
            return master.to(like.dtype)
        rounded = torch.empty_like(like)
        split(master, rounded)
        return rounded
