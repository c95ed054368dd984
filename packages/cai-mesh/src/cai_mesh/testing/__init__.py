"""Ranks for tests: a pool of processes that have torch imported, and comparisons with a twin on one device."""

from cai_mesh.testing.comparison import assert_names_kept, assert_same_as_one_device
from cai_mesh.testing.pool import RankError, RankGroup, RankPool, preload, run_ranks

__all__ = [
    "RankError",
    "RankGroup",
    "RankPool",
    "assert_names_kept",
    "assert_same_as_one_device",
    "preload",
    "run_ranks",
]
