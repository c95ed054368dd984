"""What plugins of data parallelism have in common."""

import abc

from cai_apps.booster import GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin, TorchFSDPPlugin

__all__ = ["DPPluginBase"]


class DPPluginBase(Plugin, abc.ABC):
    """A plugin with `prepare_dataloader` and no pipeline."""


for _kind in (GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin):
    DPPluginBase.register(_kind)
