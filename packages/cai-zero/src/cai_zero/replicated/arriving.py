"""Parameters whose new values are still being gathered: whoever asks for one waits for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from cai_mesh.gradients import LOOKS, ShownParameter


class ArrivingParameter(ShownParameter):
    """A parameter while it is gathered beside the next forward. Its first use outside that makes it a usual one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in LOOKS:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, ArrivingParameter):
                    leaf.cai_keeper.wait_for_values()  # type: ignore[union-attr]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def arriving(params: Iterable[nn.Parameter]) -> None:
    """Let parameters wait for their values."""
    for param in params:
        if type(param) is ShownParameter:
            param.__class__ = ArrivingParameter


def arrived(params: Iterable[nn.Parameter]) -> None:
    """Let parameters be usual ones again."""
    for param in params:
        if type(param) is ArrivingParameter:
            param.__class__ = ShownParameter
