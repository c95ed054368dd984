"""What plugins with pipelines have in common."""

import abc

from cai_apps.booster import HybridParallelPlugin, MoeHybridParallelPlugin, Plugin

__all__ = ["PipelinePluginBase"]


class PipelinePluginBase(Plugin, abc.ABC):
    """A plugin that may have a pipeline."""


for _kind in (HybridParallelPlugin, MoeHybridParallelPlugin):
    PipelinePluginBase.register(_kind)
