"""The hooks of a layer, and which of them look at no numbers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules

GATHERING = ("cai_", "torch.distributed.fsdp", "torch.distributed._composable")


def hooks_of(head: nn.Module) -> Iterator[Any]:
    """Hooks of calls and backwards: the layer's own, and those of all modules."""
    for kind in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"):
        yield from getattr(head, f"_{kind}").values()
        yield from getattr(torch_modules, f"_global_{kind}").values()


def gathers(hook: Any) -> bool:
    """Whether a hook is one of sharded parameters: it gathers weights, and looks at no numbers."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(GATHERING)
