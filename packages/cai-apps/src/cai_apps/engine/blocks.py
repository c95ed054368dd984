"""Blocks of a paged cache: who holds which, and which may be used again for tokens that begin alike.

A block has room for the keys and values of a fixed number of tokens (Kwon et al., arXiv:2309.06180). A full block is
known by a digest of all tokens up to its end, so that a request whose tokens begin so holds it too and computes
nothing. Blocks that nobody holds keep what they have until the room is needed, the least recently used first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from cai_mesh.errors import ConfigError

ROOT = b""
"""The digest of no tokens."""


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the digest of a block's tokens and all before them.

    Args:
        parent: the digest of the block before, or `ROOT`.
        tokens: the ids of the block.
    """
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """Numbers of blocks, each with its holders, and the digests of those that are full.

    Args:
        count: number of blocks.
        size: tokens of a block.

    Attributes:
        count, size: as given.
        hits: tokens that were not computed, as a block had them.
    """

    def __init__(self, count: int, size: int):
        if count < 1 or size < 1:
            raise ConfigError(
                "a cache needs blocks, and blocks tokens",
                got=f"{count} blocks of {size}",
                expected="one at least",
            )
        self.count, self.size, self.hits = count, size, 0
        self._holders = [0] * count
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self._digests: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._idle)

    def holders(self, block: int) -> int:
        """Return how many hold a block."""
        return self._holders[block]

    def take(self) -> int:
        """Return a block that nobody held, the least recently used one; what it had is forgotten."""
        block, _ = self._idle.popitem(last=False)
        digest = self._digests.pop(block, None)
        if digest is not None:
            del self._blocks[digest]
        self._holders[block] = 1
        return block

    def share(self, blocks: Sequence[int]) -> None:
        """Hold blocks once more."""
        for block in blocks:
            if not self._holders[block]:
                del self._idle[block]
            self._holders[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Hold blocks once less, those of one request in their order: the last ones are used again first."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._idle[block] = None
                if block not in self._digests:  # nobody can ask for it
                    self._idle.move_to_end(block, last=False)

    def publish(self, block: int, digest: bytes) -> None:
        """Let others find a block that is full; the first one with a digest stays the one that is found."""
        if digest not in self._blocks and block not in self._digests:
            self._blocks[digest], self._digests[block] = block, digest

    def lookup(self, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks that have the first tokens of a request, given the digests of its full blocks."""
        blocks = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def forget(self) -> None:
        """Forget what all blocks have, as after an update of weights; what is held stays held."""
        self._digests.clear()
        self._blocks.clear()
