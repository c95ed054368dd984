"""A user's own model, optimizer and loop on many ranks: `launch`, a plugin, `Booster`, `boost`."""

from cai_apps.booster.booster import Booster
from cai_apps.booster.config import BoostConfig
from cai_apps.booster.hybrid import HybridParallelPlugin, MoeHybridParallelPlugin
from cai_apps.booster.launch import launch
from cai_apps.booster.model import BoostedModel
from cai_apps.booster.optimizer import BoostedOptimizer
from cai_apps.booster.plugin import Plugin
from cai_apps.booster.plugins import (
    ConfigPlugin,
    GeminiPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)

__all__ = [
    "BoostConfig",
    "BoostedModel",
    "BoostedOptimizer",
    "Booster",
    "ConfigPlugin",
    "GeminiPlugin",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "MoeHybridParallelPlugin",
    "Plugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
    "launch",
]
