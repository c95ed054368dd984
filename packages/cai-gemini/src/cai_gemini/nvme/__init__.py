"""The disk tier: tensors in preallocated scratch files on NVMe, moved in the background, never stale."""

from cai_gemini.nvme.errors import NvmeError
from cai_gemini.nvme.store import Handle, NvmeStore, Region
from cai_gemini.nvme.streaming import stream
from cai_gemini.nvme.syscalls import FileSystem, Syscalls

__all__ = ["FileSystem", "Handle", "NvmeError", "NvmeStore", "Region", "Syscalls", "stream"]
