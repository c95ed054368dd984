"""Loops of other libraries around a sharded or offloaded model: `accelerate`, `transformers`, `fabric`.

Each file needs the library it is named after, which cai-zero does not install.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from cai_mesh.protocols import GradSync


def sync_of(model: nn.Module, optimizer: Any = None) -> GradSync | None:
    """Return what reduces a model's gradients: its sharding, or the sharded optimizer over it; None under offload."""
    owner = getattr(model, "cai_sharding", None) or optimizer
    return owner if isinstance(owner, GradSync) else None
