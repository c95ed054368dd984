"""Booster and plugins."""

from cai_apps.booster import Booster, Plugin
from cai_apps.compat.colossalai.absent import answer

__all__ = ["Booster", "Plugin"]

__getattr__ = answer("booster", {"Accelerator": "launch_from_torch() chooses the device"}, __all__)
