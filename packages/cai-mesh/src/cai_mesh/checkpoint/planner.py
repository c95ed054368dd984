"""torch DCP planners for boxes: any number of regions of a tensor on each rank."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from cai_mesh.checkpoint.manifest import MANIFEST, METADATA, Manifest
from cai_mesh.errors import CheckpointError
from cai_mesh.files.paths import inside
from cai_mesh.layout.boxed import BoxedTensor
from cai_mesh.layout.boxes import Box

Boxes = Mapping[str, BoxedTensor]


class BoxSavePlanner(SavePlanner):
    """Plans the writing of every box once, by one of the ranks that hold it.

    Made for a writer that takes one item after the other (`per_thread_copy_ahead=0`): torch holds on to every tensor
    of a file until it closes the file, so the host copy of an item gives its memory to that of the next one.
    """

    _copy: torch.Tensor | None = None

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self._views = _views(state_dict)
        self._state: Boxes = state_dict

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [
                WriteItem(
                    MetadataIndex(name, torch.Size(box.offset)),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=_chunk(box),
                        properties=TensorProperties(dtype=boxed.dtype),
                        size=torch.Size(boxed.global_shape),
                    ),
                )
                for name, boxed in self._state.items()
                if boxed.owner
                for box, _ in boxed.pieces
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(dedup_save_plans(all_plans))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        boxed = self._state[write_item.index.fqn]
        view = _view(boxed, self._views, write_item.index).detach()
        if boxed.lend is None and view.is_cpu and view.untyped_storage().nbytes() == view.nbytes:
            return view
        if self._copy is None or self._copy.nbytes != view.nbytes:
            self._forget_copy()
            self._copy = torch.empty(view.nbytes, dtype=torch.uint8)
        return self._copy.view(view.dtype).view(view.shape).copy_(view)

    def _forget_copy(self) -> None:
        if self._copy is not None:
            self._copy.untyped_storage().resize_(0)


class BoxLoadPlanner(LoadPlanner):
    """Plans the reading of what each of this rank's boxes needs from the boxes that were saved."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._views = _views(state_dict)
        self._state: Boxes = state_dict
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, boxed in self._state.items():
            saved = self._metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            chunks = [_chunk(box) for box, _ in boxed.pieces]
            items += create_read_items_for_chunk_list(name, saved, chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is saved as an object", expected="a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = _view(self._state[read_item.dest_index.fqn], self._views, read_item.dest_index)
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The views are the destination; nothing is left to do."""


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.shape))


def _key(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


def _views(state: Boxes) -> dict[tuple[str, tuple[int, ...]], torch.Tensor]:
    return {(name, box.offset): view for name, boxed in state.items() for box, view in boxed.pieces}


def _view(
    boxed: BoxedTensor, views: Mapping[tuple[str, tuple[int, ...]], torch.Tensor], index: MetadataIndex
) -> torch.Tensor:
    """The values of one box: from `views`, or lent."""
    key = _key(index)
    if boxed.lend is None:
        return views[key]
    return next(view for box, view in boxed.lend().pieces if tuple(box.offset) == key[1])


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_METADATA_MODULE, name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((_METADATA_MODULE, name) for name in ("ChunkStorageMetadata", "TensorProperties", "MetadataIndex")),
    *((_METADATA_MODULE, name) for name in ("StorageMeta", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
}


def _memory_format(kind: Any, name: Any) -> _MEM_FORMAT_ENCODING:
    """The stand-in for `getattr` in metadata: Python below 3.11.4 so pickles a member of an enumeration."""
    if kind is not _MEM_FORMAT_ENCODING or not isinstance(name, str) or name not in kind.__members__:
        raise CheckpointError(
            "the checkpoint's .metadata asks for an attribute that metadata never has; it was not read",
            got=repr(name),
            expected="a member of torch's enumeration of memory formats",
        )
    return kind[name]


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles the classes DCP's metadata is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            "the checkpoint's .metadata names something metadata never holds; it was not run",
            got=f"{module}.{name}",
            cause="the file was made or changed by something else than a checkpoint writer",
            fix="do not use this checkpoint unless you know where it comes from",
        )


def read_metadata(checkpoint: Path, manifest: Manifest) -> Metadata:
    """The DCP metadata of a checkpoint, which its manifest vouches for, by an allow-list of classes.

    Raises `CheckpointError` for a missing, damaged or malicious file.
    """
    path = checkpoint / METADATA
    raw = manifest.bytes_of(checkpoint, METADATA)
    try:
        metadata = _MetadataUnpickler(io.BytesIO(raw)).load()
    except CheckpointError:
        raise
    except Exception as error:  # what a pickle of something else raises is anybody's guess
        raise CheckpointError(f"{path} is damaged", cause=f"{type(error).__name__}: {error}") from None
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} does not hold checkpoint metadata", got=type(metadata).__name__)
    for name in sorted({str(info.relative_path) for info in (metadata.storage_data or {}).values()}):
        if inside(checkpoint, name, said_by=path).name not in manifest.files:
            raise CheckpointError(f"{path} names a file that {MANIFEST} does not have: {name!r}")
    return metadata
