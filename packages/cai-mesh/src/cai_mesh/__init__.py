"""Mesh, layouts and contracts that the other cai packages share. Submodules are loaded on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cai_mesh import errors, layout, protocols, spec
from cai_mesh.layout import Layout
from cai_mesh.spec import MeshSpec

if TYPE_CHECKING:
    from cai_mesh.boxed import BoxedTensor
    from cai_mesh.build import build_mesh
    from cai_mesh.flat import FlatChunk
    from cai_mesh.lifecycle import ModuleLifecycle
    from cai_mesh.norm import clip_grad_norm_
    from cai_mesh.reduce import ReduceSpec

__version__ = "0.1.0"

_HOMES = {
    "BoxedTensor": "boxed",
    "FlatChunk": "flat",
    "ModuleLifecycle": "lifecycle",
    "ReduceSpec": "reduce",
    "build_mesh": "build",
    "clip_grad_norm_": "norm",
}
_SUBMODULES = (
    "autograd",
    "boxed",
    "build",
    "checkpoint",
    "collectives",
    "flat",
    "lifecycle",
    "norm",
    "reduce",
    "rng",
    "testing",
)

__all__ = [
    "BoxedTensor",
    "FlatChunk",
    "Layout",
    "MeshSpec",
    "ModuleLifecycle",
    "ReduceSpec",
    "build_mesh",
    "clip_grad_norm_",
    "errors",
    "layout",
    "protocols",
    "spec",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"cai_mesh.{_HOMES[name]}"), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"cai_mesh.{name}")
    raise AttributeError(f"module 'cai_mesh' has no attribute {name!r}")
