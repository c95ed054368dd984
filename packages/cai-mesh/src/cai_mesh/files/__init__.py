"""Files that others have named or may have laid links to, and the headers of files of weights."""

from __future__ import annotations

from cai_mesh.files.headers import check_header, check_weights, header_metadata, weight_map
from cai_mesh.files.paths import (
    DIRECTORY,
    appended,
    folder,
    inside,
    own_folder,
    private_folder,
    refuse_links,
    remove,
    replaced,
    write_text,
)
from cai_mesh.files.published import DIFFUSERS, TRANSFORMERS, WeightFiles, index_name, weight_files

__all__ = [
    "DIFFUSERS",
    "DIRECTORY",
    "TRANSFORMERS",
    "WeightFiles",
    "appended",
    "check_header",
    "check_weights",
    "folder",
    "header_metadata",
    "index_name",
    "inside",
    "own_folder",
    "private_folder",
    "refuse_links",
    "remove",
    "replaced",
    "weight_files",
    "weight_map",
    "write_text",
]
