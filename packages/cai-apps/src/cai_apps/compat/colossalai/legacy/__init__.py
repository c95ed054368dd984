"""What scripts of the first generation import: a config file, `initialize`, and an engine."""

from cai_apps.compat.colossalai.absent import answer
from cai_apps.compat.colossalai.initialize import (
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)
from cai_apps.compat.colossalai.legacy.engine import initialize
from cai_apps.compat.colossalai.legacy.launching import get_default_parser

__all__ = [
    "get_default_parser",
    "initialize",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
]

__getattr__ = answer("legacy", {}, __all__)
