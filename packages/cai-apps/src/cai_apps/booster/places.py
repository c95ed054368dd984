"""Where a rank stands: sizes and groups of ranks, and its stages, by the names that loops of a user ask for."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cai_apps.config.sections import RunConfig
from cai_mesh.comm import ParallelMesh
from cai_pipeline import place, placement_of

DATA = ("dp_replicate", "dp_shard")


class Places:
    """Sizes and groups of ranks of a config on a mesh.

    Args:
        config: the resolved config.
        mesh: the mesh of the job's ranks.
    """

    def __init__(self, config: RunConfig, mesh: ParallelMesh):
        self._config, self._mesh = config, mesh

    @property
    def tp_size(self) -> int:
        """Ranks that cut layers between them."""
        return self._mesh.degree("tp")

    @property
    def pp_size(self) -> int:
        """Ranks of a pipeline."""
        return self._mesh.degree("pp")

    @property
    def sp_size(self) -> int:
        """Ranks that have rows of tokens together."""
        return self._mesh.degree("cp")

    @property
    def dp_size(self) -> int:
        """Ranks with different samples."""
        return self._mesh.degree(DATA)

    @property
    def dp_rank(self) -> int:
        """This rank's number among those with different samples."""
        return self._mesh.index(DATA)

    @property
    def ep_size(self) -> int:
        """Ranks over which experts are spread."""
        return self._config.parallel.experts.size

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO."""
        stage = self._config.parallel.zero
        assert stage != "auto"
        return stage

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """This rank's group of `tp_size` ranks."""
        return self._group(self._leaves("tp"))

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """This rank's group of `pp_size` ranks."""
        return self._group(("pp",))

    @property
    def sp_group(self) -> dist.ProcessGroup:
        """This rank's group of `sp_size` ranks."""
        return self._group(("cp",))

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """This rank's group of `dp_size` ranks."""
        return self._group(DATA)

    @property
    def stage_manager(self) -> StageManager | None:
        """What says which stages of a pipeline this rank has; None without a pipeline."""
        return None if self.pp_size == 1 else self._stages

    @functools.cached_property
    def _stages(self) -> StageManager:
        return StageManager(self._config, self._mesh, self.pp_group)

    @property
    def pg_mesh(self) -> RankGrid:
        """The grid of all ranks."""
        return RankGrid(self._mesh.dense)

    def _leaves(self, role: str) -> tuple[str, ...]:
        return self._mesh.leaves(role) or (role,)

    def _group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """Return a group of ranks along axes, of this rank alone where they have one rank."""
        mesh: DeviceMesh = self._mesh.dense
        if len(axes) == 1:
            return mesh.get_group(axes[0])
        return self._mesh.group(axes) or mesh.get_group(axes[-1])


class StageManager:
    """Which stages of a pipeline a rank has.

    Args:
        config: the resolved config.
        mesh: the mesh of the job's ranks.
        group: the ranks of the pipeline.
    """

    def __init__(self, config: RunConfig, mesh: ParallelMesh, group: dist.ProcessGroup):
        pipeline = config.parallel.pipeline
        self._ranks, self.group = pipeline.size, group
        self.stage = mesh.index("pp")
        self._held = place(pipeline.size, pipeline.chunks, placement_of(pipeline.schedule, pipeline.chunks))

    @property
    def num_stages(self) -> int:
        """Ranks of the pipeline."""
        return self._ranks

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        """Return whether this rank has the model's first stage; `ignore_chunk`: whether it is the first rank."""
        return self.stage == (0 if ignore_chunk else self._held[0])

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        """Return whether this rank has the model's last stage, where the loss is computed first.

        Args:
            ignore_chunk: ask for the last rank instead; with `zb-v` the last stage is on the first rank.
        """
        return self.stage == (self._ranks - 1 if ignore_chunk else self._held[-1])

    def get_rank(self) -> int:
        """Return this rank's number in the job."""
        return dist.get_rank()

    def get_prev_rank(self) -> int:
        """Return the number in the job of the rank before this one; before the first comes the last."""
        return dist.get_global_rank(self.group, (self.stage - 1) % self._ranks)

    def get_next_rank(self) -> int:
        """Return the number in the job of the rank after this one; after the last comes the first."""
        return dist.get_global_rank(self.group, (self.stage + 1) % self._ranks)


class RankGrid:
    """All ranks of a job as a grid, with groups along its axes.

    Args:
        mesh: the grid, of any axes.
    """

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks along each axis, outermost first."""
        return tuple(self.mesh.shape)

    @property
    def rank(self) -> int:
        """This rank's number in the job."""
        return dist.get_rank()

    def size(self, dim: int | None = None) -> Any:
        """Return the ranks along an axis; of all axes for None."""
        return self.shape if dim is None else self.shape[dim]

    def coordinate(self, dim: int | None = None) -> Any:
        """Return this rank's place along an axis; along all axes for None."""
        place_here = self.mesh.get_coordinate()
        assert place_here is not None
        return tuple(place_here) if dim is None else place_here[dim]

    def get_group_along_axis(self, axis: int) -> dist.ProcessGroup:
        """Return this rank's group along an axis."""
        return self.mesh.get_group(axis)

    def get_ranks_in_group(self, group: dist.ProcessGroup) -> list[int]:
        """Return the numbers in the job of a group's ranks, in the group's order."""
        return dist.get_process_group_ranks(group)

    def destroy_mesh_process_groups(self) -> None:
        """Leave the groups to the end of the process, which other grids may share."""
