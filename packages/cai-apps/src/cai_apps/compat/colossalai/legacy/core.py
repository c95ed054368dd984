"""The global context of the first generation: the config, and which rank this is among which."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from cai_apps.booster import Plugin
from cai_apps.booster.launch import need_launch
from cai_apps.compat.colossalai.legacy.context import ParallelMode
from cai_apps.compat.colossalai.legacy.settings import Settings, plugin_of, read_settings

__all__ = ["global_context"]

GROUPS = {
    ParallelMode.DATA: "dp_group",
    ParallelMode.PIPELINE: "pp_group",
    ParallelMode.TENSOR: "tp_group",
    ParallelMode.SEQUENCE: "sp_group",
}


class GlobalContext:
    """The config of the process, and its ranks. Scripts import the one object of it, `global_context`."""

    def __init__(self) -> None:
        self.config = Settings()
        self._plugin: Plugin | None = None

    def load_config(self, config: Any) -> None:
        """Read a config file or a dict."""
        self.config, self._plugin = read_settings(config), None

    @property
    def plugin(self) -> Plugin:
        """The plugin of the config."""
        need_launch("global_context")
        if self._plugin is None:
            self._plugin = plugin_of(self.config)
        return self._plugin

    def get_group(self, mode: ParallelMode) -> dist.ProcessGroup | None:
        """Return this rank's group; None for all ranks."""
        return None if mode is ParallelMode.GLOBAL else getattr(self.plugin, GROUPS[mode])

    def get_world_size(self, mode: ParallelMode) -> int:
        """Return the ranks of a group; those that have one sample together for `MODEL`."""
        if mode is ParallelMode.MODEL:
            return dist.get_world_size() // self.plugin.dp_size
        return dist.get_world_size(self.get_group(mode))

    def get_local_rank(self, mode: ParallelMode) -> int:
        """Return this rank's number in a group."""
        return dist.get_rank(self.get_group(mode))

    def get_global_rank(self) -> int:
        """Return this rank's number in the job."""
        return dist.get_rank()

    def is_initialized(self, mode: ParallelMode) -> bool:
        """Return whether there is a group of more than one rank, or the job is launched."""
        return dist.is_initialized() and (mode is ParallelMode.GLOBAL or self.get_world_size(mode) > 1)

    def is_first_rank(self, mode: ParallelMode) -> bool:
        """Return whether this is a group's first rank."""
        return self.get_local_rank(mode) == 0

    def is_last_rank(self, mode: ParallelMode) -> bool:
        """Return whether this is a group's last rank."""
        return self.get_local_rank(mode) == self.get_world_size(mode) - 1

    def is_using_dp(self) -> bool:
        """Return whether ranks have different samples."""
        return self.get_world_size(ParallelMode.DATA) > 1

    def is_using_pp(self) -> bool:
        """Return whether there is a pipeline."""
        return self.get_world_size(ParallelMode.PIPELINE) > 1


global_context = (
    GlobalContext()
)  # scripts of that generation import this one object, and their config is in it
