"""The import paths of ColossalAI 0.5.0: scripts run here after changing import lines, which `__main__` does."""

from argparse import ArgumentParser

from cai_apps.compat.colossalai import accelerator
from cai_apps.compat.colossalai.absent import MODULES, answer
from cai_apps.compat.colossalai.initialize import (
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)

__version__ = "0.5.0"
"""The version whose interface this is."""

__all__ = [
    "__version__",
    "accelerator",
    "get_default_parser",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
]


def get_default_parser() -> ArgumentParser:
    """Return a parser of the arguments that scripts of the first generation take."""
    from cai_apps.compat.colossalai.legacy.launching import get_default_parser as parser

    return parser()


__getattr__ = answer("", MODULES, __all__)
