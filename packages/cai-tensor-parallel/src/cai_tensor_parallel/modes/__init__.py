"""Algorithms by mode."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from cai_tensor_parallel.modes import one_d
from cai_tensor_parallel.modes.context import ModeContext
from cai_tensor_parallel.plan import Role

MODES: dict[str, Callable[[nn.Module, Role, ModeContext], None]] = {"1d": one_d.apply}
"""Mode name to the function that gives one module its role: cuts its parameters and replaces its forward."""
