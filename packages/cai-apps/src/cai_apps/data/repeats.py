"""Contents that come again, counted by 8 bytes of a digest each."""

from __future__ import annotations

import hashlib
import json
from typing import Any


class Repeats:
    """A count of contents that were there before.

    Attributes:
        count: the number of those that came again.
    """

    def __init__(self):
        self._digests: set[bytes] = set()
        self.count = 0

    def add(self, text: str) -> bool:
        """Note a text; return whether it was there before."""
        digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
        is_repeat = digest in self._digests
        self._digests.add(digest)
        self.count += is_repeat
        return is_repeat

    def add_value(self, value: Any) -> bool:
        """Note a value of JSON, whose order of keys does not count; return whether it was there before."""
        return self.add(json.dumps(value, sort_keys=True, default=str))
