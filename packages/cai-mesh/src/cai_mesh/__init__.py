"""Mesh, layouts and contracts that the other cai packages share. Names load their file on first use.

Rooms: `comm`, `layout`, `gradients`, `attention`, `storage`, `checkpoint`, `trial`, `files`. What a room advertises
stands in its `__all__`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cai_mesh import comm, errors, layout, protocols
from cai_mesh.comm.spec import MeshSpec
from cai_mesh.layout.layout import Layout

if TYPE_CHECKING:
    from cai_mesh import attention, checkpoint, gradients, rng, storage, testing, trial
    from cai_mesh.comm.build import build_mesh
    from cai_mesh.comm.mesh import ParallelMesh
    from cai_mesh.gradients.norm import clip_grad_norm_
    from cai_mesh.layout.boxed import BoxedTensor
    from cai_mesh.layout.chunk import FlatChunk
    from cai_mesh.layout.reduce import ReduceSpec
    from cai_mesh.storage.lifecycle import ModuleLifecycle

__version__ = "0.1.0"

_HOMES = {
    "BoxedTensor": "layout",
    "FlatChunk": "layout",
    "ModuleLifecycle": "storage",
    "ReduceSpec": "layout",
    "ParallelMesh": "comm",
    "build_mesh": "comm",
    "clip_grad_norm_": "gradients",
}
_ROOMS = ("attention", "checkpoint", "gradients", "rng", "storage", "testing", "trial")

__all__ = [
    "BoxedTensor",
    "FlatChunk",
    "Layout",
    "MeshSpec",
    "ModuleLifecycle",
    "ParallelMesh",
    "ReduceSpec",
    "attention",
    "build_mesh",
    "checkpoint",
    "clip_grad_norm_",
    "comm",
    "errors",
    "gradients",
    "layout",
    "protocols",
    "rng",
    "storage",
    "testing",
    "trial",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"cai_mesh.{_HOMES[name]}"), name)
    if name in _ROOMS:
        return importlib.import_module(f"cai_mesh.{name}")
    raise AttributeError(f"module 'cai_mesh' has no attribute {name!r}")
