"""Scripts on ranks that are started as torchrun starts them."""

from __future__ import annotations

from cai_mesh.testing import environments_of_ranks, run_programs


def launched(words: list[str], ranks: int) -> str:
    """What rank 0 of a script prints; one rank is started without torchrun's environment."""
    results = run_programs(words, environments_of_ranks(ranks) if ranks > 1 else [{}])
    for result in results:
        assert result.returncode == 0, result.stderr[-4000:]
    return results[0].stdout
