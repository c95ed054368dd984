"""The state that a call of a test may change in its process, put back after it."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as module_hooks
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

SEED = 0

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    (lambda: torch.get_autocast_dtype("cpu"), lambda dtype: torch.set_autocast_dtype("cpu", dtype)),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (os.getcwd, os.chdir),
)
"""Settings of the process, each as what reads and what writes it."""

_HOOKS: tuple[dict[int, Any], ...] = (
    module_hooks._global_buffer_registration_hooks,
    module_hooks._global_module_registration_hooks,
    module_hooks._global_parameter_registration_hooks,
    module_hooks._global_backward_pre_hooks,
    module_hooks._global_backward_hooks,
    module_hooks._global_forward_pre_hooks,
    module_hooks._global_forward_hooks,
    _global_optimizer_pre_hooks,
    _global_optimizer_post_hooks,
)
"""Hooks on every module and on every optimizer of the process."""

_PATCHED = ("torch", "torch.autograd", "torch.distributed", "torch.distributed.distributed_c10d")
_PATCHED += ("torch.nn", "torch.nn.functional", "torch.nn.utils", "torch.optim", "torch.utils.checkpoint")
"""Modules of torch in which tests put functions of their own."""


class ProcessState:
    """State of the process around one call: seeds are set before it, and what it changed is put back after it.

    Put back are the settings of torch, the environment and the working directory, filters of warnings, functions and
    classes of cai's and torch's modules that were replaced, and hooks on all modules or optimizers, but for those that
    libraries set: they set them once a process. What was compiled is forgotten.
    """

    def __enter__(self) -> None:
        self._settings = [read() for read, _ in _SETTINGS]
        self._environment = dict(os.environ)
        self._functions = [(module, _functions(module)) for module in _modules()]
        self._hooks = [set(hooks) for hooks in _HOOKS]
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        torch.manual_seed(SEED)
        random.seed(SEED)
        np.random.seed(SEED)

    def __exit__(self, *error: object) -> None:
        self._warnings.__exit__(None, None, None)
        for (read, write), value in zip(_SETTINGS, self._settings, strict=True):
            if read() != value:
                write(value)
        torch.set_default_device(None)
        if os.environ != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        for module, functions in self._functions:
            for name, function in functions.items():
                if vars(module).get(name) is not function:
                    setattr(module, name, function)
        for hooks, before in zip(_HOOKS, self._hooks, strict=True):
            for key in [key for key in hooks if key not in before and not _of_a_library(hooks[key])]:
                del hooks[key]
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()


def _modules() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if module is not None and (name in _PATCHED or name.startswith("cai_"))
    ]


def _functions(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if callable(value)}


def _of_a_library(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith(("cai_", "torch."))
