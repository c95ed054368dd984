"""Checkpoints that commit whole or not at all, load on any layout, and never run code from a file.

A checkpoint is a directory `step-N` with torch DCP's files (`.metadata`, `*.distcp`), `values.json` and a
`manifest.json` of sizes and digests. It is written as `step-N.<save>.tmp` and renamed once everything is on disk; every
file ends with the id of its save, and `save.lock` keeps other jobs out meanwhile.
"""

from cai_mesh.checkpoint.assembly import Assembly, concatenate, stack
from cai_mesh.checkpoint.commit import latest, steps
from cai_mesh.checkpoint.hf import load_hf, save_hf, unchanged
from cai_mesh.checkpoint.loading import Contents, contents, load, newest_good
from cai_mesh.checkpoint.lock import Lock
from cai_mesh.checkpoint.manifest import Manifest, verify
from cai_mesh.checkpoint.new_directory import NewDirectory, new_directory
from cai_mesh.checkpoint.saving import Saving, save

__all__ = [
    "Assembly",
    "Contents",
    "Lock",
    "Manifest",
    "NewDirectory",
    "Saving",
    "concatenate",
    "contents",
    "latest",
    "load",
    "load_hf",
    "new_directory",
    "newest_good",
    "save",
    "save_hf",
    "stack",
    "steps",
    "unchanged",
    "verify",
]
