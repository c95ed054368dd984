"""Numbers of bytes as people write them."""

from __future__ import annotations

import re

from cai_mesh.errors import PlanError

__all__ = ["parse_bytes"]


def parse_bytes(size: int | str) -> int:
    """Bytes of 10, "10GB" (10^9) or "10GiB" (2^30). Raises `PlanError` for anything else."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]?)(i?)B?\s*", str(size), re.IGNORECASE | re.ASCII)
    if match is None or not (match[2] or match[1].isdigit()) or len(match[1]) > 30:
        raise PlanError(
            "not a size", got=repr(size), expected="bytes, or a number with KB, MB, GB, TB, KiB ... TiB"
        )
    power = "KMGT".index(match[2].upper()) + 1 if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
