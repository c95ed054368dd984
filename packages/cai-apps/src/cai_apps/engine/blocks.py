"""Blocks of a paged cache: who holds which, and which may be used again for tokens that begin alike.

A block has room for the keys and values of a fixed number of tokens (Kwon et al., arXiv:2309.06180). A full block is
known by a digest of all tokens up to its end, so that a request whose tokens begin so holds it too and computes
nothing. Blocks that nobody holds keep what they have until the room is needed, the least recently used first.

A request has blocks in each group of layers (`layout`); those that a group's window has left behind are given back.
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

    def knows(self, digest: bytes) -> bool:
        """Return whether a block has the tokens of a digest."""
        return digest in self._blocks

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


class BlockTable:
    """The blocks of one request: in each group of layers one for every `size` tokens.

    Args:
        windows: the window of each group; None: all tokens are seen.

    Attributes:
        columns: the blocks of each group in the order of the tokens; 0 where a window has left one behind.
        passed: the number of those, the first ones of each group.
    """

    def __init__(self, windows: Sequence[int | None]):
        self.windows = windows
        self.columns = [array("i") for _ in windows]
        self.passed = [0] * len(windows)

    def __len__(self) -> int:
        """Return the blocks of a group, those among them that were left behind."""
        return len(self.columns[0])

    def held(self) -> list[int]:
        """Return the blocks of all groups that are held."""
        return [
            block
            for column, passed in zip(self.columns, self.passed, strict=True)
            for block in column[passed:]
        ]

    def fork(self, pool: BlockPool) -> BlockTable:
        """Return a table with the same blocks, which are held once more."""
        other = BlockTable(self.windows)
        other.columns, other.passed = [column[:] for column in self.columns], [*self.passed]
        pool.share(other.held())
        return other

    def grow(self, pool: BlockPool, count: int) -> None:
        """Take blocks until each group has `count`."""
        while len(self) < count:
            for column in self.columns:
                column.append(pool.take())

    def own(self, pool: BlockPool, place: int) -> list[tuple[int, int]]:
        """Take blocks in place of those that others hold too, at one place; return the copies to make."""
        copies = []
        for column in self.columns:
            if pool.holders(column[place]) > 1:
                copies.append((column[place], pool.take()))
                pool.give_back([column[place]])
                column[place] = copies[-1][1]
        return copies

    def pass_by(self, pool: BlockPool, computed: int) -> None:
        """Give back blocks that no token after the first `computed` ones sees."""
        for number, window in enumerate(self.windows):
            if window is not None:
                column, passed = self.columns[number], self.passed[number]
                first = max(0, computed - window + 1) // pool.size
                if first > passed:
                    pool.give_back(column[passed:first][::-1])  # the first are used again first
                    column[passed:first] = array("i", [0] * (first - passed))
                    self.passed[number] = first

    def give_back(self, pool: BlockPool) -> None:
        """Give all blocks back."""
        for column, passed in zip(self.columns, self.passed, strict=True):
            pool.give_back(column[passed:])

    def publish(self, pool: BlockPool, start: int, digests: Sequence[bytes]) -> None:
        """Let others find blocks from place `start` on, given the digests of the tokens up to the end of each."""
        for number, (column, passed) in enumerate(zip(self.columns, self.passed, strict=True)):
            for place, digest in enumerate(digests, start):
                if place >= passed:
                    pool.publish(column[place], _of_group(digest, number))

    @classmethod
    def found(cls, pool: BlockPool, windows: Sequence[int | None], digests: Sequence[bytes]) -> BlockTable:
        """Return a table of blocks, not yet held, that have the first tokens of a request in all groups.

        Args:
            pool: the blocks.
            windows: the window of each group.
            digests: those of the request's full blocks.
        """
        table = cls(windows)
        count = len(digests) if tuple(windows) == (None,) else _common(pool, windows, digests)
        for number, window in enumerate(windows):
            first = _first(count, pool.size, window)
            blocks = pool.lookup([_of_group(digest, number) for digest in digests[first:count]])
            table.columns[number] = array("i", [0] * first + blocks)
            table.passed[number] = first
        return table


def _common(pool: BlockPool, windows: Sequence[int | None], digests: Sequence[bytes]) -> int:
    """Return the most digests after whose tokens every group has the blocks that are seen."""
    best, runs = 0, [0] * len(windows)
    for count, digest in enumerate(digests, 1):
        for number in range(len(windows)):
            is_known = pool.knows(_of_group(digest, number))
            runs[number] = runs[number] + 1 if is_known else 0
        if not any(runs):
            break
        needs = (count - _first(count, pool.size, window) for window in windows)
        if all(run >= blocks for run, blocks in zip(runs, needs, strict=True)):
            best = count
    return best


def _first(count: int, size: int, window: int | None) -> int:
    """Return the first block that the token after `count` blocks sees."""
    return 0 if window is None else max(0, count * size - window + 1) // size


def _of_group(digest: bytes, group: int) -> bytes:
    return digest if group == 0 else digest + bytes([group])
