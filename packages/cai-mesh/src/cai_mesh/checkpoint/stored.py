"""The tensors of a directory of safetensors: shapes first, then values by region."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cai_mesh.checkpoint.loading import SHOWN
from cai_mesh.errors import CheckpointError
from cai_mesh.files.headers import check_header
from cai_mesh.files.published import weight_files
from cai_mesh.layout.boxes import Box


class StoredTensors:
    """The tensors of those files of a directory that `from_pretrained` would read, or of one file there.

    Every header is read and checked; a file is opened when values of it are first asked for.
    """

    def __init__(self, directory: Path, file: str | None = None):
        self._directory = directory
        self._where = (
            weight_files(directory).tensors
            if file is None
            else dict.fromkeys(check_header(directory / file), file)
        )
        self._open: dict[str, Any] = {}
        headers = {file: check_header(directory / file) for file in sorted(set(self._where.values()))}
        for file, header in headers.items():
            listed = {name for name, where in self._where.items() if where == file}
            missing = sorted(listed - header.keys())
            if missing:
                raise CheckpointError(
                    f"{directory / file} lacks tensors that its index says are there", got=missing[:SHOWN]
                )
        self._entries = {name: headers[file][name] for name, file in self._where.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        return {name: tuple(entry["shape"]) for name, entry in self._entries.items()}

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor, as safetensors names it."""
        return self._entries[name]["dtype"]

    def read(self, name: str, region: Box) -> torch.Tensor:
        """Return the values of a region of a tensor, which alone are read."""
        file = self._file(self._where[name])
        return file.get_slice(name)[region.slices()] if region.shape else file.get_tensor(name)

    def _file(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if name not in self._open:
            try:
                self._open[name] = safe_open(self._directory / name, framework="pt")
            except SafetensorError as error:
                raise CheckpointError(f"{self._directory / name} cannot be read", cause=str(error)) from None
        return self._open[name]
