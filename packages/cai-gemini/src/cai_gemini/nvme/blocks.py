"""One block of a region between memory and file: alignment, checksum, and the edges of partial requests.

A block is the unit of checksums and of requests to the disk. Whole blocks move between the tensor and the file without
a copy where the tensor's address allows it; the rest goes through the thread's bounce memory.
"""

from __future__ import annotations

import ctypes
import zlib
from dataclasses import dataclass

from cai_gemini.nvme.disk import ScratchFile
from cai_gemini.nvme.errors import NvmeError
from cai_gemini.nvme.memory import Bounce, address_of


@dataclass(frozen=True)
class Block:
    """Part of one request that lies within one block.

    Attributes:
        name: the region's name, for errors.
        index: the block's number in the region.
        position: the block's first byte in the file.
        size: bytes of the block that belong to the region.
        start: first byte of the block that the request covers.
        view: the request's memory for bytes `start` to `start + len(view)` of the block.
    """

    name: str
    index: int
    position: int
    size: int
    start: int
    view: memoryview

    @property
    def whole(self) -> bool:
        """Whether the request covers all of the block."""
        return len(self.view) == self.size


def write_block(
    block: Block, file: ScratchFile, expected: int | None, checksums: bool, bounce: Bounce
) -> tuple[int, int]:
    """Write a block, or the part of it that the request covers.

    Args:
        block: the block and the request's memory for it.
        file: the scratch file.
        expected: the checksum of what the file holds; None: nothing was written there, and it counts as zeros.
        checksums: whether they are kept; otherwise 0 stands for every checksum.
        bounce: scratch memory of at least the block's size and one alignment unit.

    Returns the block's checksum and how many bytes were copied through `bounce`. Raises `OSError`, `NvmeError`.
    """
    if block.whole:
        checksum = zlib.crc32(block.view) if checksums else 0
        views, copied = _views(block, file, bounce)
        if copied:
            _copy(_tail(views, block, copied), block.view[block.size - copied :])
        file.write(views, block.position)
        return checksum, copied
    padded = bounce.view(0, _padded(block.size, file))
    if expected is None:
        _zero(padded)
    else:
        file.read([padded], block.position)
        _verify(block, padded[: block.size], expected, checksums, file)
    _copy(padded[block.start :], block.view)
    checksum = zlib.crc32(padded[: block.size]) if checksums else 0
    file.write([padded], block.position)
    return checksum, len(padded)


def read_block(block: Block, file: ScratchFile, expected: int | None, checksums: bool, bounce: Bounce) -> int:
    """Read a block, or the part of it that the request covers; arguments as for `write_block`.

    All of the block is read and verified in any case. Returns how many bytes were copied through `bounce`. Raises
    `OSError`, and `NvmeError` when the file does not hold what was written.
    """
    if expected is None:
        _zero(block.view)
        return 0
    if block.whole:
        views, copied = _views(block, file, bounce)
        file.read(views, block.position)
        if copied:
            _copy(block.view[block.size - copied :], _tail(views, block, copied))
        _verify(block, block.view, expected, checksums, file)
        return copied
    padded = bounce.view(0, _padded(block.size, file))
    file.read([padded], block.position)
    _verify(block, padded[: block.size], expected, checksums, file)
    _copy(block.view, padded[block.start : block.start + len(block.view)])
    return len(padded)


def _padded(size: int, file: ScratchFile) -> int:
    return -(-size // file.alignment) * file.alignment


def _views(block: Block, file: ScratchFile, bounce: Bounce) -> tuple[list[memoryview], int]:
    """The memory of a whole block as the disk takes it, and how many of its last bytes are in `bounce`."""
    if not file.direct:
        return [block.view], 0
    if address_of(block.view) % file.alignment:
        return [bounce.view(0, _padded(block.size, file))], block.size
    tail = block.size % file.alignment
    if not tail:
        return [block.view], 0
    last = bounce.view(0, file.alignment)
    return [view for view in (block.view[: block.size - tail], last) if len(view)], tail


def _tail(views: list[memoryview], block: Block, copied: int) -> memoryview:
    return views[-1][:copied]


def _verify(block: Block, data: memoryview, expected: int, checksums: bool, file: ScratchFile) -> None:
    if not checksums:
        return
    actual = zlib.crc32(data)
    if actual != expected:
        raise NvmeError(
            f"block {block.index} of {block.name} in {file.path} is not what was written there",
            got=f"checksum {actual:08x} of {block.size} bytes at offset {block.position}",
            expected=f"checksum {expected:08x}",
            cause="the disk or its connection returns damaged data without an error, or the tensor was changed while "
            "it was being written",
            fix="resume from a checkpoint; look at the disk's health (smartctl) and the kernel's log (dmesg)",
        )


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy all of `source` to the start of `target`; other threads run meanwhile."""
    if len(source) > len(target):
        raise ValueError(f"{len(source)} bytes do not fit into {len(target)}")
    ctypes.memmove(address_of(target), address_of(source), len(source))


def _zero(view: memoryview) -> None:
    ctypes.memset(address_of(view), 0, len(view))
